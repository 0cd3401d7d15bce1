//! Optimizer states of a checkpoint and of the plan that goes on from it: which are the same, which begin, which are
//! left behind.

use super::Saved;
use clap::ValueEnum;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::func::{Func, FuncKind, Role, RoleKind};
use shardc_ir::plan::Plan;
use std::collections::{BTreeMap, BTreeSet};

/// What becomes of optimizer states that the checkpoint and the plan do not both have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum OptimResume {
    /// The run is refused.
    #[default]
    Strict,
    /// Those of the plan begin as in a new run, those of the checkpoint are left behind.
    Init,
}

impl Saved {
    /// Compares the optimizer states of the checkpoint with those of a plan, which is to go on from it; what is not
    /// the same in both is told. If a state begins of a parameter whose update depends on the number of the step, as
    /// those with corrections of a bias do, then all states of such updates begin, and their steps count from here.
    ///
    /// # Errors
    /// `resume` with [`OptimResume::Strict`], if they are not the same.
    pub fn fit(&mut self, plan: &Plan, how: OptimResume) -> Result<Vec<Diag>> {
        let mut states: BTreeMap<&Role, Vec<usize>> = BTreeMap::new();
        for f in plan.module.of_kind(FuncKind::OptimizerStep) {
            for a in &f.args {
                let Some(role) = &a.role else { continue };
                let sizes = f.ty(a.value).sizes();
                match role.kind {
                    RoleKind::State(_) => drop(states.insert(role, sizes.to_vec())),
                    // It is of another model, of which there is more to say where parameters are read.
                    RoleKind::Param if !self.leaves_out(role) && !self.has(role, &sizes) => {
                        return Ok(vec![]);
                    }
                    _other => {}
                }
            }
        }
        let known: BTreeSet<(String, String)> = states.keys().map(|r| key(r)).collect();
        let is_state = |k: &&(String, String)| k.0.starts_with("state[");
        let mut begin: BTreeSet<Role> = BTreeSet::new();
        begin.extend(states.iter().filter(|(r, s)| !self.has(r, s)).map(|(r, _)| (*r).clone()));
        let all = self.tensors.keys().filter(is_state);
        let left: Vec<(String, String)> = all.filter(|k| !known.contains(*k)).cloned().collect();
        let trained: BTreeSet<&str> =
            plan.module.of_kind(FuncKind::OptimizerStep).flat_map(trained).collect();
        if trained.is_empty() {
            return Ok(vec![]);
        }
        let (left, frozen): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|k| trained.contains(&*k.1));
        let mut said = vec![];
        let begun = begin.iter().map(key).collect::<Vec<_>>();
        said.extend(listed(&begun).into_iter().map(|l| format!("the checkpoint has no {l}")));
        said.extend(listed(&left).into_iter().map(|l| format!("the plan has no {l}")));
        let differ = !said.is_empty();
        let without = "is left behind: the plan trains none of these";
        said.extend(listed(&frozen).into_iter().map(|l| format!("{l} {without}")));
        if differ && how == OptimResume::Strict {
            let at = self.dir().display().to_string();
            let model = match self.needs_base() {
                true => format!(
                    "shardc reshard {at} --to peft -o adapter, then shardc run PLAN --weights BASE --adapter adapter"
                ),
                false => format!("{}, then shardc run PLAN --weights DIR", self.becomes()),
            };
            let d = Diag::new("resume", "the checkpoint's optimizer states are not those of the plan")
                .at(at)
                .rule("training goes on with the states of its optimizer: those of the plan, and no others");
            let d = said.into_iter().fold(d, Diag::why);
            return Err(d
                .help("go on with what both have, and begin the rest as a new run does: --optim-resume init")
                .help(format!("or begin with the weights alone: {model}")));
        }
        let counting: BTreeSet<String> =
            plan.module.of_kind(FuncKind::OptimizerStep).flat_map(counting).collect();
        if begin.iter().any(|r| counting.contains(&*r.name)) {
            let own = |r: &&&Role| counting.contains(&*r.name) && !begin.contains(**r);
            let more: Vec<Role> = states.keys().filter(own).map(|r| (*r).clone()).collect();
            let also: Vec<(String, String)> = more.iter().map(key).collect();
            let why = "begins anew with them: their updates count steps from here";
            said.extend(listed(&also).into_iter().map(|l| format!("{l} {why}")));
            begin.extend(more);
            self.scale.before = self.step.saturating_sub(self.scale.skipped);
        }
        self.begins = begin;
        let told = |what| {
            Diag::new("resume", what)
                .help("resume with the plan of the run that saved, to train as it would have")
        };
        Ok(said.into_iter().map(told).collect())
    }

    fn has(&self, role: &Role, shape: &[usize]) -> bool {
        self.tensors.get(&key(role)).is_some_and(|t| t.shape == shape)
    }

    /// True for a state that begins as in a new run.
    pub fn begins(&self, role: &Role) -> bool {
        self.begins.contains(role)
    }
}

fn key(role: &Role) -> (String, String) {
    (role.kind.to_string(), role.name.to_string())
}

/// By state: its name, and some of the parameters that it is of.
fn listed(all: &[(String, String)]) -> Vec<String> {
    let mut by: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (kind, name) in all {
        let state = kind.strip_prefix("state[").and_then(|k| k.strip_suffix(']'));
        by.entry(state.unwrap_or(kind)).or_default().push(name);
    }
    let one = |(state, names): (&str, Vec<&str>)| {
        let of = count(names.len(), "parameter", "parameters");
        let first: Vec<String> = names.iter().take(2).map(|n| format!("`{n}`")).collect();
        let more = if names.len() > 2 { ", …" } else { "" };
        format!("{state} of {of} ({}{more})", first.join(", "))
    };
    by.into_iter().map(one).collect()
}

/// Names of the parameters that an optimizer's step makes anew.
fn trained(f: &Func) -> impl Iterator<Item = &str> {
    let roles = f.results.iter().filter_map(|r| r.role.as_ref());
    roles.filter(|r| r.kind == RoleKind::Param).map(|r| &*r.name)
}

/// Names of the parameters whose new values depend on the number of the step.
fn counting(f: &Func) -> Vec<String> {
    let mut depends = f.per_value(false);
    for a in &f.args {
        let step = |r: &Role| r.kind == RoleKind::Scalar && &*r.name == "step";
        depends[a.value] = a.role.as_ref().is_some_and(step);
    }
    for n in &f.nodes {
        if n.ins.iter().any(|v| depends[v]) {
            n.outs.iter().for_each(|v| depends[v] = true);
        }
    }
    let params = f.results.iter().filter(|r| depends[r.value]).filter_map(|r| r.role.as_ref());
    params.filter(|r| r.kind == RoleKind::Param).map(|r| r.name.to_string()).collect()
}
