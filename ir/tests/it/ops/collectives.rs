//! Collectives against their definitions on 2, 3 and 4 ranks, with uneven pieces; gradients against
//! the table of mirrors; operands in the wrong state.

use super::{apply, results, with_args};
use shardc_ir::builder::Builder;
use shardc_ir::interp::{self, Precision, gather, scatter};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::OpDef as _;
use shardc_ir::ops::{
    AllGather, AllReduce, AllToAll, Broadcast, FanOut, Op, PadToPartial, Permute, Reduce,
    ReduceScatter, Slice,
};
use shardc_ir::rng::Stream;
use shardc_ir::tensor::Tensor;
use shardc_ir::types::{AtomList, Type};

/// A state over the collective's axes.
#[derive(Clone, Copy, PartialEq, Debug)]
enum On {
    I,
    R,
    V,
    Sum,
    Max,
    Min,
    /// Split in this dim.
    S(usize),
}

struct Use {
    op: Op,
    from: On,
    to: On,
    /// Ops of the gradient.
    mirror: &'static [&'static str],
}

/// The axes of the collective in a mesh, in its dims' order.
struct Axes {
    mesh: Mesh,
    atoms: Vec<Atom>,
}

fn meshes() -> Vec<Axes> {
    let one = |axes: &[(&str, usize)], atoms: &[u8]| Axes {
        mesh: Mesh::new(axes).expect("a mesh"),
        atoms: atoms.iter().map(|&a| Atom(a)).collect(),
    };
    vec![
        one(&[("x", 2)], &[0]),
        one(&[("x", 3)], &[0]),
        one(&[("x", 4)], &[0]),
        one(&[("u", 2), ("x", 3)], &[1]),
        one(&[("x", 3), ("u", 2)], &[0]),
        one(&[("x", 2), ("u", 2), ("y", 2)], &[0, 2]),
    ]
}

fn uses(axes: AtomSet) -> Vec<Use> {
    let gather = |dim| AllGather { axes, dim }.into();
    let scatter = |dim| ReduceScatter { axes, dim }.into();
    let one = |op: Op, from, to, mirror| Use { op, from, to, mirror };
    vec![
        one(FanOut { axes }.into(), On::I, On::R, &["all_reduce"]),
        one(AllReduce { axes }.into(), On::Sum, On::I, &["fan_out"]),
        one(AllReduce { axes }.into(), On::Sum, On::R, &["all_reduce"]),
        one(AllReduce { axes }.into(), On::Max, On::I, &["fan_out"]),
        one(AllReduce { axes }.into(), On::Min, On::R, &["all_reduce"]),
        one(gather(1), On::S(1), On::R, &["reduce_scatter"]),
        one(gather(0), On::S(0), On::I, &["slice"]),
        one(scatter(0), On::Sum, On::S(0), &["all_gather"]),
        one(Slice { axes, dim: 1 }.into(), On::R, On::S(1), &["pad_to_partial"]),
        one(Slice { axes, dim: 0 }.into(), On::I, On::S(0), &["all_gather"]),
        one(PadToPartial { axes, dim: 1 }.into(), On::S(1), On::Sum, &["slice"]),
        one(AllToAll { axes, from: 0, to: 1 }.into(), On::S(0), On::S(1), &["all_to_all"]),
        one(AllToAll { axes, from: 1, to: 0 }.into(), On::S(1), On::S(0), &["all_to_all"]),
        one(Permute { axes, shift: 1 }.into(), On::V, On::V, &["permute"]),
        one(Permute { axes, shift: 3 }.into(), On::V, On::V, &["permute"]),
    ]
}

fn typed(a: &Axes, sizes: &[usize], on: On) -> Type {
    let mut t = Type::f32(sizes);
    let set: AtomSet = a.atoms.iter().copied().collect();
    match on {
        On::I => {}
        On::R => t.replicated = set,
        On::V => t.varying = set,
        On::Sum => t.sum = set,
        On::Max => t.max = set,
        On::Min => t.min = set,
        On::S(d) => t.dims[d].atoms = AtomList::collect(a.atoms.iter().copied()).expect("few"),
    }
    t
}

fn draw(sizes: &[usize], seed: u64) -> Tensor {
    let stream = Stream::new(seed, "collectives", 0);
    let mut k = 0;
    Tensor::from_fn(sizes, |_| {
        k += 1;
        3.0 * stream.uniform(k) - 1.5
    })
}

