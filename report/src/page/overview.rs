//! What a page says at its beginning: every setting, the mesh, who sends how much over what.

use crate::inspect::{layers_of, order};
use crate::pictures::measure::{bubble_of, textbook_bubble};
use crate::pictures::step::gaps;
use crate::proof::Outcome;
use crate::report::Experts;
use serde_json::{Value as Json, json};
use shardc_ir::axes;
use shardc_ir::group::begins_call;
use shardc_ir::mesh::{AtomSet, PIPELINE};
use shardc_ir::ops::Sends;
use shardc_ir::plan::{Call, Instr, MemoryClass, Plan, RankClass};
use shardc_plans::flags::spec::all;
use shardc_plans::flags::yes;
use shardc_plans::stored::Stored;
use std::collections::BTreeMap;

/// What people call the model, else its family.
fn name(s: &Stored) -> &str {
    s.name.as_deref().unwrap_or(&s.family)
}

/// What the page is of: the model and its layout.
pub fn title(s: &Stored) -> String {
    let axes = s.plan.module.mesh.axes.iter().map(|a| format!("{}={}", a.name, a.size));
    let layout: Vec<String> = axes.collect();
    let layout = if layout.is_empty() { "1 rank".into() } else { layout.join(" ") };
    format!("{}, {layout}", name(s))
}

/// Numbers of the model and of the step.
pub fn facts(s: &Stored) -> Json {
    let p = &s.plan;
    let parameters: usize = p.weights.iter().map(|w| w.shape.iter().product::<usize>()).sum();
    let stages = p.schedule.owner.len();
    let (ranks, m) = (p.schedule.ranks.len(), p.schedule.microbatches);
    json!({
        "name": name(s),
        "family": s.family,
        "parameters": parameters,
        "ranks": p.module.mesh.ranks(),
        "pipeline": ranks,
        "stages": stages,
        "microbatches": m,
        "bubble": bubble_of(p),
        "textbook": textbook(s),
        "limit": s.options.memory,
        "proof": Outcome::of(s).map(|o| o.to_string()),
        "facts": s.facts,
    })
}

/// Idle over total time of 1F1B, if the schedule is that, with one stage per rank or several.
fn textbook(s: &Stored) -> Option<f64> {
    let known = matches!(s.options.schedule.name(), "1f1b" | "interleaved");
    let ratio = textbook_bubble(&s.plan);
    (known && s.plan.schedule.ranks.len() > 1).then(|| ratio / (1.0 + ratio))
}

/// All settings in columns: name and value. Those of the model and of the mesh, then those that options have.
pub fn settings(s: &Stored) -> Json {
    let o = &s.options;
    let none = || "–".to_string();
    let (parameters, f) = (&facts(s)["parameters"], s.facts.as_ref());
    let fact = |of: fn(&shardc_frontends::Facts) -> usize| f.map_or(none(), |f| of(f).to_string());
    let experts = f.and_then(|f| f.experts);
    let of_experts = |n: Option<usize>| match n {
        Some(n) if experts.is_some() => n.to_string(),
        _none => none(),
    };
    let model = [
        ("family", s.family.clone()),
        ("parameters", parameters.to_string()),
        ("layers", fact(|f| f.layers)),
        ("hidden", fact(|f| f.hidden)),
        ("MLP width", fact(|f| f.ffn)),
        ("heads, KV", f.map_or(none(), |f| format!("{}, {}", f.heads, f.kv_heads))),
        ("vocabulary", fact(|f| f.vocab)),
        ("tied embedding", f.map_or(none(), |f| yes(f.tied))),
        ("experts, used", experts.map_or(none(), |e| format!("{}, {}", e.experts, e.top_k))),
    ];
    let mesh = axes::names(|_| true).map(|axis| (axis, o.axis(axis).to_string()));
    let of_mesh = [("ep", of_experts(Some(o.ep))), ("etp", of_experts(o.etp))];
    let named = |(name, value): (&str, String)| (name.to_string(), value);
    let mut groups: Vec<(&str, Vec<(String, String)>)> = vec![
        ("Model", model.map(named).into()),
        ("Parallelism", mesh.into_iter().chain(of_mesh).map(named).collect()),
        ("Step", vec![]),
        ("Numbers", vec![]),
        ("Optimizer", vec![]),
    ];
    // What a step is comes before how it is laid out.
    let (run, others): (Vec<_>, Vec<_>) = all().partition(|option| option.heading == "Run");
    for row in run.into_iter().chain(others).flat_map(|option| option.rows) {
        let group = groups.iter_mut().find(|g| g.0 == row.group).expect("a column of the page");
        group.1.push((row.name.into(), (row.show)(s).unwrap_or_else(none)));
    }
    if let Some(optimizer) = groups.last_mut() {
        // A plan that was read has a model that can be read.
        optimizer.1.extend(crate::report::groups::settings(s).unwrap_or_default());
    }
    let column = |(name, rows)| json!({ "name": name, "rows": rows });
    groups.into_iter().map(column).collect()
}

