//! `shardc generate`: the tokens that transformers writes (`tests/fixtures/generate.py`), from all that it takes.

use crate::lab::{FIXTURES, Lab};
use serde_json::{Value as Json, json};
use shardc_testing::taken;
use std::process::{Command, Output, Stdio};

/// A tokenizer of so many letters, each a token.
fn letters(lab: &Lab, folder: &str, n: u32) {
    let letter = |i: u32| char::from_u32(0x100 + i).expect("a letter").to_string();
    let vocab: serde_json::Map<String, Json> = (0..n).map(|i| (letter(i), i.into())).collect();
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "Split", "pattern": { "Regex": "." }, "behavior": "Isolated", "invert": false },
        "post_processor": null, "decoder": { "type": "Fuse" },
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": letter(0) },
    });
    lab.write(&format!("{folder}/tokenizer.json"), json.to_string());
}

fn text(ids: &Json) -> String {
    let one = |id: &Json| char::from_u32(0x100 + id.as_u64().expect("a token") as u32);
    ids.as_array().expect("tokens").iter().filter_map(one).collect()
}

const FAST: [&str; 4] = ["--kernels", "interpreted", "--threads", "1"];

/// What is written, sample by sample.
fn written(lab: &Lab, args: &[&str]) -> Vec<Json> {
    let out = lab.ok(&[&["generate"], args, &FAST, &["--format", "json"]].concat());
    let text = String::from_utf8(out.stdout).expect("text");
    text.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect()
}

fn reference() -> Json {
    let text = std::fs::read_to_string(format!("{FIXTURES}/generate.json")).expect("a fixture");
    serde_json::from_str(&text).expect("JSON")
}

/// Every family writes what transformers does.
#[test]
fn the_most_probable_tokens_are_those_of_transformers() {
    let lab = Lab::new("generate-families");
    let all = reference();
    let mut ran = 0;
    for (i, (name, x)) in all.as_object().expect("an object").iter().enumerate() {
        if !taken(i, 6) {
            continue;
        }
        lab.model(name);
        letters(&lab, name, 80);
        let n = x["tokens"].as_array().expect("tokens").len().to_string();
        let out = written(&lab, &[name, "--prompt", &text(&x["prompt"]), "--max-new", &n]);
        assert_eq!(
            (&out[0]["tokens"], &out[0]["ended"]),
            (&x["tokens"], &json!("length")),
            "{name}"
        );
        assert_eq!(out[0]["text"], text(&x["tokens"]), "{name}");
        ran += 1;
    }
    assert!(ran >= 8, "{ran} families");
}

/// 64 tokens, of models with more positions than the fixtures'.
#[test]
fn long_texts_are_those_of_transformers() {
    let lab = Lab::new("generate-long");
    let all = reference();
    let long = all.as_object().expect("an object").iter().filter(|x| x.1["long"].is_object());
    let mut names = vec![];
    for (name, x) in long {
        lab.model(name);
        letters(&lab, name, 80);
        let config = lab.config(name, json!({ "max_position_embeddings": 128 }));
        std::fs::rename(lab.path(&config), lab.path(name).join("config.json")).expect("renamed");
        let x = &x["long"];
        let out = written(&lab, &[name, "--prompt", &text(&x["prompt"]), "--max-new", "64"]);
        assert_eq!(out[0]["tokens"], x["tokens"], "{name}");
        assert_eq!(out[0]["tokens"].as_array().map(Vec::len), Some(64));
        names.push(name);
    }
    assert_eq!(names, ["gemma3", "llama_mha", "qwen3_moe"]);
}

