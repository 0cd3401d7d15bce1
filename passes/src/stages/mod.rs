//! Cuts the model into pipeline stages: which stage every scope of the program belongs to.
//!
//! A *unit* is what is never cut: a decoder layer, the embedding, the last norm, the head, the
//! loss. A stage is a run of units. What needs no parameter (positions, rotary tables, masks) is in
//! no unit: every stage that uses it makes it again from the step's data.

pub mod balance;
pub mod layout;

use crate::depends::weighted;
use crate::options::Options;
use layout::StageLayout;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::func::{Func, Node, RoleKind, Scope, ValueMap};
use shardc_ir::hardware::Hardware;
use shardc_ir::mesh::{Mesh, PIPELINE};
use shardc_ir::price;
use shardc_ir::schedule::Schedule;

/// A part of the model that is never cut.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// Scope path, without what stands after the number of a layer.
    pub name: String,
    pub layer: Option<u32>,
    /// Picoseconds of forward and backward on one device: products and memory traffic.
    pub cost: u64,
    scopes: Vec<Scope>,
}

/// The units of a model on one device, in program order.
pub fn units(f: &Func) -> Vec<Unit> {
    // Backward does each product twice: once for each operand's gradient.
    const WITH_BACKWARD: u64 = 3;
    let (mesh, hw) = (Mesh::default(), Hardware::default());
    let weighted = weighted(f);
    let mut of: Vec<Option<usize>> = vec![None; f.scopes.len()];
    let mut by_layer: std::collections::BTreeMap<u32, usize> = Default::default();
    let mut out: Vec<Unit> = vec![];
    for n in f.nodes.iter().filter(|n| n.outs.iter().any(|o| weighted[o])) {
        let s = n.scope.0 as usize;
        let info = f.scope_info(n.scope);
        let known = of[s].or_else(|| info.layer.and_then(|l| by_layer.get(&l).copied()));
        let at = known.unwrap_or_else(|| {
            let name = up_to_number(&info.path).to_string();
            out.push(Unit { name, layer: info.layer, cost: 0, scopes: vec![] });
            out.len() - 1
        });
        if of[s].is_none() {
            of[s] = Some(at);
            out[at].scopes.push(n.scope);
        }
        if let Some(l) = info.layer {
            by_layer.entry(l).or_insert(at);
        }
        let ins: Vec<_> = n.ins.iter().map(|&v| f.ty(v)).collect();
        out[at].cost += WITH_BACKWARD * price::op(&hw, &mesh, &n.op, &ins, f.ty(n.outs[0]));
    }
    joined(out, &together(f, &weighted, &of))
}

/// Of each unit the last one that it takes something of, or itself: an output projection that also takes what layers
/// behind it make is one with them.
fn together(f: &Func, weighted: &ValueMap<bool>, of: &[Option<usize>]) -> Vec<usize> {
    let (makers, unit) = (f.makers(), |n: &Node| of[n.scope.0 as usize]);
    let mut last: Vec<usize> = (0..of.iter().flatten().max().map_or(0, |n| n + 1)).collect();
    for n in f.nodes.iter().filter(|n| n.outs.iter().any(|o| weighted[o])) {
        let Some(own) = unit(n) else { continue };
        let made = n.ins.iter().filter_map(|&v| makers[v].filter(|_| weighted[v]));
        for other in made.filter_map(|m| unit(&f.nodes[m as usize])) {
            last[own] = last[own].max(other);
        }
    }
    last
}

/// The units, each with those up to the last that it takes something of.
fn joined(units: Vec<Unit>, last: &[usize]) -> Vec<Unit> {
    let (mut out, mut end): (Vec<Unit>, Option<usize>) = (vec![], None);
    for (i, unit) in units.into_iter().enumerate() {
        match out.last_mut().filter(|_| end.is_some_and(|e| i <= e)) {
            Some(before) => {
                before.cost += unit.cost;
                before.scopes.extend(unit.scopes);
            }
            None => out.push(unit),
        }
        end = end.max(last.get(i).copied());
    }
    out
}

