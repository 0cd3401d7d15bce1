//! Every written kernel, run on the CPU, gives what its op means: on odd sizes, in padded memory full
//! of NaN, with threads in either order, and touching nothing but its operands.

use super::cases::{Case, cases};
use super::device;
use super::emulator::{self, Mode};
use shardc_codegen::cuda::launches;
use shardc_codegen::cuda::limits::Limits;
use shardc_ir::kernel::Kernel;
use shardc_ir::launch::{DeviceLaunch, KernelSource, Word};
use shardc_ir::tensor::Tensor;
use shardc_ir::types::DType;
use shardc_testing::{Tool, nightly, skip, taken};
use std::sync::Arc;

/// Runs cases: the first in all these modes, the others, whose memory has more padding, with threads
/// in either order by turns. Tolerances are parts of the largest element: a bf16 has half a unit in
/// the last place of 2^-8, an f16 of 2^-11, and products of rounded weights a few of them.
fn run(text: &str, cases: &[Case], modes: &[Mode]) {
    run_as(text, cases, (modes, Limits::of("sm_80")), |l, _| l);
}

/// The same of launches for an architecture that are changed before, the first of them or another one.
fn run_as(
    text: &str,
    cases: &[Case],
    (modes, limits): (&[Mode], Limits),
    change: fn(DeviceLaunch, bool) -> DeviceLaunch,
) {
    if emulator::compiler().is_none() {
        skip(Tool::Cpp, &format!("{text} would have been run on the CPU"));
        return;
    }
    let tolerance = match (text.contains("bf16"), text.contains("f16")) {
        (true, _) => 3.0 / 256.0,
        (false, true) => 3.0 / 2048.0,
        (false, false) => 2e-5,
    };
    for (i, case) in cases.iter().enumerate() {
        let launches = launches(&case.kernel, &limits).expect("a written kernel");
        let launches: Vec<DeviceLaunch> = launches.into_iter().map(|l| change(l, i == 0)).collect();
        let turn = [[Mode::Plain, Mode::Reversed][i % 2]];
        for &mode in if i == 0 { modes } else { &turn } {
            let mut memory = case.memory.clone();
            assert_eq!(emulator::run(&launches, &mut memory, mode), 0, "{}", case.what);
            case.check(&memory, tolerance);
        }
    }
}

/// The sample whole.
fn check(text: &str) {
    run(text, &cases(text, |_| {})[..1], &[Mode::Plain, Mode::Reversed]);
}

/// Also its pieces, which are padded, and some under the sanitizers.
fn check_pieces(text: &str) {
    run(text, &cases(text, |_| {}), &emulator::modes(text));
}

/// As on sm_90a, where groups of four warps multiply together; those of the whole sample do.
fn with_groups(l: DeviceLaunch, whole: bool) -> DeviceLaunch {
    let KernelSource { file, text } = &*l.source;
    let all = if whole { "static_assert(GROUPS);\n" } else { "" };
    let text = format!("{}{text}\n{all}", emulator::AS_SM_90A);
    DeviceLaunch { source: Arc::new(KernelSource { file, text }), ..l }
}

fn check_groups(text: &str) {
    run_as(
        text,
        &cases(text, |_| {})[..1],
        (&[Mode::Plain, Mode::Reversed], Limits::of("sm_90a")),
        with_groups,
    );
}

/// As where there are so many tiles that each block has a multiprocessor to itself.
fn check_alone(text: &str) {
    let limits = Limits { multiprocessors: 1, depth: 0, ..Limits::of("sm_90a") };
    run_as(
        text,
        &cases(text, |_| {})[..1],
        (&[Mode::Plain, Mode::Reversed], limits),
        |l, whole| {
            let l = with_groups(l, whole);
            let text = format!("{}\nstatic_assert(ALONE);\n", l.source.text);
            DeviceLaunch { source: Arc::new(KernelSource { file: l.source.file, text }), ..l }
        },
    );
}

fn check_pieces_with_groups(text: &str) {
    run_as(text, &cases(text, |_| {}), (&emulator::modes(text), Limits::of("sm_90a")), with_groups);
}

