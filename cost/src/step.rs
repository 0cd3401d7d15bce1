//! Seconds of a step in closed form: what chooses which layouts are compiled, by the formulas of `docs/cost.md`.

use crate::collective::{Kind, exposed, seconds, send};
use crate::kernel::rows;
use crate::layer::Question;
use crate::layout::Schedule;
use crate::parts::{Parts, Times};
use shardc_ir::diag::Result;

/// Part of its processors that work has while parameters are gathered beside it.
const BESIDE_GATHERS: f64 = 0.92;

/// What a step costs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepCost {
    pub parts: Parts,
    /// Seconds: the sum of the parts.
    pub total: f64,
    /// FLOPs that the model needs, over what all ranks could do.
    pub mfu: f64,
}

/// Layers of each stage: equal, and where that cannot be the ends, with embedding and logits, have one
/// less.
pub fn equal_stages(layers: usize, stages: usize) -> Vec<usize> {
    let mut out = vec![layers / stages; stages];
    let mut rest = layers % stages;
    let order = (1..stages.saturating_sub(1)).chain([0, stages.saturating_sub(1)]);
    for s in order {
        if rest == 0 {
            break;
        }
        out[s] += 1;
        rest -= 1;
    }
    out
}

/// Layers of each stage such that the longest is as short as it can be, where the last has the head,
/// worth so many layers.
pub fn balanced_stages(layers: usize, stages: usize, head: f64) -> Vec<usize> {
    let last = balanced_last(layers, stages, head);
    let mut out = if stages > 1 { equal_stages(layers - last, stages - 1) } else { vec![] };
    out.push(last);
    out
}

/// Layers of the last of them, from which the others follow.
fn balanced_last(layers: usize, stages: usize, head: f64) -> usize {
    if stages == 1 {
        return layers;
    }
    let longest = |last: usize| {
        let others = (layers - last).div_ceil(stages - 1) as f64;
        others.max(last as f64 + head)
    };
    let last = (0..=layers / stages).rev();
    last.min_by(|&a, &b| longest(a).total_cmp(&longest(b))).unwrap_or(0)
}

/// True if stages go back along the ranks that they came by.
fn along_v(s: Schedule) -> bool {
    matches!(s, Schedule::ZbV | Schedule::DualPipe)
}

/// Forward, gradients of inputs and of weights, in seconds.
type Seconds = [f64; 3];

fn seconds_of(t: &Times) -> Seconds {
    [t.forward.total(), t.input.total(), t.weight.total()]
}

/// Seconds that the rank `at` of a pipeline waits for others; `of` are the times of loads for one microbatch, and
/// `ranks` which of them each has.
fn bubble(schedule: Schedule, chunks: usize, of: &[Seconds], ranks: &[u16], at: usize) -> f64 {
    let wait = |[f, i, w]: &Seconds| match schedule {
        Schedule::OneFOneB => f + i + w,
        Schedule::Interleaved => (f + i + w) / chunks as f64,
        Schedule::ZbH1 => (f + i - w).max(0.0),
        Schedule::ZbH2 | Schedule::ZbV => (f + i - 2.0 * w).max(0.0),
        Schedule::Filled => 0.0,
        // Of half the ranks: both directions at once (DeepSeek-V3, 2024, table 2).
        Schedule::DualPipe => (f + 2.0 * i - w).max(0.0) / 2.0,
    };
    let waits: Vec<f64> = of.iter().map(wait).collect();
    ranks.iter().enumerate().filter(|(s, _)| *s != at).map(|(_, k)| waits[*k as usize]).sum()
}

/// Times and parameters of what a model is made of, for one microbatch on one rank: they depend on what is inside
/// of a stage, and not on stages and their schedule.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    /// A layer with dense MLP, one with experts, the embedding, and logits with loss.
    times: [Times; 4],
    seconds: [Seconds; 4],
    /// Parameters of a layer with dense MLP and of one with experts: without those of experts, and of experts.
    params: [(f64, f64); 2],
    /// Of the embedding, and of the head.
    table: f64,
}

