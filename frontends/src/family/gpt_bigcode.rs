//! StarCoder (Li et al., 2023): GPT-2 whose heads share one key and one value.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "gpt_bigcode",
    keys: Keys { kv_heads: KvHeads::One, ..gpt2::FAMILY.keys },
    attention: Attention {
        heads: Heads::fused(Linear::torch("c_attn", Bias::Always)),
        o: Linear::torch("c_proj", Bias::Always),
        ..gpt2::FAMILY.attention
    },
    mlp: Mlp {
        norm: gpt2::FAMILY.mlp.norm,
        ratio: Some(4),
        ..Mlp::of(["c_fc", "c_proj"], Bias::Always)
    },
    known: Known {
        refused: &[
            ("scale_attn_weights", Only::Flag(true)),
            ("multi_query", Only::Flag(true)),
            ("add_cross_attention", Only::Flag(false)),
        ],
        harmless: &["num_key_value_heads"],
        ..gpt2::FAMILY.known
    },
    ..gpt2::FAMILY
};
