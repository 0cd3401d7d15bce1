//! The scalars of a step, as updates take them.

use shardc_ir::builder::Builder;
use shardc_ir::func::Value;
use shardc_ir::mesh::AtomSet;
use shardc_ir::ops::{FanOut, Scale};
use shardc_ir::text::update::Update;
use std::collections::BTreeMap;

/// What updates are given of a step: the rate, the number of the step, what gradients are
/// multiplied by, whether it applies, and what gradients that are shown are multiplied by.
pub(in crate::step) type Each = [Option<Value>; 5];

/// The step's scalars, fanned out over the atoms that split a parameter: one fan_out per set.
pub(in crate::step) struct Scalars {
    pub each: Each,
    pub grad_norm: Value,
    fanned: BTreeMap<AtomSet, Each>,
    others: BTreeMap<(Value, AtomSet), Value>,
    /// Rates of groups.
    rates: BTreeMap<usize, Value>,
}

impl Scalars {
    pub fn new(each: Each, grad_norm: Value) -> Scalars {
        let (fanned, others, rates) = Default::default();
        Scalars { each, grad_norm, fanned, others, rates }
    }

    pub fn over(&mut self, b: &mut Builder, axes: AtomSet) -> Each {
        let own = self.each;
        if axes.is_empty() {
            return own;
        }
        let mut fan_out = |v| b.push("scalar_f", FanOut { axes }, &[v]);
        *self.fanned.entry(axes).or_insert_with(|| own.map(|v| v.map(&mut fan_out)))
    }

    /// One of them, or of the rates of groups.
    pub fn one(&mut self, b: &mut Builder, v: Value, axes: AtomSet) -> Value {
        if axes.is_empty() {
            return v;
        }
        if let Some(k) = self.each.iter().position(|e| *e == Some(v)) {
            return self.over(b, axes)[k].expect("it is there");
        }
        let mut fan_out = || b.push("scalar_f", FanOut { axes }, &[v]);
        *self.others.entry((v, axes)).or_insert_with(&mut fan_out)
    }

    /// A scalar by the name that rules have for it.
    pub fn named(&mut self, b: &mut Builder, name: &str, u: &Update) -> Value {
        let [lr, step, by, applies, _] = self.each;
        let (lr, factor) = (lr.expect("a step has a rate"), u.lr);
        match name {
            "lr" if factor == 1.0 => lr,
            "lr" => *self
                .rates
                .entry(u.group)
                .or_insert_with(|| b.push("lr_of_group", Scale { by: factor }, &[lr])),
            "step" => step.expect("a step has a number"),
            "g_scale" => by.expect("a step has it"),
            "applies" => applies.expect("it is asked for where there is one"),
            "grad_norm" => self.grad_norm,
            other => panic!("an update takes {other}, which no step has"),
        }
    }
}
