//! How a model lies on ranks, and what software runs it.

use crate::collective::Group;
use crate::device::{Device, Precision};
use serde::Deserialize;
use shardc_ir::diag::{Diag, Result};
use std::sync::OnceLock;

/// What backward computes again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Recompute {
    None,
    /// Attention between its products.
    Selective,
    /// All but every other product: torchtitan's policy by op.
    Ops,
    /// Modules of a layer beside what is element-wise.
    Modules(Modules),
    /// Whole layers, with their collectives: so many of so many layers of each stage.
    Layers(u16, u16),
    /// Whole layers, with their collectives.
    Full,
}

/// Modules of a layer: what makes queries, keys and values of latent vectors, and the experts' products or all of
/// theirs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Modules {
    pub latents: bool,
    pub experts: Anew,
}

/// What of a layer's experts is computed again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Anew {
    Nothing,
    /// Their products, of the rows that have come.
    Products,
    /// Router, exchanges and the shared expert, too.
    All,
}

impl Recompute {
    /// So many of as many layers of a stage; none if there are too many to say.
    pub fn some(n: usize, of: usize) -> Option<Recompute> {
        Some(Recompute::Layers(u16::try_from(n).ok()?, u16::try_from(of).ok()?))
    }

    /// How many of a stage's layers are computed again as a whole, if nothing else is computed again.
    pub fn layers(self, of: usize) -> Option<usize> {
        match self {
            Recompute::None => Some(0),
            Recompute::Layers(n, _) => Some(usize::from(n)),
            Recompute::Full => Some(of),
            Recompute::Selective | Recompute::Ops | Recompute::Modules(_) => None,
        }
    }

    /// The part of the layers that is computed again as a whole.
    pub fn whole(self) -> f64 {
        match self {
            Recompute::Full => 1.0,
            Recompute::Layers(n, of) => f64::from(n) / f64::from(of.max(1)),
            _parts => 0.0,
        }
    }

    /// What of layers that are not computed again as a whole is.
    pub fn modules(self) -> Modules {
        match self {
            Recompute::Modules(m) => m,
            _another => Modules { latents: false, experts: Anew::Nothing },
        }
    }

    /// One for all that take the same time of a layer.
    #[must_use]
    pub fn reduced(self) -> Recompute {
        let Recompute::Layers(n, of) = self else { return self };
        let (mut a, mut b) = (n, of);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        Recompute::Layers(n / a.max(1), of / a.max(1))
    }

    /// True if nothing is computed again that the other does not, too.
    pub fn keeps_all_of(self, other: Recompute) -> bool {
        use Recompute::{Full, Layers, Modules, None};
        match (self, other) {
            (None, _) | (_, Full) => true,
            (Layers(n, of), Layers(m, others)) => of == others && n <= m,
            (Modules(a), Modules(b)) => a.latents <= b.latents && a.experts <= b.experts,
            (a, b) => a == b,
        }
    }
}

/// Order of a pipeline's work, by what is idle in it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Schedule {
    /// Also GPipe's: all stages wait for the first and the last microbatch.
    OneFOneB,
    /// 1F1B over chunks.
    Interleaved,
    /// Weight gradients fill the end.
    ZbH1,
    /// They fill the beginning, too.
    ZbH2,
    /// A search has filled all that memory of two 1F1B allows (ZB-2p).
    Filled,
    /// Two chunks along a V, filled.
    ZbV,
    /// Two chunks along a V, forwards and backwards in pairs.
    DualPipe,
}

/// How attention sees the tokens of other ranks of cp.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Context {
    /// Keys and values are gathered.
    Gathered,
    /// Blocks of them go around a ring, beside the work on other blocks.
    Ring,
    /// An all_to_all gives a rank all tokens of some heads (Ulysses).
    Heads,
}

