//! Arithmetic of integers modulo a prime: the coefficients of sums, and the numbers of the field prover.
//!
//! A finite f64 is a whole number times a power of two, so it has an exact image modulo an odd prime,
//! and sums, products and quotients of images are the images of sums, products and quotients. Two
//! numbers whose images differ are different. The other way round it holds but for accidents: modulo
//! 2^61 - 1 alone 1 and 2^61 are the same, so a coefficient is kept modulo a second prime too.

/// The field of the second prover, and the first of the two moduli of a coefficient.
pub const P: u64 = (1 << 61) - 1;

/// The second modulus of a coefficient.
pub const Q: u64 = (1 << 62) - 57;

/// a + b modulo m, of a and b below m.
pub fn add(a: u64, b: u64, m: u64) -> u64 {
    let s = a + b;
    if s >= m { s - m } else { s }
}

/// -a modulo m.
pub fn neg(a: u64, m: u64) -> u64 {
    if a == 0 { 0 } else { m - a }
}

/// a·b modulo m.
pub fn mul(a: u64, b: u64, m: u64) -> u64 {
    (u128::from(a) * u128::from(b) % u128::from(m)) as u64
}

/// a^n modulo m.
pub fn pow(mut a: u64, mut n: u64, m: u64) -> u64 {
    let mut r = 1;
    while n > 0 {
        if n & 1 == 1 {
            r = mul(r, a, m);
        }
        a = mul(a, a, m);
        n >>= 1;
    }
    r
}

/// 1/a modulo a prime; 0 of 0.
pub fn inverse(a: u64, prime: u64) -> u64 {
    pow(a, prime - 2, prime)
}

/// The image of a finite number; `None` of infinities and NaN.
pub fn image(x: f64, prime: u64) -> Option<u64> {
    if !x.is_finite() {
        return None;
    }
    let bits = x.to_bits();
    let exponent = (bits >> 52 & 0x7ff) as i64;
    let fraction = bits & ((1 << 52) - 1);
    let whole = if exponent == 0 { fraction } else { fraction | 1 << 52 };
    let exponent = exponent.max(1) - 1075;
    let two = pow(2, exponent.unsigned_abs(), prime);
    let two = if exponent < 0 { inverse(two, prime) } else { two };
    let v = mul(whole, two, prime);
    Some(if x < 0.0 { neg(v, prime) } else { v })
}

/// A coefficient: the images of a number modulo [`P`] and [`Q`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Coef([u64; 2]);

const MODULI: [u64; 2] = [P, Q];

impl Coef {
    pub const ZERO: Coef = Coef([0, 0]);
    pub const ONE: Coef = Coef([1, 1]);

    /// `None` of infinities and NaN.
    pub fn of(x: f64) -> Option<Coef> {
        Some(Coef([image(x, P)?, image(x, Q)?]))
    }
    pub fn whole(n: usize) -> Coef {
        Coef(MODULI.map(|m| n as u64 % m))
    }
    fn zip(self, o: Coef, f: impl Fn(u64, u64, u64) -> u64) -> Coef {
        Coef([0, 1].map(|i| f(self.0[i], o.0[i], MODULI[i])))
    }
    #[must_use]
    pub fn plus(self, o: Coef) -> Coef {
        self.zip(o, add)
    }
    #[must_use]
    pub fn times(self, o: Coef) -> Coef {
        self.zip(o, mul)
    }
    #[must_use]
    pub fn minus(self) -> Coef {
        Coef([0, 1].map(|i| neg(self.0[i], MODULI[i])))
    }
    #[must_use]
    pub fn inverse(self) -> Coef {
        Coef([0, 1].map(|i| inverse(self.0[i], MODULI[i])))
    }
    /// Modulo [`P`].
    pub fn in_field(self) -> u64 {
        self.0[0]
    }
}

/// As a decimal number if it is that of an f64, for people: such is a whole number below 2^53 over a power of two.
impl std::fmt::Display for Coef {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        for e in 0..128 {
            let v = mul(self.0[0], pow(2, e, P), P);
            for (n, sign) in [(v, 1.0), (P - v, -1.0)] {
                let x = sign * n as f64 / 2f64.powi(e as i32);
                if n < 1 << 53 && Coef::of(x) == Some(*self) {
                    return write!(f, "{x}");
                }
            }
        }
        write!(f, "({} mod 2^61-1)", self.0[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Miller and Rabin's test with bases that decide all numbers below 2^64.
    fn is_prime(n: u64) -> bool {
        let (mut d, mut twos) = (n - 1, 0);
        while d % 2 == 0 {
            (d, twos) = (d / 2, twos + 1);
        }
        [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37].iter().all(|&a| {
            let mut x = pow(a, d, n);
            x == 1
                || (0..twos).any(|_| {
                    let hit = x == n - 1;
                    x = mul(x, x, n);
                    hit
                })
        })
    }

    #[test]
    fn the_moduli_are_primes() {
        assert!(is_prime(P) && is_prime(Q) && !is_prime(P - 2) && !is_prime(Q + 2));
    }

    #[test]
    fn arithmetic_of_numbers_is_that_of_their_images() {
        let numbers = [0.0, 1.0, -1.0, 0.5, 3.25, 1e-5, 1e-300, -7e200, f64::MIN_POSITIVE / 8.0];
        for x in numbers {
            let c = Coef::of(x).expect("finite");
            assert_eq!(c.plus(c), Coef::of(2.0 * x).expect("finite"));
            assert_eq!(c.minus(), Coef::of(-x).expect("finite"));
            assert_eq!(c.plus(c.minus()), Coef::ZERO);
            if x != 0.0 {
                assert_eq!(c.times(c.inverse()), Coef::ONE, "{x}");
            }
        }
        assert_eq!(Coef::of(0.1 + 0.2).unwrap() == Coef::of(0.3).unwrap(), 0.1 + 0.2 == 0.3);
        assert_eq!(Coef::of(f64::INFINITY), None);
    }

    /// Modulo 2^61 - 1 alone, multiplication by 2^61 would be nothing.
    #[test]
    fn powers_of_two_are_apart() {
        let one = Coef::ONE;
        for e in 1..1000 {
            assert_ne!(Coef::of(2f64.powi(e)).unwrap(), one, "2^{e}");
            assert_ne!(Coef::of(2f64.powi(-e)).unwrap(), one, "2^-{e}");
        }
        assert_eq!(Coef::of(2f64.powi(61)).unwrap().in_field(), one.in_field());
    }

    #[test]
    fn small_numbers_are_shown_as_people_write_them() {
        let show = |x: f64| Coef::of(x).unwrap().to_string();
        assert_eq!([0.0, 1.0, -0.5, 24.0, 0.09375].map(show), ["0", "1", "-0.5", "24", "0.09375"]);
        assert_eq!(
            [0.004, -0.1, 1e-5, 1e15].map(show),
            ["0.004", "-0.1", "0.00001", "1000000000000000"]
        );
        // No f64 is the exact product, or a third.
        let product = Coef::of(0.1).unwrap().times(Coef::of(0.3).unwrap());
        assert!(product.to_string().contains("mod"), "{product}");
        assert!(Coef::whole(3).inverse().to_string().contains("mod"));
    }
}
