//! What is written over what it is added to: gradients of several contributions.

use super::{grouped, module};
use shardc_ir::group::{FusionBuilder, KernelKind};
use shardc_ir::text::print;
use shardc_passes::options::Fuse;
use shardc_passes::step::elide_accumulators::accumulate_rows;

/// Per launch that adds to what is there: the tensor it is written over.
fn sums(text: &str) -> Vec<String> {
    let mut m = module(text);
    accumulate_rows(&mut m.funcs[0]);
    let text = print(&m);
    let (_, text) = text.split_once("func @f").expect("it has one function");
    let (f, all) = grouped(text, Fuse::Yes);
    let sums =
        all.iter().filter(|x| matches!(x.form(&mut FusionBuilder::of(&f)), Some(KernelKind::Sum)));
    sums.map(|x| x.over(&f, 0).iter().map(|&v| f.name(v).to_string()).collect()).collect()
}

fn function(ends: [&str; 2], lines: &str) -> String {
    let args = "%x: f32[8,4], %g: f32[8,6], %i: i32[8]";
    let [more, results] = ends;
    format!("({args}{more}) -> ({results}) {{\n{lines}}}")
}

const DOT: &str = "  %d = dot[bv,bh->vh] %g, %x : f32[6,4]\n";
const PUT: &str = "  %p = index_add[bh,b->vh; v=6] %x, %i : f32[6,4]\n";

/// A product and rows that are added to what microbatches have added up: both by their own kernel.
#[test]
fn every_contribution_is_added_by_its_kernel() {
    let ends = [", %a: f32[6,4] grad \"w\"", "f32[6,4] grad \"w\""];
    let add = |sum: &str| format!("  %{sum}\n");
    let first = add("t = accumulate %a, %d : f32[6,4]");
    let second = add("s = accumulate %t, %p : f32[6,4]");
    let lines = format!("{DOT}{first}{PUT}{second}  return %s\n");
    assert_eq!(sums(&function(ends, &lines)), ["%a", "%t"]);
}

/// With one microbatch rows are added to the product.
#[test]
fn rows_are_added_to_what_nothing_else_reads() {
    let sum = "  %s = add %d, %p : f32[6,4]\n";
    let alone = format!("{DOT}{PUT}{sum}  return %s\n");
    assert_eq!(sums(&function(["", "f32[6,4] grad \"w\""], &alone)), ["%d"]);
    let shown = format!("{DOT}{PUT}{sum}  return %s, %d\n");
    assert!(sums(&function(["", "f32[6,4], f32[6,4]"], &shown)).is_empty());
    let read = format!("{DOT}{PUT}{sum}  %y = mul %s, %d : f32[6,4]\n  return %y\n");
    assert!(sums(&function(["", "f32[6,4]"], &read)).is_empty());
    let given = format!("{PUT}  %s = add %a, %p : f32[6,4]\n  return %s\n");
    assert!(sums(&function([", %a: f32[6,4]", "f32[6,4]"], &given)).is_empty());
    let seen = format!("{DOT}{PUT}{sum}  return %s, %p\n");
    assert!(sums(&function(["", "f32[6,4], f32[6,4]"], &seen)).is_empty());
}

/// Where a label is subtracted, one element of every row is: that stays part of the work on rows.
#[test]
fn what_is_put_into_rows_of_its_own_is_not_added_in_place() {
    let lines = "  %e = exp %g : f32[8,6]
  %v = reduce_sum[bh->b] %x : f32[8]
  %p = index_add[b,b->bv; v=6] %v, %i : f32[8,6]
  %s = add %e, %p : f32[8,6]
  return %s
";
    let text = function(["", "f32[8,6]"], lines);
    assert!(sums(&text).is_empty());
}
