//! The transport between processes with a device each, by NCCL.
//!
//! Every group of the plan has a communicator, split from that of all ranks, and so has every
//! direction in which two ranks of a pipeline send, with a stream of its own: what waits for one rank
//! is not in the way of another. Nothing here waits: calls queue work, on the stream of collectives or
//! of a direction, behind what the rank's stream has so far, and that goes on behind them, at once or
//! where it needs them. What is not adjacent in memory passes through scratch memory.
//!
//! NCCL connects two ranks when they first exchange something, and waits there for both: so every
//! direction carries a byte at the start, one after the other, in the same order on all ranks.
//!
//! NCCL orders sums as it likes, the same way in every run on the same devices.

mod library;

pub use library::Id;

use super::arena::Arena;
use super::device::{Event, Stream};
use super::movement::OnDevice;
use crate::alarm::{Alarm, Call};
use crate::region::Region;
use crate::threads::Mover;
use crate::transport::{Reduced, Transport};
use library::{Comm, Data, DataType, Fold, Library, Queue};
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::kernel::Elem;
use shardc_ir::mesh::AtomSet;
use shardc_ir::plan::Plan;
use shardc_ir::types::Reduction;
use smallvec::SmallVec;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Places in scratch memory begin at multiples of so many bytes.
const ALIGN: usize = 256;

/// What NCCL calls itself, as 22605 for 2.26.5.
///
/// # Errors
/// `missing-library`.
pub fn version() -> Result<i32> {
    Library::get()?.version()
}

/// By which all processes of a job find each other; one makes it, all get it.
///
/// # Errors
/// `missing-library`, and those of NCCL.
pub fn id() -> Result<Id> {
    Library::get()?.unique_id()
}

/// The ranks of a group.
struct Group {
    comm: Arc<Comm>,
    me: usize,
    ways: usize,
}

/// One direction between two ranks.
struct Edge {
    comm: Arc<Comm>,
    stream: Arc<Stream>,
    /// Sends that were not waited for.
    offers: VecDeque<Event>,
}

/// Operations that were queued, by their numbers, the oldest first.
type UnderWay = Arc<Mutex<VecDeque<(Call, Event)>>>;

/// One rank's end.
pub struct Nccl {
    rank: usize,
    ranks: usize,
    /// Of the rank's kernels, and of collectives.
    main: Arc<Stream>,
    stream: Arc<Stream>,
    mover: OnDevice,
    groups: BTreeMap<AtomSet, Group>,
    to: BTreeMap<usize, Edge>,
    from: BTreeMap<usize, Edge>,
    scratch: Option<(Arena, usize)>,
    alarm: Arc<Alarm>,
    /// The next collective is deferred; and those that were, the oldest first.
    defers: bool,
    deferred: VecDeque<Event>,
    under_way: UnderWay,
    /// Operations so far.
    calls: Call,
}

/// Where the elements of some regions lie one after the other.
#[derive(Clone, Copy)]
struct Laid {
    at: u64,
    /// True if that is where they are; else it is scratch memory.
    own: bool,
}

/// A job's ends: how long they wait, and whom they tell.
pub(super) struct Job<'a> {
    pub id: &'a Id,
    pub timeout: Duration,
    pub alarm: Arc<Alarm>,
}

