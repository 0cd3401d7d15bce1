//! Tensor parallelism on grids: bytes that a rank sends and holds, against closed formulas, with
//! difference 0; and the table of `docs/tensor-parallelism.md`, made from plans.
//!
//! N: tokens of a microbatch over all of tp; x, y, z: the parts of tp, as in `passes/src/shard/grid.rs`.
//! Ring costs: AR(n) = 2 (k-1)/k n, AG(n) = RS(n) = (k-1)/k n with n the gathered size, k = q or depth.

use crate::fixture::*;
use shardc::commands::verify::Verify;
use shardc_frontends::Facts;
use shardc_ir::func::{Func, Node, RoleKind};
use shardc_ir::ops::Op;
use shardc_ir::plan::{Mode, Plan};
use shardc_ir::price::flops;
use shardc_passes::options::Options;
use shardc_passes::options::TpMode::{self, OneD, ThreeD, TwoAndHalfD, TwoD};
use shardc_passes::options::TpSteps::{self, Gathered, Summa};
use std::fmt::Write;
use std::path::Path;

const TOKENS: usize = 1024;
const LAYERS: usize = 2;

/// Llama 3.1 8B with two layers, `rows` sequences in each of `m` microbatches.
fn planned(mode: TpMode, tp_steps: TpSteps, tp: usize, m: usize, rows: usize) -> (Facts, Plan) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/configs/llama-3.1-8b.json");
    let text = std::fs::read_to_string(file).expect("a config");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    config["num_hidden_layers"] = LAYERS.into();
    let mut o = Options { tp_mode: mode, tp_steps, ..options(&[("tp", tp)], false, rows) };
    (o.seq, o.observe, o.clip, o.global_batch) = (TOKENS, false, None, m * rows);
    let done = shardc::compile_config(&config, &o).unwrap_or_else(|e| panic!("{e}"));
    (done.stored.facts.expect("facts"), done.stored.plan)
}

/// Bytes of a step sent in collectives of a kind over a part of tp; scalars left out.
fn sent(plan: &Plan, kind: &str, axis: &str) -> f64 {
    let all = shardc::report::collectives(plan, &plan.classes[0]);
    let of = all.iter().filter(|c| c.kind == kind && c.axis == axis && c.bytes > 1024.0);
    of.map(|c| c.bytes).sum()
}

/// Every byte that is sent, in kinds and parts of tp, is one of those listed.
fn nothing_else(plan: &Plan, listed: &[(&str, &str)]) {
    for c in shardc::report::collectives(plan, &plan.classes[0]) {
        let known = listed.contains(&(c.kind, &*c.axis)) || c.bytes <= 1024.0;
        assert!(known, "{} over {}: {} B", c.kind, c.axis, c.bytes);
    }
}

fn ring(k: usize, n: f64) -> f64 {
    (k - 1) as f64 / k as f64 * n
}

/// Sums over the linears of the model, of f32: operands of first products, results of first products,
/// operands of second ones, their results, per token; weights; norms.
struct Sizes {
    from: f64,
    to: f64,
    second_from: f64,
    second_to: f64,
    weights: f64,
    norms: f64,
}

/// q, k and v have one operand, and so have gate and up; the head is a first product.
fn sizes(f: &Facts) -> Sizes {
    let l = f.layers as f64;
    let [h, i, v] = [f.hidden, f.ffn, f.vocab].map(|n| n as f64 * 4.0);
    let [q, kv] = [f.heads, f.kv_heads].map(|n| (n * f.head_dim) as f64 * 4.0);
    let hidden = f.hidden as f64;
    Sizes {
        from: l * 2.0 * h + h,
        to: l * (q + 2.0 * kv + 2.0 * i) + v,
        second_from: l * (q + i),
        second_to: l * 2.0 * h,
        weights: l * (2.0 * q + 2.0 * kv + 3.0 * i) * hidden + v * hidden,
        norms: (2.0 * l + 1.0) * h,
    }
}

/// Norms: a sum of squares per token in forward and its mirror in backward; the loss: a maximum and
/// two sums in forward.
fn sums(f: &Facts) -> f64 {
    (2 * (2 * f.layers + 1) + 3) as f64 * 4.0
}

