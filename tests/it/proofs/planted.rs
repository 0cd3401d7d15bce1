//! Mistakes planted in plans: none that leaves other numbers is proved.

mod lemmas;
mod reported;
mod states;
mod types;

use super::{BALANCE, Case, DP2_TP2, grid, ring};
use crate::fixture::*;
use shardc_ir::func::{Func, Module, Name, Node, RoleKind, Value};
use shardc_ir::interp::StepState;
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::draw::StreamName;
use shardc_ir::ops::rope::Pairs;
use shardc_ir::ops::{Add, Cos, Gelu, Logistic, Op, Scale, Sin, Sqrt};
use shardc_ir::phase::Phase;
use shardc_ir::plan::Dropout;
use shardc_ir::text::node_text;
use shardc_ir::types::DType;
use shardc_ir::verify::verify;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpSplit, Options, Order, TpMode, TpSteps};
use shardc_prove::Verdict;
use shardc_testing::{samples, taken};
use std::collections::BTreeMap;

/// Seeded numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % n.max(1) as u64) as usize
    }
}

/// One operand exchanged for another value of the same type.
fn exchanged(m: &Module, dice: &mut Dice) -> Option<(Module, String)> {
    let all: usize = m.funcs.iter().map(|f| f.nodes.len()).sum();
    let mut at = dice.below(all);
    let func = m.funcs.iter().position(|f| {
        let here = at < f.nodes.len();
        at -= if here { 0 } else { f.nodes.len() };
        here
    })?;
    let f = &m.funcs[func];
    let n = &f.nodes[at];
    let k = dice.below(n.ins.len());
    let own = *n.ins.get(k)?;
    let made = f.nodes[..at].iter().flat_map(|n| n.outs.iter().copied());
    let before = f.args.iter().map(|a| a.value).chain(made);
    let alike: Vec<Value> = before.filter(|&v| v != own && f.ty(v) == f.ty(own)).collect();
    let other = *alike.get(dice.below(alike.len()))?;
    let mut out = m.clone();
    out.funcs[func].nodes[at].ins[k] = other;
    let line = node_text(&m.mesh, f, n).text;
    let place = format!("@{}: operand {k} of `{line}` becomes {}", f.name, f.name(other));
    verify(&out, Phase::Ranked).is_ok().then_some((out, place))
}

/// Largest difference of two states relative to the size of a tensor.
pub fn apart(a: &StepState, b: &StepState) -> f64 {
    let mut worst = 0.0f64;
    let mut pair = |x: &[f64], y: &[f64]| {
        let norm = x.iter().map(|v| v * v).sum::<f64>().sqrt().max(1e-30);
        let off = x.iter().zip(y).map(|(p, q)| (p - q) * (p - q)).sum::<f64>().sqrt() / norm;
        worst = if off.is_nan() || x.len() != y.len() { f64::INFINITY } else { worst.max(off) };
    };
    for (role, ranks) in &a.values {
        let other = b.values.get(role).map(Vec::as_slice).unwrap_or_default();
        ranks.iter().zip(other).for_each(|(x, y)| pair(&x.data, &y.data));
    }
    for (role, shown) in &a.outputs {
        let other = b.outputs.get(role).map(Vec::as_slice).unwrap_or_default();
        for (x, y) in shown.iter().zip(other) {
            x.ranks.iter().zip(&y.ranks).for_each(|(x, y)| pair(&x.data, &y.data));
        }
    }
    worst
}

/// A mutant that is proved must leave the same numbers: a wrong `proved` is the worst defect.
fn same_numbers(
    case: &mut Case,
    plain: &Module,
    want: &mut Option<StepState>,
    mutant: &Module,
    place: &str,
) {
    if want.is_none() {
        *want = Some(case.numbers(plain).unwrap_or_else(|e| panic!("{}: {e}", case.name)));
    }
    let got =
        case.numbers(mutant).unwrap_or_else(|e| panic!("{}: proved: {place}: {e}", case.name));
    let off = apart(want.as_ref().expect("set"), &got);
    assert!(off < 1e-9, "{}: PROVED with other numbers ({off:.1e}): {place}", case.name);
}

