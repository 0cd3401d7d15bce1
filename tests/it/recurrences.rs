//! Models with layers that walk a state along the tokens: the numbers of transformers on every mesh, plans that are proved,
//! documents apart, and what is refused by name.

use crate::documents::PACKED;
use crate::fixture::*;
use crate::lab::{Lab, compile as flags};
use serde_json::json;
use shardc_ir::documents::Documents;
use shardc_ir::func::RoleKind;
use shardc_ir::ops::Op;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::Options;
use shardc_prove::Verdict;
use shardc_runtime::StepBatch;

const MODELS: [&str; 4] = ["qwen3_next", "mamba2", "bamba", "granitemoehybrid"];

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
    for name in MODELS {
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
    const CUTS: [usize; 5] = [0, 5, 6, 13, SEQ];
    for name in MODELS {
        let fx = Fixture::open(name);
        let o = Options {
            documents: Some(Documents::Ends(PACKED)),
            ..options(&[("tp", 2)], false, ROWS)
        };
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
            CUTS[1..].iter().for_each(|end| row[end - 1] = PACKED.end);
        }
        // What is in the other documents changes nothing of the loss of one.
        let loss = |ids: &[i32], document: usize| {
            let own = CUTS[document]..CUTS[document + 1] - 1;
            let targets: Vec<i32> = (0..ROWS * SEQ)
                .map(|i| if own.contains(&(i % SEQ)) { ids[i + 1] } else { -100 })
                .collect();
            let batch = StepBatch::tokens(ids, &targets, true);
            let step = session(&model, &compiled).step(&batch, 1e-3, 1);
            step.unwrap_or_else(|e| panic!("{name}: {e}")).loss.expect("a loss")
        };
        for document in [0, 2, 3] {
            let mut others = ids.clone();
            for (i, t) in others.iter_mut().enumerate() {
                let own = CUTS[document]..CUTS[document + 1];
                if !own.contains(&(i % SEQ)) && *t != PACKED.end {
                    *t = 3 + (*t + 7) % 20;
                }
            }
            assert_ne!(ids, others);
            assert_eq!(
                loss(&ids, document),
                loss(&others, document),
                "{name}: document {document}"
            );
        }
    }
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    let lab = Lab::new("recurrences");
    let model = lab.model("qwen3_next");
    let said = lab.refuses(&flags(&model, &["--mesh", "cp=2"]), 4, "not-built");
    assert!(said.contains("`scan` over cp is not built"), "{said}");
    let said = lab.refuses(&flags(&model, &["--mesh", "tp=4"]), 2, "heads-not-divisible");
    assert!(said.contains("key_heads % tp == 0"), "{said}");
    let strange = lab.config("qwen3_next", json!({"layer_types": ["linear_attention", "mamba"]}));
    let said = lab.refuses(&flags(&strange, &[]), 4, "unsupported-config");
    assert!(said.contains("layers of type `mamba`"), "{said}");
    let uneven = lab.config("qwen3_next", json!({"linear_num_value_heads": 3}));
    lab.refuses(&flags(&uneven, &[]), 2, "config");
    let split = flags(&lab.model("mamba2"), &["--mesh", "tp=4"]);
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
