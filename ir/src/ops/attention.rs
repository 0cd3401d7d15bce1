//! `attention`: scaled dot-product attention with grouped key-value heads.

use super::*;
use crate::kernel::Heads;

op! {
    /// Attention (Vaswani et al., 2017) of q `[b,s,n,d]` over k `[b,t,g,d]` and v `[b,t,g,e]`, with n = g·r
    /// heads, without a stored score matrix. The mask says by positions which keys a query sees: all (`full`),
    /// those up to its own position (`causal`), those from 4 before it to 2 after it (`-4..2`), or of these
    /// only the ones in its chunk of 8 positions (`-4..2/8`). A score is x = scale q·k or, with a softcap c, c
    /// tanh(x / c) (Gemma Team, 2024, *Gemma 2*, section 2). With `slopes=true` there is another operand, f32
    /// `[n]`, one slope per head: the slope times the distance of query and key is subtracted from a score
    /// (Press et al., 2022, *ALiBi*); slopes have no gradient. With `bias=true` it is f32 `[n,o]` in their place,
    /// a number for each head and offset, key less query, which is added to a score (Raffel et al., 2020, *T5*,
    /// section 2.1): o is odd, offset 0 stands in the middle, and farther ones have the number at the end. With
    /// `segments=true` i32 `[b,s]` and `[b,t]`
    /// follow, the segments of queries and keys: a query sees only keys of its own segment, as far as the mask
    /// allows. With `kept=0.9 h.0.attn` (dropout of probabilities) the run and the places of queries `[b,s]`
    /// follow, as in `draw`: each probability is kept with that chance and divided by it, else 0, depending on
    /// the place, the head and the position of the key. Results: the output `[b,s,n,e]` and the log-sum-exp of
    /// the scores `[b,s,n]`, in f32 (-inf, and output 0, where a query sees no key).
    Attention = "attention" (q, k, v, q_pos, k_pos, slopes, bias, q_seg, k_seg, run, place) { scale: f64, mask: Mask, softcap: Option<f64>, slopes: bool, bias: bool, segments: bool, kept: Option<AttentionDropout> }
    facts |o| { kind: Attention, fusion: None, precision: if o.slopes || o.bias { Wants::Gated } else { Wants::Half }, gradient: Flows, linear: Linear::No }
    samples [
        "attention[0.5; mask=causal] f32[2,3,4,2], f32[2,3,2,2], f32[2,3,2,2], i32[3], i32[3]",
        "attention[0.7; mask=-1..0] f32[1,4,2,2], f32[1,4,1,2], f32[1,4,1,3], i32[4], i32[4]",
        "attention[0.7; mask=full] f32[2,3,2,2], f32[2,4,1,2], f32[2,4,1,2], i32[3], i32[4]",
        "attention[0.7; mask=full; softcap=1.5; slopes=true] f32[1,3,4,2], f32[1,3,2,2], f32[1,3,2,2], i32[3], i32[3], f32[4]",
        "attention[0.7; mask=-1..2/3] f32[1,4,2,2], f32[1,5,1,2], f32[1,5,1,3], i32[4], i32[5]",
        "attention[0.7; mask=causal; softcap=1.5] f32[1,3,2,2], f32[1,3,1,2], f32[1,3,1,2], i32[3], i32[3]",
        "attention[0.7; mask=causal; kept=0.5 a.0] f32[2,3,4,2], f32[2,3,2,2], f32[2,3,2,2], i32[3], i32[3], i32[3], i32[2,3]",
        "attention[0.7; mask=causal; segments=true] f32[2,4,4,2], f32[2,4,2,2], f32[2,4,2,2], i32[4], i32[4], i32[2,4], i32[2,4]",
        "attention[0.7; mask=full; softcap=1.5; slopes=true; segments=true; kept=0.7 a.1] f32[2,3,4,2], f32[2,5,2,2], f32[2,5,2,3], i32[3], i32[5], f32[4], i32[2,3], i32[2,5], i32[3], i32[2,3]",
        "attention[0.7; mask=full; slopes=true; kept=0.7 a.1] f32[1,3,4,2], f32[1,5,2,2], f32[1,5,2,3], i32[3], i32[5], f32[4], i32[3], i32[1,3]",
        "attention[0.7; mask=full; bias=true] f32[2,4,4,2], f32[2,4,2,2], f32[2,4,2,2], i32[4], i32[4], f32[4,7]",
        "attention[0.7; mask=full; softcap=1.5; bias=true; segments=true; kept=0.7 a.1] f32[2,3,4,2], f32[2,5,2,2], f32[2,5,2,3], i32[3], i32[5], f32[4,3], i32[2,3], i32[2,5], i32[3], i32[2,3]",
    ]
}

