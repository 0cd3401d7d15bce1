//! Gated linear recurrences, and their gradients.

use super::*;

/// Which recurrence: with the delta rule; what stands behind the values.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Scan {
    pub delta: bool,
    /// Every so many tokens are walked by themselves; states then have a dim of these pieces.
    pub piece: Option<usize>,
    pub segments: bool,
    pub start: bool,
}

/// The gradients of q, k, g, v, and of beta and start. Behind the values stand cotangents of the outputs and of the last state.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ScanGrad(pub Scan);

/// A head of a row: its operands, from which token to token.
struct Head<'a> {
    x: &'a [&'a Tensor],
    of: Scan,
    b: usize,
    n: usize,
}

/// A state [k, v] over the field.
type State = Vec<Vec<u64>>;

fn minus(a: u64, b: u64) -> u64 {
    add(a, neg(b, P), P)
}

impl Scan {
    /// Of so many tokens.
    fn of(k: &ops::Scan, tokens: usize) -> Scan {
        let piece = k.pieces.0.first().map(|x| tokens / x.1.max(1));
        Scan { delta: k.delta.0, piece, segments: k.segments, start: k.start }
    }
    fn segments(self) -> Option<usize> {
        self.segments.then_some(4 + usize::from(self.delta))
    }
    fn start(self) -> Option<usize> {
        self.start.then_some(4 + usize::from(self.delta) + usize::from(self.segments))
    }
    fn count(self) -> usize {
        4 + [self.delta, self.segments, self.start].map(usize::from).iter().sum::<usize>()
    }
    /// Letters of the operands, with those that stand behind the values.
    fn letters(
        self,
        more: &[(&str, usize)],
        outs: &str,
        ranks: &[usize],
    ) -> Option<Cow<'static, Rule>> {
        let first = [("b!sn!k", 4), ("b!sn!k", 4), ("b!sn", 3), ("b!snv", 4)];
        let last =
            [(self.delta, ("b!sn", 3)), (self.segments, ("b!s", 2)), (self.start, ("bn!kv", 4))];
        let last = last.iter().filter(|x| x.0).map(|x| x.1);
        let all: Vec<(&str, usize)> =
            first.into_iter().chain(more.iter().copied()).chain(last).collect();
        let text: Vec<&str> = all.iter().map(|x| x.0).collect();
        let of_pieces = |text: &str| usize::from(self.piece.is_some() && text.starts_with("bn"));
        let takes: Vec<usize> = all.iter().map(|x| x.1 + of_pieces(x.0)).collect();
        let text = format!("{}->{outs}", text.join(","));
        let text = match self.piece {
            None => text,
            Some(_) => text.replace("b!s", "b(c!s)").replace("bs", "b(cs)").replace("bn", "bcn"),
        };
        known(&text, &takes, ranks)
    }
    /// Operands as those of rows, each of which is a piece.
    fn rows(self, x: &[&Tensor]) -> Vec<Tensor> {
        let (b, s) = (x[0].shape[0], x[0].shape[1]);
        let one = |t: &&Tensor| {
            let Some(piece) = self.piece else { return (*t).clone() };
            let rows = b * s / piece.max(1);
            let own = if t.shape.len() == 5 { vec![rows] } else { vec![rows, piece] };
            t.reshaped(&[&own[..], &t.shape[2..]].concat())
        };
        x.iter().map(one).collect()
    }
    /// Kinds of operands, of a gradient or not: what follows the segments are numbers.
    fn kinds(self, grad: bool) -> &'static str {
        match (self.segments, self.delta, grad) {
            (false, ..) => "n",
            (true, false, false) => "nnnnin",
            (true, true, false) => "nnnnnin",
            (true, false, true) => "nnnnnnin",
            (true, true, true) => "nnnnnnnin",
        }
    }
    fn name(self, of: &str) -> String {
        let Scan { delta, piece, segments, start } = self;
        let piece = piece.map_or(String::new(), |s| format!("piece={s}; "));
        format!("{of}[delta={delta}; {piece}segments={segments}; start={start}]")
    }
    /// Documents of several tokens, by an operand that stands so many places further on.
    fn draw(self, x: &mut Operands, further: usize) {
        if let Some(i) = self.segments() {
            x.all[i + further] = x.noise(i + further).map(|v| v % 2);
        }
    }
}

