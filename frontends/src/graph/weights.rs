//! The map of weights: every parameter as an argument of the program and as a [`Weight`], in one
//! order.

mod experts;
mod recurrent;

use super::TensorNames;
use super::block::{Block, Feed, HeadNormParams, Mixing, MlpParams, QkvParams};
use super::parts::{LinearParams, NormParams};
use crate::config::Config;
use crate::family::{self, Beside, Bias, Family, NormedOver, Positions, WeightOrder};
use crate::sizes::Arch;
use shardc_ir::builder::Builder;
use shardc_ir::diag::Result;
use shardc_ir::func::{Role, RoleKind, Value};
use shardc_ir::types::Type;
use shardc_ir::weights::{Init, TensorSlice, Weight};

/// The parameters of a model, as arguments of its program.
pub(super) struct Params {
    /// Table [v, h] and scope.
    pub embedding: (Value, String),
    /// Table [p, h] and scope, of learned positions.
    pub positions: Option<(Value, String)>,
    pub blocks: Vec<Block>,
    pub final_norm: NormParams,
    /// Output projection [v, h]; `None` if it is the embedding.
    pub head: Option<Value>,
    /// Of the logits [v].
    pub head_bias: Option<Value>,
    pub mtp: Vec<Further>,
}

/// The parameters of a layer that predicts tokens behind the next.
pub(super) struct Further {
    /// Scope of the layer.
    pub scope: String,
    /// Norms of embeddings and of what comes from the layer before.
    pub norms: [NormParams; 2],
    /// Of both, one behind the other, to the hidden size.
    pub join: LinearParams,
    pub block: Block,
    pub norm: NormParams,
}

/// How tensor parallelism splits a product.
#[derive(Clone, Copy, PartialEq)]
enum Split {
    /// Every rank makes a part of the result.
    Column,
    /// Every rank uses a part of the operand; the results are summed.
    Row,
    /// Every rank makes all of it.
    Whole,
}

/// A slice of a fused tensor: it starts here, and the tensor is this long.
#[derive(Clone, Copy)]
struct FusedSlice {
    start: usize,
    total: usize,
}

struct Declare<'a, 'b, 'c> {
    b: &'a mut Builder<'b>,
    f: &'a Family,
    c: &'a Config<'c>,
    arch: &'a Arch,
    names: &'a TensorNames,
    weights: Vec<Weight>,
}

/// Declares all parameters of a model. Errors are those of the config's bias switches.
pub(super) fn declare(
    b: &mut Builder,
    f: &Family,
    c: &Config,
    arch: &Arch,
    names: &TensorNames,
) -> Result<(Params, Vec<Weight>)> {
    let facts = &arch.facts;
    let mut d = Declare { b, f, c, arch, names, weights: vec![] };
    let embedding = d.table(f.embedding, Some(&names.embedding), facts.vocab, Some(0));
    let positions = match f.positions {
        Positions::Rotary(_) | Positions::None => None,
        Positions::Learned(module) => Some(d.table(module, None, facts.max_positions, None)),
    };
    let blocks = (0..facts.layers).map(|i| d.block(i)).collect::<Result<_>>()?;
    let final_norm = d.norm(f.final_norm, &[facts.hidden]);
    d.b.enter(f.head);
    let [_, tensor] = f.tables(&names.prefix);
    let of_bias = format!("{}.bias", tensor.trim_end_matches(".weight"));
    let head = (!facts.tied).then(|| {
        let shape = vec![facts.vocab, facts.hidden];
        d.weight("lm_head", tensor, shape, None, Init::Normal(arch.std), Some(0))
    });
    // A model that holds this one has its own head, without a bias.
    let biased = c.has_own_head() && d.biased(f.head_bias)?;
    let head_bias = biased
        .then(|| d.weight("lm_head_bias", of_bias, vec![facts.vocab], None, Init::Zeros, Some(0)));
    let further = facts.layers..facts.layers + arch.mtp.0;
    let mtp = further.map(|i| d.further(i)).collect::<Result<_>>()?;
    let params = Params { embedding, positions, blocks, final_norm, head, head_bias, mtp };
    Ok((params, d.weights))
}

