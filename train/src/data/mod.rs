//! Training data: files of tokens, text, bytes of files, columns, examples such as chats, or random numbers.

mod columns;
mod date;
#[cfg(feature = "tokenizers")]
mod examples;
#[cfg(not(feature = "tokenizers"))]
#[path = "examples/absent.rs"]
mod examples;
mod given;
mod globs;
mod npy;
mod order;
mod reading;
mod text;
#[cfg(feature = "tokenizers")]
mod tokenizer;
mod tokens;

use columns::Columns;
pub use date::Date;
pub use examples::{Examples, Prompt, Prompts, Sample, Setup, Stats, guarded};
pub use given::number;
pub use given::{Source, are_examples, default_order, open_examples};
pub use order::{Order, Picks};
pub use reading::{LossOn, Reading, Recipe, Templating, TooLong, YesNo};
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::files;
use shardc_ir::func::{Fill, InputRow, Reads};
use shardc_ir::plan::Settings;
use shardc_ir::rng::Stream;
use shardc_ir::types::DType;
use shardc_runtime::Numbers;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use text::Text;
use tokens::TokenFile;

/// Where the data of steps come from.
pub enum Data {
    /// One token per byte, the files one after another.
    Bytes(Vec<u8>),
    Tokens(TokenFile),
    Text(Text),
    Columns(Columns),
    Examples(Box<Examples>),
    /// Random numbers: for timing, and where nothing is given. Whole ones are below this.
    Random {
        vocab: usize,
    },
}

/// Most bytes read as data that stay in memory.
const MAX_BYTES: u64 = 256 << 20;

/// Most numbers of an input in a batch.
const MAX_NUMBERS: usize = 1 << 32;

/// Whether a word of `--data` is text, for which there is a tokenizer.
pub fn is_text(spec: &str) -> bool {
    spec.starts_with("text:")
}

impl Data {
    /// A file of tokens, `text:GLOB` with a tokenizer, `bytes:GLOB`, or columns. Given with a flag.
    ///
    /// # Errors
    /// `data`, and those of text.
    pub fn open(flag: &str, spec: &str, tokenizer: Option<&Path>, vocab: usize) -> Result<Data> {
        let wrong = |what: String| Diag::new("data", what).at(format!("{flag} {spec}"));
        if columns::are_columns(spec) {
            return Columns::open(spec).map(Data::Columns);
        }
        match (spec.split_once(':'), Path::new(spec).extension()) {
            (Some(("text", pattern)), _) => {
                let Some(tokenizer) = tokenizer else {
                    return Err(wrong("text needs a tokenizer".into())
                        .help("add --tokenizer DIR, the folder of the model with tokenizer.json"));
                };
                let documents = text::documents(read(pattern, &wrong)?)?;
                Text::open(tokenizer, &documents, vocab).map(Data::Text)
            }
            (Some(("bytes", _)), _) if vocab < 256 => {
                Err(wrong(format!("bytes are 256 tokens, the model knows {vocab}"))
                    .help("use a model with vocab_size 256 or more"))
            }
            (Some(("bytes", pattern)), _) => {
                let files = read(pattern, &wrong)?;
                Ok(Data::Bytes(files.into_iter().flat_map(|f| f.1).collect()))
            }
            (_, Some(e)) if e == "bin" || e == "npy" => {
                TokenFile::open(Path::new(spec)).map(Data::Tokens)
            }
            _ => Err(given::kept_otherwise(spec).unwrap_or_else(|| wrong(format!("`{spec}` is not a kind of data")).help(
                "use FILE.jsonl, FILE.bin, FILE.npy, text:GLOB, bytes:GLOB, FILE.safetensors or NAME=FILE.npy, for \
                 example bytes:src/*.rs",
            ))),
        }
    }

    /// Opens columns that are the batch of every step: a safetensors file, whatever it is called, or
    /// `NAME=FILE.npy`.
    ///
    /// # Errors
    /// `data`, and those of reading a header.
    pub fn of_batch(spec: &str) -> Result<Data> {
        Columns::of_batch(spec).map(Data::Columns)
    }

    /// What is called otherwise in the data than in the model, as sentences.
    pub fn renamed(&self, table: &[InputRow]) -> Vec<String> {
        match self {
            Data::Columns(c) => c.renamed(table),
            _other => vec![],
        }
    }

