//! From one layout to another in few steps: slices first, then sums, then one exchange, then gathers.
//!
//! A rank can receive no less than what it lacks of its new piece. One exchange, or one between slices and
//! gathers, sends just that wherever pieces are even (docs/passes.md, "Resharding"). So there is no search:
//! a few ways are built and priced, equal questions are answered once.

#[cfg(test)]
mod tests;

use shardc_ir::func::LayoutStep;
use shardc_ir::hardware::Hardware;
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::*;
use shardc_ir::price;
use shardc_ir::types::{AtomList, Reduction, State, Type};

/// Remembers answered questions.
#[derive(Default)]
pub struct Resharder {
    /// What steps are priced with.
    hardware: Hardware,
    known: HashMap<(Type, Type), Option<Vec<LayoutStep>>>,
}

/// Most ranks of a group for which [`must_receive`] counts.
const MAX_RANKS: usize = 4096;

impl Resharder {
    /// With these prices; by default those of the device `generic`.
    pub fn new(hardware: &Hardware) -> Resharder {
        Resharder { hardware: hardware.clone(), known: HashMap::default() }
    }

    /// The cheapest steps from `from` to `to`; `None` where [`path`] has none.
    pub fn path(&mut self, mesh: &Mesh, from: &Type, to: &Type) -> Option<Vec<LayoutStep>> {
        if from == to {
            return Some(vec![]);
        }
        let key = (from.clone(), to.clone());
        let hw = &self.hardware;
        self.known.entry(key).or_insert_with(|| path(hw, mesh, from, to).map(|f| f.steps)).clone()
    }
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The cheapest steps.
    pub steps: Vec<LayoutStep>,
    /// How many ways were priced.
    pub ways: usize,
}

/// The cheapest steps from one layout of a tensor to another. `None` where none may lead: what is used
/// differently by the ranks (R) never becomes invariant, and nothing becomes varying, or a sum still to be
/// taken, that is not.
pub fn path(hw: &Hardware, mesh: &Mesh, from: &Type, to: &Type) -> Option<Found> {
    // Time of what is sent, then the number of steps.
    let cost = |steps: &[LayoutStep]| {
        let mut at = from;
        let mut sum = 0u64;
        for s in steps {
            if s.op.collective().is_some() {
                sum = sum.saturating_add(price::op(hw, mesh, &s.op, &[at], &s.ty));
            }
            // A gather sends less than copies from rank to rank, where links differ: of equal bytes it is
            // preferred.
            if s.op
                .layout()
                .is_some_and(|l| matches!(l.sends(), Sends::Boxes { .. }) && gathers(at, &s.ty))
            {
                sum = sum.saturating_add((2e12 * hw.latency) as u64);
            }
            at = &s.ty;
        }
        (sum, steps.len())
    };
    let all = |plans: Vec<Plan>| -> Vec<Vec<LayoutStep>> {
        let walk = || Walk { mesh, to, at: from.clone(), steps: vec![] };
        plans.into_iter().filter_map(|p| walk().all(p)).collect()
    };
    // Of equal ones the first.
    let first = all(plans(from, to, &[None]));
    let mut found = Found { ways: first.len(), steps: first.into_iter().min_by_key(|s| cost(s))? };
    let least = must_receive(mesh, from, to);
    if least.is_some_and(|b| ring_bytes(mesh, from, &found.steps) > b + 0.5) {
        let dims: Vec<Option<usize>> = (0..to.rank()).map(Some).collect();
        let more = all(plans(from, to, &dims));
        found.ways += more.len();
        found.steps = std::iter::once(found.steps).chain(more).min_by_key(|s| cost(s))?;
    }
    Some(found)
}

/// True if axes that split a tensor do so no more.
fn gathers(from: &Type, to: &Type) -> bool {
    !from.sharded().within(to.sharded())
}

/// What is open on the way.
#[derive(Clone, Copy)]
struct Plan {
    /// Of the axes that split the tensor and are not to: those that are gathered after the exchange.
    last: AtomSet,
    /// A sum that all ranks want whole is taken in pieces, which are gathered.
    in_pieces: bool,
    /// What is to be split elsewhere is first split where it can be.
    aside: bool,
    /// The dims in which to try first to split aside, and to leave what is gathered; else where it is to be,
    /// or is.
    dims: [Option<usize>; 2],
}

