//! What an option declares: all that the command line, `shardc.toml`, `options.toml`, warnings,
//! reports, exports and docs know of it. The declarations are in `layout`, `stages`, `run` and
//! `optimizer`.

use super::{Flags, Value, layout, optimizer, run, stages};
use crate::flags::Target;
use crate::stored::Stored;
use shardc_frontends::Facts;
use shardc_ir::diag::Result;
use shardc_ir::func::Func;
use shardc_ir::ops::Kind as OpKind;
use shardc_ir::plan::Mode;
use shardc_passes::options::Options;

/// What is asked of options.
pub type Test = fn(&Options) -> bool;

/// What options say; none where there is nothing to say.
pub type Words = fn(&Options) -> Option<String>;

/// A flag of `compile` and `check`, and of `shardc.toml`.
pub struct OptionSpec {
    /// Its name, without dashes.
    pub flag: &'static str,
    /// The part of `--help` in which it stands.
    pub heading: &'static str,
    /// What its value is called; empty: as the flag.
    pub value: &'static str,
    /// What it is for, without its default.
    pub help: &'static str,
    /// What holds where it is not given, in words; empty: nothing is to be said.
    pub default: &'static str,
    /// What values it takes.
    pub kind: Kind,
    /// Puts the value into the options of the passes; flags that are read together share one.
    pub set: fn(&mut Options, &Given) -> Result<()>,
    /// The options of `options.toml` that it decides.
    pub keys: &'static [Key],
    /// It says how something is cut, which `--shard auto` leaves to prices.
    pub cuts: bool,
    /// `plan` takes it, too: it is the same in every layout.
    pub in_plan: bool,
    /// `run` takes it, too, in place of the plan's.
    pub in_run: bool,
    /// It changes nothing where nothing is trained.
    pub trains: bool,
    /// When else it changes nothing.
    pub idle: &'static [Idle],
    /// Its part of the line of a report that begins with `with`: its place there, and the words.
    pub said: Option<(u8, Words)>,
    /// Its rows in the settings of a report's page.
    pub rows: &'static [Row],
    /// What software cannot express.
    pub lacks: &'static [Lack],
    /// What software does whatever is asked.
    pub fills: &'static [(Target, &'static str)],
    /// Software whose own config has to say it.
    pub elsewhere: &'static [Target],
}

impl OptionSpec {
    /// What an option is of which nothing is declared.
    pub const NONE: OptionSpec = OptionSpec {
        flag: "",
        heading: "",
        value: "",
        help: "",
        default: "",
        kind: Kind::Text,
        set: |_, _| Ok(()),
        keys: &[],
        cuts: false,
        in_plan: false,
        in_run: false,
        trains: false,
        idle: &[],
        said: None,
        rows: &[],
        lacks: &[],
        fills: &[],
        elsewhere: &[],
    };

    fn decides(&self, k: &Key) -> bool {
        self.keys.iter().any(|own| own.name == k.name)
    }

    /// Its name as clap and `options.toml` have it.
    pub fn id(&self) -> String {
        self.flag.replace('-', "_")
    }
}

/// Puts one of a flag's words into an option that has it by the same word in `options.toml`.
macro_rules! word {
    ($option:ident) => {
        |o, g| {
            o.$option = g.word();
            Ok(())
        }
    };
}
pub(super) use word;

/// What values a flag takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    /// None: it is given, or not.
    Switch,
    /// One of these words.
    Words(&'static [&'static str]),
    /// A whole number from the first to the second.
    Whole(usize, usize),
    /// A number.
    Number,
    /// Text that the option reads itself.
    Text,
    /// Texts, each with a flag of its own.
    Many,
}

