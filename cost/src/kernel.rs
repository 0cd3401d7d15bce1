//! Seconds of one launch on one device, by the formulas of `docs/cost.md`.

use crate::device::{Device, Precision};
use shardc_ir::diag::Result;

/// Tiles of a product on a machine that says nothing of its own: rows, columns, and the share of the peak that
/// a full one of them reaches.
pub const TILES: [[f64; 3]; 5] = [
    [256.0, 128.0, 1.0],
    [128.0, 256.0, 1.0],
    [128.0, 128.0, 0.93],
    [128.0, 64.0, 0.80],
    [64.0, 64.0, 0.65],
];

/// Lengths of rows, columns and the inner dim of which a product spends as much beside its arithmetic, there: tiles
/// begin and end along the inner dim.
pub const SHORT: [f64; 3] = [0.0, 0.0, 160.0];

/// What the kernels of attention reach backward, of what they reach forward, on a machine that says nothing of its
/// own.
pub const ATTENTION_BACKWARD: f64 = 0.85;

/// A product of m x k and k x n, so many times.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Gemm {
    pub m: f64,
    pub n: f64,
    pub k: f64,
    pub batch: f64,
}

impl Gemm {
    /// One product.
    pub fn new(m: f64, n: f64, k: f64) -> Gemm {
        Gemm { m, n, k, batch: 1.0 }
    }

    /// Multiplications and additions.
    pub fn flops(self) -> f64 {
        2.0 * self.m * self.n * self.k * self.batch
    }

    /// The product that gives the gradient of its first operand.
    pub fn input_gradient(self) -> Gemm {
        Gemm { n: self.k, k: self.n, ..self }
    }

    /// The product that gives the gradient of its second operand.
    pub fn weight_gradient(self) -> Gemm {
        Gemm { m: self.k, k: self.m, ..self }
    }

    /// Share of the processors' time in which tiles that count are computed: the best tile, by how full
    /// tiles and rounds are, and by how short its dims are.
    pub fn fullness(self, sms: f64, all: &[[f64; 3]], short: [f64; 3]) -> f64 {
        let of = |&[tm, tn, q]: &[f64; 3]| {
            let tiles = (self.m / tm).ceil() * (self.n / tn).ceil() * self.batch;
            let whole = (tiles / sms).ceil() * sms * tm * tn;
            q * self.m * self.n * self.batch / whole.max(1.0)
        };
        all.iter().map(of).fold(0.0, f64::max) / self.lengthened(short)
    }

    /// By how much a product takes longer for its short dims: each of these lengths over that of its dim is added
    /// to 1. What is packed or read once per row, per column, or per step along the inner dim takes such a part.
    pub fn lengthened(self, [m, n, k]: [f64; 3]) -> f64 {
        1.0 + m / self.m + n / self.n + k / self.k
    }

    /// Seconds with operands of this type; the result is at least bf16.
    ///
    /// # Errors
    /// `device` if the device has no such products.
    pub fn seconds(self, d: &Device, p: Precision) -> Result<f64> {
        let tiles = d.tiles.as_deref().unwrap_or(&TILES);
        self.by(d, p, d.fit.gemm.value, (tiles, d.short.unwrap_or(SHORT)))
    }

    /// Seconds of a product by the compiler's own kernels, which go on with work on its result that moves these bytes
    /// beside it.
    ///
    /// # Errors
    /// As for [`Gemm::seconds`].
    pub fn seconds_then(self, d: &Device, p: Precision, bytes: f64) -> Result<f64> {
        let Some(e) = &d.epilogue else { return Ok(self.seconds(d, p)? + rows(d, bytes, 0.0)) };
        let share = e.gemm.get(&p).copied().unwrap_or(d.fit.gemm.value);
        Ok(self.by(d, p, share, (&e.tiles, e.short))? + bytes / e.speed)
    }

