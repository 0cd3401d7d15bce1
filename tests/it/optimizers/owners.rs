//! Matrices that are shared out among ranks: what every rank would make of them, bit for bit, proved, for the bytes
//! and FLOPs of the formulas; steps that overflow change nothing on any variant.

use super::{DP2, MUON, TP2, by, is_rounding};
use crate::fixture::*;
use crate::memory::fixture_config;
use shardc_ir::func::{FuncKind, Node, Role, RoleKind};
use shardc_ir::loss_scale::{LossScale, LossScaling};
use shardc_ir::plan::Plan;
use shardc_ir::price;
use shardc_ir::text;
use shardc_ir::types::{DType, Type};
use shardc_passes::options::{Options, Order, TpMode};
use shardc_passes::pipeline::Compiled;
use shardc_prove::lemmas::Lemmas;
use shardc_prove::{Verdict, by_form};
use shardc_runtime::StepBatch;
use shardc_testing::taken;

/// With the variant that a group asks for.
fn spread(o: &Options, how: &str) -> Options {
    let optim = o.optim.iter().map(|g| format!("{g},spread={how}")).collect();
    Options { optim, ..o.clone() }
}

/// All parameters and states after two steps, as bits.
fn two_steps(name: &str, o: &Options) -> Vec<(Role, Vec<u32>)> {
    let fx = Fixture::open(name);
    let model = fx.model(o);
    let compiled = compile(&model, o);
    let mut s = session(&model, &compiled);
    let targets = fx.targets();
    for step in 1..=2 {
        let batch = StepBatch::tokens(&fx.input_ids, &targets, false);
        s.step(&batch, 1e-3, step).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    let all = compiled.plan.module.of_kind(FuncKind::OptimizerStep).flat_map(|f| &f.args);
    let kept = |r: &&Role| matches!(r.kind, RoleKind::Param | RoleKind::State(_));
    let roles: Vec<Role> = all.filter_map(|a| a.role.as_ref()).filter(kept).cloned().collect();
    let bits = |r: Role| {
        let t = s.tensor(&r).unwrap_or_else(|e| panic!("{name}: {e}"));
        (r, t.data.iter().map(|x| x.to_bits()).collect())
    };
    roles.into_iter().map(bits).collect()
}

/// Notes of what goes to owners, and comes back.
const TO: Option<&str> = Some("whole matrices to their owners");
const BACK: Option<&str> = Some("back, as pieces");

/// How many stacks a plan's optimizer puts together.
fn stacks(compiled: &Compiled) -> usize {
    let all = compiled.plan.module.of_kind(FuncKind::OptimizerStep).flat_map(|f| &f.nodes);
    let to_owners = |n: &&Node| n.note.as_deref() == TO;
    all.filter(to_owners).count()
}

fn proved(name: &str, o: &Options, compiled: &Compiled) {
    let model = Fixture::open(name).model(o);
    let r = texts(&model, o, compiled).prove();
    assert_eq!(r.verdict(), Verdict::Proved, "{name} {o:?}\n{:?}\n{:?}", r.refuted, r.gaps);
}

const TP4: super::Axes = &[("tp", 4)];
const DP4: super::Axes = &[("dp_shard", 4)];
const BOTH: super::Axes = &[("dp_shard", 2), ("tp", 2)];

#[test]
fn owners_make_what_every_rank_would_make() {
    let named = |name: &str| Order::Named(name.into());
    let plain = |mesh, zero| by(&[MUON], mesh, zero, 2);
    let half = |o: Options, state: &str| Options {
        dtype: DType::BF16,
        optim: vec![format!("hidden=muon,state_dtype={state}")],
        ..o
    };
    let all = [
        ("llama_gqa", plain(TP2, 0)),
        ("llama_gqa", plain(DP2, 1)),
        ("llama_gqa", plain(&[("dp_replicate", 2)], 0)),
        ("gpt2", plain(BOTH, 0)),
        ("llama_gqa", half(plain(DP2, 2), "f32")),
        ("llama_deep", plain(BOTH, 3)),
        ("llama_deep", half(plain(TP2, 0), "bf16")),
        ("llama_deep", plain(&[("pp", 2), ("tp", 2)], 0)),
        (
            "llama_bias_tied",
            Options { schedule: named("interleaved"), ..plain(&[("pp", 2), ("dp_shard", 2)], 1) },
        ),
        ("gpt2", plain(BOTH, 1)),
        ("gpt2", plain(DP4, 3)),
        ("qwen3", plain(TP2, 0)),
        ("phi3", plain(TP2, 0)),
        ("gemma2", plain(BOTH, 2)),
        ("olmo2", plain(&[("dp_shard", 2), ("cp", 2)], 1)),
        ("deepseek_v3", plain(DP2, 1)),
        ("qwen3_moe", Options { ep: 2, ..plain(BOTH, 1) }),
        ("qwen3_moe", Options { ep: 2, ..half(plain(DP4, 3), "f32") }),
        ("mixtral", plain(TP2, 0)),
        ("llama_padded", plain(TP4, 0)),
        ("llama_gqa", plain(DP4, 1)),
        ("qwen3_moe", Options { ep: 4, etp: Some(1), ..plain(BOTH, 1) }),
        ("qwen3_moe", Options { ep: 2, etp: Some(2), ..plain(BOTH, 0) }),
        ("llama_mha", Options { tp_mode: TpMode::TwoD, sp: false, ..plain(TP4, 0) }),
    ];
    for (i, (name, o)) in all.into_iter().enumerate() {
        if !taken(i, 3) {
            continue;
        }
        let [owners, gather] = ["owners", "gather"].map(|how| spread(&o, how));
        let model = Fixture::open(name).model(&o);
        let compiled = compile(&model, &owners);
        let what = format!("{name} {:?} zero={}", o.mesh, o.zero);
        assert!(stacks(&compiled) > 0, "{what}: nothing is shared out");
        assert_eq!(stacks(&compile(&model, &gather)), 0, "{what}");
        proved(name, &owners, &compiled);
        let (a, b) = (two_steps(name, &owners), two_steps(name, &gather));
        for ((role, a), (_, b)) in a.iter().zip(&b).filter(|x| !is_rounding(&x.0.0.name)) {
            assert_eq!(a, b, "{what}: {role}");
        }
    }
}

/// A step that overflows changes no weight and no state, whichever rule makes them; then training goes on as if it had
/// not been.
#[test]
fn steps_that_overflow_change_nothing_of_any_rule() {
    let owners = format!("{MUON},spread=owners");
    let bf16 = "hidden=muon,spread=owners,state_dtype=bf16";
    let rules: [&[&str]; 6] =
        [&[MUON], &[&owners], &[bf16], &["*=adafactor"], &["*=lion"], &["*=lion,state_dtype=bf16"]];
    let layouts: [(super::Axes, u8, usize); 4] =
        [(&[], 0, 8), (TP2, 0, 4), (DP2, 1, 4), (BOTH, 3, 2)];
    for (i, groups) in rules.into_iter().enumerate() {
        for (j, (mesh, zero, rows)) in
            layouts.into_iter().enumerate().filter(|(j, _)| taken(i + j, 2))
        {
            let (fit, huge) = (1024.0, 2f32.powi(100));
            let (min, window, hysteresis) = (1.0, 100, 1);
            let loss_scaling = LossScaling::Dynamic { initial: fit, min, window, hysteresis };
            let o = by(groups, mesh, zero, rows);
            let o = Options { dtype: DType::F16, loss_scaling, observe: false, ..o };
            let fx = Fixture::open("llama_gqa");
            let model = fx.model(&o);
            let compiled = compile(&model, &o);
            proved("llama_gqa", &o, &compiled);
            let what = format!("{groups:?} on {mesh:?}, zero {zero}, layout {j}");
            let all = compiled.plan.module.of_kind(FuncKind::OptimizerStep).flat_map(|f| &f.args);
            let kept = |r: &&Role| matches!(r.kind, RoleKind::Param | RoleKind::State(_));
            let roles: Vec<&Role> = all.filter_map(|a| a.role.as_ref()).filter(kept).collect();
            let targets = fx.targets();
            // Of two runs one has an overflow in step 2.
            let run = |overflows: bool| {
                let mut s = session(&model, &compiled);
                let mut states: Vec<Vec<Vec<u32>>> = vec![];
                for n in 1..=3 + usize::from(overflows) {
                    let mut now = s.scale();
                    let scale = if overflows && n == 2 { huge } else { fit };
                    now.loss_scale = Some(LossScale { scale, good: 0, left: 1 });
                    s.go_on(now);
                    let batch = StepBatch::tokens(&fx.input_ids, &targets, false);
                    let r = s.step(&batch, 1e-3, n).unwrap_or_else(|e| panic!("{what}: {e}"));
                    assert_eq!(r.skipped, scale == huge, "{what}: step {n}");
                    let bits = |r: &&Role| {
                        let t = s.tensor(r).unwrap_or_else(|e| panic!("{what}: {e}"));
                        t.data.iter().map(|x| x.to_bits()).collect()
                    };
                    states.push(roles.iter().map(bits).collect());
                }
                states
            };
            let (with, without) = (run(true), run(false));
            assert!(with[0] == with[1], "{what}: a step that overflows changes something");
            assert!(with[0] == without[0] && with[2..] == without[1..], "{what}");
            assert!(with[1] != with[2], "{what}: nothing is trained");
        }
    }
}

/// GiB that a rank sends to owners and back in a step, in the mean, and TFLOP of the fullest rank and of the mean, of matrices of
/// layers but experts, or of these.
fn cost(plan: &Plan, experts: usize, of_experts: Option<bool>) -> [f64; 3] {
    let mesh = &plan.module.mesh;
    let mut bytes = 0.0;
    let mut each = vec![0.0; mesh.ranks()];
    for f in plan.module.of_kind(FuncKind::OptimizerStep) {
        for n in &f.nodes {
            let (ins, out): (Vec<&Type>, &Type) =
                (n.ins.iter().map(|&v| f.ty(v)).collect(), f.ty(n.outs[0]));
            let asked = |is: bool| of_experts.is_none_or(|of| is == of);
            let stack = out.rank() == 3 && asked(out.dims[0].size == experts);
            // Of the fullest rank's, the mean's.
            let share = |t: &Type| {
                let ways: usize = t.dims[0].atoms.iter().map(|a| mesh.size(a)).product();
                t.dims[0].size as f64 / ways as f64 / t.dims[0].size.div_ceil(ways) as f64
            };
            let moves = [TO, BACK].contains(&n.note.as_deref());
            if stack
                && moves
                && let Some(c) = n.op.collective()
            {
                bytes += c.ring_bytes(mesh, ins[0], out) * share(ins[0]).min(share(out));
            }
            if stack && n.op.facts().is_matrix_product() {
                let flops = price::flops(mesh, &n.op, &ins, out);
                for (rank, all) in each.iter_mut().enumerate() {
                    let own = out.extent(mesh, 0, &mesh.coords(rank));
                    *all += flops * own.len as f64 / own.chunk as f64;
                }
            }
        }
    }
    let most = each.iter().copied().fold(0.0, f64::max);
    let mean = each.iter().sum::<f64>() / each.len() as f64;
    [bytes / (1u64 << 30) as f64, most / 1e12, mean / 1e12]
}

/// The table of docs/optimizers.md: bytes and FLOPs of Llama-3.1-8B and of Qwen3-30B-A3B.
#[test]
fn owners_send_and_compute_what_formulas_say() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let text = std::fs::read_to_string(path).expect("a config");
    let llama: serde_json::Value = serde_json::from_str(&text).expect("a config");
    let mut qwen = fixture_config("qwen3_moe");
    for (key, n) in [
        ("hidden_size", 2048),
        ("num_hidden_layers", 48),
        ("num_attention_heads", 32),
        ("num_key_value_heads", 4),
        ("head_dim", 128),
        ("moe_intermediate_size", 768),
        ("num_experts", 128),
        ("num_experts_per_tok", 8),
        ("vocab_size", 151_936),
    ] {
        qwen[key] = n.into();
    }
    let tp: super::Axes = &[("tp", 8)];
    let both: super::Axes = &[("dp_shard", 8), ("tp", 8)];
    let rows = [
        ("8B, tp=8", &llama, tp, 0, 1, false, 2.84, 1.0),
        ("8B, tp=8, zero 1 over 8", &llama, both, 1, 1, false, 0.40, 1.07),
        // Four heads of keys are split over four ranks of tp, and routers over none: what owners make of these goes to
        // all that hold copies. If all were split over all ranks it were 0.37 and 0.05.
        ("30B outside experts, tp=8", &qwen, tp, 0, 1, false, 0.40, 1.0),
        ("30B outside experts, k=64", &qwen, both, 1, 1, false, 0.063, 1.295),
        ("30B experts, ep=8, split over 8", &qwen, both, 0, 8, true, 1.48, 1.0),
        ("30B experts, split over 64", &qwen, both, 1, 1, true, 1.66, 1.0),
    ];
    let mut table = vec![];
    for (what, config, mesh, zero, ep, experts, gib, balance) in rows {
        // Beside experts what is little is not parted: of these alone all is.
        let alone = ["hidden=muon,spread=owners", "*.experts.*=adamw"];
        let apart = usize::from(what == "30B outside experts, k=64");
        let base = by(&alone[..=apart], mesh, zero, 1);
        let o =
            Options { ep, global_batch: 64, seq: 64, dtype: DType::BF16, observe: false, ..base };
        let (_, plan) = crate::memory::planned(config, &o);
        // All that a rank iterates on, experts as well: beside them what is little is not parted.
        let [_, most, mean] = cost(&plan, 128, None);
        assert!(most <= 1.3 * mean, "{what}: {most:.2} of {mean:.2} TFLOP");
        let [bytes, most, mean] = cost(&plan, 128, Some(experts));
        let by = most / mean;
        table
            .push(format!("{what}: {bytes:.3} GiB of {gib}, {most:.2} TFLOP, {by:.3} of the mean"));
        if bytes > 1.02 * gib || by > balance + 0.005 {
            table.push("too much".into());
        }
    }
    assert!(!table.contains(&"too much".to_string()), "{table:#?}");
    println!("{table:#?}");
}

