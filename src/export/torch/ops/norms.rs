//! Norms, which a plan has as sums, products and roots: forward and backward as one call of `shardc.torch` each.
//!
//! Backward of a plan reads what forward has made of `x` by the root. The call reads `x` itself, so that nothing is saved beside
//! `x` and the root.

use super::is_nothing;
use crate::export::torch::dims::number;
use crate::export::torch::seen::same;
use shardc_ir::func::{Func, Port, Role, RoleKind, Value, ValueMap};
use shardc_ir::ops::Op;
use shardc_ir::plan::Plan;
use shardc_ir::rule::Rule;
use std::collections::{BTreeMap, BTreeSet};

/// A call that stands for several nodes of a function.
#[derive(Clone)]
pub(in crate::export::torch) struct Call {
    name: &'static str,
    pub ins: Vec<Value>,
    pub outs: Vec<Value>,
    /// What it takes behind its operands.
    more: String,
    /// The nodes, and the one in whose place it stands.
    nodes: BTreeSet<usize>,
    at: usize,
}

/// What is raised in the functions of a plan.
pub(in crate::export::torch) struct Raised {
    by_func: BTreeMap<String, Vec<Call>>,
    /// What is saved for backward in a plan, and nothing reads.
    unread: BTreeSet<Role>,
}

/// A function, with who makes and who reads its values.
struct Graph<'a> {
    f: &'a Func,
    same: ValueMap<Value>,
    maker: ValueMap<Option<usize>>,
    readers: ValueMap<Vec<usize>>,
}

impl Raised {
    pub fn of(plan: &Plan) -> Raised {
        let graphs: Vec<Graph> = plan.module.funcs.iter().map(Graph::new).collect();
        let mut calls: Vec<Vec<Call>> = graphs.iter().map(|g| g.backward(&graphs)).collect();
        let read: BTreeSet<&Role> =
            graphs.iter().zip(&calls).flat_map(|(g, own)| g.roles_read(own)).collect();
        let saved = graphs.iter().flat_map(|g| &g.f.results).filter_map(|r| r.role.as_ref());
        let saved = saved.filter(|r| r.kind == RoleKind::Stash && !read.contains(r));
        let unread: BTreeSet<Role> = saved.cloned().collect();
        for (g, own) in graphs.iter().zip(&mut calls) {
            own.extend(g.forward(own, &unread));
        }
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
            out.insert(c.at, Some(c));
        }
        out
    }
}

impl Call {
    /// It as Python, with its operands.
    pub fn text(&self, x: &str) -> String {
        let more = if self.more.is_empty() { String::new() } else { format!(", {}", self.more) };
        format!("{}({x}{more})", self.name)
    }
}

impl<'a> Graph<'a> {
    fn new(f: &'a Func) -> Graph<'a> {
        let same = same(f);
        let (mut maker, mut readers) = (f.per_value(None), f.per_value(vec![]));
        for (i, n) in f.nodes.iter().enumerate().filter(|(_, n)| !is_nothing(&n.op)) {
            n.ins.iter().for_each(|v| readers[same[*v]].push(i));
            n.outs.iter().for_each(|v| maker[same[*v]] = Some(i));
        }
        Graph { f, same, maker, readers }
    }

    fn ins(&self, node: usize) -> Vec<Value> {
        self.f.nodes[node].ins.iter().map(|v| self.same[*v]).collect()
    }

    fn out(&self, node: usize) -> Value {
        self.same[self.f.nodes[node].outs[0]]
    }

    /// The roles under which others know a value.
    fn roles(&self, v: Value) -> impl Iterator<Item = &'a Role> {
        let ports = self.f.args.iter().chain(&self.f.results);
        ports.filter(move |p| self.same[p.value] == v).filter_map(|p| p.role.as_ref())
    }

