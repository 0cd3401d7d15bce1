//! `dot`: its letters become the loops of a matrix product; and what becomes of its result.

use crate::layout::Layout;
use crate::rows::Program;
use shardc_ir::func::{Func, Node, Value};
use shardc_ir::group::{Axes, IterationSpace, rule_of};
use shardc_ir::kernel::{Extents, Gemm, Kernel, Matrix, Rows, THEN, Then, View};
use shardc_ir::rule::{Letter, Rule, has_letter};
use shardc_ir::types::DType;
use smallvec::{SmallVec, smallvec};

/// A number for both operands, and for each tensor of the shape of the result, or smaller.
type Each<T> = SmallVec<[T; 8]>;

/// One letter, or several that compose: its size, and its stride in every tensor.
#[derive(Clone)]
struct Loop {
    size: usize,
    strides: Each<usize>,
}

/// A tensor whose dims are some of the result's, by their letters.
struct Shaped {
    operand: usize,
    letters: Each<Letter>,
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
fn largest(mut loops: Vec<Loop>, tensors: usize) -> (Loop, Vec<Loop>) {
    let at = (0..loops.len()).max_by_key(|&i| loops[i].size);
    let one = Loop { size: 1, strides: smallvec![0; tensors] };
    (at.map_or(one, |i| loops.remove(i)), loops)
}

/// A matrix product of the first two operands, and a matrix for each tensor of the result's shape, of
/// which the first is taken for the result.
fn product(l: &Layout, rule: &Rule, shaped: &[Shaped]) -> (Gemm, Vec<Matrix>) {
    let operands: Each<usize> =
        [0, 1].into_iter().chain(shaped.iter().map(|s| s.operand)).collect();
    let strides: Each<Extents> = operands.iter().map(|&i| l.strides(i)).collect();
    let lens = [0, 1].map(|i| l.lens(i));
    let of = |letter: Letter| {
        let dims = [0, 1].map(|t| rule.ins[t].iter().position(|g| g.single() == Some(letter)));
        let size = dims[0].map(|d| lens[0][d]).or(dims[1].map(|d| lens[1][d]));
        let named = shaped.iter().map(|s| s.letters.iter().position(|x| *x == letter));
        let dims = dims.into_iter().chain(named).zip(&strides);
        Loop {
            size: size.expect("a letter is one of an operand's"),
            strides: dims.map(|(d, s)| d.map_or(0, |d| s[d])).collect(),
        }
    };
    let (letters, tensors) = (rule.letters(), operands.len());
    let class = |want: [bool; 3]| -> Vec<Loop> {
        let has = |x: Letter| [&rule.ins[0], &rule.ins[1], &rule.outs[0]].map(|d| has_letter(d, x));
        letters.iter().filter(|&&x| has(x) == want).map(|&x| of(x)).collect()
    };
    let (m, n) = (class([true, false, true]), class([false, true, true]));
    let (m, more_m) = largest(join(m), tensors);
    let (n, more_n) = largest(join(n), tensors);
    let (k, sum) = largest(join(class([true, true, false])), tensors);
    let mut batch = join(class([true, true, true]));
    batch.extend(more_m.into_iter().chain(more_n));
    let sizes = |loops: &[Loop]| loops.iter().map(|x| x.size).collect::<Extents>();
    // The columns of the result lie next to each other, if its rows do.
    let across = m.strides[2] == 1 && n.strides[2] != 1;
    let [(a, m), (b, n)] = if across { [(1, n), (0, m)] } else { [(0, m), (1, n)] };
    let matrix = |t: usize, rows: &Loop, cols: &Loop| {
        let inner = if t < 2 { &sum[..] } else { &[] };
        let strides = batch.iter().chain(inner).map(|x| x.strides[t]).collect();
        let view = View { operand: operands[t], offset: 0, strides };
        let (row_stride, col_stride) = (rows.strides[t], cols.strides[t]);
        Matrix { view, elem: l.elem(operands[t]), row_stride, col_stride }
    };
    let results: Vec<Matrix> = (2..tensors).map(|t| matrix(t, &m, &n)).collect();
    let gemm = Gemm {
        batch: sizes(&batch),
        sum: sizes(&sum),
        m: m.size,
        n: n.size,
        k: k.size,
        a: matrix(a, &m, &k),
        b: matrix(b, &k, &n),
        out: results[0].clone(),
        accumulate: false,
    };
    (gemm, results)
}

/// A matrix product of the first two operands; it is added to the third, if there is one, over which
/// the result lies.
pub(crate) fn dot(l: &Layout, rule: &Rule) -> Gemm {
    let letters = rule.outs[0].iter().map(|g| g.single().expect("a dot's dims are letters"));
    let (product, _) = product(l, rule, &[Shaped { operand: l.ins, letters: letters.collect() }]);
    Gemm { accumulate: l.ins > 2, ..product }
}

/// A matrix product and its epilogue; `values` are what the launch reads, the product's operands first,
/// and what it writes.
pub(crate) fn then(
    l: &Layout,
    f: &Func,
    nodes: &[Node],
    values: &[Value],
    space: &IterationSpace,
) -> Kernel {
    let (rule, made) = (rule_of(f, &nodes[0]), nodes[0].outs[0]);
    let letter = |axis: &u8| {
        let d = space.rows.iter().position(|a| a == axis).expect("a loop of the result");
        rule.outs[0][d].single().expect("a dot's dims are letters")
    };
    let shaped = |(i, v): (usize, &Value)| {
        let axes: Option<&Axes> = if *v == made { Some(&space.rows) } else { space.axes(*v) };
        // The product's operands may be read once more.
        Some(Shaped { operand: i, letters: axes?.iter().map(letter).collect() })
    };
    let (ins, outs) = values.split_at(l.ins);
    let reads: Vec<Shaped> = ins.iter().enumerate().filter_map(shaped).collect();
    let writes: Vec<Shaped> =
        outs.iter().zip(l.ins..).map(|(v, i)| (i, v)).filter_map(shaped).collect();
    let all: Vec<Shaped> = writes.into_iter().chain(reads).collect();
    let (product, mut writes) = product(l, &rule, &all);
    let reads = writes.split_off(outs.len());
    let block = |cols: usize| -> Rows {
        let mut p = Program::default();
        (p.k.outer, p.k.inner) = (smallvec![THEN[0]], smallvec![cols]);
        let view = |operand: usize, rows: usize, cols: usize| View {
            operand,
            offset: 0,
            strides: smallvec![rows, cols],
        };
        p.read(made, view(0, THEN[1], 1), DType::F32);
        p.round(f, made);
        for (x, i) in reads.iter().zip(1..) {
            p.read(values[x.view.operand], view(i, x.row_stride, x.col_stride), x.elem);
        }
        p.run(l, f, &nodes[1..], true);
        for (x, i) in writes.iter().zip(1 + reads.len()..) {
            p.write(values[x.view.operand], view(i, x.row_stride, x.col_stride), x.elem);
        }
        p.done()
    };
    let whole = (product.n >= THEN[1]).then_some(THEN[1]);
    let rest = Some(product.n % THEN[1]).filter(|&n| n > 0);
    let blocks = whole.into_iter().chain(rest).map(block).collect();
    Kernel::GemmThen(Box::new(Then { product, blocks, reads, writes }))
}
