//! `copy.cu`, `take.cu`, `index_add.cu`, `rope.cu`, `draw.cu`: one thread for an element; `scan.cu`: one for a row.

use super::{File, Words, pack, row, starts};
use shardc_ir::kernel::{Block, Copy, Draw, Extents, Pick, Rope, Scan, View};
use shardc_ir::launch::{DeviceLaunch, KernelSource};
use shardc_ir::ops::rope::Pairs;
use shardc_ir::rng::Distribution;
use shardc_ir::types::DType;
use std::sync::Arc;

const THREADS: usize = 256;

/// Loops with the strides of several views.
#[derive(Clone, Default)]
struct MoveLoops {
    extents: Extents,
    walks: Vec<Extents>,
}

impl MoveLoops {
    fn new(extents: &[usize], views: &[&View]) -> MoveLoops {
        MoveLoops {
            extents: extents.into(),
            walks: views.iter().map(|v| v.strides.clone()).collect(),
        }
    }

    fn count(&self) -> usize {
        self.extents.iter().product()
    }

    /// Those of the loops for which a condition on the strides holds, and the others.
    fn partition(&self, holds: impl Fn(&[usize]) -> bool) -> (MoveLoops, MoveLoops) {
        let none =
            MoveLoops { walks: vec![Extents::new(); self.walks.len()], ..MoveLoops::default() };
        let (mut yes, mut no) = (none.clone(), none);
        for (i, &n) in self.extents.iter().enumerate() {
            let strides: Extents = self.walks.iter().map(|w| w[i]).collect();
            let to = if holds(&strides) { &mut yes } else { &mut no };
            to.extents.push(n);
            to.walks.iter_mut().zip(strides).for_each(|(w, s)| w.push(s));
        }
        (yes, no)
    }

    /// The count, the extents, the strides of every walk, as for loops of this rank: others of one
    /// step go around these.
    fn words(&self, w: &mut Words, rank: usize) {
        let around = rank - self.extents.len();
        let padded = |w: &mut Words, own: &[usize], by: usize| {
            (0..around).for_each(|_| w.int(by));
            w.ints(own);
        };
        w.int(self.count());
        padded(w, &self.extents, 1);
        self.walks.iter().for_each(|s| padded(w, s, 0));
    }

    /// The widest unit, in elements, that all views move whole: those with a stride of 1 along the
    /// last loop, with these offsets; `others` are further strides of theirs.
    fn unit(&self, elem: DType, moved: &[(usize, usize)], others: &[usize]) -> usize {
        let whole = |unit: usize| {
            let fits = |x: &usize| x % unit == 0;
            let last = self.extents.len().wrapping_sub(1);
            self.extents.last().is_some_and(fits)
                && others.iter().all(fits)
                && moved.iter().all(|&(walk, offset)| {
                    let strides = &self.walks[walk];
                    fits(&offset) && strides[last] == 1 && strides[..last].iter().all(fits)
                })
        };
        [16, 8, 4].iter().map(|b| b / elem.bytes()).find(|&u| u > 1 && whole(u)).unwrap_or(1)
    }

    /// The same loops over units, of which these walks move one at a time.
    fn in_units(mut self, unit: usize, moved: &[usize]) -> MoveLoops {
        if unit > 1 {
            let last = self.extents.len() - 1;
            self.extents[last] /= unit;
            for &walk in moved {
                self.walks[walk][..last].iter_mut().for_each(|s| *s /= unit);
            }
        }
        self
    }
}

/// The type with so many bytes.
fn unit_name(bytes: usize) -> &'static str {
    match bytes {
        2 => "u16",
        4 => "u32",
        8 => "Bytes8",
        _ => "Bytes16",
    }
}

/// The type that counts so many, and all threads of the last block.
pub(super) fn index_name(n: usize) -> &'static str {
    if u32::try_from(n.next_multiple_of(THREADS)).is_ok() { "u32" } else { "u64" }
}

fn one_each(source: Arc<KernelSource>, entry: &'static str, n: usize, w: Words) -> DeviceLaunch {
    let grid = row([n.div_ceil(THREADS), 1, 1]);
    DeviceLaunch {
        source,
        entry: entry.into(),
        grid,
        threads: THREADS as u32,
        shared: 0,
        words: w.0,
    }
}

