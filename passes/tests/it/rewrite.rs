//! Every rewriting rule on random tensors, and the pass as a whole: names, order, ties.

use shardc_ir::attr::RuleAttr;
use shardc_ir::builder::Builder;
use shardc_ir::func::{AnnotatedDim, Annotation, Func, Module, Name, Port, Value};
use shardc_ir::interp::{Precision, call, gather, scatter};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{
    Add, AllGather, AllReduce, AllToAll, Attention, Dot, Exp, FanOut, Gelu, Mask, Mul, Op,
    PadToPartial, Permute, ReduceScatter, Scale, Slice, Transpose,
};
use shardc_ir::rng::Stream;
use shardc_ir::tensor::Tensor;
use shardc_ir::text::parse_type;
use shardc_ir::types::{AtomList, DType, Type};
use shardc_passes::rewrite::{Example, Expr, Id, Line, RuleSet, rewrite};

fn mesh() -> Mesh {
    Mesh::new(&[("x", 2), ("y", 3)]).expect("a mesh")
}

fn read_type(mesh: &Mesh, text: &str) -> Type {
    parse_type(mesh, text).unwrap_or_else(|e| panic!("`{text}`: {e}"))
}

/// A program of one example, under construction.
struct Program<'a> {
    mesh: &'a Mesh,
    f: Func,
    args: Vec<Value>,
    fill: Option<Type>,
    out: Option<Type>,
}

