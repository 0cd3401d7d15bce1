//! The back end's plan, and its checks by what knows nothing of how it was made.

use crate::memory;
use crate::options::Options;
use crate::step;
use shardc_ir::func::{Module, RoleKind};
use shardc_ir::loss_scale::LOSS_SCALE;
use shardc_ir::plan::{Plan, RankClass, Settings};
use shardc_ir::schedule::Schedule;
use shardc_ir::weights::Weight;

/// The plan of a module, and of what its ranks run.
pub(crate) fn plan(
    module: Module,
    classes: Vec<RankClass>,
    schedule: Schedule,
    (weights, vocab): (Vec<Weight>, usize),
    o: &Options,
) -> Plan {
    let mut args = module.funcs.iter().flat_map(|f| &f.args);
    let scaled = args.any(|a| a.is(RoleKind::Scalar, LOSS_SCALE));
    let settings = Settings {
        mode: o.mode,
        global_batch: o.global_batch,
        microbatches: o.microbatches(),
        seq: o.seq,
        tokens: o.tokens(),
        vocab,
        lr: o.lr,
        seed: o.seed,
        documents: o.documents,
        loss_scaling: scaled.then_some(o.loss_scaling),
        early_receives: o.transport.overlaps(),
    };
    Plan { module, classes, schedule, weights, settings }
}

/// Replays the lists of a plan and its memory; says what does not hold.
pub(crate) fn check(plan: &Plan) -> Result<(), String> {
    step::replay::replay(plan)
        .map_err(|d| format!("the lists of its ranks do not fit together:\n{}", d.render()))?;
    memory::replay::replay(plan)
        .map_err(|what| format!("the memory that is planned for it does not hold: {what}"))
}
