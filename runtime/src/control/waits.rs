//! Whom processes wait for, how long, and what they say then: one of them is stopped or killed at the start or
//! at the end, or strangers fill their ports.

use super::join::call;
use super::tests::{HERE, PROMPT, SECRET, gone, join, knock, terms};
use super::*;
use rustix::process::{Pid, Signal, getpid, kill_process};
use shardc_ir::rng::Stream;
use shardc_testing::{port, samples};
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

/// What this program is to be: its number, of how many, the port of process 0, a folder that they share, where it is
/// struck, and how.
const ROLE: &str = "SHARDC_TEST_STRUCK";
/// Where a process may be stopped or killed, in their order.
const POINTS: [&str; 5] = ["start", "joined", "done", "finished", "left"];

/// No test by itself: a process of a job, whose limits are 2 and 4 s.
#[test]
fn a_struck_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let [me, n, port, folder, at, how] = role.split(' ').collect::<Vec<_>>()[..] else { panic!() };
    let (me, n): (usize, usize) = (me.parse().expect("a number"), n.parse().expect("a number"));
    let strike = |point: &str| {
        let signal = if how == "stop" { Signal::STOP } else { Signal::KILL };
        if point == at {
            kill_process(getpid(), signal).expect("a signal");
            // Another thread may be the first to stop.
            std::thread::sleep(PROMPT);
        }
    };
    strike("start");
    let port = port.parse().expect("a port");
    let door = (me == 0).then(|| Door::open(port, &[HERE]).expect("a port"));
    let c = join((me, n), door, &format!("127.0.0.1:{port}"), terms(SECRET, 4, 2));
    let c = c.unwrap_or_else(|d| {
        eprintln!("{}", d.render());
        std::process::exit(d.exit as i32)
    });
    let ports = c.0.addresses[1..].iter().flatten().map(|a| a.port().to_string());
    println!("ports {}", ports.collect::<Vec<_>>().join(" "));
    strike("joined");
    // For ever, where nobody is struck.
    for _ in 0..if at == "never" { usize::MAX } else { 3 } {
        c.gather(vec![]);
        c.share(vec![]);
    }
    strike("done");
    c.finish().expect("a thread");
    strike("finished");
    // MPI's end waits for all.
    let here = |p: usize| PathBuf::from(folder).join(p.to_string());
    std::fs::write(here(me), "").expect("a file");
    while !(0..n).all(|p| here(p).exists()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    strike("left");
    c.leave();
}

/// Two jobs with one secret, whose processes look for process 0 at one port: one that is called otherwise is not let
/// in, and says why; those of one name join, also behind it.
#[test]
fn a_process_of_another_job_is_refused() {
    let door = Door::open(0, &[HERE]).expect("a port");
    let leader = door.addresses.clone();
    let come = |process: usize, door: Option<Door>, job: &str| {
        let (job, card) = (job.to_string(), format!("card of {process}"));
        let me = Me { process, processes: 2, job, card };
        let print = Box::new(|text: &str| eprintln!("{text}"));
        Control::join(&me, door, &leader, terms(SECRET, 30, 30), Arc::default(), print)
    };
    std::thread::scope(|s| {
        let leads = s.spawn(|| gone(come(0, Some(door), "17.0").unwrap_or_else(|e| panic!("{e}"))));
        for (other, words) in [("18.0", "of that `18.0`"), ("", "of that without a name")] {
            let d = come(1, None, other).err().expect("another job").render();
            assert!(d.contains("process 0 of the job `17.0`") && d.contains(words), "{d}");
        }
        gone(come(1, None, "17.0").unwrap_or_else(|e| panic!("{e}")));
        leads.join().expect("a thread");
    });
}

/// Processes of a job, of which one may be struck.
struct WaitingJob {
    all: Vec<Child>,
    folder: PathBuf,
}

