//! What follows from types: what each rank holds of a parameter, and over which axes its gradient is summed.

use serde_json::Value as Json;
use shardc_frontends::Facts;
use shardc_ir::diag::Result;
use shardc_ir::func::{Func, Module, RoleKind};
use shardc_ir::mesh::{AtomSet, Mesh, PIPELINE};
use shardc_ir::types::Dim;
use shardc_passes::options::Options;
use shardc_passes::pipeline::up_to;
use shardc_passes::shard::experts::{ExpertRole, ranks_of};
use shardc_plans::input::{Input, adapted, from_model, shape};
use std::collections::{BTreeMap, BTreeSet};

/// A parameter on the ranks of a mesh.
#[derive(Clone, PartialEq, Debug)]
pub struct Param {
    /// Its tensor in a checkpoint.
    pub name: String,
    pub sizes: Vec<usize>,
    /// Sizes of what a rank holds.
    pub local: Vec<usize>,
    /// Axes that split it.
    pub sharded: AtomSet,
    /// Axes whose ranks each make a part of its gradient.
    pub sums: AtomSet,
    /// Stages of the pipeline that use it.
    pub stages: Vec<usize>,
    pub trained: bool,
}

/// The parameters of a model, and the mesh that their axes are of.
pub struct Derived {
    pub mesh: Mesh,
    pub params: Vec<Param>,
    pub facts: Option<Facts>,
    pub input: Input,
    experts: [AtomSet; 3],
}

impl Derived {
    /// Reads a config and propagates a layout through its model.
    ///
    /// # Errors
    /// Those of reading it, and of the passes.
    pub fn of(config: &Json, place: &str, o: &Options) -> Result<Derived> {
        let model = shardc_frontends::from_config(config, place, &shape(o))?;
        let input = adapted(from_model(model), o)?;
        let tensors: BTreeMap<String, (String, bool)> = input
            .source
            .weights
            .iter()
            .map(|w| (w.param.clone(), (w.tensor.clone(), w.experts.is_some())))
            .collect();
        let module = up_to("partition", input.source.clone(), o)?;
        let mesh = module.mesh.clone();
        let experts = [ExpertRole::Data, ExpertRole::Expert, ExpertRole::Tensor]
            .map(|role| ranks_of(&mesh, o, role));
        let params = params(&module, &tensors);
        Ok(Derived { mesh, params, facts: input.facts, input, experts })
    }

    /// Says of which parameters ranks of tp have parts of gradients, where the program of these ranks is known. What tp
    /// splits stays as it is, and so do parameters (`but`) whose axes are others.
    pub fn sums_over_tp(&mut self, parts: &BTreeSet<String>, but: impl Fn(&str) -> bool) {
        let tp = self.axis("tp");
        for p in self.params.iter_mut().filter(|p| !p.sharded.meets(tp) && !but(&p.name)) {
            let part = if parts.contains(&p.name) { tp } else { AtomSet::EMPTY };
            p.sums = p.sums.minus(tp).union(part);
        }
    }

    /// The atoms of an axis as rules name it; none of `pp`.
    pub fn axis(&self, name: &str) -> AtomSet {
        let of = |name: &str| self.mesh.axis(name).unwrap_or_default();
        match name {
            "dp" => of("dp_replicate").union(of("dp_shard")),
            "edp" => self.experts[0],
            "ep" => self.experts[1],
            "etp" => self.experts[2],
            // Stages are no part of a value's type: who uses a parameter is in `stages`.
            PIPELINE => AtomSet::EMPTY,
            name => of(name),
        }
    }

    /// The names of some atoms, as people have them.
    pub fn names(&self, atoms: AtomSet) -> String {
        let all = self.mesh.names(atoms, " ");
        let short = |w: &str| w.replace("dp_shard", "dp").replace("dp_replicate", "dp");
        all.split(' ').map(short).collect::<Vec<_>>().join(" ")
    }
}

/// What layouts say of each parameter.
fn params(module: &Module, tensors: &BTreeMap<String, (String, bool)>) -> Vec<Param> {
    let mesh = &module.mesh;
    let stages = stages(&module.funcs[0]);
    let cp = mesh.axis("cp").unwrap_or_default();
    let one = |p: &shardc_ir::func::ParamLayout| {
        let used = p.steps.last().map_or(&p.stored, |s| &s.ty);
        let name = p.param.name.to_string();
        let (tensor, experts) = tensors.get(&name).cloned().unwrap_or((name.clone(), false));
        // Ranks of cp have other tokens, or other experts. Where they exchange heads, a parameter may be split here, in what is
        // stored or in what is used of it, and is so nowhere else.
        let cp = if experts { AtomSet::EMPTY } else { cp };
        let split = |d: &Dim| d.atoms.set().minus(cp);
        Param {
            sizes: p.stored.sizes().to_vec(),
            local: p.stored.dims.iter().map(|d| d.size.div_ceil(mesh.ways(split(d)))).collect(),
            sharded: p.stored.sharded().minus(cp),
            // The cotangent of what is replicated is a sum.
            sums: used.replicated.union(cp),
            stages: stages.get(&name).cloned().unwrap_or_default(),
            trained: p.trainable,
            name: tensor.replace("{}", "*"),
        }
    };
    module.params.iter().map(one).collect()
}

/// By parameter, the stages whose nodes take it.
fn stages(f: &Func) -> BTreeMap<String, Vec<usize>> {
    let mut out = BTreeMap::new();
    let roles = f.args.iter().filter_map(|a| Some((a.value, a.role.as_ref()?)));
    for (value, role) in
        roles.filter(|(_, r)| matches!(r.kind, RoleKind::Unsharded | RoleKind::Param))
    {
        let users = f.nodes.iter().filter(|n| n.ins.contains(&value));
        let mut own: Vec<usize> = users.map(|n| f.stage_of(n)).collect();
        own.sort_unstable();
        own.dedup();
        out.insert(role.name.to_string(), own);
    }
    out
}
