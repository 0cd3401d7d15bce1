//! Kernels that move elements: copies, look-ups by index, rotary embedding.

use crate::map::{Odometer, element};
use crate::math::{from_bf16, to_bf16};
use shardc_ir::kernel::{Block, Copy, Elem, Pick, Rope, View};
use shardc_ir::ops::rope::Pairs;

/// Calls `f(index of the outer loops, inner length)`; the innermost loop is left to `f`.
fn each_row(extents: &[usize], mut f: impl FnMut(&[usize], usize)) {
    let (n, outer) = match extents.split_last() {
        Some((&n, outer)) => (n, outer),
        None => (1, &[][..]),
    };
    let mut o = Odometer::new(outer);
    while let Some(index) = o.index() {
        f(index, n);
        o.advance();
    }
}

fn inner(v: &View, extents: &[usize]) -> usize {
    extents.len().checked_sub(1).map_or(0, |l| v.strides[l])
}

/// Writes zeros to a block.
///
/// # Safety
/// The block is valid.
pub(crate) unsafe fn clear(b: &Block, memory: &[*mut f32]) {
    let (stride, size) = (inner(&b.view, &b.extents), b.elem.bytes());
    each_row(&b.extents, |index, n| {
        let to = element(memory[b.view.operand], b.elem, b.view.at(index)).cast::<u8>();
        // SAFETY: by the caller.
        unsafe {
            if stride == 1 {
                to.write_bytes(0, n * size);
            } else {
                (0..n).for_each(|i| to.add(i * stride * size).write_bytes(0, size));
            }
        }
    });
}

/// Runs a copy.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, source and target do not overlap.
pub(crate) unsafe fn copy(k: &Copy, memory: &[*mut f32]) {
    // SAFETY: by the caller. Elements are copied as bits: they may be integers.
    unsafe {
        k.clear.iter().for_each(|b| clear(b, memory));
        match k.elem {
            Elem::F32 | Elem::I32 => copy_words::<u32>(k, memory),
            Elem::BF16 => copy_words::<u16>(k, memory),
        }
    }
}

/// # Safety
/// As for [`copy`]; `T` has the size of the kernel's elements.
unsafe fn copy_words<T: std::marker::Copy>(k: &Copy, memory: &[*mut f32]) {
    let (a, b) = (inner(&k.from, &k.extents), inner(&k.to, &k.extents));
    each_row(&k.extents, |index, n| {
        let at = |v: &View| memory[v.operand].cast::<T>().wrapping_add(v.at(index));
        let (from, to) = (at(&k.from).cast_const(), at(&k.to));
        // SAFETY: by the caller.
        unsafe {
            match (a, b) {
                (1, 1) => std::ptr::copy_nonoverlapping(from, to, n),
                _ => (0..n).for_each(|i| *to.add(i * b) = *from.add(i * a)),
            }
        }
    });
}

/// The place that an index names, if it is one of this rank's.
fn picked(k: &Pick, index: i32) -> Option<usize> {
    let i = usize::try_from(index).ok()?.checked_sub(k.first)?;
    (i < k.len).then_some(i * k.stride)
}

/// Runs a `take`.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the result overlaps no operand.
pub(crate) unsafe fn take(k: &Pick, memory: &[*mut f32]) {
    // SAFETY: by the caller.
    unsafe {
        match k.elem {
            Elem::F32 | Elem::I32 => take_words::<u32>(k, memory),
            Elem::BF16 => take_words::<u16>(k, memory),
        }
    }
}

