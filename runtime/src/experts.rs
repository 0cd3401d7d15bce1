//! Kernels that send tokens to experts and back: the choice, the places in the buffers, the copies.
//! Rows are treated a piece at a time, in f32 whatever their elements are. Threads share tokens; of what is
//! written to the buffer, columns, since slots are data and may name a row twice.

use crate::element::get;
use crate::map::{BLOCK, Odometer, element, read, scatter};
use crate::math::{self, LANES};
use crate::moves::{self, SHARE};
use crate::region::Region;
use crate::team;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::{Block, Copies, Ragged, Route, TopK, View};
use shardc_ir::types::DType;
use std::ops::Range;

/// Runs a choice of the largest.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the result overlaps no operand.
pub(crate) unsafe fn top_k(k: &TopK, memory: &[*mut f32], threads: usize) {
    let row = |index: &[usize]| {
        let x = element(memory[k.x.operand], k.elem, k.x.at(index));
        let out = memory[k.out.operand].wrapping_add(k.out.at(index)).cast::<i32>();
        // SAFETY: by the caller: `x` has n elements and `out` k places, which hold numbers of
        // elements up to the place that is being looked for.
        unsafe {
            // Both zeros are 0, as they are equal.
            let score = |e: usize| get(element(x, k.elem, e * k.x_stride), k.elem) + 0.0;
            let place = |i: usize| out.add(i * k.out_stride);
            let held = |i: usize| score(*place(i) as usize);
            for e in 0..k.n {
                let new = score(e);
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
    };
    // SAFETY: by the caller: rows have places of their own. One element is compared with `k` at most.
    unsafe { moves::each(threads, &k.extents, k.n * k.k, row) };
}

/// A buffer that is too small.
struct Overflow {
    group: usize,
    shard: usize,
    needed: usize,
    /// Copies for each expert of the group.
    counts: Vec<usize>,
}

/// Gives copies their places. Threads have some tokens each: they count them, and then, where the copies of
/// all before them end, give them places.
///
/// # Errors
/// `moe-bound` if a buffer has too few rows; the slots are then not written.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and no result overlaps anything else.
pub(crate) unsafe fn route(k: &Route, memory: &[*mut f32], threads: usize) -> Result<()> {
    let ([shards, tokens, copies], experts) = (k.copies, k.groups * k.experts);
    let [threads, parts] = [shards, 1].map(|n| threads.min(n * tokens * copies / SHARE).max(1));
    let number =
        |v: &View, index: &[usize]| memory[v.operand].cast::<i32>().wrapping_add(v.at(index));
    // By shard, part of its tokens, and expert: how many copies; then the row of the first.
    let mut rows = vec![0usize; shards * parts * experts];
    let of = |rows: *mut usize, task: usize| {
        let own = rows.wrapping_add(task * experts);
        // SAFETY: no two tasks have the same part of a shard.
        unsafe { std::slice::from_raw_parts_mut(own, experts) }
    };
    let each = |task: usize, f: &mut dyn FnMut([usize; 3], Option<usize>)| {
        let (z, part) = (task / parts, task % parts);
        for t in tokens * part / parts..tokens * (part + 1) / parts {
            for c in 0..copies {
                // SAFETY: by the caller, an element of the index.
                let e = usize::try_from(unsafe { *number(&k.index, &[z, t, c]) }).ok();
                f([z, t, c], e.filter(|&e| e < experts));
            }
        }
    };
    let at = rows.as_mut_ptr();
    let count = |task: usize| {
        let own = of(at, task);
        each(task, &mut |_, e| e.into_iter().for_each(|e| own[e] += 1));
    };
    // SAFETY: tasks count in numbers of their own.
    unsafe { team::each(threads, shards * parts, count) };
    // SAFETY: by the caller; the counts are there.
    let ends = unsafe { first_rows(k, memory, &mut rows) }.map_err(|w| overflow(k, w))?;
    let at = rows.as_mut_ptr();
    let place = |task: usize| {
        let (next, z) = (of(at, task), task / parts);
        each(task, &mut |copy, e| {
            let row = e.and_then(|e| {
                let row = next[e];
                next[e] += 1;
                (row < ends[z * experts + e]).then_some(e / k.experts * k.rows + row)
            });
            // SAFETY: by the caller, an element of the slots.
            unsafe { *number(&k.slot, &copy) = row.map_or(-1, |row| row as i32) };
        });
    };
    // SAFETY: copies have slots of their own.
    unsafe { team::each(threads, shards * parts, place) };
    Ok(())
}

/// Writes the counts of all experts, and makes of the copies of each part of a shard the row of the first;
/// returns by shard and expert where its rows end. What is wrong of the fullest buffer, if it has too few.
///
/// # Safety
/// As for [`route`].
unsafe fn first_rows(
    k: &Route,
    memory: &[*mut f32],
    rows: &mut [usize],
) -> std::result::Result<Vec<usize>, Overflow> {
    let (shards, experts) = (k.copies[0], k.groups * k.experts);
    let capacity = k.capacity.unwrap_or(usize::MAX);
    let (mut ends, mut worst) = (vec![0; shards * experts], None::<Overflow>);
    let of_shard = rows.len() / shards.max(1);
    for z in 0..shards {
        let rows = &mut rows[z * of_shard..][..of_shard];
        for g in 0..k.groups {
            let mut first = 0;
            let mut counts = Vec::with_capacity(k.experts);
            for e in 0..k.experts {
                let (own, mut next) = (g * k.experts + e, first);
                for part in rows.iter_mut().skip(own).step_by(experts) {
                    next += std::mem::replace(part, next);
                }
                let n = (next - first).min(capacity);
                first += n;
                ends[z * experts + own] = first;
                counts.push(n);
                let at = memory[k.counts.operand].cast::<i32>();
                // SAFETY: by the caller, an element of the counts.
                unsafe { *at.add(k.counts.at(&[g, e, z])) = n as i32 };
            }
            if first > k.rows && worst.as_ref().is_none_or(|w| first > w.needed) {
                worst =
                    Some(Overflow { group: g, shard: k.first_shard + z, needed: first, counts });
            }
        }
    }
    worst.map_or(Ok(ends), Err)
}

/// The rows that are there, a region for every group and shard; `counts` gives an element of the
/// counts' operand.
///
/// # Safety
/// As for [`Region::new`], for all rows.
pub(crate) unsafe fn there(
    r: &Ragged,
    memory: &[*mut f32],
    counts: impl Fn(usize) -> i32,
) -> Vec<Region> {
    let (b, v, n) = (&r.rows, &r.rows.view, &r.counts);
    let one = |g: usize, z: usize| {
        // They are data: whatever they say, a buffer has no more rows than its size.
        let count = |e: usize| counts(n.view.at(&[g, e, z]));
        let named = (0..n.extents[1]).map(|e| usize::try_from(count(e)).unwrap_or(0));
        let rows = named.fold(0, usize::saturating_add).min(b.extents[2]);
        let view = View {
            operand: v.operand,
            offset: v.at(&[g, z, 0, 0]),
            strides: smallvec::smallvec![v.strides[2], v.strides[3]],
        };
        let part = Block { extents: smallvec::smallvec![rows, b.extents[3]], view, elem: b.elem };
        // SAFETY: by the caller, part of the rows.
        unsafe { Region::new(memory[v.operand], &part) }
    };
    let shards = 0..b.extents[1];
    (0..b.extents[0])
        .flat_map(|g| shards.clone().map(move |z| (g, z)))
        .map(|(g, z)| one(g, z))
        .collect()
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
        .help(format!("compile with --moe-bound {}.{}", tenths / 10, tenths % 10));
    if tenths == 10 * groups {
        return d;
    }
    d.help(format!("compile with --moe-bound {groups}, which holds any load"))
}

/// The rows of a token's copies.
struct CopyRows<'a> {
    k: &'a Copies,
    memory: &'a [*mut f32],
}

/// A row in memory.
#[derive(Clone, Copy)]
struct Row {
    at: *mut f32,
    elem: DType,
}

impl Row {
    /// A piece in f32, in `room`.
    ///
    /// # Safety
    /// The row has these elements, and nobody writes them; the room has as many.
    unsafe fn piece<'a>(&self, piece: &Range<usize>, room: &'a mut [f32; BLOCK]) -> &'a [f32] {
        let room = &mut room[..piece.len()];
        // SAFETY: by the caller.
        unsafe { read(element(self.at, self.elem, piece.start), self.elem, room) };
        room
    }

    /// Writes a piece.
    ///
    /// # Safety
    /// The row has these elements, and nobody else uses them.
    unsafe fn put(&self, piece: &Range<usize>, x: &[f32]) {
        let to = element(self.at, self.elem, piece.start);
        // SAFETY: by the caller.
        unsafe { scatter(x.as_ptr(), to, 1, piece.len(), self.elem) }
    }
}

