//! The kernel language: what one rank computes for one node, with concrete sizes.
//!
//! A kernel names its memory by *operand*: the node's operands first, then its results, then its
//! workspace, if it has one. Memory is counted in elements of the operand's type (a workspace's are
//! f32) and is walked by loops with strides, since pieces are stored padded: sizes here are valid
//! lengths, strides those of the storage, so no kernel ever reads padding. This is the language that
//! is executed on the CPU and that can be printed as C or CUDA; everything about shapes, letters and
//! meshes has been decided before, and what is left is loops.
//!
//! Arithmetic is in f32 whatever the elements are: those of 16 bits are widened when they are read, which
//! is exact, and a result is rounded once, to nearest even, when it is written.

mod body;
mod experts;
mod reach;
mod recurrence;
mod rows;

pub use body::{Body, Results};
pub use experts::{Copies, Grouped, Product, Ragged, Route, TopK};
pub use recurrence::{Recurrence, RecurrenceGrad, Recurrent};
pub use rows::{Binary, CHUNK, COLUMNS, Rows, Scalar, Stage, Store, Unary};

use crate::mesh::AtomSet;
use crate::ops::rope::Pairs;
use crate::rng::Distribution;
use crate::types::{DType, Reduction};
use smallvec::SmallVec;
use std::sync::Arc;

/// Sizes of nested loops, outermost first.
pub type Extents = SmallVec<[usize; 4]>;

/// The kernels of a plan for one rank: by function, then by node.
pub type Program = Vec<Vec<Kernel>>;

/// How loops walk an operand: element `offset + Σ index · stride`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct View {
    pub operand: usize,
    pub offset: usize,
    /// One stride per loop; 0 repeats.
    pub strides: Extents,
}

/// A box of elements of one operand.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Block {
    pub extents: Extents,
    pub view: View,
    pub elem: DType,
}

/// An operand that is read element by element.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Load {
    pub view: View,
    pub elem: DType,
}

/// Copies elements of any type, after zeros were written to `clear`.
#[derive(Clone, PartialEq, Debug)]
pub struct Copy {
    pub elem: DType,
    pub clear: Option<Block>,
    pub extents: Extents,
    pub from: View,
    pub to: View,
}

/// A matrix of a product: `view` walks the batch loops and, if an operand's, then the sum loops.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Matrix {
    pub view: View,
    pub elem: DType,
    pub row_stride: usize,
    pub col_stride: usize,
}

/// `out[m,n] = Σ a[m,k] b[k,n]` for every index of `batch`, summed over `sum` too (loops of k that
/// do not join into one stride), in order, and added to what `out` holds if `accumulate`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Gemm {
    pub batch: Extents,
    pub sum: Extents,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Matrix,
    pub b: Matrix,
    pub out: Matrix,
    /// The last operand is what the product is added to, and lies where the result does.
    pub accumulate: bool,
}

/// Rows, and most columns, of a block of a product's result that a program of its epilogue is for.
pub const THEN: [usize; 2] = [72, 256];

/// A product and its epilogue: blocks of its result, of [`THEN`]'s columns or what is left of a row, are
/// f32 and pass through a program as soon as they are whole. The result itself is written only if it is
/// one of `writes`.
#[derive(Clone, PartialEq, Debug)]
pub struct Then {
    /// `out` is the first of `writes`.
    pub product: Gemm,
    /// The program of a block, for whole blocks, for narrower ones or for both (none, if there are no
    /// columns). Operands are the block, with rows of [`THEN`]'s columns, then a block of each of `reads`
    /// and of `writes`. A row of a block is one of `outer`, of which there may be more or fewer.
    pub blocks: SmallVec<[Rows; 2]>,
    /// Of the size of the result; strides of what has no rows, or no columns, are 0 there.
    pub reads: Vec<Matrix>,
    pub writes: Vec<Matrix>,
}

/// Element `index - first` of a dim with `len` places `stride` apart; an index outside gives 0
/// (take) or goes nowhere (put).
#[derive(Clone, PartialEq, Debug)]
pub struct Pick {
    /// Of `x`, and of what is taken; what is put together is f32.
    pub elem: DType,
    pub extents: Extents,
    pub x: View,
    /// i32.
    pub index: View,
    pub out: View,
    pub first: usize,
    pub len: usize,
    /// Stride of the picked dim, in `x` (take) or in `out` (put).
    pub stride: usize,
    /// An index that is none: it gives 0 (take) or goes nowhere (put).
    pub without: Option<usize>,
}

