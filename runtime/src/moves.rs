//! Kernels that move elements: copies, look-ups by index, rotary embedding; sums along rows; numbers at random. Threads share rows, or where
//! rows are added to each other, columns.

use crate::element::{Element, with_element};
use crate::map::{Odometer, element};
use crate::team;
use shardc_ir::kernel::{Block, Copy, Draw, Pick, Rope, Scan, View};
use shardc_ir::ops::rope::Pairs;
use shardc_ir::rng::Draws;
use std::ops::Range;

/// Elements of a task below which a thread more is not worth it.
pub(crate) const SHARE: usize = 1 << 14;

/// Calls `f` for every index of some loops, of `each` elements, on several threads if these are many.
///
/// # Safety
/// Calls for different indices may run at the same time.
pub(crate) unsafe fn each(threads: usize, extents: &[usize], each: usize, f: impl Fn(&[usize])) {
    let all: usize = extents.iter().product();
    let parts = threads.min(all.saturating_mul(each) / SHARE).min(all).max(1);
    let part = |i: usize| {
        let mut o = Odometer::over(extents, all * i / parts..all * (i + 1) / parts);
        while let Some(index) = o.index() {
            f(index);
            o.advance();
        }
    };
    // SAFETY: by the caller.
    unsafe { team::each(threads, parts, part) };
}

/// Calls `f(index of the outer loops, some of the innermost)`, on several threads if these are many.
///
/// # Safety
/// As for [`each`].
unsafe fn each_row(threads: usize, extents: &[usize], f: impl Fn(&[usize], Range<usize>)) {
    let (n, outer) = match extents.split_last() {
        Some((&n, outer)) => (n, outer),
        None => (1, &[][..]),
    };
    let rows: usize = outer.iter().product();
    // A few long rows are cut.
    let pieces = if rows < threads { threads.min(rows * n / SHARE).max(1) } else { 1 };
    let cut = [outer, &[pieces]].concat();
    let piece = |index: &[usize]| {
        let (index, i) = (&index[..outer.len()], index[outer.len()]);
        f(index, n * i / pieces..n * (i + 1) / pieces);
    };
    // SAFETY: by the caller.
    unsafe { each(threads, &cut, n / pieces, piece) };
}

fn inner(v: &View, extents: &[usize]) -> usize {
    extents.len().checked_sub(1).map_or(0, |l| v.strides[l])
}

/// Writes zeros to a block.
///
/// # Safety
/// The block is valid.
pub(crate) unsafe fn clear(b: &Block, memory: &[*mut f32], threads: usize) {
    let (stride, size) = (inner(&b.view, &b.extents), b.elem.bytes());
    let row = |index: &[usize], cols: Range<usize>| {
        let to = element(memory[b.view.operand], b.elem, b.view.at(index)).cast::<u8>();
        // SAFETY: by the caller.
        unsafe {
            if stride == 1 {
                to.add(cols.start * size).write_bytes(0, cols.len() * size);
            } else {
                cols.for_each(|i| to.add(i * stride * size).write_bytes(0, size));
            }
        }
    };
    // SAFETY: by the caller.
    unsafe { each_row(threads, &b.extents, row) };
}

/// Runs a copy.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, source and target do not overlap.
pub(crate) unsafe fn copy(k: &Copy, memory: &[*mut f32], threads: usize) {
    // SAFETY: by the caller. Elements are copied as bits: they may be integers.
    unsafe {
        k.clear.iter().for_each(|b| clear(b, memory, threads));
        with_element!(k.elem, T => copy_elements::<T>(k, memory, threads));
    }
}

/// # Safety
/// As for [`copy`]; the kernel's elements are `T`.
unsafe fn copy_elements<T: Element>(k: &Copy, memory: &[*mut f32], threads: usize) {
    let (a, b) = (inner(&k.from, &k.extents), inner(&k.to, &k.extents));
    let row = |index: &[usize], cols: Range<usize>| {
        let at = |v: &View| memory[v.operand].cast::<T>().wrapping_add(v.at(index));
        let (from, to) = (at(&k.from).cast_const(), at(&k.to));
        // SAFETY: by the caller.
        unsafe {
            match (a, b) {
                (1, 1) => {
                    let (from, to) = (from.add(cols.start), to.add(cols.start));
                    std::ptr::copy_nonoverlapping(from, to, cols.len());
                }
                _ => cols.for_each(|i| *to.add(i * b) = *from.add(i * a)),
            }
        }
    };
    // SAFETY: by the caller.
    unsafe { each_row(threads, &k.extents, row) };
}

