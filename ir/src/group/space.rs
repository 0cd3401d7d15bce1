//! The loops of nodes that are one kernel over rows.

use crate::func::{Func, Node, Value};
use crate::ops::{FusionClass, Kind};
use crate::rule::{LETTERS, Rule};
use smallvec::{SmallVec, smallvec};
use std::borrow::Cow;

/// Whether something is so, of each value that nodes name.
type Flags = SmallVec<[bool; 32]>;

/// Loops of a group along the dims of one value; numbers are of no meaning by themselves.
pub type Axes = SmallVec<[u8; 16]>;

/// The loops of nodes along the dims of what they name, whether they are a kernel or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoopSpace {
    /// In the order in which nodes name them: the number of the first that does, the value, and its loops.
    axes: Vec<(usize, Value, Axes)>,
    /// How many there are; their numbers are those below.
    count: u8,
}

/// The loops of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IterationSpace {
    pub loops: LoopSpace,
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

impl LoopSpace {
    /// Those of some nodes, which have numbers, in their order; `None` if two letters of a node are one loop.
    pub fn of<'a>(
        f: &Func,
        nodes: impl Iterator<Item = (usize, &'a Node)> + Clone,
    ) -> Option<LoopSpace> {
        let named = |n: &Node| n.ins.len() + n.outs.len();
        let axes = Vec::with_capacity(nodes.clone().map(|x| named(x.1)).sum());
        let mut names = LoopNames { axes, ..LoopNames::default() };
        nodes.into_iter().try_for_each(|(i, n)| names.add(f, i, n))?;
        names.resolve()
    }

    /// Those of the nodes of both; `None` if two loops of one are one loop of the other. For nodes of which one
    /// names all loops, as of a kernel or of one node: then these are loops of two letters of it.
    pub fn and(&self, other: &LoopSpace) -> Option<LoopSpace> {
        // By loop of the other: which it is.
        let mut same: SmallVec<[Option<u8>; 16]> = smallvec![None; usize::from(other.count)];
        // By value of each: the other does not name it before.
        let [mut first, mut others] = [self, other].map(|x| Flags::from_elem(true, x.axes.len()));
        for (k, (number, v, theirs)) in other.axes.iter().enumerate() {
            let Some(j) = self.axes.iter().position(|x| x.1 == *v) else { continue };
            let (own, axes) = (self.axes[j].0, &self.axes[j].2);
            (first[j], others[k]) = (own < *number, own >= *number);
            for (&a, &b) in axes.iter().zip(theirs) {
                let known = same[usize::from(b)];
                if known != Some(a) && (known.is_some() || same.contains(&Some(a))) {
                    return None;
                }
                same[usize::from(b)] = Some(a);
            }
        }
        let mut count = self.count;
        for new in same.iter_mut().filter(|a| a.is_none()) {
            *new = Some(count);
            count = count.checked_add(1)?;
        }
        let mut axes = Vec::with_capacity(self.axes.len() + other.axes.len());
        for ((i, v, own), _) in self.axes.iter().zip(first).filter(|x| x.1) {
            axes.push((*i, *v, Axes::from_slice(own)));
        }
        for ((i, v, theirs), _) in other.axes.iter().zip(others).filter(|x| x.1) {
            let mut own = Axes::from_slice(theirs);
            own.iter_mut().for_each(|a| *a = same[usize::from(*a)].expect("all have names"));
            axes.push((*i, *v, own));
        }
        axes.sort_by_key(|x| x.0);
        Some(LoopSpace { axes, count })
    }

    /// The kernel over rows that their nodes are, each with what it does to a row; `None` if they are none.
    ///
    /// All results have the loops of the largest, in its order, or those of its rows: the leading
    /// ones, over which alone a fold's result runs. What is read from outside may have any.
    pub fn space(self, f: &Func, nodes: &[(&Node, FusionClass)]) -> Option<IterationSpace> {
        let mut s = IterationSpace { loops: self, rows: Axes::new(), cols: Axes::new() };
        if let [(n, fusion)] = nodes {
            // A copy keeps elements of any type as they are.
            if n.op.facts().kind == Kind::Movement {
                return None;
            }
            let kept = s.axes(n.outs[0])?.clone();
            s.cols = (0..s.loops.count).filter(|a| !kept.contains(a)).collect();
            s.rows = kept;
            return match fusion {
                FusionClass::Each | FusionClass::Fold => Some(s),
                FusionClass::Take | FusionClass::IndexAdd => None,
            };
        }
        let made = nodes.iter().flat_map(|x| &x.0.outs);
        if made.clone().any(|&v| !f.ty(v).dtype.is_float()) {
            return None;
        }
        let count = usize::from(s.loops.count);
        let whole = s.loops.all().find(|a| a.len() == count)?.clone();
        let mut rows = count;
        // What is put into a row is one element of it, so it has the rows, as results of them have.
        let put = nodes.iter().filter(|x| x.1 == FusionClass::IndexAdd);
        for v in made.chain(put.map(|x| &x.0.ins[0])) {
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
        nodes.iter().all(|&(n, fusion)| s.fits(n, fusion, nodes)).then_some(s)
    }

    /// The loops along the dims of each value.
    pub(super) fn all(&self) -> impl Iterator<Item = &Axes> {
        self.axes.iter().map(|x| &x.2)
    }
}

impl IterationSpace {
    /// The loops of some nodes, in their order; `None` if they are not a kernel over rows.
    pub fn of<'a>(
        f: &Func,
        nodes: impl Iterator<Item = &'a Node> + Clone,
    ) -> Option<IterationSpace> {
        let mut all: SmallVec<[(&Node, FusionClass); 16]> = SmallVec::new();
        for n in nodes.clone() {
            all.push((n, n.op.facts().fusion?));
        }
        LoopSpace::of(f, nodes.enumerate())?.space(f, &all)
    }

