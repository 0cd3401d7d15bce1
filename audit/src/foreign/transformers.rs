//! Plans of transformers: which module is split over tp, and how, as its config classes and `DistributedConfig` have it.

use super::Kind::{Count, Idle, Section, Switch, Words};
use super::modules::{Modules, in_their_words, renamed};
use super::{Config, Format, JobSizes, Ranks, held, tied, tokens};
use crate::Job;
use crate::rules::{Class, Table};
use serde_json::Value as Json;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::types::DType;
use shardc_ir::weights::Weight;
use shardc_passes::options::{CpMode, ShardRule};
use shardc_plans::input::shape;
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

impl Style {
    /// Whether it makes a DTensor of what its module is given.
    pub(super) fn makes_dtensors(self) -> bool {
        self.does.is_linear() && self.word != "packed_colwise"
    }
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

/// The word with which a hook sums gradients.
pub(super) const SUMMED: &str = "replicated_with_grad_allreduce";

/// The style of a word, which was looked up before.
pub(super) fn style_of(word: &str) -> Option<Style> {
    STYLES.iter().copied().find(|s| s.word == word)
}

/// Styles by names of modules and parameters, with `*` for the number of a layer.
pub(super) struct Plan {
    styles: BTreeMap<String, String>,
    /// Names that a DistributedConfig has and the model's own plan has not: each is one of the model's.
    asked: BTreeSet<String>,
    /// Words make DTensors, as those of transformers do.
    dtensors: bool,
}

impl Plan {
    /// A plan of a program that has neither DTensors nor a DistributedConfig.
    pub(super) fn of_layers(styles: BTreeMap<String, String>) -> Plan {
        Plan { styles, asked: BTreeSet::new(), dtensors: false }
    }

