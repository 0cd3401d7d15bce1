//! Values of flags, as they are given on the command line and in `shardc.toml`.

use super::Kind;
use super::values::whole;
use clap::ArgMatches;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser, ValueParser};
use serde_json::Value as Json;

/// The value of a flag that is given.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// The flag takes none.
    On,
    /// Text, or one of the flag's words.
    Text(String),
    /// A whole number.
    Whole(usize),
    /// Any number.
    Number(f64),
    /// All texts of a flag that may be given several times.
    Many(Vec<String>),
}

impl Value {
    pub(super) fn text(&self) -> &str {
        let Value::Text(text) = self else { panic!("{self:?} is no text") };
        text
    }

    pub(super) fn whole(&self) -> usize {
        let Value::Whole(n) = self else { panic!("{self:?} is no whole number") };
        *n
    }

    pub(super) fn number(&self) -> f64 {
        let Value::Number(x) = self else { panic!("{self:?} is no number") };
        *x
    }

    pub(super) fn many(&self) -> &[String] {
        let Value::Many(all) = self else { panic!("{self:?} is no list") };
        all
    }

    /// Whether it is, or has, this text; each has the empty one.
    pub(super) fn has(&self, text: &str) -> bool {
        text.is_empty() || matches!(self, Value::Many(all) if all.iter().any(|t| t == text))
    }

    /// As JSON has it.
    pub fn json(&self) -> Json {
        match self {
            Value::On => true.into(),
            Value::Text(text) => text.as_str().into(),
            Value::Whole(n) => (*n).into(),
            Value::Number(x) => (*x).into(),
            Value::Many(all) => all.as_slice().into(),
        }
    }

    /// What a text gives to a flag.
    ///
    /// # Errors
    /// What would be right in its place.
    pub(super) fn parse(kind: Kind, text: &str) -> Result<Value, String> {
        Ok(match kind {
            Kind::Switch => Value::On,
            Kind::Words(words) => Value::Text(one_of(words, text)?.into()),
            Kind::Text => Value::Text(text.into()),
            Kind::Whole(least, most) => Value::Whole(within(whole(text)?, least, most)?),
            Kind::Number => Value::Number(text.parse().map_err(|_| "a number, for example 0.1")?),
            Kind::Many => Value::Many(vec![text.into()]),
        })
    }

    /// What the command line gives to a flag.
    pub(super) fn of_matches(kind: Kind, id: &str, m: &ArgMatches) -> Option<Value> {
        match kind {
            Kind::Switch => m.get_flag(id).then_some(Value::On),
            Kind::Many => {
                let all = m.get_many::<Value>(id)?.flat_map(Value::many);
                Some(Value::Many(all.cloned().collect()))
            }
            _one => m.get_one::<Value>(id).cloned(),
        }
    }

    /// What a file gives to a flag; none if that is nothing.
    pub(super) fn of_toml(kind: Kind, value: &toml::Value) -> Result<Option<Value>, String> {
        let needed = |what: &str| format!("{what} is needed, not {value}");
        let text = || value.as_str().ok_or_else(|| needed("text in quotes"));
        Ok(Some(match kind {
            Kind::Switch => {
                let on = value.as_bool().ok_or_else(|| needed("true or false"))?;
                return Ok(on.then_some(Value::On));
            }
            Kind::Words(_) => Value::parse(kind, text()?)?,
            // `memory = 80e9` and `memory = "24GiB"`.
            Kind::Text => Value::Text(match value {
                toml::Value::Integer(n) => n.to_string(),
                toml::Value::Float(x) => x.to_string(),
                _other => text().map_err(|_| needed("text in quotes, or a number"))?.into(),
            }),
            Kind::Whole(least, most) => {
                let n = value.as_integer().and_then(|n| usize::try_from(n).ok());
                Value::Whole(within(n.ok_or_else(|| needed("a whole number"))?, least, most)?)
            }
            Kind::Number => {
                let whole = value.as_integer().map(|n| n as f64);
                Value::Number(value.as_float().or(whole).ok_or_else(|| needed("a number"))?)
            }
            Kind::Many => {
                let one = |v: &toml::Value| v.as_str().map(String::from);
                let list = value.as_array().map(|all| all.iter().map(one).collect());
                let all: Option<Vec<String>> = list.unwrap_or(one(value).map(|text| vec![text]));
                match all.ok_or_else(|| needed("a text or a list of texts"))? {
                    none if none.is_empty() => return Ok(None),
                    all => Value::Many(all),
                }
            }
        }))
    }
}

