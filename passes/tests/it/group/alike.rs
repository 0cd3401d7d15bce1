//! Launches that are alike are asked once, those that are only almost alike each by itself.

use super::module;
use shardc_ir::func::Func;
use shardc_ir::group::{FusionBuilder, Launch, Roles, launches};
use shardc_ir::rng::Stream;
use std::fmt::Write as _;

/// Some hundred short launches of few ops, most of them no kernel, over few values; some results are written over
/// arguments.
fn program(seed: u32) -> Func {
    let s = Stream::new(5, "alike", seed);
    let mut k = 0;
    let mut roll = |n: usize| {
        k += 1;
        (s.uniform(k) * n as f64) as usize
    };
    let args = "%f.1: f32[4,4], %f.2: f32[4,4], %h.1: bf16[4,4], %g.1: f32[4,4] grad \"1\", %g.2: f32[4,4] grad \"2\"";
    let (mut lines, mut results, mut names) = (String::new(), vec![], vec![]);
    // Values of 32 and of 16 bits.
    let mut known = [vec!["%f.1".to_string(), "%f.2".into()], vec!["%h.1".into()]];
    for i in 0..300 {
        let half = usize::from(roll(5) == 0);
        let near = |roll: &mut dyn FnMut(usize) -> usize| {
            let all = &known[half];
            match roll(6) {
                0 if half == 0 => format!("%g.{}", 1 + roll(2)),
                1 => all[roll(all.len())].clone(),
                _ => all[all.len() - 1 - roll(all.len().min(2))].clone(),
            }
        };
        let [x, y] = [(); 2].map(|()| near(&mut roll));
        // A product and the sum that it is added to.
        if half == 0 && roll(6) == 0 {
            let _ = writeln!(lines, "  %p{i} = dot[ab,bc->ac] {x}, {y} : f32[4,4] &");
            let _ = writeln!(lines, "  %v{i} = add %g.{}, %p{i} : f32[4,4]", 1 + roll(2));
            results.push(format!("f32[4,4] grad \"{}\"", 1 + roll(2)));
            names.push(format!("%v{i}"));
            continue;
        }
        let casts = roll(6) == 0;
        let half = if casts { 1 } else { half };
        let ty = ["f32[4,4]", "bf16[4,4]"][half];
        let op = match roll(5) {
            _ if casts => format!("cast[bf16] {x}"),
            0 => format!("exp {x}"),
            1 => format!("mul[ab,ba->ab] {x}, {y}"),
            2 | 3 => format!("add {x}, {y}"),
            _ => format!("dot[ab,bc->ac] {x}, {y}"),
        };
        let mark = [" &", ""][roll(2)];
        let _ = writeln!(lines, "  %v{i} = {op} : {ty}{mark}");
        known[half].push(format!("%v{i}"));
        if half == 0 && roll(8) == 0 {
            let role = ["", " grad \"1\"", " grad \"2\""][roll(3)];
            results.push(format!("f32[4,4]{role}"));
            names.push(format!("%v{i}"));
        }
    }
    let (results, names) = (results.join(", "), names.join(", "));
    let text = format!("({args}) -> ({results}) {{\n{lines}  return {names}\n}}");
    module(&text).funcs.swap_remove(0)
}

#[test]
fn what_is_known_of_launches_is_what_each_is_by_itself() {
    let mut counts = [0; 3];
    for seed in 0..80 {
        let f = program(seed);
        let (all, mut among) = (launches(&f), FusionBuilder::of(&f));
        let several = |x: &&Launch| x.nodes.len() > 1;
        let right: Vec<&Launch> = all
            .iter()
            .filter(|x| !several(x) || x.form(&mut FusionBuilder::of(&f)).is_some())
            .collect();
        for x in all.iter().filter(several) {
            assert_eq!(
                x.has_form(&mut among),
                x.form(&mut FusionBuilder::of(&f)).is_some(),
                "{seed}: {x:?}"
            );
        }
        let (epilogues, overs) = (Roles::of(&f), Roles::of(&f));
        for x in &right {
            let alone = || Roles::of(&f);
            assert_eq!(x.has_epilogue(&epilogues), x.has_epilogue(&alone()), "{seed}: {x:?}");
            assert_eq!(x.overs(&overs), x.overs(&alone()), "{seed}: {x:?}");
        }
        let joined = || right.iter().copied().filter(several);
        counts[0] += joined().count();
        counts[1] += joined().filter(|x| x.has_epilogue(&epilogues)).count();
        counts[2] += right.iter().filter(|x| !x.overs(&overs).concat().is_empty()).count();
    }
    assert!(counts.iter().all(|&n| n > 50), "{counts:?}");
}