/// The ways to try, with these dims. The first is the plain one: sums at once, gathers last.
fn plans(from: &Type, to: &Type, dims: &[Option<usize>]) -> Vec<Plan> {
    let gathered = from.sharded().minus(to.sharded());
    let whole = from.sum.minus(to.sum).minus(to.sharded());
    let atoms: Vec<Atom> = gathered.iter().collect();
    let mut lasts = vec![gathered];
    // All subsets of few, else all, each alone, and none.
    match atoms.len() {
        0 => {}
        n @ 1..=3 => lasts.extend((0..(1usize << n) - 1).rev().map(|bits| {
            (0..n).filter(|i| bits >> i & 1 == 1).map(|i| atoms[i]).collect::<AtomSet>()
        })),
        _many => {
            lasts.extend(atoms.iter().map(|&a| AtomSet::one(a)));
            lasts.push(AtomSet::EMPTY);
        }
    }
    let pieces: &[bool] = if whole.is_empty() { &[false] } else { &[false, true] };
    let free = to.sharded().minus(from.sharded()).minus(from.partial());
    let aside: &[bool] = if free.is_empty() { &[true] } else { &[true, false] };
    let mut out = vec![];
    for &last in &lasts {
        for (&in_pieces, &aside) in pieces.iter().flat_map(|p| aside.iter().map(move |a| (p, a))) {
            let pairs = dims.iter().flat_map(|&a| dims.iter().map(move |&b| [a, b]));
            out.extend(pairs.map(|dims| Plan { last, in_pieces, aside, dims }));
        }
    }
    out
}

/// Steps that are being taken.
struct Walk<'a> {
    mesh: &'a Mesh,
    to: &'a Type,
    at: Type,
    steps: Vec<LayoutStep>,
}

