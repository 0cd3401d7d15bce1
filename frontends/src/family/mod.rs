//! Model families as data. A new family is one file with one descriptor, and one line of
//! [`FAMILIES`].
//!
//! All families here are decoders of the same plan: embedding, blocks of normed attention and
//! normed MLP around a residual stream, norm, output projection. A descriptor says which norm,
//! which MLP, which positions, where config.json keeps the sizes, and how the modules are called.

mod attention;
mod deepseek_v3;
mod experts;
mod gemma2;
mod gemma3;
mod glm4_moe;
mod gpt2;
mod gpt_neox;
mod held;
mod keys;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;

pub use attention::{Attention, HeadNorms, Heads, Latent, LatentSizes, NormedOver, Window};
pub use experts::{Experts, Normed, Score, SparseLayers};
pub use keys::{Known, Only};

use crate::config::Config;
use shardc_ir::diag::Result;
use shardc_ir::names::nearest;

/// All known families.
pub const FAMILIES: [&Family; 14] = [
    &llama::FAMILY,
    &mistral::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &gpt2::FAMILY,
    &gemma2::FAMILY,
    &mixtral::FAMILY,
    &qwen3_moe::FAMILY,
    &deepseek_v3::FAMILY,
    &olmo2::FAMILY,
    &phi3::FAMILY,
    &gemma3::FAMILY,
    &gpt_neox::FAMILY,
    &glm4_moe::FAMILY,
];

/// A family of models: its block recipe and its map of weights.
#[derive(Debug)]
pub struct Family {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    pub keys: Keys,
    pub absent: Absent,
    /// Module that holds the model; checkpoint names may lack it.
    pub root: &'static str,
    pub embedding: &'static str,
    /// Its rows are multiplied by √hidden.
    pub scaled_embedding: bool,
    pub padding: PaddingToken,
    pub positions: Positions,
    /// Whether attention and MLP of a block may stand side by side.
    pub beside: Beside,
    /// Module list of the blocks.
    pub layers: &'static str,
    pub norm: Norm,
    pub attention: Attention,
    /// Of the layers that have no experts.
    pub mlp: Mlp,
    /// Of the other layers, if there are any.
    pub experts: Option<Experts>,
    pub final_norm: &'static str,
    /// Module of the output projection.
    pub head: &'static str,
    /// Of the logits.
    pub softcap: Option<Softcap>,
    /// Weights that write to the residual stream start smaller by √(2·layers), as GPT-2's do.
    pub scaled_residual_init: bool,
    /// Ends of the names of checkpoint tensors that are not weights.
    pub unused: &'static [&'static str],
    /// Its keys of config.json beside those that the fields above name.
    pub known: Known,
}

/// Names of the keys that families call differently.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    pub hidden: &'static str,
    pub layers: &'static str,
    pub heads: &'static str,
    /// `None`: as many key-value heads as heads.
    pub kv_heads: Option<&'static str>,
    /// `None`: hidden size / heads, whatever the config says.
    pub head_dim: Option<&'static str>,
    pub ffn: &'static str,
    pub max_positions: &'static str,
    pub eps: &'static str,
    pub activation: &'static str,
    pub dropout: Dropped,
}

/// Keys of rates of dropout, each with the rate where it is absent.
#[derive(Clone, Copy, Debug)]
pub struct Dropped {
    /// Of the probabilities of attention.
    pub attention: (&'static str, f64),
    /// Of embeddings.
    pub embedding: Option<(&'static str, f64)>,
    /// Of what blocks add to the residual stream.
    pub residual: Option<(&'static str, f64)>,
}

impl Dropped {
    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, f64)> {
        [Some(self.attention), self.embedding, self.residual].into_iter().flatten()
    }
}

/// What transformers assumes where the config says nothing.
#[derive(Clone, Copy, Debug)]
pub struct Absent {
    /// `None`: as many as heads.
    pub kv_heads: Option<usize>,
    /// `None`: hidden size / heads.
    pub head_dim: Option<usize>,
    /// MLP width over hidden size; `None`: the width must be given.
    pub ffn_ratio: Option<usize>,
    pub max_positions: usize,
    pub eps: f64,
    /// Base of the rotary frequencies.
    pub theta: f64,
    pub tied: bool,
}

/// Which row of the embedding has no gradient of its look-up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PaddingToken {
    /// None: the embedding is made without `padding_idx`.
    Never,
    /// That of `pad_token_id`; this one if the key is absent, none if it is null.
    Key { absent: Option<usize> },
}

/// How a model knows where a token stands.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Positions {
    /// Queries and keys turn with their position.
    Rotary(Turning),
    /// A second embedding, of this module.
    Learned(&'static str),
}

/// How queries and keys turn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Turning {
    /// Key of the base of the frequencies, where they have no object of their own.
    pub theta: &'static str,
    /// The part of a head that turns: its key there, and the part where it is absent. `None`: all of it.
    pub part: Option<(&'static str, f64)>,
    /// A config may give numbers by kinds of layers, which is compiled of `local` only.
    pub kinds: bool,
    /// Layers with a window turn by a base of their own: its key, and the base where it is absent.
    pub local: Option<(&'static str, f64)>,
    /// The one scaling is `longrope`, also called `su` or `yarn`: its `original_max_position_embeddings`
    /// stands in the config itself, and is this where it is absent.
    pub stretched: Option<usize>,
}

impl Turning {
    /// Whole heads, in all layers alike.
    pub const PLAIN: Turning =
        Turning { theta: "rope_theta", part: None, kinds: false, local: None, stretched: None };
}

/// How the halves of a block follow each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Beside {
    /// The MLP takes what attention has added to.
    Never,
    /// Both take the block's operand, unless this key is false.
    Unless(&'static str),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Norm {
    /// x / rms(x) · weight (Zhang and Sennrich, 2019).
    Rms,
    /// x / rms(x) · (1 + weight).
    RmsAroundOne,
    /// (x - mean) / deviation · weight + bias (Ba et al., 2016).
    Layer,
}

/// c tanh(x / c) in the place of x: the key of c, and c if the key is absent, or none; none where it is null.
#[derive(Clone, Copy, Debug)]
pub struct Softcap {
    pub key: &'static str,
    pub absent: Option<f64>,
}

#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    /// Norm before it.
    pub norm: Option<&'static str>,
    /// Norm behind it, before the residual.
    pub norm_behind: Option<&'static str>,
    /// Module of the block that holds it.
    pub module: &'static str,
    /// Multiplied with the activation of this projection, if there is one.
    pub gate: Option<Linear>,
    pub up: Linear,
    pub down: Linear,
    /// The known ones; the first is that of a config that names none.
    pub activations: &'static [Activation],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    Silu,
    /// x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))).
    GeluTanh,
    /// x/2 (1 + erf(x/√2)).
    Gelu,
}

/// A product with a weight, and perhaps a bias.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// Module within attention or MLP.
    pub module: &'static str,
    pub layout: WeightOrder,
    pub bias: Bias,
    /// The weight is a slice of a fused tensor: its name, after the tensor's. The slices of one
    /// module lie one after the other, in the order q, k, v, or gate, up.
    pub part: Option<&'static str>,
}