impl Head<'_> {
    fn at(&self, i: usize, t: usize, d: usize) -> u64 {
        self.x[i].at(&[self.b, t, self.n, d])
    }
    fn sizes(&self) -> [usize; 3] {
        [self.x[0].shape[1], self.x[0].shape[3], self.x[3].shape[3]]
    }
    /// a of a token: of e^g nothing is known but that it is a function of g, which is 1 at 0; 0 where a document begins.
    fn decay(&self, t: usize) -> u64 {
        let of = self.of.segments().map(|i| self.x[i]);
        match of.is_some_and(|s| t > 0 && s.integer(&[self.b, t]) != s.integer(&[self.b, t - 1])) {
            true => 0,
            false => match self.x[2].at(&[self.b, t, self.n]) {
                0 => 1,
                g => oracle(seed("e^g"), &[g]),
            },
        }
    }
    fn beta(&self, t: usize) -> u64 {
        if self.of.delta { self.x[4].at(&[self.b, t, self.n]) } else { 1 }
    }
    fn start(&self) -> State {
        let [_, k, v] = self.sizes();
        let of = self.of.start().map(|i| self.x[i]);
        let one = |d: usize, e: usize| of.map_or(0, |s| s.at(&[self.b, self.n, d, e]));
        (0..k).map(|d| (0..v).map(|e| one(d, e)).collect()).collect()
    }
    /// The state a S before a token writes, and what it writes beside its key, without β.
    fn read(&self, s: &State, t: usize) -> (State, Vec<u64>) {
        let [_, k, v] = self.sizes();
        let a = self.decay(t);
        let old: State = s.iter().map(|row| row.iter().map(|x| times(a, *x)).collect()).collect();
        let known =
            |e: usize| (0..k).fold(0, |sum, d| add(sum, times(self.at(1, t, d), old[d][e]), P));
        let new = |e: usize| match self.of.delta {
            true => minus(self.at(3, t, e), known(e)),
            false => self.at(3, t, e),
        };
        let new = (0..v).map(new).collect();
        (old, new)
    }
    /// The state behind a token.
    fn step(&self, s: &State, t: usize) -> State {
        let (mut old, new) = self.read(s, t);
        for (d, row) in old.iter_mut().enumerate() {
            let by = times(self.beta(t), self.at(1, t, d));
            row.iter_mut().zip(&new).for_each(|(x, y)| *x = add(*x, times(by, *y), P));
        }
        old
    }
}

impl Function for Scan {
    fn name(&self) -> String {
        Scan::name(*self, "scan")
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        let shape = x[3].shape.clone();
        let rows = self.rows(x);
        let x = &rows.iter().collect::<Vec<_>>()[..];
        let (q, v) = (x[0], x[3]);
        let mut out = Tensor::full(&v.shape, 0);
        let mut end = Tensor::full(&[q.shape[0], q.shape[2], q.shape[3], v.shape[3]], 0);
        each(&[q.shape[0], q.shape[2]], |i| {
            let head = Head { x, of: *self, b: i[0], n: i[1] };
            let mut s = head.start();
            for t in 0..q.shape[1] {
                s = head.step(&s, t);
                for (d, row) in s.iter().enumerate() {
                    let by = head.at(0, t, d);
                    let at = |e: usize| [i[0], t, i[1], e];
                    row.iter().enumerate().for_each(|(e, y)| out.add_at(&at(e), times(by, *y)));
                }
            }
            for (d, row) in s.iter().enumerate() {
                row.iter().enumerate().for_each(|(e, y)| end.add_at(&[i[0], i[1], d, e], *y));
            }
        });
        let end = match self.piece {
            None => end,
            Some(piece) => {
                end.reshaped(&[&[shape[0], shape[1] / piece.max(1)], &end.shape[1..]].concat())
            }
        };
        Ok(vec![out.reshaped(&shape), end])
    }
}

