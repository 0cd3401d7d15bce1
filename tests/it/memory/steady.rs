//! Pipelines of many microbatches need no more memory than those of some, once they run steadily.

use super::{asked, fixture_config, planned, scheduled};
use shardc_ir::plan::{Call, Plan, RankClass, calls};
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::schedule::Named;
use std::collections::BTreeMap;

/// The arena of a steady pipeline does not grow with microbatches, but for their data and gaps of a fiftieth. Some are
/// placed all together, many by what repeats: then calls lie where the same calls of other microbatches did.
/// Compiling a plan replays it.
#[test]
fn the_arena_of_many_microbatches_is_that_of_some() {
    for n in [Named::OneFOneB, Named::Interleaved, Named::ZbH1, Named::ZbV] {
        let peaks = |m: usize| {
            let config = fixture_config("llama_deep");
            let o = scheduled(asked(&[("pp", 2)], false, 16, m, Recompute::None), n);
            let plan = planned(&config, &o).1;
            if m == 300 {
                let repeat: Vec<bool> =
                    plan.classes.iter().map(|c| lies_as_before(&plan, c)).collect();
                // One rank of each schedule with a cut backward comes to no cycle: there, all are placed together.
                let want = match n {
                    Named::ZbH1 => [false, true],
                    Named::ZbV => [true, false],
                    _whole_backwards => [true, true],
                };
                assert_eq!(repeat, want, "{n:?}: places repeat");
            }
            plan.classes.iter().map(|c| c.memory.peak_bytes).collect::<Vec<_>>()
        };
        // Data are in memory whole: two numbers of four bytes for each token.
        let data = |m: usize| m * 16 * 2 * 4;
        let [some, many] = [60, 300].map(peaks);
        println!("{n:?}: {some:?} of 60 microbatches, {many:?} of 300");
        for (some, many) in some.iter().zip(many) {
            assert!(many <= (some + data(300) - data(60)) / 50 * 51, "{n:?}");
        }
    }
}

/// True if calls of 50 microbatches in the middle lie where those of so many microbatches before did, but for their
/// data.
fn lies_as_before(plan: &Plan, c: &RankClass) -> bool {
    let is_data = |func: usize, frame: usize| {
        let f = &plan.module.funcs[func];
        let places = &c.memory.places[func];
        let mut data = f.args.iter().filter(|a| a.input().is_some());
        data.any(|a| places[a.value].frame as usize == frame)
    };
    let frames = |call: &Call| {
        let all = call.frames.iter().enumerate().filter(|(i, _)| !is_data(call.func, *i));
        all.map(|x| *x.1).collect::<Vec<_>>()
    };
    let steps = calls(&c.step).filter_map(|call| Some((call.func, call.microbatch?, call)));
    let all: BTreeMap<_, _> = steps.map(|(f, j, call)| ((f, j), frames(call))).collect();
    let middle = || all.iter().filter(|x| (150..200).contains(&x.0.1));
    let before = |n: usize| middle().all(|((f, j), at)| all.get(&(*f, j - n)) == Some(at));
    let found = (1..=140).find(|&n| before(n));
    println!("places repeat after {found:?}");
    found.is_some()
}
