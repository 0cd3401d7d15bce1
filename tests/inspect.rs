//! `inspect` and `explain` on compiled fixtures: how many collectives a layer has and what they
//! send, and the answers people read.

mod fixture;
mod lab;
use fixture::*;
use shardc::commands::explain::{PAGES, explain};
use shardc::commands::inspect::{Inspect, LayerCollectives, inspect, layer_collectives, numbered};
use shardc::plan_dir::Stored;
use shardc::report;
use shardc_ir::func::Module;
use shardc_ir::plan::Mode;
use shardc_ir::schedule::write_csv;
use shardc_ir::text;
use shardc_ir::types::DType;
use shardc_passes::options::{CpMode, Options, TpMode};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A fixture, compiled without dumps.
fn stored(name: &str, mesh: &[(&str, usize)], sp: bool, microbatch: usize) -> Stored {
    let o = Options { observe: false, ..options(mesh, sp, microbatch) };
    let config = Fixture::open(name).dir.join("config.json");
    shardc::compile(&config, &o, None, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")).stored
}

/// The collectives of a fixture; all its layers are alike.
fn counted(s: &Stored) -> LayerCollectives {
    let c = layer_collectives(&s.plan, 0);
    let layer = c.layer(0).expect("layer 0 has collectives");
    let last = s.facts.map_or(0, |f| f.layers as u32 - 1);
    assert_eq!(c.layer(last), Some(layer), "all layers are one section");
    c
}

/// Bytes one rank sends per layer and microbatch under the ring cost: 4·2(t−1)/t·N·h·4.
fn megatron_bytes(t: usize, tokens: usize, hidden: usize) -> f64 {
    (4 * 2 * (t - 1) * tokens * hidden * 4 / t) as f64
}

const HIDDEN: usize = 32;

#[test]
fn a_layer_has_2_all_reduces_forward_and_2_backward() {
    for (mesh, t, microbatch) in
        [(&[("tp", 4)][..], 4, 2), (&[("tp", 2)], 2, 8), (&[("dp_replicate", 2), ("tp", 2)], 2, 1)]
    {
        for name in ["llama_gqa", "llama_mha", "qwen3"] {
            let s = stored(name, mesh, false, microbatch);
            let layer = counted(&s).layer(0).cloned().expect("a layer");
            assert_eq!(layer.count("forward", "all_reduce"), 2, "{name} {mesh:?}");
            let backward = layer.count("backward", "all_reduce");
            assert_eq!(backward, 2, "{name} {mesh:?}: {layer:?}");
            assert!(layer.calls.iter().all(|c| c.kind == "all_reduce" && c.axis == "tp"));
            assert_eq!(layer.bytes(), megatron_bytes(t, microbatch * SEQ, HIDDEN));
        }
    }
}

#[test]
fn sequence_parallelism_sends_the_same_bytes_and_gathers_again() {
    for (mesh, microbatch) in [(&[("tp", 2)][..], 8), (&[("dp_replicate", 2), ("tp", 2)], 1)] {
        let s = stored("llama_gqa", mesh, true, microbatch);
        let layer = counted(&s).layer(0).cloned().expect("a layer");
        let counts = [
            layer.count("forward", "all_gather"),
            layer.count("forward", "reduce_scatter"),
            layer.count("backward", "all_gather"),
            layer.count("backward", "reduce_scatter"),
            layer.count("forward", "all_reduce") + layer.count("backward", "all_reduce"),
        ];
        // Backward has 2 of its own and gathers 2 of forward again.
        assert_eq!(counts, [2, 2, 4, 2, 0], "{mesh:?}: {layer:?}");
        let gather = megatron_bytes(2, microbatch * SEQ, HIDDEN) / 8.0;
        assert_eq!(layer.bytes(), 10.0 * gather);
    }
}

#[test]
fn a_gradient_is_reduced_once_per_step_whatever_the_microbatches() {
    for name in ["llama_gqa", "gpt2"] {
        for microbatch in [4, 2, 1] {
            for sp in [false, true] {
                let s = stored(name, &[("dp_replicate", 2), ("tp", 2)], sp, microbatch);
                let c = layer_collectives(&s.plan, 0);
                assert_eq!(c.microbatches, 4 / microbatch);
                let data = |axis: &str| axis.split('+').any(|a| a == "dp_replicate");
                let step = c.step().expect("reductions of the step");
                let reduced = step.calls.iter().filter(|c| data(&c.axis) && c.kind == "all_reduce");
                let gradients: usize = reduced.map(|c| c.gradients).sum();
                assert_eq!(gradients, s.plan.weights.len(), "{name} {microbatch} {sp}");
                let inside = c.sections.iter().filter(|s| *s != step).flat_map(|s| &s.calls);
                let inside = inside.filter(|c| data(&c.axis)).count();
                assert_eq!(inside, 0, "nothing is exchanged over dp in a microbatch");
            }
        }
    }
}

/// Blocks go around in both directions of a step, and every one says why.
#[test]
fn a_ring_has_its_steps_in_every_layer() {
    let o = options(&[("cp", 4)], false, 2);
    let o = Options { cp_mode: CpMode::Ring, observe: false, ..o };
    let config = Fixture::open("llama_gqa").dir.join("config.json");
    let done = shardc::compile(&config, &o, None, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
    let s = done.stored;
    let layer = counted(&s).layer(0).cloned().expect("a layer");
    let counts = ["forward", "backward"].map(|phase| layer.count(phase, "permute"));
    // Keys and values apart: 3 blocks, and 3 blocks and 4 of their gradients.
    assert_eq!(counts, [2 * 3, 2 * (3 + 4)]);
    let text = answer(&s, "collective:2");
    for part in [
        "permute over cp in @forward, model.layers.0.self_attn",
        "ring: the next block comes while this one is used",
        "made so by `%l0.k_own = own[cp; dim=1] %l0.k.2",
        "context parallelism cuts sequences: %l0.k.2",
    ] {
        assert!(text.contains(part), "no {part}: {text}");
    }
    let again = (1..=numbered(&s.plan).len()).map(|n| answer(&s, &format!("collective:{n}")));
    let needs = "forward saves a rank's own block, backward needs all of them";
    assert_eq!(again.filter(|t| t.contains(needs)).count(), 3 * 2 * 3);
}

#[test]
fn totals_are_those_of_the_report() {
    for sp in [false, true] {
        let s = stored("llama_gqa", &[("dp_replicate", 2), ("tp", 2)], sp, 2);
        let all = report::collectives(&s.plan, &s.plan.classes[0]);
        let (calls, bytes) = layer_collectives(&s.plan, 0).total();
        assert_eq!(calls, all.iter().map(|c| c.count).sum::<usize>());
        assert_eq!(bytes, all.iter().map(|c| c.bytes).sum::<f64>());
        let one = layer_collectives(&stored("llama_gqa", &[], false, 8).plan, 0);
        assert_eq!((one.total(), one.sections.len()), ((0, 0.0), 0));
    }
}

fn show(s: &Stored, set: impl Fn(&mut Inspect), json: bool) -> String {
    let mut what = Inspect::default();
    set(&mut what);
    inspect(s, &what, json).unwrap_or_else(|e| panic!("{e}"))
}

fn lines(m: &Module) -> String {
    text::print_with(m, text::Repeat::Unroll)
}

#[test]
fn what_inspect_prints_is_a_program() {
    let s = stored("llama_gqa", &[("tp", 4)], false, 2);
    let own = lines(&s.plan.module);
    let read = |t: &str| lines(&text::parse(t).unwrap_or_else(|e| panic!("{e}")));
    assert_eq!(read(&show(&s, |_| {}, false)), own);
    assert_eq!(read(&show(&s, |w| w.phase = Some("verify".into()), false)), own);
    let source = show(&s, |w| w.phase = Some("source".into()), false);
    assert_eq!(source, s.source);
    let local = show(&s, |w| (w.phase, w.local) = (Some("source".into()), true), false);
    assert_eq!(text::parse_source(&local).expect("a model").weights, s.plan.weights);
    let rank = show(&s, |w| w.rank = Some(3), false);
    assert!(rank.starts_with("// rank 3 of 4: tp=3\n"), "{rank}");
    let k = rank.lines().find(|l| l.contains("layers.1.self_attn.k_proj.weight"));
    assert!(k.is_some_and(|l| l.ends_with(" 8..16 of 16, all 32")), "{k:?}");
    assert_eq!(read(&rank), own);
    let local = show(&s, |w| w.local = true, false);
    for line in [
        "%l{i}.q_proj: f32[32@tp,32] param",
        "self_attn.q_proj.weight\",  // local [8,32]\n",
        "// local [2,16,1,8]\n",
        "// local [2,16,1,8], [2,16,1]\n",
    ] {
        assert!(local.contains(line), "{line}");
    }
    // Local sizes are notes, and nothing else changes.
    let bare = |t: &str| {
        let mut m = text::parse(t).unwrap_or_else(|e| panic!("{e}"));
        m.funcs.iter_mut().flat_map(|f| &mut f.nodes).for_each(|n| n.note = None);
        lines(&m)
    };
    assert_eq!(bare(&local), bare(&own));
}

#[test]
fn the_kernels_of_a_rank() {
    let s = stored("llama_gqa", &[("dp_replicate", 2), ("tp", 2)], true, 2);
    let page = show(&s, |w| w.phase = Some("kernels".into()), false);
    let object = show(&s, |w| w.phase = Some("kernels".into()), true);
    let object: serde_json::Value = serde_json::from_str(&object).expect("json");
    assert_eq!(object["phase"], "kernels");
    let all = object["kernels"].as_array().expect("a list");
    let ops = |k: &serde_json::Value| k["ops"].as_array().map_or(0, Vec::len);
    // SwiGLU of all layers is the epilogue of one of its products. It reads %gate, and writes %up and
    // %act, which backward wants, and what they make; three kernels would read %up and %act too.
    let swiglu = all.iter().find(|k| k["ops"][1] == "silu").expect("SwiGLU");
    assert_eq!((ops(swiglu), &swiglu["runs"]), (3, &serde_json::json!(3)));
    assert_eq!(swiglu["ops"], serde_json::json!(["dot", "silu", "mul"]));
    let bytes = |k: &str| swiglu[k].as_u64().expect("bytes");
    // 32 rows of 24 f32.
    assert_eq!(bytes("bytes_by_node") - bytes("bytes"), 2 * 32 * 24 * 4, "{swiglu}");
    for k in all {
        assert!(k["bytes"].as_u64() <= k["bytes_by_node"].as_u64(), "{k}");
        assert!(page.contains(k["name"].as_str().expect("a name")), "{k}");
        assert!(k["source"].as_str().expect("text").starts_with("void rows_"), "{k}");
    }
    assert!(all.iter().filter(|k| ops(k) > 5).count() > 3, "norms and the loss are fused: {page}");
}

#[test]
fn every_phase_can_be_shown() {
    let s = stored("llama_gqa", &[("dp_replicate", 2), ("tp", 2)], true, 2);
    let wrong = Inspect { phase: Some("shard".into()), ..Inspect::default() };
    let d = inspect(&s, &wrong, false).expect_err("no such phase");
    let (_, names) = d.help[0].split_once(": ").expect("a list of phases");
    let all: Vec<&str> = names.split(", ").collect();
    assert!(all.contains(&"propagate") && all.contains(&"ranked"), "{all:?}");
    for phase in all.into_iter().filter(|p| *p != "kernels") {
        let t = show(&s, |w| (w.phase, w.local) = (Some(phase.into()), true), false);
        assert!(text::parse_source(&t).is_ok(), "{phase}");
        let object = show(&s, |w| w.phase = Some(phase.into()), true);
        let object: serde_json::Value = serde_json::from_str(&object).expect("json");
        assert_eq!(object["phase"], phase);
    }
    for (what, code) in [
        (Inspect { class: Some(1), ..Inspect::default() }, "unknown-class"),
        (Inspect { rank: Some(4), ..Inspect::default() }, "unknown-rank"),
    ] {
        assert_eq!(inspect(&s, &what, false).expect_err("none such").code, code);
    }
}

#[test]
fn the_summary_as_people_and_programs_read_it() {
    let s = stored("llama_gqa", &[("dp_replicate", 2), ("tp", 2)], true, 2);
    insta::assert_snapshot!("summary_sp", show(&s, |w| w.summary = true, false));
    insta::assert_snapshot!("ranks", show(&s, |w| w.ranks = true, false));
    let json: serde_json::Value =
        serde_json::from_str(&show(&s, |w| w.summary = true, true)).expect("json");
    let parts = json["memory"]["at_peak"].as_array().expect("classes");
    let sum: u64 = parts.iter().filter_map(|p| p["bytes"].as_u64()).sum();
    assert_eq!(Some(sum), json["memory"]["peak_bytes"].as_u64());
    let layers = &json["collectives"]["sections"][1];
    assert_eq!((&layers["where"], &layers["last"]), (&"layers".into(), &2.into()));
    let ranks: serde_json::Value =
        serde_json::from_str(&show(&s, |w| w.ranks = true, true)).expect("json");
    assert_eq!(ranks["shown"][3]["groups"]["dp_replicate"], serde_json::json!([1, 3]));
}

#[test]
fn the_groups_of_a_grid_are_shown() {
    let o = |mode| Options { observe: false, tp_mode: mode, ..options(&[("tp", 8)], false, 8) };
    let config = Fixture::open("llama_mha").dir.join("config.json");
    for (mode, parts) in [
        (TpMode::TwoAndHalfD { depth: 2 }, ["tp:(1)2", "tp:(2)2", "tp:(4)2"]),
        (TpMode::ThreeD, ["tp:(1)2", "tp:(2)2", "tp:(4)2"]),
    ] {
        let done = shardc::compile(&config, &o(mode), None, &mut |_, _| {});
        let s = done.unwrap_or_else(|e| panic!("{e}")).stored;
        let ranks: serde_json::Value =
            serde_json::from_str(&show(&s, |w| w.ranks = true, true)).expect("json");
        // Rank 5 is x + q (y + q z) with x = 1, y = 0, z = 1.
        let groups = parts.map(|p| ranks["shown"][5]["groups"][p].clone());
        let want = [[1, 5], [5, 7], [4, 5]].map(|g| serde_json::json!(g));
        assert_eq!(groups, want, "{mode}");
        let text = show(&s, |w| w.ranks = true, false);
        assert!(parts.iter().all(|p| text.contains(&format!("group over {p}"))), "{text}");
        // Every collective can be asked why it is there, and how to be rid of it.
        for n in 1..=report::collectives(&s.plan, &s.plan.classes[0]).len() {
            let said = answer(&s, &format!("collective:{n}"));
            assert!(!said.contains("--sp"), "{said}");
        }
    }
}

#[test]
fn the_groups_of_experts_are_shown() {
    // 8 ranks: tp varies fastest and is taken by etp, ep takes cp, and dp_shard is left: edp.
    let mesh = [("dp_shard", 2), ("cp", 2), ("tp", 2)];
    let o = Options { observe: false, ep: 2, etp: Some(2), ..options(&mesh, true, 4) };
    let config = Fixture::open("mixtral").dir.join("config.json");
    let s =
        shardc::compile(&config, &o, None, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")).stored;
    let ranks: serde_json::Value =
        serde_json::from_str(&show(&s, |w| w.ranks = true, true)).expect("json");
    let groups = ["etp", "ep", "edp"].map(|p| ranks["shown"][5]["groups"][p].clone());
    assert_eq!(groups, [[4, 5], [5, 7], [1, 5]].map(|g| serde_json::json!(g)));
    let text = show(&s, |w| w.ranks = true, false);
    assert!(text.contains("group over ep") && text.contains("group over edp"), "{text}");
}

fn answer(s: &Stored, what: &str) -> String {
    explain(s, what, false).unwrap_or_else(|e| panic!("{e}"))
}

/// An answer without places in memory, which move with every change of the planner.
fn steady(s: &Stored, what: &str) -> String {
    let a = answer(s, what);
    let Some((head, tail)) = a.split_once(" B at byte ") else { return a };
    let tail = tail.trim_start_matches(|c: char| c.is_ascii_digit());
    format!("{head} B at byte N{tail}")
}

#[test]
fn explained_values_collectives_and_tensors() {
    let sp = stored("llama_gqa", &[("dp_replicate", 2), ("tp", 2)], true, 2);
    let kv = stored("llama_gqa", &[("tp", 4)], false, 2);
    let fused = stored("gpt2", &[("tp", 2)], false, 8);
    insta::assert_snapshot!("value_split_by_recipe", steady(&kv, "%l1.q"));
    insta::assert_snapshot!("value_of_shared_kv_heads", steady(&kv, "l1.k"));
    insta::assert_snapshot!("value_pending", steady(&sp, "%l0.mlp_out_part"));
    insta::assert_snapshot!("value_gradient", steady(&sp, "@backward %d_l1.down_proj"));
    insta::assert_snapshot!("collective_gather", steady(&sp, "collective:3"));
    let k_proj = "tensor:model.layers.1.self_attn.k_proj.weight";
    insta::assert_snapshot!("tensor_shared_kv_heads", steady(&kv, k_proj));
    let c_attn = "tensor:transformer.h.0.attn.c_attn.weight";
    insta::assert_snapshot!("tensor_of_several_parameters", steady(&fused, c_attn));
}

/// As often with a pipeline, in the functions of the same stage.
#[test]
fn a_collective_has_its_mirror_in_its_stage() {
    let mirrors = |mesh: &[(&str, usize)]| {
        let s = stored("llama_gqa", mesh, true, 4);
        let answers = (1..=numbered(&s.plan).len()).map(|n| answer(&s, &format!("collective:{n}")));
        let found = |a: String| Some(a.split_once("\nmirror ")?.1.lines().next()?.to_string());
        answers.filter_map(found).filter(|m| m.contains("gradient")).collect::<Vec<_>>()
    };
    let (one, two) = (mirrors(&[("tp", 2)]), mirrors(&[("pp", 2), ("tp", 2)]));
    let of = |stage: &str| two.iter().filter(|m| m.ends_with(stage)).count();
    assert!(one.len() > 12 && two.len() >= one.len(), "{one:#?}\n{two:#?}");
    assert!(of("@backward.0") > 4 && of("@backward.1") > 4 && of("@forward.1") > 4, "{two:#?}");
}

#[test]
fn everything_in_a_plan_can_be_explained() {
    for (mesh, sp) in
        [(&[("tp", 4)][..], false), (&[("dp_replicate", 2), ("tp", 2)], true), (&[], false)]
    {
        let s = stored("llama_gqa", mesh, sp, if sp { 2 } else { 4 });
        for n in 1..=numbered(&s.plan).len() {
            let a = answer(&s, &format!("collective:{n}"));
            assert!(a.contains("\nwhy ") && a.contains("\nremove "), "{a}");
        }
        for w in &s.plan.weights {
            let a = answer(&s, &format!("tensor:{}", w.param));
            assert!(a.contains("\ngradient ") && a.contains("exp_avg_sq"), "{a}");
        }
        // Every split of a few values of each function is led back to somebody who asked for it.
        for f in &s.plan.module.funcs {
            let made: Vec<_> = f.nodes.iter().map(|n| n.outs[0]).collect();
            for v in made.into_iter().step_by(1 + f.nodes.len() / 12) {
                let a = answer(&s, &format!("@{} {}", f.name, f.name(v)));
                let asked = ["recipe", "data parallelism", "--sp splits"];
                let split = !f.ty(v).sharded().is_empty();
                assert!(!split || asked.iter().any(|x| a.contains(x)), "{a}");
            }
        }
        let json = explain(&s, "%l0.q", true).unwrap_or_else(|e| panic!("{e}"));
        let json: serde_json::Value = serde_json::from_str(&json).expect("json");
        assert!(json["type"].as_array().is_some_and(|l| !l.is_empty()), "{json}");
    }
}

#[test]
fn a_users_sharding_is_named_as_such() {
    let mut o = Options { observe: false, ..options(&[("tp", 2)], false, 8) };
    o.shard = vec![
        shardc_passes::options::ShardRule {
            glob: "*.0.mlp.down_proj.weight".into(),
            dims: vec!["-".into(), "-".into()],
            priority: 0,
        },
        shardc_passes::options::ShardRule {
            glob: "*.mlp.gate_proj.weight".into(),
            dims: vec!["tp".into(), "-".into()],
            priority: 0,
        },
    ];
    let config = Fixture::open("llama_gqa").dir.join("config.json");
    let s =
        shardc::compile(&config, &o, None, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")).stored;
    let a = answer(&s, "%l1.gate");
    assert!(a.contains("you asked for it: --shard '*.mlp.gate_proj.weight=tp,-'"), "{a}");
}

#[test]
fn padding_tokens_are_told() {
    let line = |token: usize| {
        format!(
            "pad    token {token}: its row of model.embed_tokens gets no gradient from the look-up\n"
        )
    };
    for (name, token) in [("llama_padded", 2), ("gemma2_padded", 0)] {
        for mesh in [&[("tp", 2)], &[("pp", 2)]] {
            let s = stored(name, mesh, false, 4);
            assert!(
                show(&s, |w| w.summary = true, false).contains(&line(token)),
                "{name} {mesh:?}"
            );
            let told = &s.report["padding"];
            assert_eq!(
                told,
                &serde_json::json!([{ "scope": "model.embed_tokens", "token": token }])
            );
        }
    }
    let s = stored("llama_mha", &[("tp", 2)], false, 8);
    assert!(
        !show(&s, |w| w.summary = true, false).contains("pad    token")
            && s.report["padding"].is_null()
    );
}

#[test]
fn what_is_not_there_lists_what_is() {
    let s = stored("llama_gqa", &[("tp", 2)], false, 8);
    let n = numbered(&s.plan).len();
    for (what, code, help) in [
        ("%l9.q", "unknown-value", "%l0.q"),
        ("@nowhere %l0.q", "unknown-value", "@enter|@forward|@backward|@finish"),
        ("", "unknown-value", "chooses one of the"),
        ("@", "unknown-value", "chooses one of the"),
        ("collective:0", "unknown-collective", &format!("collective:1 to collective:{n}")),
        ("collective:x", "unknown-collective", &format!("collective:{n}")),
        ("tensor:q_proj", "unknown-tensor", "model.layers.0.self_attn.q_proj.weight"),
        ("tensor:é", "unknown-tensor", "30 tensors"),
        ("rule:E0201", "unknown-rule", "heads-not-divisible"),
    ] {
        let d = explain(&s, what, false).expect_err(what);
        assert_eq!(d.code, code, "{what}");
        assert!(d.help.iter().any(|h| h.contains(help)), "{what}: {d}");
    }
}

/// Source files of the workspace, tests left out.
fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for e in std::fs::read_dir(dir).expect("a folder of the workspace") {
        let path = e.expect("an entry").path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|x| x == "rs") {
            out.push(path);
        }
    }
}

/// The word in quotes at the beginning of a text.
fn quoted(t: &str) -> Option<&str> {
    let word = t.trim_start().strip_prefix('"')?.split_once('"')?.0;
    let ok = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (!word.is_empty() && word.chars().all(ok)).then_some(word)
}

/// Codes of diagnostics in a source file: the first argument of whatever makes one, the words that
/// `code` is bound to, and, in the table of divisibility rules, the first word of each.
fn codes(text: &str, is_rules: bool, out: &mut BTreeSet<String>) {
    let text = text.split("#[cfg(test)]").next().unwrap_or("");
    for call in [
        "Diag::new(",
        " err(",
        ":err(",
        "Fail::new(",
        ".diag(",
        "at_node(",
        "wrong(",
        "unsupported(",
    ] {
        let found = text.split(call).skip(1).filter_map(quoted);
        out.extend(found.map(String::from));
    }
    for binding in text.split("let code = ").skip(1) {
        let end = binding.find(';').unwrap_or(binding.len());
        out.extend(
            binding[..end]
                .match_indices('"')
                .filter_map(|(i, _)| quoted(&binding[i..]))
                .map(String::from),
        );
    }
    for binding in text.split("let (code, ").skip(1) {
        let end = binding.find(';').unwrap_or(binding.len());
        out.extend(binding[..end].split('(').skip(1).filter_map(quoted).map(String::from));
    }
    if is_rules {
        let table = text.split(" add(").skip(1);
        let first = table.filter_map(|t| t.find('"').and_then(|i| quoted(&t[i..])));
        out.extend(first.map(String::from));
    }
}

#[test]
fn every_code_has_a_page_and_every_page_a_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![];
    for dir in ["src", "ir/src", "frontends/src", "passes/src", "codegen/src", "runtime/src"] {
        sources(&root.join(dir), &mut files);
    }
    let mut used = BTreeSet::new();
    for f in files {
        let text = std::fs::read_to_string(&f).expect("source text");
        codes(&text, f.ends_with("src/rules.rs"), &mut used);
    }
    let pages: BTreeSet<String> = PAGES.iter().map(|p| p.0.to_string()).collect();
    let on_disk = std::fs::read_dir(root.join("docs/errors")).expect("docs/errors");
    let name = |e: std::io::Result<std::fs::DirEntry>| {
        e.expect("an entry").path().file_stem().expect("a name").to_string_lossy().into_owned()
    };
    let on_disk: BTreeSet<String> = on_disk.map(name).collect();
    assert_eq!(pages, on_disk, "the table of src/commands/explain/pages.rs lists docs/errors");
    let without: Vec<_> = used.difference(&pages).collect();
    assert!(without.is_empty(), "write docs/errors/CODE.md for {without:?}");
    let unused: Vec<_> = pages.difference(&used).collect();
    assert!(unused.is_empty(), "no diagnostic has the code of {unused:?}");
    for (code, page) in PAGES {
        assert!(page.starts_with(&format!("# {code}\n\n")), "{code}");
        assert!(page.contains(&format!("[{code}]: ")), "{code} has an example");
        assert!(page.contains("\nWay out:\n\n- ") || page.contains("\nWays out:\n\n- "), "{code}");
    }
}

/// What compiling leaves of a plan's files: programs, schedule.csv, weights.json, options.toml.
fn made(s: &Stored) -> [String; 4] {
    [
        text::print(&s.plan.module),
        write_csv(&s.plan.schedule),
        serde_json::to_string_pretty(&s.plan.weights).expect("plain data"),
        toml::to_string(&s.options).expect("plain data"),
    ]
}

/// The text of a model says all that compiling needs of it: the folder and its text give the same
/// files, byte by byte, on every mesh.
#[test]
fn the_text_of_a_model_compiles_to_the_same_plan() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("model_text");
    std::fs::create_dir_all(&dir).expect("a folder for the test");
    for name in ALL.iter().chain(EXPERTS) {
        let config = Fixture::open(name).dir.join("config.json");
        let compile = |path: &Path, o: &Options| {
            shardc::compile(path, o, None, &mut |_, _| {})
                .unwrap_or_else(|e| panic!("{name} on {:?}: {e}", o.mesh))
                .stored
        };
        let one = Options { observe: false, ..options(&[], false, 2) };
        let base = compile(&config, &one);
        let file = dir.join(format!("{name}.ir"));
        std::fs::write(&file, show(&base, |w| w.phase = Some("source".into()), false))
            .expect("a text");
        let text = std::fs::read_to_string(&file).expect("a text");
        assert!(!text.contains("mesh"), "{name}");
        let on = |mesh: &[(&str, usize)]| Options { observe: false, ..options(mesh, false, 2) };
        let dense: &[Options] = &[
            on(&[]),
            Options { sp: true, ..on(&[("tp", 2)]) },
            Options { cp_mode: CpMode::Ring, ..on(&[("pp", 2), ("cp", 2)]) },
            Options { zero: 3, microbatch: 1, ..on(&[("dp_shard", 2)]) },
            Options { dtype: DType::BF16, mode: Mode::Infer, ..on(&[("tp", 2)]) },
        ];
        for o in dense {
            // The buffers of experts are those of a mesh, and inference has no targets: such a model
            // has a text of its own.
            let own = base.facts.is_some_and(|f| f.experts.is_some()) || o.mode == Mode::Infer;
            let from_folder = compile(&config, o);
            if own {
                std::fs::write(&file, &from_folder.source).expect("a text");
            } else {
                assert_eq!(from_folder.source, text, "{name} on {:?}", o.mesh);
                std::fs::write(&file, &text).expect("a text");
            }
            let again = compile(&file, o);
            for (a, b) in made(&from_folder).iter().zip(made(&again)) {
                assert!(*a == b, "{name} on {:?}", o.mesh);
            }
            assert_eq!(from_folder.plan.settings, again.plan.settings, "{name} on {:?}", o.mesh);
            // The text is that of the text.
            assert_eq!(again.source, from_folder.source);
        }
    }
}

