//! `shardc prove`: shows that a plan computes what its model means, for all numbers.

use super::{By, show};
use serde_json::{Value as Json, json};
use shardc_ir::diag::Result;
use shardc_plans::plan_dir;
use shardc_process::terminal::{Volume, doing, json_line, note, talks};
use shardc_prove::field::Progress;
use shardc_prove::ledger::Refuted;
use shardc_prove::{Report, Verdict};
use shardc_report::proof;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a proof says nothing.
const SILENT: Duration = Duration::from_secs(1);

/// Proves a plan: exit status 0 proved, 1 refuted, 4 not understood. By both ways it is proved if it is
/// in both.
pub fn prove(dir: &Path, by: By, by_text: bool, as_json: bool) -> Result<i32> {
    doing("reading the plan");
    let texts = match by_text {
        true => proof::of_texts(dir)?,
        false => proof::of_stored(&plan_dir::read(dir)?)?,
    };
    let mut all: Vec<(&str, Report)> = vec![];
    if by != By::Field {
        doing("proving by terms");
        all.push(("symbolic", texts.prove()));
    }
    if by != By::Symbolic {
        doing("proving by evaluation");
        let mut last = Instant::now();
        let mut watch = |p: Progress| {
            if !as_json && last.elapsed() >= SILENT {
                note(format!("by evaluation: {} of {} {}", p.done, p.all, p.of));
                last = Instant::now();
            }
        };
        all.push(("field", texts.evaluate(&mut watch)));
    }
    let found = |v: Verdict| all.iter().any(|x| x.1.verdict() == v);
    let verdict = match (found(Verdict::Refuted), found(Verdict::NotUnderstood)) {
        (true, _) => Verdict::Refuted,
        (false, true) => Verdict::NotUnderstood,
        (false, false) => Verdict::Proved,
    };
    if as_json {
        let proofs: Vec<Json> = all.iter().map(|(by, r)| in_json(by, r)).collect();
        show(json_line("prove", json!({ "verdict": word(verdict), "proofs": proofs })));
    } else {
        let parts: Vec<String> = all.iter().map(|(by, r)| for_people(by, r)).collect();
        show(format!("{}\n{}", word(verdict), parts.concat()));
    }
    Ok(match verdict {
        Verdict::Proved => 0,
        Verdict::Refuted => 1,
        Verdict::NotUnderstood => 4,
    })
}

fn word(v: Verdict) -> &'static str {
    match v {
        Verdict::Proved => "proved",
        Verdict::Refuted => "refuted",
        Verdict::NotUnderstood => "not understood",
    }
}

/// Most differences that are shown to people.
const SHOWN: usize = 5;

fn for_people(by: &str, r: &Report) -> String {
    let kinds: Vec<String> = r.shown.iter().map(|(k, n)| format!("{k}: {n}")).collect();
    let kinds = if kinds.is_empty() { "nothing was shown".into() } else { kinds.join("; ") };
    let mut s = match by {
        "field" => format!("   by evaluation of all ranks at these sizes: {kinds}\n"),
        _terms => format!("   by terms: {kinds}; {} nodes, {} terms\n", r.nodes, r.terms),
    };
    if !r.unsure.is_empty() {
        s += "   some forms differ whose numbers are too many to be computed\n";
    }
    let all: Vec<&Refuted> = r.refuted.iter().chain(&r.unsure).collect();
    if let Some((first, others)) = all.split_first() {
        let [has, should] = proof::sides(first);
        let other = if r.refuted.is_empty() { "textbook " } else { "should be" };
        s += &format!("{}\n   in the plan  {has}\n   {other}    {should}\n", first.what);
        s.extend(proof::first(r).map(|first| format!("   {first}\n")));
        let names: Vec<&str> = others.iter().take(SHOWN).map(|x| &*x.what).collect();
        let more = others.len() - names.len();
        let more = if more > 0 { format!(", and {more} more") } else { String::new() };
        if !others.is_empty() {
            s += &format!("   also differ  {}{more}\n", names.join(", "));
        }
        let terms = all.iter().take(if talks().volume == Volume::Verbose { SHOWN } else { 0 });
        s.extend(terms.map(|x| {
            format!("{}\n   plan:     {}\n   textbook: {}\n", x.what, x.plan, x.textbook)
        }));
    }
    for g in r.gaps.iter().take(SHOWN) {
        s += &format!("not understood: `{}`: {}\n   at {}\n", g.op, g.lemma, g.place);
    }
    if r.gaps.len() > SHOWN {
        s += &format!("and {} more\n", r.gaps.len() - SHOWN);
    }
    s
}

fn in_json(by: &str, r: &Report) -> Json {
    let refuted = r.refuted.iter().map(|x| (x, true)).chain(r.unsure.iter().map(|x| (x, false)));
    let refuted = refuted.map(|(x, computed)| {
        json!({
            "what": x.what, "computed": computed, "plan": x.plan, "textbook": x.textbook,
            "plan_place": x.plan_place, "textbook_place": x.textbook_place,
        })
    });
    let gaps = r.gaps.iter().map(|g| json!({ "op": g.op, "place": g.place, "lemma": g.lemma }));
    json!({
        "by": by,
        "verdict": word(r.verdict()),
        "shown": r.shown,
        "lemmas": r.lemmas,
        "nodes": r.nodes,
        "terms": r.terms,
        "refuted": refuted.collect::<Vec<_>>(),
        "first": r.first,
        "not_understood": gaps.collect::<Vec<_>>(),
    })
}