impl CopyRows<'_> {
    fn at(&self, v: &View, elem: DType, index: &[usize]) -> *mut f32 {
        element(self.memory[v.operand], elem, v.at(index))
    }
    fn token(&self, z: usize, t: usize) -> Row {
        let elem = self.k.token_elem;
        Row { at: self.at(&self.k.tokens, elem, &[z, t]), elem }
    }
    fn gate(&self, copy: [usize; 3]) -> *mut f32 {
        self.at(&self.k.gates, self.k.gate_elem, &copy)
    }
    /// The buffer's row of a copy, if it has one.
    ///
    /// # Safety
    /// The memory is valid for everything the kernel reaches.
    unsafe fn of(&self, copy: [usize; 3]) -> Option<Row> {
        let (k, elem) = (self.k, self.k.buffer_elem);
        // SAFETY: by the caller, an element of the slots.
        let slot = unsafe { *self.at(&k.slot, DType::I32, &copy).cast::<i32>() };
        let slot = usize::try_from(slot).ok().filter(|&s| s < k.groups * k.rows)?;
        let at = self.at(&k.buffer, elem, &[slot / k.rows, copy[0], slot % k.rows]);
        Some(Row { at, elem })
    }
    /// Calls `f(shard, token)` for every token, on several threads if there is much to do.
    ///
    /// # Safety
    /// Calls for different tokens may run at the same time.
    unsafe fn tokens(&self, threads: usize, f: impl Fn(usize, usize)) {
        let [shards, tokens, copies] = self.k.copies;
        // SAFETY: by the caller.
        unsafe {
            moves::each(threads, &[shards, tokens], copies * self.k.width, |i| f(i[0], i[1]))
        };
    }
    /// The pieces of some columns.
    fn pieces(cols: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let end = cols.end;
        cols.step_by(BLOCK).map(move |i| i..end.min(i + BLOCK))
    }
}

