//! `explain transfers`: what the stages of a pipeline send each other, and who makes and uses it.

use super::trace::Why;
use super::{Answer, facts, words};
use serde_json::json;
use shardc_ir::diag::{Diag, Result, bytes, count};
use shardc_ir::plan::{Instr, Transfer};
use shardc_ir::text::type_text;
use std::collections::BTreeMap;

/// Explains all sends, each with its receive.
///
/// # Errors
/// `unknown-value` if the plan has one stage.
pub fn explain(why: &Why) -> Result<Answer> {
    // By ranks of the pipeline, function and value: how often in a step, and the bytes of one.
    let mut all: BTreeMap<(usize, usize, usize, u32), (usize, Transfer)> = BTreeMap::new();
    for (from, c) in why.plan.classes.iter().enumerate() {
        for i in &c.step {
            let Instr::Send(t) = i else { continue };
            all.entry((from, t.with, t.func, t.value.0)).or_insert((0, *t)).0 += 1;
        }
    }
    if all.is_empty() {
        return Err(Diag::new("unknown-value", "nothing is sent from stage to stage")
            .at("transfers")
            .help("one rank of a pipeline has all stages: compile with --mesh pp=2 to see some"));
    }
    let sent: usize = all.values().map(|(n, t)| n * t.bytes).sum();
    let mut a = Answer::new(format!(
        "{} values are sent from stage to stage, {} per step by all ranks of one pipeline",
        all.len(),
        bytes(sent)
    ));
    let (mut sends, mut made, mut data) = (vec![], vec![], vec![]);
    for ((from, to, func, _), (n, t)) in &all {
        let f = why.func(*func);
        let name = f.name(t.value);
        sends.push(format!(
            "{name} of @{}: {} from pipeline rank {from} to {to}, {} each, {} per step",
            f.name,
            type_text(why.mesh, f.ty(t.value)),
            bytes(t.bytes),
            count(*n, "time", "times")
        ));
        data.push(json!({
            "value": name.to_string(), "function": f.name, "from": from, "to": to,
            "bytes": t.bytes, "times": n, "type": type_text(why.mesh, f.ty(t.value)),
        }));
        let by = why.maker(*func, t.value).map(|n| words::node(why.mesh, f, n));
        made.extend(by.map(|by| format!("in @{}: {by}", f.name)));
    }
    a.facts = facts::map(json!({ "sent_bytes": sent, "transfers": data }));
    a.part("sends", sends);
    a.part("made by", made);
    a.part("why", vec!["the next stage begins with what this one ends with".into()]);
    a.part(
        "remove",
        vec!["a smaller pp, or --sp, which cuts what is sent by tp along the sequence".into()],
    );
    Ok(a)
}