    /// Whether words make DTensors.
    pub(super) fn has_dtensors(&self) -> bool {
        self.dtensors
    }
}

/// The words of a plan; what a config has is of the model without its head.
fn plan(c: &Config, kind: &str) -> BTreeMap<String, String> {
    words_of(&c.json, kind)
}

/// The same of a JSON that has plans.
pub(super) fn words_of(json: &Json, kind: &str) -> BTreeMap<String, String> {
    let of = |key: &str| {
        let all = json.get(key).and_then(Json::as_object).into_iter().flatten();
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

/// Names of a DistributedConfig that are not in the model's own plan. What is printed with the model's config is its own.
fn asked(c: &Config, kind: &str) -> BTreeSet<String> {
    let of = |key: &str| c.get(key).and_then(Json::as_object).into_iter().flatten();
    let base: BTreeSet<String> =
        of(&format!("base_model_{kind}_plan")).map(|(name, _)| format!("model.{name}")).collect();
    let own = of(&format!("{kind}_plan")).map(|(name, _)| name.clone());
    own.filter(|name| c.get("config").is_none() && !base.contains(name)).collect()
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
    let asked = &asked(c, "tp") | &asked(c, "ep");
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
        plan: Some(Plan { styles, asked, dtensors: true }),
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
            of.is_some_and(|(_, own)| own == if rows { "down_proj" } else { "gate_up_proj" })
        };
        let (rule, word) = self.styles.iter().find(|s| is(s.0))?;
        Some((rule, style_of(word)?))
    }

    /// The style that a rule gives to exactly this.
    pub(super) fn own_style(&self, name: &str) -> Option<Style> {
        style_of(self.styles.get(name)?)
    }

    /// Rules and their words.
    pub(super) fn words(&self) -> impl Iterator<Item = (&String, &String)> {
        self.styles.iter()
    }

    /// Gives modules the names that checkpoints have for them.
    fn named_as_here(&mut self, modules: &Modules, model: &str) {
        let ours = |name: &String| {
            let head = || Some(name.replacen("lm_head", modules.head()?, 1));
            let other =
                renamed(model, name).or_else(|| head().filter(|_| name.starts_with("lm_head")));
            other.filter(|n| !modules.has(name) && modules.has(n)).unwrap_or(name.clone())
        };
        self.styles = self.styles.iter().map(|(name, word)| (ours(name), word.clone())).collect();
        self.asked = self.asked.iter().map(ours).collect();
    }

    /// Splits each parameter as the plan says, and gives it the class of its style.
    ///
    /// # Errors
    /// Those of reading the model.
    pub(super) fn lay(mut self, job: &mut Job, place: &str) -> Result<()> {
        let model = shardc_frontends::from_config(&job.config, place, &shape(&job.options))?;
        let f = &model.module.funcs[0];
        let kind = job.config["model_type"].as_str().unwrap_or("").to_string();
        let modules = Modules::of(f, &model.weights, &kind, tied(&job.config));
        self.named_as_here(&modules, &kind);
        let mut seen: BTreeSet<String> = BTreeSet::new();
        for w in model.weights.iter().filter(|w| w.experts.is_none()) {
            let name = generic(&w.tensor.replace("{}", "0"));
            let found = self.of_param(&name);
            if job.options.mesh.iter().any(|a| a.0 == "tp") && seen.insert(name.clone()) {
                let dims = dims(w, found.and_then(|f| f.1.dim));
                job.options.shard.push(ShardRule { glob: name, dims, priority: 0 });
            }
        }
        let mut why = vec![];
        let ranks = job.layout.tp;
        for (name, style) in self.styles.iter().filter(|s| !modules.has(s.0)) {
            let text = format!("{name}: {style}: names nothing in this model");
            match self.asked.contains(name) {
                true => why.push(format!("{text} (_resolve_parallel_plans refuses it)")),
                false => job.not_modelled.push(text.chars().take(90).collect()),
            }
        }
        let config = &job.config;
        let text = if config["text_config"].is_object() { &config["text_config"] } else { config };
        let latents =
            |(name, word): &(&String, &String)| *word == "mla_kv_a_proj" && modules.is_called(name);
        if text["qk_rope_head_dim"].is_null() && self.styles.iter().any(|s| latents(&s)) {
            why.push(
                "MlaKvAProjParallel: mla_kv_a_proj needs qk_rope_head_dim in the config".into(),
            );
        }
        let fit = held::fit(&self, f, (&model.weights, &modules), ranks);
        let outside = |s: &(&String, &String)| OUTSIDE.contains(&s.1.as_str());
        let outside =
            self.styles.iter().filter(outside).map(|(n, w)| format!("{n}: {w}: not audited"));
        why.extend(fit.why.into_iter().chain(outside));
        if !why.is_empty() {
            let d = Diag::new("audit", "ranks of this plan do not compute what the model means")
                .at(place.to_string())
                .rule(
                    "what a module gives is what the next one takes, but for what styles exchange",
                );
            let help = "correct the plan, or tp_size";
            let why = why.iter().map(|w| in_their_words(&kind, w));
            return Err(why.fold(d, Diag::why).help(help));
        }
        job.parts = Some(fit.parts);
        let at = job.table.class.iter().position(|c| c.name == "expert").unwrap_or(0);
        job.table.class.splice(at..at, self.classes(&modules, &seen));
        let asked = job.table.asked();
        let facts = self.styles.values().map(String::as_str).chain(["plan"]);
        let facts: BTreeSet<String> =
            facts.filter(|s| asked.contains(s)).map(String::from).collect();
        job.given.facts.extend(facts);
        Ok(())
    }
}

impl Plan {
    /// Parameters by the style that they have; those that a hook sums first.
    fn classes(&self, modules: &Modules, params: &BTreeSet<String>) -> Vec<Class> {
        let summed: Vec<String> = modules.summed(self).collect();
        let mut all: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for name in params.iter().filter(|name| !summed.contains(name)) {
            let word = self.of_param(name).map(|(_, style)| style.word);
            if let Some(word) = word.filter(|w| *w != SUMMED) {
                all.entry(word).or_default().push(name.clone());
            }
        }
        let class = |(style, params): (&str, Vec<String>)| Class {
            name: style.into(),
            params,
            called: String::new(),
        };
        std::iter::once((SUMMED, summed)).chain(all).map(class).collect()
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
