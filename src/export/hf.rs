//! Arguments of `DistributedConfig` of Hugging Face transformers: sizes, and the style of every module that tp
//! splits, from the plan's own layouts.

use super::dtensor::held;
use super::{Export, File, unknown};
use crate::compare::place;
use serde_json::json;
use shardc_frontends::{NormedOver, head_norms};
use shardc_ir::diag::Result;
use std::collections::BTreeMap;

/// `tp_plan.json`.
pub(super) fn files(e: &mut Export) -> Result<Vec<File>> {
    let o = e.o;
    let f = e.s.facts.ok_or_else(unknown)?;
    let [tp, cp, pp, replicas, shards] = e.axes();
    e.is_whole();
    e.lack(cp > 1, "context parallelism");
    e.lack(pp > 1, "training in stages: its pipelines are for inference");
    e.lack(f.experts.is_some(), "experts, which this export does not support yet");
    let heads = head_norms(&e.s.family);
    let joint = heads.is_some_and(|n| n.over == NormedOver::All) && tp > 1;
    e.lack(
        joint,
        "a norm over all heads of queries and keys: each of its ranks would norm its own",
    );
    e.lack(o.zero == 0 && shards > 1, "data parallelism over dp_shard without sharded weights");
    let mesh = &e.s.plan.module.mesh;
    let own = mesh.axis("tp").unwrap_or_default();
    let mut styles: BTreeMap<String, &'static str> = BTreeMap::new();
    let (mut odd, mut fused): (Vec<String>, Vec<String>) = Default::default();
    for h in held(&e.s.plan) {
        let Some(module) = h.name.strip_suffix(".weight") else {
            // Of a bias its module says all.
            fused.extend((h.ty.rank() > 1).then(|| h.name.clone()));
            continue;
        };
        let over: Vec<usize> =
            (0..h.ty.rank()).filter(|&d| h.ty.dims[d].atoms.set().meets(own)).collect();
        let split = over.first().map(|&d| h.ty.dims[d].atoms.set());
        let part = split.is_some_and(|s| !own.within(s)) || over.len() > 1;
        let last = module.rsplit('.').next().unwrap_or("");
        let style = match (over.first(), last) {
            _ if part => {
                odd.push(h.name.clone());
                continue;
            }
            (Some(0), "embed_tokens") => "embedding_rowwise",
            (Some(1), "embed_tokens") => "embedding_colwise",
            // Its loss wants whole logits.
            (Some(0), "lm_head") => "colwise_gather_output",
            (Some(0), _) if h.ty.rank() == 2 => "colwise",
            (Some(1), _) if h.ty.rank() == 2 => "rowwise",
            (Some(_), _) => {
                odd.push(h.name.clone());
                continue;
            }
            // Of heads, of which every rank has others.
            (None, _) if heads.is_some_and(|n| n.modules.contains(&last)) => {
                "replicated_with_grad_allreduce"
            }
            (None, _) if h.ty.rank() == 2 => "replicate",
            (None, _) => continue,
        };
        let module = place(module);
        if styles.insert(module.clone(), style).is_some_and(|before| before != style) {
            odd.push(module);
        }
    }
    let (n, first) = (odd.len(), odd.first().cloned().unwrap_or_default());
    e.lack(
        n > 0,
        format!("sharding over part of tp, or other layouts: {n} parameters, first {first}"),
    );
    e.lack(
        tp > 1 && !fused.is_empty(),
        format!(
            "tensors that hold several weights, of which a rank has a piece of each, such as {}",
            fused.first().map_or("", |name| name)
        ),
    );
    let mut out = json!({ "tp_size": tp });
    if tp > 1 {
        out["tp_plan"] = json!(styles);
    }
    if o.zero == 3 {
        out["fsdp_size"] = shards.into();
    }
    if replicas > 1 {
        out["dp_replicate_size"] = replicas.into();
    }
    let text = serde_json::to_string_pretty(&out).expect("plain data") + "\n";
    Ok(vec![File::new("tp_plan.json", text)])
}
