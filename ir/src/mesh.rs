//! The mesh of ranks: named axes, and the *atoms* they are made of.
//!
//! A type never names an axis directly. It names atoms: the smallest pieces into which this module
//! cuts its axes. An axis that is used whole is one atom; an axis of 8 of which only a part is used
//! (`tp:(1)4`, say, because there are 4 KV heads) is cut into two. So sub-axes need no special case
//! anywhere: only the text knows how to merge atoms back into axis names.

use crate::axes::{self, AxisRole};
use crate::diag::Diag;
use crate::ids::{Id, IndexVec};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// Index of an atom in [`Mesh::atoms`], major to minor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Atom(pub u8);

impl Id for Atom {
    fn from_index(index: usize) -> Atom {
        Atom(index as u8)
    }
    fn index(self) -> usize {
        self.0 as usize
    }
}

/// A set of atoms.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct AtomSet(pub u32);

/// One named axis and its number of ranks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Axis {
    pub name: String,
    pub size: usize,
}

/// A piece of an axis: digit `size` of the axis index, with `pre` positions major to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AtomInfo {
    pub axis: u8,
    pub pre: usize,
    pub size: usize,
}

/// Named axes, outer to inner, with the atoms they are cut into. Rank numbers are the mixed-radix
/// number of the axis indices, the last axis varying fastest.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Mesh {
    pub axes: Vec<Axis>,
    pub atoms: IndexVec<Atom, AtomInfo>,
}

/// The axis of pipeline stages. Types never name it but for sums over all stages: a function belongs
/// to one stage, and its values live on that stage's ranks.
pub const PIPELINE: &str = "pp";

/// Most atoms a mesh may have (an [`AtomSet`] is one machine word).
pub const MAX_ATOMS: usize = 32;
/// Most ranks a mesh may have.
pub const MAX_RANKS: usize = 1 << 24;

impl AtomSet {
    pub const EMPTY: AtomSet = AtomSet(0);
    pub fn one(a: Atom) -> Self {
        AtomSet(1 << a.0)
    }
    pub fn has(self, a: Atom) -> bool {
        self.0 >> a.0 & 1 == 1
    }
    pub fn with(self, a: Atom) -> Self {
        AtomSet(self.0 | 1 << a.0)
    }
    pub fn union(self, o: Self) -> Self {
        AtomSet(self.0 | o.0)
    }
    pub fn minus(self, o: Self) -> Self {
        AtomSet(self.0 & !o.0)
    }
    pub fn and(self, o: Self) -> Self {
        AtomSet(self.0 & o.0)
    }
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
    pub fn within(self, o: Self) -> bool {
        self.minus(o).is_empty()
    }
    pub fn meets(self, o: Self) -> bool {
        !self.and(o).is_empty()
    }
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }
    /// The atoms, major to minor.
    pub fn iter(self) -> impl Iterator<Item = Atom> {
        let mut bits = self.0;
        std::iter::from_fn(move || {
            (bits != 0).then(|| {
                let a = bits.trailing_zeros();
                bits &= bits - 1;
                Atom(a as u8)
            })
        })
    }
}

impl std::fmt::Debug for AtomSet {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_set().entries(self.iter().map(|a| a.0)).finish()
    }
}

impl FromIterator<Atom> for AtomSet {
    fn from_iter<I: IntoIterator<Item = Atom>>(it: I) -> Self {
        it.into_iter().fold(AtomSet::EMPTY, AtomSet::with)
    }
}

impl Mesh {
    /// A mesh of whole axes. Axes of size 1 hold no information and are dropped.
    ///
    /// ```
    /// # use shardc_ir::mesh::Mesh;
    /// let m = Mesh::new(&[("dp", 2), ("tp", 4)]).unwrap();
    /// assert_eq!((m.ranks(), m.atoms.len()), (8, 2));
    /// ```
    pub fn new(axes: &[(&str, usize)]) -> Result<Mesh, Diag> {
        let mut m = Mesh::default();
        let mut ranks = 1usize;
        for (i, &(name, size)) in axes.iter().enumerate() {
            if size == 0 {
                return Err(Diag::new("mesh", format!("axis `{name}` has size 0"))
                    .help("give every axis at least one rank"));
            }
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            if name.is_empty()
                || !name.chars().all(word)
                || name.starts_with(|c: char| !c.is_ascii_alphabetic())
            {
                return Err(Diag::new("mesh", format!("axis name `{name}` is not a word"))
                    .help("use letters, digits and _, for example `tp`"));
            }
            if axes[..i].iter().any(|a| a.0 == name) {
                return Err(Diag::new("mesh", format!("axis `{name}` is given twice"))
                    .help("name each axis once"));
            }
            ranks = ranks.saturating_mul(size);
            if size > 1 {
                let axis = m.axes.len() as u8;
                m.axes.push(Axis { name: name.into(), size });
                m.atoms.push(AtomInfo { axis, pre: 1, size });
            }
        }
        if ranks > MAX_RANKS || m.atoms.len() > MAX_ATOMS {
            return Err(Diag::new(
                "mesh",
                format!(
                    "{ranks} ranks on {} axes is more than {MAX_RANKS} ranks or {MAX_ATOMS} axes",
                    axes.len()
                ),
            )
            .help("use a smaller mesh"));
        }
        Ok(m)
    }

    /// The mesh of one rank of the pipeline: [`PIPELINE`] with one position, all atoms as before.
    #[must_use]
    pub fn one_stage(&self) -> Mesh {
        let mut m = self.clone();
        for (i, a) in m.axes.iter_mut().enumerate().filter(|(_, a)| a.name == PIPELINE) {
            a.size = 1;
            m.atoms.iter_mut().filter(|x| x.axis as usize == i).for_each(|x| x.size = 1);
        }
        m
    }

