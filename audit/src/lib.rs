//! What a configuration of other software does to gradients: over which axes each is summed and how it is scaled, by types
//! of our own, beside that software's own rules; where both differ is a finding.
//!
//! Arguments become a config.json and options ([`megatron`], [`foreign`]), whose layout is propagated ([`mod@derive`]). Rules are a table
//! ([`rules`]), each with its source. [`compare`] sets one against the other, [`show`] prints it.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod check;
pub mod compare;
pub mod derive;
pub mod foreign;
pub mod forks;
pub mod megatron;
pub mod page;
pub mod rules;
pub mod show;
mod sizes;
pub mod words;

use compare::{Finding, Row};
use derive::Derived;
use rules::{Given, Table};
use serde_json::Value as Json;
use shardc_compiler::planner::target::estimated;
use shardc_cost::device::Device;
use shardc_cost::held::Software;
use shardc_cost::layout::Layout;
use shardc_ir::diag::{Diag, Result};
use shardc_passes::options::Options;
use std::collections::BTreeSet;

/// A configuration that was read.
pub struct Job {
    pub software: &'static str,
    /// Of the model, as transformers has it.
    pub config: Json,
    pub options: Options,
    /// What rules ask for.
    pub given: Given,
    pub states: States,
    /// As prices see it.
    pub layout: Layout,
    /// Whose memory is known by formulas.
    pub held: Software,
    /// Classes of parameters that the family has and the configuration does not.
    pub absent: Vec<&'static str>,
    pub table: Table,
    /// The version whose rules hold; none: the newest.
    pub at: Option<Vec<u32>>,
    /// What was given and nothing is made of.
    pub not_modelled: Vec<String>,
    /// Parameters of whose gradients each rank of tp has a part; none: as types say.
    pub parts: Option<BTreeSet<String>>,
}

/// How optimizer states are shared out, and bytes of an element.
#[derive(Clone, Copy, Debug)]
pub struct States {
    /// What is sharded over ranks of data parallelism: 1 states, 2 gradients, 3 weights; 0: nothing.
    pub zero: u8,
    /// Copies of these shards.
    pub instances: usize,
    /// Of states, of a weight, of a gradient.
    pub bytes: usize,
    pub weight: usize,
    pub gradient: usize,
    /// Ranks of data parallelism, context parallelism included.
    pub data: usize,
}

/// What is said of a configuration.
pub struct Audit {
    pub job: Job,
    pub derived: Derived,
    pub rows: Vec<Row>,
    pub findings: Vec<Finding>,
    /// On a machine: its name, seconds of a step, bytes that a rank needs, and those that it has.
    pub price: Option<(String, f64, usize, usize)>,
}

/// Propagates the layout of a configuration, and compares it with the rules.
///
/// # Errors
/// Those of reading the model and of the passes.
pub fn audit(job: Job, place: &str, device: Option<&Device>) -> Result<Audit> {
    job.table.asks_for(&job.given)?;
    job.table.refuses(&job.given, job.at.as_deref(), (vec![], "or --with"), place)?;
    let mut derived = Derived::of(&job.config, place, &job.options)?;
    if let Some(parts) = &job.parts {
        let by_expert = job.given.size("ep") > 1.0;
        derived.sums_over_tp(parts, |p| by_expert && job.table.class(p) == Some("expert"));
    }
    let (rows, findings) = compare::compare(&job, &derived);
    let price = match (device, derived.facts) {
        (Some(d), Some(f)) => {
            let of = (&f, &derived.input);
            let (seconds, held) = estimated(job.held, of, &job.options, d, job.layout)?;
            Some((d.name.clone(), seconds, held, d.memory as usize))
        }
        _no_device => None,
    };
    Ok(Audit { job, derived, rows, findings, price })
}

/// Most ranks of a job.
const MOST_RANKS: usize = 1 << 20;

/// Refuses a number of ranks that no job has.
fn in_range(ranks: usize, place: &str) -> Result<()> {
    match (1..=MOST_RANKS).contains(&ranks) {
        true => Ok(()),
        false => Err(Diag::new("audit", format!("a job of {ranks} ranks"))
            .at(place.to_string())
            .rule(format!("the number of ranks is from 1 to {MOST_RANKS}"))
            .help("give --gpus N")),
    }
}
