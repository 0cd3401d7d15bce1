//! Rows of experts' buffers that no copy fills are undefined: nothing may depend on them.

use super::region::rule_of;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Node, Role, RoleKind, Value, ValueMap};
use shardc_ir::ops::{Gradient, Kind, Mixing};
use shardc_ir::rule::Letter;
use std::collections::BTreeSet;

/// Refuses what reads such rows in the function, or would in its gradient.
///
/// # Errors
/// `not-built`.
pub fn check_rows(f: &Func, trains: bool, frozen: &BTreeSet<String>) -> Result<()> {
    // By value: its dims, as bits, of rows that may be undefined.
    let mut undefined = f.per_value(0u32);
    let mut trained = f.per_value(false);
    for a in &f.args {
        let is_trained = |r: &Role| r.kind == RoleKind::Param && !frozen.contains(&*r.name);
        trained[a.value] = trains && a.role.as_ref().is_some_and(is_trained);
    }
    for n in &f.nodes {
        let facts = n.op.facts();
        let own = facts.gradient == Gradient::Flows && n.ins.iter().any(|v| trained[v]);
        n.outs.iter().for_each(|v| trained[v] = own);
        let made = n.op.mixing() == Some(Mixing::Dispatch)
            || facts.kind == Kind::GroupedProduct && f.ty(n.outs[0]).rank() == 4;
        if made {
            undefined[n.outs[0]] = 1 << ROWS;
        }
        let of_rows = |v: &&Value| undefined[*v] != 0;
        if !matches!(facts.kind, Kind::Copies | Kind::GroupedProduct) {
            if n.ins.iter().any(|v| of_rows(&v)) {
                follow(f, n, &mut undefined, &trained)?;
            }
            continue;
        }
        // Which rows there are these ops know of their buffers alone, not of weights, tokens or gates.
        let is_buffer = |v: &Value| undefined[v] == 1 << ROWS && f.ty(*v).rank() == 4;
        if let Some(v) = n.ins.iter().filter(of_rows).find(|v| !is_buffer(v)) {
            let what = format!("{} is made of rows of a buffer", f.name(*v));
            return Err(refused(f, what, Some(n)));
        }
    }
    let shown = f.results.iter().find(|r| undefined[r.value] != 0);
    shown.map_or(Ok(()), |r| Err(refused(f, format!("{} is a result", f.name(r.value)), None)))
}

/// The dim of rows of a buffer `[g, z, c, h]`.
const ROWS: usize = 2;

/// An op that does to all rows of a buffer what it does to one: its results have rows as its operands do.
fn follow(
    f: &Func,
    n: &Node,
    undefined: &mut ValueMap<u32>,
    trained: &ValueMap<bool>,
) -> Result<()> {
    let rule = rule_of(f, n);
    let flows = n.op.facts().gradient == Gradient::Flows;
    let mut rows: Vec<Letter> = vec![];
    for (v, dims) in n.ins.iter().zip(&rule.ins) {
        let own = |d: &usize| undefined[v] >> d & 1 == 1;
        rows.extend((0..dims.len()).filter(own).flat_map(|d| dims[d].letters()));
    }
    for l in rows {
        let made = || n.outs.first().map_or(String::new(), |&v| f.name(v).to_string());
        if rule.is_whole(l) || !rule.outs.iter().flatten().any(|g| g.letters().contains(&l)) {
            return Err(refused(
                f,
                format!("{} is made of several rows of a buffer", made()),
                Some(n),
            ));
        }
        for (v, dims) in n.ins.iter().zip(&rule.ins) {
            let summed = !dims.iter().any(|g| g.letters().contains(&l));
            if flows && summed && trained[v] {
                let what =
                    format!("the gradient of {} is a sum over all rows of a buffer", f.name(*v));
                return Err(refused(f, what, Some(n)));
            }
        }
        for (v, dims) in n.outs.iter().zip(&rule.outs) {
            let own = (0..dims.len()).filter(|&d| dims[d].letters().contains(&l));
            own.for_each(|d| undefined[v] |= 1 << d);
        }
    }
    Ok(())
}

fn refused(f: &Func, what: String, n: Option<&Node>) -> Diag {
    let made = n
        .and_then(|n| n.outs.first())
        .map_or(String::new(), |&v: &Value| format!(": {}", f.name(v)));
    let by = n.map_or(String::new(), |n| format!("`{}`: ", n.op.mnemonic()));
    Diag::new("not-built", format!("{by}{what} of experts, with those that no token fills"))
        .at(format!("@{}{made}", f.name))
        .rule("rows of a buffer that no copy of a token fills are undefined; only grouped_dot, grouped_dot_t, grouped_outer, combine_gates_grad and unpermute know which they are")
        .help("give experts weights of their own with grouped_dot, or do this to tokens, before dispatch or behind unpermute")
}
