//! Masks of padding (`attention_mask`): what becomes of one is known by trial.
//!
//! What depends on such a mask and on no other data is computed twice, without padding and with a mask of a trial.
//! At an attention the first must be a rule, and the second the same rule without the keys that are padding, cell by
//! cell: then attention has segments, of which padding is in another one than all queries.

use super::fold;
use super::folded::Folded;
use super::graph::{Elem, Id, Node, Size};
use super::lower::{Lower, Val};
use super::mask::{FAR, Odd, Rule, classify, look, sees};
use super::room;
use shardc_ir::diag;
use shardc_ir::rng::Stream;
use std::sync::Arc;

/// Most cells of a trial whose rows differ.
const MOST: usize = 1 << 22;

/// Whether rows of a trial are too large to differ: what one row has of another is then not seen.
pub(super) fn alike(rows: usize, seq: usize) -> bool {
    rows > 1 && seq.saturating_mul(seq).saturating_mul(rows) > MOST
}

/// Most tokens of so many rows that differ.
pub(super) fn longest(rows: usize) -> usize {
    (MOST / rows.max(1)).isqrt()
}

/// The numbers of a mask: where nothing is padding, and if they depend on that, those of a trial.
#[derive(Clone, Debug)]
pub(super) struct Cells {
    pub plain: Folded,
    pub tried: Option<Folded>,
}

impl Cells {
    pub fn known(plain: Folded) -> Cells {
        Cells { plain, tried: None }
    }

    /// True if both are the same in memory.
    pub fn is(&self, o: &Cells) -> bool {
        let tried = match (&self.tried, &o.tried) {
            (Some(a), Some(b)) => a.is(b),
            (a, b) => a.is_none() && b.is_none(),
        };
        tried && self.plain.is(&o.plain)
    }

    /// What a function makes of the numbers; nothing if it makes nothing of some.
    pub fn map(&self, f: impl Fn(&Folded) -> Option<Folded>) -> Option<Cells> {
        let tried = match &self.tried {
            Some(t) => Some(f(t)?),
            None => None,
        };
        Some(Cells { plain: f(&self.plain)?, tried })
    }

    /// What a function makes of the numbers of both.
    pub fn zip(&self, o: &Cells, f: impl Fn(&Folded, &Folded) -> Option<Folded>) -> Option<Cells> {
        let tried = match (&self.tried, &o.tried) {
            (None, None) => None,
            (a, b) => Some(f(a.as_ref().unwrap_or(&self.plain), b.as_ref().unwrap_or(&o.plain))?),
        };
        Some(Cells { plain: f(&self.plain, &o.plain)?, tried })
    }

    /// The rule of a mask of scores [.., queries, keys], whose dims may be spread over them; with padding of these
    /// keys [rows, keys], if it depends on that.
    pub fn rule(&self, queries: usize, keys: usize, padding: &Folded) -> Result<Rule, Odd> {
        let scores = |m: &Folded| {
            let mut shape = m.shape.clone();
            while shape.len() < 2 {
                shape.insert(0, 1);
            }
            let outer = shape.len() - 2;
            shape[outer..].copy_from_slice(&[queries, keys]);
            m.expand(&shape).ok_or(Odd::Shape)
        };
        let plain = scores(&self.plain)?;
        let rule = classify(&plain)?;
        match &self.tried {
            Some(tried) => tries(rule, &plain, &scores(tried)?, padding),
            None => Ok(rule),
        }
    }
}

/// The rule without the keys that are padding, or as it is if padding changes nothing.
fn tries(rule: Rule, plain: &Folded, tried: &Folded, padding: &Folded) -> Result<Rule, Odd> {
    let outer = tried.shape.len() - 2;
    if padding.shape[1] != tried.shape[outer + 1] {
        return Err(Odd::Shape);
    }
    let mut shape = vec![padding.shape[0], 1];
    shape.extend_from_slice(&tried.shape[outer..]);
    match tried.shape[..outer] {
        [] => {}
        [heads] => shape[1] = heads,
        [rows, heads] if [1, shape[0]].contains(&rows) => shape[1] = heads,
        _ => return Err(Odd::Shape),
    }
    let (Some(plain), Some(tried)) = (plain.expand(&shape), tried.expand(&shape)) else {
        return Err(Odd::Shape);
    };
    let never = agrees(&rule, [&plain, &tried], padding, false);
    let padded = never.is_err();
    if padded {
        agrees(&rule, [&plain, &tried], padding, true)?;
    }
    Ok(Rule { padded, ..rule })
}

