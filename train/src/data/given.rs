//! Data that a run is given: what they are by their name, and what examples need besides.

use super::examples::{Examples, Row, Setup};
use super::reading::YesNo;
use super::{Data, Order, Reading, columns, globs};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::documents::Documents;
use shardc_ir::func::{Fill, InputRow};
use shardc_ir::plan::Settings;
use shardc_plans::hub;
use shardc_process::shell::word;
use shardc_runtime::Numbers;
use std::path::{Path, PathBuf};

/// Whether a word of `--data` is a file of examples by its name.
pub fn are_examples(spec: &str) -> bool {
    let name = spec.to_lowercase();
    let name = name.strip_suffix(".zst").unwrap_or(&name);
    let file = [".jsonl", ".ndjson", ".json"].iter().any(|e| name.ends_with(e));
    spec.starts_with(GLOB) || file && !spec.starts_with("text:") && !spec.starts_with("bytes:")
}

/// What stands before a glob of files of examples.
const GLOB: &str = "jsonl:";

/// The order of data where none is given: what has rows is taken once in an epoch.
pub fn default_order(spec: Option<&str>) -> Order {
    match spec.is_some_and(|s| are_examples(s) || columns::are_columns(s)) {
        true => Order::Shuffled,
        false => Order::Random,
    }
}

/// How to write lines of JSON of what is kept otherwise: tables, packed files, and data sets; none for the rest.
pub(super) fn kept_otherwise(spec: &str) -> Option<Diag> {
    let path = Path::new(spec);
    let kind = path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
    let refuse = |what: String| Some(Diag::new("data", what).at(spec));
    let read = match &*kind {
        _folder if path.is_dir() => return data_set(path, refuse("a folder is not read".into())?),
        "parquet" => format!("read_parquet({spec:?})"),
        "arrow" | "feather" => format!("read_feather({spec:?})"),
        "csv" => format!("read_csv({spec:?})"),
        "tsv" => format!("read_csv({spec:?}, sep=\"\\t\")"),
        "gz" | "bz2" | "xz" => {
            let by = if kind == "gz" {
                "gunzip"
            } else if kind == "xz" {
                "unxz"
            } else {
                "bunzip2"
            };
            let d = refuse(format!("a .{kind} file is not read, a .zst file is"))?;
            return Some(d.help(format!("unpack it: {by} -k {}", word(path))));
        }
        _other if kind.is_empty() && hub::is_name(path) => {
            return data_set(path, refuse("a name of a data set is not read".into())?);
        }
        _other => return None,
    };
    let to = path.with_extension("jsonl").display().to_string();
    let write = format!("to_json({to:?}, orient=\"records\", lines=True, force_ascii=False)");
    Some(python(refuse(format!("a .{kind} file is not read"))?, "pandas", read, write))
}

/// A data set as the library `datasets` keeps it: in a folder, or by its name.
fn data_set(path: &Path, d: Diag) -> Option<Diag> {
    let saved = ["state.json", "dataset_dict.json"].iter().any(|f| path.join(f).is_file());
    let name = path.display().to_string();
    let read = match saved {
        true => format!("load_from_disk({name:?})"),
        false => format!("load_dataset({name:?}, split=\"train\")"),
    };
    let write = "to_json(\"train.jsonl\", force_ascii=False)";
    Some(python(d, "datasets", read, write.into()))
}

/// The lines that read a table with a module, and write it as lines of JSON.
fn python(d: Diag, module: &str, read: String, write: String) -> Diag {
    d.rule("examples are lines of JSON: three lines of Python write them")
        .help(format!("import {module}"))
        .help(format!("table = {module}.{read}"))
        .help(format!("table.{write}"))
}

/// Where data come from, with what a run knows.
pub struct Source<'a> {
    /// The flag that gives them.
    pub flag: &'a str,
    /// `--tokenizer`.
    pub tokenizer: Option<&'a Path>,
    /// Folders that may have a tokenizer if none is given: that of the weights, and that of the model.
    pub folders: Vec<PathBuf>,
    pub settings: &'a Settings,
    pub reading: &'a Reading,
}

