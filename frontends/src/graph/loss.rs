//! Cross-entropy of the next token, of ops that keep a vocabulary split over ranks.

use super::parts::{rule, spread};
use shardc_ir::builder::Builder;
use shardc_ir::func::Value;
use shardc_ir::ops::{
    Add, AtLeast, Dot, Exp, Literal, Log, Mul, ReduceMax, ReduceSum, Scale, StopGradient, Sub, Take,
};
use std::sync::Arc;

/// How labels are scored, beside those that are negative, which are not.
#[derive(Clone, Default, PartialEq, Debug)]
pub(crate) struct Scoring {
    /// Another label that is not scored.
    pub ignored: Option<i32>,
    /// This part of a label is spread over all classes.
    pub smoothing: f64,
    /// Of each class.
    pub weights: Option<Arc<[f32]>>,
}

impl Scoring {
    /// A mean is over other numbers than those of labels that are not negative.
    pub fn divides(&self) -> bool {
        self.ignored.is_some() || self.weights.is_some()
    }
}

/// What each token is scored by.
pub(crate) struct TokenScores {
    /// Its loss, whether it counts or not.
    pub each: Value,
    /// 1 of those that count, 0 of others.
    pub valid: Value,
}

/// The losses of tokens: -log softmax(logits)[target]. logits [b, s, v], targets i32 [b, s], or of
/// rows [b, v] and [b]; losses are of the shape of targets.
pub(crate) fn scores(b: &mut Builder, logits: Value, targets: Value, how: &Scoring) -> TokenScores {
    b.enter("loss");
    let n = b.ty(targets).rank();
    let t = &"bs"[..n];
    let over = rule(&format!("{t}v->{t}"), &[n + 1]);
    let max = b.push("max", ReduceMax { rule: over.clone() }, &[logits]);
    let max = b.push("max", StopGradient {}, &[max]);
    b.note("softmax does not change if all logits of a token move alike");
    let z = spread(&format!("{t}v,{t}->{t}v"), &[n + 1, n]);
    let z = b.push("z", Sub { rule: z }, &[logits, max]);
    let e = b.push("exp", Exp {}, &[z]);
    let sum = b.push("sum", ReduceSum { rule: over.clone() }, &[e]);
    let lse = b.push("lse", Log {}, &[sum]);
    let at = format!("{t}v,{t}->{t}");
    let at_target = b.push("z_target", Take::by(&at, &[n + 1, n]), &[z, targets]);
    let nll = b.push("nll", Sub::same(), &[lse, at_target]);
    let weights = how.weights.as_ref().map(|w| {
        let all = b.push("weights", Literal { values: w.clone() }, &[]);
        (all, b.push("weight", Take::by(&format!("v,{t}->{t}"), &[1, n]), &[all, targets]))
    });
    let nll = weights.map_or(nll, |(_, own)| b.push("nll", Mul::same(), &[nll, own]));
    let each = match how.smoothing {
        0.0 => nll,
        part => {
            let classes = b.ty(logits).dims[n].size as f64;
            // All classes: (Σ w) lse - Σ w z.
            let (total, all) = match (weights, &how.weights) {
                (Some((all, _)), Some(w)) => {
                    let by = format!("{t}v,v->{t}");
                    let sum = b.push("z_all", Dot::by(&by, &[n + 1, 1]), &[z, all]);
                    (w.iter().map(|&x| f64::from(x)).sum(), sum)
                }
                _alike => (classes, b.push("z_all", ReduceSum { rule: over }, &[z])),
            };
            let lse = b.push("lse_all", Scale { by: total }, &[lse]);
            let all = b.push("nll_all", Sub::same(), &[lse, all]);
            let all = b.push("nll_all", Scale { by: part / classes }, &[all]);
            let nll = b.push("nll", Scale { by: 1.0 - part }, &[nll]);
            b.push("nll", Add::same(), &[nll, all])
        }
    };
    let valid = b.push("valid", AtLeast { bound: 0.0 }, &[targets]);
    let valid = how.ignored.map_or(valid, |label| {
        let [from, above] = [0, 1].map(|i| AtLeast { bound: f64::from(label) + f64::from(i) });
        let from = b.push("from", from, &[targets]);
        let above = b.push("above", above, &[targets]);
        let is = b.push("ignored", Sub::same(), &[from, above]);
        b.push("valid", Sub::same(), &[valid, is])
    });
    TokenScores { each, valid }
}

/// The sum of the losses of tokens that count, a scalar, normalised elsewhere.
pub(crate) fn sum_of(b: &mut Builder, scores: &TokenScores) -> Value {
    let n = b.ty(scores.each).rank();
    let t = &"bs"[..n];
    b.push("loss", Dot::by(&format!("{t},{t}->"), &[n, n]), &[scores.each, scores.valid])
}

/// The sum over tokens of -log softmax(logits)[target], without those whose target is negative.
pub(crate) fn sum_of_losses(b: &mut Builder, logits: Value, targets: Value) -> Value {
    let scores = scores(b, logits, targets, &Scoring::default());
    sum_of(b, &scores)
}
