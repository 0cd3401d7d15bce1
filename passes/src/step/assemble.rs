//! Puts the step around the functions of the microbatches, for every rank of the pipeline.

use super::elide_accumulators::{accumulate_rows, elide_accumulators};
use super::enter::enter;
use super::finish::{Foreign, StepKind, finish};
use super::losses::evaluate;
use super::once::{Once, once};
use crate::optim::Groups;
use crate::options::Options;
use shardc_ir::func::{Fill, Func, FuncKind, Module, ParamLayout, Port, RoleKind, StateDecl};
use shardc_ir::maps::HashMap;
use shardc_ir::plan::Mode;
use shardc_ir::schedule::Schedule;
use shardc_ir::types::DType;
use std::collections::BTreeSet;

/// Adds to the functions of the microbatches what every rank of the pipeline does around them.
pub fn assemble(
    m: &mut Module,
    s: &Schedule,
    params: &[ParamLayout],
    groups: &Groups,
    o: &Options,
) {
    let ranks = s.ranks.len();
    let mut loops: Vec<Vec<Func>> = vec![vec![]; ranks];
    // Forwards in the order of the model, then what goes back, from the last stage on.
    let (forward, mut back): (Vec<Func>, Vec<Func>) =
        std::mem::take(&mut m.funcs).into_iter().partition(|f| f.kind == FuncKind::Forward);
    back.sort_by_key(|f| std::cmp::Reverse(f.stage));
    for f in forward.into_iter().chain(back) {
        loops[s.owner[f.stage]].push(f);
    }
    let mut alike: Vec<Once> = loops.iter().map(|_| Once::default()).collect();
    match s.microbatches {
        1 => loops.iter_mut().for_each(|l| elide_accumulators(l)),
        _several => alike = loops.iter_mut().map(|l| once(l)).collect(),
    }
    loops.iter_mut().flatten().for_each(accumulate_rows);
    // By parameter: the ranks whose functions take it, and those whose functions add to its gradient.
    let taken = named_as(RoleKind::Unsharded, &loops, |f| &f.args);
    let added = named_as(RoleKind::Grad, &loops, |f| &f.results);
    let mut first_stage = vec![usize::MAX; ranks];
    s.owner.iter().enumerate().rev().for_each(|(stage, &r)| first_stage[r] = stage);
    // A parameter belongs to the first stage that has a gradient of it, or else to the first that uses it; one
    // that nobody uses, to the first.
    let owner = |p: &ParamLayout| {
        let first = |by: &HashMap<&str, Vec<usize>>| {
            by.get(&*p.param.name)?.iter().min_by_key(|&&r| first_stage[r]).copied()
        };
        first(&added).or_else(|| first(&taken)).unwrap_or(s.owner[0])
    };
    let mut owned: Vec<Vec<&ParamLayout>> = vec![vec![]; ranks];
    params.iter().for_each(|p| owned[owner(p)].push(p));
    // The labels may be an input of another stage than that of the loss.
    let labels = loops.iter().flatten().find_map(|f| {
        let a = f.args.iter().find(|a| a.fills(Fill::Labels))?;
        Some((f.ty(a.value).clone(), f.name(a.value).clone(), a.role.clone()?))
    });
    let scaled = scales_loss(loops.iter().flatten());
    let mut around = vec![];
    for (rank, own_loops) in loops.iter().enumerate() {
        let all: Vec<&Func> = own_loops.iter().collect();
        let own = std::mem::take(&mut owned[rank]);
        let foreign: Vec<Foreign> = own
            .iter()
            .flat_map(|p| {
                let name = &*p.param.name;
                let others = added.get(name).into_iter().flatten().filter(|&&r| r != rank);
                let foreign =
                    |&from: &usize| Foreign { param: name.to_string(), from: from as u32 };
                others.map(foreign).collect::<Vec<_>>()
            })
            .collect();
        let mut first = enter(&m.mesh, (rank, ranks), &own, &all, labels.as_ref(), scaled, o);
        alike[rank].make(&mut first);
        let mut last = vec![];
        if o.mode == Mode::Train {
            let counts = labels.is_some();
            let kind = StepKind { counts, scaled };
            last.push(finish(&m.mesh, (rank, ranks), &own, &all, &foreign, kind, groups, o));
            last.extend(evaluate(&m.mesh, (rank, ranks), &all, counts));
        }
        around.push((first, last));
    }
    for (own, (first, last)) in loops.into_iter().zip(around) {
        m.funcs.push(first);
        m.funcs.extend(own);
        m.funcs.extend(last);
    }
    m.states = kept(m, groups);
}

/// Declares what updates keep, of a module that has something to keep.
fn kept(m: &Module, groups: &Groups) -> Vec<StateDecl> {
    let steps = m.of_kind(FuncKind::OptimizerStep);
    let all = steps.flat_map(|f| f.args.iter().map(move |a| (f, a)));
    let one = |(f, a): (&Func, &Port)| Some((a.role.as_ref()?.kind, f.ty(a.value).dtype));
    let found: BTreeSet<(RoleKind, DType)> = all.filter_map(one).collect();
    let is = |s: &&StateDecl| found.contains(&(RoleKind::State(s.name), s.dtype));
    groups.states.iter().filter(is).copied().collect()
}

/// True of a training that computes in f16, whose gradients underflow without a scaled loss.
pub fn scales_loss<'a>(mut funcs: impl Iterator<Item = &'a Func> + Clone) -> bool {
    let has = |f: &Func| f.values.iter().any(|v| v.ty.dtype == DType::F16);
    funcs.clone().any(|f| f.kind == FuncKind::Backward) && funcs.any(has)
}

/// By name: the ranks whose functions have a port of this name and kind, in order.
fn named_as<'a>(
    kind: RoleKind,
    loops: &'a [Vec<Func>],
    ports: impl Fn(&'a Func) -> &'a [Port],
) -> HashMap<&'a str, Vec<usize>> {
    let mut out: HashMap<&str, Vec<usize>> = HashMap::default();
    for (rank, own) in loops.iter().enumerate() {
        let roles = own.iter().flat_map(&ports).filter_map(|p| p.role.as_ref());
        for r in roles.filter(|r| r.kind == kind) {
            let ranks = out.entry(&*r.name).or_default();
            if ranks.last() != Some(&rank) {
                ranks.push(rank);
            }
        }
    }
    out
}
