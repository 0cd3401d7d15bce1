//! An audit as a page for a browser, which fetches nothing.

use super::Audit;
use super::compare::Finding;
use crate::pictures::svg::escape;
use shardc_ir::diag::Result;
use shardc_ir::files::{self, FileFormat};
use std::fmt::Write;
use std::path::Path;

const BEGIN: &str = "<!doctype html>\n<html lang=\"en\" data-by=\"shardc audit\">\n";

/// What is written.
const PAGE: FileFormat =
    FileFormat { name: "a page of audit", is: |begin| begin.starts_with(BEGIN.as_bytes()) };

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}
table{border-collapse:collapse;font-size:13px}th,td{text-align:left;padding:.2rem .6rem;border-bottom:1px solid #8884}
td.n{text-align:right;font-variant-numeric:tabular-nums}.bad{border-left:4px solid #c33;padding:.2rem 1rem;margin:1rem 0}
code{font-size:13px}@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}}";

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

fn page(a: &Audit) -> String {
    let mut out = format!(
        "{BEGIN}<head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">
<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">
<title>shardc audit</title><style>{STYLE}</style></head><body><h1>Audit</h1>"
    );
    let mut part = |text: &str| out += text;
    if !a.job.not_modelled.is_empty() {
        part("<h2>Not modelled</h2><ul>");
        a.job.not_modelled.iter().for_each(|n| part(&format!("<li>{}</li>", escape(n))));
        part("</ul>");
    }
    part(&format!("<pre>{}</pre>", escape(&a.head())));
    part(&format!("<h2>Findings: {}</h2>", a.findings.len()));
    a.findings.iter().for_each(|f| part(&finding(f)));
    part(
        "<h2>Parameters</h2><table><tr><th>parameter<th>of<th>a rank holds<th>split over<th>gradient summed over",
    );
    part(
        "<th>by rules<th>ranks that count a part in the norm<th>bytes of state<th>bytes sent</tr>",
    );
    for r in &a.rows {
        let sizes: Vec<String> = r.local.iter().map(usize::to_string).collect();
        part(&format!(
            "<tr><td><code>{}</code><td class=n>{}<td>{}<td>{}<td>{}<td>{}<td class=n>{}<td class=n>{}<td class=n>{}</tr>",
            escape(&r.name),
            r.parameters,
            sizes.join(" x "),
            r.split,
            r.sums,
            r.rule_sums,
            r.norm_ranks,
            r.state_bytes,
            r.sent_bytes
        ));
    }
    out + "</table></body></html>\n"
}

fn finding(f: &Finding) -> String {
    let mut out = format!(
        "<div class=bad><b>{}{}</b><br>{}<br>by types: {}<br>it does: {}<br>effect: {}<ul>",
        f.kind,
        if f.axes.is_empty() { String::new() } else { format!(" over {}", f.axes) },
        escape(&f.parameters.join(", ")),
        escape(&f.derived),
        escape(&f.does),
        escape(&f.effect)
    );
    for c in &f.rules {
        let _ = write!(
            out,
            "<li><code>{}</code> at {}: {}</li>",
            escape(&c.source),
            escape(&c.commit),
            escape(&c.says)
        );
    }
    out + "</ul></div>"
}
