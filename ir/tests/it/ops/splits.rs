//! A split op computes what the whole op computes; a sum still to be taken may pass linear ops.

use super::{Case, apply, close, is_joined, letters, pending, rule, run, split, splits};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::samples::{self, Sample};
use shardc_ir::tensor::Tensor;
use shardc_ir::types::{AtomList, Type};

/// Ops without operands have no letters to split; `fill` is of any declared type (tested below), a
/// `literal` is the same everywhere.
const UNSPLIT: &[&str] = &["literal", "fill"];

fn equals_whole(s: &Sample, case: &Case, seed: u64) {
    let ins = s.draw(seed);
    let want = s.eval(&ins.iter().collect::<Vec<_>>());
    let f = apply(&case.mesh, &s.op, &case.ins, &case.declared);
    let f = f.unwrap_or_else(|e| panic!("{}: {e}", case.what));
    let got = run(&case.mesh, &f, &ins).unwrap_or_else(|e| panic!("{}: {e}", case.what));
    for (o, (g, w)) in got.iter().zip(&want).enumerate() {
        close(g, w, 1e-12).unwrap_or_else(|e| panic!("{}: result {o}: {e}", case.what));
    }
}

#[test]
fn split_along_every_letter_equals_whole() {
    for s in samples::all() {
        let cases = splits(&s);
        assert_ne!(cases.is_empty(), !UNSPLIT.contains(&s.op.mnemonic()), "{}", s.text);
        for (i, case) in cases.iter().enumerate() {
            equals_whole(&s, case, i as u64);
        }
    }
}

#[test]
fn sums_still_to_be_taken_pass_linear_operands() {
    let mut tried = 0;
    for s in samples::all() {
        for case in pending(&s) {
            equals_whole(&s, &case, 3);
            tried += 1;
        }
    }
    assert!(tried > 20, "{tried}");
}

/// A dim made of two letters is split only into equal pieces.
#[test]
fn joined_letters_are_split_evenly_or_refused() {
    let mut tried = 0;
    for s in samples::all() {
        for (l, n) in letters(&s) {
            if is_joined(&rule(&s), l) && n % 3 != 0 {
                let case = split(&s, l, (&[3], &[0]));
                let e = apply(&case.mesh, &s.op, &case.ins, &case.declared).expect_err(&case.what);
                let known = e.starts_with("split") || e.starts_with("sharding-conflict");
                assert!(known, "{}: {e}", case.what);
                tried += 1;
            }
        }
    }
    assert!(tried >= 4, "{tried}");
}

#[test]
fn whole_letters_are_refused_when_split() {
    let mut tried = 0;
    for s in samples::all() {
        let rule = rule(&s);
        for (l, dims, t) in
            s.ins.iter().zip(&rule.ins).flat_map(|(t, dims)| {
                dims.iter().filter_map(|g| g.single()).map(move |l| (l, dims, t))
            })
        {
            let n = dims.iter().position(|g| g.single() == Some(l)).map(|d| t.dims[d].size);
            if rule.is_whole(l) && n > Some(1) {
                let case = split(&s, l, (&[2], &[0]));
                let e = apply(&case.mesh, &s.op, &case.ins, &case.declared).expect_err(&case.what);
                assert!(e.starts_with("needs-whole"), "{}: {e}", case.what);
                tried += 1;
            }
        }
    }
    assert!(tried > 5, "{tried}");
}

#[test]
fn fill_takes_any_declared_type_but_a_sum_of_ones() {
    let mesh = Mesh::new(&[("x", 2)]).expect("a mesh");
    let x = AtomSet::one(Atom(0));
    let s = samples::all();
    let fills: Vec<&Sample> = s.iter().filter(|s| s.op.mnemonic() == "fill").collect();
    assert!(fills.len() > 1);
    for s in fills {
        let whole = &s.eval(&[])[0];
        let mut types = vec![s.declared[0].clone()];
        let with = |f: fn(&mut Type, AtomSet)| {
            let mut t = s.declared[0].clone();
            f(&mut t, x);
            t
        };
        types.push(with(|t, x| t.replicated = x));
        types.push(with(|t, x| t.sum = x));
        types.push(with(|t, _| {
            let atoms = AtomList::collect([Atom(0)]).expect("one");
            t.dims.iter_mut().take(1).for_each(|d| d.atoms = atoms);
        }));
        for t in types {
            let refused = !t.sum.is_empty() && whole.data[0] != 0.0;
            let f = apply(&mesh, &s.op, &[], &[t]);
            assert_eq!(f.is_err(), refused);
            let Ok(f) = f else { continue };
            let got: Vec<Tensor> = run(&mesh, &f, &[]).expect("runs");
            assert_eq!(&got[0], whole);
        }
    }
}
