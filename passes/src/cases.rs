//! File tests of passes: a program that a pass takes, with what the pass makes of it beside its lines.
//! A line beside which nothing stands stays as it is.
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
//! A result is verified, and is its own text when it is read again.

use crate::options::Options;
use crate::pipeline::{Pass, run_pass};
use shardc_ir::diag::Diag;
use shardc_ir::text::{parse, parse_source, print, says_phase};
use shardc_ir::verify::verify;

const BECOMES: &str = "// becomes:";
const ERROR: &str = "// error:";
const GONE: &str = "// gone";

/// What is set in a file, as in options.toml.
#[derive(serde::Deserialize)]
struct File {
    options: Options,
}

/// What a file says.
pub struct Case {
    pass: &'static Pass,
    options: Options,
    /// Its lines but for what is made of them, and whether each is one of the program.
    lines: Vec<(String, bool)>,
    /// What becomes of each of these lines, where that is said.
    said: Vec<Option<Vec<String>>>,
    error: Vec<String>,
}

impl Case {
    /// What a text says of a pass.
    ///
    /// # Errors
    /// A line of a result that stands beside no line of the program; options that are none.
    pub fn read(text: &str, pass: &'static Pass) -> Result<Case, String> {
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
        let mut case = Case { pass, options: Options::default(), lines, said, error };
        let options = case.after("// options:").collect::<Vec<_>>().join(", ");
        let file: Result<File, _> = toml::from_str(&format!("options = {{ {options} }}"));
        case.options = file.map_err(|e| format!("// options: {}", e.message()))?.options;
        Ok(case)
    }

    /// What stands behind a word at the beginning of lines.
    fn after<'a>(&'a self, word: &'a str) -> impl Iterator<Item = &'a str> {
        self.lines.iter().filter_map(move |l| l.0.strip_prefix(word)).map(str::trim)
    }

    /// What the pass makes of the program: lines.
    fn result(&self) -> Result<Vec<String>, Diag> {
        let text = self.lines.iter().map(|l| format!("{}\n", l.0)).collect::<String>();
        let source = parse_source(&text)?;
        let mut module = source.module.clone();
        // A case says its phase only where that is not what its pass takes.
        if !says_phase(&text) {
            module.phase = self.pass.from;
        }
        verify(&module, module.phase).map_err(|mut all| all.swap_remove(0))?;
        let made = print(&run_pass(self.pass, module, source, &self.options)?);
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

    /// Runs the pass.
    ///
    /// # Errors
    /// Where the result is another than the text says.
    pub fn check(&self) -> Result<(), Difference> {
        let result = self.result();
        let shown = result.as_ref().map_or_else(|d| lines(&d.to_string()), Clone::clone);
        for unwanted in self.after("// not:") {
            if let Some(line) = shown.iter().find(|l| l.contains(unwanted)) {
                let why = format!("there is `{unwanted}`:\n  {line}");
                return Err(Difference { why, text: None });
            }
        }
        let want = if result.is_ok() { self.expected() } else { self.error.clone() };
        if shown == want && result.is_ok() == self.error.is_empty() {
            return Ok(());
        }
        let first = shown.iter().zip(&want).take_while(|(a, b)| a == b).count();
        let line =
            |of: &[String]| of.get(first).map_or("nothing".to_string(), |l| format!("`{l}`"));
        let why = format!("line {} is {}, not {}", first + 1, line(&shown), line(&want));
        let text = self.with(result.as_deref().map_err(|_| &*shown));
        Err(Difference { why: format!("{why}, in\n{}", shown.join("\n")), text: Some(text) })
    }

    /// The text with what is made of its lines beside them.
    fn with(&self, made: Result<&[String], &[String]>) -> String {
        let program: Vec<&str> = self.lines.iter().filter(|l| l.1).map(|l| l.0.trim()).collect();
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
        text
    }
}

/// That a pass makes something else of a program than its file says.
pub struct Difference {
    /// The first line that is another, and all that is made.
    pub why: String,
    /// What the file would have to say, where only lines differ.
    pub text: Option<String>,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A result that is beside the lines of a program is read again from there, whatever it is.
    #[test]
    fn results_beside_lines_are_whole() {
        let program =
            ["func @f(", "%x: f32[4],", ") -> f32[4] {", "%y = exp %x", "%z = neg %y", "}"];
        for made in [
            &["func @f(", "%x: f32[4],", ") -> f32[4] {", "%y = exp %x", "%z = neg %y", "}"][..],
            &[
                "func @g(",
                "%x: f32[2],",
                ") -> f32[4] {",
                "%y.1 = exp %x",
                "%y = sum %y.1",
                "}",
                "}",
            ],
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
    }
}
