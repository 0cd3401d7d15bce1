//! What keeps experts in balance: auxiliary loss, z-loss, and biases corrected by the load.

use crate::fixture::*;
use shardc_frontends::Model;
use shardc_ir::func::{Port, Role, RoleKind};
use shardc_ir::interp::{Precision, StepState, call};
use shardc_ir::tensor::Tensor;
use shardc_passes::options::{Balance, Options};

/// Options for a mesh with its ep and etp.
fn on(mesh: &[(&str, usize)], ep: usize, etp: usize, sp: bool, microbatch: usize) -> Options {
    Options { ep, etp: Some(etp), ..options(mesh, sp, microbatch) }
}

/// Mesh, ep, etp, `--sp`, rows per rank and microbatch.
type Row = (&'static [(&'static str, usize)], usize, usize, bool, usize);

/// What keeps experts in balance, all of it or without the auxiliary loss.
const ALL_THREE: Balance = Balance { aux: Some(0.03), z: 0.02, rate: 0.01 };
const LINEAR: Balance = Balance { aux: Some(0.0), ..ALL_THREE };

/// The auxiliary loss is that of a microbatch, and which rows are in one depends on dp: with two of
/// them on dp it is left out. All else is the same whatever the mesh and the microbatches.
#[rustfmt::skip]
const BALANCED: &[(Row, u8, Balance)] = &[
    ((&[("dp_shard", 2)], 2, 1, false, 4), 0, ALL_THREE),
    ((&[("dp_shard", 2)], 2, 1, false, 2), 0, LINEAR),
    ((&[("tp", 2)], 1, 2, true, 8), 0, ALL_THREE),
    ((&[("tp", 2)], 2, 1, true, 4), 0, ALL_THREE),
    ((&[("tp", 2)], 2, 1, false, 4), 0, ALL_THREE),
    ((&[("cp", 2)], 2, 1, false, 8), 0, ALL_THREE),
    ((&[("pp", 2)], 1, 1, false, 8), 0, ALL_THREE),
    ((&[("pp", 2)], 1, 1, false, 4), 0, ALL_THREE),
    ((&[("dp_shard", 2)], 2, 1, false, 4), 3, ALL_THREE),
    ((&[("dp_shard", 2), ("tp", 2)], 2, 1, true, 2), 3, LINEAR),
    ((&[("pp", 2), ("dp_shard", 2), ("tp", 2)], 2, 2, true, 4), 2, ALL_THREE),
];

#[test]
fn balance_is_that_of_one_rank() {
    for name in ["mixtral", "deepseek_v3"] {
        let fx = Fixture::open(name);
        let numbers = |o: &Options| {
            let model = fx.model(o);
            assert!(model.warnings.is_empty() || name == "mixtral", "{:?}", model.warnings);
            let n = three_steps(&model, &compile(&model, o), &fx.input_ids, &fx.targets());
            (model, n)
        };
        for &((mesh, ep, etp, sp, rows), zero, balance) in BALANCED {
            let o = Options { zero, balance, ..on(mesh, ep, etp, sp, rows) };
            let alone = Options { balance, ..on(&[], 1, 1, false, ROWS / o.microbatches()) };
            let (model, one) = numbers(&alone);
            let what = format!("{name} {mesh:?} ep={ep} sp={sp} zero={zero} rows={rows}");
            numbers(&o).1.compare(&model, &one, &what);
        }
    }
}

/// Results of the model's program on the state's parameters, and what is called `named` in each layer.
fn told(model: &Model, state: &StepState, named: &str) -> (Vec<Tensor>, Vec<Tensor>) {
    let mut f = model.module.funcs[0].clone();
    let own = f.results.len();
    let end = format!(".{named}");
    let values = f.nodes.iter().flat_map(|n| n.outs.iter().copied());
    let found: Vec<_> = values.filter(|&v| f.name(v).to_string().ends_with(&end)).collect();
    f.results.extend(found.into_iter().map(|value| Port { value, role: None }));
    let arg = |a: &Port| {
        let role = a.role.as_ref().expect("roles");
        match role.kind {
            RoleKind::Param => state.values[role].clone(),
            _ => vec![state.inputs[&*role.name].clone()],
        }
    };
    let args: Vec<_> = f.args.iter().map(arg).collect();
    let out = call(&model.module.mesh, &f, &args, Precision::F64).unwrap_or_else(|e| panic!("{e}"));
    let mut out: Vec<Tensor> = out.into_iter().map(|mut ranks| ranks.swap_remove(0)).collect();
    let last = out.split_off(own);
    (out, last)
}

/// Biases after three steps are moved by what a count of the choices says, on one rank and on meshes.
#[test]
fn biases_follow_the_choices() {
    // Of ERNIE the bias is a row.
    for (name, sparse) in [("deepseek_v3", 2), ("ernie4_5_moe", 1)] {
        biases_follow_those_of(name, sparse);
    }
}

