//! Nodes that run as one launch: which of them are one kernel, which loops that has, and which values of
//! theirs the rest of the function sees.

mod answers;
mod space;

pub use space::{Axes, IterationSpace, LoopSpace, rule_of};

use crate::alike::Alike;
use crate::func::{Func, FusedWithNext, Node, Port, Role, Value, ValueMap};
use crate::maps::{HashMap, HashSet};
use crate::ops::{FusionClass, Op, Sends};
use crate::rule::{Rule, has_letter};
use crate::types::DType;
use answers::Answer;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::mem::discriminant;
use std::ops::Range;

/// Operands or results of a launch.
pub type Values = SmallVec<[Value; 4]>;

/// Nodes that run as one launch, one after the other in their function: a kernel, or several kernels over
/// rows that need nothing of each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    pub nodes: Range<usize>,
    /// What it reads: as often as it is named, by one node; each once, by several.
    pub ins: Values,
    /// What it writes. What only nodes of the launch read is not among it and has no memory.
    pub outs: Values,
}

/// What tells the kernels of a function apart: made once for all of its launches.
pub struct Roles<'a> {
    f: &'a Func,
    /// By value: the argument over which it is written, whose role it has as a result, or a sum of it over ranks.
    over: ValueMap<Option<Value>>,
    /// What was asked of launches.
    answers: RefCell<Alike<Answer>>,
}

impl<'a> Roles<'a> {
    /// Those of a function's arguments and results.
    pub fn of(f: &'a Func) -> Roles<'a> {
        let of_role = |p: &'a Port| Some((p.role.as_ref()?, p.value));
        let results = f.results.iter().filter_map(of_role);
        // Of most functions no result has a role of such a kind as an argument has.
        let kinds: HashSet<_> = results.clone().map(|r| discriminant(&r.0.kind)).collect();
        let args = f.args.iter().filter_map(of_role);
        let args = args.filter(|a| kinds.contains(&discriminant(&a.0.kind)));
        let args: HashMap<&Role, Value> = args.collect();
        let mut over = f.per_value(None);
        for (role, v) in results.filter(|_| !args.is_empty()) {
            over[v] = args.get(role).copied().or(over[v]);
        }
        f.grad_totals().iter().for_each(|g| over[g.total] = Some(g.before));
        Roles { f, over, answers: RefCell::default() }
    }

    /// True if these are a matrix product, or what is put into rows, and what adds this to a tensor in place.
    pub fn accumulates(&self, made: &Node, sum: &Node) -> bool {
        let (&[first, second], term) = (&sum.ins[..], made.outs[0]) else { return false };
        let ty = |v| self.f.ty(v).dtype;
        (made.op.is_matrix_product() || made.op.adds_to_rows())
            && sum.op.accumulates()
            && second == term
            && made.ins[0] != made.ins[1]
            && !made.ins.contains(&first)
            // Of 16 bits, the product would be rounded before it is added.
            && [ty(first), ty(term)] == [DType::F32; 2]
    }

    /// The loops of a matrix product and of its epilogue: the first node is the product, the others compute
    /// every element from the same element of the product and of tensors with some of its loops. Of the
    /// loops that only the product's left operand has (its rows), those that only the right one has (its
    /// columns) and those that both have, a tensor has all or none: with some, these could not be one loop
    /// any more. `None` if the nodes are anything else, or write over an argument by its role.
    pub fn epilogue<'n>(
        &self,
        mut nodes: impl Iterator<Item = &'n Node> + Clone,
    ) -> Option<IterationSpace> {
        let f = self.f;
        let product = nodes.next()?;
        if !product.op.is_matrix_product() {
            return None;
        }
        let Rule { ins, outs, .. } = &*rule_of(f, product);
        let of_numbers = |v: &Value| f.ty(*v).dtype.is_float();
        let each = |n: &Node| {
            n.op.facts().fusion == Some(FusionClass::Each)
                && n.ins.iter().chain(&n.outs).all(of_numbers)
        };
        let works = nodes.clone().any(|n| !is_same(&n.op));
        if product.ins[0] == product.ins[1] || !works || !nodes.clone().all(each) {
            return None;
        }
        let space = IterationSpace::of(f, nodes.clone())?;
        let mut made = nodes.flat_map(|n| &n.outs).chain(&product.outs);
        if !made.clone().all(|v| space.axes(*v) == Some(&space.rows)) {
            return None;
        }
        // The argument may be what the product still reads.
        if made.any(|v| self.over[v].is_some()) {
            return None;
        }
        // By loop: which operands of the product have it.
        let class = |l| [0, 1].map(|i| has_letter(&ins[i], l));
        let classes: SmallVec<[_; 8]> = outs[0].iter().map(|d| d.single().map(class)).collect();
        let fits = |axes: &Axes| {
            let mut rest = axes.iter().peekable();
            let has: SmallVec<[bool; 8]> =
                space.rows.iter().map(|a| rest.next_if_eq(&a).is_some()).collect();
            let alike = |i: usize, j: usize| classes[i] != classes[j] || has[i] == has[j];
            rest.next().is_none() && (0..has.len()).all(|i| (0..i).all(|j| alike(i, j)))
        };
        let all = space.loops.all().all(|axes| *axes == space.rows || fits(axes));
        all.then_some(space)
    }
}

