//! A model on one device, as a frontend leaves it and before any pass: what is compiled.

use crate::func::{Fill, Func, Input, Module, Value};
use crate::ops::Kind;
use crate::rule::{Dims, Group};
use crate::types::Dim;
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
    /// Groups of parameters and the update rules that they are trained by, as their text; empty if none are said. Of a
    /// text that was read it stands on its own lines, behind empty ones.
    pub updates: String,
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

/// Size of the smallest table that tokens index; without one that of their labels, or of any input of data; that of
/// all of i32 if there is none.
pub fn vocabulary(f: &Func) -> usize {
    let of = |is: fn(Input) -> bool| {
        let own = f.args.iter().filter(|a| a.input().is_some_and(is));
        own.flat_map(|a| tables(f, a.value).sizes).min()
    };
    // Other columns of whole numbers may have a number for each token, too, as kinds of segments; what is scored may
    // be other things than tokens.
    let tokens = of(|i| i.seq.is_some() && i.fill == Fill::Tokens);
    let labels = || of(|i| i.seq.is_some() && i.fill == Fill::Labels);
    tokens.or_else(labels).or_else(|| of(|i| i.fill.is_data())).unwrap_or(i32::MAX as usize)
}

/// What a value of whole numbers chooses from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tables {
    /// Sizes of the dims that it indexes.
    pub sizes: Vec<usize>,
    /// False if something is done to the numbers: what they index is not known.
    pub followed: bool,
    /// The results of the function that they are.
    pub results: Vec<usize>,
}

/// Follows whole numbers through what leaves them as they are, to the tables that they index. The program need not be
/// verified: what a node lacks is no table.
pub fn tables(f: &Func, v: Value) -> Tables {
    let mut out = Tables { sizes: vec![], followed: true, results: vec![] };
    let mut same = vec![v];
    let whole = |v: Value| !f.ty(v).dtype.is_float();
    let size = |v: Option<&Value>, d: usize| Some(f.ty(*v?).dims.get(d)?.size);
    for n in f.nodes.iter().filter(|n| n.ins.iter().any(|x| whole(*x))) {
        let Some(j) = n.ins.iter().position(|x| same.contains(x)) else { continue };
        let ranks: Vec<usize> = n.ins.iter().map(|&x| f.ty(x).rank()).collect();
        match n.op.facts().kind {
            _ if n.op.as_route().is_some() => {
                let experts = n.outs.get(1).and_then(|&counts| f.ty(counts).dims.get(..2));
                let all = |dims: &[Dim]| dims.iter().fold(1usize, |n, d| n.saturating_mul(d.size));
                out.sizes.extend(experts.map(all));
            }
            Kind::Lookup if j == 1 => {
                let r = n.op.def().rule(&ranks);
                let of = |dims: Option<&Dims>, g: &Group| dims.is_some_and(|d| d.contains(g));
                let own = |g: &Group| !of(r.ins.get(1), g) && !of(r.outs.first(), g);
                let at = r.ins.first().and_then(|dims| dims.iter().position(own));
                out.sizes.extend(at.and_then(|d| size(n.ins.first(), d)));
            }
            Kind::Scatter if j == 1 => {
                let r = n.op.def().rule(&ranks);
                let own = |g: &Group| !r.ins.iter().any(|of| of.contains(g));
                let at = r.outs.first().and_then(|dims| dims.iter().position(own));
                out.sizes.extend(at.and_then(|d| size(n.outs.first(), d)));
            }
            Kind::Layout | Kind::Movement if n.ins.len() == 1 => same.extend(&n.outs),
            _ if n.outs.iter().all(|&o| f.ty(o).dtype.is_float()) => {}
            _changes => out.followed = false,
        }
    }
    out.results = (0..f.results.len()).filter(|&r| same.contains(&f.results[r].value)).collect();
    out
}
