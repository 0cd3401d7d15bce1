//! Ragged exchange: of the buffers of experts only the rows travel that hold a copy of a token.
//!
//! Before:  `%moved = all_to_all[tp; from=1; to=0] %rows : f32[2@tp,2,48,32]`,
//!          `%counts_moved = all_to_all[tp; from=2; to=0] %counts : i32[2@tp,4,2]`
//! After:   `%counts_moved = all_to_all[tp; from=2; to=0] %counts : i32[2@tp,4,2]`,
//!          `%moved = all_to_all_v[tp; from=1; to=0; copies=48] %rows, %counts, %counts_moved`
//! Assumes: phase Differentiated; counts come from `route`.  Leaves: phase Differentiated.
//!
//! Who has tokens knows the counts of its shards for all groups, from `route`; who has experts
//! needs those of its groups for all shards. Products need them too: where they are exchanged for
//! them, that is now done before the rows move; where they are gathered, they are exchanged here.
//! So both sides know what comes, in forward and in backward, and nobody asks. What moves into the
//! buffers of experts was made by a `dispatch`, and what moves out of them goes to an `unpermute`:
//! neither defines or reads other rows.

use shardc_ir::func::{Func, Name, Node, Patch, Value};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{AllToAll, AllToAllV, FanOut, Kind, Mixing, Op};
use smallvec::smallvec;
use std::collections::{BTreeMap, BTreeSet};

/// An exchange of rows: its node, the `route` that placed them, and the copies of a shard.
struct RowExchange {
    node: usize,
    route: usize,
    op: AllToAll,
    copies: usize,
}

/// Replaces the exchanges of rows of a program.
pub fn ragged(mesh: &Mesh, f: &mut Func) {
    if !f.nodes.iter().any(|n| matches!(n.op, Op::AllToAll(_))) {
        return;
    }
    let mut counts = ExpertCounts { mesh, moved: vec![], taken: BTreeSet::new() };
    for x in found(f) {
        let (inp, out) = (f.nodes[x.node].ins[0], f.nodes[x.node].outs[0]);
        let into = x.op.from == 1;
        let (tokens, experts) = if into { (inp, out) } else { (out, inp) };
        let own = f.nodes[x.route].outs[1];
        let Some(there) = counts.at_experts(f, &x, tokens, experts) else { continue };
        let (sent, received) = if into { (own, there) } else { (there, own) };
        let AllToAll { axes, from, to } = x.op;
        // As free as the rows are, and as their elements, if ranks split these.
        let rows = f.ty(inp);
        let split = rows.dims[2..].iter().flat_map(|d| d.atoms.iter()).collect();
        let free = rows.replicated.union(rows.partial()).union(split).minus(axes);
        let [sent, received] = [sent, received].map(|v| counts.fanned_out(f, x.route, v, free));
        let n = &mut f.nodes[x.node];
        n.op = AllToAllV { axes, from, to, copies: x.copies }.into();
        n.ins = smallvec![inp, sent, received];
    }
    let mut patch = Patch::of(f);
    counts.taken.into_iter().for_each(|i| patch.erase(i));
    counts.moved.into_iter().for_each(|m| patch.insert_after(m.route, m.node));
    patch.apply(f);
}

/// An exchange of the counts of a `route`, or a fan_out of them, which is to stand behind it.
struct CountsExchange {
    route: usize,
    node: Node,
}

/// The counts at their experts.
struct ExpertCounts<'a> {
    mesh: &'a Mesh,
    moved: Vec<CountsExchange>,
    /// Nodes of `moved` that stand elsewhere now.
    taken: BTreeSet<usize>,
}

