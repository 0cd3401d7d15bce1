//! Training in f16 with a scaled loss: against PyTorch in f16, against the f32 reference, against the meaning
//! of the plan's own text, every layout against one rank; steps that overflow.
//!
//! Bounds are in units of U = 2^-11, as those of [`crate::precision`] are in those of bf16.

use crate::fixture::*;
use crate::precision::{Trained, apart, as_torch, close, train};
use shardc_ir::func::{Role, RoleKind, StateName};
use shardc_ir::interp::{Precision, run_step};
use shardc_ir::loss_scale::{LossScale, LossScaling, ScaleState};
use shardc_ir::plan::{Fall, Instr, LrSchedule};
use shardc_ir::tensor::Tensor;
use shardc_ir::types::DType;
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Balance, CpMode, Optimizer, Options, Order};
use shardc_runtime::session::StepResult;
use shardc_runtime::{Session, StepBatch};
use shardc_testing::taken;

const U: f64 = 1.0 / 2048.0;
/// As of bf16: a loss is a mean, gradients are made of values that are all rounded.
const LOSS: f64 = U / 4.0;
const GRADS: f64 = 10.0 * U;

type Axes = &'static [(&'static str, usize)];

/// A scale at which no gradient of the fixtures overflows, and few underflow.
const SCALE: f32 = 1024.0;

fn half(mesh: &[(&str, usize)], sp: bool, microbatch: usize) -> Options {
    let loss_scaling = LossScaling::Constant { scale: SCALE };
    Options { dtype: DType::F16, loss_scaling, ..options(mesh, sp, microbatch) }
}

fn scaled(scale: f32, o: &Options) -> Options {
    Options { loss_scaling: LossScaling::Constant { scale }, ..o.clone() }
}

/// Against the f32 reference, every family.
#[test]
fn every_family_trains() {
    for name in ALL {
        let fx = Fixture::open(name);
        let (model, _, got) = train(name, &half(&[], false, 8));
        let bound = if *name == "gemma3" { U / 3.0 } else { LOSS };
        close(&format!("{name}: losses"), &got.losses, fx.reference("losses"), bound);
        let want: Vec<Vec<f64>> = model.weights.iter().map(|w| fx.grad(w)).collect();
        let off = apart(&got.grads, &want);
        assert!(off <= GRADS, "{name}: gradients are off by {:.1} U", off / U);
        let off = apart(&[got.logits], &[fx.reference("logits").to_vec()]);
        assert!(off <= 4.0 * U, "{name}: logits are off by {:.1} U", off / U);
    }
}

/// Against PyTorch in f16 with f32 master copies and the same scale of the loss, 2^14.
#[test]
fn trains_as_torch_does() {
    for name in ["llama_gqa", "gpt2"] {
        as_torch(name, &scaled(16384.0, &half(&[], false, 8)), U);
    }
}

/// Against the plan's own text, evaluated in f64 and rounded to the type of every value.
#[test]
fn kernels_do_what_the_text_says() {
    for name in ["llama_gqa", "qwen3", "gpt2"] {
        let o = half(&[], false, 4);
        let (model, compiled, got) = train(name, &o);
        let fx = Fixture::open(name);
        let mut state = start(&fx, &model, &compiled);
        let m = &compiled.plan.module;
        for (scalar, x) in [("lr", 1e-3), ("step", 1.0), ("loss_scale", f64::from(SCALE))] {
            let role = Role::new(RoleKind::Scalar, scalar);
            state.put(&m.mesh, role, &shardc_ir::types::Type::f32(&[]), &Tensor::scalar(x));
        }
        let lists: Vec<&[Instr]> = compiled.plan.classes.iter().map(|c| &c.step[..]).collect();
        run_step(m, &lists, &mut state, Precision::F32).unwrap_or_else(|e| panic!("{name}: {e}"));
        let shown = |k, n: &str| state.output(&m.mesh, k, n).unwrap_or_else(|e| panic!("{e}")).data;
        close(&format!("{name}: loss"), &got.losses[..1], &shown(RoleKind::Metric, "loss"), LOSS);
        let want: Vec<Vec<f64>> =
            model.weights.iter().map(|w| shown(RoleKind::GradShown, &w.param)).collect();
        let off = apart(&got.grads, &want);
        assert!(off <= 2.0 * U, "{name}: gradients are off by {:.1} U", off / U);
    }
}

