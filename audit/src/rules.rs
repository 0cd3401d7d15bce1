//! What other software does to gradients: tables of rules with their source, and which of them hold.

use serde::Deserialize;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::names::glob;
use std::collections::{BTreeMap, BTreeSet};

/// A class of parameters, by their names in a checkpoint of transformers.
#[derive(Deserialize, Clone, Debug)]
#[serde(deny_unknown_fields)]
pub struct Class {
    pub name: String,
    /// Globs of names.
    pub params: Vec<String>,
    /// What the software calls them, as a regular expression of Python; empty: as transformers does.
    #[serde(default)]
    pub called: String,
}

/// What is done to the gradients of some classes, in some configurations and versions.
#[derive(Deserialize, Clone, Debug, Default)]
#[serde(deny_unknown_fields, default)]
pub struct Rule {
    pub name: String,
    /// The classes; none or `all`: all of them.
    pub of: Vec<String>,
    pub but: Vec<String>,
    /// Facts and flags (`--flag`, `--flag=value`) that hold, each with `!` in front if it does not.
    pub when: String,
    /// Versions from which on, and before which, it holds.
    pub since: Option<String>,
    pub until: Option<String>,
    /// Axes that split the parameter there, and not in the layout that types are propagated from.
    pub cuts: Vec<String>,
    /// Axes over which the gradient is summed; `partial`: whatever each rank has a part of.
    pub sums: Vec<String>,
    /// Axes over which each further microbatch sums again what earlier ones have left.
    pub again: Vec<String>,
    /// Axes over which backward has made it whole.
    pub whole: Vec<String>,
    /// Axes over which backward leaves each rank a part of it.
    pub splits: Vec<String>,
    /// A factor of the gradient: names of numbers between `*` and `/`.
    pub times: Option<String>,
    /// `each AXES` or `first AXIS`: the ranks on which it is counted in the norm.
    pub counts: Option<String>,
    /// Facts that hold where it does.
    pub makes: Vec<String>,
    /// Nothing is done: the software refuses such a configuration, or does not have what it asks for.
    pub refuses: bool,
    /// File and line.
    pub source: String,
    /// Of the file, if it is not the table's.
    pub commit: Option<String>,
    pub says: String,
}

/// The rules of one software.
#[derive(Deserialize, Clone, Debug)]
#[serde(deny_unknown_fields)]
pub struct Table {
    pub software: String,
    pub repository: String,
    pub commit: String,
    /// The oldest version that the rules are of; none if they know no versions.
    #[serde(default)]
    pub oldest: Option<String>,
    /// The newest release that they are of.
    #[serde(default)]
    pub newest: Option<String>,
    /// Globs of flags of which something is made.
    #[serde(default)]
    pub read: Vec<String>,
    /// Globs of flags that change no sum.
    #[serde(default)]
    pub idle: Vec<String>,
    /// Globs of flags of models and layouts that are not audited.
    #[serde(default)]
    pub outside: Vec<String>,
    /// A release each, and flags that it has first.
    #[serde(default)]
    first: Vec<Vec<String>>,
    #[serde(default)]
    pub class: Vec<Class>,
    #[serde(default)]
    pub rule: Vec<Rule>,
    /// Rules that refuse, on a line each.
    #[serde(default)]
    refusal: Vec<Rule>,
}

/// What a configuration has: numbers by name, and switches.
#[derive(Clone, Debug, Default)]
pub struct Given {
    pub sizes: BTreeMap<String, f64>,
    pub facts: BTreeSet<String>,
    /// Flags as they were given: `--flag`, and `--flag=value`.
    pub flags: BTreeSet<String>,
}

impl Given {
    /// A number; 1 if there is none of this name.
    pub fn size(&self, name: &str) -> f64 {
        self.sizes.get(name).copied().unwrap_or(1.0)
    }

    /// True if a fact holds: a switch, an axis of several ranks, or two numbers that are (not) equal.
    fn holds(&self, fact: &str) -> bool {
        if let Some((a, b)) = fact.split_once("!=") {
            return self.size(a) != self.size(b);
        }
        if let Some(fact) = fact.strip_prefix('!') {
            return !self.holds(fact);
        }
        if fact.starts_with("--") {
            return self.flags.contains(fact);
        }
        match fact.split_once(">=").map(|(name, v)| (name, version(v))) {
            Some((name, Ok(least))) => {
                let mut all = self.facts.iter().filter_map(|f| versioned(f));
                all.any(|(n, v)| n == name && v >= least)
            }
            _other => self.facts.contains(fact) || self.sizes.get(fact).is_some_and(|n| *n > 1.0),
        }
    }

    /// The value of a product such as `cp/m/dp`.
    pub fn product(&self, text: &str) -> f64 {
        let mut out = 1.0;
        for (i, part) in text.split('*').enumerate() {
            let mut factors = part.split('/').map(str::trim);
            let of = |name: &str| name.parse().unwrap_or_else(|_| self.size(name));
            out *= factors.next().map_or(1.0, of);
            out = factors.fold(out, |out, name| out / of(name));
            debug_assert!(i < 64, "{text}");
        }
        out
    }
}

