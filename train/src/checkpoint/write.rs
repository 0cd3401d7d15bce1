//! Writing: every rank its file, process 0 the index.

use super::base::{BaseModel, LeftOut};
use super::index::{FORMAT, File, Index, MAX_INDEX, Piece, RunState, Tensor, key};
use super::{rank_file, step_folder, step_of, unfinished};
use shardc_frontends::write_each;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::{self, Unfinished};
use shardc_ir::loss_scale::ScaleState;
use shardc_plans::stored::Stored;
use shardc_plans::{plan_dir, seal};
use shardc_runtime::Session;
use shardc_runtime::holdings::{Give, Holding, Task};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// What a checkpoint cannot do ends the job.
fn failed(path: &Path, e: &dyn std::fmt::Display) -> Diag {
    Diag::new("save", format!("the checkpoint cannot be written: {e}"))
        .at(path.display().to_string())
        .help("free space or fix the permissions there, and resume from the latest checkpoint with --resume")
}

/// The checkpoints of a run. Older ones are taken apart while it goes on.
pub struct Saves {
    dir: PathBuf,
    keep: usize,
    /// The step of one that stays however old it is.
    pub best: Option<usize>,
    left: LeftOut,
    removal: Option<JoinHandle<()>>,
}

impl Saves {
    /// To a folder, whose lock this process has; of older ones as many stay as make up `keep` with the
    /// newest, and that of step `best`. What jobs that have died have left there is removed.
    ///
    /// # Errors
    /// `save`.
    pub fn new(dir: &Path, keep: usize, best: Option<usize>, left: &LeftOut) -> Result<Saves> {
        clean(dir)?;
        let keep = keep.max(1);
        // Room for the next one is needed before it is written.
        hide(dir, keep, best).iter().for_each(|path| drop(fs::remove_dir_all(path)));
        Ok(Saves { dir: dir.into(), keep, best, left: left.clone(), removal: None })
    }

    /// Saves what all ranks hold after a step, and how they were trained where that is known: the folder appears whole, or
    /// not at all.
    ///
    /// # Errors
    /// `save`, and those of the session.
    pub fn save(
        &mut self,
        session: &mut Session,
        step: usize,
        (stored, run): (&Stored, Option<&RunState>),
    ) -> Result<PathBuf> {
        self.wait();
        let dir = &self.dir;
        let new = begin(dir, step, stored)?;
        let number = u32::try_from(step).unwrap_or(u32::MAX);
        let given = session.each(number, task(dir, step, &self.left))?;
        let base = self.left.base.as_ref();
        finish(new, dir, Reached { step, run, scale: session.scale(), base }, given)?;
        let saved = step_folder(dir, step);
        let gone = hide(dir, self.keep, self.best);
        // What cannot be removed costs room alone, and the next save tries again.
        let remove = move || gone.iter().for_each(|path| drop(fs::remove_dir_all(path)));
        self.removal = std::thread::Builder::new().spawn(remove).ok();
        Ok(saved)
    }

    fn wait(&mut self) {
        if let Some(removal) = self.removal.take() {
            let _ = removal.join();
        }
    }
}

impl Drop for Saves {
    fn drop(&mut self) {
        self.wait();
    }
}

/// How far a run has come: its steps, how it trained where that is known, and the scale of its loss.
#[derive(Clone, Copy)]
pub struct Reached<'a> {
    pub step: usize,
    pub run: Option<&'a RunState>,
    pub scale: ScaleState,
    /// The model whose adapters it trained.
    pub base: Option<&'a BaseModel>,
}

/// Writes a checkpoint of what ranks would hold, whose elements `give` has, as a run had it at a step.
///
/// # Errors
/// `save`, and those of `give`.
pub fn write_all(
    dir: &Path,
    reached: Reached,
    stored: &Stored,
    ranks: &[Vec<Holding>],
    give: impl Fn(&Holding) -> Result<Vec<f32>>,
) -> Result<PathBuf> {
    let step = reached.step;
    let new = begin(dir, step, stored)?;
    let one = |(rank, all): (usize, &Vec<Holding>)| {
        write_rank(new.path(), rank, all, &mut |h, sink| sink(&give(h)?))
    };
    let given = ranks.iter().enumerate().map(one).collect::<Result<_>>()?;
    finish(new, dir, reached, given)?;
    Ok(step_folder(dir, step))
}