/// Order of a weight's dims in the checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WeightOrder {
    /// `[out, in]`, as torch.nn.Linear.
    OutIn,
    /// `[in, out]`, as the Conv1D of GPT-2.
    InOut,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bias {
    Never,
    Always,
    /// If this key of the config is true.
    Key(&'static str),
    /// Unless this key of the config is false.
    Unless(&'static str),
}

impl Activation {
    /// The config's words for it.
    pub fn words(self) -> &'static [&'static str] {
        match self {
            Activation::Silu => &["silu", "swish"],
            Activation::GeluTanh => &["gelu_new", "gelu_pytorch_tanh", "gelu_fast"],
            Activation::Gelu => &["gelu"],
        }
    }
}

impl Linear {
    /// A torch.nn.Linear.
    pub const fn torch(module: &'static str, bias: Bias) -> Linear {
        Linear { module, layout: WeightOrder::OutIn, bias, part: None }
    }

    /// A Conv1D with bias; `part` names its slice if it is fused.
    pub const fn conv1d(module: &'static str, part: Option<&'static str>) -> Linear {
        Linear { module, layout: WeightOrder::InOut, bias: Bias::Always, part }
    }
}

impl Family {
    /// The checkpoint's names of the embedding, after this prefix, and of the output projection.
    pub fn tables(&self, prefix: &str) -> [String; 2] {
        [format!("{prefix}{}.weight", self.embedding), format!("{}.weight", self.head)]
    }

    /// What stands before every name but the output projection's: `model.`, or nothing if the
    /// checkpoint has the names without it.
    pub fn prefix(&self, has: impl Fn(&str) -> bool) -> String {
        let root = format!("{}.", self.root);
        let name = |prefix: &str| format!("{prefix}{}.weight", self.embedding);
        if !has(&name(&root)) && has(&name("")) { String::new() } else { root }
    }
}

/// A config with its family's other names of keys, and the family.
///
/// # Errors
/// `config` if it is no object, and those of [`find`].
pub fn of<'a>(config: &'a serde_json::Value, place: &str) -> Result<(Config<'a>, &'static Family)> {
    let config = Config::new(config, place)?;
    let family = find(&config)?;
    Ok((config.called(family.known.aliases), family))
}

/// The family of a config. Errors: `unknown-model-type`, exit status 4, with the known ones.
pub fn find(config: &Config) -> Result<&'static Family> {
    let known = || FAMILIES.iter().map(|f| f.model_type);
    let list = known().collect::<Vec<_>>().join(", ");
    let Some(word) = config.word_if("model_type")? else {
        let what = "`model_type` is missing";
        return Err(config.error("model_type", what, format!("the known types are {list}")));
    };
    if let Some(f) = FAMILIES.iter().find(|f| f.model_type == word) {
        return Ok(f);
    }
    let what = format!("model type `{word}` is not known");
    let help = format!("the {} known types are {list}", FAMILIES.len());
    let d = config.unsupported("unknown-model-type", "model_type", what, help);
    let d = held::advise(config, word, d).unwrap_or_else(|d| match nearest(word, known(), 1)[..] {
        [] => d,
        [near, ..] => d.help(format!("the nearest is `{near}`")),
    });
    Err(d.help("any other model comes as an archive of torch.export: shardc import MODEL.pt2"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_nearest_family_is_named() {
        let c = json!({"model_type": "qwen4"});
        let d = find(&Config::new(&c, "config.json").unwrap()).unwrap_err();
        assert_eq!((d.code, d.exit as i32), ("unknown-model-type", 4));
        let all = d.help.join("\n");
        assert!(
            all.contains(
                "llama, mistral, qwen2, qwen3, gpt2, gemma2, mixtral, qwen3_moe, deepseek_v3, \
                 olmo2, phi3, gemma3_text, gpt_neox, glm4_moe"
            ) && all.contains("`qwen2`"),
            "{all}"
        );
    }

    #[test]
    fn the_prefix_follows_the_checkpoint() {
        let f = &gpt2::FAMILY;
        assert_eq!(f.prefix(|_| false), "transformer.");
        assert_eq!(f.prefix(|n| n == "wte.weight"), "");
        assert_eq!(f.prefix(|n| n == "transformer.wte.weight"), "transformer.");
    }
}
