//! Mistakes planted in updates: each leaves other numbers in parameters or states, no two are the same, and none is
//! proved.

use super::{BUILT_IN, DP2, MUON, OWN, PP2, TP2, by};
use crate::fixture::*;
use crate::proofs::planted::{apart, spread};
use shardc::proof::Texts;
use shardc_ir::func::{Func, FuncKind, Module, Node, RoleKind, Value};
use shardc_ir::interp::{Precision, StepState, run_step};
use shardc_ir::ops::*;
use shardc_ir::phase::Phase;
use shardc_ir::plan::{Instr, Plan};
use shardc_ir::tensor::Tensor;
use shardc_ir::text;
use shardc_ir::types::DType;
use shardc_ir::verify::verify;
use shardc_passes::options::{Optimizer, Options};
use shardc_prove::field::prove_smaller;
use shardc_prove::lemmas::Lemmas;
use shardc_prove::{Verdict, by_form};
use shardc_testing::{nightly, samples, taken};
use std::collections::{BTreeMap, BTreeSet};

/// A kind of mistake: what becomes of a node of an optimizer's step, if the kind has a place there.
type Kind = fn(&Func, usize) -> Option<Node>;

fn with(n: &Node, op: impl Into<Op>) -> Option<Node> {
    Some(Node { op: op.into(), ..n.clone() })
}

/// The node with another value as an operand.
fn reads(n: &Node, k: usize, v: Value) -> Option<Node> {
    let mut other = n.clone();
    other.ins[k] = v;
    (other.ins[k] != n.ins[k]).then_some(other)
}

/// What passes its first operand on in place of what it does.
fn passes_on(f: &Func, n: &Node, k: usize) -> Option<Node> {
    let ins = [n.ins[k]].into_iter().collect();
    let same = n.outs.len() == 1 && f.ty(n.ins[k]).sizes() == f.ty(n.outs[0]).sizes();
    same.then(|| Node { op: Scale { by: 1.0 }.into(), ins, ..n.clone() })
}

/// Values of the type of this one that are known at a node, in the order in which they are made.
fn alike(f: &Func, at: usize, v: Value) -> Vec<Value> {
    let made = f.nodes[..at].iter().flat_map(|n| n.outs.iter().copied());
    let all = f.args.iter().map(|a| a.value).chain(made);
    all.filter(|&x| x != v && f.ty(x) == f.ty(v)).collect()
}

/// The argument that a result of a state is written over, if this node makes one.
fn old_state(f: &Func, n: &Node) -> Option<Value> {
    let r = f.results.iter().find(|r| n.outs[..] == [r.value])?;
    let role = r.role.as_ref().filter(|r| matches!(r.kind, RoleKind::State(_)))?;
    f.args.iter().find(|a| a.role.as_ref() == Some(role)).map(|a| a.value)
}

/// The one that types tell.
const UNTYPED: &str = "ranks do not add up";

