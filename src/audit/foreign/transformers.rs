//! Plans of transformers: which module is split over tp, and how, as its config classes and `DistributedConfig` have it.

use super::Kind::{Count, Idle, Section, Switch, Words};
use super::{Config, Format, Ranks, tied, tokens};
use crate::audit::Job;
use crate::audit::rules::{Class, Table};
use crate::shape;
use serde_json::Value as Json;
use shardc_ir::diag::Result;
use shardc_ir::types::DType;
use shardc_ir::weights::Weight;
use shardc_passes::options::{CpMode, ShardRule};
use std::collections::{BTreeMap, BTreeSet};

/// Sizes of its `DistributedConfig`, plans, and two numbers of its Trainer.
pub const TRANSFORMERS: Format = Format {
    software: "transformers",
    table: Table::transformers,
    keys: &[
        ("tp_size", Count(1)),
        ("fsdp_size", Count(1)),
        ("dp_replicate_size", Count(1)),
        ("pp_size", Count(1)),
        ("ep_size", Count(1)),
        ("tp_plan", Words),
        ("ep_plan", Words),
        ("base_model_tp_plan", Words),
        ("base_model_ep_plan", Words),
        ("ep_implementation", Idle),
        ("config", Section),
        ("transformers_version", Idle),
        ("per_device_train_batch_size", Count(1)),
        ("gradient_accumulation_steps", Count(1)),
        ("bf16", Switch),
    ],
    sections: &[""],
    outside: &["enable_sequence_parallel"],
    ranks: &["tp_size", "fsdp_size", "dp_replicate_size", "pp_size"],
    cp: (CpMode::AllGather, None),
    read,
};

/// Words of its plans, with what `--shard` has for a weight; none: nothing is split.
const STYLES: [(&str, Option<&str>); 20] = [
    ("colwise", Some("colwise")),
    ("colwise_gather_output", Some("colwise")),
    ("colwise_rep", Some("colwise")),
    ("packed_colwise", Some("colwise")),
    ("embedding_colwise", Some("colwise")),
    ("rowwise", Some("rowwise")),
    ("rowwise_split_input", Some("rowwise")),
    ("rowwise_rep", Some("rowwise")),
    ("packed_rowwise", Some("rowwise")),
    // Rows of a table are what it is looked up by.
    ("embedding_rowwise", Some("rowwise")),
    ("replicated_with_grad_allreduce", None),
    ("mla_kv_a_proj", None),
    ("replicate", None),
    ("local_params", None),
    ("moe_tp_experts", None),
    ("grouped_gemm", None),
    ("ep_dispatch_experts", None),
    ("sequence_parallel", None),
    ("all_reduce", None),
    ("moe_identity_expert", None),
];

/// Words of which nothing is made here.
const OUTSIDE: [&str; 3] = ["sequence_parallel", "all_reduce", "moe_identity_expert"];

/// Styles by names of modules and parameters, with `*` for the number of a layer.
pub(super) struct Plan {
    styles: BTreeMap<String, String>,
}

/// The words of a plan; what a config has is of the model without its head.
fn plan(c: &Config, kind: &str) -> BTreeMap<String, String> {
    let of = |key: &str| {
        let all = c.get(key).and_then(Json::as_object).into_iter().flatten();
        let word = |(name, word): (&String, &Json)| Some((name.clone(), word.as_str()?.into()));
        all.filter_map(word).collect::<BTreeMap<String, String>>()
    };
    let whole = of(&format!("{kind}_plan"));
    if !whole.is_empty() {
        return whole;
    }
    let base = of(&format!("base_model_{kind}_plan"));
    let mut out: BTreeMap<String, String> =
        base.into_iter().map(|(name, word)| (format!("model.{name}"), word)).collect();
    // As `init_parallel_plans` completes it, and as nearly all its causal models have it.
    if kind == "tp" && !out.is_empty() {
        out.entry("model.embed_tokens".into()).or_insert("embedding_rowwise".into());
        out.entry("lm_head".into()).or_insert("colwise_gather_output".into());
    }
    out
}

