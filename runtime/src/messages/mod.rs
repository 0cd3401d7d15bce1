//! The transport between ranks that share no memory: every operation is messages between members.
//!
//! A sum is an exchange of chunks, a fold of each chunk by one member, in group order, and an
//! exchange of the results (Rabenseifner 2004, with direct exchanges instead of halving): the bytes
//! of a ring, and the same bits as [`crate::threads`]. Large data move in segments, so that memory
//! beside the arena stays bounded.

mod flow;

use crate::alarm::Alarm;
use crate::region::{self, Region, chunk};
use crate::transport::{Reduced, Transport};
use flow::{Flow, SEGMENT, Span, each, shifted};
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::types::Reduction;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sums of at most this many elements are sent whole to all, and folded by all.
const SMALL: usize = 2048;
/// Looks at what is under way before the core is offered to others, and before sleeping.
const SPINS: u32 = 200;
const YIELDS: u32 = 20_000;
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
    /// A message under way.
    type Ticket;
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
struct Group {
    members: Arc<[usize]>,
    me: usize,
    channel: usize,
    tag: u32,
}

impl Group {
    fn peer(&self, member: usize) -> Peer {
        Peer { channel: self.channel, member, tag: self.tag }
    }
}

/// A message under way, and with whom.
struct Flight<T> {
    ticket: T,
    with: usize,
    done: bool,
}

/// One rank's end.
pub struct Messages<P: Post> {
    post: P,
    mesh: Mesh,
    rank: usize,
    timeout: Duration,
    alarm: Arc<Alarm>,
    groups: BTreeMap<AtomSet, Group>,
    /// The channel of all ranks.
    world: Option<usize>,
    /// By receiver: sends that were not waited for.
    offers: BTreeMap<usize, VecDeque<Vec<P::Ticket>>>,
    rooms: Vec<Vec<f32>>,
}

