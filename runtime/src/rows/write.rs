//! Writes the loops of a walk: reads operands where they lie if loops can, makes one loop of two
//! where there is one that does both, writes results where they belong, and gives other values
//! registers.

use super::code::{Access, Instruction};
use super::loops::{self, ElementKind, Loop};
use shardc_ir::kernel::{Binary, Rows, Scalar, Unary};
use shardc_ir::types::{DType, Reduction};
use smallvec::{SmallVec, smallvec};

/// What a loop reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Where {
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
pub(super) struct Found {
    pub at: Where,
    pub kind: ElementKind,
}

/// What a loop does.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Does {
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
pub(super) struct Step {
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
pub(super) struct Writer<'a> {
    pub k: &'a Rows,
    pub accesses: &'a [Access],
    /// By value: instructions, and what was added.
    pub found: Vec<Option<Found>>,
    pub steps: Vec<Step>,
    /// Registers in use, and most of them so far.
    pub taken: Vec<bool>,
    pub partials: usize,
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

    /// The instructions of a section: values of elements, then folds of some, then what is stored
    /// of some.
    pub fn section(
        &mut self,
        stage: &[usize],
        left: &[(usize, usize)],
        folds: &[(usize, Reduction, Where)],
        stores: &[(usize, usize)],
        keep: bool,
    ) -> Vec<Instruction> {
        for &i in stage {
            // What is stored, or read by later sections, is read first: another result may lie on it.
            let in_place = !keep && (stores.len() < 2 || !stores.iter().any(|s| s.1 == i));
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
        // Later sections may read what this one makes.
        if !keep {
            self.fuse();
        }
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
                Some(Found { at: Where::Memory(a), .. }) => self.accesses[a].walks_as(access),
                _ => false,
            };
            let loads = |s: &Step| match s.does {
                Does::Load(a) => self.accesses.get(a).is_some_and(|a| a.walks_as(access)),
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

    pub fn register(&mut self) -> usize {
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
                Where::Partial(i) => (self.numbers() + i, 0),
                Where::Register(i) => (self.numbers() + self.partials + i, 0),
                Where::Memory(i) => {
                    let a = &self.accesses[i];
                    (ACCESS + i, a.elem.map_or(1, |d| a.stride * d.bytes()))
                }
            };
        }
        Instruction { run, slots, steps, stride }
    }

    pub fn numbers(&self) -> usize {
        self.k.body.len() + 1
    }
}

/// Added to the number of an access until it is known how many registers there are.
pub(super) const ACCESS: usize = 1 << 32;
