//! The gradient of a weight that is used twice has one place, to which every contribution is added.

use super::{asked, llama, planned, scheduled};
use shardc_ir::func::{Func, Node};
use shardc_ir::plan::{Plan, RankClass};
use shardc_ir::types::DType;
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::Options;
use shardc_passes::schedule::Named;
use std::collections::BTreeSet;

const VOCAB: usize = 128_256;

/// A small model with a large table, which is its head too.
fn tied() -> serde_json::Value {
    let mut m = llama("8b");
    m["tie_word_embeddings"] = true.into();
    m["num_hidden_layers"] = 2.into();
    m["hidden_size"] = 64.into();
    m["intermediate_size"] = 64.into();
    m["head_dim"] = 64.into();
    m["num_attention_heads"] = 1.into();
    m["num_key_value_heads"] = 1.into();
    m
}

/// Per class, where gradients of the table, of which ranks have a piece of so many rows, lie in all calls of
/// microbatches: the function, and the place in the arena.
fn places(plan: &Plan, [rows, hidden]: [usize; 2]) -> Vec<BTreeSet<(&str, usize)>> {
    let bytes = rows * hidden * 4;
    let of = |c: &RankClass| {
        let mut all = BTreeSet::new();
        for call in c.calls().filter(|c| plan.module.funcs[c.func].kind.is_looped()) {
            let f = &plan.module.funcs[call.func];
            for (v, p) in f.values.iter().zip(&c.memory.places[call.func]) {
                let is_table = v.ty.dims.len() == 2 && v.ty.dims[1].size == hidden;
                if v.name.grad && is_table && p.bytes == bytes {
                    all.insert((&*f.name, call.frames[p.frame as usize] + p.offset));
                }
            }
        }
        all
    };
    plan.classes.iter().map(of).collect()
}

/// So many functions, and one place.
fn in_one_place(all: &BTreeSet<(&str, usize)>, functions: usize) -> bool {
    let places: BTreeSet<usize> = all.iter().map(|p| p.1).collect();
    [all.len(), places.len()] == [functions, 1]
}

#[test]
fn gradients_of_tied_tables_have_one_place() {
    let chunks = |n, o| Options { loss_chunks: LossChunks::Of(n), ..o };
    for (mesh, zero, shards) in [
        (&[][..], 0, 1),
        (&[("dp_shard", 2)], 1, 1),
        (&[("dp_replicate", 2)], 0, 1),
        (&[("tp", 2)], 0, 2),
    ] {
        for m in [1, 2] {
            for recompute in [Recompute::None, Recompute::Elementwise, Recompute::Full] {
                let o = Options { zero, ..asked(mesh, false, 16, m, recompute.clone()) };
                let half = Options { dtype: DType::BF16, grad_dtype: DType::F32, ..o.clone() };
                // In chunks forward makes the head's part.
                for (o, functions) in [(o.clone(), 1), (half, 1), (chunks(4, o), 2)] {
                    let (_, plan) = planned(&tied(), &o);
                    let what = format!("{mesh:?}, {m} microbatches, {recompute:?}, {functions}");
                    for all in places(&plan, [VOCAB / shards, 64]) {
                        assert!(in_one_place(&all, functions), "{what}: {all:?}");
                    }
                }
            }
        }
    }
}

/// Of 16 bits too, where the sums are no product's kernel, if microbatches add to it.
#[test]
fn gradients_of_16_bits_have_one_place() {
    let o = asked(&[], false, 16, 2, Recompute::None);
    let o = Options { dtype: DType::BF16, grad_dtype: DType::BF16, ..o };
    let (_, plan) = planned(&tied(), &o);
    let is_backward = |f: &Func| f.name == "backward";
    let i = plan.module.funcs.iter().position(is_backward).expect("a backward");
    let f = &plan.module.funcs[i];
    let sums: Vec<&Node> = f.nodes.iter().filter(|n| n.op.accumulates()).collect();
    // One sum is added to another one: that of the table.
    let is_sum = |n: &&&Node| sums.iter().any(|s| s.outs[0] == n.ins[0]);
    assert_eq!(sums.iter().filter(is_sum).count(), 1);
    for c in &plan.classes {
        let at = |v| [c.memory.places[i][v].frame as usize, c.memory.places[i][v].offset];
        for n in &sums {
            assert_eq!(at(n.outs[0]), at(n.ins[0]));
        }
    }
}

/// Where two stages of a rank make it, each adds to it in that place.
#[test]
fn stages_add_to_one_place() {
    for m in [1, 4] {
        let o = scheduled(asked(&[("pp", 2)], false, 16, m, Recompute::None), Named::ZbV);
        let mut tied = llama("8b");
        tied["tie_word_embeddings"] = true.into();
        let (_, plan) = planned(&tied, &o);
        let all = places(&plan, [VOCAB, 4096]);
        let with: Vec<_> = all.iter().filter(|p| !p.is_empty()).collect();
        assert!(with.len() == 1 && in_one_place(with[0], 2), "{m} microbatches: {with:?}");
    }
}
