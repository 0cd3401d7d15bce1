//! Sizes of a transformer, and what follows from them: parameters and FLOPs.

use shardc_ir::ops::{scan, scan_grad};

/// Sizes of a decoder.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sizes {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Width of the MLP of dense layers.
    pub ffn: usize,
    pub vocab: usize,
    /// The MLP has a gate: three products in place of two.
    pub glu: bool,
    /// Of the layers that are not dense.
    pub experts: Option<Experts>,
    /// Queries, keys and values come from narrow vectors.
    pub latent: Option<Latent>,
    /// Layers that walk a state in place of attention.
    pub scans: Option<Scans>,
}

/// Layers with a recurrence (Mamba-2, gated DeltaNet).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Scans {
    /// So many of the layers, taken for evenly spread.
    pub layers: usize,
    /// So many have attention. The others, if there are any, have an MLP or experts alone.
    pub attention: usize,
    /// Heads of values, and of queries and keys, which several of the former share.
    pub heads: usize,
    pub key_heads: usize,
    pub key_width: usize,
    pub value_width: usize,
    /// The state is corrected by what it has (the delta rule).
    pub delta: bool,
}

impl Scans {
    /// Elements of a token's queries or keys, and of its values.
    pub fn elements(&self) -> (f64, f64) {
        let (k, v) = (self.key_heads * self.key_width, self.heads * self.value_width);
        (k as f64, v as f64)
    }

    /// FLOPs of a token, forward and backward, in chunks of so many.
    pub fn flops(&self, chunk: f64) -> [f64; 2] {
        let [k, v] = [self.key_width, self.value_width].map(|n| n as f64);
        [scan::flops_of, scan_grad::flops_of]
            .map(|of| self.heads as f64 * of(self.delta, chunk, k, v))
    }
}

/// What mixes the tokens of a layer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Mixer {
    Attention,
    Scan(Scans),
    Nothing,
}

/// A mixture of experts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Experts {
    pub experts: usize,
    pub top_k: usize,
    /// Width of an expert.
    pub ffn: usize,
    /// Width of the MLP that all tokens pass.
    pub shared: usize,
    /// Layers without experts, which are taken for the first ones.
    pub dense_layers: usize,
    /// Most domains that the router sends a token to; none: as many as it likes.
    pub domains: Option<usize>,
}

/// Multi-head latent attention (DeepSeek-V2, 2024, section 2.1).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Latent {
    /// Width of the vector that queries come from; `None`: they come from what enters.
    pub query_rank: Option<usize>,
    /// Width of the vector that keys and values come from.
    pub kv_rank: usize,
    /// Of a head: without and with rotary embedding, and of a value.
    pub plain: usize,
    pub rotary: usize,
    pub value: usize,
}

impl Latent {
    /// Of DeepSeek-V3 (its config.json).
    pub const V3: Latent =
        Latent { query_rank: Some(1536), kv_rank: 512, plain: 128, rotary: 64, value: 128 };
}

impl Sizes {
    /// Products of an MLP.
    pub fn mlp_products(&self) -> f64 {
        if self.glu { 3.0 } else { 2.0 }
    }

    /// Layers with experts.
    pub fn expert_layers(&self) -> usize {
        self.experts.map_or(0, |x| self.layers.saturating_sub(x.dense_layers))
    }

    /// True if a layer either mixes tokens or has an MLP or experts.
    pub fn of_halves(&self) -> bool {
        self.scans.is_some_and(|x| x.layers + x.attention < self.layers)
    }

    /// What mixes tokens, with the share of the layers that do it so.
    pub fn mixers(&self) -> Vec<(f64, Mixer)> {
        let Some(x) = self.scans else { return vec![(1.0, Mixer::Attention)] };
        let others = self.layers.saturating_sub(x.layers + x.attention);
        let all =
            [(x.attention, Mixer::Attention), (x.layers, Mixer::Scan(x)), (others, Mixer::Nothing)];
        let share = |n: usize| n as f64 / self.layers.max(1) as f64;
        all.into_iter().filter(|m| m.0 > 0).map(|(n, m)| (share(n), m)).collect()
    }

    /// The mean over layers of what a mixer has.
    pub fn mean(&self, of: impl Fn(Mixer) -> f64) -> f64 {
        self.mixers().into_iter().map(|(share, m)| share * of(m)).sum()
    }

    /// Parameters of what mixes the tokens of a layer, in the mean.
    pub fn mixer_params(&self) -> f64 {
        self.mean(|m| self.mixer_products(m).iter().map(|p| p.0 * p.1).sum())
    }

    /// As [`Sizes::attention_products`], of what a layer has in its place.
    pub fn mixer_products(&self, m: Mixer) -> Vec<(f64, f64, Cut)> {
        let x = match m {
            Mixer::Attention => return self.attention_products(),
            Mixer::Nothing => return vec![],
            Mixer::Scan(x) => x,
        };
        let (h, (keys, values)) = (self.hidden as f64, x.elements());
        // Queries, keys, values and their gate; decays, and of the delta rule how much is corrected.
        let each = if x.delta { 2.0 } else { 1.0 };
        let enter = 2.0 * (keys + values) + each * x.heads as f64;
        vec![(enter, h, Cut::Columns), (h, values, Cut::Rows)]
    }

    /// Elements of a token that products make for a mixer, and that it makes of them.
    pub fn mixed(&self, m: Mixer) -> (f64, f64) {
        match m {
            Mixer::Attention => {
                let (width, value) = self.widths();
                let (heads, kv) = (self.heads as f64, self.kv_heads as f64);
                (heads * width + 2.0 * kv * width, heads * value)
            }
            Mixer::Scan(x) => {
                let (keys, values) = x.elements();
                (2.0 * (keys + values), values)
            }
            Mixer::Nothing => (0.0, 0.0),
        }
    }