fn copy_file(unit_bytes: usize, rank: usize, n: usize) -> Arc<KernelSource> {
    File::new("copy.cu", include_str!("../../cuda/copy.cu"))
        .define("UNIT", unit_name(unit_bytes))
        .define("RANK", rank)
        .define("INDEX", index_name(n))
        .source()
}

pub(super) fn clear(b: &Block) -> Option<DeviceLaunch> {
    let loops = MoveLoops::new(&b.extents, &[&b.view]);
    let unit = loops.unit(b.elem, &[(0, b.view.offset)], &[]);
    let loops = loops.in_units(unit, &[0]);
    let (n, rank) = (loops.count(), loops.extents.len().max(1));
    let mut w = Words::default();
    w.view(&b.view, b.elem);
    loops.words(&mut w, rank);
    (n > 0).then(|| one_each(copy_file(unit * b.elem.bytes(), rank, n), "clear_block", n, w))
}

pub(super) fn copy(k: &Copy) -> Vec<DeviceLaunch> {
    let loops = MoveLoops::new(&k.extents, &[&k.from, &k.to]);
    let unit = loops.unit(k.elem, &[(0, k.from.offset), (1, k.to.offset)], &[]);
    let loops = loops.in_units(unit, &[0, 1]);
    let (n, rank) = (loops.count(), loops.extents.len().max(1));
    let mut w = Words::default();
    [&k.from, &k.to].iter().for_each(|v| w.view(v, k.elem));
    loops.words(&mut w, rank);
    let copied = (n > 0).then(|| one_each(copy_file(unit * k.elem.bytes(), rank, n), "copy", n, w));
    k.clear.iter().filter_map(clear).chain(copied).collect()
}

/// The index that is none; if there is no such index, the first that is none anyway.
fn without(k: &Pick) -> usize {
    k.without.unwrap_or(k.first + k.len)
}

pub(super) fn take(k: &Pick) -> Vec<DeviceLaunch> {
    let loops = MoveLoops::new(&k.extents, &[&k.x, &k.index, &k.out]);
    // Elements with one index move together.
    let together = k.index.strides.last() == Some(&0);
    let moved = [(0, k.x.offset), (2, k.out.offset)];
    let unit = if together { loops.unit(k.elem, &moved, &[k.stride]) } else { 1 };
    let loops = loops.in_units(unit, &[0, 2]);
    let (n, rank) = (loops.count(), loops.extents.len().max(1));
    let file = File::new("take.cu", include_str!("../../cuda/take.cu"))
        .define("UNIT", unit_name(unit * k.elem.bytes()))
        .define("RANK", rank)
        .define("INDEX", index_name(n));
    let mut w = Words::default();
    [(&k.x, k.elem), (&k.index, DType::I32), (&k.out, k.elem)]
        .iter()
        .for_each(|(v, e)| w.view(v, *e));
    loops.words(&mut w, rank);
    w.ints(&[k.first, k.len, k.stride / unit, without(k)]);
    if n == 0 { vec![] } else { vec![one_each(file.source(), "take", n, w)] }
}

pub(super) fn index_add(k: &Pick, cleared: Option<&Block>) -> Vec<DeviceLaunch> {
    let all = MoveLoops::new(&k.extents, &[&k.x, &k.index, &k.out]);
    // By index and out: what is summed, what has indices of its own, what shares them.
    let (positions, rest) = all.partition(|s| s[2] == 0);
    let (columns, batches) = rest.partition(|s| s[1] == 0);
    let apart = positions.count() == 1;
    let parts = if apart {
        [all.clone(), MoveLoops::default(), MoveLoops::default()]
    } else {
        [columns, positions.clone(), batches.clone()]
    };
    let rank = parts.iter().map(|l| l.extents.len()).max().unwrap_or(0).max(1);
    let file = File::new("index_add.cu", include_str!("../../cuda/index_add.cu"))
        .define("ELEM", k.elem.facts().cuda)
        .define("ACCUMULATE", cleared.is_none())
        .define("RANK", rank)
        .define("INDEX", index_name(all.count()));
    let mut w = Words::default();
    [(&k.x, k.elem), (&k.index, DType::I32), (&k.out, DType::F32)]
        .iter()
        .for_each(|(v, e)| w.view(v, *e));
    w.ints(&[k.first, k.len, k.stride, without(k)]);
    let none = vec![Extents::new(); 3];
    for mut part in parts {
        if part.walks.is_empty() {
            part.walks = none.clone();
        }
        part.words(&mut w, rank);
    }
    let launch = match apart {
        true => one_each(file.source(), "put_apart", all.count(), w),
        false => DeviceLaunch {
            source: file.source(),
            entry: "index_add".into(),
            grid: row([positions.count(), batches.count(), 1]),
            threads: THREADS as u32,
            shared: 0,
            words: w.0,
        },
    };
    let added = (all.count() > 0).then_some(launch);
    cleared.and_then(clear).into_iter().chain(added).collect()
}

