//! Exchanges that shift indices: what crosses, values, mirrors, bytes, and what is refused.

use crate::boxes::{axes, cases_of, meet, meshes, volume, within};
use shardc_ir::attr::{Along, Usual};
use shardc_ir::boxes::{Boxes, Halo, Ranges};
use shardc_ir::builder::Builder;
use shardc_ir::interp::{self, Precision, gather, scatter};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{Exchange, Op};
use shardc_ir::tensor::Tensor;
use shardc_ir::types::Type;

struct Case {
    mesh: Mesh,
    op: Exchange,
    dim: usize,
    from: Type,
    to: Type,
}

impl Case {
    fn start(&self) -> i64 {
        self.op.start.0.expect("a start")
    }
    fn boxes(&self) -> Boxes {
        let shift = Some(Halo { dim: Usual(self.dim), start: self.start() });
        Boxes::new(&self.mesh, self.op.axes, shift, &self.from, &self.to)
    }
    fn own(&self, t: &Type, rank: usize) -> Ranges {
        let coords = self.mesh.coords(rank);
        let of = |d| t.extent(&self.mesh, d, &coords);
        (0..t.rank()).map(|d| of(d).offset..of(d).offset + of(d).len).collect()
    }
    /// The part of a box of the result that is one of the operand, in the operand's indices.
    fn behind(&self, mut b: Ranges) -> Ranges {
        let n = self.from.dims[self.dim].size as i64;
        let at = |i: usize| (i as i64 + self.start()).clamp(0, n) as usize;
        b[self.dim] = at(b[self.dim].start)..at(b[self.dim].end);
        b
    }
    fn text(&self) -> String {
        format!("{:?} from {:?} to {:?} on {:?}", self.op, self.from, self.to, self.mesh.axes)
    }
}

/// Random layouts with random starts: less than a piece and more, forward and back, also past the end; the dim
/// keeps its size, shrinks or grows.
fn cases(each: u32) -> Vec<Case> {
    let mut out = vec![];
    cases_of(each, "halo", &mut |mesh, from, to, roll| {
        let dim = roll(from.rank());
        let (from, mut to) = (from.clone(), to.clone());
        let n = from.dims[dim].size;
        to.dims[dim].size = [n, n, n - 1, n + 3, n / 2 + 1, 2 * n][roll(6)];
        let start = [0, 1, -1, 2, -3, n as i64 / 2, -(n as i64) / 2, n as i64 + 1][roll(8)];
        // All that splits the dim.
        let all = from.dims[dim].atoms.set().union(to.dims[dim].atoms.set());
        let mut same = to.clone();
        same.dims[dim] = from.dims[dim];
        let others = axes(mesh, &from, &same).unwrap_or_default();
        let moved: AtomSet = mesh.all().iter().filter(|&a| from.state(a) != to.state(a)).collect();
        let op = Exchange::shifted(all.union(others).union(moved), dim, start);
        if all.is_empty() || Op::from(op.clone()).check(mesh, &[&from], &[Some(&to)]).is_err() {
            return;
        }
        out.push(Case { mesh: mesh.clone(), op, dim, from, to });
    });
    out
}

#[test]
fn boxes_cover_what_there_is_once() {
    let (mut uneven, mut outside, mut replicated) = (0, 0, 0);
    let all = cases(600);
    for c in &all {
        let (what, b) = (c.text(), c.boxes());
        let mut sent = vec![0; c.mesh.ranks()];
        let mut received = vec![0; c.mesh.ranks()];
        let ranks: Vec<usize> = (0..c.mesh.ranks()).collect();
        for &rank in &ranks {
            let target = c.behind(c.own(&c.to, rank));
            let coords = c.mesh.coords(rank);
            let lacks = volume(&c.own(&c.to, rank)) - volume(&target);
            let none = volume(&c.own(&c.to, rank)) == 0;
            assert!(none || b.fills(&coords) == (lacks == 0), "{what}");
            outside += usize::from(lacks > 0);
            let mut got: Vec<Ranges> = vec![];
            for giver in c.mesh.group(c.op.axes, rank) {
                let from = c.mesh.coords(giver);
                let Some(part) = b.between(&from, &coords) else {
                    assert!(b.landed(&from, &coords).is_none());
                    continue;
                };
                let landed = b.landed(&from, &coords).expect("it lands");
                assert!(within(&landed, &c.own(&c.to, rank)), "{what}");
                assert_eq!(c.behind(landed), part, "{what}");
                assert!(within(&part, &target) && within(&part, &c.own(&c.from, giver)), "{what}");
                assert!(!got.iter().any(|g| meet(g, &part)), "{what}");
                // What a rank has it takes from itself.
                assert!(giver == rank || !meet(&part, &c.own(&c.from, rank)), "{what}");
                if giver != rank {
                    sent[giver] += volume(&part);
                    received[rank] += volume(&part);
                }
                got.push(part);
            }
            assert_eq!(got.iter().map(volume).sum::<usize>(), volume(&target), "{what}");
        }
        let t = b.traffic();
        assert_eq!(Some(&t.sent), sent.iter().max(), "{what}");
        assert_eq!(Some(&t.received), received.iter().max(), "{what}");
        assert_eq!(b.busiest(), t.busiest(), "{what}");
        replicated += usize::from(c.from.replicated.meets(c.op.axes));
        let cut = |t: &Type, d: usize| t.dims[d].size % t.pieces(&c.mesh, d) != 0;
        uneven += usize::from((0..c.to.rank()).any(|d| cut(&c.from, d) || cut(&c.to, d)));
    }
    let counts = (all.len(), uneven, outside, replicated);
    assert!(all.len() > 500 && uneven > 300 && outside > 300 && replicated > 50, "{counts:?}");
}