/// Operands behind positions, which there need not be: where each stands.
#[derive(Clone, Copy, Debug)]
pub struct Behind {
    pub slopes: Option<usize>,
    pub bias: Option<usize>,
    /// The segments of queries and of keys.
    pub segments: Option<[usize; 2]>,
    /// The run and the places of queries.
    pub drawn: Option<[usize; 2]>,
    /// Number of all operands.
    pub end: usize,
}

impl Behind {
    /// Those of an attention behind the first `first`.
    pub fn new(first: usize, of: &Attention) -> Behind {
        let mut end = first;
        let mut next = |there: bool, n: usize| {
            let at = end;
            end += if there { n } else { 0 };
            there.then_some(at)
        };
        let pair = |at: usize| [at, at + 1];
        let slopes = next(of.slopes, 1);
        let bias = next(of.bias, 1);
        let segments = next(of.segments, 2).map(pair);
        let drawn = next(of.kept.is_some(), 2).map(pair);
        Behind { slopes, bias, segments, drawn, end }
    }
    /// Their letters.
    fn rule(self) -> String {
        let word = |there, text| if there { text } else { "" };
        let slopes = word(self.slopes.is_some(), ",(gr)");
        let bias = word(self.bias.is_some(), ",(gr)!o");
        let seen = word(self.segments.is_some(), ",bs,b!t");
        [slopes, bias, seen, word(self.drawn.is_some(), ",!k,bs")].concat()
    }
    /// Their ranks, behind those of the others.
    fn ranks(self, others: &[usize]) -> Vec<usize> {
        let mut all = others.to_vec();
        all.extend(self.slopes.map(|_| 1));
        all.extend(self.bias.map(|_| 2));
        all.extend(self.segments.iter().flat_map(|_| [2, 2]));
        all.extend(self.drawn.iter().flat_map(|_| [1, 2]));
        all
    }
    /// The letter rule of an op with these operands and results before and behind them.
    pub(crate) fn letters(self, ins: &str, others: &[usize], outs: &str) -> Cow<'static, Rule> {
        Rule::known(&format!("{ins}{}->{outs}", self.rule()), &self.ranks(others))
    }
    /// Says what is wrong with their number, shapes and types.
    pub(crate) fn accepts(self, ins: &[&Type]) -> Result<(), String> {
        if ins.len() != self.end {
            return Err(format!("{} operands are needed", self.end));
        }
        if self.slopes.is_some_and(|i| ins[i].rank() != 1 || ins[i].dtype != DType::F32) {
            return Err("slopes are f32 of 1 dim".into());
        }
        if self.slopes.is_some() && self.bias.is_some() {
            return Err("slopes are a bias by offset, too: there is one of both".into());
        }
        let odd = |t: &Type| t.rank() == 2 && t.dtype == DType::F32 && t.dims[1].size % 2 == 1;
        if self.bias.is_some_and(|i| !odd(ins[i])) {
            return Err("a bias is f32 [heads, offsets], of an odd number of offsets".into());
        }
        let is = |i: usize, rank| ins[i].rank() == rank && ins[i].dtype == DType::I32;
        if self.segments.iter().flatten().any(|&i| !is(i, 2)) {
            return Err("segments of queries and of keys are i32 of 2 dims".into());
        }
        if self
            .drawn
            .is_some_and(|[run, place]| !is(run, 1) || ins[run].dims[0].size != 3 || !is(place, 2))
        {
            return Err("the run is i32[3], and places are i32 of 2 dims".into());
        }
        Ok(())
    }
    /// Segments of several tokens, which keys and queries have in common; a step that drops something.
    pub(crate) fn settle(self, drawn: &mut [Tensor]) {
        for i in self.segments.into_iter().flatten() {
            let shape = drawn[i].shape.clone();
            let of = |at: &[usize]| (at[0] + 3 * at[1] / shape[1]) % 3;
            drawn[i] = Tensor::from_fn(&shape, |at| of(at) as f64);
        }
        if let Some([run, _]) = self.drawn {
            drawn[run].data[2] = 5.0;
        }
    }
    /// The operands that say who sees whom: positions of queries and keys, and their segments.
    pub(crate) fn seeing<'a>(self, ins: &[&'a Tensor], positions: [usize; 2]) -> Seeing<'a> {
        Seeing {
            positions: positions.map(|i| ins[i]),
            segments: self.segments.map(|all| all.map(|i| ins[i])),
        }
    }
}

