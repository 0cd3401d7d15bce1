//! How threads divide the work of a kernel over rows.

use shardc_ir::kernel::{Extents, Rows, Scalar, View};
use shardc_ir::launch::SCRATCH;
use shardc_ir::types::DType;

/// Threads of a block, unless a row takes more.
pub(super) const THREADS: usize = 256;
/// Registers of a thread for packs of elements: what is read at once, and what is written.
const REGISTERS: usize = 64;
/// Registers of a thread for elements that several walks over a row need.
const KEPT: usize = 32;
/// Fewer rows than this do not fill a device.
const FEW: usize = 128;
/// Blocks that fill a device several times.
const MANY: usize = 1024;

/// Who folds what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shape {
    /// Nothing is folded: a thread for every pack.
    Each,
    /// So many threads for a row: part of a warp, or a block.
    Team(usize),
    /// Rows are few and long: so many blocks for each, and a launch for each walk. What a block has
    /// folded waits in scratch memory.
    Parts(usize),
    /// Rows lie next to each other: threads of a warp have neighbours, those of a block every other
    /// element. So many blocks share the elements of a row.
    Columns { lanes: usize, parts: usize },
}

/// The work of a kernel over rows, cut.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    pub shape: Shape,
    /// Adjacent elements that a thread treats at once; of neighbouring rows, if these are columns.
    pub pack: usize,
    /// Packs of a row, or of neighbouring rows.
    pub packs: usize,
    /// Packs that a thread reads before it computes.
    pub at_once: usize,
    /// A thread has all its packs at once, and keeps what later walks need.
    pub keep: bool,
    pub rows: usize,
}

/// Registers that so many elements take.
fn registers(n: usize, elem: DType) -> usize {
    (n * elem.bytes()).div_ceil(4)
}

/// The most adjacent elements along a loop, up to 16 bytes of the smallest, that all views move whole
/// where their loops let them, and that registers hold.
fn pack(k: &Rows, along: usize) -> usize {
    let sizes: Extents = k.outer.iter().chain(&k.inner).copied().collect();
    let walked = |v: &View| v.strides.get(along).is_some_and(|&s| s == 1);
    let loads = k.loads.iter().map(|l| (&l.view, l.elem));
    let stores = k.stores.iter().map(|s| (&s.view, s.elem));
    let all: Vec<(&View, DType)> = loads.chain(stores).filter(|x| walked(x.0)).collect();
    let fits = |n: usize| {
        let starts = |v: &View| {
            let others = v.strides.iter().enumerate().filter(|&(l, _)| l != along && sizes[l] > 1);
            others.map(|x| *x.1).chain([v.offset]).all(|s| s % n == 0)
        };
        // Only the end of one row may be no whole pack: others would begin inside of one.
        let whole =
            sizes[along] % n == 0 || sizes.len() - k.outer.len() == 1 || along < k.outer.len();
        let taken: usize = all.iter().map(|(_, e)| registers(n, *e)).sum();
        sizes[along] >= n && whole && taken <= REGISTERS && all.iter().all(|(v, _)| starts(v))
    };
    let most = all.iter().map(|(_, e)| 16 / e.bytes()).max().unwrap_or(1);
    [8, 4, 2].into_iter().find(|&n| n <= most && fits(n)).unwrap_or(1)
}

impl Cut {
    pub fn new(k: &Rows) -> Cut {
        let rows: usize = k.outer.iter().product();
        if k.by_columns() {
            return Cut::columns(k);
        }
        let folds = k.body.iter().any(|s| matches!(s, Scalar::Fold(..)));
        let each = k.stores.iter().any(|s| k.stores_each(s));
        let of_rows = k.stores.iter().any(|s| !k.stores_each(s));
        let last = (k.outer.len() + k.inner.len()).wrapping_sub(1);
        let pack = if k.inner.is_empty() { 1 } else { pack(k, last) };
        let (n, rest) = k.inner.split_last().map_or((1, 1), |(n, r)| (*n, r.iter().product()));
        let packs = if each || folds { n.div_ceil(pack) * rest } else { 1 };
        let one = Cut { shape: Shape::Each, pack, packs, at_once: 1, keep: true, rows };
        // A result of the row may lie on what all its elements read.
        let together = folds || each && of_rows;
        if !together {
            return one;
        }
        let elements = k.by_element();
        let read = |(i, s): (usize, &Scalar)| match s {
            Scalar::Load(l) if elements[i] => registers(pack, k.loads[*l].elem),
            _ => 0,
        };
        let read: usize = k.body.iter().enumerate().map(read).sum::<usize>().max(1);
        // A warp for a short row, if there are enough of them, else a block.
        let fit = |threads: usize| packs.div_ceil(threads) * read <= KEPT;
        let teams = [1, 2, 4, 8, 16, 32].into_iter().filter(|&t| t == 32 || packs <= t);
        let warp = teams.clone().find(|&t| packs <= t * if rows >= MANY { 4 } else { 1 });
        let block = [64, 128, 256, 512].into_iter().find(|&t| fit(t));
        if let Some(threads) = warp.filter(|&t| fit(t)).or(block) {
            let at_once = packs.div_ceil(threads).max(1);
            return Cut { shape: Shape::Team(threads), at_once, ..one };
        }
        let at_once = (KEPT / read).clamp(1, 4);
        let part = THREADS * at_once * 4;
        let parts = packs.div_ceil(part).min(MANY.div_ceil(rows.max(1)));
        let shape = if rows <= FEW && parts > 1 { Shape::Parts(parts) } else { Shape::Team(512) };
        Cut { shape, at_once, keep: false, ..one }
    }

    fn columns(k: &Rows) -> Cut {
        let along = k.outer.len() - 1;
        let (n, rest) = (k.outer[along], k.outer[..along].iter().product::<usize>());
        // All threads of a block leave their folds in its shared memory.
        let pack = pack(k, along).min((32 / folds(k)).max(1).next_power_of_two());
        let elements = k.inner.iter().product::<usize>();
        let packs = n.div_ceil(pack);
        let lanes = packs.next_power_of_two().min(32);
        let (blocks, folds) = (rest * packs.div_ceil(lanes), folds(k));
        // A thread has at least 16 elements of its rows.
        let most = elements.div_ceil(THREADS / lanes * 16);
        let room = SCRATCH / 4 / (rest * n * folds).max(1);
        let parts = (MANY / 2).div_ceil(blocks.max(1)).min(most).min(room).max(1);
        let shape = Shape::Columns { lanes, parts };
        Cut { shape, pack, packs, at_once: 4, keep: false, rows: rest }
    }
}

/// Folds of a row.
pub(super) fn folds(k: &Rows) -> usize {
    k.body.iter().filter(|s| matches!(s, Scalar::Fold(..))).count()
}
