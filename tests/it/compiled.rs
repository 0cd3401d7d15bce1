//! Kernels compiled by the machine's C compiler, against the interpreter: the same bits.

mod aarch64;
mod epilogues;
mod random;

use crate::fixture::{Fixture, options};
use shardc::commands::run::{Kernels, Run, Start, session};
use shardc_ir::func::{Func, FusedWithNext, Module, Role, RoleKind, Value};
use shardc_ir::group::launches;
use shardc_ir::interp::{self, Precision};
use shardc_ir::kernel::{Kernel, Program, Stage};
use shardc_ir::mesh::Mesh;
use shardc_ir::phase::Phase;
use shardc_ir::rng::Stream;
use shardc_ir::tensor::Tensor;
use shardc_ir::text::parse;
use shardc_ir::types::DType;
use shardc_ir::verify::verify;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::classes::rank_classes;
use shardc_passes::group::group;
use shardc_passes::options::{CpMode, Fuse, Optimizer, Options, TpMode};
use shardc_runtime::StepBatch;
use shardc_runtime::exec::Executor;
use shardc_runtime::native::Native;
use shardc_runtime::threads::Threads;
use shardc_testing::taken;
use std::sync::Arc;
use std::time::Duration;

/// What the C compiler may take.
const MINUTES: Duration = Duration::from_secs(600);

