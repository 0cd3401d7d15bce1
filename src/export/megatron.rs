//! Flags of Megatron-LM.

use super::asked::{adam, cosine, rate};
use super::{Export, File};
use crate::plan_dir::Stored;
use crate::report::bytes;
use shardc_frontends::{Facts, gating};
use shardc_ir::diag::Result;
use shardc_ir::loss_scale::LossScaling;
use shardc_ir::plan::{MemoryClass, TokenOrder};
use shardc_ir::types::DType;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, Decay, Optimizer};

/// Flags, one a line.
#[derive(Default)]
struct Flags(String);

impl Flags {
    fn put(&mut self, flag: &str, value: impl std::fmt::Display) {
        self.0 += &format!("--{flag} {value}\n");
    }

    fn on(&mut self, flag: &str, asked: bool) {
        if asked {
            self.0 += &format!("--{flag}\n");
        }
    }

    fn many(&mut self, flag: &str, n: usize) {
        if n > 1 {
            self.put(flag, n);
        }
    }
}

/// `megatron.args`: notes as comments, then flags.
pub(super) fn files(e: &mut Export) -> Result<Vec<File>> {
    e.trains();
    let f = e.facts()?;
    let mut out = Flags::default();
    let o = e.o;
    let decays = e.asks("decay", |o| o.decay) || e.asks("weight-decay", |o| o.weight_decay);
    if decays && o.decay == Decay::All && o.weight_decay != 0.0 {
        e.lack(true, "weight decay of biases and norms: it exempts them");
        e.helps.push("compile with --decay matrices, or --weight-decay 0");
    }
    out.0 += "# data, tokenizer, checkpoints and --train-iters are yours\n";
    model(e, &f, &mut out)?;
    layout(e, &f, &mut out);
    stages(e, &mut out);
    optimizer(e, &mut out);
    out.0.extend(e.notes.drain(..).map(|note| format!("# {note}\n")));
    Ok(vec![File::new("megatron.args", out.0)])
}

fn model(e: &mut Export, f: &Facts, out: &mut Flags) -> Result<()> {
    let family = e.s.family.as_str();
    let known = ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"];
    e.lack(
        !known.contains(&family),
        format!("flags of the family {family}, which this export does not support yet"),
    );
    let (theta, scaled) = e.rope();
    let scaling = scaling(e, scaled.as_deref());
    e.lack(theta.fract() != 0.0, "a rotary base that is not an integer");
    let tanh =
        |key: &str| e.s.config.get(key).and_then(|v| v.as_str()).is_some_and(|a| a != "silu");
    e.lack(
        tanh("hidden_act"),
        "an activation other than SiLU, which this export does not support yet",
    );
    e.lack(e.has_biases(), "biases of individual linears (attention_bias, mlp_bias)");
    out.put("num-layers", f.layers);
    out.put("hidden-size", f.hidden);
    out.put("ffn-hidden-size", f.ffn);
    out.put("num-attention-heads", f.heads);
    out.put("kv-channels", f.head_dim);
    if f.kv_heads != f.heads {
        out.on("group-query-attention", true);
        out.put("num-query-groups", f.kv_heads);
    }
    out.put("max-position-embeddings", f.max_positions.max(e.o.seq));
    out.put("vocab-size", f.vocab);
    out.put("make-vocab-size-divisible-by", 1);
    out.on("swiglu", true);
    out.put("normalization", "RMSNorm");
    out.put("norm-epsilon", e.number("rms_norm_eps").unwrap_or(1e-6));
    out.put("position-embedding-type", "rope");
    out.put("rotary-base", theta as u64);
    if let Some(factor) = scaling {
        out.on("use-rope-scaling", true);
        out.put("rope-scaling-factor", factor);
    }
    out.on("disable-bias-linear", true);
    out.on("add-qkv-bias", family == "qwen2");
    out.on("qk-layernorm", family.starts_with("qwen3"));
    out.on("untie-embeddings-and-output-weights", !f.tied);
    out.put("attention-dropout", 0.0);
    out.put("hidden-dropout", 0.0);
    if let Some(x) = f.experts {
        let every = e.number("decoder_sparse_step").unwrap_or(1.0) == 1.0;
        let dense = e.s.config.get("mlp_only_layers").and_then(|v| v.as_array());
        e.lack(
            !every || dense.is_some_and(|d| !d.is_empty()),
            "dense layers between layers with experts",
        );
        e.lack(x.shared > 0, "an MLP beside the experts, which this export does not support yet");
        out.put("num-experts", x.experts);
        out.put("moe-router-topk", x.top_k);
        out.put("moe-ffn-hidden-size", x.ffn);
        out.put("moe-token-dispatcher-type", "alltoall");
        out.on("moe-grouped-gemm", true);
        let g = gating(&e.s.config, "config.json", &crate::shape(e.o))?;
        out.on("moe-router-pre-softmax", !g.normed);
        let aux = balancing(e, g.aux);
        out.put("moe-router-load-balancing-type", if aux.is_some() { "aux_loss" } else { "none" });
        out.put("moe-aux-loss-coeff", aux.unwrap_or(0.0));
        if let Some(z) = g.z {
            out.put("moe-z-loss-coeff", z);
        }
    }
    Ok(())
}

