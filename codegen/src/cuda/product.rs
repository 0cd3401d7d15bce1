//! `gemm.cu` and `grouped.cu`: which elements are adjacent, and the tiles of a block.

use super::limits::{DECLARED, Limits};
use super::{File, Words, row, row_bytes, then, whole};
use shardc_ir::kernel::{Extents, Gemm, Grouped, Matrix, Product, Then, View};
use shardc_ir::launch::DeviceLaunch;
use shardc_ir::types::DType;

/// An operand of a product, as the k of its rows or columns sees it.
struct Side {
    elem: DType,
    /// Elements along k are adjacent, else those along the other dim.
    along_k: bool,
    /// Rows of adjacent elements are of whole 16 bytes and begin at multiples of them.
    aligned: bool,
}

/// How a block of threads cuts the work.
struct Tiles {
    a: Side,
    b: Side,
    out: DType,
    /// Adjacent elements of a row of the result that are taken at once.
    width: usize,
    accumulate: bool,
    /// A block has a multiprocessor to itself, and twice as many columns.
    alone: bool,
    /// Bytes of shared memory of a multiprocessor.
    room: u32,
}

/// Elements of a result that are written at once, where they lie so.
const WIDTH: usize = 8;

impl Tiles {
    /// Floats of 16 bits of one kind are multiplied as they are; all else is made f32.
    fn elem(&self) -> DType {
        let same = self.a.elem == self.b.elem && self.a.elem.is_half();
        if same { self.a.elem } else { DType::F32 }
    }
    /// Sizes of m, n and k, and warps along m and n.
    fn sizes(&self) -> ([usize; 3], [usize; 2]) {
        match (self.elem().is_half(), self.alone) {
            // Rows along k of whole 64 elements, so that groups of warps can multiply.
            (true, true) => ([128, 256, 64], [2, 4]),
            (true, false) => ([128, 128, 64], [2, 4]),
            (false, _) => ([64, 64, 16], [2, 2]),
        }
    }
    /// Blocks that share a multiprocessor: as many as leave a thread 128 registers, or one.
    fn blocks(&self) -> u32 {
        if self.alone { 1 } else { 512 / self.threads() }
    }
    /// Tiles of each operand in shared memory: one in use, the others on their way, or also in use if a block
    /// is alone.
    fn stages(&self) -> usize {
        let wanted = if self.alone { 4 } else { 3 };
        if !self.elem().is_half() {
            return wanted;
        }
        let fits = |n: &usize| (self.stage() * n) as u32 + DECLARED <= self.room / self.blocks();
        (2..=wanted).rev().find(fits).unwrap_or(2)
    }
    /// Bytes of a tile of each operand.
    fn stage(&self) -> usize {
        let ([m, n, k], _) = self.sizes();
        let bytes = |side: &Side, n: usize| {
            let (rows, cols) = if side.along_k { (n, k) } else { (k, n) };
            rows * row_bytes(self.elem(), cols)
        };
        bytes(&self.a, m) + bytes(&self.b, n)
    }
    fn threads(&self) -> u32 {
        let (_, [m, n]) = self.sizes();
        32 * (m * n) as u32
    }
    /// Bytes of all tiles, where the result passes through afterwards.
    fn shared(&self) -> u32 {
        let ([m, n, _], _) = self.sizes();
        (self.stages() * self.stage()).max(m * (n + 8) * 4) as u32
    }
    fn file(&self, name: &'static str, text: &'static str) -> File {
        let tile = self.elem();
        let ([m, n, k], [warps_m, warps_n]) = self.sizes();
        let aligned = |s: &Side| s.aligned && s.elem == tile;
        File::new(name, text)
            .define("A", self.a.elem.facts().cuda)
            .define("B", self.b.elem.facts().cuda)
            .define("OUT", self.out.facts().cuda)
            .define("TILE", tile.facts().cuda)
            .define("A_ALONG_K", self.a.along_k)
            .define("B_ALONG_K", self.b.along_k)
            .define("A_ALIGNED", aligned(&self.a))
            .define("B_ALIGNED", aligned(&self.b))
            .define("WIDTH", self.width)
            .define("ACCUMULATE", self.accumulate)
            .define("TILE_M", m)
            .define("TILE_N", n)
            .define("TILE_K", k)
            .define("STAGES", self.stages())
            .define("WARPS_M", warps_m)
            .define("WARPS_N", warps_n)
            .define("BLOCKS", self.blocks())
    }
}