const KINDS: [(&str, Kind); 21] = [
    ("a constant is a little larger", |f, i| match &f.nodes[i].op {
        Op::Scale(k) if k.by != 1.0 => with(&f.nodes[i], Scale { by: k.by * 1.001 }),
        _other => None,
    }),
    ("a constant has the other sign", |f, i| match &f.nodes[i].op {
        Op::Scale(k) => with(&f.nodes[i], Scale { by: -k.by }),
        _other => None,
    }),
    ("a bound is another", |f, i| match &f.nodes[i].op {
        Op::Clamp(k) => with(&f.nodes[i], Clamp { lo: k.lo, hi: k.lo + 1e-4 }),
        _other => None,
    }),
    ("what is added is another number", |f, i| match &f.nodes[i].op {
        Op::Shift(k) => with(&f.nodes[i], Shift { by: k.by + 0.01 }),
        _other => None,
    }),
    ("another power", |f, i| match &f.nodes[i].op {
        Op::Pow(k) => with(&f.nodes[i], Pow { to: k.to - 0.1 }),
        _other => None,
    }),
    ("another function", |f, i| match &f.nodes[i].op {
        Op::Sqrt(_) => with(&f.nodes[i], Abs {}),
        Op::Rsqrt(_) => with(&f.nodes[i], Sqrt {}),
        Op::Sign(_) => with(&f.nodes[i], Abs {}),
        Op::Exp(_) => with(&f.nodes[i], Sin {}),
        _other => None,
    }),
    ("the last term is lost", |f, i| match &f.nodes[i].op {
        Op::Add(k) if k.rule.0.is_none() => passes_on(f, &f.nodes[i], 0),
        _other => None,
    }),
    ("the first term is lost", |f, i| match &f.nodes[i].op {
        Op::Add(k) if k.rule.0.is_none() => passes_on(f, &f.nodes[i], 1),
        _other => None,
    }),
    ("a sum in place of a difference", |f, i| match &f.nodes[i].op {
        Op::Sub(k) if k.rule.0.is_none() => with(&f.nodes[i], Add::same()),
        _other => None,
    }),
    ("the sides of a quotient", |f, i| match &f.nodes[i].op {
        Op::Div(k) if k.rule.0.is_none() => {
            let mut n = f.nodes[i].clone();
            n.ins.reverse();
            Some(n)
        }
        _other => None,
    }),
    ("what was made before, as one iteration fewer", |f, i| {
        let n = &f.nodes[i];
        let v = *n.ins.iter().find(|v| f.ty(**v).rank() > 1)?;
        reads(n, n.ins.iter().position(|x| *x == v)?, *alike(f, i, v).last()?)
    }),
    ("the last operand is of another parameter", |f, i| {
        let n = &f.nodes[i];
        let v = *n.ins.last().filter(|v| f.ty(**v).rank() > 0)?;
        reads(n, n.ins.len() - 1, *alike(f, i, v).first()?)
    }),
    ("another number of the step", |f, i| {
        let n = &f.nodes[i];
        let k = n.ins.iter().position(|v| f.ty(*v).rank() == 0)?;
        reads(n, k, *alike(f, i, n.ins[k]).last()?)
    }),
    ("a gradient that is not clipped, or what is not divided by its norm", |f, i| {
        let n = &f.nodes[i];
        let number = n.ins.len() == 2 && f.ty(n.ins[1]).rank() == 0 && f.ty(n.ins[0]).rank() > 0;
        (number && matches!(n.op, Op::Mul(_) | Op::Div(_))).then(|| passes_on(f, n, 0))?
    }),
    (UNTYPED, |f, i| match &f.nodes[i].op {
        Op::AllReduce(_) => passes_on(f, &f.nodes[i], 0),
        _other => None,
    }),
    ("owners have each other's matrices", |f, i| match &f.nodes[i].op {
        Op::Concat(_) if f.ty(f.nodes[i].ins[0]) == f.ty(f.nodes[i].ins[1]) => {
            let mut n = f.nodes[i].clone();
            n.ins.swap(0, 1);
            Some(n)
        }
        _other => None,
    }),
    ("another matrix comes back from owners", |f, i| match &f.nodes[i].op {
        Op::Narrow(k) => {
            let start = if k.start == 0 { 1 } else { k.start - 1 };
            with(&f.nodes[i], Narrow { start, ..k.clone() })
        }
        _other => None,
    }),
    ("a state stays as it was", |f, i| {
        let old = old_state(f, &f.nodes[i])?;
        passes_on(f, &reads(&f.nodes[i], 0, old)?, 0)
    }),
    ("constants of the op", |f, i| match &f.nodes[i].op {
        Op::AdamW(k) => match i % 4 {
            0 => with(&f.nodes[i], AdamW { beta1: 0.8, ..k.clone() }),
            1 => with(&f.nodes[i], AdamW { beta2: 0.99, ..k.clone() }),
            2 => with(&f.nodes[i], AdamW { eps: 1e-3, ..k.clone() }),
            _ => with(&f.nodes[i], AdamW { decay: 0.5, ..k.clone() }),
        },
        Op::Sgd(_) => with(&f.nodes[i], Sgd { decay: 0.5 }),
        _other => None,
    }),
    ("moments of the op crossed", |f, i| {
        let n = &f.nodes[i];
        let mut other = n.clone();
        matches!(n.op, Op::AdamW(_)).then(|| other.ins.swap(2, 3)).map(|()| other)
    }),
    ("numbers of the op crossed", |f, i| {
        let n = &f.nodes[i];
        let mut other = n.clone();
        let at = match n.op {
            Op::AdamW(_) => [4, 5],
            Op::Sgd(_) => [2, 3],
            _ => return None,
        };
        other.ins.swap(at[0], at[1]);
        Some(other)
    }),
];

