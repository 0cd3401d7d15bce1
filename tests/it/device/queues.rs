//! What ranks queue on devices, and when they wait for them: from what the stand-in for the driver has
//! been called with.

use super::machine::{HERE, Machine};
use super::nccl::calls;
use serde_json::Value as Json;
use shardc::plan_dir;
use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The machine with a plan of a fixture, if its driver is the stand-in.
fn compiled(name: &str, model: &str, flags: &[&str]) -> Option<Machine> {
    let m = Machine::new(name)?;
    if m.libraries.is_none() {
        println!("skipped: this test reads what the stand-in for the driver records");
        return None;
    }
    let model = format!("{HERE}/tests/fixtures/{model}");
    let compile = ["compile", &model, "--global-batch", "8", "--seq", "16", "-o", "plan"];
    m.ok(&[&compile, flags].concat(), &[]);
    Some(m)
}

/// How often the driver was called for something, and of how many parts all these were.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
struct Calls {
    times: usize,
    parts: usize,
}

/// Runs some steps; the calls of the driver by what it records.
fn recorded(m: &Machine, steps: usize, flags: &[&str]) -> BTreeMap<String, Calls> {
    recorded_with(m, steps, flags, &[]).0
}

/// Also with variables for the stand-ins; and what the run said.
fn recorded_with(
    m: &Machine,
    steps: usize,
    flags: &[&str],
    also: &[(&str, &str)],
) -> (BTreeMap<String, Calls>, String) {
    let log = m.dir.join(format!("log-{steps}"));
    std::fs::create_dir_all(&log).expect("a folder");
    let (dir, steps) = (log.display().to_string(), steps.to_string());
    let run = ["run", "plan", "--device", "cuda", "--steps", &steps];
    let said = m.ok(&[&run[..], flags].concat(), &[&[("STANDIN_LOG", &*dir)], also].concat());
    let mut all = BTreeMap::<String, Calls>::new();
    for line in std::fs::read_to_string(log.join("driver")).expect("a log").lines() {
        let (what, parts) = line.split_once(' ').expect("two words");
        let calls = all.entry(what.to_string()).or_default();
        calls.times += 1;
        calls.parts += parts.parse::<usize>().expect("a number");
    }
    std::fs::remove_dir_all(log).expect("it is there");
    (all, said)
}

/// A step waits for devices where it writes inputs and reads results, and for no collective.
#[test]
fn exchanges_are_queued() {
    let flags = ["--mesh", "dp=2,tp=2", "--sp", "--microbatch", "2"];
    let Some(m) = compiled("queued", "llama_gqa", &flags) else { return };
    let (one, three) = (recorded(&m, 1, &[]), recorded(&m, 3, &[]));
    let waits = (three["waited"].times - one["waited"].times) / 2;
    let plan = plan_dir::read(&m.dir.join("plan")).expect("a plan").plan;
    let exchanges: usize = (0..4).map(|rank| calls(&plan, rank).len()).sum();
    assert!(exchanges > 200 && waits < exchanges / 4, "{waits} waits for {exchanges} exchanges");
}

/// Counts of experts are waited for once in an exchange of their rows, however many ranks take part.
#[test]
fn counts_are_read_once_in_an_exchange() {
    // The same data and results, and no experts.
    let waits = |name: &str, model: &str| {
        let flags = if model == "mixtral" { "dp=4,ep=4" } else { "dp=4" };
        let m = compiled(name, model, &["--mesh", flags])?;
        let [one, three] = [1, 3].map(|steps| recorded(&m, steps, &[])["waited"].times);
        let plan = plan_dir::read(&m.dir.join("plan")).expect("a plan").plan;
        let of_rows = |rank: usize| calls(&plan, rank).iter().filter(|c| c.is_err()).count();
        Some(((three - one) / 2, (0..4).map(of_rows).sum::<usize>()))
    };
    let (Some((with, exchanges)), Some((without, none))) =
        (waits("counts", "mixtral"), waits("no-counts", "llama_gqa"))
    else {
        return;
    };
    println!("{with} waits with {exchanges} exchanges of rows, {without} without");
    assert!(none == 0 && exchanges >= 4 * 8, "{exchanges}");
    assert!(with - without <= exchanges + 4, "{with} and {without}, {exchanges} exchanges");
}

