//! The family whose parameters and products some arguments describe, as its config.json.

use super::{Args, JobSizes};
use serde_json::{Map, Value as Json, json};
use shardc_ir::diag::{Diag, Result};

/// A config.json that is being written, and what the family has otherwise.
struct Model<'a> {
    a: &'a Args<'a>,
    place: &'a str,
    c: Map<String, Json>,
    apart: Vec<String>,
    layers: usize,
    /// Layers without experts, which come first.
    dense: usize,
    experts: Option<usize>,
    /// Widths of an MLP, of an expert, and of the one beside experts.
    ffn: usize,
    width: usize,
    shared: usize,
    further: usize,
}

/// Its config.json, and what is not of it.
///
/// # Errors
/// `audit` for numbers that are not given, and models of no family.
pub(super) fn config(a: &Args, l: &JobSizes, place: &str) -> Result<(Json, Vec<String>)> {
    let layers = a.needed("num-layers")?;
    let hidden = a.needed("hidden-size")?;
    let ffn = match a.has("swiglu") {
        true => hidden * 8 / 3 / 64 * 64,
        false => 4 * hidden,
    };
    let ffn = a.size("ffn-hidden-size", ffn);
    let mut m = Model {
        a,
        place,
        c: Map::new(),
        apart: vec![],
        layers,
        dense: layers,
        experts: a.number("num-experts"),
        ffn,
        width: a.size("moe-ffn-hidden-size", ffn).max(1),
        shared: a.size("moe-shared-expert-intermediate-size", 0),
        further: a.size("mtp-num-layers", 0),
    };
    if m.experts.is_some() {
        m.dense = dense_layers(a, layers).map_err(|what| m.outside(&what))?;
    }
    m.sizes(l, hidden)?;
    let family = m.family()?;
    m.put(json!({ "model_type": family }));
    Ok((Json::Object(m.c), m.apart))
}

