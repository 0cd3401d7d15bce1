//! What ways, parameters and moves between layouts cost.

use super::{Builder, STORED};
use crate::choose::Cost;
use crate::shard::ways::Way;
use shardc_ir::builder;
use shardc_ir::func::{Func, Name, Step, Value};
use shardc_ir::hardware::Hardware;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{AllGather, AllReduce, Op, ReduceScatter};
use shardc_ir::price;
use shardc_ir::types::{AtomList, DType, Type};
use smallvec::SmallVec;

impl Builder<'_> {
    /// What a way costs by itself.
    pub fn cost(&self, u: usize, w: &Way) -> Cost {
        let (n, mesh) = (&self.f.nodes[u], self.asked.mesh);
        let ins: SmallVec<[&Type; 4]> = w.ins.iter().collect();
        let own = price::op(self.asked.hardware, mesh, &n.op, &ins, &w.outs[0]);
        let active = n.outs.iter().any(|o| self.active[o.0 as usize]);
        // Backward does each product twice, once for each operand's gradient, and reads and writes as often.
        let times = if self.asked.trains && active { 3 } else { 1 };
        let kept = |(o, t): (&Value, &Type)| {
            if self.saved[o.0 as usize] { t.local_bytes(mesh) } else { 0 }
        };
        let kept: usize = n.outs.iter().zip(&w.outs).map(kept).sum();
        Cost { time: own * times, memory: kept as u64 }
    }

    /// What a parameter costs that is used in this layout, stored in each of [`STORED`].
    pub fn parameter(&self, v: Value, used: &Type) -> [Cost; STORED.len()] {
        let (mesh, hw) = (self.asked.mesh, self.asked.hardware);
        let held = used.local_bytes(mesh) as u64;
        let over = used.replicated;
        let trains = self.asked.trains && self.trained[v.0 as usize];
        let elements = held / used.dtype.bytes() as u64;
        // f32: the gradient, two moments, and a master copy where the parameter is of 16 bits.
        let (state, grads) = match (trains, used.dtype) {
            (false, _) => (0, 0),
            (true, DType::F32) => (elements * 8, elements * 4),
            (true, _) => (elements * 12, elements * 4),
        };
        let never = Cost::NEVER;
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

    /// Picoseconds of the collectives from a type to another, and of their mirrors.
    pub fn moved(&mut self, from: u32, to: u32, active: bool) -> Cost {
        if from == to {
            return Cost::ZERO;
        }
        if let Some(&known) = self.moves.get(&(from, to, active)) {
            return known;
        }
        let [a, b] = [from, to].map(|i| self.types.all[i as usize].clone());
        let cost = match self.resharder.path(self.asked.mesh, &a, &b) {
            None => Cost::NEVER,
            Some(steps) => Cost { time: self.time(&a, &steps, active), memory: 0 },
        };
        self.moves.insert((from, to, active), cost);
        cost
    }

    fn time(&self, from: &Type, steps: &[Step], active: bool) -> u64 {
        let (hw, mesh) = (self.asked.hardware, self.asked.mesh);
        let mut at = from;
        let mut sum = 0;
        for s in steps {
            let backward = active && self.asked.trains;
            if s.op.collective().is_some() {
                // Pieces are saved, and gathered again in backward.
                let times = if backward && s.op.gathers() { 2 } else { 1 };
                sum += times * price::op(hw, mesh, &s.op, &[at], &s.ty);
            }
            if backward {
                sum += mirrored(hw, mesh, &s.op, at, &s.ty);
            }
            at = &s.ty;
        }
        sum
    }
}

/// Picoseconds of the mirror of a step: from the cotangent of its result to that of its operand.
fn mirrored(hw: &Hardware, mesh: &Mesh, op: &Op, from: &Type, to: &Type) -> u64 {
    let mut f = Func::new("mirror");
    let [x, d] = [from.clone(), to.cotangent()].map(|t| f.arg(t, Name::parse("x"), None));
    let mut b = builder::Builder::new(mesh, &mut f);
    let y = b.push_as("y", op.clone(), &[x], to);
    op.def().grad(&mut b, &[x], &[y], &[Some(d)]);
    let sends = f.nodes[1..].iter().filter(|n| n.op.collective().is_some());
    sends.map(|n| price::op(hw, mesh, &n.op, &[f.ty(n.ins[0])], f.ty(n.outs[0]))).sum()
}
