//! How the attention of a family is made.

use super::{Bias, Linear, Softcap};

/// The attention of a block.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Norm before it.
    pub norm: Option<&'static str>,
    /// Norm behind it, before the residual.
    pub norm_behind: Option<&'static str>,
    /// Module of the block that holds it.
    pub module: &'static str,
    pub heads: Heads,
    /// Norms of queries and of keys, of heads that are made by products of their own.
    pub norms: Option<HeadNorms>,
    pub o: Linear,
    pub window: Window,
    pub scores: QkScale,
    /// Queries, keys and values are limited to this key's number, before they turn, if it is one.
    pub clip: Option<&'static str>,
    /// Of the scores.
    pub softcap: Option<Softcap>,
    pub growth: Growth,
    /// Parameter of a logit for each head that takes part in the softmax and has no value (OpenAI,
    /// 2025, *gpt-oss*).
    pub sinks: Option<&'static str>,
    /// Of each head the product of queries makes as much again, whose sigmoid the output is multiplied by.
    pub gated: bool,
}

/// What the products of queries and keys are multiplied by.
#[derive(Clone, Copy, Debug)]
pub enum QkScale {
    /// 1 over the root of the head size.
    OverRootOfHead,
    /// 1 over the root of a key's number, and of this where it is absent.
    OverRootOf(&'static str, f64),
    /// That of a key, and this where it is absent.
    Times(&'static str, f64),
}

/// Which queries are larger the further they stand (Nakanishi, 2025, *Scalable-Softmax*).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Growth {
    Never,
    /// Of layers that do not turn, if `attn_temperature_tuning` is not false: times 1 + a log(1 + ⌊(p + 1) / n⌋) at position
    /// p, by `attn_scale` and `floor_scale`.
    Still,
    /// Of all layers, times 1 + a log(1 + ⌊p / n⌋): a is `llama_4_scaling_beta` of the object of rotary numbers, n the
    /// positions before scaling.
    Rotary,
}

/// How queries, keys and values are made.
// All of them are constants.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy, Debug)]
pub enum Heads {
    /// Each by a product with the hidden state.
    Plain { q: Linear, k: Linear, v: Linear },
    /// By one product: of each head its q, k and v, one after the other.
    Joined(Linear),
    /// From two normed latent vectors; one part of each key turns and is the same for all heads
    /// (DeepSeek-AI, 2024, *DeepSeek-V2*, 2.1).
    Latent(Latent),
}

impl Heads {
    /// By products `q_proj`, `k_proj` and `v_proj`, alike but for their sizes.
    pub const fn of(bias: Bias) -> Heads {
        Heads::Plain {
            q: Linear::torch("q_proj", bias),
            k: Linear::torch("k_proj", bias),
            v: Linear::torch("v_proj", bias),
        }
    }

    /// By products whose weights are slices of one tensor: all q, then all k, then all v.
    pub const fn fused(all: Linear) -> Heads {
        Heads::Plain { q: all.slice("q"), k: all.slice("k"), v: all.slice("v") }
    }
}

/// Norms of queries and of keys.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms {
    pub modules: [&'static str; 2],
    pub over: NormedOver,
    /// They are there if this key is true, and where it is absent if this says so; `None`: always.
    pub key: Option<(&'static str, bool)>,
    /// Of what has turned, in the layers in which it does.
    pub behind: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NormedOver {
    /// Every head is normed by itself, without weights.
    Bare,
    /// Every head is normed by itself.
    Head,
    /// The same with weights of its own.
    OwnHead,
    /// All heads together.
    All,
}

impl HeadNorms {
    /// Of every head.
    pub const EACH: HeadNorms = HeadNorms {
        modules: ["q_norm", "k_norm"],
        over: NormedOver::Head,
        key: None,
        behind: false,
    };
}

/// Modules of multi-head latent attention; sizes are the config's `q_lora_rank`, `kv_lora_rank`,
/// `qk_nope_head_dim`, `qk_rope_head_dim` and `v_head_dim`.
#[derive(Clone, Copy, Debug)]
pub struct Latent {
    /// Queries without a latent vector, where `q_lora_rank` is null.
    pub q: Linear,
    pub q_down: Linear,
    pub q_norm: &'static str,
    pub q_up: Linear,
    /// To the latent vector of keys and values, and the part of keys that turns.
    pub kv_down: Linear,
    pub kv_norm: &'static str,
    pub kv_up: Linear,
    /// The sizes where the config has none.
    pub absent: LatentSizes,
}

/// Sizes of multi-head latent attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LatentSizes {
    /// Of the latent vector of queries; `None`: there is none.
    pub q_rank: Option<usize>,
    pub kv_rank: usize,
    /// Elements of a head of q and k that do not turn.
    pub still: usize,
    /// Elements that turn.
    pub turning: usize,
    /// Elements of a head of v.
    pub value: usize,
}

/// Which layers have a window where `layer_types` names none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unlisted {
    /// From `max_window_layers` on, or this one.
    From(usize),
    /// The first, third and so on before `max_window_layers`, or this one.
    OddBefore(usize),
    /// Those that do not turn.
    Still,
    /// Those that do.
    Turning,
}

impl Window {
    /// The key of its width.
    pub fn key(self) -> &'static str {
        match self {
            Window::Chunks(key, _) => key,
            _other => "sliding_window",
        }
    }
}

/// Which layers see only the last tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Window {
    Never,
    /// All, if `sliding_window` is a number; this if the key is absent.
    All {
        absent: Option<usize>,
        /// With `layer_types`: those that it names.
        listed: bool,
    },
    /// Those that `layer_types` names `chunked_attention`, or those that turn, see the tokens of their chunk of so many: by
    /// this key, and so many where it is absent.
    Chunks(&'static str, usize),
    /// All, if `use_sliding_window` is true and `sliding_window` a number.
    AllSwitched {
        absent: usize,
    },
    /// With `use_sliding_window`: those that `layer_types` names.
    Switched {
        absent: Option<usize>,
        unlisted: Unlisted,
    },
    /// Those that `layer_types` names, or all but every so many-th: by this key, if there is one.
    Alternating {
        absent: usize,
        every: usize,
        key: Option<&'static str>,
    },
}