impl Nccl {
    /// The end of a rank of a plan; all ranks call it. `main` is the stream of the rank's kernels, and
    /// `mover` moves what is on `stream`, that of collectives.
    ///
    /// # Errors
    /// Those of NCCL and of the driver.
    pub(super) fn connect(
        plan: &Plan,
        rank: usize,
        job: &Job,
        main: &Arc<Stream>,
        (stream, mover): (Arc<Stream>, OnDevice),
    ) -> Result<Nccl> {
        let mesh = &plan.module.mesh;
        main.device.bind()?;
        let all = Comm::of_all(job.id, rank, mesh.ranks(), &job.alarm)?;
        let mut comms = vec![];
        let mut groups = BTreeMap::new();
        // Every rank splits for all of them, in one order.
        for axes in plan.groups() {
            let members = mesh.group(axes, rank);
            let me = members.iter().position(|&r| r == rank).expect("a rank is in its group");
            let name = format!("rank {rank} of {}", mesh.names(axes, "+"));
            let comm = Arc::new(all.part(Some(members[0]), me, name)?.expect("it has a number"));
            comms.push(comm.clone());
            groups.insert(axes, Group { comm, me, ways: members.len() });
        }
        let (mut to, mut from) = (BTreeMap::<usize, Edge>::new(), BTreeMap::new());
        let byte = Arena::new(main, 1, false)?;
        main.wait()?;
        let class = plan.class_of(rank);
        for (sender, receiver) in plan.edges() {
            let other = plan.peer(rank, if class == sender { receiver } else { sender });
            let (number, name) = match (class == sender, class == receiver) {
                (true, _) => (Some(rank), format!("rank {rank}, which sends to rank {other}")),
                (_, true) => (Some(other), format!("rank {rank}, which receives of rank {other}")),
                _ => (None, format!("rank {rank}, which is not part of it")),
            };
            let key = usize::from(class == receiver);
            let Some(comm) = all.part(number, key, name)?.map(Arc::new) else { continue };
            comms.push(comm.clone());
            let (stream, first) = (Stream::new(&main.device)?, raw(byte.address(0), 1));
            let queue = stream.stream.cast();
            // SAFETY: the byte lives until the streams are done, and has no meaning.
            unsafe {
                match class == sender {
                    true => comm.send(first, 1, queue)?,
                    false => comm.recv(first, 0, queue)?,
                }
            }
            let edge = Edge { comm, stream, offers: VecDeque::new() };
            if class == sender { &mut to } else { &mut from }.insert(other, edge);
        }
        if let Err(d) = met(rank, job, to.iter().chain(&from)) {
            // What is queued may never end: nothing that it uses is freed.
            job.alarm.ring();
            std::mem::forget(byte);
            return Err(d);
        }
        drop(byte);
        comms.push(Arc::new(all));
        let (alarm, timeout) = (job.alarm.clone(), job.timeout);
        let under_way = UnderWay::default();
        let oldest = under_way.clone();
        alarm.ask(Box::new(move || {
            let mut all = oldest.lock().unwrap_or_else(PoisonError::into_inner);
            while all.front().is_some_and(|x| is_done(&x.1)) {
                all.pop_front();
            }
            all.front().map(|x| x.0)
        }));
        let watched = alarm.clone();
        // The oldest operation that is not done, and since when it is that.
        let seen = Mutex::new((None, Duration::ZERO));
        main.watch(Box::new(move |waited| {
            if watched.is_rung() {
                return Err(failure("another rank failed".into()));
            }
            comms.iter().try_for_each(|c| c.check_async())?;
            let oldest = watched.oldest();
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            // A rank's own kernels may take any time.
            if oldest.is_none() || oldest != seen.0 || waited < seen.1 {
                *seen = (oldest, waited);
            }
            if waited - seen.1 < timeout {
                return Ok(());
            }
            let s = timeout.as_secs_f64();
            let slow = format!("if other ranks are only slow, run with --timeout {}", s * 10.0);
            Err(failure(format!("rank {rank} waited {s} s for its device")).help(slow))
        }));
        Ok(Nccl {
            rank,
            ranks: mesh.ranks(),
            main: main.clone(),
            stream,
            mover,
            groups,
            to,
            from,
            scratch: None,
            alarm,
            defers: false,
            deferred: VecDeque::new(),
            under_way,
            calls: 0,
        })
    }

    /// Elements of regions that lie together, and scratch memory for those that do not: each list as
    /// one row of elements.
    fn lay(&mut self, rows: &[&[Region]]) -> Result<SmallVec<[Laid; 4]>> {
        let mut end = 0;
        let mut places: SmallVec<[Laid; 4]> = SmallVec::new();
        for row in rows {
            if let Some(first) = adjacent(row) {
                places.push(Laid { at: first, own: true });
                continue;
            }
            places.push(Laid { at: end as u64, own: false });
            end += row.iter().map(bytes).sum::<usize>().next_multiple_of(ALIGN);
        }
        if end > self.scratch.as_ref().map_or(0, |s| s.1) {
            self.scratch = None;
            self.scratch = Some((Arena::new(&self.stream, end, false)?, end));
        }
        let base = self.scratch.as_ref().map_or(0, |s| s.0.address(0));
        places.iter_mut().filter(|p| !p.own).for_each(|p| p.at += base);
        Ok(places)
    }

