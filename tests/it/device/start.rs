//! How communicators are made: without a call that blocks, few at a time, by the versions that are here; and which
//! job is whose.

use super::hangs::{job, pair, plan, stages};
use super::machine::Machine;
use super::nccl::{numbers, ranks_of};
use shardc_testing::port;
use std::io::{BufRead, BufReader, Lines};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

/// Four stages, with a group of their own.
fn column(schedule: &str) -> Option<Machine> {
    let flags = ["--global-batch", "4", "--microbatch", "1", "--mesh", "pp=4", "--schedule"];
    plan(&format!("column-{schedule}"), "llama_deep", &[&flags[..], &[schedule]].concat())
}

/// Losses and norms that process 0 has printed.
fn of_steps(m: &Machine, ranks: usize, also: &[(Option<usize>, &str, &str)]) -> Vec<[f64; 2]> {
    let ended = job(m, ranks, &["--timeout", "20", "--format", "json"], also);
    ended.well();
    numbers(&ended.out)
}

/// Whether NCCL blocks is its own variable: calls that go on beside their caller are waited for, with the same numbers.
#[test]
fn calls_that_go_on_give_the_same_numbers() {
    let Some(m) = stages() else { return };
    let usual = of_steps(&m, 4, &[]);
    assert_eq!(usual.len(), 2);
    for blocking in ["0", "1"] {
        assert_eq!(of_steps(&m, 4, &[(None, "NCCL_COMM_BLOCKING", blocking)]), usual);
    }
}

/// One of four ranks that is missing in some part of the set-up is named, with the part, by those that are there.
#[test]
fn a_missing_rank_in_set_up_is_named() {
    let Some(m) = stages() else { return };
    let flags = ["--start-timeout", "6", "--timeout", "5", "--silence", "30"];
    let missing = "process 2 (";
    let never = "has not come, or is in a call that does not end";
    let one = |&(at, part): &(&str, &str)| {
        let ended = job(&m, 4, &flags, &[(Some(2), "STANDIN_AT", at)]);
        ended.with(
            "start-timeout",
            &[],
            &["in NCCL's start", part, ": others have not come to it"],
        );
        let said = ended.all();
        let named: Vec<&str> = said.lines().filter(|l| l.contains(never)).collect();
        assert!(named.len() == 1 && named[0].contains(missing), "{said}");
    };
    let table = [
        ("ncclCommInitRank:1:deaf", "making the communicator of all 4 ranks"),
        ("ncclCommSplit:1:deaf", "making the communicator of "),
        ("ncclCommSplit:3:deaf", "making communicators between stages, "),
        ("send:1:deaf", "making communicators between stages, "),
    ];
    std::thread::scope(|s| {
        for part in table.chunks(2) {
            s.spawn(|| part.iter().for_each(one));
        }
    });
    // Where NCCL blocks, who watches says where.
    let blocks = [(None, "NCCL_COMM_BLOCKING", "1"), (Some(2), "STANDIN_AT", table[1].0)];
    let ended = job(&m, 4, &flags, &blocks);
    ended.with("start-timeout", &[], &["in NCCL's start, making the communicator of "]);
}

