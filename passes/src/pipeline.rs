//! The table of the passes, in their order, and what runs them.

pub use crate::checks::computed;
use crate::checks::{check_documents, check_source};
use crate::experts::check_rows;
use crate::globs::frozen;
use crate::options::Options;
use crate::schedule;
use crate::shard::auto::{Choices, Price};
use crate::shard::propagate::Cause;
use crate::state::{Changed, State};
use shardc_ir::diag::{Diag, Result, bytes, exact_bytes};
use shardc_ir::func::Module;
use shardc_ir::mesh::Mesh;
use shardc_ir::phase::Phase;
use shardc_ir::plan::{Mode, Plan};
pub use shardc_ir::source::Source;
use std::time::Instant;

/// The model with propagated shardings, and why each stands.
#[derive(Debug)]
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
    pub(crate) run: fn(&mut State) -> Changed,
}

const fn pass(name: &'static str, from: Phase, to: Phase, run: fn(&mut State) -> Changed) -> Pass {
    Pass { name, from, to, run }
}

/// The passes, in order: the only list of them.
pub static PASSES: [Pass; 24] = {
    use Phase::{Differentiated, Ranked, Sharded, Source, Staged, Step};
    [
        pass("experts", Source, Source, |s| s.experts()),
        pass("rewrite", Source, Source, |s| s.rewrite()),
        pass("precision", Source, Source, |s| s.precision()),
        pass("states", Source, Source, |s| s.states()),
        pass("stages", Source, Source, |s| s.stages()),
        pass("annotate", Source, Source, |s| s.annotate()),
        pass("propagate", Source, Sharded, |s| s.propagate()),
        pass("partition", Sharded, Ranked, |s| s.partition()),
        pass("differentiate", Ranked, Differentiated, |s| s.differentiate()),
        pass("chunk-loss", Differentiated, Differentiated, |s| s.chunk_loss()),
        pass("summa", Differentiated, Differentiated, |s| s.summa()),
        pass("ragged", Differentiated, Differentiated, |s| s.ragged()),
        pass("split", Differentiated, Staged, |s| s.split()),
        pass("rewrite-collectives", Staged, Staged, |s| s.rewrite_collectives()),
        pass("ring", Staged, Staged, |s| s.ring()),
        pass("step", Staged, Step, |s| s.step()),
        pass("early-sums", Step, Step, |s| s.early_sums()),
        pass("bucket-grads", Step, Step, |s| s.bucket_grads()),
        pass("group", Step, Step, |s| s.group()),
        pass("overlap", Step, Step, |s| s.overlap()),
        pass("schedule", Step, Step, |s| s.lists()),
        pass("memory", Step, Step, |s| s.memory()),
        pass("verify", Step, Step, |s| s.verify()),
        pass("replay", Step, Step, |s| s.replay()),
    ]
};

/// The pass of this name.
pub fn find(name: &str) -> Option<&'static Pass> {
    PASSES.iter().find(|p| p.name == name)
}

/// The names of all passes, in order.
pub fn names() -> impl Iterator<Item = &'static str> {
    PASSES.iter().map(|p| p.name)
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
    /// Ends behind the pass of this name.
    pub last: Option<&'static str>,
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
        Manager { watch, verify_each: false, trial: false, without: None, from: None, last: None }
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
    let (mut state, phases) = through(source, o, manager)?;
    let plan = state.plan.take().expect("the last passes make it");
    if let Some(limit) = o.memory.filter(|&l| plan.peak_bytes() > l) {
        return Err(too_large(&plan, limit));
    }
    let warnings = std::mem::take(&mut state.warnings);
    Ok(Compiled { plan, propagated: of_state(state), phases, warnings })
}

/// The module of a model as the passes up to one of them leave it.
///
/// # Errors
/// Those of these passes.
pub fn up_to(last: &'static str, source: Source, o: &Options) -> Result<Module> {
    let mut nobody = |_: &str, _: &Module| {};
    let manager = Manager { trial: true, last: Some(last), ..Manager::new(&mut nobody) };
    Ok(through(source, o, manager)?.0.into_module())
}

fn of_state(s: State) -> Propagated {
    let State { sharded, causes, price, choices, source, .. } = s;
    Propagated { sharded: sharded.unwrap_or(source.module), causes, price, choices }
}

/// What the passes make, and the milliseconds of each.
fn through<'o>(
    mut source: Source,
    o: &'o Options,
    mut manager: Manager,
) -> Result<(State<'o>, Vec<(&'static str, f64)>)> {
    check_source(&source.module.mesh, &source.module.funcs[0], o)?;
    check_documents(o, source.vocab)?;
    source = computed(source, o)?;
    let still = frozen(&source.weights, o)?;
    check_rows(&source.module.funcs[0], o.mode == Mode::Train, &still)?;
    schedule::possible(o)?;
    let given = manager.from.is_some();
    let (begin, module) = match manager.from.take() {
        Some(Begin { pass, module, .. }) => {
            on_mesh(&module, o)?;
            (pass.name, module)
        }
        None => (PASSES[0].name, std::mem::take(&mut source.module)),
    };
    let mut state = State::new(module, source, o)?;
    (state.trial, state.given) = (manager.trial, given);
    let mut phases = vec![];
    for pass in PASSES.iter().skip_while(|p| p.name != begin) {
        if manager.without == Some(pass.name) || state.is_done(pass.name) {
            continue;
        }
        let since = Instant::now();
        let changed = run(pass, &mut state)?;
        phases.push((pass.name, since.elapsed().as_secs_f64() * 1e3));
        if changed && (manager.verify_each || (cfg!(debug_assertions) && !manager.trial)) {
            state.verified(pass.name)?;
        }
        (manager.watch)(pass.name, state.module());
        if manager.last == Some(pass.name) {
            break;
        }
    }
    Ok((state, phases))
}

/// Runs a pass, if the module is of the phase that it takes; whether it may have changed it.
fn run(pass: &Pass, state: &mut State) -> Changed {
    let phase = state.module().phase;
    if phase != pass.from {
        let what = format!("`{}` takes modules of phase {}, not {phase}", pass.name, pass.from);
        return Err(Diag::new("phase", what)
            .rule("a pass takes what the passes before it leave")
            .help(format!("give the program before `{}`: --dump-all writes it", pass.name)));
    }
    let changed = (pass.run)(state)?;
    state.module_mut().phase = pass.to;
    Ok(changed || pass.from != pass.to)
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
pub fn run_pass(pass: &Pass, module: Module, source: Source, o: &Options) -> Result<Module> {
    if module.funcs.is_empty() {
        return Err(Diag::new("syntax", "the text has no function")
            .rule("a pass takes a program")
            .help("begin with a text that --dump-all wrote"));
    }
    let mut state = State::new(module, source, o)?;
    state.given = true;
    run(pass, &mut state)?;
    state.verified(pass.name)?;
    Ok(state.into_module())
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