fn read(c: &Config, world: usize, config: &Json, why: &mut Vec<String>) -> Ranks {
    let size = |key: &str| c.count(key).unwrap_or(1);
    let (shards, replicas, pp) = (size("fsdp_size"), size("dp_replicate_size"), size("pp_size"));
    let others = [shards, replicas, pp].into_iter().fold(1, usize::saturating_mul);
    let tp = c.count("tp_size").unwrap_or((world / others).max(1));
    let ep = size("ep_size");
    let (mut styles, experts) = (plan(c, "tp"), plan(c, "ep"));
    let mut refuse = |bad: bool, text: String| why.extend(bad.then_some(text));
    refuse(
        others.saturating_mul(tp) != world,
        format!(
            "DistributedConfig: tp_size * fsdp_size * dp_replicate_size * pp_size ({}) == ranks ({world})",
            others.saturating_mul(tp)
        ),
    );
    refuse(pp > 1, "pp_size: its pipelines are for inference, and have no gradients".into());
    refuse(
        ep > 1 && ep % tp != 0,
        format!("DistributedConfig: ep_size ({ep}) is a multiple of tp_size ({tp})"),
    );
    refuse(
        shards.saturating_mul(tp) % ep != 0,
        format!(
            "DistributedConfig: ep_size ({ep}) divides fsdp_size * tp_size ({})",
            shards.saturating_mul(tp)
        ),
    );
    for (kind, size, plan) in [("tp", tp, &styles), ("ep", ep, &experts)] {
        let none = size > 1 && plan.is_empty();
        refuse(none, format!("_resolve_parallel_plans: {kind}_size={size} needs a {kind}_plan"));
        for word in plan.values().filter(|w| STYLES.iter().all(|s| s.0 != **w)) {
            let word: String = word.chars().take(40).collect();
            refuse(
                true,
                format!("_validate_parallel_plan: unsupported `{kind}_plan` style: {word}"),
            );
        }
    }
    refuse(
        experts.values().any(|w| w == "moe_tp_experts"),
        "_resolve_parallel_plans: moe_tp_experts is a style of tp_plan, and not of ep_plan".into(),
    );
    for text in heads(config, tp, &styles) {
        refuse(true, text);
    }
    let by_width = styles.iter().any(|(name, w)| name.contains("experts") && w == "moe_tp_experts");
    let experts_of = ["num_experts", "num_local_experts", "n_routed_experts"];
    let dense = experts_of.iter().all(|k| config[*k].as_u64().unwrap_or(0) == 0);
    if ep > 1 {
        // Rules for experts take the place of those for the same modules and what is in them.
        let own =
            |name: &str| experts.keys().any(|e| name == e || name.starts_with(&format!("{e}.")));
        styles.retain(|name, _| !own(name));
        styles.extend(experts);
    }
    let micro = size("per_device_train_batch_size");
    let steps = size("gradient_accumulation_steps");
    Ranks {
        pp,
        replicas,
        shards,
        cp: 1,
        tp,
        ep,
        etp: if dense || ep == 1 && by_width { tp } else { 1 },
        sp: false,
        micro,
        global: micro.saturating_mul(steps).saturating_mul(replicas.saturating_mul(shards)),
        seq: tokens(config),
        zero: if shards > 1 { 3 } else { 0 },
        dtype: if c.is("bf16") == Some(true) { DType::BF16 } else { DType::F32 },
        plan: Some(Plan { styles }),
    }
}

