//! Documents packed in rows: they do not see each other, and positions restart with each, as transformers does
//! it with a mask of documents and positions of tokens; the same on every mesh.

use crate::fixture::*;
use shardc_frontends::Model;
use shardc_ir::documents::Documents;
use shardc_ir::func::RoleKind;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, CpSplit, Options, Order};
use shardc_passes::pipeline::Compiled;
use shardc_prove::Verdict;

/// As `tests/fixtures/make.py` packs them.
const PACKED: Documents = Documents { end: 2, padding: Some(0) };
const MODELS: [&str; 2] = ["llama_packed", "gpt2_packed"];

fn packed(o: Options) -> Options {
    Options { documents: Some(PACKED), ..o }
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
