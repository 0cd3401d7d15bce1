//! Ops that write into their operand (`add_`): the same as those that make a new value (`add`), where nobody
//! reads the old one, or what shares its memory, afterwards. Where somebody does, they stay, and are refused.

use super::graph::{Arg, Graph, Id, IntArg, Node};
use std::collections::{BTreeMap, BTreeSet};

/// Ops whose result shares the memory of their first operand: they never copy.
pub(super) const SHARED: &[&str] = &[
    "alias",
    "chunk",
    "detach",
    "diagonal",
    "expand",
    "mT",
    "narrow",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unfold",
    "unsqueeze",
    "view",
    "view_as",
];

/// Ops whose result may share it, or be a copy.
const EITHER: &[&str] = &[
    "_unsafe_view",
    "broadcast_tensors",
    "broadcast_to",
    "contiguous",
    "dropout",
    "einsum",
    "expand_as",
    "flatten",
    "lift_fresh_copy",
    "numpy_T",
    "pixel_shuffle",
    "reshape",
    "to",
    "type_as",
    "unflatten",
];

/// Whether a result shares the memory of the first operand, or may.
fn is_view(name: &str) -> bool {
    SHARED.contains(&name) || EITHER.contains(&name)
}

/// The name of an op without its overload.
pub(super) fn base(op: &str) -> &str {
    op.split('.').next().unwrap_or(op)
}

/// True if an op writes no number, and turns what it names (`t_`): a view of the same memory under another name.
pub(super) fn renames(op: &str) -> bool {
    base(op).strip_suffix('_').is_some_and(is_view)
}

/// The operand whose memory a result shares, or may share.
pub(super) fn shares(n: &Node, k: usize) -> Option<Id> {
    let name = base(&n.op);
    if !is_view(name) && !renames(&n.op) {
        return None;
    }
    match n.args.iter().find(|a| matches!(a.1, Arg::Value(_) | Arg::Values(_)))? {
        (_, Arg::Value(id)) => Some(*id),
        // Of several operands it is a product.
        (_, Arg::Values(all)) if name == "einsum" && all.len() > 1 => None,
        (_, Arg::Values(all)) => *all.get(k)?,
        _number => None,
    }
}

/// The same op that makes a new value, of one that writes into its operand.
pub(super) fn pure(op: &str) -> Option<String> {
    let (name, overload) = op.split_once('.')?;
    let plain = name.strip_suffix('_').filter(|p| !p.ends_with('_'))?;
    // What is named otherwise where nothing is written: `pow.Scalar` is of a number.
    match plain {
        "pow" => Some(format!("pow.Tensor_{overload}")),
        "transpose" => Some("transpose.int".into()),
        _other => Some(format!("{plain}.{overload}")),
    }
}

fn operands(n: &Node) -> Vec<Id> {
    let of = |a: &Arg| match a {
        Arg::Value(id) => vec![*id],
        Arg::Values(all) => all.iter().copied().flatten().collect(),
        Arg::Ints(all) => {
            let one = |i: &IntArg| if let IntArg::Of(id) = i { Some(*id) } else { None };
            all.iter().filter_map(one).collect()
        }
        _ => vec![],
    };
    n.args.iter().flat_map(|(_, a)| of(a)).collect()
}

