//! Guesses of what a layout needs: which plans are compiled first, and what no plan can do without. What
//! fits is said by compiled plans alone.

use super::space::Candidate;
use super::what_if::Ifs;
use shardc_cost::layout::{Anew, Context, Job};
use shardc_cost::model::{Mixer, Sizes};
use shardc_cost::step::Load;
use shardc_ir::schedule::{Action, ActionKind, Schedule};
use shardc_passes::options::Buffers;
use shardc_passes::schedule::{Named, runs};
use std::collections::BTreeSet;

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
pub type Kept = (usize, usize);

/// A schedule: its name, ranks, stages per rank and microbatches.
pub type Order = (Named, usize, usize, usize);

/// The schedule of a layout, of as many microbatches as fill it: of more no rank keeps more at once, or waits longer.
pub fn order(c: &Candidate) -> Order {
    let (p, v, m) = (c.layout.pp, c.layout.chunks, c.layout.microbatches);
    let enough = 4 * p * v;
    (c.named, p, v, if m > enough && runs(c.named, p, v, enough) { enough } else { m })
}

/// What each rank of the pipeline keeps at once: at every moment one of these at most.
pub fn kept(schedule: &Schedule) -> Vec<Vec<Kept>> {
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

/// Formulas of the memory of a model's layouts.
pub struct Form<'a> {
    sizes: &'a Sizes,
    job: &'a Job,
    ifs: &'a Ifs,
    /// How large the buffers of experts are.
    moe: Buffers,
    /// Bytes of a gradient.
    gradient: f64,
    trains: Trains,
    /// Parameters of a layer with dense MLP and of one with experts, without those of experts; of experts; of the
    /// embedding.
    params: [f64; 4],
}

/// What of a model has gradients and an optimizer's state.
#[derive(Clone, Copy)]
pub struct Trains {
    /// The share of its parameters.
    pub share: f64,
    /// They have AdamW's moments: other rules keep less, some of them nothing.
    pub moments: bool,
}

impl Trains {
    /// All of it, by AdamW.
    pub const ALL: Trains = Trains { share: 1.0, moments: true };
}

/// Bytes for each microbatch and layer.
struct Layer {
    /// Made in forward for backward.
    inside: f64,
    /// Between forward and the gradients of inputs.
    kept: f64,
    /// From there to the gradients of weights: operands of products, and gradients of their results.
    waiting: f64,
}

