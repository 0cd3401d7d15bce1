//! `shardc import`: an archive of `torch.export` in, the text of a model out.

use super::passes::write_program;
use super::warn;
use clap::{Args, ValueEnum};
use shardc_frontends::import::{DEFAULT, Opened, Raise, Sizes};
use shardc_ir::diag::{Result, count};
use shardc_ir::plan::Mode;
use shardc_ir::text;
use shardc_process::shell::word;
use shardc_process::terminal::{note, show_file, show_written};
use std::path::PathBuf;

/// How such an archive is made.
pub const EXPORT: &str = "How to make an archive, with torch 2.6 or newer:

  import torch
  from transformers import AutoModelForCausalLM
  model = AutoModelForCausalLM.from_pretrained(\"ORG/NAME\", use_cache=False).train()
  ids = torch.zeros(2, 64, dtype=torch.long)
  dims = {0: torch.export.Dim(\"batch\"), 1: torch.export.Dim(\"seq\")}
  program = torch.export.export(model, (), dict(input_ids=ids, labels=ids.clone()), strict=False,
                                dynamic_shapes=dict(input_ids=dims, labels=dims))
  torch.export.save(program, \"model.pt2\")

Then `shardc compile model.pt2 --mesh tp=2 -o DIR` and `shardc run DIR --weights model.pt2`.";

/// Flags of `shardc import`.
#[derive(Args, Debug)]
pub struct Import {
    /// An archive that torch.export.save wrote
    archive: PathBuf,
    /// File to write [default: standard output]
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// Sequences per microbatch, over all ranks [default: those of the archive, or 8]
    #[arg(long)]
    rows: Option<usize>,
    /// Tokens per sequence [default: those of the archive, or 512]
    #[arg(long)]
    seq: Option<usize>,
    /// train (with the loss), or infer (the forward pass to logits)
    #[arg(long, value_enum, default_value_t = TextUse::Train)]
    mode: TextUse,
}

/// What the text is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum TextUse {
    Train,
    Infer,
}

/// Writes or prints the text.
pub fn import(how: &Import) -> Result<i32> {
    let opened = Opened::read(&how.archive)?;
    let [rows, seq] = opened.fixed(DEFAULT);
    let sizes = Sizes {
        rows: how.rows.or(rows).unwrap_or(DEFAULT.rows),
        seq: how.seq.or(seq).unwrap_or(DEFAULT.seq),
    };
    let mode = match how.mode {
        TextUse::Train => Mode::Train,
        TextUse::Infer => Mode::Infer,
    };
    let m = opened.import(sizes, mode, Raise::default())?;
    warn(&m.warnings);
    let text = text::print_source(&m.source);
    let Some(out) = &how.output else {
        show_file(&text);
        return Ok(0);
    };
    write_program(out, &text)?;
    show_written(out);
    let parameters: usize =
        m.source.weights.iter().map(|w| w.shape.iter().product::<usize>()).sum();
    let lines = count(m.source.module.funcs[0].nodes.len(), "op", "ops");
    let (dir, word) = (out.display(), word(out));
    note(format!(
        "wrote {dir}: {parameters} parameters, {lines}   next: shardc compile {word} --mesh tp=2"
    ));
    Ok(0)
}