impl Function for ScanGrad {
    fn name(&self) -> String {
        self.0.name("scan_grad")
    }
    /// By reverse mode on the recurrence, a token at a time.
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        let of = self.0;
        let like: Vec<Vec<usize>> =
            [&x[..4], &x[6..]].concat().iter().map(|t| t.shape.clone()).collect();
        let rows = of.rows(x);
        let x = &rows.iter().collect::<Vec<_>>()[..];
        let (d_out, d_end) = (x[4], x[5]);
        let x = &[&x[..4], &x[6..]].concat()[..];
        let [b, s, n, k] = [0, 1, 2, 3].map(|d| x[0].shape[d]);
        let mut g: Vec<Tensor> = (0..4).map(|i| Tensor::full(&x[i].shape, 0)).collect();
        let mut d_beta = Tensor::full(&[b, s, n], 0);
        let mut d_start = Tensor::full(&[b, n, k, x[3].shape[3]], 0);
        each(&[b, n], |i| {
            let head = Head { x, of, b: i[0], n: i[1] };
            let [_, k, v] = head.sizes();
            let mut before = vec![head.start()];
            for t in 0..s {
                before.push(head.step(&before[t], t));
            }
            let one = |d: usize, e: usize| d_end.at(&[i[0], i[1], d, e]);
            let mut d_s: State = (0..k).map(|d| (0..v).map(|e| one(d, e)).collect()).collect();
            for t in (0..s).rev() {
                let (old, new) = head.read(&before[t], t);
                let (a, beta) = (head.decay(t), head.beta(t));
                let mut d_new = vec![0; v];
                for d in 0..k {
                    let (q, key) = (head.at(0, t, d), head.at(1, t, d));
                    for e in 0..v {
                        let d_o = d_out.at(&[i[0], t, i[1], e]);
                        g[0].add_at(&[i[0], t, i[1], d], times(d_o, before[t + 1][d][e]));
                        d_s[d][e] = add(d_s[d][e], times(q, d_o), P);
                        let both = times(d_s[d][e], new[e]);
                        g[1].add_at(&[i[0], t, i[1], d], times(beta, both));
                        d_beta.add_at(&[i[0], t, i[1]], times(key, both));
                        d_new[e] = add(d_new[e], times(times(beta, key), d_s[d][e]), P);
                    }
                }
                for e in 0..v {
                    g[3].add_at(&[i[0], t, i[1], e], d_new[e]);
                    for d in 0..k {
                        if of.delta {
                            let key = head.at(1, t, d);
                            g[1].add_at(&[i[0], t, i[1], d], neg(times(old[d][e], d_new[e]), P));
                            d_s[d][e] = minus(d_s[d][e], times(key, d_new[e]));
                        }
                        g[2].add_at(&[i[0], t, i[1]], times(d_s[d][e], old[d][e]));
                        d_s[d][e] = times(a, d_s[d][e]);
                    }
                }
            }
            for (d, row) in d_s.iter().enumerate() {
                row.iter().enumerate().for_each(|(e, y)| d_start.add_at(&[i[0], i[1], d, e], *y));
            }
        });
        g.extend(of.delta.then_some(d_beta));
        g.extend(of.start.then_some(d_start));
        let to = (0..of.count()).filter(|i| of.segments() != Some(*i));
        Ok(g.into_iter().zip(to).map(|(t, i)| t.reshaped(&like[i])).collect())
    }
}

impl Law for ops::Scan {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        Scan::of(self, 0).letters(&[], "bsnv,bnkv", ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { kinds: [Scan::of(self, 0).kinds(false), "n"], ..NONLINEAR })
    }
    fn shrink(&mut self, small: &mut Small) {
        attention::longer(small);
    }
    fn operands(&self, x: &mut Operands) {
        Scan::of(self, 0).draw(x, 0);
    }
    fn function(&self, ins: &[&Type]) -> Result<Option<Fun>, String> {
        Ok(Some(Scan::of(self, tokens(ins)?).into()))
    }
    fn back(&self, at: &mut At) -> Result<Back, String> {
        let of = Scan::of(self, at.shape(0)[1]);
        let both = [0, 1].map(|i| match at.d[i] {
            Some(d) => d,
            None => at.s.scale(Coef::ZERO, at.y[i]),
        });
        let args = [&at.x[..4], &both, &at.x[4..]].concat();
        let mut made = 0;
        let mut one = |i: usize, at: &mut At| {
            let shape = at.shape(i);
            made += 1;
            Some(at.s.apply(ScanGrad(of), &args, made - 1, &shape))
        };
        let operands = 0..of.count();
        Ok(operands.map(|i| if of.segments() == Some(i) { None } else { one(i, at) }).collect())
    }
}

impl Law for ops::ScanGrad {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        let of = scan_of(self);
        let outs = match (of.delta, of.start) {
            (false, false) => "bsnk,bsnk,bsn,bsnv",
            (false, true) => "bsnk,bsnk,bsn,bsnv,bnkv",
            (true, false) => "bsnk,bsnk,bsn,bsnv,bsn",
            (true, true) => "bsnk,bsnk,bsn,bsnv,bsn,bnkv",
        };
        of.letters(&[("b!snv", 4), ("bn!kv", 4)], outs, ranks)
    }
    /// Linear in both cotangents.
    fn typing(&self) -> Option<Typing> {
        let (linear, kinds) = (Linear::Together(&[4, 5]), [scan_of(self).kinds(true), "n"]);
        Some(Typing { linear, lost: SUM, kinds, ..NONLINEAR })
    }
    fn shrink(&mut self, small: &mut Small) {
        attention::longer(small);
    }
    fn operands(&self, x: &mut Operands) {
        scan_of(self).draw(x, 2);
    }
    fn function(&self, ins: &[&Type]) -> Result<Option<Fun>, String> {
        Ok(Some(ScanGrad(Scan::of(&self.forward(), tokens(ins)?)).into()))
    }
}

/// How many tokens there are, by the types of operands.
fn tokens(ins: &[&Type]) -> Result<usize, String> {
    let dim = ins.first().and_then(|t| t.dims.get(1));
    Ok(dim.ok_or("queries have a dim of tokens")?.size)
}

/// The recurrence whose gradients these are, of whatever tokens.
fn scan_of(k: &ops::ScanGrad) -> Scan {
    Scan::of(&k.forward(), 0)
}

#[cfg(test)]
mod tests;
