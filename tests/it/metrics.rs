//! `run --metrics`: an object a step, of what the run prints and of what it does not.

use crate::lab::{FIXTURES, Lab};
use serde_json::{Value as Json, json};

fn lines(lab: &Lab, file: &str) -> Vec<Json> {
    let text = std::fs::read_to_string(lab.path(file)).expect("a file of metrics");
    text.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect()
}

fn steps(all: &[Json]) -> Vec<u64> {
    all.iter().filter(|l| l.get("loss").is_some()).filter_map(|l| l["step"].as_u64()).collect()
}

fn plan(name: &str, more: &[&str]) -> Lab {
    let lab = Lab::new(name);
    let model = format!("{FIXTURES}/gpt2");
    lab.ok(&[&["compile", &model, "--seq", "16", "-o", "p"], more].concat());
    lab
}

const RUN: [&str; 5] = ["run", "p", "--kernels", "interpreted", "--steps"];

#[test]
fn a_line_has_what_the_step_came_to() {
    let schedule = ["--lr", "1e-2", "--lr-schedule", "warmup-cosine", "--warmup", "2"];
    let lab = Lab::new("metrics");
    let bytes = lab.config("llama_mha", json!({ "vocab_size": 256 }));
    let layout =
        ["compile", &bytes, "-o", "p", "--seq", "16", "--mesh", "dp=2,tp=2", "--clip", "1.0"];
    lab.ok(&[&layout[..], &schedule].concat());
    let more = ["--metrics", "m.jsonl", "--format", "json", "--eval-every", "2"];
    let data = ["--data", "bytes:p/*.ir", "--eval-data", "bytes:p/*.json"];
    let shown = lab.ok(&[&RUN[..], &["4"], &more, &data].concat()).stdout;
    let shown = String::from_utf8_lossy(&shown).into_owned();
    let shown: Vec<Json> = shown.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let all = lines(&lab, "m.jsonl");
    assert_eq!(all.len(), shown.len());
    for (line, shown) in all.iter().zip(&shown) {
        for key in ["step", "loss", "grad_norm", "tokens", "ms", "eval_loss"] {
            assert_eq!(line.get(key), shown.get(key), "{key} of {line}");
        }
    }
    let trained: Vec<&Json> = all.iter().filter(|l| l.get("loss").is_some()).collect();
    let lr: Vec<f64> = trained.iter().filter_map(|l| l["lr"].as_f64()).collect();
    assert_eq!((lr.len(), lr[0], lr[1]), (4, 5e-3, 1e-2));
    assert!(lr[2] > lr[3] && lr[3] > 0.0, "{lr:?}");
    for l in &trained {
        let rate =
            l["tokens_per_second"].as_f64().expect("a rate") * l["ms"].as_f64().unwrap() / 1e3;
        assert!((rate - 128.0).abs() < 1e-6, "8 sequences of 16 tokens: {l}");
        assert!(l["memory_bytes"].as_u64().is_some_and(|n| n > 1 << 20), "{l}");
    }
    assert_eq!(all.iter().filter(|l| l.get("eval_loss").is_some()).count(), 3);
}

#[test]
fn a_resumed_run_goes_on_with_its_file() {
    let lab = plan("metrics-resumed", &[]);
    let save = ["--save", "ckpt", "--save-every", "2", "--metrics", "m.jsonl"];
    lab.ok(&[&RUN[..], &["4"], &save].concat());
    assert_eq!(steps(&lines(&lab, "m.jsonl")), [1, 2, 3, 4]);
    // From step 2: what came after it is made again, and a line that was cut off goes.
    let text = std::fs::read_to_string(lab.path("m.jsonl")).expect("text");
    lab.write("m.jsonl", text + "{\"step\":5,\"lo");
    let from = ["--resume", "ckpt/step-00000002", "--metrics", "m.jsonl"];
    let said = |out: std::process::Output| String::from_utf8_lossy(&out.stderr).into_owned();
    let text = said(lab.ok(&[&RUN[..], &["5"], &from].concat()));
    assert!(text.contains("replaced 3 lines of steps behind 2 of metrics"), "{text}");
    assert_eq!(steps(&lines(&lab, "m.jsonl")), [1, 2, 3, 4, 5]);
    // A run from the beginning begins the file, and says what was there.
    let text = said(lab.ok(&[&RUN[..], &["1"], &["--metrics", "m.jsonl"]].concat()));
    assert!(text.contains("replaced 5 lines of metrics that were in m.jsonl"), "{text}");
    assert_eq!(steps(&lines(&lab, "m.jsonl")), [1]);
}

