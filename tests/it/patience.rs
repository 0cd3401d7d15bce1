//! Evaluations of a training: when they are, which checkpoint is the best, and when none has become better.

use crate::lab::{FIXTURES, Lab};
use serde_json::{Value as Json, json};

/// A plan of rows of 16 tokens, four in a step, at a learning rate; and eight examples.
fn lab(name: &str, lr: &str) -> Lab {
    let lab = Lab::new(name);
    let model =
        lab.config("llama_mha", json!({ "vocab_size": 512, "max_position_embeddings": 64 }));
    let flags = ["--seq", "16", "--global-batch", "3", "--lr", lr, "--decay", "all", "-o", "plan"];
    lab.ok(&[&["compile", &*model], &flags[..]].concat());
    let line = |i: usize| json!({ "prompt": format!("{i}:"), "completion": "x".repeat(i + 2) });
    let lines: Vec<String> = (0..8).map(|i| line(i).to_string()).collect();
    lab.write("train.jsonl", lines.join("\n"));
    lab.write("test.jsonl", lines[2..5].join("\n"));
    lab
}

/// Steps and losses of evaluations, what else was said, and the number of the last step.
fn run(lab: &Lab, more: &[&str]) -> (Vec<(u64, f64)>, String, Option<u64>) {
    let tokenizer = format!("{FIXTURES}/data/tokenizer");
    let base = ["run", "plan", "--tokenizer", &tokenizer, "--eval-data", "test.jsonl"];
    let fast = ["--kernels", "interpreted", "--threads", "1", "--format", "json"];
    let data: &[&str] =
        if more.contains(&"--eval-only") { &[] } else { &["--data", "train.jsonl"] };
    let out = lab.ok(&[&base[..], data, &fast, more].concat());
    let lines = String::from_utf8(out.stdout).expect("text");
    let lines: Vec<Json> = lines.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let of = |l: &Json| Some((l["step"].as_u64()?, l["eval_loss"].as_f64()?));
    let last = lines.iter().filter(|l| l["loss"].is_number()).filter_map(|l| l["step"].as_u64());
    let said = String::from_utf8(out.stderr).expect("text");
    (lines.iter().filter_map(of).collect(), said, last.max())
}

/// The evaluation with the least loss behind a step; of equal ones the first.
fn best(all: &[(u64, f64)]) -> (u64, f64) {
    let trained = all.iter().filter(|e| e.0 > 0).copied();
    trained.reduce(|a, b| if b.1 < a.1 { b } else { a }).expect("evaluations")
}

fn kept(lab: &Lab, dir: &str) -> Vec<u64> {
    let all = std::fs::read_dir(lab.path(dir)).expect("a folder").flatten();
    let step = |name: &str| name.strip_prefix("step-")?.parse().ok();
    let mut all: Vec<u64> = all.filter_map(|e| step(&e.file_name().to_string_lossy())).collect();
    all.sort_unstable();
    all
}

/// The best checkpoint stays, whenever it was, and its name is one for other commands.
#[test]
fn the_best_checkpoint_stays() {
    let lab = lab("patience-best", "0.3");
    let save = [
        "--steps",
        "12",
        "--eval-every",
        "2",
        "--save",
        "c",
        "--save-every",
        "5",
        "--keep",
        "best",
    ];
    let (all, _, last) = run(&lab, &save);
    assert_eq!(all.iter().map(|e| e.0).collect::<Vec<_>>(), [0, 2, 4, 6, 8, 10, 12]);
    let (step, loss) = best(&all);
    assert!(step < 12 && last == Some(12), "the last is the best: {all:?}");
    assert_eq!(kept(&lab, "c"), [step, 12]);
    let index = lab.path("c/step-00000012/index.json");
    let index: Json =
        serde_json::from_slice(&std::fs::read(index).expect("an index")).expect("JSON");
    assert_eq!(index["run"]["evaluated"]["best"], json!({ "step": step, "loss": loss }));
    let eval = |name: &str| {
        let (all, said, _) = run(&lab, &["--resume", name, "--eval-only"]);
        // Nothing is trained, so that there is nothing to go on with.
        assert!(!said.contains("warning") && !said.contains("learning rate"), "{said}");
        all
    };
    assert_eq!((eval("c@best"), eval("c@latest")), (vec![(step, loss)], vec![all[6]]));
    lab.ok(&["reshard", "c@best", "--to", "hf", "-o", "tuned"]);
    // It goes on: what was the best stays, until another one is better.
    let more = [
        "--resume",
        "c",
        "--steps",
        "14",
        "--eval-every",
        "2",
        "--save",
        "c",
        "--save-every",
        "5",
        "--keep",
        "best",
    ];
    let (on, _, _) = run(&lab, &more);
    let (step, _) = best(&[&all[..], &on].concat());
    let mut want = vec![step, 14];
    want.dedup();
    assert_eq!(kept(&lab, "c"), want);
    // Without evaluations there is no best one.
    std::fs::create_dir_all(lab.path("d")).expect("a folder");
    lab.ok(&[
        "run",
        "plan",
        "--steps",
        "1",
        "--save",
        "e",
        "--save-every",
        "1",
        "--kernels",
        "interpreted",
    ]);
    let said = lab.refuses(&["run", "plan", "--resume", "e@best"], 5, "checkpoint");
    assert!(said.contains("no evaluation is recorded") && said.contains("--keep best"), "{said}");
    lab.refuses(&["run", "plan", "--save", "f", "--save-every", "1", "--keep", "best"], 2, "flag");
    lab.misuses(&["run", "plan", "--save", "f", "--save-every", "1", "--keep", "0"], "--keep");
}