impl Model<'_> {
    fn put(&mut self, pairs: Json) {
        if let Json::Object(pairs) = pairs {
            self.c.extend(pairs);
        }
    }

    fn outside(&self, what: &str) -> Diag {
        Diag::new("audit", format!("a model of no family that is known: {what}"))
            .at(self.place.to_string())
            .rule("dense decoders and mixtures of experts as of Llama, Qwen, Mixtral, DeepSeek, GLM, gpt-oss, Nemotron, GPT-2")
            .help("leave out what is of no such model, and audit the rest")
    }

    /// What all families have.
    fn sizes(&mut self, l: &JobSizes, hidden: usize) -> Result<()> {
        let a = self.a;
        let heads = a.needed("num-attention-heads")?;
        let grouped = a.has("group-query-attention");
        let kv = if grouped { a.size("num-query-groups", 1) } else { heads };
        let multiple = a.size("make-vocab-size-divisible-by", 128).max(1) * l.tp;
        let vocab = a.number("padded-vocab-size").or(a.number("vocab-size")).ok_or_else(|| {
            Diag::new("audit", "the size of the vocabulary is not given")
                .at(self.place.to_string())
                .rule("no tokenizer is read")
                .help("add --vocab-size N")
        })?;
        let vocab = usize::div_ceil(vocab, multiple) * multiple;
        self.put(json!({
            "num_hidden_layers": self.layers,
            "hidden_size": hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "head_dim": a.size("kv-channels", hidden / heads),
            "max_position_embeddings": a.size("max-position-embeddings", l.seq),
            "vocab_size": vocab,
            "rms_norm_eps": a.number("norm-epsilon").unwrap_or(1e-5),
            "rope_theta": a.number("rotary-base").unwrap_or(10000.0),
            "tie_word_embeddings": !a.has("untie-embeddings-and-output-weights"),
            "hidden_act": "silu",
        }));
        if let Some(n) = self.experts {
            self.put(json!({
                "num_experts": n,
                "num_local_experts": n,
                "n_routed_experts": n,
                "num_experts_per_tok": a.size("moe-router-topk", 2),
                "moe_intermediate_size": self.width,
                "output_router_logits": false,
                "norm_topk_prob": true,
            }));
        }
        Ok(())
    }

    /// Learned positions, or those that turn.
    fn turns(&self) -> Result<bool> {
        match self.a.text("position-embedding-type").unwrap_or("learned_absolute") {
            "rope" | "yarn" => Ok(true),
            "learned_absolute" => Ok(self.a.has("use-rotary-position-embeddings")),
            other => Err(self.outside(&format!("--position-embedding-type {other}"))),
        }
    }

    fn family(&mut self) -> Result<&'static str> {
        let a = self.a;
        let rms = a.text("normalization") == Some("RMSNorm");
        let bias = !a.has("disable-bias-linear");
        if !self.turns()? {
            return self.learned(bias && !rms && !a.has("swiglu"));
        }
        if a.text("softmax-type") == Some("learnable") {
            return self.with_sinks(bias);
        }
        if self.experts.is_none() && a.has("squared-relu") && !bias {
            let part = a.number("rotary-percent").unwrap_or(1.0);
            self.put(json!({ "hidden_act": "relu2", "partial_rotary_factor": part }));
            self.apart
                .extend(rms.then(|| "--normalization RMSNorm: taken as a norm with a bias".into()));
            return Ok("nemotron");
        }
        if !a.has("swiglu") {
            return Err(self.outside("rotary positions without --swiglu"));
        }
        if bias {
            return Err(self.outside("rotary positions without --disable-bias-linear"));
        }
        if !rms {
            self.apart.push("--normalization LayerNorm: taken as a norm without a bias".into());
        }
        match (a.has("multi-latent-attention"), self.experts) {
            (true, _) => self.latent(),
            (_, Some(_)) => self.mixture(),
            (_, None) => self.plain(),
        }
    }

    fn learned(&mut self, plain: bool) -> Result<&'static str> {
        let grouped = self.c["num_key_value_heads"] != self.c["num_attention_heads"];
        if !plain || grouped || self.a.has("qk-layernorm") || self.experts.is_some() {
            return Err(self.outside("learned positions in another model than GPT-2's"));
        }
        let of = |key: &str| self.c[key].clone();
        let gpt2 = json!({
            "n_layer": self.layers,
            "n_embd": of("hidden_size"),
            "n_head": of("num_attention_heads"),
            "n_inner": self.ffn,
            "n_positions": of("max_position_embeddings"),
            "activation_function": "gelu_new",
        });
        self.put(gpt2);
        Ok("gpt2")
    }

    fn with_sinks(&mut self, bias: bool) -> Result<&'static str> {
        let a = self.a;
        let other = a.has("qk-layernorm") || a.has("multi-latent-attention");
        if self.experts.is_none() || self.dense > 0 || self.shared > 0 || other {
            return Err(self.outside("--softmax-type learnable in another model than gpt-oss"));
        }
        self.put(json!({
            "intermediate_size": self.width,
            "attention_bias": bias || a.has("add-qkv-bias"),
            "sliding_window": 128,
        }));
        let theirs = "--disable-bias-linear: biases of routers and experts, which gpt-oss has, are taken as there";
        self.apart.extend((!bias).then(|| theirs.into()));
        Ok("gpt_oss")
    }

    fn latent(&mut self) -> Result<&'static str> {
        let a = self.a;
        // Without experts no layer has any of these.
        let n = self.experts.unwrap_or(2);
        self.put(json!({
            "q_lora_rank": a.number::<usize>("q-lora-rank"),
            "kv_lora_rank": a.size("kv-lora-rank", 32),
            "qk_nope_head_dim": a.size("qk-head-dim", 128),
            "qk_rope_head_dim": a.size("qk-pos-emb-head-dim", 64),
            "v_head_dim": a.size("v-head-dim", 128),
            "num_key_value_heads": self.c["num_attention_heads"],
            "num_experts_per_tok": a.size("moe-router-topk", 2).min(n),
            "n_routed_experts": n,
            "moe_intermediate_size": self.width,
        }));
        if !a.has("qk-layernorm") {
            self.apart.push(
                "latent attention without --qk-layernorm: norms of latents are taken as there"
                    .into(),
            );
        }
        self.beside();
        Ok("deepseek_v3")
    }

    /// Dense layers, an MLP beside experts, and layers that predict further tokens, as DeepSeek and GLM have them.
    fn beside(&mut self) {
        self.put(json!({
            "first_k_dense_replace": self.dense,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": self.shared / self.width,
            "num_nextn_predict_layers": self.further,
        }));
        if self.shared % self.width != 0 {
            self.apart.push(format!(
                "--moe-shared-expert-intermediate-size {}: taken as a multiple of an expert's width",
                self.shared
            ));
        }
    }

    fn mixture(&mut self) -> Result<&'static str> {
        let a = self.a;
        let (qk, qkv_bias) = (a.has("qk-layernorm"), a.has("add-qkv-bias"));
        let dense: Vec<usize> = (0..self.dense).collect();
        self.put(json!({ "decoder_sparse_step": 1, "mlp_only_layers": dense }));
        if self.shared > 0 && a.has("moe-shared-expert-gate") {
            self.put(json!({
                "shared_expert_intermediate_size": self.shared,
                "qkv_bias": qkv_bias,
            }));
            self.apart
                .extend(qk.then(|| "--qk-layernorm beside a shared expert with a gate".into()));
            return Ok("qwen2_moe");
        }
        if self.shared > 0 || self.further > 0 || qkv_bias {
            self.put(json!({
                "use_qk_norm": qk,
                "attention_bias": qkv_bias,
                "partial_rotary_factor": a.number("rotary-percent").unwrap_or(1.0),
            }));
            self.beside();
            return Ok("glm4_moe");
        }
        if qk || self.dense > 0 {
            let theirs = "norms of queries and keys, which Qwen3 has, are taken as there";
            self.apart.extend((!qk).then(|| theirs.into()));
            return Ok("qwen3_moe");
        }
        self.put(json!({ "intermediate_size": self.width }));
        Ok("mixtral")
    }

    fn plain(&mut self) -> Result<&'static str> {
        let a = self.a;
        if self.further > 0 {
            return Err(self.outside("--mtp-num-layers without experts"));
        }
        Ok(match (a.has("qk-layernorm"), a.has("add-qkv-bias")) {
            (true, bias) => {
                self.put(json!({ "attention_bias": bias }));
                "qwen3"
            }
            (false, true) => "qwen2",
            (false, false) => "llama",
        })
    }
}

