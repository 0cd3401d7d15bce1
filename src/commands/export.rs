//! `shardc export`: a plan as flags or files of other software.

use clap::Args;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::files::{self as disk, Place, Staged, io_error, make};
use shardc_plans::flags::Target;
use shardc_plans::plan_dir;
use shardc_process::terminal::{doing, note, show_file, show_written};
use std::path::{Path, PathBuf};

/// What is exported.
#[derive(Args, Debug)]
pub struct Export {
    /// A plan: a folder that shardc compile wrote
    pub plan: PathBuf,
    /// The target software
    #[arg(long, value_enum)]
    pub to: Target,
    /// Also write settings of training that nobody chose, as the plan has them [default: the target's are left as
    /// they are, and comments say what both have]
    #[arg(long)]
    pub exact: bool,
    /// A new folder for the files [default: a single file is printed]
    #[arg(short, long)]
    pub output: Option<PathBuf>,
}

/// Writes or prints the files.
///
/// # Errors
/// `export` with what the target lacks, `output`, and those of reading the plan.
pub fn export(what: &Export) -> Result<i32> {
    doing("reading the plan");
    let stored = plan_dir::read(&what.plan)?;
    doing("exporting");
    let done = shardc_export::export(&stored, what.to, what.exact)?;
    done.told.iter().for_each(note);
    let all = done.files;
    let Some(dir) = &what.output else {
        let [one] = &all[..] else {
            let names: Vec<&str> = all.iter().take(3).map(|f| f.name.as_str()).collect();
            let what = format!("{} files ({}, …) cannot be printed", all.len(), names.join(", "));
            return Err(Diag::new("flag", what).help("give -o a new folder"));
        };
        show_file(&String::from_utf8_lossy(&one.bytes));
        return Ok(0);
    };
    let staged = new_folder(dir)?;
    for f in &all {
        let (path, named) = (staged.path().join(&f.name), dir.join(&f.name));
        let failed = |e| io_error("cannot write the file", &named, &e);
        make::between(staged.path(), Path::new(&f.name)).map_err(failed)?;
        disk::create(&path, |out| out.write_all(&f.bytes).map_err(failed))?;
    }
    staged.publish()?;
    show_written(dir);
    note(format!("wrote {} to {}", count(all.len(), "file", "files"), dir.display()));
    Ok(0)
}

/// Makes what becomes the folder; one that is there must be empty.
fn new_folder(dir: &Path) -> Result<Staged> {
    let place = Place::of(dir).map_err(|d| unwritten(dir, &d.message))?;
    if !place.is_new() {
        let inside = std::fs::read_dir(place.path());
        if inside.map_err(|e| unwritten(dir, &e.to_string()))?.next().is_some() {
            return Err(unwritten(dir, "the folder is not empty"));
        }
    }
    Staged::folder(&place).map_err(|d| unwritten(dir, &d.message))
}

fn unwritten(dir: &Path, why: &str) -> Diag {
    Diag::new("output", why.to_string())
        .at(dir.display().to_string())
        .help("give -o a new folder inside a folder that exists")
}
