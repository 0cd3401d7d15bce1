//! Reads models: a Hugging Face folder becomes a one-device program, a list of weights and facts.
//!
//! [`load`] reads `config.json` and the headers of the safetensors files, never whole weights.
//! [`family`] is the table of model families, `graph` writes the program of any of them, and
//! [`checkpoint`] finds, reads, makes and saves weights.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod batch;
pub mod checkpoint;
pub mod config;
pub mod family;
mod foreign;
mod graph;
pub mod import;
mod positions;
pub mod rope;
mod sizes;
pub mod stored;

pub use checkpoint::base::{Base, Saving};
pub use checkpoint::init::init;
pub use checkpoint::peft::{AdapterConfig, CONFIG, name_in_adapter, whole_modules};
pub use checkpoint::save::{
    DUMP, NamedTensor, Written, check_target, save, whole_tensors, write_each, write_tensors,
};
pub use checkpoint::{Checkpoint, Entry};
pub use family::{HeadNorms, LatentSizes, NormedOver, RecurrentSizes};

use config::TIED;
use serde::{Deserialize, Serialize};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_ir::func::{Module, Value};
use shardc_ir::plan::{Dropout, Mode};
use shardc_ir::weights::Weight;
use sizes::MAX_MTP;
use std::path::{Path, PathBuf};

/// The sizes that a config does not have.
#[derive(Clone, PartialEq, Debug)]
pub struct Shape {
    /// Rows of one microbatch, over all data-parallel ranks.
    pub batch: usize,
    /// Tokens per row.
    pub seq: usize,
    pub mode: Mode,
    /// What keeps experts in balance.
    pub balance: Balance,
    /// What training sets to 0 at random.
    pub dropout: Dropout,
    /// Weight of the loss of layers that predict tokens behind the next; 0: there are none.
    pub mtp: f64,
    /// Documents in a row do not see each other.
    pub packed: bool,
    /// Padding stands in rows, in a segment of its own: experts do not count it among tokens.
    pub padded: bool,
}

/// What training adds to keep experts in balance; the default is what the config says.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Balance {
    /// Coefficient of the auxiliary loss; 0: there is none; `None`: the config's.
    pub aux: Option<f64>,
    /// Coefficient of the z-loss of routers; 0: there is none.
    pub z: f64,
    /// Routers whose choice is corrected by a bias count their choices.
    pub load: bool,
}

impl Shape {
    /// The config says what balances experts; nothing is set to 0.
    pub fn new(batch: usize, seq: usize, mode: Mode) -> Shape {
        let (balance, dropout) = Default::default();
        Shape { batch, seq, mode, balance, dropout, mtp: 0.0, packed: false, padded: false }
    }
}

/// The numbers that decide how a model may be split.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Facts {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Width of the MLP.
    pub ffn: usize,
    pub vocab: usize,
    pub max_positions: usize,
    /// The output projection is the embedding.
    pub tied: bool,
    /// Heads of keys of the layers that walk a state along the tokens; there are none without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recurrent: Option<usize>,
    /// Of the layers that have experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertFacts>,
}

/// The numbers of a mixture of experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ExpertFacts {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a token uses.
    pub top_k: usize,
    /// Width of an expert.
    pub ffn: usize,
    /// Width of the MLP beside the experts that every token passes; 0: there is none.
    pub shared: usize,
    /// Elements of a token that experts take and make, where they are not those of the hidden state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub narrow: Option<usize>,
}

