//! Writes into a part of a tensor (`x[:, :3] = y`) that is read afterwards: each becomes a new tensor with other numbers in
//! that part, and what shares memory with the old one is taken from the new one. What is written into inputs, parameters
//! and buffers stays as it is, and is refused, as is a write behind a view whose part is not known here.

use super::graph::{Arg, Graph, Id, Node};
use super::inplace::{SHARED, base, pure, renames, shares};
use std::collections::{BTreeMap, BTreeSet};

/// A value and the memory that it shows.
#[derive(Clone)]
struct Shown {
    /// The value that had the memory first.
    root: Id,
    /// The view that made it, with which of its results it is; nothing of the first one.
    by: Option<(Node, usize)>,
    /// How many writes into the memory it shows, and under which name.
    age: usize,
    now: Id,
}

struct Writes<'a> {
    g: &'a mut Graph,
    all: BTreeMap<Id, Shown>,
    ages: BTreeMap<Id, usize>,
    out: Vec<Node>,
}

/// The first operand, if it is a tensor.
fn written(n: &Node) -> Option<Id> {
    match n.args.first()? {
        (_, Arg::Value(id)) => Some(*id),
        _other => None,
    }
}

/// Replaces writes into parts by new tensors; if one of them is not understood, none.
pub(super) fn replace(g: &mut Graph) {
    let inputs: BTreeSet<Id> = g.inputs.iter().map(|i| i.id).collect();
    let own = |n: &Node| pure(&n.op).is_some() && !renames(&n.op);
    if !g.nodes.iter().any(own) {
        return;
    }
    let before = (g.nodes.clone(), g.outputs.clone());
    let nodes = std::mem::take(&mut g.nodes);
    let (all, ages) = (BTreeMap::new(), BTreeMap::new());
    let mut w = Writes { g, all, ages, out: vec![] };
    let mut done = true;
    for n in nodes {
        let target = written(&n).filter(|_| own(&n));
        let target = target.filter(|v| !inputs.contains(&w.root(*v)));
        let target = target.filter(|_| !n.outs.iter().any(|o| w.g.halved.contains(o)));
        done &= match target {
            Some(v) => w.write(n, v),
            None => w.keep(n),
        }
        .is_some();
    }
    let outputs: Option<Vec<Id>> = w.g.outputs.clone().into_iter().map(|o| w.now(o)).collect();
    let nodes = w.out;
    match outputs.filter(|_| done) {
        Some(outputs) => (g.nodes, g.outputs) = (nodes, outputs),
        None => (g.nodes, g.outputs) = before,
    }
}

