//! Appends the backward program to a forward program.
//!
//! Before:  `%y = dot[mk,kn->mn] %x, %w`, result `%loss`
//! After:   … `%d_w = dot[mn,mk->kn] %d_y, %x`, results `%loss`, `%d_w`
//! Assumes: phase Ranked.  Leaves: phase Differentiated; nodes of backward are behind all others, and know it.
//!
//! Reverse mode over the typed program: the gradient of each op comes from its own file, typed by the
//! same rules, so f becomes g, a gather a scatter, and a weight's gradient a pending sum.

use crate::depends::active;
use shardc_ir::builder::Builder;
use shardc_ir::func::{
    Func, Name, Node, ParamLayout, Part, Port, Role, RoleKind, Scope, Value, ValueMap,
};
use shardc_ir::infer::Linear;
use shardc_ir::maps::{HashMap, HashSet};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Add, Cast, Kind};
use shardc_ir::types::{DType, Type};
use smallvec::SmallVec;

/// Operands and results of a node.
type Ends = (SmallVec<[Value; 4]>, SmallVec<[Value; 2]>);

/// What the users of a value sent back: gradients, and the scopes of the users.
type Cotangents = SmallVec<[(Value, Scope); 2]>;

/// Differentiates the sums, all of which are losses (`sum "loss"`, and of experts `sum "aux_loss"` and
/// `sum "z_loss"`), with respect to every trained parameter. The cotangent of each is an argument,
/// `scale "loss"`; gradients are results `grad NAME`, one per stage that uses the parameter. A gradient
/// has its value's element type; that of a 16-bit parameter, and of what is made of parameters alone,
/// has `grad_dtype`, from where it is made on: so it is summed and reduced in that.
pub fn differentiate(
    mesh: &Mesh,
    f: Func,
    frozen: &dyn Fn(&str) -> bool,
    params: &[ParamLayout],
    grad_dtype: DType,
) -> Func {
    let forward = f.nodes.len();
    let mut r = Reverse {
        mesh,
        grad_dtype,
        on: active(&f, frozen),
        weights: only_weights(&f),
        of_data: f.per_value(false),
        parts: f.per_value(Cotangents::new()),
        gathered: gathered(&f, params),
        f,
    };
    // Of a node come one or two.
    r.f.reserve(2 * forward);
    r.seed();
    let complete = first_uses(&r.f, &r.on);
    let prepared: HashMap<&str, &ParamLayout> =
        params.iter().map(|p| (&*p.param.name, p)).collect();
    let mut grads: Vec<(usize, Port)> = vec![];
    for (i, complete) in complete.iter().enumerate().rev() {
        r.node(i);
        for &arg in complete {
            grads.extend(r.gradient(arg, i, &prepared).map(|g| (arg, g)));
        }
    }
    grads.sort_by_key(|g| g.0);
    let Reverse { mut f, mut of_data, .. } = r;
    f.results.extend(grads.into_iter().map(|g| g.1));
    of_data.resize(f.values.len(), false);
    for n in &mut f.nodes[forward..] {
        let of_data = n.outs.iter().any(|o| of_data[o]);
        n.part = if of_data { Part::Backward } else { Part::Weight };
    }
    f.drop_dead();
    f
}

/// For each node of forward, the parameters (places among the arguments) that its stage uses here
/// for the first time. Behind this node's backward the stage's gradient of them is complete: summed
/// and brought into pieces there, whole gradients of few layers are alive at once.
fn first_uses(f: &Func, on: &ValueMap<bool>) -> Vec<Vec<usize>> {
    let mut place: ValueMap<Option<usize>> = f.per_value(None);
    for (i, a) in f.args.iter().enumerate() {
        let ready = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Unsharded);
        place[a.value] = Some(i).filter(|_| ready && on[a.value]);
    }
    let mut seen = HashSet::default();
    let mut of = |n: &Node| -> Vec<usize> {
        let args = n.ins.iter().filter_map(|v| place[v]);
        args.filter(|&i| seen.insert((f.stage_of(n), i))).collect()
    };
    f.nodes.iter().map(&mut of).collect()
}

