//! Columns of the user's data: arrays of .npy and safetensors files, a row for each of a batch's.

use super::{ends, npy, short};
use shardc_frontends::batch::{IGNORED, tensors};
use shardc_frontends::stored::{StoredNumber, StoredType};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::documents::Documents;
use shardc_ir::files;
use shardc_ir::func::{Fill, InputRow, Reads};
use shardc_ir::plan::{Mode, Settings};
use shardc_ir::types::DType;
use shardc_runtime::Numbers;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An array of a file, whose numbers are read where they are needed.
struct Array {
    path: PathBuf,
    name: String,
    /// Arrays of one file share it.
    file: Arc<File>,
    start: u64,
    element: &'static StoredType,
    shape: Vec<usize>,
}

/// Arrays by name.
pub struct Columns {
    arrays: BTreeMap<String, Array>,
    /// Tensors of other types, and their types.
    others: BTreeMap<String, String>,
    /// As the user wrote it, for messages.
    spec: String,
    /// Of how its files begin and end.
    hash: String,
}

/// What tokens and labels are called where a model does not say it.
const TOKENS: &str = "input_ids";
const LABELS: &str = "labels";

/// What people call the column of an input.
fn usual(row: &InputRow) -> &str {
    let labels = row.of_tokens() && row.input.fill == Fill::Labels;
    if labels && row.input.reads == Reads::Usual { LABELS } else { &row.name }
}

fn wrong(place: &str, what: String) -> Diag {
    Diag::new("data", what)
        .at(place)
        .rule("a column is an array [rows, …] of an .npy or safetensors file")
        .help("docs/data.md says what columns are")
}

/// Whether a word of `--data` is a file of columns, or files by the names of columns.
pub fn are_columns(spec: &str) -> bool {
    let npy = |part: &str| part.split_once('=').is_some_and(|(_, file)| file.ends_with(".npy"));
    spec.ends_with(".safetensors") || spec.split(',').all(npy)
}

impl Columns {
    /// Opens `FILE.safetensors`, or `NAME=FILE.npy,NAME=FILE.npy`.
    ///
    /// # Errors
    /// `data`, and those of reading a header.
    pub fn open(spec: &str) -> Result<Columns> {
        Columns::from(spec, spec.ends_with(".safetensors"))
    }

    /// Opens `NAME=FILE.npy,NAME=FILE.npy`, or a safetensors file of any name.
    ///
    /// # Errors
    /// `data`, and those of reading a header.
    pub fn of_batch(spec: &str) -> Result<Columns> {
        Columns::from(spec, spec.ends_with(".safetensors") || !are_columns(spec))
    }

    fn from(spec: &str, one_file: bool) -> Result<Columns> {
        let (mut arrays, mut others) = (BTreeMap::new(), BTreeMap::new());
        if one_file {
            let path = Path::new(spec);
            let file = Arc::new(files::open(path)?.0);
            for (name, t) in tensors(path)? {
                let Some(e) = StoredType::of_safetensors(&t.dtype) else {
                    others.insert(name, t.dtype);
                    continue;
                };
                let (path, file, start) = (path.to_path_buf(), file.clone(), t.bytes.start);
                let array =
                    Array { path, name: name.clone(), file, start, element: e, shape: t.shape };
                arrays.insert(name, array);
            }
        } else {
            for part in spec.split(',') {
                let (name, file) = part.split_once('=').unwrap_or((part, ""));
                if arrays.insert(name.to_string(), npy_array(name, Path::new(file))?).is_some() {
                    return Err(wrong(spec, format!("two files are given for `{name}`")));
                }
            }
        }
        let mut whole: Vec<&Array> = arrays.values().collect();
        whole.dedup_by(|a, b| Arc::ptr_eq(&a.file, &b.file));
        let mut sample = vec![];
        for a in whole {
            let fail = |e| files::io_error("cannot read the column", &a.path, &e);
            sample.extend(ends(&a.file).map_err(fail)?);
        }
        let hash = short(&sample);
        Ok(Columns { arrays, others, spec: spec.into(), hash })
    }

    /// The array of an input; true if it is labels that stand at their own tokens.
    fn of(&self, row: &InputRow) -> Option<(&Array, bool)> {
        let named = |name: &str| self.arrays.get(name);
        let own = named(&row.name).map(|a| (a, row.input.reads == Reads::Next));
        if own.is_some() || !row.of_tokens() || row.input.reads != Reads::Usual {
            return own;
        }
        match row.input.fill {
            Fill::Tokens => named(TOKENS).map(|a| (a, false)),
            _labels => named(LABELS).map(|a| (a, true)),
        }
    }

    /// As the user wrote it.
    pub fn spec(&self) -> &str {
        &self.spec
    }

