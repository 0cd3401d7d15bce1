//! The table of the passes, in their order, and what runs them.

pub use crate::checks::computed;
use crate::compilation::Compilation;
use crate::group::group;
use crate::options::Options;
use crate::rows::{self, Changed, ModelFacts};
use crate::shard::auto::{Choices, Price};
use crate::shard::propagate::Cause;
use shardc_ir::diag::{Diag, Result, bytes, exact_bytes};
use shardc_ir::func::{Func, Module};
use shardc_ir::mesh::Mesh;
use shardc_ir::phase::Phase;
use shardc_ir::plan::Plan;
use shardc_ir::schedule::Schedule;
pub use shardc_ir::source::Source;
use std::collections::BTreeMap;

/// The model with propagated shardings, and why each stands.
#[derive(Debug, Default)]
pub struct Propagated {
    pub sharded: Module,
    pub causes: Vec<Cause>,
    /// What layouts cost that were chosen by price, and from what they were.
    pub price: Option<Price>,
    pub choices: Option<Choices>,
}

/// A plan, and what explains it.
#[derive(Debug)]
pub struct Compiled {
    pub plan: Plan,
    pub propagated: Propagated,
    /// Milliseconds per pass, in order.
    pub phases: Vec<(&'static str, f64)>,
    pub warnings: Vec<Diag>,
}

/// A pass: it takes modules of one phase and leaves them in the same or a later one.
pub struct Pass {
    pub name: &'static str,
    pub from: Phase,
    pub to: Phase,
    /// Why it stands where it stands.
    pub why: &'static str,
    pub(crate) run: Run,
}

/// What a pass is. What it reads beside the module and the options is what its function takes.
#[derive(Clone, Copy)]
pub(crate) enum Run {
    Plain(fn(&mut Module, &Options) -> Changed),
    /// Of each function alone.
    Each(fn(&Mesh, &mut Func, &Options)),
    /// It may add to what is known of the model.
    Facts(fn(&mut Module, &Options, &mut ModelFacts) -> Changed),
    Scheduled(fn(&mut Module, &Options, &Schedule) -> Changed),
    Both(fn(&mut Module, &Options, &mut ModelFacts, &Schedule) -> Changed),
    /// By number, as long as there are some. The first is kept whose plan needs no more memory than without; passes
    /// behind are of functions.
    NoLarger(fn(&Module, &Options, &Schedule, usize) -> Option<Replacements>),
    /// A step of the back end, which leaves the module as it is.
    BackEnd,
}

/// What may stand in the place of functions, by their index.
pub(crate) type Replacements = BTreeMap<usize, Vec<Func>>;

impl Pass {
    const fn new(name: &'static str, [from, to]: [Phase; 2], run: Run) -> Pass {
        Pass { name, from, to, why: "", run }
    }

    const fn since(self, why: &'static str) -> Pass {
        Pass { why, ..self }
    }

    /// What it reads beside the module and the options.
    pub fn reads(&self) -> &'static str {
        match self.run {
            Run::Plain(_) | Run::Each(_) => "",
            Run::Facts(_) => "model",
            Run::Scheduled(_) | Run::BackEnd => "schedule",
            Run::Both(_) => "model, schedule",
            Run::NoLarger(_) => "schedule, memory",
        }
    }
}

