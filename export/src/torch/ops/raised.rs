//! Calls that stand for several ops of a plan: which there are in its functions, by [`super::patterns`].
//!
//! Backward of a plan may read what forward has made of a value on the way: calls read the value itself, so that nothing is
//! saved beside it. What is saved and not read any more is not made.

use super::is_nothing;
use super::patterns::{BACKWARD, FORWARD, LOSS, Pattern};
use super::search::Found;
use crate::torch::dims::{items, number};
use crate::torch::seen::same;
use shardc_ir::func::{Func, Port, Role, RoleKind, Value, ValueMap};
use shardc_ir::ops::Op;
use shardc_ir::plan::Plan;
use shardc_ir::types::DType;
use std::collections::{BTreeMap, BTreeSet};

/// A call that stands for several nodes of a function.
#[derive(Clone)]
pub(in crate::torch) struct Call {
    /// It as Python, with names of operands in braces; none is the sum of squares of all operands.
    template: Option<&'static str>,
    names: Vec<&'static str>,
    numbers: BTreeMap<&'static str, f64>,
    pub ins: Vec<Value>,
    pub outs: Vec<Value>,
    /// The operand over which the first result is written.
    pub over: Option<usize>,
    /// The one over which it may be written.
    pub spare: Option<usize>,
    /// The nodes, and the one in whose place it stands.
    nodes: BTreeSet<usize>,
    at: usize,
    /// Nodes that go with them if nothing else reads what they make.
    shared: BTreeSet<usize>,
}

/// What is raised in the functions of a plan.
pub(in crate::torch) struct Raised {
    by_func: BTreeMap<String, Vec<Call>>,
    /// What is saved for backward in a plan, and nothing reads.
    unread: BTreeSet<Role>,
}

/// A function, with who makes and who reads its values.
pub(super) struct Graph<'a> {
    pub f: &'a Func,
    same: ValueMap<Value>,
    pub maker: ValueMap<Option<usize>>,
    pub readers: ValueMap<Vec<usize>>,
}

/// The calls of each function.
type Calls = Vec<Vec<Call>>;

impl Raised {
    pub fn of(plan: &Plan) -> Raised {
        let graphs: Vec<Graph> = plan.module.funcs.iter().map(Graph::new).collect();
        let mut calls: Calls = graphs.iter().map(|_| vec![]).collect();
        let [loss, loss_grad, exponentials] = LOSS;
        let none = BTreeSet::new();
        for (g, own) in graphs.iter().zip(&mut calls) {
            let patterns = BACKWARD.iter().copied().chain([loss_grad]);
            patterns.for_each(|p| g.raise(p, &graphs, &none, own));
            g.squares(own);
        }
        let unread = unread(&graphs, &calls);
        for g in 0..graphs.len() {
            let mut own = std::mem::take(&mut calls[g]);
            FORWARD.iter().for_each(|p| graphs[g].raise(p, &graphs, &unread, &mut own));
            calls[g] = own;
            for call in graphs[g].found(loss, &graphs, &unread, &calls[g]) {
                if is_for(&graphs, &calls, (g, &call), loss_grad) {
                    calls[g].push(call);
                }
            }
        }
        // Twice: one that is undone may be another's.
        for change in [false, true] {
            for (g, graph) in graphs.iter().enumerate() {
                for c in 0..calls[g].len() {
                    let (is, exp) = (calls[g][c].is(loss_grad), calls[g][c].ins.get(1).copied());
                    let Some(exp) = exp.filter(|_| is) else { continue };
                    if made_by(&graphs, &mut calls, (g, exp), loss) || !change {
                        continue;
                    }
                    let call = &mut calls[g][c];
                    call.template = Some(exponentials.call);
                    call.names.push("sum");
                    call.ins.push(graph.sum(call));
                }
            }
        }
        for (g, own) in graphs.iter().zip(&mut calls) {
            g.drop_shared(own);
        }
        let unread = self::unread(&graphs, &calls);
        let by_func = graphs.iter().zip(calls).map(|(g, own)| (g.f.name.clone(), own));
        Raised { by_func: by_func.collect(), unread }
    }

