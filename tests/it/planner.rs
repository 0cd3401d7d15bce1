//! Prices of compiled plans, and `shardc plan`.

mod families;
mod prices;
mod search;

use crate::fixture::options;
use crate::lab::{FIXTURES, Lab};
use serde_json::Value as Json;
use shardc::report::collectives;
use shardc_cost::device::Device;
use shardc_cost::plan::launch::Work;
use shardc_cost::plan::{Item, price};
use shardc_ir::func::FuncKind;
use shardc_ir::group::launches;
use shardc_ir::ops::Sends;
use shardc_ir::plan::{Plan, calls};
use shardc_ir::schedule::{Times, replay};
use shardc_passes::options::{CpMode, CpSplit, Options, Order, Transport};
use shardc_testing::{nightly, samples, taken};
use std::collections::BTreeSet;
use std::path::Path;

fn h100() -> Device {
    Device::named("h100-sxm").expect("known")
}

fn compiled(fixture: &str, o: &Options) -> Plan {
    let path = Path::new(FIXTURES).join(fixture);
    shardc::compile(&path, o, &mut |_, _| {}).expect("it compiles").stored.plan
}

/// Plans of several kinds, as devices run them.
fn plans() -> Vec<Plan> {
    let on_devices = |o: Options| Options { transport: Transport::Nccl, ..o };
    let named = |name: &str| Order::Named(name.into());
    let pipeline = options(&[("pp", 2), ("dp_replicate", 2)], false, 1);
    let sharded = Options { zero: 3, ..options(&[("dp_shard", 2), ("tp", 2)], true, 2) };
    let experts = Options { ep: 2, etp: Some(1), ..options(&[("dp_shard", 2)], false, 2) };
    vec![
        compiled("llama_gqa", &on_devices(options(&[("tp", 2)], false, 8))),
        compiled("llama_gqa", &on_devices(sharded)),
        compiled("llama_gqa", &on_devices(pipeline.clone())),
        compiled("llama_gqa", &on_devices(Options { schedule: named("zb-h1"), ..pipeline })),
        compiled("mixtral", &on_devices(experts)),
        compiled("gpt2", &on_devices(options(&[("cp", 2)], false, 8))),
    ]
}

/// Every launch of every function that a step calls is priced, each node of it once, and every
/// collective that the report counts is an exchange.
#[test]
fn every_launch_and_exchange_is_priced_once() {
    for plan in plans() {
        let p = price(&plan, &h100(), &[]).expect("a price");
        for class in &plan.classes {
            let mut exchanges = 0;
            for call in calls(&class.step) {
                let f = &plan.module.funcs[call.func];
                let items = &p.funcs[call.func].items;
                let made: Vec<usize> = launches(f).iter().map(|l| l.nodes.start).collect();
                assert_eq!(items.iter().map(|i| i.node).collect::<Vec<_>>(), made);
                assert_eq!(launches(f).iter().map(|l| l.nodes.len()).sum::<usize>(), f.nodes.len());
                let is_exchange = |i: &&Item| matches!(i.work, Work::Exchange { .. });
                exchanges += items.iter().filter(is_exchange).count();
            }
            let counted = collectives(&plan, class);
            let own = counted.iter().filter(|c| !["send", "recv"].contains(&c.kind));
            assert_eq!(exchanges, own.map(|c| c.count).sum::<usize>());
        }
    }
}

/// Of a contiguous ring the last rank computes all blocks before its own, with zigzag each rank a half of every block;
/// with all keys at hand zigzag has a half of the scores, and the last rank of a contiguous split nearly all.
#[test]
fn attention_is_priced_as_the_rank_that_has_most_of_it() {
    let cp = |kind, mode, split, of_a_layer| -> Vec<f64> {
        let mut o = options(&[("cp", 4)], false, 1);
        (o.seq, o.cp_mode, o.cp_split) = (32, mode, Some(split));
        let plan = compiled("llama_gqa", &o);
        let p = price(&plan, &h100(), &[]).expect("a price");
        let forward = plan.module.funcs.iter().position(|f| f.kind == kind);
        let items = &p.funcs[forward.expect("a function")].items;
        let seen = items.iter().filter_map(|i| match i.work {
            Work::Attention { sizes, .. } => Some(sizes.seen),
            _another => None,
        });
        seen.take(of_a_layer).collect()
    };
    for kind in [FuncKind::Forward, FuncKind::Backward] {
        let (ring, gathered) = (CpMode::Ring, CpMode::AllGather);
        assert_eq!(cp(kind, ring, CpSplit::Contiguous, 4), [0.5, 1.0, 1.0, 1.0]);
        assert_eq!(cp(kind, ring, CpSplit::Zigzag, 4), [0.5; 4]);
        assert_eq!(cp(kind, gathered, CpSplit::Contiguous, 2), [0.875; 2]);
        assert_eq!(cp(kind, gathered, CpSplit::Zigzag, 2), [0.5; 2]);
    }
}

