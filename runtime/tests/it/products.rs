//! Products and attention of hostile sizes: compared with f64, bitwise equal on any number of
//! threads, and untouched by what lies between their rows.

use half::f16;
use shardc_ir::kernel::{Attention, AttentionGrad, Extents, Gemm, Heads, Kernel, Matrix, View};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::Mask;
use shardc_ir::types::DType;
use shardc_runtime::exec::Executor;
use shardc_runtime::threads::Threads;
use shardc_testing::{samples, taken};
use std::time::Duration;

/// Memory of elements of one kind; all of it is NaN at first.
#[derive(Clone)]
struct Memory {
    words: Vec<u32>,
    elem: DType,
}

impl Memory {
    fn new(elem: DType, n: usize) -> Memory {
        Memory { words: vec![0x7fc1_7fc1; (n * elem.bytes()).div_ceil(4)], elem }
    }
    fn get(&self, i: usize) -> f64 {
        f64::from(match self.elem {
            DType::F16 => {
                return f16::from_bits((self.words[i / 2] >> (i % 2 * 16)) as u16).to_f64();
            }
            DType::BF16 => f32::from_bits(self.words[i / 2] >> (i % 2 * 16) << 16),
            DType::F32 | DType::I32 => f32::from_bits(self.words[i]),
        })
    }
    /// Sets an element to a number; one of bf16 takes the nearest below.
    fn set(&mut self, i: usize, x: f32) {
        match self.elem {
            DType::F16 => {
                let (at, word) = (i % 2 * 16, &mut self.words[i / 2]);
                *word = *word & !(0xffff << at) | u32::from(f16::from_f32(x).to_bits()) << at;
            }
            DType::BF16 => {
                let (at, word) = (i % 2 * 16, &mut self.words[i / 2]);
                *word = *word & !(0xffff << at) | x.to_bits() >> 16 << at;
            }
            DType::F32 | DType::I32 => self.words[i] = x.to_bits(),
        }
    }
    fn at(&mut self) -> *mut f32 {
        self.words.as_mut_ptr().cast()
    }
}

/// By which part of it a number may be off that was rounded to such an element.
fn rounding(elem: DType) -> f64 {
    match elem {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F32 | DType::I32 => 0.0,
    }
}

/// Numbers that look random.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.0 >> 33
    }
    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }
    fn float(&mut self) -> f32 {
        (self.next() % 2048) as f32 / 1024.0 - 1.0
    }
    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

fn executor(threads: usize) -> Executor {
    let end = Threads::connect(&Mesh::default(), Duration::from_secs(20)).remove(0);
    Executor::new(Box::new(end), threads)
}

fn run(kernel: &Kernel, memory: &[Memory], threads: usize) -> Vec<Memory> {
    let mut memory = memory.to_vec();
    kernel.reach(&mut |operand, end| {
        let m = &memory[operand];
        assert!(end * m.elem.bytes() <= m.words.len() * 4, "{kernel:?}: operand {operand}");
    });
    let at: Vec<*mut f32> = memory.iter_mut().map(Memory::at).collect();
    // SAFETY: the kernel's reach was compared with the buffers, which are its own.
    unsafe { executor(threads).run(kernel, &at).unwrap() };
    memory
}

/// Runs on 1, 2 and 3 threads, and once more: all the same bits in operands and results, which are the
/// first so many; what follows is a workspace.
fn run_alike(kernel: &Kernel, memory: &[Memory], compared: usize) -> Vec<Memory> {
    let first = run(kernel, memory, 1);
    for threads in [1, 2, 3] {
        let again = run(kernel, memory, threads);
        let mut results = first.iter().zip(&again).take(compared);
        assert!(results.all(|(a, b)| a.words == b.words), "{threads} threads: {kernel:?}");
    }
    first
}

/// A matrix of so many rows and columns with gaps, by rows, by columns or neither.
fn lay(d: &mut Draw, operand: usize, elem: DType, [rows, cols]: [usize; 2]) -> Matrix {
    let gap = d.one(&[0, 0, 1, 5, 32]);
    let (row_stride, col_stride) = match d.below(5) {
        0 | 1 => (cols + gap, 1),
        2 | 3 => (1, rows + gap),
        _apart => (2 * cols + gap + 1, 2),
    };
    let view = View { operand, offset: d.one(&[0, 1, 7]), strides: Extents::new() };
    Matrix { view, elem, row_stride, col_stride }
}

