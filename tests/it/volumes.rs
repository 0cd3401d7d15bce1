//! Bytes that a rank sends and holds, against the closed formulas of the literature: difference 0.
//!
//! Ring costs: AR(n) = 2 (k-1)/k n, AG(n) = RS(n) = (k-1)/k n with n the gathered size, A2A(n) =
//! (k-1)/k n with n what one rank holds. Ψ: parameters; numbers are f32 where bf16 is not said.

use crate::fixture::*;
use shardc_frontends::Facts;
use shardc_ir::func::Value;
use shardc_ir::plan::{MemoryClass, Plan};
use shardc_ir::types::DType;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Buffers, CpMode, Options};
use std::collections::BTreeSet;
use std::path::Path;

const SEQ8: usize = 4096;

fn planned(o: &Options) -> (Facts, Plan) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/configs/llama-3.1-8b.json");
    let text = std::fs::read_to_string(file).expect("a config");
    let config = serde_json::from_str(&text).expect("JSON");
    let done = shardc::compile_config(&config, o).unwrap_or_else(|e| panic!("{e}"));
    (done.stored.facts.expect("facts"), done.stored.plan)
}

fn asked(mesh: &[(&str, usize)], m: usize) -> Options {
    let mut o = options(mesh, false, 1);
    (o.seq, o.observe, o.clip) = (SEQ8, false, None);
    o.global_batch = m * o.data_parallel();
    o
}

fn parameters(plan: &Plan) -> f64 {
    plan.weights.iter().map(|w| w.shape.iter().product::<usize>() as f64).sum()
}

/// Bytes of a step sent in collectives of a kind over an axis; scalars (counts, norms) left out.
fn sent(plan: &Plan, kind: &str, axis: &str) -> f64 {
    let all = shardc::report::collectives(plan, &plan.classes[0]);
    let of = all.iter().filter(|c| c.kind == kind && c.axis == axis && c.bytes > 1024.0);
    of.map(|c| c.bytes).sum()
}

/// Bytes of what lives through a step: weights, gradients and moments. Gathered weights are the
/// buffers of their gathers.
fn state(plan: &Plan) -> f64 {
    let kinds = [
        MemoryClass::Weights,
        MemoryClass::Grads,
        MemoryClass::Optimizer,
        MemoryClass::CollectiveBuffer,
    ];
    let whole = plan.classes[0].memory.whole.iter();
    whole.filter(|x| kinds.contains(&x.0)).map(|x| x.1 as f64).sum()
}

fn ring(k: usize, n: f64) -> f64 {
    (k - 1) as f64 / k as f64 * n
}

/// The sum of the losses is one number in the call of the last gradients.
fn loss(k: usize) -> f64 {
    2.0 * ring(k, 4.0)
}

/// ZeRO-1: RS and AG of Ψ once per step. ZeRO-2: RS per microbatch. ZeRO-3: AG in forward and again
/// in backward, RS, per microbatch; one AG less if what forward gathered is kept (Rajbhandari et
/// al., 2020, section 7). Backward of the embedding needs no table, so that is not gathered again.
#[test]
fn zero_sends_what_its_paper_says() {
    let (d, m) = (8, 4);
    for (zero, keep, gathers, again, scatters) in
        [(1, false, 1, 0, 1), (2, false, 1, 0, m), (3, false, m, m, m), (3, true, m, 0, m)]
    {
        let o = Options { zero, reshard_after_forward: !keep, ..asked(&[("dp_shard", d)], m) };
        let (f, plan) = planned(&o);
        let once = ring(d, 4.0 * parameters(&plan));
        let read = once - ring(d, 4.0 * (f.vocab * f.hidden) as f64);
        let got =
            ["all_gather", "reduce_scatter", "all_reduce"].map(|k| sent(&plan, k, "dp_shard"));
        let gathered = gathers as f64 * once + again as f64 * read;
        let want = [gathered, scatters as f64 * once, 0.0];
        assert_eq!(got, want, "zero={zero} keep={keep}");
    }
    // Without ZeRO: one all_reduce of Ψ, the bytes of ZeRO-1.
    let (_, plan) = planned(&asked(&[("dp_replicate", d)], m));
    let all = 2.0 * ring(d, 4.0 * parameters(&plan));
    assert_eq!(sent(&plan, "all_reduce", "dp_replicate"), all + loss(d));
}