/// What a family makes of a config beside [`Facts`]: its MLP, latent attention, and how experts are chosen, weighed and balanced.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Gating {
    /// The MLP has a gate.
    pub glu: bool,
    /// Layers without experts.
    pub dense: usize,
    /// Of these, those with an MLP.
    pub fed: usize,
    /// Layers with attention.
    pub attends: usize,
    /// Groups of experts, and how many of them a token may use, where these are fewer.
    pub groups: Option<(usize, usize)>,
    /// The gates of the experts that a token uses are divided by their sum.
    pub normed: bool,
    /// Coefficient of the auxiliary loss; `None`: there is none.
    pub aux: Option<f64>,
    /// Coefficient of the z-loss of routers; `None`: there is none.
    pub z: Option<f64>,
    /// Sizes of latent attention; `None`: queries, keys and values come from what enters.
    pub latent: Option<LatentSizes>,
    /// Layers that walk a state in place of attention: their sizes, how many there are, and whether by the delta rule.
    pub scans: Option<(RecurrentSizes, usize, bool)>,
}

/// Norms of queries and of keys of a family, by its `model_type`; `None` if it has none, or is not known.
pub fn head_norms(family: &str) -> Option<HeadNorms> {
    family::FAMILIES.iter().find(|f| f.model_type == family)?.attention.norms
}

impl Model {
    /// Of an embedding and an output projection that are tied, the name of the one that is no tensor of its own, and
    /// that of the one that is.
    pub fn tied(&self) -> Option<[String; 2]> {
        let family = family::FAMILIES.iter().find(|f| f.model_type == self.family)?;
        let has = |name: &String| self.weights.iter().any(|w| w.tensor == *name);
        let prefix = family.prefix(|name| has(&name.into()));
        let [embedding, head] = family.tables(&prefix);
        let pair = if has(&embedding) { [head, embedding] } else { [embedding, head] };
        self.facts.tied.then_some(pair)
    }
}

/// A model as the passes take it.
#[derive(Clone, Debug)]
pub struct Model {
    /// `model_type` in config.json.
    pub family: &'static str,
    /// An empty mesh and one function, `model`. Arguments: the parameters in the order of
    /// `weights`; then `input_ids`, in training `targets`, both i32 of batch × seq, and
    /// `positions`, i32 of seq. `targets[i]` is `labels[i + 1]`, negative where there is none.
    /// Results: in training `loss`, the sum over tokens, and if there are any `aux_loss` and `z_loss`
    /// of experts, those of the microbatch times their coefficients; with [`Shape::mtp`] `mtp_loss.1` and so on, which
    /// are means in the same way; with [`Balance::load`] for each correcting
    /// bias `tokens_per_expert "PARAM"`, how often each expert was chosen; always `logits`, batch × seq × vocab.
    pub module: Module,
    pub weights: Vec<Weight>,
    pub facts: Facts,
    /// The residual stream: the embedding and every sum with a residual, each with its dim of
    /// tokens.
    pub sequence: Vec<(Value, usize)>,
    /// config.json as it was read.
    pub config: serde_json::Value,
    /// What the user should know although the model loads.
    pub warnings: Vec<Diag>,
    /// The weights beside the config, if there are any.
    pub checkpoint: Option<Checkpoint>,
}

/// Largest config.json that is read, in bytes.
pub const MAX_CONFIG: u64 = 16 << 20;

