//! Receives between stages that are posted before the work that precedes their use: where memory is free,
//! with the same numbers, and for less time by price.

use crate::fixture::*;
use crate::pipelines::{OneRank, check, named, pipeline};
use shardc_cost::device::Device;
use shardc_cost::plan::price;
use shardc_ir::plan::{Instr, Plan, Settings};
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::classes::rank_classes;
use shardc_passes::options::{Options, Transport};
use shardc_passes::schedule::{Named, legal};
use shardc_passes::{memory, step};
use shardc_testing::taken;

/// For transports that go on while ranks work.
fn on_devices(o: Options) -> Options {
    Options { transport: Transport::Nccl, ..o }
}

/// As many microbatches as a schedule takes on so many ranks, up to two for each.
fn microbatches(n: Named, p: usize) -> usize {
    let legal = |m: &usize| legal(n, p, n.default_chunks(), *m).is_ok();
    (1..=2 * p).rev().find(legal).expect("one is legal")
}

/// The same plan with every receive where its value is used.
fn late(plan: &Plan) -> Plan {
    let settings = Settings { early_receives: false, ..plan.settings.clone() };
    let classes = rank_classes(&plan.module, &plan.schedule, &settings).expect("a plan");
    Plan { classes, settings, ..plan.clone() }
}

fn posts(plan: &Plan) -> usize {
    let all = plan.classes.iter().flat_map(|c| &c.step);
    all.filter(|i| matches!(i, Instr::PostRecv(_))).count()
}

/// Posts stand one call before their receives, in the same order; without them the list is the one of `late`.
fn stands_one_call_ahead(plan: &Plan, late: &Plan) {
    for (class, other) in plan.classes.iter().zip(&late.classes) {
        let mut posted = std::collections::BTreeMap::new();
        for (i, instr) in class.step.iter().enumerate() {
            let calls =
                |from: usize| class.step[from..i].iter().filter(|x| matches!(x, Instr::Call(_)));
            match instr {
                Instr::PostRecv(t) => posted
                    .entry(t.with)
                    .or_insert_with(std::collections::VecDeque::new)
                    .push_back((i, *t)),
                Instr::Recv(t) => {
                    if let Some((at, first)) = posted.get_mut(&t.with).and_then(|q| q.pop_front()) {
                        assert_eq!((first, calls(at).count()), (*t, 1), "{i}");
                    }
                }
                Instr::Call(_) | Instr::Send(_) | Instr::Sent { .. } => {}
            }
        }
        assert!(posted.values().all(|q| q.is_empty()));
        let same = |a: &Instr, b: &Instr| match (a, b) {
            (Instr::Call(a), Instr::Call(b)) => (a.func, a.microbatch) == (b.func, b.microbatch),
            (Instr::Send(a), Instr::Send(b)) | (Instr::Recv(a), Instr::Recv(b)) => {
                (a.func, a.value, a.microbatch, a.with) == (b.func, b.value, b.microbatch, b.with)
            }
            (a, b) => a == b,
        };
        let left = class.step.iter().filter(|i| !matches!(i, Instr::PostRecv(_)));
        assert!(left.clone().count() == other.step.len());
        assert!(left.zip(&other.step).all(|(a, b)| same(a, b)));
        assert!(!class.evaluation.iter().any(|i| matches!(i, Instr::PostRecv(_))));
    }
}

/// Under every schedule, with other axes: nobody needs more memory than the rank that needed most, and no step
/// takes longer; under most it takes less time.
#[test]
fn receives_are_posted_where_memory_is_free() {
    let device = Device::named("h100-sxm").expect("a device");
    let seconds = |plan: &Plan| price(plan, &device, &[]).expect("a price").total;
    let (mut plans, mut faster) = (0, 0);
    for (i, n) in Named::ALL.into_iter().enumerate() {
        for (k, p) in [2, 4].into_iter().enumerate() {
            let m = microbatches(n, p);
            let with = |axis: &'static str| pipeline(&[("pp", p), (axis, 2)], named(n), m);
            let full = Recompute::Full;
            let all = [
                pipeline(&[("pp", p)], named(n), m),
                Options { sp: true, ..with("tp") },
                Options { recompute: full, ..with("dp_replicate") },
            ];
            for (_, o) in all.into_iter().enumerate().filter(|(j, _)| taken(i + 3 * k + j, 6)) {
                let what = format!("{} {:?}", n.name(), o.mesh);
                let o = on_devices(o);
                let plan = compile(&Fixture::open("llama_deep").model(&o), &o).plan;
                assert!(plan.settings.early_receives);
                let late = late(&plan);
                assert_eq!(posts(&late), 0);
                stands_one_call_ahead(&plan, &late);
                assert!(plan.peak_bytes() <= late.peak_bytes(), "{what}");
                let (now, before) = (seconds(&plan), seconds(&late));
                assert!(now <= before * (1.0 + 1e-9), "{what}: {now} s, and {before} s");
                plans += 1;
                faster += usize::from(now < before * 0.999);
            }
        }
    }
    assert!(plans > 10 && faster * 2 > plans, "{faster} of {plans} are faster");
}

