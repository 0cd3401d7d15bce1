//! Kernels of a plan on a CUDA device: time of each distinct one, the bytes that it must move (each
//! tensor once) or what it multiplies, by time. `benches/peers/gpu.py` prints it beside what the
//! device does at best.
//!
//! `cargo bench --bench device -- PLAN` prints a line of JSON for each; exchanges and kernels of
//! experts are left out. `cublaslt` behind the plan: products by NVIDIA's library. A machine behind it,
//! a name or FILE.toml: also what it says that each kernel takes.

use serde_json::json;
use shardc::measure::OnDevice;
use shardc::{machine, plan_dir};
use shardc_cost::plan::launch::Pricer;
use shardc_ir::diag::Result;
use shardc_ir::kernel::{Gemm, Heads, Kernel};
use shardc_runtime::cuda::Device;
use std::path::Path;

/// Multiplications and additions of a product.
fn product(k: &Gemm) -> f64 {
    let loops: usize = k.batch.iter().chain(&k.sum).product();
    2.0 * (loops * k.m * k.n) as f64 * k.k as f64
}

/// Those of attention: half of the pairs are seen.
fn attention(h: &Heads, products: f64) -> f64 {
    let pairs = (h.batch * h.groups * h.repeat * h.queries) as f64 * h.keys as f64 / 2.0;
    products * pairs * (h.width + h.value_width) as f64
}

fn flops(k: &Kernel) -> f64 {
    match k {
        Kernel::Gemm(k) => product(k),
        Kernel::GemmThen(k) => product(&k.product),
        Kernel::Attention(k) => attention(&k.heads, 2.0),
        // Scores again, and four products more.
        Kernel::AttentionGrad(k) => attention(&k.heads, 5.0),
        _moves => 0.0,
    }
}

fn run(dir: &Path, library: bool, by: Option<&str>) -> Result<()> {
    let plan = plan_dir::read(dir)?.plan;
    let (device, own) = (Device::open(0)?, plan_dir::device_code(dir)?);
    let by = by.map(machine::device).transpose()?;
    let mut all = OnDevice::open(&plan, &device, Some(&own), library)?;
    for i in 0..all.kernels.len() {
        let us = 1e6 * all.seconds(i, library)?;
        let k = &all.kernels[i];
        let priced = by.as_ref().map(|d| {
            let work = k.work(&plan, d);
            Pricer::new(&plan.module.mesh, d, plan.settings.tokens).seconds(&work)
        });
        let priced = priced.transpose()?.map(|s| 1e6 * s);
        let line = json!({ "kernel": k.launches[0].entry, "ops": k.ops, "times": k.times, "us": us,
            "bytes": k.bytes, "flops": flops(&k.kernel), "priced_us": priced });
        println!("{line}");
    }
    Ok(())
}

fn main() {
    let mut words = std::env::args().skip(1).filter(|a| !a.starts_with('-'));
    let Some(plan) = words.next() else {
        println!("skipped: name a plan, as in cargo bench --bench device -- my.plan");
        return;
    };
    let more: Vec<String> = words.collect();
    let library = more.iter().any(|w| w == "cublaslt");
    let by = more.iter().find(|w| *w != "cublaslt").map(String::as_str);
    if let Err(d) = run(Path::new(&plan), library, by) {
        eprintln!("{d}");
        std::process::exit(d.exit as i32);
    }
}
