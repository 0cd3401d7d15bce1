//! The interpreter: its checks, its rounding, and whole steps bound by role.

use shardc_ir::attr::RuleAttr;
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, Module, Name, Port, Role, RoleKind, Value};
use shardc_ir::interp::{Precision, StepState, call, gather, run_step, scatter};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::{Add, AllReduce, AtLeast, Exp, Fill, Mul, Op, ReduceSum, Scale};
use shardc_ir::plan::{Call, Instr};
use shardc_ir::tensor::Tensor;
use shardc_ir::types::{AtomList, DType, Type};

fn mesh() -> Mesh {
    Mesh::new(&[("dp", 2), ("tp", 3)]).expect("a mesh")
}

fn numbers(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    Tensor::new(shape, (0..n).map(|i| i as f64 + 0.5).collect())
}

fn split(mut t: Type, dim: usize, atoms: &[u8]) -> Type {
    t.dims[dim].atoms = AtomList::collect(atoms.iter().map(|&a| Atom(a))).expect("few");
    t
}

#[test]
fn scatter_and_gather_are_inverse() {
    let mesh = mesh();
    let dp = AtomSet::one(Atom(0));
    let tp = AtomSet::one(Atom(1));
    let base = Type::f32(&[5, 4]);
    let with = |f: &dyn Fn(&mut Type)| {
        let mut t = base.clone();
        f(&mut t);
        t
    };
    let types = [
        base.clone(),
        split(base.clone(), 0, &[0, 1]),
        split(base.clone(), 0, &[1, 0]),
        split(split(base.clone(), 1, &[1]), 0, &[0]),
        with(&|t| t.sum = dp.union(tp)),
        with(&|t| (t.sum, t.replicated) = (tp, dp)),
        with(&|t| (t.max, t.sum) = (tp, dp)),
        with(&|t| t.min = dp),
        split(with(&|t| t.max = dp), 1, &[1]),
    ];
    let whole = numbers(&[5, 4]);
    for t in types {
        let parts = scatter(&mesh, &t, &whole);
        for (r, p) in parts.iter().enumerate() {
            assert_eq!(p.shape, t.lens(&mesh, &mesh.coords(r)), "{t:?}");
        }
        let back = gather(&mesh, &t, &parts).expect("legal");
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12;
        assert!(back.data.iter().zip(&whole.data).all(near), "{t:?}");
    }
}

#[test]
fn integers_in_parts_stay_integers() {
    let mesh = mesh();
    let mut t = Type::new(DType::I32, &[6]);
    t.sum = mesh.all();
    let whole = Tensor::new(&[6], (0..6).map(f64::from).collect());
    let parts = scatter(&mesh, &t, &whole);
    assert!(parts.iter().flat_map(|p| &p.data).all(|x| x.fract() == 0.0));
    assert_eq!(gather(&mesh, &t, &parts), Ok(whole));
}

#[test]
fn ranks_that_disagree_are_named() {
    let mesh = mesh();
    let t = Type::f32(&[2]);
    let mut parts = scatter(&mesh, &t, &numbers(&[2]));
    parts[4].data[1] = 7.0;
    let e = gather(&mesh, &t, &parts).expect_err("rank 4 differs");
    assert_eq!(e.code, "ranks-disagree");
    assert!(e.message.contains("rank 4") && e.message.contains("element 1"), "{}", e.message);
    parts.truncate(4);
    let mut v = t.clone();
    v.varying = mesh.all();
    assert_eq!(gather(&mesh, &v, &parts).expect_err("no global").code, "varying");
    assert_eq!(gather(&mesh, &t, &[numbers(&[3])]).expect_err("wrong shape").code, "arguments");
}

fn one_op(mesh: &Mesh, op: Op, ty: Type) -> Func {
    let mut f = Func::new("f");
    let x = f.arg(ty, Name::parse("x"), None);
    let y = Builder::new(mesh, &mut f).push("y", op, &[x]);
    f.results.push(Port { value: y, role: None });
    f
}

