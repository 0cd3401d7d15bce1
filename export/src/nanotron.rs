//! The YAML config of nanotron.

use super::asked::adam;
use super::{Export, File};
use serde_json::{Value as Json, json};
use shardc_ir::diag::Result;
use shardc_ir::plan::Fall;
use shardc_ir::types::DType;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Decay, Optimizer};

/// The commit whose dataclasses the config was read with.
const COMMIT: &str = "2411b022";

/// Steps of a run whose schedule says none.
const STEPS: usize = 1000;

/// `nanotron.yaml`.
pub(super) fn files(e: &mut Export) -> Result<Vec<File>> {
    e.trains();
    let f = e.facts()?;
    let o = e.o;
    let [tp, cp, pp, replicas, shards] = e.axes();
    let family = e.s.family.clone();
    e.lack(
        family != "llama",
        format!("the family {family}, which this export does not support yet"),
    );
    e.lack(e.has_biases(), "biases of individual linears (attention_bias, mlp_bias)");
    e.lack(cp > 1, "context parallelism, which this export does not support yet");
    e.lack(f.experts.is_some(), "experts, which this export does not support yet");
    e.lack(o.zero > 0 && replicas > 1 && shards > 1, "replicas of shards");
    e.lack(f.kv_heads % tp != 0, "fewer KV heads than tp ranks");
    let name = e.schedule().map(String::from);
    let engine = match name.as_deref() {
        None | Some("1f1b") => "1f1b",
        Some("gpipe") => "afab",
        Some(other) => {
            e.lack(
                true,
                format!("the schedule {other}: it has 1f1b and all forward, all backward"),
            );
            "1f1b"
        }
    };
    let counts: Vec<usize> = e.stages().iter().map(|s| s.1).collect();
    let equal = counts.windows(2).all(|w| w[0] == w[1]);
    e.lack(pp > 1 && !equal, "uneven stages: it splits layers by its own costs");
    let (theta, scaled) = e.rope();
    e.lack(scaled.is_some(), "scaled rotary embeddings, which this export does not support yet");
    let lr = o.lr.peak();
    let Fall { warmup, total, floor, decay, .. } =
        o.lr.fall().unwrap_or(Fall { lr, warmup: 0, total: STEPS, floor: lr, decay: None });
    let decay = decay.unwrap_or(total - warmup).max(1);
    let Optimizer::AdamW { beta1, beta2, eps } = o.optimizer else {
        e.lack(true, "SGD without momentum, which this export does not support yet");
        return Ok(vec![]);
    };
    unasked(e);
    // Its constant one is a cosine that stays where it is.
    let style = if o.lr.fall().is_some() { o.lr.curve() } else { "cosine" };
    let spared: &[&str] = if o.decay == Decay::All { &[] } else { &[".*norm.*", ".*bias.*"] };
    let mut config = json!({
        "general": { "project": "shardc", "run": "plan", "seed": o.seed, "ignore_sanity_checks": true },
        "checkpoints": { "checkpoints_path": "checkpoints", "checkpoint_interval": total },
        "data_stages": [{ "name": "all", "start_training_step": 1,
            "data": { "dataset": null, "seed": o.seed, "num_loading_workers": 1 } }],
        "logging": { "log_level": "info", "log_level_replica": "info", "iteration_step_info_interval": 1 },
        "model": {
            "dtype": o.dtype.facts().torch,
            "init_method": { "std": e.number("initializer_range").unwrap_or(0.02) },
            "make_vocab_size_divisible_by": 1,
            "ddp_bucket_cap_mb": 25,
            "model_config": model(e, theta),
        },
        "optimizer": {
            "accumulate_grad_in_fp32": o.dtype == DType::BF16 && o.grad_dtype == DType::F32,
            "clip_grad": o.clip,
            "weight_decay": o.weight_decay,
            "weight_decay_exclude_named_params": spared,
            "zero_stage": if shards > 1 { o.zero } else { 0 },
            "optimizer_factory": { "name": "adamW", "adam_beta1": beta1, "adam_beta2": beta2,
                "adam_eps": eps, "torch_adam_is_fused": true },
            "learning_rate_scheduler": { "learning_rate": lr, "lr_warmup_steps": warmup,
                "lr_warmup_style": "linear", "lr_decay_style": style, "min_decay_lr": floor,
                "lr_decay_starting_step": total - decay, "lr_decay_steps": decay },
        },
        "parallelism": { "dp": replicas * shards, "pp": pp, "tp": tp, "pp_engine": engine,
            "tp_mode": if o.sp { "REDUCE_SCATTER" } else { "ALL_REDUCE" },
            "tp_linear_async_communication": false, "recompute_layer": o.recompute == Recompute::Full,
            "expert_parallel_size": 1, "context_parallel_size": 1 },
        "tokenizer": { "tokenizer_name_or_path": tokenizer(e) },
        "tokens": { "sequence_length": o.seq, "train_steps": total, "micro_batch_size": o.microbatch,
            "batch_accumulation_per_replica": o.microbatches() },
    });
    if !e.asks("seed", |o| o.seed) {
        e.leaves(format!("seed {}", o.seed), 42);
        for of in ["/general", "/data_stages/0/data"] {
            let of = config.pointer_mut(of).and_then(Json::as_object_mut);
            of.map(|of| of.remove("seed"));
        }
    }
    let notes: String = e.notes.drain(..).map(|note| format!("# {note}\n")).collect();
    let text = format!("# config of nanotron at commit {COMMIT}\n{notes}{}", yaml(&config));
    Ok(vec![File::new("nanotron.yaml", text)])
}

