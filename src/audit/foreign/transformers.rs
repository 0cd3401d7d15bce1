//! Plans of transformers: which module is split over tp, and how, as its config classes and `DistributedConfig` have it.

use super::Kind::{Count, Idle, Section, Switch, Words};
use super::{Config, Format, JobSizes, Ranks, held, tied, tokens};
use crate::audit::Job;
use crate::audit::rules::{Class, Table};
use crate::shape;
use serde_json::Value as Json;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::Func;
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

/// What a style does to what its module takes and gives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Does {
    /// All columns in, a part of its own out.
    Columns,
    /// The same, and parts are gathered behind it.
    Gathers,
    /// A part of the columns in, and sums of parts out.
    Rows,
    /// The same, and it takes its part of all columns itself.
    SplitsRows,
    /// All of it, in and out.
    Table,
    /// Sums of what its ranks give.
    Adds,
    /// Tokens go to the ranks that have their experts, and come back.
    Dispatches,
    Nothing,
}

impl Does {
    /// Whether it is of modules that multiply by a matrix, or look up in a table.
    pub(super) fn is_linear(self) -> bool {
        matches!(self, Does::Columns | Does::Gathers | Does::Rows | Does::SplitsRows | Does::Table)
    }
}

/// A word of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    pub(super) word: &'static str,
    /// What `--shard` has for a weight; none: nothing is split.
    pub(super) dim: Option<&'static str>,
    pub(super) does: Does,
    /// Parameters that its module has itself are plain tensors of a rank's part.
    pub(super) local: bool,
}

const fn style(word: &'static str, dim: Option<&'static str>, does: Does) -> Style {
    let local = matches!(does, Does::Adds | Does::Dispatches);
    Style { word, dim, does, local }
}

const STYLES: [Style; 20] = [
    style("colwise", Some("colwise"), Does::Columns),
    style("packed_colwise", Some("colwise"), Does::Columns),
    style("colwise_gather_output", Some("colwise"), Does::Gathers),
    style("colwise_rep", Some("colwise"), Does::Gathers),
    style("rowwise", Some("rowwise"), Does::Rows),
    style("rowwise_split_input", Some("rowwise"), Does::SplitsRows),
    style("rowwise_rep", Some("rowwise"), Does::SplitsRows),
    style("packed_rowwise", Some("rowwise"), Does::Nothing),
    // Rows of a table are what it is looked up by.
    style("embedding_rowwise", Some("rowwise"), Does::Table),
    style("embedding_colwise", Some("colwise"), Does::Table),
    style("replicated_with_grad_allreduce", None, Does::Nothing),
    style("mla_kv_a_proj", None, Does::Nothing),
    style("replicate", None, Does::Nothing),
    Style { local: true, ..style("local_params", None, Does::Nothing) },
    style("moe_tp_experts", None, Does::Adds),
    style("grouped_gemm", None, Does::Nothing),
    style("ep_dispatch_experts", None, Does::Dispatches),
    style("sequence_parallel", None, Does::Nothing),
    style("all_reduce", None, Does::Nothing),
    style("moe_identity_expert", None, Does::Nothing),
];

/// Words with which ranks hold what is not audited.
const OUTSIDE: [&str; 3] = ["sequence_parallel", "all_reduce", "moe_identity_expert"];

/// The style of a word, which was looked up before.
fn style_of(word: &str) -> Option<Style> {
    STYLES.iter().copied().find(|s| s.word == word)
}

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
    let own = of(&format!("{kind}_plan"));
    let base = of(&format!("base_model_{kind}_plan"));
    let mut out: BTreeMap<String, String> =
        base.into_iter().map(|(name, word)| (format!("model.{name}"), word)).collect();
    // As `init_parallel_plans` completes it, and as nearly all its causal models have it.
    if kind == "tp" && !out.is_empty() {
        out.entry("model.embed_tokens".into()).or_insert("embedding_rowwise".into());
        out.entry("lm_head".into()).or_insert("colwise_gather_output".into());
    }
    // `_resolve_parallel_plans`: what is asked for lies over what the model has.
    out.extend(own);
    out
}

