//! Flags of `compile` and `check`, from the command line and from `shardc.toml`; flags win.

mod effect;
mod text;
mod values;

use clap::Args;
use serde::{Deserialize, Serialize};
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::files;
use shardc_ir::plan::{LrSchedule, Mode};
use shardc_ir::types::DType;
use shardc_passes::options::{
    Balance, Buffers, CpMode, CpSplit, Decay, Fuse, Optimizer, Options, TpMode, TpSteps, Transport,
};
use shardc_passes::shard::zero::Accumulate;
use shardc_passes::stages::layout::StageLayout;
use std::collections::BTreeSet;
use std::path::Path;
pub use text::default_microbatch;
use text::{Brought, global_batch, rows_of};
use values::*;
pub use values::{AXES, bytes_of};

/// What a user may ask of the compiler. Every field may stand in `shardc.toml` under its flag's name.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
#[group(skip)]
pub struct Flags {
    /// Axes and sizes, outer to inner: pp=2,dp=2,tp=2 (dp is short for dp_replicate, or with --zero
    /// or ep for dp_shard). ep and etp, as in dp=4,tp=2,ep=4,etp=1, are no axes: they factorise
    /// dp_shard, cp and tp again, for experts
    #[arg(long, help_heading = "Layout")]
    pub mesh: Option<String>,
    /// Axes from the one that varies fastest, in Megatron's words [default: tp-cp-ep-dp-pp]
    #[arg(long, help_heading = "Layout")]
    pub order: Option<String>,
    /// Ranks of one node: warns where tp or cp leave it
    #[arg(long, help_heading = "Layout")]
    pub node: Option<usize>,
    /// train, or infer (forward to logits) [default: train]
    #[arg(long, help_heading = "Run")]
    pub mode: Option<String>,
    /// Sequences per step over all ranks [default: 8, or the rows of a text]
    #[arg(long, help_heading = "Run")]
    pub global_batch: Option<usize>,
    /// Sequences per rank and microbatch [default: all, or with pp as many as give each of its ranks a
    /// microbatch]
    #[arg(long, help_heading = "Run")]
    pub microbatch: Option<usize>,
    /// Tokens per sequence [default: 512, or those of a text]
    #[arg(long, help_heading = "Run")]
    pub seq: Option<usize>,
    /// Element type of weights and activations: f32, or bf16 (training keeps an f32 master copy; sums
    /// and statistics are f32) [default: f32]
    #[arg(long, help_heading = "Run")]
    pub dtype: Option<String>,
    /// Element type in which gradients of bf16 weights are kept and reduced: f32 or bf16 [default:
    /// f32]
    #[arg(long, help_heading = "Run")]
    pub grad_dtype: Option<String>,
    /// Seed of initial weights and data order [default: 0]
    #[arg(long, help_heading = "Run")]
    pub seed: Option<u64>,
    /// ZeRO stage: what is split over dp_shard: 1 optimizer state, 2 and gradients, 3 and
    /// parameters [default: 0]
    #[arg(long, help_heading = "Layout")]
    pub zero: Option<u8>,
    /// What --zero 2 and 3 keep whole over the microbatches of a step, as FSDP's no_sync does: gradients
    /// (reduced once per step), weights (gathered once per step), both or none [default: none]
    #[arg(long, value_name = "WHAT", help_heading = "Layout")]
    pub zero_accumulate: Option<String>,
    /// Split the residual stream over tp along the sequence (sequence parallelism)
    #[arg(long, help_heading = "Layout")]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub sp: bool,
    /// Rows of the buffers of experts, as a multiple of what balanced routing needs; a run that needs
    /// more ends [default: what may ever be needed]
    #[arg(long, value_name = "F", help_heading = "Layout")]
    pub moe_bound: Option<f64>,
    /// Copies of tokens that an expert keeps, as a multiple of its share; others are dropped
    /// [default: none are]
    #[arg(long, value_name = "F", help_heading = "Layout")]
    pub moe_capacity: Option<f64>,
    /// Coefficient of the auxiliary loss that balances experts; 0 turns it off [default: the config's]
    #[arg(long, value_name = "F", allow_negative_numbers = true, help_heading = "Optimizer")]
    pub moe_aux: Option<f64>,
    /// Coefficient of the z-loss, which keeps the logits of routers small [default: 0]
    #[arg(long, value_name = "F", allow_negative_numbers = true, help_heading = "Optimizer")]
    pub moe_z_loss: Option<f64>,
    /// By how much a step moves the biases of routers towards experts that were chosen too seldom
    /// (families whose routers have one) [default: 0]
    #[arg(long, value_name = "F", allow_negative_numbers = true, help_heading = "Optimizer")]
    pub moe_bias_rate: Option<f64>,
    /// Context parallelism over cp: all-gather (of keys and values), ring (blocks of keys and
    /// values go around), or ulysses (heads against tokens) [default: all-gather]
    #[arg(long, help_heading = "Layout")]
    pub cp_mode: Option<String>,
    /// Which tokens a rank of cp has: contiguous, or zigzag (two chunks, as far from the beginning
    /// as from the end: equal work) [default: zigzag with --cp-mode ring, else contiguous]
    #[arg(long, help_heading = "Layout")]
    pub cp_split: Option<String>,
    /// Tensor parallelism: 1d (Megatron), or blocks of weights and activations on a grid of tp ranks:
    /// 2d (tp = q²), 2.5d (tp = depth·q²), 3d (tp = q³) [default: 1d]
    #[arg(long, help_heading = "Layout")]
    pub tp_mode: Option<String>,
    /// Grids of --tp-mode 2.5d, each with its rows of the batch [default: 2]
    #[arg(long, help_heading = "Layout")]
    pub tp_depth: Option<usize>,
    /// Operands of products with --tp-mode 2d and 2.5d: gathered (few calls), or summa (piece by piece,
    /// in as many steps as a side has ranks: less memory) [default: gathered]
    #[arg(long, help_heading = "Layout")]
    pub tp_steps: Option<String>,
    /// Pipeline schedule: naive, gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-v, v-half,
    /// v-min, dualpipe-v, search (the fastest that fits --memory), or a CSV file [default: 1f1b]
    #[arg(long, help_heading = "Layout")]
    pub schedule: Option<String>,
    /// Stages per rank of the pipeline [default: as the schedule wants, 1 or 2]
    #[arg(long, help_heading = "Layout")]
    pub chunks: Option<usize>,
    /// Where stages begin: balanced, equal, layers per stage (8,8,9,7), scopes that begin a stage,
    /// or Megatron's layout, as in Et*3|(tt|)*2,tL [default: balanced]
    #[arg(long, help_heading = "Layout")]
    pub layers: Option<String>,
    /// Relative speed of each rank of the pipeline, as in 1,1,0.5,1 [default: all equal]
    #[arg(long, help_heading = "Layout")]
    pub speeds: Option<String>,
    /// Drop parameters that ZeRO-3 or a grid gathered after forward, and gather them again in backward:
    /// yes or no [default: yes]
    #[arg(long, help_heading = "Layout")]
    pub reshard_after_forward: Option<String>,
    /// Fuse element-wise work, reductions and sums into few kernels, also with the products they read:
    /// yes, rows (not with products) or no [default: yes]
    #[arg(long, help_heading = "Run")]
    pub fuse: Option<String>,
    /// Dropout: 0 [default: 0]
    #[arg(long, help_heading = "Run")]
    pub dropout: Option<String>,
    /// What backward computes again: none, selective, full, sqrt (runs of layers), fit (the cheapest
    /// that fits --memory), or names of ops, norms, activations, selective [default: none]
    #[arg(long, help_heading = "Layout")]
    pub recompute: Option<String>,
    /// Memory of one rank, as in 24GiB or 80e9; a plan that needs more is refused
    #[arg(long, value_name = "BYTES", help_heading = "Layout")]
    #[serde(deserialize_with = "number_or_text")]
    pub memory: Option<String>,
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
    /// AdamW's betas [default: 0.9,0.999]
    #[arg(long, help_heading = "Optimizer")]
    pub betas: Option<String>,
    /// AdamW's epsilon [default: 1e-8]
    #[arg(long, allow_negative_numbers = true, help_heading = "Optimizer")]
    pub eps: Option<f64>,
    /// Decoupled weight decay [default: 0.01]
    #[arg(long, allow_negative_numbers = true, help_heading = "Optimizer")]
    pub weight_decay: Option<f64>,
    /// Parameters that decay: all, or matrices [default: all]
    #[arg(long, help_heading = "Optimizer")]
    pub decay: Option<String>,
    /// Largest global gradient norm [default: off]
    #[arg(long, allow_negative_numbers = true, help_heading = "Optimizer")]
    pub clip: Option<f64>,
    /// Tensors of the checkpoint that are not trained; repeatable
    #[arg(long, value_name = "GLOB", help_heading = "Optimizer")]
    pub freeze: Vec<String>,
    /// Sharding of a tensor of the checkpoint, or of a scope's last value: D is -, ?, an axis, a*b or
    /// a:(k)n, then @pN; or one of the words colwise, rowwise, replicated, for a tensor or the weight
    /// and bias of a scope; repeatable
    #[arg(long, value_name = "GLOB=D,D", help_heading = "Layout")]
    pub shard: Vec<String>,
    /// How ranks of the running plan exchange data: threads, mpi or nccl [default: threads]
    #[arg(long, help_heading = "Run")]
    pub transport: Option<String>,
    /// Device: cpu, or cuda, which puts code of the plan's kernels into its folder (run compiles them
    /// where there is none) [default: cpu]
    #[arg(long, help_heading = "Run")]
    pub device: Option<String>,
    /// Architectures that --device cuda makes code for [default: sm_80,sm_90a]
    #[arg(long, value_name = "ARCH,..", help_heading = "Run")]
    pub arch: Option<String>,
}

