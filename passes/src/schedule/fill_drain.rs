//! All forwards, then all backwards.

use shardc_ir::schedule::Action;

use super::{backward, forward};

/// F of all microbatches, then B of all, in the same order: as in torch's `ScheduleGPipe` (Huang et
/// al., "GPipe", 2018, section 2.3, runs the backwards in reverse).
///
/// Makespan `3 (m + p - 1)`; every rank holds m microbatches. With m = 1 it is the naive schedule,
/// in which one rank works at a time.
pub(super) fn gpipe(p: usize, m: usize) -> Vec<Vec<Action>> {
    let list = |s| (0..m).map(|j| forward(s, j)).chain((0..m).map(|j| backward(s, j))).collect();
    (0..p).map(list).collect()
}

/// Chunk by chunk: F of all microbatches in the first chunk, then in the next; B from the last
/// chunk on, microbatches in reverse. As in torch's `ScheduleLoopedBFS` (Lamy-Poirier,
/// "Breadth-First Pipeline Parallelism", 2022, section 4).
///
/// A rank holds `m v` chunks.
pub(super) fn looped_bfs(p: usize, v: usize, m: usize) -> Vec<Vec<Action>> {
    let list = |rank| {
        let stages = (0..v).map(|c| rank + c * p);
        let down = stages.clone().flat_map(|s| (0..m).map(move |j| forward(s, j)));
        let up = stages.rev().flat_map(|s| (0..m).rev().map(move |j| backward(s, j)));
        down.chain(up).collect()
    };
    (0..p).map(list).collect()
}
