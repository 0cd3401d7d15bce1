//! What the processes of a job know and others do not, and what follows from it for a connection: the
//! proof of each side, and a key for each direction.
//!
//! Keyed BLAKE3 is the message authentication code: `K` is the secret's, `a` and `b` are numbers that the
//! two sides draw for this connection, and whatever is shown or used is `MAC(K, purpose, a, b)`. So what
//! was heard of one connection is of no use in another, nor what one side says in the mouth of the other.
//! Nothing is encrypted.

use shardc_ir::diag::{Diag, Result};

/// Bytes of a number that a side draws, and of a proof.
pub(super) const NONCE: usize = 32;
/// Bytes of the tag of a frame.
pub(super) const TAG: usize = 16;
/// Fewest bytes of a secret.
pub const LEAST: usize = 16;

/// The secret of a job, as a key.
#[derive(Clone)]
pub struct Secret {
    key: [u8; 32],
    known: bool,
}

impl Secret {
    /// The key of a text, which has [`LEAST`] bytes or more.
    pub fn of(text: &[u8]) -> Secret {
        Secret { key: blake3::derive_key("shardc 2026 control connections", text), known: true }
    }
    /// The key of a job that has no secret: everybody knows it.
    pub fn none() -> Secret {
        Secret { known: false, ..Secret::of(b"there is no secret") }
    }
    /// Whether others do not know it.
    pub fn is_secret(&self) -> bool {
        self.known
    }
}

/// Random bytes as hexadecimal text, a secret for [`Secret::of`].
///
/// # Errors
/// `cluster` if the operating system gives none.
pub fn draw() -> Result<String> {
    Ok(random()?.iter().map(|b| format!("{b:02x}")).collect())
}

/// A number that nobody can foresee.
pub(super) fn random() -> Result<[u8; NONCE]> {
    let mut out = [0; NONCE];
    let mut have = 0;
    while have < NONCE {
        have += rustix::rand::getrandom(&mut out[have..], rustix::rand::GetRandomFlags::empty())
            .map_err(|e| {
                Diag::new("cluster", format!("the system gives no random numbers: {e}"))
                    .help("run on a kernel with getrandom (Linux 3.17 or later)")
            })?;
    }
    Ok(out)
}

/// What a pair of drawn numbers makes of a secret.
pub(super) struct Pair<'a> {
    pub secret: &'a Secret,
    /// Drawn by who has called, and by who was called.
    pub caller: [u8; NONCE],
    pub called: [u8; NONCE],
}

impl Pair<'_> {
    fn derive(&self, purpose: &str) -> [u8; 32] {
        let mut mac = blake3::Hasher::new_keyed(&self.secret.key);
        mac.update(&self.caller).update(&self.called).update(purpose.as_bytes());
        *mac.finalize().as_bytes()
    }
    /// What the side that was called shows first.
    pub fn proof(&self) -> [u8; NONCE] {
        self.derive("the called one knows the secret")
    }
    /// Whether this is that proof; compared in constant time.
    pub fn is_proof(&self, shown: [u8; NONCE]) -> bool {
        blake3::Hash::from_bytes(shown) == blake3::Hash::from_bytes(self.proof())
    }
    /// Of frames to the side that was called.
    pub fn to_called(&self) -> Seal {
        Seal { key: self.derive("to the called one"), count: 0 }
    }
    /// Of frames to the side that has called.
    pub fn to_caller(&self) -> Seal {
        Seal { key: self.derive("to the caller"), count: 0 }
    }
}

/// The key of one direction of a connection, and how many frames it has sealed.
pub(super) struct Seal {
    key: [u8; 32],
    count: u64,
}

impl Seal {
    /// The tag of the next frame.
    pub fn next(&mut self, head: &[u8], data: &[u8]) -> [u8; TAG] {
        let mut mac = blake3::Hasher::new_keyed(&self.key);
        mac.update(&self.count.to_le_bytes()).update(head).update(data);
        self.count += 1;
        mac.finalize().as_bytes()[..TAG].try_into().expect("16 of 32 bytes")
    }
    /// Whether the next frame has this tag; compared in constant time.
    pub fn is_next(&mut self, head: &[u8], data: &[u8], tag: [u8; TAG]) -> bool {
        let own = self.next(head, data);
        own.iter().zip(tag).fold(0, |d, (a, b)| d | (a ^ b)) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(secret: &Secret, caller: u8) -> Pair<'_> {
        Pair { secret, caller: [caller; NONCE], called: [9; NONCE] }
    }

    #[test]
    fn a_proof_is_of_one_secret_and_one_connection() {
        let (a, b) = (Secret::of(b"one secret of a job"), Secret::of(b"another secret, longer"));
        let proof = pair(&a, 1).proof();
        assert!(pair(&a, 1).is_proof(proof));
        assert!(!pair(&b, 1).is_proof(proof) && !pair(&a, 2).is_proof(proof));
        assert!(!pair(&Secret::none(), 1).is_proof(proof));
        assert!(a.is_secret() && !Secret::none().is_secret());
    }

    #[test]
    fn frames_are_sealed_by_direction_and_order() {
        let a = Secret::of(b"one secret of a job");
        let of = || (pair(&a, 1).to_called(), pair(&a, 1).to_called());
        let (mut out, mut to) = of();
        let (first, second) = (out.next(b"h", b"data"), out.next(b"h", b"data"));
        assert_ne!(first, second);
        assert!(to.is_next(b"h", b"data", first) && to.is_next(b"h", b"data", second));
        let wrong: [(&[u8], &[u8]); 2] = [(b"i", b"data"), (b"h", b"dat!")];
        for (head, data) in wrong {
            assert!(!of().1.is_next(head, data, first));
        }
        assert!(!of().1.is_next(b"h", b"data", second), "a frame twice, or one left out");
        assert!(!pair(&a, 1).to_caller().is_next(b"h", b"data", first), "sent back");
    }

    #[test]
    fn secrets_that_are_drawn_differ() {
        let (a, b) = (draw().expect("random"), draw().expect("random"));
        assert!(a != b && a.len() == 2 * NONCE && a.len() >= LEAST);
    }
}
