//! Plans drawn at random, as programs of torch against transformers.

use super::*;
use crate::programs::Draw;
use shardc_passes::schedule::Named;
use shardc_passes::zero::Accumulate;
use shardc_testing::samples;

/// One of these, by chance.
fn one<T: Clone>(d: &mut Draw, of: &[T]) -> T {
    of[d.below(of.len())].clone()
}

/// A layout for so many ranks.
fn drawn(d: &mut Draw, ranks: usize) -> Options {
    let mut o = options(&[], false, ROWS);
    let mut axes = ["pp", "dp_shard", "dp_replicate", "cp", "tp"].to_vec();
    d.shuffle(&mut axes);
    let sizes: &[usize] = match (ranks, d.below(3)) {
        (2, _any) => &[2],
        (_four, 0) => &[4],
        (_four, _two) => &[2, 2],
    };
    o.mesh = axes.iter().zip(sizes).map(|(a, n)| (a.to_string(), *n)).collect();
    // Outer to inner.
    let order = ["pp", "dp_replicate", "dp_shard", "cp", "tp"];
    o.mesh.sort_by_key(|(a, _)| order.iter().position(|o| o == a));
    let rows = ROWS / o.data_parallel();
    o.microbatch = one(d, &[1, 2, 4, 8]).min(rows);
    o.sp = o.axis("tp") > 1 && d.below(2) == 0;
    if o.axis("dp_shard") > 1 {
        o.zero = d.below(4) as u8;
        if o.zero > 1 {
            let all =
                [Accumulate::None, Accumulate::Gradients, Accumulate::Weights, Accumulate::Both];
            o.zero_accumulate = one(d, &all[..if o.zero == 3 { 4 } else { 2 }]);
        }
        o.reshard_after_forward = d.below(2) == 0;
    }
    if o.axis("pp") > 1 {
        let all = [
            Named::Gpipe,
            Named::OneFOneB,
            Named::Interleaved,
            Named::LoopedBfs,
            Named::ZbH1,
            Named::ZbH2,
            Named::ZbV,
            Named::DualPipeV,
        ];
        (o.microbatch, o.schedule) = (1, Order::Named(one(d, &all).name().into()));
    }
    o.cp_mode = one(d, &[CpMode::AllGather, CpMode::Ring, CpMode::Ulysses]);
    let recomputed = [
        Recompute::None,
        Recompute::Selective,
        Recompute::Full,
        Recompute::Sqrt,
        Recompute::Elementwise,
    ];
    o.recompute = one(d, &recomputed);
    o.loss_chunks = one(d, &[LossChunks::Of(1), LossChunks::Of(2)]);
    o.auto = d.below(4) == 0;
    o.clip = one(d, &[Some(0.5), o.clip]);
    o
}

/// Of so many ranks, in one launch.
fn plans(ranks: usize) {
    if !has_torch() {
        return skip(Tool::Torch, &format!("random plans as programs of torch on {ranks} ranks"));
    }
    let lab = Lab::new(&format!("torch-sweep{ranks}"));
    let mut d = Draw::new(SEED + shardc_testing::rotation() as u64, &format!("torch {ranks}"));
    let names: Vec<&str> = [ALL, EXPERTS, DENSE, SPARSE].concat();
    let (mut all, mut refused) = (vec![], 0);
    while all.len() < samples(4, 100) as usize {
        let name = one(&mut d, &names);
        let mut o = drawn(&mut d, ranks);
        let experts = EXPERTS.contains(&name) || SPARSE.contains(&name);
        if experts && o.axis("dp_shard") > 1 && d.below(2) == 0 {
            o.ep = 2;
        }
        let means = EXPERTS[..2].contains(&name) || SPARSE[..WITH_AUX].contains(&name);
        if means && o.microbatch < ROWS {
            continue;
        }
        let what = format!(
            "{name} {:?} sp={} zero={} {:?} reshard={} microbatch={} {:?} {:?} {:?} {:?} auto={} ep={}",
            o.mesh,
            o.sp,
            o.zero,
            o.zero_accumulate,
            o.reshard_after_forward,
            o.microbatch,
            o.schedule,
            o.cp_mode,
            o.recompute,
            o.loss_chunks,
            o.auto,
            o.ep
        );
        let fx = Fixture::open(name);
        let model = fx.model(&o);
        let Ok(compiled) = try_compile(&model, &o) else {
            refused += 1;
            assert!(refused < 2000, "nearly all plans are refused");
            continue;
        };
        let json = written(&lab.path(""), all.len(), &fx, &made(&compiled.plan, &what));
        all.push(Case { what, fx, model, json, runtime: None });
    }
    walk(ranks, &lab.path(""), &all);
    all.iter().for_each(Case::compare);
    println!("{} plans agree, {refused} layouts were refused", all.len());
}

const SEED: u64 = 51;

#[test]
fn random_plans_of_two_ranks() {
    plans(2);
}

#[test]
fn random_plans_of_four_ranks() {
    plans(4);
}
