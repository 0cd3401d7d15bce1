//! Passes one by one: what they leave, and where a compilation begins.

use clap::Args;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::make::Folder;
use shardc_ir::files::{self, FileFormat, Place, Undo};
use shardc_ir::func::Module;
use shardc_ir::mesh::Mesh;
use shardc_ir::phase::Phase;
use shardc_ir::source::Source;
use shardc_ir::text;
use shardc_ir::verify::verify;
use shardc_ir::weights::Weight;
use shardc_passes::options::Options;
use shardc_passes::pipeline::{self, BACK_END, Begin, Manager, PASSES, Pass, Watch};
use shardc_plans::flags::Flags;
use shardc_process::signals;
use shardc_report::proof::Prove;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What `compile` shows of its passes.
#[derive(Args, Debug, Default)]
pub struct Watched {
    /// Print the program after a pass
    #[arg(long, value_name = "PASS", help_heading = "Passes")]
    dump_after: Option<String>,
    /// Write the program after each pass to a folder: 01-experts.ir, ..., and options.toml
    #[arg(long, value_name = "DIR", help_heading = "Passes")]
    dump_all: Option<PathBuf>,
    /// Verify the program after each pass
    #[arg(long, help_heading = "Passes")]
    verify_each: bool,
    /// Start at a pass, with the program that --dump-all wrote before it
    #[arg(long, num_args = 2, value_names = ["PASS", "FILE"], help_heading = "Passes")]
    from: Option<Vec<String>>,
}

/// What there is of passes that have run.
pub struct Ran {
    /// The program that is to be printed.
    pub dump: Option<String>,
    /// Whether the options of all passes are known.
    known: bool,
    /// What `--dump-all` has written.
    pub dumped: Option<Dumped>,
}

/// The programs of a compilation in their folder. If nothing becomes of it they go, and the folder too if it
/// was made for them; where a pass fails, what the passes before it leave says why, and stays.
pub struct Dumped {
    dir: PathBuf,
    /// A pass has run: what is there is of this compilation.
    begun: Arc<AtomicBool>,
    /// How they go.
    undo: Option<Undo>,
}

impl Dumped {
    /// Makes the folder.
    ///
    /// # Errors
    /// `output` for the folder of a plan, or with files of somebody else; `file` if it cannot be made.
    fn new(dir: &Path) -> Result<Dumped> {
        if dir.join("plan.json").exists() {
            return Err(Diag::new("output", "the folder holds a plan")
                .at(format!("--dump-all {}", dir.display()))
                .help("name another folder for the programs"));
        }
        let place = Place::of(dir)?;
        if !place.is_new() {
            MADE_WITH.check(&dir.join(OPTIONS))?;
            pipeline::names().try_for_each(|pass| PROGRAM.check(&dir.join(file(pass))))?;
        }
        let fail = |e| files::io_error("cannot write to the folder", dir, &e);
        Folder::at(place.path()).map_err(fail)?;
        let (own, is_new, begun) =
            (dir.to_path_buf(), place.is_new(), Arc::<AtomicBool>::default());
        let written = begun.clone();
        let undo = Undo::new(move || {
            // Nothing here is worth more than the error on its way.
            let _ = if written.load(Ordering::Acquire) { cleared(&own) } else { Ok(()) };
            let _ = if is_new { std::fs::remove_dir(&own) } else { Ok(()) };
        });
        Ok(Dumped { dir: dir.into(), begun, undo: Some(undo) })
    }

    /// Keeps the programs of a compilation that is done.
    pub fn keep(&mut self) {
        if let Some(undo) = self.undo.take() {
            undo.keep();
        }
    }

    /// Writes what a pass leaves. With the first one, what an earlier compilation left goes: not if the flags
    /// are refused.
    fn add(&mut self, pass: &str, m: &Module) -> Result<()> {
        if !self.begun.swap(true, Ordering::AcqRel) {
            cleared(&self.dir)?;
        }
        write_program(&self.dir.join(file(pass)), &text::print_between(m))
    }
}

impl Drop for Dumped {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.keep();
        }
    }
}

