//! Rules of collectives: fewer calls, fewer bytes, the same sums in another order.
//!
//! A `fan_out` is never removed, only merged with another: it stands for the gradient's sum.

use super::pattern::{Line, rules};

#[rustfmt::skip]
pub(crate) const RULES: &[Line] = rules! {
    "sum-of-sums";
        "(add (all_reduce[?t] ?a) (all_reduce[?t] ?b))" => "(all_reduce[?t] (add ?a ?b))";
        "t: x | a: f32[4,6]+x | b: f32[4,6]+x"
    "sum-of-three-sums";
        "(add (all_reduce[?t] ?a) (all_reduce[?t] ?b) (all_reduce[?t] ?c))"
        => "(all_reduce[?t] (add ?a ?b ?c))";
        "t: x | a: f32[4]+x | b: f32[4]+x | c: f32[4]+x"
    "difference-of-sums";
        "(sub (all_reduce[?t] ?a) (all_reduce[?t] ?b))" => "(all_reduce[?t] (sub ?a ?b))";
        "t: y | a: f32[4,6]+y | b: f32[4,6]+y"
    "sum-of-scatters";
        "(add (reduce_scatter[?t; ?d] ?a) (reduce_scatter[?t; ?d] ?b))"
        => "(reduce_scatter[?t; ?d] (add ?a ?b))";
        "t: x | d: dim=1 | a: f32[4,6]+x | b: f32[4,6]+x"
    "sum-of-gathers";
        "(add (all_gather[?t; ?d] ?a) (all_gather[?t; ?d] ?b))"
        => "(all_gather[?t; ?d] (add ?a ?b))";
        "t: x | d: dim=1 | a: f32[4,6@x] | b: f32[4,6@x]"
    "reduce-of-reduce";
        "(all_reduce[?s] (all_reduce[?t] ?a))" => "(all_reduce[union ?s ?t] ?a)";
        "s: x | t: y | a: f32[4,6]+x*y"
    "fan_out-of-fan_out";
        "(fan_out[?s] (fan_out[?t] ?a))" => "(fan_out[union ?s ?t] ?a)";
        "s: x | t: y | a: f32[4,6]"
    "gather-of-gather";
        "(all_gather[?s; ?d] (all_gather[?t; ?d] ?a))" => "(all_gather[union ?s ?t; ?d] ?a)";
        "s: x | t: y | d: dim=1 | a: f32[4,6@x*y]"
    "slice-of-slice";
        "(slice[?s; ?d] (slice[?t; ?d] ?a))" => "(slice[union ?s ?t; ?d] ?a)";
        "s: y | t: x | d: dim=1 | a: f32[4,6]"
    "scatter-of-scatter";
        "(reduce_scatter[?s; ?d] (reduce_scatter[?t; ?d] ?a))"
        => "(reduce_scatter[union ?s ?t; ?d] ?a)";
        "s: y | t: x | d: dim=1 | a: f32[4,6]+x*y"
    "slice-of-sum";
        "(slice[?t; ?d] (all_reduce[?t] ?a))" => "(reduce_scatter[?t; ?d] ?a)";
        "t: x | d: dim=0 | a: f32[5,6]+x"
    "gather-of-scatter";
        "(all_gather[?t; ?d] (reduce_scatter[?t; ?d] ?a))" => "(all_reduce[?t] ?a)";
        "t: y | d: dim=0 | a: f32[5,6]+y"
    "slice-of-gather";
        "(slice[?t; ?d] (all_gather[?t; ?d] ?a))" => "?a";
        "t: y | d: dim=0 | a: f32[5@y,6]"
    "gather-of-slice";
        "(all_gather[?t; ?d] (slice[?t; ?d] ?a))" => "?a";
        "t: y | d: dim=0 | a: f32[5,6]~y"
    "gather-of-own-slice";
        "(all_gather[?t; ?d] (slice[?t; ?d] ?a))" => "(fan_out[?t] ?a)";
        "t: y | d: dim=0 | a: f32[5,6]"
    "reduce-of-place";
        "(all_reduce[?t] (pad_to_partial[?t; ?d] ?a))" => "(all_gather[?t; ?d] ?a)";
        "t: x | d: dim=1 | a: f32[4,7@x] | out: f32[4,7]"
    "scatter-of-place";
        "(reduce_scatter[?t; ?d] (pad_to_partial[?t; ?d] ?a))" => "?a";
        "t: x | d: dim=1 | a: f32[4,7@x]"
    "move-by-gather";
        "(slice[?t; ?e] (all_gather[?t; ?d] ?a))" => "(all_to_all[?t; from ?d; to ?e] ?a)";
        "t: x | d: dim=0 | e: dim=1 | a: f32[5@x,6]"
    "move-by-scatter";
        "(reduce_scatter[?t; ?e] (pad_to_partial[?t; ?d] ?a))" => "(all_to_all[?t; from ?d; to ?e] ?a)";
        "t: x | d: dim=0 | e: dim=1 | a: f32[5@x,6]"
    "move-back";
        "(all_to_all[?t; ?f; ?g] (all_to_all[?t; ?h; ?k] ?a))" => "?a";
        "t: x | f: from=1 | g: to=0 | h: from=0 | k: to=1 | a: f32[5@x,6]"
    "turn-of-turn";
        "(permute[?t; ?m] (permute[?t; ?n] ?a))" => "(permute[?t; turns ?t ?m ?n] ?a)";
        "t: y | m: shift=1 | n: shift=1 | a: f32[4]!y"
    "turn-by-none";
        "(permute[?t; shift=0] ?a)" => "?a";
        "t: y | a: f32[4]!y"
    "scale-of-sum";
        "(scale[?c] (all_reduce[?t] ?a))" => "(all_reduce[?t] (scale[?c] ?a))";
        "c: 0.5 | t: x | a: f32[4,6]+x"
    "sum-of-scaled";
        "(all_reduce[?t] (scale[?c] ?a))" => "(scale[?c] (all_reduce[?t] ?a))";
        "c: 0.5 | t: x | a: f32[4,6]+x"
    "scatter-of-scaled";
        "(reduce_scatter[?t; ?d] (scale[?c] ?a))" => "(scale[?c] (reduce_scatter[?t; ?d] ?a))";
        "c: 0.5 | t: x | d: dim=0 | a: f32[4,6]+x"
    "scale-of-gather";
        "(scale[?c] (all_gather[?t; ?d] ?a))" => "(all_gather[?t; ?d] (scale[?c] ?a))";
        "c: 0.5 | t: x | d: dim=0 | a: f32[4@x,6]"
    "slice-of-scaled";
        "(slice[?t; ?d] (scale[?c] ?a))" => "(scale[?c] (slice[?t; ?d] ?a))";
        "c: 0.5 | t: x | d: dim=0 | a: f32[4,6]"
    "scale-of-scale";
        "(scale[?c] (scale[?e] ?a))" => "(scale[times ?c ?e] ?a)";
        "c: 0.5 | e: 3.0 | a: f32[4,6]"
    "cast-before-gather";
        "(cast[?e] (all_gather[?t; ?d] ?a))" => "(all_gather[?t; ?d] (cast[?e] ?a))";
        "e: bf16 | t: x | d: dim=0 | a: f32[4@x,6]"
    "cast-after-gather";
        "(all_gather[?t; ?d] (cast[?e] ?a))" => "(cast[?e] (all_gather[?t; ?d] ?a))";
        "e: f32 | t: x | d: dim=0 | a: bf16[4@x,6]"
};
