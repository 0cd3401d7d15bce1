//! Copies and folds between the memory of ranks whose devices reach each other: launches on the stream
//! of the rank that asks, which waits for events of the others' streams.

use super::device::{Event, Stream};
use super::modules::{Entry, Modules, Own};
use crate::region::Region;
use crate::threads::Mover;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::launch::regions::{self, COPY, FOLD, LOOPS, PARTS};
use shardc_ir::launch::{DeviceLaunch, KernelSource, Word};
use shardc_ir::types::Reduction;
use std::ops::Range;
use std::sync::Arc;

/// Moves what is on the device of a stream.
pub struct OnDevice {
    stream: Arc<Stream>,
    /// They live as long as their entry points are used.
    _modules: Arc<Modules>,
    source: Arc<KernelSource>,
    copy: Entry,
    fold: Entry,
}

/// As its launches take it.
fn taken(r: &Region) -> Result<regions::Region> {
    let (first, elem, extents, strides) = r.parts();
    let taken = regions::Region::new(Word::Int(first as i64), elem, extents, strides);
    if !taken.fits() {
        return Err(Diag::new(
            "not-built",
            "a region of so many dims is not exchanged on a device",
        )
        .rule(format!("regions have up to {LOOPS} loops")));
    }
    Ok(taken)
}

impl OnDevice {
    /// `source` is the code generator's, and its code is among the modules.
    ///
    /// # Errors
    /// Those of [`Modules::ready`].
    pub fn new(
        stream: &Arc<Stream>,
        modules: &Arc<Modules>,
        source: Arc<KernelSource>,
    ) -> Result<OnDevice> {
        let (copy, fold) = (modules.entry(&source, COPY, 0)?, modules.entry(&source, FOLD, 0)?);
        Ok(OnDevice { stream: stream.clone(), _modules: modules.clone(), source, copy, fold })
    }

    /// # Safety
    /// They name memory that is valid until the stream has done it.
    unsafe fn launch(&self, entry: Entry, all: &[DeviceLaunch]) -> Result<()> {
        // SAFETY: by the caller.
        let one = |l| unsafe { entry.launch(&self.stream, l, &[], &Own::default()) };
        all.iter().try_for_each(one)
    }
}

impl Mover for OnDevice {
    const AT_ONCE: bool = false;
    type Mark = Event;

    fn mark(&mut self) -> Result<Event> {
        self.stream.mark()
    }

    fn after(&mut self, mark: &Event) -> Result<()> {
        self.stream.after(mark)
    }

    unsafe fn copy(&mut self, from: &Region, to: &Region, range: Range<usize>) -> Result<()> {
        let all = regions::copy(&self.source, &taken(from)?, &taken(to)?, range);
        // SAFETY: by the caller.
        unsafe { self.launch(self.copy, &all) }
    }

    unsafe fn fold(
        &mut self,
        how: Reduction,
        from: &[Region],
        to: &Region,
        range: Range<usize>,
    ) -> Result<()> {
        if from.len() > PARTS {
            return Err(Diag::new("not-built", format!("{} ranks of one device", from.len()))
                .rule(format!("groups of ranks that share a device have up to {PARTS}")));
        }
        let parts: Vec<_> = from.iter().map(taken).collect::<Result<_>>()?;
        let all = regions::fold(&self.source, how, &parts, &taken(to)?, range);
        // SAFETY: by the caller.
        unsafe { self.launch(self.fold, &all) }
    }
}
