//! The plan directory: `plan.json`, `model.ir`, `options.toml`, `programs/*.ir`, `schedule.csv`,
//! `weights.json`, `config.json`; with code for devices, `kernels/`. Text is the plan: on loading it is parsed, verified, and its memory planned again.

mod target;

use crate::bounds;
use crate::seal::{self, hash};
use crate::stored::{From, Stored, pretty};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value as Json;
use shardc_codegen::kept;
use shardc_frontends::Facts;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::{self, FileFormat, Place, Staged, io_error, make};
use shardc_ir::phase::Phase;
use shardc_ir::plan::{Plan, Settings};
use shardc_ir::schedule::{parse_csv, write_csv};
use shardc_ir::text;
use shardc_ir::verify::verify;
use shardc_ir::weights::Weight;
use shardc_passes::classes::rank_classes;
use shardc_passes::options::Options;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Version of the plan directory and of the JSON reports.
pub const SCHEMA: u32 = 9;

/// The folder of a plan with code for devices.
pub const KERNELS: &str = "kernels";

/// `plan.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Head<Report = Json> {
    schema: u32,
    version: String,
    family: String,
    settings: Settings,
    facts: Option<Facts>,
    /// The folder that the model came from.
    origin: Option<String>,
    /// What people call the model: the name of its folder or file.
    #[serde(default)]
    name: Option<String>,
    /// The pass that its compilation began with, at the program of [`FROM`], if that was no model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    /// blake3 of every other file, by name.
    files: BTreeMap<String, String>,
    /// blake3 of this file without this hash: so it covers all that is in the folder.
    hash: String,
    /// By rank class.
    peak_bytes: Vec<usize>,
    report: Report,
}

/// The text of `plan.json`, with its hash.
fn text_of(head: Head<impl Serialize>) -> String {
    seal::seal(&pretty(&Head { hash: String::new(), ..head }))
}

/// What a report says of the time that compiling took, which differs from run to run.
const TIMES: [&str; 3] = ["compile_ms", "prove_ms", "phases"];

/// A report without the times in it: the plan must not differ from run to run.
pub struct Timeless<'a>(Vec<(&'a String, &'a Json)>);

impl<'a> Timeless<'a> {
    fn of(report: &'a Json) -> Timeless<'a> {
        let all = report.as_object().into_iter().flatten();
        Timeless(all.filter(|(key, _)| !TIMES.contains(&key.as_str())).collect())
    }

    /// What is left by its names, whatever order a file has it in, and without one of them.
    pub fn sorted(report: &'a Json, without: &str) -> BTreeMap<&'a String, &'a Json> {
        let all = Timeless::of(report).0.into_iter();
        all.filter(|(key, _)| *key != without).collect()
    }
}

impl Serialize for Timeless<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        s.collect_map(self.0.iter().copied())
    }
}

/// Names of the files with code for devices.
fn code(dir: &Path) -> Vec<String> {
    let folder = std::fs::read_dir(dir.join(KERNELS)).into_iter().flatten().flatten();
    let name = |e: std::fs::DirEntry| format!("{}/{}", KERNELS, e.file_name().to_string_lossy());
    let mut names: Vec<String> = folder.map(name).collect();
    names.sort();
    names
}

/// A plan's code for devices, with the hashes that `plan.json` states.
///
/// # Errors
/// `plan` if it is none, or was changed.
pub fn device_code(dir: &Path) -> Result<kept::Own> {
    let text = read_file(dir, "plan.json")?;
    let head: Head = serde_json::from_str(&text).map_err(|e| not_a_plan(dir, "plan.json", e))?;
    if !seal::is_sealed(&text, &head.hash) {
        return Err(not_a_plan(
            dir,
            "plan.json",
            "the file is not as it was written (its hash differs)",
        ));
    }
    let inside = |(name, hash): (String, String)| {
        Some((name.strip_prefix(KERNELS)?.strip_prefix('/')?.to_string(), hash))
    };
    let hashes = head.files.into_iter().filter_map(inside).collect();
    Ok(kept::Own { dir: dir.join(KERNELS), hashes })
}

