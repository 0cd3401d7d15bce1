//! Result types of an op from its letter rule and its operand types: shapes, shardings, sums still
//! to be taken. The one place where the type discipline (I, R, S, V, P) is written down.
//!
//! Over one mesh atom, the legal combinations are:
//!
//! | operands | result |
//! |---|---|
//! | all I | I |
//! | all R | R |
//! | one letter sharded in every operand that has it, the rest R | S if the result has the letter, else P |
//! | V and R | V |
//! | P in operands the op is linear in, the rest R (or, for sums, all P) | P |
//!
//! Everything else is an error that names the collective or `fan_out` that is missing.

mod states;

use crate::mesh::{AtomSet, Mesh};
use crate::rule::{Letter, Rule, has_letter};
use crate::types::{AtomList, DType, Dim, Reduction, Type};
use smallvec::SmallVec;
use states::unsharded;

/// In which operands an op is linear, which decides where pending sums may pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Linear {
    /// In none.
    No,
    /// In each of these operands (bit i = operand i) while all others are fixed: a product.
    Each(u32),
    /// In these operands together while the others are fixed: a sum, or an op of one operand.
    Together(u32),
}

/// Why an op cannot be typed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TypeError {
    pub code: &'static str,
    pub message: String,
    pub help: String,
}

pub(crate) fn err<T>(
    code: &'static str,
    message: String,
    help: impl Into<String>,
) -> Result<T, TypeError> {
    Err(TypeError { code, message, help: help.into() })
}

/// Size and split of one letter.
#[derive(Clone, Copy, Debug)]
pub struct Loop {
    pub letter: Letter,
    pub size: usize,
    pub atoms: AtomList,
}

/// All loops of an op with their global sizes and splits.
#[derive(Clone, Debug, Default)]
pub struct Loops(pub SmallVec<[Loop; 8]>);

impl Loops {
    pub fn get(&self, l: Letter) -> Option<Loop> {
        self.0.iter().copied().find(|x| x.letter == l)
    }
    pub fn size(&self, l: Letter) -> Option<usize> {
        self.get(l).map(|x| x.size)
    }
    fn add(&mut self, letter: Letter, size: usize) {
        self.0.push(Loop { letter, size, atoms: AtomList::EMPTY });
    }
    fn set(&mut self, l: Letter) -> &mut Loop {
        self.0.iter_mut().find(|x| x.letter == l).expect("all letters have sizes")
    }
}

/// What the rule needs to know beyond the operands' types.
pub struct Query<'a> {
    pub mesh: &'a Mesh,
    pub rule: &'a Rule,
    pub ins: &'a [&'a Type],
    /// Sizes of letters that no operand fixes.
    pub sizes: &'a [(Letter, usize)],
    /// Declared result types: they choose the split of letters that only results have, and the
    /// state of an op without operands.
    pub declared: &'a [Option<&'a Type>],
    pub dtypes: &'a [DType],
    pub linear: Linear,
    pub reduction: Reduction,
}

/// Loops of all letters, of which none is split yet; an error if operands disagree in a size.
pub fn sizes(rule: &Rule, ins: &[&Type], given: &[(Letter, usize)]) -> Result<Loops, TypeError> {
    let mut out = Loops::default();
    given.iter().for_each(|&(l, size)| out.add(l, size));
    for (i, (dims, t)) in rule.ins.iter().zip(ins).enumerate() {
        if dims.len() != t.rank() {
            return err(
                "rank",
                format!(
                    "operand {i} has {} dims, the rule `{rule}` needs {}",
                    t.rank(),
                    dims.len()
                ),
                "give it the rule's shape",
            );
        }
        for (g, d) in dims.iter().zip(&t.dims) {
            if let Some(l) = g.single() {
                match out.size(l) {
                    None => out.add(l, d.size),
                    Some(s) if s == d.size => {}
                    Some(s) => {
                        return err(
                            "size",
                            format!("{} is {} in operand {i} and {s} elsewhere", l.said(), d.size),
                            format!("make both sizes of {} equal", l.said()),
                        );
                    }
                }
            }
        }
    }
    for (dims, t) in rule.ins.iter().zip(ins) {
        for (g, d) in dims.iter().zip(&t.dims).filter(|(g, _)| g.single().is_none()) {
            let mut known = 1usize;
            let mut open = None;
            for &l in g.letters() {
                match out.size(l) {
                    Some(s) => known = known.saturating_mul(s),
                    None if open.is_none() => open = Some(l),
                    None => {
                        return err(
                            "size",
                            format!(
                                "sizes of {} and {} are not known",
                                open.map_or(String::new(), Letter::said),
                                l.said()
                            ),
                            "name one of them in the attributes",
                        );
                    }
                }
            }
            let fits = if let Some(l) = open {
                let ok = known > 0 && d.size % known == 0;
                out.add(l, if ok { d.size / known } else { 0 });
                ok
            } else {
                known == d.size
            };
            if !fits {
                return err(
                    "size",
                    format!(
                        "a dim of {} is not made of `{}`",
                        d.size,
                        crate::rule::dims_text(&[*g])
                    ),
                    format!("{known} must divide {}", d.size),
                );
            }
        }
    }
    Ok(out)
}

