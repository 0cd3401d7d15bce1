//! Collectives between threads: uneven pieces of several dims, the same bits on all ranks, and no
//! hanging when a rank fails.

use half::{bf16, f16};
use shardc_ir::diag::{Diag, Exit};
use shardc_ir::func::{Func, Name, Port};
use shardc_ir::interp;
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::{
    AllGather, AllReduce, AllToAll, Broadcast, FromVarying, MergeAttention, Op, PadToPartial,
    Permute, Reduce, ReduceScatter, RingShard, Slice, ToVarying,
};
use shardc_ir::rng::Stream;
use shardc_ir::tensor::Tensor;
use shardc_ir::types::{AtomList, DType, Type};
use shardc_runtime::threads::Threads;
use shardc_runtime::transport::{Reduced, Region, Transport};
use std::sync::Barrier;
use std::time::Duration;

fn atoms(list: &[u8]) -> AtomList {
    AtomList::collect(list.iter().map(|&a| Atom(a))).unwrap()
}

/// A function of one collective.
fn function(mesh: &Mesh, op: Op, ins: &[Type]) -> Func {
    let mut f = Func::new("f");
    let args: Vec<_> = ins.iter().map(|t| f.arg(t.clone(), Name::parse("x"), None)).collect();
    let mut b = shardc_ir::builder::Builder::new(mesh, &mut f);
    let outs = b.push_n(&["y"], op, &args);
    f.results = outs.iter().map(|&value| Port { value, role: None }).collect();
    f
}

fn draw(sizes: &[usize], seed: u64) -> Tensor {
    let s = Stream::new(seed, "x", 0);
    let mut i = 0;
    Tensor::from_fn(sizes, |_| {
        i += 1;
        f64::from((s.uniform(i) * 2.0 - 1.0) as f32)
    })
}

/// Compares as the types say, and with floats of 16 bits in place of f32.
fn check(what: &str, mesh: &Mesh, op: impl Into<Op>, ins: &[Type]) {
    let op = op.into();
    compare(what, mesh, op.clone(), ins);
    for half in [DType::BF16, DType::F16] {
        let in_half = |t: &Type| {
            let dtype = if t.dtype == DType::F32 { half } else { t.dtype };
            Type { dtype, ..t.clone() }
        };
        let ins: Vec<Type> = ins.iter().map(in_half).collect();
        compare(&format!("{what} in {}", half.name()), mesh, op.clone(), &ins);
    }
}

fn compare(what: &str, mesh: &Mesh, op: Op, ins: &[Type]) {
    let f = function(mesh, op, ins);
    let rounded = |t: &Tensor| match ins[0].dtype {
        DType::BF16 => t.map(|x| bf16::from_f64(x).to_f64()),
        DType::F16 => t.map(|x| f16::from_f64(x).to_f64()),
        DType::F32 | DType::I32 => t.clone(),
    };
    let varied = |t: &Type, i: usize| -> Vec<Tensor> {
        if t.varying.is_empty() {
            let mut x = draw(&t.sizes(), i as u64);
            if t.dtype == DType::I32 {
                x = x.map(|x| (x * 1e9).round());
            }
            let pieces = interp::scatter(mesh, t, &x);
            return if t.dtype == DType::I32 {
                pieces
            } else {
                pieces.iter().map(rounded).collect()
            };
        }
        let own = |r| rounded(&draw(&t.lens(mesh, &mesh.coords(r)), r as u64));
        (0..mesh.ranks()).map(own).collect()
    };
    let args: Vec<Vec<Tensor>> = ins.iter().enumerate().map(|(i, t)| varied(t, i)).collect();
    crate::lab::compare(what, mesh, &f, &args);
}

/// Meshes, the atoms of the group, and the atoms of a dim that is split once more.
fn meshes() -> Vec<(Mesh, AtomSet)> {
    let mut out = vec![];
    for n in [2, 3, 4] {
        out.push((Mesh::new(&[("tp", n)]).unwrap(), AtomSet(1)));
    }
    let two = Mesh::new(&[("dp", 2), ("tp", 2)]).unwrap();
    out.extend([1, 2, 3].map(|s| (two.clone(), AtomSet(s))));
    out
}