/// # Safety
/// As for [`take`]; `T` has the size of the kernel's elements.
unsafe fn take_words<T: std::marker::Copy + Default>(k: &Pick, memory: &[*mut f32]) {
    let [sx, si, so] = [&k.x, &k.index, &k.out].map(|v| inner(v, &k.extents));
    each_row(&k.extents, |index, n| {
        let at = |v: &View| memory[v.operand].cast::<T>().wrapping_add(v.at(index));
        let (x, from, out) = (at(&k.x).cast_const(), indices(k, memory, index), at(&k.out));
        // SAFETY: by the caller; a picked place is below `len`.
        unsafe {
            if si == 0 && n > 0 {
                match picked(k, *from) {
                    Some(p) if sx == 1 && so == 1 => {
                        std::ptr::copy_nonoverlapping(x.add(p), out, n);
                    }
                    Some(p) => (0..n).for_each(|i| *out.add(i * so) = *x.add(p + i * sx)),
                    None => (0..n).for_each(|i| *out.add(i * so) = T::default()),
                }
            } else {
                for i in 0..n {
                    let place = picked(k, *from.add(i * si));
                    *out.add(i * so) = place.map_or(T::default(), |p| *x.add(p + i * sx));
                }
            }
        }
    });
}

/// Runs a `put`, whose target is cleared.
///
/// # Safety
/// As for [`take`].
pub(crate) unsafe fn put(k: &Pick, memory: &[*mut f32]) {
    // SAFETY: by the caller.
    unsafe {
        match k.elem {
            Elem::F32 => put_from::<f32>(k, memory, |x| x),
            Elem::BF16 => put_from::<u16>(k, memory, from_bf16),
            Elem::I32 => put_from::<i32>(k, memory, |x| x as f32),
        }
    }
}

/// # Safety
/// As for [`put`]; the elements of `x` are `T`.
unsafe fn put_from<T: std::marker::Copy>(k: &Pick, memory: &[*mut f32], number: impl Fn(T) -> f32) {
    let [sx, si, so] = [&k.x, &k.index, &k.out].map(|v| inner(v, &k.extents));
    each_row(&k.extents, |index, n| {
        let x = memory[k.x.operand].cast::<T>().wrapping_add(k.x.at(index)).cast_const();
        let (from, out) =
            (indices(k, memory, index), memory[k.out.operand].wrapping_add(k.out.at(index)));
        // SAFETY: by the caller; a picked place is below `len`.
        unsafe {
            let add = |p: usize, i: usize| *out.add(p + i * so) += number(*x.add(i * sx));
            if si == 0 && n > 0 {
                if let Some(p) = picked(k, *from) {
                    (0..n).for_each(|i| add(p, i));
                }
            } else {
                let places = (0..n).map(|i| (picked(k, *from.add(i * si)), i));
                places.for_each(|(p, i)| p.into_iter().for_each(|p| add(p, i)));
            }
        }
    });
}

/// Where the indices of a row begin.
fn indices(k: &Pick, memory: &[*mut f32], index: &[usize]) -> *const i32 {
    memory[k.index.operand].wrapping_add(k.index.at(index)).cast::<i32>().cast_const()
}

/// Runs a rotary embedding.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; the result is no operand.
pub(crate) unsafe fn rope(k: &Rope, memory: &[*mut f32]) {
    // SAFETY: by the caller.
    unsafe {
        match k.elem {
            Elem::F32 | Elem::I32 => turn::<f32>(k, memory, |x| x, |x| x),
            Elem::BF16 => turn::<u16>(k, memory, from_bf16, to_bf16),
        }
    }
}

/// # Safety
/// As for [`rope`]; the kernel's elements are `T`.
unsafe fn turn<T: std::marker::Copy>(
    k: &Rope,
    memory: &[*mut f32],
    number: impl Fn(T) -> f32,
    element: impl Fn(f32) -> T,
) {
    let mut o = Odometer::new(&k.extents);
    let r = k.turns;
    while let Some(index) = o.index() {
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
                        let (a, b) = (number(a[j]), number(b[j]));
                        low[j] = element(a * cos[j] - b * sin[j]);
                        high[j] = element(b * cos[j] + a * sin[j]);
                    }
                }
                Pairs::Adjacent => {
                    let pairs = turned.chunks_exact_mut(2).zip(x.chunks_exact(2));
                    for ((o, x), (&c, &s)) in pairs.zip(cos.iter().zip(sin)) {
                        let (a, b) = (number(x[0]), number(x[1]));
                        (o[0], o[1]) = (element(a * c - b * s), element(b * c + a * s));
                    }
                }
            }
            rest.copy_from_slice(&x[2 * r..]);
        }
        o.advance();
    }
}