/// What somebody might have written in place of a rule.
const OTHERS: [(&str, &str, &str, &str); 22] = [
    (
        "muon",
        "4 iterations",
        "repeat i in 0..$steps, %x{i} at 0",
        "repeat i in 1..$steps, %x{i} at 0",
    ),
    ("muon", "a norm of each row", "dot[nm,nm->] %f, %f", "dot[nm,nm->n] %f, %f"),
    ("muon", "no norm", "%x = cast[$dtype] div[nm,->nm] %f, %norm", "%x = cast[$dtype] %f"),
    ("muon", "eps is added", "clamp[$eps; hi=inf] sqrt", "shift[$eps] sqrt"),
    ("muon", "the scale of the turned matrix", "$fan_out / $fan_in", "$fan_in / $fan_out"),
    (
        "muon",
        "decay times the scale",
        "add scale[$scale] cast[f32] %x{$steps},",
        "scale[$scale] add cast[f32] %x{$steps},",
    ),
    ("muon", "a momentum that is a sum", "%b2 = lerp[1 - $momentum]", "%b2 = add scale[$momentum]"),
    ("muon", "no look ahead", "%u = lerp[$nesterov] %g, %b2", "%u = scale[1.0] %b2"),
    (
        "muon",
        "a look ahead with the old mean",
        "%u = lerp[$nesterov] %g, %b2",
        "%u = lerp[$nesterov] %g, cast[f32] %b",
    ),
    ("muon", "what is kept looks ahead", "; cast[$state_dtype] %b2", "; cast[$state_dtype] %u"),
    (
        "muon",
        "cubes only",
        "scale[$coefficients[3 * i + 2]] %square{i}",
        "scale[$coefficients[3 * i + 2]] %a{i}",
    ),
    ("muon", "a coefficient of another power", "3 * i + 1", "3 * i + 2"),
    (
        "lion",
        "signs of the gradient",
        "sign add scale[$beta1] cast[f32] %m, scale[1 - $beta1] %g",
        "sign %g",
    ),
    (
        "lion",
        "one beta",
        "scale[$beta2] cast[f32] %m, scale[1 - $beta2] %g",
        "scale[$beta1] cast[f32] %m, scale[1 - $beta1] %g",
    ),
    (
        "lion",
        "decay is not multiplied by the rate",
        "sub %p, mul[*,->*] (add %c, scale[$decay] %p), %lr",
        "sub (sub %p, mul[*,->*] %c, %lr), scale[$decay] %p",
    ),
    ("adamw", "no correction of the mean", "div[*,->*] %m2, %c1", "scale[1.0] %m2"),
    (
        "adamw",
        "one correction for both",
        "%root = sqrt div[*,->*] %v2, %c2",
        "%root = sqrt div[*,->*] %v2, %c1",
    ),
    (
        "adamw",
        "eps within the root",
        "%root = sqrt div[*,->*] %v2, %c2",
        "%root = sqrt shift[$eps] div[*,->*] %v2, %c2",
    ),
    (
        "adamw",
        "decay within the gradient",
        "scale[1 - $beta1] %g",
        "scale[1 - $beta1] add %g, scale[$decay] %p",
    ),
    (
        "adafactor",
        "no mean of rows",
        "%v = div[nm,->nm] mul[n,m->nm] %r2, %c2, %mean",
        "%v = mul[n,m->nm] %r2, %c2",
    ),
    ("adafactor", "old columns", "mul[n,m->nm] %r2, %c2", "mul[n,m->nm] %r2, %c"),
    (
        "adafactor",
        "a rate that does not know the parameter",
        "clamp[$eps2; hi=inf] %rms",
        "clamp[$eps2; hi=inf] scale[0.0] %rms",
    ),
];