/// What is sent is waited for by the launch that is the first to write its memory: no launch before it does, it does, and
/// often whole calls are between.
#[test]
fn sends_are_waited_for_where_their_memory_is_written() {
    use shardc_ir::group::launches;
    use shardc_ir::overlap::late;
    let (mut all, mut later, mut calls) = (0, 0, 0);
    for (n, p, m) in [(Named::OneFOneB, 4, 8), (Named::ZbH1, 2, 6), (Named::Interleaved, 2, 8)] {
        let o = on_devices(pipeline(&[("pp", p)], named(n), m));
        let plan = compile(&Fixture::open("llama_deep").model(&o), &o).plan;
        let of: Vec<_> = plan.module.funcs.iter().map(launches).collect();
        for class in &plan.classes {
            let found = late(&plan.module, &of, class, &class.step);
            let mut offers = std::collections::BTreeMap::new();
            for (i, instr) in class.step.iter().enumerate() {
                let (to, t) = match instr {
                    Instr::Send(t) => {
                        let own = offers.entry(t.with).or_insert_with(Vec::new);
                        own.push((t.offset, t.offset + t.bytes));
                        continue;
                    }
                    Instr::Sent { to } => (to, offers.get_mut(to).expect("an offer").remove(0)),
                    Instr::Call(_) | Instr::PostRecv(_) | Instr::Recv(_) => continue,
                };
                let until = found[&(i, None)];
                let meets = |at: usize, bytes: usize| at < t.1 && t.0 < at + bytes;
                // Whether a launch of an instruction writes there.
                let writes = |j: usize, l: Option<usize>| match &class.step[j] {
                    Instr::Call(c) => of[c.func].iter().enumerate().any(|(k, x)| {
                        let work = class.memory.workspaces[c.func][x.nodes.clone()].iter();
                        let outs = x.outs.iter().map(|&v| &class.memory.places[c.func][v]);
                        let views = || plan.module.funcs[c.func].nodes[x.nodes.clone()].iter();
                        let at = |p: &&shardc_ir::plan::FramePlace| {
                            meets(c.frames[p.frame as usize] + p.offset, p.bytes)
                        };
                        l.is_none_or(|l| k == l)
                            && views().any(|n| !n.op.def().is_view())
                            && work.chain(outs).any(|p| at(&p))
                    }),
                    Instr::PostRecv(t) | Instr::Recv(t) => meets(t.offset, t.bytes),
                    Instr::Send(_) | Instr::Sent { .. } => false,
                };
                assert!((i..until.0).all(|j| !writes(j, None)), "{i} to {to}: {until:?}");
                assert!((0..until.1).all(|l| !writes(until.0, Some(l))), "{i} to {to}: {until:?}");
                assert!(
                    until.0 == class.step.len() || writes(until.0, Some(until.1)) || {
                        !matches!(class.step[until.0], Instr::Call(_)) && writes(until.0, None)
                    }
                );
                let call = |x: &Instr| matches!(x, Instr::Call(_));
                let next = class.step[i..].iter().position(call).map(|n| i + n);
                all += 1;
                later += usize::from(next.is_some_and(|n| until > (n, 0)));
                calls += class.step[i..until.0].iter().filter(|x| call(x)).count();
            }
        }
    }
    println!("{later} of {all} sends are waited for later, {calls} calls in all");
    assert!(all > 50 && later * 2 > all, "{later} of {all}");
}

/// Plans for ranks that are threads post nothing: there nothing goes on while a rank works.
#[test]
fn only_what_moves_alone_is_posted() {
    for transport in Transport::ALL {
        let o = pipeline(&[("pp", 4)], named(Named::OneFOneB), 8);
        let plan =
            compile(&Fixture::open("llama_deep").model(&o), &Options { transport, ..o }).plan;
        let moves = transport != Transport::Threads;
        assert!((posts(&plan) > 0) == moves && plan.settings.early_receives == moves);
    }
    // One rank has nobody to receive from.
    let o = on_devices(options(&[("tp", 2)], false, 2));
    assert_eq!(posts(&compile(&Fixture::open("llama_deep").model(&o), &o).plan), 0);
}

