//! Rules of collectives: fewer calls, fewer bytes, the same sums in another order.
//!
//! A `fan_out` is never removed, only merged with another: it stands for the gradient's sum.

use super::attrs::union;
use super::families::{is_moved, joined, scale_in, scale_out};
use super::line::{Line, X, Y};
use shardc_ir::attr::Broadcast;
use shardc_ir::ops::{
    Add, AllGather, AllReduce, AllToAll, Cast, FanOut, Op, PadToPartial, Permute, ReduceScatter,
    Scale, Slice, Sub,
};
use shardc_ir::types::DType;

#[rustfmt::skip]
#[allow(irrefutable_let_patterns, unused_variables)] // of patterns and examples
pub(crate) const RULES: &[Line] = rules! { mesh;
    "sum-of-sums" { by |g, _, t, found| joined(g, t, |o| matches!(o, Op::AllReduce(_)), found);
        (Add { rule: Broadcast(None) } (AllReduce { axes: t } a) (AllReduce { axes: t } b))
        => (AllReduce { axes: t } (Add { rule: Broadcast(None) } a b));
        [a: "f32[4,6]+x", b: "f32[4,6]+x"; t = X]
        (Add { rule: Broadcast(None) } (AllReduce { axes: t } a) (AllReduce { axes: t } b) (AllReduce { axes: t } c))
        => (AllReduce { axes: t } (Add { rule: Broadcast(None) } a b c));
        [a: "f32[4]+x", b: "f32[4]+x", c: "f32[4]+x"; t = X]
        (Sub { rule: Broadcast(None) } (AllReduce { axes: t } a) (AllReduce { axes: t } b))
        => (AllReduce { axes: t } (Sub { rule: Broadcast(None) } a b));
        [a: "f32[4,6]+y", b: "f32[4,6]+y"; t = Y]
    }
    "sum-of-scatters" { by |g, _, t, found| joined(g, t, |o| matches!(o, Op::ReduceScatter(_)), found);
        (Add { rule: Broadcast(None) } (ReduceScatter { axes: t, dim: d } a) (ReduceScatter { axes: t, dim: d } b))
        => (ReduceScatter { axes: t, dim: d } (Add { rule: Broadcast(None) } a b));
        [a: "f32[4,6]+x", b: "f32[4,6]+x"; t = X, d = 1]
        (Sub { rule: Broadcast(None) } (ReduceScatter { axes: t, dim: d } a) (ReduceScatter { axes: t, dim: d } b))
        => (ReduceScatter { axes: t, dim: d } (Sub { rule: Broadcast(None) } a b));
        [a: "f32[4,6]+x", b: "f32[4,6]+x"; t = X, d = 1]
    }
    "sum-of-gathers" { by |g, _, t, found| joined(g, t, |o| matches!(o, Op::AllGather(_)), found);
        (Add { rule: Broadcast(None) } (AllGather { axes: t, dim: d } a) (AllGather { axes: t, dim: d } b))
        => (AllGather { axes: t, dim: d } (Add { rule: Broadcast(None) } a b));
        [a: "f32[4,6@x]", b: "f32[4,6@x]"; t = X, d = 1]
        (Sub { rule: Broadcast(None) } (AllGather { axes: t, dim: d } a) (AllGather { axes: t, dim: d } b))
        => (AllGather { axes: t, dim: d } (Sub { rule: Broadcast(None) } a b));
        [a: "f32[4,6@x]", b: "f32[4,6@x]"; t = X, d = 1]
    }
    "reduce-of-reduce" {
        (AllReduce { axes: s } (AllReduce { axes: t } a)) => (AllReduce { axes: union(s, t)? } a);
        [a: "f32[4,6]+x*y"; s = X, t = Y]
    }
    "fan_out-of-fan_out" {
        (FanOut { axes: s } (FanOut { axes: t } a)) => (FanOut { axes: union(s, t)? } a);
        [a: "f32[4,6]"; s = X, t = Y]
    }
    "gather-of-gather" {
        (AllGather { axes: s, dim: d } (AllGather { axes: t, dim: e } a))
        => (AllGather { axes: union(s, t)?, dim: d } a) if d == e;
        [a: "f32[4,6@x*y]"; s = X, t = Y, d = 1, e = 1]
    }
    "slice-of-slice" {
        (Slice { axes: s, dim: d } (Slice { axes: t, dim: e } a))
        => (Slice { axes: union(s, t)?, dim: d } a) if d == e;
        [a: "f32[4,6]"; s = Y, t = X, d = 1, e = 1]
    }
    "scatter-of-scatter" {
        (ReduceScatter { axes: s, dim: d } (ReduceScatter { axes: t, dim: e } a))
        => (ReduceScatter { axes: union(s, t)?, dim: d } a) if d == e;
        [a: "f32[4,6]+x*y"; s = Y, t = X, d = 1, e = 1]
    }
    "slice-of-sum" {
        (Slice { axes: t, dim: d } (AllReduce { axes: s } a))
        => (ReduceScatter { axes: t, dim: d } a) if s == t;
        [a: "f32[5,6]+x"; t = X, s = X, d = 0]
    }
    "gather-of-scatter" {
        (AllGather { axes: t, dim: d } (ReduceScatter { axes: s, dim: e } a))
        => (AllReduce { axes: t } a) if (s, d) == (t, e);
        [a: "f32[5,6]+y"; t = Y, s = Y, d = 0, e = 0]
    }
    "slice-of-gather" {
        (Slice { axes: t, dim: d } (AllGather { axes: s, dim: e } a)) => a if (s, d) == (t, e);
        [a: "f32[5@y,6]"; t = Y, s = Y, d = 0, e = 0]
    }
    "gather-of-slice" {
        (AllGather { axes: t, dim: d } (Slice { axes: s, dim: e } a)) => a if (s, d) == (t, e);
        [a: "f32[5,6]~y"; t = Y, s = Y, d = 0, e = 0]
    }
    "gather-of-own-slice" {
        (AllGather { axes: t, dim: d } (Slice { axes: s, dim: e } a))
        => (FanOut { axes: t } a) if (s, d) == (t, e);
        [a: "f32[5,6]"; t = Y, s = Y, d = 0, e = 0]
    }
    "reduce-of-place" {
        (AllReduce { axes: t } (PadToPartial { axes: s, dim: d } a))
        => (AllGather { axes: t, dim: d } a) if s == t;
        [a: "f32[4,7@x]", out: "f32[4,7]"; t = X, s = X, d = 1]
    }
    "scatter-of-place" {
        (ReduceScatter { axes: t, dim: d } (PadToPartial { axes: s, dim: e } a))
        => a if (s, d) == (t, e);
        [a: "f32[4,7@x]"; t = X, s = X, d = 1, e = 1]
    }
    "move-by-gather" {
        (Slice { axes: t, dim: e } (AllGather { axes: s, dim: d } a))
        => (AllToAll { axes: t, from: d, to: e } a) if s == t;
        [a: "f32[5@x,6]"; t = X, s = X, d = 0, e = 1]
    }
    "move-by-scatter" {
        (ReduceScatter { axes: t, dim: e } (PadToPartial { axes: s, dim: d } a))
        => (AllToAll { axes: t, from: d, to: e } a) if s == t;
        [a: "f32[5@x,6]"; t = X, s = X, d = 0, e = 1]
    }
    "move-back" {
        (AllToAll { axes: t, from: f, to: g } (AllToAll { axes: s, from: h, to: k } a))
        => a if s == t;
        [a: "f32[5@x,6]"; t = X, s = X, f = 1, g = 0, h = 0, k = 1]
    }
    "turn-of-turn" {
        (Permute { axes: t, shift: m } (Permute { axes: s, shift: n } a))
        => (Permute { axes: t, shift: (m % mesh.ways(t) + n % mesh.ways(t)) % mesh.ways(t) } a) if s == t;
        [a: "f32[4]!y"; t = Y, s = Y, m = 1, n = 1]
    }
    "turn-by-none" {
        (Permute { axes: t, shift: 0 } a) => a;
        [a: "f32[4]!y"; t = Y]
    }
    "scale-out" { by |g, _, t, found| scale_out(g, t, is_moved, found);
        (AllReduce { axes: t } (Scale { by: c } a)) => (Scale { by: c } (AllReduce { axes: t } a));
        [a: "f32[4,6]+x"; c = 0.5, t = X]
        (AllGather { axes: t, dim: d } (Scale { by: c } a))
        => (Scale { by: c } (AllGather { axes: t, dim: d } a));
        [a: "f32[4@x,6]"; c = 0.5, t = X, d = 0]
        (ReduceScatter { axes: t, dim: d } (Scale { by: c } a))
        => (Scale { by: c } (ReduceScatter { axes: t, dim: d } a));
        [a: "f32[4,6]+x"; c = 0.5, t = X, d = 0]
        (Slice { axes: t, dim: d } (Scale { by: c } a))
        => (Scale { by: c } (Slice { axes: t, dim: d } a));
        [a: "f32[4,6]"; c = 0.5, t = X, d = 0]
    }
    "scale-in" { by |g, _, t, found| scale_in(g, t, is_moved, found);
        (Scale { by: c } (AllReduce { axes: t } a)) => (AllReduce { axes: t } (Scale { by: c } a));
        [a: "f32[4,6]+x"; c = 0.5, t = X]
        (Scale { by: c } (AllGather { axes: t, dim: d } a))
        => (AllGather { axes: t, dim: d } (Scale { by: c } a));
        [a: "f32[4@x,6]"; c = 0.5, t = X, d = 0]
        (Scale { by: c } (ReduceScatter { axes: t, dim: d } a))
        => (ReduceScatter { axes: t, dim: d } (Scale { by: c } a));
        [a: "f32[4,6]+x"; c = 0.5, t = X, d = 0]
        (Scale { by: c } (Slice { axes: t, dim: d } a))
        => (Slice { axes: t, dim: d } (Scale { by: c } a));
        [a: "f32[4,6]"; c = 0.5, t = X, d = 0]
    }
    "cast-before-gather" {
        (Cast { to: e } (AllGather { axes: t, dim: d } a))
        => (AllGather { axes: t, dim: d } (Cast { to: e } a));
        [a: "f32[4@x,6]"; e = DType::BF16, t = X, d = 0]
    }
    "cast-after-gather" {
        (AllGather { axes: t, dim: d } (Cast { to: e } a))
        => (Cast { to: e } (AllGather { axes: t, dim: d } a));
        [a: "bf16[4@x,6]"; e = DType::F32, t = X, d = 0]
    }
};
