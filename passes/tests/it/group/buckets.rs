//! Which updates of parameters are one launch of several kernels, and where their results may lie then.

use super::{grouped, module};
use shardc_ir::func::Func;
use shardc_ir::group::{FusionBuilder, KernelKind, Launch, launches};
use shardc_ir::phase::Phase;
use shardc_ir::verify::verify;
use shardc_passes::options::Fuse;
use std::fmt::Write as _;

/// How many kernels each launch has.
fn kernels(f: &Func, all: &[Launch]) -> Vec<usize> {
    let one = |x: &Launch| match x.form(&mut FusionBuilder::of(f)) {
        Some(KernelKind::FusionBuilder(kernels)) => kernels.len(),
        _one => 1,
    };
    all.iter().map(one).collect()
}

/// A step of SGD over parameters of these dims; of the first, a matrix, it may also return the gradient's
/// sum of squares.
fn updates(dims: &[&str], squares: bool) -> String {
    let (mut args, mut lines) = (String::new(), String::new());
    let (mut types, mut names) = (vec![], vec![]);
    if squares {
        lines += "  %q = dot[ab,ab->] %g0, %g0 : f32[]\n";
        types.push("f32[]".to_string());
        names.push("%q".to_string());
    }
    for (i, d) in dims.iter().enumerate() {
        let _ = write!(args, "%p{i}: f32[{d}] param \"p{i}\", %g{i}: f32[{d}], ");
        let _ = writeln!(lines, "  %n{i} = sgd[0] %p{i}, %g{i}, %lr, %s : f32[{d}]");
        types.push(format!("f32[{d}] param \"p{i}\""));
        names.push(format!("%n{i}"));
    }
    format!(
        "({args}%lr: f32[], %s: f32[]) -> ({}) {{\n{lines}  return {}\n}}",
        types.join(", "),
        names.join(", ")
    )
}

#[test]
fn updates_that_follow_each_other_are_one_launch() {
    let text = updates(&["8,2", "4,6", "5"], true);
    for fuse in [Fuse::Yes, Fuse::Rows] {
        let (f, all) = grouped(&text, fuse);
        assert_eq!(kernels(&f, &all), [3], "{fuse:?}");
        // The sum of squares is of the first kernel, and each update lies on its own parameter.
        let own = all[0].kernels(&f);
        assert_eq!(own.iter().map(|x| x.nodes.len()).collect::<Vec<_>>(), [2, 1, 1]);
        for (k, &o) in all[0].outs.iter().enumerate() {
            let mut over: Vec<String> =
                all[0].over(&f, k).iter().map(|&v| f.name(v).to_string()).collect();
            over.sort();
            // A kernel of one node takes what its op says, one of several all that is walked alike.
            let want: &[&str] = match &*f.name(o).to_string() {
                "%n0" => &["%g0", "%p0"],
                "%n1" => &["%p1"],
                "%n2" => &["%p2"],
                _sum => &[],
            };
            assert_eq!(over, want, "{}", f.name(o));
        }
    }
    assert_eq!(grouped(&text, Fuse::No).1.len(), 4);
}

/// A bucket is of 64 MiB of gradients, and of 32 kernels.
#[test]
fn buckets_are_of_bounded_size() {
    let of = |dims: &[&str]| {
        let (f, all) = grouped(&updates(dims, false), Fuse::Yes);
        kernels(&f, &all)
    };
    assert_eq!(of(&["4194304", "12582912", "1"]), [2, 1]);
    assert_eq!(of(&["16777217", "16777216", "1", "2"]), [1, 1, 2]);
    assert_eq!(of(&["3"; 70]), [32, 32, 6]);
}

