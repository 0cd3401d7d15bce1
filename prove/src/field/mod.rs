//! The second prover: all ranks of a small plan over the field of 2^61 - 1 elements, beside the
//! textbook's terms on the same inputs.
//!
//! No types are believed but where they say which piece a rank holds, no collective is taken out, and the
//! plan is not brought to a normal form: what both provers share is the textbook and the meaning of ops.
//! Sums and products are exact, so equal means equal: a wrong plan has other elements but with a chance
//! of some degree / 2^61. It says nothing of other sizes.

mod cost;
mod evaluate;
pub(crate) mod functions;
mod inputs;
pub(crate) mod ranks;
mod smaller;
pub(crate) mod tensor;
pub(crate) mod witness;

use crate::fun::Fun;
use crate::ledger::{Gap, Refuted, Texts};
use crate::number::{P, add};
use crate::part::Part;
use crate::term::{Leaf, Mentions, Node, Store, Term};
use crate::textbook::Textbook;
use crate::whole::Whole;
use crate::{Report, Subject, Verdict, experts, local};
use cost::{AT_ONCE, LARGEST, UNCHANGED, cost};
pub use evaluate::evaluate;
use functions::{Begins, oracle, seed};
use inputs::Inputs;
use ranks::{Pieces, Ranks};
use shardc_ir::func::{Func, FuncKind, Module, Role, RoleKind};
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::PIPELINE;
use shardc_ir::ops::Op;
use shardc_ir::schedule::Schedule;
use shardc_ir::types::Type;
use std::collections::BTreeMap;
use std::rc::Rc;
use tensor::{Tensor, einsum, times};
use witness::Witness;

/// Data of a step.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    /// Tokens are below this.
    pub vocab: usize,
}

/// How far an evaluation is: so many calls of functions on all ranks, or results of the textbook, are done of all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    pub of: &'static str,
    pub done: usize,
    pub all: usize,
}

/// Hears how far an evaluation is.
type Watch<'a> = dyn FnMut(Progress) + 'a;

/// A tensor of numbers that depend on its name alone.
fn noise(name: &str, shape: &[usize]) -> Tensor {
    let (name, mut k) = (seed(name), 0);
    Tensor::from_fn(shape, |_| {
        k += 1;
        oracle(name, &[k])
    })
}

/// Everything that ranks hold.
struct Run<'a> {
    m: &'a Module,
    schedule: &'a Schedule,
    ranks: Ranks,
    inputs: Inputs,
    own: HashMap<(usize, Role), Pieces>,
    edges: HashMap<Role, Pieces>,
}

/// Sums over the stages, as [`crate::whole`] has them.
#[derive(Default)]
struct StageSums {
    known: Vec<Pieces>,
    met: BTreeMap<(usize, usize), Pieces>,
}

type RankResults = BTreeMap<Role, (Type, Pieces)>;

