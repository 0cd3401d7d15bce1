//! Bad input through the command line: each mistake ends with its exit status, its word code and a
//! way out, never with a panic, and leaves nothing behind.

mod surroundings;
use crate::lab::*;
use serde_json::{Value as Json, json};

/// A safetensors file with this header and so many bytes of data.
fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.resize(out.len() + data, 0);
    out
}

#[test]
fn weights_that_lie() {
    let lab = Lab::new("weights");
    let m = lab.model("llama_mha");
    let file = "llama_mha/model.safetensors";
    let whole = std::fs::read(lab.path(file)).expect("the fixture");
    let refuses = |bytes: &[u8], code: &str, status: i32| {
        lab.write(file, bytes);
        lab.refuses(&compile(&m, &[]), status, code)
    };
    refuses(&whole[..whole.len() - 5], "truncated", 2);
    refuses(&whole[..100], "truncated", 2);
    refuses(&whole[..7], "truncated", 2);
    refuses(&[], "truncated", 2);
    refuses(&[&u64::MAX.to_le_bytes()[..], &[b'{'; 64]].concat(), "safetensors", 2);
    refuses(&[&(1u64 << 26).to_le_bytes()[..], &[b'{'; 64]].concat(), "truncated", 2);
    refuses(&safetensors("{\"a\": [", 0), "safetensors", 2);
    let one = |dtype: &str, shape: &str, to: &str| {
        format!(
            r#"{{"lm_head.weight":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{to}]}}}}"#
        )
    };
    refuses(&safetensors(&one("F32", "[64,32]", "8192"), 64), "truncated", 2);
    refuses(&safetensors(&one("F32", "[64,32]", "64"), 64), "safetensors", 2);
    refuses(
        &safetensors(&one("F32", "[4294967296,4294967296,4294967296]", "64"), 64),
        "safetensors",
        2,
    );
    refuses(&safetensors(&one("F32", "[2,2]", "16"), 16), "missing-tensor", 2);
    let parsed = 8 + u64::from_le_bytes(whole[..8].try_into().expect("8 bytes")) as usize;
    let header = std::str::from_utf8(&whole[8..parsed]).expect("text").to_string();
    let edit = |from: &str, to: &str| {
        assert!(header.contains(from), "{header}");
        let header = header.replacen(from, to, 1);
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &whole[parsed..]].concat()
    };
    let said = refuses(&edit("lm_head.weight", "lm_head.wait"), "missing-tensor", 2);
    assert!(said.contains("lm_head.weight") && said.contains("lm_head.wait"), "{said}");
    let said = refuses(&edit("[64,32]", "[32,64]"), "tensor-shape", 2);
    assert!(said.contains("[64, 32]") && said.contains("[32, 64]"), "{said}");
    refuses(&edit("\"F32\"", "\"F8_E4M3\""), "safetensors", 2);
    refuses(&edit("\"F32\"", "\"F9\""), "tensor-dtype", 4);
    // The same of the length of an I32 tensor: a type that is known, and no weight.
    refuses(&edit("\"F32\"", "\"I32\""), "tensor-dtype", 4);
    // An index that points out of the folder, or at a file that is not there.
    std::fs::remove_file(lab.path(file)).expect("was there");
    for name in ["../gpt2/model.safetensors", "/etc/hostname", "gone.safetensors"] {
        let index = json!({ "weight_map": { "lm_head.weight": name } }).to_string();
        lab.write("llama_mha/model.safetensors.index.json", index);
        let out = lab.shardc(&compile(&m, &[]));
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(matches!(out.status.code(), Some(2 | 5)), "{name}: {said}");
        assert!(said.contains("error[") && said.contains("= help: "), "{name}: {said}");
    }
    assert!(!lab.path("out").exists());
}