/// Adds a loop to a matrix, of which the largest index so far is `end`.
fn repeat(x: &mut Matrix, n: usize, end: &mut usize) {
    x.view.strides.push(*end);
    *end *= n.max(1);
}

/// The terms of so many sums, one sum after the other: of rows or columns of matrices that begin at these elements,
/// `down` apart, with terms that are `step` apart.
fn lines(
    memory: &Memory,
    from: &[usize],
    [lines, k]: [usize; 2],
    [down, step]: [usize; 2],
) -> Vec<f64> {
    let line = |l: usize| from.iter().map(move |at| at + l * down);
    let terms = |at: usize| (0..k).map(move |t| memory.get(at + t * step));
    (0..lines).flat_map(line).flat_map(terms).collect()
}

fn check([m, n, k]: [usize; 3], d: &mut Draw) {
    let elems = d.one(&[
        [DType::F32; 3],
        [DType::F32; 3],
        [DType::BF16; 3],
        [DType::BF16; 3],
        [DType::BF16, DType::BF16, DType::F32],
        [DType::BF16, DType::F32, DType::BF16],
        [DType::F32, DType::BF16, DType::F32],
        [DType::F16; 3],
        [DType::F16, DType::F16, DType::F32],
        [DType::F16, DType::F32, DType::F16],
        [DType::F32, DType::F16, DType::F32],
    ]);
    let (batch, sum) = (d.one(&[1, 1, 3]), d.one(&[0, 1, 1, 1, 2, 3]));
    let sizes = [[m, k], [k, n], [m, n]];
    let mut all: Vec<Matrix> = (0..3).map(|i| lay(d, i, elems[i], sizes[i])).collect();
    let mut ends = [0; 3];
    for (i, x) in all.iter_mut().enumerate() {
        let [rows, cols] = sizes[i];
        let mut end = rows * x.row_stride + cols * x.col_stride + 3;
        let batches = if batch > 1 { batch } else { 1 };
        if batch > 1 {
            repeat(x, batches, &mut end);
        }
        if sum != 1 && i < 2 {
            repeat(x, sum, &mut end);
        }
        ends[i] = x.view.offset + end;
    }
    let loops = |n: usize| if n != 1 { Extents::from_slice(&[n]) } else { Extents::new() };
    let [a, b, out] = [&all[0], &all[1], &all[2]].map(Clone::clone);
    let accumulate = d.below(2) == 1;
    let (batch, sum) = (loops(batch), loops(sum));
    let gemm = Gemm { batch, sum, m, n, k, a, b, out, accumulate };
    let mut memory: Vec<Memory> = (0..3).map(|i| Memory::new(elems[i], ends[i])).collect();
    let at = |x: &Matrix, index: &[usize], row: usize, col: usize| {
        x.view.at(index) + row * x.row_stride + col * x.col_stride
    };
    let each = |gemm: &Gemm, f: &mut dyn FnMut(usize, usize)| {
        for i in 0..gemm.batch.first().copied().unwrap_or(1) {
            for j in 0..gemm.sum.first().copied().unwrap_or(1) {
                f(i, j);
            }
        }
    };
    // The index of a batch of one and of a sum of one is none.
    let index = |i: usize, j: usize| -> Extents {
        let i = (!gemm.batch.is_empty()).then_some(i);
        let j = (!gemm.sum.is_empty()).then_some(j);
        i.into_iter().chain(j).collect()
    };
    each(&gemm, &mut |i, j| {
        for l in 0..k {
            (0..m).for_each(|r| memory[0].set(at(&gemm.a, &index(i, j), r, l), d.float()));
            (0..n).for_each(|c| memory[1].set(at(&gemm.b, &index(i, j), l, c), d.float()));
        }
    });
    for i in (0..gemm.batch.first().copied().unwrap_or(1)).filter(|_| accumulate) {
        for r in 0..m {
            (0..n).for_each(|c| memory[2].set(at(&gemm.out, &index(i, 0), r, c), d.float()));
        }
    }
    let results = run_alike(&Kernel::Gemm(gemm.clone()), &memory, 3);
    let mut written = vec![false; ends[2]];
    let terms = k * gemm.sum.first().copied().unwrap_or(1);
    for i in 0..gemm.batch.first().copied().unwrap_or(1) {
        let sums = gemm.sum.first().copied().unwrap_or(1);
        let from = |x: &Matrix| (0..sums).map(|j| x.view.at(&index(i, j))).collect::<Vec<_>>();
        let (a, b) = (&gemm.a, &gemm.b);
        let rows = lines(&memory[0], &from(a), [m, k], [a.row_stride, a.col_stride]);
        let cols = lines(&memory[1], &from(b), [n, k], [b.col_stride, b.row_stride]);
        for r in 0..m {
            for c in 0..n {
                let to = at(&gemm.out, &index(i, 0), r, c);
                written[to] = true;
                let (mut want, mut size) = (0.0, 0.0);
                if accumulate {
                    (want, size) = (memory[2].get(to), memory[2].get(to).abs());
                }
                let row = &rows[r * terms..(r + 1) * terms];
                for (x, y) in row.iter().zip(&cols[c * terms..(c + 1) * terms]) {
                    want += x * y;
                    size += (x * y).abs();
                }
                // A sum of n terms in f32, in any order: n rounding errors of the sum of their
                // magnitudes at most (Higham, 2002, section 3.1); and one of a result of 16 bits.
                let mut bound = (terms + 2) as f64 * 2f64.powi(-24) * size;
                bound += rounding(elems[2]) * (want.abs() + bound);
                let got = results[2].get(to);
                let close = (got - want).abs() <= bound;
                assert!(close, "{got} is not {want} in row {r}, column {c} of {gemm:?}");
            }
        }
    }
    for i in (0..ends[2]).filter(|&i| !written[i]) {
        let (before, after) = (memory[2].get(i).to_bits(), results[2].get(i).to_bits());
        assert_eq!(before, after, "element {i} beside the result of {gemm:?}");
    }
}

