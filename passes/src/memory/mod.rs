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
use layout::{Layout, Way};
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
    let lay = |apart, slack| layout::layout(m, microbatches, &funcs, &lists, Way { apart, slack });
    let plan = |layout: Layout| {
        let (step, evaluation, found) = arena::arena(m, &layout, lists.clone());
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
    let calls = |l: &Layout| l.scratch.iter().map(|s| s.bytes).collect::<Vec<_>>();
    let first = lay(false, SLACK);
    let before = calls(&first);
    let mut best = plan(first);
    for (apart, slack) in [(true, SLACK), (false, 0), (true, 0)] {
        if best.memory.peak_bytes <= best.memory.live_bytes / 100 * (100 + SLACK) {
            break;
        }
        let layout = lay(apart, slack);
        if slack < SLACK && calls(&layout) == before {
            break;
        }
        let other = plan(layout);
        if other.memory.peak_bytes < best.memory.peak_bytes {
            best = other;
        }
    }
    best
}

/// Percent by which an arena, or what a call needs for itself, may be larger than what lives in it
/// at once before another way is tried.
const SLACK: usize = 3;
