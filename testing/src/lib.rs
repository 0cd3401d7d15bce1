//! What the tests of several crates share: which tools a test may be skipped without, how many
//! samples a sweep takes, JSON Schema, and stand-ins for the libraries of CUDA.

pub mod schema;
pub mod standin;
pub mod texts;

use std::fmt;
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};

/// What a machine may lack, and some tests need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tool {
    /// A C++ compiler, which runs CUDA kernels on the CPU.
    Cpp,
    /// NVIDIA's run-time compiler of kernels.
    Nvrtc,
    /// A browser without a window, which draws pages.
    Chromium,
    /// Perfetto's trace processor (`trace_processor_shell`), which reads traces.
    Perfetto,
    /// PyTorch, Hugging Face transformers and accelerate for the Python that `SHARDC_PYTHON` names,
    /// or `python3`.
    Torch,
    /// The same with PEFT.
    Peft,
    /// A package that plans are exported to, by its name, for the same Python.
    Target(&'static str),
    /// A C compiler for aarch64, and an emulator that runs what it makes (`aarch64-linux-gnu-gcc`, `qemu-aarch64-static`).
    Aarch64,
    /// A user other than the tests' with a limit of threads (`setpriv`, as root).
    OtherUser,
}

impl fmt::Display for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tool::Cpp => "c++",
            Tool::Nvrtc => "nvrtc",
            Tool::Chromium => "chromium",
            Tool::Perfetto => "perfetto",
            Tool::Torch => "torch",
            Tool::Peft => "peft",
            Tool::Target(name) => name,
            Tool::Aarch64 => "aarch64",
            Tool::OtherUser => "other-user",
        })
    }
}

/// The variable that names the tools of this machine, in words: `c++ nvrtc`. `.ci/run` sets it.
pub const HAS: &str = "SHARDC_HAS";

/// Says that a test, or a part of it, is skipped, and what would have been done.
///
/// # Panics
/// If `SHARDC_HAS` says that the tool is here: then there is no reason to skip.
pub fn skip(without: Tool, what: &str) {
    let has = std::env::var(HAS).unwrap_or_default();
    let here = has.split_whitespace().any(|tool| tool == without.to_string());
    assert!(!here, "{HAS} says that {without} is here, yet it is not found: {what}");
    println!("skipped, no {without}: {what}");
}

/// True in the long run of the tests (`.ci/nightly`), which sets `SHARDC_NIGHTLY`.
pub fn nightly() -> bool {
    std::env::var_os("SHARDC_NIGHTLY").is_some()
}

/// A port of this machine that nobody listens at, and that nobody is given who asks for any: those begin at 32768
/// (`ip_local_port_range`). A process that is given the same port does not get it within this one.
///
/// # Panics
/// If there is none.
pub fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let own = (std::process::id() % 1000) as u16 * 20;
    let all = (0..20_000)
        .map(|_| 10_000 + own.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000);
    let mut free = all.filter(|&p| TcpListener::bind(("127.0.0.1", p)).is_ok());
    free.next().expect("one of 20,000 ports is free")
}

/// The variable with the number by which samples rotate. `.ci/run` sets and prints it.
pub const ROTATE: &str = "SHARDC_ROTATE";

/// The number of `SHARDC_ROTATE`; 0 without one.
///
/// # Panics
/// If the variable is no number.
pub fn rotation() -> usize {
    match std::env::var(ROTATE) {
        Ok(n) => n.parse().unwrap_or_else(|_| panic!("{ROTATE} is {n:?}, and not a number")),
        Err(_) => 0,
    }
}

/// Whether a run takes the `i`-th case of a sweep: every run takes one in `n`, which ones
/// `rotation` says, and the long run all. Of a table, `i` is the sum of the indices of row and
/// column: so all rows and columns are met that have `n` cases.
pub fn taken(i: usize, n: usize) -> bool {
    taken_within(1, i, n)
}

/// The same of a sweep within another one, of which a run takes one in `outer`: it turns when that
/// has gone round. If both turned at once, some pairs of their cases would never meet.
pub fn taken_within(outer: usize, i: usize, n: usize) -> bool {
    nightly() || falls(i, n, rotation() / outer)
}

/// Whether the `i`-th case is among those, one in `n`, of a number.
fn falls(i: usize, n: usize, number: usize) -> bool {
    (i % n + number % n).is_multiple_of(n)
}

/// How many samples a sweep takes in every run, and in the long one.
pub fn samples(every: u64, long: u64) -> u64 {
    if nightly() { long } else { every }
}

/// The folders with the sources of all crates that are for users, and of this one, from the root of the workspace:
/// those beside a `Cargo.toml`, examples and fuzzing aside.
pub fn sources() -> Vec<String> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let all = std::fs::read_dir(root).expect("the root of the workspace").flatten();
    let name = |e: std::fs::DirEntry| e.file_name().into_string().expect("a name");
    let is = |of: &String| ["Cargo.toml", "src"].iter().all(|f| root.join(of).join(f).exists());
    let mut found: Vec<String> = all.map(name).filter(is).map(|of| of + "/src").collect();
    found.push("src".into());
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_that_of_one_number_in_n() {
        for n in 1..=9 {
            for i in 0..30 {
                // Hashes are large.
                for first in [0, 1, usize::MAX - 100] {
                    let numbers = (first..first + n).filter(|&number| falls(i, n, number));
                    assert_eq!(numbers.count(), 1, "case {i} of {n} from {first} on");
                }
                assert_eq!(falls(i, n, 0), i.is_multiple_of(n));
            }
        }
    }

    #[test]
    fn every_pair_is_that_of_one_number() {
        for (outer, n) in [(4, 2), (2, 2), (3, 6)] {
            for (i, j) in (0..outer).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let both = |&r: &usize| falls(i, outer, r) && falls(j, n, r / outer);
                let numbers = (0..outer * n).filter(both);
                assert_eq!(numbers.count(), 1, "{i} of {outer}, {j} of {n}");
            }
        }
    }
}
