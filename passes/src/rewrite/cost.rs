//! What an op costs a rank, in picoseconds: a link, a memory and a processor, one after the other.

use shardc_ir::infer::{self, Query};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::Op;
use shardc_ir::types::Type;

/// Speeds of one rank. The order of alternatives matters here, not the time of day: a few round
/// numbers of the right size are enough.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CostModel {
    /// Of the link to the next rank of a ring, bytes per second.
    pub link: f64,
    /// Of one collective, in seconds.
    pub latency: f64,
    /// Of memory, bytes per second.
    pub memory: f64,
    /// Floating-point operations per second.
    pub flops: f64,
    /// To start one op, in seconds.
    pub start: f64,
    /// Of a line that moves nothing, such as a view, in seconds.
    pub line: f64,
}

impl Default for CostModel {
    fn default() -> CostModel {
        CostModel {
            link: 50e9,
            latency: 10e-6,
            memory: 1e12,
            flops: 50e12,
            start: 1e-6,
            line: 50e-9,
        }
    }
}

impl CostModel {
    /// Picoseconds on one rank. Whole numbers, so that ties are ties.
    pub fn of(&self, mesh: &Mesh, op: &Op, ins: &[&Type], out: &Type) -> u64 {
        let ps = |seconds: f64| (seconds * 1e12).min(1e18) as u64;
        if let Some(c) = op.collective() {
            let bytes = ins.first().map_or(0.0, |t| c.ring_bytes(mesh, t, out));
            return ps(self.latency + bytes / self.link);
        }
        if op.def().is_view() {
            return ps(self.line);
        }
        let bytes: usize = ins.iter().map(|t| t.local_bytes(mesh)).sum();
        let bytes = (bytes + out.local_bytes(mesh)) as f64;
        let flops = flops(mesh, op, ins, out);
        ps(self.start + (bytes / self.memory).max(flops / self.flops))
    }
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
