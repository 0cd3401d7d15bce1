//! Products of rows with the weights of their experts. Which rows these are is known when it runs;
//! rows of no expert cost nothing. An expert's rows lie together in the buffer of a shard, but
//! apart from those in other shards' buffers: small lots of them are gathered for one product,
//! since many small ones would read the weight each. Rows that are not f32 are gathered from all
//! shards in any case: blocks of an expert's rows, as they are, are multiplied and summed in f32.

use crate::map::{element, scatter};
use crate::product::{Stored, blocks, keep, multiply, tiles};
use shardc_ir::kernel::{Grouped, Product, View};
use shardc_ir::ops::grouped_dot::BLOCK;
use shardc_ir::types::DType;
use smallvec::SmallVec;
use std::ops::Range;

/// Rows of one expert in the buffer of one shard.
#[derive(Clone, Copy)]
struct Lot {
    shard: usize,
    first: usize,
    rows: usize,
}

/// Rows `[group, shard, row]`, and their elements.
type Buffer<'a> = (&'a View, DType);

/// The rows of one expert.
struct Rows<'a> {
    group: usize,
    lots: &'a [Lot],
}

struct GroupedCall<'a> {
    k: &'a Grouped,
    memory: &'a [*mut f32],
    threads: usize,
}

/// Runs a grouped product.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; result and workspace overlap nothing else.
pub(crate) unsafe fn run(k: &Grouped, memory: &[*mut f32], threads: usize) {
    let c = GroupedCall { k, memory, threads };
    // The row of each shard's buffer at which the next expert begins.
    let mut next = vec![0; k.shards];
    for group in 0..k.groups {
        next.fill(0);
        for expert in 0..k.experts {
            // SAFETY: by the caller; lots are of rows below the kernel's.
            unsafe { c.expert(group, expert, &mut next) };
        }
    }
}

