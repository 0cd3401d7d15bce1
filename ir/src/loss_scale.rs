//! The scale of a loss, so that gradients of f16 do not underflow, and how it changes from step to step.
//!
//! The seed of backward is multiplied by the scale, and gradients are divided by it before their norm is
//! taken (Micikevicius et al., 2018, *Mixed Precision Training*). A step whose norm is not finite changes
//! neither parameters nor the optimizer's state. The rules are those of Megatron-LM's `DynamicGradScaler` and
//! `ConstantGradScaler` (`megatron/core/optimizer/grad_scaler.py`); a run ends where a constant scale overflows, as
//! there, and where the scale would have to fall below its minimum, which is ours.

use crate::diag::{Diag, Result};
use serde::{Deserialize, Serialize, Serializer};

/// The name of the scale among the scalars of a step.
pub const LOSS_SCALE: &str = "loss_scale";

/// By how much a scale grows, and one over by how much it falls.
const FACTOR: f32 = 2.0;
/// The largest scale: twice of it is an f32 yet.
pub const LARGEST: f32 = (1u128 << 126) as f32;
/// Counts of overflows stop here.
const MOST: u64 = 1 << 53;

/// True of what a loss may be multiplied by: powers of two, which change no digit of a gradient.
pub fn is_scale(x: f32) -> bool {
    x.is_normal() && x > 0.0 && x <= LARGEST && x.to_bits() << 9 == 0
}

/// Writes all digits: the shortest text of an f32 is another number to who reads an f64 (4294967300 for 2^32).
fn exact<S: Serializer>(x: &f32, s: S) -> std::result::Result<S::Ok, S::Error> {
    s.serialize_f64(f64::from(*x))
}

/// How a loss is scaled.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum LossScaling {
    /// One scale for all steps.
    Constant {
        #[serde(serialize_with = "exact")]
        scale: f32,
    },
    /// A scale that falls when gradients overflow and grows when they do not.
    Dynamic {
        /// The scale of the first step.
        #[serde(serialize_with = "exact")]
        initial: f32,
        /// The smallest one.
        #[serde(serialize_with = "exact")]
        min: f32,
        /// Steps without an overflow after which it is doubled.
        window: u32,
        /// Overflows, since it was doubled last, after which each halves it.
        hysteresis: u32,
    },
}

impl LossScaling {
    /// The scale of the first step.
    pub fn initial(self) -> f32 {
        match self {
            LossScaling::Constant { scale } => scale,
            LossScaling::Dynamic { initial, .. } => initial,
        }
    }
}

impl Default for LossScaling {
    /// Megatron-LM's.
    fn default() -> LossScaling {
        LossScaling::Dynamic { initial: 2f32.powi(32), min: 1.0, window: 1000, hysteresis: 2 }
    }
}

/// A scale that changes, between two steps.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    /// The scale of the next step.
    #[serde(serialize_with = "exact")]
    pub scale: f32,
    /// Steps without an overflow since the last one, or since the scale was doubled.
    pub good: u32,
    /// Overflows that are left before one halves the scale; if not positive, the next does.
    pub left: i64,
}

impl LossScale {
    /// True if a run can have come to this.
    pub fn is_valid(&self) -> bool {
        is_scale(self.scale) && self.left.unsigned_abs() <= MOST
    }
}

/// What a run knows of its scale, and of the steps that overflowed.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleState {
    /// Steps that have changed nothing.
    pub skipped: usize,
    /// Updates of which optimizer states know nothing, because they began anew behind them.
    pub before: usize,
    /// `None` unless the scale has changed from step to step, in this run or one that it goes on from.
    pub loss_scale: Option<LossScale>,
}

impl ScaleState {
    /// That of a run that has not done a step.
    pub fn new(how: Option<LossScaling>) -> ScaleState {
        let loss_scale = match how {
            Some(LossScaling::Dynamic { initial, hysteresis, .. }) => {
                Some(LossScale { scale: initial, good: 0, left: i64::from(hysteresis) })
            }
            Some(LossScaling::Constant { .. }) | None => None,
        };
        ScaleState { skipped: 0, before: 0, loss_scale }
    }

