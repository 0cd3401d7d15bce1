//! `explain memory`: of every rank class, when it needs most, of what, and what layers save.

use super::{Answer, facts, some};
use crate::report::moments;
use serde_json::{Value as Json, json};
use shardc_ir::diag::bytes;
use shardc_plans::stored::Stored;

/// Most tensors of a class.
const MAX_TENSORS: usize = 6;

/// Explains the memory of all rank classes.
pub fn explain(s: &Stored) -> Answer {
    let plan = &s.plan;
    let most = plan.peak_bytes();
    let mut a = Answer::new(format!("memory of a rank: at most {}", bytes(most)));
    let (mut peaks, mut kinds, mut tensors, mut saved) = (vec![], vec![], vec![], vec![]);
    let classes: Vec<Json> =
        plan.classes.iter().enumerate().map(|(i, c)| facts::of_memory(i, c)).collect();
    a.facts = facts::map(json!({ "peak_bytes": most, "classes": classes }));
    for (i, c) in plan.classes.iter().enumerate() {
        let of = if plan.classes.len() > 1 { format!("class {i}: ") } else { String::new() };
        let m = &c.memory;
        peaks.push(format!("{of}{} at {}", bytes(m.peak_bytes), moments::peak(plan, c)));
        let all = moments::most(plan, c).into_iter();
        kinds.extend(all.map(|k| format!("{of}{} {} at {}", k.class.name(), bytes(k.bytes), k.at)));
        let live = m.live_at_peak.iter();
        let live = live.map(|(v, k, n)| format!("{of}{v} {} {}", k.name(), bytes(*n)));
        tensors.extend(some(live.collect(), MAX_TENSORS));
        let layers = moments::saved_lines(plan, c).into_iter();
        saved.extend(layers.map(|[layers, n]| format!("{of}{layers}: {n}")));
    }
    a.part("peak", peaks);
    a.part("kinds", kinds);
    a.part("tensors", tensors);
    a.part("saved", saved);
    a
}
