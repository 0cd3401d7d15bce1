//! The learning rate, step by step: the flags of `compile`, and of `run`, where they go before the plan's.

use super::values::{not_negative, positive};
use super::{Flags, Rate, Value};
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::plan::{Fall, LrSchedule};

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
        let was = below.fall().unwrap_or(Fall {
            lr: below.peak(),
            warmup: 0,
            total: 1000,
            floor: 0.0,
            decay: None,
        });
        let lr = positive("--lr", self.number("lr").unwrap_or(was.lr), "1e-3")?;
        if !(lr as f32).is_normal() {
            return Err(Diag::new("flag", format!("{lr} is not a normal number of f32"))
                .at(format!("--lr {lr}"))
                .help("for example --lr 1e-3"));
        }
        let whole = |flag, was| self.whole(flag).unwrap_or(was);
        let (warmup, total) = (whole("warmup", was.warmup), whole("total-steps", was.total));
        let decay = self.whole("decay-steps").or(was.decay);
        let floor = not_negative("--min-lr", self.number("min-lr").unwrap_or(was.floor), "1e-5")?;
        let fall = Fall { lr, warmup, total, floor, decay };
        let rate = match self.text("lr-schedule").unwrap_or(below.word()) {
            "warmup-cosine" => LrSchedule::WarmupCosine(fall),
            "warmup-linear" => LrSchedule::WarmupLinear(fall),
            _constant => return Ok(LrSchedule::Constant { lr }),
        };
        if floor > lr {
            return Err(Diag::new("flag", format!("--min-lr {floor} is above --lr {lr}"))
                .at(format!("--min-lr {floor}"))
                .help(format!("for example --min-lr {}", lr / 10.0)));
        }
        ends(fall, &format!("--total-steps {total}"))?;
        Ok(rate)
    }
}

/// Sees that a rate has risen and begins to fall before it has fallen, at a step that somebody gave so.
///
/// # Errors
/// `flag` otherwise.
pub fn ends(fall: Fall, last: &str) -> Result<()> {
    let Fall { warmup, total, decay, .. } = fall;
    if warmup >= total {
        let what = format!("--warmup {warmup} is not below {last}");
        let help = match warmup.max(1).checked_mul(10) {
            Some(n) if last.starts_with("--total-steps") => {
                format!("for example --total-steps {n}")
            }
            _other => format!("for example --warmup {}", total / 10),
        };
        return Err(Diag::new("flag", what).at(format!("--warmup {warmup}")).help(help));
    }
    match decay {
        Some(steps) if steps > total - warmup => {
            let left = count(total - warmup, "step", "steps");
            let what = format!("it would begin to fall while it rises: {left} follow the warmup");
            Err(Diag::new("flag", what)
                .at(format!("--decay-steps {steps}"))
                .rule("--warmup and --decay-steps are together at most the steps of all")
                .help(format!("for example --decay-steps {}", (total - warmup).div_ceil(5))))
        }
        _fits => Ok(()),
    }
}