#[test]
fn weights_are_checked_before_a_run() {
    let lab = Lab::new("run_weights");
    let mha = format!("{FIXTURES}/llama_mha");
    lab.ok(&["compile", &mha, "--seq", "16", "-o", "plan"]);
    let other = format!("{FIXTURES}/gpt2");
    lab.refuses(&["run", "plan", "--weights", &other, "--save", "saved"], 2, "missing-tensor");
    lab.refuses(&["run", "plan", "--weights", "plan", "--save", "saved"], 2, "missing-weights");
    let m = lab.model("llama_mha");
    lab.write("quantized/config.json", r#"{"model_type": "llama", "quantization_config": {}}"#);
    let file = std::fs::read(lab.path(&m).join("model.safetensors")).expect("weights");
    lab.write("quantized/model.safetensors", &file);
    lab.refuses(&["run", "plan", "--weights", "quantized"], 4, "unsupported-config");
}

/// A folder whose head is not its embedding, although it should be tied: both are trained and saved. A plan that ties
/// them does not take its weights.
#[test]
fn a_head_that_differs_is_not_tied() {
    let lab = Lab::new("untied");
    let m = lab.model("llama_bias_tied");
    let file = std::fs::read(lab.path(&m).join("model.safetensors")).expect("weights");
    let data = 8 + u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
    let mut header: Json = serde_json::from_slice(&file[8..data]).expect("a header");
    let (at, len) = (file.len() - data, 64 * 32 * 4);
    header["lm_head.weight"] =
        json!({ "dtype": "F32", "shape": [64, 32], "data_offsets": [at, at + len] });
    let mut other = safetensors(&header.to_string(), 0);
    other.extend_from_slice(&file[data..]);
    other.resize(other.len() + len, 0);
    lab.ok(&["compile", &m, "--seq", "16", "-o", "tied"]);
    lab.write("llama_bias_tied/model.safetensors", other);
    lab.refuses(&["run", "tied", "--weights", &m, "--steps", "1"], 2, "untied-head");
    let out = lab.ok(&["compile", &m, "--seq", "16", "-o", "plan"]);
    assert!(String::from_utf8_lossy(&out.stderr).contains("warning[untied-head]"));
    lab.ok(&["verify", "plan"]);
    lab.ok(&["run", "plan", "--weights", &m, "--steps", "1", "--save", "saved"]);
    let config = std::fs::read(lab.path("saved/config.json")).expect("a config");
    let config: Json = serde_json::from_slice(&config).expect("JSON");
    assert_eq!(config["tie_word_embeddings"], false);
    let out = lab.ok(&["compile", "saved", "--seq", "16", "-o", "again"]);
    assert!(!String::from_utf8_lossy(&out.stderr).contains("untied-head"));
}

#[test]
fn text_that_is_no_program() {
    let lab = Lab::new("text");
    let refuses = |text: &str, code: &str| {
        lab.write("m.ir", text);
        lab.refuses(&compile("m.ir", &[]), 2, code)
    };
    refuses("func @f(", "syntax");
    refuses("hello", "syntax");
    refuses("func @f(%x: f32[4]) -> f32[4] {\n  return %y\n}\n", "undefined-value");
    refuses("func @f(%x: f32[99999999999999999999]) -> f32[4] {\n  return %x\n}\n", "size");
    refuses("func @f(%x: f32[4]) -> f32[4] {\n  return %x\n}\n", "source");
    refuses("func @f(%x: f32[4] param \"x\") -> f32[4] {\n  return %x\n}\n", "no-loss");
    lab.write("m.ir", [0xff, 0xfe, 0x00]);
    lab.refuses(&compile("m.ir", &[]), 2, "file");
    lab.refuses(&compile("none.ir", &[]), 2, "file");
}

/// A router that chooses for padding too, whatever its choice passes on the way to the experts.
#[test]
fn padding_that_chooses_experts() {
    let lab = Lab::new("choosing_padding");
    let mixtral = format!("{FIXTURES}/mixtral");
    let flags = ["--seq", "16", "--global-batch", "8", "--documents"];
    lab.ok(
        &[&["compile", &mixtral, "-o", "plan", "--prove", "no"][..], &flags, &["eod=2"]].concat()
    );
    let own = std::fs::read_to_string(lab.path("plan/model.ir")).expect("a model");
    let line = own.lines().find(|l| l.contains("%l0.expert = top_k")).expect("a choice");
    let ty = line.rsplit_once(" : ").expect("a type").1;
    let sizes: Vec<&str> = ty.trim_start_matches("i32[").trim_end_matches(']').split(',').collect();
    let [z, t, k] = sizes[..] else { panic!("{ty}") };
    let moved = format!(
        "{line}\n  %l0.turned = transpose[ztk->kzt] %l0.expert : i32[{k},{z},{t}]\n  \
         %l0.moved = transpose[kzt->ztk] %l0.turned : {ty}"
    );
    for text in [
        own.clone(),
        own.replace(line, &moved).replace("capacity=none] %l0.expert", "capacity=none] %l0.moved"),
    ] {
        lab.write("m.ir", &text);
        let check = |how: &'static str| [&["check", "m.ir"][..], &flags, &[how]].concat();
        lab.ok(&check("eod=2"));
        let said = String::from_utf8_lossy(&lab.shardc(&check("eod=2,pad=0")).stderr).into_owned();
        assert!(
            said.contains("error[source]: ") && said.contains("experts of padding too"),
            "{said}"
        );
    }
}

/// Programs that nothing is wrong with, and one that trains nothing.
#[test]
fn text_with_odd_weights() {
    let lab = Lab::new("odd_weights");
    let flags = ["--global-batch", "2", "--seq", "4"];
    let trains = |last: &str, args: &str| {
        format!(
            "func @model({args}, %targets: i32[2,4] input \"targets\") -> (f32[] sum \"loss\") {{\n{last}\
             \n  %s = reduce_sum[a->] %y : f32[]\n  %t = at_least[0.0] %targets : f32[2,4]\
             \n  %k = reduce_sum[ab->] %t : f32[]\n  %loss = mul %s, %k : f32[]\n  return %loss\n}}\n"
        )
    };
    // What is made of bf16 weights alone has f32 gradients: through a product of weights, too.
    let (u, v, w) = ("%u: f32[6] param \"u\"", "%v: f32[6] param \"v\"", "%w: f32[3] param \"w\"");
    let product =
        "  %p = mul %u, %v : f32[6]\n  %c = concat[d=9] %p, %w : f32[9]\n  %y = silu %c : f32[9]";
    lab.write("m.ir", trains(product, &[u, v, w].join(", ")));
    for dtype in ["f32", "bf16"] {
        let own = ["--dtype", dtype, "--mesh", "dp=2"];
        lab.ok(&compile("m.ir", &[&flags[..], &own].concat()));
        lab.ok(&["run", "out", "--steps", "2"]);
    }
    // Weights that nobody uses, beside a function of a few bytes.
    let unused = "func @model(%u: f32[1] param \"u\", %v: f32[6] param \"v\", %w: f32[1,8] param \"w\", \
        %input_ids: i32[2,4] input \"input_ids\") -> (f32[] output \"l\") {\n  \
        %x = reshape[p->p] %v : f32[6]\n  %s = reduce_sum[a->] %x : f32[]\n  %y = silu %s : f32[]\n  \
        %t = at_least[0.0] %input_ids : f32[2,4]\n  %k = reduce_sum[ab->] %t : f32[]\n  \
        %l = mul %y, %k : f32[]\n  return %l\n}\n";
    lab.write("m.ir", unused);
    lab.ok(&compile("m.ir", &[&flags[..], &["--mode", "infer"]].concat()));
    lab.ok(&["run", "out"]);
    std::fs::remove_dir_all(lab.path("out")).expect("it was made");
    // No gradient reaches a parameter.
    lab.write("m.ir", trains("  %f = stop_gradient %u : f32[6]\n  %y = silu %f : f32[6]", u));
    lab.refuses(&compile("m.ir", &flags), 2, "no-loss");
    let moe = format!("{FIXTURES}/deepseek_v3");
    let said = lab.refuses(&compile(&moe, &["--freeze", "*.weight"]), 2, "no-loss");
    assert!(said.contains("--freeze '*.weight'"), "{said}");
}

/// Writes a batch file of [8, 16].
fn batch(lab: &Lab, rows: usize, ids: impl Fn(usize) -> i64, labels: impl Fn(usize) -> i64) {
    let n = rows * 16;
    let numbers =
        |f: &dyn Fn(usize) -> i64| (0..n).flat_map(|i| f(i).to_le_bytes()).collect::<Vec<u8>>();
    let info = |from: usize| {
        let to = from + 8 * n;
        json!({ "dtype": "I64", "shape": [rows, 16], "data_offsets": [from, to] })
    };
    let header = json!({ "input_ids": info(0), "labels": info(8 * n) }).to_string();
    let file = [safetensors(&header, 0), numbers(&ids), numbers(&labels)].concat();
    lab.write("batch.safetensors", file);
}

#[test]
fn batches_out_of_range() {
    let lab = Lab::new("batches");
    let mha = format!("{FIXTURES}/llama_mha");
    lab.ok(&["compile", &mha, "--seq", "16", "-o", "plan"]);
    let run = [
        "run",
        "plan",
        "--batch",
        "batch.safetensors",
        "--dump",
        "dump.safetensors",
        "--steps",
        "1",
    ];
    let token = |_| 5;
    let at = |place: usize, x: i64| move |i| if i == place { x } else { 5 };
    batch(&lab, 8, token, at(35, 64));
    // Labels stand at their own tokens: position i is scored against label i + 1.
    let said = lab.refuses(&run, 2, "label-range");
    assert!(said.contains("64 in row 2, column 2") && said.contains("to 63"), "{said}");
    assert!(said.contains("it was read in step 1 from --batch batch.safetensors"), "{said}");
    batch(&lab, 8, at(16, -1), token);
    let said = lab.refuses(&run, 2, "token-range");
    assert!(said.contains("-1 in row 1, column 0"), "{said}");
    batch(&lab, 8, at(3, 64), token);
    lab.refuses(&run, 2, "token-range");
    batch(&lab, 8, at(3, 1 << 40), token);
    lab.refuses(&run, 2, "data");
    batch(&lab, 4, token, token);
    let said = lab.refuses(&run, 2, "data");
    assert!(said.contains("--global-batch 4"), "{said}");
    lab.write("batch.safetensors", safetensors("{}", 0));
    lab.refuses(&run, 2, "data");
    // Any negative label is ignored.
    batch(&lab, 8, token, at(3, -7));
    lab.ok(&run);
    let other = std::fs::read(lab.path("dump.safetensors")).expect("a dump");
    batch(&lab, 8, token, at(3, -100));
    lab.ok(&run);
    assert_eq!(std::fs::read(lab.path("dump.safetensors")).expect("a dump"), other);
    assert!(lab.path("dump.safetensors").exists());
    lab.refuses(&["run", "plan", "--data", "words:x"], 2, "data");
    lab.refuses(&["run", "plan", "--data", "bytes:*.none"], 2, "data");
    lab.refuses(&["run", "plan", "--data", "text:*.json"], 2, "data");
    let tokenizer = |data| ["run", "plan", "--data", data, "--tokenizer", "."];
    lab.refuses(&tokenizer("text:*.none"), 2, "data");
    lab.refuses(&tokenizer("bytes:*.json"), 2, "flag");
    if cfg!(not(feature = "tokenizers")) {
        lab.write("some.txt", "text");
        let said = lab.refuses(&tokenizer("text:some.txt"), 4, "not-built");
        assert!(said.contains("--no-default-features"), "{said}");
    }
}

#[test]
fn plans_that_do_not_fit() {
    let lab = Lab::new("plans");
    let mha = format!("{FIXTURES}/llama_mha");
    let many =
        ["compile", &mha, "--seq", "4", "--mesh", "dp=257", "--global-batch", "257", "-o", "many"];
    lab.ok(&many);
    let said = lab.refuses(&["run", "many"], 5, "too-many-ranks");
    assert!(said.contains("257") && said.contains("256"), "{said}");
    for mesh in
        ["dp=99999999999,tp=99999999999", "dp=4294967296,tp=4294967296", "dp=1000000,tp=1000000"]
    {
        lab.refuses(&compile(&mha, &["--mesh", mesh]), 2, "mesh");
    }
    for mesh in
        ["tp", "tp=", "tp=0", "tp=-2", "tp=2,tp=2", "9=2", "=2", "tp=99999999999999999999999"]
    {
        lab.refuses(&compile(&mha, &["--mesh", mesh]), 2, "mesh");
    }
    lab.ok(&["compile", &mha, "--seq", "16", "--mesh", "tp=2", "-o", "plan"]);
    let edit = |file: &str, from: &str, to: &str, status: i32, code: &str| {
        let path = lab.path("plan").join(file);
        let old = std::fs::read_to_string(&path).expect("a file of the plan");
        assert!(old.contains(from), "{file} has no `{from}`");
        lab.write(&format!("plan/{file}"), old.replacen(from, to, 1));
        for command in ["run", "inspect"] {
            lab.refuses(&[command, "plan"], status, code);
        }
        // To verify, it is a check that fails.
        let out = lab.shardc(&["verify", "plan", "--format", "json"]);
        let found: Json = serde_json::from_slice(&out.stdout).expect("JSON");
        assert_eq!((out.status.code(), &found["ok"]), (Some(1), &json!(false)), "{file}: {found}");
        lab.write(&format!("plan/{file}"), old);
    };
    edit("programs/all.ir", "all_reduce[tp]", "fan_out[tp]", 2, "plan");
    edit("programs/all.ir", "func @forward", "func @fourward", 2, "plan");
    edit("model.ir", "func @model", "func @other", 2, "plan");
    edit("options.toml", "seq = 16", "seq = 17", 2, "plan");
    let own = format!("\"schema\": {}", shardc::SCHEMA);
    edit("plan.json", &own, "\"schema\": 999", 2, "plan");
    edit("plan.json", "\"peak_bytes\": ", "\"peak_bytes\": 1", 2, "plan");
    edit("plan.json", "\"microbatches\": 1", "\"microbatches\": 0", 2, "plan");
    let zigzag = "\"kind\": \"zigzag\", \"ranks\": 0";
    edit("plan.json", "\"kind\": \"contiguous\"", zigzag, 2, "plan");
    edit("plan.json", "{", "[", 2, "plan");
    edit("weights.json", "[", "{", 2, "plan");
    for name in ["plan.json", "programs/all.ir", "weights.json", "config.json"] {
        let path = lab.path("plan").join(name);
        let old = std::fs::read(&path).expect("a file of the plan");
        std::fs::remove_file(&path).expect("was there");
        lab.refuses(&["run", "plan"], 2, "plan");
        lab.write(&format!("plan/{name}"), old);
    }
    lab.refuses(&["run", "nowhere"], 2, "plan");
    lab.ok(&["inspect", "plan"]);
    // A folder that holds something else is not replaced.
    lab.write("mine/notes.txt", "keep");
    let said = lab.refuses(&["compile", &mha, "--seq", "16", "-o", "mine"], 2, "output");
    assert!(said.contains("mine"), "{said}");
}

#[test]
fn words_that_are_not_known() {
    let lab = Lab::new("words");
    let mha = &format!("{FIXTURES}/llama_mha");
    let c = lab.config("llama_mha", json!({ "model_type": "lama" }));
    let said = lab.refuses(&compile(&c, &[]), 4, "unknown-model-type");
    assert!(said.contains("llama"), "{said}");
    let refuses = |flags: &[&str], code: &str| lab.refuses(&compile(mha, flags), 2, code);
    let near = lab.misuses(&compile(mha, &["--optimizer", "adam"]), "--optimizer");
    assert!(near.contains("[possible values: adamw, sgd, lion, adafactor, muon]"), "{near}");
    assert!(near.contains("a similar value exists: 'adamw'"), "{near}");
    // A word that is a line end makes no line of what is said.
    let out = lab.shardc(&compile(mha, &["--bogus=\n"]));
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.lines().count() > 2 && !said.contains("\\n\\n"), "{said}");
    for flag in ["--global-batch", "--seq"] {
        let plan = ["plan", mha, "--gpus", "4", "--machine", "h100-sxm", flag, "0"];
        lab.refuses(&plan, 2, "flag");
    }
    for (flag, word) in [("--mode", "test"), ("--decay", "some"), ("--lr-schedule", "linear")] {
        lab.misuses(&compile(mha, &[flag, word]), flag);
    }
    refuses(&["--betas", "0.9"], "flag");
    refuses(&["--betas", "0.9,1.0"], "flag");
    refuses(&["--eps=-1"], "flag");
    refuses(&["--lr", "nan"], "flag");
    refuses(&["--clip", "0"], "flag");
    refuses(&["--weight-decay", "nan"], "flag");
    refuses(&["--weight-decay=-0.1"], "flag");
    refuses(&["--shard", "q_proj"], "shard");
    refuses(&["--shard", "*.q_proj.weight=tp"], "shard");
    refuses(&["--shard", "nothing=-,-"], "unknown-tensor");
    let said = refuses(&["--shard", "*.q_proj.weigth=-,-"], "unknown-tensor");
    assert!(said.contains("`model.layers.0.self_attn.q_proj.weight`"), "{said}");
    let said = refuses(&["--freeze", "model.layer.0.*.bias"], "unknown-tensor");
    assert!(said.contains("--freeze 'model.layer.0.*.bias'"), "{said}");
    refuses(&["--mesh", "tp=2", "--shard", "*.q_proj.weight=tq,-"], "shard");
    refuses(&["--mesh", "tp=2", "--shard", "*.q_proj.weight=tp,tp"], "shard");
    refuses(&["--mesh", "tp=4", "--shard", "*.q_proj.weight=tp:(3)2,-"], "sub-axis");
    refuses(&["--mesh", "tp=4", "--shard", "*.q_proj.weight=tp:(0)2,-"], "shard");
    let experts = &format!("{FIXTURES}/mixtral");
    let one = ["--freeze", "*.experts.0.*"];
    let said = lab.refuses(&compile(experts, &one), 4, "part-of-stack");
    assert!(said.contains("'model.layers.0.block_sparse_moe.experts.*.w1.weight'"), "{said}");
    let one = ["--mesh", "tp=2", "--shard", "*.experts.3.w2.weight=-,-,tp"];
    lab.refuses(&compile(experts, &one), 4, "part-of-stack");
    let toml = |text: &str| {
        lab.write("shardc.toml", format!("model = \"{mha}\"\n{text}\n"));
        lab.refuses(&compile("shardc.toml", &[]), 2, "config-file")
    };
    let said = toml("mash = \"tp=2\"");
    assert!(said.contains("did you mean mesh?"), "{said}");
    for (line, needed) in [
        ("seq = \"long\"", "a whole number is needed, not \"long\", in `seq`"),
        ("seq = -5", "a whole number is needed, not -5"),
        ("sp = 1", "true or false is needed, not 1"),
        ("lr = \"x\"", "a number is needed, not \"x\""),
        ("shard = 3", "a text or a list of texts is needed, not 3"),
        ("dropout = true", "text in quotes, or a number is needed, not true"),
        ("dtype = \"float64\"", "`float64` is none of f32, bf16, f16"),
    ] {
        let said = toml(line);
        assert!(said.contains(needed), "{said}");
    }
    toml("seq = ");
    lab.write("shardc.toml", "mesh = \"tp=2\"");
    lab.refuses(&compile("shardc.toml", &[]), 2, "config-file");
    // What the parser of the command line refuses itself.
    for args in [
        &["compile"][..],
        &["compile", mha, "--sqe", "3"],
        &["compile", mha, "--seq", "x"],
        &["complie", mha],
    ] {
        let out = lab.shardc(args);
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        assert!(String::from_utf8_lossy(&out.stderr).contains("--help"), "{args:?}");
    }
}

