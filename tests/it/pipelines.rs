//! Every schedule trains the fixtures to the same numbers as one rank, and as transformers where the
//! number of microbatches divides the reference's batch: alone and with other axes, with every
//! recomputation, with tied embeddings at both ends of the pipeline.

use crate::fixture::*;
use shardc_ir::func::{FuncKind, RoleKind, Value};
use shardc_ir::rng::Stream;
use shardc_ir::schedule::write_csv;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Options, Order, Transport};
use shardc_passes::schedule::{Named, legal, make};
use shardc_testing::{taken, taken_within};
use std::collections::BTreeMap;

type Axes = &'static [(&'static str, usize)];

/// Options for these axes with `m` microbatches of one row per rank.
pub fn pipeline(mesh: &[(&str, usize)], order: Order, m: usize) -> Options {
    let dp: usize = mesh.iter().filter(|a| a.0.starts_with("dp")).map(|a| a.1).product();
    let mut o = options(mesh, false, 1);
    (o.schedule, o.global_batch) = (order, dp * m);
    o
}

pub fn named(n: Named) -> Order {
    Order::Named(n.name().into())
}

/// Tokens and targets of so many rows; every seventh target is ignored.
fn tokens(rows: usize, vocab: usize) -> (Vec<i32>, Vec<i32>) {
    let s = Stream::new(3, "tokens", 0);
    let id = |i: usize| (s.uniform(i as u64) * vocab as f64) as i32;
    let ids: Vec<i32> = (0..rows * SEQ).map(id).collect();
    let target = |i: usize| if i % 7 == 3 { -100 } else { id(i + 10_000) };
    (ids, (0..rows * SEQ).map(target).collect())
}

/// What one rank makes of a batch of so many rows, computed once.
#[derive(Default)]
pub struct OneRank(BTreeMap<(String, usize), Numbers>);

impl OneRank {
    fn of(&mut self, fixture: &str, rows: usize) -> &Numbers {
        let new = || {
            let mut o = options(&[], false, rows);
            o.global_batch = rows;
            let model = Fixture::open(fixture).model(&o);
            let (ids, targets) = tokens(rows, model.facts.vocab);
            three_steps(&model, &compile(&model, &o), &ids, &targets)
        };
        self.0.entry((fixture.into(), rows)).or_insert_with(new)
    }
}

pub fn check(one: &mut OneRank, fixture: &str, o: &Options) {
    let what = format!("{fixture} {:?} {:?} {} rows", o.mesh, o.schedule, o.global_batch);
    let model = Fixture::open(fixture).model(o);
    let (ids, targets) = tokens(o.global_batch, model.facts.vocab);
    let got = three_steps(&model, &compile(&model, o), &ids, &targets);
    got.compare(&model, one.of(fixture, o.global_batch), &what);
}

/// Microbatches that the issue of pipelines asks for, as far as the schedule takes them.
fn counts(n: Named, p: usize) -> Vec<usize> {
    let mut all = vec![1, p - 1, p, 2 * p, 2 * p + 1];
    all.dedup();
    all.retain(|&m| m > 0 && legal(n, p, n.default_chunks(), m).is_ok());
    all
}

/// Every schedule and number of microbatches on p ranks, alone.
fn alone(p: usize) {
    let mut one = OneRank::default();
    for (i, n) in Named::ALL.into_iter().enumerate() {
        let counts = counts(n, p);
        assert!(!counts.is_empty(), "{} runs on {p} ranks", n.name());
        for (_, m) in counts.into_iter().enumerate().filter(|(k, _)| taken(i + k, 2)) {
            check(&mut one, "llama_deep", &pipeline(&[("pp", p)], named(n), m));
        }
    }
}

#[test]
fn every_schedule_on_two_ranks() {
    alone(2);
}

#[test]
fn every_schedule_on_four_ranks() {
    alone(4);
}

