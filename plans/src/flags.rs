//! Flags of `compile` and `check`, from the command line and from `shardc.toml`; flags win. Each is
//! declared once: [`spec::OptionSpec`] says what follows from that.

mod begun;
mod effect;
mod layout;
mod optimizer;
mod options;
pub mod page;
mod rate;
mod run;
mod shared;
mod shown;
pub mod spec;
mod stages;
mod target;
mod text;
mod value;
mod values;

pub use begun::{begun, unknown};
pub use optimizer::name as optimizer;
pub use options::{adapter_of, lora_of};
pub use rate::ends;
use serde::Deserialize;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::hardware::Hardware;
use shardc_ir::{files, names};
use shardc_passes::options::Options;
pub use shared::{Rate, Training};
pub use shown::{context, yes};
use spec::{Kind, OptionSpec, all};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
pub use target::Target;
pub use text::default_microbatch;
pub use value::Value;
pub use values::{bytes_of, memory, memory_of, place_of, whole};

/// The option that makes a plan only where layouts are chosen by price.
pub const PRICES: &str = "hardware";

/// The flag of an option of options.toml; what has no flag of this name stays as it is.
pub fn flag_of(option: &str) -> String {
    match all().find(|s| s.id() == option) {
        Some(s) => format!("--{}", s.flag),
        None => option.into(),
    }
}

/// What a user asks of the compiler: the flags that are given, by their names without dashes, with
/// their values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Flags(BTreeMap<&'static str, Value>);

impl Flags {
    /// With this value of a flag, or with one more of a flag that has several. A flag without a
    /// value is given with any.
    ///
    /// # Panics
    /// If no flag is called so, or takes no such value.
    pub fn with(self, flag: &str, value: impl ToString) -> Flags {
        self.try_with(flag, value).unwrap_or_else(|d| panic!("{d}"))
    }

    /// As [`Flags::with`], of a value that a user gives.
    ///
    /// # Errors
    /// `flag` if the flag takes no such value.
    ///
    /// # Panics
    /// If no flag is called so.
    pub fn try_with(mut self, flag: &str, value: impl ToString) -> Result<Flags> {
        let (flag, kind) = (declared(flag).flag, declared(flag).kind);
        let value = value.to_string();
        let help = format!("give --{flag} as `shardc compile --help` says");
        let wrong = |m: String| Diag::new("flag", m).at(format!("--{flag} {value}")).help(&help);
        let one = Value::parse(kind, &value).map_err(wrong)?;
        let value = match one {
            Value::Many(one) => Value::Many([self.many(flag), &one].concat()),
            one => one,
        };
        self.0.insert(flag, value);
        Ok(self)
    }

    /// As [`Flags::with`], if there is a value.
    pub fn maybe(self, flag: &str, value: Option<impl ToString>) -> Flags {
        value.into_iter().fold(self, |flags, value| flags.with(flag, value))
    }

    /// These flags, and those of `below` that are not given here.
    pub fn over(self, mut below: Flags) -> Flags {
        below.0.extend(self.0);
        below
    }

    fn get(&self, flag: &str) -> Option<&Value> {
        debug_assert_eq!(declared(flag).flag, flag);
        self.0.get(flag)
    }

    /// Whether a flag is given.
    pub fn has(&self, flag: &str) -> bool {
        self.get(flag).is_some()
    }

    /// The value of a flag that takes text, or one of some words.
    pub fn text(&self, flag: &str) -> Option<&str> {
        self.get(flag).map(Value::text)
    }

    /// The value of a flag that takes a whole number.
    pub fn whole(&self, flag: &str) -> Option<usize> {
        self.get(flag).map(Value::whole)
    }

    /// The value of a flag that takes a number.
    pub fn number(&self, flag: &str) -> Option<f64> {
        self.get(flag).map(Value::number)
    }

    /// The values of a flag that may be given several times.
    pub fn many(&self, flag: &str) -> &[String] {
        self.get(flag).map_or(&[], Value::many)
    }

    /// The flags that are given, as they are declared, in the order of `--help`.
    pub fn given(&self) -> impl Iterator<Item = (&'static OptionSpec, &Value)> {
        all().filter_map(|s| Some((s, self.0.get(s.flag)?)))
    }

    /// The options of the passes, with defaults.
    ///
    /// # Errors
    /// Those of values that cannot be.
    pub fn options(&self) -> Result<Options> {
        self.options_with(None)
    }

