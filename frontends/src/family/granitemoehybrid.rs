//! Granite 4 (IBM, 2025): the factors of Granite, Mamba-2 in the place of attention in most layers, and an MLP beside the experts
//! of Granite 3, or alone where there are none of them. Nothing turns, unless a key says so.

use super::*;

const WIDTH: &str = "shared_intermediate_size";

pub(super) const FAMILY: Family = Family {
    model_type: "granitemoehybrid",
    keys: Keys { ffn: WIDTH, ..llama::FAMILY.keys },
    positions: Positions::Rotary(Turning {
        still: Still::Unless("position_embedding_type", "rope"),
        ..Turning::PLAIN
    }),
    recurrent: Some(bamba::MAMBA),
    mlp: Mlp {
        module: "shared_mlp",
        gate: Some(Linear::torch("input_linear", Bias::Never).slice("gate")),
        up: Linear::torch("input_linear", Bias::Never).slice("up"),
        down: Linear::torch("output_linear", Bias::Never),
        ..llama::FAMILY.mlp
    },
    experts: Some(Experts {
        shared: Some(Shared {
            beside: true,
            ..Shared::of("shared_mlp", SharedWidth::Key(WIDTH, 1024))
        }),
        layers: SparseLayers::IfAny,
        ..granitemoe::EXPERTS
    }),
    known: Known {
        aliases: &[("layers_block_type", "layer_types")],
        harmless: &["mamba_chunk_size"],
        ..Known::NONE
    },
    ..granite::FAMILY
};