#[test]
fn what_is_not_built_or_does_not_fit() {
    let lab = Lab::new("limits");
    let mha = &format!("{FIXTURES}/llama_mha");
    lab.refuses(&compile(mha, &["--dropout", "1.0"]), 2, "flag");
    let grid = ["--dropout", "0.1", "--mesh", "tp=4", "--tp-mode", "2d"];
    lab.refuses(&compile(mha, &grid), 4, "not-built");
    for (flag, word) in
        [("--device", "tpu"), ("--transport", "gloo"), ("--dtype", "f8"), ("--hysteresis", "0")]
    {
        lab.misuses(&compile(mha, &[flag, word]), flag);
    }
    let devices: [&[&str]; 2] = [&["--arch", "sm_90a"], &["--device", "cuda", "--arch", "sm_70"]];
    let types: [&[&str]; 4] = [
        &["--grad-dtype", "bf16"],
        &["--dtype", "f16", "--grad-dtype", "bf16"],
        &["--dtype", "f16", "--loss-scale", "1000"],
        &["--dtype", "f16", "--initial-loss-scale", "2", "--min-loss-scale", "4"],
    ];
    for flags in types.into_iter().chain(devices) {
        lab.refuses(&compile(mha, flags), 2, "flag");
    }
    let said =
        lab.refuses(&compile(mha, &["--mesh", "tp=2", "--memory", "4096B"]), 3, "out-of-memory");
    for (flags, word) in [
        (["--schedule", "zbh1"], "did you mean zb-h1?"),
        (["--recompute", "ful"], "did you mean --recompute full?"),
        (["--recompute", "ops:gelux"], "did you mean gelu?"),
    ] {
        let out = lab.shardc(&compile(mha, &flags));
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(2) && said.contains(word), "{said}");
        assert!(said.lines().all(|l| l.len() < 250) || word.contains("gelu"), "{said}");
    }
    let out = lab.shardc(&["compile", mha, "--seq", "8k"]);
    let short = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(2) && short.contains("8192 or 8000"), "{short}");
    // A number that nobody means is asked about at once, and a unit may be in letters of any case.
    let asked = lab.refuses(&compile(mha, &["--memory", "80"]), 2, "flag");
    assert!(asked.contains("80 is bytes: did you mean 80GiB?"), "{asked}");
    for amount in ["80G", "80gb", "80gib", "80GiB"] {
        lab.ok(&compile(mha, &["--memory", amount]));
    }
    // The tensors alive at the peak are named, and the limit that would do.
    assert!(said.contains("= why: at the peak: ") && said.contains("= why: %"), "{said}");
    assert!(said.contains("--> --memory 4096B\n"), "as it was given: {said}");
    let enough = said.rsplit_once("--memory ").expect("a limit").1.trim().to_string();
    lab.ok(&["compile", mha, "--seq", "16", "--mesh", "tp=2", "--memory", &enough, "-o", "fits"]);
    let bytes: usize = enough.trim_end_matches('B').parse().expect("a number");
    let less = format!("{}B", bytes - 1);
    lab.refuses(&compile(mha, &["--mesh", "tp=2", "--memory", &less]), 3, "out-of-memory");
    // The limit is that of the plan's ranks: what a check or a dump makes beside it has its own.
    lab.ok(&["verify", "fits", "--numbers"]);
    batch(&lab, 8, |_| 5, |_| 5);
    lab.ok(&[
        "run",
        "fits",
        "--batch",
        "batch.safetensors",
        "--dump",
        "dump.safetensors",
        "--steps",
        "1",
    ]);
    lab.refuses(&["run", "fits", "--products", "cublaslt"], 2, "flag");
    // Numbers beyond what a schedule may have are refused with the limit, before anything is made.
    for (flags, limit) in [
        (&["--global-batch", "131073"][..], "m <= 131072"),
        (&["--global-batch", "10000000"], "m <= 131072"),
        (&["--global-batch", "65537", "--mesh", "pp=65537"], "p * v <= 65536"),
        (&["--global-batch", "8", "--mesh", "pp=2", "--chunks", "40000"], "p * v <= 65536"),
    ] {
        let flags = [&["--microbatch", "1", "--schedule", "looped-bfs"], flags].concat();
        let said = lab.refuses(&compile(mha, &flags), 2, "schedule-rule");
        assert!(said.contains(limit), "{said}");
    }
    // Nothing left to train is a plan or a refusal, never a bug.
    let out = lab.shardc(&compile(mha, &["--freeze", "*", "--mesh", "dp=2,tp=2"]));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(matches!(out.status.code(), Some(0 | 2)), "{said}");
}
