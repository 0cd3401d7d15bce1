//! Rules of a fork, which users write: each word of them is looked up before a row takes the place of another.

use super::rules::{ROUTER_LOSS, Rule, SWITCHES, Table, version};
use serde::Deserialize;
use shardc_export::megatron::arguments;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::names::nearest;

/// Rows of a fork, which replace those of the same name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fork {
    /// Facts that its rules ask for and `--with` gives, and flags of its own.
    #[serde(default)]
    facts: Vec<String>,
    #[serde(default)]
    rule: Vec<Rule>,
}

/// Axes that rules name.
const AXES: [&str; 7] = ["tp", "pp", "cp", "dp", "ep", "etp", "edp"];
/// Numbers beside these, of which factors are made.
const NUMBERS: [&str; 2] = ["tokens", "m"];
/// Most names that a message lists.
const LISTED: usize = 32;
/// What is summed where whatever is partial is.
const PARTIAL: &str = "partial";

/// A table with rows of a fork, from the text of a file of this name.
///
/// # Errors
/// `file` if the text is none, or names what there is not.
pub fn with(mut table: Table, text: &str, file: &str) -> Result<Table> {
    let fork: Fork = toml::from_str(text).map_err(|e| {
        let line = e.span().map(|s| text[..s.start.min(text.len())].lines().count().max(1));
        let at = line.map_or(file.to_string(), |n| format!("{file}:{n}"));
        Diag::new("file", format!("no table of rules: {}", e.message()))
            .at(at)
            .help("each row is a [[rule]] with name and says, as in docs/audit.md")
    })?;
    let mut wrong = vec![];
    for rule in &fork.rule {
        let of = if rule.name.is_empty() { "a rule without a name" } else { &*rule.name };
        let all = misfits(rule, &table, &fork);
        wrong.extend(all.into_iter().map(|w| format!("{of}: {w}")));
    }
    if !wrong.is_empty() {
        let d = Diag::new("file", "rules name what there is not").at(file.to_string());
        return Err(wrong.into_iter().fold(d, Diag::why).help(
            "docs/audit.md has the columns of a rule; facts of your own: facts = [\"mine\"]",
        ));
    }
    for mut rule in fork.rule {
        // What a fork does is written in its own file.
        if rule.source.is_empty() {
            rule.source = file.to_string();
        }
        rule.commit.get_or_insert_default();
        match table.rule.iter_mut().find(|r| r.name == rule.name) {
            Some(old) => *old = rule,
            None => table.rule.push(rule),
        }
    }
    Ok(table)
}

/// A word that is none of the known ones, with the nearest of these.
fn unknown<'a>(what: &str, word: &str, known: impl Iterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.collect();
    let near = nearest(word, known.iter().copied(), 1);
    let shown: String = word.chars().take(40).collect();
    match near.first() {
        Some(near) => format!("no {what} `{shown}` (nearest: {near})"),
        None if known.len() > LISTED => format!("no {what} `{shown}`"),
        None => format!("no {what} `{shown}`: there are {}", known.join(", ")),
    }
}

/// What is wrong with a rule.
fn misfits(rule: &Rule, table: &Table, fork: &Fork) -> Vec<String> {
    let mut out = vec![];
    if rule.name.is_empty() || rule.says.is_empty() {
        out.push("a name, and what it says, are wanted".into());
    }
    let classes = || table.class.iter().map(|c| c.name.as_str()).chain(["all", ROUTER_LOSS]);
    for class in rule.of.iter().chain(&rule.but).filter(|c| classes().all(|k| k != **c)) {
        out.push(unknown("class of parameters", class, classes()));
    }
    let lists = [&rule.cuts, &rule.sums, &rule.whole, &rule.splits, &rule.again];
    let counted = rule.counts.as_deref().map(|c| c.split_once(' ').unwrap_or((c, "")));
    let axes = lists.into_iter().flatten().map(String::as_str);
    let axes = axes.chain(counted.iter().flat_map(|c| c.1.split_whitespace()));
    for axis in axes.filter(|a| !AXES.contains(a)) {
        if !(axis == PARTIAL && rule.sums.iter().any(|s| s == axis)) {
            out.push(unknown("axis", axis, AXES.into_iter()));
        }
    }
    if let Some((how, axes)) = counted
        && (!["each", "first"].contains(&how) || axes.trim().is_empty())
    {
        out.push(format!("counts = `{how} {axes}`: `each AXES` or `first AXES` is wanted"));
    }
    let numbers = || AXES.into_iter().chain(NUMBERS);
    for factor in rule.times.iter().flat_map(|t| t.split(['*', '/'])).map(str::trim) {
        let number = factor.parse().is_ok_and(|n: f64| n.is_finite() && n > 0.0);
        if !number && numbers().all(|n| n != factor) {
            out.push(unknown("number", factor, numbers()));
        }
    }
    for v in [&rule.since, &rule.until].into_iter().flatten() {
        out.extend(version(v).is_err().then(|| format!("`{v}` is no version")));
    }
    out.extend(rule.when.split_whitespace().filter_map(|w| of_when(w, table, fork)));
    out
}

/// What is wrong with a word of `when`.
fn of_when(word: &str, table: &Table, fork: &Fork) -> Option<String> {
    let numbers = || AXES.into_iter().chain(NUMBERS);
    if let Some((a, b)) = word.split_once("!=") {
        let other = [a, b].into_iter().find(|x| numbers().all(|n| n != *x));
        return other.map(|x| unknown("number", x, numbers()));
    }
    let word = word.strip_prefix('!').unwrap_or(word);
    if let Some(flag) = word.strip_prefix("--") {
        let flag = format!("--{}", flag.split('=').next().unwrap_or(flag));
        let known = arguments::find(&flag).is_some() || fork.facts.contains(&flag);
        return (!known).then(|| unknown("argument", &flag, arguments::names()));
    }
    let name = word.split(">=").next().unwrap_or(word);
    let own = |f: &str| f.split(">=").next() == Some(name);
    let made = table.rule.iter().chain(&fork.rule).any(|r| r.makes.iter().any(|m| m == name));
    let asked = table.asked();
    let known = || AXES.into_iter().chain(SWITCHES).chain(fork.facts.iter().map(String::as_str));
    let is = made || known().any(own) || asked.iter().any(|a| own(a));
    (!is).then(|| unknown("fact", word, known().chain(asked.iter().copied())))
}
