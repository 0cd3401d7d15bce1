//! The learning rate, step by step: the flags of `compile`, and of `run`, where they go before the plan's.

use super::values::{choose, not_negative, positive};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::plan::LrSchedule;

/// Flags of the learning rate of a run.
#[derive(clap::Args, Clone, Debug, Default, PartialEq)]
#[group(skip)]
pub struct Rate {
    /// Learning rate [default: the plan's]
    #[arg(long, allow_negative_numbers = true)]
    pub lr: Option<f64>,
    /// constant or warmup-cosine [default: the plan's]
    #[arg(long)]
    pub lr_schedule: Option<String>,
    /// Steps of linear warmup (warmup-cosine) [default: the plan's]
    #[arg(long)]
    pub warmup: Option<usize>,
    /// Step at which the cosine ends (warmup-cosine) [default: the plan's]
    #[arg(long)]
    pub total_steps: Option<usize>,
    /// Learning rate at the end of the cosine and after it (warmup-cosine) [default: the plan's]
    #[arg(long, value_name = "LR", allow_negative_numbers = true)]
    pub min_lr: Option<f64>,
}

impl Rate {
    /// The flags that are given, as they may be given again.
    pub fn words(&self) -> Vec<String> {
        let float = |x: Option<f64>| x.map(|x| x.to_string());
        let whole = |x: Option<usize>| x.map(|x| x.to_string());
        let all = [
            ("--lr", float(self.lr)),
            ("--lr-schedule", self.lr_schedule.clone()),
            ("--warmup", whole(self.warmup)),
            ("--total-steps", whole(self.total_steps)),
            ("--min-lr", float(self.min_lr)),
        ];
        all.into_iter().filter_map(|(flag, x)| Some(format!("{flag} {}", x?))).collect()
    }

    /// The learning rate by these flags, and where none is given by another one.
    ///
    /// # Errors
    /// `flag` for numbers that no learning rate has.
    pub fn over(&self, below: LrSchedule) -> Result<LrSchedule> {
        let was = match below {
            LrSchedule::Constant { lr } => (lr, 0, 1000, 0.0),
            LrSchedule::WarmupCosine { lr, warmup, total, floor } => (lr, warmup, total, floor),
        };
        let lr = positive("--lr", self.lr.unwrap_or(was.0), "1e-3")?;
        if !(lr as f32).is_normal() {
            return Err(Diag::new("flag", format!("{lr} is not a normal number of f32"))
                .at(format!("--lr {lr}"))
                .help("for example --lr 1e-3"));
        }
        let (warmup, total) = (self.warmup.unwrap_or(was.1), self.total_steps.unwrap_or(was.2));
        let floor = not_negative("--min-lr", self.min_lr.unwrap_or(was.3), "1e-5")?;
        let cosine = LrSchedule::WarmupCosine { lr, warmup, total, floor };
        let constant = LrSchedule::Constant { lr };
        let mut out = match below {
            LrSchedule::Constant { .. } => constant,
            LrSchedule::WarmupCosine { .. } => cosine,
        };
        let schedules = [("constant", constant), ("warmup-cosine", cosine)];
        choose(&mut out, &self.lr_schedule, "--lr-schedule", &schedules)?;
        if out != cosine {
            return Ok(out);
        }
        if floor > lr {
            return Err(Diag::new("flag", format!("--min-lr {floor} is above --lr {lr}"))
                .at(format!("--min-lr {floor}"))
                .help(format!("for example --min-lr {}", lr / 10.0)));
        }
        if warmup < total {
            return Ok(out);
        }
        let what = format!("--warmup {warmup} is not below --total-steps {total}");
        Err(Diag::new("flag", what).at(format!("--warmup {warmup}")).help(
            match warmup.max(1).checked_mul(10) {
                Some(n) => format!("for example --total-steps {n}"),
                None => format!("for example --warmup {}", total / 10),
            },
        ))
    }
}
