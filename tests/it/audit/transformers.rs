//! Plans of transformers: read with a model, audited by types, and linted beside transformers itself on two ranks.

use crate::lab::{FIXTURES, Lab};
use serde_json::{Value as Json, json};
use shardc_testing::{Tool, skip};
use std::path::Path;
use std::process::Command;

/// The plan that transformers 5.24 has for a config of Qwen3, with its embeddings and its head.
fn qwen3() -> Json {
    json!({
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "model.layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output"
    })
}

/// What an audit of a plan says as JSON.
fn audit(lab: &Lab, plan: &Json, model: &str) -> Json {
    lab.write("plan.json", plan.to_string());
    let model = format!("{FIXTURES}/{model}");
    let args = ["audit", "transformers", "plan.json", "--model", &model, "--format", "json"];
    let out = lab.shardc(&args);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{plan}: {e}: {said}"))
}

/// Kinds, axes and last names of findings.
fn found(json: &Json) -> Vec<String> {
    let name = |p: &Json| p.as_str().expect("a name").rsplit('.').nth(1).unwrap_or("").to_string();
    let one = |f: &Json| {
        let names = f["parameters"].as_array().expect("names").iter().map(name);
        let names = names.collect::<Vec<_>>().join(",");
        format!("{} {} {names}", f["kind"], f["axes"]).replace('"', "")
    };
    json["findings"].as_array().expect("a list").iter().map(one).collect()
}

fn row<'a>(json: &'a Json, name: &str) -> &'a Json {
    let rows = json["parameters"].as_array().expect("rows");
    rows.iter().find(|r| r["name"].as_str().expect("a name").contains(name)).expect("a row")
}

#[test]
fn plans_say_what_a_rank_holds_and_what_is_summed() {
    let lab = Lab::new("audit-plan");
    let plan = json!({ "tp_size": 2, "tp_plan": qwen3() });
    let clean = audit(&lab, &plan, "qwen3");
    assert_eq!(found(&clean), [""; 0]);
    let norm = row(&clean, "q_norm");
    assert_eq!((&norm["sums"], &norm["rule_sums"]), (&json!("tp"), &json!("tp")));
    let o = row(&clean, "o_proj.weight");
    assert_eq!(o["local"][1].as_u64().map(|n| n * 2), o["sizes"][1].as_u64());
    let embed = row(&clean, "embed_tokens");
    assert_eq!(embed["local"][0].as_u64().map(|n| n * 2), embed["sizes"][0].as_u64());
    // What a plan does not name is whole on every rank, as transformers has it.
    let mut less = qwen3();
    for name in ["gate_proj", "up_proj", "down_proj"] {
        less.as_object_mut().expect("a plan").remove(&format!("model.layers.*.mlp.{name}"));
    }
    let whole = audit(&lab, &json!({ "tp_size": 2, "tp_plan": less }), "qwen3");
    assert_eq!(found(&whole), [""; 0]);
    assert_eq!(row(&whole, "mlp.up_proj")["split"], "");
    // Norms of heads that no rule names are parts of a gradient.
    let mut less = qwen3();
    less.as_object_mut().expect("a plan").remove("model.layers.*.self_attn.q_norm");
    let missing = audit(&lab, &json!({ "tp_size": 2, "tp_plan": less }), "qwen3");
    assert_eq!(found(&missing), ["sum-missing tp q_norm"]);
    // Hooks sum again what earlier microbatches have left: 1.5 times of two, as two ranks show.
    let plan = json!({ "tp_size": 2, "tp_plan": qwen3(), "gradient_accumulation_steps": 2 });
    let again = audit(&lab, &plan, "qwen3");
    assert_eq!(found(&again), ["sum-twice tp q_norm,k_norm"]);
    let said = again["findings"][0].to_string();
    assert!(said.contains("1.500 times") && said.contains("tensor_parallel.py:376"), "{said}");
    assert!(said.contains("v5.24.0"), "{said}");
    let plan = json!({ "tp_size": 2, "fsdp_size": 2, "tp_plan": qwen3() });
    let both = audit(&lab, &plan, "qwen3");
    assert_eq!((found(&both), &row(&both, "q_norm")["sums"]), (vec![], &json!("dp tp")));
}

