//! Over many axes: two at a time, the others as they are, until no two of them gain.
//!
//! Ways of an op grow with the axes as powers, those over two of them do not. One axis at a time would end far
//! above the least: where an axis leaves a dim, another one takes it.

use super::{Builder, Choices, Price};
use crate::shard::ways::{Chosen, Execution, Place, PlacedAtoms};
use shardc_ir::func::ValueMap;
use shardc_ir::mesh::{Atom, AtomSet, PIPELINE};

/// Most axes, and parts of them, over which the choice is exact.
pub const MOST_EXACT: usize = 2;

/// Orders in which pairs are tried.
const STARTS: usize = 3;

/// What was chosen, and what it costs.
type ChosenLayouts = (Chosen, Price);

impl Builder<'_> {
    /// The least over all axes. Exact, with what it was chosen from, over few.
    pub(super) fn least(&mut self) -> (Chosen, Price, Option<Choices>) {
        let mesh = self.asked.mesh;
        let atoms = mesh.all().minus(mesh.axis(PIPELINE).unwrap_or_default());
        let parts: Vec<AtomSet> = atoms.iter().map(AtomSet::one).collect();
        if parts.len() <= MOST_EXACT {
            self.over = parts.iter().map(|&s| (s, true)).collect();
            let (chosen, price, choices) = self.all();
            return (chosen, price, Some(choices));
        }
        // Whole axes first, and from there their parts.
        let of = |i: usize| atoms.iter().filter(move |a| mesh.atoms[a].axis as usize == i);
        let axes = (0..mesh.axes.len()).map(|i| of(i).collect::<AtomSet>());
        let axes: Vec<AtomSet> = axes.filter(|s| !s.is_empty()).collect();
        let mut found = if axes.len() <= MOST_EXACT {
            self.over = axes.iter().map(|&s| (s, true)).collect();
            let (chosen, price, _) = self.all();
            (chosen, price)
        } else {
            let all = |start| self.descend(&axes, start * axes.len(), None);
            (0..STARTS).map(all).min_by_key(|f| rank(&f.1)).expect("some starts")
        };
        if axes.len() < parts.len() {
            found = self.descend(&parts, 0, Some(found));
        }
        let (chosen, price) = found;
        (chosen, Price { bound: None, ..price }, None)
    }

    /// From a choice, or from nothing split, to one that no pair makes better; beginning with pair number `first`.
    fn descend(
        &mut self,
        groups: &[AtomSet],
        first: usize,
        from: Option<ChosenLayouts>,
    ) -> ChosenLayouts {
        let pairs: Vec<[usize; 2]> =
            (0..groups.len()).flat_map(|b| (0..b).map(move |a| [a, b])).collect();
        let (mut now, mut price) = match from {
            Some((now, price)) => (now, Some(price)),
            None => (self.whole(), None),
        };
        let mut in_vain = 0;
        for k in first.. {
            if in_vain == pairs.len() {
                break;
            }
            let pair = pairs[k % pairs.len()];
            self.over = groups.iter().enumerate().map(|(i, &s)| (s, pair.contains(&i))).collect();
            self.now = Some(now.clone());
            let (chosen, new, _) = self.all();
            in_vain += 1;
            if price.is_none_or(|old| rank(&new) < rank(&old)) {
                (now, price, in_vain) = (chosen, Some(new), 1);
            }
        }
        self.now = None;
        (now, price.expect("a pair was tried"))
    }

    /// Nothing split but what is asked for.
    fn whole(&self) -> Chosen {
        let run = self.ops.iter().map(Execution::whole).collect();
        let own = self.f.values.ids().map(|v| self.asked_for(v)).collect();
        Chosen { run, own, stored: ValueMap::default() }
    }

    /// The axes as groups; where something is that is not open, says the choice so far.
    pub(super) fn groups(&self, place: impl Fn(&Chosen, Atom) -> Place) -> Vec<PlacedAtoms> {
        let mut out = vec![];
        for &(atoms, open) in &self.over {
            match self.now.as_ref().filter(|_| !open) {
                Some(now) => {
                    out.extend(atoms.iter().map(|a| (AtomSet::one(a), Some(place(now, a)))))
                }
                None => out.push((atoms, None)),
            }
        }
        out
    }
}

/// What is better is less: what fits, then what takes less time.
fn rank(p: &Price) -> (bool, u64, u64) {
    match p.fits {
        true => (false, p.time, p.memory),
        false => (true, p.memory, p.time),
    }
}