    /// Copies rows to where they were laid, or back.
    ///
    /// # Safety
    /// Memory of regions is valid until the stream is done.
    unsafe fn copy(&mut self, rows: &[&[Region]], places: &[Laid], back: bool) -> Result<()> {
        for (row, place) in rows.iter().zip(places).filter(|x| !x.1.own) {
            let mut at = place.at;
            for r in row.iter() {
                // SAFETY: `lay` has made room for all.
                unsafe {
                    let copy = Region::adjacent(at as *mut f32, r.elem(), r.len());
                    let (from, to) = if back { (&copy, r) } else { (r, &copy) };
                    self.mover.copy(from, to, 0..r.len())?;
                }
                at += bytes(r) as u64;
            }
        }
        Ok(())
    }

    /// Queues a collective of a group: `f` gets its members, where the rows of operands and of results
    /// were laid, and the queue.
    ///
    /// # Safety
    /// As for [`Region::new`], until the stream is done.
    unsafe fn collective(
        &mut self,
        axes: AtomSet,
        from: &[&[Region]],
        to: &[&[Region]],
        f: impl FnOnce(&Group, &[Laid], &[Laid], Queue) -> Result<()>,
    ) -> Result<()> {
        let begun = self.main.mark()?;
        self.stream.after(&begun)?;
        let places = self.lay(&[from, to].concat())?;
        let (operands, results) = places.split_at(from.len());
        // SAFETY: by the caller.
        unsafe { self.copy(from, operands, false)? };
        let group = self.groups.get(&axes).ok_or_else(|| failure("no such group".into()))?;
        f(group, operands, results, self.stream.stream.cast())?;
        // SAFETY: by the caller.
        unsafe { self.copy(to, results, true)? };
        let done = self.stream.mark()?;
        if std::mem::take(&mut self.defers) {
            self.deferred.push_back(self.stream.mark()?);
            self.begun(done);
            return Ok(());
        }
        self.follow(done)
    }

    /// The rank's stream goes on after an operation.
    fn follow(&mut self, done: Event) -> Result<()> {
        self.main.after(&done)?;
        self.begun(done);
        Ok(())
    }

    /// Counts an operation.
    fn begun(&mut self, done: Event) {
        self.calls += 1;
        let mut all = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        while all.front().is_some_and(|x| is_done(&x.1)) {
            all.pop_front();
        }
        all.push_back((self.calls, done));
    }

    fn unknown<T>(&self, other: usize) -> Result<T> {
        let message = format!("the plan of rank {} has nothing for rank {other}", self.rank);
        Err(failure(message))
    }
}

/// True if work is known to be done: errors are told by who waits for the stream.
fn is_done(work: &Event) -> bool {
    work.done().unwrap_or(false)
}

