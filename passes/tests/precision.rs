//! What the policy of `--dtype bf16` makes of a program.

use shardc_ir::text::{parse, print};
use shardc_ir::verify::{Phase, verify};
use shardc_passes::precision::precision;

/// Compares the text of a function with what the policy makes of it.
fn check(before: &str, after: &str) {
    let mut m = parse(before).unwrap_or_else(|e| panic!("{e}"));
    verify(&m, Phase::Source).unwrap_or_else(|e| panic!("{}", e[0]));
    precision(&mut m.funcs[0]);
    verify(&m, Phase::Source).unwrap_or_else(|e| panic!("{}", e[0]));
    let want = parse(after).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(print(&m), print(&want));
}

#[test]
fn products_take_bf16_and_statistics_f32() {
    check(
        r#"mesh []
        func @model(%w: f32[8] param "w", %p: f32[5,8] param "p", %x: f32[2,3,8] param "x") -> f32[2,3,5] {
          %squares = dot[bsh,bsh->bs] %x, %x : f32[2,3]
          %rstd = rsqrt %squares : f32[2,3]
          %normed = mul[bsh,bs->bsh] %x, %rstd : f32[2,3,8]
          %scaled = mul[bsh,h->bsh] %normed, %w : f32[2,3,8]
          %y = dot[bsh,oh->bso] %scaled, %p : f32[2,3,5]
          %a = silu %y : f32[2,3,5]
          return %a
        }"#,
        r#"mesh []
        func @model(%w: bf16[8] param "w", %p: bf16[5,8] param "p", %x: bf16[2,3,8] param "x") -> bf16[2,3,5] {
          %x_f32 = cast[f32] %x : f32[2,3,8]
          %squares = dot[bsh,bsh->bs] %x_f32, %x_f32 : f32[2,3]
          %rstd = rsqrt %squares : f32[2,3]
          %normed = mul[bsh,bs->bsh] %x_f32, %rstd : f32[2,3,8]
          %w_f32 = cast[f32] %w : f32[8]
          %scaled = mul[bsh,h->bsh] %normed, %w_f32 : f32[2,3,8]
          %scaled_bf16 = cast[bf16] %scaled : bf16[2,3,8]
          %y = dot[bsh,oh->bso] %scaled_bf16, %p : bf16[2,3,5]
          %a = silu %y : bf16[2,3,5]
          return %a
        }"#,
    );
}

#[test]
fn sums_over_microbatches_are_f32() {
    check(
        r#"mesh []
        func @model(%w: f32[4] param "w") -> (f32[4] sum "loss") {
          %y = silu %w : f32[4]
          return %y
        }"#,
        r#"mesh []
        func @model(%w: bf16[4] param "w") -> (f32[4] sum "loss") {
          %y = silu %w : bf16[4]
          %y_f32 = cast[f32] %y : f32[4]
          return %y_f32
        }"#,
    );
}
