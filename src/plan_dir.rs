//! The plan directory: `plan.json`, `source.ir`, `options.toml`, `programs/*.ir`, `schedule.csv`,
//! `weights.json`, `config.json`; with code for devices, `kernels/`. Text is the plan: on loading it is parsed, verified, and its memory planned again.

use crate::SCHEMA;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use shardc_frontends::Facts;
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::plan::{Plan, Settings};
use shardc_ir::schedule::{parse_csv, write_csv};
use shardc_ir::text;
use shardc_ir::verify::{Phase, verify};
use shardc_ir::weights::Weight;
use shardc_passes::options::Options;
use shardc_passes::pipeline::rank_classes;
use std::path::{Path, PathBuf};

/// `plan.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Head {
    schema: u32,
    version: String,
    family: String,
    settings: Settings,
    facts: Option<Facts>,
    /// blake3 of the source text, the options and the model's config: what the plan was made of.
    source_hash: String,
    /// blake3 of the programs and of the schedule.
    programs_hash: String,
    /// By rank class.
    peak_bytes: Vec<usize>,
    report: Json,
}

/// A plan with what it was made of.
#[derive(Clone, Debug)]
pub struct Stored {
    pub plan: Plan,
    pub options: Options,
    /// The annotated model on one device, as text.
    pub source: String,
    pub family: String,
    pub facts: Option<Facts>,
    /// The model's config.json, if it came from one.
    pub config: Json,
    pub report: Json,
}

impl Stored {
    /// blake3 of all that ranks run by: equal plans have equal ones, whatever file they are in.
    pub fn hash(&self) -> String {
        let p = &self.plan;
        let (programs, schedule) = (text::print(&p.module), write_csv(&p.schedule));
        hash(&[&programs, &schedule, &pretty(&p.weights), &pretty(&p.settings)])
    }
}

fn hash(parts: &[&str]) -> String {
    let mut h = blake3::Hasher::new();
    for p in parts {
        h.update(&(p.len() as u64).to_le_bytes()).update(p.as_bytes());
    }
    h.finalize().to_hex().to_string()
}

/// Files and folders of a plan.
const FILES: [&str; 8] = [
    "plan.json",
    "source.ir",
    "options.toml",
    "programs",
    "schedule.csv",
    "weights.json",
    "config.json",
    crate::device::FOLDER,
];

/// A plan replaces nothing but a plan: no file, and no folder that holds anything else.
fn check_target(dir: &Path) -> Result<()> {
    let refuse = |what: String| {
        let name = dir.file_name().map_or("model".into(), |n| n.to_string_lossy().into_owned());
        Err(Diag::new("output", what)
            .at(dir.display().to_string())
            .help(format!("give -o a new folder, such as {name}.plan")))
    };
    match std::fs::symlink_metadata(dir) {
        Err(_) => return Ok(()),
        Ok(m) if !m.is_dir() => return refuse("this exists and is not a folder".into()),
        Ok(_) => {}
    }
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names: Vec<String> =
        entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    if let Some(other) = names.iter().find(|n| !FILES.contains(&n.as_str())) {
        return refuse(format!("the folder holds {other}, which is no part of a plan"));
    }
    if !names.is_empty() && !names.iter().any(|n| n == "plan.json") {
        return refuse("the folder holds files and is no plan".into());
    }
    Ok(())
}

/// Writes the directory beside its place and renames it; replaces only what is a plan.
pub fn write(dir: &Path, s: &Stored, report: &impl Serialize) -> Result<()> {
    check_target(dir)?;
    let programs = text::print(&s.plan.module);
    let schedule = write_csv(&s.plan.schedule);
    let options = toml::to_string(&s.options).expect("options are plain data");
    let mut report = serde_json::to_value(report).expect("a report is plain data");
    // Times differ from run to run; the plan must not.
    for key in ["compile_ms", "phases"] {
        report.as_object_mut().and_then(|r| r.remove(key));
    }
    let head = Head {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION").into(),
        family: s.family.clone(),
        settings: s.plan.settings.clone(),
        facts: s.facts,
        source_hash: hash(&[&s.source, &options, &pretty(&s.config)]),
        programs_hash: hash(&[&programs, &schedule]),
        peak_bytes: s.plan.classes.iter().map(|c| c.memory.peak_bytes).collect(),
        report,
    };
    let name = dir.file_name().map_or("plan".into(), |n| n.to_string_lossy().into_owned());
    let tmp = dir.with_file_name(format!("{name}.tmp-{}", std::process::id()));
    let files: [(&str, String); 7] = [
        ("plan.json", pretty(&head)),
        ("source.ir", s.source.clone()),
        ("options.toml", options),
        ("programs/all.ir", programs),
        ("schedule.csv", schedule),
        ("weights.json", pretty(&s.plan.weights)),
        ("config.json", pretty(&s.config)),
    ];
    let put = || -> std::io::Result<()> {
        std::fs::create_dir_all(tmp.join("programs"))?;
        for (file, content) in &files {
            std::fs::write(tmp.join(file), content)?;
        }
        // The old plan stays until the new one is there.
        let old = dir.with_file_name(format!("{name}.old-{}", std::process::id()));
        let replaces = dir.exists();
        if replaces {
            std::fs::rename(dir, &old)?;
        }
        if let Err(e) = std::fs::rename(&tmp, dir) {
            if replaces {
                std::fs::rename(&old, dir)?;
            }
            return Err(e);
        }
        if replaces { std::fs::remove_dir_all(&old) } else { Ok(()) }
    };
    put().map_err(|e| {
        let _ = std::fs::remove_dir_all(&tmp);
        Diag::new("output", e.to_string())
            .at(dir.display().to_string())
            .help("choose a folder that can be written")
            .exit(Exit::Environment)
    })
}

