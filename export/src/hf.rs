//! Arguments of `DistributedConfig` of Hugging Face transformers: sizes, and the style of every module that tp
//! splits, from the plan's own layouts.

use super::dtensor::held;
use super::{Export, File, unknown};
use serde_json::json;
use shardc_frontends::{NormedOver, head_norms};
use shardc_ir::diag::Result;
use shardc_report::inspect::place;
use std::collections::BTreeMap;

/// The release whose models ran with the arguments.
const RELEASE: &str = "5.23";

/// What the names of a layer's experts have in them.
const EXPERTS: &str = ".experts.";

/// Refuses what `DistributedConfig` does with experts otherwise.
fn experts(e: &mut Export, tp: usize, shards: usize) {
    let o = e.o;
    e.lack(o.etp() > 1, "experts of which ranks have parts: it gives each rank whole ones");
    e.lack(o.ep == 1 && tp > 1, "experts that every rank of tp has");
    if o.ep > 1 {
        e.lack(o.ep % tp != 0, "ep that is no multiple of tp");
        e.lack(shards * tp % o.ep != 0, "ep over replicas of sharded weights");
    }
    e.lack(e.s.family == "llama4_text", "experts of Llama 4, which get no routing of tokens");
}

/// `tp_plan.json`.
pub(super) fn files(e: &mut Export) -> Result<Vec<File>> {
    let o = e.o;
    e.notes.push(format!("arguments of DistributedConfig of transformers {RELEASE}"));
    let f = e.s.facts.ok_or_else(unknown)?;
    let [tp, cp, pp, replicas, shards] = e.axes();
    e.is_whole();
    e.lack(cp > 1, "context parallelism");
    e.lack(pp > 1, "training in stages: its pipelines are for inference");
    if f.experts.is_some() {
        experts(e, tp, shards);
    }
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
    let mut rules: BTreeMap<String, &'static str> = BTreeMap::new();
    for h in held(&e.s.plan) {
        if let Some((before, _)) = h.name.split_once(EXPERTS) {
            let at = place(&format!("{before}{}", EXPERTS.trim_end_matches('.')));
            let tensors = ["gate_up_proj", "down_proj"];
            let bias = if h.name.ends_with("bias") { "_bias" } else { "" };
            rules.extend(tensors.map(|t| (format!("{at}.{t}{bias}"), "grouped_gemm")));
            rules.insert(at, "ep_dispatch_experts");
            continue;
        }
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
    if o.ep > 1 {
        out["ep_size"] = o.ep.into();
        out["ep_plan"] = json!(rules);
        // As plans do: tokens go to the ranks of their experts.
        out["ep_implementation"] = "all_to_all".into();
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
