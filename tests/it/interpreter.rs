//! The compiled step of every fixture, run by the f64 interpreter on all ranks, against transformers.

mod crossings;
mod legal;
mod programs;
use crate::chunks::in_chunks;
use crate::fixture::*;
use shardc_ir::func::{Role, RoleKind};
use shardc_ir::interp::{Precision, StepState, run_step};
use shardc_ir::tensor::Tensor;
use shardc_passes::options::{Options, TpMode, TpSteps};
use shardc_testing::taken;

fn check(name: &str, o: Options) {
    let fx = Fixture::open(name);
    let model = fx.model(&o);
    let compiled = compile(&model, &o);
    let plan = &compiled.plan;
    let m = &plan.module;
    let mut state = StepState::default();
    for a in m.funcs.iter().flat_map(|f| f.args.iter().map(move |a| (f, a))) {
        let (f, a) = a;
        let (role, ty) = (a.role.clone().expect("roles"), f.ty(a.value));
        let shape = ty.sizes();
        let t = match role.kind {
            RoleKind::Param => Tensor::new(&shape, fx.parameter(&model, &role.name)),
            RoleKind::State(_) => Tensor::full(&shape, 0.0),
            _ => continue,
        };
        state.put(&m.mesh, role, ty, &t);
    }
    fx.inputs(&mut state, None);
    for step in 1..=3 {
        for (name, x) in [("lr", 1e-3), ("step", step as f64)] {
            let f = m.func("optimizer_step").expect("finish");
            let a = f
                .args
                .iter()
                .find(|a| a.role == Some(Role::new(RoleKind::Scalar, name)))
                .expect("scalar");
            state.put(
                &m.mesh,
                Role::new(RoleKind::Scalar, name),
                f.ty(a.value),
                &Tensor::scalar(x),
            );
        }
        run_step(m, &[&plan.classes[0].step], &mut state, Precision::F64)
            .unwrap_or_else(|e| panic!("{e}"));
        if step == 1 {
            let out = |k, n: &str| {
                state.output(&m.mesh, k, n).unwrap_or_else(|e| panic!("{n}: {e}")).data
            };
            fx.compare_loss(out(RoleKind::Metric, "loss")[0]);
            fx.compare_logits(&out(RoleKind::Output, "logits"));
            fx.compare_grads(&model, |p| out(RoleKind::GradShown, p));
        }
    }
    fx.compare_params(&model, |p| {
        let f = m.func("optimizer_step").expect("finish");
        let role = Role::new(RoleKind::Param, p);
        let a = f.args.iter().find(|a| a.role.as_ref() == Some(&role)).expect("trained");
        shardc_ir::interp::gather(&m.mesh, f.ty(a.value), &state.values[&role])
            .unwrap_or_else(|e| panic!("{e}"))
            .data
    });
}

/// The layouts with most of what there is, one of the two in every run; `ranks.rs` has them all.
fn all(name: &str) {
    let family = ALL.iter().position(|f| *f == name).expect("a family");
    let two =
        [options(&[("tp", 4)], false, 8), options(&[("dp_replicate", 2), ("tp", 2)], true, 1)];
    for (_, o) in two.into_iter().enumerate().filter(|(i, _)| taken(family + i, 2)) {
        check(name, o);
    }
}

/// On grids; `meshes.rs` has more.
#[test]
fn grids() {
    let two =
        |tp_steps| Options { tp_mode: TpMode::TwoD, tp_steps, ..options(&[("tp", 4)], false, 8) };
    let three = Options { tp_mode: TpMode::ThreeD, ..options(&[("tp", 8)], false, 8) };
    check("gpt2", two(TpSteps::Gathered));
    check("qwen3", two(TpSteps::Summa));
    check("llama_gqa", three);
}

/// A loss in chunks: the same numbers wherever tokens and logits are cut. Of stages there are proofs.
#[test]
fn losses_in_chunks() {
    let one_stage = in_chunks().into_iter().filter(|(_, o)| o.axis("pp") == 1);
    for (i, (name, o)) in one_stage.enumerate() {
        if taken(i, 3) {
            check(name, o);
        }
    }
}

macro_rules! families {
    ($($name:ident)*) => { $(#[test] fn $name() { all(stringify!($name)); })* };
}
families! { llama_mha llama_gqa llama_bias_tied llama_yarn mistral_window qwen2 qwen3 gpt2 gemma2
llama_padded gemma2_padded olmo2 phi3 gemma3 gpt_neox gpt_neox_serial }
