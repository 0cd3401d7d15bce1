//! What a layer saves for backward: from the mathematics of its ops, and from the plan.

use super::*;
use shardc_ir::func::{Func, RoleKind, Value};
use shardc_testing::taken;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of an element of f32.
const F32: usize = 4;

/// Sizes of one microbatch on one rank.
pub struct Sizes {
    pub rows: usize,
    pub seq: usize,
    pub facts: Facts,
    pub tp: usize,
    pub sp: bool,
}

/// Over what tensor parallelism splits a tensor.
#[derive(Clone, Copy, PartialEq)]
pub enum Over {
    /// The sequence, with `--sp`; else nothing.
    Sequence,
    /// Heads, the width of the MLP or the vocabulary; the last rank may pad.
    Width,
    /// Key-value heads: no more ways than there are.
    KvHeads,
    /// Nothing.
    Whole,
}

/// One tensor that forward saves.
pub struct Entry {
    pub what: &'static str,
    /// The gradients that read it.
    pub reader: &'static str,
    /// Elements per token of the whole tensor, in letters and as a number.
    pub letters: &'static str,
    pub per_token: usize,
    pub over: Over,
}

impl Entry {
    pub fn bytes(&self, x: &Sizes) -> usize {
        let tokens = x.rows * x.seq;
        let elements = match self.over {
            Over::Sequence if x.sp => tokens / x.tp * self.per_token,
            Over::Sequence | Over::Whole => tokens * self.per_token,
            Over::Width => tokens * self.per_token.div_ceil(x.tp),
            Over::KvHeads => tokens * self.per_token / x.tp.min(x.facts.kv_heads),
        };
        elements * F32
    }
}

/// Which ops a layer is made of.
#[derive(Clone, Copy, PartialEq)]
pub struct BlockKind {
    /// Norms that subtract the mean and add a bias.
    pub layer_norm: bool,
    /// An MLP with a gate.
    pub gate: bool,
    /// Norms of the heads of q and k.
    pub head_norms: bool,
    pub rotary: bool,
    /// Norms behind attention and MLP, and a softcap of the logits.
    pub gemma: bool,
}

impl BlockKind {
    pub const LLAMA: BlockKind =
        BlockKind { layer_norm: false, gate: true, head_norms: false, rotary: true, gemma: false };
    pub const GPT2: BlockKind =
        BlockKind { layer_norm: true, gate: false, rotary: false, ..BlockKind::LLAMA };

    pub fn of(fixture: &str) -> BlockKind {
        match fixture {
            "gpt2" => BlockKind::GPT2,
            "qwen3" => BlockKind { head_norms: true, ..BlockKind::LLAMA },
            "gemma2" | "gemma2_padded" => BlockKind { gemma: true, ..BlockKind::LLAMA },
            _llama_like => BlockKind::LLAMA,
        }
    }
}

/// A norm y = x·(x·x/h + ε)^(-1/2)·weight, of primitives. A product saves the operands whose partner
/// wants a gradient, a power its own result; what a layer norm subtracts and adds saves nothing.
fn norm(k: BlockKind, h: usize, readers: &'static str) -> Vec<Entry> {
    let e = |what, reader, letters, per_token| Entry {
        what,
        reader,
        letters,
        per_token,
        over: Over::Sequence,
    };
    let x = if k.layer_norm { "x - mean" } else { "x" };
    vec![
        e(x, "x·x and x·rstd, of a norm", "h", h),
        e("rstd", "x·rstd, and its own", "1", 1),
        e("x·rstd", "the norm's weight", "h", h),
        e("the norm's result", readers, "h", h),
    ]
}

/// A norm behind attention or MLP: a residual sum, which saves nothing, takes its result.
fn norm_behind(k: BlockKind, h: usize) -> Vec<Entry> {
    let mut all = norm(k, h, "nothing");
    all.truncate(if k.gemma { 3 } else { 0 });
    all
}

