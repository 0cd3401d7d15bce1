//! The prover's laws of states (`prove/src/ops/states.rs`), executed: what the rewriting takes and what it makes have the same
//! numbers, in f64 and over a finite field, and where a sign, a transposition, an index or an operand of a law is another, so
//! that they have not, it does not rewrite.

use shardc_ir::func::{Module, Node, Port, Value};
use shardc_ir::interp::{Precision, call};
use shardc_ir::ops::{Dot, Narrow, Op, Pad, Scale, Scan, Sub};
use shardc_ir::rng::Stream;
use shardc_ir::tensor::Tensor;
use shardc_ir::text::{parse, print};
use shardc_passes::states::cut;
use shardc_prove::field::evaluate;
use shardc_prove::number::P;
use shardc_prove::ops::states::joined;
use shardc_prove::{Report, Verdict, experts};
use std::collections::BTreeMap;

/// Which recurrence.
#[derive(Clone, Copy, Debug)]
struct Of {
    tokens: usize,
    delta: bool,
    segments: bool,
    start: bool,
}

/// Of tokens in two rows of two heads.
fn recurrence(of: Of) -> Module {
    let s = of.tokens;
    let (rule, mut more, mut ins) = (if of.delta { "delta" } else { "plain" }, "", String::new());
    if of.delta {
        ins += ", %beta";
    }
    if of.segments {
        more = "; segments=true";
        ins += ", %segments";
    }
    let start = if of.start { "; start=true" } else { "" };
    if of.start {
        ins += ", %start";
    }
    let text = format!(
        "func @model(
  %q: f32[2,{s},2,3] input \"q\",
  %k: f32[2,{s},2,3] input \"k\",
  %g: f32[2,{s},2] input \"g\",
  %v: f32[2,{s},2,3] input \"v\",
  %beta: f32[2,{s},2] input \"beta\",
  %segments: i32[2,{s}] input \"segments\",
  %start: f32[2,2,3,3] input \"start\",
) -> (f32[2,{s},2,3] output \"o\", f32[2,2,3,3] output \"end\") {{
  %o, %end = scan[{rule}{more}{start}] %q, %k, %g, %v{ins} : f32[2,{s},2,3], f32[2,2,3,3]
  return %o, %end
}}
"
    );
    parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Random operands: real numbers, and elements of the field. Documents end within pieces of two tokens, and with them.
struct Sample {
    real: Vec<Vec<Tensor>>,
    field: Vec<Vec<u64>>,
}

impl Sample {
    fn new(m: &Module, seed: u64) -> Sample {
        let segment = |i: &[usize]| (i[1] + 3 * i[0] + 1) / 3;
        let one = |a: &Port| {
            let role = a.role.as_ref().expect("a role").name.clone();
            let shape = m.funcs[0].ty(a.value).sizes();
            let stream = Stream::new(seed, &role, 0);
            let mut at = 0;
            let real = Tensor::from_fn(&shape, |i| {
                at += 1;
                match &*role {
                    "g" => -stream.uniform(at),
                    "beta" => stream.uniform(at),
                    "segments" => segment(i) as f64,
                    _number => stream.normal(at),
                }
            });
            let element = |x: &f64| match &*role {
                "segments" => *x as u64,
                _number => x.to_bits().wrapping_mul(0x9e37_79b9_7f4a_7c15) % P,
            };
            let field = real.data.iter().map(element).collect();
            (vec![real], field)
        };
        let (real, field) = m.funcs[0].args.iter().map(one).unzip();
        Sample { real, field }
    }

    /// Results in f64 and over the field.
    fn run(&self, m: &Module) -> (Vec<f64>, Vec<Vec<u64>>) {
        let all = call(&m.mesh, &m.funcs[0], &self.real, Precision::F64);
        let all = all.unwrap_or_else(|e| panic!("{e}\n{}", print(m)));
        let field = evaluate(m, &self.field).unwrap_or_else(|e| panic!("{e}\n{}", print(m)));
        (all.into_iter().flat_map(|t| t[0].data.clone()).collect(), field)
    }

    /// Whether two programs have the same numbers: real ones but for rounding, and where these are the same, or are not, those of
    /// the field as well.
    fn same(&self, a: &Module, b: &Module) -> bool {
        let (a, b) = (self.run(a), self.run(b));
        let is = |x: f64, y: f64| (x - y).abs() < 1e-11 * (1.0 + x.abs());
        let real = a.0.len() == b.0.len() && a.0.iter().zip(&b.0).all(|(x, y)| is(*x, *y));
        assert_eq!(real, a.1 == b.1, "in f64, and over the field");
        real
    }
}

