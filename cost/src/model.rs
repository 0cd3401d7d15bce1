//! Sizes of a transformer, and what follows from them: parameters and FLOPs.

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

    /// Parameters of the attention of a layer.
    pub fn attention_params(&self) -> f64 {
        self.attention_products().iter().map(|p| p.0 * p.1).sum()
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
        self.attention_params() + mlp + 2.0 * h
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
        let mut params = all * self.attention_params() + dense * self.mlp_params(self.ffn);
        if let Some(x) = self.experts {
            let used = self.mlp_params(x.shared) + x.top_k as f64 * self.mlp_params(x.ffn);
            params += self.expert_layers() as f64 * (used + h * x.experts as f64);
        }
        params += self.embedding_params();
        let (width, value) = self.widths();
        let scores = all * self.heads as f64 * seq * (width + value) / 2.0;
        let products = 2.0 * (1.0 + weights + inputs) * params;
        tokens * (products + 2.0 * (1.0 + 2.0 * attention) * scores)
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
        };
        let dense = 3.0 * s.layer_params(true) + 58.0 * s.layer_params(false);
        let all = dense + 58.0 * s.expert_params() + 2.0 * s.embedding_params();
        assert!((all / 671e9 - 1.0).abs() < 2e-3, "{all}");
        let used = s.step_flops(1.0, 0.0) / 6.0 + s.embedding_params();
        assert!((used / 37.5e9 - 1.0).abs() < 0.02, "{used}");
    }
}