/// The coefficient of the loss that balances experts: if nobody chose one, that of the model, which is a fact of it
/// whether its config asks transformers for the loss (`output_router_logits`) or not.
fn balancing(e: &mut Export, plan: Option<f64>) -> Option<f64> {
    if e.asks("moe-aux", |o| o.balance.aux) {
        return plan;
    }
    let mut config = e.s.config.clone();
    config["output_router_logits"] = true.into();
    // Where the family refuses to be asked for it, there is none but the plan's.
    let own = gating(&config, "config.json", &crate::shape(e.o)).map_or(plan, |g| g.aux);
    if plan != own {
        let loss = |x: Option<f64>| {
            x.map_or("no balancing loss".into(), |x| format!("a balancing loss times {x}"))
        };
        e.notes.push(format!(
            "plan: {}, for config.json does not ask for it (output_router_logits); written: the model's own, {}",
            loss(plan),
            loss(own)
        ));
    }
    own
}

/// What it calls low_freq_factor, high_freq_factor and original_max_position_embeddings of Llama 3.1's scaling: it has
/// a flag for the factor alone (`RotaryEmbedding._apply_scaling` of Megatron-LM).
const SCALING: [(&str, f64); 3] = [
    ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 8192.0),
];

/// The factor of scaled rotary embeddings, if they are and it can have them.
fn scaling(e: &mut Export, kind: Option<&str>) -> Option<f64> {
    let kind = kind?;
    if kind != "llama3" {
        e.lack(true, format!("rotary scaling of type {kind}: it has that of llama3"));
        return None;
    }
    let own = e.rope_scaling()?;
    let of = |key: &str| own.get(key).and_then(|v| v.as_f64());
    let absent =
        e.number("original_max_position_embeddings").or(e.number("max_position_embeddings"));
    for (key, theirs) in SCALING {
        let value = of(key).or(absent.filter(|_| key == SCALING[2].0));
        e.lack(
            value != Some(theirs),
            format!("scaled rotary embeddings with a {key} other than {theirs}"),
        );
    }
    of("factor")
}

