//! What every rank of the pipeline runs, and its memory: of a module whose programs are done.

use crate::memory::memory;
use crate::step::early;
use crate::step::instructions::{Index, Lists, instructions};
use crate::threads;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::Module;
use shardc_ir::plan::{Mode, RankClass, Settings};
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

/// Places everything in the memory of every rank of the pipeline, if it needs no more than so many bytes at once. With
/// `early`, receives are posted before the work that precedes them, where the rank that needs most memory does not come
/// to need more for it.
pub(crate) fn classes(
    m: &Module,
    s: &Schedule,
    (index, lists): (Index, Vec<Lists>),
    early: bool,
    most: usize,
) -> Option<Vec<RankClass>> {
    let all: Vec<(usize, Lists)> = lists.into_iter().enumerate().collect();
    let fitting = |rank: usize, lists: &Lists, enough: usize, most: usize| {
        let (stages, funcs) = (s.stages_of(rank), index.funcs(s, rank));
        memory(m, s.microbatches, stages, funcs, lists, enough, most)
    };
    let place = |rank: usize, lists: &Lists, enough: usize| {
        fitting(rank, lists, enough, usize::MAX).expect("as many bytes as it takes")
    };
    // The arenas of two ranks have nothing to do with each other.
    let early = early && all.len() > 1;
    let enough = if early { usize::MAX } else { 0 };
    let first = threads::all(&all, usize::MAX, |(rank, lists)| fitting(*rank, lists, enough, most));
    let first = first.into_iter().collect::<Option<Vec<RankClass>>>()?;
    if !early {
        return Some(first);
    }
    // The fullest arena has at least as many bytes as are alive at once in any.
    let least = first.iter().map(|c| c.memory.live_bytes).max().unwrap_or(0);
    let both: Vec<(RankClass, &(usize, Lists))> = first.into_iter().zip(&all).collect();
    let placed = threads::all(&both, usize::MAX, |(class, (rank, lists))| {
        if class.memory.peak_bytes <= least { class.clone() } else { place(*rank, lists, least) }
    });
    let limit = placed.iter().map(|c| c.memory.peak_bytes).max().unwrap_or(0);
    let both: Vec<(&RankClass, &(usize, Lists))> = placed.iter().zip(&all).collect();
    Some(threads::all(&both, usize::MAX, |(class, (rank, lists))| {
        let again = |step| {
            let lists = Lists { step, evaluation: lists.evaluation.clone() };
            place(*rank, &lists, 0)
        };
        let posted = early::post(class, &lists.step, limit, again);
        let own = class.memory.peak_bytes;
        let searched = || (own <= least).then(|| place(*rank, lists, 0));
        let searched = || searched().filter(|c| c.memory.peak_bytes <= own);
        posted.or_else(searched).unwrap_or_else(|| (*class).clone())
    }))
}

/// What every rank runs, and its memory: of a module whose passes are done.
///
/// # Errors
/// `deadlock`, `schedule`, and `plan` if functions and schedule do not fit together.
pub fn rank_classes(m: &Module, s: &Schedule, of: &Settings) -> Result<Vec<RankClass>> {
    let classes = classes(m, s, lists(m, s, of.mode)?, of.early_receives, usize::MAX);
    Ok(classes.expect("as many bytes as it takes"))
}
