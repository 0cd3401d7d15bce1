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
use cut::{Shape, THREADS};
use shardc_ir::kernel::{HorizontalFusion, Rows};
use shardc_ir::launch::{DeviceLaunch, KernelSource, Word};
use std::collections::BTreeMap;
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

/// Bytes of parameters that every device takes.
const PARAMETERS: usize = 4096;

/// What runs for kernels over rows of one launch of a program: those without folds as one, or as few as
/// parameters let them be; a fold may need several by itself.
pub(super) fn several(k: &HorizontalFusion) -> Vec<DeviceLaunch> {
    let all = k.kernels.iter().zip(&k.operands).filter(|(k, _)| !k.outer.contains(&0));
    let (each, folds): (Vec<Member>, Vec<Member>) = all
        .map(|(k, operands)| Member { w: Writer::new(k), operands })
        .partition(|p| p.w.cut.shape == Shape::Each);
    // Without elements there is nothing to do.
    let each: Vec<Member> = each.into_iter().filter(|p| p.w.cut.packs > 0).collect();
    let mut out: Vec<DeviceLaunch> = folds.into_iter().flat_map(Member::alone).collect();
    let words = each.iter().map(|p| p.w.words().len()).max().unwrap_or(0);
    let most = (PARAMETERS / 8 / (words + 2)).max(1);
    let mut each = each.into_iter().peekable();
    while each.peek().is_some() {
        let mut some: Vec<Member> = each.by_ref().take(most).collect();
        match some.len() {
            1 => out.extend(some.remove(0).alone()),
            _several => out.push(together(some, words, most)),
        }
    }
    out
}

/// A kernel of several, and which operands of the launch are its own.
struct Member<'a> {
    w: Writer<'a>,
    operands: &'a [usize],
}

impl Member<'_> {
    fn words(&self) -> impl Iterator<Item = Word> {
        self.w.words().into_iter().map(|w| match w {
            Word::Address { operand, byte } => {
                Word::Address { operand: self.operands[operand], byte }
            }
            other => other,
        })
    }

    fn alone(self) -> Vec<DeviceLaunch> {
        let mut made = launches(self.w.k);
        made.iter_mut().for_each(|l| l.words = self.words().collect());
        made
    }
}

/// One launch of kernels without folds: a block finds its kernel in a table of `most` parts, whose
/// parameters are so many words. The text is the same for any number of them, and any order.
fn together(mut parts: Vec<Member>, words: usize, most: usize) -> DeviceLaunch {
    let mut texts: BTreeMap<String, String> = BTreeMap::new();
    let mut blocks = vec![];
    for p in &mut parts {
        p.w.part = true;
        blocks.push(p.w.entries()[0].grid[0]);
        texts.insert(p.w.name.clone(), p.w.params() + &p.w.out);
    }
    let names: Vec<&String> = texts.keys().collect();
    let call = |(i, name): (usize, &&String)| {
        format!("        case {i}: return {name}((const Of_{name}&)part.words, block);\n")
    };
    let calls: String = names.iter().enumerate().map(call).collect();
    let named = format!("{names:?} {words} {most}");
    let name = format!("several_{}", &blake3::hash(named.as_bytes()).to_hex()[..16]);
    let functions: String = texts.values().map(|t| format!("\n{t}")).collect();
    let text = format!(
        "#include \"rows.cuh\"\n\nnamespace of_{name} {{{functions}\n\
         struct Member {{\n    i64 end, kernel;\n    u64 words[{words}];\n}};\n\
         struct Params {{\n    Member parts[{most}];\n}};\n\n\
         DEVICE void run(const Member& part, const u32 block) {{\n    switch (part.kernel) {{\n{calls}    }}\n}}\n}}\n\n\
         KERNEL void __launch_bounds__({THREADS}) {name}(CONSTANT of_{name}::Params p) {{\n    \
         u32 i = 0, first = 0;\n    \
         for (; blockIdx.x >= p.parts[i].end; i++) first = (u32)p.parts[i].end;\n    \
         of_{name}::run(p.parts[i], blockIdx.x - first);\n}}\n"
    );
    let mut table: Vec<Word> = vec![];
    let (mut end, int) = (0, |n: usize| Word::Int(n as i64));
    for (i, (p, n)) in parts.iter().zip(blocks).enumerate() {
        end += n;
        let kernel = names.iter().position(|x| **x == p.w.name).expect("printed above");
        table.extend([int(end), int(kernel)].into_iter().chain(p.words()));
        table.resize((i + 1) * (words + 2), int(0));
    }
    table.resize(most * (words + 2), int(0));
    let (source, threads) = (Arc::new(KernelSource { file: FILE, text }), THREADS as u32);
    DeviceLaunch {
        source,
        entry: name.into(),
        grid: grid([end, 1, 1]),
        threads,
        shared: 0,
        words: table,
    }
}

/// What runs for a kernel over rows, in order.
pub(super) fn launches(k: &Rows) -> Vec<DeviceLaunch> {
    if k.outer.contains(&0) {
        return vec![];
    }
    let mut w = Writer::new(k);
    let entries = w.entries();
    let text = format!("#include \"rows.cuh\"\n\n{}{}", w.params(), w.out);
    let source = Arc::new(KernelSource { file: FILE, text });
    let launch = |e: Entry| DeviceLaunch {
        source: source.clone(),
        entry: e.name.into(),
        grid: grid(e.grid),
        threads: e.threads as u32,
        shared: 0,
        words: w.words(),
    };
    // Rows without elements have nothing to do, unless they are folded.
    entries.into_iter().filter(|e| !e.grid.contains(&0)).map(launch).collect()
}
