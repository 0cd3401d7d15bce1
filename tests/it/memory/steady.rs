//! Pipelines of many microbatches need no more memory than those of some, once they run steadily.

use super::{asked, fixture_config, planned, scheduled};
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::schedule::Named;

/// The arena of a steady pipeline does not grow with microbatches, but for their data. Some are placed all together,
/// many by what repeats; compiling a plan replays it.
#[test]
fn the_arena_of_many_microbatches_is_that_of_some() {
    for n in [Named::OneFOneB, Named::Interleaved, Named::ZbH1, Named::ZbV] {
        let peaks = |m: usize| {
            let config = fixture_config("llama_deep");
            let o = scheduled(asked(&[("pp", 2)], false, 16, m, Recompute::None), n);
            let plan = planned(&config, &o).1;
            plan.classes.iter().map(|c| c.memory.peak_bytes).collect::<Vec<_>>()
        };
        // Data are in memory whole: two numbers of four bytes for each token.
        let data = |m: usize| m * 16 * 2 * 4;
        let [some, many] = [60, 300].map(peaks);
        println!("{n:?}: {some:?} of 60 microbatches, {many:?} of 300");
        for (some, many) in some.iter().zip(many) {
            assert!(many <= some + data(300) - data(60), "{n:?}");
        }
    }
}