/// Largest batch and sequence: products of them with a mesh stay far from overflow.
const MAX_COUNT: usize = 1 << 30;

impl Flags {
    /// These flags, with the holes filled from `below`.
    pub fn over(self, below: Flags) -> Flags {
        macro_rules! merge {
            ($($f:ident)*) => { Flags {
                $($f: self.$f.or(below.$f),)*
                sp: self.sp || below.sp,
                freeze: if self.freeze.is_empty() { below.freeze } else { self.freeze },
                shard: if self.shard.is_empty() { below.shard } else { self.shard },
            } };
        }
        merge!(mesh order node mode global_batch microbatch seq dtype grad_dtype seed zero zero_accumulate moe_bound moe_capacity moe_aux moe_z_loss moe_bias_rate cp_mode cp_split tp_mode tp_depth tp_steps schedule chunks layers speeds reshard_after_forward dropout recompute
               memory fuse optimizer lr lr_schedule warmup total_steps betas eps weight_decay decay clip transport device arch)
    }

    /// The options of the passes, with defaults; refuses what is not built.
    pub fn options(&self) -> Result<Options> {
        self.options_with(None)
    }

    /// The same, with the defaults that a text brings.
    fn options_with(&self, text: Option<&Brought>) -> Result<Options> {
        self.refuse_unbuilt()?;
        let zero = self.zero.unwrap_or(0);
        if zero > 3 {
            return Err(Diag::new("flag", format!("--zero {zero} is no stage of ZeRO"))
                .at(format!("--zero {zero}"))
                .help("use --zero 0, 1, 2 or 3"));
        }
        let (mut mesh, [ep, etp]) = parse_mesh(self.mesh.as_deref().unwrap_or(""), zero)?;
        if let (None, Some(text)) = (&self.mesh, text) {
            mesh.clone_from(&text.mesh);
        }
        let mesh = match &self.order {
            Some(order) => in_order(mesh, order)?,
            None => mesh,
        };
        if self.node == Some(0) {
            return Err(Diag::new("flag", "a node of 0 ranks")
                .at("--node 0")
                .help("for example --node 8"));
        }
        let word = |given: &Option<String>, flag: &str, words: &[&str]| -> Result<usize> {
            let Some(g) = given else { return Ok(0) };
            words.iter().position(|w| w == g).ok_or_else(|| {
                Diag::new("flag", format!("`{g}` is no value of {flag}"))
                    .at(format!("{flag} {g}"))
                    .help(format!("use {}", words.join(" or ")))
            })
        };
        let mode = [Mode::Train, Mode::Infer][word(&self.mode, "--mode", &["train", "infer"])?];
        let decay =
            [Decay::All, Decay::Matrices][word(&self.decay, "--decay", &["all", "matrices"])?];
        let optimizer = match word(&self.optimizer, "--optimizer", &["adamw", "sgd"])? {
            0 => {
                let (beta1, beta2) = betas(self.betas.as_deref().unwrap_or("0.9,0.999"))?;
                Optimizer::AdamW { beta1, beta2, eps: positive("--eps", self.eps.unwrap_or(1e-8))? }
            }
            _ => Optimizer::Sgd,
        };
        let rate = positive("--lr", self.lr.unwrap_or(1e-3))?;
        let (warmup, total) = (self.warmup.unwrap_or(0), self.total_steps.unwrap_or(1000));
        let lr = match word(&self.lr_schedule, "--lr-schedule", &["constant", "warmup-cosine"])? {
            0 => LrSchedule::Constant { lr: rate },
            _ if warmup >= total => {
                let what = format!("--warmup {warmup} is not below --total-steps {total}");
                return Err(Diag::new("flag", what).at(format!("--warmup {warmup}")).help(
                    match warmup.max(1).checked_mul(10) {
                        Some(n) => format!("for example --total-steps {n}"),
                        None => format!("for example --warmup {}", total / 10),
                    },
                ));
            }
            _ => LrSchedule::WarmupCosine { lr: rate, warmup, total, floor: 0.0 },
        };
        let shard = self.shard.iter().map(|s| shard_rule(s)).collect::<Result<_>>()?;
        let transports = Transport::ALL.map(Transport::name);
        let transport = Transport::ALL[word(&self.transport, "--transport", &transports)?];
        let dtypes = [DType::F32, DType::BF16];
        let dtype = dtypes[word(&self.dtype, "--dtype", &["f32", "bf16"])?];
        let grad_dtype = dtypes[word(&self.grad_dtype, "--grad-dtype", &["f32", "bf16"])?];
        if (dtype, grad_dtype) == (DType::F32, DType::BF16) {
            return Err(Diag::new("flag", "--grad-dtype bf16 is for weights of 2 bytes")
                .at("--grad-dtype bf16")
                .help("add --dtype bf16, or leave it out: gradients are f32 (4 bytes)"));
        }
        let mut o = Options {
            mesh,
            node: self.node,
            transport,
            mode,
            global_batch: self.global_batch.unwrap_or(global_batch(text)),
            microbatch: 0,
            seq: self.seq.unwrap_or(text.map_or(512, |t| t.seq)),
            dtype,
            grad_dtype,
            sp: self.sp,
            optimizer,
            lr,
            weight_decay: not_negative("--weight-decay", self.weight_decay.unwrap_or(0.01))?,
            decay,
            clip: self.clip.map(|c| positive("--clip", c)).transpose()?,
            freeze: self.freeze.clone(),
            shard,
            seed: self.seed.unwrap_or(0),
            fuse: [Fuse::Yes, Fuse::Rows, Fuse::No]
                [word(&self.fuse, "--fuse", &["yes", "rows", "no"])?],
            observe: false,
            memory: self.memory.as_deref().map(memory).transpose()?,
            ep: ep.unwrap_or(1),
            etp,
            moe: self.buffers()?,
            balance: Balance {
                aux: self.moe_aux.map(|x| not_negative("--moe-aux", x)).transpose()?,
                z: not_negative("--moe-z-loss", self.moe_z_loss.unwrap_or(0.0))?,
                rate: not_negative("--moe-bias-rate", self.moe_bias_rate.unwrap_or(0.0))?,
            },
            recompute: recompute(self.recompute.as_deref().unwrap_or("none"))?,
            cp_mode: [CpMode::AllGather, CpMode::Ring, CpMode::Ulysses]
                [word(&self.cp_mode, "--cp-mode", &["all-gather", "ring", "ulysses"])?],
            cp_split: match &self.cp_split {
                None => None,
                given => Some(
                    [CpSplit::Contiguous, CpSplit::Zigzag]
                        [word(given, "--cp-split", &["contiguous", "zigzag"])?],
                ),
            },
            tp_mode: self.tp_mode()?,
            tp_steps: [TpSteps::Gathered, TpSteps::Summa]
                [word(&self.tp_steps, "--tp-steps", &["gathered", "summa"])?],
            zero,
            zero_accumulate: Accumulate::ALL[word(
                &self.zero_accumulate,
                "--zero-accumulate",
                &Accumulate::ALL.map(Accumulate::name),
            )?],
            reshard_after_forward: word(
                &self.reshard_after_forward,
                "--reshard-after-forward",
                &["yes", "no"],
            )? == 0,
            schedule: schedule(self.schedule.as_deref().unwrap_or("1f1b"))?,
            chunks: self.chunks,
            layers: self.layers.clone().unwrap_or_default(),
            speeds: vec![],
        };
        o.speeds = speeds(self.speeds.as_deref().unwrap_or(""), o.axis("pp"))?;
        StageLayout::parse(&o.layers)?;
        let sizes = [
            ("--global-batch", o.global_batch),
            ("--seq", o.seq),
            ("--microbatch", self.microbatch.unwrap_or(1)),
        ];
        for (flag, n) in sizes {
            if n == 0 || n > MAX_COUNT {
                return Err(Diag::new("flag", format!("{flag} {n} is not in 1..={MAX_COUNT}"))
                    .at(format!("{flag} {n}"))
                    .help(format!("for example {flag} 8")));
            }
        }
        o.microbatch = match (self.microbatch, text) {
            (Some(n), _) => n,
            (None, Some(text)) => rows_of(text, &o),
            (None, None) => default_microbatch(&o),
        };
        Ok(o)
    }