impl Pieces {
    /// Seconds of forward, of gradients of inputs and of weights, of what a stage or a rank has, for one microbatch.
    pub fn seconds(&self, load: &Load) -> [f64; 3] {
        [0, 1, 2]
            .map(|phase| load.iter().zip(&self.seconds).map(|(n, s)| *n as f64 * s[phase]).sum())
    }

    /// Those of a question.
    ///
    /// # Errors
    /// `device` if the device lacks products of an element type.
    pub fn of(q: &Question) -> Result<Pieces> {
        let dense = q.layer(true)?;
        let with = if q.sizes.expert_layers() > 0 { q.layer(false)? } else { dense };
        let times = [dense, with, q.embedding(), q.head()?];
        let params = [true, false].map(|dense| q.layer_params(dense));
        let table = q.sizes.embedding_params() / q.layout.tp as f64;
        Ok(Pieces { times, seconds: times.map(|t| seconds_of(&t)), params, table })
    }

    /// Parameters of a rank: without those of experts, and of experts.
    fn params(&self, load: &Load) -> (f64, f64) {
        let [dense, with] = self.params;
        let (a, b) = (load[0] as f64, load[1] as f64);
        (a * dense.0 + b * with.0 + (load[2] + load[3]) as f64 * self.table, b * with.1)
    }
}

/// What each rank of a pipeline has: which of a few loads.
#[derive(Clone, Debug, Default)]
pub struct StageLoads {
    /// By rank, the number of its load.
    ranks: Vec<u16>,
    kinds: Vec<Load>,
}

impl StageLoads {
    /// Of the loads of all ranks.
    pub fn of(loads: &[Load]) -> StageLoads {
        let mut out = StageLoads::default();
        for load in loads {
            let at = out.kinds.iter().position(|k| k == load).unwrap_or_else(|| {
                out.kinds.push(*load);
                out.kinds.len() - 1
            });
            out.ranks.push(at as u16);
        }
        out
    }
}

/// What a cut follows from: ranks, stages per rank, whether they lie along a V, and the layers of the last stage.
pub type CutKey = (usize, usize, bool, usize);

/// The ranks of a pipeline, whatever ZeRO does among their replicas.
#[derive(Clone, Debug)]
pub struct Ranks {
    /// Parts of a step of the rank with most to do; without what is done once for all microbatches.
    parts: Parts,
    /// What different ranks take for a microbatch, and their parameters.
    kinds: Vec<(Seconds, (f64, f64))>,
}

impl Ranks {
    /// Seconds that ranks wait for each other, by the formula of their schedule.
    pub fn bubble(&self) -> f64 {
        self.parts.bubble
    }

    /// Parameters of different ranks: without those of experts, and of experts.
    pub fn params(&self) -> impl Iterator<Item = (f64, f64)> {
        self.kinds.iter().map(|k| k.1)
    }
}

/// How many a rank of the pipeline has of layers with dense MLP and with experts, of the embedding and of logits with
/// loss.
pub type Load = [usize; 4];

/// The price of a step in closed form.
pub struct Closed<'a> {
    pub question: Question<'a>,
    /// Stages are cut by cost, and not into equal numbers of layers.
    pub balanced: bool,
}

