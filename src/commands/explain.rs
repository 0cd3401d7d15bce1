//! `shardc explain`: why a value is split as it is, why a collective is there, what a tensor costs,
//! what a rule means.

use super::pages::PAGES;
use shardc_ir::diag::{Diag, Result};
use shardc_plans::stored::Stored;
use shardc_process::shell::word;
use shardc_process::terminal::json_line;
use shardc_report::explain::{Why, answer};
use std::path::Path;

/// What can be explained.
const WHAT: &str = "collective:N, tensor:NAME, %value, schedule, memory, transfers or price of a plan; or rule:CODE, \
                    which needs none";

/// The page of a rule, which needs no plan.
///
/// # Errors
/// `flag` if something else is asked, `unknown-rule`.
pub fn explain_rule(what: &str, json: bool) -> Result<String> {
    match what.trim().strip_prefix("rule:") {
        Some(code) => rule(code, json),
        None => {
            let way = match what.trim() {
                code if PAGES.iter().any(|p| p.0 == code) => format!("shardc explain rule:{code}"),
                plan if Path::new(plan).exists() => format!("for example: shardc explain {} collective:1", word(plan.as_ref())),
                _neither => "for example: shardc explain PLAN collective:1, with the folder that shardc compile -o wrote".into(),
            };
            Err(Diag::new("flag", "say what is to be explained").at(what).rule(WHAT).help(way))
        }
    }
}

/// Explains `%value` (the `%` may be left out, `@func %value` chooses a function),
/// `collective:N`, `tensor:NAME` (or the name alone), `rule:CODE`, `schedule`, `transfers`, `memory`, or `price`.
///
/// # Errors
/// `unknown-value`, `unknown-collective`, `unknown-tensor` or `unknown-rule`, with what there is.
pub fn explain(s: &Stored, what: &str, json: bool) -> Result<String> {
    let what = what.trim();
    if let Some(code) = what.strip_prefix("rule:") {
        return rule(code, json);
    }
    let answer = answer(&Why::of(s)?, what)?;
    Ok(if json { answer.json() } else { answer.text() })
}

/// The page of a diagnostic's code.
fn rule(code: &str, json: bool) -> Result<String> {
    let code = code.trim();
    let Some((_, page)) = PAGES.iter().find(|p| p.0 == code) else {
        let known: Vec<&str> = PAGES.iter().map(|p| p.0).collect();
        return Err(Diag::new("unknown-rule", format!("no rule is called `{code}`"))
            .at(format!("rule:{code}"))
            .help(format!("use one of the {}: {}", known.len(), known.join(", "))));
    };
    if json {
        let out = serde_json::json!({ "subject": format!("rule:{code}"), "page": page });
        return Ok(json_line("explain", out));
    }
    Ok((*page).into())
}
