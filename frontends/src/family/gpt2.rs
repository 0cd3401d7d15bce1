//! GPT-2 (Radford et al., 2019): layer norms with bias, learned positions, one fused projection to
//! q, k and v, weights stored `[in, out]`, a plain MLP with the tanh form of GELU.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "gpt2",
    keys: Keys {
        hidden: "n_embd",
        layers: "n_layer",
        heads: "n_head",
        kv_heads: KvHeads::All,
        head_dim: None,
        ffn: "n_inner",
        max_positions: Some("n_positions"),
        eps: Eps::Key("layer_norm_epsilon"),
        activation: "activation_function",
        dropout: Dropped::of("attn_pdrop", Some("embd_pdrop"), Some("resid_pdrop")),
    },
    root: "transformer",
    embedding: "wte",
    padding: false,
    positions: Positions::Learned("wpe"),
    layers: "h",
    norm: Norm::LAYER,
    attention: Attention {
        norm: Some("ln_1"),
        module: "attn",
        heads: Heads::fused(Linear::conv1d("c_attn")),
        o: Linear::conv1d("c_proj"),
        ..llama::FAMILY.attention
    },
    mlp: Mlp {
        norm: Some("ln_2"),
        ratio: Some(4),
        gate: None,
        up: Linear::conv1d("c_fc"),
        down: Linear::conv1d("c_proj"),
        activations: &[Activation::GeluTanh],
        ..llama::FAMILY.mlp
    },
    final_norm: "ln_f",
    scaled_residual_init: true,
    known: Known {
        aliases: &[
            ("hidden_size", "n_embd"),
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
            ("max_position_embeddings", "n_positions"),
        ],
        refused: &[
            ("scale_attn_weights", Only::Flag(true)),
            ("scale_attn_by_inverse_layer_idx", Only::Flag(false)),
            ("add_cross_attention", Only::Flag(false)),
        ],
        harmless: &["output_past"],
        ..Known::NONE
    },
    ..llama::FAMILY
};
