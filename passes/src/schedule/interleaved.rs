//! 1F1B over several chunks per rank.

use shardc_ir::schedule::Action;

use super::one_f_one_b::weave;
use super::{backward, forward};

/// Microbatches in groups of p; a group goes through all chunks of a rank before the next one
/// begins. Warm-up of `2 (p - r - 1) + (v - 1) p` forwards, then F and B in turn: Megatron-LM
/// (`forward_backward_pipelining_with_interleaving`); Narayanan et al., "Efficient Large-Scale
/// Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2.2.
///
/// Makespan `3 (m v + p - 1)` in units of a chunk, so the bubble of 1F1B over v. Rank 0 holds
/// `min(v m, v p + p - 1)` chunks.
pub(super) fn interleaved(p: usize, v: usize, m: usize) -> Vec<Vec<Action>> {
    // The i-th forward of a rank is of this chunk and microbatch; backwards take chunks in reverse.
    let turn = |i: usize| ((i / p) % v, i / (p * v) * p + i % p);
    let list = |r: usize| {
        let first = |i| {
            let (c, j) = turn(i);
            forward(r + c * p, j)
        };
        let second = |i| {
            let (c, j) = turn(i);
            backward(r + (v - 1 - c) * p, j)
        };
        weave(m * v, 2 * (p - r - 1) + (v - 1) * p, first, second)
    };
    (0..p).map(list).collect()
}
