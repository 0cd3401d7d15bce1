//! `einsum`: products of two operands at a time, each summed over the letters that nobody asks for any more.

use super::graph::{Arg, Node};
use super::lower::{Lower, Val};
use super::table::Arithmetic;
use super::view::{View, letter};
use shardc_ir::diag::Result;
use shardc_ir::ops::Dot;

impl Lower<'_> {
    pub(super) fn einsum(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (Arg::Text(rule), Arg::Values(ids)) = (n.arg("equation"), n.arg("tensors")) else {
            return Err(self.refuse(n, "it has no rule, or no operands"));
        };
        let ids = ids.clone();
        let all = ids.iter().flatten().map(|id| self.data_of(n, *id)).collect::<Result<_>>()?;
        self.by_rule(n, rule, all).map(|v| vec![Val::Data(v)])
    }

    /// What a rule such as `bij,jk->bik` makes of operands.
    pub(super) fn by_rule(&mut self, n: &Node, rule: &str, all: Vec<View>) -> Result<View> {
        let rule: String = rule.chars().filter(|c| !c.is_whitespace()).collect();
        let (ins, out) = rule.split_once("->").map_or((&*rule, None), |r| (r.0, Some(r.1)));
        let ins: Vec<&str> = ins.split(',').collect();
        if ins.len() != all.len() {
            return Err(self.refuse(n, "its rule has another number of operands"));
        }
        // `...` stands for so many dims, which have capitals of their own.
        let dots = |text: &str, rank: usize| -> Option<Vec<char>> {
            let Some((a, b)) = text.split_once("...") else { return Some(text.chars().collect()) };
            let own = rank.checked_sub(a.len() + b.len())?;
            let more = (0..own).rev().map(|i| char::from(b'0' + (i % 10) as u8));
            Some(a.chars().chain(more).chain(b.chars()).collect())
        };
        let pairs = ins.iter().zip(&all);
        let letters: Option<Vec<Vec<char>>> =
            pairs.map(|(text, v)| dots(text, v.shape.len())).collect();
        let letters = letters.ok_or_else(|| self.refuse(n, "its rule does not fit"))?;
        let most = letters.iter().flatten().filter(|c| c.is_ascii_digit()).max();
        let most = most.map_or(0, |c| usize::from(*c as u8 - b'0') + 1);
        let out: Vec<char> = match out {
            Some(text) => {
                let named = text.replace("...", "").len();
                dots(text, named + most).unwrap_or_default()
            }
            None => {
                let mut once: Vec<char> = letters.concat();
                let all = once.clone();
                once.retain(|c| c.is_ascii_digit() || all.iter().filter(|o| *o == c).count() == 1);
                // Dims of `...` first, which are numbered from their last.
                let place = |c: &char| match c.to_digit(10) {
                    Some(from_end) => (0, 9 - from_end),
                    None => (1, u32::from(*c)),
                };
                once.sort_unstable_by_key(place);
                once.dedup();
                once
            }
        };
        let twice = |l: &[char]| (1..l.len()).any(|i| l[..i].contains(&l[i]));
        let fits = letters.iter().zip(&all).all(|(l, v)| l.len() == v.shape.len() && !twice(l));
        if !fits || twice(&out) || !out.iter().all(|c| letters.iter().any(|l| l.contains(c))) {
            return Err(self.refuse(n, "its rule does not fit, or has a letter twice"));
        }
        let mut rest: Vec<(Vec<char>, View)> = letters.into_iter().zip(all).collect();
        let first = rest.remove(0);
        let mut made = self.asked(n, first, &rest, &out)?;
        while !rest.is_empty() {
            let next = rest.remove(0);
            let with = [vec![made.clone()], rest.clone()].concat();
            let next = self.asked(n, next, &with, &out)?;
            made = self.pair_of(n, made, next, &rest, &out)?;
        }
        let order: Option<Vec<usize>> =
            out.iter().map(|c| made.0.iter().position(|o| o == c)).collect();
        let order = order.ok_or_else(|| self.refuse(n, "its rule does not fit"))?;
        Ok(made.1.permute(&order))
    }

    /// An operand summed over the letters that neither others nor the result have.
    fn asked(
        &mut self,
        n: &Node,
        (l, v): (Vec<char>, View),
        others: &[(Vec<char>, View)],
        out: &[char],
    ) -> Result<(Vec<char>, View)> {
        let kept = |c: &char| out.contains(c) || others.iter().any(|o| o.0.contains(c));
        let gone: Vec<usize> = (0..l.len()).filter(|&d| !kept(&l[d])).collect();
        if gone.is_empty() {
            return Ok((l, v));
        }
        let v = self.whole(n, &v)?;
        let v = self.sum_over(n, &v, &gone, false)?;
        Ok((l.into_iter().filter(kept).collect(), v))
    }

    /// The product of two, summed over what only they have.
    fn pair_of(
        &mut self,
        n: &Node,
        (la, a): (Vec<char>, View),
        (lb, b): (Vec<char>, View),
        rest: &[(Vec<char>, View)],
        out: &[char],
    ) -> Result<(Vec<char>, View)> {
        let mut all = la.clone();
        all.extend(lb.iter().filter(|c| !la.contains(c)));
        let kept = |c: &&char| out.contains(c) || rest.iter().any(|o| o.0.contains(c));
        let to: Vec<char> = all.iter().filter(kept).copied().collect();
        // Both with all letters in one order: what one lacks is a dim of one element.
        let spread = |l: &[char], v: &View| {
            let own: Vec<usize> =
                all.iter().filter_map(|c| l.iter().position(|o| o == c)).collect();
            let mut y = v.permute(&own);
            for (d, _) in all.iter().enumerate().filter(|(_, c)| !l.contains(c)) {
                y = y.unsqueeze(d);
            }
            y
        };
        if to.len() == all.len() {
            let (a, b) = (spread(&la, &a), spread(&lb, &b));
            return Ok((all, self.both(n, Arithmetic::Mul, &a, &b)?));
        }
        let (a, b) = (self.whole(n, &a)?, self.whole(n, &b)?);
        let size = |c: &char| {
            let of = |l: &[char], v: &View| l.iter().position(|o| o == c).map(|d| v.shape[d]);
            (of(&la, &a), of(&lb, &b))
        };
        if all.iter().any(|c| matches!(size(c), (Some(x), Some(y)) if x != y)) {
            return Err(self.refuse(n, "sizes of a letter differ"));
        }
        let name = |l: &[char]| -> String {
            l.iter().map(|c| letter(all.iter().position(|o| o == c).unwrap_or(0))).collect()
        };
        let rule = self.rule(
            n,
            &format!("{},{}->{}", name(&la), name(&lb), name(&to)),
            &[a.value, b.value],
        )?;
        let v = self.emit(n, "product", Dot { rule }, &[a.value, b.value])?;
        let sizes: Vec<usize> = to.iter().map(|c| size(c).0.or(size(c).1).unwrap_or(1)).collect();
        Ok((to, View::plain(v, &sizes)))
    }

    /// A product of two vectors, and what each of two vectors makes of a matrix of its own.
    pub(super) fn bilinear(&mut self, n: &Node) -> Result<Vec<Val>> {
        let all = ["input1", "input2", "weight"].map(|name| self.data(n, name));
        let [a, b, w] = all;
        let (a, b, w) = (a?, b?, w?);
        if a.shape.len() != 2 {
            return Err(self.refuse(n, "its operands are not of rows"));
        }
        let y = self.by_rule(n, "bi,oij,bj->bo", vec![a, w, b])?;
        self.biased(n, y, "bias")
    }
}
