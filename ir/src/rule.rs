//! Letter rules: one letter per dim, and everything that follows from them.
//!
//! `mk,kn->mn` says that an op has the independent loops m, n, k; which dims of which operand each
//! runs over; and that k, missing on the right, is reduced. Shapes, shardings, pending sums and
//! FLOPs all come from the rule. `..` stands for all leading dims, `!k` must be whole on every rank,
//! `(hd)` is one dim made of two factors, h major. (The factors of Shardy's op sharding rules,
//! written as einsum letters.)

use crate::maps::HashMap;
use smallvec::SmallVec;
use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, LazyLock, OnceLock, PoisonError, RwLock};

/// A loop of an op. Letters from `..` print as `0`, `1`, ….
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Letter(pub u8);

/// Letters `a..z`, `A..Z`, then up to 8 leading dims.
const LEADING: u8 = 52;
const MAX_LEADING: usize = 8;
/// All letters are below.
pub const LETTERS: usize = LEADING as usize + MAX_LEADING;
/// Most letters of one dim.
pub const MAX_GROUP: usize = 7;

/// The letters of one dim, major to minor. One, unless the dim is made of several.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Group {
    len: u8,
    letters: [Letter; MAX_GROUP],
}

/// The dims of one operand or result.
pub type Dims = SmallVec<[Group; 4]>;

/// A parsed letter rule for given operand ranks.
#[derive(PartialEq, Eq, Hash, Debug)]
pub struct Rule {
    pub ins: SmallVec<[Dims; 3]>,
    pub outs: SmallVec<[Dims; 2]>,
    /// Letters that must not be sharded, as a bit set.
    whole: u64,
}

impl Clone for Rule {
    /// Dims are copied as they lie in memory: every node is asked for its rule, and often.
    fn clone(&self) -> Rule {
        let copy = |d: &Dims| Dims::from_slice(d);
        Rule {
            ins: self.ins.iter().map(copy).collect(),
            outs: self.outs.iter().map(copy).collect(),
            whole: self.whole,
        }
    }
}

impl Letter {
    fn from_char(c: char) -> Option<Letter> {
        match c {
            'a'..='z' => Some(Letter(c as u8 - b'a')),
            'A'..='Z' => Some(Letter(c as u8 - b'A' + 26)),
            '0'..='7' => Some(Letter(c as u8 - b'0' + LEADING)),
            _ => None,
        }
    }
    /// As messages have it: in quotes, and where rules give a leading dim no letter its number.
    pub fn said(self) -> String {
        match self.0.checked_sub(LEADING) {
            Some(dim) => format!("dim {dim}"),
            None => format!("`{}`", self.name()),
        }
    }
    pub fn name(self) -> char {
        match self.0 {
            0..=25 => (b'a' + self.0) as char,
            26..=51 => (b'A' + self.0 - 26) as char,
            n => (b'0' + n - LEADING) as char,
        }
    }
}

impl Group {
    pub fn one(l: Letter) -> Group {
        Group { len: 1, letters: [l; MAX_GROUP] }
    }
    pub fn letters(&self) -> &[Letter] {
        &self.letters[..self.len as usize]
    }
    /// The letter, if the dim is made of just one.
    pub fn single(&self) -> Option<Letter> {
        (self.len == 1).then_some(self.letters[0])
    }
}

impl Rule {
    /// Parses a rule the project wrote itself.
    pub fn new(text: &str, ranks: &[usize]) -> Rule {
        Rule::parse(text, ranks).unwrap_or_else(|e| panic!("rule `{text}`: {e}"))
    }

    /// An element-wise rule: `n_in` operands and `n_out` results, all of rank `rank`.
    pub fn elementwise(n_in: usize, n_out: usize, rank: usize) -> Rule {
        let dims: Dims = (0..rank).map(|i| Group::one(Letter(LEADING + i as u8))).collect();
        let all = |n| (0..n).map(|_| Dims::from_slice(&dims));
        Rule { ins: all(n_in).collect(), outs: all(n_out).collect(), whole: 0 }
    }

