//! Sums of gradients over ranks that begin within the last backward: the numbers and bits of sums in `@optimizer_step`, in
//! no more memory, for less time by price.

use crate::fixture::*;
use crate::lab::Lab;
use crate::pipelines::{OneRank, check, named, pipeline};
use crate::proofs::proved;
use shardc::search::Prices;
use shardc_cost::device::Device;
use shardc_cost::plan::price;
use shardc_frontends::Model;
use shardc_ir::func::{Func, FuncKind, Module, Node, Port, RoleKind, Scope, Value};
use shardc_ir::group::launches;
use shardc_ir::ops::Op;
use shardc_ir::plan::{Call, Instr, Plan};
use shardc_ir::text;
use shardc_ir::types::DType;
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::classes::rank_classes;
use shardc_passes::options::{CpMode, Options, Transport};
use shardc_passes::pipeline::{Compiled, Manager, compile_with};
use shardc_passes::schedule::{Named, legal};
use shardc_passes::step::replay::replay;
use shardc_prove::Verdict;
use shardc_prove::field::prove_smaller;
use shardc_testing::taken;

/// For transports that go on while ranks work.
fn on_devices(o: Options) -> Options {
    Options { transport: Transport::Nccl, ..o }
}

/// The same plan with all sums in `@optimizer_step`.
pub fn late(model: &Model, o: &Options) -> Compiled {
    let manager = Manager { without: Some("early-sums"), ..Manager::default() };
    compile_with(source_of(model), o, manager).expect("a plan")
}

fn is_sum(r: &Port) -> bool {
    r.role.as_ref().is_some_and(|r| r.kind == RoleKind::GradSum)
}

/// Gradients that a function hands on as sums over ranks.
fn sums(f: &Func) -> usize {
    f.results.iter().filter(|r| is_sum(r)).count()
}

fn all_sums(plan: &Plan) -> usize {
    plan.module.funcs.iter().map(sums).sum()
}

fn zero(mesh: &[(&str, usize)], stage: u8, microbatch: usize) -> Options {
    Options { zero: stage, ..options(mesh, false, microbatch) }
}

/// What is tried: a fixture, options, and whether some sums move.
fn rows() -> Vec<(&'static str, Options, bool)> {
    let [dp, both, cp, tp]: [&[(&str, usize)]; 4] = [
        &[("dp_replicate", 2)],
        &[("dp_replicate", 2), ("dp_shard", 2)],
        &[("dp_replicate", 2), ("cp", 2)],
        &[("dp_replicate", 2), ("tp", 2)],
    ];
    let shard: &[(&str, usize)] = &[("dp_shard", 2)];
    let with = |o: Options, change: fn(&mut Options)| {
        let mut o = o;
        change(&mut o);
        o
    };
    vec![
        ("llama_gqa", options(dp, false, 1), true),
        ("llama_gqa", options(dp, false, 4), true),
        ("llama_gqa", options(tp, true, 2), true),
        ("llama_gqa", options(cp, false, 2), true),
        ("llama_gqa", with(options(cp, false, 2), |o| o.cp_mode = CpMode::Ring), true),
        ("llama_gqa", with(options(cp, false, 2), |o| o.cp_mode = CpMode::Ulysses), true),
        ("llama_bias_tied", options(dp, false, 2), true),
        // Each of the four tries would take more memory: 506,112 bytes at least for 499,968.
        ("gpt2", with(options(dp, false, 1), |o| o.recompute = Recompute::Full), false),
        ("gemma2", with(options(dp, false, 2), |o| o.loss_chunks = LossChunks::Of(2)), true),
        ("qwen3", with(options(dp, false, 2), |o| o.clip = Some(0.1)), true),
        ("llama_mha", zero(shard, 1, 2), true),
        ("llama_mha", zero(shard, 1, 4), true),
        ("llama_mha", zero(shard, 2, 2), false),
        ("llama_mha", zero(shard, 3, 2), false),
        ("llama_mha", zero(both, 1, 1), true),
        ("llama_mha", zero(both, 3, 1), false),
        ("mixtral", options(dp, false, 2), true),
        ("mixtral", with(options(&[("dp_shard", 4)], false, 1), |o| o.ep = 2), true),
        ("llama_gqa", with(options(dp, false, 2), |o| o.dtype = DType::BF16), true),
        ("llama_gqa", with(options(dp, false, 2), |o| o.dtype = DType::F16), true),
        (
            "llama_gqa",
            with(options(dp, false, 2), |o| (o.dtype, o.grad_dtype) = (DType::BF16, DType::BF16)),
            true,
        ),
    ]
}