/// Parallelism of a step. Ranks are numbered from tp over cp and dp to pp.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Layout {
    pub tp: usize,
    pub cp: usize,
    pub context: Context,
    /// Ranks of cp have equal parts of the scores that are not masked.
    pub even: bool,
    pub dp: usize,
    pub pp: usize,
    /// Stages per rank of the pipeline.
    pub chunks: usize,
    /// Ranks of cp and dp that split experts, and ranks that split each of them.
    pub ep: usize,
    pub etp: usize,
    /// Of `dp`, the ranks among which ZeRO splits; the rest are replicas.
    pub shards: usize,
    /// ZeRO's stage.
    pub zero: u8,
    pub sp: bool,
    pub recompute: Recompute,
    pub schedule: Schedule,
    /// Sequences per rank and microbatch.
    pub microbatch: usize,
    pub microbatches: usize,
}

impl Layout {
    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.tp * self.cp * self.dp * self.pp
    }

    /// The ranks of tp.
    pub fn tp_group(&self, d: &Device) -> Group {
        Group::new(d, 1, self.tp)
    }

    /// The ranks of cp.
    pub fn cp_group(&self, d: &Device) -> Group {
        Group::new(d, self.tp, self.cp)
    }

    /// The ranks among which ZeRO splits; cp is among them.
    pub fn shard_group(&self, d: &Device) -> Group {
        Group::new(d, self.tp, self.cp * self.shards)
    }

    /// The ranks that have the same shards.
    pub fn replica_group(&self, d: &Device) -> Group {
        Group::new(d, self.tp * self.cp * self.shards, self.dp / self.shards.max(1))
    }

    /// The ranks that split experts.
    pub fn ep_group(&self, d: &Device) -> Group {
        Group::new(d, self.etp, self.ep)
    }

    /// The ranks that have the same experts.
    pub fn expert_replicas(&self, d: &Device) -> Group {
        let size = self.tp * self.cp * self.dp / (self.ep * self.etp).max(1);
        Group::new(d, self.ep * self.etp, size.max(1))
    }

    /// Ranks from a stage to the next.
    pub fn stage_stride(&self) -> usize {
        self.tp * self.cp * self.dp
    }
}

/// Generation of the kernels of attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kernels {
    /// Scores in memory, in few kernels.
    Unfused,
    /// Scores in memory, op by op.
    Eager,
    /// Scores stay in the processors: the generation.
    Flash(u8),
    /// So they do in cuDNN's.
    Cudnn,
    /// So they do in the compiler's own, whose products of experts are its own too.
    Own,
}

impl Kernels {
    /// Share of the peak on a device: of the last generation that it has, up to this one.
    ///
    /// # Errors
    /// `device` if it has none.
    pub fn share(self, d: &Device) -> Result<f64> {
        let (named, last) = match self {
            Kernels::Unfused | Kernels::Eager => return Ok(1.0),
            Kernels::Flash(last) => (None, last),
            Kernels::Cudnn => (d.attention.get("cudnn").copied(), u8::MAX),
            Kernels::Own => (d.attention.get("own").copied(), 2),
        };
        let of = |n: u8| d.attention.get(&format!("flash{n}")).copied();
        named
            .or_else(|| (1..=last).rev().find_map(of))
            .or_else(|| d.attention.values().next().copied())
            .ok_or_else(|| {
                Diag::new("device", format!("{} has no kernels of attention", d.name))
                    .help("add a share to its table `attention`, as in flash2 = 0.4")
            })
    }
}

/// What goes on behind other work.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Overlap {
    /// ZeRO's gathers, sums of gradients.
    pub dp: bool,
    /// Collectives of tp behind the product before or after them.
    pub tp: bool,
    /// Of tp in backward alone, behind gradients of weights.
    pub tp_backward: bool,
    /// Transfers between stages.
    pub pp: bool,
    /// Exchanges of experts.
    pub ep: bool,
    /// Keys and values are gathered behind the product that makes queries alone, in backward behind nothing, and not behind
    /// attention.
    pub early_keys: bool,
    /// Every rank of tp sends the whole of what a stage sends.
    pub whole_sends: bool,
}

