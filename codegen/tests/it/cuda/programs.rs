//! Printed kernels over rows, run on the CPU, give what their nodes mean: at sizes around packs,
//! warps and blocks, in memory full of NaN behind what is there, with threads in either order, under
//! the sanitizers, and with results on the operands that they may lie on.

use super::emulator::{self, Mode};
use shardc_codegen::cuda::limits::Limits;
use shardc_codegen::{cuda, launch};
use shardc_ir::func::{Func, Module, Value};
use shardc_ir::group::launches;
use shardc_ir::interp::{self, Precision};
use shardc_ir::launch::{DeviceLaunch, KernelSource};
use shardc_ir::mesh::Mesh;
use shardc_ir::rng::Stream;
use shardc_ir::tensor::Tensor;
use shardc_ir::text;
use shardc_ir::types::DType;
use shardc_testing::{Tool, skip};
use std::sync::Arc;

/// Rows and elements of a program.
type Size = (usize, usize);

/// One, odd, around a pack, around a warp, more than a block has at once.
const SIZES: [Size; 9] =
    [(1, 1), (3, 1), (1, 17), (5, 15), (67, 16), (2, 513), (130, 33), (2, 4099), (3, 2048)];

/// Bytes behind a tensor, all NaN.
const BEHIND: usize = 64;

/// The text of a function, for R rows of C elements. `&` joins a line's node with the next one's;
/// `place` lists results by the operands on which they lie.
struct Program<'a> {
    text: &'a str,
    place: &'a [(&'a str, &'a str)],
}

pub fn function(text: &str, (rows, cols): Size) -> Func {
    let mut sized = text.to_string();
    for (letter, n) in [("R", rows), ("C", cols)] {
        for (before, after) in [("[", ","), (",", "]"), ("[", "]"), (",", ",")] {
            let now = format!("{before}{letter}{after}");
            sized = sized.replace(&now, &format!("{before}{n}{after}"));
        }
    }
    let sized = sized.replace("=C]", &format!("={cols}]"));
    let text = format!("mesh []\n\nfunc @f{}\n", sized.replace(" }", "\n}"));
    let m = text::parse(&text).unwrap_or_else(|e| panic!("{}", e.render()));
    m.funcs.into_iter().next().unwrap()
}

/// Numbers for the arguments; a bf16 is one, an index is one of a row's or none.
fn draw(f: &Func, cols: usize) -> Vec<Tensor> {
    let (stream, mut next) = (Stream::new(5, "programs", cols as u64 as u32), 0);
    let mut rng = || {
        next += 1;
        stream.uniform(next)
    };
    let mut one = |v: Value| {
        let ty = f.ty(v);
        Tensor::from_fn(&ty.sizes(), |_| match ty.dtype {
            DType::I32 => (rng() * (cols + 1) as f64).floor() - 1.0,
            DType::BF16 => f64::from(bf16(rng() as f32 * 4.0 - 2.0)),
            // A step, a learning rate, a factor.
            _ if ty.rank() == 0 => f64::from((rng() * 2.0 + 1.0) as f32),
            _ => f64::from((rng() * 4.0 - 2.0) as f32),
        })
    };
    f.args.iter().map(|p| one(p.value)).collect()
}

/// The bf16 below.
fn bf16(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & 0xffff_0000)
}

fn bytes(dtype: DType, t: &Tensor) -> Vec<u8> {
    let one = |x: &f64| match dtype {
        DType::I32 => (*x as i32).to_le_bytes().to_vec(),
        DType::BF16 => (*x as f32).to_le_bytes()[2..].to_vec(),
        _ => (*x as f32).to_le_bytes().to_vec(),
    };
    t.data.iter().flat_map(one).collect()
}

fn numbers(dtype: DType, bytes: &[u8], n: usize) -> Vec<f64> {
    let wide = |i: usize| match dtype {
        DType::BF16 => [0, 0, bytes[2 * i], bytes[2 * i + 1]],
        _ => bytes[4 * i..4 * i + 4].try_into().unwrap(),
    };
    let one = |i: usize| match dtype {
        DType::I32 => f64::from(i32::from_le_bytes(wide(i))),
        _ => f64::from(f32::from_le_bytes(wide(i))),
    };
    (0..n).map(one).collect()
}

