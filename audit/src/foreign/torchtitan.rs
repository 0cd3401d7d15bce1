//! Configurations of torchtitan.

use super::Kind::{Count, Idle, Only, Switch};
use super::{Config, Format, JobSizes, Ranks, tied};
use crate::rules::Table;
use serde_json::Value as Json;
use shardc_ir::types::DType;
use shardc_passes::options::{CpMode, CpSplit};

/// Its keys; -1 stands for what is left.
pub const TORCHTITAN: Format = Format {
    software: "torchtitan",
    table: Table::torchtitan,
    keys: &[
        ("parallelism.data_parallel_replicate_degree", Count(-1)),
        ("parallelism.data_parallel_shard_degree", Count(-1)),
        ("parallelism.tensor_parallel_degree", Count(-1)),
        ("parallelism.enable_sequence_parallel", Switch),
        ("parallelism.pipeline_parallel_degree", Count(-1)),
        ("parallelism.pipeline_parallel_schedule", Idle),
        ("parallelism.context_parallel_degree", Count(-1)),
        ("parallelism.expert_parallel_degree", Count(-1)),
        ("training.local_batch_size", Count(-1)),
        ("training.global_batch_size", Count(-1)),
        ("training.seq_len", Count(-1)),
        ("training.max_context_length", Count(-1)),
        ("training.num_tokens_per_microbatch_per_dp_rank", Count(-1)),
        ("training.num_tokens_per_train_step", Count(-1)),
        ("parallelism.fsdp_reshard_after_forward", Idle),
        ("parallelism.enable_fsdp_symm_mem", Idle),
        ("parallelism.spmd_backend", Idle),
        ("parallelism.pipeline_parallel_first_stage_less_layers", Idle),
        ("parallelism.pipeline_parallel_last_stage_less_layers", Idle),
        ("parallelism.pipeline_parallel_layers_per_stage", Idle),
        ("parallelism.context_parallel_load_balancer", Only("headtail")),
        ("parallelism.num_pp_microbatches", Count(-1)),
        ("training.max_norm", Idle),
        ("training.steps", Idle),
        ("training.gc_freq", Idle),
        ("training.enable_cpu_offload", Idle),
        ("training.disable_cuda_graphs", Idle),
        ("training.dtype", Only("float32")),
        ("training.mixed_precision_param", Only("bfloat16")),
        ("training.mixed_precision_reduce", Only("float32")),
    ],
    sections: &["parallelism", "training"],
    outside: &[],
    ranks: &[],
    cp: (CpMode::AllGather, Some(CpSplit::Zigzag)),
    read,
};

fn read(c: &Config, world: usize, config: &Json, why: &mut Vec<String>) -> Ranks {
    let of = |key: &str| c.count(&format!("parallelism.{key}")).unwrap_or(1);
    let (pp, cp, tp) = (
        of("pipeline_parallel_degree"),
        of("context_parallel_degree"),
        of("tensor_parallel_degree"),
    );
    let (replicas, ep) = (of("data_parallel_replicate_degree"), of("expert_parallel_degree"));
    let others = [pp, cp, tp, replicas].into_iter().fold(1, usize::saturating_mul);
    let rest = (world / others).max(1);
    let shards = c.count("parallelism.data_parallel_shard_degree").unwrap_or(rest);
    let product = others.saturating_mul(shards);
    if pp > 1 && tied(config) {
        why.push("Decoder: weight tying is not supported with pipeline stages".into());
    }
    if product != world {
        why.push(format!("ParallelDims: dp_replicate * dp_shard * cp * tp * pp ({product}) == world size ({world})"));
    }
    let sharing = [shards, cp, tp].into_iter().fold(1, usize::saturating_mul);
    if sharing % ep != 0 {
        why.push(format!("ParallelDims: dp_shard * cp * tp ({sharing}) is divisible by ep ({ep})"));
    }
    let seq =
        c.count("training.seq_len").or(c.count("training.max_context_length")).unwrap_or(2048);
    let rows = |name: &str| c.count(name).map(|tokens| (tokens / seq).max(1));
    let micro = c.count("training.local_batch_size");
    let micro = micro.or(rows("training.num_tokens_per_microbatch_per_dp_rank")).unwrap_or(8);
    let global =
        c.count("training.global_batch_size").or(rows("training.num_tokens_per_train_step"));
    let rows = micro.saturating_mul(of("num_pp_microbatches"));
    let global = global.unwrap_or(rows.saturating_mul(replicas.saturating_mul(shards)));
    let sp = tp > 1 && c.is("parallelism.enable_sequence_parallel") != Some(false);
    let pieces = if sp { tp } else { 1 }.saturating_mul(if cp > 1 { 2 * cp } else { 1 });
    if seq % pieces != 0 {
        why.push(format!("Trainer: seq_len ({seq}) is divisible by tp * 2 cp ({pieces})"));
    }
    let etp = if ep > 1 { 1 } else { tp };
    let dp = replicas.saturating_mul(shards);
    let sizes = JobSizes { pp, dp, cp, tp, ep, etp, sp, micro, global, seq };
    Ranks { sizes, replicas, zero: 3, dtype: DType::BF16, plan: None, notes: vec![] }
}