/// How often a number is a factor of a product, less how often it divides it.
pub fn power(text: &str, name: &str) -> i32 {
    let of = |part: &str| {
        let factors: Vec<&str> = part.split('/').map(str::trim).collect();
        let below = factors.iter().skip(1).filter(|w| **w == name).count();
        i32::from(factors[0] == name) - below as i32
    };
    text.split('*').map(of).sum()
}

/// A fact such as `te=2.14`, or `te>=2.14`: a name and a version.
fn versioned(fact: &str) -> Option<(&str, Vec<u32>)> {
    let (name, v) = fact.split_once(">=").or(fact.split_once('='))?;
    Some((name, version(v).ok()?))
}

/// The numbers of a version, as `0.18.2`, three at least: 0.18 is 0.18.0.
///
/// # Errors
/// `flag` if it has other parts.
pub fn version(text: &str) -> Result<Vec<u32>> {
    let digits = text.trim_start_matches("core_").trim_start_matches('v');
    let parts = digits.split('.').map(|p| p.parse().ok()).collect::<Option<Vec<u32>>>();
    let whole = |mut parts: Vec<u32>| {
        parts.resize(parts.len().max(3), 0);
        parts
    };
    parts.map(whole).ok_or_else(|| {
        Diag::new("flag", format!("`{}` is no version", text.chars().take(40).collect::<String>()))
            .at("--at")
            .rule("a version is numbers with dots between them")
            .help("for example --at 0.18.2, or none for the newest that the rules are of")
    })
}

impl Rule {
    fn is_of(&self, class: &str) -> bool {
        let all = self.of.is_empty() || self.of.iter().any(|c| c == "all");
        let is = |list: &[String]| list.iter().any(|c| c == class);
        // Losses are no parameters: what is done to all of these is nothing to them.
        (all && class != ROUTER_LOSS || is(&self.of)) && !is(&self.but)
    }

    fn is_in(&self, at: Option<&[u32]>) -> bool {
        let number = |v: &Option<String>| v.as_deref().and_then(|v| version(v).ok());
        match at {
            None => self.until.is_none(),
            Some(at) => {
                number(&self.since).is_none_or(|v| at >= &v[..])
                    && number(&self.until).is_none_or(|v| at < &v[..])
            }
        }
    }
}

/// The class of losses of routers, which no parameter has.
pub const ROUTER_LOSS: &str = "router-loss";

/// Facts that follow from a configuration.
pub(super) const SWITCHES: [&str; 10] = [
    "sp",
    "local",
    "few-groups",
    "per-token",
    "average-in-collective",
    "tied",
    "further",
    "virtual",
    "softmax-type",
    ROUTER_LOSS,
];

/// Tables of rules, by software.
const TABLES: [&str; 4] = [
    include_str!("rules/megatron.toml"),
    include_str!("rules/torchtitan.toml"),
    include_str!("rules/deepspeed.toml"),
    include_str!("rules/transformers.toml"),
];

impl Table {
    /// That of Megatron-LM.
    pub fn megatron() -> Table {
        Table::of(0)
    }

    /// That of torchtitan.
    pub fn torchtitan() -> Table {
        Table::of(1)
    }

    /// That of DeepSpeed.
    pub fn deepspeed() -> Table {
        Table::of(2)
    }

    /// That of transformers.
    pub fn transformers() -> Table {
        Table::of(3)
    }

    fn of(i: usize) -> Table {
        let mut table: Table = toml::from_str(TABLES[i]).expect("a table of rules");
        for r in std::mem::take(&mut table.refusal) {
            table.rule.push(Rule { name: r.says.clone(), refuses: true, ..r });
        }
        table
    }

    /// A version whose rules are known.
    ///
    /// # Errors
    /// `flag` if it is none, or older than the rules.
    pub fn at(&self, text: &str) -> Result<Vec<u32>> {
        let at = version(text)?;
        let d = |what: String| Diag::new("flag", what).at(format!("--at {text}"));
        match self.oldest.as_deref() {
            None => Err(d(format!("rules of {} know no versions", self.software))
                .help(format!("leave out --at: they are of {}", self.short()))),
            Some(oldest) if at < version(oldest)? => {
                Err(d(format!("rules of {} begin with {oldest}", self.software))
                    .help(format!("use --at {oldest}, or read what was changed since then")))
            }
            Some(_) => match self.newest.as_deref() {
                Some(newest) if at > version(newest)? => {
                    let help = format!(
                        "use --at {newest}, or leave out --at: rules are of {}",
                        self.short()
                    );
                    Err(d(format!("rules of {} end with {newest}", self.software)).help(help))
                }
                _within => Ok(at),
            },
        }
    }

