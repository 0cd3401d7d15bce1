//! `inspect` and `explain` on compiled fixtures: how many collectives a layer has and what they
//! send, and the answers people read.

mod docs;
mod explained;
use crate::fixture::*;
use shardc::commands::explain::explain;
use shardc::commands::inspect::{Inspect, inspect};
use shardc::commands::pages::PAGES;
use shardc::explain::{self, Why};
use shardc::inspect::{LayerCollectives, layer_collectives, numbered};
use shardc::report;
use shardc::stored::Stored;
use shardc_ir::func::Module;
use shardc_ir::plan::Mode;
use shardc_ir::schedule::write_csv;
use shardc_ir::text;
use shardc_ir::types::DType;
use shardc_passes::options::{CpMode, Options, TpMode};
use shardc_testing::taken;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A fixture, compiled without dumps.
fn stored(name: &str, mesh: &[(&str, usize)], sp: bool, microbatch: usize) -> Stored {
    let o = Options { observe: false, ..options(mesh, sp, microbatch) };
    let config = Fixture::open(name).dir.join("config.json");
    shardc::compile(&config, &o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")).stored
}

fn answer(s: &Stored, what: &str) -> String {
    answers(s, [what.to_string()]).remove(0)
}

/// Answers to many questions, for which the plan is compiled again once.
fn answers(s: &Stored, all: impl IntoIterator<Item = String>) -> Vec<String> {
    let why = Why::of(s).unwrap_or_else(|e| panic!("{e}"));
    let one = |what: String| explain::answer(&why, &what).unwrap_or_else(|e| panic!("{e}")).text();
    all.into_iter().map(one).collect()
}

/// The answers about all collectives.
fn of_collectives(s: &Stored) -> Vec<String> {
    answers(s, (1..=numbered(&s.plan).len()).map(|n| format!("collective:{n}")))
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
    let done = shardc::compile(&config, &o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
    let s = done.stored;
    let layer = counted(&s).layer(0).cloned().expect("a layer");
    let counts = ["forward", "backward"].map(|phase| layer.count(phase, "permute"));
    // Keys and values apart: 3 blocks, and 3 blocks and 4 of their gradients.
    assert_eq!(counts, [2 * 3, 2 * (3 + 4)]);
    let text = answer(&s, "collective:2");
    for part in [
        "permute over cp in @forward, model.layers.0.self_attn",
        "ring: the next block comes while this one is used",
        "made so by `%l0.k_own = to_varying[cp; dim=1] %l0.k.2",
        "context parallelism cuts sequences: %l0.k.2",
    ] {
        assert!(text.contains(part), "no {part}: {text}");
    }
    let again = of_collectives(&s);
    let needs = "forward saves a rank's own block, backward needs all of them";
    assert_eq!(again.iter().filter(|t| t.contains(needs)).count(), 3 * 2 * 3);
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
    inspect(s, &what, json).unwrap_or_else(|e| panic!("{e}")).to_string()
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
    assert!(all.contains(&"propagate") && !all.contains(&"ranked"), "{all:?}");
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
    insta::assert_snapshot!("ranks", show(&s, |w| w.ranks = Some(String::new()), false));
    let json: serde_json::Value =
        serde_json::from_str(&show(&s, |w| w.summary = true, true)).expect("json");
    let parts = json["memory"]["at_peak"].as_array().expect("classes");
    let sum: u64 = parts.iter().filter_map(|p| p["bytes"].as_u64()).sum();
    assert_eq!(Some(sum), json["memory"]["peak_bytes"].as_u64());
    let layers = &json["collectives"]["sections"][1];
    assert_eq!((&layers["where"], &layers["last"]), (&"layers".into(), &2.into()));
    let ranks: serde_json::Value =
        serde_json::from_str(&show(&s, |w| w.ranks = Some(String::new()), true)).expect("json");
    assert_eq!(group(&ranks, 3, "dp_replicate"), serde_json::json!([1, 3]));
}

/// The ranks of a rank's group over an axis, of a table of all ranks.
fn group(ranks: &serde_json::Value, rank: usize, axis: &str) -> serde_json::Value {
    let number = ranks["shown"][rank]["groups"][axis].as_u64().expect("a group") as usize;
    ranks["groups"][axis][number].clone()
}

#[test]
fn the_groups_of_a_grid_are_shown() {
    let o = |mode| Options { observe: false, tp_mode: mode, ..options(&[("tp", 8)], false, 8) };
    let config = Fixture::open("llama_mha").dir.join("config.json");
    for (mode, parts) in [
        (TpMode::TwoAndHalfD { depth: 2 }, ["tp:(1)2", "tp:(2)2", "tp:(4)2"]),
        (TpMode::ThreeD, ["tp:(1)2", "tp:(2)2", "tp:(4)2"]),
    ] {
        let done = shardc::compile(&config, &o(mode), &mut |_, _| {});
        let s = done.unwrap_or_else(|e| panic!("{e}")).stored;
        let ranks: serde_json::Value =
            serde_json::from_str(&show(&s, |w| w.ranks = Some(String::new()), true)).expect("json");
        // Rank 5 is x + q (y + q z) with x = 1, y = 0, z = 1.
        let groups = parts.map(|p| group(&ranks, 5, p));
        let want = [[1, 5], [5, 7], [4, 5]].map(|g| serde_json::json!(g));
        assert_eq!(groups, want, "{mode}");
        let text = show(&s, |w| w.ranks = Some(String::new()), false);
        assert!(parts.iter().all(|p| text.contains(&format!("group over {p}"))), "{text}");
        // Every collective can be asked why it is there, and how to be rid of it.
        let all = report::collectives(&s.plan, &s.plan.classes[0]).len();
        for said in answers(&s, (1..=all).map(|n| format!("collective:{n}"))) {
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
    let s = shardc::compile(&config, &o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")).stored;
    let ranks: serde_json::Value =
        serde_json::from_str(&show(&s, |w| w.ranks = Some(String::new()), true)).expect("json");
    let groups = ["etp", "ep", "edp"].map(|p| group(&ranks, 5, p));
    assert_eq!(groups, [[4, 5], [5, 7], [1, 5]].map(|g| serde_json::json!(g)));
    let text = show(&s, |w| w.ranks = Some(String::new()), false);
    assert!(text.contains("group over ep") && text.contains("group over edp"), "{text}");
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
    for (f, name) in ALL.iter().chain(EXPERTS).enumerate() {
        let config = Fixture::open(name).dir.join("config.json");
        let compile = |path: &Path, o: &Options| {
            shardc::compile(path, o, &mut |_, _| {})
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
        for (_, o) in dense.iter().enumerate().filter(|(i, _)| taken(f + i, 2)) {
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
