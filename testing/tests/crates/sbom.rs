//! The bill of materials, `sbom.cdx.json` (CycloneDX 1.6): every crate of Cargo.lock with its licence, the hash of
//! its archive, what needs it, and whether the command is built from it; and `THIRD-PARTY.md`, the licences of the
//! crates of others that are built in. `SHARDC_BLESS=1` writes both again.

use super::metadata;
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, BTreeSet};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// A package as purl writes it: no two of Cargo.lock are alike.
fn purl(name: &str, version: &str) -> String {
    format!("pkg:cargo/{name}@{}", version.replace('+', "%2B"))
}

fn text<'a>(of: &'a Json, key: &str) -> &'a str {
    of[key].as_str().unwrap_or_else(|| panic!("{key}: {of}"))
}

/// Ids of what the command is built from: it and what it needs, tests and benchmarks left out.
fn built_from(all: &Json) -> BTreeSet<String> {
    let nodes = all["resolve"]["nodes"].as_array().expect("nodes");
    let needs: BTreeMap<&str, &Json> = nodes.iter().map(|n| (text(n, "id"), &n["deps"])).collect();
    let packages = all["packages"].as_array().expect("packages");
    let command = packages.iter().find(|p| p["name"] == "shardc").expect("the command");
    let (mut open, mut out) = (vec![text(command, "id")], BTreeSet::new());
    while let Some(id) = open.pop() {
        if !out.insert(id.to_string()) {
            continue;
        }
        for d in needs[id].as_array().expect("dependencies") {
            let kinds = d["dep_kinds"].as_array().expect("kinds");
            if kinds.iter().any(|k| k["kind"] != "dev") {
                open.push(text(d, "pkg"));
            }
        }
    }
    out
}

/// Hashes of archives, by purl, from Cargo.lock; none of our own crates.
fn lock() -> BTreeMap<String, Option<String>> {
    let lock = std::fs::read_to_string(format!("{ROOT}/Cargo.lock")).expect("Cargo.lock");
    let value = |block: &str, key: &str| {
        let line =
            block.lines().find_map(|l| l.strip_prefix(&format!("{key} = \""))).map(String::from);
        line.map(|l| l.trim_end_matches('"').to_string())
    };
    let blocks = lock.split("[[package]]").skip(1);
    let one = |b| {
        let (name, version) = (value(b, "name")?, value(b, "version")?);
        Some((purl(&name, &version), value(b, "checksum")))
    };
    blocks.map(|b| one(b).expect("a name and a version")).collect()
}

/// The bill of materials of what is here.
fn made() -> Json {
    let (plain, full) = (metadata(&[]), metadata(&["--all-features"]));
    let (required, optional) = (built_from(&plain), built_from(&full));
    let hashes = lock();
    let packages = full["packages"].as_array().expect("packages");
    let refs: BTreeMap<&str, String> = packages
        .iter()
        .map(|p| (text(p, "id"), purl(text(p, "name"), text(p, "version"))))
        .collect();
    let component = |p: &Json| {
        let id = text(p, "id");
        let purl = &refs[id];
        let scope = match (required.contains(id), optional.contains(id)) {
            (true, _) => "required",
            (_, true) => "optional",
            _ => "excluded",
        };
        let licence = text(p, "license").replace('/', " OR ").replace("  ", " ");
        let mut out = json!({
            "type": if p["name"] == "shardc" { "application" } else { "library" },
            "bom-ref": purl, "name": p["name"], "version": p["version"], "scope": scope,
            "licenses": [{ "expression": licence }], "purl": purl,
        });
        if let Some(hash) = hashes.get(purl).and_then(Option::as_ref) {
            out["hashes"] = json!([{ "alg": "SHA-256", "content": hash }]);
        }
        (purl.clone(), out)
    };
    let mut components: BTreeMap<String, Json> = packages.iter().map(component).collect();
    let own = packages.iter().find(|p| p["name"] == "shardc").expect("the command");
    let mut root = components.remove(&refs[text(own, "id")]).expect("the command");
    root.as_object_mut().expect("an object").remove("scope");
    let nodes = full["resolve"]["nodes"].as_array().expect("nodes");
    let depends = nodes.iter().map(|n| {
        let on = n["dependencies"].as_array().expect("ids").iter();
        let on: BTreeSet<&str> = on.map(|d| &*refs[d.as_str().expect("an id")]).collect();
        (&refs[text(n, "id")], json!({ "ref": refs[text(n, "id")], "dependsOn": on }))
    });
    let depends: BTreeMap<_, _> = depends.collect();
    json!({
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": { "component": root },
        "components": components.into_values().collect::<Vec<_>>(),
        "dependencies": depends.into_values().collect::<Vec<_>>(),
    })
}

