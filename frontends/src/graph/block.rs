//! The two halves of a block: attention and MLP, each after a norm and beside a residual.

use super::experts::{self, MoeParams, RouterStats};
use super::letters;
use super::parts::{self, LinearParams, NormParams};
use super::recurrent::{self, RecurrentParams};
use crate::family::{Activation, NormedOver};
use crate::sizes::Arch;
use shardc_ir::builder::Builder;
use shardc_ir::func::Value;
use shardc_ir::ops::{
    Add, Attention, Clamp, Concat, Erf, Expand, Gelu, Logistic, Mask, Mul, Narrow, Rope, Scale,
    Shift, Silu, Sub,
};

/// The parameters of one block.
pub(super) struct Block {
    /// Scope of the block.
    pub scope: String,
    pub mixing: Option<Mixing>,
    pub mlp_norm: Option<NormParams>,
    pub mlp: Feed,
    pub norm_behind_mlp: Option<NormParams>,
}

/// The parameters of the first half: attention, or a recurrence.
pub(super) struct Mixing {
    pub scope: String,
    pub norm: Option<NormParams>,
    pub heads: QkvParams,
    /// [n].
    pub sinks: Option<Value>,
    pub o: LinearParams,
    pub norm_behind: Option<NormParams>,
}

/// What makes queries, keys and values.
pub(super) enum QkvParams {
    Plain {
        q: LinearParams,
        k: LinearParams,
        v: LinearParams,
        norms: Option<HeadNormParams>,
        /// Behind the queries of each head stands what the output is multiplied by the sigmoid of.
        gated: bool,
    },
    /// Makes q, k and v of each head, one after the other.
    Joined(LinearParams),
    Latent {
        /// To the latent vector of queries, and its norm, if there is one.
        q_down: Option<(LinearParams, NormParams)>,
        q: LinearParams,
        kv_down: LinearParams,
        kv_norm: NormParams,
        kv_up: LinearParams,
    },
    /// None of these: a state that is walked along the tokens.
    Recurrent(Box<RecurrentParams>),
}

/// Norms of q and of k.
pub(super) struct HeadNormParams {
    pub over: NormedOver,
    /// Of what has turned.
    pub behind: bool,
    pub norms: [NormParams; 2],
}

/// What stands in the second half.
pub(super) enum Feed {
    Nothing,
    MlpParams(MlpParams),
    Experts(Box<MoeParams>),
}

pub(super) struct MlpParams {
    pub scope: String,
    pub gate: Option<LinearParams>,
    pub up: LinearParams,
    pub down: LinearParams,
}

/// Cosines and sines [s, r], or [b, s, r].
#[derive(Clone, Copy)]
pub(super) struct Rotary {
    pub cos: Value,
    pub sin: Value,
}

/// What a block needs beside its parameters.
pub(super) struct Cx<'a> {
    pub arch: &'a Arch,
    pub rotary: Option<Rotary>,
    /// Factor of queries [s].
    pub growth: Option<Value>,
    pub positions: Value,
    pub mask: Mask,
    /// Documents that do not see each other.
    pub segments: Option<Value>,
    /// Which tokens before it are of a token's document, for convolutions.
    pub neighbours: &'a [Value],
    /// Negative numbers of those tokens [b, s] that experts leave out.
    pub padding: Option<Value>,
    /// Of what is added to the residual stream.
    pub dropout: Option<parts::Dropout>,
    /// Of probabilities of attention.
    pub attention_dropout: Option<parts::Dropout>,
}

/// The halves that a block has, one after the other, and what its router tells; `between` is told what is between two.
pub(super) fn in_turn(
    b: &mut Builder,
    cx: &Cx,
    p: &Block,
    x: Value,
    between: impl FnOnce(Value),
) -> (Value, RouterStats) {
    let mixed = attention(b, cx, p, x);
    let x = mixed.unwrap_or(x);
    let Some(fed) = feed(b, cx, p, x) else { return (x, RouterStats::default()) };
    if mixed.is_some() {
        between(x);
    }
    fed
}

/// x + o(attention(norm(x))); with a norm behind it, that of the second term. `None` where there is nothing of it.
fn attention(b: &mut Builder, cx: &Cx, p: &Block, x: Value) -> Option<Value> {
    let m = p.mixing.as_ref()?;
    let h = normed(b, cx, m.norm.as_ref(), x);
    let o = attended(b, cx, m, h);
    Some(added(b, cx, p, x, o))
}

