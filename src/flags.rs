//! Flags of `compile` and `check`, from the command line and from `shardc.toml`; flags win.

mod begun;
mod effect;
mod options;
mod rate;
mod shared;
mod text;
mod values;

pub use begun::{begun, unknown};
use clap::Args;
pub use rate::Rate;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_ir::hardware::Hardware;
use shardc_passes::options::Options;
pub use shared::Training;
use std::collections::BTreeSet;
use std::path::Path;
pub use text::{Brought, default_microbatch};
use values::*;
pub use values::{AXES, bytes_of, memory, memory_of, whole};

/// The flag of an option of options.toml; what has no flag of this name stays as it is.
pub fn flag_of(option: &str) -> String {
    let all = Flags::augment_args(clap::Command::new("flags"));
    match all.get_arguments().any(|a| a.get_id() == option) {
        true => format!("--{}", option.replace('_', "-")),
        false => option.into(),
    }
}

/// Declares the flags, and how those of a file fill the holes of the command line's.
macro_rules! flags {
    ($(#[$about:meta])* { $($(#[$of:meta])* pub $flag:ident: $ty:ty,)* }) => {
        $(#[$about])*
        pub struct Flags { $($(#[$of])* pub $flag: $ty,)* }
        impl Flags {
            /// These flags, with the holes filled from `below`.
            pub fn over(self, below: Flags) -> Flags {
                Flags { $($flag: self.$flag.over(below.$flag),)* }
            }
        }
    };
}

/// A flag's value, which may not be given.
trait Given: Sized {
    /// This one, or if it is not given the other.
    fn over(self, below: Self) -> Self;
}

impl<T> Given for Option<T> {
    fn over(self, below: Self) -> Self {
        self.or(below)
    }
}

impl<T> Given for Vec<T> {
    fn over(self, below: Self) -> Self {
        if self.is_empty() { below } else { self }
    }
}

impl Given for bool {
    fn over(self, below: Self) -> Self {
        self || below
    }
}

flags! {
/// What a user may ask of the compiler. Every field may stand in `shardc.toml` under its flag's name.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
#[group(skip)]
{
    /// Mesh axes and sizes, outermost first: pp=2,dp=2,tp=2 (dp is short for dp_replicate, or for dp_shard with
    /// --zero or ep). ep and etp, as in dp=4,tp=2,ep=4,etp=1, are not axes of their own: they factorise the ranks
    /// of dp_shard, cp and tp a second time, for experts
    #[arg(long, help_heading = "Layout")]
    pub mesh: Option<String>,
    /// Number of ranks of the mesh, if one axis of --mesh is auto and takes the remaining ranks: --gpus 16 --mesh
    /// tp=2,dp=auto is --mesh tp=2,dp=8
    #[arg(long, value_name = "N", help_heading = "Layout")]
    pub gpus: Option<usize>,
    /// Order of the axes, fastest-varying first, with Megatron's names [default: tp-cp-ep-dp-pp]
    #[arg(long, help_heading = "Layout")]
    pub order: Option<String>,
    /// Ranks per node; warns if a group of tp or cp crosses nodes
    #[arg(long, help_heading = "Layout")]
    pub node: Option<usize>,
    /// train, or infer (forward pass to logits) [default: train]
    #[arg(long, help_heading = "Run")]
    pub mode: Option<String>,
    /// Sequences per step over all ranks [default: 8; of a text model whose rows do not divide 8, its
    /// rows]
    #[arg(long, value_parser = whole, help_heading = "Run")]
    pub global_batch: Option<usize>,
    /// Sequences per rank and microbatch [default: all of a rank's, or with pp as many as give at least pp
    /// microbatches]
    #[arg(long, value_parser = whole, help_heading = "Run")]
    pub microbatch: Option<usize>,
    /// Tokens per sequence [default: 512, or the model's maximum if that is less, or those of a text model]
    #[arg(long, value_parser = whole, help_heading = "Run")]
    pub seq: Option<usize>,
    /// Element type of weights and activations: f32, bf16 or f16 (training keeps f32 master copies; sums and
    /// statistics are f32; f16 uses loss scaling) [default: f32]
    #[arg(long, help_heading = "Run")]
    pub dtype: Option<String>,
    /// Element type in which gradients of bf16 or f16 weights are accumulated and reduced: f32, or that of the
    /// weights [default: f32]
    #[arg(long, help_heading = "Run")]
    pub grad_dtype: Option<String>,
    /// Seed of initial weights and of the data order [default: 0]
    #[arg(long, help_heading = "Run")]
    pub seed: Option<u64>,
    /// ZeRO stage, what is sharded over dp_shard: 1 the optimizer state, 2 also gradients, 3 also parameters
    /// (FSDP) [default: 0]
    #[arg(long, help_heading = "Layout")]
    pub zero: Option<u8>,
    /// What --zero 2 and 3 keep unsharded over the microbatches of a step, like FSDP's no_sync: gradients
    /// (reduced once per step), weights (gathered once per step), both or none [default: none]
    #[arg(long, value_name = "WHAT", help_heading = "Layout")]
    pub zero_accumulate: Option<String>,
    /// Split the residual stream along the sequence over tp (sequence parallelism)
    #[arg(long, help_heading = "Layout")]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub sp: bool,
    /// Size of the expert buffers, as a multiple of what balanced routing needs; a run that needs more is aborted
    /// [default: enough for any routing]
    #[arg(long, value_name = "F", help_heading = "Layout")]
    pub moe_bound: Option<f64>,
    /// Capacity factor: token copies that an expert keeps, as a multiple of its balanced share; further copies
    /// are dropped [default: none are dropped]
    #[arg(long, value_name = "F", help_heading = "Layout")]
    pub moe_capacity: Option<f64>,
    /// Coefficient of the auxiliary load-balancing loss; 0 turns it off [default: the config's]
    #[arg(long, value_name = "F", allow_negative_numbers = true, help_heading = "Optimizer")]
    pub moe_aux: Option<f64>,
    /// Coefficient of the router z-loss, which keeps router logits small [default: 0]
    #[arg(long, value_name = "F", allow_negative_numbers = true, help_heading = "Optimizer")]
    pub moe_z_loss: Option<f64>,
    /// Update rate of router biases per step, towards experts that were chosen too rarely (for families whose
    /// routers have a bias) [default: 0]
    #[arg(long, value_name = "F", allow_negative_numbers = true, help_heading = "Optimizer")]
    pub moe_bias_rate: Option<f64>,
    /// Context parallelism over cp: all-gather (of keys and values), ring (ring attention), or ulysses (an
    /// all-to-all of heads and tokens) [default: all-gather]
    #[arg(long, help_heading = "Layout")]
    pub cp_mode: Option<String>,
    /// Which tokens a rank of cp has: contiguous, or zigzag (one chunk from the front and one from the back,
    /// which balances causal attention) [default: zigzag with --cp-mode ring, else contiguous]
    #[arg(long, help_heading = "Layout")]
    pub cp_split: Option<String>,
    /// Tensor parallelism: 1d (Megatron), or blocks of weights and activations on a grid of tp ranks:
    /// 2d (tp = q²), 2.5d (tp = depth·q²), 3d (tp = q³) [default: 1d]
    #[arg(long, help_heading = "Layout")]
    pub tp_mode: Option<String>,
    /// Number of grids of --tp-mode 2.5d, each with its own rows of the batch [default: 2]
    #[arg(long, help_heading = "Layout")]
    pub tp_depth: Option<usize>,
    /// Operands of products with --tp-mode 2d and 2.5d: gathered (few calls), or summa (broadcast one piece at a
    /// time, in as many steps as the grid is wide: less memory) [default: gathered]
    #[arg(long, help_heading = "Layout")]
    pub tp_steps: Option<String>,
    /// Pipeline schedule: naive, gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-v, v-half,
    /// v-min, dualpipe-v, search (the fastest that fits --memory), or a CSV file [default: 1f1b]
    #[arg(long, help_heading = "Layout")]
    pub schedule: Option<String>,
    /// Stages per pipeline rank [default: what the schedule needs, 1 or 2]
    #[arg(long, help_heading = "Layout")]
    pub chunks: Option<usize>,
    /// Where stages begin: balanced, equal, layers per stage (8,8,9,7), the scopes that begin a stage, or
    /// Megatron's layout notation, as in Et*3|(tt|)*2,tL [default: balanced]
    #[arg(long, help_heading = "Layout")]
    pub layers: Option<String>,
    /// Relative speed of each pipeline rank, as in 1,1,0.5,1 [default: all equal]
    #[arg(long, help_heading = "Layout")]
    pub speeds: Option<String>,
    /// Free the parameters gathered by ZeRO-3 or a grid after forward, and gather them again in backward: yes or
    /// no [default: yes]
    #[arg(long, help_heading = "Layout")]
    pub reshard_after_forward: Option<String>,
    /// Kernel fusion of element-wise work, reductions and sums: yes (also with the products they read), rows (not
    /// with products) or no [default: yes]
    #[arg(long, help_heading = "Run")]
    pub fuse: Option<String>,
    /// Dropout of the embedding, of the output of blocks and of attention probabilities: config (the rates of
    /// config.json), or a rate below 1 [default: 0]
    #[arg(long, help_heading = "Run")]
    pub dropout: Option<String>,
    /// Document masking for packed rows: tokens attend only within their document, and positions restart. eod=ID
    /// is the end-of-document token; eod=ID,pad=ID also names the padding token [default: a row is one document]
    #[arg(long, value_name = "eod=ID", help_heading = "Run")]
    pub documents: Option<String>,
    /// Activation checkpointing, what backward recomputes: none, elementwise (element-wise work, where that saves
    /// bytes), selective, full, every:N and layers:N (whole layers: every N-th, or the first N of a stage), sqrt
    /// (runs of layers), mix: (N*full+elementwise: the first N layers of a stage by one policy, the rest by the
    /// last), fit (the cheapest that fits --memory), or ops: with names of ops, norms, activations, selective
    /// [default: elementwise]
    #[arg(long, help_heading = "Layout")]
    pub recompute: Option<String>,
    /// Compute the loss and its gradients in N chunks of tokens, so that the full logits are never in memory;
    /// auto: the fewest with which a rank fits --memory or, without it, with which no more chunks save over 1 %
    /// [default: 1]
    #[arg(long, value_name = "N|auto", help_heading = "Layout")]
    #[serde(deserialize_with = "number_or_text")]
    pub loss_chunks: Option<String>,
    /// Memory of a rank: 24GiB, 80e9, or a machine's (h100-sxm); a plan that needs more is refused
    #[arg(long, value_name = "BYTES", help_heading = "Layout")]
    #[serde(deserialize_with = "number_or_text")]
    pub memory: Option<String>,
    /// Hardware for choices by estimated cost (--shard auto, --schedule search, --recompute fit): a machine as
    /// for `shardc plan --device`, or a TOML file with any of: link (bytes/s, and by axis in a table `links`),
    /// memory (bytes/s), flops (1/s), latency, start, line (s) [default: link = 50e9, memory = 1e12, flops =
    /// 50e12, latency = 10e-6, start = 1e-6, line = 50e-9]
    #[arg(long, value_name = "NAME|FILE.toml", help_heading = "Layout")]
    pub hardware: Option<String>,
    /// adamw or sgd [default: adamw]
    #[arg(long, help_heading = "Optimizer")]
    pub optimizer: Option<String>,
    /// Learning rate [default: 1e-3]
    #[arg(long, allow_negative_numbers = true, help_heading = "Optimizer")]
    pub lr: Option<f64>,
    /// constant or warmup-cosine [default: constant]
    #[arg(long, help_heading = "Optimizer")]
    pub lr_schedule: Option<String>,
    /// Steps of linear warmup (warmup-cosine)
    #[arg(long, help_heading = "Optimizer")]
    pub warmup: Option<usize>,
    /// Step at which the cosine ends (warmup-cosine) [default: 1000]
    #[arg(long, help_heading = "Optimizer")]
    pub total_steps: Option<usize>,
    /// Learning rate at the end of the cosine and after it (warmup-cosine) [default: 0]
    #[arg(long, value_name = "LR", allow_negative_numbers = true, help_heading = "Optimizer")]
    pub min_lr: Option<f64>,
    /// AdamW's betas [default: 0.9,0.999]
    #[arg(long, help_heading = "Optimizer")]
    pub betas: Option<String>,
    /// AdamW's epsilon [default: 1e-8]
    #[arg(long, allow_negative_numbers = true, help_heading = "Optimizer")]
    pub eps: Option<f64>,
    /// Decoupled weight decay [default: 0.01]
    #[arg(long, allow_negative_numbers = true, help_heading = "Optimizer")]
    pub weight_decay: Option<f64>,
    /// Parameters with weight decay: all, or matrices [default: all]
    #[arg(long, help_heading = "Optimizer")]
    pub decay: Option<String>,
    /// Maximum global gradient norm, for gradient clipping [default: off]
    #[arg(long, allow_negative_numbers = true, help_heading = "Optimizer")]
    pub clip: Option<f64>,
    /// Constant loss scale (f16), a power of 2 [default: dynamic loss scaling]
    #[arg(long, value_name = "SCALE", allow_negative_numbers = true, help_heading = "Optimizer")]
    pub loss_scale: Option<f64>,
    /// Loss scale of the first step (f16), a power of 2 [default: 4294967296, 2^32]
    #[arg(long, value_name = "SCALE", allow_negative_numbers = true, help_heading = "Optimizer")]
    pub initial_loss_scale: Option<f64>,
    /// Minimum loss scale (f16), a power of 2; the next overflow there ends the run [default: 1]
    #[arg(long, value_name = "SCALE", allow_negative_numbers = true, help_heading = "Optimizer")]
    pub min_loss_scale: Option<f64>,
    /// Consecutive steps without overflow after which the loss scale is doubled (f16) [default: 1000]
    #[arg(long, value_name = "STEPS", help_heading = "Optimizer")]
    pub loss_scale_window: Option<u32>,
    /// The number of overflows, counted since the loss scale was last doubled, from which on each overflow halves
    /// it (f16) [default: 2]
    #[arg(long, value_name = "N", help_heading = "Optimizer")]
    pub hysteresis: Option<u32>,
    /// Checkpoint tensors that are not trained; repeatable
    #[arg(long, value_name = "GLOB", help_heading = "Optimizer")]
    pub freeze: Vec<String>,
    /// Sharding of a checkpoint tensor, or of the last value of a scope: D is -, ?, an axis, a*b or a:(k)n, then
    /// @pN; or one of the words colwise, rowwise, replicated, for a tensor or the weight and bias of a scope. In a
    /// GLOB `*` and `?` are wildcards, and nothing else; repeatable, the last one holds. auto: layouts of all values and parameters are chosen by estimated cost, regardless of the
    /// names of the axes
    #[arg(long, value_name = "GLOB=D,D|auto", help_heading = "Layout")]
    pub shard: Vec<String>,
    /// How ranks communicate when the plan runs: threads, mpi or nccl; plans for mpi and nccl overlap communication
    /// with work [default: threads]
    #[arg(long, help_heading = "Run")]
    pub transport: Option<String>,
    /// Device: cpu, or cuda, which adds compiled kernels to the plan's folder (run compiles them if they are
    /// missing) [default: cpu]
    #[arg(long, help_heading = "Run")]
    pub device: Option<String>,
    /// Architectures for which --device cuda compiles kernels [default: sm_80,sm_90a]
    #[arg(long, value_name = "ARCH,..", help_heading = "Run")]
    pub arch: Option<String>,
}
}

impl Flags {
    /// The options of the passes, with defaults; refuses what is not built.
    pub fn options(&self) -> Result<Options> {
        self.options_with(None)
    }

    /// The flags that are given, by their names without dashes, with their values.
    fn table(&self) -> Map<String, Value> {
        let all = serde_json::to_value(self).expect("flags are plain data");
        let Value::Object(all) = all else { return Map::new() };
        let is_given = |v: &Value| !v.is_null() && v.as_array().is_none_or(|a| !a.is_empty());
        all.into_iter().filter(|(_, v)| is_given(v)).collect()
    }

    /// Names of the flags that are given, without dashes, sorted.
    fn given(&self) -> Vec<String> {
        let mut names: Vec<String> = self.table().into_iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        names
    }

    /// The architectures that the plan's kernels are compiled for; none, for the CPU.
    ///
    /// # Errors
    /// `flag` if a word is not an architecture, or if there are some and no device.
    pub fn archs(&self) -> Result<BTreeSet<String>> {
        let cuda = self.device.as_deref() == Some("cuda");
        match &self.arch {
            None if cuda => Ok(DEFAULT_ARCHS.map(String::from).into()),
            None => Ok(BTreeSet::new()),
            Some(all) if cuda => all.split(',').map(arch).collect(),
            Some(all) => Err(Diag::new("flag", "--arch is for CUDA kernels")
                .at(format!("--arch {all}"))
                .help(format!("add --device cuda, or leave --arch {all} out"))),
        }
    }

    /// Refuses values that other compilers of this field have and no pass makes yet.
    fn refuse_unbuilt(&self) -> Result<()> {
        // Flag, value, what is built, and what has a meaning but is not.
        let cases: [(&str, Option<String>, &str, &str); 1] =
            [("--device", self.device.clone(), "cpu cuda", "")];
        for (flag, value, built, later) in cases {
            let has = |list: &str, v: &str| list.split(' ').any(|w| w == v);
            let Some(v) = value.filter(|v| !has(built, v)) else { continue };
            let number =
                v.parse::<f64>().is_ok_and(|x| x > 0.0) && later.contains(char::is_numeric);
            let d = if has(later, &v) || number {
                Diag::new("not-built", format!("{flag} {v} is not built yet"))
            } else {
                Diag::new("flag", format!("`{v}` is not a value of {flag}"))
            };
            let words = built.replace(' ', " or ");
            return Err(d.at(format!("{flag} {v}")).help(format!("use {flag} {words}")));
        }
        Ok(())
    }
}

/// Architectures of data centers: those with tensor cores for bf16.
const DEFAULT_ARCHS: [&str; 2] = ["sm_80", "sm_90a"];

/// An architecture as the compiler calls it.
fn arch(word: &str) -> Result<String> {
    let digits = word.strip_prefix("sm_").map(|n| n.trim_end_matches(['a', 'f']));
    let number = digits.and_then(|n| n.parse::<u32>().ok());
    if number.is_some_and(|n| (80..1000).contains(&n)) {
        return Ok(word.to_string());
    }
    let (what, first) = (format!("`{word}` is not an architecture of --arch"), DEFAULT_ARCHS[0]);
    Err(Diag::new("flag", what)
        .at(format!("--arch {word}"))
        .rule("sm_ and a number from 80 on, as in sm_90a")
        .help(format!("use {first}, sm_90a or sm_100a")))
}

/// Largest shardc.toml that is read, in bytes.
const MAX_TOML: u64 = 1 << 20;

/// Reads speeds of a rank.
///
/// # Errors
/// `hardware` if the file does not say them, or says what cannot be.
fn read_hardware(path: &Path) -> Result<Hardware> {
    let text = files::read_text(path, MAX_TOML)?;
    let place = path.display().to_string();
    let read: std::result::Result<Hardware, _> = toml::from_str(&text);
    let read = read.map_err(|e| {
        Diag::new("hardware", e.message().to_string()).help(
            "a file may say: link = 400e9, memory = 3e12, flops = 400e12, and [links] tp = 400e9",
        )
    });
    read.and_then(Hardware::checked).map_err(|d| d.at(place))
}

/// Reads `shardc.toml`: the flags, and the model's path relative to the file.
pub fn read_toml(path: &Path) -> Result<(String, Flags)> {
    #[derive(Deserialize)]
    struct WithModel {
        model: String,
        #[serde(flatten)]
        rest: toml::Table,
    }
    let bad = |m: String| {
        Diag::new("config-file", m)
            .at(path.display().to_string())
            .help("a minimal file is: model = \"my-model\" and mesh = \"dp=2,tp=2\"")
    };
    let text = files::read_text(path, MAX_TOML)?;
    let file: WithModel = toml::from_str(&text).map_err(|e| bad(e.message().to_string()))?;
    // The second line of the error names the key.
    let named = |e: toml::de::Error| bad(e.to_string().trim().replace('\n', ", "));
    let flags = file.rest.try_into().map_err(named)?;
    Ok((file.model, flags))
}
