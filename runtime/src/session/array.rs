//! Global tensors, put together of what ranks hold.

use crate::batch;
use crate::rank::OutputPiece;
use crate::region::{Region, copy, dense_block};
use crate::wiring::{Port, Wiring};
use shardc_ir::plan::Settings;
use shardc_ir::tensor;

/// A global tensor, row-major.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Array {
    pub shape: Vec<usize>,
    pub data: Vec<f32>,
}

impl Array {
    /// Puts a rank's piece of an output to its place.
    pub(super) fn add(&mut self, w: &Wiring, port: &Port, rank: usize, p: &OutputPiece) {
        let mut shape = port.ty.sizes();
        let batch = batch_of(w, port);
        if batch.is_some() {
            shape[0] = w.plan.settings.global_batch;
        }
        self.place(w, port, rank, &p.data, &shape, batch.map(|b| (b, p.microbatch)));
    }

    /// Copies a dense piece to its place in this tensor, of this shape; if `batch` is given, rows are
    /// those of a microbatch.
    pub(super) fn place(
        &mut self,
        w: &Wiring,
        port: &Port,
        rank: usize,
        data: &[f32],
        shape: &[usize],
        batch: Option<(Port, usize)>,
    ) {
        let size = shape.iter().product();
        if self.shape != shape || self.data.len() != size {
            *self = Array { shape: shape.to_vec(), data: vec![0.0; size] };
        }
        let mesh = w.mesh();
        let coords = mesh.coords(rank);
        let extents: Vec<_> = (0..shape.len()).map(|d| port.ty.extent(mesh, d, &coords)).collect();
        let lens: Vec<usize> = extents.iter().map(|e| e.len).collect();
        let offsets: Vec<usize> = extents.iter().map(|e| e.offset).collect();
        let strides = tensor::strides(shape);
        let (rows, inner) = match (&batch, lens.split_first()) {
            (Some(_), Some((&n, rest))) => (n, rest.to_vec()),
            _ => (1, lens.clone()),
        };
        let outer = lens.len() - inner.len();
        let mut from = dense_block(&inner);
        let size = from.len();
        for i in 0..rows {
            let first =
                batch.map(|(b, j)| batch::global_row(w, b.ty, offsets[0] + i, j) * strides[0]);
            let rest =
                offsets[outer..].iter().zip(&strides[outer..]).map(|(o, s)| o * s).sum::<usize>();
            let mut target = from.clone();
            target.view.strides = strides[outer..].into();
            target.view.offset = first.unwrap_or(0) + rest;
            from.view.offset = i * size;
            assert!(
                from.end() <= data.len() && target.end() <= self.data.len(),
                "a piece fits its tensor"
            );
            // SAFETY: both blocks are inside their vectors, as was just checked; the source is
            // only read.
            unsafe {
                let source = Region::new(data.as_ptr().cast_mut(), &from);
                copy(&source, &Region::new(self.data.as_mut_ptr(), &target), 0..size);
            }
        }
    }

    /// Puts what was made of a batch's tokens back where these stood: dim 1 of `[batch, seq, …]`.
    pub(super) fn restore_order(&mut self, s: &Settings) {
        let width: usize = self.shape[2..].iter().product();
        let dealt = std::mem::take(&mut self.data);
        self.data = vec![0.0; dealt.len()];
        let row = s.seq * width;
        for (to, from) in self.data.chunks_exact_mut(row).zip(dealt.chunks_exact(row)) {
            for (i, x) in from.chunks_exact(width).enumerate() {
                to[s.tokens.position(s.seq, i) * width..][..width].copy_from_slice(x);
            }
        }
    }
}

/// The tokens of whose rows an output's are made, if its first dim is the batch: those of any
/// function say how a microbatch is cut, also those of another stage.
pub(super) fn batch_of<'w>(w: &'w Wiring, port: &Port) -> Option<Port<'w>> {
    let shape = port.ty.sizes();
    let mut inputs = w.args(|k| k.input().is_some_and(|i| i.batch));
    let input = inputs.find(|i| w.per_microbatch[i.func]);
    input
        .filter(|i| w.per_microbatch[port.func] && shape.len() > 1 && shape[0] == i.ty.dims[0].size)
}
