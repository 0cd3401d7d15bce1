//! Which memory a kernel touches: who gives it memory checks this once.

use super::{Gemm, Heads, Kernel, Matrix, Pick, View};
use smallvec::SmallVec;

impl Kernel {
    /// Calls `f(operand, end)` for every view: the kernel touches elements below `end` only. Who
    /// gives it memory checks this once and may then run it without further checks.
    pub fn reach(&self, f: &mut dyn FnMut(usize, usize)) {
        let mut see = |v: &View, extents: &[&[usize]]| {
            let all: SmallVec<[usize; 8]> =
                extents.iter().flat_map(|e| e.iter().copied()).collect();
            f(v.operand, v.end(&all));
        };
        match self {
            Kernel::View => {}
            Kernel::Literal { values, to } => f(*to, values.len()),
            Kernel::Rows(k) => k.reach(&mut see),
            Kernel::HorizontalFusion(k) => {
                for (k, own) in k.kernels.iter().zip(&k.operands) {
                    k.reach(&mut |v, extents| {
                        see(&View { operand: own[v.operand], ..v.clone() }, extents);
                    });
                }
            }
            Kernel::Copy(all) => all.iter().for_each(|k| {
                k.clear.iter().for_each(|c| see(&c.view, &[&c.extents]));
                see(&k.from, &[&k.extents]);
                see(&k.to, &[&k.extents]);
            }),
            Kernel::Gemm(k) => k.reach(&mut see),
            Kernel::GemmThen(k) => {
                k.product.reach(&mut see);
                k.reads.iter().chain(&k.writes).for_each(|x| k.product.reach_result(x, &mut see));
            }
            Kernel::Take(k) => k.reach(true, &mut see),
            Kernel::IndexAdd { pick, clear } => {
                pick.reach(false, &mut see);
                clear.iter().for_each(|c| see(&c.view, &[&c.extents]));
            }
            Kernel::Scan(k) => {
                [&k.x, &k.out].into_iter().for_each(|v| see(v, &[&k.extents, &[k.len]]));
            }
            Kernel::Draw(k) => {
                see(&k.run, &[&[3]]);
                k.place.iter().chain([&k.out]).for_each(|v| see(v, &[&k.extents]));
            }
            Kernel::Rope(k) => {
                for (v, n) in
                    [(&k.x, k.width), (&k.out, k.width), (&k.cos, k.turns), (&k.sin, k.turns)]
                {
                    see(&v.adjacent(), &[&k.extents, &[n]]);
                }
            }
            Kernel::Attention(k) => {
                let h = &k.heads;
                h.reach(false, &mut see);
                see(&k.q.adjacent(), &[&h.by_query(), &[h.width]]);
                see(&k.k.adjacent(), &[&h.by_key(), &[h.width]]);
                see(&k.v.adjacent(), &[&h.by_key(), &[h.value_width]]);
                see(&k.out.adjacent(), &[&h.by_query(), &[h.value_width]]);
                see(&k.lse, &[&h.by_query()]);
            }
            Kernel::AttentionGrad(k) => {
                let h = &k.heads;
                h.reach(true, &mut see);
                [&k.q, &k.d_q]
                    .iter()
                    .for_each(|v| see(&v.adjacent(), &[&h.by_query(), &[h.width]]));
                [&k.k, &k.d_k].iter().for_each(|v| see(&v.adjacent(), &[&h.by_key(), &[h.width]]));
                [&k.v, &k.d_v]
                    .iter()
                    .for_each(|v| see(&v.adjacent(), &[&h.by_key(), &[h.value_width]]));
                see(&k.d_out.adjacent(), &[&h.by_query(), &[h.value_width]]);
                [&k.lse, &k.delta].iter().for_each(|v| see(v, &[&h.by_query()]));
                if let (Some(v), Some((_, offsets))) = (&k.d_bias, &h.bias) {
                    see(&v.adjacent(), &[&[h.groups * h.repeat, *offsets]]);
                }
            }
            Kernel::Recurrence(k) => k.reach(&mut see),
            Kernel::RecurrenceGrad(k) => k.reach(&mut see),
            Kernel::TopK(k) => k.reach(&mut see),
            Kernel::Route(k) => k.reach(&mut see),
            Kernel::Dispatch(k) | Kernel::Unpermute(k) | Kernel::CombineGatesGrad(k) => {
                k.reach(&mut see)
            }
            Kernel::Grouped(k) => k.reach(&mut see),
            Kernel::Collective(c) => {
                c.exchange.blocks().for_each(|b| see(&b.view, &[&b.extents]));
            }
        }
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
    fn reach(&self, see: &mut dyn FnMut(&View, &[&[usize]])) {
        for (x, rows, cols) in [(&self.a, self.m, self.k), (&self.b, self.k, self.n)] {
            see(&x.walk(), &[&self.batch, &self.sum, &[rows, cols]]);
        }
        self.reach_result(&self.out, see);
    }
    fn reach_result(&self, x: &Matrix, see: &mut dyn FnMut(&View, &[&[usize]])) {
        see(&x.walk(), &[&self.batch, &[self.m, self.n]]);
    }
}

impl Pick {
    fn reach(&self, take: bool, see: &mut dyn FnMut(&View, &[&[usize]])) {
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
    fn reach(&self, backward: bool, see: &mut dyn FnMut(&View, &[&[usize]])) {
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
