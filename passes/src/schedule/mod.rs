//! Pipeline schedules by name, and a search for better ones.
//!
//! A schedule is data ([`shardc_ir::schedule::Schedule`]): which rank does what, in which order.
//! Each one here is a function from ranks, chunks per rank and microbatches to that data, with the
//! paper or program it is known from. `docs/schedules.md` compares them.
//!
//! Words: p ranks, v chunks (stages) per rank, m microbatches, r a rank, s a stage. F, I and W take
//! 1 each where figures are given, a whole backward B takes 2.

mod choose;
mod dualpipe_v;
mod fill_drain;
mod interleaved;
mod legal;
mod list;
mod one_f_one_b;
mod search;
mod v_shape;
mod zero_bubble;

use shardc_ir::diag::{Diag, Result};
use shardc_ir::schedule::{Action, ActionKind, Schedule};

pub use choose::{chosen, possible};
pub use legal::{legal, runs};
pub use search::{CutCosts, Found, Front, Placement, front, search};

/// Schedules with a name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Named {
    /// One microbatch, stage after stage.
    Naive,
    /// All forwards, then all backwards.
    Gpipe,
    /// One forward, one backward, after a warm-up as short as can be.
    OneFOneB,
    /// 1F1B over several chunks per rank.
    Interleaved,
    /// GPipe over several chunks per rank.
    LoopedBfs,
    /// 1F1B with the backward cut in two, in the memory of 1F1B.
    ZbH1,
    /// The same without idle time, in twice the memory.
    ZbH2,
    /// Two chunks per rank along a V, without idle time, in the memory of 1F1B.
    ZbV,
    /// Two chunks per rank along a V, in half the memory of 1F1B.
    VHalf,
    /// Two chunks per rank along a V, in a third of the memory of 1F1B.
    VMin,
    /// Two chunks per rank along a V, forwards and backwards in pairs.
    DualPipeV,
}

impl Named {
    /// All of them, in the order of the documentation.
    pub const ALL: [Named; 11] = [
        Named::Naive,
        Named::Gpipe,
        Named::OneFOneB,
        Named::Interleaved,
        Named::LoopedBfs,
        Named::ZbH1,
        Named::ZbH2,
        Named::ZbV,
        Named::VHalf,
        Named::VMin,
        Named::DualPipeV,
    ];

    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            Named::Naive => "naive",
            Named::Gpipe => "gpipe",
            Named::OneFOneB => "1f1b",
            Named::Interleaved => "interleaved",
            Named::LoopedBfs => "looped-bfs",
            Named::ZbH1 => "zb-h1",
            Named::ZbH2 => "zb-h2",
            Named::ZbV => "zb-v",
            Named::VHalf => "v-half",
            Named::VMin => "v-min",
            Named::DualPipeV => "dualpipe-v",
        }
    }

    /// The schedule of a name.
    pub fn parse(name: &str) -> Result<Named> {
        Named::ALL.into_iter().find(|n| n.name() == name).ok_or_else(|| {
            let known: Vec<&str> = Named::ALL.iter().map(|n| n.name()).collect();
            let short: String = name.chars().take(40).collect();
            Diag::new("schedule-name", format!("unknown schedule `{short}`"))
                .rule("a schedule has a name, or is a CSV file")
                .help(format!("one of {}", known.join(", ")))
        })
    }

    /// Chunks per rank if the user does not say.
    pub fn default_chunks(self) -> usize {
        match self {
            Named::Naive | Named::Gpipe | Named::OneFOneB | Named::ZbH1 | Named::ZbH2 => 1,
            Named::Interleaved
            | Named::LoopedBfs
            | Named::ZbV
            | Named::VHalf
            | Named::VMin
            | Named::DualPipeV => 2,
        }
    }

    /// Which rank holds each stage.
    pub fn placement(self) -> Placement {
        match self {
            Named::ZbV | Named::VHalf | Named::VMin | Named::DualPipeV => Placement::V,
            Named::Naive
            | Named::Gpipe
            | Named::OneFOneB
            | Named::Interleaved
            | Named::LoopedBfs
            | Named::ZbH1
            | Named::ZbH2 => Placement::Loop,
        }
    }
}

/// The schedule of a name for p ranks, v chunks per rank and m microbatches.
pub fn make(named: Named, p: usize, v: usize, m: usize) -> Result<Schedule> {
    legal(named, p, v, m)?;
    let owner = named.placement().owner(p, v);
    let ranks = match named {
        Named::Naive | Named::Gpipe => fill_drain::gpipe(p, m),
        Named::OneFOneB => one_f_one_b::one_f_one_b(p, m),
        Named::Interleaved => interleaved::interleaved(p, v, m),
        Named::LoopedBfs => fill_drain::looped_bfs(p, v, m),
        // With one rank there is no bubble to fill, so nothing is cut.
        Named::ZbH1 | Named::ZbH2 if p == 1 => one_f_one_b::one_f_one_b(p, m),
        Named::ZbH1 => zero_bubble::zb_h1(p, m),
        Named::ZbH2 => zero_bubble::zb_h2(p, m),
        Named::ZbV => v_shape::zb_v(p, m),
        Named::VHalf => v_shape::v_half(p, m),
        Named::VMin => v_shape::v_min(p, m),
        Named::DualPipeV => dualpipe_v::dualpipe_v(p, m),
    };
    Ok(Schedule { owner, microbatches: m, ranks })
}

/// `sFj`.
fn forward(stage: usize, microbatch: usize) -> Action {
    Action { kind: ActionKind::Forward, stage, microbatch }
}

/// `sBj`.
fn backward(stage: usize, microbatch: usize) -> Action {
    Action { kind: ActionKind::Backward, stage, microbatch }
}
