//! A step's data: checked once, then written by every rank into its arena.

use crate::engine::{Engine, out_of_arena};
use crate::wiring::{Slot, Wiring};
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::func::{Func, RoleKind};
use shardc_ir::plan::Settings;
use shardc_ir::types::{DType, Type};

/// What all ranks get for a step.
pub(crate) struct StepData {
    pub input_ids: Vec<i32>,
    pub targets: Vec<i32>,
    pub lr: f32,
    /// From 1; 0 of an evaluation.
    pub step: usize,
    pub observe: bool,
    /// Run the plan's evaluation instead of its step.
    pub evaluate: bool,
}

/// Numbers of the input `run`.
const RUN: usize = 3;

fn names_input(name: &str) -> bool {
    matches!(name, "input_ids" | "targets" | "positions" | "places" | "run")
}

/// Checks tokens and targets of `[global_batch, seq]`. A negative target is ignored.
pub(crate) fn check(s: &Settings, data: &StepData, needs_targets: bool) -> Result<()> {
    let want = s.global_batch.saturating_mul(s.seq);
    for (name, x) in [("input_ids", &data.input_ids), ("targets", &data.targets)] {
        let ids = name == "input_ids";
        if x.len() != want && (ids || needs_targets || !x.is_empty()) {
            let (b, q) = (s.global_batch, s.seq);
            return Err(Diag::new(
                "batch-shape",
                format!("`{name}` has {} numbers, the plan needs {want}", x.len()),
            )
            .rule("a batch is [global_batch, seq]")
            .help(format!(
                "give [{b}, {q}] numbers, or compile with other --global-batch and --seq"
            )));
        }
        let vocab = i32::try_from(s.vocab).unwrap_or(i32::MAX);
        if let Some(at) = x.iter().position(|&i| i >= vocab || (ids && i < 0)) {
            let (row, column, id) = (at / s.seq, at % s.seq, x[at]);
            let code = if ids { "token-range" } else { "label-range" };
            let low = if ids { "0" } else { "any negative number (ignored) or 0" };
            return Err(Diag::new(
                code,
                format!(
                    "`{name}` is {id} in row {row}, column {column}; the model has {vocab} tokens"
                ),
            )
            .at(format!("{name}[{row}, {column}]"))
            .rule("a token is in 0..vocab_size")
            .help(format!("use {low} to {}", vocab - 1)));
        }
    }
    Ok(())
}

/// Checks that every input of the plan is one that a step can fill. True if targets are needed.
pub(crate) fn check_inputs(w: &Wiring) -> Result<bool> {
    let s = &w.plan.settings;
    if !s.tokens.fits(s.seq) {
        let message = format!("{} tokens cannot be dealt to the ranks as {:?}", s.seq, s.tokens);
        return Err(Diag::new("plan", message)
            .rule("zigzag deals 2 chunks of equal length to every rank of cp")
            .help("compile the plan again with this version of shardc")
            .exit(Exit::Environment));
    }
    let mut targets = false;
    for slot in w.inputs.iter().flatten() {
        let f = &w.plan.module.funcs[slot.func];
        let (t, name) = (f.ty(slot.value), input_name(f, slot));
        let rows = t.dims.first().map_or(0, |d| d.size);
        let even = t.rank() == 1 || t.rank() == 2 && rows % t.pieces(w.mesh(), 0) == 0;
        let batch = t.rank() == 2
            && rows.checked_mul(slot.part.1) == Some(s.global_batch)
            && t.dims[1].size == s.seq;
        let line = t.rank() == 1 && rows == s.seq;
        let fits = match name {
            "positions" => line,
            "run" => t.rank() == 1 && rows == RUN,
            _ => batch,
        };
        let room = slot.bytes >= t.local_bytes(w.mesh());
        if !names_input(name) || t.dtype != DType::I32 || !even || !fits || !room {
            let sizes: Vec<usize> = t.sizes().to_vec();
            let message = format!("input `{name}` of sizes {sizes:?} cannot be filled");
            return Err(Diag::new("plan", message)
                .rule(
                    "i32: input_ids, targets and places [batch, seq], rows split evenly; \
                       positions [seq]; run [3]",
                )
                .help(format!("compile for {} sequences of {} tokens", s.global_batch, s.seq))
                .exit(Exit::Environment));
        }
        targets |= name == "targets";
    }
    Ok(targets)
}

