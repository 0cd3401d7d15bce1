//! Kernels compiled by the machine's C compiler, against the interpreter: the same bits.

mod fixture;

use fixture::{Fixture, options};
use shardc::commands::run::{Kernels, Run, Start, session};
use shardc_ir::func::{Func, Role, RoleKind, Value};
use shardc_ir::group::launches;
use shardc_ir::interp::{self, Precision};
use shardc_ir::kernel::{Kernel, Program};
use shardc_ir::mesh::Mesh;
use shardc_ir::rng::Stream;
use shardc_ir::tensor::Tensor;
use shardc_ir::text::parse;
use shardc_ir::types::DType;
use shardc_passes::group::group;
use shardc_passes::options::Options;
use shardc_runtime::StepBatch;
use shardc_runtime::exec::Executor;
use shardc_runtime::native::Native;
use shardc_runtime::threads::Threads;
use std::sync::Arc;
use std::time::Duration;

/// Programs that become one kernel or a few, for R rows of C elements; `i` is drawn in 0..C.
const PROGRAMS: [&str; 9] = [
    // RMSNorm, and its gradient
    "(%x: f32[R,C], %w: f32[C]) -> (f32[R,C], f32[R]) {
       %s = dot[rc,rc->r] %x, %x : f32[R]
       %v = scale[0.1] %s : f32[R]
       %e = shift[1e-5] %v : f32[R]
       %d = rsqrt %e : f32[R]
       %n = mul[rc,r->rc] %x, %d : f32[R,C]
       %y = mul[rc,c->rc] %n, %w : f32[R,C]
       return %y, %d }",
    "(%x: f32[R,C], %g: f32[R,C], %d: f32[R]) -> (f32[R,C], f32[C]) {
       %a = dot[rc,rc->r] %g, %x : f32[R]
       %b = mul %a, %d : f32[R]
       %c = mul[r,rc->rc] %b, %x : f32[R,C]
       %h = sub %g, %c : f32[R,C]
       %w = dot[rc,rc->c] %g, %x : f32[C]
       return %h, %w }",
    // cross-entropy, and its gradient
    "(%x: f32[R,C], %i: i32[R]) -> (f32[R,C], f32[R], f32[R]) {
       %m = reduce_max[rc->r] %x : f32[R]
       %m.1 = stop_gradient %m : f32[R]
       %z = sub[rc,r->rc] %x, %m.1 : f32[R,C]
       %e = exp %z : f32[R,C]
       %s = reduce_sum[rc->r] %e : f32[R]
       %l = log %s : f32[R]
       %t = take[rc,r->r] %z, %i : f32[R]
       %n = sub %l, %t : f32[R]
       return %e, %s, %n }",
    "(%e: f32[R,C], %s: f32[R], %i: i32[R]) -> f32[R,C] {
       %v = at_least[0.0] %i : f32[R]
       %n = scale[-1.0] %v : f32[R]
       %p = put[r,r->rc; c=C] %n, %i : f32[R,C]
       %d = div %v, %s : f32[R]
       %x = expand[r->rc; c=C] %d : f32[R,C]
       %y = mul %x, %e : f32[R,C]
       %o = add %p, %y : f32[R,C]
       return %o }",
    // SwiGLU, GELU, tanh and their like
    "(%g: f32[R,C], %u: f32[R,C]) -> (f32[R,C], f32[R,C]) {
       %a = silu %g : f32[R,C]
       %m = mul %a, %u : f32[R,C]
       %s = logistic %g : f32[R,C]
       %t = tanh %u : f32[R,C]
       %x = mul %s, %t : f32[R,C]
       %y = gelu %x : f32[R,C]
       return %m, %y }",
    // what is one number a row, or one in all
    "(%x: f32[R,C], %k: f32[]) -> (f32[R], f32[]) {
       %m = reduce_max[rc->r] %x : f32[R]
       %e = mul[r,->r] %m, %k : f32[R]
       %q = dot[rc,rc->] %x, %x : f32[]
       %r = sqrt %q : f32[]
       return %e, %r }",
    // 16-bit elements, rounded wherever the types say so
    "(%x: bf16[R,C], %y: f32[R,C]) -> (bf16[R,C], f32[R]) {
       %a = mul %x, %x : bf16[R,C]
       %b = add %a, %x : bf16[R,C]
       %c = cast[f32] %b : f32[R,C]
       %d = mul %c, %y : f32[R,C]
       %s = reduce_sum[rc->r] %d : f32[R]
       return %b, %s }",
    // a step of the optimizer
    "(%p: f32[R,C], %g: f32[R,C], %m: f32[R,C], %v: f32[R,C], %l: f32[], %t: f32[], %b: f32[]) -> (f32[R,C], f32[R,C], f32[R,C]) {
       %v.1 = mul %v, %v : f32[R,C]
       %p.1, %m.1, %v.2 = adamw[0.9; beta2=0.999; eps=1e-8; decay=0.01] %p, %g, %m, %v.1, %l, %t, %b : f32[R,C], f32[R,C], f32[R,C]
       return %p.1, %m.1, %v.2 }",
    // rows read along their other dim
    "(%x: f32[C,R], %w: f32[R]) -> f32[R] {
       %y = dot[cr,cr->r] %x, %x : f32[R]
       %z = add %y, %w : f32[R]
       return %z }",
];

