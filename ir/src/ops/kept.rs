//! Which probabilities of attention are kept, at random.

use super::draw::StreamName;
use crate::attr::{Attr, AttrCx};
use crate::mesh::Mesh;
use crate::rng::{self, Distribution, Draws};
use crate::tensor::Tensor;

/// Dropout of probabilities of attention (Srivastava et al., 2014): each stays with this probability, above 0 and
/// up to 1, divided by it, and is 0 else, as a stream of numbers at random says. It is written
/// `kept=0.9 h.0.attn`.
#[derive(Clone, PartialEq, Debug)]
pub struct AttentionDropout {
    /// The probability with which one is kept.
    pub rate: f64,
    /// What the numbers are drawn from; another one for every attention.
    pub stream: StreamName,
}

impl AttentionDropout {
    /// The numbers of a run, i32[3] as `draw` has it.
    pub(crate) fn draws(&self, run: &Tensor) -> Draws {
        let word = |i: usize| run.data[i] as i64 as u32;
        let from = Distribution::Keep(self.rate);
        Draws::new(from, rng::stream(&self.stream.0), [word(0), word(1), word(2)])
    }
}

impl Attr for Option<AttentionDropout> {
    const BARE: bool = false;
    fn write(&self, mesh: &Mesh, out: &mut String) {
        if let Some(kept) = self {
            kept.rate.write(mesh, out);
            out.push(' ');
            kept.stream.write(mesh, out);
        }
    }
    fn read(text: &str, cx: &AttrCx) -> Result<Self, String> {
        let (rate, stream) = text.split_once(' ').unwrap_or((text, ""));
        match f64::read(rate, cx) {
            Ok(rate) if rate > 0.0 && rate <= 1.0 => {
                Ok(Some(AttentionDropout { rate, stream: StreamName::read(stream.trim(), cx)? }))
            }
            _ => Err(format!("`{rate}` is not a rate: a number above 0 and up to 1")),
        }
    }
    fn implied() -> Option<Self> {
        Some(None)
    }
    fn is_implied(&self) -> bool {
        self.is_none()
    }
}
