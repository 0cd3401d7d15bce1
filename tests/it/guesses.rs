//! What `shardc plan` guesses of memory before it compiles, beside what plans need.

use serde_json::Value as Json;
use shardc::machine::sizes;
use shardc::planner::memory::{Form, Trains, kept, order};
use shardc::planner::space::Candidate;
use shardc::planner::what_if::Ifs;
use shardc_cost::beside;
use shardc_cost::device::{Device, Precision};
use shardc_cost::layer::Question;
use shardc_cost::layout::{Context, Job, Kernels, Layout, Overlap, Recompute, Schedule, Stack};
use shardc_cost::step::{Closed, Pieces};
use shardc_ir::types::DType;
use shardc_passes::options::{Buffers, Options};
use shardc_passes::schedule::{Named, make};
use shardc_testing::{samples, taken};
use std::path::Path;

const LLAMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");

/// Schedules whose backward is cut keep operands of products and gradients of their results until weights get theirs;
/// stages have as many layers as they are cut into.
#[test]
fn guesses_of_memory_are_near_what_plans_need() {
    let config: Json =
        serde_json::from_str(&std::fs::read_to_string(LLAMA).expect("the config")).expect("JSON");
    let facts = shardc::facts(Path::new(LLAMA)).expect("the config").expect("a family");
    let sizes = &sizes(&facts, &config);
    let job = &Job {
        seq: 4096,
        precision: Precision::Bf16,
        attention: Kernels::Flash(2),
        overlap: Overlap::default(),
        compiled: true,
    };
    let base = Options { dtype: DType::BF16, seq: job.seq, global_batch: 32, ..Options::default() };
    let device = &Device::named("h100-sxm").expect("known");
    let schedules = [
        (Named::OneFOneB, Schedule::OneFOneB, 1),
        (Named::Interleaved, Schedule::Interleaved, 2),
        (Named::ZbH1, Schedule::ZbH1, 1),
        (Named::ZbH2, Schedule::ZbH2, 1),
        (Named::ZbV, Schedule::ZbV, 2),
        (Named::DualPipeV, Schedule::DualPipe, 2),
    ];
    for (i, (named, schedule, chunks)) in schedules.into_iter().enumerate() {
        let ways = [Recompute::None, Recompute::Full].into_iter().enumerate();
        for (_, recompute) in ways.filter(|(k, _)| taken(i + k, 2)) {
            let layout = Layout {
                tp: 2,
                cp: 1,
                context: Context::Gathered,
                even: false,
                dp: 2,
                pp: 4,
                chunks,
                ep: 1,
                etp: 2,
                shards: 2,
                zero: 1,
                sp: true,
                recompute,
                schedule,
                microbatch: 1,
                microbatches: 16,
            };
            let c = Candidate { layout, named };
            let plan = shardc::compile(Path::new(LLAMA), &c.options(&base), &mut |_, _| {});
            let plan = plan.expect("it compiles").stored.plan;
            // What is taken for the communicators of a layout leaves out none that fits.
            assert!(beside::guess(c.communicators()) <= beside::bytes(&plan), "{}", c.words());
            let peak = plan.peak_bytes() as f64;
            let stack = Stack::named("shardc");
            let question = Question { sizes, layout: &c.layout, job, stack, device };
            let pieces = Pieces::of(&question).expect("it has bf16");
            let loads = Closed { question, balanced: true }.loads(&pieces);
            let none = Ifs::default();
            let form = Form::new(sizes, job, &none, (Buffers::Worst, 4.0, Trains::ALL));
            let (named, p, v, m) = order(&c);
            let kept = kept(&make(named, p, v, m).expect("it is legal"));
            let (least, likely) = (form.least(&c), form.likely(&c, &loads, &kept));
            let ratio = likely / peak;
            println!("{:<42} {:.2} GiB {ratio:.2}", c.words(), peak / f64::from(1 << 30));
            assert!((0.8..1.3).contains(&ratio), "{}: {ratio}", c.words());
            assert!(least <= peak, "{}: {least} {peak}", c.words());
        }
    }
}

/// No plan needs less than what passes a layout over: ZeRO shards over dp and cp, experts over what is beside ep.
#[test]
fn no_plan_needs_less_than_the_least() {
    let qwen = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen3_moe/config.json");
    let none = Ifs::default();
    let mut tried = 0;
    for (config, seq, ways) in
        [(LLAMA, 4096, vec![(1, 1)]), (qwen, 16, vec![(1, 1), (2, 1), (4, 1)])]
    {
        let text = std::fs::read_to_string(config).expect("a config");
        let json: Json = serde_json::from_str(&text).expect("JSON");
        let facts = shardc::facts(Path::new(config)).expect("the config").expect("a family");
        let sizes = &sizes(&facts, &json);
        let job = &Job {
            seq,
            precision: Precision::Bf16,
            attention: Kernels::Flash(2),
            overlap: Overlap::default(),
            compiled: true,
        };
        let form = Form::new(sizes, job, &none, (Buffers::Worst, 4.0, Trains::ALL));
        for (i, (cp, dp)) in [(1, 4), (2, 1), (2, 2), (4, 1), (4, 2)].into_iter().enumerate() {
            for (zero, (ep, etp)) in (0..4).flat_map(|z| ways.iter().map(move |w| (z, *w))) {
                if cp * dp % (ep * etp) != 0 || !taken(i + usize::from(zero) + ep / 2, 2) {
                    continue;
                }
                let layout = Layout {
                    tp: 1,
                    cp,
                    context: Context::Gathered,
                    even: false,
                    dp,
                    pp: 1,
                    chunks: 1,
                    ep,
                    etp,
                    shards: dp,
                    zero,
                    sp: false,
                    recompute: Recompute::Full,
                    schedule: Schedule::OneFOneB,
                    microbatch: 1,
                    microbatches: 2,
                };
                let c = Candidate { layout, named: Named::OneFOneB };
                let base =
                    Options { dtype: DType::BF16, seq, global_batch: 2 * dp, ..Options::default() };
                let made = shardc::compile(Path::new(config), &c.options(&base), &mut |_, _| {});
                let peak =
                    made.unwrap_or_else(|e| panic!("{}: {e}", c.words())).stored.plan.peak_bytes();
                let least = form.least(&c);
                println!("{:<36} {peak} {:.2}", c.words(), least / peak as f64);
                assert!(least <= peak as f64, "{}: {least} {peak}", c.words());
                tried += 1;
            }
        }
    }
    assert!(tried > samples(25, 50), "{tried}");
}
