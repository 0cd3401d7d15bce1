//! Mistakes planted in the exchange of states between ranks: each leaves other numbers, and is not proved.

use super::super::Case;
use super::apart;
use crate::documents::PACKED;
use crate::fixture::*;
use shardc_ir::documents::Documents;
use shardc_ir::func::{Func, Value};
use shardc_ir::ops::{Dot, Narrow, Op, Scan};
use shardc_ir::phase::Phase;
use shardc_ir::text::node_text;
use shardc_ir::verify::verify;
use shardc_passes::options::Options;
use shardc_prove::Verdict;

/// Changes a function in one node at the place that it is asked for, of those that the mistake has there.
type Plant = fn(&mut Func, usize) -> bool;

/// The node that makes a value.
fn maker(f: &Func, v: Value) -> Option<usize> {
    f.nodes.iter().position(|n| n.outs.contains(&v))
}

/// Whether a node is a map of a piece at work on a state.
fn maps(f: &Func, i: usize) -> bool {
    matches!(f.nodes[i].op, Op::Dot(_)) && f.nodes[i].ins.iter().all(|v| f.ty(*v).rank() == 5)
}

/// The states before pieces, one behind the other.
fn before(f: &Func, i: usize) -> bool {
    let state = |v: &Value| f.ty(*v).rank() == 5 && f.ty(*v).dims[1].size == 1;
    matches!(f.nodes[i].op, Op::Concat(_))
        && f.nodes[i].ins.len() > 2
        && f.nodes[i].ins.iter().all(state)
}

const CLASSES: &[(&str, &str, Plant)] = &[
    ("a map is transposed", "forward", |f, i| {
        let other = Dot::by("bcnjk,bcnjv->bcnkv", &[5, 5]);
        let is = maps(f, i) && f.nodes[i].op == Dot::by("bcnkj,bcnjv->bcnkv", &[5, 5]).into();
        if is {
            f.nodes[i].op = other.into();
        }
        is
    }),
    ("what another rank leaves, or its map", "forward", |f, i| {
        let Op::Narrow(k) = &f.nodes[i].op else { return false };
        let of = f.ty(f.nodes[i].ins[0]);
        let is = of.rank() == 5 && f.ty(f.nodes[i].outs[0]).dims[1].size == 1;
        let start = if k.start > 0 { k.start - 1 } else { 1 };
        let op = Narrow { start, ..k.clone() };
        if is {
            f.nodes[i].op = op.into();
        }
        is
    }),
    ("states of the piece before", "forward", |f, i| {
        let is = before(f, i);
        if is {
            let first = f.nodes[i].ins[0];
            f.nodes[i].ins.pop();
            f.nodes[i].ins.insert(1, first);
        }
        is
    }),
    ("a piece's own tokens are in the state before it", "forward", |f, i| {
        let is = before(f, i);
        if is {
            let last = f.nodes[i].ins[f.nodes[i].ins.len() - 1];
            f.nodes[i].ins.remove(0);
            f.nodes[i].ins.push(last);
        }
        is
    }),
    ("the gradient of a state does not go through a map", "backward", |f, i| {
        let n = &f.nodes[i];
        let Op::Add(_) = n.op else { return false };
        let through = |v: &Value| maker(f, *v).is_some_and(|j| maps(f, j));
        let at = n.ins.iter().position(through).filter(|_| n.ins.len() > 1);
        if let Some(at) = at {
            f.nodes[i].ins.remove(at);
        }
        at.is_some()
    }),
    ("a document that ends with a piece goes on", "forward", |f, i| {
        let n = &f.nodes[i];
        let Op::Mul(_) = n.op else { return false };
        let [state, keep] = n.ins[..] else { return false };
        let is = f.ty(state).rank() == 5 && f.ty(keep).rank() == 2;
        if is {
            let out = n.outs[0];
            f.nodes.iter_mut().flat_map(|n| n.ins.iter_mut()).for_each(|v| {
                *v = if *v == out { state } else { *v };
            });
        }
        is
    }),
    ("a state is not 0 again within a piece", "forward", |f, i| {
        let n = &f.nodes[i];
        let Op::Scan(k) = &n.op else { return false };
        let Some(at) = k.behind().segments else { return false };
        let op = Scan { segments: false, ..k.clone() };
        let n = &mut f.nodes[i];
        n.op = op.into();
        n.ins.remove(at);
        true
    }),
];

/// The exchange over four ranks, with documents that end within pieces and with them.
fn states(name: &'static str, without: &[&str]) {
    let o =
        Options { documents: Some(Documents::Ends(PACKED)), ..options(&[("cp", 4)], false, ROWS) };
    let mut case = Case::new(name, &o);
    for (i, t) in case.fx.input_ids.iter_mut().enumerate() {
        let ends = [1, 11, 13].contains(&(i % SEQ));
        let other = if *t == PACKED.end || Some(*t) == PACKED.padding { 3 } else { *t };
        *t = if ends { PACKED.end } else { other };
    }
    let plain = case.texts.programs.clone();
    assert_eq!(case.texts.prove().verdict(), Verdict::Proved, "{name}");
    let want = case.numbers(&plain).expect("a step");
    for (what, of, plant) in CLASSES.iter().filter(|c| !without.contains(&c.0)) {
        let (mut planted, mut seen) = (0, 0);
        let at = plain.funcs.iter().position(|f| f.name == *of).expect("a function");
        for i in 0..plain.funcs[at].nodes.len() {
            let mut other = plain.clone();
            if !plant(&mut other.funcs[at], i) || verify(&other, Phase::Ranked).is_err() {
                continue;
            }
            planted += 1;
            let got = case.numbers(&other).expect("a step");
            let line = node_text(&plain.mesh, &plain.funcs[at], &plain.funcs[at].nodes[i]).text;
            let verdict = case.judge(&other).verdict();
            if apart(&want, &got) > 1e-9 {
                seen += 1;
                assert_ne!(verdict, Verdict::Proved, "{name}: {what}: {line}");
            }
        }
        println!("{name}: {what}: {planted} planted, {seen} with other numbers");
        assert!(seen > 0, "{name}: {what}: {planted} planted, none with other numbers");
    }
}

#[test]
fn mistakes_of_states_by_the_delta_rule() {
    states("qwen3_next", &[]);
}

#[test]
fn mistakes_of_states_by_the_plain_rule() {
    // A map is a number for each head.
    let maps = ["a map is transposed", "the gradient of a state does not go through a map"];
    states("bamba", &maps);
}
