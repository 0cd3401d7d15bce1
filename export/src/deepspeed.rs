//! The JSON config of DeepSpeed.

use super::asked::adam;
use super::rules::{Lion, lion};
use super::{Export, File};
use serde_json::{Map, Value as Json, json};
use shardc_frontends::Facts;
use shardc_ir::diag::Result;
use shardc_ir::loss_scale::LossScaling;
use shardc_ir::types::DType;
use shardc_passes::options::{Decay, Optimizer};

/// The release whose parser tests read the config with.
const RELEASE: &str = "0.19.8";

/// `ds_config.json`.
pub(super) fn files(e: &mut Export) -> Result<Vec<File>> {
    e.trains();
    e.notes.push(format!("config of DeepSpeed {RELEASE}"));
    let f = e.facts()?;
    let o = e.o;
    let [tp, cp, pp, replicas, shards] = e.axes();
    e.lack(
        pp > 1,
        "stages: they belong in a PipelineModule of the training script, not in the config",
    );
    e.lack(cp > 1, "context parallelism: it belongs in the training script, not in the config");
    e.lack(replicas > 1 && shards > 1 && o.zero > 0, "replicated shards (HSDP) at this ZeRO stage");
    e.lack(tp > 1 && o.zero == 3, "tensor parallelism with ZeRO-3");
    // A rule that somebody chose has all of its numbers.
    let rule = (!o.optim.is_empty()).then(|| lion(o)).flatten();
    let decays = match &rule {
        Some(rule) => rule.decay.is_none(),
        None => e.asks("decay", |o| o.decay) || e.asks("weight-decay", |o| o.weight_decay),
    };
    if decays && o.decay == Decay::Matrices && o.weight_decay != 0.0 {
        let what = "weight decay of matrices only (--decay matrices): groups of parameters belong in the training script";
        e.lack(true, what);
        e.helps.push("compile with --decay all, or --weight-decay 0");
    }
    let stage = if shards > 1 { o.zero } else { 0 };
    let mut config = json!({
        "train_batch_size": o.global_batch,
        "train_micro_batch_size_per_gpu": o.microbatch,
        "gradient_accumulation_steps": o.microbatches(),
        "zero_optimization": { "stage": stage },
    });
    if stage > 0 {
        buckets(&mut config["zero_optimization"], layer(e, &f), stage);
    }
    if e.asks("clip", |o| o.clip) {
        config["gradient_clipping"] = o.clip.unwrap_or(0.0).into();
    } else {
        e.leaves("no clipping", "that of its release (gradient_clipping)");
    }
    if o.dtype == DType::BF16 {
        config["bf16"] = json!({ "enabled": true });
        let kept = if o.grad_dtype == DType::F32 { "fp32" } else { "bf16" };
        config["data_types"] = json!({ "grad_accum_dtype": kept });
        config["communication_data_type"] = kept.into();
    }
    if o.dtype == DType::F16 {
        config["fp16"] = scale(e);
        let kept = if o.grad_dtype == DType::F32 { "fp32" } else { "fp16" };
        config["data_types"] = json!({ "grad_accum_dtype": kept });
        config["communication_data_type"] = kept.into();
    }
    if tp > 1 {
        config["tensor_parallel"] = json!({ "autotp_size": tp });
    }
    let rate = rule.as_ref().map_or(1.0, |rule| rule.lr);
    if let Some(Lion { betas, decay, lr }) = rule {
        let decay = decay.unwrap_or(o.weight_decay);
        let params = json!({ "lr": o.lr.peak() * lr, "betas": betas, "weight_decay": decay });
        config["optimizer"] = json!({ "type": "Lion", "params": params });
    } else if let Some(optimizer) = optimizer(e) {
        config["optimizer"] = optimizer;
    }
    if o.optimizer == Optimizer::Sgd && stage > 0 {
        // It asks for this with every optimizer but those of Adam.
        config["zero_allow_untested_optimizer"] = true.into();
    }
    if let Some(fall) = o.lr.fall() {
        e.lack(fall.decay.is_some(), "a learning rate that stays before it falls (--decay-steps)");
        let line = o.lr.curve() == "linear";
        e.lack(line && fall.floor != 0.0, "a learning rate that falls along a line to --min-lr");
        config["scheduler"] = if line {
            json!({ "type": "WarmupDecayLR", "params": {
                "total_num_steps": fall.total, "warmup_num_steps": fall.warmup, "warmup_min_lr": 0.0,
                "warmup_max_lr": fall.lr * rate, "warmup_type": "linear",
            }})
        } else {
            json!({ "type": "WarmupCosineLR", "params": {
                "total_num_steps": fall.total, "warmup_num_steps": fall.warmup, "warmup_min_ratio": 0.0,
                "warmup_type": "linear", "cos_min_ratio": fall.floor / fall.lr,
            }})
        };
    }
    let [given, _default] = e.elsewhere();
    if !given.is_empty() {
        e.notes.push(format!(
            "plan (given, and not written): {}; its config has no word for it, it belongs in the \
             training script",
            given.join(" ")
        ));
    }
    let text = serde_json::to_string_pretty(&config).expect("plain data") + "\n";
    Ok(vec![File::new("ds_config.json", text)])
}