fn list(s: AtomSet) -> Vec<u8> {
    s.iter().map(|a| a.0).collect()
}

#[test]
fn sums_match_their_meaning() {
    for (mesh, group) in meshes() {
        for sizes in [&[3usize, 5][..], &[70, 61], &[0, 4], &[]] {
            let mut t = Type::f32(sizes);
            t.sum = group;
            let what = format!("all_reduce over {group:?} of {sizes:?} on {:?}", mesh.axes);
            check(&what, &mesh, AllReduce { axes: group }, std::slice::from_ref(&t));
            let mut max = Type::f32(&[7, 300]);
            max.max = group;
            // Different folds in one pass.
            check(&what, &mesh, AllReduce { axes: group }, &[t.clone(), max, t]);
        }
    }
}

#[test]
fn pieces_match_their_meaning() {
    for (mesh, group) in meshes() {
        for dim in 0..3 {
            let what = format!("dim {dim} over {group:?} on {:?}", mesh.axes);
            for dtype in [DType::F32, DType::I32] {
                let mut t = Type::new(dtype, &[5, 7, 6]);
                t.dims[dim].atoms = atoms(&list(group));
                check(
                    &format!("all_gather {what}"),
                    &mesh,
                    AllGather { axes: group, dim },
                    &[t.clone()],
                );
                let to = (dim + 1) % 3;
                check(
                    &format!("all_to_all {what}"),
                    &mesh,
                    AllToAll { axes: group, from: dim, to },
                    &[t.clone()],
                );
            }
            let mut t = Type::f32(&[5, 7, 6]);
            t.dims[dim].atoms = atoms(&list(group));
            check(&format!("place {what}"), &mesh, PadToPartial { axes: group, dim }, &[t]);
            check(
                &format!("slice {what}"),
                &mesh,
                Slice { axes: group, dim },
                &[Type::f32(&[5, 7, 6])],
            );
            let mut t = Type::f32(&[5, 7, 6]);
            t.sum = group;
            check(
                &format!("reduce_scatter {what}"),
                &mesh,
                ReduceScatter { axes: group, dim },
                &[t],
            );
        }
        // Piece by piece, of a dim that is cut evenly.
        let ways = mesh.ways(group);
        for (dim, number) in [(0, 0), (1, ways - 1), (2, ways / 2)] {
            let what = format!("{number} of dim {dim} over {group:?} on {:?}", mesh.axes);
            let mut sizes = [5, 7, 6];
            sizes[dim] = 2 * ways;
            for dtype in [DType::F32, DType::I32] {
                let mut t = Type::new(dtype, &sizes);
                t.dims[dim].atoms = atoms(&list(group));
                let op = Broadcast { axes: group, dim, from: number };
                check(&format!("broadcast {what}"), &mesh, op, &[t]);
            }
            let mut t = Type::f32(&[5, 7, 6]);
            t.sum = group;
            let op = Reduce { axes: group, dim, to: number };
            check(&format!("reduce {what}"), &mesh, op, &[t]);
        }
        for shift in [1, 2, 5] {
            let mut t = Type::f32(&[5, 7]);
            t.varying = group;
            check(&format!("permute {shift}"), &mesh, Permute { axes: group, shift }, &[t]);
        }
    }
}