/// Of every weight that ZeRO cuts it is said over which axes, because of which flag, what it saves, where
/// it is gathered and what mirrors that; of every gather, too; and what the other stages would cost.
#[test]
fn zero_is_explained() {
    for zero in [1, 2, 3] {
        let fx = Fixture::open("llama_mha");
        let o = Options { zero, ..options(&[("dp_shard", 2), ("tp", 2)], false, 2) };
        let s = of_options(&fx, &o);
        let plan = &s.plan;
        let q = "model.layers.0.self_attn.q_proj.weight";
        let said = explain(&s, &format!("tensor:{q}"), false).unwrap_or_else(|e| panic!("{e}"));
        let times = plan.settings.microbatches;
        assert!(times > 1);
        let flag = format!("because of --zero {zero}");
        let mut parts =
            vec!["cut over dp_shard (2 ranks)", &flag, "saves ", "gathered over dp_shard"];
        parts.extend(["mirrored by collective:", "a reduce_scatter over dp_shard"]);
        let own = format!("this plan, --zero {zero}: a rank sends ");
        parts.push(&own);
        let others: Vec<String> =
            (0..=3).filter(|s| *s != zero).map(|s| format!("--zero {s}: a rank sends ")).collect();
        parts.extend(others.iter().map(|s| &**s));
        for p in parts {
            assert!(said.contains(p), "--zero {zero}: no `{p}`: {said}");
        }
        // Stages 1 and 2 gather once per step, 3 in forward and in backward of every microbatch.
        let gathers: Vec<&str> = said.lines().filter(|l| l.contains("gathered over")).collect();
        match zero {
            3 => assert!(gathers.len() == 2 && said.contains("once per microbatch"), "{said}"),
            _ => assert!(gathers.len() == 1 && gathers[0].contains("once per step"), "{said}"),
        }
        // What mirrors the gather of this weight is of this weight.
        let mirrors = said.lines().filter_map(|l| l.trim().strip_prefix("mirrored by collective:"));
        for at in mirrors {
            let number = at.split(',').next().and_then(|n| n.parse::<usize>().ok());
            let (fi, ni) = numbered(plan)[number.expect("a number") - 1];
            let f = &plan.module.funcs[fi];
            let of = &f.nodes[ni].outs.iter().map(|&o| f.name(o).to_string()).collect::<Vec<_>>();
            assert!(of.iter().any(|n| n.contains("l0.q_proj")), "{of:?}: {said}");
        }
        let enter = plan.module.func("enter").expect("enter");
        let is = |a: &&shardc_ir::func::Port| a.role.as_ref().is_some_and(|r| &*r.name == q);
        let v = enter.args.iter().find(is).expect("the parameter").value;
        let of_value = format!("@enter {}", enter.name(v));
        let value = explain(&s, &of_value, false).unwrap_or_else(|e| panic!("{e}"));
        assert!(value.contains(&format!("--zero {zero} cuts {q} over dp_shard")), "{value}");
        let mut seen = 0;
        for (i, (fi, ni)) in numbered(plan).into_iter().enumerate() {
            let n = &plan.module.funcs[fi].nodes[ni];
            let c = n.op.collective().expect("a collective");
            let shards = plan.module.mesh.axis("dp_shard").expect("the axis");
            if c.kind() != "all_gather" || !c.atoms().meets(shards) {
                continue;
            }
            let what = format!("collective:{}", i + 1);
            let said = explain(&s, &what, false).unwrap_or_else(|e| panic!("{e}"));
            assert!(said.contains(&flag), "{what}: {said}");
            assert!(!said.contains("number about all ranks"), "{what}: {said}");
            seen += 1;
        }
        assert!(seen > 2, "{seen} gathers");
    }
}

