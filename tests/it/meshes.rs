//! Everything at once: a table of meshes of 2 to 16 ranks over all axes there are, with ZeRO, sequence
//! parallelism, all modes of context parallelism, schedules and recomputation, each trained for three
//! steps and compared with transformers. `SWEEP=200 SEED=7 cargo test --workspace --test it --
//! meshes::sweep` draws more.

use crate::fixture::*;
use shardc_ir::rng::Stream;
use shardc_passes::autodiff::recompute::Recompute::{self, Full, None, Selective, Sqrt};
use shardc_passes::options::CpMode::{self, AllGather, Ring, Ulysses};
use shardc_passes::options::TpMode::{self, OneD, ThreeD, TwoAndHalfD, TwoD};
use shardc_passes::options::TpSteps::{Gathered, Summa};
use shardc_passes::options::{Options, Order};
use shardc_passes::schedule::{Named, legal};
use shardc_testing::{samples, taken};

/// Fixture; sizes of pp, dp_replicate, dp_shard, cp, tp; ZeRO stage; `--sp`; cp mode; schedule;
/// recomputation; rows per rank and microbatch.
type Row = (&'static str, [usize; 5], u8, bool, CpMode, &'static str, Recompute, usize);

#[rustfmt::skip]
const TABLE: &[Row] = &[
    ("gpt2", [1, 1, 1, 2, 1], 0, false, AllGather, "1f1b", None, 8),
    ("llama_bias_tied", [1, 1, 2, 1, 1], 3, false, AllGather, "1f1b", Full, 2),
    ("llama_bias_tied", [2, 1, 1, 1, 1], 0, false, AllGather, "v-min", Selective, 8),
    ("llama_deep", [1, 1, 2, 1, 1], 3, false, AllGather, "1f1b", Selective, 2),
    ("llama_gqa", [1, 1, 1, 1, 2], 0, false, AllGather, "1f1b", None, 8),
    ("llama_gqa", [1, 2, 1, 1, 1], 0, false, AllGather, "1f1b", Selective, 4),
    ("llama_gqa", [2, 1, 1, 1, 1], 0, false, AllGather, "zb-h1", None, 8),
    ("llama_mha", [1, 1, 1, 1, 2], 0, true, AllGather, "1f1b", Selective, 2),
    ("llama_yarn", [1, 1, 1, 2, 1], 0, false, Ulysses, "1f1b", Selective, 1),
    ("llama_yarn", [1, 1, 2, 1, 1], 3, false, AllGather, "1f1b", Full, 4),
    ("qwen3", [1, 1, 2, 1, 1], 1, false, AllGather, "1f1b", Sqrt, 4),
    ("qwen3", [1, 2, 1, 1, 1], 0, false, AllGather, "1f1b", Selective, 1),
    ("qwen3", [2, 1, 1, 1, 1], 0, false, AllGather, "dualpipe-v", Sqrt, 1),
    ("gpt2", [1, 2, 2, 1, 1], 0, false, AllGather, "1f1b", None, 1),
    ("gpt2", [2, 2, 1, 1, 1], 0, false, AllGather, "1f1b", Sqrt, 4),
    ("llama_bias_tied", [1, 1, 1, 1, 4], 0, true, AllGather, "1f1b", Selective, 8),
    ("llama_bias_tied", [1, 1, 1, 2, 2], 0, true, AllGather, "1f1b", Full, 8),
    ("llama_bias_tied", [2, 2, 1, 1, 1], 0, false, AllGather, "interleaved", Full, 2),
    ("llama_deep", [1, 2, 1, 1, 2], 0, true, AllGather, "1f1b", Sqrt, 4),
    ("llama_gqa", [1, 2, 1, 2, 1], 0, false, AllGather, "1f1b", Selective, 2),
    ("llama_mha", [1, 1, 1, 1, 4], 0, true, AllGather, "1f1b", Full, 2),
    ("llama_mha", [2, 1, 1, 2, 1], 0, false, Ulysses, "v-half", None, 8),
    ("llama_yarn", [1, 2, 1, 1, 2], 0, true, AllGather, "1f1b", None, 4),
    ("llama_yarn", [2, 2, 1, 1, 1], 0, false, AllGather, "1f1b", Sqrt, 1),
    ("qwen3", [1, 1, 1, 2, 2], 0, false, Ulysses, "1f1b", Selective, 8),
    ("qwen3", [1, 1, 2, 2, 1], 2, false, Ulysses, "1f1b", None, 4),
    ("gpt2", [1, 2, 1, 2, 2], 0, true, Ulysses, "1f1b", None, 4),
    ("llama_bias_tied", [1, 1, 4, 2, 1], 2, false, AllGather, "1f1b", None, 2),
    ("llama_bias_tied", [1, 2, 2, 1, 2], 0, true, AllGather, "1f1b", Sqrt, 2),
    ("llama_deep", [1, 1, 2, 2, 2], 3, false, AllGather, "1f1b", None, 4),
    ("llama_deep", [1, 2, 2, 1, 2], 3, true, AllGather, "1f1b", None, 1),
    ("llama_gqa", [1, 2, 1, 2, 2], 0, false, AllGather, "1f1b", None, 2),
    ("llama_gqa", [1, 2, 2, 1, 2], 1, true, AllGather, "1f1b", None, 2),
    ("llama_gqa", [2, 4, 1, 1, 1], 0, false, AllGather, "zb-h2", Sqrt, 1),
    ("llama_mha", [1, 1, 1, 2, 4], 0, false, AllGather, "1f1b", Sqrt, 1),
    ("llama_yarn", [1, 1, 2, 4, 1], 0, false, AllGather, "1f1b", Full, 4),
    ("llama_yarn", [1, 1, 4, 1, 2], 2, false, AllGather, "1f1b", None, 2),
    ("llama_yarn", [1, 2, 1, 1, 4], 0, false, AllGather, "1f1b", None, 2),
    ("llama_yarn", [1, 2, 1, 2, 2], 0, true, Ulysses, "1f1b", Selective, 1),
    ("llama_yarn", [2, 1, 2, 1, 2], 2, false, AllGather, "looped-bfs", Sqrt, 4),
    ("llama_yarn", [2, 4, 1, 1, 1], 0, false, AllGather, "zb-h2", Sqrt, 2),
    ("qwen2", [1, 2, 2, 2, 1], 3, false, Ulysses, "1f1b", None, 1),
    ("qwen2", [2, 1, 1, 4, 1], 0, false, Ulysses, "zb-v", None, 4),
    ("qwen2", [2, 2, 1, 2, 1], 0, false, Ulysses, "v-half", None, 1),
    ("gpt2", [1, 1, 2, 2, 4], 1, false, AllGather, "1f1b", Full, 4),
    ("gpt2", [2, 1, 2, 1, 4], 1, true, AllGather, "gpipe", None, 1),
    ("gpt2", [2, 4, 1, 2, 1], 0, false, AllGather, "looped-bfs", None, 1),
    ("llama_bias_tied", [1, 2, 4, 2, 1], 0, false, Ulysses, "1f1b", Selective, 1),
    ("llama_bias_tied", [2, 1, 2, 1, 4], 3, true, AllGather, "v-half", Sqrt, 4),
    ("llama_bias_tied", [2, 1, 2, 4, 1], 3, false, AllGather, "zb-v", None, 4),
    ("llama_deep", [1, 1, 4, 2, 2], 2, false, Ulysses, "1f1b", None, 2),
    ("llama_deep", [1, 2, 1, 4, 2], 0, false, AllGather, "1f1b", Full, 4),
    ("llama_deep", [1, 2, 2, 2, 2], 3, true, Ulysses, "1f1b", None, 2),
    ("llama_deep", [2, 2, 1, 4, 1], 0, false, AllGather, "v-half", Sqrt, 4),
    ("llama_gqa", [1, 1, 2, 2, 4], 1, false, AllGather, "1f1b", None, 2),
    ("llama_yarn", [1, 1, 2, 2, 4], 0, true, AllGather, "1f1b", Sqrt, 4),
    ("llama_yarn", [1, 2, 2, 2, 2], 0, false, Ulysses, "1f1b", None, 1),
    ("llama_yarn", [4, 2, 1, 1, 2], 0, false, AllGather, "gpipe", Sqrt, 1),
    ("llama_yarn", [4, 2, 2, 1, 1], 2, false, AllGather, "1f1b", Sqrt, 1),
    ("mistral_window", [1, 4, 1, 4, 1], 0, false, Ulysses, "1f1b", None, 1),
    ("mistral_window", [2, 1, 1, 4, 2], 0, true, AllGather, "zb-h1", None, 1),
    ("qwen2", [2, 1, 1, 4, 2], 0, false, AllGather, "1f1b", Sqrt, 4),
    ("qwen3", [2, 1, 2, 4, 1], 2, false, AllGather, "zb-h2", None, 2),
    ("qwen3", [2, 2, 1, 2, 2], 0, false, AllGather, "gpipe", Full, 2),
    ("gpt2", [1, 1, 1, 2, 1], 0, false, Ring, "1f1b", None, 4),
    ("llama_mha", [1, 1, 1, 4, 1], 0, false, Ring, "1f1b", Full, 2),
    ("llama_yarn", [1, 1, 1, 2, 2], 0, true, Ring, "1f1b", Selective, 4),
    ("mistral_window", [1, 1, 1, 4, 2], 0, false, Ring, "1f1b", None, 2),
    ("llama_gqa", [1, 1, 1, 2, 4], 0, true, Ring, "1f1b", Sqrt, 1),
    ("qwen3", [1, 1, 2, 4, 1], 1, false, Ring, "1f1b", None, 4),
    ("qwen2", [1, 1, 2, 2, 2], 2, true, Ring, "1f1b", Selective, 2),
    ("llama_gqa", [1, 1, 4, 2, 1], 3, false, Ring, "1f1b", None, 2),
    ("llama_bias_tied", [1, 2, 2, 4, 1], 3, false, Ring, "1f1b", Full, 1),
    ("qwen3", [2, 1, 1, 4, 1], 0, false, Ring, "zb-h1", None, 2),
    ("llama_deep", [2, 1, 1, 2, 2], 0, true, Ring, "zb-v", Sqrt, 2),
    ("gpt2", [2, 1, 2, 2, 2], 3, true, Ring, "interleaved", None, 2),
    ("llama_deep", [4, 1, 1, 4, 1], 0, false, Ring, "dualpipe-v", None, 1),
    ("mistral_window", [2, 2, 1, 2, 1], 0, false, Ring, "v-half", Selective, 1),
    ("gemma2", [1, 1, 2, 2, 2], 3, true, Ring, "1f1b", Selective, 2),
    ("gemma2", [2, 1, 1, 2, 2], 0, true, Ulysses, "zb-h1", Full, 2),
    ("gemma2", [2, 2, 1, 1, 4], 0, false, AllGather, "gpipe", None, 2),
];

