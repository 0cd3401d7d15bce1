//! Runs one kernel on a device: the launches that it became, a literal, or a collective.

use super::arena::Arena;
use super::device::{Called, Stream};
use super::modules::Modules;
use crate::exchange::exchange;
use crate::experts;
use crate::transport::Transport;
use cudarc::driver::result;
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::kernel::{Kernel, Ragged};
use shardc_ir::launch::Launch;
use std::sync::Arc;

/// What kernels need beside their memory.
pub struct Executor {
    stream: Arc<Stream>,
    modules: Arc<Modules>,
    transport: Box<dyn Transport>,
    /// A u64, 0 unless data did not fit; see [`shardc_ir::launch::Word::Status`].
    status: Arena,
}

impl Executor {
    pub fn new(
        stream: &Arc<Stream>,
        modules: &Arc<Modules>,
        transport: Box<dyn Transport>,
    ) -> Result<Executor> {
        let status = Arena::new(stream, 8, false)?;
        Ok(Executor { stream: stream.clone(), modules: modules.clone(), transport, status })
    }

    pub fn transport(&mut self) -> &mut dyn Transport {
        &mut *self.transport
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
        memory: &[u64],
    ) -> Result<()> {
        self.stream.device.bind()?;
        for l in launches {
            // SAFETY: by the caller.
            unsafe { self.modules.launch(&self.stream, l, memory, self.status.address(0))? };
        }
        match kernel {
            Kernel::Literal { values, to } => {
                // SAFETY: by the caller; the driver copies from memory that is not pinned at once.
                unsafe { result::memcpy_htod_async(memory[*to], values, self.stream.stream) }
                    .called("cuMemcpyHtoDAsync")
            }
            Kernel::Collective(k) => {
                let bases: Vec<*mut f32> = memory.iter().map(|&m| m as *mut f32).collect();
                let stream = self.stream.clone();
                let there = |r: &Ragged| {
                    let counts = counts(&stream, r, memory)?;
                    // SAFETY: by the caller.
                    Ok(unsafe { experts::there(r, &bases, |at| counts[at]) })
                };
                // SAFETY: by the caller; what comes before the exchange was launched.
                unsafe { exchange(&mut *self.transport, k, &bases, there) }
            }
            _launched => Ok(()),
        }
    }

    /// Waits until all kernels are done.
    ///
    /// # Errors
    /// What they did wrong; `moe-bound` if a buffer of experts had too few rows.
    pub fn wait(&mut self) -> Result<()> {
        let mut needed = [0; 8];
        self.status.read(0, &mut needed)?;
        match u64::from_le_bytes(needed) {
            0 => Ok(()),
            rows => Err(Diag::new("moe-bound", format!("{rows} rows are needed for experts"))
                .rule("the copies of a shard's tokens for a group of experts fit its rows")
                .help("compile with a larger --moe-bound")
                .exit(Exit::RankFailed)),
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
