//! The transport between threads of one process: operands are read where they lie, by a [`Mover`]
//! that knows what memory they are in.
//!
//! An operation is: publish where my data is, wait for the others, read theirs, wait until all have
//! read. A sum moves a ring's bytes: each member folds its own chunk and then reads the others'.
//!
//! Work of a device is only queued: whoever waits leaves a mark behind what it has queued, and what it
//! queues from then on begins after the others' marks. Threads meet to exchange marks; none waits for a
//! device.

use crate::hub::{Boxes, Call, Group, Hub, Mailbox, Offers, held};
use crate::region::{self, chunk, join, split};
use crate::transport::{Reduced, Region, Transport};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::Elem;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::types::Reduction;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

/// Sums of at most this many elements are published by value and folded whole by every member: one
/// wait instead of three.
const SMALL: usize = 2048;

/// Copies and folds regions of ranks whose memory this one can read.
pub trait Mover: Send {
    /// True if regions are memory of this process, and what was called is done. Else it is queued.
    const AT_ONCE: bool;
    /// The end of what a rank has queued up to some moment.
    type Mark: Send + Sync;
    /// Marks the end of everything that this rank has queued so far.
    ///
    /// # Errors
    /// Those of the device.
    fn mark(&mut self) -> Result<Self::Mark>;
    /// What this rank queues from now on begins after a mark of another.
    ///
    /// # Errors
    /// Those of the device.
    fn after(&mut self, mark: &Self::Mark) -> Result<()>;
    /// Writes the elements of `from` in this range over those of `to`, in order; between f32 and
    /// bf16 they are converted.
    ///
    /// # Safety
    /// Both have at least `range.end` elements, nobody writes `from` or uses `to` before the next
    /// mark of this rank.
    unsafe fn copy(&mut self, from: &Region, to: &Region, range: Range<usize>) -> Result<()>;
    /// Folds the elements of all of `from` in this range, from the left, into those of `to`; all
    /// have one element type. Sums are f32, and rounded at the end if that is bf16.
    ///
    /// # Safety
    /// As for [`Mover::copy`]; `to` may be one of `from`, but overlaps none otherwise.
    unsafe fn fold(
        &mut self,
        how: Reduction,
        from: &[Region],
        to: &Region,
        range: Range<usize>,
    ) -> Result<()>;
}

/// Moves what is in memory of this process, at once.
pub struct OnHost;

impl Mover for OnHost {
    const AT_ONCE: bool = true;
    type Mark = ();
    fn mark(&mut self) -> Result<()> {
        Ok(())
    }
    fn after(&mut self, (): &()) -> Result<()> {
        Ok(())
    }
    unsafe fn copy(&mut self, from: &Region, to: &Region, range: Range<usize>) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { region::copy(from, to, range) };
        Ok(())
    }
    unsafe fn fold(
        &mut self,
        how: Reduction,
        from: &[Region],
        to: &Region,
        range: Range<usize>,
    ) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { region::fold(how, from, to, range) };
        Ok(())
    }
}

/// A group, and a rank's place in it.
type Place<K> = (Arc<Group<K>>, usize);

/// One rank's end.
pub struct Threads<M: Mover = OnHost> {
    mover: M,
    rank: usize,
    hub: Arc<Hub<M::Mark>>,
    groups: BTreeMap<AtomSet, Place<M::Mark>>,
    boxes: Boxes<M::Mark>,
    scratch: Vec<f32>,
}

/// A call that has begun: whom with, at which place, in which round.
struct Begun<K> {
    group: Arc<Group<K>>,
    me: usize,
    round: u64,
}

impl<K> Begun<K> {
    fn calls(&self) -> &[RwLock<Call>] {
        &self.group.calls[self.round as usize % 2]
    }
    fn ways(&self) -> usize {
        self.group.members.len()
    }
}

