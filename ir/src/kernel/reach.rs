//! Which memory a kernel touches: who gives it memory checks this once.

use super::{
    Attention, AttentionGrad, Block, Collective, Copy, Draw, Gemm, Heads, HorizontalFusion, Kernel,
    Matrix, Pick, Rope, Scan, Then, View,
};
use smallvec::SmallVec;

/// What sees a view and the loops that walk it.
pub(super) type See<'a> = &'a mut dyn FnMut(&View, &[&[usize]]);

impl Kernel {
    /// Calls `f(operand, end)` for every view: the kernel touches elements below `end` only. Who
    /// gives it memory checks this once and may then run it without further checks.
    pub fn reach(&self, f: &mut dyn FnMut(usize, usize)) {
        self.walk(&mut |v, extents| {
            let all: SmallVec<[usize; 8]> =
                extents.iter().flat_map(|e| e.iter().copied()).collect();
            f(v.operand, v.end(&all));
        });
    }
}

impl Block {
    pub(super) fn reach(&self, see: See) {
        see(&self.view, &[&self.extents]);
    }
}

impl HorizontalFusion {
    pub(super) fn reach(&self, see: See) {
        for (k, own) in self.kernels.iter().zip(&self.operands) {
            k.reach(&mut |v, extents| {
                see(&View { operand: own[v.operand], ..v.clone() }, extents);
            });
        }
    }
}

impl Copy {
    pub(super) fn reach(&self, see: See) {
        self.clear.iter().for_each(|c| c.reach(see));
        [&self.from, &self.to].into_iter().for_each(|v| see(v, &[&self.extents]));
    }
}

impl Then {
    pub(super) fn reach(&self, see: See) {
        self.product.reach(see);
        self.reads.iter().chain(&self.writes).for_each(|x| self.product.reach_result(x, see));
    }
}

impl Scan {
    pub(super) fn reach(&self, see: See) {
        [&self.x, &self.out].into_iter().for_each(|v| see(v, &[&self.extents, &[self.len]]));
    }
}

impl Draw {
    pub(super) fn reach(&self, see: See) {
        see(&self.run, &[&[3]]);
        self.place.iter().chain([&self.out]).for_each(|v| see(v, &[&self.extents]));
    }
}

impl Rope {
    pub(super) fn reach(&self, see: See) {
        let halves = [&self.cos, &self.sin].map(|v| (v, self.turns));
        for (v, n) in [(&self.x, self.width), (&self.out, self.width)].into_iter().chain(halves) {
            see(&v.adjacent(), &[&self.extents, &[n]]);
        }
    }
}

impl Attention {
    pub(super) fn reach(&self, see: See) {
        let h = &self.heads;
        h.reach(false, see);
        see(&self.q.adjacent(), &[&h.by_query(), &[h.width]]);
        see(&self.k.adjacent(), &[&h.by_key(), &[h.width]]);
        see(&self.v.adjacent(), &[&h.by_key(), &[h.value_width]]);
        see(&self.out.adjacent(), &[&h.by_query(), &[h.value_width]]);
        see(&self.lse, &[&h.by_query()]);
    }
}

impl AttentionGrad {
    pub(super) fn reach(&self, see: See) {
        let h = &self.heads;
        h.reach(true, see);
        let by_query = [(&self.q, h.width), (&self.d_q, h.width), (&self.d_out, h.value_width)];
        let by_key = [&self.k, &self.d_k].map(|v| (v, h.width));
        let values = [&self.v, &self.d_v].map(|v| (v, h.value_width));
        by_query.iter().for_each(|(v, n)| see(&v.adjacent(), &[&h.by_query(), &[*n]]));
        let all = by_key.iter().chain(&values);
        all.for_each(|(v, n)| see(&v.adjacent(), &[&h.by_key(), &[*n]]));
        [&self.lse, &self.delta].iter().for_each(|v| see(v, &[&h.by_query()]));
        if let (Some(v), Some((_, offsets))) = (&self.d_bias, &h.bias) {
            see(&v.adjacent(), &[&[h.groups * h.repeat, *offsets]]);
        }
    }
}

impl Collective {
    pub(super) fn reach(&self, see: See) {
        self.exchange.blocks().for_each(|b| b.reach(see));
    }
}

impl Matrix {
    /// The view with loops over rows and columns.
    fn walk(&self) -> View {
        let mut v = self.view.clone();
        v.strides.extend([self.row_stride, self.col_stride]);
        v
    }
}

impl Gemm {
    pub(super) fn reach(&self, see: See) {
        for (x, rows, cols) in [(&self.a, self.m, self.k), (&self.b, self.k, self.n)] {
            see(&x.walk(), &[&self.batch, &self.sum, &[rows, cols]]);
        }
        self.reach_result(&self.out, see);
    }
    fn reach_result(&self, x: &Matrix, see: See) {
        see(&x.walk(), &[&self.batch, &[self.m, self.n]]);
    }
}

impl Pick {
    pub(super) fn reach(&self, take: bool, see: See) {
        let one = |v: &View, picked: bool| {
            let mut v = v.clone();
            v.strides.push(self.stride);
            (v, [if picked { self.len } else { 1 }])
        };
        for (v, picked) in [(&self.x, take), (&self.out, !take)] {
            let (v, n) = one(v, picked);
            see(&v, &[&self.extents, &n]);
        }
        see(&self.index, &[&self.extents]);
    }
}

impl Heads {
    fn reach(&self, backward: bool, see: See) {
        let matrices = if backward { 2 } else { 1 };
        see(&self.q_pos, &[&[self.queries]]);
        see(&self.k_pos, &[&[self.keys]]);
        self.slopes.iter().for_each(|v| see(v, &[&[self.groups * self.repeat]]));
        if let Some((v, offsets)) = &self.bias {
            see(&v.adjacent(), &[&[self.groups * self.repeat, *offsets]]);
        }
        if let Some([q, k]) = &self.segments {
            see(q, &[&[self.batch, self.queries]]);
            see(k, &[&[self.batch, self.keys]]);
        }
        if let Some(k) = &self.kept {
            see(&k.run, &[&[3]]);
            see(&k.place, &[&[self.batch, self.queries]]);
        }
        see(&self.scratch, &[&[matrices * self.rows * self.keys + self.wide(backward)]]);
    }
}
