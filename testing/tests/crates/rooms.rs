//! Rooms: data flows one way. A crate uses crates before it in a list, and modules of a crate do not use each other in
//! a circle; those that still do are counted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Modules that come back to themselves by way of others, by crate: as many as there are, and never more.
const ROUND: [(&str, usize); 3] = [("ir/src", 10), ("prove/src", 15), ("runtime/src", 4)];

/// Each uses some of those before it, and none behind.
const ORDER: [&str; 14] = [
    "ir",
    "cost",
    "frontends",
    "passes",
    "codegen",
    "runtime",
    "prove",
    "process",
    "plans",
    "train",
    "report",
    "export",
    "compiler",
    "audit",
];

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn crates_use_those_before_them() {
    let all: BTreeSet<String> = shardc_testing::sources().into_iter().collect();
    let listed = ORDER.iter().chain(&["testing"]).map(|of| format!("{of}/src"));
    assert_eq!(all, listed.chain(["src".to_string()]).collect(), "the list has every crate");
    for (i, of) in ORDER.iter().enumerate() {
        let text = read(&Path::new(ROOT).join(of).join("Cargo.toml"));
        let own = text.split("[dev-dependencies]").next().unwrap_or_default();
        let used = own.lines().filter_map(|l| l.strip_prefix("shardc-")?.split_once('.'));
        let behind: Vec<&str> = used.map(|x| x.0).filter(|x| !ORDER[..i].contains(x)).collect();
        assert!(behind.is_empty(), "{of} uses {behind:?}, which stand behind it");
    }
}

/// The sources of each module of a crate that stands beside its root.
fn modules(src: &Path, at: &Path, out: &mut BTreeMap<String, String>) {
    for path in std::fs::read_dir(at).expect("a folder").flatten().map(|e| e.path()) {
        if path.is_dir() {
            modules(src, &path, out);
            continue;
        }
        let own = path.strip_prefix(src).expect("below").with_extension("");
        let name = own.iter().next().expect("a name").to_string_lossy().into_owned();
        let rust = path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs");
        if rust && !["lib", "main"].contains(&name.as_str()) {
            let text = read(&path);
            let own = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
            // From so deep `super::` is the crate.
            let deep = path.strip_prefix(src).expect("below").iter().count();
            let deep = if path.ends_with("mod.rs") { deep - 1 } else { deep };
            *out.entry(name).or_default() += &own.replace(&"super::".repeat(deep), "crate::");
        }
    }
}

/// Modules of the crate that a text names behind `crate::`, alone or in braces.
fn named(text: &str) -> BTreeSet<String> {
    let word = |t: &str| {
        let is = |c: char| c.is_alphanumeric() || c == '_';
        t.trim_start().split(|c| !is(c)).next().unwrap_or_default().to_string()
    };
    let code = text.lines().filter(|l| !l.trim_start().starts_with("//"));
    let code: String = code.flat_map(|l| [l, "\n"]).collect();
    let mut out = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        let Some(inner) = rest.strip_prefix('{') else {
            out.insert(word(rest));
            continue;
        };
        let (mut depth, mut begin) = (0, 0);
        for (i, c) in inner.char_indices() {
            match c {
                '{' => depth += 1,
                ',' | '}' if depth == 0 => {
                    out.insert(word(&inner[begin..i]));
                    begin = i + 1;
                }
                '}' => depth -= 1,
                _other => {}
            }
            if c == '}' && depth == 0 && begin > i {
                break;
            }
        }
    }
    out
}

/// Whether a module comes back to itself by way of what it uses.
fn goes_round(uses: &BTreeMap<String, BTreeSet<String>>, of: &String) -> bool {
    let (mut seen, mut left) = (BTreeSet::new(), vec![of]);
    while let Some(x) = left.pop() {
        left.extend(uses.get(x).into_iter().flatten().filter(|y| seen.insert(*y)));
    }
    seen.contains(of)
}

#[test]
fn modules_use_each_other_one_way() {
    let text = "use crate::{a, b::{c, d}};\n// crate::no\nlet x = crate::e::f(crate::Z);";
    assert_eq!(Vec::from_iter(named(text)), ["Z", "a", "b", "e"]);
    for src in shardc_testing::sources() {
        let mut all = BTreeMap::new();
        let path = PathBuf::from(ROOT).join(&src);
        modules(&path, &path, &mut all);
        let uses = all.iter().map(|(name, text)| {
            let known = named(text).into_iter().filter(|n| n != name && all.contains_key(n));
            (name.clone(), known.collect())
        });
        let uses: BTreeMap<String, BTreeSet<String>> = uses.collect();
        let round: Vec<String> = uses.keys().filter(|m| goes_round(&uses, m)).cloned().collect();
        let most = ROUND.iter().find(|x| x.0 == src).map_or(0, |x| x.1);
        assert_eq!(round.len(), most, "modules of {src} in circles: {round:?}");
    }
}
