//! Types, places and ops in words.

use shardc_ir::func::{Func, Node, RoleKind, Value};
use shardc_ir::mesh::{AtomSet, Mesh, PIPELINE};
use shardc_ir::plan::{MemoryClass, Plan};
use shardc_ir::text;
use shardc_ir::types::{Reduction, State, Type};

/// Longest text of an op in an answer, in characters.
const MAX_TEXT: usize = 140;

/// An op as the program shows it, cut if it is very long.
pub fn node(mesh: &Mesh, f: &Func, n: &Node) -> String {
    let all = text::node_text(mesh, f, n).text;
    match all.chars().count() > MAX_TEXT {
        true => all.chars().take(MAX_TEXT).collect::<String>() + " …",
        false => all,
    }
}

/// Neighbouring atoms of one axis in one state: `(atoms, state)` in mesh order.
pub fn states(mesh: &Mesh, t: &Type) -> Vec<(AtomSet, State)> {
    let mut out: Vec<(AtomSet, State)> = vec![];
    let mut axis = None;
    for a in mesh.all().iter() {
        let here = mesh.atoms[a].axis;
        match out.last_mut() {
            Some((set, s)) if axis == Some(here) && *s == t.state(a) => *set = set.with(a),
            _ => out.push((AtomSet::one(a), t.state(a))),
        }
        axis = Some(here);
    }
    out
}

/// The letter of a dim in the rule of the op that makes the value, and the dim's number.
pub fn dim_name(f: &Func, maker: Option<&Node>, v: Value, dim: usize) -> String {
    let letter = maker.filter(|n| n.op.collective().is_none()).and_then(|n| {
        let ranks: Vec<usize> = n.ins.iter().map(|&x| f.ty(x).rank()).collect();
        let out = n.outs.iter().position(|&o| o == v)?;
        let rule = n.op.def().rule(&ranks);
        let letters = rule.outs.get(out)?.get(dim)?.letters().iter();
        Some(letters.map(|l| l.name()).collect::<String>())
    });
    // Letters of element-wise rules are upper case: they say nothing.
    match letter.filter(|l| l.chars().all(|c| c.is_ascii_lowercase())) {
        Some(l) => format!("dim {dim} (`{l}`)"),
        None => format!("dim {dim}"),
    }
}

/// One line per axis (or part of one): what the ranks along it hold.
pub fn type_lines(mesh: &Mesh, f: &Func, maker: Option<&Node>, v: Value) -> Vec<String> {
    let t = f.ty(v);
    let line = |(atoms, state): (AtomSet, State)| {
        let (axis, ways) = (mesh.names(atoms, "*"), mesh.ways(atoms));
        let what = match state {
            State::Invariant => {
                "invariant: the same on all ranks, used in the same way (I)".to_string()
            }
            State::Replicated => {
                "replicated: the same on all ranks, which use it differently (R)".into()
            }
            State::Varying => "varying: each rank has its own (V)".into(),
            State::Partial(Reduction::Sum) => "partial: a term of a pending sum (P)".into(),
            State::Partial(Reduction::Max) => {
                "partial: a candidate for a pending maximum (P)".into()
            }
            State::Partial(Reduction::Min) => {
                "partial: a candidate for a pending minimum (P)".into()
            }
            State::Sharded(d) => format!(
                "{} of {} is split, {} on a rank (S)",
                dim_name(f, maker, v, d),
                t.dims[d].size,
                t.chunk(mesh, d)
            ),
        };
        format!("over {axis} ({ways}): {what}")
    };
    let pipeline = mesh.axis(PIPELINE).unwrap_or_default();
    let own = |s: &(AtomSet, State)| s.0.meets(pipeline) && s.1 == State::Invariant;
    let (stage, rest): (Vec<_>, Vec<_>) = states(mesh, t).into_iter().partition(own);
    let mut all: Vec<String> = rest.into_iter().map(line).collect();
    if !stage.is_empty() {
        all.insert(0, place_in_pipeline(f));
    }
    if all.is_empty() { vec!["one rank: it has everything".into()] } else { all }
}

