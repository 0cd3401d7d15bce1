//! Devices can launch what kernels become, of sizes that no emulation has the time for.

use super::cases::kernel;
use shardc_codegen::cuda::launches;
use shardc_codegen::cuda::limits::Limits;
use shardc_ir::diag::Exit;
use shardc_ir::kernel::Kernel;

/// Every architecture that a table of limits tells from others, and one that is not known.
const ARCHS: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120", "sm_999"];

fn fits(text: &str, arch: &str) {
    let (limits, kernel) = (Limits::of(arch), kernel(text));
    let made = launches(&kernel, &limits).expect("a written kernel");
    assert!(!made.is_empty(), "{text}");
    for l in &made {
        limits.check(l).unwrap_or_else(|d| panic!("{text}: {d}"));
    }
}

/// More than 65,535 of whatever a kernel has a loop over: tokens, shards, groups, batches.
#[test]
fn grids_of_large_kernels() {
    for text in [
        "index_add[bsk,bsk->bse; e=8] f32[1,70000,2], i32[1,70000,2]",
        "index_add[bsh,bs->vh; v=7] f32[2,70000,8], i32[2,70000]",
        "take[vh,bs->bsh] bf16[7,64], i32[70000,3]",
        "top_k[bse->bsk; k=2] f32[1,70000,8]",
        "route[g=2,e=3; rows=140000; capacity=none] i32[1,70000,2]",
        "route[g=2,e=3; rows=4; capacity=none] i32[70000,2,2]",
        "dispatch[g=2,c=140000] bf16[1,70000,8], i32[1,70000,2], f32[1,70000,2]",
        "dispatch[g=2,c=4] bf16[70000,2,8], i32[70000,2,2], f32[70000,2,2]",
        "unpermute bf16[2,70000,4,8], i32[70000,2,2], f32[70000,2,2]",
        "combine_gates_grad f32[2,70000,4,8], i32[70000,2,2], f32[70000,2,8]",
        "grouped_dot bf16[2,70000,4,40], i32[2,3,70000], bf16[6,136,40]",
        "grouped_dot_t bf16[2,1,140000,40], i32[2,3,1], bf16[6,40,136]",
        "grouped_outer bf16[40000,1,2,40], i32[40000,2,1], bf16[40000,1,2,136]",
        "dot[bmk,bkn->bmn] f32[70000,1,2], f32[70000,2,3]",
        "dot[mk,kn->mn] f32[3,2], f32[2,5000000]",
        "dot[mk,kn->mn] bf16[3,2], bf16[2,9000000]",
        "transpose[abc->cba] f32[70000,2,70]",
        "rope bf16[70000,5,3,64], f32[5,32], f32[5,32]",
        "attention[0.1; mask=-8..0] bf16[2,70000,2,64], bf16[2,70000,1,64], bf16[2,70000,1,64], i32[70000], \
         i32[70000]",
        "reduce_sum[ab->a] f32[70000,9]",
        "reduce_sum[ab->b] f32[9,70000]",
        "silu f32[70000,70000]",
    ] {
        fits(text, "sm_80");
    }
}

/// Attention has sequences and heads along dims of a grid that have few blocks: beyond them it is refused.
#[test]
fn attention_of_too_many_sequences_is_refused() {
    for sizes in ["70000,3,2,4", "1,3,70000,4"] {
        let text = format!(
            "attention[0.1; mask=-8..0] f32[{sizes}], f32[{sizes}], f32[{sizes}], i32[3], i32[3]"
        );
        let limits = Limits::of("sm_90a");
        let made = launches(&kernel(&text), &limits).expect("a written kernel");
        let d = limits.check(&made[0]).unwrap_err();
        assert_eq!(d.code, "cuda-limit");
        assert!(d.message.contains("70000 blocks") && d.message.contains("65535 at most"), "{d}");
        assert!(d.help[0].contains("--microbatch"), "{d}");
    }
}

