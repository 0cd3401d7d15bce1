//! Operands in states that do not go together are refused, with the collective that is missing.

use super::{apply, is_joined, letters, rule, split};
use shardc_ir::infer::Linear;
use shardc_ir::mesh::Mesh;
use shardc_ir::rule::has_letter;
use shardc_ir::samples;
use shardc_ir::types::Type;

#[test]
fn replicated_beside_invariant_is_refused() {
    let mesh = Mesh::new(&[("x", 2)]).expect("a mesh");
    for s in samples::all().iter().filter(|s| s.ins.len() > 1) {
        for i in 0..s.ins.len() {
            let mut ins = s.ins.clone();
            ins[i].replicated = mesh.all();
            let e = apply(&mesh, &s.op, &ins, &s.declared).expect_err(s.text);
            assert!(e.starts_with("mixed"), "{}: {e}", s.text);
        }
    }
}

#[test]
fn split_beside_invariant_or_pending_is_refused() {
    let mut tried = 0;
    for s in samples::all().iter().filter(|s| s.ins.len() > 1) {
        for (l, _) in letters(s) {
            let case = split(s, l, (&[2], &[0]));
            for i in (0..s.ins.len()).filter(|&i| !has_letter(&rule(s).ins[i], l)) {
                for pending in [false, true] {
                    let mut ins = case.ins.clone();
                    ins[i] = s.ins[i].clone();
                    if pending {
                        ins[i].sum = case.mesh.all();
                    }
                    let e = apply(&case.mesh, &s.op, &ins, &case.declared).expect_err(&case.what);
                    let conflict = is_joined(&rule(s), l) && e.starts_with("sharding-conflict");
                    let fits = conflict || e.starts_with("mixed") || e.starts_with("split");
                    assert!(fits, "{}: operand {i}: {e}", case.what);
                    tried += 1;
                }
            }
        }
    }
    assert!(tried > 50, "{tried}");
}

#[test]
fn one_letter_split_in_two_ways_is_refused() {
    for s in samples::all().iter().filter(|s| s.ins.len() > 1) {
        for (l, _) in letters(s) {
            let case = split(s, l, (&[2], &[0]));
            let having: Vec<usize> =
                (0..s.ins.len()).filter(|&i| has_letter(&rule(s).ins[i], l)).collect();
            for &i in having.iter().skip(1) {
                let mut ins = case.ins.clone();
                ins[i] = s.ins[i].clone();
                ins[i].replicated = case.mesh.all();
                let refused = apply(&case.mesh, &s.op, &ins, &case.declared);
                let e = refused.expect_err(&case.what);
                let fits = e.starts_with("sharding-conflict") || e.starts_with("split");
                assert!(fits, "{}: operand {i}: {e}", case.what);
            }
        }
    }
}

#[test]
fn sums_still_to_be_taken_stop_at_ops_that_are_not_linear() {
    let mesh = Mesh::new(&[("x", 2)]).expect("a mesh");
    for s in samples::all().iter().filter(|s| s.op.def().linear() == Linear::No) {
        for i in 0..s.ins.len() {
            let mut ins: Vec<Type> = s.ins.clone();
            ins.iter_mut().for_each(|t| t.replicated = mesh.all());
            ins[i].replicated = Default::default();
            ins[i].sum = mesh.all();
            let e = apply(&mesh, &s.op, &ins, &s.declared).expect_err(s.text);
            assert!(e.starts_with("partial"), "{}: {e}", s.text);
        }
    }
}

/// A sum of many operands has no limit at the 32 bits of the mask that says where it is linear.
#[test]
fn add_of_many_pending_operands() {
    let mesh = Mesh::new(&[("x", 2)]).expect("a mesh");
    let mut t = Type::f32(&[2]);
    t.sum = mesh.all();
    let ins = vec![t.clone(); 40];
    let f = apply(&mesh, &shardc_ir::ops::Add::same().into(), &ins, &[]).expect("linear");
    assert_eq!(f.ty(f.results[0].value), &t);
}

