//! Every fixture trained for three steps on thread ranks, against transformers: all families, all
//! meshes, with and without sequence parallelism, with 1 and 4 microbatches. f32.

use crate::fixture::*;

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
    for (mesh, rows) in MESHES {
        for sp in [false, true] {
            for &mb in rows {
                eprintln!("{name} {mesh:?} sp={sp} microbatch={mb}");
                train_and_compare(name, &options(mesh, sp, mb));
            }
        }
    }
}

macro_rules! families {
    ($($name:ident)*) => { $(#[test] fn $name() { all(stringify!($name)); })* };
}
families! { llama_mha llama_gqa llama_bias_tied llama_deep llama_yarn mistral_window qwen2 qwen3 gpt2 gemma2
llama_padded gemma2_padded }
