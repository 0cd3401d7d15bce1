//! What is chosen from, and what it costs.

use shardc_ir::maps::HashMap;
use std::sync::Arc;

use super::Cost;

/// A variable of a [`Problem`]: the n-th has the n-th place in every choice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Var(pub(super) usize);

impl Var {
    /// Its place in a choice.
    #[must_use]
    pub fn index(self) -> usize {
        self.0
    }
}

/// The entries of a table of a [`Problem`], which other tables may share.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Costs(usize);

/// Variables and tables. A choice is a way for every variable; it costs the sum of what the tables
/// say. Sums are exact while time and memory of a choice are below 2^62; more is not allowed.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Most entries that elimination may look at for one variable, its ways included. Beyond, the
    /// answer is a local optimum, with a bound.
    pub limit: usize,
    /// Number of ways of each variable.
    pub(super) ways: Vec<usize>,
    /// Unit of each variable.
    pub(super) units: Vec<usize>,
    pub(super) tables: Vec<Table>,
    /// Entries of tables, equal ones once.
    pub(super) pool: Vec<Arc<[Cost]>>,
    known: HashMap<Arc<[Cost]>, usize>,
}

#[derive(Clone, Debug)]
pub(super) struct Table {
    pub vars: Vec<usize>,
    /// Place of its entries in the pool, row-major.
    pub costs: usize,
}

impl Default for Problem {
    fn default() -> Problem {
        Problem {
            limit: 1 << 22,
            ways: vec![],
            units: vec![],
            tables: vec![],
            pool: vec![],
            known: HashMap::default(),
        }
    }
}

impl Problem {
    /// Without variables, and with a limit of 2^22 entries.
    #[must_use]
    pub fn new() -> Problem {
        Problem::default()
    }

    /// Adds a variable with ways `0..ways`. Units are the links of a chain, say layers: what is
    /// used inside one alone is eliminated there, and once for all equal units. Panics if there is
    /// no way.
    pub fn var(&mut self, ways: usize, unit: usize) -> Var {
        assert!(ways > 0, "a variable without a way");
        self.ways.push(ways);
        self.units.push(unit);
        Var(self.ways.len() - 1)
    }

    /// Adds what ways of `vars` cost together: an entry for each, the last variable's way counting
    /// fastest. Panics if there is no variable, one twice, one unknown, or another number of
    /// entries than of combinations.
    pub fn table(&mut self, vars: &[Var], costs: Vec<Cost>) -> Costs {
        let id = self.known.get(costs.as_slice()).copied().unwrap_or_else(|| {
            let costs: Arc<[Cost]> = costs.into();
            self.known.insert(Arc::clone(&costs), self.pool.len());
            self.pool.push(costs);
            self.pool.len() - 1
        });
        self.again(vars, Costs(id));
        Costs(id)
    }

    /// Adds a table with the entries of another one of this problem. Panics as [`Problem::table`].
    pub fn again(&mut self, vars: &[Var], costs: Costs) {
        assert!(!vars.is_empty(), "a table of nothing");
        for (i, v) in vars.iter().enumerate() {
            assert!(!vars[..i].contains(v), "a variable twice in a table");
        }
        let vars: Vec<usize> = vars.iter().map(|v| v.0).collect();
        let entries: usize = vars.iter().map(|&v| self.ways[v]).product();
        assert_eq!(entries, self.pool[costs.0].len(), "entries of a table");
        self.tables.push(Table { vars, costs: costs.0 });
    }

    /// What a choice costs. Panics if a variable has no way, or not the one that it says.
    #[must_use]
    pub fn cost(&self, choice: &[usize]) -> Cost {
        let of = |t: usize| self.pool[self.tables[t].costs][self.entry(t, |v| choice[v])];
        (0..self.tables.len()).map(of).fold(Cost::ZERO, Cost::plus)
    }

    /// Place of an entry of a table, by the way of each of its variables.
    pub(super) fn entry(&self, table: usize, way: impl Fn(usize) -> usize) -> usize {
        let vars = &self.tables[table].vars;
        vars.iter().fold(0, |at, &v| {
            debug_assert!(way(v) < self.ways[v], "a way that a variable lacks");
            at * self.ways[v] + way(v)
        })
    }
}
