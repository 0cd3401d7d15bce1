//! `dot`: its letters become the loops of a matrix product.

use crate::elementwise;
use crate::layout::Layout;
use shardc_ir::kernel::{Elem, Extents, Gemm, Kernel, Matrix, View};
use shardc_ir::rule::{Letter, Rule, has_letter};
use shardc_ir::types::Reduction;

/// One letter, or several that compose: its size and its stride in both operands and the result.
#[derive(Clone, Copy)]
struct Loop {
    size: usize,
    strides: [usize; 3],
}

/// Joins loops of which one runs through the other's steps in all three tensors.
fn join(mut loops: Vec<Loop>) -> Vec<Loop> {
    loops.retain(|l| l.size != 1);
    let fits = |outer: &Loop, inner: &Loop| {
        outer.strides.iter().zip(&inner.strides).all(|(o, i)| *o == i * inner.size)
    };
    'again: loop {
        for o in 0..loops.len() {
            for i in 0..loops.len() {
                if o != i && fits(&loops[o], &loops[i]) {
                    loops[i].size *= loops[o].size;
                    loops.remove(o);
                    continue 'again;
                }
            }
        }
        return loops;
    }
}

/// The largest loop, and the others.
fn largest(mut loops: Vec<Loop>) -> (Loop, Vec<Loop>) {
    let at = (0..loops.len()).max_by_key(|&i| loops[i].size);
    let one = Loop { size: 1, strides: [0; 3] };
    (at.map_or(one, |i| loops.remove(i)), loops)
}

/// A matrix product, or a plain reduction if one operand brings no letter of its own to the result.
pub(crate) fn dot(l: &Layout, rule: &Rule) -> Kernel {
    let dims = [&rule.ins[0], &rule.ins[1], &rule.outs[0]];
    let strides = [l.strides(0), l.strides(1), l.strides(2)];
    let lens = [l.lens(0), l.lens(1), l.lens(2)];
    let of = |letter: Letter| {
        let mut out = Loop { size: 1, strides: [0; 3] };
        for t in 0..3 {
            if let Some(d) = dims[t].iter().position(|g| g.single() == Some(letter)) {
                (out.size, out.strides[t]) = (lens[t][d], strides[t][d]);
            }
        }
        out
    };
    let letters = rule.letters();
    let class = |want: [bool; 3]| -> Vec<Loop> {
        let has = |x: Letter| [0, 1, 2].map(|t| has_letter(dims[t], x));
        letters.iter().filter(|&&x| has(x) == want).map(|&x| of(x)).collect()
    };
    let (m, n) = (class([true, false, true]), class([false, true, true]));
    if m.is_empty() || n.is_empty() {
        return elementwise::reduce(l, rule, Reduction::Sum);
    }
    let (m, more_m) = largest(join(m));
    let (n, more_n) = largest(join(n));
    let (k, sum) = largest(join(class([true, true, false])));
    let mut batch = join(class([true, true, true]));
    batch.extend(more_m.into_iter().chain(more_n));
    let sizes = |loops: &[Loop]| loops.iter().map(|x| x.size).collect::<Extents>();
    let matrix = |t: usize, rows: Loop, cols: Loop| {
        let inner = if t < 2 { &sum[..] } else { &[] };
        let strides = batch.iter().chain(inner).map(|x| x.strides[t]).collect();
        let view = View { operand: t, offset: 0, strides };
        Matrix { view, elem: l.elem(t), row_stride: rows.strides[t], col_stride: cols.strides[t] }
    };
    let narrow = (0..3).any(|t| l.elem(t) != Elem::F32);
    Kernel::Gemm(Gemm {
        batch: sizes(&batch),
        sum: sizes(&sum),
        m: m.size,
        n: n.size,
        k: k.size,
        a: matrix(0, m, k),
        b: matrix(1, k, n),
        out: matrix(2, m, n),
        accumulate: false,
        scratch: narrow.then(|| View { operand: 3, offset: 0, strides: Extents::new() }),
    })
}
