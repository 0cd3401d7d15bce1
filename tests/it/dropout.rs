//! Dropout of embeddings, of what blocks add and of probabilities of attention: the same elements on every mesh and when backward computes again; none in an evaluation.

use crate::fixture::*;
use crate::lab::{self, FIXTURES, Lab};
use shardc_ir::func::{Port, RoleKind};
use shardc_ir::plan::Dropout;
use shardc_ir::types::DType;
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, CpSplit, Options};
use shardc_prove::Verdict;
use shardc_runtime::StepBatch;

fn dropped(o: Options) -> Options {
    Options { dropout: Dropout::Rate(0.3), ..o }
}

fn run(name: &str, o: &Options) -> Numbers {
    let fx = Fixture::open(name);
    let model = fx.model(o);
    let compiled = compile(&model, o);
    let r = texts(&model, o, &compiled).prove();
    let what = format!("{name} {:?}", o.mesh);
    assert_eq!(r.verdict(), Verdict::Proved, "{what}: {:?} {:?}", r.refuted, r.gaps);
    three_steps(&model, &compiled, &fx.input_ids, &fx.targets())
}

fn compare(name: &str, all: Vec<Options>) {
    let one = dropped(options(&[], false, 8));
    let model = Fixture::open(name).model(&one);
    let want = run(name, &one);
    for o in all.into_iter().map(dropped) {
        let what = format!("{name} {:?} sp={} {}", o.mesh, o.sp, o.recompute);
        run(name, &o).compare(&model, &want, &what);
    }
}

#[test]
fn every_mesh_drops_the_same() {
    let tp = |recompute| Options { recompute, ..options(&[("tp", 2)], false, 2) };
    let ring = |split| Options {
        cp_mode: CpMode::Ring,
        cp_split: Some(split),
        ..options(&[("cp", 2)], false, 8)
    };
    compare(
        "gpt2",
        vec![
            options(&[], false, 2),
            options(&[("dp_replicate", 2)], false, 2),
            options(&[("dp_shard", 2)], false, 4),
            options(&[("dp_replicate", 2), ("tp", 2)], true, 2),
            options(&[("pp", 2)], false, 2),
            Options { zero: 3, ..options(&[("dp_shard", 2), ("tp", 2)], false, 2) },
            Options { cp_mode: CpMode::Ulysses, ..options(&[("cp", 2)], false, 4) },
            Options { cp_mode: CpMode::AllGather, ..options(&[("cp", 2), ("tp", 2)], true, 4) },
            ring(CpSplit::Zigzag),
            ring(CpSplit::Contiguous),
            tp(Recompute::None),
            tp(Recompute::Selective),
            tp(Recompute::Full),
        ],
    );
}

#[test]
fn other_blocks_drop_the_same() {
    for name in ["llama_gqa", "gemma2", "mixtral"] {
        compare(name, vec![options(&[("dp_replicate", 2), ("tp", 2)], false, 4)]);
    }
    // More ranks than heads of keys; a loss in chunks.
    let chunks = Options { loss_chunks: LossChunks::Of(3), ..options(&[("tp", 4)], true, 4) };
    compare("llama_gqa", vec![options(&[("tp", 4)], false, 4), chunks]);
}

/// In bf16 the residual stream stays bf16, and nothing that was drawn is kept for backward.
#[test]
fn drawn_numbers_are_drawn_again() {
    let fx = Fixture::open("gpt2");
    let mut o = dropped(options(&[("tp", 2)], true, 2));
    (o.dtype, o.observe) = (DType::BF16, false);
    let plan = compile(&fx.model(&o), &o).plan;
    let f = plan.module.func("forward").expect("forward");
    let made = |hint: &str| f.values.iter().filter(|v| v.name.hint == *hint).collect::<Vec<_>>();
    assert_eq!((made("kept").len(), made("dropped").len()), (5, 5));
    assert!(made("dropped").iter().chain(&made("hidden")).all(|v| v.ty.dtype == DType::BF16));
    let stash = |r: &&Port| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Stash);
    let stashed: Vec<_> = f.results.iter().filter(stash).map(|r| f.name(r.value)).collect();
    assert!(stashed.len() > 10 && stashed.iter().all(|n| n.hint != "kept"), "{}", stashed.len());
}

