//! Compiles `examples/tiny-llama` for dp=2, tp=2, trains it on the text of this repository on four
//! local ranks, and shows that one rank gives the same losses.
//!
//! `cargo tour`

use shardc::commands::inspect::{self, Inspect};
use shardc::commands::run::{Run, Start, session};
use shardc::data::{Data, Picks};
use shardc::flags::Flags;
use shardc::proof::Prove;
use shardc_ir::diag::Result;
use shardc_ir::func::inputs;
use shardc_runtime::StepBatch;
use std::path::Path;

const STEPS: usize = 30;
/// Steps whose losses must agree.
const EARLY: usize = 10;

fn main() {
    let status = demo().unwrap_or_else(|d| {
        eprintln!("{d}");
        d.exit as i32
    });
    std::process::exit(status);
}

/// Exit status: 1 if the losses differ.
fn demo() -> Result<i32> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let dir = std::env::temp_dir().join(format!("shardc-tiny-llama-{}.plan", std::process::id()));
    let flags = |mesh: &str| {
        let sizes = Flags::default().with("global-batch", 8).with("seq", 128);
        sizes.with("mesh", mesh).with("lr", 3e-3).with("clip", 1.0)
    };
    println!(
        "$ shardc compile examples/tiny-llama --mesh dp=2,tp=2 --seq 128 --lr 3e-3 --clip 1.0"
    );
    let four = train(&root.join("examples/tiny-llama"), &flags("dp=2,tp=2"), Some(&dir), root)?;
    println!("\nthe same on one rank");
    let one = train(&root.join("examples/tiny-llama"), &flags(""), None, root)?;
    // Later losses differ more: training amplifies the rounding of sums taken in another order.
    let pairs = || four.iter().zip(&one).map(|(a, b)| ((a - b) / b).abs());
    let (early, all) = (pairs().take(EARLY).fold(0.0, f32::max), pairs().fold(0.0, f32::max));
    println!(
        "\n4 ranks and 1 rank: losses differ by at most {early:.1e} of their size in the first"
    );
    println!("{EARLY} steps, where rounding has not yet grown, and {all:.1e} in all {STEPS}");
    let same = early < 1e-4;
    println!("{}", if same { "the same losses" } else { "NOT the same losses" });
    Ok(i32::from(!same))
}

/// Compiles, shows the plan, trains; the losses.
fn train(model: &Path, flags: &Flags, dir: Option<&Path>, root: &Path) -> Result<Vec<f32>> {
    let o = flags.options()?;
    let mut out = shardc::compile(model, &o, &mut |_, _| {})?;
    if let Some(dir) = dir {
        out.prove(Prove::Auto)?;
        out.write(dir)?;
        let what = Inspect { summary: true, ..Inspect::default() };
        print!("{}", inspect::inspect(&shardc::plan_dir::read(dir)?, &what, false)?);
        let _ = std::fs::remove_dir_all(dir);
    }
    let plan = &out.stored.plan;
    let start = Start::Random { seed: o.seed };
    let mut ranks = session(plan, &start, &Run { timeout: 60, ..Run::default() })?;
    let data = Data::open(
        "--data",
        &format!("bytes:{}/**/*.rs", root.display()),
        None,
        plan.settings.vocab,
    )?;
    let table = inputs(&plan.module);
    let since = std::time::Instant::now();
    let mut losses = vec![];
    for step in 1..=STEPS {
        let columns = data.batch(&table, &Picks::random(o.seed), step as u32, o.global_batch)?;
        let batch = StepBatch { columns, observe: false };
        let loss = ranks.step(&batch, o.lr.at(step), step)?.loss.unwrap_or(f32::NAN);
        losses.push(loss);
        if step == 1 || step % 10 == 0 {
            let rate = (step * o.global_batch * o.seq) as f64 / since.elapsed().as_secs_f64();
            println!("step {step:>3}  loss {loss:.4}  {rate:.0} tokens/s");
        }
    }
    Ok(losses)
}
