//! Every written kernel is compiled by the real compiler: no spills, and registers within a bound.

use super::cases::{cases, kernel};
use super::programs::{BIAS, RESIDUAL, SWIGLU, function};
use shardc_codegen::cuda::limits::Limits;
use shardc_codegen::cuda::{collective, launches};
use shardc_codegen::launch;
use shardc_codegen::nvrtc::{self, Compiled};
use shardc_ir::diag::{Exit, Result};
use shardc_ir::group::launches as groups;
use shardc_ir::launch::{DeviceLaunch, KernelSource};
use shardc_ir::mesh::Mesh;
use shardc_testing::{Tool, skip, taken, taken_within};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, OnceLock};

/// Architectures that are compiled for: where warps multiply, where groups of warps do (Hopper), and Blackwell's with
/// what is special to them, of which our kernels use nothing yet: they are those of warps.
pub const ARCHS: [&str; 4] = ["sm_80", "sm_90a", "sm_100a", "sm_103a"];

/// Compiles what a sample runs.
fn check(text: &str, most: u32) {
    check_for(&ARCHS, text, most);
}

fn check_for(archs: &[&str], text: &str, most: u32) {
    let kernel = kernel(text);
    let made = |l: &Limits| launches(&kernel, l).expect("a written kernel");
    compile(text, archs, made, most);
}

/// Compiles what is launched on some architectures (every run takes one of several, by the text; some
/// texts come from a sweep that takes half of them); every entry point takes at most so many
/// registers.
pub fn compile(
    text: &str,
    archs: &[&str],
    launches: impl Fn(&Limits) -> Vec<DeviceLaunch>,
    most: u32,
) {
    let first = text.bytes().map(usize::from).sum::<usize>();
    let of = archs.len().max(2);
    for (_, arch) in archs.iter().enumerate().filter(|(i, _)| taken_within(2, first + i, of)) {
        let limits = Limits::of(arch);
        let mut sources = BTreeMap::new();
        for l in launches(&limits) {
            sources.entry(l.source.clone()).or_insert_with(Vec::new).push(l);
        }
        for (source, launches) in &sources {
            let compiled = compiled(source, arch);
            let compiled = match compiled.get().expect("it is made") {
                Ok(c) => c,
                Err(d) if d.code == "missing-library" => {
                    assert_eq!(d.exit, Exit::Environment);
                    let most = format!("without spills, in at most {most} registers");
                    skip(
                        Tool::Nvrtc,
                        &format!("{text} would have been compiled for {arch}, {most}"),
                    );
                    return;
                }
                Err(d) => panic!("{d}"),
            };
            assert!(compiled.cubin.starts_with(b"\x7fELF"), "{text}");
            assert!(compiled.losses.is_empty(), "{text} for {arch}: {:?}", compiled.losses);
            for l in launches {
                let u = compiled.usage.iter().find(|u| u.entry == l.entry).expect(&l.entry);
                println!(
                    "{arch} {:24} {:3} registers, {:6} B shared, {:3} threads: {text}",
                    l.entry,
                    u.registers,
                    u.shared + l.shared,
                    l.threads
                );
                assert_eq!((u.spilled, u.stack), (0, 0), "{text} for {arch}: {u:?}");
                assert!(u.registers <= most, "{text} for {arch}: {u:?}");
                assert!(u.registers * l.threads <= 65536, "{text} for {arch}: {u:?}");
                limits.check(l).unwrap_or_else(|d| panic!("{text} for {arch}: {d}"));
                let all = u.shared + l.shared;
                assert!(all <= limits.shared, "{text} for {arch}: {u:?}, {}", l.shared);
            }
        }
    }
}

/// What a text became, once it has.
type Made = Arc<OnceLock<Result<Compiled>>>;

