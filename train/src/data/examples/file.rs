//! Files of examples: one in each line, or the elements of one array. They are read once from the beginning to the end,
//! and then from where each example is.

use ruzstd::decoding::StreamingDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use shardc_ir::diag::{Diag, Result, bytes};
use shardc_ir::files::{self, make};
use shardc_process::shell::word;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Longest example, in bytes.
const LONGEST: usize = 64 << 20;
/// What some editors write before a text, and is no part of it.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Where an example is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spot {
    /// Its first byte, of all files one behind the other.
    pub at: u64,
    pub bytes: u32,
}

/// An open file.
struct One {
    path: PathBuf,
    file: File,
    /// Bytes of the files before it.
    before: u64,
    size: u64,
    /// Its examples are the elements of an array.
    array: bool,
}

/// Files of examples, in their order.
pub struct Files {
    all: Vec<One>,
}

/// Reads, and hashes what it reads.
struct Hashed<'a> {
    file: &'a File,
    at: u64,
    hash: &'a mut blake3::Hasher,
}

impl Read for Hashed<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(to, self.at)?;
        self.at += n as u64;
        self.hash.update(&to[..n]);
        Ok(n)
    }
}

impl Files {
    /// Opens files, in the order in which they are given.
    ///
    /// # Errors
    /// `file`, `io`; `data` for what is empty, or not UTF-8 by how it begins.
    pub fn open(paths: &[PathBuf]) -> Result<Files> {
        let (mut all, mut before) = (vec![], 0);
        for path in paths {
            let (mut file, mut size) = files::open(path)?;
            let name = path.to_string_lossy().to_lowercase();
            let name = match name.strip_suffix(".zst") {
                None => name,
                Some(name) => {
                    (file, size) = unpacked(path, file)?;
                    name.into()
                }
            };
            let mut head = [0; 2];
            let n = file.read_at(&mut head, 0).map_err(|e| unreadable(path, &e))?;
            let wrong = |what: &str| Diag::new("data", what).at(path.display().to_string());
            if n == 2 && matches!(head, [0xff, 0xfe] | [0xfe, 0xff]) {
                return Err(wrong("it is UTF-16").rule("text is UTF-8").help(format!(
                    "write it again: iconv -f utf-16 -t utf-8 {} > new.jsonl",
                    word(path)
                )));
            }
            if size == 0 {
                let what = format!("{} is empty", path.display());
                return Err(wrong(&what).help("give a file with an example in each line"));
            }
            let array = name.ends_with(".json");
            all.push(One { path: path.clone(), file, before, size, array });
            before += size;
        }
        Ok(Files { all })
    }

    /// What they are called: the first, and how many.
    pub fn name(&self) -> String {
        match &self.all[..] {
            [one] => one.path.display().to_string(),
            all => format!("{} files", all.len()),
        }
    }

    /// Gives all examples to `work`, with where they are and `FILE:LINE`; the hash of all bytes.
    ///
    /// # Errors
    /// `data` for what is too long or no array, `io`, and those of `work`.
    pub fn each(&self, mut work: impl FnMut(Spot, &str, Vec<u8>) -> Result<()>) -> Result<String> {
        let mut hash = blake3::Hasher::new();
        for one in &self.all {
            hash.update(&one.size.to_le_bytes());
            let source = Hashed { file: &one.file, at: 0, hash: &mut hash };
            let mut reader = BufReader::with_capacity(1 << 18, source);
            let mut at = 0u64;
            let fail = |e: io::Error| unreadable(&one.path, &e);
            if reader.fill_buf().map_err(fail)?.starts_with(BYTE_ORDER_MARK) {
                reader.consume(BYTE_ORDER_MARK.len());
                at += BYTE_ORDER_MARK.len() as u64;
            }
            let mut walk = Walk { one, reader, at, line: 1 };
            match one.array {
                true => walk.elements(&mut work)?,
                false => walk.lines(&mut work)?,
            }
        }
        Ok(hash.finalize().to_hex().to_string())
    }

