//! `shardc export`: a plan as flags or files of other software, or what that software lacks.
//!
//! Nothing is written that is merely near: what a target cannot say is refused, all of it at once. Layout and facts of
//! the model are always written, settings of training if they were chosen.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod asked;
mod chakra;
mod deepspeed;
mod dtensor;
mod hf;
pub mod megatron;
mod nanotron;
mod rules;
pub mod torch;
mod torchtitan;

use serde_json::Value as Json;
use shardc_frontends::Facts;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::FuncKind;
use shardc_passes::options::{Options, Order};
use shardc_plans::flags::{Target, spec};

use shardc_plans::stored::Stored;
use shardc_report::report::layers_of;
use std::collections::BTreeMap;

/// A file of an export.
pub struct File {
    pub name: String,
    pub bytes: Vec<u8>,
}

impl File {
    fn new(name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> File {
        File { name: name.into(), bytes: bytes.into() }
    }
}

/// What is exported.
pub struct Exported {
    pub files: Vec<File>,
    /// What is told beside the files.
    pub told: Vec<String>,
}

/// A plan for a target. Settings of training that nobody chose are written if the export is to be exact, and else
/// noted, with what the target does without them.
///
/// # Errors
/// `export` with all that the target lacks.
pub fn export(s: &Stored, to: Target, exact: bool) -> Result<Exported> {
    of_options(s, &s.options, to, exact)
}

/// Whether a target takes a plan with these options, or one that is not compiled yet and has no programs: then what
/// programs say is not looked at.
///
/// # Errors
/// `export` with all that the target lacks.
pub fn takes(s: &Stored, o: &Options, to: Target) -> Result<()> {
    of_options(s, o, to, false).map(drop)
}

fn of_options(s: &Stored, o: &Options, to: Target, exact: bool) -> Result<Exported> {
    let mut e = Export { s, o, to, exact, notes: vec![], lacks: vec![], helps: vec![] };
    for lack in spec::all().flat_map(|s| s.lacks).filter(|l| l.to.contains(&to)) {
        e.lack((lack.asked)(o), lack.what);
    }
    rules::check(&mut e);
    let files = match to {
        Target::Megatron => megatron::files(&mut e)?,
        Target::Torchtitan => torchtitan::files(&mut e)?,
        Target::Deepspeed => deepspeed::files(&mut e)?,
        Target::Nanotron => nanotron::files(&mut e)?,
        Target::HfTpPlan => hf::files(&mut e)?,
        Target::Dtensor => dtensor::files(&mut e)?,
        Target::Chakra => chakra::files(&mut e)?,
        Target::Torch => torch::files(&mut e)?,
    };
    e.done()?;
    // What its files have no room for: the version that reads them first.
    let told = e.notes.into_iter().chain(beside(s, to)).collect();
    Ok(Exported { files, told })
}

/// What is told beside the files: what the plan does and a target does not say, though numbers and exchanges are the
/// same.
fn beside(s: &Stored, to: Target) -> Vec<String> {
    match to {
        Target::Megatron | Target::Deepspeed | Target::Nanotron => {}
        // Its file says so itself, and the others are no trainings, or the plan's own.
        Target::Torchtitan
        | Target::HfTpPlan
        | Target::Dtensor
        | Target::Chakra
        | Target::Torch => return vec![],
    }
    let name = to.software();
    let copy = (to == Target::Megatron).then(|| megatron::copied(s)).flatten();
    let again = s.options.recompute.cuts().then(|| {
        format!(
            "{name} saves what its kernels save: the plan makes element-wise work again (--recompute {}), so it needs \
             less memory (shardc compile --recompute none says how much more)",
            s.options.recompute
        )
    });
    copy.into_iter().chain(again).collect()
}

/// A plan on its way out.
struct Export<'a> {
    s: &'a Stored,
    o: &'a Options,
    to: Target,
    /// Whether settings of training are written that nobody chose.
    exact: bool,
    /// Of settings that are not written: what the plan has, and the target. A target whose files take comments takes
    /// them from here.
    notes: Vec<String>,
    /// What the target cannot say, or what is not written for it.
    lacks: Vec<String>,
    /// What else to compile with.
    helps: Vec<&'static str>,
}

impl<'a> Export<'a> {
    fn n(&self, axis: &str) -> usize {
        self.o.axis(axis)
    }

    /// Sizes of tp, cp, pp, dp_replicate and dp_shard.
    fn axes(&self) -> [usize; 5] {
        ["tp", "cp", "pp", "dp_replicate", "dp_shard"].map(|a| self.n(a))
    }

    /// Notes what is missing, if it is asked for.
    fn lack(&mut self, asked: bool, what: impl Into<String>) {
        if asked {
            self.lacks.push(what.into());
        }
    }

