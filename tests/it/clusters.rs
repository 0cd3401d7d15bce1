//! Ranks as processes under mpirun: the same bits as ranks that are threads, and one message when one
//! of them fails; `kills.rs` kills many. Built and run by `.ci/run` where an MPI is installed.

use crate::jobs::{
    Job, PATIENCE, compile, done, fixture, folder, losses, mpirun, one_message, text,
};
use serde_json::Value;
use shardc_testing::taken;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const SHARDC: &str = env!("CARGO_BIN_EXE_shardc");

/// Steps as printed, but for their times.
fn steps(o: &Output) -> Vec<String> {
    assert!(o.status.success(), "{}", text(&o.stderr));
    let lines = text(&o.stdout);
    lines.lines().map(|l| l.split(",\"ms\"").next().unwrap_or_default().to_string()).collect()
}

/// Trains 3 steps by threads and by processes, each by a plan that was compiled for them; losses, norms, logits, gradients and parameters are
/// the same bits.
fn same_bits(ranks: usize, name: &str, flags: &[&str]) {
    let dir = folder(&format!("{ranks}-{name}-{}", flags.join("").replace([',', '='], "")));
    let (model, plan) = (fixture(name), dir.join("plan"));
    let all = [&["--seq", "16", "--global-batch", "8", "--clip", "0.5"], flags].concat();
    let run = |c: &mut Command, dump: &Path, transport: &str| {
        compile(&model, &[&all[..], &["--transport", transport]].concat(), &plan);
        c.arg("run").arg(&plan).args(["--steps", "3", "--threads", "1", "--format", "json"]);
        c.args(["--transport", transport]);
        c.arg("--weights").arg(&model).arg("--batch").arg(model.join("batch.safetensors"));
        steps(&done(c.arg("--dump").arg(dump).current_dir(&dir)))
    };
    let (one, other) = (dir.join("threads"), dir.join("processes"));
    let threads = run(&mut Command::new(SHARDC), &one, "threads");
    let mut job = mpirun(ranks);
    let processes = run(job.arg(SHARDC), &other, "mpi");
    assert_eq!(threads.len(), 3);
    assert_eq!(threads, processes, "{name} {flags:?}");
    let read = |f: &Path| std::fs::read(f).expect("a dump");
    assert!(read(&one) == read(&other), "{name} {flags:?}: the dumps differ");
}

/// Meshes and flags of jobs of four and of eight processes; every run takes half of them.
#[test]
fn processes_give_the_bits_of_threads() {
    let ring = ["--zero", "3", "--cp-mode", "ring"];
    let f16 = ["--dtype", "f16", "--initial-loss-scale", "262144", "--hysteresis", "1"];
    let mixed = ["--zero", "2", "--sp", "--microbatch", "2"];
    let zb = ["--sp", "--microbatch", "1", "--schedule", "zb-h1"];
    let jobs: [(usize, &str, &str, Vec<&str>); 10] = [
        (4, "llama_gqa", "dp=2,tp=2", vec!["--sp", "--microbatch", "2"]),
        (8, "llama_mha", "dp=2,tp=4", vec!["--tp-mode", "2d"]),
        (8, "llama_deep", "pp=2,dp=2,tp=2", zb.to_vec()),
        (4, "llama_deep", "pp=2,tp=2", vec!["--microbatch", "2"]),
        (4, "gpt2", "dp_shard=4", vec!["--zero", "3"]),
        (4, "qwen3", "cp=4", vec!["--cp-mode", "ring"]),
        (4, "mixtral", "dp=2,tp=2,ep=2", vec![]),
        (8, "llama_gqa", "dp_shard=2,cp=2,tp=2", ring.to_vec()),
        (4, "llama_gqa", "dp_shard=2,tp=2", [&f16[..], &mixed].concat()),
        (8, "qwen3_moe", "dp_shard=4,tp=2,ep=4", vec!["--zero", "3"]),
    ];
    for (_, (ranks, name, mesh, flags)) in jobs.iter().enumerate().filter(|j| taken(j.0, 2)) {
        same_bits(*ranks, name, &[&["--mesh", mesh][..], flags].concat());
    }
}

