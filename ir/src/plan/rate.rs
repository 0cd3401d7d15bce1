//! How the learning rate moves with the step.

use crate::diag::count;
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;
use std::fmt;

/// How the learning rate moves with the step.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum LrSchedule {
    Constant {
        lr: f64,
    },
    /// It falls along a half cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, one cycle).
    WarmupCosine(Fall),
    /// It falls along a line.
    WarmupLinear(Fall),
}

/// A learning rate that rises from 0 along a line over `warmup` steps, is `lr` until `decay` steps before `total`,
/// falls to `floor` at step `total`, and stays there. With `decay` this is warmup, stable, decay (MiniCPM, arXiv:2404.06395,
/// section 4).
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fall {
    pub lr: f64,
    pub warmup: usize,
    pub total: usize,
    pub floor: f64,
    /// Steps over which it falls; if nobody says, all behind the warmup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decay: Option<usize>,
}

impl Fall {
    /// Steps behind which it falls.
    fn begin(&self) -> usize {
        match self.decay {
            Some(steps) => self.total.saturating_sub(steps).max(self.warmup),
            None => self.warmup,
        }
    }

    /// True if its parts follow each other: it rises, and has steps to fall in, to what is not above it.
    pub fn is_valid(&self) -> bool {
        let after = self.total.saturating_sub(self.warmup);
        let decay = self.decay.unwrap_or(after);
        self.floor >= 0.0 && self.floor <= self.lr && 0 < decay && decay <= after
    }

    /// Learning rate of a step from 1 on, if `left` of the fall remains at a share of its steps.
    fn at(&self, step: usize, left: impl Fn(f64) -> f64) -> f64 {
        if step <= self.warmup {
            return self.lr * step as f64 / self.warmup as f64;
        }
        let begin = self.begin();
        if step <= begin {
            return self.lr;
        }
        let steps = self.total.saturating_sub(begin).max(1);
        let done = (step - begin) as f64 / steps as f64;
        self.floor + (self.lr - self.floor) * left(done.min(1.0))
    }
}

impl LrSchedule {
    /// Learning rate of step `step`, counted from 1.
    pub fn at(&self, step: usize) -> f64 {
        match self {
            LrSchedule::Constant { lr } => *lr,
            LrSchedule::WarmupCosine(f) => f.at(step, |done| 0.5 * (1.0 + (PI * done).cos())),
            LrSchedule::WarmupLinear(f) => f.at(step, |done| 1.0 - done),
        }
    }

    /// The largest learning rate.
    pub fn peak(&self) -> f64 {
        match *self {
            LrSchedule::Constant { lr } => lr,
            LrSchedule::WarmupCosine(f) | LrSchedule::WarmupLinear(f) => f.lr,
        }
    }

    /// When it rises and falls, and to what, unless it is constant.
    pub fn fall(&self) -> Option<Fall> {
        match *self {
            LrSchedule::Constant { .. } => None,
            LrSchedule::WarmupCosine(f) | LrSchedule::WarmupLinear(f) => Some(f),
        }
    }

    /// The same curve over other steps, or to another rate; a constant one is as it was.
    pub fn with(self, fall: Fall) -> LrSchedule {
        match self {
            LrSchedule::Constant { .. } => self,
            LrSchedule::WarmupCosine(_) => LrSchedule::WarmupCosine(fall),
            LrSchedule::WarmupLinear(_) => LrSchedule::WarmupLinear(fall),
        }
    }

    /// The word of the field for how it falls.
    pub fn curve(&self) -> &'static str {
        match self {
            LrSchedule::Constant { .. } => "constant",
            LrSchedule::WarmupCosine(_) => "cosine",
            LrSchedule::WarmupLinear(_) => "linear",
        }
    }

    /// Its word in flags.
    pub fn word(&self) -> &'static str {
        match self {
            LrSchedule::Constant { .. } => "constant",
            LrSchedule::WarmupCosine(_) => "warmup-cosine",
            LrSchedule::WarmupLinear(_) => "warmup-linear",
        }
    }
}

impl fmt::Display for LrSchedule {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Some(fall) = self.fall() else { return write!(f, "{}", self.peak()) };
        let Fall { lr, warmup, total, floor, decay } = fall;
        write!(f, "{lr}, {} of warm-up, ", count(warmup, "step", "steps"))?;
        if decay.is_some() {
            write!(f, "constant to {}, ", fall.begin())?;
        }
        write!(f, "{} to {floor} at {total}", self.curve())
    }
}
