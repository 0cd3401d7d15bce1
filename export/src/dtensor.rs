//! Placements of every parameter, as DTensors of PyTorch have them.

use super::{Export, File};
use serde_json::{Value as Json, json};
use shardc_ir::diag::Result;
use shardc_ir::func::RoleKind;
use shardc_ir::mesh::{Atom, AtomSet, Mesh, PIPELINE};
use shardc_ir::plan::Plan;
use shardc_ir::types::Type;
use std::collections::BTreeMap;

/// Most ranks of which the pieces are written out.
const SHOWN: usize = 64;

/// A parameter as a rank class holds it between steps.
pub(super) struct Held<'a> {
    pub name: String,
    pub class: usize,
    pub ty: &'a Type,
}

/// The parameters of all classes, in their order in the programs.
pub(super) fn held(plan: &Plan) -> Vec<Held<'_>> {
    let mut out: Vec<Held> = vec![];
    for (class, c) in plan.classes.iter().enumerate() {
        for f in c.funcs.iter().map(|&f| &plan.module.funcs[f]) {
            for a in &f.args {
                let Some(role) = a.role.as_ref().filter(|r| r.kind == RoleKind::Param) else {
                    continue;
                };
                if !out.iter().any(|h| h.class == class && *h.name == *role.name) {
                    out.push(Held { name: role.name.to_string(), class, ty: f.ty(a.value) });
                }
            }
        }
    }
    out
}

/// The atoms over which DTensors of a class are: all but the pipeline's, outer to inner.
fn atoms(mesh: &Mesh) -> Vec<Atom> {
    let pipeline = mesh.axis(PIPELINE).unwrap_or_default();
    mesh.all().iter().filter(|a| !pipeline.meets(AtomSet::one(*a))).collect()
}

/// Offset and length of a rank's piece of a dim, as nested `torch.chunk` cuts it.
fn chunked(mesh: &Mesh, t: &Type, dim: usize, coords: &[usize]) -> (usize, usize) {
    let (mut offset, mut len) = (0, t.dims[dim].size);
    for a in t.dims[dim].atoms.iter() {
        let chunk = len.div_ceil(mesh.size(a)).max(1);
        let first = (coords[a.0 as usize] * chunk).min(len);
        (offset, len) = (offset + first, chunk.min(len - first));
    }
    (offset, len)
}

/// `dtensor.json`.
pub(super) fn files(e: &mut Export) -> Result<Vec<File>> {
    let plan = &e.s.plan;
    let mesh = &plan.module.mesh;
    let over = atoms(mesh);
    let (mut params, mut turned, mut uneven) = (vec![], vec![], vec![]);
    for h in held(plan) {
        let mut placements = vec!["Replicate()".to_string(); over.len()];
        for (d, dim) in h.ty.dims.iter().enumerate() {
            let own: Vec<Atom> = dim.atoms.iter().collect();
            if !own.is_sorted() {
                turned.push(h.name.clone());
            }
            for a in own {
                if let Some(i) = over.iter().position(|o| *o == a) {
                    placements[i] = format!("Shard({d})");
                }
            }
        }
        let ranks: Vec<usize> =
            (0..mesh.ranks()).filter(|r| plan.class_of(*r) == h.class).collect();
        let mut local: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
        for &r in &ranks {
            let at = mesh.coords(r);
            let ours = |d| {
                let x = h.ty.extent(mesh, d, &at);
                (x.offset, x.len)
            };
            let dims = 0..h.ty.rank();
            let same = |d| ours(d).1 == chunked(mesh, h.ty, d, &at).1;
            if !dims.clone().all(same) {
                uneven.push(h.name.clone());
                break;
            }
            if mesh.ranks() <= SHOWN {
                local.insert(r, dims.map(ours).collect());
            }
        }
        params.push(json!({
            "name": h.name,
            "shape": h.ty.sizes().to_vec(),
            "dtype": h.ty.dtype.name(),
            "placements": placements,
            "class": h.class,
            "local": if local.is_empty() { Json::Null } else { json!(local) },
        }));
    }
    let some = |all: &[String]| all.first().cloned().unwrap_or_default();
    let n = turned.len();
    e.lack(
        n > 0,
        format!(
            "shards in an order other than the mesh's: {n} parameters, first {}",
            some(&turned)
        ),
    );
    let n = uneven.len();
    e.lack(
        n > 0,
        format!(
            "shards that differ from those of torch.chunk: {n} parameters, first {}",
            some(&uneven)
        ),
    );
    let names: Vec<String> = over.iter().map(|a| mesh.names(AtomSet::one(*a), "+")).collect();
    let sizes: Vec<usize> = over.iter().map(|a| mesh.size(*a)).collect();
    let classes: Vec<Vec<usize>> = (0..plan.classes.len())
        .map(|c| (0..mesh.ranks()).filter(|r| plan.class_of(*r) == c).collect())
        .collect();
    let out = json!({
        "mesh_dim_names": names, "mesh_shape": sizes, "ranks_of_class": classes, "parameters": params,
    });
    let text = serde_json::to_string_pretty(&out).expect("plain data") + "\n";
    Ok(vec![File::new("dtensor.json", text)])
}
