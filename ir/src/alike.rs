//! Things of which most are like one that came before, as nodes and launches are where layers are.

use crate::ops::Op;
use crate::types::Type;

/// Some of them, each of which stands for all that are like it.
#[derive(Clone, Debug)]
pub struct Alike<T> {
    /// With a number that those that are like it have, too.
    known: Vec<(u64, T)>,
    /// Behind the last one that was found: the next layer has the same in the same order.
    next: usize,
}

/// Most that are kept, so that it takes no long time to look where nothing is alike.
const MOST: usize = 256;

impl<T> Default for Alike<T> {
    fn default() -> Alike<T> {
        Alike { known: vec![], next: 0 }
    }
}

impl<T> Alike<T> {
    /// The one with this number of which this is true.
    pub fn find(&mut self, key: u64, mut is_like: impl FnMut(&T) -> bool) -> Option<&T> {
        let mut is = |x: &(u64, T)| x.0 == key && is_like(&x.1);
        let (before, behind) = self.known.split_at(self.next);
        let near = behind.iter().position(&mut is).map(|i| self.next + i);
        let at = near.or_else(|| before.iter().position(is))?;
        self.next = at + 1;
        Some(&self.known[at].1)
    }

    /// Adds one that is like none of them, if they are not too many.
    pub fn add(&mut self, key: u64, new: T) {
        if self.known.len() < MOST {
            self.known.push((key, new));
            self.next = self.known.len();
        }
    }
}

/// A number that is the same of the same kinds of ops and the same sizes of values.
pub fn key<'a>(ops: impl Iterator<Item = &'a Op>, types: impl Iterator<Item = &'a Type>) -> u64 {
    let mut key = 0u64;
    let mut add = |n: usize| key = (key ^ n as u64).wrapping_mul(ODD).rotate_left(29);
    for op in ops {
        op.mnemonic().bytes().for_each(|c| add(c.into()));
    }
    for t in types {
        t.dims.iter().for_each(|d| add(d.size));
    }
    key
}

/// Its bits are like random ones.
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
