//! What rings are made of: pieces as values of their own, and attention merged over sets of keys.

use super::{apply, close, results, run, with_args};
use shardc_ir::builder::Builder;
use shardc_ir::interp::{self, Precision, scatter};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::{FromVarying, MergeAttention, Op, Permute, RingShard, Slice, ToVarying};
use shardc_ir::samples::Sample;
use shardc_ir::tensor::Tensor;
use shardc_ir::types::{AtomList, DType, Type};

/// Meshes, and the axes of the ring.
fn rings() -> Vec<(Mesh, AtomSet)> {
    let one = |axes: &[(&str, usize)], ring: &[u8]| {
        let ring = ring.iter().map(|&a| Atom(a)).collect();
        (Mesh::new(axes).expect("a mesh"), ring)
    };
    vec![
        one(&[("x", 2)], &[0]),
        one(&[("x", 3)], &[0]),
        one(&[("u", 2), ("x", 4)], &[1]),
        one(&[("x", 2), ("u", 2), ("y", 2)], &[0, 2]),
    ]
}

fn split(t: &Type, dim: usize, axes: AtomSet) -> Type {
    let mut t = t.clone();
    t.dims[dim].atoms = AtomList::collect(axes.iter()).expect("few");
    t
}

#[test]
fn own_and_join_undo_each_other_and_are_each_others_gradients() {
    for (mesh, axes) in rings() {
        let whole = split(&Type::f32(&[3, 24]), 1, axes);
        let (mut f, args) = with_args(std::slice::from_ref(&whole));
        let mut b = Builder::new(&mesh, &mut f);
        let (own, join) = (ToVarying { axes, dim: 1 }, FromVarying { axes, dim: 1 });
        let own_value = b.push("own", own, &args);
        let joined = b.push("joined", join, &[own_value]);
        let mut want = Type::f32(&[3, 24 / mesh.ways(axes)]);
        want.varying = axes;
        assert_eq!((b.ty(own_value), b.ty(joined)), (&want, &whole));
        let ops: Vec<Op> = b.f.nodes.iter().map(|n| n.op.clone()).collect();
        for (op, (x, mirror)) in ops.iter().zip([(args[0], &ops[1]), (own_value, &ops[0])]) {
            let d = [joined, own_value][usize::from(x == args[0])];
            let g = op.def().grad(&mut b, &[x], &[d], &[Some(d)])[0].expect("a gradient");
            assert_eq!(b.ty(g), &b.ty(x).cotangent());
            assert_eq!(&b.f.nodes.last().expect("just made").op, mirror);
        }
        results(&mut f, &[joined]);
        let x = Tensor::from_fn(&[3, 24], |i| (24 * i[0] + i[1]) as f64);
        assert_eq!(run(&mesh, &f, std::slice::from_ref(&x)).expect("runs")[0], x);
    }
}

/// A piece of what all have is what moving own pieces around the ring would bring.
#[test]
fn a_piece_is_what_a_permute_would_bring() {
    for (mesh, axes) in rings() {
        let mut whole = Type::new(DType::I32, &[24]);
        whole.replicated = axes;
        for shift in 0..=mesh.ways(axes) {
            let (mut f, args) = with_args(std::slice::from_ref(&whole));
            let mut b = Builder::new(&mesh, &mut f);
            let piece = b.push("piece", RingShard { axes, dim: 0, shift }, &args);
            let sliced = b.push("slice", Slice { axes, dim: 0 }, &args);
            let own = b.push("own", ToVarying { axes, dim: 0 }, &[sliced]);
            let moved = b.push("moved", Permute { axes, shift }, &[own]);
            assert_eq!(b.ty(piece), b.ty(moved));
            results(&mut f, &[piece, moved]);
            let x = Tensor::from_fn(&[24], |i| (7 * i[0] % 24) as f64);
            let args = [scatter(&mesh, &whole, &x)];
            let got = interp::call(&mesh, &f, &args, Precision::F64).expect("runs");
            assert_eq!(got[0], got[1], "shift {shift}");
        }
    }
}

