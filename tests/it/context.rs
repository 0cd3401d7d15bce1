//! Context parallelism trains every family to the numbers of transformers: the sequence is cut over
//! `cp`; keys and values are gathered, go around in blocks, or are exchanged for heads.

use crate::fixture::*;
use shardc_ir::func::{Role, RoleKind};
use shardc_ir::ops::Op;
use shardc_ir::plan::{Mode, TokenOrder};
use shardc_passes::options::{CpMode, CpSplit, Options};
use shardc_runtime::StepBatch;
use shardc_testing::taken;
use std::path::Path;

type Axes = &'static [(&'static str, usize)];

/// Meshes, sequence parallelism, ZeRO stage, rows per rank and microbatch.
const MESHES: &[(Axes, bool, u8, usize)] = &[
    (&[("cp", 2)], false, 0, 8),
    (&[("cp", 4)], false, 0, 2),
    (&[("cp", 2), ("tp", 2)], false, 0, 2),
    (&[("cp", 2), ("tp", 2)], true, 0, 4),
    (&[("dp_shard", 2), ("cp", 2)], false, 3, 2),
    (&[("dp_replicate", 2), ("cp", 2), ("tp", 2)], true, 0, 1),
    (&[("pp", 2), ("cp", 2), ("tp", 2)], true, 0, 2),
    (&[("pp", 2), ("dp_shard", 2), ("cp", 2), ("tp", 2)], true, 2, 2),
];

/// Every family on meshes, one in eight of the pairs from `first` on; all in the long run.
fn pairs(first: usize) -> Vec<(&'static str, Options)> {
    let of = |(f, name): (usize, &&'static str)| {
        let name = *name;
        let on = MESHES.iter().enumerate().filter(move |(m, _)| taken(first + f + m, 8));
        on.map(move |(_, &(mesh, sp, zero, microbatch))| {
            (name, Options { zero, ..options(mesh, sp, microbatch) })
        })
    };
    ALL.iter().enumerate().flat_map(of).collect()
}

fn said(name: &str, o: &Options) {
    eprintln!("{name} {:?} zero={} sp={} microbatch={}", o.mesh, o.zero, o.sp, o.microbatch);
}

#[test]
fn every_family_with_gathered_keys_and_values() {
    for (name, o) in pairs(0) {
        said(name, &o);
        train_and_compare(name, &o);
    }
}

/// As above, where heads can be split so: all families have 4.
#[test]
fn every_family_with_heads_against_tokens() {
    for (name, o) in pairs(1) {
        if 4 % (o.axis("tp") * o.axis("cp")) == 0 {
            said(name, &o);
            train_and_compare(name, &Options { cp_mode: CpMode::Ulysses, ..o });
        }
    }
}

/// Blocks of keys and values around a ring, tokens dealt in zigzag.
#[test]
fn every_family_with_rings() {
    for (name, o) in pairs(2) {
        said(name, &o);
        let o = Options { cp_mode: CpMode::Ring, ..o };
        let (_, compiled) = train_and_compare(name, &o);
        let plan = &compiled.plan;
        assert_eq!(plan.settings.tokens, TokenOrder::Zigzag { ranks: o.axis("cp") });
        let cp = plan.module.mesh.axis("cp").expect("cp");
        let nodes = || plan.module.funcs.iter().flat_map(|f| &f.nodes);
        assert!(nodes().any(|n| matches!(n.op, Op::Permute(_))));
        // Nothing is gathered over cp but parameters, which have no tokens.
        let whole = |n: &&shardc_ir::func::Node| {
            matches!(&n.op, Op::AllGather(g) if g.axes == cp)
                || matches!(&n.op, Op::ReduceScatter(s) if s.axes == cp)
        };
        assert_eq!(nodes().filter(whole).count(), 0, "{name}");
    }
}

/// Tokens may be dealt in either way whatever attention does: positions say where they stand.
#[test]
fn either_split_with_every_mode() {
    let modes = [CpMode::AllGather, CpMode::Ring, CpMode::Ulysses];
    for (f, name) in ["llama_gqa", "mistral_window", "gpt2", "gemma2"].into_iter().enumerate() {
        for (i, cp_mode) in modes.into_iter().enumerate() {
            let all = [
                (CpSplit::Contiguous, &[("cp", 4)][..]),
                (CpSplit::Zigzag, &[("cp", 4)]),
                (CpSplit::Contiguous, &[("cp", 2), ("tp", 2)]),
                (CpSplit::Zigzag, &[("pp", 2), ("cp", 2), ("tp", 2)]),
            ];
            for (_, (split, mesh)) in
                all.into_iter().enumerate().filter(|(k, _)| taken(f + i + k, 4))
            {
                let o = options(mesh, false, 2);
                let o = Options { cp_mode, cp_split: Some(split), ..o };
                eprintln!("{name} {cp_mode:?} {split:?} {mesh:?}");
                let (_, compiled) = train_and_compare(name, &o);
                let dealt = compiled.plan.settings.tokens != TokenOrder::Contiguous;
                assert_eq!(dealt, split == CpSplit::Zigzag);
            }
        }
    }
}

