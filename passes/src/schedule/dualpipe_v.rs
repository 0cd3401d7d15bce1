//! DualPipeV: the eight steps of the reference program.

use shardc_ir::schedule::Action;

use super::v_shape::VRank;

/// The order of `DualPipeV.step` in the DualPipe repository (`dualpipe/dualpipev.py`; the cut of
/// DualPipe in half is by Sea AI Lab), which torch's `ScheduleDualPipeV` has too. Rank r holds
/// stages r and `2 p - 1 - r`. The reference runs F and B of the main step as one overlapped pair;
/// here the F comes first.
///
/// The repository gives the bubble `(p/2 - 1) (F&B + B - 3 W)` for DualPipe on p ranks, F&B being
/// the time of an overlapped pair, and `p + 1` microbatches of activations; DualPipeV is the same
/// on half the ranks, so `(p - 1) (F&B + B - 3 W)` and `2 p + 1` chunks.
pub(super) fn dualpipe_v(p: usize, m: usize) -> Vec<Vec<Action>> {
    (0..p).map(|r| rank_list(p, m, r)).collect()
}

/// The list of rank r.
fn rank_list(p: usize, m: usize, r: usize) -> Vec<Action> {
    let left = p - r - 1;
    // 1 to 3: forwards of chunk 0, forwards of both, first backwards of chunk 1.
    let mut rank = VRank::begun(p, m, r);
    // 4: the main step: F of one chunk with B of the other.
    for _ in 0..m + r + 1 - 2 * p {
        rank.f(0);
        rank.b(1, false);
        rank.f(1);
        rank.b(0, false);
    }
    // 5: no forwards of chunk 0 are left.
    for _ in 0..left {
        rank.b(1, false);
        rank.f(1);
        rank.b(0, false);
    }
    // 6: backwards only; of the 2 (r + 1) the second half is cut.
    for i in 0..2 * (r + 1) {
        rank.b(1 - i % 2, i > r);
    }
    // 7 and 8: W where the rank would wait, and at the end.
    for _ in 0..left {
        rank.w();
        rank.b(0, true);
    }
    (0..r + 1).for_each(|_| rank.w());
    rank.list
}
