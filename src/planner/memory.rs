//! Guesses of what a layout needs: which plans are compiled first, and what no plan can do without. What
//! fits is said by compiled plans alone.

use super::space::Candidate;
use super::what_if::Ifs;
use shardc_cost::layout::{Job, Recompute};
use shardc_cost::model::Sizes;
use shardc_cost::step::Load;
use shardc_ir::schedule::{Action, ActionKind};
use shardc_passes::options::Buffers;
use shardc_passes::schedule::{Named, make, runs};
use shardc_passes::threads;
use std::collections::{BTreeSet, HashMap};

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

/// Microbatches of one stage that a rank keeps at once: between forward and the gradients of inputs, and from there
/// to the gradients of weights.
type Kept = (usize, usize);

/// A schedule: its name, ranks, stages per rank and microbatches.
pub type Order = (Named, usize, usize, usize);

/// What ranks of the pipeline keep at once, by schedule and rank: at every moment one of these at most.
pub struct Held(HashMap<Order, Vec<Vec<Kept>>>);

impl Held {
    /// Of the schedules of layouts.
    pub fn of(all: &[Candidate]) -> Held {
        let orders: BTreeSet<Order> = all.iter().map(order).collect();
        let orders: Vec<Order> = orders.into_iter().collect();
        let made = threads::all(&orders, usize::MAX, |o| kept(*o));
        Held(orders.into_iter().zip(made).collect())
    }

    /// Of one of them.
    pub fn by(&self, c: &Candidate) -> &[Vec<Kept>] {
        &self.0[&order(c)]
    }
}

/// The schedule of a layout, of as many microbatches as fill it: of more no rank keeps more at once, or waits longer.
pub fn order(c: &Candidate) -> Order {
    let (p, v, m) = (c.layout.pp, c.layout.chunks, c.layout.microbatches);
    let enough = 4 * p * v;
    (c.named, p, v, if m > enough && runs(c.named, p, v, enough) { enough } else { m })
}

/// What each rank keeps after what makes it more.
fn kept((named, p, v, m): Order) -> Vec<Vec<Kept>> {
    let schedule = make(named, p, v, m).expect("layouts are legal");
    let of = |actions: &Vec<Action>| {
        let (mut forth, mut cut) = (0, 0);
        let mut all: BTreeSet<Kept> = BTreeSet::new();
        for a in actions {
            match a.kind {
                ActionKind::Forward => forth += 1,
                ActionKind::Backward => forth -= 1,
                ActionKind::Input => (forth, cut) = (forth - 1, cut + 1),
                ActionKind::Weight => cut -= 1,
            }
            all.insert((forth, cut));
        }
        let more = |x: &Kept| all.iter().any(|y| y != x && y.0 >= x.0 && y.1 >= x.1);
        all.iter().filter(|x| !more(x)).copied().collect()
    };
    schedule.ranks.iter().map(of).collect()
}

/// What formulas of memory need of a model and a job.
pub struct Form<'a> {
    pub sizes: &'a Sizes,
    pub job: &'a Job,
    pub ifs: &'a Ifs,
    /// How large the buffers of experts are.
    pub moe: Buffers,
}

/// Bytes for each microbatch and layer.
struct Layer {
    entering: f64,
    /// Made in forward for backward.
    inside: f64,
    /// Between forward and the gradients of inputs.
    kept: f64,
    /// From there to the gradients of weights: operands of products, and gradients of their results.
    waiting: f64,
}