/// Meshes, sequence parallelism, rows per rank and microbatch, ZeRO stage, and how far gradients may be from
/// those of one rank: as of bf16.
const MESHES: &[(Axes, bool, usize, u8, f64)] = &[
    (&[("dp_replicate", 2)], false, 2, 0, 1.0 * U),
    (&[("dp_shard", 2)], false, 4, 1, 1.0 * U),
    (&[("dp_shard", 4)], false, 1, 2, 1.0 * U),
    (&[("dp_replicate", 2), ("dp_shard", 2)], false, 1, 3, 1.0 * U),
    (&[("pp", 2), ("dp_shard", 2)], false, 1, 1, 1.0 * U),
    (&[("tp", 2)], false, 8, 0, GRADS),
    (&[("tp", 2)], true, 4, 0, GRADS),
    (&[("cp", 2)], false, 4, 0, GRADS),
    (&[("dp_shard", 2), ("tp", 2)], true, 2, 3, GRADS),
    (&[("pp", 2), ("tp", 2)], true, 2, 0, GRADS),
];

#[test]
fn every_layout_trains_as_one_rank() {
    for (f, name) in ALL.iter().enumerate() {
        let (_, _, one) = train(name, &half(&[], false, 8));
        let some = MESHES.iter().enumerate().filter(|(m, _)| taken(f + m + 1, 7));
        for &(mesh, sp, microbatch, zero, bound) in some.map(|(_, row)| row) {
            let o = Options { zero, ..half(mesh, sp, microbatch) };
            let what = format!("{name} {mesh:?} sp={sp} zero={zero}");
            let (_, _, many) = train(name, &o);
            close(&format!("{what}: losses"), &many.losses, &one.losses, LOSS);
            let off = apart(&many.grads, &one.grads);
            assert!(off <= bound, "{what}: gradients are off by {:.2} U", off / U);
        }
    }
}

/// Rings, schedules, chunks of the loss, gradients of 16 bits.
#[test]
fn other_layouts_train_as_one_rank() {
    let named = |name: &str| Order::Named(name.into());
    let pp = half(&[("pp", 2)], false, 1);
    let grad_dtype = DType::F16;
    let all = [
        ("llama_gqa", Options { cp_mode: CpMode::Ring, ..half(&[("cp", 2)], false, 4) }),
        ("gpt2", Options { cp_mode: CpMode::Ulysses, ..half(&[("cp", 2)], false, 4) }),
        ("llama_deep", Options { schedule: named("interleaved"), ..pp.clone() }),
        ("llama_deep", Options { schedule: named("zb-h1"), ..pp.clone() }),
        ("llama_deep", Options { schedule: named("zb-v"), ..pp }),
        ("llama_gqa", Options { loss_chunks: LossChunks::Of(4), ..half(&[("tp", 2)], false, 4) }),
        ("gpt2", Options { grad_dtype, zero: 2, ..half(&[("dp_shard", 2)], false, 2) }),
        (
            "llama_bias_tied",
            Options { grad_dtype, zero: 3, ..half(&[("pp", 2), ("dp_shard", 2)], false, 1) },
        ),
    ];
    for (name, o) in all {
        let (_, _, one) = train(name, &half(&[], false, 8));
        let (_, _, many) = train(name, &o);
        let what = format!("{name} {:?} {:?}", o.mesh, o.schedule);
        close(&what, &many.losses, &one.losses, LOSS);
        let off = apart(&many.grads, &one.grads);
        assert!(off <= GRADS, "{what}: gradients are off by {:.2} U", off / U);
    }
}

