//! Ops that stand together in models: norms, tables of tokens, attention, experts.

use super::drawn::{Known, Program, ROWS, VOCAB, letters, text, ty};

impl Program<'_> {
    /// Softmax over a dim, or a norm over the last one.
    pub fn norm(&mut self, x: &Known) -> Known {
        if x.sizes.is_empty() {
            return self.unary(x);
        }
        let (all, last) = (letters(x.sizes.len()), x.sizes.len() - 1);
        if self.draw.below(2) == 0 {
            let dim = self.draw.below(last + 1);
            return self.softmax(x, dim);
        }
        let (a, kept) = (text(&all), text(&all[..last]));
        let (n, rest) = (x.sizes[last], &x.sizes[..last]);
        let squares = self.op(&format!("dot[{a},{a}->{kept}] {0}, {0}", x.name), rest, 1.0);
        let mean = self.op(&format!("scale[{}] {}", 1.0 / n as f64, squares.name), rest, 1.0);
        let more = self.op(&format!("shift[0.01] {}", mean.name), rest, 1.0);
        let r = self.op(&format!("rsqrt {}", more.name), rest, 1.0);
        let normed =
            self.op(&format!("mul[{a},{kept}->{a}] {}, {}", x.name, r.name), &x.sizes, 2.0);
        let w = self.param(&[n]);
        let what = format!("mul[{a},{}->{a}] {}, {}", all[last], normed.name, w.name);
        self.op(&what, &x.sizes, 2.0)
    }

    fn softmax(&mut self, x: &Known, dim: usize) -> Known {
        let all = letters(x.sizes.len());
        let kept: Vec<char> = all.iter().copied().filter(|&l| l != all[dim]).collect();
        let mut rest = x.sizes.clone();
        rest.remove(dim);
        let (a, kept) = (text(&all), text(&kept));
        let top = self.op(&format!("reduce_max[{a}->{kept}] {}", x.name), &rest, x.large);
        let still = self.op(&format!("stop_gradient {}", top.name), &rest, x.large);
        let what = format!("sub[{a},{kept}->{a}] {}, {}", x.name, still.name);
        let shifted = self.op(&what, &x.sizes, x.large);
        let exp = self.op(&format!("exp {}", shifted.name), &x.sizes, 1.0);
        let sum = self.op(&format!("reduce_sum[{a}->{kept}] {}", exp.name), &rest, 1.0);
        self.op(&format!("div[{a},{kept}->{a}] {}, {}", exp.name, sum.name), &x.sizes, 1.0)
    }

    /// A value [rows, tokens, n] made of another.
    fn rows(&mut self, x: &Known) -> Known {
        if x.sizes.len() == 3 && x.sizes[..2] == [ROWS, self.seq] {
            return x.clone();
        }
        let first = self.known[0].clone();
        let sum = text(&letters(x.sizes.len()));
        let one = match x.sizes.len() {
            0 => x.clone(),
            _ => self.op(&format!("reduce_max[{sum}->] {}", x.name), &[], x.large),
        };
        let what = format!("mul[abc,->abc] {}, {}", first.name, one.name);
        let made = self.op(&what, &first.sizes, x.large);
        self.tame(made)
    }

    /// What tokens choose: rows of a table, elements of the last dim, rows that are added up.
    pub fn tokens(&mut self, x: &Known) -> Known {
        let ids = ["%ids", "%targets"][self.draw.below(2)];
        let x = self.rows(x);
        let h = x.sizes[2];
        match self.draw.below(3) {
            0 => {
                let table = self.like(&[VOCAB, h]);
                let what = format!("take[vh,bs->bsh] {}, {ids}", table.name);
                let y = self.op(&what, &x.sizes, table.large);
                self.op(&format!("add {}, {}", x.name, y.name), &x.sizes, x.large + y.large)
            }
            1 => {
                let w = self.like(&[h, VOCAB]);
                let large = x.large * w.large * (h as f64).sqrt();
                let what = format!("dot[bsh,hv->bsv] {}, {}", x.name, w.name);
                let all = self.op(&what, &[ROWS, self.seq, VOCAB], large);
                let what = format!("take[bsv,bs->bs] {}, {ids}", all.name);
                self.op(&what, &[ROWS, self.seq], large)
            }
            _ => {
                let what = format!("index_add[bsh,bs->vh; v={VOCAB}] {}, {ids}", x.name);
                self.op(&what, &[VOCAB, h], x.large * 4.0)
            }
        }
    }

    pub fn block(&mut self, x: &Known) -> Known {
        let x = self.rows(x);
        match self.draw.below(2) {
            0 => self.attention(&x),
            _ => self.experts(&x),
        }
    }

    fn attention(&mut self, x: &Known) -> Known {
        let (h, groups) = (x.sizes[2], [1, 2][self.draw.below(2)]);
        let heads = groups * [1, 2, 4][self.draw.below(3)];
        let (d, e) = (2, [2, 4][self.draw.below(2)]);
        let large = x.large * (h as f64).sqrt();
        let mut of = |n: usize, d: usize| {
            let w = self.param(&[n, d, h]);
            let what = format!("dot[bsh,ndh->bsnd] {}, {}", x.name, w.name);
            self.op(&what, &[ROWS, self.seq, n, d], large)
        };
        let (mut q, mut k, v) = (of(heads, d), of(groups, d), of(groups, e));
        if self.draw.below(2) == 0 {
            let at = self.op("cast[f32] %positions", &[self.seq], 4.0);
            let by = self.op("literal[1.0]", &[d / 2], 1.0);
            let what = format!("mul[s,r->sr] {}, {}", at.name, by.name);
            let angle = self.op(&what, &[self.seq, d / 2], 4.0);
            let cos = self.op(&format!("cos {}", angle.name), &[self.seq, d / 2], 1.0);
            let sin = self.op(&format!("sin {}", angle.name), &[self.seq, d / 2], 1.0);
            let mut turn = |x: &Known| {
                let what = format!("rope {}, {}, {}", x.name, cos.name, sin.name);
                self.op(&what, &x.sizes, x.large)
            };
            (q, k) = (turn(&q), turn(&k));
        }
        let mask = ["causal", "-1..0", "full", "-2..1", "causal/3"][self.draw.below(5)];
        let (out, lse) = (self.name(), self.name());
        let sizes = [ROWS, self.seq, heads, e];
        self.body += &format!(
            "  {out}, {lse} = attention[0.5; mask={mask}] {}, {}, {}, %positions, %positions : {}, {}\n",
            q.name,
            k.name,
            v.name,
            ty(&sizes),
            ty(&sizes[..3])
        );
        let w = self.param(&[heads, e, h]);
        let what = format!("dot[bsne,neh->bsh] {out}, {}", w.name);
        let y = self.op(&what, &x.sizes, large * 2.0);
        self.op(&format!("add {}, {}", x.name, y.name), &x.sizes, x.large + y.large)
    }

    fn experts(&mut self, x: &Known) -> Known {
        let (h, f) = (x.sizes[2], [2, 3, 4][self.draw.below(3)]);
        let (groups, each) = ([1, 2][self.draw.below(2)], [2, 3][self.draw.below(2)]);
        let (e, k, t) = (groups * each, 1 + self.draw.below(2), ROWS * self.seq);
        let rows = t * k;
        let what = format!("reshape[(ib)sh->i(bs)h; i=1] {}", x.name);
        let tokens = self.op(&what, &[1, t, h], x.large);
        let gate = self.param(&[e, h]);
        let what = format!("dot[zth,eh->zte] {}, {}", tokens.name, gate.name);
        let logits = self.op(&what, &[1, t, e], 1.0);
        let scores = self.softmax(&logits, 2);
        let chosen = self.name();
        self.body +=
            &format!("  {chosen} = top_k[zte->ztk; k={k}] {} : i32[1,{t},{k}]\n", scores.name);
        let what = format!("take[zte,ztk->ztk] {}, {chosen}", scores.name);
        let gates = self.op(&what, &[1, t, k], 1.0);
        let (slot, counts) = (self.name(), self.name());
        self.body += &format!(
            "  {slot}, {counts} = route[g={groups},e={each}; rows={rows}; capacity=none] {chosen} : \
             i32[1,{t},{k}], i32[{groups},{each},1]\n"
        );
        let kept = self.op(&format!("at_least[0.0] {slot}"), &[1, t, k], 1.0);
        let what = format!("dispatch[g={groups},c={rows}] {}, {slot}, {}", tokens.name, kept.name);
        let sent = self.op(&what, &[groups, 1, rows, h], x.large);
        let up = self.param(&[e, f, h]);
        let what = format!("grouped_dot {}, {counts}, {}", sent.name, up.name);
        let inner = self.op(&what, &[groups, 1, rows, f], 2.0);
        let act = self.op(&format!("silu {}", inner.name), &inner.sizes, 2.0);
        let down = self.param(&[e, h, f]);
        let what = format!("grouped_dot {}, {counts}, {}", act.name, down.name);
        let out = self.op(&what, &sent.sizes, 2.0);
        let what = format!("unpermute {}, {slot}, {}", out.name, gates.name);
        let all = self.op(&what, &[1, t, h], 2.0);
        let what = format!("reshape[i(bs)h->(ib)sh; i=1,b={ROWS}] {}", all.name);
        let y = self.op(&what, &x.sizes, 2.0);
        self.op(&format!("add {}, {}", x.name, y.name), &x.sizes, x.large + 2.0)
    }
}