/// Cuts a dim's atoms at its letters: the major letter takes atoms until it is full.
fn project(
    mesh: &Mesh,
    letters: &[Letter],
    loops: &Loops,
    atoms: AtomList,
) -> Result<SmallVec<[AtomList; 3]>, TypeError> {
    let mut out = SmallVec::new();
    if atoms.is_turned() {
        return err(
            "split",
            "a joined dim has its pieces in the opposite order".into(),
            "exchange it to the usual order first",
        );
    }
    let mut rest = atoms.iter().peekable();
    for (k, &l) in letters.iter().enumerate() {
        let size = loops.size(l).unwrap_or(1);
        let mut list = AtomList::EMPTY;
        let mut ways = 1;
        while let Some(&a) = rest.peek() {
            let last = k + 1 == letters.len();
            let divides = size % (ways * mesh.size(a)) == 0;
            if !divides && (!last || letters.len() > 1) {
                if ways == size {
                    break;
                }
                return err(
                    "split",
                    format!("{} of {size} cannot be split {} ways", l.said(), ways * mesh.size(a)),
                    format!("split it over a part of the axis that divides {size}"),
                );
            }
            list = list.push(a).expect("no longer than the dim's");
            ways *= mesh.size(a);
            rest.next();
        }
        if k + 1 < letters.len() && ways != size && rest.peek().is_some() {
            return err(
                "split",
                format!("{} of {size} is split only {ways} ways before a minor letter", l.said()),
                "split the major letter first",
            );
        }
        out.push(list);
    }
    Ok(out)
}

/// Types of all results.
pub fn infer(q: &Query) -> Result<SmallVec<[Type; 2]>, TypeError> {
    let loops = loops(q)?;
    let sharded = loops.0.iter().fold(AtomSet::EMPTY, |s, l| s.union(l.atoms.set()));
    let names = |s: AtomSet| q.mesh.names(s, "*");
    for (i, t) in q.ins.iter().enumerate() {
        let bad = sharded.minus(t.sharded()).minus(t.replicated);
        if bad.is_empty() {
            continue;
        }
        let what = if t.partial().meets(bad) {
            "a sum still to be taken"
        } else if t.varying.meets(bad) {
            "varying"
        } else {
            "invariant"
        };
        let help = if t.partial().meets(bad) {
            format!("all_reduce[{}] it first", names(bad))
        } else {
            format!("fan_out[{}] it first", names(bad))
        };
        return err(
            "mixed",
            format!(
                "operand {i} is {what} over {}, but another operand is split over it",
                names(bad)
            ),
            help,
        );
    }
    let states = unsharded(q, sharded)?;
    let mut out = SmallVec::new();
    for (o, dims) in q.rule.outs.iter().enumerate() {
        let mut t = Type::new(q.dtypes[o], &[]);
        (t.replicated, t.varying, t.sum, t.max, t.min) =
            (states.replicated, states.varying, states.sum, states.max, states.min);
        for g in dims {
            t.dims.push(result_dim(q.mesh, g.letters(), &loops)?);
        }
        let lost = sharded.minus(t.sharded());
        let below = |l: &&Loop| l.atoms.set().meets(lost) && has_letter(dims, l.letter);
        if !lost.is_empty()
            && let Some(l) = loops.0.iter().find(below)
        {
            return err(
                "split",
                format!("{} is split below a letter that is not full", l.letter.said()),
                "split the major letter first",
            );
        }
        let p = t.pending_mut(q.reduction);
        *p = p.union(lost);
        out.push(t);
    }
    Ok(out)
}

/// Sizes and splits of all letters; an error if operands disagree.
pub fn loops(q: &Query) -> Result<Loops, TypeError> {
    let mut loops = sizes(q.rule, q.ins, q.sizes)?;
    // Letters of operands, as bits.
    let mut seen = 0u64;
    let mut note = |loops: &mut Loops, from: usize, l: Letter, atoms: AtomList| {
        let x = loops.set(l);
        if seen >> l.0 & 1 == 0 {
            seen |= 1 << l.0;
            x.atoms = atoms;
        }
        if x.atoms == atoms { Ok(()) } else { Err(conflict(q, *x, from, atoms)) }
    };
    for (i, (dims, t)) in q.rule.ins.iter().zip(q.ins).enumerate() {
        for (g, d) in dims.iter().zip(&t.dims) {
            match g.single() {
                Some(l) => note(&mut loops, i, l, d.atoms)?,
                None => {
                    let parts = project(q.mesh, g.letters(), &loops, d.atoms)?;
                    for (&l, p) in g.letters().iter().zip(parts) {
                        note(&mut loops, i, l, p)?;
                    }
                }
            }
        }
    }
    declared_only(q, seen, &mut loops)?;
    split_once(q, &loops)?;
    Ok(loops)
}

