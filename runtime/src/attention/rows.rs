//! Rows of scores: masks, exponentials and their gradients. With AVX-512 a row is read once per
//! step; elsewhere by the functions of whole slices.

use crate::math;

/// Which keys a query sees: those at positions from one to another; `None` if it sees all. And of these those
/// of its segment, if some are of others.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    pub keys: Option<&'a [i32]>,
    pub reach: [i32; 2],
    pub segment: Option<(i32, &'a [i32])>,
}

impl Seen<'_> {
    /// Sets what is of other segments.
    fn set_others(&self, scores: &mut [f32], to: f32) {
        let Some((own, keys)) = self.segment else { return };
        for (x, _) in scores.iter_mut().zip(keys).filter(|(_, k)| **k != own) {
            *x = to;
        }
    }
}

/// The largest score that is seen; -inf if there is none. A NaN need not be found.
pub(super) fn largest(scores: &mut [f32], seen: Seen) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if math::has!("avx512f") {
        // SAFETY: the processor has it.
        return unsafe { wide::largest(scores, seen) };
    }
    largest_of_slice(scores, seen)
}

fn largest_of_slice(scores: &mut [f32], seen: Seen) -> f32 {
    if let Some(keys) = seen.keys {
        math::mask(scores, keys, seen.reach);
    }
    seen.set_others(scores, f32::NEG_INFINITY);
    math::max(scores)
}

/// Makes scores e^(score - shift) where a key is seen, else 0; returns the sum.
pub(super) fn weigh(scores: &mut [f32], seen: Seen, shift: f32) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if math::has!("avx512f") {
        // SAFETY: the processor has it.
        return unsafe { wide::weigh(scores, seen, shift) };
    }
    weigh_slice(scores, seen, shift)
}

fn weigh_slice(scores: &mut [f32], seen: Seen, shift: f32) -> f32 {
    match seen.keys {
        Some(keys) => math::weights(scores, keys, seen.reach, shift),
        None => math::weights_of_all(scores, shift),
    }
    seen.set_others(scores, 0.0);
    math::sum(scores)
}

/// Makes scores weights, as [`weigh`] does, and gradients of weights those of scores:
/// d_score = scale · p (d_p - delta).
pub(super) fn grad(
    scores: &mut [f32],
    d_p: &mut [f32],
    seen: Seen,
    [shift, delta, scale]: [f32; 3],
) {
    #[cfg(target_arch = "x86_64")]
    if math::has!("avx512f") {
        // SAFETY: the processor has it.
        return unsafe { wide::grad(scores, d_p, seen, [shift, delta, scale]) };
    }
    let _sum = weigh(scores, seen, shift);
    math::score_grad(d_p, scores, delta, scale);
}

#[cfg(target_arch = "x86_64")]
mod wide {
    use super::Seen;
    use std::arch::x86_64::*;

