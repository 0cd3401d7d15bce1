//! Sizes that fit what ties them.

use super::{Net, Size};
use std::collections::{BTreeMap, BTreeSet};

/// Sizes are products of products, few times over.
const DEEPEST: usize = 16;

impl Net<'_> {
    /// Products of one size are of the same sizes, and the same products are one size.
    pub(super) fn one_product_each(&mut self) -> Result<(), String> {
        loop {
            let mut known: BTreeMap<Size, (usize, Vec<Size>)> = BTreeMap::new();
            let mut sizes: BTreeMap<(usize, Vec<Size>), Size> = BTreeMap::new();
            let (mut ties, mut apart) = (vec![], None);
            for (s, by, of) in &self.products {
                let mut of: Vec<Size> = of.iter().map(|s| self.root(*s)).collect();
                of.retain(|s| self.was[*s] != 1);
                let s = self.root(*s);
                if let (1, [one]) = (*by, &of[..]) {
                    ties.extend([(s, *one)].into_iter().filter(|(a, b)| a != b));
                    continue;
                }
                let same = *sizes.entry((*by, of.clone())).or_insert(s);
                if same != s {
                    ties.push((same, s));
                }
                // Taken apart in the same way, part by part.
                let (first_by, first) = known.entry(s).or_insert((*by, of.clone()));
                let was = |all: &[Size]| all.iter().map(|x| self.was[*x]).collect::<Vec<_>>();
                if (*first_by, was(first)) != (*by, was(&of)) {
                    apart = Some(self.was[s]);
                    continue;
                }
                ties.extend(first.iter().copied().zip(of).filter(|(a, b)| a != b));
            }
            let mut wholes: BTreeMap<(usize, Size), Size> = BTreeMap::new();
            let mut parts: BTreeMap<Size, (usize, Size)> = BTreeMap::new();
            for (part, by, whole) in &self.quotients {
                let [part, whole] = [self.root(*part), self.root(*whole)];
                let (first_by, first) = *parts.entry(part).or_insert((*by, whole));
                if first_by != *by || known.contains_key(&part) {
                    apart = Some(self.was[part]);
                    continue;
                }
                let same = *wholes.entry((*by, whole)).or_insert(part);
                ties.extend([(first, whole), (same, part)].into_iter().filter(|(a, b)| a != b));
            }
            match (ties.is_empty(), apart) {
                (true, Some(n)) => return Err(format!("to make {n} smaller: two products")),
                (true, None) => {
                    self.products = known.into_iter().map(|(s, (by, of))| (s, by, of)).collect();
                    self.quotients = parts.into_iter().map(|(s, (by, of))| (s, by, of)).collect();
                    let wholes = self.quotients.iter().map(|(_, by, whole)| (*whole, *by));
                    self.multiples.extend(wholes);
                    return Ok(());
                }
                (false, _) => {}
            }
            ties.into_iter().try_for_each(|(a, b)| self.tie(a, b))?;
        }
    }

    fn product(&self, root: Size) -> Option<&(Size, usize, Vec<Size>)> {
        self.products.binary_search_by_key(&root, |p| p.0).ok().map(|i| &self.products[i])
    }

    fn quotient(&self, root: Size) -> Option<&(Size, usize, Size)> {
        self.quotients.binary_search_by_key(&root, |q| q.0).ok().map(|i| &self.quotients[i])
    }

    /// The size as it is chosen so far.
    pub(super) fn size(&self, s: Size) -> usize {
        self.size_within(s, DEEPEST)
    }

    /// What goes around in a circle has no size: 0.
    fn size_within(&self, s: Size, deepest: usize) -> usize {
        let root = self.root(s);
        let Some(deepest) = deepest.checked_sub(1) else { return 0 };
        if let Some((_, by, whole)) = self.quotient(root) {
            return self.size_within(*whole, deepest) / by;
        }
        match self.product(root) {
            Some((_, by, of)) => {
                of.iter().fold(*by, |n, x| n.saturating_mul(self.size_within(*x, deepest)))
            }
            None if self.was[root] < 2 => self.was[root],
            None => self.chosen.get(&root).copied().unwrap_or(2),
        }
    }

    /// A size that is not a product and that makes this one larger.
    fn leaf(&self, s: Size, fixed: &BTreeSet<Size>, deepest: usize) -> Option<Size> {
        let root = self.root(s);
        let deepest = deepest.checked_sub(1)?;
        if let Some((_, _, whole)) = self.quotient(root) {
            return self.leaf(*whole, fixed, deepest);
        }
        match self.product(root) {
            Some((_, _, of)) => of.iter().rev().find_map(|x| self.leaf(*x, fixed, deepest)),
            None => (self.was[root] > 1 && !fixed.contains(&root)).then_some(root),
        }
    }

    /// Gives a size this number, and those of which it is made what they were.
    fn keep(
        &mut self,
        s: Size,
        n: usize,
        fixed: &mut BTreeSet<Size>,
        deepest: usize,
    ) -> Result<(), String> {
        let root = self.root(s);
        let round = "to find sizes that divide as before";
        let deepest = deepest.checked_sub(1).ok_or(round)?;
        if let Some(&(_, by, whole)) = self.quotient(root) {
            return self.keep(whole, n.saturating_mul(by), fixed, deepest);
        }
        if let Some((_, _, of)) = self.product(root) {
            for x in of.clone() {
                self.keep(x, self.was[x], fixed, deepest)?;
            }
        } else if self.was[root] > 1 && fixed.insert(root) {
            self.chosen.insert(root, n);
        }
        Ok(())
    }

    /// Chooses sizes: two, or as many as pieces need; four of those that are to be longer.
    pub(super) fn choose(&mut self, long: &[Size]) -> Result<(), String> {
        let mut fixed = BTreeSet::new();
        for (s, n) in self.exact.clone() {
            let root = self.root(s);
            fixed.insert(root);
            self.chosen.insert(root, n);
        }
        for s in self.stays.clone() {
            self.keep(s, self.was[s], &mut fixed, DEEPEST)?;
        }
        for s in long.iter().filter_map(|s| self.leaf(*s, &fixed, DEEPEST)).collect::<Vec<_>>() {
            self.chosen.insert(s, 4);
        }
        let mut needed = self.multiples.clone();
        needed.iter_mut().for_each(|x| x.0 = self.root(x.0));
        needed.sort_unstable();
        needed.dedup();
        let mut settled = false;
        for _ in 0..64 {
            settled = true;
            for (s, by) in &needed {
                let n = self.size(*s);
                if n % by == 0 && n > 0 || self.was[*s] < 2 {
                    continue;
                }
                let leaf = self.leaf(*s, &fixed, DEEPEST);
                let leaf = leaf.ok_or(format!("to make {} smaller: its pieces", self.was[*s]))?;
                if n == 0 {
                    return Err(format!(
                        "to make {} smaller: it is a part of itself",
                        self.was[*s]
                    ));
                }
                let factor = by / common(n, *by);
                let now = self.size(leaf);
                self.chosen.insert(leaf, now * factor);
                settled = false;
            }
            if settled {
                break;
            }
        }
        let kept = self.exact.iter().all(|(s, n)| self.size(*s) == *n)
            && self.stays.iter().all(|s| self.size(*s) == self.was[*s]);
        match settled && kept {
            true => Ok(()),
            false => Err("to find sizes that divide as before".into()),
        }
    }
}

/// The greatest common divisor.
fn common(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common(b, a % b) }
}