/// Largest text of a program that is read, in bytes.
pub(super) const MAX_TEXT: u64 = 1 << 30;

/// The first line of a text that shardc writes to a file; only such a file is replaced by one.
const WRITTEN: &str = "// Written by shardc, which replaces this file when it writes it again.\n";
/// The texts that `import -o`, `--dump-all` and `opt -o` write, and write over.
const PROGRAM: FileFormat =
    FileFormat { name: "a program", is: |head| head.starts_with(WRITTEN.as_bytes()) };

/// Writes a program to a file.
///
/// # Errors
/// `file`, and `output` if there is another file.
pub(super) fn write_program(path: &Path, text: &str) -> Result<()> {
    write(path, &PROGRAM, &format!("{WRITTEN}{text}"))
}

/// Beside the programs of `--dump-all`: the options that they were made with.
const OPTIONS: &str = "options.toml";
const HEAD: &str = "# What shardc compiled these programs with: --from compares.\n";
const MADE_WITH: FileFormat =
    FileFormat { name: "a file of options", is: |head| head.starts_with(HEAD.as_bytes()) };

impl Watched {
    /// How a plan is proved: of a program that somebody may have changed it is not left open what it computes.
    pub fn proof(&self, asked: Option<Prove>) -> Prove {
        match (asked, &self.from) {
            (None | Some(Prove::Auto), Some(_)) => Prove::Yes,
            (asked, _) => asked.unwrap_or(Prove::Auto),
        }
    }

    /// What a proof says of a program that somebody may have changed: a difference is then none of ours.
    pub fn said(&self, mut d: Diag) -> Diag {
        let Some([pass, file]) = self.from.as_deref() else { return d };
        let what = match d.code {
            "refuted" => "does not compute this model",
            "not-understood" => "is not known to compute this model",
            _other => return d,
        };
        d.rule = Some("with --from only a program that is proved becomes a plan".into());
        d.help = vec![
            format!("with --from {pass}, the program of {file} {what}"),
            "undo the changes to it; or use --prove no, which writes it anyway".into(),
        ];
        d
    }

    /// Compiles with these wishes, on this mesh where a text has none: what `done` gives, and what there is to show.
    ///
    /// # Errors
    /// `unknown-pass`, `phase`, those of reading and verifying `--from`'s file, of writing, and of `done`.
    pub fn compile<T>(
        &self,
        mesh: &Mesh,
        done: impl FnOnce(Manager) -> Result<T>,
    ) -> Result<(T, Ran)> {
        let last = self.dump_after.as_deref().map(|p| find(p, "--dump-after")).transpose()?;
        let from = self.from.as_deref().map(|from| begin(&from[0], Path::new(&from[1]), mesh));
        let from = from.transpose()?;
        if let (Some(last), Some(Begin { pass: first, .. })) = (last, &from)
            && place(last.name) < place(first.name)
        {
            let what = format!("`{}` does not run: it comes before `{}`", last.name, first.name);
            return Err(Diag::new("unknown-pass", what)
                .at(format!("--dump-after {}", last.name))
                .help(format!("name `{}` or a later pass", first.name)));
        }
        if self.dump_all.is_some() {
            signals::end_clean()?;
        }
        let mut dumped = self.dump_all.as_deref().map(Dumped::new).transpose()?;
        let (mut dump, mut failed) = (None, None);
        let mut watch = |pass: &str, m: &Module| {
            if last.is_some_and(|p| p.name == pass) {
                dump = Some(text::print_between(m));
            }
            if let Some(dumped) = dumped.as_mut().filter(|_| failed.is_none()) {
                failed = dumped.add(pass, m).err();
            }
        };
        let known = from.as_ref().is_none_or(|begin| begin.made.is_some());
        let watched = last.is_some() || self.dump_all.is_some();
        let watch = watched.then_some(&mut watch as Watch);
        let manager = Manager { watch, verify_each: self.verify_each, from, ..Manager::default() };
        let out = match self.from.as_deref() {
            // It is the program that a pass cannot do with.
            Some([first, file]) => {
                attempt(&format!("`{first}`, or a pass behind it,"), || done(manager))
                    .map_err(|d| if d.code == "pass" { d.at(file.clone()) } else { d })
            }
            _model => done(manager),
        };
        let is_pass = |d: &Diag| d.code == "pass";
        dumped.iter_mut().filter(|_| out.as_ref().is_err_and(is_pass)).for_each(Dumped::keep);
        let ran = Ran { dump, known, dumped };
        failed.map_or(out.map(|out| (out, ran)), Err)
    }

