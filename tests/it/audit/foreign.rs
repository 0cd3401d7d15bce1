//! Configurations of torchtitan and DeepSpeed.

use crate::lab::{FIXTURES, Lab};
use serde_json::Value as Json;

#[test]
fn torchtitan_and_deepspeed_are_read_with_a_model() {
    let lab = Lab::new("audit-foreign");
    let model = format!("{}/qwen3_moe", FIXTURES);
    lab.write(
        "titan.toml",
        "[parallelism]\ntensor_parallel_degree = 2\nexpert_parallel_degree = 2\ndata_parallel_shard_degree = -1\n\
         own_knob = 3\n[training]\nlocal_batch_size = 2\nglobal_batch_size = 8\nseq_len = 16\n",
    );
    let titan = ["audit", "torchtitan", "titan.toml", "--model", &model, "--gpus", "4"];
    let text = String::from_utf8(lab.ok(&titan).stdout).expect("text");
    assert!(text.contains("parallelism.own_knob = 3: not modelled"), "{text}");
    assert!(text.contains("layout  dp=2 tp=2 ep=2 etp=1 sp"), "{text}");
    assert!(text.contains("input_layernorm") && text.contains("dp tp"), "{text}");
    let out = lab.ok(&[&titan[..], &["--format", "json"]].concat());
    let json: Json = serde_json::from_slice(&out.stdout).expect("JSON");
    let row = |name: &str| {
        let rows = json["parameters"].as_array().expect("rows");
        rows.iter()
            .find(|r| r["name"].as_str().expect("a name").contains(name))
            .expect("a row")
            .clone()
    };
    assert_eq!(
        (&row("q_norm")["sums"], &row("q_norm")["rule_sums"]),
        (&"dp tp".into(), &"dp tp".into())
    );
    let said = lab.refuses(
        &["audit", "torchtitan", "titan.toml", "--model", &model, "--gpus", "3"],
        2,
        "audit",
    );
    assert!(said.contains("ParallelDims"), "{said}");
    lab.refuses(&["audit", "torchtitan", "titan.toml", "--gpus", "4"], 2, "audit");
    lab.write("typo.toml", "[paralelism]\ntensor_parallel_degree = 2\n[metrics]\nlog_freq = 1\n");
    let typo = ["audit", "torchtitan", "typo.toml", "--model", &model, "--gpus", "4"];
    let text = String::from_utf8(lab.ok(&typo).stdout).expect("text");
    assert!(
        text.contains("the section paralelism is not read: parallelism is one that is"),
        "{text}"
    );
    assert!(!text.contains("metrics"), "{text}");
    lab.write("ds.json", r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}"#);
    let dense = format!("{}/llama_gqa", FIXTURES);
    let text = lab.ok(&["audit", "deepspeed", "ds.json", "--model", &dense, "--gpus", "4"]).stdout;
    assert!(String::from_utf8(text).expect("text").contains("no finding"));
    // AutoTP sums gradients of norms of heads as the plan of transformers says, with all of ZeRO.
    lab.write("tp.json", r#"{"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}}"#);
    for family in ["qwen3", "llama_gqa", "cohere"] {
        let own = format!("{}/{family}", FIXTURES);
        let args = ["audit", "deepspeed", "tp.json", "--model", &own, "--gpus", "4"];
        let text = String::from_utf8(lab.ok(&args).stdout).expect("text");
        assert!(text.contains("no finding") && text.contains("AutoTP splits as"), "{text}");
    }
    lab.write("sp.json", r#"{"train_batch_size": 8, "sequence_parallel_size": 2}"#);
    let args = ["audit", "deepspeed", "sp.json", "--model", &dense, "--gpus", "4"];
    assert!(String::from_utf8(lab.ok(&args).stdout).expect("text").contains("no finding"));
    lab.write("bad.json", r#"{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}"#);
    let said = lab.refuses(
        &["audit", "deepspeed", "bad.json", "--model", &dense, "--gpus", "4"],
        2,
        "audit",
    );
    assert!(said.contains("_batch_assertion"), "{said}");
}

#[test]
fn values_that_other_software_refuses_are_refused_by_name() {
    let lab = Lab::new("audit-foreign-refused");
    let dense = format!("{}/llama_gqa", FIXTURES);
    let large = u64::MAX;
    for (text, word) in [
        (r#"{"train_batch_size": "auto"}"#.into(), "train_batch_size = \"auto\": a whole number"),
        (r#"{"zero_optimization": {"stage": 9}}"#.into(), "a number from 0 to 3"),
        (r#"{"zero_optimization": {"stage": "auto"}}"#.into(), "a number from 0 to 3"),
        (r#"{"zero_optimization": true}"#.into(), "a section in braces"),
        (r#"{"bf16": {"enabled": "auto"}}"#.into(), "true or false"),
        (r#"{"expert_parallel": {"autoep_size": 2}}"#.into(), "autoep_size of DeepSpeed is not audited"),
        // A mesh, over whose sequence parallelism it sums nothing.
        (
            r#"{"data_parallel_size": 2, "sequence_parallel_size": 2}"#.into(),
            "data_parallel_size of DeepSpeed is not audited",
        ),
        (format!(r#"{{"train_micro_batch_size_per_gpu": {large}}}"#), "a whole number"),
        (
            r#"{"train_micro_batch_size_per_gpu": 16777216, "gradient_accumulation_steps": 16777216}"#
                .into(),
            "it is at most",
        ),
    ] {
        let text: String = text;
        lab.write("ds.json", &text);
        let args = ["audit", "deepspeed", "ds.json", "--model", &dense, "--gpus", "1048576"];
        let said = lab.refuses(&args, 2, "audit");
        let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(word), "{text}: no {word}: {said}");
    }
    lab.write(
        "ds.json",
        r#"{"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true}, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "mics_shard_size": 2}}"#,
    );
    let args = ["audit", "deepspeed", "ds.json", "--model", &dense, "--gpus", "2"];
    let text = String::from_utf8(lab.ok(&args).stdout).expect("text");
    assert!(text.starts_with("not modelled\n"), "{text}");
    for word in ["gradient_clipping = 1.0", "offload_optimizer", "mics_shard_size = 2"] {
        assert!(text.contains(word), "no {word}: {text}");
    }
    let mut config: Json =
        serde_json::from_slice(&std::fs::read(format!("{dense}/config.json")).expect("a fixture"))
            .expect("JSON");
    config["tie_word_embeddings"] = true.into();
    lab.write("config.json", config.to_string());
    for (text, word) in [
        ("pipeline_parallel_degree = 2", "weight tying"),
        ("tensor_parallel_degree = 16777216\ncontext_parallel_degree = 16777216", "ParallelDims"),
        ("tensor_parallel_degree = \"two\"", "a whole number"),
    ] {
        lab.write("titan.toml", format!("[parallelism]\n{text}\n"));
        let args = ["audit", "torchtitan", "titan.toml", "--model", "config.json", "--gpus", "2"];
        assert!(lab.refuses(&args, 2, "audit").contains(word), "{text}");
    }
}

/// AutoTP of DeepSpeed takes the plan of a model, with six words.
#[test]
fn deepspeed_takes_the_plan_of_a_config() {
    let lab = Lab::new("audit-deepspeed-plan");
    let text = std::fs::read_to_string(format!("{FIXTURES}/qwen3/config.json")).expect("a fixture");
    let mut config: Json = serde_json::from_str(&text).expect("JSON");
    lab.write("tp.json", r#"{"train_batch_size": 8, "gradient_accumulation_steps": 4, "tensor_parallel": {"autotp_size": 2}}"#);
    let mut audit = |words: &[(&str, &str)]| {
        let all = [
            ("q_proj", "colwise"),
            ("k_proj", "colwise"),
            ("v_proj", "colwise"),
            ("o_proj", "rowwise"),
        ];
        let all = all.iter().chain(words);
        let name = |(module, word): &(&str, &str)| {
            (format!("layers.*.self_attn.{module}"), Json::from(*word))
        };
        config["base_model_tp_plan"] = all.map(name).collect::<serde_json::Map<_, _>>().into();
        lab.write("config.json", config.to_string());
        let args = ["audit", "deepspeed", "tp.json", "--model", "config.json", "--gpus", "4"];
        let out = lab.shardc(&args);
        let said = [out.stdout, out.stderr].map(|s| String::from_utf8_lossy(&s).into_owned());
        (out.status.code(), said.concat())
    };
    let sums = "replicated_with_grad_allreduce";
    // A hook in front of accumulation sums once, however many microbatches there are.
    let (code, said) = audit(&[("q_norm", sums), ("k_norm", sums)]);
    assert!(code == Some(0) && said.contains("no finding"), "{said}");
    assert!(!said.contains("config.json does not have"), "{said}");
    let (code, said) = audit(&[("k_norm", sums)]);
    assert!(code == Some(1) && said.contains("q_norm.weight is not summed over tp"), "{said}");
    let (code, said) = audit(&[("q_norm", sums), ("k_norm", "replicate")]);
    assert!(
        code == Some(2) && said.contains("TPPlanConverter") && said.contains("replicate"),
        "{said}"
    );
    let (code, said) = audit(&[("q_norm", sums), ("k_norm", sums), ("o_proj", "colwise")]);
    assert!(code == Some(2) && said.contains("o_proj: colwise: it takes"), "{said}");
}
