//! Numbers in files: the element types that are read, as formats name them, and what their bytes say.

use half::{bf16, f16};
use safetensors::Dtype;
use shardc_ir::types::{DType, DTypeFacts};

/// A number as it was stored.
#[derive(Clone, Copy)]
pub enum StoredNumber {
    Float(f64),
    Whole(i64),
}
use StoredNumber::{Float, Whole};

/// What is known of an element type of files.
#[derive(Debug)]
pub struct StoredType {
    /// As NumPy names it; nothing if it does not.
    numpy: &'static str,
    /// As safetensors names it.
    pub name: &'static str,
    /// Its number in `torch.ScalarType`, if archives with it are read.
    torch: Option<u32>,
    pub bytes: usize,
    /// The number whose little-endian bytes these are.
    read: fn(u64) -> StoredNumber,
}

static TYPES: [StoredType; 12] = {
    const fn row(
        numpy: &'static str,
        name: &'static str,
        torch: Option<u32>,
        bytes: usize,
        read: fn(u64) -> StoredNumber,
    ) -> StoredType {
        StoredType { numpy, name, torch, bytes, read }
    }
    [
        row("<f8", "F64", Some(8), 8, |b| Float(f64::from_bits(b))),
        row("<f4", "F32", Some(7), 4, |b| Float(f32::from_bits(b as u32).into())),
        row("", "BF16", Some(13), 2, |b| Float(bf16::from_bits(b as u16).into())),
        row("<f2", "F16", Some(6), 2, |b| Float(f16::from_bits(b as u16).into())),
        row("<i8", "I64", Some(5), 8, |b| Whole(b as i64)),
        row("<i4", "I32", Some(4), 4, |b| Whole((b as i32).into())),
        row("<i2", "I16", Some(3), 2, |b| Whole((b as i16).into())),
        row("|i1", "I8", Some(2), 1, |b| Whole((b as i8).into())),
        row("<u4", "U32", None, 4, |b| Whole(b as i64)),
        row("<u2", "U16", None, 2, |b| Whole(b as i64)),
        row("|u1", "U8", Some(1), 1, |b| Whole(b as i64)),
        row("|b1", "BOOL", Some(12), 1, |b| Whole(b as i64)),
    ]
};

impl PartialEq for StoredType {
    fn eq(&self, other: &StoredType) -> bool {
        self.name == other.name
    }
}

impl StoredType {
    fn find(is: impl Fn(&StoredType) -> bool) -> Option<&'static StoredType> {
        TYPES.iter().find(|t| is(t))
    }
    pub fn of_numpy(name: &str) -> Option<&'static StoredType> {
        StoredType::find(|t| t.numpy == name && !name.is_empty())
    }
    pub fn of_safetensors(name: &str) -> Option<&'static StoredType> {
        StoredType::find(|t| t.name == name)
    }
    pub fn of_torch(number: u32) -> Option<&'static StoredType> {
        StoredType::find(|t| t.torch == Some(number))
    }
    pub fn is_float(&self) -> bool {
        matches!((self.read)(0), Float(_))
    }
    /// The number whose bytes these are.
    pub fn decode(&self, bytes: &[u8]) -> StoredNumber {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        (self.read)(u64::from_le_bytes(wide))
    }
}

/// The element type of weights of which this is true: they are floats.
pub(crate) fn weights(is: impl Fn(&DTypeFacts) -> bool) -> Option<DType> {
    DType::ALL.iter().copied().find(|d| d.is_float() && is(d.facts()))
}

/// What weights of a type of safetensors are.
pub(crate) fn weights_of(d: Dtype) -> Option<DType> {
    let name = format!("{d:?}");
    weights(|f| f.safetensors == name)
}

/// What safetensors calls an element type.
pub(crate) fn file_type(d: DType) -> Dtype {
    let name = d.facts().safetensors;
    serde_json::from_value(name.into()).expect("an element type of the format")
}

/// Weights as they lie in a file, in f32.
pub(crate) fn decode(d: DType, bytes: &[u8], out: &mut [f32]) {
    fn each<const N: usize>(bytes: &[u8], out: &mut [f32], f: impl Fn([u8; N]) -> f32) {
        bytes.as_chunks::<N>().0.iter().zip(out).for_each(|(b, x)| *x = f(*b));
    }
    match d {
        DType::BF16 => each(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        DType::F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        DType::F32 | DType::I32 => each(bytes, out, f32::from_le_bytes),
    }
}

/// Appends the nearest numbers as they lie in a file.
pub(crate) fn encode(d: DType, x: &[f32], out: &mut Vec<u8>) {
    match d {
        DType::BF16 => out.extend(x.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
        DType::F16 => out.extend(x.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
        DType::F32 | DType::I32 => out.extend(x.iter().flat_map(|x| x.to_le_bytes())),
    }
}

/// What a number becomes in a file.
pub(crate) fn rounded(d: DType) -> fn(f32) -> f32 {
    match d {
        DType::BF16 => |x| bf16::from_f32(x).to_f32(),
        DType::F16 => |x| f16::from_f32(x).to_f32(),
        DType::F32 | DType::I32 => |x| x,
    }
}
