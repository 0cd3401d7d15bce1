//! Steps of SUMMA (van de Geijn and Watts, 1997) in place of gathered operands, forward and backward.
//!
//! Before:  `%x_all = all_gather[tp:(2)2; dim=2] %x : f32[8@tp:(1)2,16,32]~tp:(2)2`
//!          `%w_all = all_gather[tp:(1)2; dim=0] %w : f32[32,64@tp:(2)2]~tp:(1)2`
//!          `%y = dot[bsh,ho->bso] %x_all, %w_all : f32[8@tp:(1)2,16,64@tp:(2)2]`
//! After:   `%x_step = broadcast[tp:(2)2; dim=2; from=0] %x : f32[8@tp:(1)2,16,16]~tp:(2)2`
//!          `%w_step = broadcast[tp:(1)2; dim=0; from=0] %w : f32[16,64@tp:(2)2]~tp:(1)2`
//!          `%y_step = dot[bsh,ho->bso] %x_step, %w_step`, the same from 1, and their sum `%y`
//! Assumes: phase Differentiated.  Leaves: phase Differentiated.
//!
//! A product whose two operands are gathered along what it sums takes a piece of each at a time. The
//! mirror of a gather, a reduce_scatter of products, takes a piece of the gathered operand at a time,
//! and reduces what that makes to the rank whose piece it is. Products that share an operand go through
//! its pieces together, so a piece is sent once. Bytes are those of the gathered form; what is held is
//! one piece of each operand.

mod find;

use find::{Gathered, Job, Operand, find, prefix, together};
use shardc_ir::func::{Func, Name, Node, Part, Scope, Value, ValueMap};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{Add, AllGather, Broadcast, Op, Reduce, ReduceScatter};
use shardc_ir::types::{AtomList, Type};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Nodes run in this order, as far as they are ready: a place in the program, a step, a number.
type RunOrder = (usize, usize, usize);

/// Takes all products of a program apart that have such operands. Nodes of forward stay before those of
/// backward.
pub fn summa(mesh: &Mesh, f: &mut Func) {
    let jobs = find(mesh, f);
    let mut w = SummaWriter {
        mesh,
        f,
        new: vec![],
        place: 0,
        step: 0,
        scope: Scope(0),
        part: Part::Forward,
    };
    for group in together(w.f, &jobs) {
        w.group(&group);
    }
    let new = w.new;
    let mut gone = vec![false; f.nodes.len()];
    for job in &jobs {
        job.replaces.iter().for_each(|&n| gone[n] = true);
    }
    let old = std::mem::take(&mut f.nodes).into_iter().enumerate();
    let old = old.filter(|(i, _)| !gone[*i]).map(|(i, n)| ((i, 0, 0), n));
    let mut all: Vec<(RunOrder, Node)> = old.chain(new).collect();
    // Gathers that only these products used.
    let mut used = f.per_value(false);
    f.results.iter().for_each(|r| used[r.value] = true);
    all.iter().flat_map(|(_, n)| &n.ins).for_each(|v| used[v] = true);
    let leaves = jobs.iter().flat_map(|j| &j.leaves);
    let pieces: BTreeSet<Value> =
        leaves.flat_map(|l| l.gathered.iter().flatten()).map(|g| g.piece).collect();
    all.retain(|(_, n)| {
        let gather = matches!(n.op, Op::AllGather(_)) && pieces.contains(&n.ins[0]);
        !gather || used[n.outs[0]]
    });
    let (forward, back): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|(_, n)| n.part == Part::Forward);
    f.nodes = ordered(f.values.len(), forward);
    f.nodes.extend(ordered(f.values.len(), back));
}

