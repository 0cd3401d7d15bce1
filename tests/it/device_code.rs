//! All printed kernels of plans, compiled by NVIDIA's compiler: no spills, registers within a bound.

use crate::fixture::options;
use crate::lab::Lab;
use shardc_codegen::cuda::limits::Limits;
use shardc_codegen::{cuda, nvrtc};
use shardc_ir::diag::Exit;
use shardc_ir::launch::DeviceLaunch;
use shardc_ir::types::DType;
use shardc_passes::options::Options;
use shardc_testing::{Tool, skip};
use std::collections::BTreeMap;
use std::time::Instant;

/// Registers of a thread, so that a multiprocessor has at least 512 threads.
const REGISTERS: u32 = 128;

/// What the first rank of a plan launches that was printed; one text.
fn printed(config: &str, o: &Options) -> Vec<DeviceLaunch> {
    let config = serde_json::from_str(config).expect("JSON");
    let done = shardc::compile_config(&config, o).unwrap_or_else(|e| panic!("{}", e.render()));
    let program = shardc_codegen::program(&done.stored.plan, 0).expect("kernels");
    let launches = cuda::program(&program, &Limits::of("sm_80"));
    launches.into_iter().flatten().flatten().filter(|l| l.source.file == "rows.cu").collect()
}

fn check(what: &str, config: &str, o: &Options) {
    let launches = printed(config, o);
    let entries: BTreeMap<&str, &DeviceLaunch> = launches.iter().map(|l| (&*l.entry, l)).collect();
    // Of Blackwell's two one, by the name.
    for arch in ["sm_80", "sm_90a", ["sm_100a", "sm_103a"][what.len() % 2]] {
        let since = Instant::now();
        let compiled = match nvrtc::compile(&launches[0].source, arch) {
            Ok(c) => c,
            Err(d) if d.code == "missing-library" => {
                assert_eq!(d.exit, Exit::Environment);
                let n = entries.len();
                skip(Tool::Nvrtc, &format!("{n} kernels of {what} would be compiled for {arch}"));
                return;
            }
            Err(d) => panic!("{}", d.render()),
        };
        let ms = since.elapsed().as_millis();
        let most = compiled.usage.iter().map(|u| u.registers).max().unwrap_or(0);
        println!("{what}: {} kernels for {arch} in {ms} ms, {most} registers", entries.len());
        for (entry, l) in &entries {
            let u = compiled.usage.iter().find(|u| u.entry == *entry).expect(entry);
            assert_eq!((u.spilled, u.stack), (0, 0), "{what} for {arch}: {u:?}");
            assert!(u.registers <= REGISTERS, "{what} for {arch}: {u:?}");
            assert!(u.registers * l.threads <= 65536, "{what} for {arch}: {u:?}");
        }
    }
}

/// Two layers, as wide as those of a model of 1e9 parameters.
const LLAMA: &str = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": false}"#;

#[test]
fn kernels_of_a_plan_fit() {
    for dtype in [DType::F32, DType::BF16] {
        let own = Options { dtype, seq: 2048, observe: false, ..options(&[], false, 8) };
        check(&format!("llama in {}", dtype.name()), LLAMA, &own);
    }
    let split = options(&[("tp", 2)], true, 2);
    let split = Options { dtype: DType::BF16, seq: 512, observe: false, ..split };
    check("llama on 2 ranks with --sp", LLAMA, &split);
}

/// Rows of any width: none of these is a multiple of a pack.
#[test]
fn kernels_of_odd_sizes_fit() {
    let odd = LLAMA.replace("128256", "5003").replace("8192,", "1001,").replace("2048", "192");
    for dtype in [DType::F32, DType::BF16] {
        let own = Options { dtype, seq: 17, global_batch: 3, ..options(&[], false, 3) };
        check(&format!("odd sizes in {}", dtype.name()), &odd, &own);
    }
}

/// Kernels of a plan for one of 64 ranks.
#[test]
fn kernels_of_a_large_plan_fit() {
    let file =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/configs/llama-3.1-8b.json");
    let config = std::fs::read_to_string(file).expect("a config");
    let own = options(&[("dp_shard", 8), ("tp", 8)], true, 1);
    let own = Options { dtype: DType::BF16, seq: 4096, zero: 3, observe: false, ..own };
    check("Llama-3.1-8B on 64 ranks", &config, &own);
}

/// What all kernels of a plan's first rank need is what every architecture has: with more tokens than a grid
/// has blocks along its second dim, and with the widest heads there are.
#[test]
fn launches_of_plans_are_within_the_limits() {
    let fixture = |name: &str| {
        let dir =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let text = std::fs::read_to_string(dir.join("config.json")).expect("a config");
        serde_json::from_str::<serde_json::Value>(&text).expect("JSON")
    };
    let mut gemma = fixture("gemma2");
    for (key, value) in [("head_dim", 256), ("query_pre_attn_scalar", 256)] {
        gemma[key] = value.into();
    }
    let with = |config: &str, of: &str, to: usize| {
        let mut c = if config == "gemma2" { gemma.clone() } else { fixture(config) };
        c[of] = to.into();
        c
    };
    let positions = "max_position_embeddings";
    for (config, seq, rows) in [
        (with("mixtral", positions, 70_000), 70_000, 1),
        (with("qwen3_moe", positions, 70_000), 70_000, 1),
        (with("deepseek_v3", positions, 70_000), 70_000, 1),
        (with("mixtral", positions, 16), 4, 17_500),
        (with("gemma2", positions, 512), 512, 1),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            let o = Options {
                dtype,
                seq,
                global_batch: rows,
                observe: false,
                ..options(&[], false, rows)
            };
            let done =
                shardc::compile_config(&config, &o).unwrap_or_else(|e| panic!("{}", e.render()));
            let program = shardc_codegen::program(&done.stored.plan, 0).expect("kernels");
            for arch in ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"] {
                let limits = Limits::of(arch);
                let launches = cuda::program(&program, &limits);
                for l in launches.iter().flatten().flatten() {
                    limits
                        .check(l)
                        .unwrap_or_else(|d| panic!("{} of {seq}: {d}", config["model_type"]));
                }
            }
        }
    }
}

/// Kernels that cannot be made leave the plan that was there.
#[test]
fn a_compile_that_fails_leaves_the_plan() {
    let lab = Lab::new("kernels-fail");
    let model = format!("{}/llama_gqa", crate::lab::FIXTURES);
    let compile = ["compile", &model, "--seq", "16", "-o", "p", "--mesh"];
    lab.ok(&[&compile[..], &["tp=2"]].concat());
    let read = || std::fs::read(lab.path("p/plan.json")).expect("a plan");
    let before = read();
    let mut c = std::process::Command::new(env!("CARGO_BIN_EXE_shardc"));
    let devices = ["dp=2", "--transport", "nccl", "--device", "cuda"];
    c.current_dir(&lab.0).args([&compile[..], &devices].concat());
    // A cache that cannot be made, whatever compiler is here.
    lab.write("file", "");
    let out = c.env("SHARDC_CACHE", lab.path("file/cache")).output().expect("shardc starts");
    assert_eq!(out.status.code(), Some(5), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(read() == before, "the plan was replaced");
}
