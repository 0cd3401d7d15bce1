//! Loops over the elements of a block, 16 at a time: each does one instruction of a row's program,
//! or two that follow each other. A loop is compiled for every kind of operand that it takes where
//! it lies, and for AVX-512, AVX2 and any processor; all give the same bits (nothing is
//! contracted).

// Lanes of several arrays, by one number.
#![allow(clippy::needless_range_loop)]

use crate::element::{Bf16, Element, F16, with_element};
use crate::math;
use crate::math::has;
use shardc_ir::kernel::{Binary, Unary};
use shardc_ir::types::{DType, Reduction};
use std::marker::PhantomData;

/// Elements that are treated at a time.
const LANES: usize = math::LANES;

/// Where three operands and a result begin, how many elements there are, and how many elements a
/// strided operand or result is apart. Who does not use one of them may be given any.
pub(super) type Loop = unsafe fn(*const u8, *const u8, *const u8, *mut u8, usize, usize);

/// How an operand or a result of a loop lies in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ElementKind {
    F32,
    Bf16,
    F16,
    I32,
    /// One f32, which all elements are.
    Same,
    /// The place of an element in its row: the address is that of the first.
    Column,
    /// f32 that are rounded to bf16.
    Rounded,
}

impl From<DType> for ElementKind {
    fn from(d: DType) -> ElementKind {
        match d {
            DType::F32 => ElementKind::F32,
            DType::BF16 => ElementKind::Bf16,
            DType::F16 => ElementKind::F16,
            DType::I32 => ElementKind::I32,
        }
    }
}

/// Reads elements of a kind.
trait Reads {
    /// # Safety
    /// `count` elements from number `i` on are valid; there are 16 lanes at most.
    unsafe fn lanes(at: *const u8, i: usize, count: usize) -> [f32; LANES];
}

/// Writes elements of a kind.
trait Writes {
    /// # Safety
    /// As for [`Reads::lanes`], for writes.
    unsafe fn put(at: *mut u8, i: usize, count: usize, x: [f32; LANES]);
}

/// Elements of a type, next to each other.
struct Adjacent<T>(PhantomData<T>);
struct Repeated;
/// An operand that a formula has no use for.
struct Nothing;
struct ColumnNumbers;
struct RoundedF32;

impl<T: Element> Reads for Adjacent<T> {
    #[inline(always)]
    unsafe fn lanes(at: *const u8, i: usize, count: usize) -> [f32; LANES] {
        let (at, mut x) = (at.cast::<T>().wrapping_add(i), [0.0; LANES]);
        if count == LANES {
            // SAFETY: by the caller.
            let from = unsafe { at.cast::<[T; LANES]>().read_unaligned() };
            for l in 0..LANES {
                x[l] = from[l].number();
            }
            return x;
        }
        for l in 0..count {
            // SAFETY: by the caller.
            x[l] = unsafe { *at.add(l) }.number();
        }
        x
    }
}

impl Reads for Repeated {
    #[inline(always)]
    unsafe fn lanes(at: *const u8, _: usize, _: usize) -> [f32; LANES] {
        // SAFETY: by the caller.
        [unsafe { *at.cast::<f32>() }; LANES]
    }
}

impl Reads for Nothing {
    #[inline(always)]
    unsafe fn lanes(_: *const u8, _: usize, _: usize) -> [f32; LANES] {
        [0.0; LANES]
    }
}

impl Reads for ColumnNumbers {
    #[inline(always)]
    unsafe fn lanes(at: *const u8, i: usize, _: usize) -> [f32; LANES] {
        let first = (at.addr() + i) as f32;
        let mut x = [0.0; LANES];
        for l in 0..LANES {
            x[l] = first + l as f32;
        }
        x
    }
}

impl<T: Element> Writes for Adjacent<T> {
    #[inline(always)]
    unsafe fn put(at: *mut u8, i: usize, count: usize, x: [f32; LANES]) {
        let at = at.cast::<T>().wrapping_add(i);
        if count == LANES {
            let mut all = [T::default(); LANES];
            for l in 0..LANES {
                all[l] = T::nearest(x[l]);
            }
            // SAFETY: by the caller.
            return unsafe { at.cast::<[T; LANES]>().write_unaligned(all) };
        }
        for l in 0..count {
            // SAFETY: by the caller.
            unsafe { *at.add(l) = T::nearest(x[l]) };
        }
    }
}

impl Writes for RoundedF32 {
    #[inline(always)]
    unsafe fn put(at: *mut u8, i: usize, count: usize, x: [f32; LANES]) {
        let mut all = [0.0; LANES];
        for l in 0..LANES {
            all[l] = Bf16::nearest(x[l]).number();
        }
        // SAFETY: by the caller.
        unsafe { Adjacent::<f32>::put(at, i, count, all) }
    }
}

