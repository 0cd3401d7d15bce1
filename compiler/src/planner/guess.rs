//! Layouts in closed form, the fastest first: which are compiled, and in which order.
//!
//! What is inside of stages, and what the ranks of a pipeline take, is priced once for all layouts that have it. How
//! long a schedule's ranks wait and what they keep is looked at where a layout's turn comes.

use super::memory::{self, Kept, Order, Trains};
use super::space::{Candidate, Inside};
use super::what_if::Ifs;
use shardc_cost::device::Device;
use shardc_cost::layer::Question;
use shardc_cost::layout::{Job, Kernels, Layout, Overlap, Stack};
use shardc_cost::model::Sizes;
use shardc_cost::plan::scores::seen;
use shardc_cost::step::{Closed, CutKey, Pieces, Ranks, StageLoads};
use shardc_frontends::Facts;
use shardc_ir::diag::Result;
use shardc_ir::maps::HashMap;
use shardc_ir::plan::Mode;
use shardc_ir::schedule::{Schedule, Times, replay};
use shardc_ir::weights::Weight;
use shardc_passes::globs;
use shardc_passes::options::{Buffers, Optimizer, Options};
use shardc_passes::schedule::{Named, make};
use shardc_passes::threads;
use shardc_plans::input::Input;
use shardc_plans::machine::{gradients, precision, sizes};
use std::hash::Hash;
use std::rc::Rc;

/// Layouts that a thread prices before it takes more.
const RUN: usize = 1024;

/// Most actions of a schedule that is run for a guess.
const MOST_ACTIONS: usize = 1 << 18;

/// Most layouts of a family that are looked at for one that fits.
const MOST_LOOKED_AT: usize = 256;

/// Most actions of schedules that are kept for other layouts.
const MOST_KEPT: usize = 1 << 22;

/// A layout with its price in closed form.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Guess {
    pub candidate: Candidate,
    /// With what its own schedule makes ranks wait, if that is more than a formula says.
    pub seconds: f64,
    /// Bytes with what backward needs of all microbatches on their way.
    pub likely: f64,
}

/// A model's closed form on a machine.
pub(super) struct ClosedForm {
    pub sizes: Sizes,
    /// As plans have it.
    pub plain: Job,
    /// With what is asked beside it.
    pub job: Job,
    stack: Stack,
    pub ifs: Ifs,
    /// How large the buffers of experts are, and bytes of a gradient.
    moe: Buffers,
    gradient: f64,
    trains: Trains,
    /// Shares of products and attention with gradients.
    pub gradients: [f64; 3],
}

impl ClosedForm {
    pub fn of(
        f: &Facts,
        input: &Input,
        o: &Options,
        ifs: Ifs,
        device: &Device,
    ) -> Result<ClosedForm> {
        // Gathers of parameters and sums of gradients go on behind work; transfers begin where they are taken.
        let dp = device.overlaps;
        let overlap = Overlap {
            dp,
            tp_backward: true,
            early_keys: true,
            whole_sends: true,
            ..Overlap::default()
        };
        let plain = Job {
            seq: o.seq,
            seen: seen(&input.source.module.funcs[0], o.seq),
            precision: precision(o),
            attention: Kernels::Own,
            overlap,
            compiled: true,
        };
        let (job, stack) = (ifs.job(&plain), ifs.stack(Stack::named("shardc")));
        let gradient = o.grad_dtype.bytes() as f64;
        let (sizes, trains) = (sizes(f, &input.config), trains(&input.source.weights, o)?);
        let gradients = gradients(&input.source, o, &sizes)?;
        Ok(ClosedForm { sizes, plain, job, stack, ifs, moe: o.moe, gradient, trains, gradients })
    }

    pub fn question<'a>(&'a self, device: &'a Device, c: &'a Candidate) -> Question<'a> {
        let (sizes, job, stack) = (&self.sizes, &self.job, &self.stack);
        Question { sizes, layout: &c.layout, job, stack, device }
    }

    pub fn memory(&self) -> memory::Form<'_> {
        memory::Form::new(
            &self.sizes,
            &self.plain,
            &self.ifs,
            (self.moe, self.gradient, self.trains),
        )
    }
}

/// What a compilation trains of a model.
///
/// # Errors
/// Those of the globs of its options.
fn trains(weights: &[Weight], o: &Options) -> Result<Trains> {
    let frozen = globs::frozen(weights, o)?;
    let elements = |w: &Weight| w.shape.iter().product::<usize>() as f64;
    let all: f64 = weights.iter().map(elements).sum();
    let own: f64 = weights.iter().filter(|w| !frozen.contains(&w.param)).map(elements).sum();
    let share = if o.mode == Mode::Train { own / all.max(1.0) } else { 0.0 };
    let moments = matches!(o.optimizer, Optimizer::AdamW { .. }) && o.optim.is_empty();
    Ok(Trains { share, moments })
}

/// What the ranks of a pipeline take depends on: what is inside of stages, ranks, stages per rank, schedule. The
/// microbatches follow from these.
type Around = (Inside, usize, usize, Named);

