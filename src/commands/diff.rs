//! `shardc diff`: what two plans differ in, and which option makes each difference.

use super::show;
use clap::Args;
use serde_json::json;
use shardc_compiler::compare::{
    Amount, Cause, Change, Comparison, How, Line, MODEL, Row, Sent, What, compare,
};
use shardc_ir::diag::time;
use shardc_ir::diag::{Result, bytes, count};
use shardc_passes::options::ShardRule;
use shardc_plans::flags::{PRICES, flag_of};
use shardc_plans::machine::device;
use shardc_plans::plan_dir;
use shardc_process::terminal::{self, Volume, doing, json_line, talks};
use shardc_report::inspect::trimmed;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use toml::Value;

/// What is compared.
#[derive(Args, Debug)]
pub struct Diff {
    /// A plan: a folder that shardc compile wrote
    pub before: PathBuf,
    /// Another plan
    pub after: PathBuf,
    /// Also compare estimated times, on this machine: a name, or a TOML file like those in cost/hardware
    #[arg(long, alias = "device", value_name = "NAME|FILE.toml")]
    pub machine: Option<String>,
}

/// Compares two plans.
///
/// # Errors
/// `device`, and those of reading the plans.
pub fn diff(what: &Diff, json: bool) -> Result<i32> {
    let device = what.machine.as_deref().map(device).transpose()?;
    doing("reading the plans");
    let [before, after] = [&what.before, &what.after].map(|dir| plan_dir::read(dir));
    let (before, after) = (before?, after?);
    doing("comparing the plans");
    let found = compare(&before, &after, device.as_ref())?;
    if json {
        show(json_line("diff", json!(found)));
    } else {
        show(human(&found, talks().volume == Volume::Verbose));
    }
    Ok(0)
}

/// The sections, in order.
const TITLES: [&str; 4] = [
    "price of a step",
    "memory of a rank at the peak",
    "exchanges of a step by scope, of one rank of every stage together",
    "programs: ops of a layer",
];

fn title(w: &What) -> &'static str {
    match w {
        What::Price { .. } => TITLES[0],
        What::Memory { .. } => TITLES[1],
        What::Exchange { .. } => TITLES[2],
        What::Ops { .. } => TITLES[3],
    }
}

/// True of what is a part of other rows: rank classes, scopes and layers.
fn is_detail(w: &What) -> bool {
    match w {
        What::Price { .. } => false,
        What::Memory { class, .. } => class.is_some(),
        What::Exchange { .. } | What::Ops { .. } => true,
    }
}

/// What differs: price, memory and what is sent; with `all` by layer, too, and with what each option makes by itself.
fn human(c: &Comparison, all: bool) -> String {
    let mut out = options(&c.options);
    if c.rows.is_empty() {
        return out + &texts(c);
    }
    let mut hidden = 0;
    for title in TITLES {
        let of = |r: &&Row| self::title(&r.what) == title;
        let (own, more): (Vec<&Row>, Vec<&Row>) =
            c.rows.iter().filter(of).partition(|r| all || !is_detail(&r.what));
        if title == TITLES[2] {
            out += &sent(c);
        }
        if !own.is_empty() {
            out += &format!("\n{title}\n{}", table(&section(&own, all)));
        }
        hidden += section(&more, all).len();
    }
    if let Some(why) = &c.no_causes {
        out += &format!("\ncauses are not known: {why}\n");
    } else if c.rows.iter().any(|r| r.causes.is_empty()) && !c.options.is_empty() {
        out += "\n-: no single option of the second plan causes this, and it does not disappear without one\n";
    }
    if hidden > 0 {
        let rows = count(hidden, "more row", "more rows");
        out += &format!("\n{rows} by layer, and what each option makes by itself: -v\n");
    }
    out
}

/// All that a rank sends, by axis and kind, if that differs.
fn sent(c: &Comparison) -> String {
    let differ = |s: &&Sent| s.before != s.after;
    let mut rows: Vec<[String; 5]> = vec![];
    for s in c.sent.iter().filter(differ) {
        let of_row = |r: &&Row| match (&r.what, &s.of) {
            (What::Exchange { axis, kind, .. }, Some(of)) => (axis, *kind) == (&of.0, of.1),
            (What::Exchange { .. }, None) => true,
            _another => false,
        };
        let causes = c.rows.iter().filter(of_row).flat_map(|r| &r.causes);
        let causes: BTreeSet<&str> = causes.map(|c| c.option.as_str()).collect();
        let what = s.of.as_ref().map_or("all".into(), |(axis, kind)| format!("{kind} over {axis}"));
        let [before, after] = [s.before, s.after].map(exchanged);
        let by = signed(s.before.bytes, s.after.bytes, |by| bytes(by as usize));
        rows.push([what, before, after, by, named(causes)]);
    }
    match rows.is_empty() {
        true => String::new(),
        false => format!(
            "\nsent in a step by one rank (in a pipeline, of every stage)\n{}",
            table(&rows)
        ),
    }
}

/// Functions whose lines are shown.
const MOST: usize = 3;

