//! What a plan says about memory, checked once: where the operands of every node lie, which values
//! are inputs, outputs, parameters and state. The same for all ranks.

use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Role, RoleKind, StateInit, Value, ValueMap};
use shardc_ir::group::{Launch, launches};
use shardc_ir::kernel::{Block, Kernel, Program};
use shardc_ir::mesh::{Mesh, PIPELINE};
use shardc_ir::plan::{ALIGN, FramePlace, Instr, Memory, Plan, RankClass, calls};
use shardc_ir::tensor;
use shardc_ir::types::Type;
use shardc_ir::weights::Weight;
use smallvec::SmallVec;

/// Values of a node that messages name.
const FEW: usize = 4;

/// Places of a launch's operands, results and workspace.
pub(crate) type Bound = SmallVec<[FramePlace; 12]>;

/// A launch's operands and results.
type Operands = SmallVec<[Value; 12]>;

/// A plan, and its memory by node and by role.
pub(crate) struct Wiring {
    pub plan: Plan,
    /// Places of all values, by function.
    pub places: Vec<ValueMap<FramePlace>>,
    /// By function.
    pub launches: Vec<Vec<Launch>>,
    pub bound: Vec<Vec<Bound>>,
    /// By function: it runs once per microbatch.
    pub per_microbatch: Vec<bool>,
    /// By function: the class that runs it.
    pub class_of: Vec<usize>,
    /// By class: where a step's data go.
    pub inputs: Vec<Vec<InputSlot>>,
}

/// A place for a part of a step's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct InputSlot {
    pub func: usize,
    pub value: Value,
    /// The part that it holds, of as many as there are; one of one if it holds all.
    pub part: (usize, usize),
    /// Offset in the arena.
    pub offset: usize,
    pub bytes: usize,
}

/// A value with a role.
#[derive(Clone, Copy)]
pub(crate) struct Port<'a> {
    pub func: usize,
    pub value: Value,
    pub role: &'a Role,
    pub ty: &'a Type,
    pub place: FramePlace,
}

/// A plan that contradicts itself.
fn broken(message: String) -> Diag {
    Diag::new("plan", message)
        .rule("a plan states the place of every value, inside its arena")
        .help("recompile the plan with this version of shardc")
}

impl Wiring {
    pub fn new(plan: &Plan) -> Result<Wiring> {
        let funcs = &plan.module.funcs;
        if plan.classes.len() != plan.module.mesh.pipeline() {
            return Err(broken(format!("{} classes of ranks", plan.classes.len())));
        }
        let mut class_of = vec![usize::MAX; funcs.len()];
        let mut per_microbatch = vec![false; funcs.len()];
        let (mut places, mut bound) =
            (vec![ValueMap::default(); funcs.len()], vec![vec![]; funcs.len()]);
        let launches: Vec<Vec<Launch>> = funcs.iter().map(launches).collect();
        for (i, c) in plan.classes.iter().enumerate() {
            for &f in &c.funcs {
                let new = class_of.get_mut(f).filter(|c| **c == usize::MAX);
                *new.ok_or_else(|| broken(format!("function {f} is not of one class")))? = i;
                check_places(plan, c, f)?;
                places[f].clone_from(&c.memory.places[f]);
                bound[f] = bind(&c.memory, &launches[f], f);
            }
            for instr in c.step.iter().chain(&c.evaluation) {
                check_instr(plan, i, instr, &class_of)?;
                if let Instr::Call(call) = instr {
                    per_microbatch[call.func] |= call.microbatch.is_some();
                }
            }
        }
        if let Some(f) = class_of.iter().position(|&c| c == usize::MAX) {
            return Err(broken(format!("no class has @{}", funcs[f].name)));
        }
        let inputs = plan.classes.iter().map(|c| slots(plan, c)).collect();
        let plan = plan.clone();
        let w = Wiring { plan, places, launches, bound, per_microbatch, class_of, inputs };
        let lasts = |k| matches!(k, RoleKind::Param | RoleKind::State(_) | RoleKind::Scalar);
        if let Some(p) = w.args(lasts).chain(w.results(lasts)).find(|p| p.place.frame != 0) {
            return Err(broken(format!("{} does not live through a step", p.role)));
        }
        w.check_outputs()?;
        Ok(w)
    }