#[test]
fn a_softcap_is_a_positive_number() {
    let qkv = "f32[1,3,2,2], f32[1,3,1,2], f32[1,3,1,2]";
    let more = "f32[1,3,2], f32[1,3,2,2], f32[1,3,2],";
    for (cap, message) in [
        ("0", "positive"),
        ("-1.5", "positive"),
        ("inf", "positive"),
        ("NaN", "not a number"),
        ("none", "not a number"),
    ] {
        for (op, more) in [("attention", ""), ("attention_grad", more)] {
            let text =
                format!("{op}[0.5; mask=causal; softcap={cap}] {qkv}, {more} i32[3], i32[3]");
            let e = shardc_ir::samples::Sample::parse(text.clone().leak()).expect_err(&text);
            assert!(e.contains(message), "{text}: {e}");
        }
    }
}

#[test]
fn ops_of_experts_refuse_what_they_cannot_count() {
    for (text, message) in [
        ("top_k[te->tk,t; k=2] f32[3,5]", "one result"),
        ("top_k[te->tk; k=6] f32[3,5]", "6 of 5 elements"),
        ("top_k[te->t; k=2] f32[3,5]", "replaces one letter"),
        ("route[g=2,e=3; rows=1073741824; capacity=none] i32[2,3,2]", "up to 2147483647"),
        ("route[g=65536,e=65536; rows=1; capacity=none] i32[2,3,2]", "up to 2147483647"),
        ("route[g=2,e=3; rows=1099511627776; capacity=none] i32[2,3,2]", "up to 2147483647"),
        ("route[g=0,e=3; rows=4; capacity=none] i32[2,3,2]", "groups and experts"),
        ("route[z=2,e=3; rows=4; capacity=none] i32[2,3,2]", "groups and experts"),
        ("dispatch[g=2] f32[2,3,4], i32[2,3,2], f32[2,3,2]", "groups and rows"),
        ("dispatch[q=2,c=3] f32[2,3,4], i32[2,3,2], f32[2,3,2]", "`g`"),
        ("grouped_dot f32[2,2,3,4], f32[2,2,2], f32[4,5,4]", "i32 [g, e, z]"),
        ("grouped_dot f32[2,2,3,4], i32[2,2,2], f32[6,5,4]", "6"),
        ("concat[d=7] f32[2,3,4], f32[2,3,2]", "the sum of the operands' sizes"),
        ("narrow[p=2; start=1099511627776] f32[2,6]", "a range of one of its dims"),
        ("concat[d=5; dim=2] f32[2,3], f32[2,2]", "of which the named one is one"),
        ("narrow[p=2; start=1; dim=3] f32[2,6]", "a range of one of its dims"),
        ("narrow[p=3; start=0; step=3] f32[2,6]", "a range of one of its dims"),
        ("narrow[p=2; start=0; step=0] f32[2,6]", "a range of one of its dims"),
        ("pad[d=5; start=2; step=2] f32[3,3]", "holds one of its dims"),
        ("cumsum[2] f32[2,3]", "no dim 2"),
        ("cumsum[1; reverse=maybe] f32[2,3]", "neither true nor false"),
        ("round[up] f32[2,3]", "none of floor, ceil, even"),
        ("select f32[2,3], f32[2,3], bf16[2,3]", "one element type"),
        ("less f32[2,3], i32[2,3]", "one element type"),
        ("pad[d=6; start=6] f32[2,3,2]", "holds one of its dims"),
        ("pad[d=6; start=-2] f32[2,3,2]", "holds one of its dims"),
        ("pad[d=6; start=-1; step=2] f32[2,3,3]", "holds one of its dims"),
        ("pad[d=6; start=-1099511627776] f32[2,3,2]", "holds one of its dims"),
    ] {
        let e = shardc_ir::samples::Sample::parse(text).expect_err(text);
        assert!(e.contains(message), "{text}: {e}");
    }
}