/// A program of some size, ready to run.
struct Ready {
    f: Func,
    size: Size,
    args: Vec<Tensor>,
    want: Vec<Tensor>,
    /// By launch of the function.
    launches: Vec<Vec<DeviceLaunch>>,
    /// By value, the one whose memory it has.
    home: Vec<usize>,
}

/// What products are launched as: for groups of warps, or by single ones.
fn launched(limits: &Limits, all: Vec<DeviceLaunch>) -> Vec<DeviceLaunch> {
    let of = |l: DeviceLaunch| match limits.groups && l.source.file == "gemm.cu" {
        true => {
            let KernelSource { file, text } = &*l.source;
            let text = format!("{}{text}", emulator::AS_SM_90A);
            DeviceLaunch { source: Arc::new(KernelSource { file, text }), ..l }
        }
        false => l,
    };
    all.into_iter().map(of).collect()
}

fn ready(p: &Program, size: Size, limits: &Limits) -> Ready {
    let (mesh, f) = (Mesh::default(), function(p.text, size));
    let args = draw(&f, size.1);
    let wide: Vec<Vec<Tensor>> = args.iter().map(|t| vec![t.clone()]).collect();
    let want = interp::call(&mesh, &f, &wide, Precision::F64).unwrap_or_else(|e| panic!("{e}"));
    let made = launches(&f);
    let of = |x: &_| {
        let made = cuda::launches(&launch(&mesh, &f, x, &[]).unwrap(), limits).unwrap();
        launched(limits, made)
    };
    let number = |name: &str| {
        let named = |v: &usize| f.name(Value(*v as u32)).to_string() == format!("%{name}");
        (0..f.values.len()).find(named).unwrap_or_else(|| panic!("no %{name}"))
    };
    let mut home: Vec<usize> = (0..f.values.len()).collect();
    p.place.iter().for_each(|(result, operand)| home[number(result)] = number(operand));
    let launches = made.iter().map(of).collect();
    Ready {
        want: want.into_iter().map(|mut w| w.swap_remove(0)).collect(),
        f,
        size,
        args,
        launches,
        home,
    }
}

impl Ready {
    /// Runs all launches, and compares.
    fn check(&self, mode: Mode) {
        let (mesh, f) = (Mesh::default(), &self.f);
        let room = |v: usize| f.ty(Value(v as u32)).local_bytes(&mesh) + BEHIND;
        let mut memory: Vec<Vec<u8>> = (0..f.values.len()).map(|v| vec![0xff; room(v)]).collect();
        for (p, t) in f.args.iter().zip(&self.args) {
            let b = bytes(f.ty(p.value).dtype, t);
            memory[p.value.0 as usize][..b.len()].copy_from_slice(&b);
        }
        for (x, own) in launches(f).iter().zip(&self.launches) {
            let values: Vec<usize> =
                x.ins.iter().chain(&x.outs).map(|v| self.home[v.0 as usize]).collect();
            emulator::run_at(own, &values, &mut memory, mode);
        }
        let shown = || {
            let m = Module { funcs: vec![f.clone()], ..Module::default() };
            format!("{:?} in {mode:?}: {}", self.size, text::print(&m))
        };
        for (v, m) in memory.iter().enumerate() {
            let end = &m[m.len() - BEHIND..];
            assert!(end.iter().all(|&b| b == 0xff), "written behind a tensor: {v}, {}", shown());
        }
        let half = f.values.iter().any(|v| v.ty.dtype == DType::BF16);
        let bound = if half { 0.02 } else { 2e-5 };
        for (r, want) in f.results.iter().zip(&self.want) {
            let ty = f.ty(r.value);
            let got = numbers(ty.dtype, &memory[self.home[r.value.0 as usize]], want.data.len());
            let largest = want.data.iter().fold(1e-3f64, |a, b| a.max(b.abs()));
            for (i, (g, w)) in got.iter().zip(&want.data).enumerate() {
                let near = (g - w).abs() <= bound * largest;
                assert!(near, "{} {i}: {g} is not {w}, {}", f.name(r.value), shown());
            }
        }
    }
}

