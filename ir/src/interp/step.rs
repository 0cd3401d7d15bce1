//! A whole step: functions called one after the other, bound by the roles of their arguments.

use super::{Precision, Running, gather, scatter};
use crate::diag::{Diag, Result};
use crate::func::{Func, FuncKind, Module, Port, Role, RoleKind, sent};
use crate::mesh::{Mesh, PIPELINE};
use crate::plan::{Call, Instr, Transfer};
use crate::tensor::Tensor;
use crate::types::Type;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// What one call of a step showed to the user.
#[derive(Clone, Debug)]
pub struct Shown {
    pub microbatch: Option<usize>,
    pub ty: Type,
    /// One tensor per rank.
    pub ranks: Vec<Tensor>,
    /// Rows of one owner of the microbatch's inputs, if its first dim is these rows.
    pub rows: Option<usize>,
}

/// Everything that lives between the calls of a step.
#[derive(Clone, Debug, Default)]
pub struct StepState {
    /// By role, one tensor per rank of its owner: parameters, optimizer state, scalars.
    pub values: BTreeMap<Role, Vec<Tensor>>,
    /// Whole inputs of the step by name: [global batch, ...], or without a batch dim if every
    /// microbatch sees the same (`positions`).
    pub inputs: BTreeMap<Arc<str>, Tensor>,
    /// Results that are shown to the user, in the order of their calls.
    pub outputs: BTreeMap<Role, Vec<Shown>>,
    /// What a rank of the pipeline has of its own: gradients, sums, and by microbatch stashes and
    /// edges.
    own: BTreeMap<(usize, Role, Option<usize>), Vec<Tensor>>,
}

/// Where a role's value is kept: in [`StepState::values`] if `None`.
fn key(
    stage: usize,
    role: &Role,
    microbatch: Option<usize>,
) -> Option<(usize, Role, Option<usize>)> {
    match role.kind {
        RoleKind::Param | RoleKind::State(_) | RoleKind::Scalar | RoleKind::Input(_) => None,
        RoleKind::Stash | RoleKind::Edge | RoleKind::GradFrom(_) => {
            Some((stage, role.clone(), microbatch))
        }
        RoleKind::Unsharded
        | RoleKind::Grad
        | RoleKind::GradSum
        | RoleKind::Sum
        | RoleKind::TokensPerExpert
        | RoleKind::Scale
        | RoleKind::Step
        | RoleKind::Output
        | RoleKind::Metric
        | RoleKind::Mean
        | RoleKind::GradShown => Some((stage, role.clone(), None)),
    }
}

impl StepState {
    /// Sets the value of a role on all ranks from a global tensor.
    pub fn put(&mut self, mesh: &Mesh, role: Role, ty: &Type, global: &Tensor) {
        self.values.insert(role, scatter(&mesh.one_stage(), ty, global));
    }

    /// The value of a role on the ranks of one rank of the pipeline.
    pub fn get(
        &self,
        stage: usize,
        role: &Role,
        microbatch: Option<usize>,
    ) -> Option<&Vec<Tensor>> {
        match key(stage, role, microbatch) {
            Some(k) => self.own.get(&k),
            None => self.values.get(role),
        }
    }

    fn set(&mut self, stage: usize, role: &Role, microbatch: Option<usize>, ranks: Vec<Tensor>) {
        match key(stage, role, microbatch) {
            Some(k) => self.own.insert(k, ranks),
            None => self.values.insert(role.clone(), ranks),
        };
    }

