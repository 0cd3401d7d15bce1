//! Layouts that no rule allows: every refusal has its code, the numbers, the rule and a way out, and
//! nothing is written.

use crate::lab::*;
use serde_json::{Value as Json, json};
use shardc_ir::plan::LrSchedule;
use shardc_passes::options::Options;
use shardc_testing::taken;

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
    for flag in ["--global-batch", "--microbatch", "--seq", "--node", "--gpus"] {
        assert!(lab.misuses(&["compile", mha, flag, "0"], flag).contains("0 is "), "{flag}");
    }
    lab.misuses(&compile(mha, &["--zero", "4"]), "--zero");
    lab.misuses(&["compile", mha, "--gpus", "16777217"], "--gpus");
    let said = refuses(mha, &["--seq", "33"], "sequence-too-long");
    assert!(said.contains("--seq 32"), "{said}");
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
    let split = [&ring[..], &["16", "--cp-split", "diagonal"]].concat();
    lab.misuses(&compile(mha, &split), "--cp-split");
    // Heads over cp leave no blocks to go around.
    let heads = ["16", "--shard", "model.layers.0.self_attn=?,-,cp"];
    let said = refuses(mha, &[&ring[..], &heads].concat(), "ring");
    assert!(said.contains("model.layers.0.self_attn") && said.contains("--cp-mode all-gather"));
}

/// Whatever their sizes: axes of size 1 too.
#[test]
fn an_axis_is_given_once() {
    let lab = Lab::new("twice");
    let mha = &format!("{FIXTURES}/llama_mha");
    for mesh in ["pp=1,pp=64", "tp=1,tp=3", "tp=3,tp=1", "tp=1,tp=1", "dp=1,dp=2"] {
        let said = lab.refuses(&compile(mha, &["--mesh", mesh]), 2, "mesh");
        assert!(said.contains("given twice"), "{mesh}: {said}");
    }
    for mesh in ["dp=2,dp_shard=2", "dp_replicate=1,dp=2", "dp=1,dp_replicate=2"] {
        let said = lab.refuses(&compile(mha, &["--mesh", mesh]), 2, "mesh");
        assert!(said.contains("dp is short for") && said.contains("dp_shard=2"), "{mesh}: {said}");
    }
}

/// Numbers that overflow are refused as others are.
#[test]
fn a_warmup_of_all_steps_there_can_be() {
    let lab = Lab::new("warmup");
    let mha = &format!("{FIXTURES}/llama_mha");
    let most = usize::MAX.to_string();
    let flags = ["--lr-schedule", "warmup-cosine", "--warmup", &most];
    let said = lab.refuses(&compile(mha, &flags), 2, "flag");
    assert!(said.contains("--warmup 100") && !said.contains("bug"), "{said}");
    // A cosine goes down.
    let flags = ["--lr-schedule", "warmup-cosine", "--lr", "0.001", "--min-lr", "0.01"];
    let said = lab.refuses(&compile(mha, &flags), 2, "flag");
    assert!(said.contains("--min-lr 0.01 is above --lr 0.001"), "{said}");
}

/// What the command line says is so, and what it leaves out is as shardc.toml has it.
#[test]
fn flags_win_over_a_file() {
    let lab = Lab::new("flags-win");
    let file = format!(
        "model = \"{FIXTURES}/llama_mha\"\nmesh = \"dp=2\"\nseq = 8\nsp = true\n\
         freeze = [\"*norm*\"]\nlr = 0.5\n"
    );
    lab.write("shardc.toml", file);
    let flags = ["--mesh", "tp=2", "--lr", "0.25", "--seed", "3"];
    lab.ok(&[&["compile", "shardc.toml", "-o", "out"][..], &flags].concat());
    let o = shardc::plan_dir::read(&lab.path("out")).expect("a plan").options;
    assert_eq!(o.mesh, [("tp".to_string(), 2)]);
    assert_eq!(o.lr, LrSchedule::Constant { lr: 0.25 });
    assert_eq!((o.seq, o.sp, o.seed), (8, true, 3));
    assert_eq!(o.freeze, ["*norm*"]);
}

