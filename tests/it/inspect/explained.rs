//! `explain`: the answers people read.

use super::*;

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
        let found = |a: String| Some(a.split_once("\nmirror ")?.1.lines().next()?.to_string());
        of_collectives(&s)
            .into_iter()
            .filter_map(found)
            .filter(|m| m.contains("gradient"))
            .collect::<Vec<_>>()
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
        for a in of_collectives(&s) {
            assert!(a.contains("\nwhy ") && a.contains("\nremove "), "{a}");
        }
        for a in answers(&s, s.plan.weights.iter().map(|w| format!("tensor:{}", w.param))) {
            assert!(a.contains("\ngradient ") && a.contains("exp_avg_sq"), "{a}");
        }
        // Every split of a few values of each function is led back to somebody who asked for it.
        for f in &s.plan.module.funcs {
            let made: Vec<_> = f.nodes.iter().map(|n| n.outs[0]).collect();
            let some: Vec<_> = made.into_iter().step_by(1 + f.nodes.len() / 12).collect();
            let asked = some.iter().map(|&v| format!("@{} {}", f.name, f.name(v)));
            for (v, a) in some.iter().copied().zip(answers(&s, asked)) {
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
    let s = shardc::compile(&config, &o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")).stored;
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
        ("@nowhere %l0.q", "unknown-value", "@step_prologue|@forward|@backward|@optimizer_step"),
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
        let enter = plan.module.func("step_prologue").expect("enter");
        let is = |a: &&shardc_ir::func::Port| a.role.as_ref().is_some_and(|r| &*r.name == q);
        let v = enter.args.iter().find(is).expect("the parameter").value;
        let of_value = format!("@step_prologue {}", enter.name(v));
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
    let report = report::report(&s.plan, &[], None);
    let axes: Vec<&str> = report.per_class[0]
        .collectives
        .iter()
        .filter(|c| c.kind.starts_with("all_to_all"))
        .map(|c| &*c.axis)
        .collect();
    assert!(!axes.is_empty() && axes.iter().all(|a| *a == "ep"), "{axes:?}");
}

/// Hops of a ring are told apart, experts' exchanges are of ep, and what is sent in one call is said with its bytes;
/// the name of a weight is enough.
#[test]
fn collectives_that_are_much_alike_are_told_apart() {
    let cp = Options { cp_mode: CpMode::Ring, ..options(&[("cp", 4)], false, 4) };
    let ring = compiled("llama_gqa", &Options { observe: false, ..cp });
    let mut twins = vec![];
    for a in of_collectives(&ring) {
        if let Some((_, twin)) = a.split_once("it is collective:") {
            twins.push(twin.split_once(' ').expect("words").0.to_string());
        }
        let same =
            a.lines().filter(|l| l.starts_with("same as")).map(|l| l.matches(" of layer ").count());
        let layers = ring.facts.expect("a family").layers;
        assert!(same.sum::<usize>() < layers, "{a}");
    }
    let all = twins.len();
    twins.sort();
    twins.dedup();
    assert!(all > 3 && twins.len() == all, "{all} mirrors of {} collectives", twins.len());

    let moe = Options { ep: 2, ..options(&[("dp_shard", 2)], false, 4) };
    let moe = compiled("mixtral", &Options { observe: false, ..moe });
    let of_ep = of_collectives(&moe).into_iter().filter(|a| a.contains(" over ep in"));
    let of_ep: Vec<String> = of_ep.collect();
    let says = |a: &String| a.contains("with ep=1 each rank holds all experts, 2 times");
    assert!(!of_ep.is_empty() && of_ep.iter().all(says), "{of_ep:#?}");

    let zero = Options {
        zero: 3,
        transport: shardc_passes::options::Transport::Nccl,
        ..options(&[("dp_shard", 2)], false, 4)
    };
    let zero = compiled("llama_gqa", &Options { observe: false, ..zero });
    let answers = of_collectives(&zero);
    let together = answers.iter().filter(|a| a.contains("sent in 1 call: collective:")).count();
    assert!(together > 10, "{together}");

    let weight = "model.layers.1.self_attn.k_proj.weight";
    assert_eq!(answer(&zero, weight), answer(&zero, &format!("tensor:{weight}")));
}

fn compiled(name: &str, o: &Options) -> Stored {
    let config = Fixture::open(name).dir.join("config.json");
    shardc::compile(&config, o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")).stored
}

/// What needs no plan is said without one; transfers, memory and folded names are explained.
#[test]
fn rules_transfers_memory_and_folded_names_are_explained() {
    let lab = crate::lab::Lab::new("explained");
    let said = |args: &[&str]| String::from_utf8_lossy(&lab.ok(args).stdout).into_owned();
    assert!(said(&["explain", "rule:mesh"]).starts_with("# mesh"));
    let wrong = lab.refuses(&["explain", "some.plan"], 2, "flag");
    assert!(wrong.contains("shardc explain PLAN collective:1"), "{wrong}");
    lab.refuses(&["explain", "rule:nothing"], 2, "unknown-rule");
    let staged = stored("llama_deep", &[("pp", 2)], false, 1);
    let sends = answer(&staged, "transfers");
    for words in ["from pipeline rank 0 to 1", "from pipeline rank 1 to 0", "8 times per step"] {
        assert!(sends.contains(words), "{words}: {sends}");
    }
    let none = stored("llama_gqa", &[("tp", 2)], false, 2);
    assert_eq!(explain(&none, "transfers", false).expect_err("no pp").code, "unknown-value");
    // 1F1B of 8 microbatches on 2 ranks: a ninth of the time is idle, an eighth of the work.
    let schedule = answer(&staged, "schedule");
    for words in ["11.11 % of the time", "12.50 % of their work", "(p-1)/m = 12.50 %", "4 layers"] {
        assert!(schedule.contains(words), "{words}: {schedule}");
    }
    assert!(answer(&none, "schedule").contains("no pipeline"));
    let memory = answer(&staged, "memory");
    for words in ["class 1: ", "backward of stage 1, microbatch", "layers 4-7, each: "] {
        assert!(memory.contains(words), "{words}: {memory}");
    }
    let folded = answer(&none, "%l{i}.q");
    assert!(folded.starts_with("%l0.q (layer 0 of 3, the same in all) in @forward"), "{folded}");
}

/// What is said of a collective and a value is also there as data, and says the same.
#[test]
fn facts_are_data() {
    let s = stored("llama_gqa", &[("dp_shard", 2), ("tp", 2)], false, 2);
    let facts = |what: &str| {
        let text = explain(&s, what, true).unwrap_or_else(|e| panic!("{what}: {e}"));
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(json["$schema"], "shardc/explain/1");
        json["facts"].clone()
    };
    let all = numbered(&s.plan);
    for (i, &(fi, ni)) in all.iter().enumerate() {
        let f = facts(&format!("collective:{}", i + 1));
        let (func, node) = (&s.plan.module.funcs[fi], &s.plan.module.funcs[fi].nodes[ni]);
        assert_eq!(f["function"], func.name.to_string());
        assert_eq!(f["node"]["op"], node.op.mnemonic());
        let groups = f["groups"].as_u64().expect("groups") * f["ranks"].as_u64().expect("ranks");
        assert_eq!(groups, 4);
        assert_eq!(f["first_group"].as_array().expect("a group").len() as u64, f["ranks"]);
        let sent = f["sent_bytes"].as_f64().expect("bytes") * f["calls"].as_f64().expect("calls");
        assert_eq!(f["step_bytes"].as_f64(), Some(sent));
    }
    let q = facts("%l1.q");
    assert_eq!(q["made_by"]["op"], "dot");
    let (whole, own) = (&q["type"]["shape"], &q["type"]["local_shape"]);
    assert_ne!(whole, own, "{q}");
    let w = facts("tensor:lm_head.weight");
    let state = w["optimizer"].as_object().expect("a state");
    assert!(state.contains_key("exp_avg") && state.contains_key("exp_avg_sq"), "{w}");
    // A gradient that no operand splits is split as its value is.
    let logits = answer(&s, "@backward %d_z");
    assert!(logits.contains("whose gradient it is"), "{logits}");
}

/// Each kind of memory is at its fullest at least what it is at the peak and through the step; what layers save is what
/// enters them, if all else is made again.
#[test]
fn memory_is_told_moment_by_moment() {
    use shardc::report::moments::{Saved, most, saved};
    use shardc_passes::autodiff::recompute::Recompute;
    for (name, mesh, microbatch) in [
        ("llama_gqa", &[("tp", 2)][..], 2),
        ("llama_deep", &[("pp", 2), ("tp", 2)], 1),
        ("mixtral", &[("dp_shard", 2)], 2),
    ] {
        let s = stored(name, mesh, false, microbatch);
        for c in &s.plan.classes {
            let all = most(&s.plan, c);
            for (class, n) in c.memory.at_peak.iter().chain(&c.memory.whole) {
                let own = all.iter().find(|m| m.class == *class).map_or(0, |m| m.bytes);
                assert!(own >= *n && own <= c.memory.peak_bytes, "{name} {class:?}: {own} {n}");
            }
        }
    }
    let o = Options { observe: false, recompute: Recompute::Full, ..options(&[], false, 2) };
    let config = Fixture::open("llama_gqa").dir.join("config.json");
    let s = shardc::compile(&config, &o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")).stored;
    let bytes = 2 * SEQ * HIDDEN * 4;
    assert_eq!(saved(&s.plan, &s.plan.classes[0]), [Saved { first: 0, last: 2, bytes }]);
}