    fn buffers(&self) -> Result<Buffers> {
        let factor = |flag: &str, x: f64| -> Result<f64> {
            positive(flag, x)?;
            if x <= 1e6 { Ok(x) } else { positive(flag, f64::INFINITY) }
        };
        match (self.moe_bound, self.moe_capacity) {
            (None, None) => Ok(Buffers::Worst),
            (Some(x), None) if x > 0.0 && x < 1.0 => {
                Err(Diag::new("flag", format!("--moe-bound {x} is less than an even load needs"))
                    .at(format!("--moe-bound {x}"))
                    .help("use --moe-bound 1.5, or --moe-capacity to drop what does not fit"))
            }
            (Some(x), None) => Ok(Buffers::Bound(factor("--moe-bound", x)?)),
            (None, Some(x)) => Ok(Buffers::Capacity(factor("--moe-capacity", x)?)),
            (Some(x), Some(y)) => Err(Diag::new("flag", "two sizes of the buffers of experts")
                .at(format!("--moe-bound {x} --moe-capacity {y}"))
                .rule("with a capacity no buffer is too small: what it has no room for is dropped")
                .help("give 1 of them")),
        }
    }

    fn tp_mode(&self) -> Result<TpMode> {
        let mode = match self.tp_mode.as_deref().unwrap_or("1d") {
            "1d" => TpMode::OneD,
            "2d" => TpMode::TwoD,
            "2.5d" => TpMode::TwoAndHalfD { depth: self.tp_depth.unwrap_or(2) },
            "3d" => TpMode::ThreeD,
            other => {
                return Err(Diag::new("flag", format!("`{other}` is no value of --tp-mode"))
                    .at(format!("--tp-mode {other}"))
                    .help("use 1d or 2d or 2.5d or 3d"));
            }
        };
        let Some(depth) = self.tp_depth else { return Ok(mode) };
        let bad = |what: String, help: &str| {
            Err(Diag::new("flag", what).at(format!("--tp-depth {depth}")).help(help))
        };
        match mode {
            TpMode::TwoAndHalfD { .. } if depth == 0 || depth > MAX_COUNT => {
                bad(format!("{depth} grids are not in 1..={MAX_COUNT}"), "for example --tp-depth 2")
            }
            TpMode::TwoAndHalfD { .. } => Ok(mode),
            TpMode::OneD | TpMode::TwoD | TpMode::ThreeD => {
                bad(format!("--tp-mode {mode} has no depth"), "use --tp-mode 2.5d, or leave it out")
            }
        }
    }