/// Positions of queries and keys, and their segments, if they have some.
#[derive(Clone, Copy)]
pub(crate) struct Seeing<'a> {
    positions: [&'a Tensor; 2],
    segments: Option<[&'a Tensor; 2]>,
}

/// What probabilities of the queries of a rank are multiplied by, `[b, s, n, t]`; `None` if nothing is dropped.
pub(crate) fn factors(
    kept: Option<&AttentionDropout>,
    behind: Behind,
    ins: &[&Tensor],
    [q_pos, k_pos]: [&Tensor; 2],
    first_head: usize,
) -> Option<Tensor> {
    let ([run, place], kept) = (behind.drawn?, kept?);
    let draws = kept.draws(ins[run]);
    let place = ins[place];
    let keys = || k_pos.data.iter().map(|&k| k as i32);
    let heads = ins[0].shape[2];
    let mut all = Tensor::full(&[place.shape[0], q_pos.shape[0], heads, k_pos.shape[0]], 1.0);
    for b in 0..place.shape[0] {
        for s in 0..q_pos.shape[0] {
            for h in 0..heads {
                let at = [place.at(&[b, s]) as i64 as u32, (first_head + h) as u32];
                draws.of_keys(at, keys(), |t, x| *all.at_mut(&[b, s, h, t]) = x);
            }
        }
    }
    Some(all)
}

/// Queries a kernel treats at once: its scratch memory holds so many rows of scores.
pub const ROWS: usize = 64;

/// Bytes of a kernel's scratch memory: blocks of scores, [`ROWS`] queries by all keys (one forward,
/// two backward), and what of 16-bit operands is made f32 at once; see
/// [`Heads::wide`](crate::kernel::Heads::wide).
pub(crate) fn score_bytes(mesh: &Mesh, [q, k, v]: [&Type; 3], backward: bool) -> usize {
    let (rows, keys) = (q.chunk(mesh, 1).min(ROWS), k.chunk(mesh, 1));
    let (width, value_width) = (q.chunk(mesh, 3), v.chunk(mesh, 3));
    let scores = rows * keys * if backward { 2 } else { 1 };
    let elem = q.dtype;
    let heads = Heads { elem, rows, keys, width, value_width, ..Heads::default() };
    (scores + heads.wide(backward)) * 4
}

/// Calls `f(b, s, n, g, t)` for every query and key that see each other.
pub(crate) fn each_pair(
    [q, k]: [&Tensor; 2],
    seeing: Seeing,
    mask: Mask,
    mut f: impl FnMut(usize, usize, usize, usize, usize),
) {
    let [q_pos, k_pos] = seeing.positions;
    let (n, g) = (q.shape[2], k.shape[2]);
    let r = n.checked_div(g).unwrap_or(1).max(1);
    let one = |b, s, t| seeing.segments.is_none_or(|[q, k]| q.at(&[b, s]) == k.at(&[b, t]));
    for b in 0..q.shape[0] {
        for s in 0..q.shape[1] {
            let [first, last] = mask.reach(q_pos.data[s] as i32).map(f64::from);
            for h in 0..n {
                for t in 0..k.shape[1] {
                    if (first..=last).contains(&k_pos.data[t]) && one(b, s, t) {
                        f(b, s, h, h / r, t);
                    }
                }
            }
        }
    }
}

/// Shapes and element types of q, k, v and positions.
pub(crate) fn accepts_qkv(ins: &[&Type], positions: [usize; 2]) -> Result<(), String> {
    if ins[..3].iter().any(|t| t.rank() != 4 || !t.dtype.is_float()) {
        return Err("q, k and v are floats of 4 dims".into());
    }
    if ins[1].dtype != ins[0].dtype || ins[2].dtype != ins[0].dtype {
        return Err("q, k and v have one element type".into());
    }
    if positions.iter().any(|&p| ins[p].rank() != 1 || ins[p].dtype != DType::I32) {
        return Err("positions are i32 of 1 dim".into());
    }
    Ok(())
}

/// Says what is wrong with a softcap.
pub(crate) fn accepts_softcap(softcap: Option<f64>) -> Result<(), String> {
    // Kernels have it in f32.
    let right = |c: &f64| (*c as f32).is_finite() && *c as f32 > 0.0;
    match softcap.filter(|c| !right(c)) {
        Some(c) => Err(format!("a softcap is a positive number, not {c:?}")),
        None => Ok(()),
    }
}

/// A scaled product of a query and a key as it enters the softmax.
pub(crate) fn capped(x: f64, softcap: Option<f64>) -> f64 {
    softcap.map_or(x, |c| c * (x / c).tanh())
}

/// Which of so many offsets a key at a distance from its query has.
pub fn offset(far: i64, offsets: usize) -> usize {
    let last = offsets.saturating_sub(1) as i64;
    far.saturating_add(last / 2).clamp(0, last) as usize
}

impl Behind {
    /// What is added to the score of a query and a key in a head.
    pub(crate) fn added(
        self,
        ins: &[&Tensor],
        [q_pos, k_pos]: [usize; 2],
        [s, t, h]: [usize; 3],
    ) -> f64 {
        let far = ins[k_pos].data[t] - ins[q_pos].data[s];
        let slope = self.slopes.map_or(0.0, |i| -ins[i].data[h] * far.abs());
        slope + self.bias.map_or(0.0, |i| ins[i].at(&[h, offset(far as i64, ins[i].shape[1])]))
    }
}

/// Multiplications and additions of products over all pairs: b·s·n·t·(d + e).
pub(crate) fn pair_flops(loops: &[(Letter, f64)], per: f64) -> f64 {
    let size = |c: char| loops.iter().find(|l| l.0.name() == c).map_or(1.0, |l| l.1);
    per * size('b') * size('s') * size('g') * size('r') * size('t') * (size('d') + size('e'))
}

impl Op {
    /// True of attention in which a token sees itself and all before it.
    pub fn is_causal(&self) -> bool {
        matches!(self, Op::Attention(a) if a.mask == Mask::CAUSAL)
    }
}

impl Attention {
    /// Where the operands behind positions stand.
    pub fn behind(&self) -> Behind {
        Behind::new(5, self)
    }
}

impl OpDef for Attention {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        self.behind().accepts(ins)?;
        self.mask.accepts()?;
        accepts_softcap(self.softcap)?;
        accepts_qkv(ins, [3, 4])
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        let ranks = [4, 4, 4, 1, 1];
        self.behind().letters("bs(gr)!d,b!tg!d,b!tg!e,s,!t", &ranks, "bs(gr)e,bs(gr)")
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        pair_flops(loops, 2.0)
    }
    /// Slopes.
    fn untrained(&self) -> u32 {
        self.behind().slopes.map_or(0, |i| 1 << i)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], outs: &[Value], d: &[Option<Value>]) -> Grads {
        let none: Grads = smallvec::smallvec![None; ins.len()];
        let Some(d_o) = d[0] else { return none };
        // delta = rowsum(d_o * o) - d_lse (Dao, 2023, algorithm 2; the second term where lse is used)
        let pair = [d_o, outs[0]].map(|v| cast::in_f32(b, v));
        let mut delta = b.push("delta", Dot::by("bsne,bsne->bsn", &[4, 4]), &pair);
        if let Some(d_lse) = d[1] {
            delta = b.push("delta", Sub::same(), &[delta, d_lse]);
        }
        let Attention { scale, mask, softcap, slopes, bias, segments, kept } = self.clone();
        let op = AttentionGrad { scale, mask, softcap, slopes, bias, segments, kept };
        let mut all = vec![ins[0], ins[1], ins[2], outs[1], d_o, delta];
        all.extend(&ins[3..]);
        let hints = ["q", "k", "v", "bias"];
        let g = b.push_n(&hints[..3 + usize::from(bias)], op, &all);
        let mut grads = none;
        let of = [0, 1, 2].into_iter().chain(self.behind().bias);
        of.zip(g).for_each(|(i, g)| grads[i] = Some(g));
        grads
    }
    fn dtypes(&self, ins: &[&Type], _: usize) -> SmallVec<[DType; 2]> {
        smallvec::smallvec![ins[0].dtype, DType::F32]
    }
    fn workspace(&self, mesh: &Mesh, ins: &[&Type], _: &[&Type]) -> usize {
        score_bytes(mesh, [ins[0], ins[1], ins[2]], false)
    }
    fn settle(&self, _: &[Type], drawn: &mut [Tensor]) {
        self.behind().settle(drawn);
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let [q, k, v] = [ins[0], ins[1], ins[2]];
        let behind = self.behind();
        let first = cx.out_extent(0, 2).offset;
        let factors = factors(self.kept.as_ref(), behind, ins, [ins[3], ins[4]], first);
        let (pairs, seeing) = ([q, k], behind.seeing(ins, [3, 4]));
        let score = |b, s, h, g, t| {
            let pairs = q.row(&[b, s, h]).iter().zip(k.row(&[b, t, g]));
            let dot: f64 = pairs.map(|(x, y)| x * y).sum();
            capped(self.scale * dot, self.softcap) + behind.added(ins, [3, 4], [s, t, h])
        };
        let mut max = Tensor::full(&cx.out_shape(1), f64::NEG_INFINITY);
        each_pair(pairs, seeing, self.mask, |b, s, h, g, t| {
            let m = max.at_mut(&[b, s, h]);
            *m = m.max(score(b, s, h, g, t));
        });
        let (mut sum, mut out) =
            (Tensor::full(&cx.out_shape(1), 0.0), Tensor::full(&cx.out_shape(0), 0.0));
        each_pair(pairs, seeing, self.mask, |b, s, h, g, t| {
            let p = (score(b, s, h, g, t) - max.at(&[b, s, h])).exp();
            *sum.at_mut(&[b, s, h]) += p;
            let p = p * factors.as_ref().map_or(1.0, |f| f.at(&[b, s, h, t]));
            let row = out.row_mut(&[b, s, h]).iter_mut();
            row.zip(v.row(&[b, t, g])).for_each(|(o, v)| *o += p * v);
        });
        let shape = out.shape.clone();
        let out = Tensor::from_fn(&shape, |i| {
            let z = sum.at(&i[..3]);
            if z == 0.0 { 0.0 } else { out.at(i) / z }
        });
        vec![out, max.zip(&sum, |m, z| if z == 0.0 { f64::NEG_INFINITY } else { m + z.ln() })]
    }
}
