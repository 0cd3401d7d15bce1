//! Files and folders are made in one place, `ir/src/files/make.rs`: there names are new and links
//! are not followed. What else would make one is found by its words.

use std::path::{Path, PathBuf};

/// The only place.
const PLACE: &str = "ir/src/files/make.rs";

/// Words by which std and rustix make a file, a folder or another name of one.
const WORDS: [&str; 19] = [
    "File::create",
    "create_new",
    "create_dir",
    "DirBuilder",
    "fs::write(",
    "fs::copy(",
    ".create(",
    ".append(true",
    ".truncate(true",
    ".write(true",
    "hard_link",
    "fs::symlink(",
    "fs::symlink;",
    "mkdir",
    "mknod",
    "OFlags::CREATE",
    "OFlags::TRUNC",
    "OFlags::WRONLY",
    "tempfile",
];

fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for e in std::fs::read_dir(dir).expect("a folder").flatten() {
        let (path, name) = (e.path(), e.file_name());
        if path.is_dir() {
            sources(&path, out);
        } else if name.to_string_lossy().ends_with(".rs") && name != "tests.rs" {
            out.push(path);
        }
    }
}

/// The lines of a file that are no tests, as far as they name a way to make something. A file with tests elsewhere
/// than in their module is one of tests alone.
fn makes(text: &str) -> Vec<(usize, &str)> {
    let own = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    if own.contains("#[test]\n") {
        return vec![];
    }
    let code = own.lines().enumerate().filter(|(_, l)| !l.trim_start().starts_with("//"));
    code.filter(|(_, l)| WORDS.iter().any(|w| l.contains(w))).map(|(i, l)| (i + 1, l)).collect()
}

#[test]
fn files_and_folders_are_made_in_one_place() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut all = vec![];
    for of in shardc_testing::sources().iter().filter(|of| *of != "testing/src") {
        sources(&root.join(of), &mut all);
    }
    assert!(all.len() > 300, "{} sources", all.len());
    let mut found = vec![];
    for path in all {
        let text = std::fs::read_to_string(&path).expect("a text");
        let name = path.strip_prefix(root).expect("below").display().to_string();
        let made = makes(&text);
        if name == PLACE {
            assert!(made.len() > 2, "the words are not those that {PLACE} makes files by");
            continue;
        }
        found.extend(made.iter().map(|(i, l)| format!("{name}:{i}: {}", l.trim())));
    }
    assert!(found.is_empty(), "made elsewhere than in {PLACE}:\n{}", found.join("\n"));
}

#[test]
fn words_are_found() {
    let code = "// File::create\nlet f = std::fs::write(path, text);\n";
    let text = format!("{code}#[cfg(test)]\nmod tests {{\n  fs::write(");
    assert_eq!(makes(&text), [(2, "let f = std::fs::write(path, text);")]);
}
