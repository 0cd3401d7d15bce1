//! Rewrites a program into a cheaper one with the same results, by lines of algebra.
//!
//! Before:  `%s = add %p, %q` with `%p = all_reduce[tp] %a`, `%q = all_reduce[tp] %b`
//! After:   `%s = all_reduce[tp] %ab` with `%ab = add %a, %b  // sum-of-sums`
//! Assumes: verified; phase Source for [`RuleSet::Algebra`], Staged for [`RuleSet::Collectives`].
//! Leaves:  the phase as it was, every value that survives with its name and type.
//!
//! A function is cut into segments, the runs of nodes of one layer. Where ops stand with which a line
//! begins, equal ones are saturated once, in an e-graph, within limits on terms and rounds and without a
//! clock. What is taken out of the e-graph must cost less than what went in; ties go to the program as it
//! was.

#[macro_use]
mod line;
mod algebra;
mod apply;
mod attrs;
mod choose;
mod collectives;
mod families;
mod graph;
mod layout;
pub mod orders;
mod segment;
pub mod shifts;

pub use line::{Example, Expr, Id, Line};

use choose::Solution;
use graph::EGraph;
use line::Starts;
use segment::{Facts, Segment};
use shardc_ir::diag::Result;
use shardc_ir::func::Module;
use shardc_ir::hardware::Hardware;
use shardc_ir::maps::HashMap;
use std::collections::BTreeMap;
use std::rc::Rc;

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
        let tables: &[&'static [Line]] = match self {
            RuleSet::Algebra => &[algebra::SCALES, algebra::RULES, layout::RULES],
            RuleSet::Collectives => &[algebra::SCALES, collectives::RULES],
        };
        tables.iter().copied().flatten().collect()
    }
}

/// What a rewrite looked at and did.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Segments of all functions.
    pub segments: usize,
    /// Different ones among those in which a line may hold, each saturated once.
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
    let (lines, mut g) = (rules.lines(), EGraph::new(&m.mesh));
    let starts = Starts::of(&lines);
    let mut stats = Stats::default();
    // By segment: its cheaper form, if there is one.
    let mut known: HashMap<Segment, Option<Rc<Solution>>> = HashMap::default();
    for f in &mut m.funcs {
        let facts = Facts::new(f);
        stats.segments += facts.runs.len();
        let mut changes = vec![];
        for nodes in facts.runs.iter().filter(|r| starts.are_in(f, &facts.uses, r)) {
            let (segment, run) = Segment::new(f, &facts, nodes.clone(), &mut g.numbers);
            let solution = known.entry(segment).or_insert_with_key(|s| {
                stats.distinct += 1;
                let places = g.build(s);
                let any = g.saturate(&lines, &mut stats.fired);
                any.then(|| choose::choose(s, &g, &places, hw)).flatten().map(Rc::new)
            });
            changes.extend(solution.clone().map(|s| (run, s)));
        }
        stats.rewritten += changes.len();
        apply::apply(f, &changes);
    }
    Ok(stats)
}