/// What is said where no amount differs: the texts' first lines that do.
fn texts(c: &Comparison) -> String {
    if c.same {
        return "the plans are the same\n".into();
    }
    if c.texts.is_empty() {
        return "nothing that is compared differs\n".into();
    }
    let mut out = String::from(
        "\nmemory, exchanges and numbers of ops are the same; the texts differ; the first such line of each function:\n",
    );
    for of in ["model", "programs"] {
        let own: Vec<&Line> = c.texts.iter().filter(|l| l.of == of).collect();
        for l in own.iter().take(MOST) {
            let line = |l: &Option<String>| l.clone().unwrap_or_else(|| "(no line)".into());
            let function = l.function.as_ref().map_or(String::new(), |f| format!(" {f}"));
            out += &format!("{of}{function}\n  - {}\n  + {}\n", line(&l.before), line(&l.after));
        }
        if own.len() > MOST {
            out += &format!("{of}: and in {} more\n", own.len() - MOST);
        }
    }
    out
}

fn options(all: &[Change]) -> String {
    let mut t = terminal::table();
    for c in all.iter().filter(|c| !(c.bound && c.option == PRICES)) {
        let values = values(c);
        let refused = match (&c.refused_alone, &c.refused_without) {
            (None, _) if c.bound => "a bound: it makes no difference".into(),
            (None, _) => String::new(),
            (Some(why), None) => format!("not by itself: {why}"),
            (Some(why), Some(_)) => format!("neither by itself nor left out: {why}"),
        };
        t.add_row([flag_of(&c.option), values, refused]);
    }
    match t.is_empty() {
        true => "the options are the same\n".into(),
        false => format!("options\n{}", trimmed(&t)),
    }
}

/// What an option was and is; of several numbers those that differ.
fn values(c: &Change) -> String {
    if c.option == MODEL && c.before == c.after {
        return "its text or its config.json differs".into();
    }
    let (before, after) = (c.before.as_ref(), c.after.as_ref());
    let (mut first, mut second) = (BTreeMap::new(), BTreeMap::new());
    let several = [(before, &mut first), (after, &mut second)].map(|(v, to)| match v {
        Some(Value::Table(t)) => flat(t, "", to),
        None => true,
        Some(_) => false,
    });
    if several == [true; 2] && !(first.is_empty() && second.is_empty()) {
        let names: BTreeSet<&String> = first.keys().chain(second.keys()).collect();
        let differ = names.into_iter().filter(|n| first.get(*n) != second.get(*n));
        let said = |name: &str, v: Option<&Value>| match (c.option.as_str(), v) {
            (PRICES, Some(Value::Float(x))) => speed(name, *x),
            _another => value(v),
        };
        let one =
            |n: &String| format!("{n} {} -> {}", said(n, first.get(n)), said(n, second.get(n)));
        return differ.map(one).collect::<Vec<_>>().join(", ");
    }
    let one = |v: Option<&Value>| match (c.option.as_str(), v.and_then(Value::as_integer)) {
        ("memory", Some(n)) => bytes(n as usize),
        _another => value(v),
    };
    format!("{} -> {}", one(before), one(after))
}

/// Values of a table and of the tables in it, by their names; true, as it is one.
fn flat(t: &toml::Table, before: &str, to: &mut BTreeMap<String, Value>) -> bool {
    for (name, v) in t {
        match v {
            Value::Table(inner) => {
                flat(inner, &format!("{before}{name}."), to);
            }
            _value => {
                to.insert(format!("{before}{name}"), v.clone());
            }
        }
    }
    true
}

/// A number of `hardware` with its unit.
fn speed(name: &str, x: f64) -> String {
    match name {
        "flops" => format!("{:.1} TFLOP/s", x / 1e12),
        "latency" | "start" | "line" => time(x),
        _link_or_memory => format!("{:.1} GB/s", x / 1e9),
    }
}

/// A value of options.toml; axes and shardings as their flags have them.
fn value(v: Option<&Value>) -> String {
    let axis = |v: &Value| match v.as_array().map(Vec::as_slice) {
        Some([Value::String(name), Value::Integer(n)]) => Some(format!("{name}={n}")),
        _other => None,
    };
    match v {
        None => "none".into(),
        Some(Value::Array(all)) if !all.is_empty() && all.iter().all(|v| axis(v).is_some()) => {
            all.iter().filter_map(axis).collect::<Vec<_>>().join(",")
        }
        Some(Value::Array(all)) if all.is_empty() => "none".into(),
        Some(Value::Array(all)) => {
            let flag = |v: &Value| v.clone().try_into().map_or(v.to_string(), |r| shard_flag(&r));
            all.iter().map(flag).collect::<Vec<_>>().join(" ")
        }
        Some(v) => v.to_string(),
    }
}

/// A sharding as the command line has it.
fn shard_flag(r: &ShardRule) -> String {
    let priority = if r.priority == 0 { String::new() } else { format!("@p{}", r.priority) };
    format!("--shard '{}={}{priority}'", r.glob, r.dims.join(","))
}