#[test]
fn attention_in_f32() {
    check_pieces(
        "attention[0.3; mask=-8..0] f32[2,35,4,3], f32[2,35,2,3], f32[2,35,2,2], i32[35], i32[35]",
    );
    check(
        "attention[0.2; mask=causal] f32[1,70,2,32], f32[1,70,1,32], f32[1,70,1,32], i32[70], i32[70]",
    );
    check(
        "attention[0.9; mask=-19..0; softcap=2.5] f32[1,40,2,8], f32[1,40,1,8], f32[1,40,1,8], i32[40], i32[40]",
    );
    for scale in ["-0.7", "0"] {
        let sizes = "f32[1,40,2,8], f32[1,40,1,8], f32[1,40,1,8]";
        check(&format!("attention[{scale}; mask=-19..0] {sizes}, i32[40], i32[40]"));
        check(&format!(
            "attention_grad[{scale}; mask=-19..0] {sizes}, f32[1,40,2], f32[1,40,2,8], f32[1,40,2], i32[40], i32[40]"
        ));
    }
}

/// Equal scores, which are large, have equal weights, in whichever tile of keys they are.
#[test]
fn attention_of_many_keys() {
    let text = "attention[80.37; mask=full] f32[1,16,1,16], f32[1,4096,1,16], f32[1,4096,1,16], i32[16], i32[4096]";
    let even = |args: &mut Vec<Tensor>| {
        args[0] = Tensor::from_fn(&[1, 16, 1, 16], |_| 1.3);
        args[1] = Tensor::from_fn(&[1, 4096, 1, 16], |_| 1.7);
        args[2] = Tensor::from_fn(&[1, 4096, 1, 16], |i| if i[1] < 2048 { 0.0 } else { 2.0 });
    };
    run(text, &cases(text, even)[..1], &[Mode::Reversed]);
}

/// All, both sides, and chunks: forward and backward, also with products by groups.
#[test]
fn attention_of_other_masks() {
    for mask in ["full", "-9..4", "causal/16", "-20..30/24", "..3"] {
        let sizes = "f32[1,35,4,3], f32[1,40,2,3], f32[1,40,2,2]";
        check_pieces(&format!("attention[0.3; mask={mask}] {sizes}, i32[35], i32[40]"));
        check_pieces(&format!(
            "attention_grad[0.3; mask={mask}] {sizes}, f32[1,35,4], f32[1,35,4,2], f32[1,35,4], i32[35], i32[40]"
        ));
        let sizes = "bf16[1,70,2,64], bf16[1,70,1,64], bf16[1,70,1,64]";
        check_groups(&format!("attention[0.1; mask={mask}] {sizes}, i32[70], i32[70]"));
        check_groups(&format!(
            "attention_grad[0.1; mask={mask}] {sizes}, f32[1,70,2], bf16[1,70,2,64], f32[1,70,2], i32[70], i32[70]"
        ));
    }
}

#[test]
fn attention_with_slopes() {
    for (mask, cap) in [("causal", ""), ("-9..4", "; softcap=2.5")] {
        let sizes = "f32[1,35,4,3], f32[1,40,2,3], f32[1,40,2,2]";
        check_pieces(&format!(
            "attention[0.3; mask={mask}{cap}; slopes=true] {sizes}, i32[35], i32[40], f32[4]"
        ));
        check_pieces(&format!(
            "attention_grad[0.3; mask={mask}{cap}; slopes=true] {sizes}, f32[1,35,4], f32[1,35,4,2], f32[1,35,4], i32[35], i32[40], f32[4]"
        ));
        let sizes = "bf16[1,70,2,64], bf16[1,70,1,64], bf16[1,70,1,64]";
        check_groups(&format!(
            "attention[0.1; mask={mask}{cap}; slopes=true] {sizes}, i32[70], i32[70], f32[2]"
        ));
        check_groups(&format!(
            "attention_grad[0.1; mask={mask}{cap}; slopes=true] {sizes}, f32[1,70,2], bf16[1,70,2,64], f32[1,70,2], i32[70], i32[70], f32[2]"
        ));
    }
}

/// A number for each head and offset, some of which are farther than there are numbers; and its gradient.
#[test]
fn attention_with_a_bias_by_offset() {
    for (mask, cap, offsets) in
        [("full", "", 79), ("causal", "", 79), ("-9..4", "; softcap=2.5", 11)]
    {
        let sizes = "f32[2,35,4,3], f32[2,40,2,3], f32[2,40,2,2]";
        let of = format!("i32[35], i32[40], f32[4,{offsets}]");
        let grad = "f32[2,35,4], f32[2,35,4,2], f32[2,35,4]";
        check_pieces(&format!("attention[0.3; mask={mask}{cap}; bias=true] {sizes}, {of}"));
        check_pieces(&format!(
            "attention_grad[0.3; mask={mask}{cap}; bias=true] {sizes}, {grad}, {of}"
        ));
        let drawn = "i32[2,35], i32[2,40], i32[3], i32[2,35]";
        let more = "bias=true; segments=true; kept=0.6 a";
        check(&format!("attention[0.3; mask={mask}{cap}; {more}] {sizes}, {of}, {drawn}"));
        check(&format!(
            "attention_grad[0.3; mask={mask}{cap}; {more}] {sizes}, {grad}, {of}, {drawn}"
        ));
        let sizes = "bf16[1,70,2,64], bf16[1,70,1,64], bf16[1,70,1,64]";
        let of = format!("i32[70], i32[70], f32[2,{offsets}]");
        check_groups(&format!("attention[0.1; mask={mask}{cap}; bias=true] {sizes}, {of}"));
        check_groups(&format!(
            "attention_grad[0.1; mask={mask}{cap}; bias=true] {sizes}, f32[1,70,2], bf16[1,70,2,64], f32[1,70,2], {of}"
        ));
    }
}