/// The texts of the rules of a name.
fn rules_of(name: &str) -> String {
    let begin = format!("update @{name}(");
    let of = |at: usize| BUILT_IN[at..].split_inclusive("\n}\n").next().unwrap_or("");
    BUILT_IN.match_indices(&begin).map(|x| of(x.0)).collect()
}

/// A compiled model, the interpreter's state before the optimizer's step, and what that leaves.
struct Bench {
    fx: Fixture,
    o: Options,
    plan: Plan,
    texts: Texts,
    before: StepState,
    want: StepState,
    judged: usize,
    /// Whether it can be made smaller, and is then proved by evaluation.
    evaluates: bool,
}

/// The instructions of each rank from the optimizer's step on, or those before.
fn lists(plan: &Plan, behind: bool) -> Vec<Vec<Instr>> {
    let of = |i: &Instr| matches!(i, Instr::Call(c) if plan.module.funcs[c.func].kind == FuncKind::OptimizerStep);
    let cut = |all: &Vec<Instr>| {
        let at = all.iter().position(of).expect("an optimizer's step");
        if behind { all[at..].to_vec() } else { all[..at].to_vec() }
    };
    plan.classes.iter().map(|c| cut(&c.step)).collect()
}

fn run(plan: &Plan, m: &Module, behind: bool, state: &mut StepState) -> Result<(), String> {
    let lists = lists(plan, behind);
    let lists: Vec<&[Instr]> = lists.iter().map(|l| &l[..]).collect();
    run_step(m, &lists, state, Precision::F64).map_err(|d| d.to_string())
}

