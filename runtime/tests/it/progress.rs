//! The progress thread: what is deferred goes on beside other work, in order, and nothing hangs when it fails.

use crate::lab::{dense, mail};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::types::Reduction;
use shardc_runtime::alarm::Alarm;
use shardc_runtime::messages::Messages;
use shardc_runtime::progress::Progress;
use shardc_runtime::transport::{Gathered, Reduced, Region, Scattered, Transport};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const TP: AtomSet = AtomSet(1);
/// Long enough for all that does not hang.
const LONG: Duration = Duration::from_secs(60);

/// The ends of two ranks, and their alarms.
fn ends(timeout: Duration) -> Vec<(Progress, Arc<Alarm>)> {
    let mesh = Mesh::new(&[("tp", 2)]).unwrap();
    let all = mail::Office::default();
    let one = |r| {
        let alarm = Arc::<Alarm>::default();
        let end = Messages::new(&mesh, r, mail::Mail::new(r, &all), timeout, alarm.clone());
        (Progress::new(Box::new(end), alarm.clone()).unwrap(), alarm)
    };
    (0..2).map(one).collect()
}

/// Both ranks at once.
fn both(first: impl FnOnce(Progress) + Send, second: impl FnOnce(Progress) + Send) {
    let mut all = ends(LONG).into_iter().map(|x| x.0);
    let (a, b) = (all.next().unwrap(), all.next().unwrap());
    std::thread::scope(|s| {
        s.spawn(move || first(a));
        s.spawn(move || second(b));
    });
}

/// SAFETY of these tests: vectors outlive the transports' use of them.
fn region(x: &mut [f32]) -> Region {
    // SAFETY: the block is the whole slice; see above.
    unsafe { Region::new(x.as_mut_ptr(), &dense(&[x.len()])) }
}

fn sum(end: &mut Progress, x: &mut [f32]) {
    let fold = Reduction::Sum;
    end.all_reduce(TP, &[Reduced { fold, from: region(x), to: region(x) }]).unwrap();
}

fn pair() -> (Sender<()>, Mutex<Receiver<()>>) {
    let (say, hear) = channel();
    (say, Mutex::new(hear))
}

/// The other rank comes only when this one has gone on: who waited where the collective begins would wait for
/// ever.
#[test]
fn what_is_deferred_is_not_waited_for() {
    let (say, hear) = pair();
    both(
        move |mut end| {
            let mut x = vec![1.0; 5000];
            let before = Instant::now();
            end.defer();
            sum(&mut end, &mut x);
            say.send(()).unwrap();
            let took = end.finish(0).unwrap().expect("when it was done");
            assert!(before <= took.begun && took.begun <= took.done && took.done <= Instant::now());
            assert!(x == vec![3.0; 5000]);
            assert!(end.finish(0).unwrap().is_none(), "nothing is left");
        },
        move |mut end| {
            hear.lock().unwrap().recv().unwrap();
            let mut x = vec![2.0; 5000];
            sum(&mut end, &mut x);
            assert!(x == vec![3.0; 5000]);
        },
    );
}

/// What is called behind two that are deferred comes after them; other ranks need not defer the same.
#[test]
fn operations_keep_their_order() {
    let each = |own: f32, defers: bool| {
        move |mut end: Progress| {
            for _ in 0..50 {
                let (mut x, mut y) = (vec![own; 3], vec![own * 10.0; 3000]);
                let (mut a, mut b) = (vec![0.0; 3], vec![0.0; 3]);
                for all in [&mut x[..], &mut y] {
                    if defers {
                        end.defer();
                    }
                    sum(&mut end, all);
                }
                // It reads what the first one makes.
                let to = vec![region(&mut a), region(&mut b)];
                end.all_gather(TP, &[Gathered { from: region(&mut x), to }]).unwrap();
                assert_eq!((a, b), (vec![3.0; 3], vec![3.0; 3]));
                assert!(y == vec![30.0; 3000]);
                (0..2).for_each(|_| assert_eq!(end.finish(0).unwrap().is_some(), defers));
            }
        }
    };
    both(each(1.0, true), each(2.0, false));
}

/// A message of the tests' post is moved by its receiver only: one that does nothing but has posted it.
#[test]
fn what_was_posted_arrives_while_nobody_waits() {
    let (say, hear) = pair();
    both(
        move |mut end| {
            let mut x = vec![7.0; 9];
            end.barrier(TP).unwrap();
            end.send(1, &region(&mut x)).unwrap();
            end.sent(1).unwrap();
            say.send(()).unwrap();
        },
        move |mut end| {
            let mut x = vec![0.0; 9];
            let to = region(&mut x);
            end.post_recv(0, &to).unwrap();
            end.barrier(TP).unwrap();
            hear.lock().unwrap().recv().unwrap();
            end.recv(0, &to).unwrap();
            assert_eq!(x, [7.0; 9]);
        },
    );
}