/// What a loop does.
trait Steps {
    /// # Safety
    /// As the [`Loop`] says: what it reads and writes is valid. Results may lie on operands element
    /// by element.
    unsafe fn run(a: *const u8, b: *const u8, c: *const u8, out: *mut u8, n: usize, stride: usize);
}

/// Does something 16 elements at a time, with the first of them and their number. All of it is
/// inlined, as code that is not would be compiled for any processor.
macro_rules! sweep {
    ($n:expr, |$i:ident, $count:ident| $then:expr) => {{
        let whole = $n - $n % LANES;
        let mut $i = 0;
        while $i < whole {
            let $count = LANES;
            $then;
            $i = opaque($i + LANES);
        }
        if whole < $n {
            let $count = $n - whole;
            $then;
        }
    }};
}

/// The same number, of which the compiler knows nothing: so it makes vectors of the lanes, and not
/// of every 16th one.
#[inline(always)]
fn opaque(mut i: usize) -> usize {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: it is a comment.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) i, options(pure, nomem, nostack, preserves_flags));
    }
    i
}

/// A loop for the best of the processor's vectors.
fn compiled<K: Steps>() -> Loop {
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! level {
            ($($feature:tt),*) => {{
                $(#[target_feature(enable = $feature)])*
                unsafe fn run<K: Steps>(
                    a: *const u8,
                    b: *const u8,
                    c: *const u8,
                    out: *mut u8,
                    n: usize,
                    stride: usize,
                ) {
                    // SAFETY: by the caller.
                    unsafe { K::run(a, b, c, out, n, stride) }
                }
                if has!($($feature),*) {
                    return run::<K>;
                }
            }};
        }
        level!("avx512f", "avx512bw", "avx512dq", "avx512vl");
        level!("avx2");
    }
    K::run
}

/// What a loop makes of an element of each operand.
trait Formula {
    fn of(a: f32, b: f32, c: f32) -> f32;
}

/// Each element by a formula.
struct Mapped<F, X, Y, Z, O>(PhantomData<(F, X, Y, Z, O)>);
/// Each element of one operand.
type MappedOne<F, X, O> = Mapped<F, X, Nothing, Nothing, O>;
impl<F: Formula, X: Reads, Y: Reads, Z: Reads, O: Writes> Steps for Mapped<F, X, Y, Z, O> {
    #[inline(always)]
    unsafe fn run(a: *const u8, b: *const u8, c: *const u8, out: *mut u8, n: usize, _: usize) {
        // SAFETY: by the caller.
        unsafe { sweep!(n, |i, count| Self::step([a, b, c], out, i, count)) }
    }
}
impl<F: Formula, X: Reads, Y: Reads, Z: Reads, O: Writes> Mapped<F, X, Y, Z, O> {
    /// # Safety
    /// As for [`Steps::run`].
    #[inline(always)]
    unsafe fn step([a, b, c]: [*const u8; 3], out: *mut u8, i: usize, count: usize) {
        // SAFETY: by the caller.
        unsafe {
            let (a, b) = (X::lanes(a, i, count), Y::lanes(b, i, count));
            let (c, mut all) = (Z::lanes(c, i, count), [0.0; LANES]);
            for l in 0..LANES {
                all[l] = F::of(a[l], b[l], c[l]);
            }
            O::put(out, i, count, all);
        }
    }
}

/// By number: what a loop is compiled for.
const UNARY: [Unary; 15] = [
    Unary::Exp,
    Unary::ExpM1,
    Unary::Log,
    Unary::Sqrt,
    Unary::Rsqrt,
    Unary::Tanh,
    Unary::Logistic,
    Unary::Silu,
    Unary::Sin,
    Unary::Cos,
    Unary::Erf,
    Unary::Log1P,
    Unary::Floor,
    Unary::Nearest,
    Unary::Round(DType::F16),
];
/// Arithmetic first.
const BINARY: [Binary; 8] = [
    Binary::Mul,
    Binary::Add,
    Binary::Sub,
    Binary::Div,
    Binary::Max,
    Binary::Min,
    Binary::AtLeast,
    Binary::Pow,
];

