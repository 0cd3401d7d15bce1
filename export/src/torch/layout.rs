//! Groups of ranks, and what of a dim each rank has, as Python.

use super::dims::quoted;
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::types::{AtomList, Type};
use std::collections::BTreeMap;

/// What the head of a program declares: groups of ranks, in the order in which they are first met, and exchanges.
pub(super) struct Layouts<'a> {
    pub mesh: &'a Mesh,
    /// By the atoms, outer to inner: the name, and whether its ranks exchange data.
    groups: BTreeMap<Vec<Atom>, (String, bool)>,
    /// Names of exchanges by what stands behind `=`.
    exchanges: BTreeMap<String, String>,
}

impl<'a> Layouts<'a> {
    pub fn new(mesh: &'a Mesh) -> Layouts<'a> {
        Layouts { mesh, groups: BTreeMap::new(), exchanges: BTreeMap::new() }
    }

    /// Of ranks that differ along these atoms, of which nothing but their places is asked.
    pub fn over(&mut self, atoms: impl Iterator<Item = Atom>) -> String {
        self.named(atoms.collect(), false)
    }

    /// Of ranks that have pieces of a dim, in the order of these.
    fn split(&mut self, l: AtomList) -> String {
        let over = self.over(l.iter());
        if l.is_turned() { format!("{over}.turned()") } else { over }
    }

    /// The same, of ranks that exchange data.
    pub fn group(&mut self, atoms: impl Iterator<Item = Atom>) -> String {
        self.named(atoms.collect(), true)
    }

    fn named(&mut self, atoms: Vec<Atom>, sends: bool) -> String {
        let mut text = String::from("over_");
        self.mesh.write_atoms(atoms.iter().copied(), "_", &mut text);
        let word = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
        let mut name: String = text.chars().map(word).collect();
        let taken = |n: &String| self.groups.iter().any(|(a, g)| *a != atoms && g.0 == *n);
        while taken(&name) {
            name.push('_');
        }
        let own = self.groups.entry(atoms).or_insert((name, false));
        own.1 |= sends;
        own.0.clone()
    }

    /// True if all ranks have as much of a dim.
    fn is_even(&self, ty: &Type, dim: usize) -> bool {
        ty.dims[dim].size % ty.pieces(self.mesh, dim) == 0
    }

    /// How much this rank has of a dim.
    pub fn length(&mut self, ty: &Type, dim: usize) -> String {
        match self.is_even(ty, dim) {
            true => ty.chunk(self.mesh, dim).to_string(),
            false => {
                let d = ty.dims[dim];
                format!("{}.length({})", self.split(d.atoms), d.size)
            }
        }
    }

    /// Where in the whole dim this rank's piece begins.
    pub fn start(&mut self, ty: &Type, dim: usize) -> String {
        let d = ty.dims[dim];
        match d.atoms.is_empty() {
            true => "0".into(),
            false => format!("{}.start({})", self.split(d.atoms), d.size),
        }
    }

    /// Where this rank's piece begins in the larger piece that another type gives it.
    pub fn within(&mut self, piece: &Type, whole: &Type, dim: usize) -> String {
        let (a, b) = (self.start(piece, dim), self.start(whole, dim));
        if b == "0" { a } else { format!("{a} - {b}") }
    }

    /// The name of an exchange.
    pub fn exchange(
        &mut self,
        axes: AtomSet,
        from: &Type,
        to: &Type,
        shift: Option<(usize, i64)>,
    ) -> String {
        let over = self.group(axes.iter());
        let mut dims = |t: &Type| {
            let one = |d: &shardc_ir::types::Dim| match d.atoms.is_empty() {
                true => d.size.to_string(),
                false => format!("({}, {})", d.size, self.split(d.atoms)),
            };
            let all: Vec<String> = t.dims.iter().map(one).collect();
            format!("[{}]", all.join(", "))
        };
        let mut text = format!("Exchange({over}, {}, {}", dims(from), dims(to));
        let sums = to.sum.and(axes);
        if !sums.is_empty() {
            text += &format!(", sums={}", self.over(sums.iter()));
        }
        if let Some((dim, start)) = shift {
            text += &format!(", shift=({dim}, {start})");
        }
        text.push(')');
        let next = format!("exchange_{}", self.exchanges.len());
        self.exchanges.entry(text).or_insert(next).clone()
    }

    /// Lines that declare all of them.
    pub fn lines(&self) -> Vec<String> {
        let axes: Vec<String> =
            self.mesh.axes.iter().map(|a| format!("({}, {})", quoted(&a.name), a.size)).collect();
        let mut out = vec![format!("mesh = Mesh([{}])", axes.join(", "))];
        for (atoms, (name, sends)) in &self.groups {
            let how = if *sends { "group" } else { "over" };
            let one = |a: &Atom| {
                let i = self.mesh.atoms[*a];
                let axis = &self.mesh.axes[usize::from(i.axis)];
                match i.size == axis.size {
                    true => quoted(&axis.name),
                    false => format!("({}, {}, {})", quoted(&axis.name), i.pre, i.size),
                }
            };
            let all: Vec<String> = atoms.iter().map(one).collect();
            out.push(format!("{name} = mesh.{how}({})", all.join(", ")));
        }
        let mut exchanges: Vec<_> =
            self.exchanges.iter().map(|(text, name)| (name, text)).collect();
        exchanges.sort_by_key(|(name, _)| (name.len(), name.to_string()));
        out.extend(exchanges.into_iter().map(|(name, text)| format!("{name} = {text}")));
        out
    }
}
