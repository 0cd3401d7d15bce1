//! What a rank needs to run: programs, the step as a list of actions, exact memory, weights.

use crate::documents::Documents;
use crate::func::{Module, RoleKind, Value, ValueMap};
use crate::loss_scale::LossScaling;
use crate::mesh::{AtomSet, PIPELINE};
use crate::schedule::Schedule;
use crate::weights::Weight;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::collections::BTreeSet;

mod rate;
pub use rate::{Fall, LrSchedule};

/// One instruction of a rank. The functions are those of the plan's module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Instr {
    Call(Call),
    /// Offers a value to another rank of the pipeline and goes on; its memory stays as it is until
    /// [`Instr::Sent`].
    Send(Transfer),
    /// Waits until the oldest offer to this rank of the pipeline that was not yet waited for has
    /// been taken.
    Sent {
        to: usize,
    },
    /// Gives the memory of a value that a later [`Instr::Recv`] takes, and goes on: it may arrive from here
    /// on. Receives of one rank of the pipeline are posted in their order.
    PostRecv(Transfer),
    /// Takes the oldest value that another rank of the pipeline offers to this one; waits for it, if it was
    /// posted.
    Recv(Transfer),
}

impl Instr {
    /// The microbatch that it is for.
    pub fn microbatch(&self) -> Option<usize> {
        match self {
            Instr::Call(c) => c.microbatch,
            Instr::Send(t) | Instr::PostRecv(t) | Instr::Recv(t) => t.microbatch,
            Instr::Sent { .. } => None,
        }
    }
}

/// A call of a function, for one microbatch or once per step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Call {
    /// Index into the module's functions.
    pub func: usize,
    /// The microbatch whose slice of the inputs it sees; `None` at step scope.
    pub microbatch: Option<usize>,
    /// Offset in the arena of each of the function's frames.
    pub frames: SmallVec<[usize; 8]>,
}

/// One end of a transfer between two ranks of the pipeline, of equal coordinates otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// The value, as a function of this rank knows it: a result if sent, an argument if received.
    pub func: usize,
    pub value: Value,
    pub microbatch: Option<usize>,
    /// The other rank of the pipeline.
    pub with: usize,
    /// Offset in the arena, in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub bytes: usize,
}

/// Where a value lies: in a frame of its function. What several calls share (weights, the stashes
/// of a microbatch) and what one call needs for itself are different frames.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct FramePlace {
    /// Index into the frames of the function. Frame 0 is the same for all functions and begins at 0:
    /// what lives through the whole step.
    pub frame: u32,
    /// Byte offset in the frame, a multiple of [`ALIGN`].
    pub offset: usize,
    /// Size in bytes.
    pub bytes: usize,
}

/// Alignment of everything in the arena, in bytes.
pub const ALIGN: usize = 64;

/// What a piece of memory is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryClass {
    Weights,
    Grads,
    Optimizer,
    Activation,
    CollectiveBuffer,
    Temporary,
    Input,
}

impl MemoryClass {
    /// The class under which arguments and results of a role are counted.
    pub fn of(role: RoleKind) -> MemoryClass {
        match role {
            // What a step computes with, whether stored or gathered by ZeRO or cast.
            RoleKind::Param | RoleKind::Unsharded => MemoryClass::Weights,
            RoleKind::Grad | RoleKind::GradSum => MemoryClass::Grads,
            RoleKind::State(_) => MemoryClass::Optimizer,
            RoleKind::Input(_) | RoleKind::Scalar => MemoryClass::Input,
            RoleKind::Stash | RoleKind::Edge | RoleKind::GradFrom(_) => MemoryClass::Activation,
            RoleKind::Sum
            | RoleKind::TokensPerExpert
            | RoleKind::Scale
            | RoleKind::Step
            | RoleKind::Output
            | RoleKind::Metric
            | RoleKind::Mean
            | RoleKind::GradShown => MemoryClass::Temporary,
        }
    }

