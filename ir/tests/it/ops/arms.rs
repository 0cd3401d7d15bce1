//! What the files of ops say, and how many arms over ops stand elsewhere: what a new op may have to be told to.

use shardc_ir::kernel::{Body, Scalar};
use shardc_ir::ops::{FusionClass, Kind};
use shardc_ir::samples;
use std::fs;
use std::path::Path;

/// The mathematics of ops in the one, and their work in the other, are their own on purpose.
const OTHERS: [&str; 2] = ["prove/src", "cost/src"];
/// The ops themselves, and where each becomes a kernel, or Python.
const OWN: &[&str] = &["ir/src/ops/", "codegen/src/lower.rs", "export/src/torch/ops"];
/// Reads programs of other software: which groups of ops mean one of ours is its own knowledge, counted apart.
const IMPORT: &str = "frontends/src/import/";
/// Rules that rewrite programs: which ops each is about is what it says, counted apart.
const REWRITE: &str = "passes/src/rewrite/";
const MOST: usize = 40;
/// Of imports: more architectures are more ways to write the same.
const MOST_OF_IMPORTS: usize = 48;
const MOST_OF_REWRITING: usize = 23;

/// Patterns `Op::Name` in a file, tests aside. Nothing is constructed so: that is `Op::from`.
fn arms(text: &str) -> usize {
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or("");
    let starts = text.match_indices("Op::").filter(|&(at, _)| {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        !text[..at].ends_with(word) && text[at + 4..].starts_with(char::is_uppercase)
    });
    starts.count()
}

fn count(root: &Path, path: &Path, out: &mut Vec<(usize, String)>) {
    let name = path.strip_prefix(root).expect("below").to_string_lossy().into_owned();
    if path.is_dir() {
        let all = fs::read_dir(path).expect("a folder");
        all.for_each(|e| count(root, &e.expect("an entry").path(), out));
    } else if name.ends_with(".rs")
        && !name.ends_with("tests.rs")
        && !OWN.iter().any(|own| name.starts_with(own))
    {
        let text = fs::read_to_string(path).expect("a source file");
        out.push((arms(&text), name));
    }
}

#[test]
fn few_arms_stand_outside_the_files_of_ops() {
    assert_eq!(arms("Op::A(_) | Op::B(x) => Op::from(x), MyOp::C, Op::read"), 2);
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut all = vec![];
    let folders = shardc_testing::sources();
    folders
        .iter()
        .filter(|f| !OTHERS.contains(&f.as_str()))
        .for_each(|f| count(root, &root.join(f), &mut all));
    assert!(all.len() > 200, "{}", all.len());
    all.retain(|x| x.0 > 0);
    all.sort_by(|a, b| b.cmp(a));
    let (import, own): (Vec<_>, Vec<_>) = all.into_iter().partition(|x| x.1.starts_with(IMPORT));
    let (rules, own): (Vec<_>, Vec<_>) = own.into_iter().partition(|x| x.1.starts_with(REWRITE));
    for (all, most) in [(import, MOST_OF_IMPORTS), (rules, MOST_OF_REWRITING), (own, MOST)] {
        let sum: usize = all.iter().map(|x| x.0).sum();
        assert!(0 < sum && sum <= most, "{sum} arms: {all:#?}");
    }
}

/// What is part of rows says what it does to an element, for every result; what is none says nothing.
#[test]
fn ops_over_rows_say_what_they_do_to_an_element() {
    for s in samples::all() {
        let mut body = Body((0..s.ins.len()).map(Scalar::Load).collect());
        let x: Vec<usize> = (0..s.ins.len()).collect();
        let made = s.op.def().element(&mut body, &x).map(|r| r.len());
        let want = match s.op.facts().fusion {
            Some(FusionClass::Each) => Some(s.types().len()),
            Some(FusionClass::Fold) => Some(1),
            Some(FusionClass::Take | FusionClass::IndexAdd) => None,
            // A product of matrices is none, though other products are.
            None => made.filter(|_| s.op.facts().kind == Kind::Product),
        };
        assert_eq!(made, want, "{}", s.text);
    }
}
