//! Kernels over rows, printed as CUDA C++: one entry point, or one for each walk where rows are cut
//! into parts.
//!
//! What is folded has one order, that of threads, so results are the same in every run. A value that
//! several walks over a row need stays in registers where the row fits those of its threads. A
//! result is written by the thread that has read its element, after all have read what is one
//! number of the row: so it may lie on an operand that is walked alike.

mod columns;
mod cut;
mod row;
mod text;

use super::grid;
use shardc_ir::kernel::Rows;
use shardc_ir::launch::{Launch, Source, Word};
use std::sync::Arc;
use text::Writer;
pub(super) use text::line;

/// What messages call the printed texts.
pub(super) const FILE: &str = "rows.cu";

/// An entry point that was printed.
struct Entry {
    name: String,
    grid: [usize; 3],
    threads: usize,
}

/// What runs for a kernel over rows, in order.
pub(super) fn launches(k: &Rows) -> Vec<Launch> {
    if k.outer.contains(&0) {
        return vec![];
    }
    let mut w = Writer::new(k);
    let entries = w.entries();
    let text = w.params() + &w.out;
    let source = Arc::new(Source { file: FILE, text });
    let mut words: Vec<Word> =
        (0..w.operands()).map(|operand| Word::Address { operand, byte: 0 }).collect();
    words.extend(k.params.iter().map(|&p| Word::Float(f64::from(p))));
    words.extend(w.cut.scratch().then_some(Word::Scratch));
    let launch = |e: Entry| Launch {
        source: source.clone(),
        entry: e.name.into(),
        grid: grid(e.grid),
        threads: e.threads as u32,
        shared: 0,
        words: words.clone(),
    };
    // Rows without elements have nothing to do, unless they are folded.
    entries.into_iter().filter(|e| !e.grid.contains(&0)).map(launch).collect()
}
