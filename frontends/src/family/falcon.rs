//! Falcon (Almazrouei et al., 2023): attention and MLP side by side behind one layer norm; all heads share one key and
//! one value. Those of other sizes have several, in groups, and two norms: they are refused.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "falcon",
    keys: Keys {
        kv_heads: KvHeads::One,
        head_dim: None,
        ffn: "ffn_hidden_size",
        eps: Eps::Key("layer_norm_epsilon"),
        activation: "activation",
        dropout: Dropped::of("attention_dropout", None, Some("hidden_dropout")),
        ..llama::FAMILY.keys
    },
    embedding: "word_embeddings",
    positions: llama::FAMILY.positions,
    beside: Beside::OneNorm,
    attention: Attention {
        module: "self_attention",
        heads: Heads::fused(Linear::torch("query_key_value", Bias::Key("bias"))),
        o: Linear::torch("dense", Bias::Key("bias")),
        ..llama::FAMILY.attention
    },
    mlp: Mlp {
        activations: gpt_neox::FAMILY.mlp.activations,
        ratio: Some(4),
        ..Mlp::of(["dense_h_to_4h", "dense_4h_to_h"], Bias::Key("bias"))
    },
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
    scaled_residual_init: false,
    ..gpt2::FAMILY
};
