//! Columns of a file that no input of a model takes: nothing is left out silently.

use crate::columns::safetensors;
use crate::lab::Lab;

/// A family's tokens come with labels, which it moves, or targets; padding is not left out silently.
#[test]
fn columns_that_a_family_does_not_take_are_refused() {
    let lab = Lab::new("columns-family");
    let model = lab.model("llama_mha");
    lab.ok(&["compile", &model, "--seq", "16", "-o", "plan"]);
    let of = |x: i64| x.to_le_bytes().repeat(128);
    let rows: &[usize] = &[8, 16];
    let tokens = |name| (name, "I64", rows, of(5));
    lab.write(
        "mask.safetensors",
        safetensors(&[tokens("input_ids"), tokens("labels"), tokens("attention_mask")]),
    );
    lab.write(
        "both.safetensors",
        safetensors(&[tokens("input_ids"), tokens("labels"), tokens("targets")]),
    );
    lab.write("good.safetensors", safetensors(&[tokens("input_ids"), tokens("labels")]));
    for flag in ["--batch", "--data"] {
        let said = lab.refuses(&["run", "plan", flag, "mask.safetensors"], 2, "data");
        assert!(
            said.contains("no column `attention_mask`") && said.contains("--documents"),
            "{said}"
        );
        let said = lab.refuses(&["run", "plan", flag, "both.safetensors"], 2, "data");
        assert!(said.contains("no column `labels`"), "{said}");
        lab.ok(&["run", "plan", flag, "good.safetensors", "--steps", "1"]);
    }
    let eval = ["run", "plan", "--data", "good.safetensors", "--eval-data", "mask.safetensors"];
    lab.refuses(&eval, 2, "data");
    // Nothing is scored in inference: labels may be there, and need not.
    lab.ok(&["compile", &model, "--seq", "16", "--mode", "infer", "-o", "infer"]);
    lab.write("ids.safetensors", safetensors(&[tokens("input_ids")]));
    for data in ["good.safetensors", "ids.safetensors"] {
        lab.ok(&["run", "infer", "--batch", data]);
    }
    lab.refuses(&["run", "infer", "--batch", "mask.safetensors"], 2, "data");
}
