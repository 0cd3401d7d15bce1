//! Ops that ranks do for themselves: the states of results from those of operands, letter by letter and
//! axis by axis (`docs/types.md`, "Legal combinations").

use super::{Block, Fault, Held, wrong};
use crate::meaning;
use crate::ops::{self, Law, Linear, Typing};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::Op;
use shardc_ir::rule::{Dims, Group, Letter, Rule};
use shardc_ir::types::{AtomList, Dim, Reduction, State, Type};
use std::collections::BTreeMap;

/// Sizes of letters.
pub type Sizes = BTreeMap<Letter, usize>;
/// The axes that cut each letter.
type Cuts = BTreeMap<Letter, AtomList>;

/// The op's letters, after its operands were counted.
///
/// # Errors
/// Says that the op takes no such operands.
pub(crate) fn rule(law: &dyn Law, ins: &[&Type], outs: &[&Type]) -> Result<Rule, Fault> {
    let rule = meaning::rule(law, ins).map_err(Fault::Wrong)?;
    let dims = |(d, t): (&Dims, &&Type)| d.len() == t.rank();
    if rule.outs.len() != outs.len() || !rule.outs.iter().zip(outs).all(dims) {
        return wrong(format!("by `{rule}` its results have other dims"));
    }
    Ok(rule.into_owned())
}

/// The size of every letter: of dims that are one letter, of the op's attributes, and of dims of several
/// letters where one is left. All dims must have the sizes of their letters.
///
/// # Errors
/// Names a dim that has another size.
pub fn sizes(op: &Op, rule: &Rule, ins: &[&Type], outs: &[&Type]) -> Result<Sizes, Fault> {
    let (law, mut known): (_, Sizes) = (ops::law(op), ops::sizes(op).into_iter().collect());
    let of = |dims: &'_ [Dims], types: &[&Type]| -> Vec<(Group, usize)> {
        let pair = |(d, t): (&Dims, &&Type)| -> Vec<(Group, usize)> {
            d.iter().copied().zip(t.dims.iter().map(|x| x.size)).collect()
        };
        dims.iter().zip(types).flat_map(pair).collect()
    };
    let all = [of(&rule.ins, ins), of(&rule.outs, outs)].concat();
    for _ in 0..all.len() {
        for (group, size) in &all {
            let mut open = group.letters().iter().filter(|l| !known.contains_key(l));
            let (Some(&l), None) = (open.next(), open.next()) else { continue };
            let rest = group.letters().iter().filter_map(|l| known.get(l));
            let rest = rest.fold(1, |n: usize, m| n.saturating_mul(*m));
            if rest > 0 && size % rest == 0 {
                known.insert(l, size / rest);
            }
        }
    }
    for (group, size) in &all {
        let mut own = group.letters().iter().map(|l| known.get(l).copied());
        let own = own.try_fold(1, |n: usize, m| n.checked_mul(m?));
        if own != Some(*size) {
            return wrong(format!("by `{rule}` a dim of {size} has another size"));
        }
    }
    let size = |t: &&Type| law.along(t.rank()).map_or(1, |d| t.dims[d].size);
    let own: Vec<usize> = ins.iter().chain(outs).map(size).collect();
    match law.tied(&own) {
        true => Ok(known),
        false => wrong(format!("dims of {own:?} do not fit each other")),
    }
}

/// Which letters of a dim its axes cut: the major one first, evenly, and the next only when no element
/// of it is left to cut.
///
/// # Errors
/// Says that pieces of the dim are not pieces of its letters.
pub fn split(
    mesh: &Mesh,
    group: &Group,
    sizes: &Sizes,
    dim: Dim,
) -> Result<Vec<(Letter, AtomList)>, Fault> {
    if let Some(l) = group.single() {
        return Ok(vec![(l, dim.atoms)]);
    }
    if dim.atoms.is_turned() {
        return wrong("a dim of several letters has its pieces in the opposite order".into());
    }
    let mut out = vec![];
    let mut atoms = dim.atoms.iter().peekable();
    for &l in group.letters() {
        let (mut left, mut own) = (sizes.get(&l).copied().unwrap_or(1), AtomList::EMPTY);
        while let Some(&a) = atoms.peek() {
            if left == 1 && mesh.size(a) > 1 {
                break;
            }
            if left % mesh.size(a) != 0 {
                return wrong("a dim of several letters is cut across one of them".into());
            }
            left /= mesh.size(a);
            own = own.push(a).unwrap_or(own);
            atoms.next();
        }
        out.push((l, own));
        if left > 1 && atoms.peek().is_some() {
            return wrong("a dim of several letters is cut across one of them".into());
        }
    }
    match atoms.next() {
        None => Ok(out),
        Some(_) => wrong("a dim has more pieces than elements".into()),
    }
}

