//! The plan as one program of whole tensors: functions of all ranks of the pipeline joined by roles, one
//! microbatch that stands for all of them.
//!
//! A function runs as soon as its arguments are there. What the functions of a microbatch add to an
//! accumulator must not depend on it; then a step adds the sum over the microbatches.

mod last;

use crate::ledger::{Gap, Ledger, Texts};
use crate::meaning;
use crate::number::Coef;
use crate::part::Part;
use crate::term::{Leaf, Mentions, Origin, Store, Term};
use shardc_ir::func::{Func, FuncKind, Module, Node, Role, RoleKind};
use shardc_ir::maps::HashSet;
use shardc_ir::mesh::{AtomSet, PIPELINE};
use shardc_ir::ops::Op;
use shardc_ir::schedule::Schedule;
use std::collections::{BTreeMap, BTreeSet};

/// What the functions of a plan make, by role.
pub struct Whole<'a> {
    pub s: Store,
    pub ledger: Ledger,
    pub texts: Texts<'a>,
    /// Nodes that were read.
    pub nodes: usize,
    m: &'a Module,
    schedule: &'a Schedule,
    pipeline: AtomSet,
    /// Of a rank of the pipeline.
    own: BTreeMap<(usize, Role), Term>,
    /// By role: the ranks that have it.
    owners: BTreeMap<Role, BTreeSet<usize>>,
    edges: BTreeMap<Role, Term>,
    /// Accumulators that begin at 0.
    zeroed: BTreeSet<(usize, Role)>,
    /// What a microbatch adds to accumulators, by rank.
    added: BTreeMap<(usize, Role), Vec<Term>>,
    /// By role: the ranks that add to it.
    sharers: BTreeMap<Role, Vec<usize>>,
    /// By function: what it adds.
    shares: BTreeMap<(usize, Role), Term>,
    /// Accumulators that the last microbatch hands on as a sum over ranks.
    summed: BTreeSet<(usize, Role)>,
    /// What is shown for a microbatch.
    pub outputs: BTreeMap<Role, Vec<Term>>,
}

/// What one call gives, or that it has to wait for a role.
enum Called {
    Made(Vec<Term>),
    Waits(Role),
}

/// Sums over the stages of the pipeline: those that are known, and the terms that were met.
#[derive(Default)]
struct Stages {
    known: Vec<Term>,
    met: BTreeMap<(usize, usize), Term>,
}

/// Results of the functions that end a step, by role.
pub type Results = BTreeMap<Role, Vec<Term>>;