/// Whatever a family and its layout exchange has a price, and words of its own.
#[test]
fn every_collective_of_every_family_has_a_price() {
    let on = |o: Options| Options { transport: Transport::Nccl, ..o };
    let named = |name: &str| Order::Named(name.into());
    let staged = options(&[("pp", 2), ("tp", 2)], true, 1);
    let dense = [
        options(&[("tp", 2)], true, 2),
        Options { zero: 3, ..options(&[("dp_shard", 2)], false, 1) },
        Options { zero: 2, ..options(&[("dp_replicate", 2), ("dp_shard", 2)], false, 1) },
        options(&[("cp", 2)], false, 2),
        Options { cp_mode: CpMode::Ring, ..options(&[("cp", 2)], false, 2) },
        Options { cp_mode: CpMode::Ulysses, ..options(&[("cp", 2)], false, 2) },
        Options { schedule: named("zb-h1"), clip: Some(1.0), ..staged },
    ];
    let sparse = [
        Options { ep: 2, etp: Some(1), ..options(&[("dp_shard", 2)], false, 1) },
        Options { ep: 2, etp: Some(1), ..options(&[("dp_shard", 2), ("tp", 2)], true, 1) },
        Options { etp: Some(2), ..options(&[("tp", 2)], true, 2) },
    ];
    let mut kinds = BTreeSet::new();
    let fixtures = [
        "llama_gqa",
        "mistral_window",
        "qwen2",
        "qwen3",
        "gpt2",
        "gemma2",
        "olmo2",
        "phi3",
        "gemma3",
        "gpt_neox",
        "mixtral",
        "qwen3_moe",
        "deepseek_v3",
        "glm4_moe",
    ];
    for (f, fixture) in fixtures.into_iter().enumerate() {
        let has = ["mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe"].contains(&fixture);
        let all = dense.iter().chain(sparse.iter().filter(|_| has));
        let all = all.enumerate().filter(|(i, _)| taken(f + i, 2)).map(|(_, o)| o);
        let mut done = 0;
        for o in all.cloned().map(on) {
            let path = Path::new(FIXTURES).join(fixture);
            // What a family does not run on is refused elsewhere.
            let Ok(made) = shardc::compile(&path, &o, &mut |_, _| {}) else { continue };
            done += 1;
            let plan = made.stored.plan;
            let p = price(&plan, &h100(), &[]).expect("a price");
            for class in &plan.classes {
                let mut exchanges = 0;
                for call in calls(&class.step) {
                    for i in &p.funcs[call.func].items {
                        let Work::Exchange { op, sends, group, bytes, .. } = i.work else {
                            continue;
                        };
                        exchanges += 1;
                        let moves = sends != Sends::Nothing && group.size > 1.0;
                        assert_eq!(i.seconds > 0.0, moves, "{fixture} {op} {bytes}");
                        assert!(i.seen > 0.0 || !moves, "{fixture} {op} {bytes}");
                        kinds.insert(op);
                    }
                }
                let counted = collectives(&plan, class);
                let own = counted.iter().filter(|c| !["send", "recv"].contains(&c.kind));
                assert_eq!(exchanges, own.map(|c| c.count).sum::<usize>(), "{fixture}");
            }
        }
        assert!(done >= samples(2, 5), "{fixture}: {done}");
    }
    for op in ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"] {
        assert!(kinds.contains(op), "{op} of {kinds:?}");
    }
}

#[test]
fn parts_are_what_launches_take() {
    for plan in plans() {
        let p = price(&plan, &h100(), &[]).expect("a price");
        assert_eq!(p.total, p.parts.total());
        assert!(p.total > 0.0 && p.parts.list().iter().all(|x| x.1 >= 0.0), "{:?}", p.parts);
        for f in &p.funcs {
            let seen: f64 = f.items.iter().map(|i| i.seen).sum();
            assert!((f.parts.total() - seen).abs() <= 1e-12 + 1e-9 * seen, "{seen}");
        }
        // Without pipeline a step is its calls.
        if plan.classes.len() == 1 {
            let calls = calls(&plan.classes[0].step);
            let all: f64 = calls.map(|c| p.funcs[c.func].parts.total()).sum();
            assert!((all - p.total).abs() < 1e-9 * all, "{all} {}", p.total);
        }
    }
}

/// FLOPs of products and attention by the sizes of launches are those that letter rules give, where
/// attention counts all scores.
#[test]
fn sizes_of_products_are_those_of_their_letters() {
    for plan in plans().into_iter().filter(|p| !has_experts(p)) {
        let p = price(&plan, &h100(), &[]).expect("a price");
        let mesh = &plan.module.mesh;
        for (f, own) in plan.module.funcs.iter().zip(&p.funcs) {
            let all = launches(f);
            for (x, item) in all.iter().zip(&own.items) {
                let node = f.nodes[x.nodes.clone()].iter().find(|n| n.op.is_heavy());
                let (Some(node), Work::Product { gemm, .. }) = (node, item.work) else { continue };
                let ins: Vec<_> = node.ins.iter().map(|&v| f.ty(v)).collect();
                let by_rule = shardc_ir::price::flops(mesh, &node.op, &ins, f.ty(node.outs[0]));
                assert_eq!(gemm.flops(), by_rule, "{}", node.op.mnemonic());
            }
        }
    }
}

fn has_experts(plan: &Plan) -> bool {
    let mut nodes = plan.module.funcs.iter().flat_map(|f| &f.nodes);
    nodes.any(|n| n.op.facts().kind.of_experts())
}

#[test]
fn a_faster_machine_is_never_slower() {
    let d = h100().with("domain", 2.0).expect("a count");
    for plan in plans() {
        let before = price(&plan, &d, &[]).expect("a price").total;
        for (name, value) in [("nic", d.nic), ("link", d.link), ("hbm", d.hbm)] {
            let twice = d.clone().with(name, 2.0 * value / 1e9).expect("a speed");
            assert!(price(&plan, &twice, &[]).expect("a price").total <= before, "{name}");
        }
        assert_eq!(price(&plan, &d, &[]).expect("a price").total, before);
    }
}

