//! What hostile input once did, each with its own words: panics, an overflow of the stack, proofs without end, text
//! without end, and names that a terminal obeys.

use super::archive::replaced;
use super::limits::{self, Ran};
use shardc::plan_dir::reseal;
use shardc_ir::diag::is_hidden;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder with a model, its plan in `plan`, and a copy of that to edit.
fn lab(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("found").join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder");
    let model = Path::new(crate::FIXTURES).join("llama_mha");
    let made = run(&dir, &format!("compile {} --seq 8 --global-batch 2 -o plan", model.display()));
    assert!(made.good(), "{}", made.err);
    dir
}

fn run(dir: &Path, line: &str) -> Ran {
    let mut c = Command::new(limits::shardc());
    c.args(line.split(' '));
    limits::run(c, dir)
}

/// The run is refused with this code, or ends with one of these statuses.
fn ends(ran: &Ran, statuses: &[&str], code: &str) {
    // `verify` prints what is wrong as its result.
    let all = format!("{}{}", ran.out, ran.err);
    let said = code.is_empty() || all.contains(&format!("error[{code}]"));
    let known = statuses.contains(&ran.outcome.as_str());
    assert!(known && said && !ran.defect(), "{}, {} s: {}", ran.outcome, ran.seconds, ran.err);
}

/// One text of a file becomes another.
fn edit(dir: &Path, file: &str, from: &str, to: &str) {
    let path = dir.join(file);
    let text = std::fs::read_to_string(&path).expect("a text");
    assert!(text.contains(from), "no `{from}` in {file}");
    std::fs::write(path, text.replace(from, to)).expect("written");
}

#[test]
fn models_with_collectives_and_too_few_results() {
    let dir = lab("texts");
    let text = |op: &str, ty: &str| {
        let text = format!(
            "func @model(%x: {ty} input \"x\") -> ({ty} output \"y\") {{\n  %y = {op} %x : {ty}\n  return %y\n}}\n"
        );
        std::fs::write(dir.join("m.ir"), text).expect("written");
        run(&dir, "check m.ir --mesh tp=2")
    };
    for op in ["all_reduce[tp]", "fan_out[tp]", "all_gather[tp; dim=0]", "slice[tp; dim=0]"] {
        ends(&text(op, "f32[4]"), &["2"], "phase");
    }
    let route = "route[g=2,e=2; rows=6; capacity=none]";
    ends(&text(route, "i32[2,3,2]"), &["2"], "arity");
    ends(&text("take[ab,b->ab]", "i32[2,3]"), &["2"], "attribute");
}

#[test]
fn a_model_without_arguments() {
    let dir = lab("nothing");
    let text =
        "func @model() -> (f32[3,4] output \"y\") {\n  %y = fill[0.0] : f32[3,4]\n  return %y\n}\n";
    std::fs::write(dir.join("m.ir"), text).expect("written");
    ends(&run(&dir, "compile m.ir --mode infer --transport nccl -o out"), &["0", "2"], "");
}

#[test]
fn archives_with_numbers_that_are_none() {
    let dir = lab("archives");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/imports/bert_padded.pt2");
    let own = std::fs::read(path).expect("an archive");
    std::fs::write(dir.join("nan.pt2"), replaced(&own, "1e-12", "\"NaN\"")).expect("written");
    for command in ["check nan.pt2", "import nan.pt2"] {
        ends(&run(&dir, command), &["2", "4"], "");
    }
}

#[test]
fn options_that_no_flag_gives() {
    let dir = lab("options");
    let own = std::fs::read_to_string(dir.join("plan/options.toml")).expect("options");
    for (key, was, now) in [
        ("dropout", "\"nothing\"", "{ rate = 8.0 }"),
        ("dropout", "\"nothing\"", "{ rate = -0.5 }"),
        ("zero", "0", "9"),
        ("ep", "1", "0"),
        ("weight_decay", "0.01", "-1.0"),
        ("grad_dtype", "\"f32\"", "\"i32\""),
    ] {
        let line = |value: &str| format!("\n{key} = {value}\n");
        edit(&dir, "plan/options.toml", &line(was), &line(now));
        reseal(&dir.join("plan")).expect("a plan");
        for command in ["verify plan --tiny", "inspect plan --phase partition", "prove plan --text"]
        {
            let ran = run(&dir, command);
            ends(&ran, &["1", "2"], "plan");
            assert!((ran.out + &ran.err).contains(&format!("{key} is ")), "{key}, {command}");
        }
        std::fs::write(dir.join("plan/options.toml"), &own).expect("written");
    }
}

