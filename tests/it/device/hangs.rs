//! Devices at their worst: calls of the driver that wait for all that is queued, few hardware queues, no
//! memory, processes that are killed, stopped or silent at some call. Every job ends, within its limits,
//! with one message that names what is wrong.

use super::machine::{HERE, Machine};
use super::nccl::{CODE, machine, ranks_of, text};
use std::net::TcpListener;
use std::process::Child;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The driver at its worst, which is that of all tests of devices: calls wait for the device, and nothing may be loaded
/// or allocated in a step.
pub const HARD: [(&str, &str); 2] =
    [("STANDIN_SYNC", "load,alloc,host,graph"), ("STANDIN_STRICT", "load,alloc,host,graph")];

/// No job takes longer.
const LIMIT: Duration = Duration::from_secs(40);

/// How the ranks of a job have ended: `None` for those that have not, and what they have said.
#[derive(Debug)]
pub struct Ended {
    pub status: Vec<Option<i32>>,
    pub said: Vec<String>,
    /// Results of process 0.
    pub out: String,
}

impl Ended {
    pub fn all(&self) -> String {
        self.said.concat()
    }

    /// All have ended well.
    pub fn well(&self) {
        assert!(self.status.iter().all(|&s| s == Some(0)), "{self:?}");
    }

    /// All but those in `lost`, which are stopped or killed, have ended with one message, of these words.
    pub fn with(&self, code: &str, lost: &[usize], words: &[&str]) {
        let rest = self.status.iter().enumerate().filter(|(r, _)| !lost.contains(r));
        assert!(rest.into_iter().all(|(_, s)| s.is_some_and(|s| s > 0)), "{self:?}");
        let said = self.all();
        assert_eq!(said.matches("error[").count(), 1, "{said}");
        assert!(said.contains(&format!("error[{code}]: ")), "no {code} in {said}");
        words.iter().for_each(|w| assert!(said.contains(w), "no `{w}` in {said}"));
    }
}

/// A plan of a small model, compiled once for all that run it.
pub fn plan(name: &str, model: &str, flags: &[&str]) -> Option<Machine> {
    static MADE: Mutex<Vec<String>> = Mutex::new(vec![]);
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let m = machine(&format!("hangs-{name}"), !made.iter().any(|n| n == name))?;
    if !made.iter().any(|n| n == name) {
        let model = format!("{HERE}/tests/fixtures/{model}");
        let compile = ["compile", &model, "--seq", "8", "--transport", "nccl", "-o", "plan"];
        m.ok(&[&compile[..], &CODE, flags].concat(), &[]);
        made.push(name.to_string());
    }
    Some(m)
}

/// Two ranks, one layer after the other.
pub fn pair() -> Option<Machine> {
    plan("pair", "llama_mha", &["--global-batch", "2", "--mesh", "tp=2"])
}

/// Two stages of two ranks, whose groups exchange pieces that do not lie together.
pub fn stages() -> Option<Machine> {
    let mesh = ["--global-batch", "8", "--microbatch", "2", "--mesh", "pp=2,tp=2", "--sp"];
    plan("stages", "llama_gqa", &mesh)
}

