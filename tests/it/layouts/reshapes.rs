//! Random reshapes: dims are joined, split or both, over several axes and parts of axes, evenly and not,
//! with what goes in and what comes out asked for. All compile, verify, and have the loss and the gradients
//! of one rank.

use crate::fixture::{interpret_plan, options};
use crate::programs::Draw;
use shardc_ir::func::RoleKind;
use shardc_ir::interp::StepState;
use shardc_ir::rng::Stream;
use shardc_ir::tensor::Tensor;
use shardc_passes::memory::replay::replay;
use shardc_passes::options::Options;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Axes of the mesh, and parts of them.
const AXES: [(&str, &[(&str, usize)]); 4] = [
    ("a=2, b=2", &[("a", 2), ("b", 2)]),
    ("a=2, b=3", &[("a", 2), ("b", 3)]),
    ("a=4", &[("a:(1)2", 2), ("a:(2)2", 2)]),
    ("a=2, b=2, c=2", &[("a", 2), ("b", 2), ("c", 2)]),
];

/// Groups of letters, each of some size.
type Dims = Vec<Vec<(char, usize)>>;

fn grouped(draw: &mut Draw, letters: &[(char, usize)]) -> Dims {
    let mut dims: Dims = vec![vec![letters[0]]];
    for &l in &letters[1..] {
        match draw.below(2) {
            0 => dims.push(vec![l]),
            _ => dims.last_mut().expect("one at least").push(l),
        }
    }
    dims
}

fn size(dim: &[(char, usize)]) -> usize {
    dim.iter().map(|l| l.1).product()
}

fn ty(dims: &Dims) -> String {
    let sizes: Vec<String> = dims.iter().map(|d| size(d).to_string()).collect();
    format!("f32[{}]", sizes.join(","))
}

fn rule(dims: &Dims) -> String {
    let one = |d: &Vec<(char, usize)>| {
        let letters: String = d.iter().map(|l| l.0).collect();
        if d.len() == 1 { letters } else { format!("({letters})") }
    };
    dims.iter().map(one).collect()
}

/// What is asked of a tensor, mostly: every axis for one of its dims or none. Of a dim, all but the last cut
/// it evenly.
fn asked(draw: &mut Draw, dims: &Dims, axes: &[(&str, usize)]) -> String {
    if draw.below(4) == 0 {
        return String::new();
    }
    let mut of: Vec<Vec<&str>> = vec![vec![]; dims.len()];
    let mut left: Vec<usize> = dims.iter().map(|d| size(d)).collect();
    for (name, n) in axes {
        let at = draw.below(dims.len() + 1);
        if at < dims.len() && left[at] > 0 {
            of[at].push(name);
            left[at] = if left[at] % n == 0 { left[at] / n } else { 0 };
        }
    }
    let open = ["", "?"][draw.below(2)];
    let one = |names: &Vec<&str>| match names.is_empty() {
        true => if open.is_empty() { "-" } else { "?" }.to_string(),
        false => names.join("*") + open,
    };
    format!(" @({})", of.iter().map(one).collect::<Vec<_>>().join(","))
}

/// A program with one reshape between a weight and its use, on a mesh.
fn program(draw: &mut Draw) -> String {
    let (mesh, axes) = AXES[draw.below(AXES.len())];
    let count = 2 + draw.below(3);
    let letters: Vec<(char, usize)> =
        "pqrs".chars().take(count).map(|l| (l, [1, 2, 2, 3, 4, 4, 6, 8][draw.below(8)])).collect();
    let (from, to) = (grouped(draw, &letters), grouped(draw, &letters));
    let major = |d: &Vec<(char, usize)>| d[..d.len() - 1].to_vec();
    let given: Vec<String> = from.iter().flat_map(major).map(|(l, n)| format!("{l}={n}")).collect();
    let given = if given.is_empty() { String::new() } else { format!("; {}", given.join(",")) };
    let attributes = format!("{}->{}{given}", rule(&from), rule(&to));
    let (x, y) = (ty(&from), ty(&to));
    let [w, n] = [0; 2].map(|_| asked(draw, &from, axes));
    let [v, m] = [0; 2].map(|_| asked(draw, &to, axes));
    let all: String = "abcd".chars().take(to.len()).collect();
    format!(
        "mesh [{mesh}]\n\nfunc @model(%w: {x} param \"w\"{w}, %v: {y} param \"v\"{v}, \
         %targets: i32[2,4] input \"targets\") -> (f32[] sum \"loss\") {{\n  \
         %n = silu %w : {x}{n}\n  %m = reshape[{attributes}] %n : {y}{m}\n  \
         %p = mul %m, %v : {y}\n  %s = silu %p : {y}\n  %l = reduce_sum[{all}->] %s : f32[]\n  \
         %t = at_least[0.0] %targets : f32[2,4]\n  %k = reduce_sum[ab->] %t : f32[]\n  \
         %loss = mul %l, %k : f32[]\n  return %loss\n}}\n"
    )
}