/// A stored plan of a fixture with any options.
fn of_options(fx: &Fixture, o: &Options) -> Stored {
    let text = std::fs::read_to_string(fx.dir.join("config.json")).expect("the fixture");
    let config = serde_json::from_str(&text).expect("JSON");
    shardc::compile_config(&config, o).unwrap_or_else(|e| panic!("{e}")).stored
}

/// Collectives of experts over the ranks that split them are over ep, whatever axes these are of.
#[test]
fn collectives_of_experts_are_over_ep() {
    let fx = Fixture::open("qwen3_moe");
    let mut o = options(&[("dp_shard", 2), ("tp", 2)], false, 2);
    (o.ep, o.etp) = (4, Some(1));
    let s = of_options(&fx, &o);
    let all: Vec<String> = (1..=numbered(&s.plan).len())
        .map(|i| explain(&s, &format!("collective:{i}"), false).unwrap_or_else(|e| panic!("{e}")))
        .collect();
    let moves: Vec<&String> =
        all.iter().filter(|a| a.lines().next().is_some_and(|l| l.contains("all_to_all"))).collect();
    assert!(moves.len() > 2, "{all:?}");
    for a in moves {
        assert!(a.lines().next().is_some_and(|l| l.contains(" over ep in ")), "{a}");
    }
    let report = report::report(&s.plan, &[], 0.0);
    let axes: Vec<&str> = report.per_class[0]
        .collectives
        .iter()
        .filter(|c| c.kind.starts_with("all_to_all"))
        .map(|c| &*c.axis)
        .collect();
    assert!(!axes.is_empty() && axes.iter().all(|a| *a == "ep"), "{axes:?}");
}

