//! `inspect --collectives`: every collective of a step, where its ranks are, and what goes on beside it.

use super::{group_text, numbered};
use crate::report::{Chosen, Experts, phase_of};
use comfy_table::{Table, presets};
use serde::Serialize;
use serde_json::json;
use shardc_ir::diag::{bytes, count};
use shardc_ir::func::Func;
use shardc_ir::group::{Launch, launches};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::overlap::{awaited, works};
use shardc_ir::plan::{Call, RankClass};
use shardc_plans::stored::Stored;
use shardc_process::terminal::{self, json_line};
use std::collections::BTreeMap;
use std::ops::Range;

/// A collective, and launches around it.
pub struct Between {
    /// Function and first node.
    pub at: (usize, usize),
    /// All nodes: one for each tensor, or one for all.
    pub nodes: Range<usize>,
    /// What it makes.
    pub name: String,
    /// The launch before it.
    pub after: Option<String>,
    /// Launches that may run while it is under way, but for other collectives.
    pub meanwhile: Vec<String>,
    /// The launch that waits for it; `None`: the end of the call.
    pub awaited_by: Option<String>,
}

/// A launch by its first op and what it makes.
fn name(f: &Func, x: &Launch) -> String {
    let kernels = x.kernels(f);
    let outs: Vec<String> = kernels[0].outs.iter().map(|&v| f.name(v).to_string()).collect();
    let more = match kernels.len() {
        1 => String::new(),
        n => format!(" and {} more", count(n - 1, "kernel", "kernels")),
    };
    format!("{} {}{more}", f.nodes[x.nodes.start].op.mnemonic(), outs.join(", "))
}

/// The collectives of what a class calls in a step, in program order.
pub fn between(s: &Stored, class: &RankClass) -> Vec<Between> {
    let mut calls: BTreeMap<usize, &Call> = BTreeMap::new();
    for c in class.calls() {
        calls.entry(c.func).or_insert(c);
    }
    let mut out = vec![];
    for (&i, call) in &calls {
        let f = &s.plan.module.funcs[i];
        let own = launches(f);
        // Neither views nor other collectives, which have a stream in common.
        let exchanges = |x: &Launch| f.nodes[x.nodes.start].op.collective().is_some();
        for (j, until) in awaited(f, &own, &class.memory, call).into_iter().enumerate() {
            if !exchanges(&own[j]) {
                continue;
            }
            let work = |x: &&Launch| works(f, x) && !exchanges(x);
            out.push(Between {
                at: (i, own[j].nodes.start),
                nodes: own[j].nodes.clone(),
                name: name(f, &own[j]),
                after: own[..j].iter().rfind(|x| works(f, x)).map(|x| name(f, x)),
                meanwhile: own[j + 1..until].iter().filter(work).map(|x| name(f, x)).collect(),
                awaited_by: own.get(until).map(|x| name(f, x)),
            });
        }
    }
    out
}

/// Where the ranks of a group are: how many there are, the most on one node, and the most nodes of a group.
#[derive(Clone, Copy, Serialize)]
struct Spread {
    ranks: usize,
    per_node: Option<usize>,
    nodes: Option<usize>,
}

impl Spread {
    fn of(mesh: &Mesh, atoms: AtomSet, node: Option<usize>) -> Spread {
        let ranks = mesh.ways(atoms);
        let Some(node) = node else { return Spread { ranks, per_node: None, nodes: None } };
        let (mut most, mut nodes) = (0, 0);
        for rank in 0..mesh.ranks() {
            let group = mesh.group(atoms, rank);
            if group.iter().min() != Some(&rank) {
                continue; // each group once
            }
            let mut each: BTreeMap<usize, usize> = BTreeMap::new();
            group.iter().for_each(|r| *each.entry(r / node).or_default() += 1);
            most = most.max(each.values().max().copied().unwrap_or(0));
            nodes = nodes.max(each.len());
        }
        Spread { ranks, per_node: Some(most), nodes: Some(nodes) }
    }

    fn crosses(self) -> bool {
        self.nodes.is_some_and(|n| n > 1)
    }
}

/// A line of the list.
#[derive(Serialize)]
struct Line {
    /// As in `explain collective:N`.
    number: usize,
    function: String,
    phase: &'static str,
    scope: String,
    kind: &'static str,
    axis: String,
    #[serde(flatten)]
    spread: Spread,
    /// The group of the first rank.
    first_group: String,
    tensors: usize,
    /// Bytes that a rank sends in a call, under the ring cost.
    bytes: f64,
    /// Calls of a step.
    calls: usize,
    after: Option<String>,
    meanwhile: Vec<String>,
    awaited_by: Option<String>,
}

