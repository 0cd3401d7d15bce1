//! Layers that walk a state along the tokens in the place of attention.

/// Gated DeltaNet (Yang et al., 2024, *Gated Delta Networks*) in some layers. Its modules are called as in Qwen3-Next:
/// `in_proj_qkvz` and `in_proj_ba` by heads of keys, `conv1d`, `A_log`, `dt_bias`, `norm` and `out_proj`.
#[derive(Clone, Copy, Debug)]
pub struct Recurrent {
    /// Module of the block that holds it.
    pub module: &'static str,
    /// All layers but every so many-th, where `layer_types` names none: the key, and the number where it is absent.
    pub attention_every: (&'static str, usize),
    /// Keys of sizes, each with the number where it is absent.
    pub keys: RecurrentKeys,
}

/// Keys of the sizes of gated DeltaNet, each with the number where it is absent.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentKeys {
    /// Tokens that a convolution sees.
    pub taps: (&'static str, usize),
    /// Heads of queries and keys, and their width.
    pub key_heads: (&'static str, usize),
    pub key_width: (&'static str, usize),
    /// Heads of values, several of which share one of keys, and their width.
    pub value_heads: (&'static str, usize),
    pub value_width: (&'static str, usize),
}

impl RecurrentKeys {
    pub fn all(&self) -> [(&'static str, usize); 5] {
        [self.taps, self.key_heads, self.key_width, self.value_heads, self.value_width]
    }
}

/// Sizes of gated DeltaNet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecurrentSizes {
    pub taps: usize,
    pub key_heads: usize,
    pub key_width: usize,
    /// Of each head of keys.
    pub values_each: usize,
    pub value_width: usize,
}

impl RecurrentSizes {
    /// Elements of all queries, or of all keys.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_width
    }
    pub fn value_heads(&self) -> usize {
        self.key_heads * self.values_each
    }
    /// Elements of all values.
    pub fn values(&self) -> usize {
        self.value_heads() * self.value_width
    }
}