/// Every schedule with other axes and with every recomputation.
fn together(p: usize) {
    let mut one = OneRank::default();
    for (i, n) in Named::ALL.into_iter().enumerate() {
        let m = counts(n, p).into_iter().filter(|&m| m <= 2 * p).max().expect("one is legal");
        let with = |axis: &'static str| pipeline(&[("pp", p), (axis, 2)], named(n), m);
        let again = |recompute| Options { recompute, ..pipeline(&[("pp", p)], named(n), m) };
        let all = [
            with("tp"),
            with("dp_replicate"),
            Options { sp: true, ..with("tp") },
            again(Recompute::Selective),
            again(Recompute::Full),
            again(Recompute::Sqrt),
            again(Recompute::Elementwise),
        ];
        for (_, o) in all.iter().enumerate().filter(|(k, _)| taken(i + k + p / 2, 5)) {
            check(&mut one, "llama_deep", o);
        }
    }
}

#[test]
fn every_schedule_of_two_ranks_with_other_axes_and_recomputation() {
    together(2);
}

#[test]
fn every_schedule_of_four_ranks_with_other_axes_and_recomputation() {
    together(4);
}

/// Against transformers: every family on the reference's own batch of 8 rows.
#[test]
fn every_family_against_transformers() {
    let meshes: [Axes; 4] = [
        &[("pp", 2)],
        &[("pp", 4)],
        &[("pp", 2), ("tp", 2)],
        &[("pp", 2), ("dp_replicate", 2), ("tp", 2)],
    ];
    for (f, name) in ALL.iter().enumerate() {
        for (_, mesh) in meshes.into_iter().enumerate().filter(|(m, _)| taken(f + m, 4)) {
            let dp = if mesh.iter().any(|a| a.0 == "dp_replicate") { 2 } else { 1 };
            let o = options(mesh, mesh.len() == 2, 1);
            assert_eq!(o.global_batch, ROWS);
            let later = Options {
                microbatch: ROWS / dp / 2,
                sp: false,
                schedule: named(Named::ZbH1),
                ..o.clone()
            };
            // On each mesh families have one or the other by turns.
            for (_, o) in
                [o, later].iter().enumerate().filter(|(k, _)| taken_within(4, f / 4 + k, 2))
            {
                train_and_compare(name, o);
            }
        }
    }
}

/// The same steps in f64, where every rank's list runs in the reference interpreter: sends are taken
/// in their order, waits end, and numbers are those of transformers.
#[test]
fn every_schedule_in_the_interpreter() {
    let fx = Fixture::open("llama_deep");
    for n in Named::ALL {
        let m = if n == Named::Naive { 1 } else { 4 };
        let o = Options { schedule: named(n), ..options(&[("pp", 2)], false, ROWS / m) };
        let model = fx.model(&o);
        let compiled = compile(&model, &o);
        let mut state = start(&fx, &model, &compiled);
        interpret(&compiled, &mut state, 1).unwrap_or_else(|e| panic!("{}: {e}", n.name()));
        let mesh = &compiled.plan.module.mesh;
        let out = |k, n: &str| state.output(mesh, k, n).unwrap_or_else(|e| panic!("{e}")).data;
        fx.compare_loss(out(RoleKind::Metric, "loss")[0]);
        fx.compare_logits(&out(RoleKind::Output, "logits"));
        fx.compare_grads(&model, |p| out(RoleKind::GradShown, p));
    }
}

