//! Elimination over a chain of units, of which equal ones are eliminated once.
//!
//! A table belongs to the last unit it touches. A variable whose tables all belong to its own unit
//! goes inside that; the others are the seams of the chain, and go after.

use shardc_ir::maps::HashMap;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::descent::Descent;
use super::elimination::{EliminationOrder, Scores};
use super::{Cost, Lambda, NEVER, Problem, Var};

/// An answer of [`solve`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Solved {
    /// The way of each variable.
    pub ways: Vec<usize>,
    /// What they cost. Not allowed if nothing was found that is.
    pub cost: Cost,
    /// The score of the cost.
    pub score: u128,
    /// No choice scores less.
    pub bound: u128,
    /// Whether the bound is the score for sure: no table passed the limit.
    pub exact: bool,
    /// Different units, each of which was eliminated once.
    pub kinds: usize,
}

/// The choice of least score. Linear in the number of units if tables join neighbours alone.
/// Ties: no variable could take a smaller way at the same score, the others as they are.
///
/// If a table would pass the limit: the best local optimum of three starts, and the bound of
/// mini-buckets.
#[must_use]
pub fn solve(problem: &Problem, lambda: Lambda) -> Solved {
    Plan::new(problem).solve(lambda)
}

/// For each way of a variable the least score of a choice with it, [`super::NEVER`] if none is
/// allowed. None if a table would pass the limit. Panics if the problem lacks the variable.
#[must_use]
pub fn best_with(problem: &Problem, lambda: Lambda, var: Var) -> Option<Vec<u128>> {
    assert!(var.0 < problem.ways.len(), "a variable of another problem");
    Plan::new(problem).marginal(lambda, var.0)
}

/// How a problem is solved, whatever memory costs.
pub(super) struct Plan<'a> {
    problem: &'a Problem,
    units: Vec<EqualUnit>,
    classes: Vec<UnitClass>,
    /// Over the seams.
    chain: EliminationOrder,
    /// The seams, and their place in the chain.
    seams: Vec<usize>,
    place: Vec<Option<usize>>,
    /// Where elimination is not exact.
    descent: Option<Descent<'a>>,
}

struct EqualUnit {
    class: usize,
    /// Its variables, then those of units before that its tables touch.
    vars: Vec<usize>,
}

/// What equal units share.
struct UnitClass {
    order: EliminationOrder,
    /// Place in the pool of the entries of each table.
    costs: Vec<usize>,
}

/// What makes units equal; variables by their place in the unit.
#[derive(PartialEq, Eq, Hash)]
struct UnitKey {
    ways: Vec<usize>,
    inner: Vec<bool>,
    scopes: Vec<Vec<usize>>,
    costs: Vec<usize>,
}

