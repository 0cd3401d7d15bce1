//! Losses as archives write them (`tests/imports/make.py losses`) against PyTorch, with a
//! vocabulary split over ranks, on ranks with rows and tokens of their own, and in one and in three
//! microbatches; all plans are proved.

use super::{Expected, file, norm};
use crate::lab::Lab;
use safetensors::SafeTensors;
use serde_json::Value as Json;
use shardc_testing::taken;

/// Losses of labels, exact over microbatches, and those of one microbatch only.
const OF_LABELS: [&str; 11] = [
    "ignore_last",
    "smooth",
    "none",
    "quarter",
    "with_more",
    "twice",
    "over_rows",
    "more",
    "ignore_first",
    "weights",
    "weights_smooth",
];
const OF_ONE: [&str; 6] = ["sum", "exp", "none_sum", "squares", "by_rows", "squares_by_rows"];
/// Losses of floats; sums are of one microbatch only.
const OF_FLOATS: [&str; 15] = [
    "bce",
    "bce_logits",
    "bce_weights",
    "kl",
    "kl_log",
    "l1",
    "smooth_l1",
    "huber",
    "mse",
    "mse_sum",
    "soft",
    "soft_weights",
    "soft_tokens",
    "log_softmax",
    "soft_sum",
];

/// What a layout asks for: the mesh, rows of a microbatch, and how cp deals tokens, if it says so.
const LAYOUTS: [(&str, &str, &str); 7] = [
    ("tp=2", "24", ""),
    ("tp=2", "8", ""),
    ("dp=2", "4", ""),
    ("cp=2", "24", ""),
    ("dp=2,tp=2", "12", ""),
    ("cp=2", "24", "zigzag"),
    ("cp=2,tp=2", "8", "contiguous"),
];
/// Losses of floats of tokens, which the archive says by a symbol: zigzag deals them as it deals tokens.
const BY_SYMBOL: &str = "soft_tokens";

/// Inputs of an archive, of which what is not scored is this label.
fn inputs(lab: &Lab, want: &[u8], name: &str, ignored: i64) -> String {
    let all = SafeTensors::deserialize(want).expect("safetensors");
    let of = if OF_FLOATS.contains(&name) { "y" } else { "targets" };
    let [idx, y] = ["idx", of].map(|n| all.tensor(n).expect(n));
    let label = |b: &[u8; 8]| match i64::from_le_bytes(*b) {
        -100 => ignored.to_le_bytes(),
        _label => *b,
    };
    let labels: Vec<u8> = match y.dtype() {
        safetensors::Dtype::I64 => y.data().as_chunks::<8>().0.iter().flat_map(label).collect(),
        _floats => y.data().to_vec(),
    };
    let y = safetensors::tensor::TensorView::new(y.dtype(), y.shape().to_vec(), &labels);
    let own = [("idx", idx), ("targets", y.expect("a tensor"))];
    let bytes = safetensors::serialize(own, None).expect("safetensors");
    std::fs::write(lab.path("batch.safetensors"), bytes).expect("a file");
    "batch.safetensors".into()
}

