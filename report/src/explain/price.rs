//! `explain price`: what layouts cost that were chosen by price; and what another layout of a value would.

use super::trace::Why;
use super::{Answer, facts};
use serde_json::json;
use shardc_ir::diag::bytes;
use shardc_ir::func::Value;
use shardc_ir::text::type_text;
use shardc_passes::shard::auto::Compared;

/// Picoseconds as people read them.
pub fn time(ps: u64) -> String {
    let ps = ps as f64;
    match ps {
        _ if ps >= 1e9 => format!("{:.3} ms", ps * 1e-9),
        _ if ps >= 1e6 => format!("{:.3} us", ps * 1e-6),
        _ => format!("{:.3} ns", ps * 1e-3),
    }
}

/// What all layouts cost together, and how near that is to the least.
pub fn explain(why: &Why) -> Answer {
    let mut a = Answer::new("the price of the layouts");
    let Some((p, _)) = &why.priced else {
        let what = "layouts are those that the recipe, flags or the text ask for: none was chosen by price";
        let more = [
            "shardc compile --shard auto chooses them by price",
            "shardc price PLAN --machine NAME prices a step",
        ];
        a.part("price", std::iter::once(what).chain(more).map(String::from).collect());
        return a;
    };
    a.facts = facts::map(json!({
        "picoseconds": p.time, "bound_picoseconds": p.bound, "memory_bytes": p.memory,
        "budget_bytes": why.s.options.budget, "fits": p.fits,
    }));
    let less = match p.bound {
        None => "chosen two axes at a time; no lower bound is known".to_string(),
        Some(bound) if bound >= p.time => "no layouts take less".to_string(),
        Some(bound) => {
            let by = (1.0 - bound as f64 / p.time as f64) * 100.0;
            format!("no layouts take less than {} ({by:.1} % less)", time(bound))
        }
    };
    let held = bytes(p.memory as usize);
    let mut memory =
        format!("a rank holds {held}: parameters, gradients, state, what backward reads");
    if let Some(budget) = why.s.options.budget {
        let word = if p.fits { "of" } else { "more than the" };
        memory += &format!("; {word} {} that --memory leaves for them", bytes(budget));
    }
    let takes = format!("a microbatch takes {}, with its share of the step", time(p.time));
    a.part("price", vec![takes, less, memory]);
    a
}

/// What was chosen for a value of a function, the next best, and both prices; a parameter's storage, too.
pub fn of_value(why: &Why, fi: usize, v: Value) -> Vec<String> {
    let choices = why.priced.as_ref().and_then(|p| p.1.as_ref());
    let Some((choices, m)) = choices.zip(why.chosen_for(fi, v)) else {
        return vec![];
    };
    let mut out = vec![];
    if let Some(c) = choices.layout(m) {
        out.extend(lines(&c, |t| type_text(why.mesh, t)));
    }
    if let Some(c) = choices.storage(m) {
        out.extend(lines(&c, |s| format!("stored {s}")));
    }
    out
}

fn lines<T>(c: &Compared<T>, text: impl Fn(&T) -> String) -> Vec<String> {
    let (own, best) = (text(&c.chosen.0), c.chosen.1);
    let other = match &c.other {
        None => "no other is possible".into(),
        Some((t, ps)) => {
            let by = (*ps as f64 / best.max(1) as f64 - 1.0) * 100.0;
            let word = if by < 0.0 { "less" } else { "more" };
            let by = by.abs();
            format!("the next best, {}: {}, {by:.2} % {word}", text(t), time(*ps))
        }
    };
    vec![format!("{own}: with it a microbatch takes {}", time(best)), other]
}
