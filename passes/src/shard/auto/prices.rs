//! What ways and parameters cost.

use super::{Builder, STORED};
use crate::choose::Cost;
use crate::shard::ways::Way;
use shardc_ir::func::Value;
use shardc_ir::mesh::AtomSet;
use shardc_ir::ops::{AllGather, AllReduce, Op, ReduceScatter};
use shardc_ir::price;
use shardc_ir::types::{AtomList, DType, Type};
use smallvec::SmallVec;

impl Builder<'_> {
    /// What a way costs by itself.
    pub fn cost(&self, u: usize, w: &Way) -> Cost {
        let (n, mesh) = (&self.f.nodes[u], self.asked.mesh);
        let ins: SmallVec<[&Type; 4]> = w.ins.iter().collect();
        let own = price::op(self.asked.hardware, mesh, &w.op, &ins, &w.outs[0]);
        let active = n.outs.iter().any(|o| self.active[o]);
        // Backward does each product twice, once for each operand's gradient, and reads and writes as often.
        let times = if self.asked.trains && active { 3 } else { 1 };
        let kept = |(o, t): (&Value, &Type)| {
            if self.saved[o] { t.local_bytes(mesh) } else { 0 }
        };
        let kept: usize = n.outs.iter().zip(&w.outs).map(kept).sum();
        let time = match w.op.layout() {
            Some(_) => self.moves.step(&w.op, &w.ins[0], &w.outs[0], active),
            None => own * times,
        };
        Cost { time, memory: kept as u64 }
    }

    /// What a parameter costs that is used in this layout, stored in each of [`STORED`].
    pub fn parameter(&self, v: Value, used: &Type) -> [Cost; STORED.len()] {
        let (mesh, hw) = (self.asked.mesh, self.asked.hardware);
        let held = used.local_bytes(mesh) as u64;
        let over = used.replicated;
        let trains = self.asked.trains && self.trained[v];
        let elements = held / used.dtype.bytes() as u64;
        // f32: the gradient, what the optimizer keeps, and a master copy where the parameter is of 16 bits.
        let master = u64::from(used.dtype != DType::F32);
        let (state, grads) = match trains {
            false => (0, 0),
            true => (elements * 4 * (self.asked.states + master), elements * 4),
        };
        let never = Cost::NEVER;
        if !used.partial().is_empty() {
            return [never; STORED.len()];
        }
        let whole = |time| Cost { time, memory: held + state + grads };
        if over.is_empty() {
            return [never, whole(0), never];
        }
        let of = |dtype, sum: bool| {
            let mut t = Type { dtype, ..used.clone() };
            (t.replicated, t.sum) = (AtomSet::EMPTY, if sum { over } else { AtomSet::EMPTY });
            t
        };
        let part = of(DType::F32, true);
        let share = |time: u64| time / self.asked.microbatches as u64;
        let all: Op = AllReduce { axes: over }.into();
        let sum =
            if trains { price::op(hw, mesh, &all, &[&part], &of(DType::F32, false)) } else { 0 };
        let plain = whole(share(sum));
        // In pieces of the first dim that is cut evenly.
        let ways = mesh.ways(over);
        let even = |d: &usize| used.dims[*d].size % (used.pieces(mesh, *d) * ways) == 0;
        let Some(dim) = (0..used.rank()).find(even) else { return [never, plain, never] };
        let atoms = AtomList::collect(used.dims[dim].atoms.iter().chain(over.iter()));
        let Some(atoms) = atoms else { return [never, plain, never] };
        let piece = |dtype| {
            let mut t = of(dtype, false);
            t.dims[dim].atoms = atoms;
            t
        };
        let gather: Op = AllGather { axes: over, dim }.into();
        let gathered = price::op(hw, mesh, &gather, &[&piece(used.dtype)], used);
        let scatter: Op = ReduceScatter { axes: over, dim }.into();
        let scattered = match trains {
            true => price::op(hw, mesh, &scatter, &[&part], &piece(DType::F32)),
            false => 0,
        };
        let ways = ways as u64;
        let once = Cost { time: share(gathered + scattered), memory: held + grads + state / ways };
        let times = if trains { 2 } else { 1 };
        let each =
            Cost { time: times * gathered + scattered, memory: (held + grads + state) / ways };
        [if trains { once } else { never }, plain, each]
    }
}
