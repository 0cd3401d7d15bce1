//! Initial values of parameters without a checkpoint: the same on every mesh.

use super::read::check_slice;
use shardc_ir::diag::Result;
use shardc_ir::rng::Stream;
use shardc_ir::tensor::strides;
use shardc_ir::weights::{Init, LEAST, Weight};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

/// Elements that a thread draws before it asks for more.
const PART: usize = 1 << 15;

/// Fills a slice of a parameter with initial values, row-major: one range per dim. A value depends
/// on the seed, the parameter's name and the element's index in the whole parameter, so slices
/// agree.
///
/// Errors: `slice` if the ranges or `out` do not fit the parameter.
///
/// ```
/// # use shardc_ir::weights::{Init, Weight};
/// # let w = Weight { param: "w".into(), tensor: "w".into(), tensor_shape: vec![4, 3],
/// #     experts: None, part: None,
/// #     shape: vec![4, 3], init: Init::Normal(0.02),
/// #     matrix: true, tp_dim: None };
/// let (mut all, mut row) = ([0.0; 12], [0.0; 3]);
/// shardc_frontends::init(&w, &[0..4, 0..3], 7, &mut all).unwrap();
/// shardc_frontends::init(&w, &[2..3, 0..3], 7, &mut row).unwrap();
/// assert_eq!(row, all[6..9]);
/// ```
pub fn init(weight: &Weight, ranges: &[Range<usize>], seed: u64, out: &mut [f32]) -> Result<()> {
    check_slice(weight, ranges, out.len())?;
    let stream = Stream::new(seed, &weight.param, 0);
    let draw = |i: u64| match weight.init {
        Init::Normal(deviation) => deviation * stream.normal(i),
        Init::Uniform(bound) => bound * (2.0 * stream.uniform(i) - 1.0),
        Init::LogOfUniform(bound) => (LEAST + (bound - LEAST) * stream.uniform(i)).ln(),
        Init::Ones => 1.0,
        Init::Zeros => 0.0,
    };
    if let Init::Ones | Init::Zeros = weight.init {
        out.fill(draw(0) as f32);
        return Ok(());
    }
    let strides = strides(&weight.shape);
    // Elements from `first` on of the slice, in runs along its last dim, which are adjacent in the whole.
    let fill = |first: usize, out: &mut [f32]| {
        let mut done = 0;
        while done < out.len() {
            let (mut at, mut index, mut run) = (first + done, 0, 1);
            for (d, (r, s)) in ranges.iter().zip(&strides).enumerate().rev() {
                let i = at % r.len();
                index += (i + r.start) * s;
                at /= r.len();
                run = if d + 1 == ranges.len() { r.len() - i } else { run };
            }
            let end = out.len().min(done + run);
            for (x, i) in out[done..end].iter_mut().zip(index as u64..) {
                *x = draw(i) as f32;
            }
            done = end;
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let workers = cores.min(out.len().div_ceil(PART));
    let parts = Mutex::new(out.chunks_mut(PART).enumerate());
    let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some((k, part)) = next() {
            fill(k * PART, part);
        }
    };
    std::thread::scope(|scope| {
        // Where no thread is to be had, those that are there do it all.
        let started = |_| Builder::new().spawn_scoped(scope, work).is_ok();
        let _ = (1..workers).all(started);
        work();
    });
    Ok(())
}