/// Renames ops that write into an operand that nobody reads afterwards.
pub(super) fn undo(g: &mut Graph) {
    if g.nodes.iter().all(|n| pure(&n.op).is_none()) {
        return;
    }
    // What shares memory is called by the value that had it first.
    let mut root: BTreeMap<Id, Id> = BTreeMap::new();
    let of = |root: &BTreeMap<Id, Id>, id: Id| root.get(&id).copied().unwrap_or(id);
    let mut last: BTreeMap<Id, usize> = BTreeMap::new();
    for (i, n) in g.nodes.iter().enumerate() {
        let all = operands(n);
        for &id in &all {
            last.insert(of(&root, id), i);
        }
        for (k, &o) in n.outs.iter().enumerate() {
            if let Some(id) = shares(n, k) {
                let id = of(&root, id);
                root.insert(o, id);
            }
        }
    }
    let kept: BTreeSet<Id> =
        g.inputs.iter().map(|i| i.id).chain(g.outputs.iter().map(|&o| of(&root, o))).collect();
    let named = g.last_uses();
    for (i, n) in g.nodes.iter_mut().enumerate() {
        let Some(Arg::Value(id)) = n.args.first().map(|a| &a.1) else { continue };
        let own = of(&root, *id);
        let unread = match renames(&n.op) {
            // It writes no number: views of the same memory stay as they are, and keep their gradients.
            true => named.get(id) == Some(&i) && !g.outputs.contains(id),
            false => last.get(&own) == Some(&i) && !kept.contains(&own),
        };
        let unread = unread && !n.outs.iter().any(|o| g.halved.contains(o));
        if let Some(op) = pure(&n.op).filter(|_| unread) {
            n.op = op.into();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(nodes: &[(&str, &[u32], u32)]) -> Graph {
        let node = |(op, ins, out): &(&str, &[u32], u32)| Node {
            op: (*op).into(),
            args: ins.iter().map(|&i| ("x".into(), Arg::Value(Id(i)))).collect(),
            outs: vec![Id(*out)],
            scope: "".into(),
        };
        Graph { nodes: nodes.iter().map(node).collect(), ..Graph::default() }
    }

    fn ops(mut g: Graph) -> Vec<String> {
        undo(&mut g);
        g.nodes.iter().map(|n| n.op.to_string()).collect()
    }

    #[test]
    fn what_nobody_reads_may_be_written_over() {
        let sum = ("add.Tensor", &[0u32, 0][..], 1);
        let write = ("mul_.Tensor", &[1u32, 0][..], 2);
        assert_eq!(ops(graph(&[sum, write]))[1], "mul.Tensor");
        // Read before, and read afterwards.
        let read = ("neg.default", &[1u32][..], 3);
        assert_eq!(ops(graph(&[sum, read, write]))[2], "mul.Tensor");
        assert_eq!(ops(graph(&[sum, write, read]))[1], "mul_.Tensor");
        // By way of what shares its memory.
        let view = ("select.int", &[1u32][..], 4);
        let fill = ("fill_.Scalar", &[4u32][..], 5);
        assert_eq!(ops(graph(&[sum, view, fill, read]))[2], "fill_.Scalar");
        let late = ("neg.default", &[4u32][..], 6);
        assert_eq!(ops(graph(&[sum, view, write, late]))[2], "mul_.Tensor");
        // Without its gradient it is the same memory, and only its own name must not be read.
        let stop = ("detach_.default", &[1u32][..], 7);
        assert_eq!(ops(graph(&[sum, view, stop, late]))[2], "detach.default");
        assert_eq!(ops(graph(&[sum, stop, read]))[1], "detach_.default");
        // Turned, it is the same memory.
        let turn = ("t_.default", &[1u32][..], 7);
        assert_eq!(ops(graph(&[sum, view, turn, late]))[2], "t.default");
        assert_eq!(ops(graph(&[sum, turn, read]))[1], "t_.default");
        for name in ["unfold.default", "mT.default", "view_as.default"] {
            let same = (name, &[1u32][..], 4);
            assert_eq!(ops(graph(&[sum, same, write, late]))[2], "mul_.Tensor", "{name}");
        }
        // Names that only look so.
        assert_eq!(ops(graph(&[("__and__.Tensor", &[0, 0], 1)]))[0], "__and__.Tensor");
    }

    #[test]
    fn outputs_and_inputs_are_not_written_over() {
        let mut g = graph(&[("add.Tensor", &[0, 0], 1), ("mul_.Tensor", &[1, 0], 2)]);
        g.outputs = vec![Id(1)];
        assert_eq!(ops(g)[1], "mul_.Tensor");
        let mut g = graph(&[("add.Tensor", &[0, 0], 1), ("mul_.Tensor", &[1, 0], 2)]);
        g.halved.insert(Id(2));
        assert_eq!(ops(g)[1], "mul_.Tensor");
    }
}
