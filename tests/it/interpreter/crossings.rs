//! Sums, outputs and modes that cross: each plan computes what its model means, is proved, and runs.

use crate::fixture::options;
use shardc::numbers::{TOLERANCE, compare};
use shardc::proof::Prove;
use shardc_ir::plan::Mode;
use shardc_passes::options::Options;
use std::path::PathBuf;

const TOY: &str = include_str!("../../cases/toy.ir");

/// The first stage alone reads the labels.
const LABELS_FIRST: &str = "func @model(
  %e: f32[10,6] param \"e.weight\",
  %w: f32[6,6] param \"w.weight\",
  %ids: i32[8,4] input \"input_ids\",
  %targets: i32[8,4] input \"targets\",
) -> (f32[] sum \"loss\") {
 m.0:
  %x = take[vh,bs->bsh] %e, %ids : f32[8,4,6]
  %valid = at_least[0.0] %targets : f32[8,4]
 m.1:
  %y = dot[bsh,oh->bso] %x, %w : f32[8,4,6]
  %z = reduce_sum[bso->bs] %y : f32[8,4]
  %l = mul %z, %valid : f32[8,4]
  %loss = reduce_sum[bs->] %l : f32[]
  return %loss
}
";

fn on(mesh: &[(&str, usize)]) -> Options {
    let dp: usize = mesh.iter().filter(|a| a.0.starts_with("dp")).map(|a| a.1).product();
    Options { seq: 4, global_batch: 8, observe: false, ..options(mesh, false, 8 / dp) }
}

/// Compiles, computes and proves a program on some meshes.
fn holds(what: &str, text: &str, change: impl Fn(&mut Options)) {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{what}.ir"));
    std::fs::write(&file, text).expect("a file");
    let meshes: [&[(&str, usize)]; 5] = [
        &[],
        &[("dp_replicate", 2), ("tp", 2)],
        &[("dp_shard", 2)],
        &[("pp", 2)],
        &[("pp", 2), ("dp_shard", 2)],
    ];
    for mesh in meshes {
        let mut o = on(mesh);
        change(&mut o);
        let what = format!("{what} on {mesh:?}");
        let mut done =
            shardc::compile(&file, &o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{what}: {e}"));
        let all = compare(&done.stored).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(!all.is_empty(), "{what}");
        all.iter().for_each(|d| assert!(d.error <= TOLERANCE, "{what}: {d:?}"));
        done.prove(Prove::Yes).unwrap_or_else(|e| panic!("{what}: {e}"));
    }
}

/// A sum that is of nothing trained counts all the same, whichever of the two it is.
#[test]
fn sums_of_nothing_that_is_trained() {
    let sums = TOY
        .replace(
            "(f32[] sum \"loss\", f32[8,4,5]",
            "(f32[] sum \"loss\", f32[] sum \"labels\", f32[8,4,5]",
        )
        .replace(
            "return %loss,",
            "%labels = reduce_sum[bs->] %valid : f32[]\n  return %loss, %labels,",
        );
    assert_ne!(sums, TOY);
    holds("labels", &sums, |_| {});
    let first = sums.replace("reduce_sum[bs->] %valid", "dot[oh,oh->] %w2, %w2");
    holds("a sum of what is frozen", &first, |o| o.freeze = vec!["net2.weight".into()]);
    holds("a loss of what is frozen", &first, |o| {
        o.freeze = vec!["rows.weight".into(), "net1.*".into(), "net2.bias".into()];
    });
}

/// A loss may be shown, too; without training nothing else is computed.
#[test]
fn what_is_summed_and_shown() {
    let shown = TOY
        .replace("output \"logits\")", "output \"logits\", f32[] output \"loss\")")
        .replace("return %loss, %logits", "return %loss, %logits, %loss");
    assert_ne!(shown, TOY);
    holds("a loss that is shown", &shown, |o| o.observe = true);
    holds("inference of a loss that is shown", &shown, |o| o.mode = Mode::Infer);
    holds("inference of a model with a loss", TOY, |o| o.mode = Mode::Infer);
}

/// What a stage shows and the next one reads is both.
#[test]
fn what_is_shown_and_sent() {
    let sent = TOY
        .replace(
            "f32[8,4,5] output \"logits\")",
            "f32[8,4,5] output \"logits\", f32[8,4,10] output \"x\")",
        )
        .replace("return %loss, %logits", "return %loss, %logits, %x");
    assert_ne!(sent, TOY);
    holds("what is sent and shown", &sent, |o| o.mode = Mode::Infer);
    holds("what is sent and shown, trained", &sent, |o| o.observe = true);
}

#[test]
fn labels_that_the_first_stage_reads() {
    holds("labels first", LABELS_FIRST, |_| {});
}

/// What is written twice is computed once, which leaves products of sums in other forms than the model has.
#[test]
fn what_is_written_twice() {
    let cube = TOY.replace(
        "  %a = mul %h, %on : f32[8,4,32]\n",
        "  %a.0 = mul %h, %h : f32[8,4,32]\n  %a.1 = mul %h, %h : f32[8,4,32]\n  \
         %a.2 = mul %a.0, %h : f32[8,4,32]\n  %a = add %a.2, %a.1 : f32[8,4,32]\n",
    );
    assert_ne!(cube, TOY);
    holds("a square that is written twice", &cube, |_| {});
    let scaled = TOY.replace(
        "  %a = mul %h, %on : f32[8,4,32]\n",
        "  %a.0 = scale[0.3] %h : f32[8,4,32]\n  %a = scale[0.7] %a.0 : f32[8,4,32]\n",
    );
    assert_ne!(scaled, TOY);
    holds("a product of numbers that f64 has not", &scaled, |_| {});
}
