//! f32 functions of whole slices, written so that the compiler vectorises them, each compiled
//! twice: for any processor of the target, and for AVX2. Both give the same bits (nothing is fused).

use crate::element::{Element, with_element};
use shardc_ir::kernel::{Binary, Unary};
use shardc_ir::types::Reduction;

/// Whether the processor has all of these, and kernels may use them.
#[cfg(target_arch = "x86_64")]
macro_rules! has {
    ($($feature:tt),*) => {
        !shardc_ir::cpu::portable() $(&& std::arch::is_x86_feature_detected!($feature))*
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use has;

/// Defines a function whose body is compiled once more for AVX2.
macro_rules! vectorised {
    ($(#[$doc:meta])* fn $name:ident$(<$of:ident: $is:ident>)?($($a:ident: $t:ty),*) $(-> $r:ty)? $body:block) => {
        $(#[$doc])*
        pub(crate) fn $name$(<$of: $is>)?($($a: $t),*) $(-> $r)? {
            #[inline(always)]
            fn any$(<$of: $is>)?($($a: $t),*) $(-> $r)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2$(<$of: $is>)?($($a: $t),*) $(-> $r)? { any($($a),*) }
                if has!("avx2") {
                    // SAFETY: the processor has AVX2.
                    return unsafe { avx2($($a),*) };
                }
            }
            any($($a),*)
        }
    };
}

/// e^x within 2 units in the last place (Cephes' expf; Moshier, 1984): x = n ln 2 + r, with
/// |r| <= ln 2 / 2.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// 1.5 · 2^23: adding it rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let c = x.clamp(-104.0, 89.0);
    let shifted = c * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts, the first short enough for an exact product.
    let r = c - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let y = p * (r * r) + r + 1.0;
    // 2^n in two factors, so that neither overflows where the result does not.
    let i = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = i >> 1;
    let power = |k: i32| f32::from_bits((k.wrapping_add(127) as u32) << 23);
    y * power(half) * power(i.wrapping_sub(half))
}

/// tanh x within 2 units in the last place: a polynomial near 0 (Cephes' tanhf), else by `exp`.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    let z = x * x;
    let p = -5.704_988_7e-3;
    let p = p * z + 2.063_909e-2;
    let p = p * z - 5.373_971_6e-2;
    let p = p * z + 1.333_144_2e-1;
    let p = p * z - 3.333_328e-1;
    let near = p * z * x + x;
    let far = 1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0);
    if x.abs() < 0.625 { near } else { far.copysign(x) }
}

/// The error function within 2 units in the last place: a polynomial near 0, else 1 - e^p(x).
#[inline(always)]
fn erf(x: f32) -> f32 {
    let (t, s) = (x.abs(), x * x);
    let p = s * -5.967_617e-4 + 4.991_194_2e-3;
    let p = p * s - 2.676_813_5e-2;
    let p = p * s + 1.128_199_25e-1;
    let p = p * s - 3.761_253_4e-1;
    let p = p * s + 1.283_791_7e-1;
    let near = p * x + x;
    let q = t * -1.728_534_7e-5 + 3.831_971_3e-4;
    let q = q * s + (t * -3.883_964_4e-3 + 2.425_462_2e-2);
    let q = q * t - 1.067_778_8e-1;
    let q = q * t - 6.348_467e-1;
    let q = q * t - 1.287_175_1e-1;
    let q = q * t - t;
    let far = 1.0 - exp(q);
    if t > 0.927_734_4 { far.copysign(x) } else { near }
}

/// A bf16 as f32, exactly: its bits are the upper half.
#[inline(always)]
pub(crate) fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// The nearest bf16, ties to even; a NaN stays one.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if x.is_nan() { bits >> 16 | 0x40 } else { nearest }) as u16
}

/// An f16 as f32, exactly; a NaN is a quiet one.
#[inline(always)]
pub(crate) fn from_f16(x: u16) -> f32 {
    let bits = u32::from(x);
    let (sign, rest) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
    // Its exponent counts from 15, that of an f32 from 127: this makes numbers of denormal ones too.
    let number = (f32::from_bits(rest) * f32::from_bits((254 - 15) << 23)).to_bits();
    let quiet = if rest > 31 << 23 { 1 << 22 } else { 0 };
    let far = rest | 0x7f80_0000 | quiet;
    f32::from_bits(sign | if rest >= 31 << 23 { far } else { number })
}

