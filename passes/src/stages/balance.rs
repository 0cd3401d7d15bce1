//! Balanced cuts: the linear partition problem.

use shardc_ir::steps;
use std::ops::RangeInclusive;

/// Cuts `costs` into as many runs as there are `speeds`, none empty, so that the largest
/// `cost / speed` of a run is least, and among those cuts the sum of its squares. Returns where runs
/// begin, and the end. Needs at least as many costs as speeds.
///
/// The largest is found by bisection: whether no run need be longer is asked by the places where runs can end. The
/// squares are summed by dynamic programming over (run, end), where a run begins no further back than such a run
/// may, and ends where the others can do the rest.
///
/// ```
/// # use shardc_passes::stages::balance::cut;
/// assert_eq!(cut(&[1, 1, 1, 1, 1, 1], &[1.0, 2.0]), [0, 2, 6]);
/// ```
pub fn cut(costs: &[u64], speeds: &[f64]) -> Vec<usize> {
    let mut sums = vec![0.0];
    for &c in costs {
        sums.push(sums[sums.len() - 1] + c as f64);
    }
    let p = CutItems { sums: &sums, speeds };
    let slowest = p.slowest();
    p.least_squares(slowest)
}

/// What is cut: items by the sums of their costs, and the speeds of the runs.
struct CutItems<'a> {
    sums: &'a [f64],
    speeds: &'a [f64],
}

