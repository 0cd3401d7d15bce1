//! Runs functions of one node on all ranks of a mesh, in padded memory full of NaN, and compares
//! with the reference interpreter.

use shardc_codegen::lower;
use shardc_ir::diag::Result;
use shardc_ir::func::Func;
use shardc_ir::interp::{self, Precision};
use shardc_ir::kernel::{Block, View};
use shardc_ir::mesh::Mesh;
use shardc_ir::tensor::{self, Tensor, each_index};
use shardc_ir::types::{DType, Type};
use shardc_runtime::exec::Executor;
use shardc_runtime::threads::Threads;
use std::time::Duration;

/// A rank's true piece in its padded storage.
pub fn lay(mesh: &Mesh, ty: &Type, t: &Tensor) -> Vec<f32> {
    let chunks = ty.chunks(mesh);
    let strides = tensor::strides(&chunks);
    let mut out = vec![f32::NAN; chunks.iter().product()];
    each_index(&t.shape, |i| {
        let at: usize = i.iter().zip(&strides).map(|(i, s)| i * s).sum();
        let x = t.at(i);
        out[at] = if ty.dtype == DType::I32 { f32::from_bits(x as i32 as u32) } else { x as f32 };
    });
    out
}

/// The true piece in a rank's padded storage.
pub fn unlay(mesh: &Mesh, ty: &Type, coords: &[usize], data: &[f32]) -> Tensor {
    let strides = tensor::strides(&ty.chunks(mesh));
    Tensor::from_fn(&ty.lens(mesh, coords), |i| {
        let x = data[i.iter().zip(&strides).map(|(i, s)| i * s).sum::<usize>()];
        if ty.dtype == DType::I32 { f64::from(x.to_bits() as i32) } else { f64::from(x) }
    })
}

/// All elements of a dense tensor.
#[allow(dead_code)]
pub fn dense(shape: &[usize]) -> Block {
    let view = View { operand: 0, offset: 0, strides: tensor::strides(shape) };
    Block { extents: shape.into(), view }
}

/// Runs the only node of a function; `args[i][rank]` and the answer are true pieces.
pub fn run(
    mesh: &Mesh,
    f: &Func,
    args: &[Vec<Tensor>],
    in_place: bool,
) -> Result<Vec<Vec<Tensor>>> {
    let ends = Threads::connect(mesh, Duration::from_secs(20));
    let ranks: Result<Vec<Vec<Tensor>>> = std::thread::scope(|s| {
        let rank = |(r, end)| s.spawn(move || one_rank(mesh, f, args, in_place, r, end));
        let all: Vec<_> = ends.into_iter().enumerate().map(rank).collect();
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
    end: Threads,
) -> Result<Vec<Tensor>> {
    let node = &f.nodes[0];
    let def = node.op.def();
    let coords = mesh.coords(r);
    let types: Vec<&Type> = node.ins.iter().chain(&node.outs).map(|&v| f.ty(v)).collect();
    let (ins, outs) = types.split_at(node.ins.len());
    let mut memory: Vec<Vec<f32>> =
        ins.iter().zip(args).map(|(t, a)| lay(mesh, t, &a[r])).collect();
    memory.extend(outs.iter().map(|t| vec![f32::NAN; t.local_bytes(mesh) / 4]));
    memory.push(vec![f32::NAN; def.workspace(mesh, ins, outs) / 4]);
    // Which buffer each operand, result and the workspace is.
    let mut at: Vec<usize> = (0..memory.len()).collect();
    if def.is_view() {
        at[ins.len()] = 0;
    }
    for o in (0..outs.len()).filter(|_| in_place) {
        if let Some(i) = def.in_place(o).filter(|&i| ins[i] == outs[o]) {
            at[ins.len() + o] = i;
        }
    }
    let kernel = lower(mesh, f, node, &coords).unwrap();
    kernel.reach(&mut |operand, end| {
        assert!(end <= memory[at[operand]].len(), "{kernel:?}: operand {operand} to {end}")
    });
    let base: Vec<*mut f32> = memory.iter_mut().map(|m| m.as_mut_ptr()).collect();
    let pointers: Vec<*mut f32> = at.iter().map(|&i| base[i]).collect();
    let mut executor = Executor::new(Box::new(end), 1);
    // SAFETY: the kernel's reach was compared with the buffers, which live until the end.
    unsafe { executor.run(&kernel, &pointers) }?;
    let out = |(o, t): (usize, &&Type)| unlay(mesh, t, &coords, &memory[at[ins.len() + o]]);
    Ok(outs.iter().enumerate().map(out).collect())
}

/// Runs a function of one node and compares every rank's piece with the interpreter's, within
/// 1e-5 of the largest element of all.
pub fn compare(what: &str, mesh: &Mesh, f: &Func, args: &[Vec<Tensor>]) {
    let want =
        interp::call(mesh, f, args, Precision::F64).unwrap_or_else(|e| panic!("{what}: {e}"));
    for in_place in [false, true] {
        let got = run(mesh, f, args, in_place).unwrap_or_else(|e| panic!("{what}: {e}"));
        for (o, (got, want)) in got.iter().zip(&want).enumerate() {
            let finite = want.iter().flat_map(|t| &t.data).filter(|x| x.is_finite());
            let largest = finite.fold(1e-3, |a: f64, b| a.max(b.abs()));
            for (r, (got, want)) in got.iter().zip(want).enumerate() {
                assert_eq!(got.shape, want.shape, "{what}: result {o} of rank {r}");
                for (i, (g, w)) in got.data.iter().zip(&want.data).enumerate() {
                    let close = (g - w).abs() <= 1e-5 * largest || g == w;
                    assert!(close, "{what}: result {o}, rank {r}, element {i}: {g} is not {w}");
                }
            }
        }
    }
}