    /// What stands in the data under another name, or elsewhere, than in the model.
    pub fn renamed(&self, table: &[InputRow]) -> Vec<String> {
        let read = table.iter().filter(|r| is_read(r));
        let found = read.filter_map(|r| self.of(r).map(|(a, moves)| (r, a, moves)));
        let other = found.filter(|(r, a, moves)| *moves || a.name != *r.name);
        let one = |(r, a, moves): (&InputRow, &Array, bool)| {
            let to = if moves { ", one place further there" } else { "" };
            format!("`{}` is the column `{}` of the data{to}", r.name, a.name)
        };
        other.map(one).collect()
    }

    /// Refuses columns that no input takes. Without labels in a model labels are not asked for.
    ///
    /// # Errors
    /// `data` for the first of them.
    pub fn refuse_unread(&self, table: &[InputRow], s: &Settings) -> Result<()> {
        // Where tokens part documents, no column says where they are.
        let parts = s.documents == Some(Documents::ROWS);
        let given = |r: &&InputRow| is_read(r) && (parts || r.input.fill != Fill::Segments);
        let read: Vec<&InputRow> = table.iter().filter(given).collect();
        let found = read.iter().filter_map(|r| Some((*r, self.of(r)?.0)));
        let taken: Vec<(&InputRow, &str)> = found.map(|(r, a)| (r, &*a.name)).collect();
        let scored = s.mode == Mode::Train || table.iter().any(|r| r.input.fill == Fill::Labels);
        let labels = [LABELS, "targets", "target"];
        let unread =
            |name: &&str| !taken.iter().any(|t| t.1 == *name) && (scored || !labels.contains(name));
        let all = self.arrays.keys().chain(self.others.keys()).map(|name| &**name);
        let Some(name) = all.into_iter().find(unread) else { return Ok(()) };
        let takes: Vec<String> = read.iter().map(|r| format!("`{}`", usual(r))).collect();
        let what = match self.others.get(name) {
            Some(dtype) if read.iter().any(|r| *r.name == *name) => {
                format!("`{name}` has elements of type {dtype}, which are not read")
            }
            _other => format!("the model takes no column `{name}`"),
        };
        let filled = table.iter().any(|r| *r.name == *name && !r.input.fill.is_data());
        let instead = taken.iter().find(|t| {
            t.0.input.fill == Fill::Labels && labels.contains(&name) && labels.contains(&t.1)
        });
        let d = Diag::new("data", what)
            .at(format!("{}: {name}", self.spec))
            .why(format!("it takes {}", takes.join(", ")))
            .rule("every column is read: what is left out silently could have changed the numbers");
        let pads = name.contains("mask") && read.iter().any(|r| r.of_tokens());
        Err(match (instead, pads) {
            _ if filled => d.help("take it out of the data: shardc fills this input itself"),
            (Some((row, column)), _) => {
                let name = &row.name;
                d.help(format!("take one of them out of the data: `{name}` is read from `{column}`"))
            }
            (None, true) if s.documents.is_some_and(Documents::pads) => d
                .help("take it out of the data: the plan knows padding by its token (--documents)"),
            (None, true) => d
                .help("rows without padding: take it out of the file")
                .help("padded rows: compile with --documents eod=N,pad=M, or compile an archive that takes the mask"),
            _ => d.help("take it out of the file, or compile a model that takes it"),
        })
    }

    /// Checks that there is a column for every input; how many rows all have.
    ///
    /// # Errors
    /// `data` for one that is missing, or of other sizes or elements than the model's.
    pub fn check(&self, table: &[InputRow]) -> Result<usize> {
        let mut rows: Option<(usize, &str)> = None;
        for row in table.iter().filter(|r| is_read(r)) {
            let Some((a, _)) = self.of(row) else {
                if matches!(row.input.fill, Fill::Mask | Fill::Segments) {
                    continue;
                }
                let known: Vec<&str> = self.arrays.keys().take(8).map(String::as_str).collect();
                return Err(self.missing(row).why(format!("there are {}", known.join(", "))));
            };
            let own = a.shape.get(usize::from(row.input.batch)..);
            if own != Some(&row.sizes[..]) {
                let first = if row.input.batch { "rows of " } else { "" };
                let what = format!(
                    "`{}` is {:?}, the model takes {first}{:?}",
                    row.name, a.shape, row.sizes
                );
                let d = wrong(&a.place(), what);
                let (want, own) = (&row.sizes, own.unwrap_or(&[]));
                let others = (0..want.len().max(own.len())).filter(|&i| want.get(i) != own.get(i));
                let seq = row.input.tokens().map(|d| d - usize::from(row.input.batch));
                // Only the number of tokens is another.
                return Err(match (&others.collect::<Vec<_>>()[..], seq) {
                    (&[i], Some(seq)) if i == seq && own.len() == want.len() => {
                        d.help(format!("or compile with --seq {}", own[i]))
                    }
                    _ => d,
                });
            }
            if a.element.is_float() && !row.dtype.is_float() {
                let what = format!("`{}` has floats, the model takes integers", row.name);
                return Err(wrong(&a.place(), what));
            }
            if !row.input.batch {
                continue;
            }
            match rows {
                Some((n, other)) if n != a.shape[0] => {
                    let what = format!("`{}` has {} rows, `{other}` {n}", row.name, a.shape[0]);
                    return Err(wrong(&a.place(), what));
                }
                _first => rows = Some((a.shape[0], &a.name)),
            }
        }
        match rows {
            Some((0, name)) => Err(wrong(&self.spec, format!("`{name}` has no rows"))),
            rows => Ok(rows.map_or(0, |r| r.0)),
        }
    }