    pub fn mesh(&self) -> &Mesh {
        &self.plan.module.mesh
    }

    fn ports<'a>(
        &'a self,
        is: impl Fn(RoleKind) -> bool + Copy,
        of: fn(&'a Func) -> &'a [shardc_ir::func::Port],
    ) -> impl Iterator<Item = Port<'a>> {
        self.plan.module.funcs.iter().enumerate().flat_map(move |(func, f)| {
            let one = move |p: &'a shardc_ir::func::Port| {
                let role = p.role.as_ref().filter(|r| is(r.kind))?;
                let place = self.places[func][p.value];
                Some(Port { func, value: p.value, role, ty: f.ty(p.value), place })
            };
            of(f).iter().filter_map(one)
        })
    }

    /// Arguments of such kinds, over all functions.
    pub fn args(&self, is: impl Fn(RoleKind) -> bool + Copy) -> impl Iterator<Item = Port<'_>> {
        self.ports(is, |f| &f.args)
    }
    /// Results of such kinds, over all functions.
    pub fn results(&self, is: impl Fn(RoleKind) -> bool + Copy) -> impl Iterator<Item = Port<'_>> {
        self.ports(is, |f| &f.results)
    }

    /// The value that holds a role after a step: the last result with it, else an argument.
    pub fn find(&self, role: &Role) -> Option<Port<'_>> {
        let (own, same) = (|k| k == role.kind, |p: &Port| p.role == role);
        self.results(own).filter(same).last().or_else(|| self.args(own).find(same))
    }

    /// What a parameter or a state is before the first step.
    pub fn init(&self, role: &Role) -> Result<StateInit> {
        let RoleKind::State(name) = role.kind else { return Ok(StateInit::File) };
        let own = self.plan.module.state(name).map(|s| s.init);
        own.ok_or_else(|| broken(format!("state `{name}` is not declared")))
    }

    /// Where a parameter comes from, or a state that begins as a file has it.
    pub fn weight(&self, role: &Role) -> Result<&Weight> {
        let all = &self.plan.weights;
        all.iter().find(|x| x.param == *role.name).ok_or_else(|| {
            let what = format!("the plan does not say where `{}` comes from", role.name);
            let help = format!("list it among the plan's {} weights", all.len());
            Diag::new("weight-missing", what).help(help)
        })
    }

    fn check_outputs(&self) -> Result<()> {
        for p in self.results(RoleKind::is_shown) {
            whole(p.role, p.ty)?;
        }
        Ok(())
    }

    /// Checks that the kernels of a rank of a class stay inside the places of their operands.
    pub fn check_program(&self, class: usize, program: &Program) -> Result<()> {
        let own = |f: usize| self.class_of[f] == class;
        let want = |f: usize| if own(f) { self.launches[f].len() } else { 0 };
        let fits = program.len() == self.launches.len()
            && program.iter().enumerate().all(|(f, p)| p.len() == want(f));
        if !fits {
            return Err(broken("the kernels do not match the plan's launches".into()));
        }
        for (f, kernels) in program.iter().enumerate() {
            for (n, k) in kernels.iter().enumerate() {
                let (bound, func) = (&self.bound[f][n], &self.plan.module.funcs[f]);
                let launch = &self.launches[f][n];
                let values: Operands = launch.ins.iter().chain(&launch.outs).copied().collect();
                let accumulates = match k {
                    Kernel::Gemm(g) => g.accumulate,
                    Kernel::IndexAdd { clear, .. } => clear.is_none(),
                    _other => false,
                };
                if accumulates && bound.get(launch.ins.len() - 1) != bound.get(launch.ins.len()) {
                    return Err(broken("a sum does not lie where its first term does".into())
                        .at(self.node_text(f, launch.nodes.start)));
                }
                let mut bad = None;
                k.reach(&mut |operand, end| {
                    // Behind the values is the workspace, of f32.
                    let size = values.get(operand).map_or(4, |&v| func.ty(v).dtype.bytes());
                    let room = bound.get(operand).map_or(0, |p| p.bytes / size);
                    if end > room {
                        bad = Some((operand, end, room));
                    }
                });
                if let Some((operand, end, room)) = bad {
                    let text = self.node_text(f, launch.nodes.start);
                    return Err(broken(format!(
                        "operand {operand} has {room} elements, {end} are needed"
                    ))
                    .at(text));
                }
            }
        }
        Ok(())
    }

    /// A node as people know it: function, values, op, scope. Of many values, as a sum of all gradients has them,
    /// the first few.
    pub fn node_text(&self, func: usize, node: usize) -> String {
        let f = &self.plan.module.funcs[func];
        let Some(n) = f.nodes.get(node) else { return format!("@{}", f.name) };
        let names = |v: &[Value]| {
            let few = if v.len() > FEW { FEW - 1 } else { v.len() };
            let text = v[..few].iter().map(|&v| f.name(v).to_string()).collect::<Vec<_>>();
            match v.len() - few {
                0 => text.join(", "),
                more => format!("{} and {more} more", text.join(", ")),
            }
        };
        let mut op = String::new();
        n.op.write(self.mesh(), &mut op);
        let mut s = format!("@{}: {} = {op} {}", f.name, names(&n.outs), names(&n.ins));
        let scope = &f.scope_info(n.scope).path;
        if !scope.is_empty() {
            s.push_str(&format!(", in {scope}"));
        }
        s
    }

    /// A rank with its coordinates: `rank 5 (dp=1, tp=1)`.
    pub fn rank_text(&self, rank: usize) -> String {
        let mut rest = rank;
        let mut axes: Vec<String> = vec![];
        for a in self.mesh().axes.iter().rev() {
            axes.insert(0, format!("{}={}", a.name, rest % a.size));
            rest /= a.size;
        }
        if axes.is_empty() {
            format!("rank {rank}")
        } else {
            format!("rank {rank} ({})", axes.join(", "))
        }
    }
}

