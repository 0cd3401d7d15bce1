//! Flags as arguments of commands: all of them, and those that `plan` and `run` take, too.

use super::spec::{Kind, OptionSpec, all};
use super::{Flags, Value};
use clap::error::Error;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use serde_json::{Map, Value as Json};

/// A flag as clap has it.
pub(super) fn arg(s: &OptionSpec, default: &str) -> Arg {
    let help = match default {
        "" => s.help.to_string(),
        default => format!("{} [default: {default}]", s.help),
    };
    let value = if s.value.is_empty() { s.id().to_uppercase() } else { s.value.into() };
    let arg = Arg::new(s.id()).long(s.flag).help(help).value_parser(s.kind.parser());
    match s.kind {
        Kind::Switch => arg.action(ArgAction::SetTrue),
        Kind::Many => arg.action(ArgAction::Append).value_name(value),
        Kind::Number => arg.allow_negative_numbers(true).value_name(value),
        Kind::Words(_) | Kind::Whole(..) | Kind::Text => arg.value_name(value),
    }
}

/// Those of some flags that are given.
pub(super) fn read(some: impl Iterator<Item = &'static OptionSpec>, m: &ArgMatches) -> Flags {
    let value = |s: &OptionSpec| Value::of_matches(s.kind, &s.id(), m);
    Flags(some.filter_map(|s| Some((s.flag, value(s)?))).collect())
}

/// Declares a set of flags to clap.
macro_rules! arguments {
    ($set:ident, $some:expr, $arg:expr, $made:expr) => {
        impl Args for $set {
            fn augment_args(to: Command) -> Command {
                to.args($some.map($arg))
            }
            fn augment_args_for_update(to: Command) -> Command {
                $set::augment_args(to)
            }
        }

        impl FromArgMatches for $set {
            fn from_arg_matches(m: &ArgMatches) -> Result<$set, Error> {
                Ok($made(read($some, m)))
            }
            fn update_from_arg_matches(&mut self, m: &ArgMatches) -> Result<(), Error> {
                *self = $set::from_arg_matches(m)?;
                Ok(())
            }
        }
    };
}

/// Flags of the learning rate of a run, which go before the plan's.
#[derive(Clone, Debug, Default)]
pub struct Rate(pub(super) Flags);

/// The flags that `plan` takes, too; all others are not given.
#[derive(Clone, Debug, Default)]
pub struct Training(pub Flags);

arguments!(Flags, all(), |s| arg(s, s.default).help_heading(s.heading), |f| f);
arguments!(
    Training,
    all().filter(|s| s.in_plan),
    |s| arg(s, s.default).help_heading(s.heading),
    Training
);
arguments!(Rate, all().filter(|s| s.in_run), |s| arg(s, "the plan's"), Rate);

impl Training {
    /// Those that are given, by their names on the command line.
    pub fn given(&self) -> Map<String, Json> {
        let some = self.0.given().filter(|(s, _)| s.in_plan);
        some.map(|(s, v)| (s.flag.into(), v.json())).collect()
    }
}
