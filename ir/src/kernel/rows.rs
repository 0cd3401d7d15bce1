//! Programs over the elements of a row: element-wise work and folds, alone or fused.
//!
//! Every index of `outer` is a row; its elements are the indices of `inner`. An instruction belongs
//! to the row, if it is the same for all its elements, or to an element. A fold makes one number of
//! a row of elements, which later instructions use: so a softmax is three walks over a row, of which
//! memory sees one. These walks are the [`Stage`]s. What costs much more than a load, as an
//! exponential, is computed once, if a result's row has room for it until the result is known.

use super::reach::See;
use super::{Extents, Load, View};
use crate::types::{DType, Reduction};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Elements of a row that are one task, if nothing is folded, or if it is folded in parts.
pub const CHUNK: usize = 4096;
/// Rows that are folded side by side in one task.
pub const COLUMNS: usize = 64;

/// A result that is written: element by element if its view walks `inner` too, else once a row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Store {
    pub view: View,
    pub elem: DType,
    /// The instruction whose value is written.
    pub value: usize,
}

/// An f32 function of one operand.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Unary {
    Exp,
    /// e^x - 1, accurate near 0.
    ExpM1,
    Log,
    Sqrt,
    Rsqrt,
    Tanh,
    Logistic,
    Silu,
    Sin,
    Cos,
    /// The error function.
    Erf,
    /// log(1 + x), accurate near 0.
    Log1P,
    /// The largest integer that is at most x.
    Floor,
    /// The nearest integer, ties to even.
    Nearest,
    /// The nearest element of 16 bits, ties to even: what is stored as one and read again.
    Round(DType),
}

/// An f32 function of two operands.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
    /// 1 where the first is at least the second, else 0.
    AtLeast,
    /// The first to the power of the second.
    Pow,
}

/// One instruction of a row's program. Numbers name earlier instructions.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Scalar {
    /// The element of load number `.0`.
    Load(usize),
    Const(f32),
    /// Number `.0` of [`Rows::params`].
    Param(usize),
    /// The element's place in its row, from 0; exact below 2^24.
    Column,
    Unary(Unary, usize),
    Binary(Binary, usize, usize),
    /// The third where the first two are equal, else 0.
    Where(usize, usize, usize),
    /// The second where the first is not 0, else the third.
    Select(usize, usize, usize),
    /// The fold of an instruction over the row; of an empty one 0, -inf or +inf.
    Fold(Reduction, usize),
}

/// For every row of `outer`, a program over the elements of `inner`. Elements of results are written
/// when no later walk over the row reads an operand that is walked alike, after that element was
/// read, and results of the row behind all walks: so a result may lie on such an operand.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Rows {
    pub outer: Extents,
    pub inner: Extents,
    /// Views walk `outer`, then `inner`.
    pub loads: Vec<Load>,
    /// Numbers that differ from rank to rank.
    pub params: Vec<f32>,
    pub body: Vec<Scalar>,
    pub stores: Vec<Store>,
    /// Name of its compiled form: that of all of the above but the parameters.
    pub symbol: Arc<str>,
}

/// One walk over the elements of a row.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Stage {
    /// Instructions of the row that are done before the walk.
    pub before: Vec<usize>,
    /// Instructions of every element, in order.
    pub each: Vec<usize>,
    /// Folds that the walk makes.
    pub folds: Vec<usize>,
    /// Those of `each` that an earlier walk has left in a result's row, with the store's number.
    pub found: Vec<(usize, usize)>,
    /// What the walk writes: numbers of stores, each with the instruction.
    pub written: Vec<(usize, usize)>,
}

/// A value that a walk leaves in a result's row: the result, or what it is made of.
#[derive(Clone, Copy)]
struct Kept {
    value: usize,
    store: usize,
    walk: usize,
}

impl Scalar {
    /// The instructions it uses.
    pub fn uses(&self) -> impl Iterator<Item = usize> {
        let all = match *self {
            Scalar::Load(_) | Scalar::Const(_) | Scalar::Param(_) | Scalar::Column => [None; 3],
            Scalar::Unary(_, a) | Scalar::Fold(_, a) => [Some(a), None, None],
            Scalar::Binary(_, a, b) => [Some(a), Some(b), None],
            Scalar::Where(a, b, c) | Scalar::Select(a, b, c) => [Some(a), Some(b), Some(c)],
        };
        all.into_iter().flatten()
    }
}

impl Stage {
    /// True if the walk computes an instruction of elements itself.
    pub fn computes(&self, i: usize) -> bool {
        self.each.contains(&i) && !self.found.iter().any(|x| x.0 == i)
    }
}

