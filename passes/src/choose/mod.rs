//! One way for each op, at least cost.
//!
//! A [`Problem`] has variables with a few ways each, and tables of what the ways of some variables
//! cost together. [`solve`] finds the least sum by min-sum elimination (Dechter, "Bucket
//! Elimination: A Unifying Framework for Reasoning", 1999); [`best_with`] says what another way
//! would cost; [`within`] takes the least time in a budget of memory, and a bound on it. Ties go to
//! the smaller way, so the caller sorts ways by preference.

mod budget;
mod descent;
mod elimination;
mod problem;
#[cfg(test)]
mod tests;
mod units;

pub use budget::{BudgetAnswer, within};
pub use problem::{Costs, Problem, Var};
pub use units::{Solved, best_with, solve};

/// The score of what is not allowed. All other scores are less.
pub const NEVER: u128 = 1 << 120;

/// What a choice takes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Cost {
    /// Picoseconds.
    pub time: u64,
    /// Bytes.
    pub memory: u64,
}

impl Cost {
    /// Nothing.
    pub const ZERO: Cost = Cost { time: 0, memory: 0 };
    /// Not allowed.
    pub const NEVER: Cost = Cost { time: u64::MAX, memory: u64::MAX };

    /// Whether it is allowed: less than 2^62 of either.
    #[must_use]
    pub fn allowed(self) -> bool {
        self.time | self.memory < 1 << 62
    }

    /// The sum. What is not allowed stays so.
    #[must_use]
    pub fn plus(self, o: Cost) -> Cost {
        let time = self.time.saturating_add(o.time);
        Cost { time, memory: self.memory.saturating_add(o.memory) }
    }
}

/// What memory costs: a fraction in picoseconds per byte. A score is `bytes * time + ps * memory`,
/// exact; divided by `bytes` it is picoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lambda {
    ps: u64,
    bytes: u64,
}

impl Lambda {
    /// Bits of either side, so that scores stay below [`NEVER`].
    const BITS: u32 = 57;
    /// Memory is free.
    pub const ZERO: Lambda = Lambda { ps: 0, bytes: 1 };
    /// The least memory, then the least time if that is less than 2^57.
    pub const MEMORY: Lambda = Lambda { ps: 1 << Lambda::BITS, bytes: 1 };

    /// `ps / bytes`; where either has more than 57 bits, the nearest fraction without the last bits
    /// of both. Panics if `bytes` is 0.
    #[must_use]
    pub fn new(ps: u64, bytes: u64) -> Lambda {
        assert!(bytes > 0, "picoseconds per no byte");
        let bits = u64::BITS - (ps | bytes).leading_zeros();
        let shift = bits.saturating_sub(Lambda::BITS);
        Lambda { ps: ps >> shift, bytes: (bytes >> shift).max(1) }
    }

    /// The numerator.
    #[must_use]
    pub fn ps(self) -> u64 {
        self.ps
    }

    /// The denominator, 1 or more.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// The score of a cost: [`NEVER`] if it is not allowed.
    #[must_use]
    pub fn score(self, cost: Cost) -> u128 {
        let product = |a: u64, b: u64| u128::from(a) * u128::from(b);
        match cost.allowed() {
            true => product(self.bytes, cost.time) + product(self.ps, cost.memory),
            false => NEVER,
        }
    }

    /// The least whole time of what scores `score` or more and has at most `budget` bytes.
    fn time(self, score: u128, budget: u64) -> u64 {
        let memory = u128::from(self.ps) * u128::from(budget);
        let time = score.saturating_sub(memory).div_ceil(u128::from(self.bytes));
        u64::try_from(time).unwrap_or(u64::MAX)
    }
}