impl Run<'_> {
    fn bind(&self, rank: usize, f: &Func, value: usize, j: Option<usize>) -> Option<Pieces> {
        let a = &f.args[value];
        let (role, ty) = (a.role.as_ref()?, f.ty(a.value));
        let shape = ty.sizes();
        match role.kind {
            RoleKind::Param | RoleKind::State(_) | RoleKind::Scalar => {
                Some(self.ranks.scatter(ty, &noise(&role.to_string(), &shape)))
            }
            RoleKind::Input(_) => {
                let own = if ty.rank() > 0 { ty.chunk(&self.ranks.mesh, 0) } else { 1 };
                let whole = self.inputs.of(role, j, &shape, own)?;
                (whole.shape == shape[..]).then(|| self.ranks.scatter(ty, &whole))
            }
            RoleKind::GradFrom(from) => self
                .own
                .get(&(from as usize, Role::new(RoleKind::Grad, role.name.clone())))
                .cloned(),
            RoleKind::Edge => self.edges.get(role).cloned(),
            RoleKind::Unsharded | RoleKind::Step | RoleKind::Scale => {
                let own = self.own.get(&(rank, role.clone()));
                own.or_else(|| self.own.iter().find(|x| x.0.1 == *role).map(|x| x.1)).cloned()
            }
            _own => self.own.get(&(rank, role.clone())).cloned(),
        }
    }

    /// Results of a call; `None` if an argument is not there yet.
    fn call(
        &self,
        f: &Func,
        part: Part,
        j: Option<usize>,
        stages: &mut StageSums,
    ) -> Result<Option<Vec<Pieces>>, Gap> {
        let rank = part.rank(&self.schedule.owner);
        let pipeline = self.m.mesh.axis(PIPELINE).unwrap_or_default();
        let mut values: Vec<Option<Pieces>> = vec![None; f.values.len()];
        for (i, a) in f.args.iter().enumerate() {
            let Some(v) = self.bind(rank, f, i, j) else { return Ok(None) };
            values[a.value.0 as usize] = Some(v);
        }
        let mut sums = 0;
        for n in &f.nodes {
            let gap = |lemma: String| {
                let text = shardc_ir::text::node_text(&self.m.mesh, f, n).text;
                Gap { op: n.op.mnemonic().into(), place: format!("@{}: {text}", f.name), lemma }
            };
            let x: Option<Vec<&Pieces>> =
                n.ins.iter().map(|v| values[v.0 as usize].as_ref()).collect();
            let x = x.ok_or_else(|| gap("an operand that nothing makes".into()))?;
            let made = match &n.op {
                Op::AllReduce(k) if k.axes.meets(pipeline) => x
                    .iter()
                    .map(|p| {
                        stages.met.insert((sums, rank), (*p).clone());
                        sums += 1;
                        stages.known.get(sums - 1).unwrap_or(p).clone()
                    })
                    .collect(),
                op => {
                    let of: Vec<&Type> = n.ins.iter().map(|&v| f.ty(v)).collect();
                    let to: Vec<&Type> = n.outs.iter().map(|&v| f.ty(v)).collect();
                    self.ranks.node(op, [&of, &to], &x).map_err(gap)?
                }
            };
            for (v, p) in n.outs.iter().zip(made) {
                values[v.0 as usize] = Some(p);
            }
        }
        Ok(Some(f.results.iter().filter_map(|r| values[r.value.0 as usize].clone()).collect()))
    }

    fn keep(&mut self, f: &Func, part: Part, made: Vec<Pieces>) {
        let rank = part.rank(&self.schedule.owner);
        for (r, p) in f.results.iter().zip(made) {
            let Some(role) = r.role.clone() else { continue };
            if role.kind == RoleKind::Edge {
                self.edges.insert(role, p);
            } else {
                self.own.insert((rank, role), p);
            }
        }
    }

    /// All microbatches: each function as soon as its arguments are there.
    fn loops(&mut self, watch: &mut Watch) -> Result<(), Gap> {
        let m = self.m;
        let parts = m.funcs.iter().filter_map(|f| Some((f, Part::of(f)?)));
        let parts: Vec<(&Func, Part)> = parts.collect();
        for &(f, part) in parts.iter().filter(|x| x.1.kind == FuncKind::StepPrologue) {
            let made = self.call(f, part, None, &mut StageSums::default())?;
            let made = made.ok_or_else(|| waits(f))?;
            self.keep(f, part, made);
        }
        let calls = parts.iter().filter(|x| x.1.of_microbatch() && !x.1.is_of_last()).count();
        let (mut done, all) = (0, calls * self.schedule.microbatches);
        for j in 0..self.schedule.microbatches {
            self.edges.clear();
            self.own.retain(|k, _| k.1.kind != RoleKind::Stash);
            let is_last = j + 1 == self.schedule.microbatches;
            // For the last one some others run.
            let other = |p: Part| parts.iter().any(|x| x.1.is_of_last() && x.1.plain() == p);
            let runs = |p: Part| if p.is_of_last() { is_last } else { !is_last || !other(p) };
            let mut todo: Vec<_> =
                parts.iter().filter(|x| x.1.of_microbatch() && runs(x.1)).collect();
            while let Some(first) = todo.first().copied() {
                let (before, mut left) = (todo.len(), vec![]);
                for x in todo {
                    match self.call(x.0, x.1, Some(j), &mut StageSums::default())? {
                        Some(made) => self.keep(x.0, x.1, made),
                        None => {
                            left.push(x);
                            continue;
                        }
                    }
                    done += 1;
                    watch(Progress { of: "calls on all ranks", done, all });
                }
                if left.len() == before {
                    return Err(waits(first.0));
                }
                todo = left;
            }
        }
        Ok(())
    }

    /// Results of the functions that end a step.
    fn finish(&mut self) -> Result<RankResults, Gap> {
        let mut stages = StageSums::default();
        loop {
            stages.met.clear();
            let mut out = RankResults::new();
            for f in &self.m.funcs {
                let Some(part) = Part::of(f).filter(|p| p.kind == FuncKind::OptimizerStep) else {
                    continue;
                };
                let made = self.call(f, part, None, &mut stages)?.ok_or_else(|| waits(f))?;
                for (r, p) in f.results.iter().zip(made) {
                    let Some(role) = r.role.clone() else { continue };
                    out.insert(role, (f.ty(r.value).clone(), p));
                }
            }
            let next = stages.known.len();
            let mut met = stages.met.iter().filter(|x| x.0.0 == next).map(|x| x.1);
            let Some(first) = met.next() else { return Ok(out) };
            let sum =
                met.fold(first.clone(), |a, b| a.iter().zip(b).map(|(x, y)| x.plus(y)).collect());
            stages.known.push(sum);
        }
    }
}

