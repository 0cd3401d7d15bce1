use super::kernels::Word;
use super::*;
use crate::element::{get, set};
use shardc_ir::types::DType;

const KINDS: [[DType; 3]; 8] = [
    [DType::F32; 3],
    [DType::BF16; 3],
    [DType::BF16, DType::BF16, DType::F32],
    [DType::F32, DType::BF16, DType::F32],
    [DType::BF16, DType::F32, DType::BF16],
    [DType::F16; 3],
    [DType::F16, DType::F16, DType::F32],
    [DType::F32, DType::F16, DType::F16],
];

/// A matrix of numbers that look random, in memory that is just as large as it has to be: rows of
/// adjacent elements, columns, or neither. What lies between is NaN.
struct Held {
    bytes: Vec<u8>,
    size: [usize; 2],
    elem: DType,
    strides: [usize; 2],
}

impl Held {
    fn new(size: [usize; 2], elem: DType, lies: usize, seed: usize) -> Held {
        let [rows, cols] = size;
        let strides = [[cols + 3, 1], [1, rows + 5], [2 * cols + 1, 2]][lies];
        let last = strides[0] * rows.saturating_sub(1) + strides[1] * cols.saturating_sub(1);
        let n = if rows * cols > 0 { last + 1 } else { 0 };
        let mut held = Held { bytes: vec![0xff; n * elem.bytes()], size, elem, strides };
        for i in 0..rows * cols {
            let x = ((i * 7919 + seed * 104_729) % 65_537) as f32 / 32_768.0 - 1.0;
            let at = held.place(i);
            // SAFETY: the bytes of an element.
            unsafe { set(held.bytes[at].as_mut_ptr().cast(), elem, x) };
        }
        held
    }
    /// Bytes of an element, row by row.
    fn place(&self, i: usize) -> Range<usize> {
        let (row, col) = (i / self.size[1], i % self.size[1]);
        let at = (row * self.strides[0] + col * self.strides[1]) * self.elem.bytes();
        at..at + self.elem.bytes()
    }
    fn stored(&mut self) -> Stored {
        let [row_stride, col_stride] = self.strides;
        Stored { at: self.bytes.as_mut_ptr().cast(), elem: self.elem, row_stride, col_stride }
    }
    fn get(&self, i: usize) -> f32 {
        let b = &self.bytes[self.place(i)];
        // SAFETY: the bytes of an element.
        unsafe { get(b.as_ptr().cast(), self.elem) }
    }
    /// Bytes that are not an element's.
    fn gaps(&self) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        (0..self.size[0] * self.size[1]).for_each(|i| bytes[self.place(i)].fill(0));
        bytes
    }
}

/// `out = scale · a b`, added to what it holds if `accumulate`.
fn product(
    kernels: &Kernels,
    [a, b, out]: [&mut Held; 3],
    scale: f32,
    accumulate: bool,
    threads: usize,
) {
    let size = [a.size[0], b.size[1], a.size[1]];
    let (at, batch, sum) = ([a.stored(), b.stored(), out.stored()], Extents::new(), Extents::new());
    let at = |_: &[usize], _: &[usize]| at;
    let one = PackedProducts { size, batch, sum, at, scale, accumulate, then: None };
    // SAFETY: all matrices have this size.
    unsafe { one.run(kernels, threads) };
}

/// All families are there that the processor is said to have.
#[test]
fn families_are_those_of_the_processor() {
    #[cfg(target_arch = "x86_64")]
    {
        use crate::math::has;
        let has512 = has!("avx512vl", "avx512bw");
        let pairs = has512 && has!("avx512bf16");
        let has2 = has!("avx2", "fma");
        let all = 1 + usize::from(has2) + usize::from(has512);
        assert_eq!(Kernels::all(DType::F32, DType::F32).len(), all);
        assert_eq!(Kernels::all(DType::F32, DType::BF16).len(), all);
        let half = Kernels::all(DType::BF16, DType::BF16);
        assert_eq!(half.len(), all + usize::from(pairs));
        if pairs {
            let words = [half[0].word, half[1].word].map(Word::depth);
            assert_eq!(words, if avx512::pairs_are_fast() { [2, 1] } else { [1, 2] });
        }
    }
    for [a, b, _] in KINDS {
        assert!(std::ptr::eq(Kernels::of(a, b), Kernels::all(a, b)[0]));
        for k in Kernels::all(a, b) {
            assert_eq!([k.rows.len(), k.steps.len()], [k.tile[0]; 2]);
        }
    }
}

