//! Models with layers that walk a state along the tokens: the numbers of transformers on every mesh, plans that are proved,
//! documents apart, and what is refused by name.

mod laws;

use crate::documents::PACKED;
use crate::fixture::*;
use crate::lab::{Lab, compile as flags};
use serde_json::json;
use shardc_ir::documents::Documents;
use shardc_ir::func::{Module, RoleKind};
use shardc_ir::ops::Op;
use shardc_ir::types::DType;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, Options};
use shardc_prove::Verdict;
use shardc_runtime::{Session, StepBatch};

pub const MODELS: [&str; 5] = ["qwen3_next", "mamba2", "bamba", "granitemoehybrid", "nemotron_h"];

/// The definition of every op against transformers: loss, logits, every gradient.
#[test]
fn the_interpreter_walks_as_transformers_does() {
    for name in MODELS {
        let (fx, o) = (Fixture::open(name), options(&[], false, 8));
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

/// Three steps on ranks against transformers, and every plan is proved.
fn trains(o: &Options) {
    // Half of them in each run.
    let some = MODELS.iter().enumerate().filter(|(i, _)| shardc_testing::taken(*i, 2));
    for name in some.map(|(_, name)| *name) {
        let experts = Fixture::open(name).model(o).facts.experts.is_some();
        let o = &Options { ep: if experts { o.ep } else { 1 }, ..o.clone() };
        eprintln!("{name} {:?} zero={} sp={}", o.mesh, o.zero, o.sp);
        let (model, compiled) = train_and_compare(name, o);
        let r = texts(&model, o, &compiled).prove();
        let said = format!("{name} {:?}: {:?} {:?}", o.mesh, r.refuted, r.gaps);
        assert_eq!(r.verdict(), Verdict::Proved, "{said}");
    }
}

#[test]
fn one_rank() {
    trains(&options(&[], false, 8));
    trains(&options(&[], false, 2));
}

#[test]
fn heads_over_tp() {
    trains(&options(&[("tp", 2)], false, 8));
    trains(&options(&[("tp", 2)], true, 4));
}

#[test]
fn rows_over_dp() {
    trains(&Options { zero: 3, ep: 2, ..options(&[("dp_shard", 2)], false, 4) });
    trains(&Options { ep: 2, ..options(&[("dp_shard", 2), ("tp", 2)], true, 4) });
}

#[test]
fn tokens_over_cp() {
    trains(&options(&[("cp", 2)], false, 8));
    trains(&options(&[("cp", 4)], false, 4));
    trains(&options(&[("cp", 2), ("tp", 2)], true, 4));
}

/// Pieces of which the last is shorter, or empty.
#[test]
fn uneven_pieces_over_cp() {
    for (name, mesh) in [
        ("mamba2", &[("cp", 3)][..]),
        ("bamba", &[("cp", 3), ("tp", 2)]),
        ("mamba2", &[("pp", 2), ("cp", 5)]),
    ] {
        let o = options(mesh, false, 4);
        let (model, compiled) = train_and_compare(name, &o);
        let r = texts(&model, &o, &compiled).prove();
        let said = format!("{name} {mesh:?}: {:?} {:?}", r.refuted, r.gaps);
        assert_eq!(r.verdict(), Verdict::Proved, "{said}");
    }
}

/// The same with documents, one of which ends in the last piece, and with padding of a bigger row.
#[test]
fn uneven_pieces_of_documents() {
    for (cuts, mesh) in [([0, 5, 7, 13, SEQ], [("cp", 3)]), ([0, 4, 8, 11, SEQ], [("cp", 5)])] {
        alone(&["mamba2", "bamba"], cuts, &mesh);
    }
    let documents = Some(Documents::Ends(PACKED));
    for (name, mesh) in [("mamba2", &[("cp", 3)][..]), ("bamba", &[("cp", 3), ("tp", 2)])] {
        let o = Options { documents, ..options(mesh, false, 4) };
        let model = Fixture::open(name).model(&o);
        let r = texts(&model, &o, &compile(&model, &o)).prove();
        let said = format!("{name} {mesh:?}: {:?} {:?}", r.refuted, r.gaps);
        assert_eq!(r.verdict(), Verdict::Proved, "{said}");
    }
}

#[test]
fn layers_over_pp() {
    trains(&options(&[("pp", 2)], false, 2));
    trains(&options(&[("pp", 2), ("tp", 2)], false, 4));
}

#[test]
fn what_backward_computes_again() {
    for recompute in [Recompute::Full, Recompute::Selective] {
        trains(&Options { recompute, ..options(&[("tp", 2)], false, 4) });
    }
}

/// Documents in a row, of one token and of several, have the loss of rows that hold one each.
#[test]
fn a_document_is_as_if_it_were_alone() {
    // Over cp a document ends before, with and behind the tokens of a rank.
    for (cuts, mesh) in [
        ([0, 5, 6, 13, SEQ], [("tp", 2)]),
        ([0, 5, 7, 13, SEQ], [("cp", 2)]),
        ([0, 4, 8, 11, SEQ], [("cp", 4)]),
    ] {
        alone(&MODELS, cuts, &mesh);
    }
}

fn alone(models: &[&str], cuts: [usize; 5], mesh: &[(&str, usize)]) {
    for &name in models {
        let fx = Fixture::open(name);
        let o = Options { documents: Some(Documents::Ends(PACKED)), ..options(mesh, false, ROWS) };
        let model = fx.model(&o);
        let compiled = compile(&model, &o);
        let scans = compiled.plan.module.funcs.iter().flat_map(|f| &f.nodes);
        let scans: Vec<bool> = scans
            .filter_map(|n| match &n.op {
                Op::Scan(s) => Some(s.segments),
                _another => None,
            })
            .collect();
        assert!(!scans.is_empty() && scans.iter().all(|s| *s), "{name}: {scans:?}");
        let other = |t: i32| if t == PACKED.end || Some(t) == PACKED.padding { 3 } else { t };
        let mut ids: Vec<i32> = fx.input_ids.iter().map(|t| other(*t)).collect();
        for row in ids.chunks_mut(SEQ) {
            cuts[1..].iter().for_each(|end| row[end - 1] = PACKED.end);
        }
        let alone = Options { mesh: vec![], ..o.clone() };
        let one = fx.model(&alone);
        let mut one = session(&one, &compile(&one, &alone));
        let mut all = session(&model, &compiled);
        // A step at a learning rate of 0 leaves the weights as they are.
        let on = |s: &mut Session, ids: &[i32], document: usize| {
            let own = cuts[document]..cuts[document + 1] - 1;
            let targets: Vec<i32> = (0..ROWS * SEQ)
                .map(|i| if own.contains(&(i % SEQ)) { ids[i + 1] } else { -100 })
                .collect();
            let batch = StepBatch::tokens(ids, &targets, true);
            let step = s.step(&batch, 0.0, 1);
            step.unwrap_or_else(|e| panic!("{name}: {e}")).loss.expect("a loss")
        };
        // What is in the other documents changes nothing of the loss of one.
        for document in [0, 2, 3] {
            let a = on(&mut all, &ids, document);
            let b = on(&mut one, &ids, document);
            assert!((a - b).abs() < 1e-5 * b.abs(), "{name} {mesh:?}: {a}, on one rank {b}");
            let mut others = ids.clone();
            for (i, t) in others.iter_mut().enumerate() {
                let own = cuts[document]..cuts[document + 1];
                if !own.contains(&(i % SEQ)) && *t != PACKED.end {
                    *t = 3 + (*t + 7) % 20;
                }
            }
            assert_ne!(ids, others);
            assert_eq!(a, on(&mut all, &others, document), "{name}: document {document}");
        }
    }
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    let lab = Lab::new("recurrences");
    let model = lab.model("qwen3_next");
    let zigzag = flags(&model, &["--mesh", "cp=2", "--cp-split", "zigzag"]);
    let said = lab.refuses(&zigzag, 4, "not-built");
    assert!(said.contains("--cp-split contiguous"), "{said}");
    let mamba2 = lab.model("mamba2");
    let uneven = flags(&model, &["--mesh", "cp=2", "--seq", "15"]);
    let said = lab.refuses(&uneven, 2, "sequence-not-divisible");
    assert!(said.contains("with experts"), "{said}");
    // With no layer that has experts there are none.
    let dense = lab.config("qwen3_next", json!({"mlp_only_layers": [0, 1]}));
    lab.ok(&flags(&dense, &["--mesh", "cp=2", "--seq", "15"]));
    let said = lab.refuses(&flags(&model, &["--mesh", "tp=4"]), 2, "heads-not-divisible");
    assert!(said.contains("key_heads % tp == 0"), "{said}");
    let strange = lab.config("qwen3_next", json!({"layer_types": ["linear_attention", "mamba"]}));
    let said = lab.refuses(&flags(&strange, &[]), 4, "unsupported-config");
    assert!(said.contains("layers of type `mamba`"), "{said}");
    let uneven = lab.config("qwen3_next", json!({"linear_num_value_heads": 3}));
    lab.refuses(&flags(&uneven, &[]), 2, "config");
    let split = flags(&mamba2, &["--mesh", "tp=4"]);
    let said = lab.refuses(&split, 2, "heads-not-divisible");
    assert!(said.contains("key_heads % tp == 0"), "{said}");
    let wide = lab.config("mamba2", json!({"head_dim": 16}));
    let said = lab.refuses(&flags(&wide, &[]), 2, "config");
    assert!(said.contains("heads * head_dim == expand * hidden"), "{said}");
    for (kind, why) in [
        ("mamba", "Mamba-1"),
        ("falcon_mamba", "Mamba-1"),
        ("jamba", "Mamba-1"),
        ("kimi_linear", "for each channel of a key"),
        ("zamba2", "layers share"),
    ] {
        let other = lab.config("mamba2", json!({"model_type": kind}));
        let said = lab.refuses(&flags(&other, &[]), 4, "unknown-model-type");
        assert!(said.contains(why), "{kind}: {said}");
    }
}

/// Bytes of states, of maps between them, and of gradients of states, that a rank sends.
fn states_sent(m: &Module, ways: usize) -> f64 {
    let mut sent = 0.0;
    for (f, n) in m.funcs.iter().flat_map(|f| f.nodes.iter().map(move |n| (f, n))) {
        let piece = match &n.op {
            Op::AllGather(_) => n.ins[0],
            Op::ReduceScatter(_) => n.outs[0],
            _another => continue,
        };
        let ty = f.ty(piece);
        if ty.dtype == DType::F32 && ty.dims.get(1).is_some_and(|d| d.size == ways) {
            sent += (ways - 1) as f64 * ty.local_bytes(&m.mesh) as f64;
        }
    }
    sent
}

/// Bytes of states that a rank sends, whatever the length.
#[test]
fn bytes_of_states_do_not_depend_on_the_length() {
    for (name, seqs) in [("qwen3_next", [4096, 65536]), ("mamba2", [4096, 65536])] {
        for ways in [2, 4] {
            let sent = seqs.map(|seq| {
                let o = Options { seq, ..options(&[("cp", ways)], false, 1) };
                let o = Options { cp_mode: CpMode::AllGather, ..o };
                let model = Fixture::open(name).model(&o);
                states_sent(&compile(&model, &o).plan.module, ways)
            });
            let s = match name {
                "mamba2" => (2.0, 4.0, 6.0, 8.0, 1.0),
                _delta => (1.0, 4.0, 4.0, 6.0, 4.0 * 4.0),
            };
            let (layers, n, k, v, map) = s;
            let far = if ways > 2 { map } else { 0.0 };
            let want = layers * (ways as f64 - 1.0) * 4.0 * n * (2.0 * k * v + far);
            assert_eq!(sent, [want; 2], "{name} over {ways}");
        }
    }
}
