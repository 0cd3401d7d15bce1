//! File tests of passes: `tests/cases/PASS/*.ir`, each a test of its own. A file is a program that
//! the pass takes; beside a line stands what the pass makes of it. A line beside which nothing
//! stands stays as it is.
//!
//! ```text
//! // options: mesh = [["tp", 2]]         as in options.toml, where they are not the defaults
//! %y = dot[bh,oh->bo] %x, %w : f32[4,8]
//! // becomes: %p = dot[bh,oh->bo] …      the lines in place of the one above
//! // becomes: %y = all_reduce[tp] %p …
//! %z = neg %x : f32[4,8]
//! // gone                                none in its place
//! // not: all_gather                     what no line of the result has
//! // error: error[flag]: …               the lines of the diagnostic of a program that is refused
//! ```
//!
//! A result is verified, and is its own text when it is read again. `SHARDC_BLESS=1` writes what is
//! made beside the lines of files that fail: read the diff, it is part of the change.

use libtest_mimic::{Arguments, Failed, Trial};
use shardc_ir::diag::Diag;
use shardc_ir::text::{parse, parse_source, print, says_phase};
use shardc_ir::verify::verify;
use shardc_passes::options::Options;
use shardc_passes::pipeline::{Pass, find, names, run_pass};
use std::path::{Path, PathBuf};

/// Passes that leave the module as it is: what they make is lists and memory, or nothing.
/// `schedules.rs` and `schedule_search.rs`, and `memory.rs` and `mutations.rs` of the driver, are
/// about them.
const NO_TEXT: [&str; 4] = ["schedule", "memory", "verify", "replay"];

const BECOMES: &str = "// becomes:";
const ERROR: &str = "// error:";
const GONE: &str = "// gone";

/// What is set in a file, as in options.toml.
#[derive(serde::Deserialize)]
struct File {
    options: Options,
}

/// What a file says.
struct Case {
    file: PathBuf,
    pass: &'static Pass,
    /// Its lines but for what is made of them, and whether each is one of the program.
    lines: Vec<(String, bool)>,
    /// What becomes of each of these lines, where that is said.
    said: Vec<Option<Vec<String>>>,
    error: Vec<String>,
}

impl Case {
    fn read(file: PathBuf) -> Result<Case, String> {
        let text = std::fs::read_to_string(&file).map_err(|e| e.to_string())?;
        let folder = file.parent().and_then(Path::file_name).and_then(|f| f.to_str());
        let pass = folder.and_then(find).ok_or("its folder is the name of no pass")?;
        let (mut lines, mut said, mut error) = (vec![], vec![], vec![]);
        for line in text.lines() {
            let here = line.trim();
            let made = here.strip_prefix(BECOMES).map(|l| l.trim().to_string());
            if let Some(l) = here.strip_prefix(ERROR) {
                error.push(l.trim().to_string());
            } else if made.is_some() || here == GONE {
                let own: &mut Option<Vec<String>> = match lines.last() {
                    Some((_, true)) => said.last_mut().expect("as many"),
                    _ => return Err(format!("stands beside no line of the program: {here}")),
                };
                own.get_or_insert_default().extend(made);
            } else {
                lines.push((line.to_string(), !here.is_empty() && !here.starts_with("//")));
                said.push(None);
            }
        }
        Ok(Case { file, pass, lines, said, error })
    }

    /// What stands behind a word at the beginning of lines.
    fn after<'a>(&'a self, word: &'a str) -> impl Iterator<Item = &'a str> {
        self.lines.iter().filter_map(move |l| l.0.strip_prefix(word)).map(str::trim)
    }

