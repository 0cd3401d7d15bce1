//! The second factorisation of ranks, for experts.
//!
//! The ranks of `dp_shard`, `cp` and `tp` are factorised again as edp × ep × etp, etp varying fastest
//! (Liu et al., 2025, *MoE Parallel Folding*): experts are split over ep, each expert's width over etp,
//! and edp ranks hold the same experts. No axis of the mesh has these names: they are pieces of axes,
//! which the mesh knows as atoms.

use super::SEQUENCE;
use crate::options::Options;
use shardc_ir::axes::{self, AxisRole, Splits};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{AnnotatedDim, Annotation, Func, Port, RoleKind, Value};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::Mixing;
use shardc_ir::types::AtomList;
use shardc_ir::weights::Weight;
use std::collections::BTreeMap;

/// What a piece of an axis is for experts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ExpertRole {
    /// Ranks that hold the same experts: edp.
    Data,
    /// Ranks that split the width of each expert: etp.
    Tensor,
    /// Ranks that split the experts: ep.
    Expert,
}

/// A piece of an axis.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AxisPiece {
    pub axis: String,
    /// Positions of the axis major to it.
    pub pre: usize,
    pub size: usize,
    pub part: ExpertRole,
}

impl AxisPiece {
    /// Tokens are cut over it: ranks that split the width of an expert need the same ones.
    pub fn cuts_tokens(&self) -> bool {
        self.part != ExpertRole::Tensor
    }
    /// It cuts rows, not the tokens of a row.
    pub fn of_rows(&self) -> bool {
        axes::role(&self.axis).is_some_and(AxisRole::of_rows)
    }
}

/// The pieces of all axes that tokens or experts are split over: those that cut rows, then those that
/// cut the tokens of a row, each major to minor.
///
/// # Errors
/// `experts-mesh` if ep · etp ranks cannot be taken from the axes.
pub fn fold(o: &Options) -> Result<Vec<AxisPiece>> {
    let (mut tensor, mut expert) = (o.etp(), o.ep);
    let mut pieces = vec![];
    for (axis, size) in o.mesh.iter().rev().filter(|a| a.1 > 1) {
        let mut left = *size;
        let mut take = |want: &mut usize| {
            let fits = left % *want == 0 || *want % left == 0;
            let n = if fits { left.min(*want) } else { 1 };
            (left, *want) = (left / n, *want / n);
            n
        };
        let Some(role) = axes::role(axis).filter(|r| r.splits != Splits::Layers) else { continue };
        let [mut t, mut e] = [1; 2];
        if role.shares {
            t = take(&mut tensor);
            // The inner factor must be complete before the next begins.
            e = if tensor == 1 { take(&mut expert) } else { 1 };
        }
        let shares = [(ExpertRole::Data, left), (ExpertRole::Expert, e), (ExpertRole::Tensor, t)];
        let mut pre = 1;
        let mut own = vec![];
        for (part, size) in shares {
            if size > 1 {
                own.push(AxisPiece { axis: axis.clone(), pre, size, part });
            }
            pre *= size;
        }
        pieces.splice(0..0, own);
    }
    if tensor * expert > 1 {
        return Err(refused(o));
    }
    // Tokens of a row are cut over cp, then over tp, whatever the order of ranks.
    let width = |p: &AxisPiece| axes::role(&p.axis).is_some_and(|r| r.splits == Splits::Width);
    pieces.sort_by_key(|p| (!p.of_rows(), width(p)));
    Ok(pieces)
}

fn refused(o: &Options) -> Diag {
    let (ep, etp) = (o.ep, o.etp());
    let axes = ["dp_shard", "cp", "tp"].map(|a| o.axis(a));
    let ranks: usize = axes.iter().product();
    let near = |n: usize| (1..=n).rev().find(|d| ranks % (d * etp.min(ranks)) == 0).unwrap_or(1);
    let [shards, cp, tp] = axes;
    Diag::new(
        "experts-mesh",
        format!("ep={ep}, etp={etp} do not divide dp_shard={shards}, cp={cp}, tp={tp}"),
    )
    .rule("etp, then ep, are factors of tp, cp and dp_shard, the fastest axis first")
    .help(format!("use ep={}, or etp=1, or dp_shard={}", near(ep), ep * etp * shards.max(1)))
}

/// Cuts the mesh into the pieces.
pub(super) fn cut(mesh: &mut Mesh, pieces: &[AxisPiece]) -> Result<()> {
    for p in pieces {
        if let Some(axis) = mesh.axes.iter().position(|a| a.name == p.axis) {
            mesh.cut(axis, p.pre)?;
            mesh.cut(axis, p.pre * p.size)?;
        }
    }
    Ok(())
}

/// The atoms of some pieces in the order in which they count shards of tokens: edp, etp, ep. So what
/// goes to the experts are the last.
fn atoms(mesh: &Mesh, pieces: &[AxisPiece], which: impl Fn(&AxisPiece) -> bool) -> Vec<Atom> {
    let mut found: Vec<&AxisPiece> = pieces.iter().filter(|p| which(p)).collect();
    found.sort_by_key(|p| p.part);
    let of = |p: &AxisPiece| {
        let inside = |a: &shardc_ir::mesh::AtomInfo| {
            mesh.axes[a.axis as usize].name == p.axis && a.pre >= p.pre && a.pre < p.pre * p.size
        };
        mesh.atoms.ids().filter(|a| inside(&mesh.atoms[a])).collect::<Vec<_>>()
    };
    found.into_iter().flat_map(of).collect()
}