/// The residual stream and what a half of a block adds to it.
fn added(b: &mut Builder, cx: &Cx, p: &Block, x: Value, y: Value) -> Value {
    b.enter(&p.scope);
    let y = parts::scaled(b, "added", cx.arch.factors[1], y);
    b.push("hidden", Add::same(), &[x, y])
}

/// What attention adds to the residual stream, of a normed hidden state.
fn attended(b: &mut Builder, cx: &Cx, p: &Mixing, h: Value) -> Value {
    let a = match &p.heads {
        QkvParams::Recurrent(r) => recurrent::heads(b, cx, r, &p.scope, h),
        _other => {
            let a = of_heads(b, cx, p, h);
            parts::reshape(b, "attn", "bsnd->bs(nd)", b'n', cx.arch.facts.heads, a)
        }
    };
    let o = parts::linear(b, "attn_out", &p.o, a, 'o', 'h');
    let o = parts::dropped(b, cx.dropout, &p.scope, o, cx.arch.facts.hidden);
    normed(b, cx, p.norm_behind.as_ref(), o)
}

/// The outputs of the heads of attention, [b, s, n, d].
fn of_heads(b: &mut Builder, cx: &Cx, p: &Mixing, h: Value) -> Value {
    let mut gate = None;
    let [q, k, v] = match &p.heads {
        QkvParams::Recurrent(_) => panic!("a recurrence has no attention"),
        QkvParams::Plain { q, k, v, norms, gated } => {
            let made = plain(b, cx, p, [q, k, v], (norms.as_ref(), *gated), h);
            gate = made.1;
            made.0
        }
        QkvParams::Joined(qkv) => joined(b, cx, p, qkv, h),
        QkvParams::Latent { q_down, q, kv_down, kv_norm, kv_up } => {
            latent(b, cx, p, (q_down.as_ref(), q), (kv_down, kv_norm, kv_up), h)
        }
    };
    let kept = cx.attention_dropout.map(|d| d.of_attention(&p.scope));
    let Arch { scale, softcap, .. } = *cx.arch;
    let segments = cx.segments.is_some();
    let op =
        Attention { scale, mask: cx.mask, softcap, slopes: false, bias: false, segments, kept };
    let mut ins = vec![q, k, v, cx.positions, cx.positions];
    ins.extend(cx.segments.iter().flat_map(|&of| [of, of]));
    ins.extend(cx.attention_dropout.iter().flat_map(|d| [d.drawn.run, d.drawn.places]));
    let made = b.push_n(&["attn", "lse"], op, &ins);
    let a = p.sinks.map_or(made[0], |sinks| {
        let rule = parts::spread("bsn,n->bsn", &[3, 1]);
        let above = b.push("above", Sub { rule }, &[made[1], sinks]);
        let share = b.push("share", Logistic {}, &[above]);
        b.note("what the softmax leaves to the keys beside the sink");
        b.push("attn", Mul::by("bsnd,bsn->bsnd", &[4, 3]), &[made[0], share])
    });
    let Some(gate) = gate else { return a };
    let gate = b.push("gate", Logistic {}, &[gate]);
    b.push("attn", Mul::same(), &[a, gate])
}

fn normed(b: &mut Builder, cx: &Cx, norm: Option<&NormParams>, x: Value) -> Value {
    norm.map_or(x, |n| parts::norm(b, n, cx.arch.eps, x, "bsh"))
}

/// x and what attention and MLP each make of it, after norms of their own or the one of attention; and what the
/// MLP's router tells.
pub(super) fn beside(b: &mut Builder, cx: &Cx, p: &Block, x: Value) -> (Value, RouterStats) {
    let m = p.mixing.as_ref().expect("halves that stand side by side are two");
    let h = normed(b, cx, m.norm.as_ref(), x);
    let o = attended(b, cx, m, h);
    let h = p.mlp_norm.as_ref().map_or(h, |n| parts::norm(b, n, cx.arch.eps, x, "bsh"));
    let (y, told) = fed(b, cx, p, h);
    b.enter(&p.scope);
    // The sum of both first: of parts of sums over ranks it is one sum.
    let both = b.push("added", Add::same(), &[y, o]);
    (added(b, cx, p, x, both), told)
}

fn turned(b: &mut Builder, cx: &Cx, hint: &'static str, x: Value) -> Value {
    match cx.rotary {
        None => x,
        Some(r) => b.push(hint, Rope { pairs: cx.arch.pairs }, &[x, r.cos, r.sin]),
    }
}