/// Waits until something has passed along every direction.
fn met<'a>(
    rank: usize,
    job: &Job,
    edges: impl Iterator<Item = (&'a usize, &'a Edge)>,
) -> Result<()> {
    let since = Instant::now();
    for (other, edge) in edges {
        let passed = edge.stream.mark()?;
        while !passed.done()? {
            edge.comm.check_async()?;
            if job.alarm.is_rung() {
                return Err(failure("another rank failed".into()));
            }
            if since.elapsed() > job.timeout {
                let s = job.timeout.as_secs_f64();
                let message = format!("rank {rank} waited {s} s for rank {other} at the start");
                return Err(failure(message));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

fn failure(message: String) -> Diag {
    Diag::new("rank-failed", message)
        .exit(Exit::RankFailed)
        .rule("all ranks of a group run the same collectives, in the same order")
        .help("run again with 1 rank to see whether the program itself fails")
}

fn bytes(r: &Region) -> usize {
    r.len() * r.elem().bytes()
}

/// The address of the first element of regions that lie one after the other.
fn adjacent(row: &[Region]) -> Option<u64> {
    let mut first = None;
    let mut next = None;
    for r in row.iter().filter(|r| !r.is_empty()) {
        let at = r.together(&(0..r.len()))? as u64;
        if next.is_some_and(|n| n != at) {
            return None;
        }
        first = first.or(Some(at));
        next = Some(at + bytes(r) as u64);
    }
    first.or(Some(0))
}

/// Some bytes at an address.
fn raw(at: u64, count: usize) -> Data {
    Data { at, count, kind: DataType::Byte }
}

/// Elements to be folded.
fn numbers(at: u64, count: usize, elem: Elem) -> Data {
    let kind = match elem {
        Elem::F32 => DataType::F32,
        Elem::BF16 => DataType::BF16,
        Elem::I32 => DataType::I32,
    };
    Data { at, count, kind }
}

fn folded(how: Reduction) -> Fold {
    match how {
        Reduction::Sum => Fold::Sum,
        Reduction::Max => Fold::Max,
        Reduction::Min => Fold::Min,
    }
}

fn rows(regions: &[Region]) -> Vec<&[Region]> {
    regions.iter().map(std::slice::from_ref).collect()
}

// Of all unsafe calls below: the plan keeps operands and results as they are until the rank's stream
// has passed what was queued.
impl Transport for Nccl {
    fn rank(&self) -> usize {
        self.rank
    }
    fn world(&self) -> usize {
        self.ranks
    }

    fn barrier(&mut self, axes: AtomSet) -> Result<()> {
        let nothing = |g: &Group, _: &[Laid], _: &[Laid], queue| {
            g.comm.together(|| {
                (0..g.ways).filter(|&p| p != g.me).try_for_each(|p| unsafe {
                    g.comm.send(raw(0, 0), p, queue)?;
                    g.comm.recv(raw(0, 0), p, queue)
                })
            })
        };
        unsafe { self.collective(axes, &[], &[], nothing) }
    }

    fn all_reduce(&mut self, axes: AtomSet, tensors: &[Reduced]) -> Result<()> {
        let from: Vec<&[Region]> = tensors.iter().map(|t| std::slice::from_ref(&t.from)).collect();
        let to: Vec<&[Region]> = tensors.iter().map(|t| std::slice::from_ref(&t.to)).collect();
        let fold = |g: &Group, from: &[Laid], to: &[Laid], queue| {
            g.comm.together(|| {
                tensors.iter().zip(from.iter().zip(to)).try_for_each(|(t, (from, to))| unsafe {
                    let data = numbers(from.at, t.from.len(), t.from.elem());
                    g.comm.all_reduce(data, to.at, folded(t.fold), queue)
                })
            })
        };
        unsafe { self.collective(axes, &from, &to, fold) }
    }

    fn all_gather(&mut self, axes: AtomSet, from: &Region, to: &[Region]) -> Result<()> {
        let n = bytes(from);
        let from = std::slice::from_ref(from);
        let gather = |g: &Group, from: &[Laid], to: &[Laid], queue| unsafe {
            g.comm.all_gather(raw(from[0].at, n), to[0].at, queue)
        };
        unsafe { self.collective(axes, &[from], &[to], gather) }
    }

    fn reduce_scatter(
        &mut self,
        axes: AtomSet,
        fold: Reduction,
        from: &[Region],
        to: &Region,
    ) -> Result<()> {
        let (own, how) = (std::slice::from_ref(to), folded(fold));
        if from.iter().all(|r| r.len() == to.len()) {
            let scatter = |g: &Group, from: &[Laid], result: &[Laid], queue| unsafe {
                let data = numbers(result[0].at, to.len(), to.elem());
                g.comm.reduce_scatter(from[0].at, data, how, queue)
            };
            return unsafe { self.collective(axes, &[from], &[own], scatter) };
        }
        // Members get unequal parts.
        let each = |g: &Group, laid: &[Laid], result: &[Laid], queue| {
            g.comm.together(|| {
                let parts = from.iter().zip(laid).enumerate().filter(|x| !x.1.0.is_empty());
                parts.into_iter().try_for_each(|(root, (r, place))| unsafe {
                    let data = numbers(place.at, r.len(), r.elem());
                    g.comm.reduce(data, result[0].at, how, root, queue)
                })
            })
        };
        unsafe { self.collective(axes, &rows(from), &[own], each) }
    }

    fn all_to_all(&mut self, axes: AtomSet, from: &[Region], to: &[Region]) -> Result<()> {
        let one = |r: &[Region]| r.iter().map(|r| vec![r.clone()]).collect::<Vec<_>>();
        self.all_to_all_v(axes, &one(from), &one(to))
    }

    fn all_to_all_v(
        &mut self,
        axes: AtomSet,
        from: &[Vec<Region>],
        to: &[Vec<Region>],
    ) -> Result<()> {
        let operands: Vec<&[Region]> = from.iter().map(Vec::as_slice).collect();
        let results: Vec<&[Region]> = to.iter().map(Vec::as_slice).collect();
        let sum = |row: &[Region]| row.iter().map(bytes).sum();
        let swap = |g: &Group, out: &[Laid], into: &[Laid], queue| {
            g.comm.together(|| {
                (0..g.ways).try_for_each(|p| unsafe {
                    let (out, into) = (raw(out[p].at, sum(&from[p])), raw(into[p].at, sum(&to[p])));
                    if out.count > 0 {
                        g.comm.send(out, p, queue)?;
                    }
                    if into.count > 0 { g.comm.recv(into, p, queue) } else { Ok(()) }
                })
            })
        };
        unsafe { self.collective(axes, &operands, &results, swap) }
    }

    fn permute(&mut self, axes: AtomSet, shift: usize, from: &Region, to: &Region) -> Result<()> {
        let (out, into) = (bytes(from), bytes(to));
        let (from, to) = (std::slice::from_ref(from), std::slice::from_ref(to));
        let pass = |g: &Group, from: &[Laid], to: &[Laid], queue| {
            let next = (g.me + shift) % g.ways;
            let last = (g.me + g.ways - shift % g.ways) % g.ways;
            g.comm.together(|| unsafe {
                g.comm.send(raw(from[0].at, out), next, queue)?;
                g.comm.recv(raw(to[0].at, into), last, queue)
            })
        };
        unsafe { self.collective(axes, &[from], &[to], pass) }
    }

    fn broadcast(&mut self, axes: AtomSet, root: usize, data: &Region) -> Result<()> {
        let (n, row) = (bytes(data), std::slice::from_ref(data));
        let give = |g: &Group, from: &[Laid], to: &[Laid], queue| unsafe {
            g.comm.broadcast(raw(from[0].at, n), to[0].at, root % g.ways, queue)
        };
        unsafe { self.collective(axes, &[row], &[row], give) }
    }

    fn send(&mut self, to: usize, data: &Region) -> Result<()> {
        let Some(at) = data.together(&(0..data.len())) else {
            return Err(failure("what is sent does not lie together".into()));
        };
        let begun = self.main.mark()?;
        let Some(edge) = self.to.get_mut(&to) else { return self.unknown(to) };
        edge.stream.after(&begun)?;
        unsafe { edge.comm.send(raw(at as u64, bytes(data)), 1, edge.stream.stream.cast())? };
        edge.offers.push_back(edge.stream.mark()?);
        // It is queued, and nothing waits for it yet.
        self.begun(begun);
        Ok(())
    }

    fn sent(&mut self, to: usize) -> Result<()> {
        let Some(offer) = self.to.get_mut(&to).and_then(|e| e.offers.pop_front()) else {
            return Err(failure(format!("rank {} has sent nothing to rank {to}", self.rank)));
        };
        self.follow(offer)
    }

    fn recv(&mut self, from: usize, data: &Region) -> Result<()> {
        let Some(at) = data.together(&(0..data.len())) else {
            return Err(failure("what is received does not lie together".into()));
        };
        let begun = self.main.mark()?;
        let Some(edge) = self.from.get_mut(&from) else { return self.unknown(from) };
        edge.stream.after(&begun)?;
        unsafe { edge.comm.recv(raw(at as u64, bytes(data)), 0, edge.stream.stream.cast())? };
        let done = edge.stream.mark()?;
        self.follow(done)
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn defer(&mut self) {
        self.defers = true;
    }

    fn finish(&mut self) -> Result<()> {
        self.deferred.pop_front().map_or(Ok(()), |done| self.main.after(&done))
    }

    fn abort(&mut self, _cause: Diag) {
        // Others learn it from those who watch this process.
        self.alarm.ring();
    }
}