/// What config.json says that the model is called, which is where its tokenizer is published; a folder of the computer
/// that compiled it says nothing to another one.
fn tokenizer(e: &mut Export) -> Json {
    let name = e.word("_name_or_path").filter(|name| !name.starts_with(['/', '.']));
    if name.is_none_or(str::is_empty) {
        e.notes.push(
            "tokenizer_name_or_path is yours to give: config.json does not name the model".into(),
        );
        return Json::Null;
    }
    json!(name)
}

/// Notes what nobody chose and is written still, for nanotron has no default of it and reads no config without.
fn unasked(e: &mut Export) {
    let o = e.o;
    let (beta1, beta2, eps) = adam(o).unwrap_or_default();
    let all = [
        (e.asks("lr", |o| o.lr.peak()), format!("learning_rate {}", o.lr.peak())),
        (e.asks("betas", |o| adam(o).map(|a| (a.0, a.1))), format!("betas {beta1}, {beta2}")),
        (e.asks("eps", |o| adam(o).map(|a| a.2)), format!("adam_eps {eps:e}")),
        (e.asks("weight-decay", |o| o.weight_decay), format!("weight_decay {}", o.weight_decay)),
        (e.asks("clip", |o| o.clip), "no clipping".into()),
    ];
    for (_, plan) in all.into_iter().filter(|x| !x.0) {
        e.notes.push(format!(
            "plan: {plan}, which nobody chose; nanotron has no default, so it is written"
        ));
    }
}

fn model(e: &Export, theta: f64) -> Json {
    let Some(f) = e.s.facts else { return Json::Null };
    json!({
        "is_llama_config": true,
        "hidden_size": f.hidden,
        "intermediate_size": f.ffn,
        "num_hidden_layers": f.layers,
        "num_attention_heads": f.heads,
        "num_key_value_heads": f.kv_heads,
        "max_position_embeddings": f.max_positions.max(e.o.seq),
        "vocab_size": f.vocab,
        "tie_word_embeddings": f.tied,
        "rms_norm_eps": e.number("rms_norm_eps").unwrap_or(1e-6),
        "rope_theta": theta,
        "hidden_act": "silu",
        "initializer_range": e.number("initializer_range").unwrap_or(0.02),
        "bos_token_id": e.number("bos_token_id").unwrap_or(1.0) as u64,
        "eos_token_id": e.number("eos_token_id").unwrap_or(2.0) as u64,
        "pad_token_id": null,
        "use_cache": true,
    })
}

/// Plain data as YAML: JSON is YAML but for numbers like 1e-8, which its readers take for text.
fn yaml(config: &Json) -> String {
    let all = config.as_object().into_iter().flatten();
    all.map(|(k, v)| format!("{k}: {}\n", value(v))).collect()
}

fn value(v: &Json) -> String {
    match v {
        Json::Object(all) => {
            let each = all.iter().map(|(k, v)| format!("{k}: {}", value(v)));
            format!("{{{}}}", each.collect::<Vec<_>>().join(", "))
        }
        Json::Array(all) => {
            format!("[{}]", all.iter().map(value).collect::<Vec<_>>().join(", "))
        }
        Json::Number(n) => {
            let text = n.to_string();
            match text.split_once('e') {
                Some((digits, power)) => {
                    let dot = if digits.contains('.') { "" } else { ".0" };
                    let plus = if power.starts_with('-') { "" } else { "+" };
                    format!("{digits}{dot}e{plus}{power}")
                }
                None => text,
            }
        }
        other => other.to_string(),
    }
}