impl GroupedCall<'_> {
    fn at(&self, v: &View, index: &[usize]) -> *mut f32 {
        self.memory[v.operand].wrapping_add(v.at(index))
    }
    fn rows(&self, v: &View, group: usize, lot: Lot) -> Stored {
        Stored::rows(self.at(v, &[group, lot.shard, lot.first]), v.strides[2])
    }

    /// All products of an expert, whose rows begin at `next`.
    ///
    /// # Safety
    /// As for [`run`]; group and expert are the kernel's, and `next` is at most its rows.
    unsafe fn expert(&self, group: usize, expert: usize, next: &mut [usize]) {
        let k = self.k;
        let first = k.w.at(&[group * k.experts + expert]);
        let w = Stored {
            at: element(self.memory[k.w.operand], k.w_elem, first),
            elem: k.w_elem,
            row_stride: k.w.strides[1],
            col_stride: 1,
        };
        let mut lots: SmallVec<[Lot; 16]> = SmallVec::new();
        let (mut held, mut summed) = (0, false);
        let by_blocks = k.by_blocks();
        // SAFETY: by the caller; a lot ends at the last row at most, and several hold no more rows
        // than can be gathered.
        unsafe {
            for (shard, first) in next.iter_mut().enumerate() {
                // What the count says, but no row beyond the buffer.
                let n = *self.at(&k.counts, &[group, expert, shard]).cast::<i32>();
                let rows = usize::try_from(n).unwrap_or(0).min(k.rows - *first);
                if rows == 0 {
                    continue;
                }
                if !by_blocks && !lots.is_empty() && held + rows > k.gathered {
                    self.lots(group, w, &lots, summed);
                    lots.clear();
                    (held, summed) = (0, true);
                }
                lots.push(Lot { shard, first: *first, rows });
                held += rows;
                *first += rows;
            }
            match by_blocks {
                true => self.by_blocks(&Rows { group, lots: &lots }, w),
                false => self.lots(group, w, &lots, summed),
            }
        }
    }

    /// The product of all rows of an expert, a block at a time.
    ///
    /// # Safety
    /// As for [`run`]; lots are inside the buffers, and `w` is the expert's.
    unsafe fn by_blocks(&self, rows: &Rows, w: Stored) {
        let (k, [size_x, size_y, _]) = (self.k, self.k.block());
        let x = self.at(&k.scratch, &[]);
        let (y, v) = (x.wrapping_add(size_x), x.wrapping_add(size_x + size_y));
        let n: usize = rows.lots.iter().map(|l| l.rows).sum();
        let (of_x, of_y) = ((&k.x, k.x_elem), (&k.y, k.y_elem));
        let product = |size, a, b, out| {
            // SAFETY: blocks have room for these sizes, and lie apart.
            unsafe { multiply(size, [a, b, out], 1.0, true, self.threads) }
        };
        // SAFETY: by the caller: rows of the expert, and blocks inside its weight; a block of the
        // workspace has at most the sizes that `block` counts.
        unsafe {
            match k.product {
                Product::Rows => {
                    for (r, o) in tiles([n, k.y_width], [BLOCK; 2]) {
                        let sum = zeros(y, [r.len(), o.len()]);
                        for i in blocks(k.x_width, BLOCK) {
                            let from = self.gather(rows, of_x, [&r, &i], x);
                            let weight = w.from(o.start, i.start).transposed();
                            product([r.len(), o.len(), i.len()], from, weight, sum);
                        }
                        self.spread(rows, of_y, [&r, &o], sum);
                    }
                }
                Product::RowsTransposed => {
                    for (r, i) in tiles([n, k.x_width], [BLOCK; 2]) {
                        let sum = zeros(x, [r.len(), i.len()]);
                        for o in blocks(k.y_width, BLOCK) {
                            let from = self.gather(rows, of_y, [&r, &o], y);
                            let weight = w.from(o.start, i.start);
                            product([r.len(), i.len(), o.len()], from, weight, sum);
                        }
                        self.spread(rows, of_x, [&r, &i], sum);
                    }
                }
                Product::Weights => {
                    for (o, i) in tiles([k.y_width, k.x_width], [BLOCK; 2]) {
                        let sum = zeros(v, [o.len(), i.len()]);
                        for r in blocks(n, BLOCK) {
                            let left = self.gather(rows, of_y, [&r, &o], y);
                            let right = self.gather(rows, of_x, [&r, &i], x);
                            product([o.len(), i.len(), r.len()], left.transposed(), right, sum);
                        }
                        keep(
                            Stored::rows(sum.at, sum.row_stride),
                            w.from(o.start, i.start),
                            [o.len(), i.len()],
                        );
                    }
                }
            }
        }
    }

    /// Calls `f(i, address)` for rows of an expert, from the first of some columns on.
    fn each(
        &self,
        rows: &Rows,
        (v, elem): Buffer,
        [range, cols]: [&Range<usize>; 2],
        mut f: impl FnMut(usize, *mut f32),
    ) {
        let mut before = 0;
        for lot in rows.lots {
            for r in range.start.max(before)..range.end.min(before + lot.rows) {
                let at = v.at(&[rows.group, lot.shard, lot.first + r - before]) + cols.start;
                f(r - range.start, element(self.memory[v.operand], elem, at));
            }
            before += lot.rows;
        }
    }

    /// A block of an expert's rows, one behind the other in `room`.
    ///
    /// # Safety
    /// Rows and columns are valid, and `room` for as many elements.
    unsafe fn gather(
        &self,
        rows: &Rows,
        from: Buffer,
        part: [&Range<usize>; 2],
        room: *mut f32,
    ) -> Stored {
        let (width, elem) = (part[1].len(), from.1);
        self.each(rows, from, part, |i, at| {
            let to = element(room, elem, i * width).cast::<u8>();
            // SAFETY: by the caller.
            unsafe { std::ptr::copy_nonoverlapping(at.cast(), to, width * elem.bytes()) };
        });
        Stored { elem, ..Stored::rows(room, width) }
    }

    /// Rounds a block to an expert's rows.
    ///
    /// # Safety
    /// Rows and columns are valid, and the block has as many.
    unsafe fn spread(&self, rows: &Rows, to: Buffer, part: [&Range<usize>; 2], block: Stored) {
        let width = part[1].len();
        self.each(rows, to, part, |i, at| {
            // SAFETY: by the caller.
            unsafe { scatter(block.at.add(i * width).cast_const(), at, 1, width, to.1) };
        });
    }

    /// One product of the rows of these lots; without any, the result of a sum of nothing.
    ///
    /// # Safety
    /// As for [`run`]; lots are inside the buffers, and several together are at most `gathered`.
    unsafe fn lots(&self, group: usize, w: Stored, lots: &[Lot], summed: bool) {
        let (k, scratch) = (self.k, self.at(&self.k.scratch, &[]));
        let x = Stored::rows(scratch, k.x_width);
        let y = Stored::rows(scratch.wrapping_add(k.gathered * k.x_width), k.y_width);
        let move_all = |v: &View, width: usize, there: Stored, back: bool| {
            let mut done = 0;
            for &lot in lots {
                let here = self.rows(v, group, lot);
                for i in 0..lot.rows {
                    let a = here.at.wrapping_add(i * here.row_stride);
                    let b = there.at.wrapping_add((done + i) * there.row_stride);
                    let (from, to) = if back { (b, a) } else { (a, b) };
                    // SAFETY: by the caller: a row of the buffer, and one of the workspace.
                    unsafe { std::ptr::copy_nonoverlapping(from, to, width) };
                }
                done += lot.rows;
            }
        };
        let rows = lots.iter().map(|l| l.rows).sum();
        // SAFETY: by the caller.
        unsafe {
            match lots {
                [] if k.product == Product::Weights && !summed => {
                    for row in 0..k.y_width {
                        w.at.add(row * w.row_stride).write_bytes(0, k.x_width);
                    }
                }
                [] => {}
                &[lot] => {
                    let (x, y) = (self.rows(&k.x, group, lot), self.rows(&k.y, group, lot));
                    self.product(rows, x, y, w, summed);
                }
                _several => {
                    if k.product != Product::RowsTransposed {
                        move_all(&k.x, k.x_width, x, false);
                    }
                    if k.product != Product::Rows {
                        move_all(&k.y, k.y_width, y, false);
                    }
                    self.product(rows, x, y, w, summed);
                    match k.product {
                        Product::Rows => move_all(&k.y, k.y_width, y, true),
                        Product::RowsTransposed => move_all(&k.x, k.x_width, x, true),
                        Product::Weights => {}
                    }
                }
            }
        }
    }

    /// # Safety
    /// `x` and `y` have so many rows, `w` is the weight of an expert, and the result is apart.
    unsafe fn product(&self, rows: usize, x: Stored, y: Stored, w: Stored, summed: bool) {
        let (i, o, threads) = (self.k.x_width, self.k.y_width, self.threads);
        // SAFETY: by the caller.
        unsafe {
            match self.k.product {
                Product::Rows => {
                    multiply([rows, o, i], [x, w.transposed(), y], 1.0, false, threads);
                }
                Product::RowsTransposed => {
                    multiply([rows, i, o], [y, w, x], 1.0, false, threads);
                }
                Product::Weights => {
                    multiply([o, i, rows], [y.transposed(), x, w], 1.0, summed, threads);
                }
            }
        }
    }
}

/// A block of zeros.
///
/// # Safety
/// There is room for so many rows and columns.
unsafe fn zeros(room: *mut f32, [rows, cols]: [usize; 2]) -> Stored {
    // SAFETY: by the caller.
    unsafe { room.write_bytes(0, rows * cols) };
    Stored::rows(room, cols)
}
