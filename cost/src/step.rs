//! Seconds of a step in closed form: what chooses which layouts are compiled (COST, section 5).

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
    if stages == 1 {
        return vec![layers];
    }
    let longest = |last: usize| {
        let others = (layers - last).div_ceil(stages - 1) as f64;
        others.max(last as f64 + head)
    };
    let last = (0..=layers / stages).rev();
    let last = last.min_by(|&a, &b| longest(a).total_cmp(&longest(b))).unwrap_or(0);
    let mut out = equal_stages(layers - last, stages - 1);
    out.push(last);
    out
}

/// Seconds that ranks of a pipeline wait for others, where `of` are their times for one microbatch and
/// `at` is the one that is waited for.
fn bubble(schedule: Schedule, chunks: usize, of: &[Times], at: usize) -> f64 {
    let others = of.iter().enumerate().filter(|(s, _)| *s != at).map(|(_, t)| t);
    let each = |t: &Times| (t.forward.total(), t.input.total(), t.weight.total());
    let waits: f64 = others
        .map(|t| {
            let (f, i, w) = each(t);
            match schedule {
                Schedule::OneFOneB => f + i + w,
                Schedule::Interleaved => (f + i + w) / chunks as f64,
                Schedule::ZbH1 => (f + i - w).max(0.0),
                Schedule::ZbH2 | Schedule::ZbV => (f + i - 2.0 * w).max(0.0),
                Schedule::Filled => 0.0,
                // Of half the ranks: both directions at once (DeepSeek-V3, 2024, table 2).
                Schedule::DualPipe => (f + 2.0 * i - w).max(0.0) / 2.0,
            }
        })
        .sum();
    waits
}

/// The price of a step in closed form.
pub struct Closed<'a> {
    pub question: Question<'a>,
    /// Stages are cut by cost, and not into equal numbers of layers.
    pub balanced: bool,
}

impl Closed<'_> {
    /// Times of each rank of the pipeline for one microbatch, and its parameters: without those of
    /// experts, and of experts.
    fn ranks(&self) -> Result<Vec<(Times, f64, f64)>> {
        let q = &self.question;
        let (s, l) = (q.sizes, q.layout);
        let dense = q.layer(true)?;
        let dense_params = q.layer_params(true);
        let expert_layers = s.expert_layers();
        let (with, with_params) = match expert_layers {
            0 => (dense, dense_params),
            _ => (q.layer(false)?, q.layer_params(false)),
        };
        let (embedding, head) = (q.embedding(), q.head()?);
        let stages = l.pp * l.chunks;
        let cut = match self.balanced {
            true => {
                let layer = if expert_layers > 0 { with } else { dense };
                balanced_stages(s.layers, stages, head.all().total() / layer.all().total())
            }
            false => equal_stages(s.layers, stages),
        };
        let mut out = vec![(Times::default(), 0.0, 0.0); l.pp];
        let (mut layer, table) = (0, s.embedding_params() / l.tp as f64);
        for (stage, &count) in cut.iter().enumerate() {
            let along_v = matches!(l.schedule, Schedule::ZbV | Schedule::DualPipe);
            let (lap, place) = (stage / l.pp, stage % l.pp);
            let rank = if along_v && lap % 2 == 1 { l.pp - 1 - place } else { place };
            let first = (s.layers - expert_layers).saturating_sub(layer).min(count) as f64;
            let (rest, own) = (count as f64 - first, &mut out[rank]);
            layer += count;
            own.0 = own.0 + dense * first + with * rest;
            own.1 += first * dense_params.0 + rest * with_params.0;
            own.2 += rest * with_params.1;
            if stage == 0 {
                own.0 = own.0 + embedding;
                own.1 += table;
            }
            if stage + 1 == stages {
                own.0 = own.0 + head;
                own.1 += table;
            }
        }
        Ok(out)
    }

    /// Exposed gathers of parameters and sums of gradients of one rank of the pipeline: for a microbatch,
    /// and for a step.
    fn data_parallel(&self, t: &Times, params: f64, experts: f64) -> (f64, f64) {
        let q = &self.question;
        let (l, d, over) = (q.layout, q.device, q.job.overlap.dp);
        let (wide, gradient) = (q.job.precision.wide().bytes(), q.stack.gradient);
        let groups = [(params, l.shard_group(d)), (experts, l.expert_replicas(d))];
        let of = |kind, bytes: f64| -> f64 {
            groups.iter().map(|(n, g)| seconds(d, kind, *g, n * bytes)).sum()
        };
        let seen = |t: f64, work: f64| if over { exposed(t, work) } else { t };
        let (forward, backward) = (t.forward.total(), t.input.total() + t.weight.total());
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
                (each, once + across + seen(gather, forward))
            }
            _ => {
                let gather = of(Kind::AllGather, q.job.precision.bytes());
                if l.pp > 1 {
                    // Between microbatches of a pipeline parameters stay whole.
                    return (0.0, seen(gather, forward) + seen(scatter, backward) + across);
                }
                let forward = seen(gather, forward * BESIDE_GATHERS);
                (forward + seen(gather + scatter, backward * BESIDE_GATHERS), across)
            }
        }
    }

    /// Parts of a step.
    ///
    /// # Errors
    /// `device` if the device lacks products of an element type.
    pub fn parts(&self) -> Result<Parts> {
        let q = &self.question;
        let (l, d) = (q.layout, q.device);
        let ranks = self.ranks()?;
        let times: Vec<Times> = ranks.iter().map(|r| r.0).collect();
        let longest = |a: &usize, b: &usize| {
            times[*a].all().total().total_cmp(&times[*b].all().total()).then(b.cmp(a))
        };
        let at = (0..ranks.len()).max_by(longest).unwrap_or(0);
        let m = l.microbatches as f64;
        let mut out = times[at].all() * m;
        if l.pp > 1 {
            out.bubble = bubble(l.schedule, l.chunks, &times, at);
            let t = if l.sp || !q.job.overlap.whole_sends { l.tp as f64 } else { 1.0 };
            let bytes = q.tokens() * q.sizes.hidden as f64 * q.job.precision.wide().bytes() / t;
            let one = send(d, l.stage_stride(), bytes);
            // 1F1B has as many microbatches on their way as hide its work, and none to hide sends.
            let in_step = matches!(l.schedule, Schedule::OneFOneB | Schedule::Interleaved);
            let seen = !q.job.overlap.pp || (q.stack.waits && in_step);
            let steady = if seen { 2.0 * m * l.chunks as f64 * one } else { 0.0 };
            out.send = 2.0 * (l.pp - 1) as f64 * one + steady;
        }
        let dp = ranks.iter().map(|(t, n, x)| {
            let (each, once) = self.data_parallel(t, *n, *x);
            m * each + once
        });
        out.dp = dp.fold(0.0, f64::max);
        let shards = if l.zero > 0 { (l.cp * l.shards) as f64 } else { 1.0 };
        let spread = if l.zero > 0 { l.expert_replicas(d).size } else { 1.0 };
        let held = ranks.iter().map(|r| r.1 / shards + r.2 / spread).fold(0.0, f64::max);
        out.optimizer = rows(d, held * q.stack.optimizer, 4.0);
        Ok(out)
    }

    /// The price of the step.
    ///
    /// # Errors
    /// `device` if the device lacks products of an element type.
    pub fn price(&self) -> Result<StepCost> {
        let q = &self.question;
        let (l, parts) = (q.layout, self.parts()?);
        let total = parts.total();
        let sequences = (l.microbatch * l.dp * l.microbatches) as f64;
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