impl Threads {
    /// One end per rank of the mesh; a member that keeps others waiting longer than `timeout` has
    /// failed.
    pub fn connect(mesh: &Mesh, timeout: Duration) -> Vec<Threads> {
        let movers = (0..mesh.ranks()).map(|_| OnHost).collect();
        Threads::connect_with(mesh, timeout, movers)
    }
}

impl<M: Mover> Threads<M> {
    /// As [`Threads::connect`], for ranks whose memory these move, in the order of ranks.
    pub fn connect_with(mesh: &Mesh, timeout: Duration, movers: Vec<M>) -> Vec<Threads<M>> {
        let ranks = mesh.ranks();
        let hub = Arc::new(Hub {
            mesh: mesh.clone(),
            timeout,
            failed: AtomicBool::new(false),
            cause: Mutex::new(None),
            left: (0..ranks).map(|_| AtomicBool::new(false)).collect(),
            groups: Mutex::new(BTreeMap::new()),
            boxes: Mutex::new(BTreeMap::new()),
        });
        let end = |(rank, mover)| Threads {
            mover,
            rank,
            hub: hub.clone(),
            groups: BTreeMap::new(),
            boxes: BTreeMap::new(),
            scratch: vec![],
        };
        movers.into_iter().enumerate().map(end).collect()
    }

    /// Who tells whether a rank has failed, and why.
    pub(crate) fn witness(&self) -> impl Fn() -> Result<()> + Send + Sync + use<M> {
        let hub = self.hub.clone();
        move || hub.check()
    }

    fn group(&mut self, axes: AtomSet) -> Place<M::Mark> {
        if let Some(g) = self.groups.get(&axes) {
            return g.clone();
        }
        let members = self.hub.mesh.group(axes, self.rank);
        let me = members.iter().position(|&r| r == self.rank).expect("a rank is in its group");
        let mut groups = held(self.hub.groups.lock());
        let new = || Arc::new(Group::new(members.clone()));
        let g = groups.entry(members.clone()).or_insert_with(new).clone();
        drop(groups);
        self.groups.insert(axes, (g.clone(), me));
        (g, me)
    }

    /// The mailbox from one rank to another, of which one is this one.
    fn mailbox(&mut self, from: usize, to: usize) -> Result<Arc<Mailbox<M::Mark>>> {
        if let Some(b) = self.boxes.get(&(from, to)) {
            return Ok(b.clone());
        }
        let (ranks, me) = (self.hub.left.len(), self.rank);
        if from >= ranks || to >= ranks || from == to {
            return self.fail(format!("rank {me} sends from {from} to {to} of {ranks} ranks"));
        }
        let b = held(self.hub.boxes.lock()).entry((from, to)).or_default().clone();
        self.boxes.insert((from, to), b.clone());
        Ok(b)
    }

    /// Publishes a call and waits until all members have.
    fn begin(
        &mut self,
        axes: AtomSet,
        name: &'static str,
        fill: impl FnOnce(&mut Call),
    ) -> Result<Begun<M::Mark>> {
        let (group, me) = self.group(axes);
        let c = Begun { round: group.round.load(Ordering::Acquire), group, me };
        {
            let mut call = held(c.calls()[me].write());
            call.name = name;
            call.folds.clear();
            call.regions.clear();
            call.starts.clear();
            call.data.clear();
            fill(&mut call);
        }
        self.wait(&c)?;
        for (p, call) in c.calls().iter().enumerate() {
            let other = held(call.read()).name;
            if other != name {
                let (a, b) = (self.rank, c.group.members[p]);
                return self.fail(format!("rank {a} calls {name} while rank {b} calls {other}"));
            }
        }
        Ok(c)
    }

