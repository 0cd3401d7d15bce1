//! Exchanges between layouts: who gives what to whom, values, mirrors and bytes.

use shardc_ir::boxes::{Boxes, Ranges};
use shardc_ir::builder::Builder;
use shardc_ir::interp::{self, Precision, gather, scatter};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{Exchange, Op};
use shardc_ir::rng::Stream;
use shardc_ir::steps;
use shardc_ir::tensor::Tensor;
use shardc_ir::types::{AtomList, Type};

pub fn meshes() -> Vec<Mesh> {
    let m = |axes: &[(&str, usize)]| Mesh::new(axes).expect("a mesh");
    vec![
        m(&[("x", 2), ("y", 2)]),
        m(&[("x", 2), ("y", 3)]),
        m(&[("x", 2), ("y", 2), ("z", 2)]),
        m(&[("x", 3), ("y", 2), ("z", 2)]),
    ]
}

/// A layout of a tensor: every atom splits a dim or none, in any order, with pieces from the first rank on or from the
/// last; of those that split none the ones in `replicated` are that.
fn layout(
    mesh: &Mesh,
    sizes: &[usize],
    replicated: AtomSet,
    roll: &mut impl FnMut(usize) -> usize,
) -> Type {
    let mut t = Type::f32(sizes);
    let mut left: Vec<_> = mesh.all().iter().collect();
    while !left.is_empty() {
        let a = left.swap_remove(roll(left.len()));
        match roll(sizes.len() + 1) {
            d if d < sizes.len() => t.dims[d].atoms = t.dims[d].atoms.push(a).expect("few"),
            _none if replicated.has(a) => t.replicated = t.replicated.with(a),
            _none => {}
        }
    }
    for d in 0..sizes.len() {
        if roll(6) == 0 {
            t.dims[d].atoms = t.dims[d].atoms.turned();
        }
    }
    t
}

/// The atoms over which an exchange from one layout to another is; `None` if there is nothing to do or no
/// one exchange does it.
pub fn axes(mesh: &Mesh, from: &Type, to: &Type) -> Option<AtomSet> {
    let mut set: AtomSet = mesh.all().iter().filter(|&a| from.state(a) != to.state(a)).collect();
    for (f, t) in from.dims.iter().zip(&to.dims).filter(|(f, t)| f.atoms != t.atoms) {
        let pieces = |l: AtomList| l.iter().map(|a| mesh.size(a)).product::<usize>();
        let turned = f.atoms.is_turned() || t.atoms.is_turned();
        let both = f.atoms.iter().zip(t.atoms.iter());
        let same = both.take_while(|(a, b)| a == b && !turned && !set.has(*a));
        // Pieces of what is kept are whole numbers of both.
        let n = f.size;
        let nests = |kept: usize, l: AtomList| {
            let (outer, inner) = (pieces(f.atoms.take(kept)), pieces(l));
            n.div_ceil(inner) * (inner / outer) == n.div_ceil(outer) || n % inner == 0
        };
        let fits = |&k: &usize| k == 0 || nests(k, f.atoms) && nests(k, t.atoms);
        let kept = (0..=same.count()).rev().find(fits).unwrap_or(0);
        let rest = f.atoms.iter().skip(kept).chain(t.atoms.iter().skip(kept));
        set = rest.fold(set, AtomSet::with);
    }
    let op: Op = Exchange::over(set).into();
    (!set.is_empty() && op.check(mesh, &[from], &[Some(to)]).is_ok()).then_some(set)
}

struct Case {
    mesh: Mesh,
    axes: AtomSet,
    from: Type,
    to: Type,
}

/// Random exchanges on all meshes, of dims that are cut evenly and not; some of replicated operands.
fn cases(each: u32) -> Vec<Case> {
    let mut out = vec![];
    cases_of(each, "exchange", &mut |mesh, from, to, _| {
        if let Some(axes) = axes(mesh, from, to) {
            out.push(Case { mesh: mesh.clone(), axes, from: from.clone(), to: to.clone() });
        }
    });
    out
}

/// Gives a number below another one.
pub type Roll<'a> = &'a mut dyn FnMut(usize) -> usize;

