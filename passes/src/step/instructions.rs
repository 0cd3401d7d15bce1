//! What every rank does in a step: calls, and the transfers between ranks of the pipeline.
//!
//! Transfers follow from the edges: what one rank of the pipeline makes and another uses is offered
//! as soon as it is made and taken just before it is used. Between two ranks, in one direction, the
//! order of taking is the order of offering: who needs a later value first takes the earlier ones
//! too. All lists come from one order of all actions in which everything is made before it is used,
//! and wait only for what stands earlier in it, so no list can wait for ever.

use shardc_ir::func::{FuncKind, Module, Port, Role, RoleKind, Value};
use shardc_ir::maps::{HashMap, HashSet};
use shardc_ir::plan::{Call, Instr, Mode, Transfer};
use shardc_ir::schedule::{Action, ActionKind, Schedule, Timeline};
use smallvec::SmallVec;
use std::collections::{BTreeMap, VecDeque};

/// The functions of a plan, by what they are for.
#[derive(Clone, Debug, Default)]
pub struct Index {
    /// By stage.
    pub forward: Vec<usize>,
    pub backward: Vec<Option<usize>>,
    pub weight: Vec<Option<usize>>,
    /// What is called in place of a function for the last microbatch of its stage, if another one is.
    pub last: BTreeMap<usize, usize>,
    /// By rank of the pipeline.
    pub enter: Vec<usize>,
    pub finish: Vec<Option<usize>>,
    pub evaluate: Vec<Option<usize>>,
}

impl Index {
    /// Finds the functions of a module by kind and stage; says which is missing, twice there, or not of
    /// this schedule.
    pub fn of(m: &Module, s: &Schedule, mode: Mode) -> Result<Index, String> {
        let (stages, ranks) = (s.owner.len(), s.ranks.len());
        let count = |kind: FuncKind| if kind.is_looped() { stages } else { ranks };
        let mut found: HashMap<(FuncKind, usize), usize> = HashMap::default();
        for (i, f) in m.funcs.iter().enumerate() {
            let known = f.kind != FuncKind::Model && f.stage < count(f.kind);
            if !known || f.name != f.kind.numbered(f.stage, count(f.kind)) {
                return Err(format!("@{} is not a function of its schedule", f.name));
            }
            found.insert((f.kind, f.stage), i);
        }
        let some = |kind: FuncKind| -> Vec<Option<usize>> {
            (0..count(kind)).map(|at| found.get(&(kind, at)).copied()).collect()
        };
        let lacks =
            |kind, at| format!("there is no @{}", FuncKind::numbered(kind, at, count(kind)));
        let all = |kind: FuncKind| -> Result<Vec<usize>, String> {
            let each = some(kind).into_iter().enumerate();
            each.map(|(at, f)| f.ok_or_else(|| lacks(kind, at))).collect()
        };
        let mut last = BTreeMap::new();
        for (&(kind, at), &f) in found.iter().filter(|x| x.0.0 != x.0.0.plain()) {
            let plain = found.get(&(kind.plain(), at));
            last.insert(*plain.ok_or_else(|| lacks(kind.plain(), at))?, f);
        }
        let index = Index {
            last,
            forward: all(FuncKind::Forward)?,
            backward: some(FuncKind::Backward),
            weight: some(FuncKind::Weight),
            enter: all(FuncKind::StepPrologue)?,
            finish: some(FuncKind::OptimizerStep),
            evaluate: some(FuncKind::Evaluate),
        };
        // A plan that trains has all of them.
        if mode == Mode::Train {
            all(FuncKind::Backward)?;
            all(FuncKind::OptimizerStep)?;
            if s.splits_backward() {
                all(FuncKind::Weight)?;
            }
            if index.evaluate.iter().flatten().count() != 1 {
                return Err("there is not 1 @evaluate".into());
            }
        }
        Ok(index)
    }

    /// The functions of a rank of the pipeline that run once per microbatch: forwards, then
    /// backwards from the last stage to the first, so that what feeds comes first. What runs for the last microbatch
    /// of a stage stands behind all that runs for the others.
    pub fn loops(&self, s: &Schedule, rank: usize) -> Vec<usize> {
        let mut all = self.plain_loops(s, rank);
        let last: Vec<usize> = all.iter().filter_map(|f| self.last.get(f)).copied().collect();
        all.extend(last);
        all
    }

