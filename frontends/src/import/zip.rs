//! The directory of a zip file whose members are stored as they are: which bytes are whose.
//!
//! Layout: PKWARE's APPNOTE 6.3, sections 4.3.7 (local header), 4.3.12 (directory), 4.3.14 to 4.3.16
//! (its end, and that of files over 4 GiB). Nothing is believed: every range is checked.

use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Take};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Largest directory that is read, in bytes.
const MAX_DIRECTORY: u64 = 64 << 20;
/// The end of the directory, and the longest comment behind it.
const END: usize = 22;
const MAX_COMMENT: u64 = 0xffff;
const LOCAL: u64 = 30;

/// The members of a zip file, by name.
pub(super) struct Zip {
    pub path: PathBuf,
    pub members: BTreeMap<String, Range<u64>>,
}

/// A diagnostic about an archive.
pub(super) fn broken(path: &Path, what: impl Into<String>) -> Diag {
    Diag::new("archive", what)
        .at(path.display().to_string())
        .rule("an archive is what torch.export.save writes: a zip file of stored members")
        .help("write it again; `shardc import --help` shows how")
}

impl Zip {
    /// Reads the directory.
    ///
    /// # Errors
    /// `file`; `archive` for what is not a zip file, is cut off, or has members that are compressed,
    /// doubled, overlap or lie outside the file.
    pub fn open(path: &Path) -> Result<Zip> {
        let (mut file, len) = files::open(path)?;
        let bad = |what: &str| broken(path, what);
        let (start, size, count) = find(&mut file, path, len)?;
        let end = start.checked_add(size).filter(|&e| e <= len && size <= MAX_DIRECTORY);
        let end = end.ok_or_else(|| bad("its directory lies outside the file"))?;
        let directory = bytes(&mut file, path, start..end)?;
        let mut members = BTreeMap::new();
        let mut rest = &directory[..];
        for _ in 0..count {
            let (name, entry, after) = entry(rest).map_err(bad)?;
            rest = after;
            if entry.len == 0 && name.ends_with('/') {
                continue;
            }
            let header = entry.at.checked_add(LOCAL).filter(|&e| e <= start);
            let header = header.ok_or_else(|| bad("a member begins outside the file"))?;
            let local = bytes(&mut file, path, entry.at..header)?;
            if u32_at(&local, 0) != Some(0x0403_4b50) {
                return Err(bad("a member does not begin where the directory says"));
            }
            let more = |at| u64::from(u16_at(&local, at).unwrap_or(0));
            let from = header + more(26) + more(28);
            let to = from.checked_add(entry.len).filter(|&e| e <= start);
            let to = to.ok_or_else(|| bad("a member ends outside the file"))?;
            if members.insert(name.clone(), from..to).is_some() {
                return Err(broken(path, format!("two members are called `{name}`")));
            }
        }
        let mut ranges: Vec<&Range<u64>> = members.values().filter(|r| !r.is_empty()).collect();
        ranges.sort_by_key(|r| r.start);
        if ranges.windows(2).any(|w| w[0].end > w[1].start) {
            return Err(bad("two members share bytes"));
        }
        Ok(Zip { path: path.into(), members })
    }

    /// A reader of one member, which it names in messages.
    ///
    /// # Errors
    /// `file`; `archive` if there is none, or it is larger than `most` bytes.
    pub fn reader(&self, name: &str, most: u64) -> Result<Take<File>> {
        let range = self.members.get(name);
        let range =
            range.ok_or_else(|| broken(&self.path, format!("it has no member `{name}`")))?;
        let len = range.end - range.start;
        if len > most {
            let what = format!("`{name}` has {len} bytes, more than {most}");
            return Err(broken(&self.path, what));
        }
        let (mut file, _) = files::open(&self.path)?;
        let sought = file.seek(SeekFrom::Start(range.start));
        sought.map_err(|e| files::io_error("cannot read the archive", &self.path, &e))?;
        Ok(file.take(len))
    }

    /// All bytes of a member; the errors are those of [`Zip::reader`].
    pub fn read(&self, name: &str, most: u64) -> Result<Vec<u8>> {
        let mut out = vec![];
        let read = self.reader(name, most)?.read_to_end(&mut out);
        read.map_err(|e| files::io_error("cannot read the archive", &self.path, &e))?;
        Ok(out)
    }
}

