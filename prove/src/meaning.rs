//! What an op does to whole tensors, as terms.
//!
//! Collectives are the identity here, but for indices that an exchange shifts: they change what each rank
//! holds of a tensor and not the tensor, which is what types say. The same reading is used for the model and for
//! the plan.

use crate::fun::{Cut, Fun, Pattern, Places, Real, Scores};
use crate::local::law;
use crate::number::Coef;
use crate::product::Letter;
use crate::ring::Around;
use crate::term::{Node, Store, Term};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{self, Op, rope::Pairs};
use shardc_ir::rule::{Dims, Rule};
use shardc_ir::types::{DType, Type};
use std::borrow::Cow;

/// Letters of an operand, one per dim.
pub fn letters(dims: &Dims) -> Result<Vec<Letter>, String> {
    let one = |g: &shardc_ir::rule::Group| g.single().map(|l| Letter::from(l.0));
    dims.iter().map(one).collect::<Option<_>>().ok_or("a dim is made of several letters".into())
}

/// The rule of an op for operands of these types.
pub fn rule<'a>(op: &'a Op, ins: &[&Type]) -> Cow<'a, Rule> {
    let ranks: Vec<usize> = ins.iter().map(|t| t.rank()).collect();
    op.def().rule(&ranks)
}

fn coef(x: f64) -> Result<Coef, String> {
    Coef::of(x).ok_or_else(|| format!("{x} is not a number of the reals"))
}

/// A dim of the first operand; one that is not named is its last.
fn along(ins: &[&Type], dim: usize) -> Result<usize, String> {
    let rank = ins.first().map_or(0, |t| t.rank());
    let dim = if dim == usize::MAX { rank.checked_sub(1) } else { Some(dim) };
    let known = dim.filter(|d| *d < rank);
    known.ok_or_else(|| format!("a tensor of {rank} dims has no such dim"))
}

fn places(ins: &[&Type], dim: usize, start: usize, step: usize) -> Result<Places, String> {
    Ok(Places { dim: along(ins, dim)?, start, step: step.max(1) })
}

/// Elements of a dim among zeros, all of them or those that have a place.
fn widened(op: &ops::Widen, ins: &[&Type]) -> Result<Fun, String> {
    let ops::Widen { sizes, start, dim, step } = op;
    let (dim, step) = (along(ins, dim.0)?, step.0.max(1));
    let (own, all) = (ins[0].dims[dim].size, sizes.0.first().map_or(0, |s| s.1));
    let at = usize::try_from(*start).ok();
    Ok(match at.filter(|&a| law::end(a, own, step).is_some_and(|end| end <= all)) {
        Some(start) => Fun::Widen(Places { dim, start, step }),
        None => Fun::Shifted { dim, start: -start },
    })
}

/// How attention weighs its keys.
fn scores(k: &ops::Attention) -> Scores {
    let ops::Attention { scale, mask, softcap, slopes, segments, kept } = k;
    let ops::Mask { left, right, chunk } = mask;
    let of = |ops::Kept { rate, stream }: &ops::Kept| (Real::new(*rate), stream.0.clone());
    Scores {
        scale: Real::new(*scale),
        sides: [*left, *right],
        chunk: *chunk,
        softcap: softcap.map(Real::new),
        slopes: *slopes,
        segments: *segments,
        kept: kept.as_ref().map(of),
    }
}

/// Whole numbers made numbers are a function; rounding is none, on terms.
fn cast(from: DType, to: DType) -> Result<Option<Fun>, String> {
    match (from.is_float(), to.is_float()) {
        (false, true) => Ok(Some(Fun::Number)),
        (true, true) | (false, false) => Ok(None),
        (true, false) => Err("a number is made an integer".into()),
    }
}

