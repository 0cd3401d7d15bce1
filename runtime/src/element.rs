//! What of the runtime depends on the type of an element: how it lies in memory, and which number it is. A new
//! one has a row in [`with_element!`] and says so of itself; the fastest products have kernels of their own for some.

use crate::math::{from_bf16, from_f16, to_bf16, to_f16};
use shardc_ir::types::DType;

/// An element as it lies in memory.
pub(crate) trait Element: Copy + Default {
    /// In f32, exactly but for large integers.
    fn number(self) -> f32;
    /// The element that is nearest, ties to even; integers are cut off.
    fn nearest(x: f32) -> Self;
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Bf16(u16);

#[derive(Clone, Copy, Default)]
pub(crate) struct F16(u16);

macro_rules! element {
    ($of:ty, $number:expr, $nearest:expr) => {
        impl Element for $of {
            #[inline(always)]
            fn number(self) -> f32 {
                $number(self)
            }
            #[inline(always)]
            fn nearest(x: f32) -> Self {
                $nearest(x)
            }
        }
    };
}
element!(f32, |x| x, |x| x);
element!(i32, |x| x as f32, |x| x as i32);
element!(Bf16, |x: Bf16| from_bf16(x.0), |x| Bf16(to_bf16(x)));
element!(F16, |x: F16| from_f16(x.0), |x| F16(to_f16(x)));

/// `with_element!(dtype, T => …)`: does it with `T` as what elements of this type are in memory.
macro_rules! with_element {
    ($dtype:expr, $of:ident => $then:expr) => {{
        use shardc_ir::types::DType;
        macro_rules! with {
            ($own:ty) => {{
                type $of = $own;
                $then
            }};
        }
        match $dtype {
            DType::F32 => with!(f32),
            DType::BF16 => with!(crate::element::Bf16),
            DType::F16 => with!(crate::element::F16),
            DType::I32 => with!(i32),
        }
    }};
}
pub(crate) use with_element;

/// One element as a number.
///
/// # Safety
/// It is valid.
#[inline(always)]
pub(crate) unsafe fn get(at: *const f32, dtype: DType) -> f32 {
    // SAFETY: by the caller.
    with_element!(dtype, T => unsafe { *at.cast::<T>() }.number())
}

/// Writes the nearest element.
///
/// # Safety
/// As for [`get`], for writes.
#[inline(always)]
pub(crate) unsafe fn set(at: *mut f32, dtype: DType, x: f32) {
    // SAFETY: by the caller.
    with_element!(dtype, T => unsafe { *at.cast::<T>() = T::nearest(x) });
}