impl WaitingJob {
    fn start(n: usize, name: &str, victim: usize, at: &str, how: &str) -> WaitingJob {
        let own = std::env::current_exe().expect("this program");
        let name = format!("shardc-waits-{}-{name}", std::process::id());
        let (port, folder) = (port(), std::env::temp_dir().join(name));
        std::fs::create_dir_all(&folder).expect("a folder");
        let one = |p: usize| {
            let at = if p == victim || at == "never" { at } else { "-" };
            let mut c = Command::new(&own);
            c.args(["control::waits::a_struck_process", "--exact", "--nocapture"]);
            c.env(ROLE, format!("{p} {n} {port} {} {at} {how}", folder.display()));
            c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            c.spawn().expect("a process")
        };
        WaitingJob { all: (0..n).map(one).collect(), folder }
    }

    /// Waits until all but one have ended: how each has, and what it has said.
    fn ended(&mut self, but: usize) -> Vec<(usize, ExitStatus, String)> {
        let since = Instant::now();
        let others = self.all.iter_mut().enumerate().filter(|c| c.0 != but);
        let one = |(p, c): (usize, &mut Child)| {
            let status = loop {
                match c.try_wait().expect("a child") {
                    Some(status) => break status,
                    None => std::thread::sleep(Duration::from_millis(10)),
                }
                assert!(since.elapsed() < PROMPT * 3, "process {p} waits for ever");
            };
            let mut said = String::new();
            let err = c.stderr.take().expect("a pipe");
            let _ = { err }.read_to_string(&mut said);
            (p, status, said)
        };
        others.map(one).collect()
    }
}

