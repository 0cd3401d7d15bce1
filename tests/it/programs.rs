//! Random models as text on random meshes, with layouts asked for and spread, and with layouts chosen by price:
//! each compiles to a plan that verifies and has the numbers of one device, or is refused with a diagnostic.

mod axes;
mod blocks;
mod drawn;

use crate::fixture::options;
use axes::Axes;
use clap::Parser;
use drawn::{For, ROWS, program};
use shardc::flags::Flags;
use shardc::numbers::{TOLERANCE, compare};
use shardc::proof::Prove;
use shardc_ir::diag::Diag;
use shardc_ir::hardware::Hardware;
use shardc_ir::plan::Mode;
use shardc_ir::rng::Stream;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::memory::replay::replay;
use shardc_passes::options::Options;
use shardc_testing::samples;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Numbers drawn one after the other.
pub struct Draw(Stream, u64);

impl Draw {
    pub fn new(seed: u64, name: &str) -> Draw {
        Draw(Stream::new(seed, name, 0), 0)
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        (self.0.uniform(self.1) * n as f64) as usize
    }

    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        for i in (1..all.len()).rev() {
            all.swap(i, self.below(i + 1));
        }
    }
}

/// How the mesh is used.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Cut {
    Asked,
    ByPrice,
}

/// Prices at which everything is split, nothing is, or it depends.
fn prices(draw: &mut Draw) -> Hardware {
    let [link, memory] = [0; 2].map(|_| [1e6, 1e8, 1e10, 1e12][draw.below(4)]);
    let latency = [0.0, 1e-6][draw.below(2)];
    Hardware { link, memory, latency, ..cheap() }
}

/// Nothing costs a start, and work is dear.
fn cheap() -> Hardware {
    Hardware { latency: 0.0, start: 0.0, flops: 1e9, ..Hardware::default() }
}

/// The options for a program on these axes.
fn drawn(draw: &mut Draw, axes: &Axes, cut: Cut) -> Options {
    let priced = cut == Cut::ByPrice;
    let microbatches = [1, 1, 2][draw.below(3)];
    let shards = axes.mesh.iter().any(|a| a.0 == "dp_shard");
    let recompute =
        [Recompute::None, Recompute::Elementwise, Recompute::Selective, Recompute::Full];
    Options {
        mode: if draw.below(4) == 0 { Mode::Infer } else { Mode::Train },
        mesh: axes.mesh.clone(),
        global_batch: ROWS * microbatches,
        microbatch: ROWS / axes.rows(),
        seq: [3, 4, 4, 6][draw.below(4)],
        clip: None,
        auto: priced,
        hardware: if priced { prices(draw) } else { Hardware::default() },
        zero: if shards && !priced { draw.below(4) as u8 } else { 0 },
        recompute: recompute[draw.below(recompute.len())].clone(),
        ..options(&[], false, ROWS)
    }
}

/// What came of a program.
enum Outcome {
    Equal { split: bool },
    Refused(Diag),
}

/// Compiles it, verifies and proves the plan, and compares its numbers with those of the model on one device.
fn run(file: &Path, o: &Options) -> Result<Outcome, Diag> {
    let mut done = match shardc::compile(file, o, &mut |_, _| {}) {
        Ok(done) => done,
        Err(d) => return Ok(Outcome::Refused(d)),
    };
    let plan = &done.stored.plan;
    replay(plan).unwrap_or_else(|e| panic!("replay: {e}"));
    for d in compare(&done.stored)? {
        assert!(d.error <= TOLERANCE, "{}: {:.1e}, worst {:?}", d.name, d.error, d.worst);
    }
    let types = |f: &shardc_ir::func::Func| f.values.iter().any(|v| !v.ty.sharded().is_empty());
    let split = plan.module.funcs.iter().any(types);
    done.prove(Prove::Auto)?;
    Ok(Outcome::Equal { split })
}

