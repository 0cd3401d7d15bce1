//! Runs tasks of a kernel over rows, as [`RowCode`] says.

use super::code::{Access, Instruction, REGISTER, RowCode, Shape, SideBySide, Walk};
use crate::element;
use crate::map::{BLOCK, Odometer};
use crate::math::{self, LANES};
use crate::product::room::{self, Room};
use shardc_ir::kernel::{CHUNK, COLUMNS, Scalar, Store};
use shardc_ir::types::Reduction;
use smallvec::SmallVec;
use std::cell::Cell;
use std::ops::Range;

thread_local! {
    /// Numbers, partial folds and registers.
    static FRAME: Room = const { Cell::new(vec![]) };
}

/// The fold of nothing.
fn start_of(fold: Reduction) -> f32 {
    match fold {
        Reduction::Sum => 0.0,
        Reduction::Max => f32::NEG_INFINITY,
        Reduction::Min => f32::INFINITY,
    }
}

/// A kernel with its memory, at a place of its loops.
struct Frame<'a> {
    code: &'a RowCode,
    memory: &'a [*mut f32],
    params: &'a [f32],
    /// Where numbers, partial folds, registers and accesses are.
    at: SmallVec<[*mut u8; 96]>,
}

impl RowCode {
    /// Does tasks.
    ///
    /// # Safety
    /// Memory is valid for everything that these tasks of the kernel reach; a result overlaps no
    /// operand, but that it may be one that is walked alike. If a row is folded in parts, the last
    /// operand is what these leave.
    pub unsafe fn run(&self, memory: &[*mut f32], params: &[f32], tasks: Range<usize>) {
        let [numbers, partials, registers] = self.places;
        let words = partials * LANES + registers * REGISTER + numbers;
        room::with(&FRAME, words, |room| {
            let room: *mut f32 = room.cast();
            let place = |i: usize| room.wrapping_add(i).cast::<u8>();
            let behind = partials * LANES + registers * REGISTER;
            let all = (0..numbers).map(|i| behind + i);
            let all = all.chain((0..partials).map(|i| i * LANES));
            let all = all.chain((0..registers).map(|i| partials * LANES + i * REGISTER));
            let mut at: SmallVec<[*mut u8; 96]> = all.map(place).collect();
            at.extend(self.accesses.iter().map(|_| std::ptr::null_mut()));
            let mut frame = Frame { code: self, memory, params, at };
            frame.constants();
            // SAFETY: by the caller.
            unsafe {
                match &self.shape {
                    Shape::Rows(walks) => frame.rows(walks, tasks),
                    Shape::Parts(walk, end) => frame.parts(walk, end, tasks),
                    Shape::Columns(all) => frame.columns(all, tasks),
                }
            }
        });
    }
}