/// What rings are made of besides: pieces that are values of their own, and merges of attention,
/// also where one or both saw nothing.
#[test]
fn rings() {
    for (mesh, axes) in meshes() {
        for dim in 0..2 {
            let mut t = Type::f32(&[8, 12]);
            t.dims[dim].atoms = atoms(&list(axes));
            if t.dims[dim].size % mesh.ways(axes) == 0 {
                check("own", &mesh, ToVarying { axes, dim }, &[t]);
            }
            let mut t = Type::f32(&[3, 5]);
            t.varying = axes;
            check("join", &mesh, FromVarying { axes, dim }, &[t]);
            for shift in [0, 1, 3] {
                let mut t = Type::new(DType::I32, &[12, 24]);
                t.replicated = axes;
                check("piece", &mesh, RingShard { axes, dim, shift }, &[t]);
            }
        }
    }
    let mesh = Mesh::default();
    let types =
        [[2, 3, 2, 70], [2, 3, 2, 1]].map(|s| Type::f32(&s[..if s[3] == 1 { 3 } else { 4 }]));
    let f = function(&mesh, MergeAttention {}.into(), &[types.clone(), types.clone()].concat());
    let seen = |part: usize| {
        let mut lse = draw(&[2, 3, 2], 5 + part as u64).map(|x| 80.0 * x);
        lse.data[part] = f64::NEG_INFINITY;
        lse.data[7] = f64::NEG_INFINITY;
        let out = Tensor::from_fn(&[2, 3, 2, 70], |i| {
            let some = lse.at(&i[..3]).is_finite();
            if some { (i[3] as f64 * 0.25 - i[1] as f64 + part as f64).sin() } else { 0.0 }
        });
        [vec![out], vec![lse]]
    };
    crate::lab::compare("merge_attention", &mesh, &f, &[seen(0), seen(1)].concat());
}

/// From layout to layout, evenly and not: axes change places, replace each other, change dims.
#[test]
fn exchanges_match_their_meaning() {
    for (mesh, axes, from, to) in [
        ("x=2, y=3", "x*y", "[12@x*y,5]", "[12@y*x,5]"),
        ("x=2, y=3", "x*y", "[7@x,5@y]", "[7@y,5@x]"),
        ("x=2, y=3", "x*y", "[7@x,5]", "[7@y,5]"),
        ("x=2, y=3", "x*y", "[7@x,5]~y", "[7,5@y]"),
        ("x=2, y=3", "y", "[6@x*y,5]", "[6@x,5]"),
        ("x=2, y=2", "x*y", "[6,7,5@x*y]", "[6@x,7@y,5]"),
        ("x=2, y=2", "x*y", "[2@x*y,3]", "[2,3@y*x]"),
        ("x=4", "x", "[3@x,9]", "[3,9@x]"),
    ] {
        for dtype in ["f32", "bf16", "i32"] {
            let text = format!(
                "mesh [{mesh}]\n\nfunc @f(%a: {dtype}{from}) -> {dtype}{to} {{\n  \
                 %b = exchange[{axes}] %a : {dtype}{to}\n  return %b\n}}\n"
            );
            exchanged(&text);
        }
        // The same with the indices of a dim shifted, by less than a piece and more, to the operand's size and others,
        // where nothing else splits the dim.
        for (start, dim, size) in [(1, 0, None), (-2, 1, None), (4, 0, Some(3)), (-9, 1, Some(16))]
        {
            let dims = |t: &str| -> Vec<String> {
                let all = t.split(']').next().expect("dims").trim_start_matches('[');
                all.split(',').map(String::from).collect()
            };
            let mut new = dims(to);
            let (own, split) =
                new[dim].split_once('@').map_or((&*new[dim], None), |(n, a)| (n, Some(a)));
            let n = size.map_or(own.to_string(), |n: usize| n.to_string());
            let shifted = format!("{n}{}", split.map_or(String::new(), |a| format!("@{a}")));
            new[dim] = shifted;
            if axes == "y" && dim == 0 {
                continue;
            }
            let to = format!("[{}]", new.join(","));
            for dtype in ["f32", "bf16", "i32"] {
                exchanged(&format!(
                    "mesh [{mesh}]\n\nfunc @f(%a: {dtype}{from}) -> {dtype}{to} {{\n  \
                     %b = exchange[{axes}; start={start}; dim={dim}] %a : {dtype}{to}\n  return %b\n}}\n"
                ));
            }
        }
        // The mirror of what was replicated is a sum.
        if let Some((whole, axis)) = from.split_once('~') {
            exchanged(&format!(
                "mesh [{mesh}]\n\nfunc @f(%a: f32{to}) -> f32{whole}+{axis} {{\n  \
                 %b = exchange[{axes}] %a : f32{whole}+{axis}\n  return %b\n}}\n"
            ));
        }
    }
}

