//! How the experts of a family are chosen, and where they stand.

/// A mixture of experts: a router chooses some of many MLPs for each token.
#[derive(Clone, Copy, Debug)]
pub struct Experts {
    /// Module of the block that holds router and experts.
    pub module: &'static str,
    pub router: &'static str,
    /// Module list of the experts within `module`, and the products of an expert.
    pub list: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
    /// Key of the number of experts.
    pub count: &'static str,
    /// Key of an expert's width.
    pub width: &'static str,
    pub score: Score,
    /// Module within `module` of the MLP that every token passes, of `n_shared_experts` widths.
    pub shared: Option<&'static str>,
    pub layers: SparseLayers,
    /// Where the config says nothing: experts, experts per token, width, coefficient of the
    /// auxiliary loss.
    pub absent: (usize, usize, usize, f64),
}

/// How a router's logits become choices and gates.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Score {
    /// The largest of a softmax.
    Softmax {
        /// Gates are divided by their sum.
        normed: Normed,
    },
    /// The largest of sigmoids plus this parameter, which takes no part in the gates, among groups of
    /// experts (DeepSeek-AI, 2024, *DeepSeek-V3*, 2.1.2).
    Sigmoid {
        bias: &'static str,
        /// Where the config says nothing: groups, how many of them are used, and the factor of the gates.
        absent: (usize, usize, f64),
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
