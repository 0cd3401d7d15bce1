//! What `shardc plan` guesses of memory before it compiles, beside what plans need.

use serde_json::{Value as Json, json};
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

/// One rank, one microbatch.
const ONE: Layout = Layout {
    tp: 1,
    cp: 1,
    context: Context::Gathered,
    even: false,
    dp: 1,
    pp: 1,
    chunks: 1,
    ep: 1,
    etp: 1,
    shards: 1,
    zero: 0,
    sp: false,
    recompute: Recompute::None,
    schedule: Schedule::OneFOneB,
    microbatch: 1,
    microbatches: 1,
};

fn job(seq: usize) -> Job {
    Job {
        seq,
        seen: 0.5,
        precision: Precision::Bf16,
        attention: Kernels::Flash(2),
        overlap: Overlap::default(),
        compiled: true,
    }
}

/// Schedules whose backward is cut keep operands of products and gradients of their results until weights get theirs;
/// stages have as many layers as they are cut into.
#[test]
fn guesses_of_memory_are_near_what_plans_need() {
    let config: Json =
        serde_json::from_str(&std::fs::read_to_string(LLAMA).expect("the config")).expect("JSON");
    let facts = shardc::facts(Path::new(LLAMA)).expect("the config").expect("a family");
    let sizes = &sizes(&facts, &config);
    let job = &job(4096);
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
            let of_tp = Layout { tp: 2, etp: 2, sp: true, dp: 2, shards: 2, zero: 1, ..ONE };
            let layout = Layout { pp: 4, chunks, recompute, schedule, microbatches: 16, ..of_tp };
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

/// Of layers that walk a state products and what they make are known, beside those of attention: of Granite 4 tiny and
/// of Qwen3-Next (their config.json, of fewer layers and experts) parameters are counted to 1 %, and memory is guessed.
#[test]
fn guesses_know_recurrences() {
    let lab = crate::lab::Lab::new("guessed-recurrences");
    let granite = json!({
        "model_type": "granitemoehybrid", "hidden_size": 1536, "num_hidden_layers": 10,
        "layer_types": (0..10).map(|i| if i == 5 { "attention" } else { "mamba" }).collect::<Vec<_>>(),
        "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 100352,
        "intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 16,
        "num_experts_per_tok": 6, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "max_position_embeddings": 131072,
        "tie_word_embeddings": false,
    });
    let qwen = json!({
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
        "intermediate_size": 5120, "moe_intermediate_size": 512, "num_experts": 32,
        "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144, "partial_rotary_factor": 0.25,
        "decoder_sparse_step": 1, "tie_word_embeddings": false,
    });
    let none = Ifs::default();
    for (name, config) in [("granite", granite), ("qwen", qwen)] {
        lab.write(&format!("{name}/config.json"), config.to_string());
        let path = &lab.path(name);
        let facts = shardc::facts(path).expect("the config").expect("a family");
        let sizes = &sizes(&facts, &config);
        let job = &job(4096);
        let base = Options { dtype: DType::BF16, seq: 4096, global_batch: 4, ..Options::default() };
        let layout = Layout { dp: 2, shards: 2, ep: 2, zero: 1, microbatches: 2, ..ONE };
        let c = Candidate { layout, named: Named::OneFOneB };
        let mut options = c.options(&base);
        options.moe = Buffers::Bound(2.0);
        let plan = shardc::compile(path, &options, &mut |_, _| {});
        let plan = plan.unwrap_or_else(|d| panic!("{name}: {d}")).stored.plan;
        let (mut all, x) = (2.0 * sizes.embedding_params(), sizes.expert_layers() as f64);
        all += x * (sizes.layer_params(false) + sizes.expert_params());
        let own: usize = plan.weights.iter().map(|w| w.shape.iter().product::<usize>()).sum();
        let ratio = all / own as f64;
        println!("{name}: {own} parameters, {ratio:.4}");
        assert!((0.99..1.01).contains(&ratio), "{name}: {ratio}");
        let stack = Stack::named("shardc");
        let device = &Device::named("h100-sxm").expect("known");
        let question = Question { sizes, layout: &c.layout, job, stack, device };
        let pieces = Pieces::of(&question).expect("it has bf16");
        let loads = Closed { question, balanced: true }.loads(&pieces);
        let form = Form::new(sizes, job, &none, (Buffers::Bound(2.0), 4.0, Trains::ALL));
        let (named, p, v, m) = order(&c);
        let kept = kept(&make(named, p, v, m).expect("it is legal"));
        let (least, likely) = (form.least(&c), form.likely(&c, &loads, &kept));
        let peak = plan.peak_bytes() as f64;
        println!("{name}: {:.2} GiB {:.2}", peak / f64::from(1 << 30), likely / peak);
        assert!((0.8..1.3).contains(&(likely / peak)), "{name}: {}", likely / peak);
        assert!(least <= peak, "{name}: {least} {peak}");
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
        let job = &job(seq);
        let form = Form::new(sizes, job, &none, (Buffers::Worst, 4.0, Trains::ALL));
        for (i, (cp, dp)) in [(1, 4), (2, 1), (2, 2), (4, 1), (4, 2)].into_iter().enumerate() {
            for (zero, (ep, etp)) in (0..4).flat_map(|z| ways.iter().map(move |w| (z, *w))) {
                if cp * dp % (ep * etp) != 0 || !taken(i + usize::from(zero) + ep / 2, 2) {
                    continue;
                }
                let of_dp = Layout { cp, dp, shards: dp, zero, microbatches: 2, ..ONE };
                let layout = Layout { ep, etp, recompute: Recompute::Full, ..of_dp };
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
