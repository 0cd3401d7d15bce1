//! Spreads shardings to all values, letter by letter.
//!
//! Before:  `%h = dot[mk,kn->mn] %x, %w : f32[4,16]`, `%w: f32[8,16@tp]`
//! After:   `%h = dot[mk,kn->mn] %x, %w : f32[4,16@tp]`
//! Assumes: verified, phase Source plus annotations.  Leaves: phase Sharded.
//!
//! The algorithm is Shardy's (docs/propagation.md): factors of an op, user priorities outermost,
//! inside each four rounds of ever more ops and factors, a worklist to the fixed point. Shardings
//! only grow, so it ends. A dim that every user needs whole takes no sharding from elsewhere.

use super::factors::{DimFactors, Factors, OpFactors, Tensor, named, project};
use shardc_ir::func::{Annotation, Func, Uses, Value, ValueMap};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::types::AtomList;
use smallvec::SmallVec;

type Dims = SmallVec<[AtomList; 4]>;

/// Why a dim of a value is split over an atom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cause {
    pub value: Value,
    pub dim: usize,
    pub atom: Atom,
    pub from: Origin,
}

/// Where a split came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// An annotation: the user's, or the model family's recipe.
    Annotation { priority: u8 },
    /// Another value, through an op.
    Op { node: u32, value: Value, priority: u8, round: u8 },
}

struct Propagation<'a> {
    mesh: &'a Mesh,
    f: &'a Func,
    ops: Factors,
    dims: ValueMap<Dims>,
    /// Atoms of annotations of lower priority, which must wait: not to be used by others now.
    held: ValueMap<AtomSet>,
    /// Bit per dim: takes no more atoms.
    closed: ValueMap<u16>,
    causes: Vec<Cause>,
}

/// Makes the annotated and propagated shardings the types of all values; returns why each stands.
pub fn propagate(mesh: &Mesh, f: &mut Func) -> Vec<Cause> {
    let ops = Factors::of(f);
    let dims =
        f.values.iter().map(|v| v.ty.dims.iter().map(|_| AtomList::EMPTY).collect()).collect();
    let whole = closed_by_use(f, &ops);
    let mut s = Propagation {
        mesh,
        f,
        ops,
        dims,
        held: f.per_value(AtomSet::EMPTY),
        closed: whole.clone(),
        causes: vec![],
    };
    let uses = f.uses();
    let mut priorities: Vec<u8> = f.annotations.values().map(|a| a.priority).collect();
    priorities.sort_unstable();
    priorities.dedup();
    for p in priorities {
        s.closed.clone_from(&whole);
        for (&v, a) in &f.annotations {
            s.apply(v, a, p);
        }
        for round in 0..4 {
            s.fixed_point(&uses, p, round);
        }
    }
    let Propagation { dims, causes, .. } = s;
    for (info, dims) in f.values.iter_mut().zip(dims) {
        for (d, atoms) in info.ty.dims.iter_mut().zip(dims) {
            d.atoms = atoms;
        }
    }
    causes
}

/// Nodes that touch a value, each once, in the order of the program.
fn touching(uses: &Uses, v: Value) -> impl Iterator<Item = usize> {
    let mut last = None;
    let all = uses.maker(v).into_iter().chain(uses.users(v));
    all.filter(move |&n| last.replace(n) != Some(n))
}

/// Bit per dim of each value: every user needs it whole, directly or through pass-through letters. Not
/// what somebody asked to split.
fn closed_by_use(f: &Func, ops: &Factors) -> ValueMap<u16> {
    let mut asked = f.per_value(0u16);
    for (v, a) in &f.annotations {
        for (d, _) in a.dims.iter().enumerate().filter(|(_, x)| !x.atoms.is_empty()) {
            asked[v] |= 1 << d;
        }
    }
    let mut used = f.per_value(false);
    let mut closed = f.per_value(0u16);
    for (n, op) in f.nodes.iter().zip(ops.iter()).rev() {
        let (ins, outs) = op.tensors.split_at(n.ins.len());
        let needs = |fac: u8| {
            let through = |(t, v): (&Tensor, &Value)| {
                let d = t.dims.iter().position(|d| d[..] == [fac]);
                d.is_some_and(|d| used[v] && closed[v] >> d & 1 == 1)
            };
            op.factors[fac as usize].whole || outs.iter().zip(&n.outs).any(through)
        };
        let bit = |(d, fs): (usize, &DimFactors)| u16::from(fs.len() == 1 && needs(fs[0])) << d;
        let bits = ins.iter().map(|t| t.dims.iter().enumerate().map(bit).sum());
        let bits: SmallVec<[(Value, u16); 4]> = n.ins.iter().copied().zip(bits).collect();
        for (v, b) in bits {
            let b = b & !asked[v];
            closed[v] = if used[v] { closed[v] & b } else { b };
            used[v] = true;
        }
    }
    closed
}