pub(super) fn draw(k: &Draw) -> Vec<DeviceLaunch> {
    let place = k.place.as_ref().map_or_else(|| vec![0; k.extents.len()], |v| v.strides.to_vec());
    let walks = vec![k.out.strides.clone(), place.into(), k.index.clone()];
    let loops = MoveLoops { extents: k.extents.clone(), walks };
    let (n, rank) = (loops.count(), loops.extents.len().max(1));
    let from = match k.from {
        Distribution::Uniform => 0usize,
        Distribution::Normal => 1,
        Distribution::Keep(_) => 2,
    };
    let file = File::new("draw.cu", include_str!("../../cuda/draw.cu"))
        .define("RANK", rank)
        .define("INDEX", index_name(n))
        .define("PLACES", k.place.is_some())
        .define("FROM", from);
    let mut w = Words::default();
    w.view(&k.run, DType::I32);
    w.view(k.place.as_ref().unwrap_or(&k.run), DType::I32);
    w.view(&k.out, DType::F32);
    loops.words(&mut w, rank);
    w.ints(&[k.first, k.stream as u32 as usize, (k.stream >> 32) as usize]);
    w.int(usize::try_from(k.from.threshold()).expect("33 bits"));
    w.float(if let Distribution::Keep(p) = k.from { 1.0 / p } else { 0.0 });
    if n == 0 { vec![] } else { vec![one_each(file.source(), "draw", n, w)] }
}

pub(super) fn scan(k: &Scan) -> Vec<DeviceLaunch> {
    let mut loops = MoveLoops::new(&k.extents, &[&k.x, &k.out]);
    let steps: Vec<usize> = loops.walks.iter_mut().filter_map(Extents::pop).collect();
    let (n, rank) = (loops.count(), loops.extents.len().max(1));
    let file = File::new("scan.cu", include_str!("../../cuda/scan.cu"))
        .define("ELEM", k.elem.facts().cuda)
        .define("RANK", rank)
        .define("INDEX", index_name(n))
        .define("REVERSE", k.reverse);
    let mut w = Words::default();
    [&k.x, &k.out].iter().for_each(|v| w.view(v, k.elem));
    loops.words(&mut w, rank);
    w.int(k.len);
    w.ints(&steps);
    if n * k.len == 0 { vec![] } else { vec![one_each(file.source(), "scan", n, w)] }
}

pub(super) fn rope(k: &Rope) -> Vec<DeviceLaunch> {
    let views = [&k.x, &k.cos, &k.sin, &k.out];
    let lengths = [k.turns, k.width].into_iter();
    let pack = pack(k.elem, lengths.chain(views.into_iter().flat_map(starts)));
    let extents = [k.extents[0], k.extents[1], k.extents[2], (k.width - k.turns) / pack];
    let loops = MoveLoops::new(&extents, &views.map(View::adjacent).each_ref());
    let n = loops.count();
    let file = File::new("rope.cu", include_str!("../../cuda/rope.cu"))
        .define("ELEM", k.elem.facts().cuda)
        .define("INDEX", index_name(n))
        .define("HALVES", k.pairs == Pairs::Halves)
        .define("PACK", pack);
    let mut w = Words::default();
    w.view(&k.x, k.elem);
    [&k.cos, &k.sin].iter().for_each(|v| w.view(v, DType::F32));
    w.view(&k.out, k.elem);
    loops.words(&mut w, 4);
    w.int(k.turns);
    if n == 0 { vec![] } else { vec![one_each(file.source(), "rope", n, w)] }
}
