//! Seconds of the launches and exchanges of one function, from the types of its values.

use super::scores::Scores;
use crate::collective::{self, Group, Kind, all_to_all, send};
use crate::device::{Device, Precision};
use crate::kernel::{Attention, Gemm, rows};
use crate::layout::Kernels;
use shardc_ir::diag::Result;
use shardc_ir::func::{Func, Node, Value};
use shardc_ir::group::{Launch, rule_of};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{self, Op, Sends};
use shardc_ir::plan::TokenOrder;
use shardc_ir::rule::{Letter, has_letter};
use shardc_ir::types::Type;
use std::collections::BTreeMap;

/// Kernels of attention are ours.
const KERNELS: Kernels = Kernels::Own;

/// What a launch is, with its sizes on one rank.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Work {
    /// Nothing: what is there is seen in another way.
    View,
    /// A product, and bytes that are not its operands' or result's; those that work on the result moves in the same
    /// launch, if there is some (none, if it only changes the element type).
    Product { gemm: Gemm, precision: Precision, beside: f64, epilogue: Option<f64> },
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
    /// How tokens are dealt to ranks.
    order: TokenOrder,
    /// What counts and what is computed of scores: all layers have the same few.
    parts: Vec<(Scores, (f64, f64))>,
}

impl<'a> Pricer<'a> {
    /// For plans on a mesh.
    pub fn new(mesh: &'a Mesh, device: &'a Device, order: TokenOrder) -> Pricer<'a> {
        Pricer { mesh, device, groups: BTreeMap::new(), order, parts: vec![] }
    }

    /// What counts and what is computed of scores, worked out once.
    fn parts(&mut self, scores: Scores) -> (f64, f64) {
        let known = self.parts.iter().find(|p| p.0 == scores);
        known.map(|p| p.1).unwrap_or_else(|| {
            let parts = (scores.seen(), scores.computed(self.device.block() as usize));
            self.parts.push((scores, parts));
            parts
        })
    }

    /// Where the ranks of a group are: of those of some ranks, the one over the most domains; and how far
    /// its neighbours are from each other.
    fn group(&mut self, atoms: AtomSet) -> (Group, usize) {
        let (mesh, domain) = (self.mesh, self.device.ranks_of_domain(self.mesh.ranks()));
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
                Sends::Rows { .. } | Sends::Boxes { .. } => {
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
            let bytes = match nodes {
                // Rows that are added to a table: they, and the table's in place.
                [put, sum] if put.op.adds_to_rows() && sum.op.accumulates() => {
                    3.0 * self.bytes(f, &put.ins[..1])
                }
                _ if nodes.iter().any(of_table) => 2.0 * self.bytes(f, &x.outs),
                _ => self.bytes(f, &x.ins) + self.bytes(f, &x.outs),
            };
            Work::Rows { bytes }
        })
    }

    /// Products and attention.
    fn heavy(&mut self, f: &Func, x: &Launch, n: &Node) -> Option<Work> {
        let ty = |i: usize| f.ty(n.ins[i]);
        let local = |t: &Type, d: usize| t.chunk(self.mesh, d) as f64;
        let of_attention = match &n.op {
            Op::Attention(o) => Some((o.mask, false)),
            Op::AttentionGrad(o) => Some((o.mask, true)),
            _another => None,
        };
        if let Some((mask, backward)) = of_attention {
            let (q, k, v) = (ty(0), ty(1), ty(2));
            let positions = if backward { 6 } else { 3 };
            let node = f.nodes[x.nodes.clone()].iter().position(|m| std::ptr::eq(m, n));
            let node = x.nodes.start + node.unwrap_or(0);
            let scores = Scores::of(self.mesh, f, node, positions, mask, self.order);
            let (seen, computed) = self.parts(scores);
            let sizes = Attention {
                rows: local(q, 0),
                heads: local(q, 2),
                queries: local(q, 1),
                keys: local(k, 1),
                width: local(q, 3),
                values: local(v, 3),
                seen,
                computed,
            };
            return Some(Work::Attention { sizes, precision: Precision::of(q.dtype)?, backward });
        }
        if n.op.facts().kind == ops::Kind::GroupedProduct {
            return self.grouped(f, n);
        }
        if n.op.facts().kind == ops::Kind::Recurrence {
            return self.recurrence(f, x, n);
        }
        let gemm = self.gemm(f, n);
        let all = self.bytes(f, &x.ins) + self.bytes(f, &x.outs);
        let more = (all - self.bytes(f, &[n.ins[0], n.ins[1], n.outs[0]])).max(0.0);
        let rest = || f.nodes[x.nodes.clone()].iter().filter(|m| !std::ptr::eq(*m, n));
        let casts = rest().all(|m| matches!(m.op, Op::Cast(_)));
        let (beside, epilogue) = match rest().next() {
            None => (more, None),
            Some(_) if casts => (more, Some(0.0)),
            Some(_) => (0.0, Some(more)),
        };
        // Of two types the wider one is computed in.
        let widest = if ty(0).dtype.bytes() >= ty(1).dtype.bytes() { ty(0) } else { ty(1) };
        Some(Work::Product { gemm, precision: Precision::of(widest.dtype)?, beside, epilogue })
    }

    /// A recurrence as products of its chunks of tokens, of as many operations, and what it moves beside them.
    fn recurrence(&self, f: &Func, x: &Launch, n: &Node) -> Option<Work> {
        let (q, v) = (f.ty(n.ins[0]), f.ty(n.ins[3]));
        let local = |t: &Type, d: usize| t.chunk(self.mesh, d) as f64;
        // Each piece of the tokens is a row.
        let pieces = n.op.def().sizes().first().map_or(1, |x| x.1);
        let tokens = (q.dims[1].size as f64 / pieces as f64).clamp(1.0, local(q, 1).max(1.0));
        let chunk = tokens.min(ops::scan::CHUNK as f64);
        let heads = local(q, 0) * local(q, 2) * (local(q, 1) / tokens).ceil();
        let [width, values] = [local(q, 3), local(v, 3).max(1.0)];
        let letters = [('b', 1.0), ('n', heads), ('s', tokens), ('k', width), ('v', values)];
        let loops = letters.map(|(c, n)| (Letter(c as u8 - b'a'), n));
        let batch = heads * (tokens / chunk).ceil();
        let k = n.op.def().flops(&loops) / (2.0 * batch * chunk * values).max(1.0);
        let gemm = Gemm { m: chunk, n: values, k, batch };
        let beside = self.bytes(f, &x.ins) + self.bytes(f, &x.outs);
        Some(Work::Product { gemm, precision: Precision::of(q.dtype)?, beside, epilogue: None })
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
            Work::Product { gemm, precision, beside, epilogue } => {
                let product = match epilogue {
                    Some(bytes) => gemm.seconds_then(d, precision, bytes)?,
                    None => gemm.seconds(d, precision)?,
                };
                product + rows(d, beside, 0.0)
            }
            Work::Grouped { gemm, precision } => gemm.seconds_then(d, precision, 0.0)?,
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
                Sends::Pieces | Sends::Rows { .. } | Sends::Boxes { .. } => {
                    all_to_all(d, group, bytes, bytes)
                }
                // A ring waits for its slowest step.
                Sends::Whole if group.domains() > 1.0 => send(d, d.domain as usize, bytes),
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
