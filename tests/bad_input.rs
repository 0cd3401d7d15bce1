//! Bad input through the command line: each mistake ends with its exit status, its word code and a
//! way out, never with a panic, and leaves nothing behind.

use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");

/// A folder of one test, empty at first.
struct Lab(PathBuf);

impl Lab {
    fn new(name: &str) -> Lab {
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("bad_input").join(name);
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).expect("a folder for the test");
        Lab(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("in the lab")).expect("a folder");
        std::fs::write(&path, bytes).expect("a file");
        path
    }

    fn shardc(&self, args: &[&str]) -> Output {
        let mut c = Command::new(env!("CARGO_BIN_EXE_shardc"));
        c.current_dir(&self.0).args(args).output().expect("shardc starts")
    }

    fn ok(&self, args: &[&str]) -> Output {
        let out = self.shardc(args);
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        out
    }

    /// Runs a command that must fail so; the folder is as before. Returns what it said.
    fn refuses(&self, args: &[&str], status: i32, code: &str) -> String {
        let before = self.names();
        let out = self.shardc(args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(status), "{args:?}: {said}");
        assert!(said.contains(&format!("error[{code}]: ")), "{args:?}: no error[{code}]: {said}");
        assert!(said.contains("= help: "), "{args:?}: no help: {said}");
        assert_eq!(self.names(), before, "{args:?} left something behind");
        said
    }

    fn names(&self) -> Vec<PathBuf> {
        let mut out = vec![];
        let mut open = vec![self.0.clone()];
        while let Some(d) = open.pop() {
            for e in std::fs::read_dir(d).expect("a folder").map(|e| e.expect("an entry")) {
                out.push(e.path());
                if e.path().is_dir() {
                    open.push(e.path());
                }
            }
        }
        out.sort();
        out
    }

    /// A copy of a fixture; its path.
    fn model(&self, fixture: &str) -> String {
        for e in std::fs::read_dir(Path::new(FIXTURES).join(fixture)).expect("the fixture") {
            let from = e.expect("an entry").path();
            let name = from.file_name().expect("a name").to_string_lossy().into_owned();
            self.write(&format!("{fixture}/{name}"), std::fs::read(&from).expect("a file"));
        }
        fixture.to_string()
    }

    /// A config without weights, with some keys changed; its path.
    fn config(&self, fixture: &str, change: Json) -> String {
        let text = std::fs::read(Path::new(FIXTURES).join(fixture).join("config.json"));
        let mut c: Json = serde_json::from_slice(&text.expect("the fixture")).expect("JSON");
        for (k, v) in change.as_object().expect("an object") {
            c[k] = v.clone();
        }
        self.write("config.json", c.to_string());
        "config.json".into()
    }
}

/// `compile MODEL --seq 16 -o out` and more.
fn compile<'a>(model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let seq: &[&str] = if more.contains(&"--seq") { &[] } else { &["--seq", "16"] };
    [&["compile", model, "-o", "out"][..], more, seq].concat()
}

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
    let said = lab.refuses(&run, 2, "batch");
    assert!(said.contains("row 2, position 3 is 64") && said.contains("63"), "{said}");
    batch(&lab, 8, at(16, -1), token);
    let said = lab.refuses(&run, 2, "batch");
    assert!(said.contains("row 1, position 0 is -1"), "{said}");
    batch(&lab, 8, at(3, 64), token);
    lab.refuses(&run, 2, "batch");
    batch(&lab, 8, at(3, 1 << 40), token);
    lab.refuses(&run, 2, "batch");
    batch(&lab, 8, token, at(3, -7));
    lab.refuses(&run, 2, "batch");
    batch(&lab, 4, token, token);
    let said = lab.refuses(&run, 2, "batch");
    assert!(said.contains("--global-batch 4"), "{said}");
    lab.write("batch.safetensors", safetensors("{}", 0));
    lab.refuses(&run, 2, "missing-tensor");
    batch(&lab, 8, token, at(3, -100));
    lab.ok(&run);
    assert!(lab.path("dump.safetensors").exists());
    lab.refuses(&["run", "plan", "--data", "words:x"], 2, "data");
    lab.refuses(&["run", "plan", "--data", "bytes:*.none"], 2, "data");
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
    edit("source.ir", "func @model", "func @other", 2, "plan");
    edit("options.toml", "seq = 16", "seq = 17", 2, "plan");
    edit("plan.json", "\"schema\": 2", "\"schema\": 999", 2, "plan");
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
    refuses(&["--optimizer", "adam"], "flag");
    refuses(&["--mode", "test"], "flag");
    refuses(&["--decay", "some"], "flag");
    refuses(&["--lr-schedule", "linear"], "flag");
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
    refuses(&["--mesh", "tp=2", "--shard", "*.q_proj.weight=tq,-"], "shard");
    refuses(&["--mesh", "tp=2", "--shard", "*.q_proj.weight=tp,tp"], "shard");
    refuses(&["--mesh", "tp=4", "--shard", "*.q_proj.weight=tp:(3)2,-"], "sub-axis");
    refuses(&["--mesh", "tp=4", "--shard", "*.q_proj.weight=tp:(0)2,-"], "shard");
    let toml = |text: &str| {
        lab.write("shardc.toml", format!("model = \"{mha}\"\n{text}\n"));
        lab.refuses(&compile("shardc.toml", &[]), 2, "config-file")
    };
    let said = toml("mash = \"tp=2\"");
    assert!(said.contains("mash"), "{said}");
    toml("seq = \"long\"");
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
    let unbuilt: [&[&str]; 3] =
        [&["--dropout", "0.1"], &["--transport", "nccl"], &["--device", "cuda"]];
    for flags in unbuilt {
        lab.refuses(&compile(mha, flags), 4, "not-built");
    }
    for flags in [&["--dtype", "f16"][..], &["--grad-dtype", "bf16"]] {
        lab.refuses(&compile(mha, flags), 2, "flag");
    }
    let said =
        lab.refuses(&compile(mha, &["--mesh", "tp=2", "--memory", "4096"]), 3, "out-of-memory");
    // The tensors alive at the peak are named, and the limit that would do.
    assert!(said.matches("= why: %").count() >= 3, "{said}");
    let enough = said.rsplit_once("--memory ").expect("a limit").1.trim().to_string();
    lab.ok(&["compile", mha, "--seq", "16", "--mesh", "tp=2", "--memory", &enough, "-o", "fits"]);
    let less = (enough.parse::<usize>().expect("a number") - 1).to_string();
    lab.refuses(&compile(mha, &["--mesh", "tp=2", "--memory", &less]), 3, "out-of-memory");
    // The limit is that of the plan's ranks: what a check or a dump makes beside it has its own.
    lab.ok(&["verify", "fits"]);
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
    // Nothing left to train is a plan or a refusal, never a bug.
    let out = lab.shardc(&compile(mha, &["--freeze", "*", "--mesh", "dp=2,tp=2"]));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(matches!(out.status.code(), Some(0 | 2)), "{said}");
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