/// So many programs; the one of the number `SEED` alone if that is set.
fn sweep(cut: Cut, count: u64) {
    let name = format!("programs-{cut:?}");
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(&name);
    std::fs::create_dir_all(&dir).expect("a folder");
    let file = dir.join("m.ir");
    let (mut wrong, mut refused, mut split) = (vec![], vec![], 0);
    let seeds = match std::env::var("SEED").ok().and_then(|s| s.parse::<u64>().ok()) {
        Some(one) => one..one + 1,
        None => 0..count,
    };
    for seed in seeds.clone() {
        let draw = &mut Draw::new(seed, &name);
        let axes = Axes::draw(draw, if cut == Cut::ByPrice { 3 } else { 4 });
        let mut o = drawn(draw, &axes, cut);
        let asks = match cut {
            Cut::Asked => [1, 2, 4][draw.below(3)],
            Cut::ByPrice => [0, 0, 8][draw.below(3)],
        };
        let shown = o.mode == Mode::Infer || draw.below(2) == 0;
        let text = program(draw, &For { axes: &axes, seq: o.seq, asks, shown });
        if !text.contains("layers.") {
            o.recompute = Recompute::None;
        }
        std::fs::write(&file, &text).expect("a file");
        let what = || {
            let (mode, zero, r) = (o.mode, o.zero, &o.recompute);
            format!("SEED={seed} {mode:?} zero={zero} {r} {}\n{text}", o.global_batch)
        };
        match catch_unwind(AssertUnwindSafe(|| run(&file, &o))) {
            Ok(Ok(Outcome::Equal { split: cut })) => split += usize::from(cut),
            Ok(Ok(Outcome::Refused(d))) => refused.push((d, what())),
            Ok(Err(d)) => wrong.push(format!("{d}\n{}", what())),
            Err(e) => {
                let said = e.downcast_ref::<String>().cloned();
                let said = said.or_else(|| e.downcast_ref::<&str>().map(|s| s.to_string()));
                wrong.push(format!("{}\n{}", said.unwrap_or_default(), what()));
            }
        }
    }
    for (d, what) in &refused {
        println!("{d}\n{what}");
    }
    let tried = seeds.end - seeds.start;
    println!("{cut:?}: {tried} tried, {} refused, {split} split", refused.len());
    assert!(wrong.is_empty(), "{} of {tried} are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn layouts_that_are_asked_for() {
    sweep(Cut::Asked, samples(150, 6000));
}

#[test]
fn layouts_that_are_chosen_by_price() {
    sweep(Cut::ByPrice, samples(100, 4000));
}

#[derive(Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(flatten)]
    flags: Flags,
}

/// What went wrong once: files of `kept`, whose first lines say why, the flags, and perhaps the bandwidth of links
/// and of memory (bytes/s) at which layouts are chosen.
#[test]
fn what_went_wrong_once() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/programs/kept");
    for entry in std::fs::read_dir(dir).expect("the programs") {
        let file = entry.expect("an entry").path();
        let text = std::fs::read_to_string(&file).expect("a program");
        let after = |word: &str| text.lines().find_map(|l| l.strip_prefix(word)).map(str::trim);
        let flags = after("// flags:").expect("flags").split_whitespace();
        let line = Line::try_parse_from(flags).unwrap_or_else(|e| panic!("{e}"));
        let mut o = line.flags.options_for(&file).unwrap_or_else(|e| panic!("{e}"));
        if let Some(prices) = after("// prices:") {
            let all: Vec<f64> = prices.split(' ').map(|x| x.parse().expect("a number")).collect();
            o.hardware = Hardware { link: all[0], memory: all[1], ..cheap() };
        }
        match run(&file, &o).unwrap_or_else(|e| panic!("{}: {e}", file.display())) {
            Outcome::Equal { .. } => {}
            Outcome::Refused(d) => panic!("{}: {d}", file.display()),
        }
    }
}