    /// Waits until all members wait; what follows begins after all that they had begun.
    fn wait(&mut self, c: &Begun<M::Mark>) -> Result<()> {
        if M::AT_ONCE {
            return c.group.wait(&self.hub, c.me);
        }
        let mark = self.mover.mark()?;
        // The members that are here have read the marks of the round before the last.
        let marks = &c.group.marks[c.group.round.load(Ordering::Acquire) as usize % 2];
        *held(marks[c.me].write()) = Some(mark);
        c.group.wait(&self.hub, c.me)?;
        let others = marks.iter().enumerate().filter(|x| x.0 != c.me);
        others.into_iter().try_for_each(|(_, mark)| {
            let mark = held(mark.read());
            self.mover.after(mark.as_ref().expect("who waits has left a mark"))
        })
    }

    fn fail<T>(&self, message: String) -> Result<T> {
        self.hub.fail_with(message)
    }

    /// Region `i` that member `p` has published, of `len` elements.
    fn theirs(&self, c: &Begun<M::Mark>, p: usize, i: usize, len: usize) -> Result<Region> {
        let call = held(c.calls()[p].read());
        let found = call.regions.get(i).map_or(0, Region::len);
        match call.regions.get(i) {
            Some(r) if found == len => Ok(r.clone()),
            _ => {
                let name = call.name;
                drop(call);
                self.unequal(name, len, c.group.members[p], found)
            }
        }
    }

    fn unequal<T>(&self, name: &str, len: usize, other: usize, found: usize) -> Result<T> {
        let me = self.rank;
        self.fail(format!("{name}: rank {me} expects {len} elements, rank {other} has {found}"))
    }

    /// Waits until all members have read what was published.
    fn end(&mut self, c: &Begun<M::Mark>) -> Result<()> {
        self.wait(c)
    }
}

impl<M: Mover> Drop for Threads<M> {
    fn drop(&mut self) {
        self.hub.left[self.rank].store(true, Ordering::Release);
        self.hub.wake_all();
    }
}

impl<M: Mover> Transport for Threads<M> {
    fn rank(&self) -> usize {
        self.rank
    }
    fn world(&self) -> usize {
        self.hub.left.len()
    }
    fn barrier(&mut self, axes: AtomSet) -> Result<()> {
        self.begin(axes, "barrier", |_| {}).map(|_| ())
    }

    fn all_reduce(&mut self, axes: AtomSet, tensors: &[Reduced]) -> Result<()> {
        let total: usize = tensors.iter().map(|t| t.to.len()).sum();
        if M::AT_ONCE && total <= SMALL {
            return self.small(axes, tensors, total);
        }
        let c = self.begin(axes, "all_reduce", |call| {
            call.regions.extend(tensors.iter().flat_map(|t| [&t.from, &t.to]).cloned());
            call.folds.extend(tensors.iter().map(|t| t.fold));
        })?;
        self.same_folds(&c, tensors)?;
        let mut parts = Vec::with_capacity(c.ways());
        let lens = || tensors.iter().map(|t| t.to.len());
        for (i, range) in split(lens(), chunk(total, c.ways(), c.me)) {
            parts.clear();
            for p in 0..c.ways() {
                parts.push(self.theirs(&c, p, 2 * i, tensors[i].to.len())?);
            }
            // SAFETY: lengths are equal; members write and read only their own chunks now, and
            // results overlap no operand but their own.
            unsafe { self.mover.fold(tensors[i].fold, &parts, &tensors[i].to, range) }?;
        }
        self.wait(&c)?;
        for p in (0..c.ways()).filter(|&p| p != c.me) {
            for (i, range) in split(lens(), chunk(total, c.ways(), p)) {
                let from = self.theirs(&c, p, 2 * i + 1, tensors[i].to.len())?;
                // SAFETY: lengths are equal; member p has written this range and leaves it.
                unsafe { self.mover.copy(&from, &tensors[i].to, range) }?;
            }
        }
        self.end(&c)
    }

    fn all_gather(&mut self, axes: AtomSet, from: &Region, to: &[Region]) -> Result<()> {
        let c = self.begin(axes, "all_gather", |call| call.regions.push(from.clone()))?;
        self.receive(&c, to, 0)
    }