/// How a plan that stands alone is taken.
fn alone(c: &Config) -> Vec<String> {
    let has = |key: &str| c.get(key).and_then(Json::as_object).is_some_and(|o| !o.is_empty());
    let alone = has("tp_plan") && !has("base_model_tp_plan");
    let how = "tp_plan is taken for the whole plan, as `model.tp_plan` is; that of a DistributedConfig lies over the \
               model's own, which is read where the file has it (base_model_tp_plan)";
    alone.then(|| how.to_string()).into_iter().collect()
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
        for word in plan.values().filter(|w| style_of(w).is_none()) {
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
    let text = if config["text_config"].is_object() { &config["text_config"] } else { config };
    refuse(
        tp > 1
            && styles.values().any(|w| w == "mla_kv_a_proj")
            && text["qk_rope_head_dim"].is_null(),
        "MlaKvAProjParallel: mla_kv_a_proj needs qk_rope_head_dim in the config".into(),
    );
    let by_width = styles.iter().any(|(name, w)| name.contains("experts") && w == "moe_tp_experts");
    let experts_of = ["num_experts", "num_local_experts", "n_routed_experts"];
    let dense = experts_of.iter().all(|k| config[*k].as_u64().unwrap_or(0) == 0);
    if tp == 1 {
        styles.clear();
    }
    if ep > 1 {
        // Rules for experts take the place of those for the same modules and what is in them.
        let own =
            |name: &str| experts.keys().any(|e| name == e || name.starts_with(&format!("{e}.")));
        styles.retain(|name, _| !own(name));
        styles.extend(experts);
    }
    let micro = size("per_device_train_batch_size");
    let steps = size("gradient_accumulation_steps");
    let dp = replicas.saturating_mul(shards);
    let sizes = JobSizes {
        pp,
        dp,
        cp: 1,
        tp,
        ep,
        etp: if dense || ep == 1 && by_width { tp } else { 1 },
        sp: false,
        micro,
        global: micro.saturating_mul(steps).saturating_mul(dp),
        seq: tokens(config),
    };
    Ranks {
        sizes,
        replicas,
        zero: if shards > 1 { 3 } else { 0 },
        dtype: if c.is("bf16") == Some(true) { DType::BF16 } else { DType::F32 },
        plan: Some(Plan { styles }),
        notes: alone(c),
    }
}

/// A name with `*` in the place of numbers.
pub(super) fn generic(name: &str) -> String {
    let word = |w: &str| if w.parse::<u32>().is_ok() { "*".to_string() } else { w.to_string() };
    name.split('.').map(word).collect::<Vec<_>>().join(".")
}

impl Plan {
    /// The style of a parameter with its rule: its own, or that of its module.
    pub(super) fn of_param(&self, name: &str) -> Option<(&str, Style)> {
        let module = || self.styles.get_key_value(name.rsplit_once('.')?.0);
        let (rule, word) = self.styles.get_key_value(name).or_else(module)?;
        Some((rule, style_of(word)?))
    }

    /// The style of a module. That of experts may have another name there.
    pub(super) fn of_module(&self, name: &str) -> Option<Style> {
        let own = || self.styles.get(name);
        let word = match name.ends_with(".experts") {
            true => own()
                .or_else(|| self.styles.iter().find(|s| s.0.ends_with(".experts")).map(|s| s.1)),
            false => own(),
        };
        style_of(word?)
    }

    /// The style of matrices of experts with its rule: there, one tensor has all columns and another all rows.
    pub(super) fn of_experts(&self, rows: bool) -> Option<(&str, Style)> {
        let is = |name: &str| {
            let of = name.rsplit_once('.').filter(|(module, _)| module.ends_with(".experts"));
            of.is_some_and(|(_, own)| own.starts_with("down") == rows && !own.ends_with("_bias"))
        };
        let (rule, word) = self.styles.iter().find(|s| is(s.0))?;
        Some((rule, style_of(word)?))
    }

    /// Gives the output projection the name that checkpoints have for it.
    fn named_as_here(&mut self, f: &Func) {
        let logits = f
            .results
            .iter()
            .find(|r| r.role.as_ref().is_some_and(|r| r.name.to_string() == "logits"));
        let node = logits.and_then(|r| f.nodes.iter().find(|n| n.outs.contains(&r.value)));
        let head = node.map(|n| f.scope_info(n.scope).path.to_string()).unwrap_or_default();
        if self.styles.keys().all(|k| *k != head)
            && let Some(word) = self.styles.remove("lm_head")
        {
            self.styles.insert(head, word);
        }
    }

    /// Splits each parameter as the plan says, and gives it the class of its style.
    ///
    /// # Errors
    /// Those of reading the model.
    pub(super) fn lay(mut self, job: &mut Job, place: &str) -> Result<()> {
        let model = shardc_frontends::from_config(&job.config, place, &shape(&job.options))?;
        let f = &model.module.funcs[0];
        self.named_as_here(f);
        let mut used: BTreeSet<&str> = BTreeSet::new();
        let mut seen: BTreeSet<String> = BTreeSet::new();
        for w in &model.weights {
            let name = generic(&w.tensor.replace("{}", "0"));
            let found = self.of_param(&name);
            used.extend(found.map(|f| f.0));
            if w.experts.is_some() {
                used.extend(
                    self.styles.keys().filter(|k| k.contains("experts")).map(String::as_str),
                );
                continue;
            }
            if job.options.mesh.iter().any(|a| a.0 == "tp") && seen.insert(name.clone()) {
                let dims = dims(w, found.and_then(|f| f.1.dim));
                job.options.shard.push(ShardRule { glob: name, dims, priority: 0 });
            }
        }
        if tied(&job.config) {
            used.insert("lm_head");
        }
        let scopes = held::modules(f);
        for (name, style) in &self.styles {
            if !used.contains(name.as_str()) && !scopes.contains(name) {
                let text = format!("{name}: {style}: names nothing in this model");
                job.not_modelled.push(text.chars().take(90).collect());
            }
        }
        let ranks = job.layout.tp;
        let fit = held::fit(&self, f, &model.weights, ranks);
        let outside = |s: &(&String, &String)| OUTSIDE.contains(&s.1.as_str());
        let outside =
            self.styles.iter().filter(outside).map(|(n, w)| format!("{n}: {w}: not audited"));
        let why: Vec<String> = fit.why.into_iter().chain(outside).collect();
        if !why.is_empty() {
            let d = Diag::new("audit", "ranks of this plan do not compute what the model means")
                .at(place.to_string())
                .rule(
                    "what a module gives is what the next one takes, but for what styles exchange",
                );
            let help = "correct the plan, or tp_size";
            return Err(why.into_iter().fold(d, Diag::why).help(help));
        }
        job.parts = Some(fit.parts);
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
fn dims(w: &Weight, word: Option<&str>) -> Vec<String> {
    // Of a parameter that is no weight of a product, such as sinks, columns are its elements.
    let row = w.shape.len() == 1 && !w.tensor.ends_with(".bias");
    match word {
        Some("colwise") if row => vec!["tp".into()],
        Some(word) => vec![word.into()],
        None => vec!["replicated".into()],
    }
}
