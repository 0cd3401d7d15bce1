//! The loops of ops, by number, and which of them the dims of operands and results are made of.

use shardc_ir::alike::{self, Alike};
use shardc_ir::boxes::Halo;
use shardc_ir::func::{Func, Node, Value};
use shardc_ir::mesh::{Atom, Mesh};
use shardc_ir::rule::{Dims, Group, LETTERS, Letter, MAX_GROUP, has_letter};
use shardc_ir::types::AtomList;
use smallvec::SmallVec;
use std::ops::{Deref, Index};

/// One loop of an op.
pub(super) struct Factor {
    pub size: usize,
    pub whole: bool,
    /// Missing in every result.
    pub reduced: bool,
}

/// One operand or result, with the factors (by number) of each dim.
pub(super) struct Tensor {
    pub result: bool,
    pub dims: SmallVec<[DimFactors; 4]>,
}

/// The factors of one dim, major to minor, in one word.
#[derive(Clone, Copy)]
pub(super) struct DimFactors {
    len: u8,
    all: [u8; MAX_GROUP],
}

impl Deref for DimFactors {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.all[..usize::from(self.len)]
    }
}

/// The factors of one op.
pub(crate) struct OpFactors {
    pub(super) factors: SmallVec<[Factor; 8]>,
    pub(super) tensors: SmallVec<[Tensor; 4]>,
    /// Element-wise, or a change of dims only.
    pub(super) pointwise: bool,
    /// The loop over a dim whose indices the op shifts: ranks that split it exchange what crosses.
    shifted: Option<(u8, Halo)>,
}

/// The factors of all nodes of a function. Those of one op and operands of the same sizes have the same, as the nodes
/// of most layers do.
pub(crate) struct Factors {
    known: Vec<OpFactors>,
    /// By node.
    of: Vec<u32>,
}

impl Factors {
    pub(crate) fn of(f: &Func) -> Factors {
        let (mut known, mut of) = (vec![], Vec::with_capacity(f.nodes.len()));
        let mut alike: Alike<(&Node, u32)> = Alike::default();
        let sizes = |v: &Value| f.ty(*v).dims.iter().map(|d| d.size);
        for n in &f.nodes {
            let same = |x: &&Node| {
                let ins = || x.ins.iter().zip(&n.ins);
                x.op == n.op
                    && x.ins.len() == n.ins.len()
                    && ins().all(|(a, b)| sizes(a).eq(sizes(b)))
            };
            let key = alike::key(std::iter::once(&n.op), n.ins.iter().map(|&v| f.ty(v)));
            let own = alike.find(key, |x| same(&x.0)).map(|x| x.1);
            of.push(own.unwrap_or_else(|| {
                let new = known.len() as u32;
                known.push(factors(f, n));
                alike.add(key, (n, new));
                new
            }));
        }
        Factors { known, of }
    }

    pub(crate) fn len(&self) -> usize {
        self.of.len()
    }

    /// By node.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &OpFactors> + ExactSizeIterator {
        self.of.iter().map(|&i| &self.known[i as usize])
    }

    /// The same number for nodes that are alike, and for no others.
    pub(crate) fn kind(&self, node: usize) -> u32 {
        self.of[node]
    }
}

impl Index<usize> for Factors {
    type Output = OpFactors;
    fn index(&self, node: usize) -> &OpFactors {
        &self.known[self.of[node] as usize]
    }
}

/// A value that a node names: an operand, or behind these a result.
pub(super) fn named(n: &Node, i: usize) -> Value {
    match i.checked_sub(n.ins.len()) {
        None => n.ins[i],
        Some(o) => n.outs[o],
    }
}

/// The letters of a node's rule, with sizes.
fn factors(f: &Func, n: &Node) -> OpFactors {
    let ranks: SmallVec<[usize; 4]> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
    let rule = n.op.def().rule(&ranks);
    // One loop goes over both letters of a dim that is shifted: the operand's, and the result's.
    let shift = n.op.def().halo().and_then(|s| {
        let dim = s.dim.of(ranks[0])?;
        Some((rule.ins[0][dim].single()?, rule.outs[0][dim].single()?, s))
    });
    let mut letters = rule.letters();
    letters.retain(|l| shift.is_none_or(|s| *l != s.1));
    let mut places = [0; LETTERS];
    letters.iter().zip(0..).for_each(|(l, i)| places[usize::from(l.0)] = i);
    if let Some((from, to, _)) = shift {
        places[usize::from(to.0)] = places[usize::from(from.0)];
    }
    let place = |l: Letter| places[usize::from(l.0)];
    let types: SmallVec<[_; 4]> = n.ins.iter().map(|&v| f.ty(v)).collect();
    let sizes = shardc_ir::infer::sizes(&rule, &types, n.op.def().sizes()).unwrap_or_default();
    let size = |l: Letter| sizes.size(l).unwrap_or(1);
    let factor = |&l: &Letter| {
        let shifts = shift.filter(|s| s.0 == l);
        Factor {
            size: shifts.map_or(size(l), |s| size(l).min(size(s.1))),
            whole: rule.is_whole(l) && shifts.is_none(),
            reduced: !rule.outs.iter().any(|o| has_letter(o, l)) && shifts.is_none(),
        }
    };
    let numbers = |g: &Group| {
        let (letters, mut all) = (g.letters(), [0; MAX_GROUP]);
        all.iter_mut().zip(letters).for_each(|(n, &l)| *n = place(l));
        DimFactors { len: letters.len() as u8, all }
    };
    let tensor =
        |result| move |dims: &Dims| Tensor { result, dims: dims.iter().map(numbers).collect() };
    let (ins, outs) = (rule.ins.iter().map(tensor(false)), rule.outs.iter().map(tensor(true)));
    let tensors: SmallVec<[Tensor; 4]> = ins.chain(outs).collect();
    let factors: SmallVec<[Factor; 8]> = letters.iter().map(factor).collect();
    let pointwise = factors.iter().all(|x| !x.reduced)
        && tensors
            .iter()
            .filter(|t| !t.dims.is_empty())
            .all(|t| t.dims.iter().map(|d| d.len()).sum::<usize>() == factors.len());
    let shifted = shift.map(|s| (place(s.0), s.2));
    OpFactors { factors, tensors, pointwise, shifted }
}