impl Bench {
    /// The third step, of a run whose states are no longer 0.
    fn new(name: &str, o: Options) -> Bench {
        let fx = Fixture::open(name);
        let o = Options { clip: Some(0.01), observe: false, ..o };
        let model = fx.model(&o);
        let compiled = compile(&model, &o);
        let texts = texts(&model, &o, &compiled);
        let mut before = start(&fx, &model, &compiled);
        let plan = compiled.plan;
        for a in plan.module.funcs.iter().flat_map(|f| f.args.iter().map(move |a| (f, a))) {
            let (f, role) = (a.0, a.1.role.clone().expect("roles"));
            let (ty, mut seed) =
                (f.ty(a.1.value), role.to_string().bytes().map(u64::from).sum::<u64>());
            let sizes = ty.sizes();
            let x = match (role.kind, &*role.name) {
                (RoleKind::State(_), _) => Tensor::from_fn(&sizes, |_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    0.002 + (seed >> 40) as f64 / (1u64 << 24) as f64 * 0.01
                }),
                (RoleKind::Scalar, "lr") => Tensor::scalar(1e-2),
                (RoleKind::Scalar, "step") => Tensor::scalar(3.0),
                (RoleKind::Scalar, _) => Tensor::scalar(1.0),
                _other => continue,
            };
            before.put(&plan.module.mesh, role, ty, &x);
        }
        run(&plan, &plan.module, false, &mut before).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut want = before.clone();
        run(&plan, &plan.module, true, &mut want).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(texts.prove().verdict(), Verdict::Proved, "{name} {o:?}");
        // Experts, and rotations of a part of a head, have no smaller form.
        let evaluates = !["qwen3_moe", "deepseek_v3", "phi3"].contains(&name);
        if evaluates {
            let r = prove_smaller(&texts.subject(), texts.data);
            assert_eq!(r.verdict(), Verdict::Proved, "{name} {o:?}: {:?}", r.gaps);
        }
        Bench { fx, o, plan, texts, before, want, judged: 0, evaluates }
    }

    /// Whether this program leaves other numbers; what cannot be run leaves none.
    fn differs(&self, plan: &Plan, m: &Module) -> bool {
        let mut got = self.before.clone();
        run(plan, m, true, &mut got).is_err() || apart(&self.want, &got) > 1e-11
    }

    /// Judges a mistake: false if it changes no number. Of forms that differ the whole proof may still find that they
    /// are equal: in every run it is asked of some, in the long one of all.
    fn refuses(&mut self, plan: &Plan, m: &Module, what: &str) -> bool {
        if !self.differs(plan, m) {
            return false;
        }
        self.judged += 1;
        let whole = nightly() || self.judged.is_multiple_of(16);
        let evaluates = self.evaluates && (nightly() || self.judged.is_multiple_of(4));
        let own = std::mem::replace(&mut self.texts.programs, m.clone());
        if evaluates {
            let r = prove_smaller(&self.texts.subject(), self.texts.data);
            let typed = !what.contains(UNTYPED);
            let same = r.verdict() == Verdict::Proved || (typed && r.verdict() != Verdict::Refuted);
            assert!(!same, "{:?} by evaluation: {what}: {:?}", r.verdict(), r.gaps);
        }
        let r = match whole {
            true => self.texts.prove(),
            false => by_form(&self.texts.subject(), Lemmas::default()),
        };
        self.texts.programs = own;
        assert_ne!(r.verdict(), Verdict::Proved, "PROVED with other numbers: {what}");
        true
    }
}

/// Rules and layouts in which mistakes are planted.
fn benches() -> Vec<(&'static str, &'static str, Options)> {
    const BOTH: super::Axes = &[("dp_shard", 2), ("tp", 2)];
    let owners = |mesh, zero| by(&[&format!("{MUON},spread=owners")], mesh, zero, 2);
    let gather = |mesh, zero| by(&[&format!("{MUON},spread=gather")], mesh, zero, 2);
    let adamw = |mesh, zero| by(&["*=adamw,state_dtype=bf16"], mesh, zero, 2);
    vec![
        ("muon", "llama_gqa", owners(TP2, 0)),
        ("lion", "gpt2", by(&["*=lion"], BOTH, 3, 2)),
        ("adamw", "llama_gqa", adamw(TP2, 0)),
        ("adafactor", "llama_gqa", by(&["*=adafactor"], DP2, 1, 2)),
        ("muon", "gpt2", gather(DP2, 1)),
        ("", "llama_gqa", by(&[], BOTH, 1, 2)),
        ("muon", "qwen3_moe", Options { ep: 2, ..owners(BOTH, 1) }),
        ("adafactor", "phi3", by(&["*=adafactor"], TP2, 0, 2)),
        ("muon", "llama_deep", owners(&[("pp", 2), ("tp", 2)], 0)),
        ("", "llama_gqa", Options { optim_file: OWN.into(), ..by(&["hidden=mine"], DP2, 3, 2) }),
        ("lion", "deepseek_v3", by(&["*=lion"], TP2, 0, 2)),
        ("muon", "phi3", gather(BOTH, 3)),
        ("", "gpt2", Options { optimizer: Optimizer::Sgd, ..by(&[], DP2, 2, 2) }),
        ("adamw", "qwen3_moe", adamw(DP2, 3)),
        ("muon", "llama_bias_tied", Options { dtype: DType::BF16, ..gather(PP2, 0) }),
        ("adamw", "llama_bias_tied", adamw(PP2, 0)),
    ]
}

