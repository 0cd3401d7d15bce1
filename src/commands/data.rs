//! `shardc data`: examples as a run would read them, without a plan.

use serde_json::json;
use shardc_ir::diag::Result;
use shardc_plans::hub;
use shardc_process::terminal::{json_line, show};
use shardc_train::data::{Order, Picks, Reading, Setup, YesNo, open_examples};
use std::path::PathBuf;

/// Flags of `data`.
#[derive(clap::Args, Clone, Debug)]
pub struct Show {
    /// Examples: FILE.jsonl, FILE.json, or jsonl:GLOB
    pub file: String,
    /// Tokenizer: a folder with tokenizer.json, or that file
    #[arg(long, value_name = "PATH")]
    pub tokenizer: PathBuf,
    /// Tokens of a row, as of --seq of compile [default: rows are as long as examples]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub seq: Option<u32>,
    /// How many rows to show, what is scored in brackets
    #[arg(long, value_name = "K", default_value_t = 1)]
    pub show: usize,
    #[command(flatten)]
    pub reading: Reading,
}

/// Prints what examples become; the exit status.
///
/// # Errors
/// Those of reading examples.
pub fn data(how: &Show, as_json: bool) -> Result<i32> {
    let seq = how.seq.map_or(usize::MAX, |n| n as usize);
    let setup = Setup {
        tokenizer: &hub::resolved(&how.tokenizer)?,
        vocab: i32::MAX as usize,
        seq,
        pack: how.reading.pack == Some(YesNo::Yes),
        reading: &how.reading,
        show: how.show,
    };
    let e = open_examples("FILE", &how.file, &setup)?;
    let picks = Picks { order: Order::Sequential, ..Picks::random(0) };
    if as_json {
        let mut out = e.stats.json();
        if how.seq.is_some() {
            out["rows"] = e.rows_of(&picks, 1.0).into();
            out["full"] = e.full(&picks, e.pack).into();
            out["full_packed"] = e.full(&picks, true).into();
        }
        let one = |s: &shardc_train::data::Sample| json!({ "place": s.place, "tokens": s.ids, "scored": s.scored, "shown": s.shown });
        out["shown"] = e.samples.iter().map(one).collect();
        show(json_line("data", out));
        return Ok(0);
    }
    let rows = how.seq.map(|_| e.told_rows(&picks, None)).unwrap_or_default();
    let shown = e.samples.iter().map(|s| format!("{}: {}", s.place, s.shown));
    let all = [e.told(), rows].concat().into_iter().chain(shown);
    show(all.map(|line| line + "\n").collect::<String>());
    Ok(0)
}
