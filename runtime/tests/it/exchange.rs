//! Exchange of the rows that counts name: what arrives, what stays as it was, what was sent.

use shardc_codegen::lower;
use shardc_ir::builder::Builder;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Name};
use shardc_ir::interp::scatter;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::AllToAllV;
use shardc_ir::tensor::{Tensor, each_index};
use shardc_ir::types::{AtomList, DType, Type};
use shardc_runtime::exec::Executor;
use shardc_runtime::threads::Threads;
use shardc_runtime::transport::{Gathered, Reduced, Region, Scattered, Transport};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Threads, and how many elements this rank gave to every member of a group.
struct Recorder {
    end: Threads,
    given: Arc<Mutex<Vec<usize>>>,
}

impl Transport for Recorder {
    fn rank(&self) -> usize {
        self.end.rank()
    }
    fn world(&self) -> usize {
        self.end.world()
    }
    fn barrier(&mut self, axes: AtomSet) -> Result<()> {
        self.end.barrier(axes)
    }
    fn all_reduce(&mut self, axes: AtomSet, tensors: &[Reduced]) -> Result<()> {
        self.end.all_reduce(axes, tensors)
    }
    fn all_gather(&mut self, axes: AtomSet, tensors: &[Gathered]) -> Result<()> {
        self.end.all_gather(axes, tensors)
    }
    fn reduce_scatter(&mut self, axes: AtomSet, tensors: &[Scattered]) -> Result<()> {
        self.end.reduce_scatter(axes, tensors)
    }
    fn all_to_all(&mut self, axes: AtomSet, from: &[Region], to: &[Region]) -> Result<()> {
        self.end.all_to_all(axes, from, to)
    }
    fn all_to_all_v(
        &mut self,
        axes: AtomSet,
        from: &[Vec<Region>],
        to: &[Vec<Region>],
    ) -> Result<()> {
        let len = |part: &Vec<Region>| part.iter().map(Region::len).sum();
        *self.given.lock().unwrap() = from.iter().map(len).collect();
        self.end.all_to_all_v(axes, from, to)
    }
    fn permute(&mut self, axes: AtomSet, shift: usize, from: &Region, to: &Region) -> Result<()> {
        self.end.permute(axes, shift, from, to)
    }
    fn broadcast(&mut self, axes: AtomSet, root: usize, data: &Region) -> Result<()> {
        self.end.broadcast(axes, root, data)
    }
    fn send(&mut self, to: usize, data: &Region) -> Result<()> {
        self.end.send(to, data)
    }
    fn sent(&mut self, to: usize) -> Result<()> {
        self.end.sent(to)
    }
    fn post_recv(&mut self, from: usize, data: &Region) -> Result<()> {
        self.end.post_recv(from, data)
    }
    fn recv(&mut self, from: usize, data: &Region) -> Result<()> {
        self.end.recv(from, data)
    }
    fn abort(&mut self, cause: Diag) {
        self.end.abort(cause);
    }
}

