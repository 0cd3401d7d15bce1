//! The loops of nodes that are one kernel over rows.

use crate::func::{Func, Node, Value};
use crate::ops::{FusionClass, Kind};
use crate::rule::{LETTERS, Rule};
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
    let mut ranks: SmallVec<[usize; 4]> = SmallVec::new();
    n.ins.iter().for_each(|&v| ranks.push(f.ty(v).rank()));
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
        let mut names = Names { axes, ..Names::default() };
        let mut fusion: SmallVec<[FusionClass; 16]> = SmallVec::new();
        for n in nodes.clone() {
            fusion.push(n.op.facts().fusion?);
            names.add(f, n)?;
        }
        let (axes, loops) = names.resolve()?;
        let mut s = IterationSpace { axes, ..IterationSpace::default() };
        let made = nodes.clone().flat_map(|n| &n.outs);
        if let [fusion] = fusion[..] {
            let n = nodes.clone().next()?;
            // A copy keeps elements of any type as they are.
            if n.op.facts().kind == Kind::Movement {
                return None;
            }
            let kept = s.axes(n.outs[0])?.clone();
            s.cols = loops.into_iter().filter(|a| !kept.contains(a)).collect();
            s.rows = kept;
            return match fusion {
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
}

/// Loops of nodes while they are named, and which names mean the same loop.
#[derive(Default)]
struct Names {
    axes: Vec<(Value, Axes)>,
    /// By name: one that means the same loop.
    parent: Axes,
    /// The loops of the letters of each node, and where those of the next one begin.
    letters: SmallVec<[u8; 64]>,
    ends: SmallVec<[usize; 16]>,
}

impl Names {
    /// Names the loops of a node; those of a value that other nodes have named are theirs.
    fn add(&mut self, f: &Func, n: &Node) -> Option<()> {
        let rule = rule_of(f, n);
        let mut of = [None; LETTERS];
        for (&v, dims) in n.ins.iter().zip(&rule.ins).chain(n.outs.iter().zip(&rule.outs)) {
            // Mostly a node near it has named it.
            let known = self.axes.iter().rposition(|x| x.0 == v);
            let mut axes = Axes::new();
            for (d, g) in dims.iter().enumerate() {
                let named = &mut of[usize::from(g.single()?.0)];
                let axis = match (*named, known.map(|k| self.axes[k].1[d])) {
                    (Some(a), Some(b)) if a != b => {
                        let (a, b) = (root(&self.parent, a), root(&self.parent, b));
                        self.parent[usize::from(b)] = a;
                        a
                    }
                    (Some(a), _) | (None, Some(a)) => a,
                    (None, None) => {
                        let new = u8::try_from(self.parent.len()).ok()?;
                        self.parent.push(new);
                        new
                    }
                };
                if named.is_none() {
                    *named = Some(axis);
                    self.letters.push(axis);
                }
                if known.is_none() {
                    axes.push(axis);
                }
            }
            if known.is_none() {
                self.axes.push((v, axes));
            }
        }
        self.ends.push(self.letters.len());
        Some(())
    }

    /// The loops of all values by one name each, and these names; `None` if two letters of a node are one loop.
    fn resolve(mut self) -> Option<(Vec<(Value, Axes)>, Axes)> {
        for a in 0..self.parent.len() {
            self.parent[a] = root(&self.parent, a as u8);
        }
        let root = |a: &mut u8| *a = self.parent[usize::from(*a)];
        self.letters.iter_mut().for_each(root);
        let mut from = 0;
        for &to in &self.ends {
            let own = &self.letters[from..to];
            if (1..own.len()).any(|i| own[..i].contains(&own[i])) {
                return None;
            }
            from = to;
        }
        self.axes.iter_mut().for_each(|x| x.1.iter_mut().for_each(root));
        let mut loops = self.parent;
        let mut next = 0;
        loops.retain(|a| {
            next += 1;
            usize::from(*a) + 1 == next
        });
        Some((self.axes, loops))
    }
}

/// The name that all names of a loop lead to.
fn root(parent: &[u8], mut a: u8) -> u8 {
    while parent[usize::from(a)] != a {
        a = parent[usize::from(a)];
    }
    a
}