    /// True if products have biases that few targets have: all but those of q, k and v of Qwen2.
    fn has_biases(&self) -> bool {
        let on = |key: &str| self.s.config.get(key) == Some(&true.into());
        on("mlp_bias") || (on("attention_bias") && self.s.family != "qwen2")
    }

    /// Refuses if anything is missing.
    fn done(&self) -> Result<()> {
        if self.lacks.is_empty() {
            return Ok(());
        }
        let name = self.to.name();
        let d = Diag::new("export", format!("{name} cannot express all of this plan"))
            .at(format!("--to {name}"))
            .rule("an export is exact: approximations are not written");
        let d = self.lacks.iter().fold(d, |d, l| d.why(l.clone()));
        let d = self.helps.iter().fold(d, |d, h| d.help(*h));
        Err(d.help(match self.helps.len() {
            0 => "compile without them, or export to another target",
            n if n < self.lacks.len() => "compile without the others, or export to another target",
            _ => "or export to another target",
        }))
    }

    /// Others read config.json as that of the model that is compiled.
    fn is_whole(&mut self) {
        let part = shardc_frontends::is_wrapper(&self.s.config);
        self.lack(part, "the text model in one of another kind (text_config)");
    }

    /// What no software takes that has a config of its own for training, but for what options declare.
    fn trains(&mut self) {
        self.lack(self.s.facts.is_none(), "a text model, which belongs to no family");
        self.is_whole();
        let window = self.s.config.get("sliding_window").is_some_and(|w| !w.is_null());
        let window = window && self.s.config.get("use_sliding_window") != Some(&Json::Bool(false));
        let chunks = self.s.config.get("attention_chunk_size").is_some_and(|c| !c.is_null());
        self.lack(chunks, "attention in chunks (attention_chunk_size)");
        self.lack(
            window,
            "sliding-window attention (sliding_window), which this export does not support yet",
        );
    }

    /// The name of the schedule, of plans with stages.
    fn schedule(&self) -> Option<&str> {
        match &self.o.schedule {
            _ if self.n("pp") == 1 => None,
            Order::Named(name) => Some(name),
            Order::Csv(_) => Some("a CSV file"),
        }
    }

    /// Layers of every stage in the order of the model: the first, and how many. Notes it if stages begin
    /// inside of layers.
    fn stages(&mut self) -> Vec<(u32, usize)> {
        let mut by_layer: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        let m = &self.s.plan.module;
        for f in m.of_kind(FuncKind::Forward) {
            for l in layers_of(f) {
                let all = by_layer.entry(l).or_default();
                if !all.contains(&f.stage) {
                    all.push(f.stage);
                }
            }
        }
        let inside = by_layer.values().any(|s| s.len() > 1);
        self.lack(inside, "stages that begin inside a layer (--layers)");
        let count = self.s.plan.schedule.owner.len();
        let of = |stage: usize| {
            let own = by_layer.iter().filter(move |x| x.1.contains(&stage)).map(|x| *x.0);
            (own.clone().next().unwrap_or(0), own.count())
        };
        (0..count).map(of).collect()
    }

    fn facts(&self) -> Result<Facts> {
        self.s.facts.map_or_else(|| self.done().and(Err(unknown())), Ok)
    }

    /// A number of config.json.
    fn number(&self, key: &str) -> Option<f64> {
        self.s.config.get(key).and_then(Json::as_f64)
    }

    /// A word of config.json.
    fn word(&self, key: &str) -> Option<&'a str> {
        self.s.config.get(key).and_then(Json::as_str)
    }

    /// Base of the rotary positions, and the name of their scaling if there is one.
    fn rope(&self) -> (f64, Option<String>) {
        let own = self.rope_scaling();
        let theta = own.and_then(|v| v.get("rope_theta")).and_then(Json::as_f64);
        let theta = theta.or(self.number("rope_theta")).unwrap_or(10_000.0);
        let of = |v: &Json, key: &str| v.get(key).and_then(Json::as_str).map(String::from);
        let scaled = own.and_then(|v| of(v, "rope_type").or(of(v, "type")));
        (theta, scaled.filter(|t| t != "default"))
    }

    /// What config.json has of the scaling of rotary positions: where it has both, `rope_scaling`, as models are read.
    fn rope_scaling(&self) -> Option<&'a Json> {
        let of = |key: &str| self.s.config.get(key).filter(|v| v.is_object());
        of("rope_scaling").or(of("rope_parameters"))
    }
}

fn unknown() -> Diag {
    Diag::new("export", "a text model has no table of sizes")
        .help("compile a model of a built-in family")
}