impl<'a> Whole<'a> {
    pub fn new(texts: Texts<'a>, schedule: &'a Schedule) -> Whole<'a> {
        let m = texts.programs;
        Whole {
            s: Store::default(),
            ledger: Ledger::default(),
            texts,
            nodes: 0,
            m,
            schedule,
            pipeline: m.mesh.axis(PIPELINE).unwrap_or_default(),
            own: BTreeMap::new(),
            owners: BTreeMap::new(),
            edges: BTreeMap::new(),
            zeroed: BTreeSet::new(),
            added: BTreeMap::new(),
            sharers: BTreeMap::new(),
            shares: BTreeMap::new(),
            summed: BTreeSet::new(),
            outputs: BTreeMap::new(),
        }
    }

    fn parts(&self) -> Vec<(usize, Part)> {
        let part = |(i, f): (usize, &Func)| Some((i, Part::of(f)?));
        self.m.funcs.iter().enumerate().filter_map(part).collect()
    }

    /// What is the same before and in every step: a leaf.
    pub fn leaf(&mut self, role: &Role, shape: &[usize], of_microbatch: bool) -> Term {
        let rows = role.kind.input().is_some_and(|i| i.batch);
        match rows && of_microbatch {
            true => self.s.leaf(Leaf::OfMicrobatch(role.clone()), shape, Mentions::MICROBATCH),
            false => self.s.leaf(role, shape, Mentions::default()),
        }
    }

    fn accumulator(&mut self, role: &Role, shape: &[usize]) -> Term {
        let name = format!("accumulator {role}");
        self.s.leaf(&*name, shape, Mentions::ACCUMULATOR)
    }

    /// The term of an argument; `None` if nothing has made it yet.
    fn bind(&mut self, rank: usize, part: Part, role: &Role, shape: &[usize]) -> Option<Term> {
        match role.kind {
            RoleKind::Param | RoleKind::State(_) | RoleKind::Scalar | RoleKind::Input(_) => {
                Some(self.leaf(role, shape, part.of_microbatch()))
            }
            RoleKind::Grad | RoleKind::Sum | RoleKind::TokensPerExpert if part.of_microbatch() => {
                Some(self.accumulator(role, shape))
            }
            RoleKind::GradFrom(from) => {
                let made = Role::new(RoleKind::Grad, role.name.clone());
                self.own.get(&(from as usize, made)).copied()
            }
            RoleKind::Edge => self.edges.get(role).copied(),
            // Of the rank itself, or, of a tied parameter and of scalars, of another one: then all that
            // there are must be one.
            RoleKind::Unsharded | RoleKind::Step | RoleKind::Scale => {
                self.own.get(&(rank, role.clone())).copied().or_else(|| {
                    let all = self.made(role);
                    all.first().copied().filter(|t| all.iter().all(|u| u == t))
                })
            }
            RoleKind::Grad
            | RoleKind::GradSum
            | RoleKind::Sum
            | RoleKind::TokensPerExpert
            | RoleKind::Stash
            | RoleKind::Output
            | RoleKind::Metric
            | RoleKind::Mean
            | RoleKind::GradShown => self.own.get(&(rank, role.clone())).copied(),
        }
    }

    fn gap(&self, f: &Func, n: &Node, lemma: String) -> Gap {
        let path = &f.scope_info(n.scope).path;
        let text = shardc_ir::text::node_text(&self.m.mesh, f, n).text;
        let op = n.op.mnemonic().to_string();
        Gap { op, place: format!("@{}, {path}: {text}", f.name), lemma }
    }

    fn call(&mut self, at: usize, part: Part, stages: &mut Stages) -> Result<Called, Gap> {
        let (m, f) = (self.m, &self.m.funcs[at]);
        let rank = part.rank(&self.schedule.owner);
        let mut values: Vec<Option<Term>> = vec![None; f.values.len()];
        for a in &f.args {
            let role = a.role.clone().unwrap_or_else(|| Role::new(RoleKind::Edge, ""));
            let shape = f.ty(a.value).sizes();
            match self.bind(rank, part, &role, &shape) {
                Some(t) if self.s.shape(t) == &shape[..] => values[a.value.0 as usize] = Some(t),
                Some(_) => {
                    let lemma = format!("{role} has other sizes where it is made");
                    return Err(Gap { op: "call".into(), place: format!("@{}", f.name), lemma });
                }
                None => return Ok(Called::Waits(role)),
            }
        }
        let mut sums = 0;
        for (i, n) in f.nodes.iter().enumerate() {
            self.nodes += 1;
            self.s.here = Some(Origin { func: Some(at as u32), node: i as u32 });
            let ins: Option<Vec<Term>> = n.ins.iter().map(|v| values[v.0 as usize]).collect();
            let ins = ins.ok_or_else(|| self.gap(f, n, "an operand that nothing makes".into()))?;
            let outs = match &n.op {
                Op::AllReduce(a) if a.axes.meets(self.pipeline) => {
                    let mut over_stages = |t: &Term| {
                        stages.met.insert((sums, rank), *t);
                        sums += 1;
                        let shape = self.s.shape(*t).to_vec();
                        let name = format!("sum {sums} over the stages");
                        let unknown = self.s.leaf(&*name, &shape, Mentions::default());
                        stages.known.get(sums - 1).copied().unwrap_or(unknown)
                    };
                    ins.iter().map(&mut over_stages).collect()
                }
                op => {
                    let types = |vs: &[shardc_ir::func::Value]| -> Vec<_> {
                        vs.iter().map(|&v| f.ty(v)).collect()
                    };
                    let [of, to] = [types(&n.ins), types(&n.outs)];
                    let made = meaning::apply(&mut self.s, &m.mesh, op, &ins, [&of, &to]);
                    made.map_err(|lemma| self.gap(f, n, lemma))?
                }
            };
            for (v, t) in n.outs.iter().zip(outs) {
                values[v.0 as usize] = Some(t);
            }
        }
        self.s.here = None;
        let results = f.results.iter().map(|r| values[r.value.0 as usize]);
        let results = results.collect::<Option<_>>().ok_or_else(|| Gap {
            op: "return".into(),
            place: format!("@{}", f.name),
            lemma: "a result that nothing makes".into(),
        })?;
        Ok(Called::Made(results))
    }

    /// Results with their roles.
    fn with_roles(&mut self, at: usize, made: Vec<Term>) -> Vec<(Role, Term)> {
        let f = &self.m.funcs[at];
        let mut out = vec![];
        for (r, t) in f.results.iter().zip(made) {
            match &r.role {
                Some(role) => out.push((role.clone(), t)),
                None => self.ledger.must("composition", false, || {
                    [format!("results of @{}", f.name), "one has no role".into(), "a role".into()]
                }),
            }
        }
        out
    }

    /// Says what a rank has as a role; true if it had that already.
    fn owns(&mut self, rank: usize, role: Role, t: Term) -> bool {
        self.owners.entry(role.clone()).or_default().insert(rank);
        self.own.insert((rank, role), t).is_some()
    }

    /// Keeps what is made; it must be the only one of its role.
    fn keep(&mut self, at: usize, rank: usize, role: Role, t: Term) {
        let twice = match role.kind {
            RoleKind::Edge => self.edges.insert(role.clone(), t).is_some(),
            _own => self.owns(rank, role.clone(), t),
        };
        let f = &self.m.funcs[at];
        self.ledger.must("composition", !twice, || {
            [role.to_string(), format!("@{} makes it once more", f.name), "made once".into()]
        });
    }

    /// What a function of a step may make: anything else would change what is stored.
    fn writes(&mut self, at: usize, role: &Role, allowed: bool) {
        let f = &self.m.funcs[at];
        self.ledger.must("composition", allowed, || {
            [role.to_string(), format!("@{} writes it", f.name), "not written there".into()]
        });
    }

    /// Before the microbatches.
    pub fn enter(&mut self) -> Result<(), Gap> {
        for (at, part) in self.parts() {
            if part.kind != FuncKind::StepPrologue {
                continue;
            }
            let rank = part.at;
            let made = match self.call(at, part, &mut Stages::default())? {
                Called::Made(made) => self.with_roles(at, made),
                Called::Waits(role) => {
                    self.missing(at, &role);
                    continue;
                }
            };
            for (role, t) in made {
                match role.kind {
                    RoleKind::Grad | RoleKind::Sum | RoleKind::TokensPerExpert => {
                        let shape = self.s.shape(t).to_vec();
                        let zero = self.s.zero(&shape);
                        let what = format!("{role} begins at 0");
                        self.ledger.equal(&self.s, self.texts, "composition", what, Some(t), zero);
                        self.zeroed.insert((rank, role));
                    }
                    RoleKind::Unsharded | RoleKind::Step | RoleKind::Scale => {
                        self.keep(at, rank, role, t);
                    }
                    _stored => self.writes(at, &role, false),
                }
            }
        }
        Ok(())
    }

    fn missing(&mut self, at: usize, role: &Role) {
        let name = &self.m.funcs[at].name;
        let what = format!("argument {role} of @{name}");
        self.ledger.must("composition", false, || {
            [what, "nothing makes it before".into(), "made by one function".into()]
        });
    }

    /// One microbatch that stands for all: every function of it once.
    pub fn microbatch(&mut self) -> Result<(), Gap> {
        let mut todo: Vec<(usize, Part)> = self.parts();
        todo.retain(|x| x.1.of_microbatch());
        let last: Vec<(usize, Part)> = todo.iter().filter(|x| x.1.is_of_last()).copied().collect();
        todo.retain(|x| !x.1.is_of_last());
        while !todo.is_empty() {
            let (mut left, mut waits) = (vec![], None);
            let before = todo.len();
            for (at, part) in todo {
                match self.call(at, part, &mut Stages::default())? {
                    Called::Made(made) => self.looped(at, part, made),
                    Called::Waits(role) => {
                        waits = Some((at, role));
                        left.push((at, part));
                    }
                }
            }
            if let Some((at, role)) = waits.filter(|_| left.len() == before) {
                self.missing(at, &role);
                break;
            }
            todo = left;
        }
        for (at, part) in last {
            match self.call(at, part, &mut Stages::default())? {
                Called::Made(made) => self.of_last(at, part, made),
                Called::Waits(role) => self.missing(at, &role),
            }
        }
        self.accumulated();
        Ok(())
    }

    fn looped(&mut self, at: usize, part: Part, made: Vec<Term>) {
        let rank = part.rank(&self.schedule.owner);
        let m = self.m;
        let args: HashSet<&Role> =
            m.funcs[at].args.iter().filter_map(|a| a.role.as_ref()).collect();
        for (role, t) in self.with_roles(at, made) {
            match role.kind {
                RoleKind::Grad | RoleKind::Sum | RoleKind::TokensPerExpert => {
                    let adds = args.contains(&role);
                    self.accumulate(at, rank, role, t, adds);
                }
                RoleKind::GradSum => {
                    let several = self.schedule.microbatches > 1;
                    self.writes(at, &role, !several);
                    let grad = Role::new(RoleKind::Grad, role.name.clone());
                    self.summed.insert((rank, grad.clone()));
                    let adds = args.contains(&grad);
                    self.accumulate(at, rank, grad, t, adds);
                }
                kind if kind.is_shown() => self.outputs.entry(role).or_default().push(t),
                // A parameter that was gathered in forward may be kept for backward.
                RoleKind::Stash | RoleKind::Edge | RoleKind::Unsharded => {
                    self.keep(at, rank, role, t);
                }
                _stored => self.writes(at, &role, false),
            }
        }
    }

    /// A result of an accumulator's role: what it was, and what the microbatch adds. Without it as an
    /// argument (which it `adds` to) the result is all: right only of one microbatch, and of one function.
    fn accumulate(&mut self, at: usize, rank: usize, role: Role, t: Term, adds: bool) {
        let f = &self.m.funcs[at];
        let key = (rank, role.clone());
        let begun = self.zeroed.contains(&key);
        let once = self.schedule.microbatches == 1 && !begun && !self.added.contains_key(&key);
        self.ledger.must("composition", if adds { begun } else { once }, || {
            let what = format!("{role} in @{}", f.name);
            let is = if adds { "added to what does not begin at 0" } else { "set, not added to" };
            [what, is.into(), "a sum over the microbatches".into()]
        });
        let mut share = t;
        if adds {
            let shape = self.s.shape(t).to_vec();
            let before = self.accumulator(&role, &shape);
            share = self.s.sum(&[(Coef::ONE, t), (Coef::ONE.minus(), before)], &shape);
        }
        let free = !self.s.mentions(share).has(Mentions::ACCUMULATOR);
        self.ledger.must("composition", free, || {
            let what = format!("{role} in @{}", f.name);
            [what, "depends on what was there".into(), "added to and not else used".into()]
        });
        self.shares.insert((at, key.1.clone()), share);
        self.added.entry(key).or_default().push(share);
    }

    /// Sums over the microbatches are what functions that end a step are given.
    fn accumulated(&mut self) {
        for ((rank, role), parts) in std::mem::take(&mut self.added) {
            let summed = self.summed.contains(&(rank, role.clone()));
            self.ledger.must("composition", !summed || parts.len() == 1, || {
                let what = format!("{role} is summed over ranks before @optimizer_step");
                [what, format!("{} functions add to it", parts.len()), "one".into()]
            });
            let one = self.s.add(&parts);
            let total = self.s.fold(one, self.schedule.microbatches);
            self.added.insert((rank, role.clone()), vec![one]);
            self.sharers.entry(role.clone()).or_default().push(rank);
            let kind = if summed { RoleKind::GradSum } else { role.kind };
            self.owns(rank, Role::new(kind, role.name), total);
        }
    }

    /// What a microbatch adds to an accumulator, on all ranks of the pipeline together.
    pub fn share(&mut self, role: &Role) -> Option<Term> {
        let ranks = self.sharers.get(role).into_iter().flatten();
        let parts: Vec<Term> =
            ranks.flat_map(|&rank| self.added[&(rank, role.clone())].clone()).collect();
        (!parts.is_empty()).then(|| self.s.add(&parts))
    }

    /// Roles that microbatches add to.
    pub fn accumulators(&self) -> Vec<Role> {
        let mut all: Vec<Role> = self.added.keys().map(|x| x.1.clone()).collect();
        all.sort();
        all.dedup();
        all
    }

    /// Terms of a role that is made once per step, on all ranks of the pipeline that do.
    pub fn made(&self, role: &Role) -> Vec<Term> {
        let ranks = self.owners.get(role).into_iter().flatten();
        ranks.map(|&rank| self.own[&(rank, role.clone())]).collect()
    }

    /// Where the model makes the first value, of those of its nodes, that no function of the plan made in its form: these
    /// were read before.
    pub fn of_model_alone(&self, model: &Func, values: &[Option<Term>]) -> Option<String> {
        let made = model.nodes.iter().flat_map(|n| &n.outs);
        let mut made = made.filter_map(|v| self.s.origin(values[v.0 as usize]?));
        made.find(|o| o.func.is_none()).and_then(|o| self.texts.place(o))
    }

    /// After the microbatches: sums over the stages one after the other, since a later one may be of
    /// what an earlier one gave.
    pub fn finish(&mut self) -> Result<Results, Gap> {
        let all: Vec<(usize, Part)> = self.parts();
        let all: Vec<_> = all.into_iter().filter(|x| x.1.kind == FuncKind::OptimizerStep).collect();
        let mut stages = Stages::default();
        loop {
            stages.met.clear();
            let mut results = Results::new();
            for &(at, part) in &all {
                match self.call(at, part, &mut stages)? {
                    Called::Made(made) => {
                        for (role, t) in self.with_roles(at, made) {
                            results.entry(role).or_default().push(t);
                        }
                    }
                    Called::Waits(role) => self.missing(at, &role),
                }
            }
            let next = stages.known.len();
            let met: Vec<Term> =
                stages.met.iter().filter(|x| x.0.0 == next).map(|x| *x.1).collect();
            let Some(&first) = met.first() else { return Ok(results) };
            let alike = met.iter().all(|&t| self.s.shape(t) == self.s.shape(first));
            let complete = met.len() == all.len() && alike;
            self.ledger.must("composition", complete, || {
                let what = format!("sum {} over the stages", next + 1);
                [what, format!("{} ranks take part", met.len()), format!("all {}", all.len())]
            });
            if !complete {
                return Ok(results);
            }
            let sum = self.s.add(&met);
            stages.known.push(sum);
        }
    }

    /// Results of the functions that end an evaluation.
    pub fn evaluate(&mut self) -> Result<Results, Gap> {
        let mut results = Results::new();
        for (at, part) in self.parts() {
            if part.kind != FuncKind::Evaluate {
                continue;
            }
            match self.call(at, part, &mut Stages::default())? {
                Called::Made(made) => {
                    for (role, t) in self.with_roles(at, made) {
                        results.entry(role).or_default().push(t);
                    }
                }
                Called::Waits(role) => self.missing(at, &role),
            }
        }
        Ok(results)
    }
}
