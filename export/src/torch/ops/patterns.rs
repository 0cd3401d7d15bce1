//! What torch has one call for, where a plan has several ops: the table of patterns.

/// Ops that one call stands for.
///
/// A line is `result = op[number] SHAPES operands`. The operands of `mul` and `add` come in any order, and `add..` may have more
/// of them, which stay a sum. A number is one, `1/n` of the last dim of `x` or a name. SHAPES are those of operands and result
/// beside all dims (F): R lacks the last one, L has it alone; without SHAPES all are alike. `outer` is a product whose result
/// has the last dims of both. A line behind `known` may stand in another function, and stays; one behind `also` stays as long as
/// something else reads it.
pub(super) struct Pattern {
    /// Of the ops from the first to the last.
    pub lines: &'static str,
    pub outs: &'static [&'static str],
    /// It as Python, with names of values and numbers in braces.
    pub call: &'static str,
    /// The value whose memory its first result has; it has to be gone.
    pub over: Option<&'static str>,
    /// The operand over which its result may be written, if that is gone.
    pub spare: Option<&'static str>,
}

const PLAIN: Pattern = Pattern { lines: "", outs: &[], call: "", over: None, spare: None };

const RMS_NORM: Pattern = Pattern {
    lines: "squares = dot FF>R x x
            mean = scale[1/n] squares
            shifted = shift[eps] mean
            rstd = rsqrt shifted
            normed = mul FR>F x rstd
            y = mul FL>F normed weight",
    outs: &["y", "rstd"],
    call: "rms_norm({x}, {weight}, {eps})",
    ..PLAIN
};

const LAYER_NORM: Pattern = Pattern {
    lines: "sum = reduce_sum F>R x
            mean = scale[1/n] sum
            centered = sub FR>F x mean
            squares = dot FF>R centered centered
            variance = scale[1/n] squares
            shifted = shift[eps] variance
            rstd = rsqrt shifted
            normed = mul FR>F centered rstd
            scaled = mul FL>F normed weight
            y = add FL>F scaled bias",
    outs: &["y", "centered", "rstd"],
    call: "layer_norm({x}, {weight}, {bias}, {eps})",
    ..PLAIN
};

const RMS_NORM_GRAD: Pattern = Pattern {
    lines: "known normed = mul FR>F x rstd
            dw = dot FF>L d normed
            by_weight = mul FL>F d weight
            along = dot FF>R by_weight x
            square = mul rstd rstd
            cube = mul square rstd
            half = scale[-0.5] cube
            variance = mul along half
            by_root = scale[1/n] variance
            a = mul FR>F x by_root
            b = mul FR>F x by_root
            straight = mul FR>F by_weight rstd
            dx = add.. straight a b",
    outs: &["dx", "dw"],
    call: "rms_norm_grad({d}, {x}, {weight}, {rstd})",
    ..PLAIN
};

const LAYER_NORM_GRAD: Pattern = Pattern {
    lines: "known normed = mul FR>F x rstd
            dw = dot FF>L d normed
            db = reduce_sum F>L d
            by_weight = mul FL>F d weight
            along = dot FF>R by_weight x
            square = mul rstd rstd
            cube = mul square rstd
            half = scale[-0.5] cube
            variance = mul along half
            by_root = scale[1/n] variance
            a = mul FR>F x by_root
            b = mul FR>F x by_root
            straight = mul FR>F by_weight rstd
            centered = add straight a b
            sum = reduce_sum F>R centered
            mean = scale[-1/n] sum
            all = expand R>F mean
            dx = add.. centered all",
    outs: &["dx", "dw", "db"],
    call: "layer_norm_grad({d}, {x}, {weight}, {rstd})",
    ..PLAIN
};

/// Of bf16, which torch's call widens by itself.
const SILU_GRAD_CAST: Pattern = Pattern {
    lines: "wide = cast x
            s = logistic wide
            y = mul wide s
            ys = mul y s
            m = sub y ys
            p = add s m
            d_wide = cast d
            wide_grad = mul d_wide p
            dx = cast wide_grad",
    outs: &["dx"],
    call: "torch.ops.aten.silu_backward({d}, {x})",
    spare: Some("d"),
    ..PLAIN
};

const SILU_GRAD: Pattern = Pattern {
    lines: "s = logistic x
            y = mul x s
            ys = mul y s
            m = sub y ys
            p = add s m
            dx = mul d p",
    outs: &["dx"],
    call: "torch.ops.aten.silu_backward({d}, {x})",
    spare: Some("d"),
    ..PLAIN
};

/// Of the formula by tanh: sigmoid(2u) = (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³).
const GELU_GRAD: Pattern = Pattern {
    lines: "x2 = mul x x
            a = scale[0.07135481627260025] x2
            shifted = shift[1.5957691216057308] a
            u = mul x shifted
            s = logistic u
            da = scale[0.21406444881780073] x2
            du = shift[1.5957691216057308] da
            ss = mul s s
            q = sub s ss
            xq = mul x q
            pdf = mul xq du
            p = add s pdf
            dx = mul d p",
    outs: &["dx"],
    call: "torch.ops.aten.gelu_backward({d}, {x}, approximate=\"tanh\")",
    spare: Some("d"),
    ..PLAIN
};

