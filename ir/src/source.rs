//! A model on one device, as a frontend leaves it and before any pass: what is compiled.

use crate::func::{Func, Module, Node, RoleKind, Value};
use crate::ops::Op;
use crate::weights::{Init, Weight};

/// A model on one device. [`text::print_source`](crate::text::print_source) writes all of it.
#[derive(Clone, Debug)]
pub struct Source {
    /// One function, `model`, for one microbatch. The mesh is empty, unless a text brings one.
    pub module: Module,
    /// The parameters, in the order of the arguments.
    pub weights: Vec<Weight>,
    /// Values of the residual stream with their dim of tokens, which `--sp` splits.
    pub sequence: Vec<(Value, usize)>,
    /// Tokens are below this.
    pub vocab: usize,
}

impl Weight {
    /// A parameter of which nothing else is said: a whole tensor of its own name.
    pub fn plain(param: &str, shape: &[usize]) -> Weight {
        Weight {
            param: param.into(),
            tensor: param.into(),
            tensor_shape: shape.to_vec(),
            experts: None,
            part: None,
            shape: shape.to_vec(),
            init: Init::Normal(0.02),
            matrix: shape.len() > 1,
            tp_dim: None,
        }
    }
}

/// Size of the smallest dim that `input_ids` or `targets` index; that of all of i32 if none is.
pub fn vocabulary(f: &Func) -> usize {
    let is_tokens = |v: Value| {
        let role = f.args.iter().find(|a| a.value == v).and_then(|a| a.role.as_ref());
        role.is_some_and(|r| r.kind == RoleKind::Input && &*r.name != "positions")
    };
    let indexed = |n: &Node| {
        let Op::Take(t) = &n.op else { return None };
        let rule = &t.rule.0;
        let own = |g| !rule.ins[1].contains(g) && !rule.outs[0].contains(g);
        let dim = rule.ins[0].iter().position(own).filter(|_| is_tokens(n.ins[1]))?;
        Some(f.ty(n.ins[0]).dims.get(dim)?.size)
    };
    f.nodes.iter().filter_map(indexed).min().unwrap_or(i32::MAX as usize)
}