/// Tokens that experts would cut are said in words.
#[test]
fn tokens_that_experts_cannot_cut() {
    let lab = Lab::new("tokens");
    let moe = &format!("{FIXTURES}/qwen3_moe");
    let flags = ["--mesh", "dp_replicate=4,dp_shard=2,ep=2,etp=1", "--microbatch", "1"];
    let out = lab.shardc(&compile(moe, &[&flags[..], &["--global-batch", "2"]].concat()));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && !said.contains("Tokens {"), "{said}");
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
  %attn, %lse = attention[0.5; mask=causal] %q, %q, %q, %at, %at : f32[8,18,2,4], f32[8,18,2]
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
        &["experts=8, ep=3", "--mesh dp_shard=3,etp=1"],
    );
    refuses(
        moe,
        &mesh("dp=8,tp=4,etp=32"),
        "expert-width-not-divisible",
        &["expert_ffn=16, etp=32", "etp=4"],
    );
    refuses(moe, &mesh("dp=2,ep=4,etp=1"), "experts-mesh", &["ep=4, etp=1", "dp_shard=2", "ep=2"]);
    refuses(moe, &mesh("dp_replicate=4,ep=4"), "experts-mesh", &["ep=4", "dp_shard=1"]);
    refuses(moe, &mesh("dp=2,ep=0"), "mesh", &["`ep=0`"]);
    refuses(moe, &mesh("dp=2,ep=2,ep=2"), "mesh", &["`ep=2`"]);
    let dense = &format!("{FIXTURES}/llama_mha");
    refuses(dense, &mesh("dp=4,ep=4,etp=1"), "no-experts", &["ep=4, etp=1", "--mesh dp_shard=4"]);
    // What was not asked for is not named.
    refuses(dense, &mesh("dp=2,tp=2,ep=2"), "no-experts", &["does not hold for ep=2\n"]);
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
    refuses(mha, "--mesh tp=4 --tp-mode 3d", "tp-grid", &["tp=4", "without --mesh"]);
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
    refuses(
        &odd,
        "--mesh tp=4 --tp-mode 2d",
        "grid-not-divisible",
        &["ffn=33", "q=2", "without --mesh"],
    );
    let odd = lab.config("llama_mha", json!({ "hidden_size": 62, "head_dim": 16 }));
    refuses(&odd, "--mesh tp=8 --tp-mode 3d", "grid-not-divisible", &["hidden=62", "(q * q)"]);
    refuses(mha, "--mesh tp=4 --tp-mode 2d --sp", "sp-needs-1d", &["tp=4", "--tp-mode 1d"]);
    assert!(lab.misuses(&["compile", mha, "--tp-mode", "4d"], "--tp-mode").contains("2.5d"));
    lab.misuses(&["compile", mha, "--tp-mode", "2.5d", "--tp-depth", "0"], "--tp-depth");
    refuses(mha, "--mesh tp=4 --tp-mode 2d --tp-depth 2", "flag", &["2.5d"]);
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
    assert!(!String::from_utf8_lossy(&out.stderr).contains("padding"), "2 of 68 are not waste");
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
        lab.ok(&["verify", &plan, "--numbers"]);
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
    assert_eq!(found, json!({ "$schema": "shardc/check/1", "ok": true, "violations": [] }));
}

/// A value of every flag of `compile` that is not its default.
const FLAGS: &[(&str, &str)] = &[
    ("--mesh", "pp=2"),
    ("--gpus", "2"),
    ("--order", "dp-tp-pp"),
    ("--node", "1"),
    ("--mode", "infer"),
    ("--global-batch", "16"),
    ("--microbatch", "2"),
    ("--seq", "8"),
    ("--dtype", "bf16"),
    ("--grad-dtype", "bf16"),
    ("--seed", "7"),
    ("--zero", "3"),
    ("--sp", ""),
    ("--moe-bound", "2"),
    ("--moe-capacity", "2"),
    ("--moe-aux", "0.1"),
    ("--moe-z-loss", "0.1"),
    ("--moe-bias-rate", "0.1"),
    ("--mtp", "0.3"),
    ("--cp-mode", "ring"),
    ("--cp-split", "zigzag"),
    ("--tp-mode", "2d"),
    ("--tp-depth", "2"),
    ("--tp-steps", "summa"),
    ("--schedule", "gpipe"),
    ("--chunks", "2"),
    ("--layers", "equal"),
    ("--speeds", "1"),
    ("--reshard-after-forward", "no"),
    ("--fuse", "no"),
    ("--dropout", "0.1"),
    ("--documents", "eod=1"),
    ("--recompute", "full"),
    ("--loss-chunks", "2"),
    ("--zero-accumulate", "gradients"),
    ("--memory", "1000B"),
    ("--hardware", "fast.toml"),
    ("--shard", "auto"),
    ("--optimizer", "sgd"),
    ("--optim", "*=lion"),
    ("--optim-file", "rules.ir"),
    ("--muon-dtype", "f32"),
    ("--lr", "0.5"),
    ("--lr-schedule", "warmup-cosine"),
    ("--warmup", "3"),
    ("--total-steps", "9"),
    ("--decay-steps", "3"),
    ("--min-lr", "0.0001"),
    ("--betas", "0.5,0.5"),
    ("--eps", "0.5"),
    ("--weight-decay", "0.5"),
    ("--decay", "all"),
    ("--clip", "0.5"),
    ("--loss-scale", "1024"),
    ("--initial-loss-scale", "1024"),
    ("--min-loss-scale", "2"),
    ("--loss-scale-window", "100"),
    ("--hysteresis", "1"),
    ("--freeze", "*1.*"),
    ("--lora", "r=1"),
    ("--lora-from", "adapter"),
    ("--train", "*1.*"),
    ("--shard", "*1.*=colwise"),
    ("--transport", "mpi"),
    ("--device", "tpu"),
    ("--arch", "sm_80"),
];

