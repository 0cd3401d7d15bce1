//! Flags of Megatron-LM.

pub mod arguments;
mod model;

use super::asked::adam;
use super::{Export, File};
use shardc_frontends::Facts;
use shardc_ir::diag::{Result, bytes};
use shardc_ir::loss_scale::LossScaling;
use shardc_ir::plan::{Fall, MemoryClass, TokenOrder};
use shardc_ir::types::DType;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, Decay, Optimizer};
use shardc_plans::stored::Stored;

/// The commit whose argument parser tests read the flags with.
const COMMIT: &str = "d98e8a64";

/// What it has no words for.
const BY_OP: &str = "recomputation by op or by runs of layers (--recompute)";

/// Flags, one a line.
#[derive(Default)]
struct Flags(String);

impl Flags {
    fn put(&mut self, flag: &str, value: impl std::fmt::Display) {
        debug_assert!(arguments::find(&format!("--{flag}")).is_some(), "no flag {flag}");
        self.0 += &format!("--{flag} {value}\n");
    }

    fn on(&mut self, flag: &str, asked: bool) {
        debug_assert!(arguments::find(&format!("--{flag}")).is_some(), "no flag {flag}");
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
    out.0 += &format!("# flags of Megatron-LM at commit {COMMIT}\n");
    out.0 += "# data, tokenizer, checkpoints and --train-iters are yours\n";
    model::model(e, &f, &mut out)?;
    layout(e, &f, &mut out);
    stages(e, &mut out);
    optimizer(e, &mut out);
    out.0.extend(e.notes.drain(..).map(|note| format!("# {note}\n")));
    Ok(vec![File::new("megatron.args", out.0)])
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
            out.put("num-distributed-optimizer-instances", replicas);
        }
        if o.zero > 1 {
            out.on("use-megatron-fsdp", true);
            let what = if o.zero == 2 { "optim_grads" } else { "optim_grads_params" };
            out.put("data-parallel-sharding-strategy", what);
            if replicas > 1 {
                out.put("outer-dp-sharding-strategy", "no_shard");
            }
            out.put("ckpt-format", "fsdp_dtensor");
            // No rank has room for all weights when the model is made.
            out.on("init-model-with-meta-device", true);
            e.lack(
                o.zero == 3 && !o.reshard_after_forward,
                "weights that stay gathered (--zero 3 without resharding)",
            );
        }
    }
    // As prices of plans have it: sums and gathers go on behind work.
    out.on("overlap-grad-reduce", shards * replicas * cp > 1);
    out.on("overlap-param-gather", sharded);
    environment(e, sharded && o.zero > 1, tp * cp > 1);
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
    recomputed(e, f, out);
    // It takes no 0, and 32 bits; and of any seed it makes other numbers.
    if e.asks("seed", |o| o.seed) && (1..1 << 32).contains(&o.seed) {
        out.put("seed", o.seed);
    } else {
        e.leaves(format!("seed {}", o.seed), "--seed 1234");
    }
}

/// What backward computes again: whole layers, some of them, or modules.
fn recomputed(e: &mut Export, f: &Facts, out: &mut Flags) {
    let layers = |out: &mut Flags, method: &str, n: usize| {
        out.put("recompute-granularity", "full");
        out.put("recompute-method", method);
        out.put("recompute-num-layers", n);
    };
    let names: &[String] = match &e.o.recompute {
        Recompute::None => return,
        Recompute::Full => return layers(out, "uniform", 1),
        Recompute::Layers(n) => return layers(out, "block", *n),
        Recompute::Mix(first, rest) => match (&first[..], &**rest) {
            // Of the other layers it saves what its kernels save.
            ([(n, Recompute::Full)], Recompute::None | Recompute::Elementwise) => {
                return layers(out, "block", *n);
            }
            _others => return e.lack(true, "layers that are computed again in more than one way"),
        },
        Recompute::Elementwise => &["elementwise".to_string()],
        Recompute::Ops(names) => names,
        Recompute::Selective | Recompute::Sqrt | Recompute::Every(_) | Recompute::Fit => {
            return e.lack(true, BY_OP);
        }
    };
    let mut all: Vec<&str> = vec![];
    for name in names {
        match name.as_str() {
            // What is nearest among its modules; other element-wise work is within its fused kernels.
            "elementwise" => {
                all.push("layernorm");
                all.extend(f.experts.map(|_| "moe_act"));
            }
            "norms" => all.push("layernorm"),
            "experts" => e.lack(true, "products of experts that are made again without exchanges"),
            "mla_up_proj" | "moe_act" | "moe" => all.push(name),
            _op => e.lack(true, BY_OP),
        }
    }
    all.sort_unstable();
    all.dedup();
    out.put("recompute-granularity", "selective");
    out.put("recompute-modules", all.join(" "));
}

/// Notes what its start checks of the environment (`validate_args` of its `arguments.py`).
fn environment(e: &mut Export, fsdp: bool, tp_or_cp: bool) {
    let note = match (fsdp, tp_or_cp) {
        (true, _) => "environment: CUDA_DEVICE_MAX_CONNECTIONS must not be 1",
        (false, true) => "environment: CUDA_DEVICE_MAX_CONNECTIONS=1, on GPUs before Blackwell",
        (false, false) => return,
    };
    e.notes.push(note.into());
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
    if e.asks("lr", |o| o.lr.peak()) {
        out.put("lr", o.lr.peak());
    } else {
        e.leaves(format!("learning rate {}", o.lr.peak()), "none: --lr is yours to give");
    }
    schedule(e, out);
}

/// How the learning rate changes from step to step.
fn schedule(e: &mut Export, out: &mut Flags) {
    let chosen = e.asks("lr-schedule", |o| o.lr.curve());
    let curve = e.o.lr.curve();
    match e.o.lr.fall() {
        None if chosen => out.put("lr-decay-style", "constant"),
        None => e.leaves("a constant learning rate", "--lr-decay-style linear"),
        Some(Fall { warmup, total, floor, decay, .. }) => {
            out.put("lr-decay-style", if decay.is_some() { "WSD" } else { curve });
            if let Some(steps) = decay {
                out.put("lr-wsd-decay-style", curve);
                out.put("lr-wsd-decay-iters", steps);
            }
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
                    format!("the learning rate has fallen at step {total}"),
                    "--lr-decay-iters as --train-iters",
                );
            }
        }
    }
}

/// Where the learning rate has fallen if nobody says.
const TOTAL: usize = 1000;
