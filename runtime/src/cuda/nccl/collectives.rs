//! The operations of the transport, as NCCL's.

use super::comm::Data;
use super::laid::{Laid, bytes};
use super::library::{DataType, Fold, Queue};
use super::{Event, Nccl, RankGroup};
use crate::cuda::arena::DeviceArena;
use crate::region::Region;
use crate::transport::{Gathered, Reduced, Scattered, Took, Transport, failure, misplaced};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::AtomSet;
use shardc_ir::types::{DType, Reduction};

/// Some bytes at an address.
fn raw(at: u64, count: usize) -> Data {
    Data { at, count, kind: DataType::ncclUint8 }
}

/// Elements to be folded.
fn numbers(at: u64, count: usize, elem: DType) -> Data {
    let kind = match elem {
        DType::F32 => DataType::ncclFloat32,
        DType::BF16 => DataType::ncclBfloat16,
        DType::F16 => DataType::ncclFloat16,
        DType::I32 => DataType::ncclInt32,
    };
    Data { at, count, kind }
}

/// Where what is received lies: an address and a number of bytes.
fn place_of(data: &Region) -> Result<(u64, usize)> {
    let first = data.together(&(0..data.len()));
    let first = first.ok_or_else(|| failure("what is received does not lie together".into()))?;
    Ok((first as u64, bytes(data)))
}

fn folded(how: Reduction) -> Fold {
    match how {
        Reduction::Sum => Fold::ncclSum,
        Reduction::Max => Fold::ncclMax,
        Reduction::Min => Fold::ncclMin,
    }
}

/// Regions as NCCL takes them: one row if it takes all at once, else one for each.
fn rows(regions: &[Region], at_once: bool) -> Vec<&[Region]> {
    if at_once { vec![regions] } else { regions.iter().map(std::slice::from_ref).collect() }
}

impl Nccl {
    fn group(&self, axes: AtomSet) -> Result<&RankGroup> {
        self.groups.get(&axes).ok_or_else(|| failure("no such group".into()))
    }

    /// A group for whose members there are so many places, one for each.
    fn with_places(&self, axes: AtomSet, places: usize) -> Result<&RankGroup> {
        let group = self.group(axes)?;
        if places == group.ways {
            return Ok(group);
        }
        Err(failure(misplaced(self.rank, places, group.ways)))
    }

    /// Queues a receive; what the rank's stream had before it.
    fn receive(&mut self, from: usize, data: &Region) -> Result<Event> {
        let (at, len) = place_of(data)?;
        let begun = self.main.mark()?;
        let Some(edge) = self.from.get_mut(&from) else { return self.unknown(from) };
        edge.stream.after(&begun)?;
        // SAFETY: the bytes of the region lie together from there on; who made it keeps them until
        // what is queued is done (`Region::new`), and nobody uses them before `recv`, which queues all
        // that comes later behind it (`Transport::post_recv`).
        unsafe { edge.comm.recv(raw(at, len), 0, edge.stream.stream.cast())? };
        edge.posted.push_back(((at, len), edge.stream.mark()?));
        Ok(begun)
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
        f: impl FnOnce(&RankGroup, &[Laid], &[Laid], Queue) -> Result<()>,
    ) -> Result<()> {
        let lane = self.group(axes)?.lane;
        let places = self.lanes[lane].lay(&[from, to].concat(), self.rehearses)?;
        if self.rehearses {
            return Ok(());
        }
        let begun = self.main.mark()?;
        let on = &mut self.lanes[lane];
        on.stream.after(&begun)?;
        let queue = on.stream.stream.cast();
        let (operands, results) = places.split_at(from.len());
        // SAFETY: by the caller.
        unsafe { on.copy(from, operands, false)? };
        f(self.group(axes)?, operands, results, queue)?;
        let on = &mut self.lanes[lane];
        // SAFETY: by the caller.
        unsafe { on.copy(to, results, true)? };
        let done = on.stream.mark()?;
        if std::mem::take(&mut self.defers) {
            on.deferred.push_back(on.stream.mark()?);
            self.begun(done);
            return Ok(());
        }
        self.follow(done)
    }
}

impl Transport for Nccl {
    fn rank(&self) -> usize {
        self.rank
    }
    fn world(&self) -> usize {
        self.ranks
    }

    fn barrier(&mut self, axes: AtomSet) -> Result<()> {
        let nothing = |g: &RankGroup, _: &[Laid], _: &[Laid], queue| {
            g.comm.together(|| {
                // SAFETY: there are no bytes.
                (0..g.ways).filter(|&p| p != g.me).try_for_each(|p| unsafe {
                    g.comm.send(raw(0, 0), p, queue)?;
                    g.comm.recv(raw(0, 0), p, queue)
                })
            })
        };
        // SAFETY: there are no regions.
        unsafe { self.collective(axes, &[], &[], nothing) }
    }

