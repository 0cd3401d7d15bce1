//! What `--freeze`, `--train` and `--shard` name: tensors of the checkpoint, and for `--shard` inputs too.

use crate::options::Options;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Role, RoleKind, Value};
use shardc_ir::names::{self, glob};
use shardc_ir::plan::Mode;
use shardc_ir::weights::Weight;
use std::collections::BTreeSet;

/// Names of the parameters that are not trained: those that `--freeze` names, and beside adapters all that
/// `--train` does not. Every glob must match something, and something must be left to train.
///
/// # Errors
/// `unknown-tensor`, `part-of-stack`, `no-loss`.
pub fn frozen(weights: &[Weight], o: &Options) -> Result<BTreeSet<String>> {
    let mut out = named(weights, "freeze", &o.freeze)?;
    if let Some(l) = &o.lora {
        let mut trained = named(weights, "train", &o.train)?;
        trained.extend(whole(weights, &l.whole)?);
        let base = weights.iter().filter(|w| !w.is_adapter() && !trained.contains(&w.param));
        out.extend(base.map(|w| w.param.clone()));
    }
    if o.mode == Mode::Train && !weights.is_empty() && out.len() == weights.len() {
        return Err(Diag::new("no-loss", "every parameter is frozen: there is nothing to train")
            .at("--freeze")
            .help("freeze fewer, or compile with --mode infer"));
    }
    Ok(out)
}

/// Names of the parameters in modules that an adapter trains whole, each of which the model must have.
fn whole(weights: &[Weight], modules: &[String]) -> Result<BTreeSet<String>> {
    let mut out = BTreeSet::new();
    for end in modules {
        let found = names::in_module(weights, end);
        if found.is_empty() {
            let what =
                format!("the adapter trains the module `{end}` whole, which has no tensor here");
            return Err(Diag::new("unknown-tensor", what)
                .at("--lora-from")
                .rule("`modules_to_save` names modules by the ends of their paths; one that is tied to another has no tensor")
                .help(names::suggestion(weights, end)));
        }
        out.extend(found.into_iter().map(|i| weights[i].param.clone()));
    }
    Ok(out)
}

/// Names of the parameters that the globs of a flag name, each of which must match something.
fn named(weights: &[Weight], flag: &str, globs: &[String]) -> Result<BTreeSet<String>> {
    let mut out = BTreeSet::new();
    for g in globs {
        let place = || format!("--{flag} '{g}'");
        let found = names::parameters(weights, g).map_err(|d| d.at(place()))?;
        if found.is_empty() {
            return Err(Diag::new("unknown-tensor", format!("`{g}` matches no tensor"))
                .at(place())
                .help(names::suggestion(weights, g)));
        }
        out.extend(found.into_iter().map(|i| weights[i].param.clone()));
    }
    Ok(out)
}

/// The parameters that a glob names by the checkpoint's tensors, and the inputs that it names.
///
/// # Errors
/// `part-of-stack`.
pub(crate) fn arguments(f: &Func, weights: &[Weight], pattern: &str) -> Result<Vec<Value>> {
    let found = names::parameters(weights, pattern)?;
    let found: BTreeSet<&str> = found.into_iter().map(|i| &*weights[i].param).collect();
    let is_named = |r: &Role| match r.kind {
        RoleKind::Param => found.contains(&*r.name),
        _other => glob(pattern, &r.name),
    };
    let args = f.args.iter().filter(|a| a.role.as_ref().is_some_and(is_named));
    Ok(args.map(|a| a.value).collect())
}