    /// Values that other compilers of this field have and no pass makes yet.
    /// The architectures that the plan's kernels are compiled for; none, for the CPU.
    ///
    /// # Errors
    /// `flag` if a word is no architecture, or if there are some and no device.
    pub fn archs(&self) -> Result<BTreeSet<String>> {
        let cuda = self.device.as_deref() == Some("cuda");
        match &self.arch {
            None if cuda => Ok(DEFAULT_ARCHS.map(String::from).into()),
            None => Ok(BTreeSet::new()),
            Some(all) if cuda => all.split(',').map(arch).collect(),
            Some(all) => Err(Diag::new("flag", "--arch is for code of a device")
                .at(format!("--arch {all}"))
                .help(format!("add --device cuda, or leave --arch {all} out"))),
        }
    }

    fn refuse_unbuilt(&self) -> Result<()> {
        // Flag, value, what is built, and what has a meaning but is not.
        let cases: [(&str, Option<String>, &str, &str); 2] = [
            ("--dropout", self.dropout.clone(), "0", "config 0.1"),
            ("--device", self.device.clone(), "cpu cuda", ""),
        ];
        for (flag, value, built, later) in cases {
            let has = |list: &str, v: &str| list.split(' ').any(|w| w == v);
            let Some(v) = value.filter(|v| !has(built, v)) else { continue };
            let number =
                v.parse::<f64>().is_ok_and(|x| x > 0.0) && later.contains(char::is_numeric);
            let d = if has(later, &v) || number {
                Diag::new("not-built", format!("{flag} {v} is not built yet"))
                    .exit(Exit::Unsupported)
            } else {
                Diag::new("flag", format!("`{v}` is no value of {flag}"))
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
    let (what, first) = (format!("`{word}` is no architecture of --arch"), DEFAULT_ARCHS[0]);
    Err(Diag::new("flag", what)
        .at(format!("--arch {word}"))
        .rule("sm_ and a number from 80 on, as in sm_90a")
        .help(format!("use {first}, sm_90a or sm_100a")))
}

/// Largest shardc.toml that is read, in bytes.
const MAX_TOML: u64 = 1 << 20;

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
    let flags = file.rest.try_into().map_err(|e: toml::de::Error| bad(e.message().to_string()))?;
    Ok((file.model, flags))
}
