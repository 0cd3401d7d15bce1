//! Llama (Touvron et al., 2023): RMS norms, rotary positions, grouped key-value heads, SwiGLU.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "llama",
    keys: Keys {
        hidden: "hidden_size",
        layers: "num_hidden_layers",
        heads: "num_attention_heads",
        kv_heads: Some("num_key_value_heads"),
        head_dim: Some("head_dim"),
        ffn: "intermediate_size",
        max_positions: "max_position_embeddings",
        eps: Some("rms_norm_eps"),
        activation: "hidden_act",
        dropout: Dropped { attention: ("attention_dropout", 0.0), embedding: None, residual: None },
    },
    absent: Absent {
        kv_heads: None,
        head_dim: None,
        ffn_ratio: None,
        max_positions: 2048,
        eps: 1e-6,
        theta: 1e4,
        tied: false,
    },
    root: "model",
    embedding: "embed_tokens",
    factors: Factors::NONE,
    padding: PaddingToken::Key { absent: None },
    positions: Positions::Rotary(Turning::PLAIN),
    beside: Beside::Never,
    layers: "layers",
    norm: Norm::RMS,
    attention: Attention {
        norm: Some("input_layernorm"),
        norm_behind: None,
        module: "self_attn",
        heads: Heads::of(Bias::Key("attention_bias"), None),
        o: Linear::torch("o_proj", Bias::Key("attention_bias")),
        window: Window::Never,
        scores: Scores::OverRootOfHead,
        clip: None,
        softcap: None,
        growth: None,
        sinks: None,
    },
    mlp: Mlp {
        norm: Some("post_attention_layernorm"),
        norm_behind: None,
        module: "mlp",
        gate: Some(Linear::torch("gate_proj", Bias::Key("mlp_bias"))),
        up: Linear::torch("up_proj", Bias::Key("mlp_bias")),
        down: Linear::torch("down_proj", Bias::Key("mlp_bias")),
        activations: &[Activation::Silu],
    },
    experts: None,
    final_norm: "norm",
    head: "lm_head",
    head_bias: Bias::Never,
    mtp: None,
    softcap: None,
    scaled_residual_init: false,
    unused: &["rotary_emb.inv_freq"],
    known: Known::NONE,
};

/// The MLP of the families that have no biases in it.
pub(super) const PLAIN_MLP: Mlp = Mlp {
    gate: Some(Linear::torch("gate_proj", Bias::Never)),
    up: Linear::torch("up_proj", Bias::Never),
    down: Linear::torch("down_proj", Bias::Never),
    ..FAMILY.mlp
};
