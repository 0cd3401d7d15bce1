//! Stored plans compiled again: as they were, with other options, for another mesh.

use crate::{Output, compile_config, finish};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::text;
use shardc_ir::verify::verify;
use shardc_passes::options::Options;
use shardc_passes::pipeline::{self, Begin, Manager};
use shardc_plans::flags;
use shardc_plans::input::from_text;
use shardc_plans::stored::{From, Stored};
use std::time::Instant;

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

/// Compiles a stored plan's source again with other options.
pub fn recompile(s: &Stored, o: &Options) -> Result<Output> {
    recompile_with(s, o, Manager::default())
}

/// Compiles a stored plan as it was, with options that may differ behind where it began: from its model, or from the
/// program of `--from`.
pub fn as_made(s: &Stored, o: &Options) -> Result<Output> {
    let from = begun(s)?;
    from.as_ref().map_or(Ok(()), |begin| flags::begun(begin, o))?;
    recompile_with(s, o, Manager { from, ..Manager::default() })
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
    finish(input, o, Manager::default(), Instant::now(), vec![])
}