/// Runs a plan by so many ranks, with variables: of a rank, or of all.
pub fn job(
    m: &Machine,
    ranks: usize,
    flags: &[&str],
    also: &[(Option<usize>, &str, &str)],
) -> Ended {
    let run = ["run", "plan", "--device", "cuda", "--steps", "2"];
    let mut all = ranks_of(m, ranks, &[&run[..], flags].concat(), &[]);
    for (rank, c) in all.iter_mut().enumerate() {
        let own = also.iter().filter(|v| v.0.is_none_or(|r| r == rank));
        c.envs(own.map(|v| (v.1, v.2)));
    }
    let mut all: Vec<Child> = all.iter_mut().map(|c| c.spawn().expect("shardc starts")).collect();
    let since = Instant::now();
    let ended = |c: &mut Child| c.try_wait().expect("it is ours");
    // What is stopped does not end.
    let stopped: Vec<usize> =
        also.iter().filter(|v| v.2.ends_with(":stop")).filter_map(|v| v.0).collect();
    let mut failed: Option<Instant> = None;
    loop {
        let status: Vec<_> = all.iter_mut().map(ended).collect();
        if status.iter().flatten().any(|s| !s.success()) {
            failed.get_or_insert_with(Instant::now);
        }
        let late = failed.is_some_and(|at| at.elapsed() > Duration::from_secs(15));
        let gone = |(r, s): (usize, &Option<_>)| s.is_some() || stopped.contains(&r);
        if status.iter().enumerate().all(gone) || late || since.elapsed() > LIMIT {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = all.iter_mut().map(|c| ended(c).map(|s| s.code().unwrap_or(-1))).collect();
    let end = |mut c: Child| {
        let _ = c.kill();
        let both = c.wait_with_output().expect("it ends");
        (text(&both.stderr), text(&both.stdout))
    };
    let (said, mut out): (Vec<_>, Vec<_>) = all.into_iter().map(end).unzip();
    Ended { status, said, out: out.swap_remove(0) }
}

/// Calls of the driver that wait for all of the device's work, where a receive may be posted that waits for
/// another rank in such a call; and nothing is loaded or allocated in a step, which would end a process.
#[test]
fn calls_that_wait_beside_posted_receives() {
    let Some(m) = stages() else { return };
    job(&m, 4, &["--timeout", "20"], &[]).well();
}

/// A posted receive is in the way of what it waits for, if they share a hardware queue: fewer than there
/// are queues are refused.
#[test]
fn few_hardware_queues_are_refused() {
    let Some(m) = stages() else { return };
    for k in ["1", "2"] {
        let few = [(None, "CUDA_DEVICE_MAX_CONNECTIONS", k)];
        let ended = job(&m, 4, &["--timeout", "5"], &few);
        let set = format!("CUDA_DEVICE_MAX_CONNECTIONS is {k}");
        ended.with("cuda-driver", &[], &[&set, "unset CUDA_DEVICE_MAX_CONNECTIONS"]);
    }
    job(&m, 4, &["--timeout", "20"], &[(None, "CUDA_DEVICE_MAX_CONNECTIONS", "32")]).well();
    // One rank waits for nobody.
    let Some(m) = plan("alone", "llama_mha", &["--global-batch", "2"]) else { return };
    let one = [(None, "CUDA_DEVICE_MAX_CONNECTIONS", "1")];
    job(&m, 1, &["--timeout", "20"], &one).well();
    job(&m, 1, &["--transport", "threads"], &one).well();
}

/// What a rank says of the memory of its device.
#[test]
fn memory_is_told_by_phase() {
    let Some(m) = pair() else { return };
    let lazy = [(None, "STANDIN_LAZY", "4194304")];
    let ended = job(&m, 2, &["--timeout", "20", "--memory-log"], &lazy);
    ended.well();
    let of = |rank: usize| format!("rank {rank}: taken: others and the driver 0 B");
    let phases =
        ["code ", "NCCL 4.00 MiB", "arena and libraries ", "scratch and graphs ", "are left"];
    for (rank, said) in ended.said.iter().enumerate() {
        let line = said.lines().find(|l| l.contains(&of(rank)));
        let line = line.unwrap_or_else(|| panic!("no line of rank {rank} in {said}"));
        assert!(phases.iter().all(|p| line.contains(p)), "{line}");
    }
}

/// What the driver and NCCL have taken leaves too little for a rank: it is said before the first step.
#[test]
fn a_full_device_is_refused_before_step_one() {
    let Some(m) = pair() else { return };
    // Room for the arenas, and not for NCCL's buffers beside.
    let full = [(None, "STANDIN_LAZY", "4194304"), (None, "STANDIN_MEMORY", "4718592")];
    let ended = job(&m, 2, &["--timeout", "20"], &full);
    let words = ["of its device's memory", "NCCL 4.00 MiB", "--memory"];
    ended.with("out-of-memory", &[], &words);
    assert!(ended.status.iter().all(|&s| s == Some(3)), "{ended:?}");
    // Not even for those.
    let full = [(None, "STANDIN_LAZY", "4194304"), (None, "STANDIN_MEMORY", "2097152")];
    let ended = job(&m, 2, &["--timeout", "20"], &full);
    let said = "NCCL says: Failed to CUDA calloc 4194304 bytes";
    ended.with("rank-failed", &[], &["of tp: ", said, "has room for its buffers"]);
}

/// Each code of NCCL has its rule, with NCCL's own last words.
#[test]
fn errors_say_what_nccl_said() {
    let Some(m) = pair() else { return };
    for (code, rule) in [
        ("1", "the device has room"),
        ("2", "NCCL reaches every host"),
        ("3", "no more is known"),
        ("5", "same collectives, in the same order"),
        ("6", "all processes of a group live"),
    ] {
        let broken = [(Some(1), "STANDIN_ASYNC", code), (Some(0), "STANDIN_HANG", "6")];
        let ended = job(&m, 2, &["--timeout", "20"], &broken);
        let (code, last) = (format!("(code {code})"), "NCCL says: NET/IB : Got completion");
        ended.with("rank-failed", &[], &["rank 1 of tp: ", &code, rule, last]);
    }
}

/// The end of a process does not wait for its device.
#[test]
fn a_failed_job_ends() {
    let Some(m) = pair() else { return };
    let hangs = [(None, "STANDIN_HANG", "6"), (None, "STANDIN_EXIT", "1")];
    let flags = ["--start-timeout", "60", "--timeout", "3"];
    let ended = job(&m, 2, &flags, &hangs);
    ended.with("rank-failed", &[], &["waited 3 s for its device"]);
}

/// A call of the driver that takes longer than silence may, in the midst of a step.
#[test]
fn a_busy_driver_is_no_silence() {
    let Some(m) = pair() else { return };
    let busy = [(Some(1), "STANDIN_AT", "cuEventRecord:60:lock")];
    job(&m, 2, &["--timeout", "20", "--silence", "2"], &busy).well();
}

/// A rank that waits leaves its core to others.
#[test]
fn a_waiting_rank_leaves_its_core() {
    let Some(m) = pair() else { return };
    let run = ["run", "plan", "--device", "cuda", "--steps", "2", "--timeout", "5"];
    let mut all = ranks_of(&m, 2, &run, &[("STANDIN_HANG", "6")]);
    let mut all: Vec<Child> = all.iter_mut().map(|c| c.spawn().expect("shardc starts")).collect();
    // Hundredths of a second on cores, of user and system.
    let ticks = |c: &Child| -> Option<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", c.id())).ok()?;
        let words: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        Some(words[11].parse::<u64>().ok()? + words[12].parse::<u64>().ok()?)
    };
    let (since, mut seen) = (Instant::now(), vec![]);
    while all[0].try_wait().expect("it is ours").is_none() && since.elapsed() < LIMIT {
        seen.extend(ticks(&all[0]).map(|t| (since.elapsed().as_secs_f64(), t)));
        std::thread::sleep(Duration::from_millis(50));
    }
    for c in &mut all {
        let _ = c.kill();
        c.wait().expect("it ends");
    }
    let end = seen.last().expect("it ran").0;
    let at = |before: f64| seen.iter().find(|s| s.0 >= end - before).expect("it ran for long");
    // Before it gives up, and what comes then.
    let (from, to) = (at(3.5), at(0.5));
    let share = (to.1 - from.1) as f64 / 100.0 / (to.0 - from.0);
    println!("{:.1} % of a core", 100.0 * share);
    assert!(share < 0.08, "a rank that waits takes {share:.2} of a core: {seen:?}");
}

/// A port of the job that somebody else listens at is named, and all end; with a secret, by which others tell
/// process 0, it takes another one.
#[test]
fn a_taken_port() {
    let Some(m) = pair() else { return };
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("it is bound").port().to_string();
    let ended = job(&m, 2, &["--start-timeout", "4"], &[(None, "MASTER_PORT", &port)]);
    assert!(ended.status.iter().all(|s| s.is_some_and(|s| s > 0)), "{ended:?}");
    assert!(ended.said[0].contains(&port), "{ended:?}");
    let secret = (None, "SHARDC_SECRET", "a secret of sixteen bytes");
    let ended = job(&m, 2, &["--start-timeout", "20"], &[(None, "MASTER_PORT", &port), secret]);
    ended.well();
    let said = format!("port {port} is taken: process 0 listens at 127.0.0.1:");
    assert!(ended.said[0].contains(&said), "{ended:?}");
}

/// The same while parameters are loaded, and while a checkpoint is written.
#[test]
fn loads_and_checkpoints_have_limits() {
    let Some(m) = pair() else { return };
    let flags = ["--start-timeout", "10", "--timeout", "5", "--silence", "2", "--save-every", "1"];
    let table = [
        ("cuMemcpyHtoDAsync:6", "kill", "process 1 ("),
        ("cuMemcpyHtoDAsync:6", "stop", "process 1 ("),
        ("cuMemcpyHtoDAsync:6", "deaf", "rank 0 waited 5 s for its device"),
        ("cuMemcpyDtoHAsync:30", "kill", "process 1 ("),
        ("cuMemcpyDtoHAsync:30", "stop", "process 1 ("),
        ("cuMemcpyDtoHAsync:30", "deaf", "rank 1 waited 5 s for its device"),
    ];
    let one = |&(call, how, words): &(&str, &str, &str)| {
        let (at, dir) = (format!("{call}:{how}"), format!("save-{call}-{how}").replace(':', "-"));
        let _ = std::fs::remove_dir_all(m.dir.join(&dir));
        let fault = [(Some(1), "STANDIN_AT", &*at)];
        let gone: &[usize] = if how == "deaf" { &[] } else { &[1] };
        let ended = job(&m, 2, &[&flags[..], &["--save", &dir]].concat(), &fault);
        ended.with("rank-failed", gone, &[words]);
    };
    std::thread::scope(|s| {
        for part in table.chunks(3) {
            s.spawn(|| part.iter().for_each(one));
        }
    });
}

/// A rank that is killed, stopped or silent in a call of some phase: the others end within their
/// limits, and say which it is.
#[test]
fn every_phase_has_a_limit() {
    let Some(m) = pair() else { return };
    let flags = ["--start-timeout", "10", "--timeout", "5", "--silence", "2"];
    let (lost, late) = ("rank-failed", "start-timeout");
    let join = "process 1 did not come";
    let table = [
        ("cuInit:1", "kill", late, join),
        ("cuInit:1", "stop", late, join),
        ("ncclCommInitRank:1", "kill", lost, "process 1 ("),
        ("ncclCommInitRank:1", "stop", lost, "process 1 ("),
        ("ncclCommInitRank:1", "deaf", late, "in NCCL's start, making the communicator of all"),
        ("ncclCommSplit:1", "kill", lost, "process 1 ("),
        ("ncclCommSplit:1", "stop", lost, "process 1 ("),
        ("ncclCommSplit:1", "deaf", late, "in NCCL's start, making the communicator of tp"),
        ("all_reduce:1", "kill", lost, "process 1 ("),
        ("all_reduce:1", "stop", lost, "process 1 ("),
        ("all_reduce:1", "deaf", late, "in NCCL's start, in the first AllReduce over tp"),
        ("all_reduce:20", "kill", lost, "process 1 ("),
        ("all_reduce:20", "stop", lost, "process 1 ("),
        ("all_reduce:20", "deaf", lost, "rank 0 waited 5 s for its device"),
        ("launch:12", "kill", lost, "process 1 ("),
        ("launch:12", "stop", lost, "process 1 ("),
        ("launch:12", "deaf", lost, " waited 5 s for "),
        ("ncclCommFinalize:1", "kill", lost, "process 1 ("),
        ("ncclCommFinalize:1", "stop", lost, "process 1 ("),
        ("ncclCommFinalize:1", "deaf", late, "at the end of the job"),
        ("ncclCommDestroy:1", "kill", lost, "process 1 ("),
        ("ncclCommDestroy:1", "stop", lost, "process 1 ("),
        ("ncclCommDestroy:1", "deaf", late, "at the end of the job"),
    ];
    // Of the start of its driver each process says itself how long it was.
    let ended = job(&m, 2, &flags, &[(Some(1), "STANDIN_AT", "cuInit:1:deaf")]);
    assert!(ended.status.iter().all(|&s| s == Some(6)), "{ended:?}");
    assert!(ended.said[0].contains(join), "{ended:?}");
    assert!(ended.said[1].contains("rank 1 waited 11 s for the driver of its device"), "{ended:?}");
    let one = |&(call, how, code, words): &(&str, &str, &str, &str)| {
        let at = format!("{call}:{how}");
        let fault = [(Some(1), "STANDIN_AT", &*at), (None, "STANDIN_DESTROY", "1")];
        let gone: &[usize] = if how == "deaf" { &[] } else { &[1] };
        job(&m, 2, &flags, &fault).with(code, gone, &[words]);
    };
    std::thread::scope(|s| {
        for part in table.chunks(4) {
            s.spawn(|| part.iter().for_each(one));
        }
    });
}
