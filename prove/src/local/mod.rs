//! Local rules: what each rank makes of its pieces is what types say of them.
//!
//! A type is a relation between a whole tensor and what ranks hold: S its pieces, P parts with that sum,
//! I and R the tensor itself, V a value of the rank's own. An obligation is one op with its attributes
//! and the types of operands and results: if operands are related to whole tensors, results are related
//! to what the op makes of these. A program has few different ones, whatever its depth and its ranks.
//!
//! Each is shown twice: by rule (`letters`, `collectives`, written from `docs/types.md`), and by
//! evaluation of all ranks of a small mesh (`evaluate`), which knows no rule.
//!
//! Of a value that varies around a ring it is known which block it is: `own` is the rank's own block,
//! `ring_shard` one of those before it, `permute` hands blocks on, letters carry blocks through ops, and what
//! `join` puts together must be the own ones again. So a block that goes the wrong way is a wrong type.

pub(crate) mod collectives;
pub(crate) mod counts;
pub(crate) mod evaluate;
pub(crate) mod inputs;
pub(crate) mod letters;
mod roles;
pub(crate) mod shrink;

use crate::Report;
use crate::ledger::{Gap, Refuted};
use crate::ops::law;
use shardc_ir::func::{Func, Module, Node, Value};
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::Op;
use shardc_ir::text::node_text;
use shardc_ir::text::type_text;
use shardc_ir::types::Type;
use std::collections::BTreeMap;

/// A dim of a varying value is the block of the rank `shift` places before, around the ring of these
/// axes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Block {
    pub dim: usize,
    pub axes: AtomSet,
    pub shift: usize,
}

/// What ranks hold of a value.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Held {
    pub ty: Type,
    /// Of a value that varies.
    pub blocks: Vec<Block>,
}

/// One op with what ranks hold of its operands and results.
#[derive(Clone, PartialEq, Debug)]
pub struct Obligation {
    pub op: Op,
    pub ins: Vec<Held>,
    pub outs: Vec<Held>,
}

/// Why an obligation was not shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The types are wrong.
    Wrong(String),
    /// Nothing is known of such ops or types.
    Unknown(String),
}

pub(crate) fn wrong<T>(what: String) -> Result<T, Fault> {
    Err(Fault::Wrong(what))
}

impl Obligation {
    /// By rule: the types of the results, and which blocks they are, follow from the operands.
    ///
    /// # Errors
    /// Says which axis or letter is wrong, or that there is no rule.
    pub fn by_rule(&self, mesh: &Mesh) -> Result<(), Fault> {
        let held: Vec<&Held> = self.ins.iter().collect();
        let outs: Vec<&Type> = self.outs.iter().map(|h| &h.ty).collect();
        let blocks = results(mesh, &self.op, &held, &outs)?;
        match blocks.iter().zip(&self.outs).all(|(b, h)| *b == h.blocks) {
            true => Ok(()),
            false => wrong("a result is another block".into()),
        }
    }

    /// By evaluation on a mesh whose axes have `ways` ranks each, at small sizes.
    ///
    /// # Errors
    /// Says what ranks hold instead, or what cannot be evaluated.
    pub fn by_evaluation(&self, mesh: &Mesh, ways: usize) -> Result<(), Fault> {
        for (k, small) in shrink::variants(self, mesh, ways)?.into_iter().enumerate() {
            // Sizes that are cut unevenly are for ops that may have them.
            if k == 0 || small.o.by_rule(&small.mesh).is_ok() {
                evaluate::holds(&small.o, &small.mesh)?;
            }
        }
        Ok(())
    }
}

/// The rule of an op: which blocks its results are.
fn results(mesh: &Mesh, op: &Op, held: &[&Held], outs: &[&Type]) -> Result<Vec<Vec<Block>>, Fault> {
    let mut all = held.iter().map(|h| &h.ty).chain(outs.iter().copied());
    if all.any(|t| t.clash().is_some()) {
        return wrong("a value has two states over one axis".into());
    }
    let law = law(op);
    match law.typing() {
        Some(typing) => letters::check(mesh, op, typing, held, outs),
        None => law.held(mesh, held, outs),
    }
}

/// Different obligations, with the function and node where each is first, and what is wrong with some.
#[derive(Default)]
pub struct Found {
    pub all: Vec<(Obligation, (usize, usize))>,
    pub faults: Vec<(Fault, (usize, usize))>,
}

/// An obligation by what hashes: the op's name, the operands, and the types of results.
type Key<'a> = (&'static str, Vec<(&'a Type, Vec<Block>)>, Vec<&'a Type>);

/// Obligations with one key, and the blocks of their results; `None` of a wrong one.
type Known<'a> = Vec<(&'a Op, Option<Vec<Vec<Block>>>)>;