/// The place that an index names, if it is one of this rank's.
fn picked(k: &Pick, index: i32) -> Option<usize> {
    let index = usize::try_from(index).ok().filter(|&i| k.without != Some(i))?;
    let i = index.checked_sub(k.first)?;
    (i < k.len).then_some(i * k.stride)
}

/// Runs a `take`.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the result overlaps no operand.
pub(crate) unsafe fn take(k: &Pick, memory: &[*mut f32], threads: usize) {
    // SAFETY: by the caller.
    unsafe {
        with_element!(k.elem, T => take_elements::<T>(k, memory, threads));
    }
}

/// # Safety
/// As for [`take`]; the kernel's elements are `T`.
unsafe fn take_elements<T: Element>(k: &Pick, memory: &[*mut f32], threads: usize) {
    let [sx, si, so] = [&k.x, &k.index, &k.out].map(|v| inner(v, &k.extents));
    let row = |index: &[usize], cols: Range<usize>| {
        let at = |v: &View| memory[v.operand].cast::<T>().wrapping_add(v.at(index));
        let (x, from, out) = (at(&k.x).cast_const(), indices(k, memory, index), at(&k.out));
        // SAFETY: by the caller; a picked place is below `len`.
        unsafe {
            if si == 0 && !cols.is_empty() {
                match picked(k, *from) {
                    Some(p) if sx == 1 && so == 1 => {
                        let (x, out) = (x.add(p + cols.start), out.add(cols.start));
                        std::ptr::copy_nonoverlapping(x, out, cols.len());
                    }
                    Some(p) => cols.for_each(|i| *out.add(i * so) = *x.add(p + i * sx)),
                    None => cols.for_each(|i| *out.add(i * so) = T::default()),
                }
            } else {
                for i in cols {
                    let place = picked(k, *from.add(i * si));
                    *out.add(i * so) = place.map_or(T::default(), |p| *x.add(p + i * sx));
                }
            }
        }
    };
    // SAFETY: by the caller.
    unsafe { each_row(threads, &k.extents, row) };
}

/// Runs an `index_add` into what its target holds.
///
/// # Safety
/// As for [`take`].
pub(crate) unsafe fn index_add(k: &Pick, memory: &[*mut f32], threads: usize) {
    let (n, outer) = match k.extents.split_last() {
        Some((&n, outer)) => (n, outer),
        None => (1, &[][..]),
    };
    // Rows may be added to each other, in their order: so a thread has some columns of all of them.
    let apart = inner(&k.index, &k.extents) == 0 && inner(&k.out, &k.extents) > 0;
    let rows: usize = outer.iter().product();
    let parts = if apart { threads.min(rows * n / SHARE).min(n).max(1) } else { 1 };
    let part = |i: usize| {
        let cols = n * i / parts..n * (i + 1) / parts;
        // SAFETY: by the caller.
        unsafe { with_element!(k.elem, T => put_from::<T>(k, memory, outer, cols)) }
    };
    // SAFETY: no column is in two parts, or all of them are in one.
    unsafe { team::each(threads, parts, part) };
}

/// # Safety
/// As for [`index_add`]; the elements of `x` are `T`.
unsafe fn put_from<T: Element>(k: &Pick, memory: &[*mut f32], outer: &[usize], cols: Range<usize>) {
    let [sx, si, so] = [&k.x, &k.index, &k.out].map(|v| inner(v, &k.extents));
    let mut o = Odometer::new(outer);
    while let Some(index) = o.index() {
        let x = memory[k.x.operand].cast::<T>().wrapping_add(k.x.at(index)).cast_const();
        let (from, out) =
            (indices(k, memory, index), memory[k.out.operand].wrapping_add(k.out.at(index)));
        // SAFETY: by the caller; a picked place is below `len`.
        unsafe {
            let add = |p: usize, i: usize| *out.add(p + i * so) += (*x.add(i * sx)).number();
            if si == 0 && !cols.is_empty() {
                if let Some(p) = picked(k, *from) {
                    cols.clone().for_each(|i| add(p, i));
                }
            } else {
                let places = cols.clone().map(|i| (picked(k, *from.add(i * si)), i));
                places.for_each(|(p, i)| p.into_iter().for_each(|p| add(p, i)));
            }
        }
        o.advance();
    }
}

/// Where the indices of a row begin.
fn indices(k: &Pick, memory: &[*mut f32], index: &[usize]) -> *const i32 {
    memory[k.index.operand].wrapping_add(k.index.at(index)).cast::<i32>().cast_const()
}

