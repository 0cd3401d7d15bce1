//! Attention: the op that models have, and the scores, mask and softmax that older ones write out.

use super::folded::Folded;
use super::graph::{Arg, Elem, Node};
use super::inputs;
use super::lower::{Lower, Val};
use super::mask::{Odd, Rule};
use super::padding::Cells;
use super::room;
use super::view::{Dim, View};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::Value;
use shardc_ir::ops::{Attention, Mask, Op};
use shardc_ir::types::DType;

/// Most heads of attention whose mask has slopes: there is a number for each in the program.
const MAX_HEADS: usize = 1 << 16;
/// The score of a key that is hidden.
const HIDDEN: f64 = f32::MIN as f64;

impl Lower<'_> {
    /// `scaled_dot_product_attention` of q, k and v [rows, heads, tokens, size].
    ///
    /// # Errors
    /// `mask-rule`, and `import-op` for what attention cannot do.
    pub(super) fn attention(&mut self, n: &Node) -> Result<Vec<Val>> {
        let [q, k, v] = [self.data(n, "query")?, self.data(n, "key")?, self.data(n, "value")?];
        let own = self.number(n, "dropout_p").unwrap_or(0.0);
        let rate = self.rate(n, own)?;
        let rule = match (n.arg("attn_mask"), self.flag(n, "is_causal")) {
            (Arg::None, true) => Rule::of(Mask::CAUSAL),
            (Arg::None, false) => Rule::of(Mask::FULL),
            (Arg::Value(id), false) => match self.val(*id).clone() {
                // All layers may share one mask.
                v @ (Val::Folded(_) | Val::Padded(_)) => {
                    match (self.masks.get(id), self.cells(Some(&v))) {
                        (Some(rule), _) => rule.clone(),
                        (None, cells) => {
                            let len =
                                |x: &View| x.shape.len().checked_sub(2).map_or(1, |d| x.shape[d]);
                            let cells = cells.ok_or_else(|| self.refuse(n, "it has no mask"))?;
                            let rule = self.rule_of(n, &cells, [len(&q), len(&k)])?;
                            self.masks.insert(*id, rule.clone());
                            rule
                        }
                    }
                }
                Val::Missing(m) => return Err(self.lacks(n, &m)),
                mask => {
                    let of = self.scores(n, &q, &k);
                    return match self.with_offsets(n, of, &v, &mask, rate)? {
                        Some(y) => Ok(vec![Val::Data(y)]),
                        None => self.written_out(n, [&q, &k, &v], rate),
                    };
                }
            },
            _ => return Err(self.refuse(n, "both a mask and is_causal")),
        };
        let of = self.scores(n, &q, &k);
        Ok(vec![Val::Data(self.attend(n, &of, &v, rule, rate)?)])
    }

    /// The scores of `scaled_dot_product_attention`.
    fn scores(&self, n: &Node, q: &View, k: &View) -> Scores {
        let size = q.shape.last().copied().unwrap_or(1).max(1);
        let scale = self.number(n, "scale").unwrap_or_else(|| 1.0 / (size as f64).sqrt());
        Scores { q: q.clone(), k: k.clone(), scale, softcap: None, bias: None }
    }

    /// Attention with a mask that is computed, such as a bias that is learned: scores, their softmax and what it drops are
    /// values of their own. A query that sees no key has 0, as in PyTorch.
    fn written_out(&mut self, n: &Node, [q, k, v]: [&View; 3], rate: f64) -> Result<Vec<Val>> {
        let rank = q.shape.len();
        let alike = rank >= 2 && [k, v].iter().all(|x| x.shape.len() == rank);
        if !alike || rate > 0.0 && rank != 4 {
            return Err(self.refuse(n, "its operands are not [rows, heads, tokens, size]"));
        }
        let scale = self.scores(n, q, k).scale;
        let [k, v] = [k, v].map(|x| repeated(x, q));
        let (q, k, v) = (self.of(q), self.of(&k.transpose(rank - 2, rank - 1)), self.of(&v));
        let two = |a, b| vec![("self", a), ("other", b)];
        let scores = self.view_by(n, "matmul.default", two(q, k))?;
        let scores = self.scaled(n, &scores, scale)?;
        let (scores, mask) = (self.of(&scores), n.arg("attn_mask").clone());
        let truths = matches!(&mask, Arg::Value(id) if self.g.truths.contains(id));
        let or = |mask, x, other: f64| {
            vec![("condition", mask), ("self", x), ("other", Arg::Float(other))]
        };
        let (masked, seen) = if truths {
            (self.view_by(n, "where.ScalarOther", or(mask.clone(), scores, HIDDEN))?, mask)
        } else {
            // Below what a mask can hide there is nothing: the sum may be infinite.
            let sum = self.view_by(n, "add.Tensor", two(scores, mask))?;
            let least = vec![("self", self.of(&sum)), ("min", Arg::Float(HIDDEN))];
            let sum = self.view_by(n, "clamp.default", least)?;
            let x = self.of(&sum);
            let seen = self.call(n, "gt.Scalar", two(x, Arg::Float(0.9 * HIDDEN)))?;
            (sum, self.held(seen))
        };
        let masked = self.of(&masked);
        let of = vec![("self", masked), ("dim", Arg::Int(-1))];
        let probs = self.view_by(n, "softmax.int", of)?;
        let probs = self.of(&probs);
        let mut probs = self.view_by(n, "where.ScalarOther", or(seen, probs, 0.0))?;
        if rate > 0.0 {
            // Places of tokens draw what is kept: [rows, tokens, heads, keys].
            let turned = self.of(&probs.transpose(1, 2));
            let kept = vec![("input", turned), ("p", Arg::Float(rate)), ("train", Arg::Bool(true))];
            probs = self.view_by(n, "dropout.default", kept)?.transpose(1, 2);
        }
        let probs = self.of(&probs);
        Ok(vec![self.call(n, "matmul.default", two(probs, v))?])
    }

    /// The rule of a mask of so many queries and keys, or where it is none.
    pub(super) fn rule_in(
        &self,
        mask: &Cells,
        [s, t]: [usize; 2],
    ) -> std::result::Result<Rule, Odd> {
        let never = Folded::full(Elem::Bool, &[1, t], 1.0);
        mask.rule(s, t, self.padding.as_ref().map_or(&never, |p| &p.1))
    }

    /// The same, with an error for people.
    pub(super) fn rule_of(&self, n: &Node, mask: &Cells, [s, t]: [usize; 2]) -> Result<Rule> {
        let never = Folded::full(Elem::Bool, &[1, t], 1.0);
        let padding = self.padding.as_ref().map_or(&never, |p| &p.1);
        self.rule_in(mask, [s, t]).map_err(|odd| {
            let d = match odd {
                Odd::Shape => Diag::new("mask-rule", "the mask is not one of [queries, keys] for all rows and heads"),
                Odd::Large => Diag::new("mask-rule", format!("a mask of {s} queries and {t} keys is too large to be looked at"))
                    .why("every cell of a mask is compared with a rule"),
                Odd::Number(x) => Diag::new("mask-rule", format!("the mask adds {x:?} to a score"))
                    .why("of a head it may be a slope times the distance of query and key, and what all keys of a query have"),
                Odd::Cell { rule, query, key, seen } => {
                    let is = if seen { "sees" } else { "does not see" };
                    Diag::new("mask-rule", format!("query {query} {is} key {key}"))
                        .why(format!("the nearest rule: {rule}"))
                }
                Odd::Padded { row, query, key, seen } => {
                    let is = if seen { "sees" } else { "does not see" };
                    let token = padding.at(&[row, key]) != 0.0;
                    let kind = if token { "a token" } else { "padding" };
                    Diag::new("mask-rule", format!("with padding, query {query} {is} key {key}, which is {kind}"))
                        .why("keys that are padding are hidden from all queries of their row, and others are not")
                }
            };
            d.at(n.scope.to_string())
                .rule("a mask is full, causal, a window or chunks, and the same for all rows and heads")
                .help("use an architecture whose attention is so")
        })
    }

    /// Attention by a rule, with a rate of dropout.
    pub(super) fn attend(
        &mut self,
        n: &Node,
        of: &Scores,
        v: &View,
        rule: Rule,
        rate: f64,
    ) -> Result<View> {
        let Scores { q, k, scale, softcap, bias: line } = of;
        self.rules.push(rule.clone());
        let fits = [q, k, v].iter().all(|x| x.shape.len() == 4) && k.shape[2] == v.shape[2];
        if !fits {
            return Err(self.refuse(n, "its operands are not [rows, heads, tokens, size]"));
        }
        let by_place = rule.mask != Mask::FULL || !rule.slopes.is_empty() || line.is_some();
        let at = self.places(n, by_place, [q.shape[2], k.shape[2]])?;
        let q = self.heads(n, q)?;
        // Where one of both has repeats, they are written out.
        let few = [grouped(k), grouped(v)];
        let [k, v] = if few[0].shape[1] == few[1].shape[1] { few } else { [k.clone(), v.clone()] };
        let (k, v) = (self.heads(n, &k)?, self.heads(n, &v)?);
        let Rule { mask, mut slopes, padded } = rule;
        if let [one] = slopes[..] {
            let heads = Some(q.shape[2]).filter(|&h| h <= MAX_HEADS);
            slopes = vec![one; heads.ok_or_else(|| self.refuse(n, "it has too many heads"))?];
        }
        let (kept, drawn) = self.kept(n, rate);
        let slope = !slopes.is_empty();
        let (scale, softcap, bias) = (*scale, *softcap, line.is_some());
        let op = Attention { scale, mask, softcap, slopes: slope, bias, segments: padded, kept };
        let mut ins = vec![q.value, k.value, v.value, at[0], at[1]];
        if op.slopes {
            if slopes.len() != q.shape[2] {
                return Err(self.refuse(n, "its mask is of another number of heads"));
            }
            ins.push(self.literal(n, slopes.into())?);
        }
        if let Some(line) = line {
            ins.push(self.bias(n, line, q.shape[2])?);
        }
        if padded {
            ins.extend(self.segments(n, [q.shape[1], k.shape[1]])?);
        }
        ins.extend(drawn);
        let o = self.emit_n(n, &["attn", "lse"], op, &ins, None)?[0];
        let mut shape = q.shape.clone();
        shape[3] = v.shape[3];
        Ok(View::plain(o, &shape).transpose(1, 2))
    }

    /// The segments of queries and keys: all queries are in that of tokens, of keys those that are not padding.
    fn segments(&mut self, n: &Node, [s, t]: [usize; 2]) -> Result<[Value; 2]> {
        let rows = self.sizes.rows;
        let name = self.padding.as_ref().filter(|_| t == self.sizes.seq).map(|p| p.0.clone());
        let Some(name) = name else {
            return Err(self.refuse(n, "padding of keys that are not tokens"));
        };
        Ok([self.everywhere(n, 1.0, DType::I32, &[rows, s])?, self.mask_input(&name)])
    }

    /// Positions of queries and keys, of which there are so many. Those that are no tokens have none: where all see
    /// all they are not asked for.
    fn places(&mut self, n: &Node, asked: bool, sizes: [usize; 2]) -> Result<[Value; 2]> {
        let tokens = self.g.batch().is_some_and(|b| b.1.is_some());
        let is = |s: usize| tokens && s == self.sizes.seq;
        if !sizes.into_iter().all(is) && asked {
            let what = "attention over other dims than tokens where not all see all";
            return Err(self.refuse(n, what));
        }
        Ok([self.place(n, tokens, sizes[0])?, self.place(n, tokens, sizes[1])?])
    }

    /// The numbers of tokens, or nothing but zeros.
    fn place(&mut self, n: &Node, tokens: bool, size: usize) -> Result<Value> {
        if tokens && size == self.sizes.seq {
            return Ok(self.of_input(inputs::POSITIONS));
        }
        self.everywhere(n, 0.0, DType::I32, &[size])
    }

    /// Scores with a mask, or their softmax, in another shape; nothing for what is no reshape. The mask has the rows
    /// and heads of scores, or one for all.
    pub(super) fn regrouped(&mut self, n: &Node, v: &Val) -> Result<Option<Val>> {
        let key = match &*n.op {
            "view.default" | "_unsafe_view.default" => "size",
            "reshape.default" => "shape",
            _ => return Ok(None),
        };
        let (Val::Masked(x, mask) | Val::Probs(x, mask, _)) = v else { return Ok(None) };
        let to = self.resolved(n, &self.ints(n, key)?, room::count(&x.shape))?;
        let (r, m) = (to.len(), mask.plain.shape.len());
        let last = |s: &[usize]| s.len().checked_sub(2).map(|i| s[i..].to_vec());
        if last(&to) != last(&x.shape) || r < 3 {
            return Err(self.odd_cut(n));
        }
        let y = self.reshaped(n, x, &to)?;
        Ok(Some(match v {
            // Heads are told apart by the mask.
            Val::Probs(_, mask, rate) => Val::Probs(y, mask.clone(), *rate),
            _ => {
                let cut = |mask: &Folded| {
                    let outer = room::count(&mask.shape[..m.saturating_sub(2)]);
                    let mut shape = if outer == 1 { vec![1; r - 2] } else { to[..r - 2].to_vec() };
                    shape.extend_from_slice(&mask.shape[m.saturating_sub(2)..]);
                    mask.reshape(&shape).map(|f| f.squashed(0))
                };
                Val::Masked(y, mask.map(cut).ok_or_else(|| self.odd_cut(n))?)
            }
        }))
    }

    fn odd_cut(&self, n: &Node) -> Diag {
        self.refuse(n, "scores with a mask are cut otherwise than into rows and heads")
    }

    /// What scores are made of: back through factors, a softcap and joined heads to the product.
    pub(super) fn scores_of(&self, scores: &View) -> Option<Scores> {
        let (mut at, mut by, mut softcap, mut bias) = (scores.value, 1.0, None, None);
        let last =
            |v: Value| self.draft.ty(v).sizes().into_iter().rev().take(2).collect::<Vec<_>>();
        while !self.products.contains_key(&at) {
            let (op, ins) = self.maker(at)?;
            // Attention takes one.
            let first = bias.is_none() && by == 1.0 && softcap.is_none();
            if let (Some((own, line)), true) = (self.added_offsets(op, ins), first) {
                bias = Some(line);
                at = own;
                continue;
            }
            match (op, softcap) {
                (Op::Reshape(_), _) if last(at) == last(ins[0]) => {}
                (Op::Scale(s), _) => by *= s.by,
                (Op::Tanh(_), None) => softcap = Some(std::mem::replace(&mut by, 1.0)),
                _ => return None,
            }
            at = ins[0];
        }
        let (q, k) = self.products[&at].clone();
        // In c tanh(x / c) what is before the tanh has 1 / c in it.
        let scale = by * softcap.unwrap_or(1.0);
        scores.is_ordered().then_some(Scores { q, k, scale, softcap, bias })
    }

    /// [rows, heads, tokens, size] as [rows, tokens, heads, size], all of them dims of ours.
    fn heads(&mut self, n: &Node, x: &View) -> Result<View> {
        self.whole(n, &x.transpose(1, 2))
    }

    /// Attention where probabilities are multiplied with values.
    pub(super) fn raised_probs(&mut self, n: &Node, other: &str) -> Result<Option<View>> {
        let Some(Val::Probs(scores, mask, rate)) = self.operand(n, "self") else {
            return Ok(None);
        };
        // What is more than scaled products of queries and keys is written out.
        let Some(of) = self.scores_of(&scores) else { return Ok(None) };
        let v = self.data(n, other)?;
        if of.bias.is_some() {
            return self.by_offset(n, of, &v, Some(&mask), rate);
        }
        let (q, k) = (of.q.clone(), of.k.clone());
        let len = |d: usize| scores.shape.len().checked_sub(d).map_or(1, |d| scores.shape[d]);
        let rule = self.rule_of(n, &mask, [len(2), len(1)])?;
        if q.shape.len() != 3 {
            return self.attend(n, &of, &v, rule, rate).map(Some);
        }
        // Rows and heads are one dim.
        let joined = q.shape[0];
        let (rows, heads) = (self.sizes.rows, joined / self.sizes.rows.max(1));
        let shape = &mask.plain.shape;
        let outer = shape.len().checked_sub(4).map(|i| &shape[i..i + 2]);
        let told = outer.is_some_and(|o| [1, rows].contains(&o[0]) && [1, heads].contains(&o[1]));
        if rows * heads != joined || !told || [&k, &v].iter().any(|x| x.shape.len() != 3) {
            return Err(self.refuse(n, "rows and heads of its operands are not told apart"));
        }
        let split = |l: &mut Lower, x: &View| {
            let to = [rows, heads, x.shape[1], x.shape[2]];
            if x.shape[0] != joined {
                return Err(l.refuse(n, "its operands are of other heads"));
            }
            l.reshaped(n, x, &to)
        };
        let (q, k, v) = (split(self, &q)?, split(self, &k)?, split(self, &v)?);
        let y = self.attend(n, &Scores { q, k, ..of }, &v, rule, rate)?;
        let to = [joined, y.shape[2], y.shape[3]];
        self.reshaped(n, &y, &to).map(Some)
    }
}

