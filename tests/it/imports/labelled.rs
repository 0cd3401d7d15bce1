//! Archives whose inputs have names of their own, and labels that a model moves or not: what the command reads of
//! files, against PyTorch.

use super::{Expected, file, norm};
use crate::lab::Lab;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value as Json, json};
use std::path::Path;

/// The inputs of an archive alone, as PyTorch had them, but for `without`, and with more.
pub fn inputs_of(dir: &Path, name: &str, without: &str, more: &[(&str, Vec<usize>)]) -> String {
    let bytes = std::fs::read(file(&format!("{name}.safetensors"))).expect("numbers");
    let all = SafeTensors::deserialize(&bytes).expect("safetensors");
    let made = |n: &str| ["loss", "logits", "output"].contains(&n) || n.starts_with("grad.");
    let mut own: Vec<(String, TensorView)> =
        all.tensors().into_iter().filter(|(n, _)| !made(n) && n != without).collect();
    let ones: Vec<Vec<u8>> =
        more.iter().map(|(_, s)| 1i64.to_le_bytes().repeat(s.iter().product())).collect();
    for ((name, shape), data) in more.iter().zip(&ones) {
        let view = TensorView::new(safetensors::Dtype::I64, shape.clone(), data).expect("a tensor");
        own.push(((*name).into(), view));
    }
    let to = format!("{name}-{without}-{}.safetensors", more.len());
    std::fs::write(dir.join(&to), safetensors::serialize(own, None).expect("safetensors"))
        .expect("a file");
    to
}

fn inputs(lab: &Lab, name: &str, without: &str, more: &[(&str, Vec<usize>)]) -> String {
    inputs_of(&lab.0, name, without, more)
}

fn archive(name: &str) -> String {
    file(&format!("{name}.pt2")).display().to_string()
}

fn compiled(lab: &Lab, name: &str, plan: &str, flags: &[&str]) {
    lab.ok(&[&["compile", &archive(name), "-o", plan][..], flags].concat());
}

/// The loss of the first step, and what was said.
fn loss(lab: &Lab, plan: &str, name: &str, data: &[&str]) -> (f64, String) {
    let base = ["run", plan, "--weights", &archive(name), "--steps", "1", "--format", "json"];
    let out = lab.ok(&[&base[..], &["--threads", "1"], data].concat());
    let line: Json =
        serde_json::from_slice(out.stdout.split(|b| *b == b'\n').next().expect("a line"))
            .expect("JSON");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    (line["loss"].as_f64().expect("a loss"), said)
}

/// One step with `--batch` on some meshes, and with `--data`, whose columns are the arguments of the module: loss 5e-6,
/// every gradient 1e-4.
fn check(name: &str, meshes: &[&[&str]]) {
    let lab = Lab::new(&format!("labelled-{name}"));
    let (want, data) = (Expected::open(name), inputs(&lab, name, "", &[]));
    for (i, flags) in meshes.iter().enumerate() {
        let plan = format!("plan{i}");
        compiled(&lab, name, &plan, flags);
        let dump = format!("d{i}.safetensors");
        let (got, _) = loss(&lab, &plan, name, &["--batch", &data, "--dump", &dump]);
        let torch = want.get("loss")[0];
        assert!((got - torch).abs() <= 5e-6, "{name} {flags:?}: {got}, PyTorch {torch}");
        let shown = Expected::at(&lab.path(&dump), false);
        for (key, (_, grad)) in want.0.iter().filter(|(key, _)| key.starts_with("grad.")) {
            let own = shown.get(key);
            let off = norm(own.iter().zip(grad).map(|(a, b)| a - b));
            // Some are 0, but for rounding.
            let size = norm(grad.iter().copied()).max(1e-3);
            assert!(off <= 1e-4 * size, "{name} {flags:?}: {key} is off by {off:e} of {size:e}");
        }
    }
    // All rows, in their order, are the batch.
    let (got, _) = loss(&lab, "plan0", name, &["--data", &data, "--data-order", "sequential"]);
    assert!((got - want.get("loss")[0]).abs() <= 5e-6, "{name}: --data {got}");
}

const ONE: &[&str] = &[];
const DP: &[&str] = &["--mesh", "dp=2", "--microbatch", "4"];
const CP: &[&str] = &["--mesh", "cp=2"];

