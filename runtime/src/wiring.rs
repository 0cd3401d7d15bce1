//! What a plan says about memory, checked once: where the operands of every node lie, which values
//! are inputs, outputs, parameters and state. The same for all ranks.

use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::func::{Func, Role, RoleKind, Value};
use shardc_ir::kernel::{Block, Program};
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::{ALIGN, Place, Plan};
use shardc_ir::tensor;
use shardc_ir::types::Type;
use smallvec::SmallVec;

/// Places of a node's operands, results and workspace.
pub(crate) type Bound = SmallVec<[Place; 12]>;

/// A plan, and its memory by node and by role.
pub(crate) struct Wiring {
    pub plan: Plan,
    /// Places of all values, by function: those of inputs move with the microbatch, if the function
    /// runs once per microbatch, and hold all of them if it does not; others do not move.
    pub places: Vec<Vec<Place>>,
    pub nodes: Vec<Vec<Bound>>,
    /// By function: it runs once per microbatch.
    pub per_microbatch: Vec<bool>,
}

/// A value with a role.
#[derive(Clone, Copy)]
pub(crate) struct Port<'a> {
    pub func: usize,
    pub value: Value,
    pub name: &'a str,
    pub ty: &'a Type,
    pub place: Place,
}

/// A plan that contradicts itself.
fn broken(message: String) -> Diag {
    Diag::new("plan", message)
        .rule("a plan states the place of every value, inside its arena")
        .help("compile the plan again with this version of shardc")
        .exit(Exit::Environment)
}

impl Wiring {
    pub fn new(plan: &Plan) -> Result<Wiring> {
        let funcs = &plan.module.funcs;
        let shape = |by: &[Vec<Place>], f: fn(&Func) -> usize| {
            by.len() == funcs.len() && by.iter().zip(funcs).all(|(p, func)| p.len() == f(func))
        };
        let memory = &plan.memory;
        if !shape(&memory.places, |f| f.values.len())
            || !shape(&memory.workspaces, |f| f.nodes.len())
        {
            return Err(broken("places do not match the plan's functions".into()));
        }
        let mut per_microbatch = vec![false; funcs.len()];
        for a in plan.actions.iter().chain(&plan.evaluation) {
            let known =
                a.func < funcs.len() && a.microbatch.is_none_or(|m| m < plan.settings.microbatches);
            if !known {
                let (n, m) = (funcs.len(), plan.settings.microbatches);
                return Err(broken(format!("{a:?} is not of {n} functions and {m} microbatches")));
            }
            per_microbatch[a.func] |= a.microbatch.is_some();
        }
        let places: Vec<Vec<Place>> =
            (0..funcs.len()).map(|i| places(plan, i, per_microbatch[i])).collect();
        let nodes = (0..funcs.len()).map(|i| bind(plan, i, &places[i])).collect();
        let w = Wiring { plan: plan.clone(), places, nodes, per_microbatch };
        for p in w.nodes.iter().flatten().flatten().chain(w.places.iter().flatten()) {
            let last = plan.settings.microbatches.saturating_sub(1);
            let end = crate::arena::span(*p, last).map(|s| s.1);
            let aligned = p.offset % ALIGN == 0 && p.per_microbatch % 4 == 0;
            if end.is_none_or(|e| e > memory.peak_bytes) || !aligned {
                return Err(broken(format!(
                    "{p:?} is not in an arena of {} bytes",
                    memory.peak_bytes
                )));
            }
        }
        w.check_outputs()?;
        Ok(w)
    }

    pub fn mesh(&self) -> &Mesh {
        &self.plan.module.mesh
    }

