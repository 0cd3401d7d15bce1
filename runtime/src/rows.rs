//! Kernels over rows, interpreted: what runs where kernels are not compiled, and what compiled ones
//! are compared with. Every instruction runs over a block of elements that stays in the nearest
//! cache, so its loop is plain and vectorises, and the cost of interpreting is shared by the block.
//!
//! A block runs along the last loop of a row or, if results lie next to each other but the elements
//! of a row do not, along the last loop over rows.

use crate::element::with_element;
use crate::map::{BLOCK, Odometer, element, gather, scatter};
use crate::math;
use crate::native::{Entry, Native};
use crate::product::blocks;
use crate::team;
use shardc_ir::kernel::{Binary, CHUNK, Extents, Rows, Scalar, Stage, Store, View};
use shardc_ir::types::Reduction;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::ops::Range;

/// What kernels have beside their memory; kept from kernel to kernel.
#[derive(Default)]
pub(crate) struct Registers {
    /// One block per instruction.
    blocks: Vec<f32>,
    /// What parts of rows leave.
    parts: Vec<f32>,
}

/// A kernel with its memory, at a place of its loops.
struct Interp<'a> {
    k: &'a Rows,
    memory: &'a [*mut f32],
    registers: *mut f32,
    /// The index of all loops but the one that a block runs along, which stands at its first element.
    index: Extents,
    /// The loop that a block runs along, if there is one.
    along: Option<usize>,
}

/// Folds that a walk makes, each 16 partial ones.
type Folds = SmallVec<[[f32; math::LANES]; 4]>;

fn start_of(fold: Reduction) -> f32 {
    match fold {
        Reduction::Sum => 0.0,
        Reduction::Max => f32::NEG_INFINITY,
        Reduction::Min => f32::INFINITY,
    }
}

fn function(fold: Reduction) -> Binary {
    match fold {
        Reduction::Sum => Binary::Add,
        Reduction::Max => Binary::Max,
        Reduction::Min => Binary::Min,
    }
}

