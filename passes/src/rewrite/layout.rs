//! Rules of layout: moves of dims that cancel, join, or vanish in the op that reads them.

use super::attrs::{compose, identity, through};
use super::families::spread_operand;
use super::line::{Line, rule, size, spread};
use shardc_ir::attr::{Broadcast, RuleAttr};
use shardc_ir::ops::*;

#[rustfmt::skip]
#[allow(irrefutable_let_patterns, unused_variables)] // of patterns and examples
pub(crate) const RULES: &[Line] = rules! { mesh;
    "transpose-of-transpose" {
        (Transpose { rule: r } (Transpose { rule: s } x))
        => (Transpose { rule: compose(&r, &s)? } x);
        [x: "f32[2,3,4]"; r = rule("abc->bca"), s = rule("xyz->zxy")]
    }
    "transpose-to-same" {
        (Transpose { rule: r } x) => x if identity(&r);
        [x: "f32[3,3]"; r = rule("ab->ab")]
    }
    "sum-of-sum" {
        (ReduceSum { rule: r } (ReduceSum { rule: s } x))
        => (ReduceSum { rule: compose(&r, &s)? } x);
        [x: "f32[2,3,4]"; r = rule("ab->b"), s = rule("xyz->xz")]
    }
    "sum-of-transpose" {
        (ReduceSum { rule: r } (Transpose { rule: s } x))
        => (ReduceSum { rule: compose(&r, &s)? } x);
        [x: "f32[3,4]"; r = rule("ab->b"), s = rule("xy->yx")]
    }
    "transpose-of-sum" {
        (Transpose { rule: r } (ReduceSum { rule: s } x))
        => (ReduceSum { rule: compose(&r, &s)? } x);
        [x: "f32[2,3,4]"; r = rule("ab->ba"), s = rule("xyz->xz")]
    }
    "max-of-transpose" {
        (ReduceMax { rule: r } (Transpose { rule: s } x))
        => (ReduceMax { rule: compose(&r, &s)? } x);
        [x: "f32[3,4]"; r = rule("ab->b"), s = rule("xy->yx")]
    }
    "dot-of-transpose-left" {
        (Dot { rule: r } (Transpose { rule: s } x) y) => (Dot { rule: through(&r, &s, 0)? } x y);
        [x: "f32[4,3]", y: "f32[4,2]"; r = rule("mk,kn->mn"), s = rule("ab->ba")]
    }
    "dot-of-transpose-right" {
        (Dot { rule: r } x (Transpose { rule: s } y)) => (Dot { rule: through(&r, &s, 1)? } x y);
        [x: "f32[3,4]", y: "f32[2,4]"; r = rule("mk,kn->mn"), s = rule("ab->ba")]
    }
    "transpose-of-dot" {
        (Transpose { rule: r } (Dot { rule: s } x y)) => (Dot { rule: compose(&r, &s)? } x y);
        [x: "f32[3,4]", y: "f32[4,2]"; r = rule("ab->ba"), s = rule("mk,kn->mn")]
    }
    "reshape-back" {
        (Reshape { rule: r, sizes: n } (Reshape { rule: s, sizes: m } x)) => x;
        [x: "f32[3,2,4]";
            r = RuleAttr::new("s(nd)->snd", &[2]), n = size(b'n', 2), s = rule("snd->s(nd)"), m = size(b'n', 2)]
    }
    "op-of-expand" { by spread_operand;
        (Mul { rule: Broadcast(None) } x (Expand { rule: r, sizes: n } y)) => (Mul { rule: s } x y);
        [x: "f32[3,4]", y: "f32[4]"; r = rule("b->ab"), n = size(b'a', 3), s = spread("ab,b->ab")]
        (Sub { rule: Broadcast(None) } (Expand { rule: r, sizes: n } x) y) => (Sub { rule: s } x y);
        [x: "f32[4]", y: "f32[3,4]"; r = rule("b->ab"), n = size(b'a', 3), s = spread("b,ab->ab")]
        (Add { rule: Broadcast(None) } x (Expand { rule: r, sizes: n } y) z)
        => (Add { rule: s } x y z);
        [x: "f32[3,4]", y: "f32[4]", z: "f32[3,4]";
            r = rule("b->ab"), n = size(b'a', 3), s = spread("ab,b,ab->ab")]
        (Div { rule: Broadcast(None) } x (Expand { rule: r, sizes: n } y)) => (Div { rule: s } x y);
        [x: "f32[3,4]", y: "f32[4]"; r = rule("b->ab"), n = size(b'a', 3), s = spread("ab,b->ab")]
    }
};
