//! Guesses of what a layout needs: which plans are compiled first, and what no plan can do without. What
//! fits is said by compiled plans alone.

use super::space::Candidate;
use super::what_if::Ifs;
use shardc_cost::layout::{Job, Recompute, Schedule};
use shardc_cost::model::Sizes;
use shardc_passes::options::Buffers;

/// Bytes of one rank, by a formula.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bytes {
    /// Weights, gradients and the optimizer's state, and what enters the layers of one microbatch.
    pub least: f64,
    /// With what backward needs of all microbatches on their way.
    pub likely: f64,
    /// Of the optimizer's state, on the host and in neither of them.
    pub host: f64,
}

/// How many times the rows of an even load the buffers of so many groups of experts hold.
pub fn room(s: &Sizes, moe: Buffers, groups: usize) -> f64 {
    let Some(x) = s.experts.filter(|_| groups > 1) else { return 1.0 };
    let most = x.top_k.min(x.experts / groups).max(1) * groups;
    let worst = most as f64 / x.top_k as f64;
    match moe {
        Buffers::Worst => worst.max(1.0),
        Buffers::Bound(by) | Buffers::Capacity(by) => by.min(worst).max(1.0),
    }
}

/// Of the largest rank of the pipeline.
pub fn bytes(s: &Sizes, job: &Job, moe: Buffers, ifs: &Ifs, c: &Candidate) -> Bytes {
    let l = &c.layout;
    let wide = job.precision.bytes();
    let dense = (s.layers - s.expert_layers()) as f64 * s.layer_params(true);
    let others = s.expert_layers() as f64 * s.layer_params(false);
    let own = (dense + others) / (l.tp * l.pp) as f64;
    let experts = s.expert_layers() as f64 * s.expert_params() / (l.ep * l.etp * l.pp) as f64;
    let by = |zero: u8, ranks: usize| if l.zero >= zero { ranks as f64 } else { 1.0 };
    // Two moments in f32, and a master copy of what is not f32.
    let (state, outside) = ifs.state(wide < 4.0);
    let weight = ifs.weight(wide);
    let each = |ranks: usize, gradient: f64| {
        weight / by(3, ranks) + gradient / by(2, ranks) + state / by(1, ranks)
    };
    let spread = (l.tp * l.cp * l.dp / (l.ep * l.etp)).max(1);
    let spread = spread.min(l.shards);
    let states = |g: f64| own * each(l.shards, g) + experts * each(spread, g);
    // Gradients of one microbatch are not summed, and need not be there all at once.
    let summed = if l.microbatches > 1 { 4.0 } else { 0.0 };
    let (t, by_row) = (l.tp as f64, if l.sp { l.tp as f64 } else { 1.0 });
    let tokens = (l.microbatch * job.seq / l.cp) as f64;
    let layers = s.layers as f64 / l.pp as f64;
    let entering = tokens * s.hidden as f64 * wide / by_row;
    let (width, value) = s.widths();
    let heads = s.heads as f64 * (width + value) + 2.0 * s.kv_heads as f64 * width;
    let mlp = match s.experts {
        Some(x) => {
            let copies = room(s, moe, l.ep) * x.top_k as f64;
            (copies * x.ffn as f64 + x.shared as f64) * s.mlp_products()
                + 2.0 * copies * s.hidden as f64
        }
        None => s.ffn as f64 * s.mlp_products(),
    };
    let inside = tokens * wide * (3.0 * s.hidden as f64 / by_row + (heads + mlp) / t);
    let of_layer = match l.recompute {
        Recompute::None | Recompute::Selective | Recompute::Ops => entering + inside,
        Recompute::Full => entering,
    };
    let most = l.microbatches as f64;
    let ranks = l.pp as f64;
    let flying = match l.schedule {
        Schedule::OneFOneB | Schedule::ZbH1 | Schedule::ZbV | Schedule::DualPipe => ranks,
        Schedule::Interleaved => ranks * (1.0 + (ranks - 1.0) / (ranks * l.chunks as f64)),
        Schedule::ZbH2 | Schedule::Filled => 2.0 * ranks,
    };
    let kept = of_layer * layers * flying.min(most);
    // One layer is computed again at a time; logits are there in f32, with their gradient.
    let working = inside.max(8.0 * tokens * s.vocab as f64 / t);
    let table = s.embedding_params() / t * each(l.shards, 4.0);
    let host = outside * (own / by(1, l.shards) + experts / by(1, spread));
    Bytes {
        host,
        least: states(summed) + entering * layers,
        likely: states(4.0) + table + kept + working,
    }
}