    /// Writes beside the programs with which options they were made, if that is known, for those who begin with one
    /// of them.
    ///
    /// # Errors
    /// Those of writing.
    pub fn keep(&self, ran: &Ran, o: &Options) -> Result<()> {
        let Some(dir) = self.dump_all.as_ref().filter(|_| ran.known) else { return Ok(()) };
        let text = toml::to_string(o).expect("options are plain data");
        write(&dir.join(OPTIONS), &MADE_WITH, &format!("{HEAD}{text}"))
    }
}

pub(super) fn find(name: &str, flag: &str) -> Result<&'static Pass> {
    pipeline::find(name).ok_or_else(|| {
        Diag::new("unknown-pass", format!("no pass is called `{name}`"))
            .at(format!("{flag} {name}"))
            .help(format!("use {}", pipeline::names().collect::<Vec<_>>().join(", ")))
    })
}

/// The number of a pass in the table.
fn place(pass: &str) -> usize {
    pipeline::names().position(|p| p == pass).unwrap_or_default()
}

/// The file of `--dump-all` for a pass: `08-partition.ir`.
fn file(pass: &str) -> String {
    format!("{:02}-{pass}.ir", place(pass) + 1)
}

/// Takes away what a compilation left in a folder.
fn cleared(dir: &Path) -> Result<()> {
    let own = pipeline::names().map(file).chain([OPTIONS.to_string()]);
    for old in own.map(|p| dir.join(p)).filter(|f| f.is_file()) {
        std::fs::remove_file(old)
            .map_err(|e| files::io_error("cannot write to the folder", dir, &e))?;
    }
    Ok(())
}

/// Runs passes on a program that somebody may have changed, and that may so break what a pass assumes of
/// those before it: what is a panic of ours elsewhere is then an error of code `pass`.
pub(super) fn attempt<T>(what: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let said = Arc::new(Mutex::new(String::new()));
    let hook = std::panic::take_hook();
    let words = said.clone();
    std::panic::set_hook(Box::new(move |info| {
        let mut words = words.lock().unwrap_or_else(PoisonError::into_inner);
        if words.is_empty() {
            *words = info.to_string();
        }
    }));
    let done = catch_unwind(AssertUnwindSafe(run));
    std::panic::set_hook(hook);
    done.unwrap_or_else(|_| {
        let words = said.lock().unwrap_or_else(PoisonError::into_inner).replace('\n', " ");
        Err(Diag::new("pass", format!("{what} cannot do with this program"))
            .rule("a pass takes what the passes before it leave")
            .why(words)
            .help("start from a text that --dump-all wrote with the same flags, with few changes"))
    })
}

fn write(path: &Path, kind: &'static FileFormat, text: &str) -> Result<()> {
    files::replace(path, kind, |out| {
        let fail = |e: &std::io::Error| files::io_error("cannot write the file", path, e);
        out.write_all(text.as_bytes()).map_err(|e| fail(&e))
    })
}

