//! The operations of the transport, as exchanges and folds of flows.

use super::flow::{Flow, Span};
use super::{InFlight, MessageGroup, Messages, Peer, Post, SENT};
use crate::region::{self, Region, chunk};
use crate::transport::{Gathered, Reduced, Scattered, Transport};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::AtomSet;
use shardc_ir::types::Reduction;
use std::collections::VecDeque;
use std::sync::Arc;

/// Sums of at most this many elements are sent whole to all, and folded by all.
const SMALL: usize = 2048;

impl<P: Post> Transport for Messages<P> {
    fn rank(&self) -> usize {
        self.rank
    }
    fn world(&self) -> usize {
        self.mesh.ranks()
    }

    fn barrier(&mut self, axes: AtomSet) -> Result<()> {
        let g = self.call(axes)?;
        let mut in_flight = vec![];
        for p in (0..g.members.len()).filter(|&p| p != g.me) {
            let none = Span { room: None, first: std::ptr::dangling_mut(), bytes: 0 };
            // SAFETY: there are no bytes.
            let ticket = unsafe { self.post.send(g.peer(p), none.first, 0)? };
            in_flight.push(InFlight { ticket, with: g.members[p], done: false });
            // SAFETY: as above.
            unsafe { self.take(&g, p, &none, &mut in_flight)? };
        }
        self.wait(&mut in_flight)
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
            // SAFETY: who made the regions keeps them during the call (`Region::new`), and results overlap
            // no operands but their own (`Transport`).
            return unsafe { self.fold(&g, &how, &out, &from(), &to, false) };
        }
        let part = |p: usize| from().cut(chunk(total, ways, p));
        let out: Vec<(usize, Flow)> = others.map(|p| (p, part(p))).collect();
        // SAFETY: who made the regions keeps them during the call (`Region::new`), and results overlap
        // no operands but their own (`Transport`).
        unsafe { self.fold(&g, &how, &out, &part(g.me), &to, true) }
    }

    fn all_gather(&mut self, axes: AtomSet, tensors: &[Gathered]) -> Result<()> {
        if tensors.iter().any(|t| t.from.elem() != tensors[0].from.elem()) {
            return tensors.iter().try_for_each(|t| self.all_gather(axes, std::slice::from_ref(t)));
        }
        let g = self.call(axes)?;
        let ways = g.members.len();
        tensors.iter().try_for_each(|t| self.places(t.to.len(), ways))?;
        let others = || (0..ways).filter(|&p| p != g.me);
        let from = || Flow::of(tensors.iter().map(|t| &t.from));
        let to = |p: usize| Flow::of(tensors.iter().map(|t| &t.to[p]));
        let out: Vec<(usize, Flow)> = others().map(|p| (p, from())).collect();
        let into: Vec<(usize, Flow)> = others().map(|p| (p, to(p))).collect();
        for Gathered { from, to } in tensors {
            let own = &to[g.me];
            // SAFETY: both have these elements, kept by who made the regions (`Region::new`), and do not
            // overlap (`Transport`).
            unsafe { region::copy(from, own, 0..from.len().min(own.len())) };
        }
        // SAFETY: who made the regions keeps them during the call (`Region::new`), and results overlap
        // nothing else (`Transport`).
        unsafe { self.swap(&g, &out, &into) }
    }

    fn reduce_scatter(&mut self, axes: AtomSet, tensors: &[Scattered]) -> Result<()> {
        if tensors.iter().any(|t| t.to.elem() != tensors[0].to.elem()) {
            let one = |t| self.reduce_scatter(axes, std::slice::from_ref(t));
            return tensors.iter().try_for_each(one);
        }
        let g = self.call(axes)?;
        let ways = g.members.len();
        tensors.iter().try_for_each(|t| self.places(t.from.len(), ways))?;
        let others = (0..ways).filter(|&p| p != g.me);
        let from = |p: usize| Flow::of(tensors.iter().map(|t| &t.from[p]));
        let out: Vec<(usize, Flow)> = others.map(|p| (p, from(p))).collect();
        let to: Vec<&Region> = tensors.iter().map(|t| &t.to).collect();
        let how: Vec<Reduction> = tensors.iter().map(|t| t.fold).collect();
        // SAFETY: who made the regions keeps them during the call (`Region::new`), and results overlap
        // no operands but their own (`Transport`).
        unsafe { self.fold(&g, &how, &out, &from(g.me), &to, false) }
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
            // SAFETY: both have these elements, kept by who made the regions (`Region::new`), and do not overlap
            // (`Transport`).
            unsafe { region::copy(a, b, 0..a.len().min(b.len())) };
        }
        // SAFETY: who made the regions keeps them during the call (`Region::new`), and results overlap
        // nothing else (`Transport`).
        unsafe { self.swap(&g, &out, &into) }
    }

    fn permute(&mut self, axes: AtomSet, shift: usize, from: &Region, to: &Region) -> Result<()> {
        let g = self.call(axes)?;
        let ways = g.members.len();
        let (next, last) = ((g.me + shift) % ways, (g.me + ways - shift % ways) % ways);
        if next == g.me {
            // SAFETY: both have these elements, kept by who made the regions (`Region::new`), and do not overlap
            // (`Transport`).
            unsafe { region::copy(from, to, 0..from.len().min(to.len())) };
            return Ok(());
        }
        // SAFETY: who made the regions keeps them during the call (`Region::new`), and results overlap
        // nothing else (`Transport`).
        unsafe { self.swap(&g, &[(next, Flow::of([from]))], &[(last, Flow::of([to]))]) }
    }

    fn broadcast(&mut self, axes: AtomSet, root: usize, data: &Region) -> Result<()> {
        let g = self.call(axes)?;
        let root = root % g.members.len();
        if g.me != root {
            // SAFETY: who made the regions keeps them during the call (`Region::new`), and results overlap
            // nothing else (`Transport`).
            return unsafe { self.swap(&g, &[], &[(root, Flow::of([data]))]) };
        }
        let others = (0..g.members.len()).filter(|&p| p != root);
        let out: Vec<(usize, Flow)> = others.map(|p| (p, Flow::of([data]))).collect();
        // SAFETY: who made the regions keeps them during the call (`Region::new`), and results overlap
        // nothing else (`Transport`).
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
        let in_flight = |ticket| InFlight { ticket, with: to, done: false };
        self.wait(&mut tickets.into_iter().map(in_flight).collect::<Vec<_>>())
    }

    fn post_recv(&mut self, from: usize, data: &Region) -> Result<()> {
        let peer = Peer { channel: self.stage(from)?, member: from, tag: SENT };
        let place = self.place(data)?;
        let flow = Flow::of([data]);
        let mut tickets = vec![];
        for k in 0..flow.segments() {
            for (r, range) in flow.parts(k) {
                let first = r.together(&range).expect("a part of what lies together");
                let len = range.len() * r.elem().bytes();
                // SAFETY: nobody uses the data before `recv`, which waits for all of it.
                tickets.push(unsafe { self.post.recv(peer, first.cast(), len)? });
            }
        }
        self.posted.entry(from).or_default().push_back((place, tickets));
        Ok(())
    }

    fn recv(&mut self, from: usize, data: &Region) -> Result<()> {
        if let Some((place, tickets)) = self.posted.get_mut(&from).and_then(VecDeque::pop_front) {
            if self.place(data)? != place {
                return self.fail(format!("rank {} takes what it has not posted", self.rank));
            }
            let in_flight = |ticket| InFlight { ticket, with: from, done: false };
            return self.wait(&mut tickets.into_iter().map(in_flight).collect::<Vec<_>>());
        }
        let channel = self.stage(from)?;
        let members: Arc<[usize]> = (0..self.mesh.ranks()).collect();
        let g = MessageGroup { members, me: self.rank, channel, tag: SENT };
        // SAFETY: who made the regions keeps them during the call (`Region::new`), and results overlap
        // nothing else (`Transport`).
        unsafe { self.swap(&g, &[], &[(from, Flow::of([data]))]) }
    }

    fn advance(&mut self) -> Result<bool> {
        let Messages { post, offers, posted, .. } = self;
        let sent = offers.values_mut().flatten();
        let all = sent.chain(posted.values_mut().flatten().map(|(_, tickets)| tickets));
        let mut left = false;
        for tickets in all {
            let mut failed = None;
            tickets.retain_mut(|t| match post.done(t) {
                Ok(done) => !done,
                Err(e) => {
                    failed = Some(e);
                    true
                }
            });
            if let Some(e) = failed {
                return Err(e);
            }
            left |= !tickets.is_empty();
        }
        Ok(left)
    }

    fn abort(&mut self, _cause: Diag) {
        // Others learn it from those who watch this process.
        self.alarm.ring();
    }
}