    /// The word people read.
    pub fn name(self) -> &'static str {
        match self {
            MemoryClass::Weights => "weights",
            MemoryClass::Grads => "gradients",
            MemoryClass::Optimizer => "optimizer",
            MemoryClass::Activation => "activations",
            MemoryClass::CollectiveBuffer => "collective buffers",
            MemoryClass::Temporary => "temporaries",
            MemoryClass::Input => "inputs",
        }
    }
}

/// A rank's arena: the same on every rank of the class.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Memory {
    /// Place of every value, by function and value number; nothing for functions of other classes.
    pub places: Vec<ValueMap<FramePlace>>,
    /// Scratch memory of every node that needs some, by function and node number.
    pub workspaces: Vec<Vec<FramePlace>>,
    /// Sizes of the frames of every function, in bytes.
    pub frames: Vec<Vec<usize>>,
    /// Size of the arena.
    pub peak_bytes: usize,
    /// Bytes by class at the peak; they sum to `peak_bytes`, with gaps as temporary ones.
    pub at_peak: Vec<(MemoryClass, usize)>,
    /// The largest values alive at the peak: name, class, bytes. Those of several layers that are alike are one.
    pub live_at_peak: Vec<(String, MemoryClass, usize)>,
    /// All values alive at the peak (of what one call alone needs, those where each of its frames is fullest),
    /// in the order of `at_peak` by class; what they leave of it are gaps.
    pub alive: Vec<Alive>,
    /// When frames have most bytes, of the moments at which the arena is in use to its end; none if that
    /// is at all times.
    pub peak_at: Option<Moment>,
    /// The most bytes that are alive at once: no arena can be smaller.
    pub live_bytes: usize,
    /// Bytes that live through the step, by class.
    pub whole: Vec<(MemoryClass, usize)>,
    /// What lies above them during a step.
    pub spans: Vec<Span>,
}

/// A value that is alive at the peak.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Alive {
    /// Index into the module's functions.
    pub func: usize,
    pub value: Value,
    pub class: MemoryClass,
    /// Of so many microbatches at once.
    pub copies: usize,
    /// Size of all of them, in bytes.
    pub bytes: usize,
}

/// A moment of a step, or of an evaluation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moment {
    pub in_evaluation: bool,
    /// The instruction, and within a call: 0 before its first node, `n + 1` at node `n`.
    pub instr: usize,
    pub node: usize,
}

/// A frame in use: from one instruction of the step to another, both included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    pub first: usize,
    pub last: usize,
    /// Where within them, if they are calls: 0 before the first node, `n + 1` at node `n`.
    pub from_node: usize,
    pub to_node: usize,
    /// Offset in the arena.
    pub offset: usize,
    pub bytes: usize,
    /// Of what it holds: activations, buffers of transfers, or a call's temporaries. A frame that holds
    /// several kinds has that of its first value, a call's own that of most bytes in it.
    pub class: MemoryClass,
}

/// Which token of a sequence stands where in the programs' sequence, of which the ranks of `cp` have
/// consecutive pieces. Programs do not know: positions are an input, like the tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TokenOrder {
    /// As they come: with causal attention the last rank has most to do.
    #[default]
    Contiguous,
    /// Of 2·`ranks` chunks, rank r has r and 2·`ranks`-1-r: what is seen of all keys is then the same
    /// for all ranks (zigzag; Llama 3 technical report, 2024, section 3.3.2).
    Zigzag { ranks: usize },
}

impl TokenOrder {
    /// True if sequences of this length can be dealt so.
    pub fn fits(self, seq: usize) -> bool {
        match self {
            TokenOrder::Contiguous => true,
            TokenOrder::Zigzag { ranks } => {
                ranks.checked_mul(2).is_some_and(|chunks| chunks > 0 && seq % chunks == 0)
            }
        }
    }