    fn all_reduce(&mut self, axes: AtomSet, tensors: &[Reduced]) -> Result<()> {
        let from: Vec<&[Region]> = tensors.iter().map(|t| std::slice::from_ref(&t.from)).collect();
        let to: Vec<&[Region]> = tensors.iter().map(|t| std::slice::from_ref(&t.to)).collect();
        let fold = |g: &RankGroup, from: &[Laid], to: &[Laid], queue| {
            g.comm.together(|| {
                // SAFETY: each place has the elements of its tensor's region, and both regions have
                // as many (`Reduced`).
                tensors.iter().zip(from.iter().zip(to)).try_for_each(|(t, (from, to))| unsafe {
                    let data = numbers(from.at, t.from.len(), t.from.elem());
                    g.comm.all_reduce(data, to.at, folded(t.fold), queue)
                })
            })
        };
        // SAFETY: who made the regions keeps them until what is queued is done (`Region::new`).
        unsafe { self.collective(axes, &from, &to, fold) }
    }

    fn all_gather(&mut self, axes: AtomSet, tensors: &[Gathered]) -> Result<()> {
        // Members give equal parts.
        let even = |t: &Gathered| t.to.iter().all(|r| bytes(r) == bytes(&t.from));
        for t in tensors {
            let me = self.with_places(axes, t.to.len())?.me;
            let (rank, n, m) = (self.rank, bytes(&t.from), bytes(&t.to[me]));
            if n != m {
                return Err(failure(format!("rank {rank} gathers {n} B of its own into {m} B")));
            }
        }
        let from: Vec<&[Region]> = tensors.iter().map(|t| std::slice::from_ref(&t.from)).collect();
        let to: Vec<&[Region]> = tensors.iter().flat_map(|t| rows(&t.to, even(t))).collect();
        let gather = |g: &RankGroup, from: &[Laid], mut results: &[Laid], queue| {
            g.comm.together(|| {
                for (t, from) in tensors.iter().zip(from) {
                    let own;
                    (own, results) = results.split_at(if even(t) { 1 } else { g.ways });
                    if even(t) {
                        // SAFETY: the results' place has the bytes of `from` once for every member.
                        unsafe {
                            g.comm.all_gather(raw(from.at, bytes(&t.from)), own[0].at, queue)?;
                        }
                        continue;
                    }
                    let mut parts = t.to.iter().zip(own).enumerate().filter(|x| !x.1.0.is_empty());
                    // SAFETY: each place has the bytes of its region, and that of the operand, which is
                    // given as the root, has those of this member's.
                    parts.try_for_each(|(root, (r, place))| unsafe {
                        let given = if root == g.me { from.at } else { place.at };
                        g.comm.broadcast(raw(given, bytes(r)), place.at, root, queue)
                    })?;
                }
                Ok(())
            })
        };
        // SAFETY: who made the regions keeps them until what is queued is done (`Region::new`).
        unsafe { self.collective(axes, &from, &to, gather) }
    }

    fn reduce_scatter(&mut self, axes: AtomSet, tensors: &[Scattered]) -> Result<()> {
        // Members get equal parts.
        let even = |t: &Scattered| t.from.iter().all(|r| r.len() == t.to.len());
        for t in tensors {
            let me = self.with_places(axes, t.from.len())?.me;
            let (rank, n, m) = (self.rank, t.from[me].len(), t.to.len());
            if n != m {
                return Err(failure(format!("rank {rank} folds {n} elements into {m}")));
            }
        }
        let from: Vec<&[Region]> = tensors.iter().flat_map(|t| rows(&t.from, even(t))).collect();
        let to: Vec<&[Region]> = tensors.iter().map(|t| std::slice::from_ref(&t.to)).collect();
        let scatter = |g: &RankGroup, mut operands: &[Laid], results: &[Laid], queue| {
            g.comm.together(|| {
                for (t, to) in tensors.iter().zip(results) {
                    let how = folded(t.fold);
                    let own;
                    (own, operands) = operands.split_at(if even(t) { 1 } else { g.ways });
                    if even(t) {
                        let data = numbers(to.at, t.to.len(), t.to.elem());
                        // SAFETY: the operands' place has the elements of the result once for every
                        // member.
                        unsafe { g.comm.reduce_scatter(own[0].at, data, how, queue)? };
                        continue;
                    }
                    let mut parts =
                        t.from.iter().zip(own).enumerate().filter(|x| !x.1.0.is_empty());
                    // SAFETY: each place has the elements of its region, and the result's those of this
                    // member's part, the only one that is written here.
                    parts.try_for_each(|(root, (r, place))| unsafe {
                        let data = numbers(place.at, r.len(), r.elem());
                        g.comm.reduce(data, to.at, how, root, queue)
                    })?;
                }
                Ok(())
            })
        };
        // SAFETY: who made the regions keeps them until what is queued is done (`Region::new`).
        unsafe { self.collective(axes, &from, &to, scatter) }
    }