/// SEMANTICS of Optimus: forward receives (q-1)/q (N i + i o)/q per linear, backward twice that. Beside
/// it the table of the embedding is not gathered: rows of the batch are, and a vector is gathered with
/// the weights. 2.5d: each of the grids has its rows; all gradients are summed over the grids once.
#[test]
fn two_dimensions_send_what_their_papers_say() {
    for (mode, d, q, m) in [
        (TwoD, 1, 2, 1),
        (TwoD, 1, 4, 2),
        (TwoAndHalfD { depth: 2 }, 2, 2, 1),
        (TwoAndHalfD { depth: 4 }, 4, 2, 2),
    ] {
        let rows = 2 * d * q;
        let (f, plan) = planned(mode, Gathered, d * q * q, m, rows);
        let s = sizes(&f);
        let [x, y, z] = [(d * q, q), (d, q), (1, d)].map(|(before, n)| match n == d * q * q {
            true => "tp".to_string(),
            false => format!("tp:({before}){n}"),
        });
        // Per microbatch, of a rank's grid.
        let (tokens, side) = ((rows * TOKENS / d) as f64, q as f64);
        let operands = tokens * (s.from + s.second_from) / side;
        let weights = (s.weights + s.norms) / side;
        let embedded = tokens * (f.hidden * 4) as f64 / side;
        let times = |bytes: f64| m as f64 * ring(q, bytes);
        assert_eq!(sent(&plan, "all_gather", &x), times(2.0 * operands), "{mode} {d} {q}");
        assert_eq!(sent(&plan, "reduce_scatter", &x), times(operands));
        assert_eq!(sent(&plan, "all_gather", &y), times(2.0 * weights + embedded));
        assert_eq!(sent(&plan, "reduce_scatter", &y), times(weights + embedded));
        assert_eq!(sent(&plan, "all_reduce", &x), 2.0 * times(sums(&f) * tokens / side));
        let mut listed = vec![("all_reduce", &*x)];
        listed.extend([&*x, &*y].iter().flat_map(|a| [("all_gather", *a), ("reduce_scatter", *a)]));
        if d > 1 {
            let held = parameters(&plan) * 4.0 / (side * side);
            assert_eq!(sent(&plan, "all_reduce", &z), 2.0 * ring(d, held), "{mode} {d} {q}");
            listed.push(("all_reduce", &*z));
        }
        nothing_else(&plan, &listed);
        assert_eq!(held(&plan), parameters(&plan) / (side * side));
        // In steps: broadcasts and reduces in place of what products gathered and scattered, of the
        // same bytes; a piece of an operand at a time, so less memory.
        let (_, steps) = planned(mode, Summa, d * q * q, m, rows);
        let products = s.weights / side;
        let vectors = s.norms / side;
        assert_eq!(sent(&steps, "broadcast", &x), times(2.0 * operands), "{mode} {d} {q}");
        assert_eq!(sent(&steps, "reduce", &x), times(operands));
        assert_eq!(sent(&steps, "broadcast", &y), times(2.0 * products));
        assert_eq!(sent(&steps, "reduce", &y), times(products));
        assert_eq!(sent(&steps, "all_gather", &y), times(2.0 * vectors + embedded));
        assert_eq!(sent(&steps, "reduce_scatter", &y), times(vectors + embedded));
        let buffers = |p: &Plan| {
            let both = ["forward", "backward"].map(|f| p.module.func(f).expect("both"));
            let all = both.into_iter().flat_map(|f| f.nodes.iter().map(move |n| (f, n)));
            let given = all.filter(|(_, n)| matches!(n.op, Op::AllGather(_) | Op::Broadcast(_)));
            given.map(|(f, n)| f.ty(n.outs[0]).local_bytes(&p.module.mesh)).max().unwrap_or(0)
        };
        assert_eq!(buffers(&plan), q * buffers(&steps));
        let live = |p: &Plan| p.classes[0].memory.live_bytes;
        assert!(live(&steps) < live(&plan), "{mode} {d} {q}");
        assert!(steps.peak_bytes() < plan.peak_bytes(), "{mode} {d} {q}");
        listed.extend([&*x, &*y].iter().flat_map(|a| [("broadcast", *a), ("reduce", *a)]));
        nothing_else(&steps, &listed);
    }
}