/// Only keys of a query's own segment, with what else says who is seen; rows of a batch have other segments.
#[test]
fn attention_of_segments() {
    for (mask, more, of) in
        [("causal", "", ""), ("-9..4", "; softcap=2.5; slopes=true", ", f32[4]")]
    {
        let sizes = "f32[2,35,4,3], f32[2,40,2,3], f32[2,40,2,2]";
        let own = "i32[2,35], i32[2,40]";
        check_pieces(&format!(
            "attention[0.3; mask={mask}{more}; segments=true] {sizes}, i32[35], i32[40]{of}, {own}"
        ));
        check_pieces(&format!(
            "attention_grad[0.3; mask={mask}{more}; segments=true] {sizes}, f32[2,35,4], f32[2,35,4,2], f32[2,35,4], i32[35], i32[40]{of}, {own}"
        ));
        let drawn = "i32[3], i32[2,35]";
        check(&format!(
            "attention_grad[0.3; mask={mask}{more}; segments=true; kept=0.6 a] {sizes}, f32[2,35,4], f32[2,35,4,2], f32[2,35,4], i32[35], i32[40]{of}, {own}, {drawn}"
        ));
    }
    let sizes = "bf16[2,70,2,64], bf16[2,70,1,64], bf16[2,70,1,64]";
    let own = "i32[2,70], i32[2,70]";
    check_groups(&format!(
        "attention[0.1; mask=causal; segments=true] {sizes}, i32[70], i32[70], {own}"
    ));
    check_groups(&format!(
        "attention_grad[0.1; mask=causal; segments=true] {sizes}, f32[2,70,2], bf16[2,70,2,64], f32[2,70,2], i32[70], i32[70], {own}"
    ));
}

/// Dropout of probabilities, of heads that are a rank's part of all.
#[test]
fn attention_that_drops() {
    for (mask, more, of) in
        [("causal", "", ""), ("-9..4", "; softcap=2.5; slopes=true", ", f32[4]")]
    {
        let sizes = "f32[2,35,4,3], f32[2,40,2,3], f32[2,40,2,2]";
        let drawn = "i32[3], i32[2,35]";
        let kept = "kept=0.6 h.0.attn";
        check_pieces(&format!(
            "attention[0.3; mask={mask}{more}; {kept}] {sizes}, i32[35], i32[40]{of}, {drawn}"
        ));
        check_pieces(&format!(
            "attention_grad[0.3; mask={mask}{more}; {kept}] {sizes}, f32[2,35,4], f32[2,35,4,2], f32[2,35,4], i32[35], i32[40]{of}, {drawn}"
        ));
    }
    let sizes = "bf16[1,70,2,64], bf16[1,70,1,64], bf16[1,70,1,64]";
    check_groups(&format!(
        "attention[0.1; mask=causal; kept=0.9 a] {sizes}, i32[70], i32[70], i32[3], i32[1,70]"
    ));
    check_groups(&format!(
        "attention_grad[0.1; mask=causal; kept=0.9 a] {sizes}, f32[1,70,2], bf16[1,70,2,64], f32[1,70,2], i32[70], i32[70], i32[3], i32[1,70]"
    ));
}

#[test]
fn attention_in_bf16() {
    check_pieces(
        "attention[0.1; mask=-16..0] bf16[1,70,4,64], bf16[1,70,2,64], bf16[1,70,2,64], i32[70], i32[70]",
    );
    check(
        "attention[0.3; mask=causal] bf16[1,67,2,7], bf16[1,67,2,7], bf16[1,67,2,9], i32[67], i32[67]",
    );
    check(
        "attention[0.1; mask=causal] bf16[1,1,2,80], bf16[1,130,1,80], bf16[1,130,1,80], i32[1], i32[130]",
    );
    check_pieces(
        "attention[0.3; mask=causal; softcap=1.5] bf16[1,67,4,32], bf16[1,67,2,32], bf16[1,67,2,32], i32[67], i32[67]",
    );
}