    fn missing(&self, row: &InputRow) -> Diag {
        // What a model calls targets is labels in data, which are not shifted.
        let is_label = row.of_tokens() && row.input.fill != Fill::Tokens;
        let other = match is_label && row.input.reads == Reads::Usual {
            true => " (or `labels`, which are shifted by one)",
            false => "",
        };
        let what = format!("the column `{}`{other} is missing", row.name);
        if let Some(dtype) = self.others.get(&*row.name) {
            return wrong(&self.spec, format!("{what}: elements of type {dtype} are not read"));
        }
        let d = wrong(&self.spec, what);
        match row.input.reads {
            Reads::Usual => d,
            _own => d.rule("columns go by the names of the model's arguments"),
        }
    }

    /// Whether there is a column for an input. Without one for a mask nothing is padding.
    pub fn has(&self, row: &InputRow) -> bool {
        self.of(row).is_some()
    }

    /// The numbers of an input for these rows.
    ///
    /// # Errors
    /// `data` for what cannot be read, or is not i32 where the model takes one.
    pub fn read(&self, row: &InputRow, rows: &[usize]) -> Result<Numbers> {
        let (a, moves) = self.of(row).ok_or_else(|| self.missing(row))?;
        let (n, shared) = (row.elements(), [0]);
        let rows = if row.input.batch { rows } else { &shared[..] };
        let mut all = Vec::with_capacity(n * rows.len());
        for &r in rows {
            let mut own = a.row(r, n)?;
            if moves {
                own.rotate_left(1);
                own.iter_mut()
                    .last()
                    .into_iter()
                    .for_each(|x| *x = StoredNumber::Whole(IGNORED.into()));
            }
            all.extend(own);
        }
        if row.dtype == DType::I32 {
            let small = |x: StoredNumber| match x {
                StoredNumber::Whole(x) => i32::try_from(x).map_err(|_| {
                    wrong(&a.place(), format!("`{}` has {x}, which is not i32", row.name))
                }),
                StoredNumber::Float(_) => {
                    Err(wrong(&a.place(), format!("`{}` is floats", row.name)))
                }
            };
            return Ok(Numbers::I32(all.into_iter().map(small).collect::<Result<_>>()?));
        }
        let float = |x| match x {
            StoredNumber::Float(x) => x as f32,
            StoredNumber::Whole(x) => x as f32,
        };
        Ok(Numbers::F32(all.into_iter().map(float).collect()))
    }

    /// What tells these columns from others: their names and sizes, and how their files begin and end.
    pub fn mark(&self) -> String {
        let one = |(name, a): (&String, &Array)| format!("{name} {:?}", a.shape);
        let all = self.arrays.iter().map(one).collect::<Vec<_>>().join(", ");
        format!("of columns {all}, hash {}", self.hash)
    }
}

/// Whether the user's columns fill an input; a mask and segments, if they have some.
fn is_read(row: &InputRow) -> bool {
    row.input.fill == Fill::Segments || row.input.fill.is_data() && row.input.fill != Fill::Random
}

impl Array {
    fn place(&self) -> String {
        format!("{}: {}", self.path.display(), self.name)
    }

    /// The `n` numbers of a row.
    fn row(&self, row: usize, n: usize) -> Result<Vec<StoredNumber>> {
        let size = self.element.bytes;
        let mut bytes = vec![0; n * size];
        let at = self.start + (row * n * size) as u64;
        self.file
            .read_exact_at(&mut bytes, at)
            .map_err(|e| files::io_error("cannot read the column", &self.path, &e))?;
        Ok(bytes.chunks_exact(size).map(|b| self.element.decode(b)).collect())
    }
}

/// An array that is a file of its own.
fn npy_array(name: &str, path: &Path) -> Result<Array> {
    let (mut file, size) = files::open(path)?;
    let place = path.display().to_string();
    let h = npy::header(&mut file, |what| wrong(&place, what))?;
    let element = StoredType::of_numpy(&h.descr);
    let (Some(element), Some(shape)) = (element, h.shape) else {
        let what = format!("it is not an array of numbers in the order of C: {}", h.text);
        return Err(wrong(&place, what));
    };
    let all = shape.iter().try_fold(element.bytes as u64, |n, &s| n.checked_mul(s));
    if all.and_then(|n| n.checked_add(h.start)) != Some(size) {
        return Err(wrong(&place, format!("it is of sizes {shape:?}, and the file has {size} B")));
    }
    let shape = shape.into_iter().map(|n| n as usize).collect();
    let (path, name) = (path.to_path_buf(), name.to_string());
    Ok(Array { path, name, file: Arc::new(file), start: h.start, element, shape })
}
