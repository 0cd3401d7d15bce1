//! Update rules in other software: which of ours it has, and why not the others.

use super::Export;
use shardc_passes::optim::{of_all, own_rules};
use shardc_passes::options::Options;
use shardc_plans::flags::Target;
use shardc_plans::flags::spec::TRAINERS;

/// Numbers of Lion, by which all that is trained is updated.
pub(super) struct Lion {
    pub betas: [f64; 2],
    pub decay: Option<f64>,
    /// The learning rate, as a multiple of the run's.
    pub lr: f64,
}

/// Those of a plan, if it is built in and keeps f32.
pub(super) fn lion(o: &Options) -> Option<Lion> {
    let g = of_all(o).filter(|g| g.rule == "lion" && o.optim_file.is_empty())?;
    let number = |key: &str, default| match g.given.get(key) {
        Some(text) => text.parse().ok(),
        None => Some(default),
    };
    let known = ["beta1", "beta2", "decay", "state_dtype"];
    let fits = g.given.keys().all(|k| known.contains(&&**k));
    let f32 = g.given.get("state_dtype").is_none_or(|d| d == "f32");
    let betas = [number("beta1", 0.9)?, number("beta2", 0.99)?];
    let decay = g.given.get("decay").map(|d| d.parse().ok());
    let decay = match decay {
        Some(None) => return None,
        Some(known) => known,
        None => None,
    };
    (fits && f32).then_some(Lion { betas, decay, lr: g.lr })
}

/// Notes what a target has not of the groups of a plan: of software that has a config for training.
pub(super) fn check(e: &mut Export) {
    let to = e.to;
    if !TRAINERS.contains(&to) || (to == Target::Deepspeed && lion(e.o).is_some()) {
        return;
    }
    let of_file = own_rules(e.o);
    for name in &of_file {
        let what = format!("the update rule `@{name}` of --optim-file: it is a text of your own");
        e.lack(true, what);
    }
    for text in &e.o.optim {
        let rule = text.split_once('=').map_or("", |x| x.1).split(',').next().unwrap_or("").trim();
        e.lack(true, format!("the update rule `{text}`: {}", why(to, rule)));
    }
    if !e.o.optim.is_empty() || !of_file.is_empty() {
        e.helps.push("compile with --optimizer adamw or sgd and no --optim or --optim-file, or train it here: shardc run, or export --to torch");
    }
}

/// Why a target has not this rule for a group of parameters.
fn why(to: Target, rule: &str) -> &'static str {
    match (to, rule) {
        (Target::Megatron, "muon") => {
            "its Muon takes gate and up as one matrix (linear_fc1), and their norm before the cast"
        }
        (Target::Megatron, "lion") => "its Lion leaves embeddings and head to Adam",
        (Target::Deepspeed, "muon") => "its Muon adds 1e-7 to a norm that is here at least 1e-7",
        (Target::Deepspeed, "lion") => {
            "its Lion has states of f32 and is for all parameters alike; groups belong in the training script"
        }
        (Target::Megatron | Target::Deepspeed, "adafactor") => "it has no Adafactor",
        (Target::Torchtitan, _) => {
            "optimizers of groups are those of its own config, which this export does not write"
        }
        (Target::Nanotron, _) => "this export writes AdamW of all parameters",
        _ => "groups of parameters belong in its training script",
    }
}
