//! `shardc inspect`: the programs of a plan, a summary of what they cost, the ranks.

use serde_json::json;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::func::Module;
use shardc_ir::phase::Phase;
use shardc_ir::text;
use shardc_plans::again::made_again;
use shardc_plans::stored::Stored;
use shardc_process::terminal::{Shown, json_line};
use shardc_report::inspect::{
    collectives, instructions, kernels, local, other_programs, ranks, summary, timeline,
};

/// What to show of a plan; without flags, its programs.
#[derive(clap::Args, Clone, Debug, Default)]
#[group(skip)] // the subcommand has this name already
pub struct Inspect {
    /// Show the program after a pass: source, annotate, propagate, partition, ...; or, with kernels, the kernels of
    /// a rank and their text [default: the stored programs, of phase step]
    #[arg(long)]
    pub phase: Option<String>,
    /// Show the programs of this rank class
    #[arg(long, value_name = "C")]
    pub class: Option<usize>,
    /// Show the programs with this rank's coordinates in the mesh and its slice of every weight
    #[arg(long, value_name = "R", conflicts_with = "class")]
    pub rank: Option<usize>,
    /// Add the local size (of a rank's shard) to every line
    #[arg(long)]
    pub local: bool,
    /// Show memory, and collectives per layer and microbatch (of the class, if given)
    #[arg(long, conflicts_with_all = ["phase", "local", "rank"])]
    pub summary: bool,
    /// Show ranks with their coordinates and groups: the first 64, or those asked for
    #[arg(long, value_name = "all|FROM-TO", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "", conflicts_with_all = ["phase", "local", "rank", "summary"])]
    pub ranks: Option<String>,
    /// List every collective of a step: its group, nodes, bytes, and what overlaps with it (of the class or rank,
    /// if given)
    #[arg(long, conflicts_with_all = ["phase", "local", "summary", "ranks"])]
    pub collectives: bool,
    /// Ranks per node [default: those the plan was compiled with]
    #[arg(long, value_name = "N", requires = "collectives")]
    pub node: Option<usize>,
    /// List what the rank does in a step: receives, calls, sends, exchanges, the optimizer
    #[arg(long, requires = "rank", conflicts_with_all = ["phase", "local", "collectives"])]
    pub instructions: bool,
    /// Draw the schedule with its bubbles (of one pipeline rank with --class); F, I and W take one unit of time
    #[arg(long, conflicts_with_all = ["phase", "local", "rank", "summary", "ranks", "collectives"])]
    pub timeline: bool,
    /// Draw the schedule with the times of a run, from a file of run --trace; the first of several steps is left
    /// out (--timeline is then not needed)
    #[arg(long, value_name = "TRACE", conflicts_with_all = ["phase", "local", "rank", "summary", "ranks", "collectives"])]
    pub times: Option<std::path::PathBuf>,
    /// Write the timeline, and the memory of every rank over time, as an SVG picture (--timeline is then not needed)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["phase", "local", "rank", "summary", "ranks", "collectives"])]
    pub svg: Option<std::path::PathBuf>,
}

/// The text to print.
///
/// # Errors
/// `unknown-pass`, `unknown-class` or `unknown-rank`, each listing what there is.
pub fn inspect(s: &Stored, what: &Inspect, json: bool) -> Result<Shown> {
    let classes = s.plan.classes.len();
    if let Some(c) = what.class.filter(|&c| c >= classes) {
        let n = count(classes, "rank class", "rank classes");
        let known = match classes {
            1 => "use --class 0: all ranks run the same programs".to_string(),
            n => format!("use --class 0 to --class {}", n - 1),
        };
        return Err(Diag::new("unknown-class", format!("no rank class {c}: the plan has {n}"))
            .at(format!("--class {c}"))
            .help(known));
    }
    if what.timeline || what.times.is_some() || what.svg.is_some() {
        let (times, svg) = (what.times.as_deref(), what.svg.as_deref());
        return timeline::timeline(
            s,
            timeline::TimelineOptions { times, svg, class: what.class, json },
        );
    }
    let listed = what.summary || what.ranks.is_some() || what.collectives || what.instructions;
    let text = uncoloured(s, what, json)?;
    Ok(if listed { text.into() } else { Shown::file(&text) })
}

