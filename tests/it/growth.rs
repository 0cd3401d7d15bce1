//! What compiling and proving take grows as layers, stages and ranks: by counts of steps at two sizes.

use crate::lab::FIXTURES;
use shardc::commands::inspect::{Inspect, inspect};
use shardc::flags::Flags;
use shardc::proof::of_stored;
use shardc_ir::steps::{self, Steps};
use shardc_passes::options::Options;

/// A plan of a fixture's model with other numbers in it.
fn plan(fixture: &str, layers: usize, flags: Flags) -> shardc::Output {
    let text = std::fs::read_to_string(format!("{FIXTURES}/{fixture}/config.json"));
    let mut config: serde_json::Value =
        serde_json::from_str(&text.expect("a fixture")).expect("a config");
    config["num_hidden_layers"] = layers.into();
    let flags = flags.with("microbatch", 1).with("seq", 16);
    let o: Options = flags.options().expect("legal flags");
    shardc::compile_config(&config, &o).expect("a plan")
}

fn on(mesh: &str, batch: usize) -> Flags {
    Flags::default().with("mesh", mesh).with("global-batch", batch)
}

/// No loop takes more steps of `times` as much than its power of 1.1 as often.
fn grows(few: &Steps, many: &Steps, times: f64, loops: &[&str]) {
    for name in loops {
        let [few, many] = [few, many].map(|s| s.get(name).copied().unwrap_or(0) as f64);
        let most = few * times.powf(1.1);
        assert!(few > 0.0 && many <= most, "{name}: {few} steps, {many} of {times} times the work");
    }
}

/// Four times as many stages of as many layers each: no function is made of what others have, or looked at for each
/// parameter.
#[test]
fn compiling_takes_steps_as_stages() {
    let of = |stages: usize| {
        let mesh = format!("pp={stages}");
        steps::of(|| plan("llama_gqa", 2 * stages, on(&mesh, 4))).1
    };
    grows(&of(6), &of(24), 4.0, &["split", "scopes", "layouts", "balance"]);
}

/// Layouts by price, of ranks whose number has several primes.
#[test]
fn choosing_layouts_takes_steps_as_ranks() {
    let of = |ranks: usize| {
        let flags = on(&format!("dp={ranks},tp=2"), 768).with("shard", "auto");
        steps::of(|| plan("llama_gqa", 1, flags)).1
    };
    grows(&of(12), &of(96), 8.0, &["traffic"]);
}

/// A proof takes in each layer what the layer adds to the residual stream.
#[test]
fn proving_takes_steps_as_layers() {
    let of = |layers: usize| {
        let done = plan("llama_gqa", layers, on("dp=2", 4));
        let texts = of_stored(&done.stored).expect("texts");
        let (report, steps) = steps::of(|| shardc_prove::prove(&texts.subject()));
        assert_eq!(report.verdict(), shardc_prove::Verdict::Proved);
        steps
    };
    grows(&of(24), &of(96), 4.0, &["sums"]);
}

/// The table of all ranks names no more of a group than it shows.
#[test]
fn a_table_of_ranks_takes_steps_as_ranks() {
    let of = |ranks: usize| {
        let done = plan("llama_gqa", 1, on(&format!("dp={ranks}"), ranks));
        let all = Inspect { ranks: Some("all".into()), ..Inspect::default() };
        steps::of(|| inspect(&done.stored, &all, false).expect("a table")).1
    };
    grows(&of(64), &of(512), 8.0, &["ranks"]);
}