/// With everything that it crosses: the bits of sums in `@optimizer_step`, and no more memory.
#[test]
fn bits_are_those_of_sums_at_the_end() {
    for (_, (name, o, moves)) in rows().into_iter().enumerate().filter(|(i, _)| taken(*i, 2)) {
        let o = on_devices(o);
        let what = format!("{name} {:?} zero={} {} microbatches", o.mesh, o.zero, o.microbatches());
        let fx = Fixture::open(name);
        let model = fx.model(&o);
        let (early, late) = (compile(&model, &o), late(&model, &o));
        assert_eq!(all_sums(&early.plan) > 0, moves, "{what}");
        assert_eq!(all_sums(&late.plan), 0, "{what}");
        assert!(early.plan.peak_bytes() <= late.plan.peak_bytes(), "{what}");
        let run = |c: &Compiled| three_steps(&model, c, &fx.input_ids, &fx.targets());
        let (a, b) = (run(&early), run(&late));
        assert_eq!(a.loss.to_bits(), b.loss.to_bits(), "{what}");
        // Of f16 some may be no numbers.
        let bits =
            |all: &[Vec<f64>]| -> Vec<u64> { all.iter().flatten().map(|x| x.to_bits()).collect() };
        assert_eq!(bits(&a.grads), bits(&b.grads), "{what}");
        assert_eq!(bits(&a.params), bits(&b.params), "{what}");
        one_last_call(&early.plan, &what);
    }
}

/// By the interpreter too, in f64.
#[test]
fn the_interpreter_runs_them() {
    for o in [options(&[("dp_replicate", 2)], false, 2), zero(&[("dp_shard", 2)], 1, 1)] {
        let (fx, o) = (Fixture::open("llama_gqa"), on_devices(o));
        let model = fx.model(&o);
        let both = [compile(&model, &o), late(&model, &o)].map(|c| {
            let mut state = start(&fx, &model, &c);
            interpret(&c, &mut state, 1).expect("a step");
            (all_sums(&c.plan), state.values)
        });
        assert!(both[0].0 > 0 && both[1].0 == 0);
        assert!(both[0].1 == both[1].1);
    }
}

/// What starts sums is called once, as the last call of its rank for a microbatch; nobody waits for it, and with
/// several microbatches there is the function for the others too.
fn one_last_call(plan: &Plan, what: &str) {
    for (fi, f) in plan.module.funcs.iter().enumerate().filter(|(_, f)| sums(f) > 0) {
        let edge = |r: &Port| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Edge);
        assert!(!f.results.iter().any(edge), "{what}: @{}", f.name);
        assert_eq!(f.kind != f.kind.plain(), plan.settings.microbatches > 1, "{what}");
        let plain =
            plan.module.funcs.iter().find(|g| (g.kind, g.stage) == (f.kind.plain(), f.stage));
        assert!(plain.is_some(), "{what}");
        let class = plan.classes.iter().find(|c| c.funcs.contains(&fi)).expect("its rank");
        let of_microbatch = |i: &&Instr| matches!(i, Instr::Call(c) if c.microbatch.is_some());
        let calls: Vec<&Instr> = class.step.iter().filter(of_microbatch).collect();
        let own = |i: &&&Instr| matches!(i, Instr::Call(c) if c.func == fi);
        assert_eq!(calls.iter().filter(own).count(), 1, "{what}: @{}", f.name);
        assert!(calls.last().iter().any(own), "{what}: @{}", f.name);
    }
}

