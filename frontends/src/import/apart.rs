//! Whether a value keeps the tokens of a sequence apart.

use shardc_ir::func::{Func, Value};
use shardc_ir::ops::Kind;
use shardc_ir::rule::Letter;
use std::collections::BTreeSet;

/// True if no op that `of` comes from sums over tokens or needs all of them at once, as a softmax over tokens and a mean
/// of them do. Attentions are left out, which have rules of their own, and so are experts, which take each token for
/// itself.
pub(super) fn tokens_stay_apart(f: &Func, of: Value) -> bool {
    let mut needed = vec![false; f.values.len()];
    needed[of.0 as usize] = true;
    for n in f.nodes.iter().rev() {
        if n.outs.iter().any(|v| needed[v.0 as usize]) {
            n.ins.iter().for_each(|v| needed[v.0 as usize] = true);
        }
    }
    // By value: the dims in which tokens are.
    let mut tokens: Vec<Vec<bool>> =
        (0..f.values.len()).map(|v| vec![false; f.ty(Value(v as u32)).rank()]).collect();
    for a in &f.args {
        if let Some(dim) = a.input().and_then(|i| i.tokens()) {
            tokens[a.value.0 as usize][dim] = true;
        }
    }
    for n in f.nodes.iter().filter(|n| n.outs.iter().any(|v| needed[v.0 as usize])) {
        let ranks: Vec<usize> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
        let rule = n.op.def().rule(&ranks);
        let of_ins = rule.ins.iter().zip(&n.ins).flat_map(|(dims, v)| {
            let own = dims.iter().zip(&tokens[v.0 as usize]).filter(|(_, t)| **t);
            own.flat_map(|(g, _)| g.letters()).copied()
        });
        let letters: BTreeSet<Letter> = of_ins.collect();
        let kept = |l: &Letter| {
            let stays = rule.outs.iter().flatten().any(|g| g.letters().contains(l));
            stays && !rule.is_whole(*l)
        };
        let kind = n.op.facts().kind;
        if kind != Kind::Attention && !kind.of_experts() && !letters.iter().all(kept) {
            return false;
        }
        for (dims, v) in rule.outs.iter().zip(&n.outs) {
            for (g, own) in dims.iter().zip(&mut tokens[v.0 as usize]) {
                *own = g.letters().iter().any(|l| letters.contains(l));
            }
        }
    }
    true
}
