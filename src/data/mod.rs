//! Training data: files of tokens, bytes of files, or random tokens.

mod tokens;

use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::rng::Stream;
use std::path::{Path, PathBuf};
use tokens::TokenFile;

/// Where tokens come from.
pub enum Data {
    /// One token per byte, the files one after another.
    Bytes(Vec<u8>),
    Tokens(TokenFile),
    /// Random tokens: for timing, and where nothing is given.
    Random {
        vocab: usize,
    },
}

/// Most bytes read as data.
const MAX_BYTES: usize = 256 << 20;

impl Data {
    /// A file of tokens, or `bytes:GLOB`, where `**` crosses folders; hidden folders and `target` are
    /// left out. Given with a flag.
    ///
    /// # Errors
    /// `data`.
    pub fn open(flag: &str, spec: &str, vocab: usize) -> Result<Data> {
        let Some(pattern) = spec.strip_prefix("bytes:") else {
            let path = Path::new(spec);
            if path.extension().is_some_and(|e| e == "bin" || e == "npy") {
                return TokenFile::open(path).map(Data::Tokens);
            }
            return Err(Diag::new("data", format!("`{spec}` is no kind of data"))
                .at(format!("{flag} {spec}"))
                .help("use FILE.bin, FILE.npy, or bytes:GLOB, for example bytes:src/*.rs"));
        };
        if vocab < 256 {
            return Err(Diag::new(
                "data",
                format!("bytes are 256 tokens, the model knows {vocab}"),
            )
            .at(format!("{flag} {spec}"))
            .help("use a model with vocab_size 256 or more"));
        }
        let root: PathBuf = pattern.split('/').take_while(|p| !p.contains(['*', '?'])).collect();
        let root = if pattern.starts_with('/') { Path::new("/").join(root) } else { root };
        let mut files = vec![];
        let start = if root.as_os_str().is_empty() { PathBuf::from(".") } else { root };
        collect(&start, pattern.trim_start_matches("./"), 0, &mut files);
        files.sort();
        let mut bytes = vec![];
        for f in &files {
            let read = std::fs::read(f).map_err(|e| {
                Diag::new("data", e.to_string())
                    .at(f.display().to_string())
                    .help("make the file readable")
                    .exit(Exit::Environment)
            })?;
            bytes.extend_from_slice(&read);
            if bytes.len() > MAX_BYTES {
                return Err(Diag::new(
                    "data",
                    format!("the files hold more than {MAX_BYTES} bytes"),
                )
                .at(format!("{flag} {spec}"))
                .help("name fewer files"));
            }
        }
        if bytes.is_empty() {
            return Err(Diag::new("data", "no file matches, or all are empty")
                .at(format!("{flag} {spec}"))
                .help("quote the glob, and check the current folder"));
        }
        Ok(Data::Bytes(bytes))
    }

    /// What tells these data from others: a hash of bytes, the number of tokens of a file.
    pub fn mark(&self) -> String {
        match self {
            Data::Bytes(b) => {
                format!("of {} bytes, hash {}", b.len(), &blake3::hash(b).to_hex()[..16])
            }
            Data::Tokens(t) => format!("of {} tokens", t.count),
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
        let (mut ids, mut targets) =
            (Vec::with_capacity(rows * seq), Vec::with_capacity(rows * seq));
        let s = Stream::new(seed, "data", step);
        for row in 0..rows {
            let first = |n: u64| (s.uniform(row as u64) * n as f64) as u64;
            let tokens: Vec<i32> = match self {
                Data::Bytes(b) => {
                    let start = first(b.len() as u64) as usize;
                    (0..=seq).map(|i| i32::from(b[(start + i) % b.len()])).collect()
                }
                Data::Tokens(t) => t.read(first(t.count), seq + 1)?,
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

fn collect(dir: &Path, pattern: &str, depth: usize, out: &mut Vec<PathBuf>) {
    if dir.is_file() {
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
        } else if kind.is_file()
            && matches(pattern, path.to_string_lossy().trim_start_matches("./"))
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
            (Some(g), Some(s)) => shardc_passes::options::glob(g, s) && go(&p[1..], &t[1..]),
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