/// What `THIRD-PARTY.md` says before its rows.
const THIRD_PARTY: &str = "\
# Third-party crates

The command, and so the Python wheel, is built from these crates of others, beside shardc's own (Apache-2.0).
`with a feature` means the features `mpi` and `tokenizers`, which are off by default. Crates that only another
operating system needs are listed too; tests and their crates are not. Written by a test from `Cargo.lock`
(see [CONTRIBUTING.md](CONTRIBUTING.md)).

The text of a licence is in the crate's archive, as `LICENSE*`, `COPYING*` or `UNLICENSE`: `cargo vendor` puts
the archives of all crates into one folder. This page does not contain the texts. Whoever gives the command or
the wheel to others has to add those that the licences ask for; `cargo about generate` collects them.

| crate | version | licence | built in |
|-|-|-|-|
";

/// `THIRD-PARTY.md`: a row for each crate of others that the command is built from. Only these have a hash.
fn third_party(made: &Json) -> String {
    let all = made["components"].as_array().expect("components").iter();
    let others = all.filter(|c| c["scope"] != "excluded" && c["hashes"].is_array());
    let row = |c: &Json| {
        let licence = text(&c["licenses"][0], "expression");
        let built = if c["scope"] == "required" { "always" } else { "with a feature" };
        format!("| {} | {} | {licence} | {built} |\n", text(c, "name"), text(c, "version"))
    };
    THIRD_PARTY.to_string() + &others.map(row).collect::<String>()
}

#[test]
fn licences_of_other_crates_are_listed() {
    let path = format!("{ROOT}/THIRD-PARTY.md");
    let made = third_party(&made());
    if std::env::var_os("SHARDC_BLESS").is_some() {
        std::fs::write(&path, &made).expect("THIRD-PARTY.md");
    }
    let kept = std::fs::read_to_string(path).expect("THIRD-PARTY.md");
    assert!(kept == made, "SHARDC_BLESS=1 cargo test -p shardc-testing --test crates");
    assert!(made.contains("\n| clap |") && !made.contains("| proptest |"));
}

#[test]
fn the_bill_of_materials_is_that_of_the_lock_file() {
    let path = format!("{ROOT}/sbom.cdx.json");
    let made = made();
    if std::env::var_os("SHARDC_BLESS").is_some() {
        let text = serde_json::to_string_pretty(&made).expect("JSON") + "\n";
        std::fs::write(&path, text).expect("sbom.cdx.json");
    }
    let kept: Json =
        serde_json::from_slice(&std::fs::read(path).expect("sbom.cdx.json")).expect("JSON");
    // By Cargo.lock itself, whatever the rest says.
    let listed = kept["components"].as_array().expect("components").iter();
    let listed: BTreeMap<String, Option<String>> = listed
        .chain([&kept["metadata"]["component"]])
        .map(|c| (text(c, "purl").into(), c["hashes"][0]["content"].as_str().map(String::from)))
        .collect();
    assert_eq!(listed, lock(), "SHARDC_BLESS=1 cargo test -p shardc-testing --test crates");
    assert_eq!(kept, made, "SHARDC_BLESS=1 cargo test -p shardc-testing --test crates");
    let scope = |name: &str| {
        let all = kept["components"].as_array().expect("components");
        all.iter().find(|c| c["name"] == name).map(|c| text(c, "scope"))
    };
    let scopes = ["tokenizers", "mpi", "proptest", "shardc-testing"].map(scope);
    assert_eq!(scopes, ["required", "optional", "excluded", "excluded"].map(Some));
}

/// The version that CHANGELOG.md tells of first is the workspace's.
#[test]
fn the_changelog_begins_with_this_version() {
    let log = std::fs::read_to_string(format!("{ROOT}/CHANGELOG.md")).expect("CHANGELOG.md");
    let first = log.lines().find_map(|l| l.strip_prefix("## ")).expect("a version");
    assert!(first.contains(env!("CARGO_PKG_VERSION")), "{first}");
}
