//! Update rules: how an optimizer makes a parameter and its states of a gradient, as text.
//!
//! ```text
//! update @lion(
//!   %p: f32[*] param, %g: f32[*] grad, %m: $state_dtype[*] state[exp_avg] = 0,
//!   %lr: f32[] scalar "lr",
//! ) -> (f32[*] param, $state_dtype[*] state[exp_avg])
//!   with beta1 = 0.9
//! {
//!   %m2 = add scale[$beta1] %m, scale[1 - $beta1] %g
//!   return sub %p, mul[*,->*] %m2, %lr; %m2
//! }
//! ```
//!
//! Dims are letters that each parameter binds, or `*`: any shape. Of the rules of a name the first
//! whose pattern and `where` fit is taken. `$name` is an attribute: a number, a list of numbers or
//! a word, by `with` or by whoever asks for the rule. Types of values follow from ops; operands may
//! be ops themselves; `lerp` is x + w (y - x) as torch rounds it; a cast to the type that there is
//! is nothing. `repeat` writes its lines once for each number. A stack of matrices is updated by a
//! rule of matrices: its first dim is a letter of all values made of it.

mod groups;
mod instance;
mod number;
mod parse;
mod writer;

pub use groups::{groups_of, without_groups};

use crate::diag::Diag;
use crate::func::StateName;
use crate::ops::SAMPLES;
use crate::types::DType;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

/// The scalars of a step that a rule may read.
pub const SCALARS: [&str; 3] = ["lr", "step", "grad_norm"];

/// The text of the rules that are known without a file.
pub const BUILT_IN: &str = include_str!("builtin.ir");

/// Those rules.
pub fn built_in() -> &'static Rules {
    static RULES: LazyLock<Rules> = LazyLock::new(|| {
        Rules::parse(BUILT_IN, "builtin.ir").unwrap_or_else(|d| panic!("{}", d.render()))
    });
    &RULES
}

/// The update rules of a text.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    all: Vec<Arc<UpdateRule>>,
}

impl Rules {
    /// Those of a name, in the order in which they are tried.
    pub fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Arc<UpdateRule>> + 'a {
        self.all.iter().filter(move |r| r.name == name)
    }

    /// All of them, in the order of their text.
    pub fn all(&self) -> impl Iterator<Item = &Arc<UpdateRule>> {
        self.all.iter()
    }

    /// Names of all rules, each once.
    pub fn names(&self) -> Vec<&str> {
        let mut all: Vec<&str> = self.all.iter().map(|r| &*r.name).collect();
        all.dedup();
        all
    }
}

/// Where a rule stands.
#[derive(Debug)]
struct Origin {
    text: String,
    /// What messages call the text.
    place: String,
}

/// An update rule.
#[derive(Debug)]
pub struct UpdateRule {
    pub name: String,
    origin: Arc<Origin>,
    /// Its text.
    span: Range<usize>,
    at: usize,
    args: Vec<Arg>,
    /// Of two letters the first is at most the second, or is above it.
    fits: Option<(char, bool, char)>,
    /// Attributes: where each stands, its name, and what it is.
    with: Vec<(usize, String, Preset)>,
    /// The op that does all of it, and where that is said.
    fused: Option<(usize, String)>,
    body: Vec<BodyLine>,
    results: Vec<Expr>,
}

impl UpdateRule {
    /// Its text, from `update` to the end of its body.
    pub fn text(&self) -> &str {
        &self.origin.text[self.span.clone()]
    }

    /// True if it says which op does all of it.
    pub fn is_fused(&self) -> bool {
        self.fused.is_some()
    }
}

/// An argument, or a result.
#[derive(Clone, Debug)]
struct Arg {
    name: String,
    at: usize,
    /// An element type, or `$name`.
    dtype: String,
    dims: UpdateDims,
    kind: ArgKind,
}

#[derive(Clone, PartialEq, Debug)]
enum UpdateDims {
    /// Those of the parameter, as many as it has.
    Any,
    Letters(Vec<char>),
}

#[derive(Clone, PartialEq, Debug)]
enum ArgKind {
    Param,
    Grad,
    State(StateName, f64),
    Scalar(String),
}

impl ArgKind {
    fn state(&self) -> Option<StateName> {
        if let ArgKind::State(name, _) = self { Some(*name) } else { None }
    }
}

/// A line of a body; `at`: where in the text.
#[derive(Debug)]
enum BodyLine {
    Define {
        at: usize,
        name: String,
        expr: Expr,
    },
    Repeat {
        at: usize,
        first: String,
        end: String,
        begins: Vec<(String, String)>,
        body: Vec<BodyLine>,
    },
}

#[derive(Debug)]
enum Expr {
    Value { at: usize, name: String },
    Op { at: usize, op: String, attrs: Option<String>, ins: Vec<Expr> },
}

/// What an attribute is if nobody says.
#[derive(Clone, Debug)]
enum Preset {
    /// Numbers, or a word.
    Plain(String),
    /// One of these words, the first if nobody says, each with what it stands for; itself if empty.
    Choice(Vec<(String, String)>),
}

impl Preset {
    /// Reads `0.95`, `1, 2, 3`, `f32`, or `one of a: 1; b: 2`.
    fn read(text: &str) -> Preset {
        let Some(words) = text.strip_prefix("one of ") else { return Preset::Plain(text.into()) };
        let one = |w: &str| {
            let (word, is) = w.split_once(':').unwrap_or((w, ""));
            (word.trim().to_string(), is.trim().to_string())
        };
        Preset::Choice(words.split(';').map(one).collect())
    }
}

/// The value of an attribute.
#[derive(Clone, PartialEq, Debug)]
pub enum AttrValue {
    Numbers(Vec<f64>),
    Word(String),
}

/// The attributes of a rule, by name.
pub type Attrs = BTreeMap<String, AttrValue>;

/// How a parameter is updated.
#[derive(Clone, Debug)]
pub struct Update {
    pub rule: Arc<UpdateRule>,
    pub attrs: Attrs,
    /// The parameter is a stack of what the rule updates.
    pub stack: bool,
    /// The learning rate, as a multiple of the run's.
    pub lr: f64,
    /// Which of the groups it belongs to.
    pub group: usize,
}

/// What a rule keeps of a parameter.
#[derive(Clone, PartialEq, Debug)]
pub struct KeptState {
    pub name: StateName,
    pub dtype: DType,
    pub init: f64,
    /// The dims of the parameter that it has.
    pub dims: Vec<usize>,
}

/// How many operands an op has: as many as its rule, if it has one, or as its first sample.
fn arity(op: &str, attrs: Option<&str>) -> Option<usize> {
    if op == "lerp" {
        return Some(2);
    }
    let (_, samples) = SAMPLES.iter().find(|s| s.0 == op)?;
    if let Some((ins, _)) = attrs.and_then(|a| a.split_once("->")) {
        return Some(ins.split(',').count());
    }
    let first = samples.first()?.strip_prefix(op)?;
    let types = match first.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?.1,
        None => first,
    };
    Some(types.matches('[').count())
}

#[cfg(test)]
mod tests;
