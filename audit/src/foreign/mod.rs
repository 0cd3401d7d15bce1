//! Configurations of other software than Megatron-LM: ranks and batches in TOML or JSON, the model in a folder. A format
//! says which keys it has, what their values are and what they mean; all else is the same for all.

mod deepspeed;
mod held;
mod modules;
mod torchtitan;
mod transformers;

use super::rules::Table;
use super::sizes::JobSizes;
use super::{Job, States, in_range};
use serde_json::Value as Json;
use shardc_cost::held::Software;
use shardc_cost::layout::Context;
use shardc_frontends::config::with_words;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_ir::names::nearest;
use shardc_ir::types::DType;
use shardc_passes::options::{CpMode, CpSplit};
use std::path::Path;

pub use deepspeed::DEEPSPEED;
pub use torchtitan::TORCHTITAN;
pub use transformers::TRANSFORMERS;

/// Largest config.json that is read, in bytes.
const MAX: u64 = 16 << 20;

/// Larger numbers are taken as this one, which no job has.
const MOST: u64 = 1 << 24;

/// What the value of a key is.
#[derive(Clone, Copy)]
enum Kind {
    /// A whole number above 0, or this one, which says that there is none.
    Count(i64),
    /// A whole number from 0 to this one.
    UpTo(u64),
    Switch,
    /// Keys of its own.
    Section,
    /// Names with a word each.
    Words,
    /// What changes no sum, or is read elsewhere.
    Idle,
    /// The same if it is this word.
    Only(&'static str),
}

/// How a software is configured.
pub struct Format {
    software: &'static str,
    table: fn() -> Table,
    /// Keys of which something is made, or which change no sum.
    keys: &'static [(&'static str, Kind)],
    /// Sections, or the top (``), of which all other keys are listed.
    sections: &'static [&'static str],
    /// Keys with which ranks hold what is not audited.
    outside: &'static [&'static str],
    /// Keys whose product is the number of ranks where it is not given.
    ranks: &'static [&'static str],
    cp: (CpMode, Option<CpSplit>),
    /// The numbers, with what the software refuses.
    read: fn(&Config, usize, &Json, &mut Vec<String>) -> Ranks,
}

/// The numbers of a configuration.
struct Ranks {
    sizes: JobSizes,
    /// Of dp, ranks that have copies of all shards.
    replicas: usize,
    zero: u8,
    dtype: DType,
    /// How modules are split over tp; none: as in the layouts of the family.
    plan: Option<transformers::Plan>,
    /// What the program decides, and how it is taken.
    notes: Vec<String>,
}

/// A configuration, by dotted names of its numbers and words.
struct Config<'a> {
    format: &'a Format,
    json: Json,
    place: &'a str,
}

