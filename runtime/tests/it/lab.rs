//! Runs functions of one node on all ranks of a mesh, in padded memory full of NaN, and compares
//! with the reference interpreter: through memory that ranks share, through messages, and through
//! messages that a progress thread moves, which must give the same bits.

pub mod mail;

use half::f16;
use shardc_codegen::lower;
use shardc_ir::diag::Result;
use shardc_ir::func::Func;
use shardc_ir::group::launches;
use shardc_ir::interp::{self, Precision};
use shardc_ir::kernel::{Block, View};
use shardc_ir::mesh::Mesh;
use shardc_ir::tensor::{self, Tensor, each_offset};
use shardc_ir::types::{DType, Type};
use shardc_runtime::alarm::Alarm;
use shardc_runtime::exec::Executor;
use shardc_runtime::messages::Messages;
use shardc_runtime::progress::Progress;
use shardc_runtime::threads::Threads;
use shardc_runtime::transport::Transport;
use std::sync::Arc;
use std::time::Duration;

/// Memory for so many bytes, all of it NaN, as f32 and in 16 bits.
pub fn room(bytes: usize) -> Vec<f32> {
    vec![f32::from_bits(0x7fc1_7fc1); bytes.div_ceil(4)]
}

/// Sets the bytes of element `i`.
fn set(data: &mut [f32], dtype: DType, i: usize, x: f64) {
    match dtype {
        DType::I32 => data[i] = f32::from_bits(x as i32 as u32),
        DType::F32 => data[i] = x as f32,
        DType::BF16 => {
            let (bits, half) = (data[i / 2].to_bits(), i % 2 * 16);
            let new = bf16(x) << half | bits & !(0xffff << half);
            data[i / 2] = f32::from_bits(new);
        }
        DType::F16 => {
            let (bits, half) = (data[i / 2].to_bits(), i % 2 * 16);
            let x = u32::from(f16::from_f64(x).to_bits());
            data[i / 2] = f32::from_bits(x << half | bits & !(0xffff << half));
        }
    }
}

/// Element `i`.
fn get(data: &[f32], dtype: DType, i: usize) -> f64 {
    match dtype {
        DType::I32 => f64::from(data[i].to_bits() as i32),
        DType::F32 => f64::from(data[i]),
        DType::BF16 => f64::from(f32::from_bits(data[i / 2].to_bits() >> (i % 2 * 16) << 16)),
        DType::F16 => f16::from_bits((data[i / 2].to_bits() >> (i % 2 * 16)) as u16).to_f64(),
    }
}

/// The bits of a number that is a bf16.
fn bf16(x: f64) -> u32 {
    let bits = (x as f32).to_bits();
    assert_eq!(bits & 0xffff, 0, "{x} is not bf16");
    bits >> 16
}

/// A rank's true piece in its padded storage.
pub fn lay(mesh: &Mesh, ty: &Type, t: &Tensor) -> Vec<f32> {
    let strides = tensor::strides(&ty.chunks(mesh));
    let mut out = room(ty.local_bytes(mesh));
    let mut numbers = t.data.iter();
    each_offset(&t.shape, [&strides], |[at]| {
        set(&mut out, ty.dtype, at, *numbers.next().expect("one for each index"));
    });
    out
}

/// The true piece in a rank's padded storage.
pub fn unlay(mesh: &Mesh, ty: &Type, coords: &[usize], data: &[f32]) -> Tensor {
    let strides = tensor::strides(&ty.chunks(mesh));
    let (shape, mut numbers) = (ty.lens(mesh, coords), vec![]);
    each_offset(&shape, [&strides], |[at]| numbers.push(get(data, ty.dtype, at)));
    Tensor::new(&shape, numbers)
}

/// All elements of a dense tensor.
pub fn dense(shape: &[usize]) -> Block {
    let view = View { operand: 0, offset: 0, strides: tensor::strides(shape) };
    Block { extents: shape.into(), view, elem: DType::F32 }
}

