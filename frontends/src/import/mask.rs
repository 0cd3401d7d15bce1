//! Masks as rules, found by their numbers: a rule is one if every cell says so.

use super::folded::Folded;
use super::graph::Elem;
use super::room;
use shardc_ir::ops::Mask;
use std::fmt;

/// What a mask does to scores.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Rule {
    /// Which keys are seen.
    pub mask: Mask,
    /// Of each head, or of all alike, what is taken off a score, times the distance of query and key; empty if
    /// nothing is.
    pub slopes: Vec<f32>,
    /// Keys that are padding are not seen.
    pub padded: bool,
}

impl Rule {
    pub fn of(mask: Mask) -> Rule {
        Rule { mask, slopes: vec![], padded: false }
    }

    /// True if both may be one rule, this one seen with so many tokens: a limit may be farther than they are.
    pub fn agrees(&self, seq: usize, other: &Rule) -> bool {
        // Slopes are read off sums of f32.
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * a.abs();
        let alike = self.slopes.len() == other.slopes.len();
        let slopes = alike && self.slopes.iter().zip(&other.slopes).all(near);
        // A single token is not padding.
        let padded = self.padded == other.padded || seq == 1;
        agrees(self.mask, seq, other.mask) && slopes && padded
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&words(self.mask))
    }
}

/// True if a query sees a key, by their numbers.
pub(super) fn sees(mask: Mask, query: usize, key: usize) -> bool {
    let within = |limit: Option<usize>, far: usize| limit.is_none_or(|n| far <= n);
    within(mask.left, query.saturating_sub(key))
        && within(mask.right, key.saturating_sub(query))
        && mask.chunk.is_none_or(|n| query / n == key / n)
}

/// True if both may be one rule, the first seen with so many tokens: a limit may be farther than they are.
fn agrees(few: Mask, seq: usize, other: Mask) -> bool {
    let same = |a: Option<usize>, b: Option<usize>, reach: usize| {
        a == b || a.is_none() && b.is_some_and(|b| b >= reach)
    };
    let far = seq.saturating_sub(1);
    same(few.left, other.left, far)
        && same(few.right, other.right, far)
        && same(few.chunk, other.chunk, seq)
}

/// What a rule says, for people.
fn words(mask: Mask) -> String {
    let own = match (mask.left, mask.right) {
        (None, None) => "a query sees every key".into(),
        (None, Some(0)) => "a query sees the keys up to its own".into(),
        (Some(n), Some(0)) => {
            format!("a query sees the last {} keys up to its own", n.saturating_add(1))
        }
        (left, right) => {
            let side = |n: Option<usize>| n.map_or("all".into(), |n| n.to_string());
            format!("a query sees {} keys before its own and {} after it", side(left), side(right))
        }
    };
    mask.chunk.map_or(own.clone(), |n| format!("{own}, of its chunk of {n}"))
}

/// Why a mask is not a rule.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Odd {
    /// It has more cells than are looked at.
    Large,
    /// It is not [.., queries, keys], or says different things for different rows or heads.
    Shape,
    /// A number is neither 0 nor far below.
    Number(f64),
    /// The first cell that differs from the nearest rule.
    Cell { rule: Rule, query: usize, key: usize, seen: bool },
    /// The first cell that differs with padding, of a trial.
    Padded { row: usize, query: usize, key: usize, seen: bool },
}

/// Most cells of a mask of all heads: they take a byte each.
const MAX_CELLS: usize = 1 << 28;
/// What is added to a score that is not seen is below this.
pub(super) const FAR: f64 = -1e9;

/// Takes the work of looking at cells, which is done several times.
pub(super) fn look(shape: &[usize]) -> Result<(), Odd> {
    let cells = Some(room::count(shape)).filter(|&n| n <= MAX_CELLS);
    cells.and_then(|n| room::work(4 * n)).ok_or(Odd::Large)
}