/// Groups that a file has as tables, `on = "hidden"`, `rule = "muon"`, `lr = 2e-4`, as texts: `hidden=muon,lr=2e-4`.
///
/// # Errors
/// Says which key is wrong.
pub(super) fn groups(value: toml::Value) -> Result<toml::Value, String> {
    match value {
        toml::Value::Array(all) => {
            let all: Result<_, String> = all.into_iter().map(groups).collect();
            all.map(toml::Value::Array)
        }
        toml::Value::Table(group) => of_table(&group).map(toml::Value::String),
        other => Ok(other),
    }
}

fn of_table(group: &toml::Table) -> Result<String, String> {
    let text = |key: &str| match group.get(key).and_then(toml::Value::as_str) {
        Some(text) if !text.contains(['=', ',']) => Ok(text),
        Some(text) => Err(format!("`{key}` is `{text}`: attributes are keys of their own")),
        None => Err(format!("[[optim]] needs `{key}`, a text")),
    };
    let mut all = format!("{}={}", text("on")?, text("rule")?);
    for (key, value) in group.iter().filter(|(key, _)| !["on", "rule"].contains(&key.as_str())) {
        let word = match value {
            toml::Value::String(text) => text.clone(),
            toml::Value::Integer(n) => n.to_string(),
            toml::Value::Float(x) => format!("{x:?}"),
            toml::Value::Boolean(yes) => if *yes { "yes" } else { "no" }.into(),
            several => return Err(format!("`{key}` is {several}: a number or a word is needed")),
        };
        all += &format!(",{key}={word}");
    }
    Ok(all)
}

/// Words of PyTorch and of model configs for element types, which are understood wherever ours are.
const ALIASES: [(&str, &str); 5] = [
    ("float32", "f32"),
    ("fp32", "f32"),
    ("bfloat16", "bf16"),
    ("float16", "f16"),
    ("fp16", "f16"),
];

/// The word that a text says.
fn one_of(words: &[&'static str], text: &str) -> Result<&'static str, String> {
    let own = ALIASES.iter().find(|a| a.0 == text).map_or(text, |a| a.1);
    words
        .iter()
        .find(|w| **w == own)
        .copied()
        .ok_or_else(|| format!("`{text}` is none of {}", words.join(", ")))
}

/// A number that a flag takes.
fn within(n: usize, least: usize, most: usize) -> Result<usize, String> {
    let rule = match most {
        usize::MAX => format!("{n} is below {least}"),
        most => format!("{n} is not in {least}..={most}"),
    };
    (least..=most).contains(&n).then_some(n).ok_or(rule)
}

impl Kind {
    /// How clap reads it.
    pub(super) fn parser(self) -> ValueParser {
        match self {
            Kind::Switch => clap::value_parser!(bool),
            Kind::Words(words) => {
                let one = |w: &'static str| {
                    PossibleValue::new(w).aliases(ALIASES.iter().filter(|a| a.1 == w).map(|a| a.0))
                };
                let said = move |text: String| Value::parse(self, &text).expect("one of the words");
                PossibleValuesParser::new(words.iter().copied().map(one)).map(said).into()
            }
            _text => ValueParser::new(move |text: &str| Value::parse(self, text)),
        }
    }
}
