//! A whole step: functions called one after the other, bound by the roles of their arguments.

use super::{Precision, call, gather, scatter};
use crate::diag::{Diag, Result};
use crate::func::{Func, Module, Port, Role, RoleKind};
use crate::mesh::Mesh;
use crate::plan::Action;
use crate::tensor::Tensor;
use crate::types::Type;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What one call of a step showed to the user.
#[derive(Clone, Debug)]
pub struct Shown {
    pub microbatch: Option<usize>,
    pub ty: Type,
    /// One tensor per rank.
    pub ranks: Vec<Tensor>,
    /// Rows of one owner of the microbatch's inputs, if the call had such an input.
    pub rows: Option<usize>,
}

/// Everything that lives between the calls of a step.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// By role, one tensor per rank: parameters, optimizer state, gradients, stashes, scalars.
    pub values: BTreeMap<Role, Vec<Tensor>>,
    /// Whole inputs of the step by name: [global batch, ...], or without a batch dim if every
    /// microbatch sees the same (`positions`).
    pub inputs: BTreeMap<Arc<str>, Tensor>,
    /// Results of role output, in the order of their calls.
    pub outputs: BTreeMap<Arc<str>, Vec<Shown>>,
}

impl State {
    /// Sets the value of a role on all ranks from a global tensor.
    pub fn put(&mut self, mesh: &Mesh, role: Role, ty: &Type, global: &Tensor) {
        self.values.insert(role, scatter(mesh, ty, global));
    }

    /// The global tensor of an output; the microbatches' rows are put back where they came from.
    /// Errors: `unbound` if nothing of this name was shown, and those of [`gather`].
    pub fn output(&self, mesh: &Mesh, name: &str) -> Result<Tensor> {
        let shown = self.outputs.get(name).filter(|s| !s.is_empty()).ok_or_else(|| {
            let known: Vec<&str> = self.outputs.keys().map(|k| &**k).collect();
            Diag::new("unbound", format!("no output is called `{name}`")).help(format!(
                "the {} outputs are: {}",
                known.len(),
                known.join(", ")
            ))
        })?;
        let parts = shown.iter().map(|s| gather(mesh, &s.ty, &s.ranks));
        let parts = parts.collect::<Result<Vec<Tensor>>>()?;
        let ty = &shown[0].ty;
        if parts.len() == 1 || ty.rank() == 0 {
            return Ok(parts[parts.len() - 1].clone());
        }
        // Row i of owner r in microbatch j is row (r m + j) mb + i of the batch.
        let (m, mb) = (parts.len(), shown[0].rows.unwrap_or_else(|| ty.chunk(mesh, 0)));
        let mut shape = parts[0].shape.clone();
        shape[0] *= m;
        Ok(Tensor::from_fn(&shape, |i| {
            let (r, j) = (i[0] / (m * mb), i[0] / mb % m);
            let mut at = i.to_vec();
            at[0] = r * mb + i[0] % mb;
            parts[j].at(&at)
        }))
    }
}

/// Runs the actions of one step. Arguments are bound by role, results overwrite the roles they
/// carry; inputs are cut into the rows of the action's microbatch.
///
/// Errors: `unbound` for a role nobody set, `microbatch` for rows that do not fit, and those of
/// [`call`].
pub fn run_step(
    module: &Module,
    actions: &[Action],
    state: &mut State,
    precision: Precision,
) -> Result<()> {
    for action in actions {
        let func = module.funcs.get(action.func).ok_or_else(|| {
            let n = module.funcs.len();
            Diag::new("unbound", format!("the step calls function {}", action.func))
                .help(format!("the module has {n} functions, numbered from 0"))
        })?;
        let args = func.args.iter().map(|p| bind(module, func, p, action, state));
        let args = args.collect::<Result<Vec<_>>>()?;
        let results = call(&module.mesh, func, &args, precision)?;
        for (port, ranks) in func.results.iter().zip(results) {
            let Some(role) = &port.role else { continue };
            if role.kind == RoleKind::Output {
                let ty = func.ty(port.value).clone();
                let batch = |a: &&Port| {
                    let input = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Input);
                    input && func.ty(a.value).rank() == 2
                };
                let input = func.args.iter().find(batch);
                let rows = input.map(|a| func.ty(a.value).chunk(&module.mesh, 0));
                let shown = Shown { microbatch: action.microbatch, ty, ranks, rows };
                state.outputs.entry(role.name.clone()).or_default().push(shown);
            } else {
                state.values.insert(role.clone(), ranks);
            }
        }
    }
    Ok(())
}

/// The value of one argument on all ranks.
fn bind(m: &Module, f: &Func, port: &Port, action: &Action, state: &State) -> Result<Vec<Tensor>> {
    let (ty, name) = (f.ty(port.value), f.name(port.value));
    let place = || format!("@{}, argument {name}", f.name);
    let Some(role) = &port.role else {
        return Err(Diag::new("unbound", "an argument of a step's function has no role")
            .at(place())
            .help("give it 1 role, such as `input \"input_ids\"`"));
    };
    if role.kind != RoleKind::Input {
        return state.values.get(role).cloned().ok_or_else(|| {
            let what = format!("nobody set {} `{}`", role.kind.name(), role.name);
            Diag::new("unbound", what)
                .at(place())
                .help(format!("set it before the step; {} roles are set", state.values.len()))
        });
    }
    let Some(global) = state.inputs.get(&role.name) else {
        return Err(Diag::new("unbound", format!("there is no input `{}`", role.name))
            .at(place())
            .help(format!("give it; {} inputs are given", state.inputs.len())));
    };
    let sizes = ty.sizes();
    let fits =
        sizes.len() == global.shape.len() && sizes.iter().skip(1).eq(global.shape[1..].iter());
    let rows = sizes.first().copied().unwrap_or(0);
    let (whole, j) = (sizes == global.shape, action.microbatch.unwrap_or(0));
    let even = rows > 0 && ty.rank() > 0 && rows % ty.pieces(&m.mesh, 0) == 0;
    let count = global.shape.first().map_or(0, |n| n / rows.max(1));
    let even = even && count * rows == global.shape[0] && j < count;
    if !whole && (action.microbatch.is_none() || !fits || !even) {
        let message = format!("input `{}` {:?} does not fit {sizes:?}", role.name, global.shape);
        return Err(Diag::new("microbatch", message)
            .at(place())
            .rule("global batch = microbatches · owners of rows · rows of a microbatch")
            .help(format!("give a multiple of {rows} rows, more than {}", j * rows)));
    }
    if whole {
        return Ok(scatter(&m.mesh, ty, global));
    }
    // Each owner's rows are contiguous; the microbatch is its `j`-th part.
    let mb = ty.chunk(&m.mesh, 0);
    let rows_of_j = Tensor::from_fn(&sizes, |i| {
        let mut at = i.to_vec();
        at[0] = (i[0] / mb * count + j) * mb + i[0] % mb;
        global.at(&at)
    });
    Ok(scatter(&m.mesh, ty, &rows_of_j))
}
