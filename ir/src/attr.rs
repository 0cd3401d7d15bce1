//! Attributes of ops: how each kind is written between `[` and `]`, and read back.

use crate::mesh::{AtomSet, Mesh};
use crate::rule::{Letter, Rule};
use crate::types::{AtomList, DType, MAX_LISTED};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::fmt::Write as _;
use std::sync::Arc;

mod fields;

pub use fields::{AttrError, AttrReader, AttrWriter};

/// What reading an attribute may depend on.
pub struct AttrCx<'a> {
    pub mesh: &'a Mesh,
    /// Ranks of the operands.
    pub ranks: &'a [usize],
}

/// A kind of attribute.
pub trait Attr: Sized {
    /// Written without `name=`.
    const BARE: bool;
    fn write(&self, mesh: &Mesh, out: &mut String);
    fn read(text: &str, cx: &AttrCx) -> Result<Self, String>;
    /// The value that is not written at all, if there is one.
    fn implied() -> Option<Self> {
        None
    }
    fn is_implied(&self) -> bool {
        false
    }
    /// Itself, if it says how operands are spread.
    fn broadcast(&mut self) -> Option<&mut Broadcast> {
        None
    }
    /// Itself, if it gives letters their sizes.
    fn sizes_mut(&mut self) -> Option<&mut Sizes> {
        None
    }
    fn sizes(&self) -> Option<&Sizes> {
        None
    }
    /// The rule that it is for operands of these ranks, if it is one.
    fn rule(&self, _ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        None
    }
}

/// A letter rule given as an attribute, as in `dot[mk,kn->mn]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct RuleAttr(pub Arc<Rule>);

/// Sizes of letters that no operand fixes, as in `expand[b->bh; h=4]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Sizes(pub SmallVec<[(Letter, usize); 2]>);

/// The letter rule of an element-wise op of several operands: none if all have the same dims, else
/// written out, as in `mul[bsh,h->bsh]`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Broadcast(pub Option<Arc<Rule>>);

impl Broadcast {
    /// All operands have the same dims.
    pub const SAME: Broadcast = Broadcast(None);
    pub fn new(text: &str, ranks: &[usize]) -> Broadcast {
        Broadcast(Some(Rule::shared(text, ranks)))
    }
    pub fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        match &self.0 {
            Some(r) => Cow::Borrowed(r),
            None => Rule::same(ranks.len(), 1, ranks.first().copied().unwrap_or(0)),
        }
    }
    /// Says why the operands do not fit.
    pub fn accepts(&self, ranks: &[usize]) -> Result<(), String> {
        match &self.0 {
            None if ranks.windows(2).any(|w| w[0] != w[1]) => {
                Err("operands of different rank need a rule, as in `mul[bsh,h->bsh]`".into())
            }
            None => Ok(()),
            Some(r) if r.ins.len() != ranks.len() => {
                Err(format!("the rule is for {} operands", r.ins.len()))
            }
            Some(r) => {
                let out = &r.outs[0];
                let lost = r
                    .ins
                    .iter()
                    .flatten()
                    .flat_map(|g| g.letters())
                    .find(|&&l| !crate::rule::has_letter(out, l));
                if let Some(l) = lost {
                    let l = l.name();
                    return Err(format!(
                        "`{l}` is missing on the right: an element-wise op keeps every letter"
                    ));
                }
                match r.ins.iter().chain(&r.outs).flatten().all(|g| g.single().is_some()) {
                    true => Ok(()),
                    false => Err("a dim of an element-wise op is one letter".into()),
                }
            }
        }
    }
}

impl Attr for Broadcast {
    const BARE: bool = true;
    fn write(&self, _: &Mesh, out: &mut String) {
        if let Some(r) = &self.0 {
            let _ = write!(out, "{r}");
        }
    }
    fn read(text: &str, cx: &AttrCx) -> Result<Self, String> {
        Ok(Broadcast(Some(RuleAttr::read(text, cx)?.0)))
    }
    fn implied() -> Option<Self> {
        Some(Broadcast(None))
    }
    fn is_implied(&self) -> bool {
        self.0.is_none()
    }
    fn broadcast(&mut self) -> Option<&mut Broadcast> {
        Some(self)
    }
    fn rule(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        Some(Broadcast::rule(self, ranks))
    }
}