    /// What tells these data from others: their sizes, and a hash of bytes or text; of large files that of how they
    /// begin and end.
    pub fn mark(&self) -> String {
        match self {
            Data::Bytes(b) => {
                format!("of {}, hash {}", count(b.len(), "byte", "bytes"), short(b))
            }
            Data::Tokens(t) => {
                format!("of {}, hash {}", count(t.count as usize, "token", "tokens"), t.hash)
            }
            Data::Text(t) => t.mark(),
            Data::Columns(c) => c.mark(),
            Data::Examples(e) => e.mark(),
            Data::Random { vocab } => format!("of {vocab} random tokens"),
        }
    }

    /// Checks that these data fill what a model takes, and that it takes all of them.
    ///
    /// # Errors
    /// `data` for an input that they do not have, or have in other sizes, and for a column that no input takes.
    pub fn fit(&self, table: &[InputRow], s: &Settings) -> Result<()> {
        self.check(table)?;
        match self {
            Data::Columns(c) => c.refuse_unread(table, s),
            _other => Ok(()),
        }
    }

    /// The input whose labels are made of the tokens, although its model does not move labels.
    pub fn made_labels<'t>(&self, table: &'t [InputRow]) -> Option<&'t InputRow> {
        let causal = table.iter().find(|r| r.input.reads == Reads::Causal);
        causal.filter(|_| matches!(self, Data::Bytes(_) | Data::Tokens(_) | Data::Text(_)))
    }

    /// Checks that these data fill what a model takes.
    ///
    /// # Errors
    /// `data` for an input that they do not have, or have in other sizes.
    fn check(&self, table: &[InputRow]) -> Result<()> {
        let asked = table.iter().filter(|r| {
            r.input.fill.is_data() && !matches!(r.input.fill, Fill::Random | Fill::Mask)
        });
        match self {
            Data::Random { .. } => Ok(()),
            Data::Columns(c) => c.check(table).map(drop),
            _tokens => match asked.into_iter().find(|r| !r.of_tokens() || has_no_stream(r)) {
                None => Ok(()),
                Some(r) if has_no_stream(r) => {
                    let name = &r.name;
                    Err(Diag::new("data", format!("tokens alone have no `{name}`"))
                        .rule(format!(
                            "the model scores position i against {name}[i] and has no causal mask: the next token is no label"
                        ))
                        .help(format!(
                            "give a column `{name}`: FILE.safetensors, or NAME=FILE.npy,NAME=FILE.npy"
                        )))
                }
                Some(r) => Err(Diag::new("data", format!("`{}` is not a row of tokens", r.name))
                    .rule("tokens fill input_ids and labels of every token; the rest is columns")
                    .help("give columns: FILE.safetensors, or NAME=FILE.npy,NAME=FILE.npy")),
            },
        }
    }

    /// Whether an input is filled by these data: a mask and segments only by a column or examples, since without
    /// one nothing is padding.
    fn fills(&self, row: &InputRow) -> bool {
        match (row.input.fill, self) {
            (Fill::Mask | Fill::Segments, Data::Columns(c)) => c.has(row),
            (Fill::Mask | Fill::Segments, Data::Examples(_)) => row.input.tokens() == Some(1),
            (Fill::Mask | Fill::Segments, _) => false,
            (fill, _) => fill.is_data(),
        }
    }

    /// What fills the inputs of a step, by name: of these picks and the step and nothing else, so the same on
    /// every mesh and after a pause. A row is a row of all columns, or `seq` tokens from a place.
    ///
    /// # Errors
    /// `data` if a file cannot be read, or does not have what the inputs need.
    pub fn batch(
        &self,
        table: &[InputRow],
        picks: &Picks,
        step: u32,
        rows: usize,
    ) -> Result<shardc_runtime::Columns> {
        self.check(table)?;
        let seed = picks.seed;
        let s = Stream::new(seed, "data", step);
        let chosen: Vec<usize> = match self {
            Data::Columns(c) => {
                let n = c.check(table)? as u64;
                (0..rows).map(|r| picks.row((step, rows), r, n) as usize).collect()
            }
            _other => vec![],
        };
        let examples = match self {
            Data::Examples(e) => {
                e.batch(picks, (0..rows).map(|r| picks.number((step, rows), r)))?
            }
            _other => vec![],
        };
        let mut tokens: Option<(usize, Vec<i32>, Vec<i32>)> = None;
        let mut out = shardc_runtime::Columns::new();
        for row in table.iter().filter(|r| self.fills(r)) {
            let n = within(row, rows)?;
            let numbers = match self {
                _ if row.input.fill == Fill::Random => random(row, s, (seed, step), n, 0),
                Data::Random { vocab } => {
                    let below = if row.indexes() { row.bound(*vocab) } else { NUMBERS };
                    random(row, s, (seed, step), n, below)
                }
                Data::Columns(c) => c.read(row, &chosen)?,
                Data::Examples(_) => given::numbers(row, &examples)?,
                _tokens => {
                    let seq = row.elements();
                    if tokens.as_ref().is_none_or(|t| t.0 != seq) {
                        let (ids, targets) = self.tokens(picks, (step, rows), seq)?;
                        tokens = Some((seq, ids, targets));
                    }
                    let (_, ids, targets) = tokens.as_ref().expect("just made");
                    let labels = row.input.fill == Fill::Labels;
                    Numbers::I32(if labels { targets } else { ids }.clone())
                }
            };
            out.insert(row.name.to_string(), numbers);
        }
        Ok(out)
    }

    /// How many rows an epoch has; of random numbers there is none.
    ///
    /// # Errors
    /// `data` if columns do not fill what the model takes.
    pub fn epoch(&self, table: &[InputRow], picks: &Picks) -> Result<Option<u64>> {
        let tokens = match self {
            Data::Random { .. } => return Ok(None),
            Data::Columns(c) => return Ok(Some(c.check(table)? as u64)),
            Data::Examples(e) => return Ok(Some(e.rows_of(picks, 1.0))),
            Data::Bytes(b) => b.len() as u64,
            Data::Tokens(t) => t.count,
            Data::Text(t) => t.tokens.len() as u64,
        };
        let seq = table.iter().find(|r| r.input.fill.is_data() && r.of_tokens());
        Ok(seq.map(|r| order::pieces(tokens, r.elements())))
    }

    /// All rows of columns, in their order, and random numbers for inputs that are filled with such; nothing of
    /// other data.
    ///
    /// # Errors
    /// `data` if a file cannot be read, or has another number of rows.
    pub fn whole(
        &self,
        table: &[InputRow],
        (seed, step): (u64, u32),
        rows: usize,
    ) -> Result<shardc_runtime::Columns> {
        let Data::Columns(c) = self else { return Ok(shardc_runtime::Columns::new()) };
        let there = c.check(table)?;
        if there != rows {
            return Err(Diag::new(
                "data",
                format!("the plan takes {rows} rows, the data have {there}"),
            )
            .at(c.spec())
            .help(format!("compile with --global-batch {there}")));
        }
        let all: Vec<usize> = (0..rows).collect();
        let s = Stream::new(seed, "data", step);
        let read = table.iter().filter(|r| self.fills(r));
        let one = |r: &InputRow| match r.input.fill {
            Fill::Random => Ok(random(r, s, (seed, step), within(r, rows)?, 0)),
            _given => c.read(r, &all),
        };
        read.map(|r| Ok((r.name.to_string(), one(r)?))).collect()
    }

    /// Tokens and targets of a step, `[rows, seq]` each.
    fn tokens(&self, picks: &Picks, of: (u32, usize), seq: usize) -> Result<(Vec<i32>, Vec<i32>)> {
        let (mut ids, mut targets) = (vec![], vec![]);
        for row in 0..of.1 {
            let first = |n: u64| picks.token(of, row, (n, seq));
            let tokens: Vec<i32> = match self {
                Data::Bytes(b) => {
                    let start = first(b.len() as u64) as usize;
                    (0..=seq).map(|i| i32::from(b[(start + i) % b.len()])).collect()
                }
                Data::Tokens(t) => t.read(first(t.count), seq + 1)?,
                Data::Text(t) => {
                    let (all, start) = (&t.tokens, first(t.tokens.len() as u64) as usize);
                    (0..=seq).map(|i| all[(start + i) % all.len()]).collect()
                }
                Data::Columns(_) | Data::Examples(_) | Data::Random { .. } => vec![0; seq + 1],
            };
            ids.extend_from_slice(&tokens[..seq]);
            targets.extend_from_slice(&tokens[1..]);
        }
        Ok((ids, targets))
    }
}