/// Runs a program at these sizes, all as one text.
fn check(text: &str, place: &[(&str, &str)], sizes: &[Size]) {
    check_for(&Limits::of("sm_80"), text, place, sizes);
}

/// The same for groups of warps, with two blocks on a multiprocessor and with one.
fn check_groups(text: &str, place: &[(&str, &str)], sizes: &[Size]) {
    let groups = Limits::of("sm_90a");
    let alone = Limits { multiprocessors: 1, depth: 0, ..groups.clone() };
    [groups, alone].iter().for_each(|limits| check_for(limits, text, place, sizes));
}

fn check_for(limits: &Limits, text: &str, place: &[(&str, &str)], sizes: &[Size]) {
    if emulator::compiler().is_none() {
        skip(Tool::Cpp, &format!("{text} would have been run on the CPU"));
        return;
    }
    let p = Program { text, place };
    let mut all: Vec<Ready> = sizes.iter().map(|&s| ready(&p, s, limits)).collect();
    cuda::join(all.iter_mut().flat_map(|r| &mut r.launches).flatten());
    for mode in emulator::modes(text) {
        all.iter().for_each(|r| r.check(mode));
    }
}

#[test]
fn norms() {
    check(
        "(%x: f32[R,C], %w: f32[C]) -> (f32[R,C], f32[R]) {
           %s = dot[rc,rc->r] %x, %x : f32[R] &
           %v = scale[0.1] %s : f32[R] &
           %e = shift[1e-5] %v : f32[R] &
           %d = rsqrt %e : f32[R] &
           %n = mul[rc,r->rc] %x, %d : f32[R,C] &
           %y = mul[rc,c->rc] %n, %w : f32[R,C]
           return %y, %d }",
        &[("y", "x")],
        &SIZES,
    );
}

#[test]
fn gradients_of_norms() {
    check(
        "(%x: f32[R,C], %g: f32[R,C], %d: f32[R], %o: f32[C]) -> (f32[R,C], f32[C]) {
           %w = dot[rc,rc->c] %g, %x : f32[C]
           %w.1 = add %w, %o : f32[C]
           %a = dot[rc,rc->r] %g, %x : f32[R] &
           %b = mul %a, %d : f32[R] &
           %c = mul[r,rc->rc] %b, %x : f32[R,C] &
           %h = sub %g, %c : f32[R,C]
           return %h, %w.1 }",
        &[("h", "g"), ("w.1", "o")],
        &SIZES,
    );
}

#[test]
fn cross_entropy() {
    check(
        "(%x: f32[R,C], %i: i32[R]) -> (f32[R,C], f32[R], f32[R]) {
           %m = reduce_max[rc->r] %x : f32[R] &
           %m.1 = stop_gradient %m : f32[R] &
           %z = sub[rc,r->rc] %x, %m.1 : f32[R,C] &
           %e = exp %z : f32[R,C] &
           %s = reduce_sum[rc->r] %e : f32[R] &
           %l = log %s : f32[R] &
           %t = take[rc,r->r] %z, %i : f32[R] &
           %n = sub %l, %t : f32[R]
           return %e, %s, %n }",
        &[("e", "x")],
        &SIZES,
    );
}

#[test]
fn gradients_of_cross_entropy() {
    check(
        "(%e: f32[R,C], %s: f32[R], %i: i32[R]) -> f32[R,C] {
           %v = at_least[0.0] %i : f32[R] &
           %n = scale[-1.0] %v : f32[R] &
           %p = index_add[r,r->rc; c=C] %n, %i : f32[R,C] &
           %d = div %v, %s : f32[R] &
           %x = expand[r->rc; c=C] %d : f32[R,C] &
           %y = mul %x, %e : f32[R,C] &
           %o = add %p, %y : f32[R,C]
           return %o }",
        &[("o", "e")],
        &SIZES,
    );
}

