//! Memory of a rank class over a step, in words: when it is fullest, when each kind of memory is, and what each layer
//! saves for backward.

use serde::Serialize;
use serde_json::{Value as Json, json};
use shardc_ir::diag::bytes;
use shardc_ir::func::{FuncKind, RoleKind};
use shardc_ir::plan::{Instr, MemoryClass, Moment, Plan, RankClass};
use shardc_ir::text::node_text;
use std::collections::{BTreeMap, BTreeSet};

/// Longest text of a node, in characters.
const TEXT: usize = 60;

/// A kind of memory at its fullest.
#[derive(Serialize)]
pub struct Most {
    pub class: MemoryClass,
    pub bytes: usize,
    /// When that is first.
    pub at: String,
}

/// What neighbouring layers save of one microbatch, each as much.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Saved {
    pub first: u32,
    pub last: u32,
    pub bytes: usize,
}

/// When a class needs most.
pub fn peak(plan: &Plan, c: &RankClass) -> String {
    c.memory.peak_at.map_or("all moments of a step".into(), |at| words(plan, c, at))
}

/// A moment in words: the function, its stage and microbatch, and the node that runs.
fn words(plan: &Plan, c: &RankClass, at: Moment) -> String {
    let (list, of) = match at.in_evaluation {
        true => (&c.evaluation, " of an evaluation"),
        false => (&c.step, ""),
    };
    let stages = plan.schedule.owner.len();
    let of_microbatch = |m: Option<usize>| m.map_or(String::new(), |m| format!(", microbatch {m}"));
    let text = match list.get(at.instr) {
        Some(Instr::Call(call)) => {
            let f = &plan.module.funcs[call.func];
            let what = match f.kind {
                FuncKind::StepPrologue => "before the microbatches".to_string(),
                FuncKind::Forward => "forward".into(),
                FuncKind::Backward | FuncKind::BackwardLast => "backward".into(),
                FuncKind::Weight | FuncKind::WeightLast => "backward for weights".into(),
                FuncKind::OptimizerStep => "after the microbatches".into(),
                FuncKind::Model | FuncKind::Evaluate => format!("@{}", f.name),
            };
            let stage = match f.kind.is_looped() && stages > 1 {
                true => format!(" of stage {}", f.stage),
                false => String::new(),
            };
            let node = match at.node.checked_sub(1).map(|i| f.nodes.get(i)) {
                None => ", at its beginning".to_string(),
                Some(None) => ", at its end".into(),
                Some(Some(n)) => {
                    let all = node_text(&plan.module.mesh, f, n).text;
                    let cut = all.chars().count() > TEXT;
                    let text: String = all.chars().take(TEXT).collect();
                    let path = &f.scope_info(n.scope).path;
                    let path = if path.is_empty() { String::new() } else { format!(" in {path}") };
                    format!(", at `{}{}`{path}", text.trim_end(), if cut { " …" } else { "" })
                }
            };
            format!("{what}{stage}{}{node}", of_microbatch(call.microbatch))
        }
        Some(Instr::Send(t)) => {
            format!("where pipeline rank {} is sent to{}", t.with, of_microbatch(t.microbatch))
        }
        Some(Instr::PostRecv(t)) => {
            let of = of_microbatch(t.microbatch);
            format!("where what pipeline rank {} sends may arrive{of}", t.with)
        }
        Some(Instr::Recv(t)) => {
            format!("where pipeline rank {} has sent{}", t.with, of_microbatch(t.microbatch))
        }
        Some(Instr::Sent { to }) => format!("where pipeline rank {to} has taken what was sent"),
        None => "the end".into(),
    };
    text + of
}

/// Each kind of memory at its fullest, which need not be where all of it is.
pub fn most(plan: &Plan, c: &RankClass) -> Vec<Most> {
    let m = &c.memory;
    let whole: BTreeMap<MemoryClass, usize> = m.whole.iter().copied().collect();
    // What ends at a moment goes before what begins behind it.
    let mut changes: Vec<((usize, usize), bool, usize)> = vec![];
    for (i, s) in m.spans.iter().enumerate() {
        changes.push(((s.first, s.from_node), true, i));
        changes.push(((s.last, s.to_node + 1), false, i));
    }
    changes.sort_unstable();
    let mut now = whole.clone();
    let mut best: BTreeMap<MemoryClass, (usize, Option<(usize, usize)>)> =
        whole.iter().map(|(c, n)| (*c, (*n, None))).collect();
    for run in changes.chunk_by(|a, b| a.0 == b.0) {
        for &(_, begins, i) in run {
            let s = &m.spans[i];
            let n = now.entry(s.class).or_default();
            *n = if begins { *n + s.bytes } else { n.saturating_sub(s.bytes) };
        }
        for (class, n) in &now {
            let known = best.entry(*class).or_default();
            if *n > known.0 {
                *known = (*n, Some(run[0].0));
            }
        }
    }
    // At the peak all is counted value by value, and not by frames.
    for &(class, n) in &m.at_peak {
        let known = best.entry(class).or_default();
        if n > known.0 {
            *known = (n, m.peak_at.map(|at| (at.instr, at.node)));
        }
    }
    let of = |(class, (bytes, at)): (MemoryClass, (usize, Option<(usize, usize)>))| Most {
        class,
        bytes,
        at: at.map_or("all moments of a step".into(), |(instr, node)| {
            words(plan, c, Moment { in_evaluation: false, instr, node })
        }),
    };
    best.into_iter().filter(|b| b.1.0 > 0).map(of).collect()
}

/// What layers save of one microbatch for backward, by their numbers; without what is saved outside layers.
pub fn saved(plan: &Plan, c: &RankClass) -> Vec<Saved> {
    let mut layers: BTreeMap<u32, usize> = BTreeMap::new();
    for &fi in &c.funcs {
        let f = &plan.module.funcs[fi];
        if f.kind != FuncKind::Forward {
            continue;
        }
        let mut seen = BTreeSet::new();
        for r in &f.results {
            let stashed = r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Stash);
            let Some(layer) = f.name(r.value).layer.filter(|_| stashed) else { continue };
            let Some(p) = c.memory.places[fi].find(r.value) else { continue };
            // Frame 0 is there through the whole step; two values may be one piece of memory.
            if p.frame != 0 && seen.insert((p.frame, p.offset)) {
                *layers.entry(layer).or_default() += p.bytes;
            }
        }
    }
    let mut out: Vec<Saved> = vec![];
    for (layer, bytes) in layers {
        match out.last_mut() {
            Some(s) if s.bytes == bytes && s.last + 1 == layer => s.last = layer,
            _ => out.push(Saved { first: layer, last: layer, bytes }),
        }
    }
    out
}

/// What layers save, a line for those that save as much.
pub fn saved_lines(plan: &Plan, c: &RankClass) -> Vec<[String; 2]> {
    let one = |s: &Saved| {
        let layers = match s.first == s.last {
            true => format!("layer {}", s.first),
            false => format!("layers {}-{}, each", s.first, s.last),
        };
        [layers, bytes(s.bytes)]
    };
    saved(plan, c).iter().map(one).collect()
}

/// All of this for programs.
pub fn json(plan: &Plan, c: &RankClass) -> [(&'static str, Json); 3] {
    [
        ("peak_at", peak(plan, c).into()),
        ("most", json!(most(plan, c))),
        ("saved", json!(saved(plan, c))),
    ]
}
