//! Wrong declarations of ops, planted: the types that `ir` infers from them are what a plan would
//! have then, and `prove` refuses them, but for those that hold all the same. No source is changed
//! for it: `infer` is asked with another rule, other linear operands or another reduction than the
//! op declares.

use shardc_ir::infer::{Linear, Query, infer};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::Op;
use shardc_ir::rule::Rule;
use shardc_ir::samples::{self, Sample};
use shardc_ir::text::parse;
use shardc_ir::types::{AtomList, Reduction, Type};
use shardc_prove::local::{self, Fault, Held, Obligation};
use shardc_prove::{Report, Verdict};
use std::collections::BTreeMap;

const TP: Atom = Atom(0);

/// What `ir` declares of an op, to be made wrong.
#[derive(Clone)]
struct Declared {
    rule: Rule,
    linear: Linear,
    reduction: Reduction,
    /// Letters that the results lack are not reduced.
    forgets: bool,
}

/// An op's declaration with one mistake, by kind.
fn mistakes(right: &Declared, operands: usize) -> Vec<(&'static str, Declared)> {
    let mut all = vec![];
    let linear = (0..operands).map(|i| Linear::Each(1 << i)).chain([Linear::Together(!0)]);
    for linear in linear.filter(|l| *l != right.linear) {
        all.push(("an operand is called linear", Declared { linear, ..right.clone() }));
    }
    let letters = right.rule.letters().into_iter();
    let whole: Vec<_> = letters.filter(|&l| right.rule.is_whole(l)).collect();
    let ins: Vec<_> = right.rule.ins.iter().collect();
    let outs: Vec<_> = right.rule.outs.iter().collect();
    // All of them, and each one.
    for cut in whole.iter().map(|&l| vec![l]).chain([whole.clone()]).filter(|c| !c.is_empty()) {
        let mut rule = Rule::of(&ins, &outs);
        whole.iter().filter(|l| !cut.contains(l)).for_each(|&l| rule.keep_whole(l));
        all.push(("a letter that must be whole is cut", Declared { rule, ..right.clone() }));
    }
    for reduction in [Reduction::Sum, Reduction::Max, Reduction::Min] {
        if reduction != right.reduction {
            all.push(("a letter is reduced otherwise", Declared { reduction, ..right.clone() }));
        }
    }
    all.push(("a letter is not summed", Declared { forgets: true, ..right.clone() }));
    all
}

/// What ranks hold of operands: a letter is cut in all that have it, or some are still to be
/// reduced; the others are the same on all ranks, as each one uses them.
fn operands(s: &Sample, rule: &Rule) -> Vec<Vec<Type>> {
    let axis = AtomSet::one(TP);
    let same = |t: &Type| Type { replicated: axis, ..t.clone() };
    let mut all = vec![];
    for l in rule.letters() {
        let mut ins: Vec<Type> = s.ins.iter().map(same).collect();
        for (t, dims) in ins.iter_mut().zip(&rule.ins) {
            let Some(d) = dims.iter().position(|g| g.letters().first() == Some(&l)) else {
                continue;
            };
            t.replicated = AtomSet::EMPTY;
            t.dims[d].atoms = AtomList::collect([TP]).expect("one axis");
        }
        all.push(ins);
    }
    let n = s.ins.len();
    let subsets = (0..n).map(|i| vec![i]).chain([(0..n).collect()]);
    for subset in subsets.filter(|s: &Vec<usize>| !s.is_empty()) {
        for r in [Reduction::Sum, Reduction::Max, Reduction::Min] {
            let mut ins: Vec<Type> = s.ins.iter().map(same).collect();
            for &i in &subset {
                ins[i].replicated = AtomSet::EMPTY;
                *ins[i].pending_mut(r) = axis;
            }
            all.push(ins);
        }
    }
    all
}

/// The types of results that `ir` would infer.
fn inferred(mesh: &Mesh, op: &Op, ins: &[&Type], d: &Declared) -> Option<Vec<Type>> {
    let dtypes = op.def().dtypes(ins, d.rule.outs.len());
    let mut made = infer(&Query {
        mesh,
        rule: &d.rule,
        ins,
        sizes: op.def().sizes(),
        declared: &[],
        dtypes: &dtypes,
        linear: d.linear,
        reduction: d.reduction,
    })
    .ok()?
    .to_vec();
    if d.forgets {
        let lost = ins.iter().any(|t| !t.sharded().is_empty());
        for t in made.iter_mut().filter(|t| lost && t.sum.has(TP)) {
            t.sum = AtomSet::EMPTY;
            t.replicated = AtomSet::one(TP);
        }
    }
    Some(made)
}