/// Defines a formula.
macro_rules! formula {
    ($name:ident<$($n:ident),*>($a:ident, $b:ident, $c:ident) $then:expr) => {
        struct $name<$(const $n: usize),*>;
        impl<$(const $n: usize),*> Formula for $name<$($n),*> {
            #[inline(always)]
            fn of($a: f32, $b: f32, $c: f32) -> f32 {
                $then
            }
        }
    };
}
formula!(Itself<>(a, _b, _c) a);
formula!(Denominator<>(a, _b, _c) math::denominator(a));
formula!(OneOf<F>(a, _b, _c) math::unary(UNARY[F], a));
formula!(TwoOf<F>(a, b, _c) math::binary(BINARY[F], a, b));
formula!(PairOf<F, G>(a, b, c) math::binary(BINARY[G], math::binary(BINARY[F], a, b), c));
formula!(PairBehind<F, G>(a, b, c) math::binary(BINARY[G], c, math::binary(BINARY[F], a, b)));
formula!(WhereEqual<>(a, b, c) if a == b { c } else { 0.0 });
formula!(SelectOf<>(a, b, c) if a != 0.0 { b } else { c });

/// Reads elements that lie apart.
struct Gathers<T>(PhantomData<T>);
impl<T: Element> Steps for Gathers<T> {
    #[inline(always)]
    unsafe fn run(a: *const u8, _: *const u8, _: *const u8, out: *mut u8, n: usize, stride: usize) {
        let (a, out) = (a.cast::<T>(), out.cast::<f32>());
        // SAFETY: by the caller.
        unsafe {
            for i in 0..n {
                *out.add(i) = (*a.add(i * stride)).number();
            }
        }
    }
}

/// Writes elements that lie apart.
struct Scatters<T>(PhantomData<T>);
impl<T: Element> Steps for Scatters<T> {
    #[inline(always)]
    unsafe fn run(a: *const u8, _: *const u8, _: *const u8, out: *mut u8, n: usize, stride: usize) {
        let (a, out) = (a.cast::<f32>(), out.cast::<T>());
        // SAFETY: by the caller.
        unsafe {
            for i in 0..n {
                *out.add(i * stride) = T::nearest(*a.add(i));
            }
        }
    }
}

/// Folds elements, or products of two, into 16 partial folds, which are the result: each of every
/// 16th element.
struct Folds<const R: usize, X, Y>(PhantomData<(X, Y)>);
impl<const R: usize, X: Reads, Y: Reads> Steps for Folds<R, X, Y> {
    #[inline(always)]
    unsafe fn run(a: *const u8, b: *const u8, _: *const u8, out: *mut u8, n: usize, _: usize) {
        let out = out.cast::<[f32; LANES]>();
        // SAFETY: by the caller.
        let mut acc = unsafe { *out };
        sweep!(n, |i, count| {
            // SAFETY: by the caller.
            let (x, y) = unsafe { (X::lanes(a, i, count), Y::lanes(b, i, count)) };
            for l in 0..count {
                acc[l] = into::<R>(acc[l], x[l], y[l]);
            }
        });
        // SAFETY: by the caller.
        unsafe { *out = acc };
    }
}
/// A partial fold with one more element, or product of two; of zeros the fold stays.
#[inline(always)]
fn into<const R: usize>(a: f32, x: f32, y: f32) -> f32 {
    match R {
        PRODUCTS => a + x * y,
        SUM => a + x,
        MAX if x > a => x,
        MIN if x < a => x,
        _ => a,
    }
}
const SUM: usize = 0;
const MAX: usize = 1;
const MIN: usize = 2;
const PRODUCTS: usize = 3;

/// `of!(kind, T in [F32 Same] => …)`: with `T` as what reads or writes it; `None` for others.
macro_rules! of {
    ($kind:expr, $t:ident in [$($k:ident)*] => $then:expr) => {
        match $kind {
            $(ElementKind::$k => {
                type $t = of!(@ $k);
                $then
            })*
            _ => None,
        }
    };
    (@ F32) => { Adjacent<f32> };
    (@ Bf16) => { Adjacent<Bf16> };
    (@ F16) => { Adjacent<F16> };
    (@ I32) => { Adjacent<i32> };
    (@ Same) => { Repeated };
    (@ Column) => { ColumnNumbers };
    (@ Rounded) => { RoundedF32 };
}

/// The same of a number.
macro_rules! number {
    ($i:expr, $n:ident in [$($one:literal)*] => $then:expr) => {
        match $i {
            $($one => {
                const $n: usize = $one;
                $then
            })*
            _ => None,
        }
    };
}

/// What copies elements, of one kind to another.
pub(super) fn copy(a: ElementKind, out: ElementKind) -> Option<Loop> {
    of!(a, X in [F32 Bf16 F16 I32 Same Column] => of!(out, O in [F32 Bf16 F16 I32] => {
        Some(compiled::<MappedOne<Itself, X, O>>())
    }))
}