#[test]
fn plans_of_experts_are_by_width_or_by_expert() {
    let lab = Lab::new("audit-plan-experts");
    let mut plan = qwen3();
    let own = plan.as_object_mut().expect("a plan");
    own.insert("model.layers.*.mlp.experts.gate_up_proj".into(), "packed_colwise".into());
    own.insert("model.layers.*.mlp.experts.down_proj".into(), "rowwise".into());
    own.insert("model.layers.*.mlp.experts".into(), "moe_tp_experts".into());
    let experts = json!({
        "model.layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "model.layers.*.mlp.experts.down_proj": "grouped_gemm",
        "model.layers.*.mlp.experts": "ep_dispatch_experts"
    });
    let by_width = audit(&lab, &json!({ "tp_size": 2, "tp_plan": plan }), "qwen3_moe");
    assert_eq!(found(&by_width), [""; 0]);
    assert_eq!((&by_width["layout"]["etp"], &by_width["layout"]["ep"]), (&json!(2.0), &json!(1.0)));
    let sizes =
        json!({ "tp_size": 2, "fsdp_size": 2, "ep_size": 2, "tp_plan": plan, "ep_plan": experts });
    let by_expert = audit(&lab, &sizes, "qwen3_moe");
    assert_eq!(found(&by_expert), [""; 0]);
    assert_eq!(
        (&by_expert["layout"]["etp"], &by_expert["layout"]["edp"]),
        (&json!(1.0), &json!(2.0))
    );
    // A plan without rules for experts leaves them whole, on tokens that all ranks have.
    let whole = audit(&lab, &json!({ "tp_size": 2, "tp_plan": qwen3() }), "qwen3_moe");
    assert_eq!(found(&whole), [""; 0]);
}

#[test]
fn plans_that_transformers_refuses_are_refused_by_name() {
    let lab = Lab::new("audit-plan-refused");
    let plan = qwen3();
    for (config, word) in [
        (
            json!({ "tp_size": 2, "tp_plan": { "lm_head": "columns" } }),
            "unsupported `tp_plan` style",
        ),
        (json!({ "tp_size": 2 }), "tp_size=2 needs a tp_plan"),
        (json!({ "tp_size": 2, "tp_plan": "auto" }), "names of modules with a word each is wanted"),
        (json!({ "tp_size": 2, "tp_plan": { "lm_head": 3 } }), "names of modules with a word each"),
        (json!({ "tp_size": -2, "tp_plan": plan }), "a whole number above 0 is wanted"),
        (
            json!({ "tp_size": 2, "ep_size": 3, "tp_plan": plan, "ep_plan": plan }),
            "is a multiple of tp_size",
        ),
        (json!({ "tp_size": 2, "pp_size": 2, "tp_plan": plan }), "pipelines are for inference"),
        (json!({ "tp_size": 3, "tp_plan": plan }), "is divisible by tp_size (3)"),
        (
            json!({ "tp_size": 2, "ep_size": 2, "tp_plan": plan, "ep_plan": { "model.layers.*.mlp.experts": "moe_tp_experts" } }),
            "is a style of tp_plan",
        ),
        (json!("plan"), "neither JSON nor TOML"),
        (json!({ "tp_plan": plan }), "the number of ranks is not given"),
    ] {
        lab.write("plan.json", config.to_string());
        let model = format!("{FIXTURES}/qwen3");
        let said =
            lab.refuses(&["audit", "transformers", "plan.json", "--model", &model], 2, "audit");
        let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(word), "{config}: no {word}: {said}");
    }
    // A name that is none is an error in a DistributedConfig, and a warning in the plan that a model has.
    let mut other =
        json!({ "tp_size": 2, "tp_plan": { "model.layers.*.mlp.fc1": "colwise" }, "mine": 3 });
    lab.write("plan.json", other.to_string());
    let model = format!("{FIXTURES}/qwen3");
    let said = lab.refuses(&["audit", "transformers", "plan.json", "--model", &model], 2, "audit");
    assert!(said.contains("mlp.fc1: colwise: names nothing in this model"), "{said}");
    let text = std::fs::read_to_string(format!("{model}/config.json")).expect("a fixture");
    other["config"] = serde_json::from_str(&text).expect("JSON");
    let said = audit(&lab, &other, "qwen3")["not_modelled"].to_string();
    for word in ["mine = 3: not modelled", "mlp.fc1: colwise: names nothing in this model"] {
        assert!(said.contains(word), "no {word}: {said}");
    }
}

