//! Segments under way between the members of a group: exchanged, or folded as they come.

use super::flow::{Flow, Span, each, shifted};
use super::{InFlight, MessageGroup, Messages, Post};
use crate::region::{self, Region};
use shardc_ir::diag::Result;
use shardc_ir::types::Reduction;
use std::ops::Range;

/// The number of bytes of parts of regions.
fn bytes(parts: &[(&Region, Range<usize>)]) -> usize {
    parts.iter().map(|(r, range)| range.len() * r.elem().bytes()).sum()
}

impl<P: Post> Messages<P> {
    /// The bytes of parts of regions; of a copy to be filled if they do not lie together.
    fn piece(&mut self, parts: &[(&Region, Range<usize>)]) -> Span {
        if let [(r, range)] = parts
            && let Some(first) = r.together(range)
        {
            return Span { room: None, first: first.cast(), bytes: bytes(parts) };
        }
        self.copy_of(parts)
    }

    /// A copy of parts of regions, to be filled.
    fn copy_of(&mut self, parts: &[(&Region, Range<usize>)]) -> Span {
        let bytes = bytes(parts);
        let mut room = self.rooms.pop().unwrap_or_default();
        // Aligned for elements.
        room.resize(bytes.div_ceil(4), 0.0);
        let first = room.as_mut_ptr().cast();
        Span { room: Some(room), first, bytes }
    }

    /// Sends a segment to member `to`.
    ///
    /// # Safety
    /// Until the messages are done nobody writes the regions, and the piece is kept.
    unsafe fn give(
        &mut self,
        g: &MessageGroup,
        to: usize,
        parts: &[(&Region, Range<usize>)],
        in_flight: &mut Vec<InFlight<P::Ticket>>,
    ) -> Result<Span> {
        let piece = self.piece(parts);
        if piece.room.is_some() {
            // SAFETY: the copy has room for all parts.
            unsafe { each(&piece, parts, |r, range, copy| region::copy(r, copy, range)) };
        }
        // SAFETY: by the caller.
        let ticket = unsafe { self.post.send(g.peer(to), piece.first, piece.bytes)? };
        in_flight.push(InFlight { ticket, with: g.members[to], done: false });
        Ok(piece)
    }

    /// Sends the segments of this number to their members. The pieces of those that have begun are
    /// `given`, also after an error.
    ///
    /// # Safety
    /// Until the messages are done nobody writes the regions, and pieces are kept.
    unsafe fn give_all(
        &mut self,
        g: &MessageGroup,
        out: &[(usize, Flow)],
        k: usize,
        in_flight: &mut Vec<InFlight<P::Ticket>>,
        given: &mut Vec<Span>,
    ) -> Result<()> {
        out.iter().filter(|x| k < x.1.segments()).try_for_each(|(to, flow)| {
            // SAFETY: by the caller.
            given.push(unsafe { self.give(g, *to, &flow.parts(k), in_flight)? });
            Ok(())
        })
    }

    /// Begins to receive a segment from a member into a piece.
    ///
    /// # Safety
    /// Until the messages are done nobody uses the piece, and it is kept.
    pub(super) unsafe fn take(
        &mut self,
        g: &MessageGroup,
        from: usize,
        piece: &Span,
        in_flight: &mut Vec<InFlight<P::Ticket>>,
    ) -> Result<()> {
        // SAFETY: by the caller.
        let ticket = unsafe { self.post.recv(g.peer(from), piece.first, piece.bytes)? };
        in_flight.push(InFlight { ticket, with: g.members[from], done: false });
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
    pub(super) unsafe fn swap<'a>(
        &mut self,
        g: &MessageGroup,
        out: &[(usize, Flow<'a>)],
        into: &[(usize, Flow<'a>)],
    ) -> Result<()> {
        let segments = out.iter().chain(into).map(|x| x.1.segments()).max().unwrap_or(0);
        for k in 0..segments {
            let (mut in_flight, mut given, mut taken) = (vec![], vec![], vec![]);
            let mut takes = into.iter().filter(|x| k < x.1.segments());
            let begun = takes.try_for_each(|(from, flow)| {
                let parts = flow.parts(k);
                let piece = self.piece(&parts);
                // SAFETY: by the caller; the piece is kept until the wait is over, and for ever if
                // anything fails before.
                unsafe { self.take(g, *from, &piece, &mut in_flight)? };
                taken.push((piece, parts));
                Ok(())
            });
            // SAFETY: as above.
            let begun = begun
                .and_then(|()| unsafe { self.give_all(g, out, k, &mut in_flight, &mut given) });
            let done = begun.and_then(|()| self.wait(&mut in_flight));
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
    pub(super) unsafe fn fold(
        &mut self,
        g: &MessageGroup,
        how: &[Reduction],
        out: &[(usize, Flow)],
        own: &Flow,
        to: &[&Region],
        share: bool,
    ) -> Result<()> {
        let ways = g.members.len();
        let mut results = own.regions.iter().zip(to);
        if let Some((from, to)) = results.find(|x| x.0.len() != x.1.len()) {
            let (me, n, m) = (self.rank, from.len(), to.len());
            return self.fail(format!("rank {me} folds {n} elements into {m}"));
        }
        let segments = out.iter().map(|x| x.1.segments()).chain([own.segments()]).max();
        for k in 0..segments.unwrap_or(0) {
            let parts = own.parts(k);
            let (mut in_flight, mut given, mut taken) = (vec![], vec![], vec![]);
            let mut others = (0..ways).filter(|&p| p != g.me && !parts.is_empty());
            let begun = others.try_for_each(|p| {
                let piece = self.copy_of(&parts);
                // SAFETY: by the caller; the piece is kept until the wait is over, and for ever if
                // anything fails before.
                unsafe { self.take(g, p, &piece, &mut in_flight)? };
                taken.push(piece);
                Ok(())
            });
            // SAFETY: as above.
            let begun = begun
                .and_then(|()| unsafe { self.give_all(g, out, k, &mut in_flight, &mut given) });
            let done = begun.and_then(|()| self.wait(&mut in_flight));
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
                // SAFETY: all have the elements of this range: pieces were made for them, and the
                // result has as many as the operand; by the caller it overlaps only that.
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
        g: &MessageGroup,
        k: usize,
        out: &[(usize, Flow)],
        own: &Flow,
        to: &[&Region],
    ) -> Result<()> {
        let of = |flow: &Flow| Flow::of(to.iter().copied()).cut(flow.segment(k));
        let mine = of(own);
        let sends: Vec<(usize, Flow)> = out.iter().map(|x| (x.0, mine.clone())).collect();
        let takes: Vec<(usize, Flow)> = out.iter().map(|x| (x.0, of(&x.1))).collect();
        // SAFETY: by the caller.
        unsafe { self.swap(g, &sends, &takes) }
    }
}
