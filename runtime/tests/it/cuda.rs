//! Ranks on a CUDA device: kernels and collectives through the driver and the run-time compiler. Where
//! there is no device, both are stand-ins that run kernels on the CPU; the calls are the same.

mod graphs;
mod machine;
mod rounds;

use machine::Machine;
use shardc_codegen::cuda::limits::Limits;
use shardc_codegen::{cuda, lower};
use shardc_ir::diag::{Exit, Result};
use shardc_ir::func::{Func, Name, Port};
use shardc_ir::interp;
use shardc_ir::kernel::Kernel;
use shardc_ir::launch::DeviceLaunch;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{
    AllGather, AllReduce, AllToAll, Broadcast, Exchange, Op, Permute, Reduce, ReduceScatter,
};
use shardc_ir::rng::Stream as Random;
use shardc_ir::samples::Sample;
use shardc_ir::tensor::Tensor;
use shardc_ir::types::{AtomList, DType, Type};
use shardc_runtime::cuda::{DeviceArena, DeviceExecutor, Modules, OnDevice, Products, Stream};
use shardc_runtime::threads::Threads;
use std::sync::Arc;
use std::time::Duration;

/// A function of one op.
fn function(mesh: &Mesh, op: Op, ins: &[Type]) -> Func {
    let mut f = Func::new("f");
    let args: Vec<_> = ins.iter().map(|t| f.arg(t.clone(), Name::parse("x"), None)).collect();
    let mut b = shardc_ir::builder::Builder::new(mesh, &mut f);
    let outs = b.push_n(&["y"], op, &args);
    f.results = outs.iter().map(|&value| Port { value, role: None }).collect();
    f
}

/// What a rank runs.
struct Work {
    kernel: Kernel,
    launches: Vec<DeviceLaunch>,
}

fn run(
    machine: &Machine,
    mesh: &Mesh,
    f: &Func,
    args: &[Vec<Tensor>],
    in_place: bool,
) -> Result<Vec<Vec<Tensor>>> {
    run_with(machine, mesh, f, args, in_place, false)
}

