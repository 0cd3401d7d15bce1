//! Timelines for the tests of the pictures: orders as in the papers, run greedily.

use shardc_ir::schedule::ActionKind::{Backward, Forward, Input, Weight};
use shardc_ir::schedule::{Action, ActionKind, Slot, Timeline};
use std::collections::BTreeMap;

/// One action on the first rank, and others like it.
pub fn slot(kind: ActionKind, stage: usize, microbatch: usize, start: f64, end: f64) -> Slot {
    Slot { action: Action { kind, stage, microbatch }, start, end }
}

fn act(kind: ActionKind, stage: usize, microbatch: usize) -> Action {
    Action { kind, stage, microbatch }
}

/// A forward takes 1, each half of a backward 1.
fn unit(kind: ActionKind) -> f64 {
    if kind == Backward { 2.0 } else { 1.0 }
}

/// Starts each action as soon as its rank is free and the stage before it is done.
pub fn run(orders: &[Vec<Action>], last: usize, time: impl Fn(ActionKind) -> f64) -> Timeline {
    let mut done: BTreeMap<Action, f64> = BTreeMap::new();
    let mut t = Timeline { ranks: vec![vec![]; orders.len()], order: vec![] };
    let total: usize = orders.iter().map(Vec::len).sum();
    while t.order.len() < total {
        let before = t.order.len();
        for (rank, order) in orders.iter().enumerate() {
            let slots = &mut t.ranks[rank];
            while let Some(&a) = order.get(slots.len()) {
                let down = |k| done.get(&Action { kind: k, stage: a.stage + 1, ..a });
                let ready = match a.kind {
                    Forward if a.stage == 0 => Some(&0.0),
                    Forward => done.get(&Action { stage: a.stage - 1, ..a }),
                    Weight => done.get(&Action { kind: Input, ..a }),
                    Backward | Input if a.stage == last => done.get(&Action { kind: Forward, ..a }),
                    Backward | Input => down(Backward).or(down(Input)),
                };
                let Some(&ready) = ready else { break };
                let start = slots.last().map_or(0.0, |s| s.end).max(ready);
                let end = start + time(a.kind);
                done.insert(a, end);
                t.order.push((rank, slots.len()));
                slots.push(Slot { action: a, start, end });
            }
        }
        assert!(t.order.len() > before, "the order of the sample cannot run");
    }
    t
}

/// `warm` forwards, then forwards and backwards in turns, then the backwards that are left.
fn turns(forward: &[Action], backward: &[Action], warm: usize) -> Vec<Action> {
    let warm = warm.min(forward.len());
    let mut all = forward[..warm].to_vec();
    for (i, &b) in backward.iter().enumerate() {
        all.extend(forward.get(warm + i));
        all.push(b);
    }
    all
}

fn each(kind: ActionKind, stage: usize, m: usize) -> Vec<Action> {
    (0..m).map(|i| act(kind, stage, i)).collect()
}

/// 1F1B with times of the caller's choice.
pub fn timed(p: usize, m: usize, time: impl Fn(ActionKind) -> f64) -> Timeline {
    let order = |r| turns(&each(Forward, r, m), &each(Backward, r, m), p - 1 - r);
    run(&(0..p).map(order).collect::<Vec<_>>(), p - 1, time)
}

/// 1F1B.
pub fn one_f_one_b(p: usize, m: usize) -> Timeline {
    timed(p, m, unit)
}

/// All forwards, then all backwards.
pub fn gpipe(p: usize, m: usize) -> Timeline {
    let order = |r| [each(Forward, r, m), each(Backward, r, m)].concat();
    run(&(0..p).map(order).collect::<Vec<_>>(), p - 1, unit)
}

/// Interleaved 1F1B with `v` chunks per rank; `m` is a multiple of `p`.
pub fn interleaved(p: usize, m: usize, v: usize) -> Timeline {
    let order = |r: usize| {
        let nth = |kind, k: usize| {
            let chunk = k / p % v;
            let chunk = if kind == Forward { chunk } else { v - 1 - chunk };
            act(kind, chunk * p + r, k / (p * v) * p + k % p)
        };
        let all = |kind| (0..m * v).map(|k| nth(kind, k)).collect::<Vec<_>>();
        turns(&all(Forward), &all(Backward), (p - 1 - r) * 2 + (v - 1) * p)
    };
    run(&(0..p).map(order).collect::<Vec<_>>(), p * v - 1, unit)
}

/// A backward in two parts, the weights' part put off to where 1F1B would wait.
pub fn zero_bubble(p: usize, m: usize) -> Timeline {
    let order = |r: usize| {
        let mut all = vec![];
        let mut weights = each(Weight, r, m).into_iter();
        for (i, a) in turns(&each(Forward, r, m), &each(Input, r, m), p - 1 - r).iter().enumerate()
        {
            all.push(*a);
            let late = i >= p - 1 - r && a.kind == Input && a.microbatch >= r;
            all.extend(if late { weights.next() } else { None });
        }
        all.extend(weights);
        all
    };
    run(&(0..p).map(order).collect::<Vec<_>>(), p - 1, unit)
}