    /// False of what a function leaves and nothing reads.
    pub fn is_kept(&self, role: &Role) -> bool {
        !self.unread.contains(role)
    }

    /// The nodes of a function that calls stand for, with the call where it stands.
    pub fn of_func(&self, f: &Func) -> BTreeMap<usize, Option<&Call>> {
        let mut out = BTreeMap::new();
        for c in self.by_func.get(&f.name).into_iter().flatten() {
            out.extend(c.nodes.iter().map(|n| (*n, None)));
        }
        for c in self.by_func.get(&f.name).into_iter().flatten() {
            out.insert(c.at, Some(c));
        }
        out
    }
}

/// What functions save and none reads.
fn unread(graphs: &[Graph], calls: &Calls) -> BTreeSet<Role> {
    let read: BTreeSet<&Role> =
        graphs.iter().zip(calls).flat_map(|(g, own)| g.roles_read(own)).collect();
    let saved = graphs.iter().flat_map(|g| &g.f.results).filter_map(|r| r.role.as_ref());
    saved.filter(|r| r.kind == RoleKind::Stash && !read.contains(r)).cloned().collect()
}

/// Whether all that reads the second result of a call is calls of this pattern.
fn is_for(graphs: &[Graph], calls: &Calls, (of, call): (usize, &Call), p: &Pattern) -> bool {
    let v = call.outs[1];
    graphs.iter().zip(calls).all(|(g, own)| {
        let same = std::ptr::eq(g.f, graphs[of].f);
        let here = g.as_here(v, &graphs[of]);
        here.into_iter().flat_map(|v| &g.readers[v]).all(|n| {
            own.iter().any(|c| c.is(p) && c.nodes.contains(n)) || (same && call.nodes.contains(n))
        })
    })
}

/// Whether calls of this pattern make a value, wherever it comes from. They all do, or none: if not, those that do are undone.
fn made_by(graphs: &[Graph], calls: &mut Calls, (of, v): (usize, Value), p: &Pattern) -> bool {
    let mut makers = vec![(of, v)];
    if graphs[of].f.args.iter().any(|a| graphs[of].same[a.value] == v) {
        let roles: Vec<&Role> = graphs[of].roles(v).collect();
        let known = |r: &&Port| r.role.as_ref().is_some_and(|r| roles.contains(&r));
        let made = |(g, graph): (usize, &Graph)| {
            let made = graph.f.results.iter().filter(known);
            made.map(|r| (g, graph.same[r.value])).collect::<Vec<_>>()
        };
        makers = graphs.iter().enumerate().flat_map(made).collect();
    }
    let is = |c: &Call, v: Value| c.is(p) && c.outs.contains(&v);
    let all = makers.iter().all(|(g, v)| calls[*g].iter().any(|c| is(c, *v)));
    if !all {
        makers.iter().for_each(|(g, v)| calls[*g].retain(|c| !is(c, *v)));
    }
    all && !makers.is_empty()
}

impl Call {
    /// True of a product of matrices.
    pub fn is_linear(&self) -> bool {
        self.template.is_some_and(|t| t.starts_with("F.linear") || t.contains("addmm_"))
    }

    /// True of a call that begins so.
    pub fn is_of(&self, begins: &str) -> bool {
        self.template.is_some_and(|t| t.starts_with(begins))
    }

    fn is(&self, p: &Pattern) -> bool {
        self.template == Some(p.call)
    }

    /// Whether it asks where a piece begins.
    pub fn has_start(&self) -> bool {
        self.template.is_some_and(|t| t.contains("{start}"))
    }

    /// What it does, without operands.
    pub fn what(&self) -> String {
        format!("{:?}{:?}", self.template, self.numbers)
    }

