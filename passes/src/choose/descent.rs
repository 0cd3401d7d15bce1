//! Descent over pairs: both variables of a pair take their best ways, the others as they are, until
//! no pair gains.

use super::elimination::Scores;
use super::{NEVER, Problem};

/// The pairs of a problem.
pub(super) struct Descent<'a> {
    problem: &'a Problem,
    moves: Vec<Move>,
}

/// Two variables that share a table, or one that shares none.
struct Move {
    a: usize,
    b: Option<usize>,
    /// Tables of either, and the variables in them.
    tables: Vec<usize>,
    near: Vec<usize>,
}

/// Rounds over all pairs, at most. Each gains, or takes smaller ways; but there is no telling how
/// much.
const ROUNDS: usize = 100;

impl<'a> Descent<'a> {
    pub fn new(problem: &'a Problem) -> Descent<'a> {
        let mut of = vec![vec![]; problem.ways.len()];
        for (t, table) in problem.tables.iter().enumerate() {
            table.vars.iter().for_each(|&v| of[v].push(t));
        }
        let mut moves = vec![];
        for a in 0..of.len() {
            let near = |tables: &[usize]| {
                let all = tables.iter().flat_map(|&t| &problem.tables[t].vars).copied();
                sorted(all.collect())
            };
            let around = near(&of[a]);
            let alone = around.iter().all(|&v| v == a);
            let pairs = around.into_iter().filter(|&b| b > a).map(Some);
            for b in pairs.chain(alone.then_some(None)) {
                let others = b.map_or(&[][..], |b| &of[b]);
                let tables = sorted([&of[a], others].concat());
                moves.push(Move { a, b, near: near(&tables), tables });
            }
        }
        Descent { problem, moves }
    }

    /// The best, the first if several are, of what becomes of three starts: every variable's first
    /// way, the best way of each by itself, and `third`.
    pub fn best(&self, prices: &[Scores], third: Vec<usize>) -> Vec<usize> {
        let mut alone: Vec<Vec<u128>> = self.problem.ways.iter().map(|&n| vec![0; n]).collect();
        for table in &self.problem.tables {
            if let [v] = table.vars[..] {
                let sums = alone[v].iter_mut().zip(prices[table.costs].iter());
                sums.for_each(|(sum, x)| *sum = sum.saturating_add(*x));
            }
        }
        let starts = [vec![0; alone.len()], alone.iter().map(|sums| least(sums)).collect(), third];
        let ends = starts.map(|start| self.descend(prices, start));
        ends.into_iter().min_by_key(|end| self.score(prices, end)).expect("there are three")
    }

    /// More tables that forbid are worse, so that one after the other can be left.
    fn score(&self, prices: &[Scores], choice: &[usize]) -> (usize, u128) {
        let of = |(t, table): (usize, &super::problem::Table)| {
            prices[table.costs][self.problem.entry(t, |v| choice[v])]
        };
        self.problem.tables.iter().enumerate().map(of).fold((0, 0), |(never, sum), x| match x {
            NEVER => (never + 1, sum),
            x => (never, sum.saturating_add(x)),
        })
    }

    fn descend(&self, prices: &[Scores], mut choice: Vec<usize>) -> Vec<usize> {
        // When a variable last changed, and when a pair was last looked at.
        let (mut changed, mut seen) = (vec![1; choice.len()], vec![0; self.moves.len()]);
        let mut now = 1;
        for _ in 0..ROUNDS {
            let before = now;
            for (m, seen) in self.moves.iter().zip(&mut seen) {
                if m.near.iter().all(|&v| changed[v] <= *seen) {
                    continue;
                }
                let (a, b) = self.pair(prices, m, &choice);
                let new = [Some((m.a, a)), m.b.map(|v| (v, b))];
                let old = now;
                for (v, way) in new.into_iter().flatten() {
                    if choice[v] != way {
                        (choice[v], now) = (way, old + 1);
                        changed[v] = now;
                    }
                }
                *seen = now;
            }
            if now == before {
                break;
            }
        }
        choice
    }

    /// The best ways of a pair, the first if several are.
    fn pair(&self, prices: &[Scores], m: &Move, choice: &[usize]) -> (usize, usize) {
        let ways = &self.problem.ways;
        let (rows, columns) = (ways[m.a], m.b.map_or(1, |b| ways[b]));
        let (mut by_a, mut by_b) = (vec![0u128; rows], vec![0u128; columns]);
        let mut sums = vec![0u128; rows * columns];
        let plus = |sum: &mut u128, x: u128| *sum = sum.saturating_add(x);
        for &t in &m.tables {
            let table = &self.problem.tables[t];
            let entries = &prices[table.costs];
            let at = |a: usize, b: usize| {
                let way = |v| {
                    if v == m.a {
                        a
                    } else if Some(v) == m.b {
                        b
                    } else {
                        choice[v]
                    }
                };
                self.problem.entry(t, way)
            };
            let zero = at(0, 0);
            let down = if rows > 1 { at(1, 0) - zero } else { 0 };
            let along = if columns > 1 { at(0, 1) - zero } else { 0 };
            if along == 0 {
                (0..rows).for_each(|a| plus(&mut by_a[a], entries[zero + a * down]));
            } else if down == 0 {
                (0..columns).for_each(|b| plus(&mut by_b[b], entries[zero + b * along]));
            } else {
                for (a, sums) in sums.chunks_exact_mut(columns).enumerate() {
                    let row = entries[zero + a * down..].iter().step_by(along);
                    sums.iter_mut().zip(row).for_each(|(sum, &x)| plus(sum, x));
                }
            }
        }
        for (sums, &a) in sums.chunks_exact_mut(columns).zip(&by_a) {
            sums.iter_mut().zip(&by_b).for_each(|(sum, &b)| plus(sum, a.saturating_add(b)));
        }
        let best = least(&sums);
        (best / columns, best % columns)
    }
}

/// The first place of the least.
fn least(sums: &[u128]) -> usize {
    (0..sums.len()).min_by_key(|&i| sums[i]).unwrap_or(0)
}

fn sorted(mut all: Vec<usize>) -> Vec<usize> {
    all.sort_unstable();
    all.dedup();
    all
}
