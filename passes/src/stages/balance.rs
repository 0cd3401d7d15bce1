//! Balanced cuts: the linear partition problem by dynamic programming.

/// Cuts `costs` into as many runs as there are `speeds`, none empty, so that the largest
/// `cost / speed` of a run is least, and among those cuts the sum of its squares. Returns where runs
/// begin, and the end. Needs at least as many costs as speeds.
///
/// Dynamic programming over (run, end), O(runs · costs²).
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
    let time = |from: usize, to: usize, run: usize| (sums[to] - sums[from]) / speeds[run];
    let slowest = solve(costs.len(), speeds.len(), &|a, b, r| time(a, b, r), f64::max).0;
    let squares = |a: usize, b: usize, r: usize| {
        let t = time(a, b, r);
        if t > slowest { f64::INFINITY } else { t * t }
    };
    solve(costs.len(), speeds.len(), &squares, |x, y| x + y).1
}

/// The cut of `n` items into `runs` runs of least cost, where `join` adds a run's cost to the rest's.
fn solve(
    n: usize,
    runs: usize,
    cost: &dyn Fn(usize, usize, usize) -> f64,
    join: fn(f64, f64) -> f64,
) -> (f64, Vec<usize>) {
    let mut best = vec![vec![f64::INFINITY; n + 1]; runs + 1];
    let mut from = vec![vec![0; n + 1]; runs + 1];
    best[0][0] = 0.0;
    for r in 1..=runs {
        for end in r..=n - (runs - r) {
            for start in r - 1..end {
                let x = join(best[r - 1][start], cost(start, end, r - 1));
                // Ties go to the later start: earlier stages hold more live microbatches.
                if x <= best[r][end] {
                    (best[r][end], from[r][end]) = (x, start);
                }
            }
        }
    }
    let mut cuts = vec![n];
    for r in (1..=runs).rev() {
        cuts.push(from[r][cuts[cuts.len() - 1]]);
    }
    cuts.reverse();
    (best[runs][n], cuts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slowest(costs: &[u64], speeds: &[f64], cuts: &[usize]) -> f64 {
        let run = |r: usize| costs[cuts[r]..cuts[r + 1]].iter().sum::<u64>() as f64 / speeds[r];
        (0..speeds.len()).map(run).fold(0.0, f64::max)
    }

    /// Every cut of up to 8 items, compared with the one found.
    #[test]
    fn no_cut_is_better() {
        let costs = [5u64, 1, 1, 7, 2, 2, 9, 3];
        for speeds in [vec![1.0; 2], vec![1.0; 3], vec![1.0, 0.5, 1.0, 2.0], vec![1.0; 8]] {
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
}
