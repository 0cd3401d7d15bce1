//! Layers that predict tokens behind the next (DeepSeek-AI, 2024, *DeepSeek-V3*, 2.2): the d-th joins what comes from the
//! layer before with the embedding of the token d further on, and is scored against the label d further on.
//!
//! Rows stay as long as they are: tokens and labels further on are inputs, negative where there is none. Such a token has
//! the embedding 0, chooses no expert, and no position that counts sees it.

use super::block::{self, Cx};
use super::experts::{self, RouterStats};
use super::loss;
use super::parts::{self, letter_sizes, rule};
use super::{looked_up, projected, weights};
use crate::family::Family;
use crate::sizes::Arch;
use shardc_ir::builder::Builder;
use shardc_ir::func::{Port, Role, RoleKind, Value};
use shardc_ir::ops::{Add, AtLeast, Concat, Div, Narrow, ReduceSum, Reshape, Scale};

/// What the layers read beside the hidden state.
#[derive(Clone, Copy)]
pub(super) struct Depths {
    /// Tokens and labels 1, 2, … further on [b, s, d].
    pub ids: Value,
    pub targets: Value,
    /// How many of these labels a microbatch has in the mean [d].
    pub scored: Value,
}

/// What the layers make.
pub(super) struct Losses {
    /// A loss of each, over its own labels and times its weight.
    pub ports: Vec<Port>,
    pub told: RouterStats,
    /// How many tokens chose experts in all layers that have some, if any do.
    pub tokens: Option<Value>,
    /// Biases of routers with the copies that chose each expert.
    pub counts: Vec<(Value, Value)>,
}

/// Those of one depth, of what is [b, s, d].
fn at_depth(b: &mut Builder, all: Value, i: usize) -> Value {
    let own = b.push("ahead", Narrow::new(i, 1), &[all]);
    b.push("ahead", Reshape { rule: rule("bsd->b(sd)", &[3]), sizes: letter_sizes(&[]) }, &[own])
}

/// Builds the layers; `x` is the normed hidden state, `of_layer` what a layer needs by its number.
pub(super) fn losses<'a>(
    b: &mut Builder,
    f: &Family,
    arch: &Arch,
    params: &weights::Params,
    (x, of): (Value, Depths),
    of_layer: &dyn Fn(usize) -> Cx<'a>,
) -> Losses {
    let hidden = arch.facts.hidden;
    let mut made =
        Losses { ports: vec![], told: RouterStats::default(), tokens: None, counts: vec![] };
    let mut before = x;
    for (i, p) in params.mtp.iter().enumerate() {
        b.enter(&p.scope);
        let ids = at_depth(b, of.ids, i);
        let next = looked_up(b, arch, params, ids);
        b.note("the embedding of the token so far behind");
        let next = parts::norm(b, &p.norms[0], arch.eps, next, "bsh");
        let own = parts::norm(b, &p.norms[1], arch.eps, before, "bsh");
        b.enter(&p.scope);
        let joined = b.push("joined", Concat::new(2 * hidden), &[next, own]);
        let x = parts::linear(b, "hidden", &p.join, joined, 'c', 'h');
        // What has no token so far behind is as padding is.
        let cx = Cx { padding: Some(ids), ..of_layer(arch.facts.layers + i) };
        let (x, told) = block::in_turn(b, &cx, &p.block, x, drop);
        made.counts.extend(told.chosen);
        if arch.sparse[arch.facts.layers + i] && (told.load.is_some() || told.z.is_some()) {
            let is = b.push("real", AtLeast { bound: 0.0 }, &[ids]);
            let n = b.push("tokens", ReduceSum { rule: rule("bs->", &[2]) }, &[is]);
            made.tokens = Some(match made.tokens {
                Some(others) => b.push("tokens", Add::same(), &[others, n]),
                None => n,
            });
        }
        made.told = experts::both(b, made.told, told);
        before = parts::norm(b, &p.norm, arch.eps, x, "bsh");
        let logits = projected(b, f, arch, params, before);
        b.enter(&p.scope);
        let targets = at_depth(b, of.targets, i);
        let sum = loss::sum_of_losses(b, logits, targets);
        let n = b.push("scored", Narrow::new(i, 1), &[of.scored]);
        let n = b.push("scored", ReduceSum { rule: rule("d->", &[1]) }, &[n]);
        let mean = b.push("mtp_loss", Div::same(), &[sum, n]);
        let value = b.push("mtp_loss", Scale { by: arch.mtp.1 }, &[mean]);
        let name = format!("{}{}", shardc_ir::func::FURTHER, i + 1);
        made.ports.push(Port { value, role: Some(Role::new(RoleKind::Sum, name.as_str())) });
    }
    made
}
