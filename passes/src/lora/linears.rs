//! Which products of a model may have adapters.

use super::{module_of, path};
use shardc_ir::func::{Func, Node, RoleKind, Value, ValueMap};
use shardc_ir::ops::Kind;
use shardc_ir::rule::has_letter;
use shardc_ir::weights::Weight;
use std::collections::BTreeMap;

/// A product of a value and a weight.
#[derive(Clone, Debug)]
pub(super) struct Linear {
    pub node: usize,
    /// The module that has the weight, as PEFT calls it.
    pub module: String,
    /// Index of the weight.
    pub weight: usize,
    /// Which operand the weight is, and which the other value.
    pub of: usize,
    pub operand: usize,
    /// The weight's dims of results and of what is summed over.
    pub out: usize,
    pub input: usize,
    /// It is one of each expert.
    pub experts: bool,
    /// It is in a layer, and neither makes scores of experts nor a single number.
    pub usual: bool,
    /// The weight is also a table in which rows are looked up: the module that has the table.
    pub tied: Option<String>,
}

impl Linear {
    /// Sizes of results and of what is summed over.
    pub fn sides(&self, w: &Weight) -> [usize; 2] {
        [self.out, self.input].map(|d| w.shape[d])
    }

    /// Names of the tensors of A and B.
    pub fn names(&self, _: &Weight) -> (String, String) {
        let of = |which: &str| format!("{PREFIX}{}.{which}.weight", self.module);
        (of("lora_A"), of("lora_B"))
    }

    /// The last word of the module's path.
    pub fn word(&self) -> &str {
        self.module.rsplit('.').next().unwrap_or(&self.module)
    }
}

/// What PEFT writes before the path of a module.
pub(super) const PREFIX: &str = "base_model.model.";

/// All products with a matrix, or with the matrices of experts, in the order of the program; none of adapters.
pub(super) fn linears(f: &Func, weights: &[Weight]) -> Vec<Linear> {
    let params =
        f.args.iter().filter(|a| a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param));
    let place: BTreeMap<Value, usize> =
        params.zip(0..weights.len()).map(|(a, i)| (a.value, i)).collect();
    let decides = decides(f, &place);
    let mut looked_up = f.per_value(false);
    let lookups = f.nodes.iter().filter(|n| n.op.facts().kind == Kind::Lookup);
    lookups.for_each(|n| looked_up[n.ins[0]] = true);
    // Values that neither inputs nor parameters are read for.
    let mut fixed = f.per_value(false);
    for n in &f.nodes {
        if n.ins.iter().all(|v| fixed[*v]) {
            n.outs.iter().for_each(|o| fixed[*o] = true);
        }
    }
    let layered = |n: &Node| f.scope_info(n.scope).layer.is_some();
    // A model without layers has products all the same.
    let layers = f.nodes.iter().any(layered);
    let mut out = vec![];
    for (node, n) in f.nodes.iter().enumerate() {
        let experts = n.op.facts().kind == Kind::GroupedProduct;
        if !experts && !n.op.is_matrix_product() {
            continue;
        }
        let ranks: Vec<usize> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
        let of = n.ins.iter().rposition(|v| place.contains_key(v));
        let Some((of, &weight)) = of.and_then(|of| Some((of, place.get(&n.ins[of])?))) else {
            continue;
        };
        let w = &weights[weight];
        let operand = if of == 0 { 1 } else { 0 };
        // Rows that the program itself looks up, one of each place: a table, as of biases by distance.
        if fixed[n.ins[operand]] {
            continue;
        }
        if w.shape.len() != 2 + usize::from(experts)
            || w.is_adapter()
            || w.experts.is_some() != experts
        {
            continue;
        }
        let def = n.op.def();
        let rule = def.rule(&ranks);
        let sides = |made: bool| {
            let is = |d: &usize| {
                let letter = rule.ins[of][*d].single();
                letter.is_some_and(|l| {
                    has_letter(&rule.outs[0], l) == made
                        && has_letter(&rule.ins[operand], l) != made
                })
            };
            (0..w.shape.len()).find(is)
        };
        let Some((out_dim, input)) = sides(true).zip(sides(false)) else { continue };
        if w.part.is_some_and(|p| p.dim != out_dim) {
            continue;
        }
        let tensor = w.tensor.as_str();
        let own = module_of(path(f, n.scope), tensor);
        // Two modules have the one of an embedding and an output projection that are tied.
        let (module, tied) = match looked_up[n.ins[of]] {
            false => (own, None),
            true => (path(f, n.scope).to_string(), Some(own)),
        };
        out.push(Linear {
            node,
            module,
            weight,
            of,
            operand,
            out: out_dim,
            input,
            experts,
            usual: (!layers || layered(n))
                && !experts
                && !decides[n.outs[0]]
                && w.shape[out_dim] > 1,
            tied,
        });
    }
    out
}

/// Values by which experts are chosen, back to the product that makes them.
fn decides(f: &Func, params: &BTreeMap<Value, usize>) -> ValueMap<bool> {
    let mut is = f.per_value(false);
    for n in f.nodes.iter().rev() {
        let kind = n.op.facts().kind;
        let ends = n.op.is_matrix_product() && n.ins.iter().any(|v| params.contains_key(v));
        if kind == Kind::Choice || (!ends && n.outs.iter().any(|o| is[o])) {
            n.ins.iter().for_each(|v| is[v] = true);
        }
    }
    is
}