#[test]
fn a_config_may_have_its_plan_and_an_export_is_one() {
    let lab = Lab::new("audit-plan-config");
    let text = std::fs::read_to_string(format!("{FIXTURES}/qwen3/config.json")).expect("a fixture");
    let mut config: Json = serde_json::from_str(&text).expect("JSON");
    let plan = qwen3();
    let base = plan.as_object().expect("a plan").iter().filter_map(|(name, word)| {
        Some((name.strip_prefix("model.layers")?.to_string(), word.clone()))
    });
    let base: serde_json::Map<String, Json> =
        base.map(|(name, word)| (format!("layers{name}"), word)).collect();
    config["base_model_tp_plan"] = base.into();
    lab.write("config.json", config.to_string());
    let args = ["audit", "transformers", "config.json", "--gpus", "2", "--format", "json"];
    let json: Json = serde_json::from_slice(&lab.ok(&args).stdout).expect("JSON");
    assert_eq!(row(&json, "embed_tokens")["split"], "tp");
    assert_eq!(found(&json), [""; 0]);
    // A plan of a DistributedConfig lies over that of the model.
    config["tp_plan"] = json!({ "model.layers.*.self_attn.q_norm": "replicate" });
    lab.write("over.json", config.to_string());
    let args = ["audit", "transformers", "over.json", "--gpus", "2", "--format", "json"];
    let over: Json = serde_json::from_slice(&lab.shardc(&args).stdout).expect("JSON");
    assert_eq!(row(&over, "q_proj")["split"], "tp");
    assert_eq!(found(&over), ["sum-missing tp q_norm"]);
    // What the export for transformers writes is read, and is what types say.
    let model = format!("{FIXTURES}/qwen3");
    let plan = ["compile", &model, "--mesh", "tp=2", "--seq", "16", "-o", "plan"];
    lab.ok(&plan);
    lab.ok(&["export", "plan", "--to", "hf-tp-plan", "-o", "hf"]);
    let args = ["audit", "transformers", "hf/tp_plan.json", "--model", &model];
    let said = String::from_utf8(lab.ok(&args).stdout).expect("text");
    assert!(said.contains("no finding"), "{said}");
}

/// Words of plans, in the order of the outcomes below.
const WORDS: [&str; 10] = [
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "replicate",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
    "packed_colwise",
    "moe_tp_experts",
    "mla_kv_a_proj",
];

/// What transformers 5.24 does on two ranks of gloo if one rule of qwen3's plan has each other word: it ends with an
/// error, gives other logits or other gradients, or all is as on one rank (`.` is the plan's own word).
const OUTCOMES: [(&str, &str); 12] = [
    ("lm_head", "ee.ssgsele"),
    ("model.embed_tokens", "eeeesg.ele"),
    ("model.layers.*.self_attn.q_proj", ".eeeeeelee"),
    ("model.layers.*.self_attn.k_proj", ".eeeeeelee"),
    ("model.layers.*.self_attn.v_proj", ".eeeeeelee"),
    ("model.layers.*.self_attn.q_norm", "eeeeg.lele"),
    ("model.layers.*.self_attn.k_norm", "eeeeg.lele"),
    ("model.layers.*.self_attn.o_proj", "e.eeeeeeee"),
    ("model.layers.*.mlp.gate_proj", ".eeeeeelee"),
    ("model.layers.*.mlp.up_proj", ".eeeeeelee"),
    ("model.layers.*.mlp.down_proj", "e.eeeeeeee"),
    ("model.layers.*.post_attention_layernorm", "eeeesgsele"),
];

/// Python writes a bound that is none as a word that JSON has not.
#[test]
fn configs_as_python_prints_them_are_read() {
    let lab = Lab::new("audit-python");
    let config = std::fs::read_to_string(format!("{FIXTURES}/bamba/config.json")).expect("one");
    let mut config: Json = serde_json::from_str(&config).expect("JSON");
    config["time_step_limit"] = json!([0.0, "UNBOUND"]);
    config["base_model_tp_plan"] = json!({ "embed_tokens": "embedding_rowwise" });
    let audited = |word: &str| {
        lab.write("config.json", config.to_string().replace("\"UNBOUND\"", word));
        lab.shardc(&["audit", "transformers", "config.json", "--gpus", "2"])
    };
    let out = audited("Infinity");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{said}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("no finding"));
    assert_ne!(audited("NaN").status.code(), Some(0));
}

