//! File tests of passes: `tests/cases/PASS/*.ir`, each a test of its own, as `src/cases.rs` reads them.
//! `SHARDC_BLESS=1` writes what is made beside the lines of files that fail: read the diff, it is part of
//! the change.

use libtest_mimic::{Arguments, Failed, Trial};
use shardc_passes::cases::Case;
use shardc_passes::pipeline::{PASSES, Pass, find};
use std::path::{Path, PathBuf};

/// Runs a file; what is another result than it says is written into it, if that is asked for.
fn run(file: &Path) -> Result<(), Failed> {
    let text = std::fs::read_to_string(file)?;
    let folder = file.parent().and_then(Path::file_name).and_then(|f| f.to_str());
    let pass = folder.and_then(find).ok_or("its folder is the name of no pass")?;
    Case::read(&text, pass)?.check().map_err(|other| {
        if let Some(text) = other.text.filter(|_| std::env::var_os("SHARDC_BLESS").is_some()) {
            std::fs::write(file, text).expect("a file of the tests");
        }
        format!("{}: {}", file.display(), other.why).into()
    })
}

/// The files of a pass, by name.
fn files(pass: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases").join(pass);
    let entries = std::fs::read_dir(&dir).into_iter().flatten();
    let mut files: Vec<PathBuf> = entries.map(|e| e.expect("an entry").path()).collect();
    files.sort();
    files
}

fn every_pass_has_two_cases() -> Result<(), Failed> {
    for Pass { name, .. } in &PASSES {
        let n = files(name).len();
        assert!(n >= 2, "tests/cases/{name} has {n} cases");
    }
    let all = files("");
    let stray = all.iter().find(|d| !PASSES.iter().any(|p| d.ends_with(p.name)));
    assert!(stray.is_none(), "no pass is called as {stray:?}");
    Ok(())
}

fn main() {
    let file = |file: PathBuf| {
        let stem = |p: &Path| p.file_stem().expect("a name").to_string_lossy().into_owned();
        let name = format!("{}::{}", stem(file.parent().expect("a folder")), stem(&file));
        Trial::test(name, move || run(&file))
    };
    let mut all: Vec<Trial> = PASSES.iter().flat_map(|p| files(p.name)).map(file).collect();
    all.push(Trial::test("every_pass_has_two_cases", every_pass_has_two_cases));
    libtest_mimic::run(&Arguments::from_args(), all).exit();
}
