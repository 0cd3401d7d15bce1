//! Text as training data: its tokens are those of Hugging Face's Python package, and files of
//! strangers are refused.

use crate::lab::*;
use serde_json::{Value as Json, json};
use shardc::data::{Data, Picks};
use shardc_ir::func::{Input, InputRow};
use shardc_ir::types::DType;
use std::path::{Path, PathBuf};

const TEXT: &str =
    concat!("text:", env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/data/tokenizer/*.txt");
/// Tokens that the Python package gives.
const COUNT: usize = 244;

fn fixture(name: &str) -> PathBuf {
    Path::new(FIXTURES).join("data/tokenizer").join(name)
}

fn open(spec: &str, tokenizer: &Path) -> Data {
    Data::open("--data", spec, Some(tokenizer), 512).unwrap_or_else(|e| panic!("{e}"))
}

/// A lab with a plan for 512 tokens, and the tokenizer's JSON.
fn lab(name: &str) -> (Lab, Json) {
    let lab = Lab::new(name);
    let model = lab.config("llama_mha", json!({ "vocab_size": 512 }));
    lab.ok(&compile(&model, &[]));
    let text = std::fs::read(fixture("tokenizer.json")).expect("the fixture");
    (lab, serde_json::from_slice(&text).expect("JSON"))
}

#[test]
fn tokens_are_those_of_the_python_package() {
    let ids = open(fixture("ids.npy").to_str().expect("a path"), Path::new("unused"));
    let folder = open(TEXT, &fixture(""));
    // All of them, from several places.
    let row = |name: &str| InputRow {
        name: name.into(),
        input: Input::named(name),
        dtype: DType::I32,
        sizes: vec![COUNT],
        below: None,
    };
    let table = [row("input_ids"), row("targets")];
    for step in 1..4 {
        let want = ids.batch(&table, &Picks::random(7), step, 3).expect("a batch");
        assert_eq!(folder.batch(&table, &Picks::random(7), step, 3).expect("a batch"), want);
    }
    let mark = folder.mark();
    assert!(mark.starts_with("of 2 documents, 244 tokens, end of text 1, hash "), "{mark}");
    let (lab, mut json) = lab("same");
    // Lengths that are kept in the file are of no account.
    json["truncation"] = json!({
        "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0
    });
    json["padding"] = json!({
        "strategy": { "Fixed": 999 }, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|begin_of_text|>"
    });
    let file = lab.write("tokenizer.json", json.to_string());
    assert_eq!(open(TEXT, &file).mark(), mark);
    // Another end of text.
    lab.write("tokenizer_config.json", json!({ "eos_token": { "content": "A" } }).to_string());
    assert!(open(TEXT, &lab.0).mark().contains("244 tokens, end of text 34"));
    lab.write("tokenizer_config.json", "{}");
    assert_eq!(open(TEXT, &lab.0).mark(), mark);
}

#[test]
fn text_trains_as_its_tokens_do() {
    let (lab, json) = lab("trains");
    lab.write("tokenizer.json", json.to_string());
    let losses = |data: &str, more: &[&str]| {
        let base = ["run", "out", "--steps", "3", "--threads", "1", "--format", "json"];
        let eval = ["--eval-every", "2", "--eval-data", data, "--data", data];
        let out = lab.ok(&[&base[..], &eval, more].concat());
        let lines = String::from_utf8(out.stdout).expect("text");
        let said = String::from_utf8(out.stderr).expect("text");
        let one = |l: &str| serde_json::from_str::<Json>(l).expect("JSON");
        let loss = |l: Json| (l["loss"].clone(), l["eval_loss"].clone());
        (lines.lines().map(one).map(loss).collect::<Vec<_>>(), said)
    };
    let (text, said) = losses(TEXT, &["--tokenizer", "."]);
    assert!(said.contains("text of 2 documents, 244 tokens"), "{said}");
    assert_eq!(text.len(), 5);
    assert_eq!(text, losses(fixture("ids.npy").to_str().expect("a path"), &[]).0);
}

/// A line of JSON is a document: the same tokens as those of files of their own, and never the syntax.
#[test]
fn lines_of_json_are_documents() {
    let lab = Lab::new("lines");
    let texts = ["A text, \"quoted\".", "Another\nof two lines.", "A third: \u{e4}\u{f6}."];
    for (i, text) in texts.iter().enumerate() {
        lab.write(&format!("d{i}.txt"), text);
    }
    let line = |text: &&str| json!({ "id": 7, "text": text }).to_string();
    let lines: Vec<String> = texts.iter().map(line).collect();
    // Empty lines are none, and the last one may end or not.
    lab.write("all.jsonl", lines.join("\n\n"));
    let of = |glob: &str| {
        let spec = format!("text:{}", lab.path(glob).display());
        Data::open("--data", &spec, Some(&fixture("")), 512)
    };
    let [a, b] =
        ["d*.txt", "*.jsonl"].map(|glob| of(glob).unwrap_or_else(|e| panic!("{e}")).mark());
    assert!(a.starts_with("of 3 documents, "), "{a}");
    assert_eq!(a, b);
    // However the name is written, and with what some editors put before a text.
    std::fs::rename(lab.path("all.jsonl"), lab.path("ALL.JSONL")).expect("renamed");
    assert_eq!(of("*.JSONL").unwrap_or_else(|e| panic!("{e}")).mark(), b);
    lab.write("mark.jsonl", format!("\u{feff}{}", lines.join("\n")));
    assert_eq!(of("mark.jsonl").unwrap_or_else(|e| panic!("{e}")).mark(), b);
    lab.write("mark.txt", format!("\u{feff}{}", texts[0]));
    let [a, b] = ["mark.txt", "d0.txt"].map(|f| of(f).unwrap_or_else(|e| panic!("{e}")).mark());
    assert_eq!(a, b);
    for name in ["all.json", "ALL.JSON"] {
        lab.write(name, format!("[{}]", lines.join(",")));
        let d = of(name).err().expect("it is refused");
        assert!(d.code == "data" && d.help.iter().any(|h| h.contains(".jsonl")), "{d}");
    }
    for (bad, words) in [
        ("{\"content\": \"x\"}", "the line has no `text`, but content"),
        ("{\"text\": [1]}", "`text` of the line is not a text"),
        ("\"text\"", "the line is not an object"),
        ("{\"text\": \"x\"", "the line is not JSON"),
        ("{\"text\": \"\u{0}\"}", "the line is not JSON"),
    ] {
        lab.write("bad.jsonl", format!("{}\n{bad}\n", lines[0]));
        let d = of("bad.jsonl").err().expect("it is refused");
        assert!(d.code == "data" && d.message.contains(words), "no `{words}` in {d}");
        assert!(d.place.as_deref().is_some_and(|p| p.ends_with("bad.jsonl:2")), "{d}");
    }
}

#[test]
fn tokenizers_of_strangers_are_refused() {
    let (lab, json) = lab("hostile");
    lab.write("given.txt", "A text.<|endoftext|> Another.");
    let run = ["run", "out", "--steps", "1", "--data", "text:*.txt", "--tokenizer"];
    let refuses = |bytes: &[u8], code: &str, words: &str| {
        lab.write("t/tokenizer.json", bytes);
        let said = lab.refuses(&[&run[..], &["t"]].concat(), 2, code);
        assert!(said.contains(words) && !said.contains("bug"), "no `{words}` in {said}");
    };
    let good = json.to_string();
    let changed = |path: &str, value: Json| {
        let mut new = json.clone();
        *new.pointer_mut(path).unwrap_or_else(|| panic!("no {path}")) = value;
        new.to_string().into_bytes()
    };
    for bytes in [&b""[..], b"{}", b"[", b"\xff\xfe", b"{\"model\":3}", &[b'['; 100_000]] {
        refuses(bytes, "tokenizer", "cannot be used");
    }
    refuses(&good.as_bytes()[..good.len() / 2], "tokenizer", "cannot be used");
    for huge in [json!(-1), json!(1e99), json!(u64::MAX), json!("x")] {
        refuses(&changed("/model/vocab/A", huge), "tokenizer", "cannot be used");
    }
    refuses(&changed("/model/vocab/A", json!(u32::MAX)), "token-range", "has 512 tokens");
    refuses(&changed("/model/vocab/A", json!(512)), "token-range", "token 512");
    refuses(&changed("/model/dropout", json!(0.1)), "tokenizer", "at random (dropout 0.1)");
    // The library itself panics at these.
    refuses(&changed("/decoder/type", json!("None")), "tokenizer", "cannot be used");
    let none = json!({ "SpecialToken": { "id": "none", "type_id": 0 } });
    refuses(&changed("/post_processor/single/0", none), "tokenizer", "cannot be used");
    lab.write("t/tokenizer.json", &good);
    let more = |config: &str, words: &str| {
        lab.write("t/tokenizer_config.json", config);
        let said = lab.refuses(&[&run[..], &["t"]].concat(), 2, "tokenizer");
        assert!(said.contains(words), "no `{words}` in {said}");
    };
    more("{", "tokenizer_config.json");
    more("{\"eos_token\": \"</none>\"}", "`</none>` is not a token");
    lab.write("t/tokenizer_config.json", "{\"eos_token\": null}");
    lab.ok(&[&run[..], &["t"]].concat());
    lab.refuses(&[&run[..], &["nowhere"]].concat(), 2, "tokenizer");
    lab.write("given.txt", [b'a', 0xff]);
    let said = lab.refuses(&[&run[..], &["t"]].concat(), 2, "data");
    assert!(said.contains("given.txt") && said.contains("it is not text"), "{said}");
}
