//! Gives every value its place in one arena per rank, over the whole schedule.
//!
//! What lives through a step (weights, optimizer state, gradients that are summed, a step's data)
//! lies at the bottom. Above it lie *frames*: what one microbatch keeps from one function to
//! another, what it receives, a gradient of one microbatch alone, and what one call needs for
//! itself. `lifetimes` says what lives from where to where, `layout` what is in a frame and where;
//! `arena` says where each frame lies from when to when. Views share their operand's place; so do
//! results that an op may write over an operand nobody reads later; so do values that one function
//! hands to another.

mod arena;
mod free;
mod layout;
mod lifetimes;
mod pieces;
pub mod replay;

use crate::step::instructions::Lists;
use layout::Way;
use shardc_ir::func::Module;
use shardc_ir::plan::{Memory, RankClass};

/// Plans the arena of a rank of the pipeline: its functions in the order in which they feed each
/// other, and its lists, whose offsets it fills in. If the frames of layers leave gaps, other ways
/// are tried: every value has a frame of its own, more of them, but they fit better where a
/// backward is cut in two; and what a call needs for itself is packed as tightly as may be.
pub fn memory(
    m: &Module,
    microbatches: usize,
    stages: Vec<usize>,
    funcs: Vec<usize>,
    lists: Lists,
) -> RankClass {
    let plan = |way: Way, lists: Lists| {
        let layout = layout::layout(m, microbatches, &funcs, &lists, way);
        let (step, evaluation, found) = arena::arena(m, &layout, lists);
        let memory = Memory {
            places: layout.places,
            workspaces: layout.workspaces,
            frames: layout.frames,
            peak_bytes: found.peak_bytes,
            at_peak: found.at_peak,
            live_at_peak: found.live_at_peak,
            live_bytes: found.live_bytes,
            whole: found.whole,
            spans: found.spans,
        };
        let (stages, funcs) = (stages.clone(), funcs.clone());
        RankClass { stages, funcs, step, evaluation, memory }
    };
    let layers = plan(Way { apart: false, slack: SLACK }, lists.clone());
    if layers.memory.peak_bytes <= layers.memory.live_bytes / 100 * (100 + SLACK) {
        return layers;
    }
    let others = [(true, SLACK), (false, 0), (true, 0)];
    let others = others.map(|(apart, slack)| plan(Way { apart, slack }, lists.clone()));
    let all = std::iter::once(layers).chain(others);
    all.min_by_key(|c| c.memory.peak_bytes).expect("there are four")
}

/// Percent by which an arena may be larger than what lives in it at once without a second try.
const SLACK: usize = 3;