impl<'a> Program<'a> {
    fn new(mesh: &'a Mesh, of: &Example) -> Program<'a> {
        let mut p = Program { mesh, f: Func::new("f"), args: vec![], fill: None, out: None };
        for [name, ty] in &of.values {
            let ty = read_type(mesh, ty);
            match *name {
                "fill" => p.fill = Some(ty),
                "out" => p.out = Some(ty),
                name => p.args.push(p.f.arg(ty, Name::parse(name), None)),
            }
        }
        p
    }

    /// Appends a side of a rule, whose result is to have the declared type.
    fn push(&mut self, e: &Expr, declared: Option<&Type>) -> Result<Value, String> {
        let (op, ins) = match e {
            Expr::Value(Id(n)) => return Ok(self.args[*n as usize]),
            Expr::Op(op, ins) => (op, ins),
        };
        let ins: Vec<Value> = ins.iter().map(|e| self.push(e, None)).collect::<Result<_, _>>()?;
        let declared =
            if matches!(op, Op::Fill(_)) { self.fill.clone() } else { declared.cloned() };
        let types: Vec<&Type> = ins.iter().map(|&v| self.f.ty(v)).collect();
        op.check(self.mesh, &types, &[declared.as_ref()]).map_err(|e| e.message)?;
        let mut b = Builder::new(self.mesh, &mut self.f);
        let made = b.try_push(op.clone(), &ins, &[declared.as_ref()], &[]);
        made.map(|v| v[0]).map_err(|e| e.message)
    }

    fn left(&mut self, e: &Example, name: &str) -> Value {
        let out = self.out.clone();
        let v = self.push(&e.left, out.as_ref());
        v.unwrap_or_else(|why| panic!("{name}: the left side does not type: {why}"))
    }
}

fn args(mesh: &Mesh, f: &Func) -> Vec<Vec<Tensor>> {
    let one = |(i, p): (usize, &Port)| {
        let ty = f.ty(p.value);
        let stream = Stream::new(4, "rewrite", i as u32);
        let mut k = 0;
        let mut draw = || {
            Tensor::from_fn(&ty.sizes(), |_| {
                k += 1;
                if ty.dtype == DType::I32 { k as f64 % 3.0 } else { 3.0 * stream.uniform(k) - 1.5 }
            })
        };
        if ty.varying.is_empty() {
            return scatter(mesh, ty, &draw());
        }
        (0..mesh.ranks()).map(|_| draw()).collect()
    };
    f.args.iter().enumerate().map(one).collect()
}

/// Results that mean the same: per rank, unless sums are still to be taken.
fn assert_same(mesh: &Mesh, ty: &Type, a: &[Tensor], b: &[Tensor], what: &str) {
    let near = |x: &Tensor, y: &Tensor| {
        let close = |(x, y): (&f64, &f64)| x == y || (x - y).abs() <= 1e-11 * (1.0 + x.abs());
        x.shape == y.shape && x.data.iter().zip(&y.data).all(close)
    };
    let pending = !ty.partial().is_empty() && ty.varying.is_empty();
    let same = if pending {
        near(&gather(mesh, ty, a).expect(what), &gather(mesh, ty, b).expect(what))
    } else {
        !ty.partial().is_empty() || a.iter().zip(b).all(|(x, y)| near(x, y))
    };
    assert!(same, "{what}: {a:?} is not {b:?}");
}

fn all_examples(mesh: &Mesh) -> Vec<(RuleSet, &'static Line, Example)> {
    let sets = [RuleSet::Algebra, RuleSet::Collectives];
    let lines = sets.into_iter().flat_map(|s| s.lines().into_iter().map(move |l| (s, l)));
    lines.flat_map(|(s, l)| (l.examples)(mesh).into_iter().map(move |e| (s, l, e))).collect()
}

#[test]
fn both_sides_of_every_rule_are_equal() {
    let mesh = mesh();
    for (_, line, e) in all_examples(&mesh) {
        let mut p = Program::new(&mesh, &e);
        let l = p.left(&e, line.name);
        let ty = p.f.ty(l).clone();
        let r = p.push(&e.right, Some(&ty));
        let r =
            r.unwrap_or_else(|why| panic!("{}: the right side does not type: {why}", line.name));
        let mut f = p.f;
        assert_eq!(f.ty(r), &ty, "{}", line.name);
        f.results = [l, r].map(|value| Port { value, role: None }).to_vec();
        let out = call(&mesh, &f, &args(&mesh, &f), Precision::F64).expect(line.name);
        assert_same(&mesh, &ty, &out[0], &out[1], line.name);
    }
}

/// The left side becomes the right one: the e-graph learns it by this line, whether or not it pays.
#[test]
fn every_rule_fires_on_its_left_side() {
    let mesh = mesh();
    for (set, line, e) in all_examples(&mesh) {
        let mut p = Program::new(&mesh, &e);
        let value = p.left(&e, line.name);
        let mut f = p.f;
        f.results = vec![Port { value, role: None }];
        let before = f.clone();
        let mut m = Module { mesh: mesh.clone(), funcs: vec![f], ..Module::default() };
        let stats = rewrite(&mut m, set).expect(line.name);
        assert!(stats.fired.contains_key(line.name), "{} did not fire: {stats:?}", line.name);
        check(&mesh, &m.funcs[0]);
        equal(&mesh, &before, &m.funcs[0]);
    }
}

#[test]
fn names_of_rules_are_unique_in_a_set() {
    for set in [RuleSet::Algebra, RuleSet::Collectives] {
        let mut names: Vec<&str> = set.lines().iter().map(|l| l.name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|w| w[0] != w[1]), "{names:?}");
    }
}

/// Values are made once and before they are read, and types follow from the ops.
fn check(mesh: &Mesh, f: &Func) {
    let mut made: Vec<Value> = f.args.iter().map(|p| p.value).collect();
    for n in &f.nodes {
        assert!(n.ins.iter().all(|v| made.contains(v)), "{} reads too early", n.op.mnemonic());
        assert!(n.outs.iter().all(|v| !made.contains(v)), "made twice");
        made.extend(&n.outs);
        let ins: Vec<&Type> = n.ins.iter().map(|&v| f.ty(v)).collect();
        let outs: Vec<&Type> = n.outs.iter().map(|&v| f.ty(v)).collect();
        let declared: Vec<Option<&Type>> = outs.iter().copied().map(Some).collect();
        let types = n.op.check(mesh, &ins, &declared).expect("typed");
        assert!(types.iter().eq(outs.iter().copied()), "{}", n.op.mnemonic());
    }
    assert!(f.results.iter().all(|p| made.contains(&p.value)));
}

