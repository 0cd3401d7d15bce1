//! Products of a training step, in GFLOP/s and in percent of what the processor can do, which is
//! measured beside each: `cargo bench --bench products [-- WORDS OF A LINE]`.

use shardc_ir::func::{Func, Name, Node, Port, Scope};
use shardc_ir::kernel::Kernel;
use shardc_ir::mesh::Mesh;
use shardc_ir::samples::Sample;
use shardc_ir::types::{DType, Type};
use shardc_runtime::exec::Executor;
use shardc_runtime::threads::Threads;
use std::time::{Duration, Instant};

/// A model's sizes: tokens, width, width of the feed-forward, of keys, and tokens of the vocabulary.
struct Model {
    name: &'static str,
    tokens: usize,
    width: usize,
    inner: usize,
    vocab: usize,
}

const MODELS: [Model; 2] = [
    Model { name: "llama", tokens: 2048, width: 512, inner: 1408, vocab: 8192 },
    Model { name: "gpt2", tokens: 1024, width: 768, inner: 3072, vocab: 50257 },
];

/// An op as a kernel, with the sizes of its operands, results and workspace in bytes.
struct Case {
    kernel: Kernel,
    bytes: Vec<usize>,
    half: Vec<bool>,
    flops: f64,
}

impl Case {
    fn new(text: &str, flops: f64) -> Case {
        let s = Sample::parse(text.to_string().leak()).expect("a sample");
        let mesh = Mesh::default();
        let mut f = Func::new("f");
        let args: Vec<_> = s.ins.iter().map(|t| f.arg(t.clone(), Name::parse("x"), None)).collect();
        let outs: Vec<_> = s.types().into_iter().map(|t| f.value(t, Name::parse("y"))).collect();
        f.results = outs.iter().map(|&value| Port { value, role: None }).collect();
        f.nodes.push(Node {
            op: s.op.clone(),
            ins: args.iter().copied().collect(),
            outs: outs.iter().copied().collect(),
            scope: Scope(0),
            note: None,
        });
        let types: Vec<&Type> = args.iter().chain(&outs).map(|&v| f.ty(v)).collect();
        let (ins, results) = types.split_at(args.len());
        let mut bytes: Vec<usize> = types.iter().map(|t| t.local_bytes(&mesh)).collect();
        bytes.push(s.op.def().workspace(&mesh, ins, results));
        let half = types.iter().map(|t| t.dtype == DType::BF16).chain([false]).collect();
        let kernel = shardc_codegen::lower(&mesh, &f, &f.nodes[0], &[]).expect("a kernel");
        Case { kernel, bytes, half, flops }
    }

    /// Seconds of the fastest of many runs on so many ranks, each with so many threads.
    fn seconds(&self, ranks: usize, threads: usize) -> f64 {
        let barrier = std::sync::Barrier::new(ranks);
        let one = || {
            let end = Threads::connect(&Mesh::default(), Duration::from_secs(60)).remove(0);
            let mut executor = Executor::new(Box::new(end), threads);
            let mut memory: Vec<Vec<u32>> =
                self.bytes.iter().map(|&b| vec![0; b.div_ceil(4)]).collect();
            for (i, m) in memory.iter_mut().enumerate() {
                for (j, x) in m.iter_mut().enumerate() {
                    let f = ((i * 7 + j * 13) % 31) as f32 * 0.01;
                    *x = if self.half[i] {
                        0x3c00_3c00 + ((j % 61) << 17 | j % 97) as u32
                    } else {
                        f.to_bits()
                    };
                    // Positions.
                    if self.bytes.len() > 5 && self.bytes[i] < 1 << 15 && i >= 3 {
                        *x = j as u32;
                    }
                }
            }
            let pointers: Vec<*mut f32> =
                memory.iter_mut().map(|m| m.as_mut_ptr().cast()).collect();
            let (mut best, began, mut runs) = (f64::INFINITY, Instant::now(), 0);
            while runs < 5 || began.elapsed() < Duration::from_millis(400) && runs < 1000 {
                barrier.wait();
                let start = Instant::now();
                // SAFETY: the buffers are as large as their types, and nobody else uses them.
                unsafe { executor.run(&self.kernel, &pointers).expect("it runs") };
                barrier.wait();
                best = best.min(start.elapsed().as_secs_f64());
                runs += 1;
                if ranks > 1 && runs >= 40 {
                    break;
                }
            }
            best
        };
        if ranks == 1 {
            return one();
        }
        std::thread::scope(|s| {
            let all: Vec<_> = (0..ranks).map(|_| s.spawn(one)).collect();
            all.into_iter().map(|t| t.join().expect("it ran")).fold(0.0, f64::max)
        })
    }
}

/// GFLOP/s of independent multiplications and additions in registers, on so many threads.
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
    best
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

fn line(name: &str, text: &str, flops: f64) {
    let words: Vec<String> = std::env::args().skip(1).filter(|w| !w.starts_with('-')).collect();
    let half = text.contains("bf16[");
    let whole = format!("{name} {text}");
    if !words.iter().all(|w| whole.contains(w.as_str())) {
        return;
    }
    let case = Case::new(text, flops);
    print!("{name:<34}");
    for (ranks, threads) in [(1, 1), (1, 2), (2, 1)] {
        let before = peak(ranks * threads, half);
        let rate = ranks as f64 * case.flops / case.seconds(ranks, threads) / 1e9;
        let peak = before.max(peak(ranks * threads, half));
        print!(" {rate:7.0} {:4.0}%", 100.0 * rate / peak);
    }
    println!("   {text}");
}

fn main() {
    println!(
        "{:<34} {:>13}{:>13}{:>13}",
        "GFLOP/s, % of peak", "1 x 1", "1 x 2 threads", "2 ranks"
    );
    for d in ["f32", "bf16"] {
        for m in &MODELS {
            let (t, h) = (m.tokens, m.width);
            let mut sizes = vec![("q", h), ("up", m.inner), ("vocab", m.vocab)];
            if m.name == "llama" {
                sizes.extend([("k", 256), ("tp4 q", 128), ("tp2 up", 704), ("tp4 up", 352)]);
            }
            for (what, o) in sizes {
                let flops = 2.0 * (t * h * o) as f64;
                let name = |pass: &str| format!("{d} {} {what} {pass}", m.name);
                let (x, w, y) =
                    (format!("{d}[1,{t},{h}]"), format!("{d}[{o},{h}]"), format!("{d}[1,{t},{o}]"));
                line(&name("forward"), &format!("dot[bsh,oh->bso] {x}, {w}"), flops);
                line(&name("backward"), &format!("dot[bso,oh->bsh] {y}, {w}"), flops);
                line(&name("weight"), &format!("dot[bso,bsh->oh] {y}, {x}"), flops);
            }
            let flops = 2.0 * (t * h * m.inner) as f64;
            let (x, w) = (format!("{d}[1,{t},{}]", m.inner), format!("{d}[{h},{}]", m.inner));
            line(
                &format!("{d} {} down forward", m.name),
                &format!("dot[bsh,oh->bso] {x}, {w}"),
                flops,
            );
        }
    }
}