impl CutItems<'_> {
    fn items(&self) -> usize {
        self.sums.len() - 1
    }

    /// Of the items from one to before another, in a run.
    fn time(&self, from: usize, to: usize, run: usize) -> f64 {
        (self.sums[to] - self.sums[from]) / self.speeds[run]
    }

    /// The furthest end of a run that begins here and takes no longer than this.
    fn furthest(&self, from: usize, run: usize, most: f64) -> usize {
        let some =
            self.sums[from..].partition_point(|s| (s - self.sums[from]) / self.speeds[run] <= most);
        from + some.saturating_sub(1)
    }

    /// The least time of the slowest run. Times are not negative: their bits are in order.
    fn slowest(&self) -> f64 {
        let most = (0..self.speeds.len()).map(|r| self.time(0, self.items(), r));
        let (mut low, mut high) = (0, most.fold(0.0, f64::max).to_bits());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.fits(f64::from_bits(middle)) {
                true => high = middle,
                false => low = middle + 1,
            }
        }
        f64::from_bits(high)
    }

    /// Whether there is a cut in which no run takes longer than this.
    fn fits(&self, most: f64) -> bool {
        let (n, runs) = (self.items(), self.speeds.len());
        let heaviest = self.sums.windows(2).map(|w| w[1] - w[0]).fold(0.0, f64::max);
        let mut ends: Vec<RangeInclusive<usize>> = vec![0..=0];
        for run in 0..runs {
            // An item may be too long for this run alone.
            let whole = heaviest / self.speeds[run] <= most;
            let last = n - (runs - 1 - run);
            let mut next: Vec<RangeInclusive<usize>> = vec![];
            for starts in ends {
                let (mut from, end) = (*starts.start(), (*starts.end()).min(last - 1));
                while from <= end {
                    let fits = |s: &usize| self.time(*s, *s + 1, run) <= most;
                    let to = match whole {
                        true => end,
                        false => (from..=end).take_while(fits).last().unwrap_or(from),
                    };
                    steps::add("balance", if whole { 1 } else { to + 1 - from });
                    // Runs that begin at from, from + 1, … to end anywhere between the first and the last end.
                    if whole || fits(&from) {
                        let reach = from + 1..=self.furthest(to, run, most).min(last);
                        match next.last_mut().filter(|l| *reach.start() <= l.end() + 1) {
                            Some(l) => *l = *l.start()..=*reach.end().max(l.end()),
                            None => next.push(reach),
                        }
                    }
                    from = to + 1;
                }
            }
            ends = next;
        }
        ends.last().is_some_and(|l| *l.end() == n)
    }

    /// The cut with the least sum of squares of its times, of which none is more than this.
    fn least_squares(&self, most: f64) -> Vec<usize> {
        let (n, runs) = (self.items(), self.speeds.len());
        // Where each run may end at the latest, and where it must at the earliest, for the others to do the rest.
        let mut latest = vec![0];
        for run in 0..runs {
            latest.push(self.furthest(latest[run], run, most).min(n - (runs - 1 - run)));
        }
        let mut earliest = vec![n; runs + 1];
        for run in (0..runs).rev() {
            let end = earliest[run + 1];
            let first =
                self.sums.partition_point(|s| (self.sums[end] - s) / self.speeds[run] > most);
            earliest[run] = first.max(run);
        }
        let mut best = vec![Some(0.0)];
        let mut from: Vec<Vec<usize>> = vec![];
        for run in 0..runs {
            // Of ends from `earliest[run + 1]` on that can be reached: the least sum, which may be too large for a
            // number, and where the run begins.
            let ends = earliest[run + 1]..=latest[run + 1];
            let mut least: Vec<Option<(f64, usize)>> = vec![None; ends.clone().count()];
            for (own, end) in least.iter_mut().zip(ends) {
                let starts = earliest[run]..=latest[run].min(end - 1);
                for start in starts.rev() {
                    steps::add("balance", 1);
                    let t = self.time(start, end, run);
                    if t > most {
                        break;
                    }
                    let Some(before) = best[start - earliest[run]] else { continue };
                    let x = before + t * t;
                    // Ties go to the later start: earlier stages hold more live microbatches.
                    if own.is_none_or(|o| x < o.0) {
                        *own = Some((x, start));
                    }
                }
            }
            best = least.iter().map(|x| x.map(|x| x.0)).collect();
            from.push(least.into_iter().map(|x| x.map_or(0, |x| x.1)).collect());
        }
        let mut cuts = vec![n];
        for run in (0..runs).rev() {
            cuts.push(from[run][cuts[cuts.len() - 1] - earliest[run + 1]]);
        }
        cuts.reverse();
        cuts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::rng::Stream;

    fn slowest(costs: &[u64], speeds: &[f64], cuts: &[usize]) -> f64 {
        let run = |r: usize| costs[cuts[r]..cuts[r + 1]].iter().sum::<u64>() as f64 / speeds[r];
        (0..speeds.len()).map(run).fold(0.0, f64::max)
    }

    /// Every cut of up to 8 items, compared with the one found.
    #[test]
    fn no_cut_is_better() {
        let costs = [5u64, 1, 1, 7, 2, 2, 9, 3];
        let usual = [vec![1.0; 2], vec![1.0; 3], vec![1.0, 0.5, 1.0, 2.0], vec![1.0; 8]];
        // Squares of times, and times, that are no numbers any more.
        let slow = [vec![1e-300, 1.0], vec![1.0, 1e-160, 1.0], vec![5e-324, 1.0], vec![5e-324; 2]];
        for speeds in usual.into_iter().chain(slow) {
            let found = cut(&costs, &speeds);
            let got = slowest(&costs, &speeds, &found);
            let mut least = f64::INFINITY;
            for mask in 0u32..1 << 7 {
                let mut cuts = vec![0];
                cuts.extend((0..7).filter(|i| mask >> i & 1 == 1).map(|i| i as usize + 1));
                cuts.push(8);
                if cuts.len() == speeds.len() + 1 {
                    least = least.min(slowest(&costs, &speeds, &cuts));
                }
            }
            assert_eq!(got, least, "{speeds:?}: {found:?}");
        }
    }

    #[test]
    fn a_slower_rank_gets_less() {
        let equal = cut(&[1; 12], &[1.0; 3]);
        assert_eq!(equal, [0, 4, 8, 12]);
        let slow = cut(&[1; 12], &[1.0, 0.5, 1.0]);
        assert!(slow[2] - slow[1] < 4, "{slow:?}");
    }

    /// The definition: all starts of all runs, for the slowest run and then for the squares.
    fn by_definition(costs: &[u64], speeds: &[f64]) -> Vec<usize> {
        let mut sums = vec![0.0];
        costs.iter().for_each(|&c| sums.push(sums[sums.len() - 1] + c as f64));
        let time = |a: usize, b: usize, r: usize| (sums[b] - sums[a]) / speeds[r];
        let solve = |cost: &dyn Fn(usize, usize, usize) -> f64, join: fn(f64, f64) -> f64| {
            let (n, runs) = (costs.len(), speeds.len());
            let mut best = vec![vec![(f64::INFINITY, 0); n + 1]; runs + 1];
            best[0][0] = (0.0, 0);
            for r in 1..=runs {
                for end in r..=n - (runs - r) {
                    for start in r - 1..end {
                        let x = join(best[r - 1][start].0, cost(start, end, r - 1));
                        if x <= best[r][end].0 {
                            best[r][end] = (x, start);
                        }
                    }
                }
            }
            let mut cuts = vec![n];
            (1..=runs).rev().for_each(|r| cuts.push(best[r][cuts[cuts.len() - 1]].1));
            cuts.reverse();
            (best[runs][n].0, cuts)
        };
        let slowest = solve(&time, f64::max).0;
        let squares = |a: usize, b: usize, r: usize| match time(a, b, r) {
            t if t > slowest => f64::INFINITY,
            t => t * t,
        };
        solve(&squares, |x, y| x + y).1
    }

    #[test]
    fn cuts_are_those_of_the_definition() {
        for seed in 0..400 {
            let s = Stream::new(11, "cuts", seed);
            let at = |k: u64, n: usize| (s.uniform(k) * n as f64) as usize;
            let n = 1 + at(0, 30);
            let runs = 1 + at(1, n);
            // Many alike, as layers are; some that cost nothing.
            let costs: Vec<u64> =
                (0..n as u64).map(|i| [0, 1, 7, 7, 7, 10, 30][at(2 + i, 7)]).collect();
            let speed =
                |r: u64| [1.0, 1.0, 0.5, 0.3, 2.0][at(100 + r, if seed % 2 == 0 { 1 } else { 5 })];
            let speeds: Vec<f64> = (0..runs as u64).map(speed).collect();
            assert_eq!(
                cut(&costs, &speeds),
                by_definition(&costs, &speeds),
                "{costs:?} {speeds:?}"
            );
        }
    }

    #[test]
    fn steps_grow_as_items_and_runs() {
        let of = |n: usize, runs: usize| {
            let mut costs = vec![10; n];
            (costs[0], costs[n - 1]) = (3, 25);
            steps::of(|| cut(&costs, &vec![1.0; runs])).1["balance"] as f64
        };
        for (few, many) in
            [((512, 16), (4096, 16)), ((4096, 16), (4096, 128)), ((512, 64), (4096, 64))]
        {
            let [few, many] = [few, many].map(|(n, runs)| of(n, runs));
            assert!(many <= few * 8f64.powf(1.1), "{few} steps, and {many} of 8 times the work");
        }
    }
}
