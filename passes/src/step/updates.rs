//! Calls of update rules in `@optimizer_step`: a rule's op, or its text as every rank runs it.
//!
//! Before: `%b2 = add %x, %y : f32[64,160]`, … of `update @muon`, on one device
//! After:  the same on pieces as the parameter is stored, with the collectives that matrix products
//! need
//!
//! What is done to each element is done to pieces. An operand of a matrix product is gathered
//! first, as late as it is not larger, and what is made of it alone is made by every rank: so it is
//! what one rank would make, bit for bit.

use crate::optim::Groups;
use crate::shard::auto::Asked;
use crate::shard::partition::{How, partition};
use crate::shard::zero::{Accumulate, Zero};
use shardc_ir::attr::Broadcast;
use shardc_ir::builder::Builder;
use shardc_ir::func::{
    Func, FuncKind, Name, Node, ParamLayout, Port, Role, RoleKind, Scope, StateName, Value,
    ValueMap,
};
use shardc_ir::hardware::Hardware;
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::cast::in_f32;
use shardc_ir::ops::*;
use shardc_ir::text::update::{Kept, Update};
use shardc_ir::types::{AtomList, Type};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What updates are given of a step: the rate, the number of the step, what gradients are
/// multiplied by, whether it applies, and what gradients that are shown are multiplied by.
pub(super) type Each = [Option<Value>; 5];

/// The step's scalars, fanned out over the atoms that split a parameter: one fan_out per set.
pub(super) struct Scalars {
    pub each: Each,
    pub grad_norm: Value,
    fanned: BTreeMap<AtomSet, Each>,
    others: BTreeMap<(Value, AtomSet), Value>,
    /// Rates of groups.
    rates: BTreeMap<usize, Value>,
}

impl Scalars {
    pub fn new(each: Each, grad_norm: Value) -> Scalars {
        let (fanned, others, rates) = Default::default();
        Scalars { each, grad_norm, fanned, others, rates }
    }

    pub fn over(&mut self, b: &mut Builder, axes: AtomSet) -> Each {
        let own = self.each;
        if axes.is_empty() {
            return own;
        }
        let mut fan_out = |v| b.push("scalar_f", FanOut { axes }, &[v]);
        *self.fanned.entry(axes).or_insert_with(|| own.map(|v| v.map(&mut fan_out)))
    }

    /// One of them, or of the rates of groups.
    fn one(&mut self, b: &mut Builder, v: Value, axes: AtomSet) -> Value {
        if axes.is_empty() {
            return v;
        }
        if let Some(k) = self.each.iter().position(|e| *e == Some(v)) {
            return self.over(b, axes)[k].expect("it is there");
        }
        let mut fan_out = || b.push("scalar_f", FanOut { axes }, &[v]);
        *self.others.entry((v, axes)).or_insert_with(&mut fan_out)
    }

    /// A scalar by the name that rules have for it.
    fn named(&mut self, b: &mut Builder, name: &str, u: &Update) -> Value {
        let [lr, step, by, applies, _] = self.each;
        let (lr, factor) = (lr.expect("a step has a rate"), u.lr);
        match name {
            "lr" if factor == 1.0 => lr,
            "lr" => *self
                .rates
                .entry(u.group)
                .or_insert_with(|| b.push("lr_of_group", Scale { by: factor }, &[lr])),
            "step" => step.expect("a step has a number"),
            "g_scale" => by.expect("a step has it"),
            "applies" => applies.expect("it is asked for where there is one"),
            "grad_norm" => self.grad_norm,
            other => panic!("an update takes {other}, which no step has"),
        }
    }
}

/// Updates of parameters.
pub(super) struct Updates<'a> {
    groups: &'a Groups,
    hardware: Hardware,
    /// Rules as ranks run them, of parameters of one type.
    programs: HashMap<(*const Update, Type), Arc<Func>>,
}

impl<'a> Updates<'a> {
    pub fn new(groups: &'a Groups) -> Updates<'a> {
        Updates { groups, hardware: Hardware::default(), programs: HashMap::default() }
    }

    fn of(&self, p: &ParamLayout) -> &'a Arc<Update> {
        &self.groups.of[&*p.param.name]
    }

    /// What is kept of a parameter, each with its type.
    pub fn states(&self, p: &ParamLayout) -> Vec<(StateName, Type)> {
        kept(self.of(p), p.stored.rank())
            .into_iter()
            .map(|k| (k.name, state(&k, &p.stored)))
            .collect()
    }