    /// The same, which is made once per process: most ops are asked for it.
    pub fn same(n_in: usize, n_out: usize, rank: usize) -> Cow<'static, Rule> {
        /// Operands, results and dims are below.
        const MOST: [usize; 3] = [4, 3, 6];
        static ALL: [OnceLock<Rule>; MOST[0] * MOST[1] * MOST[2]] =
            [const { OnceLock::new() }; MOST[0] * MOST[1] * MOST[2]];
        let make = || Rule::elementwise(n_in, n_out, rank);
        match n_in < MOST[0] && n_out < MOST[1] && rank < MOST[2] {
            true => {
                let at = (n_in * MOST[1] + n_out) * MOST[2] + rank;
                Cow::Borrowed(ALL[at].get_or_init(make))
            }
            false => Cow::Owned(make()),
        }
    }

    /// The rule of an op, which the project wrote itself: it is parsed once per process for operands of
    /// these ranks, and kept.
    pub(crate) fn known(text: &str, ranks: &[usize]) -> Cow<'static, Rule> {
        Cow::Borrowed(Rule::kept(text, ranks))
    }

    /// The same, for what has its rule for itself.
    pub(crate) fn shared(text: &str, ranks: &[usize]) -> Arc<Rule> {
        Rule::kept(text, ranks).clone()
    }

    fn kept(text: &str, ranks: &[usize]) -> &'static Arc<Rule> {
        type ByRanks = Vec<(SmallVec<[usize; 8]>, &'static Arc<Rule>)>;
        static ALL: LazyLock<RwLock<HashMap<String, ByRanks>>> = LazyLock::new(Default::default);
        let find = |all: &HashMap<String, ByRanks>| {
            all.get(text)?.iter().find(|x| x.0[..] == *ranks).map(|x| x.1)
        };
        let known = find(&ALL.read().unwrap_or_else(PoisonError::into_inner));
        known.unwrap_or_else(|| {
            let mut all = ALL.write().unwrap_or_else(PoisonError::into_inner);
            find(&all).unwrap_or_else(|| {
                let rule: &'static _ = Box::leak(Box::new(Arc::new(Rule::new(text, ranks))));
                all.entry(text.into()).or_default().push((ranks.into(), rule));
                rule
            })
        })
    }

    /// A rule of given dims.
    pub fn of(ins: &[&Dims], outs: &[&Dims]) -> Rule {
        Rule {
            ins: ins.iter().map(|&d| d.clone()).collect(),
            outs: outs.iter().map(|&d| d.clone()).collect(),
            whole: 0,
        }
    }

    /// Operands and a result that have the same dims but for dim `dim`, which is another letter in each,
    /// whole on every rank. Other dims may be 8.
    pub fn along(rank: usize, dim: usize, ins: &[Letter], out: Letter) -> Rule {
        let one = |own: Letter| -> Dims {
            let letter = |d: usize| if d == dim { own } else { Letter(LEADING + d as u8) };
            (0..rank).map(|d| Group::one(letter(d))).collect()
        };
        let mut rule = Rule {
            ins: ins.iter().map(|&l| one(l)).collect(),
            outs: std::iter::once(one(out)).collect(),
            whole: 0,
        };
        ins.iter().chain([&out]).for_each(|&l| rule.keep_whole(l));
        rule
    }

    /// Parses a rule; `ranks` are the operands' ranks (they say how many dims `..` stands for).
    ///
    /// ```
    /// # use shardc_ir::rule::Rule;
    /// let r = Rule::parse("mk,kn->mn", &[2, 2]).unwrap();
    /// assert_eq!(r.to_string(), "mk,kn->mn");
    /// assert!(Rule::parse("mk,kn->mn", &[2, 3]).is_err());
    /// ```
    pub fn parse(text: &str, ranks: &[usize]) -> Result<Rule, String> {
        let (left, right) = text.split_once("->").ok_or("a rule has `->`")?;
        let mut rule = Rule { ins: SmallVec::new(), outs: SmallVec::new(), whole: 0 };
        let mut leading = None;
        if !(left.is_empty() && ranks.is_empty()) {
            let of = left.split(',').count();
            if of != ranks.len() {
                let operands = if of == 1 { "operand" } else { "operands" };
                let given = if ranks.len() == 1 { "is" } else { "are" };
                return Err(format!("the rule has {of} {operands}, {} {given} given", ranks.len()));
            }
            for (t, &rank) in left.split(',').zip(ranks) {
                let dims = parse_dims(t, Some(rank), &mut leading, &mut rule.whole)?;
                rule.ins.push(dims);
            }
        }
        for t in right.split(',') {
            let dims = parse_dims(t, None, &mut leading, &mut rule.whole)?;
            rule.outs.push(dims);
        }
        Ok(rule)
    }

    /// Says that a letter must be whole on every rank.
    pub fn keep_whole(&mut self, l: Letter) {
        self.whole |= 1 << l.0;
    }

    /// True if the letter must be whole on every rank.
    pub fn is_whole(&self, l: Letter) -> bool {
        self.whole >> l.0 & 1 == 1
    }

    /// Writes the rule as it is parsed.
    pub(crate) fn write(&self, w: &mut impl fmt::Write) -> fmt::Result {
        for (side, arrow) in [(&self.ins[..], "->"), (&self.outs[..], "")] {
            for (i, dims) in side.iter().enumerate() {
                w.write_str(if i > 0 { "," } else { "" })?;
                write_dims(dims, w)?;
            }
            w.write_str(arrow)?;
        }
        Ok(())
    }

    /// All letters, in order of first appearance.
    pub fn letters(&self) -> SmallVec<[Letter; 8]> {
        let mut out = SmallVec::new();
        let mut seen = 0u64;
        for g in self.ins.iter().chain(&self.outs).flatten() {
            for &l in g.letters() {
                if seen >> l.0 & 1 == 0 {
                    seen |= 1 << l.0;
                    out.push(l);
                }
            }
        }
        out
    }
}

