//! Context parallelism trains every family to the numbers of transformers: the sequence is cut over
//! `cp`, keys and values are gathered.

mod fixture;
use fixture::*;
use shardc_passes::options::{CpMode, Options};

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

#[test]
fn every_family_with_gathered_keys_and_values() {
    for name in ALL {
        for &(mesh, sp, zero, microbatch) in MESHES {
            eprintln!("{name} {mesh:?} zero={zero} sp={sp} microbatch={microbatch}");
            train_and_compare(name, &Options { zero, ..options(mesh, sp, microbatch) });
        }
    }
}

/// As above, where heads can be split so: all families have 4.
#[test]
fn every_family_with_heads_against_tokens() {
    let heads = |mesh: Axes| {
        mesh.iter().filter(|a| ["tp", "cp"].contains(&a.0)).map(|a| a.1).product::<usize>()
    };
    for name in ALL {
        for &(mesh, sp, zero, microbatch) in MESHES.iter().filter(|m| 4 % heads(m.0) == 0) {
            eprintln!("{name} {mesh:?} zero={zero} sp={sp} microbatch={microbatch}");
            let o = options(mesh, sp, microbatch);
            train_and_compare(name, &Options { zero, cp_mode: CpMode::Ulysses, ..o });
        }
    }
}