    /// Seconds at a share of the peak, with these tiles and lengths.
    fn by(
        self,
        d: &Device,
        p: Precision,
        share: f64,
        (tiles, short): (&[[f64; 3]], [f64; 3]),
    ) -> Result<f64> {
        if self.flops() == 0.0 {
            return Ok(0.0);
        }
        let fullness = self.fullness(f64::from(d.sms), tiles, short);
        let compute = self.flops() / (d.peak(p)? * share * fullness);
        let operands = (self.m * self.k + self.k * self.n) * p.bytes();
        let bytes = (operands + self.m * self.n * p.wide().bytes()) * self.batch;
        Ok(compute.max(bytes / d.memory_speed()) + d.fit.kernel.value)
    }
}

/// Seconds of kernels that move bytes.
pub fn rows(d: &Device, bytes: f64, launches: f64) -> f64 {
    bytes / d.memory_speed() + launches * d.fit.kernel.value
}

/// Attention whose scores stay in the processors.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attention {
    pub rows: f64,
    pub heads: f64,
    /// Queries and keys of a row that this device computes.
    pub queries: f64,
    pub keys: f64,
    /// Width of queries and keys, and of values.
    pub width: f64,
    pub values: f64,
    /// Part of the scores that count: a half, if all are causal.
    pub seen: f64,
    /// Part of the scores that are computed: all that some query of a block sees.
    pub computed: f64,
}

impl Attention {
    /// Multiplications and additions forward; backward has 2.5 times as many.
    pub fn flops(self) -> f64 {
        let scores = self.rows * self.heads * self.queries * self.keys * self.seen;
        2.0 * scores * (self.width + self.values)
    }