#[test]
fn operands_in_the_wrong_state_are_refused() {
    let mesh = Mesh::new(&[("x", 2), ("u", 2)]).expect("a mesh");
    let (axes, other) = (mesh.axis("x").expect("x"), mesh.axis("u").expect("u"));
    let plain = Type::new(DType::I32, &[12, 10]);
    let mut replicated = plain.clone();
    replicated.replicated = axes;
    let mut varying = plain.clone();
    varying.varying = axes;
    let (own, join) = (ToVarying { axes, dim: 0 }, FromVarying { axes, dim: 0 });
    let piece = RingShard { axes, dim: 0, shift: 1 };
    let minor = split(&plain, 0, other.union(axes));
    let uneven = |n: usize| Type::new(DType::I32, &[n, 4]);
    let mut uneven_replicated = uneven(5);
    uneven_replicated.replicated = axes;
    let refused = |op: Op, t: &Type, code: &str| {
        let e = apply(&mesh, &op, std::slice::from_ref(t), &[]).expect_err("refused");
        assert!(e.starts_with(code), "{op:?} of {t:?}: {e}");
    };
    for t in [&plain, &replicated, &varying, &split(&plain, 1, axes), &minor] {
        refused(own.clone().into(), t, "collective");
    }
    for t in [&plain, &replicated, &split(&plain, 0, axes)] {
        refused(join.clone().into(), t, "collective");
    }
    for t in [&plain, &varying, &split(&plain, 0, axes)] {
        refused(piece.clone().into(), t, "collective");
    }
    refused(join.into(), &split(&varying, 0, other), "collective");
    refused(own.into(), &split(&uneven(5), 0, axes), "uneven");
    refused(piece.clone().into(), &uneven_replicated, "uneven");
    let mut floats = Type::f32(&[12]);
    floats.replicated = axes;
    refused(piece.into(), &floats, "operands");
}

/// Attention over parts of the keys, merged, is attention over all of them: also where a query sees
/// nothing in one part, and where it sees nothing at all.
#[test]
fn attention_over_parts_of_the_keys_is_merged() {
    for attrs in ["mask=causal", "mask=-1..0", "mask=causal; softcap=0.6"] {
        let text = |keys: usize| {
            format!(
                "attention[0.5; {attrs}] \
                 f32[2,5,4,2], f32[2,{keys},2,2], f32[2,{keys},2,3], i32[5], i32[{keys}]"
            )
        };
        let sample = |keys: usize| Sample::parse(text(keys).leak()).expect("a sample");
        let ins = sample(6).draw(1);
        let queries = Tensor::new(&[5], vec![3.0, 0.0, 5.0, 1.0, 9.0]);
        let keys = Tensor::new(&[6], vec![4.0, 1.0, 5.0, 3.0, 2.0, 8.0]);
        let part = |from: usize, len: usize| -> Vec<Tensor> {
            let rows = |t: &Tensor| t.slice(1, from, len);
            let of = [ins[0].clone(), rows(&ins[1]), rows(&ins[2]), queries.clone()];
            let of: Vec<Tensor> = of.into_iter().chain([keys.slice(0, from, len)]).collect();
            sample(len).eval(&of.iter().collect::<Vec<_>>())
        };
        let (want, a, b) = (part(0, 6), part(0, 2), part(2, 4));
        // The second query, at position 0, sees no key.
        assert!(want[1].data.contains(&f64::NEG_INFINITY));
        assert!(a[1].data.iter().zip(&b[1].data).any(|(x, y)| x.is_finite() != y.is_finite()));
        let types: Vec<Type> = [&a[0], &a[1]].map(|t| Type::f32(&t.shape)).into();
        let (mut f, args) = with_args(&[types.clone(), types].concat());
        let mesh = Mesh::default();
        let made = Builder::new(&mesh, &mut f).push_n(&["out", "lse"], MergeAttention {}, &args);
        results(&mut f, &made);
        let got = run(&mesh, &f, &[a, b].concat()).expect("runs");
        for (g, w) in got.iter().zip(&want) {
            close(g, w, 1e-12).expect("equal");
        }
    }
}
