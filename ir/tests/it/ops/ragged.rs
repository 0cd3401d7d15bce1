//! `all_to_all_v`: the rows that counts name go where `all_to_all` takes them.

use super::{apply, results, run, with_args};
use shardc_ir::builder::Builder;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{AllToAllV, Op};
use shardc_ir::samples::Sample;
use shardc_ir::tensor::Tensor;
use shardc_ir::types::{AtomList, DType, Type};

const ROWS: usize = 3;

/// Rows `[g,z,c,h]` and counts `[g,e,z]` of 2 experts per group, split along shards and along
/// groups: `[at tokens, at experts]` each.
fn types(axes: AtomSet, groups: usize, shards: usize) -> [[Type; 2]; 2] {
    let split = |t: &Type, dim: usize| {
        let mut t = t.clone();
        t.dims[dim].atoms = AtomList::collect(axes.iter()).expect("few");
        t
    };
    let rows = Type::f32(&[groups, shards, ROWS, 2]);
    let counts = Type::new(DType::I32, &[groups, 2, shards]);
    [[split(&rows, 1), split(&rows, 0)], [split(&counts, 2), split(&counts, 0)]]
}

fn meshes() -> Vec<(Mesh, AtomSet)> {
    let one = |axes: &[(&str, usize)], bits| (Mesh::new(axes).expect("a mesh"), AtomSet(bits));
    vec![
        one(&[("x", 2)], 1),
        one(&[("x", 3)], 1),
        one(&[("u", 2), ("x", 2)], 2),
        one(&[("x", 2), ("u", 2), ("y", 2)], 5),
    ]
}

/// Group, expert and shard; some fill a buffer, some name more rows than there are.
fn counts(groups: usize, shards: usize) -> Tensor {
    Tensor::from_fn(&[groups, 2, shards], |i| ((3 * i[0] + 2 * i[1] + i[2]) % 4) as f64)
}

#[test]
fn named_rows_arrive_and_gradients_go_back() {
    for (mesh, axes) in meshes() {
        for (groups, shards) in [(2, 4), (4, 4), (3, 5)] {
            let [rows, n] = types(axes, groups, shards);
            let n_whole = counts(groups, shards);
            let named = |i: &[usize]| n_whole.at(&[i[0], 0, i[1]]) + n_whole.at(&[i[0], 1, i[1]]);
            let whole = Tensor::from_fn(&[groups, shards, ROWS, 2], |i| {
                1.0 + (100 * i[0] + 10 * i[1] + 2 * i[2] + i[3]) as f64
            });
            let want = Tensor::from_fn(&whole.shape, |i| {
                if (i[2] as f64) < named(i) { whole.at(i) } else { 0.0 }
            });
            for (there, back) in [(0, 1), (1, 0)] {
                let (from, to) = (1 - there, 1 - back);
                let op = AllToAllV { axes, from, to, copies: 5 };
                let ins = [&rows[there], &n[there], &n[back], &rows[back]].map(Type::clone);
                let (mut f, args) = with_args(&ins);
                let mut b = Builder::new(&mesh, &mut f);
                let y = b.push_as("y", op.clone(), &args[..3], &rows[back]);
                let op: Op = op.into();
                let d = op.def().grad(&mut b, &args[..3], &[y], &[Some(args[3])]);
                let d = d[0].expect("a gradient");
                assert_eq!(b.ty(d), &rows[there].cotangent());
                results(&mut f, &[y, d]);
                let inputs = [whole.clone(), n_whole.clone(), n_whole.clone(), whole.clone()];
                let got = run(&mesh, &f, &inputs).unwrap_or_else(|e| panic!("{e}"));
                assert_eq!(got, [want.clone(), want.clone()], "{:?} {from}→{to}", mesh.axes);
            }
        }
    }
}

#[test]
fn bytes_are_those_of_an_even_load_and_of_full_buffers() {
    let (mesh, axes) = (Mesh::new(&[("x", 4)]).expect("a mesh"), AtomSet(1));
    let [rows, _] = types(axes, 4, 4);
    for (there, back) in [(0, 1), (1, 0)] {
        for (copies, sent) in [(4, 4), (11, 11), (12, 12), (40, 12)] {
            let op: Op = AllToAllV { axes, from: 1 - there, to: 1 - back, copies }.into();
            let c = op.collective().expect("a collective");
            let (x, y) = (&rows[there], &rows[back]);
            let row = 3.0 / 4.0 * 2.0 * 4.0;
            let got = [c.ring_bytes(&mesh, x, y), c.max_bytes(&mesh, x, y)];
            assert_eq!(got, [row * f64::from(sent), row * 12.0]);
        }
    }
}

#[test]
fn counts_of_other_rows_are_refused() {
    let (mesh, axes) = (Mesh::new(&[("x", 2)]).expect("a mesh"), AtomSet(1));
    let [rows, n] = types(axes, 2, 4);
    let op: Op = AllToAllV { axes, from: 1, to: 0, copies: 5 }.into();
    let refused =
        |ins: [&Type; 3]| apply(&mesh, &op, &ins.map(Type::clone), &[]).expect_err("refused");
    apply(&mesh, &op, &[&rows[0], &n[0], &n[1]].map(Type::clone), &[]).expect("legal");
    assert!(refused([&rows[0], &n[1], &n[1]]).contains("`sent` is i32[2@x,2,4]"));
    assert!(refused([&rows[0], &n[0], &n[0]]).contains("`received` is i32[2,2,4@x]"));
    assert!(refused([&rows[1], &n[1], &n[0]]).starts_with("collective"));
    let [_, larger] = types(axes, 2, 6);
    assert!(refused([&rows[0], &larger[0], &n[1]]).contains("`sent`"));
    assert!(refused([&rows[0], &rows[0], &n[1]]).starts_with("operands"));
    let mut sum = n[0].clone();
    sum.dims[2].atoms = AtomList::EMPTY;
    sum.sum = axes;
    assert!(refused([&rows[0], &sum, &n[1]]).starts_with("collective"));
}

/// Rows that no copy fills are no numbers: what reads them cannot be right by chance.
#[test]
fn rows_that_no_copy_fills_are_no_numbers() {
    let one = |text, ins: [Tensor; 3]| {
        let sample = Sample::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        sample.eval(&ins.each_ref()).remove(0)
    };
    // Two tokens in rows 0 and 2 of 4; two of three rows are those of the one expert.
    let slot = Tensor::new(&[1, 2, 1], vec![0.0, 2.0]);
    let full = |shape: &[usize]| Tensor::full(shape, 2.0);
    let ins = [full(&[1, 2, 1]), slot, full(&[1, 2, 1])];
    let sent = one("dispatch[g=1,c=4] f32[1,2,1], i32[1,2,1], f32[1,2,1]", ins);
    let product = |text| one(text, [full(&[1, 1, 3, 1]), full(&[1, 1, 1]), full(&[1, 1, 1])]);
    let made = product("grouped_dot f32[1,1,3,1], i32[1,1,1], f32[1,1,1]");
    let mirrored = product("grouped_dot_t f32[1,1,3,1], i32[1,1,1], f32[1,1,1]");
    let filled = |t: &Tensor| t.data.iter().map(|x| !x.is_nan()).collect::<Vec<_>>();
    assert_eq!(filled(&sent), [true, false, true, false]);
    assert_eq!([filled(&made), filled(&mirrored)], [[true, true, false]; 2]);
}