/// The passes, in order: the only list of them.
pub static PASSES: [Pass; 20] = {
    use Phase::{Differentiated, Ranked, Sharded, Source, Staged, Step};
    use Run::{Both, Each, Facts, NoLarger, Plain, Scheduled};
    let (model, joint, whole) = ([Source; 2], [Differentiated; 2], [Step; 2]);
    [
        Pass::new("experts", model, Facts(rows::experts))
            .since("it finds mixtures by ops and letters, which `rewrite` may change"),
        Pass::new("rewrite", model, Plain(rows::rewrite))
            .since("casts of `precision` would stand between the ops that rules join"),
        Pass::new("precision", model, Plain(rows::precision))
            .since("what is sent, and gradients, have the types that it gives"),
        Pass::new("states", model, Plain(rows::states))
            .since("only with pieces may `propagate` split the tokens of a recurrence"),
        Pass::new("stages", model, Scheduled(rows::stages))
            .since("what crosses stages is summed before it does, by `partition`"),
        Pass::new("annotate", model, Facts(rows::annotate))
            .since("it names values: those before it may still make others of them"),
        Pass::new("propagate", [Source, Sharded], Facts(rows::propagate))
            .since("it decides between all requests, so all of them have to be there"),
        Pass::new("partition", [Sharded, Ranked], Facts(rows::partition))
            .since("behind `differentiate` it would have to shard a backward, too"),
        Pass::new("differentiate", [Ranked, Differentiated], Facts(rows::differentiate))
            .since("the mirror of a collective is its gradient, as of any other op"),
        Pass::new("chunk-loss", joint, Plain(rows::chunk_loss))
            .since("a chunk of the loss and its gradients are made in one function"),
        Pass::new("summa", joint, Plain(rows::summa))
            .since("products of backward are cut as those of forward are"),
        Pass::new("ragged", joint, Plain(rows::ragged))
            .since("`split` decides what of the counts is saved for backward"),
        Pass::new("split", [Differentiated, Staged], Scheduled(rows::split))
            .since("what backward reads is saved: all that reads has to be there"),
        Pass::new("rewrite-collectives", [Staged; 2], Plain(rows::rewrite_collectives))
            .since("calls are joined within the functions that run"),
        Pass::new("ring", [Staged; 2], Plain(rows::ring))
            .since("`split` saves attention, or recomputes it, as one op"),
        Pass::new("step", [Staged, Step], Both(rows::step))
            .since("who owns a parameter depends on the functions of all stages"),
        Pass::new("early-sums", whole, NoLarger(rows::early_sums))
            .since("`bucket-grads` would join what may begin at different times"),
        Pass::new("bucket-grads", whole, Each(rows::bucket_grads))
            .since("for `group` a call is one launch, whatever its operands"),
        Pass::new("group", whole, Each(group))
            .since("who makes or moves ops behind it has to keep launches whole"),
        Pass::new("overlap", whole, Each(rows::overlap))
            .since("it moves launches, which `group` makes"),
    ]
};

/// What is behind the passes, called as they are: `schedule` and `memory` make a plan of their module, `verify` and
/// `replay` check it.
pub static BACK_END: [Pass; 4] = {
    const fn step(name: &'static str) -> Pass {
        Pass::new(name, [Phase::Step; 2], Run::BackEnd)
    }
    [
        step("schedule").since("lists name functions and values: there are no more to come"),
        step("memory").since("from where to where a value lives is counted in instructions"),
        step("verify").since("the module is now that of the plan"),
        step("replay").since("lists and memory are checked by who did not make them"),
    ]
};

/// All passes, and the steps behind them, in order.
fn all() -> impl Iterator<Item = &'static Pass> {
    PASSES.iter().chain(&BACK_END)
}

/// The pass, or the step behind them, of this name.
pub fn find(name: &str) -> Option<&'static Pass> {
    all().find(|p| p.name == name)
}

/// The names of all passes and of the steps behind them, in order.
pub fn names() -> impl Iterator<Item = &'static str> {
    all().map(|p| p.name)
}

/// Called after each pass with its name and the module as it then is.
pub type Watch<'a> = &'a mut dyn FnMut(&str, &Module);

/// How passes are run.
pub struct Manager<'a> {
    pub watch: Watch<'a>,
    /// The module is verified after each pass, as debug builds always do.
    pub verify_each: bool,
    /// What is made is compared with others and thrown away: nothing is checked a second time.
    pub trial: bool,
    /// Leaves out the pass of this name: what it makes better is not to be in what is compared.
    pub without: Option<&'static str>,
    /// Begins in the middle, in place of with the source.
    pub from: Option<Begin>,
}

/// Where a compilation begins that is not one of a source.
pub struct Begin {
    /// The first pass.
    pub pass: &'static Pass,
    /// What it takes.
    pub module: Module,
    /// The options of the passes before it, if they are known.
    pub made: Option<Options>,
}