    /// Folds are over the elements of rows, and an index names one of them.
    fn fits(&self, n: &Node, fusion: FusionClass, nodes: &[(&Node, FusionClass)]) -> bool {
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
                    && nodes.iter().any(|x| x.0.outs.contains(&n.ins[0]))
            }
            FusionClass::IndexAdd => {
                self.cols.len() == 1
                    && is(n.ins[0], &self.rows)
                    && is(n.ins[1], &self.rows)
                    && whole(n.outs[0])
            }
        }
    }

    /// A value that has a loop, and the dim that it is there.
    pub fn example(&self, axis: u8) -> Option<(Value, usize)> {
        let mut all = self.loops.axes.iter();
        all.find_map(|(_, v, a)| Some((*v, a.iter().position(|x| *x == axis)?)))
    }

    /// The loops along the dims of a value.
    pub fn axes(&self, v: Value) -> Option<&Axes> {
        self.loops.axes.iter().find(|x| x.1 == v).map(|x| &x.2)
    }
}

/// Loops of nodes while they are named, and which names mean the same loop.
#[derive(Default)]
struct LoopNames {
    axes: Vec<(usize, Value, Axes)>,
    /// By name: one that means the same loop.
    parent: Axes,
    /// The loops of the letters of each node, and where those of the next one begin.
    letters: SmallVec<[u8; 64]>,
    ends: SmallVec<[usize; 16]>,
    /// Some loop has several names.
    has_several: bool,
}

impl LoopNames {
    /// Names the loops of a node; those of a value that other nodes have named are theirs. `None` if it has two
    /// letters for one loop.
    fn add(&mut self, f: &Func, number: usize, n: &Node) -> Option<()> {
        let rule = rule_of(f, n);
        let mut of = [None; LETTERS];
        let own = self.letters.len();
        for (&v, dims) in n.ins.iter().zip(&rule.ins).chain(n.outs.iter().zip(&rule.outs)) {
            // Mostly a node near it has named it.
            let known = self.axes.iter().rposition(|x| x.1 == v);
            let mut axes = Axes::new();
            for (d, g) in dims.iter().enumerate() {
                let named = &mut of[usize::from(g.single()?.0)];
                let axis = match (*named, known.map(|k| self.axes[k].2[d])) {
                    (Some(a), Some(b)) if a != b => {
                        let (a, b) = (root(&self.parent, a), root(&self.parent, b));
                        self.parent[usize::from(b)] = a;
                        self.has_several = true;
                        a
                    }
                    (None, Some(a)) if self.letters[own..].contains(&a) => return None,
                    (Some(a), _) | (None, Some(a)) => a,
                    (None, None) => {
                        let new = u8::try_from(self.parent.len()).ok().filter(|&n| n < u8::MAX)?;
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
                self.axes.push((number, v, axes));
            }
        }
        self.ends.push(self.letters.len());
        Some(())
    }

    /// The loops of all values, numbered; `None` if two letters of a node are one loop.
    fn resolve(mut self) -> Option<LoopSpace> {
        if !self.has_several {
            return Some(LoopSpace { axes: self.axes, count: self.parent.len() as u8 });
        }
        // By name that others lead to: the number of the loop.
        let mut numbers = self.parent.clone();
        let mut count = 0;
        for a in 0..self.parent.len() {
            self.parent[a] = root(&self.parent, a as u8);
            if usize::from(self.parent[a]) == a {
                numbers[a] = count;
                count += 1;
            }
        }
        let number = |a: &mut u8| *a = numbers[usize::from(self.parent[usize::from(*a)])];
        self.letters.iter_mut().for_each(number);
        let mut from = 0;
        for &to in &self.ends {
            let own = &self.letters[from..to];
            if (1..own.len()).any(|i| own[..i].contains(&own[i])) {
                return None;
            }
            from = to;
        }
        self.axes.iter_mut().for_each(|x| x.2.iter_mut().for_each(number));
        Some(LoopSpace { axes: self.axes, count })
    }
}

/// The name that all names of a loop lead to.
fn root(parent: &[u8], mut a: u8) -> u8 {
    while parent[usize::from(a)] != a {
        a = parent[usize::from(a)];
    }
    a
}