fn pretty<T: Serialize>(x: &T) -> String {
    serde_json::to_string_pretty(x).expect("plain data") + "\n"
}

/// Largest file of a plan that is read, in bytes.
const MAX_FILE: u64 = 1 << 30;

fn read_file(dir: &Path, name: &str) -> Result<String> {
    let path: PathBuf = dir.join(name);
    let bad = |m: String| {
        Diag::new("plan", m)
            .at(path.display().to_string())
            .help("make the plan again with shardc compile")
    };
    let size = std::fs::metadata(&path).map_err(|e| bad(e.to_string()))?.len();
    if size > MAX_FILE {
        return Err(bad(format!("{size} bytes is more than the largest plan file, {MAX_FILE}")));
    }
    std::fs::read_to_string(&path).map_err(|e| bad(e.to_string()))
}

/// Reads a plan: parses and verifies its programs and plans their memory again; all must agree with
/// what `plan.json` says.
pub fn read(dir: &Path) -> Result<Stored> {
    if !dir.join("plan.json").is_file() {
        let place = dir.display();
        let (what, help) = if dir.is_file() {
            ("this is a file", "give the folder of the plan".to_string())
        } else if dir.join("config.json").is_file() {
            let help = format!("compile it first: shardc compile {place} -o {place}.plan");
            ("this is a model, no plan", help)
        } else {
            ("there is no plan here", format!("shardc compile MODEL -o {place} makes one"))
        };
        return Err(Diag::new("plan", what).at(place.to_string()).help(help));
    }
    let bad = |file: &str, m: String| {
        Diag::new("plan", m)
            .at(dir.join(file).display().to_string())
            .help("make the plan again with shardc compile")
    };
    let head: Head = serde_json::from_str(&read_file(dir, "plan.json")?)
        .map_err(|e| bad("plan.json", e.to_string()))?;
    if head.schema != SCHEMA {
        return Err(bad(
            "plan.json",
            format!("the plan has schema {}, this shardc reads {SCHEMA}", head.schema),
        ));
    }
    let (source, options, config_text, programs, csv) = (
        read_file(dir, "source.ir")?,
        read_file(dir, "options.toml")?,
        read_file(dir, "config.json")?,
        read_file(dir, "programs/all.ir")?,
        read_file(dir, "schedule.csv")?,
    );
    if hash(&[&programs, &csv]) != head.programs_hash
        || hash(&[&source, &options, &config_text]) != head.source_hash
    {
        return Err(bad(
            "programs/all.ir",
            "the texts are not those that the plan was made of (their hash differs)".into(),
        ));
    }
    let weights: Vec<Weight> = serde_json::from_str(&read_file(dir, "weights.json")?)
        .map_err(|e| bad("weights.json", e.to_string()))?;
    let options: Options =
        toml::from_str(&options).map_err(|e| bad("options.toml", e.message().to_string()))?;
    let config =
        serde_json::from_str(&config_text).map_err(|e| bad("config.json", e.to_string()))?;
    let module = text::parse(&programs)?;
    verify(&module, Phase::Ranked).map_err(|mut all| all.swap_remove(0))?;
    let m = head.settings.microbatches;
    if m == 0 || m > 1 << 20 {
        return Err(bad("plan.json", format!("{m} microbatches")));
    }
    let (tokens, seq) = (head.settings.tokens, head.settings.seq);
    if !tokens.fits(seq) {
        return Err(bad("plan.json", format!("{seq} tokens cannot be dealt as {tokens:?}")));
    }
    let schedule =
        parse_csv(&csv).map_err(|d| d.at(dir.join("schedule.csv").display().to_string()))?;
    let (p, of) = (schedule.ranks.len(), schedule.microbatches);
    if (p, of) != (module.mesh.pipeline(), m) {
        return Err(bad("schedule.csv", format!("it has {p} ranks and {of} microbatches")));
    }
    let classes = rank_classes(&module, &schedule, head.settings.mode)?;
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
        report: head.report,
    })
}
