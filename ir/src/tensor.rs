//! Dense tensors of the reference interpreter: row-major, every element an f64.
//!
//! Integers up to 2^53 are exact; f32 programs are run either as they are (f64 arithmetic, the
//! reference) or rounded to f32 after every op.

use smallvec::SmallVec;

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
    loop {
        f(&idx);
        let Some(d) = (0..shape.len()).rev().find(|&d| idx[d] + 1 < shape[d]) else { return };
        idx[d] += 1;
        idx[d + 1..].iter_mut().for_each(|x| *x = 0);
    }
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
        let mut shape = self.shape.clone();
        shape[dim] = len;
        Tensor::from_fn(&shape, |i| {
            let mut j: Shape = i.into();
            j[dim] += offset;
            self.at(&j)
        })
    }
    /// Pieces joined along a dim.
    pub fn concat(dim: usize, parts: &[&Tensor]) -> Tensor {
        let mut shape = parts[0].shape.clone();
        shape[dim] = parts.iter().map(|p| p.shape[dim]).sum();
        let mut out = Tensor::full(&shape, 0.0);
        let mut at = 0;
        for p in parts {
            each_index(&p.shape, |i| {
                let mut j: Shape = i.into();
                j[dim] += at;
                *out.at_mut(&j) = p.at(i);
            });
            at += p.shape[dim];
        }
        out
    }
}