/// The program while its backward is being appended.
struct Reverse<'a> {
    mesh: &'a Mesh,
    grad_dtype: DType,
    f: Func,
    /// By value of forward: its gradient is wanted.
    on: ValueMap<bool>,
    /// By value of forward: it is made of parameters alone.
    weights: ValueMap<bool>,
    /// By value: it is the gradient of something computed from data, not of a parameter.
    of_data: ValueMap<bool>,
    /// By value of forward: what its users sent back so far.
    parts: ValueMap<Cotangents>,
    /// Gathered parameters whose gradients are kept as those of the arguments they are made of.
    gathered: HashMap<Value, Value>,
}

impl Reverse<'_> {
    /// The cotangents of the losses, as arguments.
    fn seed(&mut self) {
        let is_sum = |r: &&Port| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Sum);
        let sums: Vec<Port> = self.f.results.iter().filter(is_sum).cloned().collect();
        for Port { value, role } in sums {
            let Some(role) = role else { continue };
            let hint = role.name.to_string().into();
            let name = Name { grad: true, layer: None, hint, dup: 0 };
            let role = Some(Role { kind: RoleKind::Scale, ..role });
            let seed = self.f.arg(self.f.ty(value).cotangent(), name, role);
            self.parts[value].push((seed, Scope(0)));
        }
    }

    /// Appends the backward of one node, if anything came back to it.
    fn node(&mut self, i: usize) {
        let n = self.f.nodes[i].clone();
        let came = |o: &Value| self.on[o] && !self.parts[o].is_empty();
        if !n.outs.iter().any(came) {
            return;
        }
        let mut b = Builder::new(self.mesh, &mut self.f);
        (b.scope, b.grad, b.wanted) = (n.scope, true, &self.on);
        let total = |o: &Value| total(&mut b, &self.parts[o], *o);
        let d: SmallVec<[Option<Value>; 2]> = n.outs.iter().map(total).collect();
        if let (Some(&x), Some(d)) = (self.gathered.get(&n.outs[0]), d[0]) {
            let f = &mut self.f;
            if f.name(d).hint == f.name(n.outs[0]).hint {
                let name = f.name(x).clone();
                f.rename(d, Name { grad: true, dup: 0, ..name });
            }
            self.parts[x].push((d, n.scope));
            return;
        }
        let (ins, outs) = self.as_wide(&n, &d);
        let mut b = Builder::new(self.mesh, &mut self.f);
        (b.scope, b.grad, b.wanted) = (n.scope, true, &self.on);
        let first = b.f.nodes.len();
        // The one conversion of a cast's gradient is that to the wanted type.
        let converts = n.op.facts().kind == Kind::Conversion;
        let mut grads = match converts {
            true => smallvec::smallvec![d[0]],
            false => n.op.def().grad(&mut b, &ins, &outs, &d),
        };
        // The mirror of a collective that stays as it is stays, too.
        let mirror = |m: &&mut Node| n.kept && m.op.layout().is_some();
        b.f.nodes[first..].iter_mut().filter(mirror).for_each(|m| m.kept = true);
        for (&x, g) in n.ins.iter().zip(&mut grads) {
            let wanted = wanted(b.ty(x).dtype, self.weights[x], self.grad_dtype);
            *g = g.filter(|_| self.on[x]).map(|g| convert(&mut b, g, wanted));
        }
        let made: SmallVec<[Value; 8]> =
            b.f.nodes[first..].iter().flat_map(|m| m.outs.clone()).collect();
        for (&x, g) in n.ins.iter().zip(grads) {
            let Some(g) = g else { continue };
            let f = &mut self.f;
            let like = Type { dtype: f.ty(g).dtype, ..f.ty(x).cotangent() };
            assert_eq!(*f.ty(g), like, "gradient of {} by {:?}", f.name(x), n.op);
            // That of a weight's cast is passed on as it is.
            if made.contains(&g) || converts {
                let name = f.name(x).clone();
                f.rename(g, Name { grad: true, dup: 0, ..name });
            }
            self.parts[x].push((g, n.scope));
            self.of_data.resize(f.values.len(), false);
            self.of_data[g] |= !self.weights[x];
        }
    }

    /// Operands and results of a node, as its gradient takes them: with cotangents that are wider than what
    /// was made of parameters, as wide as these are. A linear op's gradient reads none of them.
    fn as_wide(&mut self, n: &Node, d: &[Option<Value>]) -> Ends {
        let (mut ins, mut outs) = (n.ins.clone(), n.outs.clone());
        let mixed = outs.iter().zip(d).find_map(|(&o, d)| {
            let to = self.f.ty((*d)?).dtype;
            (to != self.f.ty(o).dtype).then_some(to)
        });
        let linear = matches!(n.op.def().linear(), Linear::Together(_));
        let Some(to) = mixed.filter(|_| !linear) else { return (ins, outs) };
        for v in ins.iter_mut().chain(&mut outs) {
            let own = self.f.ty(*v).dtype;
            if !own.is_float() || own == to {
                continue;
            }
            let (on, name) = (self.on[*v], self.f.name(*v).clone());
            let mut b = Builder::new(self.mesh, &mut self.f);
            b.scope = n.scope;
            *v = convert(&mut b, *v, to);
            let hint = name.hint + "_wide";
            b.f.rename(*v, Name { hint, dup: 0, ..name });
            self.on.resize(self.f.values.len(), false);
            self.on[*v] = on;
        }
        (ins, outs)
    }

    /// The gradient that the stage of a node has found of an argument, in the layout in which it is
    /// kept over microbatches.
    fn gradient(
        &mut self,
        arg: usize,
        node: usize,
        prepared: &HashMap<&str, &ParamLayout>,
    ) -> Option<Port> {
        let Port { value: x, role } = self.f.args[arg].clone();
        let of = |s: Scope| self.f.scope_info(s).stage;
        let stage = of(self.f.nodes[node].scope);
        let here = self.parts[x].iter().filter(|p| of(p.1) == stage);
        let here: Cotangents = here.copied().collect();
        let mut b = Builder::new(self.mesh, &mut self.f);
        b.grad = true;
        b.scope = here.last()?.1;
        let value = sum(&mut b, &here, x)?;
        let name = role?.name;
        let value = prepared.get(&*name).map_or(value, |p| mirror_early(&mut b, p, value));
        Some(Port { value, role: Some(Role { kind: RoleKind::Grad, name }) })
    }
}