/// The nearest f16, ties to even; what is beyond 65504, after rounding, is infinite; a NaN stays one.
#[inline(always)]
pub(crate) fn to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let (sign, rest) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
    let nearest = rest.wrapping_add(0xfff + (rest >> 13 & 1)).wrapping_sub(112 << 23) >> 13;
    // Below 2^-14 digits end at 2^-24: as they do of a sum with 0.5.
    let small = (f32::from_bits(rest) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let number = if rest < 113 << 23 { small } else { nearest.min(0x7c00) };
    let nan = 0x7e00 | (rest >> 13 & 0x1ff);
    (sign | if rest > 0x7f80_0000 { nan } else { number }) as u16
}

vectorised! {
    /// Elements in f32.
    fn widen<T: Element>(x: &[T], out: &mut [f32]) {
        out.iter_mut().zip(x).for_each(|(o, x)| *o = x.number());
    }
}

vectorised! {
    /// The nearest elements.
    fn narrow<T: Element>(x: &[f32], out: &mut [T]) {
        out.iter_mut().zip(x).for_each(|(o, &x)| *o = T::nearest(x));
    }
}

#[inline(always)]
fn each(x: &[f32], out: &mut [f32], f: impl Fn(f32) -> f32) {
    out.iter_mut().zip(x).for_each(|(o, &x)| *o = f(x));
}

/// 1 + e^-x.
#[inline(always)]
pub(crate) fn denominator(x: f32) -> f32 {
    1.0 + exp(-x)
}

/// A function of an element.
#[inline(always)]
pub(crate) fn unary(f: Unary, x: f32) -> f32 {
    match f {
        Unary::Exp => exp(x),
        Unary::ExpM1 => x.exp_m1(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Tanh => tanh(x),
        Unary::Logistic => 1.0 / denominator(x),
        Unary::Silu => x / denominator(x),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Erf => erf(x),
        Unary::Log1P => x.ln_1p(),
        Unary::Floor => x.floor(),
        Unary::Nearest => x.round_ties_even(),
        Unary::Round(d) => with_element!(d, T => T::nearest(x).number()),
    }
}

/// A function of two elements.
#[inline(always)]
pub(crate) fn binary(f: Binary, x: f32, y: f32) -> f32 {
    match f {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div => x / y,
        Binary::Max => larger(x, y),
        Binary::Min => smaller(x, y),
        Binary::AtLeast => f32::from(x >= y),
        Binary::Pow => x.powf(y),
    }
}

/// Partial folds kept side by side: as many as vector registers hold without dependence.
pub(crate) const LANES: usize = 16;

/// Folds a slice into 16 partial folds, each of every 16th element.
#[inline(always)]
fn into_lanes(x: &[f32], acc: &mut [f32; LANES], f: impl Fn(f32, f32) -> f32) {
    let mut chunks = x.chunks_exact(LANES);
    for c in &mut chunks {
        for (a, &x) in acc.iter_mut().zip(c) {
            *a = f(*a, x);
        }
    }
    for (a, &x) in acc.iter_mut().zip(chunks.remainder()) {
        *a = f(*a, x);
    }
}

/// Folds a slice in a fixed order: 16 partial folds, then those in pairs.
#[inline(always)]
fn lanes(x: &[f32], start: f32, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut acc = [start; LANES];
    into_lanes(x, &mut acc, &f);
    in_pairs(acc, f)
}

/// The larger of two; if one is not a number, the other; of zeros the second, as in compiled kernels.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if b.is_nan() || a > b { a } else { b }
}
/// The smaller of two, likewise.
#[inline(always)]
pub(crate) fn smaller(a: f32, b: f32) -> f32 {
    if b.is_nan() || a < b { a } else { b }
}

/// What partial sums are in all, in the order of [`sum`].
pub(crate) fn total(acc: [f32; LANES]) -> f32 {
    in_pairs(acc, |a, b| a + b)
}

/// What partial folds are in all.
pub(crate) fn whole(r: Reduction, acc: [f32; LANES]) -> f32 {
    match r {
        Reduction::Sum => total(acc),
        Reduction::Max => in_pairs(acc, larger),
        Reduction::Min => in_pairs(acc, smaller),
    }
}

#[inline(always)]
fn in_pairs(mut acc: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut n = LANES;
    while n > 1 {
        n /= 2;
        for i in 0..n {
            acc[i] = f(acc[i], acc[i + n]);
        }
    }
    acc[0]
}