    /// The bytes of an example.
    ///
    /// # Errors
    /// `io`; `data` if the file has become shorter.
    pub fn read(&self, spot: Spot) -> Result<Vec<u8>> {
        let after = self.all.partition_point(|f| f.before <= spot.at);
        let one = &self.all[after.saturating_sub(1)];
        let mut out = vec![0; spot.bytes as usize];
        let done = one.file.read_exact_at(&mut out, spot.at - one.before);
        done.map_err(|e| unreadable(&one.path, &e))?;
        Ok(out)
    }

    /// A file that is not as it was when the run began.
    pub fn changed(&self, spot: Spot) -> Diag {
        let after = self.all.partition_point(|f| f.before <= spot.at);
        let one = &self.all[after.saturating_sub(1)];
        Diag::new("data", "the file has changed since the run began")
            .at(format!("{}: byte {}", one.path.display(), spot.at - one.before))
            .help("leave the file as it is while a run reads it, and resume")
    }
}

/// What a file of zstd has, in one that nobody sees and that goes when it is closed: places in the packed one cannot be
/// read. Frames follow each other; those to be skipped are.
fn unpacked(path: &Path, packed: File) -> Result<(File, u64)> {
    let fail = |e: io::Error| files::io_error("cannot unpack the examples", path, &e);
    let broken = |e: &dyn std::fmt::Display| {
        Diag::new("data", format!("it is no zstd: {e}"))
            .at(path.display().to_string())
            .help("pack it again: zstd FILE.jsonl")
    };
    let (folder, name) = (std::env::temp_dir(), make::beside("examples"));
    let folder = std::fs::canonicalize(&folder).map_err(fail)?;
    let folder = make::Folder::open(&folder).map_err(fail)?;
    let to = folder.private_file(&name).map_err(fail)?;
    let from = folder.read(&name);
    folder.remove(&name);
    let (from, mut to) = (from.map_err(fail)?, BufWriter::with_capacity(1 << 18, to));
    let mut packed = BufReader::with_capacity(1 << 18, packed);
    while !packed.fill_buf().map_err(fail)?.is_empty() {
        let mut frame = match StreamingDecoder::new(&mut packed) {
            Ok(frame) => frame,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                let mut skipped = (&mut packed).take(length.into());
                io::copy(&mut skipped, &mut io::sink()).map_err(fail)?;
                continue;
            }
            Err(e) => return Err(broken(&e)),
        };
        io::copy(&mut frame, &mut to).map_err(|e| match e.kind() {
            io::ErrorKind::StorageFull => fail(e),
            _other => broken(&e),
        })?;
        let said = frame.decoder.get_checksum_from_data();
        if said.is_some() && said != frame.decoder.get_calculated_checksum() {
            return Err(broken(&"its checksum differs"));
        }
    }
    to.flush().map_err(fail)?;
    let size = from.metadata().map_err(fail)?.len();
    Ok((from, size))
}

fn unreadable(path: &Path, e: &io::Error) -> Diag {
    files::io_error("cannot read the examples", path, e)
}

/// A file on the way to its end.
struct Walk<'a, R> {
    one: &'a One,
    reader: R,
    /// The byte that is read next, in this file.
    at: u64,
    line: u64,
}

/// What is done with an example.
type Work<'w> = dyn FnMut(Spot, &str, Vec<u8>) -> Result<()> + 'w;