/// What is dropped changes the loss; an evaluation drops nothing; another seed and another step drop others.
#[test]
fn evaluations_drop_nothing() {
    let fx = Fixture::open("gpt2");
    let targets = fx.targets();
    let batch = StepBatch::tokens(&fx.input_ids, &targets, false);
    let losses = |o: &Options| {
        let model = fx.model(o);
        let mut s = session(&model, &compile(&model, o));
        let evaluation = s.evaluate(&batch).expect("an evaluation").loss.expect("a loss");
        // Without a rate of learning, so that steps differ by what they drop.
        let steps = [1, 2].map(|step| s.step(&batch, 0.0, step).expect("a step").loss);
        (evaluation, steps.map(|l| l.expect("a loss")))
    };
    let plain = losses(&options(&[], false, 8));
    let o = dropped(options(&[], false, 8));
    let (evaluation, steps) = losses(&o);
    assert_eq!(evaluation.to_bits(), plain.0.to_bits());
    let (_, other) = losses(&Options { seed: 1, ..o });
    let far = |a: f32, b: f32| (a - b).abs() > 1e-4 * b;
    assert!(far(steps[0], plain.1[0]) && far(steps[1], steps[0]) && far(other[0], steps[0]));
}

#[test]
fn rates_of_the_config() {
    let lab = Lab::new("dropout");
    let rates = |attention: f64| serde_json::json!({"attn_pdrop": attention, "resid_pdrop": 0.25, "embd_pdrop": 0.125});
    let model = lab.config("gpt2", rates(0.0));
    lab.ok(&lab::compile(&model, &["--dropout", "config"]));
    let text = std::fs::read_to_string(lab.path("out/model.ir")).expect("the model");
    assert_eq!(text.matches("from=keep 0.875").count(), 1, "{text}");
    assert_eq!(text.matches("from=keep 0.75").count(), 4, "{text}");
    assert!(text.contains("stream=transformer.h.1.mlp"), "{text}");
    let deep = format!("{FIXTURES}/llama_deep");
    lab.ok(&lab::compile(&deep, &["--dropout", "0.1"]));
    let text = std::fs::read_to_string(lab.path("out/model.ir")).expect("the model");
    assert!(text.contains("stream=model.layers.{i}.mlp"), "layers are not folded: {text}");
    assert!(text.contains("kept=0.9 model.layers.{i}.self_attn.probabilities"), "{text}");
    let model = lab.config("gpt2", rates(0.1));
    lab.ok(&lab::compile(&model, &["--dropout", "config"]));
    let text = std::fs::read_to_string(lab.path("out/model.ir")).expect("the model");
    let kept = |i: usize| format!("kept=0.9 transformer.h.{i}.attn.probabilities]");
    assert!((0..2).all(|i| text.matches(&kept(i)).count() == 1), "{text}");
}

/// The losses of a run.
fn losses(lab: &Lab, args: &[&str]) -> Vec<f64> {
    let out = lab.ok(&[&["run"], args, &["--format", "json"]].concat());
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let loss =
        |l: &str| serde_json::from_str::<serde_json::Value>(l).expect("JSON")["loss"].as_f64();
    text.lines().map(|l| loss(l).expect("a loss")).collect()
}

/// What attention alone drops changes the loss.
#[test]
fn attention_alone_drops() {
    let lab = Lab::new("dropout-attention");
    let loss = |attention: f64| {
        let rates =
            serde_json::json!({"attn_pdrop": attention, "resid_pdrop": 0.0, "embd_pdrop": 0.0});
        let model = lab.config("gpt2", rates);
        lab.ok(&lab::compile(&model, &["--dropout", "config"]));
        losses(&lab, &["out", "--steps", "1"])[0]
    };
    let [none, some, more] = [0.0, 0.5, 0.9].map(loss);
    assert!(none != some && some != more && none != more, "{none} {some} {more}");
}

/// A run that goes on from a checkpoint drops what it would have dropped, on another mesh too.
#[test]
fn a_resumed_run_drops_the_same() {
    let lab = Lab::new("dropout-resumed");
    let model = format!("{FIXTURES}/gpt2");
    for (out, mesh) in [("a", "dp=2"), ("b", "tp=2")] {
        let layout = ["--mesh", mesh, "--dropout", "0.3", "--seq", "16", "-o", out];
        lab.ok(&[&["compile", &model][..], &layout].concat());
    }
    let whole = losses(&lab, &["a", "--steps", "4"]);
    losses(&lab, &["a", "--steps", "2", "--save", "ckpt", "--save-every", "2"]);
    let rest = losses(&lab, &["b", "--steps", "4", "--resume", "ckpt"]);
    assert_eq!((whole.len(), rest.len()), (4, 2));
    for (a, b) in whole[2..].iter().zip(&rest) {
        assert!((a - b).abs() < 1e-5 * a, "{whole:?} {rest:?}");
    }
}