/// Parameters that are gathered where they are used and whose gradient is reduced at step scope: by
/// what is gathered, the argument. The gradient of the one is kept as that of the other.
fn gathered(f: &Func, params: &[ParamLayout]) -> HashMap<Value, Value> {
    // By value: the argument it is made of, and how many of its parameter's steps are done.
    let mut on_the_way: HashMap<Value, (Value, usize, &ParamLayout)> = HashMap::default();
    let late = params.iter().filter(|p| p.prepared < p.mirrored);
    let late: HashMap<&str, &ParamLayout> = late.map(|p| (&*p.param.name, p)).collect();
    for a in &f.args {
        let role = a.role.as_ref().filter(|r| r.kind == RoleKind::Unsharded);
        if let Some(p) = role.and_then(|r| late.get(&*r.name)) {
            on_the_way.insert(a.value, (a.value, p.prepared, p));
        }
    }
    let mut done = HashMap::default();
    for n in &f.nodes {
        let Some(&(arg, step, p)) = n.ins.first().and_then(|v| on_the_way.get(v)) else { continue };
        if p.steps.get(step).is_none_or(|s| s.op != n.op || s.ty != *f.ty(n.outs[0])) {
            continue;
        }
        on_the_way.insert(n.outs[0], (arg, step + 1, p));
        if step + 1 == p.steps.len() {
            done.insert(n.outs[0], arg);
        }
    }
    done
}