/// Layouts in which mistakes are planted.
fn planted() -> Vec<(&'static str, Options)> {
    let zero = |zero, o: Options| Options { zero, ..o };
    let named = |name: &str, o: Options| Options { schedule: Order::Named(name.into()), ..o };
    let dropped = |o: Options| Options { dropout: Dropout::Rate(0.3), ..o };
    let experts = Options {
        ep: 2,
        etp: Some(1),
        balance: BALANCE,
        ..options(&[("dp_shard", 2), ("tp", 2)], false, 2)
    };
    let half =
        Options { dtype: DType::BF16, recompute: Recompute::Full, ..options(DP2_TP2, true, 2) };
    vec![
        ("llama_gqa", options(DP2_TP2, false, 2)),
        ("gpt2", dropped(named("zb-h1", options(&[("pp", 2), ("tp", 2)], false, 2)))),
        ("qwen3", zero(3, options(&[("dp_shard", 2), ("tp", 2)], true, 2))),
        ("gemma2", half),
        ("llama_mha", grid(TpMode::TwoD, &[("tp", 4)], TpSteps::Summa)),
        ("llama_gqa", ring(CpSplit::Zigzag, &[("cp", 4)])),
        ("mixtral", experts.clone()),
        ("deepseek_v3", experts),
        ("llama_deep", named("zb-v", zero(1, options(&[("pp", 2), ("dp_shard", 2)], false, 1)))),
        (
            "llama_bias_tied",
            Options {
                dtype: DType::F16,
                ..zero(2, options(&[("pp", 2), ("dp_shard", 2)], false, 1))
            },
        ),
    ]
}

/// Plants `each` exchanges in every layout.
fn exchanges(each: usize) {
    let (mut refused, mut equal) = (0, 0);
    for (i, (name, o)) in planted().into_iter().enumerate() {
        let mut case = Case::new(name, &o);
        let plain = case.texts.programs.clone();
        let (mut dice, mut want, mut done) = (Dice(i as u64), None, 0);
        while done < each {
            let Some((mutant, place)) = exchanged(&plain, &mut dice) else { continue };
            done += 1;
            match case.judge(&mutant).verdict() {
                Verdict::Proved => {
                    same_numbers(&mut case, &plain, &mut want, &mutant, &place);
                    equal += 1;
                }
                Verdict::Refuted | Verdict::NotUnderstood => refused += 1,
            }
        }
    }
    println!("{refused} exchanges refused, {equal} proved, with the same numbers");
    assert!(refused > 5 * equal, "{refused} refused, {equal} proved");
}

#[test]
fn exchanged_operands_are_refused() {
    exchanges(samples(12, 230) as usize);
}

/// A mistake of a class: changes a node, or says that the class has none there.
type Change = fn(&Mesh, &mut Node) -> bool;

fn set<T: PartialEq>(place: &mut T, to: T) -> bool {
    let other = *place != to;
    *place = to;
    other
}