    /// The architectures that the plan's kernels are compiled for; none, for the CPU.
    ///
    /// # Errors
    /// `flag` if a word is not an architecture, or if there are some and no device.
    pub fn archs(&self) -> Result<BTreeSet<String>> {
        let cuda = self.text("device") == Some("cuda");
        match self.text("arch") {
            None if cuda => Ok(DEFAULT_ARCHS.map(String::from).into()),
            None => Ok(BTreeSet::new()),
            Some(all) if cuda => all.split(',').map(arch).collect(),
            Some(all) => Err(Diag::new("flag", "--arch is for CUDA kernels")
                .at(format!("--arch {all}"))
                .help(format!("add --device cuda, or leave --arch {all} out"))),
        }
    }
}

/// Architectures of data centers: those with tensor cores for bf16.
const DEFAULT_ARCHS: [&str; 2] = ["sm_80", "sm_90a"];

/// An architecture as the compiler calls it.
fn arch(word: &str) -> Result<String> {
    let digits = word.strip_prefix("sm_").map(|n| n.trim_end_matches(['a', 'f']));
    let number = digits.and_then(|n| n.parse::<u32>().ok());
    if number.is_some_and(|n| (80..1000).contains(&n)) {
        return Ok(word.to_string());
    }
    let (what, first) = (format!("`{word}` is not an architecture of --arch"), DEFAULT_ARCHS[0]);
    Err(Diag::new("flag", what)
        .at(format!("--arch {word}"))
        .rule("sm_ and a number from 80 on, as in sm_90a")
        .help(format!("use {first}, sm_90a or sm_100a")))
}

/// Largest shardc.toml that is read, in bytes.
const MAX_TOML: u64 = 1 << 20;

/// Reads speeds of a rank.
///
/// # Errors
/// `hardware` if the file does not say them, or says what cannot be.
fn read_hardware(path: &Path) -> Result<Hardware> {
    let text = files::read_text(path, MAX_TOML)?;
    let place = path.display().to_string();
    let read: std::result::Result<Hardware, _> = toml::from_str(&text);
    let read = read.map_err(|e| {
        Diag::new("hardware", e.message().to_string()).help(
            "a file may say: link = 400e9, memory = 3e12, flops = 400e12, and [links] tp = 400e9",
        )
    });
    read.and_then(Hardware::checked).map_err(|d| d.at(place))
}

/// Reads `shardc.toml`: the flags, and the model's path relative to the file.
pub fn read_toml(path: &Path) -> Result<(String, Flags)> {
    #[derive(Deserialize)]
    struct WithModel {
        model: String,
        #[serde(flatten)]
        rest: toml::Table,
    }
    let wrong = |m: String| Diag::new("config-file", m).at(path.display().to_string());
    let minimal = "a minimal file is: model = \"my-model\" and mesh = \"dp=2,tp=2\"";
    let bad = |m: String| wrong(m).help(minimal);
    let text = files::read_text(path, MAX_TOML)?;
    let file: WithModel = toml::from_str(&text).map_err(|e| bad(e.message().to_string()))?;
    let mut flags = Flags::default();
    for (name, value) in file.rest {
        let known = all().find(|s| s.flag == name).ok_or_else(|| {
            let near = names::nearest(&name, all().map(|s| s.flag), 1)
                .first()
                .map(|n| format!("did you mean {n}?"));
            let keys =
                "keys are flags of `shardc compile` without --; docs/options.md has them all";
            let d = wrong(format!("no option is called `{name}`"));
            near.into_iter().fold(d, Diag::help).help(keys)
        })?;
        let help = format!("`shardc compile --help` says what --{name} takes");
        let wrong = |m| wrong(format!("{m}, in `{name}`")).help(&help);
        let value = if name == "optim" { value::groups(value).map_err(wrong)? } else { value };
        let value = Value::of_toml(known.kind, &value).map_err(wrong);
        flags.0.extend(value?.map(|v| (known.flag, v)));
    }
    Ok((file.model, flags))
}

/// The words that a flag takes.
pub fn words(flag: &str) -> &'static [&'static str] {
    match declared(flag).kind {
        Kind::Words(words) => words,
        _other => &[],
    }
}

/// The option of a flag.
fn declared(flag: &str) -> &'static OptionSpec {
    all().find(|s| s.flag == flag).unwrap_or_else(|| panic!("no option is called {flag}"))
}