/// A plan of any mesh, its checkpoint on another, and a checkpoint of adapters write what their model does.
#[test]
fn plans_and_checkpoints_write_what_their_model_does() {
    let lab = Lab::new("generate-from");
    let model = lab.model("llama_gqa");
    letters(&lab, &model, 80);
    let x = &reference()["llama_gqa"];
    let n = x["tokens"].as_array().expect("tokens").len().to_string();
    let of = |args: &[&str]| {
        let asked = ["--prompt", &text(&x["prompt"]), "--max-new", &n];
        written(&lab, &[args, &asked].concat()).swap_remove(0)
    };
    let compile = |out: &str, lr: &str, more: &[&str]| {
        let base =
            ["compile", &*model, "--seq", "16", "-o", out, "--weight-decay", "0", "--lr", lr];
        lab.ok(&[&base[..], more].concat());
    };
    compile("plan", "1e-30", &["--mesh", "tp=2,dp=2", "--zero", "3"]);
    assert_eq!(of(&["plan"])["tokens"], x["tokens"], "weights are where the plan was made");
    assert_eq!(of(&["plan", "--weights", &model])["tokens"], x["tokens"]);
    let train = ["--steps", "2", "--save-every", "1", "--kernels", "interpreted", "--save"];
    lab.ok(&[&["run", "plan", "--weights", &model], &train[..], &["ckpt"]].concat());
    for name in ["ckpt", "ckpt/step-00000001", "ckpt@latest"] {
        assert_eq!(of(&[name, "--tokenizer", &model])["tokens"], x["tokens"], "{name}");
    }
    // Adapters: beside the base model, merged into it, and as PEFT has them.
    compile("lora", "0.3", &["--lora", "r=2,dropout=0.3"]);
    lab.ok(&[&["run", "lora", "--weights", &model], &train[..], &["adapted"]].concat());
    lab.ok(&["reshard", "adapted", "--to", "hf", "--merge", "-o", "merged"]);
    lab.ok(&["reshard", "adapted", "--to", "peft", "-o", "adapter"]);
    let merged = of(&["merged"]);
    assert_ne!(merged["tokens"], x["tokens"], "it has learned nothing");
    for args in [
        &["adapted"][..],
        &["adapted", "--weights", &model],
        &["lora", "--adapter", "adapter"],
        &[&model, "--adapter", "adapter"],
    ] {
        assert_eq!(of(args)["tokens"], merged["tokens"], "{args:?}");
    }
    let other = ["--prompt", "ą", "--adapter", "adapter"];
    lab.refuses(&[&["generate", "adapted"], &other[..]].concat(), 2, "flag");
    lab.refuses(&[&["generate", "plan"], &other[..]].concat(), 2, "flag");
    // An adapter that was trained with another factor than the plan has.
    let config = lab.path("adapter/adapter_config.json");
    let mut json: Json =
        serde_json::from_slice(&std::fs::read(&config).expect("a config")).expect("JSON");
    json["lora_alpha"] = json!(json["lora_alpha"].as_f64().expect("alpha") * 4.0);
    std::fs::write(config, json.to_string()).expect("a file");
    lab.refuses(&[&["generate", "lora", "--tokenizer", &model], &other[..]].concat(), 2, "adapter");
}

/// An archive of a model with its loss, and one of the model alone, of a fixed number of tokens.
#[test]
fn archives_write_what_their_model_does() {
    let lab = Lab::new("generate-archives");
    let imports = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/imports");
    letters(&lab, "t", 80);
    for name in ["llama", "gpt2_whole"] {
        let archive = format!("{imports}/{name}.pt2");
        let args = ["--tokenizer", "t", "--prompt", "ąĂĕ", "--max-new", "4"];
        let alone = written(&lab, &[&[&*archive], &args[..]].concat());
        assert_eq!(alone[0]["tokens"].as_array().map(Vec::len), Some(4), "{name}");
        // Of the text in a plan, too.
        let plan = format!("{name}.plan");
        lab.ok(&["compile", &archive, "-o", &plan]);
        let with = ["--weights", &archive];
        let planned = written(&lab, &[&[&*plan], &args[..], &with].concat());
        assert_eq!(alone[0]["tokens"], planned[0]["tokens"], "{name}");
        // The step before, by hand: what follows the first three tokens of four.
        let more = format!("ąĂĕ{}", text(&json!([alone[0]["tokens"][0]])));
        let args = ["--tokenizer", "t", "--prompt", &more, "--max-new", "3"];
        let next = written(&lab, &[&[&*archive], &args[..]].concat());
        let rest = &alone[0]["tokens"].as_array().expect("tokens")[1..];
        assert_eq!(next[0]["tokens"].as_array().expect("tokens"), rest, "{name}");
    }
}