/// Mistakes that one node shows.
const CLASSES: &[(&str, Change)] = &[
    ("attention's scale", |_, n| match &mut n.op {
        Op::Attention(k) => set(&mut k.scale, 0.7),
        _other => false,
    }),
    ("attention's scale in backward", |_, n| match &mut n.op {
        Op::AttentionGrad(k) => set(&mut k.scale, 0.7),
        _other => false,
    }),
    ("attention's window", |_, n| match &mut n.op {
        Op::Attention(k) => set(&mut k.mask.left, Some(2)),
        Op::AttentionGrad(k) => set(&mut k.mask.left, Some(2)),
        _other => false,
    }),
    ("attention's right side", |_, n| match &mut n.op {
        Op::Attention(k) => set(&mut k.mask.right, Some(1)),
        Op::AttentionGrad(k) => set(&mut k.mask.right, Some(1)),
        _other => false,
    }),
    ("attention's chunks", |_, n| match &mut n.op {
        Op::Attention(k) => set(&mut k.mask.chunk, Some(2)),
        Op::AttentionGrad(k) => set(&mut k.mask.chunk, Some(2)),
        _other => false,
    }),
    ("attention's softcap", |_, n| match &mut n.op {
        Op::Attention(k) => set(&mut k.softcap, Some(0.3)),
        Op::AttentionGrad(k) => set(&mut k.softcap, Some(0.3)),
        _other => false,
    }),
    ("a rate of attention's dropout", |_, n| match &mut n.op {
        Op::Attention(k) => k.kept.as_mut().is_some_and(|k| set(&mut k.rate, 0.55)),
        Op::AttentionGrad(k) => k.kept.as_mut().is_some_and(|k| set(&mut k.rate, 0.55)),
        _other => false,
    }),
    ("a stream of attention's dropout", |_, n| match &mut n.op {
        Op::Attention(k) => {
            k.kept.as_mut().is_some_and(|k| set(&mut k.stream, StreamName::of("x")))
        }
        Op::AttentionGrad(k) => {
            k.kept.as_mut().is_some_and(|k| set(&mut k.stream, StreamName::of("x")))
        }
        _other => false,
    }),
    ("an added constant", |_, n| match &mut n.op {
        Op::Shift(k) => {
            let by = k.by * 1.5;
            set(&mut k.by, by)
        }
        _other => false,
    }),
    ("a factor", |_, n| match &mut n.op {
        Op::Scale(k) => {
            let by = k.by * 1.5;
            set(&mut k.by, by)
        }
        _other => false,
    }),
    ("a sign", |_, n| match &mut n.op {
        Op::Scale(k) => {
            let by = -k.by;
            set(&mut k.by, by)
        }
        _other => false,
    }),
    ("frequencies of a rotation", |_, n| match &mut n.op {
        Op::Literal(k) => {
            let mut v = k.values.to_vec();
            v[0] *= 1.25;
            k.values = v.into();
            true
        }
        _other => false,
    }),
    ("pairs of a rotation", |_, n| match &mut n.op {
        Op::Rope(k) => {
            let other = if k.pairs == Pairs::Halves { Pairs::Adjacent } else { Pairs::Halves };
            set(&mut k.pairs, other)
        }
        _other => false,
    }),
    ("which labels count", |_, n| match &mut n.op {
        Op::AtLeast(k) => set(&mut k.bound, 4.0),
        _other => false,
    }),
    ("a bound", |_, n| match &mut n.op {
        Op::Clamp(k) => set(&mut k.hi, 0.125),
        _other => false,
    }),
    ("the sides of a difference", |_, n| match &n.op {
        Op::Sub(k) if k.rule.0.is_none() => {
            n.ins.reverse();
            true
        }
        _other => false,
    }),
    ("the sides of a quotient", |_, n| match &n.op {
        Op::Div(k) if k.rule.0.is_none() => {
            n.ins.reverse();
            true
        }
        _other => false,
    }),
    ("a term of a sum is lost", |_, n| match &n.op {
        Op::Add(k) if k.rule.0.is_none() && n.ins.len() > 1 => n.ins.pop().is_some(),
        _other => false,
    }),
    ("the first term of a sum is lost", |_, n| match &n.op {
        Op::Add(k) if k.rule.0.is_none() && n.ins.len() > 1 => {
            n.ins.remove(0);
            true
        }
        _other => false,
    }),
    ("what is added up is lost", |_, n| match &n.op {
        Op::Accumulate(_) => {
            n.ins.remove(0);
            n.op = Add::same().into();
            true
        }
        _other => false,
    }),
    ("what is added in place twice", |_, n| match &n.op {
        Op::Accumulate(_) => {
            let term = n.ins[1];
            n.ins.push(term);
            true
        }
        _other => false,
    }),
    ("a term of a sum twice", |_, n| match &n.op {
        Op::Add(k) if k.rule.0.is_none() && n.ins.len() > 1 => {
            let first = n.ins[0];
            n.ins.push(first);
            true
        }
        _other => false,
    }),
    ("another function", |_, n| {
        let other: Op = match &n.op {
            Op::Sin(_) => Cos {}.into(),
            Op::Cos(_) => Sin {}.into(),
            Op::Silu(_) | Op::Tanh(_) => Logistic {}.into(),
            Op::Gelu(_) => Logistic {}.into(),
            Op::Logistic(_) => Gelu {}.into(),
            Op::Rsqrt(_) => Sqrt {}.into(),
            _other => return false,
        };
        n.op = other;
        true
    }),
    ("the optimizer's constants", |_, n| match &mut n.op {
        Op::AdamW(k) => set(&mut k.beta1, 0.8),
        Op::Sgd(k) => set(&mut k.decay, 0.5),
        _other => false,
    }),
    ("decay", |_, n| match &mut n.op {
        Op::AdamW(k) => set(&mut k.decay, 0.5),
        _other => false,
    }),
    ("the optimizer's moments crossed", |_, n| match &n.op {
        Op::AdamW(_) => {
            n.ins.swap(2, 3);
            true
        }
        _other => false,
    }),
    ("rate and step crossed", |_, n| match &n.op {
        Op::AdamW(_) => {
            n.ins.swap(4, 5);
            true
        }
        _other => false,
    }),
    ("a step that overflows is done all the same", |_, n| match &n.op {
        Op::AdamW(_) if n.ins.len() == 8 => n.ins.pop().is_some(),
        _other => false,
    }),
    ("an accumulator that begins at 1", |_, n| match &mut n.op {
        Op::Fill(k) => k.value == 0.0 && set(&mut k.value, 1.0),
        _other => false,
    }),
    ("a block of a ring goes another way", |m, n| match &mut n.op {
        Op::Permute(k) => {
            k.shift = (k.shift + 1) % m.ways(k.axes);
            true
        }
        _other => false,
    }),
    ("positions of another block", |m, n| match &mut n.op {
        Op::RingShard(k) => {
            k.shift = (k.shift + 1) % m.ways(k.axes);
            true
        }
        _other => false,
    }),
    ("another piece of a grid is sent", |m, n| match &mut n.op {
        Op::Broadcast(k) => {
            k.from = (k.from + 1) % m.ways(k.axes);
            true
        }
        _other => false,
    }),
    ("a piece of a grid goes to another rank", |m, n| match &mut n.op {
        Op::Reduce(k) => {
            k.to = (k.to + 1) % m.ways(k.axes);
            true
        }
        _other => false,
    }),
];