/// Under every schedule, with other axes: the numbers of one rank, and no more memory.
#[test]
fn every_schedule() {
    let mut one = OneRank::default();
    let mut moved = 0;
    for (i, n) in Named::ALL.into_iter().enumerate() {
        for (j, p) in [2, 4].into_iter().enumerate() {
            let fits = |m: &usize| legal(n, p, n.default_chunks(), *m).is_ok();
            let m = (1..=2 * p).rev().find(fits).expect("one is legal");
            let with = |axis: &'static str| pipeline(&[("pp", p), (axis, 2)], named(n), m);
            let all = [
                with("dp_replicate"),
                Options { zero: 1, ..with("dp_shard") },
                Options { recompute: Recompute::Full, ..with("cp") },
            ];
            for (_, o) in all.into_iter().enumerate().filter(|(k, _)| taken(i + 3 * j + k, 6)) {
                let o = on_devices(o);
                let what = format!("{} {:?} zero={}", n.name(), o.mesh, o.zero);
                let model = Fixture::open("llama_deep").model(&o);
                let (early, late) = (compile(&model, &o).plan, late(&model, &o).plan);
                moved += usize::from(all_sums(&early) > 0);
                assert!(early.peak_bytes() <= late.peak_bytes(), "{what}");
                one_last_call(&early, &what);
                check(&mut one, "llama_deep", &o);
            }
        }
    }
    assert!(moved > 5, "{moved} plans start sums early");
    // Both ends of the pipeline use the embedding: the last one's gradient is sent to the first.
    for (tied, n) in [("gpt2", Named::OneFOneB), ("gemma2", Named::ZbH1)] {
        let o = on_devices(pipeline(&[("pp", 2), ("dp_replicate", 2)], named(n), 4));
        let plan = compile(&Fixture::open(tied).model(&o), &o).plan;
        let tables = |f: &Func| {
            f.args
                .iter()
                .filter(|a| {
                    let of = |r: &shardc_ir::func::Role| matches!(r.kind, RoleKind::GradFrom(_));
                    a.role.as_ref().is_some_and(of)
                })
                .count()
        };
        assert_eq!(plan.module.of_kind(FuncKind::OptimizerStep).map(tables).sum::<usize>(), 1);
        one_last_call(&plan, tied);
        check(&mut one, tied, &o);
    }
}

/// Steps of Llama-3.1-8B take less time by price, in no more memory.
#[test]
fn steps_of_a_large_model_are_shorter() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let config = std::fs::read_to_string(path).expect("a config");
    let config = serde_json::from_str(&config).expect("JSON");
    let device = Device::named("h100-sxm").expect("a device");
    let seconds = |plan: &Plan| price(plan, &device, &[]).expect("a price").total;
    let dp: &[(&str, usize)] = &[("dp_replicate", 8)];
    let rows = [
        (options(dp, false, 1), 8, 0.90),
        (options(&[("dp_replicate", 4), ("tp", 2)], false, 1), 16, 0.96),
        (zero(&[("dp_shard", 8)], 1, 1), 32, 0.97),
    ];
    for (o, global_batch, most) in rows {
        let o = on_devices(Options {
            seq: 4096,
            dtype: DType::BF16,
            observe: false,
            global_batch,
            ..o
        });
        let model = shardc_frontends::from_config(&config, "config.json", &shardc::shape(&o));
        let model = model.expect("a model");
        let (early, late) = (compile(&model, &o).plan, late(&model, &o).plan);
        let part = seconds(&early) / seconds(&late);
        let what = format!("{:?}: {part}", o.mesh);
        assert!(part < most, "{what}");
        assert!(early.peak_bytes() <= late.peak_bytes(), "{what}");
        // A limit of memory is no reason for another plan.
        let limited = Options { memory: Some(late.peak_bytes() * 2), ..o.clone() };
        assert_eq!(all_sums(&compile(&model, &limited).plan), all_sums(&early), "{what}");
        // What hides nothing behind work says the same of both.
        let generic =
            |plan: &Plan| Prices::of(&o).and_then(|p| p.price(plan, &[])).expect("a price");
        let part = generic(&early).step / generic(&late).step;
        assert!((part - 1.0).abs() < 1e-3, "{what}: {part} by the model of passes");
    }
}

