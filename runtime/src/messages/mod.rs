//! The transport between ranks that share no memory: every operation is messages between members.
//!
//! A sum is an exchange of chunks, a fold of each chunk by one member, in group order, and an
//! exchange of the results (Rabenseifner 2004, with direct exchanges instead of halving): the bytes
//! of a ring, and the same bits as [`crate::threads`]. Large data move in segments, so that memory
//! beside the arena stays bounded.

mod collectives;
mod flow;
mod segments;

use crate::alarm::Alarm;
use crate::region::Region;
use crate::transport::{failure, misplaced};
use shardc_ir::diag::Result;
use shardc_ir::mesh::{AtomSet, Mesh};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Looks at what is under way before the core is offered to others; for how long it is offered before sleeping. That
/// is a time and no count: on a busy core a yield takes as long as others want.
const SPINS: u32 = 200;
const OFFERED: Duration = Duration::from_millis(20);
/// Tags of sends between stages, and of collectives by the number of their call.
const SENT: u32 = 0;
const CALLS: u32 = 30_000;

/// The other end of a message: a member of a channel, and the tag.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    pub channel: usize,
    pub member: usize,
    pub tag: u32,
}

/// Moves bytes between ranks without waiting. Messages from one rank to another with the same
/// channel and tag arrive in their order.
pub trait Post: Send {
    /// A message under way, which whoever has the post may ask for.
    type Ticket: Send;
    /// A name for messages among these ranks, in group order; all of them ask for it.
    ///
    /// # Errors
    /// `rank-failed`, as for all calls.
    fn open(&mut self, members: &[usize]) -> Result<usize>;
    /// Begins to send bytes to a member of a channel.
    ///
    /// # Safety
    /// The bytes stay as they are until the ticket is done.
    unsafe fn send(&mut self, to: Peer, bytes: *const u8, len: usize) -> Result<Self::Ticket>;
    /// Begins to receive as many bytes from a member of a channel.
    ///
    /// # Safety
    /// Nobody uses the bytes until the ticket is done.
    unsafe fn recv(&mut self, from: Peer, bytes: *mut u8, len: usize) -> Result<Self::Ticket>;
    /// True if a message has left, or has come; an error if it has another length than expected.
    fn done(&mut self, ticket: &mut Self::Ticket) -> Result<bool>;
}

/// The ranks of a group, in order.
#[derive(Clone)]
struct MessageGroup {
    members: Arc<[usize]>,
    me: usize,
    channel: usize,
    tag: u32,
}

impl MessageGroup {
    fn peer(&self, member: usize) -> Peer {
        Peer { channel: self.channel, member, tag: self.tag }
    }
}

/// A message under way, and with whom.
struct InFlight<T> {
    ticket: T,
    with: usize,
    done: bool,
}

/// Where something is received: an address and a number of elements.
type Place = (usize, usize);
/// A receive under way: where to, and its messages.
type Posted<T> = (Place, Vec<T>);

/// One rank's end.
pub struct Messages<P: Post> {
    post: P,
    mesh: Mesh,
    rank: usize,
    timeout: Duration,
    alarm: Arc<Alarm>,
    groups: BTreeMap<AtomSet, MessageGroup>,
    /// The channel of all ranks.
    world: Option<usize>,
    /// By receiver: sends that were not waited for.
    offers: BTreeMap<usize, VecDeque<Vec<P::Ticket>>>,
    /// By sender: receives that were posted.
    posted: BTreeMap<usize, VecDeque<Posted<P::Ticket>>>,
    rooms: Vec<Vec<f32>>,
}

impl<P: Post> Messages<P> {
    /// The end of a rank of the mesh; a member that keeps it waiting longer than `timeout` has
    /// failed.
    pub fn new(mesh: &Mesh, rank: usize, post: P, timeout: Duration, alarm: Arc<Alarm>) -> Self {
        Messages {
            post,
            mesh: mesh.clone(),
            rank,
            timeout,
            alarm,
            groups: BTreeMap::new(),
            world: None,
            offers: BTreeMap::new(),
            posted: BTreeMap::new(),
            rooms: vec![],
        }
    }

