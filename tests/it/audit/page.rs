//! The page of an audit: what it shows, and that nothing in a configuration becomes part of it but text.

use super::{LATENT, TP_SP, UNTIED};
use crate::lab::Lab;

/// The page of flags on two ranks, with rules of a fork.
fn page(lab: &Lab, flags: &[&str], rules: &str) -> String {
    lab.write("fork.toml", rules);
    let words: Vec<&str> = flags.iter().flat_map(|f| f.split_whitespace()).collect();
    let args = ["audit", "megatron", "--gpus", "2", "-o", "a.html", "--rules", "fork.toml", "--"];
    let out = lab.shardc(&[&args[..], &words].concat());
    assert!(out.status.code().is_some_and(|c| c < 2), "{}", String::from_utf8_lossy(&out.stderr));
    std::fs::read_to_string(lab.0.join("a.html")).expect("a page")
}

/// The text of a page without its tags.
fn text(page: &str) -> String {
    let mut out = String::new();
    let mut inside = false;
    for c in page.chars() {
        match c {
            '<' => inside = true,
            '>' => {
                inside = false;
                out.push(' ');
            }
            c if !inside => out.push(c),
            _tag => {}
        }
    }
    out.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_page_shows_findings_and_every_row() {
    let lab = Lab::new("audit-page");
    let found = page(&lab, &[LATENT, "--tensor-model-parallel-size 2"], "");
    assert!(found.starts_with("<!doctype html>\n<html lang=\"en\" data-by=\"shardc audit\">"));
    // It fetches and runs nothing.
    assert!(
        found.contains("default-src 'none'")
            && !found.contains("<script")
            && !found.contains("http:")
    );
    let said = text(&found);
    for word in [
        "Audit of Megatron-LM: 1 finding",
        "layout tp=2",
        "sum-missing over tp model.layers.0-1.self_attn.kv_a_proj_with_mqa.weight",
        "by types summed over tp it does",
        "latent-rotary-keys: megatron/core/transformer/multi_latent_attention.py:971 at d98e8a64dd",
    ] {
        assert!(said.contains(word), "no {word}: {said}");
    }
    // Each row of the JSON has one here, and those with findings are marked.
    let words: Vec<&str> = [LATENT, "--tensor-model-parallel-size 2"]
        .iter()
        .flat_map(|f| f.split_whitespace())
        .collect();
    let args = ["audit", "megatron", "--gpus", "2", "--format", "json", "--"];
    let out = lab.shardc(&[&args[..], &words].concat());
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let rows = json["parameters"].as_array().expect("rows");
    assert_eq!(found.matches("<tr").count(), rows.len() + 1);
    assert_eq!(found.matches("<tr class=found>").count(), 1);
    for r in rows {
        let name = r["name"].as_str().expect("a name");
        assert!(found.contains(&format!("<code>{name}</code>")), "{name}");
    }
    // Without findings it says so; another page is written over, and nothing else is.
    assert!(text(&page(&lab, &[LATENT, TP_SP], "")).contains("Megatron-LM: no finding"));
    lab.write("a.html", "mine");
    let args = ["audit", "megatron", "--gpus", "2", "-o", "a.html", "--"];
    lab.refuses(&[&args[..], &words].concat(), 2, "output");
}

#[test]
fn names_of_strangers_are_text() {
    let lab = Lab::new("audit-page-hostile");
    let hostile = "</li><script>alert(1)</script><img src=x onerror=alert(2)>&\\\"'";
    let rules = format!(
        "[[rule]]\nname = \"x{hostile}\"\nsays = \"y{hostile}\"\nsource = \"z{hostile}\"\ntimes = '2'"
    );
    let flag = "--<script>alert(3)</script>";
    let found = page(&lab, &[LATENT, TP_SP, UNTIED, flag], &rules);
    assert!(found.contains("alert(1)") && found.contains("alert(3)"), "{found}");
    for tag in ["<script", "<img", "</li>"] {
        assert!(!found.contains(tag), "{tag}: {found}");
    }
    assert!(found.contains("&lt;script&gt;alert(1)"), "{found}");
}
