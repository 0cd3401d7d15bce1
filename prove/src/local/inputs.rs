//! Operands of an evaluation: numbers at random, and integers of which the op makes something.

use super::Obligation;
use crate::field::functions::{mix, oracle, seed};
use crate::field::tensor::{Tensor, each};
use shardc_ir::mesh::AtomSet;
use shardc_ir::ops::{self, Op};

/// Whole operands, with integers that the op can use. They depend on the places of a rank on the axes over
/// which they vary.
pub fn operands(o: &Obligation, place: impl Fn(AtomSet) -> usize) -> Vec<Tensor> {
    let term = match &o.op {
        Op::ToPartial(k) => k.axes,
        _other => AtomSet::EMPTY,
    };
    let varying: Vec<AtomSet> = o.ins.iter().map(|h| h.ty.varying.union(term)).collect();
    let name = |i: usize| format!("operand {i} of {}", place(varying[i]));
    let types = o.ins.iter().map(|h| &h.ty);
    let mut all: Vec<Tensor> = types
        .enumerate()
        .map(|(i, t)| {
            let x = noise(&name(i), &t.sizes());
            if t.dtype.is_float() { x } else { x.map(|v| v % 5) }
        })
        .collect();
    let own_letter = |most: usize| {
        move |v: u64| if v % 7 == 6 { -100i64 as u64 } else { v % most.max(1) as u64 }
    };
    match &o.op {
        Op::Take(_) | Op::Put(_) => {
            // Of the letter that is indexed, every place and none.
            let most = all.iter().flat_map(|t| t.shape.clone());
            let most = most.chain(o.outs[0].ty.sizes()).max().unwrap_or(1);
            all[1] = noise(&name(1), &all[1].shape).map(own_letter(most));
        }
        Op::AtLeast(k) => {
            // Some below the bound, some not.
            let below = (k.bound as i64).wrapping_sub(1);
            all[0] =
                noise(&name(0), &all[0].shape).map(|v| below.wrapping_add((v % 3) as i64) as u64);
        }
        Op::Select(_) => all[0] = noise(&name(0), &all[0].shape).map(|v| v % 2),
        Op::Less(_) | Op::Equal(_) => {
            // Few numbers, so that some are equal.
            for (i, t) in all.iter_mut().enumerate() {
                *t = noise(&name(i), &t.shape).map(|v| v % 3);
            }
        }
        Op::Route(k) => {
            let [groups, experts] = k.groups();
            let n = (groups * experts).max(1) as u64;
            let first = noise(&name(0), &all[0].shape);
            all[0] =
                Tensor::from_fn(&all[0].shape, |i| (first.at(&[i[0], i[1], 0]) + i[2] as u64) % n);
        }
        Op::Attention(_) | Op::AttentionGrad(_) => {
            // Every query sees the first key, and some of the others.
            let q = if matches!(o.op, Op::Attention(_)) { 3 } else { 6 };
            let k = q + 1;
            all[q] = noise(&name(q), &all[q].shape).map(|v| 1 + v % 3);
            let later = noise(&name(k), &all[k].shape);
            all[k] = Tensor::from_fn(&all[k].shape, |i| later.at(i) % 4 * (i[0] as u64).min(1));
            let (Op::Attention(ops::Attention { slopes, segments, .. })
            | Op::AttentionGrad(ops::AttentionGrad { slopes, segments, .. })) = &o.op
            else {
                unreachable!("attention or its gradient")
            };
            if *segments {
                // The first key is of a segment of two.
                let of = k + 1 + usize::from(*slopes);
                for i in [of, of + 1] {
                    let own = noise(&name(i), &all[i].shape);
                    all[i] =
                        Tensor::from_fn(&all[i].shape, |at| own.at(at) % 2 * (at[1] as u64).min(1));
                }
            }
        }
        Op::Dispatch(_) => {
            let rows = &o.outs[0].ty.sizes();
            all[1] = slots(&all[1].shape, rows[0] * rows[2]);
        }
        Op::Combine(_) | Op::RowDots(_) => {
            let rows = &all[0].shape;
            all[1] = slots(&all[1].shape, rows[0] * rows[2]);
        }
        Op::GroupedDot(_) | Op::GroupedDotT(_) | Op::GroupedOuter(_) => {
            let most = all[0].shape[2] / all[1].shape[1].max(1) + 1;
            all[1] = all[1].map(|v| v % most as u64);
        }
        Op::AllToAllV(_) => {
            let most = all[0].shape[2] / all[1].shape[1].max(1) + 1;
            all[1] = all[1].map(|v| v % most as u64);
            all[2] = all[1].clone();
        }
        _any => {}
    }
    all
}

/// A slot for each copy of a token, no two alike in a shard, and some of none.
fn slots(shape: &[usize], rows: usize) -> Tensor {
    let mut out = Tensor::full(shape, 0);
    let mut next = vec![0; shape[0]];
    each(shape, |i| {
        let n = &mut next[i[0]];
        *n += 1;
        let place = out.place(i);
        let kept = *n % 4 != 0 && *n <= rows;
        out.data[place] = if kept { (*n + i[0]) as u64 % rows as u64 } else { -1i64 as u64 };
    });
    out
}

/// Numbers that depend on a name alone.
pub fn noise(name: &str, shape: &[usize]) -> Tensor {
    let (name, mut k) = (seed(name), 0);
    Tensor::from_fn(shape, |_| {
        k += 1;
        oracle(mix(name, 7), &[k])
    })
}