/// Writes the hashes of a folder as its files now are: code for devices was added to them.
///
/// # Errors
/// `plan` if it is none, `output` if it cannot be written.
pub fn reseal(dir: &Path) -> Result<()> {
    let head = read_file(dir, "plan.json")?;
    let mut head: Head =
        serde_json::from_str(&head).map_err(|e| not_a_plan(dir, "plan.json", e))?;
    head.files.clear();
    let from = head.from.as_ref().map(|_| FROM.to_string());
    for name in TEXTS.into_iter().map(String::from).chain(from).chain(code(dir)) {
        let own = hash(&read_bytes(dir, &name)?);
        head.files.insert(name, own);
    }
    let (path, text) = (dir.join("plan.json"), text_of(head));
    let fail = |e| io_error("cannot write the file", &path, &e);
    files::replace(&path, &SEALED, |out| out.write_all(text.as_bytes()).map_err(fail))
        .map_err(|d| unwritten(dir, d))
}

/// The head of a plan, which was read.
const SEALED: FileFormat = FileFormat { name: "a plan", is: |begin| begin.starts_with(b"{") };

/// Writes a text and flushes it.
fn put(path: &Path, text: &str) -> Result<()> {
    let fail = |e| files::io_error("cannot write the file", path, &e);
    files::create(path, |out| out.write_all(text.as_bytes()).map_err(fail))
}

/// What is wrong with writing a plan, as its folder's.
fn unwritten(dir: &Path, d: Diag) -> Diag {
    let d = if d.code == "file" { d.coded("output") } else { d };
    d.at(dir.display().to_string())
}

/// The texts of a folder in the order of [`TEXTS`], and where its compilation began, if they and all code are as they
/// were written.
fn unchanged(dir: &Path, text: &str, head: &Head) -> Result<([String; TEXTS.len()], Option<From>)> {
    let changed =
        |name: &str| not_a_plan(dir, name, "the file is not as it was written (its hash differs)");
    let same = |name: &str, bytes: &[u8]| match head.files.get(name) {
        Some(written) if *written == hash(bytes) => Ok(()),
        _ => Err(changed(name)),
    };
    if !seal::is_sealed(text, &head.hash) {
        return Err(changed("plan.json"));
    }
    let mut texts: [String; TEXTS.len()] = Default::default();
    for (text, name) in texts.iter_mut().zip(TEXTS) {
        *text = read_file(dir, name)?;
        same(name, text.as_bytes())?;
    }
    for name in code(dir) {
        same(&name, &read_bytes(dir, &name)?)?;
    }
    let from = head.from.as_ref().map(|pass| {
        let program = read_file(dir, FROM)?;
        same(FROM, program.as_bytes())?;
        Ok(From { pass: pass.clone(), program })
    });
    Ok((texts, from.transpose()?))
}

/// A path without a slash at its end, to which something can be added.
pub fn bare(dir: &Path) -> PathBuf {
    dir.components().collect()
}

/// A file of a plan that cannot be used.
fn not_a_plan(dir: &Path, file: &str, what: impl std::fmt::Display) -> Diag {
    Diag::new("plan", what.to_string())
        .at(dir.join(file).display().to_string())
        .help("recompile the plan with shardc compile")
}

/// The texts of a plan but `plan.json`.
const TEXTS: [&str; 6] =
    ["model.ir", "options.toml", "programs/all.ir", "schedule.csv", "weights.json", "config.json"];

/// The program that a compilation began with, if that was no model.
const FROM: &str = "from.ir";

/// Files beside the texts: of this version, and of older ones, which are replaced too.
const OTHERS: [&str; 3] = ["plan.json", FROM, "source.ir"];

/// The hash of the plan that a folder holds, and what that is a plan of; nothing if there is none.
pub fn held(dir: &Path) -> Option<(String, String)> {
    #[derive(Deserialize)]
    struct Label {
        hash: String,
        origin: Option<String>,
        name: Option<String>,
        family: String,
    }
    let head: Label = serde_json::from_str(&read_file(dir, "plan.json").ok()?).ok()?;
    Some((head.hash, head.origin.or(head.name).unwrap_or(head.family)))
}