fn input_name<'a>(f: &'a Func, slot: &Slot) -> &'a str {
    let arg = f.args.iter().find(|a| a.value == slot.value);
    arg.and_then(|a| a.role.as_ref()).map_or("", |r| &r.name)
}

/// The row of the global batch that is row `row` of microbatch `j`: a rank's rows of all its
/// microbatches lie together, in order.
pub(crate) fn global_row(w: &Wiring, t: &Type, row: usize, j: usize) -> usize {
    let pieces = t.pieces(w.mesh(), 0);
    let own = t.dims[0].size / pieces.max(1);
    let (piece, i) = (row / own.max(1), row % own.max(1));
    piece * (w.plan.settings.global_batch / pieces) + j * own + i
}

/// Writes the part of a step's inputs and scalars that a rank of this class needs.
pub(crate) fn write(
    w: &Wiring,
    class: usize,
    engine: &mut dyn Engine,
    coords: &[usize],
    data: &StepData,
) -> Result<()> {
    for slot in &w.inputs[class] {
        engine.write(slot.offset, slot.bytes, &mut |to| {
            // SAFETY: so many bytes are there, and every bit pattern is an f32.
            let to = unsafe { std::slice::from_raw_parts_mut(to, slot.bytes / 4) };
            input(w, slot, to, coords, data).ok_or_else(out_of_arena)
        })?;
    }
    for p in w.args(|k| k == RoleKind::Scalar).filter(|p| w.class_of[p.func] == class) {
        let x = match &*p.role.name {
            "lr" => data.lr,
            "step" => data.step as f32,
            _ => return Err(out_of_arena()),
        };
        if p.place.bytes < 4 {
            return Err(out_of_arena());
        }
        engine.write(p.place.offset, p.place.bytes, &mut |to| {
            // SAFETY: the place has 4 bytes at least.
            unsafe { to.write(x) };
            Ok(())
        })?;
    }
    Ok(())
}

/// Writes an input; `None` if the data are not as many as the plan has.
fn input(w: &Wiring, slot: &Slot, to: &mut [f32], coords: &[usize], data: &StepData) -> Option<()> {
    let f = &w.plan.module.funcs[slot.func];
    let (ty, name) = (f.ty(slot.value), input_name(f, slot));
    let last = ty.extent(w.mesh(), ty.rank() - 1, coords);
    let word = |i: i32| f32::from_bits(i as u32);
    let s = &w.plan.settings;
    let position = |i: usize| s.tokens.position(s.seq, last.offset + i);
    if name == "run" {
        // What draws depend on: the seed in two halves, and the step.
        let run = [s.seed as u32, (s.seed >> 32) as u32, data.step as u32];
        to.get_mut(..RUN)?.iter_mut().zip(run).for_each(|(t, x)| *t = f32::from_bits(x));
        return Some(());
    }
    if ty.rank() == 1 {
        (0..last.len).for_each(|i| to[i] = word(position(i) as i32));
        return Some(());
    }
    let from = if name == "targets" { &data.targets } else { &data.input_ids };
    let rows = ty.extent(w.mesh(), 0, coords);
    for i in 0..rows.len {
        let at = global_row(w, ty, rows.offset + i, slot.part.0);
        let row = from.get(at * s.seq..)?;
        let to = &mut to[i * last.chunk..][..last.len];
        for (k, t) in to.iter_mut().enumerate() {
            // A place is the number of a token in the batch.
            let place = || (at * s.seq + position(k)) as i32;
            *t = word(if name == "places" { place() } else { *row.get(position(k))? });
        }
    }
    Some(())
}