/// What is made again is made of the same numbers by the same kernels.
#[test]
fn recomputation_changes_no_bit() {
    let o = |recompute| Options { recompute, ..half(&[("tp", 2)], true, 4) };
    let (_, _, want) = train("llama_gqa", &o(Recompute::None));
    for policy in [Recompute::Selective, Recompute::Full] {
        let (_, _, got) = train("llama_gqa", &o(policy.clone()));
        assert_eq!((got.losses, got.grads), (want.losses.clone(), want.grads.clone()), "{policy}");
    }
}

fn bits(t: &Trained) -> Vec<u64> {
    let all = [&t.losses, &t.norms, &t.logits].into_iter().chain(&t.grads).chain(&t.params);
    all.flatten().map(|x| x.to_bits()).collect()
}

/// A power of two changes no digit: where nothing over- or underflows, a scale and its double give the same
/// bits. A sum of squares is exact in no scale, but rounded alike in all.
#[test]
fn twice_the_scale_gives_the_same_bits() {
    let zero = Options { zero: 3, ..half(&[("dp_shard", 2), ("tp", 2)], true, 2) };
    for (name, o) in [("llama_gqa", half(&[], false, 4)), ("gpt2", zero)] {
        let (_, _, one) = train(name, &scaled(65536.0, &o));
        let (_, _, two) = train(name, &scaled(131_072.0, &o));
        assert_eq!(bits(&one), bits(&two), "{name}");
    }
}

/// All parameters and all state of an optimizer.
fn held(s: &mut Session, params: &[String], adamw: bool) -> Vec<Vec<u32>> {
    let mut all = vec![];
    let states: &[&str] = if adamw { &["exp_avg", "exp_avg_sq"] } else { &[] };
    for p in params {
        let kinds = std::iter::once(RoleKind::Param)
            .chain(states.iter().map(|s| RoleKind::State(StateName::new(s))));
        for kind in kinds {
            // A bias that only chooses has no moments.
            let Ok(t) = s.tensor(&Role::new(kind, p.as_str())) else { continue };
            all.push(t.data.iter().map(|x| x.to_bits()).collect());
        }
    }
    assert!(all.len() >= params.len());
    all
}

fn step(s: &mut Session, fx: &Fixture, n: usize) -> StepResult {
    let batch = StepBatch::tokens(&fx.input_ids, &fx.targets(), false);
    s.step(&batch, 1e-3, n).unwrap_or_else(|e| panic!("step {n}: {e}"))
}