#[test]
fn wrong_arguments_are_refused() {
    let mesh = mesh();
    let f = one_op(&mesh, Exp {}.into(), split(Type::f32(&[4]), 0, &[0]));
    let code =
        |args: &[Vec<Tensor>]| call(&mesh, &f, args, Precision::F64).expect_err("wrong").code;
    assert_eq!(code(&[]), "arguments");
    assert_eq!(code(&[vec![numbers(&[2]); 5]]), "arguments");
    assert_eq!(code(&[vec![numbers(&[4]); 6]]), "arguments");
    assert!(call(&mesh, &f, &[vec![numbers(&[2]); 6]], Precision::F64).is_ok());
}

#[test]
fn floats_are_rounded_after_every_op() {
    let mesh = Mesh::default();
    let run = |op: Op, dtype, x: f64, p| {
        let f = one_op(&mesh, op, Type::new(dtype, &[]));
        call(&mesh, &f, &[vec![Tensor::scalar(x)]], p).expect("runs")[0][0].data[0]
    };
    let third = |d, p| run(Scale { by: 1.0 / 3.0 }.into(), d, 1.0, p);
    assert_eq!(third(DType::F32, Precision::F64), 1.0 / 3.0);
    assert_eq!(third(DType::F32, Precision::F32), f64::from(1.0f32 / 3.0));
    assert_eq!(third(DType::BF16, Precision::F32), 0.333_984_375);
    assert_eq!(third(DType::F16, Precision::F32), 0.333_251_953_125);
    let big = f64::from(1 << 30) + 1.0;
    assert_eq!(run(AtLeast { bound: big }.into(), DType::I32, big, Precision::F32), 1.0);
}

const ROWS: usize = 12;

/// `enter`: a zero sum. `forward`: x · w summed over everything, added to the sum; the products are
/// shown. `finish`: the sum over the ranks is shown, and w moves by it.
fn step_module(mesh: Mesh, microbatches: usize) -> Module {
    let dp = AtomSet::one(Atom(0));
    let partial = || {
        let mut t = Type::f32(&[]);
        t.sum = dp;
        t
    };
    let sum = Role::new(RoleKind::Sum, "loss");
    let role = |kind, name: &str| Some(Role::new(kind, name));
    let mut enter = Func::new("step_prologue");
    let w = enter.arg(Type::f32(&[3]), Name::parse("w"), role(RoleKind::Param, "w"));
    let mut b = Builder::new(&mesh, &mut enter);
    let zero = b.push_as("zero", Fill { value: 0.0 }, &[], &partial());
    let ready = b.push("f", shardc_ir::ops::FanOut { axes: dp }, &[w]);
    let port = |value: Value, role: Option<Role>| Port { value, role };
    enter.results =
        vec![port(zero, Some(sum.clone())), port(ready, role(RoleKind::Unsharded, "w"))];

    let mut forward = Func::new("forward");
    let ready_ty = enter.ty(ready).clone();
    let w = forward.arg(ready_ty, Name::parse("w"), role(RoleKind::Unsharded, "w"));
    let x_ty = split(Type::f32(&[ROWS / microbatches, 3]), 0, &[0]);
    let x = forward.arg(x_ty, Name::parse("x"), Some(Role::input("x")));
    let before = forward.arg(partial(), Name::parse("s"), Some(sum.clone()));
    let mut b = Builder::new(&mesh, &mut forward);
    let y = b.push("y", Mul::by("bh,h->bh", &[2, 1]), &[x, w]);
    let s = b.push("s", ReduceSum { rule: RuleAttr::new("bh->", &[2]) }, &[y]);
    let s = b.push("s", Add::same(), &[before, s]);
    forward.results = vec![port(s, Some(sum.clone())), port(y, role(RoleKind::Output, "y"))];

    let mut finish = Func::new("optimizer_step");
    let s = finish.arg(partial(), Name::parse("s"), Some(sum));
    let w = finish.arg(Type::f32(&[3]), Name::parse("w"), role(RoleKind::Param, "w"));
    let mut b = Builder::new(&mesh, &mut finish);
    let s = b.push("s", AllReduce { axes: dp }, &[s]);
    let new = b.push("w", Mul::by("h,->h", &[1, 0]), &[w, s]);
    finish.results =
        vec![port(s, role(RoleKind::Output, "loss")), port(new, role(RoleKind::Param, "w"))];
    Module { mesh, funcs: vec![enter, forward, finish], ..Module::default() }
}