// SAFETY: pieces and tickets live inside calls only; what a post keeps is its own promise.
unsafe impl<P: Post> Send for Messages<P> {}

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
            self.groups.insert(axes, Group { members, me, channel, tag: SENT });
        }
        Ok(())
    }

    /// The group for its next call.
    fn call(&mut self, axes: AtomSet) -> Result<Group> {
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

    fn fail<T>(&self, message: String) -> Result<T> {
        Err(failure(message))
    }

    /// Waits until all messages have left and come.
    fn wait(&mut self, flights: &mut [Flight<P::Ticket>]) -> Result<()> {
        let (mut looks, mut since) = (0u32, None);
        loop {
            let mut open = false;
            for f in flights.iter_mut().filter(|f| !f.done) {
                f.done = self.post.done(&mut f.ticket)?;
                open |= !f.done;
            }
            if !open {
                if looks > SPINS + YIELDS {
                    self.alarm.set_waits(vec![]);
                }
                return Ok(());
            }
            looks = looks.saturating_add(1);
            if looks < SPINS {
                std::hint::spin_loop();
                continue;
            }
            if self.alarm.is_rung() {
                return self.fail("another rank failed".into());
            }
            if looks < SPINS + YIELDS {
                std::thread::yield_now();
                continue;
            }
            let since = *since.get_or_insert_with(Instant::now);
            let mut late: Vec<usize> = flights.iter().filter(|f| !f.done).map(|f| f.with).collect();
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

    /// Memory for so many bytes, aligned for elements.
    fn room(&mut self, bytes: usize) -> Vec<f32> {
        let mut room = self.rooms.pop().unwrap_or_default();
        room.resize(bytes.div_ceil(4), 0.0);
        room
    }

    /// The bytes of parts of regions; of a copy to be filled if they do not lie together.
    fn piece(&mut self, parts: &[(&Region, Range<usize>)]) -> Span {
        let bytes = parts.iter().map(|(r, range)| range.len() * r.elem().bytes()).sum();
        if let [(r, range)] = parts
            && let Some(first) = r.together(range)
        {
            return Span { room: None, first: first.cast(), bytes };
        }
        let mut room = self.room(bytes);
        let first = room.as_mut_ptr().cast();
        Span { room: Some(room), first, bytes }
    }

    /// Sends a segment to member `to`.
    ///
    /// # Safety
    /// Until the messages are done nobody writes the regions, and the piece is kept.
    unsafe fn give(
        &mut self,
        g: &Group,
        to: usize,
        parts: &[(&Region, Range<usize>)],
        flights: &mut Vec<Flight<P::Ticket>>,
    ) -> Result<Span> {
        let piece = self.piece(parts);
        if piece.room.is_some() {
            // SAFETY: the copy has room for all parts.
            unsafe { each(&piece, parts, |r, range, copy| region::copy(r, copy, range)) };
        }
        // SAFETY: by the caller.
        let ticket = unsafe { self.post.send(g.peer(to), piece.first, piece.bytes)? };
        flights.push(Flight { ticket, with: g.members[to], done: false });
        Ok(piece)
    }

    /// Begins to receive a segment from a member into a piece.
    ///
    /// # Safety
    /// Until the messages are done nobody uses the piece, and it is kept.
    unsafe fn take(
        &mut self,
        g: &Group,
        from: usize,
        piece: &Span,
        flights: &mut Vec<Flight<P::Ticket>>,
    ) -> Result<()> {
        // SAFETY: by the caller.
        let ticket = unsafe { self.post.recv(g.peer(from), piece.first, piece.bytes)? };
        flights.push(Flight { ticket, with: g.members[from], done: false });
        Ok(())
    }

    /// After a failure, memory of messages that may still be under way is not used again.
    fn keep<'a>(
        &mut self,
        done: Result<()>,
        pieces: impl Iterator<Item = &'a mut Span>,
    ) -> Result<()> {
        if done.is_err() {
            pieces.filter_map(|p| p.room.take()).for_each(std::mem::forget);
        }
        done
    }

    fn free(&mut self, pieces: impl IntoIterator<Item = Span>) {
        self.rooms.extend(pieces.into_iter().filter_map(|p| p.room));
    }

    /// Sends flows to members and receives others from members, segment by segment.
    ///
    /// # Safety
    /// As for [`Region::new`]; what is received overlaps nothing else.
    unsafe fn swap<'a>(
        &mut self,
        g: &Group,
        out: &[(usize, Flow<'a>)],
        into: &[(usize, Flow<'a>)],
    ) -> Result<()> {
        let segments = out.iter().chain(into).map(|x| x.1.segments()).max().unwrap_or(0);
        for k in 0..segments {
            let (mut flights, mut given, mut taken) = (vec![], vec![], vec![]);
            for (from, flow) in into.iter().filter(|x| k < x.1.segments()) {
                let parts = flow.parts(k);
                let piece = self.piece(&parts);
                // SAFETY: by the caller; the piece is kept until the wait is over.
                unsafe { self.take(g, *from, &piece, &mut flights)? };
                taken.push((piece, parts));
            }
            for (to, flow) in out.iter().filter(|x| k < x.1.segments()) {
                // SAFETY: as above.
                given.push(unsafe { self.give(g, *to, &flow.parts(k), &mut flights)? });
            }
            let done = self.wait(&mut flights);
            self.keep(done, given.iter_mut().chain(taken.iter_mut().map(|t| &mut t.0)))?;
            for (piece, parts) in &taken {
                if piece.room.is_some() {
                    // SAFETY: all of it has come.
                    unsafe { each(piece, parts, |r, range, copy| region::copy(copy, r, range)) };
                }
            }
            self.free(given);
            self.free(taken.into_iter().map(|t| t.0));
        }
        Ok(())
    }

    /// Folds flows of all members, of which `own` is this one's, into regions of the same shapes:
    /// of every segment the others' are received, and `out` is what each of them gets.
    ///
    /// # Safety
    /// As for [`Region::new`]; results overlap no operands but their own.
    unsafe fn fold(
        &mut self,
        g: &Group,
        how: &[Reduction],
        out: &[(usize, Flow)],
        own: &Flow,
        to: &[&Region],
        share: bool,
    ) -> Result<()> {
        let ways = g.members.len();
        let segments = out.iter().map(|x| x.1.segments()).chain([own.segments()]).max();
        for k in 0..segments.unwrap_or(0) {
            let parts = own.parts(k);
            let (mut flights, mut given, mut taken) = (vec![], vec![], vec![]);
            if !parts.is_empty() {
                for p in (0..ways).filter(|&p| p != g.me) {
                    let bytes = parts.iter().map(|(r, x)| x.len() * r.elem().bytes()).sum();
                    let mut room = self.room(bytes);
                    let first = room.as_mut_ptr().cast();
                    let piece = Span { room: Some(room), first, bytes };
                    // SAFETY: by the caller; pieces are kept until the wait is over.
                    unsafe { self.take(g, p, &piece, &mut flights)? };
                    taken.push(piece);
                }
            }
            for (p, flow) in out.iter().filter(|x| k < x.1.segments()) {
                // SAFETY: as above.
                given.push(unsafe { self.give(g, *p, &flow.parts(k), &mut flights)? });
            }
            let done = self.wait(&mut flights);
            self.keep(done, given.iter_mut().chain(&mut taken))?;
            let mut byte = 0;
            let index = |r: &Region| own.regions.iter().position(|x| std::ptr::eq(*x, r));
            for (r, range) in &parts {
                let i = index(r).expect("a part of this flow");
                let mut theirs = taken.iter();
                let all: Vec<Region> = (0..ways)
                    .map(|p| match p == g.me {
                        true => (*r).clone(),
                        false => {
                            let piece = theirs.next().expect("one of every other member");
                            shifted(piece.first.wrapping_add(byte), r.elem(), range)
                        }
                    })
                    .collect();
                // SAFETY: all have the elements of this range.
                unsafe { region::fold(how[i], &all, to[i], range.clone()) };
                byte += range.len() * r.elem().bytes();
            }
            self.free(given);
            self.free(taken);
            if share {
                // SAFETY: by the caller.
                unsafe { self.share(g, k, out, own, to)? };
            }
        }
        Ok(())
    }

    /// Sends the folded segment to all, and receives theirs.
    ///
    /// # Safety
    /// As for [`Messages::fold`].
    unsafe fn share(
        &mut self,
        g: &Group,
        k: usize,
        out: &[(usize, Flow)],
        own: &Flow,
        to: &[&Region],
    ) -> Result<()> {
        let segment = |flow: &Flow| {
            let first = flow.range.start + k * SEGMENT;
            first.min(flow.range.end)..(first + SEGMENT).min(flow.range.end)
        };
        let of = |flow: &Flow| Flow::of(to.iter().copied()).cut(segment(flow));
        let mine = of(own);
        let sends: Vec<(usize, Flow)> = out.iter().map(|x| (x.0, mine.clone())).collect();
        let takes: Vec<(usize, Flow)> = out.iter().map(|x| (x.0, of(&x.1))).collect();
        // SAFETY: by the caller.
        unsafe { self.swap(g, &sends, &takes) }
    }

    fn places(&self, found: usize, ways: usize) -> Result<()> {
        if found == ways {
            return Ok(());
        }
        let me = self.rank;
        self.fail(format!("rank {me} has {found} places for the data of {ways} ranks"))
    }
}

fn failure(message: String) -> Diag {
    Diag::new("rank-failed", message)
        .exit(Exit::RankFailed)
        .rule("all ranks of a group run the same collectives, in the same order")
        .help("run again with 1 rank to see whether the program itself fails")
}

// Of all unsafe calls below: the caller's promise for regions holds until the call returns.
impl<P: Post> Transport for Messages<P> {
    fn rank(&self) -> usize {
        self.rank
    }
    fn world(&self) -> usize {
        self.mesh.ranks()
    }

    fn barrier(&mut self, axes: AtomSet) -> Result<()> {
        let g = self.call(axes)?;
        let mut flights = vec![];
        for p in (0..g.members.len()).filter(|&p| p != g.me) {
            let none = Span { room: None, first: std::ptr::dangling_mut(), bytes: 0 };
            // SAFETY: there are no bytes.
            let ticket = unsafe { self.post.send(g.peer(p), none.first, 0)? };
            flights.push(Flight { ticket, with: g.members[p], done: false });
            // SAFETY: as above.
            unsafe { self.take(&g, p, &none, &mut flights)? };
        }
        self.wait(&mut flights)
    }

    fn all_reduce(&mut self, axes: AtomSet, tensors: &[Reduced]) -> Result<()> {
        // Elements of 2 bytes before those of 4 would not lie as these must.
        if tensors.iter().any(|t| t.to.elem() != tensors[0].to.elem()) {
            return tensors.iter().try_for_each(|t| self.all_reduce(axes, std::slice::from_ref(t)));
        }
        let g = self.call(axes)?;
        let ways = g.members.len();
        let total: usize = tensors.iter().map(|t| t.to.len()).sum();
        let from = || Flow::of(tensors.iter().map(|t| &t.from));
        let to: Vec<&Region> = tensors.iter().map(|t| &t.to).collect();
        let how: Vec<Reduction> = tensors.iter().map(|t| t.fold).collect();
        let others = (0..ways).filter(|&p| p != g.me);
        if total <= SMALL {
            let out: Vec<(usize, Flow)> = others.map(|p| (p, from())).collect();
            return unsafe { self.fold(&g, &how, &out, &from(), &to, false) };
        }
        let part = |p: usize| from().cut(chunk(total, ways, p));
        let out: Vec<(usize, Flow)> = others.map(|p| (p, part(p))).collect();
        unsafe { self.fold(&g, &how, &out, &part(g.me), &to, true) }
    }

    fn all_gather(&mut self, axes: AtomSet, from: &Region, to: &[Region]) -> Result<()> {
        let g = self.call(axes)?;
        self.places(to.len(), g.members.len())?;
        let others = || (0..to.len()).filter(|&p| p != g.me);
        let out: Vec<(usize, Flow)> = others().map(|p| (p, Flow::of([from]))).collect();
        let into: Vec<(usize, Flow)> = others().map(|p| (p, Flow::of([&to[p]]))).collect();
        unsafe { region::copy(from, &to[g.me], 0..from.len().min(to[g.me].len())) };
        unsafe { self.swap(&g, &out, &into) }
    }

    fn reduce_scatter(
        &mut self,
        axes: AtomSet,
        fold: Reduction,
        from: &[Region],
        to: &Region,
    ) -> Result<()> {
        let g = self.call(axes)?;
        self.places(from.len(), g.members.len())?;
        let others = (0..from.len()).filter(|&p| p != g.me);
        let out: Vec<(usize, Flow)> = others.map(|p| (p, Flow::of([&from[p]]))).collect();
        unsafe { self.fold(&g, &[fold], &out, &Flow::of([&from[g.me]]), &[to], false) }
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
        let g = self.call(axes)?;
        self.places(from.len(), g.members.len())?;
        self.places(to.len(), g.members.len())?;
        let others = || (0..to.len()).filter(|&p| p != g.me);
        let out: Vec<(usize, Flow)> = others().map(|p| (p, Flow::of(&from[p]))).collect();
        let into: Vec<(usize, Flow)> = others().map(|p| (p, Flow::of(&to[p]))).collect();
        for (a, b) in from[g.me].iter().zip(&to[g.me]) {
            unsafe { region::copy(a, b, 0..a.len().min(b.len())) };
        }
        unsafe { self.swap(&g, &out, &into) }
    }

    fn permute(&mut self, axes: AtomSet, shift: usize, from: &Region, to: &Region) -> Result<()> {
        let g = self.call(axes)?;
        let ways = g.members.len();
        let (next, last) = ((g.me + shift) % ways, (g.me + ways - shift % ways) % ways);
        if next == g.me {
            unsafe { region::copy(from, to, 0..from.len().min(to.len())) };
            return Ok(());
        }
        unsafe { self.swap(&g, &[(next, Flow::of([from]))], &[(last, Flow::of([to]))]) }
    }

    fn broadcast(&mut self, axes: AtomSet, root: usize, data: &Region) -> Result<()> {
        let g = self.call(axes)?;
        let root = root % g.members.len();
        if g.me != root {
            return unsafe { self.swap(&g, &[], &[(root, Flow::of([data]))]) };
        }
        let others = (0..g.members.len()).filter(|&p| p != root);
        let out: Vec<(usize, Flow)> = others.map(|p| (p, Flow::of([data]))).collect();
        unsafe { self.swap(&g, &out, &[]) }
    }

    fn send(&mut self, to: usize, data: &Region) -> Result<()> {
        let peer = Peer { channel: self.stage(to)?, member: to, tag: SENT };
        let flow = Flow::of([data]);
        let mut tickets = vec![];
        for k in 0..flow.segments() {
            for (r, range) in flow.parts(k) {
                let Some(first) = r.together(&range) else {
                    return self.fail("what is sent does not lie together".into());
                };
                let len = range.len() * r.elem().bytes();
                // SAFETY: the caller keeps the data until it has waited for this send.
                tickets.push(unsafe { self.post.send(peer, first.cast(), len)? });
            }
        }
        self.offers.entry(to).or_default().push_back(tickets);
        Ok(())
    }

    fn sent(&mut self, to: usize) -> Result<()> {
        let Some(tickets) = self.offers.get_mut(&to).and_then(VecDeque::pop_front) else {
            return self.fail(format!("rank {} has sent nothing to rank {to}", self.rank));
        };
        let flight = |ticket| Flight { ticket, with: to, done: false };
        self.wait(&mut tickets.into_iter().map(flight).collect::<Vec<_>>())
    }

    fn recv(&mut self, from: usize, data: &Region) -> Result<()> {
        let channel = self.stage(from)?;
        let members: Arc<[usize]> = (0..self.mesh.ranks()).collect();
        let g = Group { members, me: self.rank, channel, tag: SENT };
        unsafe { self.swap(&g, &[], &[(from, Flow::of([data]))]) }
    }

    fn abort(&mut self, _cause: Diag) {
        // Others learn it from those who watch this process.
        self.alarm.ring();
    }
}

impl<P: Post> Messages<P> {
    /// The channel of all ranks, for another of them.
    fn stage(&mut self, other: usize) -> Result<usize> {
        let (me, ranks) = (self.rank, self.mesh.ranks());
        if other >= ranks || other == me {
            return self.fail(format!("rank {me} has no rank {other} of {ranks} to send to"));
        }
        self.world()
    }
}
