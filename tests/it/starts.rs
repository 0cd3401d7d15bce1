//! Processes of a job that do not meet: variables of launchers that nobody can have meant, a process that does not
//! come, a store that is silent, another secret. Each says so in time. With MPI, a rank is stopped or killed in the
//! middle of MPI's start and of its end.

use shardc_testing::port;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const SHARDC: &str = env!("CARGO_BIN_EXE_shardc");

/// A folder with a plan of two ranks.
fn folder() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("starts");
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).expect("a folder");
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama_mha");
        let mut c = Command::new(SHARDC);
        c.arg("compile").arg(model).args(["--mesh", "dp=2", "--seq", "8", "--global-batch", "2"]);
        let o = c.args(["-o", "plan"]).current_dir(&dir).output().expect("shardc starts");
        assert!(o.status.success(), "{}", String::from_utf8_lossy(&o.stderr));
        dir
    })
}

/// A process of a job over NCCL, as these variables have it; devices are not needed before all have come.
fn process(vars: &[(&str, &str)], flags: &[&str]) -> Child {
    let mut c = Command::new(SHARDC);
    c.args(["run", "plan", "--transport", "nccl", "--device", "cuda"]).args(flags);
    c.envs(vars.iter().copied()).current_dir(folder());
    c.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    c.spawn().expect("shardc starts")
}

/// The status, and what was said.
fn end(c: Child) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = c.wait_with_output().expect("it ends");
    (status.code(), String::from_utf8_lossy(&stderr).into_owned())
}

/// A number of processes that the plan does not have is compared with it before anything is made for so many.
#[test]
fn a_number_of_processes_that_nobody_means_is_refused_at_once() {
    let worlds = ["18446744073709551615", "99999999999", "99999999", "3"];
    let since = Instant::now();
    let start = |world: &&'static str| {
        let vars = [("RANK", "0"), ("WORLD_SIZE", *world), ("LOCAL_WORLD_SIZE", "4")];
        let meet = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")];
        (*world, process(&[&vars[..], &meet].concat(), &[]))
    };
    for (world, c) in worlds.iter().map(start).collect::<Vec<_>>() {
        let (status, said) = end(c);
        assert_eq!(status, Some(5), "{world}: {said}");
        let want = format!("error[launcher]: WORLD_SIZE is {world}, the plan has 2 ranks");
        assert!(said.contains(&want), "{said}");
    }
    assert!(since.elapsed() < Duration::from_secs(60), "{:?}", since.elapsed());
}

/// A process whose others do not come, one that finds nobody, one whose store of torchrun says nothing, and one that
/// has another secret than process 0.
#[test]
fn whoever_waits_says_so_and_ends_in_time() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let [free, met, none] = [(); 3].map(|()| port().to_string());
    let store = silent.local_addr().expect("bound").port().to_string();
    let of = |rank: &'static str, port: &str, more: (&'static str, &'static str)| {
        let all = [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), more];
        let limit = if port == met { "100" } else { "3" };
        let flags = ["--start-timeout", limit];
        process(&[&all[..], &[("MASTER_PORT", port)]].concat(), &flags)
    };
    let secret = ("SHARDC_SECRET", "a secret of sixteen bytes");
    let other = ("SHARDC_SECRET", "another secret of sixteen bytes");
    let elastic = ("TORCHELASTIC_USE_AGENT_STORE", "True");
    let mut waits = of("0", &met, secret);
    let jobs = [
        (of("0", &free, secret), 6, "while processes join: process 1 did not come", 0),
        (of("1", &none, secret), 6, "while processes join: process 0 is not at 127.0.0.1:", 1),
        (of("1", &store, elastic), 6, "in the rendezvous, at the store of torchrun at 127", 1),
        (of("1", &met, other), 5, "does not know the secret of this job", 1),
    ];
    for (c, want, words, rank) in jobs {
        let (status, said) = end(c);
        assert_eq!(status, Some(want), "{said}");
        assert!(said.contains(words), "no `{words}` in {said}");
        if want == 6 {
            let lines = said.lines().filter(|l| l.starts_with("error[")).collect::<Vec<_>>();
            let own = format!("error[start-timeout]: rank {rank} waited 3 s ");
            assert!(lines.len() == 1 && lines[0].starts_with(&own), "{said}");
        }
    }
    // A stranger ends nothing.
    assert!(waits.try_wait().expect("a child").is_none());
    waits.kill().expect("it runs");
    waits.wait().expect("it ends");
}

#[cfg(feature = "mpi")]
mod mpi {
    use super::folder;
    use crate::jobs::{Job, done, mpirun, one_message, text};
    use shardc_ir::rng::Stream;
    use shardc_testing::samples;
    use std::path::{Path, PathBuf};
    use std::process::{Command, Stdio};
    use std::sync::OnceLock;

