//! Attention: the op that models have, and the scores, mask and softmax that older ones write out.

use super::folded::Folded;
use super::graph::{Arg, Node};
use super::inputs;
use super::lower::{Lower, Val};
use super::mask::{Odd, Rule, classify};
use super::view::{Dim, View};
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::ops::{Attention, Mask, Op};

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
                Val::Folded(f) => match self.masks.get(id) {
                    Some(rule) => rule.clone(),
                    None => {
                        let rule = self.rule_of(n, &f)?;
                        self.masks.insert(*id, rule.clone());
                        rule
                    }
                },
                Val::Missing(why) => return Err(self.refuse(n, &why)),
                _ => {
                    let what = "a mask that depends on data";
                    return Err(self.refuse(n, what).help("export without attention_mask"));
                }
            },
            _ => return Err(self.refuse(n, "both a mask and is_causal")),
        };
        let scale = self.number(n, "scale");
        let size = q.shape.last().copied().unwrap_or(1);
        let scale = scale.unwrap_or_else(|| 1.0 / (size as f64).sqrt());
        let y = self.attend(n, [&q, &k, &v], rule, (scale, None, rate))?;
        Ok(vec![Val::Data(y)])
    }

    /// The rule of a mask.
    fn rule_of(&self, n: &Node, mask: &Folded) -> Result<Rule> {
        classify(mask).map_err(|odd| {
            let d = match odd {
                Odd::Shape => Diag::new("mask-rule", "the mask is not one of [queries, keys] for all rows and heads"),
                Odd::Number(x) => Diag::new("mask-rule", format!("the mask adds {x:?} to a score"))
                    .why("of a head it may be a slope times the distance of query and key, and what all keys of a query have"),
                Odd::Cell { rule, query, key, seen } => {
                    let is = if seen { "sees" } else { "does not see" };
                    Diag::new("mask-rule", format!("query {query} {is} key {key}"))
                        .why(format!("the nearest rule: {rule}"))
                }
            };
            d.at(n.scope.to_string())
                .rule("a mask is full, causal, a window or chunks, and the same for all rows and heads")
                .help("use an architecture whose attention is so")
                .exit(Exit::Unsupported)
        })
    }

    /// Attention by a rule; with a softcap, if there is one, and a rate of dropout.
    fn attend(
        &mut self,
        n: &Node,
        [q, k, v]: [&View; 3],
        rule: Rule,
        (scale, softcap, rate): (f64, Option<f64>, f64),
    ) -> Result<View> {
        self.rules.push(rule.clone());
        let seq = self.sizes.seq;
        let fits = [q, k, v].iter().all(|x| x.shape.len() == 4 && x.shape[2] == seq);
        if !fits {
            return Err(self.refuse(n, "its operands are not [rows, heads, tokens, size]"));
        }
        let q = self.heads(n, q)?;
        let (k, v) = (self.heads(n, &grouped(k))?, self.heads(n, &grouped(v))?);
        let at = self.of_input(inputs::POSITIONS);
        let Rule { mask, mut slopes } = rule;
        if let [one] = slopes[..] {
            slopes = vec![one; q.shape[2]];
        }
        let (kept, drawn) = self.kept(n, rate);
        let slope = !slopes.is_empty();
        let op = Attention { scale, mask, softcap, slopes: slope, segments: false, kept };
        let mut ins = vec![q.value, k.value, v.value, at, at];
        if op.slopes {
            if slopes.len() != q.shape[2] {
                return Err(self.refuse(n, "its mask is of another number of heads"));
            }
            ins.push(self.literal(n, slopes.into())?);
        }
        ins.extend(drawn);
        let o = self.emit_n(n, &["attn", "lse"], op, &ins, None)?[0];
        let mut shape = q.shape.clone();
        shape[3] = v.shape[3];
        Ok(View::plain(o, &shape).transpose(1, 2))
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
        let v = self.data(n, other)?;
        let odd =
            || self.refuse(n, "a mask that is not added to scaled products of queries and keys");
        // Back from the scores: factors, a softcap, the product.
        let (mut at, mut by, mut softcap) = (scores.value, 1.0, None);
        while !self.products.contains_key(&at) {
            let (op, ins) = self.maker(at).ok_or_else(odd)?;
            match (op, softcap) {
                (Op::Scale(s), _) => by *= s.by,
                (Op::Tanh(_), None) => softcap = Some(std::mem::replace(&mut by, 1.0)),
                _ => return Err(odd()),
            }
            at = ins[0];
        }
        let (q, k) = self.products[&at].clone();
        // In c tanh(x / c) what is before the tanh has 1 / c in it.
        let scale = by * softcap.unwrap_or(1.0);
        let rule = self.rule_of(n, &mask)?;
        self.attend(n, [&q, &k, &v], rule, (scale, softcap, rate)).map(Some)
    }
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