/// Every rank's result, and the elements that it gave to every member.
fn run(mesh: &Mesh, f: &Func, args: &[Vec<Tensor>]) -> Vec<Result<(Tensor, Vec<usize>)>> {
    let node = &f.nodes[0];
    let one = |r: usize, end: Threads| {
        let (coords, out) = (mesh.coords(r), f.ty(node.outs[0]));
        let ins = node.ins.iter().zip(args).map(|(&v, a)| crate::lab::lay(mesh, f.ty(v), &a[r]));
        let mut memory: Vec<Vec<f32>> = ins.collect();
        memory.push(crate::lab::room(out.local_bytes(mesh)));
        let kernel = lower(mesh, f, node, &coords).unwrap();
        kernel.reach(&mut |i, end| assert!(end <= memory[i].len(), "{kernel:?}"));
        let pointers: Vec<*mut f32> = memory.iter_mut().map(|m| m.as_mut_ptr()).collect();
        let given = Arc::new(Mutex::new(vec![]));
        let recorder = Recorder { end, given: given.clone() };
        let mut executor = Executor::new(Box::new(recorder), 1);
        // SAFETY: the kernel's reach was compared with the buffers; if it fails, they stay.
        if let Err(e) = unsafe { executor.run(&kernel, &pointers) } {
            std::mem::forget(memory);
            return Err(e);
        }
        let given = given.lock().unwrap().clone();
        Ok((crate::lab::unlay(mesh, out, &coords, &memory[3]), given))
    };
    let ends = Threads::connect(mesh, Duration::from_secs(20));
    std::thread::scope(|s| {
        let one = &one;
        let spawn = |(r, end)| s.spawn(move || one(r, end));
        let all: Vec<_> = ends.into_iter().enumerate().map(spawn).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Of a group, an expert and a shard.
type Count = fn(&[usize]) -> f64;

const ROWS: usize = 5;
const WIDTH: usize = 3;

/// The exchange from tokens to experts, or back; rows `[g,z,c,h]`, counts `[g,e,z]`.
fn function(mesh: &Mesh, axes: AtomSet, sizes: [usize; 3], into: bool) -> Func {
    let [groups, experts, shards] = sizes;
    let split = |mut t: Type, dim: usize| {
        t.dims[dim].atoms = AtomList::collect(axes.iter()).unwrap();
        t
    };
    let rows = Type::f32(&[groups, shards, ROWS, WIDTH]);
    let counts = Type::new(DType::I32, &[groups, experts, shards]);
    let mut ends =
        [[split(rows.clone(), 1), split(counts.clone(), 2)], [split(rows, 0), split(counts, 0)]];
    if !into {
        ends.reverse();
    }
    let [[x, sent], [_, received]] = ends;
    let mut f = Func::new("f");
    let args = [x, sent, received].map(|t| f.arg(t, Name::parse("x"), None));
    let (from, to) = if into { (1, 0) } else { (0, 1) };
    let op = AllToAllV { axes, from, to, copies: 7 };
    Builder::new(mesh, &mut f).push("y", op, &args);
    f
}

#[test]
fn what_counts_name_is_what_is_sent() {
    let cases: &[(&str, Count)] = &[
        ("uneven", |i| ((2 * i[0] + i[1] + 3 * i[2]) % 4) as f64),
        ("nothing", |_| 0.0),
        ("all to one", |i| if i[..2] == [1, 0] { ROWS as f64 } else { 0.0 }),
        ("more than rows", |i| (7 * i[1] + i[2]) as f64),
        ("no counts", |i| [-5.0, f64::from(i32::MAX), 2.0, f64::from(i32::MIN)][i[0] % 4]),
    ];
    let two = Mesh::new(&[("x", 2), ("u", 2), ("y", 2)]).unwrap();
    let meshes = [
        (Mesh::new(&[("x", 2)]).unwrap(), AtomSet(1)),
        (Mesh::new(&[("x", 3)]).unwrap(), AtomSet(1)),
        (two.clone(), AtomSet(2)),
        (two, AtomSet(5)),
    ];
    for (mesh, axes) in &meshes {
        for sizes in [[2, 3, 2], [4, 1, 4], [4, 2, 8], [3, 2, 5]] {
            for into in [true, false] {
                let f = function(mesh, *axes, sizes, into);
                for (name, count) in cases {
                    check(&format!("{name} {sizes:?} {:?}", mesh.axes), mesh, *axes, &f, *count);
                }
            }
        }
    }
}

fn check(what: &str, mesh: &Mesh, axes: AtomSet, f: &Func, count: Count) {
    let n = &f.nodes[0];
    let (x, y) = (f.ty(n.ins[0]), f.ty(n.outs[0]));
    let counts = Tensor::from_fn(&f.ty(n.ins[1]).sizes(), count);
    let named = |g: usize, z: usize| {
        let all = (0..counts.shape[1]).map(|e| counts.at(&[g, e, z]).max(0.0));
        all.sum::<f64>().min(ROWS as f64) as usize
    };
    // Nobody may read what is not named: it is NaN.
    let whole = Tensor::from_fn(&x.sizes(), |i| {
        let id = ((i[0] * 100 + i[1]) * 100 + i[2]) * 10 + i[3];
        if i[2] < named(i[0], i[1]) { id as f64 } else { f64::NAN }
    });
    let args = [
        scatter(mesh, x, &whole),
        scatter(mesh, f.ty(n.ins[1]), &counts),
        scatter(mesh, f.ty(n.ins[2]), &counts),
    ];
    for (r, got) in run(mesh, f, &args).into_iter().enumerate() {
        let (got, given) = got.unwrap_or_else(|e| panic!("{what}: {e}"));
        let coords = mesh.coords(r);
        let place = |t: &Type, dim: usize, at: &[usize]| t.extent(mesh, dim, at);
        let (g0, z0) = (place(y, 0, &coords).offset, place(y, 1, &coords).offset);
        each_index(&got.shape, |i| {
            let at = [g0 + i[0], z0 + i[1], i[2], i[3]];
            let (got, want) = (got.at(i), whole.at(&at));
            assert!(got == want || got.is_nan() && want.is_nan(), "{what} {at:?}: {got}, {want}");
        });
        // What the counts name where this rank's piece and the other's new one meet.
        for (p, member) in mesh.group(axes, r).into_iter().enumerate() {
            let other = mesh.coords(member);
            let inside = |dim: usize, i: usize| {
                [place(x, dim, &coords), place(y, dim, &other)]
                    .iter()
                    .all(|e| (e.offset..e.offset + e.len).contains(&i))
            };
            let pairs = (0..x.dims[0].size).flat_map(|g| (0..x.dims[1].size).map(move |z| (g, z)));
            let met = pairs.filter(|&(g, z)| inside(0, g) && inside(1, z));
            let rows: usize = met.map(|(g, z)| named(g, z)).sum();
            assert_eq!(given[p], rows * WIDTH, "{what}: rank {r} to {member}");
        }
    }
}

#[test]
fn counts_that_disagree_end_the_run() {
    let mesh = Mesh::new(&[("x", 2)]).unwrap();
    let f = function(&mesh, AtomSet(1), [2, 1, 2], true);
    let n = &f.nodes[0];
    let fill = |i: usize, x: f64| {
        let t = f.ty(n.ins[i]);
        scatter(&mesh, t, &Tensor::full(&t.sizes(), x))
    };
    for got in run(&mesh, &f, &[fill(0, 1.0), fill(1, 2.0), fill(2, 3.0)]) {
        let message = got.expect_err("counts disagree").message;
        assert!(message.contains("expects 9 elements") && message.contains("has 6"), "{message}");
    }
}
