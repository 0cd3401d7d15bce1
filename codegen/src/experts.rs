//! Ops of mixtures of experts: choices, places in buffers, products by expert.

use crate::fused::{adjacent, all, rows};
use crate::layout::Layout;
use shardc_ir::kernel::{self, Copies, Extents, Grouped, Kernel, Product, View};
use shardc_ir::ops::grouped_dot::ROWS;
use shardc_ir::ops::{Route, TopK};

/// `top_k`: loops over the result's dims but the one that counts places.
pub(crate) fn top_k(l: &Layout, op: &TopK) -> Kernel {
    let (from, to, k) = op.dims().expect("accepts() asks for one letter");
    let rule = &op.rule.0;
    let mut loops = rule.outs[0].clone();
    loops.remove(to);
    let (mut extents, mut out) = (l.lens(1), l.strides(1));
    extents.remove(to);
    let out_stride = out.remove(to);
    let walk = |operand: usize, strides: Extents| View { operand, offset: 0, strides };
    Kernel::TopK(kernel::TopK {
        extents,
        n: l.lens(0)[from],
        k,
        elem: l.elem(0),
        x: walk(0, l.along(0, &rule.ins[0], &loops)),
        x_stride: l.strides(0)[from],
        out: walk(1, out),
        out_stride,
    })
}

/// `route`: an index in; slots and counts out.
pub(crate) fn route(l: &Layout, op: &Route) -> Kernel {
    let copies = l.lens(0);
    let [groups, experts] = op.groups();
    Kernel::Route(Box::new(kernel::Route {
        copies: [copies[0], copies[1], copies[2]],
        first_shard: l.extent(0, 0).offset,
        groups,
        experts,
        rows: op.rows,
        capacity: op.capacity,
        index: all(l, 0),
        slot: all(l, 1),
        counts: all(l, 2),
    }))
}

/// Tokens and the rows of their copies; which operands or results are buffer, tokens and gates.
/// Slots are operand 1.
pub(crate) fn copies(l: &Layout, [buffer, tokens, gates]: [usize; 3]) -> Box<Copies> {
    let (b, slots) = (l.lens(buffer), l.lens(1));
    Box::new(Copies {
        copies: [slots[0], slots[1], slots[2]],
        groups: b[0],
        rows: b[2],
        width: b[3],
        buffer: rows(l, buffer),
        buffer_elem: l.elem(buffer),
        tokens: rows(l, tokens),
        token_elem: l.elem(tokens),
        slot: all(l, 1),
        gates: all(l, gates),
        gate_elem: l.elem(gates),
    })
}

/// A product by expert; which operands or results are x, y and w. Counts are operand 1, and
/// the workspace comes last.
pub(crate) fn grouped(l: &Layout, product: Product, [x, y, w]: [usize; 3]) -> Kernel {
    let (b, counts) = (l.lens(x), l.lens(1));
    let gathered = if b[1] > 1 { ROWS.min(b[1] * b[2]) } else { 0 };
    Kernel::Grouped(Box::new(Grouped {
        product,
        groups: counts[0],
        experts: counts[1],
        shards: counts[2],
        rows: b[2],
        x_width: b[3],
        y_width: l.lens(y)[3],
        counts: all(l, 1),
        x: rows(l, x),
        x_elem: l.elem(x),
        y: rows(l, y),
        y_elem: l.elem(y),
        w: rows(l, w),
        w_elem: l.elem(w),
        gathered,
        scratch: adjacent(l.types.len()),
    }))
}
