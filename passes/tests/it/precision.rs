//! What the policy of `--dtype bf16` makes of a program.

use shardc_ir::phase::Phase;
use shardc_ir::text::{parse, print};
use shardc_ir::types::DType;
use shardc_ir::verify::verify;
use shardc_passes::precision::precision;

/// Compares the text of a function with what the policy makes of it.
fn check(before: &str, after: &str) {
    let mut m = parse(before).unwrap_or_else(|e| panic!("{e}"));
    verify(&m, Phase::Source).unwrap_or_else(|e| panic!("{}", e[0]));
    precision(&mut m.funcs[0], DType::BF16);
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

/// The router's product is one of f32 operands that were rounded as any product's are, before they
/// were moved; what is added to scores stays f32, and experts take bf16.
#[test]
fn choices_are_made_in_f32() {
    check(
        r#"mesh []
        func @model(%r: f32[4,8] param "r", %b: f32[4] param "b", %w: f32[4,5,8] param "w", %h: f32[1,3,2,8] param "h") -> f32[1,6,5] {
          %a = exp %h : f32[1,3,2,8]
          %x = reshape[zabh->z(ab)h] %a : f32[1,6,8]
          %logits = dot[zth,eh->zte] %x, %r : f32[1,6,4]
          %scores = logistic %logits : f32[1,6,4]
          %biased = add[zte,e->zte] %scores, %b : f32[1,6,4]
          %index = top_k[zte->ztk; k=2] %biased : i32[1,6,2]
          %gates = take[zte,ztk->ztk] %scores, %index : f32[1,6,2]
          %slot, %counts = route[g=1,e=4; rows=12; capacity=none] %index : i32[1,6,2], i32[1,4,1]
          %kept = at_least[0.0] %slot : f32[1,6,2]
          %rows = dispatch[g=1,c=12] %x, %slot, %kept : f32[1,1,12,8]
          %made = grouped_dot %rows, %counts, %w : f32[1,1,12,5]
          %y = unpermute %made, %slot, %gates : f32[1,6,5]
          return %y
        }"#,
        r#"mesh []
        func @model(%r: bf16[4,8] param "r", %b: f32[4] param "b", %w: bf16[4,5,8] param "w", %h: bf16[1,3,2,8] param "h") -> bf16[1,6,5] {
          %h_f32 = cast[f32] %h : f32[1,3,2,8]
          %a = exp %h_f32 : f32[1,3,2,8]
          %a_bf16 = cast[bf16] %a : bf16[1,3,2,8]
          %x = reshape[zabh->z(ab)h] %a_bf16 : bf16[1,6,8]
          %x_f32 = cast[f32] %x : f32[1,6,8]
          %r_f32 = cast[f32] %r : f32[4,8]
          %logits = dot[zth,eh->zte] %x_f32, %r_f32 : f32[1,6,4]
          %scores = logistic %logits : f32[1,6,4]
          %biased = add[zte,e->zte] %scores, %b : f32[1,6,4]
          %index = top_k[zte->ztk; k=2] %biased : i32[1,6,2]
          %gates = take[zte,ztk->ztk] %scores, %index : f32[1,6,2]
          %slot, %counts = route[g=1,e=4; rows=12; capacity=none] %index : i32[1,6,2], i32[1,4,1]
          %kept = at_least[0.0] %slot : f32[1,6,2]
          %rows = dispatch[g=1,c=12] %x, %slot, %kept : bf16[1,1,12,8]
          %made = grouped_dot %rows, %counts, %w : bf16[1,1,12,5]
          %y = unpermute %made, %slot, %gates : bf16[1,6,5]
          return %y
        }"#,
    );
}