/// Programs that become one kernel or a few, for R rows of C elements; `i` is drawn in 0..C.
const PROGRAMS: [&str; 26] = [
    // a sum over one of two dims, beside what has both
    "(%x: f32[R,3,C], %w: f32[R,3]) -> f32[R,3,C] {
       %r = reduce_sum[rs->r] %w : f32[R]
       %y = mul[rsc,rs->rsc] %x, %w : f32[R,3,C]
       %z = mul[rsc,r->rsc] %y, %r : f32[R,3,C]
       return %z }",
    // a dim that neither operand nor result has
    "(%w: f32[R]) -> f32[R] {
       %x = expand[r->rc; c=C] %w : f32[R,C]
       %y = exp %x : f32[R,C]
       %z = reduce_sum[rc->r] %y : f32[R]
       %q = mul %z, %w : f32[R]
       return %q }",
    // zeros of both signs
    "(%x: f32[R,C]) -> (f32[R], f32[R,C]) {
       %z = scale[0.0] %x : f32[R,C]
       %m = reduce_max[rc->r] %z : f32[R]
       %c = clamp[0.0; hi=1.0] %z : f32[R,C]
       return %m, %c }",
    // attention over some keys, then over others, of which the lse has no elements of rows
    "(%a: f32[1,R,3,C], %l: f32[1,R,3], %b: f32[1,R,3,C], %m: f32[1,R,3])
       -> (f32[1,R,3,C], f32[1,R,3]) {
       %o, %n = merge_attention %a, %l, %b, %m : f32[1,R,3,C], f32[1,R,3]
       return %o, %n }",
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
       %p = index_add[r,r->rc; c=C] %n, %i : f32[R,C]
       %d = div %v, %s : f32[R]
       %x = expand[r->rc; c=C] %d : f32[R,C]
       %y = mul %x, %e : f32[R,C]
       %o = add %p, %y : f32[R,C]
       return %o }",
    // softmax, of 16-bit elements too
    "(%x: f32[R,C]) -> f32[R,C] {
       %m = reduce_max[rc->r] %x : f32[R]
       %z = sub[rc,r->rc] %x, %m : f32[R,C]
       %e = exp %z : f32[R,C]
       %s = reduce_sum[rc->r] %e : f32[R]
       %y = div[rc,r->rc] %e, %s : f32[R,C]
       return %y }",
    "(%x: bf16[R,C]) -> bf16[R,C] {
       %m = reduce_max[rc->r] %x : bf16[R]
       %z = sub[rc,r->rc] %x, %m : bf16[R,C]
       %e = exp %z : bf16[R,C]
       %s = reduce_sum[rc->r] %e : bf16[R]
       %y = div[rc,r->rc] %e, %s : bf16[R,C]
       return %y }",
    // exponentials that have no room: of another type, or where an operand is still read
    "(%x: f32[R,C]) -> bf16[R,C] {
       %e = exp %x : f32[R,C]
       %s = reduce_sum[rc->r] %e : f32[R]
       %d = div[rc,r->rc] %e, %s : f32[R,C]
       %y = cast[bf16] %d : bf16[R,C]
       return %y }",
    "(%x: f32[R,C], %b: f32[R,C]) -> f32[R,C] {
       %e = exp %x : f32[R,C]
       %s = reduce_sum[rc->r] %e : f32[R]
       %d = div[rc,r->rc] %e, %s : f32[R,C]
       %y = add %d, %b : f32[R,C]
       return %y }",
    // two of them, and two results, of which one is known before the other
    "(%x: f32[R,C], %w: f32[C]) -> (f32[R,C], f32[R,C]) {
       %e = exp %x : f32[R,C]
       %t = tanh %x : f32[R,C]
       %s = dot[rc,rc->r] %e, %t : f32[R]
       %a = mul[rc,r->rc] %e, %s : f32[R,C]
       %y = mul[rc,c->rc] %a, %w : f32[R,C]
       return %t, %y }",
    // SwiGLU, GELU, tanh and their like
    "(%g: f32[R,C], %u: f32[R,C]) -> (f32[R,C], f32[R,C]) {
       %a = silu %g : f32[R,C]
       %m = mul %a, %u : f32[R,C]
       %s = logistic %g : f32[R,C]
       %t = tanh %u : f32[R,C]
       %x = mul %s, %t : f32[R,C]
       %y = gelu %x : f32[R,C]
       return %m, %y }",
    // choices, and functions that a processor may have none of
    "(%x: f32[R,C], %z: f32[R,C], %w: f32[C]) -> (f32[R,C], f32[R,C], f32[R,C]) {
       %a = max[rc,c->rc] %x, %w : f32[R,C]
       %b = min %x, %z : f32[R,C]
       %l = less %x, %z : f32[R,C]
       %e = equal %b, %x : f32[R,C]
       %s = select %l, %a, %b : f32[R,C]
       %f = erf %s : f32[R,C]
       %p = softplus %s : f32[R,C]
       %q = pow[3.0] %x : f32[R,C]
       %r = add %f, %p, %q, %e : f32[R,C]
       %i = round[floor] %x : f32[R,C]
       %j = round[ceil] %z : f32[R,C]
       %k = round[even] %s : f32[R,C]
       %m = add %i, %j, %k : f32[R,C]
       %t = abs %x : f32[R,C]
       %u = pow[1.3] %t : f32[R,C]
       return %r, %m, %u }",
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
    // several of them, which are one launch; the sum of one's gradient too
    "(%p: f32[R,C], %g: f32[R,C], %q: f32[C], %h: f32[C], %r: bf16[R], %i: bf16[R], %l: f32[], %s: f32[]) -> (f32[], f32[R,C], f32[C], bf16[R]) {
       %n = dot[rc,rc->] %g, %g : f32[]
       %p.1 = sgd[0.01] %p, %g, %l, %s : f32[R,C]
       %q.1 = sgd[0] %q, %h, %l, %s : f32[C]
       %r.1 = sgd[0] %r, %i, %l, %s : bf16[R]
       return %n, %p.1, %q.1, %r.1 }",
    // two folds of all elements, a result of the row that may lie on an operand, and one by element
    "(%x: f32[R,C], %a: f32[]) -> (f32[], f32[], f32[R,C]) {
       %n = dot[rc,rc->] %x, %x : f32[]
       %m = reduce_max[rc->] %x : f32[]
       %b = add %a, %n : f32[]
       %y = scale[0.5] %x : f32[R,C]
       return %b, %m, %y }",
    // two of one launch
    "(%p: f32[R,C], %g: f32[R,C], %q: bf16[R,C], %h: bf16[R,C], %l: f32[], %s: f32[]) -> (f32[], f32[], f32[R,C], bf16[R,C]) {
       %n = dot[rc,rc->] %g, %g : f32[]
       %p.1 = sgd[0.01] %p, %g, %l, %s : f32[R,C]
       %w = cast[f32] %h : f32[R,C]
       %o = dot[rc,rc->] %w, %w : f32[]
       %q.1 = sgd[0.01] %q, %h, %l, %s : bf16[R,C]
       return %n, %o, %p.1, %q.1 }",
    // a number of the row that is written by element, and waits for the row
    "(%x: f32[R,C], %w: f32[R]) -> f32[R,C] {
       %e = expand[r->rc; c=C] %w : f32[R,C]
       %a = mul %x, %e : f32[R,C]
       %s = reduce_sum[rc->r] %a : f32[R]
       %z = mul[rc,r->rc] %e, %s : f32[R,C]
       return %z }",
    // GELU beside its gradient
    "(%x: f32[R,C], %d: f32[R,C]) -> (f32[R,C], f32[R,C]) {
       %y = gelu %x : f32[R,C]
       %x2 = mul %x, %x : f32[R,C]
       %a = scale[0.07135481627260025] %x2 : f32[R,C]
       %a.1 = shift[1.5957691216057308] %a : f32[R,C]
       %a.2 = mul %x, %a.1 : f32[R,C]
       %s = logistic %a.2 : f32[R,C]
       %z = mul %s, %d : f32[R,C]
       return %y, %z }",
    // rows read along their other dim
    "(%x: f32[C,R], %w: f32[R]) -> f32[R] {
       %y = dot[cr,cr->r] %x, %x : f32[R]
       %z = add %y, %w : f32[R]
       return %z }",
    // rows side by side, as more operands have one element a row: two results, one of which may lie on what the other
    // reads; and values before the walk that are read in it and behind it
    "(%x: f32[R,C], %a: f32[R], %c: f32[R]) -> (f32[R], f32[R]) {
       %z = exp %x : f32[R,C]
       %s = reduce_sum[rc->r] %z : f32[R]
       %t = add %s, %c : f32[R]
       %p = add %a, %t : f32[R]
       %q = mul %a, %t : f32[R]
       return %p, %q }",
    "(%x: f32[R,C], %w: f32[C], %a: f32[R], %b: f32[R], %c: f32[R]) -> f32[R] {
       %t = add %a, %b : f32[R]
       %u = mul %t, %c : f32[R]
       %z = mul[rc,c->rc] %x, %w : f32[R,C]
       %y = add[rc,r->rc] %z, %t : f32[R,C]
       %v = mul[rc,r->rc] %y, %a : f32[R,C]
       %s = reduce_sum[rc->r] %v : f32[R]
       %o = mul %s, %u : f32[R]
       %q = add %o, %t : f32[R]
       return %q }",
];

