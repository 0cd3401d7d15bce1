//! Every fixture trained for three steps on thread ranks, against transformers: all families, all
//! meshes, with and without sequence parallelism, with 1 and 4 microbatches. f32.

mod fixture;
use fixture::*;
use shardc_ir::func::{Role, RoleKind};
use shardc_runtime::{Options, Session, StepBatch};

fn check(name: &str, mesh: &[(&str, usize)], sp: bool, microbatch: usize) {
    let fx = Fixture::open(name);
    let o = options(mesh, sp, microbatch);
    let model = fx.model(&o);
    let plan = compile(&model, &o).plan;
    shardc_passes::memory::replay::replay(&plan).unwrap_or_else(|e| panic!("{name} {mesh:?}: {e}"));
    let checkpoint = model.checkpoint.as_ref().expect("weights");
    let how = Options { poison: true, ..Options::default() };
    let lower = |p: &_, rank| shardc_codegen::program(p, rank);
    let load = |w: &_, ranges: &[_], out: &mut [f32]| checkpoint.read(w, ranges, out);
    let mut s = Session::new(&plan, how, &lower, &load).unwrap_or_else(|e| panic!("{e}"));
    let targets = fx.targets();
    for step in 1..=3 {
        let batch = StepBatch { input_ids: &fx.input_ids, targets: &targets, observe: step == 1 };
        let r = s.step(&batch, 1e-3, step).unwrap_or_else(|e| panic!("{name} {mesh:?}: {e}"));
        if step == 1 {
            let out = |n: &str| r.outputs[n].data.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            fx.compare_loss(f64::from(r.loss.expect("a loss")));
            fx.compare_logits(&out("logits"));
            fx.compare_grads(&model, |p| out(&format!("grad.{p}")));
        }
    }
    let param = |s: &mut Session, p: &str| -> Vec<f64> {
        let a = s.tensor(&Role::new(RoleKind::Param, p)).unwrap_or_else(|e| panic!("{e}"));
        a.data.into_iter().map(f64::from).collect()
    };
    let after: Vec<Vec<f64>> = model.weights.iter().map(|w| param(&mut s, &w.param)).collect();
    fx.compare_params(&model, |p| {
        after[model.weights.iter().position(|w| w.param == p).expect("a weight")].clone()
    });
    // An evaluation is the loss of the next step, and changes nothing.
    let batch = StepBatch { input_ids: &fx.input_ids, targets: &targets, observe: false };
    let evaluation = s.evaluate(&batch).unwrap_or_else(|e| panic!("{e}")).loss;
    let step = s.step(&batch, 1e-3, 4).unwrap_or_else(|e| panic!("{e}")).loss;
    assert_eq!(evaluation, step, "{name} {mesh:?}: loss of an evaluation");
    assert_eq!(
        s.touched(),
        plan.memory.peak_bytes,
        "{name} {mesh:?}: high-water mark of the arena"
    );
}

type Axes = &'static [(&'static str, usize)];

/// Meshes, and rows per rank and microbatch: 1 and 4 microbatches on each.
const MESHES: &[(Axes, [usize; 2])] = &[
    (&[], [8, 2]),
    (&[("tp", 2)], [8, 2]),
    (&[("tp", 4)], [8, 2]),
    (&[("dp_replicate", 2)], [4, 1]),
    (&[("dp_replicate", 2), ("tp", 2)], [4, 1]),
];

fn all(name: &str) {
    for (mesh, rows) in MESHES {
        for sp in [false, true] {
            for &mb in rows {
                eprintln!("{name} {mesh:?} sp={sp} microbatch={mb}");
                check(name, mesh, sp, mb);
            }
        }
    }
}

macro_rules! families {
    ($($name:ident)*) => { $(#[test] fn $name() { all(stringify!($name)); })* };
}
families! { llama_mha llama_gqa llama_bias_tied llama_yarn mistral_window qwen2 qwen3 gpt2 }