impl RuleAttr {
    pub fn new(text: &str, ranks: &[usize]) -> RuleAttr {
        RuleAttr(Rule::shared(text, ranks))
    }
}

impl Attr for RuleAttr {
    const BARE: bool = true;
    fn write(&self, _: &Mesh, out: &mut String) {
        // A string takes all that is written to it.
        let _ = self.0.write(out);
    }
    fn read(text: &str, cx: &AttrCx) -> Result<Self, String> {
        if text.contains("..") || text.contains('!') {
            return Err("write every letter of this rule".into());
        }
        let rule = Rule::parse(text, cx.ranks)?;
        if rule.outs.len() != 1 {
            return Err(format!("a rule has one result on the right, not {}", rule.outs.len()));
        }
        Ok(RuleAttr(Arc::new(rule)))
    }
    fn rule(&self, _: &[usize]) -> Option<Cow<'_, Rule>> {
        Some(Cow::Borrowed(&self.0))
    }
}

impl Attr for Sizes {
    const BARE: bool = true;
    fn write(&self, _: &Mesh, out: &mut String) {
        for (i, (l, n)) in self.0.iter().enumerate() {
            let _ = write!(out, "{}{}={n}", if i > 0 { "," } else { "" }, l.name());
        }
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        let mut out = SmallVec::new();
        for part in text.split(',') {
            let (l, n) = part.split_once('=').ok_or("a size is written `h=4`")?;
            let rule = Rule::parse(&format!("->{}", l.trim()), &[])?;
            let letters = rule.letters();
            let [letter] = letters[..] else { return Err("a size is of one letter".into()) };
            out.push((letter, read_size(n.trim())?));
        }
        Ok(Sizes(out))
    }
    fn implied() -> Option<Self> {
        Some(Sizes::default())
    }
    fn is_implied(&self) -> bool {
        self.0.is_empty()
    }
    fn sizes_mut(&mut self) -> Option<&mut Sizes> {
        Some(self)
    }
    fn sizes(&self) -> Option<&Sizes> {
        Some(self)
    }
}

/// Largest size of a dim: sizes stay exact in f64 and their products are checked.
pub const MAX_SIZE: usize = 1 << 40;

pub(crate) fn read_size(text: &str) -> Result<usize, String> {
    // Rust reads a sign, too.
    let digits = Some(text).filter(|t| t.bytes().all(|b| b.is_ascii_digit()));
    let n: usize =
        digits.and_then(|t| t.parse().ok()).ok_or_else(|| format!("`{text}` is not a size"))?;
    if n > MAX_SIZE {
        Err(format!("{n} is larger than the largest size, {MAX_SIZE}"))
    } else {
        Ok(n)
    }
}

impl Attr for AtomSet {
    const BARE: bool = true;
    fn write(&self, mesh: &Mesh, out: &mut String) {
        mesh.write_atoms(self.iter(), "*", out);
    }
    fn read(text: &str, cx: &AttrCx) -> Result<Self, String> {
        let list = read_atoms(text, cx.mesh)?;
        if list.is_empty() {
            return Err("name at least one axis".into());
        }
        Ok(list.set())
    }
}

/// How the message ends about an axis of which something is named twice.
pub(crate) const TWICE: &str = "is named twice";