/// What a layer saves if nothing is made again.
fn everything(k: BlockKind, f: &Facts) -> Vec<Entry> {
    let e =
        |what, reader, letters, per_token, over| Entry { what, reader, letters, per_token, over };
    let (q, kv) = (f.heads * f.head_dim, f.kv_heads * f.head_dim);
    let mut all = norm(k, f.hidden, "weights of q, k and v");
    if k.head_norms {
        // As above, but per head.
        all.extend([
            e("q before its norm", "q·q and q·rstd", "a·d", q, Over::Width),
            e("rstd of q", "q·rstd, and its own", "a", f.heads, Over::Width),
            e("q·rstd", "weight of q's norm", "a·d", q, Over::Width),
            e("k before its norm", "k·k and k·rstd", "g·d", kv, Over::KvHeads),
            e("rstd of k", "k·rstd, and its own", "g", f.kv_heads, Over::KvHeads),
            e("k·rstd", "weight of k's norm", "g·d", kv, Over::KvHeads),
        ]);
    }
    // A rotation reads cosine and sine only, which all layers share.
    all.extend([
        e("q", "attention", "a·d", q, Over::Width),
        e("k", "attention", "g·d", kv, Over::KvHeads),
        e("v", "attention", "g·d", kv, Over::KvHeads),
        e("attention's result", "attention (Σ dO·O), weight of o", "a·d", q, Over::Width),
        e("log-sum-exp", "attention", "a", f.heads, Over::Width),
    ]);
    all.extend([norm_behind(k, f.hidden), norm_behind(k, f.hidden)].into_iter().flatten());
    // A residual sum saves nothing.
    if k.gate {
        all.extend(norm(k, f.hidden, "weights of gate and up"));
        all.extend([
            e("gate", "silu", "f", f.ffn, Over::Width),
            e("silu(gate)", "up", "f", f.ffn, Over::Width),
            e("up", "silu(gate)", "f", f.ffn, Over::Width),
            e("silu(gate)·up", "weight of down", "f", f.ffn, Over::Width),
        ]);
    } else {
        all.extend(norm(k, f.hidden, "weight of the first product"));
        all.extend([
            e("up", "gelu", "f", f.ffn, Over::Width),
            e("gelu(up)", "weight of the second product", "f", f.ffn, Over::Width),
        ]);
    }
    all
}

/// What is left if all is made again but products with weights, attention and residual sums.
fn expensive(k: BlockKind, f: &Facts) -> Vec<Entry> {
    let e =
        |what, reader, letters, per_token, over| Entry { what, reader, letters, per_token, over };
    let (h, q, kv) = (f.hidden, f.heads * f.head_dim, f.kv_heads * f.head_dim);
    let mut all = vec![
        e("x", "what its norm makes again", "h", h, Over::Sequence),
        e("q of the product", "rotation, attention", "a·d", q, Over::Width),
        e("k of the product", "rotation, attention", "g·d", kv, Over::KvHeads),
        e("v of the product", "attention", "g·d", kv, Over::KvHeads),
        e("attention's result", "attention, weight of o", "a·d", q, Over::Width),
        e("log-sum-exp", "attention", "a", f.heads, Over::Width),
        e("x after attention", "what its norm makes again", "h", h, Over::Sequence),
        e("up of the product", "what the MLP makes again", "f", f.ffn, Over::Width),
    ];
    if k.gemma {
        let made = "what the norm behind makes again";
        all.push(e("o of the product", made, "h", h, Over::Sequence));
        all.push(e("down of the product", made, "h", h, Over::Sequence));
    }
    if k.gate {
        all.push(e("gate of the product", "what the MLP makes again", "f", f.ffn, Over::Width));
    }
    all
}

/// What element-wise work makes of what is saved anyway.
const REDONE: [&str; 7] =
    ["x·rstd", "the norm's result", "q·rstd", "k·rstd", "silu(gate)", "silu(gate)·up", "gelu(up)"];