/// Rows and elements: one, odd, around a vector, around a chunk, many.
const SIZES: [(usize, usize); 8] =
    [(1, 1), (3, 1), (1, 17), (5, 15), (67, 16), (2, 513), (130, 33), (2, 4099)];

fn function(text: &str, (rows, cols): (usize, usize)) -> Func {
    let sized = text.replace("[R,C]", &format!("[{rows},{cols}]"));
    let sized = sized.replace("[C,R]", &format!("[{cols},{rows}]"));
    let sized = sized.replace("[R]", &format!("[{rows}]")).replace("[C]", &format!("[{cols}]"));
    let sized = sized.replace("c=C]", &format!("c={cols}]"));
    let sized = sized.replace(" }", "\n}");
    let m =
        parse(&format!("mesh []\n\nfunc @f{sized}")).unwrap_or_else(|e| panic!("{}", e.render()));
    let mut f = m.funcs.into_iter().next().expect("a function");
    group(&Mesh::default(), &mut f);
    f
}

/// Numbers for the arguments; a bf16 is one, an index is one of a row's or none.
fn draw(f: &Func, cols: usize, rng: &mut impl FnMut() -> f64) -> Vec<Tensor> {
    let one = |p: &shardc_ir::func::Port| {
        let ty = f.ty(p.value);
        Tensor::from_fn(&ty.sizes(), |_| match ty.dtype {
            DType::I32 => (rng() * (cols + 1) as f64).floor() - 1.0,
            DType::BF16 => {
                f64::from(f32::from_bits((rng() as f32 * 4.0 - 2.0).to_bits() & 0xffff_0000))
            }
            // A step, a learning rate, a factor.
            _ if ty.rank() == 0 => f64::from((rng() * 2.0 + 1.0) as f32),
            _ => f64::from((rng() * 4.0 - 2.0) as f32),
        })
    };
    f.args.iter().map(one).collect()
}