    /// Stops or kills the process that calls MPI at a point, before it does or after.
    const STRIKES: &str = r#"
#include <mpi.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void at(const char *point) {
    const char *where = getenv("STRUCK_AT"), *how = getenv("STRUCK_HOW");
    if (!where || strcmp(where, point)) return;
    kill(getpid(), !strcmp(how, "kill") ? SIGKILL : SIGSTOP);
    sleep(600);
}
int MPI_Init_thread(int *c, char ***v, int needs, int *has) {
    at("init"); int r = PMPI_Init_thread(c, v, needs, has); at("started"); return r;
}
int MPI_Bcast(void *b, int n, MPI_Datatype t, int root, MPI_Comm c) {
    at("broadcast"); return PMPI_Bcast(b, n, t, root, c);
}
int MPI_Comm_create_group(MPI_Comm c, MPI_Group g, int tag, MPI_Comm *made) {
    at("group"); return PMPI_Comm_create_group(c, g, tag, made);
}
int MPI_Finalize(void) { at("end"); int r = PMPI_Finalize(); at("ended"); return r; }
"#;

    fn strikes() -> &'static Path {
        static MADE: OnceLock<PathBuf> = OnceLock::new();
        MADE.get_or_init(|| {
            let (source, library) = (folder().join("strikes.c"), folder().join("strikes.so"));
            std::fs::write(&source, STRIKES).expect("a file");
            let mut c = Command::new("mpicc");
            let o = done(c.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source));
            assert!(o.status.success(), "{}", text(&o.stderr));
            library
        })
    }

    /// Two ranks train and save; one is struck. How the job ends.
    fn struck(at: &str, how: &str, victim: usize) {
        let name = format!("{at}-{how}-{victim}");
        let dir = folder().join(&name);
        std::fs::create_dir_all(&dir).expect("a folder");
        let file = |name: &str| std::fs::File::create(dir.join(name)).expect("a file");
        let mut c = mpirun(1);
        for rank in 0..2 {
            if rank > 0 {
                c.args([":", "-n", "1"]);
            }
            if rank == victim {
                let preload = format!("LD_PRELOAD={}", strikes().display());
                let (at, how) = (format!("STRUCK_AT={at}"), format!("STRUCK_HOW={how}"));
                c.args(["-x", &preload, "-x", &at, "-x", &how]);
            }
            c.args([super::SHARDC, "run", "../plan", "--transport", "mpi", "--threads", "1"]);
            c.args(["--kernels", "interpreted", "--steps", "2", "--save", "saved"]);
            c.args(["--silence", "2", "--start-timeout", "3"]);
        }
        c.stdout(file("out")).stderr(file("err")).stdin(Stdio::null()).current_dir(&dir);
        let child = c.spawn().expect("mpirun");
        let (status, err) = Job { child, dir: dir.clone() }.end();
        let what = format!("process {victim}, {how} at {at}: {status:?}\n{err}");
        assert_ne!(status, Some(0), "{what}");
        let saved = dir.join("saved/model.safetensors").exists();
        assert_eq!(saved, at.starts_with("end"), "{what}");
        // Whoever is killed, mpirun ends the others, which may not come to speak.
        if how == "kill" {
            assert!(err.matches("error[").count() <= 1, "{what}");
            return;
        }
        let other = 1 - victim;
        if ["init", "started", "broadcast"].contains(&at) {
            let line = format!("error[start-timeout]: rank {other} waited 3 s ");
            one_message(&err, &[&line]);
            assert!(
                err.contains("in MPI's start") || err.contains("while processes join"),
                "{what}"
            );
            return;
        }
        one_message(&err, &[&format!("process {victim} ("), "was silent for 2 s"]);
        assert_eq!(err.contains("all steps are done"), at == "end", "{what}");
    }

    /// The points where ranks once waited for ever, and another that is drawn (`SEED`); every night all, of each rank.
    #[test]
    fn whoever_is_struck_in_mpi_is_missed_in_time() {
        let all = ["init", "started", "broadcast", "group", "end"];
        let each = all.iter().flat_map(|at| [0, 1].map(|v| [(*at, "stop", v), (*at, "kill", v)]));
        let mut jobs: Vec<_> = each.flatten().chain([("ended", "kill", 0)]).collect();
        if samples(1, 2) == 1 {
            let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
            let draw = Stream::new(seed, "starts", 0);
            let of = |i: u64, n: usize| (draw.uniform(i) * n as f64) as usize;
            let any = jobs[of(2, jobs.len())];
            jobs = vec![("init", "stop", of(0, 2)), ("end", "stop", of(1, 2)), any];
            jobs.dedup();
        }
        for some in jobs.chunks(4) {
            std::thread::scope(|s| {
                for &(at, how, victim) in some {
                    s.spawn(move || struck(at, how, victim));
                }
            });
        }
    }
}
