//! Products of a training step, in GFLOP/s and in percent of what the processor can do, which is
//! measured beside each: `cargo bench --bench products [-- WORDS OF A LINE]`.

use shardc_ir::func::{Func, Name, Node, Port, Scope};
use shardc_ir::kernel::Kernel;
use shardc_ir::mesh::Mesh;
use shardc_ir::samples::Sample;
use shardc_ir::types::{DType, Type};
use shardc_runtime::exec::Executor;
use shardc_runtime::threads::Threads;
use std::ops::Range;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// An op as a kernel, with what its operands, results and workspace are.
struct Case {
    kernel: Kernel,
    memory: Vec<(DType, usize)>,
}

impl Case {
    fn new(text: &str) -> Case {
        let s = Sample::parse(text.to_string().leak()).expect("a sample");
        let mesh = Mesh::default();
        let mut f = Func::new("f");
        let args: Vec<_> = s.ins.iter().map(|t| f.arg(t.clone(), Name::parse("x"), None)).collect();
        let outs: Vec<_> = s.types().into_iter().map(|t| f.value(t, Name::parse("y"))).collect();
        f.results = outs.iter().map(|&value| Port { value, role: None }).collect();
        f.nodes.push(Node::new(s.op.clone(), &args, &outs, Scope(0)));
        let types: Vec<&Type> = args.iter().chain(&outs).map(|&v| f.ty(v)).collect();
        let (ins, results) = types.split_at(args.len());
        let mut memory: Vec<_> = types.iter().map(|t| (t.dtype, t.local_bytes(&mesh))).collect();
        memory.push((DType::F32, s.op.def().workspace(&mesh, ins, results)));
        let kernel = shardc_codegen::lower(&mesh, &f, &f.nodes[0], &[]).expect("a kernel");
        Case { kernel, memory }
    }

    /// Numbers below 1; positions in order.
    fn fill(&self) -> Vec<Vec<u32>> {
        let word = |dtype: DType, i: usize| {
            let x = ((i * 13 % 61) as f32 * 0.01).to_bits();
            match dtype {
                DType::I32 => i as u32,
                DType::BF16 => x >> 16 | x & 0xffff_0000,
                DType::F32 | DType::F16 => x,
            }
        };
        let all = |&(d, bytes): &(DType, usize)| (0..bytes.div_ceil(4)).map(move |i| word(d, i));
        self.memory.iter().map(|m| all(m).collect()).collect()
    }

    /// Seconds of the fastest of many runs on so many ranks at once, each with so many threads.
    fn seconds(&self, ranks: usize, threads: usize) -> f64 {
        let barrier = Barrier::new(ranks);
        let one = || {
            let end = Threads::connect(&Mesh::default(), Duration::from_secs(60)).remove(0);
            let mut executor = Executor::new(Box::new(end), threads);
            let mut memory = self.fill();
            let at: Vec<*mut f32> = memory.iter_mut().map(|m| m.as_mut_ptr().cast()).collect();
            let mut run = || {
                barrier.wait();
                let start = Instant::now();
                // SAFETY: buffers are as large as their types say, and nobody else has them.
                unsafe { executor.run(&self.kernel, &at).expect("it runs") };
                barrier.wait();
                start.elapsed().as_secs_f64()
            };
            let first = run();
            runs(ranks, first).map(|_| run()).fold(first, f64::min)
        };
        std::thread::scope(|s| {
            let all: Vec<_> = (0..ranks).map(|_| s.spawn(one)).collect();
            all.into_iter().map(|t| t.join().expect("it ran")).fold(0.0, f64::max)
        })
    }
}

/// How often to run what took so long once: ranks that wait for each other have to agree.
fn runs(ranks: usize, seconds: f64) -> Range<usize> {
    0..if ranks > 1 { 20 } else { (0.2 / seconds) as usize }.clamp(5, 1000)
}

/// GFLOP/s of independent multiplications and additions in registers, on so many threads: of bf16 those of
/// pairs or of f32, whichever is faster.
fn peak(threads: usize, half: bool) -> f64 {
    const STEPS: usize = 200_000;
    let mut best = 0.0f64;
    for _ in 0..5 {
        let start = Instant::now();
        let flops: f64 = std::thread::scope(|s| {
            let all: Vec<_> =
                (0..threads).map(|_| s.spawn(move || registers(STEPS, half))).collect();
            all.into_iter().map(|t| t.join().expect("it ran")).sum()
        });
        best = best.max(flops / start.elapsed().as_secs_f64() / 1e9);
    }
    if half { best.max(peak(threads, false)) } else { best }
}