/// Ranks of `cp` compute parts of the same gradients, so ZeRO splits state over them too, as Megatron
/// (distributed optimizer over dp · cp) and torchtitan (FSDP over dp_shard · cp) do: bytes and state of
/// as many ranks of `dp_shard`.
#[test]
fn zero_splits_over_context_parallel_ranks_too() {
    let m = 2;
    for mesh in [&[("dp_shard", 2), ("cp", 4)][..], &[("cp", 8)]] {
        for (zero, whole, pieces, scatters) in [(1, 8, 12, 1), (2, 4, 16, m), (3, 0, 16, m)] {
            let (_, plan) = planned(&Options { zero, ..asked(mesh, m) });
            let all = parameters(&plan);
            let got = state(&plan);
            assert_eq!(got, all * (whole as f64 + pieces as f64 / 8.0), "{mesh:?} zero={zero}");
            // Over `cp` alone gradients of keys and values are scattered, too.
            if mesh.len() == 2 {
                let sums = sent(&plan, "reduce_scatter", "dp_shard+cp");
                assert_eq!(sums, scatters as f64 * ring(8, 4.0 * all), "zero={zero}");
            }
        }
    }
}

/// The gradients of a stage are scattered behind the backward of each layer, so that of whole
/// gradients not more than a few layers' are alive: ZeRO-2 needs less than ZeRO-1 by what it keeps in
/// pieces.
#[test]
fn zero_2_scatters_gradients_layer_by_layer() {
    let peak = |zero| {
        let o = Options { zero, recompute: Recompute::Full, ..asked(&[("dp_shard", 8)], 4) };
        let (f, plan) = planned(&o);
        (plan.peak_bytes() as f64, f.layers as f64, parameters(&plan))
    };
    let ((one, layers, all), (two, ..)) = (peak(1), peak(2));
    // Two layers' and the head's whole gradients, at most.
    let (layer, head) = (4.0 * all / layers, 4.0 * (128_256 * 4096) as f64);
    let kept = 4.0 * all * (1.0 - 1.0 / 8.0);
    assert!(two < one - kept + 2.0 * layer + head, "{two} {one} {kept}");
}

/// What is cheap does not depend on where weights come from: `selective` repeats no product with a
/// weight, whether ZeRO gathers the weight where it is used or not.
#[test]
fn selective_repeats_no_product_at_any_stage_of_zero() {
    let products = |zero, dtype| {
        let more = asked(&[("dp_shard", 8)], 1);
        let (_, plan) = planned(&Options { zero, dtype, recompute: Recompute::Selective, ..more });
        let backward = plan.module.func("backward").expect("backward");
        backward.nodes.iter().filter(|n| n.op.mnemonic() == "dot").count()
    };
    for dtype in [DType::F32, DType::BF16] {
        let counts = [0, 1, 2, 3].map(|zero| products(zero, dtype));
        assert_eq!(counts, [counts[0]; 4], "{}", dtype.name());
    }
}

/// Hybrid sharding: what ZeRO sends inside a group, and an all_reduce of the pieces between groups.
#[test]
fn hybrid_sharding_reduces_pieces_between_groups() {
    let (r, f, m) = (4, 8, 2);
    for (zero, scatters) in [(1, 1), (2, m), (3, m)] {
        let o = Options { zero, ..asked(&[("dp_replicate", r), ("dp_shard", f)], m) };
        let (_, plan) = planned(&o);
        let bytes = 4.0 * parameters(&plan);
        assert_eq!(sent(&plan, "reduce_scatter", "dp_shard"), scatters as f64 * ring(f, bytes));
        let between = 2.0 * ring(r, bytes / f as f64);
        assert_eq!(sent(&plan, "all_reduce", "dp_replicate"), between, "zero={zero}");
    }
}