impl Writes<'_> {
    fn shown(&self, id: Id) -> Shown {
        let first = Shown { root: id, by: None, age: 0, now: id };
        self.all.get(&id).cloned().unwrap_or(first)
    }

    fn root(&self, id: Id) -> Id {
        self.shown(id).root
    }

    fn age(&self, root: Id) -> usize {
        self.ages.get(&root).copied().unwrap_or(0)
    }

    /// Another value of the same kind and name: messages name what the model has.
    fn named(&mut self, id: Id) -> Id {
        let new = self.g.names.push(self.g.names[id].clone());
        if self.g.truths.contains(&id) {
            self.g.truths.insert(new);
        }
        new
    }

    /// What a value shows now; nothing if it may be a copy.
    fn now(&mut self, id: Id) -> Option<Id> {
        let own = self.shown(id);
        let age = self.age(own.root);
        if own.age == age {
            return Some(own.now);
        }
        let (view, k) = own.by?;
        let of = self.now(written(&view)?)?;
        if view.op.is_empty() {
            return Some(of);
        }
        if !SHARED.contains(&base(&view.op)) {
            return None;
        }
        let outs: Vec<Id> = view.outs.iter().map(|o| self.named(*o)).collect();
        let mut again = Node { outs: outs.clone(), ..view.clone() };
        again.args[0].1 = Arg::Value(of);
        self.out.push(again);
        for (&o, &now) in view.outs.iter().zip(&outs) {
            if let Some(s) = self.all.get_mut(&o) {
                (s.age, s.now) = (age, now);
            }
        }
        outs.get(k).copied()
    }

    /// A node with operands as they are now.
    fn read(&mut self, mut n: Node) -> Option<Node> {
        for (_, a) in &mut n.args {
            match a {
                Arg::Value(id) => *id = self.now(*id)?,
                Arg::Values(all) => {
                    for id in all.iter_mut().flatten() {
                        *id = self.now(*id)?;
                    }
                }
                _number => {}
            }
        }
        Some(n)
    }

    /// A node that writes into nothing; what it makes may show memory of its operand.
    fn keep(&mut self, n: Node) -> Option<()> {
        for (k, &o) in n.outs.iter().enumerate() {
            let Some(of) = shares(&n, k) else { continue };
            let root = self.root(of);
            let age = self.age(root);
            self.all.insert(o, Shown { root, by: Some((n.clone(), k)), age, now: o });
        }
        let n = self.read(n)?;
        self.out.push(n);
        Some(())
    }

    /// A node that writes into a value: the same op as a new value, and the memory with it in the place of the old one.
    fn write(&mut self, n: Node, v: Id) -> Option<()> {
        let (result, op) = (*n.outs.first()?, pure(&n.op)?);
        let name = self.named(v);
        let made = Node { op: op.into(), outs: vec![name], ..self.read(n)? };
        self.out.push(made);
        let (mut at, mut new) = (v, name);
        let root = self.root(v);
        while let Some((view, k)) = self.shown(at).by {
            let of = written(&view)?;
            if !view.op.is_empty() {
                let whole = self.now(of)?;
                let (op, args) = within(&view, k, whole, new)?;
                new = self.named(of);
                let scope = self.out.last()?.scope.clone();
                self.out.push(Node { op: op.into(), args, outs: vec![new], scope });
            }
            at = of;
        }
        let age = self.age(root) + 1;
        self.ages.insert(root, age);
        self.all.insert(root, Shown { root, by: None, age, now: new });
        if v != root {
            let by = self.shown(v).by;
            self.all.insert(v, Shown { root, by, age, now: name });
        }
        // The result is the operand under another name.
        let same = Node {
            op: "".into(),
            args: vec![("self".into(), Arg::Value(v))],
            outs: vec![result],
            scope: "".into(),
        };
        self.all.insert(result, Shown { root, by: Some((same, 0)), age, now: name });
        Some(())
    }
}

/// The op that makes the operand of a view with other numbers where the view is.
fn within(view: &Node, k: usize, whole: Id, part: Id) -> Option<(&'static str, Args)> {
    let mut args = view.args.clone();
    args[0].1 = Arg::Value(whole);
    let name = |s: &str| -> std::sync::Arc<str> { s.into() };
    let both = |args: Args| -> Args {
        let src = (name("src"), Arg::Value(part));
        let mut all = vec![(name("self"), Arg::Value(whole)), src];
        all.extend(args.into_iter().skip(1));
        all
    };
    match (&*view.op, k) {
        ("select.int", 0) => Some(("select_scatter.default", both(args))),
        ("slice.Tensor", 0) => Some(("slice_scatter.default", both(args))),
        ("transpose.int", 0) => {
            args[0].1 = Arg::Value(part);
            Some(("transpose.int", args))
        }
        ("view.default", 0) => {
            let all = [("self", part), ("other", whole)];
            let all = all.map(|(s, id)| (name(s), Arg::Value(id)));
            Some(("view_as.default", all.to_vec()))
        }
        ("unsqueeze.default", 0) => {
            args[0].1 = Arg::Value(part);
            Some(("squeeze.dim", args))
        }
        _other => None,
    }
}

