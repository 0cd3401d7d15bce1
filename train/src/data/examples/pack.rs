//! Which examples lie in which row. An epoch's examples are dealt into windows, in the order of the epoch; those of a
//! window are packed into rows, best fit with the longest first. So what a row has follows from the seed, the epoch and
//! the window, and no more than a window is looked at to make one.

use crate::data::order::{Order, shuffled};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// Examples of a window.
const WINDOW: usize = 1024;

/// What decides the order of examples.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deal {
    pub seed: u64,
    pub order: Order,
    /// Tokens of a row into which examples are packed; without, each has a row of its own.
    pub pack: Option<usize>,
}

/// Rows of examples of these lengths.
#[derive(Default)]
pub struct Rows {
    known: Mutex<Known>,
}

/// What was found out.
#[derive(Default)]
struct Known {
    deal: Option<Deal>,
    /// The number of the first row of each epoch, as far as they are known.
    epochs: Vec<u64>,
    /// An epoch, and the number in it of the first row of each window, with that behind the last.
    windows: Option<(u64, Vec<u64>)>,
    /// A window of an epoch, and its rows.
    rows: Option<(u64, u64, Vec<Vec<usize>>)>,
}

impl Rows {
    /// The examples of row `row` since training began, and of which epoch it is.
    ///
    /// # Panics
    /// If there are no examples.
    pub fn row(&self, lens: &dyn Lens, deal: Deal, row: u64) -> (u64, Vec<usize>) {
        let n = lens.count() as u64;
        if deal.pack.is_none() {
            return (row / n, vec![place(deal, row / n, row % n, n)]);
        }
        let mut known = self.known(deal);
        while known.epochs.last().is_none_or(|&begin| begin <= row) {
            let epoch = known.epochs.len() as u64;
            let begin = known.begin(lens, deal, epoch);
            known.epochs.push(begin);
        }
        let epoch = known.epochs.partition_point(|&begin| begin <= row) as u64 - 1;
        let within = row - known.epochs[epoch as usize];
        let windows = known.windows(lens, deal, epoch);
        let window = windows.partition_point(|&first| first <= within) as u64 - 1;
        let at = (within - windows[window as usize]) as usize;
        if known.rows.as_ref().is_none_or(|r| (r.0, r.1) != (epoch, window)) {
            known.rows = Some((epoch, window, packed(lens, deal, epoch, window)));
        }
        let rows = known.rows.as_ref().map(|r| r.2[at].clone());
        (epoch, rows.unwrap_or_default())
    }

    /// The number of the first row of an epoch: so many rows the epochs before it have.
    pub fn begin(&self, lens: &dyn Lens, deal: Deal, epoch: u64) -> u64 {
        match deal.pack {
            None => epoch.saturating_mul(lens.count() as u64),
            Some(_) => {
                let mut known = self.known(deal);
                while known.epochs.len() as u64 <= epoch {
                    let next = known.epochs.len() as u64;
                    let begin = known.begin(lens, deal, next);
                    known.epochs.push(begin);
                }
                known.epochs[epoch as usize]
            }
        }
    }

    fn known(&self, deal: Deal) -> std::sync::MutexGuard<'_, Known> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.deal != Some(deal) {
            *known = Known { deal: Some(deal), ..Known::default() };
        }
        known
    }
}

impl Known {
    /// Where an epoch begins, of which that before it is known.
    fn begin(&mut self, lens: &dyn Lens, deal: Deal, epoch: u64) -> u64 {
        match epoch.checked_sub(1) {
            None => 0,
            Some(before) => {
                let rows = self.windows(lens, deal, before).last().copied().unwrap_or(0);
                self.epochs[before as usize] + rows
            }
        }
    }

    fn windows(&mut self, lens: &dyn Lens, deal: Deal, epoch: u64) -> &[u64] {
        if self.windows.as_ref().is_none_or(|w| w.0 != epoch) {
            let mut firsts = vec![0];
            for window in 0..lens.count().div_ceil(WINDOW) as u64 {
                let rows = packed(lens, deal, epoch, window).len() as u64;
                firsts.push(firsts[window as usize] + rows);
            }
            self.windows = Some((epoch, firsts));
        }
        self.windows.as_ref().map_or(&[], |w| &w.1)
    }
}

