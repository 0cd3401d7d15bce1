//! Vectors with an entry per id: what is known of each value, scope or atom of the mesh.

use serde::{Deserialize, Serialize};
use std::borrow::Borrow;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Index, IndexMut};

/// A number that says which of several things of one kind is meant.
pub trait Id: Copy {
    fn from_index(index: usize) -> Self;
    fn index(self) -> usize;
}

/// One entry per id, in a vector: only ids of this kind are indices of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(transparent, bound(serialize = "T: Serialize", deserialize = "T: Deserialize<'de>"))]
pub struct IndexVec<I, T> {
    entries: Vec<T>,
    of: PhantomData<fn(I)>,
}

impl<I: Id, T> IndexVec<I, T> {
    /// As many entries as `len`, all of them this one.
    pub fn filled(entry: T, len: usize) -> IndexVec<I, T>
    where
        T: Clone,
    {
        vec![entry; len].into()
    }

    /// The next id, with this entry.
    pub fn push(&mut self, entry: T) -> I {
        self.entries.push(entry);
        I::from_index(self.entries.len() - 1)
    }

    /// Puts an entry behind that of an id: those of higher ids get the next ones.
    pub fn insert_after(&mut self, id: I, entry: T) {
        self.entries.insert(id.index() + 1, entry);
    }

    /// Entries for so many ids; of new ones, this one.
    pub fn resize(&mut self, len: usize, entry: T)
    where
        T: Clone,
    {
        self.entries.resize(len, entry);
    }

    /// Makes room for so many more ids.
    pub fn reserve(&mut self, more: usize) {
        self.entries.reserve(more);
    }

    /// All ids, in order.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = I> + use<I, T> {
        (0..self.entries.len()).map(I::from_index)
    }

    /// The entry of an id, if it has one.
    pub fn find(&self, id: I) -> Option<&T> {
        self.entries.get(id.index())
    }
}

impl<I, T> Default for IndexVec<I, T> {
    fn default() -> IndexVec<I, T> {
        vec![].into()
    }
}

impl<I, T> From<Vec<T>> for IndexVec<I, T> {
    fn from(entries: Vec<T>) -> IndexVec<I, T> {
        IndexVec { entries, of: PhantomData }
    }
}

impl<I, T> FromIterator<T> for IndexVec<I, T> {
    fn from_iter<A: IntoIterator<Item = T>>(entries: A) -> IndexVec<I, T> {
        Vec::from_iter(entries).into()
    }
}

impl<I, T> Deref for IndexVec<I, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.entries
    }
}

impl<I, T> DerefMut for IndexVec<I, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.entries
    }
}

/// By an id, or a reference to one.
impl<I: Id, T, R: Borrow<I>> Index<R> for IndexVec<I, T> {
    type Output = T;
    fn index(&self, id: R) -> &T {
        &self.entries[id.borrow().index()]
    }
}

impl<I: Id, T, R: Borrow<I>> IndexMut<R> for IndexVec<I, T> {
    fn index_mut(&mut self, id: R) -> &mut T {
        &mut self.entries[id.borrow().index()]
    }
}

impl<'a, I, T> IntoIterator for &'a IndexVec<I, T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;
    fn into_iter(self) -> std::slice::Iter<'a, T> {
        self.entries.iter()
    }
}

impl<'a, I, T> IntoIterator for &'a mut IndexVec<I, T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;
    fn into_iter(self) -> std::slice::IterMut<'a, T> {
        self.entries.iter_mut()
    }
}

impl<I, T> IntoIterator for IndexVec<I, T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;
    fn into_iter(self) -> std::vec::IntoIter<T> {
        self.entries.into_iter()
    }
}