/// Bian et al.: operands are gathered among q ranks, weights among q others, results are summed in
/// parts among the rest; every one of these has 1/q² of the matrix as its gathered size. Backward does
/// the same with what forward did reversed, and gathers operands and weights again.
#[test]
fn three_dimensions_send_what_their_paper_says() {
    for (q, m) in [(2, 1), (2, 2), (4, 1)] {
        let rows = q * q;
        let (f, plan) = planned(ThreeD, Gathered, q * q * q, m, rows);
        let s = sizes(&f);
        let [x, y, z] = [q * q, q, 1].map(|before| format!("tp:({before}){q}"));
        let face = (q * q) as f64;
        let tokens = (rows * TOKENS) as f64 / face;
        let times = |bytes: f64| m as f64 * ring(q, bytes);
        let (first, made) = (tokens * s.from, tokens * s.to);
        let (second, ended) = (tokens * s.second_from, tokens * s.second_to);
        assert_eq!(sent(&plan, "all_gather", &y), times(2.0 * first + ended), "{q} {m}");
        assert_eq!(sent(&plan, "reduce_scatter", &y), times(first + ended));
        assert_eq!(sent(&plan, "all_gather", &z), times(2.0 * second + made));
        assert_eq!(sent(&plan, "reduce_scatter", &z), times(second + made));
        assert_eq!(sent(&plan, "all_gather", &x), times(2.0 * s.weights / face));
        assert_eq!(sent(&plan, "reduce_scatter", &x), times(s.weights / face));
        // What is cut among x and y at once: the embedding's rows, and the norms.
        let both = format!("tp:({q}){}", q * q);
        let embedded = tokens * (f.hidden * 4) as f64 * q as f64;
        let norms = s.norms / q as f64;
        let of_both = |bytes: f64| m as f64 * ring(q * q, bytes);
        assert_eq!(sent(&plan, "all_gather", &both), of_both(2.0 * norms + embedded));
        assert_eq!(sent(&plan, "reduce_scatter", &both), of_both(norms + embedded));
        // The norms sum over z, the loss over y.
        let per_token = 2.0 * m as f64 * ring(q, tokens * 4.0);
        let norm_sums = (2 * (2 * f.layers + 1)) as f64;
        assert_eq!(sent(&plan, "all_reduce", &z), per_token * norm_sums);
        assert_eq!(sent(&plan, "all_reduce", &y), per_token * 3.0);
        let mut listed = vec![("all_reduce", &*y), ("all_reduce", &*z)];
        for part in [&x, &y, &z, &both] {
            listed.extend([("all_gather", &**part), ("reduce_scatter", &**part)]);
        }
        nothing_else(&plan, &listed);
        assert_eq!(held(&plan), parameters(&plan) / face / q as f64);
    }
}

fn parameters(plan: &Plan) -> f64 {
    plan.weights.iter().map(|w| w.shape.iter().product::<usize>() as f64).sum()
}

/// Parameters that a rank stores.
fn held(plan: &Plan) -> f64 {
    let m = &plan.module;
    let enter = m.func("step_prologue").expect("enter");
    let params =
        enter.args.iter().filter(|a| a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param));
    params.map(|a| enter.ty(a.value).local_bytes(&m.mesh) as f64 / 4.0).sum()
}

/// Sides of 3, depths of 3, a vocabulary of 50, biases; whole and in steps; training and inference:
/// the numbers are those of one rank.
#[test]
fn sides_of_three() {
    let dir = std::env::temp_dir().join(format!("shardc-grids-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 36, "intermediate_size": 48, "vocab_size": 50,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "attention_bias": true, "head_dim": 6,
    });
    let file = dir.join("config.json");
    std::fs::write(&file, config.to_string()).expect("written");
    let three = TwoAndHalfD { depth: 3 };
    for (mode, tp, rows) in [(TwoD, 9, 3), (three, 12, 6), (three, 27, 9), (ThreeD, 27, 9)] {
        for (tp_steps, infer) in [(Gathered, false), (Summa, false), (Summa, true)] {
            let mut o = Options { tp_mode: mode, tp_steps, ..options(&[("tp", tp)], false, rows) };
            (o.global_batch, o.seq, o.observe) = (2 * rows, 4, false);
            if infer {
                (o.mode, o.global_batch) = (Mode::Infer, rows);
            }
            let out = dir.join(format!("{mode}-{tp}-{tp_steps:?}-{infer}"));
            // Of three KV heads on sides of two, neither number divides the other.
            let done =
                shardc::compile(&file, &o, &mut |_, _| {}).and_then(|mut done| done.write(&out));
            if tp == 12 {
                assert_eq!(done.err().map(|d| d.code), Some("kv-heads-against-tp"));
                continue;
            }
            done.unwrap_or_else(|e| panic!("{mode} {tp}: {e}"));
            let how = Verify { numbers: true, ..Verify::default() };
            let status = shardc::commands::verify::verify(&out, how, true);
            assert_eq!(status.unwrap_or_else(|e| panic!("{e}")), 0, "{mode} {tp} {tp_steps:?}");
        }
    }
    std::fs::remove_dir_all(&dir).expect("removed");
}

/// What one rank does, holds and sends in a microbatch of 16 rows.
struct Cost {
    /// Of products and attention.
    flops: f64,
    parameters: f64,
    /// Bytes saved by forward for backward.
    saved: f64,
    /// Of one layer: bytes sent, calls, and messages that follow one another in rings.
    bytes: f64,
    calls: usize,
    messages: usize,
    /// Bytes of the largest result of a gather or a broadcast.
    buffer: usize,
}

