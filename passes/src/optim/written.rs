//! Groups and update rules as the text of a model has them, behind its functions.
//!
//! ```text
//! group "*=adamw,beta1=0.9,beta2=0.999,eps=1e-8"
//! //   model.norm.weight
//! group "hidden=muon,lr=2e-4"
//! //   model.layers.*.mlp.down_proj.weight
//! update @adamw(…) … { … }
//! update @muon(…) … { … }
//! ```

use super::asked::allows;
use super::{Groups, groups, is_plain};
use crate::globs::frozen;
use crate::options::{Optimizer, Options};
use shardc_ir::diag::Result;
use shardc_ir::maps::HashSet;
use shardc_ir::plan::Mode;
use shardc_ir::source::Source;
use shardc_ir::text::update::{Rules, UpdateRule, built_in, groups_of, without_groups};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Each group with the tensors of the checkpoint that it takes, and the rules by name; empty where AdamW or SGD alone
/// updates all that is trained.
///
/// # Errors
/// Those of [`groups`].
pub fn written(source: &Source, o: &Options) -> Result<String> {
    let model = source.module.funcs.first();
    let Some(f) = model.filter(|_| o.mode == Mode::Train && !is_plain(o)) else {
        return Ok(String::new());
    };
    let all = groups(f, &source.weights, &frozen(&source.weights, o)?, o)?;
    let tensors: BTreeMap<&str, &str> =
        source.weights.iter().map(|w| (&*w.param, &*w.tensor)).collect();
    let mut out = String::new();
    for (k, g) in all.all.iter().enumerate() {
        let text = match k {
            0 => {
                let given = g.given.iter().map(|(key, value)| format!(",{key}={value}"));
                format!("{}={}{}", g.on, g.rule, given.collect::<String>())
            }
            _ => o.optim[k - 1].clone(),
        };
        let mut names: Vec<String> = vec![];
        for a in &f.args {
            let name = a.role.as_ref().map_or("", |r| &*r.name);
            if all.of.get(name).is_some_and(|u| u.group == k) {
                let name = numberless(tensors.get(name).copied().unwrap_or(name));
                if !names.contains(&name) {
                    names.push(name);
                }
            }
        }
        out += &format!("group \"{text}\"\n");
        out.extend(names.iter().map(|name| format!("//   {name}\n")));
    }
    let own = match o.optim_file.is_empty() {
        true => Rules::default(),
        false => Rules::parse(&o.optim_file, super::place(o))?,
    };
    for rule in used(&all, &own) {
        out += rule.text();
        out.push('\n');
    }
    Ok(out)
}

/// The rules of all names that parameters are updated by: of a name all, as a shape chooses among them.
fn used<'a>(all: &Groups, own: &'a Rules) -> Vec<&'a Arc<UpdateRule>> {
    let mut names: Vec<(usize, &str)> = all.of.values().map(|u| (u.group, &*u.rule.name)).collect();
    names.sort_unstable();
    let mut seen = HashSet::default();
    let names = names.into_iter().map(|x| x.1).filter(|&name| seen.insert(name));
    let of = |name| {
        let some = own.all().filter(move |r| r.name == name);
        let mut some = some.peekable();
        let others = match some.peek() {
            Some(_) => None,
            None => Some(built_in().all().filter(move |r| r.name == name)),
        };
        some.chain(others.into_iter().flatten())
    };
    names.flat_map(of).collect()
}

/// `model.layers.3.mlp.weight` as `model.layers.*.mlp.weight`.
fn numberless(name: &str) -> String {
    let part = |p: &str| match p == "{}" || p.bytes().all(|c| c.is_ascii_digit()) {
        true => "*".to_string(),
        false => p.to_string(),
    };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// Options with the groups and rules of a model's text, in place of others.
///
/// # Errors
/// `syntax` and those of rules if the text was not read as that of a model.
pub fn of_text(updates: &str, o: &Options) -> Result<Options> {
    let mut o = o.clone();
    let all = groups_of(updates)?;
    if all.is_empty() {
        return Ok(o);
    }
    (o.optim, o.optim_file) = (vec![], String::new());
    o.given.retain(|flag| flag != "optim-file");
    for (k, text) in all.into_iter().enumerate() {
        match base(text).filter(|_| k == 0) {
            Some(optimizer) => o.optimizer = optimizer,
            None => o.optim.push(text.into()),
        }
    }
    // What is as it is built in needs no text.
    let rules = Rules::parse(&without_groups(updates), "the model's text")?;
    let is_built_in = |r: &&Arc<UpdateRule>| built_in().all().any(|b| b.text() == r.text());
    let own: HashSet<&str> =
        rules.all().filter(|r| !is_built_in(r)).map(|r| r.name.as_str()).collect();
    for rule in rules.all().filter(|r| own.contains(r.name.as_str())) {
        o.optim_file += rule.text();
        o.optim_file.push('\n');
    }
    Ok(o)
}

/// What is wrong with rules of a model's text for its parameters, by the lines of the whole text.
///
/// # Errors
/// Those of [`groups`] that name a line.
pub fn in_place(source: &Source, o: &Options) -> Result<()> {
    let own = !source.updates.is_empty() && !o.optim_file.is_empty();
    let of_model = own && super::place(o) == super::place(&Options::default());
    let Some(f) = source.module.funcs.first().filter(|_| of_model) else { return Ok(()) };
    let o = Options { optim_file: without_groups(&source.updates), ..o.clone() };
    match groups(f, &source.weights, &frozen(&source.weights, &o)?, &o) {
        Err(d) if d.render().contains(", line ") => Err(d),
        _else => Ok(()),
    }
}

/// The same unless flags say how parameters are updated; betas and epsilon of AdamW are those of flags, if given.
///
/// # Errors
/// Those of [`of_text`].
pub fn given(updates: &str, o: &Options) -> Result<Options> {
    let says = |flag: &&str| o.given.iter().any(|g| g == flag);
    let plain = Options::default().optimizer;
    let is_adamw = |o: &Options| matches!(o.optimizer, Optimizer::AdamW { .. });
    let of_flags = !o.optim.is_empty() || !o.optim_file.is_empty() || !is_adamw(o);
    if of_flags || ["optimizer", "optim"].iter().any(says) {
        return Ok(o.clone());
    }
    let mut read = of_text(updates, o)?;
    if o.optimizer != plain && is_adamw(&read) {
        read.optimizer = o.optimizer;
    }
    Ok(read)
}

/// The optimizer of all, if a group is that and no more.
fn base(text: &str) -> Option<Optimizer> {
    let (rule, given) = text.strip_prefix("*=")?.split_once(',').unwrap_or((&text[2..], ""));
    match (rule, given) {
        ("sgd", "") => Some(Optimizer::Sgd),
        ("adamw", _) => {
            let mut of: BTreeMap<&str, f64> = BTreeMap::new();
            for word in given.split(',') {
                // What no optimizer has is read as a group, and refused as one.
                let (key, value) = word.split_once('=').filter(|(k, v)| allows("adamw", k, v))?;
                of.insert(key, value.parse().ok()?);
            }
            let mut take = |key| of.remove(key);
            let (beta1, beta2, eps) = (take("beta1")?, take("beta2")?, take("eps")?);
            of.is_empty().then_some(Optimizer::AdamW { beta1, beta2, eps })
        }
        _other => None,
    }
}