impl Closed<'_> {
    /// What its cut follows from, of layouts of one model.
    pub fn cut_key(&self, pieces: &Pieces) -> CutKey {
        let (s, l) = (self.question.sizes, self.question.layout);
        let stages = l.pp * l.chunks;
        let last = match self.balanced {
            true => balanced_last(s.layers, stages, self.head(pieces)),
            false => s.layers / stages,
        };
        (l.pp, l.chunks, along_v(l.schedule), last)
    }

    /// Logits and loss, in layers.
    fn head(&self, pieces: &Pieces) -> f64 {
        let of = |i: usize| pieces.seconds[i].iter().sum::<f64>();
        of(3) / if self.question.sizes.expert_layers() > 0 { of(1) } else { of(0) }
    }

    /// What each rank of the pipeline has.
    pub fn loads(&self, pieces: &Pieces) -> Vec<Load> {
        let mut out = vec![[0; 4]; self.question.layout.pp];
        for (rank, load) in self.stages(pieces) {
            out[rank].iter_mut().zip(load).for_each(|(all, n)| *all += n);
        }
        out
    }

    /// Which rank of the pipeline has each stage, and what is in it.
    pub fn stages(&self, pieces: &Pieces) -> Vec<(usize, Load)> {
        let q = &self.question;
        let (s, l) = (q.sizes, q.layout);
        let stages = l.pp * l.chunks;
        let cut = match self.balanced {
            true => balanced_stages(s.layers, stages, self.head(pieces)),
            false => equal_stages(s.layers, stages),
        };
        let mut out = vec![];
        let (mut layer, dense) = (0, s.layers - s.expert_layers());
        for (stage, &count) in cut.iter().enumerate() {
            let (lap, place) = (stage / l.pp, stage % l.pp);
            let rank = if along_v(l.schedule) && lap % 2 == 1 { l.pp - 1 - place } else { place };
            let first = dense.saturating_sub(layer).min(count);
            layer += count;
            let ends = [stage == 0, stage + 1 == stages].map(usize::from);
            out.push((rank, [first, count - first, ends[0], ends[1]]));
        }
        out
    }

    /// Exposed gathers of parameters and sums of gradients of one rank of the pipeline: for a microbatch,
    /// and for a step.
    fn data_parallel(&self, [f, i, w]: Seconds, (params, experts): (f64, f64)) -> (f64, f64) {
        let q = &self.question;
        let (l, d, over) = (q.layout, q.device, q.job.overlap.dp);
        let (wide, gradient) = (q.job.precision.wide().bytes(), q.stack.gradient);
        let groups = [(params, l.shard_group(d)), (experts, l.expert_replicas(d))];
        let of = |kind, bytes: f64| -> f64 {
            groups.iter().map(|(n, g)| seconds(d, kind, *g, n * bytes)).sum()
        };
        let seen = |t: f64, work: f64| if over { exposed(t, work) } else { t };
        let backward = i + w;
        let shards = (l.cp * l.shards) as f64;
        let replicas = seconds(d, Kind::AllReduce, l.replica_group(d), params / shards * gradient);
        let across = if l.zero > 0 { seen(replicas, backward) } else { 0.0 };
        let scatter = of(Kind::ReduceScatter, gradient);
        match l.zero {
            0 => (0.0, seen(of(Kind::AllReduce, gradient), backward)),
            1 | 2 => {
                let gather = of(Kind::AllGather, wide);
                // Stage 2 has nowhere to keep whole gradients.
                let each = if l.zero == 2 && l.microbatches > 1 {
                    seen(scatter, backward * BESIDE_GATHERS)
                } else {
                    0.0
                };
                let once = if each > 0.0 { 0.0 } else { seen(scatter, backward) };
                (each, once + across + seen(gather, f))
            }
            _ => {
                let gather = of(Kind::AllGather, q.job.precision.bytes());
                if l.pp > 1 && q.stack.keeps {
                    return (0.0, seen(gather, f) + seen(scatter, backward) + across);
                }
                let forward = seen(gather, f * BESIDE_GATHERS);
                (forward + seen(gather + scatter, backward * BESIDE_GATHERS), across)
            }
        }
    }

    /// What ranks of this cut take.
    pub fn ranks(&self, pieces: &Pieces, cut: &StageLoads) -> Ranks {
        let q = &self.question;
        let (l, d) = (q.layout, q.device);
        let times: Vec<Seconds> = cut.kinds.iter().map(|l| pieces.seconds(l)).collect();
        let whole: Vec<f64> = times.iter().map(|t| t.iter().sum()).collect();
        let of = |rank: usize| cut.ranks[rank] as usize;
        let longest = |a: &usize, b: &usize| whole[of(*a)].total_cmp(&whole[of(*b)]).then(b.cmp(a));
        let at = (0..cut.ranks.len()).max_by(longest).unwrap_or(0);
        let m = l.microbatches as f64;
        let pieces_of = cut.kinds[of(at)].iter().zip(&pieces.times);
        let own = pieces_of.fold(Times::default(), |sum, (n, t)| sum + *t * *n as f64);
        let mut parts = own.all() * m;
        if l.pp > 1 {
            parts.bubble = bubble(l.schedule, l.chunks, &times, &cut.ranks, at);
            let t = if l.sp || !q.job.overlap.whole_sends { l.tp as f64 } else { 1.0 };
            let bytes = q.tokens() * q.sizes.hidden as f64 * q.job.precision.wide().bytes() / t;
            let one = send(d, l.stage_stride(), bytes);
            // 1F1B has as many microbatches on their way as hide its work, and none to hide sends.
            let in_step = matches!(l.schedule, Schedule::OneFOneB | Schedule::Interleaved);
            let seen = !q.job.overlap.pp || (q.stack.waits && in_step);
            let steady = if seen { 2.0 * m * l.chunks as f64 * one } else { 0.0 };
            parts.send = 2.0 * (l.pp - 1) as f64 * one + steady;
        }
        let kinds = times.into_iter().zip(cut.kinds.iter().map(|load| pieces.params(load)));
        Ranks { parts, kinds: kinds.collect() }
    }

    /// Parts of a step on such ranks.
    pub fn parts(&self, ranks: &Ranks) -> Parts {
        let q = &self.question;
        let (l, d, m) = (q.layout, q.device, q.layout.microbatches as f64);
        let shards = if l.zero > 0 { (l.cp * l.shards) as f64 } else { 1.0 };
        let spread = if l.zero > 0 { l.expert_replicas(d).size } else { 1.0 };
        let (mut out, mut held) = (ranks.parts, 0.0f64);
        for (t, params) in &ranks.kinds {
            let (each, once) = self.data_parallel(*t, *params);
            out.dp = out.dp.max(m * each + once);
            held = held.max(params.0 / shards + params.1 / spread);
        }
        out.optimizer = rows(d, held * q.stack.optimizer, 4.0);
        out
    }

    /// The price of the step.
    ///
    /// # Errors
    /// `device` if the device lacks products of an element type.
    pub fn price(&self) -> Result<StepCost> {
        let pieces = Pieces::of(&self.question)?;
        let q = &self.question;
        let (l, cut) = (q.layout, StageLoads::of(&self.loads(&pieces)));
        let parts = self.parts(&self.ranks(&pieces, &cut));
        let total = parts.total();
        let sequences = l.microbatch as f64 * l.dp as f64 * l.microbatches as f64;
        let tokens = sequences * q.job.seq as f64;
        let needed = q.sizes.step_flops(tokens, q.job.seq as f64);
        let peak = q.device.peak.get(&q.job.precision).copied().unwrap_or(f64::INFINITY);
        Ok(StepCost { parts, total, mfu: needed / (total * peak * l.ranks() as f64) })
    }

    /// One layer forward and backward alone, as tables of single layers have them.
    ///
    /// # Errors
    /// `device` if the device lacks products of an element type.
    pub fn layer(&self) -> Result<Parts> {
        Ok(self.question.layer(true)?.all())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_hold_all_layers() {
        assert_eq!(equal_stages(22, 8), [2, 3, 3, 3, 3, 3, 3, 2]);
        assert_eq!(equal_stages(126, 8).iter().sum::<usize>(), 126);
        assert_eq!(equal_stages(126, 16), [[7].as_slice(), &[8; 14], &[7]].concat());
        for (layers, stages, head) in [(32, 4, 1.7), (80, 8, 0.3), (5, 8, 0.5), (61, 16, 2.5)] {
            let cut = balanced_stages(layers, stages, head);
            assert_eq!((cut.len(), cut.iter().sum::<usize>()), (stages, layers));
            let cost = |cut: &[usize]| {
                let last = cut[stages - 1] as f64 + head;
                cut[..stages - 1].iter().map(|&n| n as f64).fold(last, f64::max)
            };
            assert!(cost(&cut) <= cost(&equal_stages(layers, stages)), "{cut:?}");
        }
    }
}