/// Every send, receive and wait that is missing, double or in another order is found by replaying
/// the lists, or the memory, of a plan.
#[test]
fn lists_that_do_not_fit_together_are_refused() {
    use shardc_ir::plan::{Instr, Plan};
    use shardc_passes::{memory, step};
    let o = Options { schedule: named(Named::ZbV), ..options(&[("pp", 2)], false, 2) };
    let model = Fixture::open("llama_deep").model(&o);
    let plan = compile(&model, &o).plan;
    let good = |p: &Plan| {
        let [some, whole] = [true, false].map(|out| memory::replay::replay_by(p, out));
        assert_eq!(some.is_ok(), whole.is_ok(), "{some:?} {whole:?}");
        step::replay::replay(p).is_ok() && some.is_ok()
    };
    assert!(good(&plan));
    let mut tried = 0;
    for class in 0..2 {
        for i in 0..plan.classes[class].step.len() {
            if matches!(plan.classes[class].step[i], Instr::Call(_)) {
                continue;
            }
            let mut changed = |change: &dyn Fn(&mut Vec<Instr>), what: &str| {
                let mut p = plan.clone();
                change(&mut p.classes[class].step);
                tried += 1;
                assert!(
                    !good(&p),
                    "{what} {i} of class {class}: {:?}",
                    plan.classes[class].step[i]
                );
            };
            changed(&|l| drop(l.remove(i)), "without");
            changed(&|l| l.insert(i, l[i].clone()), "twice");
            // What is received first, after what is received next.
            let next = (i + 1..plan.classes[class].step.len())
                .find(|&k| matches!(plan.classes[class].step[k], Instr::Recv(_)));
            if let (Instr::Recv(_), Some(k)) = (&plan.classes[class].step[i], next) {
                changed(&|l| l.swap(i, k), "swapped");
            }
        }
    }
    assert!(tried > 60, "{tried}");
}

/// Most calls of a step are like the one before. A fault in one of the last is found all the same: a frame
/// that lies elsewhere, a transfer from elsewhere, of another size or of another microbatch.
#[test]
fn faults_of_late_microbatches_are_found() {
    use shardc_ir::func::Port;
    use shardc_ir::plan::{Instr, Plan};
    use shardc_passes::{memory, step};
    let good = |p: &Plan| {
        let [some, whole] = [true, false].map(|out| memory::replay::replay_by(p, out));
        assert_eq!(some.is_ok(), whole.is_ok(), "{some:?} {whole:?}");
        step::replay::replay(p).is_ok() && some.is_ok()
    };
    // Of 90 microbatches most are not replayed, since they do what others did: with the same outcome.
    let cases = [
        (Named::Gpipe, 24, Transport::Threads),
        (Named::OneFOneB, 24, Transport::Threads),
        (Named::OneFOneB, 90, Transport::Threads),
        (Named::OneFOneB, 24, Transport::Nccl),
        (Named::OneFOneB, 90, Transport::Nccl),
    ];
    for (n, m, transport) in cases {
        let o = Options { transport, ..pipeline(&[("pp", 2)], named(n), m) };
        let plan = compile(&Fixture::open("llama_deep").model(&o), &o).plan;
        assert!(good(&plan));
        let mut tried = 0;
        for (class, own) in plan.classes.iter().enumerate() {
            let late = |i: &usize| own.step[*i].microbatch() == Some(m - 3);
            let late = (0..own.step.len()).filter(late).enumerate();
            for (_, i) in late.filter(|(k, _)| m == 24 || taken(*k, 2)) {
                let mut changed = |change: &dyn Fn(&mut Instr)| {
                    let mut p = plan.clone();
                    change(&mut p.classes[class].step[i]);
                    tried += 1;
                    let (was, is) = (&own.step[i], &p.classes[class].step[i]);
                    assert!(!good(&p), "{n:?}, class {class}: {was:?}\nis {is:?}");
                };
                match &own.step[i] {
                    Instr::Call(c) => {
                        for k in (1..c.frames.len()).filter(|&k| own.memory.frames[c.func][k] > 0) {
                            let f = &plan.module.funcs[c.func];
                            let places = &own.memory.places[c.func];
                            // Over parameters, out of the arena, and half out of its place: where nothing
                            // else lies, what only the call needs (frame 1) may, and one row of data is
                            // like the next.
                            let is_data = |p: &Port| p.input().is_some();
                            let mut ports = f.args.iter().filter(|a| !is_data(a)).chain(&f.results);
                            let kept = ports.any(|p| places[p.value].frame as usize == k);
                            let half = (k > 1 && kept).then_some(c.frames[k] + 64);
                            for to in [0, own.memory.peak_bytes].into_iter().chain(half) {
                                changed(&|x| {
                                    if let Instr::Call(c) = x {
                                        c.frames[k] = to;
                                    }
                                });
                            }
                        }
                    }
                    Instr::Send(_) | Instr::PostRecv(_) | Instr::Recv(_) => {
                        let with = |change: &dyn Fn(&mut shardc_ir::plan::Transfer)| {
                            let mut t = own.step[i].clone();
                            if let Instr::Send(t) | Instr::PostRecv(t) | Instr::Recv(t) = &mut t {
                                change(t);
                            }
                            t
                        };
                        let all = [
                            with(&|t| t.offset += 64),
                            with(&|t| t.bytes -= 64),
                            with(&|t| t.microbatch = Some(m - 4)),
                            with(&|t| t.microbatch = None),
                        ];
                        all.iter().for_each(|t| changed(&|x| *x = t.clone()));
                    }
                    Instr::Sent { .. } => unreachable!("it is of no microbatch"),
                }
            }
        }
        assert!(tried > 20, "{tried}");
    }
}

