//! Functions over the field.
//!
//! What is a polynomial, or a choice by an integer, is what it is. Any other function of a number is an
//! oracle: a fixed function of which nothing is known. Of attention e^x is the oracle, and the
//! exponential of the log-sum-exp is kept in its place, so that merging is what it is.

use super::tensor::{Tensor, each, times};
use crate::fun::{Chunk, Fun, Pattern, Scores};
use crate::number::{P, add, image, inverse, neg};

/// Where pieces begin in whole tensors: of operand `i`, or of the result, along a dim.
pub struct Begins<'a> {
    pub operand: &'a dyn Fn(usize, usize) -> usize,
    pub result: &'a dyn Fn(usize) -> usize,
}

impl Begins<'_> {
    /// Of whole tensors.
    pub const WHOLE: Begins<'static> = Begins { operand: &|_, _| 0, result: &|_| 0 };
}

/// Stirs a number into another.
pub fn mix(h: u64, x: u64) -> u64 {
    let h = (h ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let h = (h ^ (h >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    h ^ (h >> 32)
}

/// A number for a name.
pub fn seed(name: &str) -> u64 {
    name.bytes().fold(0x1234_5678_9abc, |h, b| mix(h, u64::from(b)))
}

/// An element of the field that depends on the name and the arguments, and on nothing else.
pub fn oracle(name: u64, args: &[u64]) -> u64 {
    mix(args.iter().fold(name, |h, x| mix(h, *x)), 1) % P
}

/// The image of an f64; infinities are elements of their own.
pub fn number(x: f64) -> u64 {
    image(x, P).unwrap_or_else(|| oracle(seed("infinite"), &[x.to_bits()]))
}

/// An integer as an element of the field.
fn of_integer(x: i64) -> u64 {
    let n = x.unsigned_abs() % P;
    if x < 0 { neg(n, P) } else { n }
}

/// Results of a function, of the shapes that its operands give; a single result has this shape.
///
/// # Errors
/// Names what has no meaning over a field.
pub fn results(
    f: &Fun,
    x: &[&Tensor],
    shape: &[usize],
    at: &Begins,
) -> Result<Vec<Tensor>, String> {
    let one = |t: Tensor| Ok(vec![t]);
    match f {
        Fun::Each(_) | Fun::Silu(_) | Fun::Clamp(..) | Fun::Pow(_) => {
            let name = seed(&f.name());
            one(x[0].map(|v| oracle(name, &[v])))
        }
        Fun::Both("equal") => one(pointwise(x, |v| u64::from(v[0] == v[1]))),
        Fun::Both(name) => {
            let name = seed(name);
            one(pointwise(x, |v| oracle(name, v)))
        }
        Fun::Select => one(pointwise(x, |v| if v[0] != 0 { v[1] } else { v[2] })),
        Fun::Reciprocal => one(x[0].map(|v| inverse(v, P))),
        Fun::AtLeast(bound) => one(x[0].map(|v| u64::from(v as i64 as f64 >= bound.get()))),
        Fun::Number => one(x[0].map(|v| of_integer(v as i64))),
        Fun::Literal(v) => {
            let data = v.iter().map(|b| number(f64::from(f32::from_bits(*b)))).collect();
            one(Tensor { shape: shape.to_vec(), data })
        }
        Fun::Reshape => one(x[0].reshaped(shape)),
        Fun::Max(p) => one(fold(p, x[0], shape, 0, u64::max)),
        Fun::Min(p) => one(fold(p, x[0], shape, P - 1, u64::min)),
        Fun::Draw(p, ..) => {
            let (name, none) = (seed(&f.name()), vec![]);
            let place = p.ins.get(1).unwrap_or(&none);
            one(Tensor::from_fn(shape, |i| {
                let mut args = x[0].data.clone();
                args.extend(x.get(1).map(|t| t.at(&index(place, &p.out, i, 0))));
                let own = (0..i.len()).filter(|&d| !place.contains(&p.out[d]));
                args.extend(own.map(|d| ((at.result)(d) + i[d]) as u64));
                oracle(name, &args)
            }))
        }
        Fun::Cumsum { dim, reverse } => one(Tensor::from_fn(shape, |i| {
            let own = if *reverse { i[*dim]..shape[*dim] } else { 0..i[*dim] + 1 };
            own.fold(0, |sum, k| {
                let mut j = i.to_vec();
                j[*dim] = k;
                add(sum, x[0].at(&j), P)
            })
        })),
        Fun::Take(p, padding) => one(indexed(true, (p, *padding), [x[0], x[1]], shape, at)?),
        Fun::Put(p, padding) => one(indexed(false, (p, *padding), [x[0], x[1]], shape, at)?),
        Fun::Narrow(p) => one(Tensor::from_fn(shape, |i| {
            let mut j = i.to_vec();
            j[p.dim] = p.start + p.step * i[p.dim];
            x[0].at(&j)
        })),
        Fun::Chunk(c) if c.start == Chunk::ANY => {
            Err(format!("`{}` has no meaning of its own over a field", f.name()))
        }
        Fun::Chunk(c) => one(Tensor::from_fn(shape, |i| {
            let mut j = i.to_vec();
            j[c.dim] = c.of(i[c.dim]);
            x[0].at(&j)
        })),
        Fun::Widen(p) => one(Tensor::from_fn(shape, |i| match p.taken_at(i[p.dim]) {
            Some(k) if k < x[0].shape[p.dim] => {
                let mut j = i.to_vec();
                j[p.dim] = k;
                x[0].at(&j)
            }
            _outside => 0,
        })),
        Fun::Shifted { dim, start } => one(Tensor::from_fn(shape, |i| {
            let at = usize::try_from(i[*dim] as i64 + start).ok();
            let Some(at) = at.filter(|&k| k < x[0].shape[*dim]) else { return 0 };
            let mut j = i.to_vec();
            j[*dim] = at;
            x[0].at(&j)
        })),
        Fun::Concat(dim) => one(Tensor::concat(*dim, x)),
        Fun::Rope { adjacent } => one(rope(*adjacent, x)),
        Fun::Attention(c) => Ok(attention(c, x, (at.result)(2))),
        Fun::AttentionGrad(c) => Ok(attention_grad(c, x, (at.result)(2))),
        Fun::Merge => Ok(merge(x)),
        Fun::TopK(p, k) => one(top_k(p, *k, x[0], shape)?),
        Fun::Route { groups: [groups, experts], rows, capacity } => {
            Ok(route(x[0], *groups, *experts, *rows, *capacity))
        }
        Fun::Dispatch | Fun::Combine | Fun::RowDots => one(copies(f, x, shape)),
        Fun::GroupedDot | Fun::GroupedDotT | Fun::GroupedOuter => one(grouped(f, x, shape)),
        Fun::Defined => one(defined(x[0], x[1])),
        Fun::AdamW { .. } => Ok((0..3).map(|k| update(f, k, x)).collect()),
        Fun::Sgd { .. } => one(update(f, 0, x)),
        Fun::Microbatches
        | Fun::Block { .. }
        | Fun::Join { .. }
        | Fun::Piece(_)
        | Fun::Place(_) => Err(format!("`{}` has no meaning of its own over a field", f.name())),
    }
}

/// A function of the elements of tensors of one shape.
fn pointwise(x: &[&Tensor], f: impl Fn(&[u64]) -> u64) -> Tensor {
    Tensor::from_fn(&x[0].shape, |i| f(&x.iter().map(|t| t.at(i)).collect::<Vec<_>>()))
}

/// The largest or smallest representative; of nothing, the other end.
fn fold(
    p: &Pattern,
    x: &Tensor,
    shape: &[usize],
    of_nothing: u64,
    by: fn(u64, u64) -> u64,
) -> Tensor {
    let mut out = Tensor::full(shape, of_nothing);
    let at: Vec<Option<usize>> =
        p.out.iter().map(|l| p.ins[0].iter().position(|m| m == l)).collect();
    each(&x.shape, |i| {
        let j: Vec<usize> = at.iter().map(|d| d.map_or(0, |d| i[d])).collect();
        let place = out.place(&j);
        out.data[place] = by(out.data[place], x.at(i));
    });
    out
}

/// Index of a tensor with these letters, from that of another; `own` where the other lacks one.
fn index(letters: &[u8], of: &[u8], i: &[usize], own: usize) -> Vec<usize> {
    letters.iter().map(|l| of.iter().position(|m| m == l).map_or(own, |d| i[d])).collect()
}

/// The place of an index in a piece of `n` that begins at `begin`, if it is there and no padding.
fn place(index: i64, padding: Option<usize>, begin: i64, n: usize) -> Option<usize> {
    let here = usize::try_from(index - begin).ok().filter(|k| *k < n)?;
    (padding.is_none_or(|p| p as i64 != index)).then_some(here)
}

/// What indices choose from the first operand, or add to the result: the other has a letter less.
fn indexed(
    takes: bool,
    (p, padding): (&Pattern, Option<usize>),
    [x, n]: [&Tensor; 2],
    shape: &[usize],
    at: &Begins,
) -> Result<Tensor, String> {
    let (table, rest) = if takes { (&p.ins[0], &p.out) } else { (&p.out, &p.ins[0]) };
    let dim = Pattern::own(table, &[&p.ins[1], rest]).ok_or("no letter is indexed")?;
    let (begin, size) = match takes {
        true => ((at.operand)(0, dim), x.shape[dim]),
        false => ((at.result)(dim), shape[dim]),
    };
    let mut out = Tensor::full(shape, 0);
    each(if takes { shape } else { &x.shape }, |i| {
        let k = n.integer(&index(&p.ins[1], rest, i, 0));
        let Some(k) = place(k, padding, begin as i64, size) else { return };
        let there = index(table, rest, i, k);
        if takes {
            let here = out.place(i);
            out.data[here] = x.at(&there);
        } else {
            out.add_at(&there, x.at(i));
        }
    });
    Ok(out)
}

fn rope(adjacent: bool, x: &[&Tensor]) -> Tensor {
    let shape = &x[1].shape;
    let (own, turns) = (3 - shape.len(), shape[shape.len() - 1]);
    let mut out = x[0].clone();
    each(&x[0].shape[..3], |i| {
        for j in 0..turns {
            let pair = if adjacent { [2 * j, 2 * j + 1] } else { [j, j + turns] };
            let [p, q] = pair.map(|d| out.place(&[i[0], i[1], i[2], d]));
            let (a, b) = (x[0].data[p], x[0].data[q]);
            let (c, s) = (x[1].at(&[i[0], i[1], j][own..]), x[2].at(&[i[0], i[1], j][own..]));
            out.data[p] = add(times(a, c), neg(times(b, s), P), P);
            out.data[q] = add(times(b, c), times(a, s), P);
        }
    });
    out
}

/// True if a query at a position sees a key at another.
fn sees(c: &Scores, query: i64, key: i64) -> bool {
    let within = |limit: Option<usize>, n: i64| limit.is_none_or(|l| i128::from(n) <= l as i128);
    let chunk = |at: i64| c.chunk.map(|n| i128::from(at).div_euclid(n.max(1) as i128));
    let far = query - key;
    within(c.sides[0], far) && within(c.sides[1], -far) && chunk(query) == chunk(key)
}

/// Calls `f(batch, query, head, key head, key)` for all that see each other. Operand `at` has the positions
/// of keys; behind slopes, if there are some, stand segments.
fn pairs(
    c: &Scores,
    x: &[&Tensor],
    at: usize,
    mut f: impl FnMut(usize, usize, usize, usize, usize),
) {
    let [q, k, q_at, k_at] = [x[0], x[1], x[at - 1], x[at]];
    let of = at + 1 + usize::from(c.slopes);
    let one = |b: usize, s: usize, t: usize| {
        !c.segments || x[of].integer(&[b, s]) == x[of + 1].integer(&[b, t])
    };
    let share = (q.shape[2] / k.shape[2].max(1)).max(1);
    each(&q.shape[..3], |i| {
        for t in 0..k.shape[1] {
            if sees(c, q_at.integer(&[i[1]]), k_at.integer(&[t])) && one(i[0], i[1], t) {
                f(i[0], i[1], i[2], i[2] / share, t);
            }
        }
    });
}

/// e^score, and the slope of the score's cap. Behind the operands `x` up to that of keys' positions, `at`,
/// are the slopes of heads.
fn weight(c: &Scores, x: &[&Tensor], at: usize, a: [usize; 3], b: [usize; 3]) -> [u64; 2] {
    let (q, k) = (x[0], x[1]);
    let mut dot = 0;
    for d in 0..q.shape[3] {
        let product = times(q.at(&[a[0], a[1], a[2], d]), k.at(&[b[0], b[1], b[2], d]));
        dot = add(dot, product, P);
    }
    let dotted = times(dot, number(c.scale.get()));
    let cap = c.softcap.map_or(0, |c| c.get().to_bits());
    let slope = if c.softcap.is_some() { oracle(mix(seed("slope"), cap), &[dotted]) } else { 1 };
    let mut of = vec![dotted];
    if c.slopes {
        let far = x[at - 1].integer(&[a[1]]).abs_diff(x[at].integer(&[b[1]]));
        of.push(times(x[at + 1].at(&[a[2]]), far));
    }
    [oracle(mix(seed("e^"), cap), &of), slope]
}

/// What the probability of a query, a head and a key is multiplied by: an element of the field for each,
/// of which nothing is known. The run and places are the last operands; `first` is the number of the first head.
fn factor(c: &Scores, x: &[&Tensor], at: usize, [b, s, h]: [usize; 3], t: usize) -> u64 {
    let Some((rate, stream)) = &c.kept else { return 1 };
    let [run, place] = [x[x.len() - 2], x[x.len() - 1]];
    let mut of = run.data.clone();
    of.extend([place.at(&[b, s]), h as u64, x[at].at(&[t])]);
    oracle(mix(seed(stream), rate.get().to_bits()), &of)
}

fn attention(c: &Scores, x: &[&Tensor], first: usize) -> Vec<Tensor> {
    let (q, v) = (x[0], x[2]);
    let rows = &q.shape[..3];
    let mut out = Tensor::full(&[rows, &v.shape[3..]].concat(), 0);
    let mut sum = Tensor::full(rows, 0);
    pairs(c, x, 4, |b, s, h, g, t| {
        let w = weight(c, x, 4, [b, s, h], [b, t, g])[0];
        sum.add_at(&[b, s, h], w);
        let w = times(w, factor(c, x, 4, [b, s, first + h], t));
        for e in 0..v.shape[3] {
            out.add_at(&[b, s, h, e], times(w, v.at(&[b, t, g, e])));
        }
    });
    let shape = out.shape.clone();
    let by = sum.map(|z| inverse(z, P));
    vec![Tensor::from_fn(&shape, |i| times(out.at(i), by.at(&i[..3]))), sum]
}

fn attention_grad(c: &Scores, x: &[&Tensor], first: usize) -> Vec<Tensor> {
    let [q, k, v, sum, d_o, delta] = [x[0], x[1], x[2], x[3], x[4], x[5]];
    let [mut d_q, mut d_k, mut d_v] = [q, k, v].map(|t| Tensor::full(&t.shape, 0));
    let scale = number(c.scale.get());
    let by = sum.map(|z| inverse(z, P));
    pairs(c, x, 7, |b, s, h, g, t| {
        let [w, slope] = weight(c, x, 7, [b, s, h], [b, t, g]);
        let p = times(w, by.at(&[b, s, h]));
        let mut d_p = neg(delta.at(&[b, s, h]), P);
        let kept = factor(c, x, 7, [b, s, first + h], t);
        for e in 0..v.shape[3] {
            let d = times(kept, d_o.at(&[b, s, h, e]));
            d_p = add(d_p, times(d, v.at(&[b, t, g, e])), P);
            d_v.add_at(&[b, t, g, e], times(p, d));
        }
        let d_x = times(times(scale, slope), times(p, d_p));
        for d in 0..q.shape[3] {
            d_q.add_at(&[b, s, h, d], times(d_x, k.at(&[b, t, g, d])));
            d_k.add_at(&[b, t, g, d], times(d_x, q.at(&[b, s, h, d])));
        }
    });
    vec![d_q, d_k, d_v]
}

/// Outputs weighted by the sums of their exponentials.
fn merge(x: &[&Tensor]) -> Vec<Tensor> {
    let sum = x[1].plus(x[3]);
    let by = sum.map(|z| inverse(z, P));
    let out = Tensor::from_fn(&x[0].shape, |i| {
        let row = &i[..3];
        let both = add(times(x[0].at(i), x[1].at(row)), times(x[2].at(i), x[3].at(row)), P);
        times(both, by.at(row))
    });
    vec![out, sum]
}

fn top_k(p: &Pattern, k: usize, x: &Tensor, shape: &[usize]) -> Result<Tensor, String> {
    let from = Pattern::own(&p.ins[0], &[&p.out]).ok_or("no letter is searched")?;
    let to = Pattern::own(&p.out, &[&p.ins[0]]).ok_or("no letter counts")?;
    let mut rows = shape.to_vec();
    rows[to] = 1;
    let mut out = Tensor::full(shape, 0);
    each(&rows, |i| {
        let value = |e: usize| x.at(&index(&p.ins[0], &p.out, i, e));
        let mut order: Vec<usize> = (0..x.shape[from]).collect();
        order.sort_by_key(|&e| (std::cmp::Reverse(value(e)), e));
        for (n, &e) in order.iter().take(k).enumerate() {
            let mut j = i.to_vec();
            j[to] = n;
            let place = out.place(&j);
            out.data[place] = e as u64;
        }
    });
    Ok(out)
}

fn route(
    index: &Tensor,
    groups: usize,
    experts: usize,
    rows: usize,
    capacity: Option<usize>,
) -> Vec<Tensor> {
    let mut slot = Tensor::full(&index.shape, -1i64 as u64);
    let mut counts = Tensor::full(&[groups, experts, index.shape[0]], 0);
    for z in 0..index.shape[0] {
        for g in 0..groups {
            let mut row = 0;
            for e in 0..experts {
                let mut kept = 0;
                each(&index.shape[1..], |i| {
                    let at = [z, i[0], i[1]];
                    let here = index.integer(&at) == (g * experts + e) as i64;
                    if here && capacity.is_none_or(|c| kept < c) {
                        if row < rows {
                            let place = slot.place(&at);
                            slot.data[place] = (g * rows + row) as u64;
                        }
                        (row, kept) = (row + 1, kept + 1);
                    }
                });
                let place = counts.place(&[g, e, z]);
                counts.data[place] = kept as u64;
            }
        }
    }
    vec![slot, counts]
}

/// What goes to the rows that slots name, or comes from them.
fn copies(f: &Fun, x: &[&Tensor], shape: &[usize]) -> Tensor {
    let mut out = Tensor::full(shape, 0);
    let buffer = if *f == Fun::Dispatch { shape } else { &x[0].shape[..] };
    let (groups, rows, width) = (buffer[0], buffer[2], buffer[3]);
    each(&x[1].shape, |i| {
        let slot = x[1].integer(i);
        let Some(s) = usize::try_from(slot).ok().filter(|s| *s < groups * rows) else { return };
        let (g, c) = (s / rows, s % rows);
        let (row, token) = ([g, i[0], c], [i[0], i[1]]);
        for h in 0..width {
            let (r, t) = ([row[0], row[1], row[2], h], [token[0], token[1], h]);
            match f {
                Fun::Dispatch => out.add_at(&r, times(x[0].at(&t), x[2].at(i))),
                Fun::Combine => out.add_at(&t, times(x[0].at(&r), x[2].at(i))),
                _dots => out.add_at(i, times(x[0].at(&r), x[2].at(&t))),
            }
        }
    });
    out
}

/// Calls `f(group, shard, row, expert)` for every row that the counts name.
fn named_rows(counts: &Tensor, rows: usize, mut f: impl FnMut(usize, usize, usize, usize)) {
    let [groups, experts, shards] = [0, 1, 2].map(|d| counts.shape[d]);
    for (g, z) in (0..groups).flat_map(|g| (0..shards).map(move |z| (g, z))) {
        let mut row = 0;
        for e in 0..experts {
            let n = usize::try_from(counts.integer(&[g, e, z])).unwrap_or(0);
            (row..(row + n).min(rows)).for_each(|c| f(g, z, c, g * experts + e));
            row += n;
        }
    }
}

/// Rows times the weights of their experts, and outer products of rows.
fn grouped(f: &Fun, x: &[&Tensor], shape: &[usize]) -> Tensor {
    let mut out = Tensor::full(shape, 0);
    let (a, b) = (x[0], x[2]);
    named_rows(x[1], a.shape[2], |g, z, c, e| match f {
        Fun::GroupedDot => each(&b.shape[1..], |i| {
            let product = times(a.at(&[g, z, c, i[1]]), b.at(&[e, i[0], i[1]]));
            out.add_at(&[g, z, c, i[0]], product);
        }),
        Fun::GroupedDotT => each(&b.shape[1..], |i| {
            let product = times(a.at(&[g, z, c, i[0]]), b.at(&[e, i[0], i[1]]));
            out.add_at(&[g, z, c, i[1]], product);
        }),
        _outer => each(&shape[1..], |i| {
            let product = times(a.at(&[g, z, c, i[0]]), b.at(&[g, z, c, i[1]]));
            out.add_at(&[e, i[0], i[1]], product);
        }),
    });
    out
}

/// Rows that the counts name; others are 0.
pub fn defined(rows: &Tensor, counts: &Tensor) -> Tensor {
    let mut out = Tensor::full(&rows.shape, 0);
    named_rows(counts, rows.shape[2], |g, z, c, _| {
        for h in 0..rows.shape[3] {
            let place = rows.place(&[g, z, c, h]);
            out.data[place] = rows.data[place];
        }
    });
    out
}

/// A result of the optimizer: an oracle of all its operands, element by element.
fn update(f: &Fun, result: u64, x: &[&Tensor]) -> Tensor {
    let name = mix(seed(&f.name()), result);
    let n = x[0].data.len();
    let element = |k: usize| {
        let of = |t: &&Tensor| if t.shape.is_empty() { t.data[0] } else { t.data[k] };
        oracle(name, &x.iter().map(of).collect::<Vec<_>>())
    };
    Tensor { shape: x[0].shape.clone(), data: (0..n).map(element).collect() }
}