/// The function behind an op that terms do not take apart; `None` for the others. All attributes are
/// named here: one that is new must be understood.
pub fn function(op: &Op, ins: &[&Type]) -> Result<Option<Fun>, String> {
    let pattern = || Pattern::of(&rule(op, ins)).ok_or("a dim is made of several letters");
    Ok(Some(match op {
        Op::Exp(ops::Exp {})
        | Op::Log(ops::Log {})
        | Op::Sqrt(ops::Sqrt {})
        | Op::Rsqrt(ops::Rsqrt {})
        | Op::Tanh(ops::Tanh {})
        | Op::Logistic(ops::Logistic {})
        | Op::Silu(ops::Silu { beta: None })
        | Op::Gelu(ops::Gelu {})
        | Op::Sin(ops::Sin {})
        | Op::Cos(ops::Cos {})
        | Op::Abs(ops::Abs {})
        | Op::Sign(ops::Sign {})
        | Op::Erf(ops::Erf {})
        | Op::Softplus(ops::Softplus {}) => Fun::Each(op.mnemonic()),
        Op::Round(ops::Round { to }) => Fun::Each(to.name()),
        Op::Pow(ops::Pow { to }) => Fun::Pow(Real::new(*to)),
        Op::Max(ops::Max { rule: _ })
        | Op::Min(ops::Min { rule: _ })
        | Op::Less(ops::Less { rule: _ })
        | Op::Equal(ops::Equal { rule: _ }) => Fun::Both(op.mnemonic()),
        Op::Select(ops::Select { rule: _ }) => Fun::Select,
        Op::Silu(ops::Silu { beta: Some(beta) }) => Fun::Silu(Real::new(*beta)),
        Op::Clamp(ops::Clamp { lo, hi }) => Fun::Clamp(Real::new(*lo), Real::new(*hi)),
        Op::AtLeast(ops::AtLeast { bound }) => Fun::AtLeast(Real::new(*bound)),
        Op::Literal(ops::Literal { values: v }) => {
            Fun::Literal(v.iter().map(|x| x.to_bits()).collect())
        }
        Op::ReduceMax(ops::ReduceMax { rule: _ }) => Fun::Max(pattern()?),
        Op::ReduceMin(ops::ReduceMin { rule: _ }) => Fun::Min(pattern()?),
        Op::Draw(ops::Draw { rule: _, from, stream, sizes: _ }) => {
            Fun::Draw(pattern()?, format!("{from:?}").into(), stream.0.clone())
        }
        Op::Cumsum(ops::Cumsum { dim, reverse }) => Fun::Cumsum { dim: *dim, reverse: *reverse },
        Op::Take(ops::Take { rule: _, padding }) => Fun::Take(pattern()?, padding.zero()),
        Op::Put(ops::Put { rule: _, sizes: _, padding }) => Fun::Put(pattern()?, padding.zero()),
        Op::Narrow(ops::Narrow { sizes: _, start, dim, step }) => {
            Fun::Narrow(places(ins, dim.0, *start, step.0)?)
        }
        Op::Widen(k) => widened(k, ins)?,
        Op::Concat(ops::Concat { sizes: _, dim }) => Fun::Concat(along(ins, dim.0)?),
        Op::Rope(ops::Rope { pairs }) => Fun::Rope { adjacent: *pairs == Pairs::Adjacent },
        Op::Attention(k) => Fun::Attention(scores(k)),
        Op::AttentionGrad(k) => Fun::AttentionGrad(scores(&k.forward())),
        Op::TopK(k @ ops::TopK { rule: _, sizes: _ }) => {
            Fun::TopK(pattern()?, k.dims().ok_or("no letter is replaced")?.2)
        }
        Op::Route(k @ ops::Route { sizes: _, rows, capacity }) => {
            Fun::Route { groups: k.groups(), rows: *rows, capacity: *capacity }
        }
        Op::Dispatch(ops::Dispatch { sizes: _ }) => Fun::Dispatch,
        Op::Combine(ops::Combine {}) => Fun::Combine,
        Op::RowDots(ops::RowDots {}) => Fun::RowDots,
        Op::GroupedDot(ops::GroupedDot {}) => Fun::GroupedDot,
        Op::GroupedDotT(ops::GroupedDotT {}) => Fun::GroupedDotT,
        Op::GroupedOuter(ops::GroupedOuter {}) => Fun::GroupedOuter,
        Op::AdamW(ops::AdamW { beta1, beta2, eps, decay }) => {
            let [beta1, beta2, eps, decay] = [beta1, beta2, eps, decay].map(|x| Real::new(*x));
            Fun::AdamW { beta1, beta2, eps, decay }
        }
        Op::Sgd(ops::Sgd { decay }) => Fun::Sgd { decay: Real::new(*decay) },
        Op::Cast(ops::Cast { to }) => return cast(ins[0].dtype, *to),
        Op::Add(_)
        | Op::Sub(_)
        | Op::Mul(_)
        | Op::Div(_)
        | Op::Scale(_)
        | Op::Shift(_)
        | Op::StopGradient(_)
        | Op::Fill(_)
        | Op::Reshape(_)
        | Op::Transpose(_)
        | Op::Expand(_)
        | Op::ReduceSum(_)
        | Op::Dot(_)
        | Op::MergeAttention(_)
        | Op::FanOut(_)
        | Op::AllReduce(_)
        | Op::AllGather(_)
        | Op::ReduceScatter(_)
        | Op::Broadcast(_)
        | Op::Reduce(_)
        | Op::Slice(_)
        | Op::Place(_)
        | Op::AllToAll(_)
        | Op::Exchange(_)
        | Op::AllToAllV(_)
        | Op::Permute(_)
        | Op::ToPartial(_)
        | Op::ToVarying(_)
        | Op::FromVarying(_)
        | Op::Piece(_) => return Ok(None),
    }))
}

