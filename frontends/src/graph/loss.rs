//! Cross-entropy of the next token, of ops that keep a vocabulary split over ranks.

use super::parts::rule;
use shardc_ir::builder::Builder;
use shardc_ir::func::Value;
use shardc_ir::ops::{AtLeast, Dot, Exp, Log, ReduceMax, ReduceSum, StopGradient, Sub, Take};

/// The sum over tokens of -log softmax(logits)[target], without those whose target is negative.
/// logits [b, s, v], targets i32 [b, s], or of rows [b, v] and [b]; the result is a scalar, normalised
/// elsewhere.
pub(crate) fn sum_of_losses(b: &mut Builder, logits: Value, targets: Value) -> Value {
    b.enter("loss");
    let n = b.ty(targets).rank();
    let t = &"bs"[..n];
    let over = rule(&format!("{t}v->{t}"), &[n + 1]);
    let max = b.push("max", ReduceMax { rule: over.clone() }, &[logits]);
    let max = b.push("max", StopGradient {}, &[max]);
    b.note("softmax does not change if all logits of a token move alike");
    let spread = super::parts::spread(&format!("{t}v,{t}->{t}v"), &[n + 1, n]);
    let z = b.push("z", Sub { rule: spread }, &[logits, max]);
    let e = b.push("exp", Exp {}, &[z]);
    let sum = b.push("sum", ReduceSum { rule: over }, &[e]);
    let lse = b.push("lse", Log {}, &[sum]);
    let at_target =
        b.push("z_target", Take::by(&format!("{t}v,{t}->{t}"), &[n + 1, n]), &[z, targets]);
    let nll = b.push("nll", Sub::same(), &[lse, at_target]);
    let valid = b.push("valid", AtLeast { bound: 0.0 }, &[targets]);
    b.push("loss", Dot::by(&format!("{t},{t}->"), &[n, n]), &[nll, valid])
}