/// What stands between fences in a page, block by block, and the text that follows each.
fn blocks(page: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = page.split("\n```").collect();
    let body = |p: &'_ str| p.find('\n').map_or(p.len(), |i| i + 1);
    let inside = (1..parts.len()).step_by(2);
    inside.map(|i| (&parts[i][body(parts[i])..], parts.get(i + 1).copied().unwrap_or(""))).collect()
}

/// README.md and the pages of docs.
fn pages() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = std::fs::read_dir(root.join("docs")).expect("docs");
    let docs = docs.map(|e| e.expect("an entry").path());
    let mut all: Vec<PathBuf> = docs.filter(|p| p.extension().is_some_and(|x| x == "md")).collect();
    all.push(root.join("README.md"));
    all.sort();
    all.into_iter().map(|p| (p.clone(), std::fs::read_to_string(p).expect("a page"))).collect()
}

/// Words of a command or of flags as a shell has them: quotes hold together.
fn shell(text: &str) -> Vec<String> {
    let mut out: Vec<String> = vec![];
    for (i, part) in text.split('\'').enumerate() {
        match (i % 2, out.last_mut()) {
            (1, Some(last)) if text.contains("='") && last.ends_with('=') => last.push_str(part),
            (1, _) => out.push(part.into()),
            _ => out.extend(part.split_whitespace().map(String::from)),
        }
    }
    out
}