    fn port(&self, func: usize, value: Value, name: &'static str) -> Port<'_> {
        let ty = self.plan.module.funcs[func].ty(value);
        let place = self.places[func][value.0 as usize];
        Port { func, value, name, ty, place }
    }

    fn ports<'a>(
        &'a self,
        kind: RoleKind,
        of: fn(&'a Func) -> &'a [shardc_ir::func::Port],
    ) -> impl Iterator<Item = Port<'a>> {
        self.plan.module.funcs.iter().enumerate().flat_map(move |(func, f)| {
            let one = move |p: &'a shardc_ir::func::Port| {
                let role = p.role.as_ref().filter(|r| r.kind == kind)?;
                Some(Port { name: &role.name, ..self.port(func, p.value, "") })
            };
            of(f).iter().filter_map(one)
        })
    }

    /// Arguments of a kind, over all functions.
    pub fn args(&self, kind: RoleKind) -> impl Iterator<Item = Port<'_>> {
        self.ports(kind, |f| &f.args)
    }
    /// Results of a kind, over all functions.
    pub fn results(&self, kind: RoleKind) -> impl Iterator<Item = Port<'_>> {
        self.ports(kind, |f| &f.results)
    }

    /// The value that holds a role after a step: the last result with it, else an argument.
    pub fn find(&self, role: &Role) -> Option<Port<'_>> {
        let named = |p: &Port| p.name == &*role.name;
        self.results(role.kind).filter(named).last().or_else(|| self.args(role.kind).find(named))
    }

    fn check_outputs(&self) -> Result<()> {
        for p in self.results(RoleKind::Output) {
            whole(p.name, p.ty)?;
        }
        Ok(())
    }

    /// Checks that the kernels of a rank stay inside the places of their operands.
    pub fn check_program(&self, program: &Program) -> Result<()> {
        let lens = |p: &[Vec<_>]| p.iter().map(Vec::len).collect::<Vec<_>>();
        let want: Vec<usize> = self.nodes.iter().map(Vec::len).collect();
        if lens(program) != want {
            return Err(broken("the kernels do not match the plan's nodes".into()));
        }
        for (f, kernels) in program.iter().enumerate() {
            for (n, k) in kernels.iter().enumerate() {
                let bound = &self.nodes[f][n];
                let mut bad = None;
                k.reach(&mut |operand, end| {
                    let room = bound.get(operand).map_or(0, |p| p.bytes / 4);
                    if end > room {
                        bad = Some((operand, end, room));
                    }
                });
                if let Some((operand, end, room)) = bad {
                    let text = self.node_text(f, n);
                    return Err(broken(format!(
                        "operand {operand} has {room} elements, {end} are needed"
                    ))
                    .at(text));
                }
            }
        }
        Ok(())
    }

    /// A node as people know it: function, values, op, scope.
    pub fn node_text(&self, func: usize, node: usize) -> String {
        let f = &self.plan.module.funcs[func];
        let Some(n) = f.nodes.get(node) else { return format!("@{}", f.name) };
        let names =
            |v: &[Value]| v.iter().map(|&v| f.name(v).to_string()).collect::<Vec<_>>().join(", ");
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
pub(crate) fn whole(name: &str, t: &Type) -> Result<()> {
    if t.partial().is_empty() && t.varying.is_empty() {
        return Ok(());
    }
    Err(Diag::new(
        "partial",
        format!("`{name}` is a sum that the ranks have not taken, or differs between them"),
    )
    .rule("an output is invariant, replicated or sharded on every axis")
    .help("reduce it in the program, with 1 all_reduce, before it is shown"))
}

/// Places of a function's values; see [`Wiring::places`].
fn places(plan: &Plan, func: usize, per_microbatch: bool) -> Vec<Place> {
    let f = &plan.module.funcs[func];
    let mut input = vec![false; f.values.len()];
    for a in &f.args {
        input[a.value.0 as usize] = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Input);
    }
    for n in f.nodes.iter().filter(|n| n.op.def().is_view()) {
        n.outs.iter().for_each(|o| input[o.0 as usize] = input[n.ins[0].0 as usize]);
    }
    let one = |(p, input): (&Place, &bool)| {
        let all = p.per_microbatch.saturating_mul(plan.settings.microbatches);
        match (input, per_microbatch) {
            (false, _) => Place { per_microbatch: 0, ..*p },
            (true, false) => Place { per_microbatch: 0, bytes: p.bytes.max(all), ..*p },
            (true, true) if p.per_microbatch > 0 => {
                Place { bytes: p.bytes.min(p.per_microbatch), ..*p }
            }
            (true, true) => *p,
        }
    };
    plan.memory.places[func].iter().zip(&input).map(one).collect()
}

fn bind(plan: &Plan, func: usize, places: &[Place]) -> Vec<Bound> {
    let one = |(i, n): (usize, &shardc_ir::func::Node)| {
        let mut bound: Bound = n.ins.iter().chain(&n.outs).map(|v| places[v.0 as usize]).collect();
        bound.push(Place { per_microbatch: 0, ..plan.memory.workspaces[func][i] });
        bound
    };
    plan.module.funcs[func].nodes.iter().enumerate().map(one).collect()
}

/// A rank's piece of a value, in its padded storage.
pub(crate) fn piece(mesh: &Mesh, t: &Type, coords: &[usize]) -> Block {
    let view = shardc_ir::kernel::View {
        operand: 0,
        offset: 0,
        strides: tensor::strides(&t.chunks(mesh)),
    };
    Block { extents: t.lens(mesh, coords), view }
}

/// True if this rank is the first of those that hold its piece.
pub(crate) fn owns(mesh: &Mesh, t: &Type, coords: &[usize]) -> bool {
    mesh.all().minus(t.sharded()).iter().all(|a| coords[a.0 as usize] == 0)
}