/// Checks that a value is known to the ranks: no sum to be taken, nothing of each rank's own.
pub(crate) fn whole(role: &Role, t: &Type) -> Result<()> {
    if t.partial().is_empty() && t.varying.is_empty() {
        return Ok(());
    }
    Err(Diag::new(
        "partial",
        format!("{role} is a sum that the ranks have not taken, or differs between them"),
    )
    .rule("an output is invariant, replicated or sharded on every axis")
    .help("reduce it in the program, with 1 all_reduce, before it is shown"))
}

/// Checks that the values of a function lie in its frames.
fn check_places(plan: &Plan, c: &RankClass, f: usize) -> Result<()> {
    let (m, func) = (&c.memory, &plan.module.funcs[f]);
    let sizes = m.frames.get(f);
    let places = m.places.get(f).map_or(0, |p| p.len());
    let workspaces = m.workspaces.get(f).map_or(0, Vec::len);
    if places != func.values.len() || workspaces != func.nodes.len() {
        return Err(broken(format!("places do not match the values of @{}", func.name)));
    }
    for p in m.places[f].iter().chain(&m.workspaces[f]) {
        let room = sizes.and_then(|s| s.get(p.frame as usize)).copied();
        let end = p.offset.checked_add(p.bytes);
        let fits = p.bytes == 0 || room.is_some_and(|r| end.is_some_and(|e| e <= r));
        if !fits || p.offset % ALIGN != 0 {
            return Err(broken(format!("{p:?} of @{} is not in its frame", func.name)));
        }
    }
    Ok(())
}

