//! Flags of `compile` that `plan` takes, too: how a model is trained, which is the same in every layout.

use super::Flags;
use clap::error::Error;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use serde_json::{Map, Value};
use std::ffi::OsString;

/// Their names among the fields of [`Flags`]; each takes one value.
const SHARED: [&str; 24] = [
    "seed",
    "grad_dtype",
    "cp_mode",
    "cp_split",
    "layers",
    "moe_bound",
    "moe_aux",
    "moe_z_loss",
    "moe_bias_rate",
    "lr",
    "lr_schedule",
    "warmup",
    "total_steps",
    "min_lr",
    "betas",
    "eps",
    "weight_decay",
    "decay",
    "clip",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
];

/// These flags, as `compile` declares them; all others are not given.
#[derive(Clone, Debug, Default)]
pub struct Training(pub Flags);

impl Training {
    /// Those that are given, by their names on the command line.
    pub fn given(&self) -> Map<String, Value> {
        let word = |name: &str| name.replace('_', "-");
        let is_shared = |name: &str| SHARED.iter().any(|s| word(s) == name);
        self.0.table().into_iter().filter(|(name, _)| is_shared(name)).collect()
    }
}

/// A command with all flags of `compile`.
fn all() -> Command {
    Flags::augment_args(Command::new("flags").no_binary_name(true))
}

impl Args for Training {
    fn augment_args(to: Command) -> Command {
        let all = all();
        let is_shared = |id: &str| SHARED.contains(&id);
        to.args(all.get_arguments().filter(|a| is_shared(a.get_id().as_str())).cloned())
    }

    fn augment_args_for_update(to: Command) -> Command {
        Training::augment_args(to)
    }
}

impl FromArgMatches for Training {
    fn from_arg_matches(m: &ArgMatches) -> Result<Training, Error> {
        // What was given is read once more, by the declaration of them all.
        let mut words: Vec<OsString> = vec![];
        for id in SHARED {
            for value in m.get_raw(id).into_iter().flatten() {
                let mut word = OsString::from(format!("--{}=", id.replace('_', "-")));
                word.push(value);
                words.push(word);
            }
        }
        Flags::from_arg_matches(&all().try_get_matches_from(words)?).map(Training)
    }

    fn update_from_arg_matches(&mut self, m: &ArgMatches) -> Result<(), Error> {
        *self = Training::from_arg_matches(m)?;
        Ok(())
    }
}
