//! Attention sinks (OpenAI, 2025, *gpt-oss*): a learned logit per head that takes part in the softmax
//! and has no value, so that it only enlarges the denominator. With the log-sum-exp L of a head,
//! attention with a sink is attention · e^L / (e^L + e^sink) = attention · logistic(L - sink): two ops
//! behind attention, and behind the merge of a ring, which every layout and both directions follow.

use crate::fixture::*;
use shardc_ir::weights::Weight;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, Options};
use std::ops::Range;

/// One microbatch, as the auxiliary loss asks, against transformers.
fn check(mesh: &[(&str, usize)], change: impl FnOnce(&mut Options)) {
    let shards = mesh.iter().filter(|a| a.0 == "dp_shard").map(|a| a.1).product::<usize>();
    let mut o = options(mesh, false, ROWS / shards);
    change(&mut o);
    train_and_compare("gpt_oss", &o);
}

#[test]
fn one_rank() {
    check(&[], |_| ());
    check(&[], |o| o.recompute = Recompute::Selective);
}

#[test]
fn split_with_the_heads() {
    check(&[("tp", 2)], |o| o.sp = true);
    check(&[("tp", 4)], |_| ());
    check(&[("dp_shard", 2), ("tp", 2)], |o| o.zero = 3);
    check(&[("pp", 2), ("tp", 2)], |_| ());
}

/// Biases of experts whose width is split are there once.
#[test]
fn biases_of_experts() {
    check(&[("tp", 2)], |o| (o.ep, o.etp) = (2, Some(1)));
    check(&[("tp", 4)], |o| (o.ep, o.etp, o.sp) = (2, Some(2), true));
    check(&[("dp_shard", 2), ("cp", 2)], |o| (o.ep, o.etp) = (2, Some(2)));
}

#[test]
fn behind_a_ring() {
    for mesh in [&[("cp", 2)][..], &[("cp", 4)], &[("cp", 2), ("tp", 2)]] {
        check(mesh, |o| o.cp_mode = CpMode::Ring);
    }
}

#[test]
fn with_gathered_keys_and_with_ulysses() {
    for cp_mode in [CpMode::AllGather, CpMode::Ulysses] {
        check(&[("cp", 2), ("tp", 2)], |o| o.cp_mode = cp_mode);
        check(&[("cp", 2)], |o| o.cp_mode = cp_mode);
    }
}

/// The loss with all sinks at this number, in a ring.
fn loss_at(sink: f32) -> f64 {
    let fx = Fixture::open("gpt_oss");
    let o = Options { cp_mode: CpMode::Ring, ..options(&[("cp", 2)], false, ROWS) };
    let model = fx.model(&o);
    let compiled = compile(&model, &o);
    let weights = model.checkpoint.as_ref().expect("weights");
    let load = |w: &Weight, ranges: &[Range<usize>], out: &mut [f32]| {
        if w.param.ends_with(".sinks") {
            out.fill(sink);
            return Ok(());
        }
        weights.read(w, ranges, out)
    };
    loss_of(&compiled, load, &fx)
}

/// A sink far below all scores leaves attention as it is, one far above them takes all of it, both
/// without an overflow.
#[test]
fn sinks_far_from_scores() {
    let [none, less, all, more] = [-1e30, -1e3, 1e3, 1e30].map(loss_at);
    assert!([none, all].iter().all(|x| x.is_finite()), "{none} {all}");
    assert_eq!((none, all), (less, more));
    assert_ne!(none, all);
}
