//! Model families as data. A new family is one file with one descriptor, and one line of
//! [`FAMILIES`].
//!
//! All families here are decoders of the same plan: embedding, blocks of normed attention and
//! normed MLP around a residual stream, norm, output projection. A descriptor says which norm,
//! which MLP, which positions, where config.json keeps the sizes, and how the modules are called.

mod arcee;
mod attention;
mod bamba;
mod cohere;
mod cohere2;
mod deepseek_v2;
mod deepseek_v3;
mod defaults;
mod ernie4_5;
mod ernie4_5_moe;
mod exaone4;
mod experts;
mod falcon;
mod gemma;
mod gemma2;
mod gemma3;
mod glm;
mod glm4;
mod glm4_moe;
mod gpt2;
mod gpt_bigcode;
mod gpt_neox;
mod gpt_oss;
mod gptj;
mod granite;
mod granitemoe;
mod granitemoehybrid;
mod helium;
mod hunyuan_v1_dense;
mod keys;
mod kimi_k2;
mod llama;
mod llama4;
mod mamba2;
mod minimax_m2;
mod ministral;
mod ministral3;
mod mistral;
mod mixtral;
mod mlp;
mod nemotron;
mod nemotron_h;
mod olmo;
mod olmo2;
mod olmo3;
mod olmoe;
mod phi;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;
mod qwen3_next;
mod recurrent;
mod seed_oss;
mod smollm3;
mod stablelm;
mod starcoder2;
mod wrappers;

pub use crate::positions::{Adjacent, Positions, Still, Turning};
pub use attention::{
    Attention, Growth, HeadNorms, Heads, Latent, LatentSizes, NormedOver, QkScale, Unlisted, Window,
};
pub use experts::{
    Clamped, Experts, Groups, Narrowed, Normed, Score, ScoreFunction, Shared, SharedWidth,
    SparseLayers, Stored,
};
pub use keys::{Known, Only};
pub use mlp::{Activation, Bias, Linear, Mlp, WeightOrder};
pub use recurrent::{Mamba2, Mixer, Recurrent, RecurrentKeys, RecurrentSizes, StepSizes, Walking};
pub use wrappers::is_wrapper;

use crate::config::Config;
use shardc_ir::diag::Result;
use shardc_ir::names::nearest;

/// All known families.
pub const FAMILIES: [&Family; 52] = [
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
    &gemma::FAMILY,
    &granite::FAMILY,
    &cohere::FAMILY,
    &cohere2::FAMILY,
    &glm::FAMILY,
    &glm4::FAMILY,
    &ernie4_5::FAMILY,
    &olmo3::FAMILY,
    &smollm3::FAMILY,
    &exaone4::FAMILY,
    &seed_oss::FAMILY,
    &starcoder2::FAMILY,
    &arcee::FAMILY,
    &nemotron::FAMILY,
    &hunyuan_v1_dense::FAMILY,
    &kimi_k2::FAMILY,
    &qwen2_moe::FAMILY,
    &olmoe::FAMILY,
    &minimax_m2::FAMILY,
    &ministral3::FAMILY,
    &gpt_oss::FAMILY,
    &granitemoe::FAMILY,
    &deepseek_v2::FAMILY,
    &helium::FAMILY,
    &ministral::FAMILY,
    &stablelm::FAMILY,
    &ernie4_5_moe::FAMILY,
    &llama4::FAMILY,
    &phi::FAMILY,
    &olmo::FAMILY,
    &falcon::FAMILY,
    &gpt_bigcode::FAMILY,
    &gptj::FAMILY,
    &qwen3_next::FAMILY,
    &mamba2::FAMILY,
    &bamba::FAMILY,
    &granitemoehybrid::FAMILY,
    &nemotron_h::FAMILY,
];

/// A family of models: its block recipe and its map of weights.
#[derive(Debug)]
pub struct Family {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    pub keys: Keys,
    /// Module that holds the model; checkpoint names may lack it.
    pub root: &'static str,
    /// What checkpoints call it, if they have another name for it.
    pub stored_root: Option<&'static str>,
    pub embedding: &'static str,
    pub factors: Factors,
    /// The row of the token `pad_token_id` in the embedding has no gradient of its look-up.
    pub padding: bool,
    pub positions: Positions,
    /// Whether attention and MLP of a block may stand side by side.
    pub beside: Beside,
    /// Module list of the blocks.
    pub layers: &'static str,
    pub norm: Norm,
    pub attention: Attention,
    /// In the place of attention in some layers.
    pub recurrent: Option<Recurrent>,
    /// Of the layers that have no experts.
    pub mlp: Mlp,
    pub halves: Halves,
    /// Of the other layers, if there are any.
    pub experts: Option<Experts>,
    pub final_norm: &'static str,
    /// Module of the output projection.
    pub head: &'static str,
    pub head_bias: Bias,
    /// Key of how many layers behind the last predict tokens behind the next.
    pub mtp: Option<&'static str>,
    /// Of the logits.
    pub softcap: Option<Softcap>,
    /// Weights that write to the residual stream start smaller by √(2·layers), as GPT-2's do.
    pub scaled_residual_init: bool,
    /// Its keys of config.json beside those that the fields above name.
    pub known: Known,
}