/// The table: what a layer saves for its backward.
pub fn layer(k: BlockKind, f: &Facts, r: &Recompute) -> Vec<Entry> {
    match r {
        Recompute::None => everything(k, f),
        Recompute::Elementwise => {
            let mut all = everything(k, f);
            all.retain(|e| !REDONE.contains(&e.what));
            // Of what enters the layer and what the norm behind attention reads, both saved, the residual sum
            // is made again.
            if k.gemma {
                let residual = all.iter().rposition(|e| e.what == "x").expect("of the MLP's norm");
                all.remove(residual);
            }
            all
        }
        Recompute::Selective => expensive(k, f),
        Recompute::Full => vec![Entry {
            what: "x",
            reader: "the layer, made again",
            letters: "h",
            per_token: f.hidden,
            over: Over::Sequence,
        }],
        _other => unreachable!("not in the table"),
    }
}

/// What lies outside layers, of which element-wise work alone is made again: the final norm, the loss, and without
/// rotary embeddings this rank's positions.
fn outside(k: BlockKind, x: &Sizes, redone: bool) -> Vec<usize> {
    let whole = |what, reader, letters, per_token, over| {
        Entry { what, reader, letters, per_token, over }.bytes(x)
    };
    let norm = norm(k, x.facts.hidden, "output projection");
    let kept = norm.iter().filter(|e| !redone || !REDONE.contains(&e.what));
    let mut all: Vec<usize> = kept.map(|e| e.bytes(x)).collect();
    // With a softcap the exponentials are redone from its tanh, which needs the largest logit.
    all.push(match redone && k.gemma {
        true => whole("max", "exp(logits - max), made again", "1", 1, Over::Whole),
        false => whole("exp(logits - max)", "logits", "v", x.facts.vocab, Over::Width),
    });
    all.extend([
        whole("its sum", "log", "1", 1, Over::Whole),
        whole("whether a token is scored", "loss", "1", 1, Over::Whole),
    ]);
    if k.gemma {
        all.push(whole("tanh(logits / cap)", "itself", "v", x.facts.vocab, Over::Width));
        // 1 / cap scales the smaller operand of the product that makes logits. Where that is the
        // table, it is kept, so that backward does not scale it again.
        if !redone && x.rows * x.seq >= x.facts.vocab {
            all.push(x.facts.vocab / x.tp * x.facts.hidden * F32);
        }
    }
    if x.sp && !k.rotary {
        // This rank's part of the positions, of which the table's gradient is a sum.
        all.push(x.seq / x.tp * F32);
    }
    all
}

/// Layers whose ops read a value, itself or through views.
fn layers_reading(f: &Func, v: Value, out: &mut BTreeSet<Option<u32>>) {
    for n in f.nodes.iter().filter(|n| n.ins.contains(&v)) {
        if n.op.def().is_view() {
            n.outs.iter().for_each(|&o| layers_reading(f, o, out));
        } else {
            out.insert(f.scope_info(n.scope).layer);
        }
    }
}

/// Sizes of what forwards save (or receive, and keep) for backward, sorted: by the one layer whose
/// backward reads it, and of what belongs to no layer.
pub fn saved(plan: &Plan) -> (BTreeMap<u32, Vec<usize>>, Vec<usize>) {
    let m = &plan.module;
    let (mut layers, mut rest) = (BTreeMap::<u32, Vec<usize>>::new(), vec![]);
    for class in &plan.classes {
        let own = |words: &'static [&str]| {
            class.funcs.iter().filter(move |&&f| words.contains(&m.funcs[f].kind.name()))
        };
        for &f in own(&["forward"]) {
            let func = &m.funcs[f];
            let made = func.results.iter().map(|p| (p, RoleKind::Stash));
            let received = func.args.iter().map(|p| (p, RoleKind::Edge));
            let mut places = BTreeSet::new();
            for (p, kind) in made.chain(received) {
                let Some(role) = p.role.as_ref().filter(|r| r.kind == kind) else { continue };
                let mut readers = BTreeSet::new();
                let mut is_read = false;
                for &b in own(&["backward", "weight"]) {
                    let b = &m.funcs[b];
                    if let Some(a) = b.args.iter().find(|a| a.role.as_ref() == Some(role)) {
                        is_read = true;
                        layers_reading(b, a.value, &mut readers);
                    }
                }
                assert!(is_read || kind == RoleKind::Edge, "nobody reads {}", role.name);
                if !is_read {
                    continue;
                }
                let place = class.memory.places[f][p.value];
                let new = places.insert((place.frame, place.offset));
                assert!(new, "{} is saved twice", role.name);
                // Cosine and sine belong to all layers, even if a stage has only one.
                let shared = func.name(p.value).layer.is_none() && func.ty(p.value).rank() < 3;
                match &readers.into_iter().collect::<Vec<_>>()[..] {
                    [Some(layer)] if !shared => layers.entry(*layer).or_default().push(place.bytes),
                    _shared => rest.push(place.bytes),
                }
            }
        }
    }
    layers.values_mut().for_each(|l| l.sort_unstable());
    rest.sort_unstable();
    (layers, rest)
}