/// Axes, outer to inner, with how far apart neighbours are, and the groups that exchange data.
pub fn mesh(s: &Stored) -> Json {
    let (mesh, node) = (&s.plan.module.mesh, s.options.node);
    let stride = |i: usize| mesh.axes[i + 1..].iter().map(|a| a.size).product::<usize>();
    let axis = |(i, a): (usize, &shardc_ir::mesh::Axis)| json!({ "name": a.name, "size": a.size, "stride": stride(i) });
    let axes: Vec<Json> = mesh.axes.iter().enumerate().map(axis).collect();
    let group = |(name, atoms): (String, AtomSet)| {
        json!({
            "axis": name,
            "size": mesh.ways(atoms),
            "groups": mesh.ranks() / mesh.ways(atoms).max(1),
            // How many nodes a group spans: that of rank 0, as all are alike.
            "nodes": node.map(|n| nodes(&mesh.group(atoms, 0), n)),
            "dims": dims(s, atoms),
        })
    };
    let groups: Vec<Json> = groups(s).into_iter().map(group).collect();
    json!({
        "axes": axes, "ranks": mesh.ranks(), "node": node, "order": order(&s.plan),
        "groups": groups,
    })
}

/// Nodes of so many ranks that a group spans.
fn nodes(group: &[usize], node: usize) -> usize {
    let mut all: Vec<usize> = group.iter().map(|r| r / node.max(1)).collect();
    all.dedup();
    all.len()
}

/// The atoms of a group as runs of rank numbers: size and stride, outer to inner.
fn dims(s: &Stored, atoms: AtomSet) -> Vec<[usize; 2]> {
    let mesh = &s.plan.module.mesh;
    let after = |i: usize| mesh.atoms.iter().skip(i + 1).map(|a| a.size).product::<usize>();
    atoms.iter().map(|a| [mesh.size(a), after(usize::from(a.0))]).collect()
}

/// All groups that exchange data, by the name of their axis.
fn groups(s: &Stored) -> BTreeMap<String, AtomSet> {
    let (plan, experts) = (&s.plan, Experts::of(&s.plan));
    let mesh = &plan.module.mesh;
    let mut all = BTreeMap::new();
    for f in &plan.module.funcs {
        for n in &f.nodes {
            if let Some(c) = n.op.collective() {
                all.insert(experts.axis(mesh, f, n, c.atoms()), c.atoms());
            }
        }
    }
    if plan.classes.len() > 1 {
        all.insert(PIPELINE.into(), mesh.axis(PIPELINE).unwrap_or_default());
    }
    all
}

/// One pipeline rank: what it is and what it needs.
pub fn class(s: &Stored, i: usize) -> Json {
    let (c, mesh) = (&s.plan.classes[i], &s.plan.module.mesh);
    // What a plan counts as temporary has the gaps in it.
    let gaps = gaps(&c.memory);
    let own = |k: MemoryClass, n: usize| {
        if k == MemoryClass::Temporary { n.saturating_sub(gaps) } else { n }
    };
    let kind = |&(k, n): &(MemoryClass, usize)| {
        (serde_json::to_value(k).map_or(String::new(), word), own(k, n))
    };
    let mut at_peak: BTreeMap<_, usize> = c.memory.at_peak.iter().map(kind).collect();
    at_peak.insert("gaps".into(), gaps);
    json!({
        "class": i,
        "stages": c.stages,
        "layers": layers_of(&s.plan, c),
        "ranks": mesh.ranks() / s.plan.classes.len().max(1),
        "peak_bytes": c.memory.peak_bytes,
        "live_bytes": c.memory.live_bytes,
        "at_peak": at_peak,
        "peak_in": peak_in(&s.plan, c),
    })
}

