//! Training data: files of tokens, text, bytes of files, or random tokens.

mod text;
#[cfg(feature = "tokenizers")]
mod tokenizer;
mod tokens;

use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_ir::rng::Stream;
use std::io::Read;
use std::path::{Path, PathBuf};
use text::Text;
use tokens::TokenFile;

/// Where tokens come from.
pub enum Data {
    /// One token per byte, the files one after another.
    Bytes(Vec<u8>),
    Tokens(TokenFile),
    Text(Text),
    /// Random tokens: for timing, and where nothing is given.
    Random {
        vocab: usize,
    },
}

/// Most bytes read as data that stay in memory.
const MAX_BYTES: u64 = 256 << 20;

/// Most tokens of a batch.
const MAX_TOKENS: usize = 1 << 32;

/// Whether a word of `--data` is text, for which there is a tokenizer.
pub fn is_text(spec: &str) -> bool {
    spec.starts_with("text:")
}

impl Data {
    /// A file of tokens, `text:GLOB` with a tokenizer, or `bytes:GLOB`. Given with a flag.
    ///
    /// # Errors
    /// `data`, and those of text.
    pub fn open(flag: &str, spec: &str, tokenizer: Option<&Path>, vocab: usize) -> Result<Data> {
        let wrong = |what: String| Diag::new("data", what).at(format!("{flag} {spec}"));
        match (spec.split_once(':'), Path::new(spec).extension()) {
            (Some(("text", pattern)), _) => {
                let Some(tokenizer) = tokenizer else {
                    return Err(wrong("text needs a tokenizer".into())
                        .help("add --tokenizer DIR, the folder of the model with tokenizer.json"));
                };
                let documents = read(pattern, &wrong)?;
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
            _ => Err(wrong(format!("`{spec}` is no kind of data")).help(
                "use FILE.bin, FILE.npy, text:GLOB, or bytes:GLOB, for example bytes:src/*.rs",
            )),
        }
    }

    /// What tells these data from others: a hash of bytes or text, the number of tokens of a file.
    pub fn mark(&self) -> String {
        match self {
            Data::Bytes(b) => {
                format!("of {} bytes, hash {}", b.len(), &blake3::hash(b).to_hex()[..16])
            }
            Data::Tokens(t) => format!("of {} tokens", t.count),
            Data::Text(t) => t.mark(),
            Data::Random { vocab } => format!("of {vocab} random tokens"),
        }
    }

    /// Tokens and targets of a step, `[rows, seq]` each: of (seed, step) and nothing else, so the same
    /// on every mesh and after a pause. A row is `seq` tokens from a place that is drawn.
    ///
    /// # Errors
    /// `data` if a file cannot be read.
    pub fn batch(
        &self,
        seed: u64,
        step: u32,
        rows: usize,
        seq: usize,
    ) -> Result<(Vec<i32>, Vec<i32>)> {
        let all = rows.checked_mul(seq).filter(|&n| n <= MAX_TOKENS).ok_or_else(|| {
            Diag::new("data", format!("a batch of {rows} rows of {seq} tokens"))
                .rule(format!("a batch has at most {MAX_TOKENS} tokens"))
                .help("compile with a smaller --global-batch")
        })?;
        let (mut ids, mut targets) = (Vec::with_capacity(all), Vec::with_capacity(all));
        let s = Stream::new(seed, "data", step);
        for row in 0..rows {
            let first = |n: u64| (s.uniform(row as u64) * n as f64) as u64;
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
                Data::Random { vocab } => {
                    let one = |i: usize| s.uniform((row * (seq + 1) + i) as u64) * *vocab as f64;
                    (0..=seq).map(|i| one(i) as i32).collect()
                }
            };
            ids.extend_from_slice(&tokens[..seq]);
            targets.extend_from_slice(&tokens[1..]);
        }
        Ok((ids, targets))
    }
}

/// The files that a glob names and that hold something, sorted by path; `**` crosses folders; hidden
/// folders and `target` are left out.
fn read(pattern: &str, wrong: &dyn Fn(String) -> Diag) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let root: PathBuf = pattern.split('/').take_while(|p| !p.contains(['*', '?'])).collect();
    let root = if pattern.starts_with('/') { Path::new("/").join(root) } else { root };
    let start = if root.as_os_str().is_empty() { PathBuf::from(".") } else { root };
    let mut paths = vec![];
    collect(&start, pattern.trim_start_matches("./"), 0, &mut paths);
    paths.sort();
    let (mut files, mut left) = (vec![], MAX_BYTES);
    for path in paths {
        let (file, len) = files::open(&path)?;
        let mut bytes = vec![];
        let unreadable = |e| files::io_error("cannot read the file", &path, &e);
        // One byte more than there is room for says that there are too many, before all are read.
        file.take(len.min(left + 1)).read_to_end(&mut bytes).map_err(unreadable)?;
        left = left.checked_sub(bytes.len() as u64).ok_or_else(|| {
            wrong(format!("the files that {pattern} names hold more than {MAX_BYTES} bytes"))
                .help("name fewer files, or make a file of tokens of them")
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

fn collect(dir: &Path, pattern: &str, depth: usize, out: &mut Vec<PathBuf>) {
    // Whatever else a user names is refused when it is opened.
    let named = !pattern.contains(['*', '?']);
    if depth == 0 && dir.exists() && (named || !dir.is_dir()) {
        out.push(dir.to_path_buf());
        return;
    }
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for e in entries.flatten() {
        let name = e.file_name();
        let hidden = name.to_string_lossy().starts_with('.') || name == "target";
        let Ok(kind) = e.file_type() else { continue };
        if hidden || depth > 32 {
            continue;
        }
        let path = e.path();
        if kind.is_dir() {
            collect(&path, pattern, depth + 1, out);
        } else if matches(pattern, path.to_string_lossy().trim_start_matches("./"))
            && !path.is_dir()
        {
            out.push(path);
        }
    }
}

/// Globs by path segment; `**` stands for any number of segments.
fn matches(pattern: &str, path: &str) -> bool {
    fn go(p: &[&str], t: &[&str]) -> bool {
        match (p.first(), t.first()) {
            (None, None) => true,
            (Some(&"**"), _) => go(&p[1..], t) || (!t.is_empty() && go(p, &t[1..])),
            (Some(g), Some(s)) => shardc_ir::names::glob(g, s) && go(&p[1..], &t[1..]),
            _ => false,
        }
    }
    go(&pattern.split('/').collect::<Vec<_>>(), &path.split('/').collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_by_segment() {
        assert!(matches("**/*.rs", "src/commands/run.rs") && matches("**/*.rs", "main.rs"));
        assert!(!matches("*.rs", "src/main.rs") && matches("src/*", "src/a.b"));
    }

    #[test]
    fn targets_follow_tokens() {
        let d = Data::Bytes((0..=255).collect());
        let (a, b) = d.batch(1, 2, 3, 5).unwrap();
        assert_eq!(a[1..5], b[0..4]);
        assert_eq!(d.batch(1, 2, 3, 5).unwrap(), (a, b));
    }
}
