//! The table of the passes.

use shardc_ir::phase::Phase;
use shardc_passes::pipeline::{BACK_END, PASSES, names};

/// A pass takes what the one before it leaves, from a model on one device to a step; and each says why it stands
/// where it stands.
#[test]
fn each_takes_what_the_one_before_leaves() {
    let mut phase = Phase::Source;
    for p in PASSES.iter().chain(&BACK_END) {
        assert_eq!(p.from, phase, "{}", p.name);
        assert!(!p.why.is_empty(), "{}", p.name);
        phase = p.to;
    }
    assert_eq!(phase, Phase::Step);
    assert!(BACK_END.iter().all(|p| p.from == p.to), "they leave the module as it is");
    let mut all: Vec<&str> = names().collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), PASSES.len() + BACK_END.len(), "a name is one pass's");
}