#[test]
fn products_of_hostile_sizes() {
    let mut d = Draw(1);
    let sizes = [0, 1, 2, 3, 7, 8, 11, 12, 13, 16, 17, 31, 32, 33, 48, 65, 100];
    for _ in 0..samples(150, 500) {
        let size = [d.one(&sizes), d.one(&sizes), d.one(&sizes)];
        check(size, &mut d);
    }
    for depth in [767, 768, 769, 1535, 1537, 1100, 2049] {
        let size = [d.one(&sizes), d.one(&sizes), depth];
        check(size, &mut d);
    }
    // Several blocks of rows and of columns.
    for size in [
        [1, 1100, 40],
        [1600, 3, 40],
        [1040, 1030, 20],
        [2070, 1540, 20],
        [9, 3080, 530],
        [70, 1060, 1100],
        [3, 700, 600],
        [6, 70, 3000],
    ] {
        (0..samples(1, 3)).for_each(|_| check(size, &mut d));
    }
}

/// What is not a number stays none, in its row and column only.
#[test]
fn products_keep_what_is_no_number() {
    for elem in [DType::F32, DType::BF16, DType::F16] {
        for m in [1, 5, 40] {
            let [n, k] = [37, 45];
            let of = |operand, row_stride| Matrix {
                view: View { operand, ..View::default() },
                elem,
                row_stride,
                col_stride: 1,
            };
            let (a, b, out) = (of(0, k), of(1, n), of(2, n));
            let (batch, sum, accumulate) = (Extents::new(), Extents::new(), false);
            let gemm = Gemm { batch, sum, m, n, k, a, b, out, accumulate };
            let sizes = [m * k, k * n, m * n];
            let mut memory: Vec<Memory> = sizes.iter().map(|&n| Memory::new(elem, n)).collect();
            (0..m * k).for_each(|i| memory[0].set(i, 1.0));
            (0..k * n).for_each(|i| memory[1].set(i, 1.0));
            memory[0].set((m - 1) * k + 7, f32::INFINITY);
            memory[1].set(44 * n + 36, f32::NAN);
            let got = run_alike(&Kernel::Gemm(gemm), &memory, 3);
            for r in 0..m {
                for c in 0..n {
                    let (x, last) = (got[2].get(r * n + c), r == m - 1);
                    let want = if last { f64::INFINITY } else { k as f64 };
                    assert!(if c == 36 { x.is_nan() } else { x == want }, "{x} at {r}, {c}");
                }
            }
        }
    }
}

/// Sizes of attention in a test, and who sees whom.
struct Case {
    elem: DType,
    batch: usize,
    groups: usize,
    repeat: usize,
    widths: [usize; 2],
    q_pos: Vec<i32>,
    k_pos: Vec<i32>,
    mask: Mask,
    softcap: Option<f32>,
}

