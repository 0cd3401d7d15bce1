//! Rules of layout: moves of dims that cancel, join, or vanish in the op that reads them.

use super::pattern::{Line, rules};

#[rustfmt::skip]
pub(crate) const RULES: &[Line] = rules! {
    "transpose-of-transpose";
        "(transpose[?r] (transpose[?s] ?x))" => "(transpose[compose ?r ?s] ?x)";
        "r: abc->bca | s: xyz->zxy | x: f32[2,3,4]"
    "transpose-to-same";
        "(transpose[?r] ?x)" => "?x" if "identity ?r";
        "r: ab->ab | x: f32[3,3]"
    "sum-of-sum";
        "(reduce_sum[?r] (reduce_sum[?s] ?x))" => "(reduce_sum[compose ?r ?s] ?x)";
        "r: ab->b | s: xyz->xz | x: f32[2,3,4]"
    "sum-of-transpose";
        "(reduce_sum[?r] (transpose[?s] ?x))" => "(reduce_sum[compose ?r ?s] ?x)";
        "r: ab->b | s: xy->yx | x: f32[3,4]"
    "transpose-of-sum";
        "(transpose[?r] (reduce_sum[?s] ?x))" => "(reduce_sum[compose ?r ?s] ?x)";
        "r: ab->ba | s: xyz->xz | x: f32[2,3,4]"
    "max-of-transpose";
        "(reduce_max[?r] (transpose[?s] ?x))" => "(reduce_max[compose ?r ?s] ?x)";
        "r: ab->b | s: xy->yx | x: f32[3,4]"
    "dot-of-transpose-left";
        "(dot[?r] (transpose[?s] ?x) ?y)" => "(dot[compose_left ?r ?s] ?x ?y)";
        "r: mk,kn->mn | s: ab->ba | x: f32[4,3] | y: f32[4,2]"
    "dot-of-transpose-right";
        "(dot[?r] ?x (transpose[?s] ?y))" => "(dot[compose_right ?r ?s] ?x ?y)";
        "r: mk,kn->mn | s: ab->ba | x: f32[3,4] | y: f32[2,4]"
    "transpose-of-dot";
        "(transpose[?r] (dot[?s] ?x ?y))" => "(dot[compose_out ?r ?s] ?x ?y)";
        "r: ab->ba | s: mk,kn->mn | x: f32[3,4] | y: f32[4,2]"
    "reshape-back";
        "(reshape[?r; ?n] (reshape[?s; ?m] ?x))" => "?x";
        "r: s(nd)->snd | n: n=2 | s: snd->s(nd) | m: n=2 | x: f32[3,2,4]"
    "mul-of-expand";
        "(mul ?x (expand[?r; ?n] ?y))" => "(mul[spread_right ?r] ?x ?y)";
        "r: b->ab | n: a=3 | x: f32[3,4] | y: f32[4]"
    "expand-mul";
        "(mul (expand[?r; ?n] ?x) ?y)" => "(mul[spread_left ?r] ?x ?y)";
        "r: b->ab | n: a=3 | x: f32[4] | y: f32[3,4]"
    "add-of-expand";
        "(add ?x (expand[?r; ?n] ?y))" => "(add[spread_right ?r] ?x ?y)";
        "r: b->ab | n: a=3 | x: f32[3,4] | y: f32[4]"
    "sub-of-expand";
        "(sub ?x (expand[?r; ?n] ?y))" => "(sub[spread_right ?r] ?x ?y)";
        "r: b->ab | n: a=3 | x: f32[3,4] | y: f32[4]"
    "div-of-expand";
        "(div ?x (expand[?r; ?n] ?y))" => "(div[spread_right ?r] ?x ?y)";
        "r: b->ab | n: a=3 | x: f32[3,4] | y: f32[4]"
    "scale-into-transpose";
        "(scale[?a] (transpose[?r] ?x))" => "(transpose[?r] (scale[?a] ?x))";
        "a: 0.5 | r: ab->ba | x: f32[3,4]"
    "scale-out-of-transpose";
        "(transpose[?r] (scale[?a] ?x))" => "(scale[?a] (transpose[?r] ?x))";
        "a: 0.5 | r: ab->ba | x: f32[3,4]"
};