/// All that one sign, transposition, index or operand can be changed to.
fn altered(m: &Module) -> Vec<(&'static str, Module)> {
    let f = &m.funcs[0];
    let mut all = vec![];
    let mut with = |what, i: usize, n: Node| {
        let mut other = m.clone();
        other.funcs[0].nodes[i] = n;
        all.push((what, other));
    };
    let mut known: Vec<Value> = f.args.iter().map(|a| a.value).collect();
    for (i, n) in f.nodes.iter().enumerate() {
        for j in 0..n.ins.len() {
            let alike = known.iter().filter(|v| **v != n.ins[j] && f.ty(**v) == f.ty(n.ins[j]));
            for v in alike {
                let mut own = n.clone();
                own.ins[j] = *v;
                with("operand", i, own);
            }
        }
        let op = |op: Op| Node { op, ..n.clone() };
        match &n.op {
            Op::Narrow(k) => {
                let dim = k.dim.of(f.ty(n.ins[0]).rank()).expect("a dim");
                let most = f.ty(n.ins[0]).dims[dim].size - f.ty(n.outs[0]).dims[dim].size;
                let starts = [k.start.checked_sub(1), Some(k.start + 1).filter(|s| *s <= most)];
                for start in starts.into_iter().flatten() {
                    with("index", i, op(Narrow { start, ..k.clone() }.into()));
                }
            }
            Op::Pad(k) => with("place", i, op(Pad { start: 1, ..k.clone() }.into())),
            Op::Add(_) => with("sign", i, op(Sub::same().into())),
            Op::Scale(_) => with("factor", i, op(Scale { by: 1.0 }.into())),
            Op::Dot(_) => {
                let other = Dot::by("bcnjk,bcnjv->bcnkv", &[5, 5]);
                with("transposition", i, op(other.into()));
            }
            Op::Scan(k) if k.segments => {
                let mut own = op(Scan { segments: false, ..k.clone() }.into());
                own.ins.remove(k.behind().segments.expect("segments"));
                with("documents", i, own);
            }
            _another => {}
        }
        known.extend(&n.outs);
    }
    all
}

/// What changes of a law have other numbers, and how many of each kind.
#[derive(Default)]
struct Tally(BTreeMap<&'static str, usize>);

/// The law holds in so many pieces on random samples; what its changes make that has other numbers is refused.
fn holds(of: Of, pieces: usize, tally: &mut Tally) {
    let whole = recurrence(of);
    let mut laid = whole.clone();
    assert!(cut(&whole.mesh, &mut laid.funcs[0], pieces).expect("it divides"));
    let judged = |m: &Module| {
        let mut report = Report::default();
        experts::prove(&whole, m, &mut report);
        report.verdict()
    };
    let (made, count) = joined(&laid);
    assert_eq!(count, 1, "{of:?} {pieces}");
    assert_eq!(judged(&laid), Verdict::Proved, "{of:?} {pieces}");
    for seed in 0..3 {
        let sample = Sample::new(&whole, seed);
        assert!(sample.same(&laid, &made), "{of:?} {pieces}: both sides of the law");
        assert!(sample.same(&laid, &whole), "{of:?} {pieces}");
    }
    if pieces > 4 {
        return;
    }
    let sample = Sample::new(&whole, 0);
    for (what, other) in altered(&laid) {
        if sample.same(&other, &whole) {
            continue;
        }
        *tally.0.entry(what).or_default() += 1;
        assert_ne!(judged(&other), Verdict::Proved, "{of:?} {pieces} {what}:\n{}", print(&other));
        // What is rewritten all the same is another model, and says what it computes.
        let (made, _) = joined(&other);
        assert!(sample.same(&other, &made), "{of:?} {pieces} {what}:\n{}", print(&other));
    }
}

/// Of two pieces behind a state of 0 there is the law of composition alone.
#[test]
fn composition() {
    for delta in [false, true] {
        let mut tally = Tally::default();
        holds(Of { tokens: 8, delta, segments: false, start: false }, 2, &mut tally);
        assert!(["operand", "index"].iter().all(|k| tally.0[k] > 0), "{delta}: {:?}", tally.0);
    }
}

/// Of more, and behind another state, also the affine law: by the delta rule Φ is a matrix, by the plain one a number.
#[test]
fn affine() {
    for delta in [false, true] {
        let mut tally = Tally::default();
        for (start, pieces) in [(true, 2), (false, 4), (true, 4), (false, 8)] {
            holds(Of { tokens: 8, delta, segments: false, start }, pieces, &mut tally);
        }
        let mut kinds = vec!["operand", "index", "sign", "factor"];
        kinds.extend(delta.then_some("transposition"));
        assert!(kinds.iter().all(|k| tally.0.contains_key(k)), "{delta}: {:?}", tally.0);
        assert!(tally.0.values().sum::<usize>() > 40, "{delta}: {:?}", tally.0);
    }
}

/// Tokens that are no multiple of the pieces, of which the last may have none, are filled up.
#[test]
fn filling() {
    for delta in [false, true] {
        let mut tally = Tally::default();
        for (tokens, start, pieces) in [(7, false, 2), (7, true, 2), (7, false, 4), (9, true, 4)] {
            holds(Of { tokens, delta, segments: false, start }, pieces, &mut tally);
        }
        let kinds = ["operand", "index", "sign", "place"];
        assert!(kinds.iter().all(|k| tally.0.contains_key(k)), "{delta}: {:?}", tally.0);
        assert!(tally.0.values().sum::<usize>() > 40, "{delta}: {:?}", tally.0);
    }
}

/// Where documents end within pieces and with them.
#[test]
fn documents() {
    for delta in [false, true] {
        let mut tally = Tally::default();
        for (start, pieces) in [(false, 2), (false, 4), (true, 4), (true, 8)] {
            holds(Of { tokens: 8, delta, segments: true, start }, pieces, &mut tally);
        }
        let kinds = ["operand", "index", "sign", "documents"];
        assert!(kinds.iter().all(|k| tally.0.contains_key(k)), "{delta}: {:?}", tally.0);
        assert!(tally.0.values().sum::<usize>() > 40, "{delta}: {:?}", tally.0);
    }
}
