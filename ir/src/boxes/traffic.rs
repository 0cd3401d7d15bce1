//! What the ranks of a group send and receive: counted rank by rank, but not pair by pair.
//!
//! What a rank that holds and one that reads have in common is a product over the dims, and the part of a dim depends
//! on the coordinates over the atoms that split it alone. So what a holder has in common with all readers is a
//! product, too: of one sum for each dim, and one for each atom that splits none. Each is looked up in a table by the
//! few coordinates of the holder that say something of it. A table is made of the pairs of *pieces* that overlap, of
//! which there are about as many as pieces.

use super::{Boxes, MAX_COUNTED, Traffic, digits};
use crate::mesh::{Atom, AtomSet};
use crate::steps;
use smallvec::SmallVec;

/// Coordinate u of a reader, modulo the size of a, is coordinate a of the rank that is asked about.
type Tie = (Atom, Atom);

/// Takes coordinates of a reader, of a holder, and how much they have in common.
type OnPair<'a> = dyn FnMut(&[usize], &[usize], usize) + 'a;

/// Sums of one factor, by the coordinates of a rank over some atoms.
struct Table {
    key: AtomSet,
    sums: Vec<usize>,
}

/// A product of sums.
struct Sums<'a> {
    of: &'a Boxes,
    tables: SmallVec<[Table; 8]>,
}

impl Sums<'_> {
    /// For the rank with these coordinates.
    fn at(&self, coords: &[usize]) -> usize {
        let mesh = &self.of.mesh;
        self.tables.iter().map(|t| t.sums[mesh.place(t.key, coords)]).product()
    }
}

impl Boxes {
    /// What the ranks of a group send and receive, of groups of at most [`MAX_COUNTED`] ranks; of larger
    /// ones no more than this.
    pub fn traffic(&self) -> Traffic {
        let ways = self.mesh.ways(self.axes);
        if ways > MAX_COUNTED {
            let piece = |t: &crate::types::Type| t.chunks(&self.mesh).iter().product();
            let most = usize::max(piece(&self.from), piece(&self.to));
            return Traffic { sent: most, received: most };
        }
        let same = |s: AtomSet| s.iter().map(|a| (a, a)).collect::<SmallVec<[Tie; 8]>>();
        let split = self.from.sharded().and(self.axes);
        // Of a mirror, what was the same everywhere comes from one's own place, and sums go everywhere.
        let (mut whole, mut spread) = (AtomSet::EMPTY, AtomSet::EMPTY);
        if self.mirror {
            whole = self.axes.minus(self.to.sharded()).and(split);
            spread = self.axes.minus(split).minus(self.from.replicated);
        }
        let named = self.copies.iter().filter(|c| !spread.has(c.0));
        let own: AtomSet = named.clone().map(|c| c.0).collect();
        let named: SmallVec<[Tie; 8]> = named.map(|&(a, u)| (u, a)).collect();
        // A rank that stands where the reader does over all that splits the operand gives at its own place, and a rank
        // gives itself nothing.
        let by_name = self.sums(split, named.iter().copied().chain(same(whole)));
        let here = self.sums(split, named.iter().copied().chain(same(split)));
        let own = self.sums(split, same(own).into_iter().chain(same(split)));
        let itself = self.sums(split, same(self.axes));
        let pieces = self.sums(whole, same(self.axes));
        let spread = self.mesh.ways(spread);
        let mut coords = vec![0; self.mesh.atoms.len()];
        let (mut holds, mut reads) = (0, 0);
        for rank in 0..ways {
            self.stand(rank, self.axes, &mut coords);
            let itself = itself.at(&coords);
            let held = by_name.at(&coords) + own.at(&coords) - here.at(&coords) - itself;
            holds = holds.max(held);
            reads = reads.max(spread * pieces.at(&coords) - itself);
        }
        steps::add("traffic", ways);
        match self.mirror {
            true => Traffic { sent: reads, received: holds },
            false => Traffic { sent: holds, received: reads },
        }
    }

