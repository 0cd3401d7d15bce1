//! Calls of update rules in `@optimizer_step`: a rule's op, or its text as every rank runs it.
//!
//! Before: `%b2 = add %x, %y : f32[64,160]`, … of `update @muon`, on one device
//! After:  the same on pieces as the parameter is stored, with the collectives that matrix products
//! need
//!
//! What is done to each element is done to pieces. An operand of a matrix product is gathered
//! first, as late as it is not larger, and what is made of it alone is made by every rank: so it is
//! what one rank would make, bit for bit.

mod deal;
mod owners;
mod program;
mod scalars;

pub(super) use scalars::Scalars;

use crate::optim::{Groups, Spread};
use deal::{Deal, Part};
use owners::Owners;
use shardc_ir::attr::Broadcast;
use shardc_ir::builder::Builder;
use shardc_ir::func::{
    Func, Name, Node, ParamLayout, Port, Role, RoleKind, StateName, Value, ValueMap,
};
use shardc_ir::hardware::Hardware;
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::{AtomSet, Mesh, PIPELINE};
use shardc_ir::ops::cast::in_f32;
use shardc_ir::ops::*;
use shardc_ir::text::update::{KeptState, Update};
use shardc_ir::types::{AtomList, Type};
use std::sync::Arc;

/// What a parameter's update takes.
pub(super) struct Given<'a> {
    pub p: &'a ParamLayout,
    pub param: Value,
    pub grad: Value,
    pub states: &'a [Value],
}

/// Values of a function, by those of a rule's.
type Made = ValueMap<Option<Value>>;

/// Parameters that are updated together, by their numbers.
struct Stack {
    of: Vec<usize>,
    by: Arc<Owners>,
}

/// Parameters that are alike, and whose matrices are shared out.
struct Class {
    of: Vec<usize>,
    rule: Arc<Update>,
    /// How a stack of them is split, and how long a rank needs for one matrix.
    list: AtomList,
    work: u64,
    /// Owners of so many of them.
    known: (usize, Arc<Owners>),
}

/// Updates of parameters.
pub(super) struct Updates<'a> {
    groups: &'a Groups,
    hardware: Hardware,
    /// Rules as ranks run them, of parameters of one type.
    programs: HashMap<(*const Update, Type), Arc<Func>>,
}

