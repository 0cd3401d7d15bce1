//! A kernel over rows as loops over blocks of elements: which loop does an instruction, and where it finds its
//! operands. What is computed once a row is a number; what is computed of elements lies in registers of a block
//! each, if it is not read or written where it lies in memory.

use super::loops::{self, ElementKind, Loop};
use crate::map::BLOCK;
use shardc_ir::kernel::{Binary, COLUMNS, Extents, Rows, Scalar, Stage, Unary, View};
use shardc_ir::types::{DType, Reduction};
use smallvec::{SmallVec, smallvec};

/// What a loop reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Where {
    /// Of an instruction that is one for a row.
    Number(usize),
    /// 16 partial folds.
    Partial(usize),
    Register(usize),
    /// Of [`RowCode::accesses`].
    Memory(usize),
}

/// Where a value is found, and how it lies there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Found {
    at: Where,
    kind: ElementKind,
}

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

/// A fold of rows side by side: what is computed before the walk over elements, for each, and after it.
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

/// What a loop does.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Does {
    /// Reads an access.
    Load(usize),
    One(Unary),
    Denominator,
    Two(Binary),
    /// The second of the result of the first and the third operand; or the other way round.
    Pair([Binary; 2], bool),
    Choose,
    Select,
    /// Into partial folds.
    Fold(Reduction, usize),
    FoldProducts(usize),
    /// Writes an access.
    Store(usize),
}

/// One loop, before it is known where its operands lie.
#[derive(Clone, Debug)]
struct Step {
    does: Does,
    args: SmallVec<[usize; 3]>,
    /// What it computes.
    value: usize,
    kind: ElementKind,
    /// Where the result is, if that is not a register of its own.
    to: Option<Where>,
    gone: bool,
}

fn function(fold: Reduction) -> Binary {
    match fold {
        Reduction::Sum => Binary::Add,
        Reduction::Max => Binary::Max,
        Reduction::Min => Binary::Min,
    }
}

fn is_arithmetic(f: Binary) -> bool {
    matches!(f, Binary::Add | Binary::Sub | Binary::Mul | Binary::Div)
}

impl Does {
    fn find(self, args: &[ElementKind], out: ElementKind, accesses: &[Access]) -> Option<Loop> {
        let three = || args.try_into().ok();
        match self {
            Does::Load(a) => Some(match accesses[a].elem {
                None => loops::copy(ElementKind::Column, out)?,
                Some(d) if accesses[a].stride == 1 => loops::copy(d.into(), out)?,
                Some(d) => loops::gather(d),
            }),
            Does::One(f) => loops::unary(f, args[0], out),
            Does::Denominator => loops::denominator(args[0], out),
            Does::Two(f) => loops::binary(f, args.try_into().ok()?, out),
            Does::Pair(all, behind) => loops::pair(all, behind, three()?, out),
            Does::Choose => loops::choose(three()?, out),
            Does::Select => loops::select(three()?, out),
            Does::Fold(r, _) => loops::fold(r, args[0]),
            Does::FoldProducts(_) => loops::fold_products(args.try_into().ok()?),
            Does::Store(a) => {
                let elem = accesses[a].elem?;
                match (accesses[a].stride, args[0]) {
                    (1, kind) => loops::copy(kind, elem.into()),
                    (_, ElementKind::F32) => Some(loops::scatter(elem)),
                    _apart => None,
                }
            }
        }
    }
}

/// Writes the loops of a walk.
struct Writer<'a> {
    k: &'a Rows,
    accesses: &'a [Access],
    /// By value: instructions, and what was added.
    found: Vec<Option<Found>>,
    steps: Vec<Step>,
    /// Registers in use, and most of them so far.
    taken: Vec<bool>,
    partials: usize,
}

