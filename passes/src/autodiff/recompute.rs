//! Which values backward computes again instead of taking them from forward.
//!
//! Views and gathers are always made again: they cost nothing, or what they cost is stated as
//! "re-gathers" (Korthikanti et al., 2022, §4.2.2). Beyond them a policy chooses among the nodes of
//! decoder layers. What another layer uses is always saved, so recomputation never reaches back
//! beyond the layer it serves. Same inputs, same ops, same order: the same bits.

use serde::{Deserialize, Serialize};
use shardc_ir::func::{Func, RoleKind};
use shardc_ir::ops::{NAMES, Op};

/// What is recomputed.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Views and gathers only.
    #[default]
    None,
    /// Also what is cheap: activations, norms and rotations, but no product with a weight, no
    /// attention and no collective.
    Selective,
    /// Everything inside a layer: only what enters it is saved (Chen et al., 2016).
    Full,
    /// Also ops of these names.
    Ops(Vec<String>),
}

impl Recompute {
    /// Reads `none`, `selective`, `full` or op names joined by commas; the error names the first
    /// that is none of these.
    pub fn parse(text: &str) -> Result<Recompute, String> {
        match text {
            "none" => Ok(Recompute::None),
            "selective" => Ok(Recompute::Selective),
            "full" => Ok(Recompute::Full),
            names => {
                let names: Vec<String> = names.split(',').map(|n| n.trim().to_string()).collect();
                match names.iter().find(|n| !NAMES.contains(&n.as_str())) {
                    Some(n) => Err(n.clone()),
                    None => Ok(Recompute::Ops(names)),
                }
            }
        }
    }
}

/// Per node of the forward part, whether backward makes its results again.
pub(super) fn recomputed(j: &Func, forward: usize, policy: &Recompute) -> Vec<bool> {
    let layer = |n: usize| j.scope_info(j.nodes[n].scope).layer;
    let makers = j.makers();
    let mut leaves = vec![false; forward];
    for n in 0..forward {
        for v in &j.nodes[n].ins {
            if let Some(m) =
                makers[v.0 as usize].map(|m| m as usize).filter(|&m| layer(m) != layer(n))
            {
                leaves[m] = true;
            }
        }
    }
    for r in &j.results {
        if let Some(m) = makers[r.value.0 as usize].filter(|&m| (m as usize) < forward) {
            leaves[m as usize] = true;
        }
    }
    let mut weight = vec![false; j.values.len()];
    for a in &j.args {
        weight[a.value.0 as usize] = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Ready);
    }
    let chosen = |n: usize| {
        let op = &j.nodes[n].op;
        if op.def().is_view() || matches!(op, Op::AllGather(_)) {
            return true;
        }
        if leaves[n] || layer(n).is_none() {
            return false;
        }
        match policy {
            Recompute::None => false,
            Recompute::Full => true,
            Recompute::Selective => cheap(op, |k| weight[j.nodes[n].ins[k].0 as usize]),
            Recompute::Ops(names) => names.iter().any(|name| name == op.mnemonic()),
        }
    };
    (0..forward).map(chosen).collect()
}

/// True for ops that cost little beside the products of a layer.
fn cheap(op: &Op, is_weight: impl Fn(usize) -> bool) -> bool {
    match op {
        // A residual sum saves nothing: its operands would be saved in its place.
        Op::Add(a) => a.rule.0.is_some(),
        Op::Dot(_) => !is_weight(0) && !is_weight(1),
        Op::Attention(_) | Op::AttentionGrad(_) | Op::Take(_) | Op::Put(_) => false,
        _ => op.collective().is_none(),
    }
}