/// Bytes per parameter: weights, gradients and both moments, all f32. ZeRO-1 and 2 keep the gathered
/// weights (4 Ψ) beside the pieces that the optimizer steps; ZeRO-3 gathers a tensor at a time.
#[test]
fn state_per_parameter_is_that_of_the_table() {
    let d = 8;
    for (zero, whole, pieces) in [(0, 16, 0), (1, 8, 12), (2, 4, 16), (3, 0, 16)] {
        let o = Options { zero, ..asked(&[("dp_shard", d)], 4) };
        let (_, plan) = planned(&o);
        let got = state(&plan);
        let want = parameters(&plan) * (whole as f64 + pieces as f64 / d as f64);
        assert_eq!(got, want, "zero={zero}");
    }
}

/// Bytes per parameter in bf16 with f32 gradients, and with bf16 gradients: 2 of the weight, 4 or 2
/// of its gradient, 12 of the master copy and both moments. That is Megatron's 18, 6+12/d, 2+16/d and
/// 18/d, or 16, 4+12/d, 2+14/d and 16/d; what is gathered for a moment comes on top.
#[test]
fn state_per_parameter_in_bf16_is_that_of_the_table() {
    let d = 8;
    for (grad_dtype, table) in [
        (DType::F32, [(18, 0), (6, 12), (2, 16), (0, 18)]),
        (DType::BF16, [(16, 0), (4, 12), (2, 14), (0, 16)]),
    ] {
        for (zero, (whole, pieces)) in (0..).zip(table) {
            let more = asked(&[("dp_shard", d)], 4);
            let o = Options { zero, dtype: DType::BF16, grad_dtype, ..more };
            let (_, plan) = planned(&o);
            let of = |c: MemoryClass| {
                let all = plan.classes[0].memory.whole.iter();
                all.filter(|x| x.0 == c).map(|x| x.1 as f64).sum::<f64>()
            };
            let got: f64 = [MemoryClass::Weights, MemoryClass::Grads, MemoryClass::Optimizer]
                .map(of)
                .iter()
                .sum();
            let want = parameters(&plan) * (f64::from(whole) + f64::from(pieces) / d as f64);
            assert_eq!(got, want, "zero={zero} gradients in {}", grad_dtype.name());
            // Nothing else of a parameter lives through the step.
            assert_eq!(of(MemoryClass::CollectiveBuffer), 0.0);
            let weights = if zero == 3 { 2.0 / d as f64 } else { 2.0 };
            assert_eq!(of(MemoryClass::Weights), parameters(&plan) * weights, "zero={zero}");
        }
    }
}

/// Gathers move the 2-byte cast of the master copy, reductions the type of the gradients.
#[test]
fn zero_in_bf16_gathers_two_bytes() {
    let (d, m) = (8, 4);
    for (grad_dtype, size) in [(DType::F32, 4.0), (DType::BF16, 2.0)] {
        for (zero, gathers, again, scatters) in [(1, 1, 0, 1), (2, 1, 0, m), (3, m, m, m)] {
            let more = asked(&[("dp_shard", d)], m);
            let o = Options { zero, dtype: DType::BF16, grad_dtype, ..more };
            let (f, plan) = planned(&o);
            let once = ring(d, 2.0 * parameters(&plan));
            let read = once - ring(d, 2.0 * (f.vocab * f.hidden) as f64);
            let sums = ring(d, size * parameters(&plan));
            let got = ["all_gather", "reduce_scatter"].map(|k| sent(&plan, k, "dp_shard"));
            let gathered = gathers as f64 * once + again as f64 * read;
            let what = format!("zero={zero} gradients in {}", grad_dtype.name());
            assert_eq!(got, [gathered, scatters as f64 * sums], "{what}");
        }
    }
}

/// Gathered keys and values: per layer AG(K) and AG(V) in forward, both again and the RS of their
/// gradients in backward (Llama 3, section 3.3.2).
#[test]
fn context_parallelism_gathers_keys_and_values() {
    let (c, m) = (4, 2);
    let (f, plan) = planned(&asked(&[("cp", c)], m));
    let kv = 2.0 * (SEQ8 * f.kv_heads * f.head_dim * 4) as f64;
    let times = (f.layers * m) as f64;
    assert_eq!(sent(&plan, "all_gather", "cp"), times * 2.0 * ring(c, kv));
    assert_eq!(sent(&plan, "reduce_scatter", "cp"), times * ring(c, kv));
    // Weights are the same on all ranks of cp: their gradients are summed over it, once per step.
    let weights = 2.0 * ring(c, 4.0 * parameters(&plan));
    assert_eq!(sent(&plan, "all_reduce", "cp"), weights + loss(c));
}

