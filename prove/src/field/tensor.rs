//! Tensors over the field of 2^61 - 1 elements, and Einstein sums of them.
//!
//! Integers (tokens, indices, counts) are kept as they are, as 64 bits of two's complement; only
//! `number` makes one an element of the field.

use crate::number::{P, add};

/// A dense tensor, the last dim varying fastest.
#[derive(Clone, PartialEq, Debug)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub data: Vec<u64>,
}

/// a·b in the field.
pub fn times(a: u64, b: u64) -> u64 {
    let x = u128::from(a) * u128::from(b);
    add((x as u64) & P, (x >> 61) as u64, P)
}

/// Calls `f` for every index of a shape, in order.
pub fn each(shape: &[usize], mut f: impl FnMut(&[usize])) {
    let mut at = vec![0; shape.len()];
    for _ in 0..shape.iter().product() {
        f(&at);
        for d in (0..shape.len()).rev() {
            at[d] += 1;
            if at[d] < shape[d] {
                break;
            }
            at[d] = 0;
        }
    }
}

impl Tensor {
    pub fn full(shape: &[usize], x: u64) -> Tensor {
        Tensor { shape: shape.to_vec(), data: vec![x; shape.iter().product()] }
    }
    pub fn from_fn(shape: &[usize], mut f: impl FnMut(&[usize]) -> u64) -> Tensor {
        let mut data = Vec::with_capacity(shape.iter().product());
        each(shape, |i| data.push(f(i)));
        Tensor { shape: shape.to_vec(), data }
    }
    /// Place of an index.
    pub fn place(&self, i: &[usize]) -> usize {
        i.iter().zip(&self.shape).fold(0, |p, (i, n)| p * n + i)
    }
    pub fn at(&self, i: &[usize]) -> u64 {
        self.data[self.place(i)]
    }
    /// Adds to an element.
    pub fn add_at(&mut self, i: &[usize], x: u64) {
        let p = self.place(i);
        self.data[p] = add(self.data[p], x, P);
    }
    /// An element as the integer it is.
    pub fn integer(&self, i: &[usize]) -> i64 {
        self.at(i) as i64
    }
    pub fn map(&self, f: impl Fn(u64) -> u64) -> Tensor {
        Tensor { shape: self.shape.clone(), data: self.data.iter().map(|x| f(*x)).collect() }
    }
    /// Of two tensors of one shape.
    pub fn zip(&self, o: &Tensor, f: impl Fn(u64, u64) -> u64) -> Tensor {
        assert_eq!(self.shape, o.shape, "element by element");
        let data = self.data.iter().zip(&o.data).map(|(a, b)| f(*a, *b)).collect();
        Tensor { shape: self.shape.clone(), data }
    }
    pub fn plus(&self, o: &Tensor) -> Tensor {
        self.zip(o, |a, b| add(a, b, P))
    }
    pub fn reshaped(&self, shape: &[usize]) -> Tensor {
        assert_eq!(self.data.len(), shape.iter().product::<usize>(), "a reshape keeps elements");
        Tensor { shape: shape.to_vec(), data: self.data.clone() }
    }
    pub fn slice(&self, dim: usize, from: usize, len: usize) -> Tensor {
        let mut shape = self.shape.clone();
        shape[dim] = len;
        Tensor::from_fn(&shape, |i| {
            let mut j = i.to_vec();
            j[dim] += from;
            self.at(&j)
        })
    }
    /// The tensor in a larger one of zeros, from a place of a dim.
    pub fn among_zeros(&self, shape: &[usize], dim: usize, from: usize) -> Tensor {
        Tensor::from_fn(shape, |i| match i[dim].checked_sub(from) {
            Some(k) if k < self.shape[dim] => {
                let mut j = i.to_vec();
                j[dim] = k;
                self.at(&j)
            }
            _outside => 0,
        })
    }
    pub fn concat(dim: usize, all: &[&Tensor]) -> Tensor {
        let mut shape = all[0].shape.clone();
        shape[dim] = all.iter().map(|t| t.shape[dim]).sum();
        let outer: usize = shape[..dim].iter().product();
        let inner: usize = shape[dim + 1..].iter().product();
        let mut data = Vec::with_capacity(shape.iter().product());
        for o in 0..outer {
            for t in all {
                let n = t.shape[dim] * inner;
                data.extend(&t.data[o * n..(o + 1) * n]);
            }
        }
        Tensor { shape, data }
    }
}

/// A factor of an Einstein sum: a tensor and the letters of its dims.
pub type EinsumFactor<'a> = (&'a Tensor, &'a [u32]);

