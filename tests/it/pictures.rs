//! The pictures of a pipeline, through the command line: what a run did as a trace, and the schedule
//! drawn in unit times and in the times of that run.

mod step;

use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Output};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama_deep");

/// Of the model.
const LAYERS: usize = 8;

fn lab() -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("pictures");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder for the test");
    dir
}

fn shardc(dir: &PathBuf, args: &[&str]) -> Output {
    let mut c = Command::new(env!("CARGO_BIN_EXE_shardc"));
    c.current_dir(dir).args(args).output().expect("shardc starts")
}

fn ok(dir: &PathBuf, args: &[&str]) -> String {
    let out = shardc(dir, args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).expect("text")
}

#[test]
fn a_run_is_traced_and_drawn() {
    let dir = &lab();
    let mesh = ["--mesh", "pp=2,tp=2", "--schedule", "zb-v", "--microbatch", "1"];
    let size = ["--seq", "16", "--global-batch", "4", "-o", "plan"];
    ok(dir, &[&["compile", MODEL][..], &mesh, &size].concat());
    ok(dir, &["run", "plan", "--weights", MODEL, "--steps", "3", "--trace", "trace.json"]);
    let text = std::fs::read_to_string(dir.join("trace.json")).expect("a trace");
    let trace: Json = serde_json::from_str(&text).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    the_trace_has_every_action(events);
    the_pictures_show_the_run(dir, events);
    summaries_have_all_that_is_sent(dir);

    // What is not a trace, or one of another plan, is refused.
    std::fs::write(dir.join("none.json"), "{\"traceEvents\": []}").expect("a file");
    for file in ["none.json", "plan.svg", "gone.json"] {
        let out = shardc(dir, &["inspect", "plan", "--timeline", "--times", file]);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && said.contains("error[file]"), "{file}: {said}");
    }
}

/// Ranks, their actions, kernels within these, and messages between them.
fn the_trace_has_every_action(events: &[Json]) {
    let is = |e: &&Json, ph: &str| e["ph"] == *ph;

    // One process per rank, named by its place in the mesh.
    let names = events.iter().filter(|e| e["name"] == "process_name");
    let names: Vec<&str> = names.filter_map(|e| e["args"]["name"].as_str()).collect();
    assert_eq!(names.len(), 4);
    assert!(names.contains(&"rank 3 pp=1 tp=1"), "{names:?}");

    // Every action of every step, once per rank that runs its stage.
    let mut actions: BTreeMap<&str, usize> = BTreeMap::new();
    for e in events.iter().filter(|e| is(e, "X")) {
        *actions.entry(e["name"].as_str().expect("a name")).or_default() += 1;
    }
    for stage in 0..4 {
        for kind in ["F", "I", "W"] {
            for microbatch in 0..4 {
                let name = format!("{stage}{kind}{microbatch}");
                assert_eq!(actions.get(&*name), Some(&(2 * 3)), "{name}");
            }
        }
    }

    // Kernels lie inside the actions, on the same track: attention once per layer, microbatch and rank.
    let kernels: Vec<&Json> = events.iter().filter(|e| e["args"]["value"] != Json::Null).collect();
    let attention = kernels.iter().filter(|e| e["name"] == "attention");
    assert_eq!(attention.count(), LAYERS * 4 * 2 * 3);
    let span = |e: &Json| {
        let start = e["ts"].as_f64().expect("a time");
        (e["pid"].as_u64(), start, start + e["dur"].as_f64().expect("a length"))
    };
    let whole = |e: &&Json| is(e, "X") && e["cat"] == "compute" && e["args"]["value"] == Json::Null;
    let calls: Vec<_> = events.iter().filter(whole).map(span).collect();
    for (rank, start, end) in kernels.iter().map(|e| span(e)) {
        let around = |c: &(_, f64, f64)| c.0 == rank && c.1 <= start && end <= c.2 + 1e-3;
        assert!(calls.iter().any(around), "a kernel of no action");
    }

    // Every arrow has both ends, begins before it ends, and leads to another rank of the pipeline.
    let ends = |ph: &str| -> BTreeMap<u64, (u64, f64)> {
        let all = events.iter().filter(|e| is(e, ph));
        let one = |e: &Json| {
            let pid = e["pid"].as_u64().expect("a rank");
            (e["id"].as_u64().expect("an id"), (pid, e["ts"].as_f64().expect("a time")))
        };
        all.map(one).collect()
    };
    let (from, to) = (ends("s"), ends("f"));
    assert!(!from.is_empty() && from.keys().eq(to.keys()));
    for (id, (rank, at)) in &from {
        let (other, then) = to[id];
        assert!(at <= &then && rank % 2 == other % 2 && *rank != other, "message {id}");
    }
}

