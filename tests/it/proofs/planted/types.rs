//! Types of plans: every obligation holds by rule and by evaluation. Of obligations with a mistake, those
//! that the rule takes hold by evaluation, and each kind of mistake is refused by both.

use super::super::{Case, DP2_TP2, ring};
use super::planted;
use crate::fixture::options;
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::Op;
use shardc_ir::types::{AtomList, State};
use shardc_passes::options::CpSplit;
use shardc_prove::Verdict;
use shardc_prove::local::{Fault, Held, Obligation, obligations};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// By evaluation on meshes of two and three ranks. Pieces that do not even fit each other end it.
fn evaluated(o: &Obligation, mesh: &Mesh) -> bool {
    [2, 3].into_iter().all(|ways| {
        catch_unwind(AssertUnwindSafe(|| o.by_evaluation(mesh, ways).is_ok())).unwrap_or(false)
    })
}

/// Obligations of layouts with their meshes.
fn all() -> Vec<(Obligation, Mesh)> {
    let mut out: Vec<(Obligation, Mesh)> = vec![];
    for (name, o) in planted() {
        let case = Case::new(name, &o);
        let m = &case.texts.programs;
        let found = obligations(m);
        assert_eq!(found.faults, [], "{name}");
        assert!(found.all.len() > 100, "{name}: {} obligations", found.all.len());
        out.extend(found.all.into_iter().map(|(o, _)| (o, m.mesh.clone())));
    }
    out
}

#[test]
fn types_hold_by_rule_and_by_evaluation() {
    for (o, mesh) in all() {
        assert_eq!(o.by_rule(&mesh), Ok(()), "{o:?}");
        for ways in [2, 3] {
            assert_eq!(o.by_evaluation(&mesh, ways), Ok(()), "on {ways}: {o:?}");
        }
    }
}

/// A type with another state over an axis; `None` if it has no such dim, or it is cut by others too.
fn with(h: &Held, a: Atom, to: State) -> Option<Held> {
    let mut h = h.clone();
    h.ty.clear(a);
    let one = AtomSet::one(a);
    match to {
        State::Invariant => {}
        State::Replicated => h.ty.replicated = h.ty.replicated.union(one),
        State::Varying => h.ty.varying = h.ty.varying.union(one),
        State::Partial(r) => *h.ty.pending_mut(r) = h.ty.pending(r).union(one),
        State::Sharded(d) => {
            let dim = h.ty.dims.get_mut(d)?;
            dim.atoms = dim.atoms.push(a)?;
        }
    }
    Some(h)
}

fn word(s: State) -> &'static str {
    match s {
        State::Invariant => "I",
        State::Replicated => "R",
        State::Sharded(_) => "S",
        State::Varying => "V",
        State::Partial(_) => "P",
    }
}

/// Mistakes of an obligation, by kind.
#[expect(clippy::too_many_lines, reason = "a list")]
fn mistakes(o: &Obligation, mesh: &Mesh) -> Vec<(String, Obligation)> {
    use shardc_ir::types::Reduction::Sum;
    let mut out = vec![];
    let held = |result: bool, o: &Obligation| if result { o.outs.len() } else { o.ins.len() };
    for result in [false, true] {
        for k in 0..held(result, o) {
            let h = if result { &o.outs[k] } else { &o.ins[k] };
            for a in (0..mesh.atoms.len() as u8).map(Atom).filter(|a| mesh.size(*a) > 1) {
                let is = h.ty.state(a);
                let dims = (0..h.ty.rank()).map(State::Sharded);
                let to = [State::Invariant, State::Replicated, State::Partial(Sum)];
                for to in to.into_iter().chain(dims).filter(|s| *s != is) {
                    let Some(other) = with(h, a, to) else { continue };
                    let mut m = o.clone();
                    if result {
                        m.outs[k] = other
                    } else {
                        m.ins[k] = other
                    }
                    let side = if result { "result" } else { "operand" };
                    out.push((format!("{side} {} for {}", word(to), word(is)), m));
                }
            }
            // The axes of two dims, or of one, exchanged.
            for d in 0..h.ty.rank() {
                let list: Vec<Atom> = h.ty.dims[d].atoms.iter().rev().collect();
                if list.len() < 2 {
                    continue;
                }
                let mut m = o.clone();
                let h = if result { &mut m.outs[k] } else { &mut m.ins[k] };
                h.ty.dims[d].atoms = AtomList::collect(list).expect("as many");
                out.push(("order of axes".into(), m));
            }
        }
    }
    let mut changed = |kind: &str, op: Op| {
        if op != o.op {
            out.push((kind.into(), Obligation { op, ..o.clone() }));
        }
    };
    let others = |axes: AtomSet| -> Vec<AtomSet> {
        let all = (0..mesh.atoms.len() as u8).map(|a| AtomSet::one(Atom(a)));
        all.filter(|a| *a != axes).collect()
    };
    macro_rules! of_group {
        ($($op:ident),*) => {
            match &o.op {
                $(Op::$op(k) => for axes in others(k.axes) {
                    let mut k = k.clone();
                    k.axes = axes;
                    changed("other axes", k.into());
                },)*
                _local => {}
            }
        };
    }
    of_group!(
        FanOut,
        AllReduce,
        AllGather,
        ReduceScatter,
        Broadcast,
        Reduce,
        Slice,
        PadToPartial,
        AllToAll,
        Exchange,
        AllToAllV,
        Permute,
        ToVarying,
        FromVarying,
        RingShard
    );
    macro_rules! of_dim {
        ($($op:ident),*) => {
            match &o.op {
                $(Op::$op(k) => for dim in 0..o.ins[0].ty.rank() {
                    let mut k = k.clone();
                    k.dim = dim;
                    changed("other dim", k.into());
                },)*
                _local => {}
            }
        };
    }
    of_dim!(
        AllGather,
        ReduceScatter,
        Broadcast,
        Reduce,
        Slice,
        PadToPartial,
        ToVarying,
        FromVarying,
        RingShard
    );
    match &o.op {
        Op::Permute(k) => {
            let mut k = k.clone();
            k.shift += 1;
            changed("other shift", k.into());
        }
        Op::RingShard(k) => {
            let mut k = k.clone();
            k.shift += 1;
            changed("other shift", k.into());
        }
        Op::AllToAll(k) => {
            let mut k = k.clone();
            (k.from, k.to) = (k.to, k.from);
            changed("other way", k.into());
        }
        _other => {}
    }
    for k in 0..o.ins.len() + o.outs.len() {
        let mut m = o.clone();
        let h = m.ins.iter_mut().chain(&mut m.outs).nth(k).expect("one of them");
        let Some(b) = h.blocks.first_mut() else { continue };
        b.shift = (b.shift + 1) % mesh.ways(b.axes);
        out.push(("another block".into(), m));
    }
    out
}