fn plain(
    b: &mut Builder,
    cx: &Cx,
    p: &Mixing,
    [q, k, v]: [&LinearParams; 3],
    (norms, gated): (Option<&HeadNormParams>, bool),
    h: Value,
) -> ([Value; 3], Option<Value>) {
    let facts = &cx.arch.facts;
    let of =
        |over, behind| norms.filter(|n| n.over == over && n.behind == behind).map(|n| &n.norms);
    let each = of(NormedOver::Head, false).or(of(NormedOver::OwnHead, false));
    let all = of(NormedOver::All, false);
    let behind = of(NormedOver::Head, true).or(of(NormedOver::Bare, true));
    let q = parts::linear(b, "q", q, h, 'h', 'o');
    let k = parts::linear(b, "k", k, h, 'h', 'o');
    let v = parts::linear(b, "v", v, h, 'h', 'o');
    let q = all.map_or(q, |n| parts::norm(b, &n[0], cx.arch.eps, q, "bso"));
    let k = all.map_or(k, |n| parts::norm(b, &n[1], cx.arch.eps, k, "bso"));
    b.enter(&p.scope);
    let [q, k, v] = [("q", q), ("k", k), ("v", v)].map(|(hint, x)| match cx.arch.clip {
        None => x,
        Some(c) => b.push(hint, Clamp { lo: -c, hi: c }, &[x]),
    });
    let q = parts::reshape(b, "q", "bs(nd)->bsnd", b'n', facts.heads, q);
    let d = facts.head_dim;
    let gate = gated.then(|| b.push("gate", Narrow::new(d, d), &[q]));
    let q = if gated { b.push("q", Narrow::new(0, d), &[q]) } else { q };
    let k = parts::reshape(b, "k", "bs(gd)->bsgd", b'g', facts.kv_heads, k);
    let v = parts::reshape(b, "v", "bs(gd)->bsgd", b'g', facts.kv_heads, v);
    let q = each.map_or(q, |n| parts::norm(b, &n[0], cx.arch.eps, q, "bsnd"));
    let k = each.map_or(k, |n| parts::norm(b, &n[1], cx.arch.eps, k, "bsgd"));
    b.enter(&p.scope);
    let (q, k) = (turned(b, cx, "q", q), turned(b, cx, "k", k));
    let q = behind.map_or(q, |n| parts::norm(b, &n[0], cx.arch.eps, q, "bsnd"));
    let k = behind.map_or(k, |n| parts::norm(b, &n[1], cx.arch.eps, k, "bsgd"));
    let q = cx.growth.map_or(q, |by| {
        b.enter(&p.scope);
        let of = letters(b, by);
        b.push("q", Mul::by(&format!("bsnd,{of}->bsnd"), &[4, of.len()]), &[q, by])
    });
    ([q, k, v], gate)
}

fn joined(b: &mut Builder, cx: &Cx, p: &Mixing, qkv: &LinearParams, h: Value) -> [Value; 3] {
    let (n, d) = (cx.arch.facts.heads, cx.arch.facts.head_dim);
    let all = parts::linear(b, "qkv", qkv, h, 'h', 'o');
    b.enter(&p.scope);
    let all = parts::reshape(b, "qkv", "bs(nd)->bsnd", b'n', n, all);
    let q = b.push("q", Narrow::new(0, d), &[all]);
    let k = b.push("k", Narrow::new(d, d), &[all]);
    let v = b.push("v", Narrow::new(2 * d, d), &[all]);
    [turned(b, cx, "q", q), turned(b, cx, "k", k), v]
}

/// Added to the mean square in the norms of latent vectors, whatever the config says.
const LATENT_EPS: f64 = 1e-6;

