//! Rules of arithmetic: constants that join, operands that do nothing, products that sum.

use super::attrs::{contract, keeps, plus, times};
use super::families::{flat, is_linear, joined, scale_in, scale_out, without_zeros};
use super::line::{Line, rule, size, spread};
use shardc_ir::attr::Broadcast;
use shardc_ir::ops::*;
use shardc_ir::types::DType;

/// Scales join. Lines of each set let them out of linear ops and into their operands, so that they stand where
/// the value is smallest.
#[rustfmt::skip]
#[allow(irrefutable_let_patterns, unused_variables)] // of patterns and examples
pub(crate) const SCALES: &[Line] = rules! { mesh;
    "scale-of-scale" {
        (Scale { by: a } (Scale { by: b } x)) => (Scale { by: times(a, b)? } x);
        [x: "f32[3,4]"; a = 2.5, b = -0.5]
    }
};

#[rustfmt::skip]
#[allow(irrefutable_let_patterns, unused_variables)] // of patterns and examples
pub(crate) const RULES: &[Line] = rules! { mesh;
    "scale-by-one" {
        (Scale { by: 1.0 } x) => x;
        [x: "f32[3,4]";]
    }
    "scale-out" { by |g, _, t, found| scale_out(g, t, is_linear, found);
        (ReduceSum { rule: r } (Scale { by: a } x)) => (Scale { by: a } (ReduceSum { rule: r } x));
        [x: "f32[3,4]"; a = 0.5, r = rule("ab->a")]
        (Transpose { rule: r } (Scale { by: a } x)) => (Scale { by: a } (Transpose { rule: r } x));
        [x: "f32[3,4]"; a = 0.5, r = rule("ab->ba")]
        (Expand { rule: r, sizes: n } (Scale { by: a } x))
        => (Scale { by: a } (Expand { rule: r, sizes: n } x));
        [x: "f32[3]"; a = 0.5, r = rule("a->ab"), n = size(b'b', 5)]
        (Dot { rule: r } (Scale { by: a } x) y) => (Scale { by: a } (Dot { rule: r } x y));
        [x: "f32[3,4]", y: "f32[4,2]"; a = 0.5, r = rule("mk,kn->mn")]
        (Dot { rule: r } x (Scale { by: a } y)) => (Scale { by: a } (Dot { rule: r } x y));
        [x: "f32[3,4]", y: "f32[4,2]"; a = 0.5, r = rule("mk,kn->mn")]
    }
    "scale-in" { by |g, _, t, found| scale_in(g, t, is_linear, found);
        (Scale { by: a } (ReduceSum { rule: r } x)) => (ReduceSum { rule: r } (Scale { by: a } x));
        [x: "f32[3,4]"; a = 0.5, r = rule("ab->a")]
        (Scale { by: a } (Transpose { rule: r } x)) => (Transpose { rule: r } (Scale { by: a } x));
        [x: "f32[3,4]"; a = 0.5, r = rule("ab->ba")]
        (Scale { by: a } (Expand { rule: r, sizes: n } x))
        => (Expand { rule: r, sizes: n } (Scale { by: a } x));
        [x: "f32[3]"; a = 0.5, r = rule("a->ab"), n = size(b'b', 5)]
        (Scale { by: a } (Dot { rule: r } x y)) => (Dot { rule: r } (Scale { by: a } x) y);
        [x: "f32[3,4]", y: "f32[4,2]"; a = 0.5, r = rule("mk,kn->mn")]
        (Scale { by: a } (Dot { rule: r } x y)) => (Dot { rule: r } x (Scale { by: a } y));
        [x: "f32[3,4]", y: "f32[4,2]"; a = 0.5, r = rule("mk,kn->mn")]
    }
    "shift-of-shift" {
        (Shift { by: a } (Shift { by: b } x)) => (Shift { by: plus(a, b)? } x);
        [x: "f32[3,4]"; a = 2.5, b = -0.5]
    }
    "shift-by-zero" {
        (Shift { by: 0.0 } x) => x;
        [x: "f32[3,4]";]
    }
    "sum-of-scales" { by |g, _, t, found| joined(g, t, |o| matches!(o, Op::Scale(_)), found);
        (Add { rule: Broadcast(None) } (Scale { by: a } x) (Scale { by: a } y))
        => (Scale { by: a } (Add { rule: Broadcast(None) } x y));
        [x: "f32[3,4]", y: "f32[3,4]"; a = 0.5]
        (Sub { rule: Broadcast(None) } (Scale { by: a } x) (Scale { by: a } y))
        => (Scale { by: a } (Sub { rule: Broadcast(None) } x y));
        [x: "f32[3,4]", y: "f32[3,4]"; a = 0.5]
    }
    "add-of-one" {
        (Add { rule: Broadcast(None) } x) => x;
        [x: "f32[3,4]";]
    }
    "add-of-same" {
        (Add { rule: Broadcast(None) } x y) => (Scale { by: 2.0 } x) if x == y;
        [x: "f32[3,4]"; y = x]
    }
    "add-of-negative" {
        (Add { rule: r } x (Scale { by: -1.0 } y)) => (Sub { rule: r.clone() } x y);
        [x: "f32[3,4]", y: "f32[3,4]"; r = Broadcast::SAME]
    }
    "sub-of-negative" {
        (Sub { rule: r } x (Scale { by: -1.0 } y)) => (Add { rule: r.clone() } x y);
        [x: "f32[3,4]", y: "f32[3,4]"; r = Broadcast::SAME]
    }
    "add-of-add" { by flat;
        (Add { rule: Broadcast(None) } (Add { rule: Broadcast(None) } x y) z)
        => (Add { rule: Broadcast(None) } x y z);
        [x: "f32[3]", y: "f32[3]", z: "f32[3]";]
        (Add { rule: Broadcast(None) } (Add { rule: Broadcast(None) } x y z) w)
        => (Add { rule: Broadcast(None) } x y z w);
        [x: "f32[3]", y: "f32[3]", z: "f32[3]", w: "f32[3]";]
    }
    "add-zeros" { by without_zeros;
        (Add { rule: Broadcast(None) } x (Fill { value: 0.0 })) => x;
        [x: "f32[3,4]", fill: "f32[3,4]";]
        (Add { rule: Broadcast(None) } (Fill { value: 0.0 }) x y)
        => (Add { rule: Broadcast(None) } x y);
        [x: "f32[3,4]", y: "f32[3,4]", fill: "f32[3,4]";]
    }
    "sub-zeros" {
        (Sub { rule: Broadcast(None) } x (Fill { value: 0.0 })) => x;
        [x: "f32[3,4]", fill: "f32[3,4]";]
    }
    "mul-by-ones" {
        (Mul { rule: r } x (Fill { value: 1.0 })) => x if keeps(&r, 0);
        [x: "f32[3,4]", fill: "f32[4]"; r = spread("ab,b->ab")]
    }
    "ones-mul" {
        (Mul { rule: r } (Fill { value: 1.0 }) x) => x if keeps(&r, 1);
        [x: "f32[3,4]", fill: "f32[3]"; r = spread("a,ab->ab")]
    }
    "div-by-ones" {
        (Div { rule: r } x (Fill { value: 1.0 })) => x if keeps(&r, 0);
        [x: "f32[3,4]", fill: "f32[3,4]"; r = Broadcast::SAME]
    }
    "cast-to-same" {
        (Cast { to: t } x) => x;
        [x: "f32[3,4]"; t = DType::F32]
    }
    "stop-of-stop" {
        (StopGradient {} (StopGradient {} x)) => (StopGradient {} x);
        [x: "f32[3,4]";]
    }
    "sum-of-product" {
        (ReduceSum { rule: r } (Mul { rule: Broadcast(None) } x y))
        => (Dot { rule: contract(&r) } x y);
        [x: "f32[3,4,2]", y: "f32[3,4,2]"; r = rule("abc->ab")]
    }
};