/// Runs of launches are graphs before the first step, and launched as such in every step; what is timed is
/// launched one by one.
#[test]
fn runs_of_launches_are_graphs() {
    let Some(m) = compiled("graphs", "llama_mha", &["--mesh", "tp=2"]) else { return };
    // What a library launches is counted in graphs, and not by itself.
    let own = ["--products", "own"];
    let traced = recorded(&m, 3, &[&own[..], &["--trace", "trace.json"]].concat());
    let of = |all: &BTreeMap<String, Calls>, what: &str| all.get(what).copied().unwrap_or_default();
    assert_eq!((of(&traced, "graph"), of(&traced, "instantiated")), Default::default());
    let launches = of(&traced, "launch").times / 3;
    assert_eq!(of(&traced, "launch").times, 3 * launches);
    let [one, three] = [1, 3].map(|steps| recorded(&m, steps, &own));
    let graphs = of(&one, "graph");
    // Most of a step, and several launches each.
    assert!(graphs.parts * 2 > launches && graphs.parts > graphs.times * 3, "{graphs:?}");
    // Also of evaluations, of which there are none here.
    let made = of(&one, "instantiated");
    assert!(of(&three, "instantiated") == made && made.times >= graphs.times, "{made:?}");
    assert_eq!(of(&three, "graph"), Calls { times: graphs.times * 3, parts: graphs.parts * 3 });
    // They are launched once to be captured.
    let rest = launches - graphs.parts;
    assert_eq!(of(&one, "launch").times, made.parts + rest);
    assert_eq!(of(&three, "launch").times, made.parts + 3 * rest);
    // Nothing is looked up in a step.
    assert!(of(&one, "function").times > 0);
    assert_eq!(of(&one, "function"), of(&three, "function"));
    assert_eq!(of(&one, "loaded"), of(&three, "loaded"));
    // Without room for graphs kernels are launched one by one.
    let json = ["--format", "json", "--products", "own"];
    let losses = |said: &str| -> Vec<Json> {
        let lines = said.lines().map(|l| serde_json::from_str::<Json>(l).expect("JSON"));
        lines.filter_map(|l| l.get("loss").cloned()).collect()
    };
    let (full, said) = recorded_with(&m, 3, &json, &[("STANDIN_FULL", "1")]);
    assert_eq!(of(&full, "graph"), Calls::default());
    // What was captured in vain is launched again.
    assert!(of(&full, "launch").times > 3 * launches, "{full:?}");
    let (_, usual) = recorded_with(&m, 3, &json, &[]);
    assert!(losses(&said).len() == 3 && losses(&said) == losses(&usual), "{said}, {usual}");
}

/// A device that is lost ends the run, though the other one waits for it.
#[test]
fn a_lost_device_ends_the_run() {
    let Some(m) = compiled("lost", "llama_mha", &["--mesh", "pp=2,tp=2"]) else { return };
    // With 3 devices, the first has two of the 4 ranks.
    for (devices, fault) in [("2", "0,30"), ("4", "1,60"), ("3", "2,60")] {
        let also = [("STANDIN_DEVICES", devices), ("STANDIN_FAULT", fault)];
        let mut run = m.command(&["run", "plan", "--device", "cuda", "--steps", "2"], &also);
        let mut run =
            run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("shardc starts");
        let since = Instant::now();
        while run.try_wait().expect("it is ours").is_none() {
            if since.elapsed() > Duration::from_secs(240) {
                run.kill().expect("it runs");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let out = run.wait_with_output().expect("it has ended");
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(6), "{said}");
        assert_eq!(said.matches("error[").count(), 1, "{said}");
        assert!(said.contains("error[cuda-driver]: cu"), "{said}");
        assert!(said.contains("code 700"), "{said}");
    }
}
