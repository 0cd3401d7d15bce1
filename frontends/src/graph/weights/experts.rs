//! The parameters of mixtures of experts.

use super::*;
use crate::family::Stored;
use crate::graph::experts::{MoeParams, Product, SharedParams};

impl Declare<'_, '_, '_> {
    /// The weights of one product of all experts, stacked: [e, output, input].
    fn stack(&mut self, list: &str, module: &str, [o, i]: [usize; 2], split: Split) -> Value {
        let n = self.arch.facts.experts.map_or(0, |e| e.experts);
        let (_, name) = self.enter(list);
        let tensor = format!("{name}.{{}}.{module}.weight");
        let param = format!("{name}.{module}.weight");
        let arg = self.b.named(module.to_string());
        let shape = vec![n, o, i];
        let role = Some(Role::new(RoleKind::Param, param.as_str()));
        let value = self.b.f.arg(Type::f32(&shape), arg, role);
        self.weights.push(Weight {
            param,
            tensor,
            tensor_shape: vec![o, i],
            experts: Some(n),
            part: None,
            shape,
            init: Init::Normal(self.arch.std),
            matrix: true,
            tp_dim: Some(if split == Split::Column { 1 } else { 2 }),
        });
        value
    }

    /// A tensor of all experts together: a part of it, with its name, or all; its dims behind the
    /// first have these sizes, of which one is that of the results.
    fn together(
        &mut self,
        tensor: String,
        mut shape: Vec<usize>,
        (out, part): (usize, Option<(&str, TensorSlice)>),
        (init, tp_dim): (Init, Option<usize>),
    ) -> Value {
        let n = self.arch.facts.experts.map_or(0, |e| e.experts);
        shape.insert(0, n);
        let hint = part.map_or_else(|| last(&tensor), |p| p.0).to_string();
        let all = 2 * shape[out];
        let part = part.map(|(name, part)| (name, part, all));
        let value = self.weight(&hint, tensor, shape, part, init, tp_dim);
        self.weights.last_mut().expect("one").experts = Some(n);
        value
    }

    /// A product of all experts, from `input` to `output` elements.
    fn product(
        &mut self,
        e: &family::Experts,
        (list, module): (&str, &'static str),
        [output, input]: [usize; 2],
        half: Option<(&str, usize)>,
    ) -> Product {
        let Stored::Together { order, in_turn, biases } = e.stored else {
            let split = if half.is_some() { Split::Column } else { Split::Row };
            let weight = self.stack(list, module, [output, input], split);
            return Product { weight, bias: None };
        };
        let (_, name) = self.enter(list);
        let (shape, out) = match order {
            WeightOrder::OutIn => (vec![output, input], 1),
            WeightOrder::InOut => (vec![input, output], 2),
        };
        let tp_dim = if half.is_some() { out } else { 3 - out };
        let part = |dim| {
            let (name, i) = half?;
            let (start, step) = if in_turn { (i, 2) } else { (i * output, 1) };
            Some((name, TensorSlice { dim, start, len: output, step }))
        };
        let tensor = format!("{name}.{module}");
        let normal = (Init::Normal(self.arch.std), Some(tp_dim));
        let weight = self.together(tensor.clone(), shape, (out, part(out)), normal);
        let bias = biases.then(|| {
            let split = half.map(|_| 1);
            let own = (1, part(1));
            let tensor = format!("{tensor}_bias");
            let bias = self.together(tensor, vec![output], own, (Init::Zeros, split));
            // Tokens, which may be of any expert, take what is added behind the products.
            let w = self.weights.last_mut().expect("one");
            w.experts = w.experts.filter(|_| half.is_some());
            bias
        });
        Product { weight, bias }
    }

    pub(super) fn experts(&mut self, block: &str, e: &family::Experts) -> Result<MoeParams> {
        let facts = self.arch.facts;
        let n = facts.experts.expect("a family with experts");
        let within = format!("{block}.{}", e.module);
        let (router_scope, name) = self.enter(&format!("{within}.{}", e.router));
        let shape = vec![n.experts, facts.hidden];
        let normal = Init::Normal(self.arch.std);
        let router =
            self.weight(last(e.router), format!("{name}.weight"), shape, None, normal, None);
        let router_bias = e.router_bias.then(|| {
            let tensor = format!("{name}.bias");
            self.weight("router_bias", tensor, vec![n.experts], None, Init::Zeros, None)
        });
        let bias = e.score.bias.map(|bias| {
            let row = e.score.bias_of_row.then_some(1);
            let shape = row.into_iter().chain([n.experts]).collect();
            let tensor = format!("{}{within}.{bias}", self.names.prefix);
            self.weight(last(bias), tensor, shape, None, Init::Zeros, None)
        });
        let list = match e.list {
            "" => within.clone(),
            list => format!("{within}.{list}"),
        };
        let size = n.narrow.unwrap_or(facts.hidden);
        let narrowed = match e.narrowed.zip(n.narrow) {
            None => None,
            Some((of, size)) => {
                let linear =
                    |d: &mut Self, l, sizes| d.linear(&within, l, sizes, Split::Whole, None);
                let into = linear(self, &of.into, [facts.hidden, size])?;
                Some([into, linear(self, &of.out_of, [size, facts.hidden])?])
            }
        };
        let (out, back) = ([n.ffn, size], [size, n.ffn]);
        let gate = e.gate.map(|gate| self.product(e, (&list, gate), out, Some(("gate", 0))));
        let up = self.product(e, (&list, e.up), out, Some(("up", 1)));
        let down = self.product(e, (&list, e.down), back, None);
        let shared = match e.shared.filter(|_| n.shared > 0) {
            None => None,
            Some(s) => {
                let at = if s.beside { block } else { &within };
                let mlp = self.mlp(&format!("{at}.{}", s.module), n.shared)?;
                let gate = s.gate.map(|module| {
                    let (scope, name) = self.enter(&format!("{within}.{module}"));
                    let shape = vec![1, facts.hidden];
                    let tensor = format!("{name}.weight");
                    (self.weight(module, tensor, shape, None, normal, None), scope)
                });
                Some(SharedParams { mlp, gate })
            }
        };
        let under_root = |s: &str| format!("{}.{s}", self.f.root);
        Ok(MoeParams {
            scope: under_root(&within),
            router_scope,
            list_scope: under_root(&list),
            router,
            router_bias,
            bias,
            order: match e.stored {
                Stored::Each => WeightOrder::OutIn,
                Stored::Together { order, .. } => order,
            },
            narrowed,
            gate,
            up,
            down,
            shared,
        })
    }
}
