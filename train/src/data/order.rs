//! Which rows of the data a step takes: of the seed, the number of the row since training began, and nothing
//! else, so the same on every mesh and after a pause.

use serde::{Deserialize, Serialize};
use shardc_ir::rng::{Stream, philox, stream};

/// In which order rows of data are taken.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Each from a place that is drawn, whatever was taken before
    #[default]
    Random,
    /// All once in every epoch, in an order that is drawn for it
    Shuffled,
    /// One after the other, and again from the first
    Sequential,
}

impl Order {
    /// As it is given on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Order::Random => "random",
            Order::Shuffled => "shuffled",
            Order::Sequential => "sequential",
        }
    }
}

/// Which rows steps take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Picks {
    pub order: Order,
    pub seed: u64,
    /// A step, and the rows that all steps up to it have taken.
    pub done: (usize, u64),
}

impl Picks {
    /// From places that are drawn.
    pub fn random(seed: u64) -> Picks {
        Picks { order: Order::Random, seed, done: (0, 0) }
    }

    /// Rows that all steps up to this one take, at so many a step.
    pub fn taken(&self, step: usize, rows: usize) -> u64 {
        let steps = step.saturating_sub(self.done.0) as u64;
        self.done.1.saturating_add(steps.saturating_mul(rows as u64))
    }

    /// Where row `row` of the `rows` of a step lies, of `n` that lie behind each other (columns).
    pub fn row(&self, (step, rows): (u32, usize), row: usize, n: u64) -> u64 {
        match self.order {
            Order::Random => self.drawn(step, row, n),
            _in_turn => self.in_turn((step, rows), row, n),
        }
    }

    /// Where a row begins in `n` tokens: at any of them, or, in order, at one of the pieces of `seq` that
    /// they are cut into, each with the token behind it (what is over at the end is not read).
    pub fn token(&self, (step, rows): (u32, usize), row: usize, (n, seq): (u64, usize)) -> u64 {
        match self.order {
            Order::Random => self.drawn(step, row, n),
            _in_turn => self.in_turn((step, rows), row, pieces(n, seq)) * seq as u64,
        }
    }

    fn drawn(&self, step: u32, row: usize, n: u64) -> u64 {
        (Stream::new(self.seed, "data", step).uniform(row as u64) * n as f64) as u64
    }

    /// The number since training began of row `row` of the `rows` of a step.
    pub fn number(&self, (step, rows): (u32, usize), row: usize) -> u64 {
        self.taken((step as usize).saturating_sub(1), rows).saturating_add(row as u64)
    }

    fn in_turn(&self, of: (u32, usize), row: usize, n: u64) -> u64 {
        let at = self.number(of, row);
        let (epoch, at) = (at / n.max(1), at % n.max(1));
        match self.order {
            Order::Shuffled => shuffled(self.seed, epoch, at, n),
            Order::Random | Order::Sequential => at,
        }
    }
}

/// How many pieces of `seq` tokens and the token behind them there are in `n`; one if there are fewer.
pub fn pieces(n: u64, seq: usize) -> u64 {
    (n.saturating_sub(1) / (seq as u64).max(1)).max(1)
}

/// What stands at place `i` of 0..n in the order of an epoch: a Feistel network over as many bits as hold n,
/// an even number of them, through which what falls outside goes again (cycle walking; Black and Rogaway,
/// 2002, "Ciphers with arbitrary finite domains"). No table, whatever n is.
pub fn shuffled(seed: u64, epoch: u64, i: u64, n: u64) -> u64 {
    let half = (64 - n.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    let h = stream("data order") ^ seed;
    let key = [h as u32, (h >> 32) as u32];
    let mix = |x: u64, round: u32| {
        let words = philox([x as u32, round, epoch as u32, (epoch >> 32) as u32], key);
        u64::from(words[0]) & mask
    };
    let mut x = i;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..8 {
            (left, right) = (right, left ^ mix(right, round));
        }
        x = left << half | right;
        if x < n {
            return x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_has_every_row_once() {
        for n in [1u64, 2, 3, 5, 16, 17, 100, 1000] {
            let mut orders = vec![];
            for (seed, epoch) in [(1, 0), (1, 1), (2, 0)] {
                let order: Vec<u64> = (0..n).map(|i| shuffled(seed, epoch, i, n)).collect();
                let mut all = order.clone();
                all.sort_unstable();
                assert_eq!(all, (0..n).collect::<Vec<_>>(), "{n}");
                orders.push(order);
            }
            if n >= 16 {
                let in_place = |o: &[u64]| (0..n).filter(|&i| o[i as usize] == i).count();
                assert!(orders.iter().all(|o| in_place(o) < 8), "{n}");
                assert!(orders[0] != orders[1] && orders[0] != orders[2], "{n}");
            }
        }
        // As many as a file of 2^40 tokens has, and the most there can be.
        for n in [1 << 40, u64::MAX] {
            assert!(shuffled(3, 1 << 33, n - 1, n) < n);
        }
    }

    /// Every row comes at a place as often as another: over 24,000 epochs of 4 rows each of the 24 orders is
    /// there 1,000 times, give or take 5 standard deviations.
    #[test]
    fn orders_are_equally_likely() {
        let mut counts = std::collections::BTreeMap::<Vec<u64>, usize>::new();
        for epoch in 0..24_000 {
            let order = (0..4).map(|i| shuffled(7, epoch, i, 4)).collect();
            *counts.entry(order).or_default() += 1;
        }
        assert_eq!(counts.len(), 24);
        assert!(counts.values().all(|&n| (845..1155).contains(&n)), "{counts:?}");
    }

    #[test]
    fn rows_follow_each_other_over_steps_and_epochs() {
        let picks = Picks { order: Order::Sequential, seed: 0, done: (0, 0) };
        let all = |p: &Picks, steps: std::ops::RangeInclusive<u32>, rows| -> Vec<u64> {
            steps
                .flat_map(|s| (0..rows).map(move |r| (s, r)))
                .map(|(s, r)| p.row((s, rows), r, 5))
                .collect()
        };
        assert_eq!(all(&picks, 1..=3, 3), [0, 1, 2, 3, 4, 0, 1, 2, 3]);
        // Ten tokens are three pieces of three, each with the token behind it.
        let at = |r| picks.token((1, 4), r, (10, 3));
        assert_eq!([at(0), at(1), at(2), at(3)], [0, 3, 6, 0]);
        assert_eq!((pieces(9, 3), pieces(10, 3), pieces(1, 3), pieces(0, 3)), (2, 3, 1, 1));
        // With another number of rows behind step 2.
        let on = Picks { done: (2, picks.taken(2, 3)), ..picks };
        assert_eq!(all(&on, 3..=4, 2), [1, 2, 3, 4]);
        let shuffled = Picks { order: Order::Shuffled, ..picks };
        let mut epoch = all(&shuffled, 1..=5, 1);
        epoch.sort_unstable();
        assert_eq!(epoch, [0, 1, 2, 3, 4]);
    }
}