    /// The products of attention of a whole layer: columns, rows of the weight, and whether heads cut
    /// it, and then by columns or rows.
    pub fn attention_products(&self) -> Vec<(f64, f64, Cut)> {
        let (h, heads) = (self.hidden as f64, self.heads as f64);
        match self.latent {
            None => {
                let (d, kv) = (self.head_dim as f64, self.kv_heads as f64);
                vec![((heads + 2.0 * kv) * d, h, Cut::Columns), (h, heads * d, Cut::Rows)]
            }
            Some(l) => {
                let kv = l.kv_rank as f64;
                let (down, q) = l.query_rank.map_or((0.0, h), |q| (q as f64, q as f64));
                let (plain, rotary, value) = (l.plain as f64, l.rotary as f64, l.value as f64);
                vec![
                    (down + kv + rotary, h, Cut::Whole),
                    (heads * (plain + rotary), q, Cut::Columns),
                    (heads * (plain + value), kv, Cut::Columns),
                    (h, heads * value, Cut::Rows),
                ]
            }
        }
    }

    /// Width of a head's queries and keys, and of its values.
    pub fn widths(&self) -> (f64, f64) {
        match self.latent {
            None => (self.head_dim as f64, self.head_dim as f64),
            Some(l) => ((l.plain + l.rotary) as f64, l.value as f64),
        }
    }

    /// Parameters of a dense MLP of a width.
    pub fn mlp_params(&self, width: usize) -> f64 {
        self.mlp_products() * self.hidden as f64 * width as f64
    }

    /// Parameters of all experts of a layer.
    pub fn expert_params(&self) -> f64 {
        self.experts.map_or(0.0, |x| x.experts as f64 * self.mlp_params(x.ffn))
    }

    /// Parameters of a layer that are not experts'; `dense`: it has none.
    pub fn layer_params(&self, dense: bool) -> f64 {
        let h = self.hidden as f64;
        let mlp = match self.experts {
            Some(x) if !dense => self.mlp_params(x.shared) + h * x.experts as f64,
            _ => self.mlp_params(self.ffn),
        };
        self.mixer_params() + mlp + 2.0 * h
    }

    /// Parameters of the embedding.
    pub fn embedding_params(&self) -> f64 {
        self.vocab as f64 * self.hidden as f64
    }

    /// FLOPs that a step of so many tokens needs in which all is trained, forward and backward, without anything twice;
    /// causal attention counts half.
    pub fn step_flops(&self, tokens: f64, seq: f64) -> f64 {
        self.step_flops_with(tokens, seq, [1.0; 3])
    }

    /// The same, where gradients are computed for these shares of weights, of what they multiply, and of attention.
    pub fn step_flops_with(
        &self,
        tokens: f64,
        seq: f64,
        [weights, inputs, attention]: [f64; 3],
    ) -> f64 {
        let h = self.hidden as f64;
        let dense = (self.layers - self.expert_layers()) as f64;
        let all = self.layers as f64;
        let mut params = all * self.mixer_params() + dense * self.mlp_params(self.ffn);
        if let Some(x) = self.experts {
            let used = self.mlp_params(x.shared) + x.top_k as f64 * self.mlp_params(x.ffn);
            params += self.expert_layers() as f64 * (used + h * x.experts as f64);
        }
        params += self.embedding_params();
        let (width, value) = self.widths();
        // Forward, of a layer and a token.
        let mixed = self.mean(|m| match m {
            Mixer::Attention => self.heads as f64 * seq * (width + value),
            Mixer::Scan(x) => x.flops(seq.min(scan::CHUNK as f64))[0],
            Mixer::Nothing => 0.0,
        });
        let products = 2.0 * (1.0 + weights + inputs) * params;
        tokens * (products + (1.0 + 2.0 * attention) * all * mixed)
    }
}

/// How tensor parallelism cuts a weight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    Columns,
    Rows,
    Whole,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_405b_has_its_parameters() {
        let s = Sizes {
            layers: 126,
            hidden: 16384,
            heads: 128,
            kv_heads: 8,
            head_dim: 128,
            ffn: 53248,
            vocab: 128256,
            glu: true,
            experts: None,
            latent: None,
            scans: None,
        };
        let all = 126.0 * s.layer_params(true) + 2.0 * s.embedding_params();
        assert!((all / 405.85e9 - 1.0).abs() < 1e-3, "{all}");
        // 6 FLOPs for each parameter and token, and some of attention.
        let flops = s.step_flops(1.0, 8192.0) / (6.0 * (all - s.embedding_params()));
        assert!(flops > 1.0 && flops < 1.06, "{flops}");
    }

    #[test]
    fn deepseek_v3_has_its_parameters() {
        let x = Experts {
            experts: 256,
            top_k: 8,
            ffn: 2048,
            shared: 2048,
            dense_layers: 3,
            domains: None,
        };
        let s = Sizes {
            layers: 61,
            hidden: 7168,
            heads: 128,
            kv_heads: 128,
            head_dim: 128,
            ffn: 18432,
            vocab: 129280,
            glu: true,
            experts: Some(x),
            latent: Some(Latent::V3),
            scans: None,
        };
        let dense = 3.0 * s.layer_params(true) + 58.0 * s.layer_params(false);
        let all = dense + 58.0 * s.expert_params() + 2.0 * s.embedding_params();
        assert!((all / 671e9 - 1.0).abs() < 2e-3, "{all}");
        let used = s.step_flops(1.0, 0.0) / 6.0 + s.embedding_params();
        assert!((used / 37.5e9 - 1.0).abs() < 0.02, "{used}");
    }
}