    /// That of a run that goes on from here, and may scale its loss in another way: with no smaller scale than
    /// that one allows.
    pub fn resumed(self, how: Option<LossScaling>) -> ScaleState {
        let loss_scale = match how {
            Some(LossScaling::Dynamic { min, .. }) => self
                .loss_scale
                .map(|now| LossScale { scale: now.scale.max(min), ..now })
                .or(ScaleState::new(how).loss_scale),
            // It is kept for whoever goes on with one that changes.
            Some(LossScaling::Constant { .. }) | None => self.loss_scale,
        };
        ScaleState { loss_scale, ..self }
    }

    /// The scale of the next step; 1 of a loss that is not scaled.
    pub fn scale(&self, how: Option<LossScaling>) -> f32 {
        match (how, self.loss_scale) {
            (Some(LossScaling::Dynamic { .. }), Some(now)) => now.scale,
            (how, _) => how.map_or(1.0, LossScaling::initial),
        }
    }

    /// Takes note of a step of a scaled loss, and whether its gradients were finite.
    ///
    /// # Errors
    /// `nan-loss` if the scale would have to fall below its minimum, or is constant.
    pub fn update(&mut self, how: LossScaling, finite: bool) -> Result<()> {
        self.skipped += usize::from(!finite);
        let (Some(now), LossScaling::Dynamic { min, window, hysteresis, .. }) =
            (&mut self.loss_scale, how)
        else {
            // A scale that stays would overflow again and again.
            let what = || {
                format!(
                    "gradients are not finite at the scale {} of the loss",
                    f64::from(how.initial())
                )
            };
            let end = || {
                Diag::new("nan-loss", what())
                    .rule("gradients are finite, or the scale of the loss can fall")
                    .help("recompile without --loss-scale, or with a lower one")
            };
            return if finite { Ok(()) } else { Err(end()) };
        };
        if finite {
            now.good = now.good.saturating_add(1);
            if now.good >= window {
                (now.good, now.left) = (0, i64::from(hysteresis));
                now.scale = (now.scale * FACTOR).min(LARGEST);
            }
            return Ok(());
        }
        now.good = 0;
        now.left = now.left.saturating_sub(1).max(-(MOST as i64));
        if now.left > 0 {
            return Ok(());
        }
        if now.scale <= min {
            let what = format!(
                "gradients are not finite at the smallest scale of the loss, {}",
                f64::from(min)
            );
            return Err(Diag::new("nan-loss", what)
                .rule("gradients are finite, or the scale of the loss can fall")
                .why(match self.skipped {
                    1 => "1 step was skipped".into(),
                    n => format!("{n} steps were skipped"),
                })
                .help("recompile with --dtype bf16, with a lower --lr, or with --clip 1.0"));
        }
        now.scale = (now.scale / FACTOR).max(min);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Megatron-LM's table of rules, step by step: whether gradients were finite; the scale, the count of good
    /// steps and of overflows that are left, as its `DynamicGradScaler` has them behind the step. Made with
    /// initial_scale=16, min_scale=2, growth_factor=2, backoff_factor=0.5, growth_interval=3, hysteresis=2.
    const STEPS: [(bool, f32, u32, i64); 20] = [
        (true, 16.0, 1, 2),
        (false, 16.0, 0, 1),
        (true, 16.0, 1, 1),
        (true, 16.0, 2, 1),
        (false, 8.0, 0, 0),
        (false, 4.0, 0, -1),
        (true, 4.0, 1, -1),
        (true, 4.0, 2, -1),
        (true, 8.0, 0, 2),
        (true, 8.0, 1, 2),
        (true, 8.0, 2, 2),
        (true, 16.0, 0, 2),
        (false, 16.0, 0, 1),
        (false, 8.0, 0, 0),
        (false, 4.0, 0, -1),
        (false, 2.0, 0, -2),
        (true, 2.0, 1, -2),
        (true, 2.0, 2, -2),
        (true, 4.0, 0, 2),
        (false, 4.0, 0, 1),
    ];

    fn of(scale: f32, good: u32, left: i64) -> LossScale {
        LossScale { scale, good, left }
    }

    #[test]
    fn a_dynamic_scale_follows_megatron() {
        let how = LossScaling::Dynamic { initial: 16.0, min: 2.0, window: 3, hysteresis: 2 };
        let (mut s, mut skipped) = (ScaleState::new(Some(how)), 0);
        for (i, (finite, scale, good, left)) in STEPS.into_iter().enumerate() {
            s.update(how, finite).unwrap();
            skipped += usize::from(!finite);
            let want = ScaleState { skipped, before: 0, loss_scale: Some(of(scale, good, left)) };
            assert_eq!(s, want, "step {}", i + 1);
            assert!(of(scale, good, left).is_valid() && s.scale(Some(how)) == scale);
            assert_eq!(s.resumed(Some(how)), s);
        }
    }

    #[test]
    fn at_its_minimum_it_ends_the_run_and_a_constant_one_stays() {
        let how = LossScaling::Dynamic { initial: 2.0, min: 1.0, window: 3, hysteresis: 2 };
        let mut s = ScaleState::new(Some(how));
        (0..2).for_each(|_| s.update(how, false).unwrap());
        assert_eq!(s.loss_scale, Some(of(1.0, 0, 0)));
        assert_eq!(s.update(how, false).unwrap_err().code, "nan-loss");
        let how = LossScaling::Constant { scale: 8.0 };
        let mut s = ScaleState::new(Some(how));
        (0..9).for_each(|_| s.update(how, true).unwrap());
        assert_eq!(
            (s, s.scale(Some(how))),
            (ScaleState { skipped: 0, before: 0, loss_scale: None }, 8.0)
        );
        assert_eq!(s.update(how, false).unwrap_err().code, "nan-loss");
    }

    #[test]
    fn a_run_goes_on_with_its_scale_if_that_changes() {
        let (dynamic, constant) = (LossScaling::default(), LossScaling::Constant { scale: 8.0 });
        let now = ScaleState { skipped: 7, before: 0, loss_scale: Some(of(64.0, 5, 1)) };
        assert_eq!(now.resumed(Some(dynamic)), now);
        let plain = ScaleState { skipped: 7, before: 0, loss_scale: None };
        for other in [Some(constant), None] {
            // Kept, and not used.
            let then = now.resumed(other);
            assert_eq!((then, then.scale(other)), (now, other.map_or(1.0, LossScaling::initial)));
        }
        assert_eq!((plain.scale(None), plain.scale(Some(constant))), (1.0, 8.0));
        assert_eq!(plain.resumed(Some(dynamic)).scale(Some(dynamic)), 4_294_967_296.0);
        let least = LossScaling::Dynamic { initial: 1024.0, min: 256.0, window: 9, hysteresis: 1 };
        let raised = ScaleState { skipped: 7, before: 0, loss_scale: Some(of(256.0, 5, 1)) };
        assert_eq!(now.resumed(Some(least)), raised);
    }

    #[test]
    fn scales_are_powers_of_two() {
        for x in [1.0, 0.5, 1024.0, LARGEST, f32::MIN_POSITIVE] {
            assert!(is_scale(x) && of(x, 0, 1).is_valid(), "{x}");
        }
        let others = [0.0, -2.0, 3.0, 1e-40, f32::INFINITY, f32::NAN, LARGEST * 2.0, f32::MAX];
        for x in others {
            assert!(!is_scale(x) && !of(x, 0, 1).is_valid(), "{x}");
        }
        assert!(!of(1.0, 0, i64::MIN).is_valid());
    }

    #[test]
    fn a_scale_stays_finite() {
        let how = LossScaling::Dynamic { initial: LARGEST, min: 1.0, window: 1, hysteresis: 1 };
        let mut s = ScaleState::new(Some(how));
        s.update(how, true).unwrap();
        assert_eq!(s.scale(Some(how)), LARGEST);
        assert!((LARGEST * FACTOR).is_finite());
    }
}