impl<R: BufRead> Walk<'_, R> {
    fn place(&self, line: u64) -> String {
        format!("{}:{line}", self.one.path.display())
    }

    /// That of the element of an array with this number, where others begin in its line.
    fn place_of(&self, line: u64, number: usize, others: bool) -> String {
        let place = self.place(line);
        if others { format!("{place}, example {number}") } else { place }
    }

    fn wrong(&self, line: u64, what: impl Into<String>) -> Diag {
        Diag::new("data", what).at(self.place(line))
    }

    fn too_long(&self, line: u64) -> Diag {
        self.wrong(line, format!("the example is longer than {}", bytes(LONGEST)))
            .help("an example is one chat or document: split it")
    }

    /// Gives an example of these bytes that begin at `at`, without the space around them.
    fn give(&self, at: u64, place: &str, bytes: &[u8], work: &mut Work) -> Result<()> {
        let own = bytes.trim_ascii_start();
        // Files that are one behind the other have marks within.
        let own = own.strip_prefix(BYTE_ORDER_MARK).unwrap_or(own).trim_ascii_start();
        let (begin, bytes) = (bytes.len() - own.len(), own.trim_ascii_end());
        let spot = Spot { at: self.one.before + at + begin as u64, bytes: bytes.len() as u32 };
        work(spot, place, bytes.to_vec())
    }

    fn lines(&mut self, work: &mut Work) -> Result<()> {
        loop {
            let mut bytes = vec![];
            let most = LONGEST as u64 + 1;
            let n = (&mut self.reader).take(most).read_until(b'\n', &mut bytes);
            let n = n.map_err(|e| unreadable(&self.one.path, &e))?;
            if n == 0 {
                return Ok(());
            }
            if n > LONGEST {
                return Err(self.too_long(self.line));
            }
            if !bytes.trim_ascii().is_empty() {
                self.give(self.at, &self.place(self.line), &bytes, work)?;
            }
            self.at += n as u64;
            self.line += 1;
        }
    }

    /// The next byte, of which the place is counted.
    fn byte(&mut self) -> Result<Option<u8>> {
        let fail = |e: io::Error| unreadable(&self.one.path, &e);
        let Some(&b) = self.reader.fill_buf().map_err(fail)?.first() else { return Ok(None) };
        self.reader.consume(1);
        self.at += 1;
        self.line += u64::from(b == b'\n');
        Ok(Some(b))
    }

    /// The elements of an array; what they are is not looked at.
    fn elements(&mut self, work: &mut Work) -> Result<()> {
        loop {
            match self.byte()? {
                Some(b) if b.is_ascii_whitespace() => {}
                Some(b'[') => break,
                _other => {
                    let what = "a .json file is one array of examples, and this is none";
                    return Err(self.wrong(self.line, what).help(
                        "if each of its lines is an example, call it .jsonl; else write [example, example]",
                    ));
                }
            }
        }
        let (mut all, mut from, mut line) = (vec![], self.at, self.line);
        let (mut depth, mut text, mut escaped, mut any) = (0usize, false, false, false);
        // How many there are so far, and the line in which the last one begins.
        let (mut number, mut before) = (0, 0);
        loop {
            let Some(b) = self.byte()? else {
                return Err(self
                    .wrong(self.line, "not JSON: the file ends within its array")
                    .help("write the rest of it: the last character is ]"));
            };
            let ends = !text && depth == 0 && matches!(b, b',' | b']');
            if ends {
                let empty = all.trim_ascii().is_empty();
                if empty && (b == b',' || any) {
                    let what = format!("not JSON: nothing before `{}`", b as char);
                    return Err(self.wrong(self.line, what).help("take the comma out"));
                }
                if !empty {
                    number += 1;
                    let place = self.place_of(line, number, before == line);
                    self.give(from, &place, &all, work)?;
                    before = line;
                }
                any = true;
                all.clear();
                from = self.at;
                if b == b']' {
                    break;
                }
                continue;
            }
            if all.is_empty() && b.is_ascii_whitespace() {
                from = self.at;
                continue;
            }
            if all.is_empty() {
                (from, line) = (self.at - 1, self.line);
            }
            match b {
                _ if text && escaped => escaped = false,
                b'\\' if text => escaped = true,
                b'"' => text = !text,
                b'[' | b'{' if !text => depth += 1,
                b']' | b'}' if !text => depth = depth.saturating_sub(1),
                _other => {}
            }
            all.push(b);
            if all.len() > LONGEST {
                return Err(self.too_long(line));
            }
        }
        while let Some(b) = self.byte()? {
            if !b.is_ascii_whitespace() {
                let what = "not JSON: something follows the array";
                return Err(self.wrong(self.line, what).help("a .json file is one array"));
            }
        }
        Ok(())
    }
}
