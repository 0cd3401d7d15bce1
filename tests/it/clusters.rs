//! Ranks as processes under mpirun: the same bits as ranks that are threads, and one message when one
//! of them fails. Built and run by `.ci/run` where an MPI is installed.

use shardc_testing::samples;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const SHARDC: &str = env!("CARGO_BIN_EXE_shardc");

/// After so long a test that waits has failed: no job here needs a tenth of it on a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A folder of a test's own, empty.
fn folder(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("clusters").join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder");
    dir
}

fn mpirun(ranks: usize) -> Command {
    let mut c = Command::new("mpirun");
    c.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    c.args(["--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-n", &ranks.to_string()]);
    c
}

fn done(c: &mut Command) -> Output {
    c.output().unwrap_or_else(|e| panic!("{c:?}: {e}"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn compile(model: &Path, flags: &[&str], plan: &Path) {
    let o = done(Command::new(SHARDC).arg("compile").arg(model).args(flags).arg("-o").arg(plan));
    assert!(o.status.success(), "{flags:?}: {}", text(&o.stderr));
}

/// Steps as printed, but for their times.
fn steps(o: &Output) -> Vec<String> {
    assert!(o.status.success(), "{}", text(&o.stderr));
    let lines = text(&o.stdout);
    lines.lines().map(|l| l.split(",\"ms\"").next().unwrap_or_default().to_string()).collect()
}

/// Trains 3 steps by threads and by processes; losses, norms, logits, gradients and parameters are
/// the same bits.
fn same_bits(ranks: usize, name: &str, flags: &[&str]) {
    let dir = folder(&format!("{ranks}-{name}-{}", flags.join("").replace([',', '='], "")));
    let (model, plan) = (fixture(name), dir.join("plan"));
    let all = [&["--seq", "16", "--global-batch", "8", "--clip", "0.5"], flags].concat();
    compile(&model, &all, &plan);
    let run = |c: &mut Command, dump: &Path, transport: &str| {
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

#[test]
fn four_processes_give_the_bits_of_threads() {
    same_bits(4, "llama_gqa", &["--mesh", "dp=2,tp=2", "--sp", "--microbatch", "2"]);
    same_bits(4, "llama_deep", &["--mesh", "pp=2,tp=2", "--microbatch", "2"]);
    same_bits(4, "gpt2", &["--mesh", "dp_shard=4", "--zero", "3"]);
    same_bits(4, "qwen3", &["--mesh", "cp=4", "--cp-mode", "ring"]);
    same_bits(4, "mixtral", &["--mesh", "dp=2,tp=2,ep=2"]);
}

#[test]
fn eight_processes_give_the_bits_of_threads() {
    let zb = ["--mesh", "pp=2,dp=2,tp=2", "--sp", "--microbatch", "1", "--schedule", "zb-h1"];
    same_bits(8, "llama_deep", &zb);
    same_bits(
        8,
        "llama_gqa",
        &["--mesh", "dp_shard=2,cp=2,tp=2", "--zero", "3", "--cp-mode", "ring"],
    );
    same_bits(8, "qwen3_moe", &["--mesh", "dp_shard=4,tp=2,ep=4", "--zero", "3"]);
    same_bits(8, "llama_mha", &["--mesh", "dp=2,tp=4", "--tp-mode", "2d"]);
}

/// A job that trains until it is ended.
struct Job {
    child: Child,
    dir: PathBuf,
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

    fn read(&self, file: &str) -> String {
        let mut s = vec![];
        let f = std::fs::File::open(self.dir.join(file));
        f.and_then(|mut f| f.read_to_end(&mut s)).expect("a file");
        text(&s)
    }

    fn until(&mut self, file: &str, word: &str) {
        let start = Instant::now();
        while !self.read(file).contains(word) {
            let gone = self.child.try_wait().expect("a child").is_some();
            let late = start.elapsed() > PATIENCE;
            assert!(!gone && !late, "no {word}:\n{}\n{}", self.read("out"), self.read("err"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The process of a rank, from the table that process 0 prints.
    fn pid(&self, rank: usize) -> String {
        let err = self.read("err");
        let line = err.lines().find(|l| l.starts_with(&format!(" {rank} "))).expect("a row");
        let rest = line.split("pid ").nth(1).expect("a pid");
        rest.split_whitespace().next().expect("a number").to_string()
    }

    fn signal(&self, pid: &str, signal: &str) {
        let done = Command::new("kill").args([signal, pid]).status().expect("kill");
        assert!(done.success());
    }

    /// Waits for the end; the status, and what was said.
    fn end(mut self) -> (Option<i32>, String) {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return (status.code(), self.read("err"));
            }
            assert!(start.elapsed() < PATIENCE, "{}", self.read("err"));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Exactly one message of ours, with these words.
fn one_message(err: &str, words: &[&str]) {
    assert_eq!(err.matches("error[").count(), 1, "{err}");
    for w in words {
        assert!(err.contains(w), "no `{w}` in:\n{err}");
    }
}

#[test]
fn a_killed_rank_is_named_by_those_that_are_left() {
    let mut over_tp = false;
    for victim in [0, 2, 3] {
        let job = Job::start(&format!("kill-{victim}"), 4, "pp=2,tp=2");
        let pid = job.pid(victim);
        let dir = job.dir.clone();
        job.signal(&pid, "-KILL");
        let (_, err) = job.end();
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
            let transfer = place.starts_with("recv of %") && place.contains(" from rank ")
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

/// Steps as printed: number, and loss and norm as text.
fn losses(out: &str) -> Vec<(usize, String)> {
    let one = |l: &str| {
        let (step, rest) = l.strip_prefix("{\"step\":")?.split_once(',')?;
        Some((step.parse().ok()?, rest.split(",\"tokens").next()?.to_string()))
    };
    out.lines().filter_map(one).collect()
}

/// Layouts whose ranks are killed in turn: a name, a fixture, the number of ranks, flags.
const KILLED: [(&str, &str, usize, &[&str]); 5] = [
    ("pp=2,tp=2", "llama_deep", 4, &["--mesh", "pp=2,tp=2", "--microbatch", "2"]),
    ("ZeRO 3 over 2", "llama_deep", 2, &["--mesh", "dp_shard=2", "--zero", "3"]),
    ("experts, dp=2,tp=2,ep=2", "mixtral", 4, &["--mesh", "dp=2,tp=2,ep=2"]),
    ("dp=2", "llama_gqa", 2, &["--mesh", "dp=2"]),
    ("tp=4 with --sp", "llama_mha", 4, &["--mesh", "tp=4", "--sp"]),
];

/// What became of the jobs of one layout.
#[derive(Default)]
struct Kept {
    killed: usize,
    stopped: usize,
    unfinished: usize,
    redone: usize,
    step: usize,
    longest: f64,
}

/// A layout's jobs: a folder with its plan, and what a run gives that nobody disturbs.
struct Disturbed {
    name: &'static str,
    ranks: usize,
    dir: PathBuf,
    whole: Vec<(usize, String)>,
    kept: Kept,
}

impl Disturbed {
    /// Steps of a whole run: more than any of these jobs comes to.
    fn new(i: usize, steps: usize) -> Disturbed {
        let (name, model, ranks, flags) = KILLED[i];
        let dir = folder(&format!("kills-{i}"));
        let all = [&["--seq", "16", "--global-batch", "8"], flags].concat();
        compile(&fixture(model), &all, &dir.join("plan"));
        let mut c = Command::new(SHARDC);
        c.args(["run", "plan", "--threads", "1", "--format", "json", "--steps"]);
        let whole = losses(&text(&done(c.arg(steps.to_string()).current_dir(&dir)).stdout));
        assert_eq!(whole.len(), steps);
        Disturbed { name, ranks, dir, whole, kept: Kept::default() }
    }

    /// Starts, or goes on from the last checkpoint, and kills or stops a rank.
    fn disturb(&mut self, draw: &dyn Fn() -> f64) {
        let (dir, at) = (&self.dir, self.kept.step);
        let file = |name: &str| std::fs::File::create(dir.join(name)).expect("a file");
        let mut c = mpirun(self.ranks);
        c.args([SHARDC, "run", "plan", "--threads", "1", "--format", "json", "--transport", "mpi"]);
        c.args(["--steps", &self.whole.len().to_string(), "--save", "ckpt", "--save-every", "1"]);
        c.args(["--silence", "2"]);
        if at > 0 {
            c.args(["--resume", "ckpt"]);
        }
        c.stdout(file("out")).stderr(file("err")).stdin(Stdio::null()).current_dir(dir);
        let child = c.spawn().expect("mpirun");
        let mut job = Job { child, dir: dir.clone() };
        job.until("err", "processes, started by");
        // One of four in the middle of the start, the others when steps were done and saved.
        if draw() < 0.75 {
            job.until("out", &format!("\"step\":{},", at + 2));
        }
        std::thread::sleep(Duration::from_secs_f64(draw()));
        let (victim, stops) = ((draw() * self.ranks as f64) as usize, draw() < 0.25);
        let (pid, since) = (job.pid(victim), Instant::now());
        job.signal(&pid, if stops { "-STOP" } else { "-KILL" });
        if stops {
            job.until("err", "error[rank-failed]");
            job.signal(&pid, "-KILL");
        }
        let (_, err) = job.end();
        let how = if stops { "was silent for 2 s" } else { "ended without a word" };
        one_message(&err, &["error[rank-failed]", &format!("process {victim} ("), how]);
        let kept = &mut self.kept;
        *(if stops { &mut kept.stopped } else { &mut kept.killed }) += 1;
        kept.longest = kept.longest.max(since.elapsed().as_secs_f64());
        let done = losses(&std::fs::read_to_string(dir.join("out")).expect("a file"));
        for (step, loss) in &done {
            assert_eq!(loss, &self.whole[step - 1].1, "{}, step {step}, from {at}", self.name);
        }
        let names = std::fs::read_dir(dir.join("ckpt")).into_iter().flatten().flatten();
        let left = |e: std::fs::DirEntry| e.file_name().to_string_lossy().contains("unfinished");
        kept.unfinished += usize::from(names.into_iter().any(left));
        let Ok(saved) = shardc::checkpoint::Saved::open(&dir.join("ckpt")) else {
            assert_eq!(at, 0, "{}: a checkpoint is lost", self.name);
            return;
        };
        saved.verify(0, 1).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        assert!(saved.step >= at, "{}: step {at} is lost", self.name);
        let last = done.last().map_or(at, |d| d.0);
        assert!(
            last <= saved.step + 1,
            "{}: step {last} was done, {} saved",
            self.name,
            saved.step
        );
        kept.redone += last.saturating_sub(saved.step);
        kept.step = saved.step;
    }
}

/// `KILLS` times (6) a rank drawn at random of a layout in turn is killed, or in one of four stopped for
/// good, at a moment drawn at random, while a checkpoint is written after every step. The job ends, the last
/// visible checkpoint is whole, and going on from it gives the losses of a run that nobody disturbed, bit
/// for bit. Prints the table of docs/clusters.md.
#[test]
fn whatever_is_killed_nothing_is_lost() {
    let kills: Option<usize> = std::env::var("KILLS").ok().and_then(|k| k.parse().ok());
    let kills = kills.unwrap_or(samples(6, 50) as usize);
    let seed: u64 = std::env::var("SEED").ok().and_then(|k| k.parse().ok()).unwrap_or(1);
    let (stream, drawn) = (shardc_ir::rng::Stream::new(seed, "kills", 0), std::cell::Cell::new(0));
    let draw = || stream.uniform(drawn.replace(drawn.get() + 1));
    // Some dozens of steps in each job of a layout.
    let steps = 400 + 60 * kills;
    let mut all: Vec<Disturbed> =
        (0..KILLED.len().min(kills)).map(|i| Disturbed::new(i, steps)).collect();
    let layouts = all.len();
    (0..kills).for_each(|k| all[k % layouts].disturb(&draw));
    println!(
        "| layout | killed | stopped | longest end | steps kept | done again | in the middle of a save |"
    );
    println!("|---|---|---|---|---|---|---|");
    for Disturbed { name, kept: k, .. } in &all {
        println!(
            "| {name} | {} | {} | {:.1} s | {} | {} | {} |",
            k.killed, k.stopped, k.longest, k.step, k.redone, k.unfinished
        );
    }
    assert!(all.iter().any(|d| d.kept.step > 0), "no step was ever saved");
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
    one_message(&text(&o.stderr), &["error[plan]", "there is no plan here"]);
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
