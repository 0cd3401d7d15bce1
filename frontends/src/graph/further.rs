//! Layers that predict tokens behind the next (DeepSeek-AI, 2024, *DeepSeek-V3*, 2.2): the d-th joins what comes from the
//! layer before with the embedding of the token d further on, and is scored against the label d further on.
//!
//! Rows stay as long as they are. Embeddings move back by d, with zeros behind the last; what a layer makes moves
//! forward by d, so that it stands at the label that it is scored against, and labels that have no d tokens before them
//! in their document count for nothing. No such position is seen by one that counts.

use super::block::{self, Cx};
use super::loss;
use super::parts::{self, rule, spread};
use super::{looked_up, projected, weights};
use crate::family::Family;
use crate::sizes::Arch;
use shardc_ir::attr::Usual;
use shardc_ir::builder::Builder;
use shardc_ir::func::{Port, Role, RoleKind, Value};
use shardc_ir::ops::{AtLeast, Concat, Div, Mul, Narrow, Pad, ReduceSum, Scale};

/// What the layers read beside the hidden state.
#[derive(Clone, Copy)]
pub(super) struct Depths {
    /// Tokens and labels [b, s].
    pub ids: Value,
    pub targets: Value,
    /// How many tokens of its document, or else its row, are before each: [s], or [b, s].
    pub offsets: Value,
    /// How many labels of a microbatch in the mean have 1, 2, … tokens before them.
    pub scored: Value,
}

/// Losses of the layers, each over its own labels and times its weight, as results; and the biases of routers with the
/// copies that chose each expert. `x` is the normed hidden state, `of_layer` what a layer needs by its number.
pub(super) fn losses<'a>(
    b: &mut Builder,
    f: &Family,
    arch: &Arch,
    params: &weights::Params,
    (x, of): (Value, Depths),
    of_layer: &dyn Fn(usize) -> Cx<'a>,
) -> (Vec<Port>, Vec<(Value, Value)>) {
    let (seq, hidden) = (b.ty(x).dims[1].size, arch.facts.hidden);
    let (mut ports, mut counts, mut before) = (vec![], vec![], x);
    for (i, p) in params.mtp.iter().enumerate() {
        let depth = i + 1;
        let moved = |by: i64| Pad { dim: Usual(1), ..Pad::new(by, seq) };
        b.enter(&p.scope);
        let next = looked_up(b, arch, params, of.ids);
        let next = b.push("next", moved(-(depth as i64)), &[next]);
        b.note("the embedding of the token so far behind");
        let next = parts::norm(b, &p.norms[0], arch.eps, next, "bsh");
        let own = parts::norm(b, &p.norms[1], arch.eps, before, "bsh");
        b.enter(&p.scope);
        let joined = b.push("joined", Concat::new(2 * hidden), &[next, own]);
        let x = parts::linear(b, "hidden", &p.join, joined, 'c', 'h');
        b.enter(&p.scope);
        let behind = b.push("behind", AtLeast { bound: depth as f64 }, &[of.offsets]);
        let counted = match b.ty(behind).rank() {
            1 => {
                let back =
                    b.push("counted", Pad { dim: Usual(0), ..moved(-(depth as i64)) }, &[behind]);
                Some(back)
            }
            _rows => Some(b.push("counted", moved(-(depth as i64)), &[behind])),
        };
        let cx = Cx { counted, ..of_layer(arch.facts.layers + i) };
        let x = block::attention(b, &cx, &p.block, x);
        let (x, told) = block::feed(b, &cx, &p.block, x);
        counts.extend(told.chosen);
        before = parts::norm(b, &p.norm, arch.eps, x, "bsh");
        b.enter(&p.scope);
        let x = b.push("predicts", moved(depth as i64), &[before]);
        let logits = projected(b, f, arch, params, x);
        let mut scores = loss::scores(b, logits, of.targets, &loss::Scoring::default());
        let by = if b.ty(behind).rank() == 1 { "bs,s->bs" } else { "bs,bs->bs" };
        let rank = b.ty(behind).rank();
        scores.valid =
            b.push("valid", Mul { rule: spread(by, &[2, rank]) }, &[scores.valid, behind]);
        let sum = loss::sum_of(b, &scores);
        let n = b.push("scored", Narrow::new(i, 1), &[of.scored]);
        let n = b.push("scored", ReduceSum { rule: rule("d->", &[1]) }, &[n]);
        let mean = b.push("mtp_loss", Div::same(), &[sum, n]);
        let value = b.push("mtp_loss", Scale { by: arch.mtp.1 }, &[mean]);
        let name = format!("mtp_loss.{depth}");
        ports.push(Port { value, role: Some(Role::new(RoleKind::Sum, name.as_str())) });
    }
    (ports, counts)
}