/// Where the directory begins, its bytes, and its entries.
fn find(file: &mut File, path: &Path, len: u64) -> Result<(u64, u64, u64)> {
    let bad = |what: &str| broken(path, what);
    let tail_at = len.saturating_sub(END as u64 + MAX_COMMENT);
    let tail = bytes(file, path, tail_at..len)?;
    let last = tail.len().checked_sub(END);
    let found = last.and_then(|l| (0..=l).rev().find(|&i| tail[i..].starts_with(b"PK\x05\x06")));
    let at = found.ok_or_else(|| bad("it is not a zip file, or is cut off"))?;
    let field = |i| u32_at(&tail, at + i).map_or(0, u64::from);
    let count = u64::from(u16_at(&tail, at + 10).unwrap_or(0));
    let (size, start) = (field(12), field(16));
    if count != 0xffff && size != 0xffff_ffff && start != 0xffff_ffff {
        return Ok((start, size, count));
    }
    // Its numbers are too large for this place: 20 bytes before is where the others are.
    let locator = at.checked_sub(20).filter(|&i| tail[i..].starts_with(b"PK\x06\x07"));
    let locator = locator.ok_or_else(|| bad("the end of its directory is cut off"))?;
    let at = u64_at(&tail, locator + 8).unwrap_or(u64::MAX);
    let end = at.checked_add(56).filter(|&e| e <= len);
    let end = end.ok_or_else(|| bad("the end of its directory lies outside the file"))?;
    let large = bytes(file, path, at..end)?;
    if !large.starts_with(b"PK\x06\x06") {
        return Err(bad("the end of its directory is not where it should be"));
    }
    let field = |i| u64_at(&large, i).unwrap_or(u64::MAX);
    Ok((field(48), field(40), field(32)))
}

struct ZipEntry {
    /// Of its local header.
    at: u64,
    len: u64,
}

/// Name and place of the first entry of a directory, and what follows it.
fn entry(d: &[u8]) -> std::result::Result<(String, ZipEntry, &[u8]), &'static str> {
    const SHORT: &str = "its directory is cut off";
    if u32_at(d, 0) != Some(0x0201_4b50) {
        return Err(SHORT);
    }
    let short = |i| u16_at(d, i).map(usize::from).ok_or(SHORT);
    let (flags, method) = (short(8)?, short(10)?);
    if flags & 1 != 0 || method != 0 {
        return Err("a member is compressed or encrypted");
    }
    let long = |i| u32_at(d, i).map(u64::from).ok_or(SHORT);
    let (mut packed, mut len, mut at) = (long(20)?, long(24)?, long(42)?);
    let (name_len, extra_len, comment) = (short(28)?, short(30)?, short(32)?);
    let name = d.get(46..46 + name_len).ok_or(SHORT)?;
    let mut extra = d.get(46 + name_len..46 + name_len + extra_len).ok_or(SHORT)?;
    let rest = d.get(46 + name_len + extra_len + comment..).ok_or(SHORT)?;
    // Numbers that are too large for their place are in this order in the extra field 1.
    while let (Some(id), Some(n)) = (u16_at(extra, 0), u16_at(extra, 2)) {
        let mut body = extra.get(4..4 + usize::from(n)).ok_or(SHORT)?;
        for x in [&mut len, &mut packed, &mut at] {
            if id == 1 && *x == 0xffff_ffff {
                *x = u64_at(body, 0).ok_or(SHORT)?;
                body = &body[8..];
            }
        }
        extra = &extra[4 + usize::from(n)..];
    }
    if packed != len {
        return Err("a stored member has two lengths");
    }
    let name = std::str::from_utf8(name).map_err(|_| "the name of a member is not text")?;
    Ok((name.to_string(), ZipEntry { at, len }, rest))
}

fn bytes(file: &mut File, path: &Path, range: Range<u64>) -> Result<Vec<u8>> {
    let fail = |e: std::io::Error| files::io_error("cannot read the archive", path, &e);
    let mut out = vec![0; (range.end - range.start) as usize];
    file.seek(SeekFrom::Start(range.start)).map_err(fail)?;
    file.read_exact(&mut out).map_err(fail)?;
    Ok(out)
}

fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    b.get(at..at + 2)?.try_into().ok().map(u16::from_le_bytes)
}

fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    b.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(b: &[u8], at: usize) -> Option<u64> {
    b.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}