impl<'a> Plan<'a> {
    /// By units; where that passes the limit, all variables in one chain if that does not.
    pub fn new(problem: &'a Problem) -> Plan<'a> {
        let mut plan = Plan::with(problem, true);
        if !plan.exact() {
            let whole = Plan::with(problem, false);
            plan = if whole.exact() { whole } else { plan };
        }
        if !plan.exact() {
            plan.descent = Some(Descent::new(problem));
        }
        plan
    }

    /// Without units, every variable is a seam.
    fn with(problem: &'a Problem, units: bool) -> Plan<'a> {
        let mut of_unit: BTreeMap<usize, (Vec<usize>, Vec<usize>)> = BTreeMap::new();
        for (v, &unit) in problem.units.iter().enumerate() {
            of_unit.entry(unit).or_default().0.push(v);
        }
        let mut inner = vec![units; problem.ways.len()];
        for (t, table) in problem.tables.iter().enumerate() {
            let home = table.vars.iter().map(|&v| problem.units[v]).max().unwrap_or(0);
            of_unit.entry(home).or_default().1.push(t);
            table.vars.iter().for_each(|&v| inner[v] &= problem.units[v] == home);
        }
        let (mut units, mut classes, mut known) = (vec![], vec![], HashMap::default());
        let (mut seams, mut place) = (vec![], vec![None; inner.len()]);
        for (own, tables) in of_unit.into_values() {
            for &v in own.iter().filter(|&&v| !inner[v]) {
                place[v] = Some(seams.len());
                seams.push(v);
            }
            let (vars, key) = key(problem, own, &tables, &inner);
            let class = *known.entry(key).or_insert_with_key(|k| {
                let order =
                    EliminationOrder::new(&k.ways, k.scopes.clone(), &k.inner, problem.limit);
                classes.push(UnitClass { order, costs: k.costs.clone() });
                classes.len() - 1
            });
            units.push(EqualUnit { class, vars });
        }
        let scopes = units.iter().flat_map(|u: &EqualUnit| {
            let UnitClass { order, .. } = &classes[u.class];
            let seam = |&v: &usize| place[u.vars[v]].expect("what remains is a seam");
            order.rest.iter().map(move |&t| order.scope(t).iter().map(seam).collect())
        });
        let ways: Vec<usize> = seams.iter().map(|&v| problem.ways[v]).collect();
        let chain =
            EliminationOrder::new(&ways, scopes.collect(), &vec![true; ways.len()], problem.limit);
        Plan { problem, units, classes, chain, seams, place, descent: None }
    }

    pub fn exact(&self) -> bool {
        self.chain.exact && self.classes.iter().all(|c| c.order.exact)
    }

    pub fn solve(&self, lambda: Lambda) -> Solved {
        let prices = self.prices(lambda);
        let (inside, chain) = self.eliminate(&prices);
        let mut ways = vec![0; self.problem.ways.len()];
        self.trace(&inside, &chain, &mut ways);
        let bound = self.remains(&chain, None);
        if let Some(descent) = &self.descent {
            ways = descent.best(&prices, ways);
        }
        let cost = self.problem.cost(&ways);
        let (score, exact) = (lambda.score(cost), self.exact());
        Solved { ways, cost, score, bound, exact, kinds: self.classes.len() }
    }

    fn marginal(&self, lambda: Lambda, var: usize) -> Option<Vec<u128>> {
        let (inside, chain) = self.exact().then(|| self.eliminate(&self.prices(lambda)))?;
        let remains = |but| vec![self.remains(&chain, but)];
        if let Some(seam) = self.place[var] {
            return Some(self.chain.with_each(&chain, seam, remains));
        }
        let mut before = 0;
        for EqualUnit { class, vars } in &self.units {
            let order = &self.classes[*class].order;
            if let Some(v) = vars.iter().position(|&v| v == var) {
                // Tables of the chain are what remains of the units, in order.
                return Some(order.with_each(&inside[*class], v, |but| match but {
                    Some(but) => {
                        let nth = order.rest.iter().position(|&t| t == but);
                        let table = before + nth.expect("a table that remains");
                        self.chain.without(&chain, table, remains)
                    }
                    None => remains(None),
                }));
            }
            before += order.rest.len();
        }
        unreachable!("every variable has a unit")
    }

    /// The scores of all entries of the pool.
    fn prices(&self, lambda: Lambda) -> Vec<Scores> {
        let price = |costs: &[Cost]| Rc::new(costs.iter().map(|&c| lambda.score(c)).collect());
        self.problem.pool.iter().map(|costs| price(costs)).collect()
    }

    /// All tables, of each class and of the chain.
    fn eliminate(&self, prices: &[Scores]) -> (Vec<Vec<Scores>>, Vec<Scores>) {
        let inside = self.classes.iter().map(|class| {
            let mut tables = class.costs.iter().map(|&c| Rc::clone(&prices[c])).collect();
            class.order.run(&mut tables);
            tables
        });
        let inside: Vec<Vec<Scores>> = inside.collect();
        let rest = self.units.iter().flat_map(|u| {
            self.classes[u.class].order.rest.iter().map(|&t| Rc::clone(&inside[u.class][t]))
        });
        let mut chain = rest.collect();
        self.chain.run(&mut chain);
        (inside, chain)
    }

    /// The sum of what remains of the chain, `but` for one table.
    fn remains(&self, chain: &[Scores], but: Option<usize>) -> u128 {
        let others = self.chain.rest.iter().filter(|&&t| Some(t) != but);
        others.fold(0, |n, &t| (n + chain[t][0]).min(NEVER))
    }

    fn trace(&self, inside: &[Vec<Scores>], chain: &[Scores], ways: &mut [usize]) {
        let mut seams = vec![0; self.seams.len()];
        self.chain.trace(chain, &mut seams);
        for unit in &self.units {
            let seam = |&v: &usize| self.place[v].map_or(0, |p| seams[p]);
            let mut local: Vec<usize> = unit.vars.iter().map(seam).collect();
            self.classes[unit.class].order.trace(&inside[unit.class], &mut local);
            unit.vars.iter().zip(local).for_each(|(&v, way)| ways[v] = way);
        }
    }
}

/// The variables of a unit, and what makes it equal to others. `own` are in it, `tables` its own.
fn key(
    problem: &Problem,
    own: Vec<usize>,
    tables: &[usize],
    inner: &[bool],
) -> (Vec<usize>, UnitKey) {
    let scopes = || tables.iter().map(|&t| &problem.tables[t].vars);
    let mut vars = own;
    let mut others: Vec<usize> = scopes().flatten().copied().collect();
    others.retain(|v| vars.binary_search(v).is_err());
    others.sort_unstable();
    others.dedup();
    let count = vars.len();
    vars.extend(&others);
    let local = |v: &usize| match vars[..count].binary_search(v) {
        Ok(i) => i,
        Err(_) => count + others.binary_search(v).expect("a variable of the unit's tables"),
    };
    let key = UnitKey {
        ways: vars.iter().map(|&v| problem.ways[v]).collect(),
        inner: vars.iter().map(|&v| inner[v]).collect(),
        scopes: scopes().map(|s| s.iter().map(local).collect()).collect(),
        costs: tables.iter().map(|&t| problem.tables[t].costs).collect(),
    };
    (vars, key)
}