/// What a text becomes for an architecture. Several tests have some texts: each is compiled once.
fn compiled(source: &Arc<KernelSource>, arch: &str) -> Made {
    static ALL: Mutex<BTreeMap<(Arc<KernelSource>, String), Made>> = Mutex::new(BTreeMap::new());
    let made = ALL.lock().unwrap().entry((source.clone(), arch.into())).or_default().clone();
    made.get_or_init(|| nvrtc::compile(source, arch));
    made
}

/// Where heads are wide, tiles are smaller on sm_89.
fn archs(width: usize) -> &'static [&'static str] {
    if width < 128 { &ARCHS } else { &["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a"] }
}

/// Attention with heads of these widths, without and with a softcap.
fn attention(elem: &str, width: usize, value_width: usize, most: u32) {
    for softcap in ["", "; softcap=50"] {
        check_for(
            archs(width),
            &format!(
                "attention[0.1; mask=-8..0{softcap}] {elem}[1,70,2,{width}], {elem}[1,70,1,{width}], \
                 {elem}[1,70,1,{value_width}], i32[70], i32[70]"
            ),
            most,
        );
    }
}

/// The same of its gradients; `most` without and with a softcap.
fn attention_grad(elem: &str, width: usize, value_width: usize, most: [u32; 2]) {
    for (softcap, most) in ["", "; softcap=50"].into_iter().zip(most) {
        check_for(
            archs(width),
            &format!(
                "attention_grad[0.1; mask=-8..0{softcap}] {elem}[1,70,2,{width}], \
                 {elem}[1,70,1,{width}], {elem}[1,70,1,{value_width}], f32[1,70,2], \
                 {elem}[1,70,2,{value_width}], f32[1,70,2], i32[70], i32[70]"
            ),
            most,
        );
    }
}

#[test]
fn attention_fits() {
    let all = [(32, 128), (64, 128), (80, 128), (128, 168), (256, 255)];
    for (_, (width, most)) in all.into_iter().enumerate().filter(|(i, _)| taken(*i, 2)) {
        attention("bf16", width, width, most);
    }
    attention("f32", 80, 80, 128);
    attention("f32", 256, 256, 255);
    attention("bf16", 192, 128, 255);
    attention("bf16", 7, 9, 128);
}

/// Segments cost a few registers.
#[test]
fn attention_of_segments_fits() {
    let qkv =
        |width: usize| format!("bf16[1,70,2,{width}], bf16[1,70,1,{width}], bf16[1,70,1,{width}]");
    let seen = "i32[70], i32[70], i32[1,70], i32[1,70]";
    for (width, most, backward) in [(64, 128, 210), (128, 168, 255)] {
        let (mask, qkv) = ("0.1; mask=causal; segments=true", qkv(width));
        check_for(archs(width), &format!("attention[{mask}] {qkv}, {seen}"), most);
        let of = format!("f32[1,70,2], bf16[1,70,2,{width}], f32[1,70,2]");
        check_for(archs(width), &format!("attention_grad[{mask}] {qkv}, {of}, {seen}"), backward);
    }
}

#[test]
fn gradients_of_attention_fit() {
    let all = [(32, 168, 168), (64, 210, 210), (80, 168, 168), (128, 255, 255), (256, 255, 255)];
    for (_, (width, most, capped)) in all.into_iter().enumerate().filter(|(i, _)| taken(i + 1, 2)) {
        attention_grad("bf16", width, width, [most, capped]);
    }
    attention_grad("f32", 80, 80, [168; 2]);
    attention_grad("f32", 128, 128, [255; 2]);
    attention_grad("bf16", 192, 128, [255; 2]);
}