/// Pieces of every rank; of a varying value, something else on each rank.
fn pieces(mesh: &Mesh, t: &Type, seed: u64) -> Vec<Tensor> {
    if t.varying.is_empty() {
        return scatter(mesh, t, &draw(&t.sizes(), seed));
    }
    (0..mesh.ranks()).map(|r| draw(&t.sizes(), seed + 1000 * r as u64)).collect()
}

const SIZES: &[[usize; 2]] = &[[4, 6], [5, 7], [2, 3], [1, 1]];

/// Every use on every mesh and size.
fn each(mut f: impl FnMut(&str, &Axes, &[usize], &Use)) {
    for a in meshes() {
        for sizes in SIZES {
            for u in uses(a.atoms.iter().copied().collect()) {
                let what =
                    format!("{:?} {:?}→{:?} {sizes:?} on {:?}", u.op, u.from, u.to, a.mesh.axes);
                f(&what, &a, sizes, &u);
            }
        }
    }
}

/// What each rank must hold, from the definition: all of it, its piece, its neighbour's value.
fn expected(a: &Axes, u: &Use, from: &Type, to: &Type, ins: &[Tensor]) -> Vec<Tensor> {
    let set: AtomSet = a.atoms.iter().copied().collect();
    if let Op::Permute(p) = &u.op {
        let source = |r: usize| {
            let group = a.mesh.group(set, r);
            let at = group.iter().position(|&g| g == r).expect("own group");
            let n = group.len();
            ins[group[(at + n * p.shift - p.shift) % n]].clone()
        };
        return (0..ins.len()).map(source).collect();
    }
    let whole = gather(&a.mesh, from, ins).expect("legal operands");
    if u.to != On::Sum {
        return scatter(&a.mesh, to, &whole);
    }
    // `place`: the rank's own piece among zeros.
    let one = |(r, t): (usize, &Tensor)| {
        let e = from.extent(&a.mesh, 1, &a.mesh.coords(r));
        let inside = |j: usize| j >= e.offset && j < e.offset + e.len;
        Tensor::from_fn(&to.sizes(), |i| {
            if inside(i[1]) { t.at(&[i[0], i[1] - e.offset]) } else { 0.0 }
        })
    };
    ins.iter().enumerate().map(one).collect()
}

#[test]
fn collectives_do_what_they_are_defined_to_do() {
    each(|what, a, sizes, u| {
        let (from, to) = (typed(a, sizes, u.from), typed(a, sizes, u.to));
        let one = std::slice::from_ref;
        let f = apply(&a.mesh, &u.op, one(&from), one(&to));
        let f = f.unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(f.ty(f.results[0].value), &to, "{what}");
        let ins = pieces(&a.mesh, &from, 1);
        let got = interp::call(&a.mesh, &f, std::slice::from_ref(&ins), Precision::F64);
        let got = got.unwrap_or_else(|e| panic!("{what}: {e}"));
        // Sums are left folds in group order, so even they are equal bit for bit.
        assert_eq!(got[0], expected(a, u, &from, &to, &ins), "{what}");
    });
}

#[test]
fn gradients_are_the_mirrors() {
    each(|what, a, sizes, u| {
        let (from, to) = (typed(a, sizes, u.from), typed(a, sizes, u.to));
        let (mut f, args) = with_args(&[from.clone(), to.cotangent()]);
        let mut b = Builder::new(&a.mesh, &mut f);
        let out = b.push_as("y", u.op.clone(), &args[..1], &to);
        let grads = u.op.def().grad(&mut b, &args[..1], &[out], &[Some(args[1])]);
        let ops: Vec<&str> = f.nodes[1..].iter().map(|n| n.op.mnemonic()).collect();
        assert_eq!(ops, u.mirror, "{what}");
        let named = u.op.layout().expect("an op of ranks").mirror();
        assert!(ops.iter().all(|o| named.contains(o)), "{what}: {named:?}");
        let Some(g) = grads[0] else {
            assert!(u.mirror.is_empty(), "{what}");
            return;
        };
        assert_eq!(f.ty(g), &from.cotangent(), "{what}");
        results(&mut f, &[out, g]);
        let args = [pieces(&a.mesh, &from, 2), pieces(&a.mesh, &to.cotangent(), 3)];
        let got = interp::call(&a.mesh, &f, &args, Precision::F64).expect("runs");
        if u.from == On::V {
            // The sum over all ranks of y · d_y is that of x · d_x.
            let dot = |x: &[Tensor], y: &[Tensor]| -> f64 {
                x.iter()
                    .zip(y)
                    .flat_map(|(x, y)| x.data.iter().zip(&y.data))
                    .map(|(x, y)| x * y)
                    .sum()
            };
            let (forward, back) = (dot(&got[0], &args[1]), dot(&args[0], &got[1]));
            assert!((forward - back).abs() < 1e-12, "{what}");
            return;
        }
        // Every collective is the identity of the global tensor, and so is its gradient.
        let want = gather(&a.mesh, &to.cotangent(), &args[1]).expect("legal");
        let got = gather(&a.mesh, f.ty(g), &got[1]).unwrap_or_else(|e| panic!("{what}: {e}"));
        super::close(&got, &want, 1e-12).unwrap_or_else(|e| panic!("{what}: {e}"));
    });
}