/// Rows and elements: one, odd, around a vector, around a chunk, many, and as many chunks as a vector
/// has elements, or more.
const SIZES: [(usize, usize); 11] = [
    (1, 1),
    (3, 1),
    (1, 17),
    (5, 15),
    (67, 16),
    (2, 513),
    (130, 33),
    (1, 4099),
    (2, 4099),
    (16, 4096),
    (18, 4099),
];

/// The nodes of a program, grouped.
fn function(text: &str, size: (usize, usize)) -> Func {
    let mut f = parsed(text, size);
    group(&Mesh::default(), &mut f, &Options::default());
    f
}

fn parsed(text: &str, (rows, cols): (usize, usize)) -> Func {
    let sized = text.replace("[R,C]", &format!("[{rows},{cols}]"));
    let sized =
        sized.replace("[1,R,3", &format!("[1,{rows},3")).replace("3,C]", &format!("3,{cols}]"));
    let sized = sized.replace("[C,R]", &format!("[{cols},{rows}]"));
    let sized = sized.replace("[R,3", &format!("[{rows},3"));
    let sized = sized.replace("[R]", &format!("[{rows}]")).replace("[C]", &format!("[{cols}]"));
    let sized = sized.replace("c=C]", &format!("c={cols}]"));
    let sized = sized.replace(" }", "\n}");
    let m =
        parse(&format!("mesh []\n\nfunc @f{sized}")).unwrap_or_else(|e| panic!("{}", e.render()));
    m.funcs.into_iter().next().expect("a function")
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

/// Memory of all values of a function, with its arguments in it.
fn memory(f: &Func, args: &[Tensor]) -> Vec<Vec<f32>> {
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
    memory
}

/// The results of a function by its kernels: bytes of every one. Some values lie on others.
fn results(
    f: &Func,
    program: &[Kernel],
    args: &[Tensor],
    native: Option<Arc<Native>>,
    threads: usize,
    over: &[(Value, Value)],
) -> Vec<Vec<f32>> {
    let mesh = Mesh::default();
    let mut memory = memory(f, args);
    let end = Threads::connect(&mesh, Duration::from_secs(20)).swap_remove(0);
    let mut executor = Executor::new(Box::new(end), threads).with(native);
    let base: Vec<*mut f32> = memory.iter_mut().map(|m| m.as_mut_ptr()).collect();
    let place = |v: Value| over.iter().find(|x| x.0 == v).map_or(v, |x| x.1).0 as usize;
    for (x, k) in launches(f).iter().zip(program) {
        let mut at: Vec<*mut f32> = x.ins.iter().chain(&x.outs).map(|&v| base[place(v)]).collect();
        at.push(std::ptr::NonNull::dangling().as_ptr());
        // SAFETY: every value has the memory of its type; none of these kernels has a workspace.
        unsafe { executor.run(k, &at) }.unwrap_or_else(|e| panic!("{e}"));
    }
    f.results.iter().map(|r| memory[place(r.value)].clone()).collect()
}

/// Results that may lie on operands, as the memory pass lays them, each on every one it may.
fn over(f: &Func) -> Vec<(Value, Value)> {
    let all = launches(f);
    let [x] = &all[..] else { return vec![] };
    let of = |(k, &o): (usize, &Value)| x.over(f, k).into_iter().map(move |i| (o, i));
    x.outs.iter().enumerate().flat_map(of).collect()
}

fn bits(all: &[Vec<f32>]) -> Vec<Vec<u32>> {
    all.iter().map(|x| x.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Where results are not the meaning of a function, in f64: sums of so many products in f32, a bf16 rounded at
/// each node. What is small beside `least`, or beside the largest of its tensor, has larger errors.
fn meaning(
    f: &Func,
    program: &[Kernel],
    args: &[Tensor],
    results: &[Vec<f32>],
    terms: usize,
    least: f64,
) -> Option<String> {
    let wide: Vec<Vec<Tensor>> = args.iter().map(|t| vec![t.clone()]).collect();
    let want = interp::call(&Mesh::default(), f, &wide, Precision::F64);
    let want = want.unwrap_or_else(|e| panic!("{e}"));
    let half = (0..f.values.len()).any(|v| f.ty(Value(v as u32)).dtype == DType::BF16);
    for ((r, got), want) in f.results.iter().zip(results).zip(&want) {
        let dtype = f.ty(r.value).dtype;
        let largest = want[0].data.iter().fold(least, |a, b| a.max(b.abs()));
        // Equal terms round alike: half a unit for each of a lane's sums, of which a row has 16, and
        // one where rows are folded side by side.
        let maker = launches(f).iter().position(|x| x.outs.contains(&r.value));
        let mut rows = program[maker.expect("it is made")].rows().iter();
        let lanes = if rows.any(|k| k.by_columns()) { 1.0 } else { 16.0 };
        let alike = 2f64.powi(-24) * (terms as f64 / lanes);
        let bound = if half { 0.02 } else { 2e-5 + alike };
        for (i, w) in want[0].data.iter().enumerate() {
            let g = match dtype {
                DType::BF16 => {
                    f64::from(f32::from_bits(got[i / 2].to_bits() >> (i % 2 * 16) << 16))
                }
                _ => f64::from(got[i]),
            };
            // What is not a number is not near.
            let near = (g - w).abs() <= bound * largest;
            if !near {
                return Some(format!("{:?}[{i}]: {g} is not {w}", r.value));
            }
        }
    }
    None
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
    let functions = shardc_codegen::c::Functions::of(programs.iter().flatten());
    let objects = shardc_codegen::c::compile(&functions, MINUTES)
        .unwrap_or_else(|e| panic!("{}", e.render()));
    let native = Native::load(&objects, std::iter::once(&programs)).expect("it loads");
    let native = Arc::new(native);
    let (stream, mut next) = (Stream::new(5, "compiled", 0), 0);
    let mut rng = || {
        next += 1;
        stream.uniform(next)
    };
    let (mut fused, mut several, mut laid, mut parts) = (0, 0, 0, [0; 4]);
    for ((f, cols), program) in all.iter().zip(&programs) {
        fused += usize::from(program.len() < f.nodes.len());
        several += program.iter().filter(|k| matches!(k, Kernel::HorizontalFusion(_))).count();
        for k in program {
            let walks: Vec<[Stage; 2]> = k.rows().iter().filter_map(|k| k.in_parts()).collect();
            let several = walks.iter().any(|[walk, _]| walk.folds.len() > 1);
            let writes = walks.iter().any(|[walk, _]| !walk.written.is_empty());
            let met = [!walks.is_empty(), several, writes, walks.len() > 1];
            parts.iter_mut().zip(met).for_each(|(n, met)| *n += usize::from(met));
        }
        let args = draw(f, *cols, &mut rng);
        let interpreted = results(f, program, &args, None, 1, &[]);
        for threads in [1, 2, 3] {
            for native in [None, Some(native.clone())] {
                let own = results(f, program, &args, native, threads, &[]);
                assert_eq!(bits(&own), bits(&interpreted), "{threads} threads: {}", text_of(f));
            }
        }
        for pair in over(f) {
            laid += 1;
            for native in [None, Some(native.clone())] {
                let there = results(f, program, &args, native, 2, &[pair]);
                assert_eq!(bits(&there), bits(&interpreted), "{pair:?}: {}", text_of(f));
            }
        }
        let apart = meaning(f, program, &args, &interpreted, *cols, 1e-3);
        assert!(apart.is_none(), "{}: {}", apart.unwrap_or_default(), text_of(f));
    }
    assert!(several > 0, "no program has several kernels in a launch");
    assert!(fused > 50, "only {fused} programs have fused kernels");
    assert!(laid > 100, "only {laid} results lie on operands");
    assert!(
        parts.iter().all(|&n| n > 0),
        "of {parts:?} launches a row is folded in parts, several times, with results by element, of two kernels"
    );
}

fn text_of(f: &Func) -> String {
    let module = Module { funcs: vec![f.clone()], ..Module::default() };
    shardc_ir::text::print(&module)
}

/// Exponentials in the text of a program's kernels, for 3 rows of 40 elements: twice as many as in
/// a walk, of which one is for the rest of a row.
#[test]
fn exponentials_are_computed_once_where_a_result_has_room() {
    let exponentials = |p: &str| {
        let f = function(p, (3, 40));
        let kernel = |x| shardc_codegen::launch(&Mesh::default(), &f, x, &[]).expect("a kernel");
        let kernels: Vec<Kernel> = launches(&f).iter().map(kernel).collect();
        let text = shardc_codegen::c::print(kernels.iter());
        text.strip_prefix(shardc_codegen::c::HEADER).expect("a header").matches("f_exp(").count()
            / 2
    };
    let of = |words: &str| PROGRAMS.iter().find(|p| p.contains(words)).expect("a program");
    let cross_entropy = of("%n = sub %l, %t");
    assert_eq!(exponentials(cross_entropy), 1);
    let softmax = "%y = div[rc,r->rc] %e, %s : f32";
    assert_eq!(exponentials(of(softmax)), 1);
    assert_eq!(exponentials(&of(softmax).replace("f32", "bf16")), 1);
    assert_eq!(exponentials(of("cast[bf16] %d")), 2);
    assert_eq!(exponentials(of("add %d, %b")), 2);
    assert_eq!(exponentials(of("mul[rc,c->rc] %a, %w")), 1);
}

#[test]
fn plans_train_to_the_same_bits() {
    type Case<'a> = (&'a str, &'a [(&'a str, usize)], fn(&mut Options));
    // As users compile; the other tests interpret.
    let cases: [Case; 18] = [
        ("llama_gqa", &[("tp", 2)], |o| o.sp = true),
        ("gpt2", &[("dp_shard", 2)], |_| ()),
        ("qwen3", &[], |o| o.dtype = DType::BF16),
        ("mixtral", &[("tp", 2)], |_| ()),
        ("llama_bias_tied", &[("pp", 2), ("tp", 2)], |_| ()),
        ("llama_deep", &[("cp", 2)], |o| o.cp_mode = CpMode::Ring),
        ("llama_gqa", &[("cp", 2), ("tp", 2)], |o| {
            (o.cp_mode, o.dtype) = (CpMode::Ring, DType::BF16);
        }),
        ("llama_mha", &[("cp", 2)], |o| o.cp_mode = CpMode::Ulysses),
        ("gpt2", &[("cp", 2)], |o| o.recompute = Recompute::Full),
        ("llama_mha", &[("tp", 4)], |o| o.tp_mode = TpMode::TwoD),
        ("llama_yarn", &[("dp_shard", 4)], |o| (o.zero, o.microbatch) = (3, 1)),
        ("mistral_window", &[("dp_replicate", 2)], |o| o.optimizer = Optimizer::Sgd),
        ("qwen2", &[("pp", 2)], |o| (o.dtype, o.zero) = (DType::BF16, 1)),
        ("gemma2", &[("cp", 2)], |o| o.cp_mode = CpMode::Ring),
        ("gemma2", &[("tp", 2)], |o| (o.sp, o.dtype) = (true, DType::BF16)),
        ("deepseek_v3", &[("dp_shard", 2)], |o| o.ep = 2),
        ("deepseek_v3_yarn", &[("tp", 2)], |o| o.dtype = DType::BF16),
        ("qwen3_moe", &[("dp_shard", 2), ("tp", 2)], |o| (o.ep, o.etp, o.sp) = (4, Some(1), true)),
    ];
    let some = cases.into_iter().enumerate().filter(|(i, _)| taken(*i, 2));
    for (name, mesh, change) in some.map(|c| c.1) {
        let fx = Fixture::open(name);
        let mut o = Options { observe: false, ..options(mesh, false, 2) };
        change(&mut o);
        let model = fx.model(&o);
        let plan = crate::fixture::compile(&model, &o).plan;
        let start = Start::Checkpoint(fx.model(&o).checkpoint.expect("weights"));
        let targets = fx.targets();
        let train = |kernels| {
            let how =
                Run { kernels: Some(kernels), timeout: 60, threads: Some(1), ..Run::default() };
            let mut s = session(&plan, &start, &how).unwrap_or_else(|e| panic!("{}", e.render()));
            let batch = StepBatch::tokens(&fx.input_ids, &targets, false);
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

/// The norm of gradients and the factor from it are scalars beside optimizers of whole parameters,
/// the largest of which is walked by several tasks.
#[test]
fn clipped_steps_are_the_same_fused_or_not() {
    let config = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": false}"#;
    let config: serde_json::Value = serde_json::from_str(config).expect("JSON");
    let ids: Vec<i32> = (0..64).map(|i| i * 37 % 256).collect();
    let targets: Vec<i32> = (0..64).map(|i| (i + 1) * 37 % 256).collect();
    // Of 90 columns, 4 ranks have 23, 23, 23 and 21.
    for mesh in [&[][..], &[("tp", 2)], &[("tp", 4)]] {
        let train = |fuse| {
            let clip = Some(0.25);
            let o = Options { fuse, clip, observe: false, seq: 16, ..options(mesh, false, 2) };
            let o = Options { global_batch: 4, ..o };
            let done =
                shardc::compile_config(&config, &o).unwrap_or_else(|e| panic!("{}", e.render()));
            let start = Start::Random { seed: 1 };
            let how = Run { timeout: 60, threads: Some(2), ..Run::default() };
            let mut s = session(&done.stored.plan, &start, &how).expect("it starts");
            let batch = StepBatch::tokens(&ids, &targets, false);
            (1..=4)
                .map(|i| s.step(&batch, 1e-2, i).unwrap_or_else(|e| panic!("{e}")))
                .map(|r| (r.loss.expect("a loss"), r.grad_norm.expect("a norm")))
                .collect::<Vec<_>>()
        };
        let plain = train(Fuse::No);
        // Far above the bound, so that the factor is not 1.
        assert!(plain.iter().all(|x| x.1 > 0.5), "{plain:?}");
        for fused in [train(Fuse::Yes), train(Fuse::Rows)] {
            for (a, b) in fused.iter().zip(&plain) {
                // Sums of f32 in another order, through 4 steps.
                let near = |a: f32, b: f32| (a - b).abs() <= 1e-4 * b.abs();
                assert!(near(a.0, b.0) && near(a.1, b.1), "{mesh:?}: {fused:?} is not {plain:?}");
            }
        }
    }
}

/// Whatever nodes of a plan's text are marked as one launch: it is refused, or runs.
#[test]
fn marks_in_wrong_places_are_refused() {
    let fx = Fixture::open("llama_gqa");
    let o = Options { observe: false, ..options(&[("tp", 2)], true, 2) };
    let plan = crate::fixture::compile(&fx.model(&o), &o).plan;
    let (mut refused, mut taken) = (0, 0);
    for seed in 0..400 {
        let (draw, mut i) = (Stream::new(seed, "marks", 0), 0);
        let mut module = plan.module.clone();
        // Few marks, so that some programs are good.
        for n in module.funcs.iter_mut().flat_map(|f| &mut f.nodes) {
            i += 1;
            let one = draw.uniform(i) < 0.004;
            let mark =
                if draw.uniform(!i) < 0.5 { FusedWithNext::Kernel } else { FusedWithNext::Launch };
            n.fused = match (n.fused, seed % 2 == 0) {
                (FusedWithNext::No, _) | (_, false) => {
                    if one {
                        mark
                    } else {
                        FusedWithNext::No
                    }
                }
                (own, true) => {
                    if one {
                        FusedWithNext::No
                    } else {
                        own
                    }
                }
            };
        }
        if let Err(all) = verify(&module, Phase::Ranked) {
            assert!(all.iter().any(|d| d.code == "plan" && d.message.contains("in one launch")));
            refused += 1;
            continue;
        }
        taken += 1;
        let classes = rank_classes(&module, &plan.schedule, &plan.settings);
        let classes = classes.unwrap_or_else(|e| panic!("{e}"));
        let new = shardc_ir::plan::Plan { module, classes, ..plan.clone() };
        for rank in 0..2 {
            shardc_codegen::program(&new, rank).unwrap_or_else(|e| panic!("{e}"));
        }
    }
    assert!(refused > 40 && taken > 40, "{refused} refused, {taken} taken");
}

/// Kernels over rows of all ranks of a plan.
fn symbols(plan: &shardc_ir::plan::Plan) -> std::collections::BTreeSet<String> {
    let ranks = 0..plan.module.mesh.ranks();
    let all = ranks.flat_map(|r| shardc_codegen::program(plan, r).expect("kernels"));
    let own = |k: Kernel| k.rows().iter().map(|k| k.symbol.to_string()).collect::<Vec<_>>();
    all.flatten().flat_map(own).collect()
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