/// The program of a file, and what its text says of a model; one that has no mesh is for this one. A text of one
/// function that says no phase is a model.
pub(super) fn read(path: &Path, mesh: &Mesh) -> Result<Source> {
    let text = files::read_text(path, MAX_TEXT)?;
    let file = path.display().to_string();
    let placed = |d: Diag| text::in_file(d, &text, &file);
    let mut source = text::parse_source_on(&text, mesh).map_err(placed)?;
    let is_model = source.module.params.is_empty() && source.module.funcs.len() == 1;
    if !text::says_phase(&text) && !is_model {
        return Err(placed(
            Diag::new("phase", "the text does not say of which phase its program is")
                .rule("a program between two passes says its phase")
                .help(format!(
                    "write `phase {}`, or another one from docs/passes.md, after the line of the mesh",
                    likely(&source.module)
                )),
        ));
    }
    let m = &source.module;
    verify(m, m.phase).map_err(|mut all| placed(all.swap_remove(0)))?;
    if m.funcs.is_empty() || m.phase < Phase::Staged && m.funcs.len() != 1 {
        let many = if m.phase < Phase::Staged { "one function" } else { "functions" };
        let what =
            format!("a program of phase {} is {many}, and the text has {}", m.phase, m.funcs.len());
        return Err(placed(
            Diag::new("source", what).help("see docs/passes.md for what a phase is"),
        ));
    }
    let plain = |p: &shardc_ir::func::ParamLayout| Weight::plain(&p.param.name, &p.stored.sizes());
    source.weights.extend(m.params.iter().map(plain));
    Ok(source)
}

/// The phase that a text most probably has which does not say it.
fn likely(m: &Module) -> Phase {
    match m.funcs.len() {
        _ if !m.params.is_empty() && m.phase == Phase::Source => Phase::Ranked,
        0 | 1 => m.phase,
        _several => Phase::Step,
    }
}

fn begin(pass: &str, path: &Path, mesh: &Mesh) -> Result<Begin> {
    let pass = find(pass, "--from")?;
    if place(pass.name) < place("propagate") {
        return Err(Diag::new("pass", format!("--from cannot begin with `{}`", pass.name))
            .at(format!("--from {}", pass.name))
            .rule("until `annotate` is done, a family's recipe is not in the text")
            .help("use --from propagate or a later pass, or change the model.ir of a plan"));
    }
    let beside = path.with_file_name(OPTIONS);
    let text = beside.is_file().then(|| files::read_text(&beside, MAX_TEXT)).transpose()?;
    let made = text.filter(|text| text.starts_with(HEAD)).map(|text| {
        toml::from_str(&text).map_err(|e| {
            Diag::new(
                "file",
                format!("it does not say what programs were made with: {}", e.message()),
            )
            .at(beside.display().to_string())
            .rule("options.toml beside the program of --from is that of --dump-all")
            .help("write the programs again, or remove it")
        })
    });
    Ok(Begin { pass, module: read(path, mesh)?.module, made: made.transpose()? })
}

/// Refuses flags that ask for what an earlier pass makes of a program: its text has it as it is.
///
/// # Errors
/// `mesh`, `flag`.
pub(super) fn carried(pass: &Pass, m: &Module, flags: &Flags, o: &Options) -> Result<()> {
    let behind = |last: &str| place(pass.name) > place(last);
    if behind("annotate") && flags.has("mesh") {
        let word = flags.text("mesh").unwrap_or_default();
        pipeline::on_mesh(m, o).map_err(|d| d.at(format!("--mesh {word}")))?;
    }
    let given = |word: &&String| behind(if *word == "auto" { "partition" } else { "annotate" });
    let Some(word) = flags.many("shard").iter().find(given) else { return Ok(()) };
    let by = if word == "auto" { "partition" } else { "annotate" };
    Err(Diag::new("flag", format!("--shard changes nothing in `{}`", pass.name))
        .at(format!("--shard {word}"))
        .rule(format!("layouts stand in the text of a program from `{by}` on"))
        .help(format!("leave it out, or begin with `{by}` or a pass before it")))
}

/// The table of the passes, as `docs/passes.md` has it.
pub fn table() -> String {
    let mut out =
        String::from("| pass | takes | leaves | reads | why there |\n|---|---|---|---|---|\n");
    for p @ Pass { name, from, to, why, .. } in &PASSES {
        out += &format!("| [{name}](#{name}) | {from} | {to} | {} | {why} |\n", p.reads());
    }
    out += "\n| behind the passes | why there |\n|---|---|\n";
    for Pass { name, why, .. } in &BACK_END {
        out += &format!("| [{name}](#{name}) | {why} |\n");
    }
    out
}