/// Cuts a dim's atoms at its factors; atoms that fit no factor are left out.
pub(super) fn project(
    mesh: &Mesh,
    op: &OpFactors,
    dim: &[u8],
    atoms: AtomList,
    mut each: impl FnMut(u8, AtomList),
) {
    if let [only] = dim {
        return each(*only, atoms);
    }
    let mut rest = atoms.iter().peekable();
    for &f in dim {
        let size = op.factors[f as usize].size;
        let (mut list, mut ways) = (AtomList::EMPTY, 1);
        while let Some(&a) = rest.peek() {
            if size % (ways * mesh.size(a)) != 0 {
                break;
            }
            list = list.push(a).expect("no longer than the dim's");
            ways *= mesh.size(a);
            rest.next();
        }
        each(f, list);
        if ways != size {
            break;
        }
    }
}

impl OpFactors {
    /// True if a loop split over `now` may be split over `a` too: in every dim of several loops those
    /// major to it are full, and it is cut evenly.
    pub(crate) fn may_take(
        &self,
        mesh: &Mesh,
        f: u8,
        now: AtomList,
        a: Atom,
        lists: &[AtomList],
    ) -> bool {
        let ways = |l: AtomList| l.iter().map(|a| mesh.size(a)).product::<usize>();
        let joined =
            self.tensors.iter().flat_map(|t| &t.dims).filter(|d| d.len() > 1 && d.contains(&f));
        joined.into_iter().all(|d| {
            let major = d.iter().take_while(|&&g| g != f);
            let even = self.factors[f as usize].size % (ways(now) * mesh.size(a)) == 0;
            even && major
                .into_iter()
                .all(|&g| ways(lists[g as usize]) == self.factors[g as usize].size)
        })
    }
    pub(crate) fn factor_ids(&self) -> impl Iterator<Item = u8> {
        0..self.factors.len() as u8
    }
    /// The loop over a dim whose indices the op shifts.
    pub(crate) fn shifted(&self) -> Option<(u8, Halo)> {
        self.shifted
    }
    /// Iterations of a loop.
    pub(crate) fn size(&self, f: u8) -> usize {
        self.factors[f as usize].size
    }
    pub(crate) fn is_whole(&self, f: u8) -> bool {
        self.factors[f as usize].whole
    }
    pub(crate) fn is_reduced(&self, f: u8) -> bool {
        self.factors[f as usize].reduced
    }
    /// True if some loop is missing in every result.
    pub(crate) fn is_sum(&self) -> bool {
        self.factors.iter().any(|f| f.reduced)
    }
    /// Calls `f(tensor, value, is result, dim)` for every dim of every operand and result of a node.
    pub(crate) fn each_dim(&self, n: &Node, mut f: impl FnMut(usize, Value, bool, usize)) {
        for (i, t) in self.tensors.iter().enumerate() {
            let v = named(n, i);
            (0..t.dims.len()).for_each(|d| f(i, v, t.result, d));
        }
    }
    /// Cuts the atoms of dim `d` of tensor `i` at its factors.
    pub(crate) fn project_dim(
        &self,
        mesh: &Mesh,
        i: usize,
        d: usize,
        atoms: AtomList,
        each: impl FnMut(u8, AtomList),
    ) {
        project(mesh, self, &self.tensors[i].dims[d], atoms, each);
    }
    /// The atoms of dim `d` of tensor `i` (operands, then results) if factors are split so.
    pub(crate) fn dim_atoms(&self, i: usize, d: usize, lists: &[AtomList]) -> AtomList {
        // No letter says anything of the dims of a literal: they are whole.
        let Some(fs) = self.tensors[i].dims.get(d) else { return AtomList::EMPTY };
        if let [only] = fs[..] {
            return lists[only as usize];
        }
        let joined = fs.iter().flat_map(|&f| lists[f as usize].iter());
        AtomList::collect(joined).unwrap_or(AtomList::EMPTY)
    }
    /// True if tensor `i` has a dim that is split over `a`.
    pub(crate) fn holds(&self, i: usize, lists: &[AtomList], a: Atom) -> bool {
        self.tensors[i].dims.iter().flat_map(|d| &**d).any(|&f| lists[f as usize].set().has(a))
    }
}
