//! What devices can launch, by architecture: CUDA C++ Programming Guide, "Technical Specifications per
//! Compute Capability".

use shardc_ir::diag::{Diag, Result};
use shardc_ir::launch::DeviceLaunch;

/// Blocks along the dims of a grid.
const GRID: [u32; 3] = [i32::MAX as u32, u16::MAX as u32, u16::MAX as u32];
/// Threads of a block.
const THREADS: u32 = 1024;
/// Bytes of shared memory that texts declare at least where a launch asks for more beside them, which
/// begins at a multiple of this.
pub(super) const DECLARED: u32 = 1 << 10;

/// The limits of an architecture that differ from one to another.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Limits {
    pub arch: String,
    /// Bytes of shared memory that a block can ask for.
    pub shared: u32,
    /// Bytes of shared memory that the blocks of a multiprocessor share.
    pub multiprocessor: u32,
    /// Groups of four warps multiply (`wgmma`).
    pub groups: bool,
    /// How many multiprocessors a device has, about: fewer blocks leave some of them idle.
    pub multiprocessors: usize,
    /// From so many steps of k on, for a byte that is moved for an element of the result, a product is faster
    /// whose blocks have a multiprocessor each: nothing is multiplied there while they move their results, and
    /// two that share one multiply more slowly. By times of eight products on an H100.
    pub depth: usize,
}

/// Architectures with their shared memory of a block, in KiB, of which a multiprocessor has one more; all
/// that run our code, from sm_80 on.
const SHARED: [(u32, u32); 13] = [
    (80, 163),
    (86, 99),
    (87, 163),
    (88, 99),
    (89, 99),
    (90, 227),
    (100, 227),
    (101, 227),
    (103, 227),
    (110, 227),
    (120, 99),
    (121, 99),
    // One that we do not know has what all have.
    (u32::MAX, 99),
];

impl Limits {
    /// Those of an architecture such as `sm_90a`.
    pub fn of(arch: &str) -> Limits {
        let digits = arch.trim_start_matches("sm_").trim_end_matches(|c: char| !c.is_ascii_digit());
        let number: u32 = digits.parse().unwrap_or(u32::MAX);
        let known = SHARED.iter().find(|(a, _)| *a == number).unwrap_or(&SHARED[SHARED.len() - 1]);
        let (shared, multiprocessor) = (known.1 << 10, (known.1 + 1) << 10);
        let groups = arch == "sm_90a";
        Limits {
            arch: arch.into(),
            shared,
            multiprocessor,
            groups,
            multiprocessors: 128,
            depth: 660,
        }
    }

    /// True if a launch can ask for so many bytes of shared memory, beside what its text declares.
    pub fn hold(&self, shared: u32, declared: u32) -> bool {
        shared == 0 || shared.saturating_add(declared) <= self.shared
    }

    /// Checks that the architecture can launch it.
    ///
    /// # Errors
    /// `cuda-limit` with the kernel, what it needs and the limit.
    pub fn check(&self, l: &DeviceLaunch) -> Result<()> {
        let arch = &self.arch;
        let refused = |needs: String, has: String| {
            Diag::new("cuda-limit", format!("{} needs {needs}, {arch} has {has}", l.entry))
                .at(format!("{}, in {}", l.source.file, l.entry))
        };
        if let Some(dim) = (0..3).find(|&dim| l.grid[dim] > GRID[dim]) {
            let needs = format!("{} blocks along {}", l.grid[dim], ["x", "y", "z"][dim]);
            return Err(refused(needs, format!("{} at most", GRID[dim]))
                .help("compile for more ranks, or with a --microbatch of fewer sequences"));
        }
        if l.threads > THREADS {
            let needs = format!("{} threads of a block", l.threads);
            return Err(refused(needs, format!("{THREADS} at most")));
        }
        if !self.hold(l.shared, DECLARED) {
            let needs = l.shared.saturating_add(DECLARED);
            let fit = SHARED.iter().filter(|(_, kib)| needs <= kib << 10);
            let fit: Vec<String> = fit.map(|(a, _)| format!("sm_{a}")).collect();
            let d = refused(
                format!("{needs} B of shared memory in a block"),
                format!("{} B at most", self.shared),
            );
            return Err(match fit.is_empty() {
                true => d.help("train with --dtype bf16, or with narrower heads"),
                false => d.help(format!("use --arch {}", fit.join(" or "))),
            });
        }
        Ok(())
    }
}
