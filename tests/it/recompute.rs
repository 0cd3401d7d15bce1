//! Recomputation: the same bits with less memory.

use crate::fixture::*;
use shardc_ir::func::{Role, RoleKind};
use shardc_ir::plan::Plan;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_runtime::StepBatch;

/// Losses of three steps and the bits of all parameters after them, and the bytes that a rank saves
/// for backward.
fn train(name: &str, mesh: &[(&str, usize)], sp: bool, recompute: Recompute) -> (Vec<u32>, usize) {
    let fx = Fixture::open(name);
    let mut o = options(mesh, sp, 2);
    (o.recompute, o.observe) = (recompute, false);
    let model = fx.model(&o);
    let compiled = compile(&model, &o);
    let plan = &compiled.plan;
    shardc_passes::memory::replay::replay(plan).unwrap_or_else(|e| panic!("{name}: {e}"));
    let mut s = session(&model, &compiled);
    let targets = fx.targets();
    let batch = StepBatch::tokens(&fx.input_ids, &targets, false);
    let mut bits = vec![];
    for step in 1..=3 {
        let r = s.step(&batch, 1e-3, step).unwrap_or_else(|e| panic!("{e}"));
        bits.push(r.loss.expect("a loss").to_bits());
    }
    for w in &model.weights {
        let a = s.tensor(&Role::new(RoleKind::Param, &*w.param)).unwrap_or_else(|e| panic!("{e}"));
        bits.extend(a.data.iter().map(|x| x.to_bits()));
    }
    (bits, stashed(plan).iter().map(|s| s.1).sum())
}

/// Names and bytes of what forward saves for backward.
fn stashed(plan: &Plan) -> Vec<(String, usize)> {
    let m = &plan.module;
    let f = m.func("forward").expect("forward");
    let saved =
        f.results.iter().filter(|r| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Stash));
    saved.map(|r| (f.name(r.value).to_string(), f.ty(r.value).local_bytes(&m.mesh))).collect()
}

#[test]
fn same_bits_less_memory() {
    let two = [("dp_replicate", 2), ("tp", 2)];
    for (name, mesh, sp) in
        [("llama_gqa", &two[..], true), ("qwen3", &two[1..], false), ("gpt2", &two[..], false)]
    {
        let run = |r| train(name, mesh, sp, r);
        let (none, all) = run(Recompute::None);
        let (selective, some) = run(Recompute::Selective);
        let (full, least) = run(Recompute::Full);
        let (ops, fewer) = run(Recompute::Ops(vec!["mul".into(), "attention".into()]));
        assert_eq!(none, selective, "{name}: selective");
        assert_eq!(none, full, "{name}: full");
        assert_eq!(none, ops, "{name}: ops");
        assert!(least < some && some < all && fewer < all, "{name}: {least} {some} {fewer} {all}");
    }
}

/// Modules of layers as Megatron-LM names them: the same bits, and less is saved the more of them there are.
#[test]
fn modules_are_computed_again() {
    let run = |names: &[&str]| {
        let names = names.iter().map(|n| n.to_string()).collect();
        train("deepseek_v3", &[("dp_replicate", 2)], false, Recompute::Ops(names))
    };
    let (bits, all) = run(&["elementwise"]);
    let (same, default) = train("deepseek_v3", &[("dp_replicate", 2)], false, Recompute::default());
    assert_eq!((&bits, all), (&same, default), "alone it is the default");
    let mut last = all;
    for names in [
        &["elementwise", "mla_up_proj"][..],
        &["elementwise", "mla_up_proj", "experts"],
        &["elementwise", "mla_up_proj", "moe"],
    ] {
        let (same, bytes) = run(names);
        assert_eq!(bits, same, "{names:?}");
        assert!(bytes < last, "{names:?}: {bytes} of {last}");
        last = bytes;
    }
    let (none, most) = run(&[]);
    let (act, fewer) = run(&["moe_act"]);
    assert!(none == act && fewer < most, "moe_act: {fewer} of {most}");
}

#[test]
fn full_saves_one_tensor_per_layer() {
    let fx = Fixture::open("llama_gqa");
    let mut o = options(&[("tp", 2)], false, 8);
    (o.recompute, o.observe) = (Recompute::Full, false);
    let plan = compile(&fx.model(&o), &o).plan;
    for layer in 0..3 {
        let own = format!("%l{layer}.");
        let saved: Vec<_> = stashed(&plan).into_iter().filter(|s| s.0.starts_with(&own)).collect();
        // Layer input of the next: [8, 16, 32] f32.
        assert_eq!(saved, [(format!("%l{layer}.hidden.1"), 8 * 16 * 32 * 4)], "layer {layer}");
    }
}