/// Reads a model from its folder or its config.json. Weights are optional: without safetensors
/// files beside the config `checkpoint` is `None`; with them, every tensor is checked for name,
/// shape and element type.
///
/// Errors name the key or tensor: codes `file`, `config`, `unknown-model-type`, `rope-type`,
/// `activation`, `unsupported-config`, `shape`, and those of [`Checkpoint::open`] and
/// [`Checkpoint::check`].
pub fn load(path: &Path, shape: &Shape) -> Result<Model> {
    let file = config_of(path);
    let mut config = read_config(&file)?;
    let place = file.display().to_string();
    let dir = file.parent().filter(|d| !d.as_os_str().is_empty()).map_or(".".into(), PathBuf::from);
    let checkpoint = Checkpoint::open(&dir)?;
    let has = |name: &str| checkpoint.as_ref().is_some_and(|c| c.get(name).is_some());
    let mut untied = None;
    if let Some(c) = &checkpoint {
        quantized(&config, &place).map_or(Ok(()), Err)?;
        let (view, family) = family::of(&config, &place)?;
        if view.flag(TIED, false)? {
            untied = c.untied(family, &family.prefix(has))?;
        }
    }
    if let (Some(_), Some(config)) = (&untied, config.as_object_mut()) {
        config.insert(TIED.into(), false.into());
    }
    let (mut model, family) = build(&config, &place, shape, &has)?;
    model.warnings.extend(untied);
    if let Some(c) = &checkpoint {
        c.check(&model.weights)?;
        let prefix = family.prefix(has);
        let [table, head] = family.tables(&prefix);
        // Those of other parts are another warning.
        let within = if is_wrapper(&config) { &prefix[..] } else { "" };
        // Copies of the embedding and of the output projection, or layers that are named.
        let names = graph::TensorNames { prefix: prefix.clone(), embedding: String::new() };
        let further = |t: &str| {
            let layers = model.facts.layers..model.facts.layers + MAX_MTP;
            layers.into_iter().any(|i| t.starts_with(&names.of_layer(family, i, "")))
        };
        let further = |t: &str| family.mtp.is_some() && further(t);
        if shape.mtp != 0.0 && shape.mode == Mode::Train {
            let head = if has(&head) { &head } else { &table };
            let copies = (0..MAX_MTP).map(|i| model.facts.layers + i).flat_map(|i| {
                let [of_table, of_head] = family.copies();
                [(of_table, &table), (of_head, head)]
                    .map(|(part, of)| (names.of_layer(family, i, &part), of))
            });
            copies.into_iter().try_for_each(|(copy, of)| c.check_copy(&copy, of))?;
        }
        model.warnings.extend(c.unused(&model.weights, (within, family::UNUSED), &head, &further));
    } else if dir.join("pytorch_model.bin").exists() {
        let what = "weights in pytorch_model.bin are not read, only safetensors files";
        let help =
            "convert it: transformers' save_pretrained writes model.safetensors (version 4.35+)";
        model
            .warnings
            .push(Diag::new("weights-not-read", what).at(dir.display().to_string()).help(help));
    }
    model.checkpoint = checkpoint;
    Ok(model)
}

/// The facts of a model, from its folder or its config.json: what rules about meshes are told.
///
/// Errors: those of [`load`] that concern the config.
pub fn facts(path: &Path) -> Result<Facts> {
    let file = config_of(path);
    let config = read_config(&file)?;
    let (view, family) = family::of(&config, &file.display().to_string())?;
    let shape = Shape::new(1, 1, Mode::Infer);
    Ok(sizes::Arch::read(family, &view, &shape, &mut vec![])?.facts)
}

/// What [`from_config`] builds of this config, beside [`Facts`]; of a model without experts, nothing is balanced.
///
/// Errors: those of [`load`] that concern the config.
pub fn gating(config: &serde_json::Value, place: &str, shape: &Shape) -> Result<Gating> {
    let (view, family) = family::of(config, place)?;
    let arch = sizes::Arch::read(family, &view, shape, &mut vec![])?;
    let r = arch.routing;
    let count = |is: &dyn Fn(usize) -> bool| (0..arch.facts.layers).filter(|&i| is(i)).count();
    let dense = count(&|i| !arch.sparse[i]);
    Ok(Gating {
        glu: family.mlp.gate.is_some(),
        dense,
        fed: count(&|i| arch.halves[i][1] && !arch.sparse[i]),
        attends: count(&|i| arch.halves[i][0] && !arch.walks[i]),
        groups: r.groups.filter(|(all, used)| used < all),
        normed: r.normed.is_some(),
        aux: r.aux,
        z: r.z,
        latent: arch.latent,
        scans: arch.recurrent.zip(family.recurrent).map(|(sizes, r)| {
            let layers = arch.walks.iter().filter(|walks| **walks).count();
            (sizes, layers, matches!(r.mixer, family::Mixer::DeltaNet))
        }),
    })
}