/// What is launched for the last microbatch is what is launched for the others, and the sums.
#[test]
fn the_last_microbatch_launches_what_the_others_do() {
    let mut seen = 0;
    for (_, (name, o, _)) in rows().into_iter().enumerate().filter(|(i, _)| taken(*i, 2)) {
        let o = on_devices(o);
        let plan = compile(&Fixture::open(name).model(&o), &o).plan;
        for f in plan.module.funcs.iter().filter(|f| f.kind != f.kind.plain()) {
            let plain = |g: &&Func| (g.kind, g.stage) == (f.kind.plain(), f.stage);
            let plain = plan.module.funcs.iter().find(plain).expect("it is there");
            let totals: Vec<Value> =
                f.results.iter().filter(|r| is_sum(r)).map(|r| r.value).collect();
            let all = |f: &Func| {
                let own = launches(f).into_iter().map(|x| f.nodes[x.nodes].to_vec());
                let sums = |n: &Node| n.outs.iter().any(|v| totals.contains(v));
                let own = own.filter(|x| !sums(&x[0]));
                let text = |n: &Node| format!("{:?} {}", n.op, f.name(n.outs[0]));
                let mut all: Vec<Vec<String>> = own.map(|x| x.iter().map(text).collect()).collect();
                all.sort();
                all
            };
            assert_eq!(all(f), all(plain), "{name} {:?} zero={}", o.mesh, o.zero);
            seen += 1;
        }
    }
    assert!(seen > 2, "{seen}");
}

fn call(i: &mut Instr) -> Option<&mut Call> {
    if let Instr::Call(c) = i { Some(c) } else { None }
}

/// Lists that call for the last microbatch what is for the others, or for another what is for the last, are refused.
#[test]
fn lists_with_another_last_call_are_refused() {
    let dp: &[(&str, usize)] = &[("dp_replicate", 2)];
    for o in [options(dp, false, 1), zero(&[("dp_shard", 2)], 1, 1)] {
        let o = on_devices(Options { global_batch: 8, ..o });
        let plan = compile(&Fixture::open("llama_gqa").model(&o), &o).plan;
        assert!(plan.settings.microbatches > 2);
        let of = |kind| plan.module.funcs.iter().position(|f| f.kind == kind).expect("it is there");
        let (plain, last) = (of(FuncKind::Backward), of(FuncKind::BackwardLast));
        // By call of one of them: which one.
        let with = |change: fn(usize, usize) -> bool| {
            let mut plan = plan.clone();
            let calls = plan.classes[0].step.iter_mut().filter_map(call);
            let calls = calls.filter(|c| c.func == plain || c.func == last);
            let m = plan.settings.microbatches;
            calls.enumerate().for_each(|(i, c)| c.func = if change(i, m) { last } else { plain });
            replay(&plan).map_err(|d| d.code)
        };
        assert_eq!(with(|i, m| i + 1 == m), Ok(()));
        let other: [fn(usize, usize) -> bool; 4] =
            [|i, _| i == 0, |i, m| i + 2 >= m, |_, _| true, |_, _| false];
        assert!(other.into_iter().all(|change| with(change) == Err("schedule")));
        // A microbatch twice, and another not at all.
        let mut twice = plan.clone();
        let calls = twice.classes[0].step.iter_mut().filter_map(call);
        calls.filter(|c| c.func == plain).for_each(|c| c.microbatch = Some(0));
        assert_eq!(replay(&twice).map_err(|d| d.code), Err("schedule"));
    }
}

/// Where ranks are threads nothing goes on beside work; where MPI moves data, all does that does over NCCL.
#[test]
fn transports_that_overlap_have_the_same_plans() {
    for (name, o, _) in rows().into_iter().take(3) {
        let with = |transport| {
            let o = Options { transport, ..o.clone() };
            compile(&Fixture::open(name).model(&o), &o).plan
        };
        assert_eq!(all_sums(&with(Transport::Threads)), 0);
        let (mpi, nccl) = (with(Transport::Mpi), with(Transport::Nccl));
        assert!(
            all_sums(&mpi) > 0 && text::print(&mpi.module) == text::print(&nccl.module),
            "{name}"
        );
        assert_eq!(mpi.classes, nccl.classes);
    }
}

