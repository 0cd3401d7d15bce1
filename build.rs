//! Says in `SHARDC_BUILD` what `shardc --version` adds to the number: the commit, of a release, and the
//! features. A development build has no commit, so that none makes it again.

use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
    String::from_utf8(out.stdout).ok().map(|s| s.trim().to_string()).filter(|s| !s.is_empty())
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let release = std::env::var("PROFILE").is_ok_and(|p| p == "release");
    let mut said = match release.then(|| git(&["rev-parse", "--short=12", "HEAD"])).flatten() {
        Some(commit) => {
            if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
                println!("cargo::rerun-if-changed={log}");
            }
            format!("commit {commit}")
        }
        None if release => "commit unknown".into(),
        None => "development build".into(),
    };
    let on =
        |name: &&str| std::env::var_os(format!("CARGO_FEATURE_{}", name.to_uppercase())).is_some();
    let features: Vec<&str> = ["mpi", "tokenizers"].into_iter().filter(on).collect();
    said += &match features[..] {
        [] => "; no features".to_string(),
        _ => format!("; features {}", features.join(", ")),
    };
    println!("cargo::rustc-env=SHARDC_BUILD={said}");
}
