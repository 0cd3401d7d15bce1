//! What a device runs: text in CUDA C++, an entry point of it, and what that is called with.
//!
//! A kernel of [`crate::kernel`] becomes a list of launches, in order. All parameters of an entry
//! point are words of 8 bytes, one after the other, be they its own parameters or the fields of a
//! struct.

pub mod regions;

use std::borrow::Cow;
use std::sync::Arc;

/// Bytes of a rank's scratch memory: see [`Word::Scratch`].
pub const SCRATCH: usize = 1 << 20;

/// One text that is compiled by itself; many launches share one.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct KernelSource {
    /// File that most of it comes from, for messages.
    pub file: &'static str,
    /// The text; what it includes are the headers of the code generator.
    pub text: String,
}

/// One parameter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Word {
    /// A byte of the kernel's memory, by operand.
    Address {
        operand: usize,
        byte: usize,
    },
    /// The rank's status: a u64 that is 0, and that a kernel sets if its data do not fit.
    Status,
    /// The rank's scratch memory, of [`SCRATCH`] bytes, in which launches of one kernel leave each
    /// other numbers.
    Scratch,
    Int(i64),
    Float(f64),
}

/// A call of an entry point by `grid` blocks of `threads` threads.
#[derive(Clone, PartialEq, Debug)]
pub struct DeviceLaunch {
    pub source: Arc<KernelSource>,
    pub entry: Cow<'static, str>,
    pub grid: [u32; 3],
    pub threads: u32,
    /// Bytes of shared memory beside what the text declares.
    pub shared: u32,
    pub words: Vec<Word>,
}

/// What a rank launches: by function, then by launch of that, one kernel's list each.
pub type Launches = Vec<Vec<Vec<DeviceLaunch>>>;