impl Form<'_> {
    fn layer(&self, c: &Candidate) -> Layer {
        let (s, l, wide) = (self.sizes, &c.layout, self.job.precision.bytes());
        let (t, by_row) = (l.tp as f64, if l.sp { l.tp as f64 } else { 1.0 });
        let bytes = (l.microbatch * self.job.seq / l.cp) as f64 * wide;
        let stream = bytes * s.hidden as f64 / by_row;
        let (width, value) = s.widths();
        let mixed = s.heads as f64 * value;
        let heads = s.heads as f64 * width + 2.0 * s.kv_heads as f64 * width;
        // Width of the MLP, and of what experts get and give beside the stream.
        let (ffn, copies) = match s.experts {
            Some(x) => {
                let copies = room(s, self.moe, l.ep) * x.top_k as f64;
                (copies * x.ffn as f64 + x.shared as f64, copies * s.hidden as f64)
            }
            None => (s.ffn as f64, 0.0),
        };
        let products = s.mlp_products();
        let inside = 3.0 * stream + bytes * (heads + mixed + ffn * products + 2.0 * copies) / t;
        // Of queries, keys and values, and what attention gives; of the MLP's products.
        let gradients = 2.0 * stream + bytes * (heads + ffn * (products - 1.0) + copies) / t;
        let (kept, again) = match l.recompute {
            // What is element-wise is made again: the operand of the MLP's last product.
            Recompute::None | Recompute::Selective | Recompute::Ops => {
                (stream + inside, bytes * ffn / t)
            }
            Recompute::Full => (stream, 2.0 * stream + bytes * (mixed + ffn + copies) / t),
        };
        Layer { entering: stream, inside, kept, waiting: kept + gradients + again }
    }

    /// Of the largest rank of the pipeline: `loads` are what ranks have, `held` what of it they keep.
    pub fn bytes(&self, c: &Candidate, loads: &[Load], held: &[Vec<Kept>]) -> Bytes {
        let (s, l, wide) = (self.sizes, &c.layout, self.job.precision.bytes());
        let by = |zero: u8, ranks: usize| if l.zero >= zero { ranks as f64 } else { 1.0 };
        // Two moments in f32, and a master copy of what is not f32.
        let (state, outside) = self.ifs.state(wide < 4.0);
        let weight = self.ifs.weight(wide);
        let each = |ranks: usize, gradient: f64| {
            weight / by(3, ranks) + gradient / by(2, ranks) + state / by(1, ranks)
        };
        let spread = (l.tp * l.cp * l.dp / (l.ep * l.etp)).max(1);
        let spread = spread.min(l.shards);
        // Parameters of so many layers: without those of experts, and of experts.
        let params = |dense: f64, with: f64| {
            let own = dense * s.layer_params(true) + with * s.layer_params(false);
            (own / l.tp as f64, with * s.expert_params() / (l.ep * l.etp) as f64)
        };
        let states = |(own, experts): (f64, f64), g: f64| {
            own * each(l.shards, g) + experts * each(spread, g)
        };
        let layer = self.layer(c);
        let tokens = (l.microbatch * self.job.seq / l.cp) as f64;
        let table = s.embedding_params() / l.tp as f64;
        let rank = |(load, held): (&Load, &Vec<Kept>)| {
            let (own, experts) = params(load[0] as f64, load[1] as f64);
            let own = own + (load[2] + load[3]) as f64 * table;
            let of_stage = (load[0] + load[1]) as f64 / l.chunks as f64;
            let all = held.iter().map(|&(forth, cut)| {
                of_stage * (forth as f64 * layer.kept + cut as f64 * layer.waiting)
            });
            // One layer is computed again at a time; logits are there in f32, with their gradient.
            let logits = load[3] as f64 * 8.0 * tokens * s.vocab as f64 / l.tp as f64;
            let working = layer.inside.max(logits);
            let host = outside * (own / by(1, l.shards) + experts / by(1, spread));
            (states((own, experts), 4.0) + all.fold(0.0, f64::max) + working, host)
        };
        let ranks = || loads.iter().zip(held).map(rank);
        // No rank has less than the mean. Gradients of one microbatch are not summed, and need not be there all at
        // once.
        let summed = if l.microbatches > 1 { 4.0 } else { 0.0 };
        let mean = |n: usize| n as f64 / l.pp as f64;
        let layers = params(mean(s.layers - s.expert_layers()), mean(s.expert_layers()));
        Bytes {
            least: states(layers, summed) + layer.entering * mean(s.layers),
            likely: ranks().map(|r| r.0).fold(0.0, f64::max),
            host: ranks().map(|r| r.1).fold(0.0, f64::max),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What waits is what schedules leave: with 1F1B nothing, with ZB-H1 as many microbatches as a rank has before it
    /// and one, with ZB-H2 nearly twice as many; more microbatches than fill a schedule change nothing.
    #[test]
    fn microbatches_wait_as_schedules_say() {
        let last = |named, p, v, m| kept((named, p, v, m)).pop().expect("a rank");
        assert_eq!(last(Named::OneFOneB, 4, 1, 16), [(1, 0)]);
        assert_eq!(kept((Named::OneFOneB, 4, 1, 16))[0], [(4, 0)]);
        let most = |all: &[Kept]| all.iter().map(|k| k.0 + k.1).max();
        for r in kept((Named::ZbH1, 4, 1, 16)) {
            assert_eq!(most(&r), Some(4), "{r:?}");
        }
        assert!(last(Named::ZbH1, 4, 1, 16).contains(&(0, 4)));
        assert!(most(&last(Named::ZbH2, 4, 1, 16)) > Some(4));
        for (named, p, v) in [
            (Named::OneFOneB, 4, 1),
            (Named::ZbH1, 8, 1),
            (Named::ZbH2, 4, 1),
            (Named::Interleaved, 4, 4),
            (Named::ZbV, 8, 2),
            (Named::DualPipeV, 4, 2),
        ] {
            let few = 4 * p * v;
            assert_eq!(kept((named, p, v, few)), kept((named, p, v, 3 * few)), "{named:?}");
        }
    }
}