/// The atoms that are this part for experts; none if the options do not fit the mesh.
pub fn ranks_of(mesh: &Mesh, o: &Options, part: ExpertRole) -> AtomSet {
    let pieces = fold(o).unwrap_or_default();
    atoms(mesh, &pieces, |p| p.part == part).into_iter().collect()
}

/// Asks for the layouts of experts: buffers at their experts; and tokens where they are, once parameters have
/// spread, those of an expert that all tokens pass among them.
pub(super) fn annotate(
    mesh: &Mesh,
    f: &Func,
    weights: &BTreeMap<&str, &Weight>,
    pieces: &[AxisPiece],
    new: &mut Vec<(Value, Annotation)>,
) {
    let list = |which: &dyn Fn(&AxisPiece) -> bool| {
        AtomList::collect(atoms(mesh, pieces, which)).unwrap_or_default()
    };
    let tokens = list(&|p| p.cuts_tokens());
    let expert = list(&|p| p.part == ExpertRole::Expert);
    let tensor = list(&|p| p.part == ExpertRole::Tensor);
    // Buffers at their experts: of all tokens that ranks with the same experts have.
    let own = list(&|p| p.cuts_tokens() && p.part == ExpertRole::Data);
    let open = AnnotatedDim { atoms: AtomList::EMPTY, open: true };
    let at = |atoms| AnnotatedDim { atoms, open: false };
    let whole = at(AtomList::EMPTY);
    let mut ask = |v: Value, priority: u8, dims: &[AnnotatedDim]| {
        new.push((v, Annotation { dims: dims.into(), priority }));
    };
    let stack = |a: &Port| {
        let role = a.role.as_ref().filter(|r| r.kind == RoleKind::Param)?;
        weights.get(&*role.name).copied().filter(|w| w.experts.is_some())
    };
    for n in &f.nodes {
        match n.op.mixing() {
            Some(Mixing::Route(_)) => {
                ask(n.ins[0], SEQUENCE, &[at(tokens), whole, whole]);
                ask(n.outs[0], SEQUENCE, &[at(tokens), whole, whole]);
                ask(n.outs[1], SEQUENCE, &[whole, whole, at(tokens)]);
            }
            Some(Mixing::Dispatch) => {
                ask(n.ins[0], SEQUENCE, &[at(tokens), whole, whole]);
                ask(n.outs[0], SEQUENCE, &[whole, at(tokens), whole, whole]);
            }
            Some(Mixing::Product) => ask(n.outs[0], 0, &[at(expert), at(own), whole, open]),
            Some(Mixing::Unpermute) | None => {}
        }
    }
    for a in &f.args {
        if let Some(w) = stack(a) {
            let dim = |d: usize| match d {
                0 => at(expert),
                d if w.tp_dim == Some(d) => at(tensor),
                _ => whole,
            };
            let dims: Vec<AnnotatedDim> = (0..w.shape.len()).map(dim).collect();
            ask(a.value, 0, &dims);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;

    fn options(mesh: &[(&str, usize)]) -> Options {
        let mesh = mesh.iter().map(|(n, s)| (n.to_string(), *s)).collect();
        Options { mesh, global_batch: 8, microbatch: 1, seq: 16, ..Options::default() }
    }

    fn folded(mesh: &[(&str, usize)], ep: usize, etp: usize, sp: bool) -> Result<String> {
        let mut o = options(mesh);
        (o.ep, o.etp, o.sp) = (ep, Some(etp), sp);
        let one = |p: &AxisPiece| {
            let part = ["edp", "etp", "ep"][p.part as usize];
            let tokens = if p.cuts_tokens() { "" } else { "!" };
            format!("{}:({}){} {part}{tokens}", p.axis, p.pre, p.size)
        };
        Ok(fold(&o)?.iter().map(one).collect::<Vec<_>>().join(", "))
    }

    #[test]
    fn the_fastest_axes_are_taken_first() {
        let mesh = [("pp", 2), ("dp_replicate", 2), ("dp_shard", 4), ("cp", 2), ("tp", 4)];
        let same = "dp_replicate:(1)2 edp, dp_shard:(1)4 ";
        let of = |ep, etp, sp| folded(&mesh, ep, etp, sp).unwrap();
        assert_eq!(of(1, 4, true), format!("{same}edp, cp:(1)2 edp, tp:(1)4 etp!"));
        assert_eq!(of(1, 4, false), format!("{same}edp, cp:(1)2 edp, tp:(1)4 etp!"));
        assert_eq!(of(8, 1, false), format!("{same}edp, cp:(1)2 ep, tp:(1)4 ep"));
        assert_eq!(of(2, 2, false), format!("{same}edp, cp:(1)2 edp, tp:(1)2 ep, tp:(2)2 etp!"));
        let cut = "dp_replicate:(1)2 edp, dp_shard:(1)2 edp, dp_shard:(2)2 ep, ";
        assert_eq!(of(16, 1, true), format!("{cut}cp:(1)2 ep, tp:(1)4 ep"));
        assert_eq!(of(4, 4, true), format!("{cut}cp:(1)2 ep, tp:(1)4 etp!"));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for (ep, etp) in [(16, 1), (3, 1), (8, 2), (1, 3), (1, 16)] {
            let d = folded(&[("dp_replicate", 4), ("dp_shard", 4), ("tp", 2)], ep, etp, true);
            let d = d.unwrap_err();
            assert_eq!(d.code, "experts-mesh");
            assert!(d.message.contains(&format!("ep={ep}, etp={etp}")), "{}", d.message);
        }
    }
}