    /// It as Python, with its operands; `start` is where this rank's piece of the last dim of its first result begins, `over` the
    /// operand over which it is written.
    pub fn text(&self, x: &[String], start: &str, over: Option<usize>) -> String {
        let Some(template) = self.template else {
            let all = items(x).join(", ");
            return format!("torch.stack(torch._foreach_norm([{all}])).square().sum()");
        };
        let mut parts = template.split('{');
        let mut out = parts.next().unwrap_or_default().to_string();
        for part in parts {
            let (name, rest) = part.split_once('}').unwrap_or((part, ""));
            match self.names.iter().position(|n| *n == name) {
                Some(i) => out += &x[i],
                None if name == "start" => out += start,
                None => out += &number(self.numbers[name]),
            }
            out += rest;
        }
        if let (Some(i), Some(open)) = (over.filter(|_| self.over.is_none()), out.strip_suffix(')'))
        {
            out = format!("{open}, grad_input={})", x[i]);
        }
        out
    }
}

impl<'a> Graph<'a> {
    fn new(f: &'a Func) -> Graph<'a> {
        let same = same(f);
        let (mut maker, mut readers) = (f.per_value(None), f.per_value(vec![]));
        for (i, n) in f.nodes.iter().enumerate().filter(|(_, n)| !is_nothing(&n.op)) {
            for v in &n.ins {
                let of: &mut Vec<usize> = &mut readers[same[*v]];
                if of.last() != Some(&i) {
                    of.push(i);
                }
            }
            n.outs.iter().for_each(|v| maker[same[*v]] = Some(i));
        }
        // What is written over arguments is no other value.
        f.args.iter().for_each(|a| maker[same[a.value]] = None);
        Graph { f, same, maker, readers }
    }

    pub fn ins(&self, node: usize) -> Vec<Value> {
        self.f.nodes[node].ins.iter().map(|v| self.same[*v]).collect()
    }

    pub fn out(&self, node: usize) -> Value {
        self.same[self.f.nodes[node].outs[0]]
    }

    /// The roles under which others know a value.
    fn roles(&self, v: Value) -> impl Iterator<Item = &'a Role> {
        let ports = self.f.args.iter().chain(&self.f.results);
        ports.filter(move |p| self.same[p.value] == v).filter_map(|p| p.role.as_ref())
    }

    /// What another function's value is in this one.
    fn as_here(&self, v: Value, of: &Graph) -> Vec<Value> {
        if std::ptr::eq(self.f, of.f) {
            return vec![v];
        }
        let roles: Vec<&Role> = of.roles(v).collect();
        let args = self.f.args.iter();
        let known = args.filter(|a| a.role.as_ref().is_some_and(|r| roles.contains(&r)));
        known.map(|a| self.same[a.value]).collect()
    }

    fn is_result(&self, v: Value, unread: &BTreeSet<Role>) -> bool {
        let kept = |r: &&Port| r.role.as_ref().is_none_or(|r| !unread.contains(r));
        self.f.results.iter().filter(kept).any(|r| self.same[r.value] == v)
    }