    fn reduce_scatter(
        &mut self,
        axes: AtomSet,
        how: Reduction,
        from: &[Region],
        to: &Region,
    ) -> Result<()> {
        let publish = |call: &mut Call| {
            call.regions.extend_from_slice(from);
            call.folds.push(how);
        };
        let c = self.begin(axes, "reduce_scatter", publish)?;
        let parts: Result<Vec<Region>> =
            (0..c.ways()).map(|p| self.theirs(&c, p, c.me, to.len())).collect();
        // SAFETY: lengths are equal, members leave their operands, the result is ours alone.
        unsafe { self.mover.fold(how, &parts?, to, 0..to.len()) }?;
        self.end(&c)
    }

    fn all_to_all(&mut self, axes: AtomSet, from: &[Region], to: &[Region]) -> Result<()> {
        let publish = |call: &mut Call| call.regions.extend_from_slice(from);
        let c = self.begin(axes, "all_to_all", publish)?;
        let me = c.me;
        self.receive(&c, to, me)
    }

    fn all_to_all_v(
        &mut self,
        axes: AtomSet,
        from: &[Vec<Region>],
        to: &[Vec<Region>],
    ) -> Result<()> {
        let c = self.begin(axes, "all_to_all_v", |call| {
            for part in from {
                call.starts.push(call.regions.len());
                call.regions.extend_from_slice(part);
            }
            call.starts.push(call.regions.len());
        })?;
        if to.len() != c.ways() {
            return self.misplaced(to.len(), c.ways());
        }
        for (p, to) in to.iter().enumerate() {
            let bounds = held(c.calls()[p].read()).starts.get(c.me..c.me + 2).map(<[_]>::to_vec);
            let (first, found) = bounds.map_or((0, 0), |b| (b[0], b[1] - b[0]));
            if found != to.len() {
                let (me, other) = (self.rank, c.group.members[p]);
                return self.fail(format!(
                    "all_to_all_v: rank {me} expects {} blocks of rows, rank {other} has {found}",
                    to.len()
                ));
            }
            to.iter().enumerate().try_for_each(|(i, to)| self.take(&c, p, first + i, to))?;
        }
        self.end(&c)
    }

    fn permute(&mut self, axes: AtomSet, shift: usize, from: &Region, to: &Region) -> Result<()> {
        let c = self.begin(axes, "permute", |call| call.regions.push(from.clone()))?;
        let ways = c.ways();
        self.take(&c, (c.me + ways - shift % ways) % ways, 0, to)?;
        self.end(&c)
    }

    fn broadcast(&mut self, axes: AtomSet, root: usize, data: &Region) -> Result<()> {
        let c = self.begin(axes, "broadcast", |call| call.regions.push(data.clone()))?;
        let root = root % c.ways();
        if c.me != root {
            self.take(&c, root, 0, data)?;
        }
        self.end(&c)
    }

    fn send(&mut self, to: usize, data: &Region) -> Result<()> {
        let b = self.mailbox(self.rank, to)?;
        self.hub.check()?;
        let ready = self.mover.mark()?;
        held(b.offers.lock()).waiting.push_back((data.clone(), ready));
        b.wake.notify_all();
        Ok(())
    }

    fn sent(&mut self, to: usize) -> Result<()> {
        let b = self.mailbox(self.rank, to)?;
        let mut offers = self.hub.wait_for(&b, (self.rank, to), |o| !o.taken.is_empty())?;
        let read = offers.taken.pop_front().expect("waited for");
        drop(offers);
        self.mover.after(&read)
    }

