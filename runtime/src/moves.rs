//! Kernels that move elements: copies, look-ups by index, rotary embedding.

use crate::map::Odometer;
use shardc_ir::kernel::{Block, Copy, Pick, Rope, View};
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
    let stride = inner(&b.view, &b.extents);
    each_row(&b.extents, |index, n| {
        let to = memory[b.view.operand].wrapping_add(b.view.at(index));
        // SAFETY: by the caller.
        unsafe {
            if stride == 1 {
                to.write_bytes(0, n);
            } else {
                (0..n).for_each(|i| *to.add(i * stride) = 0.0);
            }
        }
    });
}

/// Runs a copy.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, source and target do not overlap.
pub(crate) unsafe fn copy(k: &Copy, memory: &[*mut f32]) {
    if let Some(b) = &k.clear {
        // SAFETY: by the caller.
        unsafe { clear(b, memory) };
    }
    let (a, b) = (inner(&k.from, &k.extents), inner(&k.to, &k.extents));
    each_row(&k.extents, |index, n| {
        let from = memory[k.from.operand].wrapping_add(k.from.at(index)).cast_const();
        let to = memory[k.to.operand].wrapping_add(k.to.at(index));
        // SAFETY: by the caller. Words are copied as u32: they may be integers.
        unsafe {
            match (a, b) {
                (1, 1) => std::ptr::copy_nonoverlapping(from, to, n),
                _ => (0..n).for_each(|i| {
                    *to.cast::<u32>().add(i * b) = *from.cast::<u32>().add(i * a);
                }),
            }
        }
    });
}

/// The place that an index names, if it is one of this rank's.
fn picked(k: &Pick, index: i32) -> Option<usize> {
    let i = usize::try_from(index).ok()?.checked_sub(k.first)?;
    (i < k.len).then_some(i * k.stride)
}

/// Runs a `take`, or a `put` whose target is cleared.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the result overlaps no operand.
pub(crate) unsafe fn pick(k: &Pick, memory: &[*mut f32], take: bool) {
    let [sx, si, so] = [&k.x, &k.index, &k.out].map(|v| inner(v, &k.extents));
    each_row(&k.extents, |index, n| {
        let at = |v: &View| memory[v.operand].wrapping_add(v.at(index));
        let (x, from, out) =
            (at(&k.x).cast_const(), at(&k.index).cast::<i32>().cast_const(), at(&k.out));
        // SAFETY: by the caller; a picked place is below `len`.
        unsafe {
            if si == 0 && n > 0 {
                let place = picked(k, *from);
                match (place, take) {
                    (Some(p), true) if sx == 1 && so == 1 => {
                        std::ptr::copy_nonoverlapping(x.add(p), out, n);
                    }
                    (Some(p), true) => (0..n).for_each(|i| *out.add(i * so) = *x.add(p + i * sx)),
                    (None, true) => (0..n).for_each(|i| *out.add(i * so) = 0.0),
                    (Some(p), false) => (0..n).for_each(|i| *out.add(p + i * so) += *x.add(i * sx)),
                    (None, false) => {}
                }
            } else {
                for i in 0..n {
                    match (picked(k, *from.add(i * si)), take) {
                        (Some(p), true) => *out.add(i * so) = *x.add(p + i * sx),
                        (None, true) => *out.add(i * so) = 0.0,
                        (Some(p), false) => *out.add(p + i * so) += *x.add(i * sx),
                        (None, false) => {}
                    }
                }
            }
        }
    });
}

/// Runs a rotary embedding.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; the result is no operand.
pub(crate) unsafe fn rope(k: &Rope, memory: &[*mut f32]) {
    let mut o = Odometer::new(&k.extents);
    let r = k.turns;
    while let Some(index) = o.index() {
        // SAFETY: by the caller: rows of these widths are valid, and the result's is apart.
        unsafe {
            let row = |v: &View, n: usize| {
                std::slice::from_raw_parts(memory[v.operand].add(v.at(index)).cast_const(), n)
            };
            let out = memory[k.out.operand].add(k.out.at(index));
            let out = std::slice::from_raw_parts_mut(out, k.width);
            let (x, cos, sin) = (row(&k.x, k.width), row(&k.cos, r), row(&k.sin, r));
            let (turned, rest) = out.split_at_mut(2 * r);
            match k.pairs {
                Pairs::Halves => {
                    let (low, high) = turned.split_at_mut(r);
                    let (a, b) = (&x[..r], &x[r..2 * r]);
                    for j in 0..r {
                        low[j] = a[j] * cos[j] - b[j] * sin[j];
                        high[j] = b[j] * cos[j] + a[j] * sin[j];
                    }
                }
                Pairs::Adjacent => {
                    let pairs = turned.chunks_exact_mut(2).zip(x.chunks_exact(2));
                    for ((o, x), (&c, &s)) in pairs.zip(cos.iter().zip(sin)) {
                        (o[0], o[1]) = (x[0] * c - x[1] * s, x[1] * c + x[0] * s);
                    }
                }
            }
            rest.copy_from_slice(&x[2 * r..]);
        }
        o.advance();
    }
}