    /// Number of ranks of the pipeline.
    pub fn pipeline(&self) -> usize {
        self.axes.iter().find(|a| a.name == PIPELINE).map_or(1, |a| a.size)
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.axes.iter().map(|a| a.size).product()
    }

    /// All atoms of the mesh.
    pub fn all(&self) -> AtomSet {
        self.atoms.ids().collect()
    }

    /// The atoms of one axis, by name; `None` if the axis is unknown (or has size 1).
    pub fn axis(&self, name: &str) -> Option<AtomSet> {
        let i = self.axes.iter().position(|a| a.name == name)?;
        Some(self.atoms_where(|a| a.axis as usize == i))
    }

    /// A list of axes as it is written, with `dp` for the data-parallel axes where no axis has this name.
    pub fn spelled(&self, atoms: &str) -> String {
        let is_dp = |part: &str| part.split(':').next() == Some("dp") && self.axis("dp").is_none();
        let own = axes::names(AxisRole::of_rows).filter(|a| self.axis(a).is_some());
        let own: Vec<&str> = own.collect();
        let one = |part: &str| match is_dp(part) && !own.is_empty() {
            true => own.iter().map(|a| part.replacen("dp", a, 1)).collect(),
            false => vec![part.to_string()],
        };
        atoms.split('*').flat_map(|part| one(part.trim())).collect::<Vec<_>>().join("*")
    }

    fn atoms_where(&self, f: impl Fn(&AtomInfo) -> bool) -> AtomSet {
        self.atoms.ids().filter(|a| f(&self.atoms[a])).collect()
    }

    /// Number of positions along an atom.
    pub fn size(&self, a: Atom) -> usize {
        self.atoms[a].size
    }

    /// Number of ranks in a group over a set of atoms.
    pub fn ways(&self, s: AtomSet) -> usize {
        s.iter().map(|a| self.size(a)).product()
    }

    /// Cuts `axis` after its first `pre` positions (major part of `pre`, minor part of the rest), so
    /// that a type can name either part. Only legal before any type of the module uses the axis.
    pub fn cut(&mut self, axis: usize, pre: usize) -> Result<(), Diag> {
        let at = self
            .atoms
            .iter()
            .position(|a| a.axis as usize == axis && pre > a.pre && pre < a.pre * a.size);
        let Some(i) = at.map(Atom::from_index) else { return Ok(()) };
        let a = self.atoms[i];
        if pre % a.pre != 0 || a.size % (pre / a.pre) != 0 || self.atoms.len() == MAX_ATOMS {
            let name = &self.axes[axis].name;
            return Err(Diag::new("sub-axis", format!(
                "axis `{name}` cannot be cut at {pre}: its part `{name}:({}){}` is not a whole number of pieces", a.pre, a.size))
                .help("let one sub-axis size divide the next"));
        }
        let major = pre / a.pre;
        self.atoms[i].size = major;
        self.atoms.insert_after(i, AtomInfo { axis: a.axis, pre, size: a.size / major });
        Ok(())
    }

    /// The digit of every atom for a rank.
    pub fn coords(&self, rank: usize) -> Vec<usize> {
        let mut rest = rank;
        let mut out = vec![0; self.atoms.len()];
        for (i, a) in self.atoms.iter().enumerate().rev() {
            out[i] = rest % a.size;
            rest /= a.size;
        }
        out
    }

    /// The rank with these atom digits; inverse of [`Mesh::coords`].
    pub fn rank(&self, coords: &[usize]) -> usize {
        self.atoms.iter().zip(coords).fold(0, |r, (a, c)| r * a.size + c)
    }

    /// Position of a rank (given by its coordinates) within its group over `s`, in group order.
    pub fn place(&self, s: AtomSet, coords: &[usize]) -> usize {
        s.iter().fold(0, |r, a| r * self.size(a) + coords[a.0 as usize])
    }

    /// The ranks of the group over `s` that contains `rank`, in group order.
    pub fn group(&self, s: AtomSet, rank: usize) -> Vec<usize> {
        self.members(s, rank).collect()
    }

    /// The same, each as it is asked for.
    pub fn members(&self, s: AtomSet, rank: usize) -> impl ExactSizeIterator<Item = usize> {
        let mut c = self.coords(rank);
        let atoms: Vec<Atom> = s.iter().collect();
        (0..self.ways(s)).map(move |mut i| {
            for a in atoms.iter().rev() {
                c[a.0 as usize] = i % self.size(*a);
                i /= self.size(*a);
            }
            self.rank(&c)
        })
    }

    /// Writes a list of atoms with axis names, merging neighbours: `dp*tp`, `tp:(2)4`.
    pub fn write_atoms(&self, atoms: impl IntoIterator<Item = Atom>, sep: &str, out: &mut String) {
        let mut atoms = atoms.into_iter().peekable();
        let mut first = true;
        while let Some(a) = atoms.next() {
            let info = self.atoms[a];
            let (mut size, mut last) = (info.size, a);
            while let Some(&n) = atoms.peek() {
                if n.0 != last.0 + 1 || self.atoms[n].axis != info.axis {
                    break;
                }
                size *= self.size(n);
                last = n;
                atoms.next();
            }
            if !std::mem::take(&mut first) {
                out.push_str(sep);
            }
            let axis = &self.axes[info.axis as usize];
            out.push_str(&axis.name);
            if size != axis.size {
                let _ = write!(out, ":({}){size}", info.pre);
            }
        }
    }

    /// Names of a set of atoms in canonical order, joined by `sep`.
    pub fn names(&self, s: AtomSet, sep: &str) -> String {
        let mut out = String::new();
        self.write_atoms(s.iter(), sep, &mut out);
        out
    }
}
