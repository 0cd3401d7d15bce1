//! What becomes of a product's result: blocks of it, in f32, go through a program over rows.

use super::matrix;
use crate::rows::Form;
use shardc_ir::kernel::{THEN, Then};
use smallvec::SmallVec;

/// An epilogue with the memory of its launch.
pub(crate) struct Epilogue<'a> {
    pub then: &'a Then,
    pub memory: &'a [*mut f32],
    /// What runs the programs of the epilogue.
    pub forms: SmallVec<[Form; 4]>,
}

impl Epilogue<'_> {
    /// Takes a block of the result, with rows of [`THEN`]'s columns: of the result with this index, from a
    /// row and a column on, which begins such a block.
    ///
    /// # Safety
    /// The block is valid, and the memory for all that the kernel reaches; nobody else treats these
    /// elements.
    pub unsafe fn run(
        &self,
        index: &[usize],
        block: *mut f32,
        [row, col]: [usize; 2],
        [rows, cols]: [usize; 2],
    ) {
        assert!(col % THEN[1] == 0 && cols <= THEN[1], "a block of columns");
        let mut all = self.then.blocks.iter().zip(&self.forms);
        let (k, form) = all.find(|x| x.0.inner[..] == [cols]).expect("a program for each width");
        let tensors = self.then.reads.iter().chain(&self.then.writes);
        let tensors = tensors.map(|x| matrix(x, self.memory, index).from(row, col).at);
        let memory: SmallVec<[*mut f32; 16]> = std::iter::once(block).chain(tensors).collect();
        // SAFETY: by the caller; a row is a task, and the program's is as many as it is told.
        unsafe { form.run(&memory, &k.params, 0..rows) };
    }
}