    /// The roles of arguments that nodes read which no call stands for, or calls.
    fn roles_read(&self, calls: &[Call]) -> Vec<&'a Role> {
        let gone = |n: &usize| calls.iter().any(|c| c.nodes.contains(n));
        let is_read = |v: Value| {
            !self.readers[v].iter().all(gone)
                || calls.iter().any(|c| c.ins.contains(&v))
                || self.is_result(v, &BTreeSet::new())
        };
        let args = self.f.args.iter().filter(|a| is_read(self.same[a.value]));
        args.filter_map(|a| a.role.as_ref()).collect()
    }

    /// The size of the last dim of a value, whole on each rank.
    pub fn width(&self, v: Value) -> Option<usize> {
        let d = self.f.ty(v).dims.last()?;
        d.atoms.is_empty().then_some(d.size)
    }

    /// Raises what matches a pattern.
    fn raise(&self, p: &Pattern, all: &[Graph], unread: &BTreeSet<Role>, own: &mut Vec<Call>) {
        own.extend(self.found(p, all, unread, own));
    }

    /// The calls that a pattern makes beside those that there are.
    fn found(
        &self,
        p: &Pattern,
        all: &[Graph],
        unread: &BTreeSet<Role>,
        own: &[Call],
    ) -> Vec<Call> {
        let mut new: Vec<Call> = vec![];
        for root in 0..self.f.nodes.len() {
            let found = p.find(self, all, root);
            let free = |f: &Found| {
                let mut others = own.iter().chain(&new);
                others.all(|c| c.nodes.is_disjoint(&f.nodes))
            };
            let found = found.filter(free);
            let call = found.and_then(|found| self.call(p, &found, (root, all), unread, own));
            new.extend(call);
        }
        new
    }

    /// A call for what was found, if all that it leaves out is not needed elsewhere, and there is a place for it: behind what
    /// makes its operands and before who reads its results.
    fn call(
        &self,
        p: &Pattern,
        found: &Found,
        (root, all): (usize, &[Graph]),
        unread: &BTreeSet<Role>,
        own: &[Call],
    ) -> Option<Call> {
        let nodes = &found.nodes;
        let value = |n: &'static str| match found.rest {
            Some((name, stands)) if name == n => stands,
            _whole => found.values[n],
        };
        let outs: Vec<Value> = p.outs.iter().map(|n| value(n)).collect();
        let names = p.ins(found);
        let ins: Vec<Value> = names.iter().map(|n| found.values[n]).collect();
        let mut types = ins.iter().chain(&outs).map(|v| self.f.ty(*v).dtype);
        let first = types.clone().find(|t| *t != DType::I32);
        let alike = types.all(|t| t == DType::I32 || Some(t) == first);
        let gone =
            |n: &usize| *n == root || nodes.contains(n) || own.iter().any(|c| c.nodes.contains(n));
        let inner = nodes.iter().map(|n| self.out(*n)).filter(|v| !outs.contains(v));
        let mut unneeded = inner.map(|v| {
            self.readers[v].iter().all(gone)
                && !self.is_result(v, unread)
                && !own.iter().any(|c| c.ins.contains(&v))
        });
        if !alike || !unneeded.all(|is| is) {
            return None;
        }
        let at = self.place(nodes.iter().rev(), nodes, (&ins, &outs))?;
        let over = p.over.map(|name| found.values[name]);
        if over.is_some_and(|v| v != outs[0] && !self.ends(v, (nodes, at), all)) {
            return None;
        }
        let operand = |name: Option<&str>| names.iter().position(|n| Some(*n) == name);
        let (over, spare) = (operand(p.over), operand(p.spare));
        // What is added into an argument is no value of its own.
        let raw = self.f.nodes[root].outs[0];
        let outs = if self.same[raw] == raw { outs } else { vec![raw] };
        let (template, numbers, nodes) = (Some(p.call), found.numbers.clone(), nodes.clone());
        let shared = found.shared.clone();
        Some(Call { template, names, numbers, ins, outs, over, spare, nodes, at, shared })
    }

    /// The first of these nodes in whose place a call may stand.
    fn place<'n>(
        &self,
        mut of: impl Iterator<Item = &'n usize>,
        nodes: &BTreeSet<usize>,
        (ins, outs): (&[Value], &[Value]),
    ) -> Option<usize> {
        let made = ins.iter().filter_map(|v| self.maker[*v]).max();
        let readers = outs.iter().flat_map(|v| &self.readers[*v]);
        let read = readers.filter(|r| !nodes.contains(r)).min();
        of.find(|at| made.is_none_or(|m| m < **at) && read.is_none_or(|r| r > *at)).copied()
    }

    /// Whether a value is gone behind these nodes, here and elsewhere.
    fn ends(&self, v: Value, (nodes, at): (&BTreeSet<usize>, usize), all: &[Graph]) -> bool {
        let here = self.readers[v].iter().all(|n| nodes.contains(n) || *n < at)
            && !self.is_result(v, &BTreeSet::new());
        let arg = self.f.args.iter().any(|a| self.same[a.value] == v);
        let elsewhere = |g: &Graph| {
            g.f.kind != self.f.kind && g.as_here(v, self).iter().any(|v| !g.readers[*v].is_empty())
        };
        let fresh = match self.maker[v] {
            Some(n) => matches!(self.f.nodes[n].op, Op::Exp(_)),
            None => self.roles(v).all(|r| r.kind == RoleKind::Stash),
        };
        here && fresh && !(arg && all.iter().any(elsewhere))
    }

    /// Drops what calls share with others, where there are none.
    fn drop_shared(&self, own: &mut [Call]) {
        let all: BTreeSet<usize> = own.iter().flat_map(|c| c.shared.iter().copied()).collect();
        for n in all.into_iter().rev() {
            let v = self.out(n);
            let gone = |n: &usize| own.iter().any(|c| c.nodes.contains(n));
            let read = !self.readers[v].iter().all(gone)
                || own.iter().any(|c| c.ins.contains(&v))
                || self.is_result(v, &BTreeSet::new());
            if let Some(c) = own.iter_mut().find(|c| c.shared.contains(&n)).filter(|_| !read) {
                c.nodes.insert(n);
            }
        }
    }

    /// What exponentials of a gradient of the loss add up to.
    fn sum(&self, call: &Call) -> Value {
        let by = call.nodes.iter().find(|n| matches!(self.f.nodes[**n].op, Op::Div(_)));
        self.ins(*by.expect("the pattern has one"))[1]
    }

    /// Sums of squares of arguments: the norm of gradients.
    fn squares(&self, own: &mut Vec<Call>) {
        for (i, n) in self.f.nodes.iter().enumerate() {
            if !matches!(n.op, Op::Add(_)) || self.f.ty(n.outs[0]).rank() > 0 {
                continue;
            }
            let square = |v: &Value| {
                let node = self.maker[*v]?;
                let [a, b] = self.ins(node)[..] else { return None };
                let argument = self.maker[a].is_none() && self.f.ty(a).dtype == DType::F32;
                let is = matches!(self.f.nodes[node].op, Op::Dot(_)) && a == b && argument;
                let alone = self.readers[*v][..] == [i] && !self.is_result(*v, &BTreeSet::new());
                (is && alone).then_some((node, a))
            };
            let all: Option<Vec<(usize, Value)>> = self.ins(i).iter().map(square).collect();
            let Some(all) = all else { continue };
            let nodes: BTreeSet<usize> = all.iter().map(|x| x.0).chain([i]).collect();
            let (ins, outs): (Vec<Value>, _) =
                (all.into_iter().map(|x| x.1).collect(), vec![self.out(i)]);
            // As early as may be: what reads gradients behind it may write over them.
            let Some(at) = self.place(nodes.iter(), &nodes, (&ins, &outs)) else { continue };
            let (names, numbers) = (vec![], BTreeMap::new());
            let (template, over, spare, shared) = (None, None, None, BTreeSet::new());
            let made = Call { template, names, numbers, ins, outs, over, spare, nodes, at, shared };
            own.push(made);
        }
    }

    /// True if this function makes a value of another as the product of two others.
    pub fn is_product(&self, of: &Graph, [product, a, b]: [Value; 3]) -> bool {
        let is = |own: Value, v: Value| match std::ptr::eq(self.f, of.f) {
            true => own == v,
            false => self.roles(own).any(|r| of.roles(v).any(|s| r == s)),
        };
        let nodes = (0..self.f.nodes.len()).filter(|n| matches!(self.f.nodes[*n].op, Op::Mul(_)));
        let mut made = nodes.filter(|n| is(self.out(*n), product));
        made.any(|n| matches!(self.ins(n)[..], [x, y] if is(x, a) && is(y, b)))
    }
}