    fn all_to_all_v(
        &mut self,
        axes: AtomSet,
        from: &[Vec<Region>],
        to: &[Vec<Region>],
    ) -> Result<()> {
        self.with_places(axes, from.len())?;
        self.with_places(axes, to.len())?;
        let operands: Vec<&[Region]> = from.iter().map(Vec::as_slice).collect();
        let results: Vec<&[Region]> = to.iter().map(Vec::as_slice).collect();
        let sum = |row: &[Region]| row.iter().map(bytes).sum();
        let swap = |g: &RankGroup, out: &[Laid], into: &[Laid], queue| {
            g.comm.together(|| {
                // SAFETY: each place has the bytes of all regions of its row.
                (0..g.ways).try_for_each(|p| unsafe {
                    let (out, into) = (raw(out[p].at, sum(&from[p])), raw(into[p].at, sum(&to[p])));
                    if out.count > 0 {
                        g.comm.send(out, p, queue)?;
                    }
                    if into.count > 0 { g.comm.recv(into, p, queue) } else { Ok(()) }
                })
            })
        };
        // SAFETY: who made the regions keeps them until what is queued is done (`Region::new`).
        unsafe { self.collective(axes, &operands, &results, swap) }
    }

    fn permute(&mut self, axes: AtomSet, shift: usize, from: &Region, to: &Region) -> Result<()> {
        let (out, into) = (bytes(from), bytes(to));
        let (from, to) = (std::slice::from_ref(from), std::slice::from_ref(to));
        let pass = |g: &RankGroup, from: &[Laid], to: &[Laid], queue| {
            let next = (g.me + shift) % g.ways;
            let last = (g.me + g.ways - shift % g.ways) % g.ways;
            // SAFETY: each place has the bytes of its region.
            g.comm.together(|| unsafe {
                g.comm.send(raw(from[0].at, out), next, queue)?;
                g.comm.recv(raw(to[0].at, into), last, queue)
            })
        };
        // SAFETY: who made the regions keeps them until what is queued is done (`Region::new`).
        unsafe { self.collective(axes, &[from], &[to], pass) }
    }

    fn broadcast(&mut self, axes: AtomSet, root: usize, data: &Region) -> Result<()> {
        let (n, row) = (bytes(data), std::slice::from_ref(data));
        // SAFETY: both places have the bytes of the region.
        let give = |g: &RankGroup, from: &[Laid], to: &[Laid], queue| unsafe {
            g.comm.broadcast(raw(from[0].at, n), to[0].at, root % g.ways, queue)
        };
        // SAFETY: who made the regions keeps them until what is queued is done (`Region::new`).
        unsafe { self.collective(axes, &[row], &[row], give) }
    }

    fn send(&mut self, to: usize, data: &Region) -> Result<()> {
        let Some(at) = data.together(&(0..data.len())) else {
            return Err(failure("what is sent does not lie together".into()));
        };
        let begun = self.main.mark()?;
        let Some(edge) = self.to.get_mut(&to) else { return self.unknown(to) };
        edge.stream.after(&begun)?;
        // SAFETY: the bytes of the region lie together from there on, and stay as they are until the
        // caller has waited for this send (`Transport::send`).
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

    fn post_recv(&mut self, from: usize, data: &Region) -> Result<()> {
        let begun = self.receive(from, data)?;
        // It is queued, and nothing waits for it yet.
        self.begun(begun);
        Ok(())
    }

    fn recv(&mut self, from: usize, data: &Region) -> Result<()> {
        if self.from.get(&from).is_none_or(|edge| edge.posted.is_empty()) {
            self.receive(from, data)?;
        }
        let posted = self.from.get_mut(&from).and_then(|edge| edge.posted.pop_front());
        let Some((place, done)) = posted else { return self.unknown(from) };
        if place_of(data)? != place {
            return Err(failure(format!("rank {} takes what it has not posted", self.rank)));
        }
        self.follow(done)
    }

    fn rehearse(&mut self, does: bool) -> Result<bool> {
        self.rehearses = does;
        for lane in self.lanes.iter_mut().filter(|l| !does && l.scratch.bytes > 0) {
            lane.scratch.room = Some(DeviceArena::new(&lane.stream, lane.scratch.bytes, false)?);
        }
        Ok(true)
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn defer(&mut self) {
        self.defers = true;
    }

    fn lane(&self, axes: AtomSet) -> usize {
        self.groups.get(&axes).map_or(0, |g| g.lane)
    }

    fn finish(&mut self, lane: usize) -> Result<Option<Took>> {
        let done = self.lanes[lane].deferred.pop_front();
        done.map_or(Ok(()), |done| self.main.after(&done))?;
        Ok(None)
    }

    fn abort(&mut self, _cause: Diag) {
        // Others learn it from those who watch this process.
        self.alarm.ring();
    }
}
