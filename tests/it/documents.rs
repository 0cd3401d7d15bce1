//! Documents packed in rows: they do not see each other, and positions restart with each, as transformers does
//! it with a mask of documents and positions of tokens; the same on every mesh.

use crate::fixture::*;
use shardc_frontends::Model;
use shardc_ir::documents::{Documents, Ends};
use shardc_ir::func::RoleKind;
use shardc_ir::ops::Op;
use shardc_ir::plan::Mode;
use shardc_ir::types::DType;
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, CpSplit, Options, Order};
use shardc_passes::pipeline::Compiled;
use shardc_prove::Verdict;
use shardc_runtime::StepBatch;

/// As `tests/fixtures/make.py` packs them.
pub const PACKED: Ends = Ends { end: 2, padding: Some(0) };
const MODELS: [&str; 4] = ["llama_packed", "gpt2_packed", "llama4_packed", "ministral3_packed"];

fn packed(o: Options) -> Options {
    Options { documents: Some(Documents::Ends(PACKED)), ..o }
}

/// The definition of every op against transformers: loss, logits, every gradient.
#[test]
fn the_interpreter_packs_as_transformers_does() {
    for name in MODELS {
        let (fx, o) = (Fixture::open(name), packed(options(&[], false, 8)));
        let model = fx.model(&o);
        let compiled = compile(&model, &o);
        let mut state = start(&fx, &model, &compiled);
        interpret(&compiled, &mut state, 1).unwrap_or_else(|e| panic!("{name}: {e}"));
        let m = &compiled.plan.module;
        let out = |kind: RoleKind, of: &str| {
            state.output(&m.mesh, kind, of).unwrap_or_else(|e| panic!("{of}: {e}")).data
        };
        fx.compare_loss(out(RoleKind::Metric, "loss")[0]);
        fx.compare_logits(&out(RoleKind::Output, "logits"));
        fx.compare_grads(&model, |p| out(RoleKind::GradShown, p));
    }
}

fn proved(name: &str, o: &Options, model: &Model, compiled: &Compiled) {
    let r = texts(model, o, compiled).prove();
    assert_eq!(r.verdict(), Verdict::Proved, "{name} {:?}: {:?} {:?}", o.mesh, r.refuted, r.gaps);
}

/// Ranks against transformers, and every plan is proved.
fn trains(all: Vec<Options>) {
    for (name, o) in MODELS.iter().flat_map(|n| all.iter().map(move |o| (n, packed(o.clone())))) {
        eprintln!("{name} {:?} {:?} {:?} {:?}", o.mesh, o.cp_mode, o.cp_split, o.schedule);
        let (model, compiled) = train_and_compare(name, &o);
        proved(name, &o, &model, &compiled);
    }
}

#[test]
fn one_rank() {
    trains(vec![options(&[], false, 8), options(&[], false, 2)]);
}

#[test]
fn every_mesh() {
    trains(vec![
        options(&[("dp_replicate", 2)], false, 2),
        Options { zero: 3, ..options(&[("dp_shard", 2), ("tp", 2)], false, 2) },
        options(&[("tp", 2)], true, 4),
        options(&[("pp", 2)], false, 2),
        Options {
            schedule: Order::Named("zb-h1".into()),
            ..options(&[("pp", 2), ("tp", 2)], true, 1)
        },
        Options { loss_chunks: LossChunks::Of(2), ..options(&[("tp", 2)], false, 4) },
        Options { auto: true, ..options(&[("dp_shard", 2), ("tp", 2)], false, 4) },
    ]);
}

#[test]
fn every_way_to_cut_the_sequence() {
    let cp = |cp_mode, split, mesh: &[(&str, usize)]| Options {
        cp_mode,
        cp_split: Some(split),
        ..options(mesh, false, 2)
    };
    let (line, zigzag) = (CpSplit::Contiguous, CpSplit::Zigzag);
    trains(vec![
        cp(CpMode::AllGather, line, &[("cp", 2), ("tp", 2)]),
        cp(CpMode::AllGather, zigzag, &[("cp", 2)]),
        cp(CpMode::Ulysses, line, &[("cp", 2)]),
        cp(CpMode::Ulysses, zigzag, &[("dp_replicate", 2), ("cp", 2)]),
        cp(CpMode::Ring, line, &[("cp", 4)]),
        cp(CpMode::Ring, zigzag, &[("cp", 2), ("tp", 2)]),
        cp(CpMode::Ring, zigzag, &[("pp", 2), ("cp", 2)]),
    ]);
}

#[test]
fn what_backward_computes_again() {
    let of = |recompute| Options { recompute, ..options(&[("tp", 2)], true, 4) };
    trains(vec![of(Recompute::Full), of(Recompute::Selective)]);
}

