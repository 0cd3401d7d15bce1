//! The loops of ops, by number, and which of them the dims of operands and results are made of.

use shardc_ir::boxes::Halo;
use shardc_ir::func::{Func, Value};
use shardc_ir::mesh::{Atom, Mesh};
use shardc_ir::rule::{Group, LETTERS, Letter, MAX_GROUP, has_letter};
use shardc_ir::types::AtomList;
use smallvec::SmallVec;

/// One loop of an op.
pub(super) struct Factor {
    pub size: usize,
    pub whole: bool,
    /// Missing in every result.
    pub reduced: bool,
}

/// One operand or result, with the factors (by number) of each dim.
pub(super) struct Tensor {
    pub value: Value,
    pub result: bool,
    pub dims: SmallVec<[DimFactors; 4]>,
}

/// The factors of one dim, major to minor, in one word.
#[derive(Clone, Copy)]
pub(super) struct DimFactors {
    len: u8,
    all: [u8; MAX_GROUP],
}

impl std::ops::Deref for DimFactors {
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

/// The letters of a node's rule, with sizes.
pub(crate) fn factors(f: &Func, node: usize) -> OpFactors {
    let n = &f.nodes[node];
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
    let tensor = |result, dims: &shardc_ir::rule::Dims, value| Tensor {
        value,
        result,
        dims: dims.iter().map(numbers).collect(),
    };
    let ins = rule.ins.iter().zip(&n.ins).map(|(d, &v)| tensor(false, d, v));
    let outs = rule.outs.iter().zip(&n.outs).map(|(d, &v)| tensor(true, d, v));
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
    /// Calls `f(tensor, value, is result, dim)` for every dim of every operand and result.
    pub(crate) fn each_dim(&self, mut f: impl FnMut(usize, Value, bool, usize)) {
        for (i, t) in self.tensors.iter().enumerate() {
            (0..t.dims.len()).for_each(|d| f(i, t.value, t.result, d));
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
        let fs = &self.tensors[i].dims[d];
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