/// Copies tokens, times their gates, into the rows of their copies.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the buffer overlaps no operand.
pub(crate) unsafe fn dispatch(k: &Copies, memory: &[*mut f32], threads: usize) {
    /// Columns that a thread has at least: lines of the cache.
    const COLUMNS: usize = 64;
    let ([shards, tokens, copies], rows) = (k.copies, CopyRows { k, memory });
    let work = shards * tokens * copies * k.width;
    let parts = threads.min(work / SHARE).min(k.width / COLUMNS).max(1);
    let part = |i: usize| {
        let units = k.width.div_ceil(COLUMNS);
        let [first, end] = [i, i + 1].map(|i| (units * i / parts * COLUMNS).min(k.width));
        let (mut room, mut made) = ([0.0; BLOCK], [0.0; BLOCK]);
        let mut o = Odometer::new(&[shards, tokens]);
        while let Some(&[z, t]) = o.index() {
            for piece in CopyRows::pieces(first..end) {
                // SAFETY: by the caller: rows and elements of the operands, and rows of the result.
                unsafe {
                    let x = rows.token(z, t).piece(&piece, &mut room);
                    for copy in (0..copies).map(|c| [z, t, c]) {
                        if let Some(to) = rows.of(copy) {
                            let made = &mut made[..x.len()];
                            math::scaled(x, get(rows.gate(copy), k.gate_elem), made);
                            to.put(&piece, made);
                        }
                    }
                }
            }
            o.advance();
        }
    };
    // SAFETY: no column is in two parts.
    unsafe { team::each(threads, parts, part) };
}

/// Sums the rows of a token's copies times their gates.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the tokens overlap no operand.
pub(crate) unsafe fn unpermute(k: &Copies, memory: &[*mut f32], threads: usize) {
    let rows = CopyRows { k, memory };
    let token = |z, t| {
        let (mut room, mut sum) = ([0.0; BLOCK], [0.0; BLOCK]);
        for piece in CopyRows::pieces(0..k.width) {
            let sum = &mut sum[..piece.len()];
            let mut first = true;
            // SAFETY: by the caller: rows and elements of the operands, and a row of the result.
            unsafe {
                for copy in (0..k.copies[2]).map(|c| [z, t, c]) {
                    let Some(from) = rows.of(copy) else { continue };
                    let x = from.piece(&piece, &mut room);
                    let gate = get(rows.gate(copy), k.gate_elem);
                    if first {
                        math::scaled(x, gate, sum)
                    } else {
                        math::add_scaled(x, gate, sum)
                    }
                    first = false;
                }
                if first {
                    sum.fill(0.0);
                }
                rows.token(z, t).put(&piece, sum);
            }
        }
    };
    // SAFETY: tokens have rows of their own.
    unsafe { rows.tokens(threads, token) };
}

/// Multiplies tokens with the rows of their copies.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the gates overlap no operand.
pub(crate) unsafe fn combine_gates_grad(k: &Copies, memory: &[*mut f32], threads: usize) {
    // Then every product is added to the partial sum that it would be added to without pieces.
    const { assert!(BLOCK.is_multiple_of(LANES)) };
    let rows = CopyRows { k, memory };
    let token = |z, t| {
        let (mut room, mut other) = ([0.0; BLOCK], [0.0; BLOCK]);
        for copy in (0..k.copies[2]).map(|c| [z, t, c]) {
            let mut sums = [0.0; LANES];
            // SAFETY: by the caller: rows of the operands, and elements of the result.
            unsafe {
                if let Some(y) = rows.of(copy) {
                    for piece in CopyRows::pieces(0..k.width) {
                        let x = rows.token(z, t).piece(&piece, &mut room);
                        math::add_products(y.piece(&piece, &mut other), x, &mut sums);
                    }
                }
                let gate = Row { at: rows.gate(copy), elem: k.gate_elem };
                gate.put(&(0..1), &[math::total(sums)]);
            }
        }
    };
    // SAFETY: copies have gates of their own.
    unsafe { rows.tokens(threads, token) };
}