/// Every command between fences is one that the command line takes; those that need no device and no
/// data do what they say, one after the other as they stand, on a model of eight layers.
#[test]
fn commands_of_the_docs_run() {
    use clap::Parser;
    let lab = lab::Lab::new("docs-commands");
    let file = Path::new(lab::FIXTURES).join("llama_mha/config.json");
    let text = std::fs::read_to_string(file).expect("the fixture");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for (key, n) in [
        ("num_hidden_layers", 8),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 8),
        ("max_position_embeddings", 512),
    ] {
        config[key] = n.into();
    }
    lab.write("my-model/config.json", config.to_string());
    lab.ok(&["compile", "my-model", "--mesh", "tp=2", "-o", "PLAN"]);
    let mut ran = 0;
    for (path, page) in pages() {
        let inside = blocks(&page);
        let lines = inside.iter().flat_map(|b| b.0.lines()).filter(|l| l.starts_with("shardc "));
        for line in lines {
            let words = shell(line.split(" #").next().expect("a part"));
            let parsed = shardc::commands::Cli::try_parse_from(&words);
            let done = |l: &str| panic!("{}: `{line}`: {l}", path.display());
            if let Err(e) = parsed {
                done(&e.to_string());
            }
            let needs = ["run", "reshard", "launch-script"].contains(&&*words[1]);
            if needs || line.contains("--device cuda") {
                continue;
            }
            let args: Vec<&str> = words[1..].iter().map(|w| &**w).collect();
            let out = lab.shardc(&args);
            if out.status.code() != Some(0) {
                done(&String::from_utf8_lossy(&out.stderr));
            }
            ran += 1;
        }
    }
    assert!(ran >= 8, "{ran} commands");
}