/// All different obligations of the programs of a plan, by rule.
pub fn obligations(m: &Module) -> Found {
    let mut found = Found::default();
    let mut known: HashMap<Key, Known> = HashMap::default();
    for (at, f) in m.funcs.iter().enumerate() {
        // Of values that vary; `None`: nothing is known of it.
        let mut paths: BTreeMap<Value, Option<Vec<Block>>> = BTreeMap::new();
        for a in f.args.iter().filter(|a| !f.ty(a.value).varying.is_empty()) {
            paths.insert(a.value, None);
        }
        for (i, n) in f.nodes.iter().enumerate() {
            let path = |v: &Value| paths.get(v).cloned().unwrap_or(Some(vec![]));
            let Some(blocks) = n.ins.iter().map(path).collect::<Option<Vec<_>>>() else {
                // Of what a wrong op makes nothing more is said.
                if n.ins.iter().any(|v| f.args.iter().any(|a| a.value == *v && path(v).is_none())) {
                    let what = "which block an argument that varies is".into();
                    found.faults.push((Fault::Unknown(what), (at, i)));
                }
                keep(&mut paths, f, n, None);
                continue;
            };
            let ins: Vec<_> = n.ins.iter().map(|&v| f.ty(v)).zip(blocks).collect();
            let outs: Vec<&Type> = n.outs.iter().map(|&v| f.ty(v)).collect();
            let alike = known.entry((n.op.mnemonic(), ins.clone(), outs.clone())).or_default();
            let made = match alike.iter().find(|(op, _)| **op == n.op) {
                Some((_, made)) => made.clone(),
                None => {
                    let held: Vec<Held> = ins
                        .into_iter()
                        .map(|(ty, blocks)| Held { ty: ty.clone(), blocks })
                        .collect();
                    let made = results(&m.mesh, &n.op, &held.iter().collect::<Vec<_>>(), &outs);
                    let made = match made {
                        Ok(blocks) => {
                            let pairs = outs.iter().zip(blocks.clone());
                            let outs = pairs
                                .map(|(&ty, blocks)| Held { ty: ty.clone(), blocks })
                                .collect();
                            let o = Obligation { op: n.op.clone(), ins: held, outs };
                            found.all.push((o, (at, i)));
                            Some(blocks)
                        }
                        Err(fault) => {
                            found.faults.push((fault, (at, i)));
                            None
                        }
                    };
                    alike.push((&n.op, made.clone()));
                    made
                }
            };
            keep(&mut paths, f, n, made);
        }
    }
    found
}

/// Keeps which blocks the results of a node are.
fn keep(
    paths: &mut BTreeMap<Value, Option<Vec<Block>>>,
    f: &Func,
    n: &Node,
    made: Option<Vec<Vec<Block>>>,
) {
    for (k, v) in n.outs.iter().enumerate().filter(|(_, v)| !f.ty(**v).varying.is_empty()) {
        paths.insert(*v, made.as_ref().map(|m| m[k].clone()));
    }
}

/// What was shown by rule.
pub const BY_RULE: &str = "distinct types of ops, by rule";
/// What was shown by evaluation.
pub const BY_EVALUATION: &str = "types of ops, by evaluation on meshes of 2 and 3";

/// Shows that types are right; what is wrong comes into the report.
pub fn prove(m: &Module, evaluated: bool, report: &mut Report) {
    let found = obligations(m);
    for (fault, at) in &found.faults {
        tell(m, *at, fault, report);
    }
    roles::check(m, report);
    if !found.all.is_empty() {
        report.shown.insert(BY_RULE, found.all.len());
    }
    if !evaluated {
        return;
    }
    let mut held = 0;
    for (o, at) in &found.all {
        match [2, 3].iter().try_for_each(|&ways| o.by_evaluation(&m.mesh, ways)) {
            Ok(()) => held += 1,
            Err(fault) => tell(m, *at, &fault, report),
        }
    }
    report.shown.insert(BY_EVALUATION, held);
}

/// Puts a fault into the report: op, operand types, layer and stage.
fn tell(m: &Module, (func, node): (usize, usize), fault: &Fault, report: &mut Report) {
    let (f, n) = (&m.funcs[func], &m.funcs[func].nodes[node]);
    let path = &f.scope_info(n.scope).path;
    let path = if path.is_empty() { String::new() } else { format!(", {path}") };
    let place = format!("@{}{path}: {}", f.name, node_text(&m.mesh, f, n).text);
    let types = |all: &[Value]| {
        let all: Vec<String> = all.iter().map(|v| type_text(&m.mesh, f.ty(*v))).collect();
        all.join(", ")
    };
    let op = n.op.mnemonic();
    match fault {
        Fault::Wrong(what) => report.refuted.push(Refuted {
            what: format!("types of `{op}`"),
            plan: format!("{} -> {}: {what}", types(&n.ins), types(&n.outs)),
            textbook: "results that follow from the operands".into(),
            plan_place: Some(place),
            textbook_place: None,
        }),
        Fault::Unknown(lemma) => {
            report.gaps.push(Gap { op: op.into(), place, lemma: lemma.clone() });
        }
    }
}