/// Sizes of a table's entries, sorted.
fn sorted(mut bytes: Vec<usize>) -> Vec<usize> {
    bytes.sort_unstable();
    bytes
}

/// Compares a plan with the tables, tensor by tensor. Every stage of a pipeline makes cosine and
/// sine for itself, if there is one microbatch.
fn compare(what: &str, k: BlockKind, x: &Sizes, plan: &Plan, r: &Recompute) {
    let (layers, rest) = saved(plan);
    assert_eq!(layers.len(), x.facts.layers, "{what}: layers");
    let want = sorted(layer(k, &x.facts, r).iter().map(|e| e.bytes(x)).collect());
    for (i, got) in layers {
        assert_eq!(got, want, "{what}, layer {i}: bytes of what is saved");
    }
    let redone = *r == Recompute::Elementwise;
    let mut want = outside(k, x, redone);
    // Several microbatches share what the step has.
    if k.rotary && plan.settings.microbatches == 1 {
        // Cosine and sine of every position and pair.
        want.extend(vec![x.seq * x.facts.head_dim / 2 * F32; 2 * plan.schedule.owner.len()]);
    }
    assert_eq!(rest, sorted(want), "{what}: outside layers");
}

const POLICIES: [Recompute; 4] =
    [Recompute::None, Recompute::Elementwise, Recompute::Selective, Recompute::Full];

#[test]
fn a_layer_saves_what_its_gradients_read() {
    // These have norms, halves or fused tensors for which the table has no rows.
    let others = ["olmo2", "phi3", "gemma3", "gpt_neox", "gpt_neox_serial"];
    for (f, name) in ALL.iter().enumerate().filter(|x| !others.contains(x.1)) {
        for (i, (mesh, sp)) in [
            (&[][..], false),
            (&[("tp", 2)], false),
            (&[("tp", 4)], false),
            (&[("tp", 2)], true),
            (&[("dp_replicate", 2), ("tp", 2)], true),
            (&[("pp", 2), ("tp", 2)], true),
        ]
        .into_iter()
        .enumerate()
        {
            for (_, r) in POLICIES.into_iter().enumerate().filter(|(j, _)| taken(f + i + j, 3)) {
                let what = format!("{name} {mesh:?} sp={sp} {r:?}");
                let mut o = asked(mesh, sp, SEQ, 2, r.clone());
                (o.microbatch, o.global_batch) = (2, 2 * o.global_batch);
                let (facts, plan) = planned(&fixture_config(name), &o);
                let x = Sizes { rows: 2, seq: SEQ, facts, tp: o.axis("tp"), sp };
                compare(&what, BlockKind::of(name), &x, &plan, &r);
            }
        }
    }
}

/// A backward that is cut in two reads the same as a whole one.
#[test]
fn cutting_the_backward_saves_nothing_more_in_forward() {
    for r in POLICIES {
        let o = scheduled(asked(&[("pp", 2)], false, SEQ, 4, r.clone()), Named::ZbH1);
        let (facts, plan) = planned(&fixture_config("llama_deep"), &o);
        let x = Sizes { rows: 1, seq: SEQ, facts, tp: 1, sp: false };
        compare(&format!("{r:?}"), BlockKind::LLAMA, &x, &plan, &r);
    }
}

