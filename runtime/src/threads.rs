//! The transport between threads of one process: operands are read where they lie, by a [`Mover`]
//! that knows what memory they are in.
//!
//! An operation is: publish where my data is, wait for the others, read theirs, wait until all have
//! read. A sum moves a ring's bytes: each member folds its own chunk and then reads the others'.
//!
//! Work of a device is only queued: whoever waits leaves a mark behind what it has queued, and what it
//! queues from then on begins after the others' marks. Threads meet to exchange marks; none waits for a
//! device.

mod collectives;
mod mover;

pub use mover::{HostMover, Mover};

use crate::hub::{Boxes, Group, Hub, HubCall, Mailbox, held};
use crate::region::Region;
use shardc_ir::diag::Result;
use shardc_ir::mesh::{AtomSet, Mesh};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

/// A group, and a rank's place in it.
type GroupPlace<K> = (Arc<Group<K>>, usize);

/// One rank's end.
pub struct Threads<M: Mover = HostMover> {
    mover: M,
    rank: usize,
    hub: Arc<Hub<M::Mark>>,
    groups: BTreeMap<AtomSet, GroupPlace<M::Mark>>,
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
    fn calls(&self) -> &[RwLock<HubCall>] {
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
        let movers = (0..mesh.ranks()).map(|_| HostMover).collect();
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
    pub(crate) fn failure_check(&self) -> impl Fn() -> Result<()> + Send + Sync + use<M> {
        let hub = self.hub.clone();
        move || hub.check()
    }

    fn group(&mut self, axes: AtomSet) -> GroupPlace<M::Mark> {
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
        fill: impl FnOnce(&mut HubCall),
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