fn exchanged(text: &str) {
    let m = shardc_ir::text::parse(text).unwrap_or_else(|e| panic!("{text}{e}"));
    let f = &m.funcs[0];
    let mut k = 0;
    let whole = Tensor::from_fn(&f.ty(f.args[0].value).sizes(), |_| {
        k += 1;
        f64::from(k)
    });
    let args = [interp::scatter(&m.mesh, f.ty(f.args[0].value), &whole)];
    let to = f.ty(f.results[0].value);
    if to.sum.is_empty() {
        return crate::lab::compare(text, &m.mesh, f, &args);
    }
    // Which rank has an element of a sum is not said.
    let got = crate::lab::run(&m.mesh, f, &args, false).unwrap_or_else(|e| panic!("{text}{e}"));
    assert_eq!(interp::gather(&m.mesh, to, &got[0]).expect("a sum"), whole, "{text}");
}

#[test]
fn other_dims_may_be_split_unevenly() {
    let mesh = Mesh::new(&[("dp", 3), ("tp", 2)]).unwrap();
    let (dp, tp) = (atoms(&[0]), AtomSet(2));
    let mut t = Type::f32(&[7, 5, 3]);
    t.dims[0].atoms = dp;
    let mut s = t.clone();
    s.dims[1].atoms = atoms(&[1]);
    check("gather beside dp", &mesh, AllGather { axes: tp, dim: 1 }, &[s.clone()]);
    check("all_to_all beside dp", &mesh, AllToAll { axes: tp, from: 1, to: 2 }, &[s]);
    t.sum = tp;
    check("sum beside dp", &mesh, AllReduce { axes: tp }, &[t.clone()]);
    check("scatter beside dp", &mesh, ReduceScatter { axes: tp, dim: 2 }, &[t]);
    // A dim split over dp and then tp: gathered over tp, the minor one.
    let mut t = Type::f32(&[24, 3]);
    t.dims[0].atoms = atoms(&[0, 1]);
    check("minor part", &mesh, AllGather { axes: tp, dim: 0 }, &[t]);
}

type End = Box<dyn Transport>;

/// Runs one closure per rank that shares its memory and returns what they return.
fn ranks<T: Send>(mesh: &Mesh, timeout: u64, f: impl Fn(usize, End) -> T + Sync) -> Vec<T> {
    let ends = Threads::connect(mesh, Duration::from_millis(timeout));
    each(ends.into_iter().map(|end| Box::new(end) as End).collect(), f)
}

/// As [`ranks`], for ranks that exchange messages.
fn posted<T: Send>(mesh: &Mesh, timeout: u64, f: impl Fn(usize, End) -> T + Sync) -> Vec<T> {
    each(crate::lab::messages(mesh, Duration::from_millis(timeout)), f)
}

