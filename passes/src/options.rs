//! What the user asked for, after the command line and before the passes.

use crate::autodiff::chunks::LossChunks;
use crate::autodiff::recompute::Recompute;
use crate::lora::Lora;
use crate::zero::{Accumulate, Zero};
use serde::{Deserialize, Serialize};
use shardc_ir::axes::{self, AxisRole};
use shardc_ir::documents::Documents;
use shardc_ir::hardware::Hardware;
use shardc_ir::loss_scale::LossScaling;
use shardc_ir::plan::{Dropout, LrSchedule, Mode, TokenOrder};
use shardc_ir::types::DType;

/// The optimizer of parameters that no group has, and its constants.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Optimizer {
    AdamW { beta1: f64, beta2: f64, eps: f64 },
    Sgd,
}

/// Which parameters weight decay applies to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    All,
    Matrices,
}

/// One `--shard 'GLOB=D,D[@pN]'`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ShardRule {
    /// Matches names of the checkpoint's tensors and of inputs, or scope paths of activations.
    pub glob: String,
    /// One entry per dim, as written: `-`, `?`, `tp`, `dp*tp`, `tp:(1)2`, each with an optional `?`.
    pub dims: Vec<String>,
    pub priority: u8,
}

/// How the ranks of the pipeline order their work.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// A schedule by its name, as `--schedule` has it.
    Named(String),
    /// The text of a CSV file; see [`shardc_ir::schedule::parse_csv`].
    Csv(String),
}

impl Order {
    /// The word of the command line.
    pub fn name(&self) -> &str {
        match self {
            Order::Named(name) => name,
            Order::Csv(_) => "custom (CSV)",
        }
    }
}

impl Default for Order {
    fn default() -> Order {
        Order::Named("1f1b".into())
    }
}

/// How the ranks of a running plan exchange data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// Ranks are threads of one process.
    #[default]
    Threads,
    /// Ranks are processes that MPI has started.
    Mpi,
    /// Ranks are processes with a CUDA device each.
    Nccl,
}

impl Transport {
    pub const ALL: [Transport; 3] = [Transport::Threads, Transport::Mpi, Transport::Nccl];
    /// The word of the command line.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Threads => "threads",
            Transport::Mpi => "mpi",
            Transport::Nccl => "nccl",
        }
    }
    /// True if data move while the ranks work: by the device, or by a progress thread. Threads read each other's
    /// memory with the cores that compute.
    pub fn overlaps(self) -> bool {
        match self {
            Transport::Threads => false,
            Transport::Mpi | Transport::Nccl => true,
        }
    }
}

/// Context parallelism: how attention sees the tokens of other ranks of `cp`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpMode {
    /// Keys and values are gathered (Llama 3).
    #[default]
    AllGather,
    /// Blocks of keys and values go around a ring, and what attention makes of each is merged (Liu
    /// et al., 2023, *Ring Attention*).
    Ring,
    /// Attention splits heads instead of tokens (Jacobs et al., 2023, *DeepSpeed Ulysses*).
    Ulysses,
}

impl CpMode {
    /// The word of the command line.
    pub fn name(self) -> &'static str {
        match self {
            CpMode::AllGather => "all-gather",
            CpMode::Ring => "ring",
            CpMode::Ulysses => "ulysses",
        }
    }
}

/// Context parallelism: which tokens of a sequence a rank of `cp` has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpSplit {
    /// Consecutive ones.
    Contiguous,
    /// Two chunks, as far from the beginning as from the end: equal work under a causal mask.
    Zigzag,
}

/// How the linears of a layer are split over `tp`; see [`crate::shard::grid`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum TpMode {
    /// Weights by columns, then by rows; the residual stream is whole (Megatron-LM).
    #[default]
    #[serde(rename = "1d")]
    OneD,
    /// Weights and activations in blocks on a grid of q² ranks (Optimus).
    #[serde(rename = "2d")]
    TwoD,
    /// `depth` such grids, each with its rows of the batch (Tesseract).
    #[serde(rename = "2.5d")]
    TwoAndHalfD { depth: usize },
    /// Weights and activations in blocks on a cube of q³ ranks.
    #[serde(rename = "3d")]
    ThreeD,
}