/// Where sends take no time, the clocks of a pipeline are the replay of its schedule.
#[test]
fn clocks_are_the_replay_of_the_schedule() {
    let mut d = h100();
    (d.link, d.nic, d.fit.hop.value) = (1e30, 1e30, 0.0);
    for plan in plans().into_iter().filter(|p| p.classes.len() > 1) {
        let p = price(&plan, &d, &[]).expect("a price");
        let funcs = plan.module.funcs.iter().zip(&p.funcs);
        let of = |kind: FuncKind| -> Vec<f64> {
            let own = funcs.clone().filter(|x| x.0.kind == kind);
            own.map(|x| x.1.parts.total()).collect()
        };
        let stages = plan.schedule.owner.len();
        let none = vec![0.0; stages];
        let weight = of(FuncKind::Weight);
        let weight = if weight.is_empty() { none } else { weight };
        let (forward, input) = (of(FuncKind::Forward), of(FuncKind::Backward));
        let span = replay(&plan.schedule, &Times { forward, input, weight }).expect("it runs");
        // By which the last call of a microbatch is longer: it may sum gradients over ranks.
        let total = |f: usize| p.funcs[f].parts.total();
        let more = |class: usize| -> f64 {
            let own = plan.classes[class].funcs.iter();
            let longer = own.filter_map(|&i| {
                let f = &plan.module.funcs[i];
                let plain = (f.kind.plain(), f.stage);
                let is = |g: &shardc_ir::func::Func| (g.kind, g.stage) == plain;
                Some(total(i) - total(plan.module.funcs.iter().position(is)?))
            });
            longer.map(|x| x.max(0.0)).sum()
        };
        let once = |class: usize| -> f64 {
            let calls = calls(&plan.classes[class].step).filter(|c| c.microbatch.is_none());
            calls.map(|c| p.funcs[c.func].parts.total()).sum::<f64>() + more(class)
        };
        // Before the microbatches nothing is done that takes time on one rank and not on the other.
        let longest = (0..plan.classes.len()).map(once).fold(0.0, f64::max);
        let (least, most) = (span.makespan(), span.makespan() + longest);
        assert!(p.total >= least * (1.0 - 1e-9), "{} {least}", p.total);
        assert!(p.total <= most * (1.0 + 1e-9), "{} {most}", p.total);
    }
}

/// Where stages are not alike the parts are those of the rank for which the others wait, not of the one that ends last.
#[test]
fn parts_are_those_of_the_rank_that_waits_least() {
    for (layers, class) in [("1,7", 1), ("7,1", 0)] {
        let o = Options { layers: layers.into(), ..options(&[("pp", 2)], false, 1) };
        let p = price(&compiled("llama_deep", &o), &h100(), &[]).expect("a price");
        assert_eq!(p.class, class, "{layers}");
        assert!((p.parts.total() / p.total - 1.0).abs() < 1e-9, "{layers}");
        assert!(p.parts.bubble < 0.3 * p.total, "{layers}: {:?}", p.parts);
    }
}

fn planned(lab: &Lab, args: &[&str]) -> Json {
    let out = lab.ok(&[&["plan", "m", "--machine", "h100-sxm", "--format", "json"], args].concat());
    serde_json::from_slice(&out.stdout).expect("JSON")
}

/// A folder with the config of a model alone.
fn lab(name: &str, fixture: &str) -> Lab {
    let lab = Lab::new(name);
    let config = std::fs::read(Path::new(FIXTURES).join(fixture).join("config.json"));
    lab.write("m/config.json", config.expect("the fixture"));
    lab
}

/// The command of a line, which makes its plan in a folder.
fn command(line: &Json, dir: &str) -> Vec<String> {
    let mut out = ["compile", "m", "-o", dir].map(String::from).to_vec();
    for (flag, v) in line["options"].as_object().expect("flags") {
        out.push(format!("--{flag}"));
        out.extend((*v != true).then(|| v.as_str().map_or(v.to_string(), String::from)));
    }
    out
}

/// The options that are said of a line are flags of `compile`, which makes the plan that was priced.
#[test]
fn options_of_a_line_make_its_plan() {
    let asked = [
        ("llama_gqa", &["--gpus", "8", "--fix", "pp=2"][..]),
        ("llama_gqa", &["--gpus", "4", "--fix", "zero=3"]),
        ("llama_deep", &["--gpus", "4", "--fix", "pp=2,v=2"]),
        ("qwen3_moe", &["--gpus", "4", "--fix", "ep=2", "--moe-bound", "2"]),
        ("gpt2", &["--gpus", "4", "--fix", "cp=2"]),
        (
            "llama_gqa",
            &[
                "--gpus",
                "2",
                "--fix",
                "cp=2,mb=4",
                "--grad-dtype",
                "bf16",
                "--decay",
                "matrices",
                "--cp-split",
                "zigzag",
                "--clip",
                "1",
            ],
        ),
        // There is no dp: ZeRO shards over cp alone.
        ("llama_gqa", &["--gpus", "2", "--fix", "cp=2,zero=3"]),
    ];
    for (case, (fixture, args)) in asked.into_iter().enumerate() {
        let lab = lab(&format!("plan-options-{fixture}-{}", args.len() + args[3].len()), fixture);
        let rest = ["--global-batch", "8", "--seq", "16", "--top", "3", "--budget", "6"];
        let found = planned(&lab, &[args, &rest].concat());
        let plans = found["plans"].as_array().expect("plans");
        // Every run takes one line of each.
        let some = plans.iter().enumerate().filter(|(i, _)| nightly() || *i == case % plans.len());
        for (i, plan) in some {
            let dir = format!("{i}.plan");
            let flags = command(plan, &dir);
            let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
            lab.ok(&flags);
            let made = shardc::plan_dir::read(&lab.path(&dir)).expect("a plan").plan;
            let (own, device) = (&plan["as_compiled"], h100());
            assert_eq!(own["peak_bytes"].as_u64(), Some(made.peak_bytes() as u64), "{flags:?}");
            let seconds = price(&made, &device, &[]).expect("a price").total;
            assert_eq!(own["step_s"].as_f64(), Some(seconds), "{flags:?}");
            lab.ok(&["prove", &dir]);
        }
        let said =
            lab.ok(
                &[&["plan", "m", "--machine", "h100-sxm", "--explain", "1"], args, &rest].concat()
            );
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.contains("\nshardc compile m --mesh "), "{said}");
    }
}