    /// What the pass makes of the program: lines.
    fn result(&self) -> Result<Vec<String>, Diag> {
        let options = self.after("// options:").collect::<Vec<_>>().join(", ");
        let options = toml::from_str(&format!("options = {{ {options} }}"));
        let File { options } = options.unwrap_or_else(|e| panic!("{e}"));
        let text = self.lines.iter().map(|l| format!("{}\n", l.0)).collect::<String>();
        let source = parse_source(&text)?;
        let mut module = source.module.clone();
        // A case says its phase only where that is not what its pass takes.
        if !says_phase(&text) {
            module.phase = self.pass.from;
        }
        verify(&module, module.phase).map_err(|mut all| all.swap_remove(0))?;
        let made = print(&run_pass(self.pass, module, source, &options)?);
        assert_eq!(print(&parse(&made)?), made, "read again");
        Ok(lines(&made))
    }

    /// The lines that the file expects.
    fn expected(&self) -> Vec<String> {
        let all = self.lines.iter().zip(&self.said).filter(|(l, _)| l.1);
        let of = |((line, _), said): (&(String, bool), &Option<Vec<String>>)| match said {
            Some(made) => made.clone(),
            None => vec![line.trim().to_string()],
        };
        all.flat_map(of).collect()
    }

    /// Runs it; what is another result than the file says is written into it, if that is asked for.
    fn run(mut self) -> Result<(), Failed> {
        let result = self.result();
        let shown = result.as_ref().map_or_else(|d| lines(&d.to_string()), Clone::clone);
        for unwanted in self.after("// not:") {
            if let Some(line) = shown.iter().find(|l| l.contains(unwanted)) {
                return Err(format!("there is `{unwanted}`:\n  {line}").into());
            }
        }
        let want = if result.is_ok() { self.expected() } else { self.error.clone() };
        if shown == want && result.is_ok() == self.error.is_empty() {
            return Ok(());
        }
        if std::env::var_os("SHARDC_BLESS").is_some() {
            self.bless(result.as_deref().map_err(|_| &*shown));
        }
        let first = shown.iter().zip(&want).take_while(|(a, b)| a == b).count();
        let line =
            |of: &[String]| of.get(first).map_or("nothing".to_string(), |l| format!("`{l}`"));
        let why = format!("line {} is {}, not {}", first + 1, line(&shown), line(&want));
        Err(format!("{}: {why}, in\n{}", self.file.display(), shown.join("\n")).into())
    }

    /// Writes beside lines what is made of them.
    fn bless(&mut self, made: Result<&[String], &[String]>) {
        let own: Vec<usize> = (0..self.lines.len()).filter(|&i| self.lines[i].1).collect();
        let program: Vec<&str> = own.iter().map(|&i| self.lines[i].0.trim()).collect();
        let (made, error) = match made {
            Ok(made) => (beside(&program, made), &[][..]),
            Err(said) => (vec![None; program.len()], said),
        };
        let mut made = made.into_iter();
        let mut text = String::new();
        for (line, of_program) in &self.lines {
            text += &format!("{line}\n");
            let Some(made) = of_program.then(|| made.next().flatten()).flatten() else { continue };
            let indent = &line[..line.len() - line.trim_start().len()];
            if made.is_empty() {
                text += &format!("{indent}{GONE}\n");
            }
            made.iter().for_each(|m| text += &format!("{indent}{BECOMES} {m}\n"));
        }
        error.iter().for_each(|e| text += &format!("{ERROR} {e}\n"));
        std::fs::write(&self.file, text).expect("a file of the tests");
    }
}

/// The lines of a text that are not empty.
fn lines(text: &str) -> Vec<String> {
    text.lines().map(|l| l.trim().to_string()).filter(|l| !l.is_empty()).collect()
}