/// A matrix of `rows` by `cols`, its columns (or else its rows) along k.
fn side(x: &Matrix, [rows, cols]: [usize; 2], k_is_col: bool) -> Side {
    // A dim of one element has any stride.
    let by_col = x.col_stride == 1 && (cols > 1 || x.row_stride != 1);
    let (outer, adjacent) = if by_col { (x.row_stride, cols) } else { (x.col_stride, rows) };
    let contiguous = by_col || x.row_stride == 1;
    Side {
        elem: x.elem,
        along_k: by_col == k_is_col,
        aligned: contiguous && whole(16 / x.elem.bytes(), adjacent, &x.view, &[outer]),
    }
}

pub(super) fn gemm(k: &Gemm, limits: &Limits) -> Vec<DeviceLaunch> {
    launch(k, None, limits)
}

pub(super) fn then(k: &Then, limits: &Limits) -> Vec<DeviceLaunch> {
    launch(&k.product, Some(k), limits)
}

fn launch(k: &Gemm, epilogue: Option<&Then>, limits: &Limits) -> Vec<DeviceLaunch> {
    let text = include_str!("../../cuda/gemm.cu");
    let wide = match epilogue {
        Some(then) => then::wide(then, WIDTH),
        None => k.out.col_stride == 1 && whole(WIDTH, k.n, &k.out.view, &[k.out.row_stride]),
    };
    // An epilogue takes the result: the text is the same wherever it would lie.
    let out = if epilogue.is_some() { DType::F32 } else { k.out.elem };
    let (a, b) = (side(&k.a, [k.m, k.k], true), side(&k.b, [k.k, k.n], false));
    let width = if wide { WIDTH } else { 1 };
    let room = limits.multiprocessor;
    let mut t = Tiles { a, b, out, width, accumulate: k.accumulate, alone: false, room };
    let batch: usize = k.batch.iter().product();
    let tiles = |t: &Tiles| {
        let ([tile_m, tile_n, _], _) = t.sizes();
        [k.m.div_ceil(tile_m), k.n.div_ceil(tile_n), batch]
    };
    if limits.groups && t.elem().is_half() {
        t.alone = true;
        let busy = tiles(&t).into_iter().fold(1, usize::saturating_mul) >= limits.multiprocessors;
        let times = if k.accumulate { 2 } else { 1 };
        let moved = epilogue.map_or(times * k.out.elem.bytes(), then::bytes);
        // Columns that are not there are multiplied, too.
        let padded = 20 * k.n.next_multiple_of(256) > 21 * k.n.next_multiple_of(128);
        let depth = k.sum.iter().fold(k.k, |all, n| all.saturating_mul(*n));
        t.alone = busy && !padded && depth >= limits.depth * moved;
    }
    let grid = row(tiles(&t));
    if grid.contains(&0) {
        return vec![];
    }
    let (batches, sums) = (k.batch.len().max(1), k.sum.len().max(1));
    let mut file = t.file("gemm.cu", text).define("BATCHES", batches).define("SUMS", sums);
    if let Some(k) = epilogue {
        file = file.define("THEN", "").text(&then::print(k));
    }
    let source = file.source();
    let matrices = [&k.a, &k.b, &k.out];
    let mut w = Words::default();
    matrices.iter().for_each(|x| w.view(&x.view, x.elem));
    w.ints(&[k.m, k.n, k.k]);
    matrices.iter().for_each(|x| w.ints(&[x.row_stride, x.col_stride]));
    // Loops, or one of one step.
    let loops = |w: &mut Words, own: &[usize], alone: usize| {
        w.ints(if own.is_empty() { std::slice::from_ref(&alone) } else { own });
    };
    let n = k.batch.len();
    loops(&mut w, &k.batch, 1);
    matrices.iter().for_each(|x| loops(&mut w, &x.view.strides[..n], 0));
    w.int(k.sum.iter().product());
    loops(&mut w, &k.sum, 1);
    [&k.a, &k.b].iter().for_each(|x| loops(&mut w, &x.view.strides[n..], 0));
    epilogue.iter().for_each(|k| then::words(k, &mut w));
    let (threads, shared) = (t.threads(), t.shared());
    vec![DeviceLaunch { source, entry: "gemm".into(), grid, threads, shared, words: w.0 }]
}

