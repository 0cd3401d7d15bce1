//! Ops that move elements and do no arithmetic: copies of pieces, and looking up by index.

use crate::layout::{Layout, Nest};
use shardc_ir::attr::{Along, Padding};
use shardc_ir::kernel::{self, Copy, Extents, Kernel, Pick, Scan};
use shardc_ir::ops::draw::DrawDim;
use shardc_ir::ops::{Concat, Cumsum, Draw, Narrow, Pad};
use shardc_ir::rng;
use shardc_ir::rule::{Dims, Group, Rule};

/// A copy from a block of the first operand to one of the result, both of the same sizes, before
/// loops are joined.
fn copy(l: &Layout, lens: &[usize], from: (&Extents, usize), to: (&Extents, usize)) -> Copy {
    let mut nest = Nest::new(2);
    for (d, &n) in lens.iter().enumerate() {
        nest.push(n, &[from.0[d], to.0[d]]);
    }
    Copy {
        elem: l.elem(0),
        clear: None,
        extents: nest.extents(),
        from: nest.view(0, 0, from.1),
        to: nest.view(1, l.ins, to.1),
    }
}

/// The operand with its dims reordered, or repeated along new ones.
pub(crate) fn spread(l: &Layout, rule: &Rule) -> Kernel {
    let loops = &rule.outs[0];
    let from = l.along(0, &rule.ins[0], loops);
    Kernel::Copy(vec![copy(l, &l.lens(1), (&from, 0), (&l.strides(1), 0))])
}

/// This rank's piece of dim `dim`.
pub(crate) fn slice(l: &Layout, dim: usize) -> Kernel {
    let first = l.extent(1, dim).offset - l.extent(0, dim).offset;
    let from = l.strides(0);
    Kernel::Copy(vec![copy(l, &l.lens(1), (&from, first * from[dim]), (&l.strides(1), 0))])
}

/// Piece number `number` of dim `dim`, all being as long as the result.
pub(crate) fn piece(l: &Layout, dim: usize, number: usize) -> Kernel {
    let (from, lens) = (l.strides(0), l.lens(1));
    Kernel::Copy(vec![copy(l, &lens, (&from, number * lens[dim] * from[dim]), (&l.strides(1), 0))])
}

/// This rank's piece of dim `dim` among zeros.
pub(crate) fn place(l: &Layout, dim: usize) -> Kernel {
    let first = l.extent(0, dim).offset - l.extent(1, dim).offset;
    let to = l.strides(1);
    let mut k = copy(l, &l.lens(0), (&l.strides(0), 0), (&to, first * to[dim]));
    k.clear = Some(l.whole(1));
    Kernel::Copy(vec![k])
}

/// The operands one after the other along a dim.
pub(crate) fn concat(l: &Layout, o: &Concat) -> Kernel {
    let (to, dim) = (l.strides(l.ins), dim_of(l, o.dim));
    let mut first = 0;
    let one = |operand: usize| {
        let (lens, strides) = (l.lens(operand), l.strides(operand));
        let mut k = copy(l, &lens, (&strides, 0), (&to, first));
        k.from.operand = operand;
        first += lens[dim] * to[dim];
        k
    };
    Kernel::Copy((0..l.ins).map(one).collect())
}

fn dim_of(l: &Layout, dim: Along) -> usize {
    dim.of(l.types[0].rank()).expect("accepts() asks for such a dim")
}

/// Elements of a dim from `start`.
pub(crate) fn narrow(l: &Layout, o: &Narrow) -> Kernel {
    let (mut from, dim) = (l.strides(0), dim_of(l, o.dim));
    let start = o.start * from[dim];
    from[dim] *= o.step.0;
    Kernel::Copy(vec![copy(l, &l.lens(1), (&from, start), (&l.strides(1), 0))])
}

/// Elements of a dim from `start` of the result's, among zeros; without those that have no place there.
pub(crate) fn pad(l: &Layout, o: &Pad) -> Kernel {
    let (from, mut to, dim) = (l.strides(0), l.strides(1), dim_of(l, o.dim));
    let (mut lens, places) = (l.lens(0), l.lens(1)[dim]);
    let [before, start] = [-o.start, o.start].map(|s| usize::try_from(s).unwrap_or(0));
    lens[dim] = lens[dim].saturating_sub(before);
    if o.step.0 == 1 {
        lens[dim] = lens[dim].min(places.saturating_sub(start));
    }
    let first = [before * from[dim], start * to[dim]];
    to[dim] *= o.step.0;
    let mut k = copy(l, &lens, (&from, first[0]), (&to, first[1]));
    k.clear = Some(l.whole(1));
    Kernel::Copy(vec![k])
}

