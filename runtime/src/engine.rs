//! A rank's memory together with what runs kernels in it: on the processor here, on a device in
//! [`crate::cuda`]. A step is the same for both.

use crate::arena::Arena;
use crate::exec::Executor;
use crate::transport::Transport;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::Kernel;
use smallvec::SmallVec;

/// A kernel of a run, the launch of a function, with the addresses of its operands.
pub(crate) struct Queued<'a> {
    pub launch: (usize, usize),
    pub kernel: &'a Kernel,
    pub memory: SmallVec<[*mut f32; 16]>,
}

/// One rank's memory and executor. Places are bytes of its arena.
pub(crate) trait Engine: Send {
    fn transport(&mut self) -> &mut dyn Transport;

    /// The address of a place, which only kernels and transports use; `None` if it is not in the arena.
    fn at(&mut self, offset: usize, bytes: usize) -> Option<*mut f32>;

    /// Bytes that are well written at once.
    fn at_once(&self) -> usize;

    /// Fills a place: `make` gets so many bytes of this process, and what it leaves there is in the
    /// place for the kernels that follow. What it does not write is of no meaning.
    fn write(
        &mut self,
        offset: usize,
        bytes: usize,
        make: &mut dyn FnMut(*mut f32) -> Result<()>,
    ) -> Result<()>;

    /// Shows a place to `take`, as so many bytes of this process, after all that was begun is done.
    fn read(&mut self, offset: usize, bytes: usize, take: &mut dyn FnMut(*mut f32)) -> Result<()>;

    /// Fills a place with zeros.
    fn clear(&mut self, offset: usize, bytes: usize) -> Result<()>;

    /// True if kernels are only queued: then they are timed one by one.
    fn queues(&self) -> bool {
        false
    }

    /// What the kernel of a launch of a function is queued as, in launches of the device, if these are
    /// the same whenever its memory is.
    fn repeated(&self, _launch: (usize, usize), _kernel: &Kernel) -> Option<usize> {
        None
    }

    /// Queues a run of kernels that are repeated, by what was kept of it; false if nothing was.
    ///
    /// # Safety
    /// As for [`Engine::run`], for all its kernels.
    unsafe fn replay(&mut self, _run: usize) -> Result<bool> {
        Ok(false)
    }

    /// Keeps a run of so many launches of the device, if there is room; nothing of it is done now.
    ///
    /// # Errors
    /// Those of the device.
    ///
    /// # Safety
    /// As for [`Engine::run`], whenever the run is replayed.
    unsafe fn keep(&mut self, _run: usize, _launches: usize, _all: &[Queued]) -> Result<()> {
        Ok(())
    }

    /// Chooses how a kernel is done, if that is to be chosen, before the first step.
    ///
    /// # Errors
    /// Those of the device.
    fn prepare(&mut self, _kernel: &Kernel) -> Result<()> {
        Ok(())
    }

    /// Prepares what a kernel exchanges, before the first step.
    ///
    /// # Errors
    /// Those of the transport.
    ///
    /// # Safety
    /// As for [`Engine::run`].
    unsafe fn rehearse(&mut self, _kernel: &Kernel, _memory: &[*mut f32]) -> Result<()> {
        Ok(())
    }

    /// Runs, or queues, the kernel of a launch of a function.
    ///
    /// # Safety
    /// As for [`Executor::run`], until all is done.
    unsafe fn run(
        &mut self,
        launch: (usize, usize),
        kernel: &Kernel,
        memory: &[*mut f32],
    ) -> Result<()>;

    /// Waits until all that was begun is done.
    ///
    /// # Errors
    /// What kernels did wrong.
    fn wait(&mut self) -> Result<()>;

    /// One past the last byte of any place that was asked for.
    fn touched(&self) -> usize;
}

/// A place outside of an arena.
pub(crate) fn out_of_arena() -> Diag {
    Diag::new("plan", "a place of the plan is not in its arena")
        .help("recompile the plan with this version of shardc")
}

/// The processor's.
pub(crate) struct OnHost {
    /// Dropped first: its transport may still be at work in the arena.
    executor: Executor,
    arena: Arena,
}

impl OnHost {
    pub fn new(bytes: usize, poison: bool, executor: Executor) -> Result<OnHost> {
        let arena = Arena::new(bytes, poison)?;
        Ok(OnHost { executor, arena })
    }
}

impl Engine for OnHost {
    fn transport(&mut self) -> &mut dyn Transport {
        self.executor.transport()
    }

    fn at(&mut self, offset: usize, bytes: usize) -> Option<*mut f32> {
        self.arena.at(offset, bytes).map(|p| p.as_ptr())
    }

    fn at_once(&self) -> usize {
        usize::MAX
    }

    fn write(
        &mut self,
        offset: usize,
        bytes: usize,
        make: &mut dyn FnMut(*mut f32) -> Result<()>,
    ) -> Result<()> {
        make(self.at(offset, bytes).ok_or_else(out_of_arena)?)
    }

    fn read(&mut self, offset: usize, bytes: usize, take: &mut dyn FnMut(*mut f32)) -> Result<()> {
        take(self.at(offset, bytes).ok_or_else(out_of_arena)?);
        Ok(())
    }

    fn clear(&mut self, offset: usize, bytes: usize) -> Result<()> {
        self.arena.elements(offset, bytes).ok_or_else(out_of_arena)?.fill(0.0);
        Ok(())
    }

    unsafe fn run(
        &mut self,
        _launch: (usize, usize),
        kernel: &Kernel,
        memory: &[*mut f32],
    ) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.executor.run(kernel, memory) }
    }

    fn wait(&mut self) -> Result<()> {
        Ok(())
    }

    fn touched(&self) -> usize {
        self.arena.touched()
    }
}