#[test]
fn attention_of_wide_heads() {
    check(
        "attention[0.1; mask=causal] bf16[1,65,1,128], bf16[1,65,1,128], bf16[1,65,1,128], i32[65], i32[65]",
    );
    check(
        "attention[0.06; mask=causal] bf16[1,33,1,256], bf16[1,40,1,256], bf16[1,40,1,256], i32[33], i32[40]",
    );
    check(
        "attention[0.1; mask=causal] bf16[1,33,1,192], bf16[1,33,1,192], bf16[1,33,1,128], i32[33], i32[33]",
    );
}

/// Where blocks have less shared memory, tiles are smaller.
#[test]
fn attention_of_wide_heads_in_small_tiles() {
    let text = "attention_grad[0.06; mask=causal] bf16[1,40,1,256], bf16[1,33,1,256], bf16[1,33,1,256], \
         f32[1,40,1], bf16[1,40,1,256], f32[1,40,1], i32[40], i32[33]";
    let (cases, modes) = (cases(text, |_| {}), [Mode::Plain, Mode::Reversed]);
    let shared = |arch: &str| {
        let all = launches(&cases[0].kernel, &Limits::of(arch)).expect("a written kernel");
        all.iter().map(|l| l.shared).max()
    };
    assert!(shared("sm_89") < shared("sm_80"), "{text}");
    run_as(text, &cases[..1], (&modes, Limits::of("sm_89")), |l, _| l);
}

#[test]
fn attention_by_groups() {
    check_pieces_with_groups(
        "attention[0.1; mask=-16..0] bf16[1,70,4,64], bf16[1,70,2,64], bf16[1,70,2,64], i32[70], i32[70]",
    );
    check_groups(
        "attention[0.3; mask=causal; softcap=1.5] bf16[1,67,2,63], bf16[1,67,2,63], bf16[1,67,2,60], i32[67], i32[67]",
    );
    check_groups(
        "attention[0.1; mask=causal] bf16[1,33,1,192], bf16[1,65,1,192], bf16[1,65,1,128], i32[33], i32[65]",
    );
    check_groups(
        "attention[0.06; mask=causal] bf16[1,33,1,256], bf16[1,40,1,256], bf16[1,40,1,256], i32[33], i32[40]",
    );
}

#[test]
fn gradients_of_attention_in_f32() {
    check_pieces(
        "attention_grad[0.3; mask=-8..0] f32[1,35,4,3], f32[1,35,2,3], f32[1,35,2,2], f32[1,35,4], \
         f32[1,35,4,2], f32[1,35,4], i32[35], i32[35]",
    );
    check(
        "attention_grad[0.9; mask=-19..0; softcap=2.5] f32[1,40,2,8], f32[1,40,1,8], f32[1,40,1,8], \
         f32[1,40,2], f32[1,40,2,8], f32[1,40,2], i32[40], i32[40]",
    );
}

#[test]
fn gradients_of_attention_in_bf16() {
    check_pieces(
        "attention_grad[0.1; mask=causal] bf16[1,70,4,64], bf16[1,70,2,64], bf16[1,70,2,64], \
         f32[1,70,4], bf16[1,70,4,64], f32[1,70,4], i32[70], i32[70]",
    );
    check(
        "attention_grad[0.1; mask=-19..0] bf16[1,40,1,80], bf16[1,40,1,80], bf16[1,40,1,80], \
         f32[1,40,1], bf16[1,40,1,80], f32[1,40,1], i32[40], i32[40]",
    );
    check_pieces(
        "attention_grad[0.3; mask=causal; softcap=1.5] bf16[1,67,4,32], bf16[1,67,2,32], bf16[1,67,2,32], \
         f32[1,67,4], bf16[1,67,4,32], f32[1,67,4], i32[67], i32[67]",
    );
}

#[test]
fn gradients_of_attention_of_wide_heads() {
    check(
        "attention_grad[0.06; mask=causal] bf16[1,40,1,256], bf16[1,33,1,256], bf16[1,33,1,256], \
         f32[1,40,1], bf16[1,40,1,256], f32[1,40,1], i32[40], i32[33]",
    );
    check(
        "attention_grad[0.1; mask=causal] bf16[1,33,1,192], bf16[1,33,1,192], bf16[1,33,1,128], \
         f32[1,33,1], bf16[1,33,1,128], f32[1,33,1], i32[33], i32[33]",
    );
}

