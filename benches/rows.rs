//! Fused kernels over rows: bytes that must move, each tensor once, by the time of one launch, against
//! copying on the same threads in the same run.
//!
//! `cargo bench --bench rows` takes 4096 rows of 4096 f32; medians of turns in which each is timed once.

use shardc_ir::group::launches;
use shardc_ir::kernel::{Kernel, Program};
use shardc_ir::mesh::Mesh;
use shardc_ir::text::parse;
use shardc_ir::types::DType;
use shardc_passes::group::group;
use shardc_passes::options::Options;
use shardc_runtime::exec::Executor;
use shardc_runtime::native::Native;
use shardc_runtime::threads::Threads;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Rows, and elements of one.
const N: usize = 4096;
/// Times that each kernel is timed.
const TURNS: usize = 15;

/// Each is one kernel.
const KERNELS: [(&str, &str); 10] = [
    ("rmsnorm", "(%x: M, %w: C) -> (M, R) {
       %s = dot[rc,rc->r] %x, %x : R
       %v = scale[0.000244140625] %s : R
       %e = shift[1e-5] %v : R
       %d = rsqrt %e : R
       %n = mul[rc,r->rc] %x, %d : M
       %y = mul[rc,c->rc] %n, %w : M
       return %y, %d }"),
    ("rmsnorm gradient", "(%g: M, %x: M, %w: C, %d: R) -> M {
       %h = mul[rc,c->rc] %g, %w : M
       %a = mul[rc,r->rc] %h, %d : M
       %b = dot[rc,rc->r] %h, %x : R
       %c = mul %d, %d : R
       %e = mul %c, %d : R
       %f = mul %b, %e : R
       %i = scale[-0.000244140625] %f : R
       %j = mul[r,rc->rc] %i, %x : M
       %o = add %a, %j : M
       return %o }"),
    ("softmax", "(%x: M) -> M {
       %m = reduce_max[rc->r] %x : R
       %z = sub[rc,r->rc] %x, %m : M
       %e = exp %z : M
       %s = reduce_sum[rc->r] %e : R
       %y = div[rc,r->rc] %e, %s : M
       return %y }"),
    ("softmax gradient", "(%g: M, %y: M) -> M {
       %s = dot[rc,rc->r] %g, %y : R
       %a = sub[rc,r->rc] %g, %s : M
       %o = mul %a, %y : M
       return %o }"),
    ("swiglu", "(%g: M, %u: M) -> M {
       %a = silu %g : M
       %y = mul %a, %u : M
       return %y }"),
    ("swiglu gradient", "(%d: M, %g: M, %u: M) -> (M, M) {
       %a = silu %g : M
       %u.1 = mul %d, %a : M
       %e = mul %d, %u : M
       %s = logistic %g : M
       %y = mul %g, %s : M
       %z = mul %y, %s : M
       %m = sub %y, %z : M
       %p = add %s, %m : M
       %g.1 = mul %e, %p : M
       return %u.1, %g.1 }"),
    ("cross-entropy", "(%x: M, %i: I) -> (M, R, R) {
       %m = reduce_max[rc->r] %x : R
       %z = sub[rc,r->rc] %x, %m : M
       %e = exp %z : M
       %s = reduce_sum[rc->r] %e : R
       %l = log %s : R
       %t = take[rc,r->r] %z, %i : R
       %n = sub %l, %t : R
       return %e, %s, %n }"),
    ("cross-entropy gradient", "(%e: M, %s: R, %n: R, %i: I) -> M {
       %h = scale[-1.0] %n : R
       %p = index_add[r,r->rc; c=4096] %h, %i : M
       %d = div %n, %s : R
       %x = expand[r->rc; c=4096] %d : M
       %y = mul %x, %e : M
       %o = add %p, %y : M
       return %o }"),
    ("adamw", "(%p: M, %g: M, %m: M, %v: M, %l: f32[], %t: f32[], %b: f32[]) -> (M, M, M) {
       %p.1, %m.1, %v.1 = adamw[0.9; beta2=0.999; eps=1e-8; decay=0.01] %p, %g, %m, %v, %l, %t, %b : M, M, M
       return %p.1, %m.1, %v.1 }"),
    ("bf16 sum and cast", "(%x: H, %y: H) -> M {
       %s = add %x, %y : H
       %o = cast[f32] %s : M
       return %o }"),
];

/// A kernel with its memory; results of an update lie on its operands.
struct Case {
    name: &'static str,
    kernel: Kernel,
    /// Behind the results, room for nothing.
    memory: Vec<Vec<f32>>,
    at: Vec<usize>,
    bytes: usize,
}