/// A step that overflows changes nothing, on no layout and of no optimizer; then training goes on as if it
/// had not been, at half the scale.
#[test]
fn steps_that_overflow_change_nothing() {
    let moe = |mesh: &[(&str, usize)]| {
        let balance = Balance { rate: 0.01, ..Balance::default() };
        Options { balance, ep: 2, ..half(mesh, false, 2) }
    };
    let sgd = Options { optimizer: Optimizer::Sgd, clip: None, ..half(&[("tp", 2)], true, 4) };
    let all = [
        ("llama_gqa", half(&[], false, 8)),
        ("llama_gqa", sgd),
        ("gpt2", Options { zero: 1, ..half(&[("dp_shard", 2)], false, 2) }),
        ("gpt2", Options { zero: 3, ..half(&[("pp", 2), ("dp_shard", 2)], false, 1) }),
        ("llama_bias_tied", half(&[("pp", 2), ("tp", 2)], true, 2)),
        ("deepseek_v3", moe(&[("dp_shard", 2)])),
    ];
    for (name, o) in all {
        let o = Options { observe: false, ..o };
        let huge = 2f32.powi(100);
        let scaling =
            |initial, hysteresis| LossScaling::Dynamic { initial, min: 1.0, window: 2, hysteresis };
        let fx = Fixture::open(name);
        let model = fx.model(&o);
        let start = |loss_scaling| {
            session(&model, &compile(&model, &Options { loss_scaling, ..o.clone() }))
        };
        let params: Vec<String> = model.weights.iter().map(|w| w.param.to_string()).collect();
        let adamw = o.optimizer != Optimizer::Sgd;
        let what = format!("{name} {:?} zero={}", o.mesh, o.zero);

        let mut s = start(scaling(huge, 2));
        let before = held(&mut s, &params, adamw);
        for n in 1..=3 {
            let r = step(&mut s, &fx, n);
            assert!(r.skipped && !r.grad_norm.expect("a norm").is_finite(), "{what}: step {n}");
            assert_eq!(held(&mut s, &params, adamw), before, "{what}: step {n} changed something");
        }
        let quarter = Some(LossScale { scale: huge / 4.0, good: 0, left: -1 });
        assert_eq!(s.scale(), ScaleState { skipped: 3, before: 0, loss_scale: quarter }, "{what}");
        // From a scale that fits, as a run that never overflowed.
        let now = LossScale { scale: SCALE, good: 0, left: 1 };
        s.go_on(ScaleState { skipped: 3, before: 0, loss_scale: Some(now) });
        let mut other = start(scaling(SCALE, 1));
        for n in 1..=3 {
            let (a, b) = (step(&mut s, &fx, n + 3), step(&mut other, &fx, n));
            assert!(!a.skipped && !b.skipped, "{what}: step {n}");
            assert_eq!(
                (a.loss, a.grad_norm, a.loss_scale),
                (b.loss, b.grad_norm, b.loss_scale),
                "{what}"
            );
            let (a, b) = (held(&mut s, &params, adamw), held(&mut other, &params, adamw));
            assert!(a == b && a != before, "{what}: step {n}");
        }
        // The window of 2 steps has doubled it.
        assert_eq!(s.scale().loss_scale.map(|now| now.scale), Some(2.0 * SCALE), "{what}");
    }
}

/// While some gradients overflow and others do not, on other ranks or in other stages, nothing changes anywhere.
#[test]
fn an_overflow_in_one_place_is_one_of_all() {
    let moe = Options { ep: 2, ..half(&[("dp_shard", 2)], false, 2) };
    let all = [
        ("llama_gqa", half(&[("tp", 2)], true, 4)),
        ("llama_deep", half(&[("pp", 2)], false, 4)),
        ("gpt2", Options { zero: 1, ..half(&[("pp", 2), ("dp_shard", 2)], false, 1) }),
        ("qwen3", Options { zero: 3, clip: None, ..half(&[("dp_shard", 2)], false, 2) }),
        ("deepseek_v3", moe),
    ];
    for (name, o) in all {
        let what = format!("{name} {:?} zero={}", o.mesh, o.zero);
        let loss_scaling =
            LossScaling::Dynamic { initial: 2f32.powi(40), min: 1.0, window: 1000, hysteresis: 1 };
        let o = Options { loss_scaling, ..o };
        let fx = Fixture::open(name);
        let model = fx.model(&o);
        let mut s = session(&model, &compile(&model, &o));
        let params: Vec<String> = model.weights.iter().map(|w| w.param.to_string()).collect();
        let before = held(&mut s, &params, true);
        let batch = StepBatch::tokens(&fx.input_ids, &fx.targets(), true);
        let (mut whole, mut partly) = (0, 0);
        for n in 1.. {
            let r = s.step(&batch, 1e-3, n).unwrap_or_else(|e| panic!("{what}: step {n}: {e}"));
            let grads = r.outputs.iter().filter(|x| x.0.kind == RoleKind::GradShown);
            let finite: Vec<bool> = grads.map(|x| x.1.data.iter().all(|x| x.is_finite())).collect();
            assert!(finite.len() > 5, "{what}");
            let all = finite.iter().all(|&x| x);
            assert_eq!(r.skipped, !all, "{what}: step {n}");
            if all {
                assert_ne!(held(&mut s, &params, true), before, "{what}: step {n}");
                break;
            }
            assert_eq!(held(&mut s, &params, true), before, "{what}: step {n} changed something");
            *(if finite.iter().any(|&x| x) { &mut partly } else { &mut whole }) += 1;
        }
        println!("{what}: all gradients overflow in {whole} steps, some in {partly}");
        assert!(partly > 0, "{what}");
    }
}