/// Calls `f` with a mesh, two layouts of a tensor, and what draws more numbers.
pub fn cases_of(each: u32, name: &str, f: &mut dyn FnMut(&Mesh, &Type, &Type, Roll)) {
    for (k, mesh) in meshes().into_iter().enumerate() {
        for i in 0..each {
            let stream = Stream::new(k as u64, name, i);
            let mut n = 0;
            let mut roll = |m: usize| {
                n += 1;
                (stream.uniform(n) * m as f64) as usize
            };
            let sizes: Vec<usize> = (0..2 + roll(2)).map(|_| [12, 24, 5, 7, 8][roll(5)]).collect();
            let some: AtomSet = mesh.all().iter().filter(|_| roll(2) == 0).collect();
            let from = layout(&mesh, &sizes, some, &mut roll);
            // What stays as it is stays replicated.
            let mut to = layout(&mesh, &sizes, from.replicated, &mut roll);
            for a in to.replicated.iter().filter(|&a| !from.replicated.has(a)).collect::<Vec<_>>() {
                to.clear(a);
            }
            f(&mesh, &from, &to, &mut roll);
        }
    }
}

pub fn volume(b: &Ranges) -> usize {
    b.iter().map(ExactSizeIterator::len).product()
}

/// What each rank gets from each, by rank numbers: taker, giver, box.
fn triples(c: &Case, b: &Boxes) -> Vec<(usize, usize, Ranges)> {
    let mut out = vec![];
    for taker in 0..c.mesh.ranks() {
        for giver in c.mesh.group(c.axes, taker) {
            let part = b.between(&c.mesh.coords(giver), &c.mesh.coords(taker));
            out.extend(part.map(|p| (taker, giver, p)));
        }
    }
    out
}

fn own(c: &Case, t: &Type, rank: usize) -> Ranges {
    let coords = c.mesh.coords(rank);
    let of = |d| t.extent(&c.mesh, d, &coords);
    (0..t.rank()).map(|d| of(d).offset..of(d).offset + of(d).len).collect()
}

pub fn within(inner: &Ranges, outer: &Ranges) -> bool {
    inner.iter().zip(outer).all(|(i, o)| o.start <= i.start && i.end <= o.end)
}

pub fn meet(a: &Ranges, b: &Ranges) -> bool {
    a.iter().zip(b).all(|(a, b)| a.start.max(b.start) < a.end.min(b.end))
}

#[test]
fn boxes_cover_what_each_rank_is_to_have_once() {
    let (mut replicated, mut uneven) = (0, 0);
    let all = cases(400);
    for c in &all {
        let what = format!("{:?} to {:?} on {:?}", c.from, c.to, c.mesh.axes);
        let b = Boxes::new(&c.mesh, c.axes, None, &c.from, &c.to);
        let all = triples(c, &b);
        for rank in 0..c.mesh.ranks() {
            let target = own(c, &c.to, rank);
            let mine: Vec<_> = all.iter().filter(|t| t.0 == rank).collect();
            let sum: usize = mine.iter().map(|t| volume(&t.2)).sum();
            assert_eq!(sum, volume(&target), "{what}");
            for (i, t) in mine.iter().enumerate() {
                assert!(within(&t.2, &target) && within(&t.2, &own(c, &c.from, t.1)), "{what}");
                assert!(!mine[..i].iter().any(|u| meet(&u.2, &t.2)), "{what}");
                // What a rank has it takes from itself.
                assert!(t.1 == rank || !meet(&t.2, &own(c, &c.from, rank)), "{what}");
            }
        }
        // Counted by piece numbers, and pair by pair.
        let most = |f: &dyn Fn(&(usize, usize, Ranges)) -> usize| {
            let of = |rank| all.iter().filter(move |t| t.0 != t.1 && f(t) == rank);
            (0..c.mesh.ranks()).map(|r| of(r).map(|t| volume(&t.2)).sum::<usize>()).max().unwrap()
        };
        let t = b.traffic();
        assert_eq!((t.sent, t.received), (most(&|t| t.1), most(&|t| t.0)), "{what}");
        assert_eq!(b.busiest(), t.busiest(), "{what}");
        replicated += usize::from(c.from.replicated.meets(c.axes));
        let pieces = |t: &Type, d: usize| t.dims[d].size % t.pieces(&c.mesh, d) == 0;
        uneven += usize::from((0..c.to.rank()).any(|d| !pieces(&c.from, d) || !pieces(&c.to, d)));
    }
    assert!(
        all.len() > 1000 && replicated > 200 && uneven > 500,
        "{} {replicated} {uneven}",
        all.len()
    );
}

