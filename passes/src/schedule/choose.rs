//! The schedule that the options ask for.

use super::{Named, legal, make, runs};
use crate::options::{Options, Order};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::PIPELINE;
use shardc_ir::schedule::{Schedule, parse_csv};

/// The flag that gives the least legal number of microbatches from here on, if that is what is wrong.
fn microbatch_flags(named: Named, chunks: usize, o: &Options) -> Option<String> {
    let (p, m) = (o.axis(PIPELINE), o.microbatches());
    let rows = o.microbatch_rows();
    let fits = (m + 1..=m.saturating_add(2 * p)).find(|&m| runs(named, p, chunks, m))?;
    Some(format!("{fits} microbatches are --global-batch {} here", fits * rows))
}

/// Refuses numbers with which the schedule that the options name does not run, before anything is made
/// for them.
///
/// # Errors
/// `schedule-name`, and those of [`super::legal`].
pub fn possible(o: &Options) -> Result<()> {
    let Order::Named(name) = &o.schedule else { return Ok(()) };
    let named = Named::parse(name)?;
    let chunks = o.chunks.unwrap_or(named.default_chunks());
    legal(named, o.axis(PIPELINE), chunks, o.microbatches()).map_err(|d| {
        let d = d.at(format!("--schedule {name}"));
        match microbatch_flags(named, chunks, o) {
            Some(flags) => d.help(flags),
            None => d,
        }
    })
}

/// The schedule of a compilation: named, or read from a file and compared with the mesh.
///
/// # Errors
/// `schedule-name`, `schedule`, and those of [`super::legal`] and [`parse_csv`].
pub fn chosen(o: &Options) -> Result<Schedule> {
    let (ranks, microbatches) = (o.axis(PIPELINE), o.microbatches());
    match &o.schedule {
        Order::Named(name) => {
            possible(o)?;
            let named = Named::parse(name)?;
            let chunks = o.chunks.unwrap_or(named.default_chunks());
            make(named, ranks, chunks, microbatches)
        }
        Order::Csv(text) => {
            let s = parse_csv(text)?;
            let (p, m) = (s.ranks.len(), s.microbatches);
            if let Some(v) = o.chunks.filter(|&v| p * v != s.owner.len()) {
                let n = s.owner.len();
                return Err(Diag::new("schedule", format!("the file has {n} stages on {p} ranks"))
                    .at(format!("--chunks {v}"))
                    .rule("the file says how many stages a rank has")
                    .help(format!("leave --chunks {v} out")));
            }
            if (p, m) == (ranks, microbatches) {
                return Ok(s);
            }
            Err(Diag::new("schedule", format!("the file has {p} ranks and {m} microbatches"))
                .rule(format!("here: pp={ranks}, {microbatches} microbatches"))
                .help(format!("use pp={p} and a global batch of {m} microbatches per rank")))
        }
    }
}
