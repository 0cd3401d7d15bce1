//! Copies and folds between the memory of ranks whose devices reach each other: launches on the stream
//! of the rank that asks, which waits for events of the others' streams.

use super::device::{Event, Stream};
use super::modules::{Modules, Own};
use crate::region::Region;
use crate::threads::Mover;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::Elem;
use shardc_ir::launch::{LOOPS, Launch, PARTS, Source, Word};
use shardc_ir::types::Reduction;
use std::ops::Range;
use std::sync::Arc;

const THREADS: usize = 256;

/// Moves what is on the device of a stream.
pub struct OnDevice {
    stream: Arc<Stream>,
    modules: Arc<Modules>,
    /// Of the two entry points, `copy_region` and `fold_regions`.
    source: Arc<Source>,
}

/// The fields of a region, as the source has them.
fn push(words: &mut Vec<Word>, r: &Region) -> Result<()> {
    let (first, elem, extents, strides) = r.parts();
    let Some(around) = LOOPS.checked_sub(extents.len()) else {
        return Err(Diag::new(
            "not-built",
            "a region of so many dims is not exchanged on a device",
        )
        .rule(format!("regions have up to {LOOPS} loops")));
    };
    let elem = match elem {
        Elem::F32 => 0,
        Elem::BF16 => 1,
        Elem::I32 => 2,
        Elem::F16 => 3,
    };
    words.extend([Word::Int(first as i64), Word::Int(elem)]);
    for (alone, own) in [(1, extents), (0, strides)] {
        words.extend(std::iter::repeat_n(Word::Int(alone), around));
        words.extend(own.iter().map(|&x| Word::Int(x as i64)));
    }
    Ok(())
}

impl OnDevice {
    /// `source` is the code generator's, and its code is among the modules.
    pub fn new(stream: &Arc<Stream>, modules: &Arc<Modules>, source: Arc<Source>) -> OnDevice {
        OnDevice { stream: stream.clone(), modules: modules.clone(), source }
    }

    /// # Safety
    /// The words name memory that is valid until the stream has done it.
    unsafe fn launch(&self, entry: &'static str, n: usize, words: Vec<Word>) -> Result<()> {
        if n == 0 {
            return Ok(());
        }
        let grid = [n.div_ceil(THREADS) as u32, 1, 1];
        let source = self.source.clone();
        let l =
            Launch { source, entry: entry.into(), grid, threads: THREADS as u32, shared: 0, words };
        // SAFETY: by the caller.
        unsafe { self.modules.launch(&self.stream, &l, &[], &Own::default()) }
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
        let mut words = vec![Word::Int(range.start as i64), Word::Int(range.len() as i64)];
        push(&mut words, from)?;
        push(&mut words, to)?;
        // SAFETY: by the caller.
        unsafe { self.launch("copy_region", range.len(), words) }
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
        let how = match how {
            Reduction::Sum => 0,
            Reduction::Max => 1,
            Reduction::Min => 2,
        };
        let (start, n, parts) = (range.start as i64, range.len() as i64, from.len() as i64);
        let mut words = [start, n, how, parts].map(Word::Int).to_vec();
        push(&mut words, to)?;
        from.iter().try_for_each(|r| push(&mut words, r))?;
        // Parts that are not there are parameters too.
        words.resize(4 + (1 + PARTS) * (2 + 2 * LOOPS), Word::Int(0));
        // SAFETY: by the caller.
        unsafe { self.launch("fold_regions", range.len(), words) }
    }
}
