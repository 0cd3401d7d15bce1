//! The driver of shardc: one [`compile`] function, the plan directory, and the command line.

pub mod checkpoint;
pub mod cluster;
pub mod commands;
pub mod data;
pub mod device;
pub mod flags;
pub mod pictures;
pub mod plan_dir;
pub mod report;
pub mod rules;
pub mod search;

use plan_dir::Stored;
use report::Report;
use shardc_frontends::{Balance, Bound, Facts, Model, Shape, Tokens};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Module, Node, RoleKind, Value};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::Op;
use shardc_ir::text;
use shardc_ir::verify::{Phase, verify};
use shardc_passes::options::{Buffers, Options};
use shardc_passes::pipeline::{self, Source, Watch};
use shardc_passes::shard::experts::{Part, fold, ranks_of};
use shardc_passes::shard::propagate::Cause;
use shardc_passes::step::correct::is_load;
use std::path::Path;
use std::time::Instant;

/// Version of the plan directory and of the JSON reports.
pub const SCHEMA: u32 = 5;

/// A model before compilation: from a Hugging Face folder, or from text.
pub struct Input {
    pub source: Source,
    pub family: String,
    pub facts: Option<Facts>,
    pub config: serde_json::Value,
    pub warnings: Vec<Diag>,
}

/// Reads a Hugging Face folder, its config.json, or a `.ir` file.
pub fn read_model(path: &Path, o: &Options) -> Result<Input> {
    if is_text(path) {
        let bad = |m: String| {
            Diag::new("file", m)
                .at(path.display().to_string())
                .help("give a readable text file of at most 64 MiB")
        };
        let size = std::fs::metadata(path).map_err(|e| bad(e.to_string()))?.len();
        if size > 64 << 20 {
            return Err(bad(format!("{size} bytes is too large for a model's text")));
        }
        let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
        let mut input = from_text(&text)
            .map_err(|d| if d.place.is_some() { d } else { d.at(path.display().to_string()) })?;
        if o.balance.aux.is_some() || o.balance.z != 0.0 {
            let what = "--moe-aux and --moe-z-loss change nothing: a text has the losses it has";
            input.warnings.push(Diag::new("no-effect", what).help("leave them out"));
        }
        let sums = input.source.module.funcs[0].results.iter().filter_map(|r| r.role.as_ref());
        if o.balance.rate != 0.0 && !sums.into_iter().any(is_load) {
            let what = "--moe-bias-rate changes nothing: the text counts no choices of experts";
            input.warnings.push(Diag::new("no-effect", what).help("leave it out"));
        }
        return Ok(input);
    }
    let mut input = from_model(shardc_frontends::load(path, &shape(o)?)?);
    if o.moe != Buffers::Worst && input.facts.is_some_and(|f| f.experts.is_none()) {
        let what = "--moe-bound and --moe-capacity change nothing: the model has no experts";
        input.warnings.push(Diag::new("no-effect", what).help("leave them out"));
    }
    Ok(input)
}

/// The sizes that options give to a model.
///
/// # Errors
/// `experts-mesh` if the mesh cannot be factorised as the options ask.
pub fn shape(o: &Options) -> Result<Shape> {
    let pieces = fold(o)?;
    let cutting: Vec<_> = pieces.iter().filter(|p| p.cuts_tokens).collect();
    let factors = |rows: bool| -> Vec<usize> {
        cutting.iter().filter(|p| p.of_rows() == rows).map(|p| p.size).collect()
    };
    let mut order: Vec<usize> = (0..cutting.len()).collect();
    order.sort_by_key(|&i| cutting[i].part);
    let bound = match o.moe {
        Buffers::Worst => Bound::Worst,
        Buffers::Bound(by) => Bound::Balanced(by),
        Buffers::Capacity(by) => Bound::Capacity(by),
    };
    let tokens = Tokens { rows: factors(true), seq: factors(false), order, groups: o.ep, bound };
    let b = o.balance;
    let balance = Balance { aux: b.aux, z: b.z, load: b.rate != 0.0 };
    Ok(Shape { batch: o.microbatch_rows(), seq: o.seq, mode: o.mode, tokens, balance })
}

/// The facts of a model that is no text.
pub fn facts(path: &Path) -> Result<Option<Facts>> {
    if is_text(path) { Ok(None) } else { shardc_frontends::facts(path).map(Some) }
}

fn is_text(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "ir")
}

fn from_model(m: Model) -> Input {
    let source =
        Source { module: m.module, weights: m.weights, sequence: m.sequence, vocab: m.facts.vocab };
    Input {
        source,
        family: m.family.into(),
        facts: Some(m.facts),
        config: m.config,
        warnings: m.warnings,
    }
}