/// Windows, softcaps, latent heads and experts beside segments: the numbers of one rank, of tokens in which
/// documents end here and there.
#[test]
fn other_blocks_pack_the_same() {
    let numbers = |name: &str, o: &Options| {
        let fx = Fixture::open(name);
        let mut ids = fx.input_ids.clone();
        ids.iter_mut().step_by(7).for_each(|t| *t = PACKED.end);
        let model = fx.model(o);
        let compiled = compile(&model, o);
        proved(name, o, &model, &compiled);
        let n = three_steps(&model, &compiled, &ids, &fx.targets());
        (model, n)
    };
    for name in ["mistral_window", "gemma2", "deepseek_v3", "mixtral"] {
        // One microbatch: auxiliary losses are a mean over microbatches.
        let of = |mesh: &[(&str, usize)], cp_mode| {
            let o = options(mesh, false, 8);
            packed(Options { cp_mode, microbatch: 8 / o.axis("dp_replicate"), ..o })
        };
        let (model, want) = numbers(name, &packed(options(&[], false, 8)));
        let plain = three_steps_of_one_document(name);
        assert!((plain - want.loss).abs() > 1e-3, "{name}: segments change nothing");
        for o in [
            of(&[("cp", 2)], CpMode::Ring),
            of(&[("cp", 2), ("tp", 2)], CpMode::AllGather),
            of(&[("dp_replicate", 2), ("tp", 2)], CpMode::AllGather),
        ] {
            numbers(name, &o).1.compare(&model, &want, &format!("{name} {:?}", o.mesh));
        }
    }
}

/// The loss of the same tokens where a row is one document, over the labels that packing scores.
fn three_steps_of_one_document(name: &str) -> f64 {
    let (fx, o) = (Fixture::open(name), options(&[], false, 8));
    let (mut ids, mut targets) = (fx.input_ids.clone(), fx.targets());
    ids.iter_mut().step_by(7).for_each(|t| *t = PACKED.end);
    PACKED.ignore(&ids, &mut targets);
    let model = fx.model(&o);
    three_steps(&model, &compile(&model, &o), &ids, &targets).loss
}

/// In bf16, too, as far as its rounding goes.
#[test]
fn bf16_is_near_the_reference() {
    for name in MODELS {
        let fx = Fixture::open(name);
        for mesh in [&[][..], &[("cp", 2), ("tp", 2)]] {
            let o = Options { cp_mode: CpMode::Ring, ..options(mesh, false, 4) };
            let o = packed(Options { dtype: DType::BF16, ..o });
            let model = fx.model(&o);
            let n = three_steps(&model, &compile(&model, &o), &fx.input_ids, &fx.targets());
            let want = fx.reference("loss")[0];
            assert!((n.loss - want).abs() < 0.02 * want, "{name}: {} not {want}", n.loss);
        }
    }
}

/// Logits of plans that only run forward; they score nothing, and need no labels.
#[test]
fn forward_only_gives_the_same_logits() {
    for name in MODELS {
        let fx = Fixture::open(name);
        let o = Options { cp_mode: CpMode::Ring, ..options(&[("pp", 2), ("cp", 2)], false, 2) };
        let o = packed(Options { mode: Mode::Infer, observe: false, ..o });
        let model = fx.model(&o);
        let mut s = session(&model, &compile(&model, &o));
        let batch = StepBatch::tokens(&fx.input_ids, &[], true);
        let r = s.step(&batch, 0.0, 1).unwrap_or_else(|e| panic!("{name}: {e}"));
        let logits = &r.output(RoleKind::Output, "logits").expect("logits").data;
        fx.compare_logits(&logits.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
    }
}

/// A ring whose keys have the segments of another block is not the model.
#[test]
fn segments_of_other_keys_are_seen_by_the_prover() {
    let fx = Fixture::open("llama_packed");
    let o = Options { cp_mode: CpMode::Ring, ..options(&[("cp", 4)], false, 8) };
    let o = packed(o);
    let model = fx.model(&o);
    let mut t = texts(&model, &o, &compile(&model, &o));
    let mut changed = 0;
    for f in &mut t.programs.funcs {
        let of_segments: Vec<bool> =
            f.nodes.iter().map(|n| f.values[n.outs[0]].name.hint == *"key_segment").collect();
        for (n, _) in f.nodes.iter_mut().zip(of_segments).filter(|(_, is)| *is) {
            if let Op::RingShard(p) = &mut n.op {
                p.shift = (p.shift + 1) % 4;
                changed += 1;
            }
        }
    }
    assert!(changed > 0);
    assert_ne!(t.prove().verdict(), Verdict::Proved);
}

/// A text whose attention has no segments is refused: its documents would see each other.
#[test]
fn a_text_without_segments_is_refused() {
    let plain = Fixture::open("llama_packed").model(&options(&[], false, 8));
    let d = try_compile(&plain, &packed(options(&[], false, 8))).expect_err("refused");
    assert!(d.code == "source" && d.message.contains("no segments"), "{d}");
    let model = Fixture::open("llama_packed").model(&packed(options(&[], false, 8)));
    let d = try_compile(&model, &options(&[], false, 8)).expect_err("refused");
    assert!(d.code == "source" && d.message.contains("--documents"), "{d}");
    let beyond = Documents::ends(32, None);
    let o = Options { documents: Some(beyond), ..options(&[], false, 8) };
    let d = try_compile(&model, &o).expect_err("refused");
    assert!(d.code == "flag" && d.message.contains("no token 32"), "{d}");
}
