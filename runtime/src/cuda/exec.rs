//! Runs one kernel on a device: the launches that it became, a literal, or a collective.

use super::arena::Arena;
use super::device::{Called, Stream};
use super::graphs::Graphs;
use super::modules::{Modules, Own};
use super::products::Products;
use crate::exchange::exchange;
use crate::experts;
use crate::transport::Transport;
use cudarc::driver::result;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::{Kernel, Ragged};
use shardc_ir::launch::{Launch, SCRATCH};
use smallvec::SmallVec;
use std::sync::Arc;

/// Where scratch memory begins, behind the status.
const BEHIND: usize = 256;

/// What kernels need beside their memory.
pub struct Executor {
    stream: Arc<Stream>,
    modules: Arc<Modules>,
    transport: Box<dyn Transport>,
    /// A u64, 0 unless data did not fit; see [`shardc_ir::launch::Word::Status`]. Behind it,
    /// scratch memory.
    own: Arena,
    products: Option<Products>,
    graphs: Graphs,
}

impl Executor {
    pub fn new(
        stream: &Arc<Stream>,
        modules: &Arc<Modules>,
        transport: Box<dyn Transport>,
    ) -> Result<Executor> {
        let own = Arena::new(stream, BEHIND + SCRATCH, false)?;
        let graphs = Graphs::new(stream);
        let (stream, modules) = (stream.clone(), modules.clone());
        Ok(Executor { stream, modules, transport, own, products: None, graphs })
    }

    /// With a library that does what products it can be told of, in place of our kernels.
    pub fn with(self, products: Option<Products>) -> Executor {
        Executor { products, ..self }
    }

    pub fn transport(&mut self) -> &mut dyn Transport {
        &mut *self.transport
    }

    /// True if a kernel is nothing but launches, which are the same whenever its memory is.
    pub fn repeats(kernel: &Kernel) -> bool {
        !matches!(kernel, Kernel::Collective(_) | Kernel::Literal { .. })
    }

    /// Begins a run of kernels each of which [`Executor::repeats`], of so many launches: all that is
    /// queued up to [`Executor::keep`]. Runs of one number have the same kernels, with the same memory.
    /// True if all of it is queued already, by a graph of it, and there is no more to do.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// As for [`Executor::run`], for all kernels that runs of this number have had.
    pub unsafe fn replay(&mut self, run: usize, launches: usize) -> Result<bool> {
        // SAFETY: by the caller.
        unsafe { self.graphs.replay(run, launches) }
    }

    /// Ends a run. False if the device has no room to keep it: then nothing of it is queued.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn keep(&mut self) -> Result<bool> {
        self.graphs.keep()
    }

    /// Forgets all runs: their numbers may be given to others.
    pub fn forget(&mut self) {
        self.graphs.forget();
    }

    /// Queues a kernel, of which `launches` were made, on the addresses of its operands, results and
    /// workspace, in this order.
    ///
    /// # Errors
    /// Those of the driver and of the transport. What kernels did wrong while they ran is told by a
    /// later call.
    ///
    /// # Safety
    /// As for [`crate::exec::Executor::run`], with memory of the device, until all is done.
    pub unsafe fn run(
        &mut self,
        kernel: &Kernel,
        launches: &[Launch],
        memory: &[*mut f32],
    ) -> Result<()> {
        self.stream.device.bind()?;
        let addresses: SmallVec<[u64; 16]> = memory.iter().map(|&m| m as u64).collect();
        if let (Kernel::Gemm(k), Some(library)) = (kernel, &mut self.products)
            // SAFETY: by the caller.
            && unsafe { library.run(k, &addresses)? }
        {
            return Ok(());
        }
        let own = Own { status: self.own.address(0), scratch: self.own.address(BEHIND) };
        for l in launches {
            // SAFETY: by the caller.
            unsafe { self.modules.launch(&self.stream, l, &addresses, &own)? };
        }
        match kernel {
            Kernel::Literal { values, to } => {
                // SAFETY: by the caller; the driver copies from memory that is not pinned at once.
                unsafe { result::memcpy_htod_async(addresses[*to], values, self.stream.stream) }
                    .called("cuMemcpyHtoDAsync")
            }
            Kernel::Collective(k) => {
                let stream = self.stream.clone();
                let there = |r: &Ragged| {
                    let counts = counts(&stream, r, &addresses)?;
                    // SAFETY: by the caller.
                    Ok(unsafe { experts::there(r, memory, |at| counts[at]) })
                };
                // SAFETY: by the caller; what comes before the exchange was launched.
                unsafe { exchange(&mut *self.transport, k, memory, there) }
            }
            _launched => Ok(()),
        }
    }

    /// Waits until all kernels are done; a run that was not ended is none.
    ///
    /// # Errors
    /// What they did wrong; `moe-bound` if a buffer of experts had too few rows.
    pub fn wait(&mut self) -> Result<()> {
        self.graphs.abandon();
        let mut needed = [0; 8];
        self.own.read(0, &mut needed)?;
        match u64::from_le_bytes(needed) {
            0 => Ok(()),
            rows => Err(Diag::new("moe-bound", format!("{rows} rows are needed for experts"))
                .rule("the copies of a shard's tokens for a group of experts fit its rows")
                .help("compile with a larger --moe-bound")),
        }
    }
}

/// The counts' operand as far as it is used, on the host.
fn counts(stream: &Stream, r: &Ragged, memory: &[u64]) -> Result<Vec<i32>> {
    let mut counts = vec![0i32; r.counts.end()];
    stream.device.bind()?;
    // SAFETY: the block lies in the operand; the stream has finished before the vector is used.
    unsafe {
        result::memcpy_dtoh_async(&mut counts, memory[r.counts.view.operand], stream.stream)
            .called("cuMemcpyDtoHAsync")?;
    }
    stream.wait()?;
    Ok(counts)
}