/// The results of an op on terms.
///
/// # Errors
/// Says what is not understood.
pub fn apply(
    s: &mut Store,
    mesh: &Mesh,
    op: &Op,
    ins: &[Term],
    types: [&[&Type]; 2],
) -> Result<Vec<Term>, String> {
    let [in_types, out_types] = types;
    let shapes: Vec<Vec<usize>> = out_types.iter().map(|t| t.sizes().to_vec()).collect();
    let made = match function(op, in_types)? {
        Some(f @ (Fun::Both(_) | Fun::Select)) => {
            let parts = spread(s, op, ins, in_types, &shapes[0])?;
            called(s, &f, &parts, &shapes)
        }
        Some(f) => called(s, &f, ins, &shapes),
        None => taken_apart(s, mesh, op, ins, in_types, &shapes)?,
    };
    let wrong = made.iter().zip(&shapes).find(|(t, shape)| s.shape(**t) != &shape[..]);
    match wrong {
        Some((t, shape)) => Err(format!("a result {:?} is declared {shape:?}", s.shape(*t))),
        None if made.len() != shapes.len() => Err("results are missing".into()),
        None => Ok(made),
    }
}

/// The lemma of collectives but for shifts.
const CHANGES_NOTHING: &str = "types: a collective changes no tensor";

fn taken_apart(
    s: &mut Store,
    mesh: &Mesh,
    op: &Op,
    ins: &[Term],
    types: &[&Type],
    shapes: &[Vec<usize>],
) -> Result<Vec<Term>, String> {
    let shape = &shapes[0][..];
    let around = |axes: AtomSet, dim: usize| Around { axes: axes.0, of: mesh.ways(axes), dim };
    let one = |t: Term| Ok(vec![t]);
    match op {
        Op::FanOut(_)
        | Op::AllReduce(_)
        | Op::AllGather(_)
        | Op::ReduceScatter(_)
        | Op::Slice(_)
        | Op::Place(_)
        | Op::AllToAll(_) => {
            s.lemma(CHANGES_NOTHING);
            Ok(ins.to_vec())
        }
        Op::Exchange(ops::Exchange { axes: _, start, dim }) => {
            let Some(start) = start.0 else {
                s.lemma(CHANGES_NOTHING);
                return Ok(ins.to_vec());
            };
            s.lemma(
                "types: an exchange with a start takes a range of a dim, and places it among zeros",
            );
            let f = Fun::Shifted { dim: along(types, dim.0)?, start };
            one(s.apply(f, &ins[..1], 0, shape))
        }
        Op::AllToAllV(_) => {
            // Rows that the counts do not name are not defined in the result.
            if ins[1] != ins[2] {
                return Err("rows are sent and received by different counts".into());
            }
            s.lemma("types: a collective changes no tensor");
            let sum: Vec<(Coef, Term)> = s
                .monomials(ins[0])
                .into_iter()
                .map(|(c, t)| (c, s.apply(Fun::Defined, &[t, ins[1]], 0, shape)))
                .collect();
            one(s.sum(&sum, shape))
        }
        Op::StopGradient(_) | Op::ToPartial(_) => Ok(ins.to_vec()),
        Op::Cast(_) => {
            s.lemma("reals: a float in another element type is the same number");
            Ok(ins.to_vec())
        }
        Op::Add(_) | Op::Sub(_) => {
            let parts = spread(s, op, ins, types, shape)?;
            let sign = |i: usize| match op {
                Op::Sub(_) if i == 1 => Coef::ONE.minus(),
                _plus => Coef::ONE,
            };
            let sum: Vec<_> = parts.into_iter().enumerate().map(|(i, t)| (sign(i), t)).collect();
            one(s.sum(&sum, shape))
        }
        Op::Scale(k) => one(s.scale(coef(k.by)?, ins[0])),
        Op::Shift(k) => {
            let c = s.fill(coef(k.by)?, shape);
            one(s.add(&[ins[0], c]))
        }
        Op::Fill(k) => one(s.fill(coef(k.value)?, shape)),
        Op::Mul(_) | Op::Dot(_) | Op::ReduceSum(_) | Op::Transpose(_) | Op::Expand(_) => {
            let r = rule(op, types);
            let factors = ins.iter().zip(&r.ins).map(|(&t, d)| Ok((t, letters(d)?)));
            let factors = factors.collect::<Result<Vec<_>, String>>()?;
            one(s.product(&factors, &letters(&r.outs[0])?, shape)?)
        }
        Op::Div(_) => {
            let r = rule(op, types);
            let by = s.reciprocal(ins[1]);
            let factors = [(ins[0], letters(&r.ins[0])?), (by, letters(&r.ins[1])?)];
            one(s.product(&factors, &letters(&r.outs[0])?, shape)?)
        }
        Op::Reshape(_) => one(s.reshape(ins[0], shape)),
        Op::MergeAttention(_) => Ok(s.merge([[ins[0], ins[1]], [ins[2], ins[3]]]).to_vec()),
        Op::ToVarying(k) => one(s.block(ins[0], around(k.axes, k.dim), 0)?),
        Op::Piece(k) => one(s.block(ins[0], around(k.axes, k.dim), k.shift)?),
        Op::Permute(k) => one(s.turn(ins[0], k.axes.0, k.shift)?),
        Op::FromVarying(k) => one(s.join(ins[0], around(k.axes, k.dim), shape)),
        Op::Broadcast(k) => {
            one(s.piece(ins[0], Cut { dim: k.dim, of: mesh.ways(k.axes), piece: k.from })?)
        }
        Op::Reduce(k) => {
            one(s.place(ins[0], Cut { dim: k.dim, of: mesh.ways(k.axes), piece: k.to })?)
        }
        other => Err(format!("`{}` is not a function and is not taken apart", other.mnemonic())),
    }
}

