//! `index.json`, and reading slices of tensors from pieces.

use super::base::BaseModel;
use super::evaluated::Evaluated;
use super::found::{all, last, meant};
use super::step_of;
use crate::data::{Order, Picks, Recipe};
use serde::{Deserialize, Serialize};
use shardc_frontends::Checkpoint;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::files::{self, io_error};
use shardc_ir::func::{Role, RoleKind};
use shardc_ir::loss_scale::{LossScale, ScaleState};
use shardc_ir::plan::LrSchedule;
use shardc_passes::options::Options;
use shardc_plans::plan_dir::{self, SCHEMA};
use shardc_plans::seal;
use shardc_plans::stored::Stored;
use shardc_runtime::holdings::Holding;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Version of the form.
pub(super) const FORMAT: u32 = 3;
/// What a run says first of a learning rate.
pub const RATE: &str = "learning rate";
/// The oldest one that is read: without [`RunState`].
const OLDEST: u64 = 2;
/// Largest index that is read, in bytes.
pub(super) const MAX_INDEX: u64 = 1 << 30;

/// `index.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    pub format: u32,
    /// blake3 of this file without this hash.
    pub hash: String,
    /// Steps that were done.
    pub step: usize,
    #[serde(default)]
    pub run: Option<RunState>,
    /// Steps of these that have changed nothing, because gradients of f16 overflowed.
    #[serde(default, skip_serializing_if = "is_none")]
    pub skipped: usize,
    /// Updates of which optimizer states know nothing, because they began anew behind them.
    #[serde(default, skip_serializing_if = "is_none")]
    pub before: usize,
    /// The scale of the loss, if it has changed from step to step in this run or one that it goes on from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    /// The model whose adapters were trained: its parameters are not here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseModel>,
    /// blake3 of the plan's `plan.json`, which has the hashes of its other files.
    pub plan: String,
    pub files: BTreeMap<String, File>,
    /// By kind and name.
    pub tensors: Vec<Tensor>,
}

/// What a run trained with, which its plan may not say.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    pub lr: LrSchedule,
    /// In which order rows of data are taken.
    pub order: Order,
    /// What that is drawn from.
    pub seed: u64,
    /// Rows of data that its steps have taken, since training began.
    pub rows: u64,
    /// What tells its data from others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// How its examples became rows, if it has examples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Recipe>,
    /// What its evaluations have come to, if it has had some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluated: Option<Evaluated>,
}

impl RunState {
    /// What is not as it was: a line for each.
    pub fn differs(&self, was: &RunState, when: &str) -> Vec<String> {
        let seeds = (self.seed.to_string(), was.seed.to_string());
        let orders = (self.order.name().to_string(), was.order.name().to_string());
        let rates = (self.lr.to_string(), was.lr.to_string());
        let all = [(RATE, rates), ("order of data", orders), ("seed of data", seeds)];
        let other = all.into_iter().filter(|(_, (now, then))| now != then);
        other.map(|(what, (now, then))| format!("{what} {now} ({then} {when})")).collect()
    }

    /// Which rows of data the steps behind step `done` take.
    pub fn picks(&self, done: usize) -> Picks {
        Picks { order: self.order, seed: self.seed, done: (done, self.rows) }
    }
}