/// Mistakes in single nodes.
fn nodes(b: &mut Bench, each: usize, name: &str, tally: &mut BTreeMap<&str, [usize; 2]>) {
    let plain = b.plan.module.clone();
    let mut seen = BTreeSet::new();
    let at = |m: &Module| {
        let steps = m.funcs.iter().enumerate().filter(|(_, f)| f.kind == FuncKind::OptimizerStep);
        steps.flat_map(|(j, f)| (0..f.nodes.len()).map(move |i| (j, i))).collect::<Vec<_>>()
    };
    let at = at(&plain);
    for (kind, plant) in KINDS {
        let all = at.iter().filter_map(|&(j, i)| Some((j, i, plant(&plain.funcs[j], i)?)));
        for (j, i, other) in spread(all.collect(), each) {
            let (f, mut m) = (&plain.funcs[j], plain.clone());
            let place = format!("{j} {i} {:?} {:?}", other.op, other.ins);
            if !seen.insert(place) {
                continue;
            }
            m.funcs[j].nodes[i] = other;
            let line = text::node_text(&m.mesh, f, &f.nodes[i]).text;
            let is = text::node_text(&m.mesh, &m.funcs[j], &m.funcs[j].nodes[i]).text;
            let what =
                format!("{name} {:?} zero={}: {kind}: `{line}` as `{is}`", b.o.mesh, b.o.zero);
            // What has no type is no program that the interpreter runs.
            if kind != UNTYPED && verify(&m, Phase::Ranked).is_err() {
                continue;
            }
            let plan = b.plan.clone();
            let other = b.refuses(&plan, &m, &what);
            tally.entry(kind).or_default()[usize::from(!other)] += 1;
        }
    }
}

/// Mistakes in rules: plans of other texts.
fn texts_of_rules(
    b: &mut Bench,
    rule: &str,
    name: &str,
    tally: &mut BTreeMap<&'static str, [usize; 2]>,
) {
    let own = rules_of(rule);
    let blocks = rules_of("muon_heads").replace("@muon_heads", "@muon").replace("h=$heads", "h=2");
    let blocks = blocks.replace("$fan_out / $heads", "$fan_out");
    let others = OTHERS.into_iter().filter(|x| x.0 == rule).map(|(_, what, from, to)| {
        let other = own.replace(from, to);
        assert_ne!(other, own, "{rule}: {from}");
        // A fused rule is not run by its lines; these are.
        let other = if what == "a norm of each row" {
            other.replace("div[nm,->nm] %f, %norm", "div[nm,n->nm] %f, %norm")
        } else {
            other
        };
        (what, other)
    });
    let others = others.chain((rule == "muon").then_some(("blocks apart", blocks)));
    for (what, other) in others.collect::<Vec<_>>() {
        let plain = |l: &&str| !l.trim_start().starts_with("fused");
        let optim_file = other.lines().filter(plain).collect::<Vec<_>>().join("\n") + "\n";
        let o = Options { optim_file, ..b.o.clone() };
        let model = b.fx.model(&o);
        let plan = compile(&model, &o).plan;
        let said = format!("{name} {:?} zero={}: {what}", o.mesh, o.zero);
        let counts = b.refuses(&plan, &plan.module, &said);
        tally.entry(what).or_default()[usize::from(!counts)] += 1;
    }
}

#[test]
fn mistakes_in_updates_are_refused() {
    let mut of_nodes: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    let mut of_rules: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    for (i, (rule, name, o)) in benches().into_iter().enumerate() {
        if !taken(i, 8) {
            continue;
        }
        let mut b = Bench::new(name, o);
        nodes(&mut b, samples(2, 12) as usize, name, &mut of_nodes);
        texts_of_rules(&mut b, rule, name, &mut of_rules);
    }
    let mut kinds = 0;
    for (kind, [refused, equal]) in of_nodes.iter().chain(&of_rules) {
        println!("{kind:66} {refused:4} refused {equal:3} of the same numbers");
        kinds += usize::from(*refused > 0);
    }
    assert!(kinds >= 12, "{kinds} kinds");
}