/// Such plans train to the numbers of one rank: with what crosses pipelines, and tied embeddings at both ends.
#[test]
fn numbers_are_those_of_one_rank() {
    let mut one = OneRank::default();
    for (i, n) in Named::ALL.into_iter().enumerate() {
        let m = microbatches(n, 2);
        let with = |axis: &'static str| pipeline(&[("pp", 2), (axis, 2)], named(n), m);
        let zero = |level| {
            let o = with("dp_shard");
            Options { zero: level, ..o }
        };
        let all = [
            pipeline(&[("pp", 2)], named(n), m),
            Options { sp: true, ..with("tp") },
            with("cp"),
            zero(1),
            zero(3),
        ];
        for (_, o) in all.into_iter().enumerate().filter(|(j, _)| taken(i + j, 5)) {
            check(&mut one, "llama_deep", &on_devices(o));
        }
    }
    for tied in ["gpt2", "gemma2"] {
        let o = on_devices(pipeline(&[("pp", 2)], named(Named::OneFOneB), 4));
        check(&mut one, tied, &o);
    }
}

/// Whoever writes a list by hand is told what does not fit: a post of another value, of another place, twice, in
/// another order, into memory in use, or one that nobody waits for.
#[test]
fn posts_that_do_not_fit_are_refused() {
    let o = on_devices(pipeline(&[("pp", 4)], named(Named::OneFOneB), 12));
    let plan = compile(&Fixture::open("llama_deep").model(&o), &o).plan;
    let good = |p: &Plan| {
        let [some, whole] = [true, false].map(|out| memory::replay::replay_by(p, out));
        assert_eq!(some.is_ok(), whole.is_ok(), "{some:?} {whole:?}");
        step::replay::replay(p).is_ok() && some.is_ok()
    };
    assert!(good(&plan));
    let (mut tried, mut in_use) = (0, 0);
    for (class, own) in plan.classes.iter().enumerate() {
        let is_post = |i: &usize| matches!(own.step[*i], Instr::PostRecv(_));
        let all: Vec<usize> = (0..own.step.len()).filter(is_post).collect();
        for (_, &i) in all.iter().enumerate().filter(|(k, _)| taken(*k, 2)) {
            let changed = |change: &dyn Fn(&mut Vec<Instr>)| {
                let mut p = plan.clone();
                change(&mut p.classes[class].step);
                good(&p)
            };
            let with = |change: &dyn Fn(&mut shardc_ir::plan::Transfer)| {
                changed(&|l| {
                    if let Instr::PostRecv(t) = &mut l[i] {
                        change(t);
                    }
                })
            };
            tried += 1;
            assert!(!changed(&|l| l.insert(i, l[i].clone())), "twice");
            assert!(!with(&|t| t.offset += 64), "elsewhere");
            assert!(!with(&|t| t.bytes -= 64), "less");
            assert!(!with(&|t| t.microbatch = Some(99)), "of another microbatch");
            let mut recvs = (i..own.step.len()).filter(|&k| matches!(own.step[k], Instr::Recv(_)));
            let recv = recvs.next().expect("a receive follows");
            assert!(!changed(&|l| drop(l.remove(recv))), "nobody waits");
            // Much earlier the memory is another's, sooner or later.
            in_use += usize::from(!changed(&|l| {
                let post = l.remove(i);
                l.insert(0, post);
            }));
            // Where nothing is posted it is taken when it is needed.
            assert!(changed(&|l| drop(l.remove(i))) || all.len() > 1, "without");
        }
    }
    assert!(tried > 4 && in_use > 2, "{in_use} of {tried}");
}

/// Where a rank's memory is full nothing is posted: the first of a 1F1B has all activations, and what it posts
/// would be one more; others have room. Of sequences that are shorter there is room in gaps.
#[test]
fn memory_that_is_full_stays_as_it_is() {
    let o = on_devices(pipeline(&[("pp", 4)], named(Named::OneFOneB), 16));
    let o = Options { seq: 24, ..o };
    let plan = compile(&Fixture::open("llama_deep").model(&o), &o).plan;
    let late = late(&plan);
    let count =
        |c: usize, is: fn(&Instr) -> bool| plan.classes[c].step.iter().filter(|i| is(i)).count();
    let posts = |c: usize| count(c, |i| matches!(i, Instr::PostRecv(_)));
    let receives = |c: usize| count(c, |i| matches!(i, Instr::Recv(_)));
    assert_eq!(plan.peak_bytes(), late.peak_bytes());
    assert!(posts(0) == 0 && receives(0) > 16, "{} are posted", posts(0));
    assert!((1..4).all(|c| posts(c) == receives(c) && posts(c) > 16));
}
