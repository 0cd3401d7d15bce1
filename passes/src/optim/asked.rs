//! What is asked of groups: their texts, and what they are called.

use super::{Group, Spread};
use crate::options::{Optimizer, Options};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::text::update::Rules;
use std::collections::{BTreeMap, BTreeSet};

/// Names of the rules that parameters are updated by: those of groups, and of `*` where no later
/// group is of all.
pub fn rules(o: &Options) -> Vec<String> {
    let mut all = vec![base(o).rule];
    for text in &o.optim {
        // What is no group is refused when parameters are dealt to groups.
        let Ok(group) = read(text, o) else { continue };
        if group.on.split('+').any(|glob| glob.trim() == "*") {
            all.clear();
        }
        if !all.contains(&group.rule) {
            all.push(group.rule);
        }
    }
    all
}

/// Those of them that are a user's own text, whatever they are called.
pub fn own_rules(o: &Options) -> Vec<String> {
    let own = Rules::parse(&o.optim_file, place(o)).unwrap_or_default();
    rules(o).into_iter().filter(|name| own.named(name).next().is_some()).collect()
}

/// Whether AdamW or SGD alone, as it is built in, updates all that is trained.
pub fn is_plain(o: &Options) -> bool {
    o.optim.is_empty() && own_rules(o).is_empty()
}

/// The one group by which all that is trained is updated; `None` if there are several, or a text is none.
pub fn of_all(o: &Options) -> Option<Group> {
    let Some((last, before)) = o.optim.split_last() else { return Some(base(o)) };
    let group = read(last, o).ok().filter(|g| g.on.split('+').any(|glob| glob.trim() == "*"));
    group.filter(|_| before.iter().all(|text| read(text, o).is_ok()))
}

/// What messages call the rules that are not built in: those that no flag gave are of the model.
pub fn place(o: &Options) -> &'static str {
    let is_given = o.given.iter().any(|g| g == "optim-file");
    if is_given { "--optim-file" } else { "the model's text" }
}

/// The group of all parameters.
pub(super) fn base(o: &Options) -> Group {
    let (rule, given) = match o.optimizer {
        Optimizer::AdamW { beta1, beta2, eps } => {
            let all = [("beta1", beta1), ("beta2", beta2), ("eps", eps)];
            let all = all.into_iter().filter(|(key, x)| says(o, key, *x));
            ("adamw", all.map(|(k, x)| (k.to_string(), format!("{x:?}"))).collect())
        }
        Optimizer::Sgd => ("sgd", BTreeMap::new()),
    };
    Group { on: "*".into(), rule: rule.into(), given, lr: 1.0, spread: Spread::Auto }
}

/// Whether the flags of AdamW say a number: one that nobody gave is left to a rule of the user's of that name.
fn says(o: &Options, key: &str, x: f64) -> bool {
    let flag = if key == "eps" { "eps" } else { "betas" };
    let Optimizer::AdamW { beta1, beta2, eps } = Options::default().optimizer else { return true };
    let plain = [("beta1", beta1), ("beta2", beta2), ("eps", eps)].contains(&(key, x));
    if o.optim_file.is_empty() || !plain || o.given.iter().any(|g| g == flag) {
        return true;
    }
    let own = Rules::parse(&o.optim_file, place(o));
    !own.is_ok_and(|r| r.named("adamw").next().is_some())
}

pub(super) fn wrong(text: &str, what: impl Into<String>) -> Diag {
    Diag::new("update-rule", what.into()).at(format!("--optim '{text}'"))
}

/// Reads `GLOB[+GLOB…]=NAME[,ATTRIBUTE=VALUE…]`.
pub(super) fn read(text: &str, o: &Options) -> Result<Group> {
    if text.contains(|c: char| c == '"' || c.is_control()) {
        return Err(wrong(text, "a group has no quotes and is one line").help("leave them out"));
    }
    const FORM: &str = "GLOB[+GLOB…]=NAME[,lr=X][,lr*=X][,ATTRIBUTE=VALUE…]";
    let form = |what: &str| {
        wrong(text, what).rule(FORM).help("for example --optim '*.mlp.*.weight=lion,lr=1e-4'")
    };
    let (on, rest) = text.split_once('=').ok_or_else(|| form("no update rule is named"))?;
    let mut words = rest.split(',');
    let rule = words.next().unwrap_or("").trim().to_string();
    if on.split('+').any(|g| g.trim().is_empty()) || rule.is_empty() {
        return Err(form("a glob or the name of a rule is missing"));
    }
    // The group of all parameters says it of the rules that follow, too, where they are the same.
    let base = base(o);
    let mut given = if base.rule == rule { base.given } else { BTreeMap::new() };
    let (mut lr, mut spread) = (1.0, Spread::Auto);
    let mut seen = BTreeSet::new();
    for word in words {
        let (key, value) = word.split_once('=').ok_or_else(|| form("an attribute has no value"))?;
        let (key, value) = (key.trim(), value.trim());
        if !seen.insert(key) {
            return Err(form(&format!("{key} is given twice")));
        }
        let rate = || {
            let x = value.parse().ok().filter(|x: &f64| (*x as f32).is_normal() && *x > 0.0);
            x.ok_or_else(|| form("a learning rate is a number above 0, as f32 has"))
        };
        match key {
            "lr" => lr = rate()? / o.lr.peak(),
            "lr*" => lr = rate()?,
            "spread" => {
                spread = match value {
                    "auto" => Spread::Auto,
                    "owners" => Spread::Owners,
                    "gather" => Spread::Gather,
                    _other => return Err(form("spread is one of auto, owners and gather")),
                }
            }
            "lr_at" => {
                return Err(wrong(text, "a group has no schedule of its own")
                    .rule("its rate is a multiple of the run's at every step")
                    .help("write lr=X, its peak on the run's schedule, or lr*=X, a factor"));
            }
            _other if !allows(&rule, key, value) => {
                let what = format!("`{value}` is no {key}");
                return Err(wrong(text, what).help(
                    "betas and momentum are from 0 to below 1, eps is above 0, decay is not below 0, steps are a \
                     whole number from 1 to 100, d of adafactor is at least 1, its beta2_decay at most 0, and \
                     all are finite",
                ));
            }
            _other => drop(given.insert(key.into(), value.into())),
        }
        let own = [lr, lr * o.lr.peak()];
        if !own.iter().all(|x| (*x as f32).is_normal()) {
            return Err(form("the learning rate of the group is out of the range of f32"));
        }
    }
    Ok(Group { on: on.into(), rule, given, lr, spread })
}

/// Whether a number may be that of a rule's attribute: words and terms are the rule's to understand.
pub(super) fn allows(rule: &str, key: &str, value: &str) -> bool {
    let Ok(x) = value.parse::<f64>() else { return true };
    (x as f32).is_finite()
        && match (rule, key) {
            (_, "beta1" | "beta2" | "momentum") => (0.0..1.0).contains(&x),
            (_, "eps") | ("adafactor", "eps1") => (x as f32).is_normal() && x > 0.0,
            (_, "decay") | ("adafactor", "eps2") => x >= 0.0,
            (_, "steps") => (1.0..=100.0).contains(&x) && x.fract() == 0.0,
            ("adafactor", "d") => x >= 1.0,
            ("adafactor", "beta2_decay") => x <= 0.0,
            _own => true,
        }
}
