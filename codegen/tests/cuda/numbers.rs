//! Every written kernel, run on the CPU, gives what its op means: on odd sizes, in padded memory full
//! of NaN, with threads in either order, and touching nothing but its operands.

use crate::cases::cases;
use crate::emulator::{self, Mode};
use shardc_codegen::cuda::launches;
use shardc_ir::tensor::Tensor;

/// Runs a sample, whole and split, in these modes; in parts of the largest element, a bf16 has half a
/// unit in the last place of 2^-8, and products of rounded weights a few of them.
fn check_with(text: &str, modes: &[Mode], change: impl Fn(&mut Vec<Tensor>)) {
    if emulator::compiler().is_none() {
        println!("skipped: no C++ compiler; {text} would have been run on the CPU");
        return;
    }
    let tolerance = if text.contains("bf16") { 3.0 / 256.0 } else { 2e-5 };
    let all = cases(text, change);
    for (i, case) in all.iter().enumerate() {
        let launches = launches(&case.kernel).expect("a written kernel");
        // The whole sample in every mode, its pieces in one after the other.
        let turn = [modes[i % modes.len()]];
        for &mode in if i == 0 { modes } else { &turn } {
            let mut memory = case.memory.clone();
            assert_eq!(emulator::run(&launches, &mut memory, mode), 0, "{}", case.what);
            case.check(&memory, tolerance);
        }
    }
}

fn check(text: &str) {
    check_with(text, &[Mode::Plain, Mode::Reversed], |_| {});
}

/// Also under the sanitizers.
fn check_bounds(text: &str) {
    check_with(text, &[Mode::Sanitized, Mode::Plain, Mode::Reversed], |_| {});
}

#[test]
fn attention_in_f32() {
    check_bounds(
        "attention[0.3; window=9] f32[2,35,4,3], f32[2,35,2,3], f32[2,35,2,2], i32[35], i32[35]",
    );
    check(
        "attention[0.2; window=none] f32[1,70,2,32], f32[1,70,1,32], f32[1,70,1,32], i32[70], i32[70]",
    );
}

#[test]
fn attention_in_bf16() {
    check_bounds(
        "attention[0.1; window=17] bf16[1,70,4,64], bf16[1,70,2,64], bf16[1,70,2,64], i32[70], i32[70]",
    );
    check(
        "attention[0.3; window=none] bf16[1,67,2,7], bf16[1,67,2,7], bf16[1,67,2,9], i32[67], i32[67]",
    );
    check(
        "attention[0.1; window=none] bf16[1,1,2,80], bf16[1,130,1,80], bf16[1,130,1,80], i32[1], i32[130]",
    );
}

#[test]
fn attention_of_wide_heads() {
    check(
        "attention[0.1; window=none] bf16[1,65,1,128], bf16[1,65,1,128], bf16[1,65,1,128], i32[65], i32[65]",
    );
    check(
        "attention[0.06; window=none] bf16[1,33,1,256], bf16[1,40,1,256], bf16[1,40,1,256], i32[33], i32[40]",
    );
    check(
        "attention[0.1; window=none] bf16[1,33,1,192], bf16[1,33,1,192], bf16[1,33,1,128], i32[33], i32[33]",
    );
}

#[test]
fn gradients_of_attention_in_f32() {
    check_bounds(
        "attention_grad[0.3; window=9] f32[1,35,4,3], f32[1,35,2,3], f32[1,35,2,2], f32[1,35,4], \
         f32[1,35,4,2], f32[1,35,4], i32[35], i32[35]",
    );
}

#[test]
fn gradients_of_attention_in_bf16() {
    check_bounds(
        "attention_grad[0.1; window=none] bf16[1,70,4,64], bf16[1,70,2,64], bf16[1,70,2,64], \
         f32[1,70,4], bf16[1,70,4,64], f32[1,70,4], i32[70], i32[70]",
    );
    check(
        "attention_grad[0.1; window=20] bf16[1,40,1,80], bf16[1,40,1,80], bf16[1,40,1,80], \
         f32[1,40,1], bf16[1,40,1,80], f32[1,40,1], i32[40], i32[40]",
    );
}

#[test]
fn gradients_of_attention_of_wide_heads() {
    check(
        "attention_grad[0.06; window=none] bf16[1,40,1,256], bf16[1,33,1,256], bf16[1,33,1,256], \
         f32[1,40,1], bf16[1,40,1,256], f32[1,40,1], i32[40], i32[33]",
    );
    check(
        "attention_grad[0.1; window=none] bf16[1,33,1,192], bf16[1,33,1,192], bf16[1,33,1,128], \
         f32[1,33,1], bf16[1,33,1,128], f32[1,33,1], i32[33], i32[33]",
    );
}

/// Queries that see nothing have output 0 with a log-sum-exp of -inf, and gradients 0.
#[test]
fn attention_that_sees_nothing() {
    let qkv = "f32[1,70,4,3], f32[1,9,2,3], f32[1,9,2,2]";
    let attention = format!("attention[0.3; window=none] {qkv}, i32[70], i32[9]");
    let grad = format!(
        "attention_grad[0.3; window=none] {qkv}, f32[1,70,4], f32[1,70,4,2], f32[1,70,4], i32[70], i32[9]"
    );
    for first in [40, 66, 1000] {
        for (text, at) in [(&attention, 3), (&grad, 6)] {
            check_with(text, &[Mode::Plain], |args| {
                args[at] = Tensor::from_fn(&[70], |i| i[0] as f64);
                args[at + 1] = Tensor::from_fn(&[9], |i| (first + i[0]) as f64);
            });
        }
    }
}
