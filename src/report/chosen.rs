//! What a plan was compiled with, in a line, as every report says it.

use serde::Serialize;
use shardc_ir::plan::Mode;
use shardc_passes::options::{Optimizer, Options};
use std::fmt;

/// The options without which no figure of a plan can be read.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Chosen {
    pub mode: Mode,
    pub dtype: &'static str,
    /// Of what trains: the element type of gradients, the optimizer, the ZeRO stage, and what is recomputed.
    pub training: Option<Training>,
    pub sequence_parallel: bool,
    /// Of pipelines.
    pub schedule: Option<String>,
    pub transport: &'static str,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Training {
    pub grad_dtype: &'static str,
    pub optimizer: &'static str,
    pub zero: u8,
    pub recompute: String,
}

/// Columns of a line.
const WIDTH: usize = 80;

impl Chosen {
    pub fn of(o: &Options) -> Chosen {
        let training = || Training {
            grad_dtype: o.grad_dtype.name(),
            optimizer: match o.optimizer {
                Optimizer::AdamW { .. } => "AdamW",
                Optimizer::Sgd => "SGD",
            },
            zero: o.zero,
            recompute: o.recompute.to_string(),
        };
        Chosen {
            mode: o.mode,
            dtype: o.dtype.name(),
            training: (o.mode == Mode::Train).then(training),
            sequence_parallel: o.sp,
            schedule: (o.axis("pp") > 1).then(|| o.schedule.name().to_string()),
            transport: o.transport.name(),
        }
    }

    /// As a line of a report, with a word before it, or as many as it takes.
    pub fn line(&self) -> String {
        let said = self.to_string();
        let mut out = String::from("with  ");
        let mut width = out.len();
        for part in said.split_inclusive(';') {
            let part = part.trim();
            if width + 1 + part.len() > WIDTH {
                out.push_str("\n      ");
                width = 6;
            }
            out.push(' ');
            out.push_str(part);
            width += 1 + part.len();
        }
        out + "\n"
    }
}

/// `bf16, gradients f32; AdamW; ZeRO-1; sequence parallel; recompute elementwise; 1f1b; nccl`.
impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.dtype)?;
        match &self.training {
            Some(t) => {
                write!(f, ", gradients {}; {}", t.grad_dtype, t.optimizer)?;
                if t.zero > 0 {
                    write!(f, "; ZeRO-{}", t.zero)?;
                }
            }
            None => f.write_str("; no training")?,
        }
        if self.sequence_parallel {
            f.write_str("; sequence parallel")?;
        }
        if let Some(t) = &self.training {
            write!(f, "; recompute {}", t.recompute)?;
        }
        if let Some(s) = &self.schedule {
            write!(f, "; schedule {s}")?;
        }
        write!(f, "; transport {}", self.transport)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_was_chosen() {
        let mut o = Options::default();
        assert_eq!(
            Chosen::of(&o).to_string(),
            "f32, gradients f32; AdamW; recompute elementwise; transport threads"
        );
        o.mesh = vec![("pp".into(), 2), ("tp".into(), 2)];
        (o.zero, o.sp, o.optimizer) = (1, true, Optimizer::Sgd);
        let said = Chosen::of(&o).to_string();
        assert!(said.contains("SGD; ZeRO-1; sequence parallel; recompute"), "{said}");
        assert!(said.contains("; schedule 1f1b"), "{said}");
        assert!(Chosen::of(&o).line().lines().all(|l| l.len() <= WIDTH));
        o.mode = Mode::Infer;
        let said = Chosen::of(&o).to_string();
        assert!(!said.contains("SGD") && !said.contains("recompute"), "{said}");
    }
}
