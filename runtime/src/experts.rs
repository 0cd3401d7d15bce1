//! Kernels that send tokens to experts and back: the choice, the places in the buffers, the copies.

use crate::map::Odometer;
use crate::math;
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::kernel::{Copies, Route, TopK, View};
use std::ops::Range;

/// Runs a choice of the largest.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the result overlaps no operand.
pub(crate) unsafe fn top_k(k: &TopK, memory: &[*mut f32]) {
    let mut o = Odometer::new(&k.extents);
    while let Some(index) = o.index() {
        let x = memory[k.x.operand].wrapping_add(k.x.at(index)).cast_const();
        let out = memory[k.out.operand].wrapping_add(k.out.at(index)).cast::<i32>();
        // SAFETY: by the caller: `x` has n elements and `out` k places, which hold numbers of
        // elements up to the place that is being looked for.
        unsafe {
            let element = |e: usize| *x.add(e * k.x_stride);
            let place = |i: usize| out.add(i * k.out_stride);
            let held = |i: usize| element(*place(i) as usize);
            for e in 0..k.n {
                let new = element(e);
                let mut i = e.min(k.k);
                if i == k.k && (i == 0 || new.total_cmp(&held(i - 1)).is_le()) {
                    continue;
                }
                // The last falls out if all places are held.
                i = i.min(k.k - 1);
                while i > 0 && new.total_cmp(&held(i - 1)).is_gt() {
                    *place(i) = *place(i - 1);
                    i -= 1;
                }
                *place(i) = e as i32;
            }
        }
        o.advance();
    }
}

/// A buffer that is too small.
struct Overflow {
    group: usize,
    shard: usize,
    needed: usize,
    /// Copies for each expert of the group.
    counts: Vec<usize>,
}

/// Gives copies their places.
///
/// # Errors
/// `moe-bound` if a buffer has too few rows; the results are then not all written.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and no result overlaps anything else.
pub(crate) unsafe fn route(k: &Route, memory: &[*mut f32]) -> Result<()> {
    let [shards, tokens, copies] = k.copies;
    let capacity = k.capacity.unwrap_or(usize::MAX);
    let mut wanted = vec![0usize; k.groups * k.experts];
    // The rows of each expert that no copy has yet.
    let mut free: Vec<Range<usize>> = vec![0..0; wanted.len()];
    let mut worst: Option<Overflow> = None;
    let number =
        |v: &View, index: &[usize]| memory[v.operand].cast::<i32>().wrapping_add(v.at(index));
    for z in 0..shards {
        let expert = |t: usize, c: usize| {
            // SAFETY: by the caller, an element of the index.
            let e = usize::try_from(unsafe { *number(&k.index, &[z, t, c]) }).ok()?;
            (e < k.groups * k.experts).then_some(e)
        };
        wanted.fill(0);
        for t in 0..tokens {
            (0..copies).filter_map(|c| expert(t, c)).for_each(|e| wanted[e] += 1);
        }
        wanted.iter_mut().for_each(|n| *n = (*n).min(capacity));
        for g in 0..k.groups {
            let mut row = 0;
            for e in 0..k.experts {
                let n = wanted[g * k.experts + e];
                free[g * k.experts + e] = row..row + n;
                row += n;
                // SAFETY: by the caller, an element of the counts.
                unsafe { *number(&k.counts, &[g, e, z]) = n as i32 };
            }
            if row > k.rows && worst.as_ref().is_none_or(|w| row > w.needed) {
                let counts = wanted[g * k.experts..][..k.experts].to_vec();
                worst = Some(Overflow { group: g, shard: k.first_shard + z, needed: row, counts });
            }
        }
        if worst.is_some() {
            continue;
        }
        for t in 0..tokens {
            for c in 0..copies {
                let row = expert(t, c).and_then(|e| Some((e / k.experts, free[e].next()?)));
                let slot = row.map_or(-1, |(g, row)| (g * k.rows + row) as i32);
                // SAFETY: by the caller, an element of the slots.
                unsafe { *number(&k.slot, &[z, t, c]) = slot };
            }
        }
    }
    worst.map_or(Ok(()), |w| Err(overflow(k, w)))
}

