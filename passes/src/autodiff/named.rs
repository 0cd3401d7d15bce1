//! Ops of a layer by the words of `--recompute ops:`: names of ops, and groups of them.

use super::differentiate::only_weights;
use shardc_ir::func::{Func, Node, Scope, Value, ValueMap};
use shardc_ir::ids::IndexVec;
use shardc_ir::ops::{Kind, Op};
use std::collections::BTreeSet;

/// What is known of the nodes of a forward part.
pub(crate) struct NamedNodes<'a> {
    j: &'a Func,
    forward: usize,
    makers: ValueMap<Option<u32>>,
    /// By value: it is made of weights alone; it is a residual sum.
    weight: ValueMap<bool>,
    residual: ValueMap<bool>,
    /// Scopes in which an `rsqrt` stands, in which products of experts do, and those of a router's region.
    norms: IndexVec<Scope, bool>,
    experts: IndexVec<Scope, bool>,
    routed: IndexVec<Scope, bool>,
    /// By node: it makes what attention reads of what a product has made before.
    latent: Vec<bool>,
}

impl<'a> NamedNodes<'a> {
    pub(crate) fn of(j: &'a Func, forward: usize) -> NamedNodes<'a> {
        let scopes = |of: &dyn Fn(&Node) -> bool| {
            let mut out: IndexVec<Scope, bool> = IndexVec::filled(false, j.scopes.len());
            j.nodes[..forward].iter().filter(|n| of(n)).for_each(|n| out[n.scope] = true);
            out
        };
        let norms = scopes(&|n| matches!(n.op, Op::Rsqrt(_)));
        let experts = scopes(&|n| n.op.facts().kind == Kind::GroupedProduct);
        let routes = j.nodes[..forward].iter().filter(|n| matches!(n.op, Op::Route(_)));
        let regions: BTreeSet<&str> = routes.map(|n| &*j.scope_info(n.scope).path).collect();
        let inside = |n: &Node| {
            let path = &*j.scope_info(n.scope).path;
            let ends = path.match_indices('.').map(|(at, _)| at).chain([path.len()]);
            ends.into_iter().any(|end| regions.contains(&path[..end]))
        };
        let routed = scopes(&inside);
        let weight = only_weights(j);
        let latent = latent(j, forward, &weight);
        let (makers, residual) = (j.makers(), residual(j, forward));
        NamedNodes { j, forward, makers, weight, residual, norms, experts, routed, latent }
    }

    /// True if a node of a layer is among those of a word.
    pub(super) fn has(&self, n: usize, word: &str) -> bool {
        let op = &self.j.nodes[n].op;
        match word {
            "norms" => self.norms[self.j.nodes[n].scope] && self.is_cheap(n),
            "activations" => self.is_activation(n),
            "selective" => self.is_cheap(n),
            // A cut, which is made around all others.
            "elementwise" => false,
            "mla_up_proj" => self.latent[n],
            "moe_act" => self.is_activation(n) && self.experts[self.j.nodes[n].scope],
            "experts" => op.facts().kind == Kind::GroupedProduct || self.has(n, "moe_act"),
            "moe" => self.routed[self.j.nodes[n].scope],
            name => name == op.mnemonic(),
        }
    }

    /// True if a layer has such a node.
    pub(crate) fn any(&self, word: &str) -> bool {
        let in_layer = |n: &usize| self.j.scope_info(self.j.nodes[*n].scope).layer.is_some();
        (0..self.forward).filter(in_layer).any(|n| self.has(n, word))
    }

    fn maker(&self, v: Value) -> Option<usize> {
        self.makers[v].map(|m| m as usize).filter(|&m| m < self.forward)
    }

    /// Its terms would be saved in place of a residual sum.
    fn is_cheap(&self, n: usize) -> bool {
        let node = &self.j.nodes[n];
        !self.residual[node.outs[0]] && cheap(&node.op, |k| self.weight[node.ins[k]])
    }

    fn is_activation(&self, n: usize) -> bool {
        let active = |n: usize| self.j.nodes[n].op.facts().kind == Kind::Activation;
        let mut of = self.j.nodes[n].ins.iter().filter_map(|&v| self.maker(v));
        active(n) || matches!(self.j.nodes[n].op, Op::Mul(_)) && of.any(active)
    }
}

/// By node: whether it stands between a product of what another product of its layer has made, and attention that reads
/// it, the product among them.
fn latent(j: &Func, forward: usize, weight: &ValueMap<bool>) -> Vec<bool> {
    let (mut made, mut read) = (j.per_value(0u8), j.per_value(false));
    let nodes = &j.nodes[..forward];
    let place = |n: &Node| (j.stage_of(n), j.scope_info(n.scope).layer);
    let makers = j.makers();
    let within =
        |n: &Node, v: Value| makers[v].is_some_and(|m| place(&j.nodes[m as usize]) == place(n));
    for n in nodes.iter().filter(|n| j.scope_info(n.scope).layer.is_some()) {
        let own = n.ins.iter().filter(|v| within(n, **v)).map(|v| made[*v]).max().unwrap_or(0);
        let kind = n.op.facts().kind;
        let multiplies = kind == Kind::Product && n.ins.iter().any(|v| weight[*v]);
        let all = if kind == Kind::Attention { 0 } else { own.saturating_add(multiplies.into()) };
        n.outs.iter().for_each(|o| made[*o] = all);
    }
    let mut out = vec![false; forward];
    for (i, n) in nodes.iter().enumerate().rev() {
        let attends = n.op.facts().kind == Kind::Attention;
        let feeds = !attends && n.outs.iter().any(|o| read[*o]);
        out[i] = feeds && n.outs.iter().any(|o| made[*o] > 1);
        if attends || feeds {
            n.ins.iter().filter(|v| within(n, **v)).for_each(|v| read[*v] = true);
        }
    }
    out
}

/// By value: whether it is a residual sum: what enters a layer, with what the layer has added to it.
fn residual(j: &Func, forward: usize) -> ValueMap<bool> {
    let (makers, mut residual) = (j.makers(), j.per_value(false));
    let layer = |n: &Node| j.scope_info(n.scope).layer;
    for n in j.nodes[..forward].iter().filter(|n| n.op.is_sum()) {
        let enters = |v| makers[v].is_some_and(|m| layer(&j.nodes[m as usize]) != layer(n));
        let is = |v: &Value| j.ty(*v).dims == j.ty(n.outs[0]).dims && (residual[v] || enters(*v));
        residual[n.outs[0]] = n.ins.iter().any(is);
    }
    residual
}

/// True for ops that cost little beside the products of a layer.
fn cheap(op: &Op, is_weight: impl Fn(usize) -> bool) -> bool {
    match op.facts().kind {
        Kind::Product => !is_weight(0) && !is_weight(1),
        Kind::GroupedProduct
        | Kind::Attention
        | Kind::Recurrence
        | Kind::Lookup
        | Kind::Scatter => false,
        Kind::Layout => op.collective().is_none(),
        Kind::Constant
        | Kind::Elementwise
        | Kind::Activation
        | Kind::Conversion
        | Kind::Reduction
        | Kind::Movement
        | Kind::Choice
        | Kind::Copies
        | Kind::Update => true,
    }
}
