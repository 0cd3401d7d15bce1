//! Plans that lie, with their hashes and their peaks of memory made right again: what reading believes is run
//! for a step, between guard pages and in memory full of NaN. Nobody leaves the memory of a rank, and nobody
//! reads what was never written, but for rows of experts: a run in plain memory gives the same.
//!
//! `PLANS` (150; `.ci/nightly` has 3,000) mutants, or as many as `FUZZ_SECONDS` has time for, drawn by `SEED`. Most run as threads with interpreted
//! kernels, one in [`COMPILED`] with compiled ones, and one in [`PROCESSES`] as processes over MPI, if that is
//! built.

use super::edits::{KINDS, Kind, Texts};
use super::limits::{self, Ran};
use super::mutate::Draw;
use shardc::plan_dir::{read, reseal};
use shardc_testing::{Tool, samples, skip};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

/// One mutant in so many is run with compiled kernels, and as processes.
const COMPILED: usize = 8;
#[cfg(feature = "mpi")]
const PROCESSES: usize = 48;

/// Where assertions are on, memory must begin at a page, and ends less than a page before the guard.
const PAGES: Option<(&str, &str)> =
    if cfg!(debug_assertions) { Some(("GUARD_PAGES", "1")) } else { None };

/// Plans that are edited: a fixture, ranks, flags.
const PLANS: [(&str, usize, &[&str]); 8] = [
    ("llama_mha", 2, &["--mesh", "tp=2", "--sp"]),
    ("llama_gqa", 2, &["--mesh", "tp=2", "--dtype", "bf16"]),
    ("llama_deep", 2, &["--mesh", "pp=2", "--microbatch", "1", "--global-batch", "3"]),
    ("gpt2", 2, &["--mesh", "dp_shard=2", "--zero", "3", "--global-batch", "2"]),
    ("mixtral", 2, &["--mesh", "dp_shard=2,ep=2", "--global-batch", "2"]),
    ("qwen3", 2, &["--mesh", "cp=2", "--cp-mode", "ring"]),
    ("gemma2", 1, &["--recompute", "full", "--clip", "0.5"]),
    ("llama_mha", 4, &["--mesh", "tp=4", "--tp-mode", "2d"]),
];

/// Of experts' rows those are there that were sent, and types do not say how many. A plan that lies may join rows of two
/// layers, and so read rows of its rank's memory that nobody has written: counted, and no fault.
const RAGGED: &str = "mixtral";

/// How a mutant is run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum How {
    Interpreted,
    Compiled,
    /// Over MPI.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code))]
    Processes,
}

/// A folder of libraries and programs of the test: what is preloaded, and what shows that it works.
fn guard(dir: &Path) -> Option<PathBuf> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("testing/guard");
    let make = |flags: &[&str], source: &str, to: &Path| -> Option<()> {
        let mut c = Command::new("g++");
        let made = c.args(["-O1"]).args(flags).arg(sources.join(source)).arg("-o").arg(to);
        let made = made.arg("-ldl").output().ok()?;
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Some(())
    };
    let (library, probe) = (dir.join("guard.so"), dir.join("probe"));
    make(&["-shared", "-fPIC"], "guard.cpp", &library)?;
    make(&[], "probe.cpp", &probe)?;
    let said = |at: &str| {
        let mut c = Command::new(&probe);
        c.arg(at).envs(PAGES).env("LD_PRELOAD", &library);
        let ran = limits::run(c, dir);
        (ran.outcome, ran.out.trim().to_string())
    };
    // Of 6400 bytes, the first and those on both sides.
    let (before, behind) = if PAGES.is_some() { ("-1", "8192") } else { ("-1793", "6400") };
    assert_eq!(said("0"), ("0".into(), "193".into()), "memory is not poisoned");
    assert_eq!(said(behind).0, "signal 11", "no guard behind");
    assert_eq!(said(before).0, "signal 11", "no guard before");
    Some(library)
}

