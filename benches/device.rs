//! Kernels of a plan on a CUDA device: time of each distinct one, the bytes that it must move (each
//! tensor once) or what it multiplies, by time. `benches/peers/gpu.py` prints it beside what the
//! device does at best.
//!
//! `cargo bench --bench device -- PLAN` prints a line of JSON for each; exchanges and kernels of
//! experts are left out. `cublaslt` behind the plan: products by NVIDIA's library.

use serde_json::json;
use shardc::plan_dir;
use shardc_codegen::cuda::limits::Limits;
use shardc_codegen::{cuda, kept};
use shardc_ir::diag::Result;
use shardc_ir::func::Func;
use shardc_ir::group;
use shardc_ir::kernel::{Gemm, Heads, Kernel};
use shardc_ir::launch::{Launch, Word};
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::Plan;
use shardc_runtime::cuda::{Arena, Device, Executor, Modules, Products, Stream};
use shardc_runtime::threads::Threads;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

/// Times that each kernel runs, and times before that which do not count.
const TURNS: usize = 20;
const WARMUP: usize = 3;
/// Operands begin at multiples of this.
const ALIGN: usize = 256;

/// A kernel of the plan that is like no other before it.
struct Work {
    kernel: Kernel,
    launches: Vec<Launch>,
    ops: String,
    /// Launches in a step.
    times: usize,
    /// Bytes of operands, results and workspace.
    sizes: Vec<usize>,
    /// Bytes of operands and results.
    bytes: usize,
}

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

fn heads(k: &Kernel) -> Option<&Heads> {
    match k {
        Kernel::Attention(k) => Some(&k.heads),
        Kernel::AttentionGrad(k) => Some(&k.heads),
        _without => None,
    }
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

/// What a kernel touches of each operand, in bytes.
fn sizes(plan: &Plan, f: &Func, x: &group::Launch, k: &Kernel) -> Vec<usize> {
    let values = x.ins.iter().chain(&x.outs);
    let mut sizes: Vec<usize> = values.map(|&v| f.ty(v).local_bytes(&plan.module.mesh)).collect();
    let known = sizes.len();
    sizes.push(0);
    k.reach(&mut |operand, end| {
        if operand >= known {
            sizes[known] = sizes[known].max(end * 4);
        }
    });
    sizes
}

/// All distinct kernels of the first rank.
fn work(plan: &Plan, arch: &str) -> Result<Vec<Work>> {
    let program = shardc_codegen::program(plan, 0)?;
    let launches = cuda::program(&program, &Limits::of(arch));
    let class = &plan.classes[plan.class_of(0)];
    let mut found: BTreeMap<String, Work> = BTreeMap::new();
    for (i, f) in plan.module.funcs.iter().enumerate().filter(|x| !program[x.0].is_empty()) {
        let times = shardc_ir::plan::calls(&class.step).filter(|c| c.func == i).count();
        for (j, x) in group::launches(f).iter().enumerate() {
            let (kernel, own) = (&program[i][j], &launches[i][j]);
            let left_out = matches!(
                kernel,
                Kernel::Collective(_)
                    | Kernel::TopK(_)
                    | Kernel::Route(_)
                    | Kernel::Dispatch(_)
                    | Kernel::Combine(_)
                    | Kernel::RowDots(_)
                    | Kernel::Grouped(_)
            );
            if own.is_empty() || left_out {
                continue;
            }
            let words = |l: &Launch| {
                let number = |w: &&Word| !matches!(w, Word::Address { .. });
                let numbers: Vec<&Word> = l.words.iter().filter(number).collect();
                format!("{} {:?} {} {numbers:?}", l.entry, l.grid, l.source.file)
            };
            let key = own.iter().map(words).collect::<String>();
            let nodes = &f.nodes[x.nodes.clone()];
            let entry = found.entry(key).or_insert_with(|| {
                let sizes = sizes(plan, f, x, kernel);
                let each: BTreeSet<_> = x.ins.iter().chain(&x.outs).collect();
                let bytes = each.iter().map(|&&v| f.ty(v).local_bytes(&plan.module.mesh)).sum();
                let ops: Vec<&str> = nodes.iter().map(|n| n.op.mnemonic()).collect();
                let sized = match kernel {
                    Kernel::Gemm(k) => format!(" {}x{}x{}", k.m, k.n, k.k),
                    Kernel::GemmThen(k) => {
                        let k = &k.product;
                        format!(" {}x{}x{}", k.m, k.n, k.k)
                    }
                    _other => String::new(),
                };
                let (kernel, launches, ops) =
                    (kernel.clone(), own.clone(), ops.join(", ") + &sized);
                Work { kernel, launches, ops, times: 0, sizes, bytes }
            });
            entry.times += times;
        }
    }
    Ok(found.into_values().collect())
}

/// Fills memory with numbers between a half and one of either sign, as f32 and as bf16.
fn fill(arena: &mut Arena, bytes: usize) -> Result<()> {
    let mut state = 1u32;
    let mut word = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state & 0x807f_807f) | 0x3f00_3f00
    };
    let block: Vec<u8> = (0..4 << 20).flat_map(|_| word().to_le_bytes()).collect();
    for first in (0..bytes).step_by(block.len()) {
        arena.write(first, &block[..block.len().min(bytes - first)])?;
    }
    Ok(())
}