    /// The elements that readers and holders have in common, summed over the pairs in which the holder stands where the
    /// rank does over `held`, and the reader as the ties say.
    fn sums(&self, held: AtomSet, ties: impl IntoIterator<Item = Tie>) -> Sums<'_> {
        let ties: SmallVec<[Tie; 8]> = ties.into_iter().collect();
        let mut tables: SmallVec<[Table; 8]> = SmallVec::new();
        for d in 0..self.from.rank() {
            let [old, new] = [&self.from, &self.to].map(|t| t.dims[d].atoms.set().and(self.axes));
            if !old.union(new).is_empty() {
                tables.push(self.table(old.and(held), new, &ties, |f| self.each_common(d, f)));
            } else {
                // Nobody cuts it, or all alike: the same for all.
                let mut sums = vec![0];
                self.each_common(d, |_, _, size| sums[0] += size);
                tables.push(Table { key: AtomSet::EMPTY, sums });
            }
        }
        // What splits no dim of the result, the reader may have anywhere.
        let mut coords = vec![0; self.mesh.atoms.len()];
        for u in self.axes.minus(self.to.sharded()).iter() {
            let all = |f: &mut OnPair| {
                for at in 0..self.mesh.size(u) {
                    coords[u.0 as usize] = at;
                    f(&coords, &[], 1);
                }
            };
            tables.push(self.table(AtomSet::EMPTY, AtomSet::one(u), &ties, all));
        }
        Sums { of: self, tables }
    }

    /// The sums of a factor, of which `each` calls with coordinates of a reader, of a holder, and what they have in
    /// common. It depends on the holder's over `held`, if they are given, and on the reader's over `read`.
    fn table(
        &self,
        held: AtomSet,
        read: AtomSet,
        ties: &[Tie],
        each: impl FnOnce(&mut OnPair),
    ) -> Table {
        let ties: SmallVec<[Tie; 8]> = ties.iter().copied().filter(|t| read.has(t.0)).collect();
        let key = ties.iter().fold(held, |s, t| s.with(t.1));
        let mut sums = vec![0; self.mesh.ways(key)];
        let mut at = vec![0; self.mesh.atoms.len()];
        let mut pairs = 0;
        each(&mut |reader, holder, size| {
            pairs += 1;
            held.iter().for_each(|a| at[a.0 as usize] = holder[a.0 as usize]);
            let mut known = held;
            for &(u, a) in &ties {
                let own = reader[u.0 as usize] % self.mesh.size(a);
                if known.has(a) && at[a.0 as usize] != own {
                    return;
                }
                at[a.0 as usize] = own;
                known = known.with(a);
            }
            sums[self.mesh.place(key, &at)] += size;
        });
        steps::add("traffic", pairs);
        Table { key, sums }
    }

    /// Calls `f` with the coordinates of readers and of holders over the atoms of a dim, for each pair of their pieces
    /// that overlap there, and by how much they do.
    fn each_common(&self, d: usize, mut f: impl FnMut(&[usize], &[usize], usize)) {
        let new = self.to.dims[d].atoms.set().and(self.axes);
        let old = digits(&self.mesh, self.from.dims[d].atoms, self.mesh.all());
        let chunk = self.from.chunk(&self.mesh, d);
        let size = self.from.dims[d].size;
        let turned = self.from.dims[d].atoms.is_turned();
        let mut reader = vec![0; self.mesh.atoms.len()];
        let mut holder = reader.clone();
        for place in 0..self.mesh.ways(new) {
            self.stand(place, new, &mut reader);
            let own = self.wanted(d, &reader);
            if own.is_empty() {
                continue;
            }
            for piece in own.start / chunk..own.end.div_ceil(chunk) {
                let mut rest = piece;
                for &(_, _, a) in old.iter().rev() {
                    let (size, own) = (self.mesh.size(a), rest % self.mesh.size(a));
                    holder[a.0 as usize] = if turned { size - 1 - own } else { own };
                    rest /= size;
                }
                let (from, to) = (own.start.max(piece * chunk), own.end.min((piece + 1) * chunk));
                f(&reader, &holder, to.min(size) - from);
            }
        }
    }
}