impl<'a> Form<'a> {
    /// Of a model, a job, what no plan has, how large buffers of experts and gradients are, and what is trained.
    pub fn new(
        sizes: &'a Sizes,
        job: &'a Job,
        ifs: &'a Ifs,
        (moe, gradient, trains): (Buffers, f64, Trains),
    ) -> Form<'a> {
        let [dense, with] = [true, false].map(|dense| sizes.layer_params(dense));
        let params = [dense, with, sizes.expert_params(), sizes.embedding_params()];
        Form { sizes, job, ifs, moe, gradient, trains, params }
    }

    /// Bytes of what a rank has of the tokens of one microbatch.
    fn tokens(&self, c: &Candidate) -> f64 {
        (c.layout.microbatch * self.job.seq / c.layout.cp) as f64 * self.job.precision.bytes()
    }

    /// Bytes of what enters a layer.
    fn stream(&self, c: &Candidate) -> f64 {
        let by_row = if c.layout.sp { c.layout.tp as f64 } else { 1.0 };
        self.tokens(c) * self.sizes.hidden as f64 / by_row
    }

    fn layer(&self, c: &Candidate) -> Layer {
        let (s, l, t) = (self.sizes, &c.layout, c.layout.tp as f64);
        let (bytes, stream) = (self.tokens(c), self.stream(c));
        let (heads, mixed) = (s.mean(|m| s.mixed(m).0), s.mean(|m| self.made(m)));
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
        // What is element-wise is made again: the operand of the MLP's last product. Of attention by heads the result
        // is there in both layouts.
        let twice = if l.context == Context::Heads { bytes * mixed / t } else { 0.0 };
        let not = bytes * self.anew(c) / t;
        let part = (stream + inside + twice - not, bytes * ffn / t + not);
        let whole = (stream, 2.0 * stream + bytes * (mixed + ffn + copies) / t);
        let by = |a: f64, b: f64| a + l.recompute.whole() * (b - a);
        let (kept, again) = (by(part.0, whole.0), by(part.1, whole.1));
        Layer { inside, kept, waiting: kept + gradients + again }
    }

    /// Elements of a token that a mixer makes. A recurrence makes them in f32, and has its convolution before it.
    fn made(&self, m: Mixer) -> f64 {
        let (_, leaves) = self.sizes.mixed(m);
        let Mixer::Scan(x) = m else { return leaves };
        // What is convolved, and what is made of that.
        let (keys, values) = x.elements();
        leaves * 4.0 / self.job.precision.bytes() + 2.0 * keys + values
    }

    /// Elements of a token that modules of a layer do not keep.
    fn anew(&self, c: &Candidate) -> f64 {
        let (s, m) = (self.sizes, c.layout.recompute.modules());
        let (width, value) = s.widths();
        let up = match (s.latent, m.latents) {
            (Some(x), true) => {
                let q = if x.query_rank.is_some() { width } else { 0.0 };
                s.heads as f64 * (q + width + value)
            }
            _kept => 0.0,
        };
        let Some(x) = s.experts else { return up };
        let copies = room(s, self.moe, c.layout.ep) * x.top_k as f64;
        // Where elements are made again anyway the operand of the last product is not kept.
        let inside = copies * x.ffn as f64 * (s.mlp_products() - 1.0);
        up + match m.experts {
            Anew::Nothing => 0.0,
            Anew::Products => inside,
            Anew::All => inside + 2.0 * copies * s.hidden as f64,
        }
    }

    /// Bytes of a layer that a microbatch keeps between forward and backward.
    pub fn kept(&self, c: &Candidate) -> f64 {
        self.layer(c).kept
    }

    /// Ranks that split the weights, gradients or state of parameters that so many split, if ZeRO's stage is this or
    /// a later one.
    fn ways(c: &Candidate, zero: u8, ranks: usize) -> f64 {
        if c.layout.zero >= zero { ranks as f64 } else { 1.0 }
    }

    /// Ranks that ZeRO splits parameters over, without those of experts: it takes cp along.
    fn shards(c: &Candidate) -> usize {
        c.layout.cp * c.layout.shards
    }

    /// Ranks that split the state of experts.
    fn spread(c: &Candidate) -> usize {
        let l = &c.layout;
        (l.tp * l.cp * l.dp / (l.ep * l.etp)).max(1).min(Form::shards(c))
    }

    /// Parameters on a rank of so many layers, dense and with experts: without those of experts, and of experts.
    fn params(&self, c: &Candidate, dense: f64, with: f64) -> (f64, f64) {
        let ([of_dense, of_with, experts, _], l) = (self.params, &c.layout);
        let own = dense * of_dense + with * of_with;
        (own / l.tp as f64, with * experts / (l.ep * l.etp) as f64)
    }

    /// Weights, gradients of so many bytes and the optimizer's state of parameters: without those of experts, and of
    /// experts.
    fn states(&self, c: &Candidate, (own, experts): (f64, f64), gradient: f64) -> f64 {
        let wide = self.job.precision.bytes();
        // Two moments in f32, and a master copy of what is not f32.
        let state = self.ifs.state(wide < 4.0, self.trains.moments).0;
        let (weight, share) = (self.ifs.weight(wide), self.trains.share);
        let each = |ranks: usize| {
            weight / Form::ways(c, 3, ranks)
                + share * gradient / Form::ways(c, 2, ranks)
                + share * state / Form::ways(c, 1, ranks)
        };
        own * each(Form::shards(c)) + experts * each(Form::spread(c))
    }

    /// Bytes that no plan does without: weights, gradients and the optimizer's state, and what enters the layers of
    /// one microbatch. No rank has less than the mean.
    pub fn least(&self, c: &Candidate) -> f64 {
        let (s, l) = (self.sizes, &c.layout);
        // Gradients of one microbatch are not summed, and need not be there all at once.
        let summed = if l.microbatches > 1 { self.gradient } else { 0.0 };
        let mean = |n: usize| n as f64 / l.pp as f64;
        let layers = self.params(c, mean(s.layers - s.expert_layers()), mean(s.expert_layers()));
        self.states(c, layers, summed) + self.stream(c) * mean(s.layers)
    }

    /// Bytes of the optimizer's state on the host, of ranks with so many parameters: without those of experts, and of
    /// experts.
    pub fn host(&self, c: &Candidate, ranks: impl Iterator<Item = (f64, f64)>) -> f64 {
        let master = self.job.precision.bytes() < 4.0;
        let outside = self.trains.share * self.ifs.state(master, self.trains.moments).1;
        let (own_by, experts_by) =
            (Form::ways(c, 1, Form::shards(c)), Form::ways(c, 1, Form::spread(c)));
        let of = |(own, experts): (f64, f64)| outside * (own / own_by + experts / experts_by);
        ranks.map(of).fold(0.0, f64::max)
    }

    /// Bytes of the largest rank of the pipeline with what backward needs of all microbatches on their way: `loads`
    /// are what ranks have, `kept` what of it they keep.
    pub fn likely(&self, c: &Candidate, loads: &[Load], kept: &[Vec<Kept>]) -> f64 {
        let (s, l, layer) = (self.sizes, &c.layout, self.layer(c));
        let tokens = (l.microbatch * self.job.seq / l.cp) as f64;
        let table = self.params[3] / l.tp as f64;
        let rank = |(load, kept): (&Load, &Vec<Kept>)| {
            let (own, experts) = self.params(c, load[0] as f64, load[1] as f64);
            let own = own + (load[2] + load[3]) as f64 * table;
            let of_stage = (load[0] + load[1]) as f64 / l.chunks as f64;
            let all = kept.iter().map(|&(forth, cut)| {
                of_stage * (forth as f64 * layer.kept + cut as f64 * layer.waiting)
            });
            // One layer is computed again at a time; logits are there in f32, with their gradient.
            let logits = load[3] as f64 * 8.0 * tokens * s.vocab as f64 / l.tp as f64;
            let working = layer.inside.max(logits);
            self.states(c, (own, experts), self.gradient) + all.fold(0.0, f64::max) + working
        };
        loads.iter().zip(kept).map(rank).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_passes::schedule::make;

    /// What waits is what schedules leave: with 1F1B nothing, with ZB-H1 as many microbatches as a rank has before it
    /// and one, with ZB-H2 nearly twice as many; more microbatches than fill a schedule change nothing.
    #[test]
    fn microbatches_wait_as_schedules_say() {
        let kept = |(named, p, v, m): Order| kept(&make(named, p, v, m).expect("it is legal"));
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
