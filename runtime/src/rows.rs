//! Kernels over rows, compiled or interpreted: their forms, and how the threads of a launch share
//! their tasks.
//!
//! What is interpreted runs over a block of elements that stays in the nearest cache, one loop
//! after the other ([`loops`]); which these are is found once for a kernel ([`code`]). A block runs
//! along the last loop of a row or, if results lie next to each other but the elements of a row do
//! not, along the last loop over rows.

mod code;
mod loops;
mod run;
mod write;

use crate::native::{Native, NativeEntry};
use crate::team;
use code::RowCode;
use shardc_ir::kernel::Rows;
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// What kernels have beside their memory; kept from kernel to kernel.
#[derive(Default)]
pub(crate) struct Registers {
    /// Interpreted kernels, by their names.
    codes: HashMap<Arc<str>, Arc<RowCode>>,
    /// What parts of rows leave.
    parts: Vec<f32>,
}

/// What runs a kernel.
#[derive(Clone)]
pub(crate) enum Form {
    Compiled(NativeEntry),
    Interpreted(Arc<RowCode>),
}

impl Registers {
    /// The compiled form of a kernel if there is one.
    pub fn form(&mut self, k: &Rows, native: Option<&Native>) -> Form {
        if let Some(entry) = native.and_then(|n| n.get(&k.symbol)) {
            return Form::Compiled(entry);
        }
        if let Some(code) = self.codes.get(&k.symbol) {
            return Form::Interpreted(code.clone());
        }
        let code = Arc::new(RowCode::of(k));
        // A kernel without a name is a test's.
        if !k.symbol.is_empty() {
            self.codes.insert(k.symbol.clone(), code.clone());
        }
        Form::Interpreted(code)
    }
}

impl Form {
    /// Does tasks of a kernel.
    ///
    /// # Safety
    /// As for [`run`]; tasks write apart from each other, and the one behind the others comes
    /// behind them.
    pub unsafe fn run(&self, memory: &[*mut f32], params: &[f32], tasks: Range<usize>) {
        // SAFETY: by the caller.
        unsafe {
            match self {
                Form::Compiled(entry) => {
                    let (from, to) = (tasks.start as i64, tasks.end as i64);
                    entry(memory.as_ptr(), params.as_ptr(), from, to);
                }
                Form::Interpreted(code) => code.run(memory, params, tasks),
            }
        }
    }
}

/// A kernel and its memory.
pub(crate) struct RowCall<'a> {
    k: &'a Rows,
    memory: SmallVec<[*mut f32; 16]>,
    form: Form,
    tasks: usize,
    /// Numbers that parts of a row leave for the task behind the others.
    left: usize,
}

impl<'a> RowCall<'a> {
    pub fn of(k: &'a Rows, memory: SmallVec<[*mut f32; 16]>, form: Form) -> RowCall<'a> {
        let [tasks, left] = match &form {
            Form::Interpreted(code) => code.tasks(k),
            Form::Compiled(_) => [k.tasks(), k.in_parts().map_or(0, |[walk, _]| walk.folds.len())],
        };
        RowCall { k, memory, form, tasks, left: left * tasks }
    }

    /// # Safety
    /// As for [`Form::run`].
    unsafe fn tasks(&self, tasks: Range<usize>) {
        // SAFETY: by the caller.
        unsafe { self.form.run(&self.memory, &self.k.params, tasks) };
    }
}

/// Runs kernels over rows that need nothing of each other.
///
/// # Safety
/// Memory is valid for everything that kernels reach; a result overlaps no operand of any of them,
/// but that it may be one of its own kernel that is walked alike.
pub(crate) unsafe fn run(calls: &mut [RowCall], threads: usize, registers: &mut Registers) {
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
    unsafe { share(calls, threads) };
    for c in calls.iter().filter(|c| c.left > 0) {
        // SAFETY: by the caller; all parts are done.
        unsafe { c.tasks(c.tasks..c.tasks + 1) };
    }
}

/// Bytes of a task below which a thread more is not worth it.
const SHARE: usize = 1 << 16;

/// Does the tasks of kernels, on several threads if they are large.
///
/// # Safety
/// As for [`run`].
unsafe fn share(calls: &[RowCall], threads: usize) {
    let bytes = |k: &Rows| {
        let elements = k.outer.iter().chain(&k.inner).product::<usize>();
        elements * 4 * (k.loads.len() + k.stores.len())
    };
    let threads = threads.min(calls.iter().map(|c| bytes(c.k)).sum::<usize>() / SHARE).max(1);
    // A thread, bytes, a kernel, and its tasks: some more shares than threads, so that one that is
    // late holds up little. A thread has the same part of every large kernel; small ones are dealt.
    let mut shares: Vec<(usize, usize, &RowCall, Range<usize>)> = vec![];
    let mut dealt = 0;
    for c in calls {
        let tasks = c.tasks;
        let large = threads > 1 && bytes(c.k) >= SHARE;
        let parts = if large { (threads * 4).min(tasks) } else { 1 };
        let one = |i: usize| tasks * i / parts..tasks * (i + 1) / parts;
        let thread = |i: usize| if parts > 1 { i * threads / parts } else { dealt % threads };
        shares.extend((0..parts).map(|i| (thread(i), bytes(c.k) / parts, c, one(i))));
        dealt += usize::from(parts == 1);
    }
    // Of a thread's the largest first: what is begun last ends soon.
    shares.sort_by_key(|s| (s.0, Reverse(s.1)));
    let one = |i: usize| {
        let (_, _, c, tasks) = &shares[i];
        // SAFETY: by the caller.
        unsafe { c.tasks(tasks.clone()) };
    };
    // SAFETY: as above.
    unsafe { team::each(threads, shares.len(), one) };
}