/// The same on one rank.
fn alone(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text.split_once("\n\n").expect("a mesh").1;
    while let Some((before, asked)) = rest.split_once(" @(") {
        let mut open = 1;
        let end = asked.find(|c| {
            open += i32::from(c == '(') - i32::from(c == ')');
            open == 0
        });
        out += before;
        rest = &asked[end.expect("it is closed") + 1..];
    }
    out + rest
}

/// The loss and both gradients after one step of the interpreter.
fn numbers(dir: &Path, text: &str) -> Vec<Tensor> {
    let file = dir.join("m.ir");
    std::fs::write(&file, text).expect("a file");
    let o =
        Options { global_batch: 2, microbatch: 2, seq: 4, clip: None, ..options(&[], false, 2) };
    let done = shardc::compile(&file, &o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"));
    let plan = done.stored.plan;
    replay(&plan).unwrap_or_else(|e| panic!("{e}"));
    let mesh = &plan.module.mesh;
    let mut state = StepState::default();
    for f in &plan.module.funcs {
        for a in &f.args {
            let (role, ty) = (a.role.clone().expect("roles"), f.ty(a.value));
            let whole = match role.kind {
                RoleKind::Param => {
                    let numbers = Stream::new(3, &role.name, 0);
                    let n: usize = ty.sizes().iter().product();
                    Tensor::new(&ty.sizes(), (0..n).map(|i| numbers.normal(i as u64)).collect())
                }
                RoleKind::State(_) => Tensor::full(&ty.sizes(), 0.0),
                _ => continue,
            };
            state.put(mesh, role, ty, &whole);
        }
    }
    state.inputs.insert("targets".into(), Tensor::full(&[2, 4], 1.0));
    interpret_plan(&plan, &mut state, 1).unwrap_or_else(|e| panic!("{e}"));
    let out = |k, n: &str| state.output(mesh, k, n).unwrap_or_else(|e| panic!("{n}: {e}"));
    vec![
        out(RoleKind::Metric, "loss"),
        out(RoleKind::GradShown, "w"),
        out(RoleKind::GradShown, "v"),
    ]
}

/// Programs that are drawn.
const TRIALS: usize = 400;

#[test]
fn compile_and_equal_one_rank() {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("reshapes");
    std::fs::create_dir_all(&dir).expect("a folder");
    let mut draw = Draw::new(11, "reshapes");
    let (mut wrong, mut sharded) = (vec![], 0);
    for _ in 0..TRIALS {
        let text = program(&mut draw);
        let one = numbers(&dir, &alone(&text));
        let many = catch_unwind(AssertUnwindSafe(|| numbers(&dir, &text)));
        let Ok(many) = many else {
            wrong.push(format!("no numbers: {text}"));
            continue;
        };
        sharded += usize::from(text.contains(" @("));
        for (what, (a, b)) in ["loss", "w", "v"].iter().zip(many.iter().zip(&one)) {
            let most = b.data.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-12 * most;
            if a.shape != b.shape || !a.data.iter().zip(&b.data).all(near) {
                wrong.push(format!("{what} differs: {text}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {TRIALS}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(sharded > TRIALS / 2, "{sharded}");
}
