//! Stored plans compiled again: as they were, with other options, for another mesh.

use crate::input::{Input, PROGRAMS, adapted, from_model, from_text};
use crate::plan_dir::{From, Stored};
use crate::{Output, compile_config, finish, flags, shape, with_mesh};
use shardc_frontends::Model;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::Module;
use shardc_ir::plan::Plan;
use shardc_ir::text;
use shardc_ir::verify::verify;
use shardc_passes::optim;
use shardc_passes::options::Options;
use shardc_passes::pipeline::{self, Begin, Compiled, Manager, Source, Watch};
use std::collections::BTreeSet;
use std::time::Instant;

/// The model that a plan's config.json gives, with the names that its checkpoint had, and its text; nothing if
/// the model was a text or an archive.
pub(crate) fn of_config(s: &Stored) -> Result<Option<(Input, String)>> {
    let made = model_for(s, &s.options)?.map(|m| adapted(from_model(m), &s.options));
    let Some(mut i) = made.transpose()? else { return Ok(None) };
    i.source.updates = optim::written(&i.source, &s.options)?;
    let text = text::print_source(&i.source);
    Ok(Some((i, text)))
}

/// The model that a plan's config.json gives for the batch of other options; nothing if it was a text or an archive.
fn model_for(s: &Stored, o: &Options) -> Result<Option<Model>> {
    if PROGRAMS.contains(&&*s.family) {
        return Ok(None);
    }
    let tensors: BTreeSet<&str> = s.plan.weights.iter().map(|w| w.tensor.as_str()).collect();
    let has = |name: &str| tensors.contains(name);
    let shape = shape(o);
    shardc_frontends::from_config_named(&s.config, "config.json", &shape, &has).map(Some)
}

/// A stored plan's model for the batch of other options, before any pass.
pub(crate) fn source_for(s: &Stored, o: &Options) -> Result<Source> {
    Ok(match model_for(s, o)? {
        Some(m) => adapted(from_model(m), o)?.source,
        None => from_text(&s.source)?.source,
    })
}

/// A stored plan's model compiled with other options, and not checked as a plan that is written: to compare with.
pub(crate) fn variant(s: &Stored, o: &Options) -> Result<Plan> {
    let source = source_for(s, o)?;
    let o = with_mesh(&source.module.mesh, o)?;
    let mut nobody = |_: &str, _: &Module| {};
    let manager = Manager { trial: true, ..Manager::new(&mut nobody) };
    Ok(pipeline::compile_with(source, &o, manager)?.plan)
}

/// Where a plan's compilation began, if not at its model.
fn begun(s: &Stored) -> Result<Option<Begin>> {
    let begin = |f: &From| {
        let pass = pipeline::find(&f.pass).ok_or_else(|| {
            Diag::new("plan", format!("no pass is called `{}`", f.pass)).at("plan.json: from")
        })?;
        let module = text::parse_source_on(&f.program, &s.plan.module.mesh)
            .map_err(|d| text::in_file(d, &f.program, "from.ir"))?
            .module;
        verify(&module, module.phase).map_err(|mut all| all.swap_remove(0))?;
        Ok(Begin { pass, module, made: Some(s.options.clone()) })
    };
    s.from.as_ref().map(begin).transpose()
}

/// The model that a plan was made of.
pub(crate) fn model_of(s: &Stored) -> Result<Source> {
    from_text(&s.source).map(|i| i.source)
}

/// A stored plan's model compiled again, and not checked as a plan that is written: its shardings, and why each
/// stands.
pub(crate) fn made_again(s: &Stored) -> Result<Compiled> {
    let mut nobody = |_: &str, _: &Module| {};
    let manager = Manager { trial: true, ..Manager::new(&mut nobody) };
    pipeline::compile_with(model_of(s)?, &s.options, manager)
}

/// Compiles a stored plan's source again with other options.
pub fn recompile(s: &Stored, o: &Options) -> Result<Output> {
    recompile_watched(s, o, &mut |_, _| {})
}

/// The same, showing what each pass leaves.
pub fn recompile_watched(s: &Stored, o: &Options, watch: Watch) -> Result<Output> {
    recompile_with(s, o, Manager::new(watch))
}

/// Compiles a stored plan as it was, with options that may differ behind where it began: from its model, or from the
/// program of `--from`.
pub fn as_made(s: &Stored, o: &Options) -> Result<Output> {
    let from = begun(s)?;
    from.as_ref().map_or(Ok(()), |begin| flags::begun(begin, o))?;
    recompile_with(s, o, Manager { from, ..Manager::new(&mut |_, _| {}) })
}

fn recompile_with(s: &Stored, o: &Options, manager: Manager) -> Result<Output> {
    let mut input = from_text(&s.source)?;
    (input.family, input.facts, input.config) = (s.family.clone(), s.facts, s.config.clone());
    input.origin.clone_from(&s.origin);
    input.name.clone_from(&s.name);
    finish(input, o, manager, Instant::now(), vec![])
}

/// Compiles a stored plan's model for another mesh: without the annotations of its own.
pub fn retarget(s: &Stored, o: &Options) -> Result<Output> {
    if s.facts.is_some() {
        return compile_config(&s.config, o);
    }
    let mut input = from_text(&s.source)?;
    input.source.module.mesh = Default::default();
    input.source.module.funcs[0].annotations.clear();
    finish(input, o, Manager::new(&mut |_, _| {}), Instant::now(), vec![])
}
