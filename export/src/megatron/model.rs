//! Flags of the model.

use super::Flags;
use crate::Export;
use shardc_frontends::{ExpertFacts, Facts, Gating, LatentSizes, gating};
use shardc_ir::diag::Result;

/// Families whose models it has. GPT-2 is its own first one.
const FAMILIES: [&str; 9] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe",
    "gpt2",
];

/// Sizes, attention, positions and experts.
pub(super) fn model(e: &mut Export, f: &Facts, out: &mut Flags) -> Result<()> {
    let family = e.s.family.as_str();
    e.lack(
        !FAMILIES.contains(&family),
        format!("flags of the family {family}, which this export does not support yet"),
    );
    let (gpt2, glm) = (family == "gpt2", family == "glm4_moe");
    let own = if gpt2 { "gelu_new" } else { "silu" };
    let acts = ["hidden_act", "activation_function"].map(|key| e.word(key));
    e.lack(
        acts.iter().flatten().any(|a| *a != own),
        format!("an activation other than {own}, which this export does not support yet"),
    );
    e.lack(
        !gpt2 && !glm && e.has_biases(),
        "biases of individual linears (attention_bias, mlp_bias)",
    );
    out.put("num-layers", f.layers);
    out.put("hidden-size", f.hidden);
    out.put("ffn-hidden-size", f.ffn);
    out.put("num-attention-heads", f.heads);
    out.put("max-position-embeddings", f.max_positions.max(e.o.seq));
    out.put("vocab-size", f.vocab);
    out.put("make-vocab-size-divisible-by", 1);
    let eps = if gpt2 {
        e.number("layer_norm_epsilon").unwrap_or(1e-5)
    } else {
        e.number("rms_norm_eps").unwrap_or(1e-6)
    };
    out.put("normalization", if gpt2 { "LayerNorm" } else { "RMSNorm" });
    out.put("norm-epsilon", eps);
    let gating = gating(&e.s.config, "config.json", &shardc_plans::input::shape(e.o))?;
    match gating.latent {
        Some(l) => latent(e, l, out),
        None => {
            out.put("kv-channels", f.head_dim);
            if f.kv_heads != f.heads {
                out.on("group-query-attention", true);
                out.put("num-query-groups", f.kv_heads);
            }
        }
    }
    if gpt2 {
        out.put("position-embedding-type", "learned_absolute");
    } else {
        rotary(e, gating.latent.is_some(), out);
        out.on("swiglu", true);
        out.on("disable-bias-linear", true);
    }
    let biases = e.s.config.get("attention_bias").and_then(|v| v.as_bool());
    out.on("add-qkv-bias", family == "qwen2" || (glm && biases == Some(true)));
    let norms = e.s.config.get("use_qk_norm").and_then(|v| v.as_bool());
    let latent_norms = gating.latent.is_some();
    out.on(
        "qk-layernorm",
        family.starts_with("qwen3") || latent_norms || (glm && norms == Some(true)),
    );
    out.on("untie-embeddings-and-output-weights", !f.tied);
    out.put("attention-dropout", 0.0);
    out.put("hidden-dropout", 0.0);
    // Logits and their loss in one kernel, as plans compute them.
    out.on("cross-entropy-loss-fusion", true);
    out.put("cross-entropy-fusion-impl", "native");
    match f.experts {
        Some(x) => experts(e, f, x, &gating, out),
        None => Ok(()),
    }
}

/// Latent attention, whose heads it describes by themselves.
fn latent(e: &mut Export, l: LatentSizes, out: &mut Flags) {
    out.on("multi-latent-attention", true);
    if let Some(rank) = l.q_rank {
        out.put("q-lora-rank", rank);
    }
    out.put("kv-lora-rank", l.kv_rank);
    out.put("qk-head-dim", l.still);
    out.put("qk-pos-emb-head-dim", l.turning);
    out.put("v-head-dim", l.value);
    let apart = e.s.config.get("rope_interleave").and_then(|v| v.as_bool()) == Some(false);
    e.lack(
        apart,
        "latent attention whose rotary pairs are half a head apart (rope_interleave false)",
    );
}

/// Positions that turn. With latent attention its default is a scaled form.
fn rotary(e: &mut Export, latent: bool, out: &mut Flags) {
    let (theta, scaled) = e.rope();
    let scaling = if latent && scaled.as_deref() == Some("yarn") {
        e.lack(true, "rotary scaling of type yarn, which this export does not support yet");
        None
    } else {
        scaling(e, scaled.as_deref())
    };
    e.lack(theta.fract() != 0.0, "a rotary base that is not an integer");
    if latent {
        out.put("rope-type", "rope");
    }
    out.put("position-embedding-type", "rope");
    out.put("rotary-base", theta as u64);
    let own = e.rope_scaling();
    let part = own.and_then(|v| v.get("partial_rotary_factor")).and_then(|v| v.as_f64());
    if let Some(part) = part.or(e.number("partial_rotary_factor")).filter(|p| *p != 1.0) {
        out.put("rotary-percent", part);
    }
    if let Some(factor) = scaling {
        out.on("use-rope-scaling", true);
        out.put("rope-scaling-factor", factor);
    }
}

/// A mixture of experts.
fn experts(e: &mut Export, f: &Facts, x: ExpertFacts, g: &Gating, out: &mut Flags) -> Result<()> {
    let every = e.number("decoder_sparse_step").unwrap_or(1.0) == 1.0;
    let some = e.s.config.get("mlp_only_layers").and_then(|v| v.as_array());
    e.lack(
        !every || some.is_some_and(|d| !d.is_empty()),
        "dense layers between layers with experts",
    );
    let sigmoids = ["deepseek_v3", "glm4_moe"].contains(&e.s.family.as_str());
    e.lack(
        x.shared > 0 && !sigmoids,
        "an MLP beside the experts, which this export does not support yet",
    );
    out.put("num-experts", x.experts);
    out.put("moe-router-topk", x.top_k);
    out.put("moe-ffn-hidden-size", x.ffn);
    if x.shared > 0 {
        out.put("moe-shared-expert-intermediate-size", x.shared);
    }
    if g.dense > 0 {
        out.put("moe-layer-freq", format!("([0]*{}+[1]*{})", g.dense, f.layers - g.dense));
    }
    out.put("moe-token-dispatcher-type", "alltoall");
    out.on("moe-grouped-gemm", true);
    // Whatever the type of weights, plans compute logits of routers in f32.
    out.put("moe-router-dtype", "fp32");
    if sigmoids {
        out.put("moe-router-score-function", "sigmoid");
        out.on("moe-router-enable-expert-bias", true);
        out.put("moe-router-bias-update-rate", e.o.balance.rate);
        if let Some((groups, of)) = g.groups {
            out.put("moe-router-num-groups", groups);
            out.put("moe-router-group-topk", of);
        }
        out.put("moe-router-topk-scaling-factor", e.number("routed_scaling_factor").unwrap_or(1.0));
        e.lack(
            !g.normed && x.top_k > 1,
            "gates that are not divided by their sum (norm_topk_prob false)",
        );
    } else {
        out.on("moe-router-pre-softmax", !g.normed);
    }
    let aux = balancing(e, g.aux);
    out.put("moe-router-load-balancing-type", if aux.is_some() { "aux_loss" } else { "none" });
    out.put("moe-aux-loss-coeff", aux.unwrap_or(0.0));
    if let Some(z) = g.z {
        out.put("moe-z-loss-coeff", z);
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
    let own =
        gating(&config, "config.json", &shardc_plans::input::shape(e.o)).map_or(plan, |g| g.aux);
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