/// The nodes in the order of their keys, as far as what they need is there.
fn ordered(values: usize, all: Vec<(RunOrder, Node)>) -> Vec<Node> {
    let mut maker: ValueMap<usize> = ValueMap::filled(usize::MAX, values);
    for (i, (_, n)) in all.iter().enumerate() {
        n.outs.iter().for_each(|o| maker[o] = i);
    }
    let mut waits = vec![0; all.len()];
    let mut wakes: Vec<SmallVec<[usize; 2]>> = vec![SmallVec::new(); all.len()];
    for (i, (_, n)) in all.iter().enumerate() {
        for m in n.ins.iter().map(|v| maker[v]).filter(|&m| m != usize::MAX) {
            waits[i] += 1;
            wakes[m].push(i);
        }
    }
    let mut ready: BinaryHeap<Reverse<(RunOrder, usize)>> =
        (0..all.len()).filter(|&i| waits[i] == 0).map(|i| Reverse((all[i].0, i))).collect();
    let keys: Vec<RunOrder> = all.iter().map(|x| x.0).collect();
    let mut nodes: Vec<Option<Node>> = all.into_iter().map(|x| Some(x.1)).collect();
    let mut out = Vec::with_capacity(nodes.len());
    while let Some(Reverse((_, i))) = ready.pop() {
        out.extend(nodes[i].take());
        for &j in &wakes[i] {
            waits[j] -= 1;
            if waits[j] == 0 {
                ready.push(Reverse((keys[j], j)));
            }
        }
    }
    assert_eq!(out.len(), nodes.len(), "summa: the steps of a product wait for each other");
    out
}

struct SummaWriter<'a> {
    mesh: &'a Mesh,
    f: &'a mut Func,
    new: Vec<(RunOrder, Node)>,
    /// Where the next node goes, and in which scope.
    place: usize,
    step: usize,
    scope: Scope,
    part: Part,
}