/// Two functions compute the same.
fn equal(mesh: &Mesh, a: &Func, b: &Func) {
    let args = args(mesh, a);
    let (x, y) = (call(mesh, a, &args, Precision::F64), call(mesh, b, &args, Precision::F64));
    let (x, y) = (x.expect("runs"), y.expect("runs"));
    for (i, p) in a.results.iter().enumerate() {
        assert_eq!(b.results[i].value, p.value);
        assert_same(mesh, a.ty(p.value), &x[i], &y[i], "result");
    }
}

/// One line per node: names, op, operands, note.
fn text(m: &Module) -> String {
    let mut s = String::new();
    for f in &m.funcs {
        for n in &f.nodes {
            let names = |vs: &[Value]| {
                vs.iter().map(|&v| f.name(v).to_string()).collect::<Vec<_>>().join(", ")
            };
            let note = n.note.as_deref().map_or(String::new(), |n| format!("  // {n}"));
            s += &format!("{} = ", names(&n.outs));
            n.op.write(&m.mesh, &mut s);
            s += &format!(" {}{note}\n", names(&n.ins));
        }
    }
    s
}

struct Make {
    mesh: Mesh,
    f: Func,
}

impl Make {
    fn arg(&mut self, name: &str, ty: &str) -> Value {
        let ty = read_type(&self.mesh, ty);
        self.f.arg(ty, Name::parse(name), None)
    }
    fn push(&mut self, scope: &str, hint: &'static str, op: impl Into<Op>, ins: &[Value]) -> Value {
        let mut b = Builder::new(&self.mesh, &mut self.f);
        b.enter(scope);
        b.push(hint, op, ins)
    }
    fn done(mut self, results: &[Value]) -> Module {
        self.f.results = results.iter().map(|&value| Port { value, role: None }).collect();
        Module { mesh: self.mesh, funcs: vec![self.f], ..Module::default() }
    }
}

fn make() -> Make {
    Make { mesh: mesh(), f: Func::new("f") }
}

#[test]
fn two_sums_become_one_and_the_rest_stays_as_it_was() {
    let mut p = make();
    let t = p.mesh.axis("x").expect("x");
    let (a, b) = (p.arg("a", "f32[4,6]+x"), p.arg("b", "f32[4,6]+x"));
    let e = p.push("model.layers.3", "e", AllReduce { axes: t }, &[a]);
    let g = p.push("model.layers.3", "g", AllReduce { axes: t }, &[b]);
    let s = p.push("model.layers.3", "s", Add::same(), &[e, g]);
    let y = p.push("model.layers.3", "y", Gelu {}, &[s]);
    let mut m = p.done(&[y]);
    let before = m.clone();
    let stats = rewrite(&mut m, RuleSet::Collectives).expect("no error");
    assert_eq!((stats.segments, stats.distinct, stats.rewritten), (1, 1, 1));
    assert_eq!(
        text(&m),
        "%l3.add = add %a, %b  // sum-of-sums\n\
         %l3.s = all_reduce[x] %l3.add  // sum-of-sums\n\
         %l3.y = gelu %l3.s\n"
    );
    check(&m.mesh, &m.funcs[0]);
    equal(&m.mesh, &before.funcs[0], &m.funcs[0]);
}

/// Sums that are read elsewhere too are taken anyway: one more would cost more.
#[test]
fn shared_sums_stay() {
    let mut p = make();
    let t = p.mesh.axis("x").expect("x");
    let (a, b) = (p.arg("a", "f32[4,6]+x"), p.arg("b", "f32[4,6]+x"));
    let e = p.push("", "e", AllReduce { axes: t }, &[a]);
    let g = p.push("", "g", AllReduce { axes: t }, &[b]);
    let s = p.push("", "s", Add::same(), &[e, g]);
    let mut m = p.done(&[s, e, g]);
    let before = text(&m);
    let stats = rewrite(&mut m, RuleSet::Collectives).expect("no error");
    assert!(stats.fired.contains_key("sum-of-sums"));
    assert_eq!((stats.rewritten, text(&m)), (0, before));
}

