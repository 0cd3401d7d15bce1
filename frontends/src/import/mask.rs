//! Masks as rules, found by their numbers: a rule is one if every cell says so.

use super::folded::Folded;
use super::graph::Elem;
use std::fmt;

/// Which keys a query sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Rule {
    /// All.
    Full,
    /// Those that do not come after it.
    Causal,
    /// Of those the last so many.
    Window(usize),
}

impl Rule {
    fn sees(self, q: usize, k: usize) -> bool {
        match self {
            Rule::Full => true,
            Rule::Causal => k <= q,
            Rule::Window(w) => k <= q && q - k < w,
        }
    }

    /// True if both may be one rule, seen with so many tokens: a window may be longer than they are.
    pub fn agrees(self, seq: usize, other: Rule) -> bool {
        match (self, other) {
            (a, b) if a == b => true,
            (Rule::Causal, Rule::Window(w)) => w >= seq,
            _ => false,
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Rule::Full => f.write_str("every query sees every key"),
            Rule::Causal => f.write_str("a query sees the keys up to its own"),
            Rule::Window(w) => write!(f, "a query sees the last {w} keys up to its own"),
        }
    }
}

/// Why a mask is no rule.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Odd {
    /// It is not [.., queries, keys], or says different things for different rows or heads.
    Shape,
    /// A number is neither 0 nor far below.
    Number(f64),
    /// The first cell that differs from the nearest rule.
    Cell { rule: Rule, query: usize, key: usize, seen: bool },
}

/// What is added to a score that is not seen is below this.
const FAR: f64 = -1e9;

/// The rule of a mask [.., queries, keys]: truth values, or numbers that are added to scores.
pub(super) fn classify(mask: &Folded) -> Result<Rule, Odd> {
    let rank = mask.shape.len();
    let outer = rank.checked_sub(2).ok_or(Odd::Shape)?;
    let mut m = mask.clone();
    for d in (0..outer).rev() {
        if !m.is_same_along(d) || m.shape[d] == 0 {
            return Err(Odd::Shape);
        }
        m = m.select(d, 0);
    }
    let (s, t) = (m.shape[0], m.shape[1]);
    if s != t || s == 0 {
        return Err(Odd::Shape);
    }
    let seen = |i: usize| match (m.elem, m.at(&[i / t, i % t])) {
        (Elem::Bool, x) => Ok(x != 0.0),
        (_, 0.0) => Ok(true),
        (_, x) if x <= FAR => Ok(false),
        (_, x) => Err(Odd::Number(x)),
    };
    // What the last query sees, and whether the first one sees what comes after it.
    let last = (0..t).map(|k| seen((s - 1) * t + k)).collect::<Result<Vec<bool>, Odd>>()?;
    let rule = match last.iter().rev().take_while(|x| **x).count() {
        w if w == t && t > 1 && seen(t - 1)? => Rule::Full,
        w if w == t => Rule::Causal,
        w => Rule::Window(w),
    };
    for i in 0..s * t {
        let (query, key) = (i / t, i % t);
        let is = seen(i)?;
        if is != rule.sees(query, key) {
            return Err(Odd::Cell { rule, query, key, seen: is });
        }
    }
    Ok(rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(n: usize, sees: impl Fn(usize, usize) -> bool) -> Folded {
        let cell = |i: usize| f64::from(u8::from(sees(i / n, i % n)));
        Folded::new(Elem::Bool, &[1, 1, n, n], (0..n * n).map(cell).collect())
    }

    /// Rules are found, and a mask with any one cell turned around is none of them.
    #[test]
    fn one_wrong_cell_is_no_rule() {
        let n = 7;
        for rule in [Rule::Full, Rule::Causal, Rule::Window(1), Rule::Window(3), Rule::Window(5)] {
            assert_eq!(classify(&mask(n, |q, k| rule.sees(q, k))), Ok(rule));
            // Without the first key of its last query a causal mask is one with a window: one that
            // another length tells apart.
            let corner = (n - 1) * n;
            for at in (0..n * n).filter(|&at| (rule, at) != (Rule::Causal, corner)) {
                let wrong = mask(n, |q, k| rule.sees(q, k) != (q * n + k == at));
                let found = classify(&wrong);
                assert!(matches!(found, Err(Odd::Cell { .. })), "{rule}, cell {at}: {found:?}");
            }
        }
        let cell = Odd::Cell { rule: Rule::Causal, query: 2, key: 5, seen: true };
        assert_eq!(classify(&mask(n, |q, k| k <= q || (q, k) == (2, 5))), Err(cell));
    }

    #[test]
    fn numbers_that_are_added_are_nothing_or_far_below() {
        let add = |x: f64| Folded::new(Elem::Float, &[2, 2], vec![0.0, x, 0.0, 0.0]);
        assert_eq!(classify(&add(f64::from(f32::MIN))), Ok(Rule::Causal));
        assert_eq!(classify(&add(f64::NEG_INFINITY)), Ok(Rule::Causal));
        assert_eq!(classify(&add(-0.5)), Err(Odd::Number(-0.5)));
    }

    #[test]
    fn a_mask_of_each_head_is_no_rule() {
        let two = Folded::new(Elem::Bool, &[2, 1, 1], vec![1.0, 0.0]);
        assert_eq!(classify(&two), Err(Odd::Shape));
    }
}