/// Kernels over rows that need nothing of each other, while they are found.
pub struct FusionBuilder<'a> {
    roles: Roles<'a>,
    /// By value: the one whose memory it is.
    root: ValueMap<Value>,
    /// By root of a result: the argument of its role, over which it is written.
    over: ValueMap<Option<Value>>,
    /// By root: whether these kernels write and read it, which it has the number of these kernels for.
    written: ValueMap<u32>,
    read: ValueMap<u32>,
    number: u32,
}

impl<'a> FusionBuilder<'a> {
    pub fn of(f: &'a Func) -> FusionBuilder<'a> {
        let (roles, root) = (Roles::of(f), f.roots());
        let mut over = f.per_value(None);
        for v in f.results.iter().map(|r| r.value) {
            let own = &mut over[root[v]];
            *own = roles.over[v].or(*own);
        }
        let [written, read] = [(); 2].map(|()| f.per_value(0));
        FusionBuilder { roles, root, over, written, read, number: 1 }
    }

    /// Adds a kernel, if it is over rows, reads nothing that the others write, be it over an argument, and
    /// writes nothing that they read.
    pub fn add(&mut self, x: &Launch) -> bool {
        let f = self.roles.f;
        let nodes = &f.nodes[x.nodes.clone()];
        let kernel_is_rows =
            |a: &Answer| matches!(a.kernel(&self.roles), Some(KernelKind::Rows(_)));
        let over_rows = self.roles.answer(x, kernel_is_rows);
        let (root, over, number) = (&self.root, &self.over, self.number);
        let reads = || x.ins.iter().map(|v| root[v]);
        let made = || nodes.iter().flat_map(|n| &n.outs).map(|v| root[v]);
        let writes = || made().flat_map(|v| [Some(v), over[v]]).flatten();
        let apart = !reads().any(|v| self.written[v] == number)
            && !writes().any(|v| self.read[v] == number);
        if over_rows && apart {
            writes().for_each(|v| self.written[v] = number);
            reads().for_each(|v| self.read[v] = number);
        }
        over_rows && apart
    }

    /// Forgets the kernels.
    pub fn clear(&mut self) {
        self.number += 1;
    }
}

/// What kernel a launch of several nodes is.
#[derive(Clone, Debug)]
pub enum KernelKind {
    Rows(IterationSpace),
    /// A product, or what is put into rows, that is added to its last operand, over which the result lies.
    Sum,
    /// A product and element-wise work on its result.
    Epilogue(IterationSpace),
    /// Kernels over rows, in any order or at the same time.
    FusionBuilder(Vec<Launch>),
    /// Gathers, or scattered sums, of one group of ranks: one call for all tensors.
    Exchanges(Vec<Launch>),
}

/// What launches of several nodes are, in words.
pub const KERNEL_KINDS: &str = "joined nodes (&) are element-wise work and folds over the same rows, \
    a product or a put and the sum it is added to, or a product and element-wise work on its result; kernels of one \
    launch (&&) are over rows, or all of them all_gather, or all reduce_scatter over the same axes, and none \
    reads what another writes";

impl Launch {
    /// What kernel it is, if its nodes are several; `None` if they are none. Forgets the kernels found before.
    pub fn form(&self, found: &mut FusionBuilder) -> Option<KernelKind> {
        let f = found.roles.f;
        if !self.is_several(f) {
            return self.kernel(&found.roles);
        }
        let exchanges = f.nodes[self.nodes.start].op.collective().is_some();
        let form = if exchanges { KernelKind::Exchanges } else { KernelKind::FusionBuilder };
        self.has_form(found).then(|| form(self.kernels(f)))
    }

