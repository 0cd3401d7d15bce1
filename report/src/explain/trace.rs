//! Follows a state of a value back to who asked for it.
//!
//! In the programs of the ranks, types say by themselves where a state comes from: the letter rule
//! of the producer leads to an operand with the same split. In the model, propagation wrote down
//! each cause. A chain goes back through the programs until it meets a value of the model, then
//! along the causes to an annotation.

use super::{words, zero};
use crate::inspect::other_programs;
use shardc_ir::diag::Result;
use shardc_ir::func::{Func, FuncKind, Module, Node, Role, RoleKind, Value, ValueMap};
use shardc_ir::mesh::{Atom, Mesh};
use shardc_ir::names::glob;
use shardc_ir::plan::Plan;
use shardc_ir::rule::has_letter;
use shardc_ir::types::{State, Type};
use shardc_passes::options::TpMode;
use shardc_passes::shard::auto::{Choices, Price};
use shardc_passes::shard::propagate::Origin;
use shardc_plans::stored::Stored;
use std::collections::BTreeMap;

/// Steps of a chain shown from its beginning and from its end; those between are counted.
const SHOWN: (usize, usize) = (4, 3);
/// Longest chain followed: no program is that deep, so it ends whatever the text says.
const MAX_STEPS: usize = 100_000;

/// A plan with all that explains it.
pub struct Why<'a> {
    pub s: &'a Stored,
    pub plan: &'a Plan,
    pub mesh: &'a Mesh,
    /// The model with propagated shardings.
    model: Module,
    causes: BTreeMap<(Value, usize, Atom), Origin>,
    /// Values of the model by name.
    names: BTreeMap<String, Value>,
    makers: Vec<ValueMap<Option<u32>>>,
    /// What layouts cost that were chosen by price, and from what they were.
    pub priced: Option<(Price, Option<Choices>)>,
}

/// A place in a chain.
#[derive(Clone, Copy)]
enum At {
    /// A value of a function of the plan.
    Program(usize, Value),
    /// A value of the model.
    Model(Value),
}

impl<'a> Why<'a> {
    /// Compiles the plan's source again to learn the causes.
    pub fn of(s: &'a Stored) -> Result<Why<'a>> {
        let compiled = shardc_plans::again::made_again(s, &mut |_, _| {})?;
        other_programs(s, &compiled.plan.module);
        let again = compiled.propagated;
        let model = again.sharded;
        let causes = again.causes.iter().map(|c| ((c.value, c.dim, c.atom), c.from)).collect();
        let f = &model.funcs[0];
        let all = (0..f.values.len() as u32).map(Value);
        let names = all.map(|v| (f.name(v).to_string(), v)).collect();
        let makers = s.plan.module.funcs.iter().map(Func::makers).collect();
        let mesh = &s.plan.module.mesh;
        let priced = again.price.map(|p| (p, again.choices));
        Ok(Why { s, plan: &s.plan, mesh, model, causes, names, makers, priced })
    }

    pub fn func(&self, fi: usize) -> &'a Func {
        &self.plan.module.funcs[fi]
    }

