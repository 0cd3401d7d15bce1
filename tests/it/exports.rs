//! `shardc export`: what is written is the plan's, read by the targets' own parsers where they are installed; what a
//! target lacks is refused by name.

mod fields;
mod megatron;
mod packages;

use crate::lab::Lab;
use serde_json::Value as Json;
use shardc::plan_dir;
use shardc_testing::{Tool, skip};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

const TARGETS: [&str; 8] =
    ["megatron", "torchtitan", "deepspeed", "nanotron", "hf-tp-plan", "dtensor", "chakra", "torch"];

/// Fixture, flags, and by target a word of what it lacks; all others take the plan.
type Case = (&'static str, &'static [&'static str], &'static [(&'static str, &'static str)]);

const SHARDED: &str = "shards weights, gradients and states together";
const CASES: [Case; 9] = [
    ("qwen3", &["--mesh", "dp=2,tp=2", "--weight-decay", "0"], &[("nanotron", "the family qwen3")]),
    (
        "qwen3",
        &["--mesh", "dp=2,tp=2", "--zero", "3", "--decay", "matrices"],
        &[("nanotron", "ZeRO-2 and 3"), ("deepspeed", "ZeRO-3")],
    ),
    (
        "llama_deep",
        &["--mesh", "pp=2,tp=2", "--microbatch", "1", "--schedule", "zb-h1"],
        &[
            ("megatron", "zb-h1"),
            ("nanotron", "zb-h1"),
            ("deepspeed", "stages"),
            ("hf-tp-plan", "stages"),
        ],
    ),
    (
        "llama_deep",
        &[
            "--mesh",
            "pp=4",
            "--microbatch",
            "1",
            "--layers",
            "Et|tt|tt|tttL",
            "--weight-decay",
            "0",
        ],
        &[("nanotron", "uneven"), ("deepspeed", "stages"), ("hf-tp-plan", "stages")],
    ),
    (
        "llama_deep",
        &[
            "--mesh",
            "pp=2,dp=2",
            "--microbatch",
            "1",
            "--schedule",
            "interleaved",
            "--recompute",
            "full",
            "--decay",
            "matrices",
        ],
        &[("nanotron", "interleaved"), ("deepspeed", "recomputation"), ("hf-tp-plan", "stages")],
    ),
    (
        "mixtral",
        &["--mesh", "dp=4,ep=2", "--dtype", "bf16", "--decay", "matrices"],
        &[
            ("torchtitan", "without sharded weights"),
            ("nanotron", "experts"),
            ("deepspeed", "expert parallelism"),
            ("hf-tp-plan", "without sharded weights"),
        ],
    ),
    (
        "qwen3",
        &["--mesh", "cp=2,tp=2", "--sp", "--cp-mode", "ring", "--decay", "matrices"],
        &[
            ("torchtitan", "--cp-mode"),
            ("nanotron", "context"),
            ("deepspeed", "context"),
            ("hf-tp-plan", "context"),
            ("chakra", "ring"),
        ],
    ),
    (
        "llama_mha",
        &["--mesh", "dp=2,tp=2", "--zero", "1", "--recompute", "selective"],
        &[
            ("megatron", "recomputation by op"),
            ("torchtitan", SHARDED),
            ("nanotron", "recomputation by op"),
            ("deepspeed", "recomputation by op"),
            ("hf-tp-plan", SHARDED),
        ],
    ),
    (
        "qwen3",
        &["--mesh", "tp=4", "--tp-mode", "2d"],
        &[
            ("megatron", "grid"),
            ("torchtitan", "grid"),
            ("nanotron", "grid"),
            ("deepspeed", "grid"),
            ("hf-tp-plan", "grid"),
            ("dtensor", "order other than the mesh"),
        ],
    ),
];

fn compiled(lab: &Lab, case: &Case, out: &str) {
    let model = lab.model(case.0);
    lab.ok(&[&["compile", &model, "--seq", "16", "-o", out], case.1].concat());
}

#[test]
fn what_a_target_lacks_is_refused_by_name() {
    let lab = Lab::new("exports");
    for (i, case) in CASES.iter().enumerate() {
        let plan = format!("{i}.plan");
        compiled(&lab, case, &plan);
        for to in TARGETS {
            let out = format!("{i}.{to}");
            let args = ["export", &plan, "--to", to, "-o", &out];
            match case.2.iter().find(|l| l.0 == to) {
                Some((_, word)) => {
                    let said = lab.refuses(&args, 4, "export");
                    assert!(said.contains(word), "{case:?} {to}: {said}");
                }
                None => {
                    lab.ok(&args);
                    lab.refuses(&args, 2, "output"); // it is not written over
                    if to == "megatron" {
                        let flags = std::fs::read_to_string(lab.path(&out).join("megatron.args"));
                        megatron::parsed(&flags.expect("flags"));
                    }
                }
            }
        }
    }
    // One file is printed, several are not.
    lab.ok(&["export", "0.plan", "--to", "megatron"]);
    lab.refuses(&["export", "0.plan", "--to", "chakra"], 2, "flag");
    lab.refuses(&["export", "0.plan", "--to", "dtensor", "-o", "no/where"], 2, "output");
    let text = std::fs::read_to_string(lab.path("0.plan/model.ir")).expect("the model");
    lab.write("m.ir", text);
    lab.ok(&["compile", "m.ir", "--mesh", "dp=2", "-o", "text.plan"]);
    for to in ["megatron", "torchtitan", "deepspeed", "nanotron", "hf-tp-plan"] {
        let said = lab.refuses(&["export", "text.plan", "--to", to], 4, "export");
        assert!(said.contains("text"), "{said}");
    }
    lab.ok(&["export", "text.plan", "--to", "dtensor"]);
}

/// What a target would do otherwise is refused, and what the plan does is written.
#[test]
fn what_a_target_does_otherwise_is_refused() {
    let lab = Lab::new("exports-otherwise");
    let refused = |fixture: &str, flags: &[&str], to: &str, word: &str| {
        let name = format!("{fixture}{}.{to}", flags.join(""));
        let model = lab.model(fixture);
        lab.ok(&[&["compile", &model, "--seq", "16", "-o", &name], flags].concat());
        let said = lab.refuses(&["export", &name, "--to", to], 4, "export");
        assert!(said.contains(word), "{fixture} {flags:?} {to}: {said}");
        said
    };
    // Biases that these have not, or are not written with.
    refused("qwen2", &[], "nanotron", "the family qwen2");
    refused("llama_bias_tied", &[], "nanotron", "biases of individual linears");
    refused("llama_bias_tied", &[], "megatron", "biases of individual linears");
    // What decays.
    let said = refused("llama_mha", &["--decay", "all"], "megatron", "biases and norms");
    assert!(said.contains("--decay matrices"), "{said}");
    refused("llama_mha", &["--decay", "matrices"], "deepspeed", "--decay matrices");
    // A rank of transformers has pieces of modules, and norms what it has.
    let tp = ["--mesh", "tp=2"];
    for family in ["glm", "glm4", "phi3", "gpt2"] {
        refused(family, &tp, "hf-tp-plan", "hold several weights");
    }
    for family in ["olmo2", "olmo3"] {
        refused(family, &tp, "hf-tp-plan", "a norm over all heads");
    }
    // FSDP2 shards over cp, whatever else it shards over.
    let cp = ["--mesh", "cp=2", "--cp-mode", "all-gather"];
    let said = refused("llama_mha", &cp, "torchtitan", "over cp too");
    assert!(!said.contains("dp_shard"), "{said}");
    let text = |flags: &[&str], to: &str| {
        lab.ok(&[&["compile", "llama_mha", "--seq", "16", "-o", "p"], flags].concat());
        String::from_utf8_lossy(&lab.ok(&["export", "p", "--to", to]).stdout).into_owned()
    };
    let module = text(&[&cp[..], &["--zero", "3"]].concat(), "torchtitan");
    assert!(module.contains("context_parallel_degree=2"), "{module}");
    // ZeRO with an optimizer that DeepSpeed does not know to work with it.
    let key = "zero_allow_untested_optimizer";
    for (flags, want) in [
        (&["--mesh", "dp=2", "--zero", "1", "--optimizer", "sgd"][..], true),
        (&["--mesh", "dp=2", "--optimizer", "sgd"], false),
        (&["--mesh", "dp=2", "--zero", "1"], false),
    ] {
        let config: Json = serde_json::from_str(&text(flags, "deepspeed")).expect("JSON");
        assert_eq!(config.get(key), want.then_some(&Json::Bool(true)), "{flags:?}");
    }
}

/// A rule is written where a target has it, and else refused by its name: none becomes AdamW.
#[test]
fn update_rules_are_written_or_refused() {
    let lab = Lab::new("exports-rules");
    let model = lab.model("llama_mha");
    let all = ["--decay", "all", "--weight-decay", "0.1", "--lr", "2e-4"];
    for (i, (flags, written)) in [
        (&["--optimizer", "lion"][..], &["deepspeed"][..]),
        (&["--optim", "*=lion,beta2=0.98,decay=0.2,lr*=0.5"], &["deepspeed"]),
        (&["--optim", "*=lion,state_dtype=bf16"], &[]),
        (&["--optim", "hidden=lion"], &[]),
        (&["--optimizer", "muon"], &[]),
        (&["--optimizer", "adafactor"], &[]),
        (&["--optim", "*.norm.weight=adamw,decay=0"], &[]),
        (&["--optimizer", "sgd"], &["deepspeed", "megatron", "torchtitan"]),
    ]
    .into_iter()
    .enumerate()
    {
        let plan = format!("{i}.plan");
        let base = ["compile", &model, "--seq", "16", "-o", &plan];
        // Megatron-LM exempts norms, which SGD shows here.
        let decays = if flags[1] == "sgd" { &["--weight-decay", "0"][..] } else { &all[..] };
        lab.ok(&[&base, flags, decays].concat());
        for to in ["megatron", "torchtitan", "deepspeed", "nanotron"] {
            let args = ["export", &plan, "--to", to];
            if written.contains(&to) {
                let said = String::from_utf8(lab.ok(&args).stdout).expect("text");
                assert!(!said.to_lowercase().contains("adamw"), "{flags:?} {to}: {said}");
                continue;
            }
            let said = lab.refuses(&args, 4, "export");
            let rule = match (flags[0], flags[1]) {
                ("--optim", rule) => rule.to_string(),
                (_, "muon") => "hidden=muon".into(),
                (_, "sgd") => "sgd".into(),
                (_, name) => format!("*={name}"),
            };
            let named = match &*rule {
                "sgd" => said.to_lowercase().contains("sgd"),
                rule => said.contains(&format!("the update rule `{rule}`: ")),
            };
            assert!(named, "{flags:?} {to}: {said}");
        }
    }
    // Neither does one of the user's own that is called so.
    let own = "update @adamw(\n  %p: f32[*] param, %g: f32[*] grad,\n  %lr: f32[] scalar \"lr\",\n) -> (f32[*] param)\n{\n  \
               return sub %p, mul[*,->*] %g, %lr\n}\n";
    lab.write("own.ir", own);
    let plan =
        ["--optim-file", "own.ir", "--decay", "all", "--weight-decay", "0", "-o", "own.plan"];
    lab.ok(&[&["compile", &model, "--seq", "16"][..], &plan].concat());
    // Its model names the rule, and compiles to the same programs.
    let text = |name: &str| std::fs::read_to_string(lab.path(name)).expect("a text");
    assert!(text("own.plan/model.ir").contains("update @adamw("), "{}", text("own.plan/model.ir"));
    lab.ok(&[
        "compile",
        "own.plan/model.ir",
        "--decay",
        "all",
        "--weight-decay",
        "0",
        "-o",
        "again.plan",
    ]);
    assert_eq!(text("own.plan/programs/all.ir"), text("again.plan/programs/all.ir"));
    for to in ["megatron", "torchtitan", "deepspeed", "nanotron"] {
        let said = lab.refuses(&["export", "own.plan", "--to", to], 4, "export");
        assert!(said.contains("the update rule `@adamw` of --optim-file"), "{to}: {said}");
    }
    let config = |i: usize| -> Json {
        let out = lab.ok(&["export", &format!("{i}.plan"), "--to", "deepspeed"]).stdout;
        serde_json::from_slice(&out).expect("JSON")
    };
    let of = |lr: f64, betas: [f64; 2], decay: f64| serde_json::json!({ "type": "Lion", "params": { "lr": lr, "betas": betas, "weight_decay": decay } });
    assert_eq!(config(0)["optimizer"], of(2e-4, [0.9, 0.99], 0.1));
    assert_eq!(config(1)["optimizer"], of(1e-4, [0.9, 0.98], 0.2));
}

/// Scaled rotary positions are exported where Megatron-LM has the same formula, of which it takes the factor alone.
#[test]
fn scaled_rotary_positions_are_exported_or_refused() {
    let lab = Lab::new("exports-rope");
    let scaling = |kind: &str, high: f64, original: usize| {
        serde_json::json!({ "max_position_embeddings": 131_072, "rope_scaling": { "rope_type": kind, "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": high, "original_max_position_embeddings": original } })
    };
    let compile = |model: &str| {
        lab.ok(&["compile", model, "--seq", "16", "--decay", "matrices", "-o", "p"]);
    };
    compile(&lab.config("llama_mha", scaling("llama3", 4.0, 8192)));
    let flags = lab.ok(&["export", "p", "--to", "megatron"]).stdout;
    let flags = String::from_utf8_lossy(&flags).into_owned();
    for line in ["--use-rope-scaling\n", "--rope-scaling-factor 8\n"] {
        assert!(flags.contains(line), "{line}: {flags}");
    }
    lab.refuses(&["export", "p", "--to", "nanotron"], 4, "export");
    for (kind, high, original, word) in [
        ("llama3", 8.0, 8192, "high_freq_factor other than 4"),
        ("llama3", 4.0, 4096, "original_max_position_embeddings other than 8192"),
        ("linear", 4.0, 8192, "rotary scaling of type linear"),
    ] {
        compile(&lab.config("llama_mha", scaling(kind, high, original)));
        let said = lab.refuses(&["export", "p", "--to", "megatron"], 4, "export");
        assert!(said.contains(word), "{word}: {said}");
    }
    compile(&lab.model("llama_mha"));
    let flags = lab.ok(&["export", "p", "--to", "megatron"]).stdout;
    assert!(!String::from_utf8_lossy(&flags).contains("rope-scaling"));
}

/// Routers are exported as the compiler reads them: a loss that training does not have has no coefficient.
#[test]
fn routers_are_those_of_the_plan() {
    let lab = Lab::new("exports-routers");
    let flags = |model: &str, more: &[&str]| -> Vec<String> {
        let base = ["compile", model, "--seq", "16", "--decay", "matrices", "-o", "p"];
        lab.ok(&[&base[..], more].concat());
        let out = lab.ok(&["export", "p", "--to", "megatron"]);
        String::from_utf8_lossy(&out.stdout).lines().map(String::from).collect()
    };
    let check = |lines: &[String], raw: bool, kind: &str, coefficient: &str| {
        let has = |line: &str| lines.iter().any(|l| l == line);
        assert_eq!(has("--moe-router-pre-softmax"), raw, "{lines:?}");
        assert!(has(&format!("--moe-router-load-balancing-type {kind}")), "{lines:?}");
        assert!(has(&format!("--moe-aux-loss-coeff {coefficient}")), "{lines:?}");
    };
    // A layer without experts has no flag. The coefficient is the model's own, if nobody chose one.
    let all = serde_json::json!({ "mlp_only_layers": [] });
    let normed = lab.config("qwen3_moe", all);
    let own = flags(&normed, &[]);
    check(&own, false, "aux_loss", "0.001");
    let note = "# plan: no balancing loss, for config.json does not ask for it (output_router_logits); written: the model's own, a balancing loss times 0.001";
    assert!(own.iter().any(|l| l == note), "{own:?}");
    let exact = lab.ok(&["export", "p", "--to", "megatron", "--exact"]).stdout;
    let exact: Vec<String> = String::from_utf8_lossy(&exact).lines().map(String::from).collect();
    check(&exact, false, "none", "0");
    check(&flags(&normed, &["--moe-aux", "0.5"]), false, "aux_loss", "0.5");
    let raw = lab.model("qwen3_moe_raw");
    check(&flags(&raw, &[]), true, "aux_loss", "0.05");
    check(&flags(&raw, &["--moe-aux", "0"]), true, "none", "0");
    let absent = serde_json::json!({ "mlp_only_layers": [], "norm_topk_prob": null });
    let absent = lab.config("qwen3_moe", absent);
    check(&flags(&absent, &[]), true, "aux_loss", "0.001");
    let mixtral = lab.model("mixtral");
    check(&flags(&mixtral, &[]), false, "aux_loss", "0.02");
}

/// Numbers of the exports are those of the plan.
#[test]
fn exports_have_the_numbers_of_the_plan() {
    let lab = Lab::new("exports-numbers");
    let of = |to: &str| {
        let out = lab.ok(&["export", "p", "--to", to]);
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    compiled(&lab, &CASES[3], "p");
    let flags = of("megatron");
    let has = |line: &str| assert!(flags.lines().any(|l| l == line), "{line}: {flags}");
    has("--pipeline-model-parallel-layout Et|tt|tt|tttL");
    has("--pipeline-model-parallel-size 4");
    has("--micro-batch-size 1");
    has("--global-batch-size 8");
    let module = of("torchtitan");
    let stage = r#"["tok_embeddings", "layers.0"], ["layers.1", "layers.2"]"#;
    assert!(module.replace("\",\"", "\", \"").contains(stage), "{module}");
    assert!(module.contains("num_tokens_per_train_step = 128"), "{module}");
    compiled(&lab, &("qwen3", &["--mesh", "tp=2"], &[]), "p");
    let json: Json = serde_json::from_str(&of("hf-tp-plan")).expect("JSON");
    let styles = json["tp_plan"].as_object().expect("styles");
    let style = |m: &str| styles.get(m).and_then(Json::as_str).map(String::from);
    for (module, want) in [
        ("model.layers.*.self_attn.q_proj", "colwise"),
        ("model.layers.*.self_attn.o_proj", "rowwise"),
        ("model.layers.*.self_attn.q_norm", "replicated_with_grad_allreduce"),
        ("model.embed_tokens", "embedding_rowwise"),
        ("lm_head", "colwise_gather_output"),
    ] {
        assert_eq!(style(module).as_deref(), Some(want), "{module}");
    }
    compiled(&lab, &("hunyuan", &["--mesh", "tp=2"], &[]), "p");
    let json: Json = serde_json::from_str(&of("hf-tp-plan")).expect("JSON");
    let norm = &json["tp_plan"]["model.layers.*.self_attn.query_layernorm"];
    assert_eq!(norm, "replicated_with_grad_allreduce");
    let ep: Case = ("gpt_oss", &["--mesh", "dp_shard=4,ep=2", "--zero", "3"], &[]);
    compiled(&lab, &ep, "p");
    let json: Json = serde_json::from_str(&of("hf-tp-plan")).expect("JSON");
    assert_eq!((&json["ep_size"], &json["fsdp_size"]), (&2.into(), &4.into()));
    let rules = json["ep_plan"].as_object().expect("rules");
    let tensors = ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"];
    for tensor in tensors {
        assert_eq!(rules[&format!("model.layers.*.mlp.experts.{tensor}")], "grouped_gemm");
    }
    assert_eq!(rules["model.layers.*.mlp.experts"], "ep_dispatch_experts");
    // Pieces of all ranks together are each parameter, as often as it is there.
    compiled(&lab, &CASES[1], "p");
    let json: Json = serde_json::from_str(&of("dtensor")).expect("JSON");
    let plan = plan_dir::read(&lab.path("p")).expect("a plan").plan;
    let sizes: BTreeMap<&str, usize> =
        plan.weights.iter().map(|w| (&*w.param, w.shape.iter().product())).collect();
    let all = json["parameters"].as_array().expect("parameters");
    assert_eq!(all.len(), sizes.len());
    for p in all {
        let local = p["local"].as_object().expect("pieces").values();
        let piece = |dims: &Json| -> usize {
            let lens = dims.as_array().expect("dims").iter();
            lens.map(|d| d[1].as_u64().expect("a length") as usize).product()
        };
        let placements = p["placements"].as_array().expect("placements");
        let whole = placements.iter().filter(|x| *x == "Replicate()").count();
        let size = sizes[p["name"].as_str().expect("a name")];
        assert_eq!(local.map(piece).sum::<usize>(), size << whole, "{p}");
    }
}

/// The Python that has PyTorch, if one has.
fn python() -> Option<String> {
    let name = std::env::var("SHARDC_PYTHON").unwrap_or("python3".into());
    let test = ["-c", "import torch, transformers, accelerate"];
    Command::new(&name).args(test).output().is_ok_and(|o| o.status.success()).then_some(name)
}

/// What `tests/exports/check.py` says of a file.
fn check(lab: &Lab, python: &str, args: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exports/check.py");
    let out = Command::new(python).current_dir(&lab.0).arg(&script).args(args).output();
    let out = out.expect("python starts");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{args:?}: {said}");
}

/// DTensors on gloo ranks have the local shapes of the plan; a live model of transformers runs with the styles; the
/// schedule is one for PyTorch.
#[test]
fn pytorch_reads_them() {
    let Some(python) = python() else {
        return skip(Tool::Torch, "placements on gloo ranks, a live model, and a schedule");
    };
    let lab = Lab::new("exports-pytorch");
    let check = |args: &[&str]| check(&lab, &python, args);
    for (i, case) in [&CASES[1], &CASES[2], &CASES[6]].into_iter().enumerate() {
        let (plan, out) = (format!("{i}.plan"), format!("{i}.dtensor"));
        compiled(&lab, case, &plan);
        lab.ok(&["export", &plan, "--to", "dtensor", "-o", &out]);
        check(&["dtensor", &format!("{out}/dtensor.json")]);
    }
    lab.ok(&["export", "1.plan", "--to", "torchtitan", "-o", "tt"]);
    check(&["schedule", "tt/schedule.csv", "2"]);
    compiled(&lab, &("qwen3", &["--mesh", "tp=2"], &[]), "tp.plan");
    lab.ok(&["export", "tp.plan", "--to", "hf-tp-plan", "-o", "hf"]);
    check(&["hf", "hf/tp_plan.json", "qwen3"]);
    // Experts of two ranks each, of which FSDP shards what is not theirs.
    let ep: Case = ("qwen3_moe", &["--mesh", "dp_shard=2,ep=2", "--zero", "3"], &[]);
    compiled(&lab, &ep, "ep.plan");
    lab.ok(&["export", "ep.plan", "--to", "hf-tp-plan", "-o", "ep"]);
    check(&["hf", "ep/tp_plan.json", "qwen3_moe"]);
}

/// What targets refuse at their start, or do otherwise without a word of theirs.
#[test]
fn targets_start_with_what_is_written() {
    let lab = Lab::new("export-starts");
    let deep = format!("{}/llama_deep", crate::lab::FIXTURES);
    let base = ["compile", &deep, "--seq", "16", "--decay", "matrices", "--layers", "equal"];
    // Three axes, of which cp shares what is made of positions.
    let mesh = ["--mesh", "pp=2,dp=2,cp=2", "--cp-split", "zigzag", "--microbatch", "1"];
    let schedule = ["--schedule", "1f1b", "--global-batch", "8", "-o", "p"];
    lab.ok(&[&base[..], &mesh, &schedule].concat());
    let said = |to: &str, plan: &str| {
        String::from_utf8_lossy(&lab.ok(&["export", plan, "--to", to]).stdout).into_owned()
    };
    let megatron = said("megatron", "p");
    let seeds = megatron.lines().any(|l| l.starts_with("--seed"));
    assert!(!seeds && megatron.contains("context-parallel-size"), "{megatron}");
    let summary = lab.ok(&["inspect", "p", "--summary"]);
    let summary = String::from_utf8_lossy(&summary.stdout).into_owned();
    let stages = ["0-3", "4-7"].map(|layers| summary.contains(layers));
    assert!(stages == [true, true] && !summary.contains("0-7"), "{summary}");
    let mesh = ["--mesh", "pp=2,dp=2", "--zero", "3", "--microbatch", "1", "--recompute", "none"];
    let schedule = ["--schedule", "1f1b", "--global-batch", "8", "-o", "t"];
    lab.ok(&[&base[..], &mesh, &schedule].concat());
    let module = said("torchtitan", "t");
    assert!(module.contains("disable_cuda_graphs = True"), "{module}");
    // Pipelines of PyTorch reduce gradients once: a plan that does so is written, and of another it is said.
    assert!(module.contains("reduce them once"), "{module}");
    for (keeps, policy) in [("gradients", "always"), ("both", "never")] {
        let keeps = ["--zero-accumulate", keeps];
        lab.ok(&[&base[..], &mesh, &schedule[..4], &["-o", "u"], &keeps].concat());
        let module = said("torchtitan", "u");
        let policy = format!("fsdp_reshard_after_forward=\"{policy}\"");
        assert!(module.contains(&policy) && !module.contains("reduce them once"), "{module}");
    }
    let flat = ["--mesh", "dp=2", "--zero", "3", "--microbatch", "1", "--global-batch", "8"];
    lab.ok(&[&base[..4], &flat, &["--zero-accumulate", "both", "-o", "v"]].concat());
    lab.refuses(&["export", "v", "--to", "torchtitan"], 4, "export");
    let one =
        ["--mesh", "dp=2", "--zero", "1", "--dtype", "bf16", "--seed", "7", "--weight-decay", "0"];
    lab.ok(&[&["compile", &deep, "--seq", "16", "-o", "q"][..], &one].concat());
    assert!(said("megatron", "q").contains("--seed 7"));
    let config: Json = serde_json::from_str(&said("deepspeed", "q")).expect("JSON");
    assert_eq!(config["communication_data_type"], "fp32");
    assert!(config["seed"].is_null());
    // What its config has no word for is told.
    let told = |plan: &str| {
        let said = lab.ok(&["export", plan, "--to", "deepspeed"]).stderr;
        String::from_utf8_lossy(&said).into_owned()
    };
    assert!(told("q").contains("(given, and not written): --seed 7; "), "{}", told("q"));
    let sparse = format!("{}/qwen3_moe", crate::lab::FIXTURES);
    let routers = ["--moe-aux", "0.02", "--moe-z-loss", "0.001", "-o", "r"];
    lab.ok(&[&["compile", &sparse, "--seq", "16"][..], &one[..4], &routers].concat());
    let routers = told("r");
    let all = "(given, and not written): --moe-aux 0.02 --moe-z-loss 0.001; ";
    assert!(routers.contains(all), "{routers}");
    lab.ok(&[&["compile", &deep, "--seq", "16", "-o", "h"][..], &one, &["--grad-dtype", "bf16"]]
        .concat());
    let config: Json = serde_json::from_str(&said("deepspeed", "h")).expect("JSON");
    assert_eq!(config["communication_data_type"], "bf16");
    // The f32 gradients that Megatron-LM's optimizer makes are in no plan.
    for (plan, told) in [("q", false), ("h", true)] {
        let out = lab.ok(&["export", plan, "--to", "megatron"]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(said.contains("copies gradients to f32"), told, "{plan}: {said}");
    }
    let half = ["--mesh", "dp=2", "--dtype", "f16", "--weight-decay", "0", "-o", "s"];
    lab.ok(&[&["compile", &deep, "--seq", "16"][..], &half].concat());
    let exact = lab.ok(&["export", "s", "--to", "megatron", "--exact"]).stdout;
    assert!(String::from_utf8_lossy(&exact).contains("\n--initial-loss-scale 4294967296\n"));
}

/// Which families each target takes, of a plan for one rank: the table of the documentation.
#[test]
fn families_by_target_are_as_documented() {
    use shardc::export::export;
    use shardc::flags::Target;
    let lab = Lab::new("exports-families");
    let all = [
        ("llama", "llama_mha"),
        ("mistral", "mistral_window"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("gpt2", "gpt2"),
        ("gemma2", "gemma2"),
        ("mixtral", "mixtral"),
        ("qwen3_moe", "qwen3_moe_raw"),
        ("deepseek_v3", "deepseek_v3"),
        ("olmo2", "olmo2"),
        ("phi3", "phi3"),
        ("gemma3_text", "gemma3"),
        ("gpt_neox", "gpt_neox"),
        ("glm4_moe", "glm4_moe"),
        ("gemma", "gemma"),
        ("granite", "granite"),
        ("cohere", "cohere"),
        ("cohere2", "cohere2"),
        ("glm", "glm"),
        ("glm4", "glm4"),
        ("ernie4_5", "ernie4_5"),
        ("olmo3", "olmo3"),
        ("smollm3", "smollm3"),
        ("exaone4", "exaone4"),
        ("seed_oss", "seed_oss"),
        ("starcoder2", "starcoder2"),
        ("arcee", "arcee"),
        ("nemotron", "nemotron"),
        ("hunyuan_v1_dense", "hunyuan"),
        ("kimi_k2", "deepseek_v3"),
        ("qwen2_moe", "qwen2_moe"),
        ("olmoe", "olmoe"),
        ("minimax_m2", "minimax_m2"),
        ("ministral3", "ministral3"),
        ("gpt_oss", "gpt_oss"),
        ("granitemoe", "granitemoe"),
        ("deepseek_v2", "deepseek_v2"),
        ("helium", "helium"),
        ("ministral", "ministral"),
        ("stablelm", "stablelm"),
        ("ernie4_5_moe", "ernie4_5_moe"),
        ("llama4_text", "llama4"),
        ("phi", "phi"),
        ("olmo", "olmo"),
        ("falcon", "falcon"),
        ("gpt_bigcode", "gpt_bigcode"),
        ("gptj", "gptj"),
        ("qwen3_next", "qwen3_next"),
        ("mamba2", "mamba2"),
        ("bamba", "bamba"),
        ("granitemoehybrid", "granitemoehybrid"),
        ("nemotron_h", "nemotron_h"),
    ];
    let mut table =
        format!("| family | {} |\n|-|{}\n", TARGETS.join(" | "), "-|".repeat(TARGETS.len()));
    for (family, fixture) in all {
        let model = lab.model(fixture);
        // Windows are refused of every family; these are without them, too.
        let path = lab.path(&model).join("config.json");
        let config = std::fs::read_to_string(&path).expect("a config");
        let mut config: Json = serde_json::from_str(&config).expect("JSON");
        if ["mistral", "phi3", "starcoder2"].contains(&family) {
            config["sliding_window"] = Json::Null;
        }
        // Of the one that has no folder of its own.
        config["model_type"] = family.into();
        std::fs::write(&path, config.to_string()).expect("a write");
        let plan = format!("{family}.plan");
        let flags = ["--seq", "16", "--weight-decay", "0", "--prove", "no", "-o", &plan];
        lab.ok(&[&["compile", &model][..], &flags].concat());
        let stored = plan_dir::read(&lab.path(&plan)).expect("a plan");
        assert_eq!(stored.family, family);
        let takes = TARGETS.map(|to| {
            let to: Target = clap::ValueEnum::from_str(to, false).expect("a target");
            match export(&stored, to, false) {
                Ok(_) => "yes",
                Err(d) if d.code == "export" => "no",
                Err(d) => panic!("{family}: {d}"),
            }
        });
        table += &format!("| {family} | {} |\n", takes.join(" | "));
    }
    assert_eq!(all.len(), shardc_frontends::family::FAMILIES.len());
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/cost.md");
    let page = std::fs::read_to_string(page).expect("a page");
    assert!(page.contains(&table), "docs/cost.md has another table than\n{table}");
}

/// A recomputation that a config has no word for is told.
#[test]
fn what_is_made_again_is_told() {
    let lab = Lab::new("exports-again");
    let model = lab.model("llama_mha");
    for (again, told) in [("elementwise", true), ("none", false)] {
        let plan =
            ["compile", &model, "--seq", "16", "--weight-decay", "0", "--recompute", again, "-o"];
        lab.ok(&[&plan[..], &[again]].concat());
        for to in ["megatron", "deepspeed", "nanotron"] {
            let out = lab.ok(&["export", again, "--to", to]);
            let said = String::from_utf8_lossy(&out.stderr).into_owned();
            assert_eq!(said.contains("--recompute elementwise"), told, "{to}: {said}");
        }
    }
}

/// Buckets of DeepSpeed are layers: sums and gathers go on layer by layer behind the work of others.
#[test]
fn buckets_of_deepspeed_are_layers() {
    let lab = Lab::new("exports-buckets");
    let model = lab.model("llama_deep");
    // Hidden 16, heads of 4, of which 4 are of queries and 2 of keys and values; 24 inside of an MLP; two norms.
    let layer = 16 * 4 * (4 + 2 + 2) + 4 * 4 * 16 + 3 * 16 * 24 + 2 * 16;
    let of = |zero: &str| {
        let base = ["compile", &model, "--seq", "16", "--mesh", "dp=2", "--zero", zero];
        lab.ok(&[&base[..], &["-o", zero]].concat());
        let out = lab.ok(&["export", zero, "--to", "deepspeed"]).stdout;
        let config: Json = serde_json::from_slice(&out).expect("JSON");
        config["zero_optimization"].clone()
    };
    assert_eq!(of("0"), serde_json::json!({ "stage": 0 }));
    let two = serde_json::json!({
        "stage": 2, "overlap_comm": true, "reduce_bucket_size": layer,
        "allgather_bucket_size": layer,
    });
    assert_eq!(of("2"), two);
    let three = serde_json::json!({
        "stage": 3, "overlap_comm": true, "reduce_bucket_size": layer,
        "stage3_prefetch_bucket_size": layer, "stage3_max_live_parameters": 2 * layer,
    });
    assert_eq!(of("3"), three);
}

/// The first line of a file says which version it is for; of JSON, which has no comments, the first line that is told.
#[test]
fn the_first_line_names_the_version() {
    let lab = Lab::new("exports-versions");
    let model = lab.model("llama_mha");
    lab.ok(&["compile", &model, "--seq", "16", "--mesh", "dp=2", "--zero", "1", "-o", "p"]);
    lab.ok(&["compile", &model, "--seq", "16", "--mesh", "dp=2", "--zero", "3", "-o", "z"]);
    for (to, plan, version) in [
        ("megatron", "p", "Megatron-LM at commit d98e8a64"),
        ("torchtitan", "z", "torchtitan (b5bcd76c, or release 0.3.0)"),
        ("nanotron", "p", "nanotron at commit 2411b022"),
        ("deepspeed", "p", "DeepSpeed 0.19.8"),
        ("hf-tp-plan", "z", "transformers 5.23"),
    ] {
        let out = lab.ok(&["export", plan, "--to", to]);
        let is_json = serde_json::from_slice::<Json>(&out.stdout).is_ok();
        let said = if is_json { out.stderr } else { out.stdout };
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(said.lines().next().is_some_and(|l| l.contains(version)), "{to}: {said}");
    }
}