/// The states of results, and which blocks they are.
pub fn check(
    mesh: &Mesh,
    op: &Op,
    typing: Typing,
    held: &[&Held],
    outs: &[&Type],
) -> Result<Vec<Vec<Block>>, Fault> {
    let ins: Vec<&Type> = held.iter().map(|h| &h.ty).collect();
    let rule = rule(ops::law(op), &ins, outs)?;
    kinds(typing, &ins, outs)?;
    let sizes = sizes(op, &rule, &ins, outs)?;
    let cuts = |dims: &[Dims], types: &[&Type]| -> Result<Vec<Cuts>, Fault> {
        let one = |(d, t): (&Dims, &&Type)| -> Result<Cuts, Fault> {
            let all = d.iter().zip(&t.dims).map(|(g, x)| split(mesh, g, &sizes, *x));
            Ok(all.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
        };
        dims.iter().zip(types).map(one).collect()
    };
    let [of, to] = [cuts(&rule.ins, &ins)?, cuts(&rule.outs, outs)?];
    // One cut of each letter, in all that have it.
    let mut cut: Cuts = Cuts::new();
    for (l, list) in of.iter().flatten() {
        if *cut.entry(*l).or_insert(*list) != *list {
            return wrong(format!("`{}` is cut in two ways", l.name()));
        }
    }
    let mut new: Cuts = Cuts::new();
    for (l, list) in to.iter().flatten() {
        match cut.get(l) {
            Some(own) if own == list => {}
            Some(_) => return wrong(format!("`{}` is cut otherwise in a result", l.name())),
            None if *new.entry(*l).or_insert(*list) != *list => {
                return wrong(format!("`{}` is cut in two ways", l.name()));
            }
            None => {}
        }
    }
    if let Some((l, _)) = cut.iter().chain(&new).find(|(l, c)| rule.is_whole(**l) && !c.is_empty())
    {
        return wrong(format!("`{}` must be whole", l.name()));
    }
    for a in (0..mesh.atoms.len() as u8).map(Atom) {
        let table = Table { mesh, typing, a, of: &of, to: &to, new: &new };
        let states: Vec<State> = ins.iter().map(|t| t.state(a)).collect();
        for (k, t) in outs.iter().enumerate() {
            let (want, is) = (table.result(&states, k)?, t.state(a));
            let same = match want {
                State::Sharded(_) => matches!(is, State::Sharded(_)),
                other => is == other,
            };
            if !same {
                let axis = mesh.names(AtomSet::one(a), "*");
                return wrong(format!("over {axis} result {k} is {want} and not {is}"));
            }
        }
    }
    blocks(&rule, held, outs)
}

/// One axis of the table.
struct Table<'a> {
    mesh: &'a Mesh,
    typing: Typing,
    a: Atom,
    of: &'a [Cuts],
    to: &'a [Cuts],
    new: &'a Cuts,
}