impl<'a> Config<'a> {
    /// A text as JSON or as TOML.
    fn parsed(format: &'a Format, text: &str, place: &'a str) -> Result<Config<'a>> {
        let json = match text.trim_start().starts_with('{') {
            true => serde_json::from_slice(&with_words(text.as_bytes())).map_err(|e| e.to_string()),
            false => toml::from_str(text).map_err(|e| e.message().to_string()),
        };
        let json = json.map_err(|e| {
            Diag::new("audit", format!("neither JSON nor TOML: {e}"))
                .at(place.to_string())
                .rule("a configuration is a text of numbers and words; no program is executed")
                .help("docs/audit.md has the lines of Python that write one")
        })?;
        Ok(Config { format, json, place })
    }

    fn get(&self, name: &str) -> Option<&Json> {
        name.split('.').try_fold(&self.json, |at, key| at.get(key))
    }

    /// A number that is counted with; none if it is not there or not above 0.
    fn count(&self, name: &str) -> Option<usize> {
        self.get(name).and_then(Json::as_u64).filter(|n| *n > 0).map(|n| n.min(MOST) as usize)
    }

    fn is(&self, name: &str) -> Option<bool> {
        self.get(name).and_then(Json::as_bool)
    }

    /// Values that are of another kind than is wanted.
    fn misfits(&self) -> Vec<String> {
        let of = |(name, kind): &(&str, Kind)| {
            let v = self.get(name).filter(|v| !v.is_null())?;
            let words = || v.as_object().is_some_and(|o| o.values().all(Json::is_string));
            let (fits, what) = match *kind {
                Kind::Count(none) => {
                    let fits = v.as_i64().is_some_and(|n| n > 0 || n == none);
                    (fits, "a whole number above 0".to_string())
                }
                Kind::UpTo(most) => {
                    let fits = v.as_u64().is_some_and(|n| n <= most);
                    (fits, format!("a number from 0 to {most}"))
                }
                Kind::Switch => (v.is_boolean(), "true or false".into()),
                Kind::Section => (v.is_object(), "a section in braces".into()),
                Kind::Words => (words(), "names of modules with a word each".into()),
                Kind::Idle | Kind::Only(_) => return None,
            };
            let text: String = format!("{name} = {v}").chars().take(80).collect();
            let auto =
                if *v == "auto" { ": write the one that the trainer puts there" } else { "" };
            (!fits).then(|| format!("{text}: {what} is wanted{auto}"))
        };
        self.format.keys.iter().filter_map(of).collect()
    }

    /// Keys that nothing is made of.
    fn unread(&self) -> Vec<String> {
        let mut out = vec![];
        if self.json.get("model_type").is_some() {
            // It is the config of a model itself.
            return out;
        }
        for section in self.format.sections {
            let top = section.is_empty();
            let of = if top { Some(&self.json) } else { self.get(section) };
            for (key, value) in of.and_then(Json::as_object).into_iter().flatten() {
                let name = if top { key.clone() } else { format!("{section}.{key}") };
                let idle = value.is_null() || *value == Json::Bool(false) || *value == "";
                let known = |(key, kind): &(&str, Kind)| match kind {
                    Kind::Only(word) => *key == name && value == word,
                    _any => *key == name,
                };
                if !idle && !self.format.keys.iter().any(known) {
                    let text: String = format!("{name} = {value}").chars().take(80).collect();
                    out.push(format!("{text}: not modelled"));
                }
            }
        }
        // A section by another name is none of those that are read.
        let all = self.format.sections;
        let others = self.json.as_object().filter(|_| !all.contains(&"")).into_iter().flatten();
        for (key, _) in others.filter(|(key, _)| !all.contains(&&***key)) {
            if let Some(near) = nearest(key, all.iter().copied(), 1).first()
                && self.json.get(near).is_none()
            {
                out.push(format!("the section {key} is not read: {near} is one that is"));
            }
        }
        out
    }

    /// The config.json that it has or is, or that of a folder, or of its path.
    fn model(&self, path: Option<&Path>) -> Result<Json> {
        let within = [self.get("config"), Some(&self.json)];
        let is = |c: &&Json| c.get("model_type").is_some_and(Json::is_string);
        if let (None, Some(own)) = (path, within.into_iter().flatten().find(is)) {
            return Ok(own.clone());
        }
        let path = path.ok_or_else(|| {
            Diag::new("audit", "the model is not given")
                .rule("this configuration does not have the sizes of its model")
                .help("give --model FOLDER, with the model's config.json")
        })?;
        let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let text = files::read_text(&file, MAX)?;
        serde_json::from_str(&text).map_err(|e| {
            Diag::new("config", e.to_string())
                .at(file.display().to_string())
                .help("give the config.json of a model")
        })
    }

    /// The number of ranks, which its own sizes may say.
    fn world(&self, gpus: Option<usize>) -> Result<usize> {
        let sizes: Vec<usize> = self.format.ranks.iter().filter_map(|k| self.count(k)).collect();
        let own = sizes.iter().fold(1, |all: usize, n| all.saturating_mul(*n));
        let ranks = gpus.or((!sizes.is_empty()).then_some(own)).ok_or_else(|| {
            Diag::new("audit", "the number of ranks is not given")
                .at(self.place.to_string())
                .help("give --gpus N")
        })?;
        in_range(ranks, self.place)?;
        Ok(ranks)
    }

    /// Refuses what would make all that is said of ranks wrong.
    fn within(&self) -> Result<()> {
        let on = |v: &Json| *v == true || v.as_u64().is_some_and(|n| n > 1);
        let found = self.format.outside.iter().find(|k| self.get(k).is_some_and(on));
        found.map_or(Ok(()), |key| {
            Err(Diag::new("audit", format!("{key} of {} is not audited", self.format.software))
                .at(self.place.to_string())
                .help("leave it out, and audit the rest"))
        })
    }

    fn refused(&self, why: Vec<String>) -> Result<()> {
        if why.is_empty() {
            return Ok(());
        }
        let what = format!("{} refuses this configuration", self.format.software);
        let d = Diag::new("audit", what).at(self.place.to_string());
        Err(why.into_iter().fold(d, Diag::why).help("correct the numbers, or --gpus"))
    }
}