#[test]
fn gradients_of_attention_by_groups() {
    check_pieces_with_groups(
        "attention_grad[0.1; mask=-16..0] bf16[1,70,4,64], bf16[1,70,2,64], bf16[1,70,2,64], \
         f32[1,70,4], bf16[1,70,4,64], f32[1,70,4], i32[70], i32[70]",
    );
    check_groups(
        "attention_grad[0.3; mask=causal; softcap=1.5] bf16[1,40,2,127], bf16[1,67,1,127], bf16[1,67,1,120], \
         f32[1,40,2], bf16[1,40,2,120], f32[1,40,2], i32[40], i32[67]",
    );
    check_groups(
        "attention_grad[0.06; mask=causal] bf16[1,40,1,256], bf16[1,33,1,256], bf16[1,33,1,256], \
         f32[1,40,1], bf16[1,40,1,256], f32[1,40,1], i32[40], i32[33]",
    );
}

#[test]
fn copies() {
    check_pieces("transpose[abc->cba] f32[5,7,9]");
    check("transpose[abc->acb] bf16[5,7,9]");
    check("expand[bs->shb; h=5] f32[3,7]");
    check("concat[d=104] bf16[3,7,32], bf16[3,7,72]");
    check("narrow[p=33; start=30] f32[3,7,67]");
    check("pad[d=100; start=32] bf16[3,7,40]");
    check("concat[d=30; dim=1] bf16[3,7,32], bf16[3,9,32], bf16[3,14,32]");
    check_pieces("narrow[p=11; start=3; dim=1; step=5] f32[3,67,9]");
    check("pad[d=67; start=3; step=5] f32[3,11]");
    check("pad[d=40; start=7; dim=1] bf16[3,40,7]");
    check("pad[d=33; start=-9] f32[3,40]");
}

#[test]
fn numbers_at_random() {
    check_pieces("draw[k,bs->bsh; from=uniform; stream=a.0; h=70] i32[3], i32[3,5]");
    check("draw[k,bs->hbs; from=normal; stream=a.1; h=33] i32[3], i32[3,5]");
    check("draw[k->ab; from=keep 0.25; stream=b; a=7,b=33] i32[3]");
}

#[test]
fn sums_along_rows() {
    check_pieces("cumsum[1] f32[3,70,33]");
    check("cumsum[1; reverse=true] bf16[3,133]");
}

/// Within a chunk of 64 tokens, of one token, and over chunks; more heads than are treated at once, and wider ones than a
/// tile; documents, a first state, pieces and both rules.
#[test]
fn recurrences() {
    let of = |b: usize, s: usize, n: usize, k: usize, v: usize| {
        let (key, g) = (format!("f32[{b},{s},{n},{k}]"), format!("f32[{b},{s},{n}]"));
        (format!("{key}, {key}, {g}, f32[{b},{s},{n},{v}]"), g, format!("f32[{b},{n},{k},{v}]"))
    };
    for (b, s, n, k, v) in
        [(2, 5, 2, 3, 4), (1, 1, 1, 2, 3), (1, 130, 2, 17, 9), (1, 3, 17, 2, 2), (1, 66, 1, 70, 66)]
    {
        let (ins, g, state) = of(b, s, n, k, v);
        let (d_o, segments) = (format!("f32[{b},{s},{n},{v}]"), format!("i32[{b},{s}]"));
        let check = if s == 5 { check_pieces } else { check };
        if s == 5 || s == 130 {
            check(&format!("scan[plain] {ins}"));
            check(&format!("scan_grad[plain] {ins}, {d_o}, {state}"));
        }
        check(&format!("scan[delta; segments=true; start=true] {ins}, {g}, {segments}, {state}"));
        check(&format!(
            "scan_grad[delta; segments=true; start=true] {ins}, {d_o}, {state}, {g}, {segments}, {state}"
        ));
    }
    let (ins, g, _) = of(2, 6, 2, 3, 2);
    let (state, d_o) = ("f32[2,2,2,3,2]", "f32[2,6,2,2]");
    check_pieces(&format!("scan[delta; start=true; c=2] {ins}, {g}, {state}"));
    check_pieces(&format!("scan_grad[delta; start=true; c=2] {ins}, {d_o}, {state}, {g}, {state}"));
}