#[test]
fn fan_outs_are_merged_and_never_removed() {
    let mut p = make();
    let (x, y) = (p.mesh.axis("x").expect("x"), p.mesh.axis("y").expect("y"));
    let a = p.arg("a", "f32[4,6]");
    let f = p.push("", "f", FanOut { axes: x }, &[a]);
    let g = p.push("", "g", FanOut { axes: y }, &[f]);
    let z = p.push("", "z", Gelu {}, &[g]);
    let mut m = p.done(&[z]);
    rewrite(&mut m, RuleSet::Collectives).expect("no error");
    assert_eq!(text(&m), "%g = fan_out[x*y] %a  // fan_out-of-fan_out\n%z = gelu %g\n");
}

/// What comes out of an op of several results is a value like any other; order is kept.
#[test]
fn rules_work_around_ops_of_several_results() {
    let mut p = Make { mesh: Mesh::default(), f: Func::new("f") };
    let q = p.arg("q", "f32[1,3,2,4]");
    let pos = p.arg("p", "i32[3]");
    let a = p.push("", "a", Scale { by: 2.0 }, &[q]);
    let b = p.push("", "b", Scale { by: 0.5 }, &[a]);
    let op = Attention {
        scale: 1.0,
        mask: Mask::CAUSAL,
        softcap: None,
        slopes: false,
        bias: false,
        segments: false,
        kept: None,
    };
    let o = Builder::new(&p.mesh, &mut p.f).push_n(&["o", "lse"], op, &[b, q, q, pos, pos]);
    let n = p.push("", "n", Scale { by: -1.0 }, &[o[0]]);
    let z = p.push("", "z", Scale { by: -1.0 }, &[n]);
    let w = p.push("", "w", Exp {}, &[z]);
    let mut m = p.done(&[w, o[1]]);
    let before = m.clone();
    rewrite(&mut m, RuleSet::Algebra).expect("no error");
    let attention = "%o, %lse = attention[1.0; mask=causal] %q, %q, %q, %p, %p";
    assert_eq!(text(&m), format!("{attention}\n%w = exp %o\n"));
    equal(&m.mesh, &before.funcs[0], &m.funcs[0]);
}

/// A result of the function is a value of its own: no argument takes its place.
#[test]
fn results_keep_values_of_their_own() {
    let mut p = make();
    let a = p.arg("a", "f32[3,4]");
    let n = p.push("", "n", Scale { by: -1.0 }, &[a]);
    let z = p.push("", "z", Scale { by: -1.0 }, &[n]);
    let w = p.push("", "w", Exp {}, &[z]);
    let mut m = p.done(&[z, w]);
    let before = m.clone();
    rewrite(&mut m, RuleSet::Algebra).expect("no error");
    check(&m.mesh, &m.funcs[0]);
    equal(&m.mesh, &before.funcs[0], &m.funcs[0]);
}

/// A value that somebody annotated stays, with the ops around it.
#[test]
fn annotated_values_stay() {
    let mut p = make();
    let a = p.arg("a", "f32[3,4]");
    let n = p.push("", "n", Scale { by: -1.0 }, &[a]);
    let z = p.push("", "z", Scale { by: -1.0 }, &[n]);
    let w = p.push("", "w", Exp {}, &[z]);
    let dim = AnnotatedDim { atoms: AtomList::EMPTY, open: false };
    let dims = [dim, dim].into_iter().collect();
    p.f.annotations.insert(n, Annotation { dims, priority: 0 });
    let mut m = p.done(&[w]);
    let before = text(&m);
    rewrite(&mut m, RuleSet::Algebra).expect("no error");
    assert_eq!(text(&m), before);
}

