//! `recurrence.cu` and `recurrence_grad.cu`: a block for a head after the other, as many at once as the workspace has parts.

use super::{File, Words, grid};
use shardc_ir::kernel::{Recurrence, RecurrenceGrad, Recurrent, View};
use shardc_ir::launch::DeviceLaunch;
use shardc_ir::types::DType;

/// Threads of a block.
const THREADS: u32 = 256;

/// A launch for all heads, with what the gradient or the result is put into behind the operands.
fn launch(of: &Recurrent, entry: &'static str, results: &[&View]) -> Vec<DeviceLaunch> {
    let all = of.batch * of.heads;
    if all == 0 {
        return vec![];
    }
    let (backward, slots) = (entry.ends_with("_grad"), Recurrent::slots(all));
    let words = Recurrent::words(backward, [of.tokens, of.width, of.value_width]);
    let (name, text) = match backward {
        false => ("recurrence.cu", include_str!("../../cuda/recurrence.cu")),
        true => ("recurrence_grad.cu", include_str!("../../cuda/recurrence_grad.cu")),
    };
    let file = File::new(name, text)
        .define("WIDTH", of.width)
        .define("VALUE_WIDTH", of.value_width)
        .define("CHUNK", Recurrent::chunk(of.tokens))
        .define("DELTA", u8::from(of.delta))
        .define("SEGMENTS", u8::from(of.segments.is_some()))
        .define("START", u8::from(of.start.is_some()))
        .define("BACKWARD", u8::from(backward));
    let mut w = Words::default();
    // What there is not is not read: another view stands in its place.
    let before = [&of.q, &of.k, &of.g, &of.v, of.beta.as_ref().unwrap_or(&of.g)];
    let segments = of.segments.as_ref().unwrap_or(&of.g);
    let start = of.start.as_ref().unwrap_or(&of.q);
    before.iter().for_each(|v| w.view(v, DType::F32));
    w.view(segments, DType::I32);
    [start, &of.scratch].iter().for_each(|v| w.view(v, DType::F32));
    before.iter().for_each(|v| w.ints(&v.strides[..3]));
    w.ints(&segments.strides[..2]);
    w.ints(&start.strides[..3]);
    w.ints(&[of.tokens, of.heads, all, words]);
    results.iter().for_each(|v| w.view(v, DType::F32));
    results.iter().for_each(|v| w.ints(&v.strides[..3]));
    vec![DeviceLaunch {
        source: file.source(),
        entry: entry.into(),
        grid: grid([slots, 1, 1]),
        threads: THREADS,
        shared: 0,
        words: w.0,
    }]
}

pub(super) fn forward(k: &Recurrence) -> Vec<DeviceLaunch> {
    launch(&k.of, "recurrence", &[&k.out, &k.end])
}

pub(super) fn backward(k: &RecurrenceGrad) -> Vec<DeviceLaunch> {
    let d_beta = k.d_beta.as_ref().unwrap_or(&k.d_g);
    let d_start = k.d_start.as_ref().unwrap_or(&k.d_q);
    let all = [&k.d_out, &k.d_end, &k.d_q, &k.d_k, &k.d_g, &k.d_v, d_beta, d_start];
    launch(&k.of, "recurrence_grad", &all)
}
