//! The launches and exchanges of a plan, each with its sizes and its price.

use serde_json::{Value, json};
use shardc_cost::plan::launch::{Pricer, Work};
use shardc_cost::plan::{Item, PlanPrice};
use shardc_ir::diag::time;
use shardc_ir::plan::calls;
use shardc_plans::stored::Stored;
use shardc_report::prices::words;

/// A launch or exchange of a function, and how often a step calls that.
pub(super) type Each<'a> = (&'a str, usize, &'a Item);

/// All launches and exchanges of a plan.
pub(super) fn each<'a>(stored: &'a Stored, p: &'a PlanPrice) -> Vec<Each<'a>> {
    let mut out = vec![];
    for (i, (f, own)) in stored.plan.module.funcs.iter().zip(&p.funcs).enumerate() {
        let all = stored.plan.classes.iter().flat_map(|c| calls(&c.step));
        let count = all.filter(|c| c.func == i).count();
        out.extend(own.items.iter().map(|item| (&*f.name, count, item)));
    }
    out
}

/// The list that people read: launches of a function that are alike are one line.
pub(super) fn text(all: &[Each]) -> String {
    let mut lines: Vec<(&str, usize, String, f64, f64, usize)> = vec![];
    for &(func, calls, i) in all.iter().filter(|x| x.2.work != Work::View) {
        let what = words(&i.work);
        match lines.iter_mut().find(|l| l.0 == func && l.2 == what) {
            Some(l) => (l.4, l.5) = (l.4 + i.seen, l.5 + 1),
            None => lines.push((func, calls, what, i.seconds, i.seen, 1)),
        }
    }
    let mut out =
        "\nfunction          launches  calls       each  seen in a step  what\n".to_string();
    for (func, calls, what, each, seen, n) in lines {
        let (each, seen) = (time(each), time(seen * calls as f64));
        out += &format!("{func:<16} {n:>9} {calls:>6} {each:>10} {seen:>15}  {what}\n");
    }
    out
}

/// A launch as data.
pub(super) fn json(&(func, calls, i): &Each) -> Value {
    json!({
        "function": func, "node": i.node, "calls": calls, "what": words(&i.work),
        "work": sizes(&i.work), "flops": Pricer::flops(&i.work), "seconds": i.seconds, "seen_s": i.seen,
    })
}

/// The sizes of a launch on one rank.
fn sizes(w: &Work) -> Value {
    match w {
        Work::View => json!({ "kind": "view" }),
        Work::Product { gemm: g, precision, beside, epilogue } => json!({
            "kind": "product", "batch": g.batch, "m": g.m, "n": g.n, "k": g.k,
            "precision": precision.name(), "other_bytes": beside + epilogue.unwrap_or(0.0),
        }),
        Work::Grouped { gemm: g, precision } => json!({
            "kind": "grouped product", "batch": g.batch, "m": g.m, "n": g.n, "k": g.k,
            "precision": precision.name(),
        }),
        Work::Attention { sizes: a, precision, backward } => json!({
            "kind": "attention", "rows": a.rows, "heads": a.heads, "queries": a.queries,
            "keys": a.keys, "width": a.width, "value_width": a.values, "seen": a.seen,
            "precision": precision.name(), "backward": backward,
        }),
        Work::Rows { bytes } => json!({ "kind": "rows", "bytes": bytes }),
        Work::Exchange { op, group, bytes, .. } => json!({
            "kind": "exchange", "op": op, "ranks": group.size, "ranks_per_domain": group.per_domain,
            "domains": group.domains(), "bytes": bytes,
        }),
    }
}
