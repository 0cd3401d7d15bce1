//! Counts of steps: how often the loops ran that are to run in proportion to what they are given.
//!
//! A clock tells a loop over pairs from one over single things on an idle machine alone. A count does so anywhere,
//! and is the same in each run: tests take it at two sizes.

use std::cell::RefCell;
use std::collections::BTreeMap;

/// Steps by the name of their loop.
pub type Steps = BTreeMap<&'static str, u64>;

thread_local! {
    static TAKEN: RefCell<Steps> = const { RefCell::new(BTreeMap::new()) };
}

/// Counts so many steps of a loop. To be called behind it, or once per round: not in the innermost.
pub fn add(of: &'static str, steps: usize) {
    TAKEN.with_borrow_mut(|t| *t.entry(of).or_default() += steps as u64);
}

/// What work makes, with the steps that this thread took for it, and those that it was given by [`join`].
pub fn of<R>(work: impl FnOnce() -> R) -> (R, Steps) {
    let before = TAKEN.take();
    let made = work();
    let own = TAKEN.replace(before);
    join(own.clone());
    (made, own)
}

/// Counts steps that another thread took for this one.
pub fn join(steps: Steps) {
    TAKEN.with_borrow_mut(|t| steps.into_iter().for_each(|(of, n)| *t.entry(of).or_default() += n));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_count_for_who_asks_and_for_whom_that_works() {
        let (inner, all) = of(|| {
            add("a", 2);
            of(|| {
                add("a", 3);
                join(Steps::from([("b", 4)]));
            })
            .1
        });
        assert_eq!(inner, Steps::from([("a", 3), ("b", 4)]));
        assert_eq!(all, Steps::from([("a", 5), ("b", 4)]));
    }
}
