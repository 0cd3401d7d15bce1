//! Seconds of the launches and exchanges of one function, from the types of its values.

use crate::collective::{self, Group, Kind, all_to_all, send};
use crate::device::{Device, Precision};
use crate::kernel::{Attention, Gemm, rows};
use crate::layout::Kernels;
use shardc_ir::diag::Result;
use shardc_ir::func::{Func, Node, Value};
use shardc_ir::group::{Launch, rule_of};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{self, Mask, Op, Sends};
use shardc_ir::rule::has_letter;
use shardc_ir::types::Type;
use std::collections::BTreeMap;

/// The kernels of attention whose share of the peak is taken for ours.
const KERNELS: Kernels = Kernels::Flash(2);

/// What a launch is, with its sizes on one rank.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Work {
    /// Nothing: what is there is seen in another way.
    View,
    /// A product, and bytes that are not its operands' or result's.
    Product { gemm: Gemm, precision: Precision, beside: f64 },
    /// Products of experts, for an even load.
    Grouped { gemm: Gemm, precision: Precision },
    /// Attention forward, or its gradient.
    Attention { sizes: Attention, precision: Precision, backward: bool },
    /// Work that moves bytes.
    Rows { bytes: f64 },
    /// A collective of a group by its mnemonic, with the bytes of [`collective::seconds`].
    Exchange {
        op: &'static str,
        sends: Sends,
        group: Group,
        stride: usize,
        bytes: f64,
        atoms: AtomSet,
    },
}

/// Prices the functions of a plan on a device.
pub struct Pricer<'a> {
    pub mesh: &'a Mesh,
    pub device: &'a Device,
    /// Groups by their atoms: where their ranks are, and how far neighbours are from each other.
    groups: BTreeMap<AtomSet, (Group, usize)>,
}