/// Runs a plan for a step; in guarded memory if there is a library for it.
fn run(dir: &Path, plan: &Path, ranks: usize, how: How, guard: Option<&Path>) -> Ran {
    let mut c = match how {
        How::Processes => {
            let mut c = Command::new("mpirun");
            c.args(["--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]);
            c.args(["--mca", "btl_vader_single_copy_mechanism", "none"]);
            if let Some(g) = guard {
                c.args(["-x", "GUARD_REPORT"]).env("GUARD_REPORT", "1").envs(PAGES);
                if let Some((name, _)) = PAGES {
                    c.args(["-x", name]);
                }
                c.arg("-x").arg(format!("LD_PRELOAD={}", g.display()));
            }
            c.args(["-n", &ranks.to_string(), &limits::shardc()]);
            c
        }
        _ => {
            let mut c = Command::new(limits::shardc());
            if let Some(g) = guard {
                c.env("LD_PRELOAD", g).env("GUARD_REPORT", "1").envs(PAGES);
            }
            c
        }
    };
    let kernels = if how == How::Compiled { "compiled" } else { "interpreted" };
    let transport = if how == How::Processes { "mpi" } else { "threads" };
    c.arg("run").arg(plan).args(["--steps", "1", "--threads", "1", "--format", "json"]);
    c.args(["--timeout", "600", "--kernels", kernels, "--transport", transport]);
    limits::run(c, dir)
}

/// Texts of a plan, read or written.
fn texts(plan: &Path) -> Texts {
    let text = |name: &str| std::fs::read_to_string(plan.join(name)).expect("a text");
    Texts {
        programs: text("programs/all.ir"),
        head: text("plan.json"),
        options: text("options.toml"),
        weights: text("weights.json"),
        schedule: text("schedule.csv"),
    }
}

fn put(plan: &Path, t: &Texts) {
    let put = |name: &str, text: &str| std::fs::write(plan.join(name), text).expect("written");
    put("programs/all.ir", &t.programs);
    put("plan.json", &t.head);
    put("options.toml", &t.options);
    put("weights.json", &t.weights);
    put("schedule.csv", &t.schedule);
}

/// Whether reading believes the plan, once hashes and peaks are made right.
pub fn believed(plan: &Path) -> bool {
    if reseal(plan).is_err() {
        return false;
    }
    let Err(said) = read(plan) else { return true };
    // "the plan states peaks of [1, 2] B, its programs need [3, 4] B"
    let Some((_, need)) = said.message.split_once("its programs need [") else { return false };
    let need = need.split(']').next().unwrap_or("");
    let path = plan.join("plan.json");
    let head = std::fs::read(&path).expect("a text");
    let mut head: serde_json::Value = serde_json::from_slice(&head).expect("it was read");
    let peaks = need.split(", ").map(|n| n.parse::<u64>().expect("a number").into());
    head["peak_bytes"] = peaks.collect::<Vec<serde_json::Value>>().into();
    std::fs::write(&path, head.to_string()).expect("written");
    reseal(plan).is_ok() && read(plan).is_ok()
}

/// What became of mutants, by what was edited and how they ran.
#[derive(Default)]
struct Tally {
    refused: BTreeMap<Kind, usize>,
    ran: BTreeMap<(Kind, How, String), usize>,
    defects: Vec<String>,
}

/// One mutant of a plan: edited, made right, read, and run if it is believed.
fn mutant(dir: &Path, library: &Path, base: usize, draw: &mut Draw, tally: &Mutex<Tally>) {
    let kind = Kind::drawn(draw);
    let root = dir.parent().expect("a folder");
    let (own, plan) = (root.join(format!("base-{base}")), dir.join("mutant"));
    let before = texts(&own);
    let mut t = before.clone();
    for _ in 0..=draw.below(8) / 6 {
        kind.edit(&mut t, draw);
    }
    if t == before {
        return;
    }
    for name in ["model.ir", "config.json"] {
        std::fs::copy(own.join(name), plan.join(name)).expect("a copy");
    }
    put(&plan, &t);
    let seed = draw.seed();
    let held = |what: String| {
        let name = format!("lie-{base}-{kind:?}-{seed}");
        let kept = root.join("defects").join(&name);
        std::fs::create_dir_all(kept.join("programs")).expect("a folder");
        put(&kept, &texts(&plan));
        for file in ["model.ir", "config.json"] {
            std::fs::copy(own.join(file), kept.join(file)).expect("a copy");
        }
        tally.lock().expect("a lock").defects.push(format!("{name}: {what}"));
    };
    match catch_unwind(AssertUnwindSafe(|| believed(&plan))) {
        Ok(true) => {}
        Ok(false) => {
            *tally.lock().expect("a lock").refused.entry(kind).or_default() += 1;
            return;
        }
        Err(_) => return held("a panic when it is read".into()),
    }
    let how = if draw.below(COMPILED) == 0 { How::Compiled } else { How::Interpreted };
    #[cfg(feature = "mpi")]
    let how = if draw.below(PROCESSES) == 0 { How::Processes } else { how };
    let ranks = PLANS[base].1;
    let ran = run(dir, &plan, ranks, how, Some(library));
    let mut outcome = ran.outcome.clone();
    if ran.defect() {
        held(format!("{how:?}: {}, {} s: {}", ran.outcome, ran.seconds, ran.err));
    } else if ran.good() || ran.err.contains("nan-loss") {
        let plain = run(dir, &plan, ranks, how, None);
        let same = ran.outcome == plain.outcome && ran.results() == plain.results();
        if !same && PLANS[base].0 == RAGGED {
            outcome = "undefined rows".into();
        } else if !same {
            held(format!("{how:?}, poisoned: {}\n{}", ran.out, plain.out));
        }
    }
    *tally.lock().expect("a lock").ran.entry((kind, how, outcome)).or_default() += 1;
}

/// The table of docs/safety.md.
fn report(tally: &Tally, seed: u64) {
    println!("seed {seed}\n| what is edited | mutants | refused when read | run, by exit status |");
    println!("|---|---|---|---|");
    let mut all = [0, 0];
    let mut ways: BTreeMap<How, usize> = BTreeMap::new();
    for kind in KINDS {
        let refused = tally.refused.get(&kind).copied().unwrap_or(0);
        let mut by: BTreeMap<&str, usize> = BTreeMap::new();
        for ((_, how, outcome), n) in tally.ran.iter().filter(|r| r.0.0 == kind) {
            *by.entry(outcome).or_default() += n;
            *ways.entry(*how).or_default() += n;
        }
        let ran: usize = by.values().sum();
        let each: Vec<String> = by.iter().map(|(o, n)| format!("{o}: {n}")).collect();
        let name = format!("{kind:?}").to_lowercase();
        println!("| {name} | {} | {refused} | {} |", refused + ran, each.join(", "));
        all = [all[0] + refused + ran, all[1] + ran];
    }
    println!("{} mutants, of which {} were run: {ways:?}", all[0], all[1]);
}

#[test]
fn lying_plans_stay_in_their_memory() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let (seconds, since) = (number("FUZZ_SECONDS"), Instant::now());
    let usual = if seconds.is_some() { u64::MAX } else { samples(150, 3000) };
    let mutants = number("PLANS").unwrap_or(usual);
    let late = || seconds.is_some_and(|s| since.elapsed().as_secs() >= s);
    let seed = number("SEED").unwrap_or(1);
    let cores = std::thread::available_parallelism().map_or(2, |n| n.get());
    let workers = number("FUZZ_WORKERS").map_or(cores.min(8), |n| n as usize);
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lies");
    let _ = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(&root).expect("a folder");
    let Some(library) = guard(&root) else { return skip(Tool::Cpp, "guard pages") };
    let dirs: Vec<PathBuf> = (0..workers).map(|w| root.join(w.to_string())).collect();
    for dir in &dirs {
        std::fs::create_dir_all(dir.join("mutant/programs")).expect("a folder");
    }
    crate::each(
        workers,
        |i| i < PLANS.len(),
        |worker, i| {
            let ((model, ranks, flags), dir) = (PLANS[i], &dirs[worker]);
            let plan = root.join(format!("base-{i}"));
            let mut c = Command::new(limits::shardc());
            c.arg("compile").arg(Path::new(crate::FIXTURES).join(model)).args(["--seq", "8"]);
            c.args(flags).arg("-o").arg(&plan);
            let made = limits::run(c, dir);
            assert!(made.good(), "{model} {flags:?}: {}", made.err);
            for how in [
                How::Interpreted,
                How::Compiled,
                #[cfg(feature = "mpi")]
                How::Processes,
            ] {
                let guarded = run(dir, &plan, ranks, how, Some(&library));
                let plain = run(dir, &plan, ranks, how, None);
                assert!(guarded.good() && plain.good(), "{model}: {} {}", guarded.err, plain.err);
                assert_eq!(guarded.results(), plain.results(), "{model} {flags:?} {how:?}");
                let maps = guarded.err.matches("guarded ").count();
                let processes = if how == How::Processes { ranks } else { 1 };
                assert_eq!(maps, processes, "{model} {how:?}: {}", guarded.err);
                assert!(!guarded.err.contains("guarded 0"), "{model}: {}", guarded.err);
            }
        },
    );
    let tally = Mutex::new(Tally::default());
    let more = |i: usize| (i as u64) < mutants && !late();
    crate::each(workers, more, |worker, i| {
        let base = i % PLANS.len();
        let mut draw = Draw::new(seed, i as u64, 1000 + base as u64);
        mutant(&dirs[worker], &library, base, &mut draw, &tally);
    });
    let tally = tally.into_inner().expect("a lock");
    report(&tally, seed);
    assert!(!tally.ran.is_empty(), "no plan was run");
    assert!(tally.defects.is_empty(), "{} defects: {:#?}", tally.defects.len(), tally.defects);
}