fn run(dir: &Path, library: bool) -> Result<()> {
    let plan = plan_dir::read(dir)?.plan;
    let device = Device::open(0)?;
    let arch = device.arch()?;
    let (own, mut code) = (plan_dir::device_code(dir)?, BTreeMap::new());
    let all = work(&plan, &own.arch(&arch))?;
    for l in all.iter().flat_map(|w| &w.launches) {
        if !code.contains_key(&l.source) {
            code.insert(l.source.clone(), kept::find(&l.source, &arch, Some(&own))?);
        }
    }
    let (modules, stream) = (Modules::new(&device, code), Stream::new(&device)?);
    let end = Threads::connect(&Mesh::default(), Duration::from_secs(60)).swap_remove(0);
    let products = library.then(|| Products::open(&stream)).transpose()?;
    let mut executor = Executor::new(&stream, &modules, Box::new(end))?.with(products);
    let room = |w: &Work| w.sizes.iter().map(|n| n.next_multiple_of(ALIGN)).sum::<usize>();
    let bytes = all.iter().map(room).max().unwrap_or(0);
    let mut arena = Arena::new(&stream, bytes, false)?;
    for w in &all {
        fill(&mut arena, room(w))?;
        let mut at = 0;
        let offsets: Vec<usize> = w
            .sizes
            .iter()
            .map(|n| {
                at += n.next_multiple_of(ALIGN);
                at - n.next_multiple_of(ALIGN)
            })
            .collect();
        if let Some(h) = heads(&w.kernel) {
            for (view, n) in [(&h.q_pos, h.queries), (&h.k_pos, h.keys)] {
                let places: Vec<u8> = (0..n as i32).flat_map(i32::to_le_bytes).collect();
                arena.write(offsets[view.operand], &places)?;
            }
        }
        let memory: Vec<*mut f32> = offsets.iter().map(|&o| arena.address(o) as *mut f32).collect();
        let mut since = Instant::now();
        for turn in 0..WARMUP + TURNS {
            if turn == WARMUP {
                executor.wait()?;
                since = Instant::now();
            }
            // SAFETY: every operand has the bytes of its type, which is what kernels reach.
            unsafe { executor.run(&w.kernel, &w.launches, &memory)? };
        }
        executor.wait()?;
        let us = since.elapsed().as_secs_f64() * 1e6 / TURNS as f64;
        let entry = &w.launches[0].entry;
        let line = json!({ "kernel": entry, "ops": w.ops, "times": w.times, "us": us,
            "bytes": w.bytes, "flops": flops(&w.kernel) });
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
    if let Err(d) = run(Path::new(&plan), words.next().as_deref() == Some("cublaslt")) {
        eprintln!("{d}");
        std::process::exit(d.exit as i32);
    }
}
