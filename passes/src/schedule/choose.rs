//! The schedule that the options ask for.

use super::{Named, make};
use crate::options::{Options, Order};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::PIPELINE;
use shardc_ir::schedule::{Schedule, parse_csv};

/// The schedule of a compilation: named, or read from a file and compared with the mesh.
///
/// # Errors
/// `schedule-name`, `schedule`, and those of [`super::legal`] and [`parse_csv`].
pub fn chosen(o: &Options) -> Result<Schedule> {
    let (ranks, microbatches) = (o.axis(PIPELINE), o.microbatches());
    match &o.schedule {
        Order::Named(name) => {
            let named = Named::parse(name)?;
            make(named, ranks, o.chunks.unwrap_or(named.default_chunks()), microbatches)
        }
        Order::Csv(text) => {
            let s = parse_csv(text)?;
            let (p, m) = (s.ranks.len(), s.microbatches);
            if (p, m) == (ranks, microbatches) {
                return Ok(s);
            }
            Err(Diag::new("schedule", format!("the file has {p} ranks and {m} microbatches"))
                .rule(format!("here: pp={ranks}, {microbatches} microbatches"))
                .help(format!("use pp={p} and a global batch of {m} microbatches per rank")))
        }
    }
}