#[test]
fn other_files_are_kept_and_a_lost_one_is_told() {
    let lab = plan("metrics-files", &[]);
    lab.write("notes.txt", "mine");
    let said = lab.refuses(&[&RUN[..], &["1"], &["--metrics", "notes.txt"]].concat(), 2, "output");
    assert!(said.contains("file of metrics"), "{said}");
    lab.refuses(&[&RUN[..], &["1"], &["--metrics", "none/m.jsonl"]].concat(), 2, "file");
    let limited = "ulimit -f 1; exec \"$@\"";
    let mut c = std::process::Command::new("bash");
    c.args(["-c", limited, "-"]).arg(env!("CARGO_BIN_EXE_shardc")).current_dir(&lab.0);
    let out = c.args(RUN).args(["30", "--metrics", "m.jsonl"]).output().expect("starts");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(5), "{said}");
    assert!(said.contains("training goes on without them"), "{said}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("step    30"), "all steps are taken");
}

#[test]
fn inference_has_no_learning_rate() {
    let lab = plan("metrics-infer", &["--mode", "infer"]);
    lab.ok(&[&RUN[..], &["1"], &["--metrics", "m.jsonl"]].concat());
    let all = lines(&lab, "m.jsonl");
    assert!(all[0]["lr"].is_null() && all[0]["loss"].is_null() && all[0]["ms"].is_number());
}

#[test]
fn no_two_outputs_are_one_file() {
    let lab = plan("metrics-alone", &[]);
    let both = ["1", "--trace", "m.jsonl", "--metrics", "m.jsonl"];
    let said = lab.refuses(&[&RUN[..], &both].concat(), 2, "flag");
    assert!(said.contains("--trace and --metrics write the same file"), "{said}");
    assert!(!lab.path("m.jsonl").exists());
}

/// The records of a file of events: of each its length and what is in it, between sums.
fn records(bytes: &[u8]) -> Vec<&[u8]> {
    let (mut rest, mut out) = (bytes, vec![]);
    while let Some((len, more)) = rest.split_first_chunk::<8>() {
        let len = u64::from_le_bytes(*len) as usize;
        out.push(&more[4..4 + len]);
        rest = &more[8 + len..];
    }
    out
}

/// Events have the numbers of `--metrics`: each name stands in the record of its step, and behind it the f32.
#[test]
fn events_have_the_same_numbers() {
    let lab = plan("events", &[]);
    let to = ["--metrics", "m.jsonl", "--tensorboard", "logs/run"];
    lab.ok(&[&RUN[..], &["2", "--save", "ckpt", "--save-every", "1"], &to].concat());
    lab.ok(&[&RUN[..], &["3", "--resume", "ckpt"], &to].concat());
    let mut files: Vec<_> = std::fs::read_dir(lab.path("logs/run")).expect("a folder").collect();
    files.sort_by_key(|f| {
        f.as_ref().expect("a file").metadata().expect("facts").modified().expect("a time")
    });
    let files: Vec<Vec<u8>> = files
        .into_iter()
        .map(|f| std::fs::read(f.expect("a file").path()).expect("read"))
        .collect();
    let [first, second] = &files[..] else { panic!("{} files", files.len()) };
    let (first, second) = (records(first), records(second));
    assert_eq!(
        (first.len(), second.len()),
        (3, 3),
        "a version, two steps; a version, a new start, a step"
    );
    for all in [&first, &second] {
        assert!(all[0].ends_with(b"brain.Event:2"));
    }
    assert!(second[1].ends_with(&[0x3a, 2, 8, 1]), "a session starts");
    for (event, line) in first[1..].iter().chain(&second[2..]).zip(lines(&lab, "m.jsonl")) {
        assert_eq!(u64::from(event[10]), line["step"].as_u64().expect("a step"));
        for name in ["loss", "lr", "grad_norm", "ms", "tokens_per_second"] {
            let number = line[name].as_f64().unwrap_or_else(|| panic!("{name} of {line}")) as f32;
            let mut value = vec![0x0a, name.len() as u8];
            value.extend(name.as_bytes());
            value.push(0x15);
            value.extend(number.to_le_bytes());
            assert!(event.windows(value.len()).any(|w| w == value), "{name} of {line}");
        }
    }
}