fn biases_follow_those_of(name: &str, sparse: usize) {
    let (fx, rate) = (Fixture::open(name), 0.01);
    let balance = Balance { rate, ..Balance::default() };
    let o = Options { balance, ..on(&[], 1, 1, false, 8) };
    let model = fx.model(&o);
    let compiled = compile(&model, &o);
    let mut state = start(&fx, &model, &compiled);
    let is_bias = |p: &&str| p.ends_with(".e_score_correction_bias");
    let biases: Vec<&str> = model.weights.iter().map(|w| &*w.param).filter(is_bias).collect();
    let mut want: Vec<Vec<f64>> = biases.iter().map(|p| fx.parameter(&model, p)).collect();
    for step in 1..=3 {
        let experts = told(&model, &state, "expert").1;
        assert_eq!((experts.len(), biases.len()), (sparse, sparse), "sparse layers");
        for (chosen, bias) in experts.iter().zip(&mut want) {
            let load = |e: usize| chosen.data.iter().filter(|&&x| x == e as f64).count() as f64;
            let mean = chosen.data.len() as f64 / bias.len() as f64;
            for (e, x) in bias.iter_mut().enumerate() {
                *x += match mean - load(e) {
                    0.0 => 0.0,
                    d => rate * d.signum(),
                };
            }
        }
        interpret(&compiled, &mut state, step).unwrap_or_else(|e| panic!("{e}"));
    }
    let far = |got: &[f64], want: &[f64]| {
        got.iter().zip(want).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()))
    };
    for (p, want) in biases.iter().zip(&want) {
        let got = &state.values[&Role::new(RoleKind::Param, *p)][0].data;
        assert!(far(got, want) <= 1e-12, "{p}: {got:?}, counted {want:?}");
        assert!(far(got, &fx.parameter(&model, p)) > 0.9 * rate, "{p} has moved");
    }
    for &((mesh, ep, etp, sp, rows), zero, _) in BALANCED {
        let o = Options { zero, balance, ..on(mesh, ep, etp, sp, rows) };
        let model = fx.model(&o);
        let n = three_steps(&model, &compile(&model, &o), &fx.input_ids, &fx.targets());
        for (w, got) in model.weights.iter().zip(&n.params) {
            if let Some(i) = biases.iter().position(|p| *p == w.param) {
                assert!(far(got, &want[i]) <= 1e-6, "{mesh:?} {zero} {}: {got:?}", w.param);
            }
        }
    }
    // A bias that is frozen stays.
    let o = Options { freeze: vec!["*_correction_bias".into()], ..o };
    let n = three_steps(&model, &compile(&model, &o), &fx.input_ids, &fx.targets());
    let i = model.weights.iter().position(|w| w.param == biases[0]).expect("a bias");
    assert_eq!(n.params[i], fx.parameter(&model, biases[0]));
}

/// An evaluation with all three is the loss of the next step, and changes nothing.
#[test]
fn evaluation_with_balance() {
    let fx = Fixture::open("deepseek_v3");
    for mesh in [&[][..], &[("pp", 2), ("dp_shard", 2)]] {
        let o = Options { balance: ALL_THREE, zero: 1, ..on(mesh, 1, 1, false, 2) };
        let model = fx.model(&o);
        let mut s = session(&model, &compile(&model, &o));
        let (input_ids, targets) = (&fx.input_ids[..], &fx.targets()[..]);
        let batch = shardc_runtime::StepBatch::tokens(input_ids, targets, false);
        for step in 1..=3 {
            let evaluation = s.evaluate(&batch).unwrap_or_else(|e| panic!("{e}")).loss;
            let trained = s.step(&batch, 1e-3, step).unwrap_or_else(|e| panic!("{e}")).loss;
            assert_eq!(evaluation, trained, "{mesh:?} {step}");
        }
    }
}

/// What the z-loss adds to the gradient of a router is its finite difference.
#[test]
fn gradient_of_the_z_loss() {
    for name in ["mixtral", "deepseek_v3"] {
        let fx = Fixture::open(name);
        let with = |z: f64| {
            let balance = Balance { aux: Some(0.0), z, rate: 0.0 };
            let o = Options { balance, ..on(&[], 1, 1, false, 8) };
            let model = fx.model(&o);
            let compiled = compile(&model, &o);
            (start(&fx, &model, &compiled), model, compiled)
        };
        let last = |m: &Model| {
            let is_router = |w: &&shardc_ir::weights::Weight| w.param.ends_with(".gate.weight");
            m.weights.iter().rfind(is_router).expect("a router").param.clone()
        };
        let grad = |z: f64| {
            let (mut state, model, compiled) = with(z);
            interpret(&compiled, &mut state, 1).unwrap_or_else(|e| panic!("{e}"));
            let name = last(&model);
            state
                .output(&compiled.plan.module.mesh, RoleKind::GradShown, &name)
                .unwrap_or_else(|e| panic!("{e}"))
        };
        let (plain, whole) = (grad(0.0), grad(0.5));
        let (state, model, _) = with(0.5);
        // It is an output of the step.
        let shown = {
            let (mut state, _, compiled) = with(0.5);
            interpret(&compiled, &mut state, 1).unwrap_or_else(|e| panic!("{e}"));
            let mesh = &compiled.plan.module.mesh;
            state.output(mesh, RoleKind::Mean, "z_loss").unwrap_or_else(|e| panic!("{e}")).data[0]
        };
        let of_model = told(&model, &state, "expert").0[1].data[0];
        assert!((shown - of_model).abs() <= 1e-12 * shown, "{name}: {shown}, not {of_model}");
        let role = Role::new(RoleKind::Param, last(&model));
        for i in [0, 77, 200] {
            let z = |by: f64| {
                let mut state = state.clone();
                state.values.get_mut(&role).expect("a router")[0].data[i] += by;
                let own = told(&model, &state, "expert").0;
                own[1].data[0]
            };
            let h = 1e-5;
            let (want, got) = ((z(h) - z(-h)) / (2.0 * h), whole.data[i] - plain.data[i]);
            assert!(
                (want - got).abs() <= 1e-6 * (1.0 + want.abs()),
                "{name} {i}: {got}, not {want}"
            );
            assert!(want.abs() > 1e-5, "{name} {i}: {want} says nothing");
        }
    }
}