/// The sum over all letters that `out` lacks of the product of one or two factors; new letters of `out`
/// repeat.
fn contract(factors: &[EinsumFactor], out: &[u32], shape: &[usize]) -> Tensor {
    let mut letters: Vec<u32> = out.to_vec();
    let mut sizes: Vec<usize> = shape.to_vec();
    for (t, own) in factors {
        for (d, l) in own.iter().enumerate() {
            if !letters.contains(l) {
                letters.push(*l);
                sizes.push(t.shape[d]);
            }
        }
    }
    // How far each factor moves when a letter goes up.
    let strides: Vec<Vec<usize>> = factors
        .iter()
        .map(|(t, own)| {
            let mut by = vec![0; letters.len()];
            let mut step = 1;
            for (d, l) in own.iter().enumerate().rev() {
                by[letters.iter().position(|x| x == l).expect("a letter")] += step;
                step *= t.shape[d];
            }
            by
        })
        .collect();
    let (kept, summed) = sizes.split_at(out.len());
    let mut data = Vec::with_capacity(shape.iter().product());
    let mut at = vec![0; sizes.len()];
    let (at, inner) = at.split_at_mut(out.len());
    let mut places = vec![0; factors.len()];
    for _ in 0..shape.iter().product() {
        data.push(sum(factors, &strides, (inner, summed), &mut places));
        step(at, kept, &mut places, &strides, 0);
    }
    Tensor { shape: shape.to_vec(), data }
}

/// Goes to the next index of some letters, and moves the places of factors, which have strides for all letters: the
/// first of these is their `first`. Behind the last index comes the first again.
fn step(at: &mut [usize], sizes: &[usize], places: &mut [usize], by: &[Vec<usize>], first: usize) {
    for d in (0..sizes.len()).rev() {
        at[d] += 1;
        places.iter_mut().zip(by).for_each(|(p, s)| *p += s[first + d]);
        if at[d] < sizes[d] {
            break;
        }
        at[d] = 0;
        places.iter_mut().zip(by).for_each(|(p, s)| *p -= s[first + d] * sizes[d]);
    }
}

/// The sum of products of one or two factors over the last letters, whose indices and sizes are given; index and
/// places are left as they were. The last letter has a loop of its own: most time of a proof is spent there.
fn sum(
    factors: &[EinsumFactor],
    by: &[Vec<usize>],
    (at, sizes): (&mut [usize], &[usize]),
    places: &mut [usize],
) -> u64 {
    let Some((n, outer)) = sizes.split_last() else { return run(factors, &[0, 0], places, 1, 0) };
    let first = by[0].len() - sizes.len();
    let strides = [0, 1].map(|f| by.get(f).map_or(0, |s| s[first + outer.len()]));
    let mut sum = 0;
    for _ in 0..outer.iter().product() {
        sum = run(factors, &strides, places, *n, sum);
        step(&mut at[..outer.len()], outer, places, by, first);
    }
    sum
}

/// Adds `n` products of one or two factors.
fn run(
    factors: &[EinsumFactor],
    strides: &[usize; 2],
    places: &[usize],
    n: usize,
    sum: u64,
) -> u64 {
    let walk = |f: usize| {
        let data: &[u64] = &factors[f].0.data;
        let (place, stride) = (places[f], strides[f]);
        (0..n).map(move |i| data[place + i * stride])
    };
    match factors.len() {
        1 => walk(0).fold(sum, |sum, a| add(sum, a, P)),
        // Times one, what is no element of the field stays as it is.
        _two => walk(0)
            .zip(walk(1))
            .fold(sum, |sum, (a, b)| add(sum, if a == 1 { b } else { times(a, b) }, P)),
    }
}

/// The sum over all letters that `out` lacks of the product of all factors, two at a time: always the two
/// whose product takes the fewest multiplications.
pub fn einsum(factors: &[EinsumFactor], out: &[u32], shape: &[usize]) -> Tensor {
    if factors.len() <= 2 {
        return match factors {
            [] => Tensor::full(shape, 1),
            some => contract(some, out, shape),
        };
    }
    let mut all: Vec<(Tensor, Vec<u32>)> =
        factors.iter().map(|(t, l)| ((*t).clone(), l.to_vec())).collect();
    while all.len() > 2 {
        let (mut best, mut least) = ((0, 1), usize::MAX);
        for i in 0..all.len() {
            for j in i + 1..all.len() {
                let cost =
                    union(&all[i], &all[j]).iter().fold(1usize, |p, x| p.saturating_mul(x.1));
                if cost < least {
                    (best, least) = ((i, j), cost);
                }
            }
        }
        let b = all.remove(best.1);
        let a = all.remove(best.0);
        let needed = |l: &u32| out.contains(l) || all.iter().any(|f| f.1.contains(l));
        let keep: Vec<(u32, usize)> = union(&a, &b).into_iter().filter(|x| needed(&x.0)).collect();
        let (letters, sizes): (Vec<u32>, Vec<usize>) = keep.into_iter().unzip();
        let made = contract(&[(&a.0, &a.1), (&b.0, &b.1)], &letters, &sizes);
        all.push((made, letters));
    }
    let last: Vec<EinsumFactor> = all.iter().map(|(t, l)| (t, &l[..])).collect();
    contract(&last, out, shape)
}

/// Letters of two factors with their sizes.
fn union(a: &(Tensor, Vec<u32>), b: &(Tensor, Vec<u32>)) -> Vec<(u32, usize)> {
    let mut all: Vec<(u32, usize)> = vec![];
    for (t, letters) in [a, b] {
        for (d, l) in letters.iter().enumerate() {
            if !all.iter().any(|x| x.0 == *l) {
                all.push((*l, t.shape[d]));
            }
        }
    }
    all
}