    fn recv(&mut self, from: usize, data: &Region) -> Result<()> {
        let b = self.mailbox(from, self.rank)?;
        let ready = |o: &Offers<M::Mark>| !o.waiting.is_empty();
        let mut offers = self.hub.wait_for(&b, (self.rank, from), ready)?;
        let (offer, there) = offers.waiting.pop_front().expect("waited for");
        drop(offers);
        if offer.len() != data.len() {
            return self.unequal("recv", data.len(), from, offer.len());
        }
        self.mover.after(&there)?;
        // SAFETY: lengths are equal; the giver leaves its data until it has seen that they were
        // taken, and the result is ours alone.
        unsafe { self.mover.copy(&offer, data, 0..data.len()) }?;
        let read = self.mover.mark()?;
        held(b.offers.lock()).taken.push_back(read);
        b.wake.notify_all();
        Ok(())
    }

    fn abort(&mut self, cause: Diag) {
        self.hub.fail(cause);
    }
}

impl<M: Mover> Threads<M> {
    /// An `all_reduce` of few elements.
    fn small(&mut self, axes: AtomSet, tensors: &[Reduced], total: usize) -> Result<()> {
        let c = self.begin(axes, "all_reduce", |call| {
            call.folds.extend(tensors.iter().map(|t| t.fold));
            call.data.resize(total, 0.0);
            let mut first = call.data.as_mut_ptr();
            for t in tensors {
                let n = t.from.len().min(t.to.len());
                // SAFETY: the vector has room for all of `to`; nobody writes operands now.
                unsafe { region::copy(&t.from, &Region::adjacent(first, Elem::F32, n), 0..n) };
                first = first.wrapping_add(t.to.len());
            }
        })?;
        self.same_folds(&c, tensors)?;
        self.scratch.clear();
        for (p, call) in c.calls().iter().enumerate() {
            let call = held(call.read());
            if call.data.len() != total {
                let found = call.data.len();
                drop(call);
                return self.unequal("all_reduce", total, c.group.members[p], found);
            }
            if p == 0 {
                self.scratch.extend_from_slice(&call.data);
                continue;
            }
            let mut at = 0;
            for t in tensors {
                let range = at..at + t.to.len();
                at = range.end;
                join(t.fold, &mut self.scratch[range.clone()], &call.data[range]);
            }
        }
        let mut first = self.scratch.as_mut_ptr();
        for t in tensors {
            let n = t.to.len();
            // SAFETY: the sum of all lengths was folded; results are ours alone.
            unsafe { region::copy(&Region::adjacent(first, Elem::F32, n), &t.to, 0..n) };
            first = first.wrapping_add(n);
        }
        Ok(())
    }

    /// Checks that all members fold the same tensors alike.
    fn same_folds(&self, c: &Begun<M::Mark>, tensors: &[Reduced]) -> Result<()> {
        for (p, call) in c.calls().iter().enumerate() {
            if !held(call.read()).folds.iter().copied().eq(tensors.iter().map(|t| t.fold)) {
                let (a, b) = (self.rank, c.group.members[p]);
                return self
                    .fail(format!("all_reduce: ranks {a} and {b} reduce different tensors"));
            }
        }
        Ok(())
    }

    fn misplaced<T>(&self, places: usize, ways: usize) -> Result<T> {
        let me = self.rank;
        self.fail(format!("rank {me} has {places} places for the data of {ways} ranks"))
    }

    /// Copies region `i` of member `p`.
    fn take(&mut self, c: &Begun<M::Mark>, p: usize, i: usize, to: &Region) -> Result<()> {
        let from = self.theirs(c, p, i, to.len())?;
        // SAFETY: lengths are equal, and members leave their operands until all have read.
        unsafe { self.mover.copy(&from, to, 0..to.len()) }
    }

    /// Copies region `i` of every member to its place, and waits until all have.
    fn receive(&mut self, c: &Begun<M::Mark>, to: &[Region], i: usize) -> Result<()> {
        if to.len() != c.ways() {
            return self.misplaced(to.len(), c.ways());
        }
        to.iter().enumerate().try_for_each(|(p, to)| self.take(c, p, i, to))?;
        self.end(c)
    }
}