    /// Makes the new parameter and states.
    pub fn update(
        &mut self,
        b: &mut Builder,
        p: &ParamLayout,
        [param, grad]: [Value; 2],
        state: &[Value],
        scalars: &mut Scalars,
    ) {
        let u = self.of(p).clone();
        let states = kept(&u, p.stored.rank());
        let op = u.fused().expect("it was checked");
        let outs = match op {
            Some(op) => fused(b, p, op, &u, [param, grad], state, scalars),
            None => self.written(b, p, &u, [param, grad], state, scalars),
        };
        let states = states.iter().map(|k| (RoleKind::State(k.name), ["_", k.name.name()]));
        let all = std::iter::once((RoleKind::Param, ["", ""])).chain(states);
        for (value, (kind, [dash, what])) in outs.into_iter().zip(all) {
            let hint = [&p.name.hint, dash, what, "_new"].concat().into();
            b.f.rename(value, Name { hint, ..p.name.clone() });
            let role = Some(Role { kind, ..p.param.clone() });
            b.f.results.push(Port { value, role });
        }
        b.enter("step");
    }

    /// By the text of its rule.
    fn written(
        &mut self,
        b: &mut Builder,
        p: &ParamLayout,
        u: &Arc<Update>,
        [param, grad]: [Value; 2],
        state: &[Value],
        scalars: &mut Scalars,
    ) -> Vec<Value> {
        b.enter("step");
        let axes = p.stored.sharded();
        let [_, _, by, ..] = scalars.over(b, axes);
        let applies = scalars.each[3];
        let src = self.program(b.mesh, p, u);
        let mut made: ValueMap<Option<Value>> = src.per_value(None);
        for a in src.args.iter().filter(|a| kind(a) == Some(RoleKind::Scalar)) {
            let name = a.role.as_ref().map_or("", |r| &r.name);
            made[a.value] = Some(scalars.named(b, name, u));
        }
        b.enter(&p.scope);
        let grad = in_f32(b, grad);
        let by = by.expect("gradients are multiplied by something");
        let g = b.push("g", Mul { rule: with_number(b.ty(grad).rank()) }, &[grad, by]);
        b.f.rename(g, Name { grad: true, hint: "g".into(), dup: 0, ..p.name.clone() });
        let mut states = state.iter().copied();
        for a in &src.args {
            match kind(a) {
                Some(RoleKind::Param) => made[a.value] = Some(param),
                Some(RoleKind::Grad) => made[a.value] = Some(g),
                Some(RoleKind::State(_)) => made[a.value] = states.next(),
                _scalar => {}
            }
        }
        for n in &src.nodes {
            let ins: Vec<Value> = n.ins.iter().map(|v| made[v].expect("made before")).collect();
            if let (Op::FanOut(f), true) = (&n.op, src.args.iter().any(|a| a.value == n.ins[0])) {
                made[n.outs[0]] = Some(scalars.one(b, ins[0], f.axes));
                continue;
            }
            let mut outs = vec![];
            for o in &n.outs {
                let hint = [&p.name.hint, "_", &src.name(*o).hint].concat().into();
                let name = Name { grad: false, hint, dup: 0, ..p.name.clone() };
                let new = b.f.value(src.ty(*o).clone(), name);
                made[o] = Some(new);
                outs.push(new);
            }
            let scope = b.scope;
            let note = n.note.clone();
            b.f.nodes.push(Node { note, ..Node::new(n.op.clone(), &ins, &outs, scope) });
        }
        let olds = std::iter::once(param).chain(state.iter().copied());
        let news = src.results.iter().map(|r| made[r.value].expect("results are made"));
        let pairs: Vec<(Value, Value)> = news.zip(olds).collect();
        let Some(applies) = applies else { return pairs.into_iter().map(|x| x.0).collect() };
        let select = |(new, old): (Value, Value)| {
            if new == old {
                return old;
            }
            // A state may be split over fewer atoms than its parameter.
            let applies = scalars.one(b, applies, b.ty(new).sharded());
            let l = letters(b.ty(new).rank());
            let rule = Broadcast::new(&format!(",{l},{l}->{l}"), &[0, l.len(), l.len()]);
            b.push("kept", Select { rule }, &[applies, new, old])
        };
        pairs.into_iter().map(select).collect()
    }