impl Drop for WaitingJob {
    fn drop(&mut self) {
        for c in &mut self.all {
            let _ = c.kill();
            let _ = c.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Strikes a process of three, and looks at how the others end.
fn struck(at: &str, how: &str, victim: usize) {
    let mut job = WaitingJob::start(3, &format!("{at}-{how}-{victim}"), victim, at, how);
    let all = job.ended(victim);
    let said: String = all.iter().map(|x| &*x.2).collect();
    let what = format!("process {victim}, {how} at {at}: {all:?}");
    let code = |s: &ExitStatus| s.code();
    if at == "left" {
        // They have waited for it; whether they see its end is their luck.
        assert!(all.iter().all(|x| [Some(0), Some(6)].contains(&code(&x.1))), "{what}");
        assert!(said.matches("error[").count() <= 1, "{what}");
        return;
    }
    assert!(all.iter().all(|x| code(&x.1) == Some(6)), "{what}");
    if at == "start" {
        for (p, _, said) in &all {
            let errors: Vec<&str> = said.lines().filter(|l| !l.starts_with("warned")).collect();
            let [line] = errors[..] else { panic!("{what}") };
            let own = format!("error[start-timeout]: rank {p} waited 4 s while processes join: ");
            assert!(line.starts_with(&own), "{what}");
            assert!(line.contains(&format!("process {victim} ")), "{what}");
        }
        return;
    }
    assert_eq!(said.matches("error[").count(), 1, "{what}");
    let end = if how == "stop" { "was silent for 2 s" } else { "ended without a word" };
    assert!(said.contains(&format!("process {victim} (card of {victim}) {end}")), "{what}");
    let late = at == "finished";
    assert_eq!(said.contains("all steps are done"), late, "{what}");
    assert_eq!(said.contains("--resume"), !late, "{what}");
}

/// Every point, stopped and killed, of a process that is drawn (`SEED`); every night each.
#[test]
fn whoever_is_struck_at_start_or_end_is_named_and_nobody_waits() {
    let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let draw = Stream::new(seed, "waits", 0);
    let each = |i: usize| match samples(1, 3) {
        1 => vec![(draw.uniform(i as u64) * 3.0) as usize],
        _ => vec![0, 1, 2],
    };
    std::thread::scope(|s| {
        for (i, (at, how)) in POINTS.iter().flat_map(|at| [(at, "stop"), (at, "kill")]).enumerate()
        {
            let run = move |v: usize| struck(at, how, v);
            each(i).into_iter().for_each(|v| drop(s.spawn(move || run(v))));
        }
    });
}

/// Process 0 that is stopped after others have come: they wait no longer than for those that do not come.
#[test]
fn a_process_0_that_says_nothing_more_is_named() {
    let listener = std::net::TcpListener::bind((HERE, 0)).expect("a port");
    let at = listener.local_addr().expect("bound").to_string();
    let leader = at.clone();
    let joins = std::thread::spawn(move || join((1, 2), None, &leader, terms(SECRET, 3, 30)).err());
    let mut acceptor = Acceptor::new(vec![listener], Secret::of(SECRET.as_bytes()));
    let mut came = vec![];
    while came.is_empty() && !joins.is_finished() {
        acceptor.wait();
        came = acceptor.look().expect("random numbers").0;
    }
    let d = joins.join().expect("a thread").expect("nobody answers");
    let own = format!("rank 1 waited 3 s while processes join: process 0 at {at} says nothing");
    assert!(d.code == "start-timeout" && d.message.contains(&own), "{d}");
    assert_eq!(d.exit as i32, 6);
}

static WARNED: Mutex<Vec<String>> = Mutex::new(vec![]);

/// Whoever has another secret, or counts other processes, hears it at once, and so does the user of process 0; that
/// waits on, as strangers end nothing.
#[test]
fn a_wrong_secret_or_number_of_processes_is_told_within_2_s() {
    let door = Door::open(0, &[HERE]).expect("a port");
    let leader = door.addresses.clone();
    let warn = |d: Diag| held(WARNED.lock()).push(d.message);
    std::thread::scope(|s| {
        let to = leader.clone();
        let leads = s.spawn(move || {
            let terms = Terms { warn, ..terms(SECRET, 6, 30) };
            join((0, 3), Some(door), &to, terms)
        });
        let other = terms("another secret of sixteen bytes", 100, 30);
        for (me, terms, why) in [
            ((1, 3), other, "does not know the secret of this job"),
            ((1, 2), terms(SECRET, 100, 30), "process 0 leads 3 processes, this one is of 2"),
        ] {
            let since = Instant::now();
            let d = join(me, None, &leader, terms).err().expect("it does not join");
            assert!(d.code == "cluster" && d.message.contains(why), "{d}");
            assert!(since.elapsed() < Duration::from_secs(4), "{:?}", since.elapsed());
        }
        let d = leads.join().expect("a thread").err().expect("nobody comes");
        assert!(d.message.contains("processes [1, 2] did not come"), "{d}");
    });
    let said = held(WARNED.lock()).join("\n");
    assert_eq!(said.matches("does not know the secret of this job").count(), 1, "{said}");
    assert_eq!(said.matches("refused: process 0 leads 3 processes").count(), 1, "{said}");
}

/// Silent connections at the ports of ranks: those are accepted and closed while the job runs, and when process 0
/// is lost the others find each other, so that one speaks.
#[test]
fn strangers_at_the_ports_of_ranks_are_in_nobodys_way() {
    let mut job = WaitingJob::start(4, "ports", 0, "never", "kill");
    let out = BufReader::new(job.all[0].stdout.take().expect("a pipe"));
    let ports = out.lines().map_while(std::io::Result::ok).find_map(|l| {
        Some(l.split_once("ports ")?.1.split(' ').map(|p| p.parse().expect("a port")).collect())
    });
    let ports: Vec<u16> = ports.expect("ports");
    let silent = |port: u16| {
        let at = SocketAddr::new(HERE, port);
        let one = move |_| TcpStream::connect_timeout(&at, Duration::from_millis(100)).ok();
        (0..200).filter_map(one).collect::<Vec<_>>()
    };
    let _held: Vec<_> = ports.into_iter().map(silent).collect();
    let pid = Pid::from_child(&job.all[0]);
    kill_process(pid, Signal::KILL).expect("a signal");
    let all = job.ended(0);
    let said: String = all.iter().map(|x| &*x.2).collect();
    assert_eq!(said.matches("error[").count(), 1, "{all:?}");
    for other in [1, 2, 3] {
        assert!(said.contains(&format!("why: rank {other} is ")), "{all:?}");
    }
}

/// Of those that come to a listener, the ones are kept that have come furthest, and as many wait outside as the
/// system lets.
#[test]
fn silent_ones_push_nobody_out() {
    let door = Door::open(0, &[HERE]).expect("a port");
    let at: SocketAddr = door.addresses.parse().expect("an address");
    // Nobody is accepted yet.
    let mut held = vec![];
    for i in 0..400 {
        let one = TcpStream::connect_timeout(&at, Duration::from_millis(500));
        held.push(one.unwrap_or_else(|e| panic!("connection {i} is not let in: {e}")));
    }
    let secret = Secret::of(SECRET.as_bytes());
    std::thread::scope(|s| {
        let (opened, answered) = std::sync::mpsc::channel();
        let one = s.spawn(move || {
            let mut link = call(&[at], &Secret::of(SECRET.as_bytes()), PROMPT).expect("a call");
            opened.send(()).expect("the test goes on");
            // It is slower than they.
            std::thread::sleep(Duration::from_millis(300));
            link.0.write(FrameKind::Where, b"here").expect("it was not pushed out");
            link
        });
        let mut acceptor = Acceptor::new(door.listeners_for_test(), secret);
        while answered.try_recv().is_err() {
            assert!(acceptor.look().expect("random numbers").0.is_empty());
        }
        held.clear();
        held.extend((0..400).map(|_| knock(at, b"")));
        let since = Instant::now();
        while acceptor.look().expect("random numbers").0.is_empty() {
            assert!(since.elapsed() < PROMPT, "it was pushed out");
        }
        one.join().expect("a thread");
    });
}

#[test]
fn without_a_secret_the_loopback_interface_alone_is_used() {
    let all = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let door = Door::open(0, &[all]).expect("a port");
    let leader = format!("192.0.2.1:{}", 29500);
    let none = |insecure| Terms { secret: Secret::none(), insecure, ..terms(SECRET, 0, 30) };
    let refused = |r: Result<Control>, code: &str| {
        let d = r.err().expect("refused");
        assert_eq!(d.code, code, "{d}");
    };
    refused(join((0, 2), Some(door), &leader, none(false)), "no-secret");
    refused(join((1, 2), None, &leader, none(false)), "no-secret");
    // With leave of the user, it is only that nobody comes.
    let door = Door::open(0, &[all]).expect("a port");
    refused(join((0, 2), Some(door), &leader, none(true)), "start-timeout");
    // On the loopback interface, none is needed.
    let door = Door::open(0, &[HERE]).expect("a port");
    let leader = door.addresses.clone();
    std::thread::scope(|s| {
        let at = leader.clone();
        let long = || Terms { timeout: PROMPT, ..none(false) };
        let one = s.spawn(move || gone(join((1, 2), None, &at, long()).expect("joined")));
        gone(join((0, 2), Some(door), &leader, long()).expect("joined"));
        one.join().expect("a thread");
    });
}

/// A name that has no address yet is said at once, once, and in the last line.
#[test]
fn a_name_without_address_is_told() {
    static SAID: Mutex<Vec<String>> = Mutex::new(vec![]);
    let terms = Terms { warn: |d| held(SAID.lock()).push(d.render()), ..terms(SECRET, 1, 30) };
    let d = join((1, 2), None, "bad..host:29613", terms).err().expect("no process 0");
    let said = held(SAID.lock()).clone();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("bad..host:29613 has no address: "), "{said:?}");
    assert!(
        d.code == "start-timeout" && d.message.contains("bad..host:29613 has no address: "),
        "{d}"
    );
}
