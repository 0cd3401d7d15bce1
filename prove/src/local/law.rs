//! What is known of each op that ranks do for themselves: which operands it takes, in which of them it is
//! linear, and what becomes of a letter that its result lacks. Written from what the ops are said to
//! compute.

use shardc_ir::ops::{self, Op};
use shardc_ir::rule::{Dims, Letter, Rule};
use shardc_ir::types::Reduction;

/// In which operands an op is linear: f(a + b) = f(a) + f(b).
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Linear {
    No,
    /// In all operands taken together.
    All,
    /// In these taken together; the others stay the same.
    Together(&'static [usize]),
    /// In each of these while the others stay the same.
    Each(&'static [usize]),
}

/// What sharding may rely on.
#[derive(Clone, Copy, Debug)]
pub struct Law {
    pub linear: Linear,
    /// How what ranks have of a letter is put together where the result lacks the letter; `None`: the
    /// letter must be whole.
    pub lost: Option<Reduction>,
    /// Only moves elements, so that a largest or smallest element stays one.
    pub moves: bool,
    /// Each rank can make its piece of a letter that no operand has.
    pub makes: bool,
    /// Operands and results: `n` a number, `i` an integer, `s` what the first operand is, `t` what the second
    /// is. The last operand stands for all that follow.
    pub kinds: [&'static str; 2],
}

const NONLINEAR: Law =
    Law { linear: Linear::No, lost: None, moves: false, makes: false, kinds: ["n", "n"] };
const MOVER: Law = Law { linear: Linear::All, moves: true, kinds: ["s", "s"], ..NONLINEAR };
const SUM: Option<Reduction> = Some(Reduction::Sum);
/// Of rows of experts and something else; the operand between them is of integers.
const ROWS: Law = Law { linear: Linear::Each(&[0, 2]), kinds: ["nin", "n"], ..NONLINEAR };

/// The law of an op; `None` for what is none of one rank, or is not known here.
pub fn law(op: &Op) -> Option<Law> {
    Some(match op {
        Op::Exp(_)
        | Op::Log(_)
        | Op::Sqrt(_)
        | Op::Rsqrt(_)
        | Op::Tanh(_)
        | Op::Logistic(_)
        | Op::Silu(_)
        | Op::Gelu(_)
        | Op::Sin(_)
        | Op::Cos(_)
        | Op::Abs(_)
        | Op::Sign(_)
        | Op::Clamp(_)
        | Op::Erf(_)
        | Op::Pow(_)
        | Op::Softplus(_)
        | Op::Round(_)
        | Op::Max(_)
        | Op::Min(_)
        | Op::Shift(_)
        | Op::AdamW(_)
        | Op::Sgd(_) => NONLINEAR,
        Op::MergeAttention(_) => Law { kinds: ["n", "nn"], ..NONLINEAR },
        Op::Less(_) | Op::Equal(_) => Law { kinds: ["s", "n"], ..NONLINEAR },
        // Of what is selected; the mask stays the same.
        Op::Select(_) => {
            Law { linear: Linear::Together(&[1, 2]), kinds: ["ntt", "t"], ..NONLINEAR }
        }
        Op::Draw(_) => Law { makes: true, kinds: ["i", "n"], ..NONLINEAR },
        Op::AtLeast(_) => Law { kinds: ["s", "n"], ..NONLINEAR },
        Op::Add(_) | Op::Sub(_) | Op::Scale(_) | Op::Cumsum(_) => {
            Law { linear: Linear::All, ..NONLINEAR }
        }
        Op::Cast(k) => {
            let to = if k.to.is_float() { "n" } else { "i" };
            Law { kinds: ["s", to], ..MOVER }
        }
        Op::Mul(_) => Law { linear: Linear::Each(&[0, 1]), ..NONLINEAR },
        Op::Div(_) | Op::Rope(_) => Law { linear: Linear::Each(&[0]), ..NONLINEAR },
        Op::Dot(_) => Law { linear: Linear::Each(&[0, 1]), lost: SUM, ..NONLINEAR },
        Op::ReduceSum(_) => Law { linear: Linear::All, lost: SUM, ..NONLINEAR },
        // The largest of sums is not the sum of the largest: see `over_pending`.
        Op::ReduceMax(_) => Law { lost: Some(Reduction::Max), ..NONLINEAR },
        Op::ReduceMin(_) => Law { lost: Some(Reduction::Min), ..NONLINEAR },
        Op::Reshape(_) | Op::Transpose(_) | Op::StopGradient(_) => MOVER,
        Op::Expand(_) => Law { makes: true, ..MOVER },
        // Zeros beside elements are neither the largest nor the smallest.
        Op::Concat(_) | Op::Narrow(_) => MOVER,
        Op::Widen(_) => Law { moves: false, ..MOVER },
        // An index that is not in the piece gives 0, or adds to nothing.
        Op::Take(_) => {
            Law { linear: Linear::Each(&[0]), lost: SUM, kinds: ["si", "s"], ..NONLINEAR }
        }
        Op::Put(_) => Law {
            linear: Linear::Each(&[0]),
            lost: SUM,
            makes: true,
            kinds: ["ni", "n"],
            ..NONLINEAR
        },
        Op::Attention(k) => {
            let ins = if k.slopes { "nnniini" } else { "nnniii" };
            Law { kinds: [ins, "nn"], ..NONLINEAR }
        }
        Op::AttentionGrad(k) => Law {
            linear: Linear::Together(&[4, 5]),
            lost: SUM,
            kinds: [if k.slopes { "nnnnnniini" } else { "nnnnnniii" }, "nnn"],
            ..NONLINEAR
        },
        Op::TopK(_) => Law { kinds: ["n", "i"], ..NONLINEAR },
        Op::Route(_) => Law { kinds: ["i", "ii"], ..NONLINEAR },
        Op::Dispatch(_) | Op::Combine(_) => ROWS,
        Op::RowDots(_) | Op::GroupedDot(_) | Op::GroupedDotT(_) | Op::GroupedOuter(_) => {
            Law { lost: SUM, ..ROWS }
        }
        _of_several_ranks => return None,
    })
}

/// Most dims of an operand: letters of leading dims are few.
const MOST_DIMS: usize = 8;

/// Ranks of an attention's operands: of slopes, segments, the run and places behind the others.
fn of_attention(others: &[usize], k: &ops::Attention) -> Vec<usize> {
    let slopes = &[1][..usize::from(k.slopes)];
    let segments = &[2, 2][..2 * usize::from(k.segments)];
    let drawn = &[1, 2][..2 * usize::from(k.kept.is_some())];
    [others, slopes, segments, drawn].concat()
}

/// True if an op takes operands of these ranks.
pub fn takes(op: &Op, ranks: &[usize]) -> bool {
    let alike = ranks.windows(2).all(|w| w[0] == w[1]);
    let by = |r: &Rule| {
        let dims = |(d, n): (&Dims, &usize)| d.len() == *n;
        r.ins.len() == ranks.len() && r.ins.iter().zip(ranks).all(dims)
    };
    ranks.iter().all(|n| *n <= MOST_DIMS)
        && match op {
            Op::Add(k) => k.rule.0.as_ref().map_or(alike && !ranks.is_empty(), |r| by(r)),
            Op::Sub(k) => k.rule.0.as_ref().map_or(alike && ranks.len() == 2, |r| by(r)),
            Op::Mul(k) => k.rule.0.as_ref().map_or(alike && ranks.len() == 2, |r| by(r)),
            Op::Div(k) => k.rule.0.as_ref().map_or(alike && ranks.len() == 2, |r| by(r)),
            Op::Max(k) => k.rule.0.as_ref().map_or(alike && ranks.len() == 2, |r| by(r)),
            Op::Min(k) => k.rule.0.as_ref().map_or(alike && ranks.len() == 2, |r| by(r)),
            Op::Less(k) => k.rule.0.as_ref().map_or(alike && ranks.len() == 2, |r| by(r)),
            Op::Equal(k) => k.rule.0.as_ref().map_or(alike && ranks.len() == 2, |r| by(r)),
            Op::Select(k) => k.rule.0.as_ref().map_or(alike && ranks.len() == 3, |r| by(r)),
            Op::Dot(k) => ranks.len() == 2 && by(&k.rule.0),
            Op::Take(k) => ranks.len() == 2 && by(&k.rule.0),
            Op::Put(k) => ranks.len() == 2 && by(&k.rule.0),
            Op::ReduceSum(k) => ranks.len() == 1 && by(&k.rule.0),
            Op::ReduceMax(k) => ranks.len() == 1 && by(&k.rule.0),
            Op::ReduceMin(k) => ranks.len() == 1 && by(&k.rule.0),
            Op::Reshape(k) => ranks.len() == 1 && by(&k.rule.0),
            Op::Transpose(k) => ranks.len() == 1 && by(&k.rule.0),
            Op::Expand(k) => ranks.len() == 1 && by(&k.rule.0),
            Op::Draw(k) => matches!(ranks.len(), 1 | 2) && by(&k.rule.0),
            Op::Cumsum(k) => ranks.len() == 1 && k.dim < ranks[0],
            Op::TopK(k) => ranks.len() == 1 && by(&k.rule.0) && k.dims().is_some(),
            Op::Concat(k) => !ranks.is_empty() && alike && k.dim.of(ranks[0]).is_some(),
            Op::Narrow(k) => ranks.len() == 1 && k.dim.of(ranks[0]).is_some(),
            Op::Widen(k) => ranks.len() == 1 && k.dim.of(ranks[0]).is_some(),
            Op::Rope(_) => ranks == [4, 2, 2] || ranks == [4, 3, 3],
            Op::Attention(k) => ranks == of_attention(&[4, 4, 4, 1, 1], k),
            Op::AttentionGrad(k) => ranks == of_attention(&[4, 4, 4, 3, 4, 3, 1, 1], &k.forward()),
            Op::MergeAttention(_) => ranks == [4, 3, 4, 3],
            Op::Route(_) => ranks == [3],
            Op::Dispatch(_) => ranks == [3, 3, 3],
            Op::Combine(_) => ranks == [4, 3, 3],
            Op::RowDots(_) => ranks == [4, 3, 3],
            Op::GroupedDot(_) | Op::GroupedDotT(_) => ranks == [4, 3, 3],
            Op::GroupedOuter(_) => ranks == [4, 3, 4],
            Op::AdamW(_) => {
                let scalars = ranks[4..].iter().all(|&r| r == 0);
                matches!(ranks.len(), 7 | 8) && ranks[..4] == [ranks[0]; 4] && scalars
            }
            Op::Sgd(_) => {
                let scalars = ranks[2..].iter().all(|&r| r == 0);
                matches!(ranks.len(), 4 | 5) && ranks[0] == ranks[1] && scalars
            }
            _of_one => ranks.len() == 1,
        }
}

/// Sizes of letters that an op's attributes give.
pub fn sizes(op: &Op) -> &[(Letter, usize)] {
    match op {
        Op::Expand(k) => &k.sizes.0,
        Op::Draw(k) => &k.sizes.0,
        Op::Put(k) => &k.sizes.0,
        Op::Reshape(k) => &k.sizes.0,
        Op::Concat(k) => &k.sizes.0,
        Op::Narrow(k) => &k.sizes.0,
        Op::Widen(k) => &k.sizes.0,
        Op::TopK(k) => &k.sizes.0,
        Op::Route(k) => &k.sizes.0,
        Op::Dispatch(k) => &k.sizes.0,
        _none => &[],
    }
}

/// The same, to be changed.
pub fn sizes_mut(op: &mut Op) -> &mut [(Letter, usize)] {
    match op {
        Op::Expand(k) => &mut k.sizes.0,
        Op::Draw(k) => &mut k.sizes.0,
        Op::Put(k) => &mut k.sizes.0,
        Op::Reshape(k) => &mut k.sizes.0,
        Op::Concat(k) => &mut k.sizes.0,
        Op::Narrow(k) => &mut k.sizes.0,
        Op::Widen(k) => &mut k.sizes.0,
        Op::TopK(k) => &mut k.sizes.0,
        Op::Route(k) => &mut k.sizes.0,
        Op::Dispatch(k) => &mut k.sizes.0,
        _none => &mut [],
    }
}

/// The dim of which an op takes some elements, or along which it puts operands; of others the last.
pub fn along(op: &Op, rank: usize) -> Option<usize> {
    match op {
        Op::Concat(k) => k.dim.of(rank),
        Op::Narrow(k) => k.dim.of(rank),
        Op::Widen(k) => k.dim.of(rank),
        _last => rank.checked_sub(1),
    }
}

/// The place behind the last of `n` elements, so far apart.
pub fn end(start: usize, n: usize, step: usize) -> Option<usize> {
    match n {
        0 => Some(start),
        _some => (n - 1).checked_mul(step)?.checked_add(start)?.checked_add(1),
    }
}

/// True if sizes of dims that are not tied by letters fit each other: `own` are the sizes of that dim
/// ([`along`]) of operands and of the result.
pub fn tied(op: &Op, own: &[usize]) -> bool {
    let holds =
        |start, n, step: usize, all| step > 0 && end(start, n, step).is_some_and(|e| e <= all);
    match (op, own) {
        (Op::Concat(_), [parts @ .., d]) => parts.iter().sum::<usize>() == *d,
        (Op::Narrow(k), [d, p]) => holds(k.start, *p, k.step.0, *d),
        (Op::Widen(k), [p, d]) => {
            let some = k.start < *d as i64 && k.start.saturating_add(*p as i64) > 0;
            let all = |start| holds(start, *p, k.step.0, *d);
            usize::try_from(k.start).is_ok_and(all) || k.step.0 == 1 && some
        }
        (Op::Rope(_), [d, r, s, _]) => r == s && r.checked_mul(2).is_some_and(|n| n <= *d),
        (Op::TopK(k), _) => k.dims().is_some(),
        _free => true,
    }
}
