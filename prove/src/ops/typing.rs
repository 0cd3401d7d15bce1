//! What types of an op follow from, beside its letters.

use shardc_ir::types::Reduction;

/// In which operands an op is linear: f(a + b) = f(a) + f(b).
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Linear {
    No,
    /// In all operands taken together.
    All,
    /// In these taken together; the others stay the same.
    Together(&'static [usize]),
    /// In each of these while the others stay the same.
    Each(&'static [usize]),
}

/// What sharding may rely on.
#[derive(Clone, Copy, Debug)]
pub struct Typing {
    pub linear: Linear,
    /// How what ranks have of a letter is put together where the result lacks the letter; `None`:
    /// the letter must be whole.
    pub lost: Option<Reduction>,
    /// The largest or smallest element of what is largest or smallest is that of all.
    pub picks: bool,
    /// Only moves elements, so that a largest or smallest element stays one.
    pub moves: bool,
    /// Each rank can make its piece of a letter that no operand has.
    pub makes: bool,
    /// Operands and results: `n` a number, `i` an integer, `s` what the first operand is, `t` what
    /// the second is. The last operand stands for all that follow.
    pub kinds: [&'static str; 2],
}

pub const NONLINEAR: Typing = Typing {
    linear: Linear::No,
    lost: None,
    picks: false,
    moves: false,
    makes: false,
    kinds: ["n", "n"],
};
pub const MOVER: Typing =
    Typing { linear: Linear::All, moves: true, kinds: ["s", "s"], ..NONLINEAR };
pub const SUM: Option<Reduction> = Some(Reduction::Sum);
