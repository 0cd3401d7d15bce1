//! `shardc price --trace`: what launches are priced at, against what they took in a run.

use super::launches::each;
use serde::Deserialize;
use serde_json::{Value, json};
use shardc_compiler::measure::{least_waiting, median};
use shardc_cost::plan::PlanPrice;
use shardc_cost::plan::launch::Work;
use shardc_ir::diag::time;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_plans::stored::Stored;
use shardc_report::prices::words;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Largest trace that is read, in bytes.
const MAX_TRACE: u64 = 1 << 30;

/// Launches that are shown without `--launches`.
const SHOWN: usize = 20;

/// A file of `run --trace`, as far as it is read.
#[derive(Deserialize)]
struct File {
    #[serde(rename = "otherData", default)]
    about: About,
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
}

/// Which plan ran; older traces do not say it.
#[derive(Default, Deserialize)]
struct About {
    plan: Option<String>,
}

/// Most microseconds since a run began: a year.
const LATEST: f64 = 3.2e13;

#[derive(Deserialize)]
struct Event {
    ph: String,
    /// Rank.
    #[serde(default)]
    pid: usize,
    /// Microseconds.
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Args,
}

/// All are texts.
#[derive(Default, Deserialize)]
struct Args {
    step: Option<String>,
    function: Option<String>,
    node: Option<String>,
}

/// A launch: what it was priced at, and what it took.
struct Row<'a> {
    function: &'a str,
    node: usize,
    work: &'a Work,
    /// In a step.
    calls: usize,
    /// Seconds of one call.
    priced: f64,
    ran: f64,
}

impl Row<'_> {
    /// Seconds of a step by which the price is too high.
    fn off(&self) -> f64 {
        (self.priced - self.ran) * self.calls as f64
    }
}

/// A plan's price against a run of it.
pub(super) struct Against<'a> {
    /// Steps that are compared.
    steps: usize,
    /// Seconds of a step, by price and in the run.
    priced: f64,
    ran: f64,
    /// All launches, those that are farthest off first.
    rows: Vec<Row<'a>>,
}

/// Launches of each rank in the order in which it ran them: seconds of each.
type Times = BTreeMap<usize, Vec<f64>>;

/// What a trace has of the steps that count: the median of their seconds, and times by function and node.
struct TraceTimes {
    steps: usize,
    seconds: f64,
    launches: BTreeMap<(String, usize), Times>,
}

fn bad(what: impl Into<String>) -> Diag {
    Diag::new("trace", what)
        .rule("--trace takes what `shardc run PLAN --trace FILE` wrote of the same plan")
        .help("run the plan again with --trace")
}

impl TraceTimes {
    /// Of all steps but the first, in which threads wake and caches fill, if there are more.
    fn of(file: File) -> Result<TraceTimes> {
        let mut slices = vec![];
        for e in file.events.into_iter().filter(|e| e.ph == "X") {
            let step: Option<usize> = e.args.step.as_deref().and_then(|s| s.parse().ok());
            let step = step.ok_or_else(|| bad("something was done in no step"))?;
            if !(e.ts.abs() < LATEST && (0.0..LATEST).contains(&e.dur)) {
                return Err(bad("a time is not a number of microseconds"));
            }
            slices.push((step, e));
        }
        slices.sort_by(|a, b| a.1.ts.total_cmp(&b.1.ts));
        let mut steps: BTreeSet<usize> = slices.iter().map(|s| s.0).collect();
        if steps.len() > 1 {
            steps.pop_first();
        }
        let mut out = TraceTimes { steps: steps.len(), seconds: 0.0, launches: BTreeMap::new() };
        let mut ends: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
        for (step, e) in slices.into_iter().filter(|s| steps.contains(&s.0)) {
            let (from, to) = (e.ts, e.ts + e.dur);
            let all = ends.entry(step).or_insert((from, to));
            *all = (all.0.min(from), all.1.max(to));
            let (Some(function), Some(node)) = (e.args.function, e.args.node) else { continue };
            let node = node.parse().map_err(|_| bad("a launch has no number"))?;
            let times = out.launches.entry((function, node)).or_default();
            times.entry(e.pid).or_default().push((to - from) / 1e6);
        }
        out.seconds = median(ends.values().map(|(from, to)| (to - from) / 1e6).collect());
        Ok(out)
    }
}

