//! The form of the house: files that can be read in one go. Functions of more than 100 lines are clippy's to
//! find (`too_many_lines`).

use std::fs;
use std::path::{Path, PathBuf};

const CRATES: [&str; 9] = [
    "src",
    "ir/src",
    "cost/src",
    "frontends/src",
    "passes/src",
    "codegen/src",
    "runtime/src",
    "prove/src",
    "testing/src",
];
/// Lines of a file, its tests aside.
const MOST: usize = 500;

fn lines(text: &str) -> usize {
    text.split("#[cfg(test)]\nmod ").next().unwrap_or("").lines().count()
}

fn files(path: &Path, out: &mut Vec<PathBuf>) {
    if path.is_dir() {
        let all = fs::read_dir(path).expect("a folder");
        all.for_each(|e| files(&e.expect("an entry").path(), out));
    } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs") {
        out.push(path.to_path_buf());
    }
}

#[test]
fn no_file_is_long() {
    assert_eq!(lines("a\nb\n\n#[cfg(test)]\nmod tests {\n}\n"), 3);
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut all = vec![];
    CRATES.iter().for_each(|c| files(&root.join(c), &mut all));
    assert!(all.len() > 300, "{}", all.len());
    let of = |p: &PathBuf| lines(&fs::read_to_string(p).expect("a source file"));
    let long: Vec<_> = all.iter().map(|p| (of(p), p)).filter(|x| x.0 > MOST).collect();
    assert!(long.is_empty(), "files of more than {MOST} lines: {long:#?}");
}
