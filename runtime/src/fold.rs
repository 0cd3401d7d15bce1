//! Reductions: along adjacent elements with partial folds side by side, else a block of results at
//! a time. The order of a fold depends on sizes and strides only.

use crate::map::{BLOCK, Interp, Odometer, Registers, element, scatter};
use crate::math;
use shardc_ir::kernel::{Binary, Reduce, View};
use shardc_ir::types::Reduction;
use smallvec::SmallVec;

fn start_of(fold: Reduction) -> f32 {
    match fold {
        Reduction::Sum => 0.0,
        Reduction::Max => f32::NEG_INFINITY,
        Reduction::Min => f32::INFINITY,
    }
}

fn join(fold: Reduction, a: f32, b: f32) -> f32 {
    match fold {
        Reduction::Sum => a + b,
        Reduction::Max => a.max(b),
        Reduction::Min => a.min(b),
    }
}

fn function(fold: Reduction) -> Binary {
    match fold {
        Reduction::Sum => Binary::Add,
        Reduction::Max => Binary::Max,
        Reduction::Min => Binary::Min,
    }
}

fn stride(v: &View, l: usize) -> usize {
    v.strides.get(l).copied().unwrap_or(0)
}

/// Runs a reduction.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the result overlaps no operand.
pub(crate) unsafe fn run(k: &Reduce, memory: &[*mut f32], registers: &mut Registers) {
    // SAFETY: by the caller.
    let interp = unsafe { Interp::new(&k.loads, &k.body, memory, registers) };
    let adjacent = |l: usize| k.loads.iter().filter(|x| stride(&x.view, l) == 1).count();
    let (no, ni) = (k.outer.len(), k.inner.len());
    // SAFETY: by the caller.
    unsafe {
        if no > 0 && (ni == 0 || adjacent(no - 1) > adjacent(no + ni - 1)) {
            results(k, memory, interp);
        } else {
            rows(k, memory, interp);
        }
    }
}

/// Folds along the last reduced loop.
unsafe fn rows(k: &Reduce, memory: &[*mut f32], mut interp: Interp) {
    let no = k.outer.len();
    let (len, rest) = match k.inner.split_last() {
        Some((&n, rest)) => (n, rest),
        None => (1, &[][..]),
    };
    let last = no + rest.len();
    let mut o = Odometer::new(&k.outer);
    while let Some(outer) = o.index() {
        let mut acc = start_of(k.fold);
        let mut r = Odometer::new(rest);
        while let Some(inner) = r.index() {
            let starts: SmallVec<[usize; 8]> =
                k.loads.iter().map(|l| begin(&l.view, outer, inner)).collect();
            let mut i = 0;
            while i < len {
                let n = BLOCK.min(len - i);
                let walk = |l: usize| {
                    let s = stride(&k.loads[l].view, last);
                    (starts[l] + i * s, s)
                };
                // SAFETY: the kernel reaches these elements; the block has n.
                let x =
                    unsafe { std::slice::from_raw_parts(interp.block(n, k.value, walk, None), n) };
                let part = match k.fold {
                    Reduction::Sum => math::sum(x),
                    Reduction::Max => math::max(x),
                    Reduction::Min => math::min(x),
                };
                acc = join(k.fold, acc, part);
                i += n;
            }
            r.advance();
        }
        let to = element(memory[k.out.operand], k.out_elem, k.out.at(outer));
        // SAFETY: the kernel reaches this element.
        unsafe { scatter(&acc, to, 1, 1, k.out_elem) };
        o.advance();
    }
}

/// Folds a block of results along the last kept loop, one element of each at a time.
unsafe fn results(k: &Reduce, memory: &[*mut f32], mut interp: Interp) {
    let last = k.outer.len() - 1;
    let len = k.outer[last];
    let mut acc = [[0.0f32; BLOCK]; 2];
    let mut o = Odometer::new(&k.outer[..last]);
    while let Some(outer) = o.index() {
        let mut i = 0;
        while i < len {
            let n = BLOCK.min(len - i);
            let mut at: SmallVec<[usize; 8]> = outer.into();
            at.push(i);
            let [mut now, mut next] = [0, 1];
            acc[now][..n].fill(start_of(k.fold));
            let mut r = Odometer::new(&k.inner);
            while let Some(inner) = r.index() {
                let walk = |l: usize| {
                    let v = &k.loads[l].view;
                    (begin(v, &at, inner), stride(v, last))
                };
                // SAFETY: the kernel reaches these elements; the block has n.
                let x =
                    unsafe { std::slice::from_raw_parts(interp.block(n, k.value, walk, None), n) };
                let [a, b] = &mut acc;
                let (from, to) = if now == 0 { (a, b) } else { (b, a) };
                math::binary(function(k.fold), &from[..n], x, &mut to[..n]);
                (now, next) = (next, now);
                r.advance();
            }
            let to = element(memory[k.out.operand], k.out_elem, k.out.at(&at));
            // SAFETY: the kernel reaches these elements.
            unsafe { scatter(acc[now].as_ptr(), to, stride(&k.out, last), n, k.out_elem) };
            i += n;
        }
        o.advance();
    }
}

/// The element at an index of the kept loops and then of the reduced ones.
fn begin(v: &View, outer: &[usize], inner: &[usize]) -> usize {
    let index = outer.iter().chain(inner);
    v.strides.iter().zip(index).fold(v.offset, |o, (s, i)| o + s * i)
}
