//! The norm of all gradients, and what it makes of them: without the scale of the loss, clipped, or of no effect.

use shardc_ir::attr::RuleAttr;
use shardc_ir::builder::Builder;
use shardc_ir::func::{ParamLayout, Value};
use shardc_ir::mesh::{AtomSet, PIPELINE};
use shardc_ir::ops::cast::in_f32;
use shardc_ir::ops::*;
use shardc_ir::types::Type;
use std::collections::BTreeMap;

/// Added to the norm before dividing, as torch's `clip_grad_norm_` does.
const CLIP_EPS: f64 = 1e-6;

/// What gradients are multiplied by.
pub(super) struct By {
    /// The norm, of gradients without the scale of the loss.
    pub norm: Value,
    /// One over the scale of the loss, if there is one.
    pub unscale: Option<Value>,
    /// 0 if the step must change nothing; `None` if it never must.
    pub applies: Option<Value>,
    /// So that they are clipped, and not scaled.
    pub factor: Value,
}

impl By {
    /// Of the norm of gradients as they are, times `scale`.
    pub fn new(b: &mut Builder, norm: Value, scale: Option<Value>, clip: Option<f64>) -> By {
        let unscale = scale.map(|scale| {
            let one = constant(b, "one", 1.0);
            b.push("unscale", Div::same(), &[one, scale])
        });
        let norm = match unscale {
            Some(by) => b.push("grad_norm", Mul::same(), &[norm, by]),
            None => norm,
        };
        let applies = unscale.map(|_| {
            let bound = constant(b, "largest", f64::from(f32::MAX));
            let applies = b.push("applies", Less::same(), &[norm, bound]);
            b.note("0 if gradients have overflowed: then nothing changes");
            applies
        });
        let clip = clip.map(|max| {
            let shifted = b.push("norm_eps", Shift { by: CLIP_EPS }, &[norm]);
            let top = constant(b, "max_norm", max);
            let ratio = b.push("clip", Div::same(), &[top, shifted]);
            b.push("clip", Clamp { lo: 0.0, hi: 1.0 }, &[ratio])
        });
        let factor = match (clip, unscale) {
            (Some(clip), Some(unscale)) => b.push("g_scale", Mul::same(), &[clip, unscale]),
            (Some(by), None) | (None, Some(by)) => by,
            (None, None) => constant(b, "g_scale", 1.0),
        };
        By { norm, unscale, applies, factor }
    }
}

/// Sums of squares of all gradients, one of those that are split alike.
pub(super) fn squares(b: &mut Builder, params: &[&ParamLayout], grads: &[Value]) -> Vec<Value> {
    let mut groups: BTreeMap<AtomSet, Vec<Value>> = BTreeMap::new();
    for (p, &g) in params.iter().zip(grads) {
        b.enter(&p.scope);
        let letters: String = ('a'..).take(b.ty(g).rank()).collect();
        let rule = RuleAttr::new(&format!("{letters},{letters}->"), &[letters.len(); 2]);
        let g = in_f32(b, g);
        let sq = b.push("sq", Dot { rule }, &[g, g]);
        groups.entry(b.ty(sq).sum).or_default().push(sq);
    }
    b.enter("step");
    groups.values().map(|parts| b.push("squares", Add::same(), parts)).collect()
}

/// What was summed on ranks, scalars that are there at the end of a step, as a whole: those of one group of ranks in
/// one call.
pub(super) fn wholes(b: &mut Builder, sums: &[(&'static str, Value)]) -> Vec<Value> {
    let mut wholes: Vec<Value> = sums.iter().map(|s| s.1).collect();
    let mut groups: BTreeMap<AtomSet, Vec<usize>> = BTreeMap::new();
    for (i, &(_, v)) in sums.iter().enumerate() {
        groups.entry(b.ty(v).sum).or_default().push(i);
    }
    groups.remove(&AtomSet::default());
    for (axes, of) in groups {
        let (hints, ins): (Vec<&str>, Vec<Value>) = of.iter().map(|&i| sums[i]).unzip();
        let outs = b.push_n(&hints, AllReduce { axes }, &ins);
        if hints.contains(&"squares") {
            b.note("each piece of a split gradient is counted by the rank that has it");
        }
        of.iter().zip(outs).for_each(|(&i, whole)| wholes[i] = whole);
    }
    wholes
}

/// Square root of the sum of these.
pub(super) fn norm(b: &mut Builder, sums: &[Value]) -> Value {
    let total = match sums {
        [] => b.push_as("squares", Fill { value: 0.0 }, &[], &Type::f32(&[])),
        [one] => *one,
        many => b.push("squares", Add::same(), many),
    };
    let total = match mesh_pipeline(b) {
        None => total,
        Some(axes) => {
            let own = b.push("squares_own", ToPartial { axes }, &[total]);
            let all = b.push("squares", AllReduce { axes }, &[own]);
            b.note("over all stages");
            all
        }
    };
    b.push("grad_norm", Sqrt {}, &[total])
}

/// The atoms of the pipeline, if there is one.
fn mesh_pipeline(b: &Builder) -> Option<AtomSet> {
    b.mesh.axis(PIPELINE)
}

fn constant(b: &mut Builder, hint: &'static str, value: f64) -> Value {
    b.push_as(hint, Fill { value }, &[], &Type::f32(&[]))
}