/// In which call of a step, or of an evaluation, the peak is; none if memory is the same all the time.
fn peak_in(plan: &Plan, c: &RankClass) -> Option<String> {
    let at = c.memory.peak_at?;
    let list = if at.in_evaluation { &c.evaluation } else { &c.step };
    let name = |c: &Call| {
        let f = &plan.module.funcs[c.func].name;
        c.microbatch.map_or(f.clone(), |m| format!("{f} of microbatch {m}"))
    };
    match list.get(at.instr)? {
        Instr::Call(c) => Some(name(c)),
        Instr::Send(_) | Instr::Sent { .. } | Instr::PostRecv(_) | Instr::Recv(_) => {
            Some("a transfer".into())
        }
    }
}

fn word(v: Json) -> String {
    v.as_str().unwrap_or_default().into()
}

/// What one rank sends per step over every axis: calls, bytes, and how many of them leave its node, on the
/// mean over the ranks of a group.
pub fn sent(s: &Stored, class: usize) -> Json {
    let (plan, c, experts) = (&s.plan, &s.plan.classes[class], Experts::of(&s.plan));
    let mesh = &plan.module.mesh;
    let mut all: BTreeMap<String, (usize, u64, f64)> = BTreeMap::new();
    for &fi in &c.funcs {
        let f = &plan.module.funcs[fi];
        let calls = c.calls().filter(|call| call.func == fi).count();
        for (ni, n) in f.nodes.iter().enumerate().filter(|_| calls > 0) {
            let Some(op) = n.op.collective() else { continue };
            let pairs = n.ins.iter().zip(&n.outs);
            let bytes =
                pairs.map(|(&x, &y)| op.ring_bytes(mesh, f.ty(x), f.ty(y))).sum::<f64>().ceil();
            let one = all.entry(experts.axis(mesh, f, n, op.atoms())).or_default();
            let far = s
                .options
                .node
                .map_or(0.0, |node| leaves(&mesh.group(op.atoms(), 0), node, op.sends()));
            one.0 += calls * usize::from(begins_call(f, ni));
            one.1 += bytes as u64 * calls as u64;
            one.2 += bytes * calls as f64 * far;
        }
    }
    let sends = c.step.iter().filter_map(|i| match i {
        Instr::Send(t) => Some(t),
        Instr::Call(_) | Instr::Sent { .. } | Instr::PostRecv(_) | Instr::Recv(_) => None,
    });
    for t in sends {
        let one = all.entry(PIPELINE.into()).or_default();
        let on = |class: usize| s.options.node.map(|node| plan.peer(0, class) / node.max(1));
        one.0 += 1;
        one.1 += t.bytes as u64;
        one.2 += if on(class) != on(t.with) { t.bytes as f64 } else { 0.0 };
    }
    let row = |(axis, (calls, bytes, far)): (String, (usize, u64, f64))| {
        let between = s.options.node.map(|_| far.round() as u64);
        json!({
            "axis": axis, "calls": calls, "bytes": bytes,
            "between_nodes": between, "inside_node": between.map(|b| bytes - b.min(bytes)),
        })
    };
    all.into_iter().map(row).collect::<Vec<_>>().into()
}

/// The part of what a group sends that leaves its node: of a ring, hops from node to node; of an exchange of
/// all with all, pairs on two nodes.
fn leaves(group: &[usize], node: usize, sends: Sends) -> f64 {
    let on = |r: &usize| r / node.max(1);
    let p = group.len();
    if p < 2 {
        return 0.0;
    }
    match sends {
        Sends::Rows { .. } | Sends::Pieces => {
            let far = |a: &usize| group.iter().filter(|b| on(b) != on(a)).count();
            group.iter().map(far).sum::<usize>() as f64 / (p * (p - 1)) as f64
        }
        _ring => {
            let hops = group.iter().zip(group.iter().cycle().skip(1));
            hops.filter(|(a, b)| on(a) != on(b)).count() as f64 / p as f64
        }
    }
}
