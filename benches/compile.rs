//! Compile cost: `cargo bench --bench compile` takes plans from config to written plan, kernels not
//! included, and then the kernels over rows of one plan for the CPU, compiled and found again.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use shardc::flags::Flags;
use std::path::Path;
use std::time::Duration;

fn compile(model: &str, mesh: &str, batch: usize, schedule: Option<&str>, out: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/configs");
    let flags = Flags::default()
        .with("mesh", mesh)
        .with("global-batch", batch)
        .maybe("microbatch", schedule.map(|_| 1))
        .maybe("schedule", schedule)
        .with("seq", 4096);
    let o = flags.options().expect("legal flags");
    let mut done = shardc::compile(&root.join(model), &o, &mut |_, _| {}).expect("a plan");
    done.write(out).expect("a written plan");
}

fn benches(c: &mut Criterion) {
    let out = std::env::temp_dir().join(format!("shardc-bench-{}.plan", std::process::id()));
    let mut g = c.benchmark_group("compile");
    g.sample_size(20);
    let (small, large) = ("llama-3.1-8b.json", "llama-3.1-405b.json");
    for (name, model, mesh, batch, schedule) in [
        ("llama-3.1-8b tp=8,dp=8", small, "dp=8,tp=8", 8, None),
        ("llama-3.1-405b tp=4,dp=2 (8 ranks)", large, "dp=2,tp=4", 2, None),
        ("llama-3.1-405b tp=8,dp=2048 (16384 ranks)", large, "dp=2048,tp=8", 2048, None),
        (
            "llama-3.1-405b pp=16,dp=128,tp=8, interleaved, 64 microbatches",
            large,
            "pp=16,dp=128,tp=8",
            64 * 128,
            Some("interleaved"),
        ),
        (
            "deepseek-v3 (671b) pp=16,dp=128,ep=64, 2048 ranks, 64 microbatches",
            "deepseek-v3.json",
            "pp=16,dp=128,ep=64,etp=1",
            64 * 128,
            Some("1f1b"),
        ),
    ] {
        g.bench_function(name, |b| b.iter(|| compile(model, mesh, batch, schedule, &out)));
    }
    g.finish();
    let _ = std::fs::remove_dir_all(&out);
}

/// A small model of a fixture's config with other numbers in it, on a mesh: a batch of so many rows, one in a
/// microbatch of each data-parallel rank.
fn compile_small(fixture: &str, numbers: &[(&str, usize)], mesh: &str, batch: usize, out: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let text = std::fs::read_to_string(root.join(fixture).join("config.json")).expect("a fixture");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("a config");
    for (name, value) in numbers {
        config[*name] = (*value).into();
    }
    let flags = Flags::default()
        .with("mesh", mesh)
        .with("global-batch", batch)
        .with("microbatch", 1)
        .with("seq", 32);
    let o = flags.options().expect("legal flags");
    let mut done = shardc::compile_config(&config, &o).expect("a plan");
    done.write(out).expect("a written plan");
}

/// What is to take time in proportion to layers, to microbatches and to experts.
fn many(c: &mut Criterion) {
    let out = std::env::temp_dir().join(format!("shardc-bench-many-{}.plan", std::process::id()));
    let mut g = c.benchmark_group("compile many");
    g.sample_size(10);
    let layers = |n: usize| [("num_hidden_layers", n)];
    for n in [250, 500, 1000] {
        let name = format!("{n} small layers, tp=2,dp=2, 4 microbatches");
        let of = || compile_small("llama_gqa", &layers(n), "dp=2,tp=2", 8, &out);
        g.bench_function(name, |b| b.iter(of));
    }
    for m in [256, 1024] {
        let name = format!("125 small layers, pp=16, {m} microbatches");
        let of = || compile_small("llama_gqa", &layers(125), "pp=16", m, &out);
        g.bench_function(name, |b| b.iter(of));
    }
    for m in [10_000, 100_000] {
        let name = format!("4 small layers, pp=2, {m} microbatches");
        let of = || compile_small("llama_gqa", &layers(4), "pp=2", m, &out);
        g.bench_function(name, |b| b.iter(of));
    }
    let experts = [("num_experts", 1024), ("num_hidden_layers", 4)];
    let of = || compile_small("qwen3_moe", &experts, "dp=4,ep=4", 8, &out);
    g.bench_function("1024 experts, dp=4,ep=4", |b| b.iter(of));
    g.finish();
    let _ = std::fs::remove_dir_all(&out);
}

/// All kernels over rows of a rank of Llama-3.1-8B: lowered and printed, with the compiler (in an empty
/// folder each time), and found where they were kept.
fn kernels(c: &mut Criterion) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/configs");
    let dir = std::env::temp_dir().join(format!("shardc-bench-{}.cache", std::process::id()));
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("SHARDC_CACHE", &dir) };
    let flags = Flags::default()
        .with("mesh", "dp=8,tp=8")
        .with("global-batch", 64)
        .with("microbatch", 1)
        .with("seq", 4096)
        .with("sp", "");
    let o = flags.options().expect("legal flags");
    let done = shardc::compile(&root.join("llama-3.1-8b.json"), &o, &mut |_, _| {});
    let plan = done.expect("a plan").stored.plan;
    let print = || {
        let program = shardc_codegen::program(&plan, 0).expect("kernels");
        shardc_codegen::c::Functions::of(program.iter().flatten())
    };
    let functions = print();
    let object =
        || shardc_codegen::c::compile(&functions, Duration::from_secs(600)).expect("a C compiler");
    let mut g = c.benchmark_group("kernels of llama-3.1-8b tp=8,dp=8");
    g.sample_size(10);
    g.bench_function("lowered and printed", |b| b.iter(print));
    let empty = || drop(std::fs::remove_dir_all(&dir));
    g.bench_function("compiled", |b| b.iter_batched(empty, |()| object(), BatchSize::PerIteration));
    object();
    g.bench_function("found", |b| b.iter(object));
    g.finish();
    empty();
}

criterion_group!(all, benches, many, kernels);
criterion_main!(all);
