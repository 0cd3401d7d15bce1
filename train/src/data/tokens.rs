//! Files of tokens: what they are is read from their headers, tokens from where they are needed.

use super::{ends, npy, short};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Numbers of the headers of llm.c's files: tokens of 2 bytes (GPT-2), of 4 (Llama 3).
const LLMC: [(i32, Width); 2] = [(20_240_520, Width::U16), (20_240_801, Width::U32)];
/// Bytes of such a header.
const LLMC_HEADER: u64 = 1024;
/// First bytes of the index of Megatron's files.
const MEGATRON: &[u8; 9] = b"MMIDIDX\0\0";

/// How a token is stored, little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Width {
    U8,
    U16,
    U32,
    I32,
    I64,
}

impl Width {
    fn bytes(self) -> u64 {
        match self {
            Width::U8 => 1,
            Width::U16 => 2,
            Width::U32 | Width::I32 => 4,
            Width::I64 => 8,
        }
    }
    /// Tokens that are not i32 become -1, which no model has.
    fn decode(self, b: &[u8]) -> i32 {
        let wide = |x: i64| i32::try_from(x).unwrap_or(-1);
        match self {
            Width::U8 => i32::from(b[0]),
            Width::U16 => i32::from(u16::from_le_bytes([b[0], b[1]])),
            Width::U32 => wide(i64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            Width::I32 => i32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Width::I64 => wide(i64::from_le_bytes(b.try_into().expect("8 bytes"))),
        }
    }
}

/// An open file of tokens.
pub struct TokenFile {
    path: PathBuf,
    file: File,
    /// Where the first token is.
    start: u64,
    width: Width,
    /// Number of tokens.
    pub count: u64,
    /// Of how the file begins and ends.
    pub hash: String,
}

impl TokenFile {
    /// Opens `FILE.npy`; `FILE.bin` of Megatron, with `FILE.idx` beside it; of llm.c, by its header; or
    /// of tokens of 2 bytes and nothing else (nanoGPT).
    ///
    /// # Errors
    /// `data` for a file that is none of these, or whose header and size disagree.
    pub fn open(path: &Path) -> Result<TokenFile> {
        let index = path.with_extension("idx");
        let (mut file, size) = files::open(path)?;
        let (start, width, stated) = if path.extension().is_some_and(|e| e == "npy") {
            row(path, &mut file)?
        } else if index.exists() {
            megatron(&index, size)?
        } else {
            plain(&mut file, size).map_err(|e| unreadable(path, &e))?
        };
        let room = size.saturating_sub(start) / width.bytes();
        let count = stated.unwrap_or(room);
        if count != room || size < start || (size - start) % width.bytes() != 0 {
            let each = width.bytes();
            let what = match stated {
                Some(_) => format!(
                    "it has {size} B, and its header declares {count} tokens of {each} B from byte {start} on"
                ),
                None => format!(
                    "it has {size} B, which is not a multiple of {each}: without a header it is tokens of {each} B"
                ),
            };
            return Err(wrong(path, what));
        }
        if count == 0 {
            return Err(wrong(path, "it holds no tokens".into()));
        }
        let hash = short(&ends(&file).map_err(|e| unreadable(path, &e))?);
        Ok(TokenFile { path: path.into(), file, start, width, count, hash })
    }