/// Which ranks of the pipeline have the values of a function.
fn place_in_pipeline(f: &Func) -> String {
    match (f.kind.is_looped(), f.stage) {
        (true, stage) => format!("over {PIPELINE}: only the ranks of stage {stage} have it"),
        (false, rank) => format!("over {PIPELINE}: only the ranks with {PIPELINE}={rank} have it"),
    }
}

/// Where a value lies in a rank's arena, and with what it shares that place.
pub fn memory(plan: &Plan, fi: usize, maker: Option<&Node>, v: Value) -> Vec<String> {
    let f = &plan.module.funcs[fi];
    let Some(own) = plan.classes.iter().find(|c| c.funcs.contains(&fi)) else {
        return vec![];
    };
    let memory = &own.memory;
    let Some(p) = memory.places[fi].find(v) else { return vec![] };
    let mut ports = f.args.iter().chain(&f.results).filter(|a| a.value == v);
    let role = ports.find_map(|a| a.role.as_ref());
    let class = match (role, maker) {
        (Some(r), _) => MemoryClass::of(r.kind),
        (None, Some(n)) if n.op.collective().is_some() => MemoryClass::CollectiveBuffer,
        (None, _) => MemoryClass::Temporary,
    };
    let name = class.name();
    let mut at: Vec<usize> = own
        .calls()
        .filter(|c| c.func == fi)
        .map(|c| c.frames[p.frame as usize] + p.offset)
        .collect();
    at.sort_unstable();
    at.dedup();
    if p.bytes == 0 && f.ty(v).local_bytes(&plan.module.mesh) > 0 {
        return vec!["never stored: only the kernel that computes it reads it".into()];
    }
    let first = at.first().copied().unwrap_or(p.offset);
    let mut out = vec![format!("{} B at byte {first} of a rank's arena, {name}", p.bytes)];
    if at.len() > 1 {
        let n = plan.settings.microbatches;
        out.push(format!("at {} places, for the {n} microbatches in turn", at.len()));
    }
    if let Some(n) = maker {
        let there = |x: &&Value| {
            let other = memory.places[fi][*x];
            (other.frame, other.offset) == (p.frame, p.offset)
                && f.ty(**x).local_bytes(&plan.module.mesh) > 0
        };
        if let Some(x) = n.ins.iter().find(there) {
            let how = if n.op.def().is_view() { "a view of" } else { "written over" };
            out.push(format!("{how} {}, which has the same place", f.name(*x)));
        }
    }
    out
}

/// What an argument or result is for, in words.
pub fn role(kind: RoleKind, name: &str) -> String {
    match kind {
        RoleKind::Param => format!("the stored parameter {name}"),
        RoleKind::Unsharded => format!("parameter {name}, ready for forward and backward"),
        RoleKind::Grad => format!("the gradient of {name}, of all microbatches"),
        RoleKind::GradSum => format!("the gradient of {name}, of all microbatches and ranks"),
        RoleKind::GradFrom(rank) => {
            format!("the gradient of {name} from the ranks with {PIPELINE}={rank}")
        }
        RoleKind::State(state) => format!("optimizer state {state} of {name}"),
        RoleKind::Input(_) => format!("input {name}"),
        RoleKind::Stash => format!("%{name} as forward saved it for backward"),
        RoleKind::Edge => format!("{name}, sent from one pipeline stage to another"),
        RoleKind::Scalar => format!("the run-time scalar {name}"),
        RoleKind::Sum => format!("{name}, summed over microbatches"),
        RoleKind::TokensPerExpert => format!("how often the router of {name} chose each expert"),
        RoleKind::Scale => format!("what a term of {name} counts in the loss"),
        RoleKind::Step => format!("{name}, computed once per step"),
        RoleKind::Output | RoleKind::Metric => format!("output {name}"),
        RoleKind::Mean => format!("output {name}, the mean of a step"),
        RoleKind::GradShown => format!("output, the gradient of {name}"),
    }
}