/// Every family gives what the products are: within one rounding of f32 for each term (Higham, 2002,
/// section 3.1), and one of the result where that is of 16 bits. Tiles of all numbers of rows, few rows,
/// panels that are not whole, all ways in which matrices lie, more steps than are packed at once.
#[test]
fn all_families_agree_with_sums_of_f64() {
    let sizes = (1..=13).map(|m| [m, 35, 19]);
    let sizes = sizes.chain([[37, 130, 67], [6, 16, 8], [13, 70, 1100], [3, 70, 0], [5, 0, 3]]);
    for (case, size) in sizes.enumerate() {
        for lies in 0..27 {
            let ([m, n, k], kind) = (size, KINDS[(case + lies) % KINDS.len()]);
            let (accumulate, scale) = (lies % 2 == 1, if lies % 4 < 2 { 1.0 } else { 0.3 });
            let mut a = Held::new([m, k], kind[0], lies % 3, 1);
            let mut b = Held::new([k, n], kind[1], lies / 3 % 3, 2);
            let before = Held::new([m, n], kind[2], lies / 9, 3);
            for (family, kernels) in Kernels::all(kind[0], kind[1]).into_iter().enumerate() {
                let mut c = Held::new([m, n], kind[2], lies / 9, 3);
                product(kernels, [&mut a, &mut b, &mut c], scale, accumulate, 2);
                for i in 0..m * n {
                    let (mut sum, mut of) = (0.0, 0.0f64);
                    for l in 0..k {
                        let t = f64::from(a.get(i / n * k + l)) * f64::from(b.get(l * n + i % n));
                        (sum, of) = (sum + t, of + t.abs());
                    }
                    let was = if accumulate { f64::from(before.get(i)) } else { 0.0 };
                    let want = was + f64::from(scale) * sum;
                    let mut bound = (k + 2) as f64 * 2f64.powi(-24) * (of + was.abs());
                    bound += match kind[2] {
                        DType::BF16 => 2f64.powi(-8) * (want.abs() + bound),
                        DType::F16 => (2f64.powi(-11) * (want.abs() + bound)).max(2f64.powi(-25)),
                        DType::F32 | DType::I32 => 0.0,
                    };
                    let got = f64::from(c.get(i));
                    let near = (got - want).abs() <= bound;
                    assert!(near, "{family} {size:?} {kind:?} {lies} {i}: {got} is not {want}");
                }
                assert!(c.gaps() == before.gaps(), "{family} {size:?} {kind:?} {lies}");
            }
        }
    }
}

/// Which operands are read as they lie: f32 with adjacent steps or near ones.
#[test]
fn operands_are_read_as_they_lie() {
    let lies = |elem, [row_stride, col_stride]: [usize; 2]| {
        let a = Stored { at: std::ptr::null_mut(), elem, row_stride, col_stride };
        Kernels::all(elem, DType::F32).iter().map(|k| k.strip(a).is_some()).collect::<Vec<_>>()
    };
    assert!(lies(DType::F32, [700, 1]).iter().all(|&x| x));
    assert!(lies(DType::F32, [1, 511]).iter().all(|&x| x));
    for (elem, strides) in [(DType::F32, [1, 512]), (DType::F32, [700, 2]), (DType::BF16, [700, 1])]
    {
        assert!(lies(elem, strides).iter().all(|&x| !x));
    }
    // Rows that are whole pages apart, where the cache has fewer ways than a tile has rows.
    assert!(lies(DType::F32, [4096, 1]).iter().rev().take(1).all(|&x| x));
}

