//! Ranks of jobs are killed, or stopped for good, at any moment: nothing is lost. Its own test program, which
//! other builds of the command can be tried by (`SHARDC_BIN`); needs MPI.

mod jobs;

use jobs::{Job, compile, done, fixture, folder, losses, mpirun, one_message, shardc, text};
use shardc_testing::samples;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Layouts whose ranks are killed in turn: a name, a fixture, the number of ranks, flags.
const KILLED: [(&str, &str, usize, &[&str]); 13] = [
    ("pp=2,tp=2", "llama_deep", 4, &["--mesh", "pp=2,tp=2", "--microbatch", "2"]),
    ("ZeRO 3 over 2", "llama_deep", 2, &["--mesh", "dp_shard=2", "--zero", "3"]),
    ("experts, dp=2,tp=2,ep=2", "mixtral", 4, &["--mesh", "dp=2,tp=2,ep=2"]),
    ("dp=2", "llama_gqa", 2, &["--mesh", "dp=2"]),
    ("tp=4 with --sp", "llama_mha", 4, &["--mesh", "tp=4", "--sp"]),
    ("pp=2,dp=2,tp=2", "llama_deep", 8, &["--mesh", "pp=2,dp=2,tp=2", "--microbatch", "2"]),
    ("tp=2", "gemma2", 2, &["--mesh", "tp=2"]),
    (
        "pp=2 by zb-h1",
        "llama_deep",
        2,
        &["--mesh", "pp=2", "--microbatch", "2", "--schedule", "zb-h1"],
    ),
    ("ZeRO 3 over 4", "gpt2", 4, &["--mesh", "dp_shard=4", "--zero", "3"]),
    ("ZeRO 3 over 8", "llama_mha", 8, &["--mesh", "dp_shard=8", "--zero", "3"]),
    ("experts, dp_shard=2,ep=2", "mixtral", 2, &["--mesh", "dp_shard=2,ep=2"]),
    (
        "experts, ZeRO 3, dp_shard=4,tp=2,ep=4",
        "qwen3_moe",
        8,
        &["--mesh", "dp_shard=4,tp=2,ep=4", "--zero", "3"],
    ),
    ("dp=2,cp=2,tp=2", "qwen3", 8, &["--mesh", "dp=2,cp=2,tp=2"]),
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

/// A layout's jobs: a folder with its plan, and the steps that they have printed.
struct Disturbed {
    name: &'static str,
    ranks: usize,
    dir: PathBuf,
    seen: Vec<(usize, String)>,
    kept: Kept,
}

impl Disturbed {
    fn new(i: usize) -> Disturbed {
        let (name, model, ranks, flags) = KILLED[i];
        let dir = folder(&format!("kills-{i}"));
        let all = [&["--seq", "16", "--global-batch", "8"], flags].concat();
        compile(&fixture(model), &all, &dir.join("plan"));
        Disturbed { name, ranks, dir, seen: vec![], kept: Kept::default() }
    }

    /// All that jobs have printed is what a run gives that nobody disturbs.
    fn compare(&self) {
        let most = self.seen.iter().map(|s| s.0).max().unwrap_or(0);
        let mut c = Command::new(shardc());
        c.args(["run", "plan", "--threads", "1", "--format", "json", "--steps"]);
        let whole = losses(&text(&done(c.arg(most.to_string()).current_dir(&self.dir)).stdout));
        assert_eq!(whole.len(), most);
        for (step, loss) in &self.seen {
            assert_eq!(loss, &whole[step - 1].1, "{}, step {step}", self.name);
        }
    }

    /// Starts, or goes on from the last checkpoint, and kills or stops a rank.
    fn disturb(&mut self, draw: &dyn Fn() -> f64) {
        let (dir, at) = (&self.dir, self.kept.step);
        let file = |name: &str| std::fs::File::create(dir.join(name)).expect("a file");
        let mut c = mpirun(self.ranks);
        c.args([
            &shardc(),
            "run",
            "plan",
            "--threads",
            "1",
            "--format",
            "json",
            "--transport",
            "mpi",
        ]);
        c.args(["--steps", "1000000", "--save", "ckpt", "--save-every", "1"]);
        c.args(["--silence", "2"]);
        if at > 0 {
            c.args(["--resume", "ckpt"]);
        }
        c.stdout(file("out")).stderr(file("err")).stdin(Stdio::null()).current_dir(dir);
        let child = c.spawn().expect("mpirun");
        let mut job = Job { child, dir: dir.clone() };
        job.until("err", "processes, started by");
        // One of four in the middle of the start, the others when some steps were done and saved.
        let (running, some) = (draw() < 0.75, (draw() * 8.0) as usize);
        if running {
            job.until("out", &format!("\"step\":{},", at + 2 + some));
        }
        std::thread::sleep(Duration::from_secs_f64(draw() * if running { 0.05 } else { 0.3 }));
        let (victim, stops) = ((draw() * self.ranks as f64) as usize, draw() < 0.25);
        let (pid, since) = (job.pid(victim), Instant::now());
        job.signal(&pid, if stops { "-STOP" } else { "-KILL" });
        if stops {
            job.until("err", "error[rank-failed]");
            // It may be gone: whoever started the job ends it too.
            let _ = Command::new("kill").args(["-KILL", &pid]).status();
        }
        let (_, err) = job.end();
        let how = if stops { "was silent for 2 s" } else { "ended without a word" };
        one_message(&err, &["error[rank-failed]", &format!("process {victim} ("), how]);
        let kept = &mut self.kept;
        *(if stops { &mut kept.stopped } else { &mut kept.killed }) += 1;
        kept.longest = kept.longest.max(since.elapsed().as_secs_f64());
        let done = losses(&std::fs::read_to_string(dir.join("out")).expect("a file"));
        self.seen.extend_from_slice(&done);
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
/// good, at a moment drawn at random, while a checkpoint is written after every step; no longer than for
/// `KILL_SECONDS`. The job ends, the last visible checkpoint is whole, and going on from it gives the losses of a
/// run that nobody disturbed, bit for bit. Prints the table of docs/clusters.md.
#[test]
fn whatever_is_killed_nothing_is_lost() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let kills = number("KILLS").unwrap_or(samples(6, 50)) as usize;
    let (seed, most) = (number("SEED").unwrap_or(1), number("KILL_SECONDS").unwrap_or(u64::MAX));
    let (stream, drawn) = (shardc_ir::rng::Stream::new(seed, "kills", 0), std::cell::Cell::new(0));
    let draw = || stream.uniform(drawn.replace(drawn.get() + 1));
    let since = Instant::now();
    let layouts = KILLED.len().min(kills);
    let (mut all, mut done): (Vec<Disturbed>, usize) = (vec![], 0);
    while done < kills && since.elapsed().as_secs() < most {
        if all.len() < layouts {
            all.push(Disturbed::new(all.len()));
        }
        all[done % layouts].disturb(&draw);
        done += 1;
    }
    all.iter().for_each(Disturbed::compare);
    println!("{done} kills, seed {seed}");
    println!(
        "| layout | ranks | killed | stopped | longest end | steps kept | done again | in the middle of a save |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for Disturbed { name, ranks, kept: k, .. } in &all {
        println!(
            "| {name} | {ranks} | {} | {} | {:.1} s | {} | {} | {} |",
            k.killed, k.stopped, k.longest, k.step, k.redone, k.unfinished
        );
    }
    assert!(all.iter().any(|d| d.kept.step > 0), "no step was ever saved");
}