#[test]
fn labels_that_a_decoder_does_not_move_are_scored_as_they_lie() {
    check("nano", &[ONE, CP]);
}

#[test]
fn labels_that_a_model_moves_stand_at_their_own_tokens() {
    check("nano_moves", &[ONE, DP]);
    check("llama", &[&["--seq", "16", "--microbatch", "8"]]);
}

#[test]
fn labels_of_an_encoder_are_scored_as_they_lie() {
    check("bert", &[&["--seq", "16", "--microbatch", "8"]]);
    check("classes", &[ONE, CP]);
    check("few_classes", &[ONE]);
    check("nodes", &[ONE]);
    check("mixed", &[ONE]);
    check("mean", &[ONE]);
}

#[test]
fn columns_are_the_arguments_of_a_module() {
    check("speech", &[ONE, DP]);
    let lab = Lab::new("labelled-names");
    let shape = || vec![8, 16];
    // What is left out, what is there in its place, and the word of the refusal.
    for (name, out, more, word) in [
        ("nano", "targets", "labels", "the column `targets` is missing"),
        ("nano", "idx", "input_ids", "the column `idx` is missing"),
        ("speech", "decoder_input_ids", "input_ids", "the column `decoder_input_ids` is missing"),
        ("nano", "", "attention_mask", "the model takes no column `attention_mask`"),
        ("classes", "", "position_ids", "the model takes no column `position_ids`"),
        ("classes", "token_type_ids", "", "the column `token_type_ids` is missing"),
        ("nano_moves", "targets", "labels", "the column `targets` is missing"),
    ] {
        compiled(&lab, name, "plan", ONE);
        let more: Vec<(&str, Vec<usize>)> =
            [more].into_iter().filter(|m| !m.is_empty()).map(|m| (m, shape())).collect();
        let data = inputs(&lab, name, out, &more);
        for flag in ["--batch", "--data"] {
            let said = lab.refuses(&["run", "plan", flag, &data], 2, "data");
            assert!(said.contains(word), "{name} {flag}: no `{word}` in {said}");
        }
        std::fs::remove_dir_all(lab.path("plan")).expect("it was made");
    }
}

