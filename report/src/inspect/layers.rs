//! The collectives of a plan, counted where a person looks for them: per decoder layer and
//! microbatch, per scope outside the layers, and per step.

use crate::report::{Experts, phase_of};
use serde::Serialize;
use shardc_ir::func::{Func, Node, Port, RoleKind};
use shardc_ir::group::begins_call;
use shardc_ir::plan::Plan;
use std::collections::{BTreeMap, BTreeSet};

/// Where calls happen.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "where", rename_all = "snake_case")]
pub enum Where {
    /// In each of these decoder layers, once per microbatch; `last` is included.
    Layers { first: u32, last: u32 },
    /// In a scope outside the layers (embedding, head, loss), once per microbatch.
    Scope { path: String },
    /// Before and after the microbatches, once per step.
    Step,
}

/// All calls of one kind over one axis in one phase of one part.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Calls {
    /// `forward`, `backward` or `step`.
    pub phase: &'static str,
    pub kind: &'static str,
    /// Axis names in mesh order, joined by `+`.
    pub axis: String,
    /// Calls per microbatch (of one layer), or per step in [`Where::Step`].
    pub calls: usize,
    /// Tensors in these calls.
    pub tensors: usize,
    /// Those of the tensors that are gradients of parameters, of all microbatches.
    pub gradients: usize,
    /// Whole bytes that one rank sends in these calls, under the ring cost of each.
    #[serde(serialize_with = "crate::report::whole")]
    pub bytes: f64,
    /// Numbers of the calls, as in `explain collective:N`; those of the first layer of several.
    pub numbers: Vec<usize>,
}

/// One part with its calls, in program order.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Section {
    #[serde(flatten)]
    pub part: Where,
    pub calls: Vec<Calls>,
}

/// The collectives of a plan.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct LayerCollectives {
    /// Microbatches per step.
    pub microbatches: usize,
    /// In the order of the forward program; the step last. Equal neighbouring layers are one.
    pub sections: Vec<Section>,
}

impl Section {
    /// Number of calls of this phase and kind.
    pub fn count(&self, phase: &str, kind: &str) -> usize {
        let of = |c: &&Calls| c.phase == phase && c.kind == kind;
        self.calls.iter().filter(of).map(|c| c.calls).sum()
    }
    /// Bytes one rank sends for one layer and microbatch, or per step in [`Where::Step`].
    pub fn bytes(&self) -> f64 {
        self.calls.iter().map(|c| c.bytes).sum()
    }
    /// How often a step has what is counted here: layers times microbatches, or 1.
    pub fn times(&self, microbatches: usize) -> usize {
        match self.part {
            Where::Layers { first, last } => (last - first + 1) as usize * microbatches,
            Where::Scope { .. } => microbatches,
            Where::Step => 1,
        }
    }
}

impl LayerCollectives {
    /// The section of a decoder layer; `None` if the layer has no collectives.
    pub fn layer(&self, n: u32) -> Option<&Section> {
        self.sections.iter().find(|s| match s.part {
            Where::Layers { first, last } => first <= n && n <= last,
            Where::Scope { .. } | Where::Step => false,
        })
    }
    /// The section of the step scope.
    pub fn step(&self) -> Option<&Section> {
        self.sections.iter().find(|s| s.part == Where::Step)
    }
    /// Calls and bytes of one rank per step.
    pub fn total(&self) -> (usize, f64) {
        self.sections.iter().fold((0, 0.0), |(n, b), s| {
            let times = s.times(self.microbatches);
            let calls: usize = s.calls.iter().map(|c| c.calls).sum();
            (n + calls * times, b + s.bytes() * times as f64)
        })
    }
}

/// Function and node of every collective of a step, in program order. The first one is
/// `collective:1`.
pub fn numbered(plan: &Plan) -> Vec<(usize, usize)> {
    let mut called: BTreeSet<usize> = BTreeSet::new();
    called.extend(plan.classes.iter().flat_map(|c| c.calls()).map(|c| c.func));
    let nodes = plan.module.funcs.iter().enumerate().filter(|(fi, _)| called.contains(fi));
    let all = nodes.flat_map(|(fi, f)| (0..f.nodes.len()).map(move |n| (fi, n)));
    all.filter(|&(f, n)| plan.module.funcs[f].nodes[n].op.collective().is_some()).collect()
}

