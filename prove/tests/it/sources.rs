//! The prover is a second opinion: its sources name nothing by which the compiler could agree with itself.

use std::path::Path;

/// All sources of the crate, with their paths.
fn sources(dir: &Path, out: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(dir).expect("a folder of sources").flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, out);
        } else {
            let text = std::fs::read_to_string(&path).expect("a source");
            out.push((path.display().to_string(), text));
        }
    }
}

/// What is named after each occurrence of a prefix.
fn after<'a>(code: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
    code.match_indices(prefix).map(move |(at, _)| {
        let rest = &code[at + prefix.len()..];
        &rest[..rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())]
    })
}

/// Modules of `ir` that may be used: texts, ops, letters, mesh, and the types that say what pieces are; counts.
const MODULES: [&str; 8] = ["func", "mesh", "ops", "rule", "schedule", "steps", "text", "types"];
/// What may be asked of the text: to read it, and to write a node and a type for people.
const TEXT: [&str; 3] = ["parse", "node_text", "type_text"];
/// What may be asked of an op's definition: its letters.
const DEFINITION: [&str; 1] = ["rule"];

#[test]
fn nothing_of_the_compiler_is_used_but_texts_ops_letters_and_mesh() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = vec![];
    sources(&root.join("src"), &mut all);
    assert!(all.len() > 10, "{} sources were found", all.len());
    let mut seen = [0; 3];
    for (path, text) in &all {
        for line in text.lines() {
            let code = line.split("//").next().unwrap_or("");
            let lists =
                [("shardc_ir::", &MODULES[..]), ("text::", &TEXT), (".def().", &DEFINITION)];
            for (count, (prefix, allowed)) in seen.iter_mut().zip(lists) {
                for name in after(code, prefix) {
                    assert!(allowed.contains(&name), "{path}: `{prefix}{name}`: {line}");
                    *count += 1;
                }
            }
            // Ops have types, and groups evaluations, by methods of their own.
            for method in [
                ".facts()",
                ".layout()",
                ".element(",
                ".collective()",
                ".check(",
                ".eval(",
                ".eval_group(",
                ".grad(",
            ] {
                assert!(!code.contains(method), "{path}: `{method}`: {line}");
            }
        }
    }
    assert!(seen.iter().all(|&n| n > 0), "{seen:?}: the test looks for nothing");
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).expect("a manifest");
    let (_, deps) = manifest.split_once("[dependencies]\n").expect("dependencies");
    let deps: Vec<&str> = deps.lines().take_while(|l| !l.is_empty()).collect();
    assert_eq!(deps, ["shardc-ir.workspace = true"]);
}