/// Which nodes run as one kernel; see [`crate::group`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fuse {
    /// Work on rows, and products with what becomes of their results.
    #[default]
    Yes,
    /// Work on rows: products are alone, as a library makes them.
    Rows,
    No,
}

/// How products on a grid get the operands that other ranks hold; see [`crate::window::summa`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TpSteps {
    /// Whole: few calls and one product, but the gathered operand is held meanwhile.
    #[default]
    Gathered,
    /// Piece by piece: as many steps as a side has ranks, each with one piece of each operand.
    Summa,
}

impl std::fmt::Display for TpMode {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self {
            TpMode::OneD => "1d",
            TpMode::TwoD => "2d",
            TpMode::TwoAndHalfD { .. } => "2.5d",
            TpMode::ThreeD => "3d",
        })
    }
}

impl TpMode {
    /// Ranks of a grid whose side has `q`.
    fn ranks(self, q: usize) -> usize {
        match self {
            TpMode::OneD => q,
            TpMode::TwoD => q.saturating_mul(q),
            TpMode::TwoAndHalfD { depth } => depth.saturating_mul(q).saturating_mul(q),
            TpMode::ThreeD => q.saturating_mul(q).saturating_mul(q),
        }
    }
    /// Ranks along a side of the grid; `None` if `tp` ranks are no such grid. A grid has no side of
    /// one rank unless it has one rank.
    ///
    /// ```
    /// # use shardc_passes::options::TpMode;
    /// assert_eq!(TpMode::TwoD.side(9), Some(3));
    /// assert_eq!(TpMode::TwoAndHalfD { depth: 2 }.side(8), Some(2));
    /// assert_eq!(TpMode::ThreeD.side(4), None);
    /// ```
    pub fn side(self, tp: usize) -> Option<usize> {
        if self == TpMode::OneD || tp == 1 {
            return Some(tp);
        }
        (2..=tp).take_while(|&q| self.ranks(q) <= tp).find(|&q| self.ranks(q) == tp)
    }
    /// The grids of this mode nearest to `tp` ranks, at most `most`, whose side is as `ok` wants.
    pub fn nearest(self, tp: usize, most: usize, ok: impl Fn(usize) -> bool) -> Vec<usize> {
        let grids = (1..=64).filter(|&q| ok(q)).map(|q| if q == 1 { 1 } else { self.ranks(q) });
        let mut all: Vec<usize> = grids.collect();
        all.sort_by_key(|n| (n.abs_diff(tp), *n));
        all.truncate(most);
        all
    }
    /// What tp must be.
    pub fn rule(self) -> String {
        match self {
            TpMode::OneD => "tp is any number".into(),
            TpMode::TwoD => "tp = q * q with --tp-mode 2d".into(),
            TpMode::TwoAndHalfD { depth } => {
                format!("tp = {depth} * q * q with --tp-mode 2.5d --tp-depth {depth}")
            }
            TpMode::ThreeD => "tp = q * q * q with --tp-mode 3d".into(),
        }
    }
    /// Pieces into which a grid of side `q` cuts the rows of a microbatch.
    pub fn rows(self, q: usize) -> usize {
        match self {
            TpMode::OneD => 1,
            TpMode::TwoD => q,
            TpMode::TwoAndHalfD { depth } => depth * q,
            TpMode::ThreeD => q * q,
        }
    }
}