/// The rule of a mask [.., queries, keys]: truth values, or numbers that are added to scores.
pub(super) fn classify(mask: &Folded) -> Result<Rule, Odd> {
    let rank = mask.shape.len();
    let outer = rank.checked_sub(2).ok_or(Odd::Shape)?;
    let mut m = mask.clone();
    for d in (0..outer).rev() {
        // Heads, the last of these dims, may differ.
        if m.is_same_along(d) && m.shape[d] > 0 {
            m = m.select(d, 0);
        } else if d + 1 != outer {
            return Err(Odd::Shape);
        }
    }
    look(&m.shape)?;
    let heads: Vec<Folded> = match m.shape.len() {
        2 => vec![m],
        3 => (0..m.shape[0]).map(|h| m.select(0, h)).collect(),
        _ => return Err(Odd::Shape),
    };
    let (s, t) = (heads.first().ok_or(Odd::Shape)?.shape[0], heads[0].shape[1]);
    if s == 0 || s != t {
        // Nothing is hidden, whatever queries and keys are.
        let own = |h: &Folded| {
            h.is_one_number()
                && h.first().is_some_and(|x| {
                    if h.elem == Elem::Bool { x != 0.0 } else { x > FAR && x.is_finite() }
                })
        };
        return if s > 0 && heads.iter().all(own) {
            Ok(Rule::of(Mask::FULL))
        } else {
            Err(Odd::Shape)
        };
    }
    let one = &heads[0];
    let seen = |i: usize| match (one.elem, one.at(&[i / t, i % t])) {
        (Elem::Bool, x) => Ok(x != 0.0),
        (_, x) => Ok(x > FAR),
    };
    let all = (0..s * t).map(seen).collect::<Result<Vec<bool>, Odd>>()?;
    let run = |cells: &mut dyn Iterator<Item = bool>| cells.take_while(|x| *x).count();
    // What the last query sees up to its own key, and the first one from its own on: of fewer than all keys
    // that is a side's limit.
    let before = run(&mut all[(s - 1) * t..].iter().rev().copied());
    let behind = run(&mut all[..t].iter().copied());
    let limit = |n: usize| if n == t && t > 1 { None } else { n.checked_sub(1) };
    let sides = Mask { left: limit(before), right: limit(behind), chunk: None };
    // A single key may be all there is.
    let sides = if t == 1 && all[0] { Mask::CAUSAL } else { sides };
    // Of chunks, the second begins where a query does not see the key before its own.
    let cut = (1..s).find(|&q| !all[q * t + q - 1]);
    let chunks = [None, sides.right].map(|right| Mask { left: None, right, chunk: cut });
    let wrong = |rule: Mask| (0..s * t).find(|&i| all[i] != sees(rule, i / t, i % t));
    let mask = match wrong(sides) {
        None => sides,
        Some(first) => {
            let (query, key) = (first / t, first % t);
            let odd = Odd::Cell { rule: Rule::of(sides), query, key, seen: all[first] };
            let chunk = chunks.into_iter().find(|&rule| cut.is_some() && wrong(rule).is_none());
            chunk.ok_or(odd)?
        }
    };
    let slopes = heads.iter().map(|h| slope(h, mask)).collect::<Result<Vec<f32>, Odd>>()?;
    if slopes.iter().all(|x| *x == 0.0) {
        return Ok(Rule::of(mask));
    }
    Ok(Rule { mask, slopes, padded: false })
}

