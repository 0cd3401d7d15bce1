//! Virtual dims: how a value of the archive sits in a value of ours. Transposes, new dims of one element
//! and repeats write no op; they choose the letters of the next rule.

use shardc_ir::func::Value;

/// What a dim of the archive's value is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Dim {
    /// This dim of our value.
    Real(usize),
    /// Nothing changes along it: it has one element, or is a repeat.
    Virtual,
    /// Every element of this dim so many times, as keys and values of grouped heads.
    Each(usize, usize),
}

/// A value of the archive as one of ours.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct View {
    pub value: Value,
    pub dims: Vec<Dim>,
    pub shape: Vec<usize>,
}

/// The letter of a dim, counted from the left of a result.
pub(super) fn letter(dim: usize) -> char {
    (b'a' + (dim % 26) as u8) as char
}

impl View {
    /// All dims of a value as they are.
    pub fn plain(value: Value, shape: &[usize]) -> View {
        View { value, dims: (0..shape.len()).map(Dim::Real).collect(), shape: shape.to_vec() }
    }

    /// Which dims of ours there are: all of the value's, each once.
    pub fn real(&self) -> usize {
        self.dims.iter().filter(|d| !matches!(d, Dim::Virtual)).count()
    }

    /// Letters of our value's dims, in its own order, where this is aligned to the right of `rank` dims.
    pub fn letters(&self, rank: usize) -> String {
        let off = rank.saturating_sub(self.shape.len());
        let mut all: Vec<(usize, char)> = vec![];
        for (i, d) in self.dims.iter().enumerate() {
            if let Dim::Real(k) | Dim::Each(k, _) = d {
                all.push((*k, letter(off + i)));
            }
        }
        all.sort_unstable();
        all.into_iter().map(|x| x.1).collect()
    }

    /// The same dims of another value.
    pub fn with(&self, value: Value) -> View {
        View { value, ..self.clone() }
    }

    /// True if our dims stand in the order of the archive's.
    pub fn is_ordered(&self) -> bool {
        let l = self.letters(self.shape.len());
        l.as_bytes().windows(2).all(|w| w[0] < w[1])
    }

    /// True if its dims are those of the value, in order.
    pub fn is_plain(&self) -> bool {
        self.dims.iter().enumerate().all(|(i, d)| *d == Dim::Real(i))
    }

    pub fn has_repeats(&self) -> bool {
        self.dims.iter().any(|d| matches!(d, Dim::Each(..)))
    }

    pub fn transpose(&self, i: usize, j: usize) -> View {
        let mut v = self.clone();
        v.dims.swap(i, j);
        v.shape.swap(i, j);
        v
    }

    pub fn permute(&self, order: &[usize]) -> View {
        let dims = order.iter().map(|&d| self.dims[d]).collect();
        let shape = order.iter().map(|&d| self.shape[d]).collect();
        View { value: self.value, dims, shape }
    }

    pub fn unsqueeze(&self, at: usize) -> View {
        let mut v = self.clone();
        v.dims.insert(at, Dim::Virtual);
        v.shape.insert(at, 1);
        v
    }

    /// Without a virtual dim.
    pub fn squeeze(&self, at: usize) -> View {
        let mut v = self.clone();
        v.dims.remove(at);
        v.shape.remove(at);
        v
    }

    /// The dims that hold a result of these letters, of which `rank` dims of this shape have one.
    pub fn of(value: Value, letters: &str, shape: Vec<usize>) -> View {
        let dims = (0..shape.len())
            .map(|d| letters.chars().position(|c| c == letter(d)).map_or(Dim::Virtual, Dim::Real));
        View { value, dims: dims.collect(), shape }
    }
}
