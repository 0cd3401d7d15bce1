//! GPT-NeoX (Black et al., 2022), which Pythia is too: attention and MLP side by side, a quarter of each
//! head turns, one product makes q, k and v head by head.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "gpt_neox",
    keys: Keys {
        kv_heads: KvHeads::All,
        eps: Eps::Key("layer_norm_eps"),
        dropout: Dropped::of("attention_dropout", Some("hidden_dropout"), Some("hidden_dropout")),
        ..llama::FAMILY.keys
    },
    root: "gpt_neox",
    embedding: "embed_in",
    padding: false,
    positions: Positions::Rotary(Turning {
        theta: Some("rotary_emb_base"),
        part: Some(("rotary_pct", 0.25)),
        ..Turning::PLAIN
    }),
    beside: Beside::Unless("use_parallel_residual"),
    norm: Norm::LAYER,
    attention: Attention {
        module: "attention",
        heads: Heads::Joined(Linear::torch("query_key_value", Bias::Unless("attention_bias"))),
        o: Linear::torch("dense", Bias::Unless("attention_bias")),
        ..llama::FAMILY.attention
    },
    mlp: Mlp {
        activations: &[Activation::Gelu, Activation::GeluTanh],
        ..Mlp::of(["dense_h_to_4h", "dense_4h_to_h"], Bias::Always)
    },
    final_norm: "final_layer_norm",
    head: "embed_out",
    known: Known {
        idle: &[
            ("attention_probs_dropout_prob", Only::Numbers(&[0.0])),
            ("hidden_dropout_prob", Only::Numbers(&[0.0])),
        ],
        ..Known::NONE
    },
    ..llama::FAMILY
};
