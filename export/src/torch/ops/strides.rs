//! Which reshapes copy: torch makes a view of what strides allow.

use super::memory::viewed;
use crate::torch::dims::places;
use crate::torch::seen::{Line, Seen};
use shardc_ir::func::{Role, RoleKind, Value, ValueMap};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::Op;
use std::collections::{BTreeMap, BTreeSet};

/// Strides in elements; what functions leave for backward has those that it has been left with.
type Strides = Vec<usize>;

/// For each function the results that torch copies, though their op is a view.
pub(in crate::torch) fn copied(mesh: &Mesh, all: &[Seen]) -> Vec<BTreeSet<Value>> {
    let mut left: BTreeMap<&Role, Strides> = BTreeMap::new();
    let mut out = vec![];
    for seen in all {
        let f = seen.f;
        let mut known: ValueMap<Option<Strides>> = f.per_value(None);
        for a in &f.args {
            known[a.value] = a.role.as_ref().and_then(|r| left.get(r)).cloned();
        }
        let shape = |v: Value| f.ty(v).chunks(mesh).to_vec();
        let mut copies = BTreeSet::new();
        for l in &seen.lines {
            let Some(i) = viewed(f, &seen.same, l).filter(|_| l.over.is_none()) else { continue };
            let (from, to) = (l.ins[i], l.outs[0]);
            let strides = known[from].clone().unwrap_or_else(|| contiguous(&shape(from)));
            let seen_so = through(l, &strides, (&shape(from), &shape(to)));
            if seen_so.is_none() {
                copies.insert(to);
            }
            known[to] = seen_so;
        }
        for r in &f.results {
            let Some(role) = r.role.as_ref().filter(|r| r.kind == RoleKind::Stash) else {
                continue;
            };
            if let Some(strides) = known[seen.same[r.value]].take() {
                left.insert(role, strides);
            }
        }
        out.push(copies);
    }
    out
}

/// Strides of elements that lie one after the other.
fn contiguous(shape: &[usize]) -> Strides {
    let inner = |d: usize| shape[d + 1..].iter().product();
    (0..shape.len()).map(inner).collect()
}

/// The strides of a view of a tensor with these; nothing, if there is none.
fn through(l: &Line, strides: &[usize], (from, to): (&[usize], &[usize])) -> Option<Strides> {
    match &l.n.op {
        Op::Reshape(_) => reshaped(from, strides, to),
        Op::Transpose(o) => {
            Some(places(&o.rule.0.ins[0], &o.rule.0.outs[0]).iter().map(|d| strides[*d]).collect())
        }
        Op::Expand(o) => {
            let own = &o.rule.0.ins[0];
            let of = |g| own.iter().position(|i| i == g).map_or(0, |d| strides[d]);
            Some(o.rule.0.outs[0].iter().map(of).collect())
        }
        Op::Narrow(o) => {
            let mut strides = strides.to_vec();
            strides[o.dim.of(to.len())?] *= o.step.0;
            Some(strides)
        }
        _same => Some(strides.to_vec()),
    }
}

/// As torch's `view` finds strides: dims that lie one in the other are one, and each such one is cut anew.
fn reshaped(from: &[usize], strides: &[usize], to: &[usize]) -> Option<Strides> {
    if from.contains(&0) || from.is_empty() {
        return Some(contiguous(to));
    }
    let mut out = vec![1; to.len()];
    let (mut next, mut count, mut cut) = (to.len(), 1, 1);
    let mut base = strides[from.len() - 1];
    for d in (0..from.len()).rev() {
        count *= from[d];
        if d > 0 && (from[d - 1] == 1 || strides[d - 1] == count * base) {
            continue;
        }
        while next > 0 && (cut < count || to[next - 1] == 1) {
            next -= 1;
            out[next] = cut * base;
            cut *= to[next];
        }
        if cut != count {
            return None;
        }
        if d > 0 {
            (base, count, cut) = (strides[d - 1], 1, 1);
        }
    }
    (next == 0).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `torch.empty_strided(from, strides).view(to)` gives.
    #[test]
    fn strides_are_as_torch_has_them() {
        type Sizes = &'static [usize];
        let rows: [(Sizes, Sizes, Sizes, Option<Sizes>); 6] = [
            (&[8, 16, 4], &[64, 4, 1], &[128, 4], Some(&[4, 1])),
            (&[8, 16, 2, 4], &[1024, 64, 32, 1], &[8, 16, 8], None),
            (&[8, 16, 8], &[1024, 64, 1], &[8, 16, 2, 4], Some(&[1024, 64, 4, 1])),
            (&[2, 3, 2, 4], &[24, 8, 0, 1], &[2, 6, 4], None),
            (&[1, 16, 4], &[7, 4, 1], &[4, 4, 4], Some(&[16, 4, 1])),
            (&[16, 2], &[1, 16], &[32], None),
        ];
        for (from, strides, to, want) in rows {
            assert_eq!(reshaped(from, strides, to).as_deref(), want, "{from:?} {strides:?}");
        }
    }
}
