//! Groups of element-wise nodes and folds: one kernel over rows.

use crate::c;
use crate::layout::{Layout, Nest};
use shardc_ir::func::{Func, Node, Value};
use shardc_ir::group::{Axes, IterationSpace, is_same};
use shardc_ir::kernel::{Body, Extents, Kernel, Load, Results, Rows, Scalar, Store, Unary, View};
use shardc_ir::ops::FusionClass;
use shardc_ir::types::{DType, Reduction};

/// Views of every operand and result of a launch along its loops.
struct Loops {
    outer: Extents,
    inner: Extents,
    views: Vec<View>,
}

/// Loops over rows and over their elements. Where a kernel folds nothing they are one nest, of which
/// the last loop is the row.
fn loops(l: &Layout, f: &Func, values: &[Value], space: &IterationSpace) -> Loops {
    let axes: Vec<&Axes> =
        values.iter().map(|&v| space.axes(v).expect("values of the group")).collect();
    // Of a loop that only values inside the group have, too.
    let size = |axis: u8| {
        let (v, d) = space.example(axis).expect("a loop is one of a value's dims");
        f.ty(v).lens(l.mesh, l.coords)[d]
    };
    let nest = |over: &[u8]| {
        let mut nest = Nest::new(axes.len());
        for &axis in over {
            let stride = |(i, a): (usize, &&Axes)| {
                a.iter().position(|x| *x == axis).map_or(0, |d| l.strides(i)[d])
            };
            nest.push(size(axis), &axes.iter().enumerate().map(stride).collect::<Vec<_>>());
        }
        nest
    };
    let (rows, cols) = (nest(&space.rows), nest(&space.cols));
    let (mut outer, mut inner) = (rows.extents(), cols.extents());
    let mut views: Vec<View> = (0..axes.len())
        .map(|i| {
            let mut view = rows.view(i, i, 0);
            view.strides.extend(cols.view(i, i, 0).strides);
            view
        })
        .collect();
    if space.cols.is_empty() {
        inner = outer.pop().into_iter().collect();
    }
    let plain = space.cols.is_empty() && !inner.is_empty();
    for (v, a) in views.iter_mut().zip(&axes).skip(l.ins) {
        // Of loops that are one nest, the last may still be none of a smaller result's.
        let smaller = a.len() < space.rows.len() && v.strides.last() == Some(&0);
        if !plain && a.len() <= space.rows.len() || plain && smaller {
            v.strides.truncate(outer.len());
        }
    }
    Loops { outer, inner, views }
}

/// A program over rows while it is written: what of it is known as which instruction.
#[derive(Default)]
pub(crate) struct Program {
    pub k: Rows,
    body: Body,
    known: Vec<(Value, usize)>,
}

impl Program {
    /// A value that is read.
    pub fn read(&mut self, v: Value, view: View, elem: DType) {
        self.k.loads.push(Load { view, elem });
        let load = self.body.push(Scalar::Load(self.k.loads.len() - 1));
        self.known.push((v, load));
    }

    /// The instruction of a value.
    fn of(&self, v: Value) -> usize {
        self.known.iter().rev().find(|x| x.0 == v).expect("read or made before").1
    }

    /// A value is what its type says, whether it reaches memory or not.
    pub fn round(&mut self, f: &Func, v: Value) {
        let dtype = f.ty(v).dtype;
        if dtype.is_half() {
            let rounded = self.body.unary(Unary::Round(dtype), self.of(v));
            self.known.push((v, rounded));
        }
    }

    /// Appends what nodes do; `rounded` if their results are what their types say.
    pub fn run(&mut self, l: &Layout, f: &Func, nodes: &[Node], rounded: bool) {
        for n in nodes {
            let x: Results = n.ins.iter().map(|&v| self.of(v)).collect();
            let made = node(l, f, n, &mut self.body, &mut self.k.params, &x);
            self.known.extend(n.outs.iter().copied().zip(made));
            if rounded && !is_same(&n.op) {
                n.outs.iter().for_each(|&v| self.round(f, v));
            }
        }
    }

    /// A value that is written.
    pub fn write(&mut self, v: Value, view: View, elem: DType) {
        let value = self.of(v);
        self.k.stores.push(Store { view, elem, value });
    }

    pub fn done(self) -> Rows {
        let mut k = Rows { body: self.body.0, ..self.k };
        k.symbol = c::symbol(&k).into();
        k
    }
}

/// The kernel of nodes that are one over rows; `values` are what it reads and what it writes.
pub(crate) fn rows(
    l: &Layout,
    f: &Func,
    nodes: &[Node],
    values: &[Value],
    space: &IterationSpace,
) -> Kernel {
    let (ins, outs) = values.split_at(l.ins);
    let loops = loops(l, f, values, space);
    let mut p = Program::default();
    (p.k.outer, p.k.inner) = (loops.outer, loops.inner);
    for (i, &v) in ins.iter().enumerate() {
        // One node names an operand as often as it reads it.
        if !ins[..i].contains(&v) {
            p.read(v, loops.views[i].clone(), l.elem(i));
        }
    }
    // What is written is rounded there.
    p.run(l, f, nodes, nodes.len() > 1);
    for (&v, at) in outs.iter().zip(l.ins..) {
        p.write(v, loops.views[at].clone(), l.elem(at));
    }
    Kernel::Rows(p.done())
}

/// Appends what a node does to a row.
fn node(
    l: &Layout,
    f: &Func,
    n: &Node,
    b: &mut Body,
    params: &mut Vec<f32>,
    x: &[usize],
) -> Results {
    // The index, counted from the first element of this rank's piece, where it is this element's.
    let mut picked = |b: &mut Body, of: Value, index: usize, value: usize| {
        let dim = f.ty(of).rank() - 1;
        let first = f.ty(of).extent(l.mesh, dim, l.coords).offset;
        let at = if first == 0 {
            index
        } else {
            params.push(first as f32);
            let first = b.push(Scalar::Param(params.len() - 1));
            b.sub(index, first)
        };
        let column = b.push(Scalar::Column);
        b.push(Scalar::Where(at, column, value))
    };
    let fold = |b: &mut Body, r: Reduction, x: usize| b.push(Scalar::Fold(r, x));
    let element = |b: &mut Body| n.op.def().element(b, x).expect("its file says what it does");
    let made = match n.op.facts().fusion {
        Some(FusionClass::Each) => return element(b),
        Some(FusionClass::Fold) => {
            let folded = element(b)[0];
            fold(b, n.op.def().reduction(), folded)
        }
        Some(FusionClass::Take) => {
            let one = picked(b, n.ins[0], x[1], x[0]);
            fold(b, Reduction::Sum, one)
        }
        Some(FusionClass::IndexAdd) => picked(b, n.outs[0], x[1], x[0]),
        None => panic!("{} is not part of a row", n.op.mnemonic()),
    };
    Results::from_slice(&[made])
}
