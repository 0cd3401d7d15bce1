//! What training must get right whatever the layout: optimizer steps as torch makes them, frozen
//! parameters, learning rates, the norm, losses per token, and evaluation by a forward-only plan.

use crate::fixture::*;
use safetensors::SafeTensors;
use shardc::flags::Flags;
use shardc_frontends::Model;
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, Name, Role, RoleKind};
use shardc_ir::interp::{Precision, call};
use shardc_ir::mesh::Mesh;
use shardc_ir::names::glob;
use shardc_ir::ops::{AdamW, Op, Sgd};
use shardc_ir::plan::{Fall, LrSchedule, Mode};
use shardc_ir::tensor::Tensor;
use shardc_ir::types::Type;
use shardc_passes::options::Options;
use shardc_passes::pipeline::Compiled;
use shardc_runtime::exec::Executor;
use shardc_runtime::threads::Threads;
use shardc_runtime::{Session, StepBatch, StepResult};
use shardc_testing::taken;
use std::collections::BTreeMap;
use std::f64::consts::PI;
use std::time::Duration;

type Axes<'a> = &'a [(&'a str, usize)];

const TP2: Axes = &[("tp", 2)];
const TP4: Axes = &[("tp", 4)];
const DP2: Axes = &[("dp_replicate", 2)];
const DP2_TP2: Axes = &[("dp_replicate", 2), ("tp", 2)];

// ---- Optimizer steps from given gradients ----

/// p, g1, g2, g3, p3 and sgd_p3: [7, 5] each.
fn optimizer_case() -> BTreeMap<String, Vec<f32>> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/adamw_default_eps.safetensors");
    let bytes = std::fs::read(file).expect("the fixture");
    let st = SafeTensors::deserialize(&bytes).expect("safetensors");
    let floats = |d: &[u8]| d.as_chunks::<4>().0.iter().map(|c| f32::from_le_bytes(*c)).collect();
    st.tensors().iter().map(|(n, t)| (n.clone(), floats(t.data()))).collect()
}

const SHAPE: [usize; 2] = [7, 5];

/// One op as a function: `tensors` operands of [7, 5], then `scalars`.
fn function(op: impl Into<Op>, tensors: usize, scalars: usize) -> Func {
    let mut f = Func::new("update");
    let whole = std::iter::repeat_n(Type::f32(&SHAPE), tensors);
    let types = whole.chain(std::iter::repeat_n(Type::f32(&[]), scalars));
    let ins: Vec<_> = types.map(|t| f.arg(t, Name::parse("x"), None)).collect();
    let op = op.into();
    let hints: &[&'static str] = &["new", "exp_avg", "exp_avg_sq"];
    let outs = Builder::new(&Mesh::default(), &mut f).push_n(hints, op, &ins);
    f.results = outs.iter().map(|&value| shardc_ir::func::Port { value, role: None }).collect();
    f
}

/// Results of the op by its evaluation in f64.
fn by_eval(f: &Func, args: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let shapes = f.args.iter().map(|a| f.ty(a.value).sizes());
    let wide = |a: &Vec<f32>| a.iter().map(|&x| f64::from(x)).collect();
    let args: Vec<_> = shapes.zip(args).map(|(s, a)| vec![Tensor::new(&s, wide(a))]).collect();
    let outs = call(&Mesh::default(), f, &args, Precision::F64).unwrap_or_else(|e| panic!("{e}"));
    outs.iter().map(|o| o[0].data.iter().map(|&x| x as f32).collect()).collect()
}

/// Results of the op by its kernel, each written over its operand as in a plan.
fn by_kernel(f: &Func, args: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let (mesh, node) = (Mesh::default(), &f.nodes[0]);
    let kernel = shardc_codegen::lower(&mesh, f, node, &[]).unwrap_or_else(|e| panic!("{e}"));
    let mut memory = args.to_vec();
    let place = |o| node.op.def().in_place(o).expect("updates are made in place");
    let places: Vec<usize> = (0..args.len()).chain((0..node.outs.len()).map(place)).collect();
    kernel.reach(&mut |operand, end| {
        let len = places.get(operand).map_or(0, |&p| memory[p].len());
        assert!(end <= len, "operand {operand} is used up to {end} of {len}");
    });
    let base: Vec<*mut f32> = memory.iter_mut().map(|m| m.as_mut_ptr()).collect();
    let mut pointers: Vec<*mut f32> = places.iter().map(|&p| base[p]).collect();
    // The workspace, which these ops do not use.
    pointers.push(std::ptr::NonNull::dangling().as_ptr());
    let end = Threads::connect(&mesh, Duration::from_secs(20)).swap_remove(0);
    // SAFETY: the kernel's reach was compared with the buffers, which live until the end.
    unsafe { Executor::new(Box::new(end), 1).run(&kernel, &pointers) }
        .unwrap_or_else(|e| panic!("{e}"));
    (0..node.outs.len()).map(|o| memory[place(o)].clone()).collect()
}

fn close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    let worst = got.iter().zip(want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(worst <= tolerance, "{what}: differs by {worst:e}, {tolerance:e} is allowed");
}

#[test]
fn optimizers_step_as_torch_does() {
    let case = optimizer_case();
    let zeros = vec![0.0; 35];
    for (how, run) in [("eval", by_eval as fn(&Func, &[Vec<f32>]) -> _), ("kernel", by_kernel)] {
        let adamw = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.01 };
        let f = function(adamw, 4, 3);
        let (mut p, mut m, mut v) = (case["p"].clone(), zeros.clone(), zeros.clone());
        for (step, g) in ["g1", "g2", "g3"].iter().enumerate() {
            let [lr, step, by] = [1e-3, step as f32 + 1.0, 1.0].map(|x| vec![x]);
            let mut out = run(&f, &[p, case[*g].clone(), m, v, lr, step, by]).into_iter();
            let mut next = || out.next().expect("three results");
            (p, m, v) = (next(), next(), next());
        }
        // The moves are 1e-3 a step: 4e-7 is 1/2500 of one, and 3 roundings of numbers near 2.
        close(&format!("adamw by {how}"), &p, &case["p3"], 4e-7);
        let f = function(Sgd { decay: 0.0 }, 2, 2);
        let mut p = case["p"].clone();
        for g in ["g1", "g2", "g3"] {
            p = run(&f, &[p, case[g].clone(), vec![0.1], vec![1.0]]).swap_remove(0);
        }
        close(&format!("sgd by {how}"), &p, &case["sgd_p3"], 4e-7);
    }
}

// ---- Whole plans ----

fn prepare(fx: &Fixture, o: &Options) -> (Model, Compiled) {
    let model = fx.model(o);
    let compiled = compile(&model, o);
    (model, compiled)
}

fn step(s: &mut Session, fx: &Fixture, targets: &[i32], n: usize) -> StepResult {
    let batch = StepBatch::tokens(&fx.input_ids, targets, n == 1);
    s.step(&batch, 1e-3, n).unwrap_or_else(|e| panic!("{e}"))
}

fn parameter(s: &mut Session, name: &str) -> Vec<f32> {
    s.tensor(&Role::new(RoleKind::Param, name)).unwrap_or_else(|e| panic!("{e}")).data
}

#[test]
fn frozen_parameters_stay() {
    // Three matrices in each of two layers; 8 biases in each of two layers and one behind them, where
    // that of `c_attn` is three parameters.
    for (name, glob, parameters) in [("llama_mha", "*.mlp.*", 6), ("gpt2", "*bias", 17)] {
        assert_eq!(frozen(name, glob), parameters, "{name} {glob}");
    }
}

/// Trains one step with and without `--freeze`; the number of parameters that stayed.
fn frozen(name: &str, pattern: &str) -> usize {
    let fx = Fixture::open(name);
    let free = Options { clip: None, ..options(DP2_TP2, false, 2) };
    let frozen = Options { freeze: vec![pattern.into()], ..free.clone() };
    let run = |o: &Options| {
        let (model, compiled) = prepare(&fx, o);
        let mut s = session(&model, &compiled);
        let r = step(&mut s, &fx, &fx.targets(), 1);
        let after: Vec<_> = model.weights.iter().map(|w| parameter(&mut s, &w.param)).collect();
        (model, compiled, r, after)
    };
    let (model, all, whole, _) = run(&free);
    let (_, some, part, after) = run(&frozen);
    assert!(
        some.plan.peak_bytes() < all.plan.peak_bytes(),
        "frozen parameters have no optimizer state"
    );
    let (mut kept, mut squares) = (0, 0.0);
    for (w, after) in model.weights.iter().zip(&after) {
        let before: Vec<f32> = fx.parameter(&model, &w.param).iter().map(|&x| x as f32).collect();
        let (name, stays) =
            (Role::new(RoleKind::GradShown, w.param.as_str()), glob(pattern, &w.tensor));
        assert_eq!(*after == before, stays, "{}", w.param);
        assert_eq!(part.outputs.contains_key(&name), !stays, "{name}");
        kept += usize::from(stays);
        if !stays {
            let (a, b) = (&part.outputs[&name].data, &whole.outputs[&name].data);
            let top = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            close(&name.to_string(), a, b, 1e-6 * top);
            squares += b.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
        }
    }
    let norm = f64::from(part.grad_norm.expect("a norm"));
    assert!((norm - squares.sqrt()).abs() <= 1e-5 * norm, "the norm counts what is trained");
    kept
}

#[test]
fn learning_rates_move_as_asked() {
    let rate = |f: Flags| f.options().unwrap_or_else(|e| panic!("{e}")).lr;
    let constant = rate(Flags::default().with("lr", 0.25));
    assert_eq!([1, 7, 1000].map(|s| constant.at(s)), [0.25; 3]);
    let cosine = rate(
        Flags::default()
            .with("lr", 0.8)
            .with("lr-schedule", "warmup-cosine")
            .with("warmup", 4)
            .with("total-steps", 10),
    );
    // 0.8 step/4, then 0.4 (1 + cos(π (step - 4)/6)), and 0 from step 10 on.
    let (h, q) = (3f64.sqrt() / 2.0, 0.5);
    let want = [
        0.2,
        0.4,
        0.6,
        0.8,
        0.4 * (1.0 + h),
        0.4 * (1.0 + q),
        0.4,
        0.4 * (1.0 - q),
        0.4 * (1.0 - h),
        0.0,
        0.0,
    ];
    for (i, w) in want.iter().enumerate() {
        assert!(
            (cosine.at(i + 1) - w).abs() < 1e-12,
            "step {}: {} is not {w}",
            i + 1,
            cosine.at(i + 1)
        );
    }
    let fall = |lr, warmup, total, floor, decay| Fall { lr, warmup, total, floor, decay };
    let floor = LrSchedule::WarmupCosine(fall(1.0, 0, 2, 0.5, None));
    assert!((floor.at(1) - 0.75).abs() < 1e-12 && (floor.at(2) - 0.5).abs() < 1e-12);
    // Without steps to move in there is no division by 0.
    let none = LrSchedule::WarmupCosine(fall(1.0, 3, 3, 0.0, None));
    assert!((1..9).all(|s| none.at(s).is_finite()));
    // Step n has what transformers' schedulers give behind n steps: get_linear_schedule_with_warmup(4, 10), and
    // get_wsd_schedule(4, 5, num_training_steps=20, min_lr_ratio=0.1) by decay_type, whose rise begins at the least rate.
    let linear = LrSchedule::WarmupLinear(fall(0.8, 4, 10, 0.0, None));
    let line = [0.2, 0.4, 0.6, 0.8, 2.0 / 3.0, 8.0 / 15.0, 0.4, 4.0 / 15.0, 2.0 / 15.0, 0.0, 0.0];
    let wsd = LrSchedule::WarmupLinear(fall(0.8, 4, 20, 0.08, Some(5)));
    let cosine = LrSchedule::WarmupCosine(fall(0.8, 4, 20, 0.08, Some(5)));
    let stable = |end: [f64; 6]| {
        let hold = [0.8; 12].into_iter();
        [0.2, 0.4, 0.6].into_iter().chain(hold).chain(end).collect::<Vec<_>>()
    };
    let lines = stable([0.656, 0.512, 0.368, 0.224, 0.08, 0.08]);
    let (a, b) = (0.5 * 0.72 * (0.2 * PI).cos(), 0.5 * 0.72 * (0.4 * PI).cos());
    let cosines = stable([0.44 + a, 0.44 + b, 0.44 - b, 0.44 - a, 0.08, 0.08]);
    for (rate, want) in [(linear, &line[..]), (wsd, &lines), (cosine, &cosines)] {
        for (i, w) in want.iter().enumerate() {
            assert!(
                (rate.at(i + 1) - w).abs() < 1e-12,
                "{rate}, step {}: {}",
                i + 1,
                rate.at(i + 1)
            );
        }
    }
    assert_eq!(wsd.to_string(), "0.8, 4 steps of warm-up, constant to 15, linear to 0.08 at 20");
}

#[test]
fn the_norm_counts_every_parameter_once() {
    let meshes: [(Axes, bool, usize); 8] = [
        (&[], false, 8),
        (TP2, false, 8),
        (TP4, false, 8),
        (TP4, true, 2),
        (TP2, true, 8),
        (DP2, false, 4),
        (DP2_TP2, false, 2),
        (DP2_TP2, true, 4),
    ];
    for (f, name) in ALL.iter().enumerate() {
        let fx = Fixture::open(name);
        let want = fx.reference("grad_norm")[0];
        let some = meshes.into_iter().enumerate().filter(|(m, _)| taken(f + m, 5));
        for (_, (mesh, sp, microbatch)) in some {
            let (model, compiled) = prepare(&fx, &options(mesh, sp, microbatch));
            let r = step(&mut session(&model, &compiled), &fx, &fx.targets(), 1);
            let norm = f64::from(r.grad_norm.expect("a norm"));
            let off = (norm - want).abs() / want;
            assert!(off <= 1e-5, "{name} {mesh:?} sp={sp}: norm {norm}, reference {want}");
        }
    }
}

/// The masks of the batch are uneven, and one row has no label: a mean of means would differ.
#[test]
fn the_loss_is_per_token_on_every_layout() {
    for name in ["llama_gqa", "gpt2"] {
        let fx = Fixture::open(name);
        let want = fx.reference("losses").to_vec();
        let counted = fx.targets().iter().filter(|&&t| t >= 0).count();
        // 1, 2, 4 and 8 microbatches: in the last case one has no label at all.
        let layouts: [(Axes, usize); 6] =
            [(&[], 8), (&[], 4), (&[], 2), (&[], 1), (DP2, 4), (DP2, 1)];
        for (mesh, microbatch) in layouts {
            let (model, compiled) = prepare(&fx, &options(mesh, false, microbatch));
            let mut s = session(&model, &compiled);
            for (i, want) in want.iter().enumerate() {
                let r = step(&mut s, &fx, &fx.targets(), i + 1);
                let loss = f64::from(r.loss.expect("a loss"));
                let bound = if i == 0 { 1e-6 } else { 1e-5 } * want;
                assert!(
                    (loss - want).abs() <= bound,
                    "{name} {mesh:?} {microbatch}: loss {loss}, reference {want}"
                );
                assert_eq!(r.tokens, counted);
            }
        }
    }
}

#[test]
fn a_batch_without_labels_has_loss_0() {
    for (name, mesh, sp) in [("llama_mha", DP2_TP2, true), ("gpt2", TP2, false)] {
        let fx = Fixture::open(name);
        let (model, compiled) = prepare(&fx, &options(mesh, sp, 2));
        let mut s = session(&model, &compiled);
        let r = step(&mut s, &fx, &vec![-100; ROWS * SEQ], 1);
        assert_eq!((r.loss, r.grad_norm, r.tokens), (Some(0.0), Some(0.0), 0), "{name}");
        for w in &model.weights {
            // Nothing moves but by decay: lr 1e-3 times 0.01.
            let want: Vec<f32> =
                fx.parameter(&model, &w.param).iter().map(|x| (x * (1.0 - 1e-5)) as f32).collect();
            close(&w.param, &parameter(&mut s, &w.param), &want, 2e-7);
        }
    }
}

#[test]
fn evaluation_is_a_forward_only_plan() {
    let meshes: [(Axes, bool, usize); 6] = [
        (&[], false, 8),
        (TP2, false, 2),
        (TP4, true, 8),
        (DP2, false, 4),
        (DP2_TP2, false, 1),
        (DP2_TP2, true, 2),
    ];
    for name in ALL {
        let fx = Fixture::open(name);
        for (mesh, sp, microbatch) in meshes {
            let o = Options { mode: Mode::Infer, observe: false, ..options(mesh, sp, microbatch) };
            let (model, compiled) = prepare(&fx, &o);
            let funcs: Vec<&str> =
                compiled.plan.module.funcs.iter().map(|f| f.name.as_str()).collect();
            assert_eq!(funcs, ["step_prologue", "forward"], "{name}");
            let mut s = session(&model, &compiled);
            let r = step(&mut s, &fx, &[], 1);
            let logits: Vec<f64> = r
                .output(RoleKind::Output, "logits")
                .expect("logits")
                .data
                .iter()
                .map(|&x| f64::from(x))
                .collect();
            fx.compare_logits(&logits);
            assert_eq!((r.loss, r.grad_norm), (None, None));
        }
    }
}