fn overflow(k: &Route, w: Overflow) -> Diag {
    /// More experts than this are not listed.
    const LISTED: usize = 4;
    let (group, shard, needed, rows) = (w.group, w.shard, w.needed, k.rows);
    let first = group * k.experts;
    let last = first + k.experts - 1;
    let mut counts: Vec<(usize, usize)> = w.counts.into_iter().enumerate().collect();
    counts.sort_by_key(|&(e, n)| (std::cmp::Reverse(n), e));
    let listed = counts.iter().take(LISTED).map(|(e, n)| format!("expert {} has {n}", first + e));
    let listed = listed.collect::<Vec<_>>().join(", ");
    let (groups, all) = (k.groups, k.copies[1] * k.copies[2]);
    let even = all.div_ceil(groups);
    // The bound in tenths, rounded up: an even load is 1.
    let tenths = (10 * needed * groups).div_ceil(all);
    let message = format!(
        "{needed} rows are needed for group {group} of experts in shard {shard} of the tokens, \
         the bound gives {rows}"
    );
    let d = Diag::new("moe-bound", message)
        .rule("the copies of a shard's tokens for a group of experts fit its rows")
        .why(format!("{listed}, of experts {first} to {last}"))
        .why(format!("{even} rows hold an even load: {all} copies for {groups} groups"))
        .help(format!("compile with --moe-bound {}.{}", tenths / 10, tenths % 10))
        .exit(Exit::RankFailed);
    if tenths == 10 * groups {
        return d;
    }
    d.help(format!("compile with --moe-bound {groups}, which holds any load"))
}

/// The rows of a token's copies.
struct Rows<'a> {
    k: &'a Copies,
    memory: &'a [*mut f32],
}

impl Rows<'_> {
    fn at(&self, v: &View, index: &[usize]) -> *mut f32 {
        self.memory[v.operand].wrapping_add(v.at(index))
    }
    /// The buffer's row of a copy, if it has one.
    ///
    /// # Safety
    /// The memory is valid for everything the kernel reaches.
    unsafe fn of(&self, copy: [usize; 3]) -> Option<*mut f32> {
        // SAFETY: by the caller, an element of the slots.
        let slot = unsafe { *self.at(&self.k.slot, &copy).cast::<i32>() };
        let slot = usize::try_from(slot).ok().filter(|&s| s < self.k.groups * self.k.rows)?;
        Some(self.at(&self.k.buffer, &[slot / self.k.rows, copy[0], slot % self.k.rows]))
    }
    /// Calls `f(shard, token)` for every token.
    fn tokens(&self, mut f: impl FnMut(usize, usize)) {
        let [shards, tokens, _] = self.k.copies;
        (0..shards).for_each(|z| (0..tokens).for_each(|t| f(z, t)));
    }
}

/// A row of the kernel's width.
///
/// # Safety
/// The row has so many valid elements, which nobody writes while the slice is.
unsafe fn row<'a>(at: *const f32, width: usize) -> &'a [f32] {
    // SAFETY: by the caller.
    unsafe { std::slice::from_raw_parts(at, width) }
}

/// A row of the kernel's width, to be written.
///
/// # Safety
/// The row has so many valid elements, which nobody else uses while the slice is.
unsafe fn row_mut<'a>(at: *mut f32, width: usize) -> &'a mut [f32] {
    // SAFETY: by the caller.
    unsafe { std::slice::from_raw_parts_mut(at, width) }
}

/// Copies tokens, times their gates, into the rows of their copies.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the buffer overlaps no operand.
pub(crate) unsafe fn dispatch(k: &Copies, memory: &[*mut f32]) {
    let rows = Rows { k, memory };
    rows.tokens(|z, t| {
        // SAFETY: by the caller: rows and elements of the operands, and rows of the result.
        unsafe {
            let x = row(rows.at(&k.tokens, &[z, t]), k.width);
            for c in 0..k.copies[2] {
                if let Some(to) = rows.of([z, t, c]) {
                    let gate = *rows.at(&k.gates, &[z, t, c]);
                    math::scaled(x, gate, row_mut(to, k.width));
                }
            }
        }
    });
}

/// Sums the rows of a token's copies times their gates.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the tokens overlap no operand.
pub(crate) unsafe fn combine(k: &Copies, memory: &[*mut f32]) {
    let rows = Rows { k, memory };
    rows.tokens(|z, t| {
        // SAFETY: by the caller: rows and elements of the operands, and a row of the result.
        unsafe {
            let out = row_mut(rows.at(&k.tokens, &[z, t]), k.width);
            let mut first = true;
            for c in 0..k.copies[2] {
                let Some(from) = rows.of([z, t, c]) else { continue };
                let (x, gate) = (row(from, k.width), *rows.at(&k.gates, &[z, t, c]));
                if first {
                    math::scaled(x, gate, out)
                } else {
                    math::add_scaled(x, gate, out)
                }
                first = false;
            }
            if first {
                out.fill(0.0);
            }
        }
    });
}

/// Multiplies tokens with the rows of their copies.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the gates overlap no operand.
pub(crate) unsafe fn row_dots(k: &Copies, memory: &[*mut f32]) {
    let rows = Rows { k, memory };
    rows.tokens(|z, t| {
        // SAFETY: by the caller: rows of the operands, and elements of the result.
        unsafe {
            let x = row(rows.at(&k.tokens, &[z, t]), k.width);
            for c in 0..k.copies[2] {
                let dot = rows.of([z, t, c]).map_or(0.0, |y| math::dot(row(y, k.width), x));
                *rows.at(&k.gates, &[z, t, c]) = dot;
            }
        }
    });
}
