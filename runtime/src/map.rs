//! Walks over elements: their addresses, and reading and writing them as f32.

use crate::math;
use shardc_ir::kernel::{Elem, Extents, Half};
use std::ops::Range;

/// Elements per block.
pub(crate) const BLOCK: usize = 512;

/// Address of an element of an operand's memory.
pub(crate) fn element(base: *mut f32, elem: Elem, i: usize) -> *mut f32 {
    base.wrapping_byte_add(i * elem.bytes())
}

/// Walks all indices of some loops, first loop outermost.
pub(crate) struct Odometer {
    extents: Extents,
    index: Extents,
    /// Indices that are left.
    left: usize,
}

impl Odometer {
    pub fn new(extents: &[usize]) -> Odometer {
        Odometer::over(extents, 0..extents.iter().product())
    }
    /// Some of the indices, by number.
    pub fn over(extents: &[usize], range: Range<usize>) -> Odometer {
        let mut index: Extents = extents.into();
        let mut rest = range.start;
        for (i, n) in index.iter_mut().zip(extents).rev() {
            let n = (*n).max(1);
            (*i, rest) = (rest % n, rest / n);
        }
        Odometer { extents: extents.into(), index, left: range.len() }
    }
    /// The current index; `None` at the end.
    pub fn index(&self) -> Option<&[usize]> {
        (self.left > 0).then_some(&self.index[..])
    }
    pub fn advance(&mut self) {
        self.left = self.left.saturating_sub(1);
        for (i, n) in self.index.iter_mut().zip(&self.extents).rev() {
            *i += 1;
            if *i < *n {
                return;
            }
            *i = 0;
        }
    }
}

/// # Safety
/// `out.len()` elements from `from`, `stride` apart, are valid.
#[inline(always)]
pub(crate) unsafe fn gather<T: Copy>(
    from: *const T,
    stride: usize,
    out: &mut [f32],
    f: impl Fn(T) -> f32,
) {
    match stride {
        // SAFETY: by the caller.
        0 => unsafe { out.fill(f(*from)) },
        1 => {
            // SAFETY: by the caller.
            let x = unsafe { std::slice::from_raw_parts(from, out.len()) };
            out.iter_mut().zip(x).for_each(|(o, &x)| *o = f(x));
        }
        _ => {
            for (i, o) in out.iter_mut().enumerate() {
                // SAFETY: by the caller.
                *o = f(unsafe { *from.add(i * stride) });
            }
        }
    }
}

/// Reads elements that lie together.
///
/// # Safety
/// `out.len()` elements from `at` are valid, and apart from `out`.
pub(crate) unsafe fn read(at: *const f32, elem: Elem, out: &mut [f32]) {
    // SAFETY: by the caller.
    unsafe {
        match elem {
            Elem::F32 => gather(at, 1, out, |x| x),
            Elem::I32 => gather(at.cast::<i32>(), 1, out, |x| x as f32),
            Elem::BF16 => gather(at.cast::<u16>(), 1, out, math::from_bf16),
            Elem::F16 => gather(at.cast::<u16>(), 1, out, math::from_f16),
        }
    }
}

/// # Safety
/// As for [`scatter`].
unsafe fn halves(half: Half, from: *const f32, to: *mut u16, stride: usize, n: usize) {
    // SAFETY: by the caller.
    unsafe {
        let x = std::slice::from_raw_parts(from, n);
        match stride {
            1 => math::narrow(half, x, std::slice::from_raw_parts_mut(to, n)),
            _ => {
                let all = x.iter().enumerate();
                all.for_each(|(i, &x)| *to.add(i * stride) = math::to_half(half, x));
            }
        }
    }
}

/// # Safety
/// `n` elements from `to`, `stride` apart, are valid for writes, `n` from `from` for reads.
pub(crate) unsafe fn scatter(from: *const f32, to: *mut f32, stride: usize, n: usize, elem: Elem) {
    // SAFETY: by the caller. A block may be stored where it lies.
    unsafe {
        match (elem, stride) {
            (Elem::F32, 1) => std::ptr::copy(from, to, n),
            (Elem::F32, _) => (0..n).for_each(|i| *to.add(i * stride) = *from.add(i)),
            (Elem::I32, _) => {
                (0..n).for_each(|i| *to.cast::<i32>().add(i * stride) = *from.add(i) as i32);
            }
            (Elem::BF16, _) => halves(Half::BF16, from, to.cast(), stride, n),
            (Elem::F16, _) => halves(Half::F16, from, to.cast(), stride, n),
        }
    }
}