/// Logits of forward-only plans come back in the order of the tokens.
#[test]
fn forward_only_gives_logits_in_order() {
    let meshes: [Axes; 4] = [
        &[("cp", 2)],
        &[("cp", 4), ("tp", 2)],
        &[("pp", 2), ("cp", 2)],
        &[("dp_replicate", 2), ("cp", 4)],
    ];
    for (f, name) in ALL.iter().enumerate() {
        let fx = Fixture::open(name);
        for (_, mesh) in meshes.into_iter().enumerate().filter(|(m, _)| taken(f + m, 4)) {
            let o = Options { mode: Mode::Infer, observe: false, ..options(mesh, false, 2) };
            let o = Options { cp_mode: CpMode::Ring, ..o };
            let model = fx.model(&o);
            let mut s = session(&model, &compile(&model, &o));
            let batch = StepBatch::tokens(&fx.input_ids, &[], true);
            let r = s.step(&batch, 0.0, 1).unwrap_or_else(|e| panic!("{name} {mesh:?}: {e}"));
            let logits: Vec<f64> = r
                .output(RoleKind::Output, "logits")
                .expect("logits")
                .data
                .iter()
                .map(|&x| f64::from(x))
                .collect();
            fx.compare_logits(&logits);
        }
    }
}

/// In f64, with the last token of every sequence moved to the front, since no order is assumed: a
/// ring gives what the gathered form gives.
#[test]
fn a_ring_is_the_gathered_form() {
    let meshes: [(&str, Axes); 4] = [
        ("llama_gqa", &[("cp", 4), ("tp", 2)]),
        ("llama_gqa", &[("cp", 2), ("tp", 4)]),
        ("mistral_window", &[("cp", 4)]),
        ("gemma2", &[("cp", 2), ("tp", 2)]),
    ];
    for (name, mesh) in meshes {
        let fx = Fixture::open(name);
        let outputs = |cp_mode: CpMode| {
            let o = Options { cp_mode, ..options(mesh, false, 4) };
            let model = fx.model(&o);
            let compiled = compile(&model, &o);
            let mut state = start(&fx, &model, &compiled);
            for t in state.inputs.values_mut() {
                t.data.chunks_mut(SEQ).for_each(|row| row.rotate_right(1));
            }
            interpret(&compiled, &mut state, 1).unwrap_or_else(|e| panic!("{e}"));
            let mesh = &compiled.plan.module.mesh;
            let one =
                |r: &Role| state.output(mesh, r.kind, &r.name).unwrap_or_else(|e| panic!("{e}"));
            state.outputs.keys().map(|n| (n.clone(), one(n))).collect::<Vec<_>>()
        };
        let (want, got) = (outputs(CpMode::AllGather), outputs(CpMode::Ring));
        assert!(want.len() > 20, "logits, loss and gradients, not {}", want.len());
        for ((n, w), (_, g)) in want.iter().zip(&got) {
            let most = w.data.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let off = w.data.iter().zip(&g.data).map(|(x, y)| (x - y).abs());
            assert!(off.clone().all(|d| d <= 1e-12 * most), "{name} {mesh:?}: {n}");
        }
    }
}

/// Causal attention over gathered keys is dealt in zigzag where nobody asked for a split, and where the model and its length
/// allow it; the plan records what it has, and what is stored without one is contiguous as it was.
#[test]
fn zigzag_is_the_default_where_it_can_be() {
    let of = |name: &str, flags: Options| {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let done = shardc::compile(&model, &flags, &mut |_, _| {});
        let stored = done.unwrap_or_else(|e| panic!("{name}: {e}")).stored;
        assert_eq!(stored.plan.settings.tokens, stored.options.tokens(), "{name}");
        (stored.options.cp_split, stored.plan.settings.tokens)
    };
    let plain = |seq: usize| Options { seq, ..options(&[("cp", 2)], false, 8) };
    let zigzag = (Some(CpSplit::Zigzag), TokenOrder::Zigzag { ranks: 2 });
    assert_eq!(of("llama_gqa", plain(16)), zigzag);
    assert_eq!(of("gpt2", plain(16)), zigzag);
    let contiguous = (None, TokenOrder::Contiguous);
    assert_eq!(of("llama_gqa", plain(14)), contiguous);
    let asked = Some(CpSplit::Contiguous);
    let line = Options { cp_split: asked, ..plain(16) };
    assert_eq!(of("llama_gqa", line), (asked, TokenOrder::Contiguous));
    assert_eq!(of("llama_gqa", Options { cp_mode: CpMode::Ulysses, ..plain(16) }), contiguous);
    assert_eq!(of("llama_gqa", options(&[("tp", 2)], false, 8)), contiguous);
    // Layers that predict further tokens take these as inputs.
    assert_eq!(of("deepseek_v3_mtp", Options { mtp: 0.3, ..plain(16) }), zigzag);
    assert_eq!(plain(16).tokens(), TokenOrder::Contiguous);
}
