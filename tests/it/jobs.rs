//! Ranks as processes under mpirun: what the tests of clusters and of kills share.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

/// The command: the one that was built for the test, or another build of it (`SHARDC_BIN`).
pub fn shardc() -> String {
    std::env::var("SHARDC_BIN").unwrap_or(env!("CARGO_BIN_EXE_shardc").into())
}

/// After so long a test that waits has failed: no job here needs a tenth of it on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(600);

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A folder of a test's own, empty.
pub fn folder(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("clusters").join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder");
    dir
}

pub fn mpirun(ranks: usize) -> Command {
    let mut c = Command::new("mpirun");
    c.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    c.args(["--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-n", &ranks.to_string()]);
    c
}

pub fn done(c: &mut Command) -> Output {
    c.output().unwrap_or_else(|e| panic!("{c:?}: {e}"))
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub fn compile(model: &Path, flags: &[&str], plan: &Path) {
    let o = done(Command::new(shardc()).arg("compile").arg(model).args(flags).arg("-o").arg(plan));
    assert!(o.status.success(), "{flags:?}: {}", text(&o.stderr));
}

/// A job that trains until it is ended.
pub struct Job {
    pub child: Child,
    pub dir: PathBuf,
}

impl Job {
    pub fn read(&self, file: &str) -> String {
        let mut s = vec![];
        let f = std::fs::File::open(self.dir.join(file));
        f.and_then(|mut f| f.read_to_end(&mut s)).expect("a file");
        text(&s)
    }

    pub fn until(&mut self, file: &str, word: &str) {
        let start = Instant::now();
        while !self.read(file).contains(word) {
            let gone = self.child.try_wait().expect("a child").is_some();
            let late = start.elapsed() > PATIENCE;
            assert!(!gone && !late, "no {word}:\n{}\n{}", self.read("out"), self.read("err"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The process of a rank, from the table that process 0 prints.
    pub fn pid(&self, rank: usize) -> String {
        // In JSON the table is one line.
        let err = self.read("err").replace("\\n", "\n");
        let line = err.lines().find(|l| l.starts_with(&format!(" {rank} "))).expect("a row");
        let rest = line.split("pid ").nth(1).expect("a pid");
        rest.split_whitespace().next().expect("a number").to_string()
    }

    pub fn signal(&self, pid: &str, signal: &str) {
        let done = Command::new("kill").args([signal, pid]).status().expect("kill");
        assert!(done.success());
    }

    /// Waits for the end; the status, and what was said.
    pub fn end(mut self) -> (Option<i32>, String) {
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
pub fn one_message(err: &str, words: &[&str]) {
    assert_eq!(err.matches("error[").count(), 1, "{err}");
    for w in words {
        assert!(err.contains(w), "no `{w}` in:\n{err}");
    }
}

/// Steps as printed: number, and loss and norm as text.
pub fn losses(out: &str) -> Vec<(usize, String)> {
    let one = |l: &str| {
        let (step, rest) = l.strip_prefix("{\"step\":")?.split_once(',')?;
        Some((step.parse().ok()?, rest.split(",\"tokens").next()?.to_string()))
    };
    out.lines().filter_map(one).collect()
}