/// What every rank gathers it gathers once, in the element type of the iteration.
#[test]
fn matrices_are_gathered_in_the_type_of_the_iteration() {
    for (dtype, want) in [("bf16", DType::BF16), ("f32", DType::F32)] {
        let o = by(&[&format!("hidden=muon,dtype={dtype},spread=gather")], TP2, 0, 2);
        let compiled = compile(&Fixture::open("llama_gqa").model(&o), &o);
        let mut gathered = vec![];
        for f in compiled.plan.module.of_kind(FuncKind::OptimizerStep) {
            let all =
                f.nodes.iter().filter(|n| n.op.collective().is_some_and(|c| c.dim().is_some()));
            gathered.extend(all.map(|n| f.ty(n.ins[0]).dtype));
        }
        // Seven of each of three layers.
        assert_eq!(gathered, vec![want; 21]);
    }
}

/// Stacks of fewer matrices than ranks lie at both ends of the ranks, and the text says which.
#[test]
fn short_stacks_begin_at_either_end() {
    let o = spread(&by(&[MUON], DP4, 1, 2), "owners");
    let model = Fixture::open("llama_gqa").model(&o);
    let compiled = compile(&model, &o);
    let mut all = compiled.plan.module.of_kind(FuncKind::OptimizerStep).flat_map(|f| &f.values);
    let (mut first, mut last) = (0, 0);
    for v in all.by_ref().filter(|v| v.ty.rank() == 3 && v.ty.dims[0].size == 2) {
        let atoms = v.ty.dims[0].atoms;
        last += usize::from(atoms.is_turned());
        first += usize::from(!atoms.is_turned() && !atoms.is_empty());
    }
    assert!(first > 0 && last > 0, "{first} values from the first rank on, {last} from the last");
    let text = text::print(&compiled.plan.module);
    assert!(text.contains("f32[2@-dp_shard,"), "{text}");
    assert_eq!(text::print(&text::parse(&text).unwrap_or_else(|d| panic!("{d}"))), text);
    // Values on the way that would be with other ranks than their readers take them to be are refused, one by one.
    let mut texts = texts(&model, &o, &compiled);
    let at: Vec<usize> = text.match_indices("@-").map(|x| x.0).collect();
    for k in [0, at.len() / 3, at.len() / 2, at.len() - 1] {
        let other = format!("{}@{}", &text[..at[k]], &text[at[k] + 2..]);
        texts.programs = text::parse(&other).unwrap_or_else(|d| panic!("{d}"));
        assert_ne!(texts.prove().verdict(), Verdict::Proved, "{k} of {}", at.len());
    }
    // All of them together are another deal of the same matrices.
    texts.programs = text::parse(&text.replace("@-", "@")).unwrap_or_else(|d| panic!("{d}"));
    assert_eq!(texts.prove().verdict(), Verdict::Proved);
}

