//! Side conditions of the lemmas of grids and rings, as data: so a test can give the normal form a wrong
//! one, and see that evaluation refuses what terms then prove.

use crate::fun::Cut;

/// What must hold for a lemma to be applied.
#[derive(Clone, Copy, Debug)]
pub struct Lemmas {
    /// Pieces with these numbers, in order, of a dim that is cut so many ways are the whole.
    pub pieces: fn(&[usize], usize) -> bool,
    /// Pieces of two factors stand for the same elements of the letter that they share.
    pub alike: fn(Cut, Cut) -> bool,
    /// Blocks with these shifts, in order, around a ring of so many ranks are a full turn.
    pub turn: fn(&[usize], usize) -> bool,
}

/// Each of `of`, once.
fn each_once(numbers: &[usize], of: usize) -> bool {
    numbers.iter().copied().eq(0..of)
}

/// The lemmas that hold.
impl Default for Lemmas {
    fn default() -> Lemmas {
        Lemmas { pieces: each_once, alike: |a, b| a == b, turn: each_once }
    }
}