fn case(name: &'static str, text: &str) -> Case {
    let mut text = text.replace(" }", "\n}");
    for (short, long) in [
        ("M", "f32[4096,4096]"),
        ("R", "f32[4096]"),
        ("C", "f32[4096]"),
        ("I", "i32[4096]"),
        ("H", "bf16[4096,4096]"),
    ] {
        for (before, after) in [(" ", ","), (" ", ")"), (" ", "\n"), ("(", ","), (" ", " ")] {
            text =
                text.replace(&format!("{before}{short}{after}"), &format!("{before}{long}{after}"));
        }
    }
    let m = parse(&format!("mesh []\n\nfunc @f{text}"))
        .unwrap_or_else(|e| panic!("{name}: {}", e.render()));
    let mut f = m.funcs.into_iter().next().expect("a function");
    let mesh = Mesh::default();
    group(&mesh, &mut f, &Options::default());
    let all = launches(&f);
    let [x] = &all[..] else { panic!("{name} is {} kernels", all.len()) };
    let kernel = shardc_codegen::launch(&mesh, &f, x, &[]).unwrap_or_else(|e| panic!("{e}"));
    let values: Vec<_> = x.ins.iter().chain(&x.outs).copied().collect();
    let bytes = values.iter().map(|&v| f.ty(v).local_bytes(&mesh)).sum();
    let fill = |&v: &shardc_ir::func::Value| match f.ty(v).dtype {
        DType::I32 => (0..N as u32).map(|i| f32::from_bits(i * 7 % N as u32)).collect(),
        _ => (0..f.ty(v).local_bytes(&mesh) / 4).map(|i| (i % 1009) as f32 * 1e-3 + 0.1).collect(),
    };
    let memory = values.iter().map(fill).collect();
    let update = name == "adamw";
    let place = |i: usize| if update && i >= x.ins.len() { [0, 2, 3][i - x.ins.len()] } else { i };
    Case { name, kernel, memory, at: (0..values.len()).map(place).collect(), bytes }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Seconds in which threads copy 64 MiB: each its part.
fn copy(from: &[f32], to: &mut [f32], threads: usize) -> f64 {
    let start = Instant::now();
    std::thread::scope(|s| {
        let part = from.len().div_ceil(threads);
        for (a, b) in from.chunks(part).zip(to.chunks_mut(part)) {
            s.spawn(move || b.copy_from_slice(a));
        }
    });
    start.elapsed().as_secs_f64()
}

fn main() {
    let mut cases: Vec<Case> = KERNELS.iter().map(|(name, text)| case(name, text)).collect();
    let program: Program = vec![cases.iter().map(|c| c.kernel.clone()).collect()];
    let functions = shardc_codegen::c::Functions::of(program.iter().flatten());
    let objects = shardc_codegen::c::compile(&functions, Duration::from_secs(600))
        .unwrap_or_else(|e| panic!("{}", e.render()));
    let native = Arc::new(Native::load(&objects, std::iter::once(&program)).expect("it loads"));
    let (from, mut to) = (vec![1.0f32; N * N], vec![0.0f32; N * N]);
    for threads in [1, std::thread::available_parallelism().map_or(1, |n| n.get())] {
        let end = Threads::connect(&Mesh::default(), Duration::from_secs(60)).swap_remove(0);
        let mut executor = Executor::new(Box::new(end), threads).with(Some(native.clone()));
        let mut copies = vec![];
        let mut times: Vec<Vec<f64>> = cases.iter().map(|_| vec![]).collect();
        for turn in 0..=TURNS {
            let copied = copy(&from, &mut to, threads);
            for (c, times) in cases.iter_mut().zip(&mut times) {
                let base: Vec<*mut f32> = c.memory.iter_mut().map(|m| m.as_mut_ptr()).collect();
                let at: Vec<*mut f32> = c.at.iter().map(|&i| base[i]).collect();
                let start = Instant::now();
                // SAFETY: every value has the memory of its type.
                unsafe { executor.run(&c.kernel, &at) }.unwrap_or_else(|e| panic!("{e}"));
                // The first turn warms up.
                if turn > 0 {
                    times.push(start.elapsed().as_secs_f64());
                }
            }
            if turn > 0 {
                copies.push(copied);
            }
        }
        let rate = 2.0 * (N * N * 4) as f64 / median(copies) / 1e9;
        println!("\n{threads} threads, copying 64 MiB: {rate:.1} GB/s\n");
        println!("| kernel, {N} x {N} | MiB | ms | GB/s | of copying |\n|-|-:|-:|-:|-:|");
        for (c, times) in cases.iter().zip(times) {
            let (ms, mib) = (median(times) * 1e3, c.bytes as f64 / 1048576.0);
            // A result on its operand is read and written.
            let gb = c.bytes as f64 / ms / 1e6;
            println!("| {} | {mib:.0} | {ms:.2} | {gb:.1} | {:.0} % |", c.name, gb / rate * 100.0);
        }
    }
}
