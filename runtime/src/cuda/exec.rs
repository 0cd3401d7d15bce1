//! Runs one kernel on a device: the launches that it became, a literal, or a collective.

use super::arena::{DeviceArena, Filled};
use super::device::{Called, Stream};
use super::graphs::Graphs;
use super::modules::{Modules, Own, Ready};
use super::products::Products;
use crate::exchange::exchange;
use crate::experts;
use crate::transport::Transport;
use cudarc::driver::result;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::{Collective, Exchange, Kernel, Ragged};
use shardc_ir::launch::SCRATCH;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Where scratch memory begins, behind the status.
const BEHIND: usize = 256;

/// What kernels need beside their memory.
pub struct DeviceExecutor {
    stream: Arc<Stream>,
    /// They live as long as what is launched.
    _modules: Arc<Modules>,
    transport: Box<dyn Transport>,
    /// A u64, 0 unless data did not fit; see [`shardc_ir::launch::Word::Status`]. Behind it,
    /// scratch memory.
    own: DeviceArena,
    products: Option<Products>,
    graphs: Graphs,
    /// For counts of experts, of the exchange that has most.
    counts: Option<Filled>,
}

impl DeviceExecutor {
    pub fn new(
        stream: &Arc<Stream>,
        modules: &Arc<Modules>,
        transport: Box<dyn Transport>,
    ) -> Result<DeviceExecutor> {
        let own = DeviceArena::new(stream, BEHIND + SCRATCH, false)?.staged()?;
        let graphs = Graphs::new(stream);
        let (stream, _modules) = (stream.clone(), modules.clone());
        let (products, counts) = (None, None);
        Ok(DeviceExecutor { stream, _modules, transport, own, products, graphs, counts })
    }

    /// With a library that does what products it can be told of, in place of our kernels.
    pub fn with(self, products: Option<Products>) -> DeviceExecutor {
        DeviceExecutor { products, ..self }
    }

    pub fn transport(&mut self) -> &mut dyn Transport {
        &mut *self.transport
    }

    /// True if a kernel is nothing but launches, which are the same whenever its memory is.
    pub fn repeats(kernel: &Kernel) -> bool {
        !matches!(kernel, Kernel::Collective(_) | Kernel::Literal { .. })
    }

    /// Queues a run of kernels each of which [`DeviceExecutor::repeats`], by its graph; false if none was kept.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// As for [`DeviceExecutor::run`], for all its kernels.
    pub unsafe fn replay(&mut self, run: usize) -> Result<bool> {
        // SAFETY: by the caller.
        unsafe { self.graphs.replay(run) }
    }

    /// Keeps a run of so many launches, all that `queue` runs, as a graph, if there is room; nothing of it
    /// is done now.
    ///
    /// # Errors
    /// Those of the driver and of `queue`.
    pub fn keep(
        &mut self,
        run: usize,
        launches: usize,
        queue: impl FnOnce(&mut DeviceExecutor) -> Result<()>,
    ) -> Result<()> {
        if !self.graphs.begin(launches)? {
            return Ok(());
        }
        let queued = queue(self);
        self.graphs.keep(run, launches, queued)
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
        launches: &[Ready],
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
            unsafe { l.launch(&self.stream, &addresses, &own)? };
        }
        match kernel {
            Kernel::Literal { values, to } => {
                // SAFETY: by the caller; the driver copies from memory that is not pinned at once.
                unsafe { result::memcpy_htod_async(addresses[*to], values, self.stream.stream) }
                    .called("cuMemcpyHtoDAsync")
            }
            Kernel::Collective(k) => {
                let counts = self.counts(k, &addresses)?;
                let there = |r: &Ragged| {
                    let own = &counts[&r.counts.view.operand];
                    // SAFETY: by the caller.
                    Ok(unsafe { experts::there(r, memory, |at| own[at]) })
                };
                // SAFETY: by the caller; what comes before the exchange was launched.
                unsafe { exchange(&mut *self.transport, k, memory, there) }
            }
            _launched => Ok(()),
        }
    }

    /// Lets the library choose how to do a product, and makes room for counts of experts.
    ///
    /// # Errors
    /// Those of the library and of the driver.
    pub fn prepare(&mut self, kernel: &Kernel) -> Result<()> {
        if let Kernel::Collective(k) = kernel {
            self.room(4 * counted(k).values().sum::<usize>())?;
        }
        match (kernel, &mut self.products) {
            (Kernel::Gemm(k), Some(library)) => library.prepare(k),
            _ours => Ok(()),
        }
    }

    /// Pinned memory for counts of so many bytes.
    fn room(&mut self, bytes: usize) -> Result<&mut [u8]> {
        if self.counts.as_mut().map_or(0, |c| c.bytes().len()) < bytes {
            self.stream.device.bind()?;
            self.counts = Some(Filled::new(&self.stream, bytes)?);
        }
        Ok(self.counts.as_mut().map_or(&mut [], Filled::bytes))
    }

    /// The counts of an exchange of rows of experts, by operand, as far as they are used: they are waited for once.
    fn counts(&mut self, k: &Collective, memory: &[u64]) -> Result<BTreeMap<usize, Vec<i32>>> {
        let counted = counted(k);
        if counted.is_empty() {
            return Ok(BTreeMap::new());
        }
        let stream = self.stream.clone();
        let mut rest = self.room(4 * counted.values().sum::<usize>())?;
        let mut parts = vec![];
        for (&operand, &n) in &counted {
            let (part, behind) = rest.split_at_mut(4 * n);
            // SAFETY: the block lies in the operand; the pinned memory stays, and nobody reads it before the stream
            // has been waited for.
            unsafe { result::memcpy_dtoh_async(part, memory[operand], stream.stream) }
                .called("cuMemcpyDtoHAsync")?;
            parts.push((operand, part));
            rest = behind;
        }
        stream.wait()?;
        let word = |w: &[u8]| i32::from_ne_bytes(w.try_into().expect("4 bytes"));
        let numbers = |part: &mut [u8]| part.chunks_exact(4).map(word).collect();
        Ok(parts.into_iter().map(|(operand, part)| (operand, numbers(part))).collect())
    }

    /// Prepares a collective before it is first run: see [`Transport::rehearse`].
    ///
    /// # Errors
    /// Those of the transport.
    ///
    /// # Safety
    /// As for [`DeviceExecutor::run`].
    pub unsafe fn rehearse(&mut self, kernel: &Kernel, memory: &[*mut f32]) -> Result<()> {
        let Kernel::Collective(k) = kernel else { return Ok(()) };
        // All rows that a buffer has.
        // SAFETY: by the caller.
        let there = |r: &Ragged| Ok(unsafe { experts::there(r, memory, |_| i32::MAX) });
        // SAFETY: by the caller.
        unsafe { exchange(&mut *self.transport, k, memory, there) }
    }

    /// Waits until all kernels are done.
    ///
    /// # Errors
    /// What they did wrong; `moe-bound` if a buffer of experts had too few rows.
    pub fn wait(&mut self) -> Result<()> {
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

/// The operands with counts of an exchange of rows of experts, and how many elements of each are used.
fn counted(k: &Collective) -> BTreeMap<usize, usize> {
    let mut all = BTreeMap::new();
    if let Exchange::AllToAllV { from, to } = &k.exchange {
        for r in from.iter().chain(to) {
            let own: &mut usize = all.entry(r.counts.view.operand).or_default();
            *own = r.counts.end().max(*own);
        }
    }
    all
}