/// The result of the function is the tensor in its new layout, and its mirror that of the cotangent.
#[test]
fn values_and_mirrors_are_those_of_the_whole_tensor() {
    for c in cases(100) {
        let what = format!("{:?} to {:?} on {:?}", c.from, c.to, c.mesh.axes);
        let (mut f, args) = crate::ops::with_args(&[c.from.clone(), c.to.cotangent()]);
        let mut b = Builder::new(&c.mesh, &mut f);
        let op: Op = Exchange::over(c.axes).into();
        let y = b.push_as("y", op.clone(), &args[..1], &c.to);
        let g = op.def().grad(&mut b, &args[..1], &[y], &[Some(args[1])])[0].expect("a gradient");
        assert_eq!(f.ty(g), &c.from.cotangent(), "{what}");
        crate::ops::results(&mut f, &[y, g]);
        let mut k = 0;
        let whole = Tensor::from_fn(&c.to.sizes(), |_| {
            k += 1;
            f64::from(k)
        });
        let args = [&c.from, &c.to.cotangent()].map(|t| scatter(&c.mesh, t, &whole));
        let got = interp::call(&c.mesh, &f, &args, Precision::F64);
        let got = got.unwrap_or_else(|e| panic!("{what}: {e}"));
        for (t, pieces) in [&c.to, &c.from.cotangent()].into_iter().zip(&got) {
            assert_eq!(gather(&c.mesh, t, pieces).unwrap_or_else(|e| panic!("{what}: {e}")), whole);
        }
    }
}

/// Where nothing is invariant the mirror goes the same ways back: ranks that add what they get make the
/// transpose, which has the same inner products, and the same bytes.
#[test]
fn mirrors_are_transposes() {
    let mut tried = 0;
    for c in cases(200) {
        let copied = c.axes.minus(c.from.sharded()).union(c.axes.minus(c.to.sharded()));
        if !copied.within(c.from.replicated) {
            continue;
        }
        let what = format!("{:?} to {:?} on {:?}", c.from, c.to, c.mesh.axes);
        let forward = Boxes::new(&c.mesh, c.axes, None, &c.from, &c.to);
        let back = Boxes::new(&c.mesh, c.axes, None, &c.to.cotangent(), &c.from.cotangent());
        let mut there: Vec<_> = triples(&c, &forward);
        let mut again: Vec<_> = triples(&c, &back).into_iter().map(|(t, g, b)| (g, t, b)).collect();
        let key = |t: &(usize, usize, Ranges)| (t.0, t.1, t.2[0].start);
        there.sort_by_key(key);
        again.sort_by_key(key);
        assert_eq!(there, again, "{what}");
        let (f, b) = (forward.traffic(), back.traffic());
        assert_eq!((f.sent, f.received), (b.received, b.sent), "{what}");
        tried += usize::from(!copied.is_empty());
    }
    assert!(tried > 50, "{tried}");
}

/// A rank receives from one place, and gives to one, what atoms of equal size that change places split.
#[test]
fn axes_that_change_places_send_a_piece_each() {
    let mesh = Mesh::new(&[("x", 4), ("y", 4)]).expect("a mesh");
    let list = |s: [&str; 2]| {
        AtomList::collect(s.iter().flat_map(|a| mesh.axis(a).expect("an axis").iter()))
            .expect("few")
    };
    let (mut from, mut to) = (Type::f32(&[64, 8]), Type::f32(&[64, 8]));
    from.dims[0].atoms = list(["x", "y"]);
    to.dims[0].atoms = list(["y", "x"]);
    let t = Boxes::new(&mesh, mesh.all(), None, &from, &to).traffic();
    assert_eq!((t.sent, t.received), (4 * 8, 4 * 8));
    // One axis in the place of another: all of the piece, from one rank to one.
    let one = |a: &str| AtomList::collect(mesh.axis(a).expect("an axis").iter()).expect("few");
    (from.dims[0].atoms, to.dims[0].atoms) = (one("x"), one("y"));
    let t = Boxes::new(&mesh, mesh.all(), None, &from, &to).traffic();
    assert_eq!((t.sent, t.received), (16 * 8, 16 * 8));
}