/// The results of a function by its kernels: bytes of every one.
fn results(
    f: &Func,
    program: &[Kernel],
    args: &[Tensor],
    native: Option<Arc<Native>>,
    threads: usize,
) -> Vec<Vec<f32>> {
    let mesh = Mesh::default();
    // 64 bytes more than a tensor has, all NaN: reading or writing them shows.
    let room =
        |v: Value| vec![f32::from_bits(0x7fc1_7fc1); f.ty(v).local_bytes(&mesh).div_ceil(4) + 16];
    let mut memory: Vec<Vec<f32>> = (0..f.values.len()).map(|v| room(Value(v as u32))).collect();
    for (p, t) in f.args.iter().zip(args) {
        let to = &mut memory[p.value.0 as usize];
        for (i, &x) in t.data.iter().enumerate() {
            match f.ty(p.value).dtype {
                DType::I32 => to[i] = f32::from_bits(x as i32 as u32),
                DType::BF16 => {
                    let (old, half) = (to[i / 2].to_bits(), i % 2 * 16);
                    let new = (x as f32).to_bits() >> 16 << half;
                    to[i / 2] = f32::from_bits(old & !(0xffff << half) | new);
                }
                _ => to[i] = x as f32,
            }
        }
    }
    let end = Threads::connect(&mesh, Duration::from_secs(20)).swap_remove(0);
    let mut executor = Executor::new(Box::new(end), threads).with(native);
    let base: Vec<*mut f32> = memory.iter_mut().map(|m| m.as_mut_ptr()).collect();
    for (x, k) in launches(f).iter().zip(program) {
        let mut at: Vec<*mut f32> =
            x.ins.iter().chain(&x.outs).map(|v| base[v.0 as usize]).collect();
        at.push(std::ptr::NonNull::dangling().as_ptr());
        // SAFETY: every value has the memory of its type; none of these kernels has a workspace.
        unsafe { executor.run(k, &at) }.unwrap_or_else(|e| panic!("{e}"));
    }
    f.results.iter().map(|r| memory[r.value.0 as usize].clone()).collect()
}

fn bits(all: &[Vec<f32>]) -> Vec<Vec<u32>> {
    all.iter().map(|x| x.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn compiled_kernels_give_the_bits_of_interpreted_ones() {
    let mesh = Mesh::default();
    let all: Vec<(Func, usize)> =
        PROGRAMS.iter().flat_map(|p| SIZES.map(|s| (function(p, s), s.1))).collect();
    let programs: Program = all
        .iter()
        .map(|(f, _)| {
            launches(f)
                .iter()
                .map(|x| shardc_codegen::launch(&mesh, f, x, &[]).expect("a kernel"))
                .collect()
        })
        .collect();
    let text = shardc_codegen::c::print(programs.iter().flatten());
    let object = shardc_codegen::c::compile(&text).unwrap_or_else(|e| panic!("{}", e.render()));
    let native = Native::load(&object, std::iter::once(&programs)).expect("it loads");
    let native = Arc::new(native);
    let (stream, mut next) = (Stream::new(5, "compiled", 0), 0);
    let mut rng = || {
        next += 1;
        stream.uniform(next)
    };
    let mut fused = 0;
    for ((f, cols), program) in all.iter().zip(&programs) {
        fused += usize::from(program.len() < f.nodes.len());
        let args = draw(f, *cols, &mut rng);
        let interpreted = results(f, program, &args, None, 1);
        for threads in [1, 2, 3] {
            let compiled = results(f, program, &args, Some(native.clone()), threads);
            assert_eq!(
                bits(&compiled),
                bits(&interpreted),
                "{threads} threads: {}",
                shardc_ir::text::print(&shardc_ir::func::Module {
                    mesh: mesh.clone(),
                    funcs: vec![f.clone()]
                })
            );
        }
        // The meaning, in f64: sums of C products in f32, a bf16 rounded at each node.
        let wide: Vec<Vec<Tensor>> = args.iter().map(|t| vec![t.clone()]).collect();
        let want = interp::call(&mesh, f, &wide, Precision::F64).unwrap_or_else(|e| panic!("{e}"));
        for ((r, got), want) in f.results.iter().zip(&interpreted).zip(&want) {
            let half = f.ty(r.value).dtype == DType::BF16
                || f.args.iter().any(|a| f.ty(a.value).dtype == DType::BF16);
            let largest = want[0].data.iter().fold(1e-3f64, |a, b| a.max(b.abs()));
            for (i, w) in want[0].data.iter().enumerate() {
                let g = match f.ty(r.value).dtype {
                    DType::BF16 => {
                        f64::from(f32::from_bits(got[i / 2].to_bits() >> (i % 2 * 16) << 16))
                    }
                    _ => f64::from(got[i]),
                };
                let bound = if half { 0.02 } else { 2e-5 };
                assert!((g - w).abs() <= bound * largest, "{i}: {g} is not {w}");
            }
        }
    }
    assert!(fused > 50, "only {fused} programs have fused kernels");
}

#[test]
fn plans_train_to_the_same_bits() {
    type Case<'a> = (&'a str, &'a [(&'a str, usize)], bool, bool);
    // With --sp, and in f32.
    let cases: [Case; 5] = [
        ("llama_gqa", &[("tp", 2)], true, true),
        ("gpt2", &[("dp_shard", 2)], false, true),
        ("qwen3", &[], false, false),
        ("mixtral", &[("tp", 2)], false, true),
        ("llama_bias_tied", &[("pp", 2), ("tp", 2)], false, true),
    ];
    for (name, mesh, sp, whole) in cases {
        let fx = Fixture::open(name);
        let o = Options {
            observe: false,
            dtype: if whole { DType::F32 } else { DType::BF16 },
            ..options(mesh, sp, 2)
        };
        let model = fx.model(&o);
        let plan = fixture::compile(&model, &o).plan;
        let start = Start::Checkpoint(fx.model(&o).checkpoint.expect("weights"));
        let targets = fx.targets();
        let train = |kernels| {
            let how = Run { kernels, timeout: 60, threads: Some(1), ..Run::default() };
            let mut s = session(&plan, &start, &how).unwrap_or_else(|e| panic!("{}", e.render()));
            let batch = StepBatch { input_ids: &fx.input_ids, targets: &targets, observe: false };
            let losses: Vec<u32> = (1..=3)
                .map(|i| {
                    s.step(&batch, 1e-3, i)
                        .unwrap_or_else(|e| panic!("{e}"))
                        .loss
                        .expect("a loss")
                        .to_bits()
                })
                .collect();
            let params: Vec<Vec<u32>> = model
                .weights
                .iter()
                .map(|w| {
                    s.tensor(&Role::new(RoleKind::Param, w.param.as_str())).expect("a parameter")
                })
                .map(|a| a.data.iter().map(|x| x.to_bits()).collect())
                .collect();
            (losses, params)
        };
        assert!(train(Kernels::Compiled) == train(Kernels::Interpreted), "{name} {mesh:?}");
    }
}

