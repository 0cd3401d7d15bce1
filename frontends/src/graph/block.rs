//! The two halves of a block: attention and MLP, each after a norm and beside a residual.

use super::parts::{self, Linear, Norm};
use crate::family::Activation;
use crate::sizes::Arch;
use shardc_ir::builder::Builder;
use shardc_ir::func::Value;
use shardc_ir::ops::{Add, Attention, Gelu, Mul, Rope, Silu};

/// The parameters of one block.
pub(super) struct Block {
    /// Scope of the block, of its attention and of its MLP.
    pub scope: String,
    pub attention_scope: String,
    pub mlp_scope: String,
    pub attention_norm: Norm,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub o: Linear,
    /// Norms of the heads of q and of k.
    pub head_norms: Option<[Norm; 2]>,
    pub mlp_norm: Norm,
    pub gate: Option<Linear>,
    pub up: Linear,
    pub down: Linear,
}

/// Cosines and sines [s, r].
#[derive(Clone, Copy)]
pub(super) struct Rotary {
    pub cos: Value,
    pub sin: Value,
}

/// What a block needs beside its parameters.
pub(super) struct Cx<'a> {
    pub arch: &'a Arch,
    pub rotary: Option<Rotary>,
    pub positions: Value,
    pub window: Option<usize>,
    pub activation: Activation,
}

/// x + o(attention(norm(x))).
pub(super) fn attention(b: &mut Builder, cx: &Cx, p: &Block, x: Value) -> Value {
    let facts = &cx.arch.facts;
    let h = parts::norm(b, &p.attention_norm, cx.arch.eps, x, "bsh");
    let norms = p.head_norms.as_ref();
    let q = parts::linear(b, "q", &p.q, h, 'h', 'o');
    let k = parts::linear(b, "k", &p.k, h, 'h', 'o');
    let v = parts::linear(b, "v", &p.v, h, 'h', 'o');
    b.enter(&p.attention_scope);
    let q = parts::reshape(b, "q", "bs(nd)->bsnd", b'n', facts.heads, q);
    let k = parts::reshape(b, "k", "bs(gd)->bsgd", b'g', facts.kv_heads, k);
    let v = parts::reshape(b, "v", "bs(gd)->bsgd", b'g', facts.kv_heads, v);
    let q = norms.map_or(q, |n| parts::norm(b, &n[0], cx.arch.eps, q, "bsnd"));
    let k = norms.map_or(k, |n| parts::norm(b, &n[1], cx.arch.eps, k, "bsgd"));
    b.enter(&p.attention_scope);
    let [q, k] = match cx.rotary {
        None => [q, k],
        Some(r) => {
            let q = b.push("q", Rope {}, &[q, r.cos, r.sin]);
            [q, b.push("k", Rope {}, &[k, r.cos, r.sin])]
        }
    };
    let scale = 1.0 / (facts.head_dim as f64).sqrt();
    let op = Attention { scale, window: cx.window };
    let a = b.push_n(&["attn", "lse"], op, &[q, k, v, cx.positions, cx.positions])[0];
    let a = parts::reshape(b, "attn", "bsnd->bs(nd)", b'n', facts.heads, a);
    let o = parts::linear(b, "attn_out", &p.o, a, 'o', 'h');
    residual(b, p, x, o)
}

/// x + down(activation(gate(norm(x))) · up(norm(x))), or without a gate
/// down(activation(up(norm(x)))).
pub(super) fn mlp(b: &mut Builder, cx: &Cx, p: &Block, x: Value) -> Value {
    let h = parts::norm(b, &p.mlp_norm, cx.arch.eps, x, "bsh");
    let inner = match &p.gate {
        None => {
            let u = parts::linear(b, "up", &p.up, h, 'h', 'f');
            b.enter(&p.mlp_scope);
            activate(b, cx.activation, u)
        }
        Some(gate) => {
            let g = parts::linear(b, "gate", gate, h, 'h', 'f');
            let u = parts::linear(b, "up", &p.up, h, 'h', 'f');
            b.enter(&p.mlp_scope);
            let a = activate(b, cx.activation, g);
            b.push("mlp", Mul::same(), &[a, u])
        }
    };
    let d = parts::linear(b, "mlp_out", &p.down, inner, 'f', 'h');
    residual(b, p, x, d)
}

fn activate(b: &mut Builder, kind: Activation, x: Value) -> Value {
    match kind {
        Activation::Silu => b.push("act", Silu {}, &[x]),
        Activation::GeluTanh => b.push("act", Gelu {}, &[x]),
    }
}

fn residual(b: &mut Builder, p: &Block, x: Value, y: Value) -> Value {
    b.enter(&p.scope);
    b.push("hidden", Add::same(), &[x, y])
}