/// By item, the number of its key; and by number, the first item with it.
fn numbered<K: Hash + Eq>(
    all: &[Candidate],
    key: impl Fn(&Candidate) -> K,
) -> (Vec<u32>, Vec<u32>) {
    let mut numbers: HashMap<K, u32> = HashMap::default();
    let mut first: Vec<u32> = vec![];
    let mut number = |(i, c): (usize, &Candidate)| {
        *numbers.entry(key(c)).or_insert_with(|| {
            first.push(i as u32);
            first.len() as u32 - 1
        })
    };
    (all.iter().enumerate().map(&mut number).collect(), first)
}

/// A schedule, and what each of its ranks keeps.
struct RankMemory {
    schedule: Schedule,
    kept: Vec<Vec<Kept>>,
}

/// Layouts of a space, the fastest first.
pub(super) struct Guesses<'a> {
    form: &'a ClosedForm,
    device: &'a Device,
    all: &'a [Candidate],
    /// By layout, which of the pieces are its own, and which of the ranks.
    inside: Vec<u32>,
    around: Vec<u32>,
    pieces: Vec<Pieces>,
    ranks: Vec<Ranks>,
    /// By layout.
    seconds: Vec<f64>,
    /// Those that may fit, by seconds of the formula; how many of them were looked at.
    order: Vec<u32>,
    at: usize,
    /// Those that were, the fastest last.
    looked_at: Vec<Guess>,
    /// By number of ranks: seconds by which a schedule waits longer than the formula says.
    waits: HashMap<u32, f64>,
    made: HashMap<Order, Rc<RankMemory>>,
    kept_actions: usize,
}

