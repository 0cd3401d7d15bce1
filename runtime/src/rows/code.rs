//! A kernel over rows as loops over blocks of elements: which loop does an instruction, and where
//! it finds its operands. What is computed once a row is a number; what is computed of elements
//! lies in registers of a block each, if it is not read or written where it lies in memory.

use super::loops::{ElementKind, Loop};
use super::write::{ACCESS, Found, Where, Writer};
use crate::map::BLOCK;
use shardc_ir::kernel::{COLUMNS, Extents, Rows, Scalar, Stage, View};
use shardc_ir::types::{DType, Reduction};
use smallvec::smallvec;

/// Memory that a kernel walks over, or the numbers of columns.
pub(super) struct Access {
    pub view: View,
    /// `None`: the number of a column.
    pub elem: Option<DType>,
    /// Elements between those of a block.
    pub stride: usize,
    /// Bytes from the operand's first element to the view's, and from index to index of all loops.
    pub first: usize,
    pub steps: Extents,
}

impl Access {
    fn of(view: View, elem: Option<DType>, along: Option<usize>) -> Access {
        let (size, strides) = (elem.map_or(1, DType::bytes), &view.strides);
        Access {
            stride: along.and_then(|l| strides.get(l)).copied().unwrap_or(0),
            first: view.offset * size,
            steps: strides.iter().map(|s| s * size).collect(),
            view,
            elem,
        }
    }

    /// Whether both reach memory in the same order: one may lie on the other then. What has no strides stays where it
    /// is.
    pub fn walks_as(&self, other: &Access) -> bool {
        let (a, b) = (&self.view.strides, &other.view.strides);
        let at = |of: &Extents, l: usize| of.get(l).copied().unwrap_or(0);
        (0..a.len().max(b.len())).all(|l| at(a, l) == at(b, l))
    }
}

/// One loop over a block.
pub(super) struct Instruction {
    pub run: Loop,
    /// Operands and result, by their places in a frame.
    pub slots: [usize; 4],
    /// Bytes by which these move from element to element.
    pub steps: [usize; 4],
    pub stride: usize,
}

/// A walk over a row, or over one element of many.
pub(super) struct Walk {
    /// Numbers of the row that are computed before it.
    pub before: Vec<usize>,
    pub code: Vec<Instruction>,
    pub folds: Vec<(usize, Reduction)>,
}

/// A fold of rows side by side: what is computed before the walk over elements, for each, and after
/// it.
pub(super) struct SideBySide {
    pub code: [Vec<Instruction>; 3],
    /// Registers of the folds.
    pub folds: Vec<(usize, Reduction)>,
}

pub(super) enum Shape {
    Rows(Vec<Walk>),
    /// One row in parts: the walk, and what is computed of its folds.
    Parts(Walk, Vec<usize>),
    Columns(SideBySide),
}

/// A kernel that is ready to run with any parameters.
pub(crate) struct RowCode {
    pub(super) k: Rows,
    pub(super) accesses: Vec<Access>,
    pub(super) shape: Shape,
    /// Tasks that a row is cut into.
    pub(super) chunks: usize,
    /// Places of a frame: numbers, partial folds, registers; accesses are behind them.
    pub(super) places: [usize; 3],
}

impl RowCode {
    /// Tasks of a kernel of this name, and numbers that each of them leaves for the one behind
    /// them.
    pub(super) fn tasks(&self, k: &Rows) -> [usize; 2] {
        match (&self.shape, k.outer.split_last()) {
            (Shape::Columns(_), Some((n, rest))) => {
                [rest.iter().product::<usize>() * n.div_ceil(COLUMNS), 0]
            }
            (Shape::Parts(walk, _), _) => [self.chunks, walk.folds.len()],
            _by_row => [k.outer.iter().product::<usize>() * self.chunks, 0],
        }
    }

