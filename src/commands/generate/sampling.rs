//! Which token follows, of logits.

use shardc_ir::diag::{Diag, Result};
use shardc_ir::rng::Stream;

/// How tokens are chosen.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// Logits are divided by this; at 0 the largest is taken.
    pub temperature: f64,
    /// Of the most probable tokens the fewest that have this much of the probability.
    pub top_p: f64,
    /// At most so many of the most probable tokens.
    pub top_k: usize,
    pub seed: u64,
}

impl Sampling {
    /// The token at a position of a sample: of the numbers of logits, of equal ones the first. What is drawn depends on
    /// the seed, the sample and the position, and on nothing else.
    ///
    /// # Errors
    /// `nan-loss` for logits that are not numbers.
    pub fn pick(&self, logits: &[f32], sample: u32, position: usize) -> Result<usize> {
        if let Some(x) = logits.iter().find(|x| x.is_nan()) {
            return Err(Diag::new("nan-loss", format!("a logit of position {position} is {x}"))
                .rule("logits are numbers")
                .help("look at the weights: a training may have diverged")
                .help("or use another element type: --dtype f32"));
        }
        if self.temperature == 0.0 {
            let larger = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
            return Ok((1..logits.len()).fold(0, larger));
        }
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        order.truncate(self.top_k);
        let most = f64::from(logits[order[0]]);
        let weight = |&i: &usize| ((f64::from(logits[i]) - most) / self.temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        let all: f64 = weights.iter().sum();
        let mut sum = 0.0;
        let kept = weights.iter().position(|w| {
            sum += w;
            sum >= self.top_p * all
        });
        weights.truncate(kept.map_or(weights.len(), |last| last + 1));
        let all: f64 = weights.iter().sum();
        let drawn = Stream::new(self.seed, "generate", sample).uniform(position as u64) * all;
        let mut sum = 0.0;
        let found = weights.iter().position(|w| {
            sum += w;
            sum > drawn
        });
        Ok(order[found.unwrap_or(weights.len() - 1)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREEDY: Sampling = Sampling { temperature: 0.0, top_p: 1.0, top_k: usize::MAX, seed: 0 };

    /// Shares of many draws, in order of tokens.
    fn shares(how: Sampling, logits: &[f32]) -> Vec<f64> {
        let n = 20_000;
        let mut out = vec![0.0; logits.len()];
        (0..n).for_each(|i| out[how.pick(logits, 0, i).unwrap()] += 1.0 / n as f64);
        out
    }

    #[test]
    fn of_equal_logits_the_first_is_taken() {
        assert_eq!(GREEDY.pick(&[0.5, 2.0, -1.0, 2.0], 0, 0).unwrap(), 1);
        assert_eq!(GREEDY.pick(&[f32::NEG_INFINITY; 3], 0, 0).unwrap(), 0);
        assert_eq!(GREEDY.pick(&[1.0, f32::NAN], 0, 0).unwrap_err().code, "nan-loss");
    }

    /// Probabilities 0.1, 0.2, 0.3 and 0.4 within 4 deviations (√(p (1-p) / n) < 0.0036), and what is cut of them.
    #[test]
    fn draws_are_as_probable_as_softmax_says() {
        let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].iter().map(|p| p.ln()).collect();
        let near = |how: Sampling, want: [f64; 4]| {
            let got = shares(how, &logits);
            for (a, b) in got.iter().zip(want) {
                let exact = b == 0.0 && *a != 0.0;
                assert!(!exact && (a - b).abs() < 0.0145, "{how:?}: {got:?}, not {want:?}");
            }
        };
        let one = Sampling { temperature: 1.0, ..GREEDY };
        near(one, [0.1, 0.2, 0.3, 0.4]);
        near(Sampling { top_k: 2, ..one }, [0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0]);
        near(Sampling { top_p: 0.5, ..one }, [0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0]);
        near(Sampling { top_p: 0.39, ..one }, [0.0, 0.0, 0.0, 1.0]);
        // Squares, of 0.3 in all.
        let colder = Sampling { temperature: 0.5, ..one };
        near(colder, [1.0 / 30.0, 4.0 / 30.0, 9.0 / 30.0, 16.0 / 30.0]);
        let (a, b) = (one.pick(&logits, 0, 7).unwrap(), one.pick(&logits, 0, 7).unwrap());
        assert_eq!(a, b);
        let of = |sample| -> Vec<usize> {
            (0..64).map(|i| one.pick(&logits, sample, i).unwrap()).collect()
        };
        assert_ne!(of(0), of(1));
    }
}
