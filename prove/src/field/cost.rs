//! What it takes to evaluate a plan, before it is done.

use super::ranks::Ranks;
use crate::meaning::rule;
use crate::ops::law;
use shardc_ir::func::{Func, Module, Node};
use shardc_ir::rule::{Letter, has_letter};
use shardc_ir::schedule::Schedule;
use shardc_ir::types::Type;

/// Most elements and multiplications, over all ranks and microbatches and for the textbook, that are computed of a
/// plan as it is: some three seconds, of which anybody's edit of a plan can ask. One with more is made smaller.
pub const AT_ONCE: f64 = (1u64 << 27) as f64;
/// Most of one that cannot be made smaller.
pub const UNCHANGED: f64 = (1u64 << 28) as f64;
/// Most of a plan made smaller, of which only its layers and microbatches can be many.
pub const LARGEST: f64 = (1u64 << 30) as f64;

/// Elements of all values and multiplications for them, on all ranks and for all microbatches.
pub fn cost(m: &Module, ranks: &Ranks, schedule: &Schedule) -> f64 {
    m.funcs.iter().map(|f| of_func(f, ranks, schedule)).sum()
}

fn of_func(f: &Func, ranks: &Ranks, schedule: &Schedule) -> f64 {
    let each = f.kind.is_looped() && f.kind == f.kind.plain();
    let calls = if each { schedule.microbatches } else { 1 };
    let all: f64 = f.nodes.iter().map(|n| of_node(f, n, ranks)).sum();
    all * (calls * ranks.count()) as f64
}

/// Of one rank: the elements of the results, each made of as many products as the letters have places that no
/// result has.
fn of_node(f: &Func, n: &Node, ranks: &Ranks) -> f64 {
    let of = |t: &Type| t.chunks(&ranks.mesh).iter().map(|&n| n as f64).product::<f64>();
    let made: f64 = n.outs.iter().map(|&v| of(f.ty(v))).sum();
    // What only lays tensors out anew sums nothing.
    let mut pairs = n.ins.iter().zip(&n.outs);
    let same =
        n.ins.len() == n.outs.len() && pairs.all(|(&i, &o)| f.ty(i).sizes() == f.ty(o).sizes());
    let summed: f64 = match same {
        true => 1.0,
        false => lost(f, n, ranks).iter().map(|x| x.1 as f64).product(),
    };
    made * summed
}

/// The letters of operands that no result has, with their sizes on a rank.
fn lost(f: &Func, n: &Node, ranks: &Ranks) -> Vec<(Letter, usize)> {
    let ins: Vec<&Type> = n.ins.iter().map(|&v| f.ty(v)).collect();
    let Ok(r) = rule(law(&n.op), &ins) else { return vec![] };
    let mut out: Vec<(Letter, usize)> = vec![];
    for (dims, t) in r.ins.iter().zip(&ins) {
        for (g, size) in dims.iter().zip(t.chunks(&ranks.mesh)) {
            let letter = g.single().filter(|&l| !r.outs.iter().any(|o| has_letter(o, l)));
            if let Some(l) = letter.filter(|&l| out.iter().all(|x| x.0 != l)) {
                out.push((l, size));
            }
        }
    }
    out
}