/// Whether a trial [rows, heads, queries, keys] is a rule, without the keys that are padding if these are `hidden`, and
/// adds to what is seen what is added without padding.
fn agrees(
    rule: &Rule,
    [plain, tried]: [&Folded; 2],
    padding: &Folded,
    hidden: bool,
) -> Result<(), Odd> {
    let [rows, heads, queries, keys] = tried.shape[..] else { return Err(Odd::Shape) };
    // Rows, and heads, that are alike are looked at once.
    let same = |d: usize| [plain, tried].iter().all(|m| m.is_same_along(d));
    let rows = if same(0) && padding.is_same_along(0) { rows.min(1) } else { rows };
    let heads = if same(1) { heads.min(1) } else { heads };
    look(&[rows, heads, queries, keys])?;
    let each = |h| (0..queries).map(move |q| (h, q));
    for (b, (h, q)) in (0..rows).flat_map(|b| (0..heads).flat_map(each).map(move |x| (b, x))) {
        let wanted = |k: usize| sees(rule.mask, q, k) && (!hidden || padding.at(&[b, k]) != 0.0);
        // A query that sees nothing has no softmax.
        let Some(first) = (0..keys).find(|&k| wanted(k)) else { continue };
        for k in 0..keys {
            let x = tried.at(&[b, h, q, k]);
            let seen = if tried.elem == Elem::Bool { x != 0.0 } else { x > FAR };
            if seen != wanted(k) {
                return Err(Odd::Padded { row: b, query: q, key: k, seen });
            }
            // What is added to all keys of a query alike changes nothing.
            let by = |m: &Folded| m.at(&[b, h, q, k]) - m.at(&[b, h, q, first]);
            let (one, other) = (by(plain), by(tried));
            if seen && tried.elem != Elem::Bool && (one - other).abs() > 4e-7 * one.abs() {
                return Err(Odd::Number(x));
            }
        }
    }
    Ok(())
}

/// A mask of padding of a trial: the first of a row is a token, the second is padding, the others are at random. Rows
/// are alike where they would take too much room.
fn trial(elem: Elem, rows: usize, seq: usize, alike: bool) -> Option<Folded> {
    let s = Stream::new(0, "padding", 0);
    let cell = |i: usize| {
        let token = match i % seq {
            0 => true,
            1 => false,
            _ => s.uniform(i as u64) < 0.5,
        };
        f64::from(u8::from(token))
    };
    let own = if alike { 1 } else { rows };
    let cells = room::elements(&[own, seq])?;
    let t = Folded::new(elem, &[own, seq], (0..cells).map(cell))?;
    t.expand(&[rows, seq])
}

