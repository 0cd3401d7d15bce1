//! What an op costs a rank, in picoseconds: a link, a memory and a processor, one after the other.

use crate::hardware::Hardware;
use crate::infer::{self, Query};
use crate::mesh::Mesh;
use crate::ops::Op;
use crate::types::Type;

/// Picoseconds of an op on one rank. Whole numbers, so that ties are ties.
pub fn op(hw: &Hardware, mesh: &Mesh, op: &Op, ins: &[&Type], out: &Type) -> u64 {
    let ps = |seconds: f64| (seconds * 1e12).min(1e18) as u64;
    if let Some(c) = op.collective() {
        let bytes = ins.first().map_or(0.0, |t| c.ring_bytes(mesh, t, out));
        return ps(hw.latency + bytes / hw.link(mesh, c.atoms()));
    }
    if op.def().is_view() {
        return ps(hw.line);
    }
    let bytes: usize = ins.iter().map(|t| t.local_bytes(mesh)).sum();
    let bytes = (bytes + out.local_bytes(mesh)) as f64;
    let flops = flops(mesh, op, ins, out);
    ps(hw.start + (bytes / hw.memory).max(flops / hw.flops))
}

/// Floating-point operations of an op on one rank.
pub fn flops(mesh: &Mesh, op: &Op, ins: &[&Type], out: &Type) -> f64 {
    let def = op.def();
    let ranks: Vec<usize> = ins.iter().map(|t| t.rank()).collect();
    let (rule, dtypes) = (def.rule(&ranks), def.dtypes(ins, 1));
    let (linear, reduction) = (def.linear(), def.reduction());
    let (sizes, declared) = (def.sizes(), &[Some(out)]);
    let q = Query { mesh, rule: &rule, ins, sizes, declared, dtypes: &dtypes, linear, reduction };
    // An op that moves pieces has a rule for its shape alone, which its types need not follow.
    let Ok(loops) = infer::loops(&q) else { return 0.0 };
    let local = |l: &infer::Loop| {
        let ways: usize = l.atoms.iter().map(|a| mesh.size(a)).product();
        (l.letter, l.size.div_ceil(ways) as f64)
    };
    def.flops(&loops.0.iter().map(local).collect::<Vec<_>>())
}
