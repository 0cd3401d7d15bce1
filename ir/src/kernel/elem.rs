//! Elements of memory.

use crate::types::DType;

/// How an element of memory is read and written.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Elem {
    #[default]
    F32,
    BF16,
    F16,
    I32,
}

/// A float of 16 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Half {
    /// 8 digits and the exponents of an f32.
    BF16,
    /// 11 digits, up to 65504.
    F16,
}

impl Elem {
    /// The elements of a type.
    pub fn of(d: DType) -> Elem {
        match d {
            DType::F32 => Elem::F32,
            DType::BF16 => Elem::BF16,
            DType::F16 => Elem::F16,
            DType::I32 => Elem::I32,
        }
    }
    /// Which float of 16 bits it is, if it is one.
    pub fn half(self) -> Option<Half> {
        match self {
            Elem::BF16 => Some(Half::BF16),
            Elem::F16 => Some(Half::F16),
            Elem::F32 | Elem::I32 => None,
        }
    }
    /// Size in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Elem::F32 | Elem::I32 => 4,
            Elem::BF16 | Elem::F16 => 2,
        }
    }
}
