//! The form of the house: files that can be read in one go. Functions of more than 100 lines are clippy's to
//! find (`too_many_lines`).

use shardc_testing::sources;
use std::fs;
use std::path::{Path, PathBuf};

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
    sources().iter().for_each(|c| files(&root.join(c), &mut all));
    assert!(all.len() > 300, "{}", all.len());
    let of = |p: &PathBuf| lines(&fs::read_to_string(p).expect("a source file"));
    let long: Vec<_> = all.iter().map(|p| (of(p), p)).filter(|x| x.0 > MOST).collect();
    assert!(long.is_empty(), "files of more than {MOST} lines: {long:#?}");
}

/// Names of types that a crate has more than once, tests aside: so many as there are, and never more. A name that is
/// found once is found by a search. Those of `train` stand in place of each other, with and without tokenizers.
const TWICE: &[(&str, usize)] = &[("train/src", 4)];

#[test]
fn no_more_names_of_types_are_there_twice() {
    let declared = |line: &str| -> Option<String> {
        let mut words = line.split([' ', '(', '<', ';', '{']).skip_while(|w| w.starts_with("pub"));
        // What stands in brackets behind `pub`.
        let kind = words.find(|w| !w.ends_with(')'))?;
        let name = words.next()?.trim_end_matches(':').to_string();
        let is = ["struct", "enum", "trait", "type"].contains(&kind);
        (is && name.starts_with(char::is_uppercase)).then_some(name)
    };
    assert_eq!(declared("pub(crate) struct Name<T> {").as_deref(), Some("Name"));
    assert_eq!(
        declared("    type Output = Name;"),
        None,
        "what belongs to another is no name of its own"
    );
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let twice = sources().into_iter().map(|c| {
        let mut all = vec![];
        files(&root.join(c), &mut all);
        let mut names: Vec<String> = vec![];
        for text in all.iter().map(|p| fs::read_to_string(p).expect("a source file")) {
            let own = text.split("#[cfg(test)]\nmod ").next().unwrap_or("");
            names.extend(own.lines().filter_map(declared));
        }
        names.sort_unstable();
        names
            .chunk_by(|a, b| a == b)
            .filter(|same| same.len() > 1)
            .map(|same| same[0].clone())
            .collect::<Vec<_>>()
    });
    for (of, found) in sources().iter().zip(twice) {
        let most = TWICE.iter().find(|x| x.0 == of).map_or(0, |x| x.1);
        assert_eq!(found.len(), most, "{of}, which names types twice that are called {found:?}");
    }
}
