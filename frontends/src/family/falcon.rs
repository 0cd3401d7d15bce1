//! Falcon (Almazrouei et al., 2023): attention and MLP side by side behind one layer norm; all heads share one key and
//! one value. Those of other sizes have several, in groups, and two norms: they are refused.

use super::*;

const fn part(name: &'static str) -> Linear {
    Linear { part: Some(name), ..Linear::torch("query_key_value", Bias::Key("bias")) }
}

pub(super) const FAMILY: Family = Family {
    model_type: "falcon",
    keys: Keys {
        kv_heads: None,
        head_dim: None,
        ffn: "ffn_hidden_size",
        eps: Some("layer_norm_epsilon"),
        activation: "activation",
        dropout: Dropped {
            attention: ("attention_dropout", 0.0),
            embedding: None,
            residual: Some(("hidden_dropout", 0.0)),
        },
        ..llama::FAMILY.keys
    },
    absent: Absent {
        kv_heads: Some(1),
        ffn_ratio: Some(4),
        eps: 1e-5,
        tied: true,
        ..llama::FAMILY.absent
    },
    root: "transformer",
    embedding: "word_embeddings",
    padding: PaddingToken::Never,
    beside: Beside::OneNorm,
    layers: "h",
    norm: Norm::LAYER,
    attention: Attention {
        module: "self_attention",
        heads: Heads::Plain { q: part("q"), k: part("k"), v: part("v"), norms: None },
        o: Linear::torch("dense", Bias::Key("bias")),
        ..llama::FAMILY.attention
    },
    mlp: Mlp {
        norm: None,
        gate: None,
        up: Linear::torch("dense_h_to_4h", Bias::Key("bias")),
        down: Linear::torch("dense_4h_to_h", Bias::Key("bias")),
        activations: &[Activation::Gelu, Activation::GeluTanh],
        ..llama::FAMILY.mlp
    },
    final_norm: "ln_f",
    known: Known {
        refused: &[
            ("alibi", Only::Flag(false)),
            ("multi_query", Only::Flag(true)),
            ("new_decoder_architecture", Only::Flag(false)),
            ("num_ln_in_parallel_attn", Only::Numbers(&[1.0])),
            ("parallel_attn", Only::Flag(true)),
        ],
        harmless: &["num_kv_heads"],
        ..Known::NONE
    },
    ..llama::FAMILY
};