/// Ops of which another type may mean the same data: evaluation deals what types say, and so takes a
/// piece for the whole where both sides do, or a largest element that all ranks have.
const SAME_DATA: [&str; 9] = [
    "reduce_max",
    "expand",
    "draw",
    "index_add",
    "slice",
    "reduce_scatter",
    "all_to_all",
    "fan_out",
    "reshape",
];

#[test]
fn mistakes_in_types_are_refused() {
    // By kind: refused by both, by the rule alone, and by none.
    let mut tally: BTreeMap<String, [usize; 3]> = BTreeMap::new();
    for (o, mesh) in all() {
        for (kind, m) in mistakes(&o, &mesh) {
            let (by_rule, holds) = (m.by_rule(&mesh), evaluated(&m, &mesh));
            let what = || format!("{kind}: {by_rule:?}: {m:?}");
            assert!(by_rule.is_err() || holds, "taken by rule, refused by evaluation: {}", what());
            assert!(!matches!(by_rule, Err(Fault::Unknown(_))), "no rule: {}", what());
            let alone = by_rule.is_err() && holds;
            // I and R are the same data, and what varies may be anything. Which blocks are used
            // together is known by rule alone.
            let free = ["I for R", "R for I", "I for V", "R for V", "another block"];
            let known =
                free.iter().any(|k| kind.ends_with(k)) || SAME_DATA.contains(&m.op.mnemonic());
            assert!(!alone || known, "refused by rule, taken by evaluation: {}", what());
            let n = tally.entry(kind).or_default();
            n[if alone { 1 } else { 2 * usize::from(holds) }] += 1;
        }
    }
    for (kind, n) in &tally {
        println!("{kind:20} {:5} refused by both {:5} by rule alone {:5} legal", n[0], n[1], n[2]);
    }
    assert!(tally.len() > 35, "{} kinds", tally.len());
    for (kind, [both, ..]) in tally {
        let free = ["I for R", "R for I", "P for P"].iter().any(|k| kind.ends_with(k));
        assert!(both > 0 || free, "{kind}: none was refused by both");
    }
}

/// A wrong type is told with op, operands, layer and stage; by evaluation no less.
#[test]
fn a_wrong_type_is_refuted_with_its_place() {
    let mut case = Case::new("llama_gqa", &ring(CpSplit::Zigzag, &[("cp", 4)]));
    let mut m = case.texts.programs.clone();
    let back = m.funcs.iter_mut().filter(|f| f.name == "backward").flat_map(|f| &mut f.nodes);
    let home = back.into_iter().filter_map(|n| match &mut n.op {
        Op::Permute(k) => Some(k),
        _other => None,
    });
    // The last block of a gradient goes one place too far.
    home.last().expect("a ring").shift = 2;
    let r = case.judge(&m);
    assert_eq!(r.verdict(), Verdict::Refuted);
    let x = &r.refuted[0];
    assert_eq!(x.what, "types of `from_varying`");
    assert!(x.plan.contains("the blocks are those of 1 places before"), "{x:#?}");
    let place = x.plan_place.as_deref().unwrap_or_default();
    assert!(place.starts_with("@backward, model.layers.0.self_attn: "), "{x:#?}");
    assert_eq!(case.texts.evaluate(&mut |_| ()).verdict(), Verdict::Refuted);
}

/// What one function makes and another takes has one type.
#[test]
fn a_role_of_two_types_is_refuted() {
    let mut case = Case::new("llama_gqa", &options(DP2_TP2, false, 2));
    let mut m = case.texts.programs.clone();
    let f = m.funcs.iter_mut().find(|f| f.name == "optimizer_step").expect("a step ends");
    let gathered = f.args.iter().find(|a| !f.ty(a.value).sharded().is_empty()).expect("a piece");
    let v = gathered.value;
    let t = &mut f.values[v].ty;
    t.dims.iter_mut().for_each(|d| d.atoms = AtomList::EMPTY);
    let r = case.judge(&m);
    assert_eq!(r.verdict(), Verdict::Refuted);
    assert!(r.refuted.iter().any(|x| x.what.starts_with("type of ")), "{:#?}", r.refuted);
}
