//! Ops that are one kernel because their parts would cost much more: rotary embedding, attention,
//! recurrences.

use crate::layout::Layout;
use shardc_ir::kernel::{self, Heads, KeptAt, Kernel, Recurrent, View};
use shardc_ir::ops::attention::{Behind, ROWS};
use shardc_ir::ops::rope::Pairs;
use shardc_ir::ops::scan;
use shardc_ir::ops::{Attention, AttentionGrad, Scan, ScanGrad};
use shardc_ir::rng;

/// Rows of an operand, without its last, adjacent dim.
pub(crate) fn rows(l: &Layout, operand: usize) -> View {
    let mut strides = l.strides(operand);
    strides.pop();
    View { operand, offset: 0, strides }
}

/// Rotary embedding; `cos` and `sin` are `[s, r]` or `[b, s, r]`.
pub(crate) fn rope(l: &Layout, pairs: Pairs) -> Kernel {
    let lens = l.lens(3);
    let table = |operand: usize| {
        let all = l.strides(operand);
        let s = all[all.len() - 2];
        let b = if all.len() == 3 { all[0] } else { 0 };
        View { operand, offset: 0, strides: [b, s, 0].into_iter().collect() }
    };
    Kernel::Rope(kernel::Rope {
        elem: l.elem(0),
        extents: [lens[0], lens[1], lens[2]],
        width: lens[3],
        turns: *l.lens(1).last().expect("pairs"),
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

fn heads(l: &Layout, o: &Attention, positions: [usize; 2], behind: Behind) -> Heads {
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
        scale: o.scale as f32,
        softcap: o.softcap.map(|c| c as f32),
        mask: o.mask,
        slopes: behind.slopes.map(adjacent),
        bias: behind.bias.map(|i| (rows(l, i), l.lens(i)[1])),
        segments: behind.segments.map(|both| both.map(|i| all(l, i))),
        kept: o.kept.as_ref().zip(behind.drawn).map(|(kept, [run, place])| KeptAt {
            rate: kept.rate,
            stream: rng::stream(&kept.stream.0),
            run: adjacent(run),
            place: all(l, place),
            first_head: l.extent(0, 2).offset,
        }),
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

/// Operands q, k, v, q_pos, k_pos, and those behind; results out, lse; then the workspace.
pub(crate) fn attention(l: &Layout, o: &Attention) -> Kernel {
    Kernel::Attention(Box::new(kernel::Attention {
        heads: heads(l, o, [3, 4], o.behind()),
        q: rows(l, 0),
        k: rows(l, 1),
        v: rows(l, 2),
        out: rows(l, l.ins),
        lse: all(l, l.ins + 1),
    }))
}

/// Operands q, k, v, lse, d_o, delta, q_pos, k_pos, and those behind; results d_q, d_k, d_v, and d_bias if there
/// is a bias; then the workspace.
pub(crate) fn attention_grad(l: &Layout, o: &AttentionGrad) -> Kernel {
    Kernel::AttentionGrad(Box::new(kernel::AttentionGrad {
        heads: heads(l, &o.forward(), [6, 7], o.behind()),
        q: rows(l, 0),
        k: rows(l, 1),
        v: rows(l, 2),
        lse: all(l, 3),
        d_out: rows(l, 4),
        delta: all(l, 5),
        d_q: rows(l, l.ins),
        d_k: rows(l, l.ins + 1),
        d_v: rows(l, l.ins + 2),
        d_bias: o.bias.then(|| rows(l, l.ins + 3)),
    }))
}

/// The tokens of a piece, and how many pieces a rank has of a row.
fn pieces(l: &Layout, o: &Scan) -> [usize; 2] {
    o.pieces_of(l.types[0].dims[1].size, l.lens(0)[1])
}

/// A view in which each piece of a row is a row: of tokens, or of states.
fn by_piece(l: &Layout, o: &Scan, mut view: View) -> View {
    let [tokens, each] = pieces(l, o);
    if o.pieces.0.is_empty() {
        return view;
    }
    // Pieces of states are a dim of their own.
    let of_states = l.types[view.operand].rank() == 5;
    let apart = if of_states { view.strides.remove(1) } else { view.strides[1] * tokens };
    if each > 1 {
        assert_eq!(view.strides[0], apart * each, "rows are adjacent");
        view.strides[0] = apart;
    }
    view
}

fn recurrent(l: &Layout, o: &Scan, behind: scan::ScanOperands) -> Recurrent {
    let (q, v) = (l.lens(0), l.lens(3));
    let [tokens, each] = pieces(l, o);
    let rows = |l: &Layout, i| by_piece(l, o, rows(l, i));
    let all = |l: &Layout, i| by_piece(l, o, all(l, i));
    Recurrent {
        delta: o.delta.0,
        batch: q[0] * each,
        tokens,
        heads: q[2],
        width: q[3],
        value_width: v[3],
        q: rows(l, 0),
        k: rows(l, 1),
        g: all(l, 2),
        v: rows(l, 3),
        beta: behind.beta.map(|i| all(l, i)),
        segments: behind.segments.map(|i| all(l, i)),
        start: behind.start.map(|i| rows(l, i)),
        scratch: adjacent(l.types.len()),
    }
}

/// Operands q, k, g, v, and those behind; results out, end; then the workspace.
pub(crate) fn scan(l: &Layout, o: &Scan) -> Kernel {
    Kernel::Recurrence(Box::new(kernel::Recurrence {
        of: recurrent(l, o, o.behind()),
        out: by_piece(l, o, rows(l, l.ins)),
        end: by_piece(l, o, rows(l, l.ins + 1)),
    }))
}

/// Operands q, k, g, v, d_o, d_end, and those behind; results d_q, d_k, d_g, d_v, and d_beta and d_start, if there
/// are such; then the workspace.
pub(crate) fn scan_grad(l: &Layout, o: &ScanGrad) -> Kernel {
    let (first, of) = (l.ins, o.forward());
    let rows = |l: &Layout, i| by_piece(l, &of, rows(l, i));
    let all = |l: &Layout, i| by_piece(l, &of, all(l, i));
    Kernel::RecurrenceGrad(Box::new(kernel::RecurrenceGrad {
        of: recurrent(l, &of, o.behind()),
        d_out: rows(l, 4),
        d_end: rows(l, 5),
        d_q: rows(l, first),
        d_k: rows(l, first + 1),
        d_g: all(l, first + 2),
        d_v: rows(l, first + 3),
        d_beta: o.delta.0.then(|| all(l, first + 4)),
        d_start: o.start.then(|| rows(l, first + 4 + usize::from(o.delta.0))),
    }))
}