impl Case {
    fn sees(&self, q: usize, k: usize) -> bool {
        let (q, k) = (i64::from(self.q_pos[q]), i64::from(self.k_pos[k]));
        let within = |n: Option<usize>, far: i64| n.is_none_or(|n| far <= n as i64);
        let near = within(self.mask.left, q - k) && within(self.mask.right, k - q);
        near && self.mask.chunk.is_none_or(|c| q / c as i64 == k / c as i64)
    }
    fn view(&self, operand: usize, by_query: bool, width: usize) -> (View, usize) {
        let heads = self.groups * if by_query { self.repeat } else { 1 };
        let rows = if by_query { self.q_pos.len() } else { self.k_pos.len() };
        // A gap between heads, another between positions.
        let (head, position) = (width + 1, heads * (width + 1) + 2);
        let strides = [rows * position, position, head].into_iter().collect();
        (View { operand, offset: 1, strides }, 1 + self.batch * rows * position)
    }
}

#[expect(clippy::too_many_lines, reason = "kernels, and what they are compared with, side by side")]
fn attention(c: &Case, d: &mut Draw) {
    let heads = c.groups * c.repeat;
    let [width, value_width] = c.widths;
    let (queries, keys) = (c.q_pos.len(), c.k_pos.len());
    let shapes = [
        (true, width, c.elem),
        (false, width, c.elem),
        (false, value_width, c.elem),
        (true, value_width, c.elem),
        (true, 1, DType::F32),
        (true, 1, DType::F32),
        (true, value_width, c.elem),
        (true, width, c.elem),
        (false, width, c.elem),
        (false, value_width, c.elem),
    ];
    let mut memory = vec![];
    let mut views = vec![];
    for (i, &(by_query, width, elem)) in shapes.iter().enumerate() {
        let (view, end) = c.view(i, by_query, width);
        let mut m = Memory::new(elem, end);
        let rows = if by_query { queries } else { keys };
        let of = if by_query { heads } else { c.groups };
        for b in (0..c.batch).filter(|_| matches!(i, 0..=2 | 5 | 6)) {
            for at in (0..rows).flat_map(|r| (0..of).map(move |h| (r, h))) {
                let first = view.at(&[b, at.0, at.1]);
                (0..width).for_each(|x| m.set(first + x, d.float()));
            }
        }
        views.push(view);
        memory.push(m);
    }
    for pos in [&c.q_pos, &c.k_pos] {
        let words = pos.iter().map(|&p| p as u32).collect();
        memory.push(Memory { words, elem: DType::I32 });
    }
    let rows = queries.min(shardc_ir::ops::attention::ROWS);
    let view = |operand| View { operand, ..View::default() };
    let of = Heads {
        elem: c.elem,
        batch: c.batch,
        queries,
        keys,
        groups: c.groups,
        repeat: c.repeat,
        width,
        value_width,
        scale: 0.3,
        mask: c.mask,
        slopes: None,
        bias: None,
        segments: None,
        kept: None,
        softcap: c.softcap,
        rows,
        q_pos: view(10),
        k_pos: view(11),
        scratch: view(12),
    };
    memory.push(Memory::new(DType::F32, 2 * rows * keys + of.wide(true)));
    let v = |i: usize| views[i].clone();
    let forward = Attention { heads: of.clone(), q: v(0), k: v(1), v: v(2), out: v(3), lse: v(4) };
    let memory = run_alike(&Kernel::Attention(Box::new(forward)), &memory, memory.len() - 1);
    let backward = AttentionGrad {
        heads: of,
        q: v(0),
        k: v(1),
        v: v(2),
        lse: v(4),
        d_out: v(6),
        delta: v(5),
        d_q: v(7),
        d_k: v(8),
        d_v: v(9),
        d_bias: None,
    };
    let memory = run_alike(&Kernel::AttentionGrad(Box::new(backward)), &memory, memory.len() - 1);
    let get = |i: usize, b, row, head, x| memory[i].get(views[i].at(&[b, row, head]) + x);
    let close = |got: f64, want: f64, size: f64, what: &str| {
        let half = rounding(c.elem) * want.abs();
        let near = (got - want).abs() <= 2e-5 * (size + 0.1) + half || got == want;
        assert!(near, "{what}: {got} is not {want}");
    };
    for b in 0..c.batch {
        let mut d_keys = vec![0.0; keys * c.groups * (width + value_width)];
        for h in 0..heads {
            let g = h / c.repeat;
            for s in 0..queries {
                let dot = |i: usize, j: usize, t: usize, n: usize| -> f64 {
                    (0..n).map(|x| get(i, b, s, h, x) * get(j, b, t, g, x)).sum()
                };
                let seen: Vec<usize> = (0..keys).filter(|&t| c.sees(s, t)).collect();
                let cap = c.softcap.map(f64::from);
                let score = |t: usize| {
                    let x = dot(0, 1, t, width) * f64::from(0.3f32);
                    cap.map_or(x, |c| c * (x / c).tanh())
                };
                let sum: f64 = seen.iter().map(|&t| score(t).exp()).sum();
                close(get(4, b, s, h, 0), sum.ln(), 1.0, "log-sum-exp");
                let p: Vec<f64> = seen.iter().map(|&t| score(t).exp() / sum).collect();
                for x in 0..value_width {
                    let want = seen.iter().zip(&p).map(|(&t, p)| p * get(2, b, t, g, x)).sum();
                    close(get(3, b, s, h, x), want, 1.0, "output");
                }
                let delta = get(5, b, s, h, 0);
                let mut d_q = vec![0.0; width];
                for (&t, p) in seen.iter().zip(&p) {
                    let slope = cap.map_or(1.0, |c| 1.0 - (score(t) / c).powi(2));
                    let d_s = f64::from(0.3f32) * slope * p * (dot(6, 2, t, value_width) - delta);
                    let at = (t * c.groups + g) * (width + value_width);
                    for x in 0..width {
                        d_q[x] += d_s * get(1, b, t, g, x);
                        d_keys[at + x] += d_s * get(0, b, s, h, x);
                    }
                    for x in 0..value_width {
                        d_keys[at + width + x] += p * get(6, b, s, h, x);
                    }
                }
                for (x, want) in d_q.into_iter().enumerate() {
                    close(get(7, b, s, h, x), want, 1.0, "gradient of queries");
                }
            }
        }
        for (t, g) in (0..keys).flat_map(|t| (0..c.groups).map(move |g| (t, g))) {
            let at = (t * c.groups + g) * (width + value_width);
            for x in 0..width {
                close(get(8, b, t, g, x), d_keys[at + x], 3.0, "gradient of keys");
            }
            for x in 0..value_width {
                close(get(9, b, t, g, x), d_keys[at + width + x], 3.0, "gradient of values");
            }
        }
    }
}

