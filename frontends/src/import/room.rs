//! What an archive may ask for: elements of a value, and of numbers that are known how many are stored and how many
//! are looked at.
//!
//! Sizes are what a stranger's file says. Each value's are checked where it is made ([`elements`]), so that what is
//! counted of a value later cannot overflow; and the numbers that folding stores and looks at come out of what one
//! import has ([`Allowance`]), so that a few words of a file cannot cost minutes or gigabytes.

use super::graph::Elem;
use shardc_ir::types::MAX_ELEMENTS;
use std::cell::Cell;

/// Most numbers of a tensor that are listed one by one, as f64: a table of 131,072 positions of 256.
pub(super) const MAX_LISTED: usize = 1 << 25;
/// Most bytes of one tensor of known numbers: a mask of 16,384 tokens, a table of f32 of 8,192 by 8,192.
const MAX_TENSOR: usize = 256 << 20;
/// Most bytes of all that are stored at once. With one tensor that is being made they stay below 1 GiB.
const MAX_STORED: usize = 512 << 20;
/// Most numbers that one import looks at or makes, of all of its folding.
const MAX_WORK: usize = 1 << 30;

/// Elements of a shape, where a dim without elements counts as one: so the product of any of its dims is not larger.
/// Nothing if they are more than a value may have.
pub(super) fn elements(shape: &[usize]) -> Option<usize> {
    let each = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1)));
    each.filter(|&n| n <= MAX_ELEMENTS)
}

/// How many elements these dims have: of a value that was made, exactly.
pub(super) fn count(dims: &[usize]) -> usize {
    dims.iter().fold(1, |n, &d| n.saturating_mul(d))
}

/// What folding has left on this thread: an import runs on one.
#[derive(Clone, Copy)]
struct Allowance {
    /// Numbers that were looked at or made.
    work: usize,
    /// Bytes that are stored.
    stored: usize,
}

thread_local! {
    static USED: Cell<Allowance> = const { Cell::new(Allowance { work: 0, stored: 0 }) };
}

/// Begins an import, which has all its work before it.
pub(super) fn begin() {
    USED.set(Allowance { work: 0, ..USED.get() });
}

/// Takes the work of looking at so many numbers; nothing if the import has no more.
pub(super) fn work(numbers: usize) -> Option<()> {
    let used = USED.get();
    let work = used.work.saturating_add(numbers);
    USED.set(Allowance { work, ..used });
    (work <= MAX_WORK).then_some(())
}

/// Takes the work of making numbers of this type; nothing if they are too many for a tensor, or for all of them.
pub(super) fn make(elem: Elem, numbers: usize) -> Option<()> {
    let bytes = numbers.checked_mul(bytes(elem)).filter(|&b| b <= MAX_TENSOR)?;
    (USED.get().stored.saturating_add(bytes) <= MAX_STORED).then_some(())?;
    work(numbers)
}

/// Bytes of a number as it is stored.
fn bytes(elem: Elem) -> usize {
    match elem {
        Elem::Bool => 1,
        Elem::Float => 4,
        Elem::Double | Elem::Int => 8,
    }
}

/// The number as elements of this type have it.
pub(super) fn rounded(elem: Elem, x: f64) -> f64 {
    match elem {
        Elem::Float => f64::from(x as f32),
        Elem::Double => x,
        Elem::Int => x.trunc(),
        Elem::Bool => f64::from(u8::from(x != 0.0)),
    }
}

/// Known numbers, as many bytes each as their type needs; they count as stored as long as they are.
#[derive(Debug)]
pub(super) struct Numbers {
    elem: Elem,
    kept: Kept,
    /// Bytes that are counted.
    bytes: usize,
}

#[derive(Debug)]
enum Kept {
    Wide(Vec<f64>),
    /// Those of f32, exactly.
    Narrow(Vec<f32>),
    Bits(Vec<bool>),
}

impl Numbers {
    /// Room for so many, of which none is there.
    pub fn with_room(elem: Elem, numbers: usize) -> Numbers {
        let kept = match elem {
            Elem::Bool => Kept::Bits(Vec::with_capacity(numbers)),
            Elem::Float => Kept::Narrow(Vec::with_capacity(numbers)),
            Elem::Double | Elem::Int => Kept::Wide(Vec::with_capacity(numbers)),
        };
        let bytes = numbers.saturating_mul(bytes(elem));
        let used = USED.get();
        USED.set(Allowance { stored: used.stored.saturating_add(bytes), ..used });
        Numbers { elem, kept, bytes }
    }

    pub fn push(&mut self, x: f64) {
        match &mut self.kept {
            Kept::Wide(v) => v.push(rounded(self.elem, x)),
            Kept::Narrow(v) => v.push(x as f32),
            Kept::Bits(v) => v.push(x != 0.0),
        }
    }

    pub fn len(&self) -> usize {
        match &self.kept {
            Kept::Wide(v) => v.len(),
            Kept::Narrow(v) => v.len(),
            Kept::Bits(v) => v.len(),
        }
    }

    pub fn get(&self, at: usize) -> f64 {
        match &self.kept {
            Kept::Wide(v) => v[at],
            Kept::Narrow(v) => f64::from(v[at]),
            Kept::Bits(v) => f64::from(u8::from(v[at])),
        }
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        let used = USED.get();
        USED.set(Allowance { stored: used.stored.saturating_sub(self.bytes), ..used });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_product_of_dims_of_a_value_overflows() {
        assert_eq!(elements(&[]), Some(1));
        assert_eq!(elements(&[1 << 24, 1 << 24]), Some(1 << 48));
        assert_eq!(elements(&[1 << 24, (1 << 24) + 1]), None);
        // A dim without elements hides no others.
        assert_eq!(elements(&[0, usize::MAX]), None);
        assert_eq!(elements(&[0, 5]), Some(5));
        assert_eq!(count(&[0, 5]), 0);
    }

    #[test]
    fn what_is_dropped_makes_room_and_work_is_not_given_back() {
        begin();
        let one = MAX_TENSOR / 8;
        assert_eq!(make(Elem::Int, one + 1), None);
        let held = [Numbers::with_room(Elem::Int, one), Numbers::with_room(Elem::Int, one)];
        assert_eq!(make(Elem::Bool, 1), None, "all room is taken");
        drop(held);
        let each = MAX_WORK / one;
        assert_eq!((0..=each).filter(|_| make(Elem::Int, one).is_some()).count(), each);
        begin();
        assert_eq!(make(Elem::Int, one), Some(()));
    }
}