impl<'a> Against<'a> {
    /// # Errors
    /// `trace` if the file is not a trace of this plan, and those of reading it.
    pub fn of(path: &Path, stored: &'a Stored, p: &'a PlanPrice) -> Result<Against<'a>> {
        let at = |d: Diag| d.at(path.display().to_string());
        let text = files::read_text(path, MAX_TRACE)?;
        let file = serde_json::from_str(&text);
        let file = file.map_err(|e| at(bad(format!("the file is not a trace: {e}"))))?;
        let file: File = file;
        if file.about.plan.as_ref().is_some_and(|plan| *plan != stored.hash()) {
            return Err(at(bad("the trace is of another plan")));
        }
        let mut run = TraceTimes::of(file).map_err(at)?;
        let mut rows = vec![];
        for (function, calls, item) in each(stored, p) {
            let launch = (function.to_string(), item.node);
            let Some(times) = run.launches.remove(&launch) else {
                // A view does nothing, so no trace has it.
                if matches!(item.work, Work::View) {
                    continue;
                }
                let what = format!("the trace has no launch at node {} of `{function}`", item.node);
                return Err(at(bad(what)));
            };
            let ran = match item.work {
                Work::Exchange { .. } => least_waiting(&times),
                _alone => median(times.into_values().flatten().collect()),
            };
            let (node, work, priced) = (item.node, &item.work, item.seconds);
            rows.push(Row { function, node, work, calls, priced, ran });
        }
        if let Some(((function, node), _)) = run.launches.first_key_value() {
            let what = format!("the plan has no launch at node {node} of `{function}`");
            return Err(at(bad(what)));
        }
        if rows.is_empty() {
            return Err(at(bad("the trace names no launch")));
        }
        rows.sort_by(|a, b| b.off().abs().total_cmp(&a.off().abs()));
        Ok(Against { steps: run.steps, priced: p.total, ran: run.seconds, rows })
    }

    /// Seconds of a step that its launches of a kind are priced at, and took, over all rank classes.
    fn kinds(&self) -> BTreeMap<&'static str, (f64, f64)> {
        let mut out = BTreeMap::new();
        for r in &self.rows {
            let (priced, ran): &mut (f64, f64) = out.entry(kind(r.work)).or_default();
            *priced += r.priced * r.calls as f64;
            *ran += r.ran * r.calls as f64;
        }
        out
    }

    /// As a text; the launches that are farthest off, or all.
    pub fn human(&self, all: bool) -> String {
        let line = |name: &str, priced: f64, ran: f64| {
            let off = (ran > 0.0).then(|| 100.0 * (priced / ran - 1.0));
            let off = off.map_or(String::new(), |off| format!("  {off:>+7.1} %"));
            format!("{name:<10} {:>12} {:>12}{off}\n", time(priced), time(ran))
        };
        let counted = match self.steps {
            1 => "one step".to_string(),
            n => format!("the median of {n} steps"),
        };
        let mut out = format!("\n{:<10} {:>12} {:>12}  ({counted})\n", "", "price", "run");
        out += &line("step", self.priced, self.ran);
        for (name, (priced, ran)) in self.kinds() {
            out += &line(name, priced, ran);
        }
        let shown = if all { self.rows.len() } else { SHOWN.min(self.rows.len()) };
        out += "\nof a step       each, price         run  calls  function             what\n";
        for r in &self.rows[..shown] {
            let off = format!("{}{}", if r.off() < 0.0 { "-" } else { "+" }, time(r.off().abs()));
            let (a, b) = (time(r.priced), time(r.ran));
            let (calls, function) = (r.calls, r.function);
            let what = words(r.work);
            out += &format!("{off:>12} {a:>14} {b:>11} {calls:>6}  {function:<20} {what}\n");
        }
        if shown < self.rows.len() {
            let rest = self.rows.len() - shown;
            out += &format!("and {rest} that are nearer; --launches lists them\n");
        }
        out
    }

    /// As `price --format json` has it.
    pub fn json(&self) -> Value {
        let one = |r: &Row| {
            json!({ "function": r.function, "node": r.node, "what": words(r.work), "calls": r.calls,
                    "seconds": r.priced, "run_s": r.ran, "off_s": r.off() })
        };
        json!({
            "steps": self.steps,
            "step_s": self.ran,
            "launches": self.rows.iter().map(one).collect::<Vec<_>>(),
        })
    }
}

fn kind(w: &Work) -> &'static str {
    match w {
        Work::Product { .. } | Work::Grouped { .. } => "products",
        Work::Attention { .. } => "attention",
        Work::Rows { .. } | Work::View => "rows",
        Work::Exchange { .. } => "exchanges",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(step: usize, rank: usize, ts: f64, dur: f64) -> String {
        let args = format!(r#"{{"step":"{step}","function":"f","node":"3"}}"#);
        format!(
            r#"{{"ph":"X","pid":{rank},"tid":1,"name":"n","ts":{ts},"dur":{dur},"args":{args}}}"#
        )
    }

    fn run(events: &[String]) -> Result<TraceTimes> {
        let text = format!(r#"{{"traceEvents":[{}]}}"#, events.join(","));
        TraceTimes::of(serde_json::from_str(&text).expect("JSON"))
    }

    #[test]
    fn the_first_of_several_steps_does_not_count() {
        let all = [event(1, 0, 0.0, 90.0), event(2, 0, 100.0, 10.0), event(2, 1, 105.0, 15.0)];
        let two = run(&all).expect("a run");
        assert_eq!((two.steps, two.seconds), (1, 20e-6));
        assert_eq!(
            two.launches[&("f".to_string(), 3)],
            [(0, vec![10e-6]), (1, vec![15e-6])].into()
        );
        let one = run(&all[..1]).expect("a run");
        assert_eq!((one.steps, one.seconds), (1, 90e-6));
    }

    #[test]
    fn what_is_no_trace_is_told() {
        for bad in [r#""step":"x""#, r#""step":"2","function":"f","node":"x""#] {
            let e = format!(r#"{{"ph":"X","ts":1,"dur":1,"args":{{{bad}}}}}"#);
            assert_eq!(run(&[e]).err().expect(bad).code, "trace");
        }
        for (ts, dur) in [(1e300, 1.0), (1.0, -1.0), (1.0, 4e13)] {
            assert_eq!(run(&[event(1, 0, ts, dur)]).err().expect("a time").code, "trace");
        }
    }
}
