//! Rows of experts that go to other ranks, with the counts that say which of them there are.

use super::{Fault, Held, wrong};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::types::State::{Invariant, Replicated, Sharded};
use shardc_ir::types::{AtomList, Type};

/// Counts `[g,e,z]` of rows `[g,z,c,h]`: cut as the rows are before, and as they are behind.
pub fn check(
    mesh: &Mesh,
    [from, to]: [usize; 2],
    held: &[&Held],
    axes: AtomSet,
) -> Result<(), Fault> {
    let [x, sent, received] = [0, 1, 2].map(|i| &held[i].ty);
    let shape = [x.rank(), sent.rank(), received.rank()] == [4, 3, 3]
        && x.dtype.is_float()
        && !sent.dtype.is_float()
        && !received.dtype.is_float();
    if !shape || from + to != 1 {
        return wrong("rows are [g,z,c,h], and counts [g,e,z]".into());
    }
    if held.iter().any(|h| !h.blocks.is_empty()) {
        return Err(Fault::Unknown("rows that are blocks of a ring".into()));
    }
    let dims = |t: &Type| [t.dims[0], t.dims[2]];
    let mut before = [x.dims[0], x.dims[1]];
    let fits = dims(sent) == before && sent.sizes() == received.sizes();
    let after = [received.dims[0].atoms, received.dims[2].atoms];
    let n = before[from].atoms.len().checked_sub(axes.len());
    let moved: Option<Vec<Atom>> = n.map(|n| before[from].atoms.iter().skip(n).collect());
    if let (Some(moved), Some(n)) = (moved, n) {
        before[from].atoms = before[from].atoms.take(n);
        let all = before[to].atoms.iter().chain(moved.iter().copied());
        before[to].atoms = AtomList::collect(all).unwrap_or(before[to].atoms);
    }
    if !fits || before.map(|d| d.atoms) != after {
        return wrong("rows and their counts are cut in different ways".into());
    }
    let whole = [sent, received].iter().all(|t| t.dims[1].atoms.is_empty());
    if !whole || !x.dims[2].atoms.is_empty() {
        return wrong("rows of a buffer, and its experts, must be whole".into());
    }
    // Over every other axis counts are the same on all ranks, and as free as rows are.
    for a in (0..mesh.atoms.len() as u8).map(Atom).filter(|a| !axes.has(*a)) {
        let fits = match x.state(a) {
            Invariant => [sent, received].iter().all(|t| t.state(a) == Invariant),
            Sharded(0 | 1) => [sent, received].iter().all(|t| matches!(t.state(a), Sharded(_))),
            _own => [sent, received].iter().all(|t| t.state(a) == Replicated),
        };
        if !fits {
            return wrong("counts are not the same on all ranks of a shard".into());
        }
    }
    Ok(())
}
