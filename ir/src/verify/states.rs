//! What a module says of states: that each is declared once for an element type, is what its declaration says wherever
//! it is read, and has one writer.

use super::*;
use crate::func::{FuncKind, RoleName, StateDecl, StateInit, StateOwner};

/// Checks all states of a module.
pub(super) fn states(m: &Module, phase: Phase, p: &mut Problems) {
    declared_once(m, p);
    let params = params(m);
    let mut types: HashMap<&Role, (&str, &Type)> = HashMap::default();
    let mut writers: HashMap<&Role, &str> = HashMap::default();
    for f in &m.funcs {
        let ports = f.args.iter().map(|a| (a, false)).chain(f.results.iter().map(|r| (r, true)));
        for (port, written) in ports {
            let Some(role) = &port.role else { continue };
            let RoleKind::State(state) = role.kind else { continue };
            let (name, ty) = (f.name(port.value), f.ty(port.value));
            let mut say = |what: String, rule: &str, help: String| {
                p.push(name.layer, || {
                    Diag::new("role", what)
                        .at(format!("@{}", f.name))
                        .of(Spot::Value { func: f.name.clone(), value: name.to_string() })
                        .rule(rule)
                        .help(help)
                });
            };
            let Some(own) = m.state(state) else {
                say(
                    format!("`{name}` is {role}, which is not declared"),
                    "a state is declared once, above the functions",
                    format!("add a line such as `state {state}: f32 of param = 0`"),
                );
                continue;
            };
            let of_run = own.owner == StateOwner::Run;
            if of_run != role.name.is_empty() {
                say(
                    format!("`{name}` is {role}, and {state} is a state {}", own.owner),
                    "a state of parameters names its parameter, one of the run nothing",
                    format!("write `state[{state}] \"{}\"`", if of_run { "" } else { "w" }),
                );
            }
            if !of_run && !role.name.is_empty() && !params.contains(&role.name) {
                say(
                    format!("`{name}` is {role}, and no parameter is called so"),
                    "a state of parameters is that of one of this model",
                    "name a parameter that a function takes as an argument".into(),
                );
            }
            let declared = |s: &StateDecl| s.name == state && s.dtype == ty.dtype;
            if !m.states.iter().any(declared) {
                say(
                    format!(
                        "`{name}` is {}, and {role} is declared {}",
                        ty.dtype.name(),
                        own.dtype.name()
                    ),
                    "a state has the element type of its declaration",
                    format!("make it {}, with 1 cast", own.dtype.name()),
                );
            }
            if of_run && !ty.marked().is_empty() {
                say(
                    format!("`{name}` is {}, and {role} is of the run", type_text(&m.mesh, ty)),
                    "a state of the run is the same on all ranks",
                    "keep it whole: reduce it first, with 1 all_reduce".into(),
                );
            }
            let (at, first) = *types.entry(role).or_insert((&f.name, ty));
            if first != ty && phase.is_of_ranks() {
                let [first, ty] = [first, ty].map(|t| type_text(&m.mesh, t));
                say(
                    format!("`{name}` is {ty}, but in @{at} it is {first}"),
                    "a state has one type everywhere",
                    format!("declare it `{first}`"),
                );
            }
            if !written {
                continue;
            }
            if f.kind.is_looped() {
                say(
                    format!("@{} writes {role} for each microbatch", f.name),
                    "a state is written once per step: what reads it before has the old value",
                    format!("write it in @{}", FuncKind::OptimizerStep.name()),
                );
            }
            if let Some(other) = writers.insert(role, &f.name).filter(|other| *other != f.name) {
                say(
                    format!("@{} and @{other} both write {role}", f.name),
                    "a state has one writer",
                    "leave it out of the results of 1 of them".into(),
                );
            }
        }
    }
    begin(m, p);
}

/// Names of parameters that functions take.
fn params(m: &Module) -> HashSet<&RoleName> {
    let roles = m.funcs.iter().flat_map(|f| &f.args).filter_map(|a| a.role.as_ref());
    roles.filter(|r| r.kind == RoleKind::Param).map(|r| &r.name).collect()
}

/// States begin as numbers that their types have.
fn begin(m: &Module, p: &mut Problems) {
    for s in &m.states {
        if let StateInit::Number(x) = s.init
            && (x.is_nan() || x.abs() > s.dtype.largest())
        {
            p.push(None, || {
                let what =
                    format!("state `{}` begins as {x}, which {} has not", s.name, s.dtype.name());
                Diag::new("role", what)
                    .at(format!("state {}", s.name))
                    .help(format!("write a number up to {:e}, for example 0", s.dtype.largest()))
            });
        }
    }
}

/// Each state is declared once for an element type; declarations of several types have one owner and initial value.
fn declared_once(m: &Module, p: &mut Problems) {
    let again = |(i, s): &(usize, &StateDecl)| {
        let same = |o: &&StateDecl| o.name == s.name;
        let other = |o: &StateDecl| o.dtype == s.dtype || (o.owner, o.init) != (s.owner, s.init);
        m.states[..*i].iter().filter(same).any(other)
    };
    for (_, s) in m.states.iter().enumerate().filter(again) {
        p.push(None, || {
            Diag::new("role", format!("state `{}` is declared a second time", s.name))
                .at(format!("state {}", s.name))
                .help("leave out 1 of the declarations")
        });
    }
}
