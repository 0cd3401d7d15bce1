//! The gradient of a recurrence is its derivative: both are executed over the field, and nothing that differs by a sign, a
//! transposition or an index passes for it.

use super::*;

const KEYS: usize = 2;
const VALUES: usize = 3;
const TOKENS: usize = 4;
const HEADS: usize = 2;

fn drawn(name: &str, shape: &[usize]) -> Tensor {
    let mut k = 0;
    Tensor::from_fn(shape, |_| {
        k += 1;
        oracle(seed(name), &[k])
    })
}

/// Operands of a recurrence in one row, and cotangents of its results.
fn operands(of: Scan, borders: &[usize]) -> (Vec<Tensor>, [Tensor; 2]) {
    let keys = [1, TOKENS, HEADS, KEYS];
    let values = [1, TOKENS, HEADS, VALUES];
    let state = [1, HEADS, KEYS, VALUES];
    let mut x =
        vec![drawn("q", &keys), drawn("k", &keys), drawn("g", &keys[..3]), drawn("v", &values)];
    x.extend(of.delta.then(|| drawn("beta", &keys[..3])));
    let document = |i: &[usize]| borders.iter().filter(|b| **b <= i[1]).count() as u64;
    x.extend(of.segments.then(|| Tensor::from_fn(&keys[..2], document)));
    x.extend(of.start.then(|| drawn("start", &state)));
    (x, [drawn("d_out", &values), drawn("d_end", &state)])
}

fn inner(x: &Tensor, y: &Tensor) -> u64 {
    x.data.iter().zip(&y.data).fold(0, |sum, (a, b)| add(sum, times(*a, *b), P))
}

/// Results times cotangents.
fn value(of: Scan, x: &[Tensor], d: &[Tensor; 2]) -> u64 {
    let x: Vec<&Tensor> = x.iter().collect();
    let made = of.results(&x, &[], &Begins::WHOLE).expect("results");
    made.iter().zip(d).fold(0, |sum, (y, d)| add(sum, inner(y, d), P))
}

fn gradients(of: Scan, x: &[Tensor], d: &[Tensor; 2]) -> Vec<Tensor> {
    let x: Vec<&Tensor> = x[..4].iter().chain(d).chain(&x[4..]).collect();
    ScanGrad(of).results(&x, &[], &Begins::WHOLE).expect("gradients")
}

/// The derivative at 0 of a polynomial of a lower degree than there are values of it, at 0, 1, 2, …
fn slope(values: &[u64]) -> u64 {
    let n = values.len() as u64;
    let apart = |a: u64, b: u64| add(a, neg(b, P), P);
    (0..n).fold(0, |sum, i| {
        // The derivative at 0 of the one that is 1 at i, and 0 at the others.
        let others = || (0..n).filter(move |j| *j != i);
        let below = others().fold(1, |p, j| times(p, apart(i, j)));
        let above = others().fold(0, |sum, left| {
            let rest = others().filter(|j| *j != left);
            add(sum, rest.fold(1, |p, j| times(p, neg(j, P))), P)
        });
        add(sum, times(values[i as usize], times(above, inverse(below, P))), P)
    })
}

/// The derivative in a random direction of an operand that e^g does not depend on, and that of the gradient.
fn along(of: Scan, x: &[Tensor], d: &[Tensor; 2], i: usize, gradient: &Tensor) -> [u64; 2] {
    let way = drawn("way", &x[i].shape);
    // A token's key is in the state twice, and in its output once.
    let values: Vec<u64> = (0..2 * TOKENS as u64 + 3)
        .map(|h| {
            let mut at = x.to_vec();
            at[i] = x[i].zip(&way, |x, w| add(x, times(h, w), P));
            value(of, &at, d)
        })
        .collect();
    [slope(&values), inner(&way, gradient)]
}

/// The derivative by the decay of a token of all heads: results are affine in it, and where a document begins, or before the
/// first token there is no state, it is 0.
fn of_decay(of: Scan, x: &[Tensor], d: &[Tensor; 2], token: usize, g: &Tensor) -> [u64; 2] {
    let mut other = x.to_vec();
    if token == 0 {
        other[of.start().expect("a start")].data.fill(0);
    } else {
        let at = of.segments().expect("segments");
        other[at] = Tensor::from_fn(&x[at].shape, |i| u64::from(i[1] >= token));
    }
    let own = (0..HEADS).fold(0, |sum, n| add(sum, g.at(&[0, token, n]), P));
    [minus(value(of, x, d), value(of, &other, d)), own]
}

/// Whether these are the gradients, by every operand.
fn holds(of: Scan, x: &[Tensor], d: &[Tensor; 2], gradients: &[Tensor], decays: bool) -> bool {
    let numbers = (0..of.count()).filter(|i| of.segments() != Some(*i));
    numbers.zip(gradients).all(|(i, g)| match i {
        2 if decays => (0..TOKENS).all(|t| {
            let [a, b] = of_decay(of, x, d, t, g);
            a == b
        }),
        2 => true,
        i => {
            let [a, b] = along(of, x, d, i, g);
            a == b
        }
    })
}

/// What a gradient is not: another sign, tokens or heads in another order, states transposed.
fn changed(t: &Tensor) -> Vec<Tensor> {
    let mut all = vec![t.map(|x| neg(x, P))];
    for dim in 1..t.shape.len() {
        let moved = |i: &[usize]| {
            let mut at = i.to_vec();
            at[dim] = (at[dim] + 1) % t.shape[dim];
            t.at(&at)
        };
        all.push(Tensor::from_fn(&t.shape, moved));
    }
    if let [b, n, k, v] = t.shape[..] {
        let turned = Tensor::from_fn(&[b, n, v, k], |i| t.at(&[i[0], i[1], i[3], i[2]]));
        all.push(turned.reshaped(&t.shape));
    }
    all
}

#[test]
fn gradients_of_recurrences_are_their_derivatives() {
    for delta in [false, true] {
        for borders in [&[][..], &[1, 3]] {
            let of = Scan { delta, piece: None, segments: true, start: true };
            let (x, d) = operands(of, borders);
            let right = gradients(of, &x, &d);
            // Without other borders, a border is one decay of 0.
            let decays = borders.is_empty();
            assert!(holds(of, &x, &d, &right, decays), "{of:?} {borders:?}");
            for i in (0..right.len()).filter(|i| decays || *i != 2) {
                for other in changed(&right[i]) {
                    let mut wrong = right.clone();
                    // The sum over heads of what decays make does not see their order.
                    let heads = |t: &Tensor| t.shape.len() == 3 && i == 2;
                    let seen = |t: &Tensor, n: usize| {
                        (0..n)
                            .map(|s| add(t.at(&[0, s, 0]), t.at(&[0, s, 1]), P))
                            .collect::<Vec<_>>()
                    };
                    if heads(&other) && seen(&other, TOKENS) == seen(&right[i], TOKENS) {
                        continue;
                    }
                    assert!(other != right[i]);
                    wrong[i] = other;
                    assert!(!holds(of, &x, &d, &wrong, decays), "{of:?} {borders:?}: {i}");
                }
            }
        }
    }
}