/// A transpose vanishes into the product that reads it; layers that are alike change alike, and a
/// value replaced in one layer is replaced in the next.
#[test]
fn layers_are_rewritten_alike() {
    let mut p = Make { mesh: Mesh::default(), f: Func::new("f") };
    let w = p.arg("w", "f32[6,6]");
    let mut x = p.arg("x", "f32[5,6]");
    for layer in ["m.0", "m.1", "m.2"] {
        let t = p.push(layer, "t", Transpose { rule: RuleAttr::new("ab->ba", &[2]) }, &[w]);
        let h = p.push(layer, "h", Dot::by("mk,kn->mn", &[2, 2]), &[x, t]);
        let n = p.push(layer, "n", Scale { by: -1.0 }, &[h]);
        x = p.push(layer, "y", Scale { by: -1.0 }, &[n]);
    }
    let z = p.push("", "z", Exp {}, &[x]);
    let mut m = p.done(&[z]);
    let before = m.clone();
    let stats = rewrite(&mut m, RuleSet::Algebra).expect("no error");
    assert_eq!((stats.segments, stats.distinct, stats.rewritten), (4, 1, 3));
    let line = |out: &str, x: &str| {
        format!("%{out}.h = dot[mk,nk->mn] %{x}, %w  // dot-of-transpose-right\n")
    };
    let want = [line("l0", "x"), line("l1", "l0.h"), line("l2", "l1.h"), "%z = exp %l2.h\n".into()];
    assert_eq!(text(&m), want.concat());
    equal(&m.mesh, &before.funcs[0], &m.funcs[0]);
}

/// A rank-typed layer with collectives that are all needed.
fn plain_layer(p: &mut Make, layer: usize, x: Value, w: [Value; 2]) -> Value {
    let t = p.mesh.axis("x").expect("x");
    let scope = format!("model.layers.{layer}");
    let f = p.push(&scope, "f", FanOut { axes: t }, &[x]);
    let h = p.push(&scope, "h", Dot::by("mk,kn->mn", &[2, 2]), &[f, w[0]]);
    let a = p.push(&scope, "a", Gelu {}, &[h]);
    let s = p.push(&scope, "s", Mul::same(), &[a, a]);
    let y = p.push(&scope, "y", Dot::by("mn,nk->mk", &[2, 2]), &[s, w[1]]);
    let r = p.push(&scope, "r", AllReduce { axes: t }, &[y]);
    p.push(&scope, "z", Add::same(), &[x, r])
}

#[test]
fn programs_without_matches_are_not_touched() {
    let mut p = make();
    let x = p.arg("x", "f32[4,6]");
    let w = [p.arg("w1", "f32[6,8@x]"), p.arg("w2", "f32[8@x,6]")];
    let y = (0..4).fold(x, |x, layer| plain_layer(&mut p, layer, x, w));
    let mut m = p.done(&[y]);
    let before = text(&m);
    let stats = rewrite(&mut m, RuleSet::Collectives).expect("no error");
    assert_eq!(stats.distinct, 0);
    assert_eq!(text(&m), before);
}

/// Numbers in `0..n`, one after the other.
fn picker(seed: u64) -> impl FnMut(usize) -> usize {
    let stream = Stream::new(seed, "programs", 0);
    let mut k = 0;
    move |n| {
        k += 1;
        (stream.uniform(k) * n as f64) as usize
    }
}

