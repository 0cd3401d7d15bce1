//! The learning rate, step by step: the flags of `compile`, and of `run`, where they go before the plan's.

use super::values::{not_negative, positive};
use super::{Flags, Rate, Value};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::plan::LrSchedule;

impl Rate {
    /// The flags that are given, as they may be given again.
    pub fn words(&self) -> Vec<String> {
        let word = |v: &Value| match v {
            Value::Whole(n) => n.to_string(),
            Value::Number(x) => x.to_string(),
            text => text.text().into(),
        };
        self.0.given().map(|(s, v)| format!("--{} {}", s.flag, word(v))).collect()
    }

    /// The learning rate by these flags, and where none is given by another one.
    ///
    /// # Errors
    /// `flag` for numbers that no learning rate has.
    pub fn over(&self, below: LrSchedule) -> Result<LrSchedule> {
        self.0.rate(below)
    }
}

impl Flags {
    /// The learning rate, where these flags go before another one.
    pub(super) fn rate(&self, below: LrSchedule) -> Result<LrSchedule> {
        let was = match below {
            LrSchedule::Constant { lr } => (lr, 0, 1000, 0.0),
            LrSchedule::WarmupCosine { lr, warmup, total, floor } => (lr, warmup, total, floor),
        };
        let lr = positive("--lr", self.number("lr").unwrap_or(was.0), "1e-3")?;
        if !(lr as f32).is_normal() {
            return Err(Diag::new("flag", format!("{lr} is not a normal number of f32"))
                .at(format!("--lr {lr}"))
                .help("for example --lr 1e-3"));
        }
        let whole = |flag, was| self.whole(flag).unwrap_or(was);
        let (warmup, total) = (whole("warmup", was.1), whole("total-steps", was.2));
        let floor = not_negative("--min-lr", self.number("min-lr").unwrap_or(was.3), "1e-5")?;
        let word = self.text("lr-schedule").unwrap_or(match below {
            LrSchedule::Constant { .. } => "constant",
            LrSchedule::WarmupCosine { .. } => "warmup-cosine",
        });
        if word == "constant" {
            return Ok(LrSchedule::Constant { lr });
        }
        if floor > lr {
            return Err(Diag::new("flag", format!("--min-lr {floor} is above --lr {lr}"))
                .at(format!("--min-lr {floor}"))
                .help(format!("for example --min-lr {}", lr / 10.0)));
        }
        if warmup < total {
            return Ok(LrSchedule::WarmupCosine { lr, warmup, total, floor });
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
