//! The loops of nodes that are one kernel over rows.

use crate::func::{Func, Node, Value};
use crate::ops::{FusionClass, Kind};
use crate::rule::{Letter, Rule};
use smallvec::SmallVec;
use std::borrow::Cow;

/// Loops of a group along the dims of one value; numbers are of no meaning by themselves.
pub type Axes = SmallVec<[u8; 16]>;

/// The loops of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IterationSpace {
    pub(super) axes: Vec<(Value, Axes)>,
    /// Loops over rows, and those over the elements of a row, outermost first.
    pub rows: Axes,
    pub cols: Axes,
}

/// The rule of a node for its operands.
pub fn rule_of<'a>(f: &Func, n: &'a Node) -> Cow<'a, Rule> {
    if n.ins.is_empty() {
        // The dims of a constant are those of its type.
        return Rule::same(0, 1, f.ty(n.outs[0]).rank());
    }
    let ranks: SmallVec<[usize; 4]> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
    n.op.def().rule(&ranks)
}

impl IterationSpace {
    /// The loops of some nodes, in their order; `None` if they are not a kernel over rows.
    ///
    /// All results have the loops of the largest, in its order, or those of its rows: the leading
    /// ones, over which alone a fold's result runs. What is read from outside may have any.
    pub fn of<'a>(
        f: &Func,
        nodes: impl Iterator<Item = &'a Node> + Clone,
    ) -> Option<IterationSpace> {
        let named = |n: &Node| n.ins.len() + n.outs.len();
        let axes = Vec::with_capacity(nodes.clone().map(named).sum());
        let mut s = IterationSpace { axes, ..IterationSpace::default() };
        let mut same = Same::default();
        let alone = nodes.clone().count() == 1;
        let mut fusion: SmallVec<[FusionClass; 16]> = SmallVec::new();
        for n in nodes.clone() {
            fusion.push(n.op.facts().fusion?);
            s.add(f, n, &mut same)?;
        }
        if !same.apart() {
            return None;
        }
        s.axes.iter_mut().flat_map(|x| &mut x.1).for_each(|a| *a = same.root(*a));
        let loops = same.loops();
        let made = nodes.clone().flat_map(|n| &n.outs);
        if alone {
            let n = nodes.clone().next()?;
            // A copy keeps elements of any type as they are.
            if n.op.facts().kind == Kind::Movement {
                return None;
            }
            let kept = s.axes(n.outs[0])?.clone();
            s.cols = loops.into_iter().filter(|a| !kept.contains(a)).collect();
            s.rows = kept;
            return match fusion[0] {
                FusionClass::Each | FusionClass::Fold => Some(s),
                FusionClass::Take | FusionClass::Put => None,
            };
        }
        if made.clone().any(|&v| !f.ty(v).dtype.is_float()) {
            return None;
        }
        let whole = s.axes.iter().map(|x| &x.1).find(|a| a.len() == loops.len())?.clone();
        let mut rows = loops.len();
        // What is put into a row is one element of it, so it has the rows, as results of them have.
        let put = nodes.clone().zip(&fusion).filter(|x| *x.1 == FusionClass::Put);
        for v in made.chain(put.map(|(n, _)| &n.ins[0])) {
            let a = s.axes(*v)?;
            if a.len() < whole.len() {
                if a[..] != whole[..a.len()] || rows < whole.len() && rows != a.len() {
                    return None;
                }
                rows = a.len();
            } else if *a != whole {
                return None;
            }
        }
        (s.rows, s.cols) = (whole[..rows].into(), whole[rows..].into());
        let mut all = nodes.clone().zip(fusion);
        all.all(|(n, fusion)| s.fits(n, fusion, nodes.clone())).then_some(s)
    }

    /// Folds are over the elements of rows, and an index names one of them.
    fn fits<'a>(
        &self,
        n: &Node,
        fusion: FusionClass,
        mut nodes: impl Iterator<Item = &'a Node>,
    ) -> bool {
        let is = |v: Value, want: &Axes| self.axes(v) == Some(want);
        let cols = !self.cols.is_empty();
        let whole = |v| self.axes(v).is_some_and(|a| a.len() == self.rows.len() + self.cols.len());
        match fusion {
            FusionClass::Each => true,
            // A loop that no operand has would be folded too.
            FusionClass::Fold => {
                let has = |v: &Value, a: &u8| self.axes(*v).is_some_and(|x| x.contains(a));
                let over = |a: &u8| n.ins.iter().any(|v| has(v, a));
                cols && is(n.outs[0], &self.rows) && self.cols.iter().all(over)
            }
            // A row is walked for an element of it only if it is walked anyway.
            FusionClass::Take => {
                self.cols.len() == 1
                    && is(n.ins[1], &self.rows)
                    && is(n.outs[0], &self.rows)
                    && whole(n.ins[0])
                    && nodes.any(|x| x.outs.contains(&n.ins[0]))
            }
            FusionClass::Put => {
                self.cols.len() == 1
                    && is(n.ins[0], &self.rows)
                    && is(n.ins[1], &self.rows)
                    && whole(n.outs[0])
            }
        }
    }

    /// A value that has a loop, and the dim that it is there.
    pub fn example(&self, axis: u8) -> Option<(Value, usize)> {
        self.axes.iter().find_map(|(v, a)| Some((*v, a.iter().position(|x| *x == axis)?)))
    }

    /// The loops along the dims of a value.
    pub fn axes(&self, v: Value) -> Option<&Axes> {
        self.axes.iter().find(|x| x.0 == v).map(|x| &x.1)
    }

    /// Names the loops of a node; those of a value that other nodes have named are theirs.
    fn add(&mut self, f: &Func, n: &Node, same: &mut Same) -> Option<()> {
        let rule = rule_of(f, n);
        let mut of: SmallVec<[(Letter, u8); 8]> = SmallVec::new();
        for (&v, dims) in n.ins.iter().zip(&rule.ins).chain(n.outs.iter().zip(&rule.outs)) {
            let known = self.axes.iter().position(|x| x.0 == v);
            let mut axes = Axes::new();
            for (d, g) in dims.iter().enumerate() {
                let l = g.single()?;
                let named = of.iter().find(|x| x.0 == l).map(|x| x.1);
                let axis = match (named, known.map(|k| self.axes[k].1[d])) {
                    (Some(a), Some(b)) => same.join(a, b),
                    (Some(a), None) | (None, Some(a)) => a,
                    (None, None) => same.fresh()?,
                };
                if named.is_none() {
                    of.push((l, axis));
                }
                axes.push(axis);
            }
            if known.is_none() {
                self.axes.push((v, axes));
            }
        }
        same.nodes.push(of.into_iter().map(|x| x.1).collect());
        Some(())
    }
}

/// Which names of loops mean the same loop.
#[derive(Default)]
struct Same {
    parent: Axes,
    /// By node: the loops of its letters.
    nodes: SmallVec<[Axes; 8]>,
}

impl Same {
    fn fresh(&mut self) -> Option<u8> {
        let new = u8::try_from(self.parent.len()).ok()?;
        self.parent.push(new);
        Some(new)
    }
    fn root(&self, mut a: u8) -> u8 {
        while self.parent[usize::from(a)] != a {
            a = self.parent[usize::from(a)];
        }
        a
    }
    fn join(&mut self, a: u8, b: u8) -> u8 {
        let (a, b) = (self.root(a), self.root(b));
        self.parent[usize::from(b)] = a;
        a
    }
    /// True if two letters of a node are two loops, in every node.
    fn apart(&self) -> bool {
        let apart =
            |n: &Axes| (0..n.len()).all(|i| (0..i).all(|j| self.root(n[i]) != self.root(n[j])));
        self.nodes.iter().all(apart)
    }
    fn loops(&self) -> Axes {
        (0..self.parent.len() as u8).filter(|&a| self.root(a) == a).collect()
    }
}
