//! `scan`: gated linear recurrences, such as gated DeltaNet and Mamba-2.

use super::*;
use crate::attr::{Attr, AttrCx, Sizes};
use crate::kernel::Recurrent;

op! {
    /// A gated linear recurrence along s. For each row b and head n a state S `[k,v]` starts at 0 and becomes, token
    /// by token, a S + κ vᵀ with a = e^g and κ the key, or by the delta rule, `scan[delta]`, a (I - β κ κᵀ) S + β κ vᵀ, where β is
    /// another operand `[b,s,n]` (Yang et al., 2024, *Gated Delta Networks*; `scan[plain]`: Dao and Gu, 2024, *Mamba-2*:
    /// q is C, k is B, v is x Δ and g is A Δ). The output of a token is Sᵀ q, with its own key and value in S. All
    /// numbers are f32: q and k `[b,s,n,k]`, g `[b,s,n]`, at most 0, v `[b,s,n,v]`. With `segments=true` i32 `[b,s]`
    /// follows: before a token whose segment is not that of the token before, the state is 0 again. With
    /// `start=true` the state before the first token follows, `[b,n,k,v]`, of that token's segment. Results: the
    /// outputs `[b,s,n,v]` and the last state `[b,n,k,v]`. With `c=2` the tokens are 2 pieces of as many, and each is walked
    /// by itself: states are `[b,c,n,k,v]`, and ranks may split s by pieces. Kernels take chunks of tokens at once and keep no
    /// state per token.
    Scan = "scan" (q, k, g, v, beta, segments, start) { delta: DeltaRule, segments: bool, start: bool, pieces: Sizes }
    facts { kind: Recurrence, fusion: None, precision: Wants::Wide, gradient: Flows, linear: Linear::No }
    samples [
        "scan[plain] f32[2,5,2,3], f32[2,5,2,3], f32[2,5,2], f32[2,5,2,4]",
        "scan[delta] f32[2,5,2,3], f32[2,5,2,3], f32[2,5,2], f32[2,5,2,4], f32[2,5,2]",
        "scan[plain; segments=true] f32[2,6,2,2], f32[2,6,2,2], f32[2,6,2], f32[2,6,2,3], i32[2,6]",
        "scan[plain; start=true] f32[1,3,2,3], f32[1,3,2,3], f32[1,3,2], f32[1,3,2,2], f32[1,2,3,2]",
        "scan[delta; segments=true; start=true] f32[2,6,2,3], f32[2,6,2,3], f32[2,6,2], f32[2,6,2,2], f32[2,6,2], i32[2,6], f32[2,2,3,2]",
        "scan[plain; c=2] f32[2,4,2,3], f32[2,4,2,3], f32[2,4,2], f32[2,4,2,4]",
        "scan[delta; segments=true; start=true; c=2] f32[2,6,2,3], f32[2,6,2,3], f32[2,6,2], f32[2,6,2,2], f32[2,6,2], i32[2,6], f32[2,2,2,3,2]",
    ]
}

/// True of the delta rule: what the state has of a key is replaced, not added to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeltaRule(pub bool);

impl Attr for DeltaRule {
    const BARE: bool = true;
    fn write(&self, _: &Mesh, out: &mut String) {
        out.push_str(if self.0 { "delta" } else { "plain" });
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        match text {
            "delta" => Ok(DeltaRule(true)),
            "plain" => Ok(DeltaRule(false)),
            _other => Err(format!("the rule is `delta` or `plain`, not `{text}`")),
        }
    }
}

/// The letter of pieces.
const PIECES: Letter = Letter(b'c' - b'a');
/// Letters of states, each of a row and head.
pub(super) const STATES: &str = "bn!kv";

/// Tokens that kernels take at once.
pub const CHUNK: usize = 64;

/// Where the operands behind v stand.
#[derive(Clone, Copy, Debug)]
pub struct ScanOperands {
    pub beta: Option<usize>,
    pub segments: Option<usize>,
    pub start: Option<usize>,
    /// Number of all of these operands.
    pub end: usize,
}

impl ScanOperands {
    /// Those of a scan, behind the first `first`.
    pub fn new(first: usize, of: &Scan) -> ScanOperands {
        let mut end = first;
        let mut next = |there: bool| {
            end += usize::from(there);
            there.then_some(end - 1)
        };
        let [beta, segments, start] = [of.delta.0, of.segments, of.start].map(&mut next);
        ScanOperands { beta, segments, start, end }
    }
}

