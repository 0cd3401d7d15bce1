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
mod last;
mod layout;
mod lifetimes;
mod pieces;
mod repeats;
pub mod replay;
mod roles;

use crate::step::instructions::Lists;
use layout::{FrameLayout, Frames, SLACK};
use lifetimes::Lifetimes;
use shardc_ir::func::Module;
use shardc_ir::plan::{Memory, RankClass};

/// Plans the arena of a rank of the pipeline: its functions in the order in which they feed each
/// other, and its lists, whose offsets it fills in. If the frames leave gaps, they are cut into smaller ones,
/// more of them, which fit better: what a call needs for itself by layers, then everything by values. There is no
/// search for better places in an arena of at most `enough` bytes, and no plan if more than `most` are alive at once.
pub fn memory(
    m: &Module,
    microbatches: usize,
    stages: Vec<usize>,
    funcs: Vec<usize>,
    lists: &Lists,
    enough: usize,
    most: usize,
) -> Option<RankClass> {
    let mut lives = Lifetimes::of(m, microbatches, &funcs, lists);
    let mut lay = |way| layout::layout(&mut lives, way);
    let plan = |layout: Frames| {
        let (step, evaluation, found) = arena::arena(m, &layout, lists.clone(), enough, most)?;
        let memory = Memory {
            places: layout.places,
            workspaces: layout.workspaces,
            frames: layout.frames,
            peak_bytes: found.peak_bytes,
            at_peak: found.at_peak,
            live_at_peak: found.live_at_peak,
            alive: found.alive,
            peak_at: found.peak_at,
            live_bytes: found.live_bytes,
            whole: found.whole,
            spans: found.spans,
        };
        let (stages, funcs) = (stages.clone(), funcs.clone());
        Some(RankClass { stages, funcs, step, evaluation, memory })
    };
    let mut best = plan(lay(WAYS[0]))?;
    for way in &WAYS[1..] {
        let live = best.memory.live_bytes;
        if best.memory.peak_bytes <= enough.max(live + live * SLACK / 100) {
            break;
        }
        let smaller = |c: &RankClass| c.memory.peak_bytes < best.memory.peak_bytes;
        best = plan(lay(*way)).filter(smaller).unwrap_or(best);
    }
    Some(best)
}

/// How frames are laid out, in the order in which it is tried.
const WAYS: [FrameLayout; 3] = [FrameLayout::Together, FrameLayout::Layers, FrameLayout::Values];