/// Scores, and what they are made of.
pub(super) struct Scores {
    pub q: View,
    pub k: View,
    pub scale: f64,
    pub softcap: Option<f64>,
    /// A number for each offset and head [offsets, heads], which is added.
    pub bias: Option<View>,
}

/// Keys or values with as many heads as queries have, each for as many of those; others as they are.
fn repeated(x: &View, queries: &View) -> View {
    let mut x = x.clone();
    let Some(d) = x.shape.len().checked_sub(3) else { return x };
    let (own, all) = (x.shape[d].max(1), queries.shape[d]);
    if own < all && all % own == 0 {
        x.dims[d] = match x.dims[d] {
            Dim::Real(k) => Dim::Each(k, all / own),
            Dim::Each(k, r) => Dim::Each(k, r * (all / own)),
            Dim::Virtual => Dim::Virtual,
        };
        x.shape[d] = all;
    }
    x
}

/// Keys or values of which groups of heads share one: without the repeats.
fn grouped(x: &View) -> View {
    let mut x = x.clone();
    if x.shape.len() != 4 {
        return x;
    }
    match x.dims[1] {
        Dim::Each(k, r) => {
            x.dims[1] = Dim::Real(k);
            x.shape[1] /= r.max(1);
        }
        Dim::Virtual => x.shape[1] = 1,
        Dim::Real(_) => {}
    }
    x
}