impl Scan {
    /// Where the operands behind v stand.
    pub fn behind(&self) -> ScanOperands {
        ScanOperands::new(4, self)
    }

    /// The same of pieces of tokens, each by itself.
    pub fn in_pieces(self, pieces: usize, start: bool) -> Scan {
        Scan { pieces: Sizes(smallvec::smallvec![(PIECES, pieces)]), start, ..self }
    }

    /// Number of pieces of the tokens.
    pub fn count(&self) -> usize {
        self.pieces.0.first().map_or(1, |x| x.1)
    }

    /// The tokens of a piece of rows of so many, and how many pieces has who has so many tokens of a row. Of no tokens it
    /// has one, whose last state is the first.
    pub fn pieces_of(&self, row: usize, own: usize) -> [usize; 2] {
        let tokens = row / self.count();
        [tokens, own.checked_div(tokens).unwrap_or(1)]
    }

    /// Letters as they are of one piece, in which s is a dim of tokens, with those of pieces.
    pub(super) fn letters(&self, of_one: &str) -> String {
        match self.pieces.0.is_empty() {
            true => of_one.into(),
            false => of_one.replace("b!s", "b(c!s)").replace("bs", "b(cs)").replace("bn", "bcn"),
        }
    }

    /// Letters of the operands with those that stand behind v, and their ranks.
    pub(super) fn operands(&self, more: &[(&str, usize)]) -> (String, Vec<usize>) {
        let (mut text, mut ranks) = ("b!sn!k,b!sn!k,b!sn,b!snv".to_string(), vec![4, 4, 3, 4]);
        let own = [(self.delta.0, "b!sn", 3), (self.segments, "b!s", 2), (self.start, STATES, 4)];
        let own = own.into_iter().filter(|x| x.0).map(|x| (x.1, x.2));
        for (letters, rank) in more.iter().copied().chain(own) {
            text = text + "," + letters;
            let of_pieces = letters == STATES && !self.pieces.0.is_empty();
            ranks.push(rank + usize::from(of_pieces));
        }
        (self.letters(&text), ranks)
    }

    /// Operands as those of a scan of one piece, each piece being a row: of states like this one.
    pub(super) fn rows(&self, ins: &[&Tensor], state: &[usize]) -> Vec<Tensor> {
        if self.pieces.0.is_empty() {
            return ins.iter().map(|t| (*t).clone()).collect();
        }
        let (b, s, c) = (ins[0].shape[0], ins[0].shape[1], state[1].max(1));
        let of_tokens = |t: &Tensor| t.shape.get(1) == Some(&s) && t.shape.len() < 5;
        let one = |t: &&Tensor| {
            let behind = &t.shape[2..];
            match of_tokens(t) {
                true => t.reshape(&[&[b * c, s / c], behind].concat()),
                false => t.reshape(&[&[b * c], behind].concat()),
            }
        };
        ins.iter().map(one).collect()
    }

    /// Checks the pieces of the tokens, and says what is wrong with operands of these ranks, of which one may be segments.
    pub(super) fn takes(
        &self,
        ins: &[&Type],
        ranks: &[usize],
        behind: ScanOperands,
    ) -> Result<(), String> {
        let tokens = ins.first().and_then(|t| t.dims.get(1)).map_or(0, |d| d.size);
        match self.pieces.0[..] {
            [] => {}
            [(PIECES, n)] if n > 0 && tokens % n == 0 => {}
            [..] => return Err("pieces have as many tokens each, as in `c=2`".into()),
        }
        let dtype = |i: usize| if behind.segments == Some(i) { DType::I32 } else { DType::F32 };
        let is = |(i, rank): (usize, &usize)| ins[i].rank() == *rank && ins[i].dtype == dtype(i);
        match ins.len() == ranks.len() && ranks.iter().enumerate().all(is) {
            true => Ok(()),
            false => Err(format!(
                "{} operands are needed: f32 but for segments, as the letters say",
                ranks.len()
            )),
        }
    }

    /// Heads of all rows and pieces of a rank, tokens of a piece, and widths.
    pub(super) fn room(&self, mesh: &Mesh, ins: &[&Type]) -> [usize; 4] {
        let [b, s, n, k] = [0, 1, 2, 3].map(|d| ins[0].chunk(mesh, d));
        let [tokens, each] = self.pieces_of(ins[0].dims[1].size, s);
        [b * each * n, tokens, k, ins[3].chunk(mesh, 3)]
    }