/// Rotary embedding of `[b, s, n]` rows of `width` adjacent elements, of which the first `2·turns`
/// turn in pairs; `cos` and `sin` are rows of `turns` adjacent f32. All views walk `[b, s, n]`.
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    /// Of `x` and the result.
    pub elem: DType,
    pub extents: [usize; 3],
    pub width: usize,
    pub turns: usize,
    pub pairs: Pairs,
    pub x: View,
    pub cos: View,
    pub sin: View,
    pub out: View,
}

/// For every index of `extents` the sums of `len` elements up to each, in f32, in order or from the last on.
#[derive(Clone, PartialEq, Debug)]
pub struct Scan {
    pub elem: DType,
    pub extents: Extents,
    pub len: usize,
    pub reverse: bool,
    /// Views walk `extents`, then along the sums.
    pub x: View,
    pub out: View,
}

/// Numbers at random: element by element of `extents` that of its place and its index there.
#[derive(Clone, PartialEq, Debug)]
pub struct Draw {
    pub from: Distribution,
    /// The number of the stream's name.
    pub stream: u64,
    pub extents: Extents,
    /// i32: the seed in two halves and the step, adjacent.
    pub run: View,
    /// i32; place 0 without.
    pub place: Option<View>,
    /// Strides of indices, and the first.
    pub index: Extents,
    pub first: usize,
    /// f32.
    pub out: View,
}

/// Dropout of probabilities, by the place of the query, the number of the head and the position of the key.
#[derive(Clone, PartialEq, Debug)]
pub struct KeptAt {
    /// The probability with which one is kept.
    pub rate: f64,
    /// The stream's number.
    pub stream: u64,
    /// i32: the seed in two halves and the step, adjacent.
    pub run: View,
    /// i32, of `[b, query]`.
    pub place: View,
    /// The number of this rank's first head.
    pub first_head: usize,
}

/// Sizes of attention: `groups · repeat` query heads over `groups` key-value heads.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Heads {
    /// Of queries, keys, values, the output and their gradients; statistics are f32.
    pub elem: DType,
    pub batch: usize,
    pub queries: usize,
    pub keys: usize,
    pub groups: usize,
    pub repeat: usize,
    /// Width of queries and keys.
    pub width: usize,
    /// Width of values.
    pub value_width: usize,
    pub scale: f32,
    /// A score x, scaled, becomes c tanh(x / c) before it is masked.
    pub softcap: Option<f32>,
    pub mask: crate::ops::Mask,
    /// f32, of each head, adjacent: so many times the distance is taken off a score.
    pub slopes: Option<View>,
    /// f32, of each head, the offsets being adjacent, and how many there are: it is added to a score.
    pub bias: Option<(View, usize)>,
    /// i32 segments of queries and of keys, `[b, position]`: who sees each other has one.
    pub segments: Option<[View; 2]>,
    /// Which probabilities are 0 at random.
    pub kept: Option<KeptAt>,
    /// Queries treated at once: a matrix of scores has so many rows.
    pub rows: usize,
    /// i32 positions, adjacent.
    pub q_pos: View,
    pub k_pos: View,
    /// Scratch of `rows · keys` f32 per matrix of scores (one forward, two backward); behind them,
    /// if elements are not f32, [`Heads::wide`].
    pub scratch: View,
}

/// Attention without a stored score matrix; views walk `[b, position, head]`, the width
/// being adjacent.
#[derive(Clone, PartialEq, Debug)]
pub struct Attention {
    pub heads: Heads,
    pub q: View,
    pub k: View,
    pub v: View,
    pub out: View,
    pub lse: View,
}

/// Gradients of [`Attention`].
#[derive(Clone, PartialEq, Debug)]
pub struct AttentionGrad {
    pub heads: Heads,
    pub q: View,
    pub k: View,
    pub v: View,
    pub lse: View,
    pub d_out: View,
    pub delta: View,
    pub d_q: View,
    pub d_k: View,
    pub d_v: View,
    /// Of the bias, if there is one: f32, as it.
    pub d_bias: Option<View>,
}

