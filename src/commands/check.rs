//! `shardc check`: every violated rule at once; reads no weights.

use super::{gather, show};
use serde_json::json;
use shardc_compiler::search::advice::{advise, gained};
use shardc_compiler::search::ways;
use shardc_ir::diag::{Result, count};
use shardc_passes::pipeline::Manager;
use shardc_plans::flags::Flags;
use shardc_plans::rules::{self, Violation};
use shardc_process::terminal::{json_line, note};
use shardc_report::explain::time;
use shardc_report::report::bubble_line;
use std::path::Path;

/// Prints the violations; exit status 1 if there are any.
pub fn check(model: &Path, flags: Flags, as_json: bool) -> Result<i32> {
    let (model, flags) = gather(model, flags)?;
    let asked = flags.options_for(&model)?;
    let facts = shardc_plans::input::facts(&model)?;
    facts.map_or(Ok(()), |_| shardc_plans::axes::misnamed(&asked))?;
    let (mut family, mut bubble, mut bubble_words) = (String::new(), None, None);
    let mut price = None;
    let mut found = facts.map(|f| rules::violations(&f, &asked)).unwrap_or_default();
    if let Some(f) = &facts {
        found = ways::checked(&model, f, &asked, found);
    }
    if found.is_empty() {
        // No rule is violated; whatever the passes still refuse, or warn of, is found by compiling.
        match shardc_compiler::compile_with(&model, &asked, Manager::default()) {
            Ok(done) => {
                super::warn(&done.warnings);
                super::warn(&flags.without_effect(
                    &asked,
                    &done.propagated.sharded.funcs[0],
                    done.stored.facts.as_ref(),
                ));
                bubble = Some(done.report.bubble);
                bubble_words = bubble_line(&done.stored.plan);
                done.notes.iter().chain(&flags.unasked(&asked)).for_each(note);
                gained(&done, &model, &asked, &flags).iter().for_each(note);
                price = done.propagated.price;
                family = done.stored.family;
            }
            Err(d) if as_json => {
                let d = advise(d, &model, &asked, &flags);
                let rule = d.rule.unwrap_or(d.message);
                let values = vec![];
                found.push(Violation {
                    code: d.code,
                    rule,
                    values,
                    nearest: d.help,
                    ..Violation::default()
                });
            }
            Err(d) => return Err(advise(d, &model, &asked, &flags)),
        }
    }
    let meshes = match &facts {
        Some(f) if !found.is_empty() => ways::meshes(&model, f, &asked, &found),
        _ => vec![],
    };
    if as_json {
        let ok = found.is_empty();
        let mut out = json!({ "ok": ok, "violations": found });
        if let Some(bubble) = bubble.filter(|_| bubble_words.is_some()) {
            out["bubble"] = json!(bubble);
        }
        if let Some(p) = &price {
            out["price"] = json!({ "ps": p.time, "bound_ps": p.bound, "bytes": p.memory });
        }
        if !ok {
            out["meshes"] = json!(meshes);
        }
        show(json_line("check", out));
    } else {
        for v in &found {
            show(format!("{}\n", v.diag()));
        }
        if !meshes.is_empty() {
            let all: Vec<String> = meshes.iter().map(|m| format!("--mesh {m}")).collect();
            show(format!("legal meshes of as many ranks, nearest first: {}\n", all.join(" · ")));
        }
        if found.is_empty() {
            let takes = price.map(|p| format!("a microbatch takes {}", time(p.time)));
            let more = takes.into_iter().chain(bubble_words).map(|l| format!("; {l}"));
            show(format!(
                "ok: {family} on {}{}\n",
                count(asked.mesh.iter().map(|a| a.1).product(), "rank", "ranks"),
                more.collect::<String>()
            ));
        }
    }
    Ok(i32::from(!found.is_empty()))
}
