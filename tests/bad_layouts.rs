//! Layouts that no rule allows: every refusal has its code, the numbers, the rule and a way out, and
//! nothing is written.

mod lab;
use lab::*;
use serde_json::{Value as Json, json};

#[test]
fn sizes_that_do_not_divide() {
    let lab = Lab::new("sizes");
    let mha = &format!("{FIXTURES}/llama_mha");
    let refuses =
        |model: &str, flags: &[&str], code: &str| lab.refuses(&compile(model, flags), 2, code);
    let said = refuses(mha, &["--mesh", "tp=3"], "heads-not-divisible");
    assert!(said.contains("heads=4") && said.contains("tp=2") && said.contains("tp=4"), "{said}");
    refuses(mha, &["--mesh", "tp=8"], "heads-not-divisible");
    // 12 heads on 6 ranks would do, 4 KV heads on 6 do not.
    let c = lab.config(
        "llama_mha",
        json!({ "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96 }),
    );
    let said = refuses(&c, &["--mesh", "tp=6"], "kv-heads-against-tp");
    assert!(said.contains("kv_heads=4"), "{said}");
    let said = refuses(mha, &["--mesh", "dp=3"], "batch-not-divisible");
    assert!(said.contains("--global-batch 9"), "{said}");
    refuses(mha, &["--mesh", "dp=2", "--microbatch", "3"], "batch-not-divisible");
    refuses(mha, &["--global-batch", "0"], "flag");
    refuses(mha, &["--microbatch", "0"], "flag");
    let said = refuses(mha, &["--seq", "33"], "sequence-too-long");
    assert!(said.contains("--seq 32"), "{said}");
    refuses(mha, &["--seq", "0"], "flag");
    refuses(mha, &["--mesh", "tp=4", "--sp", "--seq", "18"], "sequence-not-divisible");
    refuses(mha, &["--sp"], "sp-needs-tp");
    let ring = ["--mesh", "cp=4", "--cp-mode", "ring", "--seq"];
    let said = refuses(mha, &[&ring[..], &["18"]].concat(), "sequence-not-divisible");
    for part in ["seq % (2 * cp) == 0", "seq=18, cp=4", "--seq 16", "--seq 24", "cp=3"] {
        assert!(said.contains(part), "no {part}: {said}");
    }
    let plain = ["18", "--cp-split", "contiguous"];
    let said = refuses(mha, &[&ring[..], &plain].concat(), "sequence-not-divisible");
    for part in ["seq % cp == 0 with --cp-mode ring", "--seq 16", "--seq 20", "cp=3"] {
        assert!(said.contains(part), "no {part}: {said}");
    }
    refuses(mha, &[&ring[..], &["16", "--cp-split", "diagonal"]].concat(), "flag");
    // Heads over cp leave no blocks to go around.
    let heads = ["16", "--shard", "model.layers.0.self_attn=?,-,cp"];
    let said = refuses(mha, &[&ring[..], &heads].concat(), "ring");
    assert!(said.contains("model.layers.0.self_attn") && said.contains("--cp-mode all-gather"));
}

/// A model from text has no facts to check beforehand; the passes refuse.
#[test]
fn sequences_of_a_text_are_dealt_evenly() {
    let lab = Lab::new("dealt");
    let text = "func @model(
  %e: f32[7,8] param \"e\",
  %input_ids: i32[8,18] input \"input_ids\",
  %at: i32[18] input \"positions\",
) -> (f32[8,18,2,4] output \"attn\") {
  %x = take[vh,bs->bsh] %e, %input_ids : f32[8,18,8]
  %q = reshape[bs(nd)->bsnd; n=2] %x : f32[8,18,2,4]
  %attn, %lse = attention[0.5; window=none] %q, %q, %q, %at, %at : f32[8,18,2,4], f32[8,18,2]
  return %attn
}
";
    let model = lab.write("model.ir", text).display().to_string();
    let flags = ["--mode", "infer", "--mesh", "cp=2", "--seq", "18", "--cp-mode", "ring"];
    let said = lab.refuses(&compile(&model, &flags), 2, "sequence-not-divisible");
    assert!(said.contains("--seq 20"), "{said}");
    let plan = ["--cp-split", "contiguous"];
    lab.ok(&compile(&model, &[&flags[..], &plan].concat()));
}

#[test]
fn experts_that_do_not_divide() {
    let lab = Lab::new("experts");
    let moe = &format!("{FIXTURES}/qwen3_moe");
    let refuses = |model: &str, flags: &[&str], code: &str, parts: &[&str]| {
        let said = lab.refuses(&compile(model, flags), 2, code);
        assert!(parts.iter().all(|p| said.contains(p)), "{said}");
    };
    let mesh = |m| ["--mesh", m];
    refuses(
        moe,
        &["--mesh", "dp=3,ep=3,etp=1", "--global-batch", "9"],
        "experts-not-divisible",
        &["experts=8, ep=3", "ep=2, ep=4"],
    );
    refuses(
        moe,
        &mesh("dp=8,tp=4,etp=32"),
        "expert-width-not-divisible",
        &["expert_ffn=16, etp=32", "etp=16"],
    );
    refuses(moe, &mesh("dp=2,ep=4,etp=1"), "experts-mesh", &["ep=4, etp=1", "dp_shard=2", "ep=2"]);
    refuses(moe, &mesh("dp_replicate=4,ep=4"), "experts-mesh", &["ep=4", "dp_shard=1"]);
    refuses(moe, &mesh("dp=2,ep=0"), "mesh", &["`ep=0`"]);
    refuses(moe, &mesh("dp=2,ep=2,ep=2"), "mesh", &["`ep=2`"]);
    let dense = &format!("{FIXTURES}/llama_mha");
    refuses(dense, &mesh("dp=4,ep=4,etp=1"), "no-experts", &["ep=4, etp=1", "ep=1"]);
    refuses(
        moe,
        &["--mesh", "cp=3,ep=3", "--seq", "16"],
        "experts-not-divisible",
        &["experts=8, ep=3"],
    );
    refuses(
        moe,
        &["--mesh", "dp=2,cp=4", "--seq", "18"],
        "sequence-not-divisible",
        &["seq=18, ranks=4", "--seq 20"],
    );
    refuses(
        moe,
        &["--mesh", "tp=4", "--tp-mode", "2d"],
        "experts-need-1d",
        &["tp=4", "--tp-mode 1d"],
    );
    refuses(moe, &["--moe-bound", "0"], "flag", &["--moe-bound"]);
    refuses(moe, &["--moe-bound", "0.9"], "flag", &["--moe-bound 0.9", "--moe-capacity"]);
    refuses(moe, &mesh("dp=2,ep=18446744073709551615"), "mesh", &["16777216"]);
    for option in ["--moe-aux", "--moe-z-loss", "--moe-bias-rate"] {
        refuses(moe, &[option, "-1"], "flag", &[option]);
        refuses(moe, &[option, "inf"], "flag", &[option]);
    }
    refuses(moe, &["--moe-bound", "2", "--moe-capacity", "2"], "flag", &["--moe-capacity 2"]);
    // A plan of experts can be compared with one rank, which has no ep.
    for more in ["--mesh dp=2,tp=2,ep=2,etp=1", "--mesh dp=2,tp=2,ep=2 --microbatch 2 --zero 3"] {
        let flags: Vec<&str> = more.split(' ').collect();
        lab.ok(&compile(moe, &flags));
        lab.ok(&["verify", "out", "--tiny"]);
    }
    let out = lab.ok(&compile(dense, &["--moe-bound", "2"]));
    assert!(String::from_utf8_lossy(&out.stderr).contains("no-effect"));
    // What a config of experts may say wrong.
    for (change, code, exit) in [
        (json!({ "num_experts_per_tok": 9 }), "config", 2),
        (json!({ "num_experts": 0 }), "config", 2),
        (json!({ "num_experts": 1u64 << 40 }), "config", 2),
        (json!({ "num_experts": 1 << 20 }), "config", 2),
        (json!({ "mlp_only_layers": ["a"] }), "config", 2),
    ] {
        let c = lab.config("qwen3_moe", change);
        lab.refuses(&compile(&c, &[]), exit, code);
    }
    for (change, code, exit) in [
        (json!({ "scoring_func": "softmax" }), "unsupported-config", 4),
        (json!({ "topk_method": "greedy" }), "unsupported-config", 4),
        (json!({ "moe_layer_freq": 2 }), "unsupported-config", 4),
        (json!({ "n_group": 3 }), "config", 2),
        (json!({ "topk_group": 5 }), "config", 2),
        (json!({ "qk_rope_head_dim": 3 }), "config", 2),
        (json!({ "qk_nope_head_dim": 1u64 << 31 }), "config", 2),
    ] {
        let c = lab.config("deepseek_v3", change);
        lab.refuses(&compile(&c, &[]), exit, code);
    }
}

#[test]
fn grids_of_tensor_parallelism() {
    let lab = Lab::new("grids");
    let mha = &format!("{FIXTURES}/llama_mha");
    let refuses = |model: &str, flags: &str, code: &str, words: &[&str]| {
        let flags: Vec<&str> = flags.split(' ').collect();
        let said = lab.refuses(&compile(model, &flags), 2, code);
        assert!(words.iter().all(|w| said.contains(w)), "{said}");
    };
    refuses(mha, "--mesh tp=6 --tp-mode 2d", "tp-grid", &["tp=6", "tp=4"]);
    refuses(mha, "--mesh tp=4 --tp-mode 3d", "tp-grid", &["tp=4", "tp=1"]);
    refuses(mha, "--mesh tp=4 --tp-mode 2.5d", "tp-grid", &["tp=4", "depth=2", "tp=8"]);
    refuses(mha, "--mesh tp=8 --tp-mode 2.5d --tp-depth 3", "tp-grid", &["depth=3", "tp=12"]);
    // 4 heads, 3 of a side.
    refuses(mha, "--mesh tp=9 --tp-mode 2d", "heads-not-divisible", &["heads=4", "q=3", "tp=4"]);
    let rows = "--tp-mode 2d --microbatch 1 --mesh tp=4";
    refuses(mha, rows, "grid-not-divisible", &["microbatch=1", "q=2", "--microbatch 2"]);
    let rows = "--tp-mode 2.5d --microbatch 2 --mesh tp=8";
    let words = ["microbatch=2", "depth=2", "q=2", "--microbatch 4 --global-batch 8"];
    refuses(mha, rows, "grid-not-divisible", &words);
    let rows = "--tp-mode 3d --microbatch 2 --mesh tp=8";
    refuses(mha, rows, "grid-not-divisible", &["microbatch=2", "(q * q)", "--microbatch 4"]);
    let odd = lab.config("llama_mha", json!({ "intermediate_size": 33 }));
    refuses(&odd, "--mesh tp=4 --tp-mode 2d", "grid-not-divisible", &["ffn=33", "q=2", "tp=1"]);
    let odd = lab.config("llama_mha", json!({ "hidden_size": 62, "head_dim": 16 }));
    refuses(&odd, "--mesh tp=8 --tp-mode 3d", "grid-not-divisible", &["hidden=62", "(q * q)"]);
    refuses(mha, "--mesh tp=4 --tp-mode 2d --sp", "sp-needs-1d", &["tp=4", "--tp-mode 1d"]);
    refuses(mha, "--mesh tp=4 --tp-mode 4d", "flag", &["2.5d"]);
    refuses(mha, "--mesh tp=4 --tp-mode 2d --tp-depth 2", "flag", &["2.5d"]);
    refuses(mha, "--mesh tp=4 --tp-mode 2.5d --tp-depth 0", "flag", &["--tp-depth 2"]);
    // A legal mesh of as many ranks is found by the same rules.
    let asked = ["check", mha, "--mesh", "tp=2,dp=4", "--tp-mode", "2d", "--seq", "16"];
    let out = lab.shardc(&asked);
    assert_eq!(out.status.code(), Some(1));
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(said.contains("--mesh dp_replicate=2,tp=4"), "{said}");
    let out = lab.ok(&["compile", mha, "--tp-mode", "2d", "--seq", "16", "-o", "one"]);
    assert!(String::from_utf8_lossy(&out.stderr).contains("no-effect"));
}

#[test]
fn a_vocabulary_is_padded() {
    let lab = Lab::new("vocabulary");
    // 66 tokens on 4 ranks: 2 of 68 stored are padding, which is little.
    let gpt2 = format!("{FIXTURES}/gpt2");
    let out = lab.ok(&["compile", &gpt2, "--seq", "16", "--mesh", "tp=4", "-o", "quiet"]);
    assert!(!String::from_utf8_lossy(&out.stderr).contains("padding"), "2 of 68 are no waste");
    // 9 tokens: 3 of 12.
    let c = lab.config("llama_mha", json!({ "vocab_size": 9 }));
    let out = lab.ok(&["compile", &c, "--seq", "16", "--mesh", "tp=4", "-o", "loud"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("warning[padding]: ") && said.contains("3 of 12"), "{said}");
    assert!(said.contains("= help: "), "{said}");
    // Fewer KV heads than ranks cut the axis in two; the vocabulary is still cut once.
    for vocab in [65, 69] {
        let c = lab.config("llama_gqa", json!({ "vocab_size": vocab }));
        let plan = format!("cut-{vocab}");
        lab.ok(&["compile", &c, "--seq", "16", "--mesh", "tp=4", "-o", &plan]);
        lab.ok(&["verify", &plan]);
    }
}

#[test]
fn check_lists_all_violations_at_once() {
    let lab = Lab::new("check");
    let c = lab.config(
        "llama_mha",
        json!({ "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96 }),
    );
    let flags = ["--mesh", "dp=3,tp=5", "--global-batch", "8", "--seq", "33", "--sp"];
    let args = [&["check", &c, "--format", "json"], &flags[..]].concat();
    let out = lab.shardc(&args);
    assert_eq!(out.status.code(), Some(1), "{}", String::from_utf8_lossy(&out.stderr));
    let found: Json = serde_json::from_slice(&out.stdout).expect("one JSON object");
    assert_eq!(found["ok"], json!(false));
    let all = found["violations"].as_array().expect("a list");
    let codes: Vec<&str> = all.iter().map(|v| v["code"].as_str().expect("a code")).collect();
    let want = [
        "heads-not-divisible",
        "kv-heads-against-tp",
        "batch-not-divisible",
        "sequence-too-long",
        "sequence-not-divisible",
    ];
    assert_eq!(codes, want);
    for v in all {
        let nearest = v["nearest"].as_array().expect("a list");
        assert!(
            !nearest.is_empty()
                && nearest
                    .iter()
                    .all(|n| n.as_str().is_some_and(|n| n.contains(|c: char| c.is_ascii_digit()))),
            "{v}"
        );
        assert!(
            v["rule"].is_string() && !v["values"].as_object().expect("a map").is_empty(),
            "{v}"
        );
    }
    // For people: the same, each with its help; and no weights are needed.
    let out = lab.shardc(&[&["check", &c], &flags[..]].concat());
    assert_eq!(out.status.code(), Some(1));
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(want.iter().all(|c| said.contains(&format!("error[{c}]"))), "{said}");
    assert_eq!(said.matches("= help: nearest legal: ").count(), want.len(), "{said}");
    let out = lab.ok(&["check", &c, "--mesh", "dp=2,tp=4", "--seq", "16", "--format", "json"]);
    let found: Json = serde_json::from_slice(&out.stdout).expect("one JSON object");
    assert_eq!(found, json!({ "ok": true, "violations": [] }));
}