/// Places of a class in a module, three of them spread over all.
fn of_class(m: &Module, change: Change) -> Vec<(Module, String)> {
    let mut all = vec![];
    for (i, f) in m.funcs.iter().enumerate() {
        for (j, n) in f.nodes.iter().enumerate() {
            let mut changed = n.clone();
            if change(&m.mesh, &mut changed) {
                all.push((i, j, changed));
            }
        }
    }
    spread(all, 3)
        .into_iter()
        .map(|(i, j, changed)| {
            let f = &m.funcs[i];
            let place = format!("@{}: {}", f.name, node_text(&m.mesh, f, &f.nodes[j]).text);
            let mut out = m.clone();
            out.funcs[i].nodes[j] = changed;
            (out, place)
        })
        .collect()
}

pub fn spread<T>(all: Vec<T>, most: usize) -> Vec<T> {
    let step = all.len().div_ceil(most).max(1);
    all.into_iter().step_by(step).collect()
}

/// A value multiplied behind the node that makes it: 0 loses it, 2 counts it twice.
fn multiplied(m: &Module, by: f64, dice: &mut Dice) -> Vec<(Module, String)> {
    let mut out = vec![];
    for _ in 0..6 {
        let i = dice.below(m.funcs.len());
        let f = &m.funcs[i];
        if f.nodes.is_empty() {
            continue;
        }
        let j = dice.below(f.nodes.len());
        let v = f.nodes[j].outs[0];
        if !f.ty(v).dtype.is_float() {
            continue;
        }
        let mut mutant = m.clone();
        let g: &mut Func = &mut mutant.funcs[i];
        let name = Name { grad: false, layer: None, hint: "times".into(), dup: 0 };
        let new = g.value(g.ty(v).clone(), name);
        g.nodes[j + 1..]
            .iter_mut()
            .flat_map(|n| n.ins.iter_mut())
            .filter(|x| **x == v)
            .for_each(|x| *x = new);
        g.results.iter_mut().filter(|r| r.value == v).for_each(|r| r.value = new);
        let like = g.nodes[j].clone();
        let node = Node {
            op: Scale { by }.into(),
            ins: [v].into_iter().collect(),
            outs: [new].into_iter().collect(),
            note: None,
            ..like
        };
        g.nodes.insert(j + 1, node);
        if verify(&mutant, Phase::Ranked).is_ok() {
            out.push((mutant, format!("@{}: {} times {by}", f.name, f.name(v))));
        }
    }
    out
}

