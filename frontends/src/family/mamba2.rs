//! Mamba-2 (Dao and Gu, 2024, *Transformers are SSMs*): recurrences in all layers, and nothing behind them.

use super::*;

const WALKS: Recurrent = Recurrent {
    module: "mixer",
    layers: Walking::All,
    mixer: Mixer::Mamba2(Mamba2 {
        expand: Some(("expand", 2)),
        steps: StepSizes::LIMIT,
        bias: Bias::Key("use_bias"),
        conv_bias: Bias::Unless("use_conv_bias"),
    }),
    keys: RecurrentKeys {
        taps: ("conv_kernel", 4),
        key_heads: ("n_groups", 8),
        key_width: ("state_size", 128),
        value_heads: ("num_heads", 128),
        value_width: ("head_dim", 64),
    },
};

pub(super) const FAMILY: Family = Family {
    model_type: "mamba2",
    keys: Keys {
        heads: "num_heads",
        kv_heads: KvHeads::All,
        max_positions: None,
        eps: Eps::Key("layer_norm_epsilon"),
        dropout: Dropped::NONE,
        ..llama::FAMILY.keys
    },
    root: "backbone",
    embedding: "embeddings",
    padding: false,
    positions: Positions::None,
    attention: Attention { norm: Some("norm"), ..llama::PLAIN_ATTENTION },
    recurrent: Some(WALKS),
    mlp: llama::PLAIN_MLP,
    halves: Halves::First,
    final_norm: "norm_f",
    known: Known {
        // transformers divides weights by it that it has read.
        refused: &[("rescale_prenorm_residual", Only::Flag(false))],
        harmless: &[
            "chunk_size",
            "residual_in_fp32",
            "time_step_floor",
            "time_step_max",
            "time_step_min",
            "time_step_rank",
        ],
        ..Known::NONE
    },
    ..llama::FAMILY
};
