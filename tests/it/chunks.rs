//! Losses in chunks of tokens, as other tests take them.

use crate::fixture::options;
use crate::lab::{FIXTURES, Lab};
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::options::{CpMode, Options, Order, TpMode, TpSteps};

/// Losses in chunks, of even and uneven size, on layouts that cut tokens or logits in their ways.
pub fn in_chunks() -> [(&'static str, Options); 15] {
    let on = |n, o: Options| Options { loss_chunks: LossChunks::Of(n), ..o };
    let dp2_tp2 = [("dp_replicate", 2), ("tp", 2)];
    let ring = Options { cp_mode: CpMode::Ring, ..options(&[("cp", 4)], false, 2) };
    let tp_mode = TpMode::TwoD;
    let grid = Options { tp_mode, ..options(&[("tp", 4)], false, 8) };
    let summa = Options { tp_steps: TpSteps::Summa, ..grid.clone() };
    let schedule = Order::Named("zb-h1".into());
    let late = Options { schedule, ..options(&[("pp", 2), ("tp", 2)], false, 2) };
    // The last stage is the head alone.
    let head = |o: Options| Options { layers: "lm_head".into(), ..o };
    let alone = head(options(&[("pp", 2)], false, 1));
    let alone_tp = head(options(&[("pp", 2), ("tp", 2)], true, 2));
    let alone_late = head(Options { schedule: Order::Named("zb-h1".into()), ..alone.clone() });
    let shards = Options { zero: 3, ..options(&[("dp_shard", 4)], false, 1) };
    [
        ("llama_gqa", on(3, options(&dp2_tp2, true, 1))),
        ("gpt2", on(2, options(&[("tp", 4)], false, 4))),
        ("gemma2", on(5, options(&dp2_tp2, true, 2))),
        ("llama_bias_tied", on(4, options(&[("pp", 2)], false, 2))),
        ("llama_deep", on(2, late)),
        ("qwen3", on(2, shards)),
        ("llama_gqa", on(2, ring)),
        ("llama_gqa", on(2, options(&[("dp_replicate", 2), ("cp", 2)], false, 1))),
        ("llama_gqa", on(4, grid)),
        ("gpt2", on(3, options(&[], false, 8))),
        ("qwen3", on(4, summa)),
        ("llama_gqa", on(2, alone)),
        ("llama_bias_tied", on(3, alone_tp)),
        ("llama_gqa", on(2, alone_late)),
        ("llama_mha", on(24, options(&[], false, 4))),
    ]
}

/// A loss that is a sum over tokens by itself, in chunks: the gradient of each term is the same for all tokens.
#[test]
fn a_loss_that_is_a_sum_is_proved() {
    let lab = Lab::new("sum-in-chunks");
    let toy = format!("{FIXTURES}/../cases/toy.ir");
    for chunks in ["2", "3", "4"] {
        let sizes = ["--global-batch", "8", "--seq", "4", "--loss-chunks", chunks];
        lab.ok(&[&["compile", &toy, "--prove", "yes"][..], &sizes].concat());
    }
}

/// More stages than the logits and the loss can share: refused, at the flag that asks for it.
#[test]
fn one_stage_computes_the_logits_and_the_loss() {
    let lab = Lab::new("chunks-apart");
    let llama = format!("{FIXTURES}/llama_gqa");
    let sizes = ["--global-batch", "8", "--seq", "16", "--loss-chunks", "2"];
    let compile = |pp| [&["compile", &llama, "--mesh", pp][..], &sizes].concat();
    lab.ok(&compile("pp=5"));
    for (pp, stage) in [("pp=6", 4), ("pp=7", 5)] {
        let said = lab.refuses(&compile(pp), 4, "not-built");
        let why = format!("stage {stage} computes the logits, and stage {} the loss", stage + 1);
        assert!(said.contains(&why) && said.contains("--loss-chunks 2"), "{said}");
    }
}