/// Writes the directory beside its place and renames it; replaces only what is a plan.
pub fn write(dir: &Path, s: &Stored) -> Result<()> {
    let place = Place::of(dir).map_err(|d| unwritten(dir, d))?;
    target::check_target(&place)?;
    let programs = text::print(&s.plan.module);
    let schedule = write_csv(&s.plan.schedule);
    let options = toml::to_string(&s.options).expect("options are plain data");
    let texts =
        [s.source.clone(), options, programs, schedule, pretty(&s.plan.weights), pretty(&s.config)];
    let from = s.from.iter().map(|f| (&FROM, &f.program));
    let texts: Vec<(&&str, &String)> = TEXTS.iter().zip(&texts).chain(from).collect();
    let head = Head {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION").into(),
        family: s.family.clone(),
        settings: s.plan.settings.clone(),
        facts: s.facts,
        origin: s.origin.clone(),
        name: s.name.clone(),
        from: s.from.as_ref().map(|f| f.pass.clone()),
        files: texts.iter().map(|(n, t)| (n.to_string(), hash(t.as_bytes()))).collect(),
        hash: String::new(),
        peak_bytes: s.plan.classes.iter().map(|c| c.memory.peak_bytes).collect(),
        report: Timeless::of(&s.report),
    };
    let head = text_of(head);
    let write = || -> Result<()> {
        place.make_parent()?;
        let staged = Staged::folder(&place)?;
        let fail = |e| files::io_error("cannot write the plan", dir, &e);
        let new = |file: &&str| make::between(staged.path(), Path::new(file)).map_err(fail);
        TEXTS.iter().try_for_each(new)?;
        put(&staged.path().join("plan.json"), &head)?;
        for (file, text) in &texts {
            put(&staged.path().join(file), text)?;
        }
        staged.publish()
    };
    write().map_err(|d| unwritten(dir, d))
}

/// Largest file of a plan that is read, in bytes.
const MAX_FILE: u64 = 1 << 30;

fn read_bytes(dir: &Path, name: &str) -> Result<Vec<u8>> {
    let path = dir.join(name);
    if !path.exists() {
        return Err(not_a_plan(dir, name, "a file of the plan is missing"));
    }
    files::read(&path, MAX_FILE).map_err(|d| d.help("or recompile the plan with shardc compile"))
}

/// A text of a plan, of at most `MAX_FILE` bytes.
pub fn read_file(dir: &Path, name: &str) -> Result<String> {
    String::from_utf8(read_bytes(dir, name)?)
        .map_err(|_| not_a_plan(dir, name, "it is not text (not UTF-8)"))
}

/// What a plan was made with: of its folder `options.toml` alone is read.
///
/// # Errors
/// `plan`.
pub fn options(dir: &Path) -> Result<Options> {
    parsed(dir, &read_file(dir, "options.toml")?)
}

fn parsed(dir: &Path, options: &str) -> Result<Options> {
    let bad = |m: String| not_a_plan(dir, "options.toml", m);
    let options: Options = toml::from_str(options).map_err(|e| bad(e.message().to_string()))?;
    bounds::numbers(&options).map_err(bad)?;
    Ok(options)
}

/// The number of the form that a plan is in, if a plan is there.
pub fn schema(dir: &Path) -> Option<u64> {
    let json: Json = serde_json::from_str(&read_file(dir, "plan.json").ok()?).ok()?;
    json["schema"].as_u64()
}

/// A plan of another form, with the command that makes it anew.
fn of_another_build(dir: &Path, head: &Json) -> Diag {
    let place = bare(dir).display().to_string();
    let model = ["origin", "name"].iter().find_map(|k| head[k].as_str()).unwrap_or("MODEL");
    let options = read_file(dir, "options.toml").unwrap_or_default();
    let options: toml::Table = toml::from_str(&options).unwrap_or_default();
    let given = options.get("given").and_then(|g| g.as_array()).into_iter().flatten();
    let given: String = given.filter_map(|g| Some(format!(" --{}", g.as_str()?))).collect();
    Diag::new("plan", format!("the plan has schema {}, this shardc reads {SCHEMA}", head["schema"]))
        .at(dir.join("plan.json").display().to_string())
        .rule("a plan is run by the version of shardc that compiled it")
        .help(format!("make it anew: shardc compile {model}{given} -o {place}, as in options.toml"))
}

