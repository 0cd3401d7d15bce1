//! What every rank of the pipeline runs, and its memory: of a module whose programs are done.

use crate::memory::memory;
use crate::step::instructions::{Index, Lists, instructions};
use crate::threads;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::Module;
use shardc_ir::plan::{Mode, RankClass};
use shardc_ir::schedule::{Schedule, Times, replay};

/// What every rank of the pipeline does; an error if the functions do not fit the schedule.
pub(crate) fn lists(m: &Module, s: &Schedule, mode: Mode) -> Result<(Index, Vec<Lists>)> {
    let broken = |what: String| {
        Diag::new("plan", what)
            .rule("the functions of a plan are those of its schedule")
            .help("recompile the plan with this version of shardc")
    };
    let timeline = replay(s, &Times::unit(s.owner.len()))?;
    let index = Index::of(m, s, mode).map_err(broken)?;
    let lists = instructions(m, s, &timeline, &index).map_err(broken)?;
    Ok((index, lists))
}

pub(crate) fn classes(
    m: &Module,
    s: &Schedule,
    (index, lists): (Index, Vec<Lists>),
) -> Vec<RankClass> {
    let all: Vec<(usize, Lists)> = lists.into_iter().enumerate().collect();
    let one = |(rank, lists): &(usize, Lists)| {
        memory(m, s.microbatches, s.stages_of(*rank), index.funcs(s, *rank), lists)
    };
    // The arenas of two ranks have nothing to do with each other.
    threads::all(&all, usize::MAX, one)
}

/// What every rank runs, and its memory: of a module whose passes are done.
///
/// # Errors
/// `deadlock`, `schedule`, and `plan` if functions and schedule do not fit together.
pub fn rank_classes(m: &Module, s: &Schedule, mode: Mode) -> Result<Vec<RankClass>> {
    Ok(classes(m, s, lists(m, s, mode)?))
}