#[test]
fn look_ups() {
    check_pieces("take[vh,bs->bsh] f32[7,33], i32[3,5]");
    check("take[vh,bs->bsh] bf16[7,64], i32[3,5]");
    check("take[bsv,bs->bs] f32[3,5,7], i32[3,5]");
    check_pieces("index_add[bsh,bs->vh; v=7] f32[3,5,33], i32[3,5]");
    check_pieces("index_add[bsh,bs->vh; v=7; padding=zero 4] f32[3,5,33], i32[3,5]");
    check_pieces("index_add[bs,bs->bsv; v=7; padding=zero 4] f32[3,5], i32[3,5]");
    check_pieces("take[vh,bs->bsh; padding=zero 4] f32[7,33], i32[3,5]");
    check_pieces("take[vh,bs->bsh; padding=4] f32[7,33], i32[3,5]");
    check("index_add[bsh,bs->vh; v=7] bf16[30,25,40], i32[30,25]");
    check("index_add[bs,bs->bsv; v=7] f32[3,5], i32[3,5]");
}

#[test]
fn rotary_embeddings() {
    check_pieces("rope f32[2,5,3,10], f32[5,4], f32[5,4]");
    check("rope bf16[2,5,3,64], f32[5,32], f32[5,32]");
    check("rope[adjacent] bf16[2,5,3,10], f32[5,4], f32[5,4]");
    check("rope[adjacent] bf16[2,5,3,80], f32[5,32], f32[5,32]");
}

#[test]
fn tokens_and_experts() {
    check_pieces("top_k[bse->bsk; k=8] f32[2,33,130]");
    check("top_k[ets->kts; k=3] bf16[9,4,5]");
    check_pieces("route[g=2,e=3; rows=66; capacity=none] i32[3,33,2]");
    check("route[g=2,e=3; rows=12; capacity=4] i32[3,200,2]");
    check_pieces("dispatch[g=2,c=33] bf16[3,33,70], i32[3,33,2], f32[3,33,2]");
    check("dispatch[g=2,c=33] bf16[3,33,72], i32[3,33,2], f32[3,33,2]");
    check("unpermute bf16[2,3,33,72], i32[3,33,2], f32[3,33,2]");
    check("combine_gates_grad f32[2,3,33,40], i32[3,33,2], f32[3,33,40]");
}

#[test]
fn products_in_f32() {
    check_pieces("dot[mk,kn->mn] f32[33,67], f32[67,35]");
    check("dot[bsh,oh->bso] f32[3,27,36], f32[72,36]");
    check("dot[bso,bsh->oh] f32[3,7,21], f32[3,7,33]");
    check("dot[bmk,bkn->bmn] f32[3,5,9], f32[3,9,7]");
    check("dot[kabm,kan->nbma] f32[3,5,2,3], f32[3,5,4]");
    check("dot[mk,kn->mn] bf16[7,9], f32[9,5]");
    // More tiles than a band has.
    check("dot[mk,kn->mn] f32[1160,5], f32[5,136]");
}

#[test]
fn products_in_bf16() {
    check_pieces("dot[mk,kn->mn] bf16[130,72], bf16[72,136]");
    check("dot[mk,nk->mn] bf16[40,104], bf16[200,104]");
    check("dot[km,kn->nm] bf16[40,72], bf16[40,136]");
    check("dot[mk,kn->mn] bf16[33,67], bf16[67,35]");
    // More steps than there are stages, twice over.
    check("dot[mk,nk->mn] bf16[9,448], bf16[24,448]");
    check("dot[mk,kn->mn] bf16[9,449], bf16[449,7]");
}

#[test]
fn products_by_expert() {
    check("grouped_dot f32[6,3,40,35], i32[6,4,3], f32[24,33,35]");
    check("grouped_dot_t f32[6,3,40,33], i32[6,4,3], f32[24,33,35]");
    check("grouped_outer f32[6,3,40,33], i32[6,4,3], f32[6,3,40,35]");
    check_pieces("grouped_dot bf16[2,2,150,40], i32[2,3,2], bf16[6,136,40]");
    check("grouped_dot_t bf16[2,2,150,40], i32[2,3,2], bf16[6,40,136]");
    check("grouped_outer bf16[2,2,150,40], i32[2,3,2], bf16[2,2,150,136]");
    check("grouped_dot_t bf16[2,2,3,4], i32[2,2,2], f32[4,4,5]");
}