impl ExpertCounts<'_> {
    /// The counts of rows as they are split at their experts; `None` if no one exchange makes them.
    fn at_experts(
        &mut self,
        f: &mut Func,
        x: &RowExchange,
        tokens: Value,
        experts: Value,
    ) -> Option<Value> {
        let own = f.nodes[x.route].outs[1];
        let mut want = f.ty(own).clone();
        if want.dims[0] != f.ty(tokens).dims[0] || want.dims[2] != f.ty(tokens).dims[1] {
            return None;
        }
        want.dims[0] = f.ty(experts).dims[0];
        want.dims[2] = f.ty(experts).dims[1];
        let known = |m: &&CountsExchange| m.route == x.route && *f.ty(m.node.outs[0]) == want;
        if let Some(m) = self.moved.iter().find(known) {
            return Some(m.node.outs[0]);
        }
        let op = Op::from(AllToAll { axes: x.op.axes, from: 2, to: 0 });
        let made = op.check(self.mesh, &[f.ty(own)], &[Some(&want)]).ok()?;
        if made[0] != want {
            return None;
        }
        let same = |n: &Node| n.op == op && n.ins[..] == [own] && *f.ty(n.outs[0]) == want;
        let node = if let Some(i) = f.nodes.iter().position(same) {
            self.taken.insert(i);
            Node { part: f.nodes[x.route].part, ..f.nodes[i].clone() }
        } else {
            let name = Name { hint: "counts_moved".into(), ..f.name(own).clone() };
            let (ins, outs) = ([own], [f.value(want, name)]);
            let note = Some("experts learn how many rows come".into());
            let route = &f.nodes[x.route];
            Node { note, part: route.part, ..Node::new(op, &ins, &outs, route.scope) }
        };
        let v = node.outs[0];
        self.moved.push(CountsExchange { route: x.route, node });
        Some(v)
    }

    /// Counts of a `route` for what ranks use differently over these axes.
    fn fanned_out(&mut self, f: &mut Func, route: usize, v: Value, axes: AtomSet) -> Value {
        let axes = axes.minus(f.ty(v).replicated);
        if axes.is_empty() {
            return v;
        }
        let mut ty = f.ty(v).clone();
        ty.replicated = ty.replicated.union(axes);
        let known = |m: &&CountsExchange| m.node.ins[..] == [v] && *f.ty(m.node.outs[0]) == ty;
        if let Some(m) = self.moved.iter().find(known) {
            return m.node.outs[0];
        }
        let name = f.name(v).clone();
        let name = Name { hint: name.hint + "_f", ..name };
        let (part, scope) = (f.nodes[route].part, f.nodes[route].scope);
        let new = f.value(ty, name);
        let note = Some("f: ranks use it differently from here".into());
        let node = Node { note, part, ..Node::new(FanOut { axes }, &[v], &[new], scope) };
        self.moved.push(CountsExchange { route, node });
        new
    }
}

/// Exchanges of what a `dispatch` makes, and of what nobody but an `unpermute` or `combine_gates_grad` reads.
fn found(f: &Func) -> Vec<RowExchange> {
    let makers = f.makers();
    let maker = |v: Value| makers[v].map(|i| &f.nodes[i as usize]);
    // Behind what only says that ranks use it differently.
    let behind = |mut v: Value| loop {
        match maker(v) {
            Some(n) if matches!(n.op, Op::FanOut(_)) => v = n.ins[0],
            _made => return v,
        }
    };
    let read = slots(f, &behind);
    let placed = |mut v: Value| loop {
        let n = maker(v)?;
        if n.op.facts().kind != Kind::Conversion {
            return (n.op.mixing() == Some(Mixing::Dispatch)).then(|| behind(n.ins[1]));
        }
        v = n.ins[0];
    };
    let one = |(node, n): (usize, &Node)| {
        let Op::AllToAll(op) = &n.op else { return None };
        if n.kept {
            return None;
        }
        let slot = match [op.from, op.to] {
            [1, 0] => placed(n.ins[0])?,
            [0, 1] => (*read.get(&n.outs[0])?)?,
            _other_dims => return None,
        };
        let route = makers[slot]? as usize;
        let copies = f.ty(slot).dims[1].size * f.ty(slot).dims[2].size;
        let op = op.clone();
        f.nodes[route].op.as_route().map(|_| RowExchange { node, route, op, copies })
    };
    f.nodes.iter().enumerate().filter_map(one).collect()
}