fn waits(f: &Func) -> Gap {
    let lemma = "an argument that nothing makes".into();
    Gap { op: "call".into(), place: format!("@{}", f.name), lemma }
}

/// A function of terms, for a microbatch.
type Call = (Fun, Box<[Term]>, Option<usize>);

/// The textbook's terms on the same data.
struct Values<'a> {
    s: &'a Store,
    inputs: &'a Inputs,
    /// Rows of a microbatch that an owner has.
    own: usize,
    memo: HashMap<(Term, Option<usize>), Rc<Tensor>>,
    /// All results of functions of several.
    calls: HashMap<Call, Vec<Rc<Tensor>>>,
}

impl<'a> Values<'a> {
    fn new(s: &'a Store, inputs: &'a Inputs, own: usize) -> Values<'a> {
        Values { s, inputs, own, memo: HashMap::default(), calls: HashMap::default() }
    }

    fn of(&mut self, t: Term, j: Option<usize>) -> Result<Rc<Tensor>, String> {
        let j = j.filter(|_| self.s.mentions(t).has(Mentions::MICROBATCH));
        if let Some(v) = self.memo.get(&(t, j)) {
            return Ok(v.clone());
        }
        let shape = self.s.shape(t).to_vec();
        let v = match self.s.node(t).clone() {
            Node::Leaf(name) => {
                let v = self.leaf(&name, &shape, j).filter(|t| t.shape == shape);
                v.ok_or_else(|| format!("{name} has other rows than the batch"))?
            }
            Node::Sum(s) => {
                let mut sum = Tensor::full(&shape, 0);
                for (c, u) in self.s.sums.list(s) {
                    let c = c.in_field();
                    sum = sum.zip(&*self.of(u, j)?, |a, b| add(a, times(c, b), P));
                }
                sum
            }
            Node::Product(f) => {
                let all: Vec<(Rc<Tensor>, Vec<u32>)> = f
                    .iter()
                    .map(|(u, l)| Ok((self.of(*u, j)?, l.iter().map(|&l| u32::from(l)).collect())))
                    .collect::<Result<_, String>>()?;
                let factors: Vec<(&Tensor, &[u32])> =
                    all.iter().map(|(t, l)| (&**t, &l[..])).collect();
                let out: Vec<u32> = (0..shape.len() as u32).collect();
                einsum(&factors, &out, &shape)
            }
            Node::Apply(Fun::Microbatches(_), of, _) => {
                let mut sum = (*self.of(of[0], Some(0))?).clone();
                for j in 1..self.inputs.microbatches {
                    sum = sum.plus(&*self.of(of[0], Some(j))?);
                }
                sum
            }
            Node::Apply(f, args, out) => {
                let key = (f, args, j);
                if let Some(made) = self.calls.get(&key) {
                    return Ok(made[usize::from(out)].clone());
                }
                let (f, args, j) = key;
                let x = args.iter().map(|u| self.of(*u, j)).collect::<Result<Vec<_>, _>>()?;
                let x: Vec<&Tensor> = x.iter().map(|t| &**t).collect();
                let made = f.results(&x, &shape, &Begins::WHOLE)?;
                let made: Vec<Rc<Tensor>> = made.into_iter().map(Rc::new).collect();
                let v = made[usize::from(out)].clone();
                if made.len() > 1 {
                    self.calls.insert((f, args, j), made);
                }
                self.memo.insert((t, j), v.clone());
                return Ok(v);
            }
        };
        let v = Rc::new(v);
        self.memo.insert((t, j), v.clone());
        Ok(v)
    }

    fn leaf(&self, leaf: &Leaf, shape: &[usize], j: Option<usize>) -> Option<Tensor> {
        match leaf {
            Leaf::Role(r) if r.kind.input().is_some() => self.inputs.of(r, None, shape, self.own),
            Leaf::OfMicrobatch(r) => self.inputs.of(r, j, shape, self.own),
            unknown => Some(noise(&unknown.to_string(), shape)),
        }
    }
}