impl Frame<'_> {
    fn number(&mut self, i: usize) -> &mut f32 {
        // SAFETY: there is room for a number per instruction, which nobody else refers to.
        unsafe { &mut *self.at[i].cast() }
    }

    fn constants(&mut self) {
        *self.number(self.code.k.body.len()) = 1.0;
        for (i, s) in self.code.k.body.iter().enumerate() {
            match *s {
                Scalar::Const(c) => *self.number(i) = c,
                Scalar::Param(p) => *self.number(i) = self.params[p],
                _other => {}
            }
        }
    }

    /// The first access's place in `at`.
    fn accesses(&self) -> usize {
        self.at.len() - self.code.accesses.len()
    }

    /// Goes to an index of the first loops.
    fn go(&mut self, index: &[usize]) {
        let first = self.accesses();
        for (a, at) in self.code.accesses.iter().zip(&mut self.at[first..]) {
            *at = place(a, self.memory, index);
        }
    }

    /// Computes numbers of the row.
    ///
    /// # Safety
    /// As for [`RowCode::run`]; accesses are at this row.
    unsafe fn numbers(&mut self, all: &[usize]) {
        let first = self.accesses();
        for &i in all {
            let x = match self.code.k.body[i] {
                Scalar::Load(l) => {
                    let elem = self.code.k.loads[l].elem;
                    // SAFETY: by the caller.
                    unsafe { element::get(self.at[first + l].cast(), elem) }
                }
                Scalar::Unary(f, a) => math::unary(f, *self.number(a)),
                Scalar::Binary(f, a, b) => math::binary(f, *self.number(a), *self.number(b)),
                Scalar::Where(a, b, c) => {
                    if *self.number(a) == *self.number(b) {
                        *self.number(c)
                    } else {
                        0.0
                    }
                }
                Scalar::Select(m, a, b) => {
                    if *self.number(m) != 0.0 {
                        *self.number(a)
                    } else {
                        *self.number(b)
                    }
                }
                // A row without elements has one column.
                Scalar::Column => 0.0,
                Scalar::Const(_) | Scalar::Param(_) | Scalar::Fold(..) => continue,
            };
            *self.number(i) = x;
        }
    }

    /// Runs loops over a block of `n` elements, from number `i` on.
    ///
    /// # Safety
    /// As for [`RowCode::run`].
    #[inline(always)]
    unsafe fn block(&self, code: &[Instruction], i: usize, n: usize) {
        let all = self.at.as_ptr();
        for x in code {
            // SAFETY: by the caller; slots are those of a frame.
            unsafe {
                let at = |j: usize| (*all.add(x.slots[j])).wrapping_add(i * x.steps[j]);
                (x.run)(at(0), at(1), at(2), at(3), n, x.stride);
            }
        }
    }

    fn partial(&mut self, j: usize) -> &mut [f32; LANES] {
        // SAFETY: there is room for so many partial folds, which nobody else refers to.
        unsafe { &mut *self.at[self.code.places[0] + j].cast() }
    }

    fn begin(&mut self, walk: &Walk) {
        for (j, &(_, r)) in walk.folds.iter().enumerate() {
            *self.partial(j) = [start_of(r); LANES];
        }
    }

    /// Folds as numbers of the row.
    fn end(&mut self, walk: &Walk) {
        for (j, &(f, r)) in walk.folds.iter().enumerate() {
            *self.number(f) = math::whole(r, *self.partial(j));
        }
    }

    /// Walks over elements along the last loop.
    ///
    /// # Safety
    /// As for [`RowCode::run`].
    unsafe fn walk(&mut self, walk: &Walk, elements: Range<usize>) {
        for i in elements.clone().step_by(BLOCK) {
            // SAFETY: by the caller.
            unsafe { self.block(&walk.code, i, BLOCK.min(elements.end - i)) };
        }
    }

    /// Writes results of the row.
    ///
    /// # Safety
    /// As for [`RowCode::run`].
    unsafe fn results(&mut self) {
        let (code, first) = (self.code, self.accesses());
        let once = |s: &&Store| !code.k.stores_each(s);
        for (i, s) in code.k.stores.iter().enumerate().filter(|x| once(&x.1)) {
            let (x, to) = (*self.number(s.value), self.at[first + code.k.loads.len() + i]);
            // SAFETY: by the caller.
            unsafe { element::set(to.cast(), s.elem, x) };
        }
    }

    /// # Safety
    /// As for [`RowCode::run`].
    unsafe fn rows(&mut self, walks: &[Walk], tasks: Range<usize>) {
        let (code, chunks) = (self.code, self.code.chunks);
        if tasks.is_empty() {
            return;
        }
        let (len, rest) = match code.k.inner.split_last() {
            Some((&n, rest)) => (n, rest),
            None => (1, &[][..]),
        };
        let mut outer = Odometer::over(&code.k.outer, tasks.start / chunks..usize::MAX);
        for task in tasks.clone() {
            let index = outer.index().expect("a row");
            self.go(index);
            let from = task % chunks * CHUNK;
            let elements = if chunks > 1 { from..len.min(from + CHUNK) } else { 0..len };
            for walk in walks {
                // SAFETY: by the caller.
                unsafe { self.numbers(&walk.before) };
                if walk.code.is_empty() {
                    continue;
                }
                self.begin(walk);
                if rest.is_empty() {
                    // SAFETY: by the caller.
                    unsafe { self.walk(walk, elements.clone()) };
                } else {
                    let mut o = Odometer::new(rest);
                    while let Some(inner) = o.index() {
                        let all: SmallVec<[usize; 8]> =
                            index.iter().chain(inner).copied().collect();
                        self.go(&all);
                        // SAFETY: by the caller.
                        unsafe { self.walk(walk, elements.clone()) };
                        o.advance();
                    }
                    self.go(index);
                }
                self.end(walk);
            }
            // SAFETY: by the caller.
            unsafe { self.results() };
            if (task + 1) % chunks == 0 {
                outer.advance();
            }
        }
    }

    /// Does parts of the only row, or what comes behind them.
    ///
    /// # Safety
    /// As for [`RowCode::run`].
    unsafe fn parts(&mut self, walk: &Walk, end: &[usize], tasks: Range<usize>) {
        let (code, chunks) = (self.code, self.code.chunks);
        let left = self.memory[code.k.operands()];
        self.go(&[]);
        // SAFETY: by the caller.
        unsafe { self.numbers(&walk.before) };
        for task in tasks {
            self.begin(walk);
            if task < chunks {
                let from = task * CHUNK;
                // SAFETY: by the caller.
                unsafe { self.walk(walk, from..code.k.inner[0].min(from + CHUNK)) };
                for (j, &(_, r)) in walk.folds.iter().enumerate() {
                    let whole = math::whole(r, *self.partial(j));
                    // SAFETY: by the caller.
                    unsafe { *left.add(j * chunks + task) = whole };
                }
                continue;
            }
            for (j, &(_, r)) in walk.folds.iter().enumerate() {
                // SAFETY: by the caller: all parts are done.
                let all = unsafe { std::slice::from_raw_parts(left.add(j * chunks), chunks) };
                math::fold(r, all, self.partial(j));
            }
            self.end(walk);
            // SAFETY: by the caller.
            unsafe {
                self.numbers(end);
                self.results();
            }
        }
    }

    /// Folds rows that lie next to each other.
    ///
    /// # Safety
    /// As for [`RowCode::run`].
    unsafe fn columns(&mut self, all: &SideBySide, tasks: Range<usize>) {
        let k = &self.code.k;
        let (&len, rest) = k.outer.split_last().expect("rows");
        let blocks = len.div_ceil(COLUMNS);
        let mut task = tasks.start;
        while task < tasks.end {
            let (row, block) = (task / blocks, task % blocks);
            let count = (tasks.end - task).min(blocks - block).min(BLOCK / COLUMNS);
            let (from, to) = (block * COLUMNS, len.min((block + count) * COLUMNS));
            let mut index = SmallVec::<[usize; 8]>::new();
            index.extend_from_slice(Odometer::over(rest, row..row + 1).index().expect("a row"));
            index.push(0);
            // SAFETY: by the caller.
            unsafe { self.side_by_side(all, &index, from, to - from) };
            task += count;
        }
    }

    /// # Safety
    /// As for [`RowCode::run`].
    unsafe fn side_by_side(&mut self, all: &SideBySide, index: &[usize], from: usize, n: usize) {
        let (code, [numbers, partials, _]) = (self.code, self.code.places);
        let [before, each, after] = &all.code;
        self.go(index);
        for &(register, r) in &all.folds {
            let at: *mut f32 = self.at[numbers + partials + register].cast();
            // SAFETY: a register is a block.
            unsafe { std::slice::from_raw_parts_mut(at, n) }.fill(start_of(r));
        }
        // SAFETY: by the caller.
        unsafe { self.block(before, from, n) };
        let (last, rest) = match code.k.inner.split_last() {
            Some((&last, rest)) => (last, rest),
            None => (1, &[][..]),
        };
        let by = code.k.outer.len() + rest.len();
        let first = self.accesses();
        let mut o = Odometer::new(rest);
        while let Some(inner) = o.index() {
            let at: SmallVec<[usize; 8]> = index.iter().chain(inner).copied().collect();
            self.go(&at);
            for _ in 0..last {
                // SAFETY: by the caller.
                unsafe { self.block(each, from, n) };
                for (a, at) in code.accesses.iter().zip(&mut self.at[first..]) {
                    *at = at.wrapping_add(a.steps.get(by).copied().unwrap_or(0));
                }
            }
            o.advance();
        }
        self.go(index);
        // SAFETY: by the caller.
        unsafe { self.block(after, from, n) };
    }
}

/// Where an access begins at an index of the first loops.
#[inline(always)]
fn place(a: &Access, memory: &[*mut f32], index: &[usize]) -> *mut u8 {
    let by: usize = index.iter().zip(&a.steps[..]).map(|(i, s)| i * s).sum();
    match a.elem {
        Some(_) => memory[a.view.operand].cast::<u8>().wrapping_add(a.first + by),
        None => std::ptr::without_provenance_mut(by),
    }
}