impl<'a> Guesses<'a> {
    /// Of layouts that may fit in the bytes that each of them is left.
    ///
    /// # Errors
    /// `device` if the device lacks products of an element type.
    pub fn of(
        form: &'a ClosedForm,
        device: &'a Device,
        all: &'a [Candidate],
        room: &(dyn Fn(&Candidate) -> usize + Sync),
    ) -> Result<Guesses<'a>> {
        let (inside, first) = numbered(all, Candidate::inside);
        let of = |i: &u32| Pieces::of(&form.question(device, &all[*i as usize]));
        let pieces: Vec<Pieces> =
            threads::all(&first, usize::MAX, of).into_iter().collect::<Result<_>>()?;
        let key = |c: &Candidate| -> Around { (c.inside(), c.layout.pp, c.layout.chunks, c.named) };
        let (around, first) = numbered(all, key);
        let closed = |i: usize| Closed { question: form.question(device, &all[i]), balanced: true };
        let pieces_of = |i: u32| &pieces[inside[i as usize] as usize];
        let mut cuts: HashMap<CutKey, StageLoads> = HashMap::default();
        let mut key = |i: &u32| {
            let (closed, pieces) = (closed(*i as usize), pieces_of(*i));
            let key = closed.cut_key(pieces);
            cuts.entry(key).or_insert_with(|| StageLoads::of(&closed.loads(pieces)));
            (*i, key)
        };
        let first: Vec<(u32, CutKey)> = first.iter().map(&mut key).collect();
        let of = |(i, key): &(u32, CutKey)| closed(*i as usize).ranks(pieces_of(*i), &cuts[key]);
        let runs: Vec<&[(u32, CutKey)]> = first.chunks(RUN).collect();
        let of_run = |run: &&[(u32, CutKey)]| run.iter().map(of).collect::<Vec<_>>();
        let ranks: Vec<Ranks> =
            threads::all(&runs, usize::MAX, of_run).into_iter().flatten().collect();
        let memory = form.memory();
        let starts: Vec<usize> = (0..all.len()).step_by(RUN).collect();
        let of_run = |start: &usize| -> Vec<(f64, bool)> {
            let one = |i: usize| {
                let (c, ranks) = (&all[i], &ranks[around[i] as usize]);
                let moved = form.ifs.moved(|| memory.host(c, ranks.params()));
                let seconds = closed(i).parts(ranks).total() + moved;
                (seconds, memory.least(c) <= room(c) as f64)
            };
            (*start..all.len().min(start + RUN)).map(one).collect()
        };
        let done: Vec<(f64, bool)> =
            threads::all(&starts, usize::MAX, of_run).into_iter().flatten().collect();
        let mut order: Vec<u32> = (0..all.len() as u32).filter(|i| done[*i as usize].1).collect();
        let seconds: Vec<f64> = done.into_iter().map(|d| d.0).collect();
        let by =
            |i: &u32, j: &u32| seconds[*i as usize].total_cmp(&seconds[*j as usize]).then(i.cmp(j));
        order.sort_unstable_by(by);
        Ok(Guesses {
            form,
            device,
            all,
            inside,
            around,
            pieces,
            ranks,
            seconds,
            order,
            at: 0,
            looked_at: vec![],
            waits: HashMap::default(),
            made: HashMap::default(),
            kept_actions: 0,
        })
    }

    /// How many may fit.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// How many are left.
    pub fn left(&self) -> usize {
        self.order.len() - self.at + self.looked_at.len()
    }

    /// True if a layout is one of those that are left.
    pub fn waits(&self, c: &Candidate) -> bool {
        self.order[self.at..].iter().any(|i| self.all[*i as usize] == *c)
            || self.looked_at.iter().any(|g| g.candidate == *c)
    }

    /// The fastest of those that are left, where looking at a schedule never makes it faster.
    pub fn next(&mut self) -> Option<Guess> {
        loop {
            let first = self.looked_at.last().map_or(f64::INFINITY, |g| g.seconds);
            let next = self.order.get(self.at).map(|i| *i as usize);
            let Some(i) = next.filter(|i| self.seconds[*i] < first) else {
                return self.looked_at.pop();
            };
            self.at += 1;
            let g = self.look_at(i);
            let at = self.looked_at.partition_point(|x| x.seconds > g.seconds);
            self.looked_at.insert(at, g);
        }
    }

    /// Of some layouts the first by formula of those that fit, as `fits` says it. It is among those that are left, too.
    pub fn first(
        &mut self,
        of: fn(&Candidate) -> bool,
        fits: impl Fn(&Guess) -> bool,
    ) -> Option<Guess> {
        let some: Vec<u32> =
            self.order.iter().copied().filter(|i| of(&self.all[*i as usize])).collect();
        some.into_iter().take(MOST_LOOKED_AT).map(|i| self.look_at(i as usize)).find(fits)
    }

    /// Whether there is a layout like this one but for what is computed again: it is legal, and one that was asked for.
    pub fn have(&self, c: &Candidate) -> bool {
        let recompute = c.layout.recompute;
        self.all.iter().any(|x| Candidate { layout: Layout { recompute, ..x.layout }, ..*x } == *c)
    }

    /// A layout that is not among these, whatever its schedule makes ranks wait.
    ///
    /// # Errors
    /// `device` if the device lacks products of an element type.
    pub fn another(&mut self, candidate: Candidate) -> Result<Guess> {
        let made = self.made(memory::order(&candidate));
        let closed = self.closed(&candidate);
        let pieces = Pieces::of(&closed.question)?;
        let loads = closed.loads(&pieces);
        let ranks = closed.ranks(&pieces, &StageLoads::of(&loads));
        let memory = self.form.memory();
        let moved = self.form.ifs.moved(|| memory.host(&candidate, ranks.params()));
        let likely = memory.likely(&candidate, &loads, &made.kept);
        Ok(Guess { candidate, seconds: closed.parts(&ranks).total() + moved, likely })
    }

    fn look_at(&mut self, i: usize) -> Guess {
        let candidate = self.all[i];
        let made = self.made(memory::order(&candidate));
        let around = self.around[i];
        let known = self.waits.get(&around).copied();
        let waits = known.unwrap_or_else(|| self.waits_of(i, &made.schedule));
        self.waits.insert(around, waits);
        let closed = self.closed(&candidate);
        let loads = closed.loads(&self.pieces[self.inside[i] as usize]);
        let likely = self.form.memory().likely(&candidate, &loads, &made.kept);
        Guess { candidate, seconds: self.seconds[i] + waits, likely }
    }

    fn closed<'b>(&'b self, c: &'b Candidate) -> Closed<'b> {
        Closed { question: self.form.question(self.device, c), balanced: true }
    }

    fn made(&mut self, order: Order) -> Rc<RankMemory> {
        if let Some(made) = self.made.get(&order) {
            return made.clone();
        }
        let (named, p, v, m) = order;
        let schedule = make(named, p, v, m).expect("layouts are legal");
        self.kept_actions += 3 * p * v * m;
        if self.kept_actions > MOST_KEPT {
            (self.made, self.kept_actions) = (HashMap::default(), 3 * p * v * m);
        }
        let made = Rc::new(RankMemory { kept: memory::kept(&schedule), schedule });
        self.made.insert(order, made.clone());
        made
    }

    /// What a layout's own schedule makes ranks wait, if that is more than the formula says. Of many microbatches as
    /// many are run as fill the schedule.
    fn waits_of(&self, i: usize, schedule: &Schedule) -> f64 {
        let (c, pieces) = (&self.all[i], &self.pieces[self.inside[i] as usize]);
        let (p, v, m) = (c.layout.pp, c.layout.chunks, schedule.microbatches);
        if p == 1 || 3 * p * v * m > MOST_ACTIONS {
            return 0.0;
        }
        let mut of = [vec![], vec![], vec![]];
        let mut own = vec![0.0f64; p];
        for (rank, load) in self.closed(c).stages(pieces) {
            let seconds = pieces.seconds(&load);
            own[rank] += seconds.iter().sum::<f64>();
            of.iter_mut().zip(seconds).for_each(|(all, s)| all.push(s));
        }
        let [forward, input, weight] = of;
        let times = Times { forward, input, weight };
        let span = replay(schedule, &times).expect("layouts are legal").makespan();
        let longest = own.iter().copied().fold(0.0, f64::max);
        let formula = self.ranks[self.around[i] as usize].bubble();
        (span - m as f64 * longest - formula).max(0.0)
    }
}

#[cfg(test)]
mod tests;
