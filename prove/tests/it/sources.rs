//! The prover is a second opinion: its sources name nothing by which the compiler could agree with
//! itself.

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

/// What may be used of `ir`: texts, ops, letters, mesh, and the types that say what pieces are;
/// counts; the list of ops, by which each is asked for; and hash maps.
const MODULES: [&str; 10] =
    ["for_each_op", "func", "maps", "mesh", "ops", "rule", "schedule", "steps", "text", "types"];
/// What may be asked of the text: to read it, update rules too, and to write a node and a type for people.
const TEXT: [&str; 4] = ["parse", "update", "node_text", "type_text"];
/// How the declaration of an op in `ir` is asked: for its letters, types, sums, gradient,
/// evaluation, and facts. Of what `op!` declares only names of operands and attributes, sizes of
/// letters and text may be read.
const DECLARATIONS: [&str; 16] = [
    "OpDef",
    "Declaration",
    ".written_rule(",
    "OpText",
    ".def()",
    ".facts()",
    ".layout()",
    ".linear()",
    ".reduction()",
    ".element(",
    ".collective()",
    ".check(",
    ".eval(",
    ".eval_group(",
    ".grad(",
    "ops::layout",
];
/// Where what is believed of ops is said.
const OPS: &str = "/src/ops/";
/// Most arms over ops elsewhere: where two programs are compared node by node, and sums over
/// stages.
const MOST: usize = 20;

#[test]
fn nothing_is_read_of_the_declarations_of_ops_but_names_sizes_and_text() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = vec![];
    sources(&root.join("src"), &mut all);
    assert!(all.len() > 10, "{} sources were found", all.len());
    let mut seen = [0; 2];
    let mut arms = 0;
    for (path, text) in &all {
        let own = path.contains(OPS);
        for line in text.lines() {
            let code = line.split("//").next().unwrap_or("");
            let lists = [("shardc_ir::", &MODULES[..]), ("text::", &TEXT)];
            for (count, (prefix, allowed)) in seen.iter_mut().zip(lists) {
                for name in after(code, prefix) {
                    assert!(allowed.contains(&name), "{path}: `{prefix}{name}`: {line}");
                    *count += 1;
                }
            }
            for asked in DECLARATIONS {
                assert!(!code.contains(asked), "{path}: `{asked}`: {line}");
            }
            assert!(own || !code.contains("impl Law for"), "{path}: {line}");
            arms += if own { 0 } else { after(code, "Op::").filter(|n| !n.is_empty()).count() };
        }
    }
    assert!(0 < arms && arms <= MOST, "{arms} arms over ops outside of `{OPS}`");
    assert!(seen.iter().all(|&n| n > 0), "{seen:?}: the test looks for nothing");
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).expect("a manifest");
    let (_, deps) = manifest.split_once("[dependencies]\n").expect("dependencies");
    let deps: Vec<&str> = deps.lines().take_while(|l| !l.is_empty()).collect();
    assert_eq!(deps, ["shardc-ir.workspace = true"]);
}