vectorised! {
    /// Folds more elements into partial folds, which are numbers: of zeros the fold stays. All pieces
    /// of a row but the last have a multiple of [`LANES`] elements.
    fn fold(r: Reduction, x: &[f32], acc: &mut [f32; LANES]) {
        match r {
            Reduction::Sum => into_lanes(x, acc, |a, b| a + b),
            Reduction::Max => into_lanes(x, acc, |a, x| if x > a { x } else { a }),
            Reduction::Min => into_lanes(x, acc, |a, x| if x < a { x } else { a }),
        }
    }
}

vectorised! {
    fn sum(x: &[f32]) -> f32 { lanes(x, 0.0, |a, b| a + b) }
}
vectorised! {
    fn max(x: &[f32]) -> f32 { lanes(x, f32::NEG_INFINITY, larger) }
}

vectorised! {
    /// Adds products to partial sums. All pieces of a sum but the last have a multiple of
    /// [`LANES`] products.
    fn add_products(x: &[f32], y: &[f32], acc: &mut [f32; LANES]) {
        let (mut a, mut b) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
        for (x, y) in (&mut a).zip(&mut b) {
            acc.iter_mut().zip(x.iter().zip(y)).for_each(|(s, (&x, &y))| *s += x * y);
        }
        let rest = a.remainder().iter().zip(b.remainder());
        acc.iter_mut().zip(rest).for_each(|(s, (&x, &y))| *s += x * y);
    }
}
vectorised! {
    /// `by · x`.
    fn scaled(x: &[f32], by: f32, out: &mut [f32]) { each(x, out, |x| by * x) }
}
vectorised! {
    /// Adds `by · x`.
    fn add_scaled(x: &[f32], by: f32, out: &mut [f32]) {
        out.iter_mut().zip(x).for_each(|(o, &x)| *o += by * x);
    }
}

vectorised! {
    /// Makes a row of scaled scores probabilities before division: e^(score - shift) where a key at
    /// `keys[i]` is seen, being from `first` to `last`, else 0.
    fn weights(scores: &mut [f32], keys: &[i32], reach: [i32; 2], shift: f32) {
        let [first, last] = reach;
        for (x, &k) in scores.iter_mut().zip(keys) {
            let seen = (first <= k) & (k <= last);
            let e = exp(*x - shift);
            *x = if seen { e } else { 0.0 };
        }
    }
}

vectorised! {
    /// [`weights`] of which all are seen.
    fn weights_of_all(scores: &mut [f32], shift: f32) {
        scores.iter_mut().for_each(|x| *x = exp(*x - shift));
    }
}

vectorised! {
    /// Makes scaled scores `cap · tanh(score / cap)`.
    fn cap_scores(scores: &mut [f32], cap: f32) {
        scores.iter_mut().for_each(|x| *x = cap * tanh(*x / cap));
    }
}

vectorised! {
    /// Takes off scores a slope times the distance of their keys.
    fn take_distances(scores: &mut [f32], keys: &[i32], at: i32, slope: f32) {
        for (x, &k) in scores.iter_mut().zip(keys) {
            *x -= slope * at.abs_diff(k) as f32;
        }
    }
}

vectorised! {
    /// (d_p - delta) times the slope of [`cap_scores`] at capped scores, over `d_p`.
    fn cap_grad(d_p: &mut [f32], scores: &[f32], delta: f32, cap: f32) {
        for (d, &s) in d_p.iter_mut().zip(scores) {
            let t = s / cap;
            *d = (*d - delta) * (1.0 - t * t);
        }
    }
}

vectorised! {
    /// Puts -inf where a key is not seen.
    fn mask(scores: &mut [f32], keys: &[i32], reach: [i32; 2]) {
        let [first, last] = reach;
        for (x, &k) in scores.iter_mut().zip(keys) {
            let seen = (first <= k) & (k <= last);
            *x = if seen { *x } else { f32::NEG_INFINITY };
        }
    }
}