const DEEP2: TpMode = TwoAndHalfD { depth: 2 };

/// Tensor parallelism on grids of ranks: 4 for 2d, 8 for 2.5d and 3d.
#[rustfmt::skip]
const GRIDS: &[(TpMode, Row)] = &[
    (TwoD, ("llama_mha", [1, 1, 1, 1, 4], 0, false, AllGather, "1f1b", None, 8)),
    (TwoD, ("llama_gqa", [1, 1, 1, 1, 4], 0, false, AllGather, "1f1b", None, 2)),
    (TwoD, ("gpt2", [1, 1, 1, 1, 4], 0, false, AllGather, "1f1b", Selective, 4)),
    (TwoD, ("qwen3", [1, 1, 1, 1, 4], 0, false, AllGather, "1f1b", None, 8)),
    (TwoD, ("llama_bias_tied", [1, 1, 1, 1, 4], 0, false, AllGather, "1f1b", Full, 4)),
    (TwoD, ("mistral_window", [1, 2, 1, 1, 4], 0, false, AllGather, "1f1b", None, 2)),
    (TwoD, ("llama_gqa", [1, 1, 2, 1, 4], 1, false, AllGather, "1f1b", None, 2)),
    (TwoD, ("gpt2", [1, 1, 2, 1, 4], 2, false, AllGather, "1f1b", None, 2)),
    (TwoD, ("qwen3", [1, 1, 2, 1, 4], 3, false, AllGather, "1f1b", Sqrt, 4)),
    (TwoD, ("llama_yarn", [1, 1, 1, 2, 4], 0, false, AllGather, "1f1b", None, 2)),
    (TwoD, ("qwen2", [1, 1, 1, 2, 4], 0, false, Ulysses, "1f1b", None, 4)),
    (TwoD, ("llama_deep", [2, 1, 1, 1, 4], 0, false, AllGather, "zb-h1", None, 2)),
    (TwoD, ("gpt2", [2, 1, 2, 1, 4], 3, false, AllGather, "1f1b", None, 2)),
    // 2 KV heads on sides of 4.
    (TwoD, ("llama_gqa", [1, 1, 1, 1, 16], 0, false, AllGather, "1f1b", None, 4)),
    (DEEP2, ("llama_mha", [1, 1, 1, 1, 8], 0, false, AllGather, "1f1b", None, 8)),
    (DEEP2, ("gpt2", [1, 1, 1, 1, 8], 0, false, AllGather, "1f1b", Full, 4)),
    (DEEP2, ("qwen3", [1, 1, 2, 1, 8], 2, false, AllGather, "1f1b", None, 4)),
    (DEEP2, ("llama_bias_tied", [2, 1, 1, 1, 8], 0, false, AllGather, "interleaved", None, 4)),
    (TwoAndHalfD { depth: 1 }, ("llama_gqa", [1, 1, 1, 1, 4], 0, false, AllGather, "1f1b", None, 4)),
    (ThreeD, ("llama_mha", [1, 1, 1, 1, 8], 0, false, AllGather, "1f1b", None, 8)),
    (TwoD, ("gemma2", [1, 1, 1, 1, 4], 0, false, AllGather, "1f1b", None, 4)),
    (ThreeD, ("llama_gqa", [1, 1, 1, 1, 8], 0, false, AllGather, "1f1b", Selective, 4)),
    (ThreeD, ("gpt2", [1, 1, 1, 1, 8], 0, false, AllGather, "1f1b", None, 4)),
    (ThreeD, ("qwen3", [1, 2, 1, 1, 8], 0, false, AllGather, "1f1b", None, 4)),
    (ThreeD, ("llama_bias_tied", [1, 1, 2, 1, 8], 3, false, AllGather, "1f1b", None, 4)),
    (ThreeD, ("qwen2", [2, 1, 1, 1, 8], 0, false, AllGather, "gpipe", None, 4)),
];