/// An option of `options.toml`.
#[derive(Clone, Copy)]
pub struct Key {
    /// Its name there.
    pub name: &'static str,
    /// The first pass that acts on it; empty: none does, or only the last ones, which always run.
    pub pass: &'static str,
    /// What asks for it; empty: its flags.
    pub word: &'static str,
    /// Layouts that are chosen by price depend on it.
    pub priced: bool,
    /// `options.toml` has it.
    pub stored: bool,
    /// Training comes to other numbers by it.
    pub trained: bool,
    /// Whether its value is one that flags give, and the rule.
    pub range: Option<(Test, &'static str)>,
}

/// An option that a pass acts on first; with an empty one, none.
pub const fn key(name: &'static str, pass: &'static str) -> Key {
    Key { name, pass, word: "", priced: false, stored: true, trained: false, range: None }
}

impl Key {
    /// On which layouts depend that are chosen by price.
    pub const fn priced(self) -> Key {
        Key { priced: true, ..self }
    }
    /// That another one follows from, which is stored.
    pub const fn unstored(self) -> Key {
        Key { stored: false, ..self }
    }
    /// By which training comes to other numbers.
    pub const fn trained(self) -> Key {
        Key { trained: true, ..self }
    }
    /// Of which only some values can be.
    pub const fn range(self, is: Test, rule: &'static str) -> Key {
        Key { range: Some((is, rule)), ..self }
    }
    /// That something other than a flag of its name asks for.
    pub const fn word(self, word: &'static str) -> Key {
        Key { word, ..self }
    }
    /// The flags that decide it, as a user gives them.
    pub fn flags(&self) -> String {
        let all = || all().filter(|s| s.decides(self));
        if !self.word.is_empty() {
            return self.word.into();
        }
        let own = all().find(|s| s.id() == self.name).map(|s| s.flag);
        let flags: Vec<String> = match own {
            Some(own) => vec![format!("--{own}")],
            None => all().map(|s| format!("--{}", s.flag)).collect(),
        };
        match &flags[..] {
            [] => self.name.into(),
            [one] => one.clone(),
            [some @ .., last] => format!("{} or {last}", some.join(", ")),
        }
    }
}

/// When a flag that is given changes nothing, and why.
pub struct Idle {
    /// The value of which it is said; empty: any.
    pub value: &'static str,
    pub when: fn(&Seen) -> bool,
    pub why: &'static str,
}

/// When a flag changes nothing, whatever its value.
pub const fn idle(when: fn(&Seen) -> bool, why: &'static str) -> Idle {
    Idle { value: "", when, why }
}

/// What is known where it is said which flags change nothing.
pub struct Seen<'a> {
    pub flags: &'a Flags,
    pub o: &'a Options,
    pub model: &'a Func,
    pub facts: Option<&'a Facts>,
}

impl Seen<'_> {
    /// The model has an op of this kind.
    pub fn has(&self, kind: OpKind) -> bool {
        self.model.nodes.iter().any(|n| n.op.facts().kind == kind)
    }
    /// Something is trained.
    pub fn trains(&self) -> bool {
        self.o.mode == Mode::Train
    }
    /// The mesh has no pipeline.
    pub fn one_stage(&self) -> bool {
        self.o.axis("pp") == 1
    }
}

/// A row of the settings of a report's page.
pub struct Row {
    pub group: &'static str,
    pub name: &'static str,
    /// None where the setting has no meaning.
    pub show: fn(&Stored) -> Option<String>,
}

/// A row of a group.
pub const fn row(
    group: &'static str,
    name: &'static str,
    show: fn(&Stored) -> Option<String>,
) -> Row {
    Row { group, name, show }
}

/// What some software cannot express, if these options ask for it.
pub struct Lack {
    pub to: &'static [Target],
    pub asked: Test,
    pub what: &'static str,
}

/// What some software lacks.
pub const fn lack(to: &'static [Target], asked: Test, what: &'static str) -> Lack {
    Lack { to, asked, what }
}

/// Software that has a config of its own for training.
pub const TRAINERS: &[Target] =
    &[Target::Megatron, Target::Torchtitan, Target::Deepspeed, Target::Nanotron];

/// A flag that is given, with its value, and all others.
pub struct Given<'a> {
    pub spec: &'a OptionSpec,
    pub value: &'a Value,
    pub all: &'a Flags,
}

impl Given<'_> {
    /// Its value, as text.
    pub fn text(&self) -> &str {
        self.value.text()
    }
    /// Its value, as a whole number.
    pub fn whole(&self) -> usize {
        self.value.whole()
    }
    /// Its value, as a number.
    pub fn number(&self) -> f64 {
        self.value.number()
    }
    /// The flag as it is written.
    pub fn flag(&self) -> String {
        format!("--{}", self.spec.flag)
    }
    /// What one of the words of [`Kind::Words`] means: an option has it by the same word in
    /// `options.toml`.
    pub fn word<T: serde::de::DeserializeOwned>(&self) -> T {
        let word = serde_json::Value::from(self.text());
        serde_json::from_value(word).expect("words of a flag are those of its option")
    }
}

/// All options, in the order of `--help`.
pub fn all() -> impl Iterator<Item = &'static OptionSpec> {
    layout::OPTIONS.iter().chain(stages::OPTIONS).chain(run::OPTIONS).chain(optimizer::OPTIONS)
}

/// What no flag decides: whether results are kept to be dumped, the budget, which follows from the
/// memory, and which flags were given.
const OWN: &[Key] = &[key("observe", "partition"), key("budget", ""), key("given", "")];

/// Every option of `options.toml` once.
pub fn keys() -> impl Iterator<Item = &'static Key> {
    // Of flags that decide one together, the first declares it.
    let first =
        |s: &OptionSpec, k: &Key| all().find(|s| s.decides(k)).is_some_and(|f| f.flag == s.flag);
    let of = move |s: &'static OptionSpec| s.keys.iter().filter(move |k| first(s, k));
    all().flat_map(of).chain(OWN)
}