/// Names of the keys that families call differently. What they are where they are absent, `defaults.json` says.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    pub hidden: &'static str,
    pub layers: &'static str,
    pub heads: &'static str,
    pub kv_heads: KvHeads,
    /// `None`: hidden size / heads, whatever the config says; so it is where a key is null.
    pub head_dim: Option<&'static str>,
    pub ffn: &'static str,
    /// `None`: there is no most.
    pub max_positions: Option<&'static str>,
    pub eps: Eps,
    pub activation: &'static str,
    pub dropout: Dropped,
}

/// How many heads of keys and of values there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvHeads {
    /// As many as this key says; as many as of queries where it is null.
    Key(&'static str),
    /// As many as of queries.
    All,
    /// One that all share.
    One,
}

/// What norms add to the mean square.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Eps {
    Key(&'static str),
    Is(f64),
}

/// Keys of rates of dropout.
#[derive(Clone, Copy, Debug)]
pub struct Dropped {
    /// Of the probabilities of attention.
    pub attention: Option<&'static str>,
    /// Of embeddings.
    pub embedding: Option<&'static str>,
    /// Of what blocks add to the residual stream.
    pub residual: Option<&'static str>,
}

impl Dropped {
    /// Whatever a config says, there is none.
    pub const NONE: Dropped = Dropped { attention: None, embedding: None, residual: None };

    pub const fn of(
        attention: &'static str,
        embedding: Option<&'static str>,
        residual: Option<&'static str>,
    ) -> Dropped {
        Dropped { attention: Some(attention), embedding, residual }
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &'static str> {
        [self.attention, self.embedding, self.residual].into_iter().flatten()
    }
}

/// What parts of a model are multiplied by.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Factors {
    /// The embeddings of tokens.
    pub embedding: Factor,
    /// What each half of a block adds to the residual stream.
    pub residual: Factor,
    pub logits: Factor,
}

/// A number by which something is multiplied.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Factor {
    One,
    /// √hidden.
    RootOfHidden,
    /// That of a key, and this where it is absent.
    Key(&'static str, f64),
    /// 1 over that of a key, and over this where it is absent.
    Over(&'static str, f64),
}

impl Factor {
    /// The key that it is made of.
    pub fn key(self) -> Option<&'static str> {
        match self {
            Factor::One | Factor::RootOfHidden => None,
            Factor::Key(key, _) | Factor::Over(key, _) => Some(key),
        }
    }
}

impl Factors {
    /// Nothing is multiplied.
    pub const NONE: Factors =
        Factors { embedding: Factor::One, residual: Factor::One, logits: Factor::One };

    /// All of them.
    pub fn all(&self) -> [Factor; 3] {
        [self.embedding, self.residual, self.logits]
    }
}

/// Which of its two halves a layer has: attention or a recurrence, and an MLP or experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Halves {
    Both,
    First,
    /// One, as the kind of the layer says: in the list of this key, or as a letter in the word of the other.
    One(&'static str, &'static str),
}

/// How the halves of a block follow each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Beside {
    /// The MLP takes what attention has added to.
    Never,
    /// Both take the block's operand, unless this key is false.
    Unless(&'static str),
    /// Both take the block's operand after the norm of attention: the MLP has none of its own.
    OneNorm,
}

/// How norms are made, of x / rms(x) · weight (Zhang and Sennrich, 2019).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Norm {
    /// Of x - mean in the place of x (Ba et al., 2016).
    pub centered: bool,
    /// 1 + weight in the place of the weight.
    pub around_one: bool,
    /// Without it there is no bias either.
    pub weight: bool,
    pub bias: bool,
}

impl Norm {
    pub const RMS: Norm = Norm { centered: false, around_one: false, weight: true, bias: false };
    pub const LAYER: Norm = Norm { centered: true, bias: true, ..Norm::RMS };
}

/// c tanh(x / c) in the place of x: the key of c, and c if the key is absent, or none; none where it is null.
#[derive(Clone, Copy, Debug)]
pub struct Softcap {
    pub key: &'static str,
    pub absent: Option<f64>,
}

/// Ends of the names of checkpoint tensors that are not weights: frequencies, and causal masks, which old ones store.
pub(crate) const UNUSED: &[&str] = &[
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
];