    /// Decays at most 1, β from 0 to 1, keys of length 1, segments of several tokens.
    pub(super) fn suit(behind: ScanOperands, drawn: &mut [Tensor]) {
        drawn[2] = drawn[2].map(|g| -g.abs());
        if let Some(i) = behind.beta {
            drawn[i] = drawn[i].map(|x| (x + 1.5) / 3.0);
        }
        if let Some(i) = behind.segments {
            let shape = drawn[i].shape.clone();
            let of = |at: &[usize]| (at[0] + 3 * at[1] / shape[1]) % 3;
            drawn[i] = Tensor::from_fn(&shape, |at| of(at) as f64);
        }
        let k = drawn[1].clone();
        let length = |at: &[usize]| k.row(&at[..3]).iter().map(|x| x * x).sum::<f64>().sqrt();
        drawn[1] = Tensor::from_fn(&k.shape, |at| k.at(at) / length(at));
    }
}

/// One head of a row of a scan, whose state is walked token by token.
pub(super) struct Walk<'a> {
    pub delta: bool,
    pub ins: &'a [&'a Tensor],
    pub behind: ScanOperands,
    pub b: usize,
    pub n: usize,
}

/// What a token makes of the state: it is decayed, then the outer product of the key and this is added.
pub(super) struct Token {
    /// What the key is multiplied by, with β: `[v]`.
    pub written: Vec<f64>,
    /// The same without β.
    pub error: Vec<f64>,
    pub decay: f64,
}

impl Walk<'_> {
    pub fn of(&self, i: usize, t: usize) -> &[f64] {
        self.ins[i].row(&[self.b, t, self.n])
    }
    pub fn beta(&self, t: usize) -> f64 {
        self.behind.beta.map_or(1.0, |i| self.ins[i].at(&[self.b, t, self.n]))
    }
    /// The state before the first token, [k, v].
    pub fn start(&self) -> Vec<f64> {
        let (k, v) = (self.ins[1].shape[3], self.ins[3].shape[3]);
        match self.behind.start {
            None => vec![0.0; k * v],
            Some(i) => {
                (0..k).flat_map(|d| self.ins[i].row(&[self.b, self.n, d]).to_vec()).collect()
            }
        }
    }
    /// Decays the state before token `t`; what the token writes to it.
    pub fn decayed(&self, state: &mut [f64], t: usize) -> Token {
        let borders =
            |i: usize| t > 0 && self.ins[i].at(&[self.b, t]) != self.ins[i].at(&[self.b, t - 1]);
        let decay = match self.behind.segments.is_some_and(borders) {
            true => 0.0,
            false => self.ins[2].at(&[self.b, t, self.n]).exp(),
        };
        // Not times 0: what is dropped may be infinite.
        state.iter_mut().for_each(|x| *x = if decay == 0.0 { 0.0 } else { *x * decay });
        let (key, mut error) = (self.of(1, t), self.of(3, t).to_vec());
        if self.delta {
            for (row, k) in state.chunks(error.len().max(1)).zip(key) {
                error.iter_mut().zip(row).for_each(|(e, x)| *e -= k * x);
            }
        }
        let written = error.iter().map(|e| self.beta(t) * e).collect();
        Token { written, error, decay }
    }
    /// Adds the outer product of `rows` and `cols`.
    pub fn add(to: &mut [f64], rows: &[f64], cols: &[f64]) {
        for (row, x) in to.chunks_mut(cols.len().max(1)).zip(rows) {
            row.iter_mut().zip(cols).for_each(|(to, y)| *to += x * y);
        }
    }
    /// Xᵀ x of a matrix X.
    pub fn columns(m: &[f64], x: &[f64], width: usize) -> Vec<f64> {
        let mut out = vec![0.0; width];
        for (row, x) in m.chunks(width.max(1)).zip(x) {
            out.iter_mut().zip(row).for_each(|(o, m)| *o += m * x);
        }
        out
    }
}

/// Calls `f(b, n)` for every row and head of values.
pub(super) fn each_head(v: &Tensor, mut f: impl FnMut(usize, usize)) {
    crate::tensor::each_index(&[v.shape[0], v.shape[2]], |i| f(i[0], i[1]));
}