/// Ranks are counted one by one, whatever primes their number has: not each with each other.
#[test]
fn traffic_is_counted_in_steps_that_grow_as_the_ranks() {
    let ways = |from: [&str; 2], to: [&str; 2], ranks: usize| {
        let mesh = Mesh::new(&[("x", ranks / 6), ("y", 6)]).expect("a mesh");
        let ty = |dims: [&str; 2]| {
            let mut t = Type::f32(&[ranks * 5 + 1, ranks * 3]);
            for (d, axes) in t.dims.iter_mut().zip(dims) {
                let axes = axes.split('*').filter_map(|a| mesh.axis(a));
                d.atoms = AtomList::collect(axes.flat_map(AtomSet::iter)).expect("few");
            }
            t
        };
        let (from, to) = (ty(from), ty(to));
        let b = Boxes::new(&mesh, mesh.all(), None, &from, &to);
        steps::of(|| (b.traffic(), b.busiest())).1["traffic"] as f64
    };
    for (from, to) in [
        (["x*y", ""], ["", "x*y"]),
        (["x*y", ""], ["y*x", ""]),
        (["x", "y"], ["y", "x"]),
        (["x", ""], ["", "y"]),
        (["", "y*x"], ["y", "x"]),
    ] {
        let [few, many] = [384, 3072].map(|ranks| ways(from, to, ranks));
        let most = few * 8f64.powf(1.1);
        assert!(many <= most, "{from:?} to {to:?}: {few} steps, and {many} for 8 times the ranks");
    }
}

#[test]
fn what_is_no_exchange_is_refused() {
    let mesh = Mesh::new(&[("x", 2), ("y", 3)]).expect("a mesh");
    let text = |from: &str, axes: &str, to: &str| {
        let text = format!(
            "mesh [x=2, y=3]\n\nfunc @f(%a: {from}) -> {to} {{\n  %b = exchange[{axes}] %a : {to}\n  return %b\n}}\n"
        );
        shardc_ir::text::parse(&text).and_then(|m| {
            shardc_ir::verify::verify(&m, shardc_ir::phase::Phase::Ranked)
                .map_err(|mut e| e.swap_remove(0))
        })
    };
    assert!(text("f32[12@x,6]", "x", "f32[12,6@x]").is_ok());
    for (from, axes, to, why) in [
        ("f32[12@x,6]", "x", "f32[12,7@x]", "not given"),
        ("f32[12@x,6]", "x", "bf16[12,6@x]", "not given"),
        ("f32[12@x,6]", "x", "f32[12,6]~x", "fan it out"),
        ("f32[12,6]+x", "x", "f32[12@x,6]", "reduce it before"),
        ("f32[12,6]!x", "x", "f32[12@x,6]", "neither"),
        ("f32[12,6]", "x", "f32[12,6]", "neither"),
        ("f32[12@x*y,6]", "x", "f32[12@y*x,6]", "split over other axes"),
        ("f32[8@x,6]", "y", "f32[8@x*y,6]", "cannot be cut further"),
        ("f32[12@x,6]", "x", "f32[12@y,6]", "over y, too"),
        ("f32[13@x*y,6]", "y", "f32[13@x,6@y]", "cannot be cut further"),
        ("f32[12@x,6]~y", "x*y", "f32[12@y,6]+x", "two steps"),
        ("f32[12,6]~x", "x", "f32[12,6]+x", "neither"),
    ] {
        let e = text(from, axes, to).expect_err(from);
        let all = format!("{e}");
        assert!(all.contains(why), "{from} to {to}: {all}");
    }
    assert_eq!(mesh.ranks(), 6);
}
