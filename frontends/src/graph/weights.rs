//! The map of weights: every parameter as an argument of the program and as a [`Weight`], in one
//! order.

use super::block::Block;
use super::parts::{Linear, Norm};
use crate::config::Config;
use crate::family::{self, Bias, Family, Layout, Positions};
use crate::sizes::Arch;
use shardc_ir::builder::Builder;
use shardc_ir::diag::Result;
use shardc_ir::func::{Role, RoleKind, Value};
use shardc_ir::types::Type;
use shardc_ir::weights::{Init, Part, Weight};

/// The parameters of a model, as arguments of its program.
pub(super) struct Params {
    /// Table [v, h] and scope.
    pub embedding: (Value, String),
    /// Table [p, h] and scope, of learned positions.
    pub positions: Option<(Value, String)>,
    pub blocks: Vec<Block>,
    pub final_norm: Norm,
    /// Output projection [v, h]; `None` if it is the embedding.
    pub head: Option<Value>,
}

/// How tensor parallelism splits a product.
#[derive(Clone, Copy, PartialEq)]
enum Split {
    /// Every rank makes a part of the result.
    Column,
    /// Every rank uses a part of the operand; the results are summed.
    Row,
}

/// A slice of a fused tensor: it starts here, and the tensor is this long.
#[derive(Clone, Copy)]
struct Fused {
    start: usize,
    total: usize,
}

struct Declare<'a, 'b, 'c> {
    b: &'a mut Builder<'b>,
    f: &'a Family,
    c: &'a Config<'c>,
    arch: &'a Arch,
    prefix: &'a str,
    weights: Vec<Weight>,
}

/// Declares all parameters of a model. Errors are those of the config's bias switches.
pub(super) fn declare(
    b: &mut Builder,
    f: &Family,
    c: &Config,
    arch: &Arch,
    prefix: &str,
) -> Result<(Params, Vec<Weight>)> {
    let facts = &arch.facts;
    let mut d = Declare { b, f, c, arch, prefix, weights: vec![] };
    let embedding = d.table(f.embedding, facts.vocab, Some(0));
    let positions = match f.positions {
        Positions::Rotary => None,
        Positions::Learned(module) => Some(d.table(module, facts.max_positions, None)),
    };
    let blocks = (0..facts.layers).map(|i| d.block(i)).collect::<Result<_>>()?;
    let final_norm = d.norm(f.final_norm, facts.hidden);
    let head = (!facts.tied).then(|| {
        d.b.enter("lm_head");
        let shape = vec![facts.vocab, facts.hidden];
        d.weight("lm_head", "lm_head.weight".into(), shape, None, Init::Normal(arch.std), Some(0))
    });
    let params = Params { embedding, positions, blocks, final_norm, head };
    Ok((params, d.weights))
}

impl Declare<'_, '_, '_> {
    /// One parameter: an argument in the current scope, and its weight. `part` names a slice.
    fn weight(
        &mut self,
        hint: &str,
        tensor: String,
        shape: Vec<usize>,
        part: Option<(&str, Part, usize)>,
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
        let matrix = shape.len() == 2;
        let name = self.b.named(hint.to_string());
        let role = Role::new(RoleKind::Param, param.as_str());
        let value = self.b.f.arg(Type::f32(&shape), name, Some(role));
        self.weights.push(Weight {
            param,
            tensor,
            tensor_shape,
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
        (scope, format!("{}{module}", self.prefix))
    }

    fn table(&mut self, module: &str, rows: usize, tp_dim: Option<usize>) -> (Value, String) {
        let (scope, name) = self.enter(module);
        let shape = vec![rows, self.arch.facts.hidden];
        let init = Init::Normal(self.arch.std);
        (self.weight(last(module), format!("{name}.weight"), shape, None, init, tp_dim), scope)
    }

    fn norm(&mut self, module: &str, size: usize) -> Norm {
        let (scope, name) = self.enter(module);
        let hint = last(module);
        let shape = vec![size];
        let weight =
            self.weight(hint, format!("{name}.weight"), shape.clone(), None, Init::Ones, None);
        let bias = (self.f.norm == family::Norm::Layer).then(|| {
            let hint = format!("{hint}_bias");
            self.weight(&hint, format!("{name}.bias"), shape, None, Init::Zeros, None)
        });
        Norm { weight, bias, scope }
    }

    fn linear(
        &mut self,
        within: &str,
        l: &family::Linear,
        [input, output]: [usize; 2],
        split: Split,
        fused: Option<Fused>,
    ) -> Result<Linear> {
        let (scope, name) = self.enter(&format!("{within}.{}", l.module));
        let (shape, out_dim) = match l.layout {
            Layout::OutIn => (vec![output, input], 0),
            Layout::InOut => (vec![input, output], 1),
        };
        let part = |dim: usize| {
            let (name, fused) = (l.part?, fused?);
            Some((name, Part { dim, start: fused.start, len: output }, fused.total))
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
        };
        let init = Init::Normal(deviation);
        let tensor = format!("{name}.weight");
        let weight = self.weight(&hint, tensor, shape, part(out_dim), init, split_weight);
        let biased = match l.bias {
            Bias::Never => false,
            Bias::Always => true,
            Bias::Key(key) => self.c.flag(key, false)?,
        };
        let bias = biased.then(|| {
            let hint = format!("{hint}_bias");
            let tensor = format!("{name}.bias");
            self.weight(&hint, tensor, vec![output], part(0), Init::Zeros, split_bias)
        });
        Ok(Linear { weight, bias, layout: l.layout, scope })
    }

    fn block(&mut self, i: usize) -> Result<Block> {
        let (f, facts) = (self.f, self.arch.facts);
        let (a, m) = (&f.attention, &f.mlp);
        let at = format!("{}.{i}", f.layers);
        let [in_a, in_m] = [a.module, m.module].map(|s| format!("{at}.{s}"));
        let hidden = facts.hidden;
        let [q_out, kv_out] = [facts.heads, facts.kv_heads].map(|n| n * facts.head_dim);
        let total = q_out + 2 * kv_out;
        let slice = |start| Some(Fused { start, total });
        let kv = [hidden, kv_out];

        let attention_norm = self.norm(&format!("{at}.{}", a.norm), hidden);
        let q = self.linear(&in_a, &a.q, [hidden, q_out], Split::Column, slice(0))?;
        let k = self.linear(&in_a, &a.k, kv, Split::Column, slice(q_out))?;
        let v = self.linear(&in_a, &a.v, kv, Split::Column, slice(q_out + kv_out))?;
        let head_norms =
            a.head_norms.map(|n| n.map(|n| self.norm(&format!("{in_a}.{n}"), facts.head_dim)));
        let o = self.linear(&in_a, &a.o, [q_out, hidden], Split::Row, None)?;
        let mlp_norm = self.norm(&format!("{at}.{}", m.norm), hidden);
        let wide = [hidden, facts.ffn];
        let gate = match &m.gate {
            None => None,
            Some(g) => Some(self.linear(&in_m, g, wide, Split::Column, None)?),
        };
        let up = self.linear(&in_m, &m.up, wide, Split::Column, None)?;
        let down = self.linear(&in_m, &m.down, [facts.ffn, hidden], Split::Row, None)?;
        let under_root = |s: &str| format!("{}.{s}", f.root);
        Ok(Block {
            scope: under_root(&at),
            attention_scope: under_root(&in_a),
            mlp_scope: under_root(&in_m),
            attention_norm,
            q,
            k,
            v,
            o,
            head_norms,
            mlp_norm,
            gate,
            up,
            down,
        })
    }
}

/// The last word of a module path.
fn last(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}
