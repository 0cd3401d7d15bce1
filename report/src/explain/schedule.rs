//! `explain schedule`: what the ranks of a pipeline do, how long they are idle, what they hold, what would change that.

use super::{Answer, facts};
use crate::pictures::measure::{bubble, live, span, textbook_bubble, timeline};
use crate::report::layers_of;
use serde_json::json;
use shardc_ir::diag::{bytes, count};
use shardc_ir::schedule::Times;
use shardc_plans::stored::Stored;

/// Explains the schedule of a plan, with the times of `inspect --timeline`.
pub fn explain(s: &Stored) -> Answer {
    let plan = &s.plan;
    let schedule = &plan.schedule;
    let (p, m, stages) = (schedule.ranks.len(), schedule.microbatches, schedule.owner.len());
    let chunks = stages / p.max(1);
    let name = s.options.schedule.name();
    if p <= 1 {
        let mut a = Answer::new("one rank has all layers: there is no pipeline");
        a.part(
            "add one",
            vec!["compile with --mesh pp=2 and --microbatch, for several microbatches".into()],
        );
        return a;
    }
    let t = timeline(plan, Times::unit(stages))
        .expect("a plan's schedule was replayed when it was made or read");
    let (makespan, idle) = (span(&t).1, bubble(&t));
    let busy = |r: usize| t.ranks[r].iter().map(|s| s.end - s.start).sum::<f64>();
    let idle_of = |r: usize| 100.0 * (1.0 - busy(r) / makespan.max(f64::MIN_POSITIVE));
    let held = live(&t);
    let mut a = Answer::new(format!(
        "schedule {name}: {} on {p} pipeline ranks, {}",
        count(stages, "stage", "stages"),
        count(m, "microbatch", "microbatches")
    ));
    let layers = |f: &shardc_ir::func::Func| layers_of(f).len();
    let of_stage: Vec<usize> =
        plan.module.of_kind(shardc_ir::func::FuncKind::Forward).map(layers).collect();
    a.part(
        "stages",
        (0..p)
            .map(|r| {
                let own = schedule.stages_of(r);
                let has: Vec<String> = own
                    .iter()
                    .map(|&i| {
                        let n = of_stage.get(i).copied().unwrap_or(0);
                        format!("stage {i} ({})", count(n, "layer", "layers"))
                    })
                    .collect();
                format!("pipeline rank {r}: {}", has.join(", "))
            })
            .collect(),
    );
    let textbook = 100.0 * textbook_bubble(plan);
    let formula = if chunks > 1 { "interleaved 1F1B: (p-1)/(v m)" } else { "1F1B: (p-1)/m" };
    a.part(
        "bubble",
        vec![
            format!("{:.2} % of the time of all ranks is idle (idle/total)", 100.0 * idle),
            format!(
                "{:.2} % of their work (idle/work); {formula} = {textbook:.2} %",
                100.0 * idle / (1.0 - idle).max(f64::MIN_POSITIVE)
            ),
            "if all stages take equally long; price PLAN --machine NAME has their own times".into(),
        ],
    );
    let idle_lines = (0..p).map(|r| format!("pipeline rank {r}: {:.2} %", idle_of(r))).collect();
    a.part("idle", super::some(idle_lines, 16));
    let peaks = |r: usize| plan.classes.get(r).map_or(0, |c| c.memory.peak_bytes);
    let held_lines = held.iter().enumerate().map(|(r, n)| {
        let of = if chunks > 1 { " (counted for each stage)" } else { "" };
        format!(
            "pipeline rank {r}: {} alive at the most{of}; it needs {}",
            count(*n, "microbatch", "microbatches"),
            bytes(peaks(r))
        )
    });
    a.part("held", super::some(held_lines.collect(), 16));
    let mut less = vec![format!(
        "more microbatches: with {} it is half (1F1B); a smaller --microbatch makes more of the same batch",
        2 * m
    )];
    if chunks == 1 {
        less.push("--schedule interleaved --chunks 2: half the bubble, and twice the sends".into());
    }
    if !schedule.splits_backward() {
        less.push(
            "--schedule zb-h1: W fills the bubble, and activations are held until W; --schedule search: the fastest that fits --memory"
                .into(),
        );
    }
    a.part("reduce", less);
    a.facts = facts::map(json!({
        "schedule": name, "pipeline_ranks": p, "stages": stages, "microbatches": m,
        "bubble": idle, "textbook_bubble": textbook / 100.0, "makespan": makespan,
        "idle": (0..p).map(|r| idle_of(r) / 100.0).collect::<Vec<_>>(), "alive": held,
        "peak_bytes": (0..p).map(peaks).max(),
    }));
    a
}