/// Floating-point operations done.
#[cfg(target_arch = "x86_64")]
fn registers(steps: usize, half: bool) -> f64 {
    use std::arch::x86_64::*;
    use std::hint::black_box;
    #[target_feature(enable = "avx512f")]
    fn f32s(steps: usize) -> f32 {
        let (x, y) = (_mm512_set1_ps(black_box(1.0)), _mm512_set1_ps(black_box(0.5)));
        let mut sums = [_mm512_setzero_ps(); 24];
        for _ in 0..steps {
            for s in &mut sums {
                *s = _mm512_fmadd_ps(x, y, *s);
            }
        }
        let mut all = sums[0];
        for &s in &sums[1..] {
            all = _mm512_add_ps(all, s);
        }
        _mm512_reduce_add_ps(all)
    }
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn pairs(steps: usize) -> f32 {
        let of = |x: f32| _mm512_cvtne2ps_pbh(_mm512_set1_ps(x), _mm512_set1_ps(x));
        let (x, y) = (of(black_box(1.0)), of(black_box(0.5)));
        let mut sums = [_mm512_setzero_ps(); 24];
        for _ in 0..steps {
            for s in &mut sums {
                *s = _mm512_dpbf16_ps(*s, x, y);
            }
        }
        let mut all = sums[0];
        for &s in &sums[1..] {
            all = _mm512_add_ps(all, s);
        }
        _mm512_reduce_add_ps(all)
    }
    #[target_feature(enable = "avx2,fma")]
    fn f32s_avx2(steps: usize) -> f32 {
        let (x, y) = (_mm256_set1_ps(black_box(1.0)), _mm256_set1_ps(black_box(0.5)));
        let mut sums = [_mm256_setzero_ps(); 12];
        for _ in 0..steps {
            for s in &mut sums {
                *s = _mm256_fmadd_ps(x, y, *s);
            }
        }
        let mut all = sums[0];
        for &s in &sums[1..] {
            all = _mm256_add_ps(all, s);
        }
        _mm_cvtss_f32(_mm256_castps256_ps128(all))
    }
    // SAFETY: the processor has what each function needs.
    let (per_step, sum) = unsafe {
        if half && is_x86_feature_detected!("avx512bf16") {
            (24 * 64, pairs(steps))
        } else if is_x86_feature_detected!("avx512f") {
            (24 * 32, f32s(steps))
        } else {
            (12 * 16, f32s_avx2(steps))
        }
    };
    black_box(sum);
    (steps * per_step) as f64
}

/// Elsewhere nothing is known of the processor: percentages are of 1 GFLOP/s.
#[cfg(not(target_arch = "x86_64"))]
fn registers(_: usize, _: bool) -> f64 {
    f64::NAN
}

/// Prints a line for an op of so many floating-point operations.
fn line(name: &str, text: &str, flops: f64) {
    let whole = format!("{name} {text}");
    let mut words = std::env::args().skip(1).filter(|w| !w.starts_with('-'));
    if !words.all(|w| whole.contains(w.as_str())) {
        return;
    }
    let (case, half) = (Case::new(text), text.contains("bf16["));
    print!("{name:<30}");
    for (ranks, threads) in [(1, 1), (1, 2), (2, 1)] {
        let before = peak(ranks * threads, half);
        let rate = ranks as f64 * flops / case.seconds(ranks, threads) / 1e9;
        let peak = before.max(peak(ranks * threads, half));
        print!(" {rate:6.0} {:3.0}%", 100.0 * rate / peak);
    }
    println!("  {text}");
}

/// Forward, backward, and the gradient of the weight: tokens by `[o, h]`.
fn layer(name: &str, d: &str, [t, h, o]: [usize; 3]) {
    let flops = 2.0 * (t * h * o) as f64;
    let [x, w, y] = [[t, h], [o, h], [t, o]].map(|[a, b]| format!("{d}[{a},{b}]"));
    line(&format!("{name} forward"), &format!("dot[sh,oh->so] {x}, {w}"), flops);
    line(&format!("{name} backward"), &format!("dot[so,oh->sh] {y}, {w}"), flops);
    line(&format!("{name} weight"), &format!("dot[so,sh->oh] {y}, {x}"), flops);
}

/// Causal attention of sequences `[b, s]`; operations are those of half of all pairs.
fn attention(d: &str, [b, s, heads, groups]: [usize; 4]) {
    let flops = (2 * b * heads * s * s * 64) as f64;
    let (q, k) = (format!("{d}[{b},{s},{heads},64]"), format!("{d}[{b},{s},{groups},64]"));
    let (stats, at) = (format!("f32[{b},{s},{heads}]"), format!("i32[{s}], i32[{s}]"));
    let name = |pass: &str| format!("{d} attention {pass}");
    line(&name("forward"), &format!("attention[0.1; mask=causal] {q}, {k}, {k}, {at}"), flops);
    let ins = format!("{q}, {k}, {k}, {stats}, {q}, {stats}, {at}");
    line(&name("backward"), &format!("attention_grad[0.1; mask=causal] {ins}"), 2.5 * flops);
}

fn main() {
    println!("{:<31}{:<12}{:<12}{:<12}", "GFLOP/s, % of peak", "1 thread", "2 threads", "2 ranks");
    for d in ["f32", "bf16"] {
        for (what, o) in [("q", 512), ("k", 256), ("up", 1408), ("vocab", 8192)] {
            layer(&format!("{d} llama {what}"), d, [2048, 512, o]);
        }
        layer(&format!("{d} llama down"), d, [2048, 1408, 512]);
        for (what, o) in [("tp4 q", 128), ("tp2 up", 704), ("tp4 up", 352)] {
            layer(&format!("{d} llama {what}"), d, [2048, 512, o]);
        }
        for (what, o) in [("q", 768), ("up", 3072), ("vocab", 50257)] {
            layer(&format!("{d} gpt2 {what}"), d, [1024, 768, o]);
        }
        layer(&format!("{d} gpt2 down"), d, [1024, 3072, 768]);
        for rows in [1, 8] {
            layer(&format!("{d} {rows} rows"), d, [rows, 2048, 2048]);
        }
        attention(d, [4, 512, 8, 4]);
        attention(d, [1, 2048, 8, 4]);
        attention(d, [1, 1024, 12, 12]);
    }
}
