//! Regions of an archive's program, whose one graph runs where they stand; some keep no gradients.

use super::graph::{Arg, Graph, Id, Input, Node, Source};
use super::schema::{Build, Names, RawArg, RawInt, RawNode, made};
use shardc_ir::diag::Result;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// `torch.no_grad()`, or with a true flag `torch.enable_grad()`.
const GRADIENTS: &str = "torch.ops.higher_order.wrap_with_set_grad_enabled";
pub(super) const INLINED: [&str; 2] = [GRADIENTS, "torch.ops.higher_order.wrap_with_autocast"];

/// Values that are made where no gradients are kept. Among themselves they are read as they are, so that what
/// stands there is recognised as elsewhere; everybody else reads them through a `detach`.
#[derive(Default)]
pub(super) struct NoGradValues {
    /// No gradients are kept here.
    on: bool,
    /// What depends on parameters.
    trained: HashSet<Id>,
    /// Such values, with the scopes of their nodes.
    all: HashMap<Id, Arc<str>>,
    /// Those that were read elsewhere, and what is read in their place.
    read: HashMap<Id, Id>,
}

impl NoGradValues {
    /// Notes what a node makes.
    pub fn made(&mut self, g: &mut Graph, n: &Node) {
        let is_param = |i: &Input| matches!(i.source, Source::Param(_));
        let param = |id: &Id| g.inputs.iter().any(|i| i.id == *id && is_param(i));
        let is_trained = |id: &Id| self.trained.contains(id) || param(id);
        let written = matches!(n.args.first(), Some((_, Arg::Value(id))) if is_trained(id));
        if n.ids().iter().any(is_trained) {
            self.trained.extend(&n.outs);
        }
        if !self.on {
            return;
        }
        let name = n.op.split('.').next().unwrap_or("");
        let outside = |a: &Arg| matches!(a, Arg::Value(id) if !self.all.contains_key(id));
        if written && name.ends_with('_') && n.args.first().is_some_and(|a| outside(&a.1)) {
            g.halved.extend(&n.outs);
        }
        self.all.extend(n.outs.iter().map(|&o| (o, n.scope.clone())));
    }

    /// The value that a node reads here, or that is a result.
    pub fn read(&mut self, g: &mut Graph, id: Id) -> Id {
        let Some(scope) = self.all.get(&id).filter(|_| !self.on) else { return id };
        *self.read.entry(id).or_insert_with(|| {
            let name = format!("{}_detached", g.names[id]);
            let out = g.names.push(name.into());
            let args = vec![("self".into(), Arg::Value(id))];
            let scope = scope.clone();
            g.nodes.push(Node { op: "detach.default".into(), args, outs: vec![out], scope });
            out
        })
    }

    /// Marks truth values that are read elsewhere as such.
    pub fn mark(&self, g: &mut Graph) {
        let of = self.read.iter().filter(|r| g.truths.contains(r.0)).map(|r| *r.1);
        let of: Vec<Id> = of.collect();
        g.truths.extend(of);
    }
}

impl Build<'_> {
    /// Puts the nodes of the one graph of a node in its place.
    pub(super) fn inline(&mut self, n: RawNode, names: &mut Names, depth: usize) -> Result<()> {
        let mut given = vec![];
        let (mut graph, mut flag) = (None, None);
        for a in n.inputs {
            match a.arg {
                RawArg::Graph(g) => graph = Some(g),
                RawArg::Tensor(t) if graph.is_some() => given.push(self.known(names, &t)?),
                RawArg::Int(RawInt::AsName(t)) if graph.is_some() => {
                    given.push(self.known(names, &t)?);
                }
                RawArg::Bool(b) if graph.is_none() => flag = Some(b),
                _ => {}
            }
        }
        let graph = graph.ok_or_else(|| self.bad(format!("`{}` has no graph", n.target)))?;
        let taken: Vec<&str> = graph.inputs.iter().flat_map(made).collect();
        if taken.len() != given.len() {
            return Err(self.bad(format!("`{}` has other operands than its graph", n.target)));
        }
        let mut inner: Names = taken.into_iter().map(String::from).zip(given).collect();
        let before = self.still.on;
        if n.target == GRADIENTS {
            let flag = flag.ok_or_else(|| self.bad(format!("`{}` has no flag", n.target)))?;
            self.still.on = !flag;
        }
        self.nodes(graph.nodes, &mut inner, depth + 1)?;
        self.still.on = before;
        self.truths(&graph.tensor_values, &inner);
        let outs = n.outputs.iter().flat_map(made);
        for (o, i) in outs.zip(graph.outputs.iter().flat_map(made)) {
            let id = self.known(&inner, i)?;
            if names.insert(o.to_string(), id).is_some() {
                return Err(self.bad(format!("two values are called `{o}`")));
            }
        }
        Ok(())
    }
}