/// Flags that are about where a plan runs, not about what it is: they change its options alone. A
/// node warns where groups leave it.
const OF_THE_RUN: &[&str] = &["--node", "--transport"];

/// What of a plan depends on flags, but for the words of the flags themselves.
fn of_plan(lab: &Lab) -> Vec<Vec<u8>> {
    let names = ["programs/all.ir", "schedule.csv", "weights.json"];
    let mut all: Vec<Vec<u8>> =
        names.iter().map(|n| std::fs::read(lab.path("out").join(n)).expect("a file")).collect();
    let text = std::fs::read(lab.path("out/plan.json")).expect("plan.json");
    let plan: Json = serde_json::from_slice(&text).expect("JSON");
    all.push(plan["settings"].to_string().into_bytes());
    all
}

/// Every flag acts, or is refused, or is said to change nothing: on families and texts, with
/// annotations and without, alone and on meshes, for training and for inference.
#[test]
fn no_flag_is_silently_ignored() {
    let lab = Lab::new("flags");
    let help = String::from_utf8(lab.ok(&["compile", "--help"]).stdout).expect("text");
    let listed = help.lines().filter_map(|l| l.trim_start().strip_prefix("--"));
    let own = [
        "--dump-after",
        "--dump-all",
        "--format",
        "--from",
        "--help",
        "--output",
        "--prove",
        "--verify-each",
    ];
    for flag in listed.filter_map(|l| l.split([' ', ')', ',']).next()).map(|f| format!("--{f}")) {
        let known = FLAGS.iter().any(|f| f.0 == flag) || own.contains(&&*flag);
        assert!(known, "{flag} is not in the table of this test");
    }
    let text = std::fs::read_to_string(format!("{FIXTURES}/../cases/toy.ir")).expect("toy.ir");
    lab.write("toy.ir", &text);
    lab.write("rules.ir", "update @mine(%p: f32[*] param, %g: f32[*] grad) -> (f32[*] param) {\n  return sub %p, %g\n}\n");
    lab.write("fast.toml", "link = 400e9\n[links]\ntp = 1e12\n");
    let whole = "%w1: f32[32,10] param \"net1.weight\"";
    let marked = |with: &str| text.replacen(whole, &format!("{whole} @({with})"), 1);
    lab.write("open.ir", marked("-,-"));
    lab.write("cut.ir", format!("mesh [tp=2]\n{}", marked("tp,-")));
    let family = format!("{FIXTURES}/llama_mha");
    let experts = format!("{FIXTURES}/qwen3_moe");
    let cases: [&[&str]; 9] = [
        &[&family, "--seq", "16"],
        &[&family, "--seq", "16", "--mesh", "dp=2,tp=2", "--microbatch", "2"],
        &[&family, "--seq", "16", "--mode", "infer"],
        &[&family, "--seq", "16", "--dtype", "f16"],
        &[&experts, "--seq", "16", "--mesh", "dp=2,tp=2"],
        &["toy.ir"],
        &["toy.ir", "--mesh", "dp=2,tp=2", "--weight-decay", "0"],
        &["open.ir"],
        &["cut.ir"],
    ];
    let mut silent: Vec<String> = vec![];
    for (i, case) in cases.into_iter().enumerate() {
        let base = [&["compile"][..], case, &["-o", "out"]].concat();
        let said = |args: &[&str]| {
            let out = lab.shardc(args);
            (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
        };
        let (status, before) = said(&base);
        assert_eq!(status, Some(0), "{base:?}: {before}");
        let plain = of_plan(&lab);
        let some = FLAGS.iter().enumerate().filter(|(j, _)| taken(i + j, 3)).map(|(_, f)| f);
        // Where a text asks for no layout, it is what is done anyway, and said.
        let anyway = |f: &&(&str, &str)| f.1 == "auto" && before.contains(&format!("{} auto", f.0));
        for (flag, value) in some.filter(|f| !case.contains(&f.0) && !anyway(f)) {
            let value = if value.is_empty() { vec![] } else { vec![*value] };
            let args = [&base[..], &[flag], &value].concat();
            let (status, now) = said(&args);
            assert!(matches!(status, Some(0 | 2 | 3 | 4)), "{args:?}: {now}");
            let acts = status == Some(0) && of_plan(&lab) != plain;
            let told = now.lines().any(|l| l.contains(flag) && !before.contains(l));
            let run = OF_THE_RUN.contains(flag) && status == Some(0);
            if !(acts || told || run || status == Some(3)) {
                silent.push(format!("{args:?}: {now}"));
            }
        }
    }
    assert!(silent.is_empty(), "silently ignored:\n{}", silent.join("\n"));
}

/// A text with annotations and no mesh takes the mesh and the shardings of flags; what it says itself
/// stands. Without flags of the batch it is compiled for the batch that it has.
#[test]
fn flags_act_on_annotated_texts() {
    let lab = Lab::new("annotated");
    let text = std::fs::read_to_string(format!("{FIXTURES}/../cases/toy.ir")).expect("toy.ir");
    let whole = "%w2: f32[5,32] param \"net2.weight\"";
    lab.write("open.ir", text.replacen(whole, &format!("{whole} @(-,-)"), 1));
    let flags = ["--mesh", "dp=2,tp=2", "--shard", "net1.weight=tp,-"];
    lab.ok(&[&["compile", "open.ir", "-o", "out"][..], &flags].concat());
    let program = || std::fs::read_to_string(lab.path("out/programs/all.ir")).expect("a program");
    assert!(program().contains("f32[32@tp,10] param \"net1.weight\""), "{}", program());
    assert!(program().contains("i32[8@dp_replicate,4] input \"input_ids\""), "{}", program());
    lab.ok(&["verify", "out"]);
    let unknown = ["--mesh", "tp=2", "--shard", "nothing=tp"];
    let args = [&["compile", "open.ir", "-o", "other"][..], &unknown].concat();
    lab.refuses(&args, 2, "unknown-tensor");
    // With a mesh of its own, in two parts, and more asked for on top of it.
    let own = text.replacen(whole, &format!("{whole} @(-,tp:(2)2)"), 1);
    lab.write("own.ir", format!("mesh [tp=4]\n{own}"));
    let more = ["--shard", "net1.weight=tp:(1)2,-"];
    lab.ok(&[&["compile", "own.ir", "-o", "out"][..], &more].concat());
    assert!(program().contains("f32[5,32@tp:(2)2] param \"net2.weight\""), "{}", program());
    assert!(program().contains("f32[32@tp:(1)2,10] param \"net1.weight\""), "{}", program());
    lab.ok(&["verify", "out"]);
    let other = ["compile", "own.ir", "-o", "other", "--mesh", "tp=2"];
    lab.refuses(&other, 2, "mesh");
    let none = ["compile", "own.ir", "-o", "other", "--freeze", "nothing"];
    lab.refuses(&none, 2, "unknown-tensor");
}

/// A pipeline has as many microbatches as ranks, where the batch allows, and what it then idles is
/// printed by `compile`, `check` and the summary.
#[test]
fn the_bubble_is_said() {
    let lab = Lab::new("bubble");
    let deep = &format!("{FIXTURES}/llama_deep");
    let text = |args: &[&str]| String::from_utf8(lab.ok(args).stdout).expect("text");
    let json = |args: &[&str]| -> Json {
        let args = [args, &["--format", "json"]].concat();
        serde_json::from_str(&text(&args)).expect("JSON")
    };
    // (p - 1) / (m + p - 1) of 1F1B; a rank has at least one row of each microbatch.
    let cases: [(&[&str], usize, f64); 5] = [
        (&["--mesh", "pp=4"], 4, 3.0 / 7.0),
        (&["--mesh", "pp=4", "--microbatch", "8"], 1, 3.0 / 4.0),
        (&["--mesh", "pp=4,dp=4"], 2, 3.0 / 5.0),
        (&["--mesh", "pp=2,dp=2", "--schedule", "dualpipe-v"], 4, f64::NAN),
        (&["--mesh", "tp=2"], 1, 0.0),
    ];
    for (flags, microbatches, bubble) in cases {
        let asked = [&["compile", deep, "--seq", "16", "-o", "out"][..], flags].concat();
        let check = [&["check", deep, "--seq", "16"][..], flags].concat();
        let summary = ["inspect", "out", "--summary"];
        let report = json(&asked);
        assert_eq!(report["microbatches"], json!(microbatches), "{flags:?}");
        // Without a pipeline, `check` has nothing to say of it.
        let all = [report, json(&summary), json(&check)].map(|j| j["bubble"].as_f64());
        let all = all.map(|b| b.or((bubble == 0.0).then_some(0.0)));
        let same =
            |b: &Option<f64>| b.is_some_and(|b| bubble.is_nan() || (b - bubble).abs() < 1e-9);
        assert!(all.iter().all(same), "{flags:?}: {all:?}");
        let idle = all[0].expect("a number");
        let line = format!("bubble {:.1} %", 100.0 * idle);
        for said in [text(&asked), text(&check), text(&summary)] {
            assert_eq!(said.contains(&line), flags[1].contains("pp"), "{flags:?}: {said}");
            // Of 1F1B what is measured, over the work, is the textbook's: (p - 1) / m.
            let textbook =
                format!("1F1B by its formula, (p-1)/m: {:.2} %;", 100.0 * idle / (1.0 - idle));
            let of_1f1b = bubble > 0.0;
            assert!(!of_1f1b || said.contains(&textbook), "{flags:?}: {said}");
        }
    }
}

/// Six pieces of axes cut the tokens of experts here: more dims than a tensor has, if neighbours that
/// stay neighbours were not one.
#[test]
fn experts_on_five_axes() {
    let lab = Lab::new("five-axes");
    let moe = &format!("{FIXTURES}/qwen3_moe");
    let mesh = ["--mesh", "dp_replicate=2,dp_shard=2,cp=4,tp=4,ep=4,etp=2", "--sp"];
    lab.ok(&[&["compile", moe, "--seq", "16", "-o", "out"][..], &mesh].concat());
    lab.ok(&["verify", "out"]);
}

/// A model with experts that does not fit is refused with ways out: other layouts have other buffers.
#[test]
fn experts_that_do_not_fit() {
    let lab = Lab::new("mixtral");
    let sizes = json!({
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 1, "num_local_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 32768,
        "head_dim": 128
    });
    let c = lab.config("mixtral", sizes);
    let flags = ["--seq", "512", "--mesh", "tp=8", "--memory", "2GiB", "--node", "8"];
    let said =
        lab.refuses(&[&["compile", &c, "-o", "out"][..], &flags].concat(), 3, "out-of-memory");
    assert!(!said.contains("tp=16") && !said.contains(" time"), "{said}");
    assert!(said.contains("= help: use --") || said.contains("= help: the least"), "{said}");
}

/// What is offered is legal by all rules, those of stages among them; and what each rule alone wants is said, too.
#[test]
fn offers_keep_to_the_stages_there_are() {
    let lab = Lab::new("offers-of-stages");
    let c = lab.config("llama_gqa", json!({}));
    let said = |flags: &[&str]| {
        let out = lab.shardc(&[&["check", &c, "--seq", "16"], flags].concat());
        assert_eq!(out.status.code(), Some(1), "{flags:?}");
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    let deep = said(&["--mesh", "pp=100,tp=3", "--global-batch", "200", "--microbatch", "1"]);
    assert!(deep.contains("error[too-many-stages]") && !deep.contains("--mesh pp=100"), "{deep}");
    assert!(deep.contains("legal by this rule alone: tp="), "{deep}");
    let one = said(&["--mesh", "ep=8"]);
    assert!(one.contains("nearest legal: without --mesh"), "{one}");
    // Axes that nobody asked for are offered only where nothing else is legal.
    let other = said(&["--mesh", "tp=3"]);
    assert!(
        !other.contains("--mesh cp=") && other.contains("nearest legal: --mesh tp=2"),
        "{other}"
    );
}

/// No family has more parts around its layers than the rule of stages takes for possible.
#[test]
fn no_family_has_more_parts_than_the_rule_allows() {
    for entry in std::fs::read_dir(crate::lab::FIXTURES).expect("fixtures") {
        let dir = entry.expect("a fixture").path();
        if !dir.join("config.json").is_file() {
            continue;
        }
        let Ok(Some(f)) = shardc::facts(&dir) else { continue };
        let pp = f.layers + shardc::rules::AROUND + 1;
        let mesh = vec![("pp".to_string(), pp)];
        let o = Options { mesh, microbatch: 1, global_batch: 1, seq: 8, ..Options::default() };
        let Ok(input) = shardc::read_model(&dir, &o) else { continue };
        let d = shardc_passes::stages::not_too_many(&input.source.module.funcs[0], &o);
        assert_eq!(d.map_err(|d| d.code), Err("too-many-stages"), "{}", dir.display());
    }
}