    /// The global tensor of an output; the microbatches' rows are put back where they came from. What has no
    /// rows is that of the last microbatch.
    /// Errors: `unbound` if nothing of this role was shown, and those of [`gather`].
    pub fn output(&self, mesh: &Mesh, kind: RoleKind, name: &str) -> Result<Tensor> {
        let role = Role::new(kind, name);
        let shown = self.outputs.get(&role).filter(|s| !s.is_empty()).ok_or_else(|| {
            let known: Vec<String> = self.outputs.keys().map(Role::to_string).collect();
            Diag::new("unbound", format!("nothing shown is {role}")).help(format!(
                "these {} are: {}",
                known.len(),
                known.join(", ")
            ))
        })?;
        let mesh = &mesh.one_stage();
        let parts = shown.iter().map(|s| gather(mesh, &s.ty, &s.ranks));
        let parts = parts.collect::<Result<Vec<Tensor>>>()?;
        let m = parts.len();
        let Some(mb) = shown[0].rows.filter(|_| m > 1) else { return Ok(parts[m - 1].clone()) };
        // Row i of owner r in microbatch j is row (r m + j) mb + i of the batch.
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

/// Runs one step: the instructions of every rank of the pipeline. Arguments are bound by role,
/// results overwrite the roles they carry; inputs are cut into the rows of the call's microbatch.
///
/// Errors: `unbound` for a role nobody set, `microbatch` for rows that do not fit, `deadlock` if
/// all that is left waits, and those of [`super::call`].
pub fn run_step(
    module: &Module,
    lists: &[&[Instr]],
    state: &mut StepState,
    precision: Precision,
) -> Result<()> {
    let mesh = module.mesh.one_stage();
    let mut run = Step {
        module,
        mesh: &mesh,
        precision,
        state,
        at: vec![0; lists.len()],
        open: lists.iter().map(|_| None).collect(),
        mail: BTreeMap::new(),
        waited: BTreeMap::new(),
    };
    loop {
        let mut moved = false;
        for (stage, list) in lists.iter().enumerate() {
            while let Some(instr) = list.get(run.at[stage]) {
                if !run.instr(stage, instr)? {
                    break;
                }
                run.at[stage] += 1;
                moved = true;
            }
        }
        if lists.iter().zip(&run.at).all(|(l, &i)| i == l.len()) {
            return Ok(());
        }
        if !moved {
            run.meet()?;
        }
    }
}

/// Values that were offered and not taken, and how many were taken.
type Offers = (VecDeque<Vec<Tensor>>, usize);

/// A step under way.
struct Step<'a> {
    module: &'a Module,
    /// The mesh of one rank of the pipeline.
    mesh: &'a Mesh,
    precision: Precision,
    state: &'a mut StepState,
    /// Next instruction of each rank of the pipeline.
    at: Vec<usize>,
    /// Its call, if that waits for the others.
    open: Vec<Option<Running<'a>>>,
    /// What was offered from one rank of the pipeline to another, and how much of it was taken.
    mail: BTreeMap<(usize, usize), Offers>,
    /// How many offers were waited for.
    waited: BTreeMap<(usize, usize), usize>,
}

impl<'a> Step<'a> {
    /// Runs an instruction; false if it waits.
    fn instr(&mut self, stage: usize, instr: &Instr) -> Result<bool> {
        let port = |t: &Transfer, of: fn(&Func) -> &[Port]| -> Result<Role> {
            let f = function(self.module, t.func)?;
            let found = sent(of(f), t.value).cloned();
            found.ok_or_else(|| {
                Diag::new("unbound", format!("@{} has no such value to transfer", f.name))
                    .help(format!("name one of its {} arguments or results", of(f).len()))
            })
        };
        match instr {
            Instr::Call(c) => self.call(stage, c),
            Instr::Send(t) => {
                let role = port(t, |f| &f.results)?;
                let value = self.state.get(stage, &role, t.microbatch).cloned();
                let value = value.ok_or_else(|| unset(self.state, &role))?;
                self.mail.entry((stage, t.with)).or_default().0.push_back(value);
                Ok(true)
            }
            Instr::Sent { to } => {
                let taken = self.mail.get(&(stage, *to)).map_or(0, |m| m.1);
                let waited = self.waited.entry((stage, *to)).or_default();
                let done = taken > *waited;
                *waited += usize::from(done);
                Ok(done)
            }
            // It is about memory, of which there is none here.
            Instr::PostRecv(_) => Ok(true),
            Instr::Recv(t) => {
                let role = port(t, |f| &f.args)?;
                let offers = self.mail.get_mut(&(t.with, stage));
                let Some((value, taken)) = offers.and_then(|m| Some((m.0.pop_front()?, &mut m.1)))
                else {
                    return Ok(false);
                };
                *taken += 1;
                self.state.set(stage, &role, t.microbatch, value);
                Ok(true)
            }
        }
    }

