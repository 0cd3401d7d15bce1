//! From a model to a checked and priced plan: [`compile`], searches over options, comparisons, measurements.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod compare;
pub mod device;
pub mod measure;
pub mod numbers;
pub mod planner;
mod recompile;
pub mod search;

pub use recompile::{as_made, recompile, retarget};
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::func::Value;
use shardc_ir::hardware::Hardware;
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::names::glob;
use shardc_ir::ops::Op;
use shardc_ir::plan::Plan;
use shardc_ir::text;
use shardc_passes::optim;
use shardc_passes::options::{Buffers, Options};
use shardc_passes::pipeline::{self, Manager, Propagated, Source, Watch};
use shardc_passes::shard::auto::Price;
use shardc_passes::shard::experts::{ExpertRole, ranks_of};
use shardc_passes::shard::propagate::{Cause, Origin};
use shardc_passes::zero::Accumulate;
use shardc_plans::again::with_mesh;
use shardc_plans::input::{Input, adapted, facts, from_model, read_model, shape};
use shardc_plans::stored::{self, Stored};
use shardc_plans::{axes, flags, plan_dir, rules};
use shardc_process::terminal::note;
use shardc_report::proof::{self, Prove};
use shardc_report::report::{self, Report};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

/// The options for a model: what its archive does not train is frozen.
fn options_for(input: &Input, o: &Options) -> Result<Options> {
    let o = optim::given(&input.source.updates, o)?;
    optim::in_place(&input.source, &o)?;
    let mut o = with_mesh(&input.source.module.mesh, &o)?;
    let weights = &input.source.weights;
    if !input.frozen.is_empty() && weights.iter().all(|w| input.frozen.contains(&w.tensor)) {
        let what =
            "every parameter of the archive has requires_grad=False: there is nothing to train";
        return Err(Diag::new("no-loss", what)
            .help("compile with --mode infer, or export after requires_grad_(True)"));
    }
    let more = input.frozen.iter().filter(|t| !o.freeze.contains(t)).cloned();
    let more: Vec<String> = more.collect();
    o.freeze.extend(more);
    Ok(o)
}

/// A compiled model with what is needed to write, explain and repeat it.
pub struct Output {
    pub stored: Stored,
    pub report: Report,
    pub propagated: Propagated,
    pub warnings: Vec<Diag>,
    /// What was chosen where the options ask for a search.
    pub notes: Vec<String>,
}

impl Output {
    /// Proves the plan by terms, if that is asked for.
    ///
    /// # Errors
    /// `refuted` if something else is computed than the model means; `not-understood` if that is not known
    /// and a proof was asked for.
    pub fn prove(&mut self, how: Prove) -> Result<()> {
        let since = Instant::now();
        self.report.proof = Some(proof::of_compiled(&self.stored, how)?);
        self.report.prove_ms = Some(since.elapsed().as_secs_f64() * 1e3);
        self.store_report();
        Ok(())
    }

    /// Writes the plan, and says which other one it has replaced; the report's time includes that.
    ///
    /// # Errors
    /// `output` if it cannot be written, or would replace what is not a plan.
    pub fn write(&mut self, dir: &Path) -> Result<()> {
        let since = Instant::now();
        let before = plan_dir::held(dir);
        plan_dir::write(dir, &self.stored)?;
        let replaced = before.filter(|b| plan_dir::held(dir).is_some_and(|now| now.0 != b.0));
        if let Some((_, of)) = replaced {
            note(format!("replaced the plan of {of} that was in {}", dir.display()));
        }
        let ms = since.elapsed().as_secs_f64() * 1e3;
        self.report.phases.push(report::PhaseTime { name: "write".into(), ms });
        self.report.compile_ms += ms;
        self.store_report();
        Ok(())
    }

    /// Stores the report as it now is. Its classes do not change, and are most of it.
    fn store_report(&mut self) {
        let known = self.stored.report.get_mut("per_class").map(serde_json::Value::take);
        let Some(known) = known else {
            self.stored.report = serde_json::to_value(&self.report).unwrap_or_default();
            return;
        };
        let classes = std::mem::take(&mut self.report.per_class);
        self.stored.report = serde_json::to_value(&self.report).unwrap_or_default();
        self.stored.report["per_class"] = known;
        self.report.per_class = classes;
    }
}