pub(super) fn grouped(k: &Grouped, limits: &Limits) -> Vec<DeviceLaunch> {
    let text = include_str!("../../cuda/grouped.cu");
    let rows = |v: &View, elem: DType, width: usize, along_k: bool| Side {
        elem,
        along_k,
        aligned: whole(16 / elem.bytes(), width, v, &[]),
    };
    // Rows of x and of y are along their widths, those of w along x's.
    let x = |along_k| rows(&k.x, k.x_elem, k.x_width, along_k);
    let y = |along_k| rows(&k.y, k.y_elem, k.y_width, along_k);
    let w = |along_k| rows(&k.w, k.w_elem, k.x_width, along_k);
    let sides = [(&k.x, k.x_elem), (&k.y, k.y_elem), (&k.w, k.w_elem)];
    // Which of x, y and w are a, b and the result; their sides; sizes of m, n and k.
    let (order, a, b, [m, n, depth]) = match k.product {
        Product::Rows => ([0, 2, 1], x(true), w(true), [k.rows, k.y_width, k.x_width]),
        Product::RowsTransposed => ([1, 2, 0], y(true), w(false), [k.rows, k.x_width, k.y_width]),
        Product::Weights => ([1, 0, 2], y(false), x(false), [k.y_width, k.x_width, 0]),
    };
    let (out, out_elem) = sides[order[2]];
    let width = if whole(WIDTH, n, out, &[]) { WIDTH } else { 1 };
    let room = limits.multiprocessor;
    let t = Tiles { a, b, out: out_elem, width, accumulate: false, alone: false, room };
    let mut words = Words::default();
    order.iter().for_each(|&i| words.view(sides[i].0, sides[i].1));
    words.view(&k.counts, DType::I32);
    let padded = |v: &View| {
        let mut strides: Extents = v.strides.clone();
        strides.resize(3, 0);
        strides
    };
    order.iter().for_each(|&i| words.ints(&padded(sides[i].0)));
    words.ints(&k.counts.strides);
    words.ints(&[k.groups, k.experts, k.shards, k.rows, m, n, depth]);
    let ([tile_m, tile_n, _], _) = t.sizes();
    // Every expert's last tile may be short.
    let tiles = k.rows / tile_m + k.experts.min(k.rows);
    let (entry, sizes) = match k.product {
        Product::Weights => {
            ("grouped_weights", [m.div_ceil(tile_m), n.div_ceil(tile_n), k.groups * k.experts])
        }
        Product::Rows | Product::RowsTransposed => {
            ("grouped_rows", [tiles, n.div_ceil(tile_n), k.groups * k.shards])
        }
    };
    let (grid, source) = (row(sizes), t.file("grouped.cu", text).source());
    if grid.contains(&0) {
        return vec![];
    }
    let (threads, shared) = (t.threads(), t.shared());
    vec![DeviceLaunch { source, entry: entry.into(), grid, threads, shared, words: words.0 }]
}