fn train((mode, row): &(TpMode, Row)) {
    let (name, sizes, zero, sp, cp_mode, schedule, recompute, rows) = row;
    let axes = ["pp", "dp_replicate", "dp_shard", "cp", "tp"];
    let mesh: Vec<(&str, usize)> = axes.into_iter().zip(*sizes).filter(|a| a.1 > 1).collect();
    // Products of flat grids are taken whole and in steps.
    let flat = matches!(mode, TwoD | TwoAndHalfD { .. });
    for &tp_steps in if flat { &[Gathered, Summa][..] } else { &[Gathered] } {
        let o = Options {
            zero: *zero,
            cp_mode: *cp_mode,
            tp_mode: *mode,
            tp_steps,
            schedule: Order::Named((*schedule).into()),
            recompute: recompute.clone(),
            ..options(&mesh, *sp, *rows)
        };
        eprintln!("{mode} {tp_steps:?} {row:?}");
        train_and_compare(name, &o);
    }
}

#[test]
fn every_mesh_of_the_table() {
    assert!(TABLE.len() >= 60);
    let some = TABLE.iter().enumerate().filter(|(i, _)| taken(*i, 3));
    some.for_each(|(_, row)| train(&(OneD, row.clone())));
}

#[test]
fn every_grid_of_the_table() {
    assert!(GRIDS.len() >= 24);
    let some = GRIDS.iter().enumerate().filter(|(i, _)| taken(*i, 3));
    some.for_each(|(_, row)| train(row));
}

