//! How an op may run: every split of its loops that its types allow.

use super::propagate::OpFactors;
use super::zero::Zero;
use shardc_ir::func::Func;
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::types::{AtomList, Type};
use smallvec::SmallVec;

/// How an op runs: per letter, the atoms its loop is split over.
#[derive(Clone, Default)]
pub(crate) struct Execution {
    pub lists: SmallVec<[AtomList; 8]>,
    pub atoms: AtomSet,
    /// Atoms over which ranks do the same, with operands and results that are replicated (R).
    pub spread: AtomSet,
}

impl Execution {
    pub fn whole(op: &OpFactors) -> Execution {
        let lists = op.factor_ids().map(|_| AtomList::EMPTY).collect();
        Execution { lists, ..Execution::default() }
    }

    /// Splits a loop over one more atom, if it may be.
    pub fn take(&mut self, mesh: &Mesh, op: &OpFactors, factor: u8, a: Atom) -> bool {
        let now = self.lists[factor as usize];
        let may = !self.atoms.has(a) && op.may_take(mesh, factor, now, a, &self.lists);
        let Some(new) = now.push(a).filter(|_| may) else { return false };
        self.lists[factor as usize] = new;
        self.atoms = self.atoms.with(a);
        true
    }

    /// The type that node `u` needs of its operand `j`.
    pub fn required(&self, f: &Func, op: &OpFactors, u: usize, j: usize) -> Type {
        let src = f.ty(f.nodes[u].ins[j]);
        let mut t = Type::new(src.dtype, &src.sizes());
        for (d, dim) in t.dims.iter_mut().enumerate() {
            dim.atoms = op.dim_atoms(j, d, &self.lists);
        }
        t.replicated = self.atoms.minus(t.sharded()).union(self.spread);
        t
    }

    /// The type of result `o` as far as letters say it.
    pub fn hint(&self, f: &Func, op: &OpFactors, u: usize, o: usize) -> Type {
        let n = &f.nodes[u];
        let src = f.ty(n.outs[o]);
        let mut t = Type::new(src.dtype, &src.sizes());
        for (d, dim) in t.dims.iter_mut().enumerate() {
            dim.atoms = op.dim_atoms(n.ins.len() + o, d, &self.lists);
        }
        if n.ins.is_empty() {
            t.replicated = self.spread;
        }
        t
    }
}

/// Where a parameter lies.
#[derive(Clone)]
pub(crate) struct Stored {
    /// What its uses agree on, or what it is asked to be.
    pub ty: Type,
    pub zero: Zero,
    /// What it is split over beside that, if `zero` splits.
    pub over: AtomSet,
}

/// How everything runs and lies.
pub(crate) struct Chosen {
    /// By node.
    pub run: Vec<Execution>,
    /// By value: its own layout, from which uses take theirs.
    pub own: Vec<Type>,
    /// By value, of parameters.
    pub stored: Vec<Option<Stored>>,
}

/// A way to run an op, with the types that it needs and gives.
#[derive(Clone)]
pub(crate) struct Way {
    pub run: Execution,
    pub ins: SmallVec<[Type; 4]>,
    pub outs: SmallVec<[Type; 2]>,
}

/// All ways to run a node over these atoms. Over each: a loop is split, evenly; or the ranks do the same, of
/// what is invariant, or of what is replicated. The first are preferred. Never empty: ranks may always do the
/// same.
pub(crate) fn ways(mesh: &Mesh, f: &Func, u: usize, op: &OpFactors, atoms: &[Atom]) -> Vec<Way> {
    let mut out = vec![];
    let mut more = |e: Execution| out.extend(way(mesh, f, u, op, e));
    each(mesh, op, atoms, Execution::whole(op), &mut more);
    out
}

fn each(mesh: &Mesh, op: &OpFactors, atoms: &[Atom], e: Execution, f: &mut impl FnMut(Execution)) {
    let Some((&a, rest)) = atoms.split_first() else { return f(e) };
    for factor in op.factor_ids().filter(|&g| !op.is_whole(g)) {
        let mut split = e.clone();
        let pieces: usize = e.lists[factor as usize].iter().map(|b| mesh.size(b)).product();
        let even = op.size(factor) % (pieces * mesh.size(a)) == 0;
        if even && split.take(mesh, op, factor, a) {
            each(mesh, op, rest, split, f);
        }
    }
    each(mesh, op, rest, e.clone(), f);
    each(mesh, op, rest, Execution { spread: e.spread.with(a), ..e }, f);
}

/// The way, if types allow it.
fn way(mesh: &Mesh, f: &Func, u: usize, op: &OpFactors, run: Execution) -> Option<Way> {
    let n = &f.nodes[u];
    let ins: SmallVec<[Type; 4]> = (0..n.ins.len()).map(|j| run.required(f, op, u, j)).collect();
    let hints: SmallVec<[Type; 2]> = (0..n.outs.len()).map(|o| run.hint(f, op, u, o)).collect();
    let given: SmallVec<[&Type; 4]> = ins.iter().collect();
    let wanted: SmallVec<[Option<&Type>; 2]> = hints.iter().map(Some).collect();
    let outs = n.op.check(mesh, &given, &wanted).ok()?;
    drop(given);
    Some(Way { run, ins, outs })
}