/// An update that needs another, or reads what another writes over, is a launch of its own.
#[test]
fn updates_that_need_each_other_stay_apart() {
    let of = |args: &str, second: &str| {
        let text = format!(
            "(%p: f32[4] param \"p\", %r: f32[4] param \"r\", %g: f32[4], {args}%lr: f32[], %s: f32[])
                -> (f32[4] param \"p\", f32[4] param \"r\") {{
  %n = sgd[0] %p, %g, %lr, %s : f32[4]
  %m = sgd[0] {second} : f32[4]
  return %n, %m
}}"
        );
        let (f, all) = grouped(&text, Fuse::Rows);
        kernels(&f, &all)
    };
    assert_eq!(of("", "%r, %g, %lr, %s"), [2]);
    // Its gradient is the first one's result: one kernel over the same rows, which is not a bucket.
    assert_eq!(of("", "%r, %n, %lr, %s"), [1]);
    let apart = "(%p: f32[4] param \"p\", %r: f32[4,4] param \"r\", %g: f32[4], %h: f32[4,4], %lr: f32[], %s: f32[])
                -> (f32[4] param \"p\", f32[4,4] param \"r\") {
  %n = sgd[0] %p, %g, %lr, %s : f32[4]
  %w = mul[ab,b->ab] %h, %p : f32[4,4]
  %m = sgd[0] %r, %w, %lr, %s : f32[4,4]
  return %n, %m
}";
    let (f, all) = grouped(apart, Fuse::Rows);
    assert_eq!(kernels(&f, &all), [1, 1]);
    // The first reads what the second writes over: as it is, and as another shape of it.
    let view = "  %q = reshape[(ab)->ab; b=2] %p : f32[2,2]\n";
    for (dims, view, gradient) in [("4", "", "%p"), ("2,2", view, "%q")] {
        let before = format!(
            "(%p: f32[4] param \"p\", %r: f32[{dims}] param \"r\", %g: f32[4], %lr: f32[], %s: f32[])
                -> (f32[{dims}] param \"r\", f32[4] param \"p\") {{
{view}  %m = sgd[0] %r, {gradient}, %lr, %s : f32[{dims}]
  %n = sgd[0] %p, %g, %lr, %s : f32[4]
  return %m, %n
}}"
        );
        let (f, all) = grouped(&before, Fuse::Rows);
        assert!(!all.iter().any(|x| x.is_several(&f)), "{before}: {all:?}");
    }
}

/// A kernel of one node writes all of its results, though nobody reads some: those of the launch are its
/// own, in its order.
#[test]
fn results_that_nobody_reads_are_written() {
    let m = module(
        "(%p: f32[4], %g: f32[4], %m: f32[4], %v: f32[4], %l: f32[], %t: f32[], %b: f32[], %y: f32[4])
                -> (f32[4], f32[4]) {
  %p.1, %m.1, %v.1 = adamw[0.9; beta2=0.999; eps=1e-8; decay=0.01] %p, %g, %m, %v, %l, %t, %b : f32[4], f32[4], f32[4] &&
  %z = silu %y : f32[4]
  return %m.1, %z
}",
    );
    verify(&m, Phase::Ranked).unwrap_or_else(|all| panic!("{all:?}"));
    let f = &m.funcs[0];
    let [x] = &launches(f)[..] else { panic!("one launch") };
    let names = |x: &Launch| x.outs.iter().map(|&v| f.name(v).to_string()).collect::<Vec<_>>();
    assert_eq!(names(x), ["%p.1", "%m.1", "%v.1", "%z"]);
    let own: Vec<Vec<String>> = x.kernels(f).iter().map(names).collect();
    assert_eq!(own, [vec!["%p.1", "%m.1", "%v.1"], vec!["%z"]]);
    let over = |k| x.over(f, k).iter().map(|&v| f.name(v).to_string()).collect::<Vec<_>>();
    assert_eq!([0, 1, 2, 3].map(over), [["%p"], ["%m"], ["%v"], ["%y"]]);
}

/// `&&` between kernels that need each other, or that are not over rows, is refused.
#[test]
fn marks_of_kernels_that_need_each_other_are_refused() {
    let of = |first: &str, second: &str| {
        let text = format!(
            "(%p: f32[4,4] param \"p\", %x: f32[4,4]) -> (f32[4,4] param \"p\", f32[4,4]) {{
  %a = {first} : f32[4,4] &&
  %b = {second} : f32[4,4]
  return %a, %b
}}"
        );
        verify(&module(&text), Phase::Ranked).err().map(|all| all[0].render())
    };
    assert_eq!(of("exp %x", "silu %x"), None);
    for (first, second) in [
        ("exp %x", "silu %a"),
        // It reads the parameter over which the other writes.
        ("exp %x", "silu %p"),
        ("exp %x", "dot[ab,bc->ac] %x, %x"),
        ("exp %x", "transpose[ab->ba] %x"),
        ("exp %x", "stop_gradient %x"),
    ] {
        let said = of(first, second).unwrap_or_else(|| panic!("{second} is taken"));
        assert!(said.contains("in one launch") && said.contains("&&"), "{said}");
    }
}