impl SummaWriter<'_> {
    /// All steps of a group: step by step, so that a piece that is shared is sent once and then gone.
    fn group(&mut self, jobs: &[&Job]) {
        self.place = jobs.iter().map(|j| j.product()).max().unwrap_or_default();
        let steps = jobs[0].steps;
        self.step = 0;
        // What cuts a piece further is gathered before the steps.
        let mut near: BTreeMap<Operand, Value> = BTreeMap::new();
        for leaf in jobs.iter().flat_map(|j| &j.leaves) {
            (self.scope, self.part) = (self.f.nodes[leaf.dot].scope, self.f.nodes[leaf.dot].part);
            for g in leaf.gathered.iter().flatten() {
                near.entry(g.operand()).or_insert_with(|| self.near(g, steps));
            }
        }
        let mut sums: Vec<Option<Value>> = vec![None; jobs.len()];
        for from in 0..steps {
            self.step = from + 1;
            let mut sent: BTreeMap<Operand, Value> = BTreeMap::new();
            for (job, sum) in jobs.iter().zip(&mut sums) {
                self.part = self.f.nodes[job.node].part;
                let part = self.part(job, from, &near, &mut sent);
                let out = self.f.nodes[job.node].outs[0];
                let last = from + 1 == steps && self.rest(job).is_empty();
                *sum = Some(match *sum {
                    None => part,
                    Some(before) => {
                        let name = self.name(out, "so_far");
                        let is = last.then_some(out);
                        self.push(Add::same().into(), &[before, part], name, None, is)
                    }
                });
            }
        }
        self.step = steps + 1;
        for (job, sum) in jobs.iter().zip(sums) {
            let (axes, out) = (self.rest(job), self.f.nodes[job.node].outs[0]);
            let (Some((dim, _)), Some(sum), false) = (job.reduced, sum, axes.is_empty()) else {
                continue;
            };
            (self.scope, self.part) = (self.f.nodes[job.node].scope, self.f.nodes[job.node].part);
            let (ty, name) = (self.f.ty(out).clone(), self.f.name(out).clone());
            self.push(ReduceScatter { axes, dim }.into(), &[sum], name, Some(&ty), Some(out));
        }
    }

    /// What of a job's reduction is left for a reduce_scatter after its steps.
    fn rest(&self, job: &Job) -> AtomSet {
        let Some((_, atoms)) = job.reduced else { return AtomSet::EMPTY };
        atoms.set().minus(self.first(atoms, job.steps).set())
    }

    fn first(&self, atoms: AtomList, steps: usize) -> AtomList {
        prefix(self.mesh, atoms, steps).expect("jobs have such lists only")
    }

    /// The operand with only as many pieces as there are steps.
    fn near(&mut self, g: &Gathered, steps: usize) -> Value {
        let axes = g.atoms.set().minus(self.first(g.atoms, steps).set());
        if axes.is_empty() {
            return g.piece;
        }
        let name = self.name(g.piece, "near");
        self.push(AllGather { axes, dim: g.dim }.into(), &[g.piece], name, None, None)
    }

    /// What one step makes of a job: products of pieces, and where it belongs to one rank, their sum
    /// there.
    fn part(
        &mut self,
        job: &Job,
        from: usize,
        near: &BTreeMap<Operand, Value>,
        sent: &mut BTreeMap<Operand, Value>,
    ) -> Value {
        let mut made: SmallVec<[Value; 4]> = SmallVec::new();
        for leaf in &job.leaves {
            let dot = self.f.nodes[leaf.dot].clone();
            self.scope = dot.scope;
            let mut ins: SmallVec<[Value; 2]> = SmallVec::new();
            for (&v, g) in dot.ins.iter().zip(&leaf.gathered) {
                let known = g.and_then(|g| sent.get(&g.operand()).copied());
                ins.push(match (g, known) {
                    (None, _) => v,
                    (_, Some(known)) => known,
                    (Some(g), None) => {
                        let axes = self.first(g.atoms, job.steps).set();
                        let op = Broadcast { axes, dim: g.dim, from };
                        let name = self.name(g.piece, "step");
                        let v = self.push(op.into(), &[near[&g.operand()]], name, None, None);
                        sent.insert(g.operand(), v);
                        v
                    }
                });
            }
            let name = self.name(dot.outs[0], "step");
            made.push(self.push(dot.op, &ins, name, None, None));
        }
        self.scope = self.f.nodes[job.node].scope;
        let out = self.f.nodes[job.node].outs[0];
        let mut v = made[0];
        if made.len() > 1 {
            let name = self.name(out, "parts");
            v = self.push(Add::same().into(), &made, name, None, None);
        }
        if let Some((dim, atoms)) = job.reduced {
            let atoms = self.first(atoms, job.steps);
            let mut ty = self.f.ty(v).clone();
            ty.dims[dim].atoms = atoms;
            let op = Reduce { axes: atoms.set(), dim, to: from };
            let name = self.name(out, "step");
            v = self.push(op.into(), &[v], name, Some(&ty), None);
        }
        v
    }

    /// A name after that of a value.
    fn name(&self, v: Value, what: &str) -> Name {
        let mut name = self.f.name(v).clone();
        name.hint = format!("{}_{what}", name.hint).into();
        name.dup = 0;
        name
    }

    /// Appends a node that makes `is`, or a new value; `like` is the type that its result declares.
    fn push(
        &mut self,
        op: Op,
        ins: &[Value],
        name: Name,
        like: Option<&Type>,
        is: Option<Value>,
    ) -> Value {
        let types: Vec<&Type> = ins.iter().map(|&v| self.f.ty(v)).collect();
        let made = op.check(self.mesh, &types, &[like]);
        drop(types);
        let ty =
            made.unwrap_or_else(|e| panic!("summa: {op:?}: {}; {}", e.message, e.help))[0].clone();
        let out = match is {
            Some(v) => {
                assert_eq!(*self.f.ty(v), ty, "summa: the sum of the steps has the product's type");
                v
            }
            None => self.f.value(ty, name),
        };
        let sent = matches!(op, Op::Broadcast(_)).then_some("summa: one piece for the product");
        let summed =
            matches!(op, Op::Reduce(_)).then_some("summa: the sum is the piece of one rank");
        let note = sent.or(summed).map(Cow::Borrowed);
        let key = (self.place, self.step, self.new.len());
        let plain = Node::new(op, ins, &[out], self.scope);
        let node = Node { note, part: self.part, ..plain };
        self.new.push((key, node));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::interp::{Precision, call, scatter};
    use shardc_ir::tensor::Tensor;
    use shardc_ir::text::{parse, print};

    /// A product and both its gradients on 2 rows and 2 columns, and a norm's gather, which stays.
    const GATHERED: &str = "\
mesh [tp=4]

func @f(%x: f32[4@tp:(1)2,8@tp:(2)2], %w: f32[8@tp:(1)2,6@tp:(2)2], %d: f32[4@tp:(1)2,6@tp:(2)2], \
%g: f32[8@tp:(2)2*tp:(1)2]) -> (f32[4@tp:(1)2,6@tp:(2)2], f32[4@tp:(1)2,8@tp:(2)2], \
f32[8@tp:(1)2,6@tp:(2)2]) {
  %x_all = all_gather[tp:(2)2; dim=1] %x : f32[4@tp:(1)2,8]~tp:(2)2
  %w_all = all_gather[tp:(1)2; dim=0] %w : f32[8,6@tp:(2)2]~tp:(1)2
  %y = dot[mk,kn->mn] %x_all, %w_all : f32[4@tp:(1)2,6@tp:(2)2]
  %g_all = all_gather[tp:(1)2; dim=0] %g : f32[8@tp:(2)2]~tp:(1)2
 \"\" weight:
  %d_x_all = dot[mn,kn->mk] %d, %w_all : f32[4@tp:(1)2,8]+tp:(2)2
  %d_x = reduce_scatter[tp:(2)2; dim=1] %d_x_all : f32[4@tp:(1)2,8@tp:(2)2]
  %d_x_g = mul[mk,k->mk] %d_x, %g_all : f32[4@tp:(1)2,8@tp:(2)2]
  %d_w_all = dot[mk,mn->kn] %x_all, %d : f32[8,6@tp:(2)2]+tp:(1)2
  %d_w = reduce_scatter[tp:(1)2; dim=0] %d_w_all : f32[8@tp:(1)2,6@tp:(2)2]
  return %y, %d_x_g, %d_w
}
";

    #[test]
    fn a_product_and_its_gradients() {
        let m = parse(GATHERED).unwrap_or_else(|e| panic!("{e}"));
        let mut after = m.clone();
        summa(&m.mesh, &mut after.funcs[0]);
        let f = &after.funcs[0];
        let begin = f.forward_nodes();
        let kinds = |nodes: &[Node]| -> Vec<&'static str> {
            nodes.iter().map(|n| n.op.mnemonic()).collect()
        };
        let step = ["broadcast", "broadcast", "dot"];
        let forward = [&step[..], &step, &["add", "all_gather"]].concat();
        assert_eq!(kinds(&f.nodes[..begin]), forward, "{}", print(&after));
        let back = ["broadcast", "dot", "reduce"];
        let backward = [&back[..], &back, &["add", "mul"], &back, &back, &["add"]].concat();
        assert_eq!(kinds(&f.nodes[begin..]), backward, "{}", print(&after));
        // It is a program, and means the same.
        assert_eq!(print(&parse(&print(&after)).unwrap_or_else(|e| panic!("{e}"))), print(&after));
        let draw = |i: usize, sizes: &[usize]| {
            let mut k = i as f64;
            Tensor::from_fn(sizes, |_| {
                k = (k * 1.7 + 0.3) % 2.0;
                k - 1.0
            })
        };
        let pieces = |(i, a): (usize, &shardc_ir::func::Port)| {
            let t = m.funcs[0].ty(a.value);
            scatter(&m.mesh, t, &draw(i, &t.sizes()))
        };
        let args: Vec<_> = m.funcs[0].args.iter().enumerate().map(pieces).collect();
        let [was, is] = [&m.funcs[0], f]
            .map(|f| call(&m.mesh, f, &args, Precision::F64).unwrap_or_else(|e| panic!("{e}")));
        for (a, b) in was.iter().flatten().zip(is.iter().flatten()) {
            let apart = a.data.iter().zip(&b.data).map(|(x, y)| (x - y).abs());
            assert!(apart.fold(0.0, f64::max) < 1e-12);
        }
    }

    /// What stands between a product and its sum stands behind the steps.
    #[test]
    fn steps_stand_where_the_product_was() {
        let sum = "  %d_x = reduce_scatter";
        let between = "  %n = scale[2] %g : f32[8@tp:(2)2*tp:(1)2]\n";
        let text = GATHERED.replace(sum, &format!("{between}{sum}"));
        let m = parse(&text).unwrap_or_else(|e| panic!("{e}"));
        let mut after = m.clone();
        summa(&m.mesh, &mut after.funcs[0]);
        let begin = after.funcs[0].forward_nodes();
        let kinds: Vec<_> = after.funcs[0].nodes[begin..].iter().map(|n| n.op.mnemonic()).collect();
        let at = |kind: &str| kinds.iter().position(|k| *k == kind);
        assert!(at("reduce") < at("scale") && at("scale") < at("mul"), "{}", print(&after));
    }
}