/// The first digits of a hash.
pub fn short(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..16].to_string()
}

/// How a file begins and ends, and its size: what tells it from others, without reading all of it.
fn ends(file: &File) -> std::io::Result<Vec<u8>> {
    const MOST: u64 = 1 << 16;
    let size = file.metadata()?.len();
    let mut out = size.to_le_bytes().to_vec();
    let last = size.saturating_sub(MOST).max(size.min(MOST));
    for (from, to) in [(0, size.min(MOST)), (last, size)] {
        let mut part = vec![0; (to - from) as usize];
        file.read_exact_at(&mut part, from)?;
        out.extend(part);
    }
    Ok(out)
}

/// Labels that do not follow from tokens.
fn has_no_stream(row: &InputRow) -> bool {
    row.input.fill == Fill::Labels && row.input.reads == Reads::Own
}

/// Random whole numbers that index nothing are below this: sums and products of them are numbers, too.
const NUMBERS: usize = 16;

/// How many numbers an input has in a batch of so many rows.
fn within(row: &InputRow, rows: usize) -> Result<usize> {
    let rows = if row.input.batch { rows } else { 1 };
    rows.checked_mul(row.elements()).filter(|&n| n <= MAX_NUMBERS).ok_or_else(|| {
        Diag::new("data", format!("a batch of {rows} rows of {:?}", row.sizes))
            .rule(format!("an input has at most {MAX_NUMBERS} numbers in a batch"))
            .help("compile with a smaller --global-batch")
    })
}