/// Changes of what is done to stacks, each another update: none is proved.
#[test]
fn other_updates_of_owners_are_refused() {
    let o = by(&[&format!("{MUON},spread=owners")], TP2, 0, 4);
    let model = Fixture::open("llama_gqa").model(&o);
    let compiled = compile(&model, &o);
    let mut texts = texts(&model, &o, &compiled);
    let text = text::print(&texts.programs);
    assert_eq!(by_form(&texts.subject(), Lemmas::default()).verdict(), Verdict::Proved);
    for (from, to) in [
        // Matrices that are swapped on their way, and another that comes back.
        ("dim=0] %l0.stack, %l1.stack ", "dim=0] %l1.stack, %l0.stack "),
        ("start=0; dim=0] %k_proj_x5.1", "start=1; dim=0] %k_proj_x5.1"),
        ("start=1; dim=0] %o_proj_x5.1", "start=0; dim=0] %o_proj_x5.1"),
        // An iteration fewer, another matrix, X X for its Gram matrix, no eps, another scale.
        ("to=1] %q_proj_x5 ", "to=1] %q_proj_x4 "),
        (
            "dot[ank,akm->anm] %q_proj_poly4, %q_proj_x4",
            "dot[ank,akm->anm] %q_proj_poly3, %q_proj_x4",
        ),
        ("%q_proj_a0 = dot[ank,amk->anm]", "%q_proj_a0 = dot[ank,akm->anm]"),
        ("%q_proj_f, %q_proj_norm", "%q_proj_f, %q_proj_sqrt"),
        ("clamp[1e-7; hi=inf] %q_proj_sqrt", "clamp[1e-6; hi=inf] %q_proj_sqrt"),
        ("scale[2.0315]", "scale[2.0316]"),
        ("scale[3.4445] %q_proj_x1", "scale[3.4445] %q_proj_x"),
        ("scale[1.224744871391589]", "scale[0.8164965809277261]"),
        ("scale[0.050000000000000044]", "scale[0.05]"),
        ("scale[0.01]", "scale[0.0]"),
    ] {
        let other = text.replace(from, to);
        assert!(other != text, "{from} is not in the programs");
        texts.programs = text::parse(&other).unwrap_or_else(|d| panic!("{from}: {d}"));
        let r = by_form(&texts.subject(), Lemmas::default());
        assert_ne!(r.verdict(), Verdict::Proved, "{from} as {to}");
    }
}