/// The slots by which rows of a value are read; `None` if something else reads them too.
fn slots(f: &Func, behind: &impl Fn(Value) -> Value) -> BTreeMap<Value, Option<Value>> {
    let mut slots: BTreeMap<Value, Option<Value>> =
        f.results.iter().map(|r| (r.value, None)).collect();
    for n in f.nodes.iter().rev() {
        for (i, &v) in n.ins.iter().enumerate() {
            let combines = n.op.mixing() == Some(Mixing::Unpermute);
            let reads = i == 0 && (combines || matches!(n.op, Op::CombineGatesGrad(_)));
            let slot = match n.op.facts().kind == Kind::Conversion {
                true => slots.get(&n.outs[0]).copied().flatten(),
                false => reads.then(|| behind(n.ins[1])),
            };
            slots.entry(v).and_modify(|s| *s = s.filter(|_| *s == slot)).or_insert(slot);
        }
    }
    slots
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::interp::{Precision, call, scatter};
    use shardc_ir::phase::Phase;
    use shardc_ir::tensor::Tensor;
    use shardc_ir::verify::verify;

    /// To the experts and back; whether products have the counts exchanged after the rows.
    fn program(exchanged: bool) -> String {
        let counts = "  %n = all_to_all[tp; from=2; to=0] %counts : i32[2@tp,2,2]\n";
        format!(
            "mesh [tp=2]

func @f(%i: i32[2@tp,3,2], %x: f32[2@tp,3,4], %gates: f32[2@tp,3,2]) -> f32[2@tp,3,4] {{
  %slot, %counts = route[g=2,e=2; rows=6; capacity=none] %i : i32[2@tp,3,2], i32[2,2,2@tp]
  %rows = dispatch[g=2,c=6] %x, %slot, %gates : f32[2,2@tp,6,4]
  %moved = all_to_all[tp; from=1; to=0] %rows : f32[2@tp,2,6,4]
{}  %twice = scale[2.0] %moved : f32[2@tp,2,6,4]
  %back = all_to_all[tp; from=0; to=1] %twice : f32[2,2@tp,6,4]
  %y = unpermute %back, %slot, %gates : f32[2@tp,3,4]
  return %y
}}
",
            if exchanged { counts } else { "" }
        )
    }

    #[test]
    fn counts_are_exchanged_once_and_first() {
        for exchanged in [true, false] {
            let m = shardc_ir::text::parse(&program(exchanged)).unwrap_or_else(|e| panic!("{e}"));
            let mut new = m.clone();
            ragged(&m.mesh, &mut new.funcs[0]);
            assert_eq!(new.funcs[0].forward_nodes(), new.funcs[0].nodes.len());
            let ops: Vec<&str> = new.funcs[0].nodes.iter().map(|n| n.op.mnemonic()).collect();
            let [to, back] = ["all_to_all_v"; 2];
            assert_eq!(ops, ["route", "all_to_all", "dispatch", to, "scale", back, "unpermute"]);
            assert!(verify(&new, Phase::Ranked).is_ok());
            let index = Tensor::from_fn(&[2, 3, 2], |i| ((i[0] + 2 * i[1] + i[2]) % 4) as f64);
            let x = Tensor::from_fn(&[2, 3, 4], |i| (12 * i[0] + 4 * i[1] + i[2]) as f64);
            let gates = Tensor::from_fn(&[2, 3, 2], |i| 0.5 + (i[1] * 2 + i[2]) as f64);
            let f = &m.funcs[0];
            let args = f.args.iter().zip([&index, &x, &gates]);
            let args: Vec<_> = args.map(|(a, t)| scatter(&m.mesh, f.ty(a.value), t)).collect();
            let run = |f: &Func| call(&m.mesh, f, &args, Precision::F64).expect("runs");
            assert_eq!(run(f), run(&new.funcs[0]));
        }
    }

    /// Ranks that split the width of experts have the same slots, which they use differently.
    #[test]
    fn slots_that_were_fanned_out_are_known() {
        let text = program(true).replace("mesh [tp=2]", "mesh [tp=2, etp=2]");
        let text = text.replace(
            "  %rows = dispatch[g=2,c=6] %x, %slot, %gates : f32[2,2@tp,6,4]\n",
            "  %f = fan_out[etp] %slot : i32[2@tp,3,2]~etp\n  %xf = fan_out[etp] %x : f32[2@tp,3,4]~etp\n  \
             %gf = fan_out[etp] %gates : f32[2@tp,3,2]~etp\n  \
             %rows = dispatch[g=2,c=6] %xf, %f, %gf : f32[2,2@tp,6,4]~etp\n",
        );
        let text = text.replace("unpermute %back, %slot, %gates", "unpermute %back, %f, %gf");
        let text = text.replace("f32[2@tp,2,6,4]", "f32[2@tp,2,6,4]~etp");
        let text =
            text.replace("%back, %f, %gf : f32[2@tp,3,4]", "%back, %f, %gf : f32[2@tp,3,4]~etp");
        let text = text.replace(": f32[2,2@tp,6,4]\n", ": f32[2,2@tp,6,4]~etp\n");
        let text = text.replace("-> f32[2@tp,3,4]", "-> f32[2@tp,3,4]~etp");
        let mut m = shardc_ir::text::parse(&text).unwrap_or_else(|e| panic!("{e}"));
        ragged(&m.mesh, &mut m.funcs[0]);
        let ragged = m.funcs[0].nodes.iter().filter(|n| matches!(n.op, Op::AllToAllV(_)));
        assert_eq!(ragged.count(), 2);
        assert!(verify(&m, Phase::Ranked).is_ok());
    }

    /// Buffers that no `dispatch` made or not only an `unpermute` reads may have any rows.
    #[test]
    fn other_exchanges_stay() {
        let dense = |text: &str| {
            let mut m = shardc_ir::text::parse(text).unwrap_or_else(|e| panic!("{e}"));
            ragged(&m.mesh, &mut m.funcs[0]);
            let rows = m.funcs[0].nodes.iter().filter(|n| m.funcs[0].ty(n.outs[0]).rank() == 4);
            let kinds = rows.filter_map(|n| n.op.collective()).map(|c| c.kind());
            kinds.collect::<Vec<_>>()
        };
        let text = program(true);
        assert_eq!(dense(&text), ["all_to_all_v", "all_to_all_v"]);
        let made = text.lines().find(|l| l.contains("dispatch")).expect("a line");
        let given = text.replace(&format!("{made}\n"), "");
        let given = given.replace("%x: f32[2@tp,3,4]", "%rows: f32[2,2@tp,6,4]");
        assert_eq!(dense(&given), ["all_to_all", "all_to_all_v"]);
        let shown = text.replace("-> f32[2@tp,3,4]", "-> (f32[2@tp,3,4], f32[2,2@tp,6,4])");
        let shown = shown.replace("return %y", "return %y, %back");
        assert_eq!(dense(&shown), ["all_to_all_v", "all_to_all"]);
    }
}
