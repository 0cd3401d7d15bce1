//! Tensor parallelism on a grid of ranks: which parts of `tp` cut what.
//!
//! | mode | tp | residual stream | inside of a block | weight of a first product |
//! |---|---|---|---|---|
//! | 1d | t | `[b, s, h]` | `[b, s, f@tp]` | `[h, f@tp]` |
//! | 2d | q² | `[b@y, s, h@x]` | `[b@y, s, f@x]` | `[h@y, f@x]` |
//! | 2.5d | d·q² | `[b@z*y, s, h@x]` | `[b@z*y, s, f@x]` | `[h@y, f@x]` |
//! | 3d | q³ | `[b@x*y, s, h@z]` | `[b@x*z, s, f@y]` | `[h@z*x, f@y]` |
//!
//! x, y and z are the parts of `tp`, x varying fastest: a rank is `x + q (y + q z)` within tp, so x
//! is `tp:(q)q` in 2d. Nothing else knows of modes. A product needs of its weight what the weight
//! holds over the part that also cuts rows, and of its operand what the operand holds over the part
//! that also cuts the weight's columns: so propagation and partition gather both, sum what is made in
//! parts, and differentiation mirrors that (Xu and You, *Optimus*, 2021: 2d; Wang et al.,
//! *Tesseract*, 2021: 2.5d; Bian et al., 2021: 3d, where the two sides of a block swap y and z).

use crate::options::TpMode;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};

/// What cuts the activations on one side of a block.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Side {
    /// Cut the rows of the batch, after what cuts them for data parallelism, in this order.
    pub rows: Vec<Atom>,
    /// Cut the last dim.
    pub columns: AtomSet,
}

/// The parts of `tp`, by what they cut.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grid {
    /// The residual stream.
    pub stream: Side,
    /// What first products make of it: heads, and the inside of an MLP.
    pub inner: Side,
    /// Cut a table that is only looked up along its entries.
    pub entries: Vec<Atom>,
    /// A parameter that ranks of these use alike is stored in pieces and gathered where it is used.
    pub stored: AtomSet,
}

/// Where the parts of `tp` begin: `z` major to `y` major to `x`, as `(before, size)`.
struct Parts {
    x: (usize, usize),
    y: (usize, usize),
    z: (usize, usize),
}

impl Parts {
    fn of(mode: TpMode, tp: usize) -> Result<Parts> {
        let q = mode.side(tp).ok_or_else(|| {
            Diag::new("tp-grid", format!("--tp-mode {mode} has no grid of {tp} ranks"))
                .at(format!("--tp-mode {mode}"))
                .rule(mode.rule())
                .help(format!("use tp={}", mode.nearest(tp, 1, |_| true)[0]))
        })?;
        Ok(match mode {
            TpMode::OneD => Parts { x: (1, tp), y: (1, 1), z: (1, 1) },
            TpMode::TwoD => Parts { x: (q, q), y: (1, q), z: (1, 1) },
            TpMode::TwoAndHalfD { depth } => {
                Parts { x: (depth * q, q), y: (depth, q), z: (1, depth) }
            }
            TpMode::ThreeD => Parts { x: (q * q, q), y: (q, q), z: (1, q) },
        })
    }
}

/// Cuts `tp` into the parts of its grid, and the part that cuts heads where `heads` of some weight
/// are fewer than its ranks.
///
/// # Errors
/// `tp-grid` if tp has no such grid.
pub(super) fn cut(mesh: &mut Mesh, mode: TpMode, heads: impl Iterator<Item = usize>) -> Result<()> {
    let Some(tp) = mesh.axes.iter().position(|a| a.name == "tp") else { return Ok(()) };
    let p = Parts::of(mode, mesh.axes[tp].size)?;
    for (before, _) in [p.y, p.x] {
        mesh.cut(tp, before)?;
    }
    let (before, ways) = if mode == TpMode::ThreeD { p.y } else { p.x };
    for limit in heads {
        if limit < ways && limit > 1 && ways % limit == 0 {
            mesh.cut(tp, before * limit)?;
        }
    }
    Ok(())
}

impl Grid {
    /// The grid of a mesh whose `tp` is cut; nothing if it has none.
    ///
    /// # Errors
    /// `tp-grid` if tp has no such grid.
    pub fn of(mesh: &Mesh, mode: TpMode) -> Result<Grid> {
        let Some(tp) = mesh.axes.iter().position(|a| a.name == "tp") else {
            return Ok(Grid::default());
        };
        let p = Parts::of(mode, mesh.axes[tp].size)?;
        let part = |(before, size): (usize, usize)| -> AtomSet {
            let within = |a: Atom| {
                let i = mesh.atoms[a];
                i.axis as usize == tp && i.pre >= before && i.pre * i.size <= before * size
            };
            mesh.all().iter().filter(|&a| within(a)).collect()
        };
        let [x, y, z] = [p.x, p.y, p.z].map(part);
        let rows = |s: &[AtomSet]| s.iter().flat_map(|s| s.iter()).collect::<Vec<Atom>>();
        let side = |s: &[AtomSet], columns| Side { rows: rows(s), columns };
        Ok(match mode {
            TpMode::OneD => Grid {
                stream: Side::default(),
                inner: side(&[], x),
                entries: rows(&[x]),
                stored: AtomSet::EMPTY,
            },
            TpMode::TwoD | TpMode::TwoAndHalfD { .. } => Grid {
                stream: side(&[z, y], x),
                inner: side(&[z, y], x),
                entries: rows(&[y]),
                stored: x.union(y),
            },
            TpMode::ThreeD => Grid {
                stream: side(&[x, y], z),
                inner: side(&[x, z], y),
                entries: rows(&[x, y]),
                stored: x.union(y).union(z),
            },
        })
    }

    /// True if activations are cut too.
    pub fn cuts_stream(&self) -> bool {
        !self.stream.columns.is_empty()
    }
}
