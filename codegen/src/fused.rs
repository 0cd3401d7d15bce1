//! Ops that are one kernel because their parts would cost much more: optimizers, rotary embedding,
//! attention.

use crate::elementwise::{Body, map};
use crate::layout::Layout;
use shardc_ir::kernel::{self, Binary, Heads, Kernel, Unary, View};
use shardc_ir::ops::attention::ROWS;
use shardc_ir::ops::rope::Pairs;
use shardc_ir::ops::{AdamW, OpDef, Sgd};
use shardc_ir::rule::Rule;

/// One step of AdamW: `param - lr (decay · param + m / c1 / (√(v / c2) + eps))`.
pub(crate) fn adamw(l: &Layout, op: &AdamW, ranks: &[usize]) -> Kernel {
    map(l, &op.rule(ranks), |b| {
        let [p, g, m, v, lr, step, by] = [0, 1, 2, 3, 4, 5, 6].map(|i| b.load(i));
        let g = b.mul(g, by);
        let moment = |b: &mut Body, old, beta: f64, new| {
            let log = b.constant(beta.ln());
            let (beta, rest) = (b.constant(beta), b.constant(1.0 - beta));
            let (x, y) = (b.mul(old, beta), b.mul(new, rest));
            // 1 - beta^step, without the cancellation of the first steps.
            let exponent = b.mul(step, log);
            let (power, minus) = (b.unary(Unary::ExpM1, exponent), b.constant(-1.0));
            (b.add(x, y), b.mul(power, minus))
        };
        let (m, c1) = moment(b, m, op.beta1, g);
        let g2 = b.mul(g, g);
        let (v, c2) = moment(b, v, op.beta2, g2);
        let (m_hat, v_hat) = (b.div(m, c1), b.div(v, c2));
        let (root, eps) = (b.unary(Unary::Sqrt, v_hat), b.constant(op.eps));
        let below = b.add(root, eps);
        let update = b.div(m_hat, below);
        let decay = b.constant(op.decay);
        let decayed = b.mul(p, decay);
        let sum = b.add(decayed, update);
        let change = b.mul(lr, sum);
        [b.sub(p, change), m, v]
    })
}

/// One step of stochastic gradient descent.
pub(crate) fn sgd(l: &Layout, op: &Sgd, ranks: &[usize]) -> Kernel {
    map(l, &op.rule(ranks), |b| {
        let [p, g, lr, by] = [0, 1, 2, 3].map(|i| b.load(i));
        let decay = b.constant(op.decay);
        let (g, p_decay) = (b.mul(g, by), b.mul(p, decay));
        let sum = b.add(g, p_decay);
        let change = b.mul(lr, sum);
        [b.sub(p, change)]
    })
}

/// Rows of an operand, without its last, adjacent dim.
pub(crate) fn rows(l: &Layout, operand: usize) -> View {
    let mut strides = l.strides(operand);
    strides.pop();
    View { operand, offset: 0, strides }
}

/// Rotary embedding; `cos` and `sin` are `[s, r]`.
pub(crate) fn rope(l: &Layout, pairs: Pairs) -> Kernel {
    let lens = l.lens(3);
    let table = |operand: usize| {
        let s = l.strides(operand)[0];
        View { operand, offset: 0, strides: [0, s, 0].into_iter().collect() }
    };
    Kernel::Rope(kernel::Rope {
        elem: l.elem(0),
        extents: [lens[0], lens[1], lens[2]],
        width: lens[3],
        turns: l.lens(1)[1],
        pairs,
        x: rows(l, 0),
        cos: table(1),
        sin: table(2),
        out: rows(l, 3),
    })
}

/// Adjacent elements of an operand.
pub(crate) fn adjacent(operand: usize) -> View {
    View { operand, offset: 0, strides: [1].into_iter().collect() }
}

fn heads(l: &Layout, scale: f64, window: Option<usize>, positions: [usize; 2]) -> Heads {
    let (q, k, v) = (l.lens(0), l.lens(1), l.lens(2));
    Heads {
        elem: l.elem(0),
        batch: q[0],
        queries: q[1],
        keys: k[1],
        groups: k[2],
        repeat: q[2].checked_div(k[2]).unwrap_or(0),
        width: q[3],
        value_width: v[3],
        scale: scale as f32,
        window,
        rows: q[1].min(ROWS),
        q_pos: adjacent(positions[0]),
        k_pos: adjacent(positions[1]),
        scratch: adjacent(l.types.len()),
    }
}

/// All dims of an operand.
pub(crate) fn all(l: &Layout, operand: usize) -> View {
    View { operand, offset: 0, strides: l.strides(operand) }
}

/// Operands q, k, v, q_pos, k_pos; results out, lse; then the workspace.
pub(crate) fn attention(l: &Layout, scale: f64, window: Option<usize>) -> Kernel {
    Kernel::Attention(Box::new(kernel::Attention {
        heads: heads(l, scale, window, [3, 4]),
        q: rows(l, 0),
        k: rows(l, 1),
        v: rows(l, 2),
        out: rows(l, 5),
        lse: all(l, 6),
    }))
}

/// Operands q, k, v, lse, d_o, delta, q_pos, k_pos; results d_q, d_k, d_v; then the workspace.
pub(crate) fn attention_grad(l: &Layout, scale: f64, window: Option<usize>) -> Kernel {
    Kernel::AttentionGrad(Box::new(kernel::AttentionGrad {
        heads: heads(l, scale, window, [6, 7]),
        q: rows(l, 0),
        k: rows(l, 1),
        v: rows(l, 2),
        lse: all(l, 3),
        d_out: rows(l, 4),
        delta: all(l, 5),
        d_q: rows(l, 8),
        d_k: rows(l, 9),
        d_v: rows(l, 10),
    }))
}

/// Operands out and lse over some keys, then over others; results out and lse over all of them. The
/// larger lse is bounded from below: then one of -inf weighs 0, and no difference of infinities
/// arises. The weights sum to at least 1 but where both are -inf, and there the output is 0.
pub(crate) fn merge_attention(l: &Layout, rule: &Rule) -> Kernel {
    map(l, rule, |b| {
        let [out_a, lse_a, out_b, lse_b] = [0, 1, 2, 3].map(|i| b.load(i));
        let lowest = b.constant(f64::from(f32::MIN));
        let most = b.binary(Binary::Max, lse_a, lse_b);
        let most = b.binary(Binary::Max, most, lowest);
        let [weight_a, weight_b] = [lse_a, lse_b].map(|lse| {
            let below = b.sub(lse, most);
            b.unary(Unary::Exp, below)
        });
        let sum = b.add(weight_a, weight_b);
        let (part_a, part_b) = (b.mul(out_a, weight_a), b.mul(out_b, weight_b));
        let (parts, one) = (b.add(part_a, part_b), b.constant(1.0));
        let by = b.binary(Binary::Max, sum, one);
        let log = b.unary(Unary::Log, sum);
        [b.div(parts, by), b.add(most, log)]
    })
}