/// Draws depend on the seed and on the sample alone; texts to stop at are cut off, and hold back what may be one.
#[test]
fn samples_are_drawn_and_stopped() {
    let lab = Lab::new("generate-samples");
    let model = lab.model("llama_mha");
    letters(&lab, &model, 80);
    let of = |more: &[&str]| {
        written(&lab, &[&[&*model, "--prompt", "ąĂ", "--max-new", "12"], more].concat())
    };
    let drawn = ["--temperature", "3", "-n", "3"];
    let all = of(&drawn);
    assert_eq!(all.iter().map(|x| x["sample"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(all[0]["tokens"] != all[1]["tokens"] && all[1]["tokens"] != all[2]["tokens"]);
    assert_eq!(of(&drawn), all);
    assert_ne!(of(&[&drawn[..], &["--seed", "1"]].concat()), all);
    // One token to draw from is no draw.
    let one = of(&["--temperature", "3", "--top-k", "1"]);
    assert_eq!(
        (&one[0]["tokens"], &of(&[])[0]["tokens"]),
        (&of(&[])[0]["tokens"], &one[0]["tokens"])
    );
    let whole = of(&[])[0]["text"].as_str().expect("text").to_string();
    let letters: Vec<char> = whole.chars().collect();
    let stop: String = letters[3..5].iter().collect();
    let at = whole.find(&stop).expect("it is there");
    let cut = of(&["--stop", &stop, "--stop", "never"]);
    assert_eq!((&cut[0]["text"], &cut[0]["ended"]), (&json!(whole[..at]), &json!("stop")));
    // What a person reads is the same, in one piece.
    let args = ["generate", &model, "--prompt", "ąĂ", "--max-new", "12"];
    let shown = |more: &[&str]| lab.ok(&[&args[..], &FAST, more].concat());
    assert_eq!(String::from_utf8_lossy(&shown(&[]).stdout), format!("{whole}\n"));
    let out = shown(&["--stop", &stop]);
    assert_eq!(String::from_utf8_lossy(&out.stdout), format!("{}\n", &whole[..at]));
    assert!(String::from_utf8_lossy(&out.stderr).contains("for samples"), "{out:?}");
}

fn fed(lab: &Lab, args: &[&str], input: &str) -> Output {
    use std::io::Write as _;
    let mut c = Command::new(env!("CARGO_BIN_EXE_shardc"));
    let c = c.current_dir(&lab.0).args(args).args(FAST);
    let c = c.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut c = c.spawn().expect("shardc starts");
    c.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("it is read");
    c.wait_with_output().expect("it ends")
}

/// What cannot be done is said with numbers, before anything is compiled.
#[test]
fn what_is_wrong_is_said() {
    let lab = Lab::new("generate-wrong");
    let model = lab.model("llama_mha");
    let prompt = ["generate", &*model, "--prompt", "ąĂ"];
    let said = lab.refuses(&prompt, 2, "data");
    assert!(said.contains("no --tokenizer") && said.contains("llama_mha"), "{said}");
    letters(&lab, &model, 80);
    let long = "ą".repeat(40);
    let said = lab.refuses(&["generate", &model, "--prompt", &long], 2, "sequence-too-long");
    assert!(said.contains("the prompt has 40 tokens, the model has 32 positions"), "{said}");
    let said = lab.refuses(&["generate", &model, "--prompt", ""], 2, "data");
    assert!(said.contains("no token"), "{said}");
    for flag in [&["--top-k", "3"][..], &["--top-p", "0.5"], &["--seed", "1"], &["-n", "2"]] {
        let said = lab.refuses(&[&prompt[..], flag].concat(), 2, "flag");
        assert!(said.contains("--temperature 1"), "{said}");
    }
    lab.refuses(&[&prompt[..], &["--chat-template", "x"]].concat(), 2, "flag");
    let said = lab.refuses(&["generate", &model, "--chat", "Hi"], 2, "data");
    assert!(said.contains("no chat template"), "{said}");
    lab.refuses(&["generate", "nothing", "--prompt", "x"], 2, "file");
    // A decoder that writes without end.
    let own = std::fs::read_to_string(lab.path("llama_mha/tokenizer.json")).expect("a tokenizer");
    let mut json: Json = serde_json::from_str(&own).expect("JSON");
    let long =
        json!({ "type": "Replace", "pattern": { "String": "x" }, "content": "y".repeat(999) });
    json["decoder"] = json!({ "type": "Sequence", "decoders": [long] });
    lab.write("llama_mha/tokenizer.json", json.to_string());
    let said = lab.refuses(&prompt, 2, "tokenizer");
    assert!(said.contains("its decoder writes 999 bytes"), "{said}");
    lab.write("llama_mha/tokenizer.json", own);
    lab.misuses(&[&prompt[..], &["--temperature=-1"]].concat(), "--temperature");
    lab.misuses(&[&prompt[..], &["--top-p", "0"]].concat(), "--top-p");
    // A plan without a folder that it was made of has no weights.
    let config = lab.config("llama_mha", json!({}));
    lab.ok(&["compile", &config, "--seq", "16", "-o", "bare"]);
    let bare = ["generate", "bare", "--tokenizer", &model, "--prompt", "ąĂ"];
    let said = lab.refuses(&bare, 2, "missing-weights");
    assert!(said.contains("--weights"), "{said}");
    // Standard input, and the end of positions.
    let out = fed(&lab, &["generate", &model, "--format", "json", "--max-new", "99"], "ąĂ\n");
    let json: Json = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"));
    assert_eq!((&json["prompt_tokens"], &json["ended"]), (&json!(2), &json!("positions")));
    assert_eq!(json["tokens"].as_array().map(Vec::len), Some(30));
}