impl<'a> Pricer<'a> {
    /// For plans on a mesh.
    pub fn new(mesh: &'a Mesh, device: &'a Device) -> Pricer<'a> {
        Pricer { mesh, device, groups: BTreeMap::new() }
    }

    /// Where the ranks of a group are: of those of some ranks, the one over the most domains; and how far
    /// its neighbours are from each other.
    fn group(&mut self, atoms: AtomSet) -> (Group, usize) {
        let (mesh, domain) = (self.mesh, self.device.domain as usize);
        *self.groups.entry(atoms).or_insert_with(|| {
            let last = mesh.ranks() - 1;
            let of = |rank: usize| {
                let ranks = mesh.group(atoms, rank);
                let mut domains: Vec<usize> = ranks.iter().map(|r| r / domain).collect();
                domains.sort_unstable();
                domains.dedup();
                let stride = ranks.windows(2).map(|w| w[0].abs_diff(w[1])).max().unwrap_or(1);
                let size = ranks.len() as f64;
                (Group { size, per_domain: size / domains.len() as f64 }, stride)
            };
            let some = [0, last / 2, last].map(of);
            some.into_iter()
                .min_by(|a, b| a.0.per_domain.total_cmp(&b.0.per_domain))
                .unwrap_or((Group { size: 1.0, per_domain: 1.0 }, 1))
        })
    }

    fn bytes(&self, f: &Func, all: &[Value]) -> f64 {
        all.iter().map(|v| f.ty(*v).local_bytes(self.mesh) as f64).sum()
    }

    /// What a launch is.
    pub fn work(&mut self, f: &Func, x: &Launch) -> Work {
        let nodes = &f.nodes[x.nodes.clone()];
        if nodes.iter().all(|n| n.op.def().is_view()) {
            return Work::View;
        }
        let first = &nodes[0];
        if let Some(c) = first.op.collective() {
            let (group, stride) = self.group(c.atoms());
            let sends = c.sends();
            let pairs = nodes.iter().flat_map(|n| n.ins.iter().zip(&n.outs));
            let pairs = pairs.map(|(&i, &o)| (f.ty(i), f.ty(o)));
            let held = |t: &Type| t.local_bytes(self.mesh) as f64;
            let one = |(i, o): (&Type, &Type)| match sends {
                Sends::ShareOfResult => held(o),
                Sends::Rows { .. } | Sends::Boxes => {
                    let n = group.size;
                    c.ring_bytes(self.mesh, i, o) * n / (n - 1.0).max(1.0)
                }
                _operand => held(i),
            };
            let bytes = pairs.map(one).sum();
            let (op, atoms) = (first.op.mnemonic(), c.atoms());
            return Work::Exchange { op, sends, group, stride, bytes, atoms };
        }
        let product = nodes.iter().find(|n| n.op.is_heavy());
        product.and_then(|n| self.heavy(f, x, n)).unwrap_or_else(|| {
            // A look-up reads the rows that it takes, and not their table.
            let of_table = |n: &Node| matches!(n.op.facts().kind, ops::Kind::Lookup);
            let bytes = match nodes.iter().any(of_table) {
                true => 2.0 * self.bytes(f, &x.outs),
                false => self.bytes(f, &x.ins) + self.bytes(f, &x.outs),
            };
            Work::Rows { bytes }
        })
    }

    /// Products and attention.
    fn heavy(&self, f: &Func, x: &Launch, n: &Node) -> Option<Work> {
        let ty = |i: usize| f.ty(n.ins[i]);
        let local = |t: &Type, d: usize| t.chunk(self.mesh, d) as f64;
        let of_attention = match &n.op {
            Op::Attention(o) => Some((o.mask, false)),
            Op::AttentionGrad(o) => Some((o.mask, true)),
            _another => None,
        };
        if let Some((mask, backward)) = of_attention {
            let (q, k, v) = (ty(0), ty(1), ty(2));
            let (queries, keys) = (local(q, 1), local(k, 1));
            let sizes = Attention {
                rows: local(q, 0),
                heads: local(q, 2),
                queries,
                keys,
                width: local(q, 3),
                values: local(v, 3),
                seen: seen(mask, queries, keys, 1.0),
                computed: seen(mask, queries, keys, self.device.block()),
            };
            return Some(Work::Attention { sizes, precision: Precision::of(q.dtype)?, backward });
        }
        if n.op.facts().kind == ops::Kind::GroupedProduct {
            return self.grouped(f, n);
        }
        let gemm = self.gemm(f, n);
        let all = self.bytes(f, &x.ins) + self.bytes(f, &x.outs);
        let beside = (all - self.bytes(f, &[n.ins[0], n.ins[1], n.outs[0]])).max(0.0);
        // Of two types the wider one is computed in.
        let widest = if ty(0).dtype.bytes() >= ty(1).dtype.bytes() { ty(0) } else { ty(1) };
        Some(Work::Product { gemm, precision: Precision::of(widest.dtype)?, beside })
    }

    /// Sizes of a product: letters of its left operand, of its right one, of both, and of all three.
    fn gemm(&self, f: &Func, n: &Node) -> Gemm {
        let rule = rule_of(f, n);
        let mut out = Gemm { m: 1.0, n: 1.0, k: 1.0, batch: 1.0 };
        let mut seen = vec![];
        for (i, &v) in n.ins.iter().enumerate().take(2) {
            for (d, letters) in rule.ins[i].iter().enumerate() {
                let Some(letter) = letters.single().filter(|l| !seen.contains(l)) else { continue };
                seen.push(letter);
                let size = f.ty(v).chunk(self.mesh, d) as f64;
                let of = |x| has_letter(x, letter);
                let slot = match (of(&rule.ins[0]), of(&rule.ins[1]), of(&rule.outs[0])) {
                    (true, true, true) => &mut out.batch,
                    (true, true, false) => &mut out.k,
                    (true, false, _) => &mut out.m,
                    _right => &mut out.n,
                };
                *slot *= size;
            }
        }
        out
    }

    /// Products of experts: rows `[g,z,c,·]`, counts, weights or rows of the gradient.
    fn grouped(&self, f: &Func, n: &Node) -> Option<Work> {
        let ty = |i: usize| f.ty(n.ins[i]);
        let (rows, second) = (ty(0), ty(2));
        let outer = matches!(n.op, Op::GroupedOuter(_));
        let weights = if outer { f.ty(n.outs[0]) } else { second };
        let at = |t: &Type, d: usize| t.chunk(self.mesh, d) as f64;
        let experts = at(weights, 0).max(1.0);
        let room = at(rows, 0) * at(rows, 1) * at(rows, 2);
        // As many copies as tokens have, spread evenly over all groups.
        let of_copies = f.nodes.iter().filter(|n| n.op.facts().kind == ops::Kind::Copies);
        let slots = of_copies
            .flat_map(|n| n.ins.iter().map(|v| f.ty(*v)))
            .find(|t| t.rank() == 3 && !t.dtype.is_float());
        let even = slots.map_or(room, |t| {
            let of_shard = (t.dims[1].size * t.dims[2].size) as f64;
            let groups = rows.dims[0].size as f64;
            (at(rows, 1) * of_shard / groups * at(rows, 0)).min(room)
        });
        let (o, i) = (at(weights, 1), at(weights, 2));
        let m = even / experts;
        let gemm = match (outer, matches!(n.op, Op::GroupedDotT(_))) {
            (true, _) => Gemm { m: o, n: i, k: m, batch: experts },
            (false, true) => Gemm { m, n: i, k: o, batch: experts },
            (false, false) => Gemm { m, n: o, k: i, batch: experts },
        };
        Some(Work::Grouped { gemm, precision: Precision::of(rows.dtype)? })
    }

    /// Seconds of a launch.
    ///
    /// # Errors
    /// `device` if the device lacks products of an element type.
    pub fn seconds(&self, w: &Work) -> Result<f64> {
        let d = self.device;
        Ok(match *w {
            Work::View => 0.0,
            Work::Product { gemm, precision, beside } => {
                gemm.seconds(d, precision)? + rows(d, beside, 0.0)
            }
            Work::Grouped { gemm, precision } => gemm.seconds(d, precision)?,
            Work::Attention { sizes, precision, backward } => {
                let (f, b) = sizes.seconds(d, KERNELS.share(d)?, precision)?;
                if backward { b } else { f }
            }
            Work::Rows { bytes } => rows(d, bytes, 1.0),
            Work::Exchange { sends, group, stride, bytes, .. } => match sends {
                Sends::Nothing => 0.0,
                Sends::SumToAll => collective::seconds(d, Kind::AllReduce, group, bytes),
                Sends::Share => collective::seconds(d, Kind::ReduceScatter, group, bytes),
                Sends::ShareOfResult | Sends::MeanShare => {
                    collective::seconds(d, Kind::AllGather, group, bytes)
                }
                Sends::Pieces | Sends::Rows { .. } | Sends::Boxes => {
                    all_to_all(d, group, bytes, bytes)
                }
                Sends::Whole => send(d, stride, bytes),
            },
        })
    }

    /// Multiplications and additions of a launch, without those that nothing is multiplied in.
    pub fn flops(w: &Work) -> f64 {
        match w {
            Work::Product { gemm, .. } | Work::Grouped { gemm, .. } => gemm.flops(),
            Work::Attention { sizes, backward, .. } => {
                sizes.flops() * if *backward { 2.5 } else { 1.0 }
            }
            Work::View | Work::Rows { .. } | Work::Exchange { .. } => 0.0,
        }
    }
}