/// A training ends when no evaluation has become better, as if it had not been interrupted.
#[test]
fn patience_ends() {
    let lab = lab("patience-ends", "0.3");
    let flags = ["--steps", "40", "--eval-every", "1", "--patience", "3", "--min-delta", "0.001"];
    let (all, said, last) =
        run(&lab, &[&flags[..], &["--save", "w", "--save-every", "100"]].concat());
    // By hand: three behind each other that are not lower by enough than the last that was.
    let (mut mark, mut waited, mut end) = (f64::INFINITY, 0, None);
    for (step, loss) in all.iter().filter(|e| e.0 > 0) {
        (mark, waited) = if *loss < mark - 0.001 { (*loss, 0) } else { (mark, waited + 1) };
        end = end.or((waited == 3).then_some(*step));
    }
    assert!(end.is_some_and(|e| e < 40), "it does not end: {all:?}");
    assert_eq!(last, end);
    let told = format!(
        "no lower loss in 3 evaluations: the best was {:.4}, behind step {}",
        best(&all).1,
        best(&all).0
    );
    assert!(said.contains(&told), "{said}");
    assert_eq!(kept(&lab, "w"), [end.expect("a step")], "what there is is saved");
    let first = (end.expect("a step") - 2).to_string();
    let save = ["--save", "p", "--save-every", "100"];
    let (one, _, _) = run(&lab, &[&["--steps", &first], &flags[2..], &save].concat());
    let (two, said, stopped) = run(&lab, &[&flags[..], &["--resume", "p"], &save].concat());
    assert_eq!(([one, two].concat(), stopped), (all, end));
    assert!(said.contains(&told), "{said}");
    // There is nothing to wait for.
    let (none, said, last) = run(&lab, &[&flags[..], &["--resume", "p"]].concat());
    assert!(none.is_empty() && last.is_none() && said.contains(&told), "{said}");
}

/// Behind each epoch of eight rows, three in a step, and behind the last step.
#[test]
fn epochs_are_evaluated() {
    let lab = lab("patience-epochs", "1e-3");
    let (all, said, _) = run(&lab, &["--eval-every", "epoch", "--epochs", "2.5"]);
    // 20 rows in batches of 3.
    assert!(said.contains("1 row that follows fills the last batch of --epochs"), "{said}");
    assert_eq!(all.iter().map(|e| e.0).collect::<Vec<_>>(), [0, 3, 6, 7]);
    // A run that goes on counts from the beginning.
    run(&lab, &["--steps", "4", "--save", "c", "--save-every", "4"]);
    let (all, _, _) = run(&lab, &["--eval-every", "epoch", "--epochs", "3", "--resume", "c"]);
    assert_eq!(all.iter().map(|e| e.0).collect::<Vec<_>>(), [6, 8]);
    lab.misuses(&["run", "plan", "--eval-data", "test.jsonl", "--eval-every", "0"], "--eval-every");
    lab.refuses(
        &[
            "run",
            "plan",
            "--data",
            "bytes:train.jsonl",
            "--eval-data",
            "bytes:test.jsonl",
            "--eval-every",
            "epoch",
        ],
        2,
        "flag",
    );
}

/// Losses that are added to the main one are not evaluated: those of routers, and of layers that predict further tokens.
#[test]
fn the_main_loss_is_evaluated() {
    let lab = Lab::new("patience-main");
    let eval = |base: &str, data: &str| -> Json {
        let run = ["run", "plan", "--weights", base, "--eval-only", "--eval-data", data];
        let fast = ["--kernels", "interpreted", "--threads", "1", "--format", "json"];
        serde_json::from_slice(&lab.ok(&[&run[..], &fast].concat()).stdout).expect("JSON")
    };
    for (model, without, with) in [
        ("qwen3_moe", ["--moe-aux", "0"], ["--moe-aux", "0.5"]),
        ("glm4_moe_mtp", ["--mtp", "0"], ["--mtp", "0.5"]),
    ] {
        let base = format!("{FIXTURES}/{model}");
        let batch = format!("{base}/batch.safetensors");
        let losses = [without, with].map(|more| {
            let flags = ["--seq", "16", "--global-batch", "2", "--prove", "no", "-o", "plan"];
            lab.ok(&[&["compile", &*base], &flags[..], &more[..]].concat());
            let got = eval(&base, &batch);
            let loss = got["eval_loss"].as_f64().expect("a loss");
            assert!((got["perplexity"].as_f64().expect("a number") - loss.exp()).abs() < 1e-9);
            loss
        });
        assert!((losses[0] - losses[1]).abs() < 1e-5 * losses[0], "{model}: {losses:?}");
    }
}