/// What an exchange does to the whole tensor.
fn shifted(c: &Case, x: &Tensor) -> Tensor {
    Tensor::from_fn(&c.to.sizes(), |i| {
        let at = i[c.dim] as i64 + c.start();
        let inside = at >= 0 && at < c.from.dims[c.dim].size as i64;
        let mut j: shardc_ir::tensor::Shape = i.into();
        j[c.dim] = if inside { at as usize } else { return 0.0 };
        x.at(&j)
    })
}

fn numbers(sizes: &[usize], seed: i64) -> Tensor {
    let mut k = seed;
    Tensor::from_fn(sizes, |_| {
        k = (k * 37 + 11) % 101;
        (k - 50) as f64
    })
}

/// The result is the shifted tensor in its new layout, and the mirror gives the transpose: of any x and d,
/// the inner products of the result with d, and of x with the mirror of d, are the same number.
#[test]
fn values_are_shifted_and_mirrors_are_transposes() {
    let mut tried = 0;
    for c in cases(150) {
        let what = c.text();
        let (mut f, args) = crate::ops::with_args(&[c.from.clone(), c.to.cotangent()]);
        let mut b = Builder::new(&c.mesh, &mut f);
        let op: Op = c.op.clone().into();
        let y = b.push_as("y", op.clone(), &args[..1], &c.to);
        let g = op.def().grad(&mut b, &args[..1], &[y], &[Some(args[1])])[0].expect("a gradient");
        assert_eq!(f.ty(g), &c.from.cotangent(), "{what}");
        crate::ops::results(&mut f, &[y, g]);
        let (x, d) = (numbers(&c.from.sizes(), 5), numbers(&c.to.sizes(), 17));
        let args = [scatter(&c.mesh, &c.from, &x), scatter(&c.mesh, &c.to.cotangent(), &d)];
        let got = interp::call(&c.mesh, &f, &args, Precision::F64);
        let got = got.unwrap_or_else(|e| panic!("{what}: {e}"));
        let whole = |t: &Type, i: usize| {
            gather(&c.mesh, t, &got[i]).unwrap_or_else(|e| panic!("{what}: {e}"))
        };
        let (y, g) = (whole(&c.to, 0), whole(&c.from.cotangent(), 1));
        assert_eq!(y, shifted(&c, &x), "{what}");
        let dot = |a: &Tensor, b: &Tensor| -> f64 {
            a.data.iter().zip(&b.data).map(|(a, b)| a * b).sum()
        };
        assert_eq!(dot(&y, &d), dot(&x, &g), "{what}");
        tried += 1;
    }
    assert!(tried > 100, "{tried}");
}

/// Where pieces stay and are even, a rank sends as many elements as the start says, and no more than a piece.
#[test]
fn what_crosses_is_the_halo() {
    for mesh in meshes() {
        let ways = mesh.size(mesh.all().iter().next().expect("an atom"));
        let axis = AtomSet(1);
        let mut t = Type::f32(&[3, 24 * ways]);
        t.dims[1].atoms = shardc_ir::types::AtomList::collect(axis.iter()).expect("few");
        for start in [1, -1, 5, -24, 24, 30, -31] {
            let shift = Some(Halo { dim: Along::LAST, start });
            let b = Boxes::new(&mesh, axis, shift, &t, &t);
            let far = start.unsigned_abs() as usize;
            // Between two ranks what is shifted out of the tensor is not sent.
            let most = if ways == 2 { far.min(48 - far.min(48)).min(24) } else { far.min(24) };
            assert_eq!(b.busiest(), 3 * most, "{start} over {ways}");
        }
    }
}

#[test]
fn what_cannot_be_shifted_is_refused() {
    let verified = |from: &str, op: &str, to: &str| {
        let text = format!(
            "mesh [x=2, y=3]\n\nfunc @f(%a: {from}) -> {to} {{\n  %b = exchange[{op}] %a : {to}\n  \
             return %b\n}}\n"
        );
        let m = shardc_ir::text::parse(&text)?;
        assert_eq!(shardc_ir::text::print(&m), text, "as it was written");
        shardc_ir::verify::verify(&m, shardc_ir::phase::Phase::Ranked)
            .map_err(|mut e| e.swap_remove(0))
    };
    for (from, op, to) in [
        ("f32[12,6@x]", "x; start=1", "f32[12,6@x]"),
        ("f32[12@x,6]", "x; start=-2; dim=0", "f32[14@x,6]"),
        ("f32[12@y,6@x]", "x; start=0", "f32[12@y,5@x]"),
        ("i32[12@x*y,6]", "x*y; start=1; dim=0", "i32[11@x*y,6]"),
    ] {
        verified(from, op, to).unwrap_or_else(|e| panic!("{from} {op}: {e}"));
    }
    for (from, op, to, why) in [
        ("f32[12,6@x]", "x; start=1", "f32[11,6@x]", "not given"),
        ("f32[12,6@x]", "x; start=1; dim=2", "f32[12,6@x]", "no such dim"),
        ("f32[12@x,6]", "x; dim=0", "f32[12,6@x]", "from a `start`"),
        ("f32[12@x*y,6]", "y; start=1; dim=0", "f32[12@x*y,6]", "split over other axes"),
        ("f32[12@x,6@y]", "x; start=1", "f32[12@x,6@y]", "split over other axes"),
        ("f32[12,6@x]+y", "x*y; start=1", "f32[12,6@x]", "reduce it before"),
        ("f32[12,6@x]", "x; start=1.5", "f32[12,6@x]", "not a size"),
        ("f32[12,6@x]", "x; start=--1", "f32[12,6@x]", "not a size"),
    ] {
        let e = verified(from, op, to).expect_err(op).to_string();
        assert!(e.contains(why), "{from} {op} {to}: {e}");
    }
}