impl<'a> Manager<'a> {
    /// All passes, from the source on.
    pub fn new(watch: Watch<'a>) -> Manager<'a> {
        Manager { watch, verify_each: false, trial: false, without: None, from: None }
    }
}

/// Compiles a model to a plan: a pure function of its arguments.
///
/// # Errors
/// Those of all passes, and `out-of-memory`.
pub fn compile(source: Source, o: &Options, watch: Watch) -> Result<Compiled> {
    compile_with(source, o, Manager::new(watch))
}

/// The same, run as the manager says.
///
/// # Errors
/// Also `phase` for a module of another phase than its pass takes, and those of verifying it.
pub fn compile_with(source: Source, o: &Options, manager: Manager) -> Result<Compiled> {
    let (mut c, rows, module) = Compilation::begin(source, o, manager)?;
    let plan = c.compile(rows, module)?;
    if let Some(limit) = o.memory.filter(|&l| plan.peak_bytes() > l) {
        return Err(too_large(&plan, limit));
    }
    let ModelFacts { mut propagated, warnings, source, .. } = c.facts;
    if propagated.sharded.funcs.is_empty() {
        propagated.sharded = source.module;
    }
    Ok(Compiled { plan, propagated, phases: c.phases, warnings })
}

/// Compiles what is compared with others and thrown away: nothing is checked a second time.
///
/// # Errors
/// As of [`compile`].
pub fn trial(source: Source, o: &Options) -> Result<Compiled> {
    let mut nobody = |_: &str, _: &Module| {};
    compile_with(source, o, Manager { trial: true, ..Manager::new(&mut nobody) })
}

/// The module of a model as the passes up to one of them leave it.
///
/// # Errors
/// Those of these passes.
pub fn up_to(last: &str, source: Source, o: &Options) -> Result<Module> {
    let mut nobody = |_: &str, _: &Module| {};
    let manager = Manager { trial: true, ..Manager::new(&mut nobody) };
    let (mut c, rows, mut module) = Compilation::begin(source, o, manager)?;
    let end = rows.iter().position(|p| p.name == last).map_or(rows.len(), |i| i + 1);
    for pass in &rows[..end] {
        c.run(pass, &mut module)?;
    }
    Ok(module)
}

/// Checks that a module has the mesh of the options.
///
/// # Errors
/// `mesh` if it has another one.
pub fn on_mesh(m: &Module, o: &Options) -> Result<()> {
    let axes: Vec<(&str, usize)> = o.mesh.iter().map(|(n, s)| (n.as_str(), *s)).collect();
    if m.mesh.axes == Mesh::new(&axes)?.axes {
        return Ok(());
    }
    let own: Vec<String> = m.mesh.axes.iter().map(|a| format!("{}={}", a.name, a.size)).collect();
    Err(Diag::new("mesh", format!("the program is for the mesh [{}]", own.join(", ")))
        .rule("a program continues with the flags that it was compiled with")
        .help(format!("give --mesh {}, and the other flags as they were", own.join(","))))
}

/// Runs one pass on a module, with all else that passes know of a model. The module is of the phase
/// that the pass takes.
///
/// # Errors
/// `phase` if it is not, `syntax` of a text without a function, and those of verifying it and of the pass.
pub fn run_pass(
    pass: &'static Pass,
    module: Module,
    source: Source,
    o: &Options,
) -> Result<Module> {
    if module.funcs.is_empty() {
        return Err(Diag::new("syntax", "the text has no function")
            .rule("a pass takes a program")
            .help("begin with a text that --dump-all wrote"));
    }
    let mut nobody = |_: &str, _: &Module| {};
    Compilation::of_given(pass, &module, source, o, Manager::new(&mut nobody))?.only(pass, module)
}

/// Tensors of a size that are named.
const NAMED: usize = 3;

/// A plan that needs more memory than a rank has. Other ways out are for the driver to find.
fn too_large(plan: &Plan, limit: usize) -> Diag {
    let m = plan.classes.iter().map(|c| &c.memory).max_by_key(|m| m.peak_bytes);
    let m = m.expect("a plan has ranks");
    let (needs, most) = (exact_bytes(m.peak_bytes), exact_bytes(limit));
    let what = format!("a rank needs {needs}, the limit is {most}");
    let mut kinds = m.at_peak.clone();
    kinds.sort_by_key(|k| std::cmp::Reverse(k.1));
    let kinds: Vec<String> =
        kinds.iter().map(|(kind, n)| format!("{} {}", kind.name(), bytes(*n))).collect();
    let mut d = Diag::new("out-of-memory", what)
        .at(format!("--memory {limit}"))
        .rule("peak_bytes <= --memory")
        .why(format!("at the peak: {}", kinds.join(", ")));
    for alike in m.live_at_peak.chunk_by(|a, b| a.2 == b.2) {
        let mut names: Vec<&str> = alike.iter().map(|x| x.0.as_str()).take(NAMED).collect();
        let more = alike.len() - names.len();
        let more = (more > 0).then(|| format!("and {more} more"));
        names.extend(more.as_deref());
        let mut kinds: Vec<&str> = alike.iter().map(|x| x.1.name()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let (kinds, each) = (kinds.join(", "), bytes(alike[0].2));
        d = d.why(match &names[..] {
            [one] => format!("{one} holds {each} ({kinds}) at the peak"),
            all => format!("{} hold {each} each ({kinds}) at the peak", all.join(", ")),
        });
    }
    d.help(format!("use --memory {}B", m.peak_bytes))
}
