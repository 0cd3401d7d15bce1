//! Reads a slice of a parameter, and no more of the file than it needs.
//!
//! Files are read at positions into one buffer of at most [`BUFFER`] bytes rather than mapped: a
//! mapping counts as memory of the process, and a file that shrinks under it kills the process.

use super::{Checkpoint, Entry};
use crate::stored::decode;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_ir::tensor::{each_index, strides};
use shardc_ir::types::DType;
use shardc_ir::weights::{TensorSlice, Weight};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

/// Most bytes read at once.
const BUFFER: usize = 1 << 20;
/// Pieces this near to each other are read together.
const GAP: usize = 1 << 16;

impl Checkpoint {
    /// Reads a slice of a parameter as f32, row-major: one range per dim of the *parameter*. Equal
    /// files give equal numbers; BF16 and F16 become f32 exactly.
    ///
    /// Errors: those of [`Checkpoint::check`]; `slice` if the ranges or `out` do not fit the
    /// parameter; `file` if the file has changed.
    pub fn read(&self, weight: &Weight, ranges: &[Range<usize>], out: &mut [f32]) -> Result<()> {
        let here = |d: Diag| d.at(self.place());
        let ranges = check_slice(weight, ranges, out.len()).map_err(here)?;
        let Some(experts) = weight.experts.filter(|_| weight.is_stacked()) else {
            let tensor = in_tensor(weight, ranges).map_err(here)?;
            return match weight.part.filter(|p| p.step > 1 && !out.is_empty()) {
                None => self.read_tensor(weight, &weight.tensor, &tensor, out),
                Some(p) => self.read_apart(weight, p, &tensor, ranges[p.dim].len(), out),
            };
        };
        let [of, inner @ ..] = ranges else { return Err(here(no_part(weight))) };
        if weight.shape[1..] != weight.tensor_shape || weight.shape[0] != experts || out.is_empty()
        {
            return if out.is_empty() { Ok(()) } else { Err(here(no_part(weight))) };
        }
        let one = out.len() / of.len();
        let names = weight.tensors().skip(of.start);
        names.zip(out.chunks_mut(one)).try_for_each(|(t, o)| self.read_tensor(weight, &t, inner, o))
    }

    /// Reads `n` elements of a dim that are not neighbours, out of ranges that have them and what
    /// is between, one index of the first dim at a time.
    fn read_apart(
        &self,
        weight: &Weight,
        p: TensorSlice,
        ranges: &[Range<usize>],
        n: usize,
        out: &mut [f32],
    ) -> Result<()> {
        let rows = if p.dim == 0 { 1 } else { ranges[0].len() };
        let (one, all) = (out.len() / rows, ranges[p.dim].len());
        let inner: usize = ranges[p.dim + 1..].iter().map(Range::len).product();
        let mut read = vec![0.0; one / n * all];
        for (i, out) in out.chunks_mut(one).enumerate() {
            let mut now = ranges.to_vec();
            if p.dim > 0 {
                now[0] = ranges[0].start + i..ranges[0].start + i + 1;
            }
            self.read_tensor(weight, &weight.tensor, &now, &mut read)?;
            for (out, read) in out.chunks_mut(n * inner).zip(read.chunks(all * inner)) {
                let each = out.chunks_mut(inner).zip(read.chunks(p.step * inner));
                each.for_each(|(to, from)| to.copy_from_slice(&from[..inner]));
            }
        }
        Ok(())
    }

    /// Reads a slice of a tensor by its name, as f32, row-major: one range per dim.
    ///
    /// Errors: `missing-tensor`; `slice` if the ranges or `out` do not fit it; `file`, `truncated`.
    pub fn read_ranges(
        &self,
        tensor: &str,
        ranges: &[Range<usize>],
        out: &mut [f32],
    ) -> Result<()> {
        let Some(entry) = self.get(tensor) else {
            return Err(Diag::new("missing-tensor", format!("no tensor is called `{tensor}`"))
                .at(self.place())
                .help("check its name: 1 of those in the index"));
        };
        let inside = |(r, &n): (&Range<usize>, &usize)| r.start <= r.end && r.end <= n;
        let fits = ranges.len() == entry.shape.len() && ranges.iter().zip(&entry.shape).all(inside);
        if !fits || ranges.iter().map(Range::len).product::<usize>() != out.len() {
            let what = format!("{ranges:?} is not a slice of `{tensor}` {:?}", entry.shape);
            return Err(Diag::new("slice", what)
                .at(format!("{}: {tensor}", self.file(entry).display()))
                .help(format!("give {} ranges", entry.shape.len())));
        }
        self.read_entry(tensor, entry, ranges, out)
    }

    /// Reads a slice of a tensor of the checkpoint: one range per dim of the *tensor*.
    fn read_tensor(
        &self,
        weight: &Weight,
        tensor: &str,
        ranges: &[Range<usize>],
        out: &mut [f32],
    ) -> Result<()> {
        self.read_entry(tensor, self.entry(weight, tensor)?, ranges, out)
    }

    fn read_entry(
        &self,
        tensor: &str,
        entry: &Entry,
        ranges: &[Range<usize>],
        out: &mut [f32],
    ) -> Result<()> {
        if let Some(scales) = &entry.scales {
            return self.read_blocks(tensor, (entry, scales), ranges, out);
        }
        let path = self.file(entry);
        let fail = |e: std::io::Error| files::io_error("cannot read the tensor", path, &e);
        let mut window = FileWindow::open(tensor, path, entry.bytes.end)?;
        read_pieces(&mut window, entry, ranges, out).map_err(fail)
    }
}