#[test]
fn products_by_groups() {
    check_pieces_with_groups("dot[mk,kn->mn] bf16[130,72], bf16[72,136]");
    check_groups("dot[mk,nk->mn] bf16[40,104], bf16[200,104]");
    check_groups("dot[km,kn->nm] bf16[140,72], bf16[140,136]");
    check_groups("dot[mk,kn->mn] bf16[33,67], bf16[67,35]");
    check_groups("dot[mk,nk->mn] bf16[9,448], bf16[24,448]");
    check_groups("dot[mk,kn->mn] bf16[9,449], bf16[449,7]");
    check_groups("grouped_dot bf16[2,2,150,40], i32[2,3,2], bf16[6,136,40]");
    check_groups("grouped_outer bf16[2,2,150,40], i32[2,3,2], bf16[2,2,150,136]");
}

/// Added to what is there, eight elements at once and one by one.
#[test]
fn products_that_are_added() {
    for (text, width, limits) in [
        ("dot[mk,kn->mn] f32[33,20], f32[20,40]", 8, Limits::of("sm_80")),
        ("dot[mk,kn->mn] f32[33,20], f32[20,35]", 1, Limits::of("sm_80")),
        ("dot[mk,kn->mn] bf16[33,24], bf16[24,40]", 8, Limits::of("sm_90a")),
    ] {
        if emulator::compiler().is_none() {
            skip(Tool::Cpp, &format!("{text} would have been added to ones"));
            continue;
        }
        let mut case = cases(text, |_| {}).swap_remove(0);
        let Kernel::Gemm(k) = &mut case.kernel else { panic!("no product") };
        (k.accumulate, k.out.elem) = (true, DType::F32);
        let mut memory = case.memory.clone();
        let elements = k.m * k.n;
        memory[2] = 1f32.to_le_bytes().repeat(elements);
        let launches = launches(&case.kernel, &limits).expect("a written kernel");
        assert!(launches[0].source.text.contains(&format!("#define WIDTH {width}\n")), "{text}");
        let launches: Vec<DeviceLaunch> = launches
            .into_iter()
            .map(|l| if limits.groups { with_groups(l, true) } else { l })
            .collect();
        assert_eq!(emulator::run(&launches, &mut memory, Mode::Plain), 0);
        let added = numbers_of(&memory[2]);
        case.memory[2] = vec![0; elements * 4];
        let mut alone = case.memory.clone();
        let Kernel::Gemm(k) = &mut case.kernel else { panic!("no product") };
        k.accumulate = false;
        let launches =
            shardc_codegen::cuda::launches(&case.kernel, &Limits::of("sm_80")).expect("a kernel");
        assert_eq!(emulator::run(&launches, &mut alone, Mode::Plain), 0);
        for (x, y) in added.iter().zip(numbers_of(&alone[2])) {
            assert!((x - y - 1.0).abs() < 1e-5 && y != 0.0, "{text}: {x} is not {y} and 1");
        }
    }
}

fn numbers_of(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes"))).collect()
}

/// With as many steps as there are stages, one less, and more.
#[test]
fn products_by_blocks_that_are_alone() {
    check_alone("dot[mk,nk->mn] bf16[140,256], bf16[136,256]");
    check_alone("dot[km,kn->nm] bf16[392,136], bf16[392,24]");
    check_alone("dot[mk,kn->mn] bf16[3,30], bf16[30,136]");
    check_alone("dot[bmk,bkn->mn] bf16[3,70,72], bf16[3,72,136]");
    check_alone("dot[mk,kn->mn] f16[33,192], f16[192,135]");
}

/// A buffer that is too small is told, and nothing is written outside of it.
#[test]
fn rows_beyond_the_bound_are_told() {
    if emulator::compiler().is_none() {
        skip(Tool::Cpp, "route would have been run on a buffer that is too small");
        return;
    }
    let mut case = cases("route[g=2,e=3; rows=66; capacity=none] i32[1,33,2]", |index| {
        // Two copies for the last expert, all others for the first.
        index[0] = Tensor::from_fn(&[1, 33, 2], |i| if i[1] == 4 { 5.0 } else { 0.0 });
    })
    .swap_remove(0);
    let Kernel::Route(k) = &mut case.kernel else { panic!("no route") };
    k.rows = 60;
    let mut memory = case.memory.clone();
    let status = emulator::run(
        &launches(&case.kernel, &Limits::of("sm_80")).unwrap(),
        &mut memory,
        Mode::Sanitized,
    );
    assert_eq!(status, 64);
}