/// What is asked of a step beside its layout.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Job {
    /// Tokens of a sequence.
    pub seq: usize,
    /// The part of all scores that masks leave, in the mean of layers with attention: half of them where a token sees all
    /// before it, fewer with windows.
    pub seen: f64,
    pub precision: Precision,
    pub attention: Kernels,
    pub overlap: Overlap,
    /// Work over rows is fused by a compiler.
    pub compiled: bool,
}

/// What work over rows moves.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rows {
    /// Bytes for each element of the residual stream, in a layer's forward: what tp cuts with sp alone.
    pub stream: f64,
    /// Bytes for each element of queries, keys, values and what attention gives.
    pub heads: f64,
    /// Bytes for each element of the MLP's width.
    pub ffn: f64,
    /// Bytes for each score that is in memory, beside those of the two products.
    pub scores: f64,
    /// Backward moves so many times what forward does.
    pub backward: f64,
    /// Bytes for each logit, forward and backward.
    pub loss: f64,
    /// Launches of a layer's forward beside its products.
    pub launches: f64,
}

/// What software does for experts beside their products, in a layer's forward; its backward does twice the launches.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Routed {
    /// Launches of a layer: of its router, of the order of rows, of exchanges.
    pub launches: f64,
    /// Launches for each expert that a rank has.
    pub each: f64,
    /// Times that each element of a token's copies is read or written.
    pub moves: f64,
    /// The part of an exchange that is seen, whatever work it could be behind.
    pub seen: f64,
}

/// Software that trains, as data: for frameworks described by hand, and for what plans of this compiler
/// do in general.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stack {
    /// The names that published tables give it.
    pub names: Vec<String>,
    pub eager: Rows,
    /// With a compiler; as eager where there is none.
    pub compiled: Option<Rows>,
    /// Bytes for each element of a product's operands that is made fp8.
    pub fp8: f64,
    /// Bytes that the optimizer moves for each parameter.
    pub optimizer: f64,
    /// Bytes for each parameter and microbatch, to add to its gradient.
    pub accumulate: f64,
    /// Bytes of a gradient's element when it is summed over ranks.
    pub gradient: f64,
    /// In published runs ranks of cp have equal parts of the scores that are not masked.
    pub even: bool,
    /// Speed of attention over several ranks of cp, of what it is on one.
    pub ring: f64,
    /// ZeRO-3 keeps parameters whole between the microbatches of a pipeline.
    pub keeps: bool,
    /// Stages wait for their transfers under 1F1B and its interleaving, whatever else overlaps.
    pub waits: bool,
    /// Seconds that the host takes to start a launch: devices wait where they are faster than that.
    pub host: f64,
    pub experts: Routed,
    /// Where each number is from.
    pub source: String,
}

/// The files of `cost/stacks`.
const FILES: [&str; 7] = [
    include_str!("../stacks/eager.toml"),
    include_str!("../stacks/generic.toml"),
    include_str!("../stacks/megatron-2021.toml"),
    include_str!("../stacks/megatron-2022.toml"),
    include_str!("../stacks/megatron-2024.toml"),
    include_str!("../stacks/shardc.toml"),
    include_str!("../stacks/torchtitan.toml"),
];

impl Stack {
    /// All that are known.
    ///
    /// # Panics
    /// If a file of ours is wrong, which a test would see.
    pub fn known() -> &'static [Stack] {
        static ALL: OnceLock<Vec<Stack>> = OnceLock::new();
        let read = |text: &&str| toml::from_str(text).expect("our files of stacks are right");
        ALL.get_or_init(|| FILES.iter().map(read).collect())
    }

    /// The stack of a name, or `generic`.
    ///
    /// # Panics
    /// If `generic` is not among our files.
    pub fn named(name: &str) -> &'static Stack {
        let of = |n: &str| Stack::known().iter().find(|s| s.names.iter().any(|x| x == n));
        of(name).or_else(|| of("generic")).expect("there is a generic stack")
    }

    /// What its work over rows moves.
    pub fn rows(&self, compiled: bool) -> Rows {
        self.compiled.filter(|_| compiled).unwrap_or(self.eager)
    }
}
