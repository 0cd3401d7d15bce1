//! What values are made of: lists of atoms in one word, names whose words are kept once, rules that are made once.

use shardc_ir::func::{Func, Hint, Name, ValueInfo};
use shardc_ir::mesh::Atom;
use shardc_ir::ops::{AdamW, Dot, Op};
use shardc_ir::rule::Rule;
use shardc_ir::types::{AtomList, MAX_LISTED, Type};
use std::borrow::Cow;
use std::collections::HashSet;

/// A list in one word is the list of its atoms, whichever they are and however many.
#[test]
fn lists_of_atoms_are_their_atoms() {
    // The highest atoms there are, and a prefix of it of every length.
    let atoms: Vec<Atom> = (0..MAX_LISTED as u8).map(|i| Atom(31 - i)).collect();
    let full = AtomList::collect(atoms.iter().copied()).expect("so many fit");
    assert_eq!(full.push(Atom(0)), None);
    let mut seen = HashSet::new();
    for n in 0..=MAX_LISTED {
        let list = AtomList::collect(atoms[..n].iter().copied()).expect("so many fit");
        assert_eq!(list.iter().collect::<Vec<_>>(), atoms[..n]);
        assert_eq!(list.iter().rev().collect::<Vec<_>>(), {
            let mut back = atoms[..n].to_vec();
            back.reverse();
            back
        });
        assert_eq!((list.len(), list.is_empty()), (n, n == 0));
        assert_eq!((full.take(n), full.starts_with(list)), (list, true));
        assert_eq!((list.take(n + 1), list.starts_with(full)), (list, n == MAX_LISTED));
        assert_eq!(list.set().iter().count(), n);
        assert!(seen.insert(list), "{list:?} is a list of another length");
        // In the opposite order it is another list of the same atoms, as are its prefixes.
        let back = list.turned();
        assert_eq!((back.turned(), back.is_turned(), back.set()), (list, n > 0, list.set()));
        assert_eq!((back == list, full.turned().take(n)), (n == 0, back));
        // Atom 0 is an atom, too: a list of it is not empty.
        let more = list.push(Atom(0));
        assert!(more.is_none_or(|m| m != list && m.get(n) == Atom(0) && m.starts_with(list)));
    }
}

/// Compiling copies them some million times.
#[test]
fn values_are_small() {
    assert_eq!(size_of::<AtomList>(), 8);
    assert_eq!(size_of::<Type>(), 96);
    assert_eq!(size_of::<Name>(), 24);
    assert_eq!(size_of::<ValueInfo>(), 120);
}

/// Words are equal and ordered as their texts, wherever those come from.
#[test]
fn hints_are_their_texts() {
    let own = format!("{}{}", "qu", "ery");
    assert_eq!(Hint::from("query"), Hint::from(own));
    assert_ne!(Hint::from("query"), Hint::from("quer"));
    assert!(Hint::from("a") < Hint::from("b") && Hint::from("") < Hint::from("a"));
    assert!(Hint::from("q") == "q" && Hint::from("q") == *"q" && Hint::from("q") != "k");
    assert_eq!(Hint::from("q").to_string(), "q");
    let same: HashSet<Hint> = ["q", "k", "q"].into_iter().map(Hint::from).collect();
    assert_eq!(same.len(), 2);
}

/// The numbers of a name are the wanted ones where those are free, else the lowest that is.
#[test]
fn numbers_of_names() {
    let mut f = Func::new("f");
    let mut dup = |dup| {
        let name = Name { grad: false, layer: None, hint: "x".into(), dup };
        let v = f.value(Type::f32(&[]), name);
        f.name(v).dup
    };
    let wanted = [2, 2, 5, 4, 5, 0, 0, 4, 1, 7, 7];
    let given: Vec<u32> = wanted.into_iter().map(&mut dup).collect();
    assert_eq!(given, [2, 0, 5, 4, 1, 3, 6, 7, 8, 9, 10]);
}

/// What is made once is what is made anew.
#[test]
fn rules_are_those_of_their_texts() {
    let op: Op = Dot::by("mk,kn->mn", &[2, 2]).into();
    let rule = op.def().rule(&[2, 2]);
    assert_eq!(*rule, Rule::new("mk,kn->mn", &[2, 2]));
    let update: Op = AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, decay: 0.0 }.into();
    for rank in [2, 1, 2, 0] {
        let ranks = [rank, rank, rank, rank, 0, 0, 0];
        let rule = update.def().rule(&ranks);
        assert_eq!(*rule, Rule::new("..,..,..,..,,,->..,..,..", &ranks));
        // It is the same one when it is asked for again.
        let again = update.def().rule(&ranks);
        assert!(
            matches!((&rule, &again), (Cow::Borrowed(a), Cow::Borrowed(b)) if std::ptr::eq(*a, *b))
        );
    }
    for (n_in, n_out, rank) in [(1, 1, 0), (1, 1, 3), (3, 2, 5), (2, 1, 6), (9, 1, 2)] {
        assert_eq!(*Rule::same(n_in, n_out, rank), Rule::elementwise(n_in, n_out, rank));
    }
}
