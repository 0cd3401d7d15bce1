//! Products in normal form: multiplication, Einstein sums, reductions, transposes and expansions are
//! all one flat product, whose factors and letters stand in an order that depends on nothing else.

use crate::number::Coef;
use crate::term::{Factor, Node, Store, Term};
use shardc_ir::maps::HashMap;
use std::collections::BTreeMap;

/// A letter of a product that is being made.
pub type Letter = u32;

/// Letters of inner products are numbered from here.
const FRESH: Letter = 1 << 20;

/// A product that is being made: factors, sizes of letters, and a number.
struct Flat {
    factors: Vec<(Term, Vec<Letter>)>,
    sizes: BTreeMap<Letter, usize>,
    coef: Coef,
    next: Letter,
}

impl Store {
    /// The sum over all letters that are not in `out` of the product of the factors. Letters of `out`
    /// that no factor has are new dims.
    ///
    /// # Errors
    /// Says which letter has two sizes, or that there are too many.
    pub fn product(
        &mut self,
        factors: &[(Term, Vec<Letter>)],
        out: &[Letter],
        shape: &[usize],
    ) -> Result<Term, String> {
        let mut sizes: BTreeMap<Letter, usize> = BTreeMap::new();
        let mut size = |l: Letter, n: usize| match sizes.insert(l, n) {
            Some(m) if m != n => Err(format!("a letter has the sizes {m} and {n}")),
            _ => Ok(()),
        };
        if out.len() != shape.len() {
            return Err(format!("{} letters for {} dims", out.len(), shape.len()));
        }
        for (&l, &n) in out.iter().zip(shape) {
            size(l, n)?;
        }
        for (t, letters) in factors {
            if letters.len() != self.shape(*t).len() {
                return Err(format!("{} letters for {:?}", letters.len(), self.shape(*t)));
            }
            for (&l, &n) in letters.iter().zip(self.shape(*t)) {
                size(l, n)?;
            }
        }
        if let Some(chunk) = self.product_of_chunks(factors, out, shape)? {
            return Ok(chunk);
        }
        let mut flat = Flat { factors: vec![], sizes, coef: Coef::ONE, next: FRESH };
        for (t, letters) in factors {
            self.flatten(&mut flat, *t, letters);
        }
        if flat.coef == Coef::ZERO {
            return Ok(self.zero(shape));
        }
        // Letters that were summed over and that no factor has any more.
        let lost = |l: &&Letter| !out.contains(l) && !flat.factors.iter().any(|f| f.1.contains(l));
        let lost: Vec<Letter> = flat.sizes.keys().filter(lost).copied().collect();
        for l in lost {
            let n = flat.sizes.remove(&l).unwrap_or(1);
            flat.coef = flat.coef.times(Coef::whole(n));
            self.lemma("the sum of what is the same everywhere is a multiple");
        }
        let monomial = match &flat.factors[..] {
            [(t, letters)] if letters[..] == *out => *t,
            _ => {
                let factors = canonical(&flat, out)?;
                self.put(Node::Product(factors.into()), shape)
            }
        };
        Ok(self.sum(&[(flat.coef, monomial)], shape))
    }

    /// Adds a factor: products in it are taken apart, numbers come out.
    fn flatten(&mut self, flat: &mut Flat, t: Term, letters: &[Letter]) {
        let mut t = t;
        if let Node::Sum(s) = self.node(t) {
            match (self.sums.first(*s), self.sums.len(*s)) {
                (None, _) => flat.coef = Coef::ZERO,
                (Some((c, u)), 1) => {
                    flat.coef = flat.coef.times(c);
                    t = u;
                }
                (Some((lead, _)), _) => {
                    flat.coef = flat.coef.times(lead);
                    if lead != Coef::ONE {
                        t = self.scale(lead.inverse(), t);
                        self.lemma("the leading coefficient of a sum leaves a product");
                    }
                }
            }
        }
        let Node::Product(inner) = self.node(t).clone() else {
            flat.factors.push((t, letters.to_vec()));
            return;
        };
        let rank = self.shape(t).len();
        let mut names: HashMap<u8, Letter> = HashMap::default();
        for (u, own) in inner.iter() {
            let mut renamed = Vec::with_capacity(own.len());
            for (d, &l) in own.iter().enumerate() {
                renamed.push(match letters.get(l as usize).filter(|_| (l as usize) < rank) {
                    Some(&outer) => outer,
                    None => *names.entry(l).or_insert_with(|| {
                        flat.next += 1;
                        flat.sizes.insert(flat.next, self.shape(*u)[d]);
                        flat.next
                    }),
                });
            }
            flat.factors.push((*u, renamed));
        }
        self.lemma("a product of products is one product");
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let x = (a ^ b.rotate_left(23)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ (x >> 29)
}

/// Factors in an order, with names of the summed letters, that depend on nothing but the product: by
/// colours of letters, refined by the factors they are in. Letters that look alike are told apart one
/// by one. Where that choice matters, equal products may get two forms, and unequal ones never one.
fn canonical(flat: &Flat, out: &[Letter]) -> Result<Vec<Factor>, String> {
    let mut colour: BTreeMap<Letter, u64> = BTreeMap::new();
    for (&l, &n) in &flat.sizes {
        let own = match out.iter().position(|o| *o == l) {
            Some(p) => mix(1, p as u64),
            None => mix(2, n as u64),
        };
        colour.insert(l, own);
    }
    refine(flat, &mut colour);
    let bound: Vec<Letter> = flat.sizes.keys().filter(|l| !out.contains(l)).copied().collect();
    for _ in 0..bound.len() {
        let mut by: Vec<(u64, Letter)> = bound.iter().map(|l| (colour[l], *l)).collect();
        by.sort_unstable();
        let Some(alike) = by.windows(2).find(|w| w[0].0 == w[1].0) else { break };
        colour.insert(alike[0].1, mix(alike[0].0, 77));
        refine(flat, &mut colour);
    }
    let mut order: Vec<(u64, Letter)> = bound.iter().map(|l| (colour[l], *l)).collect();
    order.sort_unstable();
    let names: BTreeMap<Letter, usize> =
        out.iter().copied().chain(order.into_iter().map(|x| x.1)).zip(0..).collect();
    if names.len() > usize::from(u8::MAX) {
        return Err(format!("a product of {} letters", names.len()));
    }
    let name = |l: &Letter| names[l] as u8;
    let mut factors: Vec<Factor> =
        flat.factors.iter().map(|(t, l)| (*t, l.iter().map(name).collect())).collect();
    factors.sort();
    Ok(factors)
}

/// Gives letters the colours of the places they are in, until what is near was seen.
fn refine(flat: &Flat, colour: &mut BTreeMap<Letter, u64>) {
    for _ in 0..flat.factors.len().min(6) + 1 {
        let mut seen: BTreeMap<Letter, Vec<u64>> = BTreeMap::new();
        for (t, letters) in &flat.factors {
            let own = letters.iter().fold(mix(3, u64::from(t.0)), |h, l| mix(h, colour[l]));
            for (p, l) in letters.iter().enumerate() {
                seen.entry(*l).or_default().push(mix(own, p as u64));
            }
        }
        for (l, mut places) in seen {
            places.sort_unstable();
            let c = colour.get_mut(&l).expect("a letter of the product");
            *c = places.into_iter().fold(*c, mix);
        }
    }
}