/// Declares the options: each with its type, and what it is where nothing is asked for.
macro_rules! options {
    ($(#[$about:meta])* { $($(#[$of:meta])* pub $name:ident: $ty:ty = $default:expr,)* }) => {
        $(#[$about])*
        #[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Options { $($(#[$of])* pub $name: $ty,)* }
        impl Default for Options {
            fn default() -> Options {
                Options { $($name: $default,)* }
            }
        }
        impl Options {
            /// The names of all options.
            pub const NAMES: &[&str] = &[$(stringify!($name),)*];
        }
    };
}

options! {
/// Everything the pipeline of passes depends on besides the model. [`Options::default`] is what holds where
/// nothing is asked for.
{
    /// Axes outer to inner, canonical names.
    pub mesh: Vec<(String, usize)> = vec![],
    /// Ranks of one node, in rank order; `None`: nothing is known of nodes.
    pub node: Option<usize> = None,
    /// What `run` uses if it is not told.
    pub transport: Transport = Transport::default(),
    pub mode: Mode = Mode::Train,
    pub global_batch: usize = 8,
    /// Sequences per rank and microbatch.
    pub microbatch: usize = 8,
    pub seq: usize = 512,
    /// Element type of weights and activations: f32, or bf16 or f16 as [`crate::precision`] has them.
    pub dtype: DType = DType::F32,
    /// Element type in which gradients of weights of 2 bytes are kept, summed and reduced: f32 or theirs.
    pub grad_dtype: DType = DType::F32,
    /// How the loss is scaled where values are f16.
    pub loss_scaling: LossScaling = LossScaling::default(),
    /// Sequence parallelism: the residual stream is split over tp along the sequence.
    pub sp: bool = false,
    pub optimizer: Optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 },
    /// Groups of parameters that have update rules of their own, each as `--optim` has it: later ones win.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub optim: Vec<String> = vec![],
    /// The text of update rules beside those that are built in.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub optim_file: String = String::new(),
    pub lr: LrSchedule = LrSchedule::Constant { lr: 1e-3 },
    pub weight_decay: f64 = 0.01,
    pub decay: Decay = Decay::Matrices,
    pub clip: Option<f64> = None,
    /// Globs over names of the checkpoint's tensors: parameters that are not trained.
    pub freeze: Vec<String> = vec![],
    /// Low-rank adapters: all other parameters are frozen, but for those that `train` names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<Lora> = None,
    /// Globs over names of the checkpoint's tensors: what is trained beside adapters.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub train: Vec<String> = vec![],
    pub shard: Vec<ShardRule> = vec![],
    /// Layouts are chosen by price, and not as the model's family has them.
    pub auto: bool = false,
    /// Bytes that these may need by their estimate, which is not the plan's peak.
    pub budget: Option<usize> = None,
    /// What layouts are priced with then.
    pub hardware: Hardware = Hardware::default(),
    /// The machine that these speeds are of, by its name or file: whole plans are compared by their price on it. Not
    /// stored: nothing in a plan depends on it but what was chosen.
    #[serde(skip)]
    pub machine: Option<String> = None,
    pub seed: u64 = 0,
    /// What training sets to 0 at random.
    pub dropout: Dropout = Dropout::Nothing,
    /// How documents lie in rows of tokens; `None`: a row is one.
    pub documents: Option<Documents> = None,
    /// Which nodes are joined to kernels.
    pub fuse: Fuse = Fuse::default(),
    /// Keep logits and reduced gradients as outputs (`run --dump`).
    pub observe: bool = false,
    /// Ranks that split the experts.
    pub ep: usize = 1,
    /// Ranks that split the width of each expert; `None`: those of tp.
    pub etp: Option<usize> = None,
    /// How large the buffers of experts are.
    pub moe: Buffers = Buffers::default(),
    /// What keeps experts in balance.
    pub balance: Balance = Balance::default(),
    /// Weight of the loss of layers that predict tokens behind the next; 0: they are not trained.
    pub mtp: f64 = 0.0,
    /// What backward computes again.
    pub recompute: Recompute = Recompute::default(),
    /// Chunks of tokens in which the loss and its gradients are made; 1: all tokens at once.
    pub loss_chunks: LossChunks = LossChunks::default(),
    /// How attention sees the tokens of other ranks of `cp`.
    pub cp_mode: CpMode = CpMode::default(),
    /// Which tokens a rank of `cp` has; `None`: zigzag in a ring, else contiguous. A model is compiled with
    /// [`crate::checks::balanced`] in place of it.
    pub cp_split: Option<CpSplit> = None,
    /// How linears are split over `tp`.
    pub tp_mode: TpMode = TpMode::default(),
    /// How products on a grid get their operands.
    pub tp_steps: TpSteps = TpSteps::default(),
    /// ZeRO stage: 0 to 3, see [`crate::zero::Zero`].
    pub zero: u8 = 0,
    /// What ZeRO-2 and 3 keep whole over the microbatches of a step.
    pub zero_accumulate: Accumulate = Accumulate::default(),
    /// Gathered parameters are dropped after forward and gathered again in backward (ZeRO-3).
    pub reshard_after_forward: bool = true,
    /// Order of the pipeline's work.
    pub schedule: Order = Order::default(),
    /// Stages per rank of the pipeline; `None`: as the schedule wants.
    pub chunks: Option<usize> = None,
    /// Where the model is cut into stages: see [`crate::stages::layout::StageLayout`].
    pub layers: String = String::new(),
    /// Speed of each rank of the pipeline, relative to the others; empty: all are equal.
    pub speeds: Vec<f64> = vec![],
    /// Most bytes a rank may need.
    pub memory: Option<usize> = None,
    /// Names of the flags that were given, sorted: an option of another one is a default, which nobody has chosen.
    /// No pass looks at it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub given: Vec<String> = vec![],
}
}

/// How many rows the buffer of a group of experts has for the tokens of a rank.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Buffers {
    /// As many as may ever be needed.
    #[default]
    Worst,
    /// So many times what is needed if all groups are used alike; a run that needs more ends.
    Bound(f64),
    /// An expert keeps so many times its share of a rank's copies, and drops the others.
    Capacity(f64),
}