/// A ring of c ranks: c-1 blocks of K and V in forward, as many again and c blocks of their gradients
/// in backward: one block more than gathers and scatters send (Liu et al., 2023, section 3).
#[test]
fn rings_pass_blocks_on() {
    let m = 2;
    for c in [2, 4, 8] {
        for (t, sp) in [(1, false), (2, true)] {
            let o = Options { cp_mode: CpMode::Ring, sp, ..asked(&[("cp", c), ("tp", t)], m) };
            let (f, plan) = planned(&o);
            let block = 2.0 * (SEQ8 / c * f.kv_heads / t * f.head_dim * 4) as f64;
            let times = (f.layers * m) as f64;
            let passed = |phase: &str| {
                let all = shardc::report::collectives(&plan, &plan.classes[0]);
                let of = all.iter().filter(|x| x.kind == "permute" && x.phase == phase);
                of.map(|x| x.bytes).sum::<f64>()
            };
            let (forward, back) = ((c - 1) as f64 * block, (2 * c - 1) as f64 * block);
            assert_eq!([passed("forward"), passed("backward")], [times * forward, times * back]);
            let over = |kind: &str| sent(&plan, kind, "cp");
            assert_eq!(over("permute"), times * (forward + back));
            assert_eq!([over("all_gather"), over("reduce_scatter"), over("all_to_all")], [0.0; 3]);
        }
    }
}

/// A ring has two blocks of keys and of values at once, the one in use and the next; in backward as
/// many of their gradients, the sum that came and what is added to it. Nothing has all tokens' keys.
#[test]
fn rings_hold_two_blocks() {
    for c in [2, 4, 8] {
        let o = Options { cp_mode: CpMode::Ring, ..asked(&[("cp", c)], 1) };
        let (f, plan) = planned(&o);
        let block = [1, SEQ8 / c, f.kv_heads, f.head_dim];
        for (fi, func) in plan.module.funcs.iter().enumerate() {
            let mut last = vec![0; func.values.len()];
            let mut moved: Vec<(usize, Value)> = vec![];
            for (i, n) in func.nodes.iter().enumerate() {
                n.ins.iter().for_each(|v| last[v.0 as usize] = i);
                let own =
                    |v: &Value| func.ty(*v).sizes()[..] == block && func.name(*v).hint == "k_block";
                moved.extend(n.outs.iter().filter(|v| own(v)).map(|&v| (i, v)));
                let ty = |v: &Value| func.ty(*v).sizes().to_vec();
                let whole = |v: &Value| ty(v)[..] == [1, SEQ8, f.kv_heads, f.head_dim];
                let cut = |v: &Value| func.ty(*v).dims[1].atoms.len() == 1;
                assert!(n.outs.iter().all(|v| !whole(v) || cut(v)), "@{}", func.name);
            }
            // Most places of memory that such values have at one node.
            let most = |grad: bool| {
                let at = |i: usize| {
                    let live = moved.iter().filter(|(made, v)| {
                        func.name(*v).grad == grad && (*made..=last[v.0 as usize]).contains(&i)
                    });
                    let places = &plan.classes[0].memory.places[fi];
                    live.map(|(_, v)| places[v].offset).collect::<BTreeSet<_>>().len()
                };
                (0..func.nodes.len()).map(at).max().unwrap_or(0)
            };
            // The first block is what the layer made: with 2 ranks only the other one comes.
            let blocks = if c == 2 { 1 } else { 2 };
            match func.name.as_str() {
                "forward" => assert_eq!([most(false), most(true)], [blocks, 0], "c={c}"),
                "backward" => assert_eq!([most(false), most(true)], [blocks, 2], "c={c}"),
                name => assert_eq!([most(false), most(true)], [0, 0], "@{name}"),
            }
        }
    }
}