    /// The position of the token at place `i` of a sequence of `seq` tokens, which fits.
    ///
    /// ```
    /// # use shardc_ir::plan::TokenOrder;
    /// let order = TokenOrder::Zigzag { ranks: 2 };
    /// let all: Vec<usize> = (0..8).map(|i| order.position(8, i)).collect();
    /// assert_eq!(all, [0, 1, 6, 7, 2, 3, 4, 5]);
    /// ```
    pub fn position(self, seq: usize, i: usize) -> usize {
        match self {
            TokenOrder::Contiguous => i,
            TokenOrder::Zigzag { ranks } => {
                let len = seq / (2 * ranks);
                let (rank, second) = (i / len / 2, i / len % 2 == 1);
                let chunk = if second { 2 * ranks - 1 - rank } else { rank };
                chunk * len + i % len
            }
        }
    }
}

/// What the plan computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    Train,
    Infer,
}

/// What training sets to 0 at random.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dropout {
    #[default]
    Nothing,
    /// What the config says.
    Config,
    /// Elements of the embedding and of what blocks add to the residual stream, each with this probability.
    Rate(f64),
}

/// Facts about a run that are not in the programs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Settings {
    pub mode: Mode,
    pub global_batch: usize,
    /// Microbatches per step.
    pub microbatches: usize,
    pub seq: usize,
    /// How the tokens of a sequence are dealt to the ranks.
    #[serde(default)]
    pub tokens: TokenOrder,
    /// Indices from here on are not tokens of the model.
    pub vocab: usize,
    pub lr: LrSchedule,
    pub seed: u64,
    /// How documents lie in rows of tokens, if they are told apart.
    #[serde(default)]
    pub documents: Option<Documents>,
    /// How the loss is scaled, of a plan that trains with f16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scaling: Option<LossScaling>,
    /// Receives between stages are posted before the work that precedes them, where memory is free.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub early_receives: bool,
}

/// What the ranks with one coordinate along [`PIPELINE`] run: the same on all of them. A plan with
/// one stage has one class, of all ranks.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RankClass {
    /// Its stages, in the order of the model.
    pub stages: Vec<usize>,
    /// Its functions, as indices into the module's.
    pub funcs: Vec<usize>,
    /// One step.
    pub step: Vec<Instr>,
    /// What gives the loss of a batch and changes no parameter; empty if the plan does not train.
    pub evaluation: Vec<Instr>,
    pub memory: Memory,
}

impl RankClass {
    /// The calls of a step, in order.
    pub fn calls(&self) -> impl Iterator<Item = &Call> {
        calls(&self.step)
    }
}

/// The calls among instructions, in order.
pub fn calls(list: &[Instr]) -> impl Iterator<Item = &Call> {
    list.iter().filter_map(|i| match i {
        Instr::Call(c) => Some(c),
        Instr::Send(_) | Instr::Sent { .. } | Instr::PostRecv(_) | Instr::Recv(_) => None,
    })
}

/// A compiled model.
#[derive(Clone, Debug)]
pub struct Plan {
    pub module: Module,
    /// By coordinate along [`PIPELINE`].
    pub classes: Vec<RankClass>,
    pub schedule: Schedule,
    pub weights: Vec<Weight>,
    pub settings: Settings,
}