/// Reads a module of one function; parameters are its arguments with role `param`.
fn from_text(text: &str) -> Result<Input> {
    let module = text::parse(text)?;
    verify(&module, Phase::Source).map_err(|mut all| all.swap_remove(0))?;
    let [f] = &module.funcs[..] else {
        return Err(Diag::new(
            "source",
            format!("a model is one function, the text has {}", module.funcs.len()),
        )
        .help("put everything into one `func @model`"));
    };
    let params = f
        .args
        .iter()
        .filter_map(|a| Some((a, a.role.as_ref().filter(|r| r.kind == RoleKind::Param)?)));
    let weights = params.map(|(a, r)| {
        let shape = f.ty(a.value).sizes().to_vec();
        shardc_ir::weights::Weight {
            param: r.name.to_string(),
            tensor: r.name.to_string(),
            tensor_shape: shape.clone(),
            part: None,
            matrix: shape.len() > 1,
            shape,
            init: shardc_ir::weights::Init::Normal(0.02),
            tp_dim: None,
            experts: None,
        }
    });
    let weights = weights.collect();
    let vocab = vocabulary(f);
    let source = Source { module, weights, sequence: vec![], vocab };
    Ok(Input {
        source,
        family: "ir".into(),
        facts: None,
        config: serde_json::json!({}),
        warnings: vec![],
    })
}

/// Size of the smallest dim that `input_ids` or `targets` index.
fn vocabulary(f: &Func) -> usize {
    let is_tokens = |v: Value| {
        let role = f.args.iter().find(|a| a.value == v).and_then(|a| a.role.as_ref());
        role.is_some_and(|r| r.kind == RoleKind::Input && &*r.name != "positions")
    };
    let indexed = |n: &Node| match &n.op {
        Op::Take(t) if is_tokens(n.ins[1]) => {
            let rule = &t.rule.0;
            let dim = rule.ins[0]
                .iter()
                .position(|g| !rule.ins[1].contains(g) && !rule.outs[0].contains(g))?;
            Some(f.ty(n.ins[0]).dims[dim].size)
        }
        _ => None,
    };
    f.nodes.iter().filter_map(indexed).min().unwrap_or(i32::MAX as usize)
}