#[test]
fn a_plan_with_another_word_is_refused_or_found_where_two_ranks_differ() {
    let lab = Lab::new("audit-plan-words");
    let model = format!("{FIXTURES}/qwen3");
    let cases = OUTCOMES.iter().enumerate().flat_map(|(i, (rule, outcomes))| {
        let of = outcomes.chars().zip(WORDS).enumerate();
        of.map(move |(j, (outcome, word))| (i + j, *rule, word, outcome))
    });
    for (_, rule, word, outcome) in cases.filter(|c| c.3 != '.' && shardc_testing::taken(c.0, 4)) {
        let mut plan = qwen3();
        plan[rule] = word.into();
        lab.write("plan.json", json!({ "tp_size": 2, "tp_plan": plan }).to_string());
        let out = lab.shardc(&["audit", "transformers", "plan.json", "--model", &model]);
        let want = match outcome {
            's' => 0,
            'g' => 1,
            _fails => 2,
        };
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(want), "{rule}: {word}: {said}");
    }
}

#[test]
fn what_a_rank_has_is_set_beside_what_a_style_takes() {
    let lab = Lab::new("audit-plan-sizes");
    let refused = |model: &str, plan: &Json, words: &[&str]| {
        lab.write("plan.json", plan.to_string());
        let model = format!("{FIXTURES}/{model}");
        let said =
            lab.refuses(&["audit", "transformers", "plan.json", "--model", &model], 2, "audit");
        let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
        words.iter().for_each(|w| assert!(flat.contains(w), "no {w}: {said}"));
    };
    let with = |changes: &[(&str, &str)]| {
        let mut plan = qwen3();
        changes.iter().for_each(|(rule, word)| plan[*rule] = (*word).into());
        json!({ "tp_size": 2, "tp_plan": plan })
    };
    let o = "model.layers.*.self_attn.o_proj";
    let takes =
        "o_proj: colwise: it takes 64 columns, and what model.layers.*.self_attn gives has 32";
    refused("qwen3", &with(&[(o, "colwise")]), &[takes]);
    let q = ("model.layers.*.self_attn.q_proj", "colwise_gather_output");
    refused(
        "qwen3",
        &with(&[q]),
        &[
            "self_attn: a rank has 1 of 2 of model.layers.*.self_attn.k_norm, and all 2 of model.layers.*.self_attn.q_norm",
        ],
    );
    refused("qwen3", &with(&[("lm_head", "colwise")]), &["loss: all 70 of lm_head are"]);
    // Columns of several matrices in one tensor are no columns of each.
    let phi3 = |word: &str| {
        json!({ "tp_size": 2, "tp_plan": {
            "model.layers.*.self_attn.qkv_proj": word,
            "model.layers.*.self_attn.o_proj": if word == "colwise" { "rowwise" } else { "rowwise_split_input" } } })
    };
    refused(
        "phi3",
        &phi3("colwise"),
        &["qkv_proj: colwise: 32 of 64 columns are one of the matrices"],
    );
    assert_eq!(found(&audit(&lab, &phi3("colwise_gather_output"), "phi3")), [""; 0]);
    // Experts: the styles of their module and of their tensors.
    let experts = |module: &str, up: &str, down: &str| {
        let mut plan = qwen3();
        plan["model.layers.*.mlp.experts"] = module.into();
        plan["model.layers.*.mlp.experts.gate_up_proj"] = up.into();
        plan["model.layers.*.mlp.experts.down_proj"] = down.into();
        json!({ "tp_size": 2, "tp_plan": plan })
    };
    let sum = "moe_tp_experts";
    let twice = "it adds what 2 ranks give, and each gives all of it";
    refused("qwen3_moe", &experts(sum, "replicate", "replicate"), &[twice]);
    refused("qwen3_moe", &experts(sum, "colwise", "rowwise"), &["two matrices are in the tensor"]);
    let part = "a rank has 8 of 16";
    refused("qwen3_moe", &experts(sum, "packed_colwise", "replicate"), &[part]);
    refused("qwen3_moe", &experts("replicate", "packed_colwise", "rowwise"), &["are summed"]);
    let mla = json!({ "tp_size": 2, "tp_plan": { "lm_head": "mla_kv_a_proj" } });
    refused("qwen3", &mla, &["needs qk_rope_head_dim"]);
    let other = json!({ "tp_size": 2, "tp_plan": { "model.norm": "sequence_parallel" } });
    refused("qwen3", &other, &["model.norm: sequence_parallel: not audited"]);
}