/// An operand splits a loop into other atoms than the first that has it.
fn conflict(q: &Query, x: Loop, operand: usize, atoms: AtomList) -> TypeError {
    let show = |a: AtomList| {
        let mut t = x.size.to_string();
        if !a.is_empty() {
            t.push('@');
            q.mesh.write_atoms(a.iter(), "*", &mut t);
        }
        t
    };
    let first = q.rule.ins.iter().position(|dims| has_letter(dims, x.letter)).unwrap_or(operand);
    TypeError {
        code: "sharding-conflict",
        message: format!(
            "{} is {} in operand {first} and {} in operand {operand}",
            x.letter.said(),
            show(x.atoms),
            show(atoms)
        ),
        help: "split both alike, or reshard one of them first".into(),
    }
}

/// Letters that only results have, not among those of operands, are split as the declared result says.
fn declared_only(q: &Query, operands: u64, loops: &mut Loops) -> Result<(), TypeError> {
    for (dims, t) in q.rule.outs.iter().zip(q.declared) {
        let Some(t) = t else { continue };
        if t.rank() != dims.len() {
            return err(
                "rank",
                format!(
                    "the result has {} dims, the rule `{}` gives {}",
                    t.rank(),
                    q.rule,
                    dims.len()
                ),
                "declare the rule's shape",
            );
        }
        for (g, d) in dims.iter().zip(&t.dims) {
            if let Some(l) = g.single().filter(|l| operands >> l.0 & 1 == 0) {
                if loops.get(l).is_none() {
                    loops.add(l, d.size);
                }
                loops.set(l).atoms = d.atoms;
            }
        }
    }
    Ok(())
}

/// No axis splits two letters, and none that the op needs whole.
fn split_once(q: &Query, loops: &Loops) -> Result<(), TypeError> {
    let mut used = AtomSet::EMPTY;
    for l in loops.0.iter().filter(|l| !l.atoms.is_empty()) {
        let s = l.atoms.set();
        if s.meets(used) {
            return err(
                "sharding-conflict",
                format!(
                    "{} and another dim are both split over {}",
                    l.letter.said(),
                    q.mesh.names(s.and(used), "*")
                ),
                "an axis can split one dim of an op: reshard one operand first",
            );
        }
        if q.rule.is_whole(l.letter) {
            return err(
                "needs-whole",
                format!(
                    "{} is split over {}, but the op needs it whole",
                    l.letter.said(),
                    q.mesh.names(s, "*")
                ),
                "all_gather it first",
            );
        }
        used = used.union(s);
    }
    Ok(())
}

fn result_dim(mesh: &Mesh, letters: &[Letter], loops: &Loops) -> Result<Dim, TypeError> {
    if let [l] = letters
        && let Some(x) = loops.get(*l)
    {
        return Ok(Dim { size: x.size, atoms: x.atoms });
    }
    let mut d = Dim { size: 1, atoms: AtomList::EMPTY };
    let mut full = true;
    for &l in letters {
        let Some(x) = loops.get(l) else {
            return err(
                "size",
                format!("the size of {} is not known", l.said()),
                "name it in the attributes",
            );
        };
        let Some(size) = d.size.checked_mul(x.size) else {
            return err(
                "size",
                format!("a dim made of {} is too large", l.said()),
                "use smaller sizes",
            );
        };
        d.size = size;
        if !x.atoms.is_empty() {
            let joined = (full && !x.atoms.is_turned())
                .then(|| x.atoms.iter().try_fold(d.atoms, AtomList::push))
                .flatten();
            let Some(atoms) = joined else {
                return err(
                    "split",
                    format!("{} is split below a letter that is not full", l.said()),
                    "split the major letter first",
                );
            };
            let ways: usize = x.atoms.iter().map(|a| mesh.size(a)).product();
            if letters.len() > 1 && x.size % ways != 0 {
                return err(
                    "split",
                    format!(
                        "{} of {} cannot be split {ways} ways inside a joined dim",
                        l.said(),
                        x.size
                    ),
                    format!("split it over an axis that divides {}", x.size),
                );
            }
            d.atoms = atoms;
            full = ways == x.size;
        } else if x.size != 1 {
            full = false;
        }
    }
    Ok(d)
}