#[test]
fn proofs_of_edited_models_end() {
    let dir = lab("proofs");
    let own = std::fs::read_to_string(dir.join("plan/model.ir")).expect("a model");
    for (from, to) in [
        ("i32[2,8]", "i32[16,8]"),
        ("%l1.q.2, %l1.k.2, %l1.v.1", "%l1.q.2, %targets, %l1.v.1"),
        ("%l1.q.2, %l1.k.2, %l1.v.1", "%l0.mlp_out, %l1.k.2, %l1.v.1"),
        ("%embed_tokens: f32[64,32]", "%embed_tokens: f32[64,16]"),
        ("silu %l0.gate", "silu %l0.variance"),
        ("rsqrt %l0.variance.1", "rsqrt %hidden"),
        ("[2,8", "[2,9"),
        ("i32[8]", "i32[9]"),
    ] {
        edit(&dir, "plan/model.ir", from, to);
        reseal(&dir.join("plan")).expect("a plan");
        for command in ["prove plan --by both", "prove plan --by both --text"] {
            ends(&run(&dir, command), &["1", "2", "4"], "");
        }
        std::fs::write(dir.join("plan/model.ir"), &own).expect("written");
    }
    // As much as evaluation takes at once, and more.
    let model = Path::new(crate::FIXTURES).join("llama_mha");
    for sizes in ["--seq 8 --global-batch 8", "--seq 16 --global-batch 16"] {
        let made = run(&dir, &format!("compile {} {sizes} --prove no -o large", model.display()));
        assert!(made.good(), "{}", made.err);
        ends(&run(&dir, "prove large --by both"), &["0"], "");
    }
}

#[test]
fn a_small_stack_is_enough() {
    let dir = lab("stack");
    for command in ["inspect plan --summary", "compile plan/model.ir --mesh tp=2", "prove plan"] {
        let mut c = Command::new("sh");
        c.arg("-c").arg(format!("ulimit -s 64; exec {} {command}", limits::shardc()));
        ends(&limits::run(c, &dir), &["0"], "");
    }
}

#[test]
fn names_of_files_do_not_command_terminals() {
    let dir = lab("names");
    let evil = "a\u{1b}[31m\u{9b}2J\u{7f}\u{202e}";
    // In standard output: a plan whose family is called so.
    let json = "\"family\": \"a\\u001b[31m\\u009b2J\"";
    edit(&dir, "plan/plan.json", "\"family\": \"llama\"", json);
    reseal(&dir.join("plan")).expect("a plan");
    let mut said = vec![run(&dir, "inspect plan --summary")];
    assert!(said[0].out.contains("a\\u001b[31m\\u009b2J"), "{}", said[0].out);
    said.push(run(&dir, "inspect plan --summary --format json"));
    let back: serde_json::Value = serde_json::from_str(&said[1].out).expect("JSON");
    assert_eq!(back["family"], "a\u{1b}[31m\u{9b}2J");
    // In standard error: folders, flags, keys of configs, tensors, text.
    said.push(run(&dir, &format!("inspect {evil}")));
    said.push(run(&dir, &format!("inspect {evil} --format json")));
    said.push(run(&dir, &format!("inspect plan --{evil}")));
    said.push(run(&dir, &format!("inspect plan {evil}")));
    std::fs::create_dir_all(dir.join("m")).expect("a folder");
    let config = "{\"model_type\": \"a\\u001b[31m\\u009b2J\"}";
    std::fs::write(dir.join("m/config.json"), config).expect("written");
    said.push(run(&dir, "check m"));
    std::fs::write(dir.join("m.ir"), format!("func @model({evil}")).expect("written");
    said.push(run(&dir, "check m.ir"));
    let header =
        "{\"a\\u001b[31m\": {\"dtype\": \"F9\", \"shape\": [1], \"data_offsets\": [0, 4]}}";
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat();
    std::fs::write(dir.join("b.safetensors"), bytes).expect("written");
    said.push(run(&dir, "run plan --steps 1 --batch b.safetensors"));
    for ran in &said {
        let obeyed = |text: &str| text.chars().find(|c| *c != '\n' && *c != '\t' && is_hidden(*c));
        assert_eq!(obeyed(&ran.out).or(obeyed(&ran.err)), None, "{:?} {:?}", ran.out, ran.err);
    }
    let good = said[2..].iter().find(|ran| ran.good() || ran.err.is_empty());
    assert!(good.is_none(), "all of these are refused");
}

