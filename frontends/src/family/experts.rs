//! How the experts of a family are chosen, and where they stand.

use super::{Linear, WeightOrder};

/// A mixture of experts: a router chooses some of many MLPs for each token.
#[derive(Clone, Copy, Debug)]
pub struct Experts {
    /// Module of the block that holds router and experts.
    pub module: &'static str,
    pub router: &'static str,
    /// The router's logits have a bias.
    pub router_bias: bool,
    /// Module list of the experts within `module`, and the products of an expert.
    pub list: &'static str,
    /// None: experts are an up and a down with the activation between.
    pub gate: Option<&'static str>,
    pub up: &'static str,
    pub down: &'static str,
    pub stored: Stored,
    /// The product of gate and up is limited.
    pub clamped: Option<Clamped>,
    /// Experts take and make vectors of another size than the hidden one.
    pub narrowed: Option<Narrowed>,
    /// Key of the number of experts.
    pub count: &'static str,
    /// Key of how many a token uses.
    pub top_k: &'static str,
    /// Key of an expert's width.
    pub width: &'static str,
    pub score: Score,
    pub shared: Option<Shared>,
    pub layers: SparseLayers,
    /// The class has an auxiliary loss.
    pub aux: bool,
}

impl Experts {
    /// Every layer has them, in the place of its MLP, and tensors of their own.
    pub const EACH: Experts = Experts {
        module: "mlp",
        router: "gate",
        router_bias: false,
        list: "experts",
        gate: Some("gate_proj"),
        up: "up_proj",
        down: "down_proj",
        stored: Stored::Each,
        clamped: None,
        narrowed: None,
        count: "num_experts",
        top_k: "num_experts_per_tok",
        width: "moe_intermediate_size",
        score: Score::SHARES,
        shared: None,
        layers: SparseLayers::All,
        aux: false,
    };

    /// Every layer has them, in two tensors for all.
    pub const TOGETHER: Experts = Experts {
        router: "router",
        gate: Some("gate_up_proj"),
        up: "gate_up_proj",
        down: "down_proj",
        stored: Stored::Together { order: WeightOrder::InOut, in_turn: false, biases: false },
        count: "num_local_experts",
        width: "intermediate_size",
        ..Experts::EACH
    };
}

/// How a checkpoint has the products of all experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// A tensor for each product of each expert, `[out, in]`.
    Each,
    /// One tensor for gate and up of all experts, one behind the other or element by element in
    /// turn, and one for down.
    Together { order: WeightOrder, in_turn: bool, biases: bool },
}

/// (up + 1) · gate · σ(alpha · gate) in the place of up · activation(gate): of gates not above a
/// limit, and ups within it (OpenAI, 2025, *gpt-oss*). Keys of alpha and of the limit, each with
/// the number where it is absent.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Clamped {
    pub alpha: (&'static str, f64),
    pub limit: (&'static str, f64),
}

/// Products around the experts of a layer, if the key of the size between them is there.
#[derive(Clone, Copy, Debug)]
pub struct Narrowed {
    pub key: &'static str,
    pub into: Linear,
    pub out_of: Linear,
}

/// The MLP that every token passes.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// Its module, within that of the experts.
    pub module: &'static str,
    /// The module stands beside that of the experts.
    pub beside: bool,
    pub width: SharedWidth,
    /// Module beside it of a product whose sigmoid, one number for each token, it is multiplied by.
    pub gate: Option<&'static str>,
}

impl Shared {
    /// Without a gate.
    pub const fn of(module: &'static str, width: SharedWidth) -> Shared {
        Shared { module, beside: false, width, gate: None }
    }
}

/// How wide the MLP is that every token passes.
#[derive(Clone, Copy, Debug)]
pub enum SharedWidth {
    /// So many times as an expert, by this key, and so many where it is absent.
    Experts(&'static str, usize),
    /// By this key, and this where it is absent.
    Key(&'static str, usize),
}

impl SharedWidth {
    pub fn key(self) -> &'static str {
        match self {
            SharedWidth::Experts(key, _) | SharedWidth::Key(key, _) => key,
        }
    }
}

/// How a router's logits become choices and gates.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Score {
    /// What scores are of logits. The largest are chosen.
    pub function: ScoreFunction,
    /// Parameter that is added to scores for the choice and takes no part in the gates (DeepSeek-AI, 2024, *DeepSeek-V3*,
    /// 2.1.2).
    pub bias: Option<&'static str>,
    /// The bias is stored as one row [1, experts].
    pub bias_of_row: bool,
    pub groups: Groups,
    pub normed: Normed,
    /// Key of a factor of the gates, and the factor where it is absent.
    pub factor: Option<(&'static str, f64)>,
    /// Gates multiply what experts take, and not what they make.
    pub before: bool,
}

impl Score {
    /// The largest of a softmax, over their sum.
    pub const SHARES: Score = Score {
        function: ScoreFunction::Softmax,
        bias: None,
        bias_of_row: false,
        groups: Groups::None,
        normed: Normed::Always,
        factor: None,
        before: false,
    };
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScoreFunction {
    Softmax,
    Sigmoid,
}

/// Groups of experts that are chosen first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Groups {
    None,
    /// With `topk_method` `group_limited_greedy` those whose best is the largest (DeepSeek-AI, 2024, *DeepSeek-V2*, 2.2).
    Best,
    /// Those whose best two have the largest sum (DeepSeek-AI, 2024, *DeepSeek-V3*, 2.1.2). Where the config says nothing:
    /// groups, and how many of them are used.
    BestTwo {
        absent: (usize, usize),
    },
}

/// Whether gates are divided by their sum.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Normed {
    Never,
    Always,
    /// If this key is true.
    Key(&'static str),
    /// By their sum and a little more, unless this key is false.
    Unless(&'static str),
    /// By their sum, or this key's number if that is larger; and the number where it is absent.
    AtLeast(&'static str, f64),
}

/// Which layers have experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SparseLayers {
    All,
    /// Those of that kind, where layers have one half.
    Typed,
    /// All, if the number of experts is not 0.
    IfAny,
    /// Every `decoder_sparse_step`-th that `mlp_only_layers` does not name.
    Stepped,
    /// Every so many-th, between two.
    Between {
        /// Keys of the first and of the last, and where they are absent; a last of -1 is the model's last.
        first: (&'static str, usize),
        last: &'static str,
        /// Key of how many are from one to the next; 1 where it is absent.
        step: &'static str,
    },
    /// Those that this key lists, or every so many-th: by the other, 1 where it is absent.
    Listed(&'static str, &'static str),
    /// From `first_k_dense_replace` on; this many if the key is absent.
    From {
        absent: usize,
    },
}