/// A split serves every second direction between stages, however many stages there are; each is a communicator of its
/// own, which takes few blocks of a device, as it may be posted long before it comes.
#[test]
fn few_splits_make_all_directions() {
    for (m, ranks) in [(stages(), 4), (column("1f1b"), 4)] {
        let Some(m) = m else { return };
        let log = m.dir.join("splits");
        let _ = std::fs::remove_dir_all(&log);
        std::fs::create_dir_all(&log).expect("a folder");
        let dir = log.display().to_string();
        job(&m, ranks, &["--timeout", "20"], &[(None, "STANDIN_LOG", &dir)]).well();
        let driver = std::fs::read_to_string(log.join("driver")).expect("a log");
        // Of each device one context, which takes time and memory: to be asked what it is called it needs none.
        assert_eq!(driver.lines().filter(|l| l.starts_with("context ")).count(), ranks);
        let said = std::fs::read_to_string(log.join("split")).expect("a log");
        let stored = shardc::plan_dir::read(&m.dir.join("plan")).expect("a plan").plan;
        let (groups, edges) = (stored.groups().len(), stored.edges().len());
        let splits = said.lines().count() / ranks;
        println!("{edges} directions, {groups} groups: {splits} splits");
        assert_eq!(said.lines().count(), ranks * splits, "{said}");
        assert_eq!(splits, groups + edges.min(4), "{said}");
        let few = said.lines().filter(|l| l.contains("pp ") && l.ends_with("blocks 4")).count();
        let any = said.lines().filter(|l| l.ends_with(&format!("blocks {}", i32::MIN))).count();
        let pairs = edges * ranks / stored.classes.len();
        assert_eq!((few, any), (2 * pairs, groups * ranks), "{said}");
    }
}

/// One communicator for all directions down the stages, and one for all up, would do with two splits; but calls of one
/// communicator follow each other: sends that are ready would wait for receives that were posted early, of others.
#[test]
fn directions_in_one_communicator_would_wait_for_each_other() {
    for schedule in ["1f1b", "zb-h1"] {
        let Some(m) = column(schedule) else { return };
        let held = |name: &str, also: &[(Option<usize>, &str, &str)]| {
            let log = m.dir.join(name);
            let _ = std::fs::remove_dir_all(&log);
            std::fs::create_dir_all(&log).expect("a folder");
            let dir = log.display().to_string();
            job(&m, 4, &["--timeout", "20"], &[also, &[(None, "STANDIN_LOG", &*dir)]].concat())
                .well();
            std::fs::read_to_string(log.join("held")).unwrap_or_default().lines().count()
        };
        let (apart, one) = (held("apart", &[]), held("column", &[(None, "STANDIN_COLUMN", "1")]));
        println!("{schedule}: {apart} exchanges wait for others of their communicator, else {one}");
        assert!(apart == 0 && one > 0, "{schedule}: {apart} and {one}");
    }
}

/// A stand-in of NCCL that was built with another CUDA, which its text says.
fn built_with(m: &Machine, cuda: &str) -> String {
    let (from, to) =
        (m.libraries.as_deref().expect("stand-ins"), m.dir.join(format!("cuda-{cuda}")));
    std::fs::create_dir_all(&to).expect("a folder");
    let copy = |name: &Path| {
        let file = name.file_name().expect("a name");
        if name.is_file() {
            std::fs::copy(name, to.join(file)).expect("a copy");
        }
    };
    std::fs::read_dir(from).expect("a folder").for_each(|f| copy(&f.expect("a file").path()));
    let file = to.join("libnccl.so.2");
    let mut bytes = std::fs::read(&file).expect("a library");
    let text = b"+cuda13.0";
    let at = bytes.windows(text.len()).position(|w| w == text).expect("a text");
    bytes[at + 5..at + 9].copy_from_slice(cuda.as_bytes());
    std::fs::write(&file, bytes).expect("a file");
    to.display().to_string()
}

/// With CUDA before 12.3, NCCL that is asked to keep the order of calls lets each end before the next one begins, and a
/// posted receive holds up all else: it is not asked to, and refused to whoever asks.
#[test]
fn an_old_cuda_keeps_no_order() {
    let Some(m) = stages() else { return };
    let usual = of_steps(&m, 4, &[]);
    let old = built_with(&m, "12.2");
    let of_library = (None, "LD_LIBRARY_PATH", &*old);
    let of_driver = (None, "STANDIN_DRIVER", "12020");
    assert_eq!(of_steps(&m, 4, &[of_library]), usual);
    assert_eq!(of_steps(&m, 4, &[of_driver]), usual);
    let asked = (None, "NCCL_LAUNCH_ORDER_IMPLICIT", "1");
    for (old, what) in [
        (of_library, "NCCL was built with CUDA 12.2"),
        (of_driver, "the driver is that of CUDA 12.2"),
    ] {
        let ended = job(&m, 4, &["--timeout", "6"], &[old, asked]);
        ended.with("missing-library", &[], &[what, "unset NCCL_LAUNCH_ORDER_IMPLICIT"]);
    }
    // Without stages nobody waits for what comes later.
    let Some(m) = pair() else { return };
    job(&m, 2, &["--timeout", "6"], &[of_driver, asked]).well();
}