/// How many threads there are does not change a bit, and where tiles begin neither: with panels, and of
/// few rows.
#[test]
fn threads_and_cuts_change_no_bit() {
    for kind in [KINDS[0], KINDS[2]] {
        for kernels in Kernels::all(kind[0], kind[1]) {
            for [m, n, k] in [[1040, 1600, 40], [2100, 80, 70], [8, 1100, 260], [3, 1300, 300]] {
                let (mut a, mut b) =
                    (Held::new([m, k], kind[0], 0, 1), Held::new([k, n], kind[1], 1, 2));
                let mut run = |threads| {
                    let mut c = Held::new([m, n], kind[2], 0, 3);
                    product(kernels, [&mut a, &mut b, &mut c], 1.0, false, threads);
                    c
                };
                let whole = run(1);
                assert!([2, 3, 5].into_iter().all(|threads| run(threads).bytes == whole.bytes));
                // Some rows and columns alone; of few rows as many, since others are summed otherwise.
                let [top, left, rows, cols] = if m > 8 { [7, 21, 100, 50] } else { [0, 21, m, 50] };
                let mut c = Held::new([rows, cols], kind[2], 0, 3);
                let at = [a.stored().from(top, 0), b.stored().from(0, left), c.stored()];
                let (size, batch, sum) = ([rows, cols, k], Extents::new(), Extents::new());
                let at = |_: &[usize], _: &[usize]| at;
                let part = PackedProducts {
                    size,
                    batch,
                    sum,
                    at,
                    scale: 1.0,
                    accumulate: false,
                    then: None,
                };
                // SAFETY: all matrices have this size.
                unsafe { part.run(kernels, 1) };
                let of = |i: usize| whole.get((top + i / cols) * n + left + i % cols);
                assert!((0..rows * cols).all(|i| c.get(i).to_bits() == of(i).to_bits()));
            }
        }
    }
}

/// Threads, tasks, regions and turns of k: the same bits as one thread's, and what f64 says of some elements.
/// Rows of the left operand are adjacent and near, or too far to be read so, or its steps are.
#[test]
fn tasks_and_turns_change_no_bit() {
    let cases =
        [([506, 50, 1600], 1), ([507, 50, 1600], 1), ([2100, 70, 800], 0), ([1100, 40, 1540], 2)];
    for (size, lies) in cases {
        for kind in [KINDS[0], KINDS[1], KINDS[2]] {
            let [m, n, k] = size;
            let mut a = Held::new([m, k], kind[0], lies, 1);
            let mut b = Held::new([k, n], kind[1], 0, 2);
            for accumulate in [false, true] {
                let kernels = Kernels::of(kind[0], kind[1]);
                let before = Held::new([m, n], kind[2], 0, 3);
                let mut run = |threads| {
                    let mut c = Held::new([m, n], kind[2], 0, 3);
                    product(kernels, [&mut a, &mut b, &mut c], 0.5, accumulate, threads);
                    c
                };
                let one = run(1);
                assert!(
                    run(2).bytes == one.bytes && run(3).bytes == one.bytes,
                    "{size:?} {kind:?}"
                );
                for i in (0..m * n).step_by(m * n / 97) {
                    let term =
                        |l: usize| [a.get(i / n * k + l), b.get(l * n + i % n)].map(f64::from);
                    let terms = (0..k).map(|l| term(l)[0] * term(l)[1]);
                    let (sum, of) = terms.fold((0.0, 0.0), |(s, o), t| (s + t, o + t.abs()));
                    let was = if accumulate { f64::from(before.get(i)) } else { 0.0 };
                    let want = was + 0.5 * sum;
                    let mut bound = (k + 2) as f64 * 2f64.powi(-24) * (of + was.abs());
                    bound += if kind[2] == DType::BF16 {
                        2f64.powi(-8) * (want.abs() + bound)
                    } else {
                        0.0
                    };
                    let got = f64::from(one.get(i));
                    assert!(
                        (got - want).abs() <= bound,
                        "{size:?} {kind:?} {i}: {got} is not {want}"
                    );
                }
            }
        }
    }
}