impl Rows {
    /// The stride of a view along the last loop of a row; 0 if there is none.
    pub fn step(&self, v: &View) -> usize {
        let last = self.outer.len() + self.inner.len();
        if self.inner.is_empty() { 0 } else { v.strides.get(last - 1).copied().unwrap_or(0) }
    }
    /// True if the store writes every element of a row.
    pub fn stores_each(&self, s: &Store) -> bool {
        s.view.strides.len() > self.outer.len()
    }
    /// By instruction: it differs from element to element.
    pub fn by_element(&self) -> Vec<bool> {
        let mut each: Vec<bool> = vec![];
        for s in &self.body {
            each.push(match *s {
                Scalar::Load(l) => {
                    self.loads[l].view.strides[self.outer.len()..].iter().any(|&s| s != 0)
                }
                Scalar::Column => !self.inner.is_empty(),
                Scalar::Fold(..) => false,
                _ => s.uses().any(|u| each[u]),
            });
        }
        each
    }

    /// The walks over a row, in order: each makes the folds whose elements are known, the last one
    /// writes. What an element needs is computed in every walk that needs it.
    pub fn stages(&self) -> Vec<Stage> {
        self.walks(&[])
    }

    /// The same, but that a walk writes a result that it computes, and leaves a value that later
    /// walks would compute by a costly function in the row of a result that they make of it. Not
    /// where a later walk reads an operand that the result may lie on.
    pub fn stages_kept(&self) -> Vec<Stage> {
        let (mut kept, mut walks) = (vec![], self.stages());
        for (store, s) in self.stores.iter().enumerate() {
            let others = (0..self.body.len()).rev().filter(|&i| i != s.value);
            for value in std::iter::once(s.value).chain(others) {
                let mut computed = (0..walks.len()).filter(|&w| walks[w].computes(value));
                let (Some(walk), Some(_)) = (computed.next(), computed.next()) else { continue };
                if !self.holds(s, value) {
                    continue;
                }
                let more = [&kept[..], &[Kept { value, store, walk }]].concat();
                let new = self.walks(&more);
                if value == s.value || self.costly(&new) < self.costly(&walks) {
                    (kept, walks) = (more, new);
                    break;
                }
            }
        }
        let read = |k: &Kept, walks: &[Stage]| {
            walks[k.walk + 1..].iter().any(|w| self.reads_below(&self.stores[k.store], w))
        };
        while let Some(i) = kept.iter().position(|k| read(k, &walks)) {
            kept.remove(i);
            walks = self.walks(&kept);
        }
        walks
    }

    fn walks(&self, kept: &[Kept]) -> Vec<Stage> {
        let each = self.by_element();
        // The walk in which an instruction can be computed.
        let mut depth: Vec<usize> = vec![];
        for s in &self.body {
            let ready = s.uses().map(|u| depth[u]).max().unwrap_or(0);
            depth.push(ready + usize::from(matches!(s, Scalar::Fold(..))));
        }
        let is_fold = |i: usize| matches!(self.body[i], Scalar::Fold(..));
        let last = depth.iter().copied().max().unwrap_or(0);
        let mut stages = vec![Stage::default(); last + 1];
        for (i, &d) in depth.iter().enumerate() {
            match self.body[i] {
                Scalar::Fold(..) => stages[d - 1].folds.push(i),
                _ if !each[i] => stages[d].before.push(i),
                _ => {}
            }
        }
        for (d, stage) in stages.iter_mut().enumerate() {
            let now = kept.iter().filter(|k| k.walk == d);
            stage.written = now.map(|k| (k.store, k.value)).collect();
            let done = |x: &(usize, usize)| kept.iter().any(|k| (k.store, k.value) == *x);
            let results = self.stores.iter().enumerate();
            let results = results.filter(|(_, s)| d == last && self.stores_each(s));
            stage.written.extend(results.map(|(i, s)| (i, s.value)).filter(|x| !done(x)));
            let folded = stage.folds.iter().flat_map(|&i| self.body[i].uses());
            let mut todo: Vec<usize> = folded.chain(stage.written.iter().map(|x| x.1)).collect();
            let mut needed = BTreeSet::new();
            while let Some(i) = todo.pop() {
                if each[i] && !is_fold(i) && needed.insert(i) {
                    match kept.iter().find(|k| k.value == i && k.walk < d) {
                        Some(k) => stage.found.push((i, k.store)),
                        None => todo.extend(self.body[i].uses()),
                    }
                }
            }
            stage.each = needed.into_iter().collect();
        }
        stages
    }