impl Writer<'_> {
    /// The access of a load, of a store, or of columns.
    fn load(&self, i: usize) -> usize {
        i
    }
    fn store(&self, s: usize) -> usize {
        self.k.loads.len() + s
    }
    fn column(&self) -> usize {
        self.k.loads.len() + self.k.stores.len()
    }

    fn add(&mut self, does: Does, args: &[usize], value: usize) {
        let args = args.into();
        let kind = ElementKind::F32;
        self.steps.push(Step { does, args, value, kind, to: None, gone: false });
    }

    fn new_value(&mut self) -> usize {
        self.found.push(None);
        self.found.len() - 1
    }

    /// A value is read where it lies if loops can, else by a loop of its own.
    fn read(&mut self, value: usize, access: usize, in_place: bool) {
        let a = &self.accesses[access];
        let kind = match (a.elem, a.stride) {
            (None, _) => ElementKind::Column,
            (Some(DType::F32), 0) => ElementKind::Same,
            (Some(d @ (DType::F32 | DType::BF16)), 1) => d.into(),
            _apart => return self.add(Does::Load(access), &[], value),
        };
        match in_place {
            true => self.found[value] = Some(Found { at: Where::Memory(access), kind }),
            false => self.add(Does::Load(access), &[], value),
        }
    }

    /// The instructions of a section: values of elements, then folds of some, then what is stored of some.
    fn section(
        &mut self,
        stage: &[usize],
        left: &[(usize, usize)],
        folds: &[(usize, Reduction, Where)],
        stores: &[(usize, usize)],
        keep: bool,
    ) -> Vec<Instruction> {
        for &i in stage {
            // What is stored is read first: another result may lie on it.
            let in_place = stores.len() < 2 || !stores.iter().any(|s| s.1 == i);
            match left.iter().find(|x| x.0 == i) {
                Some(&(_, s)) => self.read(i, self.store(s), in_place),
                None => self.instruction(i, stage, in_place),
            }
        }
        for &(f, r, to) in folds {
            let Scalar::Fold(_, x) = self.k.body[f] else { panic!("a fold") };
            match to {
                Where::Register(_) => {
                    self.add(Does::Two(function(r)), &[f, x], f);
                    self.steps.last_mut().expect("a step").to = Some(to);
                }
                Where::Partial(at) => {
                    let none = self.new_value();
                    self.add(Does::Fold(r, at), &[x], none);
                }
                at => panic!("{at:?} is no fold"),
            }
        }
        for &(s, value) in stores {
            let none = self.new_value();
            self.add(Does::Store(self.store(s)), &[value], none);
        }
        self.fuse();
        self.make_readable();
        self.write_in_place();
        let code = self.emit(keep);
        self.steps.clear();
        code
    }

    fn instruction(&mut self, i: usize, stage: &[usize], in_place: bool) {
        if self.found[i].is_some() {
            return;
        }
        let body = &self.k.body;
        let other =
            |f: Unary, a: usize| stage.iter().any(|&i| body[i] == Scalar::Unary(f, a)).then_some(a);
        match body[i] {
            Scalar::Load(l) => self.read(i, self.load(l), in_place),
            Scalar::Column => self.read(i, self.column(), in_place),
            // Both divide by the same.
            Scalar::Unary(Unary::Silu, a) if other(Unary::Logistic, a).is_some() => {
                let d = self.denominator(a);
                self.add(Does::Two(Binary::Div), &[a, d], i);
            }
            Scalar::Unary(Unary::Logistic, a) if other(Unary::Silu, a).is_some() => {
                let (d, one) = (self.denominator(a), self.k.body.len());
                self.add(Does::Two(Binary::Div), &[one, d], i);
            }
            Scalar::Unary(f, a) => self.add(Does::One(f), &[a], i),
            Scalar::Binary(f, a, b) => self.add(Does::Two(f), &[a, b], i),
            Scalar::Where(a, b, c) => self.add(Does::Choose, &[a, b, c], i),
            Scalar::Select(a, b, c) => self.add(Does::Select, &[a, b, c], i),
            Scalar::Const(_) | Scalar::Param(_) | Scalar::Fold(..) => panic!("it is a number"),
        }
    }

    fn denominator(&mut self, a: usize) -> usize {
        let there = self.steps.iter().find(|s| s.does == Does::Denominator && s.args[0] == a);
        if let Some(s) = there {
            return s.value;
        }
        let value = self.new_value();
        self.add(Does::Denominator, &[a], value);
        value
    }

    /// The step that computes a value for one use alone.
    fn maker(&self, value: usize) -> Option<usize> {
        let uses = self.steps.iter().filter(|s| !s.gone).flat_map(|s| &s.args);
        if uses.filter(|&&x| x == value).count() != 1 {
            return None;
        }
        self.steps.iter().position(|s| !s.gone && s.value == value && s.to.is_none())
    }

    /// Makes one loop of two where there is one that does both.
    fn fuse(&mut self) {
        for i in 0..self.steps.len() {
            let s = self.steps[i].clone();
            match s.does {
                Does::One(Unary::Round(DType::BF16)) => {
                    let Some(m) = self.maker(s.args[0]) else { continue };
                    let rounds = match self.steps[m].does {
                        Does::One(f) => !matches!(f, Unary::Round(_)),
                        Does::Two(f) => is_arithmetic(f),
                        _ => false,
                    };
                    if rounds {
                        self.steps[i].gone = true;
                        let m = &mut self.steps[m];
                        (m.kind, m.value) = (ElementKind::Rounded, s.value);
                    }
                }
                Does::Fold(Reduction::Sum, at) => {
                    let Some(m) = self.maker(s.args[0]) else { continue };
                    let (of, does) = (self.steps[m].clone(), Does::FoldProducts(at));
                    let kinds: SmallVec<[_; 3]> = of.args.iter().map(|&v| self.kind(v)).collect();
                    if (of.does, of.kind) == (Does::Two(Binary::Mul), ElementKind::F32)
                        && does.find(&kinds, s.kind, &[]).is_some()
                    {
                        self.steps[m].gone = true;
                        let s = &mut self.steps[i];
                        (s.does, s.args) = (does, of.args);
                    }
                }
                _ => {}
            }
        }
        for i in 0..self.steps.len() {
            let s = self.steps[i].clone();
            let Does::Two(then) = s.does else { continue };
            if s.gone
                || !is_arithmetic(then)
                || s.kind != ElementKind::F32
                || s.args[0] == s.args[1]
            {
                continue;
            }
            for (x, other) in [(s.args[0], s.args[1]), (s.args[1], s.args[0])] {
                let Some(m) = self.maker(x) else { continue };
                let (first, args) =
                    (self.steps[m].clone(), [0, 1].map(|j| self.steps[m].args.get(j)));
                let (Does::Two(f), [Some(&a), Some(&b)]) = (first.does, args) else { continue };
                let does = Does::Pair([f, then], x == s.args[1]);
                let kinds = [a, b, other].map(|v| self.kind(v));
                if first.kind != ElementKind::F32 || does.find(&kinds, s.kind, &[]).is_none() {
                    continue;
                }
                self.steps[m].gone = true;
                let s = &mut self.steps[i];
                (s.does, s.args) = (does, smallvec![a, b, other]);
                break;
            }
        }
        self.steps.retain(|s| !s.gone);
    }

    fn kind(&self, value: usize) -> ElementKind {
        self.found[value].map_or(ElementKind::F32, |f| f.kind)
    }

    /// Adds loops that read what others cannot read where it lies.
    fn make_readable(&mut self) {
        let mut copies: Vec<(usize, usize)> = vec![];
        for mut s in std::mem::take(&mut self.steps) {
            for (v, copy) in &copies {
                s.args.iter_mut().filter(|a| *a == v).for_each(|a| *a = *copy);
            }
            let kinds: SmallVec<[ElementKind; 3]> = s.args.iter().map(|&a| self.kind(a)).collect();
            if s.does.find(&kinds, s.kind, self.accesses).is_none() {
                for (j, &kind) in kinds.iter().enumerate().filter(|x| *x.1 != ElementKind::F32) {
                    let v = s.args[j];
                    let old = copies.iter().find(|c| c.0 == v).map(|c| c.1);
                    let copy = old.unwrap_or_else(|| {
                        let copy = self.new_value();
                        let load = (kind, self.found[v].map(|f| f.at));
                        match load {
                            (ElementKind::Bf16 | ElementKind::Column, Some(Where::Memory(a))) => {
                                self.add(Does::Load(a), &[], copy);
                            }
                            // A number, for all elements.
                            _ => self.add(Does::Load(usize::MAX), &[v], copy),
                        }
                        copies.push((v, copy));
                        copy
                    });
                    s.args[j] = copy;
                }
            }
            self.steps.push(s);
        }
    }

    /// Lets loops write results where they belong, if no later one reads what a result may lie on.
    fn write_in_place(&mut self) {
        for i in 0..self.steps.len() {
            let Does::Store(to) = self.steps[i].does else { continue };
            let (access, value) = (&self.accesses[to], self.steps[i].args[0]);
            let Some(m) = self.maker(value) else { continue };
            let made = &self.steps[m];
            let kind = match (access.elem, made.does, made.kind) {
                (Some(DType::F32), Does::Load(_), _) => continue,
                (Some(DType::F32), _, kind) => kind,
                (Some(DType::BF16), Does::Two(f), _) if is_arithmetic(f) => ElementKind::Bf16,
                _ => continue,
            };
            let alike = |v: &usize| match self.found[*v] {
                Some(Found { at: Where::Memory(a), .. }) => {
                    self.accesses[a].view.strides == access.view.strides
                }
                _ => false,
            };
            let loads = |s: &Step| match s.does {
                Does::Load(a) => {
                    self.accesses.get(a).is_some_and(|a| a.view.strides == access.view.strides)
                }
                _ => false,
            };
            let read = self.steps[m + 1..].iter().any(|s| s.args.iter().any(alike) || loads(s));
            if access.stride == 1 && !read {
                let m = &mut self.steps[m];
                (m.kind, m.to) = (kind, Some(Where::Memory(to)));
                self.steps[i].gone = true;
            }
        }
        self.steps.retain(|s| !s.gone);
    }

    fn register(&mut self) -> usize {
        let free = self.taken.iter().position(|t| !t).unwrap_or(self.taken.len());
        self.taken.resize(self.taken.len().max(free + 1), false);
        self.taken[free] = true;
        free
    }

    /// Gives values registers, as long as they are used, or for ever.
    fn emit(&mut self, keep: bool) -> Vec<Instruction> {
        let (mut all, mut own) = (vec![], vec![]);
        for i in 0..self.steps.len() {
            let s = self.steps[i].clone();
            let last = |v: &usize| !self.steps[i + 1..].iter().any(|s| s.args.contains(v));
            let args: SmallVec<[Found; 3]> = match s.does {
                Does::Load(a) if a != usize::MAX => {
                    smallvec![Found { at: Where::Memory(a), kind: ElementKind::F32 }]
                }
                _ => s.args.iter().map(|&a| self.found[a].expect("computed before")).collect(),
            };
            let done: Vec<usize> =
                s.args.iter().copied().filter(|v| own.contains(v) && last(v)).collect();
            for v in done.into_iter().filter(|_| !keep) {
                own.retain(|x| *x != v);
                if let Some(Found { at: Where::Register(r), .. }) = self.found[v] {
                    self.taken[r] = false;
                }
            }
            let kinds: SmallVec<[ElementKind; 3]> = args.iter().map(|a| a.kind).collect();
            let run = match s.does {
                Does::Load(usize::MAX) => loops::copy(kinds[0], s.kind),
                does => does.find(&kinds, s.kind, self.accesses),
            };
            let (to, stride) = match s.does {
                Does::Fold(_, at) | Does::FoldProducts(at) => (Where::Partial(at), 0),
                Does::Store(a) => (Where::Memory(a), self.accesses[a].stride),
                Does::Load(usize::MAX) => (Where::Register(self.register()), 0),
                Does::Load(a) => (Where::Register(self.register()), self.accesses[a].stride),
                _ => (s.to.unwrap_or_else(|| Where::Register(self.register())), 0),
            };
            if let (Where::Register(_), None) = (to, s.to) {
                self.found[s.value] = Some(Found { at: to, kind: ElementKind::F32 });
                own.push(s.value);
            }
            all.push(self.placed(run.expect("there is a loop for it"), &args, to, stride));
        }
        for v in own.into_iter().filter(|_| !keep) {
            if let Some(Found { at: Where::Register(r), .. }) = self.found[v].take() {
                self.taken[r] = false;
            }
        }
        all
    }

    fn placed(&self, run: Loop, args: &[Found], to: Where, stride: usize) -> Instruction {
        let (mut slots, mut steps) = ([0; 4], [0; 4]);
        let all = args.iter().map(|a| a.at).enumerate().chain([(3, to)]);
        for (j, at) in all {
            (slots[j], steps[j]) = match at {
                Where::Number(i) => (i, 0),
                Where::Partial(i) => (self.found_numbers() + i, 0),
                Where::Register(i) => (self.found_numbers() + self.partials + i, 0),
                Where::Memory(i) => {
                    let a = &self.accesses[i];
                    (ACCESS + i, a.elem.map_or(1, |d| a.stride * d.bytes()))
                }
            };
        }
        Instruction { run, slots, steps, stride }
    }

    fn found_numbers(&self) -> usize {
        self.k.body.len() + 1
    }
}

/// Added to the number of an access until it is known how many registers there are.
const ACCESS: usize = 1 << 32;

impl RowCode {
    /// Tasks of a kernel of this name, and numbers that each of them leaves for the one behind them.
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
        let places = [w.found_numbers(), partials, w.taken.len()];
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
        // Kernels of one name may differ in how many rows there are: the first loop is as long as tasks say.
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
