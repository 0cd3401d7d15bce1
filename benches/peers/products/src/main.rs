//! Times the products of f32 matrices in the crates gemm and faer: `../products.py` starts it.
//!
//! Standard input has a line `TOKENS IN OUT` for each matrix of weights, standard output a line `CRATE TOKENS IN
//! OUT FORWARD BACKWARD WEIGHT` with milliseconds, each the least of some runs.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use std::time::Instant;

const THREADS: usize = 2;

/// A matrix in memory by rows, or the transpose of one.
#[derive(Clone, Copy)]
struct Factor<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    transposed: bool,
}

impl<'a> Factor<'a> {
    fn new(data: &'a [f32], rows: usize, cols: usize) -> Factor<'a> {
        assert_eq!(data.len(), rows * cols);
        Factor { data, rows, cols, transposed: false }
    }

    fn t(self) -> Factor<'a> {
        Factor { rows: self.cols, cols: self.rows, transposed: !self.transposed, ..self }
    }

    /// Elements from one row to the next, and from one column to the next.
    fn strides(self) -> [usize; 2] {
        if self.transposed { [1, self.rows] } else { [self.cols, 1] }
    }

    fn view(self) -> MatRef<'a, f32> {
        let [rows, cols] = [self.rows, self.cols];
        if self.transposed {
            MatRef::from_column_major_slice(self.data, rows, cols)
        } else {
            MatRef::from_row_major_slice(self.data, rows, cols)
        }
    }

    fn at(self, row: usize, col: usize) -> f32 {
        let [rs, cs] = self.strides();
        self.data[row * rs + col * cs]
    }
}

fn by_gemm(out: &mut [f32], a: Factor, b: Factor) {
    let ([a_rs, a_cs], [b_rs, b_cs]) =
        (a.strides().map(|s| s as isize), b.strides().map(|s| s as isize));
    let (to, threads) = (out.as_mut_ptr(), gemm::Parallelism::Rayon(THREADS));
    let (from, with) = (a.data.as_ptr(), b.data.as_ptr());
    // SAFETY: `product` has compared the lengths with the dims, and strides follow from these.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            to,
            1,
            b.cols as isize,
            false,
            from,
            a_cs,
            a_rs,
            with,
            b_cs,
            b_rs,
            0.0,
            1.0,
            false,
            false,
            false,
            threads,
        );
    }
}

fn by_faer(out: &mut [f32], a: Factor, b: Factor) {
    let to = MatMut::from_row_major_slice_mut(out, a.rows, b.cols);
    matmul(to, Accum::Replace, a.view(), b.view(), 1.0, Par::rayon(THREADS));
}

/// Milliseconds of the fastest of some runs, after a check of some elements.
fn product(run: fn(&mut [f32], Factor, Factor), a: Factor, b: Factor) -> f64 {
    assert_eq!(a.cols, b.rows);
    let mut out = vec![f32::NAN; a.rows * b.cols];
    let mut time = || {
        let start = Instant::now();
        run(&mut out, a, b);
        1e3 * start.elapsed().as_secs_f64()
    };
    let first = time();
    let best = (0..((300.0 / first) as usize).clamp(4, 200)).map(|_| time()).fold(first, f64::min);
    for i in 0..50 {
        let (row, col) = (i * 7919 % a.rows, i * 104_729 % b.cols);
        let want: f64 =
            (0..a.cols).map(|k| f64::from(a.at(row, k)) * f64::from(b.at(k, col))).sum();
        let got = f64::from(out[row * b.cols + col]);
        assert!((got - want).abs() <= 1e-3 * want.abs().max(1.0), "{got} is not {want}");
    }
    best
}

fn main() {
    for line in std::io::stdin().lines() {
        let line = line.expect("text");
        let numbers: Vec<usize> = line.split(' ').map(|n| n.parse().expect("a number")).collect();
        let [tokens, ins, outs] = numbers[..] else { panic!("three numbers, not {line}") };
        let random =
            |n: usize| (0..n).map(|i| (i * 13 % 61) as f32 * 0.01 - 0.3).collect::<Vec<_>>();
        let (x, w, dy) = (random(tokens * ins), random(outs * ins), random(tokens * outs));
        let (x, w, dy) = (
            Factor::new(&x, tokens, ins),
            Factor::new(&w, outs, ins),
            Factor::new(&dy, tokens, outs),
        );
        let crates: [(&str, fn(&mut [f32], Factor, Factor)); 2] =
            [("gemm", by_gemm), ("faer", by_faer)];
        for (name, run) in crates {
            let ms = [(x, w.t()), (dy, w), (dy.t(), x)].map(|(a, b)| product(run, a, b));
            println!("{name} {line} {} {} {}", ms[0], ms[1], ms[2]);
        }
    }
}