/// Layouts of many microbatches are compiled with few of them: they have the memory and the time of what their command
/// makes, in every schedule and with stages that are not equal.
#[test]
fn many_microbatches_are_as_few_of_them_say() {
    // The last has a number of microbatches after which its schedule, that repeats with two laps, is in the middle of one.
    let cases = [
        ("pp=2,v=1", "320"),
        ("pp=2,v=2", "320"),
        ("pp=4,v=1", "320"),
        ("pp=1,zero=2", "320"),
        ("pp=2,v=2,dp=2,mb=2", "300"),
    ];
    for (case, (fix, batch)) in cases.into_iter().enumerate() {
        let lab = lab(&format!("plan-many-{case}"), "llama_deep");
        let args =
            ["--gpus", "4", "--global-batch", batch, "--seq", "16", "--fix", fix, "--top", "4"];
        let found = planned(&lab, &[&args[..], &["--budget", "6"]].concat());
        let plans = found["plans"].as_array().expect("plans");
        for (i, plan) in plans.iter().enumerate().filter(|(i, _)| nightly() || *i % 2 == 0) {
            let flags = command(plan, &format!("{i}.plan"));
            lab.ok(&flags.iter().map(String::as_str).collect::<Vec<_>>());
            let made =
                shardc::plan_dir::read(&lab.path(&format!("{i}.plan"))).expect("a plan").plan;
            assert!(made.settings.microbatches >= 5, "{flags:?}");
            // Pieces of a tiny model are packed a little otherwise.
            let (peak, bytes) =
                (made.peak_bytes() as f64, plan["peak_bytes"].as_f64().expect("bytes"));
            assert!((bytes / peak - 1.0).abs() <= 0.005, "{flags:?}: {bytes} {peak}");
            let seconds = price(&made, &h100(), &[]).expect("a price").total;
            let said = plan["step_s"].as_f64().expect("seconds");
            assert!((said / seconds - 1.0).abs() <= 1e-3, "{flags:?}: {said} {seconds}");
        }
    }
}

/// The first plan for a target is exported to it with no more flags; what the target does not take is not listed, and
/// is counted.
#[test]
fn plans_for_a_target_are_exported() {
    for target in ["megatron", "torchtitan", "deepspeed", "nanotron"] {
        let lab = lab(&format!("plan-for-{target}"), "llama_mha");
        let args =
            ["--gpus", "4", "--global-batch", "8", "--seq", "16", "--top", "2", "--budget", "6"];
        let found = planned(&lab, &[&args[..], &["--for", target, "-o", "best"]].concat());
        assert_eq!(found["plans"].as_array().map(Vec::len), Some(2), "{target}");
        assert!(found["left_out"].as_u64() > Some(0), "{target}: {found}");
        assert!(found["left_out_most"]["why"].is_string(), "{target}");
        let all = planned(&lab, &args);
        assert_eq!((&all["left_out"], &all["left_out_most"]), (&0.into(), &Json::Null));
        let legal = |f: &Json| f["legal"].as_u64().expect("a number");
        assert!(legal(&found) < legal(&all), "{target}");
        lab.ok(&["export", "best", "--to", target, "-o", "files"]);
        let said = lab.ok(&[
            &["plan", "m", "--machine", "h100-sxm", "--for", target, "--explain", "2"],
            &args[..],
        ]
        .concat());
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.contains("left out: ") && said.contains("most often"), "{said}");
        assert!(!said.contains(" --decay "), "{said}");
    }
    // What needs programs is looked at when there are some.
    for target in ["hf-tp-plan", "dtensor", "chakra"] {
        let lab = lab(&format!("plan-for-{target}"), "llama_mha");
        let args = ["--gpus", "2", "--seq", "16", "--top", "1", "--for", target, "-o", "best"];
        planned(&lab, &args);
        lab.ok(&["export", "best", "--to", target, "-o", "files"]);
    }
    let lab = lab("plan-for-none", "llama_mha");
    let none = ["plan", "m", "--machine", "h100-sxm", "--gpus", "2", "--seq", "16", "--for"];
    for (target, decay, word) in [
        ("megatron", "all", "--decay matrices"),
        ("deepspeed", "matrices", "weight decay of matrices only"),
    ] {
        let args = [&none[..], &[target, "--decay", decay]].concat();
        let said = lab.refuses(&args, 3, "no-layout");
        assert!(said.contains(word), "{said}");
    }
}