/// Which buffer each operand, result and the workspace is.
pub fn places(f: &Func, in_place: bool) -> Vec<usize> {
    let node = &f.nodes[0];
    let def = node.op.def();
    let types: Vec<&Type> = node.ins.iter().chain(&node.outs).map(|&v| f.ty(v)).collect();
    let (ins, outs) = types.split_at(node.ins.len());
    let mut at: Vec<usize> = (0..=types.len()).collect();
    if def.is_view() {
        at[ins.len()] = 0;
    }
    for o in (0..outs.len()).filter(|_| in_place) {
        // As memory is planned.
        let over = launches(f)[0].over(f, o);
        if let Some(i) = node.ins.iter().position(|v| over.contains(v)) {
            at[ins.len() + o] = i;
        }
    }
    at
}

/// Runs the only node of a function; `args[i][rank]` and the answer are true pieces.
pub fn run(
    mesh: &Mesh,
    f: &Func,
    args: &[Vec<Tensor>],
    in_place: bool,
) -> Result<Vec<Vec<Tensor>>> {
    let all = |ends: Vec<Box<dyn Transport>>, threads: usize| -> Result<Vec<Vec<Tensor>>> {
        let ranks: Result<Vec<Vec<Tensor>>> = std::thread::scope(|s| {
            let rank = |(r, end): (usize, Box<dyn Transport>)| {
                s.spawn(move || one_rank(mesh, f, args, in_place, r, (end, threads)))
            };
            let all: Vec<_> = ends.into_iter().enumerate().map(rank).collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let ranks = ranks?;
        Ok((0..f.results.len()).map(|o| ranks.iter().map(|r| r[o].clone()).collect()).collect())
    };
    let shared = all(threads(mesh), 1);
    let bits = |all: &[Vec<Tensor>]| -> Vec<u64> {
        all.iter().flatten().flat_map(|t| &t.data).map(|x| x.to_bits()).collect()
    };
    match (&shared, mesh.ranks()) {
        (Ok(shared), 1) => {
            let together = all(threads(mesh), 3)?;
            assert!(bits(shared) == bits(&together), "3 threads give other bits than 1");
        }
        (Ok(shared), _) => {
            let posted = all(messages(mesh, Duration::from_secs(20)), 1)?;
            assert!(bits(shared) == bits(&posted), "messages give other bits than shared memory");
            let deferred = all(in_progress(mesh), 1)?;
            assert!(bits(shared) == bits(&deferred), "a progress thread gives other bits");
        }
        (Err(_), _) => {}
    }
    shared
}

fn threads(mesh: &Mesh) -> Vec<Box<dyn Transport>> {
    let ends = Threads::connect(mesh, Duration::from_secs(20));
    ends.into_iter().map(|end| Box::new(end) as Box<dyn Transport>).collect()
}

/// Ends that exchange messages.
pub fn messages(mesh: &Mesh, timeout: Duration) -> Vec<Box<dyn Transport>> {
    alarmed(mesh, timeout).into_iter().map(|(end, _)| end).collect()
}

fn alarmed(mesh: &Mesh, timeout: Duration) -> Vec<(Box<dyn Transport>, Arc<Alarm>)> {
    let all = mail::Office::default();
    let one = |r| {
        let (post, alarm) = (mail::Mail::new(r, &all), Arc::<Alarm>::default());
        let end = Messages::new(mesh, r, post, timeout, alarm.clone());
        (Box::new(end) as Box<dyn Transport>, alarm)
    };
    (0..mesh.ranks()).map(one).collect()
}

/// As [`messages`], with a thread each that does what is deferred.
fn in_progress(mesh: &Mesh) -> Vec<Box<dyn Transport>> {
    let one = |(end, alarm)| Box::new(Progress::new(end, alarm).unwrap()) as Box<dyn Transport>;
    alarmed(mesh, Duration::from_secs(20)).into_iter().map(one).collect()
}

fn one_rank(
    mesh: &Mesh,
    f: &Func,
    args: &[Vec<Tensor>],
    in_place: bool,
    r: usize,
    (end, threads): (Box<dyn Transport>, usize),
) -> Result<Vec<Tensor>> {
    let node = &f.nodes[0];
    let def = node.op.def();
    let coords = mesh.coords(r);
    let types: Vec<&Type> = node.ins.iter().chain(&node.outs).map(|&v| f.ty(v)).collect();
    let (ins, outs) = types.split_at(node.ins.len());
    let mut memory: Vec<Vec<f32>> =
        ins.iter().zip(args).map(|(t, a)| lay(mesh, t, &a[r])).collect();
    memory.extend(outs.iter().map(|t| room(t.local_bytes(mesh))));
    memory.push(room(def.workspace(mesh, ins, outs)));
    let at = places(f, in_place);
    let kernel = lower(mesh, f, node, &coords).unwrap();
    kernel.reach(&mut |operand, end| {
        let size = types.get(operand).map_or(4, |t| t.dtype.bytes());
        let room = memory[at[operand]].len() * 4;
        assert!(end * size <= room, "{kernel:?}: operand {operand} to {end}")
    });
    let base: Vec<*mut f32> = memory.iter_mut().map(|m| m.as_mut_ptr()).collect();
    let pointers: Vec<*mut f32> = at.iter().map(|&i| base[i]).collect();
    let mut executor = Executor::new(end, threads);
    // Where anything can go on beside other work, it does.
    executor.transport().defer();
    // SAFETY: the kernel's reach was compared with the buffers, which live until the end.
    unsafe { executor.run(&kernel, &pointers) }?;
    executor.transport().finish(0)?;
    let out = |(o, t): (usize, &&Type)| unlay(mesh, t, &coords, &memory[at[ins.len() + o]]);
    Ok(outs.iter().enumerate().map(out).collect())
}

/// Runs a function of one node and compares every rank's piece with the interpreter's, within
/// 1e-5 of the largest element of all. A kernel sums in f32 what it is given and rounds 16 bits once,
/// so such a result may be off by half a unit in its last place (2^-8 of a bf16, 2^-11 of an f16) more.
pub fn compare(what: &str, mesh: &Mesh, f: &Func, args: &[Vec<Tensor>]) {
    compare_with(what, mesh, f, args, 1e-5, |in_place| run(mesh, f, args, in_place));
}

/// As [`compare`], for who runs the function so, within this part of the largest element; results may
/// lie on operands, or apart.
pub fn compare_with(
    what: &str,
    mesh: &Mesh,
    f: &Func,
    args: &[Vec<Tensor>],
    part: f64,
    run: impl Fn(bool) -> Result<Vec<Vec<Tensor>>>,
) {
    let want =
        interp::call(mesh, f, args, Precision::F64).unwrap_or_else(|e| panic!("{what}: {e}"));
    for in_place in [false, true] {
        let got = run(in_place).unwrap_or_else(|e| panic!("{what}: {e}"));
        for (o, (got, want)) in got.iter().zip(&want).enumerate() {
            // Of an f16 below 2^-14 half a unit is 2^-25.
            let (rounding, least) = match f.ty(f.results[o].value).dtype {
                DType::BF16 => (2f64.powi(-8) * 1.001, 0.0),
                DType::F16 => (2f64.powi(-11) * 1.001, 2f64.powi(-25)),
                DType::F32 | DType::I32 => (0.0, 0.0),
            };
            let finite = want.iter().flat_map(|t| &t.data).filter(|x| x.is_finite());
            let largest = finite.fold(1e-3, |a: f64, b| a.max(b.abs()));
            for (r, (got, want)) in got.iter().zip(want).enumerate() {
                assert_eq!(got.shape, want.shape, "{what}: result {o} of rank {r}");
                for (i, (g, w)) in got.data.iter().zip(&want.data).enumerate() {
                    let close =
                        (g - w).abs() <= part * largest + (rounding * w.abs()).max(least) || g == w;
                    assert!(close, "{what}: result {o}, rank {r}, element {i}: {g} is not {w}");
                }
            }
        }
    }
}