/// Proves a small plan by evaluation: every element that a step leaves on every rank.
pub fn prove(subject: &Subject, data: Data) -> Report {
    prove_watched(subject, data, &mut |_| ())
}

/// The same, and `watch` hears how far it is.
pub fn prove_watched(subject: &Subject, data: Data, watch: &mut dyn FnMut(Progress)) -> Report {
    let mut report = Report::default();
    experts::prove(subject.source, subject.model, &mut report);
    local::prove(subject.programs, true, &mut report);
    if report.verdict() != Verdict::Proved {
        return report;
    }
    let done = match compare(subject, data, AT_ONCE, &mut report, watch) {
        Ok(Some(count)) => match compare_smaller(subject, data, &mut report, watch) {
            Err(_) if count <= UNCHANGED => {
                compare(subject, data, UNCHANGED, &mut report, watch).map(|_| ())
            }
            done => done,
        },
        done => done.map(|_| ()),
    };
    if let Err(gap) = done {
        report.gaps.push(gap);
    }
    report
}

/// The same of a plan made smaller: its programs on axes of two ranks, at the least sizes.
pub fn prove_smaller(subject: &Subject, data: Data) -> Report {
    let mut report = Report::default();
    if let Err(gap) = compare_smaller(subject, data, &mut report, &mut |_| ()) {
        report.gaps.push(gap);
    }
    report
}

fn compare_smaller(
    subject: &Subject,
    data: Data,
    report: &mut Report,
    watch: &mut Watch,
) -> Result<(), Gap> {
    let small = smaller::smaller(subject, data)?;
    let subject = Subject {
        model: &small.model,
        programs: &small.programs,
        recipe: &small.recipe,
        ..*subject
    };
    // What is smaller is a plan as before, or it shows nothing.
    let mut types = Report::default();
    local::prove(subject.programs, false, &mut types);
    if let Some(x) = types.refuted.first() {
        let lemma = format!("to make it smaller: {}", x.plan);
        let place = x.plan_place.clone().unwrap_or_default();
        return Err(Gap { op: x.what.clone(), place, lemma });
    }
    types.gaps.into_iter().next().map_or(Ok(()), Err)?;
    if let Some(count) = compare(&subject, small.data, LARGEST, report, watch)? {
        let lemma = format!(
            "{count:.0} elements and multiplications are too many to compute, at most {LARGEST:.0}"
        );
        return Err(Gap { op: "plan".into(), place: "programs".into(), lemma });
    }
    report.shown.insert("ranks of the plan made smaller", subject.programs.mesh.ranks());
    Ok(())
}