impl<'a> Updates<'a> {
    pub fn new(groups: &'a Groups, hardware: &Hardware) -> Updates<'a> {
        Updates { groups, hardware: hardware.clone(), programs: HashMap::default() }
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

    /// Makes all new parameters and states; `then` is called behind each parameter's, with its number.
    pub fn all(
        &mut self,
        b: &mut Builder,
        all: &[Given],
        scalars: &mut Scalars,
        mut then: impl FnMut(&mut Builder, usize, &mut Scalars),
    ) {
        let stacks = self.stacks(b.mesh, all);
        for (i, x) in all.iter().enumerate() {
            match &stacks[i] {
                Some(stack) if stack.of[0] == i => {
                    let own: Vec<&Given> = stack.of.iter().map(|&k| &all[k]).collect();
                    let outs = owners::update(b, &own, self.of(x.p), &stack.by, scalars);
                    own.iter().zip(outs).for_each(|(x, outs)| self.results(b, x.p, outs));
                }
                Some(_) => {}
                None => self.update(b, x, scalars),
            }
            then(b, i, scalars);
        }
    }

    /// Of each parameter the stack whose matrices are shared out among ranks, if it is in one.
    fn stacks(&mut self, mesh: &Mesh, all: &[Given]) -> Vec<Option<Arc<Stack>>> {
        let mut of = vec![None; all.len()];
        let mut classes: Vec<((*const Update, &Type), Vec<usize>)> = vec![];
        for (i, x) in all.iter().enumerate() {
            let key = (Arc::as_ptr(self.of(x.p)), &x.p.stored);
            match classes.iter_mut().find(|c| c.0 == key) {
                Some(class) => class.1.push(i),
                None => classes.push((key, vec![i])),
            }
        }
        let shared = classes.into_iter().filter_map(|(_, c)| self.shared_out(mesh, all[c[0]].p, c));
        let mut shared: Vec<Class> = shared.collect();
        shared.sort_by_key(|c| std::cmp::Reverse(c.work));
        let axes = shared.iter().fold(AtomSet::EMPTY, |s, c| s.union(c.list.set()));
        let mut deal = Deal::new(mesh, axes);
        for class in &shared {
            for stack in self.dealt(mesh, all[class.of[0]].p, class, &mut deal) {
                let stack = Arc::new(stack);
                stack.of.iter().for_each(|&i| of[i] = Some(stack.clone()));
            }
        }
        of
    }

    /// The stacks of a class, each with its owners.
    fn dealt(&self, mesh: &Mesh, p: &ParamLayout, class: &Class, deal: &mut Deal) -> Vec<Stack> {
        let Class { of, rule: u, list, work, known } = class;
        let first = Part { count: known.0, turned: false };
        let mut known: Vec<(Part, Option<Arc<Owners>>)> = vec![(first, Some(known.1.clone()))];
        let mut owners = |part: Part| match known.iter().find(|k| k.0 == part) {
            Some((_, known)) => known.clone(),
            None => {
                let Part { count, turned } = part;
                let over = |list| Owners::over(mesh, &self.hardware, u, &p.stored, count, list);
                // Where no exchange leads to ranks from the last on, one leads to them from the first on.
                let by = if turned { over(list.turned()) } else { None };
                let by = by.or_else(|| over(*list)).map(Arc::new);
                known.push((part, by.clone()));
                by
            }
        };
        if u.stack {
            let rows = p.stored.dims[0];
            // Rows that are split already stay with their ranks.
            let may_turn = rows.atoms.is_empty();
            let one = |&i: &usize| {
                let turned = deal.stack(*list, rows.size, *work, may_turn);
                Some(Stack { of: vec![i], by: owners(Part { count: 1, turned })? })
            };
            return of.iter().filter_map(one).collect();
        }
        let mut rest = &of[..];
        let mut stacks = vec![];
        for part in deal.parts(*list, of.len(), *work) {
            let (own, others) = rest.split_at(part.count);
            rest = others;
            stacks.extend(owners(part).map(|by| Stack { of: own.to_vec(), by }));
        }
        stacks
    }

    /// Parameters that are alike, if whole matrices cost less in stacks than apart: over the ranks that hold their
    /// pieces, or over those that hold copies, too.
    fn shared_out(&mut self, mesh: &Mesh, p: &ParamLayout, of: Vec<usize>) -> Option<Class> {
        let u = self.of(p).clone();
        let asked = self.groups.all[u.group].spread;
        if asked == Spread::Gather || u.fused().expect("it was checked").is_some() {
            return None;
        }
        let alone = self.program(mesh, p, &u);
        let alone = program::price(mesh, &self.hardware, &alone);
        let pieces = p.stored.sharded();
        let stages = mesh.axis(PIPELINE).unwrap_or_default();
        let copies = mesh.all().minus(stages).minus(pieces);
        let mut best: (u64, Option<Class>) = (u64::MAX, None);
        for copies in [AtomSet::EMPTY, copies] {
            let ways = mesh.ways(pieces.union(copies));
            let most = if u.stack { 1 } else { ways.min(of.len()) };
            // Stacks of as many as there are ranks, and one of what is left.
            let mut sum = 0u64;
            let mut found: Option<Class> = None;
            for (count, times) in [(most, of.len() / most), (of.len() % most, 1)] {
                if count == 0 {
                    continue;
                }
                let by = Owners::of(mesh, &self.hardware, &u, &p.stored, count, copies);
                let gathered = alone.saturating_mul(count as u64);
                let price = by.as_ref().map(|by| by.price(mesh, &self.hardware));
                let price = price.filter(|&x| asked == Spread::Owners || x < gathered);
                sum = sum.saturating_add(price.unwrap_or(gathered).saturating_mul(times as u64));
                if let (Some(_), None, Some(by)) = (price, &found, by) {
                    let work = by.work(mesh, &self.hardware);
                    let (of, rule, list) = (of.clone(), u.clone(), by.list);
                    found = Some(Class { of, rule, list, work, known: (count, Arc::new(by)) });
                }
            }
            if found.is_some() && sum < best.0 {
                best = (sum, found);
            }
        }
        best.1
    }

    /// Makes the new parameter and states of one.
    fn update(&mut self, b: &mut Builder, x: &Given, scalars: &mut Scalars) {
        let u = self.of(x.p).clone();
        let outs = match u.fused().expect("it was checked") {
            Some(op) => fused(b, x, op, &u, scalars),
            None => {
                let src = self.program(b.mesh, x.p, &u);
                let mut made = Self::begin(b, x, &u, &src, scalars);
                Self::run(b, x.p, &src, src.nodes.iter(), &mut made, scalars);
                Self::end(b, x, &src, &made, scalars)
            }
        };
        self.results(b, x.p, outs);
    }

    /// Names what was made, and returns it.
    fn results(&self, b: &mut Builder, p: &ParamLayout, outs: Vec<Value>) {
        let states = kept(self.of(p), p.stored.rank());
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

    fn program(&mut self, mesh: &Mesh, p: &ParamLayout, u: &Arc<Update>) -> Arc<Func> {
        let key = (Arc::as_ptr(u), p.stored.clone());
        let make = || Arc::new(program::gathered(mesh, &self.hardware, u, &p.stored));
        self.programs.entry(key).or_insert_with(make).clone()
    }

    /// What an update that no op does begins with: the rule's arguments, of which the gradient is unscaled and clipped.
    fn begin(b: &mut Builder, x: &Given, u: &Update, src: &Func, scalars: &mut Scalars) -> Made {
        b.enter("step");
        let [_, _, by, ..] = scalars.over(b, x.p.stored.sharded());
        let mut made: Made = src.per_value(None);
        for a in src.args.iter().filter(|a| kind(a) == Some(RoleKind::Scalar)) {
            let name = a.role.as_ref().map_or("", |r| &r.name);
            made[a.value] = Some(scalars.named(b, name, u));
        }
        b.enter(&x.p.scope);
        let grad = in_f32(b, x.grad);
        let by = by.expect("gradients are multiplied by something");
        let g = b.push("g", Mul { rule: with_number(b.ty(grad).rank()) }, &[grad, by]);
        b.f.rename(g, Name { grad: true, hint: "g".into(), dup: 0, ..x.p.name.clone() });
        let mut states = x.states.iter().copied();
        for a in &src.args {
            match kind(a) {
                Some(RoleKind::Param) => made[a.value] = Some(x.param),
                Some(RoleKind::Grad) => made[a.value] = Some(g),
                Some(RoleKind::State(_)) => made[a.value] = states.next(),
                _other => {}
            }
        }
        made
    }

    /// Runs some lines of a rule for a parameter.
    fn run<'n>(
        b: &mut Builder,
        p: &ParamLayout,
        src: &'n Func,
        nodes: impl Iterator<Item = &'n Node>,
        made: &mut Made,
        scalars: &mut Scalars,
    ) {
        b.enter(&p.scope);
        for n in nodes {
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
            let (scope, note) = (b.scope, n.note.clone());
            b.f.nodes.push(Node { note, ..Node::new(n.op.clone(), &ins, &outs, scope) });
        }
    }

    /// The new parameter and states of a rule that was run; the old ones, if the step does not apply.
    fn end(
        b: &mut Builder,
        x: &Given,
        src: &Func,
        made: &Made,
        scalars: &mut Scalars,
    ) -> Vec<Value> {
        let olds = std::iter::once(x.param).chain(x.states.iter().copied());
        let news = src.results.iter().map(|r| made[r.value].expect("results are made"));
        let pairs: Vec<(Value, Value)> = news.zip(olds).collect();
        let Some(applies) = scalars.each[3] else {
            return pairs.into_iter().map(|x| x.0).collect();
        };
        b.enter(&x.p.scope);
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
}

fn kind(a: &Port) -> Option<RoleKind> {
    a.role.as_ref().map(|r| r.kind)
}

fn kept(u: &Update, rank: usize) -> Vec<KeptState> {
    u.kept(rank).expect("it was checked")
}

/// The type of a state of a parameter that is stored so.
fn state(k: &KeptState, stored: &Type) -> Type {
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
fn fused(b: &mut Builder, x: &Given, op: Op, u: &Update, scalars: &mut Scalars) -> Vec<Value> {
    let axes = x.p.stored.sharded();
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
    b.enter(&x.p.scope);
    let ins: Vec<Value> =
        [x.param, x.grad].into_iter().chain(x.states.iter().copied()).chain(given).collect();
    let names: Vec<&'static str> =
        std::iter::once("new").chain(states.iter().map(|s| s.name())).collect();
    b.push_n(&names, op, &ins).to_vec()
}