fn layout(e: &mut Export, f: &Facts, out: &mut Flags) {
    let o = e.o;
    let [tp, cp, replicas, shards] = ["tp", "cp", "dp_replicate", "dp_shard"].map(|a| e.n(a));
    out.put("tensor-model-parallel-size", tp);
    out.put("pipeline-model-parallel-size", e.n("pp"));
    out.put("context-parallel-size", cp);
    out.on("sequence-parallel", o.sp);
    e.lack(f.experts.is_some() && tp > 1 && !o.sp, "experts with tp and without --sp");
    e.lack(
        f.kv_heads % tp != 0 && tp % f.kv_heads != 0,
        "this number of heads over this number of tp ranks",
    );
    if cp > 1 {
        let zigzag = matches!(o.tokens(), TokenOrder::Zigzag { .. });
        e.lack(!zigzag, "contiguous tokens on a rank of cp: it supports only --cp-split zigzag");
        out.put(
            "cp-comm-type",
            match o.cp_mode {
                CpMode::Ring => "p2p",
                // As Transformer Engine spells it: the help of Megatron-LM says `allgather`, which is refused there.
                CpMode::AllGather => "all_gather",
                CpMode::Ulysses => "a2a",
            },
        );
    }
    if f.experts.is_some() {
        out.put("expert-model-parallel-size", o.ep);
        out.put("expert-tensor-parallel-size", o.etp());
    }
    // Both shard over the ranks of cp, too.
    let sharded = o.zero > 0 && shards * cp > 1;
    e.lack(!sharded && shards > 1 && replicas > 1, "two axes of data parallelism without ZeRO");
    if sharded {
        out.on("use-distributed-optimizer", true);
        if replicas > 1 {
            e.lack(
                o.zero > 1,
                "replicated shards (HSDP) with ZeRO-2 and 3, which this export does not support yet",
            );
            out.put("num-distributed-optimizer-instances", replicas);
        }
        if o.zero > 1 {
            out.on("use-megatron-fsdp", true);
            let what = if o.zero == 2 { "optim_grads" } else { "optim_grads_params" };
            out.put("data-parallel-sharding-strategy", what);
            out.put("ckpt-format", "fsdp_dtensor");
            e.lack(
                o.zero == 3 && !o.reshard_after_forward,
                "weights that stay gathered (--zero 3 without resharding)",
            );
        }
    }
    out.put("micro-batch-size", o.microbatch);
    out.put("global-batch-size", o.global_batch);
    out.put("seq-length", o.seq);
    if o.dtype == DType::BF16 {
        out.on("bf16", true);
        let wide = o.grad_dtype == DType::F32;
        out.on("accumulate-allreduce-grads-in-fp32", wide);
        out.on("grad-reduce-in-bf16", !wide);
    }
    if o.dtype == DType::F16 {
        out.on("fp16", true);
        out.on("accumulate-allreduce-grads-in-fp32", o.grad_dtype == DType::F32);
        scale(e, out);
    }
    if o.recompute == Recompute::Full {
        out.put("recompute-granularity", "full");
        out.put("recompute-method", "uniform");
        out.put("recompute-num-layers", 1);
    }
    // It takes no 0, and 32 bits; and of any seed it makes other numbers.
    if e.asks("seed", |o| o.seed) && (1..1 << 32).contains(&o.seed) {
        out.put("seed", o.seed);
    } else {
        e.leaves(format!("seed {}", o.seed), "--seed 1234");
    }
}

/// How the loss is scaled for f16.
fn scale(e: &mut Export, out: &mut Flags) {
    // As f32 2^32 would be written as 4294967300.
    match e.o.loss_scaling {
        LossScaling::Constant { scale } => out.put("loss-scale", f64::from(scale)),
        LossScaling::Dynamic { initial, min, window, hysteresis } => {
            let (initial, min) = (f64::from(initial), f64::from(min));
            let all = [
                ("initial-loss-scale", "4294967296", initial.to_string()),
                ("min-loss-scale", "1", min.to_string()),
                ("loss-scale-window", "1000", window.to_string()),
                ("hysteresis", "2", hysteresis.to_string()),
            ];
            for (flag, theirs, value) in all {
                // Both have the same defaults.
                if e.asks(flag, |_| ()) || value != theirs {
                    out.put(flag, value);
                } else {
                    e.leaves(format!("--{flag} {value}"), format!("--{flag} {theirs}"));
                }
            }
        }
    }
}

/// What its optimizer copies of gradients that are not f32, and plans do not: `main_param.grad = main_grad.float()` of
/// `Float16OptimizerWithFloat16Params`, and the same of a shard in `DistributedOptimizer`.
pub(super) fn copied(s: &Stored) -> Option<String> {
    let o = &s.options;
    if o.dtype == DType::F32 || o.grad_dtype != o.dtype {
        return None;
    }
    // The state of each parameter that a rank updates has an f32 copy of it, and with AdamW two moments as large.
    let whole = s.plan.classes.iter().map(|c| &c.memory.whole);
    let state = whole.flatten().filter(|w| w.0 == MemoryClass::Optimizer).map(|w| w.1).max()?;
    let parts = match o.optimizer {
        Optimizer::AdamW { .. } => 3,
        Optimizer::Sgd => 1,
    };
    Some(format!(
        "Megatron-LM copies gradients to f32 for the step of its optimizer: 4 B for each parameter that a rank updates, {} that \
         are not part of the plan's memory (with --grad-dtype f32 there is no such copy)",
        bytes(state / parts)
    ))
}