/// Every program of the docs compiles with the flags that the next sentence gives, and the lines in
/// the blocks after it are those of its phases.
#[test]
fn programs_of_the_docs_compile() {
    let lab = lab::Lab::new("docs-programs");
    let mut compiled = 0;
    for (path, page) in pages() {
        let all = blocks(&page);
        for (i, (program, after)) in all.iter().enumerate() {
            // An excerpt says so.
            if !program.starts_with("func @model(") || program.contains("\n  ...\n") {
                continue;
            }
            lab.write("model.ir", program);
            let flags = after.split('`').skip(1).step_by(2).find(|w| w.starts_with("--mesh"));
            let flags = shell(flags.expect("flags in the sentence after a program"));
            let flags: Vec<&str> = flags.iter().map(|w| &**w).collect();
            let mut known = String::new();
            for phase in ["partition", "differentiate"] {
                let dump = ["compile", "model.ir", "--dump-after", phase];
                let out = lab.ok(&[&dump[..], &flags].concat());
                known += &String::from_utf8(out.stdout).expect("text");
            }
            lab.ok(&[&["compile", "model.ir", "-o", "out"][..], &flags].concat());
            known += &std::fs::read_to_string(lab.path("out/programs/all.ir")).expect("programs");
            let plain = |l: &str| l.split("  //").next().unwrap_or(l).trim().to_string();
            let known: BTreeSet<String> = known.lines().map(plain).collect();
            let next = all[i + 1..].iter().take_while(|b| b.0.starts_with("  %"));
            let lines: Vec<String> = next.flat_map(|b| b.0.lines().map(plain)).collect();
            assert!(lines.len() > 3, "{}", path.display());
            for line in lines {
                assert!(known.contains(&line), "{}: no phase has `{line}`", path.display());
            }
            compiled += 1;
        }
    }
    assert_eq!(compiled, 1, "programs of the docs");
}