/// The part of the scores that blocks of so many queries compute under a mask, which is what any of them sees, on the
/// rank with the last queries, which sees most.
fn seen(mask: Mask, queries: f64, keys: f64, block: f64) -> f64 {
    let behind = mask.right.map_or(keys, |n| n as f64);
    let sides = before(queries.min(keys), keys, block) + behind / keys;
    let more = block.min(queries) - 1.0;
    let window = mask.left.map_or(1.0, |n| (n as f64 + 1.0 + behind + more) / keys);
    let halved = if mask.right == Some(0) { 0.5 } else { 1.0 };
    let chunk = mask.chunk.map_or(1.0, |n| halved * n as f64 / keys);
    sides.min(window).min(chunk).min(1.0)
}

/// The part of the keys that are not behind the last query of a block, of the last queries; of single queries as if
/// each saw half of itself.
fn before(queries: f64, keys: f64, block: f64) -> f64 {
    if block <= 1.0 {
        return (keys - queries / 2.0) / keys;
    }
    let (first, full) = (keys - queries, (queries / block).floor());
    let rest = queries - full * block;
    let of_full = full * block * first + block * block * full * (full + 1.0) / 2.0;
    (of_full + rest * keys) / (queries * keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counted one block after the other, as the kernel goes.
    #[test]
    fn blocks_compute_what_any_of_their_queries_sees() {
        for (queries, keys) in [(128, 128), (64, 64), (256, 256), (100, 300), (96, 96)] {
            for block in [32, 96, 128] {
                let ends = (0..queries).step_by(block).map(|i| (i, queries.min(i + block)));
                let of = |(from, to): (usize, usize)| (to - from) * (keys - queries + to);
                let counted = ends.map(of).sum::<usize>() as f64 / (queries * keys) as f64;
                let [q, k, b] = [queries, keys, block].map(|n| n as f64);
                let said = seen(Mask::CAUSAL, q, k, b);
                assert!(
                    (said - counted).abs() < 1e-12,
                    "{queries} {keys} {block}: {said} {counted}"
                );
            }
        }
        assert_eq!(seen(Mask::CAUSAL, 128.0, 128.0, 1.0), 0.5);
        assert_eq!(seen(Mask::CAUSAL, 128.0, 256.0, 1.0), 0.75);
    }
}
