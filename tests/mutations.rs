//! Removing, doubling or re-axing any single collective, fan_out, slice or place of a program is
//! caught by the types: all of them, in whole models, one mutant at a time.

mod fixture;
use fixture::*;
use shardc_frontends::Model;
use shardc_ir::func::{Func, Module, Name, Node, Value};
use shardc_ir::interp::{Precision, State, call};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::{Op, Permute};
use shardc_ir::plan::Mode;
use shardc_ir::tensor::Tensor;
use shardc_ir::types::Type;
use shardc_ir::verify::{Phase, verify};
use shardc_passes::options::{CpMode, Options, ShardRule};
use shardc_passes::pipeline::Compiled;
use std::collections::BTreeMap;

/// Mutants by what was done to which op: refused, and the text of those that were not.
#[derive(Default)]
struct Tally {
    caught: BTreeMap<(&'static str, &'static str), usize>,
    /// Word codes of the first messages.
    codes: BTreeMap<&'static str, usize>,
    survivors: Vec<(&'static str, String, Module)>,
}

impl Tally {
    fn judge(&mut self, m: &Module, what: &'static str, op: &Op, place: &str) {
        match verify(m, Phase::Ranked) {
            Err(all) => {
                *self.caught.entry((what, op.mnemonic())).or_default() += 1;
                *self.codes.entry(all[0].code).or_default() += 1;
            }
            Ok(()) => self.survivors.push((what, place.into(), m.clone())),
        }
    }
}

/// The axes of an op that is tested; `None` for all other ops.
fn axes(op: &mut Op) -> Option<&mut AtomSet> {
    match op {
        Op::FanOut(o) => Some(&mut o.axes),
        Op::Slice(o) => Some(&mut o.axes),
        Op::Place(o) => Some(&mut o.axes),
        Op::AllReduce(o) => Some(&mut o.axes),
        Op::AllGather(o) => Some(&mut o.axes),
        Op::ReduceScatter(o) => Some(&mut o.axes),
        Op::AllToAll(o) => Some(&mut o.axes),
        Op::AllToAllV(o) => Some(&mut o.axes),
        Op::Permute(o) => Some(&mut o.axes),
        Op::Term(o) => Some(&mut o.axes),
        Op::Own(o) => Some(&mut o.axes),
        Op::Join(o) => Some(&mut o.axes),
        Op::Piece(o) => Some(&mut o.axes),
        other => {
            assert!(other.collective().is_none(), "`{}` is not tested", other.mnemonic());
            None
        }
    }
}

/// All sets of one or two atoms.
fn atom_sets(mesh: &Mesh) -> Vec<AtomSet> {
    let atoms: Vec<Atom> = mesh.all().iter().collect();
    let two = |&a: &Atom| atoms.iter().map(move |&b| AtomSet::one(a).with(b)).collect::<Vec<_>>();
    let mut all: Vec<AtomSet> = atoms.iter().flat_map(two).collect();
    all.sort();
    all.dedup();
    all
}

/// Uses and results of `from` become `to`, but for node `but`.
fn redirect(f: &mut Func, from: Value, to: Value, but: Option<usize>) {
    let nodes = f.nodes.iter_mut().enumerate().filter(|(i, _)| Some(*i) != but);
    let uses = nodes.flat_map(|(_, n)| n.ins.iter_mut());
    uses.chain(f.results.iter_mut().map(|r| &mut r.value))
        .filter(|v| **v == from)
        .for_each(|v| *v = to);
}

/// The types that the op of a node gives, if it can be typed.
fn inferred(mesh: &Mesh, f: &Func, op: &Op, ins: &[Value], hint: &[Value]) -> Option<Vec<Type>> {
    let ins: Vec<&Type> = ins.iter().map(|&v| f.ty(v)).collect();
    let hint: Vec<Option<&Type>> = hint.iter().map(|&v| Some(f.ty(v))).collect();
    op.check(mesh, &ins, &hint).ok().map(|t| t.to_vec())
}

fn remove(f: &mut Func, i: usize) {
    let n = f.nodes.remove(i);
    n.outs.iter().zip(&n.ins).for_each(|(&o, &x)| redirect(f, o, x, None));
}

/// The op once more on its own results, whose users use the second.
fn double(f: &mut Func, i: usize, types: &[Type]) {
    let n = f.nodes[i].clone();
    let again = |ty: &Type| {
        f.value(ty.clone(), Name { grad: false, layer: None, hint: "again".into(), dup: 0 })
    };
    let outs: Vec<Value> = types.iter().map(again).collect();
    let ins = n.outs.iter().copied().collect();
    let second = Node { ins, outs: outs.iter().copied().collect(), ..n.clone() };
    f.nodes.insert(i + 1, second);
    n.outs.iter().zip(outs).for_each(|(&o, new)| redirect(f, o, new, Some(i + 1)));
}

/// All mutants of one node.
fn mutate(m: &Module, func: usize, i: usize, t: &mut Tally) {
    let (mesh, f) = (&m.mesh, &m.funcs[func]);
    let n = f.nodes[i].clone();
    let mut op = n.op.clone();
    let Some(own) = axes(&mut op).map(|a| *a) else { return };
    let place = format!("@{} {}", f.name, shardc_ir::text::node_text(mesh, f, &n).text);
    let mutant = |change: &dyn Fn(&mut Func)| {
        let mut m = m.clone();
        change(&mut m.funcs[func]);
        m
    };
    t.judge(&mutant(&|f| remove(f, i)), "remove", &n.op, &place);
    let declared: Vec<Type> = n.outs.iter().map(|&v| f.ty(v).clone()).collect();
    let again = inferred(mesh, f, &n.op, &n.outs, &n.outs);
    for types in [Some(declared.clone()), again.filter(|t| *t != declared)].into_iter().flatten() {
        t.judge(&mutant(&|f| double(f, i, &types)), "double", &n.op, &place);
    }
    for set in atom_sets(mesh).into_iter().filter(|&s| s != own) {
        *axes(&mut op).expect("has axes") = set;
        let place = format!("[{}] {place}", mesh.names(set, "*"));
        t.judge(&mutant(&|f| f.nodes[i].op = op.clone()), "re-axe", &n.op, &place);
        // As if the compiler had meant these axes: the result is declared what the op gives. Its
        // state over the axes may be I or R, as it is or as the op would have it.
        let mut types = vec![inferred(mesh, f, &op, &n.ins, &n.outs)];
        types.push(infer_plain(mesh, f, &op, &n.ins));
        types.dedup();
        for made in types.into_iter().flatten().filter(|t| *t != declared) {
            let retyped = mutant(&|f| {
                f.nodes[i].op = op.clone();
                n.outs.iter().zip(&made).for_each(|(v, t)| f.values[v.0 as usize].ty = t.clone());
            });
            t.judge(&retyped, "re-axe and retype", &n.op, &place);
        }
    }
    if n.ins.len() > 1 {
        for k in 0..n.ins.len() {
            let dropped = mutant(&|f| {
                let (x, o) = (f.nodes[i].ins.remove(k), f.nodes[i].outs.remove(k));
                redirect(f, o, x, None);
            });
            t.judge(&dropped, "drop an operand", &n.op, &place);
        }
    }
}

/// Types without a hint.
fn infer_plain(mesh: &Mesh, f: &Func, op: &Op, ins: &[Value]) -> Option<Vec<Type>> {
    inferred(mesh, f, op, ins, &[])
}

/// All mutants of a module.
fn tally(m: &Module) -> Tally {
    verify(m, Phase::Ranked).unwrap_or_else(|all| panic!("{}", all[0]));
    let mut t = Tally::default();
    for func in 0..m.funcs.len() {
        (0..m.funcs[func].nodes.len()).for_each(|i| mutate(m, func, i, &mut t));
    }
    for ((what, op), n) in &t.caught {
        println!("  {what:18} {op:15} {n:5} refused");
    }
    println!("  by {:?}; {} are other programs of the same numbers", t.codes, t.survivors.len());
    t
}

impl Tally {
    /// Every one of these ops was removed, doubled and given other axes.
    fn has(&self, ops: &[&str]) {
        for op in ops {
            let some = |what| self.caught.get(&(what, *op)).is_some_and(|&n| n > 0);
            assert!(some("remove") && some("double") && some("re-axe"), "no `{op}` was mutated");
        }
    }
}

/// Everything that a step leaves behind, on every rank.
fn numbers(fx: &Fixture, model: &Model, compiled: &Compiled) -> State {
    let mut state = start(fx, model, compiled);
    interpret(compiled, &mut state, 1).unwrap_or_else(|e| panic!("{e}"));
    state
}

/// A mutant that the types allow must be another spelling of the same program: its result is
/// declared anew too, so it is no mistake in one line. One is known. To fan out over more axes and
/// then slice (R to S) is to slice what is invariant (I to S): all numbers are equal. Only that a
/// block went another number of places around a ring is no matter of types: the numbers show it.
fn check(name: &str, o: &Options, expect: &[&str]) {
    println!("{name} {:?} sp={}", o.mesh, o.sp);
    let fx = Fixture::open(name);
    let model = fx.model(o);
    let mut compiled = compile(&model, o);
    let t = tally(&compiled.plan.module);
    t.has(expect);
    if t.survivors.is_empty() {
        return;
    }
    let want = numbers(&fx, &model, &compiled);
    for (what, place, mutant) in t.survivors {
        let sliced = what == "re-axe and retype" && place.contains("= fan_out[");
        let turned = ["remove", "double"].contains(&what) && place.contains("= permute[");
        assert!(sliced || turned, "{name}: survives: {what} {place}");
        compiled.plan.module = mutant;
        let got = numbers(&fx, &model, &compiled);
        if turned {
            assert!(got.values != want.values, "{name}: the same numbers: {what} {place}");
            continue;
        }
        assert!(got.values == want.values, "{name}: other numbers: {what} {place}");
        let shown = |s: &State| -> Vec<Vec<_>> {
            s.outputs.values().map(|all| all.iter().map(|x| x.ranks.clone()).collect()).collect()
        };
        assert!(shown(&got) == shown(&want), "{name}: other outputs: {what} {place}");
    }
}

const DP2_TP2: &[(&str, usize)] = &[("dp_replicate", 2), ("tp", 2)];

#[test]
fn fewer_kv_heads_than_ranks() {
    check("llama_gqa", &options(&[("tp", 4)], false, 2), &["fan_out", "all_reduce"]);
}

#[test]
fn tied_on_two_axes() {
    check("gpt2", &options(DP2_TP2, false, 2), &["fan_out", "all_reduce"]);
}

#[test]
fn sequence_parallel() {
    let ops = ["fan_out", "all_reduce", "all_gather", "reduce_scatter"];
    check("qwen3", &options(DP2_TP2, true, 2), &ops);
    check("qwen3", &Options { observe: false, ..options(DP2_TP2, true, 2) }, &ops);
}

/// What is summed over the stages, and everything else of a stage, with an axis more to mistake.
#[test]
fn stages() {
    let mesh = [("pp", 2), ("tp", 2)];
    check("gpt2", &options(&mesh, false, 2), &["fan_out", "all_reduce", "term"]);
    let ops = ["fan_out", "all_reduce", "term", "all_gather", "reduce_scatter"];
    check("qwen3", &options(&mesh, true, 2), &ops);
}

/// Blocks that go around, beside another axis to mistake cp for.
#[test]
fn rings_of_attention() {
    let o = options(&[("cp", 2), ("tp", 2)], false, 4);
    let o = Options { cp_mode: CpMode::Ring, ..o };
    check("llama_gqa", &o, &["fan_out", "all_reduce", "slice", "own", "join", "piece"]);
}

#[test]
fn forward_only() {
    check(
        "gpt2",
        &Options { mode: Mode::Infer, ..options(DP2_TP2, false, 2) },
        &["fan_out", "all_reduce"],
    );
}

/// A layout of the user's brings the ops that recipes do not use.
#[test]
fn layouts_of_a_user() {
    let rule = |glob: &str, dims: &[&str], priority| ShardRule {
        glob: glob.into(),
        dims: dims.iter().map(|d| d.to_string()).collect(),
        priority,
    };
    let shard = vec![
        rule("model.layers.0.mlp", &["?", "tp", "-"], 1),
        rule("model.layers.1.mlp", &["?", "-", "tp"], 1),
        rule("*.1.mlp.gate_proj.weight", &["-", "tp"], 0),
    ];
    let o = Options { shard, ..options(DP2_TP2, false, 2) };
    let ops = ["fan_out", "all_reduce", "all_gather", "reduce_scatter", "slice", "all_to_all"];
    check("llama_mha", &o, &ops);
}

/// No recipe makes a `place`: it is the gradient of a slice of what is replicated.
#[test]
fn pieces_among_zeros() {
    let text = "mesh [dp=2,tp=2]

func @f(%x: f32[4,8]~tp, %w: f32[8]) -> (f32[4,8] stash \"y\") {
  %x.p = slice[tp; dim=1] %x : f32[4,8@tp]
  %w.p = slice[tp; dim=0] %w : f32[8@tp]
  %y.p = mul[bh,h->bh] %x.p, %w.p : f32[4,8@tp]
  %y.s = place[tp; dim=1] %y.p : f32[4,8]+tp
  %y = all_reduce[tp] %y.s : f32[4,8]
  return %y
}

func @g(%y: f32[4,8] stash \"y\") -> f32[4,8] {
  return %y
}
";
    let m = shardc_ir::text::parse(text).unwrap_or_else(|e| panic!("{e}"));
    let t = tally(&m);
    t.has(&["slice", "place", "all_reduce"]);
    let left: Vec<_> = t.survivors.iter().map(|s| format!("{} {}", s.0, s.1)).collect();
    assert!(left.is_empty(), "{}", left.join("\n"));
}

/// To move data around a ring changes no type: that a `permute` is missing, doubled or has another
/// shift shows in the numbers, and that it has other axes in the types.
#[test]
fn rings() {
    let text = "mesh [dp=2,tp=3]

func @f(%x: f32[1]!tp) -> f32[1]!tp {
  %y = permute[tp; shift=1] %x : f32[1]!tp
  return %y
}
";
    let m = shardc_ir::text::parse(text).unwrap_or_else(|e| panic!("{e}"));
    let (mesh, f) = (&m.mesh, &m.funcs[0]);
    let ring: Vec<Tensor> = (0..6).map(|r| Tensor::full(&[1], f64::from(r))).collect();
    let run = |f: &Func| {
        let out = call(mesh, f, std::slice::from_ref(&ring), Precision::F64);
        out.unwrap_or_else(|e| panic!("{e}")).swap_remove(0)
    };
    let want = run(f);
    let mutant = |change: &dyn Fn(&mut Func)| {
        let mut f = f.clone();
        change(&mut f);
        f
    };
    let declared = f.ty(f.nodes[0].outs[0]).clone();
    assert_ne!(run(&mutant(&|f| remove(f, 0))), want);
    assert_ne!(run(&mutant(&|f| double(f, 0, std::slice::from_ref(&declared)))), want);
    let Op::Permute(Permute { axes, .. }) = f.nodes[0].op else { panic!("a permute") };
    for shift in [0, 2] {
        assert_ne!(run(&mutant(&|f| f.nodes[0].op = Permute { axes, shift }.into())), want);
    }
    for other in atom_sets(mesh).into_iter().filter(|&s| s != axes) {
        let op = Permute { axes: other, shift: 1 };
        let mut m = m.clone();
        m.funcs[0].nodes[0].op = op.into();
        assert!(verify(&m, Phase::Ranked).is_err(), "{other:?}");
    }
}
