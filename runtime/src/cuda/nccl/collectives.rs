//! The operations of the transport, as NCCL's.

use super::laid::{Laid, bytes};
use super::library::{Data, DataType, Fold, Queue};
use super::{Group, Nccl};
use crate::region::Region;
use crate::transport::{Reduced, Transport, failure, misplaced};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::Elem;
use shardc_ir::mesh::AtomSet;
use shardc_ir::types::Reduction;

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

impl Nccl {
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
}

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