/// True if operand `i` of a node is the sum of a parameter's gradients over the microbatches.
pub fn is_gradient(f: &Func, n: &Node, i: usize) -> bool {
    let is =
        |p: &Port, kinds: &[RoleKind]| p.role.as_ref().is_some_and(|r| kinds.contains(&r.kind));
    let ends = [RoleKind::Grad, RoleKind::GradSum];
    let given = |p: &&Port| !f.kind.is_looped() && p.value == n.ins[i];
    f.args.iter().filter(given).any(|p| is(p, &ends))
        || f.results.iter().any(|p| Some(&p.value) == n.outs.get(i) && is(p, &[RoleKind::GradSum]))
}

/// Counts the collectives of a step on the ranks of a class.
pub fn layer_collectives(plan: &Plan, class: usize) -> LayerCollectives {
    let (own, experts) = (&plan.classes[class].funcs, Experts::of(plan));
    let mut layers: BTreeMap<u32, Vec<Calls>> = BTreeMap::new();
    // Scopes whose first collective comes before those of the layers, and after.
    let (mut before, mut after): (Vec<Section>, Vec<Section>) = (vec![], vec![]);
    let mut step = vec![];
    let all = numbered(plan).into_iter().enumerate();
    for (i, (fi, ni)) in all.filter(|x| own.contains(&x.1.0)) {
        let f = &plan.module.funcs[fi];
        let scope = f.scope_info(f.nodes[ni].scope);
        let gradient = (0..f.nodes[ni].ins.len()).any(|i| is_gradient(f, &f.nodes[ni], i));
        if f.kind != f.kind.plain() && !gradient {
            continue; // counted for all microbatches with what runs for the others
        }
        let into = match (plan.is_looped(fi) && !gradient, scope.layer) {
            (false, _) => &mut step,
            (true, Some(l)) => layers.entry(l).or_default(),
            (true, None) => {
                let part = Where::Scope { path: scope.path.to_string() };
                let known = before.iter().position(|s| s.part == part);
                let list = match layers.is_empty() || known.is_some() {
                    true => &mut before,
                    false => &mut after,
                };
                let at = list.iter().position(|s| s.part == part).unwrap_or_else(|| {
                    list.push(Section { part, calls: vec![] });
                    list.len() - 1
                });
                &mut list[at].calls
            }
        };
        count(plan, &experts, (fi, ni), i + 1, into);
    }
    let mut sections = before;
    for (l, calls) in layers {
        match sections.last_mut() {
            Some(Section { part: Where::Layers { last, .. }, calls: of })
                if *last + 1 == l && same(of, &calls) =>
            {
                *last = l;
            }
            _ => sections.push(Section { part: Where::Layers { first: l, last: l }, calls }),
        }
    }
    sections.append(&mut after);
    if !step.is_empty() {
        sections.push(Section { part: Where::Step, calls: step });
    }
    LayerCollectives { microbatches: plan.settings.microbatches, sections }
}

/// The same calls, whatever their numbers.
fn same(a: &[Calls], b: &[Calls]) -> bool {
    let one = |c: &Calls| Calls { numbers: vec![], ..c.clone() };
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| one(x) == one(y))
}

fn count(
    plan: &Plan,
    experts: &Experts,
    (fi, ni): (usize, usize),
    number: usize,
    out: &mut Vec<Calls>,
) {
    let (mesh, f) = (&plan.module.mesh, &plan.module.funcs[fi]);
    let n = &f.nodes[ni];
    let c = n.op.collective().expect("only collectives are numbered");
    let (phase, kind) = (phase_of(f.kind), c.kind());
    let axis = experts.axis(mesh, f, n, c.atoms());
    let same = |x: &Calls| x.phase == phase && x.kind == kind && x.axis == axis;
    let at = out.iter().position(same).unwrap_or_else(|| {
        let numbers = vec![];
        out.push(Calls {
            phase,
            kind,
            axis,
            calls: 0,
            tensors: 0,
            gradients: 0,
            bytes: 0.0,
            numbers,
        });
        out.len() - 1
    });
    let sent = n.ins.iter().zip(&n.outs).map(|(&x, &y)| c.ring_bytes(mesh, f.ty(x), f.ty(y)));
    out[at].calls += usize::from(begins_call(f, ni));
    out[at].tensors += n.outs.len();
    out[at].gradients += (0..n.outs.len()).filter(|&i| is_gradient(f, n, i)).count();
    out[at].bytes += sent.sum::<f64>().ceil();
    out[at].numbers.push(number);
}
