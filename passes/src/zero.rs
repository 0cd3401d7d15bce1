//! What a rank stores of a parameter: ZeRO, and tensor parallelism on a grid.
//!
//! Before:  `%w: f32[64,32]`, used as `f32[64,32]~dp_shard~cp`
//! After:   `%w: f32[64@dp_shard*cp,32]`; the gather to what is used is a change of layout as any other

use serde::{Deserialize, Serialize};
use shardc_ir::axes::AxisRole;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::types::{AtomList, Type};

/// What of a parameter is split over the `zero_axes` beside what shardings say (Rajbhandari et al., 2020,
/// *ZeRO*): 1, its optimizer state, and with it what is stored of the parameter, which is gathered once
/// per step; 2, its gradient too; 3, it is gathered only where it is used. 0: nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Zero {
    /// Parameters are stored in pieces.
    pub splits: bool,
    /// They are gathered once per step, before the microbatches, and not where they are used.
    pub gathers_once: bool,
    /// Their gradients are reduced once per step, behind the microbatches, and not in backward.
    pub reduces_once: bool,
}

impl Zero {
    /// What a stage means for `microbatches` in a step. A gradient to which one microbatch alone adds
    /// is complete in its backward.
    pub fn of(stage: u8, kept: Accumulate, microbatches: usize) -> Zero {
        Zero {
            splits: stage > 0,
            gathers_once: stage < 3 || kept.weights(),
            reduces_once: stage < 2 || kept.gradients() && microbatches > 1,
        }
    }
}

/// What ZeRO-2 and 3 keep whole from one microbatch of a step to the next: less is sent, and more
/// held (`no_sync` of FSDP).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Accumulate {
    #[default]
    None,
    /// Gradients are added up whole, and reduced once.
    Gradients,
    /// Weights are gathered once.
    Weights,
    Both,
}

impl Accumulate {
    pub const ALL: [Accumulate; 4] =
        [Accumulate::None, Accumulate::Gradients, Accumulate::Weights, Accumulate::Both];
    /// The word of the command line.
    pub fn name(self) -> &'static str {
        match self {
            Accumulate::None => "none",
            Accumulate::Gradients => "gradients",
            Accumulate::Weights => "weights",
            Accumulate::Both => "both",
        }
    }
    /// Gradients are kept whole.
    pub fn gradients(self) -> bool {
        matches!(self, Accumulate::Gradients | Accumulate::Both)
    }
    /// Weights are.
    pub fn weights(self) -> bool {
        matches!(self, Accumulate::Weights | Accumulate::Both)
    }
}

/// The axes over which ZeRO splits: those whose ranks compute the same parameter's gradient from
/// other tokens, rows (`dp_shard`) or parts of rows (`cp`), as in Megatron and torchtitan. Copies of
/// hybrid sharding (`dp_replicate`) stay copies.
pub(crate) fn zero_axes(mesh: &Mesh) -> AtomSet {
    mesh.axes_that(AxisRole::of_zero)
}

/// How a parameter is stored, and its layout as ranks use it but for the gather, if it is split over
/// `over` too, which its use is not: on the first dim that this cuts evenly, best one that nothing else
/// cuts; else on the one with least padding. What no dim can be cut for stays whole; what is used in
/// pieces over a part of `over` already, as experts are, is split over the rest.
pub(super) fn stored_over(mesh: &Mesh, stored: &Type, ready: &Type, over: AtomSet) -> (Type, Type) {
    let whole = (stored.clone(), ready.clone());
    let over = over.minus(stored.marked()).minus(ready.sharded());
    if over.is_empty() {
        return whole;
    }
    let ways = mesh.ways(over);
    let even = |d: &usize| stored.dims[*d].size % (stored.pieces(mesh, *d) * ways) == 0;
    let free = |d: &usize| stored.dims[*d].atoms.is_empty() && ready.dims[*d].atoms.is_empty();
    let same = |d: &usize| stored.dims[*d].atoms == ready.dims[*d].atoms;
    let dims = || 0..stored.rank();
    let large = |d: &usize| free(d) && stored.dims[*d].size >= ways;
    let padding = |d: &usize| stored.dims[*d].size.div_ceil(ways) * ways - stored.dims[*d].size;
    let found = dims().find(|d| free(d) && even(d)).or_else(|| dims().find(|d| same(d) && even(d)));
    let Some(d) = found.or_else(|| dims().filter(large).min_by_key(padding)) else { return whole };
    let cut = |t: &Type| {
        let mut t = t.clone();
        let atoms = t.dims[d].atoms.iter().chain(over.iter());
        t.dims[d].atoms = AtomList::collect(atoms)?;
        t.replicated = t.replicated.minus(over);
        Some(t)
    };
    cut(stored).zip(cut(ready)).unwrap_or(whole)
}
