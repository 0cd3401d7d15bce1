//! Products with what becomes of their results, in one launch.

use super::*;

/// Products of R rows, C columns and K terms with what becomes of them, and how many launches they take.
const EPILOGUES: [(&str, usize); 13] = [
    // a bias and an activation
    (
        "(%x: f32[R,K], %w: f32[K,C], %b: f32[C]) -> f32[R,C] {
       %d = dot[rk,kc->rc] %x, %w : f32[R,C]
       %y = add[rc,c->rc] %d, %b : f32[R,C]
       %z = gelu %y : f32[R,C]
       return %z }",
        1,
    ),
    // the same of 16-bit numbers, rounded wherever the types say so
    (
        "(%x: bf16[R,K], %w: bf16[C,K], %b: bf16[C]) -> (bf16[R,C], bf16[R,C]) {
       %d = dot[rk,ck->rc] %x, %w : bf16[R,C]
       %y = add[rc,c->rc] %d, %b : bf16[R,C]
       %z = gelu %y : bf16[R,C]
       return %y, %z }",
        1,
    ),
    // SwiGLU, whose products are kept
    (
        "(%x: f32[R,K], %w: f32[C,K], %v: f32[C,K]) -> (f32[R,C], f32[R,C], f32[R,C]) {
       %g = dot[rk,ck->rc] %x, %w : f32[R,C]
       %u = dot[rk,ck->rc] %x, %v : f32[R,C]
       %a = silu %g : f32[R,C]
       %m = mul %a, %u : f32[R,C]
       return %g, %u, %m }",
        2,
    ),
    // and its gradient, which may lie on them
    (
        "(%y: f32[R,K], %w: f32[K,C], %g: f32[R,C], %u: f32[R,C]) -> (f32[R,C], f32[R,C]) {
       %d = dot[rk,kc->rc] %y, %w : f32[R,C]
       %s = logistic %g : f32[R,C]
       %a = mul %g, %s : f32[R,C]
       %v = mul %d, %a : f32[R,C]
       %e = mul %d, %u : f32[R,C]
       %h = mul %e, %s : f32[R,C]
       return %v, %h }",
        1,
    ),
    // a residual, of another type than the product
    (
        "(%x: bf16[R,K], %w: bf16[K,C], %r: f32[R,C]) -> f32[R,C] {
       %d = dot[rk,kc->rc] %x, %w : bf16[R,C]
       %y = cast[f32] %d : f32[R,C]
       %z = add %r, %y : f32[R,C]
       return %z }",
        1,
    ),
    // f32 that become 16 bits
    (
        "(%x: f32[R,K], %w: f32[K,C]) -> bf16[R,C] {
       %d = dot[rk,kc->rc] %x, %w : f32[R,C]
       %s = scale[0.125] %d : f32[R,C]
       %z = cast[bf16] %s : bf16[R,C]
       return %z }",
        1,
    ),
    // a number for each row, and one for all
    (
        "(%x: f32[R,K], %w: f32[K,C], %s: f32[R], %t: f32[]) -> f32[R,C] {
       %d = dot[rk,kc->rc] %x, %w : f32[R,C]
       %y = mul[rc,r->rc] %d, %s : f32[R,C]
       %z = mul[rc,->rc] %y, %t : f32[R,C]
       return %z }",
        1,
    ),
    // columns of the result are rows of the product
    (
        "(%x: f32[K,R], %w: f32[C,K], %b: f32[R]) -> f32[C,R] {
       %d = dot[kr,ck->cr] %x, %w : f32[C,R]
       %z = add[cr,r->cr] %d, %b : f32[C,R]
       return %z }",
        1,
    ),
    // several dims, and one of products
    (
        "(%x: f32[3,R,K], %w: f32[3,K,C], %b: f32[3,C]) -> f32[3,R,C] {
       %d = dot[brk,bkc->brc] %x, %w : f32[3,R,C]
       %z = add[brc,bc->brc] %d, %b : f32[3,R,C]
       return %z }",
        1,
    ),
    // an operand of the product that is read once more, over which nothing may lie
    (
        "(%x: f32[R,K], %w: f32[K,K], %r: f32[R,K]) -> f32[R,K] {
       %d = dot[rk,kc->rc] %x, %w : f32[R,K]
       %y = add %d, %x : f32[R,K]
       %z = mul %y, %r : f32[R,K]
       return %z }",
        1,
    ),
    // rows of two dims, between which columns lie, and a value that only looks like another
    (
        "(%x: f32[2,R,K], %w: f32[K,C], %m: f32[2,R]) -> f32[2,C,R] {
       %d = dot[bsk,kn->bns] %x, %w : f32[2,C,R]
       %e = stop_gradient %d : f32[2,C,R]
       %z = mul[bns,bs->bns] %e, %m : f32[2,C,R]
       return %z }",
        1,
    ),
    // none: a number for some of the loops of a row
    (
        "(%x: f32[2,R,K], %w: f32[K,C], %m: f32[2]) -> f32[2,R,C] {
       %d = dot[bsk,kn->bsn] %x, %w : f32[2,R,C]
       %z = mul[bsn,b->bsn] %d, %m : f32[2,R,C]
       return %z }",
        2,
    ),
    // none: a fold reads the product
    (
        "(%x: f32[R,K], %w: f32[K,C]) -> f32[R,C] {
       %d = dot[rk,kc->rc] %x, %w : f32[R,C]
       %m = reduce_max[rc->r] %d : f32[R]
       %z = sub[rc,r->rc] %d, %m : f32[R,C]
       return %z }",
        2,
    ),
];