/// Two layers of long sequences on 8 ranks, little else: the gathered form is at its peak where keys,
/// values and their gradients are whole; a ring needs less there than elsewhere.
#[test]
fn rings_need_less_than_gathers() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/configs/llama-3.1-8b.json");
    let text = std::fs::read_to_string(file).expect("a config");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for (key, n) in [("vocab_size", 512), ("num_hidden_layers", 2), ("intermediate_size", 1024)] {
        config[key] = n.into();
    }
    let [gathered, ring] = [CpMode::AllGather, CpMode::Ring].map(|cp_mode| {
        let o = Options { cp_mode, seq: 65536, ..asked(&[("cp", 8)], 1) };
        let done = shardc::compile_config(&config, &o).unwrap_or_else(|e| panic!("{e}"));
        let m = &done.stored.plan.classes[0].memory;
        println!("{cp_mode:?}: live {} B, peak {} B", m.live_bytes, m.peak_bytes);
        (m.live_bytes, m.peak_bytes)
    });
    assert!(ring.0 * 100 < gathered.0 * 94 && ring.1 * 100 < gathered.1 * 94);
    // Not because one is packed better.
    for (live, peak) in [gathered, ring] {
        assert!(peak * 100 < live * 101);
    }
}

/// Heads against tokens: per layer an all_to_all of q, k, v and of the result, in forward and in
/// backward: (c-1)/c N (2 a + 2 g) d, N the tokens of a rank (Jacobs et al., 2023, section 3.2).
#[test]
fn ulysses_exchanges_heads_for_tokens() {
    let (c, m) = (4, 2);
    let o = Options { cp_mode: CpMode::Ulysses, ..asked(&[("cp", c)], m) };
    let (f, plan) = planned(&o);
    let tokens = (SEQ8 / c * f.head_dim * 4) as f64;
    let each = ring(c, tokens * (2 * f.heads + 2 * f.kv_heads) as f64);
    assert_eq!(sent(&plan, "all_to_all", "cp"), (f.layers * m) as f64 * 2.0 * each);
    assert_eq!(sent(&plan, "all_gather", "cp") + sent(&plan, "reduce_scatter", "cp"), 0.0);
}

/// With fewer key-value heads than ranks that split heads, `cp` is cut: heads are exchanged over its
/// major part, and keys and values gathered over the minor one alone, whose ranks have other query
/// heads of the same keys. Each exchange of T bytes over c of them sends (c-1)/c T.
#[test]
fn ulysses_gathers_keys_only_where_heads_end() {
    // 8 key-value heads: 2 of each rank of tp=4, and 8 over cp=16.
    for (mesh, c, t, major) in [(&[("cp", 4), ("tp", 4)][..], 4, 4, 2), (&[("cp", 16)], 16, 1, 8)] {
        let minor = c / major;
        let o = Options { cp_mode: CpMode::Ulysses, ..asked(mesh, 1) };
        let (f, plan) = planned(&o);
        let all = shardc::report::collectives(&plan, &plan.classes[0]);
        let of_cp = |c: &&shardc::report::CollectiveReport| {
            c.axis.starts_with("cp") && c.bytes > 1024.0 && c.scope.contains("layers")
        };
        let phase = |phase: &str| {
            let of = all.iter().filter(of_cp).filter(|c| c.phase == phase);
            of.map(|c| c.bytes).sum::<f64>() / f.layers as f64
        };
        let token = (SEQ8 / c * f.head_dim * 4) as f64;
        let (q, kv) = (token * (f.heads / t) as f64, token * (f.kv_heads / t) as f64);
        // Keys and values: the tokens of the minor part's ranks, then all tokens for fewer heads. What is
        // chosen sends less than that forward, and no more in all: the last gather is made again in backward.
        let gathered_first = ring(minor, kv * minor as f64) + ring(major, kv * minor as f64);
        let most = 2.0 * ring(c, q) + 2.0 * gathered_first;
        let [forward, backward] = [phase("forward"), phase("backward")];
        assert!(forward < most && forward > 2.0 * ring(c, q), "{mesh:?} {forward} {most}");
        assert!(forward + backward <= 2.0 * most, "{mesh:?} {forward} {backward} {most}");
    }
}

