//! Kernels of mixtures of experts: choosing experts, giving copies of tokens places in buffers,
//! moving them there and back, and products with the weights of the expert that a row belongs to.
//!
//! Indices, slots and counts are data: a kernel treats whatever they say, and touches nothing
//! outside the sizes that stand here.

use super::reach::See;
use super::{Block, Extents, View};
use crate::ops::grouped_dot::BLOCK;
use crate::types::DType;

/// For every index of `extents`, the places of the `k` largest of `n` elements, largest first; of
/// equal ones the first. Elements are compared as [`f32::total_cmp`] does, but that both zeros are equal.
#[derive(Clone, PartialEq, Debug)]
pub struct TopK {
    pub extents: Extents,
    pub n: usize,
    pub k: usize,
    /// Of `x`.
    pub elem: DType,
    pub x: View,
    /// Between the elements that are compared.
    pub x_stride: usize,
    /// i32.
    pub out: View,
    pub out_stride: usize,
}

/// Places for the copies of tokens in the buffers of groups of experts, as the op `route` gives
/// them. It fails if a buffer has too few rows.
#[derive(Clone, PartialEq, Debug)]
pub struct Route {
    /// Shards of tokens of this rank, tokens of a shard, copies of a token.
    pub copies: [usize; 3],
    /// The number of the first shard of this rank, for messages.
    pub first_shard: usize,
    pub groups: usize,
    /// Experts of a group.
    pub experts: usize,
    /// Rows of the buffer of a group and a shard.
    pub rows: usize,
    /// Copies of a shard that an expert keeps.
    pub capacity: Option<usize>,
    /// i32, walks `[shard, token, copy]`.
    pub index: View,
    /// i32, walks `[shard, token, copy]`.
    pub slot: View,
    /// i32, walks `[group, expert, shard]`.
    pub counts: View,
}

/// Tokens and the rows of their copies: slot `group · rows + row` of a copy names its row, any
/// other number none. The last of buffer, tokens and gates in an op's operands is its result.
#[derive(Clone, PartialEq, Debug)]
pub struct Copies {
    /// Shards of tokens, tokens of a shard, copies of a token.
    pub copies: [usize; 3],
    pub groups: usize,
    /// Rows of the buffer of a group and a shard.
    pub rows: usize,
    pub width: usize,
    /// Walks `[group, shard, row]`, the width being adjacent.
    pub buffer: View,
    pub buffer_elem: DType,
    /// Walks `[shard, token]`, the width being adjacent.
    pub tokens: View,
    pub token_elem: DType,
    /// i32, walks `[shard, token, copy]`.
    pub slot: View,
    /// A number per copy; walks `[shard, token, copy]`.
    pub gates: View,
    pub gate_elem: DType,
}

/// Rows of which those are there that the counts name: in the buffer of every group and shard the
/// first, as many as its experts have together.
#[derive(Clone, PartialEq, Debug)]
pub struct Ragged {
    /// `[group, shard, row, width]`, the width being adjacent.
    pub rows: Block,
    /// i32, `[group, expert, shard]`.
    pub counts: Block,
}

/// Which of the three tensors of a grouped product is the result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Product {
    /// `y[c,o] = Σ x[c,i] w[o,i]` for the rows of every expert.
    Rows,
    /// `x[c,i] = Σ y[c,o] w[o,i]` for the rows of every expert.
    RowsTransposed,
    /// `w[o,i] = Σ y[c,o] x[c,i]` over the rows of every expert, of all shards in order.
    Weights,
}

/// Products of rows with the weights of their experts. In the buffer of a group and a shard stand
/// the rows of its experts one after the other, as many as `counts` says; no others are touched.
/// If one of the three tensors is not f32, blocks of all three are made f32 in the workspace.
#[derive(Clone, PartialEq, Debug)]
pub struct Grouped {
    pub product: Product,
    pub groups: usize,
    /// Experts of a group.
    pub experts: usize,
    pub shards: usize,
    /// Rows of the buffer of a group and a shard.
    pub rows: usize,
    /// Width of a row of `x`.
    pub x_width: usize,
    /// Width of a row of `y`.
    pub y_width: usize,
    /// i32, walks `[group, expert, shard]`.
    pub counts: View,
    /// Walks `[group, shard, row]`, the width being adjacent.
    pub x: View,
    pub x_elem: DType,
    /// Walks `[group, shard, row]`, the width being adjacent.
    pub y: View,
    pub y_elem: DType,
    /// Walks `[expert of all groups, o]`, i being adjacent.
    pub w: View,
    pub w_elem: DType,
    /// Rows of an expert that are gathered from several shards for one product; 0 if there is one
    /// shard.
    pub gathered: usize,
    /// Adjacent: so many rows of `x`, then of `y`; or [`Grouped::block`].
    pub scratch: View,
}

impl TopK {
    pub(super) fn reach(&self, see: See) {
        for (v, stride, n) in
            [(&self.x, self.x_stride, self.n), (&self.out, self.out_stride, self.k)]
        {
            let mut v = v.clone();
            v.strides.push(stride);
            see(&v, &[&self.extents, &[n]]);
        }
    }
}

impl Route {
    pub(super) fn reach(&self, see: See) {
        see(&self.index, &[&self.copies]);
        see(&self.slot, &[&self.copies]);
        see(&self.counts, &[&[self.groups, self.experts, self.copies[0]]]);
    }
}

impl Copies {
    pub(super) fn reach(&self, see: See) {
        let [shards, tokens, _] = self.copies;
        see(&self.buffer.adjacent(), &[&[self.groups, shards, self.rows, self.width]]);
        see(&self.tokens.adjacent(), &[&[shards, tokens, self.width]]);
        see(&self.slot, &[&self.copies]);
        see(&self.gates, &[&self.copies]);
    }
}

impl Grouped {
    /// True if blocks are made f32.
    pub fn by_blocks(&self) -> bool {
        [self.x_elem, self.y_elem, self.w_elem] != [DType::F32; 3]
    }
    /// Sizes of one block of `x`, of `y` and of `w`, in elements: at most [`BLOCK`] rows of an
    /// expert, in the buffers of all shards, and [`BLOCK`] of either width.
    pub fn block(&self) -> [usize; 3] {
        let [rows, x, y] =
            [self.shards * self.rows, self.x_width, self.y_width].map(|n| n.min(BLOCK));
        [rows * x, rows * y, y * x]
    }
    pub(super) fn reach(&self, see: See) {
        let buffer = [self.groups, self.shards, self.rows];
        see(&self.counts, &[&[self.groups, self.experts, self.shards]]);
        see(&self.x.adjacent(), &[&buffer, &[self.x_width]]);
        see(&self.y.adjacent(), &[&buffer, &[self.y_width]]);
        let experts = self.groups * self.experts;
        see(&self.w.adjacent(), &[&[experts, self.y_width, self.x_width]]);
        let room = match self.by_blocks() {
            true => self.block().iter().sum(),
            false => self.gathered * (self.x_width + self.y_width),
        };
        see(&self.scratch, &[&[room]]);
    }
}