/// Checks that a run that begins after step `done` may save to a folder: what is there is older.
///
/// # Errors
/// `save-target` with the later step that is there.
pub fn check_steps(dir: &Path, done: usize) -> Result<()> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let step = |e: fs::DirEntry| Some((step_of(&e.file_name().to_string_lossy())?, e.path()));
    let later = entries.filter_map(step).filter(|s| s.0 > done);
    let mut later: Vec<(usize, PathBuf)> = later.collect();
    later.sort();
    let Some((_, first)) = later.first() else { return Ok(()) };
    let away = format!("move {} and all later ones away", first.display());
    let is_whole = |x: &&(usize, PathBuf)| x.1.join("index.json").exists();
    let (what, way) = match later.iter().rev().find(is_whole) {
        Some((last, _)) => (
            format!("it holds a checkpoint of step {last}, this run begins after step {done}"),
            format!("resume from step {last} with --resume, {away}, or save to another folder"),
        ),
        None => (
            format!("{} has no index.json, so it is not a checkpoint", first.display()),
            format!("{away}, or save to another folder"),
        ),
    };
    Err(Diag::new("save-target", what)
        .at(dir.display().to_string())
        .rule("a folder holds the checkpoints of 1 run")
        .help(way))
}

/// Makes the folder that will be the checkpoint, with the plan. It goes if nothing becomes of it: what is
/// there fills a disk that may be full.
fn begin(dir: &Path, step: usize, stored: &Stored) -> Result<Unfinished> {
    let path = unfinished(dir, step);
    let fail = |e: std::io::Error| failed(&path, &e);
    let there = step_folder(dir, step);
    if there.exists() || there.is_symlink() {
        return Err(Diag::new("save-target", "a checkpoint of this step exists already")
            .at(there.display().to_string())
            .help("move it away, or name another folder"));
    }
    clean(dir)?;
    let new = Unfinished::folder(path.clone()).map_err(fail)?;
    plan_dir::write(&path.join("plan"), stored).map_err(|d| failed(&path, &d.message))?;
    Ok(new)
}

/// Removes unfinished checkpoints: whoever has the lock of the folder writes none yet, and nobody else
/// does. What else has such a name is in the way.
fn clean(dir: &Path) -> Result<()> {
    let ours = |name: &str| {
        let step = name.strip_prefix('.').and_then(|n| n.strip_suffix(".unfinished"));
        step.is_some_and(|s| step_of(s).is_some())
    };
    for e in fs::read_dir(dir).into_iter().flatten().flatten() {
        if !ours(&e.file_name().to_string_lossy()) {
            continue;
        }
        let path = e.path();
        files::no_link(&path, "an unfinished checkpoint").map_err(|d| d.coded("save"))?;
        if !path.is_dir() {
            return Err(failed(&path, &"this is in the way, and not an unfinished checkpoint"));
        }
        fs::remove_dir_all(&path).map_err(|why| failed(&path, &why))?;
    }
    Ok(())
}

/// What a rank does for the checkpoint of a step.
pub fn task(dir: &Path, step: usize, left: &LeftOut) -> Arc<Task> {
    let (to, left) = (unfinished(dir, step), left.clone());
    Arc::new(move |rank, all, give| {
        let all: Vec<Holding> = all.iter().filter(|h| !left.has(&h.role)).cloned().collect();
        write_rank(&to, rank, &all, give)
    })
}

