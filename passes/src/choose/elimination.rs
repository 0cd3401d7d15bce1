//! Min-sum elimination: a variable goes, and its tables become one over the others in them, with
//! the least sum over its ways.
//!
//! Where that would look at more entries than allowed, the tables are dealt into groups that stay
//! within, and the variable goes from each: mini-buckets (Dechter and Rish, "Mini-Buckets:
//! A General Scheme for Bounded Inference", 2003). What remains is then a lower bound.

use std::collections::BTreeSet;
use std::rc::Rc;

use super::NEVER;

/// Entries of a table, as scores, row-major.
pub(super) type Scores = Rc<Vec<u128>>;

/// In which order variables go. Holds for all entries.
pub(super) struct EliminationOrder {
    ways: Vec<usize>,
    /// Variables of each table: those given, then those made.
    scopes: Vec<Vec<usize>>,
    steps: Vec<EliminationStep>,
    /// Tables that remain.
    pub rest: Vec<usize>,
    /// Whether no step has two groups.
    pub exact: bool,
}

/// Eliminates a variable.
struct EliminationStep {
    var: usize,
    groups: Vec<JoinedTables>,
}

/// Tables that become one.
struct JoinedTables {
    tables: Vec<usize>,
    made: usize,
}

impl EliminationStep {
    fn tables(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().flat_map(|g| g.tables.iter().copied())
    }
}

/// What is known while an order is made.
struct Making<'a> {
    order: EliminationOrder,
    /// Tables of each variable that are not yet used up.
    of: Vec<Vec<usize>>,
    /// Variables to eliminate: entries to look at, and variable.
    queue: BTreeSet<(usize, usize)>,
    size: Vec<usize>,
    goes: &'a [bool],
    limit: usize,
}

impl EliminationOrder {
    /// An order for variables with `ways` and tables over `scopes`, in which those that `goes` says
    /// are eliminated, the one with the fewest entries to look at first, then by index.
    pub fn new(
        ways: &[usize],
        scopes: Vec<Vec<usize>>,
        goes: &[bool],
        limit: usize,
    ) -> EliminationOrder {
        let mut of = vec![vec![]; ways.len()];
        for (t, scope) in scopes.iter().enumerate() {
            scope.iter().for_each(|&v| of[v].push(t));
        }
        let (given, ways) = (scopes.len(), ways.to_vec());
        let order = EliminationOrder { ways, scopes, steps: vec![], rest: vec![], exact: true };
        let size = vec![0; of.len()];
        let mut making = Making { order, of, queue: BTreeSet::new(), size, goes, limit };
        (0..goes.len()).for_each(|v| making.measure(v));
        while let Some((_, var)) = making.queue.pop_first() {
            making.eliminate(var);
        }
        let mut order = making.order;
        order.sort(given);
        order
    }

    /// Makes the variable that stays longest the last of each table made, so that entries which are
    /// looked at together lie together.
    fn sort(&mut self, given: usize) {
        let mut gone: Vec<usize> = (0..self.ways.len()).map(|v| self.steps.len() + v).collect();
        for (i, step) in self.steps.iter().enumerate() {
            gone[step.var] = i;
        }
        self.scopes[given..].iter_mut().for_each(|s| s.sort_by_key(|&v| gone[v]));
        let mut left = vec![true; self.scopes.len()];
        self.steps.iter().flat_map(EliminationStep::tables).for_each(|t| left[t] = false);
        self.rest = (0..left.len()).filter(|&t| left[t]).collect();
    }

    /// Variables of a table.
    pub fn scope(&self, table: usize) -> &[usize] {
        &self.scopes[table]
    }

    /// Eliminates: appends to the tables given the tables made.
    pub fn run(&self, tables: &mut Vec<Scores>) {
        for step in &self.steps {
            for group in &step.groups {
                let inputs = group.tables.iter();
                let inputs = inputs.map(|&t| (&tables[t][..], &self.scopes[t][..]));
                let made = self.least(Some(step.var), inputs, &self.scopes[group.made]);
                tables.push(Rc::new(made));
            }
        }
    }

