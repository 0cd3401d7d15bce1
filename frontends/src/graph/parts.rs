//! Norms and products with a weight, written with the ops of the IR.

use crate::family::WeightOrder;
use shardc_ir::attr::{Broadcast, RuleAttr, Sizes};
use shardc_ir::builder::Builder;
use shardc_ir::func::Value;
use shardc_ir::ops::draw::StreamName;
use shardc_ir::ops::{
    Add, AttentionDropout, Dot, Draw, Mul, ReduceSum, Reshape, Rsqrt, Scale, Shift, Sub, Tanh,
};
use shardc_ir::rng::Distribution;
use shardc_ir::rule::Letter;

/// The parameters of a norm.
pub(super) struct NormParams {
    /// None: the norm alone.
    pub weight: Option<Value>,
    /// The weight is what is beyond 1.
    pub around_one: bool,
    /// The mean is subtracted first.
    pub centered: bool,
    pub bias: Option<Value>,
    pub scope: String,
}

/// The parameters of a product.
pub(super) struct LinearParams {
    pub weight: Value,
    pub bias: Option<Value>,
    pub layout: WeightOrder,
    pub scope: String,
}

pub(super) fn rule(text: &str, ranks: &[usize]) -> RuleAttr {
    RuleAttr::new(text, ranks)
}

pub(super) fn spread(text: &str, ranks: &[usize]) -> Broadcast {
    Broadcast::new(text, ranks)
}

/// Sizes of letters that no operand fixes.
pub(super) fn letter_sizes(all: &[(char, usize)]) -> Sizes {
    Sizes(all.iter().map(|&(c, n)| (Letter(c as u8 - b'a'), n)).collect())
}

/// A norm over the last of `dims`; the weight has that dim, or the last of them.
pub(super) fn norm(b: &mut Builder, p: &NormParams, eps: f64, x: Value, dims: &str) -> Value {
    b.enter(&p.scope);
    let rank = dims.len();
    let rows = &dims[..rank - 1];
    let mean_of = 1.0 / b.ty(x).dims[rank - 1].size as f64;
    let by_row = format!("{dims},{rows}->{dims}");
    let x = match p.centered {
        false => x,
        true => {
            let sum =
                b.push("sum", ReduceSum { rule: rule(&format!("{dims}->{rows}"), &[rank]) }, &[x]);
            let mean = b.push("mean", Scale { by: mean_of }, &[sum]);
            b.push("centered", Sub { rule: spread(&by_row, &[rank, rank - 1]) }, &[x, mean])
        }
    };
    let squares =
        b.push("squares", Dot::by(&format!("{dims},{dims}->{rows}"), &[rank, rank]), &[x, x]);
    let mean = b.push("variance", Scale { by: mean_of }, &[squares]);
    let shifted = b.push("variance", Shift { by: eps }, &[mean]);
    let scale = b.push("rstd", Rsqrt {}, &[shifted]);
    let y = b.push("normed", Mul::by(&by_row, &[rank, rank - 1]), &[x, scale]);
    let Some(weight) = p.weight else { return y };
    let own = b.ty(weight).rank();
    let by_last = format!("{dims},{}->{dims}", &dims[rank - own..]);
    let weighted = b.push("normed", Mul::by(&by_last, &[rank, own]), &[y, weight]);
    let y = match p.around_one {
        false => weighted,
        // Not (1 + weight) x: in bf16 the sum would lose the weight's digits.
        true => b.push("normed", Add::same(), &[y, weighted]),
    };
    match p.bias {
        None => y,
        Some(v) => b.push("normed", Add { rule: spread(&by_last, &[rank, own]) }, &[y, v]),
    }
}

/// x times a factor, unless it is 1.
pub(super) fn scaled(b: &mut Builder, hint: &'static str, by: f64, x: Value) -> Value {
    if by == 1.0 { x } else { b.push(hint, Scale { by }, &[x]) }
}

/// c tanh(x / c), if there is a softcap c.
pub(super) fn capped(b: &mut Builder, hint: &'static str, softcap: Option<f64>, x: Value) -> Value {
    let Some(c) = softcap else { return x };
    let x = b.push(hint, Scale { by: 1.0 / c }, &[x]);
    let x = b.push(hint, Tanh {}, &[x]);
    b.push(hint, Scale { by: c }, &[x])
}

/// x [b, s, from] times a weight, plus its bias: [b, s, to].
pub(super) fn linear(
    b: &mut Builder,
    hint: &'static str,
    p: &LinearParams,
    x: Value,
    from: char,
    to: char,
) -> Value {
    b.enter(&p.scope);
    let weight = match p.layout {
        WeightOrder::OutIn => format!("{to}{from}"),
        WeightOrder::InOut => format!("{from}{to}"),
    };
    let y = b.push(hint, Dot::by(&format!("bs{from},{weight}->bs{to}"), &[3, 2]), &[x, p.weight]);
    match p.bias {
        None => y,
        Some(v) => {
            b.push(hint, Add { rule: spread(&format!("bs{to},{to}->bs{to}"), &[3, 1]) }, &[y, v])
        }
    }
}

/// Splits joined heads or joins them; `letter` (`n` or `g`) counts `heads`.
pub(super) fn reshape(
    b: &mut Builder,
    hint: &'static str,
    text: &str,
    letter: u8,
    heads: usize,
    x: Value,
) -> Value {
    let sizes = letter_sizes(&[(letter as char, heads)]);
    let rank = b.ty(x).rank();
    b.push(hint, Reshape { rule: rule(text, &[rank]), sizes }, &[x])
}

/// Inputs that draws depend on: the run, and the places of tokens [b, s].
#[derive(Clone, Copy)]
pub(super) struct Drawn {
    pub run: Value,
    pub places: Value,
}

/// Dropout of this rate, above 0 and below 1.
#[derive(Clone, Copy)]
pub(super) struct Dropout {
    pub drawn: Drawn,
    pub rate: f64,
}

impl Dropout {
    /// That of probabilities of attention in a scope.
    pub fn of_attention(&self, scope: &str) -> AttentionDropout {
        let stream = StreamName::of(&format!("{scope}.probabilities"));
        AttentionDropout { rate: 1.0 - self.rate, stream }
    }
}

/// `x` [b, s, h] with elements set to 0 at random, by the stream of a scope's name, and the others larger by as
/// much
/// (Srivastava et al., 2014).
pub(super) fn dropped(
    b: &mut Builder,
    dropout: Option<Dropout>,
    scope: &str,
    x: Value,
    width: usize,
) -> Value {
    let Some(d) = dropout else { return x };
    b.enter(scope);
    let draw = Draw {
        rule: RuleAttr::new("k,bs->bsh", &[1, 2]),
        from: Distribution::Keep(1.0 - d.rate),
        stream: StreamName::of(scope),
        sizes: Sizes([(Letter(b'h' - b'a'), width)].into_iter().collect()),
    };
    let kept = b.push("kept", draw, &[d.drawn.run, d.drawn.places]);
    b.push("dropped", Mul::same(), &[x, kept])
}
