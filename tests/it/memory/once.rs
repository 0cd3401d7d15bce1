//! What all microbatches make alike is made once, and is in memory once, whatever the schedule.

use super::{asked, fixture_config, planned, scheduled};
use shardc_ir::documents::Documents;
use shardc_ir::func::{FuncKind, RoleKind};
use shardc_ir::plan::Plan;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::Options;
use shardc_passes::schedule::Named;

/// Cosines and sines that functions of a kind compute.
fn computed(p: &Plan, is: impl Fn(FuncKind) -> bool) -> usize {
    let funcs = p.module.funcs.iter().filter(|f| is(f.kind));
    funcs.flat_map(|f| &f.nodes).filter(|n| ["cos", "sin"].contains(&n.op.mnemonic())).count()
}

/// Every rank of a pipeline makes rotary tables before the microbatches, for all of its stages. They lie in what
/// lives through the step, in every function that reads them, and nothing is saved of them.
#[test]
fn rotary_tables_are_made_once_per_step() {
    let config = fixture_config("llama_deep");
    for recompute in [Recompute::None, Recompute::Full] {
        for n in [Named::OneFOneB, Named::Interleaved, Named::ZbH1, Named::ZbV, Named::LoopedBfs] {
            let o = asked(&[("pp", 2)], false, 16, 8, recompute.clone());
            let (_, plan) = planned(&config, &scheduled(o, n));
            assert_eq!(computed(&plan, FuncKind::is_looped), 0, "{n:?}");
            assert_eq!(computed(&plan, |k| k == FuncKind::StepPrologue), 2 * 2, "{n:?}");
            let mut read = 0;
            for c in &plan.classes {
                for &f in &c.funcs {
                    let func = &plan.module.funcs[f];
                    for a in &func.args {
                        let role = a.role.as_ref().expect("of a plan");
                        let of_table = role.name.starts_with("cos") || role.name.starts_with("sin");
                        assert!(!(role.kind == RoleKind::Stash && of_table), "{n:?}: {role}");
                        if role.kind == RoleKind::Step && of_table {
                            read += 1;
                            let place = c.memory.places[f][a.value];
                            // The first frame is what lives through a step.
                            assert_eq!(place.frame, 0, "{n:?}: {role} of @{}", func.name);
                        }
                    }
                }
            }
            // Cosine and sine in forward; backward has the negated sine.
            assert!(read >= 3 * plan.schedule.owner.len(), "{n:?}: {read}");
        }
    }
}

/// One microbatch makes them where it needs them; so do rows with documents, of each of which they are others.
#[test]
fn tables_that_are_not_the_same_for_all_stay() {
    let config = fixture_config("llama_deep");
    let of = |m: usize, documents: Option<Documents>| {
        let o = asked(&[("pp", 2)], false, 16, m, Recompute::None);
        let plan = planned(&config, &Options { documents, ..o }).1;
        [computed(&plan, FuncKind::is_looped), computed(&plan, |k| k == FuncKind::StepPrologue)]
    };
    assert_eq!(of(1, None), [4, 0]);
    assert_eq!(of(4, None), [0, 4]);
    assert_eq!(of(4, Some(Documents::ends(0, None))), [4, 0]);
}
