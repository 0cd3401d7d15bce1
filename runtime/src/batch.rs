//! A step's data: checked once, then written by every rank into its arena.

use crate::engine::{Engine, out_of_arena};
use crate::wiring::{InputSlot, Wiring};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::documents::{Documents, Places, ahead, histogram};
use shardc_ir::func::{Fill, Func, Input, InputRow, RoleKind, inputs};
use shardc_ir::loss_scale::LOSS_SCALE;
use shardc_ir::plan::Settings;
use shardc_ir::tensor::each_index;
use shardc_ir::types::{DType, Type};
use std::collections::BTreeMap;

/// Numbers of an input, row-major.
#[derive(Clone, PartialEq, Debug)]
pub enum Numbers {
    I32(Vec<i32>),
    F32(Vec<f32>),
}

impl Numbers {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Numbers::I32(x) => x.len(),
            Numbers::F32(x) => x.len(),
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn dtype(&self) -> DType {
        match self {
            Numbers::I32(_) => DType::I32,
            Numbers::F32(_) => DType::F32,
        }
    }

    /// The bits of one, as they lie in an arena.
    fn word(&self, at: usize) -> Option<u32> {
        match self {
            Numbers::I32(x) => x.get(at).map(|&x| x as u32),
            Numbers::F32(x) => x.get(at).map(|x| x.to_bits()),
        }
    }
}

/// The data of a step by the names of inputs: `[global_batch, …]`, or without rows those that all share.
pub type Columns = BTreeMap<String, Numbers>;

/// What all ranks get for a step.
#[derive(Clone, Debug)]
pub struct StepData {
    pub columns: Columns,
    pub lr: f32,
    /// From 1; 0 of an evaluation.
    pub step: usize,
    /// The number of the optimizer's step, from 1: how many have changed something, and this one.
    pub update: usize,
    /// What backward's seeds are multiplied by.
    pub loss_scale: f32,
    pub observe: bool,
    /// Run the plan's evaluation instead of its step.
    pub evaluate: bool,
}

/// Numbers of the input `run`.
const RUN: usize = 3;

/// Adds what is not given to the columns of a step: masks without padding, and what follows from tokens: which
/// documents they are of, where in them, how many are not padding, and which labels are ignored. How many labels are
/// each class may be given, of more rows than those of the step: an evaluation is of all its batches together.
pub fn complete(s: &Settings, table: &[InputRow], columns: &mut Columns) {
    for r in table.iter().filter(|r| r.input.fill == Fill::Mask) {
        let ones = || Numbers::I32(vec![1; s.global_batch.saturating_mul(r.elements())]);
        columns.entry(r.name.to_string()).or_insert_with(ones);
    }
    let places = documents(s, table, columns);
    // Of labels those are left that are scored.
    let row = |fill: Fill| table.iter().find(|r| r.input.fill == fill);
    let found = |fill| match row(fill).and_then(|r| columns.get(&*r.name)) {
        Some(Numbers::I32(x)) => Some(x),
        _none => None,
    };
    let mut made = vec![];
    for r in table.iter().filter(|r| r.input.fill == Fill::Histogram) {
        let labels = found(Fill::Labels).map_or(&[][..], |x| x);
        made.push((r, histogram(labels, r.elements(), s.microbatches)));
    }
    made.retain(|(r, _)| !columns.contains_key(&*r.name));
    let mut further = vec![];
    for (fill, of) in [(Fill::Ahead, Fill::Tokens), (Fill::LabelsAhead, Fill::Labels)] {
        let Some((r, of)) = row(fill).zip(found(of)) else { continue };
        let depths = r.sizes.last().map_or(0, |&n| n.min(s.seq));
        let all = ahead(of, places.as_ref(), depths, s.seq);
        if let Some(r) = row(Fill::Scored).filter(|_| fill == Fill::LabelsAhead) {
            made.push((r, Documents::scored(&all, depths, s.microbatches)));
        }
        further.push((r.name.to_string(), Numbers::I32(all)));
    }
    columns.extend(further);
    for (r, all) in made {
        let all = all.into_iter().map(|x| x as f32).collect();
        columns.insert(r.name.to_string(), Numbers::F32(all));
    }
}