/// A legal program of random ops; in half of them rules have something to do.
fn random_program(seed: u64) -> Module {
    let mut p = make();
    let mut pick = picker(seed);
    let kinds = ["", "+x", "+x*y", "~x", "!y"].map(|m| format!("f32[12,12]{m}"));
    let mut values: Vec<Value> = kinds.iter().map(|t| p.arg("a", t)).collect();
    values.push(p.arg("a", "f32[12@x,12]"));
    let sets = [p.mesh.axis("x").expect("x"), p.mesh.axis("y").expect("y"), p.mesh.all()];
    for step in 0..60 {
        let axes = sets[pick(3)];
        let (dim, to) = (pick(2), pick(2));
        let rule = RuleAttr::new(["ab->ba", "ab->ab"][to], &[2]);
        let (op, n): (Op, usize) = match pick(14) {
            0 | 1 => (Add::same().into(), 2),
            2 => (Scale { by: [-1.0, 0.5, 1.0][pick(3)] }.into(), 1),
            3 | 4 => (AllReduce { axes }.into(), 1),
            5 => (AllGather { axes, dim }.into(), 1),
            6 => (ReduceScatter { axes, dim }.into(), 1),
            7 => (Slice { axes, dim }.into(), 1),
            8 => (FanOut { axes }.into(), 1),
            9 => (PadToPartial { axes, dim }.into(), 1),
            10 => (AllToAll { axes, from: dim, to }.into(), 1),
            11 => (Permute { axes, shift: to }.into(), 1),
            12 => (Mul::same().into(), 2),
            _more => (Transpose { rule }.into(), 1),
        };
        let ins: Vec<Value> = (0..n).map(|_| values[pick(values.len())]).collect();
        let mut declared = None;
        if matches!(op, Op::AllGather(_)) && pick(2) == 0 {
            let mut t = p.f.ty(ins[0]).clone();
            axes.iter().for_each(|a| t.clear(a));
            declared = Some(t);
        }
        let types: Vec<&Type> = ins.iter().map(|&v| p.f.ty(v)).collect();
        if op.check(&p.mesh, &types, &[declared.as_ref()]).is_ok() {
            let mut b = Builder::new(&p.mesh, &mut p.f);
            b.enter(["", "m.0", "m.1"][step / 20]);
            let out = b.try_push(op, &ins, &[declared.as_ref()], &[]).expect("checked");
            values.push(out[0]);
        }
    }
    let results: Vec<Value> = values.iter().skip(6).step_by(4).copied().collect();
    p.done(&results)
}

/// Programs mean the same afterwards, and two runs give the same program.
#[test]
fn random_programs_keep_their_meaning() {
    let mut rewritten = 0;
    for seed in 0..150 {
        let before = random_program(seed);
        for set in [RuleSet::Algebra, RuleSet::Collectives] {
            let (mut once, mut again) = (before.clone(), before.clone());
            rewritten += rewrite(&mut once, set).expect("no error").rewritten;
            rewrite(&mut again, set).expect("no error");
            assert_eq!(text(&once), text(&again));
            check(&once.mesh, &once.funcs[0]);
            equal(&once.mesh, &before.funcs[0], &once.funcs[0]);
        }
    }
    assert!(rewritten > 50, "{rewritten}");
}

/// 20,000 nodes of which every layer has something to rewrite are one saturation.
#[test]
fn a_long_program_is_saturated_once() {
    let mut p = make();
    let t = p.mesh.axis("x").expect("x");
    let mut x = p.arg("x", "f32[4,6]");
    let w = [p.arg("w1", "f32[6,8@x]"), p.arg("w2", "f32[8@x,6]")];
    for layer in 0..2000 {
        x = plain_layer(&mut p, layer, x, w);
        let scope = format!("model.layers.{layer}");
        let s = p.push(&scope, "s", Slice { axes: t, dim: 0 }, &[x]);
        let mut b = Builder::new(&p.mesh, &mut p.f);
        b.enter(&scope);
        let like = b.ty(x).clone();
        x = b.push_as("g", AllGather { axes: t, dim: 0 }, &[s], &like);
        x = p.push(&scope, "e", Exp {}, &[x]);
    }
    let mut m = p.done(&[x]);
    assert_eq!(m.funcs[0].nodes.len(), 20_000);
    let start = std::time::Instant::now();
    let stats = rewrite(&mut m, RuleSet::Collectives).expect("no error");
    println!("{:?} for 20,000 nodes", start.elapsed());
    // The last layer is another one: its result is the function's.
    assert_eq!((stats.distinct, stats.rewritten), (2, 2000));
    assert_eq!(m.funcs[0].nodes.len(), 16_000);
}