    /// The same, without what runs for last microbatches only.
    fn plain_loops(&self, s: &Schedule, rank: usize) -> Vec<usize> {
        let own = s.stages_of(rank);
        let back = own.iter().rev().flat_map(|&i| [self.backward[i], self.weight[i]]);
        own.iter().map(|&i| self.forward[i]).chain(back.flatten()).collect()
    }

    /// All functions of a rank of the pipeline, in the order in which they feed each other.
    pub fn funcs(&self, s: &Schedule, rank: usize) -> Vec<usize> {
        let mut all = vec![self.enter[rank]];
        all.extend(self.loops(s, rank));
        all.extend(self.finish[rank].into_iter().chain(self.evaluate[rank]));
        all
    }
}

/// The lists of a rank of the pipeline: a step, and an evaluation (empty without training). Offsets
/// are not known yet: they are 0, and calls have no frames.
#[derive(Clone, Debug, Default)]
pub struct Lists {
    pub step: Vec<Instr>,
    pub evaluation: Vec<Instr>,
}

/// The lists of all ranks of the pipeline; says what the functions lack if they do not fit together.
pub fn instructions(
    m: &Module,
    s: &Schedule,
    t: &Timeline,
    index: &Index,
) -> Result<Vec<Lists>, String> {
    let lister = Lister::new(m, s, index);
    let step = lister.clone().step(t)?;
    let trains = index.evaluate.iter().any(Option::is_some);
    let evaluation = match trains {
        true => lister.evaluation(t)?,
        false => vec![vec![]; s.ranks.len()],
    };
    let both = step.into_iter().zip(evaluation);
    Ok(both.map(|(step, evaluation)| Lists { step, evaluation }).collect())
}

/// A value in flight: the number of what crosses, and the microbatch.
type ValueInFlight = (usize, Option<usize>);

/// What one rank of the pipeline makes and others use, by the role that its users know it by.
#[derive(Clone)]
struct Crossing {
    role: Role,
    /// Who makes it: rank, function and value.
    maker: Option<(usize, usize, Value)>,
    /// Which ranks of the pipeline use it, and where first.
    users: BTreeMap<usize, (usize, Value)>,
}

/// When a value goes from one rank of the pipeline to another.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// Once per step, before the microbatches: parameters, made ready by their owner.
    Before,
    /// For each microbatch, as soon as it is made: what another stage goes on with.
    Each,
    /// Once per step, behind the microbatches: gradients, for the owners of their parameters.
    After,
}

/// When a value of this kind crosses, if one rank uses what another makes.
fn moment(kind: RoleKind) -> Option<Moment> {
    match kind {
        RoleKind::Unsharded => Some(Moment::Before),
        RoleKind::Edge => Some(Moment::Each),
        RoleKind::GradFrom(_) => Some(Moment::After),
        _stays => None,
    }
}

/// The role by which others know what a rank of the pipeline makes.
fn as_others_know(role: &Role, rank: usize) -> Option<Role> {
    let kind = match role.kind {
        RoleKind::Grad => RoleKind::GradFrom(rank as u32),
        kind => kind,
    };
    moment(kind).map(|_| Role { kind, name: role.name.clone() })
}

#[derive(Clone)]
struct Lister<'a> {
    m: &'a Module,
    s: &'a Schedule,
    index: &'a Index,
    lists: Vec<Vec<Instr>>,
    crossing: Vec<Crossing>,
    /// By function: what it makes for other ranks, and what it needs of them, by number.
    offered: Vec<Vec<usize>>,
    wanted: Vec<Vec<usize>>,
    /// Offered and not taken, by giver and taker.
    flight: BTreeMap<(usize, usize), VecDeque<ValueInFlight>>,
    /// Taken since the giver last waited.
    taken: BTreeMap<(usize, usize), usize>,
    arrived: HashSet<(usize, ValueInFlight)>,
}