/// Trains on a text by a tokenizer of the folder.
#[cfg(feature = "tokenizers")]
const RUN_WORDS: &str = "run words --steps 1 --threads 1 --kernels interpreted --data text:text.txt --tokenizer tokenizer.json";

#[cfg(feature = "tokenizers")]
#[test]
fn tokenizers_make_no_text_without_end() {
    use serde_json::{Value as Json, json};
    let dir = lab("tokenizers");
    let fixture = Path::new(crate::FIXTURES).join("data/tokenizer/tokenizer.json");
    let own: Json =
        serde_json::from_slice(&std::fs::read(fixture).expect("a file")).expect("a tokenizer");
    std::fs::create_dir_all(dir.join("big")).expect("a folder");
    let config = Path::new(crate::FIXTURES).join("llama_mha/config.json");
    std::fs::copy(config, dir.join("big/config.json")).expect("a copy");
    edit(&dir, "big/config.json", "\"vocab_size\": 64", "\"vocab_size\": 600");
    assert!(run(&dir, "compile big --seq 8 --global-batch 1 --prove no -o words").good());
    std::fs::write(dir.join("text.txt"), "a".repeat(200)).expect("written");
    let tried = |changes: &[(&str, Json)]| {
        let mut new = own.clone();
        for (path, value) in changes {
            *new.pointer_mut(path).unwrap_or_else(|| panic!("no {path}")) = value.clone();
        }
        std::fs::write(dir.join("tokenizer.json"), new.to_string()).expect("written");
        run(&dir, RUN_WORDS)
    };
    let replace = |from: Json, to: &str| json!({"type": "Replace", "pattern": from, "content": to});
    let five = |from: Json| {
        let one = replace(from, &"a".repeat(100));
        json!({"type": "Sequence", "normalizers": [one, one, {"type": "Sequence", "normalizers": [one, one, one]}]})
    };
    let refused = |changes: &[(&str, Json)], words: &str| {
        let ran = tried(changes);
        ends(&ran, &["2"], "tokenizer");
        assert!(ran.err.contains(words) && ran.resident < 300 << 20, "{}", ran.err);
    };
    refused(&[("/normalizer", five(json!({"String": "a"})))], "a normalizer makes 20000 bytes");
    refused(&[("/normalizer", five(json!({"Regex": ""})))], "a normalizer makes");
    refused(&[("/normalizer", json!({"type": "Prepend", "prepend": "b".repeat(9999)}))], "makes");
    let bytes = json!({"type": "ByteLevel"});
    refused(
        &[
            ("/normalizer", json!({"type": "Sequence", "normalizers": vec![&bytes; 60]})),
            ("/added_tokens/0/content", json!("é")),
            ("/added_tokens/0/normalized", json!(true)),
        ],
        "a normalizer makes",
    );
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false});
    std::fs::write(dir.join("text.txt"), "é".repeat(100)).expect("written");
    refused(
        &[("/pre_tokenizer", json!({"type": "Sequence", "pretokenizers": vec![bytes; 60]}))],
        "a pre-tokenizer makes",
    );
    let twice =
        json!([{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
    refused(&[("/post_processor/single", twice)], "write a text 2 times");
    let begin = json!({"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}});
    refused(&[("/post_processor/single", json!(vec![begin; 2000]))], "2000 tokens around");
    refused(&[("/model/unk_token", json!("u".repeat(1000)))], "a name of 1000 bytes");
    let two = own.to_string().replacen('{', "{\"normalizer\": null, ", 1);
    std::fs::write(dir.join("tokenizer.json"), two).expect("written");
    let ran = run(&dir, RUN_WORDS);
    ends(&ran, &["2"], "tokenizer");
    assert!(ran.err.contains("duplicate field"), "{}", ran.err);
    // What honest ones do stays: spaces of three bytes, accents apart, bytes as letters.
    let honest = json!({"type": "Sequence", "normalizers": [
        {"type": "NFKD"}, replace(json!({"String": " "}), "▁"), replace(json!({"Regex": "a+"}), "…")]});
    std::fs::write(dir.join("text.txt"), "ﬃ é a b c d e f g ﷺ ".repeat(20)).expect("written");
    ends(&tried(&[("/normalizer", honest)]), &["0"], "");
}
