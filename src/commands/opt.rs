//! `shardc opt`: one pass on a program, or a file test of one.

use super::passes::{MAX_TEXT, attempt, carried, find, read, write_program};
use super::show;
use clap::Args;
use serde_json::json;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::{files, text};
use shardc_passes::cases::Case;
use shardc_passes::pipeline::{self, Pass};
use shardc_plans::flags::Flags;
use shardc_process::terminal::{Shown, json_line, show_written};
use std::path::{Path, PathBuf};

#[derive(Args, Debug)]
pub struct Opt {
    /// Text of a program
    program: PathBuf,
    /// The pass [default with --check: the name of the folder that the text is in]
    #[arg(long, required_unless_present = "check")]
    pass: Option<String>,
    /// Compare what the pass makes with what stands beside the lines of the text (// becomes:, // gone, // not:,
    /// // error:), with the options of its `// options:`; exit status 1 if it is something else
    #[arg(long, conflicts_with = "output")]
    check: bool,
    /// File to write [default: standard output]
    #[arg(short, long)]
    output: Option<PathBuf>,
    #[command(flatten)]
    flags: Box<Flags>,
}

/// Runs a pass on the program of a text, and prints what it leaves, writes it, or compares it.
///
/// # Errors
/// `unknown-pass`, `phase`, `mesh`, `flag`, those of the text, and `pass` if the pass cannot do with this program.
pub fn opt(how: &Opt, json: bool) -> Result<i32> {
    let pass = match &how.pass {
        Some(name) => find(name, "--pass")?,
        None => of_folder(&how.program)?,
    };
    let name = pass.name;
    if how.check {
        return check(how, pass, json);
    }
    let source = read(&how.program, &how.flags.own_mesh()?)?;
    let o = how.flags.options_of(&source.module)?;
    carried(pass, &source.module, &how.flags, &o)?;
    let module = source.module.clone();
    // What is of another phase than that of a step was verified for its own when it was read.
    let verified = pass.name == "verify" && module.phase != pass.from;
    let done = match verified {
        true => module,
        false => attempt(&format!("`{name}`"), || pipeline::run_pass(pass, module, source, &o))?,
    };
    let text = text::print_between(&done);
    match &how.output {
        Some(path) => {
            write_program(path, &text)?;
            show_written(path);
        }
        None if json => {
            let phase = done.phase.name();
            show(json_line("opt", json!({ "pass": name, "phase": phase, "text": text })));
        }
        None => show(Shown::file(&text)),
    }
    Ok(0)
}

/// The pass that the folder of a file test is called as.
fn of_folder(program: &Path) -> Result<&'static Pass> {
    let whole = std::path::absolute(program).unwrap_or_else(|_| program.into());
    let folder = whole.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
    pipeline::find(&folder).ok_or_else(|| {
        Diag::new("unknown-pass", format!("its folder, `{folder}`, is the name of no pass"))
            .at(program.display().to_string())
            .help("name the pass: --pass NAME")
    })
}

/// Runs a file test, and prints how its pass makes something else.
fn check(how: &Opt, pass: &'static Pass, json: bool) -> Result<i32> {
    let file = how.program.display().to_string();
    if let Some(flag) = how.flags.given().next().map(|(s, _)| format!("--{}", s.flag)) {
        return Err(Diag::new("flag", format!("{flag} changes nothing with --check"))
            .at(&file)
            .rule("a file test has its own options, as options.toml has them")
            .help("write them behind `// options:`, or leave --check out"));
    }
    let text = files::read_text(&how.program, MAX_TEXT)?;
    let bad = |why: String| {
        Diag::new("syntax", why).at(&file).rule(
            "`// becomes:` and `// gone` stand behind the line of the program that they are about",
        )
    };
    let case = Case::read(&text, pass).map_err(bad)?;
    let checked = attempt(&format!("`{}`", pass.name), || Ok(case.check()))?;
    let why = checked.as_ref().err().map(|d| &d.why);
    if json {
        let said = json!({ "pass": pass.name, "as_said": why.is_none(), "difference": why });
        show(json_line("opt-check", said));
    } else {
        show(match why {
            None => format!("{file}: `{}` makes what it says\n", pass.name),
            Some(why) => format!("{file}: {why}\n"),
        });
    }
    Ok(i32::from(why.is_some()))
}
