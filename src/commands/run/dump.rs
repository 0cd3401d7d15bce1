//! `--dump`: what a step shows, under the names of the checkpoint.

use shardc_compiler::as_made;
use shardc_frontends::{NamedTensor, whole_tensors, write_tensors};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Role, RoleKind};
use shardc_ir::plan::Mode;
use shardc_plans::stored::Stored;
use shardc_process::terminal::note;
use shardc_runtime::{Session, StepResult};
use std::path::Path;

/// The plan made again with logits and gradients as outputs.
pub fn observed(stored: &Stored, tell: bool) -> Result<Stored> {
    let mut o = stored.options.clone();
    // The limit is that of the plan that trains.
    (o.observe, o.memory) = (true, None);
    let again = as_made(stored, &o).map_err(|d| match &stored.from {
        Some(from) if d.code == "flag" => {
            let what = format!(
                "logits and gradients of this plan cannot be shown: it was made with --from {}",
                from.pass
            );
            Diag::new("flag", what)
                .rule("partition makes them outputs of a step")
                .help("compile with --from partition or an earlier pass")
        }
        _other => d,
    })?;
    let (old, new) = (stored.plan.peak_bytes(), again.stored.plan.peak_bytes());
    let peak = if new == old {
        format!("peak {new} B as before")
    } else {
        format!("peak {new} B instead of {old} B")
    };
    if tell {
        note(format!("recompiled to observe logits and gradients: {peak}"));
    }
    Ok(again.stored)
}

/// The current value of a parameter, whole.
pub fn parameter(session: &mut Session, param: &str) -> Result<Vec<f32>> {
    session.tensor(&Role::new(RoleKind::Param, param)).map(|a| a.data)
}

/// Writes what was observed, under the checkpoint's names and layouts.
pub fn dump(file: &Path, stored: &Stored, first: &StepResult, session: &mut Session) -> Result<()> {
    let mut out: Vec<NamedTensor> = vec![];
    // A model's own output of that name gives way.
    let output = |r: &Role| r.kind == RoleKind::Output && &*r.name != "loss";
    let shown = |r: &Role| output(r) || r.is(RoleKind::Metric, "loss");
    for (role, a) in first.outputs.iter().filter(|x| shown(x.0)) {
        out.push((role.name.to_string(), a.shape.clone(), a.data.clone()));
    }
    let weights = &stored.plan.weights;
    if stored.plan.settings.mode == Mode::Train {
        let grads = whole_tensors(weights, |w| {
            Ok(first.output(RoleKind::GradShown, &w.param).map(|a| a.data.clone()))
        })?;
        out.extend(grads.into_iter().map(|(n, s, d)| (format!("grad.{n}"), s, d)));
        let params = whole_tensors(weights, |w| parameter(session, &w.param).map(Some))?;
        out.extend(params.into_iter().map(|(n, s, d)| (format!("param.{n}"), s, d)));
    }
    write_tensors(file, out)
}