/// Positions in order, dealt in zigzag, of another rank, and mixed; with windows; some queries see
/// nothing. More than one block of queries and of keys.
#[test]
fn attention_of_hostile_positions() {
    let mut d = Draw(5);
    let line = |from: i32, n: i32| (from..from + n).collect::<Vec<i32>>();
    let zigzag: Vec<i32> = line(0, 100).into_iter().chain(line(700, 110)).collect();
    let mut mixed = line(0, 420);
    for i in (1..mixed.len()).rev() {
        mixed.swap(i, d.below(i + 1));
    }
    let positions = [
        (line(0, 1), line(0, 1)),
        (line(0, 100), line(0, 100)),
        (line(0, 210), zigzag.clone()),
        (zigzag.clone(), zigzag),
        (line(100, 110), line(0, 450)),
        (line(0, 97), line(40, 9)),
        (line(0, 97), line(400, 9)),
        (mixed[..130].to_vec(), mixed),
        (line(5, 3), vec![]),
    ];
    let causal = Mask::CAUSAL;
    let masks = [
        (causal, None),
        (Mask::causal(Some(30)), None),
        (causal, Some(0.7)),
        (Mask::FULL, None),
        (Mask { left: Some(40), right: Some(25), chunk: None }, Some(0.7)),
        (Mask { chunk: Some(64), ..causal }, None),
        (Mask { left: None, right: Some(9), chunk: Some(50) }, None),
    ];
    for (i, (q_pos, k_pos)) in positions.into_iter().enumerate() {
        for (e, elem) in [DType::F32, DType::BF16, DType::F16].into_iter().enumerate() {
            for (_, (mask, softcap)) in
                masks.into_iter().enumerate().filter(|(m, _)| taken(i + e + m, 3))
            {
                let (batch, repeat) = (1 + i % 2, 1 + (i + 1) % 2);
                let (q_pos, k_pos) = (q_pos.clone(), k_pos.clone());
                let widths = d.one(&[[5, 5], [8, 3], [16, 16]]);
                let groups = 2;
                let c = Case { elem, batch, groups, repeat, widths, q_pos, k_pos, mask, softcap };
                attention(&c, &mut d);
            }
        }
    }
}
