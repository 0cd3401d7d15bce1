//! Lemmas of the normal form over the field: a term has the value of what it was made of.

use super::functions::mix;
use super::*;
use crate::fun::Cut;
use crate::number::Coef;
use crate::term::Mentions;
use std::collections::BTreeSet;

/// Seeded numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = mix(self.0, 1);
        (self.0 % n as u64) as usize
    }
}

/// A tensor over letters of fixed sizes, as a term and as its value.
type Made = (Term, Tensor, Vec<u32>);

const SIZES: [usize; 4] = [2, 3, 1, 4];

fn shape(letters: &[u32]) -> Vec<usize> {
    letters.iter().map(|&l| SIZES[l as usize]).collect()
}

/// Some different letters.
fn some(dice: &mut Dice, most: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..SIZES.len() as u32).collect();
    let n = dice.below(most + 1);
    (0..n).map(|_| all.remove(dice.below(all.len()))).collect()
}

fn coef(x: f64) -> Coef {
    Coef::of(x).expect("a finite number")
}

/// One more tensor, made of those that there are.
fn grow(s: &mut Store, dice: &mut Dice, all: &mut Vec<Made>) {
    let pick = |dice: &mut Dice, all: &[Made]| all[dice.below(all.len())].clone();
    let made = match dice.below(4) {
        0 => {
            let n = 1 + dice.below(3);
            let of: Vec<Made> = (0..n).map(|_| pick(dice, all)).collect();
            let out = some(dice, 3);
            let terms: Vec<(Term, Vec<u32>)> = of.iter().map(|f| (f.0, f.2.clone())).collect();
            let values: Vec<(&Tensor, &[u32])> = of.iter().map(|f| (&f.1, &f.2[..])).collect();
            let t = s.product(&terms, &out, &shape(&out)).expect("letters have one size");
            // A summed letter that is lost in the term still counts.
            (t, einsum(&values, &out, &shape(&out)), out)
        }
        1 => {
            let first = pick(dice, all);
            let alike: Vec<Made> = all.iter().filter(|m| m.2 == first.2).cloned().collect();
            let second = pick(dice, &alike);
            let c = [-1.0, 0.5, 3.0, 1.0][dice.below(4)];
            let t = s.sum(&[(Coef::ONE, first.0), (coef(c), second.0)], &shape(&first.2));
            let by = functions::number(c);
            let value = first.1.zip(&second.1, |a, b| add(a, times(by, b), P));
            (t, value, first.2)
        }
        2 => {
            let (t, v, letters) = pick(dice, all);
            (s.reciprocal(t), v.map(|x| crate::number::inverse(x, P)), letters)
        }
        _fill => {
            let out = some(dice, 2);
            let c = [0.0, 1.0, -2.5][dice.below(3)];
            let value = Tensor::full(&shape(&out), functions::number(c));
            (s.fill(coef(c), &shape(&out)), value, out)
        }
    };
    all.push(made);
}

fn inputs() -> Inputs {
    Inputs {
        data: Data { vocab: 5 },
        rows: 2,
        microbatches: 3,
        floats: BTreeSet::new(),
        below: BTreeMap::new(),
    }
}

fn value(s: &Store, t: Term) -> Tensor {
    let inputs = inputs();
    let mut values = Values::new(s, &inputs, 1);
    (*values.of(t, Some(0)).expect("a value")).clone()
}

fn leaves(s: &mut Store) -> Vec<Made> {
    let letters: [&[u32]; 6] = [&[0, 1], &[1, 0], &[1, 3], &[3], &[0, 2], &[]];
    let leaf = |(i, l): (usize, &&[u32])| {
        let name = format!("leaf {i}");
        let t = s.leaf(&*name, &shape(l), Mentions::default());
        (t, noise(&name, &shape(l)), l.to_vec())
    };
    letters.iter().enumerate().map(leaf).collect()
}

#[test]
fn sums_and_products_keep_their_value() {
    for seed in 0..200 {
        let (mut s, mut dice) = (Store::default(), Dice(seed));
        let mut all = leaves(&mut s);
        for _ in 0..14 {
            grow(&mut s, &mut dice, &mut all);
        }
        for (t, v, _) in &all {
            assert_eq!(value(&s, *t), *v, "seed {seed}: {}", s.show(*t, 4));
        }
    }
}

/// Factors in another order, and products taken together in another way, are the same term.
#[test]
fn equal_products_are_one_term() {
    for seed in 0..200 {
        let (mut s, mut dice) = (Store::default(), Dice(seed));
        let all = leaves(&mut s);
        let n = 2 + dice.below(4);
        let mut of: Vec<(Term, Vec<u32>)> = vec![];
        for _ in 0..n {
            let (t, _, letters) = all[dice.below(all.len())].clone();
            of.push((t, letters));
        }
        let out = some(&mut dice, 2);
        let t = s.product(&of, &out, &shape(&out)).expect("sizes");
        of.rotate_left(1);
        assert_eq!(s.product(&of, &out, &shape(&out)).expect("sizes"), t);
        // The first two first: with all letters, so that nothing is summed too early.
        let mut both: Vec<u32> = [&of[0].1[..], &of[1].1].concat();
        both.sort_unstable();
        both.dedup();
        let inner = s.product(&of[..2], &both, &shape(&both)).expect("sizes");
        let rest: Vec<_> = std::iter::once((inner, both)).chain(of.drain(2..)).collect();
        assert_eq!(s.product(&rest, &out, &shape(&out)).expect("sizes"), t, "seed {seed}");
    }
}