/// A text may bring its mesh; flags that name another are refused.
fn with_mesh(text: &Mesh, o: &Options) -> Result<Options> {
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

/// A compiled model with what is needed to write, explain and repeat it.
pub struct Output {
    pub stored: Stored,
    pub report: Report,
    /// The model with propagated shardings, and why each stands.
    pub sharded: Module,
    pub causes: Vec<Cause>,
    pub warnings: Vec<Diag>,
    /// What was chosen where the options ask for a search.
    pub notes: Vec<String>,
}

/// Compiles a model; if `out` is given, writes the plan there, and the report's time includes that.
pub fn compile(model: &Path, o: &Options, out: Option<&Path>, watch: Watch) -> Result<Output> {
    let since = Instant::now();
    // A program is made for a mesh: the rules come first.
    let facts = facts(model)?;
    if let Some(v) = facts.and_then(|f| rules::violations(&f, o).into_iter().next()) {
        return Err(v.diag());
    }
    let input = read_model(model, o)?;
    let o = &with_mesh(&input.source.module.mesh, o)?;
    let read_ms = since.elapsed().as_secs_f64() * 1e3;
    let mut before = vec![("read", read_ms)];
    let (o, notes) = search::resolve(&input, o)?;
    if !notes.is_empty() {
        before.push(("search", since.elapsed().as_secs_f64() * 1e3 - read_ms));
    }
    Ok(Output { notes, ..finish(input, &o, out, watch, since, before)? })
}

/// Compiles a stored plan's source again with other options.
pub fn recompile(s: &Stored, o: &Options) -> Result<Output> {
    recompile_watched(s, o, &mut |_, _| {})
}

/// The same, showing what each pass leaves.
pub fn recompile_watched(s: &Stored, o: &Options, watch: Watch) -> Result<Output> {
    let mut input = from_text(&s.source)?;
    input.source.weights.clone_from(&s.plan.weights);
    input.source.vocab = s.plan.settings.vocab;
    (input.family, input.facts, input.config) = (s.family.clone(), s.facts, s.config.clone());
    finish(input, o, None, watch, Instant::now(), vec![])
}

/// Compiles a stored plan's model for another mesh: its source without the annotations of its own.
pub fn retarget(s: &Stored, o: &Options) -> Result<Output> {
    if s.facts.is_some() {
        return compile_config(&s.config, o);
    }
    let mut input = from_text(&s.source)?;
    input.source.module.mesh = Default::default();
    input.source.module.funcs[0].annotations.clear();
    input.source.weights.clone_from(&s.plan.weights);
    input.source.vocab = s.plan.settings.vocab;
    finish(input, o, None, &mut |_, _| {}, Instant::now(), vec![])
}

/// Compiles a model from a config alone.
pub fn compile_config(config: &serde_json::Value, o: &Options) -> Result<Output> {
    let input = from_model(shardc_frontends::from_config(config, "config.json", &shape(o)?)?);
    finish(input, o, None, &mut |_, _| {}, Instant::now(), vec![])
}

/// A warning for each kind of group that exchanges data in every layer and lies on several nodes.
fn across_nodes(s: &Stored) -> Vec<Diag> {
    let mesh = &s.plan.module.mesh;
    let Some(node) = s.options.node else { return vec![] };
    let mut kinds: Vec<(&str, AtomSet)> =
        ["tp", "cp"].into_iter().filter_map(|a| Some((a, mesh.axis(a)?))).collect();
    if s.facts.is_some_and(|f| f.experts.is_some()) && s.options.ep > 1 {
        kinds.push(("ep", ranks_of(mesh, &s.options, Part::Expert)));
    }
    let leaves_a_node = |atoms: AtomSet| {
        (0..mesh.ranks()).any(|rank| {
            let coords = mesh.coords(rank);
            // Every rank against the first of its group.
            let mut first = coords.clone();
            atoms.iter().for_each(|a| first[a.0 as usize] = 0);
            mesh.rank(&first) / node != rank / node
        })
    };
    let mut out = vec![];
    for (name, atoms) in kinds.into_iter().filter(|k| leaves_a_node(k.1)) {
        let names = mesh.names(atoms, "+");
        let axes: Vec<&str> = names.split('+').collect();
        let sent = s.plan.classes.iter().map(|c| {
            let all = report::collectives(&s.plan, c);
            // Over all of them, or over a part of an axis.
            let part = |a: &str| axes.contains(&a) || a.starts_with(&format!("{name}:"));
            let over = |c: &&report::CollectiveReport| c.axis.split('+').any(part);
            all.iter().filter(over).map(|c| c.bytes).sum::<f64>()
        });
        let most = sent.fold(0.0, f64::max) as usize;
        let what = format!("groups over {name} reach over more than one node of {node} ranks");
        let help = match name {
            "ep" => "use a smaller ep, or etp=1 so that ep takes the nearest ranks".into(),
            _ => {
                let ways = mesh.ways(atoms);
                let fits = (1..=ways.min(node)).rev().find(|n| ways % n == 0).unwrap_or(1);
                format!("use {name}={fits} or less, or --order {name}-…")
            }
        };
        out.push(
            Diag::new("cross-node", what)
                .rule(format!("ranks of a group of {name} lie on one node"))
                .why(format!("a rank sends {} over {name} per step", report::bytes(most)))
                .help(help),
        );
    }
    out
}

/// A warning if the buffers of experts are much larger than an even load needs.
fn roomy_buffers(s: &Stored) -> Option<Diag> {
    let f = s.facts.and_then(|f| f.experts).filter(|_| s.options.moe == Buffers::Worst)?;
    let groups = s.options.ep.max(1);
    // A token has as many copies as experts it uses; in the worst case one group gets all it can.
    let worst = f.top_k.min(f.experts / groups) as f64 * groups as f64 / f.top_k as f64;
    let mesh = &s.plan.module.mesh;
    let buffers = s.plan.module.funcs.iter().flat_map(|f| {
        let all = f.nodes.iter().filter(|n| matches!(n.op, Op::Dispatch(_)));
        all.map(|n| f.ty(n.outs[0]).local_bytes(mesh))
    });
    let largest = buffers.max().filter(|_| worst >= 2.0)?;
    let what = format!("buffers of experts hold {worst:.1} times an even load");
    Some(
        Diag::new("moe-buffers", what)
            .rule("without --moe-bound a buffer holds what may ever be needed")
            .why(format!("a buffer of one layer has {} on a rank", report::bytes(largest)))
            .help("use --moe-bound 2, or --moe-capacity 2 to drop what does not fit"),
    )
}

fn finish(
    input: Input,
    o: &Options,
    out: Option<&Path>,
    watch: Watch,
    since: Instant,
    mut phases: Vec<(&'static str, f64)>,
) -> Result<Output> {
    let Input { source, family, facts, config, mut warnings } = input;
    let mut annotated = String::new();
    let mut keep = |pass: &str, m: &Module| {
        if pass == "annotate" {
            annotated = text::print(m);
        }
        watch(pass, m);
    };
    let mut compiled = pipeline::compile(source, o, &mut keep)?;
    warnings.append(&mut compiled.warnings);
    let mut stored = Stored {
        plan: compiled.plan,
        options: o.clone(),
        source: annotated,
        family,
        facts,
        config,
        report: serde_json::Value::Null,
    };
    phases.append(&mut compiled.phases);
    let mut report = report::report(&stored.plan, &phases, 0.0);
    if let Some(dir) = out {
        let writing = Instant::now();
        plan_dir::write(dir, &stored, &report)?;
        phases.push(("write", writing.elapsed().as_secs_f64() * 1e3));
    }
    report.phases =
        phases.iter().map(|(n, ms)| report::PhaseTime { name: n.to_string(), ms: *ms }).collect();
    report.compile_ms = since.elapsed().as_secs_f64() * 1e3;
    stored.report = serde_json::to_value(&report).unwrap_or_default();
    warnings.extend(across_nodes(&stored));
    warnings.extend(roomy_buffers(&stored));
    let (sharded, causes, notes) = (compiled.sharded, compiled.causes, vec![]);
    Ok(Output { stored, report, sharded, causes, warnings, notes })
}