/// One tensor of an `all_reduce`.
#[derive(Clone, PartialEq, Debug)]
pub struct Reduced {
    pub fold: Reduction,
    pub from: Block,
    pub to: Block,
}

/// One tensor of an `all_gather`: everybody's `from`, each to its own block.
#[derive(Clone, PartialEq, Debug)]
pub struct Gathered {
    pub from: Block,
    /// By member of the group, in group order.
    pub to: Vec<Block>,
}

/// One tensor of a `reduce_scatter`: the fold of everybody's block for this member.
#[derive(Clone, PartialEq, Debug)]
pub struct Scattered {
    pub fold: Reduction,
    /// By member of the group, in group order.
    pub from: Vec<Block>,
    pub to: Block,
}

/// What is exchanged; lists of blocks have one entry per member of the group, in group order.
#[derive(Clone, PartialEq, Debug)]
pub enum Exchange {
    AllReduce {
        tensors: Vec<Reduced>,
    },
    AllGather {
        tensors: Vec<Gathered>,
    },
    ReduceScatter {
        tensors: Vec<Scattered>,
    },
    /// After zeros were written to `clear`.
    AllToAll {
        clear: Option<Block>,
        from: Vec<Block>,
        to: Vec<Block>,
    },
    /// The rows of experts that are there, in order of groups and shards.
    AllToAllV {
        from: Vec<Ragged>,
        to: Vec<Ragged>,
    },
    /// From the member `shift` places before.
    Permute {
        shift: usize,
        from: Block,
        to: Block,
    },
    /// What member `root` has in `own`, which only it has, to everybody's `to`.
    Broadcast {
        root: usize,
        own: Option<Block>,
        to: Block,
    },
    /// As [`Exchange::ReduceScatter`], after zeros were written to `clear`: all blocks but those of the
    /// member that receives are empty.
    Reduce {
        clear: Option<Block>,
        from: Vec<Block>,
        to: Block,
    },
}

/// An exchange between the ranks of a group over `axes`.
#[derive(Clone, PartialEq, Debug)]
pub struct Collective {
    pub axes: AtomSet,
    pub exchange: Exchange,
}

/// Kernels over rows of one launch, in any order or at the same time.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct HorizontalFusion {
    pub kernels: Vec<Rows>,
    /// By kernel: which operands and results of the launch are its own, in its own order.
    pub operands: Vec<SmallVec<[usize; 12]>>,
}

