//! How a call of a function goes: what is repeated in one, and where collectives are waited for. The same
//! each time its frames are the same.

use crate::engine::Engine;
use crate::wiring::Wiring;
use shardc_ir::kernel::Program;
use shardc_ir::overlap;
use shardc_ir::plan::Call;
use smallvec::SmallVec;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// How a call goes; by default one launch after the other.
#[derive(Default)]
pub(crate) struct CallPlan {
    /// By launch, the launch before which it is waited for; none if nothing overlaps.
    pub awaited: Vec<usize>,
    /// Launches that are repeated together, in their order.
    pub runs: Vec<Run>,
}

/// Launches of a call that are the same each time, by a number of their own.
pub(crate) struct Run {
    pub number: usize,
    pub launches: Range<usize>,
    /// What they are on the device.
    pub queued: usize,
}

/// A function, and where its frames are: all addresses of a call follow from them.
type Frames = (usize, SmallVec<[usize; 8]>);

/// Of all calls of a rank.
#[derive(Default)]
pub(crate) struct CallPlans {
    known: HashMap<Frames, Arc<CallPlan>>,
    /// Launches before which what others have begun is waited for.
    cuts: HashMap<Frames, BTreeSet<usize>>,
    /// Runs of all calls.
    runs: usize,
}

impl CallPlans {
    /// Says that before a launch of a call something of another instruction is waited for.
    pub fn cut(&mut self, c: &Call, launch: usize) {
        self.cuts.entry((c.func, c.frames.clone())).or_default().insert(launch);
    }

    /// The plan of a call of a class's program.
    pub fn of(
        &mut self,
        (w, class): (&Wiring, usize),
        c: &Call,
        program: &Program,
        engine: &mut dyn Engine,
    ) -> Arc<CallPlan> {
        let key = (c.func, c.frames.clone());
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let mut awaited = vec![];
        if engine.transport().overlaps() {
            let (f, memory) = (&w.plan.module.funcs[c.func], &w.plan.classes[class].memory);
            awaited = overlap::awaited(f, &w.launches[c.func], memory, c);
        }
        let repeated: Vec<Option<usize>> = program[c.func]
            .iter()
            .enumerate()
            .map(|(i, k)| engine.repeated((c.func, i), k))
            .collect();
        let late = awaited.iter().enumerate().filter(|(i, until)| **until > i + 1);
        let mut cuts: BTreeSet<usize> = late.map(|(_, &until)| until).collect();
        cuts.extend(self.cuts.get(&key).into_iter().flatten());
        let number = |(i, (launches, queued))| Run { number: self.runs + i, launches, queued };
        let runs: Vec<Run> = runs(&repeated, &cuts).into_iter().enumerate().map(number).collect();
        self.runs += runs.len();
        let call_plan = Arc::new(CallPlan { awaited, runs });
        self.known.insert(key, call_plan.clone());
        call_plan
    }
}

/// The longest runs of launches that are repeated, as so many of the device each, with none of `cuts`
/// inside; and what they are on the device. One launch there is no run.
fn runs(repeated: &[Option<usize>], cuts: &BTreeSet<usize>) -> Vec<(Range<usize>, usize)> {
    let mut all = vec![];
    let (mut first, mut queued) = (0, 0);
    for (i, own) in repeated.iter().chain([&None]).enumerate() {
        if own.is_none() || cuts.contains(&i) {
            all.extend((queued > 1).then_some((first..i, queued)));
            (first, queued) = (if own.is_none() { i + 1 } else { i }, 0);
        }
        queued += own.unwrap_or(0);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_something_is_awaited() {
        let found = |repeated: &[Option<usize>], cuts: &[usize]| {
            runs(repeated, &cuts.iter().copied().collect())
        };
        let (view, one, three) = (Some(0), Some(1), Some(3));
        assert_eq!(found(&[], &[]), []);
        assert_eq!(found(&[one, one], &[2]), [(0..2, 2)]);
        // Exchanges, launches between them that are alone or nothing, and kernels of several launches.
        let all = [one, three, None, view, one, view, None, None, three, None, one, view, one];
        assert_eq!(found(&all, &[]), [(0..2, 4), (8..9, 3), (10..13, 2)]);
        assert_eq!(found(&all, &[1, 11]), [(1..2, 3), (8..9, 3)]);
        assert_eq!(found(&all, &[10]), found(&all, &[]));
    }
}
