//! Nemotron-H (NVIDIA, 2025, arXiv:2504.03624) and Nemotron 3: layers of one half each, behind one norm: Mamba-2,
//! attention in which nothing turns, an MLP of squared rectifiers without a gate, or experts of that kind chosen as
//! those of DeepSeek-V3 are.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "nemotron_h",
    keys: Keys {
        eps: Eps::Key("layer_norm_epsilon"),
        activation: "mlp_hidden_act",
        ..llama::FAMILY.keys
    },
    stored_root: Some("backbone"),
    embedding: "embeddings",
    padding: false,
    positions: Positions::None,
    attention: Attention { norm: Some("norm"), module: "mixer", ..llama::PLAIN_ATTENTION },
    recurrent: Some(MAMBA),
    mlp: Mlp {
        norm: Some("norm"),
        module: "mixer",
        up: Linear::torch("up_proj", BIAS),
        down: Linear::torch("down_proj", BIAS),
        ..arcee::FAMILY.mlp
    },
    halves: Halves::One("layers_block_type", "hybrid_override_pattern"),
    experts: Some(EXPERTS),
    final_norm: "norm_f",
    known: Known {
        aliases: ALIASES,
        // transformers divides weights by it that it makes, and not what it reads.
        harmless: HARMLESS,
        refused: &[("mamba_hidden_act", Only::Word("silu"))],
        ..Known::NONE
    },
    ..llama::FAMILY
};

const BIAS: Bias = Bias::Key("mlp_bias");

const MAMBA: Recurrent = Recurrent {
    module: "mixer",
    layers: Walking::Typed,
    mixer: Mixer::Mamba2(Mamba2 {
        expand: None,
        steps: StepSizes::AtLeast("time_step_min", 0.001),
        bias: Bias::Key("use_bias"),
        conv_bias: Bias::Unless("use_conv_bias"),
    }),
    keys: RecurrentKeys {
        taps: ("conv_kernel", 4),
        key_heads: ("n_groups", 8),
        key_width: ("ssm_state_size", 128),
        value_heads: ("mamba_num_heads", 128),
        value_width: ("mamba_head_dim", 64),
    },
};

const EXPERTS: Experts = Experts {
    module: "mixer",
    gate: None,
    narrowed: Some(Narrowed {
        key: "moe_latent_size",
        into: Linear::torch("fc1_latent_proj", BIAS),
        out_of: Linear::torch("fc2_latent_proj", BIAS),
    }),
    score: Score {
        groups: Groups::BestTwo { absent: (1, 1) },
        factor: Some(("routed_scaling_factor", 1.0)),
        ..deepseek_v3::SCORE
    },
    shared: Some(Shared::of(
        "shared_experts",
        SharedWidth::Key("moe_shared_expert_intermediate_size", 7688),
    )),
    layers: SparseLayers::Typed,
    ..deepseek_v3::EXPERTS
};

/// Names of Bamba, from which the first files were made, and of transformers.
const ALIASES: &[(&str, &str)] = &[
    ("layer_types", "layers_block_type"),
    ("num_local_experts", "n_routed_experts"),
    ("mamba_n_groups", "n_groups"),
    ("mamba_d_conv", "conv_kernel"),
    ("mamba_dt_min", "time_step_min"),
    ("mamba_conv_bias", "use_conv_bias"),
];

const HARMLESS: &[&str] = &[
    "attention_bias",
    "chunk_size",
    "expand",
    "hidden_dropout",
    "mamba_chunk_size",
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "n_shared_experts",
    "num_logits_to_keep",
    "num_nextn_predict_layers",
    "output_router_logits",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "sliding_window",
    "time_step_floor",
    "time_step_limit",
    "time_step_max",
    "use_mamba_kernels",
];
