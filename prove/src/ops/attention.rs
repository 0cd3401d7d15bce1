//! Attention, and attention over several sets of keys from attention over each.

use super::*;

/// Constants of attention.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Scores {
    pub scale: Real,
    /// How far before a query keys are seen, and how far behind it; `None`: at any distance.
    pub sides: [Option<usize>; 2],
    /// Keys of other chunks of so many positions are not seen.
    pub chunk: Option<usize>,
    pub softcap: Option<Real>,
    /// An operand behind the others has a slope for each head.
    pub slopes: bool,
    /// In their place a number for each head and offset, the middle one of which is 0.
    pub bias: bool,
    /// The segments of queries and of keys follow: only those of one segment see each other.
    pub segments: bool,
    /// The run and places of queries follow: some probabilities are 0 at random, by this rate and
    /// stream.
    pub kept: Option<(Real, Arc<str>)>,
}

impl Scores {
    pub(super) fn of(k: &ops::Attention) -> Scores {
        let ops::Attention { scale, mask, softcap, slopes, bias, segments, kept } = k;
        let ops::Mask { left, right, chunk } = mask;
        let of = |ops::AttentionDropout { rate, stream }: &ops::AttentionDropout| {
            (Real::new(*rate), stream.0.clone())
        };
        Scores {
            scale: Real::new(*scale),
            sides: [*left, *right],
            chunk: *chunk,
            softcap: softcap.map(Real::new),
            slopes: *slopes,
            bias: *bias,
            segments: *segments,
            kept: kept.as_ref().map(of),
        }
    }

