//! Which updates of parameters are one launch of several kernels, and where their results may lie then.

use shardc_ir::func::{Func, Module};
use shardc_ir::group::{Form, Launch, launches};
use shardc_ir::text::{parse, print};
use shardc_ir::verify::{Phase, verify};
use shardc_passes::group::group;
use shardc_passes::options::Fuse;
use std::fmt::Write as _;

fn module(text: &str) -> Module {
    parse(&format!("mesh []\n\nfunc @f{text}\n")).unwrap_or_else(|e| panic!("{}", e.render()))
}

/// The launches of a function after the pass; their text is read as what it was printed from.
fn grouped(text: &str, fuse: Fuse) -> (Func, Vec<Launch>) {
    let mut m = module(text);
    group(&m.mesh, &mut m.funcs[0], fuse);
    verify(&m, Phase::Ranked).unwrap_or_else(|all| panic!("{all:?}"));
    assert_eq!(print(&parse(&print(&m)).expect("what was printed")), print(&m));
    let f = m.funcs.swap_remove(0);
    let all = launches(&f);
    (f, all)
}

/// How many kernels each launch has.
fn kernels(f: &Func, all: &[Launch]) -> Vec<usize> {
    let one = |x: &Launch| match x.form(f) {
        Some(Form::Several(kernels)) => kernels.len(),
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
    // Its gradient is the first one's result: one kernel over the same rows, which is no bucket.
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