/// The gradient of a table that is also a matrix: rows are added to what is there, and the rest stays as it is. Of
/// one row no two positions name one place.
#[test]
fn rows_added_in_place() {
    check(
        "(%x: f32[R,C], %i: i32[R], %a: f32[C,C] grad \"w\") -> (f32[C,C] grad \"w\") {
           %p = index_add[rc,r->vc; v=C] %x, %i : f32[C,C] &
           %s = accumulate %a, %p : f32[C,C]
           return %s }",
        &[("s", "a")],
        &[(1, 1), (3, 1), (1, 17), (5, 15), (67, 16), (300, 33), (40, 300)],
    );
    check(
        "(%x: bf16[R,C], %i: i32[R], %a: f32[40,C] grad \"w\") -> (f32[40,C] grad \"w\") {
           %p = index_add[rc,r->vc; v=40; padding=zero 2] %x, %i : f32[40,C] &
           %s = accumulate %a, %p : f32[40,C]
           return %s }",
        &[("s", "a")],
        &[(67, 16), (300, 33)],
    );
}

/// Also every other function of one element; the angles are those of far positions.
#[test]
fn activations() {
    check(
        "(%g: f32[R,C], %u: f32[R,C], %i: i32[R,C]) -> (f32[R,C], f32[R,C], f32[R,C]) {
           %a = silu %g : f32[R,C] &
           %m = mul %a, %u : f32[R,C] &
           %s = logistic %g : f32[R,C] &
           %t = tanh %u : f32[R,C] &
           %x = mul %s, %t : f32[R,C] &
           %y = gelu %x : f32[R,C]
           %j = cast[f32] %i : f32[R,C] &
           %f = scale[65536.0] %j : f32[R,C] &
           %c = cos %f : f32[R,C] &
           %h = sin %f : f32[R,C] &
           %q = sub %c, %h : f32[R,C]
           return %m, %y, %q }",
        &[("m", "g")],
        &SIZES,
    );
}

#[test]
fn functions_of_a_number_and_the_smallest() {
    check(
        "(%x: f32[R,C]) -> (f32[R], f32[R,C], f32[R,C]) {
           %a = abs %x : f32[R,C] &
           %m = reduce_min[rc->r] %a : f32[R] &
           %s = sign %x : f32[R,C] &
           %q = silu[1.702] %x : f32[R,C] &
           %p = mul[rc,r->rc] %q, %m : f32[R,C]
           return %m, %s, %p }",
        &[("p", "x")],
        &SIZES,
    );
}

#[test]
fn choices_and_more_functions_of_a_number() {
    check(
        "(%x: f32[R,C], %z: f32[R,C], %w: f32[C]) -> (f32[R,C], f32[R,C], f32[R,C]) {
           %a = max[rc,c->rc] %x, %w : f32[R,C] &
           %b = min %x, %z : f32[R,C] &
           %l = less %x, %z : f32[R,C] &
           %e = equal %b, %x : f32[R,C] &
           %s = select %l, %a, %b : f32[R,C] &
           %f = erf %s : f32[R,C] &
           %p = softplus %s : f32[R,C] &
           %q = pow[3.0] %x : f32[R,C] &
           %r = add %f, %p, %q, %e : f32[R,C]
           %i = round[floor] %x : f32[R,C] &
           %j = round[ceil] %z : f32[R,C] &
           %k = round[even] %s : f32[R,C] &
           %m = add %i, %j, %k : f32[R,C]
           %t = abs %x : f32[R,C] &
           %u = pow[1.3] %t : f32[R,C]
           return %r, %m, %u }",
        &[("u", "x")],
        &SIZES,
    );
}

#[test]
fn scalars_and_rows() {
    check(
        "(%x: f32[R,C], %k: f32[]) -> (f32[R], f32[]) {
           %m = reduce_max[rc->r] %x : f32[R] &
           %e = mul[r,->r] %m, %k : f32[R]
           %q = dot[rc,rc->] %x, %x : f32[] &
           %r = sqrt %q : f32[]
           return %e, %r }",
        &[],
        &SIZES,
    );
}

/// A number of the row lies on one that all its elements read.
#[test]
fn rows_without_folds() {
    let sizes: Vec<Size> = SIZES.into_iter().chain([(2, 40001)]).collect();
    check(
        "(%x: f32[R,C], %d: f32[R]) -> (f32[R,C], f32[R]) {
           %e = exp %d : f32[R] &
           %y = mul[rc,r->rc] %x, %e : f32[R,C]
           return %y, %e }",
        &[("y", "x"), ("e", "d")],
        &sizes,
    );
}