    /// The least sum of tables with their scopes over the ways of a variable, if any, by those in
    /// `scope`.
    fn least<'a>(
        &self,
        var: Option<usize>,
        tables: impl Iterator<Item = (&'a [u128], &'a [usize])>,
        scope: &[usize],
    ) -> Vec<u128> {
        let dims: Vec<usize> = scope.iter().map(|&v| self.ways[v]).collect();
        let inputs = tables.map(|(entries, of)| Input {
            entries,
            own: var.map_or(0, |v| self.stride(of, v)),
            strides: scope.iter().map(|&v| self.stride(of, v)).collect(),
            at: 0,
        });
        least(inputs.collect(), var.map_or(1, |v| self.ways[v]), &dims)
    }

    /// How far apart in a table entries are for one way and the next; 0 if it is not in there.
    fn stride(&self, scope: &[usize], var: usize) -> usize {
        let after = scope.iter().position(|&v| v == var).map(|i| &scope[i + 1..]);
        after.map_or(0, |vars| vars.iter().map(|&v| self.ways[v]).product())
    }

    /// Chooses for the variables eliminated, the last one first, given the ways of those that
    /// remain: the smallest of the ways with the least sum.
    pub fn trace(&self, tables: &[Scores], choice: &mut [usize]) {
        for step in self.steps.iter().rev() {
            choice[step.var] = 0;
            let rows = step.tables().map(|t| {
                let scope = &self.scopes[t];
                let at: usize = scope.iter().map(|&v| self.stride(scope, v) * choice[v]).sum();
                (&tables[t][at..], self.stride(scope, step.var))
            });
            let rows: Vec<_> = rows.collect();
            let sum = |way: usize| {
                rows.iter().fold(0, |n: u128, (row, stride)| (n + row[way * stride]).min(NEVER))
            };
            choice[step.var] = (0..self.ways[step.var]).min_by_key(|&way| sum(way)).unwrap_or(0);
        }
    }

    /// For each way of a variable eliminated the least sum of all there is. `outside` says for a
    /// table that remains what the others add, by its variables; for none, what all add. Exact
    /// orders alone.
    pub fn with_each(
        &self,
        tables: &[Scores],
        var: usize,
        outside: impl Fn(Option<usize>) -> Vec<u128>,
    ) -> Vec<u128> {
        let step = self.steps.iter().position(|s| s.var == var).expect("a variable eliminated");
        self.descend(tables, Some(step), None, &[var], outside)
    }

    /// The least sum of all but one of the tables, by its variables. As `with_each`.
    pub fn without(
        &self,
        tables: &[Scores],
        table: usize,
        outside: impl Fn(Option<usize>) -> Vec<u128>,
    ) -> Vec<u128> {
        let step = self.steps.iter().position(|s| s.tables().any(|t| t == table));
        self.descend(tables, step, Some(table), &self.scopes[table], outside)
    }

    /// The least sum of all but the table `but`, by the variables `onto` of the step that uses it:
    /// from what remains down to that step, each time all but the table that leads there.
    fn descend<'a>(
        &'a self,
        tables: &[Scores],
        mut step: Option<usize>,
        mut but: Option<usize>,
        mut onto: &'a [usize],
        outside: impl Fn(Option<usize>) -> Vec<u128>,
    ) -> Vec<u128> {
        let mut user = vec![None; self.scopes.len()];
        for (i, step) in self.steps.iter().enumerate() {
            step.tables().for_each(|t| user[t] = Some(i));
        }
        let mut path = vec![];
        while let Some(i) = step {
            let made = self.steps[i].groups.first().map(|g| g.made);
            path.push((i, but, onto, made));
            let scope = made.map_or(&[][..], |t| &self.scopes[t]);
            (step, but, onto) = (made.and_then(|t| user[t]), made, scope);
        }
        let mut sums = outside(but);
        for (i, but, onto, made) in path.into_iter().rev() {
            let others = self.steps[i].tables().filter(|&t| Some(t) != but);
            let mut inputs: Vec<(&[u128], &[usize])> =
                others.map(|t| (&tables[t][..], &self.scopes[t][..])).collect();
            inputs.push((&sums, made.map_or(&[], |t| &self.scopes[t])));
            sums = self.project(inputs, onto);
        }
        sums
    }

    /// The least sum of tables by the variables `onto`.
    fn project(&self, inputs: Vec<(&[u128], &[usize])>, onto: &[usize]) -> Vec<u128> {
        let all: BTreeSet<usize> = inputs.iter().flat_map(|i| i.1).copied().collect();
        let mut go: Vec<usize> = all.into_iter().filter(|v| !onto.contains(v)).collect();
        let var = go.pop();
        let mut scope = [&go, onto].concat();
        let mut sums = self.least(var, inputs.into_iter(), &scope);
        while let Some(var) = go.pop() {
            let smaller = [&go, onto].concat();
            sums = self.least(Some(var), std::iter::once((&sums[..], &scope[..])), &smaller);
            scope = smaller;
        }
        sums
    }
}