/// Compiles a model.
pub fn compile(model: &Path, o: &Options, watch: Watch) -> Result<Output> {
    compile_with(model, o, Manager::new(watch))
}

/// The same, with passes run as the manager says.
pub fn compile_with(model: &Path, o: &Options, manager: Manager) -> Result<Output> {
    // A program is made for a mesh: the rules come first.
    if let Some(f) = facts(model)? {
        axes::misnamed(o)?;
        let found = rules::violations(&f, o);
        let first = found.into_iter().take(1).collect();
        if let Some(v) = search::ways::checked(model, &f, o, first).first() {
            let all = match v.nearest.is_empty() {
                true => search::ways::meshes(model, &f, o, std::slice::from_ref(v)),
                false => vec![],
            };
            return Err(all.iter().fold(v.diag(), |d, m| d.help(format!("use --mesh {m}"))));
        }
    }
    compile_legal(model, o, manager)
}

/// The same, of options that violate no rule of the model's sizes.
fn compile_legal(model: &Path, o: &Options, manager: Manager) -> Result<Output> {
    let since = Instant::now();
    let mut input = read_model(model, o)?;
    let (o, tied) = (options_for(&input, o)?, std::mem::take(&mut input.tied));
    made(input, &o, manager, since).map_err(|d| by_its_name(d, &tied, &o))
}

/// The way out where a tensor is named that is none of its own, but tied to another.
fn by_its_name(mut d: Diag, tied: &[[String; 2]], o: &Options) -> Diag {
    let globs = || o.freeze.iter().chain(o.shard.iter().map(|r| &r.glob));
    let meant = |[other, _]: &&[String; 2]| {
        globs().any(|g| glob(g, other) && d.message.contains(&format!("`{g}`")))
    };
    let found = tied.iter().filter(|_| d.code == "unknown-tensor").find(meant);
    let Some([other, tensor]) = found else { return d };
    d.why.push(format!("`{other}` is tied to `{tensor}`: they are one parameter"));
    d.help = vec![format!("name it so: {tensor}")];
    d
}

/// A model that was read, compiled.
fn made(input: Input, o: &Options, manager: Manager, since: Instant) -> Result<Output> {
    let read_ms = since.elapsed().as_secs_f64() * 1e3;
    let (mut before, searches) = (vec![("read", read_ms)], search::searches(o));
    let o = &shardc_passes::checks::balanced(&input.source.module.funcs[0], o);
    if let (true, Some(begin)) = (searches, &manager.from) {
        let pass = begin.pass.name;
        let what = format!("--from {pass} starts in the middle: nothing is searched for there");
        return Err(Diag::new("flag", what)
            .rule("--loss-chunks auto, --recompute fit and --schedule search compile a model from its beginning")
            .help("give the values that the program was written with in place of auto, fit and search"));
    }
    manager.from.as_ref().map_or(Ok(()), |begin| flags::begun(begin, o))?;
    let unknown = manager.from.as_ref().and_then(flags::unknown);
    let search::Found { options: o, notes, warnings } = search::resolve(&input, o)?;
    if searches {
        before.push(("search", since.elapsed().as_secs_f64() * 1e3 - read_ms));
    }
    let mut done = finish(input, &o, manager, since, before)?;
    done.notes.splice(..0, notes);
    done.warnings.splice(..0, unknown.into_iter().chain(warnings));
    Ok(done)
}

/// Compiles a model from a config alone.
pub fn compile_config(config: &serde_json::Value, o: &Options) -> Result<Output> {
    let model = shardc_frontends::from_config(config, "config.json", &shape(o))?;
    finish(adapted(from_model(model), o)?, o, Manager::default(), Instant::now(), vec![])
}