/// Checks that an instruction names what there is, inside the arena.
fn check_instr(plan: &Plan, class: usize, i: &Instr, class_of: &[usize]) -> Result<()> {
    let (c, funcs) = (&plan.classes[class], &plan.module.funcs);
    let peak = c.memory.peak_bytes;
    let inside = |offset: usize, bytes: usize| {
        offset % 4 == 0 && offset.checked_add(bytes).is_some_and(|end| end <= peak)
    };
    let own = |f: usize| class_of.get(f) == Some(&class);
    let known = |m: Option<usize>| m.is_none_or(|m| m < plan.settings.microbatches);
    let fits = match i {
        Instr::Call(call) => {
            own(call.func) && known(call.microbatch) && {
                let sizes = &c.memory.frames[call.func];
                let all = call.frames.iter().zip(sizes);
                call.frames.len() == sizes.len()
                    && call.frames.first() == Some(&0)
                    // An empty frame lies anywhere.
                    && all.clone().all(|(&at, &bytes)| bytes == 0 || inside(at, bytes))
            }
        }
        Instr::Send(t) | Instr::PostRecv(t) | Instr::Recv(t) => {
            let value = own(t.func).then(|| funcs[t.func].values.get(t.value.0 as usize)).flatten();
            value.is_some_and(|v| v.ty.local_bytes(&plan.module.mesh) == t.bytes)
                && inside(t.offset, t.bytes)
                && t.with < plan.classes.len()
                && t.with != class
        }
        Instr::Sent { to } => *to < plan.classes.len() && *to != class,
    };
    if fits {
        return Ok(());
    }
    let (n, m) = (funcs.len(), plan.settings.microbatches);
    Err(broken(format!("{i:?} does not fit {n} functions, {m} microbatches, {peak} bytes")))
}

/// Where a step's data go: once, however many functions read them.
fn slots(plan: &Plan, c: &RankClass) -> Vec<InputSlot> {
    let mut out: Vec<InputSlot> = vec![];
    for call in calls(&c.step).chain(calls(&c.evaluation)) {
        for a in &plan.module.funcs[call.func].args {
            let Some(input) = a.input() else { continue };
            let p = c.memory.places[call.func][a.value];
            let part = match call.microbatch.filter(|_| input.batch) {
                Some(j) => (j, plan.settings.microbatches),
                None => (0, 1),
            };
            let offset = call.frames[p.frame as usize] + p.offset;
            let (func, value, bytes) = (call.func, a.value, p.bytes);
            if !out.iter().any(|s| (s.offset, s.bytes) == (offset, bytes)) {
                out.push(InputSlot { func, value, part, offset, bytes });
            }
        }
    }
    out
}

fn bind(m: &Memory, launches: &[Launch], func: usize) -> Vec<Bound> {
    let places = &m.places[func];
    let one = |x: &Launch| {
        let mut bound: Bound = x.ins.iter().chain(&x.outs).map(|v| places[v]).collect();
        let work = &m.workspaces[func][x.nodes.clone()];
        bound.push(work.iter().find(|p| p.bytes > 0).copied().unwrap_or_default());
        bound
    };
    launches.iter().map(one).collect()
}

/// A rank's piece of a value, in its padded storage.
pub(crate) fn piece(mesh: &Mesh, t: &Type, coords: &[usize]) -> Block {
    let view = shardc_ir::kernel::View {
        operand: 0,
        offset: 0,
        strides: tensor::strides(&t.chunks(mesh)),
    };
    Block { extents: t.lens(mesh, coords), view, elem: t.dtype }
}

/// True if this rank is the first of those of its class that hold its piece.
pub(crate) fn owns(mesh: &Mesh, t: &Type, coords: &[usize]) -> bool {
    let same = mesh.all().minus(t.sharded()).minus(mesh.axis(PIPELINE).unwrap_or_default());
    same.iter().all(|a| coords[a.0 as usize] == 0)
}
