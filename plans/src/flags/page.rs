//! The page of docs that lists all options.

use super::spec::{Key, Kind, OptionSpec, all};

const HEAD: &str = "\
# Options

Every flag of `shardc compile` and `check` that says what is compiled, as it is declared in `plans/src/flags`
(a test compares this page with the declarations). `shardc.toml` has them under the same names,
`options.toml` of a plan under those of the column *option*, and there `given` names the flags that were
given. *From* is the first pass that acts on an option: a compilation that begins behind it with `--from`
has to have the same one. Where a flag decides several options, those that a pass acts on stand behind it.
`plan` takes the flags that are marked P, `run` those marked R.
";

/// `docs/options.md`, made of the declarations.
pub fn page() -> String {
    let mut out = String::from(HEAD);
    let mut heading = "";
    for s in all() {
        if s.heading != heading {
            heading = s.heading;
            out += &format!("\n## {heading}\n\n");
            out += "| flag | values | default | option | from | | what it is |\n";
            out += "|---|---|---|---|---|---|---|\n";
        }
        out += &row(s);
    }
    out
}

/// The line of an option.
fn row(s: &OptionSpec) -> String {
    let code = |k: &Key| format!("`{}`", k.name);
    let stored: Vec<&Key> = s.keys.iter().filter(|k| k.stored).collect();
    let keys: Vec<String> = stored.iter().map(|k| code(k)).collect();
    let from = |k: &Key| match (k.pass, k.priced) {
        ("", false) => None,
        ("", true) => Some(format!("{} with `--shard auto`", pass("partition"))),
        (name, _) => Some(pass(name)),
    };
    let mut passes: Vec<(String, Vec<String>)> = vec![];
    for k in &stored {
        let Some(from) = from(k) else { continue };
        match passes.iter_mut().find(|p| p.0 == from) {
            Some((_, keys)) => keys.push(code(k)),
            None => passes.push((from, vec![code(k)])),
        }
    }
    let said = |(from, own): &(String, Vec<String>)| match own.len() == stored.len() {
        true => from.clone(),
        false => format!("{from} ({})", own.join(", ")),
    };
    let passes: Vec<String> = passes.iter().map(said).collect();
    let marks = [(s.in_plan, "P"), (s.in_run, "R")];
    let marks: String = marks.iter().filter(|m| m.0).map(|m| m.1).collect();
    let cells = [
        format!("`--{}`", s.flag),
        values(s),
        s.default.to_string(),
        keys.join(", "),
        passes.join(", "),
        marks,
        s.help.to_string(),
    ];
    let cells = cells.map(|c| c.replace('|', "\\|").replace('*', "\\*").replace('<', "\\<"));
    format!("| {} |\n", cells.join(" | "))
}

/// A pass, with its place in the docs.
fn pass(name: &str) -> String {
    format!("[{name}](passes.md#{name})")
}

/// What values it takes, in words.
fn values(s: &OptionSpec) -> String {
    match s.kind {
        Kind::Switch => String::new(),
        Kind::Words(words) => words.join(", "),
        Kind::Whole(least, usize::MAX) => format!("a whole number from {least} on"),
        Kind::Whole(least, most) => format!("{least} to {most}"),
        Kind::Number => "a number".into(),
        Kind::Text if s.value.is_empty() => "text".into(),
        Kind::Text => s.value.into(),
        Kind::Many => format!("{}, repeatable", s.value),
    }
}