/// What overflows in the forward pass does so at every scale: the run ends, and its loss is named.
#[test]
fn a_loss_that_is_no_number_ends_the_run() {
    let fx = Fixture::open("gpt2");
    let loss_scaling = LossScaling::Dynamic { initial: SCALE, min: 1.0, window: 9, hysteresis: 9 };
    let o = half(&[("dp_shard", 2)], false, 2);
    let o = Options { loss_scaling, optimizer: Optimizer::Sgd, clip: None, ..o };
    let model = fx.model(&o);
    let mut s = session(&model, &compile(&model, &o));
    let batch = StepBatch::tokens(&fx.input_ids, &fx.targets(), false);
    assert!(!s.step(&batch, 1e9, 1).expect("weights that fit").skipped);
    let e = s.step(&batch, 1e9, 2).expect_err("weights that are infinite in f16");
    assert!(e.code == "nan-loss" && e.message.contains("the loss of step 2 is"), "{e}");
    assert!(e.to_string().contains("--dtype bf16"), "{e}");
}

/// From Megatron's first scale, 2^32, one falls until gradients fit, and training begins.
#[test]
fn a_scale_finds_its_size() {
    let fx = Fixture::open("llama_gqa");
    let o = Options { loss_scaling: LossScaling::default(), ..half(&[("dp_shard", 2)], false, 2) };
    let model = fx.model(&o);
    let mut s = session(&model, &compile(&model, &o));
    let (mut scales, mut losses) = (vec![], vec![]);
    for n in 1..=40 {
        let r = step(&mut s, &fx, n);
        scales.push(r.loss_scale.expect("a scale"));
        if !r.skipped {
            losses.push(f64::from(r.loss.expect("a loss")));
        }
    }
    let skipped = s.scale().skipped;
    assert!((1..20).contains(&skipped), "{scales:?}");
    // The first overflow is forgiven; each other one halves the scale.
    assert!(scales[1] == scales[0] && scales[0] == 2f32.powi(32));
    assert_eq!(scales[39], 2f32.powi(32 - (skipped as i32 - 1)));
    close("losses", &losses[..3], &fx.reference("losses")[..3], LOSS);
    assert!(losses.last() < losses.first());
}

/// Gradients that are no numbers at any scale end the run.
#[test]
fn a_scale_that_can_fall_no_more_ends_the_run() {
    let fx = Fixture::open("gpt2");
    let loss_scaling = LossScaling::Dynamic {
        initial: 2f32.powi(101),
        min: 2f32.powi(100),
        window: 9,
        hysteresis: 1,
    };
    let o = Options { loss_scaling, ..half(&[], false, 8) };
    let model = fx.model(&o);
    let mut s = session(&model, &compile(&model, &o));
    assert!(step(&mut s, &fx, 1).skipped);
    let batch = StepBatch::tokens(&fx.input_ids, &fx.targets(), false);
    assert_eq!(s.step(&batch, 1e-3, 2).expect_err("no smaller scale").code, "nan-loss");
}