/// Writes a rank's file and flushes it; the file's name and hash and its pieces, as JSON.
///
/// # Errors
/// `save`.
fn write_rank(to: &Path, rank: usize, all: &[Holding], give: &mut Give) -> Result<Vec<u8>> {
    let name = rank_file(rank);
    let path = to.join(&name);
    let keys: Vec<(String, Vec<usize>)> = all.iter().map(|h| (key(h), h.len.clone())).collect();
    let hasher = Mutex::new(blake3::Hasher::new());
    let header = write_each(&path, &keys, |i, out| {
        give(&all[i], &mut |data| {
            let raw: Cow<[u8]> = if cfg!(target_endian = "little") {
                bytemuck::cast_slice(data).into()
            } else {
                data.iter().flat_map(|x| x.to_le_bytes()).collect()
            };
            std::thread::scope(|s| {
                let hash = || {
                    hasher.lock().unwrap_or_else(PoisonError::into_inner).update(&raw);
                };
                let aside = std::thread::Builder::new().spawn_scoped(s, hash).is_ok();
                let done = out.write_all(&raw);
                if !aside {
                    hash();
                }
                done
            })
            .map_err(|e| failed(&path, &e))
        })
    })
    .map_err(|d| if d.code == "save" { d } else { failed(&path, &d.message) })?;
    let piece = |h: &Holding| Tensor {
        kind: h.role.kind.to_string(),
        name: h.role.name.to_string(),
        shape: h.shape.clone(),
        pieces: vec![Piece {
            file: name.clone(),
            key: key(h),
            offset: h.offset.clone(),
            shape: h.len.clone(),
        }],
    };
    let tensors: Vec<Tensor> = all.iter().map(piece).collect();
    let header = blake3::hash(&header).to_hex().to_string();
    let hasher = hasher.into_inner().unwrap_or_else(PoisonError::into_inner);
    let file = File { header, blake3: hasher.finalize().to_hex().to_string() };
    Ok(serde_json::to_vec(&(name.clone(), file, tensors)).expect("plain data"))
}

/// Writes the index of what all ranks have written, flushes the folder, and makes it visible.
fn finish(new: Unfinished, dir: &Path, reached: Reached, given: Vec<Vec<u8>>) -> Result<()> {
    let Reached { step, run, scale, base } = reached;
    let new = new.path();
    let mut files = BTreeMap::new();
    let mut tensors: BTreeMap<(String, String), Tensor> = BTreeMap::new();
    for bytes in given {
        let (name, file, pieces): (String, File, Vec<Tensor>) =
            serde_json::from_slice(&bytes).map_err(|e| failed(new, &e))?;
        files.insert(name, file);
        for t in pieces {
            let known = tensors.entry((t.kind.clone(), t.name.clone()));
            let all = known.or_insert_with(|| Tensor { pieces: vec![], ..t.clone() });
            all.pieces.extend(t.pieces);
        }
    }
    for t in tensors.values() {
        let size = |shape: &[usize]| shape.iter().product::<usize>();
        let there: usize = t.pieces.iter().map(|p| size(&p.shape)).sum();
        if there != size(&t.shape) {
            let (name, n) = (&t.name, size(&t.shape));
            return Err(failed(new, &format!("ranks gave {there} of {n} elements of `{name}`")));
        }
    }
    let tensors = tensors.into_values().collect();
    let head = new.join("plan/plan.json");
    let head = files::read(&head, MAX_INDEX).map_err(|d| failed(new, &d.message))?;
    let (hash, plan) = (String::new(), seal::hash(&head));
    let ScaleState { skipped, before, loss_scale } = scale;
    let (run, base) = (run.cloned(), base.cloned());
    let format = FORMAT;
    let index =
        Index { format, hash, step, run, skipped, before, loss_scale, base, plan, files, tensors };
    let text = seal::seal(&serde_json::to_string_pretty(&index).expect("plain data"));
    let path = new.join("index.json");
    let write = |e| files::io_error("cannot write the file", &path, &e);
    files::create(&path, |out| out.write_all(text.as_bytes()).map_err(write))
        .map_err(|d| failed(&path, &d.message))?;
    let put = || -> std::io::Result<()> {
        flush(new)?;
        // There is none of this step: a folder is never replaced.
        fs::rename(new, step_folder(dir, step))?;
        flush(dir)
    };
    put().map_err(|e| failed(&path, &e))
}

/// Makes what stands in a folder last.
#[expect(clippy::disallowed_methods, reason = "it is a folder of ours")]
fn flush(dir: &Path) -> std::io::Result<()> {
    fs::File::open(dir)?.sync_all()
}

/// Renames all but the newest checkpoints and that of step `best`: they disappear before they are taken apart. The new
/// names.
fn hide(dir: &Path, keep: usize, best: Option<usize>) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut all: Vec<(usize, PathBuf)> = entries
        .filter_map(|e| Some((step_of(&e.file_name().to_string_lossy())?, e.path())))
        .collect();
    all.sort();
    let old = all.iter().rev().skip(keep).filter(|x| Some(x.0) != best);
    old.filter_map(|(step, path)| {
        let gone = unfinished(dir, *step);
        fs::rename(path, &gone).ok().map(|()| gone)
    })
    .collect()
}