impl Walk<'_> {
    /// All steps of a plan; `None` if it does not lead there.
    fn all(mut self, p: Plan) -> Option<Vec<LayoutStep>> {
        self.in_place();
        self.sums(p);
        if p.aside {
            self.aside(p.dims[0]);
        }
        self.exchange(p.last, p.dims[1])?;
        let fan = self.to.replicated.minus(self.at.marked());
        if !fan.is_empty() {
            self.step(FanOut { axes: fan }, None);
        }
        for dim in 0..self.to.rank() {
            self.gather(dim)?;
        }
        (self.at == *self.to).then_some(self.steps)
    }

    /// Takes a step, if types allow it.
    fn step(&mut self, op: impl Into<Op>, declared: Option<&Type>) -> bool {
        let op = op.into();
        let Ok(mut types) = op.check(self.mesh, &[&self.at], &[declared]) else { return false };
        self.at = types.swap_remove(0);
        self.steps.push(LayoutStep { op, ty: self.at.clone() });
        true
    }

    /// Splits dims further as they are to be: slices, which cost nothing, before sums.
    fn in_place(&mut self) {
        while self.next(false) || self.next(true) {}
    }

    /// One such step of a dim; sums, or else slices.
    fn next(&mut self, sums: bool) -> bool {
        (0..self.to.rank()).any(|dim| {
            let (own, want) = (self.at.dims[dim].atoms, self.to.dims[dim].atoms);
            if !want.starts_with(own) || want.len() == own.len() {
                return false;
            }
            let kind = self.at.state(want.get(own.len()));
            let run = want.iter().skip(own.len()).take_while(|&a| self.at.state(a) == kind);
            let axes: AtomSet = run.collect();
            // In the order in which it is to be.
            let mut next = self.at.clone();
            next.dims[dim].atoms = want.take(own.len() + axes.len());
            match kind {
                State::Partial(Reduction::Sum) if sums => {
                    self.step(ReduceScatter { axes, dim }, Some(&next))
                }
                State::Invariant | State::Replicated if !sums => {
                    self.step(Slice { axes, dim }, Some(&next))
                }
                _ => false,
            }
        })
    }

    /// Takes what is still to be reduced.
    fn sums(&mut self, p: Plan) {
        for how in [Reduction::Max, Reduction::Min] {
            self.reduce(self.at.pending(how).minus(self.to.pending(how)));
        }
        let open = self.at.sum.minus(self.to.sum);
        let split = open.and(self.to.sharded());
        for a in split.iter().chain(open.minus(split).iter().filter(|_| p.in_pieces)) {
            self.put_aside(a, p.dims[0], |axes, dim| ReduceScatter { axes, dim }.into());
        }
        self.reduce(self.at.sum.minus(self.to.sum));
        self.in_place();
    }

    fn reduce(&mut self, axes: AtomSet) {
        if !axes.is_empty() {
            let mut t = self.at.clone();
            t.replicated = t.replicated.union(axes.and(self.to.replicated));
            self.step(AllReduce { axes }, Some(&t));
        }
    }

    /// Splits what is the same everywhere, and is to be split in a dim where it cannot be yet.
    fn aside(&mut self, dim: Option<usize>) {
        let free = self.to.sharded().minus(self.at.sharded()).minus(self.at.partial());
        for a in free.minus(self.at.varying).iter() {
            self.put_aside(a, dim, |axes, dim| Slice { axes, dim }.into());
        }
    }

    /// Splits a dim over an atom too, if one is cut evenly then: this, the one that is to be, or another.
    fn put_aside(&mut self, a: Atom, dim: Option<usize>, op: impl Fn(AtomSet, usize) -> Op) {
        let wanted = self.to.dims.iter().position(|d| d.atoms.set().has(a));
        let even = |dim: &usize| {
            let ways = self.at.pieces(self.mesh, *dim) * self.mesh.size(a);
            self.at.dims[*dim].size % ways == 0
        };
        let dim = dim.into_iter().chain(wanted).chain(0..self.to.rank()).find(even);
        if let Some(dim) = dim {
            self.step(op(AtomSet::one(a), dim), None);
        }
    }

    /// Moves everything to where it is to be, but what is gathered last.
    fn exchange(&mut self, last: AtomSet, at: Option<usize>) -> Option<()> {
        let mut mid = self.to.clone();
        let kept = self.at.sharded().minus(self.to.sharded());
        let last = kept.and(last.union(self.scattered()));
        for (dim, d) in self.at.dims.iter().enumerate() {
            for a in d.atoms.iter().filter(|&a| last.has(a)) {
                let even = |e: &usize| {
                    let ways = mid.pieces(self.mesh, *e) * self.mesh.size(a);
                    mid.dims[*e].size % ways == 0
                };
                // Where it is, though it is uneven, if nothing else moves there.
                let here = mid.dims[dim].atoms.push(a) == Some(d.atoms);
                let any = at.into_iter().chain([dim]).chain(0..self.to.rank());
                let e = if here && at.is_none() { dim } else { any.into_iter().find(even)? };
                mid.dims[e].atoms = mid.dims[e].atoms.push(a)?;
            }
        }
        // Over other axes it is as it was; what is split no more is invariant.
        let split = mid.sharded();
        mid.replicated = self.at.replicated.minus(split);
        (mid.varying, mid.max, mid.min) = (self.at.varying, self.at.max, self.at.min);
        mid.sum = self.at.sum;
        if self.at == mid {
            return Some(());
        }
        let axes = moving(self.mesh, &self.at, &mid);
        self.known(axes, &mid).then_some(())
    }

    /// Axes over which a sum was taken in pieces that are to be gathered.
    fn scattered(&self) -> AtomSet {
        let of = |s: &LayoutStep| match &s.op {
            Op::ReduceScatter(o) => o.axes,
            _other => AtomSet::EMPTY,
        };
        self.steps.iter().map(of).fold(AtomSet::EMPTY, AtomSet::union)
    }

    /// One step to `mid`: the collective that does just this, or else an exchange.
    fn known(&mut self, axes: AtomSet, mid: &Type) -> bool {
        let n = self.to.rank();
        let differ = |d: &usize| self.at.dims[*d].atoms != mid.dims[*d].atoms;
        let dims: Vec<usize> = (0..n).filter(differ).collect();
        let all: Vec<Op> = match dims[..] {
            [one] => vec![AllGather { axes, dim: one }.into(), Slice { axes, dim: one }.into()],
            [a, b] => {
                let over: [AtomSet; 2] = [a, b].map(|d| {
                    let (old, new) = (self.at.dims[d].atoms.set(), mid.dims[d].atoms.set());
                    old.minus(new)
                });
                vec![
                    AllToAll { axes: over[0], from: a, to: b }.into(),
                    AllToAll { axes: over[1], from: b, to: a }.into(),
                ]
            }
            _ => vec![],
        };
        let reaches =
            |op: &Op| op.check(self.mesh, &[&self.at], &[Some(mid)]).is_ok_and(|t| t[0] == *mid);
        match all.into_iter().find(reaches) {
            Some(op) => self.step(op, Some(mid)),
            None => self.step(Exchange::over(axes), Some(mid)),
        }
    }

    /// Joins the pieces of a dim that are not to be.
    fn gather(&mut self, dim: usize) -> Option<()> {
        loop {
            let (own, want) = (self.at.dims[dim].atoms, self.to.dims[dim].atoms);
            if own == want {
                return Some(());
            }
            let a = own.iter().next_back()?;
            let same = |b: &Atom| self.to.replicated.has(*b) == self.to.replicated.has(a);
            let extra = own.len().saturating_sub(want.len());
            let run = own.iter().rev().take(extra).take_while(same);
            let axes: AtomSet = run.collect();
            let mut t = self.at.clone();
            axes.iter().for_each(|a| t.clear(a));
            t.replicated = t.replicated.union(axes.and(self.to.replicated));
            if !own.starts_with(want) || !self.step(AllGather { axes, dim }, Some(&t)) {
                return None;
            }
        }
    }
}

