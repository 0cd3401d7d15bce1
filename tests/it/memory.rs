//! What a plan promises about memory, counted from the plan itself: how many microbatches a rank
//! holds, what a layer saves for backward, and how much larger an arena is than what lives in it.
//! `docs/memory.md` says the same.

mod held;
mod live;
mod once;
mod page;
mod saved;
mod steady;
mod tied;

use crate::fixture::*;
use shardc_frontends::{Facts, from_config};
use shardc_ir::group::launches;
use shardc_ir::plan::Plan;
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Options, Order};
use shardc_passes::schedule::Named;

/// A model of a config and its plan: no weights are read.
pub fn planned(config: &serde_json::Value, o: &Options) -> (Facts, Plan) {
    let shape = shardc::shape(o);
    let model = from_config(config, "config.json", &shape).unwrap_or_else(|e| panic!("{e}"));
    (model.facts, compile(&model, o).plan)
}

/// A gradient that one microbatch makes is not added to anything: nothing is cleared for it, and its
/// memory is its own from its product on. Where two functions of a rank make it, they add to a sum.
#[test]
fn gradients_of_one_microbatch_live_from_backward_on() {
    use shardc_ir::func::{Port, RoleKind};
    use shardc_ir::plan::MemoryClass;
    let is_grad = |p: &&Port| p.role.as_ref().is_some_and(|r| r.kind == RoleKind::Grad);
    let taken = |p: &Plan, name: &str| {
        let funcs = p.module.funcs.iter().filter(|f| f.name.starts_with(name));
        funcs.map(|f| f.args.iter().filter(is_grad).count()).sum::<usize>()
    };
    let cleared = |p: &Plan| {
        let enter = p.module.funcs.iter().filter(|f| f.name.starts_with("step_prologue"));
        let results = enter.flat_map(|f| &f.results);
        results.filter(is_grad).count()
    };
    let held = |p: &Plan| {
        let whole = p.classes[0].memory.whole.iter();
        whole.filter(|x| x.0 == MemoryClass::Grads).map(|x| x.1).sum::<usize>()
    };
    let weights = |p: &Plan| p.weights.len();
    for recompute in [Recompute::None, Recompute::Full] {
        let of = |m: usize| {
            let (_, plan) =
                planned(&fixture_config("llama_gqa"), &asked(&[], false, 32, m, recompute.clone()));
            plan
        };
        let (one, two) = (of(1), of(2));
        assert_eq!([taken(&one, "backward"), cleared(&one), held(&one)], [0; 3]);
        assert_eq!([taken(&two, "backward"), cleared(&two)], [weights(&two); 2]);
        assert_eq!(taken(&one, "optimizer_step"), weights(&one));
        // When most is alive, the first gradients are made.
        let at_peak = one.classes[0].memory.at_peak.iter().filter(|x| x.0 == MemoryClass::Grads);
        let made = at_peak.map(|x| x.1).sum::<usize>();
        assert!(recompute != Recompute::None || made < held(&two) / 2, "{made} B at the peak");
        let spans = one.classes[0].memory.spans.iter().filter(|s| s.class == MemoryClass::Grads);
        let spans: Vec<_> = spans.collect();
        let backward =
            one.classes[0].calls().position(|c| one.module.funcs[c.func].name == "backward");
        assert_eq!(spans.iter().map(|s| s.bytes).sum::<usize>(), held(&two), "{spans:?}");
        assert!(spans.iter().all(|s| Some(s.first) == backward), "{spans:?}");
        assert!(one.peak_bytes() < two.peak_bytes(), "{recompute:?}");
    }
    // The first and the last stage, which share a table, are one rank's.
    let o = scheduled(asked(&[("pp", 2)], false, 32, 1, Recompute::None), Named::ZbV);
    let mut tied = llama("8b");
    tied["tie_word_embeddings"] = true.into();
    let (_, plan) = planned(&tied, &o);
    let [backward, weight] = ["backward", "weight"].map(|name| taken(&plan, name));
    assert_eq!([backward + weight, cleared(&plan)], [2, 1]);
}

