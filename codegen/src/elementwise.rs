//! Element-wise ops and reductions: a short program per element.

use crate::layout::{Layout, Nest};
use shardc_ir::kernel::{Binary, Extents, Kernel, Load, Map, Reduce, Scalar, Store, Unary, View};
use shardc_ir::rule::{Dims, Group, Rule};
use shardc_ir::types::Reduction;

/// Writes the program of one element.
#[derive(Default)]
pub(crate) struct Body(Vec<Scalar>);

impl Body {
    pub fn push(&mut self, s: Scalar) -> usize {
        self.0.push(s);
        self.0.len() - 1
    }
    pub fn load(&mut self, i: usize) -> usize {
        self.push(Scalar::Load(i))
    }
    pub fn constant(&mut self, x: f64) -> usize {
        self.push(Scalar::Const(x as f32))
    }
    pub fn unary(&mut self, f: Unary, x: usize) -> usize {
        self.push(Scalar::Unary(f, x))
    }
    pub fn binary(&mut self, f: Binary, x: usize, y: usize) -> usize {
        self.push(Scalar::Binary(f, x, y))
    }
    pub fn add(&mut self, x: usize, y: usize) -> usize {
        self.binary(Binary::Add, x, y)
    }
    pub fn sub(&mut self, x: usize, y: usize) -> usize {
        self.binary(Binary::Sub, x, y)
    }
    pub fn mul(&mut self, x: usize, y: usize) -> usize {
        self.binary(Binary::Mul, x, y)
    }
    pub fn div(&mut self, x: usize, y: usize) -> usize {
        self.binary(Binary::Div, x, y)
    }
}

/// Loops over the first result's dims; `body` returns the instruction of every result.
pub(crate) fn map<const N: usize>(
    l: &Layout,
    rule: &Rule,
    body: impl FnOnce(&mut Body) -> [usize; N],
) -> Kernel {
    let loops = &rule.outs[0];
    let dims: Vec<&Dims> = rule.ins.iter().chain(&rule.outs).collect();
    let walks: Vec<Extents> = dims.iter().enumerate().map(|(i, d)| l.along(i, d, loops)).collect();
    let mut nest = Nest::new(dims.len());
    for (d, &n) in l.lens(l.ins).iter().enumerate() {
        nest.push(n, &walks.iter().map(|w| w[d]).collect::<Vec<_>>());
    }
    let view = |i: usize| (nest.view(i, i, 0), l.elem(i));
    let mut b = Body::default();
    let values = body(&mut b);
    let load = |i: usize| {
        let (view, elem) = view(i);
        Load { view, elem }
    };
    let store = |(i, &value): (usize, &usize)| {
        let (view, elem) = view(l.ins + i);
        Store { view, elem, value }
    };
    Kernel::Map(Map {
        extents: nest.extents(),
        loads: (0..l.ins).map(load).collect(),
        body: b.0,
        stores: values.iter().enumerate().map(store).collect(),
    })
}

/// One function of one operand.
pub(crate) fn unary(l: &Layout, f: Unary) -> Kernel {
    map(l, &Rule::elementwise(1, 1, l.types[0].rank()), |b| {
        let x = b.load(0);
        [b.unary(f, x)]
    })
}

/// One function of the operand and a constant.
pub(crate) fn with_constant(l: &Layout, f: Binary, c: f64) -> Kernel {
    map(l, &Rule::elementwise(1, 1, l.types[0].rank()), |b| {
        let (x, c) = (b.load(0), b.constant(c));
        [b.binary(f, x, c)]
    })
}

/// The operands folded from the left.
pub(crate) fn chain(l: &Layout, rule: &Rule, f: Binary) -> Kernel {
    map(l, rule, |b| {
        let first = b.load(0);
        [(1..l.ins).fold(first, |sum, i| {
            let x = b.load(i);
            b.binary(f, sum, x)
        })]
    })
}

/// The operand within bounds.
pub(crate) fn clamp(l: &Layout, lo: f64, hi: f64) -> Kernel {
    map(l, &Rule::elementwise(1, 1, l.types[0].rank()), |b| {
        let (x, lo, hi) = (b.load(0), b.constant(lo), b.constant(hi));
        let x = b.binary(Binary::Max, x, lo);
        [b.binary(Binary::Min, x, hi)]
    })
}

/// The operand's numbers, converted if the element types differ.
pub(crate) fn convert(l: &Layout) -> Kernel {
    map(l, &Rule::elementwise(1, 1, l.types[0].rank()), |b| [b.load(0)])
}

/// A number everywhere.
pub(crate) fn fill(l: &Layout, value: f64) -> Kernel {
    map(l, &Rule::elementwise(0, 1, l.types[0].rank()), |b| [b.constant(value)])
}

/// The fold, over the letters missing on the right, of the product of all operands.
pub(crate) fn reduce(l: &Layout, rule: &Rule, fold: Reduction) -> Kernel {
    let kept = &rule.outs[0];
    let mut lost = Dims::new();
    for g in rule.ins.iter().flatten().filter(|g| !kept.contains(g)) {
        if !lost.contains(g) {
            lost.push(*g);
        }
    }
    let size = |g: &Group| {
        let mut ins = rule.ins.iter().enumerate();
        let at = ins.find_map(|(i, dims)| Some((i, dims.iter().position(|x| x == g)?)));
        at.map_or(1, |(i, d)| l.lens(i)[d])
    };
    let nest = |loops: &Dims| {
        let walks: Vec<Extents> = (0..l.ins)
            .map(|i| l.along(i, &rule.ins[i], loops))
            .chain([l.along(l.ins, kept, loops)])
            .collect();
        let mut nest = Nest::new(walks.len());
        for (d, g) in loops.iter().enumerate() {
            nest.push(size(g), &walks.iter().map(|w| w[d]).collect::<Vec<_>>());
        }
        nest
    };
    let (outer, inner) = (nest(kept), nest(&lost));
    let load = |i: usize| {
        let mut view: View = outer.view(i, i, 0);
        view.strides.extend(inner.view(i, i, 0).strides);
        Load { view, elem: l.elem(i) }
    };
    let mut b = Body::default();
    let first = b.load(0);
    let value = (1..l.ins).fold(first, |p, i| {
        let x = b.load(i);
        b.mul(p, x)
    });
    Kernel::Reduce(Reduce {
        fold,
        outer: outer.extents(),
        inner: inner.extents(),
        loads: (0..l.ins).map(load).collect(),
        body: b.0,
        value,
        out: outer.view(l.ins, l.ins, 0),
        out_elem: l.elem(l.ins),
    })
}
