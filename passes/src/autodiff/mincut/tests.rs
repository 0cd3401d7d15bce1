//! What is saved by the cut, against all choices of small programs, one by one.

use super::*;
use crate::autodiff::split::cut;
use shardc_ir::attr::RuleAttr;
use shardc_ir::builder::Builder;
use shardc_ir::func::{Name, Part, Port, Role, RoleKind};
use shardc_ir::ops::{Dot, Exp, Mul, Pad, ReduceSum, Tanh, Transpose};
use shardc_ir::rng::Stream;
use shardc_ir::types::Type;

/// Ops over rows, products, folds and views at random, some of whose values backward reads.
fn program(seed: u32) -> (Mesh, Func) {
    let s = Stream::new(3, "cuts", seed);
    let mut k = 0;
    let mut roll = |n: usize| {
        k += 1;
        (s.uniform(k) * n as f64) as usize
    };
    let (mesh, mut f) = (Mesh::default(), Func::new("forward"));
    let mut arg = |name: &'static str, sizes: &[usize]| {
        let role = Role::new(RoleKind::Unsharded, name);
        f.arg(Type::f32(sizes), Name::parse(name), Some(role))
    };
    let rule = |text: &str| RuleAttr::new(text, &[2]);
    let (weight, row) = (arg("w", &[8, 8]), arg("row", &[8]));
    let mut b = Builder::new(&mesh, &mut f);
    // Values of 8 x 8 and of 8.
    let (mut wide, mut thin) = (vec![weight], vec![row]);
    for _ in 0..6 + roll(5) {
        let (x, y, t) = (wide[roll(wide.len())], wide[roll(wide.len())], thin[roll(thin.len())]);
        match roll(9) {
            0 => wide.push(b.push("dot", Dot::by("ab,cb->ac", &[2, 2]), &[x, weight])),
            1 => thin.push(b.push("sum", ReduceSum { rule: rule("ab->a") }, &[x])),
            2 => thin.push(b.push("exp", Exp {}, &[t])),
            3 => wide.push(b.push("scaled", Mul::by("ab,a->ab", &[2, 1]), &[x, t])),
            4 => wide.push(b.push("mul", Mul::same(), &[x, y])),
            5 => wide.push(b.push("turned", Transpose { rule: rule("ab->ba") }, &[x])),
            6 => wide.push(b.push("exp", Exp {}, &[x])),
            7 => wide.push(b.push("shifted", Pad::new(1, 8), &[x])),
            _ => wide.push(b.push("tanh", Tanh {}, &[x])),
        }
    }
    let forward = b.f.nodes.len();
    let mut grad = weight;
    for _ in 0..1 + roll(4) {
        let read = match roll(2) {
            0 => wide[roll(wide.len())],
            _ => b.push("d", Mul::by("ab,a->ab", &[2, 1]), &[weight, thin[roll(thin.len())]]),
        };
        grad = b.push("d", Mul::same(), &[grad, read]);
    }
    if grad != weight {
        f.results.push(Port { value: grad, role: Some(Role::new(RoleKind::Grad, "w")) });
    }
    f.nodes[forward..].iter_mut().for_each(|n| n.part = Part::Backward);
    (mesh, f)
}

/// Bytes that forward saves where backward redoes these nodes.
fn saved(mesh: &Mesh, f: &Func, again: &[bool]) -> usize {
    let parts = cut(f, again.to_vec(), 1, true, false);
    let stash = parts[0]
        .results
        .iter()
        .filter(|r| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Stash));
    stash.map(|r| parts[0].ty(r.value).local_bytes(mesh)).sum()
}

#[test]
fn no_other_choice_saves_fewer_bytes() {
    let (mut fewer, mut choices) = (0, 0);
    for seed in 0..400 {
        let (mesh, f) = program(seed);
        let forward = f.forward_nodes();
        let (runs, leaves) = (vec![None; forward], vec![false; forward]);
        let always: Vec<bool> = f.nodes[..forward].iter().map(|n| n.op.def().is_view()).collect();
        let p = Forward { mesh: &mesh, func: &f, runs: &runs, always: &always, leaves: &leaves };
        let with = |more: &[bool]| -> Vec<bool> {
            always.iter().zip(more).map(|(always, more)| always | more).collect()
        };
        let found = redone(&p);
        let found_bytes = saved(&mesh, &f, &with(&found));
        let each = |n: &usize| {
            let op = &f.nodes[*n].op;
            op.facts().fusion == Some(FusionClass::Each) || op.def().halo().is_some()
        };
        let may: Vec<usize> = (0..forward).filter(each).collect();
        let mut least = (usize::MAX, 0);
        for mask in 0..1_usize << may.len() {
            let mut redone = vec![false; forward];
            may.iter().enumerate().for_each(|(i, &n)| redone[n] = mask >> i & 1 == 1);
            least = least.min((saved(&mesh, &f, &with(&redone)), mask.count_ones() as usize));
        }
        let none = saved(&mesh, &f, &always);
        assert_eq!(found_bytes, least.0, "seed {seed}: none saves {none}");
        fewer += usize::from(found_bytes < none);
        choices += usize::from(found.iter().any(|x| *x));
    }
    assert!(fewer > 100 && choices > 100, "{fewer} programs save less, {choices} redo something");
}