fn is_none(n: &usize) -> bool {
    *n == 0
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct File {
    /// blake3 of the header, with its length.
    pub header: String,
    /// blake3 of the data behind it.
    pub blake3: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Tensor {
    /// `param` or `state[exp_avg]`: the kind of its role.
    pub kind: String,
    pub name: String,
    pub shape: Vec<usize>,
    pub pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Piece {
    pub file: String,
    /// Name in the file.
    pub key: String,
    pub offset: Vec<usize>,
    pub shape: Vec<usize>,
}

/// The name of a piece in its file: kind, tensor, and where it begins.
pub(super) fn key(h: &Holding) -> String {
    let at: Vec<String> = h.offset.iter().map(usize::to_string).collect();
    format!("{} {} @{}", h.role.kind, h.role.name, at.join(","))
}

/// A checkpoint on disk.
pub struct Saved {
    dir: PathBuf,
    pub step: usize,
    /// Of the run that wrote it; older forms do not say.
    pub run: Option<RunState>,
    /// The scale of its loss.
    pub scale: ScaleState,
    /// The model whose adapters it has.
    pub base: Option<BaseModel>,
    /// blake3 of the index.
    mark: String,
    plan: String,
    files: BTreeMap<String, File>,
    pub(super) tensors: BTreeMap<(String, String), Tensor>,
    /// States that begin as in a new run.
    pub(super) begins: BTreeSet<Role>,
    data: Checkpoint,
}

pub(super) fn broken(dir: &Path, what: String) -> Diag {
    Diag::new("checkpoint", what)
        .at(dir.display().to_string())
        .rule("a checkpoint is what shardc run --save-every wrote, unchanged")
}

/// The same of one whose files are damaged, with the way on: the one before it, if it is one of several.
fn damaged(dir: &Path, what: String) -> Diag {
    let d = broken(dir, what);
    let Ok(whole) = dir.canonicalize() else { return d };
    let step = whole.file_name().and_then(|n| step_of(&n.to_string_lossy()));
    let (Some(step), Some(parent)) = (step, whole.parent()) else {
        return d.help("resume from another one: name its folder step-NNNNNNNN");
    };
    let before = all(parent).ok().and_then(|found| found.into_iter().rev().find(|x| x.0 < step));
    match before {
        Some((_, older)) => d.help(format!(
            "move it away and resume from the one before, {}: mv {} {}",
            older.file_name().unwrap_or_default().display(),
            dir.display(),
            dir.with_file_name(format!("damaged-{step:08}")).display()
        )),
        None => d.help("no older one is next to it"),
    }
}

/// What the system refuses, as it is; what is read and wrong, as `otherwise` has it.
fn unread(d: Diag, otherwise: impl FnOnce(Diag) -> Diag) -> Diag {
    if d.code == "io" { d } else { otherwise(d) }
}

impl Saved {
    /// Opens a checkpoint, or of a folder of them the last one, `DIR@latest`, or the one with the least loss of an
    /// evaluation, `DIR@best`. Only the index and headers are read.
    ///
    /// # Errors
    /// `checkpoint` if there is none, or its index is wrong, or its files cannot be read or do not fit it; `file` if
    /// the folder does not exist.
    pub fn open(dir: &Path) -> Result<Saved> {
        let dir = meant(dir)?;
        let dir = &*dir;
        if dir.is_file() {
            return Err(Diag::new("file", "this is a file, a checkpoint is a folder")
                .at(dir.display().to_string())
                .help("give the folder step-NNNNNNNN, or its parent folder"));
        }
        if let Err(e) = std::fs::metadata(dir) {
            if e.kind() != ErrorKind::NotFound {
                return Err(io_error("cannot read the checkpoint", dir, &e));
            }
            return Err(Diag::new("file", "the folder does not exist")
                .at(dir.display().to_string())
                .help(
                    "check the path: a checkpoint is a folder step-NNNNNNNN, or its parent folder",
                ));
        }
        let dir = if dir.join("index.json").exists() { dir.to_path_buf() } else { last(dir)? };
        let path = dir.join("index.json");
        let wrong = |what: String| damaged(&dir, what);
        let text = files::read_text(&path, MAX_INDEX)
            .map_err(|d| unread(d, |d| wrong(format!("index.json: {}", d.message))))?;
        let json: serde_json::Value =
            serde_json::from_str(&text).map_err(|e| wrong(format!("index.json: {e}")))?;
        let format = &json["format"];
        if !format.as_u64().is_some_and(|n| (OLDEST..=u64::from(FORMAT)).contains(&n)) {
            let what = format!("it has format {format}, this shardc reads {OLDEST} to {FORMAT}");
            return Err(broken(&dir, what).help("use the version of shardc that wrote it"));
        }
        let index: Index =
            serde_json::from_str(&text).map_err(|e| wrong(format!("index.json: {e}")))?;
        if !seal::is_sealed(&text, &index.hash) {
            let what = "index.json: the file is not as it was written (its hash differs)";
            return Err(wrong(what.into()));
        }
        if index.step >= 1 << 48 {
            return Err(wrong(format!("index.json: step {}", index.step)));
        }
        let named = dir.canonicalize().ok();
        let named = named.as_ref().and_then(|d| step_of(&d.file_name()?.to_string_lossy()));
        if named.is_some_and(|step| step != index.step) {
            let what = format!("index.json is of step {}, the folder is not", index.step);
            return Err(broken(&dir, what)
                .help(format!("give the folder its original name: step-{:08}", index.step)));
        }
        if let Some(run) = index.run.as_ref().filter(|run| run.rows >= 1 << 62) {
            return Err(wrong(format!("index.json: {} rows", run.rows)));
        }
        let best = index.run.as_ref().and_then(|run| run.evaluated).map(|e| e.best.step);
        if let Some(step) = best.filter(|&best| best > index.step) {
            return Err(wrong(format!("index.json: step {step} is the best of {}", index.step)));
        }
        if index.skipped > index.step {
            let what = format!("index.json: {} steps of {} skipped", index.skipped, index.step);
            return Err(wrong(what));
        }
        if index.before > index.step - index.skipped {
            let what = format!("index.json: {} updates in {} steps", index.before, index.step);
            return Err(wrong(what));
        }
        if index.loss_scale.is_some_and(|s| !s.is_valid()) {
            return Err(wrong("index.json: no such scale of a loss".into()));
        }
        let data = Checkpoint::of_files(&dir, index.files.keys().map(String::as_str));
        let data = data.map_err(|d| {
            unread(d, |d| {
                let place = d.place.unwrap_or_default();
                wrong(format!("{place}: {}", d.message))
            })
        })?;
        let mut tensors = BTreeMap::new();
        for t in index.tensors {
            t.check(&data).map_err(&wrong)?;
            let name = (t.kind.clone(), t.name.clone());
            if tensors.insert(name, t).is_some() {
                return Err(wrong("index.json: a tensor is there twice".into()));
            }
        }
        let (step, mark) = (index.step, seal::hash(text.as_bytes()));
        let Index { skipped, before, loss_scale, .. } = index;
        let scale = ScaleState { skipped, before, loss_scale };
        let (run, plan, files, base) = (index.run, index.plan, index.files, index.base);
        let begins = BTreeSet::new();
        Ok(Saved { dir, step, run, scale, base, mark, plan, files, tensors, begins, data })
    }

    /// True for a parameter of the base model, of a checkpoint that has adapters alone.
    pub fn leaves_out(&self, role: &Role) -> bool {
        let known = (role.kind.to_string(), role.name.to_string());
        self.base.is_some() && role.kind == RoleKind::Param && !self.tensors.contains_key(&known)
    }

    /// The folder of the checkpoint.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What tells this checkpoint from others: its step, and a hash of its index.
    pub fn mark(&self) -> String {
        format!("of step {}, index {}", self.step, &self.mark[..16])
    }

    /// The plan that wrote it.
    ///
    /// # Errors
    /// `checkpoint` if another one stands there, and those of reading a plan.
    pub fn plan(&self) -> Result<Stored> {
        let dir = self.dir.join("plan");
        if let Some(schema) = plan_dir::schema(&dir).filter(|&n| n != u64::from(SCHEMA)) {
            let what = format!("its plan has schema {schema}, this shardc reads {SCHEMA}");
            return Err(broken(&self.dir, what).help(format!(
                "go on from it with a plan of this version, shardc run PLAN --resume {} --save DIR, and take what \
                 that saves",
                self.dir.display()
            )));
        }
        let stored = plan_dir::read(&dir).map_err(|d| match d.code {
            "plan" => damaged(&self.dir, format!("plan: {}", d.message)),
            _ => d,
        })?;
        let path = dir.join("plan.json");
        let head = if path.exists() { files::read(&path, MAX_INDEX)? } else { vec![] };
        if seal::hash(&head) != self.plan {
            return Err(broken(&dir, "plan.json: this is not the plan that wrote it".into()));
        }
        Ok(stored)
    }

    /// What the plan that wrote it was made with, of which nothing else is read.
    ///
    /// # Errors
    /// `plan`.
    pub fn options(&self) -> Result<Options> {
        plan_dir::options(&self.dir.join("plan"))
    }

    /// Compares the plan, by the first, and the data of files with their hashes: of each `of`-th file from `first` on, so that
    /// processes share the work.
    ///
    /// # Errors
    /// `checkpoint`, with the file's name.
    pub fn verify(&self, first: usize, of: usize) -> Result<()> {
        if first == 0 {
            let head = files::read(&self.dir.join("plan").join("plan.json"), MAX_INDEX);
            let head = head.map_err(|d| {
                unread(d, |d| damaged(&self.dir, format!("plan/plan.json: {}", d.message)))
            })?;
            if seal::hash(&head) != self.plan {
                let what = "plan/plan.json: this is not the plan that wrote it";
                return Err(damaged(&self.dir, what.into()));
            }
        }
        for (name, file) in self.files.iter().skip(first).step_by(of.max(1)) {
            let path = self.dir.join(name);
            let wrong = |what: String| damaged(&self.dir, format!("{name}: {what}"));
            let found = hash(&path).map_err(|d| unread(d, |d| wrong(d.message)))?;
            if found != (file.header.clone(), file.blake3.clone()) {
                return Err(wrong("the data is not what was written".into()));
            }
        }
        Ok(())
    }

    /// Elements of a tensor, one range per dim, row-major, from all pieces that have some.
    ///
    /// # Errors
    /// `missing-tensor`, `tensor-shape`, `file`.
    pub fn read(
        &self,
        role: &Role,
        shape: &[usize],
        ranges: &[Range<usize>],
        out: &mut [f32],
    ) -> Result<()> {
        let (kind, name) = (role.kind, &*role.name);
        let at = self.dir.display().to_string();
        let Some(t) = self.tensors.get(&(kind.to_string(), name.to_string())) else {
            let tensors = count(self.tensors.len(), "tensor", "tensors");
            let what = format!("the checkpoint has no {kind} `{name}`");
            return Err(Diag::new("missing-tensor", what).at(at).help(format!(
                "resume with the model and the optimizer that wrote its {tensors}"
            )));
        };
        if t.shape != shape {
            let what =
                format!("`{name}` is {:?} in the checkpoint, {shape:?} in the plan", t.shape);
            return Err(Diag::new("tensor-shape", what)
                .at(at)
                .help(format!("compile the model that has {:?}", t.shape)));
        }
        let mut found = 0;
        for p in &t.pieces {
            found += self.copy(p, ranges, out)?;
        }
        if found != out.len() {
            let n = out.len();
            return Err(broken(
                &self.dir,
                format!("`{name}`: pieces hold {found} of {n} elements"),
            ));
        }
        Ok(())
    }

    /// Copies what a piece has of a slice; how much that was.
    fn copy(&self, p: &Piece, ranges: &[Range<usize>], out: &mut [f32]) -> Result<usize> {
        let both: Vec<Range<usize>> = ranges
            .iter()
            .zip(p.offset.iter().zip(&p.shape))
            .map(|(r, (&at, &n))| r.start.max(at)..r.end.min(at + n))
            .collect();
        if both.iter().any(|r| r.start >= r.end) {
            return Ok(0);
        }
        let inside: Vec<Range<usize>> =
            both.iter().zip(&p.offset).map(|(r, at)| r.start - at..r.end - at).collect();
        let lens: Vec<usize> = both.iter().map(Range::len).collect();
        let n = lens.iter().product();
        if both == ranges {
            self.data.read_ranges(&p.key, &inside, out)?;
            return Ok(n);
        }
        let mut part = vec![0.0; n];
        self.data.read_ranges(&p.key, &inside, &mut part)?;
        // Rows of the part go to their places.
        let row = lens.last().copied().unwrap_or(1);
        let outer = lens.len().saturating_sub(1);
        for (i, from) in part.chunks_exact(row.max(1)).enumerate() {
            let (mut rest, mut at, mut stride) = (i, 0, 1);
            for d in (0..lens.len()).rev() {
                let index = if d == outer { 0 } else { rest % lens[d] };
                if d != outer {
                    rest /= lens[d];
                }
                at += (both[d].start - ranges[d].start + index) * stride;
                stride *= ranges[d].len();
            }
            out[at..at + row].copy_from_slice(from);
        }
        Ok(n)
    }
}

impl Tensor {
    /// Checks that pieces lie inside the tensor and are those of the files.
    fn check(&self, data: &Checkpoint) -> std::result::Result<(), String> {
        let name = &self.name;
        for p in &self.pieces {
            let rank = self.shape.len();
            let fits = p.offset.len() == rank
                && p.shape.len() == rank
                && p.offset.iter().zip(&p.shape).zip(&self.shape).all(|((&at, &n), &size)| {
                    n > 0 && at.checked_add(n).is_some_and(|end| end <= size)
                });
            if !fits {
                return Err(format!("index.json: a piece of `{name}` is not inside it"));
            }
            let there = data.get(&p.key);
            if there.is_none_or(|e| e.shape != p.shape || !e.is_f32()) {
                return Err(format!("{}: it does not hold `{}` {:?}", p.file, p.key, p.shape));
            }
        }
        let size = |shape: &[usize]| shape.iter().product::<usize>();
        let there: usize = self.pieces.iter().map(|p| size(&p.shape)).sum();
        if there != size(&self.shape) {
            let n = size(&self.shape);
            return Err(format!("index.json: pieces hold {there} of {n} elements of `{name}`"));
        }
        // As many elements as the tensor has, none of them twice: all of them.
        let meet = |a: &Piece, b: &Piece| {
            let mut dims = a.offset.iter().zip(&a.shape).zip(b.offset.iter().zip(&b.shape));
            dims.all(|((&x, &n), (&y, &m))| x < y + m && y < x + n)
        };
        let pairs = self.pieces.iter().enumerate();
        if pairs.into_iter().any(|(i, a)| self.pieces[..i].iter().any(|b| meet(a, b))) {
            return Err(format!("index.json: two pieces of `{name}` hold the same elements"));
        }
        Ok(())
    }
}

/// blake3 of a safetensors header, and of what is behind it. Headers were read before, with bounds.
fn hash(path: &Path) -> Result<(String, String)> {
    let (file, len) = files::open(path)?;
    hash_of(file.take(len)).map_err(|e| files::io_error("cannot read the file", path, &e))
}

fn hash_of(mut file: impl Read) -> std::io::Result<(String, String)> {
    let mut header = vec![0; 8];
    file.read_exact(&mut header)?;
    let size = u64::from_le_bytes(header[..].try_into().expect("8 bytes"));
    (&mut file).take(size).read_to_end(&mut header)?;
    let header = blake3::hash(&header).to_hex().to_string();
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok((header, hasher.finalize().to_hex().to_string()));
        }
        hasher.update(&buffer[..n]);
    }
}