/// Tokens alone have the labels of a causal model, and of no other.
#[test]
fn streams_have_labels_where_no_token_sees_the_next() {
    let lab = Lab::new("labelled-streams");
    let tokens: Vec<u8> = (0..400u16).flat_map(|i| (i * 7 % 24).to_le_bytes()).collect();
    lab.write("t.bin", &tokens);
    let data = ["--data", "t.bin", "--data-order", "sequential"];
    compiled(&lab, "nano", "plan", &[]);
    let (streamed, said) = loss(&lab, "plan", "nano", &data);
    assert_eq!(said.matches("`targets` of position i is token i + 1").count(), 1, "{said}");
    // The same rows, with labels by hand.
    let at = |i: usize| ((i * 7 % 24) as i64).to_le_bytes();
    let rows = |by: usize| -> Vec<u8> { (0..128).flat_map(|i| at(i + by)).collect() };
    let (ids, next) = (rows(0), rows(1));
    let view =
        |data| TensorView::new(safetensors::Dtype::I64, vec![8, 16], data).expect("a tensor");
    let both = [("idx", view(&ids)), ("targets", view(&next))];
    lab.write("rows.safetensors", safetensors::serialize(both, None).expect("safetensors"));
    let (given, said) = loss(&lab, "plan", "nano", &["--batch", "rows.safetensors"]);
    assert!(!said.contains("token i + 1"), "{said}");
    assert_eq!(streamed, given);
    // So those of an evaluation are made, with steps and without; it is said once.
    for steps in ["0", "1"] {
        let eval = ["--steps", steps, "--eval-data", "t.bin", "--eval-every", "1"];
        let out = lab.ok(&[&["run", "plan"][..], &eval].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(said.matches("`targets` of position i is token i + 1").count(), 1, "{said}");
    }
    for (name, column) in
        [("few_classes", "targets"), ("bert", "labels"), ("mixed", "targets"), ("mean", "targets")]
    {
        let plan = format!("{name}.plan");
        compiled(&lab, name, &plan, &[]);
        let said = lab.refuses(&["run", &plan, "--data", "t.bin"], 2, "data");
        assert!(said.contains(&format!("give a column `{column}`")), "{said}");
        let said = lab.refuses(&["run", &plan, "--steps", "0", "--eval-data", "t.bin"], 2, "data");
        assert!(said.contains(&format!("give a column `{column}`")), "{said}");
    }
    // A model that moves its labels takes them from the stream as before, and says nothing of it.
    compiled(&lab, "nano_moves", "moves", &[]);
    let (_, said) = loss(&lab, "moves", "nano_moves", &data);
    assert!(!said.contains("token i + 1"), "{said}");
}

/// The text has what the archive says of its columns.
#[test]
fn a_text_of_an_archive_reads_the_same_columns() {
    let lab = Lab::new("labelled-text");
    lab.ok(&["import", &archive("nano_moves"), "-o", "m.ir"]);
    let text = std::fs::read_to_string(lab.path("m.ir")).expect("a text");
    for row in [
        "input[tokens, batch, seq=1, own] \"idx\"",
        "input[labels, batch, seq=1, next] \"targets\"",
    ] {
        assert!(text.contains(row), "no {row} in {text}");
    }
    lab.ok(&["compile", "m.ir", "-o", "plan"]);
    let data = inputs(&lab, "nano_moves", "", &[]);
    let (got, _) = loss(&lab, "plan", "nano_moves", &["--batch", &data]);
    let torch = Expected::open("nano_moves").get("loss")[0];
    assert!((got - torch).abs() <= 5e-6, "{got}, PyTorch {torch}");
    for (from, to) in
        [("seq=1, next", "next"), ("tokens, batch, seq=1, own", "tokens, batch, seq=1, next")]
    {
        lab.write("bad.ir", text.replace(from, to));
        lab.refuses(&["compile", "bad.ir", "-o", "bad"], 2, "syntax");
    }
}

/// What lies beside an archive goes with the model that is saved of it.
#[test]
fn a_saved_model_has_the_configuration_beside_its_archive() {
    let lab = Lab::new("labelled-saved");
    let copy = |from: &str, to: &str| lab.write(to, std::fs::read(file(from)).expect("a fixture"));
    copy("nano.pt2", "m/nano.pt2");
    let config = json!({ "model_type": "nano", "hidden_size": 8, "dtype": "float32" });
    lab.write("m/config.json", config.to_string());
    lab.write("m/tokenizer.json", "{}");
    lab.write("m/tokenizer_config.json", "{ \"eos_token\": \"x\" }");
    lab.ok(&["compile", "m/nano.pt2", "-o", "plan"]);
    lab.ok(&["verify", "plan"]);
    lab.ok(&["run", "plan", "--weights", "m/nano.pt2", "--steps", "1", "--save", "saved"]);
    let read = |name: &str| std::fs::read_to_string(lab.path("saved").join(name)).expect("saved");
    let saved: Json = serde_json::from_str(&read("config.json")).expect("JSON");
    assert_eq!(saved["model_type"], "nano", "{saved}");
    assert_eq!(
        (&*read("tokenizer.json"), read("tokenizer_config.json").contains("eos")),
        ("{}", true)
    );
    let said = lab.refuses(&["run", "plan", "--steps", "1", "--save", "m"], 2, "save-base");
    assert!(said.contains("would replace the base model"), "{said}");
    // A checkpoint of its plan becomes the same.
    lab.ok(&["run", "plan", "--steps", "1", "--save", "ck", "--save-every", "1"]);
    lab.ok(&["reshard", "ck", "--to", "hf", "-o", "again"]);
    let again = std::fs::read_to_string(lab.path("again/config.json")).expect("saved");
    assert_eq!(again, read("config.json"));
    assert!(lab.path("again/tokenizer.json").exists());
    // Alone it has neither, and that is said.
    copy("nano.pt2", "alone/nano.pt2");
    lab.ok(&["compile", "alone/nano.pt2", "-o", "other"]);
    let out = lab.ok(&["run", "other", "--steps", "1", "--save", "bare"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(said.contains("neither a configuration nor a tokenizer"), "{said}");
}
