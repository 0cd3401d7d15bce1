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

/// What is loaded before the first step: a parameter or a state, by its role and its global sizes.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    pub role: &'a Role,
    pub shape: &'a [usize],
    /// What it is where training begins.
    pub first: First<'a>,
}

/// What something is before the first step of a training.
#[derive(Clone, Copy, Debug)]
pub enum First<'a> {
    /// All elements are this number.
    Number(f64),
    Weight(&'a Weight),
}

/// Fills a slice of a parameter or state: the elements of these ranges, one per dim, in row-major
/// order.
pub type LoadFn<'a> = dyn Fn(Wanted, &[Range<usize>], &mut [f32]) -> Result<()> + Sync + 'a;

/// A training that begins: what are weights from `load`, all else as it is declared.
pub fn fresh(
    load: impl Fn(&Weight, &[Range<usize>], &mut [f32]) -> Result<()> + Sync,
) -> impl Fn(Wanted, &[Range<usize>], &mut [f32]) -> Result<()> + Sync {
    move |wanted, ranges, out| match wanted.first {
        First::Weight(w) => load(w, ranges, out),
        First::Number(x) => {
            out.fill(x as f32);
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
    pub(crate) fn connect(&self, mesh: &Mesh) -> Result<Vec<Box<dyn Transport>>> {
        fn boxed<T: Transport + 'static>(ends: Vec<T>) -> Vec<Box<dyn Transport>> {
            ends.into_iter().map(|end| Box::new(end) as Box<dyn Transport>).collect()
        }
        match &self.devices {
            Some(d) => Ok(boxed(d.connect(mesh, self.timeout)?)),
            None => Ok(boxed(Threads::connect(mesh, self.timeout))),
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