impl Lower<'_> {
    /// The mask of padding as an operand: its numbers are those of no padding, and of a trial.
    ///
    /// # Errors
    /// `import-input` if it is too large.
    pub(super) fn padding_of(&mut self, name: &Arc<str>, elem: Elem) -> diag::Result<Val> {
        let shape = [self.sizes.rows, self.sizes.seq];
        // Rows may be alike where the model is looked at again with fewer tokens.
        let again = matches!(self.g.batch(), Some((_, Some(Size::Symbol(_)))));
        let tried = trial(elem, shape[0], shape[1], again && alike(shape[0], shape[1]));
        let large = || self.dims(name, "a mask of padding with so many cells is not read".into());
        let tried = tried.ok_or_else(large)?;
        self.padding = Some((name.clone(), tried.clone()));
        Ok(Val::Padded(Cells { plain: Folded::full(elem, &shape, 1.0), tried: Some(tried) }))
    }

    /// The results of a node that depends on a mask of padding and on nothing else that is not known; nothing if it
    /// does not, or folding does not know the op.
    ///
    /// # Errors
    /// As for [`Lower::fold`].
    pub(super) fn fold_padded(&mut self, n: &Node) -> diag::Result<Option<Vec<Val>>> {
        let (mut known, mut padded) = (true, false);
        for id in n.ids() {
            match self.val(id) {
                Val::Folded(_) => {}
                Val::Padded(_) => padded = true,
                _ => known = false,
            }
        }
        if !known || !padded || fold::of_shape(&n.op) {
            return Ok(None);
        }
        let mut of = |trial: bool| {
            self.trial = Some(trial);
            let made = self.fold(n);
            self.trial = None;
            made
        };
        let (Some(plain), Some(tried)) = (of(false)?, of(true)?) else { return Ok(None) };
        let both = plain.into_iter().zip(tried);
        Ok(Some(both.map(|(plain, t)| Val::Padded(Cells { plain, tried: Some(t) })).collect()))
    }

    /// Numbers that are known, or follow from a mask of padding.
    pub(super) fn cells(&self, v: Option<&Val>) -> Option<Cells> {
        match v? {
            Val::Folded(f) => Some(Cells::known(f.clone())),
            Val::Padded(c) => Some(c.clone()),
            _ => None,
        }
    }

    /// The known numbers of a value; where a mask of padding is tried, those of the trial.
    pub(super) fn numbers_of(&self, id: Id) -> Option<&Folded> {
        match (self.val(id), self.trial) {
            (Val::Folded(f), _) => Some(f),
            (Val::Padded(c), Some(true)) => Some(c.tried.as_ref().unwrap_or(&c.plain)),
            (Val::Padded(c), Some(false)) => Some(&c.plain),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::ops::Mask;

    const ROWS: usize = 3;
    const N: usize = 7;

    fn cells(elem: Elem, shape: &[usize], of: impl Fn(usize, usize, usize) -> f64) -> Folded {
        let cell = |i: usize| of(i / (N * N), i / N % N, i % N);
        Folded::new(elem, shape, (0..room::count(shape)).map(cell)).unwrap()
    }

    /// What is the same for all rows, stored once as folding does it.
    fn of_all_rows(cell: impl Fn(usize, usize) -> f64, elem: Elem) -> Folded {
        cells(elem, &[1, 1, N, N], |_, q, k| cell(q, k)).expand(&[ROWS, 1, N, N]).unwrap()
    }

    /// A mask by what it is of the mask of padding, as a model makes it; without padding all rows are alike.
    fn made(sees: impl Fn(&Folded, usize, usize, usize) -> bool) -> (Cells, Folded) {
        let padding = trial(Elem::Bool, ROWS, N, false).unwrap();
        let none = Folded::full(Elem::Bool, &[ROWS, N], 1.0);
        let of = |p: &Folded, b: usize, q: usize, k: usize| f64::from(u8::from(sees(p, b, q, k)));
        let plain = of_all_rows(|q, k| of(&none, 0, q, k), Elem::Bool);
        let tried = cells(Elem::Bool, &[ROWS, 1, N, N], |b, q, k| of(&padding, b, q, k));
        (Cells { plain, tried: Some(tried) }, padding)
    }

    #[test]
    fn keys_that_are_padding_are_hidden() {
        for mask in [Mask::CAUSAL, Mask::FULL, Mask::causal(Some(3))] {
            let token = |p: &Folded, b: usize, k: usize| p.at(&[b, k]) != 0.0;
            let (c, padding) = made(|p, b, q, k| sees(mask, q, k) && token(p, b, k));
            let rule = Rule { padded: true, ..Rule::of(mask) };
            assert_eq!(c.rule(N, N, &padding), Ok(rule.clone()));
            assert!(!rule.agrees(N, &Rule::of(mask)));
            let (c, _) = made(|_, _, q, k| sees(mask, q, k));
            assert_eq!(c.rule(N, N, &padding), Ok(Rule::of(mask)), "it does not depend on padding");
            // Any one cell of a query that sees something.
            for at in 0..ROWS * N * N {
                let (b, q, k) = (at / (N * N), at / N % N, at % N);
                let some = (0..N).any(|k| sees(mask, q, k) && token(&padding, b, k));
                let (c, _) = made(|p, b, q, k| {
                    let turned = !p.is_one_number() && (b * N + q) * N + k == at;
                    (sees(mask, q, k) && token(p, b, k)) != turned
                });
                let found = c.rule(N, N, &padding);
                assert_eq!(found.is_ok(), !some, "{mask}, cell {b}, {q}, {k}: {found:?}");
            }
        }
    }

    /// Other things that a mask of padding might do.
    #[test]
    fn what_is_not_hidden_keys_is_refused() {
        let token = |p: &Folded, b: usize, k: usize| p.at(&[b, k]) != 0.0;
        type Sees = Box<dyn Fn(&Folded, usize, usize, usize) -> bool>;
        let own: [Sees; 3] = [
            // Queries and keys alike.
            Box::new(move |p, b, q, k| k <= q && token(p, b, k) == token(p, b, q)),
            // The padding of another row.
            Box::new(move |p, b, q, k| k <= q && token(p, (b + 1) % ROWS, k)),
            // Of the first half alone.
            Box::new(move |p, b, q, k| k <= q && (k > N / 2 || token(p, b, k))),
        ];
        for (i, f) in own.iter().enumerate() {
            let (c, padding) = made(f);
            let found = c.rule(N, N, &padding);
            assert!(matches!(found, Err(Odd::Padded { .. })), "{i}: {found:?}");
        }
    }

    /// Numbers that are added to scores may not depend on padding either.
    #[test]
    fn slopes_that_count_tokens_are_refused() {
        let padding = trial(Elem::Float, ROWS, N, false).unwrap();
        let both = |counts: bool| {
            let cell = |token: &dyn Fn(usize) -> bool, q: usize, k: usize| {
                let place = if counts { (0..k).filter(|&k| token(k)).count() } else { k };
                if k <= q && token(k) { 0.5 * place as f64 } else { f64::from(f32::MIN) }
            };
            let tried = cells(Elem::Float, &[ROWS, 1, N, N], |b, q, k| {
                cell(&|k| padding.at(&[b, k]) != 0.0, q, k)
            });
            let plain = of_all_rows(|q, k| cell(&|_| true, q, k), Elem::Float);
            Cells { plain, tried: Some(tried) }
        };
        let rule = Rule { slopes: vec![0.5], padded: true, ..Rule::of(Mask::CAUSAL) };
        assert_eq!(both(false).rule(N, N, &padding), Ok(rule));
        let found = both(true).rule(N, N, &padding);
        assert!(matches!(found, Err(Odd::Number(_))), "{found:?}");
    }
}
