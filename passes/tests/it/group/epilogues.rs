//! Which products are launches with what becomes of them, and where results may lie then.

use super::{grouped, module};
use shardc_ir::group::{FusionBuilder, KernelKind};
use shardc_ir::phase::Phase;
use shardc_ir::verify::verify;
use shardc_passes::options::Fuse;

/// Names of the operands over which the only launch may write its first result.
fn over(text: &str) -> Vec<String> {
    let (f, all) = grouped(text, Fuse::Yes);
    let [x] = &all[..] else { panic!("{all:?}") };
    x.over(&f, 0).iter().map(|&v| f.name(v).to_string()).collect()
}

const BIAS: &str = "(%x: f32[8,4], %w: f32[4,6], %b: f32[6], %r: f32[8,6]) -> f32[8,6] {
  %d = dot[rk,kc->rc] %x, %w : f32[8,6]
  %y = add[rc,c->rc] %d, %b : f32[8,6]
  %z = add %r, %y : f32[8,6]
  return %z
}";

#[test]
fn products_join_work_on_their_results() {
    let (f, all) = grouped(BIAS, Fuse::Yes);
    assert!(
        matches!(all[..], [ref x] if matches!(x.form(&mut FusionBuilder::of(&f)), Some(KernelKind::Epilogue(_))))
    );
    let (f, all) = grouped(BIAS, Fuse::Rows);
    assert!(
        matches!(all[..], [_, ref x] if matches!(x.form(&mut FusionBuilder::of(&f)), Some(KernelKind::Rows(_))))
    );
    assert_eq!(grouped(BIAS, Fuse::No).1.len(), 3);
}

#[test]
fn results_lie_on_operands_that_only_the_epilogue_reads() {
    assert_eq!(over(BIAS), ["%r"]);
    let again = "(%x: f32[8,4], %w: f32[4,4], %r: f32[8,4]) -> f32[8,4] {
  %d = dot[rk,kc->rc] %x, %w : f32[8,4]
  %y = add %d, %x : f32[8,4]
  %z = mul %y, %r : f32[8,4]
  return %z
}";
    assert_eq!(over(again), ["%r"]);
}

/// A sum over an argument is the product's own if only it sees the product; it is not an epilogue.
#[test]
fn sums_over_arguments() {
    let sum = |results: &str, names: &str| {
        format!(
            "(%x: f32[8,4], %y: f32[8,4], %a: f32[4,4] grad \"w\") -> {results} {{
  %d = dot[km,kn->mn] %x, %y : f32[4,4]
  %s = accumulate %a, %d : f32[4,4]
  return {names}
}}"
        )
    };
    let alone = sum("(f32[4,4] grad \"w\")", "%s");
    let (f, all) = grouped(&alone, Fuse::Yes);
    assert!(
        matches!(all[..], [ref x] if matches!(x.form(&mut FusionBuilder::of(&f)), Some(KernelKind::Sum)))
    );
    assert_eq!(over(&alone), ["%a"]);
    let seen = sum("(f32[4,4] grad \"w\", f32[4,4])", "%s, %d");
    assert_eq!(grouped(&seen, Fuse::Yes).1.len(), 2);
    // Written over what the product still reads.
    for (role, op) in [("param", "add"), ("grad", "accumulate")] {
        let read = format!(
            "(%a: f32[4,4] {role} \"w\", %x: f32[4,4]) -> (f32[4,4] {role} \"w\") {{
  %d = dot[mk,kn->mn] %a, %x : f32[4,4]
  %s = {op} %a, %d : f32[4,4]
  return %s
}}"
        );
        assert_eq!(grouped(&read, Fuse::Yes).1.len(), 2);
    }
}

/// Marks that somebody wrote: what nobody reads, and an end without the node that it is joined with.
#[test]
fn marks_of_no_kernel_are_refused() {
    for body in [
        "  %d = dot[rk,kc->rc] %x, %w : f32[8,4] &
  %y = silu %d : f32[8,4]
  return %x",
        "  %d = dot[rk,kc->rc] %x, %w : f32[8,4] &
  %t = transpose[rc->cr] %d : f32[4,8] &
  return %x",
    ] {
        let m = module(&format!("(%x: f32[8,4], %w: f32[4,4]) -> f32[8,4] {{\n{body}\n}}"));
        let all = verify(&m, Phase::Ranked).expect_err(body);
        assert!(
            all.iter().any(|d| d.code == "plan" && d.message.contains("in one launch")),
            "{all:?}"
        );
    }
}