fn turn(func: usize, microbatch: Option<usize>) -> Instr {
    Instr::Call(Call { func, microbatch, frames: Default::default() })
}

fn actions(microbatches: usize) -> Vec<Instr> {
    let each = (0..microbatches).map(|j| turn(1, Some(j)));
    [turn(0, None)].into_iter().chain(each).chain([turn(2, None)]).collect()
}

fn start(m: &Module, rows: usize) -> StepState {
    let mut state = StepState::default();
    let w = Tensor::new(&[3], vec![1.0, -2.0, 0.5]);
    state.put(&m.mesh, Role::new(RoleKind::Param, "w"), &Type::f32(&[3]), &w);
    state.inputs.insert("x".into(), numbers(&[rows, 3]));
    state
}

#[test]
fn microbatches_see_their_own_rows_of_every_rank() {
    let x = numbers(&[ROWS, 3]);
    let want = Tensor::from_fn(&[ROWS, 3], |i| x.at(i) * [1.0, -2.0, 0.5][i[1]]);
    let loss: f64 = want.data.iter().sum();
    for microbatches in [1, 2, 3] {
        let m = step_module(Mesh::new(&[("dp", 2)]).expect("a mesh"), microbatches);
        let mut state = start(&m, ROWS);
        run_step(&m, &[&actions(microbatches)], &mut state, Precision::F64).expect("runs");
        assert_eq!(state.outputs[&Role::new(RoleKind::Output, "y")].len(), microbatches);
        assert_eq!(state.output(&m.mesh, RoleKind::Output, "y"), Ok(want.clone()));
        assert_eq!(state.output(&m.mesh, RoleKind::Output, "loss"), Ok(Tensor::scalar(loss)));
        let w = &state.values[&Role::new(RoleKind::Param, "w")];
        assert_eq!(w[0].data, [loss, -2.0 * loss, 0.5 * loss]);
    }
}

/// Microbatch 1 of rank 1 is rows 6 + 2.. of the batch, not rows 4 + ...
#[test]
fn rows_of_a_rank_are_contiguous() {
    let m = step_module(Mesh::new(&[("dp", 2)]).expect("a mesh"), 3);
    let mut state = start(&m, ROWS);
    run_step(&m, &[&actions(3)], &mut state, Precision::F64).expect("runs");
    let shown = &state.outputs[&Role::new(RoleKind::Output, "y")][1];
    assert_eq!(shown.microbatch, Some(1));
    assert_eq!(shown.ranks[1].at(&[0, 0]), numbers(&[ROWS, 3]).at(&[8, 0]));
}

#[test]
fn steps_that_do_not_fit_are_refused() {
    let m = step_module(Mesh::new(&[("dp", 2)]).expect("a mesh"), 2);
    let code = |state: &mut StepState, actions: &[Instr]| {
        run_step(&m, &[actions], state, Precision::F64).expect_err("refused").code
    };
    assert_eq!(code(&mut StepState::default(), &actions(2)), "unbound");
    assert_eq!(code(&mut start(&m, 13), &actions(2)), "microbatch");
    assert_eq!(code(&mut start(&m, ROWS), &actions(3)), "microbatch");
    let none = turn(1, None);
    assert_eq!(code(&mut start(&m, ROWS), &[turn(0, None), none]), "microbatch");
    assert_eq!(code(&mut start(&m, ROWS), &[turn(9, None)]), "unbound");
    let mut no_input = start(&m, ROWS);
    no_input.inputs.clear();
    assert_eq!(code(&mut no_input, &actions(2)), "unbound");
    assert_eq!(
        start(&m, ROWS).output(&m.mesh, RoleKind::Output, "y").expect_err("nothing shown").code,
        "unbound"
    );
}