    /// Opens the channels of groups, and that of all ranks, now instead of at their first calls: a post
    /// may wait for all members there, whatever happens. All ranks name the same groups.
    ///
    /// # Errors
    /// Those of the post.
    pub fn open(&mut self, groups: &BTreeSet<AtomSet>) -> Result<()> {
        groups.iter().try_for_each(|&axes| self.join(axes))?;
        self.world().map(|_| ())
    }

    /// Opens the channel of a group, once.
    fn join(&mut self, axes: AtomSet) -> Result<()> {
        if !self.groups.contains_key(&axes) {
            let members: Arc<[usize]> = self.mesh.group(axes, self.rank).into();
            let me = members.iter().position(|&r| r == self.rank).expect("a rank is in its group");
            let channel = self.post.open(&members)?;
            self.groups.insert(axes, MessageGroup { members, me, channel, tag: SENT });
        }
        Ok(())
    }

    /// The group for its next call.
    fn call(&mut self, axes: AtomSet) -> Result<MessageGroup> {
        self.join(axes)?;
        let g = self.groups.get_mut(&axes).expect("was just made");
        g.tag = 1 + g.tag % CALLS;
        Ok(g.clone())
    }

    fn world(&mut self) -> Result<usize> {
        if let Some(w) = self.world {
            return Ok(w);
        }
        let all: Vec<usize> = (0..self.mesh.ranks()).collect();
        let w = self.post.open(&all)?;
        self.world = Some(w);
        Ok(w)
    }

    /// The channel of all ranks, for another of them.
    fn stage(&mut self, other: usize) -> Result<usize> {
        let (me, ranks) = (self.rank, self.mesh.ranks());
        if other >= ranks || other == me {
            return self.fail(format!("rank {me} has no rank {other} of {ranks} to send to"));
        }
        self.world()
    }

    fn fail<T>(&self, message: String) -> Result<T> {
        Err(failure(message))
    }

    /// Waits until all messages have left and come.
    fn wait(&mut self, in_flight: &mut [InFlight<P::Ticket>]) -> Result<()> {
        let (mut looks, mut since) = (0u32, None);
        loop {
            let mut open = false;
            for f in in_flight.iter_mut().filter(|f| !f.done) {
                f.done = self.post.done(&mut f.ticket)?;
                open |= !f.done;
            }
            if !open {
                if since.is_some() {
                    self.alarm.set_waits(vec![]);
                }
                return Ok(());
            }
            if looks < SPINS {
                looks += 1;
                std::hint::spin_loop();
                continue;
            }
            let since = *since.get_or_insert_with(Instant::now);
            if self.alarm.is_rung() {
                return self.fail("another rank failed".into());
            }
            if since.elapsed() < OFFERED && !self.alarm.is_calm() {
                std::thread::yield_now();
                continue;
            }
            let mut late: Vec<usize> =
                in_flight.iter().filter(|f| !f.done).map(|f| f.with).collect();
            late.sort_unstable();
            late.dedup();
            if since.elapsed() >= self.timeout {
                let s = self.timeout.as_secs_f64();
                let slow = format!("if these ranks are only slow, run with --timeout {}", s * 10.0);
                let message = format!("rank {} waited {s} s for ranks {late:?}", self.rank);
                return Err(failure(message).help(slow));
            }
            self.alarm.set_waits(late);
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Where something is received.
    fn place(&self, data: &Region) -> Result<Place> {
        match data.together(&(0..data.len())) {
            Some(first) => Ok((first as usize, data.len())),
            None => self.fail("what is received does not lie together".into()),
        }
    }

    fn places(&self, found: usize, ways: usize) -> Result<()> {
        if found == ways {
            return Ok(());
        }
        self.fail(misplaced(self.rank, found, ways))
    }
}