/// What becomes of each line of a program: those lines of the result up to the one that is it, or
/// is called as it is. `None` where that is the line itself. Of all ways to pair lines in order,
/// one whose pairs are most alike.
fn beside(program: &[&str], made: &[String]) -> Vec<Option<Vec<String>>> {
    // Up to the `=`, the `:`, or the name behind `@`: a value, an argument, a function.
    let called = |l: &str| l.split(['=', ':', '@']).next().map(str::to_string);
    // `%y` in `%y_part` and `%y.1`; the word of a line that defines nothing.
    let first = |l: &str| l.split([' ', ':', '_', '.']).next().map(str::to_string);
    let worth = |p: &str, m: &str| match () {
        () if p == m => 4,
        () if called(p) == called(m) => 3,
        () if first(p) == first(m) => 1,
        () => 0,
    };
    let (n, m) = (program.len(), made.len());
    let mut best = vec![vec![0; m + 1]; n + 1];
    for i in (0..n).rev() {
        for j in (0..m).rev() {
            let pair = match worth(program[i], &made[j]) {
                0 => 0,
                w => w + best[i + 1][j + 1],
            };
            best[i][j] = pair.max(best[i + 1][j]).max(best[i][j + 1]);
        }
    }
    let mut all: Vec<Vec<String>> = vec![vec![]; n];
    let (mut j, mut last) = (0, 0);
    for i in 0..n {
        let pair = |j: usize| match worth(program[i], &made[j]) {
            0 => false,
            w => best[i][j] == w + best[i + 1][j + 1],
        };
        let next = (j..m).find(|&k| pair(k) && best[i][k] == best[i][j]);
        if let Some(next) = next.filter(|_| best[i][j] > best[i + 1][j]) {
            all[i] = made[j..=next].to_vec();
            (j, last) = (next + 1, i);
        }
    }
    all[last].extend_from_slice(&made[j..]);
    let stays = |(p, made): (&&str, Vec<String>)| (made != [*p]).then_some(made);
    program.iter().zip(all).map(stays).collect()
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
    for pass in names().filter(|p| !NO_TEXT.contains(p)) {
        let n = files(pass).len();
        assert!(n >= 2, "tests/cases/{pass} has {n} cases");
    }
    let all = files("");
    let stray = all.iter().find(|d| !names().any(|p| d.ends_with(p)));
    assert!(stray.is_none(), "no pass is called as {stray:?}");
    Ok(())
}

/// A result that is beside the lines of a program is read again from there, whatever it is.
fn results_beside_lines_are_whole() -> Result<(), Failed> {
    let program = ["func @f(", "%x: f32[4],", ") -> f32[4] {", "%y = exp %x", "%z = neg %y", "}"];
    for made in [
        &["func @f(", "%x: f32[4],", ") -> f32[4] {", "%y = exp %x", "%z = neg %y", "}"][..],
        &["func @g(", "%x: f32[2],", ") -> f32[4] {", "%y.1 = exp %x", "%y = sum %y.1", "}", "}"],
        &["one", "%z = neg %y", "%y = exp %x", "%z = neg %y", "two"],
        &["other"],
        &[],
    ] {
        let made: Vec<String> = made.iter().map(|l| l.to_string()).collect();
        let found = beside(&program, &made);
        let read = program.iter().zip(&found).flat_map(|(p, made)| match made {
            Some(made) => made.clone(),
            None => vec![p.to_string()],
        });
        assert_eq!(read.collect::<Vec<_>>(), made, "{found:?}");
    }
    let stays = beside(&program, &program.map(String::from));
    assert!(stays.iter().all(Option::is_none), "{stays:?}");
    Ok(())
}

fn main() {
    // A flag of libtest alone, which `.ci/tests` gives to all.
    let arguments = std::env::args().filter(|a| a != "--report-time");
    let file = |file: PathBuf| {
        let stem = |p: &Path| p.file_stem().expect("a name").to_string_lossy().into_owned();
        let name = format!("{}::{}", stem(file.parent().expect("a folder")), stem(&file));
        Trial::test(name, || Case::read(file)?.run())
    };
    let mut all: Vec<Trial> = names().flat_map(files).map(file).collect();
    all.push(Trial::test("every_pass_has_two_cases", every_pass_has_two_cases));
    all.push(Trial::test("results_beside_lines_are_whole", results_beside_lines_are_whole));
    libtest_mimic::run(&Arguments::from_iter(arguments), all).exit();
}