/// The scale, its counts and the skipped steps are in checkpoints: a run goes on with the same bits, on its
/// mesh, and with the same steps of the optimizer on others.
#[test]
fn checkpoints_keep_the_scale() {
    let dir = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("f16");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder for the test");
    let model = Fixture::open("llama_gqa").dir.display().to_string();
    let batch = format!("{model}/batch.safetensors");
    let shardc = |args: &[&str]| -> Vec<serde_json::Value> {
        let exe = env!("CARGO_BIN_EXE_shardc");
        let out = std::process::Command::new(exe).args(args).current_dir(&dir).output();
        let out = out.expect("shardc starts");
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        let lines = String::from_utf8(out.stdout).expect("text");
        let steps = lines.lines().filter_map(|l| serde_json::from_str(l).ok());
        steps.filter(|s: &serde_json::Value| s["step"].is_u64()).collect()
    };
    let compile = |plan: &str, dtype: &str, mesh: &str, more: &[&str]| {
        let args = ["compile", &model, "--seq", "16", "--dtype", dtype, "--mesh", mesh, "-o", plan];
        let schedule = ["--lr-schedule", "warmup-cosine", "--warmup", "3", "--total-steps", "30"];
        shardc(&[&args[..], &schedule, more].concat());
    };
    // Overflows for some steps, then doubles every two.
    let scales = ["--initial-loss-scale", "1048576", "--loss-scale-window", "2"];
    compile("half", "f16", "dp=2", &scales);
    compile("other", "f16", "tp=2", &scales);
    compile("bf16", "bf16", "dp=2", &[]);
    let run = |plan: &str, steps: &str, more: &[&str]| {
        let args = ["run", plan, "--weights", &model, "--batch", &batch, "--format", "json"];
        let without = ["run", plan, "--batch", &batch, "--format", "json"];
        let resumes = more.contains(&"--resume");
        let args = if resumes { &without[..] } else { &args[..] };
        shardc(&[args, &["--steps", steps], more].concat())
    };
    let fields = |all: &[serde_json::Value]| -> Vec<String> {
        let of = |s: &serde_json::Value| {
            ["step", "loss", "grad_norm", "loss_scale", "skipped"]
                .map(|k| s[k].to_string())
                .join(" ")
        };
        all.iter().map(of).collect()
    };
    let all = run("half", "12", &[]);
    let skipped = |all: &[serde_json::Value]| all.iter().filter(|s| s["skipped"] == true).count();
    assert!((2..8).contains(&skipped(&all[..6])), "{all:?}");
    let first = run("half", "6", &["--save", "ckpt", "--save-every", "6"]);
    assert_eq!(fields(&first), fields(&all[..6]));
    let rest = run("half", "12", &["--resume", "ckpt"]);
    assert_eq!(fields(&rest), fields(&all[6..]));
    let index = |at: &str| -> serde_json::Value {
        let text = std::fs::read_to_string(dir.join(at).join("step-00000006/index.json"));
        serde_json::from_str(&text.expect("an index")).expect("JSON")
    };
    assert_eq!(index("ckpt")["skipped"], skipped(&first));
    assert!(index("ckpt")["loss_scale"]["scale"].as_f64() == rest[0]["loss_scale"].as_f64());
    shardc(&["reshard", "ckpt", "--to", "tp=2", "-o", "moved"]);
    for key in ["skipped", "loss_scale", "step"] {
        assert_eq!(index("ckpt")[key], index("moved")[key], "{key}");
    }
    let number = |s: &serde_json::Value, key: &str| s[key].as_f64().expect("a number");
    for (plan, from) in [("other", "ckpt"), ("other", "moved"), ("bf16", "ckpt")] {
        let went = run(plan, "8", &["--resume", from, "--metrics", "m.jsonl"]);
        let scaled =
            if plan == "bf16" { serde_json::Value::Null } else { rest[0]["loss_scale"].clone() };
        assert_eq!(went[0]["loss_scale"], scaled, "{plan} {from}");
        for (a, b) in went.iter().zip(&rest) {
            let off = (number(a, "loss") - number(b, "loss")).abs();
            assert!(off <= 0.01 * number(b, "loss"), "{plan} {from}: {a} {b}");
        }
        // The learning rate is that of the optimizer's step: skipped ones are none of the warmup.
        let text = std::fs::read_to_string(dir.join("m.jsonl")).expect("metrics");
        let line: serde_json::Value =
            serde_json::from_str(text.lines().next().expect("a line")).expect("JSON");
        let rate = LrSchedule::WarmupCosine(Fall {
            lr: 1e-3,
            warmup: 3,
            total: 30,
            floor: 0.0,
            decay: None,
        });
        assert_eq!(number(&line, "lr"), rate.at(7 - skipped(&first)), "{plan} {from}");
        std::fs::remove_file(dir.join("m.jsonl")).expect("metrics");
    }
}