/// Processes with different versions of NCCL are told before they meet in it.
#[test]
fn versions_that_differ_are_told() {
    let Some(m) = pair() else { return };
    let ended = job(&m, 2, &["--timeout", "6"], &[(Some(1), "STANDIN_NCCL", "22703")]);
    let words = ["process 1 (", "has NCCL 22703", "process 0 has 22900", "install 1 version"];
    ended.with("plans-differ", &[], &words);
}

/// Two jobs of one user at one port, with one secret: each finds its own process 0, by the name that its launcher
/// gives it.
#[test]
fn two_jobs_at_one_port() {
    let Some(m) = pair() else { return };
    let (at, secret) = (port().to_string(), "a secret of sixteen bytes");
    let run = ["run", "plan", "--device", "cuda", "--steps", "2", "--start-timeout", "30"];
    let of = |name: &str| {
        let also = [("MASTER_PORT", &*at), ("SHARDC_SECRET", secret), ("SHARDC_JOB", name)];
        ranks_of(&m, 2, &run, &also)
    };
    let (mut a, mut b) = (of("a"), of("b"));
    // Each comes once what it meets is there: process 1 of b at the port of a, before its own process 0.
    let mut a0 = Said::of(&mut a[0]);
    let since = Instant::now();
    while TcpStream::connect(format!("127.0.0.1:{at}")).is_err() {
        assert!(since.elapsed() < Duration::from_secs(20), "process 0 of a does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    let b1 = Said::of(&mut b[1]);
    a0.until("a process was refused: this is process 0 of the job `a`");
    let mut b0 = Said::of(&mut b[0]);
    b0.until(&format!("port {at} is taken: process 0 listens at 127.0.0.1:"));
    let a1 = Said::of(&mut a[1]);
    for rank in [a0, a1, b0, b1] {
        let (well, said) = rank.end();
        assert!(well, "{said}");
    }
}

/// A process, and what it says line by line.
struct Said {
    process: Child,
    lines: Lines<BufReader<ChildStderr>>,
    all: String,
}

impl Said {
    fn of(c: &mut Command) -> Said {
        let mut process = c.stdout(Stdio::null()).spawn().expect("shardc starts");
        let lines = BufReader::new(process.stderr.take().expect("a pipe")).lines();
        Said { process, lines, all: String::new() }
    }

    /// Reads until a line has these words; its own limits end a process that never says them.
    fn until(&mut self, words: &str) {
        for line in self.lines.by_ref() {
            self.all += &format!("{}\n", line.expect("text"));
            if self.all.contains(words) {
                return;
            }
        }
        panic!("no `{words}` in {}", self.all);
    }

    /// Whether it has ended well, and all that it has said.
    fn end(mut self) -> (bool, String) {
        self.lines.by_ref().for_each(|line| self.all += &format!("{}\n", line.expect("text")));
        (self.process.wait().expect("it ends").success(), self.all)
    }
}

/// Ranks that are threads of one process with several devices are told of the better way.
#[test]
fn several_devices_of_one_process_are_told() {
    let Some(m) = pair() else { return };
    let said = |devices: &str| {
        let run = ["run", "plan", "--device", "cuda", "--transport", "threads", "--steps", "1"];
        let out = m.shardc(&run, &[("STANDIN_DEVICES", devices)]);
        assert!(out.status.success(), "{out:?}");
        String::from_utf8_lossy(&out.stderr)
            .contains("for several devices compile with --transport nccl")
    };
    assert!(said("2") && !said("1"));
}
