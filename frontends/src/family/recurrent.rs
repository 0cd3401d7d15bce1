//! Layers that walk a state along the tokens in the place of attention.

use super::Bias;

/// Recurrences in some layers.
#[derive(Clone, Copy, Debug)]
pub struct Recurrent {
    /// Module of the block that holds it.
    pub module: &'static str,
    pub layers: Walking,
    pub mixer: Mixer,
    /// Keys of sizes, each with the number where it is absent.
    pub keys: RecurrentKeys,
}

/// The layers that walk a state.
#[derive(Clone, Copy, Debug)]
pub enum Walking {
    All,
    /// As `layer_types` says; without it all but every so many-th: the key, and the number where it is absent.
    Every(&'static str, usize),
    /// As `layer_types` says; all without it, or those of that kind where layers have one half.
    Typed,
    /// All but those whose numbers this key lists.
    AllBut(&'static str),
}

impl Walking {
    /// Its keys.
    pub fn reads(self) -> impl Iterator<Item = &'static str> {
        let (types, own) = match self {
            Walking::All => (None, None),
            Walking::Every(key, _) => (Some("layer_types"), Some(key)),
            Walking::Typed => (Some("layer_types"), None),
            Walking::AllBut(key) => (None, Some(key)),
        };
        types.into_iter().chain(own)
    }
}

/// What walks.
#[derive(Clone, Copy, Debug)]
pub enum Mixer {
    /// Gated DeltaNet (Yang et al., 2024, *Gated Delta Networks*). Its modules are called as in Qwen3-Next: `in_proj_qkvz` and
    /// `in_proj_ba` by heads of keys, `conv1d`, `A_log`, `dt_bias`, `norm` and `out_proj`.
    DeltaNet,
    Mamba2(Mamba2),
}

impl Mixer {
    /// Of the product behind it.
    pub fn out_bias(self) -> Bias {
        match self {
            Mixer::DeltaNet => Bias::Never,
            Mixer::Mamba2(m) => m.bias,
        }
    }
}

/// Mamba-2 (Dao and Gu, 2024, *Transformers are SSMs*). Its modules are `in_proj` (z, x, B, C and step sizes), `conv1d`, `A_log`,
/// `dt_bias`, `D`, `norm` by groups and `out_proj`. Groups are heads of keys, B their keys and C their queries.
#[derive(Clone, Copy, Debug)]
pub struct Mamba2 {
    /// Elements of all values over the hidden size, where that is said: its key, and the number where it is absent.
    pub expand: Option<(&'static str, usize)>,
    pub steps: StepSizes,
    /// Of both products.
    pub bias: Bias,
    pub conv_bias: Bias,
}

/// What limits step sizes.
#[derive(Clone, Copy, Debug)]
pub enum StepSizes {
    /// A key of the least and the most.
    Within(&'static str),
    /// A key of the least, and the number where it is absent.
    AtLeast(&'static str, f64),
}

impl StepSizes {
    pub const LIMIT: StepSizes = StepSizes::Within("time_step_limit");

    pub fn key(self) -> &'static str {
        match self {
            StepSizes::Within(key) | StepSizes::AtLeast(key, _) => key,
        }
    }
}

/// Keys of the sizes of a recurrence, each with the number where it is absent.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentKeys {
    /// Tokens that a convolution sees.
    pub taps: (&'static str, usize),
    /// Heads of queries and keys, and their width.
    pub key_heads: (&'static str, usize),
    pub key_width: (&'static str, usize),
    /// Heads of values, several of which share one of keys, and their width; 0: what `expand` leaves for each.
    pub value_heads: (&'static str, usize),
    pub value_width: (&'static str, usize),
}

impl RecurrentKeys {
    pub fn all(&self) -> [(&'static str, usize); 5] {
        [self.taps, self.key_heads, self.key_width, self.value_heads, self.value_width]
    }
}

/// Sizes of a recurrence.
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