/// Of bf16.
const GELU_GRAD_CAST: Pattern = Pattern {
    lines: "wide = cast x
            x2 = mul wide wide
            a = scale[0.07135481627260025] x2
            shifted = shift[1.5957691216057308] a
            u = mul wide shifted
            s = logistic u
            da = scale[0.21406444881780073] x2
            du = shift[1.5957691216057308] da
            ss = mul s s
            q = sub s ss
            xq = mul wide q
            pdf = mul xq du
            p = add s pdf
            d_wide = cast d
            wide_grad = mul d_wide p
            dx = cast wide_grad",
    ..GELU_GRAD
};

/// By erf: x / 2 (1 + erf(x / √2)).
const GELU_ERF: Pattern = Pattern {
    lines: "scaled = scale[0.7071067811865476] x
            erf = erf scaled
            shifted = shift[1] erf
            half = scale[0.5] x
            y = mul half shifted",
    outs: &["y"],
    call: "F.gelu({x})",
    ..PLAIN
};

const GELU_ERF_GRAD: Pattern = Pattern {
    lines: "also scaled = scale[0.7071067811865476] x
            also erf = erf scaled
            also shifted = shift[1] erf
            also half = scale[0.5] x
            d_half = mul shifted d
            straight = scale[0.5] d_half
            d_erf = mul half d
            square = mul scaled scaled
            negative = scale[-1] square
            exp = exp negative
            slope = scale[1.1283791670955126] exp
            d_scaled = mul slope d_erf
            along = scale[0.7071067811865476] d_scaled
            dx = add along straight",
    outs: &["dx"],
    call: "torch.ops.aten.gelu_backward({d}, {x})",
    spare: Some("d"),
    ..PLAIN
};

const CROSS_ENTROPY: Pattern = Pattern {
    lines: "max = reduce_max F>R x
            z = sub FR>F x max
            exp = exp z
            sum = reduce_sum F>R exp
            lse = log sum
            target = take FR>R z targets
            nll = sub lse target",
    outs: &["nll", "exp"],
    call: "cross_entropy({x}, {targets})",
    ..PLAIN
};

/// What backward reads of the exponentials, which [`CROSS_ENTROPY`] has left as log-probabilities.
const CROSS_ENTROPY_GRAD: Pattern = Pattern {
    lines: "negative = scale[-1] d
            at = index_add RR>F negative targets
            by_sum = div d sum
            all = expand R>F by_sum
            p = mul all exp
            dx = add at p",
    outs: &["dx"],
    call: "cross_entropy_grad({d}, {exp}, {targets}, {start})",
    over: Some("exp"),
    ..PLAIN
};

/// The same, of exponentials and their sum: where ranks split the vocabulary, or logits are computed again.
const EXPONENTIALS_GRAD: Pattern = Pattern {
    call: "cross_entropy_grad({d}, {exp}, {targets}, {start}, {sum})",
    ..CROSS_ENTROPY_GRAD
};

const ADD_PRODUCT: Pattern = Pattern {
    lines: "product = dot outer a b
            sum = accumulate accumulator product",
    outs: &["sum"],
    call: "{accumulator}.addmm_({a}.flatten(0, -2).t(), {b}.flatten(0, -2))",
    over: Some("accumulator"),
    ..PLAIN
};

const LINEAR: Pattern = Pattern {
    lines: "product = dot linear x weight
            y = add FL>F product bias",
    outs: &["y"],
    call: "F.linear({x}, {weight}, {bias})",
    ..PLAIN
};

const LINEAR_TURNED: Pattern = Pattern {
    lines: "product = dot turned x weight
            y = add FL>F product bias",
    outs: &["y"],
    call: "F.linear({x}, {weight}.t(), {bias})",
    ..PLAIN
};

/// Those that read what forward has saved.
pub(super) const BACKWARD: &[&Pattern] = &[
    &LAYER_NORM_GRAD,
    &RMS_NORM_GRAD,
    &SILU_GRAD_CAST,
    &SILU_GRAD,
    &GELU_GRAD_CAST,
    &GELU_GRAD,
    &GELU_ERF_GRAD,
    &ADD_PRODUCT,
];
/// Those that save it.
pub(super) const FORWARD: &[&Pattern] =
    &[&LAYER_NORM, &RMS_NORM, &GELU_ERF, &LINEAR, &LINEAR_TURNED];
/// The loss, its gradient, and that of a loss that is not one call.
pub(super) const LOSS: [&Pattern; 3] = [&CROSS_ENTROPY, &CROSS_ENTROPY_GRAD, &EXPONENTIALS_GRAD];