vectorised! {
    /// d_score = scale · p (d_p - delta), over `d_p`.
    fn score_grad(d_p: &mut [f32], p: &[f32], delta: f32, scale: f32) {
        for (d, &p) in d_p.iter_mut().zip(p) {
            *d = scale * p * (*d - delta);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(got: f32, want: f64) -> f64 {
        let w = want as f32;
        let ulp = f64::from(f32::from_bits(w.abs().to_bits() + 1)) - f64::from(w.abs());
        (f64::from(got) - want).abs() / ulp
    }

    #[test]
    fn exp_and_tanh_are_accurate() {
        let mut worst = [0.0f64; 2];
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            worst[0] = worst[0].max(ulps(exp(x), f64::from(x).exp()));
            worst[1] = worst[1].max(ulps(tanh(x), f64::from(x).tanh()));
        }
        assert!(worst[0] < 2.0 && worst[1] < 2.5, "{worst:?}");
        assert_eq!(
            [exp(f32::NEG_INFINITY), exp(-200.0), exp(0.0), exp(200.0)],
            [0.0, 0.0, 1.0, f32::INFINITY]
        );
        assert!(exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan());
        assert_eq!([tanh(f32::NEG_INFINITY), tanh(0.0), tanh(f32::INFINITY)], [-1.0, 0.0, 1.0]);
    }

    /// By Taylor's series in f64 (Abramowitz and Stegun, 7.1.6).
    fn wide_erf(x: f64) -> f64 {
        let (mut term, mut sum, mut n) = (x, x, 0.0);
        while term.abs() > 1e-18 * sum.abs() {
            n += 1.0;
            term *= 2.0 * x * x / (2.0 * n + 1.0);
            sum += term;
        }
        std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
    }

    #[test]
    fn erf_is_accurate() {
        let worst = (-45_000..45_000)
            .map(|i| i as f32 * 1e-4)
            .fold(0.0f64, |worst, x| worst.max(ulps(erf(x), wide_erf(f64::from(x)))));
        assert!(worst < 2.0, "{worst}");
        let inf = f32::INFINITY;
        assert_eq!([erf(-inf), erf(-9.0), erf(0.0), erf(inf)], [-1.0, -1.0, 0.0, 1.0]);
        assert!(erf(f32::NAN).is_nan() && erf(-0.0).is_sign_negative());
    }

    /// Against sums of powers of two in f64, for every f16 and the middles between them.
    #[test]
    fn f16_rounds_to_nearest_even() {
        let value = |x: u16| -> f64 {
            let (e, m) = (i32::from(x >> 10 & 31), f64::from(x & 1023));
            let size = match e {
                0 => m * 2f64.powi(-24),
                _ => (1024.0 + m) * 2f64.powi(e - 25),
            };
            if x >> 15 == 1 { -size } else { size }
        };
        for x in (0..=u16::MAX).filter(|x| x >> 10 & 31 != 31) {
            assert_eq!((f64::from(from_f16(x)), to_f16(from_f16(x))), (value(x), x));
            // The number behind it, or what would be behind the largest.
            let next =
                if x & 0x7fff == 0x7bff { 65536f64.copysign(value(x)) } else { value(x + 1) };
            let middle = ((value(x) + next) / 2.0) as f32;
            assert_eq!(to_f16(middle), x + (x & 1), "{middle}");
            let [below, above] = [-1i32, 1].map(|d| middle.to_bits().wrapping_add_signed(d));
            assert_eq!([below, above].map(|b| to_f16(f32::from_bits(b))), [x, x + 1], "{middle}");
        }
        for x in [f32::INFINITY, f32::MAX, 65520.0] {
            assert_eq!((to_f16(x), to_f16(-x)), (0x7c00, 0xfc00));
        }
        assert!(from_f16(0x7c00) == f32::INFINITY && from_f16(0xfc00) == f32::NEG_INFINITY);
        for bits in [0x7f80_0001, 0x7fc0_0000, 0xffff_ffffu32] {
            assert!(from_f16(to_f16(f32::from_bits(bits))).is_nan());
        }
        assert!((0x7c01..0x8000).all(|x| from_f16(x).is_nan() && from_f16(x | 0x8000).is_nan()));
        assert_eq!((to_f16(f32::from_bits(1)), to_f16(-0.0)), (0, 0x8000));
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        let there_and_back = |x: f32| from_bf16(to_bf16(x));
        assert_eq!(there_and_back(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(there_and_back(1.0 + 3.0 / 256.0), 1.0 + 4.0 / 256.0);
        assert_eq!(there_and_back(f32::MAX), f32::INFINITY);
        assert_eq!(there_and_back(f32::NEG_INFINITY), f32::NEG_INFINITY);
        assert!(there_and_back(f32::from_bits(0x7f80_0001)).is_nan());
        assert!((0..=u16::MAX).all(|x| from_bf16(x).is_nan() || to_bf16(from_bf16(x)) == x));
    }

    #[test]
    fn folds_of_nothing() {
        assert_eq!([sum(&[]), max(&[])], [0.0, f32::NEG_INFINITY]);
        let x: Vec<f32> = (0..37).map(|i| i as f32).collect();
        assert_eq!([sum(&x), max(&x)], [666.0, 36.0]);
    }
}