/// `n` random numbers for an input: normal ones, or whole ones below `vocab`; tokens and their labels as if
/// they were read from one row.
fn random(row: &InputRow, s: Stream, (seed, step): (u64, u32), n: usize, vocab: usize) -> Numbers {
    let below = |x: f64| (x * vocab.min(i32::MAX as usize) as f64) as i32;
    let own = Stream::new(seed, &format!("data {}", row.name), step);
    match (row.dtype, row.of_tokens()) {
        (DType::I32, true) => {
            let (seq, by) = (row.elements(), usize::from(row.input.fill == Fill::Labels));
            let one = |i: usize| s.uniform((i / seq * (seq + 1) + i % seq + by) as u64);
            Numbers::I32((0..n).map(|i| below(one(i))).collect())
        }
        (DType::I32, false) => Numbers::I32((0..n).map(|i| below(own.uniform(i as u64))).collect()),
        _float => Numbers::F32((0..n).map(|i| own.normal(i as u64) as f32).collect()),
    }
}

/// The files that a glob names and that hold something.
fn read(pattern: &str, wrong: &dyn Fn(String) -> Diag) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let paths = globs::named(pattern);
    let (mut files, mut left) = (vec![], MAX_BYTES);
    for path in paths {
        let (file, len) = files::open(&path)?;
        let mut bytes = vec![];
        let unreadable = |e| files::io_error("cannot read the file", &path, &e);
        // One byte more than there is room for says that there are too many, before all are read.
        file.take(len.min(left + 1)).read_to_end(&mut bytes).map_err(unreadable)?;
        left = left.checked_sub(bytes.len() as u64).ok_or_else(|| {
            wrong(format!("the files that {pattern} names hold more than {MAX_BYTES} bytes"))
                .help("name fewer files, or tokenize them to a file")
        })?;
        if !bytes.is_empty() {
            files.push((path, bytes));
        }
    }
    if files.is_empty() {
        return Err(wrong("no file matches, or all are empty".into())
            .help("quote the glob, and check the current folder"));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::func::Input;

    #[test]
    fn targets_follow_tokens() {
        let row = |name: &str| InputRow {
            name: name.into(),
            input: Input::named(name),
            dtype: DType::I32,
            sizes: vec![5],
            below: None,
        };
        let table = [row("input_ids"), row("targets")];
        for d in [Data::Bytes((0..=255).collect()), Data::Random { vocab: 7 }] {
            let all = d.batch(&table, &Picks::random(1), 2, 3).unwrap();
            let [Numbers::I32(a), Numbers::I32(b)] = ["input_ids", "targets"].map(|n| &all[n])
            else {
                panic!("whole numbers")
            };
            assert_eq!((a.len(), &a[1..5]), (15, &b[0..4]));
            assert_eq!(d.batch(&table, &Picks::random(1), 2, 3).unwrap(), all);
        }
    }
}