/// What training adds to keep experts in balance.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Balance {
    /// Coefficient of the auxiliary loss; 0: there is none; `None`: as the model's config says.
    pub aux: Option<f64>,
    /// Coefficient of the z-loss of routers; 0: there is none.
    pub z: f64,
    /// By how much a step moves the biases that correct the choice of experts; 0: they stay.
    pub rate: f64,
}

impl Options {
    /// What its stage of ZeRO means.
    pub fn zero(&self) -> Zero {
        Zero::of(self.zero, self.zero_accumulate, self.microbatches())
    }
    /// Size of an axis; 1 if the mesh does not have it.
    pub fn axis(&self, name: &str) -> usize {
        self.mesh.iter().find(|a| a.0 == name).map_or(1, |a| a.1)
    }
    /// Ranks that split the width of each expert.
    pub fn etp(&self) -> usize {
        self.etp.unwrap_or(self.axis("tp"))
    }
    /// Ranks among which the batch is split.
    pub fn data_parallel(&self) -> usize {
        axes::names(AxisRole::of_rows).map(|a| self.axis(a)).product()
    }
    /// How the tokens of a sequence are dealt to the ranks of `cp`.
    pub fn tokens(&self) -> TokenOrder {
        let ring = self.cp_mode == CpMode::Ring;
        let split =
            self.cp_split.unwrap_or(if ring { CpSplit::Zigzag } else { CpSplit::Contiguous });
        match (split, self.axis("cp")) {
            (CpSplit::Zigzag, ranks @ 2..) => TokenOrder::Zigzag { ranks },
            (CpSplit::Zigzag | CpSplit::Contiguous, _) => TokenOrder::Contiguous,
        }
    }
    /// Microbatches per step.
    pub fn microbatches(&self) -> usize {
        self.global_batch / (self.data_parallel() * self.microbatch).max(1)
    }
    /// Rows of one microbatch over all ranks.
    pub fn microbatch_rows(&self) -> usize {
        self.microbatch * self.data_parallel()
    }
}