    /// True if it is some kernel, of a function of which several launches of several nodes are asked for; forgets the
    /// kernels found before.
    pub fn has_form(&self, found: &mut FusionBuilder) -> bool {
        let f = found.roles.f;
        if !self.is_several(f) {
            return found.roles.answer(self, |a| a.kernel(&found.roles).is_some());
        }
        if f.nodes[self.nodes.start].op.collective().is_some() {
            return self.exchanges(f);
        }
        found.clear();
        self.kernels(f).iter().all(|x| found.add(x))
    }

    /// True if it is a product and element-wise work on its result.
    pub fn has_epilogue(&self, roles: &Roles) -> bool {
        let is = |a: &Answer| matches!(a.kernel(roles), Some(KernelKind::Epilogue(_)));
        roles.f.nodes[self.nodes.start].op.is_matrix_product() && roles.answer(self, is)
    }

    /// What kernel it is, if its nodes are several and one kernel.
    fn kernel(&self, roles: &Roles) -> Option<KernelKind> {
        let nodes = &roles.f.nodes[self.nodes.clone()];
        let only = |v: Value| self.outs[..] == [v];
        if let [product, sum] = nodes
            && roles.accumulates(product, sum)
            && only(sum.outs[0])
        {
            return Some(KernelKind::Sum);
        }
        if let Some(s) = roles.epilogue(nodes.iter()) {
            return (!self.outs.is_empty()).then_some(KernelKind::Epilogue(s));
        }
        IterationSpace::of(roles.f, nodes.iter()).map(KernelKind::Rows)
    }

    /// True if all of its nodes gather, or scatter sums, over the same axes, and none reads what another
    /// makes.
    fn exchanges(&self, f: &Func) -> bool {
        let nodes = &f.nodes[self.nodes.clone()];
        let made = |v: &Value| nodes.iter().any(|n| n.outs.contains(v));
        nodes.windows(2).all(|pair| are_one_call(&pair[0], &pair[1]))
            && nodes.iter().all(|n| !n.ins.iter().any(made))
    }

    /// True if it has several kernels.
    pub fn is_several(&self, f: &Func) -> bool {
        let but_last = self.nodes.start..self.nodes.end.saturating_sub(1);
        f.nodes[but_last].iter().any(|n| n.fused == FusedWithNext::Launch)
    }

    /// Its kernels, each as if it were a launch by itself.
    pub fn kernels(&self, f: &Func) -> Vec<Launch> {
        let range = self.nodes.clone();
        let last = |i: &usize| i + 1 == range.end || f.nodes[*i].fused == FusedWithNext::Launch;
        let mut start = range.start;
        let mut one = |last: usize| {
            let nodes = start..last + 1;
            start = nodes.end;
            Launch { ins: reads(&f.nodes[nodes.clone()]), outs: Values::new(), nodes }
        };
        let mut kernels: Vec<Launch> = range.clone().filter(last).map(&mut one).collect();
        let mut makers: Vec<(Value, usize)> = vec![];
        for (k, x) in kernels.iter().enumerate() {
            let made = f.nodes[x.nodes.clone()].iter().flat_map(|n| &n.outs);
            makers.extend(made.map(|&v| (v, k)));
        }
        makers.sort_unstable();
        for &o in &self.outs {
            if let Ok(i) = makers.binary_search_by_key(&o, |m| m.0) {
                kernels[makers[i].1].outs.push(o);
            }
        }
        kernels
    }

    /// Operands over which its result `k` may be written: of the same type, and walked alike, so that each
    /// element is read before it is written.
    pub fn over(&self, f: &Func, k: usize) -> Values {
        self.overs(&Roles::of(f)).swap_remove(k)
    }

    /// The same, by result.
    pub fn overs(&self, roles: &Roles) -> Vec<Values> {
        match self.is_several(roles.f) {
            true => self.overs_of_several(roles),
            false => roles.answer(self, |a| a.overs(roles, self)),
        }
    }

