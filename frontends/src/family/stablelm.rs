//! StableLM 2 (Bellagente et al., 2024): Llama with layer norms and biases of q, k and v, of which
//! a quarter of each head turns.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "stablelm",
    keys: Keys {
        head_dim: None,
        eps: Eps::Key("layer_norm_eps"),
        dropout: Dropped::of("attention_dropout", None, Some("hidden_dropout")),
        ..llama::FAMILY.keys
    },
    norm: Norm::LAYER,
    positions: Positions::Rotary(Turning {
        part: Some(("partial_rotary_factor", 0.25)),
        ..Turning::PLAIN
    }),
    attention: Attention {
        heads: Heads::of(Bias::Key("use_qkv_bias")),
        o: Linear::torch("o_proj", Bias::Never),
        ..llama::FAMILY.attention
    },
    mlp: llama::PLAIN_MLP,
    known: Known {
        refused: &[
            ("qk_layernorm", Only::Flag(false)),
            ("use_parallel_residual", Only::Flag(false)),
        ],
        ..Known::NONE
    },
    ..llama::FAMILY
};