#[test]
fn elements_of_16_bits() {
    check(
        "(%x: bf16[R,C], %y: f32[R,C]) -> (bf16[R,C], f32[R]) {
           %a = mul %x, %x : bf16[R,C] &
           %b = add %a, %x : bf16[R,C] &
           %c = cast[f32] %b : f32[R,C] &
           %d = mul %c, %y : f32[R,C] &
           %s = reduce_sum[rc->r] %d : f32[R]
           return %b, %s }",
        &[("b", "x")],
        &SIZES,
    );
}

#[test]
fn optimizers() {
    let adamw = "(%p: f32[R,C], %g: f32[R,C], %m: f32[R,C], %v: f32[R,C], %l: f32[], %t: f32[], %b: f32[]) -> (f32[R,C], f32[R,C], f32[R,C], f32[]) {
           %q = dot[rc,rc->] %g, %g : f32[] &
           %v.1 = mul %v, %v : f32[R,C] &
           %p.1, %m.1, %v.2 = adamw[0.9; beta2=0.999; eps=1e-8; decay=0.01] %p, %g, %m, %v.1, %l, %t, %b : f32[R,C], f32[R,C], f32[R,C]
           return %p.1, %m.1, %v.2, %q }";
    let place = [("p.1", "p"), ("m.1", "m"), ("v.2", "v"), ("q", "b")];
    check(adamw, &place, &SIZES);
    // A row that several blocks share: what they all read is overwritten last.
    check(adamw, &place, &[(3, 9001)]);
}

/// Kernels of one launch: those without folds are one launch of the device, the others by themselves.
#[test]
fn several_updates() {
    let args = "(%p: f32[R,C], %g: f32[R,C], %q: f32[C], %h: f32[C], %r: bf16[R], %i: bf16[R], %l: f32[], %s: f32[])";
    let updates = "%p.1 = sgd[0.01] %p, %g, %l, %s : f32[R,C] &&
           %q.1 = sgd[0] %q, %h, %l, %s : f32[C] &&
           %u = sgd[0.01] %g, %p, %l, %s : f32[R,C] &&
           %r.1 = sgd[0] %r, %i, %l, %s : bf16[R]";
    let plain = format!(
        "{args} -> (f32[R,C], f32[C], f32[R,C], bf16[R]) {{
           {updates}
           return %p.1, %q.1, %u, %r.1 }}"
    );
    let place = [("q.1", "h"), ("r.1", "r")];
    check(&plain, &place, &SIZES);
    for size in SIZES {
        let made =
            ready(&Program { text: &plain, place: &place }, size, &Limits::of("sm_80")).launches;
        assert_eq!(made.iter().map(Vec::len).collect::<Vec<_>>(), [1], "{size:?}");
    }
    let folded = format!(
        "{args} -> (f32[R], f32[R,C], f32[C], f32[R,C], bf16[R]) {{
           %n = dot[rc,rc->r] %g, %g : f32[R] &&
           {updates}
           return %n, %p.1, %q.1, %u, %r.1 }}"
    );
    check(&folded, &place, &SIZES);
}

/// Few long rows, walked by several blocks each, three times.
#[test]
fn long_rows() {
    check(
        "(%x: bf16[R,C]) -> (f32[R,C], f32[R]) {
           %w = cast[f32] %x : f32[R,C] &
           %m = reduce_max[rc->r] %w : f32[R] &
           %m.1 = stop_gradient %m : f32[R] &
           %z = sub[rc,r->rc] %w, %m.1 : f32[R,C] &
           %e = exp %z : f32[R,C] &
           %s = reduce_sum[rc->r] %e : f32[R] &
           %y = div[rc,r->rc] %e, %s : f32[R,C]
           return %y, %s }",
        &[],
        &[(2, 17001), (1, 80008)],
    );
}

#[test]
fn rows_read_along_their_other_dim() {
    check(
        "(%x: f32[C,R], %w: f32[R]) -> f32[R] {
           %y = dot[cr,cr->r] %x, %x : f32[R]
           %z = add %y, %w : f32[R]
           return %z }",
        &[("z", "w")],
        &SIZES,
    );
    check(
        "(%x: bf16[C,R], %w: f32[R], %i: i32[R]) -> (f32[R], f32[R]) {
           %m = reduce_max[cr->r] %x : bf16[R]
           %n = cast[f32] %m : f32[R] &
           %z = add %n, %w : f32[R] &
           %u = add %z, %i : f32[R]
           return %z, %u }",
        &[("z", "w")],
        &[(600, 33), (1, 17), (40, 1000), (16, 67)],
    );
}

