//! Checkpoints of training: parameters and optimizer state, in pieces, under global names.
//!
//! ```text
//! DIR/step-00000120/index.json           step, tensors and where their pieces are
//!                   rank-00003.safetensors    what rank 3 gives away, f32
//!                   plan/                     the plan that wrote it
//! ```
//! Every rank writes what it owns, all at the same time; the folder is written under another name,
//! flushed, and made visible by one rename, so whoever sees it sees all of it. Any plan of the same
//! model reads it: a tensor is put together from whatever pieces there are.

mod base;
mod evaluated;
mod found;
mod index;
mod states;
mod write;

pub use base::{BaseModel, LeftOut};
pub use evaluated::Evaluated;
pub use index::{RATE, RunState, Saved};
pub use states::OptimResume;
pub use write::{Reached, Saves, check_steps, task, write_all};

use std::path::{Path, PathBuf};

/// The folder of a step's checkpoint.
pub fn step_folder(dir: &Path, step: usize) -> PathBuf {
    dir.join(format!("step-{step:08}"))
}

/// The same while it is written.
fn unfinished(dir: &Path, step: usize) -> PathBuf {
    dir.join(format!(".step-{step:08}.unfinished"))
}

/// The number in a name that [`step_folder`] gives.
fn step_of(name: &str) -> Option<usize> {
    let digits = name.strip_prefix("step-")?;
    (digits.len() >= 8 && digits.bytes().all(|b| b.is_ascii_digit()))
        .then(|| digits.parse().ok())
        .flatten()
}

/// Bytes of a checkpoint's files.
pub fn bytes(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|e| e.metadata().ok())
        .filter(std::fs::Metadata::is_file)
        .map(|m| m.len())
        .sum()
}

/// Name of a rank's file.
fn rank_file(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}