    /// The lanes of 16 elements from `i` on of which there are `n`, and of these who is seen.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn lanes(seen: &Seen, i: usize, n: usize) -> (__mmask16, __mmask16) {
        let there = if n - i >= 16 { u16::MAX } else { (1 << (n - i)) - 1 };
        let one = match seen.segment {
            None => there,
            Some((own, keys)) => {
                let keys = &keys[i..n];
                // SAFETY: keys beyond the last are masked.
                let keys = unsafe { _mm512_maskz_loadu_epi32(there, keys.as_ptr()) };
                _mm512_mask_cmpeq_epi32_mask(there, keys, _mm512_set1_epi32(own))
            }
        };
        let Some(keys) = seen.keys else { return (there, one) };
        let keys = &keys[i..n];
        // SAFETY: keys beyond the last are masked.
        let keys = unsafe { _mm512_maskz_loadu_epi32(there, keys.as_ptr()) };
        let [first, last] = seen.reach.map(|p| _mm512_set1_epi32(p));
        let near = _mm512_mask_cmple_epi32_mask(one, keys, last);
        (there, _mm512_mask_cmple_epi32_mask(near, first, keys))
    }

    /// e^x within 2 units in the last place: as `math::exp`, with fused steps.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn exp(x: __m512) -> __m512 {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        let of = |x: f32| _mm512_set1_ps(x);
        // The second operand is the result where one is a NaN.
        let c = _mm512_min_ps(of(89.0), _mm512_max_ps(of(-104.0), x));
        let n = _mm512_mul_ps(c, of(std::f32::consts::LOG2_E));
        let n = _mm512_roundscale_ps::<NEAREST>(n);
        let r = _mm512_fnmadd_ps(n, of(0.693_359_4), c);
        let r = _mm512_fmadd_ps(n, of(2.121_944_4e-4), r);
        let mut p = of(1.987_569_1e-4);
        for by in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = _mm512_fmadd_ps(p, r, of(by));
        }
        let y = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, of(1.0)));
        _mm512_scalef_ps(y, n)
    }

    /// Calls `f` for every 16 elements of a row: where they begin, who is there, who is seen.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn each(n: usize, seen: &Seen, mut f: impl FnMut(usize, __mmask16, __mmask16)) {
        for i in (0..n).step_by(16) {
            let (there, seen) = lanes(seen, i, n);
            f(i, there, seen);
        }
    }

    #[target_feature(enable = "avx512f")]
    pub fn largest(scores: &[f32], seen: Seen) -> f32 {
        let none = _mm512_set1_ps(f32::NEG_INFINITY);
        let mut max = none;
        each(scores.len(), &seen, |i, _, seen| {
            // SAFETY: elements beyond the last are masked.
            let x = unsafe { _mm512_mask_loadu_ps(none, seen, scores.as_ptr().add(i)) };
            max = _mm512_max_ps(x, max);
        });
        _mm512_reduce_max_ps(max)
    }

    #[target_feature(enable = "avx512f")]
    pub fn weigh(scores: &mut [f32], seen: Seen, shift: f32) -> f32 {
        let shift = _mm512_set1_ps(shift);
        let mut sum = _mm512_setzero_ps();
        each(scores.len(), &seen, |i, there, seen| {
            let at = scores.as_mut_ptr().wrapping_add(i);
            // SAFETY: elements beyond the last are masked.
            unsafe {
                let x = exp(_mm512_sub_ps(_mm512_maskz_loadu_ps(there, at), shift));
                let x = _mm512_maskz_mov_ps(seen, x);
                _mm512_mask_storeu_ps(at, there, x);
                sum = _mm512_add_ps(sum, x);
            }
        });
        _mm512_reduce_add_ps(sum)
    }

    #[target_feature(enable = "avx512f")]
    pub fn grad(scores: &mut [f32], d_p: &mut [f32], seen: Seen, [shift, delta, scale]: [f32; 3]) {
        let [shift, delta, scale] = [shift, delta, scale].map(|x| _mm512_set1_ps(x));
        let n = scores.len().min(d_p.len());
        each(n, &seen, |i, there, seen| {
            let (at, to) = (scores.as_mut_ptr().wrapping_add(i), d_p.as_mut_ptr().wrapping_add(i));
            // SAFETY: elements beyond the last are masked.
            unsafe {
                let p = exp(_mm512_sub_ps(_mm512_maskz_loadu_ps(there, at), shift));
                let p = _mm512_maskz_mov_ps(seen, p);
                _mm512_mask_storeu_ps(at, there, p);
                let d = _mm512_sub_ps(_mm512_maskz_loadu_ps(there, to), delta);
                _mm512_mask_storeu_ps(to, there, _mm512_mul_ps(_mm512_mul_ps(scale, p), d));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(keys: Option<&[i32]>) -> Seen<'_> {
        Seen { keys, reach: [11, 30], segment: None }
    }

    #[test]
    fn weights_are_accurate_and_masked() {
        let keys: Vec<i32> = (0..37).collect();
        let scores: Vec<f32> = (0..37).map(|i| (i * 29 % 37) as f32 * 2.5 - 90.0).collect();
        let segments: Vec<i32> = keys.iter().map(|k| k / 5).collect();
        let of_segment = |keys| Seen { segment: Some((3, &segments[..])), ..all(keys) };
        let own = [of_segment(None), of_segment(Some(&keys[..]))];
        type Ways = (fn(&mut [f32], Seen) -> f32, fn(&mut [f32], Seen, f32) -> f32);
        let ways: [Ways; 2] = [(largest, weigh), (largest_of_slice, weigh_slice)];
        let all = [all(None), all(Some(&keys))].into_iter().chain(own);
        for (seen, (largest, weigh)) in all.flat_map(|s| ways.map(|w| (s, w))) {
            let one = |k: i32| seen.segment.is_none_or(|(own, of)| of[k as usize] == own);
            let sees = |k: i32| (seen.keys.is_none() || (11..=30).contains(&k)) && one(k);
            let mut x = scores.clone();
            let max = largest(&mut x, seen);
            let visible = keys.iter().filter(|&&k| sees(k)).map(|&k| scores[k as usize]);
            assert_eq!(max, visible.fold(f32::NEG_INFINITY, f32::max));
            let mut x = scores.clone();
            let sum = weigh(&mut x, seen, max);
            let mut want = 0.0;
            for (&k, &p) in keys.iter().zip(&x) {
                let e = f64::from(scores[k as usize] - max).exp();
                let e = if sees(k) { e } else { 0.0 };
                assert!((f64::from(p) - e).abs() <= 3e-7 * e + 1e-44, "{k}: {p} is not {e}");
                want += e;
            }
            assert!((f64::from(sum) - want).abs() < 1e-6 * want);
        }
    }

    #[test]
    fn what_is_not_a_number_stays_seen() {
        let keys: Vec<i32> = (0..19).collect();
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = vec![0.5; 19];
            x[17] = bad;
            let (mut plain, mut masked) = (x.clone(), x.clone());
            let shift = largest(&mut x, all(None));
            assert!(weigh(&mut plain, all(None), shift).is_nan());
            // Key 17 is not seen from 16.
            let before = Seen { keys: Some(&keys), reach: [-83, 16], segment: None };
            assert_eq!(largest(&mut masked, before), 0.5);
            assert_eq!(weigh(&mut masked, before, 0.5), 17.0);
        }
    }
}