/// Kernels over rows of all ranks of a plan.
fn symbols(plan: &shardc_ir::plan::Plan) -> std::collections::BTreeSet<String> {
    let ranks = 0..plan.module.mesh.ranks();
    let all = ranks.flat_map(|r| shardc_codegen::program(plan, r).expect("kernels"));
    let rows = all.flatten().filter_map(|k| match k {
        Kernel::Rows(k) => Some(k.symbol.to_string()),
        _other => None,
    });
    rows.collect()
}

#[test]
fn layers_and_ranks_share_their_kernels() {
    let file =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/configs/llama-3.1-8b.json");
    let mut config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(file).expect("a config")).expect("JSON");
    let mut of = |layers: usize, mesh: &[(&str, usize)]| {
        config["num_hidden_layers"] = layers.into();
        let o = Options { observe: false, ..options(mesh, true, 1) };
        let done = shardc::compile_config(&config, &o).unwrap_or_else(|e| panic!("{}", e.render()));
        symbols(&done.stored.plan)
    };
    let few = of(3, &[("tp", 8)]);
    assert!(few.len() < 60, "{}", few.len());
    // The sum of all gradients' norms names as many of them as there are: as many kernels, one another.
    let more = of(9, &[("tp", 8)]);
    assert_eq!(few.len(), more.len(), "layers");
    assert!(few.intersection(&more).count() + 6 > few.len(), "layers");
    let twice = of(3, &[("dp_replicate", 2), ("tp", 8)]);
    assert!(twice.len() <= few.len() + 2, "16 ranks: {} for {}", twice.len(), few.len());
}