/// Reads `dp*tp:(1)2` as atoms.
pub fn read_atoms(text: &str, mesh: &Mesh) -> Result<AtomList, String> {
    let mut list = AtomList::EMPTY;
    for part in text.split('*') {
        let (name, sub) = match part.split_once(':') {
            Some((n, s)) => (n.trim(), Some(s)),
            None => (part.trim(), None),
        };
        let axis = mesh.axes.iter().position(|a| a.name == name).ok_or_else(|| {
            let known: Vec<_> = mesh.axes.iter().map(|a| a.name.as_str()).collect();
            format!("no axis `{name}` in the mesh, which has [{}]", known.join(", "))
        })?;
        let (pre, size) = match sub {
            None => (1, mesh.axes[axis].size),
            Some(s) => read_sub_axis(s)?,
        };
        let mut at = pre;
        let end = pre.saturating_mul(size);
        for (i, a) in mesh.atoms.iter().enumerate().filter(|(_, a)| a.axis as usize == axis) {
            if a.pre == at && at < end {
                let atom = crate::mesh::Atom(i as u8);
                if list.set().has(atom) {
                    return Err(format!("`{name}` {TWICE}"));
                }
                list = list
                    .push(atom)
                    .ok_or_else(|| format!("more than {MAX_LISTED} parts of axes"))?;
                at *= a.size;
            }
        }
        if at != end || size < 2 {
            return Err(format!("`{part}` is not a part of axis `{name}` of this mesh"));
        }
    }
    Ok(list)
}

/// Reads `(pre)size` of a sub-axis.
pub fn read_sub_axis(text: &str) -> Result<(usize, usize), String> {
    let bad = || format!("a sub-axis is written `axis:(2)4`, not `:{text}`");
    let (pre, size) =
        text.trim().strip_prefix('(').and_then(|t| t.split_once(')')).ok_or_else(bad)?;
    let pre = pre.trim().parse().map_err(|_| bad())?;
    let size = size.trim().parse().map_err(|_| bad())?;
    if pre == 0 || size == 0 { Err(bad()) } else { Ok((pre, size)) }
}

impl Attr for f64 {
    const BARE: bool = false;
    fn write(&self, _: &Mesh, out: &mut String) {
        let _ = write!(out, "{self:?}");
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        text.parse()
            .ok()
            .filter(|x: &f64| !x.is_nan())
            .ok_or_else(|| format!("`{text}` is not a number"))
    }
}

impl Attr for usize {
    const BARE: bool = false;
    fn write(&self, _: &Mesh, out: &mut String) {
        let _ = write!(out, "{self}");
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        read_size(text)
    }
}

/// A number of elements, before or after.
impl Attr for i64 {
    const BARE: bool = false;
    fn write(&self, _: &Mesh, out: &mut String) {
        let _ = write!(out, "{self}");
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        let n = read_size(text.strip_prefix('-').unwrap_or(text))? as i64;
        Ok(if text.starts_with('-') { -n } else { n })
    }
}

/// A number that is not written where it is `N`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Usual<const N: usize>(pub usize);

/// How far apart elements are: 1 is not written.
pub type Spacing = Usual<1>;

const LAST: usize = usize::MAX;

/// The number of a dim; the last is not written.
pub type Along = Usual<LAST>;

impl Along {
    pub const LAST: Along = Usual(LAST);

    /// The dim of a tensor with so many; `None` if it has no such dim.
    pub fn of(self, rank: usize) -> Option<usize> {
        let dim = if self == Along::LAST { rank.checked_sub(1)? } else { self.0 };
        (dim < rank).then_some(dim)
    }
}

impl<const N: usize> Attr for Usual<N> {
    const BARE: bool = false;
    fn write(&self, mesh: &Mesh, out: &mut String) {
        self.0.write(mesh, out);
    }
    fn read(text: &str, cx: &AttrCx) -> Result<Self, String> {
        usize::read(text, cx).map(Usual)
    }
    fn implied() -> Option<Self> {
        Some(Usual(N))
    }
    fn is_implied(&self) -> bool {
        self.0 == N
    }
}

/// Where in the operand the first element of a result is, along a dim: `-1` for what comes before it. Not
/// written where the two have the same indices.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Offset(pub Option<i64>);

impl Attr for Offset {
    const BARE: bool = false;
    fn write(&self, mesh: &Mesh, out: &mut String) {
        self.0.unwrap_or(0).write(mesh, out);
    }
    fn read(text: &str, cx: &AttrCx) -> Result<Self, String> {
        i64::read(text, cx).map(|n| Offset(Some(n)))
    }
    fn implied() -> Option<Self> {
        Some(Offset(None))
    }
    fn is_implied(&self) -> bool {
        self.0.is_none()
    }
}