/// `model.layers.7` of `model.layers.7.mlp.up_proj`.
fn up_to_number(path: &str) -> &str {
    let mut end = 0;
    for part in path.split('.') {
        end += part.len() + usize::from(end > 0);
        if part.parse::<u32>().is_ok() {
            return &path[..end];
        }
    }
    path
}

/// Cuts a model of one device into the stages of a schedule: by hand as `--layers` says, else so
/// that the slowest stage is as fast as can be. Every scope then has its stage.
///
/// # Errors
/// `too-many-stages`, `stage-order`, and those of `--layers`.
pub fn stages(f: &mut Func, o: &Options, s: &Schedule) -> Result<()> {
    let count = s.owner.len();
    let layout = StageLayout::parse(&o.layers)?;
    if count <= 1 && layout == StageLayout::Balanced {
        return Ok(());
    }
    let units = units(f);
    enough(units.len(), count)?;
    let cuts = match layout {
        StageLayout::Balanced => {
            let costs: Vec<u64> = units.iter().map(|u| u.cost).collect();
            let speed = |stage: usize| o.speeds.get(s.owner[stage]).copied().unwrap_or(1.0);
            balance::cut(&costs, &(0..count).map(speed).collect::<Vec<_>>())
        }
        by_hand => by_hand.cuts(&units, count, &o.layers)?,
    };
    for (stage, w) in cuts.windows(2).enumerate() {
        for s in units[w[0]..w[1]].iter().flat_map(|u| &u.scopes) {
            f.scopes[s].stage = stage;
        }
    }
    forward_only(f, count)?;
    sums_together(f, count - 1)
}

/// A stage is at least one unit.
fn enough(units: usize, stages: usize) -> Result<()> {
    if units >= stages {
        return Ok(());
    }
    let parts = count(units, "part that can be cut", "parts that can be cut");
    Err(Diag::new("too-many-stages", format!("{stages} stages of {parts}"))
        .rule("pp * chunks <= layers + the parts before and after them")
        .help(format!("use at most {}", count(units.max(1), "stage", "stages"))))
}

/// Refuses more stages than a model has parts, before a schedule is made for them.
pub fn not_too_many(f: &Func, o: &Options) -> Result<()> {
    let ranks = o.axis(PIPELINE);
    if ranks == 1 {
        return Ok(());
    }
    enough(units(f).len(), ranks.saturating_mul(o.chunks.unwrap_or(1)))
}

/// Checks that one stage makes all losses: the step's loss is summed up where they are.
fn sums_together(f: &Func, last: usize) -> Result<()> {
    let (weighted, makers) = (weighted(f), f.makers());
    for r in &f.results {
        let Some(role) = r.role.as_ref().filter(|r| r.kind == RoleKind::Sum) else { continue };
        let Some(m) = makers[r.value].filter(|_| weighted[r.value]) else {
            continue;
        };
        let node = &f.nodes[m as usize];
        let from = f.stage_of(node);
        if from != last {
            let scope = &f.scope_info(node.scope).path;
            return Err(Diag::new(
                "stage-order",
                format!("{role} is made in {scope}, in stage {from}, and not in the last, {last}"),
            )
            .rule("the last stage makes all sums")
            .help(format!(
                "put what makes {} behind 1 line `loss:`, at the end",
                f.name(r.value)
            )));
        }
    }
    Ok(())
}

/// Checks that no stage needs what a later one makes.
fn forward_only(f: &Func, count: usize) -> Result<()> {
    let weighted = weighted(f);
    let makers = f.makers();
    for n in f.nodes.iter().filter(|n| n.outs.iter().any(|o| weighted[o])) {
        let own = f.stage_of(n);
        for v in n.ins.iter().filter(|v| weighted[*v]) {
            let Some(m) = makers[v] else { continue };
            let from = f.stage_of(&f.nodes[m as usize]);
            if from > own {
                let (name, scope) = (f.name(*v), &f.scope_info(n.scope).path);
                return Err(Diag::new(
                    "stage-order",
                    format!("{scope} is in stage {own} and uses {name} of stage {from}"),
                )
                .rule("a stage uses what it or an earlier stage makes")
                .help(format!(
                    "cut elsewhere with --layers, or use {}",
                    shardc_ir::diag::count(count - 1, "stage", "stages")
                )));
            }
        }
    }
    Ok(())
}
