//! Mixtures of experts: families, expert parallelism and its factorisations, against transformers.

mod fixture;
use fixture::*;
use shardc_passes::options::Options;

/// Options for a mesh with its ep and etp.
fn on(mesh: &[(&str, usize)], ep: usize, etp: usize, sp: bool, microbatch: usize) -> Options {
    Options { ep, etp: Some(etp), ..options(mesh, sp, microbatch) }
}

#[test]
fn one_rank() {
    for name in EXPERTS {
        train_and_compare(name, &on(&[], 1, 1, false, 8));
    }
    for name in &EXPERTS[2..] {
        train_and_compare(name, &on(&[], 1, 1, false, 2));
    }
}

#[test]
fn expert_parallel() {
    for name in EXPERTS {
        train_and_compare(name, &on(&[("dp_shard", 2)], 2, 1, false, 4));
    }
}

/// Mesh, ep, etp, `--sp`, rows per rank and microbatch.
type Row = (&'static [(&'static str, usize)], usize, usize, bool, usize);

#[rustfmt::skip]
const MESHES: &[Row] = &[
    (&[("dp_replicate", 2)], 1, 1, false, 4),
    (&[("tp", 2)], 1, 2, false, 8),
    (&[("tp", 2)], 1, 2, true, 8),
    (&[("tp", 2)], 2, 1, false, 8),
    (&[("tp", 2)], 2, 1, true, 8),
    (&[("tp", 2)], 1, 1, false, 8),
    (&[("cp", 2)], 2, 1, false, 8),
    (&[("dp_shard", 4)], 2, 1, false, 2),
    (&[("dp_shard", 4)], 4, 1, false, 2),
    (&[("dp_shard", 2), ("tp", 2)], 2, 2, false, 4),
    (&[("dp_shard", 2), ("tp", 2)], 2, 2, true, 4),
    (&[("dp_shard", 2), ("tp", 2)], 4, 1, false, 4),
    (&[("dp_shard", 2), ("tp", 2)], 4, 1, true, 4),
    (&[("dp_shard", 2), ("tp", 2)], 1, 4, true, 4),
    (&[("dp_shard", 2), ("cp", 2)], 4, 1, false, 4),
    (&[("dp_shard", 2), ("cp", 2)], 2, 2, false, 4),
    (&[("cp", 2), ("tp", 2)], 2, 2, true, 8),
    (&[("dp_shard", 2), ("cp", 2), ("tp", 2)], 4, 2, true, 4),
    (&[("dp_shard", 2), ("cp", 2), ("tp", 2)], 8, 1, true, 4),
    (&[("dp_shard", 2), ("cp", 2), ("tp", 2)], 2, 1, false, 4),
    (&[("dp_replicate", 2), ("dp_shard", 2), ("tp", 2)], 2, 1, true, 2),
    (&[("pp", 2), ("dp_shard", 2)], 2, 1, false, 4),
    (&[("pp", 2), ("dp_shard", 2), ("tp", 2)], 2, 2, true, 4),
];

#[test]
fn factorisations() {
    for &(mesh, ep, etp, sp, rows) in MESHES {
        for name in EXPERTS {
            eprintln!("{name} {mesh:?} ep={ep} etp={etp} sp={sp}");
            train_and_compare(name, &on(mesh, ep, etp, sp, rows));
        }
    }
}

#[test]
fn zero() {
    for stage in 1..=3 {
        for name in EXPERTS {
            for (mesh, ep) in [(&[("dp_shard", 4)][..], 2), (&[("dp_shard", 2), ("tp", 2)], 2)] {
                train_and_compare(
                    name,
                    &Options { zero: stage, ..on(mesh, ep, 1, false, 8 / mesh[0].1) },
                );
            }
        }
    }
}
