//! The least time within a budget of memory.
//!
//! Memory gets a price, and the price that just keeps the budget is looked for: two choices, one
//! over the budget and one within it, say at which price they are even; either that is it, or there
//! is a better choice at that price, which takes the place of one. Each price gives a bound, the
//! least score less the price of the budget (Everett, "Generalized Lagrange Multiplier Method",
//! 1963). What the bound leaves open, the first units of one choice and the last of the other close
//! up to a unit's share.

use std::collections::BTreeMap;

use super::units::{Plan, Solved};
use super::{Cost, Lambda, Problem};

/// Solves after the first, at most.
const SOLVES: usize = 13;

/// An answer of [`within`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BudgetAnswer {
    /// The way of each variable.
    pub ways: Vec<usize>,
    /// What they cost. Not allowed if nothing was found that is.
    pub cost: Cost,
    /// Whether that is within the budget. If not, it is the least memory found: with `exact`, the
    /// least there is, if its time is below 2^57.
    pub fits: bool,
    /// Picoseconds: no choice within the budget takes less.
    pub bound: u64,
    /// The price of memory that gives the bound.
    pub lambda: Lambda,
    /// Whether no table passed the limit.
    pub exact: bool,
    /// How often the problem was solved.
    pub solves: usize,
}

/// A choice of little time with at most `budget` bytes, and a bound on all of these; the bound is
/// met wherever some price of memory makes the best choice the best of all. At most 14 solves.
#[must_use]
pub fn within(problem: &Problem, budget: u64) -> BudgetAnswer {
    let mut search = BudgetSearch { plan: Plan::new(problem), budget, bound: None, solves: 0 };
    let free = search.solve(Lambda::ZERO);
    if search.fits(free.cost) {
        return search.choice((free.ways, free.cost));
    }
    let small = search.solve(Lambda::MEMORY);
    if !search.fits(small.cost) {
        let least = if small.cost.memory <= free.cost.memory { small } else { free };
        return search.choice((least.ways, least.cost));
    }
    let (over, under) = search.narrow(free, small);
    let cuts = [(&over, &under), (&under, &over)];
    let cuts = cuts.into_iter().filter_map(|(a, b)| cut(problem, &a.ways, &b.ways, budget));
    let best = cuts.chain([(under.ways.clone(), under.cost)]);
    let best = best.min_by_key(|(_, c)| (c.time, c.memory)).expect("one fits");
    search.choice(best)
}

struct BudgetSearch<'a> {
    plan: Plan<'a>,
    budget: u64,
    bound: Option<(u64, Lambda)>,
    solves: usize,
}

impl BudgetSearch<'_> {
    fn solve(&mut self, lambda: Lambda) -> Solved {
        let solved = self.plan.solve(lambda);
        let time = lambda.time(solved.bound, self.budget);
        if self.bound.is_none_or(|(bound, _)| time > bound) {
            self.bound = Some((time, lambda));
        }
        self.solves += 1;
        solved
    }

    fn fits(&self, cost: Cost) -> bool {
        cost.allowed() && cost.memory <= self.budget
    }

    /// From a choice over the budget and one within it to two that are even at a price at which
    /// none is better, or as near to that as the solves go.
    fn narrow(&mut self, mut over: Solved, mut under: Solved) -> (Solved, Solved) {
        while self.solves <= SOLVES && over.cost.time < under.cost.time {
            let time = under.cost.time - over.cost.time;
            let lambda = Lambda::new(time, over.cost.memory - under.cost.memory);
            let even = lambda.score(over.cost).min(lambda.score(under.cost));
            let new = self.solve(lambda);
            let done = new.score >= even;
            if !self.fits(new.cost) {
                over = new;
            } else if new.cost.time < under.cost.time {
                under = new;
            }
            if done {
                break;
            }
        }
        (over, under)
    }

    fn choice(&self, (ways, cost): (Vec<usize>, Cost)) -> BudgetAnswer {
        let (bound, lambda) = self.bound.expect("solved once");
        let (fits, exact) = (self.fits(cost), self.plan.exact());
        BudgetAnswer { ways, cost, fits, bound, lambda, exact, solves: self.solves }
    }
}

/// What changes from one cut to the next. Costs of what is not allowed are counted.
#[derive(Clone, Copy, Default)]
struct CutSum {
    time: i128,
    memory: i128,
    never: i128,
}

impl CutSum {
    fn add(&mut self, sign: i128, cost: Cost) {
        if cost.allowed() {
            self.time += sign * i128::from(cost.time);
            self.memory += sign * i128::from(cost.memory);
        } else {
            self.never += sign;
        }
    }
}

/// The first units of `a` and the others of `b`: of all cuts within the budget the one of least
/// time, then of least memory, then the first.
pub(super) fn cut(
    problem: &Problem,
    a: &[usize],
    b: &[usize],
    budget: u64,
) -> Option<(Vec<usize>, Cost)> {
    let units: BTreeMap<usize, usize> = problem.units.iter().map(|&u| (u, 0)).collect();
    let units: BTreeMap<usize, usize> = units.into_keys().zip(0..).collect();
    let unit: Vec<usize> = problem.units.iter().map(|u| units[u]).collect();
    // Whether a variable takes its way from `a` if the first `n` units do.
    let way = |v: usize, n: usize| if unit[v] < n { a[v] } else { b[v] };
    let mut changes = vec![CutSum::default(); units.len() + 1];
    for (t, table) in problem.tables.iter().enumerate() {
        let cost = |n| problem.pool[table.costs][problem.entry(t, |v| way(v, n))];
        changes[0].add(1, cost(0));
        if table.vars.iter().all(|&v| a[v] == b[v]) {
            continue;
        }
        let of = || table.vars.iter().map(|&v| unit[v]);
        let (first, last) = (of().min().unwrap_or(0), of().max().unwrap_or(0));
        for n in first..=last {
            changes[n + 1].add(1, cost(n + 1));
            changes[n + 1].add(-1, cost(n));
        }
    }
    let mut sum = CutSum::default();
    let cuts = changes.iter().enumerate().filter_map(|(n, c)| {
        let (time, memory) = (sum.time + c.time, sum.memory + c.memory);
        sum = CutSum { time, memory, never: sum.never + c.never };
        (sum.never == 0 && memory <= i128::from(budget)).then_some((time, memory, n))
    });
    let (.., n) = cuts.min()?;
    let ways: Vec<usize> = (0..a.len()).map(|v| way(v, n)).collect();
    let cost = problem.cost(&ways);
    cost.allowed().then_some((ways, cost))
}
