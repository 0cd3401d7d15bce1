//! 1F1B: as many forwards as it takes for the first backward to come back, then one of each.

use shardc_ir::schedule::Action;

use super::{backward, forward};

/// `min(p - r - 1, m)` forwards, then F and B in turn, then the backwards that remain: the order of
/// Megatron-LM (`forward_backward_pipelining_without_interleaving`), DeepSpeed (`TrainSchedule`)
/// and torch (`Schedule1F1B`); Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
/// 2021, section 2.2 (PipeDream-Flush).
///
/// Makespan `3 (m + p - 1)`; rank r holds `min(p - r, m)` microbatches.
pub(super) fn one_f_one_b(p: usize, m: usize) -> Vec<Vec<Action>> {
    (0..p).map(|r| weave(m, p - r - 1, |j| forward(r, j), |j| backward(r, j))).collect()
}

/// `warm_up` of the first kind, then one of each in turn, then what remains of the second kind.
pub(super) fn weave(
    n: usize,
    warm_up: usize,
    first: impl Fn(usize) -> Action,
    second: impl Fn(usize) -> Action,
) -> Vec<Action> {
    let warm_up = warm_up.min(n);
    let mut list: Vec<Action> = (0..warm_up).map(&first).collect();
    for i in 0..n {
        list.extend((i + warm_up < n).then(|| first(i + warm_up)));
        list.push(second(i));
    }
    list
}