/// Rows of a table; those of neighbouring layers, and of neighbouring stages, that are alike are one.
fn section(rows: &[&Row], all: bool) -> Vec<[String; 5]> {
    let mut joined: Vec<(Vec<usize>, &Row)> = vec![];
    for r in rows {
        let like = joined.iter_mut().find(|(at, first)| {
            let next = at.last().copied().zip(number(&r.what)).is_some_and(|(a, b)| a + 1 == b);
            let same =
                (&first.before, &first.after, &first.causes) == (&r.before, &r.after, &r.causes);
            next && same && without(&first.what) == without(&r.what)
        });
        match like {
            Some((at, _)) => at.extend(number(&r.what)),
            None => joined.push((number(&r.what).into_iter().collect(), r)),
        }
    }
    let line = |(at, r): (Vec<usize>, &Row)| {
        let range = match at[..] {
            [] => String::new(),
            [one] => one.to_string(),
            [first, .., last] => format!("{first}-{last}"),
        };
        let show = |a: &Amount| amount(&r.what, *a);
        let causes = match all {
            true => causes(r),
            false => named(r.causes.iter().map(|c| c.option.as_str())),
        };
        [words(&r.what, &range), show(&r.before), show(&r.after), difference(r), causes]
    };
    joined.into_iter().map(line).collect()
}

fn table(rows: &[[String; 5]]) -> String {
    let mut t = terminal::table();
    t.set_header(["", "before", "after", "", "by"]);
    for r in rows {
        t.add_row(r);
    }
    terminal::numbers(&mut t, 1..4);
    trimmed(&t)
}

/// Options that have a part in a difference.
fn named<'a>(options: impl IntoIterator<Item = &'a str>) -> String {
    let all: Vec<&str> = options.into_iter().collect();
    if all.is_empty() { "-".into() } else { all.join(", ") }
}

/// The layer or stage of a row.
fn number(w: &What) -> Option<usize> {
    match w {
        What::Memory { class, .. } => *class,
        What::Ops { layer, .. } => layer.map(|l| l as usize),
        What::Exchange { .. } | What::Price { .. } => None,
    }
}

/// The same of any layer or stage.
fn without(w: &What) -> What {
    match w.clone() {
        What::Memory { class, kind } => What::Memory { class: class.map(|_| 0), kind },
        What::Ops { layer, phase, op } => What::Ops { layer: layer.map(|_| 0), phase, op },
        other => other,
    }
}

fn words(w: &What, range: &str) -> String {
    match w {
        What::Memory { class, kind } => {
            let of = if class.is_some() { format!("class {range}") } else { "largest".into() };
            format!("{of}: {}", kind.map_or("all", |k| k.name()))
        }
        What::Exchange { scope, axis, kind, phase } => {
            let at = if scope.is_empty() { "step" } else { scope };
            format!("{at}: {kind} over {axis}, {phase}")
        }
        What::Ops { layer: Some(_), phase, op } => format!("layer {range}, {phase}: {op}"),
        What::Ops { layer: None, phase, op } => format!("outside, {phase}: {op}"),
        What::Price { part } => part.unwrap_or("all").into(),
    }
}

fn exchanged(a: Amount) -> String {
    match (a.count, bytes(a.bytes as usize)) {
        (0.0, _) if a.bytes == 0.0 => "none".into(),
        (0.0, sent) => format!("{sent} in calls of others"),
        (n, sent) => format!("{n} {}, {sent}", if n == 1.0 { "call" } else { "calls" }),
    }
}

fn amount(w: &What, a: Amount) -> String {
    match w {
        What::Memory { .. } => bytes(a.count as usize),
        What::Exchange { .. } => exchanged(a),
        What::Ops { .. } => a.count.to_string(),
        What::Price { .. } => time(a.count),
    }
}

/// How much more, or less, with its sign; of exchanges, bytes.
fn difference(r: &Row) -> String {
    let (a, b) = match r.what {
        What::Exchange { .. } => (r.before.bytes, r.after.bytes),
        What::Memory { .. } | What::Ops { .. } | What::Price { .. } => {
            (r.before.count, r.after.count)
        }
    };
    signed(a, b, |by| match r.what {
        What::Memory { .. } | What::Exchange { .. } => bytes(by as usize),
        What::Ops { .. } => by.to_string(),
        What::Price { .. } => time(by),
    })
}

fn signed(a: f64, b: f64, text: impl Fn(f64) -> String) -> String {
    if b < a { format!("-{}", text(a - b)) } else { format!("+{}", text(b - a)) }
}

fn causes(r: &Row) -> String {
    let one = |c: &Cause| match c.how {
        How::Alone => c.option.clone(),
        How::AloneTo { amount: a } => format!("{} (alone: {})", c.option, amount(&r.what, a)),
        How::Beside => format!("{} (with the others)", c.option),
        How::BesideFrom { amount: a } => {
            format!("{} (with the others, without it {})", c.option, amount(&r.what, a))
        }
    };
    match r.causes.is_empty() {
        true => "-".into(),
        false => r.causes.iter().map(one).collect::<Vec<_>>().join("; "),
    }
}