impl<'a> Lister<'a> {
    fn new(m: &'a Module, s: &'a Schedule, index: &'a Index) -> Lister<'a> {
        let ranks = s.ranks.len();
        let mut makers: HashMap<Role, (usize, usize, Value)> = HashMap::default();
        let mut crossing: Vec<Crossing> = vec![];
        let mut numbers: HashMap<&Role, usize> = HashMap::default();
        let mut wanted = vec![vec![]; m.funcs.len()];
        for rank in 0..ranks {
            let funcs = index.funcs(s, rank);
            let mut own: HashSet<Role> = HashSet::default();
            for &f in &funcs {
                let known = |p: &Port| Some((as_others_know(p.role.as_ref()?, rank)?, p.value));
                for (role, value) in m.funcs[f].results.iter().filter_map(known) {
                    own.insert(role.clone());
                    // Where several functions add to it, the last one has all.
                    makers.insert(role, (rank, f, value));
                }
            }
            for &f in &funcs {
                for a in &m.funcs[f].args {
                    let Some(role) = a.role.as_ref().filter(|r| moment(r.kind).is_some()) else {
                        continue;
                    };
                    if own.contains(role) {
                        continue;
                    }
                    let number = *numbers.entry(role).or_insert_with(|| {
                        let (role, users) = (role.clone(), BTreeMap::new());
                        crossing.push(Crossing { role, maker: None, users });
                        crossing.len() - 1
                    });
                    crossing[number].users.entry(rank).or_insert((f, a.value));
                    wanted[f].push(number);
                }
            }
        }
        let mut offered: Vec<Vec<(usize, usize)>> = vec![vec![]; m.funcs.len()];
        for (number, c) in crossing.iter_mut().enumerate() {
            c.maker = makers.get(&c.role).copied();
            if let Some((_, f, value)) = c.maker {
                let at = m.funcs[f].results.iter().position(|r| r.value == value);
                offered[f].push((at.unwrap_or_default(), number));
            }
        }
        // In the order of results.
        let in_order = |mut all: Vec<(usize, usize)>| {
            all.sort_unstable();
            all.into_iter().map(|x| x.1).collect()
        };
        Lister {
            m,
            s,
            index,
            lists: vec![vec![]; ranks],
            offered: offered.into_iter().map(in_order).collect(),
            crossing,
            wanted,
            flight: BTreeMap::new(),
            taken: BTreeMap::new(),
            arrived: HashSet::default(),
        }
    }

    fn step(mut self, t: &Timeline) -> Result<Vec<Vec<Instr>>, String> {
        self.begin()?;
        // By function: the last action that calls it.
        let mut last: HashMap<usize, usize> = HashMap::default();
        for list in &self.s.ranks {
            for (i, a) in list.iter().enumerate() {
                last.extend(self.funcs(a).into_iter().map(|f| (f, i)));
            }
        }
        for &(rank, i) in &t.order {
            let a = self.s.ranks[rank][i];
            for f in self.funcs(&a) {
                let other = self.index.last.get(&f).filter(|_| last[&f] == i);
                self.call(rank, other.copied().unwrap_or(f), Some(a.microbatch))?;
            }
        }
        self.hand_over()?;
        for rank in 0..self.lists.len() {
            if let Some(f) = self.index.finish[rank] {
                self.call(rank, f, None)?;
            }
        }
        Ok(self.end())
    }

    /// What an action calls.
    fn funcs(&self, a: &Action) -> SmallVec<[usize; 2]> {
        let (backward, weight) = (self.index.backward[a.stage], self.index.weight[a.stage]);
        match a.kind {
            ActionKind::Forward => SmallVec::from_slice(&[self.index.forward[a.stage]]),
            ActionKind::Backward => backward.into_iter().chain(weight).collect(),
            ActionKind::Input => backward.into_iter().collect(),
            ActionKind::Weight => weight.into_iter().collect(),
        }
    }

    fn evaluation(mut self, t: &Timeline) -> Result<Vec<Vec<Instr>>, String> {
        self.begin()?;
        for &(rank, i) in &t.order {
            let a = self.s.ranks[rank][i];
            if a.kind == ActionKind::Forward {
                self.call(rank, self.index.forward[a.stage], Some(a.microbatch))?;
            }
        }
        for rank in 0..self.lists.len() {
            if let Some(f) = self.index.evaluate[rank] {
                self.call(rank, f, None)?;
            }
        }
        Ok(self.end())
    }

    /// Parameters are made ready by their owners and sent to who else uses them.
    fn begin(&mut self) -> Result<(), String> {
        for rank in 0..self.lists.len() {
            self.call(rank, self.index.enter[rank], None)?;
        }
        for rank in 0..self.lists.len() {
            for f in self.index.loops(self.s, rank) {
                self.receive_all(rank, f, None)?;
            }
        }
        Ok(())
    }

    /// What was summed over the microbatches goes to who ends the step with it.
    fn hand_over(&mut self) -> Result<(), String> {
        for rank in 0..self.lists.len() {
            for f in self.index.plain_loops(self.s, rank) {
                self.offer_all(f, Moment::After, None);
            }
        }
        for rank in 0..self.lists.len() {
            if let Some(f) = self.index.finish[rank] {
                self.receive_all(rank, f, None)?;
            }
        }
        Ok(())
    }

    fn call(&mut self, rank: usize, func: usize, microbatch: Option<usize>) -> Result<(), String> {
        self.receive_all(rank, func, microbatch)?;
        self.wait(rank);
        self.lists[rank].push(Instr::Call(Call { func, microbatch, frames: SmallVec::new() }));
        let moment = if microbatch.is_some() { Moment::Each } else { Moment::Before };
        self.offer_all(func, moment, microbatch);
        Ok(())
    }

    /// Offers what a function makes that crosses at this moment to all who use it.
    fn offer_all(&mut self, func: usize, at: Moment, microbatch: Option<usize>) {
        for k in 0..self.offered[func].len() {
            let number = self.offered[func][k];
            let c = &self.crossing[number];
            let Some((rank, _, value)) = c.maker.filter(|_| moment(c.role.kind) == Some(at)) else {
                continue;
            };
            for to in c.users.keys().copied().collect::<SmallVec<[usize; 4]>>() {
                let t = self.transfer(func, value, microbatch, to);
                self.lists[rank].push(Instr::Send(t));
                self.flight.entry((rank, to)).or_default().push_back((number, microbatch));
            }
        }
    }

    /// Takes what a function needs of other ranks of the pipeline.
    fn receive_all(
        &mut self,
        rank: usize,
        func: usize,
        microbatch: Option<usize>,
    ) -> Result<(), String> {
        for k in 0..self.wanted[func].len() {
            let number = self.wanted[func][k];
            let Crossing { role, maker, .. } = &self.crossing[number];
            if (moment(role.kind) == Some(Moment::Each)) != microbatch.is_some() {
                continue;
            }
            let item = (rank, (number, microbatch));
            let from = maker.ok_or_else(|| self.lost(func, number))?.0;
            while !self.arrived.contains(&item) {
                let next = self.flight.get(&(from, rank)).and_then(VecDeque::front);
                let next = self.crossing.get(next.ok_or_else(|| self.lost(func, number))?.0);
                let to = next.and_then(|c| c.users.get(&rank)).copied();
                self.take(from, rank, to.ok_or_else(|| self.lost(func, number))?)?;
            }
        }
        Ok(())
    }

    fn lost(&self, func: usize, number: usize) -> String {
        format!("@{}: nobody has made {}", self.m.funcs[func].name, self.crossing[number].role)
    }

    /// Takes the oldest offer, as this value of this function.
    fn take(
        &mut self,
        from: usize,
        to: usize,
        (func, value): (usize, Value),
    ) -> Result<(), String> {
        let offered = self.flight.get_mut(&(from, to)).and_then(VecDeque::pop_front);
        let item = offered.ok_or_else(|| format!("nothing is sent from {from} to {to}"))?;
        let t = self.transfer(func, value, item.1, from);
        self.lists[to].push(Instr::Recv(t));
        *self.taken.entry((from, to)).or_default() += 1;
        self.arrived.insert((to, item));
        Ok(())
    }

    fn transfer(
        &self,
        func: usize,
        value: Value,
        microbatch: Option<usize>,
        with: usize,
    ) -> Transfer {
        let bytes = self.m.funcs[func].ty(value).local_bytes(&self.m.mesh);
        Transfer { func, value, microbatch, with, offset: 0, bytes }
    }

    /// Waits for the offers of a rank that were taken by now.
    fn wait(&mut self, rank: usize) {
        for ((_, to), n) in self.taken.range_mut((rank, 0)..(rank + 1, 0)) {
            self.lists[rank].extend((0..*n).map(|_| Instr::Sent { to: *to }));
            *n = 0;
        }
    }

    fn end(mut self) -> Vec<Vec<Instr>> {
        (0..self.lists.len()).for_each(|rank| self.wait(rank));
        self.lists
    }
}