#[test]
fn llama_8b_saves_what_its_gradients_read() {
    // With 16 ways there are more ranks than key-value heads.
    for (tp, sp) in [(1, false), (2, false), (8, false), (8, true), (16, true)] {
        for r in POLICIES {
            let o = asked(&[("tp", tp)], sp, 4096, 1, r.clone());
            let (facts, plan) = planned(&llama("8b"), &o);
            let x = Sizes { rows: 1, seq: 4096, facts, tp, sp };
            compare(&format!("8b tp={tp} sp={sp} {r:?}"), BlockKind::LLAMA, &x, &plan, &r);
        }
    }
}

/// Full recomputation holds one tensor per layer and microbatch: what enters the layer.
#[test]
fn full_recomputation_saves_one_tensor_per_layer() {
    for (sp, parts) in [(false, 1), (true, 2)] {
        for mesh in [&[("tp", 2)][..], &[("pp", 2), ("tp", 2)], &[("pp", 4), ("tp", 2)]] {
            let o = asked(mesh, sp, SEQ, 4, Recompute::Full);
            let (facts, plan) = planned(&fixture_config("llama_deep"), &o);
            let (layers, _) = saved(&plan);
            assert_eq!(layers.len(), facts.layers);
            for (i, saved) in layers {
                assert_eq!(saved, [SEQ * facts.hidden * 4 / parts], "{mesh:?} layer {i}");
            }
        }
    }
}

/// What a layer with experts saves on a rank that has `tokens` tokens, in bytes, if nothing is made
/// again. Buffers hold what may ever be needed: of a group of experts, all copies it could get.
fn with_experts(k: BlockKind, x: &Sizes, groups: usize, normed: bool) -> Vec<usize> {
    let (f, e) = (&x.facts, x.facts.experts.expect("experts"));
    let tokens = x.rows * x.seq;
    let dense = everything(k, f);
    // All but what the MLP saves after its norm: gate, silu(gate), up and their product.
    let mut all: Vec<usize> = dense[..dense.len() - 4].iter().map(|e| e.bytes(x)).collect();
    // The softmax of the router saves its exponentials, their sum, and its result; a choice its index.
    all.extend([tokens * e.experts, tokens, tokens * e.experts, tokens * e.top_k].map(|n| n * F32));
    // Gates are read where copies are combined, and where they are divided by their sum, which is
    // saved too.
    all.push(tokens * e.top_k * F32);
    all.extend(normed.then_some(tokens * F32));
    // Where copies stand, whether they were kept, and how many rows each expert has of each shard.
    all.extend([tokens * e.top_k * F32; 2]);
    all.push(e.experts / groups * groups * F32);
    // Backward exchanges rows again: how many this rank sent to each expert is saved too.
    all.extend((groups > 1).then_some(e.experts * F32));
    // Rows of buffers: of this rank's experts, for the tokens of all ranks that share experts with it.
    let rows = groups * tokens * e.top_k.min(e.experts / groups);
    // What experts take and give, and inside of them gate, silu(gate), up and their product.
    all.extend([rows * f.hidden * F32; 2]);
    all.extend([rows * e.ffn * F32; 4]);
    sorted(all)
}

#[test]
fn a_layer_of_experts_saves_what_its_gradients_read() {
    for (name, normed) in [("mixtral", true), ("qwen3_moe_raw", false)] {
        for ep in [1, 2, 4] {
            let mesh = [("dp_shard", ep)];
            let mesh = if ep > 1 { &mesh[..] } else { &[] };
            let o = Options { ep, etp: Some(1), ..asked(mesh, false, SEQ, 1, Recompute::None) };
            let (facts, plan) = planned(&fixture_config(name), &o);
            let x = Sizes { rows: 1, seq: SEQ, facts, tp: 1, sp: false };
            let k = BlockKind { head_norms: name != "mixtral", ..BlockKind::LLAMA };
            let (layers, _) = saved(&plan);
            assert_eq!(layers.len(), facts.layers);
            for (i, got) in layers {
                let want = with_experts(k, &x, ep, normed);
                assert_eq!(got, want, "{name} ep={ep}, layer {i}: bytes of what is saved");
            }
        }
    }
}
