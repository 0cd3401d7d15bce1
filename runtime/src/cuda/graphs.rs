//! Runs of launches that are the same each time, as graphs: the driver is told of all their launches
//! once, and queues them by one call from then on.
//!
//! The first time a run is queued launch by launch, which loads its code; the second time its launches
//! are captured, and their graph is launched. Nothing but kernels is in a graph: they, their
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
    /// `None` for runs that were queued once.
    known: HashMap<usize, Option<Graph>>,
    /// The run that is captured, and how many launches it has.
    open: Option<(usize, usize)>,
    /// Launches in graphs.
    kept: usize,
}

impl Graphs {
    pub fn new(stream: &Arc<Stream>) -> Graphs {
        Graphs { stream: stream.clone(), known: HashMap::new(), open: None, kept: 0 }
    }

    /// Begins a run of so many launches. True if its graph was launched: the run is over.
    ///
    /// # Safety
    /// What the run's launches have used before is valid until they are done again.
    pub unsafe fn replay(&mut self, run: usize, launches: usize) -> Result<bool> {
        self.stream.device.bind()?;
        match self.known.get(&run) {
            Some(Some(graph)) => {
                // SAFETY: by the caller.
                unsafe { graph.launch(&self.stream)? };
                return Ok(true);
            }
            Some(None) if self.kept + launches <= MOST => {
                // Other ranks' threads may allocate and wait meanwhile.
                let own = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
                // SAFETY: the stream lives.
                unsafe { result::stream::begin_capture(self.stream.stream, own) }
                    .called("cuStreamBeginCapture")?;
                self.open = Some((run, launches));
            }
            Some(None) => {}
            None => drop(self.known.insert(run, None)),
        }
        Ok(false)
    }

    /// Ends a run; what was captured is launched. False if there was no room for a graph, and nothing of
    /// the run is queued; no more are made then.
    pub fn keep(&mut self) -> Result<bool> {
        let Some((run, launches)) = self.open.take() else { return Ok(true) };
        let Some(graph) = Graph::captured(&self.stream)? else {
            self.kept = MOST;
            return Ok(false);
        };
        // SAFETY: who has queued the launches has promised it.
        unsafe { graph.launch(&self.stream)? };
        self.known.insert(run, Some(graph));
        self.kept += launches;
        Ok(true)
    }

    /// Forgets all runs and their graphs.
    pub fn forget(&mut self) {
        self.known.clear();
        self.kept = 0;
    }

    /// Leaves a run in whose midst something failed; nothing of it is done.
    pub fn abandon(&mut self) {
        if self.open.take().is_some() {
            // SAFETY: the stream captures, for this thread; nobody else has what it captured.
            let _ = unsafe {
                result::stream::end_capture(self.stream.stream)
                    .and_then(|captured| result::graph::destroy(captured))
            };
        }
    }
}
