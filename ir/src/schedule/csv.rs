//! Schedules as CSV files, in the form of torchtitan (`pipeline_parallel_schedule_csv`).
//!
//! One line per rank of the pipeline, one cell per action, as torch.distributed.pipelining prints
//! an `_Action`: stage, kind, microbatch. Empty cells say that a rank waits; they are not read.
//!
//! ```text
//! 0F0,0F1,,,0B0,,0B1
//! ,1F0,1B0,1F1,1B1
//! ```
//!
//! `(0F5;3B2)OVERLAP_F_B` is a forward and a backward that torch runs interleaved; here it is the
//! two, one after the other. A file with sends, receives or gathers (torch's `compute_comms`) is
//! refused: those follow from the rest.

use std::fmt::Write;

use super::check::{MAX_PAIRS, MAX_RANKS, check_size};
use super::{Action, ActionKind, Schedule};
use crate::diag::{Diag, Result};

/// Longest text that is read, in bytes.
const MAX_TEXT: usize = 1 << 28;
const RULE: &str = "a cell is STAGE KIND MICROBATCH with a kind of F, B, I or W, as in 3F12";

/// One line per rank of the pipeline, one cell per action.
pub fn write_csv(s: &Schedule) -> String {
    let mut text = String::new();
    for rank in &s.ranks {
        for (i, a) in rank.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(text, "{comma}{a}").expect("a String takes all text");
        }
        text.push('\n');
    }
    text
}

/// Reads what [`write_csv`] and torchtitan write. Stages belong to the rank that names them;
/// whether every action is there is for [`replay`](super::replay()) to say.
pub fn parse_csv(text: &str) -> Result<Schedule> {
    if text.len() > MAX_TEXT {
        let n = text.len();
        return Err(Diag::new("schedule-csv", format!("a schedule of {n} bytes"))
            .rule(format!("at most {MAX_TEXT} bytes"))
            .help("use fewer microbatches"));
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(text).trim_end();
    let mut ranks: Vec<Vec<Action>> = vec![];
    for (rank, line) in text.lines().enumerate() {
        let mut list = vec![];
        for (i, cell) in line.split(',').enumerate() {
            read_cell(cell.trim(), &mut list)
                .map_err(|d| d.at(format!("line {}, cell {}", rank + 1, i + 1)))?;
        }
        if list.is_empty() {
            let place = format!("line {}", rank + 1);
            return Err(Diag::new("schedule-csv", format!("rank {rank} has no action"))
                .at(place)
                .rule("one line per rank, each with all actions of its stages")
                .help(format!("remove line {}, or give rank {rank} a stage", rank + 1)));
        }
        if rank == MAX_RANKS {
            return Err(Diag::new("schedule-csv", format!("more than {MAX_RANKS} lines"))
                .rule(format!("one line per rank, ranks <= {MAX_RANKS}"))
                .help(format!("give {MAX_RANKS} lines or fewer")));
        }
        ranks.push(list);
    }
    assemble(ranks)
}

/// Which rank holds each stage, from who names it.
fn assemble(ranks: Vec<Vec<Action>>) -> Result<Schedule> {
    let all = || ranks.iter().flatten();
    let stages = all().map(|a| a.stage + 1).max().unwrap_or(0);
    let microbatches = all().map(|a| a.microbatch + 1).max().unwrap_or(0);
    if stages == 0 {
        return Err(Diag::new("schedule-csv", "the file has no action")
            .rule("one line per rank, each with all actions of its stages")
            .help("the smallest schedule is `0F0,0B0`"));
    }
    check_size(ranks.len(), stages, microbatches)?;
    let mut owner = vec![None; stages];
    for (rank, list) in ranks.iter().enumerate() {
        for a in list {
            let first: usize = *owner[a.stage].get_or_insert(rank);
            if first != rank {
                let s = a.stage;
                return Err(Diag::new(
                    "schedule-csv",
                    format!("stage {s} is on rank {first} and, by {a}, on rank {rank}"),
                )
                .at(format!("line {}", rank + 1))
                .rule("every stage lives on one rank, whose line has all its actions")
                .help(format!("move {a} to line {}", first + 1)));
            }
        }
    }
    let owner: Option<Vec<usize>> = owner.iter().copied().collect();
    if let Some(owner) = owner {
        return Ok(Schedule { owner, microbatches, ranks });
    }
    let mut named = vec![false; stages];
    all().for_each(|a| named[a.stage] = true);
    let s = named.iter().position(|n| !n).unwrap_or(0);
    Err(Diag::new("schedule-csv", format!("no rank has stage {s} of {stages}"))
        .rule("stages are numbered from 0 without gaps")
        .help(format!("add the actions of stage {s}, {s}F0 first, or number the stages anew")))
}

/// Reads one cell: nothing, an action, or two that torch overlaps.
fn read_cell(cell: &str, list: &mut Vec<Action>) -> Result<()> {
    if cell.is_empty() {
        return Ok(());
    }
    let Some(inner) = cell.strip_prefix('(') else {
        list.push(read_action(cell)?);
        return Ok(());
    };
    let pair = inner.strip_suffix(")OVERLAP_F_B").and_then(|p| p.split_once(';'));
    let Some((first, second)) = pair else {
        return Err(Diag::new("schedule-csv", format!("`{}` is not a cell", cut(cell)))
            .rule("overlapped cells are (FORWARD;BACKWARD)OVERLAP_F_B, as in (0F5;3B2)OVERLAP_F_B")
            .help("write the two as cells of their own: 0F5,3B2"));
    };
    for part in [first, second] {
        list.push(read_action(part.trim())?);
    }
    Ok(())
}

/// Reads `3F12`.
fn read_action(cell: &str) -> Result<Action> {
    let no_cell = || {
        Diag::new("schedule-csv", format!("`{}` is not a cell", cut(cell)))
            .rule(RULE)
            .help("write 3F12 for the forward of microbatch 12 in stage 3")
    };
    let letters = cell.find(|c: char| !c.is_ascii_digit()).ok_or_else(no_cell)?;
    let (stage, rest) = cell.split_at(letters);
    let digits = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
    let (kind, microbatch) = rest.split_at(digits);
    let kind = match kind {
        "F" => ActionKind::Forward,
        "B" => ActionKind::Backward,
        "I" => ActionKind::Input,
        "W" => ActionKind::Weight,
        "SEND_F" | "RECV_F" | "SEND_B" | "RECV_B" => {
            return Err(derived(cell, "sends and receives follow from the stages"));
        }
        "UNSHARD" | "RESHARD" | "REDUCE_GRAD" => {
            return Err(derived(cell, "gathers and reductions of parameters follow from the mesh"));
        }
        _ => return Err(no_cell()),
    };
    let number = |text: &str| {
        let n: usize = text.parse().map_err(|_| no_cell())?;
        match n {
            0..MAX_PAIRS => Ok(n),
            _ => Err(no_cell().why(format!("{n} is more than {}", MAX_PAIRS - 1))),
        }
    };
    Ok(Action { kind, stage: number(stage)?, microbatch: number(microbatch)? })
}

fn derived(cell: &str, why: &str) -> Diag {
    Diag::new("schedule-csv", format!("`{}` is not a computation", cut(cell)))
        .rule("cells are computations (F, B, I, W); sends and receives are derived")
        .why(why)
        .help("leave the cell out, or write the file with torch's format `compute_only`")
}

/// Enough of a cell to find it by.
fn cut(cell: &str) -> String {
    let short: String = cell.chars().take(40).filter(|c| !c.is_control()).collect();
    if short.len() < cell.len() { format!("{short}…") } else { short }
}