/// On sm_90a groups of warps multiply, and nowhere else: with these last operands, scales of the sums,
/// of `a` and of `b`, and whether k runs down the rows of a's tile, if it is one, and of b's. Tiles
/// begin at multiples of 1024 bytes, as what lies before them in shared memory is made one.
#[test]
fn groups_multiply_on_hopper() {
    // Scores are begun anew by their first product.
    let attention = &["0, 1, 1, 0, 0;", "1, 1, 1, 0, 0;", "1, 1, 1, 1;"][..];
    for (text, last) in [
        (
            "attention[0.1; mask=-8..0] bf16[1,70,2,128], bf16[1,70,1,128], bf16[1,70,1,128], i32[70], i32[70]",
            attention,
        ),
        (
            "attention_grad[0.06; mask=causal] bf16[1,40,1,256], bf16[1,33,1,256], bf16[1,33,1,256], \
             f32[1,40,1], bf16[1,40,1,256], f32[1,40,1], i32[40], i32[33]",
            attention,
        ),
        ("dot[mk,kn->mn] bf16[130,72], bf16[72,136]", &["1, 1, 1, 0, 1;"]),
        ("dot[mk,nk->mn] bf16[130,72], bf16[136,72]", &["1, 1, 1, 0, 0;"]),
        ("dot[km,nk->mn] bf16[72,136], bf16[136,72]", &["1, 1, 1, 1, 0;"]),
        ("grouped_outer bf16[2,2,150,40], i32[2,3,2], bf16[2,2,150,136]", &["1, 1, 1, 1, 1;"]),
    ] {
        let case = cases(text, |_| {}).swap_remove(0);
        for l in launches(&case.kernel, &Limits::of("sm_80")).expect("a written kernel") {
            // Of a virtual architecture there is a text alone.
            for (arch, groups) in [
                ("compute_80", false),
                ("compute_90", false),
                ("compute_90a", true),
                ("compute_100a", false),
                ("compute_103a", false),
            ] {
                let made = nvrtc::instructions(&l.source, arch);
                if made.as_ref().is_err_and(|d| d.code == "missing-library") {
                    skip(Tool::Nvrtc, &format!("products of {text} would have been looked at"));
                    return;
                }
                let made = made.unwrap_or_else(|d| panic!("{d}"));
                let products = made.lines().filter(|l| l.contains("wgmma.mma_async"));
                // What follows the descriptor of b.
                let flags =
                    |l: &'_ str| Some(l.rsplit_once("%rd")?.1.split_once(", ")?.1.to_string());
                let found: BTreeSet<_> = products.map(|l| flags(l).expect(l)).collect();
                let want = if groups { last } else { &[] };
                assert!(found.iter().eq(want), "{text} for {arch}: {found:?}");
                assert_eq!(made.contains("mma.sync"), !groups, "{text} for {arch}");
            }
            let compiled = compiled(&l.source, "sm_90a");
            let compiled = compiled.get().expect("it is made").as_ref().unwrap();
            let u = compiled.usage.iter().find(|u| u.entry == l.entry).expect("an entry point");
            assert_eq!(u.shared % 1024, 0, "{text}: {u:?}");
        }
    }
}

/// Where a block has a multiprocessor to itself, which has 65536 registers.
fn check_alone(text: &str, made: impl Fn(&Limits) -> Vec<DeviceLaunch>) {
    let alone = |l: &Limits| made(&Limits { multiprocessors: 1, depth: 0, ..l.clone() });
    assert!(alone(&Limits::of("sm_90a"))[0].source.text.contains("#define BLOCKS 1\n"), "{text}");
    compile(text, &["sm_90a", "sm_90a"], alone, 255);
}

#[test]
fn products_of_blocks_that_are_alone_fit() {
    for text in [
        "dot[mk,kn->mn] bf16[130,72], bf16[72,136]",
        "dot[mk,nk->mn] bf16[130,72], bf16[136,72]",
        "dot[km,kn->mn] bf16[72,136], bf16[72,136]",
        "dot[mk,kn->mn] f16[33,67], f16[67,135]",
    ] {
        let kernel = kernel(text);
        check_alone(text, |l| launches(&kernel, l).expect("a written kernel"));
    }
    for text in [BIAS, SWIGLU, RESIDUAL] {
        let f = function(&text.replace("f32", "bf16"), (130, 136));
        let kernel = launch(&Mesh::default(), &f, &groups(&f)[0], &[]).expect("a kernel");
        check_alone(text, |l| launches(&kernel, l).expect("a launch"));
    }
}

