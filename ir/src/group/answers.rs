//! What is asked of the launches of a function again and again, answered once for all that are alike.

use super::{IterationSpace, KernelKind, Launch, Roles, Values, rule_of};
use crate::alike;
use crate::func::{Func, Node, Value};
use smallvec::SmallVec;
use std::cell::OnceCell;

/// What a launch is that is no several kernels, and every launch like it: in the numbers of its operands, or in the
/// values of the first of these launches.
pub(super) struct Answer {
    first: Launch,
    kernel: OnceCell<Option<KernelKind>>,
    overs: OnceCell<Vec<Operands>>,
}

/// Operands of a launch, by number.
type Operands = SmallVec<[usize; 2]>;

impl Answer {
    /// What kernel its nodes are, or its one node over rows.
    pub fn kernel(&self, roles: &Roles) -> Option<&KernelKind> {
        let (f, x) = (roles.f, &self.first);
        let nodes = &f.nodes[x.nodes.clone()];
        let find = || match nodes {
            [n] if n.op.def().is_view() => None,
            [_] => IterationSpace::of(f, nodes.iter()).map(KernelKind::Rows),
            _several => x.kernel(roles),
        };
        self.kernel.get_or_init(find).as_ref()
    }

    /// By result of a launch: its operands over which that may be written.
    pub fn overs(&self, roles: &Roles, x: &Launch) -> Vec<Values> {
        let overs = self.overs.get_or_init(|| self.find_overs(roles));
        overs.iter().map(|over| over.iter().map(|&i| x.ins[i]).collect()).collect()
    }

    /// Operands of the result's type, and walked alike, so that each element is read before it is written.
    fn find_overs(&self, roles: &Roles) -> Vec<Operands> {
        let (f, x) = (roles.f, &self.first);
        let nodes = &f.nodes[x.nodes.clone()];
        let alike = |s: &IterationSpace, but: &[Value]| -> Vec<Operands> {
            let free = x.ins.iter().enumerate().filter(|(_, v)| !but.contains(v));
            let free: SmallVec<[_; 16]> = free.map(|(i, &v)| (i, s.axes(v))).collect();
            let over = |own| free.iter().filter(move |x| x.1 == own).map(|x| x.0).collect();
            x.outs.iter().map(|&o| over(s.axes(o))).collect()
        };
        let mut all: Vec<Operands> = match nodes {
            [n] => (0..x.outs.len()).map(|k| in_place(f, n, k).into_iter().collect()).collect(),
            _several => match self.kernel(roles).expect("joined nodes are one kernel") {
                KernelKind::Sum => {
                    let over = x.ins.iter().position(|v| *v == nodes[1].ins[0]);
                    vec![over.into_iter().collect()]
                }
                KernelKind::Rows(s) => alike(s, &[]),
                // A product reads its operands again and again.
                KernelKind::Epilogue(s) => alike(s, &nodes[0].ins),
                KernelKind::FusionBuilder(_) | KernelKind::Exchanges(_) => {
                    panic!("it is one kernel")
                }
            },
        };
        let same = |i: usize, o: Value| {
            let (a, b) = (f.ty(x.ins[i]), f.ty(o));
            a.dims == b.dims && a.dtype == b.dtype
        };
        for (over, &o) in all.iter_mut().zip(&x.outs) {
            over.retain(|i| same(*i, o));
        }
        all
    }
}

/// The operand over which a node by itself may write result `k`.
fn in_place(f: &Func, n: &Node, k: usize) -> Option<usize> {
    let j = n.op.def().in_place(k)?;
    let alike = || {
        let rule = rule_of(f, n);
        rule.ins[j] == rule.outs[k]
    };
    (n.op.collective().is_some() || alike()).then_some(j)
}

/// Most values that a launch names of which is known what others are.
const MOST: usize = 128;

impl Roles<'_> {
    /// Reads what is known of a launch that is no several kernels.
    pub(super) fn answer<R>(&self, x: &Launch, read: impl FnOnce(&Answer) -> R) -> R {
        let nodes = &self.f.nodes[x.nodes.clone()];
        let new = || Answer { first: x.clone(), kernel: OnceCell::new(), overs: OnceCell::new() };
        // To compare many values takes longer than to ask: what sums thousands is one node anyway.
        if nodes.iter().map(|n| n.ins.len() + n.outs.len()).sum::<usize>() > MOST {
            return read(&new());
        }
        let outs = nodes.iter().flat_map(|n| &n.outs);
        let key = alike::key(nodes.iter().map(|n| &n.op), outs.map(|&o| self.f.ty(o)));
        let mut answers = self.answers.borrow_mut();
        if let Some(known) = answers.find(key, |y| self.are_alike(x, &y.first)) {
            return read(known);
        }
        let new = new();
        let out = read(&new);
        answers.add(key, new);
        out
    }

    /// True if two launches have the same ops, of values that differ in nothing but which they are: where one of them
    /// has a value again, is written over it or has it as a result, so has the other the value in its place.
    fn are_alike(&self, x: &Launch, y: &Launch) -> bool {
        let [a, b] = [x, y].map(|x| &self.f.nodes[x.nodes.clone()]);
        let same = |(a, b): (&Node, &Node)| {
            a.op == b.op && (a.ins.len(), a.outs.len()) == (b.ins.len(), b.outs.len())
        };
        let ends = |x: &Launch| (x.nodes.len(), x.ins.len(), x.outs.len());
        if ends(x) != ends(y) || !a.iter().zip(b).all(same) {
            return false;
        }
        // Values in the same place.
        let mut pairs: SmallVec<[(Value, Value); 32]> = SmallVec::new();
        let mut meet = |a: Value, b: Value| match pairs.iter().rev().find(|p| p.0 == a || p.1 == b)
        {
            Some(known) => *known == (a, b),
            None => {
                pairs.push((a, b));
                self.f.ty(a) == self.f.ty(b)
            }
        };
        let mut all = |a: &[Value], b: &[Value]| a.iter().zip(b).all(|(&a, &b)| meet(a, b));
        let over = |v: &Value| self.over[v];
        // What they read follows from their nodes.
        a.iter().zip(b).all(|(a, b)| {
            all(&a.ins, &b.ins)
                && all(&a.outs, &b.outs)
                && a.outs.iter().zip(&b.outs).all(|(a, b)| match (over(a), over(b)) {
                    (None, None) => true,
                    (Some(a), Some(b)) => all(&[a], &[b]),
                    _one_of_them => false,
                })
        }) && all(&x.outs, &y.outs)
    }
}