/// Key of how a model's weights are quantized.
const QUANTIZED: &str = "quantization_config";
/// The method whose weights are read, and saved as they are without it.
const READ: &str = "mxfp4";
/// Keys of config.json that a model that is read may have otherwise than its file, as its weights are.
pub const OF_WEIGHTS: [&str; 2] = [QUANTIZED, TIED];

/// Whether a config is that of a model that holds one of text, which is what is compiled.
pub fn is_wrapper(config: &serde_json::Value) -> bool {
    config.get("model_type").and_then(serde_json::Value::as_str).is_some_and(family::is_wrapper)
}

/// Takes out of a config how weights are quantized, as what is saved is not; whether it said so.
pub fn unquantize(config: &mut serde_json::Value) -> bool {
    config.as_object_mut().and_then(|c| c.remove(QUANTIZED)).is_some_and(|v| !v.is_null())
}

/// Why the weights of a config are not read, if they are quantized: the method is named.
fn quantized(config: &serde_json::Value, place: &str) -> Option<Diag> {
    let how = config.get(QUANTIZED).filter(|v| !v.is_null())?;
    let word = |key: &str| how.get(key).and_then(serde_json::Value::as_str);
    let method = word("quant_method").or(word("quant_algo"));
    if method == Some(READ) {
        return None;
    }
    let method = method.map(|m| format!(" (`{m}`)")).unwrap_or_default();
    let what = format!("quantized weights{method} are not read");
    let d = Diag::new("unsupported-config", what).at(format!("{place}: /{QUANTIZED}"));
    Some(
        d.help(
            "use the unquantized model: F32, BF16 and F16 tensors are read, and blocks of MXFP4",
        ),
    )
}

/// Refuses a folder of weights whose config.json says that they are quantized.
///
/// # Errors
/// `unsupported-config`.
pub fn check_readable(dir: &Path) -> Result<()> {
    let file = dir.join("config.json");
    // Weights may stand alone.
    let Ok(config) = read_config(&file) else { return Ok(()) };
    quantized(&config, &file.display().to_string()).map_or(Ok(()), Err)
}

fn config_of(path: &Path) -> PathBuf {
    if path.is_dir() { path.join("config.json") } else { path.to_path_buf() }
}

/// Makes a model from a parsed config alone; `place` names it in messages.
///
/// Errors: those of [`load`] that concern the config.
pub fn from_config(config: &serde_json::Value, place: &str, shape: &Shape) -> Result<Model> {
    build(config, place, shape, &|_| false).map(|b| b.0)
}

/// The same of a checkpoint that has these tensors, which decides how tensors are called.
pub fn from_config_named(
    config: &serde_json::Value,
    place: &str,
    shape: &Shape,
    has: &dyn Fn(&str) -> bool,
) -> Result<Model> {
    build(config, place, shape, has).map(|b| b.0)
}

/// The name of a tensor in the tree of transformers' modules; checkpoints may have tensors without its root. `has` says
/// which tensors there are.
pub fn rooted(config: &serde_json::Value, tensor: &str, has: &dyn Fn(&str) -> bool) -> String {
    let Ok((_, family)) = family::of(config, "config.json") else { return tensor.into() };
    let prefix = family.prefix(has);
    let [_, head] = family.tables(&prefix);
    match prefix.is_empty() && tensor != head && !family.root.is_empty() {
        true => format!("{}.{tensor}", family.root),
        false => family.in_modules(tensor),
    }
}

