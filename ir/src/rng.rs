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

/// FNV-1a of a name, so that streams of different names are unrelated.
fn fnv(seed: u64, name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325 ^ seed, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The number of the stream of a name, for [`Draws`].
pub fn stream(name: &str) -> u64 {
    fnv(0, name)
}

/// What numbers are drawn from.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Distribution {
    /// Between 0 and 1, both excluded: multiples of 2^-24.
    Uniform,
    /// Standard normal.
    Normal,
    /// 1/p with this probability p, else 0.
    Keep(f64),
}

impl Distribution {
    /// A word below this is kept: p · 2^32.
    pub fn threshold(self) -> u64 {
        match self {
            Distribution::Keep(p) => (p * 4_294_967_296.0) as u64,
            Distribution::Uniform | Distribution::Normal => 0,
        }
    }
}

/// The numbers that a stream of a run draws at a step. Each depends on a place and an index there, and on
/// nothing else. Step 0 is an evaluation, in which everything is kept.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    from: Distribution,
    key: [u32; 2],
    step: u32,
}

impl Draws {
    /// `run` is the seed, its lower half first, and the step.
    pub fn new(from: Distribution, stream: u64, run: [u32; 3]) -> Draws {
        let key = [stream as u32 ^ run[0], (stream >> 32) as u32 ^ run[1]];
        Draws { from, key, step: run[2] }
    }

    /// The number at a place, by its index there.
    pub fn at(&self, place: u32, index: u32) -> f64 {
        let words = |block: u32| philox([block, place, self.step, 0], self.key);
        let uniform = |w: u32| (f64::from(w >> 9) + 0.5) / 8_388_608.0;
        match self.from {
            Distribution::Keep(_) if self.step == 0 => 1.0,
            Distribution::Keep(p) => self.kept(words(index / 4)[index as usize % 4], p),
            Distribution::Uniform => uniform(words(index / 4)[index as usize % 4]),
            // Box and Muller, 1958.
            Distribution::Normal => {
                let (w, i) = (words((index / 2) | (1 << 31)), index as usize % 2 * 2);
                let turn = 2.0 * std::f64::consts::PI * uniform(w[i + 1]);
                (-2.0 * uniform(w[i]).ln()).sqrt() * turn.cos()
            }
        }
    }
}

impl Draws {
    /// 1/p where a word says that something is kept, else 0.
    fn kept(&self, word: u32, p: f64) -> f64 {
        if u64::from(word) < self.from.threshold() { 1.0 / p } else { 0.0 }
    }

    /// True if everything is kept: at step 0.
    pub fn keeps_all(&self) -> bool {
        self.step == 0
    }

    /// Calls `f` with the index of each key and what its probability is multiplied by, for the query at a
    /// place in a head; a key is named by its position. Of [`Distribution::Keep`]; any other keeps all.
    pub fn of_keys(
        &self,
        [place, head]: [u32; 2],
        keys: impl IntoIterator<Item = i32>,
        mut f: impl FnMut(usize, f64),
    ) {
        let Distribution::Keep(p) = self.from else { return };
        // Keys of four adjacent positions share the words of one block.
        let mut known: Option<(u32, [u32; 4])> = None;
        for (i, key) in keys.into_iter().enumerate() {
            let (block, word) = (key as u32 / 4, key as usize % 4);
            let words = match known {
                Some((own, words)) if own == block => words,
                // A last word that is not 0: streams of `at` have others.
                _other => philox([block, place, self.step, head.wrapping_add(1)], self.key),
            };
            known = Some((block, words));
            f(i, if self.keeps_all() { 1.0 } else { self.kept(words[word], p) });
        }
    }
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
        let h = fnv(seed, name) ^ seed.rotate_left(32);
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