impl Interp<'_> {
    /// The block of an instruction.
    ///
    /// # Safety
    /// No other reference to this register is used while this one is.
    #[allow(clippy::mut_from_ref)]
    unsafe fn register(&self, i: usize) -> &mut [f32; BLOCK] {
        // SAFETY: `run` made room for one block per instruction.
        unsafe { &mut *self.registers.add(i * BLOCK).cast() }
    }

    /// Where a view's elements begin, and how far apart they are.
    fn place(&self, v: &View) -> (usize, usize) {
        let stride = self.along.and_then(|l| v.strides.get(l)).copied().unwrap_or(0);
        (v.at(&self.index[..v.strides.len().min(self.index.len())]), stride)
    }

    /// Computes an instruction for `n` elements; folds are there already.
    ///
    /// # Safety
    /// The kernel reaches these elements, and its memory is valid.
    unsafe fn step(&self, i: usize, n: usize) {
        // SAFETY: an instruction uses earlier ones only.
        let (out, of) = unsafe { (&mut self.register(i)[..n], |a| &self.register(a)[..n]) };
        match self.k.body[i] {
            Scalar::Const(c) => out.fill(c),
            Scalar::Param(p) => out.fill(self.k.params[p]),
            Scalar::Unary(f, a) => math::unary(f, of(a), out),
            Scalar::Binary(f, a, b) => math::binary(f, of(a), of(b), out),
            Scalar::Where(a, b, c) => {
                let same = of(a).iter().zip(of(b)).map(|(a, b)| a == b);
                let all = out.iter_mut().zip(same.zip(of(c)));
                all.for_each(|(o, (same, &x))| *o = if same { x } else { 0.0 });
            }
            Scalar::Select(m, a, b) => {
                let all = out.iter_mut().zip(of(m).iter().zip(of(a).iter().zip(of(b))));
                all.for_each(|(o, (&m, (&a, &b)))| *o = if m != 0.0 { a } else { b });
            }
            Scalar::Column => {
                let inner = &self.index[self.k.outer.len()..];
                let first = inner.iter().zip(&self.k.inner).fold(0, |c, (i, n)| c * n + i);
                out.iter_mut().enumerate().for_each(|(i, o)| *o = (first + i) as f32);
            }
            Scalar::Load(l) => {
                let load = &self.k.loads[l];
                let (first, stride) = self.place(&load.view);
                let from = element(self.memory[load.view.operand], load.elem, first).cast_const();
                // SAFETY: all elements are valid, by the caller; every bit pattern is an element.
                unsafe { with_element!(load.elem, T => gather::<T>(from.cast(), stride, out)) }
            }
            Scalar::Fold(..) => {}
        }
    }

    /// # Safety
    /// As for [`Interp::step`].
    unsafe fn steps(&self, all: &[usize], n: usize) {
        // SAFETY: by the caller.
        all.iter().for_each(|&i| unsafe { self.step(i, n) });
    }

    /// # Safety
    /// As for [`Interp::step`]; `n` elements from the value's register are computed.
    unsafe fn store(&self, s: &Store, n: usize) {
        let (first, stride) = self.place(&s.view);
        let to = element(self.memory[s.view.operand], s.elem, first);
        // SAFETY: by the caller.
        unsafe { scatter(self.register(s.value).as_ptr(), to, stride, n, s.elem) };
    }

    /// Computes what the row has before a walk, for whole blocks.
    ///
    /// # Safety
    /// As for [`Interp::step`].
    unsafe fn before(&self, stage: &Stage) {
        for &i in &stage.before {
            // SAFETY: by the caller; a register of one number becomes one of a block.
            unsafe {
                self.step(i, 1);
                let r = self.register(i);
                let x = r[0];
                r.fill(x);
            }
        }
    }

    /// Folds of nothing yet.
    fn begin(&self, stage: &Stage) -> Folds {
        stage.folds.iter().map(|&f| [start_of(self.fold(f).0); math::LANES]).collect()
    }

    /// Walks over elements along the last loop, of an index of the others.
    ///
    /// # Safety
    /// As for [`Interp::step`].
    unsafe fn walk(&mut self, stage: &Stage, elements: Range<usize>, acc: &mut Folds) {
        let others = self.index.len();
        for i in elements.clone().step_by(BLOCK) {
            let n = BLOCK.min(elements.end - i);
            self.index.truncate(others);
            self.index.extend(self.k.inner.last().map(|_| i));
            // SAFETY: by the caller: the block has n elements.
            unsafe {
                self.steps(&stage.each, n);
                for (a, &f) in acc.iter_mut().zip(&stage.folds) {
                    let (fold, x) = self.fold(f);
                    math::fold(fold, &self.register(x)[..n], a);
                }
                stage.written.iter().for_each(|&(s, _)| self.store(&self.k.stores[s], n));
            }
        }
        self.index.truncate(others);
    }

    /// Folds as numbers of the row.
    fn end(&self, stage: &Stage, acc: &Folds) {
        for (a, &f) in acc.iter().zip(&stage.folds) {
            let whole = math::whole(self.fold(f).0, *a);
            // SAFETY: the register of the fold.
            unsafe { self.register(f).fill(whole) };
        }
    }

    /// Writes results of the row.
    ///
    /// # Safety
    /// As for [`Interp::step`].
    unsafe fn results(&self) {
        for s in self.k.stores.iter().filter(|s| !self.k.stores_each(s)) {
            // SAFETY: by the caller.
            unsafe { self.store(s, 1) };
        }
    }

    /// Makes the only row, in parts whose folds are folded then.
    ///
    /// # Safety
    /// As for [`Interp::step`].
    unsafe fn parts(&mut self, walk: &Stage, end: &Stage) {
        // SAFETY: by the caller.
        unsafe { self.before(walk) };
        let mut left = vec![vec![]; walk.folds.len()];
        for part in blocks(self.k.inner[0], CHUNK) {
            let mut acc = self.begin(walk);
            // SAFETY: by the caller.
            unsafe { self.walk(walk, part, &mut acc) };
            for ((left, a), &f) in left.iter_mut().zip(acc).zip(&walk.folds) {
                left.push(math::whole(self.fold(f).0, a));
            }
        }
        let mut acc = self.begin(walk);
        for ((a, left), &f) in acc.iter_mut().zip(&left).zip(&walk.folds) {
            math::fold(self.fold(f).0, left, a);
        }
        self.end(walk, &acc);
        // SAFETY: by the caller.
        unsafe {
            self.before(end);
            self.results();
        }
    }

    /// Makes a row, block after block along its last loop.
    ///
    /// # Safety
    /// As for [`Interp::step`].
    unsafe fn row(&mut self, stages: &[Stage]) {
        let (k, outer) = (self.k, self.k.outer.len());
        let (len, rest) = match k.inner.split_last() {
            Some((&n, rest)) => (n, rest),
            None => (1, &[][..]),
        };
        for stage in stages {
            // SAFETY: by the caller.
            unsafe { self.before(stage) };
            if stage.folds.is_empty() && stage.written.is_empty() {
                continue;
            }
            let mut acc = self.begin(stage);
            let mut o = Odometer::new(rest);
            while let Some(inner) = o.index() {
                self.index.truncate(outer);
                self.index.extend_from_slice(inner);
                // SAFETY: by the caller.
                unsafe { self.walk(stage, 0..len, &mut acc) };
                o.advance();
            }
            self.end(stage, &acc);
        }
        self.index.truncate(outer);
        // SAFETY: by the caller.
        unsafe { self.results() };
    }

    /// Makes a block of rows along the last loop over them, one element of each at a time.
    ///
    /// # Safety
    /// As for [`Interp::step`]; the kernel is one by columns.
    unsafe fn columns(&mut self, stages: &[Stage], n: usize) {
        let (k, outer) = (self.k, self.k.outer.len());
        let [walk, end] = stages else { panic!("a fold by columns is one walk") };
        for &f in &walk.folds {
            // SAFETY: the register of the fold.
            unsafe { self.register(f)[..n].fill(start_of(self.fold(f).0)) };
        }
        // SAFETY: by the caller.
        unsafe { self.steps(&walk.before, n) };
        let mut o = Odometer::new(&k.inner);
        while let Some(inner) = o.index() {
            self.index.truncate(outer);
            self.index.extend_from_slice(inner);
            // SAFETY: by the caller; a fold and what it folds are two registers.
            unsafe {
                self.steps(&walk.each, n);
                for &f in &walk.folds {
                    let (fold, x) = self.fold(f);
                    let (acc, x) = (&mut self.register(f)[..n], &self.register(x)[..n]);
                    let mut now = [0.0; BLOCK];
                    now[..n].copy_from_slice(acc);
                    math::binary(function(fold), &now[..n], x, acc);
                }
            }
            o.advance();
        }
        self.index.truncate(outer);
        // SAFETY: by the caller.
        unsafe {
            self.steps(&end.before, n);
            k.stores.iter().for_each(|s| self.store(s, n));
        }
    }

    fn fold(&self, i: usize) -> (Reduction, usize) {
        match self.k.body[i] {
            Scalar::Fold(r, x) => (r, x),
            other => panic!("{other:?} is not a fold"),
        }
    }
}