    /// The roles of arguments that nodes read which no call stands for, or calls.
    fn roles_read(&self, calls: &[Call]) -> Vec<&'a Role> {
        let gone = |n: &usize| calls.iter().any(|c| c.nodes.contains(n));
        let is_read = |v: Value| {
            !self.readers[v].iter().all(gone)
                || calls.iter().any(|c| c.ins.contains(&v))
                || self.f.results.iter().any(|r| self.same[r.value] == v)
        };
        let args = self.f.args.iter().filter(|a| is_read(self.same[a.value]));
        args.filter_map(|a| a.role.as_ref()).collect()
    }

    /// The node that makes a value, if it is such an op.
    fn made(&self, v: Value, is: fn(&Op) -> bool) -> Option<usize> {
        self.maker[v].filter(|n| is(&self.f.nodes[*n].op))
    }

    /// The readers of a value of such an op.
    fn read(&self, v: Value, is: fn(&Op) -> bool) -> Vec<usize> {
        let all = self.readers[v].iter().copied();
        all.filter(|n| is(&self.f.nodes[*n].op)).collect()
    }

    /// The node that alone reads a value.
    fn only(&self, v: Value, is: fn(&Op) -> bool) -> Option<usize> {
        let [one] = self.readers[v][..] else { return None };
        let kept = self.f.results.iter().any(|r| self.same[r.value] == v);
        (!kept && is(&self.f.nodes[one].op)).then_some(one)
    }

    /// The size of the last dim of a value, whole on each rank.
    fn width(&self, v: Value) -> Option<usize> {
        let d = self.f.ty(v).dims.last()?;
        d.atoms.is_empty().then_some(d.size)
    }

    fn is_mean(&self, node: usize, of: Value) -> bool {
        let Op::Scale(o) = &self.f.nodes[node].op else { return false };
        self.width(of).is_some_and(|n| (o.by * n as f64 - 1.0).abs() < 1e-6)
    }

    /// True if these dims of an operand are those of the other but for the last, or the last alone.
    fn is_spread(&self, node: usize, way: Spread) -> bool {
        let n = &self.f.nodes[node];
        let ranks: Vec<usize> = n.ins.iter().map(|v| self.f.ty(*v).rank()).collect();
        let rule: std::borrow::Cow<Rule> = n.op.def().rule(&ranks);
        let [a, b] = &rule.ins[..] else { return false };
        let o = &rule.outs[0];
        let Some((last, front)) = a.split_last() else { return false };
        match way {
            Spread::Rows => b[..] == *front && o == a,
            Spread::Weight => b[..] == [*last] && o == a,
            Spread::Sum => b == a && o[..] == *front,
            Spread::Columns => b == a && o[..] == [*last],
        }
    }

    /// A call in the place of a node, if nothing reads a result before.
    fn call(
        &self,
        name: &'static str,
        (ins, outs): (Vec<Value>, Vec<Value>),
        nodes: Vec<usize>,
        at: usize,
    ) -> Option<Call> {
        let nodes: BTreeSet<usize> = nodes.into_iter().collect();
        let call = Call { name, ins, outs, more: String::new(), nodes, at };
        let late = |v: &Value| self.readers[*v].iter().all(|r| *r > at || call.nodes.contains(r));
        call.outs.iter().all(late).then_some(call)
    }

    /// Gradients of norms.
    fn backward(&self, all: &[Graph]) -> Vec<Call> {
        let halves = (0..self.f.nodes.len()).filter(|i| is_half(&self.f.nodes[*i].op));
        halves.filter_map(|half| self.rms_norm_grad(half, all)).collect()
    }

    /// From the node that makes -rstd³/2: what goes to `x` goes by the product with the weight, and by the root.
    fn rms_norm_grad(&self, half: usize, all: &[Graph]) -> Option<Call> {
        let cube = self.made(self.ins(half)[0], is_mul)?;
        let [square, rstd] = self.ins(cube)[..] else { return None };
        let square = self.made(square, is_mul)?;
        let variance = self.only(self.out(half), is_mul)?;
        let rstd_grad = self.made(self.ins(variance)[0], is_dot)?;
        let [d_normed, x] = self.ins(rstd_grad)[..] else { return None };
        let squares = self.only(self.out(variance), is_scale)?;
        let by_weight = self.made(d_normed, is_mul)?;
        let [d, weight] = self.ins(by_weight)[..] else { return None };
        let [by_root] = self.read(d_normed, is_mul)[..] else { return None };
        let weight_grad = self.read(d, is_dot).into_iter();
        let weight_grad = weight_grad.filter(|n| self.is_spread(*n, Spread::Columns));
        let weight_grad = weight_grad.min()?;
        let normed = self.ins(weight_grad)[1];
        let sum = self.only(self.out(by_root), is_add)?;
        // Of the two operands that are `x` in the sum of squares each has its product, or both have one.
        let products: BTreeSet<usize> = self.readers[self.out(squares)].iter().copied().collect();
        let parts: Vec<usize> = products.iter().copied().chain([by_root]).collect();
        let is_part = |v: &&Value| parts.iter().any(|n| self.out(*n) == **v);
        let terms = self.ins(sum);
        let is = self.ins(square) == [rstd; 2]
            && self.ins(by_root) == [d_normed, rstd]
            && products.iter().all(|n| is_mul(&self.f.nodes[*n].op) && self.ins(*n)[1] == x)
            && self.readers[d_normed].len() == 2
            && parts.iter().all(|n| self.readers[self.out(*n)].iter().all(|r| *r == sum))
            && terms.iter().filter(is_part).count() == 3
            && terms.iter().all(|v| self.f.ty(*v).rank() == self.f.ty(x).rank())
            && self.is_mean(squares, x)
            && self.is_spread(rstd_grad, Spread::Sum)
            && self.is_spread(by_weight, Spread::Weight)
            && self.is_spread(by_root, Spread::Rows)
            && all.iter().any(|g| g.is_product(self, [normed, x, rstd]));
        let mut nodes = vec![half, cube, square, variance, rstd_grad, squares, by_weight];
        nodes.extend(&parts);
        // What else is added up with them stays a sum.
        let alone = terms.len() == 3;
        nodes.extend(alone.then_some(sum));
        let outs = vec![self.out(if alone { sum } else { by_root }), self.out(weight_grad)];
        // The weight's gradient is made with it, and not where it stands in the plan.
        let at = nodes.iter().copied().max()?;
        nodes.push(weight_grad);
        let call = self.call("rms_norm_grad", (vec![d, x, weight, rstd], outs), nodes, at)?;
        is.then_some(call)
    }

    /// True if this function makes a value of another as the product of two others.
    fn is_product(&self, of: &Graph, [product, a, b]: [Value; 3]) -> bool {
        let is = |own: Value, v: Value| match std::ptr::eq(self.f, of.f) {
            true => own == v,
            false => self.roles(own).any(|r| of.roles(v).any(|s| r == s)),
        };
        let nodes = (0..self.f.nodes.len()).filter(|n| is_mul(&self.f.nodes[*n].op));
        let mut made = nodes.filter(|n| is(self.out(*n), product));
        made.any(|n| matches!(self.ins(n)[..], [x, y] if is(x, a) && is(y, b)))
    }

    /// Norms, of which nobody reads what the weight is multiplied with.
    fn forward(&self, calls: &[Call], unread: &BTreeSet<Role>) -> Vec<Call> {
        let roots = (0..self.f.nodes.len()).filter(|i| is_rsqrt(&self.f.nodes[*i].op));
        roots.filter_map(|root| self.rms_norm(root, calls, unread)).collect()
    }

    fn rms_norm(&self, root: usize, calls: &[Call], unread: &BTreeSet<Role>) -> Option<Call> {
        let rstd = self.out(root);
        let shift = self.made(self.ins(root)[0], is_shift)?;
        let Op::Shift(eps) = &self.f.nodes[shift].op else { return None };
        let mean = self.made(self.ins(shift)[0], is_scale)?;
        let squares = self.made(self.ins(mean)[0], is_dot)?;
        let [x, y] = self.ins(squares)[..] else { return None };
        let product = |n: &usize| self.ins(*n) == [x, rstd] && self.is_spread(*n, Spread::Rows);
        let [by_root] = self.read(rstd, is_mul).into_iter().filter(product).collect::<Vec<_>>()[..]
        else {
            return None;
        };
        let normed = self.out(by_root);
        let gone = |n: &&usize| !calls.iter().any(|c| c.nodes.contains(n));
        let [by_weight] = self.readers[normed].iter().filter(gone).copied().collect::<Vec<_>>()[..]
        else {
            return None;
        };
        let kept = |r: &&Port| {
            self.same[r.value] == normed && r.role.as_ref().is_none_or(|r| !unread.contains(r))
        };
        let is = x == y
            && !self.f.results.iter().any(|r| kept(&r))
            && is_mul(&self.f.nodes[by_weight].op)
            && self.ins(by_weight)[0] == normed
            && self.is_mean(mean, x)
            && self.is_spread(squares, Spread::Sum)
            && self.is_spread(by_weight, Spread::Weight)
            && [shift, mean, squares].iter().all(|n| self.readers[self.out(*n)].len() == 1);
        let weight = *self.ins(by_weight).get(1)?;
        let nodes = vec![root, shift, mean, squares, by_root, by_weight];
        let results = vec![self.out(by_weight), rstd];
        let call = self.call("rms_norm", (vec![x, weight], results), nodes, by_weight)?;
        is.then_some(Call { more: number(eps.by), ..call })
    }
}

/// How the dims of two operands and a result lie to each other.
#[derive(Clone, Copy)]
enum Spread {
    /// The second has one number for each row of the first.
    Rows,
    /// The second has one number for each column.
    Weight,
    /// Rows are summed.
    Sum,
    /// Columns are.
    Columns,
}

fn is_mul(op: &Op) -> bool {
    matches!(op, Op::Mul(_))
}

fn is_dot(op: &Op) -> bool {
    matches!(op, Op::Dot(_))
}

fn is_add(op: &Op) -> bool {
    matches!(op, Op::Add(_))
}

fn is_scale(op: &Op) -> bool {
    matches!(op, Op::Scale(_))
}

fn is_shift(op: &Op) -> bool {
    matches!(op, Op::Shift(_))
}

fn is_rsqrt(op: &Op) -> bool {
    matches!(op, Op::Rsqrt(_))
}

fn is_half(op: &Op) -> bool {
    matches!(op, Op::Scale(o) if o.by == -0.5)
}
