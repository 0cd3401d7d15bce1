//! The JSON config of DeepSpeed.

use super::{Export, File};
use serde_json::json;
use shardc_ir::diag::Result;
use shardc_ir::loss_scale::LossScaling;
use shardc_ir::plan::LrSchedule;
use shardc_ir::types::DType;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Decay, Optimizer};

/// `ds_config.json`.
pub(super) fn files(e: &mut Export) -> Result<Vec<File>> {
    e.trains();
    e.facts()?;
    let o = e.o;
    let [tp, cp, pp, replicas, shards] = e.axes();
    e.lack(
        pp > 1,
        "stages: they belong in a PipelineModule of the training script, not in the config",
    );
    e.lack(cp > 1, "context parallelism: it belongs in the training script, not in the config");
    e.lack(o.ep > 1, "expert parallelism: it belongs in the model, not in the config");
    e.lack(o.sp, "sequence parallelism (--sp) of its tensor parallelism");
    e.lack(replicas > 1 && shards > 1 && o.zero > 0, "replicated shards (HSDP) at this ZeRO stage");
    e.lack(tp > 1 && o.zero == 3, "tensor parallelism with ZeRO-3");
    e.lack(
        o.recompute == Recompute::Full,
        "recomputation: it belongs in the model, not in the config",
    );
    e.lack(o.zero == 3 && !o.reshard_after_forward, "weights that stay gathered after forward");
    let spared = o.decay == Decay::Matrices && o.weight_decay != 0.0;
    e.lack(
        spared,
        "weight decay of matrices only (--decay matrices): it belongs in the training script",
    );
    let stage = if shards > 1 { o.zero } else { 0 };
    let mut config = json!({
        "train_batch_size": o.global_batch,
        "train_micro_batch_size_per_gpu": o.microbatch,
        "gradient_accumulation_steps": o.microbatches(),
        "gradient_clipping": o.clip.unwrap_or(0.0),
        "zero_optimization": { "stage": stage },
    });
    if o.dtype == DType::BF16 {
        config["bf16"] = json!({ "enabled": true });
        let kept = if o.grad_dtype == DType::F32 { "fp32" } else { "bf16" };
        config["data_types"] = json!({ "grad_accum_dtype": kept });
        config["communication_data_type"] = kept.into();
    }
    if o.dtype == DType::F16 {
        config["fp16"] = match o.loss_scaling {
            LossScaling::Constant { scale } => json!({ "enabled": true, "loss_scale": scale }),
            LossScaling::Dynamic { initial, min, window, hysteresis } => json!({
                "enabled": true, "loss_scale": 0, "initial_scale_power": initial.log2() as i64,
                "loss_scale_window": window, "hysteresis": hysteresis, "min_loss_scale": min,
            }),
        };
        let kept = if o.grad_dtype == DType::F32 { "fp32" } else { "fp16" };
        config["data_types"] = json!({ "grad_accum_dtype": kept });
        config["communication_data_type"] = kept.into();
    }
    if tp > 1 {
        config["tensor_parallel"] = json!({ "autotp_size": tp });
    }
    let lr = match o.lr {
        LrSchedule::Constant { lr } | LrSchedule::WarmupCosine { lr, .. } => lr,
    };
    config["optimizer"] = match o.optimizer {
        Optimizer::AdamW { beta1, beta2, eps } => json!({ "type": "AdamW", "params": {
            "lr": lr, "betas": [beta1, beta2], "eps": eps, "weight_decay": o.weight_decay,
        }}),
        Optimizer::Sgd => json!({ "type": "SGD", "params": {
            "lr": lr, "weight_decay": o.weight_decay,
        }}),
    };
    if o.optimizer == Optimizer::Sgd && stage > 0 {
        // It asks for this with every optimizer but those of Adam.
        config["zero_allow_untested_optimizer"] = true.into();
    }
    if let LrSchedule::WarmupCosine { lr, warmup, total, floor } = o.lr {
        config["scheduler"] = json!({ "type": "WarmupCosineLR", "params": {
            "total_num_steps": total, "warmup_num_steps": warmup, "warmup_min_ratio": 0.0,
            "warmup_type": "linear", "cos_min_ratio": floor / lr,
        }});
    }
    let text = serde_json::to_string_pretty(&config).expect("plain data") + "\n";
    Ok(vec![File::new("ds_config.json", text)])
}