/// What a call writes behind its data is over those of the next microbatch: no call is like the one before.
#[test]
fn faults_that_go_from_one_microbatch_to_the_next_are_found() {
    use shardc_passes::memory::replay::replay_by;
    let o = pipeline(&[("pp", 2)], named(Named::OneFOneB), 90);
    let plan = compile(&Fixture::open("llama_deep").model(&o), &o).plan;
    let left_out = replay_by(&plan, true).unwrap_or_else(|e| panic!("{e}"));
    let all: usize = plan.classes.iter().map(|c| 2 * c.step.len() + c.evaluation.len()).sum();
    assert!(left_out > all / 2, "{left_out} of {all}");
    let mut tried = 0;
    for (fi, f) in plan.module.funcs.iter().enumerate() {
        let Some(class) = plan.classes.iter().position(|c| c.funcs.contains(&fi)) else { continue };
        let places = &plan.classes[class].memory.places[fi];
        let place = |v: Value| places[v];
        let Some(data) = f.args.iter().find(|a| a.input().is_some()) else { continue };
        for n in f.nodes.iter().filter(|n| !n.op.def().is_view()) {
            let Some(&v) = n.outs.iter().find(|&&v| place(v).frame == 1 && place(v).bytes > 0)
            else {
                continue;
            };
            // Over the data of others, and behind all of them.
            for rows in [1, 2, 40, 90, 200] {
                let data = place(data.value);
                let mut p = plan.clone();
                let to = &mut p.classes[class].memory.places[fi][v];
                (to.frame, to.offset) = (data.frame, data.offset + rows * data.bytes);
                tried += 1;
                let [some, whole] = [true, false].map(|out| replay_by(&p, out));
                assert_eq!(some.is_ok(), whole.is_ok(), "@{}: {}, {rows}", f.name, f.name(v));
                assert!(rows >= 90 || whole.is_err(), "@{}: {}, {rows}", f.name, f.name(v));
            }
        }
    }
    assert!(tried > 20, "{tried}");
}

/// What a microbatch left is gone when its list ends, whatever was left out: a backward that an evaluation does
/// for the step has nothing to begin with.
#[test]
fn nothing_of_a_microbatch_outlives_its_list() {
    use shardc_ir::plan::Instr;
    use shardc_passes::memory::replay::replay_by;
    let o = pipeline(&[("pp", 2)], named(Named::OneFOneB), 90);
    let good = compile(&Fixture::open("llama_deep").model(&o), &o).plan;
    // The last forward of some is replayed, that of others left out.
    for j in 70..90 {
        let mut plan = good.clone();
        let funcs = &plan.module.funcs;
        let own = &mut plan.classes[0];
        let backward = |i: &Instr| match i {
            Instr::Call(c) => funcs[c.func].kind != FuncKind::Forward && c.microbatch == Some(j),
            Instr::Recv(t) => funcs[t.func].kind != FuncKind::Forward && t.microbatch == Some(j),
            _other => false,
        };
        let (moved, rest) = own.step.drain(..).partition::<Vec<_>, _>(backward);
        assert_eq!(moved.len(), 2, "what it receives, and the call");
        own.step = rest;
        own.evaluation.splice(0..0, moved);
        let [some, whole] = [true, false].map(|out| replay_by(&plan, out));
        assert!(whole.is_err(), "{j}");
        assert_eq!(some.map(drop), whole.map(drop), "{j}");
    }
}