/// What a GPU holds beside a plan is part of the machine's memory, and no part of `--memory`.
#[test]
fn what_lies_beside_a_plan_is_counted() {
    let lab = lab("plan-beside", "llama_gqa");
    let args = ["--gpus", "2", "--global-batch", "4", "--seq", "16", "--fix", "tp=2"];
    let all = planned(&lab, &[&args[..], &["--top", "100"]].concat());
    let plans = all["plans"].as_array().expect("plans");
    let of = |p: &Json, name: &str| p[name].as_u64().expect("bytes");
    let needs = |p: &Json| of(p, "peak_bytes") + of(p, "beside_bytes");
    let least = plans.iter().min_by_key(|p| needs(p)).expect("a plan");
    // The context, and one communicator of tp.
    assert_eq!(of(least, "beside_bytes"), (1 << 30) + (688 << 20));
    let with = |flag: &str, n: u64| {
        let n = if flag == "--memory" { format!("{n}B") } else { format!("memory={n}") };
        [&args[..], &["--top", "1", flag]]
            .concat()
            .into_iter()
            .map(String::from)
            .chain([n])
            .collect()
    };
    let finds = |flags: Vec<String>| {
        planned(&lab, &flags.iter().map(String::as_str).collect::<Vec<_>>());
    };
    let refuses = |flags: Vec<String>| {
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        lab.refuses(&[&["plan", "m", "--machine", "h100-sxm"], &flags[..]].concat(), 3, "no-layout")
    };
    finds(with("--what-if", needs(least)));
    let said = refuses(with("--what-if", needs(least) - 1));
    assert!(said.contains(" beside it = "), "{said}");
    let peak = plans.iter().map(|p| of(p, "peak_bytes")).min().expect("a plan");
    finds(with("--memory", peak));
    let said = refuses(with("--memory", peak - 1));
    assert!(said.contains("use --grad-dtype bf16: "), "gradients of half the size fit: {said}");
    let said = lab.ok(&[&["plan", "m", "--machine", "h100-sxm"], &args[..]].concat()).stdout;
    let said = String::from_utf8_lossy(&said).into_owned();
    for words in ["\nbeside the plan: up to 1.67 GiB", "--transport nccl on h100-sxm"] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

/// A price says for which transport the plan was compiled, and what a GPU holds beside it.
#[test]
fn a_price_says_what_it_assumes() {
    let lab = lab("price-assumes", "llama_gqa");
    for (transport, device, words) in [
        ("threads", "h100-sxm", "\nwarning: compiled for --transport threads: exchanges"),
        ("nccl", "h100-sxm", "compiled for --transport nccl: exchanges go on beside work"),
        ("mpi", "h100-sxm", "\nwarning: compiled for --transport mpi: exchanges"),
        ("threads", "cpu-zen5-2c", "compiled for --transport threads\n"),
        ("mpi", "cpu-zen5-2c", "compiled for --transport mpi\n"),
    ] {
        let plan = format!("{transport}.plan");
        let flags = ["--mesh", "tp=2", "--seq", "16", "--transport", transport, "-o", &plan];
        lab.ok(&[&["compile", "m"], &flags[..]].concat());
        let said = lab.ok(&["price", &plan, "--machine", device]).stdout;
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(said.contains(words), "{words}: {said}");
        assert_eq!(said.contains("beside the plan"), device == "h100-sxm", "{said}");
        let json = lab.ok(&["price", &plan, "--machine", device, "--format", "json"]).stdout;
        let json: Json = serde_json::from_slice(&json).expect("JSON");
        assert_eq!(json["transport"], transport);
        let summary = lab.ok(&["inspect", &plan, "--summary"]).stdout;
        let summary = String::from_utf8_lossy(&summary).into_owned();
        assert_eq!(summary.contains("beside the plan"), transport == "nccl", "{summary}");
    }
}

/// What is called fitting fits: the written plan needs what was said, which is no more than there is.
#[test]
fn what_is_said_of_a_layout_is_what_its_plan_says() {
    let lab = lab("plan-fits", "llama_gqa");
    let args = ["--gpus", "4", "--global-batch", "8", "--seq", "16", "--top", "3", "-o", "best"];
    let found = planned(&lab, &[&args[..], &["--memory", "1MiB"]].concat());
    let plans = found["plans"].as_array().expect("plans");
    assert_eq!(plans.len(), 3);
    assert!(plans.iter().all(|p| p["peak_bytes"].as_u64() <= Some(1 << 20)));
    let times: Vec<f64> = plans.iter().map(|p| p["step_s"].as_f64().expect("seconds")).collect();
    // Of what takes as long to a percent, less memory is first.
    assert!(times.is_sorted_by(|a, b| *a <= 1.01 * b), "{times:?}");
    let written = shardc::plan_dir::read(&lab.path("best")).expect("a plan");
    assert_eq!(Some(written.plan.peak_bytes() as u64), plans[0]["peak_bytes"].as_u64());
    let priced = lab.ok(&["price", "best", "--machine", "h100-sxm", "--format", "json"]);
    let priced: Json = serde_json::from_slice(&priced.stdout).expect("JSON");
    assert_eq!(priced["step_s"], plans[0]["step_s"]);
    lab.ok(&["verify", "best"]);
    // It is what the command of the line makes, options and all.
    let again = command(&plans[0], "again");
    lab.ok(&again.iter().map(String::as_str).collect::<Vec<_>>());
    let said = lab.ok(&["diff", "best", "again"]).stdout;
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(said.contains("the plans are the same"), "{said}");
    // The same question has the same answer.
    let again = planned(&lab, &[&args[..8], &["--memory", "1MiB"]].concat());
    assert_eq!(found, again);
    let fixed = planned(&lab, &[&args[..8], &["--fix", "tp=2,pp=2"]].concat());
    let mesh = |p: &Json| p["mesh"].as_str().expect("a mesh").to_string();
    let all = fixed["plans"].as_array().expect("plans");
    assert!(all.iter().all(|p| mesh(p).contains("pp=2") && mesh(p).contains("tp=2")), "{fixed}");
}

#[test]
fn experts_are_planned_and_a_faster_network_is_heard_of() {
    let lab = lab("plan-experts", "qwen3_moe");
    let args = ["--gpus", "4", "--global-batch", "8", "--seq", "16", "--top", "2"];
    let found = planned(&lab, &[&args[..], &["--fix", "ep=2"]].concat());
    let all = found["plans"].as_array().expect("plans");
    assert!(!all.is_empty());
    assert!(all.iter().all(|p| p["mesh"].as_str().is_some_and(|m| m.contains("ep=2"))));
    let said =
        lab.ok(&[&["plan", "m", "--machine", "h100-sxm", "--explain", "1"], &args[..]].concat());
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    for word in ["tokens/s", "~", "legal", "constants of h100-sxm", "prior", "tables"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let what_if = ["--what-if", "domain=2"];
    let slow = planned(&lab, &[&args[..], &["--fix", "ep=2"], &what_if].concat());
    let step = |f: &Json| f["plans"][0]["closed_form_s"].as_f64().expect("seconds");
    assert!(step(&slow) >= step(&found));
}

/// What is said to be the largest compiles and fits, and the next one does not.
#[test]
fn the_largest_that_fits_is_found() {
    let lab = lab("plan-largest", "llama_gqa");
    let config = std::fs::read_to_string(lab.path("m/config.json")).expect("the config");
    let mut config: Json = serde_json::from_str(&config).expect("JSON");
    config["max_position_embeddings"] = 512.into();
    lab.write("m/config.json", config.to_string());
    let args = ["--gpus", "2", "--global-batch", "24", "--fix", "tp=2,mb=2", "--top", "1"];
    let peak = |extra: &[&str]| -> u64 {
        let mesh = ["compile", "m", "--mesh", "tp=2", "--dtype", "bf16", "--global-batch", "24"];
        let out =
            lab.ok(&[&mesh[..], &["--transport", "nccl", "--format", "json"], extra].concat());
        let report: Json = serde_json::from_slice(&out.stdout).expect("JSON");
        let classes = report["per_class"].as_array().expect("classes");
        classes.iter().filter_map(|c| c["peak_bytes"].as_u64()).max().expect("bytes")
    };
    for (of, memory, flag) in [("seq", "1MiB", "--seq"), ("microbatch", "1MiB", "--microbatch")] {
        let found =
            planned(&lab, &[&args[..], &["--seq", "64", "--max", of, "--memory", memory]].concat());
        let plan = &found["plans"][0];
        let most = &plan["largest"];
        let limit: u64 = memory[..1].parse::<u64>().expect("a number") << 20;
        assert_eq!(
            (&most["of"], &most["next"]["limit"]),
            (&Json::from(of), &Json::from("memory")),
            "{found}"
        );
        let sp = plan["layout"].as_str().expect("words").contains("sp");
        let kept = match plan["layout"].as_str().expect("words") {
            w if w.contains("full") => "full",
            _default => "elementwise",
        };
        for (at, fits) in [(most, true), (&most["next"], false)] {
            let value = at["value"].as_u64().expect("a number").to_string();
            let mut own = vec![flag, &value, "--recompute", kept];
            own.extend(sp.then_some("--sp"));
            own.extend(if of == "seq" { ["--microbatch", "2"] } else { ["--seq", "64"] });
            let needs = peak(&own);
            assert_eq!(Some(needs), at["peak_bytes"].as_u64(), "{own:?}");
            assert_eq!(needs <= limit, fits, "{own:?}");
        }
    }
    // The model's own limit, and the batch's.
    let of = |of: &str| {
        planned(&lab, &[&args[..], &["--seq", "64", "--max", of, "--memory", "1GiB"]].concat())
    };
    let seq = &of("seq")["plans"][0]["largest"];
    assert_eq!((&seq["value"], &seq["next"]["limit"]), (&512.into(), &Json::from("refused")));
    let rows = &of("microbatch")["plans"][0]["largest"];
    assert_eq!((&rows["value"], &rows["next"]), (&24.into(), &Json::Null));
    // 24 / 8 microbatches are not a multiple of two stages, 24 / 12 are.
    let deep = self::lab("plan-largest-interleaved", "llama_deep");
    let batch = ["--gpus", "2", "--global-batch", "24", "--seq", "16"];
    let fixed = ["--fix", "pp=2,v=2,mb=1", "--top", "1", "--max", "microbatch"];
    let found = planned(&deep, &[&batch[..], &fixed].concat());
    let rows = &found["plans"][0]["largest"];
    assert_eq!((&rows["value"], &rows["next"]), (&12.into(), &Json::Null));
}

/// A plan that was priced on two nodes is started on two.
#[test]
fn a_plan_is_started_on_as_many_nodes_as_it_was_priced_on() {
    let lab = lab("plan-nodes", "llama_gqa");
    let args = ["--gpus", "16", "--global-batch", "16", "--seq", "16", "--top", "1", "-o", "best"];
    planned(&lab, &args);
    let script = lab.ok(&["launch-script", "best", "--for", "slurm"]).stdout;
    let script = String::from_utf8_lossy(&script).into_owned();
    for line in [
        "--nodes=2\n",
        "--ntasks=16\n",
        "--gpus-per-node=8\n",
        "--mem=0\n",
        "--cpus-per-task=8\n",
        "--gpu-bind=closest ",
    ] {
        assert!(script.contains(line), "{line}: {script}");
    }
}

/// Every launch of a plan is in the trace of its run, with its price beside what it took.
#[test]
fn a_price_is_set_beside_a_run() {
    let lab = lab("price-trace", "llama_gqa");
    lab.ok(&[
        "compile",
        "m",
        "--mesh",
        "tp=2,pp=2",
        "--seq",
        "16",
        "--global-batch",
        "2",
        "-o",
        "p",
    ]);
    lab.ok(&["run", "p", "--steps", "2", "--trace", "t.json"]);
    let price = ["price", "p", "--machine", "cpu-zen5-2c", "--trace", "t.json"];
    let out = lab.ok(&[&price[..], &["--launches", "--format", "json"]].concat());
    let priced: Json = serde_json::from_slice(&out.stdout).expect("JSON");
    let all = |v: &Json| v.as_array().expect("launches").clone();
    let key = |v: &Json| (v["function"].to_string(), v["node"].as_u64().expect("a node"));
    let mut own: Vec<_> =
        all(&priced["launches"]).iter().filter(|v| v["what"] != "view").map(key).collect();
    let run = all(&priced["trace"]["launches"]);
    let mut ran: Vec<_> = run.iter().map(key).collect();
    own.sort();
    ran.sort();
    assert_eq!(own, ran);
    let number = |v: &Json, n: &str| v[n].as_f64().expect("a number");
    let off: Vec<f64> = run.iter().map(|v| number(v, "off_s")).collect();
    assert!(off.is_sorted_by(|a, b| a.abs() >= b.abs()));
    for v in &run {
        let by_one = number(v, "seconds") - number(v, "run_s");
        let all = by_one * number(v, "calls");
        assert!(number(v, "run_s") > 0.0 && (all - number(v, "off_s")).abs() < 1e-12, "{v}");
    }
    assert!(run.iter().map(|v| number(v, "run_s")).sum::<f64>() > 0.0);
    let said = lab.ok(&price);
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("one step") && said.contains("that are nearer"), "{said}");
    lab.ok(&["compile", "m", "--mesh", "cp=2", "--seq", "16", "-o", "q"]);
    let other = ["price", "q", "--machine", "cpu-zen5-2c", "--trace"];
    lab.refuses(&[&other[..], &["t.json"]].concat(), 2, "trace");
    // A launch is missing; the plan's equal in another place is the same plan.
    let text = std::fs::read_to_string(lab.path("t.json")).expect("the trace");
    let at = text.find("\"function\":\"forward").expect("a launch");
    let launch = text[at..].split('}').next().expect("its function and node");
    let less: Vec<&str> = text.lines().filter(|l| !l.contains(launch)).collect();
    lab.write("less.json", less.join("\n"));
    let said = lab.refuses(&[&price[..4], &["--trace", "less.json"]].concat(), 2, "trace");
    assert!(said.contains("the trace has no launch at node"), "{said}");
    lab.write("old.json", text.replacen("\"otherData\"", "\"other\"", 1));
    lab.ok(&[&price[..4], &["--trace", "old.json"]].concat());
    // The same programs on another number of tokens are another plan.
    let longer = ["--mesh", "tp=2,pp=2", "--seq", "32", "--global-batch", "2", "-o", "longer"];
    lab.ok(&[&["compile", "m"][..], &longer].concat());
    let said = lab.refuses(
        &["price", "longer", "--machine", "cpu-zen5-2c", "--trace", "t.json"],
        2,
        "trace",
    );
    assert!(said.contains("of another plan"), "{said}");
    for text in ["{}", "{\"traceEvents\":[]}", "[", "{\"traceEvents\":[{\"ph\":\"X\"}]}"] {
        lab.write("bad.json", text);
        lab.refuses(&[&other[..], &["bad.json"]].concat(), 2, "trace");
    }
}

#[test]
fn plans_that_cannot_be_are_refused() {
    let lab = lab("plan-refused", "llama_gqa");
    fn plan<'a>(args: &[&'a str]) -> Vec<&'a str> {
        [&["plan", "m", "--machine", "h100-sxm"], args].concat()
    }
    fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
        let gpus = ["--gpus", "4", "--global-batch", "8", "--seq", "16"];
        plan(&[&gpus[..], more].concat())
    }
    let memory = lab.refuses(&with(&["--memory", "4096B"]), 3, "no-layout");
    assert!(memory.contains("= why: "), "{memory}");
    let fixed = lab.refuses(&with(&["--fix", "tp=3"]), 3, "no-layout");
    assert!(
        fixed.contains("none has tp=3") && fixed.contains("fix tp at one of 1, 2, 4"),
        "{fixed}"
    );
    let both = lab.refuses(&with(&["--fix", "tp=4,dp=4"]), 3, "no-layout");
    assert!(both.contains("tp=4, dp=4 are 16 ranks, and there are 4 ranks"), "{both}");
    let few = lab.refuses(&with(&["--fix", "tp=1,cp=1,pp=1,dp=2"]), 3, "no-layout");
    assert!(few.contains("dp=2 are 2 ranks, and there are 4 ranks"), "{few}");
    let twice = lab.refuses(&with(&["--fix", "tp=4,tp=2"]), 3, "no-layout");
    assert!(twice.contains("--fix says tp twice"), "{twice}");
    let pair = lab.refuses(&with(&["--fix", "mb=1,zero=3,tp=4"]), 3, "no-layout");
    assert!(
        pair.contains("none has zero=3, tp=4 together")
            && pair.contains("with zero=3 fix tp at one of 1, 2\n"),
        "{pair}"
    );
    let long =
        lab.refuses(&plan(&["--gpus", "4", "--global-batch", "8", "--seq", "512"]), 3, "no-layout");
    assert!(long.contains("seq") && !long.contains("--global-batch that"), "{long}");
    lab.refuses(&with(&["--fix", "tp"]), 2, "flag");
    lab.refuses(&with(&["--fix", "zp=2"]), 2, "flag");
    lab.refuses(&with(&["--what-if", "nic=fast"]), 2, "flag");
    lab.refuses(&with(&["--what-if", "nic=-1"]), 2, "device");
    lab.refuses(&with(&["--what-if", "cost=1"]), 2, "device");
    let near = lab.refuses(&with(&["--what-if", "nick=100"]), 2, "device");
    assert!(near.contains("did you mean nic?") && near.contains("optimizer=8bit"), "{near}");
    lab.refuses(&with(&["--top", "0"]), 2, "flag");
    let early = lab.refuses(&with(&["--explain", "99", "--top", "1"]), 2, "flag");
    assert!(early.contains("a line from 1 to 1") && !early.contains(" compiled"), "{early}");
    let few = with(&["--explain", "9", "--top", "9", "--fix", "tp=4,sp=1,mb=8"]);
    let few = lab.refuses(&few, 2, "flag");
    assert!(few.contains("a line from 1 to ") && few.contains(" compiled"), "{few}");
    lab.refuses(&plan(&["--gpus", "0"]), 2, "flag");
    let batch = ["--gpus", "7", "--global-batch", "5", "--seq", "16"];
    let batch = lab.refuses(&plan(&batch), 3, "no-layout");
    assert!(batch.contains("give a --global-batch that 7 divides"), "{batch}");
    lab.refuses(&["plan", "m", "--gpus", "4", "--machine", "abacus"], 2, "device");
    lab.refuses(&["plan", "m", "--gpus", "4", "--machine", "abacus.toml"], 2, "file");
    lab.write("bad.toml", "name = 3");
    lab.refuses(&["plan", "m", "--gpus", "4", "--machine", "bad.toml"], 2, "device");
}