/// Two results, or arguments, of one kind and type that take each other's place.
fn crossed(m: &Module, results: bool) -> Vec<(Module, String)> {
    let mut out = vec![];
    for (i, f) in m.funcs.iter().enumerate() {
        let ports = if results { &f.results } else { &f.args };
        let mut pairs: BTreeMap<(RoleKind, String), Vec<usize>> = BTreeMap::new();
        for (p, port) in ports.iter().enumerate() {
            let Some(role) = &port.role else { continue };
            let ty = shardc_ir::text::type_text(&m.mesh, f.ty(port.value));
            pairs.entry((role.kind, ty)).or_default().push(p);
        }
        for ((kind, _), all) in pairs {
            if let [a, .., b] = all[..] {
                let mut mutant = m.clone();
                let g = &mut mutant.funcs[i];
                let ports = if results { &mut g.results } else { &mut g.args };
                let (x, y) = (ports[a].role.clone(), ports[b].role.clone());
                (ports[a].role, ports[b].role) = (y, x);
                out.push((
                    mutant,
                    format!("@{}: {kind} {a} and {b} crossed, results: {results}", f.name),
                ));
            }
        }
    }
    spread(out, 12)
}

#[test]
fn classes_of_mistakes_are_refused() {
    let mut tally: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    for (i, (name, o)) in planted().into_iter().enumerate() {
        let mut case = Case::new(name, &o);
        let plain = case.texts.programs.clone();
        let (mut dice, mut want) = (Dice(100 + i as u64), None);
        let mut all: Vec<(&str, Vec<(Module, String)>)> =
            CLASSES.iter().map(|(class, change)| (*class, of_class(&plain, *change))).collect();
        all.push(("a value is lost", multiplied(&plain, 0.0, &mut dice)));
        all.push(("a value counts twice", multiplied(&plain, 2.0, &mut dice)));
        all.push(("results crossed", crossed(&plain, true)));
        all.push(("arguments crossed", crossed(&plain, false)));
        for (class, mutants) in all {
            let some = mutants.into_iter().enumerate().filter(|(k, _)| taken(*k, 6));
            for (mutant, place) in some.map(|m| m.1) {
                if verify(&mutant, Phase::Ranked).is_err() {
                    continue;
                }
                let proved = case.judge(&mutant).verdict() == Verdict::Proved;
                if proved {
                    same_numbers(
                        &mut case,
                        &plain,
                        &mut want,
                        &mutant,
                        &format!("{class}: {place}"),
                    );
                }
                tally.entry(class).or_default()[usize::from(proved)] += 1;
            }
        }
    }
    for (class, [refused, equal]) in &tally {
        println!("{class:40} {refused:4} refused {equal:3} proved, with the same numbers");
    }
    assert_eq!(tally.len(), CLASSES.len() + 4, "{tally:?}");
    for (class, [refused, _]) in tally {
        assert!(refused >= 1, "{class}: none was refused");
    }
}
