//! Weights of experts in blocks of 32 numbers of 4 bits with a scale (Open Compute Project, 2023,
//! *OCP Microscaling Formats (MX)*, MXFP4), as published gpt-oss stores them: read as the tensor
//! that they are.
//!
//! Of a tensor `X [e, in, out]` the file has `X_blocks` u8 `[e, out, in/32, 16]` and `X_scales` u8
//! `[e, out, in/32]`. Of two numbers in a byte the lower half is the first: a sign, and which of
//! [`MAGNITUDES`]. A scale s is 2^(s-127).

use super::read::FileWindow;
use super::{Checkpoint, Entry};
use safetensors::Dtype;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use std::ops::Range;

/// Numbers of a block.
const BLOCK: usize = 32;
/// Bytes of a block.
const BYTES: usize = BLOCK / 2;
/// Magnitudes by the last three bits of a number.
const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// Blocks that are read ahead.
const MOST: usize = 1 << 16;
/// The scale that is no number.
const NAN: u8 = 255;

/// The scales of a tensor in blocks.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Scales {
    file: usize,
    /// Bytes of the file.
    bytes: Range<u64>,
}

impl Checkpoint {
    /// The same tensors, those in blocks by the names of what they are.
    ///
    /// # Errors
    /// `missing-tensor` for blocks without scales, `tensor-shape` if both do not fit.
    pub(super) fn with_blocks(mut self) -> Result<Checkpoint> {
        let is_packed = |e: &Entry| e.dtype == Dtype::U8;
        let packed = self.tensors.iter().filter(|(_, e)| is_packed(e));
        let names = packed.filter_map(|(n, _)| n.strip_suffix("_blocks").map(String::from));
        for name in names.collect::<Vec<_>>() {
            let [blocks, scales] = [format!("{name}_blocks"), format!("{name}_scales")];
            let Some(of) = self.get(&scales).filter(|e| is_packed(e)) else {
                return Err(self.missing(&scales));
            };
            let e = &self.tensors[&blocks];
            let (&[experts, out, n, BYTES], true) =
                (&e.shape[..], of.shape == e.shape[..e.shape.len() - 1])
            else {
                let what = format!(
                    "`{blocks}` is {:?} and `{scales}` {:?}: they are no blocks of {BLOCK} numbers",
                    e.shape, of.shape
                );
                return Err(Diag::new("tensor-shape", what)
                    .at(self.file(e).display().to_string())
                    .rule(format!(
                        "blocks are [e, out, in / {BLOCK}, {BYTES}], scales [e, out, in / {BLOCK}]"
                    ))
                    .help("download the file again"));
            };
            let entry = Entry {
                // What holds all of these numbers.
                dtype: Dtype::BF16,
                shape: vec![experts, n * BLOCK, out],
                scales: Some(Scales { file: of.file, bytes: of.bytes.clone() }),
                ..e.clone()
            };
            self.tensors.retain(|n, _| *n != blocks && *n != scales);
            self.tensors.insert(name, entry);
        }
        Ok(self)
    }

    /// Reads a slice of a tensor in blocks: one range per dim.
    ///
    /// # Errors
    /// `weights` for a scale that is no number; `file`, `truncated`.
    pub(super) fn read_blocks(
        &self,
        tensor: &str,
        (entry, scales): (&Entry, &Scales),
        ranges: &[Range<usize>],
        out: &mut [f32],
    ) -> Result<()> {
        let ([_, width, rows], [of_expert, of_in, of_out]) = (&entry.shape[..], ranges) else {
            return Err(self.missing(tensor));
        };
        let mut codes = FileWindow::open(tensor, &self.files[entry.file], entry.bytes.end)?;
        let mut powers = FileWindow::open(tensor, &self.files[scales.file], scales.bytes.end)?;
        let place = || &self.files[scales.file];
        let fail = |e| files::io_error("cannot read the tensor", self.file(entry), &e);
        let per_row = (width / BLOCK) as u64;
        let blocks = of_in.start / BLOCK..of_in.end.div_ceil(BLOCK);
        let one = of_in.len() * of_out.len();
        for (e, out) in of_expert.clone().zip(out.chunks_mut(one.max(1))) {
            for (i, o) in of_out.clone().enumerate() {
                let first = (e * rows + o) as u64 * per_row + blocks.start as u64;
                // Rows lie one behind the other: the rest of this expert's is read with the first.
                let left = (of_out.end - 1 - o) * per_row as usize + blocks.len();
                let at = |start: u64, each: usize| start + first * each as u64;
                let (n, ahead) = (blocks.len(), left.min(MOST));
                let powers = powers.get(at(scales.bytes.start, 1), n, ahead).map_err(fail)?;
                let codes = codes.get(at(entry.bytes.start, BYTES), n * BYTES, ahead * BYTES);
                let codes = codes.map_err(fail)?;
                if powers.contains(&NAN) {
                    let what = format!("block scale {NAN} (NaN) in {tensor}_scales");
                    return Err(Diag::new("weights", what)
                        .at(place().display().to_string())
                        .help("such a block has no numbers: download the file again"));
                }
                for (k, at) in of_in.clone().enumerate() {
                    let (block, place) = (at / BLOCK - blocks.start, at % BLOCK);
                    let byte = codes[block * BYTES + place / 2];
                    let code = if place % 2 == 0 { byte & 15 } else { byte >> 4 };
                    out[k * of_out.len() + i] = number(code, powers[block]);
                }
            }
        }
        Ok(())
    }
}

/// A number of 4 bits times the power of two of its block.
fn number(code: u8, scale: u8) -> f32 {
    let magnitude = MAGNITUDES[usize::from(code & 7)] * 2f64.powi(i32::from(scale) - 127);
    (if code & 8 == 0 { magnitude } else { -magnitude }) as f32
}