impl Making<'_> {
    /// The variables of some tables, sorted, and how many entries they have together.
    fn union(&self, tables: &[usize]) -> (Vec<usize>, usize) {
        let all = tables.iter().flat_map(|&t| &self.order.scopes[t]);
        let mut vars: Vec<usize> = all.copied().collect();
        vars.sort_unstable();
        vars.dedup();
        let size = vars.iter().fold(1, |n: usize, &v| n.saturating_mul(self.order.ways[v]));
        (vars, size)
    }

    fn measure(&mut self, var: usize) {
        if self.goes[var] {
            self.queue.remove(&(self.size[var], var));
            self.size[var] = self.union(&self.of[var]).1;
            self.queue.insert((self.size[var], var));
        }
    }

    fn eliminate(&mut self, var: usize) {
        let tables = std::mem::take(&mut self.of[var]);
        let (mut groups, mut near) = (vec![], BTreeSet::new());
        for tables in self.groups(tables) {
            let made = self.order.scopes.len();
            let mut scope = self.union(&tables).0;
            scope.retain(|&v| v != var);
            for &v in &scope {
                self.of[v].retain(|t| !tables.contains(t));
                self.of[v].push(made);
            }
            near.extend(scope.iter().copied());
            self.order.scopes.push(scope);
            groups.push(JoinedTables { tables, made });
        }
        self.order.exact &= groups.len() < 2;
        self.order.steps.push(EliminationStep { var, groups });
        near.into_iter().for_each(|v| self.measure(v));
    }

    /// Deals tables into groups within the limit, large ones first. One that is beyond it by itself
    /// is a group.
    fn groups(&self, mut tables: Vec<usize>) -> Vec<Vec<usize>> {
        if self.union(&tables).1 > self.limit {
            tables.sort_by_key(|&t| (usize::MAX - self.union(&[t]).1, t));
            let mut groups: Vec<Vec<usize>> = vec![];
            for t in tables {
                let fits = |g: &&mut Vec<usize>| {
                    self.union(&[g.as_slice(), &[t]].concat()).1 <= self.limit
                };
                match groups.iter_mut().find(fits) {
                    Some(group) => group.push(t),
                    None => groups.push(vec![t]),
                }
            }
            return groups;
        }
        if tables.is_empty() { vec![] } else { vec![tables] }
    }
}

/// A table in a group: how far apart its entries are for the variable that goes, and for those of
/// the table that is made.
struct Input<'a> {
    entries: &'a [u128],
    own: usize,
    strides: Vec<usize>,
    /// Where the row begins.
    at: usize,
}

/// The least sum of `inputs` over the ways of the variable that goes, by those of the others.
fn least<'a>(mut inputs: Vec<Input<'a>>, ways: usize, dims: &[usize]) -> Vec<u128> {
    let (&row, outer) = dims.split_last().unwrap_or((&1, &[]));
    let mut made = vec![NEVER; row * outer.iter().product::<usize>()];
    let step = |i: &Input| i.strides.last().copied().unwrap_or(0);
    // Tables without the last variable add the same along a row.
    inputs.sort_by_key(|i| step(i) != 0);
    let flat = inputs.partition_point(|i| step(i) == 0);
    let mut place = vec![0; outer.len()];
    let mut sums = vec![0; row];
    for out in made.chunks_exact_mut(row) {
        for way in 0..ways {
            let add = |n: u128, i: &Input| (n + i.entries[i.at + way * i.own]).min(NEVER);
            let same = inputs[..flat].iter().fold(0, add);
            if same == NEVER {
                continue;
            }
            let entries = |i: &Input<'a>| &i.entries[i.at + way * i.own..];
            match &inputs[flat..] {
                [] => out.iter_mut().for_each(|o| *o = same.min(*o)),
                [a] if step(a) == 1 => {
                    let sums = entries(a).iter().map(|a| same + a);
                    out.iter_mut().zip(sums).for_each(|(o, s)| *o = s.min(*o));
                }
                [a, b] if step(a) == 1 && step(b) == 1 => {
                    let sums = entries(a).iter().zip(entries(b)).map(|(a, b)| same + a + b);
                    out.iter_mut().zip(sums).for_each(|(o, s)| *o = s.min(*o));
                }
                rows => {
                    sums.fill(same);
                    for row in rows {
                        let all = entries(row).iter().step_by(step(row));
                        sums.iter_mut().zip(all).for_each(|(s, &x)| *s = s.saturating_add(x));
                    }
                    out.iter_mut().zip(&sums).for_each(|(o, &s)| *o = s.min(*o));
                }
            }
        }
        for d in (0..outer.len()).rev() {
            place[d] += 1;
            let around = place[d] == outer[d];
            for i in &mut inputs {
                i.at =
                    if around { i.at - (outer[d] - 1) * i.strides[d] } else { i.at + i.strides[d] };
            }
            if !around {
                break;
            }
            place[d] = 0;
        }
    }
    made
}
