//! Models to plans, by all passes or some of them.

pub use crate::checks::computed;
use crate::compilation::Compilation;
use crate::options::Options;
use crate::rows::ModelFacts;
pub use crate::rows::Propagated;
pub use crate::table::{BACK_END, Begin, Manager, PASSES, Pass, Watch, find, names, on_mesh};
use shardc_ir::diag::{Diag, Result, bytes, exact_bytes};
use shardc_ir::func::Module;
use shardc_ir::plan::Plan;
pub use shardc_ir::source::Source;

/// A plan, and what explains it.
#[derive(Debug)]
pub struct Compiled {
    pub plan: Plan,
    pub propagated: Propagated,
    /// Milliseconds per pass, in order.
    pub phases: Vec<(&'static str, f64)>,
    pub warnings: Vec<Diag>,
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
    compile_with(source, o, Manager { trial: true, ..Manager::default() })
}

/// The module of a model as the passes up to one of them leave it.
///
/// # Errors
/// Those of these passes.
pub fn up_to(last: &str, source: Source, o: &Options) -> Result<Module> {
    let manager = Manager { trial: true, ..Manager::default() };
    let (mut c, rows, mut module) = Compilation::begin(source, o, manager)?;
    let end = rows.iter().position(|p| p.name == last).map_or(rows.len(), |i| i + 1);
    for pass in &rows[..end] {
        c.run(pass, &mut module)?;
    }
    Ok(module)
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
    let mut seen = |_: &str, _: &Module| {};
    Compilation::of_given(pass, &module, source, o, Manager::new(&mut seen))?.only(pass, module)
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