/// Timelines in units and in the times of the run, of all pipeline ranks and of one.
fn the_pictures_show_the_run(dir: &PathBuf, events: &[Json]) {
    let units = ok(dir, &["inspect", "plan", "--timeline", "--svg", "plan.svg"]);
    let measured = ok(dir, &["inspect", "plan", "--timeline", "--times", "trace.json"]);
    for drawn in [&units, &measured] {
        assert!(drawn.lines().all(|l| l.chars().count() <= 80), "{drawn}");
        assert!(drawn.contains("pp 0 F0") && drawn.contains("makespan"), "{drawn}");
    }
    assert!(measured.contains("time in milliseconds") && measured != units);
    let svg = std::fs::read_to_string(dir.join("plan.svg")).expect("a picture");
    for part in
        ["<svg ", "activations", "optimizer", "pp 1", "zb-v", "f32", "finish, once", "</svg>"]
    {
        assert!(svg.contains(part), "{part}");
    }

    // One pipeline rank of them, with the time of all.
    let one = ok(dir, &["inspect", "plan", "--timeline", "--class", "1", "--svg", "one.svg"]);
    assert!(one.contains("\npp 1 ") && !one.contains("\npp 0 "), "{one}");
    let makespan = |s: &str| s.lines().find(|l| l.starts_with("makespan")).map(String::from);
    assert_eq!(makespan(&one), makespan(&units));
    let svg = std::fs::read_to_string(dir.join("one.svg")).expect("a picture");
    assert!(svg.contains(">pp 1</text>") && !svg.contains(">pp 0</text>"));

    // Enter and finish of the run have the times that it took.
    let json =
        ok(dir, &["inspect", "plan", "--timeline", "--times", "trace.json", "--format", "json"]);
    let json: Json = serde_json::from_str(&json).expect("JSON");
    let edge = &json["ranks"][1]["finish"];
    let length = edge["end"].as_f64().zip(edge["start"].as_f64()).map(|(b, a)| b - a);
    let finish =
        events.iter().filter(|e| e["name"] == "optimizer_step" && e["pid"].as_u64() >= Some(2));
    let later = finish.filter(|e| e["args"]["step"] != "1").filter_map(|e| e["dur"].as_f64());
    let all: Vec<f64> = later.collect();
    let mean = all.iter().sum::<f64>() / all.len() as f64 / 1e3;
    assert!(all.len() == 4 && (length.unwrap_or(0.0) - mean).abs() < 1e-6, "{length:?} {mean}");
}

/// What the JSON of a summary sums up has all that is sent, in whole bytes.
fn summaries_have_all_that_is_sent(dir: &PathBuf) {
    for class in ["0", "1"] {
        let s = ok(dir, &["inspect", "plan", "--summary", "--class", class, "--format", "json"]);
        let s: Json = serde_json::from_str(&s).expect("JSON");
        let (mut calls, mut bytes) = (0, 0);
        for section in s["collectives"]["sections"].as_array().expect("sections") {
            let times = match section["where"].as_str() {
                Some("layers") => {
                    let n = |key: &str| section[key].as_u64().expect("a number");
                    (n("last") - n("first") + 1) * 4
                }
                Some("scope") => 4,
                _step => 1,
            };
            for c in section["calls"].as_array().expect("calls") {
                calls += c["calls"].as_u64().expect("a number") * times;
                bytes += c["bytes"].as_u64().expect("whole bytes") * times;
            }
        }
        let sends =
            s["transfers"].as_array().expect("a list").iter().filter(|t| t["kind"] == "send");
        for t in sends.clone() {
            calls += t["count"].as_u64().expect("a number");
            bytes += t["bytes"].as_u64().expect("whole bytes");
        }
        assert!(sends.count() > 0);
        assert_eq!(
            (&s["per_step"]["calls"], &s["per_step"]["bytes"]),
            (&calls.into(), &bytes.into())
        );
        let compiled = ok(dir, &["inspect", "plan", "--summary", "--class", class]);
        assert!(compiled.contains(&format!("in all per step: {calls} calls")), "{compiled}");
    }
}