/// What ranks send of a mixture of experts in one phase: bytes, and the most they may be.
fn exchanged(plan: &Plan, kind: &str, phase: &str) -> [f64; 2] {
    let all = shardc::report::collectives(plan, &plan.classes[0]);
    let of = all.iter().filter(|c| c.kind == kind && c.phase == phase);
    of.fold([0.0; 2], |[x, y], c| [x + c.bytes, y + c.bytes_max])
}

/// Per layer two exchanges of N k rows of h in forward, to the experts and back, and two in backward:
/// (e-1)/e of them if all experts are used alike, N the tokens of a rank; at most what the buffers
/// hold, N min(k, E/e) rows for each of e groups, or with a bound F N k / e. Counts come on top: a
/// number per expert, once per layer. Ranks of etp have the same tokens: those of all of them
/// are gathered, and what experts made of them is summed, before and behind that.
#[test]
fn experts_exchange_copies_of_tokens() {
    let (m, experts, k) = (2, 8, 2);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mixtral/config.json");
    let text = std::fs::read_to_string(file).expect("a config");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    config["max_position_embeddings"] = SEQ8.into();
    type Row = (&'static [(&'static str, usize)], usize, usize, usize);
    let meshes: &[Row] = &[
        (&[("dp_shard", 4)], 4, 1, SEQ8),
        (&[("dp_shard", 8)], 4, 1, SEQ8),
        (&[("dp_shard", 2), ("cp", 2)], 4, 1, SEQ8 / 2),
        (&[("dp_shard", 2), ("tp", 2)], 4, 1, SEQ8 / 2),
        (&[("dp_shard", 2), ("tp", 2)], 2, 2, SEQ8),
    ];
    for &(mesh, e, etp, n) in meshes {
        let bounds = [
            (Buffers::Worst, n * k.min(experts / e)),
            (Buffers::Bound(1.5), n * k / e * 3 / 2),
            (Buffers::Bound(1.0), n * k / e),
            (Buffers::Capacity(1.25), n * k / e * 5 / 4),
        ];
        for (moe, rows) in bounds {
            let o = Options { ep: e, etp: Some(etp), sp: etp > 1, moe, ..asked(mesh, m) };
            let done = shardc::compile_config(&config, &o).unwrap_or_else(|e| panic!("{e}"));
            let (f, plan) = (done.stored.facts.expect("facts"), done.stored.plan);
            let times = (f.layers * m) as f64;
            let once = |rows: usize| 2.0 * times * ring(e, (rows * f.hidden * 4) as f64);
            for phase in ["forward", "backward"] {
                let got = exchanged(&plan, "all_to_all_v", phase);
                assert_eq!(got, [once(n * k), once(e * rows)], "{mesh:?} {moe:?} {phase}");
            }
            let counts = times * ring(e, (experts * 4) as f64);
            assert_eq!(exchanged(&plan, "all_to_all", "forward"), [counts; 2], "{mesh:?} {moe:?}");
            assert_eq!(exchanged(&plan, "all_to_all", "backward"), [0.0; 2], "{mesh:?} {moe:?}");
        }
    }
}

/// Between stages: the residual stream forward and its gradient back, per microbatch and boundary.
#[test]
fn stages_exchange_the_residual_stream() {
    let (p, m) = (4, 8);
    for (sp, t) in [(false, 2), (true, 2)] {
        let o = Options { sp, ..asked(&[("pp", p), ("tp", t)], m) };
        let (f, plan) = planned(&o);
        let stream = (SEQ8 * f.hidden * 4) as f64 / if sp { t as f64 } else { 1.0 };
        for (class, c) in plan.classes.iter().enumerate() {
            let all = shardc::report::collectives(&plan, c);
            let sent: f64 = all.iter().filter(|x| x.kind == "send").map(|x| x.bytes).sum();
            let neighbours = usize::from(class > 0) + usize::from(class + 1 < p);
            assert_eq!(sent, (m * neighbours) as f64 * stream, "class {class} sp={sp}");
        }
    }
}
