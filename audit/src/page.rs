//! An audit as a page for a browser, which fetches nothing.

use super::Audit;
use super::compare::{Finding, Row};
use shardc_ir::diag::{Result, bytes};
use shardc_ir::files::{self, FileFormat};
use shardc_report::pictures::svg::escape;
use std::fmt::Write;
use std::path::Path;

const BEGIN: &str = "<!doctype html>\n<html lang=\"en\" data-by=\"shardc audit\">\n";

/// What is written.
const PAGE: FileFormat =
    FileFormat { name: "a page of audit", is: |begin| begin.starts_with(BEGIN.as_bytes()) };

const STYLE: &str = "\
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:80rem;padding:0 1rem}
table{border-collapse:collapse;font-size:13px}th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid #8884}
thead th{position:sticky;top:0;background:Canvas}.n{text-align:right;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}@media(min-width:80rem){.wide{overflow:visible}}.bad{border-left:4px solid #c33;padding:.2rem 1rem;margin:1rem 0}
tr.found td:first-child{border-left:4px solid #c33}dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;margin:0}
dt{opacity:.7}dd{margin:0}code{font-size:13px;overflow-wrap:anywhere}td,td code{white-space:nowrap}.small{font-size:13px;opacity:.8}";

/// Columns of the table, with whether they are numbers.
const COLUMNS: [(&str, bool); 9] = [
    ("parameter", false),
    ("of", true),
    ("a rank holds", false),
    ("split over", false),
    ("gradient summed over", false),
    ("by rules", false),
    ("ranks that count a part in the norm", true),
    ("state of one", true),
    ("sent of one in a step", true),
];

/// Writes the page.
///
/// # Errors
/// `output` if the file is there and is no such page, `io` if it cannot be written.
pub fn write(a: &Audit, to: &Path) -> Result<()> {
    PAGE.check(to)?;
    let text = page(a);
    files::replace(to, &PAGE, |out| {
        let fail = |e| files::io_error("cannot write the page", to, &e);
        out.write_all(text.as_bytes()).map_err(fail)
    })
}

/// Words and what they mean, as a list.
fn list(all: &[(&str, String)]) -> String {
    let one = |(word, text): &(&str, String)| format!("<dt>{word}<dd>{}", escape(text));
    format!("<dl>{}</dl>", all.iter().map(one).collect::<String>())
}

fn page(a: &Audit) -> String {
    let software = escape(a.job.software);
    let mut out = format!(
        "{BEGIN}<head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">
<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">
<title>Audit of {software}</title><style>{STYLE}</style></head><body><h1>Audit of {software}: {}</h1>",
        escape(&a.verdict())
    );
    let mut part = |text: &str| out += text;
    if !a.job.not_modelled.is_empty() {
        part(&format!(
            "<details><summary>Not modelled: {}</summary><ul>",
            a.job.not_modelled.len()
        ));
        a.job.not_modelled.iter().for_each(|n| part(&format!("<li>{}", escape(n))));
        part("</ul></details>");
    }
    part(&list(&a.head()));
    a.findings.iter().for_each(|f| part(&finding(f)));
    part("<h2>Parameters</h2><div class=wide><table><thead><tr>");
    for (name, number) in COLUMNS {
        part(&format!("<th{}>{name}", if number { " class=n" } else { "" }));
    }
    part("<tbody>");
    for r in &a.rows {
        let found = a.findings.iter().any(|f| f.parameters.contains(&r.name));
        part(&row(r, found));
    }
    part(
        "</table></div><p class=small>Rows are folded over equal layers. A rule's line is that of its commit.",
    );
    out + "</body></html>\n"
}

fn row(r: &Row, found: bool) -> String {
    let sizes: Vec<String> = r.local.iter().map(usize::to_string).collect();
    let numbers = [r.norm_ranks.to_string(), bytes(r.state_bytes), bytes(r.sent_bytes)];
    let [norm, state, sent] = match r.trained {
        true => numbers,
        false => ["not trained", "", ""].map(String::from),
    };
    format!(
        "<tr{}><td><code>{}</code><td class=n>{}<td>{}<td>{}<td>{}<td>{}<td class=n>{norm}<td class=n>{state}<td class=n>{sent}",
        if found { " class=found" } else { "" },
        escape(&r.name),
        r.parameters,
        sizes.join(" × "),
        escape(&r.split),
        escape(&r.sums),
        escape(&r.rule_sums),
    )
}

fn finding(f: &Finding) -> String {
    let over = if f.axes.is_empty() { String::new() } else { format!(" over {}", f.axes) };
    let mut out = format!(
        "<div class=bad><b>{}</b><br><code>{}</code>{}<ul class=small>",
        escape(&format!("{}{over}", f.kind)),
        escape(&f.parameters.join(", ")),
        list(&[
            ("by types", f.derived.clone()),
            ("it does", f.does.clone()),
            ("effect", f.effect.clone())
        ])
    );
    for c in &f.rules {
        let at = if c.commit.is_empty() { String::new() } else { format!(" at {}", c.commit) };
        let (source, says) = (escape(&c.source), escape(&c.says));
        let _ =
            write!(out, "<li>{}: <code>{source}</code>{}: {says}", escape(&c.name), escape(&at));
    }
    out + "</ul></div>"
}
