//! Products of rows with the weights of their experts. Which rows these are is known when it runs;
//! rows of no expert cost nothing. An expert's rows lie together in the buffer of a shard, but
//! apart from those in other shards' buffers: small lots of them are gathered for one product,
//! since many small ones would read the weight each.

use crate::product::{Mat, multiply};
use shardc_ir::kernel::{Grouped, Product, View};
use smallvec::SmallVec;

/// Rows of one expert in the buffer of one shard.
#[derive(Clone, Copy)]
struct Lot {
    shard: usize,
    first: usize,
    rows: usize,
}

struct Call<'a> {
    k: &'a Grouped,
    memory: &'a [*mut f32],
    threads: usize,
}

/// Runs a grouped product.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; result and workspace overlap nothing else.
pub(crate) unsafe fn run(k: &Grouped, memory: &[*mut f32], threads: usize) {
    let c = Call { k, memory, threads };
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

impl Call<'_> {
    fn at(&self, v: &View, index: &[usize]) -> *mut f32 {
        self.memory[v.operand].wrapping_add(v.at(index))
    }
    fn rows(&self, v: &View, group: usize, lot: Lot) -> Mat {
        Mat::rows(self.at(v, &[group, lot.shard, lot.first]), v.strides[2])
    }

    /// All products of an expert, whose rows begin at `next`.
    ///
    /// # Safety
    /// As for [`run`]; group and expert are the kernel's, and `next` is at most its rows.
    unsafe fn expert(&self, group: usize, expert: usize, next: &mut [usize]) {
        let k = self.k;
        let w = Mat::rows(self.at(&k.w, &[group * k.experts + expert]), k.w.strides[1]);
        let mut lots: SmallVec<[Lot; 16]> = SmallVec::new();
        let (mut held, mut summed) = (0, false);
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
                if !lots.is_empty() && held + rows > k.gathered {
                    self.lots(group, w, &lots, summed);
                    lots.clear();
                    (held, summed) = (0, true);
                }
                lots.push(Lot { shard, first: *first, rows });
                held += rows;
                *first += rows;
            }
            self.lots(group, w, &lots, summed);
        }
    }

    /// One product of the rows of these lots; without any, the result of a sum of nothing.
    ///
    /// # Safety
    /// As for [`run`]; lots are inside the buffers, and several together are at most `gathered`.
    unsafe fn lots(&self, group: usize, w: Mat, lots: &[Lot], summed: bool) {
        let (k, scratch) = (self.k, self.at(&self.k.scratch, &[]));
        let x = Mat::rows(scratch, k.x_width);
        let y = Mat::rows(scratch.wrapping_add(k.gathered * k.x_width), k.y_width);
        let move_all = |v: &View, width: usize, there: Mat, back: bool| {
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
    unsafe fn product(&self, rows: usize, x: Mat, y: Mat, w: Mat, summed: bool) {
        let (i, o, threads) = (self.k.x_width, self.k.y_width, self.threads);
        // SAFETY: by the caller.
        unsafe {
            match self.k.product {
                Product::Rows => {
                    multiply([rows, o, i], x, w.transposed(), y, 1.0, false, threads);
                }
                Product::RowsTransposed => {
                    multiply([rows, i, o], y, w, x, 1.0, false, threads);
                }
                Product::Weights => {
                    multiply([o, i, rows], y.transposed(), x, w, 1.0, summed, threads);
                }
            }
        }
    }
}
