//! Llama (Touvron et al., 2023): RMS norms, rotary positions, grouped key-value heads, SwiGLU.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "llama",
    keys: Keys {
        hidden: "hidden_size",
        layers: "num_hidden_layers",
        heads: "num_attention_heads",
        kv_heads: KvHeads::Key("num_key_value_heads"),
        head_dim: Some("head_dim"),
        ffn: "intermediate_size",
        max_positions: Some("max_position_embeddings"),
        eps: Eps::Key("rms_norm_eps"),
        activation: "hidden_act",
        dropout: Dropped::of("attention_dropout", None, None),
    },
    root: "model",
    stored_root: None,
    embedding: "embed_tokens",
    factors: Factors::NONE,
    padding: true,
    positions: Positions::Rotary(Turning::PLAIN),
    beside: Beside::Never,
    layers: "layers",
    norm: Norm::RMS,
    attention: Attention {
        norm: Some("input_layernorm"),
        norm_behind: None,
        module: "self_attn",
        heads: Heads::of(Bias::Key("attention_bias")),
        o: Linear::torch("o_proj", Bias::Key("attention_bias")),
        window: Window::Never,
        scores: QkScale::OverRootOfHead,
        clip: None,
        softcap: None,
        norms: None,
        growth: Growth::Never,
        sinks: None,
        gated: false,
    },
    recurrent: None,
    mlp: Mlp {
        norm: Some("post_attention_layernorm"),
        norm_behind: None,
        module: "mlp",
        ratio: None,
        gate: Some(Linear::torch("gate_proj", Bias::Key("mlp_bias"))),
        up: Linear::torch("up_proj", Bias::Key("mlp_bias")),
        down: Linear::torch("down_proj", Bias::Key("mlp_bias")),
        activations: &[Activation::Silu],
    },
    halves: Halves::Both,
    experts: None,
    final_norm: "norm",
    head: "lm_head",
    head_bias: Bias::Never,
    mtp: None,
    softcap: None,
    scaled_residual_init: false,
    known: Known::NONE,
};

/// The attention of the families that have no biases in it.
pub(super) const PLAIN_ATTENTION: Attention = Attention {
    heads: Heads::of(Bias::Never),
    o: Linear::torch("o_proj", Bias::Never),
    ..FAMILY.attention
};

/// The MLP of the families that have no biases in it.
pub(super) const PLAIN_MLP: Mlp = Mlp {
    gate: Some(Linear::torch("gate_proj", Bias::Never)),
    up: Linear::torch("up_proj", Bias::Never),
    down: Linear::torch("down_proj", Bias::Never),
    ..FAMILY.mlp
};