fn stages(e: &mut Export, out: &mut Flags) {
    let Some(name) = e.schedule().map(String::from) else { return };
    let is_known = ["1f1b", "interleaved"].contains(&name.as_str());
    e.lack(!is_known, format!("the schedule {name}: it has 1f1b and interleaved"));
    let stages = e.stages();
    let pp = e.n("pp");
    let chunks = stages.len() / pp.max(1);
    let counts: Vec<usize> = stages.iter().map(|s| s.1).collect();
    if counts.windows(2).all(|w| w[0] == w[1]) {
        out.many("num-virtual-stages-per-pipeline-rank", chunks);
        return;
    }
    // With a layout the number of stages per rank follows from it.
    let last = counts.len() - 1;
    let stage = |(i, n): (usize, &usize)| {
        let (first, end) = (if i == 0 { "E" } else { "" }, if i == last { "L" } else { "" });
        format!("{first}{}{end}", "t".repeat(*n))
    };
    let all: Vec<String> = counts.iter().enumerate().map(stage).collect();
    out.put("pipeline-model-parallel-layout", all.join("|"));
}

fn optimizer(e: &mut Export, out: &mut Flags) {
    let o = e.o;
    if e.asks("optimizer", |o| adam(o).is_some()) {
        out.put("optimizer", if adam(o).is_some() { "adam" } else { "sgd" });
    } else {
        e.leaves("AdamW", "--optimizer adam, which is AdamW");
    }
    match adam(o) {
        None => out.put("sgd-momentum", 0.0),
        Some((beta1, beta2, eps)) => {
            if e.asks("betas", |o| adam(o).map(|a| (a.0, a.1))) {
                out.put("adam-beta1", beta1);
                out.put("adam-beta2", beta2);
            } else {
                e.leaves(format!("betas {beta1}, {beta2}"), "--adam-beta1 0.9 --adam-beta2 0.999");
            }
            if e.asks("eps", |o| adam(o).map(|a| a.2)) {
                out.put("adam-eps", eps);
            } else {
                e.leaves(format!("epsilon {eps:e}"), "--adam-eps 1e-8");
            }
        }
    }
    if e.asks("weight-decay", |o| o.weight_decay) {
        out.put("weight-decay", o.weight_decay);
    } else {
        let of = if o.decay == Decay::All { "all parameters" } else { "matrices" };
        let plan = format!("weight decay {} of {of}", o.weight_decay);
        e.leaves(plan, "--weight-decay 0.01, of matrices");
    }
    if e.asks("clip", |o| o.clip) {
        out.put("clip-grad", o.clip.unwrap_or(0.0));
    } else {
        e.leaves("no clipping", "--clip-grad 1.0");
    }
    if e.asks("lr", rate) {
        out.put("lr", rate(o));
    } else {
        e.leaves(format!("learning rate {}", rate(o)), "none: --lr is yours to give");
    }
    schedule(e, out);
}

/// How the learning rate changes from step to step.
fn schedule(e: &mut Export, out: &mut Flags) {
    let chosen = e.asks("lr-schedule", |o| cosine(o).is_some());
    match cosine(e.o) {
        None if chosen => out.put("lr-decay-style", "constant"),
        None => e.leaves("a constant learning rate", "--lr-decay-style linear"),
        Some((warmup, total, floor)) => {
            out.put("lr-decay-style", "cosine");
            if e.asks("min-lr", |_| ()) || floor != 0.0 {
                out.put("min-lr", floor);
            } else {
                e.leaves(format!("the last learning rate is {floor}"), "--min-lr 0");
            }
            if e.asks("warmup", |_| ()) || warmup != 0 {
                out.put("lr-warmup-iters", warmup);
            } else {
                e.leaves("no warmup", "--lr-warmup-iters 0");
            }
            if e.asks("total-steps", |_| ()) || total != TOTAL {
                out.put("lr-decay-iters", total);
            } else {
                e.leaves(
                    format!("the cosine ends at step {total}"),
                    "--lr-decay-iters as --train-iters",
                );
            }
        }
    }
}

/// Where a cosine ends if nobody says.
const TOTAL: usize = 1000;