/// A kernel and its memory.
pub(crate) struct Call<'a> {
    k: &'a Rows,
    memory: SmallVec<[*mut f32; 16]>,
    /// Its compiled form.
    entry: Option<Entry>,
    tasks: usize,
    /// Numbers that parts of a row leave for the task behind the others.
    left: usize,
}

impl<'a> Call<'a> {
    pub fn of(k: &'a Rows, memory: SmallVec<[*mut f32; 16]>, native: Option<&Native>) -> Call<'a> {
        let (entry, tasks) = (native.and_then(|n| n.get(&k.symbol)), k.tasks());
        let left = k.in_parts().map_or(0, |[walk, _]| walk.folds.len() * tasks);
        Call { k, memory, entry, tasks, left }
    }

    /// Does tasks of the compiled form.
    ///
    /// # Safety
    /// As for [`run`]; tasks write apart from each other, and the one behind the others comes behind them.
    unsafe fn tasks(&self, entry: Entry, tasks: Range<usize>) {
        let (memory, params) = (self.memory.as_ptr(), self.k.params.as_ptr());
        // SAFETY: by the caller.
        unsafe { entry(memory, params, tasks.start as i64, tasks.end as i64) };
    }
}

/// Runs kernels over rows that need nothing of each other; compiled ones on several threads.
///
/// # Safety
/// Memory is valid for everything that kernels reach; a result overlaps no operand of any of them, but
/// that it may be one of its own kernel that is walked alike.
pub(crate) unsafe fn run(calls: &mut [Call], threads: usize, registers: &mut Registers) {
    for c in calls.iter().filter(|c| c.entry.is_none()) {
        // SAFETY: by the caller.
        unsafe { interpret(c.k, &c.memory, registers) };
    }
    let all = calls.iter().map(|c| c.left).sum();
    if registers.parts.len() < all {
        registers.parts.resize(all, 0.0);
    }
    let mut next = registers.parts.as_mut_ptr();
    for c in calls.iter_mut().filter(|c| c.left > 0) {
        c.memory.truncate(c.k.operands());
        c.memory.push(next);
        next = next.wrapping_add(c.left);
    }
    // SAFETY: by the caller.
    unsafe { compiled(calls, threads) };
    for c in calls.iter().filter(|c| c.left > 0) {
        // SAFETY: by the caller; all parts are done.
        c.entry.iter().for_each(|&entry| unsafe { c.tasks(entry, c.tasks..c.tasks + 1) });
    }
}

/// Runs a kernel over rows.
///
/// # Safety
/// As for [`run`].
pub(crate) unsafe fn interpret(k: &Rows, memory: &[*mut f32], registers: &mut Registers) {
    if registers.blocks.len() < k.body.len() * BLOCK {
        registers.blocks.resize(k.body.len() * BLOCK, 0.0);
    }
    let registers = registers.blocks.as_mut_ptr();
    let (stages, inner) = (k.stages(), k.inner.len());
    let mut x = Interp { k, memory, registers, index: Extents::new(), along: None };
    if let Some([walk, end]) = k.in_parts() {
        x.along = Some(0);
        // SAFETY: by the caller.
        return unsafe { x.parts(&walk, &end) };
    }
    if !k.by_columns() {
        x.along = (inner > 0).then(|| k.outer.len() + inner - 1);
        let mut o = Odometer::new(&k.outer);
        while let Some(outer) = o.index() {
            x.index = outer.into();
            // SAFETY: by the caller.
            unsafe { x.row(&stages) };
            o.advance();
        }
        return;
    }
    let Some((&len, rest)) = k.outer.split_last() else { return };
    x.along = Some(rest.len());
    let mut o = Odometer::new(rest);
    while let Some(outer) = o.index() {
        for i in (0..len).step_by(BLOCK) {
            x.index = outer.into();
            x.index.push(i);
            // SAFETY: by the caller.
            unsafe { x.columns(&stages, BLOCK.min(len - i)) };
        }
        o.advance();
    }
}

/// Bytes of a task below which a thread more is not worth it.
const SHARE: usize = 1 << 16;

/// Runs those kernels that are compiled, on several threads if they are large.
///
/// # Safety
/// As for [`run`].
unsafe fn compiled(calls: &[Call], threads: usize) {
    let bytes = |k: &Rows| {
        let elements = k.outer.iter().chain(&k.inner).product::<usize>();
        elements * 4 * (k.loads.len() + k.stores.len())
    };
    let threads = threads.min(calls.iter().map(|c| bytes(c.k)).sum::<usize>() / SHARE).max(1);
    // A thread, bytes, a kernel, and its tasks: some more shares than threads, so that one that is
    // late holds up little. A thread has the same part of every large kernel; small ones are dealt.
    let mut shares: Vec<(usize, usize, &Call, Entry, Range<usize>)> = vec![];
    let mut dealt = 0;
    for c in calls {
        let (tasks, Some(entry)) = (c.tasks, c.entry) else { continue };
        let large = threads > 1 && bytes(c.k) >= SHARE;
        let parts = if large { (threads * 4).min(tasks) } else { 1 };
        let one = |i: usize| tasks * i / parts..tasks * (i + 1) / parts;
        let thread = |i: usize| if parts > 1 { i * threads / parts } else { dealt % threads };
        shares.extend((0..parts).map(|i| (thread(i), bytes(c.k) / parts, c, entry, one(i))));
        dealt += usize::from(parts == 1);
    }
    // Of a thread's the largest first: what is begun last ends soon.
    shares.sort_by_key(|s| (s.0, Reverse(s.1)));
    let share = |i: usize| {
        let (_, _, c, entry, tasks) = &shares[i];
        // SAFETY: by the caller.
        unsafe { c.tasks(*entry, tasks.clone()) };
    };
    // SAFETY: as above.
    unsafe { team::each(threads, shares.len(), share) };
}
