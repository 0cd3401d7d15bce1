//! What every rank does in a step: calls, and the transfers between ranks of the pipeline.
//!
//! Transfers follow from the edges: what one rank of the pipeline makes and another uses is offered
//! as soon as it is made and taken just before it is used. Between two ranks, in one direction, the
//! order of taking is the order of offering: who needs a later value first takes the earlier ones
//! too. All lists come from one order of all actions in which everything is made before it is used,
//! and wait only for what stands earlier in it, so no list can wait for ever.

use shardc_ir::func::{Func, FuncKind, Module, Port, Role, RoleKind, Value};
use shardc_ir::plan::{Call, Instr, Mode, Transfer};
use shardc_ir::schedule::{ActionKind, Schedule, Timeline};
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

/// The functions of a plan, by what they are for.
#[derive(Clone, Debug, Default)]
pub struct Index {
    /// By stage.
    pub forward: Vec<usize>,
    pub backward: Vec<Option<usize>>,
    pub weight: Vec<Option<usize>>,
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
        let mut found: HashMap<(FuncKind, usize), usize> = HashMap::new();
        for (i, f) in m.funcs.iter().enumerate() {
            let known = f.kind != FuncKind::Model && f.stage < count(f.kind);
            if !known || f.name != f.kind.numbered(f.stage, count(f.kind)) {
                return Err(format!("@{} is no function of its schedule", f.name));
            }
            found.insert((f.kind, f.stage), i);
        }
        let some = |kind: FuncKind| -> Vec<Option<usize>> {
            (0..count(kind)).map(|at| found.get(&(kind, at)).copied()).collect()
        };
        let all = |kind: FuncKind| -> Result<Vec<usize>, String> {
            let lacks = |at| format!("there is no @{}", FuncKind::numbered(kind, at, count(kind)));
            let each = some(kind).into_iter().enumerate();
            each.map(|(at, f)| f.ok_or_else(|| lacks(at))).collect()
        };
        let index = Index {
            forward: all(FuncKind::Forward)?,
            backward: some(FuncKind::Backward),
            weight: some(FuncKind::Weight),
            enter: all(FuncKind::Enter)?,
            finish: some(FuncKind::Finish),
            evaluate: some(FuncKind::Evaluate),
        };
        // A plan that trains has all of them.
        if mode == Mode::Train {
            all(FuncKind::Backward)?;
            all(FuncKind::Finish)?;
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
    /// backwards from the last stage to the first, so that what feeds comes first.
    pub fn loops(&self, s: &Schedule, rank: usize) -> Vec<usize> {
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
    let step = Lister::new(m, s, index).step(t)?;
    let trains = index.evaluate.iter().any(Option::is_some);
    let evaluation = match trains {
        true => Lister::new(m, s, index).evaluation(t)?,
        false => vec![vec![]; s.ranks.len()],
    };
    let both = step.into_iter().zip(evaluation);
    Ok(both.map(|(step, evaluation)| Lists { step, evaluation }).collect())
}

/// A value in flight: the number of its role, and the microbatch.
type Item = (usize, Option<usize>);

/// The number of gradients that others have made, which are taken as soon as they are offered.
const GRADIENT: usize = usize::MAX;

/// What one rank of the pipeline makes and others use.
struct Crossing<'a> {
    role: &'a Role,
    /// The rank that makes it.
    maker: Option<usize>,
    /// Which ranks of the pipeline use it, and where first.
    users: BTreeMap<usize, (usize, Value)>,
}

struct Lister<'a> {
    m: &'a Module,
    s: &'a Schedule,
    index: &'a Index,
    lists: Vec<Vec<Instr>>,
    crossing: Vec<Crossing<'a>>,
    /// By function: results that other ranks use, and arguments that others make, by number.
    offered: Vec<Vec<(usize, Value)>>,
    wanted: Vec<Vec<usize>>,
    /// Offered and not taken, by giver and taker.
    flight: BTreeMap<(usize, usize), VecDeque<Item>>,
    /// Taken since the giver last waited.
    taken: BTreeMap<(usize, usize), usize>,
    arrived: HashSet<(usize, Item)>,
}

/// A port whose value goes from one rank of the pipeline to another, if one uses what another makes.
fn crosses(p: &Port) -> Option<&Role> {
    p.role.as_ref().filter(|r| matches!(r.kind, RoleKind::Edge | RoleKind::Ready))
}

