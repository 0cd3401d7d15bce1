//! Attention with a bias that is looked up by the offset of query and key (T5): one number for each head and offset, and none
//! for each pair.

use super::attend::Scores;
use super::graph::Node;
use super::lower::{Lower, Val};
use super::mask::{Odd, Rule};
use super::padding::Cells;
use super::view::{Dim, View};
use shardc_ir::diag::Result;
use shardc_ir::func::Value;
use shardc_ir::ops::{Mask, Op};
use shardc_ir::rule::{Group, Letter};

impl Lower<'_> {
    /// The numbers [offsets, heads] of which a bias [.., heads, queries, keys] is made, if it is made of such.
    pub(super) fn offsets_of(&self, x: &View) -> Option<View> {
        let (line, pairs) = self.offsets.get(&x.value)?;
        let heads = x.dims.len().checked_sub(3)?;
        let [q, k, h] = pairs[..] else { return None };
        let own =
            x.dims[..heads].iter().all(|d| *d == Dim::Virtual) && x.dims[heads..] == [h, q, k];
        own.then(|| line.clone())
    }

    /// The same of what is added to scores, and the scores.
    pub(super) fn added_offsets(&self, op: &Op, ins: &[Value]) -> Option<(Value, View)> {
        let Op::Add(add) = op else { return None };
        let of = |dims: &[Group]| -> Vec<Letter> {
            dims.iter().flat_map(|g| g.letters().iter().copied()).collect()
        };
        let rule = add.rule.0.as_ref()?;
        let (all, out) = (&rule.ins, of(&rule.outs[0]));
        [(0, 1), (1, 0)].into_iter().find_map(|(scores, bias)| {
            let own = of(&all[bias]);
            let dim = |l: &Letter| own.iter().position(|x| x == l).map_or(Dim::Virtual, Dim::Real);
            let dims = out.iter().map(dim).collect();
            let line =
                self.offsets_of(&View { value: ins[bias], dims, shape: vec![1; out.len()] })?;
            (of(&all[scores]) == out).then_some((ins[scores], line))
        })
    }

    /// Attention whose mask has a bias by offset; nothing if it has none, or of other dims than tokens, or beside a mask that
    /// follows no rule.
    ///
    /// # Errors
    /// As for [`Lower::attend`].
    pub(super) fn with_offsets(
        &mut self,
        n: &Node,
        of: Scores,
        v: &View,
        mask: &Val,
        rate: f64,
    ) -> Result<Option<View>> {
        let (x, cells) = match mask {
            Val::Masked(x, cells) => (x, Some(cells)),
            Val::Data(x) => (x, None),
            _other => return Ok(None),
        };
        let bias = self.offsets_of(x);
        if bias.is_none() {
            return Ok(None);
        }
        self.by_offset(n, Scores { bias, ..of }, v, cells, rate)
    }

    /// The same of scores that have a bias.
    pub(super) fn by_offset(
        &mut self,
        n: &Node,
        of: Scores,
        v: &View,
        cells: Option<&Cells>,
        rate: f64,
    ) -> Result<Option<View>> {
        let tokens = self.g.batch().is_some_and(|b| b.1.is_some());
        let own = |x: &View| x.shape.len() == 4 && x.shape[2] == self.sizes.seq;
        if !tokens || !own(&of.q) || !own(&of.k) {
            return Ok(None);
        }
        let Some(cells) = cells else {
            return self.attend(n, &of, v, Rule::of(Mask::FULL), rate).map(Some);
        };
        let known = self.ruled.as_ref().filter(|r| r.0.is(cells)).map(|r| r.1.clone());
        let rule = match known {
            Some(rule) => rule,
            None => match self.rule_in(cells, [self.sizes.seq; 2]) {
                Ok(rule) => rule,
                Err(Odd::Large) => {
                    return self.rule_of(n, cells, [self.sizes.seq; 2]).map(|_| None);
                }
                Err(_none) => return Ok(None),
            },
        };
        self.ruled = Some((cells.clone(), rule.clone()));
        match rule.slopes.is_empty() {
            true => self.attend(n, &of, v, rule, rate).map(Some),
            false => Ok(None),
        }
    }

    /// What attention takes of a bias: [heads, offsets].
    pub(super) fn bias(&mut self, n: &Node, line: &View, heads: usize) -> Result<Value> {
        let x = self.whole(n, &line.transpose(0, 1))?;
        if x.shape[0] != heads {
            return Err(self.refuse(n, "its bias is of another number of heads"));
        }
        Ok(x.value)
    }
}