#[test]
fn parts_of_gradients_follow_from_what_a_rank_has() {
    let lab = Lab::new("audit-plan-parts");
    // Whole layers of another kind, between gathers and splits, have whole gradients.
    let mut plan = json!({
        "model.layers.*.linear_attn.in_proj_qkvz": "colwise_gather_output",
        "model.layers.*.linear_attn.in_proj_ba": "colwise_gather_output",
        "model.layers.*.linear_attn.out_proj": "rowwise_split_input"
    });
    let whole = json!({ "tp_size": 2, "tp_plan": plan });
    assert_eq!(found(&audit(&lab, &whole, "qwen3_next")), [""; 0]);
    // The rotary part of keys goes to the heads of a rank: without a style, all in front of it has parts, too.
    plan = json!({
        "model.layers.*.self_attn.q_b_proj": "colwise",
        "model.layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "model.layers.*.self_attn.kv_b_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise"
    });
    let of =
        |plan: &Json| found(&audit(&lab, &json!({ "tp_size": 2, "tp_plan": plan }), "deepseek_v3"));
    assert_eq!(of(&plan), [""; 0]);
    plan["model.layers.*.self_attn.kv_a_proj_with_mqa"] = "replicate".into();
    let all = of(&plan);
    assert!(all.iter().all(|f| f.starts_with("sum-missing tp")), "{all:?}");
    for name in ["kv_a_proj_with_mqa", "input_layernorm", "embed_tokens"] {
        assert!(all[0].contains(name), "no {name}: {all:?}");
    }
    // Biases of experts are those of a rank's own.
    let ep = json!({
        "model.layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "model.layers.*.mlp.experts.gate_up_proj_bias": "grouped_gemm",
        "model.layers.*.mlp.experts.down_proj": "grouped_gemm",
        "model.layers.*.mlp.experts.down_proj_bias": "grouped_gemm",
        "model.layers.*.mlp.experts": "ep_dispatch_experts"
    });
    let tp = json!({ "model.embed_tokens": "embedding_rowwise" });
    let both = json!({ "tp_size": 2, "ep_size": 2, "tp_plan": tp, "ep_plan": ep });
    assert_eq!(found(&audit(&lab, &both, "gpt_oss")), [""; 0]);
}

/// Models of the lint, of which a run takes one.
const SAMPLE: [(&str, &str); 4] = [
    ("llama", "llama | as on one rank | the same"),
    ("qwen3", "self_attn.q_norm.weight: gradient"),
    ("glm4_moe+qk", "confirmed: sum: model.layers.*.self_attn.q_norm.weight"),
    ("apertus", "confirmed: sum: model.layers.*.mlp.act_fn.alpha_p"),
];

#[test]
fn the_lint_of_plans_is_confirmed_by_two_ranks() {
    let python = std::env::var("SHARDC_PYTHON").unwrap_or("python3".into());
    let found = "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('transformers')))";
    let has = Command::new(&python).args(["-c", found]).output();
    if !has.is_ok_and(|o| o.status.success()) {
        return skip(Tool::Torch, "the lint of plans of transformers");
    }
    let lab = Lab::new("audit-plans");
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/audit/plans.py");
    // What is right, and in turn one of the others.
    let [right, other] =
        [0, 1 + shardc_testing::rotation() % (SAMPLE.len() - 1)].map(|i| SAMPLE[i]);
    let args = ["all", "out", right.0, other.0];
    let out = Command::new(&python).arg(&program).args(args).current_dir(&lab.0).output();
    let out = out.expect("python starts");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    for word in [right.1, other.1] {
        assert!(said.contains(word) && !said.contains("dropped"), "no {word}: {said}");
    }
}