/// Heads that are not split evenly: a rank's part of the projection is no whole number of them.
fn heads(config: &Json, tp: usize, styles: &BTreeMap<String, String>) -> Vec<String> {
    let config = if config["text_config"].is_object() { &config["text_config"] } else { config };
    let split = |names: &[&str]| {
        let is = |name: &str| names.iter().any(|n| name.ends_with(&format!("self_attn.{n}")));
        styles.iter().any(|(name, w)| is(name) && w == "colwise")
    };
    let of = |key: &str| config[key].as_u64().map(|n| n as usize);
    let all = of("num_attention_heads");
    let pairs = [
        ("num_attention_heads", all, split(&["q_proj", "qkv_proj"])),
        ("num_key_value_heads", of("num_key_value_heads").or(all), split(&["k_proj", "qkv_proj"])),
    ];
    let bad = pairs.into_iter().filter_map(|(key, n, split)| Some((key, n?, split)));
    bad.filter(|(_, n, split)| *split && n % tp != 0)
        .map(|(key, n, _)| {
            format!("Attention.forward: {key} ({n}) is divisible by tp_size ({tp}), or view(…, -1, head_dim) fails")
        })
        .collect()
}

/// A name with `*` in the place of numbers.
fn generic(name: &str) -> String {
    let word = |w: &str| if w.parse::<u32>().is_ok() { "*".to_string() } else { w.to_string() };
    name.split('.').map(word).collect::<Vec<_>>().join(".")
}

impl Plan {
    /// The style of a parameter: its own, or that of its module.
    fn style(&self, name: &str) -> Option<(&String, &String)> {
        let module = || name.rsplit_once('.').and_then(|(m, _)| self.styles.get_key_value(m));
        self.styles.get_key_value(name).or_else(module)
    }

    /// Splits each parameter as the plan says, and gives it the class of its style.
    ///
    /// # Errors
    /// Those of reading the model.
    pub(super) fn lay(&self, job: &mut Job, place: &str) -> Result<()> {
        let model = shardc_frontends::from_config(&job.config, place, &shape(&job.options))?;
        let mut used: BTreeSet<&str> = BTreeSet::new();
        let mut seen: BTreeSet<String> = BTreeSet::new();
        for w in &model.weights {
            let name = generic(&w.tensor.replace("{}", "0"));
            let found = self.style(&name);
            used.extend(found.map(|f| f.0.as_str()));
            if w.experts.is_some() {
                used.extend(
                    self.styles.keys().filter(|k| k.contains("experts")).map(String::as_str),
                );
                continue;
            }
            if job.options.mesh.iter().any(|a| a.0 == "tp") && seen.insert(name.clone()) {
                let dims = dims(w, found.map_or("", |f| f.1.as_str()));
                job.options.shard.push(ShardRule { glob: name, dims, priority: 0 });
            }
        }
        if tied(&job.config) {
            used.insert("lm_head");
        }
        for (name, style) in &self.styles {
            let what = match (used.contains(name.as_str()), OUTSIDE.contains(&style.as_str())) {
                (false, _) => "names nothing in this model",
                (_, true) => "not modelled",
                _both => continue,
            };
            let text: String = format!("{name}: {style}: {what}").chars().take(90).collect();
            job.not_modelled.push(text);
        }
        let at = job.table.class.iter().position(|c| c.name == "expert").map_or(0, |i| i + 1);
        let mut all: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for (name, style) in &self.styles {
            let own = [name.clone(), format!("{name}.weight"), format!("{name}.bias")];
            all.entry(style).or_default().extend(own);
        }
        let class = |(style, params): (&str, Vec<String>)| Class {
            name: style.into(),
            params,
            called: String::new(),
        };
        let classes: Vec<Class> = all.into_iter().map(class).collect();
        job.table.class.splice(at..at, classes);
        let asked = job.table.asked();
        let facts = self.styles.values().filter(|s| asked.contains(s.as_str()));
        let facts: BTreeSet<String> = facts.cloned().collect();
        job.given.facts.extend(facts);
        Ok(())
    }
}

/// What a style asks of a weight: a word, or of a row of numbers its dim.
fn dims(w: &Weight, style: &str) -> Vec<String> {
    let word = STYLES.iter().find(|s| s.0 == style).and_then(|s| s.1);
    // Of a parameter that is no weight of a product, such as sinks, columns are its elements.
    let row = w.shape.len() == 1 && !w.tensor.ends_with(".bias");
    match word {
        Some("colwise") if row => vec!["tp".into()],
        Some(word) => vec![word.into()],
        None => vec!["replicated".into()],
    }
}