/// True if some dim contains the letter.
pub fn has_letter(dims: &[Group], l: Letter) -> bool {
    dims.iter().any(|g| g.letters().contains(&l))
}

fn parse_dims(
    t: &str,
    rank: Option<usize>,
    leading: &mut Option<usize>,
    whole: &mut u64,
) -> Result<Dims, String> {
    let (dots, rest) = match t.strip_prefix("..") {
        Some(r) => (true, r),
        None => (false, t),
    };
    let mut named: Dims = SmallVec::new();
    let mut group: Option<Group> = None;
    let mut bang = false;
    for c in rest.chars() {
        match c {
            '!' => bang = true,
            '(' if group.is_none() => {
                group = Some(Group { len: 0, letters: [Letter(0); MAX_GROUP] })
            }
            ')' => match group.take() {
                Some(g) if g.len > 0 => named.push(g),
                _ => return Err("`()` holds letters".into()),
            },
            _ => {
                let l = Letter::from_char(c).ok_or_else(|| format!("`{c}` is not a letter"))?;
                if has_letter(&named, l) || group.is_some_and(|g| g.letters().contains(&l)) {
                    return Err(format!("`{c}` is twice in one operand"));
                }
                if std::mem::take(&mut bang) {
                    *whole |= 1 << l.0;
                }
                match &mut group {
                    Some(g) if g.len as usize == MAX_GROUP => {
                        return Err(format!("at most {MAX_GROUP} letters in `()`"));
                    }
                    Some(g) => {
                        g.letters[g.len as usize] = l;
                        g.len += 1;
                    }
                    None => named.push(Group::one(l)),
                }
            }
        }
    }
    if group.is_some() {
        return Err("`(` is not closed".into());
    }
    let mut dims = Dims::new();
    if dots {
        let n = match (rank, *leading) {
            (Some(r), _) => r.checked_sub(named.len()).ok_or("the operand has too few dims")?,
            (None, Some(n)) => n,
            (None, None) => return Err("`..` is not on the left".into()),
        };
        if n > MAX_LEADING || leading.is_some_and(|m| m != n) {
            return Err(format!(
                "`..` stands for {n} dims here and {} there",
                leading.unwrap_or(MAX_LEADING)
            ));
        }
        *leading = Some(n);
        dims.extend((0..n).map(|i| Group::one(Letter(LEADING + i as u8))));
    }
    dims.extend(named);
    if rank.is_some_and(|r| r != dims.len()) {
        return Err(format!("the operand has {} dims, the rule {}", rank.unwrap_or(0), dims.len()));
    }
    Ok(dims)
}

/// Writes dims as a rule does.
pub fn dims_text(dims: &[Group]) -> String {
    let mut s = String::new();
    // A string takes all that is written to it.
    let _ = write_dims(dims, &mut s);
    s
}

fn write_dims(dims: &[Group], w: &mut impl fmt::Write) -> fmt::Result {
    for g in dims {
        match g.letters() {
            [l] => w.write_char(l.name())?,
            many => {
                w.write_char('(')?;
                many.iter().try_for_each(|l| w.write_char(l.name()))?;
                w.write_char(')')?;
            }
        }
    }
    Ok(())
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.write(f)
    }
}
