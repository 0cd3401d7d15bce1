//! What stands in a module between two passes alone: layouts of parameters, stages of scopes, parts of nodes.

use super::*;
use crate::func::{ParamLayout, Part};
use crate::steps;

/// Checks layouts, stages and parts: that they are of this phase, and what they say.
pub(super) fn between(m: &Module, phase: Phase, p: &mut Problems) {
    let mut say = |at: String, what: String, rule: &str| {
        let help = "take it out, or give the module the phase that has it";
        p.push(None, || Diag::new("phase", what).at(at).rule(rule).help(help));
    };
    if !m.params.is_empty() && !(Phase::Ranked..=Phase::Staged).contains(&phase) {
        let what = format!("layouts of parameters in a module of phase {phase}");
        say("layout".into(), what, "they stand beside programs of ranks, until the step is made");
    }
    for f in &m.funcs {
        let parts = f.nodes.iter().map(|n| n.part);
        if phase != Phase::Differentiated && parts.clone().any(|p| p != Part::Forward) {
            let what = format!("parts of backward in a module of phase {phase}");
            say(format!("@{}", f.name), what, "stages are cut out of a differentiated program");
        }
        let first = parts.clone().position(|p| p != Part::Forward).unwrap_or(f.nodes.len());
        if parts.skip(first).any(|p| p == Part::Forward) {
            let what = "an op of forward comes after one of backward".to_string();
            say(format!("@{}", f.name), what, "forward comes before backward");
        }
        if phase >= Phase::Staged && f.scopes.iter().any(|s| s.stage > 0) {
            let what = format!("stages of scopes in a module of phase {phase}");
            say(format!("@{}", f.name), what, "a function is of one stage, which its name says");
        }
    }
    // Who takes a parameter made ready, and as what.
    let mut takers: HashMap<&str, Vec<(&Func, &Type)>> = HashMap::default();
    for f in m.funcs.iter().filter(|_| !m.params.is_empty()) {
        for a in &f.args {
            let ready = a.role.as_ref().filter(|r| r.kind == RoleKind::Unsharded);
            ready
                .into_iter()
                .for_each(|r| takers.entry(&r.name).or_default().push((f, f.ty(a.value))));
        }
    }
    let mut seen = HashSet::default();
    for l in &m.params {
        let takers = takers.get(&*l.param.name).map_or(&[][..], |t| t);
        if let Err(what) = layout(m, l, seen.insert(&l.param), takers) {
            say(format!("layout {}", l.param), what, "each step is an op on what is there before");
        }
    }
}

fn layout(
    m: &Module,
    l: &ParamLayout,
    is_new: bool,
    takers: &[(&Func, &Type)],
) -> Result<(), String> {
    steps::add("layouts", 1 + takers.len());
    if !is_new {
        return Err("a second layout of this parameter".into());
    }
    if l.scope.is_empty() || !is_path(&l.scope) {
        return Err(format!("`{}` is not a path of a scope", l.scope));
    }
    let mut at = &l.stored;
    let mut used = at;
    for (i, s) in l.steps.iter().enumerate() {
        let made = s.op.check(&m.mesh, &[at], &[Some(&s.ty)]).map_err(|e| e.message)?;
        if made[..] != [s.ty.clone()] {
            let [made, said] = [&made[0], &s.ty].map(|t| type_text(&m.mesh, t));
            return Err(format!("`{}` makes it {made}, not {said}", s.op.mnemonic()));
        }
        at = &s.ty;
        if i < l.prepared {
            used = at;
        }
    }
    match takers.iter().find(|t| t.1 != used) {
        None => Ok(()),
        Some((f, ty)) => {
            let [ty, used] = [ty, used].map(|t| type_text(&m.mesh, t));
            Err(format!("@{} takes it as {ty}, and its steps make it {used}", f.name))
        }
    }
}
