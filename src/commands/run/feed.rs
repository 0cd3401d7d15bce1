//! Where the tokens of a run come from.

use super::Run;
use crate::data::Data;
use shardc_frontends::{Batch, read_batch};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::RoleKind;
use shardc_ir::plan::{Plan, Settings};

/// Tokens of a step.
pub enum Feed {
    Data(Data),
    Batch(Batch),
}

impl Feed {
    pub fn open(how: &Run, s: &Settings) -> Result<Feed> {
        Ok(match (&how.batch, &how.data) {
            (Some(file), _) => {
                let b = read_batch(file)?;
                if (b.rows, b.seq) != (s.global_batch, s.seq) {
                    return Err(Diag::new(
                        "batch",
                        format!(
                            "the batch is [{}, {}], the plan takes [{}, {}]",
                            b.rows, b.seq, s.global_batch, s.seq
                        ),
                    )
                    .at(file.display().to_string())
                    .help(format!("compile with --global-batch {} --seq {}", b.rows, b.seq)));
                }
                b.check(s.vocab)?;
                Feed::Batch(b)
            }
            (None, Some(spec)) => {
                Feed::Data(Data::open("--data", spec, how.tokenizer.as_deref(), s.vocab)?)
            }
            (None, None) => Feed::Data(Data::Random { vocab: s.vocab }),
        })
    }

    /// What tells these data from others, as far as it is known without reading all.
    pub fn mark(&self) -> String {
        match self {
            Feed::Data(d) => d.mark(),
            Feed::Batch(b) => format!("of {} rows, {} tokens", b.rows, b.input_ids.len()),
        }
    }

    /// Tokens and targets of a step, from 1; no targets where nothing reads them.
    pub fn batch(&self, plan: &Plan, step: usize) -> Result<(Vec<i32>, Vec<i32>)> {
        let s = &plan.settings;
        let (ids, targets) = match self {
            Feed::Data(d) => d.batch(s.seed, step as u32, s.global_batch, s.seq)?,
            Feed::Batch(b) => (b.input_ids.clone(), b.targets()),
        };
        let mut ports = plan.module.funcs.iter().flat_map(|f| &f.args);
        let read = ports.any(|a| a.is(RoleKind::Input, "targets"));
        Ok((ids, if read { targets } else { vec![] }))
    }
}