fn each<T: Send>(ends: Vec<End>, f: impl Fn(usize, End) -> T + Sync) -> Vec<T> {
    std::thread::scope(|s| {
        let f = &f;
        let all: Vec<_> =
            ends.into_iter().enumerate().map(|(r, e)| s.spawn(move || f(r, e))).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// SAFETY of the tests below: vectors outlive the transports, which only these threads use.
fn region(x: &mut Vec<f32>) -> Region {
    let block = crate::lab::dense(&[x.len()]);
    // SAFETY: the block is the whole vector; see above.
    unsafe { Region::new(x.as_mut_ptr(), &block) }
}

#[test]
fn sums_are_left_folds_and_the_same_bits_everywhere() {
    for n in [2, 3, 4] {
        let mesh = Mesh::new(&[("tp", n)]).unwrap();
        for len in [1, 100, 2049, 5000] {
            let draw = |r: usize| -> Vec<f32> {
                draw(&[len], r as u64).data.iter().map(|&x| x as f32).collect()
            };
            let parts: Vec<Vec<f32>> = (0..n).map(draw).collect();
            let part = |r: usize| parts[r].clone();
            let fold = |i: usize| parts[1..].iter().fold(parts[0][i], |a, p| a + p[i]);
            let want: Vec<f32> = (0..len).map(fold).collect();
            let sums = |r: usize, mut end: End| {
                let (mut x, mut y, mut own) = (part(r), vec![f32::NAN; len], part(r));
                for _ in 0..20 {
                    let tensor = Reduced {
                        fold: shardc_ir::types::Reduction::Sum,
                        from: region(&mut x),
                        to: region(&mut y),
                    };
                    end.all_reduce(AtomSet(1), &[tensor]).unwrap();
                }
                // Accumulators of gradients, several in a call.
                let mut others = [part(r), part(r)[..len.div_ceil(3)].to_vec()];
                let mut tensors = vec![];
                for in_place in [&mut own].into_iter().chain(&mut others).map(region) {
                    let fold = shardc_ir::types::Reduction::Sum;
                    tensors.push(Reduced { fold, from: in_place.clone(), to: in_place });
                }
                end.all_reduce(AtomSet(1), &tensors[..1]).unwrap();
                end.all_reduce(AtomSet(1), &tensors[1..]).unwrap();
                // Nobody may free what others still read.
                end.barrier(AtomSet(1)).unwrap();
                (y, own, others)
            };
            let all = [ranks(&mesh, 9000, sums), posted(&mesh, 9000, sums)];
            for (y, own, [a, b]) in all.concat() {
                assert!(y == want && own == want, "{n} ranks, {len} elements");
                assert!(a == want && b == want[..b.len()], "{n} ranks, {len} elements, of two");
            }
        }
    }
}

#[test]
fn data_goes_from_rank_to_rank() {
    let mesh = Mesh::new(&[("pp", 2), ("tp", 2)]).unwrap();
    let travel = |r: usize, mut end: End| {
        let mut x = vec![r as f32; 3];
        end.broadcast(AtomSet(2), 1, &region(&mut x)).unwrap();
        let mut y = vec![0.0; 3];
        if r < 2 {
            end.send(r + 2, &region(&mut x)).unwrap();
            end.recv(r + 2, &region(&mut y)).unwrap();
        } else {
            end.recv(r - 2, &region(&mut y)).unwrap();
            end.send(r - 2, &region(&mut x)).unwrap();
        }
        end.sent(if r < 2 { r + 2 } else { r - 2 }).unwrap();
        end.barrier(AtomSet(3)).unwrap();
        y[2]
    };
    assert_eq!(ranks(&mesh, 9000, travel), [3.0, 3.0, 1.0, 1.0]);
    assert_eq!(posted(&mesh, 9000, travel), [3.0, 3.0, 1.0, 1.0]);
}

/// Receives that are posted before anything is sent, two of them, one of several segments: what came lies where it
/// was posted, in order, and what is taken is what was posted.
#[test]
fn receives_may_be_posted() {
    let mesh = Mesh::new(&[("pp", 2)]).unwrap();
    let len = (1 << 20) + 5;
    let both = |r: usize, mut end: End| {
        let other = 1 - r;
        let (mut x, mut y) = (vec![r as f32; 3], vec![r as f32 + 10.0; len]);
        let (mut a, mut b, mut c) = (vec![0.0; 3], vec![0.0; len], vec![0.0; 3]);
        let (first, second) = (region(&mut a), region(&mut b));
        end.post_recv(other, &first).unwrap();
        end.post_recv(other, &second).unwrap();
        end.barrier(AtomSet(1)).unwrap();
        let out = [region(&mut x), region(&mut y)];
        out.iter().for_each(|x| end.send(other, x).unwrap());
        end.recv(other, &first).unwrap();
        end.recv(other, &second).unwrap();
        // And one that is not posted.
        end.send(other, &out[0]).unwrap();
        end.recv(other, &region(&mut c)).unwrap();
        (0..3).for_each(|_| end.sent(other).unwrap());
        end.barrier(AtomSet(1)).unwrap();
        (a, b, c)
    };
    for all in [ranks(&mesh, 9000, both), posted(&mesh, 9000, both)] {
        for (r, (a, b, c)) in all.into_iter().enumerate() {
            let other = 1.0 - r as f32;
            assert_eq!((a, c), (vec![other; 3], vec![other; 3]));
            assert!(b == vec![other + 10.0; len]);
        }
    }
    // Of messages: it is taken from where it was posted.
    let elsewhere = |r: usize, mut end: End| {
        let (mut x, mut y, mut z) = (vec![1.0; 3], vec![0.0; 3], vec![0.0; 3]);
        end.post_recv(1 - r, &region(&mut y)).unwrap();
        end.send(1 - r, &region(&mut x)).unwrap();
        let taken = end.recv(1 - r, &region(&mut z)).map_err(|d| d.message);
        end.barrier(AtomSet(1)).unwrap();
        taken
    };
    for (r, taken) in posted(&mesh, 9000, elsewhere).into_iter().enumerate() {
        assert_eq!(taken, Err(format!("rank {r} takes what it has not posted")));
    }
}

/// More than one segment of 2^20 elements, of which the last is short, and data that do not lie
/// together.
#[test]
fn large_data_move_in_segments() {
    let mesh = Mesh::new(&[("tp", 2)]).unwrap();
    let (rows, columns) = (1100, 2001);
    let whole = |r: usize| -> Vec<f32> {
        (0..2 * rows * columns).map(|i| ((i * 7 + r * 13) % 1009) as f32 / 8.0).collect()
    };
    let both = |r: usize, mut end: End| {
        let mut x = whole(r);
        let half = |x: &mut Vec<f32>, at: usize| {
            let mut block = crate::lab::dense(&[rows, columns]);
            block.view.strides = smallvec::smallvec![2 * columns, 1];
            block.view.offset = at * columns;
            // SAFETY: the rows' halves lie in the vector; see `region`.
            unsafe { Region::new(x.as_mut_ptr(), &block) }
        };
        let mut y = vec![f32::NAN; x.len()];
        let from = [half(&mut x, 0), half(&mut x, 1)];
        let to = [half(&mut y, 0), half(&mut y, 1)];
        end.all_to_all(AtomSet(1), &from, &to).unwrap();
        let sum = Reduced {
            fold: shardc_ir::types::Reduction::Sum,
            from: half(&mut x, 1),
            to: half(&mut x, 1),
        };
        let max = Reduced {
            fold: shardc_ir::types::Reduction::Max,
            from: region(&mut y),
            to: region(&mut y),
        };
        end.all_reduce(AtomSet(1), &[sum, max]).unwrap();
        let other = 1 - r;
        let mut z = vec![0.0; x.len()];
        end.send(other, &region(&mut x)).unwrap();
        end.recv(other, &region(&mut z)).unwrap();
        end.sent(other).unwrap();
        end.barrier(AtomSet(1)).unwrap();
        (x, y, z)
    };
    let (shared, posted) = (ranks(&mesh, 20_000, both), posted(&mesh, 20_000, both));
    assert!(shared == posted);
    // What they are: both halves of the second column block are the sum.
    let (a, b) = (whole(0), whole(1));
    let i = 2 * columns * (rows - 1) + columns + 5;
    assert_eq!(posted[0].0[i], a[i] + b[i]);
    assert_eq!(posted[0].0[5], a[5]);
    assert_eq!(posted[0].1[5], a[5].max(a[columns + 5]));
    assert_eq!(posted[0].2, posted[1].0);
}

#[test]
fn messages_end_when_a_member_is_late_or_another_sends_more() {
    let mesh = Mesh::new(&[("tp", 3)]).unwrap();
    let met = Barrier::new(3);
    let late = posted(&mesh, 1000, |r, mut end| {
        met.wait();
        if r == 1 { None } else { end.barrier(AtomSet(1)).err().map(|d| (d.exit, d.message)) }
    });
    let (exit, message) = late[0].clone().expect("rank 0 fails");
    assert!(exit == Exit::RankFailed && message.contains("for ranks [1]"), "{message}");
    let sizes = posted(&mesh, 2000, |r, mut end| {
        let mut x = vec![0.0f32; if r == 0 { 3 } else { 4 }];
        let e = end.broadcast(AtomSet(1), 0, &region(&mut x)).err().map(|d| d.message);
        std::mem::forget(x);
        e
    });
    assert_eq!(sizes[1].as_deref(), Some("16 B were expected, 12 B came"));
}

#[test]
fn a_failing_rank_ends_the_others_at_once() {
    let mesh = Mesh::new(&[("tp", 4)]).unwrap();
    // Who is not told waits for an hour.
    let got = ranks(&mesh, 3_600_000, |r, mut end| {
        let mut x = vec![0.0f32; 4000];
        for i in 0..10 {
            if r == 2 && i == 5 {
                end.abort(Diag::new("rank-failed", "rank 2 gave up"));
                return None;
            }
            let t = Reduced {
                fold: shardc_ir::types::Reduction::Sum,
                from: region(&mut x),
                to: region(&mut x),
            };
            if let Err(e) = end.all_reduce(AtomSet(1), &[t]) {
                // Others may still read this memory: see the contract of regions.
                std::mem::forget(x);
                return Some(e.message);
            }
        }
        Some("no error".into())
    });
    for r in [0, 1, 3] {
        assert_eq!(got[r].as_deref(), Some("rank 2 gave up"));
    }
}

#[test]
fn a_rank_that_leaves_or_is_late_or_calls_something_else_is_named() {
    let mesh = Mesh::new(&[("tp", 3)]).unwrap();
    let error = |r: Result<(), Diag>| r.err().map(|d| (d.exit, d.message));
    let left = ranks(
        &mesh,
        3_600_000,
        |r, mut end| if r == 1 { None } else { error(end.barrier(AtomSet(1))) },
    );
    let (met, failed) = (Barrier::new(3), Barrier::new(3));
    let late = ranks(&mesh, 1000, |r, mut end| {
        met.wait();
        if r == 1 {
            failed.wait();
        }
        let e = error(end.barrier(AtomSet(1)));
        if r != 1 {
            failed.wait();
        }
        e
    });
    let other = ranks(&mesh, 60_000, |r, mut end| {
        let mut x = vec![0.0f32; 4];
        let e = match r {
            1 => error(end.broadcast(AtomSet(1), 0, &region(&mut x))),
            _ => error(end.barrier(AtomSet(1))),
        };
        std::mem::forget(x);
        e
    });
    let sizes = ranks(&mesh, 60_000, |r, mut end| {
        let mut x = vec![0.0f32; if r == 1 { 3 } else { 4 }];
        let e = error(end.broadcast(AtomSet(1), 0, &region(&mut x)));
        std::mem::forget(x);
        e
    });
    for (got, word) in [
        (left, "rank 1 is gone"),
        (late, "for ranks [1]"),
        (other, "rank 1 calls broadcast"),
        (sizes, "3 elements"),
    ] {
        let (exit, message) = got[0].clone().expect("rank 0 fails");
        let calls_other = message.contains("while rank 1 calls broadcast")
            || message.contains("rank 1 calls broadcast");
        assert!(exit == Exit::RankFailed && (message.contains(word) || calls_other), "{message}");
        assert!(got[2].is_some());
    }
}