/// A row of the same kind, drawn; none if what was drawn is not legal.
fn draw(s: &Stream, i: u64) -> Option<(TpMode, Row)> {
    let pick = |k: u64, n: usize| (s.uniform(i * 16 + k) * n as f64) as usize % n;
    let name = ALL[pick(0, ALL.len())];
    let mut sizes: [usize; 5] = std::array::from_fn(|k| [1, 1, 2, 2, 4][pick(1 + k as u64, 5)]);
    // Half of them on a grid, whose side is 2.
    let mode = [OneD, OneD, OneD, TwoD, DEEP2, ThreeD][pick(12, 6)];
    let grid = mode != OneD;
    if grid {
        sizes[4] = if mode == TwoD { 4 } else { 8 };
    }
    let [pp, replicas, shards, cp, tp] = sizes;
    let (ranks, dp): (usize, usize) = (sizes.iter().product(), replicas * shards);
    if !(2..=16).contains(&ranks) || dp > ROWS || SEQ % (cp * tp) != 0 {
        return Option::None;
    }
    let m = 1 << pick(6, (ROWS / dp).trailing_zeros() as usize + 1);
    let (rows, cut) = (ROWS / dp / m, if grid { mode.rows(2) } else { 1 });
    let named = if pp > 1 { Named::ALL[pick(7, Named::ALL.len())] } else { Named::OneFOneB };
    let parts = if name == "llama_deep" { 12 } else { 6 };
    let chunks = named.default_chunks();
    if legal(named, pp, chunks, m).is_err() || pp * chunks > parts || rows % cut != 0 {
        return Option::None;
    }
    let zero = if shards > 1 { pick(8, 4) as u8 } else { 0 };
    let ways = if grid { 2 } else { tp };
    let heads = 4 % (ways * cp) == 0;
    let cp_mode = match pick(9, 3) {
        1 if cp > 1 => Ring,
        2 if cp > 1 && heads => Ulysses,
        _gathered => AllGather,
    };
    let recompute = [None, Selective, Full, Sqrt][pick(10, 4)].clone();
    let sp = tp > 1 && !grid && pick(11, 2) == 1;
    Some((mode, (name, sizes, zero, sp, cp_mode, named.name(), recompute, rows)))
}

#[test]
fn sweep() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let s = Stream::new(number("SEED").unwrap_or(1), "meshes", 0);
    let mut left = number("SWEEP").unwrap_or(samples(8, 200));
    for i in 0.. {
        if left == 0 {
            break;
        }
        if let Some(row) = draw(&s, i) {
            train(&row);
            left -= 1;
        }
    }
}
