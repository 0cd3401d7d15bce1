//! What a rank stores of a parameter: ZeRO, and tensor parallelism on a grid.
//!
//! Before:  `%w: f32[64,32]`, used as `f32[64,32]~dp_shard`
//! After:   `%w: f32[64@dp_shard,32]`; the gather to what is used is a change of layout as any other

use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::types::{AtomList, Type};

/// What of a parameter is split over `dp_shard` beside what shardings say (Rajbhandari et al., 2020,
/// *ZeRO*): 1, its optimizer state, and with it what is stored of the parameter, which is gathered once
/// per step; 2, its gradient too; 3, it is gathered only where it is used. 0: nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Zero(pub u8);

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