/// Rows, columns, terms: one, few rows, around a tile, a block of an epilogue, a region and what is
/// packed of k at once.
const PRODUCTS: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (1, 300, 70),
    (7, 513, 33),
    (8, 256, 64),
    (13, 31, 5),
    (73, 257, 40),
    (150, 520, 1100),
    (1040, 40, 20),
    (20, 1550, 600),
];

/// A product and its epilogue as one launch, compiled or interpreted, with any number of threads and
/// with results on the operands that they may lie on.
#[test]
fn epilogues_give_the_bits_of_products_alone() {
    let mesh = Mesh::default();
    let lower = |f: &Func| -> Vec<Kernel> {
        let one = |x| shardc_codegen::launch(&mesh, f, x, &[]).expect("a kernel");
        launches(f).iter().map(one).collect()
    };
    let mut all: Vec<(Func, Func)> = vec![];
    for (p, want) in EPILOGUES {
        for (rows, cols, terms) in PRODUCTS {
            let dims = |part: &str| {
                let Some(at) = part.rfind("32[").or(part.rfind("16[")) else { return part.into() };
                let (before, dims) = part.split_at(at);
                let sizes = [('R', rows), ('C', cols), ('K', terms)];
                let sized = |d: String, (l, n): (char, usize)| d.replace(l, &n.to_string());
                before.to_string() + &sizes.into_iter().fold(dims.into(), sized)
            };
            let p: String = p.split_inclusive(']').map(dims).collect();
            let mut alone = parsed(&p, (rows, cols));
            let mut fused = alone.clone();
            group(&mesh, &mut alone, &Options { fuse: Fuse::Rows, ..Options::default() });
            group(&mesh, &mut fused, &Options::default());
            assert_eq!(launches(&fused).len(), want, "{}", text_of(&fused));
            all.push((alone, fused));
        }
    }
    let programs: Program = all.iter().flat_map(|(a, b)| [lower(a), lower(b)]).collect();
    let functions = shardc_codegen::c::Functions::of(programs.iter().flatten());
    let objects = shardc_codegen::c::compile(&functions, MINUTES)
        .unwrap_or_else(|e| panic!("{}", e.render()));
    let native = Arc::new(Native::load(&objects, std::iter::once(&programs)).expect("it loads"));
    let (stream, mut next) = (Stream::new(5, "epilogues", 0), 0);
    let mut rng = || {
        next += 1;
        stream.uniform(next)
    };
    let (mut fused, mut laid) = (0, 0);
    for ((f, g), kernels) in all.iter().zip(programs.chunks(2)) {
        fused += kernels[1].iter().filter(|k| matches!(k, Kernel::GemmThen(_))).count();
        let args = draw(f, 1, &mut rng);
        let want = bits(&results(f, &kernels[0], &args, Some(native.clone()), 1, &[]));
        for (compiled, threads) in [(false, 1), (true, 1), (true, 2), (true, 3)] {
            let native = compiled.then(|| native.clone());
            let got = results(g, &kernels[1], &args, native, threads, &[]);
            assert_eq!(bits(&got), want, "{threads} threads: {}", text_of(g));
        }
        for pair in over(g) {
            laid += 1;
            let got = results(g, &kernels[1], &args, Some(native.clone()), 2, &[pair]);
            assert_eq!(bits(&got), want, "{pair:?}: {}", text_of(g));
        }
    }
    assert_eq!(fused, 11 * PRODUCTS.len());
    assert!(laid > 30, "only {laid} results lie on operands");
}