impl<'a> Lister<'a> {
    fn new(m: &'a Module, s: &'a Schedule, index: &'a Index) -> Lister<'a> {
        let ranks = s.ranks.len();
        let mut makers: HashMap<&Role, usize> = HashMap::new();
        let mut crossing: Vec<Crossing> = vec![];
        let mut numbers: HashMap<&Role, usize> = HashMap::new();
        let mut wanted = vec![vec![]; m.funcs.len()];
        for rank in 0..ranks {
            let funcs = index.funcs(s, rank);
            let made = funcs.iter().flat_map(|&f| m.funcs[f].results.iter().filter_map(crosses));
            let own: HashSet<&Role> = made.collect();
            makers.extend(own.iter().map(|&role| (role, rank)));
            for &f in &funcs {
                let func: &'a Func = &m.funcs[f];
                for a in &func.args {
                    let Some(role) = crosses(a).filter(|r| !own.contains(r)) else { continue };
                    let number = *numbers.entry(role).or_insert_with(|| {
                        crossing.push(Crossing { role, maker: None, users: BTreeMap::new() });
                        crossing.len() - 1
                    });
                    crossing[number].users.entry(rank).or_insert((f, a.value));
                    wanted[f].push(number);
                }
            }
        }
        for c in &mut crossing {
            c.maker = makers.get(c.role).copied();
        }
        let number = |p: &Port| Some((*numbers.get(p.role.as_ref()?)?, p.value));
        let offered = m.funcs.iter().map(|f| f.results.iter().filter_map(number).collect());
        Lister {
            m,
            s,
            index,
            lists: vec![vec![]; ranks],
            offered: offered.collect(),
            crossing,
            wanted,
            flight: BTreeMap::new(),
            taken: BTreeMap::new(),
            arrived: HashSet::new(),
        }
    }

    fn step(mut self, t: &Timeline) -> Result<Vec<Vec<Instr>>, String> {
        self.begin()?;
        for &(rank, i) in &t.order {
            let a = self.s.ranks[rank][i];
            let (backward, weight) = (self.index.backward[a.stage], self.index.weight[a.stage]);
            let funcs: SmallVec<[usize; 2]> = match a.kind {
                ActionKind::Forward => SmallVec::from_slice(&[self.index.forward[a.stage]]),
                ActionKind::Backward => backward.into_iter().chain(weight).collect(),
                ActionKind::Input => backward.into_iter().collect(),
                ActionKind::Weight => weight.into_iter().collect(),
            };
            for f in funcs {
                self.call(rank, f, Some(a.microbatch))?;
            }
        }
        self.foreign_gradients()?;
        for rank in 0..self.lists.len() {
            if let Some(f) = self.index.finish[rank] {
                self.call(rank, f, None)?;
            }
        }
        Ok(self.end())
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

    /// Gradients of parameters go from who used them to their owners.
    fn foreign_gradients(&mut self) -> Result<(), String> {
        for owner in 0..self.lists.len() {
            let Some(finish) = self.index.finish[owner] else { continue };
            let func = &self.m.funcs[finish];
            for a in &func.args {
                let Some(role) = &a.role else { continue };
                let RoleKind::GradFrom(from) = role.kind else { continue };
                let lost = || format!("nobody makes {role}");
                let from = from as usize;
                if from >= self.lists.len() || from == owner {
                    return Err(lost());
                }
                let grad = Role { kind: RoleKind::Grad, name: role.name.clone() };
                let made = self.index.loops(self.s, from).into_iter().rev().find_map(|f| {
                    let r = &self.m.funcs[f].results;
                    Some((f, r.iter().find(|r| r.role.as_ref() == Some(&grad))?.value))
                });
                let (f, value) = made.ok_or_else(lost)?;
                self.offer(from, owner, (GRADIENT, None), f, value);
                self.take(from, owner, (finish, a.value))?;
            }
        }
        Ok(())
    }

    fn call(&mut self, rank: usize, func: usize, microbatch: Option<usize>) -> Result<(), String> {
        self.receive_all(rank, func, microbatch)?;
        self.wait(rank);
        self.lists[rank].push(Instr::Call(Call { func, microbatch, frames: SmallVec::new() }));
        for k in 0..self.offered[func].len() {
            let (number, value) = self.offered[func][k];
            for to in self.crossing[number].users.keys().copied().collect::<SmallVec<[usize; 4]>>()
            {
                self.offer(rank, to, (number, microbatch), func, value);
            }
        }
        Ok(())
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
            let (m, role, maker) =
                (self.m, self.crossing[number].role, self.crossing[number].maker);
            // Parameters come once per step, and before anything else.
            if (role.kind == RoleKind::Ready) != microbatch.is_none() {
                continue;
            }
            let lost = || format!("@{}: nobody has made {role}", m.funcs[func].name);
            let item = (rank, (number, microbatch));
            let from = maker.ok_or_else(lost)?;
            while !self.arrived.contains(&item) {
                let next = self.flight.get(&(from, rank)).and_then(VecDeque::front);
                let next = self.crossing.get(next.ok_or_else(lost)?.0);
                let to = next.and_then(|c| c.users.get(&rank)).copied();
                self.take(from, rank, to.ok_or_else(lost)?)?;
            }
        }
        Ok(())
    }

    fn offer(&mut self, from: usize, to: usize, item: Item, func: usize, value: Value) {
        let t = self.transfer(func, value, item.1, to);
        self.lists[from].push(Instr::Send(t));
        self.flight.entry((from, to)).or_default().push_back(item);
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