/// What has no colours: all but the timeline.
fn uncoloured(s: &Stored, what: &Inspect, json: bool) -> Result<String> {
    if what.summary {
        return Ok(summary::summary(s, what.class, json));
    }
    if let Some(asked) = &what.ranks {
        let experts = s.facts.and_then(|f| f.experts).map(|_| &s.options);
        let mesh = &s.plan.module.mesh;
        return Ok(ranks::table(mesh, experts, ranks::asked(asked, mesh.ranks())?, json));
    }
    if let Some(rank) = what.rank.filter(|_| what.collectives || what.instructions) {
        ranks::Rank::of(&s.plan, rank)?;
        if what.instructions {
            return Ok(instructions::instructions(s, rank, json));
        }
    }
    if what.collectives {
        if what.node == Some(0) {
            return Err(Diag::new("flag", "a node has no ranks")
                .at("--node 0")
                .help("for example --node 8"));
        }
        let class = what.class.or(what.rank.map(|r| s.plan.class_of(r)));
        return Ok(collectives::collectives(s, class, what.node, json));
    }
    if what.phase.as_deref() == Some("kernels") {
        let of_class = what
            .class
            .and_then(|c| (0..s.plan.module.mesh.ranks()).find(|&r| s.plan.class_of(r) == c));
        let rank = what.rank.or(of_class).unwrap_or(0);
        ranks::Rank::of(&s.plan, rank)?;
        return kernels::kernels(s, rank, json);
    }
    // Of the source all is shown that a frontend knows, so that it can be compiled.
    let mut source = match what.phase.as_deref() {
        Some("source") => Some(text::parse_source(&s.source)?),
        _ => None,
    };
    let mut of_pass = match source {
        Some(_) => Module::default(),
        None => module(s, what.phase.as_deref())?,
    };
    let m = source.as_mut().map_or(&mut of_pass, |s| &mut s.module);
    let rank_class = what.rank.filter(|&r| r < m.mesh.ranks()).map(|r| s.plan.class_of(r));
    if let Some(c) = what.class.or(rank_class).filter(|_| what.phase.is_none()) {
        let own = &s.plan.classes[c].funcs;
        let all = std::mem::take(&mut m.funcs).into_iter().enumerate();
        m.funcs = all.filter(|(i, _)| own.contains(i)).map(|(_, f)| f).collect();
    }
    if what.local {
        local::annotate(m);
    }
    let mesh = m.mesh.clone();
    let mut program = match &source {
        Some(s) => text::print_source(s),
        None => text::print_between(&of_pass),
    };
    if what.local {
        program = local::arguments(&mesh, &program);
    }
    let rank = what.rank.map(|r| ranks::Rank::of(&s.plan, r)).transpose()?;
    if json {
        let phase = what.phase.as_deref().unwrap_or(Phase::Step.name());
        let out = json!({ "phase": phase, "rank": rank, "text": program });
        return Ok(json_line("inspect", out));
    }
    Ok(rank.map_or(String::new(), |r| r.header()) + &program)
}

/// The module as a pass leaves it: stored, or made again from the source.
fn module(s: &Stored, phase: Option<&str>) -> Result<Module> {
    let Some(phase) = phase else { return Ok(s.plan.module.clone()) };
    let (mut known, mut found) = (vec!["source".to_string()], None);
    let again = made_again(s, &mut |pass, m| {
        known.push(pass.into());
        if pass == phase {
            found = Some(m.clone());
        }
    })?;
    other_programs(s, &again.plan.module);
    known.push("kernels".into());
    found.ok_or_else(|| {
        Diag::new("unknown-pass", format!("no phase is called `{phase}`"))
            .at(format!("--phase {phase}"))
            .help(format!("use one of the {}: {}", known.len(), known.join(", ")))
    })
}
