//! StarCoder (Li et al., 2023): GPT-2 whose heads share one key and one value.

use super::*;

const fn part(name: &'static str) -> Linear {
    Linear { part: Some(name), ..Linear::torch("c_attn", Bias::Always) }
}

pub(super) const FAMILY: Family = Family {
    model_type: "gpt_bigcode",
    absent: Absent { kv_heads: Some(1), ..gpt2::FAMILY.absent },
    attention: Attention {
        heads: Heads::Plain { q: part("q"), k: part("k"), v: part("v"), norms: None },
        o: Linear::torch("c_proj", Bias::Always),
        ..gpt2::FAMILY.attention
    },
    mlp: Mlp {
        up: Linear::torch("c_fc", Bias::Always),
        down: Linear::torch("c_proj", Bias::Always),
        activations: &[Activation::GeluTanh, Activation::Gelu],
        ..gpt2::FAMILY.mlp
    },
    scaled_residual_init: true,
    known: Known {
        refused: &[
            ("scale_attn_weights", Only::Flag(true)),
            ("multi_query", Only::Flag(true)),
            ("add_cross_attention", Only::Flag(false)),
        ],
        harmless: &[
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
            "inference_runner",
            "max_batch_size",
            "max_sequence_length",
            "pad_key_length",
            "pre_allocate_kv_cache",
            "validate_runner_input",
            "num_key_value_heads",
            "n_ctx",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ],
        ..gpt2::FAMILY.known
    },
    ..gpt2::FAMILY
};
