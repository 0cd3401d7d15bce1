//! What the tests of several crates share: which tools a test may be skipped without, how many samples
//! a sweep takes, JSON Schema, and stand-ins for the libraries of CUDA.

pub mod schema;
pub mod standin;
pub mod texts;

use std::fmt;

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
    /// PyTorch, Hugging Face transformers and accelerate for the Python that `SHARDC_PYTHON` names, or `python3`.
    Torch,
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

/// Whether a run takes the `i`-th case of a sweep: every run takes one in `n`, the long one all. Of a table,
/// `i` is the sum of the indices of row and column: so all rows and columns are met that have `n` cases.
pub fn taken(i: usize, n: usize) -> bool {
    nightly() || i.is_multiple_of(n)
}

/// How many samples a sweep takes in every run, and in the long one.
pub fn samples(every: u64, long: u64) -> u64 {
    if nightly() { long } else { every }
}
