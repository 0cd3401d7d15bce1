//! The loops of two groups of nodes are those that all of these nodes have, found at once.

use super::module;
use shardc_ir::func::{Func, Node, Value};
use shardc_ir::group::{IterationSpace, LoopSpace};
use shardc_ir::ops::FusionClass;
use shardc_ir::rng::Stream;
use std::fmt::Write as _;

/// Random work on the rows and columns of matrices.
fn program(seed: u32) -> Func {
    let s = Stream::new(5, "loops", seed);
    let mut k = 0;
    let mut roll = |n: usize| {
        k += 1;
        (s.uniform(k) * n as f64) as usize
    };
    let mut lines = String::new();
    let name = |kind: char, i: usize| format!("%{kind}.{}", i + 1);
    let mut count = [2, 1, 1];
    for _ in 0..12 {
        let [x, y] = [(); 2].map(|()| name('x', roll(count[0])));
        let (r, c) = (name('r', roll(count[1])), name('c', roll(count[2])));
        let (to, text) = match roll(9) {
            0 => (0, format!("exp {x} : f32[4,4]")),
            1 => (0, format!("add {x}, {y} : f32[4,4]")),
            2 => (0, format!("mul[ab,ba->ab] {x}, {y} : f32[4,4]")),
            3 => (0, format!("mul[ab,a->ab] {x}, {r} : f32[4,4]")),
            4 => (0, format!("mul[ab,b->ab] {x}, {c} : f32[4,4]")),
            5 => (1, format!("dot[ab,ab->a] {x}, {y} : f32[4]")),
            6 => (1, format!("reduce_sum[ab->a] {x} : f32[4]")),
            7 => (1, format!("add {r}, {c} : f32[4]")),
            _ => (2, format!("reduce_sum[ab->b] {x} : f32[4]")),
        };
        count[to] += 1;
        let _ = writeln!(lines, "  {} = {text}", name(['x', 'r', 'c'][to], count[to] - 1));
    }
    let last = name('x', count[0] - 1);
    let args = "%x.1: f32[4,4], %x.2: f32[4,4], %r.1: f32[4], %c.1: f32[4]";
    let text = format!("({args}) -> (f32[4,4]) {{\n{lines}  return {last}\n}}");
    module(&text).funcs.swap_remove(0)
}

/// The dims of all values by the place of their loops among those of the kernel.
fn places(s: &IterationSpace, all: &[Value]) -> Vec<Option<Vec<usize>>> {
    let loops: Vec<u8> = s.rows.iter().chain(&s.cols).copied().collect();
    let place = |a: &u8| loops.iter().position(|l| l == a).expect("a loop of the kernel");
    all.iter().map(|&v| Some(s.axes(v)?.iter().map(place).collect())).collect()
}

#[test]
fn those_of_two_groups_are_those_of_all_their_nodes() {
    let (mut kernels, mut others) = (0, 0);
    for seed in 0..200 {
        let f = program(seed);
        let values: Vec<Value> = (0..f.values.len() as u32).map(Value).collect();
        let s = Stream::new(6, "pairs", seed);
        let mut groups: Vec<(Vec<usize>, Option<LoopSpace>)> = (0..f.nodes.len())
            .map(|i| (vec![i], LoopSpace::of(&f, std::iter::once((i, &f.nodes[i])))))
            .collect();
        for k in 0..60 {
            let [a, b] = [0, 1].map(|i| (s.uniform(2 * k + i) * groups.len() as f64) as usize);
            if a == b {
                continue;
            }
            let mut all = [&groups[a].0[..], &groups[b].0[..]].concat();
            all.sort_unstable();
            let nodes = || all.iter().map(|&i| &f.nodes[i]);
            let classes: Vec<(&Node, FusionClass)> =
                nodes().filter_map(|n| Some((n, n.op.facts().fusion?))).collect();
            let both = groups[a].1.as_ref().zip(groups[b].1.as_ref());
            let joined = both.and_then(|(x, y)| x.and(y)).and_then(|x| x.space(&f, &classes));
            let whole = IterationSpace::of(&f, nodes());
            let of = |s: &Option<IterationSpace>| {
                s.as_ref().map(|s| (s.rows.len(), s.cols.len(), places(s, &values)))
            };
            assert_eq!(of(&joined), of(&whole), "{seed}: {all:?}");
            let Some(joined) = joined else {
                others += 1;
                continue;
            };
            kernels += 1;
            groups[a] = (all, Some(joined.loops));
            groups.swap_remove(b);
        }
    }
    assert!(kernels > 500 && others > 500, "{kernels} kernels, {others} others");
}