/// A loss in chunks: nine tenths of the bytes of logits are gone where most is alive, and more chunks need less. Where
/// gaps are as small as they are accepted, the arena need not be smaller for it.
#[test]
fn losses_in_chunks_hold_no_logits() {
    let needs = |n| {
        let loss_chunks = LossChunks::Of(n);
        let o = asked(&[], false, 8192, 1, Recompute::default());
        let plan = planned(&llama("8b"), &Options { loss_chunks, ..o }).1;
        (plan.classes[0].memory.live_bytes, plan.peak_bytes())
    };
    let logits = 8192 * 128_256 * 4;
    let all = [1, 4, 16].map(needs);
    let [whole, few, many] = all.map(|n| n.0);
    assert!(many < few && few < whole, "{whole} B, {few} B, {many} B alive");
    let [whole, few, many] = all.map(|n| n.1);
    assert!(many <= few && few < whole, "{whole} B, {few} B, {many} B");
    assert!((whole - many) * 10 >= logits * 9, "{whole} B to {many} B");
}

/// In bf16 a chunk holds its logits and their gradient, both in 16 bits, and no f32 of them: few chunks need no more than
/// none, though the weight's gradient is there earlier. All layers are made again, so that the loss sets the peak.
#[test]
fn few_chunks_in_bf16_need_no_more_than_none() {
    use shardc_ir::types::DType;
    let mut two = llama("8b");
    two["num_hidden_layers"] = 2.into();
    for grad_dtype in [DType::BF16, DType::F32] {
        let peak = |n| {
            let loss_chunks = LossChunks::Of(n);
            let o = asked(&[], false, 16384, 1, Recompute::Full);
            let o = Options { dtype: DType::BF16, grad_dtype, loss_chunks, ..o };
            planned(&two, &o).1.peak_bytes()
        };
        let [none, few, more] = [1, 2, 4].map(peak);
        assert!(few <= none && more <= none, "{grad_dtype:?}: {none} B, {few} B, {more} B");
    }
}

/// The data-parallel sum of what microbatches have added up is written over it: several microbatches
/// need no second copy of all gradients. 16 bytes per parameter, and what two rows of 8 tokens need.
#[test]
fn sums_over_ranks_lie_where_accumulators_were() {
    for (mesh, zero) in [
        (&[("dp_replicate", 2)][..], 0),
        (&[("dp_replicate", 2), ("dp_shard", 2)], 2),
        (&[("dp_replicate", 2), ("dp_shard", 2)], 3),
        (&[("pp", 2), ("dp_replicate", 2)], 0),
    ] {
        let o = Options { zero, ..asked(mesh, false, 8, 2, Recompute::None) };
        let (_, plan) = planned(&llama("8b"), &o);
        let what = format!("{mesh:?} zero={zero}");
        let mut summed = 0;
        for (i, c) in plan.classes.iter().enumerate() {
            let finish = |f: &&usize| plan.module.funcs[**f].name.starts_with("optimizer_step");
            let &at = c.funcs.iter().find(finish).expect("every rank finishes");
            let (f, places) = (&plan.module.funcs[at], &c.memory.places[at]);
            let sums = f.nodes.iter().filter(|n| n.op.mnemonic() == "all_reduce");
            for (v, sum) in sums.flat_map(|n| n.ins.iter().zip(&n.outs)) {
                if f.args.iter().any(|a| a.value == *v) && f.ty(*v).rank() > 0 {
                    assert_eq!(places[v], places[sum], "{what}");
                    summed += places[v].bytes;
                }
            }
            let (live, peak) = (c.memory.live_bytes, c.memory.peak_bytes);
            assert!(peak * 100 <= live * 105, "{what}, class {i}: {peak} B for {live} B");
        }
        if zero == 0 {
            let all = plan.weights.iter().map(|w| w.shape.iter().product::<usize>());
            let parameters: usize = all.sum();
            assert_eq!(summed, 4 * parameters, "{what}");
            let peaks: usize = plan.classes.iter().map(|c| c.memory.peak_bytes).sum();
            assert!(peaks < 16 * parameters * 102 / 100, "{what}: {peaks} B");
        }
    }
}