    /// The letters of an attention whose other operands have these; behind them stand slopes, a bias,
    /// segments, the run and places.
    pub(super) fn letters(
        &self,
        [ins, outs]: [&str; 2],
        others: &[usize],
        ranks: &[usize],
    ) -> Option<Cow<'static, Rule>> {
        let (mut text, mut takes) = (ins.to_string(), others.to_vec());
        let behind: [(bool, &str, &[usize]); 4] = [
            (self.slopes, ",(gr)", &[1]),
            (self.bias, ",(gr)!o", &[2]),
            (self.segments, ",bs,b!t", &[2, 2]),
            (self.kept.is_some(), ",!k,bs", &[1, 2]),
        ];
        for (_, letters, dims) in behind.iter().filter(|x| x.0) {
            text += letters;
            takes.extend(*dims);
        }
        known(&(text + "->" + outs), &takes, ranks)
    }

    /// Draws positions and segments: every query sees the first key, and some of the others.
    /// Operand `at` has the positions of keys.
    pub(super) fn draw(&self, x: &mut Operands, at: usize) {
        x.all[at - 1] = x.noise(at - 1).map(|v| 1 + v % 3);
        let later = x.noise(at);
        x.all[at] = Tensor::from_fn(&later.shape, |i| later.at(i) % 4 * (i[0] as u64).min(1));
        if self.segments {
            // The first key is of a segment of two.
            let of = at + 1 + self.numbers();
            for i in [of, of + 1] {
                let own = x.noise(i);
                x.all[i] = Tensor::from_fn(&own.shape, |at| own.at(at) % 2 * (at[1] as u64).min(1));
            }
        }
    }

    /// How many operands of numbers stand behind positions.
    pub fn numbers(&self) -> usize {
        usize::from(self.slopes) + usize::from(self.bias)
    }

    /// Which of the numbers of a bias a query and a key have: those at the ends are of all that are farther.
    pub(super) fn offset(&self, x: &[&Tensor], at: usize, s: usize, t: usize) -> usize {
        let (far, last) =
            (x[at].integer(&[t]) - x[at - 1].integer(&[s]), x[at + 1].shape[1] as i64 - 1);
        (far + last / 2).clamp(0, last) as usize
    }

    pub(super) fn name(&self, of: &str) -> String {
        let side = |n: Option<usize>| n.map(|n| n.to_string()).unwrap_or_default();
        let [before, behind] = self.sides.map(side);
        let mut s = format!("{of}[{:?}; sees={before}..{behind}", self.scale);
        s += &self.chunk.map(|n| format!("; chunk={n}")).unwrap_or_default();
        s += &self.softcap.map(|c| format!("; softcap={c:?}")).unwrap_or_default();
        s += if self.slopes { "; slopes" } else { "" };
        s += if self.bias { "; bias" } else { "" };
        s += if self.segments { "; segments" } else { "" };
        let kept = self.kept.as_ref();
        s += &kept.map(|(rate, stream)| format!("; kept={rate:?} {stream}")).unwrap_or_default();
        s + "]"
    }

    /// True if a query at a position sees a key at another.
    fn sees(&self, query: i64, key: i64) -> bool {
        let within =
            |limit: Option<usize>, n: i64| limit.is_none_or(|l| i128::from(n) <= l as i128);
        let chunk = |at: i64| self.chunk.map(|n| i128::from(at).div_euclid(n.max(1) as i128));
        let far = query - key;
        within(self.sides[0], far) && within(self.sides[1], -far) && chunk(query) == chunk(key)
    }

    /// Calls `f(batch, query, head, key head, key)` for all that see each other. Operand `at` has
    /// the positions of keys; behind slopes, if there are some, stand segments.
    pub(super) fn pairs(
        &self,
        x: &[&Tensor],
        at: usize,
        mut f: impl FnMut(usize, usize, usize, usize, usize),
    ) {
        let [q, k, q_at, k_at] = [x[0], x[1], x[at - 1], x[at]];
        let of = at + 1 + self.numbers();
        let one = |b: usize, s: usize, t: usize| {
            !self.segments || x[of].integer(&[b, s]) == x[of + 1].integer(&[b, t])
        };
        let share = (q.shape[2] / k.shape[2].max(1)).max(1);
        each(&q.shape[..3], |i| {
            for t in 0..k.shape[1] {
                let seen = self.sees(q_at.integer(&[i[1]]), k_at.integer(&[t]));
                if seen && one(i[0], i[1], t) {
                    f(i[0], i[1], i[2], i[2] / share, t);
                }
            }
        });
    }

    /// e^score, and the slope of the score's cap. Behind the operands `x` up to that of keys'
    /// positions, `at`, are the slopes of heads, or their bias.
    pub(super) fn weight(
        &self,
        x: &[&Tensor],
        at: usize,
        a: [usize; 3],
        b: [usize; 3],
    ) -> [u64; 2] {
        let (q, k) = (x[0], x[1]);
        let mut dot = 0;
        for d in 0..q.shape[3] {
            let product = times(q.at(&[a[0], a[1], a[2], d]), k.at(&[b[0], b[1], b[2], d]));
            dot = add(dot, product, P);
        }
        let dotted = times(dot, number(self.scale.get()));
        let cap = self.softcap.map_or(0, |c| c.get().to_bits());
        let slope = match self.softcap {
            Some(_) => oracle(mix(seed("slope"), cap), &[dotted]),
            None => 1,
        };
        let mut of = vec![dotted];
        if self.slopes {
            let far = x[at - 1].integer(&[a[1]]).abs_diff(x[at].integer(&[b[1]]));
            of.push(times(x[at + 1].at(&[a[2]]), far));
        }
        if self.bias {
            of.push(x[at + 1].at(&[a[2], self.offset(x, at, a[1], b[1])]));
        }
        [oracle(mix(seed("e^"), cap), &of), slope]
    }

    /// What the probability of a query, a head and a key is multiplied by: an element of the field
    /// for each, of which nothing is known. The run and places are the last operands; `first` is
    /// the number of the first head.
    pub(super) fn factor(&self, x: &[&Tensor], at: usize, [b, s, h]: [usize; 3], t: usize) -> u64 {
        let Some((rate, stream)) = &self.kept else { return 1 };
        let [run, place] = [x[x.len() - 2], x[x.len() - 1]];
        let mut of = run.data.clone();
        of.extend([place.at(&[b, s]), h as u64, x[at].at(&[t])]);
        oracle(mix(seed(stream), rate.get().to_bits()), &of)
    }
}

/// Keys of which some are seen, and some are not.
pub(super) fn longer(small: &mut Small) {
    let keys = small.letter(1, Some(1));
    small.set(keys, 3 * small.is(keys));
}

/// The output, and e to the power of the log-sum-exp.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Attention(pub Scores);