/// Faults that repetitions do not show by what they hold: data that were gone before the first, offers of which one
/// more is taken than made, and results that move on with the data of each microbatch.
#[test]
fn faults_outside_of_what_repeats_are_found() {
    use shardc_ir::plan::{Call, FramePlace, Instr, Plan};
    use shardc_passes::memory::replay::replay_by;
    let o = pipeline(&[("pp", 2)], named(Named::OneFOneB), 90);
    let good = compile(&Fixture::open("llama_deep").model(&o), &o).plan;
    let funcs = &good.module.funcs;
    let found = |p: &Plan, what: &str| {
        let [some, whole] = [true, false].map(|out| replay_by(p, out));
        assert!(whole.is_err(), "{what}");
        assert_eq!(some.map(drop), whole.map(drop), "{what}");
    };
    let data_of = |c: &Call, class: usize| {
        let data = funcs[c.func].args.iter().find(|a| a.input().is_some())?;
        Some(good.classes[class].memory.places[c.func][data.value])
    };
    let mut tried = [0; 3];
    for class in 0..good.classes.len() {
        let list = &good.classes[class].step;
        let call = |i: &Instr| match i {
            Instr::Call(c) => Some((c.clone(), data_of(c, class)?)),
            _other => None,
        };
        let with_data: Vec<_> = list.iter().filter_map(call).collect();
        // The first call, before anything repeats, writes over the data of a late one.
        let first =
            list.iter().position(|i| matches!(i, Instr::Call(c) if c.microbatch == Some(0)));
        let (late, data) = with_data.iter().find(|x| x.0.microbatch == Some(80)).expect("a call");
        let mut p = good.clone();
        if let Some(Instr::Call(c)) = first.map(|i| &mut p.classes[class].step[i]) {
            let places = &good.classes[class].memory.places[c.func];
            let mut made = funcs[c.func].nodes.iter().flat_map(|n| &n.outs);
            let is_own = |p: &FramePlace| p.frame > 0 && p.bytes > 0 && p.offset == 0;
            let own = made.find_map(|v| Some(places[v]).filter(is_own));
            let frame = own.expect("a call makes something").frame as usize;
            c.frames[frame] = late.frames[data.frame as usize] + data.offset;
            tried[0] += 1;
            found(&p, "data that are gone");
        }
        // Each cycle takes one more offer than it makes; enough wait for the first of them.
        let ends = list.iter().filter(|i| matches!(i, Instr::Sent { .. })).count();
        if let Some(i) = list.iter().position(|i| matches!(i, Instr::Send(_))).filter(|_| ends > 80)
        {
            let mut p = good.clone();
            let step = &mut p.classes[class].step;
            let doubled = |i: Instr| {
                let times = if matches!(i, Instr::Sent { .. }) { 2 } else { 1 };
                std::iter::repeat_n(i, times)
            };
            *step = step.drain(..).flat_map(doubled).collect();
            let mut send = step[i].clone();
            if let Instr::Send(t) = &mut send {
                t.bytes = 0;
            }
            step.splice(i..i, std::iter::repeat_n(send, 30));
            tried[1] += 1;
            found(&p, "offers that are taken twice");
        }
    }
    // A result that lies behind the data of its microbatch, and so moves on as these do: through bytes that nobody
    // needs for a while.
    for (fi, f) in funcs.iter().enumerate() {
        let Some(class) = good.classes.iter().position(|c| c.funcs.contains(&fi)) else { continue };
        let Some(data) = f.args.iter().find(|a| a.input().is_some()) else { continue };
        let memory = &good.classes[class].memory;
        let place = |v: Value| memory.places[fi][v];
        let data = place(data.value);
        let made = f.nodes.iter().filter(|n| !n.op.def().is_view()).flat_map(|n| &n.outs);
        for &v in made.filter(|&&v| place(v).frame == 1 && place(v).bytes > 0).take(1) {
            for behind in (1..memory.peak_bytes / data.bytes).step_by(44) {
                let mut p = good.clone();
                let to = &mut p.classes[class].memory.places[fi][v];
                (to.frame, to.offset) = (data.frame, data.offset + behind * data.bytes);
                let [some, whole] = [true, false].map(|out| replay_by(&p, out));
                tried[2] += usize::from(whole.is_err());
                assert_eq!(some.map(drop), whole.map(drop), "{}, {behind}", f.name(v));
            }
        }
    }
    assert!(tried.iter().all(|&n| n > 0), "{tried:?}");
}