/// A member that does not come is named where the collective is waited for, and everything later fails alike.
#[test]
fn what_fails_is_told_where_it_is_waited_for() {
    let mut all = ends(Duration::from_millis(100));
    let (end, _) = &mut all[0];
    let mut x = vec![1.0; 3];
    end.defer();
    sum(end, &mut x);
    let why = end.finish(0).map(|_| ()).expect_err("nobody came");
    assert!(why.message.contains("for ranks [1]"), "{}", why.message);
    let later = end.barrier(TP).expect_err("it has failed");
    assert_eq!(later.message, why.message);
}

/// An end that cannot do anything, or panics, and how often it was asked.
struct Broken(Arc<AtomicUsize>, bool);

impl Transport for Broken {
    fn rank(&self) -> usize {
        0
    }
    fn world(&self) -> usize {
        2
    }
    fn barrier(&mut self, _: AtomSet) -> Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        assert!(!self.1, "the end is broken");
        Err(Diag::new("rank-failed", "the end is broken"))
    }
    fn all_reduce(&mut self, axes: AtomSet, _: &[Reduced]) -> Result<()> {
        self.barrier(axes)
    }
    fn all_gather(&mut self, axes: AtomSet, _: &[Gathered]) -> Result<()> {
        self.barrier(axes)
    }
    fn reduce_scatter(&mut self, axes: AtomSet, _: &[Scattered]) -> Result<()> {
        self.barrier(axes)
    }
    fn all_to_all(&mut self, axes: AtomSet, _: &[Region], _: &[Region]) -> Result<()> {
        self.barrier(axes)
    }
    fn all_to_all_v(&mut self, axes: AtomSet, _: &[Vec<Region>], _: &[Vec<Region>]) -> Result<()> {
        self.barrier(axes)
    }
    fn permute(&mut self, axes: AtomSet, _: usize, _: &Region, _: &Region) -> Result<()> {
        self.barrier(axes)
    }
    fn broadcast(&mut self, axes: AtomSet, _: usize, _: &Region) -> Result<()> {
        self.barrier(axes)
    }
    fn send(&mut self, _: usize, _: &Region) -> Result<()> {
        self.barrier(TP)
    }
    fn sent(&mut self, _: usize) -> Result<()> {
        self.barrier(TP)
    }
    fn recv(&mut self, _: usize, _: &Region) -> Result<()> {
        self.barrier(TP)
    }
    fn abort(&mut self, _: Diag) {}
}

/// After the first failure nothing is tried, each try of which may take as long as a rank is waited for.
#[test]
fn nothing_is_done_after_a_failure() {
    let asked = Arc::new(AtomicUsize::new(0));
    let broken = Box::new(Broken(asked.clone(), false));
    let mut end = Progress::new(broken, Arc::default()).unwrap();
    let mut x = vec![1.0; 3];
    let queued = (0..10).filter(|_| {
        end.defer();
        let (fold, from, to) = (Reduction::Sum, region(&mut x), region(&mut x));
        end.all_reduce(TP, &[Reduced { fold, from, to }]).is_ok()
    });
    let queued = queued.count();
    assert!(end.barrier(TP).is_err() && end.send(1, &region(&mut x)).is_err());
    assert!(queued > 0 && (0..queued).all(|_| end.finish(0).is_err()));
    assert_eq!(asked.load(Ordering::Relaxed), 1);
}

/// A panic of the thread is one of the rank, with its words; and it hangs nobody.
#[test]
fn a_panic_is_passed_on() {
    let broken = Box::new(Broken(Arc::default(), true));
    let mut end = Progress::new(broken, Arc::default()).unwrap();
    let mut x = vec![1.0; 3];
    end.defer();
    sum(&mut end, &mut x);
    let passed = catch_unwind(AssertUnwindSafe(|| end.finish(0).map(|_| ())));
    let text = passed.expect_err("a panic");
    assert_eq!(text.downcast_ref::<&str>(), Some(&"the end is broken"));
    assert!(end.barrier(TP).is_err());
}

/// Who is told to stop, or leaves, waits no longer.
#[test]
fn nobody_waits_for_a_job_that_has_ended() {
    for leaves in [false, true] {
        let mut all = ends(Duration::from_secs(3600));
        let (mut end, alarm) = all.remove(0);
        let mut x = vec![1.0; 3];
        end.defer();
        sum(&mut end, &mut x);
        assert!(!alarm.is_rung());
        if leaves {
            drop(end);
        } else {
            end.abort(Diag::new("rank-failed", "rank 0 gave up"));
            let why = end.finish(0).map(|_| ()).expect_err("it was told to stop");
            assert_eq!(why.message, "another rank failed");
        }
        assert!(alarm.is_rung());
    }
}
