//! `shardc compile`: model in, plan out.

use super::passes::{Dumped, Watched};
use super::{gather, show, warn};
use serde_json::json;
use shardc_compiler::device;
use shardc_compiler::search::advice::advise;
use shardc_ir::diag::{Diag, Result, bytes, count};
use shardc_ir::plan::MemoryClass;
use shardc_passes::options::Options;
use shardc_passes::pipeline::Manager;
use shardc_plans::flags::Flags;
use shardc_plans::rules;
use shardc_plans::stored::Stored;
use shardc_process::shell::word;
use shardc_process::terminal::{self, Shown, Volume, detail, doing, json_line, note, talks};
use shardc_report::inspect::mesh_line;
use shardc_report::proof::{Outcome, Prove};
use shardc_report::report::{
    Chosen, Report, bubble_line, groups, padding_lines, step_words, wrapped,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// Compiles and prints the report.
pub fn compile(
    model: &Path,
    flags: Flags,
    out: Option<&Path>,
    (passes, prove): (&Watched, Option<Prove>),
    json: bool,
) -> Result<i32> {
    let (model, flags) = gather(model, flags)?;
    let (o, archs) = (flags.options_for(&model)?, flags.archs()?);
    if out.is_none() && !archs.is_empty() {
        return Err(Diag::new("flag", "compiled kernels are part of a plan's folder")
            .at("--device cuda")
            .help("add -o DIR"));
    }
    doing("compiling");
    let (mut done, mut ran) = passes.compile(&flags.own_mesh()?, |manager: Manager| {
        shardc_compiler::compile_with(&model, &o, manager)
            .map_err(|d| advise(d, &model, &o, &flags))
    })?;
    passes.keep(&ran, &done.stored.options)?;
    doing("proving");
    if prove.is_some() || out.is_some() {
        done.prove(passes.proof(prove)).map_err(|d| passes.said(d))?;
    }
    doing("writing");
    let since = Instant::now();
    // What fails here leaves an earlier plan as it is.
    let kernels = (!archs.is_empty()).then(|| device::compile(&done.stored.plan, &archs));
    let kernels = kernels.transpose()?.map(|code| (code, since.elapsed()));
    out.map_or(Ok(()), |dir| done.write(dir))?;
    if let (Some(dir), Some((code, took))) = (out, kernels) {
        device::write(&code, dir)?;
        done.report.kernel_ms = Some(took.as_secs_f64() * 1e3);
    }
    ran.dumped.iter_mut().for_each(Dumped::keep);
    warn(&done.warnings);
    warn(&flags.without_effect(&o, &done.propagated.sharded.funcs[0], done.stored.facts.as_ref()));
    done.notes.iter().chain(&flags.unasked(&o)).chain(&in_pieces(&done.stored)).for_each(note);
    if json {
        let mut report = serde_json::to_value(&done.report).expect("a report is plain data");
        report["options"] = json!(Chosen::of(&done.stored.options));
        if let Some(text) = ran.dump {
            report["program"] = text.into();
        }
        show(json_line("compile", report));
    } else if let Some(text) = ran.dump {
        show(Shown::file(&text));
    } else {
        // Of a plan that is written the folder is the result.
        if out.is_none() || talks().volume > Volume::Quiet {
            show(human(&done.stored, &done.report));
        }
        note(format!("compiled in {:.1} ms", done.report.compile_ms));
        done.report.phases.iter().for_each(|p| detail(format!("{:>10.1} ms {}", p.ms, p.name)));
        if let (Some(proof), Some(ms)) = (&done.report.proof, done.report.prove_ms) {
            note(match proof {
                Outcome::NotTried { .. } => proof.to_string(),
                _tried => format!("{proof}, in {ms:.1} ms"),
            });
        }
        if let Some(ms) = done.report.kernel_ms {
            let archs: Vec<&str> = archs.iter().map(String::as_str).collect();
            note(format!("compiled kernels for {} in {ms:.0} ms", archs.join(", ")));
        }
    }
    if let Some(dir) = out.filter(|_| !json) {
        let (dir, word) = (dir.display(), word(dir));
        note(format!("wrote {dir}   next: shardc inspect {word} --summary · shardc run {word}"));
    }
    // The process ends now: to give back a large plan node by node would take longer than to write it.
    std::mem::forget(done);
    Ok(0)
}

/// Activations from which on a smaller microbatch is worth a word, in bytes.
const MANY: usize = 1 << 30;

/// That a smaller microbatch needs less, where activations are most of the memory.
fn in_pieces(s: &Stored) -> Option<String> {
    let memory = s.plan.classes.iter().map(|c| &c.memory).max_by_key(|m| m.peak_bytes)?;
    let of = memory.at_peak.iter().find(|k| k.0 == MemoryClass::Activation)?.1;
    let few = of < MANY || of <= 2 * (memory.peak_bytes - of);
    let facts = s.facts.as_ref().filter(|_| !few && s.options.microbatch > 1)?;
    let one = Options { microbatch: 1, ..s.options.clone() };
    rules::violations(facts, &one).is_empty().then(|| {
        format!(
            "activations are {} of {}: with --microbatch 1 a rank has those of 1 sequence at a time, here {}",
            bytes(of),
            bytes(memory.peak_bytes),
            s.options.microbatch
        )
    })
}

fn human(stored: &Stored, r: &Report) -> String {
    let (plan, family) = (&stored.plan, stored.called());
    let largest = r.per_class.iter().max_by_key(|c| (c.peak_bytes, std::cmp::Reverse(c.class)));
    let Some(c) = largest else { return String::new() };
    let mut t = terminal::table();
    let rows = [
        ("weights", c.weights_bytes),
        ("gradients", c.grads_bytes),
        ("optimizer", c.optimizer_bytes),
        ("activations", c.activation_bytes),
        ("collective buffers", c.collective_buffer_bytes),
        ("inputs", c.input_bytes),
        ("temporaries", c.temporary_bytes),
        ("peak", c.peak_bytes),
    ];
    for (name, n) in rows {
        t.add_row([format!("  {name}"), bytes(n), format!("{n} B")]);
    }
    terminal::numbers(&mut t, [1, 2]);
    let parameters: usize = plan.weights.iter().map(|w| w.shape.iter().product::<usize>()).sum();
    let mut total: BTreeMap<(usize, &str, &str), (usize, f64)> = BTreeMap::new();
    let phases = ["forward", "backward", "step"];
    for x in &c.collectives {
        let phase = phases.iter().position(|p| *p == x.phase).unwrap_or(phases.len());
        let e = total.entry((phase, x.kind, &x.axis)).or_default();
        e.0 += x.count;
        e.1 += x.bytes;
    }
    let mut comm = terminal::table();
    if total.is_empty() {
        comm.add_row(["  nothing"]);
    }
    for ((phase, kind, axis), (calls, sent)) in total {
        comm.add_row([
            format!("  {}", phases[phase]),
            kind.into(),
            axis.into(),
            count(calls, "call", "calls"),
            // Whoever sends counts them.
            if kind == "recv" { "-".into() } else { bytes(sent as usize) },
        ]);
    }
    let of = match r.per_class.len() {
        1 => String::new(),
        n => {
            format!(" of class {}, which needs most of {n} (inspect --summary shows all)", c.class)
        }
    };
    let bubble = bubble_line(plan).map_or(String::new(), |l| wrapped("       ", &l));
    let text = format!(
        "model  {family}, {parameters} parameters\nmesh   {}\nstep   {}\n{bubble}{}{}{}memory of one rank{of} at the peak\n{t}\nsent by one rank{} per step\n{comm}\n",
        mesh_line(plan),
        step_words(plan),
        Chosen::of(&stored.options).line(),
        groups::table(stored).unwrap_or_default(),
        padding_lines(plan),
        if of.is_empty() { "" } else { " of this class" },
    );
    let kept = r.zero_accumulate.iter().map(|k| format!("{k}\n"));
    let text: String = std::iter::once(text).chain(kept).collect();
    // Tables fill their last column with blanks.
    text.lines().map(|l| l.trim_end().to_string() + "\n").collect()
}