impl Declare<'_, '_, '_> {
    /// One parameter: an argument in the current scope, and its weight. `part` names a slice.
    fn weight(
        &mut self,
        hint: &str,
        tensor: String,
        shape: Vec<usize>,
        part: Option<(&str, TensorSlice, usize)>,
        init: Init,
        tp_dim: Option<usize>,
    ) -> Value {
        let mut tensor_shape = shape.clone();
        let (param, part) = match part {
            None => (tensor.clone(), None),
            Some((name, part, total)) => {
                tensor_shape[part.dim] = total;
                (format!("{tensor}.{name}"), Some(part))
            }
        };
        let matrix = shape.len() > 1;
        let name = self.b.named(hint.to_string());
        let role = Role::new(RoleKind::Param, param.as_str());
        let value = self.b.f.arg(Type::f32(&shape), name, Some(role));
        self.weights.push(Weight {
            param,
            tensor,
            tensor_shape,
            experts: None,
            part,
            shape,
            init,
            matrix,
            tp_dim,
        });
        value
    }

    /// Scope and checkpoint name of a module below the root.
    fn enter(&mut self, module: &str) -> (String, String) {
        let scope = format!("{}.{module}", self.f.root);
        self.b.enter(&scope);
        (scope, format!("{}{module}", self.names.prefix))
    }

    /// A table of rows, by its module, and the tensor that it is if that has another name.
    fn table(
        &mut self,
        module: &str,
        tensor: Option<&str>,
        rows: usize,
        tp_dim: Option<usize>,
    ) -> (Value, String) {
        let (scope, name) = self.enter(module);
        let tensor = tensor.map_or_else(|| format!("{name}.weight"), String::from);
        let shape = vec![rows, self.arch.facts.hidden];
        let init = Init::Normal(self.arch.std);
        (self.weight(last(module), tensor, shape, None, init, tp_dim), scope)
    }

    /// A norm with weights of one size, or with those of each head, or without any.
    fn norm(&mut self, module: &str, sizes: &[usize]) -> NormParams {
        self.norm_of(self.f.norm, module, sizes)
    }

    /// The same of a kind that may be another than the family's.
    fn norm_of(&mut self, of: family::Norm, module: &str, sizes: &[usize]) -> NormParams {
        let (scope, name) = self.enter(module);
        let hint = last(module);
        let family::Norm { centered, around_one, weight, bias } = of;
        if sizes.is_empty() || !weight {
            return NormParams { weight: None, around_one, centered, bias: None, scope };
        }
        let (shape, by_heads) = (sizes.to_vec(), (sizes.len() > 1).then_some(0));
        let init = if around_one { Init::Zeros } else { Init::Ones };
        let tensor = format!("{name}.weight");
        let weight = self.weight(hint, tensor, shape.clone(), None, init, by_heads);
        let bias = bias.then(|| {
            let hint = format!("{hint}_bias");
            self.weight(&hint, format!("{name}.bias"), shape, None, Init::Zeros, by_heads)
        });
        NormParams { weight: Some(weight), around_one, centered, bias, scope }
    }

    /// Whether there is a bias.
    fn biased(&self, bias: Bias) -> Result<bool> {
        match bias {
            Bias::Never => Ok(false),
            Bias::Always => Ok(true),
            Bias::Key(key) => self.c.flag(key, false),
            Bias::Unless(key) => self.c.flag(key, true),
        }
    }

    fn linear(
        &mut self,
        within: &str,
        l: &family::Linear,
        [input, output]: [usize; 2],
        split: Split,
        fused: Option<FusedSlice>,
    ) -> Result<LinearParams> {
        let (scope, name) = self.enter(&format!("{within}.{}", l.module));
        let (shape, out_dim) = match l.layout {
            WeightOrder::OutIn => (vec![output, input], 0),
            WeightOrder::InOut => (vec![input, output], 1),
        };
        let part = |dim: usize| {
            let (name, fused) = (l.part?, fused?);
            Some((name, TensorSlice::of(dim, fused.start, output), fused.total))
        };
        let hint = match l.part {
            None => l.module.to_string(),
            Some(p) => format!("{}_{p}", l.module),
        };
        let facts = &self.arch.facts;
        let smaller = split == Split::Row && self.f.scaled_residual_init;
        let deviation = if smaller {
            self.arch.std / (2.0 * facts.layers as f64).sqrt()
        } else {
            self.arch.std
        };
        let (split_weight, split_bias) = match split {
            Split::Column => (Some(out_dim), Some(0)),
            Split::Row => (Some(1 - out_dim), None),
            Split::Whole => (None, None),
        };
        let init = Init::Normal(deviation);
        let tensor = format!("{name}.weight");
        let weight = self.weight(&hint, tensor, shape, part(out_dim), init, split_weight);
        let bias = self.biased(l.bias)?.then(|| {
            let hint = format!("{hint}_bias");
            let tensor = format!("{name}.bias");
            self.weight(&hint, tensor, vec![output], part(0), Init::Zeros, split_bias)
        });
        Ok(LinearParams { weight, bias, layout: l.layout, scope })
    }

    fn block(&mut self, i: usize) -> Result<Block> {
        let (f, facts) = (self.f, self.arch.facts);
        let m = &f.mlp;
        let at = format!("{}.{i}", f.layers);
        let norm = |d: &mut Self, n: &str| d.norm(&format!("{at}.{n}"), &[facts.hidden]);
        let [first, second] = self.arch.halves[i];
        let mixing = if first { Some(self.mixing(&at, i)?) } else { None };
        let own_norm = second && f.beside != Beside::OneNorm;
        let mlp_norm = m.norm.filter(|_| own_norm).map(|n| norm(self, n));
        let mlp = match f.experts.filter(|_| self.arch.sparse[i]) {
            _none if !second => Feed::Nothing,
            Some(e) => Feed::Experts(Box::new(self.experts(&at, &e)?)),
            None => Feed::MlpParams(self.mlp(&format!("{at}.{}", m.module), facts.ffn)?),
        };
        let norm_behind_mlp = m.norm_behind.filter(|_| second).map(|n| norm(self, n));
        Ok(Block { scope: format!("{}.{at}", f.root), mixing, mlp_norm, mlp, norm_behind_mlp })
    }

    /// The first half of a block.
    fn mixing(&mut self, at: &str, i: usize) -> Result<Mixing> {
        let (f, facts) = (self.f, self.arch.facts);
        let a = &f.attention;
        let recurrent = f.recurrent.filter(|_| self.arch.walks[i]);
        let within = format!("{at}.{}", recurrent.map_or(a.module, |r| r.module));
        let hidden = facts.hidden;
        let norm = |d: &mut Self, n: &str| d.norm(&format!("{at}.{n}"), &[hidden]);
        let before = a.norm.map(|n| norm(self, n));
        let (heads, o_in) = match &recurrent {
            None => self.heads(&within, self.arch.turns[i])?,
            Some(r) => {
                let values = self.arch.recurrent.map_or(0, |s| s.values());
                (QkvParams::Recurrent(Box::new(self.recurrent(r, at)?)), values)
            }
        };
        let sinks = a.sinks.filter(|_| recurrent.is_none()).map(|name| {
            let (_, at) = self.enter(&within);
            let init = Init::Normal(self.arch.std);
            self.weight(name, format!("{at}.{name}"), vec![facts.heads], None, init, Some(0))
        });
        let o = match recurrent {
            None => a.o,
            Some(r) => family::Linear::torch("out_proj", r.mixer.out_bias()),
        };
        let o = self.linear(&within, &o, [o_in, hidden], Split::Row, None)?;
        let norm_behind = a.norm_behind.map(|n| norm(self, n));
        let scope = format!("{}.{within}", f.root);
        Ok(Mixing { scope, norm: before, heads, sinks, o, norm_behind })
    }

    /// A layer that predicts tokens behind the next (DeepSeek-AI, 2024, *DeepSeek-V3*, 2.2).
    fn further(&mut self, i: usize) -> Result<Further> {
        let hidden = self.arch.facts.hidden;
        let at = format!("{}.{i}", self.f.layers);
        let norms = ["enorm", "hnorm"].map(|n| self.norm(&format!("{at}.{n}"), &[hidden]));
        let join = family::Linear::torch("eh_proj", Bias::Never);
        let join = self.linear(&at, &join, [2 * hidden, hidden], Split::Whole, None)?;
        let block = self.block(i)?;
        let norm = self.norm(&format!("{at}.shared_head.norm"), &[hidden]);
        Ok(Further { scope: format!("{}.{at}", self.f.root), norms, join, block, norm })
    }

    /// What makes q, k and v, and the size of all heads' results together.
    fn heads(&mut self, within: &str, turns: bool) -> Result<(QkvParams, usize)> {
        let facts = self.arch.facts;
        let hidden = facts.hidden;
        match &self.f.attention.heads {
            family::Heads::Plain { q, k, v } => {
                let [q_out, kv_out] = [facts.heads, facts.kv_heads].map(|n| n * facts.head_dim);
                let total = q_out + 2 * kv_out;
                let slice = |start| Some(FusedSlice { start, total });
                let kv = [hidden, kv_out];
                let gated = self.f.attention.gated;
                let q_made = if gated { 2 * q_out } else { q_out };
                let q = self.linear(within, q, [hidden, q_made], Split::Column, slice(0))?;
                let k = self.linear(within, k, kv, Split::Column, slice(q_out))?;
                let v = self.linear(within, v, kv, Split::Column, slice(q_out + kv_out))?;
                let norms = self.f.attention.norms;
                let norms = match norms.and_then(|n| n.key) {
                    Some((key, absent)) if !self.c.flag(key, absent)? => None,
                    _there => norms,
                };
                // What norms what turns is not there where nothing does.
                let norms = norms.filter(|n| turns || !n.behind);
                let norms = norms.map(|n| {
                    let d = facts.head_dim;
                    let sizes = match n.over {
                        NormedOver::Bare => [vec![], vec![]],
                        NormedOver::Head => [vec![d], vec![d]],
                        NormedOver::OwnHead => [vec![facts.heads, d], vec![facts.kv_heads, d]],
                        NormedOver::All => [vec![q_out], vec![kv_out]],
                    };
                    let one =
                        |i: usize| self.norm(&format!("{within}.{}", n.modules[i]), &sizes[i]);
                    HeadNormParams { over: n.over, behind: n.behind, norms: [0, 1].map(one) }
                });
                Ok((QkvParams::Plain { q, k, v, norms, gated }, q_out))
            }
            family::Heads::Joined(qkv) => {
                let out = facts.heads * facts.head_dim;
                let qkv = self.linear(within, qkv, [hidden, 3 * out], Split::Column, None)?;
                Ok((QkvParams::Joined(qkv), out))
            }
            family::Heads::Latent(l) => {
                let sizes = self.arch.latent.expect("a family with latent attention");
                let q_out = facts.heads * facts.head_dim;
                let norm = |d: &mut Self, n: &str, size| d.norm(&format!("{within}.{n}"), &[size]);
                let (q_down, q) = match sizes.q_rank {
                    None => {
                        (None, self.linear(within, &l.q, [hidden, q_out], Split::Column, None)?)
                    }
                    Some(r) => {
                        let down =
                            self.linear(within, &l.q_down, [hidden, r], Split::Whole, None)?;
                        let down = (down, norm(self, l.q_norm, r));
                        (Some(down), self.linear(within, &l.q_up, [r, q_out], Split::Column, None)?)
                    }
                };
                let r = sizes.kv_rank;
                let all = [hidden, r + sizes.turning];
                let kv_down = self.linear(within, &l.kv_down, all, Split::Whole, None)?;
                let kv_norm = norm(self, l.kv_norm, r);
                let up = [r, facts.heads * (sizes.still + sizes.value)];
                let kv_up = self.linear(within, &l.kv_up, up, Split::Column, None)?;
                let heads = QkvParams::Latent { q_down, q, kv_down, kv_norm, kv_up };
                Ok((heads, facts.heads * sizes.value))
            }
        }
    }

    fn mlp(&mut self, within: &str, width: usize) -> Result<MlpParams> {
        let (m, hidden) = (&self.f.mlp, self.arch.facts.hidden);
        let wide = [hidden, width];
        let slice = |start| Some(FusedSlice { start, total: 2 * width });
        let gate = match &m.gate {
            None => None,
            Some(g) => Some(self.linear(within, g, wide, Split::Column, slice(0))?),
        };
        let up = self.linear(within, &m.up, wide, Split::Column, slice(width))?;
        let down = self.linear(within, &m.down, [width, hidden], Split::Row, None)?;
        Ok(MlpParams { scope: format!("{}.{within}", self.f.root), gate, up, down })
    }
}

/// The last word of a module path.
fn last(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}