/// The kinds of groups that exchange data in every layer and reach over several nodes.
fn across(mesh: &Mesh, o: &Options) -> Vec<(&'static str, AtomSet)> {
    let Some(node) = o.node else { return vec![] };
    let mut kinds: Vec<(&str, AtomSet)> =
        ["tp", "cp"].into_iter().filter_map(|a| Some((a, mesh.axis(a)?))).collect();
    if o.ep > 1 {
        kinds.push(("ep", ranks_of(mesh, o, ExpertRole::Expert)));
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
    kinds.retain(|k| leaves_a_node(k.1));
    kinds
}

/// A warning for each kind of group that exchanges data in every layer and lies on several nodes.
fn across_nodes(s: &Stored) -> Vec<Diag> {
    let mesh = &s.plan.module.mesh;
    let Some(node) = s.options.node else { return vec![] };
    let mut out = vec![];
    for (name, atoms) in across(mesh, &s.options) {
        let names = mesh.names(atoms, "+");
        let axes: Vec<&str> = names.split('+').collect();
        let experts = report::Experts::of(&s.plan);
        let sent = s.plan.classes.iter().map(|c| {
            let all = report::of_class(&s.plan, &experts, c);
            // Over all of them, or over a part of an axis.
            let part =
                |a: &str| a == name || axes.contains(&a) || a.starts_with(&format!("{name}:"));
            let over = |c: &&report::CollectiveReport| c.axis.split('+').any(part);
            all.iter().filter(over).map(|c| c.bytes).sum::<f64>()
        });
        let most = sent.fold(0.0, f64::max) as usize;
        let what =
            format!("groups over {name} span several nodes of {}", count(node, "rank", "ranks"));
        let help = match name {
            "ep" => "use a smaller ep, or etp=1 so that ep takes the nearest ranks".into(),
            _ => {
                let ways = mesh.ways(atoms);
                let fits = (1..=ways.min(node)).rev().find(|n| ways % n == 0).unwrap_or(1);
                let first =
                    if ways <= node { format!(", or --order {name}-…") } else { String::new() };
                format!("use {name}={fits} or less{first}")
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
    let largest = buffers.max().filter(|_| worst > 2.0)?;
    let what = format!("buffers of experts hold {worst:.1} times a balanced load");
    Some(
        Diag::new("moe-buffers", what)
            .rule("without --moe-bound a buffer is large enough for any routing")
            .why(format!("a buffer of one layer has {} on a rank", report::bytes(largest)))
            .help("use --moe-bound N, with which a run ends if a batch needs more, or --moe-capacity N to drop what does not fit"),
    )
}

/// Seconds of a step by the prices of `--hardware`, and bytes of a rank at the peak.
fn cost(plan: &Plan, o: &Options) -> (f64, usize) {
    (
        search::Prices::of(o)
            .and_then(|p| p.price(plan, &o.speeds))
            .map_or(f64::INFINITY, |p| p.step),
        plan.peak_bytes(),
    )
}

/// Compilations for a budget of `--shard auto`, the last one not counted.
const MOST_BUDGETS: usize = 4;

/// The options with a budget for the estimate of layouts that are chosen by price, such that the plan, whose peak
/// is exact, needs no more than `--memory`; none if it needs no more without one.
fn within_memory(source: &Source, o: &Options) -> Result<Options> {
    let Some(limit) = o.memory.filter(|_| o.auto) else { return Ok(o.clone()) };
    let mut last = Options { memory: None, ..o.clone() };
    for _ in 0..MOST_BUDGETS {
        let made = pipeline::trial(source.clone(), &last)?;
        let (peak, price) = (made.plan.peak_bytes(), made.propagated.price);
        let Some(price) = price.filter(|p| peak > limit && p.fits) else { break };
        // As much less as the plan needs more, and a little.
        let part = limit as f64 / peak as f64 * 0.98;
        last.budget = Some((price.memory as f64 * part) as usize);
    }
    Ok(Options { memory: o.memory, ..last })
}

/// What is said of layouts that were chosen by price: how near they are to the least, and how the family's
/// own layout compares.
fn chosen(p: &Price, o: &Options, compared: Option<[(f64, usize); 2]>) -> String {
    let by = match o.hardware == Hardware::default() {
        true => "price",
        false => "the prices of --hardware",
    };
    let above = p.bound.map(|b| (p.time as f64 / b.max(1) as f64 - 1.0) * 100.0);
    let mut text = match above {
        None => format!("layouts chosen by {by}, two axes at a time; no lower bound is known"),
        Some(a) if a < 0.05 => format!("layouts chosen by {by}: none has a lower estimate"),
        Some(a) => format!("layouts chosen by {by}: the least estimate is up to {a:.1} % lower"),
    };
    if let Some([family, own]) = compared {
        text += &format!(
            "; compiled, the family's own layout takes {:.2} times as long by the same prices, and {:.2} times \
             the memory",
            family.0 / own.0,
            family.1 as f64 / own.1 as f64
        );
    }
    text
}

/// Most values that are named.
const NAMED: usize = 4;

/// What is split of a model without a recipe as `--shard` and its text ask, and what is because of that.
fn spread(p: &Propagated, o: &Options) -> Option<String> {
    if o.shard.is_empty() || o.auto {
        return None;
    }
    let (mesh, f) = (&p.sharded.mesh, p.sharded.funcs.first()?);
    let by_rows = |a: Atom| mesh.names(AtomSet::one(a), "*").starts_with("dp");
    let values = |asked: bool| {
        let is = |c: &&Cause| matches!(c.from, Origin::Annotation { .. }) == asked;
        let own = p.causes.iter().filter(|c| !by_rows(c.atom)).filter(is).map(|c| c.value);
        own.collect::<BTreeSet<Value>>()
    };
    let (asked, all) = (values(true), values(false));
    let also: Vec<Value> = all.difference(&asked).copied().collect();
    let names = |of: &[Value]| {
        let names: Vec<String> = of.iter().take(NAMED).map(|v| f.name(*v).to_string()).collect();
        let more = of.len() - names.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        names.join(", ") + &more
    };
    let asked = names(&Vec::from_iter(asked));
    Some(match also.first() {
        _ if asked.is_empty() => return None,
        None => format!("split as asked: {asked}; nothing else is because of that"),
        Some(one) => format!(
            "split as asked: {asked}; because of that also {}: of a plan that -o has written, \
             `shardc explain PLAN {}` says how",
            names(&also),
            f.name(*one)
        ),
    })
}

fn finish(
    input: Input,
    o: &Options,
    manager: Manager,
    since: Instant,
    mut phases: Vec<(&'static str, f64)>,
) -> Result<Output> {
    let Input { mut source, family, facts, config, origin, name, mut warnings, .. } = input;
    source.updates = optim::written(&source, o)?;
    let update_rules = report::groups::rows(&source, o)?;
    let model = text::print_source(&source);
    let from = manager.from.as_ref().map(|begin| stored::From {
        pass: begin.pass.name.into(),
        program: text::print_between(&begin.module),
    });
    // What it costs to keep something whole, beside a plan that does not.
    let without = Options { zero_accumulate: Accumulate::None, memory: None, ..o.clone() };
    let without = match o.zero() == without.zero() {
        true => None,
        false => Some(pipeline::trial(source.clone(), &without)?.plan),
    };
    let o = &within_memory(&source, o)?;
    // What the family's own layout would cost, if it has one that is legal.
    let own = Options { auto: false, memory: None, ..o.clone() };
    let families = facts.as_ref().filter(|f| o.auto && rules::violations(f, &own).is_empty());
    let families = families.and_then(|_| pipeline::trial(source.clone(), &own).ok());
    let mut compiled = pipeline::compile_with(source, o, manager)?;
    let compared = families.map(|c| [&c.plan, &compiled.plan].map(|p| cost(p, o)));
    warnings.append(&mut compiled.warnings);
    let stored = Stored {
        plan: compiled.plan,
        options: o.clone(),
        source: model,
        family,
        facts,
        config,
        origin,
        name,
        from,
        report: serde_json::Value::Null,
    };
    phases.append(&mut compiled.phases);
    let kept = without.map(|p| report::Kept::of(o.zero_accumulate.name(), &stored.plan, &p));
    let mut report = report::report(&stored.plan, &phases, kept);
    report.compile_ms = since.elapsed().as_secs_f64() * 1e3;
    report.update_rules = update_rules;
    warnings.extend(across_nodes(&stored));
    warnings.extend(roomy_buffers(&stored));
    let propagated = compiled.propagated;
    let spread = facts.is_none().then(|| spread(&propagated, o)).flatten();
    let notes =
        propagated.price.map(|p| chosen(&p, o, compared)).into_iter().chain(spread).collect();
    let mut done = Output { stored, report, propagated, warnings, notes };
    done.store_report();
    Ok(done)
}