impl Attr for Option<usize> {
    const BARE: bool = false;
    fn write(&self, mesh: &Mesh, out: &mut String) {
        match self {
            Some(n) => n.write(mesh, out),
            None => out.push_str("none"),
        }
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        if text == "none" { Ok(None) } else { read_size(text).map(Some) }
    }
}

/// What a look-up does with one index that stands for no token.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Padding {
    /// There is none.
    #[default]
    None,
    /// Looked up as any other, but its gradient is 0: `padding_idx` of torch.nn.Embedding.
    Constant(usize),
    /// Gives 0, and nothing is added at its place.
    Zero(usize),
}

impl Padding {
    /// The index that gives 0.
    pub fn zero(self) -> Option<usize> {
        match self {
            Padding::None | Padding::Constant(_) => None,
            Padding::Zero(i) => Some(i),
        }
    }
    /// The index, whatever is done with it.
    pub fn index(self) -> Option<usize> {
        match self {
            Padding::None => None,
            Padding::Constant(i) | Padding::Zero(i) => Some(i),
        }
    }
    /// The same index in the gradient of the op.
    pub(crate) fn of_gradient(self) -> Padding {
        self.index().map_or(Padding::None, Padding::Zero)
    }
    /// Says why the index is none of a dim of this size.
    pub(crate) fn accepts(self, size: usize) -> Result<(), String> {
        match self.index() {
            Some(i) if i >= size => Err(format!("padding {i} is not an index of {size} places")),
            Some(_) | None => Ok(()),
        }
    }
}

/// `padding=7`, or `padding=zero 7`.
impl Attr for Padding {
    const BARE: bool = false;
    fn write(&self, _: &Mesh, out: &mut String) {
        let _ = match self {
            Padding::None => Ok(()),
            Padding::Constant(i) => write!(out, "{i}"),
            Padding::Zero(i) => write!(out, "zero {i}"),
        };
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        match text.strip_prefix("zero ") {
            Some(i) => read_size(i.trim()).map(Padding::Zero),
            None => read_size(text).map(Padding::Constant),
        }
    }
    fn implied() -> Option<Self> {
        Some(Padding::None)
    }
    fn is_implied(&self) -> bool {
        *self == Padding::None
    }
}

impl Attr for bool {
    const BARE: bool = false;
    fn write(&self, _: &Mesh, out: &mut String) {
        let _ = write!(out, "{self}");
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        text.parse().map_err(|_| format!("`{text}` is neither true nor false"))
    }
    fn implied() -> Option<Self> {
        Some(false)
    }
    fn is_implied(&self) -> bool {
        !self
    }
}

impl Attr for Option<f64> {
    const BARE: bool = false;
    fn write(&self, mesh: &Mesh, out: &mut String) {
        if let Some(x) = self {
            x.write(mesh, out);
        }
    }
    fn read(text: &str, cx: &AttrCx) -> Result<Self, String> {
        f64::read(text, cx).map(Some)
    }
    fn implied() -> Option<Self> {
        Some(None)
    }
    fn is_implied(&self) -> bool {
        self.is_none()
    }
}

impl Attr for DType {
    const BARE: bool = true;
    fn write(&self, _: &Mesh, out: &mut String) {
        out.push_str(self.name());
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        DType::named(text)
            .ok_or_else(|| format!("`{text}` is not an element type: f32, bf16, f16 or i32"))
    }
}

impl Attr for Arc<[f32]> {
    const BARE: bool = true;
    fn write(&self, _: &Mesh, out: &mut String) {
        for (i, x) in self.iter().enumerate() {
            let _ = write!(out, "{}{x:?}", if i > 0 { ", " } else { "" });
        }
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        let one = |t: &str| t.trim().parse().map_err(|_| format!("`{t}` is not a number"));
        text.split(',').map(one).collect()
    }
}
