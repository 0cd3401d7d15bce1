//! Where the elements of a rank's pieces lie, and loops over them.

use shardc_ir::boxes::Ranges;
use shardc_ir::kernel::{Block, Extents, View};
use shardc_ir::mesh::Mesh;
use shardc_ir::rule::{Dims, Group};
use shardc_ir::tensor;
use shardc_ir::types::{DType, Extent, Type};

/// A node's operands and results, as one rank stores them. Operand numbers are those of kernels:
/// operands, then results, then the workspace.
pub(crate) struct Layout<'a> {
    pub mesh: &'a Mesh,
    pub coords: &'a [usize],
    pub types: Vec<&'a Type>,
    /// Number of operands: the first result's number.
    pub ins: usize,
}

impl Layout<'_> {
    /// Strides of the padded storage, in elements.
    pub fn strides(&self, operand: usize) -> Extents {
        tensor::strides(&self.types[operand].chunks(self.mesh))
    }
    /// Valid sizes.
    pub fn lens(&self, operand: usize) -> Extents {
        self.types[operand].lens(self.mesh, self.coords)
    }
    /// How its elements are read and written.
    pub fn elem(&self, operand: usize) -> DType {
        self.types[operand].dtype
    }
    pub fn extent(&self, operand: usize, dim: usize) -> Extent {
        self.types[operand].extent(self.mesh, dim, self.coords)
    }
    /// The operand's stride along each of these dims, 0 where it has none of that name.
    pub fn along(&self, operand: usize, dims: &[Group], loops: &Dims) -> Extents {
        let strides = self.strides(operand);
        let of = |g: &Group| dims.iter().position(|d| d == g).map_or(0, |i| strides[i]);
        loops.iter().map(of).collect()
    }
    /// All valid elements.
    pub fn whole(&self, operand: usize) -> Block {
        let mut nest = Nest::new(1);
        for (&n, &s) in self.lens(operand).iter().zip(&self.strides(operand)) {
            nest.push(n, &[s]);
        }
        nest.block(operand, 0, self.elem(operand))
    }
    /// A box of the tensor, which this rank has all of; nothing if there is none.
    pub fn boxed(&self, operand: usize, part: Option<Ranges>) -> Block {
        let Some(part) = part else { return self.part(operand, 0, 0, 0) };
        let mut nest = Nest::new(1);
        let mut offset = 0;
        for (d, (range, &s)) in part.iter().zip(&self.strides(operand)).enumerate() {
            nest.push(range.len(), &[s]);
            offset += (range.start - self.extent(operand, d).offset) * s;
        }
        nest.block(operand, offset, self.elem(operand))
    }
    /// All valid elements, but of dim `dim` only `len` from `offset`.
    pub fn part(&self, operand: usize, dim: usize, offset: usize, len: usize) -> Block {
        let (mut lens, strides) = (self.lens(operand), self.strides(operand));
        lens[dim] = len;
        let mut nest = Nest::new(1);
        for (&n, &s) in lens.iter().zip(&strides) {
            nest.push(n, &[s]);
        }
        nest.block(operand, offset * strides[dim], self.elem(operand))
    }
}

/// Nested loops, outermost first, with the stride of every view along each.
pub(crate) struct Nest {
    extents: Extents,
    walks: Vec<Extents>,
}

impl Nest {
    pub fn new(views: usize) -> Nest {
        Nest { extents: Extents::new(), walks: vec![Extents::new(); views] }
    }

    /// Adds an innermost loop; it becomes one with the loop around it if all strides allow that.
    pub fn push(&mut self, extent: usize, strides: &[usize]) {
        if extent == 1 {
            return;
        }
        let joins = |(w, s): (&Extents, &usize)| w.last().is_some_and(|&outer| outer == s * extent);
        let walks = self.walks.iter_mut();
        if let Some(last) = self.extents.last_mut()
            && walks.as_slice().iter().zip(strides).all(joins)
        {
            *last *= extent;
            walks.zip(strides).for_each(|(w, &s)| *w.last_mut().expect("as many as extents") = s);
        } else {
            self.extents.push(extent);
            walks.zip(strides).for_each(|(w, &s)| w.push(s));
        }
    }

    pub fn extents(&self) -> Extents {
        self.extents.clone()
    }
    pub fn view(&self, walk: usize, operand: usize, offset: usize) -> View {
        View { operand, offset, strides: self.walks[walk].clone() }
    }
    /// The loops of the only view.
    fn block(&self, operand: usize, offset: usize, elem: DType) -> Block {
        Block { extents: self.extents(), view: self.view(0, operand, offset), elem }
    }
}