/// Numbers of the largest layer.
fn layer(e: &Export, f: &Facts) -> usize {
    let all = e.s.plan.weights.iter();
    let of = |i: usize| {
        let scope = format!(".{i}.");
        let own = all.clone().filter(|w| w.param.contains(&scope));
        own.map(|w| w.shape.iter().product::<usize>()).sum::<usize>()
    };
    (0..f.layers).map(of).max().unwrap_or(0).max(1)
}

/// Exchanges layer by layer, as the plan makes them, behind the work of others.
fn buckets(zero: &mut Json, layer: usize, stage: u8) {
    zero["overlap_comm"] = true.into();
    zero["reduce_bucket_size"] = layer.into();
    if stage < 3 {
        zero["allgather_bucket_size"] = layer.into();
    } else {
        zero["stage3_prefetch_bucket_size"] = layer.into();
        zero["stage3_max_live_parameters"] = (2 * layer).into();
    }
}

/// How the loss is scaled for f16.
fn scale(e: &mut Export) -> Json {
    let mut out = json!({ "enabled": true });
    match e.o.loss_scaling {
        LossScaling::Constant { scale } => out["loss_scale"] = scale.into(),
        LossScaling::Dynamic { initial, min, window, hysteresis } => {
            out["loss_scale"] = 0.into();
            let power = initial.log2() as i64;
            let all: [(&str, &str, Json, Json); 4] = [
                ("initial-loss-scale", "initial_scale_power", power.into(), 32.into()),
                ("loss-scale-window", "loss_scale_window", window.into(), 1000.into()),
                ("hysteresis", "hysteresis", hysteresis.into(), 2.into()),
                ("min-loss-scale", "min_loss_scale", min.into(), 1f32.into()),
            ];
            for (flag, key, value, own) in all {
                if e.asks(flag, |_| ()) || value != own {
                    out[key] = value;
                } else {
                    e.leaves(format!("{key} {value}"), "that of its release");
                }
            }
        }
    }
    out
}

/// The optimizer, if somebody chose it or a number of it.
fn optimizer(e: &mut Export) -> Option<Json> {
    let o = e.o;
    let mut params: Map<String, Json> = Map::new();
    let mut put = |e: &mut Export, asked: bool, key: &str, value: Json, theirs: &str| {
        if asked {
            params.insert(key.into(), value);
        } else {
            e.leaves(format!("{key} {value}"), theirs);
        }
    };
    let lr = e.asks("lr", |o| o.lr.peak());
    put(e, lr, "lr", o.lr.peak().into(), "that of its optimizer");
    if let Some((beta1, beta2, eps)) = adam(o) {
        let betas = e.asks("betas", |o| adam(o).map(|a| (a.0, a.1)));
        put(e, betas, "betas", json!([beta1, beta2]), "that of its optimizer");
        let epsilon = e.asks("eps", |o| adam(o).map(|a| a.2));
        put(e, epsilon, "eps", eps.into(), "that of its optimizer");
    }
    let decay = e.asks("weight-decay", |o| o.weight_decay);
    put(e, decay, "weight_decay", o.weight_decay.into(), "that of its optimizer");
    let kind = if adam(o).is_some() { "AdamW" } else { "SGD" };
    if params.is_empty() && !e.asks("optimizer", |o| adam(o).is_some()) {
        e.leaves(kind, "none: the training script has an optimizer");
        return None;
    }
    Some(json!({ "type": kind, "params": params }))
}