/// Draws numbers at random.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; the result is not an operand.
pub(crate) unsafe fn draw(k: &Draw, memory: &[*mut f32], threads: usize) {
    // SAFETY: by the caller, an i32 is there.
    let int = |v: &View, i: usize| unsafe { *memory[v.operand].cast::<u32>().add(v.offset + i) };
    let draws = Draws::new(k.from, k.stream, [0, 1, 2].map(|i| int(&k.run, i)));
    let far = |strides: &[usize], index: &[usize]| -> usize {
        strides.iter().zip(index).map(|(s, i)| s * i).sum()
    };
    let one = |index: &[usize]| {
        let place = k.place.as_ref().map_or(0, |v| int(v, far(&v.strides, index)));
        // Indices are of 32 bits.
        let x = draws.at(place, (k.first + far(&k.index, index)) as u32) as f32;
        // SAFETY: by the caller.
        unsafe { *memory[k.out.operand].add(k.out.at(index)) = x };
    };
    // SAFETY: by the caller: elements are apart. A draw costs some ten moves.
    unsafe { each(threads, &k.extents, 10, one) };
}

/// Sums along rows.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; the result is not an operand.
pub(crate) unsafe fn scan(k: &Scan, memory: &[*mut f32], threads: usize) {
    let row = |index: &[usize]| {
        // SAFETY: by the caller.
        unsafe { with_element!(k.elem, T => sums::<T>(k, memory, index)) }
    };
    // SAFETY: by the caller.
    unsafe { each(threads, &k.extents, k.len, row) };
}

/// # Safety
/// As for [`scan`]; the kernel's elements are `T`.
unsafe fn sums<T: Element>(k: &Scan, memory: &[*mut f32], index: &[usize]) {
    let walk = |v: &View| (memory[v.operand].cast::<T>(), v.at(index), v.strides[index.len()]);
    let ((x, first, step), (out, to, apart)) = (walk(&k.x), walk(&k.out));
    let mut sum = 0.0;
    for i in 0..k.len {
        let i = if k.reverse { k.len - 1 - i } else { i };
        // SAFETY: by the caller: so many elements are valid, and the result's are apart.
        unsafe {
            sum += (*x.add(first + i * step)).number();
            *out.add(to + i * apart) = T::nearest(sum);
        }
    }
}

/// Runs a rotary embedding.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; the result is not an operand.
pub(crate) unsafe fn rope(k: &Rope, memory: &[*mut f32], threads: usize) {
    let turn = |index: &[usize]| {
        // SAFETY: by the caller.
        unsafe { with_element!(k.elem, T => turn::<T>(k, memory, index)) }
    };
    // SAFETY: by the caller.
    unsafe { each(threads, &k.extents, k.width, turn) };
}

/// # Safety
/// As for [`rope`]; the kernel's elements are `T`.
unsafe fn turn<T: Element>(k: &Rope, memory: &[*mut f32], index: &[usize]) {
    let r = k.turns;
    // SAFETY: by the caller: rows of these widths are valid, and the result's is apart.
    unsafe {
        let table = |v: &View| {
            std::slice::from_raw_parts(memory[v.operand].add(v.at(index)).cast_const(), r)
        };
        let row = |v: &View| memory[v.operand].cast::<T>().add(v.at(index));
        let out = std::slice::from_raw_parts_mut(row(&k.out), k.width);
        let x = std::slice::from_raw_parts(row(&k.x).cast_const(), k.width);
        let (cos, sin) = (table(&k.cos), table(&k.sin));
        let (turned, rest) = out.split_at_mut(2 * r);
        match k.pairs {
            Pairs::Halves => {
                let (low, high) = turned.split_at_mut(r);
                let (a, b) = (&x[..r], &x[r..2 * r]);
                for j in 0..r {
                    let (a, b) = (a[j].number(), b[j].number());
                    low[j] = T::nearest(a * cos[j] - b * sin[j]);
                    high[j] = T::nearest(b * cos[j] + a * sin[j]);
                }
            }
            Pairs::Adjacent => {
                let pairs = turned.chunks_exact_mut(2).zip(x.chunks_exact(2));
                for ((o, x), (&c, &s)) in pairs.zip(cos.iter().zip(sin)) {
                    let (a, b) = (x[0].number(), x[1].number());
                    (o[0], o[1]) = (T::nearest(a * c - b * s), T::nearest(b * c + a * s));
                }
            }
        }
        rest.copy_from_slice(&x[2 * r..]);
    }
}
