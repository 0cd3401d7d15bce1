//! Configurations of DeepSpeed.

use super::Kind::{Count, Section, Switch, UpTo};
use super::transformers::{Plan, SUMMED, words_of};
use super::{Config, Format, JobSizes, Ranks, tied, tokens};
use crate::rules::Table;
use serde_json::Value as Json;
use shardc_ir::types::DType;
use shardc_passes::options::CpMode;
use std::collections::BTreeSet;

/// Its keys and sections.
pub const DEEPSPEED: Format = Format {
    software: "DeepSpeed",
    table: Table::deepspeed,
    keys: &[
        ("tensor_parallel", Section),
        ("tensor_parallel.autotp_size", Count(0)),
        ("zero_optimization", Section),
        ("zero_optimization.stage", UpTo(3)),
        ("bf16", Section),
        ("bf16.enabled", Switch),
        ("bfloat16", Section),
        ("bfloat16.enabled", Switch),
        ("fp16", Section),
        ("fp16.enabled", Switch),
        ("sequence_parallel_size", Count(1)),
        ("expert_parallel", Section),
        ("train_batch_size", Count(1)),
        ("train_micro_batch_size_per_gpu", Count(1)),
        ("gradient_accumulation_steps", Count(1)),
    ],
    sections: &["", "zero_optimization", "tensor_parallel", "bf16", "bfloat16", "fp16"],
    outside: &["expert_parallel.autoep_size", "data_parallel_size"],
    ranks: &[],
    cp: (CpMode::Ulysses, None),
    read,
};

/// Words of a plan that DeepSpeed knows (`SUPPORTED_STYLES`); any other one makes it refuse all of it.
const KNOWN: [&str; 6] =
    ["colwise", "colwise_rep", "colwise_gather_output", "rowwise", SUMMED, "embedding_rowwise"];

/// What AutoTP makes of the plan of a model's config; none if the config has none.
fn plan(config: &Json, why: &mut Vec<String>) -> Option<Plan> {
    let mut words = words_of(config, "tp");
    let other: BTreeSet<&str> =
        words.values().map(String::as_str).filter(|w| !KNOWN.contains(w)).collect();
    if !other.is_empty() {
        let all = other.into_iter().collect::<Vec<_>>().join(", ");
        why.push(format!("TPPlanConverter: the model's tp_plan has words that it does not know, and is rejected as a whole: {all}; give tensor_parallel.partition_config"));
    }
    // A table is split with a head that is tied to it, and stays whole else.
    words.retain(|_, word| word != "embedding_rowwise" || tied(config));
    (!words.is_empty()).then(|| Plan::of_layers(words))
}

fn read(c: &Config, world: usize, config: &Json, why: &mut Vec<String>) -> Ranks {
    let tp = c.count("tensor_parallel.autotp_size").unwrap_or(1);
    let cp = c.count("sequence_parallel_size").unwrap_or(1);
    let ways = tp.saturating_mul(cp);
    let dp = (world / ways).max(1);
    let zero = c.count("zero_optimization.stage").unwrap_or(0).min(3) as u8;
    let is = |keys: &[&str]| keys.iter().any(|k| c.is(k) == Some(true));
    let (brain, half) = (is(&["bf16.enabled", "bfloat16.enabled"]), is(&["fp16.enabled"]));
    if brain && half {
        why.push("fp16 and bf16 are not both enabled".into());
    }
    if world % ways != 0 {
        why.push(format!("the number of ranks ({world}) is divisible by autotp_size * sequence_parallel_size ({ways})"));
    }
    let [global, micro, steps] =
        ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
            .map(|k| c.count(k));
    let batch = |m: usize, s: usize| m.saturating_mul(s).saturating_mul(dp);
    if let (Some(g), Some(m), Some(s)) = (global, micro, steps)
        && g != batch(m, s)
    {
        why.push(format!(
            "_batch_assertion: train_batch_size ({g}) == micro batch * accumulation steps * dp ({})",
            batch(m, s)
        ));
    }
    let micro = micro.or(global.map(|g| (g / dp / steps.unwrap_or(1)).max(1))).unwrap_or(1);
    let global = global.unwrap_or(batch(micro, steps.unwrap_or(1)));
    let dtype = match (brain, half) {
        (true, _) => DType::BF16,
        (_, true) => DType::F16,
        _neither => DType::F32,
    };
    let sizes = JobSizes {
        pp: 1,
        dp,
        cp,
        tp,
        ep: 1,
        etp: tp,
        sp: false,
        micro,
        global,
        seq: tokens(config),
    };
    let plan = if tp > 1 { plan(config, why) } else { None };
    let taken = [
        (
            tp > 1 && plan.is_none(),
            "tensor_parallel: AutoTP splits as the model's tp_plan says, which config.json does not have \
             (base_model_tp_plan): it is taken to be by heads and by columns and rows of MLPs, with norms of heads \
             summed. A plan with other words, as those of experts and of latents, DeepSpeed refuses",
        ),
        (
            cp > 1,
            "sequence_parallel_size: its groups are those of an mpu of the program, and taken as made",
        ),
    ];
    let notes = taken.into_iter().filter(|t| t.0).map(|t| t.1.to_string()).collect();
    Ranks { sizes, replicas: 1, zero, dtype, plan, notes }
}
