//! The schedule: every stage does F, then B (or I, then W), once per microbatch, on its own rank, and
//! no rank waits for ever.

use crate::ledger::Ledger;
use crate::part::Part;
use shardc_ir::func::{FuncKind, Module, Role, RoleKind};
use shardc_ir::schedule::{Action, ActionKind, Schedule};
use std::collections::{BTreeMap, BTreeSet};

/// What a stage waits for, from edges: the functions that make what its functions are given. What runs for a last
/// microbatch is given and makes the same as what runs for the others, which [`crate::whole`] shows.
fn needs(m: &Module, owner: &[usize]) -> BTreeMap<Part, BTreeSet<Part>> {
    let of_microbatch = |p: &Part| p.of_microbatch() && !p.is_of_last();
    let parts = || m.funcs.iter().filter_map(|f| Some((Part::of(f).filter(of_microbatch)?, f)));
    // Edges lead from rank to rank; the rest is a rank's own.
    let key = |part: Part, r: &Role| match r.kind {
        RoleKind::Edge => Some((None, r.clone())),
        RoleKind::Stash | RoleKind::Unsharded => Some((Some(part.rank(owner)), r.clone())),
        _other => None,
    };
    let mut makers = BTreeMap::new();
    for (part, f) in parts() {
        let roles = f.results.iter().filter_map(|r| r.role.as_ref());
        makers.extend(roles.filter_map(|r| Some((key(part, r)?, part))));
    }
    let mut needs: BTreeMap<Part, BTreeSet<Part>> = BTreeMap::new();
    for (part, f) in parts() {
        let roles = f.args.iter().filter_map(|a| a.role.as_ref());
        let from = roles.filter_map(|r| makers.get(&key(part, r)?).copied());
        let from = from.filter(|p| *p != part);
        needs.entry(part).or_default().extend(from);
    }
    needs
}

/// The functions that an action calls, one after the other.
fn calls(a: &Action, known: &BTreeMap<Part, BTreeSet<Part>>) -> Vec<Part> {
    let part = |kind| Part { kind, at: a.stage };
    let all = match a.kind {
        ActionKind::Forward => vec![part(FuncKind::Forward)],
        ActionKind::Backward => vec![part(FuncKind::Backward), part(FuncKind::Weight)],
        ActionKind::Input => vec![part(FuncKind::Backward)],
        ActionKind::Weight => vec![part(FuncKind::Weight)],
    };
    all.into_iter().filter(|p| known.contains_key(p)).collect()
}

/// Every function of every stage once per microbatch, in an order in which all that it needs was done.
pub fn check(m: &Module, s: &Schedule, ledger: &mut Ledger) {
    let needs = needs(m, &s.owner);
    let mut at = vec![0; s.ranks.len()];
    let mut done: BTreeSet<(Part, usize)> = BTreeSet::new();
    let misplaced =
        s.ranks.iter().enumerate().flat_map(|(rank, list)| {
            list.iter().filter(move |a| s.owner.get(a.stage) != Some(&rank))
        });
    for a in misplaced {
        ledger.must("schedule", false, || {
            [format!("action {a}"), "on another rank".into(), "on the rank of its stage".into()]
        });
    }
    loop {
        let mut moved = false;
        for (rank, list) in s.ranks.iter().enumerate() {
            while let Some(a) = list.get(at[rank]) {
                let parts = calls(a, &needs);
                let mut ready = true;
                for (i, p) in parts.iter().enumerate() {
                    let mut all = needs[p].iter().filter(|n| !parts[..i].contains(n));
                    ready &= all.all(|n| done.contains(&(*n, a.microbatch)));
                }
                if !ready {
                    break;
                }
                for p in parts {
                    let again = !done.insert((p, a.microbatch));
                    ledger.must("schedule", !again, || {
                        [format!("action {a}"), "it is done twice".into(), "once".into()]
                    });
                }
                (at[rank], moved) = (at[rank] + 1, true);
            }
        }
        if !moved {
            break;
        }
    }
    for (rank, list) in s.ranks.iter().enumerate() {
        let stuck = list.get(at[rank]).map(|a| a.to_string());
        ledger.must("schedule", stuck.is_none(), || {
            let what = format!("actions of rank {rank} of the pipeline");
            let at = stuck.unwrap_or_default();
            [what, format!("{at} waits for ever"), "what it needs is done before".into()]
        });
    }
    for p in needs.keys() {
        for j in 0..s.microbatches {
            let ran = done.contains(&(*p, j));
            ledger.must("schedule", ran, || {
                [format!("{p}, microbatch {j}"), "it is not done".into(), "once".into()]
            });
        }
    }
}