/// By terms and by types.
#[test]
fn such_plans_are_proved() {
    for (_, (name, o, _)) in rows().into_iter().enumerate().filter(|(i, _)| taken(*i + 1, 3)) {
        proved(name, &on_devices(o));
    }
    let o = pipeline(&[("pp", 2), ("dp_replicate", 2)], named(Named::ZbH1), 4);
    proved("llama_deep", &on_devices(o));
    // Two functions of one rank add to the table that both ends use.
    let o = pipeline(&[("pp", 2), ("dp_replicate", 2)], named(Named::ZbV), 4);
    proved("llama_bias_tied", &on_devices(o));
}

/// What is called for the last microbatch must do what is called for the others: by terms and over a finite field.
#[test]
fn another_last_microbatch_is_refused() {
    let o = on_devices(options(&[("dp_replicate", 2)], false, 2));
    let model = Fixture::open("llama_gqa").model(&o);
    let compiled = compile(&model, &o);
    let verdicts = |change: &dyn Fn(&mut Module)| {
        let mut texts = texts(&model, &o, &compiled);
        change(&mut texts.programs);
        [texts.prove().verdict(), prove_smaller(&texts.subject(), texts.data).verdict()]
    };
    assert_eq!(verdicts(&|_| ()), [Verdict::Proved; 2]);
    let last = |m: &mut Module, change: &dyn Fn(&mut Func)| {
        let mut all = m.funcs.iter_mut().filter(|f| f.kind == FuncKind::BackwardLast);
        change(all.next().expect("a last backward"));
    };
    // The gradient of the last microbatch twice, in place of what was added up before.
    let twice = verdicts(&|m| {
        last(m, &|f| {
            let sums: Vec<_> =
                f.nodes.iter().filter(|n| matches!(n.op, Op::AllReduce(_))).collect();
            let total = sums[0].ins[0];
            let add = f.nodes.iter_mut().find(|n| n.outs.contains(&total)).expect("a sum");
            add.ins[0] = add.ins[1];
        });
    });
    assert_eq!(twice, [Verdict::Refuted; 2]);
    // For every microbatch: each would hand on a sum of its own.
    let [each, _] = verdicts(&|m| {
        m.funcs.retain(|f| f.kind != FuncKind::Backward);
        last(m, &|f| (f.kind, f.name) = (FuncKind::Backward, "backward".into()));
    });
    assert_eq!(each, Verdict::Refuted);
    // A plan needs the function for the others.
    let mut m = compiled.plan.module.clone();
    m.funcs.retain(|f| f.kind != FuncKind::Backward);
    let refused = rank_classes(&m, &compiled.plan.schedule, &compiled.plan.settings);
    assert_eq!(refused.expect_err("no backward").code, "plan");
}

/// What runs for the last microbatch may not leave out what the others add, though nothing else is missing.
#[test]
fn a_last_microbatch_that_adds_less_is_refused() {
    let o = on_devices(options(&[("dp_replicate", 2)], false, 2));
    let model = Fixture::open("llama_gqa").model(&o);
    let late = late(&model, &o);
    let verdict = |left_out: usize| {
        let mut texts = texts(&model, &o, &late);
        let m = &mut texts.programs;
        let of = |m: &Module, kind| m.funcs.iter().position(|f| f.kind == kind).expect("there is");
        let mut last = m.funcs[of(m, FuncKind::Backward)].clone();
        (last.kind, last.name) = (FuncKind::BackwardLast, "backward_last".into());
        last.results.drain(..left_out);
        m.funcs.insert(of(m, FuncKind::OptimizerStep), last);
        texts.prove().verdict()
    };
    assert_eq!([verdict(0), verdict(1)], [Verdict::Proved, Verdict::Refuted]);
}

