//! Seeded runs: ranks as threads of one process, with a device each, over NCCL's stand-in in memory. Each
//! seed delays other work on the devices; no run hangs, and each has the numbers of threads on the CPU.

use super::hangs::HARD;
use super::machine::{HERE, Machine};
use super::nccl::CODE;
use libloading::Library;
use shardc::{device, plan_dir};
use shardc_ir::diag::Result;
use shardc_ir::kernel::Program;
use shardc_ir::plan::Plan;
use shardc_ir::weights::Weight;
use shardc_runtime::{Options, Process, Session, StepBatch, Wanted, cuda, fresh};
use shardc_testing::samples;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Plans of models as small as they come: a fixture's family, layers, and the layout.
const PLANS: [(&str, usize, &str); 10] = [
    ("llama_mha", 1, "--mesh=dp=2 --zero=3"),
    ("llama_mha", 1, "--mesh=tp=2 --sp"),
    ("llama_mha", 1, "--mesh=dp=2,tp=2"),
    ("llama_mha", 2, "--mesh=pp=2 --microbatch=1"),
    ("llama_mha", 2, "--mesh=pp=2,tp=2 --sp --microbatch=1"),
    ("llama_mha", 2, "--mesh=pp=2,dp=2 --microbatch=1 --schedule=zb-h1"),
    ("llama_mha", 1, "--mesh=cp=2 --cp-mode=ring"),
    ("mixtral", 1, "--mesh=dp=2,ep=2"),
    ("llama_mha", 2, "--mesh=dp=2,pp=2,tp=2 --microbatch=1"),
    ("llama_mha", 4, "--mesh=pp=2 --microbatch=1 --schedule=interleaved"),
];
/// Names the plan, the first seed and how many, for the process that runs them.
const WORK: &str = "SHARDC_SWEEP";
/// A run that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// Every run takes 60, the long one 10,000.
#[test]
fn seeded_runs_have_the_numbers_of_threads() {
    // At night in eight parts.
    let (parts, seeds) = (samples(1, 8), samples(6, 125));
    for (i, (family, layers, flags)) in PLANS.iter().enumerate() {
        let Some(m) = Machine::new(&format!("sweep-{i}")) else { return };
        let Some(libraries) = m.libraries.clone() else { return };
        std::fs::write(m.dir.join("config.json"), small(family, *layers)).expect("a file");
        let batch = if flags.contains("microbatch") && flags.contains("dp") { "4" } else { "2" };
        let compile = ["compile", ".", "--global-batch", batch, "--seq", "4", "-o", "plan"];
        let layout: Vec<&str> = flags.split(' ').collect();
        m.ok(&[&compile[..], &["--transport", "nccl"], &CODE, &layout].concat(), &[]);
        let since = Instant::now();
        for part in 0..parts {
            let first = 1000 * i as u64 + part * seeds;
            let mut child = Command::new(std::env::current_exe().expect("this program"));
            child.args(["--exact", "device::sweep::in_a_process", "--ignored", "--nocapture"]);
            child.env(WORK, format!("{}:{first}:{seeds}", m.dir.join("plan").display()));
            child.env("LD_LIBRARY_PATH", &libraries).env("STANDIN_DEVICES", "8").envs(HARD);
            let out = child.output().expect("it starts");
            let said = String::from_utf8_lossy(&out.stdout).into_owned();
            let also = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success() && said.contains("1 passed"), "{flags}: {said}{also}");
        }
        let each = since.elapsed().as_secs_f64() / (parts * seeds) as f64;
        println!("{flags}: {} runs, {each:.2} s each", parts * seeds);
    }
}

/// The config of a family with so many layers, and the least of all else.
fn small(family: &str, layers: usize) -> String {
    let file = format!("{HERE}/tests/fixtures/{family}/config.json");
    let text = std::fs::read_to_string(file).expect("a fixture");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for (key, value) in [
        ("num_hidden_layers", layers),
        ("hidden_size", 16),
        ("intermediate_size", 16),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 2),
        ("head_dim", 8),
        ("vocab_size", 64),
    ] {
        config[key] = value.into();
    }
    config.to_string()
}

