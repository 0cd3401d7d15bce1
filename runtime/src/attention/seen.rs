//! Who sees whom in attention, by positions and segments, of a block of queries and of keys.

use super::rows::Seen;
use super::{AttentionCall, KEYS, ends};
use shardc_ir::kernel::View;
use std::ops::Range;

/// What hides some key from some query.
#[derive(Clone, Copy)]
pub(super) struct Hidden<'a> {
    positions: bool,
    segments: Option<[&'a [i32]; 2]>,
}

impl<'a> AttentionCall<'a> {
    /// Segments of the queries and of the keys of a sequence, if there are segments.
    ///
    /// # Safety
    /// As for [`Call::new`].
    pub(super) unsafe fn segments(&self, batch: usize) -> Option<[&'a [i32]; 2]> {
        let views = self.heads.segments.as_ref()?;
        let row = |v: &View, n: usize| {
            let at = self.memory[v.operand].wrapping_add(v.at(&[batch])).cast::<i32>();
            // SAFETY: by the caller; those of a sequence are adjacent.
            unsafe { std::slice::from_raw_parts(at.cast_const(), n) }
        };
        Some([row(&views[0], self.heads.queries), row(&views[1], self.heads.keys)])
    }

    /// Blocks of keys that queries of a block see, each from the first to the last that is seen.
    pub(super) fn seen<'b>(
        &'b self,
        queries: Range<usize>,
        segments: Option<[&'b [i32]; 2]>,
    ) -> impl Iterator<Item = Range<usize>> + 'b {
        let reach = |p| self.heads.mask.reach(p);
        let [[first, _], [_, last]] = ends(&self.q_pos[queries.clone()]).map(reach);
        let of = segments.map(|[q, k]| (ends(&q[queries]), k));
        let near = move |&i: &usize| {
            let at = self.k_pos[i];
            let own = of.is_none_or(|([low, high], k)| low <= k[i] && k[i] <= high);
            first <= at && at <= last && own
        };
        let mut next = 0;
        std::iter::from_fn(move || {
            let first = (next..self.k_pos.len()).find(near)?;
            next = self.k_pos.len().min(first + KEYS);
            Some(first..(first..next).rfind(near).map_or(first, |last| last + 1))
        })
    }

    /// Which of a block of keys a query sees, some query of the same block seeing some of them.
    pub(super) fn mask<'b>(
        &'b self,
        query: usize,
        keys: &Range<usize>,
        hidden: Hidden<'b>,
    ) -> Seen<'b> {
        let reach = self.heads.mask.reach(self.q_pos[query]);
        let segment = hidden.segments.map(|[q, k]| (q[query], &k[keys.clone()]));
        Seen { keys: hidden.positions.then(|| &self.k_pos[keys.clone()]), reach, segment }
    }

    /// What hides some key of a block from some query of a block.
    pub(super) fn hides<'b>(
        &self,
        queries: Range<usize>,
        keys: Range<usize>,
        segments: Option<[&'b [i32]; 2]>,
    ) -> Hidden<'b> {
        let reach = |p| self.heads.mask.reach(p);
        let [[_, last], [first, _]] = ends(&self.q_pos[queries.clone()]).map(reach);
        let [low, high] = ends(&self.k_pos[keys.clone()]);
        let one = |[q, k]: &[&[i32]; 2]| {
            let [a, b] = [ends(&q[queries.clone()]), ends(&k[keys.clone()])];
            a == b && a[0] == a[1]
        };
        let segments = segments.filter(|both| !one(both));
        Hidden { positions: low < first || high > last, segments }
    }
}
