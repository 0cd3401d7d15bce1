//! What two plans differ in, and which option makes each difference.
//!
//! A cause is found by compiling: the first plan's model with one option of the second; and where that does not
//! make all of a difference, the second's with one option of the first. So it is said of an option only what its
//! change makes of a plan.

use serde::{Serialize, Serializer};
use serde_json::{Value as Json, json};
use shardc_cost::device::Device;
use shardc_cost::plan::price;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::plan::{MemoryClass, Plan};
use shardc_ir::text::{Repeat, print_with};
use shardc_passes::options::Options;
use shardc_plans::flags::PRICES;
use shardc_plans::stored::Stored;
use shardc_report::inspect::place;
use shardc_report::report::{Experts, of_class, phase_of};
use std::collections::{BTreeMap, BTreeSet};
use toml::{Table, Value};

/// What is compared, in the order in which it is shown.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(tag = "of", rename_all = "snake_case")]
pub enum What {
    /// Bytes at the peak of a rank class, or of the rank that needs most; all, or of a kind.
    Memory { class: Option<usize>, kind: Option<MemoryClass> },
    /// Calls and bytes sent in a step, by one rank of each rank class together.
    Exchange { scope: String, axis: String, kind: &'static str, phase: &'static str },
    /// Ops of the programs of a layer, or outside of all layers.
    Ops { layer: Option<u32>, phase: &'static str, op: &'static str },
    /// Seconds of a step by what takes them; all, or a part.
    Price { part: Option<&'static str> },
}

/// How much of it there is: of exchanges calls and bytes, else one number, the count.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Amount {
    pub count: f64,
    pub bytes: f64,
}

impl What {
    /// An amount of it by its unit.
    fn named(&self, a: Amount) -> Json {
        match self {
            What::Memory { .. } => json!({ "bytes": a.count }),
            What::Exchange { .. } => json!({ "calls": a.count, "bytes": a.bytes }),
            What::Ops { .. } => json!({ "ops": a.count }),
            What::Price { .. } => json!({ "seconds": a.count }),
        }
    }
}

/// All that is compared of one plan; what it lacks is 0.
type Digest = BTreeMap<What, Amount>;

/// What an option has to do with a difference.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum How {
    /// Its change alone makes the whole difference.
    Alone,
    /// Its change alone makes it this much.
    AloneTo { amount: Amount },
    /// Its change alone does nothing, or cannot be; without it nothing is left of the difference.
    Beside,
    /// Its change alone does nothing, or cannot be; without it there is this much.
    BesideFrom { amount: Amount },
}

/// An option, by its name in options.toml, as a cause.
#[derive(Clone, PartialEq, Debug)]
pub struct Cause {
    pub option: String,
    pub how: How,
}

/// Something of which there is not as much in both plans.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    pub what: What,
    pub before: Amount,
    pub after: Amount,
    /// Empty where no single option has a part in it, or causes are not known.
    pub causes: Vec<Cause>,
}

/// A row with its amounts by their units.
#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    what: &'a What,
    before: Json,
    after: Json,
    causes: Vec<Json>,
}

impl Serialize for Row {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        let named = |a| self.what.named(a);
        let cause = |c: &Cause| match c.how {
            How::Alone => json!({ "option": c.option, "how": "alone" }),
            How::AloneTo { amount } => {
                json!({ "option": c.option, "how": "alone_to", "amount": named(amount) })
            }
            How::Beside => json!({ "option": c.option, "how": "beside" }),
            How::BesideFrom { amount } => {
                json!({ "option": c.option, "how": "beside_from", "amount": named(amount) })
            }
        };
        let (before, after) = (named(self.before), named(self.after));
        let causes = self.causes.iter().map(cause).collect();
        Shown { what: &self.what, before, after, causes }.serialize(s)
    }
}

/// An option that is not the same, or the model.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Change {
    pub option: String,
    pub before: Option<Value>,
    pub after: Option<Value>,
    /// It only bounds what is compiled, or nothing was chosen by it, and is not a cause.
    pub bound: bool,
    /// Why its change alone cannot be compiled.
    pub refused_alone: Option<String>,
    /// Why the second plan cannot be compiled without it; asked where something has no other cause.
    pub refused_without: Option<String>,
}