fn latent(
    b: &mut Builder,
    cx: &Cx,
    p: &Mixing,
    (q_down, q): (Option<&(LinearParams, NormParams)>, &LinearParams),
    (kv_down, kv_norm, kv_up): (&LinearParams, &NormParams, &LinearParams),
    h: Value,
) -> [Value; 3] {
    let (n, sizes) = (cx.arch.facts.heads, cx.arch.latent.expect("a family with latent attention"));
    let (still, turning) = (sizes.still, sizes.turning);
    let q = match q_down {
        None => parts::linear(b, "q", q, h, 'h', 'o'),
        Some((down, norm)) => {
            let c = parts::linear(b, "q_latent", down, h, 'h', 'r');
            let c = parts::norm(b, norm, LATENT_EPS, c, "bsr");
            parts::linear(b, "q", q, c, 'r', 'o')
        }
    };
    let all = parts::linear(b, "kv_latent", kv_down, h, 'h', 'r');
    b.enter(&p.scope);
    let c = b.push("kv_latent", Narrow::new(0, sizes.kv_rank), &[all]);
    let c = parts::norm(b, kv_norm, LATENT_EPS, c, "bsr");
    let kv = parts::linear(b, "kv", kv_up, c, 'r', 'o');
    b.enter(&p.scope);
    let q = parts::reshape(b, "q", "bs(nd)->bsnd", b'n', n, q);
    let q_still = b.push("q_still", Narrow::new(0, still), &[q]);
    let q_turned = b.push("q_turned", Narrow::new(still, turning), &[q]);
    let q_turned = turned(b, cx, "q_turned", q_turned);
    let q = b.push("q", Concat::new(still + turning), &[q_still, q_turned]);
    // One head turns for all.
    let k_turned = b.push("k_turned", Narrow::new(sizes.kv_rank, turning), &[all]);
    let k_turned = parts::reshape(b, "k_turned", "bs(gd)->bsgd", b'g', 1, k_turned);
    let k_turned = turned(b, cx, "k_turned", k_turned);
    let k_turned = parts::reshape(b, "k_turned", "bsgd->bs(gd)", b'g', 1, k_turned);
    let heads = parts::letter_sizes(&[('n', n)]);
    let expand = Expand { rule: parts::rule("bsd->bsnd", &[3]), sizes: heads };
    let k_turned = b.push("k_turned", expand, &[k_turned]);
    let kv = parts::reshape(b, "kv", "bs(nd)->bsnd", b'n', n, kv);
    let k_still = b.push("k_still", Narrow::new(0, still), &[kv]);
    let v = b.push("v", Narrow::new(still, sizes.value), &[kv]);
    [q, b.push("k", Concat::new(still + turning), &[k_still, k_turned]), v]
}

/// x + mlp(norm(x)), or the experts' in its place, again with the norm behind it; and what their
/// router tells. `None` where there is nothing of it.
fn feed(b: &mut Builder, cx: &Cx, p: &Block, x: Value) -> Option<(Value, RouterStats)> {
    if let Feed::Nothing = p.mlp {
        return None;
    }
    let h = normed(b, cx, p.mlp_norm.as_ref(), x);
    let (y, told) = fed(b, cx, p, h);
    Some((added(b, cx, p, x, y), told))
}

/// What the MLP, or the experts, add to the residual stream, of a normed hidden state.
fn fed(b: &mut Builder, cx: &Cx, p: &Block, h: Value) -> (Value, RouterStats) {
    let (y, told, scope) = match &p.mlp {
        Feed::Nothing => panic!("a block without a second half makes nothing of it"),
        Feed::MlpParams(m) => (mlp(b, cx, m, h), RouterStats::default(), &m.scope),
        Feed::Experts(e) => {
            let (y, told) = experts::experts(b, cx, e, h);
            (y, told, &e.scope)
        }
    };
    let y = parts::dropped(b, cx.dropout, scope, y, cx.arch.facts.hidden);
    (normed(b, cx, p.norm_behind_mlp.as_ref(), y), told)
}

/// down(activation(gate(h)) · up(h)), or without a gate down(activation(up(h))).
pub(super) fn mlp(b: &mut Builder, cx: &Cx, p: &MlpParams, h: Value) -> Value {
    let inner = match &p.gate {
        None => {
            let u = parts::linear(b, "up", &p.up, h, 'h', 'f');
            b.enter(&p.scope);
            activate(b, cx.arch.activation, u)
        }
        Some(gate) => {
            let g = parts::linear(b, "gate", gate, h, 'h', 'f');
            let u = parts::linear(b, "up", &p.up, h, 'h', 'f');
            b.enter(&p.scope);
            let a = activate(b, cx.arch.activation, g);
            b.push("mlp", Mul::same(), &[a, u])
        }
    };
    parts::linear(b, "mlp_out", &p.down, inner, 'f', 'h')
}

pub(super) fn activate(b: &mut Builder, kind: Activation, x: Value) -> Value {
    match kind {
        Activation::Silu => b.push("act", Silu { beta: None }, &[x]),
        Activation::GeluTanh => b.push("act", Gelu {}, &[x]),
        Activation::Gelu => {
            let by = std::f64::consts::FRAC_1_SQRT_2;
            let t = b.push("act", Scale { by }, &[x]);
            let e = b.push("act", Erf {}, &[t]);
            let e = b.push("act", Shift { by: 1.0 }, &[e]);
            let half = b.push("act", Scale { by: 0.5 }, &[x]);
            b.push("act", Mul::same(), &[half, e])
        }
        Activation::SquaredRelu => {
            let x = b.push("act", Clamp { lo: 0.0, hi: f64::INFINITY }, &[x]);
            b.push("act", Mul::same(), &[x, x])
        }
    }
}