    /// `n` tokens from `first` on; behind the last comes the first again.
    ///
    /// # Errors
    /// `data` if the file cannot be read.
    pub fn read(&self, first: u64, n: usize) -> Result<Vec<i32>> {
        let mut out = Vec::with_capacity(n);
        let mut at = first % self.count;
        while out.len() < n {
            let now = (n - out.len()).min(usize::try_from(self.count - at).unwrap_or(usize::MAX));
            let size = self.width.bytes() as usize;
            let mut bytes = vec![0; now * size];
            self.file
                .read_exact_at(&mut bytes, self.start + at * self.width.bytes())
                .map_err(|e| unreadable(&self.path, &e))?;
            out.extend(bytes.chunks_exact(size).map(|b| self.width.decode(b)));
            at = 0;
        }
        Ok(out)
    }
}

fn unreadable(path: &Path, e: &std::io::Error) -> Diag {
    files::io_error("cannot read the tokens", path, e)
}

fn wrong(path: &Path, what: String) -> Diag {
    Diag::new("data", what)
        .at(path.display().to_string())
        .rule("tokens are in .npy, Megatron's .bin and .idx, llm.c's .bin, or 2 bytes each")
        .help("write the file again; docs/data.md describes each format")
}

/// Where tokens begin, how they are stored, and how many there are, if the header says so.
type Header = (u64, Width, Option<u64>);

/// llm.c's form, or tokens of 2 bytes.
fn plain(file: &mut File, size: u64) -> std::io::Result<Header> {
    if size < LLMC_HEADER {
        return Ok((0, Width::U16, None));
    }
    let mut head = [0; 12];
    file.read_exact(&mut head)?;
    let word = |i: usize| i32::from_le_bytes(head[i..i + 4].try_into().expect("4 bytes"));
    Ok(match LLMC.iter().find(|x| x.0 == word(0)) {
        Some((_, width)) => (LLMC_HEADER, *width, Some(u64::try_from(word(8)).unwrap_or(u64::MAX))),
        None => (0, Width::U16, None),
    })
}

/// Megatron's index: its element type, and that it speaks of as many tokens as there are.
fn megatron(index: &Path, size: u64) -> Result<Header> {
    let mut head = [0; 34];
    let (mut file, there) = files::open(index)?;
    let short = |e: std::io::Error| wrong(index, format!("its header ends early: {e}"));
    file.read_exact(&mut head).map_err(short)?;
    let word = |i: usize| u64::from_le_bytes(head[i..i + 8].try_into().expect("8 bytes"));
    if head[..9] != MEGATRON[..] || word(9) != 1 {
        return Err(wrong(index, "it is not an index of Megatron's, version 1".into()));
    }
    let width = match head[17] {
        1 => Width::U8,
        4 => Width::I32,
        5 => Width::I64,
        8 => Width::U16,
        other => return Err(wrong(index, format!("element type {other} is not a type of tokens"))),
    };
    // Lengths of sequences in tokens, 4 bytes each; then 8 bytes per sequence and document.
    let (sequences, documents) = (word(18), word(26));
    let needs = sequences
        .checked_mul(12)
        .and_then(|n| documents.checked_mul(8)?.checked_add(n)?.checked_add(34));
    if needs != Some(there) {
        let what = format!("{sequences} sequences, {documents} documents do not fill {there} B");
        return Err(wrong(index, what));
    }
    let (mut total, mut left) = (0u64, sequences);
    let mut buffer = vec![0; 1 << 16];
    while left > 0 {
        let now = left.min(buffer.len() as u64 / 4) as usize * 4;
        file.read_exact(&mut buffer[..now]).map_err(short)?;
        let lens = buffer[..now].chunks_exact(4);
        let sum = |t: u64, b: &[u8]| {
            let n = i32::from_le_bytes(b.try_into().expect("4 bytes"));
            t.checked_add(u64::try_from(n).ok()?)
        };
        total = lens.clone().try_fold(total, sum).ok_or_else(|| {
            wrong(index, "a sequence has a length below 0, or all are too long".into())
        })?;
        left -= now as u64 / 4;
    }
    if total.checked_mul(width.bytes()) != Some(size) {
        let what = format!("it declares {total} tokens, the .bin file has {size} B");
        return Err(wrong(index, what));
    }
    Ok((0, width, Some(total)))
}

/// The header of an .npy file: one row of whole numbers.
fn row(path: &Path, file: &mut File) -> Result<Header> {
    let h = npy::header(file, |what| wrong(path, what))?;
    let width = match &*h.descr {
        "|u1" => Some(Width::U8),
        "<u2" => Some(Width::U16),
        "<u4" => Some(Width::U32),
        "<i4" => Some(Width::I32),
        "<i8" => Some(Width::I64),
        _other => None,
    };
    match (width, h.shape.as_deref()) {
        (Some(width), Some(&[n])) => Ok((h.start, width, Some(n))),
        _ => Err(wrong(path, format!("it is not a row of u1, u2, u4, i4 or i8: {}", h.text))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of 300 tokens, `7 i mod 251`, written by NumPy and by Megatron's own builder
    /// (`tests/fixtures/README.md`).
    fn given(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/data").join(name)
    }
    fn token(i: usize) -> i32 {
        (i % 300 * 7 % 251) as i32
    }
    fn write(name: &str, bytes: &[u8]) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("shardc-tokens-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn every_form_gives_its_tokens() {
        let two: Vec<u8> = (0..300).flat_map(|i| (token(i) as u16).to_le_bytes()).collect();
        let four: Vec<u8> = (0..300).flat_map(|i| token(i).to_le_bytes()).collect();
        let llmc = |magic: i32, body: &[u8]| {
            let mut head = vec![0; 1024];
            for (i, x) in [magic, 1, 300].iter().enumerate() {
                head[i * 4..i * 4 + 4].copy_from_slice(&x.to_le_bytes());
            }
            [&head, body].concat()
        };
        for path in [
            given("row.npy"),
            given("wide.npy"),
            given("mega.bin"),
            write("nano.bin", &two),
            write("gpt2.bin", &llmc(20_240_520, &two)),
            write("llama3.bin", &llmc(20_240_801, &four)),
        ] {
            let f = TokenFile::open(&path).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(f.count, 300, "{}", path.display());
            for (first, n) in [(0, 5), (123, 64), (298, 7), (299, 700)] {
                let want: Vec<i32> = (first..first + n).map(token).collect();
                assert_eq!(f.read(first as u64, n).unwrap(), want, "{}", path.display());
            }
        }
    }

    #[test]
    fn files_that_lie_are_refused() {
        let says = |path: &Path, word: &str| {
            let text = TokenFile::open(path).err().expect("an error").render();
            assert!(text.contains(word), "no `{word}` in {text}");
        };
        says(&given("square.npy"), "not a row of");
        says(&given("none.npy"), "No such file");
        says(&write("odd.bin", &[1, 2, 3]), "3 B");
        says(&write("empty.bin", &[]), "no tokens");
        let npy = std::fs::read(given("row.npy")).unwrap();
        says(&write("short.npy", &npy[..npy.len() - 2]), "300 tokens");
        says(&write("head.npy", &npy[..40]), "ends early");
        says(&write("magic.npy", &[b"x", &npy[1..]].concat()), "not a .npy file");
        let mut long = npy.clone();
        long[6] = 2;
        long[8..12].copy_from_slice(&[255; 4]);
        says(&write("long.npy", &long), "more than");
        // An index with one number changed.
        let (bin, idx) = ("mega.bin", std::fs::read(given("mega.idx")).unwrap());
        let data = std::fs::read(given(bin)).unwrap();
        for (at, value, word) in [
            (0, 0, "not an index"),
            (17, 7, "element type 7"),
            (18, 5, "do not fill"),
            (25, 255, "do not fill"),
            (34, 49, "declares 299 tokens"),
            (37, 255, "below 0"),
        ] {
            let mut bad = idx.clone();
            bad[at] = value;
            let path = write(&format!("lie-{at}.bin"), &data);
            write(&format!("lie-{at}.idx"), &bad);
            says(&path, word);
        }
    }
}
