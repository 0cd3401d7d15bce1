//! Rules of arithmetic: constants that join, operands that do nothing, products that sum.

use super::pattern::{Line, rules};

#[rustfmt::skip]
pub(crate) const RULES: &[Line] = rules! {
    "scale-of-scale";
        "(scale[?a] (scale[?b] ?x))" => "(scale[times ?a ?b] ?x)";
        "a: 2.5 | b: -0.5 | x: f32[3,4]"
    "neg-neg";
        "(scale[-1.0] (scale[-1.0] ?x))" => "?x";
        "x: f32[3,4]"
    "scale-by-one";
        "(scale[1.0] ?x)" => "?x";
        "x: f32[3,4]"
    "shift-of-shift";
        "(shift[?a] (shift[?b] ?x))" => "(shift[plus ?a ?b] ?x)";
        "a: 2.5 | b: -0.5 | x: f32[3,4]"
    "shift-by-zero";
        "(shift[0.0] ?x)" => "?x";
        "x: f32[3,4]"
    "sum-of-scales";
        "(add (scale[?a] ?x) (scale[?a] ?y))" => "(scale[?a] (add ?x ?y))";
        "a: 0.5 | x: f32[3,4] | y: f32[3,4]"
    "scale-into-sum";
        "(scale[?a] (reduce_sum[?r] ?x))" => "(reduce_sum[?r] (scale[?a] ?x))";
        "a: 0.5 | r: ab->a | x: f32[3,4]"
    "scale-out-of-sum";
        "(reduce_sum[?r] (scale[?a] ?x))" => "(scale[?a] (reduce_sum[?r] ?x))";
        "a: 0.5 | r: ab->a | x: f32[3,4]"
    "scale-before-expand";
        "(scale[?a] (expand[?r; ?n] ?x))" => "(expand[?r; ?n] (scale[?a] ?x))";
        "a: 0.5 | r: a->ab | n: b=5 | x: f32[3]"
    "scale-out-left";
        "(dot[?r] (scale[?a] ?x) ?y)" => "(scale[?a] (dot[?r] ?x ?y))";
        "a: 0.5 | r: mk,kn->mn | x: f32[3,4] | y: f32[4,2]"
    "scale-out-right";
        "(dot[?r] ?x (scale[?a] ?y))" => "(scale[?a] (dot[?r] ?x ?y))";
        "a: 0.5 | r: mk,kn->mn | x: f32[3,4] | y: f32[4,2]"
    "scale-in-left";
        "(scale[?a] (dot[?r] ?x ?y))" => "(dot[?r] (scale[?a] ?x) ?y)";
        "a: 0.5 | r: mk,kn->mn | x: f32[3,4] | y: f32[4,2]"
    "scale-in-right";
        "(scale[?a] (dot[?r] ?x ?y))" => "(dot[?r] ?x (scale[?a] ?y))";
        "a: 0.5 | r: mk,kn->mn | x: f32[3,4] | y: f32[4,2]"
    "add-of-one";
        "(add ?x)" => "?x";
        "x: f32[3,4]"
    "add-of-same";
        "(add ?x ?x)" => "(scale[2.0] ?x)";
        "x: f32[3,4]"
    "add-of-negative";
        "(add ?x (scale[-1.0] ?y))" => "(sub ?x ?y)";
        "x: f32[3,4] | y: f32[3,4]"
    "sub-of-negative";
        "(sub ?x (scale[-1.0] ?y))" => "(add ?x ?y)";
        "x: f32[3,4] | y: f32[3,4]"
    "add-of-add";
        "(add (add ?x ?y) ?z)" => "(add ?x ?y ?z)";
        "x: f32[3] | y: f32[3] | z: f32[3]"
    "add-of-three";
        "(add (add ?x ?y ?z) ?w)" => "(add ?x ?y ?z ?w)";
        "x: f32[3] | y: f32[3] | z: f32[3] | w: f32[3]"
    "add-zeros";
        "(add ?x (fill[0.0]))" => "?x";
        "x: f32[3,4] | fill: f32[3,4]"
    "zeros-add";
        "(add (fill[0.0]) ?x)" => "?x";
        "x: f32[3,4] | fill: f32[3,4]"
    "sub-zeros";
        "(sub ?x (fill[0.0]))" => "?x";
        "x: f32[3,4] | fill: f32[3,4]"
    "mul-by-ones";
        "(mul ?x (fill[1.0]))" => "?x";
        "x: f32[3,4] | fill: f32[3,4]"
    "ones-mul";
        "(mul (fill[1.0]) ?x)" => "?x";
        "x: f32[3,4] | fill: f32[3,4]"
    "mul-by-spread-ones";
        "(mul[?r] ?x (fill[1.0]))" => "?x" if "keeps_left ?r";
        "r: ab,b->ab | x: f32[3,4] | fill: f32[4]"
    "spread-ones-mul";
        "(mul[?r] (fill[1.0]) ?x)" => "?x" if "keeps_right ?r";
        "r: a,ab->ab | x: f32[3,4] | fill: f32[3]"
    "div-by-ones";
        "(div ?x (fill[1.0]))" => "?x";
        "x: f32[3,4] | fill: f32[3,4]"
    "cast-to-same";
        "(cast[?t] ?x)" => "?x";
        "t: f32 | x: f32[3,4]"
    "stop-of-stop";
        "(stop_gradient (stop_gradient ?x))" => "(stop_gradient ?x)";
        "x: f32[3,4]"
    "sum-of-product";
        "(reduce_sum[?r] (mul ?x ?y))" => "(dot[contract ?r] ?x ?y)";
        "r: abc->ab | x: f32[3,4,2] | y: f32[3,4,2]"
};