/// Reads a configuration for so many ranks, with the model in a folder.
///
/// # Errors
/// `audit` for what the software refuses itself, and for numbers that are not given.
pub fn read(
    format: &Format,
    text: &str,
    place: &str,
    gpus: Option<usize>,
    at: Option<&Path>,
) -> Result<Job> {
    let c = Config::parsed(format, text, place)?;
    c.within()?;
    let mut why = c.misfits();
    let (world, config) = match (c.world(gpus), c.model(at)) {
        (Ok(world), Ok(config)) => (world, config),
        // A number that is none may be why.
        (Err(d), _) | (_, Err(d)) => return c.refused(why).and(Err(d)),
    };
    let r = (format.read)(&c, world, &config, &mut why);
    c.refused(why)?;
    job(&c, r, config)
}

/// Whether a config.json says that the embedding is the output projection, too.
fn tied(config: &Json) -> bool {
    let of = |c: &Json| c["tie_word_embeddings"] == true;
    of(config) || of(&config["text_config"])
}

/// Tokens of a sequence, where the configuration does not say it.
fn tokens(config: &Json) -> usize {
    let of = |c: &Json| c["max_position_embeddings"].as_u64().or(c["n_positions"].as_u64());
    of(config).or(of(&config["text_config"])).unwrap_or(4096).clamp(1, 4096) as usize
}

/// Refuses batches that are none.
fn batches(r: &JobSizes, place: &str) -> Result<()> {
    let all = r.micro.saturating_mul(r.dp);
    let (what, help) = match r.global {
        n if n as u64 > MOST => (format!("a global batch of {n}"), "correct the batches"),
        n if n % all != 0 => (
            format!("the global batch ({n}) is no multiple of microbatch * dp ({all})"),
            "correct the batches, or --gpus",
        ),
        _fits => return Ok(()),
    };
    Err(Diag::new("audit", what)
        .at(place.to_string())
        .rule(format!("it is at most {MOST}, and each rank has as many microbatches"))
        .help(help))
}

fn job(c: &Config, r: Ranks, config: Json) -> Result<Job> {
    let n = &r.sizes;
    batches(n, c.place)?;
    let (weight, bytes) = if r.dtype != DType::F32 && r.zero < 3 { (2, 12) } else { (4, 8) };
    let data = n.dp * n.cp;
    let states = States { zero: r.zero, instances: r.replicas, bytes, weight, gradient: 4, data };
    let mut job = Job {
        software: c.format.software,
        config,
        options: n.options(r.replicas, r.dtype, c.format.cp),
        given: n.given(),
        states,
        layout: n.priced(n.dp / r.replicas, r.zero, Context::Gathered),
        held: Software::Torchtitan,
        absent: vec![],
        table: (c.format.table)(),
        at: None,
        not_modelled: r.notes.into_iter().chain(c.unread()).collect(),
        parts: None,
    };
    if let Some(plan) = r.plan {
        plan.lay(&mut job, c.place)?;
    }
    Ok(job)
}