#[test]
fn operands_in_the_wrong_state_are_refused() {
    let states = [On::I, On::R, On::V, On::Sum, On::Max, On::Min, On::S(0), On::S(1)];
    let mut refused = 0;
    for a in meshes() {
        let all = uses(a.atoms.iter().copied().collect());
        for u in &all {
            for from in states {
                let legal = all.iter().any(|v| v.op == u.op && v.from == from);
                // A slice takes I and R; an all_reduce any reduction; whichever the table shows.
                let legal = match &u.op {
                    Op::Slice(_) => matches!(from, On::I | On::R),
                    Op::AllReduce(_) => matches!(from, On::Sum | On::Max | On::Min),
                    _other => legal,
                };
                let f = apply(&a.mesh, &u.op, &[typed(&a, &[12, 12], from)], &[]);
                assert_eq!(f.is_ok(), legal, "{:?} of {from:?}: {:?}", u.op, f.err());
                if let Err(e) = f {
                    assert!(e.starts_with("collective"), "{:?} of {from:?}: {e}", u.op);
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 200, "{refused}");
}

/// One call may reduce to invariant over one axis and to replicated over another.
#[test]
fn all_reduce_to_invariant_and_replicated_at_once() {
    let mesh = Mesh::new(&[("x", 2), ("y", 3)]).expect("a mesh");
    let (mut from, mut to) = (Type::f32(&[5]), Type::f32(&[5]));
    from.sum = mesh.all();
    to.replicated = AtomSet::one(Atom(1));
    let op: Op = AllReduce { axes: mesh.all() }.into();
    let (mut f, args) = with_args(&[from.clone(), to.cotangent()]);
    let mut b = Builder::new(&mesh, &mut f);
    let y = b.push_as("y", op.clone(), &args[..1], &to);
    let g = op.def().grad(&mut b, &args[..1], &[y], &[Some(args[1])])[0].expect("a gradient");
    assert_eq!(f.ty(g), &from.cotangent());
}

/// Several tensors in one call are reduced one by one.
#[test]
fn all_reduce_of_several_tensors() {
    let mesh = Mesh::new(&[("x", 3)]).expect("a mesh");
    let types = [[4usize, 1], [2, 3]].map(|s| {
        let mut t = Type::f32(&s);
        t.sum = mesh.all();
        t
    });
    let f = apply(&mesh, &AllReduce { axes: mesh.all() }.into(), &types, &[]).expect("typed");
    let globals = [draw(&[4, 1], 1), draw(&[2, 3], 2)];
    let got = super::run(&mesh, &f, &globals).expect("runs");
    for (g, w) in got.iter().zip(&globals) {
        super::close(g, w, 1e-12).expect("equal");
    }
}

/// A dim may be split over axes in any order; collectives over all of them respect it, and so do
/// their gradients.
#[test]
fn a_dim_split_over_axes_in_another_order() {
    let mesh = Mesh::new(&[("x", 2), ("y", 3)]).expect("a mesh");
    let axes = mesh.all();
    let mut split = Type::f32(&[7]);
    split.dims[0].atoms = AtomList::collect([Atom(1), Atom(0)]).expect("few");
    let mut whole = Type::f32(&[7]);
    whole.replicated = axes;
    let op: Op = AllGather { axes, dim: 0 }.into();
    let (mut f, args) = with_args(&[split.clone(), whole.cotangent()]);
    let mut b = Builder::new(&mesh, &mut f);
    let y = b.push_as("y", op.clone(), &args[..1], &whole);
    let g = op.def().grad(&mut b, &args[..1], &[y], &[Some(args[1])])[0].expect("a gradient");
    assert_eq!(f.ty(g), &split.cotangent());
    results(&mut f, &[y, g]);
    let globals = [draw(&[7], 1), draw(&[7], 2)];
    let got = super::run(&mesh, &f, &globals).expect("runs");
    assert_eq!(got[0], globals[0]);
    super::close(&got[1], &globals[1], 1e-12).expect("equal");
}

/// A broadcast gives piece `from` to all; its mirror reduces to it, among zeros; and back.
#[test]
fn broadcast_and_reduce_are_mirrors() {
    for a in meshes() {
        let axes: AtomSet = a.atoms.iter().copied().collect();
        let (ways, dim) = (a.mesh.ways(axes), 1);
        let whole = typed(&a, &[5, 2 * ways], On::S(dim));
        for from in 0..ways {
            let what = format!("{from} of {:?}", a.mesh.axes);
            let op: Op = Broadcast { axes, dim, from }.into();
            let piece = typed(&a, &[5, 2], On::R);
            let (mut f, args) = with_args(&[whole.clone(), piece.cotangent()]);
            let mut b = Builder::new(&a.mesh, &mut f);
            let y = b.push("y", op.clone(), &args[..1]);
            let g = op.def().grad(&mut b, &args[..1], &[y], &[Some(args[1])])[0];
            let g = g.expect("a gradient");
            assert_eq!((f.ty(y), f.ty(g)), (&piece, &whole.cotangent()), "{what}");
            let Op::Reduce(back) = f.nodes[1].op.clone() else { panic!("{what}: no mirror") };
            assert_eq!(back, Reduce { axes, dim, to: from }, "{what}");
            // The mirror of the mirror.
            let mut b = Builder::new(&a.mesh, &mut f);
            let again = back.grad(&mut b, &args[1..], &[g], &[Some(args[0])])[0].expect("one");
            assert_eq!(f.ty(again), &piece, "{what}");
            results(&mut f, &[y, g, again]);
            let globals = [draw(&[5, 2 * ways], 1), draw(&[5, 2], 2)];
            let parts =
                [scatter(&a.mesh, &whole, &globals[0]), pieces(&a.mesh, &piece.cotangent(), 2)];
            let got = interp::call(&a.mesh, &f, &parts, Precision::F64).expect("runs");
            let own = globals[0].slice(dim, 2 * from, 2);
            assert!(got[0].iter().chain(&got[2]).all(|x| *x == own), "{what}");
            let sum = gather(&a.mesh, &piece.cotangent(), &parts[1]).expect("legal");
            let reduced = gather(&a.mesh, f.ty(g), &got[1]).expect("legal");
            let want = Tensor::from_fn(&[5, 2 * ways], |i| match i[1].checked_sub(2 * from) {
                Some(j) if j < 2 => sum.at(&[i[0], j]),
                _ => 0.0,
            });
            super::close(&reduced, &want, 1e-12).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        // No such piece; a dim that is cut unevenly; not split; not a sum.
        let refused = |op: Op, t: &Type| {
            let e = apply(&a.mesh, &op, std::slice::from_ref(t), &[]).expect_err("refused");
            assert!(e.starts_with("collective"), "{op:?}: {e}");
        };
        refused(Broadcast { axes, dim, from: ways }.into(), &whole);
        refused(Broadcast { axes, dim: 0, from: 0 }.into(), &whole);
        refused(
            Broadcast { axes, dim, from: 0 }.into(),
            &typed(&a, &[5, 2 * ways + 1], On::S(dim)),
        );
        refused(Reduce { axes, dim, to: ways }.into(), &typed(&a, &[5, 2], On::Sum));
        refused(Reduce { axes, dim: 2, to: 0 }.into(), &typed(&a, &[5, 2], On::Sum));
        refused(Reduce { axes, dim, to: 0 }.into(), &typed(&a, &[5, 2], On::R));
    }
}