fn cost(mode: TpMode, steps: TpSteps, tp: usize) -> Cost {
    let (_, plan) = planned(mode, steps, tp, 1, 16);
    let mesh = &plan.module.mesh;
    let both = || ["forward", "backward"].map(|f| plan.module.func(f).expect("both"));
    let nodes = || both().into_iter().flat_map(|f| f.nodes.iter().map(move |n| (f, n)));
    let of = |(f, n): (&Func, &Node)| {
        let products = matches!(n.op, Op::Dot(_) | Op::Attention(_) | Op::AttentionGrad(_));
        let ins: Vec<_> = n.ins.iter().map(|&v| f.ty(v)).collect();
        if products { flops(mesh, &n.op, &ins, f.ty(n.outs[0])) } else { 0.0 }
    };
    let backward = plan.module.func("backward").expect("backward");
    let stash =
        |a: &&shardc_ir::func::Port| a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Stash);
    let saved = backward.args.iter().filter(stash);
    let mut c = Cost {
        flops: nodes().map(of).sum(),
        parameters: held(&plan),
        saved: saved.map(|a| backward.ty(a.value).local_bytes(mesh) as f64).sum(),
        bytes: 0.0,
        calls: 0,
        messages: 0,
        buffer: 0,
    };
    for (f, n) in nodes().filter(|(f, n)| f.scope_info(n.scope).layer == Some(0)) {
        let Some(call) = n.op.collective().filter(|_| !matches!(n.op, Op::FanOut(_))) else {
            continue;
        };
        let ranks = mesh.ways(call.atoms());
        if matches!(n.op, Op::AllGather(_) | Op::Broadcast(_)) {
            c.buffer = c.buffer.max(f.ty(n.outs[0]).local_bytes(mesh));
        }
        c.bytes += call.ring_bytes(mesh, f.ty(n.ins[0]), f.ty(n.outs[0]));
        c.calls += 1;
        c.messages += if matches!(n.op, Op::AllReduce(_)) { 2 } else { 1 } * (ranks - 1);
    }
    c
}

fn table() -> String {
    let rows = [
        (OneD, Gathered, 4),
        (TwoD, Gathered, 4),
        (TwoD, Summa, 4),
        (OneD, Gathered, 8),
        (TwoAndHalfD { depth: 2 }, Gathered, 8),
        (TwoAndHalfD { depth: 2 }, Summa, 8),
        (ThreeD, Gathered, 8),
        (OneD, Gathered, 16),
        (TwoD, Gathered, 16),
        (TwoD, Summa, 16),
        (TwoAndHalfD { depth: 4 }, Gathered, 16),
        (TwoD, Gathered, 64),
        (TwoD, Summa, 64),
        (TwoAndHalfD { depth: 4 }, Gathered, 64),
        (ThreeD, Gathered, 64),
    ];
    let one = cost(OneD, Gathered, 1);
    let mut text = String::from(
        "\n| mode | tp | compute | parameters | activations | MiB sent | calls | messages | buffer, MiB |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for (mode, steps, tp) in rows {
        let c = cost(mode, steps, tp);
        let depth = match mode {
            TwoAndHalfD { depth } => format!(", depth {depth}"),
            OneD | TwoD | ThreeD => String::new(),
        };
        let in_steps = if steps == Summa { ", in steps" } else { "" };
        let share = |x: f64, of: f64| format!("1/{:.1}", of / x);
        writeln!(
            text,
            "| {mode}{depth}{in_steps} | {tp} | {} | {} | {} | {:.0} | {} | {} | {:.1} |",
            share(c.flops, one.flops),
            share(c.parameters, one.parameters),
            share(c.saved, one.saved),
            c.bytes / f64::from(1 << 20),
            c.calls,
            c.messages,
            c.buffer as f64 / f64::from(1 << 20)
        )
        .expect("text");
    }
    text + "\n"
}

/// `UPDATE_DOCS=1 cargo test --workspace --test it -- grids` writes the table anew.
#[test]
fn the_table_of_the_documentation_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/tensor-parallelism.md");
    let page = std::fs::read_to_string(&path).expect("docs/tensor-parallelism.md");
    let (begin, end) = ("<!-- generated: begin -->\n", "<!-- generated: end -->");
    let (head, rest) = page.split_once(begin).expect("the begin of the table");
    let (was, tail) = rest.split_once(end).expect("the end of the table");
    let now = table();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{head}{begin}{now}{end}{tail}")).expect("writable");
    } else {
        assert_eq!(was, now, "run with UPDATE_DOCS=1 to write docs/tensor-parallelism.md anew");
    }
}