/// What reads elements that lie apart as f32.
pub(super) fn gather(of: DType) -> Loop {
    with_element!(of, T => compiled::<Gathers<T>>())
}

/// What writes f32 as elements that lie apart.
pub(super) fn scatter(of: DType) -> Loop {
    with_element!(of, T => compiled::<Scatters<T>>())
}

/// A function of one operand.
pub(super) fn unary(f: Unary, a: ElementKind, out: ElementKind) -> Option<Loop> {
    if f == Unary::Round(DType::BF16) {
        return of!(a, X in [F32] => Some(compiled::<MappedOne<Itself, X, RoundedF32>>()));
    }
    let f = UNARY.iter().position(|x| *x == f)?;
    number!(f, F in [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14] => of!(a, X in [F32] => {
        of!(out, O in [F32 Rounded] => Some(compiled::<MappedOne<OneOf<F>, X, O>>()))
    }))
}

/// [`math::denominator`].
pub(super) fn denominator(a: ElementKind, out: ElementKind) -> Option<Loop> {
    of!(a, X in [F32] => of!(out, O in [F32] => {
        Some(compiled::<MappedOne<Denominator, X, O>>())
    }))
}

/// A function of two operands.
pub(super) fn binary(f: Binary, [a, b]: [ElementKind; 2], out: ElementKind) -> Option<Loop> {
    let f = BINARY.iter().position(|x| *x == f)?;
    if f < 4 {
        return number!(f, F in [0 1 2 3] => of!(a, X in [F32 Bf16 Same] => {
            of!(b, Y in [F32 Bf16 Same] => of!(out, O in [F32 Rounded Bf16] => {
                Some(compiled::<Mapped<TwoOf<F>, X, Y, Nothing, O>>())
            }))
        }));
    }
    number!(f, F in [4 5 6 7] => of!(a, X in [F32 Same] => of!(b, Y in [F32 Same] => {
        of!(out, O in [F32] => Some(compiled::<Mapped<TwoOf<F>, X, Y, Nothing, O>>()))
    })))
}

/// `then(f(a, b), c)`, or `then(c, f(a, b))` if that is `behind`.
pub(super) fn pair(
    [f, then]: [Binary; 2],
    behind: bool,
    [a, b, c]: [ElementKind; 3],
    out: ElementKind,
) -> Option<Loop> {
    let [f, g] = [f, then].map(|f| BINARY.iter().position(|x| *x == f).unwrap_or(BINARY.len()));
    of!(out, O in [F32] => number!(f, F in [0 1 2] => of!(a, X in [F32 Same] => {
        of!(b, Y in [F32 Same] => of!(c, Z in [F32 Same] => match behind {
            // The order of two factors or terms does not matter.
            true if g > 1 => number!(g, G in [2 3] => {
                Some(compiled::<Mapped<PairBehind<F, G>, X, Y, Z, O>>())
            }),
            _ => number!(g, G in [0 1 2 3] => Some(compiled::<Mapped<PairOf<F, G>, X, Y, Z, O>>())),
        }))
    })))
}

/// The third operand where the first two are equal, else 0.
pub(super) fn choose([a, b, c]: [ElementKind; 3], out: ElementKind) -> Option<Loop> {
    of!(out, O in [F32] => of!(a, X in [F32 Same] => of!(b, Y in [F32 Same Column] => {
        of!(c, Z in [F32 Same] => Some(compiled::<Mapped<WhereEqual, X, Y, Z, O>>()))
    })))
}

/// The second operand where the first is not 0, else the third.
pub(super) fn select([a, b, c]: [ElementKind; 3], out: ElementKind) -> Option<Loop> {
    of!(out, O in [F32] => of!(a, X in [F32 Same] => of!(b, Y in [F32 Same] => {
        of!(c, Z in [F32 Same] => Some(compiled::<Mapped<SelectOf, X, Y, Z, O>>()))
    })))
}

/// Folds elements.
pub(super) fn fold(r: Reduction, a: ElementKind) -> Option<Loop> {
    of!(a, X in [F32 Bf16] => Some(match r {
        Reduction::Sum => compiled::<Folds<SUM, X, X>>(),
        Reduction::Max => compiled::<Folds<MAX, X, X>>(),
        Reduction::Min => compiled::<Folds<MIN, X, X>>(),
    }))
}

/// Sums products of elements.
pub(super) fn fold_products([a, b]: [ElementKind; 2]) -> Option<Loop> {
    of!(a, X in [F32 Bf16] => of!(b, Y in [F32 Bf16] => {
        Some(compiled::<Folds<PRODUCTS, X, Y>>())
    }))
}