/// Around the tiles of products, with columns that make pairs and such that do not.
const PRODUCTS: [Size; 8] =
    [(1, 1), (3, 17), (67, 16), (130, 33), (2, 513), (64, 64), (129, 260), (5, 129)];

/// A product with a bias and an activation, of which everything is kept.
pub const BIAS: &str = "(%x: bf16[R,40], %w: bf16[C,40], %b: bf16[C])
           -> (bf16[R,C], bf16[R,C], bf16[R,C]) {
           %d = dot[rk,ck->rc] %x, %w : bf16[R,C] &
           %y = add[rc,c->rc] %d, %b : bf16[R,C] &
           %z = gelu %y : bf16[R,C]
           return %d, %y, %z }";

/// The gradient of SwiGLU, whose results lie on what it reads.
pub const SWIGLU: &str = "(%y: f32[R,40], %w: f32[40,C], %g: f32[R,C], %u: f32[R,C])
           -> (f32[R,C], f32[R,C]) {
           %d = dot[rk,kc->rc] %y, %w : f32[R,C] &
           %s = logistic %g : f32[R,C] &
           %a = mul %g, %s : f32[R,C] &
           %v = mul %d, %a : f32[R,C] &
           %e = mul %d, %u : f32[R,C] &
           %h = mul %e, %s : f32[R,C]
           return %v, %h }";

/// A product of 16 bits, added to a residual of 32.
pub const RESIDUAL: &str =
    "(%x: bf16[R,40], %w: bf16[40,C], %r: f32[R,C], %s: f32[R]) -> f32[R,C] {
           %d = dot[rk,kc->rc] %x, %w : bf16[R,C] &
           %y = cast[f32] %d : f32[R,C] &
           %t = mul[rc,r->rc] %y, %s : f32[R,C] &
           %z = add %r, %t : f32[R,C]
           return %z }";

#[test]
fn biases_and_activations_of_products() {
    check(BIAS, &[], &PRODUCTS);
    check_groups(BIAS, &[], &[(20, 136), (20, 135)]);
}

#[test]
fn swiglu_and_its_gradient_of_products() {
    check(SWIGLU, &[("v", "g"), ("h", "u")], &PRODUCTS);
    let half = SWIGLU.replace("f32", "bf16");
    check_groups(&half, &[("v", "g"), ("h", "u")], &[(20, 136)]);
}

#[test]
fn residuals_and_casts_of_products() {
    check(RESIDUAL, &[("z", "r")], &PRODUCTS);
    check_groups(RESIDUAL, &[("z", "r")], &[(20, 136)]);
}

/// Several loops over results, and columns of the result that are rows of the product.
#[test]
fn batches_of_products_with_epilogues() {
    check(
        "(%x: f32[3,R,40], %w: f32[3,40,C], %b: f32[3,C]) -> f32[3,R,C] {
           %d = dot[brk,bkc->brc] %x, %w : f32[3,R,C] &
           %z = add[brc,bc->brc] %d, %b : f32[3,R,C]
           return %z }",
        &[],
        &PRODUCTS,
    );
    check(
        "(%x: f32[40,R], %w: f32[C,40], %b: f32[R]) -> f32[C,R] {
           %d = dot[kr,ck->cr] %x, %w : f32[C,R] &
           %z = add[cr,r->cr] %d, %b : f32[C,R]
           return %z }",
        &[],
        &PRODUCTS,
    );
    check(
        "(%x: f32[2,R,40], %w: f32[40,C], %m: f32[2,R]) -> f32[2,C,R] {
           %d = dot[bsk,kn->bns] %x, %w : f32[2,C,R] &
           %e = stop_gradient %d : f32[2,C,R] &
           %z = mul[bns,bs->bns] %e, %m : f32[2,C,R]
           return %z }",
        &[],
        &PRODUCTS,
    );
}
