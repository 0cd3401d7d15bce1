//! Mixtures of experts: families, expert parallelism and its factorisations, against transformers.

mod fixture;
use fixture::*;
use shardc_ir::func::RoleKind;
use shardc_ir::rng::Stream;
use shardc_ir::types::DType;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, Options, Order};
use shardc_passes::schedule::{Named, legal};
use shardc_passes::shard::experts::fold;

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
    // Other orders of ranks: pp need not be last, though edp is not dp.
    (&[("dp_shard", 2), ("pp", 2), ("tp", 2)], 2, 1, true, 4),
    (&[("dp_shard", 2), ("tp", 2), ("pp", 2)], 4, 1, false, 4),
    (&[("tp", 2), ("cp", 2), ("dp_shard", 2)], 4, 1, true, 4),
    (&[("cp", 2), ("dp_shard", 2), ("tp", 2)], 2, 2, true, 4),
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

/// Options drawn over all axes and factorisations; none if what was drawn is not legal.
fn draw(s: &Stream, i: u64) -> Option<(&'static str, Options)> {
    let pick = |k: u64, n: usize| (s.uniform(i * 16 + k) * n as f64) as usize % n;
    let which = pick(0, EXPERTS.len());
    let sizes: [usize; 5] = std::array::from_fn(|k| [1, 1, 2, 2, 4][pick(1 + k as u64, 5)]);
    let [pp, replicas, shards, cp, tp] = sizes;
    let (ranks, dp): (usize, usize) = (sizes.iter().product(), replicas * shards);
    if !(2..=16).contains(&ranks) || dp > ROWS || SEQ % (2 * cp * tp) != 0 {
        return None;
    }
    let m = if which < 2 { 1 } else { 1 << pick(6, (ROWS / dp).trailing_zeros() as usize + 1) };
    let named = if pp > 1 { Named::ALL[pick(7, Named::ALL.len())] } else { Named::OneFOneB };
    let chunks = named.default_chunks();
    if legal(named, pp, chunks, m).is_err() || pp * chunks > 4 {
        return None;
    }
    let axes = ["pp", "dp_replicate", "dp_shard", "cp", "tp"];
    let mesh: Vec<(&str, usize)> = axes.into_iter().zip(sizes).filter(|a| a.1 > 1).collect();
    let heads = 4 % (tp * cp) == 0;
    let o = Options {
        zero: if shards > 1 { pick(8, 4) as u8 } else { 0 },
        cp_mode: match pick(9, 3) {
            1 if cp > 1 => CpMode::Ring,
            2 if cp > 1 && heads => CpMode::Ulysses,
            _gathered => CpMode::AllGather,
        },
        schedule: Order::Named(named.name().into()),
        recompute: [Recompute::None, Recompute::Selective, Recompute::Full, Recompute::Sqrt]
            [pick(10, 4)]
        .clone(),
        ..on(
            &mesh,
            [1, 2, 4, 8][pick(12, 4)],
            [1, 2, 4][pick(13, 3)],
            tp > 1 && pick(11, 2) == 1,
            ROWS / dp / m,
        )
    };
    fold(&o).ok()?;
    Some((EXPERTS[which], o))
}

/// `SWEEP=200 SEED=7 cargo test --test experts -- sweep` draws more.
#[test]
fn sweep() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let s = Stream::new(number("SEED").unwrap_or(1), "experts", 0);
    let mut left = number("SWEEP").unwrap_or(24);
    for i in 0.. {
        if left == 0 {
            break;
        }
        if let Some((name, o)) = draw(&s, i) {
            eprintln!(
                "{name} {:?} ep={} etp={:?} sp={} zero={} {:?} {:?} {:?} rows={}",
                o.mesh, o.ep, o.etp, o.sp, o.zero, o.cp_mode, o.schedule, o.recompute, o.microbatch
            );
            train_and_compare(name, &o);
            left -= 1;
        }
    }
}

/// Between stages goes the residual stream, and nothing of what it was made of, in either type.
#[test]
fn one_value_crosses_a_boundary() {
    for dtype in [DType::F32, DType::BF16] {
        for name in ["qwen3_moe", "deepseek_v3"] {
            let o = on(&[("pp", 2), ("dp_shard", 2)], 2, 1, false, 4);
            let o = Options { dtype, observe: false, ..o };
            let model = Fixture::open(name).model(&o);
            let plan = compile(&model, &o).plan;
            let f = plan.module.funcs.iter().find(|f| f.name == "forward.1").expect("a stage");
            let is_edge = |r: &shardc_ir::func::Role| r.kind == RoleKind::Edge;
            let edges = f.args.iter().filter(|a| a.role.as_ref().is_some_and(is_edge)).count();
            assert_eq!(edges, 1, "{name} in {}", dtype.name());
        }
    }
}
