//! The table of the passes, in their order, and how they are run.

use crate::group::group;
use crate::options::Options;
use crate::rows::{self, Changed, ModelFacts};
use crate::step::early_sums::Replacements;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Module};
use shardc_ir::mesh::Mesh;
use shardc_ir::phase::Phase;
use shardc_ir::schedule::Schedule;

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

/// How passes are run: all of them, from the source on, if nothing else is said.
#[derive(Default)]
pub struct Manager<'a> {
    pub watch: Option<Watch<'a>>,
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
    /// With somebody who sees what each pass leaves.
    pub fn new(watch: Watch<'a>) -> Manager<'a> {
        Manager { watch: Some(watch), ..Manager::default() }
    }
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
