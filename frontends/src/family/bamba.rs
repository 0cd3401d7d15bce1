//! Bamba (IBM, Princeton, CMU and UIUC, 2024): Llama with Mamba-2 in the place of attention in most layers.

use super::*;

/// Mamba-2 by the keys of IBM's hybrids.
pub(super) const MAMBA: Recurrent = Recurrent {
    module: "mamba",
    layers: Walking::Typed,
    mixer: Mixer::Mamba2(Mamba2 {
        expand: Some(("mamba_expand", 2)),
        steps: StepSizes::LIMIT,
        bias: Bias::Key("mamba_proj_bias"),
        conv_bias: Bias::Unless("mamba_conv_bias"),
    }),
    keys: RecurrentKeys {
        taps: ("mamba_d_conv", 4),
        key_heads: ("mamba_n_groups", 1),
        key_width: ("mamba_d_state", 256),
        value_heads: ("mamba_n_heads", 128),
        value_width: ("mamba_d_head", 0),
    },
};

pub(super) const FAMILY: Family = Family {
    model_type: "bamba",
    positions: Positions::Rotary(Turning {
        part: Some(("partial_rotary_factor", 0.5)),
        ..Turning::PLAIN
    }),
    recurrent: Some(Recurrent { layers: Walking::AllBut("attn_layer_indices"), ..MAMBA }),
    mlp: Mlp { norm: Some("pre_ff_layernorm"), module: "feed_forward", ..llama::FAMILY.mlp },
    final_norm: "final_layernorm",
    known: Known {
        refused: &[("z_loss_coefficient", Only::Numbers(&[0.0]))],
        harmless: &["mamba_chunk_size", "num_logits_to_keep"],
        ..Known::NONE
    },
    ..llama::FAMILY
};