#[test]
fn reshapes_and_folds_keep_their_value() {
    let mut s = Store::default();
    let a = s.leaf("a", &[2, 6], Mentions::MICROBATCH);
    let b = s.leaf("b", &[3, 4], Mentions::default());
    let flat = s.reshape(b, &[12]);
    let b = s.reshape(flat, &[2, 6]);
    let sum = s.sum(&[(Coef::whole(2), a), (Coef::ONE, b)], &[2, 6]);
    let t = s.reshape(sum, &[4, 3]);
    let plain = noise("b", &[3, 4]).reshaped(&[4, 3]);
    let want = noise("a", &[2, 6]).reshaped(&[4, 3]).map(|x| times(2, x)).plus(&plain);
    assert_eq!(value(&s, t), want);
    let folded = s.fold(t, inputs().microbatches);
    // Leaves have the same numbers in all three microbatches here.
    assert_eq!(value(&s, folded), want.map(|x| times(3, x)));
}

/// All pieces of a cut, each once, are the whole, and nothing else is.
#[test]
fn all_pieces_are_the_whole() {
    let (mut s, none) = (Store::default(), Mentions::default());
    let (x, w) = (s.leaf("x", &[2, 6], none), s.leaf("w", &[6, 4], none));
    let whole = s.product(&[(x, vec![0, 1]), (w, vec![1, 2])], &[0, 2], &[2, 4]).expect("sizes");
    let part = |s: &mut Store, i: usize, j: usize| {
        let a = s.piece(x, Cut { dim: 1, of: 3, piece: i }).expect("even");
        let b = s.piece(w, Cut { dim: 0, of: 3, piece: j }).expect("even");
        s.product(&[(a, vec![0, 1]), (b, vec![1, 2])], &[0, 2], &[2, 4]).expect("sizes")
    };
    let parts = [0, 1, 2].map(|k| part(&mut s, k, k));
    let crossed = part(&mut s, 2, 1);
    assert_eq!(s.add(&parts), whole);
    assert_ne!(s.add(&[parts[0], parts[1], parts[1]]), whole);
    assert_ne!(s.add(&parts[..2]), whole);
    assert_ne!(s.add(&[parts[0], parts[1], crossed]), whole);
    // Columns of the result, each at its place.
    let column = |s: &mut Store, k: usize, at: usize| {
        let b = s.piece(w, Cut { dim: 1, of: 2, piece: k }).expect("even");
        let y = s.product(&[(x, vec![0, 1]), (b, vec![1, 2])], &[0, 2], &[2, 2]).expect("sizes");
        s.place(y, Cut { dim: 1, of: 2, piece: at }).expect("even")
    };
    let columns = [column(&mut s, 0, 0), column(&mut s, 1, 1)];
    let crossed = [column(&mut s, 0, 1), column(&mut s, 1, 0)];
    assert_eq!(s.add(&columns), whole);
    assert_ne!(s.add(&crossed), whole);
    assert_ne!(s.add(&[columns[0], columns[0]]), whole);
}

/// By a wrong lemma two pieces of three are the whole: their values say that they are not.
#[test]
fn a_wrong_lemma_is_caught() {
    let (mut s, none) = (Store::default(), Mentions::default());
    s.lemmas.pieces = |numbers, of| numbers.len() + 1 >= of;
    let (x, w) = (s.leaf("x", &[2, 6], none), s.leaf("w", &[6, 4], none));
    let whole = s.product(&[(x, vec![0, 1]), (w, vec![1, 2])], &[0, 2], &[2, 4]).expect("sizes");
    let [x_value, w_value] = [noise("x", &[2, 6]), noise("w", &[6, 4])];
    let mut parts = |k: usize| {
        let a = s.piece(x, Cut { dim: 1, of: 3, piece: k }).expect("even");
        let b = s.piece(w, Cut { dim: 0, of: 3, piece: k }).expect("even");
        let t = s.product(&[(a, vec![0, 1]), (b, vec![1, 2])], &[0, 2], &[2, 4]).expect("sizes");
        let [a, b] = [x_value.slice(1, 2 * k, 2), w_value.slice(0, 2 * k, 2)];
        (t, einsum(&[(&a, &[0, 1]), (&b, &[1, 2])], &[0, 2], &[2, 4]))
    };
    let [first, second, third] = [0, 1, 2].map(&mut parts);
    assert_eq!(s.add(&[first.0, second.0]), whole, "proved by the wrong lemma");
    let two = first.1.plus(&second.1);
    assert_ne!(value(&s, whole), two);
    assert_eq!(value(&s, whole), two.plus(&third.1));
}
