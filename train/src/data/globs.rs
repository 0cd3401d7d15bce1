//! Files of data by globs.

use shardc_ir::diag::{Diag, Result};
use std::path::{Path, PathBuf};

/// The files that a glob names, sorted by path; `**` crosses folders; hidden folders and `target` are left out.
pub fn named(pattern: &str) -> Vec<PathBuf> {
    let root: PathBuf = pattern.split('/').take_while(|p| !p.contains(['*', '?'])).collect();
    let root = if pattern.starts_with('/') { Path::new("/").join(root) } else { root };
    let start = if root.as_os_str().is_empty() { PathBuf::from(".") } else { root };
    let mut paths = vec![];
    collect(&start, pattern.trim_start_matches("./"), 0, &mut paths);
    paths.sort();
    paths
}

/// The same, of which there is one at least. Given with a flag.
///
/// # Errors
/// `data` if none matches.
pub fn found(pattern: &str, flag: &str) -> Result<Vec<PathBuf>> {
    let all = named(pattern);
    match all.is_empty() {
        false => Ok(all),
        true => Err(Diag::new("data", "no file matches")
            .at(format!("{flag} {pattern}"))
            .help("quote the glob, and check the current folder")),
    }
}

fn collect(dir: &Path, pattern: &str, depth: usize, out: &mut Vec<PathBuf>) {
    // Whatever else a user names is refused when it is opened.
    let named = !pattern.contains(['*', '?']);
    if depth == 0 && dir.exists() && (named || !dir.is_dir()) {
        out.push(dir.to_path_buf());
        return;
    }
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for e in entries.flatten() {
        let name = e.file_name();
        let hidden = name.to_string_lossy().starts_with('.') || name == "target";
        let Ok(kind) = e.file_type() else { continue };
        if hidden || depth > 32 {
            continue;
        }
        let path = e.path();
        if kind.is_dir() {
            collect(&path, pattern, depth + 1, out);
        } else if matches(pattern, path.to_string_lossy().trim_start_matches("./"))
            && !path.is_dir()
        {
            out.push(path);
        }
    }
}

/// Globs by path segment; `**` stands for any number of segments.
fn matches(pattern: &str, path: &str) -> bool {
    fn go(p: &[&str], t: &[&str]) -> bool {
        match (p.first(), t.first()) {
            (None, None) => true,
            (Some(&"**"), _) => go(&p[1..], t) || (!t.is_empty() && go(p, &t[1..])),
            (Some(g), Some(s)) => shardc_ir::names::glob(g, s) && go(&p[1..], &t[1..]),
            _ => false,
        }
    }
    go(&pattern.split('/').collect::<Vec<_>>(), &path.split('/').collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_by_segment() {
        assert!(matches("**/*.rs", "src/commands/run.rs") && matches("**/*.rs", "main.rs"));
        assert!(!matches("*.rs", "src/main.rs") && matches("src/*", "src/a.b"));
    }
}