    /// Seconds forward and backward with kernels of a generation that is in the device's table.
    ///
    /// # Errors
    /// `device` if the device has no such products.
    pub fn seconds(self, d: &Device, share: f64, p: Precision) -> Result<(f64, f64)> {
        let blocks = self.rows * self.heads * (self.queries / d.block()).ceil();
        let full = (blocks / f64::from(d.sms)).min(1.0);
        let speed = d.peak(p)? * share * full;
        if self.flops() == 0.0 {
            return Ok((0.0, 0.0));
        }
        let scores = self.rows * self.heads * self.queries * self.keys * self.computed;
        let products = 2.0 * (self.width + self.values);
        // Scores are weighed in both directions, beside their products.
        let weighing = d.weighing.unwrap_or(0.0);
        let forward = scores * (products + weighing) / speed;
        let back = d.backward.unwrap_or(ATTENTION_BACKWARD);
        let backward = scores * (2.5 * products + weighing) / (speed * back);
        let kernel = d.fit.kernel.value;
        Ok((forward + kernel, backward + kernel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Epilogue;

    fn h100() -> Device {
        Device::named("h100-sxm").expect("known")
    }

    fn causal() -> Attention {
        Attention {
            rows: 4.0,
            heads: 32.0,
            queries: 8192.0,
            keys: 8192.0,
            width: 128.0,
            values: 128.0,
            seen: 0.5,
            computed: 0.5,
        }
    }

    #[test]
    fn a_large_product_reaches_the_share_of_the_peak_and_small_ones_less() {
        let d = h100();
        let rate = |g: Gemm| g.flops() / g.seconds(&d, Precision::Bf16).expect("bf16");
        let peak = d.peak(Precision::Bf16).expect("bf16") * d.fit.gemm.value;
        let large = rate(Gemm::new(16384.0, 16896.0, 16384.0));
        assert!(large > 0.95 * peak && large < peak, "{large}");
        let sizes = [64.0, 512.0, 4096.0, 16384.0];
        let rates = sizes.map(|n| rate(Gemm::new(n, n, n)));
        assert!(rates.windows(2).all(|w| w[0] < w[1]), "{rates:?}");
        let fp8 = Gemm::new(16384.0, 16896.0, 16384.0).seconds(&d, Precision::Fp8).expect("fp8");
        assert!(fp8 < 0.55 * large.recip() * Gemm::new(16384.0, 16896.0, 16384.0).flops());
    }

    #[test]
    fn gradients_have_the_flops_of_their_product() {
        let g = Gemm::new(100.0, 200.0, 300.0);
        assert_eq!(g.flops(), g.input_gradient().flops());
        assert_eq!(g.flops(), g.weight_gradient().flops());
        assert_eq!(g.weight_gradient(), Gemm::new(300.0, 200.0, 100.0));
    }

    /// Quantised: one row of tiles more than the processors hold costs a round.
    #[test]
    fn rounds_of_tiles_are_whole() {
        let d = h100();
        let time =
            |n: f64| Gemm::new(n, 4096.0, 4096.0).seconds(&d, Precision::Bf16).expect("bf16");
        assert!(time(8448.0) / time(8449.0 + 256.0) < 0.98);
    }

    /// Our own kernels are priced by their own constants, where a machine has some; what they do to a result costs
    /// its bytes.
    #[test]
    fn products_with_an_epilogue_have_constants_of_their_own() {
        let (plain, g) = (h100(), Gemm::new(8192.0, 8192.0, 8192.0));
        let p = Precision::Bf16;
        let of = |d: &Device, bytes: f64| g.seconds_then(d, p, bytes).expect("bf16");
        let moved = of(&plain, 1e9) - g.seconds(&plain, p).expect("bf16");
        assert!((moved - 1e9 / plain.memory_speed()).abs() < 1e-9);
        let (short, tiles) = ([0.0; 3], vec![[1.0, 1.0, 1.0]]);
        let gemm = [(p, 0.25)].into();
        let own = Epilogue { speed: 1e12, short, tiles, gemm };
        let d = Device { epilogue: Some(own), ..plain.clone() };
        let want = g.flops() / (0.25 * d.peak(p).expect("bf16")) + d.fit.kernel.value;
        assert!((of(&d, 0.0) / want - 1.0).abs() < 1e-5, "{} {want}", of(&d, 0.0));
        assert!((of(&d, 1e9) - of(&d, 0.0) - 1e-3).abs() < 1e-9);
        assert_eq!(g.seconds(&d, p), g.seconds(&plain, p));
        let slow = Device { backward: Some(0.425), ..plain.clone() };
        let a = causal();
        let time = |d: &Device| a.seconds(d, 0.5, p).expect("bf16");
        assert_eq!(time(&slow).0, time(&plain).0);
        let kernel = plain.fit.kernel.value;
        assert!(((time(&slow).1 - kernel) / (time(&plain).1 - kernel) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn causal_attention_is_half_the_work_and_few_blocks_are_slow() {
        let d = h100();
        let a = causal();
        let whole = Attention { seen: 1.0, computed: 1.0, ..a };
        assert_eq!(2.0 * a.flops(), whole.flops());
        // What is computed beside what counts takes time, and so does weighing scores.
        let of = |d: &Device, a: Attention| a.seconds(d, 0.5, Precision::Bf16).expect("bf16");
        let kernel = d.fit.kernel.value;
        let more = of(&d, Attention { computed: 0.6, ..a });
        assert!(((more.0 - kernel) / (of(&d, a).0 - kernel) - 1.2).abs() < 1e-9);
        let slow = Device { weighing: Some(512.0), ..d.clone() };
        assert!(((of(&slow, a).0 - kernel) / (of(&d, a).0 - kernel) - 2.0).abs() < 1e-9);
        assert!(((of(&slow, a).1 - kernel) / (of(&d, a).1 - kernel) - 1.4).abs() < 1e-9);
        let time = |a: Attention| a.seconds(&d, 0.5, Precision::Bf16).expect("bf16").0;
        let one = Attention { rows: 1.0, heads: 1.0, queries: 128.0, ..a };
        assert!(time(one) * (4.0 * 32.0 * 64.0) > 10.0 * time(a));
    }
}