/// A gradient that two functions add to is no sum over ranks before both have.
#[test]
fn a_sum_of_what_two_functions_add_to_is_refused() {
    let o = on_devices(pipeline(&[("pp", 2), ("dp_replicate", 2)], named(Named::ZbV), 4));
    let model = Fixture::open("llama_bias_tied").model(&o);
    let compiled = compile(&model, &o);
    let mut texts = texts(&model, &o, &compiled);
    assert_eq!(texts.prove().verdict(), Verdict::Proved);
    let m = &mut texts.programs;
    let adds = |f: &Func, name: &str| f.results.iter().any(|r| r.is(RoleKind::Grad, name));
    let both = m.funcs.iter().enumerate().filter(|(_, f)| f.kind == FuncKind::OptimizerStep);
    let both = both.flat_map(|(i, f)| f.args.iter().map(move |a| (i, a))).find_map(|(end, a)| {
        let name = a.role.as_ref().filter(|r| r.kind == RoleKind::Grad)?.name.clone();
        let makers = m.funcs.iter().filter(|f| f.kind.is_looped() && adds(f, &name));
        (makers.count() == 2).then_some((end, name, a.value))
    });
    let (end, name, arg) = both.expect("two functions add to the table's");
    // Its sum moves into the last call of its rank.
    let finish = &mut m.funcs[end];
    let at = finish.nodes.iter().position(|n| n.ins.contains(&arg)).expect("its sum");
    let n = &mut finish.nodes[at];
    let k = n.ins.iter().position(|&v| v == arg).expect("as above");
    let op = n.op.clone();
    let (_, out) = (n.ins.remove(k), n.outs.remove(k));
    if n.ins.is_empty() {
        finish.nodes.remove(at);
    }
    let ty = finish.ty(out).clone();
    finish.values[arg].ty = ty.clone();
    let read = finish.nodes.iter_mut().flat_map(|n| &mut n.ins);
    read.filter(|v| **v == out).for_each(|v| *v = arg);
    let sum = |p: &mut Port| p.role.as_mut().expect("a role").kind = RoleKind::GradSum;
    finish.args.iter_mut().filter(|a| a.value == arg).for_each(sum);
    let ends = m.funcs.iter().find(|f| (f.kind, f.stage) == (FuncKind::Weight, 0));
    let mut last = ends.expect("the rank's last").clone();
    (last.kind, last.name) = (FuncKind::WeightLast, "weight_last.0".into());
    let r = last.results.iter().position(|r| r.is(RoleKind::Grad, &name)).expect("its total");
    let total = last.results[r].value;
    let made = last.value(ty, last.name(total).clone());
    last.nodes.push(Node::new(op, &[total], &[made], Scope::default()));
    last.results[r].value = made;
    sum(&mut last.results[r]);
    m.funcs.insert(end, last);
    let report = texts.prove();
    assert_eq!(report.verdict(), Verdict::Refuted);
    let why = format!("{:?}", report.refuted);
    assert!(report.refuted.len() == 1 && why.contains("2 functions add to it"), "{why}");
}

/// People are told where a gradient is summed.
#[test]
fn answers_say_where_sums_are() {
    let lab = Lab::new("early-sums");
    let model = lab.model("llama_gqa");
    let sized = ["--seq", "16", "--mesh", "dp=2", "--global-batch", "8", "--microbatch", "2"];
    lab.ok(&[&["compile", &model, "-o", "p", "--transport", "nccl"], &sized[..]].concat());
    for check in [&["verify", "p"][..], &["verify", "p", "--numbers"], &["prove", "p"]] {
        lab.ok(check);
    }
    let text = |args: &[&str]| String::from_utf8(lab.ok(args).stdout).expect("text");
    let own = text(&["explain", "p", "tensor:model.norm.weight"]);
    assert!(
        own.contains("summed over 2 microbatches") && own.contains("once per step all_reduce"),
        "{own}"
    );
    let list = text(&["inspect", "p", "--rank", "0", "--instructions"]);
    assert_eq!(list.matches("Backward").count(), 2, "{list}");
    let all = shardc::plan_dir::read(&lab.path("p")).expect("a plan").plan;
    let numbers = shardc::inspect::numbered(&all);
    let of_last = |x: &(usize, usize)| all.module.funcs[x.0].kind == FuncKind::BackwardLast;
    let first = numbers.iter().position(of_last).expect("a sum") + 1;
    let why = text(&["explain", "p", &format!("collective:{first}")]);
    assert!(why.contains("once per step, for the last microbatch"), "{why}");
    let counted = shardc::inspect::layer_collectives(&all, 0);
    let gradients: usize = counted.step().iter().flat_map(|s| &s.calls).map(|c| c.gradients).sum();
    assert_eq!(gradients, all.weights.len());
    lab.ok(&["inspect", "p", "--summary"]);
    lab.ok(&["price", "p", "--machine", "h100-sxm"]);
    lab.ok(&["report", "p", "-o", "report.html"]);
}