    fn program(&mut self, mesh: &Mesh, p: &ParamLayout, u: &Arc<Update>) -> Arc<Func> {
        let key = (Arc::as_ptr(u), p.stored.clone());
        if let Some(known) = self.programs.get(&key) {
            return known.clone();
        }
        let mut whole = u.func(&p.stored.sizes()).expect("it was checked");
        lay_out(&mut whole, u, &p.stored);
        let roles: Vec<Option<Role>> = whole.args.iter().map(|a| a.role.clone()).collect();
        whole.args.iter_mut().chain(&mut whole.results).for_each(|p| p.role = None);
        let prices = Asked {
            mesh,
            hardware: &self.hardware,
            trains: false,
            states: 0,
            microbatches: 1,
            budget: None,
        };
        let zero = Zero::of(0, Accumulate::None, 1);
        let how = How::Asked { zero, grid: AtomSet::EMPTY, prices };
        let mut func = partition(mesh, &whole, &|_| true, &|_| false, how).forward;
        func.args.iter_mut().zip(roles).for_each(|(a, role)| a.role = role);
        write_last(&mut func);
        func.kind = FuncKind::OptimizerStep;
        let program = Arc::new(func);
        self.programs.insert(key, program.clone());
        program
    }
}

fn kind(a: &Port) -> Option<RoleKind> {
    a.role.as_ref().map(|r| r.kind)
}

fn kept(u: &Update, rank: usize) -> Vec<Kept> {
    u.kept(rank).expect("it was checked")
}

/// The type of a state of a parameter that is stored so.
fn state(k: &Kept, stored: &Type) -> Type {
    let mut ty = Type::new(k.dtype, &[]);
    ty.dims = k.dims.iter().map(|&d| stored.dims[d]).collect();
    ty
}

fn letters(rank: usize) -> String {
    ('a'..).take(rank).collect()
}

/// The rule of an op of a tensor and a number.
fn with_number(rank: usize) -> Broadcast {
    let l = letters(rank);
    Broadcast::new(&format!("{l},->{l}"), &[rank, 0])
}

/// By the op that does all of it.
fn fused(
    b: &mut Builder,
    p: &ParamLayout,
    op: Op,
    u: &Update,
    [param, grad]: [Value; 2],
    state: &[Value],
    scalars: &mut Scalars,
) -> Vec<Value> {
    let axes = p.stored.sharded();
    let [.., applies, _] = scalars.over(b, axes);
    let states = op.def().states();
    // Of the scalars an optimizer takes those that it has operands for.
    let names = op.operands()[2 + states.len()..].iter();
    let given: Vec<Value> = names
        .filter(|n| **n != "applies" || applies.is_some())
        .map(|name| {
            let own = scalars.named(b, name, u);
            scalars.one(b, own, axes)
        })
        .collect();
    b.enter(&p.scope);
    let ins: Vec<Value> =
        [param, grad].into_iter().chain(state.iter().copied()).chain(given).collect();
    let names: Vec<&'static str> =
        std::iter::once("new").chain(states.iter().map(|s| s.name())).collect();
    b.push_n(&names, op, &ins).to_vec()
}

/// Lets no node read what a result was before behind the node that makes the result, which is
/// written over it: that goes to the end, or where others need it a copy does.
fn write_last(f: &mut Func) {
    let is_old = |a: &&Port| matches!(kind(a), Some(RoleKind::Param | RoleKind::State(_)));
    let olds: Vec<Value> = f.args.iter().filter(is_old).map(|a| a.value).collect();
    for (k, &old) in olds.iter().enumerate() {
        let new = f.results[k].value;
        // The old value of another one.
        if new != old && f.args.iter().any(|a| a.value == new) {
            let copy = copied(f, new, 0);
            f.results[k].value = copy;
        }
    }
    // Two results are not one memory.
    for k in 1..olds.len() {
        let new = f.results[k].value;
        if f.results[..k].iter().any(|r| r.value == new) {
            f.results[k].value = copied(f, new, f.nodes.len());
        }
    }
    let mut moved = vec![false; olds.len()];
    loop {
        let early = |k: usize| {
            let new = f.results[k].value;
            let at = f.nodes.iter().position(|n| n.outs.contains(&new))?;
            let late = f.nodes[at + 1..].iter().any(|n| n.ins.contains(&olds[k]));
            late.then_some((k, at, new))
        };
        let Some((k, at, new)) = (0..olds.len()).find_map(early) else { return };
        let read = f.nodes.iter().any(|n| n.ins.contains(&new));
        if read || moved[k] {
            f.results[k].value = copied(f, new, f.nodes.len());
        } else {
            let node = f.nodes.remove(at);
            f.nodes.push(node);
            moved[k] = true;
        }
    }
}