    pub fn of(k: &Rows) -> RowCode {
        let (no, ni) = (k.outer.len(), k.inner.len());
        let by_columns = k.by_columns();
        let along = if by_columns { Some(no - 1) } else { (ni > 0).then(|| no + ni - 1) };
        let access = |view: &View, elem| Access::of(view.clone(), Some(elem), along);
        let mut accesses: Vec<Access> = vec![];
        accesses.extend(k.loads.iter().map(|l| access(&l.view, l.elem)));
        accesses.extend(k.stores.iter().map(|s| access(&s.view, s.elem)));
        // The number of an element in its row.
        let mut strides: Extents = smallvec![0; no + ni];
        let mut size = 1;
        for (l, n) in k.inner.iter().enumerate().rev() {
            strides[no + l] = size;
            size *= n;
        }
        let view = View { operand: usize::MAX, offset: 0, strides };
        accesses.push(Access { stride: 1, ..Access::of(view, None, None) });
        let folds = |s: &Stage| s.folds.len();
        let parts = k.in_parts();
        let stages = if by_columns { k.stages() } else { k.stages_kept() };
        let partials = parts.iter().flatten().chain(&stages).map(folds).max().unwrap_or(0);
        let mut w = Writer {
            k,
            accesses: &accesses,
            found: vec![None; k.body.len() + 1],
            steps: vec![],
            taken: vec![],
            partials,
        };
        let numbers = |w: &mut Writer, all: &mut dyn Iterator<Item = usize>| {
            all.for_each(|i| {
                w.found[i] = Some(Found { at: Where::Number(i), kind: ElementKind::Same });
            });
        };
        numbers(&mut w, &mut std::iter::once(k.body.len()));
        let mut shape = if by_columns {
            let constant = |i: &usize| matches!(k.body[*i], Scalar::Const(_) | Scalar::Param(_));
            numbers(&mut w, &mut (0..k.body.len()).filter(constant));
            Shape::Columns(w.columns(&stages))
        } else {
            let by_element = k.by_element();
            numbers(&mut w, &mut (0..k.body.len()).filter(|&i| !by_element[i]));
            match parts {
                Some([walk, end]) => Shape::Parts(w.walk(&walk), w.numbers_of(&end.before)),
                None => Shape::Rows(stages.iter().map(|s| w.walk(s)).collect()),
            }
        };
        let places = [w.numbers(), partials, w.taken.len()];
        let first: usize = places.iter().sum();
        let all: Vec<&mut Vec<Instruction>> = match &mut shape {
            Shape::Rows(walks) => walks.iter_mut().map(|w| &mut w.code).collect(),
            Shape::Parts(walk, _) => vec![&mut walk.code],
            Shape::Columns(all) => all.code.iter_mut().collect(),
        };
        for slot in all.into_iter().flatten().flat_map(|i| &mut i.slots) {
            if *slot >= ACCESS {
                *slot = *slot - ACCESS + first;
            }
        }
        let mut k = k.clone();
        // Kernels of one name may differ in how many rows there are: the first loop is as long as
        // tasks say.
        if !by_columns || no > 1 {
            k.outer.first_mut().into_iter().for_each(|n| *n = usize::MAX);
        }
        RowCode { chunks: k.chunks(), k, accesses, shape, places }
    }
}

impl Writer<'_> {
    /// Instructions of these that are computed for every row.
    fn numbers_of(&self, before: &[usize]) -> Vec<usize> {
        let constant = |i: &&usize| matches!(self.k.body[**i], Scalar::Const(_) | Scalar::Param(_));
        before.iter().filter(|i| !constant(i)).copied().collect()
    }

    fn walk(&mut self, stage: &Stage) -> Walk {
        let reduction = |f: usize| match self.k.body[f] {
            Scalar::Fold(r, _) => r,
            other => panic!("{other:?} is not a fold"),
        };
        let folds: Vec<(usize, Reduction)> =
            stage.folds.iter().map(|&f| (f, reduction(f))).collect();
        let into: Vec<_> =
            folds.iter().enumerate().map(|(j, &(f, r))| (f, r, Where::Partial(j))).collect();
        // Each walk finds values of elements anew.
        let by_element = self.k.by_element();
        (0..by_element.len()).filter(|&i| by_element[i]).for_each(|i| self.found[i] = None);
        self.found.truncate(self.k.body.len() + 1);
        let code = self.section(&stage.each, &stage.found, &into, &stage.written, false);
        Walk { before: self.numbers_of(&stage.before), code, folds }
    }

    fn columns(&mut self, stages: &[Stage]) -> SideBySide {
        let [walk, end] = stages else { panic!("a fold by columns is one walk") };
        let constant =
            |k: &Rows, i: &usize| matches!(k.body[*i], Scalar::Const(_) | Scalar::Param(_));
        let vectors = |k: &Rows, all: &[usize]| -> Vec<usize> {
            all.iter().filter(|i| !constant(k, i)).copied().collect()
        };
        let mut into = vec![];
        for &f in &walk.folds {
            let Scalar::Fold(r, _) = self.k.body[f] else { panic!("a fold") };
            let register = self.register();
            self.found[f] = Some(Found { at: Where::Register(register), kind: ElementKind::F32 });
            into.push((f, r, Where::Register(register)));
        }
        let folds = into.iter().map(|&(_, r, to)| match to {
            Where::Register(i) => (i, r),
            at => panic!("{at:?} is no register"),
        });
        let folds = folds.collect();
        let before = self.section(&vectors(self.k, &walk.before), &[], &[], &[], true);
        let each = self.section(&vectors(self.k, &walk.each), &[], &into, &[], false);
        let stores: Vec<(usize, usize)> =
            self.k.stores.iter().enumerate().map(|(i, s)| (i, s.value)).collect();
        let after = self.section(&vectors(self.k, &end.before), &[], &[], &stores, false);
        SideBySide { code: [before, each, after], folds }
    }
}

/// The room of a register, in words.
pub(super) const REGISTER: usize = BLOCK;