    /// Refuses what the software refuses or does not have in this version, beside what its reader has found and what may
    /// mend that.
    ///
    /// # Errors
    /// `audit` with all of it.
    pub fn refuses(
        &self,
        given: &Given,
        at: Option<&[u32]>,
        (more, mends): (Vec<String>, &str),
        place: &str,
    ) -> Result<()> {
        let holding = self.holding(given, at);
        let own = holding.rules.iter().filter(|r| r.refuses).map(|r| {
            let until = r.until.as_deref().map_or(String::new(), |v| format!("before {v} "));
            format!("{until}{} ({})", r.says, r.source)
        });
        let all: Vec<String> = more.into_iter().chain(self.unknown(given, at)).chain(own).collect();
        if all.is_empty() {
            return Ok(());
        }
        let version: Vec<String> = at.unwrap_or_default().iter().map(u32::to_string).collect();
        let of = [self.software.as_str(), &version.join(".")].join(" ");
        let d = Diag::new("audit", format!("{} refuses these flags together", of.trim_end()))
            .at(place.to_string());
        let at = if version.is_empty() { "" } else { ", or --at" };
        Err(all.into_iter().fold(d, Diag::why).help(format!("correct the flags, {mends}{at}")))
    }

    /// Flags that a version does not have.
    fn unknown(&self, given: &Given, at: Option<&[u32]>) -> Vec<String> {
        let later = |first: &str| at.is_some_and(|at| version(first).is_ok_and(|v| at < &v[..]));
        let of = self.first.iter().filter_map(|row| row.split_first()).filter(|row| later(row.0));
        let named = of.flat_map(|(first, flags)| flags.iter().map(move |f| (first, f)));
        named
            .filter(|(_, flag)| given.flags.contains(*flag))
            .map(|(first, flag)| format!("before {first} there is no {flag}"))
            .collect()
    }

    /// Refuses facts that neither a configuration has by itself nor a rule asks for.
    ///
    /// # Errors
    /// `flag` for these.
    pub fn asks_for(&self, given: &Given) -> Result<()> {
        let asked = self.asked();
        let of_version = |f: &str| {
            let name = versioned(f).map(|(name, _)| format!("{name}>="));
            name.is_some_and(|n| asked.iter().any(|a| a.starts_with(&n)))
        };
        let known = |f: &str| SWITCHES.contains(&f) || asked.contains(f) || of_version(f);
        let Some(other) = given.facts.iter().find(|f| !known(f)) else { return Ok(()) };
        let shown: String = other.chars().take(40).collect();
        let apart = |a: &&str| !SWITCHES.contains(a) && !given.sizes.contains_key(*a);
        let asked: Vec<&str> = asked.into_iter().filter(apart).collect();
        let help = match asked.is_empty() {
            true => "leave out --with".to_string(),
            false => format!("rules ask for {}", asked.join(", ")),
        };
        Err(Diag::new("flag", format!("no rule of {} asks for `{shown}`", self.software))
            .at(format!("--with {shown}"))
            .help(help))
    }

    /// Facts that rules ask for and no rule makes; flags and comparisons of numbers aside.
    pub(super) fn asked(&self) -> BTreeSet<&str> {
        let words = self.rule.iter().flat_map(|r| r.when.split_whitespace());
        let words = words.map(|w| w.strip_prefix('!').unwrap_or(w));
        let made = |w: &str| self.rule.iter().any(|r| r.makes.iter().any(|m| m == w));
        words.filter(|w| !made(w) && !w.contains("!=") && !w.starts_with("--")).collect()
    }

    /// The commit that its lines are of, as people write it.
    pub fn short(&self) -> &str {
        self.commit.get(..10).unwrap_or(&self.commit)
    }

    /// The class of a parameter.
    pub fn class(&self, param: &str) -> Option<&str> {
        let of = |c: &&Class| c.params.iter().any(|g| glob(g, param));
        self.class.iter().find(of).map(|c| c.name.as_str())
    }

    /// The rules that hold in a version (none: the newest), with the facts that they make.
    pub fn holding(&self, given: &Given, at: Option<&[u32]>) -> Holding<'_> {
        let mut given = given.clone();
        let holds =
            |r: &Rule, g: &Given| r.is_in(at) && r.when.split_whitespace().all(|f| g.holds(f));
        for r in self.rule.iter().filter(|r| !r.makes.is_empty()) {
            if holds(r, &given) {
                given.facts.extend(r.makes.iter().cloned());
            }
        }
        let rules = self.rule.iter().filter(|r| holds(r, &given)).collect();
        Holding { table: self, rules, given }
    }
}

/// The rules that hold in a configuration.
pub struct Holding<'a> {
    pub table: &'a Table,
    pub rules: Vec<&'a Rule>,
    pub given: Given,
}

impl<'a> Holding<'a> {
    /// Those of a class.
    pub fn of(&self, class: &'a str) -> impl Iterator<Item = &'a Rule> + '_ {
        self.rules.iter().copied().filter(move |r| r.is_of(class))
    }

    /// The factor of a class's gradient, and the rules that make it.
    pub fn factor(&self, class: &'a str) -> (f64, Vec<&'a Rule>) {
        let rules: Vec<&Rule> = self.of(class).filter(|r| r.times.is_some()).collect();
        let of = |r: &&Rule| r.times.as_deref().map_or(1.0, |t| self.given.product(t));
        (rules.iter().map(of).product(), rules)
    }
}