/// A copy of a value, which the node at this place makes.
fn copied(f: &mut Func, v: Value, at: usize) -> Value {
    let (ty, name) = (f.ty(v).clone(), f.name(v).clone());
    let copy = f.value(ty, name);
    f.nodes.insert(at, Node::new(Scale { by: 1.0 }, &[v], &[copy], Scope(0)));
    copy
}

/// Says how the values of a rule lie: arguments and results as they are stored, what matrix
/// products read and what is made of it alone whole, all else in pieces.
fn lay_out(f: &mut Func, u: &Update, stored: &Type) {
    let first = usize::from(u.stack);
    let mut states = kept(u, stored.rank()).into_iter();
    let mut fixed: ValueMap<Option<Type>> = f.per_value(None);
    for (a, r) in f.args.iter().map(|a| (a.value, kind(a))) {
        fixed[a] = match r {
            Some(RoleKind::Param | RoleKind::Grad) => Some(stored.clone()),
            Some(RoleKind::State(_)) => states.next().map(|k| state(&k, stored)),
            _scalar => None,
        };
    }
    let outputs =
        f.args.iter().filter(|a| matches!(kind(a), Some(RoleKind::Param | RoleKind::State(_))));
    let ends: Vec<(Value, Value)> =
        outputs.zip(&f.results).map(|(a, r)| (r.value, a.value)).collect();
    let is_whole = whole(f, first);
    for a in &f.args {
        if let Some(ty) = &fixed[a.value] {
            f.values[a.value].ty.dims.clone_from(&ty.dims);
        }
    }
    for i in 0..f.nodes.len() {
        let n = f.nodes[i].clone();
        let ranks: Vec<usize> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
        let rule = n.op.def().rule(&ranks).into_owned();
        for (k, &o) in n.outs.iter().enumerate() {
            for (d, group) in rule.outs[k].iter().enumerate() {
                let of = n.ins.iter().zip(&rule.ins).filter_map(|(v, dims)| {
                    let at = dims.iter().position(|g| g == group)?;
                    Some(f.ty(*v).dims[at].atoms)
                });
                let atoms = of.into_iter().find(|a| !a.is_empty());
                let keep = !is_whole[o] || d < first;
                let atoms = atoms.filter(|_| keep).unwrap_or(AtomList::EMPTY);
                f.values[o].ty.dims[d].atoms = atoms;
            }
        }
    }
    for (new, old) in ends {
        f.values[new].ty.dims = f.ty(old).dims.clone();
    }
}

/// Values that every rank has whole but for the first dims.
fn whole(f: &Func, first: usize) -> ValueMap<bool> {
    let mut is = f.per_value(false);
    let makers = f.makers();
    let large = |v: &Value| f.ty(*v).rank() > first;
    loop {
        let before = is.clone();
        for n in f.nodes.iter().rev() {
            if n.op.facts().is_matrix_product() {
                n.ins.iter().for_each(|v| is[v] = true);
                n.outs.iter().for_each(|v| is[v] = true);
            }
        }
        // What is made of one value alone is gathered as that, as early as it is not larger.
        for v in f.values.ids().filter(|v| before[v]).collect::<Vec<_>>() {
            let bytes = |v: Value| f.ty(v).elements() * f.ty(v).dtype.bytes();
            let (mut chain, mut at) = (vec![], v);
            while let Some(u) = makers[at] {
                let own: Vec<Value> =
                    f.nodes[u as usize].ins.iter().copied().filter(large).collect();
                match &own[..] {
                    &[one] if makers[one].is_some() => at = one,
                    _several => break,
                }
                chain.push(at);
            }
            let least = chain.iter().rposition(|&x| bytes(x) <= bytes(v));
            chain[..least.map_or(0, |k| k + 1)].iter().for_each(|&x| is[x] = true);
        }
        for n in &f.nodes {
            let mut own = n.ins.iter().filter(|v| large(v)).peekable();
            if own.peek().is_some() && own.all(|v| is[v]) {
                n.outs.iter().for_each(|v| is[v] = true);
            }
        }
        if is == before {
            return is;
        }
    }
}