impl Table<'_> {
    fn wrong<T>(&self, what: &str) -> Result<T, Fault> {
        wrong(format!("over {}: {what}", self.mesh.names(AtomSet::one(self.a), "*")))
    }

    /// The state of result `k` over the axis.
    fn result(&self, states: &[State], k: usize) -> Result<State, Fault> {
        let has = |s: State| states.contains(&s);
        let but =
            |f: &dyn Fn(&State) -> bool| states.iter().any(|s| *s != State::Replicated && !f(s));
        let makes = self.new.values().any(|c| c.set().has(self.a));
        let mut letters: Vec<Letter> = self
            .of
            .iter()
            .flatten()
            .filter(|(_, c)| c.set().has(self.a))
            .map(|(l, _)| *l)
            .collect();
        letters.sort_unstable();
        letters.dedup();
        if makes && (!self.typing.makes || states.iter().any(|s| *s != State::Replicated)) {
            return self.wrong("a new letter is cut, of operands that are not replicated");
        }
        if has(State::Invariant) {
            return match states.iter().all(|s| *s == State::Invariant) {
                true => Ok(State::Invariant),
                false => self.wrong("an invariant operand beside another"),
            };
        }
        if has(State::Varying) {
            return match but(&|s| *s == State::Varying) {
                false => Ok(State::Varying),
                true => self.wrong("a varying operand beside a part of something"),
            };
        }
        match letters[..] {
            [] => {}
            [l] if !but(&|s| matches!(s, State::Sharded(_))) => {
                return match (self.to[k].contains_key(&l), self.typing.lost) {
                    (true, _) => Ok(State::Sharded(0)),
                    (false, Some(by)) => Ok(State::Partial(by)),
                    (false, None) => self.wrong("a letter that is cut is lost"),
                };
            }
            [_] => return self.wrong("a sum that is still to be taken beside a piece"),
            _ => return self.wrong("the axis cuts two letters"),
        }
        let pending = states.iter().find_map(|s| match s {
            State::Partial(r) => Some(*r),
            _whole => None,
        });
        match pending {
            Some(r) => self.over_pending(states, r),
            None if makes && self.to[k].values().any(|c| c.set().has(self.a)) => {
                Ok(State::Sharded(0))
            }
            None => Ok(State::Replicated),
        }
    }

    /// Of operands of which some are still to be reduced, the others replicated.
    fn over_pending(&self, states: &[State], r: Reduction) -> Result<State, Fault> {
        let is: Vec<usize> =
            (0..states.len()).filter(|&i| states[i] == State::Partial(r)).collect();
        let others = states.iter().all(|s| [State::Partial(r), State::Replicated].contains(s));
        let may = match r {
            Reduction::Sum => match self.typing.linear {
                Linear::No => false,
                Linear::All => is.len() == states.len(),
                Linear::Together(of) => is == of,
                Linear::Each(of) => is.len() == 1 && of.contains(&is[0]),
            },
            _ if self.typing.picks && self.typing.lost == Some(r) => true,
            Reduction::Max | Reduction::Min => self.typing.moves && is.len() == states.len(),
        };
        match may && others {
            true => Ok(State::Partial(r)),
            false => self.wrong("it is not linear in what is still to be reduced"),
        }
    }
}

/// Numbers and integers, each where they belong.
fn kinds(typing: Typing, ins: &[&Type], outs: &[&Type]) -> Result<(), Fault> {
    let of = |i: usize| ins.get(i).is_none_or(|t| t.dtype.is_float());
    let is = |kind: u8, t: &Type| match kind {
        b'n' => t.dtype.is_float(),
        b'i' => !t.dtype.is_float(),
        b't' => t.dtype.is_float() == of(1),
        _same => t.dtype.is_float() == of(0),
    };
    let fits = |(kinds, types): (&str, &[&Type])| {
        let of = |i: usize| kinds.as_bytes()[i.min(kinds.len() - 1)];
        types.iter().enumerate().all(|(i, t)| is(of(i), t))
    };
    match typing.kinds.into_iter().zip([ins, outs]).all(fits) {
        true => Ok(()),
        false => wrong("a number stands where an integer must, or the other way round".into()),
    }
}

/// Blocks of results: a letter is one block in all operands that vary.
fn blocks(rule: &Rule, held: &[&Held], outs: &[&Type]) -> Result<Vec<Vec<Block>>, Fault> {
    let mut known: BTreeMap<Letter, Block> = BTreeMap::new();
    for (h, dims) in held.iter().zip(&rule.ins) {
        for b in &h.blocks {
            let Some(l) = dims[b.dim].single() else {
                return Err(Fault::Unknown("a block of a dim of several letters".into()));
            };
            let first = *known.entry(l).or_insert(*b);
            if (first.axes, first.shift) != (b.axes, b.shift) {
                return wrong(format!(
                    "`{}` is of two blocks: {} places and {} before the own one",
                    l.name(),
                    first.shift,
                    b.shift
                ));
            }
        }
    }
    for (h, dims) in held.iter().zip(&rule.ins) {
        for (d, g) in dims.iter().enumerate() {
            let block = g.letters().iter().find_map(|l| known.get(l));
            if block.is_some() && !h.blocks.iter().any(|b| b.dim == d) {
                return Err(Fault::Unknown("a block beside a value that is none".into()));
            }
        }
    }
    let of = |dims: &Dims| {
        let own = |(dim, g): (usize, &Group)| Some(Block { dim, ..*known.get(&g.single()?)? });
        dims.iter().enumerate().filter_map(own).collect()
    };
    Ok(rule.outs.iter().zip(outs).map(|(dims, _)| of(dims)).collect())
}