/// With ZeRO-3, gathers of a block go on beside the work of the block before: in a trace, slices of collectives
/// and of work lie over each other. As threads they never do.
#[test]
fn collectives_overlap_with_work() {
    let (dir, model) = (folder("overlap"), fixture("llama_deep"));
    let plan = dir.join("plan");
    let flags = ["--seq", "32", "--global-batch", "8", "--mesh", "dp_shard=2", "--zero", "3"];
    compile(&model, &[&flags[..], &["--transport", "mpi"]].concat(), &plan);
    let overlaps = |c: &mut Command, transport: &str| {
        c.arg("run").arg(&plan).args(["--steps", "3", "--threads", "1", "--trace", "trace.json"]);
        let o = done(c.args(["--transport", transport]).current_dir(&dir));
        assert!(o.status.success(), "{}", text(&o.stderr));
        let trace = std::fs::read(dir.join("trace.json")).expect("a trace");
        let trace: Value = serde_json::from_slice(&trace).expect("JSON");
        // Rank, when it begins, when it ends.
        let slices = |category: &str| -> Vec<(u64, f64, f64)> {
            let all = trace["traceEvents"].as_array().expect("events").iter();
            let own = all.filter(|e| e["cat"] == category && e["ph"] == "X");
            let own = own.filter(|e| !e["args"]["node"].is_null());
            let number = |e: &Value, key: &str| e[key].as_f64().expect("a number");
            own.map(|e| {
                let start = number(e, "ts");
                (e["pid"].as_u64().expect("a rank"), start, start + number(e, "dur"))
            })
            .collect()
        };
        let (work, collectives) = (slices("compute"), slices("collective"));
        assert!(work.len() > 500 && collectives.len() > 50);
        let meets = |c: &&(u64, f64, f64)| {
            work.iter().any(|w| w.0 == c.0 && w.1.max(c.1) + 0.01 < w.2.min(c.2))
        };
        (collectives.len(), collectives.iter().filter(meets).count())
    };
    let (all, over) = overlaps(mpirun(2).arg(SHARDC), "mpi");
    assert!(over > 0, "none of {all} collectives overlaps with work");
    let (same, none) = overlaps(&mut Command::new(SHARDC), "threads");
    assert_eq!((same, none), (all, 0));
}

impl Job {
    fn start(name: &str, ranks: usize, mesh: &str) -> Job {
        Job::with(name, ranks, mesh, &[])
    }

    /// The same with more flags of `run`.
    fn with(name: &str, ranks: usize, mesh: &str, more: &[&str]) -> Job {
        Job::of(mpirun(ranks), name, mesh, more)
    }

    /// The same under this mpirun.
    fn of(mut c: Command, name: &str, mesh: &str, more: &[&str]) -> Job {
        let dir = folder(name);
        let plan = dir.join("plan");
        let flags = ["--seq", "16", "--global-batch", "8", "--microbatch", "2", "--mesh", mesh];
        let flags = [&flags[..], &["--transport", "mpi"]].concat();
        compile(&fixture("llama_deep"), &flags, &plan);
        let file = |name: &str| std::fs::File::create(dir.join(name)).expect("a file");
        c.arg(SHARDC).arg("run").arg(&plan).args(["--steps", "1000000", "--transport", "mpi"]);
        c.args(more);
        c.stdout(file("out")).stderr(file("err")).stdin(Stdio::null()).current_dir(&dir);
        let child = c.spawn().expect("mpirun");
        let mut job = Job { child, dir };
        job.until("out", "step     3");
        job
    }
}

#[test]
fn a_killed_rank_is_named_by_those_that_are_left() {
    let mut over_tp = false;
    for victim in [0, 2, 3] {
        let job = Job::start(&format!("kill-{victim}"), 4, "pp=2,tp=2");
        let pid = job.pid(victim);
        let dir = job.dir.clone();
        // A stranger's folder: records are written there, and not where its links lead.
        std::fs::write(dir.join("profile"), "mine").expect("written");
        std::fs::create_dir(dir.join("shardc-failure")).expect("a folder");
        for other in (0..4).filter(|r| *r != victim) {
            let link = dir.join(format!("shardc-failure/rank-{other:05}.txt"));
            std::os::unix::fs::symlink("../profile", link).expect("a link");
        }
        job.signal(&pid, "-KILL");
        let (_, err) = job.end();
        assert_eq!(std::fs::read(dir.join("profile")).expect("still there"), b"mine");
        let who = format!("process {victim} (");
        one_message(&err, &["error[rank-failed]", &who, &pid, "was killed", "--resume"]);
        // Those that are left say where they are and for whom they wait, which is their luck: in a
        // collective, in a transfer between stages, or at a kernel.
        for other in (0..4).filter(|r| *r != victim) {
            let own = format!("why: rank {other} (");
            let line = err.lines().find(|l| l.contains(&own)).unwrap_or_else(|| panic!("{err}"));
            let state = [" waits in ", " is in ", " has done "];
            let place =
                state.iter().find_map(|s| line.split_once(s)).unwrap_or_else(|| panic!("{err}"));
            let place = place.1;
            let collective = place.contains(" #") && place.contains(" over ");
            let receives =
                ["recv of %", "post of a recv of %"].iter().any(|s| place.starts_with(s));
            let transfer = receives && place.contains(" from rank ")
                || place.starts_with("send of %") && place.contains(" to rank ");
            let wait = place.starts_with("the wait for rank ");
            let kernel = place.starts_with('@');
            assert!(collective || transfer || wait || kernel, "{err}");
            assert!(line.contains(", step "), "{err}");
            over_tp |= line.contains(" over tp [");
            let record = dir.join(format!("shardc-failure/rank-{other:05}.txt"));
            let record = std::fs::read_to_string(record).expect("a record");
            assert!(record.contains(" over tp [") && record.contains("collectives over tp"));
        }
    }
    // Of nine places, most are in such.
    assert!(over_tp, "nobody waits in a collective over tp");
}