type Args = Vec<(std::sync::Arc<str>, Arg)>;

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::ids::IndexVec;

    /// Nodes by op, operands and result; the values are called by their numbers.
    fn graph(nodes: &[(&str, &[u32], u32)], outputs: &[u32]) -> Graph {
        let node = |(op, ins, out): &(&str, &[u32], u32)| Node {
            op: (*op).into(),
            args: ins.iter().map(|&i| ("self".into(), Arg::Value(Id(i)))).collect(),
            outs: vec![Id(*out)],
            scope: "".into(),
        };
        let mut names = IndexVec::default();
        for i in 0..20 {
            names.push(format!("{i}").into());
        }
        let outputs = outputs.iter().map(|&o| Id(o)).collect();
        Graph { names, nodes: nodes.iter().map(node).collect(), outputs, ..Graph::default() }
    }

    fn replaced(nodes: &[(&str, &[u32], u32)], outputs: &[u32]) -> Vec<String> {
        let mut g = graph(nodes, outputs);
        replace(&mut g);
        let new = |id: &Id| if id.0 < 20 { "" } else { "'" };
        let name = |id: &Id| format!("{}{}", g.names[*id], new(id));
        let line = |n: &Node| {
            let ins: Vec<String> = n.ids().iter().map(name).collect();
            format!("{} {} -> {}", n.op, ins.join(" "), name(&n.outs[0]))
        };
        let outputs: Vec<String> = g.outputs.iter().map(name).collect();
        g.nodes.iter().map(line).chain([outputs.join(" ")]).collect()
    }

    #[test]
    fn a_part_that_is_written_is_in_what_is_read() {
        let write = [
            ("add.Tensor", &[0, 0][..], 1),
            ("slice.Tensor", &[1][..], 2),
            ("copy_.default", &[2, 0][..], 3),
            ("neg.default", &[1][..], 4),
        ];
        let lines = replaced(&write, &[4]);
        assert_eq!(lines[2], "copy.default 2 0 -> 2'");
        assert_eq!(lines[3], "slice_scatter.default 1 2' -> 1'");
        assert_eq!(lines[4], "neg.default 1' -> 4");
        // Another view of the same memory, that was taken before.
        let mut again = vec![write[0], ("select.int", &[1][..], 5), write[1], write[2]];
        again.push(("neg.default", &[5][..], 6));
        let lines = replaced(&again, &[6, 1]);
        assert_eq!(lines[5], "select.int 1' -> 5'");
        assert_eq!(lines[6..], ["neg.default 5' -> 6", "6 1'"]);
        // A part of a part, and all of it.
        let deep = [
            write[0],
            write[1],
            ("select.int", &[2][..], 5),
            ("fill_.Scalar", &[5][..], 6),
            ("mul_.Tensor", &[1, 0][..], 7),
            ("neg.default", &[6][..], 8),
        ];
        let lines = replaced(&deep, &[8, 7]);
        assert_eq!(lines[4], "select_scatter.default 2 5' -> 2'");
        assert_eq!(lines[5], "slice_scatter.default 1 2' -> 1'");
        assert_eq!(lines[6], "mul.Tensor 1' 0 -> 1'");
        assert_eq!(lines[7], "slice.Tensor 1' -> 2'");
        assert_eq!(lines[10], "8 1'");
    }

    #[test]
    fn what_may_be_a_copy_is_left() {
        let nodes = [
            ("add.Tensor", &[0, 0][..], 1),
            ("reshape.default", &[1][..], 2),
            ("select.int", &[1][..], 3),
            ("fill_.Scalar", &[3][..], 4),
            ("neg.default", &[2][..], 5),
        ];
        assert_eq!(replaced(&nodes, &[5])[3], "fill_.Scalar 3 -> 4");
        // A place among many is none that is known here.
        let nodes = [nodes[0], ("diagonal.default", &[1][..], 2), ("fill_.Scalar", &[2][..], 3)];
        assert_eq!(replaced(&nodes, &[1])[2], "fill_.Scalar 2 -> 3");
    }
}