/// Types with recurrences that are not compiled, and what they have that `scan` has not.
const OTHER_RECURRENCES: [(&[&str], &str); 3] = [
    (
        &["mamba", "falcon_mamba", "jamba", "zamba"],
        "a state of Mamba-1 decays by a number for each channel and element of the state, and one of `scan` by one number \
         for each head",
    ),
    (
        &["kimi_linear"],
        "Kimi Delta Attention decays by a number for each channel of a key, and a state of `scan` by one number for each head",
    ),
    (
        &["zamba2"],
        "its attention and MLP are a few blocks that layers share, each with adapters of its own, and a layer here has its \
         own weights",
    ),
];

/// The module of the text model in one that holds it.
const TEXT_MODEL: &str = "language_model.";

impl Family {
    /// The checkpoint's names of the embedding, after this prefix, and of the output projection.
    pub fn tables(&self, prefix: &str) -> [String; 2] {
        let outer = if prefix.starts_with(TEXT_MODEL) { TEXT_MODEL } else { "" };
        [format!("{prefix}{}.weight", self.embedding), format!("{outer}{}.weight", self.head)]
    }

    /// Ends of the names of tensors that layers which predict tokens behind the next have of the embedding and of the output
    /// projection.
    pub(crate) fn copies(&self) -> [String; 2] {
        [format!("{}.weight", self.embedding), "shared_head.head.weight".into()]
    }

    /// The name of a checkpoint's tensor in the tree of modules.
    pub fn in_modules(&self, tensor: &str) -> String {
        let less = |root| tensor.strip_prefix(root)?.strip_prefix('.');
        match self.stored_root.and_then(less) {
            Some(path) => format!("{}.{path}", self.root),
            None => tensor.into(),
        }
    }

    /// What stands before every name but the output projection's: `model.`, or what the checkpoint has in its place,
    /// which may hold the model among others.
    pub fn prefix(&self, has: impl Fn(&str) -> bool) -> String {
        let root = format!("{}.", self.stored_root.unwrap_or(self.root));
        let all = [
            root.clone(),
            format!("{root}{TEXT_MODEL}"),
            format!("{root}text_model."),
            format!("{TEXT_MODEL}{root}"),
            TEXT_MODEL.to_string(),
            String::new(),
        ];
        let there = |prefix: &String| has(&format!("{prefix}{}.weight", self.embedding));
        all.into_iter().find(there).unwrap_or(root)
    }
}

/// A config with its family's other names of keys, and the family; of a model that holds one of text, that one.
///
/// # Errors
/// `config` if it is no object, and those of [`find`].
pub fn of<'a>(config: &'a serde_json::Value, place: &str) -> Result<(Config<'a>, &'static Family)> {
    let whole = Config::new(config, place)?;
    let text = whole.word_if("model_type")?.map(|word| wrappers::text(&whole, word));
    let (config, family) = match text.transpose()?.flatten() {
        Some(text) => text,
        None => {
            let family = find(&whole)?;
            (whole.with(defaults::of(family.model_type)), family)
        }
    };
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
    if let Some((_, why)) = OTHER_RECURRENCES.iter().find(|(types, _)| types.contains(&word)) {
        let what = format!("models of type `{word}` are not compiled");
        let help =
            "mamba2, bamba, granitemoehybrid, nemotron_h and qwen3_next have recurrences that are";
        let d = config.unsupported("unknown-model-type", "model_type", what, help.into());
        return Err(d.why(*why));
    }
    let what = format!("model type `{word}` is not known");
    let help = format!("the {} known types are {list}", FAMILIES.len());
    let d = config.unsupported("unknown-model-type", "model_type", what, help);
    let d = match nearest(word, known(), 1)[..] {
        [] => d,
        [near, ..] => d.help(format!("the nearest is `{near}`")),
    };
    let d = wrappers::advise(config, d);
    Err(d.help("any other model comes as an archive of torch.export: shardc explain unknown-model-type has the lines that make one"))
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
                 olmo2, phi3, gemma3_text, gpt_neox, glm4_moe, gemma, granite, cohere"
            ) && all.contains("`qwen2`"),
            "{all}"
        );
    }

    /// A family is a row of at most 40 lines, but for those of which others are made.
    #[test]
    fn descriptors_are_short() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/family");
        let mut seen = 0;
        for file in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            let name = file.file_stem().unwrap().to_string_lossy().into_owned();
            let own = text.split_once("const FAMILY: Family = ").filter(|_| name != "mod");
            let Some((_, own)) = own else { continue };
            let lines = own.lines().take_while(|l| *l != "};").count() + 1;
            let most = if ["llama", "gpt2", "deepseek_v3"].contains(&&*name) { 60 } else { 40 };
            assert!(lines <= most, "{name} has {lines} lines");
            seen += 1;
        }
        assert_eq!(seen, FAMILIES.len());
    }

    #[test]
    fn the_prefix_follows_the_checkpoint() {
        let f = &gpt2::FAMILY;
        assert_eq!(f.prefix(|_| false), "transformer.");
        assert_eq!(f.prefix(|n| n == "wte.weight"), "");
        assert_eq!(f.prefix(|n| n == "transformer.wte.weight"), "transformer.");
    }
}
