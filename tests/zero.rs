//! ZeRO 1 to 3 and hybrid sharding train every family to the numbers of transformers: alone, with
//! accumulation, with tensor and sequence parallelism, in a pipeline.

mod fixture;
use fixture::*;
use shardc_passes::options::{Options, Order};

type Axes = &'static [(&'static str, usize)];

fn zero(mesh: Axes, stage: u8, sp: bool, microbatch: usize) -> Options {
    Options { zero: stage, ..options(mesh, sp, microbatch) }
}

/// Meshes, sequence parallelism, rows per rank and microbatch.
const MESHES: &[(Axes, bool, usize)] = &[
    (&[("dp_shard", 2)], false, 4),
    (&[("dp_shard", 4)], false, 1),
    (&[("dp_replicate", 2), ("dp_shard", 2)], false, 1),
    (&[("dp_shard", 2), ("tp", 2)], true, 2),
    (&[("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)], false, 1),
    (&[("pp", 2), ("dp_shard", 2)], false, 1),
    (&[("pp", 2), ("dp_shard", 2), ("tp", 2)], true, 2),
];

#[test]
fn every_family_in_pieces() {
    for name in ALL {
        for &(mesh, sp, microbatch) in MESHES {
            for stage in 1..=3 {
                eprintln!("{name} {mesh:?} zero={stage} sp={sp} microbatch={microbatch}");
                train_and_compare(name, &zero(mesh, stage, sp, microbatch));
            }
        }
    }
}

#[test]
fn gathered_in_forward_and_kept() {
    for schedule in ["1f1b", "zb-v"] {
        let mut o = zero(&[("pp", 2), ("dp_shard", 2)], 3, false, 1);
        (o.reshard_after_forward, o.schedule) = (false, Order::Named(schedule.into()));
        train_and_compare("llama_deep", &o);
    }
}