/// A fault within a call: a result is written over a value that is still to be read.
#[test]
fn faults_within_a_call_are_found() {
    use shardc_ir::group::launches;
    use shardc_passes::memory::replay::replay;
    let o = pipeline(&[], Order::default(), 2);
    let plan = compile(&Fixture::open("llama_gqa").model(&o), &o).plan;
    replay(&plan).unwrap_or_else(|e| panic!("{e}"));
    let mut tried = 0;
    for (fi, f) in plan.module.funcs.iter().enumerate() {
        let (all, roots) = (launches(f), f.roots());
        let root = |v: Value| roots[v];
        let alone = |v: Value| roots.iter().filter(|r| **r == root(v)).count() == 1;
        // What a call needs for itself.
        let own = |v: Value| {
            let p = plan.classes[0].memory.places[fi][v];
            (p.frame == 1 && p.bytes > 0).then_some(p)
        };
        for (i, x) in all.iter().enumerate() {
            for (&v, place) in x.outs.iter().filter_map(|v| Some((v, own(*v)?))) {
                let reads =
                    |x: &shardc_ir::group::Launch| x.ins.iter().any(|&u| root(u) == root(v));
                let Some(last) = all.iter().rposition(reads) else { continue };
                let between = all[i + 1..last.max(i + 1)].iter().flat_map(|x| &x.outs);
                let fits = |w: &&Value| {
                    let small = own(**w).is_some_and(|p| p.bytes <= place.bytes);
                    small && alone(**w) && root(**w) != root(v)
                };
                for &w in between.filter(fits).take(2) {
                    let mut p = plan.clone();
                    p.classes[0].memory.places[fi][w].offset = place.offset;
                    tried += 1;
                    let names = [v, w].map(|v| f.name(v).to_string());
                    assert!(replay(&p).is_err(), "@{}: {names:?}", f.name);
                }
            }
        }
    }
    assert!(tried > 50, "{tried}");
}

/// A fault in the last layer alone: what backward takes of it lies elsewhere than forward has left it.
#[test]
fn faults_of_late_layers_are_found() {
    use shardc_passes::memory::replay::replay;
    let o = pipeline(&[], Order::default(), 3);
    let plan = compile(&Fixture::open("llama_deep").model(&o), &o).plan;
    replay(&plan).unwrap_or_else(|e| panic!("{e}"));
    let (i, f) = plan.module.funcs.iter().enumerate().find(|f| f.1.name == "backward").unwrap();
    let last = f.values.iter().filter_map(|v| v.name.layer).max();
    let stashes = f.args.iter().filter(|a| {
        let stash = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Stash);
        stash && f.name(a.value).layer == last
    });
    let mut tried = 0;
    for a in stashes {
        let mut p = plan.clone();
        p.classes[0].memory.places[i][a.value].offset += 64;
        assert!(replay(&p).is_err(), "{}", f.name(a.value));
        tried += 1;
    }
    assert!(tried > 5, "{tried}");
}

