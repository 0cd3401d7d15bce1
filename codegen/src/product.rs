//! `dot`: its letters become the loops of a matrix product.

use crate::layout::Layout;
use shardc_ir::kernel::{Elem, Extents, Gemm, Matrix, View};
use shardc_ir::rule::{Letter, Rule, has_letter};

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

/// A matrix product of the first two operands; it is added to the third, if there is one, over which
/// the result lies.
pub(crate) fn dot(l: &Layout, rule: &Rule) -> Gemm {
    let dims = [&rule.ins[0], &rule.ins[1], &rule.outs[0]];
    let operands = [0, 1, l.ins];
    let strides = operands.map(|i| l.strides(i));
    let lens = operands.map(|i| l.lens(i));
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
    let (m, more_m) = largest(join(m));
    let (n, more_n) = largest(join(n));
    let (k, sum) = largest(join(class([true, true, false])));
    let mut batch = join(class([true, true, true]));
    batch.extend(more_m.into_iter().chain(more_n));
    let sizes = |loops: &[Loop]| loops.iter().map(|x| x.size).collect::<Extents>();
    // The columns of the result lie next to each other, if its rows do.
    let across = m.strides[2] == 1 && n.strides[2] != 1;
    let [(a, m), (b, n)] = if across { [(1, n), (0, m)] } else { [(0, m), (1, n)] };
    let matrix = |t: usize, rows: Loop, cols: Loop| {
        let inner = if t < 2 { &sum[..] } else { &[] };
        let strides = batch.iter().chain(inner).map(|x| x.strides[t]).collect();
        let operand = operands[t];
        let view = View { operand, offset: 0, strides };
        let (row_stride, col_stride) = (rows.strides[t], cols.strides[t]);
        Matrix { view, elem: l.elem(operand), row_stride, col_stride }
    };
    let narrow = (0..=l.ins).any(|i| l.elem(i) != Elem::F32);
    Gemm {
        batch: sizes(&batch),
        sum: sizes(&sum),
        m: m.size,
        n: n.size,
        k: k.size,
        a: matrix(a, m, k),
        b: matrix(b, k, n),
        out: matrix(2, m, n),
        accumulate: l.ins > 2,
        scratch: narrow.then(|| View { operand: l.ins + 1, offset: 0, strides: Extents::new() }),
    }
}