/// The process of a sweep: a plan, with some seeds.
#[test]
#[ignore = "run by seeded_runs_have_the_numbers_of_threads, with its libraries"]
fn in_a_process() {
    let work = std::env::var(WORK).expect("who starts it says what to do");
    let mut words = work.rsplitn(3, ':');
    let mut number = || words.next().expect("a word").parse::<u32>().expect("a number");
    let (count, first) = (number(), number());
    let dir = PathBuf::from(words.next().expect("a folder"));
    let plan = plan_dir::read(&dir).expect("a plan").plan;
    let programs: Vec<Program> = (0..plan.module.mesh.ranks())
        .map(|r| shardc_codegen::program(&plan, r).expect("a program"))
        .collect();
    let plain = |_: &Options| Ok(None);
    let want = steps(&plan, &programs, Options::default(), plain).expect("it runs");
    // SAFETY: the stand-in for the driver, which the variables of this process name.
    let driver = unsafe { Library::new("libcuda.so.1") }.expect("a stand-in");
    // SAFETY: the stand-in has this function.
    let seed = unsafe { driver.get::<unsafe extern "C" fn(u32)>(b"standin_seed") };
    let seed = seed.expect("a function of the stand-in");
    for n in first..first + count {
        // SAFETY: it sets a number.
        unsafe { seed(n) };
        let since = Instant::now();
        let found = over_nccl(&plan, &programs, &dir).unwrap_or_else(|d| panic!("seed {n}: {d}"));
        assert!(since.elapsed() < LIMIT, "seed {n} took {:?}", since.elapsed());
        for (f, w) in found.iter().flatten().zip(want.iter().flatten()) {
            assert!((f - w).abs() <= 1e-4 * w.abs(), "seed {n}: {found:?} is not {want:?}");
        }
    }
}

/// Loss and norm of gradients of two steps.
fn steps(
    plan: &Plan,
    programs: &[Program],
    options: Options,
    process: impl FnOnce(&Options) -> Result<Option<Process>>,
) -> Result<Vec<[f32; 2]>> {
    let load = fresh(|w: &Weight, ranges: &[Range<usize>], out: &mut [f32]| {
        shardc_frontends::init(w, ranges, 0, out)
    });
    let load = |wanted: Wanted, ranges: &[Range<usize>], out: &mut [f32]| load(wanted, ranges, out);
    let lower = |_: &Plan, rank: usize| Ok(programs[rank].clone());
    let mut session = match process(&options)? {
        Some(p) => Session::join(plan, options, p, &lower, &load)?,
        None => Session::new(plan, options, &lower, &load)?,
    };
    let (batch, seq) = (plan.settings.global_batch, plan.settings.seq);
    let one = |step: usize| {
        let ids: Vec<i32> = (0..batch * seq).map(|i| ((i * 7 + step * 3) % 50) as i32).collect();
        let r = session.step(&StepBatch::tokens(&ids, &ids, false), 1e-3, step)?;
        Ok([r.loss.unwrap_or(0.0), r.grad_norm.unwrap_or(0.0)])
    };
    (1..=2).map(one).collect()
}

/// The same by ranks with a device each.
fn over_nccl(plan: &Plan, programs: &[Program], dir: &Path) -> Result<Vec<[f32; 2]>> {
    let devices = device::open(plan, programs, (0, None), Some(dir), false)?;
    let options = Options { devices: Some(devices.clone()), timeout: LIMIT, ..Options::default() };
    steps(plan, programs, options, |options| {
        let alarm = Arc::default();
        // As if two ranks were on each host.
        let limits = (LIMIT, options.timeout);
        let ends = devices.join(plan, &cuda::id()?, limits, (&alarm, 2))?;
        Ok(Some(Process { ends, alarm, control: None, records: PathBuf::new() }))
    })
}
