//! Memory of a rank in other software, in closed form: what it keeps of a model, of microbatches and of logits.
//!
//! Activations by Korthikanti et al. (2022), section 4.1, with the widths of attention and MLP as they are. Checked
//! against published peaks (`cost/tests/it/held.rs`).

use crate::layer::Question;
use crate::layout::{Anew, Kernels, Modules, Recompute, Schedule};
use crate::model::Cut;
use crate::step::Load;

/// Software whose memory is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Software {
    Megatron,
    Torchtitan,
}

/// What software keeps beside weights and activations.
struct Habits {
    /// Bytes for each logit of a microbatch: of the product, of its copy in f32, of their gradients.
    logits: f64,
    /// Gathered weights, and gradients in f32, stay whole between the microbatches of a pipeline under ZeRO-3.
    keeps: bool,
    /// What its allocator reserves, of what is allocated.
    reserved: f64,
}

impl Software {
    fn habits(self) -> Habits {
        match self {
            // Logits, their gradient, and a kernel's copy in f32. The published peaks are of what is allocated.
            Software::Megatron => Habits { logits: 8.0, keeps: false, reserved: 1.0 },
            // The loss is computed op by op in f32. Its peaks are of what is reserved: fitted to 18 runs.
            Software::Torchtitan => Habits { logits: 14.0, keeps: true, reserved: 1.1 },
        }
    }
}

/// Bytes of a weight's copy for products, of its gradient, of its f32 copy and AdamW's two moments.
const STATES: [f64; 3] = [2.0, 4.0, 12.0];