/// Lengths of examples, in tokens.
pub trait Lens {
    /// How many examples there are.
    fn count(&self) -> usize;
    /// The tokens of one.
    fn of(&self, example: usize) -> usize;
}

/// The example at a place of an epoch.
fn place(deal: Deal, epoch: u64, at: u64, n: u64) -> usize {
    match deal.order {
        Order::Shuffled => shuffled(deal.seed, epoch, at, n) as usize,
        Order::Random | Order::Sequential => at as usize,
    }
}

/// The rows of a window, in their order.
fn packed(lens: &dyn Lens, deal: Deal, epoch: u64, window: u64) -> Vec<Vec<usize>> {
    let n = lens.count() as u64;
    let from = window * WINDOW as u64;
    let all: Vec<usize> =
        (from..(from + WINDOW as u64).min(n)).map(|at| place(deal, epoch, at, n)).collect();
    let rows = best_fit(&all, lens, deal.pack.unwrap_or(usize::MAX));
    let count = rows.len() as u64;
    let seed = deal.seed ^ 0x7061_636b; // Another order than that of examples.
    let order = |i: u64| match deal.order {
        Order::Shuffled => shuffled(seed, epoch << 24 ^ window, i, count),
        Order::Random | Order::Sequential => i,
    };
    (0..count).map(|i| rows[order(i) as usize].clone()).collect()
}

/// Examples in rows of `seq` tokens: the longest first, each where it leaves least room (best-fit decreasing). Of equal
/// ones the first comes first.
fn best_fit(all: &[usize], lens: &dyn Lens, seq: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(lens.of(all[i])), i));
    let mut rows: Vec<Vec<usize>> = vec![];
    // Room that is left, and the row.
    let mut room = BTreeSet::<(usize, usize)>::new();
    for i in order {
        let len = lens.of(all[i]).min(seq);
        let (left, row) = match room.range((len, 0)..).next().copied() {
            Some(found) => {
                room.remove(&found);
                found
            }
            None => {
                rows.push(vec![]);
                (seq, rows.len() - 1)
            }
        };
        rows[row].push(all[i]);
        room.insert((left - len, row));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::rng::Stream;

    impl Lens for Vec<usize> {
        fn count(&self) -> usize {
            self.len()
        }
        fn of(&self, example: usize) -> usize {
            self[example]
        }
    }

    /// Lengths from 1 to about 400, many of them short.
    fn lengths(n: usize) -> Vec<usize> {
        let s = Stream::new(1, "lengths", 0);
        (0..n).map(|i| 1 + (400.0 * s.uniform(i as u64).powi(3)) as usize).collect()
    }

    #[test]
    fn an_epoch_has_every_example_once_and_no_row_is_too_long() {
        for n in [1, 2, 1023, 1024, 1025, 3000] {
            let lens = lengths(n);
            for order in [Order::Shuffled, Order::Sequential] {
                let (deal, rows) = (Deal { seed: 3, order, pack: Some(400) }, Rows::default());
                let mut seen_rows = vec![];
                for epoch in 0..3 {
                    let (from, to) =
                        (rows.begin(&lens, deal, epoch), rows.begin(&lens, deal, epoch + 1));
                    let mut all = vec![];
                    for row in from..to {
                        let (e, examples) = rows.row(&lens, deal, row);
                        assert_eq!(e, epoch);
                        assert!(
                            (1..=400).contains(&examples.iter().map(|&i| lens[i]).sum::<usize>())
                        );
                        seen_rows.push((row, examples.clone()));
                        all.extend(examples);
                    }
                    all.sort_unstable();
                    assert_eq!(all, (0..n).collect::<Vec<_>>());
                }
                // From anywhere, in any order, the same.
                let again = Rows::default();
                for (row, examples) in seen_rows.iter().rev().step_by(97) {
                    assert_eq!(&again.row(&lens, deal, *row).1, examples);
                }
            }
        }
    }

    /// Of short examples nearly all of a row is filled.
    #[test]
    fn rows_are_full() {
        let lens = lengths(20_000);
        let (rows, deal) =
            (Rows::default(), Deal { seed: 0, order: Order::Shuffled, pack: Some(512) });
        let n = rows.begin(&lens, deal, 1);
        let full = lens.iter().sum::<usize>() as f64 / (n as f64 * 512.0);
        assert!(full > 0.98, "{full}");
    }
}
