//! What walks a state in the place of attention, and gated DeltaNet (Yang et al., 2024, *Gated Delta Networks*): a causal
//! convolution of queries, keys and values, decays and what is written from the hidden state, the scan, a gated norm.
//!
//! Letters beside those of `graph`: g heads of keys, r heads of values of each, n both, c channels, w taps.

use super::block::Cx;
use super::mamba2::{self, Mamba2Params};
use super::parts::{self, LinearParams, NormParams};
use crate::sizes::Arch;
use shardc_ir::attr::{Sizes, Usual};
use shardc_ir::builder::Builder;
use shardc_ir::func::Value;
use shardc_ir::ops::scan::DeltaRule;
use shardc_ir::ops::{
    Add, Cast, Dot, Equal, Exp, Expand, Logistic, Mul, Narrow, Pad, Reshape, Rsqrt, Scale, Scan,
    Shift, Silu, Softplus,
};
use shardc_ir::types::DType;

/// Added to the square sum of queries and of keys, whatever the config says.
const LENGTH_EPS: f64 = 1e-6;

/// The parameters of what walks.
pub(super) enum RecurrentParams {
    DeltaNet(DeltaNet),
    Mamba2(Mamba2Params),
}

/// The parameters of gated DeltaNet.
pub(super) struct DeltaNet {
    /// To q, k, v and z of each head of keys, one after the other.
    pub qkvz: LinearParams,
    /// To b and a of each head of keys.
    pub ba: LinearParams,
    pub conv_scope: String,
    /// Of q, k and v: [c, 1, w].
    pub conv: [Value; 3],
    /// [n].
    pub decay: Value,
    pub decay_bias: Value,
    /// [v].
    pub norm: NormParams,
}

/// Which tokens a convolution sees of the document of each token: by how many tokens they stand before it, from 1 on; [b, s].
pub(super) fn neighbours(b: &mut Builder, segments: Option<Value>, arch: &Arch) -> Vec<Value> {
    let walks = arch.walks.contains(&true);
    let (Some(segments), Some(sizes)) = (segments.filter(|_| walks), arch.recurrent) else {
        return vec![];
    };
    b.enter("");
    let tokens = b.ty(segments).dims[1].size;
    let own = b.push("document", Cast { to: DType::F32 }, &[segments]);
    let one = |far: usize| {
        let before = b.push("document", shifted(far, tokens), &[own]);
        let same = b.push("same_document", Equal::same(), &[before, own]);
        b.note("the tokens of a document that its convolution sees");
        same
    };
    (1..sizes.taps.min(tokens)).map(one).collect()
}

/// Tokens so many places later.
fn shifted(far: usize, tokens: usize) -> Pad {
    Pad { dim: Usual(1), ..Pad::new(far as i64, tokens) }
}

/// What its heads make of a normed hidden state: [b, s, (n v)].
pub(super) fn heads(b: &mut Builder, cx: &Cx, p: &RecurrentParams, scope: &str, h: Value) -> Value {
    match p {
        RecurrentParams::DeltaNet(p) => delta_net(b, cx, p, scope, h),
        RecurrentParams::Mamba2(p) => mamba2::heads(b, cx, p, scope, h),
    }
}

fn delta_net(b: &mut Builder, cx: &Cx, p: &DeltaNet, scope: &str, h: Value) -> Value {
    let sizes = cx.arch.recurrent.expect("a family with gated DeltaNet");
    let (k, r, n) = (sizes.key_width, sizes.values_each, sizes.value_heads());
    let all = parts::linear(b, "qkvz", &p.qkvz, h, 'h', 'o');
    let ba = parts::linear(b, "ba", &p.ba, h, 'h', 'o');
    b.enter(scope);
    let by_key = |b: &mut Builder, hint, x| {
        parts::reshape(b, hint, "bs(gd)->bsgd", b'g', sizes.key_heads, x)
    };
    let (all, ba) = (by_key(b, "qkvz", all), by_key(b, "ba", ba));
    let part = |b: &mut Builder, hint, x, start, len| {
        let own = b.push(hint, Narrow::new(start, len), &[x]);
        parts::reshape(b, hint, "bsgd->bs(gd)", b'g', sizes.key_heads, own)
    };
    let wide = r * sizes.value_width;
    let q = part(b, "q", all, 0, k);
    let keys = part(b, "k", all, k, k);
    let v = part(b, "v", all, 2 * k, wide);
    let z = part(b, "z", all, 2 * k + wide, wide);
    let write = part(b, "beta", ba, 0, r);
    let decay = part(b, "a", ba, r, r);
    let mixed = [("q", q), ("k", keys), ("v", v)].into_iter().zip(p.conv);
    let mixed = mixed.map(|((hint, x), w)| convolved(b, cx, &p.conv_scope, hint, x, (w, None)));
    let mixed: Vec<Value> = mixed.collect();
    b.enter(scope);
    let [q, keys] = [("q", mixed[0]), ("k", mixed[1])].map(|(hint, x)| {
        let x = by_key(b, hint, x);
        of_length_one(b, hint, x)
    });
    let q = b.push("q", Scale { by: 1.0 / (k as f64).sqrt() }, &[q]);
    let (q, keys) = (shared(b, "q", r, q), shared(b, "k", r, keys));
    let v = parts::reshape(b, "v", "bs(nd)->bsnd", b'n', n, mixed[2]);
    let beta = b.push("beta", Logistic {}, &[write]);
    let steps = step_sizes(b, decay, p.decay_bias);
    let g = decays(b, steps, p.decay);
    let y = scanned(b, cx, [q, keys, g, v], Some(beta));
    let y = parts::norm(b, &p.norm, cx.arch.eps, y, "bsnd");
    b.enter(scope);
    let z = parts::reshape(b, "z", "bs(nd)->bsnd", b'n', n, z);
    let z = b.push("z", Silu { beta: None }, &[z]);
    let y = b.push("scan", Mul::same(), &[y, z]);
    parts::reshape(b, "scan", "bsnd->bs(nd)", b'n', n, y)
}

