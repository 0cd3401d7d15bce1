//! Runs of launches that are the same each time, as graphs: the driver is told of all their launches
//! once, and queues them by one call from then on.
//!
//! They are captured and made before the first step, when no device waits for another rank: making one
//! may wait for all that the device does. Nothing but kernels is in a graph: they, their
//! parameters and the addresses of their operands never change, what changes is in memory (NVIDIA's library
//! may clear memory of its own beside).

use super::device::{Called, Device, Stream};
use cudarc::driver::{DriverError, result, sys};
use shardc_ir::diag::Result;
use std::collections::HashMap;
use std::sync::Arc;

/// The most launches that a rank keeps in graphs. The driver needs memory of the device for each, of
/// which plans do not know.
const MOST: usize = 4096;

/// Launches that were captured.
struct Graph {
    device: Arc<Device>,
    graph: sys::CUgraphExec,
}

// SAFETY: graphs may be launched from any thread, and are a rank's own.
unsafe impl Send for Graph {}

impl Graph {
    /// What was queued on a stream since it began to capture; `None` if there is no room for it.
    fn captured(stream: &Stream) -> Result<Option<Graph>> {
        // SAFETY: the stream captures, for this thread; what was captured is used here only.
        let made = unsafe {
            let captured =
                result::stream::end_capture(stream.stream).called("cuStreamEndCapture")?;
            let plain = sys::CUgraphInstantiate_flags(0);
            let made = result::graph::instantiate(captured, plain);
            let _ = result::graph::destroy(captured);
            made
        };
        if let Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) = made {
            return Ok(None);
        }
        let graph = made.called("cuGraphInstantiate")?;
        Ok(Some(Graph { device: stream.device.clone(), graph }))
    }

    /// # Safety
    /// What its launches use is valid until they are done.
    unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both live; the rest is by the caller.
        unsafe { result::graph::launch(self.graph, stream.stream) }.called("cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: made by `captured`; the driver keeps it until it is done.
        let _ = unsafe { result::graph::exec_destroy(self.graph) };
    }
}

/// The runs of a rank, by their numbers.
pub(super) struct Graphs {
    stream: Arc<Stream>,
    kept: HashMap<usize, Graph>,
    /// Launches in graphs.
    launches: usize,
}

impl Graphs {
    pub fn new(stream: &Arc<Stream>) -> Graphs {
        Graphs { stream: stream.clone(), kept: HashMap::new(), launches: 0 }
    }

    /// Queues a run by its graph; false if it has none.
    ///
    /// # Safety
    /// What the run's launches use is valid until they are done again.
    pub unsafe fn replay(&mut self, run: usize) -> Result<bool> {
        let Some(graph) = self.kept.get(&run) else { return Ok(false) };
        self.stream.device.bind()?;
        // SAFETY: by the caller.
        unsafe { graph.launch(&self.stream)? };
        Ok(true)
    }

    /// Begins to capture a run of so many launches; false if that would be too many.
    pub fn begin(&mut self, launches: usize) -> Result<bool> {
        if self.launches + launches > MOST {
            return Ok(false);
        }
        self.stream.device.bind()?;
        // Other ranks' threads may allocate and wait meanwhile.
        let own = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        unsafe { result::stream::begin_capture(self.stream.stream, own) }
            .called("cuStreamBeginCapture")?;
        Ok(true)
    }

    /// Ends to capture a run of so many launches, which were `queued`; its graph is made, if there is
    /// room for it.
    pub fn keep(&mut self, run: usize, launches: usize, queued: Result<()>) -> Result<()> {
        let graph = Graph::captured(&self.stream);
        queued?;
        match graph? {
            Some(graph) => {
                self.kept.insert(run, graph);
                self.launches += launches;
            }
            // No more are made then.
            None => self.launches = MOST,
        }
        Ok(())
    }

    /// Forgets all runs and their graphs.
    pub fn forget(&mut self) {
        self.kept.clear();
        self.launches = 0;
    }
}
