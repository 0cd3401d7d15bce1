//! Crates that this depends on: licences that `deny.toml` allows, and no source but the registry.

mod makes;
mod rooms;
mod sbom;

use serde_json::Value as Json;
use std::process::Command;

/// The words in quotes of the first line of `deny.toml` that begins so.
fn allowed() -> Vec<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deny.toml");
    let text = std::fs::read_to_string(path).expect("deny.toml");
    let line = text.lines().find(|l| l.starts_with("allow = [")).expect("a list of licences");
    line.split('"').skip(1).step_by(2).map(String::from).collect()
}

/// The parts of an expression between words outside of parentheses.
fn parts<'a>(text: &'a str, between: &[&str]) -> Vec<&'a str> {
    let (mut depth, mut start, mut out) = (0, 0, vec![]);
    for (i, c) in text.char_indices() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        let word = between.iter().find(|w| depth == 0 && i >= start && text[i..].starts_with(**w));
        if let Some(w) = word {
            out.push(&text[start..i]);
            start = i + w.len();
        }
    }
    out.push(&text[start..]);
    out
}

/// Whether one may take something under the licences that are allowed. `A/B` is an old `A OR B`.
fn may_be_taken(text: &str, allowed: &[String]) -> bool {
    let any = parts(text, &[" OR ", "/"]);
    if any.len() > 1 {
        return any.into_iter().any(|p| may_be_taken(p, allowed));
    }
    let all = parts(text, &[" AND "]);
    if all.len() > 1 {
        return all.into_iter().all(|p| may_be_taken(p, allowed));
    }
    let one = text.trim();
    match one.strip_prefix('(').and_then(|t| t.strip_suffix(')')) {
        Some(inner) => may_be_taken(inner, allowed),
        None => allowed.iter().any(|a| a == one),
    }
}

/// What cargo knows of the workspace and all crates that it needs.
fn metadata(more: &[&str]) -> Json {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let args = ["metadata", "--format-version", "1", "--locked"];
    let out = Command::new(cargo).args(args).args(more).output().expect("cargo");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("JSON")
}

#[test]
fn licences_and_sources_are_those_that_are_allowed() {
    let allowed = allowed();
    for (text, taken) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("Unlicense/MIT", true),
        ("(MIT OR GPL-3.0) AND Unicode-3.0", true),
        ("MIT AND GPL-3.0", false),
    ] {
        assert_eq!(may_be_taken(text, &allowed), taken, "{text}");
    }
    let all = metadata(&["--all-features"]);
    let packages = all["packages"].as_array().expect("packages");
    assert!(packages.len() > 50);
    for p in packages {
        let (name, licence) = (&p["name"], p["license"].as_str().unwrap_or("none"));
        assert!(may_be_taken(licence, &allowed), "{name}: {licence}");
        let source = p["source"].as_str().unwrap_or("registry+ours");
        assert!(source.starts_with("registry+"), "{name}: {source}");
    }
}