/// The element type of a value's gradient.
fn wanted(dtype: DType, weight: bool, grad_dtype: DType) -> DType {
    if weight && dtype != DType::F32 { grad_dtype } else { dtype }
}

/// The value in this element type.
fn convert(b: &mut Builder, v: Value, to: DType) -> Value {
    match b.ty(v).dtype == to {
        true => v,
        false => b.push("cast_grad", Cast { to }, &[v]),
    }
}

/// The mirror of those steps of a parameter that are done at step scope and mirrored in backward.
fn mirror_early(b: &mut Builder, p: &ParamLayout, mut d: Value) -> Value {
    let all: Vec<&Type> = std::iter::once(&p.stored).chain(p.steps.iter().map(|s| &s.ty)).collect();
    for i in (p.mirrored..p.prepared).rev() {
        // Only the types of the primal values are asked for: nothing reads them here.
        let ends = [all[i], all[i + 1]].map(|t| {
            let name = Name { grad: false, layer: None, hint: "primal".into(), dup: 0 };
            b.f.value(t.clone(), name)
        });
        let g = p.steps[i].op.def().grad(b, &[ends[0]], &[ends[1]], &[Some(d)]);
        d = g[0].expect("preparations are differentiable");
        b.f.rename(d, Name { grad: true, ..p.name.clone() });
        b.note("each rank keeps its piece of the gradient");
    }
    d
}

/// Values that are made of parameters alone.
pub(super) fn only_weights(f: &Func) -> ValueMap<bool> {
    let mut only = f.per_value(false);
    for a in &f.args {
        only[a.value] = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Unsharded);
    }
    for n in &f.nodes {
        let all = n.ins.iter().all(|v| only[v]);
        n.outs.iter().for_each(|o| only[o] = all);
    }
    only
}

/// What the users of each stage sent, wherever they stand in the program; users come last first.
fn by_stage(f: &Func, parts: &Cotangents) -> Vec<Cotangents> {
    let mut all: Vec<(usize, Cotangents)> = vec![];
    for p in parts {
        let stage = f.scope_info(p.1).stage;
        match all.iter_mut().find(|x| x.0 == stage) {
            Some((_, of_stage)) => of_stage.push(*p),
            None => all.push((stage, Cotangents::from_slice(&[*p]))),
        }
    }
    all.into_iter().map(|x| x.1).collect()
}

/// Sum of the cotangents that the users of a value sent back. Those of another stage are summed
/// there, so that one tensor is sent.
fn total(b: &mut Builder, parts: &Cotangents, of: Value) -> Option<Value> {
    let (home, scope) = (b.f.scope_info(b.scope).stage, b.scope);
    let mut here: Cotangents = Cotangents::new();
    for run in by_stage(b.f, parts) {
        let [.., (_, last)] = run[..] else { continue };
        if run.len() == 1 || b.f.scope_info(last).stage == home {
            here.extend(run);
            continue;
        }
        b.scope = last;
        here.extend(sum(b, &run, of).map(|v| (v, last)));
        b.scope = scope;
    }
    sum(b, &here, of)
}

fn sum(b: &mut Builder, parts: &[(Value, Scope)], of: Value) -> Option<Value> {
    match parts {
        [] => None,
        [one] => Some(one.0),
        many => {
            let many: SmallVec<[Value; 4]> = many.iter().map(|p| p.0).collect();
            let v = b.push("sum", Add::same(), &many);
            let name = b.f.name(of).clone();
            b.f.rename(v, Name { grad: true, dup: 0, ..name });
            Some(v)
        }
    }
}