/// Adds what follows from the documents of tokens; where these are.
fn documents(s: &Settings, table: &[InputRow], columns: &mut Columns) -> Option<Places> {
    let documents = s.documents?;
    let row = |fill: Fill| table.iter().find(|r| r.input.fill == fill);
    let Some(Numbers::I32(tokens)) = row(Fill::Tokens).and_then(|r| columns.get(&*r.name)) else {
        return None;
    };
    let tokens = tokens.clone();
    let given = match row(Fill::Segments).and_then(|r| columns.remove(&*r.name)) {
        Some(Numbers::I32(x)) => Some(x),
        _none => None,
    };
    let labels = row(Fill::Labels).filter(|r| r.of_tokens());
    let labels = match labels.and_then(|r| columns.get_mut(&*r.name)) {
        Some(Numbers::I32(x)) => Some(&mut x[..]),
        _none => None,
    };
    let places = documents.places(&tokens, given.as_deref(), labels, s.seq);
    if let Some(r) = row(Fill::Count) {
        let count = Documents::count(&places.segments, s.microbatches) as f32;
        columns.insert(r.name.to_string(), Numbers::F32(vec![count]));
    }
    for (fill, made) in [(Fill::Segments, &places.segments), (Fill::Offsets, &places.offsets)] {
        if let Some(r) = row(fill) {
            columns.insert(r.name.to_string(), Numbers::I32(made.clone()));
        }
    }
    Some(places)
}

/// Checks what there is for the inputs of a table. A negative label is ignored; other whole numbers are
/// in what they index.
pub(crate) fn check(s: &Settings, table: &[InputRow], data: &StepData) -> Result<()> {
    for row in table.iter().filter(|r| r.input.fill.is_data()) {
        let rows = if row.input.batch { s.global_batch } else { 1 };
        let want = rows.saturating_mul(row.elements());
        let found = data.columns.get(&*row.name);
        let Some(x) = found.filter(|x| x.len() == want && x.dtype() == row.dtype) else {
            let own = row.input.batch.then_some(s.global_batch);
            let shape: Vec<usize> = own.into_iter().chain(row.sizes.iter().copied()).collect();
            let (name, dtype) = (&row.name, row.dtype.name());
            let has =
                found.map_or("nothing".into(), |x| format!("{} {}", x.len(), x.dtype().name()));
            let what = format!("`{name}` has {has}, the plan needs {want} {dtype}");
            let help = format!(
                "give {dtype} {shape:?}, or compile with another --global-batch, or --seq for tokens"
            );
            return Err(Diag::new("batch-shape", what)
                .rule("an input is [global_batch, …], or what all rows share")
                .help(help));
        };
        if let (Numbers::I32(x), true) = (x, row.indexes()) {
            in_range(s, row, x)?;
        }
    }
    Ok(())
}

fn in_range(s: &Settings, row: &InputRow, x: &[i32]) -> Result<()> {
    let below = i32::try_from(row.bound(s.vocab)).unwrap_or(i32::MAX);
    let label = row.input.fill == Fill::Labels;
    let Some(at) = x.iter().position(|&i| i >= below || (!label && i < 0)) else { return Ok(()) };
    let (width, id, name) = (row.elements().max(1), x[at], &row.name);
    let (r, column) = (at / width, at % width);
    if row.input.fill == Fill::Mask {
        return Err(Diag::new(
            "mask-range",
            format!("`{name}` is {id} in row {r}, column {column}"),
        )
        .at(format!("{name}[{r}, {column}]"))
        .rule("a mask is 1 of a token and 0 of padding"));
    }
    let (code, low) = match label {
        true => ("label-range", "any negative number (ignored) or 0"),
        false => ("token-range", "0"),
    };
    // Labels of rows, and columns, choose from tables of their own.
    let (has, rule) = match row.of_tokens() {
        true => ("the model has", "a token is in 0..vocab_size"),
        false => ("it chooses one of", "what indexes a dim is in 0..size"),
    };
    let things = if row.of_tokens() { " tokens" } else { "" };
    let what = format!("`{name}` is {id} in row {r}, column {column}; {has} {below}{things}");
    Err(Diag::new(code, what)
        .at(format!("{name}[{r}, {column}]"))
        .rule(rule)
        .help(format!("use {low} to {}", below - 1)))
}

/// Checks that every input of the plan is one that a step can fill; the table of them.
pub(crate) fn check_inputs(w: &Wiring) -> Result<Vec<InputRow>> {
    let s = &w.plan.settings;
    if !s.tokens.fits(s.seq) {
        let message =
            format!("{} tokens cannot be distributed to the ranks as {:?}", s.seq, s.tokens);
        return Err(Diag::new("plan", message)
            .rule("zigzag deals 2 chunks of equal length to every rank of cp")
            .help("recompile the plan with this version of shardc"));
    }
    let table = inputs(&w.plan.module);
    for slot in w.inputs.iter().flatten() {
        let f = &w.plan.module.funcs[slot.func];
        let t = f.ty(slot.value);
        let Some((name, own)) = input_of(f, slot) else { continue };
        let row = table.iter().find(|r| *r.name == *name && r.input == own);
        if row.is_none_or(|row| !fits(w, slot, t, row)) {
            let sizes: Vec<usize> = t.sizes().to_vec();
            let message = format!("input `{name}` of sizes {sizes:?} cannot be filled");
            return Err(Diag::new("plan", message)
                .rule(
                    "i32: tokens and places [batch, seq], positions […, seq], run [3]; labels and \
                       columns, also of f32, are of one size everywhere; rows are split evenly",
                )
                .help(format!("compile for {} sequences of {} tokens", s.global_batch, s.seq)));
        }
    }
    Ok(table)
}

