use super::*;

/// Numbers that look random and are all different.
fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729) % 65_537) as f32 / 32_768.0 - 1.0).collect()
}

/// What processors without kernels of ours run is right too, and as exact.
#[test]
fn the_fallback_agrees() {
    let [m, n, k] = [37, 530, 67];
    let (mut a, mut b) = (numbers(m * k, 1), numbers(k * n, 2));
    let mut results = [vec![0.5f32; m * n], vec![0.5f32; m * n]];
    let [x, y] = [(&mut a, k), (&mut b, n)].map(|(v, cols)| Stored::rows(v.as_mut_ptr(), cols));
    let [ours, theirs] = results.each_mut().map(|r| Stored::rows(r.as_mut_ptr(), n));
    // SAFETY: all vectors have the elements of their matrices.
    unsafe {
        multiply([m, n, k], [x, y, ours], 0.3, true, 1);
        fallback::multiply([m, n, k], [x, y, theirs], 0.3, true, 1);
    }
    for (x, y) in results[0].iter().zip(&results[1]) {
        assert!((x - y).abs() < 1e-5, "{x} is not {y}");
    }
}

/// So are its blocks of bf16, with all three matrices in blocks of more than one.
#[test]
fn blocks_of_the_fallback_agree() {
    use shardc_ir::kernel::View;
    let [m, n, k] = [9, 515, 520];
    let half = |v: Vec<f32>| -> Vec<u16> { v.into_iter().map(crate::math::to_bf16).collect() };
    let (mut a, mut b) = (half(numbers(m * k, 3)), half(numbers(k * n, 4)));
    let mut results = [half(vec![0.5; m * n]), half(vec![0.5; m * n])];
    let view = |operand| View { operand, ..View::default() };
    let of = |operand, row_stride, col_stride| Matrix {
        view: view(operand),
        elem: Elem::BF16,
        row_stride,
        col_stride,
    };
    for accumulate in [false, true] {
        let (a_of, b_of, out) = (of(0, 1, m), of(1, 1, k), of(2, n, 1));
        let (batch, sum) = (Extents::new(), Extents::new());
        let scratch = Some(view(3));
        let all = Gemm { batch, sum, m, n, k, a: a_of, b: b_of, out, accumulate, scratch };
        let mut room = vec![0.0f32; all.block().iter().sum()];
        for (i, result) in results.iter_mut().enumerate() {
            let memory = [a.as_mut_ptr(), b.as_mut_ptr(), result.as_mut_ptr()].map(|p| p.cast());
            let memory = [memory[0], memory[1], memory[2], room.as_mut_ptr()];
            // SAFETY: all vectors have the elements of their matrices.
            unsafe {
                if i == 0 { run(&all, None, &memory, 2) } else { fallback::run(&all, &memory, 2) }
            };
        }
        let wide = results.each_ref().map(|r| r.iter().map(|&x| crate::math::from_bf16(x)));
        let [ours, theirs] = wide;
        for (x, y) in ours.zip(theirs) {
            assert!((x - y).abs() <= 2f32.powi(-7) * x.abs() + 1e-4, "{x} is not {y}");
        }
    }
}

/// And epilogues of its products, which are cut into blocks along both dims, summed over two loops and
/// interpreted: twice the product and a row of numbers.
#[test]
fn epilogues_of_the_fallback_agree() {
    use shardc_ir::kernel::{Binary, Load, Rows, Scalar, Store, THEN, Then, View};
    let [m, n, k] = [600, 300, 33];
    let view = |operand, strides: &[usize]| View {
        operand,
        offset: 0,
        strides: Extents::from_slice(strides),
    };
    for elem in [Elem::F32, Elem::BF16] {
        let words = |v: Vec<f32>| -> Vec<f32> {
            let half = |p: &[f32]| {
                let [a, b] = [p[0], p[1]].map(|x| u32::from(crate::math::to_bf16(x)));
                f32::from_bits(a | b << 16)
            };
            if elem == Elem::BF16 { v.chunks(2).map(half).collect() } else { v }
        };
        let (mut a, mut b) = (words(numbers(2 * m * k, 5)), words(numbers(2 * k * n, 6)));
        let mut row = numbers(n, 7);
        let of = |operand, sum: &[usize], row_stride, elem| Matrix {
            view: view(operand, sum),
            elem,
            row_stride,
            col_stride: 1,
        };
        let product = Gemm {
            batch: Extents::new(),
            sum: Extents::from_slice(&[2]),
            m,
            n,
            k,
            a: of(0, &[m * k], k, elem),
            b: of(1, &[k * n], n, elem),
            out: of(3, &[], n, Elem::F32),
            accumulate: false,
            scratch: None,
        };
        let block = |cols| Rows {
            outer: Extents::from_slice(&THEN[..1]),
            inner: Extents::from_slice(&[cols]),
            loads: vec![
                Load { view: view(0, &[THEN[1], 1]), elem: Elem::F32 },
                Load { view: view(1, &[0, 1]), elem: Elem::F32 },
            ],
            body: vec![
                Scalar::Load(0),
                Scalar::Load(1),
                Scalar::Binary(Binary::Add, 0, 0),
                Scalar::Binary(Binary::Add, 2, 1),
            ],
            stores: vec![Store { view: view(2, &[n, 1]), elem: Elem::F32, value: 3 }],
            ..Rows::default()
        };
        let blocks = [THEN[1], n % THEN[1]].map(block).into_iter().collect();
        let (reads, writes) = (vec![of(2, &[], 0, Elem::F32)], vec![product.out.clone()]);
        let then = Then { product: product.clone(), blocks, reads, writes };
        let mut results = [(); 3].map(|()| vec![0.0f32; m * n]);
        for (i, result) in results.iter_mut().enumerate() {
            let memory = [&mut a, &mut b, &mut row, result].map(|v| v.as_mut_ptr());
            let epilogue = Epilogue { then: &then, memory: &memory, native: None };
            // SAFETY: all vectors have the elements of their matrices.
            unsafe {
                match i {
                    0 => run(&product, None, &memory, 2),
                    1 => run(&product, Some(&epilogue), &memory, 2),
                    _ => fallback::run_then(&product, &epilogue, &memory, 2),
                }
            }
        }
        for (i, x) in results[0].iter().enumerate() {
            let want = 2.0 * x + row[i % n];
            for got in [results[1][i], results[2][i]] {
                assert!((got - want).abs() < 1e-4, "{i}: {got} is not {want}");
            }
        }
    }
}