/// The model of a config; `has` tells whether a checkpoint has a tensor, which decides how tensors
/// are called.
fn build(
    config: &serde_json::Value,
    place: &str,
    shape: &Shape,
    has: &dyn Fn(&str) -> bool,
) -> Result<(Model, &'static family::Family)> {
    let (view, family) = family::of(config, place)?;
    let mut warnings = vec![];
    let arch = sizes::Arch::read(family, &view, shape, &mut warnings)?;
    let prefix = family.prefix(has);
    // As in transformers, either of two that are tied may be stored.
    let [embedding, head] = family.tables(&prefix);
    let swapped = arch.facts.tied && !has(&embedding) && has(&head);
    let names = graph::TensorNames { prefix, embedding: if swapped { head } else { embedding } };
    // In many configs the key says 1 of files that have no such layers.
    let further = names.of_layer(family, arch.facts.layers, "enorm.weight");
    if arch.mtp.0 == 0 && shape.mode == Mode::Train && has(&further) {
        let key = family.mtp.unwrap_or("num_nextn_predict_layers");
        let what = "layers that predict tokens behind the next are not trained, and their weights not read";
        let d = Diag::new("mtp-not-trained", what).at(view.place(key));
        warnings.push(d.help("train them with --mtp 0.3, the weight of their loss"));
    }
    let graph = graph::build(family, &view, &arch, shape, &names)?;
    let mut config = config.clone();
    if is_wrapper(&config) {
        let word = config["model_type"].as_str().unwrap_or_default();
        let what = format!("only the text model of this `{word}` is compiled");
        let d = Diag::new("text-model-only", what).at(format!("{place}: /model_type"));
        warnings.push(
            d.help("its other tensors are not trained; a saved model has them from its base"),
        );
    }
    let quantized = quantized(&config, place);
    unquantize(&mut config);
    if let Some(d) = quantized {
        let d = Diag::new("weights-not-read", d.message).at(d.place.unwrap_or_default());
        warnings.push(d.help("sizes are those of the model; it starts from random weights"));
    }
    let model = Model {
        family: family.model_type,
        module: graph.module,
        weights: graph.weights,
        facts: arch.facts,
        sequence: graph.sequence,
        config,
        warnings,
        checkpoint: None,
    };
    Ok((model, family))
}

/// The JSON files of a folder that has no config.json: one of them may be meant.
fn others(dir: &Path) -> Option<String> {
    let all = std::fs::read_dir(dir).ok()?.flatten().map(|e| e.path());
    let mut all: Vec<String> = all
        .filter(|p| p.extension().is_some_and(|e| e == "json") && p.is_file())
        .filter(|p| foreign::refused(p).is_none())
        .map(|p| p.display().to_string())
        .collect();
    all.sort();
    let more = if all.len() > MOST_OTHERS { ", …" } else { "" };
    all.truncate(MOST_OTHERS);
    (!all.is_empty())
        .then(|| format!("give one of its JSON files by name: {}{more}", all.join(", ")))
}

/// Most files that are named in place of one that is not there.
const MOST_OTHERS: usize = 5;

fn read_config(file: &Path) -> Result<serde_json::Value> {
    let place = file.display().to_string();
    // A JSON file of such a name may be a config nevertheless.
    let is_json = file.extension().is_some_and(|e| e == "json");
    if let Some(d) = foreign::refused(file).filter(|_| !is_json) {
        return Err(d);
    }
    let bytes = files::read(file, MAX_CONFIG).map_err(|d| {
        let help = "give a folder that holds config.json, such as examples/tiny-llama";
        let dir = file.parent().filter(|_| file.ends_with("config.json"));
        match dir.filter(|_| !file.exists()) {
            None if file.exists() => d,
            None => d.help(help),
            Some(dir) => {
                let d = foreign::in_folder(dir, d);
                others(dir).into_iter().fold(d, Diag::help).help(help)
            }
        }
    })?;
    let read = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes);
    let config = read(&bytes).or_else(|e| read(&config::with_words(&bytes)).map_err(|_| e));
    let config = config.map_err(|e| {
        Diag::new("config", format!("config.json is not JSON: {e}")).at(place).help(format!(
            "see line {}, column {}",
            e.line(),
            e.column()
        ))
    })?;
    match foreign::refused(file).filter(|_| config.get("model_type").is_none()) {
        Some(d) => Err(d),
        None => Ok(config),
    }
}