/// A machine stands for speeds of `--hardware`, where fast links are those of axes in a domain.
#[test]
fn choices_are_priced_with_a_machine() {
    let lab = lab("plan-hardware", "llama_gqa");
    let auto = ["--mesh", "dp=2,tp=2", "--shard", "auto", "--seq", "16", "-o", "a.plan"];
    lab.ok(&[&["compile", "m", "--hardware", "h100-sxm"], &auto[..]].concat());
    let o = shardc::plan_dir::read(&lab.path("a.plan")).expect("a plan").options;
    assert_eq!(o.hardware.link_of("tp"), h100().link_speed());
    assert_eq!(o.hardware.memory, h100().memory_speed());
    let node = [&["compile", "m", "--hardware", "h100-sxm", "--node", "2"], &auto[..]].concat();
    lab.ok(&node);
    let o = shardc::plan_dir::read(&lab.path("a.plan")).expect("a plan").options;
    assert_eq!(o.hardware.link_of("tp"), h100().link_speed());
    let slow = h100().with("domain", 2.0).expect("a count").nic_speed();
    assert_eq!(o.hardware.link_of("dp_replicate"), slow);
    lab.refuses(&[&["compile", "m", "--hardware", "abacus"], &auto[..6]].concat(), 2, "device");
}

#[test]
fn a_table_is_priced_in_its_order() {
    let lab = Lab::new("price-rows");
    let table = concat!(env!("CARGO_MANIFEST_DIR"), "/cost/tests/data/normalised_shared.csv");
    let text = std::fs::read_to_string(table).expect("the table");
    lab.write("rows.csv", &text);
    lab.ok(&["price", "--rows", "rows.csv", "-o", "out.csv"]);
    let out = std::fs::read_to_string(lab.path("out.csv")).expect("prices");
    let ids = |t: &str| -> Vec<String> {
        t.lines().skip(1).map(|l| l.split(',').next().expect("an id").to_string()).collect()
    };
    assert_eq!(ids(&out), ids(&text));
    let seconds = |l: &str| l.split(',').nth(1).and_then(|s| s.parse::<f64>().ok());
    assert!(out.lines().skip(1).all(|l| seconds(l).is_some_and(|s| s > 0.0)));
    lab.write("bad.csv", text.replace("h100-sxm", "abacus"));
    let said = lab.refuses(&["price", "--rows", "bad.csv"], 2, "rows");
    assert!(said.contains("mcore-fp8#1"), "{said}");
    // What is not a table of prices is not written over.
    lab.refuses(&["price", "--rows", "rows.csv", "-o", "rows.csv"], 2, "output");
}

