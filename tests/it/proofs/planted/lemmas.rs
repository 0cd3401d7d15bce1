//! A wrong lemma: terms prove a wrong plan by it, and evaluation, which knows no lemma, refuses it.

use super::super::{Case, found, grid, ring};
use shardc_ir::func::Func;
use shardc_ir::ops::Op;
use shardc_passes::options::{CpSplit, Options, TpMode, TpSteps};
use shardc_prove::field::prove_smaller;
use shardc_prove::lemmas::Lemmas;
use shardc_prove::{Verdict, by_form};

/// The wrong plan is proved by the wrong lemma alone.
fn caught(what: &str, name: &'static str, o: &Options, lemmas: Lemmas, plant: fn(&mut Func)) {
    let mut case = Case::new(name, o);
    assert_eq!(case.texts.prove().verdict(), Verdict::Proved, "{what}: the plan is right");
    let smaller = |case: &Case| prove_smaller(&case.texts.subject(), case.texts.data).verdict();
    assert_eq!(smaller(&case), Verdict::Proved, "{what}: the plan is right, by evaluation");
    let mut funcs = case.texts.programs.funcs.iter_mut();
    plant(funcs.find(|f| f.name == "forward").expect("forward"));
    assert_ne!(case.texts.prove().verdict(), Verdict::Proved, "{what}: by the right lemmas");
    let fooled = by_form(&case.texts.subject(), lemmas);
    assert_eq!(fooled.verdict(), Verdict::Proved, "{what}: {}", found(&fooled));
    assert_eq!(smaller(&case), Verdict::Refuted, "{what}: by evaluation");
}

fn summa() -> Options {
    grid(TpMode::TwoD, &[("tp", 4)], TpSteps::Summa)
}

/// Pieces of a grid that meet pieces of other numbers.
#[test]
fn crossed_pieces_of_a_grid() {
    let wrong = Lemmas { alike: |a, b| a.of == b.of, ..Lemmas::default() };
    caught("pieces", "llama_mha", &summa(), wrong, |f| {
        // Of the weights of one product: the last that is taken apart.
        let dot = f.nodes.iter().rposition(|n| {
            matches!(n.op, Op::Dot(_)) && {
                let made =
                    |v| f.nodes.iter().any(|n| n.outs[0] == v && matches!(n.op, Op::Broadcast(_)));
                n.ins.iter().all(|v| made(*v))
            }
        });
        let weight = f.nodes[dot.expect("a product in steps")].ins[1];
        let sent = f.nodes.iter().find(|n| n.outs[0] == weight).expect("a broadcast").ins[0];
        for n in f.nodes.iter_mut().filter(|n| n.ins.first() == Some(&sent)) {
            if let Op::Broadcast(k) = &mut n.op {
                k.from = 1 - k.from;
            }
        }
    });
}

/// A ring in which one block is seen twice, and another never.
#[test]
fn a_block_that_is_seen_twice() {
    let wrong = Lemmas { turn: |shifts, of| shifts.len() == of, ..Lemmas::default() };
    caught("blocks", "llama_gqa", &ring(CpSplit::Zigzag, &[("cp", 4)]), wrong, |f| {
        let calls = f.nodes.iter_mut().filter(|n| matches!(n.op, Op::Attention(_)));
        let [.., before, last] = &mut calls.collect::<Vec<_>>()[..] else { panic!("a ring") };
        last.ins = before.ins.clone();
    });
}