/// softplus(x + bias) of each token and head.
pub(super) fn step_sizes(b: &mut Builder, x: Value, bias: Value) -> Value {
    let rule = parts::spread("bsn,n->bsn", &[3, 1]);
    let x = b.push("step", Add { rule }, &[x, bias]);
    b.push("step", Softplus {}, &[x])
}

/// g = -e^A step.
pub(super) fn decays(b: &mut Builder, steps: Value, log: Value) -> Value {
    let rate = b.push("rate", Exp {}, &[log]);
    let rate = b.push("rate", Scale { by: -1.0 }, &[rate]);
    b.push("g", Mul::by("bsn,n->bsn", &[3, 1]), &[steps, rate])
}

/// What tokens read of the state, which with β is walked by the delta rule.
pub(super) fn scanned(b: &mut Builder, cx: &Cx, of: [Value; 4], beta: Option<Value>) -> Value {
    let delta = DeltaRule(beta.is_some());
    let (pieces, segments) = (Sizes::default(), cx.segments.is_some());
    let op = Scan { delta, pieces, segments, start: false };
    let ins: Vec<Value> = of.into_iter().chain(beta).chain(cx.segments).collect();
    b.push_n(&["scan", "state"], op, &ins)[0]
}

/// The causal convolution of every channel by itself, [b, s, c] with weights [c, 1, w] and perhaps a bias [c], and its SiLU: of
/// each tap the tokens so many places before.
pub(super) fn convolved(
    b: &mut Builder,
    cx: &Cx,
    scope: &str,
    hint: &'static str,
    x: Value,
    (weight, bias): (Value, Option<Value>),
) -> Value {
    let taps = cx.arch.recurrent.map_or(0, |s| s.taps);
    b.enter(scope);
    let tokens = b.ty(x).dims[1].size;
    let mut sum = None;
    for far in 0..taps.min(tokens) {
        let own = match far {
            0 => x,
            _ => b.push(hint, shifted(far, tokens), &[x]),
        };
        let own = match cx.neighbours.get(far.wrapping_sub(1)) {
            None => own,
            Some(&same) => b.push(hint, Mul::by("bsc,bs->bsc", &[3, 2]), &[own, same]),
        };
        let tap = b.push("tap", Narrow::new(taps - 1 - far, 1), &[weight]);
        let joined = Reshape { rule: parts::rule("cow->(cow)", &[3]), sizes: Sizes::default() };
        let tap = b.push("tap", joined, &[tap]);
        let own = b.push(hint, Mul::by("bsc,c->bsc", &[3, 1]), &[own, tap]);
        sum = Some(sum.map_or(own, |sum| b.push(hint, Add::same(), &[sum, own])));
    }
    let sum = sum.expect("a tap and a token");
    let sum = bias.map_or(sum, |bias| {
        b.push(hint, Add { rule: parts::spread("bsc,c->bsc", &[3, 1]) }, &[sum, bias])
    });
    b.push(hint, Silu { beta: None }, &[sum])
}

/// Rows over their length, of heads of keys.
fn of_length_one(b: &mut Builder, hint: &'static str, x: Value) -> Value {
    let squares = b.push("squares", Dot::by("bsgd,bsgd->bsg", &[4, 4]), &[x, x]);
    let squares = b.push("squares", Shift { by: LENGTH_EPS }, &[squares]);
    let by = b.push("over_length", Rsqrt {}, &[squares]);
    b.push(hint, Mul::by("bsgd,bsg->bsgd", &[4, 3]), &[x, by])
}

/// A head of keys for each of the heads of values that share it.
pub(super) fn shared(b: &mut Builder, hint: &'static str, each: usize, x: Value) -> Value {
    if each == 1 {
        return x;
    }
    let sizes = parts::letter_sizes(&[('r', each)]);
    let x = b.push(hint, Expand { rule: parts::rule("bsgd->bsgrd", &[4]), sizes }, &[x]);
    parts::reshape(b, hint, "bsgrd->bs(gr)d", b'r', each, x)
}
