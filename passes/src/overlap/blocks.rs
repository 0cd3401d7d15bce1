//! One gather, and one scattered sum, for all parameters of a block: FSDP's unit (Zhao et al., 2023).
//!
//! ```text
//! Before:  %q_f = all_gather[dp_shard, 0] %q        After:  %q_f = all_gather[dp_shard, 0] %q &&
//!          %x = dot[…] %h, %q_f                             %k_f = all_gather[dp_shard, 0] %k
//!          %k_f = all_gather[dp_shard, 0] %k                … what block 0 does: %x = dot[…] %h, %q_f
//! ```
//! Gathers of arguments that belong to one layer are one launch, which begins before the work that needs
//! the gather before it: one block ahead. Sums of gradients of one layer are one launch, behind the last
//! of them; what is done with their results, adding them up, is done where the next such launch begins. Until
//! then the memory of their operands is kept ([`shardc_ir::overlap::held`]).

use shardc_ir::func::{Func, FusedWithNext, Node, RoleKind, Value};
use shardc_ir::group::{Launch, are_one_call, launches};
use shardc_ir::maps::{HashMap, HashSet};
use shardc_ir::ops::{Kind, Sends};

/// Launches that become one, in their order.
type LaunchUnit = Vec<usize>;

/// Joins and moves the collectives of a function's parameters.
pub(super) fn blocks(f: &mut Func) {
    let all = launches(f);
    let (gathers, sums) = (gathers(f, &all), sums(f, &all));
    if gathers.is_empty() && sums.is_empty() {
        return;
    }
    let order = order(f, &all, &gathers, &sums);
    let first: HashMap<usize, &LaunchUnit> =
        gathers.iter().chain(&sums).map(|u| (u[0], u)).collect();
    let mut nodes: Vec<Option<Node>> = std::mem::take(&mut f.nodes).into_iter().map(Some).collect();
    for i in order {
        let alone = [i].to_vec();
        let unit = first.get(&i).copied().unwrap_or(&alone);
        for (k, &x) in unit.iter().enumerate() {
            let range = all[x].nodes.clone();
            let end = range.end - 1;
            for n in range {
                let node = nodes[n].take().expect("a node is in one launch");
                let fused = match (n == end, k + 1 < unit.len()) {
                    (false, _) => node.fused,
                    (true, true) => FusedWithNext::Launch,
                    (true, false) => FusedWithNext::No,
                };
                f.nodes.push(Node { fused, ..node });
            }
        }
    }
}

/// Puts launches of one call and one layer together; what belongs to no layer stays alone.
fn units(f: &Func, all: &[Launch], found: impl Iterator<Item = usize>) -> Vec<LaunchUnit> {
    let node = |i: usize| &f.nodes[all[i].nodes.start];
    let layer = |i: usize| f.scope_info(node(i).scope).layer;
    let mut units: Vec<LaunchUnit> = vec![];
    for i in found {
        let one = |u: &&mut LaunchUnit| {
            layer(i).is_some() && layer(u[0]) == layer(i) && are_one_call(node(u[0]), node(i))
        };
        match units.iter_mut().rev().find(one) {
            Some(unit) => unit.push(i),
            None => units.push(vec![i]),
        }
    }
    units
}

/// True if a launch is one node that sends so, and may be joined.
fn is(f: &Func, x: &Launch, sends: Sends) -> bool {
    let n = &f.nodes[x.nodes.start];
    x.nodes.len() == 1 && !n.kept && n.op.collective().is_some_and(|c| c.sends() == sends)
}

/// Gathers of parameters, unit by unit.
fn gathers(f: &Func, all: &[Launch]) -> Vec<LaunchUnit> {
    let held: HashSet<Value> = f
        .args
        .iter()
        .filter(|a| {
            let kind = a.role.as_ref().map(|r| r.kind);
            matches!(kind, Some(RoleKind::Param | RoleKind::Unsharded))
        })
        .map(|a| a.value)
        .collect();
    let found = (0..all.len()).filter(|&i| {
        let x = &all[i];
        is(f, x, Sends::ShareOfResult) && f.kind.is_looped() && held.contains(&x.ins[0])
    });
    units(f, all, found)
}