/// Bytes that a rank sends in these steps, by rings.
pub fn ring_bytes(mesh: &Mesh, from: &Type, steps: &[LayoutStep]) -> f64 {
    let mut at = from;
    let mut sum = 0.0;
    for s in steps {
        sum += s.op.collective().map_or(0.0, |c| c.ring_bytes(mesh, at, &s.ty));
        at = &s.ty;
    }
    sum
}

/// The steps without any thought: take all sums, gather every dim that changes, cut again. `None` where
/// this does not lead to `to`.
pub fn simple(mesh: &Mesh, from: &Type, to: &Type) -> Option<Vec<LayoutStep>> {
    let mut steps: Vec<LayoutStep> = vec![];
    let mut at = from.clone();
    let mut step = |at: &mut Type, op: Op, declared: Option<&Type>| -> Option<()> {
        let ty = op.check(mesh, &[at], &[declared]).ok()?.swap_remove(0);
        steps.push(LayoutStep { op, ty: ty.clone() });
        *at = ty;
        Some(())
    };
    for pending in [at.sum, at.max, at.min] {
        if !pending.is_empty() {
            step(&mut at, AllReduce { axes: pending }.into(), None)?;
        }
    }
    for dim in 0..from.rank() {
        let axes = from.dims[dim].atoms.set();
        if from.dims[dim].atoms != to.dims[dim].atoms && !axes.is_empty() {
            let mut whole = at.clone();
            axes.iter().for_each(|a| whole.clear(a));
            step(&mut at, AllGather { axes, dim }.into(), Some(&whole))?;
        }
    }
    for dim in 0..to.rank() {
        let axes = to.dims[dim].atoms.set();
        if at.dims[dim].atoms != to.dims[dim].atoms {
            step(&mut at, Slice { axes, dim }.into(), Some(to))?;
        }
    }
    let axes = to.replicated.minus(at.replicated);
    if !axes.is_empty() {
        step(&mut at, FanOut { axes }.into(), None)?;
    }
    (at == *to).then_some(steps)
}

/// Bytes that the rank which lacks most of its new piece must receive, whatever is sent how; `None` for
/// sums still to be taken, of which this says nothing.
pub fn must_receive(mesh: &Mesh, from: &Type, to: &Type) -> Option<f64> {
    let moving: Vec<_> = moving(mesh, from, to).iter().collect();
    let ways = moving.iter().try_fold(1usize, |n, &a| n.checked_mul(mesh.size(a)))?;
    if ways > MAX_RANKS || !from.partial().is_empty() {
        return None;
    }
    let mut coords = vec![0; mesh.atoms.len()];
    let lacks = |mut rank: usize| {
        for &a in &moving {
            coords[a.0 as usize] = rank % mesh.size(a);
            rank /= mesh.size(a);
        }
        let (mut new, mut kept) = (1, 1);
        for d in 0..to.rank() {
            let [old, own] = [from, to].map(|t| t.extent(mesh, d, &coords));
            let end = (old.offset + old.len).min(own.offset + own.len);
            new *= own.len;
            kept *= end.saturating_sub(old.offset.max(own.offset));
        }
        ((new - kept) * to.dtype.bytes()) as f64
    };
    Some((0..ways).map(lacks).fold(0.0, f64::max))
}

/// Atoms whose state differs, with all atoms minor to them in the same dim, and those major to them behind
/// which a dim is cut unevenly.
fn moving(mesh: &Mesh, from: &Type, to: &Type) -> AtomSet {
    let mut set: AtomSet = mesh.all().iter().filter(|&a| from.state(a) != to.state(a)).collect();
    for (f, t) in from.dims.iter().zip(&to.dims).filter(|(f, t)| f.atoms != t.atoms) {
        let turned = f.atoms.is_turned() || t.atoms.is_turned();
        let both = f.atoms.iter().zip(t.atoms.iter()).filter(|_| !turned);
        let alike = both.take_while(|(x, y)| x == y).count();
        let ways = |l: AtomList| l.iter().map(|a| mesh.size(a)).product::<usize>();
        // Pieces of the axes that stay are whole numbers of pieces before and after.
        let nests = |kept: usize, l: AtomList| {
            let (outer, inner) = (ways(f.atoms.take(kept)), ways(l));
            kept == 0 || f.size.div_ceil(inner) * (inner / outer) == f.size.div_ceil(outer)
        };
        let fits = |&k: &usize| nests(k, f.atoms) && nests(k, t.atoms);
        let kept = (0..=alike).rev().find(fits).unwrap_or(0);
        let rest = f.atoms.iter().skip(kept).chain(t.atoms.iter().skip(kept));
        set = rest.fold(set, AtomSet::with);
    }
    set
}