/// Checks a slice of a parameter: one range per dim, inside it, `len` elements in all.
pub(super) fn check_slice<'a>(
    w: &Weight,
    ranges: &'a [Range<usize>],
    len: usize,
) -> Result<&'a [Range<usize>]> {
    let inside = |(r, &n): (&Range<usize>, &usize)| r.start <= r.end && r.end <= n;
    let fits = ranges.len() == w.shape.len() && ranges.iter().zip(&w.shape).all(inside);
    let elements = || ranges.iter().try_fold(1usize, |n, r| n.checked_mul(r.len()));
    // So that no stride of the parameter overflows.
    let small = w.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1))).is_some();
    if small && fits && elements() == Some(len) {
        return Ok(ranges);
    }
    let what = format!("{ranges:?}, {len} elements, is not a slice of `{}` {:?}", w.param, w.shape);
    Err(Diag::new("slice", what).help(format!("use one range in each of {:?}", w.shape)))
}

/// The slice in coordinates of the checkpoint's tensor.
fn in_tensor(w: &Weight, ranges: &[Range<usize>]) -> Result<Vec<Range<usize>>> {
    let mut out = ranges.to_vec();
    let mut shape = w.tensor_shape.clone();
    if let Some(p) = &w.part {
        let all = p.place(&(0..p.len)).map(|at| at.end);
        let own = out.get_mut(p.dim).and_then(|r| Some((p.place(r)?, r)));
        let (Some(size), Some(all), Some((at, r))) = (shape.get_mut(p.dim), all, own) else {
            return Err(no_part(w));
        };
        if all > *size {
            return Err(no_part(w));
        }
        (*size, *r) = (p.len, at);
    }
    if shape == w.shape { Ok(out) } else { Err(no_part(w)) }
}

fn no_part(w: &Weight) -> Diag {
    let what = format!("parameter `{}` {:?} is not part of {:?}", w.param, w.shape, w.tensor_shape);
    Diag::new("slice", what).help(format!("its part is {:?}", w.part))
}

fn read_pieces(
    window: &mut FileWindow,
    entry: &Entry,
    ranges: &[Range<usize>],
    out: &mut [f32],
) -> std::io::Result<()> {
    if out.is_empty() {
        return Ok(());
    }
    let dtype = entry.readable().unwrap_or(DType::F32);
    let element = dtype.bytes();
    // Dims from `whole` on are read whole, so a piece of dim `whole - 1` is contiguous.
    let full = |d: usize| ranges[d].len() == entry.shape[d];
    let whole = (0..ranges.len()).rev().find(|&d| !full(d)).map_or(0, |d| d + 1);
    let outer = whole.saturating_sub(1);
    let strides = strides(&entry.shape);
    let piece: usize = ranges[outer..].iter().map(Range::len).product();
    let lens: Vec<usize> = ranges[..outer].iter().map(Range::len).collect();
    let starts: usize = ranges.iter().zip(&strides).map(|(r, s)| r.start * s).sum();
    // Nearness of neighbours decides whether the bytes between them are worth reading.
    let step = outer.checked_sub(1).map_or(0, |d| strides[d]);
    let near = (step.saturating_sub(piece)).saturating_mul(element) <= GAP;
    let last: usize =
        starts + lens.iter().zip(&strides).map(|(n, s)| (n - 1) * s).sum::<usize>() + piece;
    let end = entry.bytes.start + (last * element) as u64;
    let mut result = Ok(());
    let mut rest = out;
    each_index(&lens, |i| {
        let first = starts + i.iter().zip(&strides).map(|(i, s)| i * s).sum::<usize>();
        let (now, later) = std::mem::take(&mut rest).split_at_mut(piece);
        rest = later;
        let mut at = entry.bytes.start + (first * element) as u64;
        for chunk in now.chunks_mut(BUFFER / element) {
            let need = chunk.len() * element;
            let ahead = if near { (end - at).min(BUFFER as u64) as usize } else { need };
            if result.is_ok() {
                result = window.get(at, need, ahead).map(|b| decode(dtype, b, chunk));
            }
            at += need as u64;
        }
    });
    result
}

/// The bytes of a file that were read last.
pub(super) struct FileWindow {
    file: File,
    at: u64,
    bytes: Vec<u8>,
}

impl FileWindow {
    /// Of the file that a tensor lies in, up to this byte.
    pub(super) fn open(tensor: &str, path: &Path, end: u64) -> Result<FileWindow> {
        let (file, len) = files::open(path)?;
        if len < end {
            return Err(Diag::new("truncated", format!("the file has shrunk to {len} bytes"))
                .at(path.display().to_string())
                .help(format!("`{tensor}` ends at byte {end}")));
        }
        Ok(FileWindow { file, at: 0, bytes: vec![] })
    }

    /// `need` bytes from `at`; reads `ahead` bytes if they are not there.
    pub(super) fn get(&mut self, at: u64, need: usize, ahead: usize) -> std::io::Result<&[u8]> {
        let there = at >= self.at && at + need as u64 <= self.at + self.bytes.len() as u64;
        if !there {
            self.bytes.resize(ahead.max(need), 0);
            self.at = at;
            self.file.seek(SeekFrom::Start(at))?;
            self.file.read_exact(&mut self.bytes)?;
        }
        let from = (at - self.at) as usize;
        Ok(&self.bytes[from..from + need])
    }
}