/// Scattered sums of gradients: nothing but additions to what was summed before reads them.
fn sums(f: &Func, all: &[Launch]) -> Vec<LaunchUnit> {
    let of_grad = |p: &shardc_ir::func::Port| {
        let kind = p.role.as_ref().map(|r| r.kind);
        matches!(kind, Some(RoleKind::Grad | RoleKind::GradSum))
    };
    let results: HashSet<Value> =
        f.results.iter().filter(|p| of_grad(p)).map(|p| p.value).collect();
    let mut readers: HashMap<Value, Vec<usize>> = HashMap::default();
    for (i, x) in all.iter().enumerate() {
        x.ins.iter().for_each(|&v| readers.entry(v).or_default().push(i));
    }
    let found = (0..all.len()).filter(|&i| {
        let ends = |v: &Value| match readers.get(v).map(Vec::as_slice) {
            None => results.contains(v),
            Some(&[r]) => match &f.nodes[all[r].nodes.clone()] {
                [n] if n.op.accumulates() || n.op.facts().kind == Kind::Conversion => {
                    results.contains(&n.outs[0]) && !readers.contains_key(&n.outs[0])
                }
                _other => false,
            },
            Some(_several) => false,
        };
        is(f, &all[i], Sends::Share) && f.kind.is_looped() && all[i].outs.iter().all(ends)
    });
    let mut units = units(f, all, found);
    units.retain(|u| u.len() > 1);
    units
}

/// The launches in their new order: of a unit only the first, in whose place it is.
fn order(f: &Func, all: &[Launch], gathers: &[LaunchUnit], sums: &[LaunchUnit]) -> Vec<usize> {
    let mut moved: HashSet<usize> = gathers.iter().flatten().copied().collect();
    // By launch: what goes before it.
    let mut before: Vec<Vec<usize>> = vec![vec![]; all.len() + 1];
    // The first launch that reads what a unit makes.
    let needed = |u: &LaunchUnit| {
        let made: HashSet<Value> = u.iter().flat_map(|&i| all[i].outs.iter().copied()).collect();
        (0..all.len()).find(|&i| all[i].ins.iter().any(|v| made.contains(v))).unwrap_or(u[0])
    };
    let mut at = gathers.first().map_or(0, |u| u[0]);
    // In the order in which they are needed, whatever the order of their first members.
    let mut gathers: Vec<&LaunchUnit> = gathers.iter().collect();
    gathers.sort_by_key(|u| needed(u));
    for u in gathers {
        // Never behind its own place.
        at = at.min(u[0]);
        before[at].push(u[0]);
        at = needed(u).max(at);
    }
    let reads = |of: &LaunchUnit, i: usize| {
        let mut made = of.iter().flat_map(|&m| &all[m].outs);
        made.any(|v| all[i].ins.contains(v))
    };
    for (k, u) in sums.iter().enumerate() {
        let last = *u.last().expect("a unit has members");
        before[last].push(u[0]);
        moved.extend(u);
        let same = |o: &&LaunchUnit| {
            are_one_call(&f.nodes[all[o[0]].nodes.start], &f.nodes[all[u[0]].nodes.start])
        };
        let next = sums[k + 1..].iter().filter(same).filter_map(|o| o.last()).find(|&&o| o > last);
        let until = next.copied().unwrap_or(all.len());
        let after: Vec<usize> = (0..all.len()).filter(|&i| reads(u, i)).collect();
        moved.extend(&after);
        before[until].extend(after);
    }
    let mut order = vec![];
    for (i, first) in before.into_iter().enumerate() {
        order.extend(first);
        if i < all.len() && !moved.contains(&i) {
            order.push(i);
        }
    }
    order
}