impl Source<'_> {
    /// Opens data of any kind.
    ///
    /// # Errors
    /// Those of [`Data::open`]; of examples `data`, `chat-mask`, `chat-bos`, `tokenizer`, `token-range`.
    pub fn open(&self, spec: &str) -> Result<Data> {
        if !are_examples(spec) {
            return Data::open(self.flag, spec, self.tokenizer, self.settings.vocab);
        }
        let s = self.settings;
        if let Some(Documents::Ends(d)) = s.documents {
            return Err(Diag::new("data", format!("the plan cuts rows at token {}", d.end))
                .at(format!("{} {spec}", self.flag))
                .rule(
                    "the end of a text may stand within a chat: where examples are, their rows say",
                )
                .help("compile with --documents rows"));
        }
        let segments = s.documents == Some(Documents::ROWS);
        let pack = self.reading.pack.map_or(segments, |pack| pack == YesNo::Yes);
        if pack && !segments {
            return Err(Diag::new("data", "a packed row needs segments")
                .at("--pack yes")
                .rule("examples of a row do not attend to each other")
                .help("compile with --documents rows, or run with --pack no"));
        }
        let setup = Setup {
            tokenizer: &self.own_tokenizer()?,
            vocab: s.vocab,
            seq: s.seq,
            pack,
            reading: self.reading,
            show: 1,
        };
        open_examples(self.flag, spec, &setup).map(|e| Data::Examples(Box::new(e)))
    }

    /// The tokenizer of examples.
    fn own_tokenizer(&self) -> Result<PathBuf> {
        if let Some(given) = self.tokenizer {
            return Ok(given.into());
        }
        let found = self.folders.iter().find(|f| f.join("tokenizer.json").is_file());
        found.cloned().ok_or_else(|| {
            let d =
                Diag::new("data", "no --tokenizer: the plan's model folder has no tokenizer.json");
            let looked =
                self.folders.iter().map(|f| format!("it is looked for in {}", f.display()));
            looked
                .fold(d, Diag::why)
                .help("add --tokenizer DIR, the folder of the model with tokenizer.json")
        })
    }
}

/// Opens examples: `FILE.jsonl`, `FILE.json` or `jsonl:GLOB`, given with a flag.
///
/// # Errors
/// `data` for what is none by its name, and those of [`Examples::open`].
pub fn open_examples(flag: &str, spec: &str, setup: &Setup) -> Result<Examples> {
    let paths = match spec.strip_prefix(GLOB) {
        Some(glob) => globs::found(glob, flag)?,
        None if are_examples(spec) => vec![PathBuf::from(spec)],
        None => {
            return Err(kept_otherwise(spec).unwrap_or_else(|| {
                Diag::new("data", format!("`{spec}` is no file of examples"))
                    .at(format!("{flag} {spec}"))
                    .help("use FILE.jsonl, FILE.json or jsonl:GLOB")
            }));
        }
    };
    Examples::open(&paths, setup)
}

/// A count for people: from a million on with one digit behind the point.
pub fn number(n: u64) -> String {
    if n < 1_000_000 { n.to_string() } else { format!("{:.1} M", n as f64 / 1e6) }
}

/// The numbers of an input for rows of examples.
///
/// # Errors
/// `data` for an input that examples do not fill.
pub(super) fn numbers(row: &InputRow, rows: &[Row]) -> Result<Numbers> {
    let all = |of: fn(&Row) -> Vec<i32>| Ok(Numbers::I32(rows.iter().flat_map(of).collect()));
    match row.input.fill {
        Fill::Tokens => all(|r| r.ids.clone()),
        Fill::Labels => all(|r| r.targets.clone()),
        Fill::Segments => all(|r| r.segments.clone()),
        Fill::Mask => all(|r| r.segments.iter().map(|&s| i32::from(s >= 0)).collect()),
        _other => Err(Diag::new("data", format!("examples have no `{}`", row.name))
            .help("give columns: FILE.safetensors, or NAME=FILE.npy,NAME=FILE.npy")),
    }
}
