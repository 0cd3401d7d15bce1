//! An audit as text and as JSON.

use super::Audit;
use super::compare::{Cited, Finding};
use serde_json::{Value as Json, json};
use shardc_ir::diag::{bytes, count, time};
use shardc_process::terminal;
use shardc_report::report::brief;

impl Audit {
    /// The version whose rules hold, in words.
    fn version(&self) -> String {
        let t = &self.job.table;
        match &self.job.at {
            None => format!("{} at {}", t.software, t.short()),
            Some(v) => {
                let v: Vec<String> = v.iter().map(u32::to_string).collect();
                format!("{} {}", t.software, v.join("."))
            }
        }
    }

    /// The layout in words.
    fn layout(&self) -> String {
        let o = &self.job.options;
        let g = |n: &str| self.job.given.size(n) as usize;
        let mut all: Vec<String> = ["pp", "dp", "cp", "tp", "ep"]
            .into_iter()
            .filter(|a| g(a) > 1)
            .map(|a| format!("{a}={}", g(a)))
            .collect();
        if g("ep") > 1 || g("etp") != g("tp") {
            all.push(format!("etp={}", g("etp")));
        }
        all.extend(o.sp.then(|| "sp".to_string()));
        if all.is_empty() { "one rank".into() } else { all.join(" ") }
    }

    /// What the audit is of: a word, and what it is.
    pub(super) fn head(&self) -> Vec<(&'static str, String)> {
        let elements: usize =
            self.rows.iter().map(|r| r.parameters * r.sizes.iter().product::<usize>()).sum();
        let family = self.job.config["model_type"].as_str().unwrap_or("");
        let o = &self.job.options;
        let mut out = vec![
            ("rules", self.version()),
            ("model", format!("{family}, {elements} parameters")),
            ("layout", self.layout()),
            (
                "step",
                format!(
                    "{} of {} in {}",
                    count(o.global_batch, "sequence", "sequences"),
                    count(o.seq, "token", "tokens"),
                    count(o.microbatches(), "microbatch", "microbatches")
                ),
            ),
        ];
        out.extend(self.price.as_ref().map(|(device, seconds, held, has)| {
            let (held, has) = (bytes(*held), bytes(*has));
            let time = time(*seconds);
            let text =
                format!("{time} by formulas on {device}; a rank needs {held} there, of {has}");
            ("price", text)
        }));
        out
    }

    /// What was found, in a line.
    pub(super) fn verdict(&self) -> String {
        match self.findings.len() {
            0 => "no finding: each gradient is summed, scaled and counted as by types".into(),
            n => count(n, "finding", "findings"),
        }
    }

    /// Findings, then the table.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |text: String| out += &(text + "\n");
        for (i, n) in self.job.not_modelled.iter().enumerate() {
            if i == 0 {
                line("not modelled".into());
            }
            line(wrapped("   ", n));
        }
        self.head().iter().for_each(|(word, text)| line(format!("{word:<7} {text}")));
        line(String::new());
        line(self.verdict() + if self.findings.is_empty() { "" } else { ":" });
        for (i, f) in self.findings.iter().enumerate() {
            line(finding(i + 1, f));
        }
        line(String::new());
        let states: usize = self.rows.iter().map(|r| r.parameters * r.state_bytes).sum();
        out + &self.table()
            + &format!(
                "\nholds: sizes of what a rank has; summed: axes over which its gradient is; norm: this part of its\n   squares is counted on each of so many ranks; state and sent: bytes of one parameter\n\
             states of all, were they on one stage: {}\n",
                bytes(states)
            )
    }

    fn table(&self) -> String {
        let mut t = terminal::table();
        t.set_header(["parameter", "holds", "split", "summed", "norm", "state", "sent"]);
        for r in &self.rows {
            let short = |n: &str| {
                n.trim_start_matches("model.")
                    .trim_start_matches("layers.")
                    .trim_end_matches(".weight")
                    .to_string()
            };
            let none = |w: &str| if w.is_empty() { "-".to_string() } else { w.to_string() };
            let sizes: Vec<String> = r.local.iter().map(usize::to_string).collect();
            let (norm, sums) = match r.trained {
                true => (
                    if r.norm_ranks > 1 { format!("1/{}", r.norm_ranks) } else { "once".into() },
                    none(&r.sums),
                ),
                false => ("-".into(), "not trained".into()),
            };
            t.add_row([
                short(&r.name),
                sizes.join("x"),
                none(&r.split),
                sums,
                norm,
                brief(r.state_bytes),
                brief(r.sent_bytes),
            ]);
        }
        terminal::numbers(&mut t, [5, 6]);
        t.lines().map(|l| l.strip_prefix(' ').unwrap_or(&l).trim_end().to_string() + "\n").collect()
    }

    /// All of it, as `docs/schemas/audit.json` has it.
    pub fn json(&self) -> Json {
        let g = &self.job.given;
        let facts: Vec<&String> = g.facts.iter().collect();
        json!({
            "software": self.job.software,
            "rules": self.version(),
            "repository": self.job.table.repository,
            "commit": self.job.table.commit,
            "not_modelled": self.job.not_modelled,
            "config": self.job.config,
            "layout": g.sizes,
            "facts": facts,
            "price": self.price.as_ref().map(|(device, seconds, held, has)| json!({
                "device": device, "step_s": seconds, "target_bytes": held, "memory": has,
            })),
            "findings": self.findings,
            "parameters": self.rows,
        })
    }
}

fn cited(c: &Cited) -> String {
    // Of a fork there is a file alone.
    let at = if c.commit.is_empty() { String::new() } else { format!(" at {}", c.commit) };
    wrapped("      ", &format!("{} ({}{at}): {}", c.name, c.source, c.says))
}

/// Most characters of a line.
const WIDTH: usize = 96;

/// A text in lines, each behind `indent`; those after the first one a little further in.
fn wrapped(indent: &str, text: &str) -> String {
    let mut lines = vec![indent.to_string()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("a line");
        if last.len() + word.len() > WIDTH && !last.trim().is_empty() {
            lines.push(format!("{indent}   {word}"));
        } else {
            last.push_str(if last.trim().is_empty() { "" } else { " " });
            last.push_str(word);
        }
    }
    lines.join("\n")
}

/// A finding: what it is of, both rules, and what it does.
fn finding(i: usize, f: &Finding) -> String {
    let over = if f.axes.is_empty() { String::new() } else { format!(" over {}", f.axes) };
    let what = match f.kind {
        "sum-missing" => "is not summed",
        "sum-twice" => "is summed once too often",
        "norm-left-out" => "is left out of the norm in part",
        "norm-twice" => "is in the norm more than once",
        _ => "is scaled by another factor",
    };
    let shown = 3;
    let mut params = f.parameters.iter().take(shown).cloned().collect::<Vec<_>>().join(", ");
    if f.parameters.len() > shown {
        params += &format!(" and {} more rows", f.parameters.len() - shown);
    }
    let mut lines = vec![
        wrapped("", &format!("{i}. {params} {what}{over}")),
        wrapped("   ", &format!("by types: {}", f.derived)),
        wrapped("   ", &format!("it does:  {}", f.does)),
    ];
    lines.extend(f.rules.iter().map(cited));
    lines.push(wrapped("   ", &format!("effect:   {}", f.effect)));
    lines.join("\n")
}