/// The first line of a function that is not the same in both plans, of one that has such.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Line {
    /// `model` or `programs`: the text.
    pub of: &'static str,
    /// None before the first function.
    pub function: Option<String>,
    /// None if the text has no such line.
    pub before: Option<String>,
    pub after: Option<String>,
}

/// Exchanges of an axis and kind in a step, of all scopes and phases together; or without both, all that is sent.
#[derive(Clone, PartialEq, Debug)]
pub struct Sent {
    pub of: Option<(String, &'static str)>,
    pub before: Amount,
    pub after: Amount,
}

/// What both plans send, by axis and kind, and all together.
fn sent(first: &Digest, second: &Digest) -> Vec<Sent> {
    let mut all: BTreeMap<Option<(String, &'static str)>, [Amount; 2]> = BTreeMap::new();
    for (i, digest) in [first, second].into_iter().enumerate() {
        for (what, amount) in digest {
            let What::Exchange { axis, kind, .. } = what else { continue };
            for of in [Some((axis.clone(), *kind)), None] {
                let to = &mut all.entry(of).or_default()[i];
                (to.count, to.bytes) = (to.count + amount.count, to.bytes + amount.bytes);
            }
        }
    }
    let mut all: Vec<Sent> =
        all.into_iter().map(|(of, [before, after])| Sent { of, before, after }).collect();
    // The sum comes last.
    all.sort_by_key(|s| s.of.is_none());
    all
}

/// Two plans, compared.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Comparison {
    /// All that ranks run by is equal, and so are the options.
    pub same: bool,
    pub options: Vec<Change>,
    /// Why causes are not known, if they are not.
    pub no_causes: Option<String>,
    pub rows: Vec<Row>,
    /// All exchanges of both plans, also those that do not differ.
    #[serde(skip)]
    pub sent: Vec<Sent>,
    /// Where the texts differ, if there are no rows.
    pub texts: Vec<Line>,
}

impl Comparison {
    /// With the texts' lines, if nothing else that is compared differs.
    fn with_texts(self, a: &Stored, b: &Stored) -> Comparison {
        if self.same || !self.rows.is_empty() {
            return self;
        }
        let [first, second] = [a, b].map(|s| print_with(&s.plan.module, Repeat::Unroll));
        let mut texts = lines("model", &a.source, &b.source);
        texts.extend(lines("programs", &first, &second));
        Comparison { texts, ..self }
    }
}

/// Functions of a text by their names, and what is before them.
fn functions(text: &str) -> Vec<(Option<&str>, Vec<&str>)> {
    let mut out = vec![(None, vec![])];
    for line in text.lines() {
        if let Some(head) = line.strip_prefix("func ") {
            out.push((head.split(['(', ' ']).next(), vec![]));
        }
        out.last_mut().expect("there is the first").1.push(line.trim());
    }
    out
}

/// The first line that differs of every function that has one.
fn lines(of: &'static str, before: &str, after: &str) -> Vec<Line> {
    let (first, second) = (functions(before), functions(after));
    let of_first: BTreeSet<_> = first.iter().map(|(name, _)| *name).collect();
    let added = second.iter().filter(|(name, _)| !of_first.contains(name));
    let names = first.iter().chain(added).map(|(name, _)| *name);
    names
        .filter_map(|name| {
            let [a, b] = [&first, &second].map(|all| {
                all.iter().find(|(other, _)| *other == name).map_or(&[][..], |(_, lines)| lines)
            });
            let i = (0..a.len().max(b.len())).find(|&i| a.get(i) != b.get(i))?;
            let line = |all: &[&str]| all.get(i).map(|l| l.to_string());
            Some(Line { of, function: name.map(str::to_string), before: line(a), after: line(b) })
        })
        .collect()
}

/// The name of the model among options.
pub const MODEL: &str = "model";

/// Compares two plans; prices are among it if a machine is given.
///
/// # Errors
/// `device` if the machine lacks products of an element type.
pub fn compare(a: &Stored, b: &Stored, device: Option<&Device>) -> Result<Comparison> {
    let (first, second) =
        (digest(&a.plan, &a.options, device)?, digest(&b.plan, &b.options, device)?);
    let changed = changes(a, b);
    let differ: BTreeSet<&What> = first.keys().chain(second.keys()).collect();
    let of = |d: &Digest, what: &What| d.get(what).copied().unwrap_or_default();
    let differ = differ.into_iter().filter(|w| of(&first, w) != of(&second, w));
    let same_classes = a.plan.classes.len() == b.plan.classes.len();
    let shown = |w: &&What| same_classes || !matches!(w, What::Memory { class: Some(_), .. });
    let mut rows: Vec<Row> = differ
        .filter(shown)
        .map(|w| Row {
            what: w.clone(),
            before: of(&first, w),
            after: of(&second, w),
            causes: vec![],
        })
        .collect();
    let same = a.hash() == b.hash();
    let mut out = Comparison {
        same,
        options: changed,
        no_causes: None,
        rows: vec![],
        sent: sent(&first, &second),
        texts: vec![],
    };
    let again = [(a, &first), (b, &second)].into_iter().find_map(|(s, own)| {
        match variant(s, &s.options).and_then(|p| digest(&p, &s.options, device)) {
            Ok(d) if d == *own => None,
            Ok(_) => Some("a plan is not what its model compiles to today".to_string()),
            Err(d) => Some(format!("a plan's model does not compile today: {}", d.message)),
        }
    });
    if again.is_some() {
        return Ok(Comparison { no_causes: again, rows, ..out }.with_texts(a, b));
    }
    for change in out.options.iter_mut().filter(|c| !c.bound) {
        match made(a, b, change, device) {
            Ok(d) => add(&mut rows, &change.option, |r| {
                let amount = of(&d, &r.what);
                let all = amount == r.after;
                (amount != r.before).then_some(if all {
                    How::Alone
                } else {
                    How::AloneTo { amount }
                })
            }),
            Err(why) => change.refused_alone = Some(said(&why)),
        }
    }
    // What no option makes by itself: what is left of it without each.
    if rows.iter().any(|r| !r.is_explained()) {
        for change in out.options.iter_mut().filter(|c| !c.bound) {
            match made(b, a, &change.back(), device) {
                Ok(d) => add(&mut rows, &change.option, |r| {
                    let amount = of(&d, &r.what);
                    let all = amount == r.before;
                    let how = if all { How::Beside } else { How::BesideFrom { amount } };
                    let is_known =
                        r.is_explained() || r.causes.iter().any(|c| c.option == change.option);
                    (amount != r.after && !is_known).then_some(how)
                }),
                Err(why) => change.refused_without = Some(said(&why)),
            }
        }
    }
    out.rows = rows;
    Ok(out.with_texts(a, b))
}

/// The plan of `a` with one option of `b`.
fn made(a: &Stored, b: &Stored, change: &Change, device: Option<&Device>) -> Result<Digest> {
    let o = changed_alone(a, change)?;
    let of = if change.option == MODEL { b } else { a };
    digest(&variant(of, &o)?, &o, device)
}

impl Row {
    /// True if one option alone makes the whole difference.
    fn is_explained(&self) -> bool {
        self.causes.iter().any(|c| c.how == How::Alone)
    }
}

impl Change {
    /// The change from the second plan to the first.
    fn back(&self) -> Change {
        Change { before: self.after.clone(), after: self.before.clone(), ..self.clone() }
    }
}

fn said(d: &Diag) -> String {
    format!("{} [{}]", d.message, d.code)
}

fn add(rows: &mut [Row], option: &str, how: impl Fn(&Row) -> Option<How>) {
    for r in rows {
        r.causes.extend(how(r).map(|how| Cause { option: option.into(), how }));
    }
}

/// The option that only bounds a compilation.
const BOUND: &str = "memory";

/// Options by their names in options.toml, whoever has chosen them.
fn table(o: &Options) -> Table {
    Table::try_from(Options { given: vec![], ..o.clone() }).expect("options are plain data")
}

/// What was asked for otherwise.
fn changes(a: &Stored, b: &Stored) -> Vec<Change> {
    let (first, second) = (table(&a.options), table(&b.options));
    let names: BTreeSet<&String> = first.keys().chain(second.keys()).collect();
    let by = |s: &Stored| s.options.auto || s.options.hardware.own.is_some();
    let priced = by(a) || by(b);
    let one = |name: &String| Change {
        option: name.clone(),
        before: first.get(name).cloned(),
        after: second.get(name).cloned(),
        bound: name == BOUND || (name == PRICES && !priced),
        refused_alone: None,
        refused_without: None,
    };
    let mut out: Vec<Change> = names.into_iter().map(one).filter(|c| c.before != c.after).collect();
    if !same_model(a, b) {
        let of = |s: &Stored| Some(Value::String(s.family.clone()));
        let change = Change { before: of(a), after: of(b), ..one(&MODEL.to_string()) };
        out.insert(0, change);
    }
    out
}

/// True if the models are the same, whatever batch they are written for.
fn same_model(a: &Stored, b: &Stored) -> bool {
    match (a.facts, b.facts) {
        (Some(_), Some(_)) => (&a.family, &a.config) == (&b.family, &b.config),
        (None, None) => a.source == b.source,
        _one => false,
    }
}

/// The options of `a` with one of `b`, which may be the model, and is not an option then.
fn changed_alone(a: &Stored, change: &Change) -> Result<Options> {
    if change.option == MODEL {
        return Ok(a.options.clone());
    }
    let mut all = table(&a.options);
    all.remove(BOUND);
    match &change.after {
        Some(v) => all.insert(change.option.clone(), v.clone()),
        None => all.remove(&change.option),
    };
    all.try_into().map_err(|e: toml::de::Error| {
        Diag::new("flag", e.message().to_string()).help("change it with what it needs")
    })
}

/// The model of a plan, compiled with options.
fn variant(s: &Stored, o: &Options) -> Result<Plan> {
    if let Some(f) = &s.facts
        && let Some(v) = shardc_plans::rules::violations(f, o).first()
    {
        return Err(v.diag());
    }
    shardc_plans::again::variant(s, o)
}

/// All that is compared of a plan.
fn digest(plan: &Plan, o: &Options, device: Option<&Device>) -> Result<Digest> {
    let mut out = Digest::new();
    let mut put = |what: What, count: f64, bytes: f64| {
        let all: &mut Amount = out.entry(what).or_default();
        (all.count, all.bytes) = (all.count + count, all.bytes + bytes);
    };
    let peak = |i: &usize| (plan.classes[*i].memory.peak_bytes, std::cmp::Reverse(*i));
    let largest = (0..plan.classes.len()).max_by_key(peak);
    let experts = Experts::of(plan);
    for (i, c) in plan.classes.iter().enumerate() {
        let of_all = (plan.classes.len() > 1).then_some(Some(i));
        for class in of_all.into_iter().chain((largest == Some(i)).then_some(None)) {
            put(What::Memory { class, kind: None }, c.memory.peak_bytes as f64, 0.0);
            for &(kind, n) in &c.memory.at_peak {
                put(What::Memory { class, kind: Some(kind) }, n as f64, 0.0);
            }
        }
        for x in of_class(plan, &experts, c) {
            let (scope, axis) = (place(&x.scope), x.axis);
            let what = What::Exchange { scope, axis, kind: x.kind, phase: x.phase };
            put(what, x.count as f64, x.bytes);
        }
    }
    for f in &plan.module.funcs {
        for n in &f.nodes {
            let layer = f.scope_info(n.scope).layer;
            let what = What::Ops { layer, phase: phase_of(f.kind), op: n.op.mnemonic() };
            put(what, 1.0, 0.0);
        }
    }
    if let Some(d) = device {
        let p = price(plan, d, &o.speeds)?;
        put(What::Price { part: None }, p.total, 0.0);
        for (part, s) in p.parts.list() {
            put(What::Price { part: Some(part) }, s, 0.0);
        }
    }
    Ok(out)
}