fn check(at: usize, name: &str) {
    let lab = Lab::new(&format!("losses-{name}"));
    let path = file("losses.safetensors");
    let want = Expected::at(&path, false);
    // Whatever labels that are not scored are called, negative ones are none.
    let ignored = match name {
        "ignore_last" | "with_more" => -1,
        "ignore_first" => 0,
        "weights_smooth" => 3,
        _plain => -100,
    };
    let data = inputs(&lab, &std::fs::read(&path).expect("numbers"), name, ignored);
    let archive = file(&format!("losses/{name}.pt2")).display().to_string();
    let whole = OF_ONE.contains(&name) || ["mse_sum", "soft_sum"].contains(&name);
    for (m, (mesh, rows, split)) in LAYOUTS.into_iter().enumerate() {
        let own = name == BY_SYMBOL && mesh.starts_with("cp");
        if !taken(at + m, LAYOUTS.len()) && !own {
            continue;
        }
        let flags = ["--mesh", mesh, "--global-batch", "24", "--microbatch", rows];
        let deal = if split.is_empty() { vec![] } else { vec!["--cp-split", split] };
        let seq: &[&str] = if name == BY_SYMBOL { &["--seq", "4"] } else { &[] };
        let begin = ["compile", &archive, "-o", "plan", "--prove", "yes"];
        let compile = [&begin[..], &flags, &deal, seq].concat();
        if split == "zigzag" && OF_FLOATS.contains(&name) && name != BY_SYMBOL {
            let said = lab.refuses(&compile, 4, "not-built");
            assert!(said.contains("use --cp-split contiguous"), "{said}");
            continue;
        }
        if whole && ["4", "8"].contains(&rows) {
            let said = lab.refuses(&compile, 4, "import-loss");
            assert!(said.contains("one microbatch"), "{said}");
            continue;
        }
        lab.ok(&compile);
        let run = ["run", "plan", "--weights", &archive, "--steps", "1", "--format", "json"];
        let more = ["--batch", &data, "--dump", "dump.safetensors"];
        let out = lab.ok(&[&run[..], &more].concat());
        let line = out.stdout.split(|b| *b == b'\n').next().expect("a line");
        let line: Json = serde_json::from_slice(line).expect("JSON");
        let (got, torch) =
            (line["loss"].as_f64().expect("a loss"), want.get(&format!("{name}.loss"))[0]);
        assert!(
            (got - torch).abs() <= 5e-6 * torch.abs().max(1.0),
            "{name} {mesh} {rows}: {got}, {torch}"
        );
        let shown = Expected::at(&lab.path("dump.safetensors"), false);
        for weight in ["embed.weight", "head.weight"] {
            let (own, grad) =
                (shown.get(&format!("grad.{weight}")), want.get(&format!("{name}.{weight}")));
            let off = norm(own.iter().zip(grad).map(|(a, b)| a - b));
            let size = norm(grad.iter().copied());
            assert!(
                off <= 1e-4 * size,
                "{name} {mesh} {rows}: {weight} is off by {off:e} of {size:e}"
            );
        }
    }
}

#[test]
fn losses_are_those_of_pytorch() {
    let all = OF_LABELS.into_iter().chain(OF_ONE).chain(OF_FLOATS);
    all.enumerate().for_each(|(at, name)| check(at, name));
}

/// What an evaluation of all rows of a file is.
fn evaluated(lab: &Lab, weights: &str, data: &str) -> Json {
    let run = ["run", "plan", "--weights", weights, "--eval-only", "--eval-data", data];
    let fast = ["--kernels", "interpreted", "--threads", "1", "--format", "json"];
    serde_json::from_slice(&lab.ok(&[&run[..], &fast].concat()).stdout).expect("JSON")
}

/// A loss with weights of classes, or with a class that is not scored, is over what all labels weigh, and not over those of a
/// batch: PyTorch's of all rows at once. Of labels that are no tokens, and of none, there is no perplexity.
#[test]
fn losses_of_several_batches_are_those_of_all_rows() {
    let lab = Lab::new("evaluations-losses");
    let path = file("losses.safetensors");
    let want = Expected::at(&path, false);
    let all = std::fs::read(&path).expect("numbers");
    for (name, ignored, of) in [
        ("weights", -100, "labels"),
        ("weights_smooth", 3, "labels"),
        ("ignore_first", 0, "labels"),
        ("smooth", -100, "tokens"),
        ("twice", -100, "tokens"),
        ("mse", -100, "rows"),
    ] {
        let data = inputs(&lab, &all, name, ignored);
        let archive = file(&format!("losses/{name}.pt2")).display().to_string();
        let torch = want.get(&format!("{name}.loss"))[0];
        for batch in ["24", "8", "5", "1"] {
            if of == "rows" && batch == "5" {
                continue;
            }
            lab.ok(&["compile", &archive, "-o", "plan", "--global-batch", batch, "--prove", "no"]);
            let got = evaluated(&lab, &archive, &data);
            let loss = got["eval_loss"].as_f64().expect("a loss");
            let off = (loss - torch).abs();
            assert!(off <= 5e-6 * torch.abs().max(1.0), "{name} {batch}: {loss}, {torch}");
            let said = ["tokens", "labels", "rows"].map(|k| got[k].is_u64());
            assert_eq!(said, ["tokens", "labels", "rows"].map(|k| k == of), "{name}: {got}");
            assert_eq!(got["perplexity"].is_f64(), of != "rows", "{name}: {got}");
        }
    }
    // A sum within a batch is none over all rows.
    let data = inputs(&lab, &all, "sum", -100);
    let archive = file("losses/sum.pt2").display().to_string();
    lab.ok(&["compile", &archive, "-o", "plan", "--global-batch", "8", "--prove", "no"]);
    let run = ["run", "plan", "--weights", &archive, "--eval-only", "--eval-data"];
    let said = lab.refuses(&[&run[..], &[&*data]].concat(), 2, "data");
    assert!(said.contains("--global-batch 24"), "{said}");
}
