//! What a rank holds from step to step: its pieces of parameters and optimizer state.

use crate::wiring::{Port, Wiring, owns};
use shardc_ir::diag::Result;
use shardc_ir::func::{Role, RoleKind, Value};
use shardc_ir::plan::Plan;
use std::collections::BTreeMap;

/// A rank's piece of a tensor that lives from step to step.
#[derive(Clone, PartialEq, Debug)]
pub struct Holding {
    /// That of a parameter or of optimizer state.
    pub role: Role,
    /// Sizes of the whole tensor.
    pub shape: Vec<usize>,
    /// Where the piece begins, and its sizes.
    pub offset: Vec<usize>,
    pub len: Vec<usize>,
    pub(crate) func: usize,
    pub(crate) value: Value,
}

/// The pieces that every rank gives away: of ranks with equal copies the first has it. Empty ones are
/// left out, so those of all ranks make up every tensor once.
pub fn holdings(plan: &Plan) -> Result<Vec<Vec<Holding>>> {
    let w = Wiring::new(plan)?;
    Ok((0..w.mesh().ranks()).map(|rank| of(&w, rank)).collect())
}

/// The pieces that a rank gives away.
pub(crate) fn of(w: &Wiring, rank: usize) -> Vec<Holding> {
    let (mesh, class) = (w.mesh(), w.plan.class_of(rank));
    let coords = mesh.coords(rank);
    let mut out = vec![];
    let kept = |k| matches!(k, RoleKind::Param | RoleKind::State(_));
    // The value after a step: the last result with a role, else the argument.
    let mut last: BTreeMap<&Role, Port> = BTreeMap::new();
    for p in w.args(kept) {
        last.entry(p.role).or_insert(p);
    }
    last.extend(w.results(kept).map(|p| (p.role, p)));
    for (role, p) in last {
        if w.class_of[p.func] != class || !owns(mesh, p.ty, &coords) {
            continue;
        }
        let extents: Vec<_> = (0..p.ty.rank()).map(|d| p.ty.extent(mesh, d, &coords)).collect();
        let len: Vec<usize> = extents.iter().map(|e| e.len).collect();
        if len.contains(&0) {
            continue;
        }
        let (role, shape) = (role.clone(), p.ty.sizes().to_vec());
        let offset = extents.iter().map(|e| e.offset).collect();
        out.push(Holding { role, shape, offset, len, func: p.func, value: p.value });
    }
    out
}

/// Takes the elements of a piece, row-major.
pub type Sink<'a> = dyn FnMut(&[f32]) -> Result<()> + 'a;

/// Gives the elements of a piece, from where they lie if they lie together.
pub type Give<'a> = dyn FnMut(&Holding, &mut Sink) -> Result<()> + 'a;

/// What ranks do with all that they hold: a rank, its pieces, and how their elements are had.
pub type Task = dyn Fn(usize, &[Holding], &mut Give) -> Result<Vec<u8>> + Send + Sync;