/// Frozen parameters leave stages without weights to train, and functions without work: with cut
/// backwards and recomputation, where stages of one rank share what they make for themselves.
#[test]
fn frozen_layers_in_every_schedule() {
    for name in ["llama_yarn", "llama_deep"] {
        for n in [Named::OneFOneB, Named::ZbH1, Named::ZbV, Named::VMin, Named::DualPipeV] {
            let all = [Recompute::None, Recompute::Full, Recompute::Sqrt, Recompute::Elementwise];
            for recompute in all {
                let o = Options {
                    freeze: vec!["*layers.0*".into()],
                    recompute,
                    ..pipeline(&[("pp", 2)], named(n), 4)
                };
                let model = Fixture::open(name).model(&o);
                let (ids, targets) = tokens(4, model.facts.vocab);
                let run = |o: &Options| {
                    let compiled = compile(&model, o);
                    let mut s = session(&model, &compiled);
                    let step = |s: &mut shardc_runtime::Session, i| {
                        let batch = shardc_runtime::StepBatch::tokens(&ids, &targets, false);
                        s.step(&batch, 1e-3, i).unwrap_or_else(|e| panic!("{name}: {e}"))
                    };
                    [1, 2, 3].map(|i| step(&mut s, i).loss.expect("a loss"))
                };
                let alone = Options {
                    mesh: vec![],
                    schedule: Order::default(),
                    recompute: Recompute::None,
                    ..o.clone()
                };
                let (got, want) = (run(&o), run(&alone));
                let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-6 * b.abs();
                assert!(got.iter().zip(&want).all(close), "{name} {n:?}: {got:?}, {want:?}");
            }
        }
    }
}

/// Logits of all microbatches, wherever the head is: also in a stage that sees no tokens.
#[test]
fn forward_only_gives_all_logits() {
    use shardc_ir::plan::Mode;
    use shardc_runtime::StepBatch;
    let fx = Fixture::open("llama_deep");
    let meshes: [Axes; 4] =
        [&[("pp", 2)], &[("pp", 4)], &[("pp", 11)], &[("pp", 2), ("dp_replicate", 2), ("tp", 2)]];
    for mesh in meshes {
        let o = Options { mode: Mode::Infer, ..options(mesh, false, 1) };
        let model = fx.model(&o);
        let mut s = session(&model, &compile(&model, &o));
        let batch = StepBatch::tokens(&fx.input_ids, &[], true);
        let r = s.step(&batch, 0.0, 1).unwrap_or_else(|e| panic!("{mesh:?}: {e}"));
        let logits: Vec<f64> = r
            .output(RoleKind::Output, "logits")
            .expect("logits")
            .data
            .iter()
            .map(|&x| f64::from(x))
            .collect();
        fx.compare_logits(&logits);
    }
    // In training too the head may stand apart from the loss and from the tokens.
    let o = options(&[("pp", 11)], false, 1);
    train_and_compare("llama_deep", &o);
}

/// A plan that trains and lacks one of its functions is not a plan.
#[test]
fn no_function_may_be_missing() {
    use shardc_passes::classes::rank_classes;
    let o = Options { schedule: named(Named::ZbH1), ..options(&[("pp", 2)], false, 2) };
    let plan = compile(&Fixture::open("llama_deep").model(&o), &o).plan;
    let settings = &plan.settings;
    assert!(rank_classes(&plan.module, &plan.schedule, settings).is_ok());
    for i in 0..plan.module.funcs.len() {
        let mut m = plan.module.clone();
        let f = m.funcs.remove(i);
        let d = rank_classes(&m, &plan.schedule, settings).expect_err(&f.name);
        assert_eq!(d.code, "plan", "without @{}", f.name);
    }
    // Another order of its own ranks is another plan, and one that cannot run.
    let mut swapped = plan.schedule.clone();
    swapped.ranks.swap(0, 1);
    swapped.owner.swap(0, 1);
    let refused = match rank_classes(&plan.module, &swapped, settings) {
        Err(_) => true,
        Ok(classes) => {
            let p = shardc_ir::plan::Plan { classes, schedule: swapped, ..plan.clone() };
            shardc_passes::step::replay::replay(&p).is_err()
                || shardc_passes::memory::replay::replay(&p).is_err()
        }
    };
    assert!(refused);
}

/// A schedule from a file is the schedule it was written from.
#[test]
fn a_csv_file_is_a_schedule() {
    let mut one = OneRank::default();
    let s = make(Named::Interleaved, 2, 2, 4).unwrap_or_else(|e| panic!("{e}"));
    let o = pipeline(&[("pp", 2)], Order::Csv(write_csv(&s)), 4);
    check(&mut one, "llama_deep", &o);
}
