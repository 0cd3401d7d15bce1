//! Dense tensors of the reference interpreter: row-major, every element an f64.
//!
//! Integers up to 2^53 are exact; f32 programs are run either as they are (f64 arithmetic, the
//! reference) or rounded to f32 after every op.

use smallvec::SmallVec;
use std::ops::Range;

pub type Shape = SmallVec<[usize; 4]>;

/// A dense row-major tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub shape: Shape,
    pub data: Vec<f64>,
}

/// Row-major strides of a shape.
pub fn strides(shape: &[usize]) -> Shape {
    let mut out: Shape = shape.iter().map(|_| 1).collect();
    for i in (1..shape.len()).rev() {
        out[i - 1] = out[i] * shape[i];
    }
    out
}

/// Calls `f` with every index of a shape, in row-major order.
pub fn each_index(shape: &[usize], mut f: impl FnMut(&[usize])) {
    if shape.contains(&0) {
        return;
    }
    let mut idx: Shape = shape.iter().map(|_| 0).collect();
    let Some((&width, outer)) = shape.split_last() else { return f(&[]) };
    loop {
        for i in 0..width {
            idx[outer.len()] = i;
            f(&idx);
        }
        let Some(d) = (0..outer.len()).rev().find(|&d| idx[d] + 1 < outer[d]) else { return };
        idx[d] += 1;
        idx[d + 1..].fill(0);
    }
}

/// Calls `f` with the offsets that every index of a shape has in some tensors, in row-major order; `steps` says
/// for each tensor how far apart neighbours along each dim of the shape are, as [`Tensor::steps`] does.
pub fn each_offset<const N: usize>(
    shape: &[usize],
    steps: [&[usize]; N],
    mut f: impl FnMut([usize; N]),
) {
    let Some((&width, outer)) = shape.split_last() else { return f([0; N]) };
    let last = steps.map(|s| s[outer.len()]);
    each_index(outer, |i| {
        let mut at = steps.map(|s| i.iter().zip(s).map(|(i, s)| i * s).sum::<usize>());
        for _ in 0..width {
            f(at);
            at.iter_mut().zip(last).for_each(|(at, step)| *at += step);
        }
    });
}

impl Tensor {
    pub fn new(shape: &[usize], data: Vec<f64>) -> Tensor {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "shape {shape:?}");
        Tensor { shape: shape.into(), data }
    }
    pub fn full(shape: &[usize], x: f64) -> Tensor {
        Tensor::new(shape, vec![x; shape.iter().product()])
    }
    pub fn scalar(x: f64) -> Tensor {
        Tensor::new(&[], vec![x])
    }
    /// One element per index.
    pub fn from_fn(shape: &[usize], mut f: impl FnMut(&[usize]) -> f64) -> Tensor {
        let mut data = Vec::with_capacity(shape.iter().product());
        each_index(shape, |i| data.push(f(i)));
        Tensor::new(shape, data)
    }
    pub fn at(&self, idx: &[usize]) -> f64 {
        self.data[self.offset(idx)]
    }
    pub fn at_mut(&mut self, idx: &[usize]) -> &mut f64 {
        let o = self.offset(idx);
        &mut self.data[o]
    }
    fn offset(&self, idx: &[usize]) -> usize {
        debug_assert!(idx.iter().zip(&self.shape).all(|(i, n)| i < n));
        idx.iter().zip(&self.shape).fold(0, |o, (i, n)| o * n + i)
    }
    /// The elements whose indices are these in all dims but the last.
    pub fn row(&self, idx: &[usize]) -> &[f64] {
        &self.data[self.places(idx)]
    }
    pub fn row_mut(&mut self, idx: &[usize]) -> &mut [f64] {
        let places = self.places(idx);
        &mut self.data[places]
    }
    fn places(&self, idx: &[usize]) -> Range<usize> {
        let (width, outer) = self.shape.split_last().expect("what has rows has a dim");
        debug_assert!(idx.len() == outer.len() && idx.iter().zip(outer).all(|(i, n)| i < n));
        let row = idx.iter().zip(outer).fold(0, |o, (i, n)| o * n + i);
        row * width..(row + 1) * width
    }
    /// How far apart neighbours along each dim of `shape` are here, where dim `d` of this tensor is dim `at[d]`
    /// of the shape: 0 along dims that it lacks.
    pub fn steps(&self, shape: &[usize], at: &[usize]) -> Shape {
        debug_assert!(at.iter().zip(&self.shape).all(|(&p, &n)| shape[p] <= n));
        let mut out: Shape = shape.iter().map(|_| 0).collect();
        at.iter().zip(strides(&self.shape)).for_each(|(&p, s)| out[p] += s);
        out
    }
    /// The tensor of this shape that has at each index the element of this one whose dim `d` has the index of
    /// dim `at[d]`: dims in another order, elements repeated along dims that this tensor lacks.
    pub fn spread(&self, shape: &[usize], at: &[usize]) -> Tensor {
        let mut data = Vec::with_capacity(shape.iter().product());
        each_offset(shape, [&self.steps(shape, at)], |[x]| data.push(self.data[x]));
        Tensor::new(shape, data)
    }
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Tensor {
        Tensor { shape: self.shape.clone(), data: self.data.iter().map(|&x| f(x)).collect() }
    }
    pub fn zip(&self, o: &Tensor, f: impl Fn(f64, f64) -> f64) -> Tensor {
        assert_eq!(self.shape, o.shape);
        let data = self.data.iter().zip(&o.data).map(|(&a, &b)| f(a, b)).collect();
        Tensor { shape: self.shape.clone(), data }
    }
    pub fn reshape(&self, shape: &[usize]) -> Tensor {
        Tensor::new(shape, self.data.clone())
    }
    /// `len` elements of a dim from `offset`.
    pub fn slice(&self, dim: usize, offset: usize, len: usize) -> Tensor {
        let (n, inner) = (self.shape[dim], self.shape[dim + 1..].iter().product::<usize>());
        assert!(offset + len <= n, "{len} elements from {offset} of {n}");
        let mut shape = self.shape.clone();
        shape[dim] = len;
        let mut data = Vec::with_capacity(shape.iter().product());
        for outer in 0..self.shape[..dim].iter().product() {
            data.extend_from_slice(&self.data[(outer * n + offset) * inner..][..len * inner]);
        }
        Tensor::new(&shape, data)
    }
    /// Pieces joined along a dim.
    pub fn concat(dim: usize, parts: &[&Tensor]) -> Tensor {
        let mut shape = parts[0].shape.clone();
        shape[dim] = parts.iter().map(|p| p.shape[dim]).sum();
        let mut data = Vec::with_capacity(shape.iter().product());
        for outer in 0..shape[..dim].iter().product() {
            for p in parts {
                let run = p.shape[dim..].iter().product::<usize>();
                data.extend_from_slice(&p.data[outer * run..][..run]);
            }
        }
        Tensor::new(&shape, data)
    }
}