/// Whether a place is one for an input.
fn fits(w: &Wiring, slot: &InputSlot, t: &Type, row: &InputRow) -> bool {
    let (s, own) = (&w.plan.settings, row.input);
    let sizes = t.sizes();
    let rows = sizes.first().copied().filter(|_| own.batch);
    let even = rows.is_none_or(|n| n % t.pieces(w.mesh(), 0) == 0);
    let batch = rows.is_none_or(|n| n.checked_mul(slot.part.1) == Some(s.global_batch));
    let same = sizes.get(usize::from(own.batch)..) == Some(&row.sizes[..]) && t.dtype == row.dtype;
    let tokens = own.tokens().map(|d| sizes.get(d).copied());
    let line = tokens.is_none_or(|n| n == Some(s.seq));
    let known = match own.fill {
        Fill::Tokens | Fill::Places | Fill::Mask => own.batch && tokens.is_some() && t.rank() == 2,
        Fill::Offsets | Fill::Segments => {
            own.batch && tokens.is_some() && t.rank() == 2 && s.documents.is_some()
        }
        Fill::Ahead | Fill::LabelsAhead => own.batch && own.seq == Some(1) && t.rank() == 3,
        Fill::Count => t.rank() == 0 && s.documents.is_some(),
        Fill::Scored | Fill::Histogram => !own.batch && own.seq.is_none() && t.rank() == 1,
        Fill::Positions => own.tokens() == Some(t.rank().wrapping_sub(1)),
        Fill::Run => t.rank() == 1 && row.sizes[..] == [RUN],
        Fill::Labels => own.batch,
        Fill::Column | Fill::Random => true,
    };
    let dtype = match own.fill {
        Fill::Column => matches!(t.dtype, DType::I32 | DType::F32),
        Fill::Random | Fill::Count | Fill::Scored | Fill::Histogram => t.dtype == DType::F32,
        _whole => t.dtype == DType::I32,
    };
    let room = slot.bytes >= t.local_bytes(w.mesh());
    even && batch && same && line && known && room && dtype
}

fn input_of<'a>(f: &'a Func, slot: &InputSlot) -> Option<(&'a str, Input)> {
    let role = f.args.iter().find(|a| a.value == slot.value)?.role.as_ref()?;
    Some((&role.name, role.kind.input()?))
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
            "step" => data.update as f32,
            LOSS_SCALE => data.loss_scale,
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
fn input(
    w: &Wiring,
    slot: &InputSlot,
    to: &mut [f32],
    coords: &[usize],
    data: &StepData,
) -> Option<()> {
    let f = &w.plan.module.funcs[slot.func];
    let (name, own) = input_of(f, slot)?;
    let (ty, s) = (f.ty(slot.value), &w.plan.settings);
    if own.fill == Fill::Run {
        // What draws depend on: the seed in two halves, and the step.
        let run = [s.seed as u32, (s.seed >> 32) as u32, data.step as u32];
        to.get_mut(..RUN)?.iter_mut().zip(run).for_each(|(t, x)| *t = f32::from_bits(x));
        return Some(());
    }
    let made = own.fill.is_of_documents() || own.fill.is_of_labels() || own.fill.is_ahead();
    let given = own.fill.is_data() || made;
    let column = if given { Some(data.columns.get(name)?) } else { None };
    let (sizes, chunks) = (ty.sizes(), ty.chunks(w.mesh()));
    let extents: Vec<_> = (0..ty.rank()).map(|d| ty.extent(w.mesh(), d, coords)).collect();
    let lens: Vec<usize> = extents.iter().map(|e| e.len).collect();
    let mut filled = Some(());
    each_index(&lens, |i| {
        let (mut place, mut at, mut token, mut row) = (0, 0, 0, 0);
        for (d, e) in extents.iter().enumerate() {
            let mut global = e.offset + i[d];
            if d == 0 && own.batch {
                global = global_row(w, ty, global, slot.part.0);
                row = global;
            }
            if own.tokens() == Some(d) {
                global = s.tokens.position(s.seq, global);
                token = global;
            }
            place = place * chunks[d] + i[d];
            at = at * sizes[d] + global;
        }
        let word = match own.fill {
            Fill::Positions => Some(token as u32),
            // A place is the number of a token in the batch.
            Fill::Places => Some((row * s.seq + token) as u32),
            _data => column.and_then(|c| c.word(at)),
        };
        match (word, to.get_mut(place)) {
            (Some(word), Some(to)) => *to = f32::from_bits(word),
            _missing => filled = None,
        }
    });
    filled
}