/// Reads a plan: parses and verifies its programs and plans their memory again; all must agree with
/// what `plan.json` says.
pub fn read(dir: &Path) -> Result<Stored> {
    let found = std::fs::metadata(dir.join("plan.json"));
    if let Err(e) = &found
        && !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
    {
        return Err(io_error("cannot read the plan", dir, e));
    }
    if found.is_err() {
        let place = bare(dir);
        let place = place.display();
        let (what, help) = if dir.is_file() {
            ("this is a file", "give the folder of the plan".to_string())
        } else if dir.join("config.json").is_file() {
            let help = format!("compile it first: shardc compile {place} -o {place}.plan");
            ("this is a model, not a plan", help)
        } else {
            ("no plan is here", format!("shardc compile MODEL -o {place} makes one"))
        };
        return Err(Diag::new("plan", what).at(place.to_string()).help(help));
    }
    let bad = |file: &str, m: String| not_a_plan(dir, file, m);
    let text = read_file(dir, "plan.json")?;
    let json: Json = serde_json::from_str(&text).map_err(|e| bad("plan.json", e.to_string()))?;
    if json["schema"] != SCHEMA {
        return Err(of_another_build(dir, &json));
    }
    let head: Head = serde_json::from_str(&text).map_err(|e| bad("plan.json", e.to_string()))?;
    let ([source, options, programs, csv, weights, config], from) = unchanged(dir, &text, &head)?;
    let weights: Vec<Weight> =
        serde_json::from_str(&weights).map_err(|e| bad("weights.json", e.to_string()))?;
    bounds::weights(&weights).map_err(|e| bad("weights.json", e))?;
    let facts = head.facts.as_ref().map_or(Ok(()), bounds::facts);
    facts.map_err(|e| bad("plan.json", e))?;
    let options = parsed(dir, &options)?;
    let config = serde_json::from_str(&config).map_err(|e| bad("config.json", e.to_string()))?;
    let of_programs = |mut d: Diag| {
        let file = dir.join("programs/all.ir").display().to_string();
        d.place = Some(d.place.map_or(file.clone(), |p| format!("{file}: {p}")));
        d
    };
    let module = text::parse(&programs).map_err(of_programs)?;
    if module.phase != Phase::Step {
        let what = format!("programs of phase {}, and not of a step", module.phase);
        return Err(bad("programs/all.ir", what));
    }
    verify(&module, Phase::Step).map_err(|mut all| of_programs(all.swap_remove(0)))?;
    let m = head.settings.microbatches;
    if m == 0 || m > 1 << 20 {
        return Err(bad("plan.json", format!("{m} microbatches")));
    }
    bounds::agree(&options, &head.settings, &module.mesh).map_err(|e| bad("options.toml", e))?;
    bounds::scaling(&head.settings, &module).map_err(|e| bad("plan.json", e))?;
    let (tokens, seq) = (head.settings.tokens, head.settings.seq);
    if !tokens.fits(seq) {
        return Err(bad("plan.json", format!("{seq} tokens cannot be distributed as {tokens:?}")));
    }
    let schedule =
        parse_csv(&csv).map_err(|d| d.at(dir.join("schedule.csv").display().to_string()))?;
    let (p, of) = (schedule.ranks.len(), schedule.microbatches);
    if (p, of) != (module.mesh.pipeline(), m) {
        return Err(bad("schedule.csv", format!("it has {p} ranks and {of} microbatches")));
    }
    let classes = rank_classes(&module, &schedule, &head.settings)?;
    let peaks: Vec<usize> = classes.iter().map(|c| c.memory.peak_bytes).collect();
    if peaks != head.peak_bytes {
        return Err(bad(
            "plan.json",
            format!(
                "the plan states peaks of {:?} B, its programs need {peaks:?}",
                head.peak_bytes
            ),
        ));
    }
    let plan = Plan { module, classes, schedule, weights, settings: head.settings };
    shardc_passes::step::replay::replay(&plan)?;
    shardc_passes::memory::replay::replay(&plan).map_err(|m| bad("programs/all.ir", m))?;
    Ok(Stored {
        plan,
        options,
        source,
        family: head.family,
        facts: head.facts,
        config,
        origin: head.origin,
        name: head.name,
        from,
        report: head.report,
    })
}