    fn overs_of_several(&self, roles: &Roles) -> Vec<Values> {
        let kernels = self.kernels(roles.f);
        let mut by_value: HashMap<Value, (usize, Values)> = HashMap::default();
        // How many kernels read a value.
        let mut readers: HashMap<Value, usize> = HashMap::default();
        for (i, x) in kernels.iter().enumerate() {
            let overs = x.outs.iter().zip(x.overs(roles));
            by_value.extend(overs.map(|(&o, over)| (o, (i, over))));
            let ins: HashSet<Value> = x.ins.iter().copied().collect();
            ins.into_iter().for_each(|v| *readers.entry(v).or_default() += 1);
        }
        let over = |o: &Value| {
            let (own, mut all) = by_value.remove(o).expect("one kernel makes it");
            // Another kernel may be later.
            all.retain(|v| readers[v] == usize::from(kernels[own].ins.contains(v)));
            all
        };
        self.outs.iter().map(over).collect()
    }
}

/// True if two collectives may be one call: both gather, or both scatter sums, over the same axes.
pub fn are_one_call(a: &Node, b: &Node) -> bool {
    let one = |n: &Node| {
        let c = n.op.collective()?;
        let joins = matches!(c.sends(), Sends::Share | Sends::ShareOfResult);
        joins.then_some((c.kind(), c.atoms()))
    };
    one(a).is_some() && one(a) == one(b)
}

/// True if a node is the first of its call: other tensors of one call stand behind it.
pub fn begins_call(f: &Func, node: usize) -> bool {
    node == 0 || f.nodes[node - 1].fused != FusedWithNext::Launch
}

/// True if the result is the operand, seen as another type with the same dims.
pub fn is_same(op: &Op) -> bool {
    op.def().is_view() && op.facts().fusion.is_some()
}

/// The launches of a function, in order.
pub fn launches(f: &Func) -> Vec<Launch> {
    // One past the last node that reads a value; one past all nodes if it is a result.
    let mut until = f.per_value(0);
    for (i, n) in f.nodes.iter().enumerate() {
        n.ins.iter().for_each(|v| until[v] = i + 1);
    }
    f.results.iter().for_each(|r| until[r.value] = f.nodes.len() + 1);
    let mut found = Found { f, makers: f.makers(), until, named: f.per_value(0) };
    let last = |n: &&Node| n.fused == FusedWithNext::No;
    let mut out = Vec::with_capacity(f.nodes.iter().filter(last).count() + 1);
    let mut start = 0;
    for (i, n) in f.nodes.iter().enumerate() {
        if n.fused == FusedWithNext::No || i + 1 == f.nodes.len() {
            out.push(found.launch(start..i + 1));
            start = i + 1;
        }
    }
    out
}

/// What is known of values while launches are found, each by its nodes.
struct Found<'a> {
    f: &'a Func,
    makers: ValueMap<Option<u32>>,
    until: ValueMap<usize>,
    /// The end of the last launch of several nodes that names it as what it reads or writes.
    named: ValueMap<usize>,
}

impl Found<'_> {
    fn launch(&mut self, nodes: Range<usize>) -> Launch {
        let group = &self.f.nodes[nodes.clone()];
        if let [n] = group {
            return Launch { nodes, ins: reads(group), outs: Values::from_slice(&n.outs) };
        }
        let maker = |v: Value| {
            let own = self.makers[v].map(|m| m as usize);
            own.filter(|m| nodes.contains(m)).map(|m| &self.f.nodes[m])
        };
        let named = &mut self.named;
        let mut is_new = |v: Value| std::mem::replace(&mut named[v], nodes.end) != nodes.end;
        let (mut ins, mut outs) = (Values::new(), Values::new());
        for (j, n) in group.iter().enumerate() {
            for &v in &n.ins {
                if maker(v).is_none() && is_new(v) {
                    ins.push(v);
                }
            }
            // A kernel of one node writes all of its results.
            let begins = j == 0 || group[j - 1].fused == FusedWithNext::Launch;
            let alone = begins && (n.fused == FusedWithNext::Launch || j + 1 == group.len());
            for &v in n.outs.iter().filter(|&v| alone || self.until[v] > nodes.end) {
                // What looks like a value is where the value is.
                let mut root = v;
                while let Some(n) = maker(root).filter(|n| is_same(&n.op)) {
                    root = n.ins[0];
                }
                if maker(root).is_some() && is_new(root) {
                    outs.push(root);
                }
            }
        }
        Launch { nodes, ins, outs }
    }
}

/// What nodes read that they do not make: as often as it is named, by one; each once, by several.
fn reads(nodes: &[Node]) -> Values {
    if let [n] = nodes {
        return Values::from_slice(&n.ins);
    }
    let mut ins = Values::new();
    for (i, n) in nodes.iter().enumerate() {
        let made = |v: &Value| nodes[..i].iter().any(|n| n.outs.contains(v));
        let new = |v: &&Value| !made(v);
        for &v in n.ins.iter().filter(new) {
            if !ins.contains(&v) {
                ins.push(v);
            }
        }
    }
    ins
}
