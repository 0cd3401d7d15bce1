//! Counter-based random numbers: a number depends on (seed, name, step, global index) and on nothing
//! else, so every mesh draws the same.
//!
//! The generator is Philox 4x32-10 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3").

/// The 4 words of Philox 4x32-10 for a counter and a key.
pub fn philox(mut c: [u32; 4], mut k: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(c[0]) * 0xD251_1F53;
        let b = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// A stream of numbers, indexed by global position.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    key: [u32; 2],
    step: u32,
}

impl Stream {
    /// The stream of a tensor (or of a dropout) at a step; initial weights use step 0.
    pub fn new(seed: u64, name: &str, step: u32) -> Stream {
        // FNV-1a of the name, so that streams of different names are unrelated.
        let h = name.bytes().fold(0xcbf2_9ce4_8422_2325 ^ seed, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
        });
        let h = h ^ seed.rotate_left(32);
        Stream { key: [h as u32, (h >> 32) as u32], step }
    }

    fn words(&self, block: u64) -> [u32; 4] {
        philox([block as u32, (block >> 32) as u32, self.step, 0], self.key)
    }

    /// Uniform in (0, 1), at a global index.
    pub fn uniform(&self, index: u64) -> f64 {
        let w = self.words(index / 4)[(index % 4) as usize];
        (f64::from(w) + 0.5) / 4_294_967_296.0
    }

    /// Standard normal, at a global index (Box and Muller, 1958).
    pub fn normal(&self, index: u64) -> f64 {
        let w = self.words((index / 2) | (1 << 63));
        let i = (index % 2) as usize * 2;
        let u = |w: u32| (f64::from(w) + 0.5) / 4_294_967_296.0;
        (-2.0 * u(w[i]).ln()).sqrt() * (2.0 * std::f64::consts::PI * u(w[i + 1])).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of Random123's kat_vectors.
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([!0; 4], [!0; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }

    #[test]
    fn normal_has_mean_0_and_variance_1() {
        let s = Stream::new(7, "w", 0);
        let n = 20_000;
        let (a, b) = (0..n).map(|i| s.normal(i)).fold((0.0, 0.0), |(a, b), x| (a + x, b + x * x));
        assert!((a / n as f64).abs() < 0.03 && (b / n as f64 - 1.0).abs() < 0.05);
    }
}