    fn call(&mut self, stage: usize, c: &Call) -> Result<bool> {
        let pipeline = self.module.mesh.axis(PIPELINE).unwrap_or_default();
        let func = function(self.module, c.func)?;
        let mut run = match self.open[stage].take() {
            Some(run) => run,
            None => {
                let args = func.args.iter().map(|p| bind(self.mesh, func, p, stage, c, self.state));
                let args = args.collect::<Result<Vec<_>>>()?;
                Running::new(self.mesh, func, &args, self.precision)?
            }
        };
        if !run.go_on(pipeline)? {
            self.open[stage] = Some(run);
            return Ok(false);
        }
        for (port, ranks) in func.results.iter().zip(run.results()) {
            let Some(role) = &port.role else { continue };
            if role.kind.is_shown() {
                let ty = func.ty(port.value).clone();
                let batch = |a: &&Port| a.input().is_some_and(|i| i.batch);
                // Another stage's tokens are cut alike.
                let looped = |f: &&Func| c.microbatch.is_some() && f.kind == FuncKind::Forward;
                let all = std::iter::once(func).chain(self.module.funcs.iter().filter(looped));
                let input = all.filter_map(|f| Some((f, f.args.iter().find(batch)?)));
                let first = |t: &Type| t.dims.first().map(|d| d.size);
                let by_rows = |t: &Type| ty.rank() > 1 && first(t) == first(&ty);
                let rows = input.map(|(f, a)| f.ty(a.value)).next().filter(|t| by_rows(t));
                let rows = rows.map(|t| t.chunk(self.mesh, 0));
                let shown = Shown { microbatch: c.microbatch, ty, ranks, rows };
                self.state.outputs.entry(role.clone()).or_default().push(shown);
            } else {
                self.state.set(stage, role, c.microbatch, ranks);
            }
        }
        Ok(true)
    }

    /// Lets all ranks of the pipeline take the collective they wait in.
    fn meet(&mut self) -> Result<()> {
        let mut all: Vec<Running> = self.open.iter_mut().filter_map(Option::take).collect();
        if all.len() < self.at.len() {
            return Err(super::stuck("every rank of the pipeline waits for another"));
        }
        let pipeline = self.module.mesh.axis(PIPELINE).unwrap_or_default();
        super::meet(&self.module.mesh, pipeline, &mut all)?;
        self.open = all.into_iter().map(Some).collect();
        Ok(())
    }
}

fn function(module: &Module, i: usize) -> Result<&Func> {
    module.funcs.get(i).ok_or_else(|| {
        let n = module.funcs.len();
        Diag::new("unbound", format!("the step calls function {i}"))
            .help(format!("the module has {n} functions, numbered from 0"))
    })
}

fn unset(state: &StepState, role: &Role) -> Diag {
    Diag::new("unbound", format!("nobody set {role}"))
        .help(format!("set it before the step; {} roles are set", state.values.len()))
}

/// The value of one argument on all ranks.
fn bind(
    mesh: &Mesh,
    f: &Func,
    port: &Port,
    stage: usize,
    call: &Call,
    state: &StepState,
) -> Result<Vec<Tensor>> {
    let (ty, name) = (f.ty(port.value), f.name(port.value));
    let place = || format!("@{}, argument {name}", f.name);
    let Some(role) = &port.role else {
        return Err(Diag::new("unbound", "an argument of a step's function has no role")
            .at(place())
            .help("give it 1 role, such as `input \"input_ids\"`"));
    };
    if role.kind.input().is_none() {
        let value = state.get(stage, role, call.microbatch).cloned();
        return value.ok_or_else(|| unset(state, role).at(place()));
    }
    let Some(global) = state.inputs.get(&*role.name) else {
        return Err(Diag::new("unbound", format!("there is no input `{}`", role.name))
            .at(place())
            .help(format!("give it; {} inputs are given", state.inputs.len())));
    };
    let sizes = ty.sizes();
    let fits =
        sizes.len() == global.shape.len() && sizes.iter().skip(1).eq(global.shape.iter().skip(1));
    let rows = sizes.first().copied().unwrap_or(0);
    let (whole, j) = (sizes == global.shape, call.microbatch.unwrap_or(0));
    let even = rows > 0 && ty.rank() > 0 && rows % ty.pieces(mesh, 0) == 0;
    let count = global.shape.first().map_or(0, |n| n / rows.max(1));
    let even = even && global.shape.first() == Some(&(count * rows)) && j < count;
    if !whole && (call.microbatch.is_none() || !fits || !even) {
        let message = format!("input `{}` {:?} does not fit {sizes:?}", role.name, global.shape);
        return Err(Diag::new("microbatch", message)
            .at(place())
            .rule("global batch = microbatches · owners of rows · rows of a microbatch")
            .help(format!("give a multiple of {rows} rows, more than {}", j * rows)));
    }
    if whole {
        return Ok(scatter(mesh, ty, global));
    }
    // Each owner's rows are contiguous; the microbatch is its `j`-th part.
    let mb = ty.chunk(mesh, 0);
    let rows_of_j = Tensor::from_fn(&sizes, |i| {
        let mut at = i.to_vec();
        at[0] = (i[0] / mb * count + j) * mb + i[0] % mb;
        global.at(&at)
    });
    Ok(scatter(mesh, ty, &rows_of_j))
}