    /// Rates within 4 deviations; step 0 keeps all; neither places nor streams nor steps share numbers.
    #[test]
    fn draws_have_their_rates() {
        let n = 40_000u32;
        let draw = |from, name: &str, step| Draws::new(from, stream(name), [7, 0, step]);
        for p in [0.1, 0.5, 0.9] {
            let keep = draw(Distribution::Keep(p), "h.0", 1);
            let kept = (0..n).filter(|&i| keep.at(i / 64, i % 64) != 0.0).count() as f64;
            let deviation = (p * (1.0 - p) * f64::from(n)).sqrt();
            assert!((kept - p * f64::from(n)).abs() < 4.0 * deviation, "{p}: {kept}");
            assert!((0..9).all(|i| draw(Distribution::Keep(p), "h.0", 0).at(3, i) == 1.0));
        }
        let (uniform, normal) =
            (draw(Distribution::Uniform, "u", 1), draw(Distribution::Normal, "n", 1));
        let moments = |f: &dyn Fn(u32) -> f64| {
            let all = (0..n).map(f).fold([0.0; 2], |[a, b], x| [a + x, b + x * x]);
            all.map(|s| s / f64::from(n))
        };
        let [mean, square] = moments(&|i| uniform.at(i / 64, i % 64));
        assert!((mean - 0.5).abs() < 0.006 && (square - 1.0 / 3.0).abs() < 0.006);
        let [mean, square] = moments(&|i| normal.at(i / 64, i % 64));
        assert!(mean.abs() < 0.02 && (square - 1.0).abs() < 0.03);
        let other = [
            draw(Distribution::Uniform, "v", 1).at(1, 2),
            draw(Distribution::Uniform, "u", 2).at(1, 2),
            uniform.at(2, 2),
            uniform.at(1, 3),
            uniform.at(2, 1),
            Draws::new(Distribution::Uniform, stream("u"), [8, 0, 1]).at(1, 2),
            Draws::new(Distribution::Uniform, stream("u"), [7, 1, 1]).at(1, 2),
        ];
        assert!(other.iter().all(|x| *x != uniform.at(1, 2)), "{other:?}");
    }

    /// Probabilities of attention: the rate within 4 deviations; each is that of its query, head and key,
    /// in whatever order keys come; no two heads, queries or steps are alike.
    #[test]
    fn draws_of_keys() {
        let (p, n) = (0.8, 4096);
        let own = |at: [u32; 2], step| {
            let draws = Draws::new(Distribution::Keep(p), stream("h.0"), [7, 0, step]);
            let mut all = vec![];
            draws.of_keys(at, 0..n, |_, x| all.push(x));
            all
        };
        let one = own([3, 1], 1);
        assert!(one.iter().all(|x| *x == 0.0 || *x == 1.25));
        let kept = one.iter().filter(|x| **x != 0.0).count() as f64;
        let deviation = (p * (1.0 - p) * f64::from(n)).sqrt();
        assert!((kept - p * f64::from(n)).abs() < 4.0 * deviation, "{kept}");
        // Of two that are independent, so many differ.
        let differ = 2.0 * p * (1.0 - p);
        for other in [own([3, 0], 1), own([3, 2], 1), own([4, 1], 1), own([3, 1], 2)] {
            let unlike = one.iter().zip(&other).filter(|(a, b)| a != b).count() as f64;
            let deviation = (differ * (1.0 - differ) * f64::from(n)).sqrt();
            assert!((unlike - differ * f64::from(n)).abs() < 4.0 * deviation, "{unlike}");
        }
        let draws = Draws::new(Distribution::Keep(p), stream("h.0"), [7, 0, 1]);
        let mut turned = vec![0.0; one.len()];
        draws.of_keys([3, 1], (0..n).rev(), |i, x| turned[one.len() - 1 - i] = x);
        assert_eq!(turned, one);
        assert!(own([3, 1], 0).iter().all(|x| *x == 1.0));
    }

    #[test]
    fn normal_has_mean_0_and_variance_1() {
        let s = Stream::new(7, "w", 0);
        let n = 20_000;
        let (a, b) = (0..n).map(|i| s.normal(i)).fold((0.0, 0.0), |(a, b), x| (a + x, b + x * x));
        assert!((a / n as f64).abs() < 0.03 && (b / n as f64 - 1.0).abs() < 0.05);
    }
}
