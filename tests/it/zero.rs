//! ZeRO 1 to 3 and hybrid sharding train every family to the numbers of transformers: alone, with
//! accumulation, with tensor and sequence parallelism, in a pipeline.

use crate::fixture::*;
use shardc_frontends::{Facts, from_config};
use shardc_ir::func::{Func, FuncKind, Port, RoleKind, Value};
use shardc_ir::group::{Launch, launches};
use shardc_ir::ops::Op;
use shardc_ir::plan::{MemoryClass, Plan};
use shardc_ir::types::DType;
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, Options, Order, Transport};
use shardc_passes::pipeline::Compiled;
use shardc_passes::zero::Accumulate;
use shardc_testing::taken;
use std::collections::BTreeMap;
use std::path::Path;

type Axes = &'static [(&'static str, usize)];

fn zero(mesh: Axes, stage: u8, sp: bool, microbatch: usize) -> Options {
    Options { zero: stage, ..options(mesh, sp, microbatch) }
}

/// Meshes, sequence parallelism, rows per rank and microbatch.
const MESHES: &[(Axes, bool, usize)] = &[
    (&[("dp_shard", 2)], false, 4),
    (&[("dp_shard", 4)], false, 1),
    (&[("cp", 2)], false, 2),
    (&[("dp_replicate", 2), ("dp_shard", 2)], false, 1),
    (&[("dp_shard", 2), ("tp", 2)], true, 2),
    (&[("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)], false, 1),
    (&[("pp", 2), ("dp_shard", 2)], false, 1),
    (&[("pp", 2), ("dp_shard", 2), ("tp", 2)], true, 2),
];

#[test]
fn every_family_in_pieces() {
    for (f, name) in ALL.iter().enumerate() {
        for (m, &(mesh, sp, microbatch)) in MESHES.iter().enumerate() {
            // Every run takes each stage on each mesh, and each family.
            let first = f + 3 * m;
            for (_, stage) in
                [1, 2, 3].into_iter().enumerate().filter(|(k, _)| taken(first + k, ALL.len()))
            {
                eprintln!("{name} {mesh:?} zero={stage} sp={sp} microbatch={microbatch}");
                train_and_compare(name, &zero(mesh, stage, sp, microbatch));
            }
        }
    }
}

/// What the end of a step adds up over ranks beside gradients, squares of them and losses, is one call for each group of
/// ranks.
#[test]
fn scalars_of_a_step_are_one_call_per_group() {
    // With how many groups, and how many scalars beside the first of a call.
    let rows: [(&str, Axes, u8, [usize; 2]); 4] = [
        ("llama_gqa", &[("dp_shard", 2), ("tp", 2)], 1, [2, 1]),
        ("mixtral", &[("dp_shard", 4)], 2, [1, 2]),
        ("llama_deep", &[("pp", 2), ("dp_shard", 2)], 1, [2, 1]),
        ("llama_deep", &[("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)], 3, [3, 0]),
    ];
    for (name, mesh, stage, expected) in rows {
        let o = zero(mesh, stage, false, 1);
        let plan = compile(&Fixture::open(name).model(&o), &o).plan;
        let (mut calls, mut joined) = (0, 0);
        for f in plan.module.of_kind(FuncKind::OptimizerStep) {
            let mut of_group = BTreeMap::new();
            for n in &f.nodes {
                let Op::AllReduce(sum) = &n.op else { continue };
                if n.outs.iter().all(|&v| f.ty(v).rank() == 0) {
                    *of_group.entry(sum.axes).or_insert(0) += 1;
                    joined += n.outs.len() - 1;
                }
            }
            assert!(of_group.values().all(|&n| n == 1), "{name} {mesh:?}: {of_group:?}");
            calls = calls.max(of_group.len());
        }
        assert_eq!([calls, joined], expected, "{name} {mesh:?}");
    }
}

#[test]
fn gathered_in_forward_and_kept() {
    for schedule in ["1f1b", "zb-v"] {
        let mut o = zero(&[("pp", 2), ("dp_shard", 2)], 3, false, 1);
        (o.reshard_after_forward, o.schedule) = (false, Order::Named(schedule.into()));
        train_and_compare("llama_deep", &o);
    }
}

/// Every stage against everything that moves what it moves: context parallelism of each kind (over whose
/// ranks it splits too), recomputation, sequence parallelism, a pipeline, microbatches, and what may stay
/// whole over them. Each row has its own mix, so that each pair of words meets in some row.
#[test]
fn every_stage_with_everything_else() {
    use CpMode::{AllGather, Ring, Ulysses};
    use Recompute::{Full, None as Nothing, Selective, Sqrt};
    let [cp, dp]: [Axes; 2] = [&[("cp", 2)], &[("dp_shard", 4)]];
    let [both, tp]: [Axes; 2] = [&[("dp_shard", 2), ("cp", 2)], &[("cp", 2), ("tp", 2)]];
    let copies: Axes = &[("dp_replicate", 2), ("dp_shard", 2), ("cp", 2)];
    let pp: Axes = &[("pp", 2), ("dp_shard", 2), ("cp", 2)];
    let rows: [(&str, Axes, CpMode, Recompute, bool, usize); 12] = [
        ("llama_gqa", cp, AllGather, Selective, false, 2),
        ("llama_gqa", both, Ring, Full, false, 1),
        ("llama_gqa", both, Ulysses, Nothing, false, 2),
        ("llama_mha", tp, Ulysses, Selective, true, 4),
        ("llama_gqa", tp, AllGather, Full, true, 2),
        ("llama_gqa", copies, AllGather, Nothing, false, 1),
        ("llama_deep", pp, Ring, Selective, false, 1),
        ("llama_deep", pp, AllGather, Sqrt, false, 2),
        ("gpt2", both, AllGather, Selective, false, 2),
        ("gpt2", dp, AllGather, Full, false, 1),
        ("llama_bias_tied", both, Ring, Nothing, false, 1),
        ("gemma2", both, AllGather, Full, false, 2),
    ];
    for (i, (name, mesh, cp_mode, recompute, sp, microbatch)) in rows.into_iter().enumerate() {
        for stage in (0..=3).filter(|k| taken(i + i / 4 + *k as usize, 4)) {
            let zero_accumulate = Accumulate::ALL[(i + stage as usize) % 4];
            let recompute = recompute.clone();
            let more = zero(mesh, stage, sp, microbatch);
            let o = Options { cp_mode, recompute, zero_accumulate, ..more };
            eprintln!("{name} {mesh:?} {cp_mode:?} zero={stage} {zero_accumulate:?}");
            train_and_compare(name, &o);
        }
    }
}

/// What stays whole over microbatches changes no number, alone, with copies, in pipelines whose
/// backward is cut, and for tables that two stages share.
#[test]
fn whole_over_microbatches() {
    let [dp, copies, pp]: [Axes; 3] = [
        &[("dp_shard", 2)],
        &[("dp_replicate", 2), ("dp_shard", 2)],
        &[("pp", 2), ("dp_shard", 2)],
    ];
    for (k, keep) in Accumulate::ALL.into_iter().enumerate() {
        for stage in 2..=3 {
            let rows = [
                ("llama_gqa", dp, "1f1b"),
                ("llama_bias_tied", copies, "1f1b"),
                ("gpt2", dp, "1f1b"),
                ("llama_bias_tied", pp, "1f1b"),
                ("llama_deep", pp, "zb-v"),
            ];
            let first = k + stage as usize;
            for (_, (name, mesh, schedule)) in
                rows.into_iter().enumerate().filter(|(i, _)| taken(first + i, 3))
            {
                let mut o = zero(mesh, stage, false, 1);
                (o.zero_accumulate, o.schedule) = (keep, Order::Named(schedule.into()));
                train_and_compare(name, &o);
            }
        }
    }
}

/// A plan of Llama-3.1-8B that is only looked at: `m` microbatches of one row of `seq` tokens per rank.
fn planned(o: &Options, m: usize, seq: usize) -> (Facts, Plan) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/configs/llama-3.1-8b.json");
    let config = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut o = Options { seq, microbatch: 1, observe: false, clip: None, ..o.clone() };
    o.global_batch = m * o.data_parallel();
    let model = from_config(&config, "config.json", &shardc::shape(&o)).unwrap();
    let plan = compile(&model, &o).plan;
    (model.facts, plan)
}

fn parameters(plan: &Plan) -> usize {
    plan.weights.iter().map(|w| w.shape.iter().product::<usize>()).sum()
}

/// Most bytes alive at once on any rank.
fn live(plan: &Plan) -> usize {
    plan.classes.iter().map(|c| c.memory.live_bytes).max().unwrap()
}

/// Each stage needs no more than the one before it and what its gathers and scatters move at a time: with
/// ZeRO-2 the whole gradients of a layer, with ZeRO-3 its whole weights, or those of a table, if that
/// is larger. Backward has the same products at every stage.
#[test]
fn each_stage_needs_no_more_than_the_one_before() {
    let meshes: [(Axes, bool); 4] = [
        (&[("dp_shard", 8)], false),
        (&[("dp_shard", 2), ("cp", 4)], false),
        (&[("dp_shard", 4), ("tp", 2)], true),
        (&[("pp", 4), ("dp_shard", 2)], false),
    ];
    let policies = [Recompute::None, Recompute::Selective, Recompute::Full];
    for (i, (mesh, sp)) in meshes.into_iter().enumerate() {
        for (j, recompute) in policies.iter().enumerate() {
            for (_, m) in [1, 4].into_iter().enumerate().filter(|(k, _)| taken(i + j + k, 2)) {
                let of = |stage| {
                    let o = Options { recompute: recompute.clone(), ..zero(mesh, stage, sp, 1) };
                    planned(&o, m, 4096)
                };
                let plans: Vec<(Facts, Plan)> = (0..=3).map(of).collect();
                let t = mesh.iter().find(|a| a.0 == "tp").map_or(1, |a| a.1);
                let f = &plans[0].0;
                // Of two units at once: one that comes while the other is used.
                let unit = 2 * 4 * largest_unit(&plans[0].1, f.layers) / t;
                let peaks: Vec<usize> = plans.iter().map(|p| live(&p.1)).collect();
                let what = format!("{mesh:?} {recompute:?} m={m}: {peaks:?}");
                assert!(peaks[1] <= peaks[0], "{what}");
                assert!(peaks[2] <= peaks[1] + unit, "{what}");
                assert!(peaks[3] <= peaks[2] + unit, "{what}");
                let products: Vec<usize> = plans.iter().map(|p| products_back(&p.1)).collect();
                assert_eq!(products, [products[0]; 4], "{what}: products in backward");
            }
        }
    }
}

/// Parameters of a decoder layer or of a table, whichever has more.
fn largest_unit(plan: &Plan, layers: usize) -> usize {
    let mut units = std::collections::BTreeMap::new();
    for w in &plan.weights {
        let layer = w.param.split('.').find_map(|p| p.parse::<usize>().ok());
        let unit = layer.map_or(w.param.clone(), |l| l.to_string());
        *units.entry(unit).or_insert(0) += w.shape.iter().product::<usize>();
    }
    assert!(units.len() > layers);
    units.into_values().max().unwrap()
}

fn products_back(plan: &Plan) -> usize {
    let back = |name: &str| name.starts_with("backward") || name.starts_with("weight");
    let funcs = plan.module.funcs.iter().filter(|f| back(&f.name));
    let is_product = |n: &&shardc_ir::func::Node| matches!(n.op, Op::Dot(_));
    funcs.map(|f| f.nodes.iter().filter(is_product).count()).sum()
}

/// Parameter volumes that a rank sends at four microbatches: gathers, gathers of what backward reads (not the
/// table of the embedding) and scatters. What stays whole is moved once per step: 2 volumes for 5 and 12
/// of ZeRO-2 and 3. The whole gradients are 4 bytes per parameter, the whole weights as many.
#[test]
fn what_stays_whole_is_moved_once_per_step() {
    use Accumulate::{Both, Gradients, None as Nothing, Weights};
    let (d, m) = (8, 4);
    let mesh: Axes = &[("dp_shard", 8)];
    let ring = |n: f64| (d - 1) as f64 / d as f64 * n;
    for (stage, keep, [gathers, again, scatters], whole) in [
        (2, Nothing, [1, 0, m], 4),
        (2, Gradients, [1, 0, 1], 8),
        (3, Nothing, [m, m, m], 0),
        (3, Gradients, [m, m, 1], 4),
        (3, Weights, [1, 0, m], 4),
        (3, Both, [1, 0, 1], 8),
    ] {
        let what = format!("zero={stage} {keep:?}");
        let o = Options { zero_accumulate: keep, ..zero(mesh, stage, false, 1) };
        let (f, plan) = planned(&o, m, 8);
        let all = shardc::report::collectives(&plan, &plan.classes[0]);
        let sent = |kind: &str| -> f64 {
            let of = all.iter().filter(|c| c.kind == kind && c.bytes > 1024.0);
            of.map(|c| c.bytes).sum()
        };
        let volume = ring(4.0 * parameters(&plan) as f64);
        let read = volume - ring(4.0 * (f.vocab * f.hidden) as f64);
        let want = [gathers as f64 * volume + again as f64 * read, scatters as f64 * volume];
        assert_eq!(["all_gather", "reduce_scatter"].map(sent), want, "{what}");
        // 16 bytes of state per parameter, of which `whole` are not in pieces, but for weights, whose
        // pieces the optimizer steps beside them.
        let kinds = [
            MemoryClass::Weights,
            MemoryClass::Grads,
            MemoryClass::Optimizer,
            MemoryClass::CollectiveBuffer,
        ];
        let of = |c: &MemoryClass| {
            let all = plan.classes[0].memory.whole.iter();
            all.filter(|x| x.0 == *c).map(|x| x.1).sum::<usize>()
        };
        let grads = if matches!(keep, Gradients | Both) { 4 } else { 0 };
        let pieces = (16 - grads) * parameters(&plan) / d;
        assert_eq!(
            kinds.iter().map(of).sum::<usize>(),
            whole * parameters(&plan) + pieces,
            "{what}"
        );
        // With so few tokens nothing else counts but what is whole for a moment, and at the end pieces
        // of gradients that were whole.
        let unit = 2 * 4 * largest_unit(&plan, f.layers);
        let most = whole * parameters(&plan) + 16 * parameters(&plan) / d + unit;
        assert!(live(&plan) <= most + most / 50, "{what}: {} B for {most} B", live(&plan));
    }
}

/// ZeRO over the ranks of dp_shard and cp sends what it sends over as many of dp_shard.
#[test]
fn ranks_of_cp_share_state_as_those_of_dp() {
    let m = 2;
    let sent = |mesh: Axes, stage: u8, axis: &str| -> f64 {
        let o = Options { cp_mode: CpMode::Ulysses, ..zero(mesh, stage, false, 1) };
        let (_, plan) = planned(&o, m, 8);
        let all = shardc::report::collectives(&plan, &plan.classes[0]);
        let of = all.iter().filter(|c| c.axis.contains(axis) && c.bytes > 1024.0);
        of.filter(|c| matches!(c.kind, "all_gather" | "reduce_scatter")).map(|c| c.bytes).sum()
    };
    for stage in 1..=3 {
        let alone = sent(&[("dp_shard", 8)], stage, "dp_shard");
        assert_eq!(sent(&[("dp_shard", 2), ("cp", 4)], stage, ""), alone, "zero={stage}");
        assert!(alone > 0.0);
    }
}

/// The report has both prices, which are those of the two plans; a word that changes nothing is said so.
#[test]
fn what_stays_whole_has_its_price() {
    let config = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama_gqa/config.json"),
    );
    let config = serde_json::from_str(&config.unwrap()).unwrap();
    let of = |stage: u8, keep: Accumulate, microbatch: usize| {
        let more = zero(&[("dp_shard", 2)], stage, false, microbatch);
        let o = Options { zero_accumulate: keep, observe: false, ..more };
        shardc::compile_config(&config, &o).unwrap_or_else(|e| panic!("{e}"))
    };
    let (with, without) = (of(3, Accumulate::Both, 1), of(3, Accumulate::None, 1));
    assert_eq!(without.report.zero_accumulate, None);
    let kept = with.report.zero_accumulate.expect("it changes the plan");
    let sent = |r: &shardc::report::Report| -> f64 {
        r.per_class[0].collectives.iter().map(|c| c.bytes).sum()
    };
    let peak = |p: &shardc::Output| p.stored.plan.peak_bytes();
    let without_peak = peak(&without);
    assert_eq!([kept.sent_bytes_without], [sent(&without.report)]);
    assert_eq!(kept.peak_bytes_without, without_peak);
    assert!(kept.sent_bytes * 2.0 < kept.sent_bytes_without && kept.peak_bytes > without_peak);
    let text = kept.to_string();
    assert!(text.starts_with("--zero-accumulate both: a rank sends "), "{text}");
    for (stage, keep, microbatch, why) in [
        (1, Accumulate::Both, 1, "without --zero 2 or 3"),
        (2, Accumulate::Weights, 1, "with --zero 2, which gathers once per step"),
        (3, Accumulate::Gradients, 4, "with one microbatch"),
    ] {
        let done = of(stage, keep, microbatch);
        let said = done.warnings.iter().any(|w| w.code == "no-effect" && w.message.contains(why));
        assert!(said, "zero={stage} {keep:?}: {:?}", done.warnings);
        assert_eq!(done.report.zero_accumulate, None);
    }
}

/// A size is advised where one would help: norms of which ranks of tp use pieces are whole on each of them, whatever it is.
#[test]
fn what_zero_leaves_whole_is_told_with_a_way_that_works() {
    let said = |name: &str, mesh: &[(&str, usize)]| -> String {
        let path = Path::new(crate::lab::FIXTURES).join(name);
        let o = Options { zero: 1, ..options(mesh, false, 1) };
        let done = shardc::compile(&path, &o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
        done.warnings
            .iter()
            .filter(|w| w.message.contains("not split over"))
            .flat_map(|w| w.help.clone())
            .collect()
    };
    assert_eq!(said("olmo2", &[("dp_shard", 2)]), "");
    let pieces = said("olmo2", &[("dp_shard", 2), ("tp", 2)]);
    assert_eq!(pieces, "leave it: ranks of another axis use pieces of what each of them holds");
    // A bias of 10 in two pieces of tp is 5 on a rank, which other sizes divide.
    let lab = crate::lab::Lab::new("zero-pieces");
    let toy = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/toy.toml");
    let out = lab.ok(&["compile", toy, "--mesh", "dp_shard=2,tp=2", "--zero", "1"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("use a size of dp_shard that divides one of their dims"), "{said}");
}

/// Over NCCL the parameters of a block are gathered in one call per direction, and their gradients scattered in
/// one: the same bytes and, run over threads, the same bits as tensor by tensor, on every kind of layout.
#[test]
fn blocks_are_gathered_and_scattered_in_one_call() {
    let [dp, cp]: [Axes; 2] = [&[("dp_shard", 4)], &[("dp_shard", 2), ("cp", 2)]];
    let [tp, pp]: [Axes; 2] = [&[("dp_shard", 2), ("tp", 2)], &[("pp", 2), ("dp_shard", 2)]];
    let both: Axes = &[("dp_replicate", 2), ("dp_shard", 2)];
    use Recompute::{Full, Selective};
    let recompute = |o: Options, r| Options { recompute: r, ..o };
    let schedule = |o: Options, s: &str| Options { schedule: Order::Named(s.into()), ..o };
    let rows: Vec<(&str, Options)> = vec![
        ("llama_gqa", zero(dp, 3, false, 1)),
        ("llama_gqa", zero(dp, 2, false, 2)),
        ("llama_bias_tied", recompute(zero(cp, 3, false, 1), Full)),
        ("llama_mha", recompute(zero(tp, 3, true, 2), Selective)),
        ("gpt2", zero(both, 3, false, 1)),
        ("llama_deep", schedule(zero(pp, 3, false, 1), "zb-h1")),
        ("llama_deep", schedule(zero(pp, 3, false, 1), "dualpipe-v")),
        ("llama_deep", Options { reshard_after_forward: false, ..zero(pp, 3, false, 2) }),
        ("gemma2", Options { loss_chunks: LossChunks::Of(2), ..zero(dp, 3, false, 1) }),
        ("mixtral", Options { dtype: DType::BF16, ..zero(dp, 3, false, 2) }),
    ];
    for (name, o) in rows {
        let what = format!("{name} {:?} zero={} {:?}", o.mesh, o.zero, o.schedule);
        let fx = Fixture::open(name);
        let model = fx.model(&o);
        let (ids, targets) = (&fx.input_ids, fx.targets());
        let nccl = Options { transport: Transport::Nccl, ..o.clone() };
        let [apart, joined] = [&o, &nccl].map(|o| compile(&model, o));
        let [a, b] = [&apart, &joined].map(|c| three_steps(&model, c, ids, &targets));
        assert_eq!(a.loss.to_bits(), b.loss.to_bits(), "{what}");
        assert!(a.grads == b.grads && a.params == b.params, "{what}: other bits");
        let sent = |c: &Compiled| {
            let classes = c.plan.classes.iter();
            let all = classes.flat_map(|k| shardc::report::collectives(&c.plan, k));
            all.fold((0, 0, 0.0), |n, x| (n.0 + x.count, n.1 + x.tensors, n.2 + x.bytes))
        };
        let ((few, tensors, bytes), (many, as_many, as_much)) = (sent(&joined), sent(&apart));
        assert_eq!((tensors, bytes), (as_many, as_much), "{what}");
        assert!(few < many, "{what}: {few} calls for {many}");
        for f in joined.plan.module.funcs.iter().filter(|f| f.kind.is_looped()) {
            one_call_per_layer(f, &what);
        }
    }
}

/// Every layer has at most one gather of parameters over the same axes, which begins before the work that needs
/// the one before it.
fn one_call_per_layer(f: &Func, what: &str) {
    let all = launches(f);
    // Activations that are stored in pieces are gathered, too, where they are used.
    let is_param = |a: &&Port| {
        a.role.as_ref().is_some_and(|r| matches!(r.kind, RoleKind::Param | RoleKind::Unsharded))
    };
    let held: Vec<Value> = f.args.iter().filter(is_param).map(|a| a.value).collect();
    let of_params = |x: &&Launch| {
        let op = &f.nodes[x.nodes.start].op;
        matches!(op, Op::AllGather(_)) && x.ins.iter().all(|v| held.contains(v))
    };
    let mut found = vec![];
    for (i, x) in all.iter().enumerate().filter(|x| of_params(&x.1)) {
        let n = &f.nodes[x.nodes.start];
        let axes = n.op.collective().map(|c| c.atoms());
        if let Some(layer) = f.scope_info(n.scope).layer {
            assert!(!found.contains(&(layer, axes)), "{what}: @{} gathers {layer} again", f.name);
            found.push((layer, axes));
        }
        // The gather after it has begun when its own results are read.
        let reads = |y: &Launch| y.ins.iter().any(|v| x.outs.contains(v));
        let needed = all.iter().position(reads).expect("somebody reads it");
        let next = all.iter().skip(i + 1).position(|y| of_params(&y)).map(|n| i + 1 + n);
        assert!(next.is_none_or(|n| n < needed), "{what}: @{} waits for {needed}", f.name);
    }
}