/// Each operand with the dims of the result.
fn spread(
    s: &mut Store,
    op: &Op,
    ins: &[Term],
    types: &[&Type],
    shape: &[usize],
) -> Result<Vec<Term>, String> {
    let r = rule(op, types);
    let out = letters(&r.outs[0])?;
    let one = |(&t, d): (&Term, &Dims)| s.product(&[(t, letters(d)?)], &out, shape);
    ins.iter().zip(&r.ins).map(one).collect()
}

/// A function applied, after what is known of it.
pub fn called(s: &mut Store, f: &Fun, ins: &[Term], shapes: &[Vec<usize>]) -> Vec<Term> {
    let mut args = ins.to_vec();
    // Operands of which only the rows are read that counts, or slots, name.
    match f {
        Fun::GroupedDot | Fun::GroupedDotT => args[0] = rows(s, args[0], args[1]),
        Fun::GroupedOuter => {
            args[0] = rows(s, args[0], args[1]);
            args[2] = rows(s, args[2], args[1]);
        }
        Fun::Combine | Fun::RowDots => {
            if let Some(counts) = counts_of(s, args[1]) {
                args[0] = rows(s, args[0], counts);
            }
        }
        _others => {}
    }
    shapes.iter().enumerate().map(|(k, shape)| s.apply(f.clone(), &args, k as u8, shape)).collect()
}

/// Rows for one who reads only those that the counts name.
fn rows(s: &mut Store, t: Term, counts: Term) -> Term {
    let shape = s.shape(t).to_vec();
    let own = |s: &Store, t: Term| match s.node(t) {
        Node::Apply(Fun::Defined, args, _) if args[1] == counts => args[0],
        _all => t,
    };
    let sum: Vec<(Coef, Term)> = s.monomials(t).into_iter().map(|(c, u)| (c, own(s, u))).collect();
    s.lemma("only rows that counts name are read");
    s.sum(&sum, &shape)
}

/// The counts of the `route` that made these slots.
fn counts_of(s: &mut Store, slot: Term) -> Option<Term> {
    let Node::Apply(f @ Fun::Route { groups: [groups, experts], .. }, args, 0) =
        s.node(slot).clone()
    else {
        return None;
    };
    let shards = s.shape(slot)[0];
    Some(s.apply(f, &args, 1, &[groups, experts, shards]))
}