/// Other ranks read an operand while a collective is under way: only the result of an all_reduce may lie
/// there. A plan in which another one does is refused.
#[test]
fn results_of_collectives_lie_on_no_operand() {
    let o = Options { zero: 1, ..options(&[("dp_replicate", 2), ("dp_shard", 2)], false, 1) };
    let plan = compile(&Fixture::open("llama_gqa").model(&o), &o).plan;
    let replay = |p: &Plan| shardc_passes::memory::replay::replay(p);
    replay(&plan).unwrap_or_else(|e| panic!("{e}"));
    let mut kinds = std::collections::BTreeMap::new();
    for (i, f) in plan.module.funcs.iter().enumerate() {
        for n in f.nodes.iter().filter(|n| n.op.collective().is_some() && !n.op.def().is_view()) {
            let mut p = plan.clone();
            for c in &mut p.classes {
                let (x, y) = (n.ins[0], n.outs[0]);
                let at = c.memory.places[i][x];
                let own = &mut c.memory.places[i][y];
                (own.frame, own.offset) = (at.frame, at.offset);
            }
            let refused = replay(&p).is_err_and(|e| e.contains("while it is written"));
            *kinds.entry((n.op.mnemonic(), refused)).or_insert(0) += 1;
        }
    }
    let all: Vec<_> = kinds.keys().copied().collect();
    assert_eq!(all, [("all_gather", true), ("all_reduce", false), ("reduce_scatter", true)]);
}

/// Kernels of one launch run in any order: a plan in which the result of one lies on what another uses is
/// refused.
#[test]
fn kernels_of_a_launch_lie_apart() {
    let o = options(&[("dp_shard", 2)], false, 2);
    let plan = compile(&Fixture::open("llama_gqa").model(&o), &o).plan;
    let replay = |p: &Plan| shardc_passes::memory::replay::replay(p);
    replay(&plan).unwrap_or_else(|e| panic!("{e}"));
    let (mut tried, mut found) = (0, 0);
    for (i, f) in plan.module.funcs.iter().enumerate() {
        for x in launches(f).iter().filter(|x| x.is_several(f)) {
            let kernels = x.kernels(f);
            let [first, second, ..] = &kernels[..] else { panic!("several") };
            for v in second.ins.iter().chain(&second.outs) {
                let mut p = plan.clone();
                for c in &mut p.classes {
                    let place = c.memory.places[i][v];
                    let own = &mut c.memory.places[i][first.outs[0]];
                    own.offset = place.offset;
                    own.frame = place.frame;
                }
                let said = replay(&p).expect_err("one lies on the other");
                tried += 1;
                found += usize::from(said.contains("another kernel of its launch"));
            }
        }
    }
    // Some of these places are read again later, which is found before.
    assert!(tried > 4 && found > 0, "{found} of {tried}");
}

/// The config of a JSON file of this repository.
pub fn config(file: &str) -> serde_json::Value {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{file}: {e}"));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{file}: {e}"))
}

/// Llama-3.1 of a size, as `benches/configs` has it.
pub fn llama(size: &str) -> serde_json::Value {
    config(&format!("benches/configs/llama-3.1-{size}.json"))
}

pub fn fixture_config(name: &str) -> serde_json::Value {
    config(&format!("tests/fixtures/{name}/config.json"))
}

/// Options of a plan that is only looked at: `m` microbatches of one row of `seq` tokens per rank.
pub fn asked(mesh: &[(&str, usize)], sp: bool, seq: usize, m: usize, r: Recompute) -> Options {
    let mut o = options(mesh, sp, 1);
    (o.seq, o.observe, o.recompute) = (seq, false, r);
    o.global_batch = m * o.data_parallel();
    o
}

/// The same, with a schedule.
pub fn scheduled(o: Options, n: Named) -> Options {
    Options { schedule: Order::Named(n.name().into()), ..o }
}