/// Multiplications and additions of all tokens and heads: `each(c, k, v)` of one, c being the size of a chunk.
pub(super) fn flops(loops: &[(Letter, f64)], each: impl Fn(f64, f64, f64) -> f64) -> f64 {
    let size = |c: char| loops.iter().find(|l| l.0.name() == c).map_or(1.0, |l| l.1);
    let tokens = size('b') * size('c') * size('s') * size('n');
    tokens * each(size('s').min(CHUNK as f64), size('k'), size('v'))
}

/// Multiplications and additions of a token and head: of a chunk of c tokens the products q kᵀ and with values, and of
/// the state with queries and keys; by the delta rule also k kᵀ, a triangular system, and the state's product with keys.
pub fn flops_of(delta: bool, c: f64, k: f64, v: f64) -> f64 {
    match delta {
        false => 2.0 * c * (k + v) + 4.0 * k * v,
        true => c * (4.0 * k + 3.0 * v) + 6.0 * k * v,
    }
}

impl OpDef for Scan {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        self.takes(ins, &self.operands(&[]).1, self.behind())
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        let (text, ranks) = self.operands(&[]);
        Rule::known(&(text + "->" + &self.letters("bsnv,bnkv")), &ranks)
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        flops(loops, |c, k, v| flops_of(self.delta.0, c, k, v))
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], outs: &[Value], d: &[Option<Value>]) -> Grads {
        let mut grads: Grads = smallvec::smallvec![None; ins.len()];
        if d.iter().all(Option::is_none) {
            return grads;
        }
        // The values have the type of the outputs, and are there anyway.
        let like = [ins[3], outs[1]];
        let mut cotangent =
            |i: usize| d[i].unwrap_or_else(|| b.push("nothing", Scale { by: 0.0 }, &[like[i]]));
        let both = [0, 1].map(&mut cotangent);
        let Scan { delta, pieces, segments, start } = self.clone();
        let op = ScanGrad { delta, pieces, segments, start };
        let all = [&ins[..4], &both, &ins[4..]].concat();
        let behind = self.behind();
        let more = [(behind.beta, "beta"), (behind.start, "start")];
        let more: Vec<_> = more.iter().filter_map(|(i, hint)| Some(((*i)?, *hint))).collect();
        let to = [0, 1, 2, 3].into_iter().zip(["q", "k", "g", "v"]).chain(more);
        let (to, hints): (Vec<usize>, Vec<&'static str>) = to.unzip();
        let made = b.push_n(&hints, op, &all);
        to.into_iter().zip(made).for_each(|(i, g)| grads[i] = Some(g));
        grads
    }
    fn dtypes(&self, _: &[&Type], _: usize) -> SmallVec<[DType; 2]> {
        smallvec::smallvec![DType::F32; 2]
    }
    fn workspace(&self, mesh: &Mesh, ins: &[&Type], _: &[&Type]) -> usize {
        Recurrent::room(false, self.room(mesh, ins))
    }
    fn settle(&self, _: &[Type], drawn: &mut [Tensor]) {
        Scan::suit(self.behind(), drawn);
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let shapes = [0, 1].map(|i| cx.out_shape(i));
        let rows = self.rows(ins, &shapes[1]);
        let ins = &rows.iter().collect::<Vec<_>>()[..];
        let (tokens, width) = (ins[3].shape[1], ins[3].shape[3]);
        let mut out = Tensor::full(&ins[3].shape, 0.0);
        let [b, _, n, k] = [0, 1, 2, 3].map(|d| ins[0].shape[d]);
        let mut end = Tensor::full(&[b, n, k, width], 0.0);
        each_head(ins[3], |b, n| {
            let walk = Walk { delta: self.delta.0, ins, behind: self.behind(), b, n };
            let mut state = walk.start();
            for t in 0..tokens {
                let token = walk.decayed(&mut state, t);
                Walk::add(&mut state, walk.of(1, t), &token.written);
                let made = Walk::columns(&state, walk.of(0, t), width);
                out.row_mut(&[b, t, n]).copy_from_slice(&made);
            }
            for (d, row) in state.chunks(width.max(1)).enumerate() {
                end.row_mut(&[b, n, d]).copy_from_slice(row);
            }
        });
        vec![out.reshape(&shapes[0]), end.reshape(&shapes[1])]
    }
}