/// The file that `measure` writes is a machine, by which its own kind of plans is priced.
#[test]
fn a_measured_machine_prices_plans() {
    let lab = lab("measure", "llama_gqa");
    lab.refuses(&["measure", "--ranks", "0", "-o", "d.toml"], 2, "flag");
    // Of a GPU one rank is measured; a library and a likeness are a GPU's.
    lab.refuses(&["measure", "--device", "cuda", "--ranks", "2", "-o", "d.toml"], 2, "flag");
    for of_gpu in [["--products", "cublaslt"], ["--like", "h100"]] {
        let said = lab.refuses(&[&["measure", "-o", "d.toml"], &of_gpu[..]].concat(), 2, "flag");
        assert!(said.contains("--device cuda"), "{said}");
    }
    lab.write("taken.toml", "name = 3");
    lab.refuses(&["measure", "-o", "taken.toml"], 2, "output");
    if !nightly() {
        return println!("skipped but at night: measuring takes a minute of a processor");
    }
    lab.ok(&["measure", "--ranks", "2", "-o", "d.toml"]);
    lab.ok(&["compile", "m", "--mesh", "tp=2", "--seq", "16", "-o", "p"]);
    lab.ok(&["price", "p", "--machine", "d.toml"]);
    let d = std::fs::read_to_string(lab.path("d.toml")).expect("the file");
    let d = Device::parse(&d).unwrap_or_else(|e| panic!("{e}"));
    let measured =
        |c: shardc_cost::device::Constant| c.from == shardc_cost::device::Provenance::Measured;
    assert!(
        [d.fit.gemm, d.fit.hbm, d.fit.kernel, d.fit.link, d.fit.step].into_iter().all(measured)
    );
    assert!(!measured(d.fit.nic));
}