impl Propagation<'_> {
    /// Lets an annotation speak at its priority, and keeps its atoms free before.
    fn apply(&mut self, v: Value, a: &Annotation, now: u8) {
        if a.priority > now {
            let own = a.dims.iter().fold(AtomSet::EMPTY, |s, d| s.union(d.atoms.set()));
            self.held[v] = own;
            for (d, x) in a.dims.iter().enumerate() {
                if !x.atoms.is_empty() || !x.open {
                    self.closed[v] |= 1 << d;
                }
            }
            return;
        }
        self.held[v] = AtomSet::EMPTY;
        for (d, x) in a.dims.iter().enumerate() {
            if x.open {
                self.closed[v] &= !(1 << d);
            } else {
                self.closed[v] |= 1 << d;
            }
            if a.priority == now && x.atoms.starts_with(self.dims[v][d]) {
                for atom in x.atoms.iter().skip(self.dims[v][d].len()) {
                    let from = Origin::Annotation { priority: now };
                    self.causes.push(Cause { value: v, dim: d, atom, from });
                }
                self.dims[v][d] = x.atoms;
            }
        }
    }

    fn fixed_point(&mut self, uses: &Uses, priority: u8, round: u8) {
        let n = self.ops.len();
        let mut queued = vec![true; n];
        let mut queue: std::collections::VecDeque<u32> = (0..n as u32).collect();
        while let Some(node) = queue.pop_front() {
            queued[node as usize] = false;
            for v in self.step(node, uses, priority, round) {
                for u in touching(uses, v) {
                    if !std::mem::replace(&mut queued[u], true) {
                        queue.push_back(u as u32);
                    }
                }
            }
        }
    }

    /// One op: every factor takes the longest split that all its tensors agree on.
    fn step(&mut self, node: u32, uses: &Uses, priority: u8, round: u8) -> SmallVec<[Value; 4]> {
        let (n, op) = (&self.f.nodes[node as usize], &self.ops[node as usize]);
        let mut grown = SmallVec::new();
        if round < 2 && !op.pointwise {
            return grown;
        }
        // One producer and one user touch a value that is used once.
        if round == 0 && n.ins.iter().any(|&v| touching(uses, v).nth(2).is_some()) {
            return grown;
        }
        // Longest list per factor, and the tensor it comes from.
        let mut best: SmallVec<[(AtomList, usize); 8]> =
            op.factors.iter().map(|_| (AtomList::EMPTY, usize::MAX)).collect();
        for (ti, t) in op.tensors.iter().enumerate() {
            for (d, fs) in t.dims.iter().enumerate() {
                let atoms = self.dims[named(n, ti)][d];
                if atoms.is_empty() {
                    continue;
                }
                project(self.mesh, op, fs, atoms, |f, list| {
                    let (b, from) = &mut best[f as usize];
                    if list.starts_with(*b) {
                        if list.len() > b.len() {
                            (*b, *from) = (list, ti);
                        }
                    } else if !b.starts_with(list) {
                        let same = b.iter().zip(list.iter()).take_while(|(x, y)| x == y).count();
                        *b = b.take(same);
                    }
                });
            }
        }
        // Factors of larger source tensors first (Shardy's aggressive strategy).
        let mut order: SmallVec<[usize; 8]> = (0..op.factors.len())
            .filter(|&f| {
                !best[f].0.is_empty()
                    && !op.factors[f].whole
                    && (round == 3 || !op.factors[f].reduced)
            })
            .collect();
        // Whatever is not empty comes from a tensor.
        let size_of = |f: usize| self.f.ty(named(n, best[f].1)).elements();
        order.sort_by_key(|&f| (std::cmp::Reverse(size_of(f)), f));
        for f in order {
            let (list, from) = best[f];
            let source = named(n, from);
            for results_first in [true, false] {
                let all = op.tensors.iter().enumerate();
                for (ti, t) in all.filter(|t| t.1.result == results_first) {
                    let value = named(n, ti);
                    let at = t.dims.iter().position(|d| d.contains(&(f as u8)));
                    let Some(d) = at.filter(|&d| self.closed[value] >> d & 1 == 0) else {
                        continue;
                    };
                    let longer = grow(
                        self.mesh,
                        op,
                        &t.dims[d],
                        f as u8,
                        list,
                        &self.dims[value],
                        d,
                        self.held[value],
                    );
                    if let Some(new) = longer {
                        for atom in new.iter().skip(self.dims[value][d].len()) {
                            let from = Origin::Op { node, value: source, priority, round };
                            self.causes.push(Cause { value, dim: d, atom, from });
                        }
                        self.dims[value][d] = new;
                        grown.push(value);
                    }
                }
            }
        }
        grown
    }
}

/// The dim's atoms with factor `f` split as `list`, as far as legal; `None` if nothing is added.
#[allow(clippy::too_many_arguments)]
fn grow(
    mesh: &Mesh,
    op: &OpFactors,
    dim: &[u8],
    f: u8,
    list: AtomList,
    now: &Dims,
    d: usize,
    held: AtomSet,
) -> Option<AtomList> {
    if dim.len() == 1 && list.len() <= now[d].len() {
        return None;
    }
    let mut parts: SmallVec<[AtomList; 3]> = dim.iter().map(|_| AtomList::EMPTY).collect();
    let mut covered = 0;
    project(mesh, op, dim, now[d], |g, l| {
        if let Some(k) = dim.iter().position(|&x| x == g) {
            parts[k] = l;
            covered += l.len();
        }
    });
    if covered != now[d].len() {
        return None; // atoms that straddle factors stay as they are
    }
    let k = dim.iter().position(|&x| x == f)?;
    let ways = |l: AtomList| l.iter().map(|a| mesh.size(a)).product::<usize>();
    let full = |k: usize| ways(parts[k]) == op.factors[dim[k] as usize].size;
    if !list.starts_with(parts[k])
        || !(0..k).all(full)
        || parts[k + 1..].iter().any(|p| !p.is_empty())
    {
        return None;
    }
    let used = now.iter().fold(held, |s, l| s.union(l.set()));
    let size = op.factors[f as usize].size;
    let mut out = now[d];
    let mut w = ways(parts[k]);
    for a in list.iter().skip(parts[k].len()) {
        let next = w * mesh.size(a);
        // Only a dim of one factor may be cut unevenly.
        let fits = size % next == 0 || (dim.len() == 1 && size >= next);
        if used.has(a) || !fits {
            break;
        }
        out = out.push(a)?;
        w = next;
    }
    (out.len() > now[d].len()).then_some(out)
}
