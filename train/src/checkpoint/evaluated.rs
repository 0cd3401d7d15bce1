//! What the evaluations of a run have come to: its best step, and how long nothing has become better.

use serde::{Deserialize, Serialize};

/// A step, and the loss of the evaluation behind it.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    pub step: usize,
    pub loss: f64,
}

/// Evaluations of a run so far, but for that of the model it began with.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluated {
    /// The one with the least loss; of equal ones the first.
    pub best: Best,
    /// The loss that others must be below by `--min-delta`, to be lower.
    pub mark: f64,
    /// Evaluations since one was.
    pub waited: u64,
}

impl Evaluated {
    /// The same with one more evaluation.
    pub fn and(before: Option<Evaluated>, step: usize, loss: f64, min_delta: f64) -> Evaluated {
        let now = Best { step, loss };
        let Some(e) = before else { return Evaluated { best: now, mark: loss, waited: 0 } };
        let best = if loss < e.best.loss { now } else { e.best };
        match loss < e.mark - min_delta {
            true => Evaluated { best, mark: loss, waited: 0 },
            false => Evaluated { best, mark: e.mark, waited: e.waited.saturating_add(1) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_counts_what_is_not_lower_by_enough() {
        let losses = [3.0, 2.0, 2.0, 1.95, 1.95, 1.85, 1.9];
        let mut now = None;
        let mut seen = vec![];
        for (i, loss) in losses.into_iter().enumerate() {
            let e = Evaluated::and(now, i + 1, loss, 0.1);
            seen.push((e.best.step, e.waited));
            now = Some(e);
        }
        assert_eq!(seen, [(1, 0), (2, 0), (2, 1), (4, 2), (4, 3), (6, 0), (6, 1)]);
        // Nothing is lower than an equal one.
        let same = Evaluated::and(Evaluated::and(None, 1, 2.0, 0.0).into(), 2, 2.0, 0.0);
        assert_eq!((same.best.step, same.waited), (1, 1));
    }
}