/// What the mask of a head takes off, times the distance; what is added to all keys of a query alike
/// changes nothing.
fn slope(head: &Folded, mask: Mask) -> Result<f32, Odd> {
    let t = head.shape[1];
    let mut steepest: Option<(f64, f64)> = None;
    for pass in 0..2 {
        for (q, k) in (0..head.shape[0]).flat_map(|q| (0..t).map(move |k| (q, k))) {
            let x = head.at(&[q, k]);
            let hidden = if head.elem == Elem::Bool { x == 0.0 } else { x <= FAR };
            if hidden == sees(mask, q, k) {
                return Err(Odd::Cell { rule: Rule::of(mask), query: q, key: k, seen: !hidden });
            }
            if hidden || head.elem == Elem::Bool {
                continue;
            }
            if !x.is_finite() || !sees(mask, q, q) {
                return Err(Odd::Number(x));
            }
            let (far, own) = (q.abs_diff(k) as f64, head.at(&[q, q]));
            if pass == 0 {
                // The farthest pair has most digits.
                if far > steepest.map_or(0.0, |s| s.0) {
                    steepest = Some((far, (own - x) / far));
                }
                continue;
            }
            let by = steepest.map_or(0.0, |s| s.1);
            // Numbers of f32 that were added and multiplied.
            let room = 4e-7 * (x.abs() + own.abs() + by.abs() * far);
            if (own - x - by * far).abs() > room || steepest.is_none() && x != own {
                return Err(Odd::Number(x));
            }
        }
    }
    Ok(steepest.map_or(0.0, |s| s.1) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(n: usize, sees: impl Fn(usize, usize) -> bool) -> Folded {
        let cell = |i: usize| f64::from(u8::from(sees(i / n, i % n)));
        Folded::new(Elem::Bool, &[1, 1, n, n], (0..n * n).map(cell)).unwrap()
    }

    /// Rules are found, and a mask with any one cell turned around is none, or one that another number
    /// of tokens tells apart.
    #[test]
    fn one_wrong_cell_is_no_rule() {
        let n = 7;
        let sides = [None, Some(0), Some(1), Some(2), Some(4)];
        let windows =
            sides.iter().flat_map(|&left| sides.map(|right| Mask { left, right, chunk: None }));
        let chunks = [Mask::CAUSAL, Mask::FULL]
            .into_iter()
            .flat_map(|m| [2, 3, 4, 6].map(|c| Mask { chunk: Some(c), ..m }));
        for rule in windows.chain(chunks) {
            assert_eq!(classify(&mask(n, |q, k| sees(rule, q, k))), Ok(Rule::of(rule)), "{rule}");
            for at in 0..n * n {
                match classify(&mask(n, |q, k| sees(rule, q, k) != (q * n + k == at))) {
                    Err(odd) => {
                        assert!(matches!(odd, Odd::Cell { .. }), "{rule}, cell {at}: {odd:?}")
                    }
                    Ok(other) => {
                        let longer = classify(&mask(2 * n + 1, |q, k| sees(rule, q, k)));
                        assert!(!other.agrees(n, &longer.unwrap()), "{rule}, cell {at}: {other}");
                    }
                }
            }
        }
        let cell = Odd::Cell { rule: Rule::of(Mask::CAUSAL), query: 2, key: 5, seen: true };
        assert_eq!(classify(&mask(n, |q, k| k <= q || (q, k) == (2, 5))), Err(cell));
    }

    #[test]
    fn a_longer_limit_is_no_other_rule() {
        let window = Mask::causal(Some(5));
        assert!(agrees(Mask::CAUSAL, 5, window) && !agrees(Mask::CAUSAL, 6, window));
        let chunks = Mask { chunk: Some(5), ..Mask::CAUSAL };
        assert!(agrees(Mask::CAUSAL, 5, chunks) && !agrees(Mask::CAUSAL, 6, chunks));
        assert!(!agrees(Mask::CAUSAL, 5, Mask::FULL));
    }

    #[test]
    fn numbers_that_are_added_are_nothing_or_far_below() {
        let add = |x: f64| Folded::new(Elem::Float, &[2, 2], vec![0.0, x, 0.0, 0.0]).unwrap();
        assert_eq!(classify(&add(f64::from(f32::MIN))), Ok(Rule::of(Mask::CAUSAL)));
        assert_eq!(classify(&add(f64::NEG_INFINITY)), Ok(Rule::of(Mask::CAUSAL)));
        assert!(matches!(classify(&add(-0.5)), Err(Odd::Number(_))));
    }

    /// Of other keys than queries a mask is a rule if it hides nothing.
    #[test]
    fn of_other_keys_nothing_is_hidden() {
        let cells = |elem, x: f64| Folded::new(elem, &[1, 1, 2, 3], vec![x; 6]).unwrap();
        for (elem, x) in [(Elem::Bool, 1.0), (Elem::Float, 0.0), (Elem::Float, 2.5)] {
            assert_eq!(classify(&cells(elem, x)), Ok(Rule::of(Mask::FULL)), "{x}");
        }
        for (elem, x) in [(Elem::Bool, 0.0), (Elem::Float, FAR), (Elem::Float, f64::NEG_INFINITY)] {
            assert_eq!(classify(&cells(elem, x)), Err(Odd::Shape), "{x}");
        }
        let one = Folded::new(Elem::Float, &[2, 3], vec![0.0, 0.0, 0.0, 0.0, 0.0, -1.0]).unwrap();
        assert_eq!(classify(&one), Err(Odd::Shape));
    }

    #[test]
    fn a_mask_of_each_head_is_no_rule() {
        let two = Folded::new(Elem::Bool, &[2, 1, 1], vec![1.0, 0.0]).unwrap();
        assert!(matches!(classify(&two), Err(Odd::Cell { .. })));
        let rows = Folded::new(Elem::Bool, &[2, 1, 1, 1], vec![1.0, 0.0]).unwrap();
        assert_eq!(classify(&rows), Err(Odd::Shape));
    }

    /// Slopes are found, whatever is added to the keys of a query; no cell may be another number.
    #[test]
    fn slopes_are_of_heads() {
        let (n, slopes) = (6, [0.25f64, 0.0625]);
        let cells = |wrong: Option<usize>| {
            let cell = |i: usize| {
                let (h, q, k) = (i / (n * n), i / n % n, i % n);
                let x = slopes[h] * k as f64 + 0.5 * q as f64;
                if k > q { f64::NEG_INFINITY } else { x + f64::from(u8::from(wrong == Some(i))) }
            };
            Folded::new(Elem::Float, &[1, 2, n, n], (0..2 * n * n).map(cell)).unwrap()
        };
        let rule = Rule { slopes: slopes.map(|x| x as f32).into(), ..Rule::of(Mask::CAUSAL) };
        assert_eq!(classify(&cells(None)), Ok(rule.clone()));
        assert!(!rule.agrees(n, &Rule::of(Mask::CAUSAL)));
        for at in (0..2 * n * n).filter(|i| i % n <= i / n % n) {
            // The one key of the first query may have any number.
            let alone = at % (n * n) == 0;
            let found = classify(&cells(Some(at)));
            assert_eq!(found.is_ok(), alone, "cell {at}: {found:?}");
        }
        // One head, or heads that are alike, have one.
        let one = cells(None).select(1, 0);
        let alone = Rule { slopes: vec![0.25], ..Rule::of(Mask::CAUSAL) };
        assert_eq!(classify(&one), Ok(alone));
    }
}