/// Compares ranks with the textbook; or does nothing if that is more than `most`, and says how much it is.
fn compare(
    subject: &Subject,
    data: Data,
    most: f64,
    report: &mut Report,
    watch: &mut Watch,
) -> Result<Option<f64>, Gap> {
    let (m, schedule) = (subject.programs, subject.schedule);
    let inputs = || Inputs::new(subject, data);
    let texts = Texts { programs: m, model: subject.model };
    let mut w = Whole::new(texts, schedule);
    let model = subject.model.funcs.first().ok_or_else(|| Gap {
        op: "model".into(),
        place: "model.ir".into(),
        lemma: "a model is one function".into(),
    })?;
    let book = Textbook::of(&mut w, model, subject.recipe, schedule.microbatches)?;
    if book.step.is_empty() {
        let lemma = "a plan for inference ends no step: prove it by terms".into();
        return Err(Gap { op: "optimizer_step".into(), place: "programs".into(), lemma });
    }
    let ranks = Ranks::new(&m.mesh);
    let terms: Vec<Term> = book.step.values().copied().collect();
    let count = cost(m, &ranks, schedule) + Witness::new(subject).on(&w.s).whole_cost(&terms);
    if count > most {
        return Ok(Some(count));
    }
    let mut run = Run {
        m,
        schedule,
        ranks,
        inputs: inputs(),
        own: HashMap::default(),
        edges: HashMap::default(),
    };
    run.loops(watch)?;
    let made = run.finish()?;
    let own = rows_of_an_owner(m, &run.ranks);
    let inputs = inputs();
    let mut values = Values::new(&w.s, &inputs, own);
    let (mut elements, mut equal) = (0, 0);
    for (done, (role, &term)) in book.step.iter().enumerate() {
        watch(Progress { of: "results of the textbook", done, all: book.step.len() });
        let Some((ty, pieces)) = made.get(role) else {
            if role.kind != RoleKind::GradShown {
                report.refuted.push(differs(role, "nothing makes it".into(), "a value".into()));
            }
            continue;
        };
        let want = values.of(term, None).map_err(|lemma| Gap {
            op: "term".into(),
            place: role.to_string(),
            lemma,
        })?;
        let sizes = ty.sizes();
        if want.shape != sizes[..] {
            let [plan, textbook] = [&sizes[..], &want.shape].map(|s| format!("a tensor of {s:?}"));
            report.refuted.push(differs(role, plan, textbook));
            continue;
        }
        let want = run.ranks.scatter(ty, &want);
        elements += want.iter().map(|t| t.data.len()).sum::<usize>();
        match (0..want.len()).find(|&r| pieces[r] != want[r]) {
            None => equal += 1,
            Some(r) => {
                let pairs = pieces[r].data.iter().zip(&want[r].data);
                let k = pairs.clone().position(|(a, b)| a != b).unwrap_or(0);
                let show = |t: &Tensor| {
                    format!("element {k} of rank {r} is {}", t.data.get(k).copied().unwrap_or(0))
                };
                report.refuted.push(differs(role, show(&pieces[r]), show(&want[r])));
            }
        }
    }
    for role in made.keys().filter(|r| !book.step.contains_key(*r)) {
        report.refuted.push(differs(role, "it is changed".into(), "it stays".into()));
    }
    report.shown.insert("results on all ranks", equal);
    report.shown.insert("elements compared", elements);
    Ok(None)
}

fn differs(role: &Role, plan: String, textbook: String) -> Refuted {
    Refuted { what: role.to_string(), plan, textbook, plan_place: None, textbook_place: None }
}

/// Rows of a microbatch that one owner of rows has.
fn rows_of_an_owner(m: &Module, ranks: &Ranks) -> usize {
    let inputs = m.funcs.iter().filter(|f| f.kind.is_looped()).flat_map(|f| {
        f.args.iter().filter(|a| a.input().is_some_and(|i| i.batch)).map(|a| f.ty(a.value))
    });
    inputs.map(|t| t.chunk(&ranks.mesh, 0)).next().unwrap_or(1)
}

#[cfg(test)]
mod tests;