    /// The node that makes a value.
    pub fn maker(&self, fi: usize, v: Value) -> Option<&'a shardc_ir::func::Node> {
        let at = self.makers[fi].find(v).copied().flatten();
        at.map(|i| &self.func(fi).nodes[i as usize])
    }

    /// The role of an argument.
    pub fn role(&self, fi: usize, v: Value) -> Option<&'a Role> {
        self.func(fi).args.iter().find(|a| a.value == v).and_then(|a| a.role.as_ref())
    }

    /// The value with this name and shape in the model.
    fn in_model(&self, fi: usize, v: Value) -> Option<Value> {
        let f = self.func(fi);
        let m = *self.names.get(&f.name(v).to_string())?;
        (f.kind == FuncKind::Forward && self.model.funcs[0].ty(m).sizes() == f.ty(v).sizes())
            .then_some(m)
    }

    /// The value of the model for which a layout was chosen: that of a parameter, of its gradient and its state, or
    /// of an activation.
    pub fn chosen_for(&self, fi: usize, v: Value) -> Option<Value> {
        use RoleKind::{Grad, GradSum, Param, State, Unsharded};
        let of_param = |r: &&Role| matches!(r.kind, Param | Unsharded | Grad | GradSum | State(_));
        match self.role(fi, v).filter(of_param) {
            Some(r) => self.model_arg(RoleKind::Param, &r.name),
            None => self.in_model(fi, v),
        }
    }

    fn model_arg(&self, kind: RoleKind, name: &str) -> Option<Value> {
        let is = |r: &Role| r.kind == kind && *r.name == *name;
        let mut args = self.model.funcs[0].args.iter();
        args.find(|a| a.role.as_ref().is_some_and(is)).map(|a| a.value)
    }

    /// The result of another function that feeds an argument with this role.
    fn source(&self, fi: usize, role: &Role) -> Option<(usize, Value)> {
        let before = (0..fi).rev().map(|i| (i, self.func(i)));
        before.into_iter().find_map(|(i, f)| {
            let r = f.results.iter().find(|r| r.role.as_ref() == Some(role))?;
            Some((i, r.value))
        })
    }

    /// Why a value has its state over an atom: nearest cause first.
    pub fn chain(&self, fi: usize, v: Value, atom: Atom) -> Vec<String> {
        let mut lines = vec![];
        let mut at = Some(At::Program(fi, v));
        for _ in 0..MAX_STEPS {
            at = match at {
                Some(At::Program(fi, v)) => self.program_step(fi, v, atom, &mut lines),
                Some(At::Model(v)) => self.model_step(v, atom, &mut lines),
                None => break,
            };
        }
        let (head, tail) = SHOWN;
        if lines.len() > head + tail + 1 {
            let cut = lines.len() - head - tail;
            lines.splice(head..head + cut, [format!("… {cut} more steps")]);
        }
        lines.into_iter().map(|l| format!("<- {l}")).collect()
    }

    fn program_step(&self, fi: usize, v: Value, atom: Atom, out: &mut Vec<String>) -> Option<At> {
        let f = self.func(fi);
        let state = f.ty(v).state(atom);
        if state == State::Invariant {
            return None;
        }
        let model = self.in_model(fi, v).filter(|_| matches!(state, State::Sharded(_)));
        if let Some(m) = model.filter(|&m| self.model.funcs[0].ty(m).state(atom) == state) {
            return Some(At::Model(m));
        }
        let Some(n) = self.maker(fi, v) else { return self.argument_step(fi, v, atom, out) };
        let text = words::node(self.mesh, f, n);
        let o = n.outs.iter().position(|&x| x == v)?;
        let note = n.note.as_deref().map_or(String::new(), |n| format!("  // {n}"));
        if n.op.mnemonic() == "fan_out" || n.op.collective().is_some() {
            // A collective hands on what it does not change, operand by operand.
            let x = *n.ins.get(o)?;
            if f.ty(x).state(atom) == state {
                return Some(At::Program(fi, x));
            }
            out.push(format!("made so by `{text}`{note}"));
            return match state {
                State::Sharded(d) => self.split_of_result(fi, v, d, atom),
                _ => None,
            };
        }
        if n.op.layout().is_some() && f.ty(n.ins[0]).varying != f.ty(v).varying {
            // The same pieces, seen as values of their own or as those of a whole.
            if f.ty(n.ins[0]).state(atom) != state {
                out.push(format!("made so by `{text}`"));
            }
            return Some(At::Program(fi, n.ins[0]));
        }
        if n.ins.is_empty() {
            out.push(format!("`{text}` is made in the layout that its uses need"));
            let name = |r: &shardc_ir::func::Port| r.role.as_ref().map(|r| r.name.clone());
            let name = f.results.iter().find(|r| r.value == v).and_then(name)?;
            return self.model_arg(RoleKind::Param, &name).map(At::Model);
        }
        let ranks: Vec<usize> = n.ins.iter().map(|&x| f.ty(x).rank()).collect();
        let rule = n.op.def().rule(&ranks);
        match state {
            State::Sharded(d) => {
                let letters = rule.outs.get(o)?.get(d)?.letters();
                let holds = |j: usize| {
                    let t = f.ty(n.ins[j]);
                    let State::Sharded(e) = t.state(atom) else { return false };
                    rule.ins[j][e].letters().iter().any(|l| letters.contains(l))
                };
                let Some(j) = (0..n.ins.len()).find(|&j| holds(j)) else {
                    // Nothing brings it: a gradient is laid out as what it is the gradient of.
                    let primal = self.split_of_result(fi, v, d, atom)?;
                    let At::Model(m) = primal else { return Some(primal) };
                    let of = self.model.funcs[0].name(m);
                    out.push(format!("{} is split like {of}, whose gradient it is", f.name(v)));
                    return Some(primal);
                };
                out.push(format!("{} has it, by `{text}`", f.name(n.ins[j])));
                Some(At::Program(fi, n.ins[j]))
            }
            _ => {
                let like = n.ins.iter().find(|&&x| f.ty(x).state(atom) == state);
                if let Some(&x) = like {
                    out.push(format!("{} is so, by `{text}`", f.name(x)));
                    return Some(At::Program(fi, x));
                }
                // A letter that is summed away and split: here the parts arise.
                let j = (0..n.ins.len())
                    .find(|&j| matches!(f.ty(n.ins[j]).state(atom), State::Sharded(_)))?;
                let State::Sharded(e) = f.ty(n.ins[j]).state(atom) else { return None };
                let all = rule.ins[j][e].letters().iter();
                let gone = all.filter(|l| !has_letter(&rule.outs[o], **l));
                let letter: String = gone.map(|l| l.name()).collect();
                out.push(format!(
                    "`{text}` takes it along `{letter}`, which is split: each rank has its part"
                ));
                out.push(format!(
                    "{} is {}",
                    f.name(n.ins[j]),
                    shardc_ir::text::type_text(self.mesh, f.ty(n.ins[j]))
                ));
                Some(At::Program(fi, n.ins[j]))
            }
        }
    }

    /// Why the result of a collective is wanted in pieces: its name in the model, or its primal's.
    fn split_of_result(&self, fi: usize, v: Value, d: usize, atom: Atom) -> Option<At> {
        let f = self.func(fi);
        let mut name = f.name(v).clone();
        name.grad = false;
        let m = *self.names.get(&name.to_string())?;
        let t = self.model.funcs[0].ty(m);
        (t.state(atom) == State::Sharded(d)).then_some(At::Model(m))
    }

    fn argument_step(&self, fi: usize, v: Value, atom: Atom, out: &mut Vec<String>) -> Option<At> {
        let role = self.role(fi, v)?;
        let state = self.func(fi).ty(v).state(atom);
        let sharded = matches!(state, State::Sharded(_));
        let of_param = matches!(
            role.kind,
            RoleKind::Param
                | RoleKind::Unsharded
                | RoleKind::Grad
                | RoleKind::GradSum
                | RoleKind::State(_)
        );
        if let Some(why) = self.by_zero(&role.name, atom).filter(|_| sharded && of_param) {
            out.push(why);
            return None;
        }
        let model =
            |kind, name: &str| self.model_arg(kind, name).map(At::Model).filter(|_| sharded);
        match role.kind {
            RoleKind::Param => model(RoleKind::Param, &role.name),
            kind @ RoleKind::Input(_) => model(kind, &role.name),
            RoleKind::State(_) => {
                out.push(format!("optimizer state is stored like its parameter {}", role.name));
                model(RoleKind::Param, &role.name)
            }
            RoleKind::Grad | RoleKind::GradSum if sharded => {
                out.push(format!("a gradient is split like its parameter {}", role.name));
                model(RoleKind::Param, &role.name)
            }
            RoleKind::Unsharded if sharded => model(RoleKind::Param, &role.name),
            _ => {
                let (i, r) = self.source(fi, role)?;
                out.push(format!(
                    "it is {}, from @{}",
                    words::role(role.kind, &role.name),
                    self.func(i).name
                ));
                Some(At::Program(i, r))
            }
        }
    }

    fn model_step(&self, v: Value, atom: Atom, out: &mut Vec<String>) -> Option<At> {
        let f = &self.model.funcs[0];
        let State::Sharded(d) = f.ty(v).state(atom) else { return None };
        match *self.causes.get(&(v, d, atom))? {
            Origin::Annotation { .. } => {
                out.push(self.asker(v, atom));
                None
            }
            Origin::Op { node, value, .. } => {
                let text = words::node(self.mesh, f, &f.nodes[node as usize]);
                out.push(format!("{} has it, by `{text}`", f.name(value)));
                Some(At::Model(value))
            }
        }
    }

    /// Who annotated a value of the model, with this part of an axis.
    fn asker(&self, v: Value, atom: Atom) -> String {
        let f = &self.model.funcs[0];
        let o = &self.s.options;
        let asked = f.annotations.get(&v).map_or(String::new(), |a| annotation(self.mesh, a));
        let role = f.args.iter().find(|a| a.value == v).and_then(|a| a.role.as_ref());
        let scope =
            f.nodes.iter().find(|n| n.outs.contains(&v)).map(|n| &f.scope_info(n.scope).path);
        let weights = &self.plan.weights;
        let is = |name: &str, g: &str| match weights.iter().find(|w| w.param == name) {
            Some(w) => w.tensors().all(|t| glob(g, &t)),
            None => glob(g, name),
        };
        let by =
            |g: &str| role.is_some_and(|r| is(&r.name, g)) || scope.is_some_and(|p| glob(g, p));
        if let Some(r) = o.shard.iter().rev().find(|r| by(&r.glob)) {
            return format!("you asked for it: --shard '{}={}'", r.glob, r.dims.join(","));
        }
        // What stands in the scope of a mixture of experts, but for what comes in and goes out.
        let of_experts = |n: &Node| n.op.facts().kind.of_experts();
        let touches = |n: &&Node| of_experts(n) && (n.outs.contains(&v) || n.ins.contains(&v));
        match role {
            _ if self.s.family != "ir" && f.nodes.iter().any(|n| touches(&n)) => {
                format!("experts are laid out by ep and etp: {} as ({asked})", f.name(v))
            }
            _ if self.s.family == "ir" => {
                format!("you asked for it: {} is @({asked}) in the model's text", f.name(v))
            }
            Some(r) if r.kind == RoleKind::Param => format!(
                "the {} recipe for tensor parallelism splits {} as ({asked})",
                self.s.family, r.name
            ),
            _ if self.mesh.axis("cp").is_some_and(|cp| cp.has(atom)) => {
                format!("context parallelism cuts sequences: {} as ({asked})", f.name(v))
            }
            Some(r) => format!("data parallelism splits the batch: {} as ({asked})", r.name),
            None => {
                let flag = match o.tp_mode {
                    TpMode::OneD => "--sp splits the residual stream".to_string(),
                    mode => format!("--tp-mode {mode} splits activations"),
                };
                format!("{flag}: {} as ({asked})", f.name(v))
            }
        }
    }

    /// The layout that the model asks for a parameter.
    pub fn asked(&self, name: &str) -> Option<&Type> {
        Some(self.model.funcs[0].ty(self.model_arg(RoleKind::Param, name)?))
    }

    /// Why ZeRO splits what is stored of a parameter over an atom; nothing if it does not.
    fn by_zero(&self, param: &str, atom: Atom) -> Option<String> {
        let over = zero::cut(self, param);
        over.has(atom).then(|| {
            let (axes, stage) = (self.mesh.names(over, "*"), self.s.options.zero);
            format!("--zero {stage} cuts {param} over {axes}: shardc explain PLAN tensor:{param}")
        })
    }

    /// The layout in which a parameter is stored.
    pub fn stored(&self, name: &str) -> Option<(usize, Value, &'a Type)> {
        let mut funcs = self.plan.module.funcs.iter().enumerate();
        funcs.find_map(|(fi, f)| {
            let is = |r: &Role| r.kind == RoleKind::Param && *r.name == *name;
            let a = f.args.iter().find(|a| a.role.as_ref().is_some_and(is))?;
            Some((fi, a.value, f.ty(a.value)))
        })
    }
}

/// `tp,-`: per dim who splits it.
fn annotation(mesh: &Mesh, a: &shardc_ir::func::Annotation) -> String {
    let dim = |d: &shardc_ir::func::AnnotatedDim| {
        let mut s = String::new();
        mesh.write_atoms(d.atoms.iter(), "*", &mut s);
        match (s.is_empty(), d.open) {
            (true, true) => "?".into(),
            (true, false) => "-".into(),
            (false, open) => s + if open { "?" } else { "" },
        }
    };
    a.dims.iter().map(dim).collect::<Vec<_>>().join(",")
}
