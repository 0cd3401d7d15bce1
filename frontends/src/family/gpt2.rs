//! GPT-2 (Radford et al., 2019): layer norms with bias, learned positions, one fused projection to
//! q, k and v, weights stored `[in, out]`, a plain MLP with the tanh form of GELU.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "gpt2",
    keys: Keys {
        hidden: "n_embd",
        layers: "n_layer",
        heads: "n_head",
        kv_heads: None,
        head_dim: None,
        ffn: "n_inner",
        max_positions: "n_positions",
        eps: "layer_norm_epsilon",
        activation: "activation_function",
        dropout: Dropped {
            attention: ("attn_pdrop", 0.1),
            embedding: Some(("embd_pdrop", 0.1)),
            residual: Some(("resid_pdrop", 0.1)),
        },
    },
    absent: Absent {
        kv_heads: None,
        head_dim: None,
        ffn_ratio: Some(4),
        max_positions: 1024,
        eps: 1e-5,
        theta: 1e4,
        tied: true,
    },
    root: "transformer",
    embedding: "wte",
    factors: Factors::NONE,
    padding: PaddingToken::Never,
    positions: Positions::Learned("wpe"),
    beside: Beside::Never,
    layers: "h",
    norm: Norm::LAYER,
    attention: Attention {
        norm: Some("ln_1"),
        norm_behind: None,
        module: "attn",
        heads: Heads::Plain {
            q: Linear::conv1d("c_attn", Some("q")),
            k: Linear::conv1d("c_attn", Some("k")),
            v: Linear::conv1d("c_attn", Some("v")),
            norms: None,
        },
        o: Linear::conv1d("c_proj", None),
        window: Window::Never,
        scores: Scores::OverRootOfHead,
        clip: None,
        softcap: None,
        sinks: None,
    },
    mlp: Mlp {
        norm: Some("ln_2"),
        norm_behind: None,
        module: "mlp",
        gate: None,
        up: Linear::conv1d("c_fc", None),
        down: Linear::conv1d("c_proj", None),
        activations: &[Activation::GeluTanh],
    },
    experts: None,
    final_norm: "ln_f",
    head: "lm_head",
    softcap: None,
    scaled_residual_init: true,
    // Causal masks, which old checkpoints store.
    unused: &[".attn.bias", ".attn.masked_bias"],
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
        harmless: &[
            "n_ctx",
            "output_past",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ],
        ..Known::NONE
    },
};
