//! The operations of the transport: publish, read the others' regions, wait.

use super::{Begun, Mover, Threads};
use crate::hub::{HubCall, Offers, held};
use crate::region::{self, Region, chunk, join, split};
use crate::transport::{Gathered, Reduced, Scattered, Transport, misplaced};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::AtomSet;
use shardc_ir::types::DType;

/// Sums of at most this many elements are published by value and folded whole by every member: one
/// wait instead of three.
const SMALL: usize = 2048;

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

    fn all_gather(&mut self, axes: AtomSet, tensors: &[Gathered]) -> Result<()> {
        let c = self.begin(axes, "all_gather", |call| {
            call.regions.extend(tensors.iter().map(|t| t.from.clone()));
        })?;
        tensors.iter().enumerate().try_for_each(|(i, t)| self.receive(&c, &t.to, i))?;
        self.end(&c)
    }

    fn reduce_scatter(&mut self, axes: AtomSet, tensors: &[Scattered]) -> Result<()> {
        let c = self.begin(axes, "reduce_scatter", |call| {
            for t in tensors {
                call.regions.extend_from_slice(&t.from);
                call.folds.push(t.fold);
            }
        })?;
        for (i, t) in tensors.iter().enumerate() {
            if t.from.len() != c.ways() {
                return self.fail(misplaced(self.rank, t.from.len(), c.ways()));
            }
            let of = |p| self.theirs(&c, p, i * c.ways() + c.me, t.to.len());
            let parts = (0..c.ways()).map(of).collect::<Result<Vec<Region>>>()?;
            // SAFETY: lengths are equal, members leave their operands, the result is ours alone.
            unsafe { self.mover.fold(t.fold, &parts, &t.to, 0..t.to.len()) }?;
        }
        self.end(&c)
    }

    fn all_to_all(&mut self, axes: AtomSet, from: &[Region], to: &[Region]) -> Result<()> {
        let publish = |call: &mut HubCall| call.regions.extend_from_slice(from);
        let c = self.begin(axes, "all_to_all", publish)?;
        self.receive(&c, to, c.me)?;
        self.end(&c)
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
            return self.fail(misplaced(self.rank, to.len(), c.ways()));
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
                unsafe { region::copy(&t.from, &Region::adjacent(first, DType::F32, n), 0..n) };
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
            unsafe { region::copy(&Region::adjacent(first, DType::F32, n), &t.to, 0..n) };
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

    /// Copies region `i` of member `p`.
    fn take(&mut self, c: &Begun<M::Mark>, p: usize, i: usize, to: &Region) -> Result<()> {
        let from = self.theirs(c, p, i, to.len())?;
        // SAFETY: lengths are equal, and members leave their operands until all have read.
        unsafe { self.mover.copy(&from, to, 0..to.len()) }
    }

    /// Copies region `i` of every member to its place.
    fn receive(&mut self, c: &Begun<M::Mark>, to: &[Region], i: usize) -> Result<()> {
        if to.len() != c.ways() {
            return self.fail(misplaced(self.rank, to.len(), c.ways()));
        }
        to.iter().enumerate().try_for_each(|(p, to)| self.take(c, p, i, to))
    }
}