impl Question<'_> {
    /// Bytes of a layer for one microbatch: what backward needs of it, and what enters it.
    fn activations(&self, dense: bool) -> (f64, f64) {
        let (s, l) = (self.sizes, self.layout);
        let (h, t) = (s.hidden as f64, l.tp as f64);
        let by_row = if l.sp { t } else { 1.0 };
        let unfused = matches!(self.job.attention, Kernels::Unfused | Kernels::Eager);
        // One byte for each element of a mask of dropout, which that software has.
        let mask = if unfused { h / by_row } else { 0.0 };
        let products = s.attention_products();
        let between = products.iter().take(products.len() - 1);
        let outputs: f64 = between
            .map(|(n, _, cut)| match cut {
                Cut::Whole => n / by_row,
                Cut::Columns | Cut::Rows => n / t,
            })
            .sum();
        let (_, value) = s.widths();
        let heads = s.heads as f64;
        let scores = if unfused { 5.0 * heads * self.job.seq as f64 / t } else { 0.0 };
        let attention = 2.0 * (h / by_row + outputs + heads * value / t) + scores + mask;
        let wide = if s.glu { 3.0 } else { 2.0 };
        let mlp = |width: f64, ranks: f64| 2.0 * (h / by_row + wide * width / ranks);
        let mut token = 4.0 * h / by_row + attention + mask;
        match s.experts {
            Some(x) if !dense => {
                let copies = x.top_k as f64 / t * l.etp as f64;
                token += copies * 2.0 * (2.0 * h + wide * x.ffn as f64 / l.etp as f64);
                token += if x.shared > 0 { mlp(x.shared as f64, t) } else { 2.0 * h / by_row };
            }
            _ => token += mlp(s.ffn as f64, t),
        }
        let (all, enters) = (self.tokens() * token, self.tokens() * 2.0 * h / by_row);
        let kept = match l.recompute {
            Recompute::None => all,
            Recompute::Selective => all - self.tokens() * scores,
            // Every other product's result, attention's, and what enters.
            Recompute::Ops => {
                let up = if dense || s.experts.is_none() { s.ffn as f64 } else { 0.0 };
                let of = 4.0 * heads * value + wide.min(2.0) * up + 2.0 * h;
                enters + self.tokens() * of / t
            }
            Recompute::Modules(m) => all - self.anew(m, dense),
            again => all + again.whole() * (enters - all),
        };
        (kept, all)
    }

    /// Bytes that modules of a layer do not keep.
    fn anew(&self, m: Modules, dense: bool) -> f64 {
        let (s, l) = (self.sizes, self.layout);
        let (t, tokens, wide) = (l.tp as f64, 2.0 * self.tokens(), if s.glu { 3.0 } else { 2.0 });
        let products = s.attention_products();
        let up: f64 = match (s.latent, m.latents) {
            (Some(_), true) => products[1..products.len() - 1].iter().map(|p| p.0).sum(),
            _kept => 0.0,
        };
        let experts = match s.experts.filter(|_| !dense) {
            None => 0.0,
            Some(x) => {
                let inside = x.top_k as f64 * wide * x.ffn as f64;
                let around = 2.0 * (x.top_k * s.hidden) as f64 + wide * x.shared as f64;
                match m.experts {
                    Anew::Nothing => 0.0,
                    Anew::Products => inside,
                    Anew::All => inside + around,
                }
            }
        };
        tokens * (up + experts) / t
    }

    /// Microbatches whose activations the rank of a pipeline keeps, of all its layers.
    fn microbatches_kept(&self, rank: usize) -> f64 {
        let l = self.layout;
        let (p, m, v) = (l.pp, l.microbatches, l.chunks);
        let kept = match l.schedule {
            _ if p == 1 => return 1.0,
            Schedule::OneFOneB => (p - rank).min(m),
            Schedule::ZbH1 | Schedule::ZbV | Schedule::DualPipe => p.min(m),
            Schedule::ZbH2 | Schedule::Filled => (2 * p).min(m),
            Schedule::Interleaved => {
                let chunks = (2 * (p - rank - 1) + (v - 1) * p + 1).min(m * v);
                return chunks as f64 / v as f64;
            }
        };
        kept as f64
    }

    /// Bytes of the fullest rank of a pipeline whose ranks have these loads.
    pub fn held(&self, software: Software, loads: &[Load]) -> f64 {
        let (s, l, habits) = (self.sizes, self.layout, software.habits());
        let [dense, with] = [true, false].map(|dense| self.layer_params(dense));
        let table = s.embedding_params() / l.tp as f64;
        let shards = |ranks: f64, stage: u8| if l.zero >= stage { ranks } else { 1.0 };
        let data = (l.cp * l.shards) as f64;
        let replicas = l.expert_replicas(self.device).size;
        let [weights, gradients, states] = STATES;
        // A layer whose weights are gathered, as the next one's are, and whose gradient is not yet cut.
        let layer = dense.0.max(with.0 + with.1);
        let of = |(rank, load): (usize, &Load)| {
            let [a, b, first, last] = load.map(|n| n as f64);
            let own =
                [(a * dense.0 + b * with.0 + (first + last) * table, data), (b * with.1, replicas)];
            let held: f64 = own
                .iter()
                .map(|(n, ranks)| {
                    let cut = |bytes: f64, stage| bytes / shards(*ranks, stage);
                    n * (cut(weights, 3) + cut(gradients, 2) + cut(states, 1))
                })
                .sum();
            let whole = match l.zero {
                3 if habits.keeps && l.pp > 1 => (own[0].0 + own[1].0) * (weights + gradients),
                3 => layer * (2.0 * weights + gradients),
                _ => 0.0,
            };
            let [x, y] = [true, false].map(|dense| self.activations(dense));
            let kept = self.microbatches_kept(rank) * (a * x.0 + b * y.0);
            let again =
                if l.recompute == Recompute::None { 0.0 } else { x.1.max(y.1 * b.min(1.0)) };
            let again = if l.recompute == Recompute::Selective { 0.0 } else { again };
            let vocab = s.vocab as f64 / l.tp as f64;
            let logits = last * self.tokens() * vocab * habits.logits;
            held + whole + kept + again + logits
        };
        habits.reserved * loads.iter().enumerate().map(of).fold(0.0, f64::max)
    }
}
