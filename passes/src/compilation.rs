//! A compilation: passes one after the other, then the back end.

use crate::checks::{check_documents, check_source, computed};
use crate::classes::{classes, lists};
use crate::experts::check_rows;
use crate::globs::frozen;
use crate::lower::{check, plan};
use crate::options::Options;
use crate::rows::ModelFacts;
use crate::schedule;
use crate::stages::not_too_many;
use crate::step::early_sums::Replacements;
use crate::table::{BACK_END, Begin, Manager, PASSES, Pass, Run, on_mesh};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::Module;
use shardc_ir::phase::Phase;
use shardc_ir::plan::{Mode, Plan, RankClass};
use shardc_ir::schedule::Schedule;
use shardc_ir::source::Source;
use shardc_ir::verify::verify;
use std::time::Instant;

/// What there is beside the module.
pub(crate) struct Compilation<'o, 'w> {
    o: &'o Options,
    manager: Manager<'w>,
    /// The module is one that somebody gave, and perhaps changed, and not what the passes made of a model.
    given: bool,
    pub facts: ModelFacts,
    schedule: Schedule,
    /// Milliseconds of passes, in order.
    pub phases: Vec<(&'static str, f64)>,
}

/// A module as a pass has left it, if somebody sees that, whether that changed it, and the milliseconds that it took.
type AfterPass = (&'static Pass, Option<Module>, bool, f64);

/// What ranks run, and its memory, with the milliseconds that each took.
type Lowered = (Vec<RankClass>, [f64; 2]);

/// Puts others in the place of functions.
fn replace(m: &mut Module, mut others: Replacements) {
    let own = std::mem::take(&mut m.funcs).into_iter().enumerate();
    m.funcs = own.flat_map(|(i, f)| others.remove(&i).unwrap_or_else(|| vec![f])).collect();
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let since = Instant::now();
    work().map(|made| (made, ms(since)))
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn peak(classes: &[RankClass]) -> usize {
    classes.iter().map(|c| c.memory.peak_bytes).max().unwrap_or(0)
}

/// Refuses modules of another phase than the pass takes.
fn takes(pass: &Pass, m: &Module) -> Result<()> {
    if m.phase == pass.from {
        return Ok(());
    }
    let what = format!("`{}` takes modules of phase {}, not {}", pass.name, pass.from, m.phase);
    Err(Diag::new("phase", what)
        .rule("a pass takes what the passes before it leave")
        .help(format!("give the program before `{}`: --dump-all writes it", pass.name)))
}

/// The schedule that the options ask for, if the model is not too small for it.
fn scheduled(m: &Module, o: &Options) -> Result<Schedule> {
    if m.phase == Phase::Source {
        not_too_many(&m.funcs[0], o)?;
    }
    schedule::chosen(o)
}

impl<'o, 'w> Compilation<'o, 'w> {
    /// Of a source, or from where the manager says: with the passes that are to run, and what the first of them takes.
    pub fn begin(
        source: Source,
        o: &'o Options,
        mut manager: Manager<'w>,
    ) -> Result<(Compilation<'o, 'w>, &'static [Pass], Module)> {
        check_source(&source.module.mesh, &source.module.funcs[0], o)?;
        check_documents(o, source.vocab)?;
        let mut source = computed(source, o)?;
        let still = frozen(&source.weights, o)?;
        check_rows(&source.module.funcs[0], o.mode == Mode::Train, &still)?;
        schedule::possible(o)?;
        let from = manager.from.take();
        let given = from.is_some();
        let (rows, module) = match from {
            Some(Begin { pass, module, .. }) => {
                on_mesh(&module, o)?;
                takes(pass, &module)?;
                let first = PASSES.iter().position(|p| p.name == pass.name);
                (&PASSES[first.unwrap_or(PASSES.len())..], module)
            }
            None => (&PASSES[..], std::mem::take(&mut source.module)),
        };
        let facts = ModelFacts::of(&module, source, o)?;
        let schedule = scheduled(&module, o)?;
        Ok((Compilation { o, manager, given, facts, schedule, phases: vec![] }, rows, module))
    }

    /// Of a module that somebody gave to one pass.
    pub fn of_given(
        pass: &Pass,
        m: &Module,
        source: Source,
        o: &'o Options,
        manager: Manager<'w>,
    ) -> Result<Compilation<'o, 'w>> {
        takes(pass, m)?;
        let facts = ModelFacts::of(m, source, o)?;
        let schedule = match pass.run {
            Run::Plain(_) | Run::Each(_) | Run::Facts(_) => Schedule::default(),
            Run::Scheduled(_) | Run::Both(_) | Run::NoLarger(_) | Run::BackEnd => scheduled(m, o)?,
        };
        Ok(Compilation { o, manager, given: true, facts, schedule, phases: vec![] })
    }

    /// Runs a pass; whether it may have changed the module, and the milliseconds that it took.
    pub fn run(&mut self, pass: &Pass, m: &mut Module) -> Result<(bool, f64)> {
        takes(pass, m)?;
        let (o, k, s) = (self.o, &mut self.facts, &self.schedule);
        let (changed, ms) = timed(|| match pass.run {
            Run::Plain(run) => run(m, o),
            Run::Each(run) => {
                m.funcs.iter_mut().for_each(|f| run(&m.mesh, f, o));
                Ok(true)
            }
            Run::Facts(run) => run(m, o, k),
            Run::Scheduled(run) => run(m, o, s),
            Run::Both(run) => run(m, o, k, s),
            Run::NoLarger(_) | Run::BackEnd => Ok(false),
        })?;
        m.phase = pass.to;
        Ok((changed || pass.from != pass.to, ms))
    }

    /// Whether what each pass leaves is verified.
    fn verifies_each(&self) -> bool {
        self.manager.verify_each || (cfg!(debug_assertions) && !self.manager.trial)
    }

    /// Notes what a pass has left, and shows it.
    fn left(&mut self, pass: &'static Pass, m: &Module, (changed, ms): (bool, f64)) -> Result<()> {
        self.phases.push((pass.name, ms));
        if changed && self.verifies_each() {
            self.verified(pass.name, m)?;
        }
        if let Some(watch) = &mut self.manager.watch {
            watch(pass.name, m);
        }
        Ok(())
    }

    /// Runs passes, and what is behind them.
    pub fn compile(&mut self, rows: &'static [Pass], mut m: Module) -> Result<Plan> {
        for (i, pass) in rows.iter().enumerate() {
            if self.manager.without == Some(pass.name) {
                continue;
            }
            if let Some((left, last, lowered)) = self.no_larger(pass, &rows[i + 1..], &m)? {
                for (pass, module, changed, ms) in left {
                    self.left(pass, module.as_ref().unwrap_or(&last), (changed, ms))?;
                }
                return self.back_end(last, lowered);
            }
            let how = self.run(pass, &mut m)?;
            self.left(pass, &m, how)?;
        }
        let lowered = self.lower(&m, usize::MAX)?.expect("no plan needs more");
        self.back_end(m, lowered)
    }

    /// What a pass leaves that is kept where a plan does not need more memory for it, what those behind it leave then,
    /// the last of that, and what is made of it. None of other passes, and where there is nothing to keep.
    fn no_larger(
        &mut self,
        pass: &'static Pass,
        behind: &'static [Pass],
        m: &Module,
    ) -> Result<Option<(Vec<AfterPass>, Module, Lowered)>> {
        let (Run::NoLarger(of), since) = (pass.run, Instant::now()) else { return Ok(None) };
        let Some(mut others) = of(m, self.o, &self.schedule, 0) else { return Ok(None) };
        takes(pass, m)?;
        let seen = self.manager.watch.is_some() || self.verifies_each();
        let shown = |m: &Module| seen.then(|| m.clone());
        let mut last = m.clone();
        let mut left: Vec<AfterPass> = vec![(pass, shown(m), false, 0.0)];
        for pass in behind {
            let (changed, ms) = self.run(pass, &mut last)?;
            left.push((pass, shown(&last), changed, ms));
        }
        let mut lowered = self.lower(&last, usize::MAX)?.expect("no plan needs more");
        let most = peak(&lowered.0);
        for number in 1.. {
            let mut all = vec![others];
            for pass in behind {
                let Run::Each(run) = pass.run else { unreachable!("they are of functions") };
                let mut others = all[all.len() - 1].clone();
                others.values_mut().flatten().for_each(|f| run(&m.mesh, f, self.o));
                all.push(others);
            }
            let mut made = last.clone();
            replace(&mut made, all[behind.len()].clone());
            let fits = self.lower(&made, most)?.filter(|l| peak(&l.0) <= most);
            if let Some(fits) = fits {
                (last, lowered) = (made, fits);
                for (shown, others) in left.iter_mut().zip(all) {
                    if let Some(m) = &mut shown.1 {
                        replace(m, others);
                    }
                }
                left[0].2 = true;
                break;
            }
            match of(m, self.o, &self.schedule, number) {
                Some(next) => others = next,
                None => break,
            }
        }
        let own = left.iter().map(|x| x.3).chain(lowered.1).sum::<f64>();
        left[0].3 = ms(since) - own;
        Ok(Some((left, last, lowered)))
    }

    /// The module that one pass alone leaves.
    pub fn only(&mut self, pass: &'static Pass, mut m: Module) -> Result<Module> {
        if let Some((mut left, ..)) = self.no_larger(pass, behind(pass), &m)? {
            m = left.swap_remove(0).1.expect("somebody sees it");
        }
        self.run(pass, &mut m)?;
        self.verified(pass.name, &m)?;
        if matches!(pass.run, Run::BackEnd) && pass.name != "verify" {
            let lowered = self.lower(&m, usize::MAX)?.expect("no plan needs more");
            return Ok(self.back_end(m, lowered)?.module);
        }
        Ok(m)
    }

    /// What ranks run of a module whose passes are done, and its memory; none if that is more than so many bytes.
    fn lower(&self, m: &Module, most: usize) -> Result<Option<Lowered>> {
        let (lists, of_lists) = timed(|| lists(m, &self.schedule, self.o.mode))?;
        let early = self.o.transport.overlaps();
        let (placed, of_memory) = timed(|| Ok(classes(m, &self.schedule, lists, early, most)))?;
        Ok(placed.map(|classes| (classes, [of_lists, of_memory])))
    }

    /// The plan, checked by what knows nothing of how it was made.
    fn back_end(&mut self, m: Module, (classes, times): Lowered) -> Result<Plan> {
        let [lists, memory, types, whole] = &BACK_END;
        self.left(lists, &m, (false, times[0]))?;
        self.left(memory, &m, (false, times[1]))?;
        let checks = !self.manager.trial;
        let verified = || if checks { self.verified("one of the passes", &m) } else { Ok(()) };
        let ((), of_types) = timed(verified)?;
        self.left(types, &m, (false, of_types))?;
        let schedule = std::mem::take(&mut self.schedule);
        let weights = std::mem::take(&mut self.facts.source.weights);
        let plan = plan(m, classes, schedule, (weights, self.facts.source.vocab), self.o);
        let checked = || if checks { check(&plan).or_else(|d| self.broken(&d)) } else { Ok(()) };
        let ((), of_plan) = timed(checked)?;
        self.left(whole, &plan.module, (false, of_plan))?;
        Ok(plan)
    }

    /// Checks what a pass has left.
    ///
    /// # Errors
    /// `pass` if it does not verify, of a module that somebody gave.
    ///
    /// # Panics
    /// If it does not verify, of any other: the pass is wrong then.
    fn verified(&self, by: &str, m: &Module) -> Result<()> {
        let Err(all) = verify(m, m.phase) else { return Ok(()) };
        let all: Vec<String> = all.iter().map(Diag::render).collect();
        self.broken(&format!("{by} made a program that does not verify:\n{}", all.join("\n")))
    }

    /// What does not hold behind the passes: of a module that somebody gave it is that module's, else theirs.
    fn broken(&self, what: &str) -> Result<()> {
        assert!(self.given, "the passes are wrong: {what}");
        Err(Diag::new("pass", "the program that was given does not become a plan")
            .rule("a pass takes what the passes before it leave")
            .why(what.replace('\n', " "))
            .help("start from a text that --dump-all wrote with the same flags, with few changes"))
    }
}

/// The passes behind one.
fn behind(pass: &Pass) -> &'static [Pass] {
    let at = PASSES.iter().position(|p| p.name == pass.name);
    at.map_or(&[], |at| &PASSES[at + 1..])
}
