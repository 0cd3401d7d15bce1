//! Mamba-2 in the place of attention (Dao and Gu, 2024, *Transformers are SSMs*): causal convolutions of x, B and C, the scan by
//! the plain rule, what passes beside it, a gated norm of groups.
//!
//! Letters beside those of `graph`: g groups, n heads of values, d elements of one, c channels.

use super::block::Cx;
use super::parts::{self, LinearParams, NormParams};
use super::recurrent::{convolved, decays, scanned, shared, step_sizes};
use crate::family::RecurrentSizes;
use shardc_ir::builder::Builder;
use shardc_ir::func::Value;
use shardc_ir::ops::{Add, Clamp, Expand, Mul, Silu};

/// The parameters of Mamba-2.
pub(super) struct Mamba2Params {
    /// To z, x, B, C, and the step sizes.
    pub z: LinearParams,
    pub mixed: [LinearParams; 3],
    pub steps: LinearParams,
    pub conv_scope: String,
    /// Of x, B and C: [c, 1, w], and [c].
    pub conv: [(Value, Option<Value>); 3],
    /// [n].
    pub decay: Value,
    pub step_bias: Value,
    pub beside: Value,
    /// Its weight is of all values: [(n d)].
    pub norm: NormParams,
}

/// What its heads make of a normed hidden state: [b, s, (n d)].
pub(super) fn heads(b: &mut Builder, cx: &Cx, p: &Mamba2Params, scope: &str, h: Value) -> Value {
    let sizes = cx.arch.recurrent.expect("a family with Mamba-2");
    let n = sizes.value_heads();
    let z = parts::linear(b, "z", &p.z, h, 'h', 'o');
    let steps = parts::linear(b, "step", &p.steps, h, 'h', 'o');
    let mixed = ["x", "b", "c"].into_iter().zip(&p.mixed).zip(p.conv).map(|((hint, l), conv)| {
        let x = parts::linear(b, hint, l, h, 'h', 'o');
        convolved(b, cx, &p.conv_scope, hint, x, conv)
    });
    let mixed: Vec<Value> = mixed.collect();
    b.enter(scope);
    let [k, q] = [("b", mixed[1]), ("c", mixed[2])].map(|(hint, x)| by_heads(b, hint, &sizes, x));
    let x = parts::reshape(b, "x", "bs(nd)->bsnd", b'n', n, mixed[0]);
    let steps = step_sizes(b, steps, p.step_bias);
    let steps = match cx.arch.steps {
        None => steps,
        Some([lo, hi]) => b.push("step", Clamp { lo, hi }, &[steps]),
    };
    let g = decays(b, steps, p.decay);
    let v = b.push("v", Mul::by("bsnd,bsn->bsnd", &[4, 3]), &[x, steps]);
    let y = scanned(b, cx, [q, k, g, v], None);
    let beside = b.push("beside", Mul::by("bsnd,n->bsnd", &[4, 1]), &[x, p.beside]);
    let y = b.push("scan", Add::same(), &[y, beside]);
    let y = parts::reshape(b, "scan", "bsnd->bs(nd)", b'n', n, y);
    let z = b.push("z", Silu { beta: None }, &[z]);
    let y = b.push("scan", Mul::same(), &[y, z]);
    normed(b, cx, p, &sizes, y)
}

/// A key or query of each head, of those of groups: [b, s, n, d].
fn by_heads(b: &mut Builder, hint: &'static str, sizes: &RecurrentSizes, x: Value) -> Value {
    if sizes.key_heads > 1 {
        let x = parts::reshape(b, hint, "bs(gd)->bsgd", b'g', sizes.key_heads, x);
        return shared(b, hint, sizes.values_each, x);
    }
    let heads = parts::letter_sizes(&[('n', sizes.values_each)]);
    b.push(hint, Expand { rule: parts::rule("bsd->bsnd", &[3]), sizes: heads }, &[x])
}

/// The norm of every group, times weights of all.
fn normed(b: &mut Builder, cx: &Cx, p: &Mamba2Params, sizes: &RecurrentSizes, y: Value) -> Value {
    let (g, eps) = (sizes.key_heads, cx.arch.eps);
    if g == 1 {
        return parts::norm(b, &p.norm, eps, y, "bsc");
    }
    let each = NormParams { weight: None, scope: p.norm.scope.clone(), ..p.norm };
    let y = parts::reshape(b, "groups", "bs(gd)->bsgd", b'g', g, y);
    let y = parts::norm(b, &each, eps, y, "bsgd");
    let y = parts::reshape(b, "normed", "bsgd->bs(gd)", b'g', g, y);
    let weight = p.norm.weight.expect("a gated norm has weights");
    b.push("normed", Mul::by("bsc,c->bsc", &[3, 1]), &[y, weight])
}