/// Sums along a dim: loops over all others.
pub(crate) fn scan(l: &Layout, o: &Cumsum) -> Kernel {
    let (lens, strides) = (l.lens(0), [0, 1].map(|i| l.strides(i)));
    let mut nest = Nest::new(2);
    for (d, &n) in lens.iter().enumerate().filter(|(d, _)| *d != o.dim) {
        nest.push(n, &[strides[0][d], strides[1][d]]);
    }
    let view = |i: usize| {
        let mut v = nest.view(i, i, 0);
        v.strides.push(strides[i][o.dim]);
        v
    };
    Kernel::Scan(Scan {
        elem: l.elem(0),
        extents: nest.extents(),
        len: lens[o.dim],
        reverse: o.reverse,
        x: view(0),
        out: view(1),
    })
}

/// Numbers at random: loops over the result.
pub(crate) fn draw(l: &Layout, o: &Draw) -> Kernel {
    let out = l.ins;
    let (lens, strides, walks) = (l.lens(out), l.strides(out), o.walks());
    let places = (l.ins > 1).then(|| l.strides(1));
    let mut nest = Nest::new(3);
    let mut first = 0;
    for (d, w) in walks.into_iter().enumerate() {
        let [place, index] = match (w, &places) {
            (DrawDim::Place(p), Some(places)) => [places[p], 0],
            (DrawDim::Place(_), None) => panic!("accepts() asks for the place of these dims"),
            (DrawDim::Index(stride), _) => [0, stride],
        };
        first += l.extent(out, d).offset * index;
        nest.push(lens[d], &[strides[d], place, index]);
    }
    Kernel::Draw(kernel::Draw {
        from: o.from,
        stream: rng::stream(&o.stream.0),
        extents: nest.extents(),
        run: crate::fused::adjacent(0),
        place: places.map(|_| nest.view(1, 1, 0)),
        index: nest.view(2, 0, 0).strides,
        first,
        out: nest.view(0, out, 0),
    })
}

/// `take`: loops over the result; the picked dim is the one that only `x` has.
pub(crate) fn take(l: &Layout, rule: &Rule, padding: Padding) -> Kernel {
    let loops = &rule.outs[0];
    let dim = only(&rule.ins[0], [&rule.ins[1], loops]);
    Kernel::Take(pick(l, rule, loops, l.lens(2), (0, dim), padding))
}

/// `index_add`: loops over `x`; the picked dim is the one that only the result has. It is added to the third operand,
/// if there is one, over which the result lies.
pub(crate) fn index_add(l: &Layout, rule: &Rule, padding: Padding) -> Kernel {
    let (loops, out) = (&rule.ins[0], l.ins);
    let dim = only(&rule.outs[0], [&rule.ins[1], loops]);
    let clear = (l.ins == 2).then(|| l.whole(out));
    Kernel::IndexAdd { pick: pick(l, rule, loops, l.lens(0), (out, dim), padding), clear }
}

fn only(all: &Dims, others: [&Dims; 2]) -> usize {
    let alone = |g: &Group| !others.iter().any(|o| o.contains(g));
    all.iter().position(alone).expect("accepts() asks for one such letter")
}

fn pick(
    l: &Layout,
    rule: &Rule,
    loops: &Dims,
    lens: Extents,
    at: (usize, usize),
    padding: Padding,
) -> Pick {
    let dims = [&rule.ins[0], &rule.ins[1], &rule.outs[0]];
    let operands = [0, 1, l.ins];
    let walks = [0, 1, 2].map(|t| l.along(operands[t], dims[t], loops));
    let mut nest = Nest::new(3);
    for (d, &n) in lens.iter().enumerate() {
        nest.push(n, &[walks[0][d], walks[1][d], walks[2][d]]);
    }
    let picked = l.extent(at.0, at.1);
    Pick {
        elem: l.elem(0),
        extents: nest.extents(),
        x: nest.view(0, 0, 0),
        index: nest.view(1, 1, 0),
        out: nest.view(2, l.ins, 0),
        first: picked.offset,
        len: picked.len,
        stride: l.strides(at.0)[at.1],
        without: padding.zero(),
    }
}
