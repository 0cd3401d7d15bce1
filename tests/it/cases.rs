//! File tests of passes: `tests/cases/PASS/*.ir`. A file is a program that the pass takes, with lines
//! that say what it makes of it:
//!
//! ```text
//! // pass: partition --mesh tp=2     the pass, and flags of `compile`
//! // expect: %y = all_reduce[tp] …   a line of the result, or of the diagnostic; all of them in this order
//! // not: all_gather                 what no line of the result has
//! ```
//!
//! A result is verified, and is its own text when it is read again. `SHARDC_BLESS=1` writes the whole
//! result as expectations into files that fail: read the diff, it is part of the change.

use clap::Parser;
use shardc::flags::Flags;
use shardc_ir::diag::Diag;
use shardc_ir::text::{parse, parse_source, print, says_phase};
use shardc_ir::verify::verify;
use shardc_passes::pipeline::{find, names, run_pass};
use std::path::{Path, PathBuf};

/// Passes that leave the module as it is: what they make is lists and memory, or nothing. `schedules.rs`
/// and `schedule_search.rs` of passes, `memory.rs` and `mutations.rs` are about them.
const NO_TEXT: [&str; 4] = ["schedule", "memory", "verify", "replay"];

#[derive(Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(flatten)]
    flags: Flags,
}

/// What a file says.
struct Case {
    file: PathBuf,
    text: String,
    pass: String,
    flags: Vec<String>,
    expect: Vec<String>,
    not: Vec<String>,
}

impl Case {
    fn read(file: PathBuf) -> Case {
        let text = std::fs::read_to_string(&file).expect("a file of the tests");
        let after = |word: &str| -> Vec<String> {
            text.lines().filter_map(|l| l.strip_prefix(word)).map(|l| l.trim().into()).collect()
        };
        let named = after("// pass:");
        assert_eq!(named.len(), 1, "{}: one line `// pass: NAME flags`", file.display());
        let mut words = named[0].split_whitespace().map(String::from);
        let pass = words.next().unwrap_or_default();
        let folder = file.parent().and_then(Path::file_name).expect("a folder");
        assert_eq!(folder.to_str(), Some(&*pass), "{}: the folder is the pass", file.display());
        let (expect, not) = (after("// expect:"), after("// not:"));
        Case { flags: words.collect(), pass, expect, not, text, file }
    }

    /// What the pass makes of the program: its text.
    fn result(&self) -> Result<String, Diag> {
        let line = Line::try_parse_from(&self.flags);
        let options = line.unwrap_or_else(|e| panic!("{}: {e}", self.file.display())).flags;
        let pass = find(&self.pass).unwrap_or_else(|| panic!("no pass is called {}", self.pass));
        let source = parse_source(&self.text)?;
        let mut module = source.module.clone();
        // A case says its phase only where that is not what its pass takes.
        if !says_phase(&self.text) {
            module.phase = pass.from;
        }
        verify(&module, module.phase).map_err(|mut all| all.swap_remove(0))?;
        let made = print(&run_pass(pass, module, source, &options.options()?)?);
        assert_eq!(print(&parse(&made)?), made, "{}: read again", self.file.display());
        Ok(made)
    }

    /// Why the result is not what the file says, if it is not.
    fn fault(&self, result: &str) -> Option<String> {
        let lines: Vec<&str> = result.lines().map(str::trim).collect();
        let mut rest = lines.iter();
        let missing = self.expect.iter().find(|e| !rest.any(|l| l == e));
        let unwanted = self.not.iter().find(|n| lines.iter().any(|l| l.contains(&***n)));
        // What begins as the result does is all of it.
        let whole = |e: &String| e.starts_with("mesh ") || e.starts_with("error[");
        let all: Vec<&str> = lines.iter().copied().filter(|l| !l.is_empty()).collect();
        let more = self.expect.first().is_some_and(whole) && all.len() != self.expect.len();
        let why = match (missing, unwanted) {
            _ if self.expect.is_empty() => "nothing is expected".to_string(),
            (None, None) if more => "there are more lines than are expected".to_string(),
            (Some(m), _) => format!("here, or behind the lines before it, is not a line\n  {m}"),
            (_, Some(u)) => format!("there is\n  {u}"),
            (None, None) => return None,
        };
        Some(format!("{}: {why}\nin\n{result}", self.file.display()))
    }

    /// Writes what is as what is expected.
    fn bless(&self, result: &str) {
        let kept = self.text.lines().filter(|l| !l.starts_with("// expect:"));
        let kept = kept.collect::<Vec<_>>().join("\n");
        let lines = result.lines().map(str::trim).filter(|l| !l.is_empty());
        let expect: String = lines.map(|l| format!("// expect: {l}\n")).collect();
        let text = format!("{}\n\n{expect}", kept.trim_end());
        std::fs::write(&self.file, text).expect("a file of the tests");
    }
}

/// The cases of a pass, by name.
fn cases(pass: &str) -> Vec<Case> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases").join(pass);
    let entries = std::fs::read_dir(&dir).into_iter().flatten();
    let mut files: Vec<PathBuf> = entries.map(|e| e.expect("an entry").path()).collect();
    files.sort();
    files.into_iter().map(Case::read).collect()
}

#[test]
fn passes_make_what_files_say() {
    let bless = std::env::var_os("SHARDC_BLESS").is_some();
    let mut faults = vec![];
    for case in names().flat_map(cases) {
        let result = case.result().unwrap_or_else(|d| d.to_string());
        let Some(fault) = case.fault(&result) else { continue };
        if bless {
            case.bless(&result);
        }
        faults.push(fault);
    }
    assert!(faults.is_empty(), "{} cases:\n{}", faults.len(), faults.join("\n\n"));
}

#[test]
fn every_pass_has_two_cases() {
    for pass in names().filter(|p| !NO_TEXT.contains(p)) {
        let n = cases(pass).len();
        assert!(n >= 2, "tests/cases/{pass} has {n} cases");
    }
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    for entry in std::fs::read_dir(dir).expect("the cases").map(|e| e.expect("an entry")) {
        let name = entry.file_name().to_string_lossy().into_owned();
        assert!(!entry.path().is_dir() || names().any(|p| p == name), "no pass is called {name}");
    }
}