/// How many layers without experts come first.
fn dense_layers(a: &Args, layers: usize) -> std::result::Result<usize, String> {
    let Some(text) = a.text("moe-layer-freq") else { return Ok(0) };
    let what = || format!("--moe-layer-freq {text}");
    let all: Vec<usize> = match text.parse::<usize>() {
        Ok(n) => (0..layers).map(|i| usize::from(n > 0 && i % n == 0)).collect(),
        Err(_) => pattern(text).ok_or_else(what)?,
    };
    let dense = all.iter().take_while(|x| **x == 0).count();
    match all.len() == layers && all[dense..].iter().all(|x| *x == 1) {
        true => Ok(dense),
        false => Err(format!("{}: dense layers between layers with experts", what())),
    }
}

/// Most layers of a list.
const MOST: usize = 4096;

/// A list such as `([0]*3+[1]*58)`, which is not executed.
fn pattern(text: &str) -> Option<Vec<usize>> {
    let mut out = vec![];
    for part in text.trim_matches(['(', ')']).split('+') {
        let (list, times) = part.split_once('*').unwrap_or((part, "1"));
        let list = list.trim().strip_prefix('[')?.strip_suffix(']')?.split(',');
        let list: Vec<usize> = list.map(|x| x.trim().parse().ok()).collect::<Option<_>>()?;
        let times: usize = times.trim().parse().ok()?;
        if list.len().saturating_mul(times) > MOST {
            return None;
        }
        (0..times).for_each(|_| out.extend(&list));
    }
    Some(out)
}
