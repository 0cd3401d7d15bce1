//! Every fixture trained for three steps on thread ranks, against transformers: all families, all
//! meshes, with and without sequence parallelism, with 1 and 4 microbatches. f32. Every run takes a
//! quarter of them.

use crate::fixture::*;
use shardc_testing::taken;

type Axes = &'static [(&'static str, usize)];

/// Meshes, and rows per rank and microbatch: 1 and 4 microbatches on each.
const MESHES: &[(Axes, [usize; 2])] = &[
    (&[], [8, 2]),
    (&[("tp", 2)], [8, 2]),
    (&[("tp", 4)], [8, 2]),
    (&[("dp_replicate", 2)], [4, 1]),
    (&[("dp_replicate", 2), ("tp", 2)], [4, 1]),
];

fn all(name: &str) {
    let family = ALL.iter().position(|f| *f == name).expect("a family");
    for (m, (mesh, rows)) in MESHES.iter().enumerate() {
        for (s, sp) in [false, true].into_iter().enumerate() {
            for (r, &mb) in
                rows.iter().enumerate().filter(|(r, _)| taken(family + 3 * m + 2 * s + r, 4))
            {
                eprintln!("{name} {mesh:?} sp={sp} microbatch={mb}, the {r}th");
                train_and_compare(name, &options(mesh, sp, mb));
            }
        }
    }
}

macro_rules! families {
    ($($name:ident)*) => { $(#[test] fn $name() { all(stringify!($name)); })* };
}
families! { llama_mha llama_gqa llama_bias_tied llama_deep llama_yarn mistral_window qwen2 qwen3 gpt2 gemma2
llama_padded gemma2_padded olmo2 phi3 gemma3 gpt_neox gpt_neox_serial }