fn list(s: &Stored, classes: &[usize], node: Option<usize>) -> Vec<Line> {
    let (plan, mesh) = (&s.plan, &s.plan.module.mesh);
    let experts = Experts::of(plan);
    let numbers: BTreeMap<(usize, usize), usize> =
        numbered(plan).into_iter().enumerate().map(|(i, at)| (at, i + 1)).collect();
    let mut spreads: BTreeMap<AtomSet, Spread> = BTreeMap::new();
    let mut out = vec![];
    for b in classes.iter().flat_map(|&c| between(s, &plan.classes[c])) {
        let f = &plan.module.funcs[b.at.0];
        let n = &f.nodes[b.at.1];
        let (Some(c), Some(&number)) = (n.op.collective(), numbers.get(&b.at)) else { continue };
        let atoms = c.atoms();
        let spread = *spreads.entry(atoms).or_insert_with(|| Spread::of(mesh, atoms, node));
        let nodes = || f.nodes[b.nodes.clone()].iter();
        let pairs = nodes().flat_map(|n| n.ins.iter().zip(&n.outs));
        out.push(Line {
            number,
            function: f.name.to_string(),
            phase: phase_of(f.kind),
            scope: f.scope_info(n.scope).path.to_string(),
            kind: c.kind(),
            axis: experts.axis(mesh, f, n, atoms),
            spread,
            first_group: group_text(mesh.members(atoms, 0)),
            tensors: nodes().map(|n| n.outs.len()).sum(),
            bytes: pairs.map(|(&x, &y)| c.ring_bytes(mesh, f.ty(x), f.ty(y))).sum(),
            calls: plan.times(b.at.0),
            after: b.after,
            meanwhile: b.meanwhile,
            awaited_by: b.awaited_by,
        });
    }
    out.sort_by_key(|l| l.number);
    out
}

/// Collectives of some classes; `node` ranks are on one node.
pub fn collectives(s: &Stored, class: Option<usize>, node: Option<usize>, as_json: bool) -> String {
    let classes: Vec<usize> = match class {
        Some(c) => vec![c],
        None => (0..s.plan.classes.len()).collect(),
    };
    let node = node.or(s.options.node);
    let all = list(s, &classes, node);
    if as_json {
        let out = json!({ "options": Chosen::of(&s.options), "node": node, "collectives": all });
        return json_line("inspect-collectives", out);
    }
    // What does not fit a row stands below it.
    let mut t = Table::new();
    t.load_preset(presets::NOTHING);
    t.set_header(["", "op", "ranks", "on a node", "nodes", "bytes", "calls"]);
    let number = |n: Option<usize>| n.map_or("?".into(), |n| n.to_string());
    let mut below = vec![String::new()];
    for l in &all {
        let hides = match &l.meanwhile[..] {
            [] => "nothing".into(),
            [one] => one.clone(),
            [first, rest @ ..] => format!("{first} and {} more", rest.len()),
        };
        t.add_row([
            l.number.to_string(),
            format!("{} over {}", l.kind, l.axis),
            l.spread.ranks.to_string(),
            number(l.spread.per_node),
            number(l.spread.nodes),
            bytes(l.bytes as usize),
            l.calls.to_string(),
        ]);
        below.push(format!(
            "      @{} {}: after {}, hidden by {hides}, awaited by {}\n",
            l.function,
            l.scope,
            l.after.as_deref().unwrap_or("the start"),
            l.awaited_by.as_deref().unwrap_or("the end")
        ));
    }
    terminal::numbers(&mut t, [0, 2, 3, 4, 5, 6]);
    let rows = t.lines().zip(below).map(|(row, below)| format!("{}\n{below}", row.trim_end()));
    let rows: String = rows.collect();
    rows + "\n" + &far(&all, node) + &Chosen::of(&s.options).line()
}

/// What leaves nodes, in words.
fn far(all: &[Line], node: Option<usize>) -> String {
    let of_step = |l: &Line| l.bytes * l.calls as f64;
    let sent: f64 = all.iter().map(of_step).sum();
    let every = format!("{} in all, {} per step", all.len(), bytes(sent as usize));
    let Some(node) = node else {
        return format!("{every}; give --node to see which leave nodes\n");
    };
    let far: Vec<&Line> = all.iter().filter(|l| l.spread.crosses()).collect();
    let mut axes: Vec<&str> = far.iter().map(|l| &*l.axis).collect();
    axes.sort_unstable();
    axes.dedup();
    let over = if axes.is_empty() { String::new() } else { format!(", over {}", axes.join(", ")) };
    let bytes = bytes(far.iter().map(|l| of_step(l)).sum::<f64>() as usize);
    let nodes = count(node, "rank", "ranks");
    let leave = count(far.len(), "leaves", "leave");
    format!("{every}; {leave} nodes of {nodes}{over}: {bytes}\n")
}
