//! How the experts of a family are chosen, and where they stand.

use super::WeightOrder;

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
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
    pub stored: Stored,
    /// The product of gate and up is limited.
    pub clamped: Option<Clamped>,
    /// Key of the number of experts.
    pub count: &'static str,
    /// Key of an expert's width.
    pub width: &'static str,
    pub score: Score,
    pub shared: Option<Shared>,
    pub layers: SparseLayers,
    /// Where the config says nothing: experts, experts per token, width, coefficient of the
    /// auxiliary loss.
    pub absent: (usize, usize, usize, f64),
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

/// The MLP that every token passes.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// Its module, beside the experts'.
    pub module: &'static str,
    pub width: SharedWidth,
    /// Module beside it of a product whose sigmoid, one number for each token, it is multiplied by.
    pub gate: Option<&'static str>,
}

/// How wide the MLP is that every token passes.
#[derive(Clone, Copy, Debug)]
pub enum SharedWidth {
    /// So many times as an expert, by this key; once where it is absent.
    Experts(&'static str),
    /// By this key, and this where it is absent.
    Key(&'static str, usize),
}

impl SharedWidth {
    pub fn key(self) -> &'static str {
        match self {
            SharedWidth::Experts(key) | SharedWidth::Key(key, _) => key,
        }
    }
}

/// How a router's logits become choices and gates.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Score {
    /// The largest of a softmax.
    Softmax {
        /// Gates are divided by their sum.
        normed: Normed,
    },
    /// The largest of a softmax, of all experts or of groups whose best are the largest; gates are
    /// multiplied by a factor (DeepSeek-AI, 2024, *DeepSeek-V2*, 2.2).
    Limited,
    /// The largest of sigmoids plus this parameter, beside the experts, which takes no part in the gates, among
    /// groups of experts (DeepSeek-AI, 2024, *DeepSeek-V3*, 2.1.2).
    Sigmoid {
        bias: &'static str,
        /// Where the config says nothing: groups, how many of them are used, and the factor of the gates. `None`:
        /// there are no groups, and gates are divided by their sum.
        absent: Option<(usize, usize, f64)>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Normed {
    Always,
    /// If this key is true.
    Key(&'static str),
}

/// Which layers have experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SparseLayers {
    All,
    /// Every `decoder_sparse_step`-th that `mlp_only_layers` does not name.
    Stepped,
    /// From `first_k_dense_replace` on; this many if the key is absent.
    From {
        absent: usize,
    },
}