impl Function for Attention {
    fn name(&self) -> String {
        self.0.name("attention")
    }
    fn results(&self, x: &[&Tensor], _: &[usize], at: &Begins) -> Result<Vec<Tensor>, String> {
        let (c, q, v, first) = (&self.0, x[0], x[2], (at.result)(2));
        let rows = &q.shape[..3];
        let mut out = Tensor::full(&[rows, &v.shape[3..]].concat(), 0);
        let mut sum = Tensor::full(rows, 0);
        c.pairs(x, 4, |b, s, h, g, t| {
            let w = c.weight(x, 4, [b, s, h], [b, t, g])[0];
            sum.add_at(&[b, s, h], w);
            let w = times(w, c.factor(x, 4, [b, s, first + h], t));
            for e in 0..v.shape[3] {
                out.add_at(&[b, s, h, e], times(w, v.at(&[b, t, g, e])));
            }
        });
        let shape = out.shape.clone();
        let by = sum.map(|z| inverse(z, P));
        Ok(vec![Tensor::from_fn(&shape, |i| times(out.at(i), by.at(&i[..3]))), sum])
    }
}

impl Law for ops::Attention {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        let text = ["bs(gr)!d,b!tg!d,b!tg!e,s,!t", "bs(gr)e,bs(gr)"];
        Scores::of(self).letters(text, &[4, 4, 4, 1, 1], ranks)
    }
    fn typing(&self) -> Option<Typing> {
        let ins = if self.slopes || self.bias { "nnniini" } else { "nnniii" };
        Some(Typing { kinds: [ins, "nn"], ..NONLINEAR })
    }
    fn shrink(&mut self, small: &mut Small) {
        longer(small);
    }
    fn operands(&self, x: &mut Operands) {
        Scores::of(self).draw(x, 4);
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        Ok(Some(Attention(Scores::of(self)).into()))
    }
    /// Of scores x and weights p = e^(x - lse): dv = pᵀ d, dx = p (d vᵀ - delta), with delta the
    /// row sums of d·o, less the cotangent of lse.
    fn back(&self, at: &mut At) -> Result<Back, String> {
        let g = at.d()?;
        let rows = at.s.shape(at.y[1]).to_vec();
        let all: Vec<Letter> = (0..4).collect();
        let pair = [(g, all.clone()), (at.y[0], all)];
        let mut delta = at.s.product(&pair, &[0, 1, 2], &rows)?;
        if let Some(d_lse) = at.d.get(1).copied().flatten() {
            delta = at.s.sum(&[(Coef::ONE, delta), (Coef::ONE.minus(), d_lse)], &rows);
        }
        let x = &at.x;
        let args = [&[x[0], x[1], x[2], at.y[1], g, delta], &x[3..]].concat();
        let mut back: Back = vec![];
        for k in 0..3 {
            let (f, shape) = (AttentionGrad(Scores::of(self)), at.shape(k));
            back.push(Some(at.s.apply(f, &args, k as u8, &shape)));
        }
        back.extend(at.x[3..].iter().map(|_| None));
        if self.bias {
            let (f, shape) = (AttentionGrad(Scores::of(self)), at.shape(5));
            back[5] = Some(at.s.apply(f, &args, 3, &shape));
        }
        Ok(back)
    }
}

/// Attention over several sets of keys, from attention over each. Operands are outputs, each
/// followed by its log-sum-exp.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Merge;

impl Function for Merge {
    fn name(&self) -> String {
        "merge_attention".into()
    }
    /// Outputs weighted by the sums of their exponentials.
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        let sum = x[1].plus(x[3]);
        let by = sum.map(|z| inverse(z, P));
        let out = Tensor::from_fn(&x[0].shape, |i| {
            let row = &i[..3];
            let both = add(times(x[0].at(i), x[1].at(row)), times(x[2].at(i), x[3].at(row)), P);
            times(both, by.at(row))
        });
        Ok(vec![out, sum])
    }
}

impl Law for ops::MergeAttention {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        known("bsn!e,bsn,bsn!e,bsn->bsne,bsn", &[4, 3, 4, 3], ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { kinds: ["n", "nn"], ..NONLINEAR })
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        Ok(Some(Merge.into()))
    }
    fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
        let x = t.ins;
        Ok(t.s.merge([[x[0], x[1]], [x[2], x[3]]]).to_vec())
    }
}