/// Runs the only node of a function on all ranks of a mesh, which share the device; with NVIDIA's
/// library of products or without.
fn run_with(
    machine: &Machine,
    mesh: &Mesh,
    f: &Func,
    args: &[Vec<Tensor>],
    in_place: bool,
    library: bool,
) -> Result<Vec<Vec<Tensor>>> {
    let work = |r: usize| {
        let kernel = lower(mesh, f, &f.nodes[0], &mesh.coords(r)).unwrap();
        let launches = cuda::launches(&kernel, &Limits::of("sm_80")).unwrap_or_default();
        Work { kernel, launches }
    };
    let work: Vec<Work> = (0..mesh.ranks()).map(work).collect();
    let sources = work.iter().flat_map(|w| &w.launches).map(|l| l.source.clone());
    let collective = cuda::collective();
    let code = machine.code(sources.chain([collective.clone()]))?;
    let modules = Modules::new(&machine.device, &code)?;
    let streams: Vec<Arc<Stream>> =
        work.iter().map(|_| Stream::new(&machine.device)).collect::<Result<_>>()?;
    let mover = |s: &Arc<Stream>| OnDevice::new(s, &modules, collective.clone());
    let movers = streams.iter().map(mover).collect::<Result<_>>()?;
    let ends = Threads::connect_with(mesh, Duration::from_secs(20), movers);
    let (work, modules, streams) = (&work, &modules, &streams);
    let one = |(r, end): (usize, Threads<OnDevice>)| {
        one_rank(mesh, f, args, in_place, r, (&work[r], library), (&streams[r], modules, end))
    };
    let ranks: Result<Vec<Vec<Tensor>>> = std::thread::scope(|s| {
        let one = &one;
        let all: Vec<_> = ends.into_iter().enumerate().map(|x| s.spawn(move || one(x))).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let ranks = ranks?;
    Ok((0..f.results.len()).map(|o| ranks.iter().map(|r| r[o].clone()).collect()).collect())
}

fn one_rank(
    mesh: &Mesh,
    f: &Func,
    args: &[Vec<Tensor>],
    in_place: bool,
    r: usize,
    (work, library): (&Work, bool),
    (stream, modules, end): (&Arc<Stream>, &Arc<Modules>, Threads<OnDevice>),
) -> Result<Vec<Tensor>> {
    let node = &f.nodes[0];
    let types: Vec<&Type> = node.ins.iter().chain(&node.outs).map(|&v| f.ty(v)).collect();
    let (ins, outs) = types.split_at(node.ins.len());
    let workspace = node.op.def().workspace(mesh, ins, outs);
    let sizes = types.iter().map(|t| t.local_bytes(mesh)).chain([workspace]);
    let mut bytes = 0;
    let offsets: Vec<usize> = sizes
        .map(|n| {
            let at = bytes;
            bytes += n.next_multiple_of(256);
            at
        })
        .collect();
    let mut arena = DeviceArena::new(stream, bytes, true)?;
    for ((t, a), &at) in ins.iter().zip(args).zip(&offsets) {
        let data: Vec<u8> = crate::lab::lay(mesh, t, &a[r])
            .iter()
            .flat_map(|x| x.to_bits().to_le_bytes())
            .collect();
        arena.write(at, &data[..t.local_bytes(mesh)])?;
    }
    let places = crate::lab::places(f, in_place);
    let memory: Vec<*mut f32> =
        places.iter().map(|&i| arena.address(offsets[i]) as *mut f32).collect();
    let products = library.then(|| Products::open(stream)).transpose()?;
    let mut executor = DeviceExecutor::new(stream, modules, Box::new(end))?.with(products);
    // SAFETY: operands have the room that their types say, which is what kernels reach.
    unsafe { executor.run(&work.kernel, &modules.ready(&work.launches)?, &memory) }?;
    executor.wait()?;
    let mut read = |o: usize, t: &Type| {
        let mut data = vec![0u8; t.local_bytes(mesh).next_multiple_of(4)];
        arena.read(offsets[places[ins.len() + o]], &mut data[..t.local_bytes(mesh)])?;
        let word = |b: &[u8]| f32::from_bits(u32::from_le_bytes(b.try_into().unwrap()));
        let data: Vec<f32> = data.chunks(4).map(word).collect();
        Ok(crate::lab::unlay(mesh, t, &mesh.coords(r), &data))
    };
    outs.iter().enumerate().map(|(o, t)| read(o, t)).collect()
}

/// Compares with what an op means, on random operands.
fn check(op: impl Into<Op>, mesh: &Mesh, ins: &[Type]) {
    let op = op.into();
    checked(function(mesh, op.clone(), ins), &op, mesh, ins);
}

/// The same of an op whose result's type is said.
fn check_as(op: impl Into<Op>, mesh: &Mesh, from: &Type, to: &Type) {
    let op = op.into();
    let mut f = Func::new("f");
    let x = f.arg(from.clone(), Name::parse("x"), None);
    let mut b = shardc_ir::builder::Builder::new(mesh, &mut f);
    let value = b.push_as("y", op.clone(), &[x], to);
    f.results = [Port { value, role: None }].into_iter().collect();
    checked(f, &op, mesh, std::slice::from_ref(from));
}

fn checked(f: Func, op: &Op, mesh: &Mesh, ins: &[Type]) {
    let Some(machine) = machine::get() else { return };
    let args: Vec<Vec<Tensor>> = ins.iter().enumerate().map(|(i, t)| draw(mesh, t, i)).collect();
    let what = format!("{} of {ins:?} on {:?}", op.mnemonic(), mesh.axes);
    crate::lab::compare_with(&what, mesh, &f, &args, 1e-5, |in_place| {
        run(machine, mesh, &f, &args, in_place)
    });
}

/// Numbers that a bf16 has too: the upper half of an f32.
fn rounded(t: &Tensor) -> Tensor {
    t.map(|x| f64::from(f32::from_bits((x as f32).to_bits() & 0xffff_0000)))
}

/// Pieces of all ranks, rounded.
fn draw(mesh: &Mesh, t: &Type, seed: usize) -> Vec<Tensor> {
    let fresh = |sizes: &[usize], seed: u64| {
        let (random, mut i) = (Random::new(seed, "x", 0), 0);
        Tensor::from_fn(sizes, |_| {
            i += 1;
            random.uniform(i) * 2.0 - 1.0
        })
    };
    if t.varying.is_empty() {
        let pieces = interp::scatter(mesh, t, &fresh(&t.sizes(), seed as u64));
        return pieces.iter().map(rounded).collect();
    }
    let own = |r| rounded(&fresh(&t.lens(mesh, &mesh.coords(r)), r as u64));
    (0..mesh.ranks()).map(own).collect()
}

#[test]
fn collectives_of_ranks_that_share_a_device() {
    let tp = Mesh::new(&[("tp", 3)]).unwrap();
    let two = Mesh::new(&[("dp", 2), ("tp", 2)]).unwrap();
    for (mesh, axes) in [(tp, AtomSet(1)), (two.clone(), AtomSet(2)), (two, AtomSet(3))] {
        let split = AtomList::collect(axes.iter()).unwrap();
        // Of sizes that are moved one by one or in pairs, and of such that are moved 16 bytes at once.
        let kinds = [DType::F32, DType::BF16, DType::F16];
        for (dtype, size) in kinds.iter().flat_map(|&d| [(d, [5, 7, 6]), (d, [4, 9, 24])]) {
            let whole = Type::new(dtype, &size);
            let [mut sum, mut max, mut cut, mut own] = [(); 4].map(|()| whole.clone());
            (sum.sum, max.max, own.varying) = (axes, axes, axes);
            cut.dims[1].atoms = split;
            check(AllReduce { axes }, &mesh, &[sum.clone(), max, sum.clone()]);
            check(AllGather { axes, dim: 1 }, &mesh, &[cut.clone()]);
            check(AllToAll { axes, from: 1, to: 2 }, &mesh, &[cut.clone()]);
            // Pieces of dim 1 by those of dim 2, in the other order of axes where there are two.
            let mut turned = whole.clone();
            turned.dims[2].atoms =
                AtomList::collect(axes.iter().collect::<Vec<_>>().into_iter().rev()).unwrap();
            check_as(Exchange::over(axes), &mesh, &cut, &turned);
            check_as(Exchange::over(axes), &mesh, &whole, &cut);
            check(ReduceScatter { axes, dim: 0 }, &mesh, &[sum]);
            check(Permute { axes, shift: 1 }, &mesh, &[own]);
            let mut even = Type::new(dtype, &[5, 2 * mesh.ways(axes)]);
            even.dims[1].atoms = split;
            check(Broadcast { axes, dim: 1, from: 1 }, &mesh, &[even.clone()]);
            let mut sum = Type::new(dtype, &even.sizes());
            sum.sum = axes;
            check(Reduce { axes, dim: 1, to: 1 }, &mesh, &[sum]);
        }
    }
}

#[test]
fn kernels_on_a_device() {
    let Some(machine) = machine::get() else { return };
    // In bf16 weights of attention are rounded before they are multiplied.
    for (text, part) in [
        ("transpose[abc->cba] f32[5,7,9]", 1e-6),
        ("take[vh,bs->bsh] bf16[7,64], i32[3,5]", 0.0),
        ("index_add[bsh,bs->vh; v=7] f32[3,5,33], i32[3,5]", 1e-6),
        ("rope bf16[2,5,3,64], f32[5,32], f32[5,32]", 1e-5),
        ("dot[mk,kn->mn] f32[33,67], f32[67,35]", 1e-5),
        ("dot[mk,nk->mn] bf16[130,72], bf16[136,72]", 1e-5),
        ("top_k[bse->bsk; k=8] f32[2,33,130]", 0.0),
        ("route[g=2,e=3; rows=66; capacity=none] i32[3,33,2]", 0.0),
        ("unpermute bf16[2,3,33,72], i32[3,33,2], f32[3,33,2]", 1e-5),
        ("grouped_outer bf16[2,2,150,40], i32[2,3,2], bf16[2,2,150,136]", 1e-5),
        (
            "attention[0.3; mask=-8..0] f32[2,35,4,3], f32[2,35,2,3], f32[2,35,2,2], i32[35], i32[35]",
            1e-5,
        ),
        (
            "attention[0.9; mask=causal; softcap=2.5] f32[2,35,4,3], f32[2,35,2,3], f32[2,35,2,2], \
             i32[35], i32[35]",
            1e-5,
        ),
        (
            "attention[0.1; mask=causal] bf16[1,70,2,128], bf16[1,70,1,128], bf16[1,70,1,128], \
             i32[70], i32[70]",
            0.01,
        ),
        (
            "attention_grad[0.1; mask=causal] bf16[1,70,4,64], bf16[1,70,2,64], bf16[1,70,2,64], \
             f32[1,70,4], bf16[1,70,4,64], f32[1,70,4], i32[70], i32[70]",
            0.01,
        ),
        ("literal[1.0, 0.5, 0.25]", 0.0),
    ] {
        let mesh = Mesh::default();
        let Ok(s) = Sample::parse(text) else { panic!("{text}") };
        let f = function(&mesh, s.op.clone(), &s.ins);
        let drawn = s.draw(3).into_iter().zip(&s.ins);
        let args: Vec<Vec<Tensor>> = drawn
            .map(|(t, ty)| vec![if ty.dtype == DType::BF16 { rounded(&t) } else { t }])
            .collect();
        crate::lab::compare_with(text, &mesh, &f, &args, part, |in_place| {
            run(machine, &mesh, &f, &args, in_place)
        });
    }
}

/// Products by the library: any of their operands may be transposed, and results too.
#[test]
fn products_of_the_library() {
    let Some(machine) = machine::get() else { return };
    let stream = Stream::new(&machine.device).unwrap();
    match Products::open(&stream) {
        Err(d) if d.code == "missing-library" => {
            println!("skipped: no cuBLASLt beside this driver");
            return;
        }
        opened => drop(opened.unwrap_or_else(|d| panic!("{d}"))),
    }
    for (text, can) in [
        ("dot[mk,kn->mn] f32[33,67], f32[67,35]", true),
        ("dot[mk,kn->nm] f32[33,67], f32[67,35]", true),
        ("dot[mk,nk->mn] bf16[13,7], bf16[21,7]", true),
        ("dot[km,kn->mn] bf16[40,72], bf16[40,16]", true),
        ("dot[km,nk->nm] bf16[9,5], bf16[3,9]", true),
        ("dot[mk,kn->mn] f32[1,5], f32[5,3]", true),
        ("dot[mk,kn->mn] f32[5,1], f32[1,3]", true),
        ("dot[mk,kn->mn] bf16[7,5], bf16[5,1]", true),
        ("dot[bmk,bkn->bmn] f32[3,5,9], f32[3,9,7]", true),
        ("dot[abmk,abkn->bmna] f32[3,2,5,9], f32[3,2,9,7]", false),
        ("dot[abmk,abkn->bamn] bf16[3,2,5,8], bf16[3,2,8,7]", true),
        ("dot[bmk,kn->bmn] f32[3,5,9], f32[9,7]", true),
        // The stand-in has no way to do it, and our kernel does.
        ("dot[mk,kn->mn] f32[6,2], f32[2,3]", true),
        // Mixed types, and sums of several loops, are our kernels'.
        ("dot[mk,kn->mn] bf16[7,9], f32[9,5]", false),
        ("dot[amb,bna->mn] f32[3,5,4], f32[4,7,3]", false),
    ] {
        let mesh = Mesh::default();
        let s = Sample::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        let f = function(&mesh, s.op.clone(), &s.ins);
        let Kernel::Gemm(k) = lower(&mesh, &f, &f.nodes[0], &[]).unwrap() else { panic!("{text}") };
        assert_eq!(Products::can(&k), can, "{text}: {k:?}");
        let args: Vec<Vec<Tensor>> = s.draw(3).iter().map(|t| vec![rounded(t)]).collect();
        // A bf16 result is rounded once.
        let part = if text.contains("bf16") { 1.0 / 256.0 } else { 1e-5 };
        crate::lab::compare_with(text, &mesh, &f, &args, part, |in_place| {
            run_with(machine, &mesh, &f, &args, in_place, true)
        });
    }
}

/// A buffer of experts with too few rows is found when all is done.
#[test]
fn too_few_rows_end_the_run() {
    let Some(machine) = machine::get() else { return };
    let s = Sample::parse("route[g=2,e=3; rows=5; capacity=none] i32[1,33,2]").unwrap();
    let f = function(&Mesh::default(), s.op, &s.ins);
    let args = [vec![Tensor::full(&[1, 33, 2], 1.0)]];
    let d = run(machine, &Mesh::default(), &f, &args, false).unwrap_err();
    assert_eq!((d.code, d.exit), ("moe-bound", Exit::RankFailed));
    assert!(d.message.contains("66 rows are needed"), "{d}");
}