    /// How often walks take a function of an element that costs much more than a load.
    pub fn costly(&self, walks: &[Stage]) -> usize {
        let costs = |w: &Stage, i: usize| match self.body[i] {
            Scalar::Unary(f, _) => !matches!(f, Unary::Round(_)) && w.computes(i),
            _ => false,
        };
        walks.iter().map(|w| w.each.iter().filter(|&&i| costs(w, i)).count()).sum()
    }

    /// True if the row of a result keeps a value as it is.
    fn holds(&self, s: &Store, value: usize) -> bool {
        let rounded = |to| matches!(self.body[value], Scalar::Unary(Unary::Round(h), _) if h == to);
        let apart =
            self.stores_each(s) && s.view.strides[self.outer.len()..].iter().all(|&s| s > 0);
        apart && (s.elem == DType::F32 || s.elem.is_half() && rounded(s.elem))
    }

    /// True if a walk reads elements on which a result may lie.
    fn reads_below(&self, s: &Store, walk: &Stage) -> bool {
        walk.each.iter().any(|&i| match self.body[i] {
            Scalar::Load(l) => self.loads[l].view.strides == s.view.strides && walk.computes(i),
            _ => false,
        })
    }

    fn folds(&self) -> bool {
        self.body.iter().any(|s| matches!(s, Scalar::Fold(..)))
    }

    /// The walk over the only row, if it is folded in parts ([`CHUNK`]), each a task, and what comes
    /// behind it: when all parts are done, their folds are folded like elements of a row, and results
    /// of the row are written. That is so if the row is longer than a part, and nothing that is
    /// written by element waits for a fold.
    pub fn in_parts(&self) -> Option<[Stage; 2]> {
        let [n] = self.inner[..] else { return None };
        if n <= CHUNK || !self.outer.is_empty() || !self.folds() {
            return None;
        }
        let [walk, end]: [Stage; 2] = self.stages().try_into().ok()?;
        let mut waits: Vec<bool> = vec![];
        for s in &self.body {
            waits.push(matches!(s, Scalar::Fold(..)) || s.uses().any(|u| waits[u]));
        }
        if end.written.iter().any(|&(_, i)| waits[i]) {
            return None;
        }
        let each: BTreeSet<usize> = walk.each.iter().chain(&end.each).copied().collect();
        let behind = Stage { before: end.before, ..Stage::default() };
        Some([Stage { each: each.into_iter().collect(), written: end.written, ..walk }, behind])
    }

    /// Operands that it names. One more, if the row is folded in parts, is what these leave:
    /// `[fold, part]`.
    pub fn operands(&self) -> usize {
        let views = self.loads.iter().map(|l| &l.view).chain(self.stores.iter().map(|s| &s.view));
        views.map(|v| v.operand + 1).max().unwrap_or(0)
    }

    /// Parts that a row is cut into, for tasks of a bounded size: one, if it is folded as a whole, or if
    /// anything is written once a row, which may lie on what the other parts still read.
    pub fn chunks(&self) -> usize {
        let whole = self.folds() || !self.stores.iter().all(|s| self.stores_each(s));
        match self.inner[..] {
            [n] if !whole || self.in_parts().is_some() => n.div_ceil(CHUNK).max(1),
            _ => 1,
        }
    }
    /// Tasks that may run at the same time: rows, parts of rows, or blocks of rows. What comes behind
    /// the parts of a row that is folded is one more task, which is not counted.
    pub fn tasks(&self) -> usize {
        if self.by_columns()
            && let Some((n, rest)) = self.outer.split_last()
        {
            return rest.iter().product::<usize>() * n.div_ceil(COLUMNS);
        }
        self.outer.iter().product::<usize>() * self.chunks()
    }

    /// True if results, not elements, lie next to each other: then a block of rows is folded at a
    /// time, one element of each after the other.
    pub fn by_columns(&self) -> bool {
        let (no, ni) = (self.outer.len(), self.inner.len());
        let adjacent = |l: usize| self.loads.iter().filter(|x| x.view.strides[l] == 1).count();
        no > 0
            && !self.body.contains(&Scalar::Column)
            && !self.stores.iter().any(|s| self.stores_each(s) && ni > 0)
            && (ni == 0 || adjacent(no - 1) > adjacent(no + ni - 1))
            && self.stages().len() == 2
    }

    pub(super) fn reach(&self, see: See) {
        self.loads.iter().for_each(|l| see(&l.view, &[&self.outer, &self.inner]));
        for s in &self.stores {
            let inner: &[usize] = if self.stores_each(s) { &self.inner } else { &[] };
            see(&s.view, &[&self.outer, inner]);
        }
    }
}
