//! Columns of a file that no input of a model takes: nothing is left out silently.

use crate::columns::safetensors;
use crate::lab::Lab;

/// Messages name what stands in the file, and the flag by which it fits.
#[test]
fn columns_that_do_not_fit_are_called_as_in_the_data() {
    let lab = Lab::new("columns-called");
    let model = lab.model("llama_mha");
    lab.ok(&["compile", &model, "--seq", "16", "-o", "plan"]);
    let of = |x: i64, n: usize| x.to_le_bytes().repeat(n);
    let both = |x: i64, shape: &[usize]| {
        let n = shape.iter().product();
        safetensors(&[("input_ids", "I64", shape, of(5, n)), ("labels", "I64", shape, of(x, n))])
    };
    lab.write("long.safetensors", both(5, &[8, 24]));
    let said = lab.refuses(&["run", "plan", "--batch", "long.safetensors"], 2, "data");
    assert!(said.contains("compile with --seq 24"), "{said}");
    lab.write("few.safetensors", both(5, &[3, 16]));
    let said = lab.refuses(&["run", "plan", "--batch", "few.safetensors"], 2, "data");
    assert!(said.contains("few.safetensors") && said.contains("--global-batch 3"), "{said}");
    lab.write("large.safetensors", both(5000, &[8, 16]));
    for flag in ["--batch", "--data"] {
        let said = lab.refuses(&["run", "plan", flag, "large.safetensors"], 2, "label-range");
        assert!(said.contains("`targets` is the column `labels` of the data"), "{said}");
    }
    // A batch is a file of columns whatever it is called, and nothing else.
    lab.write("batch", both(5, &[8, 16]));
    lab.ok(&["run", "plan", "--batch", "batch", "--steps", "1"]);
    lab.refuses(&["run", "plan", "--batch", "bytes:batch"], 2, "file");
}

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
        assert!(said.contains("`targets` is read from `targets`"), "{said}");
        lab.ok(&["run", "plan", flag, "good.safetensors", "--steps", "1"]);
    }
    // Whose documents have a token of padding, knows it.
    lab.ok(&["compile", &model, "--seq", "16", "--documents", "eod=2,pad=0", "-o", "pads"]);
    let said = lab.refuses(&["run", "pads", "--batch", "mask.safetensors"], 2, "data");
    assert!(said.contains("knows padding by its token") && !said.contains("eod=N"), "{said}");
    // What shardc makes itself is no column.
    let positions = safetensors(&[tokens("input_ids"), tokens("labels"), tokens("positions")]);
    lab.write("positions.safetensors", positions);
    let said = lab.refuses(&["run", "plan", "--batch", "positions.safetensors"], 2, "data");
    assert!(said.contains("shardc fills this input itself"), "{said}");
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