impl Plan {
    /// The class of a rank: its coordinate along [`PIPELINE`].
    pub fn class_of(&self, rank: usize) -> usize {
        let mesh = &self.module.mesh;
        mesh.axis(PIPELINE).map_or(0, |pp| mesh.place(pp, &mesh.coords(rank)))
    }
    /// The rank of another class whose other coordinates are those of `rank`.
    pub fn peer(&self, rank: usize, class: usize) -> usize {
        let mesh = &self.module.mesh;
        let mut at = mesh.coords(rank);
        let mut rest = class;
        for a in
            mesh.axis(PIPELINE).unwrap_or_default().iter().collect::<Vec<_>>().into_iter().rev()
        {
            at[a.0 as usize] = rest % mesh.size(a);
            rest /= mesh.size(a);
        }
        mesh.rank(&at)
    }
    /// The groups whose ranks exchange data, by their atoms.
    pub fn groups(&self) -> BTreeSet<AtomSet> {
        let nodes = self.module.funcs.iter().flat_map(|f| &f.nodes);
        nodes.filter_map(|n| Some(n.op.collective()?.atoms())).collect()
    }
    /// The classes that send to another, and which.
    pub fn edges(&self) -> BTreeSet<(usize, usize)> {
        let to = |i: &Instr| match i {
            Instr::Send(t) => Some(t.with),
            Instr::Call(_) | Instr::PostRecv(_) | Instr::Recv(_) | Instr::Sent { .. } => None,
        };
        let of = |(from, c): (usize, &RankClass)| {
            let all = c.step.iter().chain(&c.evaluation).filter_map(to);
            all.map(|to| (from, to)).collect::<Vec<_>>()
        };
        self.classes.iter().enumerate().flat_map(of).collect()
    }
    /// The largest arena of any class, in bytes.
    pub fn peak_bytes(&self) -> usize {
        self.classes.iter().map(|c| c.memory.peak_bytes).max().unwrap_or(0)
    }
    /// Calls of a function in a step.
    pub fn times(&self, func: usize) -> usize {
        self.classes.iter().flat_map(RankClass::calls).filter(|c| c.func == func).count()
    }
    /// True if a function runs once per microbatch.
    pub fn is_looped(&self, func: usize) -> bool {
        let mut calls = self.classes.iter().flat_map(RankClass::calls);
        calls.any(|c| c.func == func && c.microbatch.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Causal scores that a rank computes of a block of keys: by rank, then by the rank whose keys
    /// they are.
    fn work(order: TokenOrder, ranks: usize, seq: usize) -> Vec<Vec<usize>> {
        let own = |r: usize| {
            let piece = seq / ranks;
            (r * piece..(r + 1) * piece).map(move |i| order.position(seq, i))
        };
        let seen = |r: usize, k: usize| {
            own(r).map(|q| own(k).filter(|&key| key <= q).count()).sum::<usize>()
        };
        (0..ranks).map(|r| (0..ranks).map(|k| seen(r, k)).collect()).collect()
    }

    /// All ranks have the same causal work under zigzag, in every step of the ring; as the tokens
    /// come, the last rank has most and the first nearly none.
    #[test]
    fn zigzag_balances_causal_work() {
        for ranks in [1, 2, 3, 4, 8] {
            let seq = 12 * ranks;
            let all = seq * (seq + 1) / 2;
            let zigzag = work(TokenOrder::Zigzag { ranks }, ranks, seq);
            for step in 0..ranks {
                let of = |r: usize| zigzag[r][(r + ranks - step) % ranks];
                assert!((0..ranks).all(|r| of(r) == of(0)), "{ranks} ranks, step {step}");
            }
            let sum = |w: &[usize]| w.iter().sum::<usize>();
            assert!(zigzag.iter().all(|w| sum(w) == all / ranks), "{ranks} ranks");
            let plain = work(TokenOrder::Contiguous, ranks, seq);
            let (least, most) = (sum(&plain[0]), sum(&plain[ranks - 1]));
            assert_eq!(plain.iter().map(|w| sum(w)).sum::<usize>(), all);
            let piece = 12;
            assert_eq!(least, piece * (piece + 1) / 2);
            assert_eq!(most, least + (ranks - 1) * piece * piece);
        }
    }

    #[test]
    fn every_order_is_a_permutation() {
        for (ranks, seq) in [(1, 2), (2, 16), (3, 18), (4, 8)] {
            let order = TokenOrder::Zigzag { ranks };
            assert!(order.fits(seq) && !order.fits(seq + 1));
            let mut all: Vec<usize> = (0..seq).map(|i| order.position(seq, i)).collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..seq));
        }
        assert!(!TokenOrder::Zigzag { ranks: 0 }.fits(8));
        assert!(!TokenOrder::Zigzag { ranks: usize::MAX }.fits(8));
    }
}
