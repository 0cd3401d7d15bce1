//! Initial values of parameters without a checkpoint: the same on every mesh.

use super::read::check_slice;
use shardc_ir::diag::Result;
use shardc_ir::rng::Stream;
use shardc_ir::tensor::{each_index, strides};
use shardc_ir::weights::{Init, Weight};
use std::ops::Range;

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
    let deviation = match weight.init {
        Init::Ones => {
            out.fill(1.0);
            return Ok(());
        }
        Init::Zeros => {
            out.fill(0.0);
            return Ok(());
        }
        Init::Normal(deviation) => deviation,
    };
    let stream = Stream::new(seed, &weight.param, 0);
    let strides = strides(&weight.shape);
    let lens: Vec<usize> = ranges.iter().map(Range::len).collect();
    let mut out = out.iter_mut();
    each_index(&lens, |i| {
        let index =
            i.iter().zip(ranges).zip(&strides).map(|((i, r), s)| (i + r.start) * s).sum::<usize>();
        if let Some(x) = out.next() {
            *x = (deviation * stream.normal(index as u64)) as f32;
        }
    });
    Ok(())
}