/// Queries that see nothing have output 0 with a log-sum-exp of -inf, and gradients 0.
#[test]
fn attention_that_sees_nothing() {
    let qkv = "f32[1,70,4,3], f32[1,9,2,3], f32[1,9,2,2]";
    let attention = format!("attention[0.3; mask=causal] {qkv}, i32[70], i32[9]");
    let grad = format!(
        "attention_grad[0.3; mask=causal] {qkv}, f32[1,70,4], f32[1,70,4,2], f32[1,70,4], i32[70], i32[9]"
    );
    for first in [40, 66, 1000] {
        for (text, at) in [(&attention, 3), (&grad, 6)] {
            let cases = cases(text, |args| {
                args[at] = Tensor::from_fn(&[70], |i| i[0] as f64);
                args[at + 1] = Tensor::from_fn(&[9], |i| (first + i[0]) as f64);
            });
            run(text, &cases[..1], &[Mode::Plain]);
        }
    }
}

/// What a block has left in variables of shared memory is not what the next one finds.
#[test]
fn shared_variables_are_no_numbers_at_first() {
    if emulator::compiler().is_none() {
        skip(Tool::Cpp, "a kernel that reads what it has not written would have been run");
        return;
    }
    if device::here().is_some() {
        println!("skipped: a device does not say so");
        return;
    }
    let text = "struct Params { float* out; };
KERNEL void __launch_bounds__(32) leaves(const Params p) {
    __shared__ float x[32];
    p.out[blockIdx.x * 32 + threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = 5;
}
";
    let source = Arc::new(KernelSource { file: "leaves.cu", text: text.into() });
    let words = vec![Word::Address { operand: 0, byte: 0 }];
    let l = DeviceLaunch {
        source,
        entry: "leaves".into(),
        grid: [3, 1, 1],
        threads: 32,
        shared: 0,
        words,
    };
    for mode in [Mode::Reversed, Mode::Plain] {
        let mut memory = vec![vec![0; 3 * 32 * 4]];
        assert_eq!(emulator::run(std::slice::from_ref(&l), &mut memory, mode), 0);
        let numbers = memory[0].chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        assert!(numbers.into_iter().all(f32::is_nan), "{mode:?}");
    }
}

/// Every file whose kernels take floats of 16 bits, of f16.
#[test]
fn kernels_in_f16() {
    let sizes = "f16[1,70,4,64], f16[1,70,2,64], f16[1,70,2,64]";
    let causal = "mask=causal; softcap=1.5";
    let attention = format!("attention[0.1; {causal}] {sizes}, i32[70], i32[70]");
    let grad = format!(
        "attention_grad[0.1; {causal}] {sizes}, f32[1,70,4], f16[1,70,4,64], f32[1,70,4], i32[70], i32[70]"
    );
    for text in [
        "attention[0.3; mask=causal] f16[1,67,2,7], f16[1,67,2,7], f16[1,67,2,9], i32[67], i32[67]",
        "attention_grad[0.1; mask=-19..0] f16[1,40,1,80], f16[1,40,1,80], f16[1,40,1,80], \
         f32[1,40,1], f16[1,40,1,80], f32[1,40,1], i32[40], i32[40]",
        "dot[mk,kn->mn] f16[7,9], f32[9,5]",
        "dot[mk,kn->mn] f16[33,67], f16[67,35]",
        "transpose[abc->acb] f16[5,7,9]",
        "concat[d=104] f16[3,7,32], f16[3,7,72]",
        "cumsum[1; reverse=true] f16[3,133]",
        "take[vh,bs->bsh] f16[7,64], i32[3,5]",
        "index_add[bsh,bs->vh; v=7] f16[30,25,40], i32[30,25]",
        "rope f16[2,5,3,64], f32[5,32], f32[5,32]",
        "top_k[ets->kts; k=3] f16[9,4,5]",
        "dispatch[g=2,c=33] f16[3,33,72], i32[3,33,2], f32[3,33,2]",
        "unpermute f16[2,3,33,72], i32[3,33,2], f32[3,33,2]",
        "grouped_dot_t f16[2,2,150,40], i32[2,3,2], f16[6,40,136]",
    ] {
        check(text);
    }
    check_pieces("dot[mk,kn->mn] f16[130,72], f16[72,136]");
    check(&attention);
    check(&grad);
    let groups = [
        &attention,
        &grad,
        "dot[km,kn->nm] f16[140,72], f16[140,136]",
        "grouped_dot f16[2,2,150,40], i32[2,3,2], f16[6,136,40]",
        "grouped_outer f16[2,2,150,40], i32[2,3,2], f16[2,2,150,136]",
    ];
    for (_, text) in groups.iter().enumerate().filter(|(i, _)| taken(*i, 2)) {
        check_groups(text);
    }
    if nightly() {
        check_pieces_with_groups("dot[mk,kn->mn] f16[130,72], f16[72,136]");
    }
}