#[test]
fn types_that_follow_from_a_wrong_declaration_are_refused() {
    let mesh = Mesh::new(&[("tp", 2)]).expect("a mesh");
    let mut refused: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for s in samples::all() {
        let ranks: Vec<usize> = s.ins.iter().map(Type::rank).collect();
        let def = s.op.def();
        let right = Declared {
            rule: def.rule(&ranks).into_owned(),
            linear: def.linear(),
            reduction: def.reduction(),
            forgets: false,
        };
        if s.ins.is_empty() {
            continue;
        }
        for ins in operands(&s, &right.rule) {
            let held: Vec<&Type> = ins.iter().collect();
            let truth = s.op.check(&mesh, &held, &[]).ok().map(|t| t.to_vec());
            let obligation = |outs: &[Type]| {
                let held = |t: &Type| Held { ty: t.clone(), blocks: vec![] };
                let (ins, outs) = (ins.iter().map(held).collect(), outs.iter().map(held).collect());
                Obligation { op: s.op.clone(), ins, outs }
            };
            if let Some(outs) = &truth {
                assert_eq!(obligation(outs).by_rule(&mesh), Ok(()), "{}: {ins:?}", s.text);
            }
            for (what, wrong) in mistakes(&right, ins.len()) {
                let Some(made) = inferred(&mesh, &s.op, &held, &wrong) else { continue };
                if truth.as_ref() == Some(&made) {
                    continue;
                }
                let o = obligation(&made);
                let place = || format!("{what}: {}: {ins:?} -> {made:?}", s.text);
                match o.by_rule(&mesh) {
                    Err(Fault::Wrong(_)) => {
                        *refused.entry((what, s.op.mnemonic())).or_default() += 1;
                    }
                    Err(Fault::Unknown(lemma)) => panic!("{}: {lemma}", place()),
                    // Such as the largest of what is cast.
                    Ok(()) => {
                        for ways in [2, 3] {
                            assert_eq!(o.by_evaluation(&mesh, ways), Ok(()), "{}", place());
                        }
                    }
                }
            }
        }
    }
    let ops =
        |kind: &str| -> Vec<&str> { refused.keys().filter(|k| k.0 == kind).map(|k| k.1).collect() };
    let kinds = [
        (
            "an operand is called linear",
            &["exp", "silu", "max", "div", "attention", "rope", "adamw"][..],
        ),
        (
            "a letter that must be whole is cut",
            &["rope", "attention", "top_k", "cumsum", "concat", "route"],
        ),
        (
            "a letter is reduced otherwise",
            &["dot", "reduce_sum", "reduce_max", "take", "grouped_outer"],
        ),
        (
            "a letter is not summed",
            &["dot", "reduce_sum", "take", "index_add", "attention_grad", "combine_gates_grad"],
        ),
    ];
    for (kind, some) in kinds {
        let all = ops(kind);
        println!("{kind}: {} ops: {}", all.len(), all.join(", "));
        assert!(some.iter().all(|op| all.contains(op)), "{kind}: {all:?}");
    }
}

/// A program of two ranks: its types by the lines, and the verdict.
fn verdict(lines: &str) -> (Verdict, String) {
    let text = format!(
        "mesh [tp=2]

func @mlp(%x: f32[4,8]~tp, %w1: f32[8,16@tp], %w2: f32[16@tp,8]) -> f32[4,8] {{
  %h = dot[mk,kn->mn] %x, %w1 : f32[4,16@tp]
{lines}
  return %y
}}
"
    );
    let mut report = Report::default();
    local::prove(&parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}")), true, &mut report);
    let said = report.refuted.first().map(|r| r.plan.clone()).unwrap_or_default();
    (report.verdict(), said)
}

/// The programs that partition would make of one layer by wrong declarations.
#[test]
fn programs_that_follow_from_a_wrong_declaration_are_refused() {
    let right = "  %a = gelu %h : f32[4,16@tp]
  %p = dot[mn,nk->mk] %a, %w2 : f32[4,8]+tp
  %y = all_reduce[tp] %p : f32[4,8]";
    assert_eq!(verdict(right), (Verdict::Proved, String::new()));
    // `n` of the dot is not summed: no all_reduce.
    let (is, said) =
        verdict("  %a = gelu %h : f32[4,16@tp]\n  %y = dot[mn,nk->mk] %a, %w2 : f32[4,8]");
    assert_eq!(is, Verdict::Refuted);
    assert!(said.contains("result 0 is"), "{said}");
    // gelu is linear: the sum is taken behind it.
    let (is, said) = verdict(
        "  %p = dot[mn,nk->mk] %h, %w2 : f32[4,8]+tp
  %a = gelu %p : f32[4,8]+tp
  %y = all_reduce[tp] %a : f32[4,8]",
    );
    assert_eq!(is, Verdict::Refuted);
    assert!(said.contains("not linear"), "{said}");
}