#[test]
fn a_rank_that_stops_is_found_out() {
    let job = Job::with("stop", 4, "pp=2,tp=2", &["--silence", "4"]);
    let pid = job.pid(1);
    job.signal(&pid, "-STOP");
    let mut job = job;
    job.until("err", "error[rank-failed]");
    let err = job.read("err");
    one_message(&err, &["process 1 (", "was silent for 4 s", "for rank 1"]);
    job.signal(&pid, "-KILL");
}

/// mpirun passes an interrupt on; the status is mpirun's. It kills what it has told to end after a second,
/// which a busy machine may not have for the message: here it waits for 10.
#[test]
fn an_interrupt_of_mpirun_is_told() {
    let mut c = mpirun(4);
    c.env("OMPI_MCA_odls_base_sigkill_timeout", "10");
    let job = Job::of(c, "interrupt-mpirun", "pp=2,tp=2", &[]);
    job.signal(&job.child.id().to_string(), "-INT");
    let (_, err) = job.end();
    assert_eq!(err.matches("interrupted").count(), 1, "{err}");
}

#[test]
fn an_interrupt_ends_all_ranks() {
    let job = Job::start("interrupt", 2, "tp=2");
    let pids = [job.pid(0), job.pid(1)];
    job.signal(&pids[1], "-INT");
    let (status, err) = job.end();
    assert_eq!(err.matches("interrupted").count(), 1, "{err}");
    assert_eq!(status, Some(130), "{err}");
    let start = Instant::now();
    while pids.iter().any(|pid| Path::new("/proc").join(pid).exists()) {
        assert!(start.elapsed() < PATIENCE, "a process of {pids:?} is left");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_signal_to_any_rank_saves_first() {
    for (victim, signal, status) in [(0, "-TERM", 143), (1, "-INT", 130)] {
        let saves = ["--save", "ckpt", "--save-every", "1000000"];
        let job = Job::with(&format!("save-first-{victim}"), 2, "tp=2", &saves);
        let dir = job.dir.clone();
        job.signal(&job.pid(victim), signal);
        let (code, err) = job.end();
        assert_eq!(code, Some(status), "{err}");
        let saved = shardc::checkpoint::Saved::open(&dir.join("ckpt")).expect("a checkpoint");
        saved.verify(0, 1).expect("whole");
        assert!(saved.step >= 3 && err.contains(&format!("after step {} of", saved.step)), "{err}");
        assert!(!dir.join(".ckpt.shardc.lock").exists(), "the lock is left");
    }
}

/// The script that shardc prints starts the ranks, and the next one goes on.
#[test]
fn a_launch_script_runs() {
    let dir = folder("script");
    let flags = ["--seq", "16", "--global-batch", "8", "--mesh", "tp=2"];
    compile(&fixture("llama_deep"), &flags, &dir.join("plan"));
    let mut print = Command::new(SHARDC);
    let o = done(print.args(["launch-script", "plan", "--for", "mpirun"]).current_dir(&dir));
    assert!(o.status.success(), "{}", text(&o.stderr));
    std::fs::write(dir.join("start"), &o.stdout).expect("a file");
    let bin = Path::new(SHARDC).parent().expect("a folder");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let run = |steps: &str| {
        let mut c = Command::new("bash");
        c.args(["start", "--format", "json", "--steps", steps]).env("PATH", &path);
        c.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        c.env("OMPI_MCA_rmaps_base_oversubscribe", "1").current_dir(&dir);
        let o = done(&mut c);
        assert!(o.status.success(), "{}", text(&o.stderr));
        losses(&text(&o.stdout)).into_iter().map(|x| x.0).collect::<Vec<_>>()
    };
    assert_eq!(run("2"), [1, 2]);
    assert_eq!(run("3"), [3]);
}

/// A learning rate and an order of data that are given at `run`: the same numbers as with threads, and one
/// message where processes are given others.
#[test]
fn processes_train_with_what_is_given_at_run() {
    let dir = folder("given");
    let plan = dir.join("plan");
    let sizes = ["--seq", "16", "--global-batch", "8", "--mesh", "dp_shard=2", "--zero", "3"];
    compile(&fixture("gpt2"), &sizes, &plan);
    // 160 tokens of nanoGPT's form: nine pieces of sixteen, of which a step takes eight.
    let tokens: Vec<u8> = (0..160u16).flat_map(|i| (i * 7 % 61).to_le_bytes()).collect();
    std::fs::write(dir.join("t.bin"), tokens).expect("a file");
    let run = |c: &mut Command, transport: &str, more: &[&str]| {
        c.arg("run").arg(&plan).args(["--steps", "3", "--threads", "1", "--format", "json"]);
        c.args(["--data", "t.bin", "--data-order", "shuffled", "--transport", transport]);
        done(c.args(["--lr", "1e-2"]).args(more).current_dir(&dir))
    };
    let more = ["--data-seed", "3"];
    let threads = steps(&run(&mut Command::new(SHARDC), "threads", &more));
    assert_eq!(threads, steps(&run(mpirun(2).arg(SHARDC), "mpi", &more)));
    assert_ne!(threads, steps(&run(&mut Command::new(SHARDC), "threads", &["--data-seed", "4"])));
    for (flag, value, what) in [
        ("--lr", "2e-2", "the learning rate 0.02"),
        ("--data-seed", "4", "the order of data random, seed 4"),
        ("--steps", "5", "flags --steps 5"),
        ("--save", "saved", "flags --steps 10 --save"),
    ] {
        let mut two = mpirun(1);
        two.arg(SHARDC).arg("run").arg(&plan).args(["--transport", "mpi", ":", "-n", "1"]);
        two.arg(SHARDC).arg("run").arg(&plan).args(["--transport", "mpi", flag, value]);
        let o = done(two.current_dir(&dir));
        one_message(&text(&o.stderr), &["error[plans-differ]", "process 1 (", what, "same flags"]);
        assert_eq!(o.status.code(), Some(5));
    }
}

#[test]
fn what_does_not_fit_ends_the_job_with_one_message() {
    let dir = folder("misfits");
    let (plan, other) = (dir.join("plan"), dir.join("other"));
    let flags = ["--seq", "16", "--global-batch", "8", "--mesh", "tp=2"];
    compile(&fixture("llama_deep"), &flags, &plan);
    compile(&fixture("llama_deep"), &[&flags[..], &["--lr", "1e-2"]].concat(), &other);
    let run = |c: &mut Command| done(c.current_dir(&dir));
    let base = |ranks: usize, plan: &Path| {
        let mut c = mpirun(ranks);
        c.arg(SHARDC).arg("run").arg(plan).args(["--steps", "2", "--transport", "mpi"]);
        c
    };
    let o = run(&mut base(3, &plan));
    one_message(&text(&o.stderr), &["error[launcher]", "OMPI_COMM_WORLD_SIZE is 3", "2 ranks"]);
    assert_eq!(o.status.code(), Some(5));

    let mut two = base(1, &plan);
    two.args([":", "-n", "1", SHARDC, "run"]).arg(&other);
    let o = run(two.args(["--steps", "2", "--transport", "mpi"]));
    one_message(&text(&o.stderr), &["error[plans-differ]", "process 1 (", "process 0 runs"]);
    assert_eq!(o.status.code(), Some(5));

    // Checkpoints of their own, of which one is older.
    for (name, steps) in [("a", "1"), ("b", "2")] {
        let mut c = Command::new(SHARDC);
        c.args(["run", "plan", "--steps", steps, "--save", name, "--save-every", "1"]);
        assert!(run(&mut c).status.success());
    }
    let mut two = base(1, &plan);
    two.args(["--resume", "a", ":", "-n", "1", SHARDC, "run"]).arg(&plan);
    two.args(["--steps", "2", "--transport", "mpi", "--resume", "b"]);
    let o = run(&mut two);
    one_message(&text(&o.stderr), &["error[plans-differ]", "the checkpoint of step"]);

    let o = run(&mut base(2, &dir.join("none")));
    one_message(&text(&o.stderr), &["error[plan]", "no plan is here"]);
    assert_eq!(o.status.code(), Some(2));

    // A learning rate at which the loss is not a number soon.
    let wild = dir.join("wild");
    compile(&fixture("llama_deep"), &[&flags[..], &["--lr", "1e30"]].concat(), &wild);
    let mut c = mpirun(2);
    c.arg(SHARDC).arg("run").arg(&wild).args(["--steps", "9", "--transport", "mpi"]);
    let o = run(&mut c);
    one_message(&text(&o.stderr), &["error[nan-loss]", "--lr"]);
    assert_eq!(o.status.code(), Some(6));

    // Threads, though a launcher has started several processes.
    let mut c = mpirun(2);
    let o = run(c.arg(SHARDC).arg("run").arg(&plan));
    let err = text(&o.stderr);
    assert!(err.contains("Open MPI has started 2 processes") && err.contains("--transport mpi"));
    assert_eq!(o.status.code(), Some(5));
}