#[test]
fn products_fit() {
    check("dot[mk,kn->mn] bf16[130,72], bf16[72,136]", 128);
    check("dot[mk,nk->mn] bf16[130,72], bf16[136,72]", 128);
    check("dot[km,kn->nm] bf16[40,72], bf16[40,136]", 128);
    check("dot[mk,kn->mn] bf16[33,67], bf16[67,35]", 128);
    check("dot[mk,kn->mn] f32[130,72], f32[72,136]", 128);
    check("dot[kabm,kan->nbma] f32[3,5,2,3], f32[3,5,4]", 128);
    check("grouped_dot bf16[2,2,150,40], i32[2,3,2], bf16[6,136,40]", 128);
    check("grouped_dot_t bf16[2,2,150,40], i32[2,3,2], bf16[6,40,136]", 128);
    check("grouped_outer bf16[2,2,150,40], i32[2,3,2], bf16[2,2,150,136]", 128);
}

#[test]
fn epilogues_fit() {
    for text in [BIAS, SWIGLU, RESIDUAL, &SWIGLU.replace("f32", "bf16")] {
        for size in [(130, 136), (33, 35)] {
            let f = function(text, size);
            let kernel = launch(&Mesh::default(), &f, &groups(&f)[0], &[]).expect("a kernel");
            let made = |l: &Limits| launches(&kernel, l).expect("a launch");
            compile(text, &ARCHS, made, 128);
        }
    }
}

#[test]
fn collectives_fit() {
    let one = |entry: &'static str| DeviceLaunch {
        source: collective(),
        entry: entry.into(),
        grid: [1; 3],
        threads: 256,
        shared: 0,
        words: vec![],
    };
    let made = |_: &Limits| ["copy_region", "fold_regions"].map(one).to_vec();
    compile("collectives", &ARCHS, made, 64);
}

#[test]
fn moves_fit() {
    check("transpose[abc->cba] f32[5,7,9]", 40);
    check("pad[d=100; start=32] bf16[3,7,40]", 40);
    check("cumsum[1] bf16[3,70,33]", 40);
    check("take[vh,bs->bsh] bf16[7,64], i32[3,5]", 40);
    check("index_add[bsh,bs->vh; v=7] f32[3,5,33], i32[3,5]", 40);
    check("index_add[bs,bs->bsv; v=7] f32[3,5], i32[3,5]", 40);
    check("rope bf16[2,5,3,64], f32[5,32], f32[5,32]", 40);
    check("top_k[bse->bsk; k=8] f32[2,33,130]", 40);
    check("route[g=2,e=3; rows=66; capacity=none] i32[3,33,2]", 40);
    check("dispatch[g=2,c=33] bf16[3,33,72], i32[3,33,2], f32[3,33,2]", 40);
    check("unpermute bf16[2,3,33,72], i32[3,33,2], f32[3,33,2]", 40);
    check("combine_gates_grad f32[2,3,33,72], i32[3,33,2], f32[3,33,72]", 40);
}

#[test]
fn recurrences_fit() {
    for [k, v] in [[128, 128], [128, 64], [16, 16]] {
        let (key, g) = (format!("f32[1,256,2,{k}]"), "f32[1,256,2]");
        let ins = format!("{key}, {key}, {g}, f32[1,256,2,{v}]");
        let (d_o, state) = (format!("f32[1,256,2,{v}]"), format!("f32[1,2,{k},{v}]"));
        check(&format!("scan[plain] {ins}"), 128);
        check(
            &format!("scan[delta; segments=true; start=true] {ins}, {g}, i32[1,256], {state}"),
            128,
        );
        check(&format!("scan_grad[delta] {ins}, {d_o}, {state}, {g}"), 128);
    }
}
