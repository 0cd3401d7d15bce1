//! How a result is cut into parts that are made by themselves.

use std::ops::Range;

/// What a task that packs its rows, or its columns, does for each besides its tiles, in columns, or rows: as
/// much time as tiles of so many.
const PACKS: usize = 28;
/// The same for those it reads only.
const READS: usize = 6;
/// The part of a task that threads wait for the last one, in the mean: they are not equally fast.
const WAITS: usize = 16;

/// A range of `n` as one of so many ranges of whole units, but for the last unit; some are a unit longer.
pub(super) fn part(n: usize, pieces: usize, unit: usize, i: usize) -> Range<usize> {
    let at = |i: usize| (i * n.div_ceil(unit) / pieces.max(1) * unit).min(n);
    at(i)..at(i + 1)
}

/// Rows and columns, cut into parts.
pub(super) struct Parts {
    size: [usize; 2],
    unit: [usize; 2],
    pieces: [usize; 2],
}

impl Parts {
    /// The fewest parts, of so many rows and columns at most, which are whole units.
    pub fn fewest(size: [usize; 2], most: [usize; 2], unit: [usize; 2]) -> Parts {
        let pieces = [0, 1].map(|side| size[side].div_ceil(most[side]).max(1));
        Parts { size, unit, pieces }
    }

    /// Parts for so many threads, each of which packs its rows (`packs` is 0) or its columns (1): of those that
    /// are tried the ones that take the least time together.
    pub fn tasks(
        size: [usize; 2],
        most: [usize; 2],
        unit: [usize; 2],
        packs: usize,
        threads: usize,
    ) -> Parts {
        let least = Parts::fewest(size, most, unit);
        if threads <= 1 {
            return least;
        }
        let units = [0, 1].map(|side| size[side].div_ceil(unit[side]));
        let again = if packs == 0 { [READS, PACKS] } else { [PACKS, READS] };
        // Of the thread whose share has the fewest of the last columns, which may be narrower.
        let time = |pieces: [usize; 2]| {
            let cut = |side: usize, i| part(size[side], pieces[side], unit[side], i).len();
            let rows = units[0].div_ceil(pieces[0]) * unit[0] + again[0];
            let widest = units[1].div_ceil(pieces[1]) * unit[1];
            let tasks = (pieces[0] * pieces[1]).div_ceil(threads);
            let spared = (widest - cut(1, pieces[1] - 1)) * (tasks / pieces[1]);
            let task = rows * (widest + again[1]);
            tasks * task - rows * spared + task / WAITS
        };
        let rows = least.pieces[0]..(least.pieces[0] + threads).min(units[0] + 1);
        let with = |rows: usize| {
            // As few pieces of columns as can be, or more so that all threads have as many tasks.
            let even = least.pieces[1].next_multiple_of(threads / gcd(threads, rows));
            [least.pieces[1], even.min(units[1])].map(|cols| [rows, cols])
        };
        let pieces = rows.flat_map(with).min_by_key(|&pieces| time(pieces));
        Parts { pieces: pieces.unwrap_or(least.pieces), ..least }
    }

    pub fn count(&self) -> usize {
        self.pieces[0] * self.pieces[1]
    }

    /// Rows and columns of a part; those of the same rows follow each other.
    pub fn part(&self, i: usize) -> [Range<usize>; 2] {
        let at = [i / self.pieces[1], i % self.pieces[1]];
        [0, 1].map(|side| part(self.size[side], self.pieces[side], self.unit[side], at[side]))
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of tasks that pack their rows, and of those that pack their columns.
    const MOST: [[usize; 2]; 2] = [[144, 1536], [2064, 256]];

    /// Every element is in one part, no part is larger than it may be, and all begin at whole units.
    #[test]
    fn parts_are_all_of_a_result() {
        for size in [[1, 1], [2048, 512], [13, 1408], [4100, 50], [70, 257], [12, 32]] {
            for (threads, unit) in [(1, [12, 32]), (2, [12, 32]), (3, [6, 16]), (16, [12, 256])] {
                for packs in [0, 1] {
                    let parts = Parts::tasks(size, MOST[packs], unit, packs, threads);
                    let mut seen = vec![0; size[0] * size[1]];
                    for [rows, cols] in (0..parts.count()).map(|i| parts.part(i)) {
                        assert!(rows.start % unit[0] == 0 && cols.start % unit[1] == 0);
                        assert!(rows.len() <= MOST[packs][0] && cols.len() <= MOST[packs][1]);
                        rows.for_each(|r| cols.clone().for_each(|c| seen[r * size[1] + c] += 1));
                    }
                    assert!(seen.iter().all(|&n| n == 1), "{size:?} {threads} {unit:?}");
                }
            }
        }
    }

    /// Threads have almost equal shares, as `team` gives them, and do not cut what they pack too often.
    #[test]
    fn threads_have_equal_shares() {
        for size in [[2048, 512], [2048, 1408], [1024, 768], [1024, 50257], [256, 4096], [8192, 96]]
        {
            for threads in [2, 3, 4, 6, 8, 16] {
                let parts = Parts::tasks(size, MOST[1], [12, 32], 1, threads);
                let share =
                    |t: usize| parts.count() * t / threads..parts.count() * (t + 1) / threads;
                let work = |i: usize| parts.part(i).map(|x| x.len());
                let made = |t: usize| share(t).map(|i| work(i)[0] * work(i)[1]).sum::<usize>();
                let packs = |t: usize| share(t).map(|i| work(i)[1] * PACKS).sum::<usize>();
                let all = size[0] * size[1];
                let most = (0..threads).map(made).max().unwrap_or(0);
                assert!(most * threads * 20 <= all * 23, "{size:?} {threads} {:?}", parts.pieces);
                let packs: usize = (0..threads).map(packs).sum();
                assert!(packs * 4 <= all, "{size:?} {threads} {:?}", parts.pieces);
            }
        }
        // Few rows are cut by columns, also where an epilogue takes wide blocks.
        for (size, threads, count) in [([12, 512], 3, 2), ([12, 768], 4, 3), ([16, 1536], 16, 12)] {
            assert_eq!(Parts::tasks(size, MOST[0], [12, 256], 0, threads).count(), count);
        }
        assert_eq!(Parts::tasks([16, 96], MOST[1], [12, 32], 1, 8).count(), 6);
        // One part for each thread would do, but one that is slower would be waited for.
        assert_eq!(Parts::tasks([2048, 512], MOST[1], [12, 32], 1, 2).pieces, [2, 2]);
    }
}
