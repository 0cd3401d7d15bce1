//! Stored plans compiled again: as they were, with other options, for another mesh.

use crate::input::{Input, PROGRAMS, adapted, from_model, from_text, shape};
use crate::stored::Stored;
use shardc_frontends::Model;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::Plan;
use shardc_ir::text;
use shardc_passes::optim;
use shardc_passes::options::Options;
use shardc_passes::pipeline::{self, Compiled, Manager, Source, Watch};
use std::collections::BTreeSet;

/// The model that a plan's config.json gives, with the names that its checkpoint had, and its text; nothing if
/// the model was a text or an archive.
pub fn of_config(s: &Stored) -> Result<Option<(Input, String)>> {
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
pub fn source_for(s: &Stored, o: &Options) -> Result<Source> {
    Ok(match model_for(s, o)? {
        Some(m) => adapted(from_model(m), o)?.source,
        None => from_text(&s.source)?.source,
    })
}

/// A stored plan's model compiled with other options, and not checked as a plan that is written: to compare with.
pub fn variant(s: &Stored, o: &Options) -> Result<Plan> {
    let source = source_for(s, o)?;
    let o = with_mesh(&source.module.mesh, o)?;
    Ok(pipeline::trial(source, &o)?.plan)
}

/// The model that a plan was made of.
pub fn model_of(s: &Stored) -> Result<Source> {
    from_text(&s.source).map(|i| i.source)
}

/// A stored plan's model compiled again, and not checked as a plan that is written: its shardings, and why each
/// stands; showing what each pass leaves.
pub fn made_again(s: &Stored, watch: Watch) -> Result<Compiled> {
    let manager = Manager { trial: true, ..Manager::new(watch) };
    pipeline::compile_with(model_of(s)?, &s.options, manager)
}

/// A text may bring its mesh; flags that name another are refused.
pub fn with_mesh(text: &Mesh, o: &Options) -> Result<Options> {
    let mut o = o.clone();
    if o.mesh.is_empty() {
        o.mesh = text.axes.iter().map(|a| (a.name.clone(), a.size)).collect();
    }
    let axes: Vec<(&str, usize)> = o.mesh.iter().map(|(n, s)| (n.as_str(), *s)).collect();
    if text.axes.is_empty() || text.axes == Mesh::new(&axes)?.axes {
        return Ok(o);
    }
    let axes: Vec<String> = text.axes.iter().map(|a| format!("{}={}", a.name, a.size)).collect();
    Err(Diag::new("mesh", "the text has another mesh than --mesh")
        .help(format!("leave --mesh out, or give --mesh {}", axes.join(","))))
}
