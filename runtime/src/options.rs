//! How a plan is run: threads, devices, limits, and where the first values come from.

use crate::cuda::Devices;
use crate::native::Native;
use crate::threads::Threads;
use crate::transport::Transport;
use shardc_ir::diag::Result;
use shardc_ir::func::Role;
use shardc_ir::mesh::Mesh;
use shardc_ir::weights::Weight;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What is loaded before the first step.
#[derive(Clone, Copy, Debug)]
pub enum Wanted<'a> {
    Param(&'a Weight),
    /// Optimizer state, by its role and its global sizes. Without a checkpoint it is 0.
    State {
        role: &'a Role,
        shape: &'a [usize],
    },
}

/// Fills a slice of a parameter or state: the elements of these ranges, one per dim, in row-major
/// order.
pub type LoadFn<'a> = dyn Fn(Wanted, &[Range<usize>], &mut [f32]) -> Result<()> + Sync + 'a;

/// Parameters from `load`, optimizer state 0.
pub fn fresh(
    load: impl Fn(&Weight, &[Range<usize>], &mut [f32]) -> Result<()> + Sync,
) -> impl Fn(Wanted, &[Range<usize>], &mut [f32]) -> Result<()> + Sync {
    move |wanted, ranges, out| match wanted {
        Wanted::Param(w) => load(w, ranges, out),
        Wanted::State { .. } => {
            out.fill(0.0);
            Ok(())
        }
    }
}

/// How to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads that one rank's products may use.
    pub threads: usize,
    /// Whether the ranks that share this one's cores have more threads than there are cores: then a thread
    /// that waits gives its core away at once.
    pub crowded: bool,
    /// Fill arenas with NaN, so that reading what was never written shows.
    pub poison: bool,
    /// A rank that others have waited for so long has failed.
    pub timeout: Duration,
    /// Note when each instruction and each kernel began and ended.
    pub trace: bool,
    /// Compiled kernels over rows; without, they are interpreted.
    pub native: Option<Arc<Native>>,
    /// The devices that ranks run on; without, they run on the processor.
    pub devices: Option<Arc<Devices>>,
}

impl Options {
    /// The ends of all ranks, which are threads of this process.
    pub(crate) fn connect(&self, mesh: &Mesh) -> Vec<Box<dyn Transport>> {
        fn boxed<T: Transport + 'static>(ends: Vec<T>) -> Vec<Box<dyn Transport>> {
            ends.into_iter().map(|end| Box::new(end) as Box<dyn Transport>).collect()
        }
        match &self.devices {
            Some(d) => boxed(d.connect(mesh, self.timeout)),
            None => boxed(Threads::connect(mesh, self.timeout)),
        }
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            threads: 1,
            crowded: false,
            poison: false,
            timeout: Duration::from_secs(600),
            trace: false,
            native: None,
            devices: None,
        }
    }
}
