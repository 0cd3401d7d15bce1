//! Rewrites a program into a cheaper one with the same results, by lines of algebra.
//!
//! Before:  `%s = add %p, %q` with `%p = all_reduce[tp] %a`, `%q = all_reduce[tp] %b`
//! After:   `%s = all_reduce[tp] %ab` with `%ab = add %a, %b  // sum-of-sums`
//! Assumes: verified; phase Source for [`RuleSet::Algebra`], Staged for [`RuleSet::Collectives`].
//! Leaves:  the phase as it was, every value that survives with its name and type.
//!
//! A function is cut into segments, the runs of nodes of one layer. Segments without a match cost a
//! look at their nodes; equal ones are saturated once, in an e-graph (Willsey et al., 2021), within
//! limits on nodes and rounds and without a clock. What is taken out of the e-graph must cost less
//! than what went in; ties go to the program as it was.

mod algebra;
mod apply;
mod attrs;
mod choose;
mod collectives;
mod graph;
mod layout;
pub mod orders;
pub mod pattern;
mod segment;
pub mod shifts;

pub use pattern::Line;

use choose::Solution;
use graph::Compiled;
use segment::Segment;
use shardc_ir::diag::Result;
use shardc_ir::func::{Func, Module};
use shardc_ir::hardware::Hardware;
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::Mesh;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Which tables of rules to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RuleSet {
    /// Algebra and layout of one device's mathematics, before propagation.
    Algebra,
    /// Collectives of per-rank programs, after differentiation.
    Collectives,
}

impl RuleSet {
    /// The lines of this set, in table order.
    pub fn lines(self) -> Vec<&'static Line> {
        match self {
            RuleSet::Algebra => algebra::RULES.iter().chain(layout::RULES).collect(),
            RuleSet::Collectives => collectives::RULES.iter().collect(),
        }
    }

    fn compiled(self) -> &'static Compiled {
        static ALGEBRA: LazyLock<Compiled> =
            LazyLock::new(|| Compiled::new(&RuleSet::Algebra.lines()));
        static COLLECTIVES: LazyLock<Compiled> =
            LazyLock::new(|| Compiled::new(&RuleSet::Collectives.lines()));
        match self {
            RuleSet::Algebra => &ALGEBRA,
            RuleSet::Collectives => &COLLECTIVES,
        }
    }
}

/// What a rewrite looked at and did.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Segments of all functions.
    pub segments: usize,
    /// Segments in which the left side of some line stands.
    pub matched: usize,
    /// Different ones among them, each saturated once.
    pub distinct: usize,
    /// Segments that became cheaper.
    pub rewritten: usize,
    /// How often each line held in an e-graph, whether or not it paid.
    pub fired: BTreeMap<&'static str, usize>,
}

/// Rewrites all functions of a module with the usual costs.
pub fn rewrite(m: &mut Module, rules: RuleSet) -> Result<Stats> {
    rewrite_with(m, rules, &Hardware::default())
}

/// Rewrites all functions of a module; functions are never mixed.
pub fn rewrite_with(m: &mut Module, rules: RuleSet, hw: &Hardware) -> Result<Stats> {
    let compiled = rules.compiled();
    let mut stats = Stats::default();
    let mut known = HashMap::default();
    let Module { mesh, funcs, .. } = m;
    for f in funcs {
        one(mesh, f, compiled, hw, &mut known, &mut stats);
    }
    Ok(stats)
}

/// Solutions of segments already seen, by their structure; `None` where nothing pays.
type Known = HashMap<Vec<u8>, Option<Solution>>;

fn one(
    mesh: &Mesh,
    f: &mut Func,
    rules: &Compiled,
    hw: &Hardware,
    known: &mut Known,
    stats: &mut Stats,
) {
    let facts = segment::Facts::new(f);
    stats.segments += facts.runs.len();
    let mut changes = vec![];
    for run in &facts.runs {
        if !rules.may_match(f, &facts, run) {
            continue;
        }
        stats.matched += 1;
        let s = Segment::new(f, &facts, run.clone());
        let key = s.key(mesh, f);
        if !known.contains_key(&key) {
            stats.distinct += 1;
            let solution = graph::saturate(mesh, f, &s, rules, &mut stats.fired)
                .and_then(|g| choose::choose(mesh, f, &s, &g, hw));
            known.insert(key.clone(), solution);
        }
        if known[&key].is_some() {
            stats.rewritten += 1;
            changes.push((s, key));
        }
    }
    let changes: Vec<(&Segment, &Solution)> =
        changes.iter().filter_map(|(s, k)| Some((s, known[k].as_ref()?))).collect();
    apply::apply(f, &changes);
}