/// Declares what is executed: from a row follow its place in [`Kernel`] and what it reaches.
macro_rules! kernels {
    ($($(#[doc = $doc:literal])* $kernel:ident($of:ty),)*) => {
        /// What one rank does for one launch.
        #[derive(Clone, PartialEq, Debug)]
        pub enum Kernel {
            /// Nothing: the result is the operand's memory.
            View,
            /// Numbers from the program to adjacent elements of operand `to`.
            Literal { values: Arc<[f32]>, to: usize },
            /// Copies, one after the other.
            Copy(Vec<Copy>),
            /// `out = x[index]`.
            Take(Pick),
            /// Zeros to `clear`, then `out[index] += x`, in loop order; without `clear`, to what `out` holds.
            IndexAdd { pick: Pick, clear: Option<Block> },
            $($(#[doc = $doc])* $kernel($of),)*
        }
        impl Kernel {
            /// Shows every view with the loops that walk it.
            fn walk(&self, see: reach::See) {
                match self {
                    Kernel::View => {}
                    Kernel::Literal { values, to } => {
                        let all = View { operand: *to, offset: 0, strides: smallvec::smallvec![1] };
                        see(&all, &[&[values.len()]]);
                    }
                    Kernel::Copy(all) => all.iter().for_each(|k| k.reach(see)),
                    Kernel::Take(k) => k.reach(true, see),
                    Kernel::IndexAdd { pick, clear } => {
                        pick.reach(false, see);
                        clear.iter().for_each(|c| c.reach(see));
                    }
                    $(Kernel::$kernel(k) => k.reach(see),)*
                }
            }
        }
    };
}
kernels! {
    Rows(Rows),
    /// Kernels over rows that need nothing of each other.
    HorizontalFusion(HorizontalFusion),
    Gemm(Gemm),
    GemmThen(Box<Then>),
    Scan(Scan),
    Draw(Draw),
    Rope(Rope),
    Attention(Box<Attention>),
    AttentionGrad(Box<AttentionGrad>),
    Recurrence(Box<Recurrence>),
    RecurrenceGrad(Box<RecurrenceGrad>),
    TopK(TopK),
    Route(Box<Route>),
    /// The rows of the buffer that slots name, from tokens times gates; other rows stay.
    Dispatch(Box<Copies>),
    /// Tokens, each the sum of the rows of its copies times their gates, in the order of copies.
    Unpermute(Box<Copies>),
    /// Gates, each the product of a token and the row of the copy; 0 for a copy without a row.
    CombineGatesGrad(Box<Copies>),
    Grouped(Box<Grouped>),
    Collective(Collective),
}

impl View {
    /// The element with this index; loops beyond the index stand at 0.
    pub fn at(&self, index: &[usize]) -> usize {
        self.strides.iter().zip(index).fold(self.offset, |o, (s, i)| o + s * i)
    }
    /// One past the last element that loops of these sizes reach; 0 if they are empty.
    pub fn end(&self, extents: &[usize]) -> usize {
        if extents.contains(&0) {
            return 0;
        }
        self.strides.iter().zip(extents).fold(self.offset + 1, |o, (s, n)| o + s * (n - 1))
    }
}

impl Block {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.extents.iter().product()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// One past the last element.
    pub fn end(&self) -> usize {
        self.view.end(&self.extents)
    }
}

impl Kernel {
    /// The programs over rows that it runs.
    pub fn rows(&self) -> &[Rows] {
        match self {
            Kernel::Rows(k) => std::slice::from_ref(k),
            Kernel::HorizontalFusion(k) => &k.kernels,
            Kernel::GemmThen(k) => &k.blocks,
            _without => &[],
        }
    }
}

impl View {
    /// The same walk with one more, innermost loop over adjacent elements.
    pub fn adjacent(&self) -> View {
        let mut v = self.clone();
        v.strides.push(1);
        v
    }
}

impl Heads {
    /// Sizes of `[b, query, head]`.
    pub fn by_query(&self) -> [usize; 3] {
        [self.batch, self.queries, self.groups * self.repeat]
    }
    /// Sizes of `[b, key, group]`.
    pub fn by_key(&self) -> [usize; 3] {
        [self.batch, self.keys, self.groups]
    }
    /// Elements of the scratch memory beside the scores: a block of queries, the keys and values of
    /// a group, and a block of outputs; backward also the gradients of all but the output.
    pub fn wide(&self, backward: bool) -> usize {
        if self.elem == DType::F32 {
            return 0;
        }
        let (queries, outputs) = (self.rows * self.width, self.rows * self.value_width);
        let pairs = self.keys * (self.width + self.value_width);
        if backward { 2 * queries + outputs + 2 * pairs } else { queries + outputs + pairs }
    }
}

impl Exchange {
    /// All blocks, sources and destinations.
    pub fn blocks(&self) -> Box<dyn Iterator<Item = &Block> + '_> {
        match self {
            Exchange::AllReduce { tensors } => {
                Box::new(tensors.iter().flat_map(|t| [&t.from, &t.to]))
            }
            Exchange::AllGather { tensors } => {
                Box::new(tensors.iter().flat_map(|t| std::iter::once(&t.from).chain(&t.to)))
            }
            Exchange::ReduceScatter { tensors } => {
                Box::new(tensors.iter().flat_map(|t| t.from.iter().chain([&t.to])))
            }
            Exchange::AllToAll { clear, from, to } => Box::new(clear.iter().chain(from).chain(to)),
            Exchange::AllToAllV { from, to } => {
                Box::new(from.iter().chain(to).flat_map(|r| [&r.rows, &r.counts]))
            }
            Exchange::Permute { from, to, .. } => Box::new([from, to].into_iter()),
            Exchange::Broadcast { own, to, .. } => Box::new(own.iter().chain([to])),
            Exchange::Reduce { clear, from, to } => Box::new(clear.iter().chain(from).chain([to])),
        }
    }
}