/// Widths of heads of all families, both directions, on every architecture.
#[test]
fn attention_has_the_shared_memory_that_there_is() {
    for arch in ARCHS {
        for (elem, width, value_width) in [
            ("bf16", 64, 64),
            ("bf16", 128, 128),
            ("bf16", 192, 128),
            ("bf16", 192, 192),
            ("bf16", 256, 256),
            ("f32", 64, 64),
            ("f32", 128, 128),
            ("f32", 192, 128),
            ("f32", 256, 256),
        ] {
            let qkv = format!(
                "{elem}[1,70,2,{width}], {elem}[1,70,1,{width}], {elem}[1,70,1,{value_width}]"
            );
            fits(&format!("attention[0.1; mask=-8..0] {qkv}, i32[70], i32[70]"), arch);
            let grad = format!(
                "attention_grad[0.1; mask=-8..0] {qkv}, f32[1,70,2], {elem}[1,70,2,{value_width}], \
                 f32[1,70,2], i32[70], i32[70]"
            );
            fits(&grad, arch);
            let with = |text: String| text.replace("mask=-8..0]", "mask=-8..0; segments=true]");
            fits(&with(format!("{grad}, i32[1,70], i32[1,70]")), arch);
        }
    }
}

/// What no tile makes fit is refused, with what it needs and what there is.
#[test]
fn heads_too_wide_are_refused() {
    let text = "attention[0.1; mask=-8..0] f32[1,70,2,1024], f32[1,70,1,1024], f32[1,70,1,1024], i32[70], i32[70]";
    let kernel = kernel(text);
    let check = |arch: &str| {
        let limits = Limits::of(arch);
        let made = launches(&kernel, &limits).expect("a written kernel");
        made.iter().try_for_each(|l| limits.check(l))
    };
    let d = check("sm_89").unwrap_err();
    assert_eq!((d.code, d.exit), ("cuda-limit", Exit::Unsupported));
    let said = d.render();
    for part in ["attention needs ", " B of shared memory", "sm_89 has 101376 B", "attention.cu"] {
        assert!(said.contains(part), "{said}");
    }
    // The architectures that are named have it.
    let named = said.split("--arch ").nth(1).expect("a way out").split(" or ");
    let named: Vec<&str> = named.map(str::trim).collect();
    assert!(named.contains(&"sm_90"), "{said}");
    named.iter().for_each(|arch| check(arch).unwrap_or_else(|d| panic!("{d}")));
}

/// Blocks have a multiprocessor to themselves on Hopper where there is a tile for each, no more than a twentieth of
/// the columns is not there, and the sum is long for what an element of the result moves.
#[test]
fn blocks_are_alone_where_that_is_faster() {
    let alone = |text: &str, arch: &str, added: bool| {
        let mut kernel = kernel(text);
        let Kernel::Gemm(k) = &mut kernel else { panic!("no product: {text}") };
        k.accumulate = added;
        let made = launches(&kernel, &Limits::of(arch)).expect("a written kernel");
        let text = &made[0].source.text;
        // Elements begin at multiples of 8 in all of these.
        assert!(text.contains("#define WIDTH 8\n"), "{text}");
        text.contains("#define BLOCKS 1\n")
    };
    let long = "dot[mk,nk->mn] bf16[16384,2048], bf16[8192,2048]";
    assert!(alone(long, "sm_90a", false));
    assert!(!alone(long, "sm_90", false) && !alone(long, "sm_80", false));
    for (text, added) in [
        // A short sum, and one that is short for a result that is read, too.
        ("dot[mk,nk->mn] bf16[16384,1312], bf16[8192,1312]", false),
        ("dot[mk,nk->mn] bf16[16384,2048], bf16[8192,2048]", true),
        // 64 tiles; 896 columns of 1024; and no tensor cores.
        ("dot[mk,nk->mn] bf16[1024,2048], bf16[2048,2048]", false),
        ("dot[mk,nk->mn] bf16[65536,2048], bf16[896,2048]", false),
        ("dot[mk,nk->mn] f32[16384,8192], f32[8192,8192]", false),
    ] {
        assert!(!alone(text, "sm_90a", added), "{text}, {added}");
    }
}
