//! The reference interpreter: runs all ranks of a mesh in lockstep, op by op.
//!
//! It is the meaning of a program: every pass and every kernel is compared with it. Nothing here is
//! fast. One device is the empty mesh with its one rank.

mod spread;
mod step;

pub use spread::{gather, scatter};
pub use step::{Shown, State, run_step};

use crate::diag::{Diag, Result};
use crate::func::{Func, Node, Value};
use crate::mesh::Mesh;
use crate::ops::EvalCx;
use crate::tensor::Tensor;
use crate::types::{DType, Type};

/// How float results are rounded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Precision {
    /// Not at all: f64 arithmetic, whatever the element types say.
    F64,
    /// To f32 after every op; to bf16 or f16 where that is the element type.
    F32,
}

/// Runs a verified function on all ranks. `args[i][rank]` is a rank's true piece of argument `i`;
/// the answer has the same form, one entry per result.
///
/// Errors: `arguments` if `args` do not fit the function, `evaluated-shape` if an op's evaluation
/// contradicts its type.
pub fn call(
    mesh: &Mesh,
    func: &Func,
    args: &[Vec<Tensor>],
    precision: Precision,
) -> Result<Vec<Vec<Tensor>>> {
    check_args(mesh, func, args)?;
    let coords: Vec<Vec<usize>> = (0..mesh.ranks()).map(|r| mesh.coords(r)).collect();
    let last = last_uses(func);
    let mut values: Vec<Option<Vec<Tensor>>> = vec![None; func.values.len()];
    for (port, arg) in func.args.iter().zip(args) {
        values[port.value.0 as usize] = Some(arg.clone());
    }
    for (n, node) in func.nodes.iter().enumerate() {
        let mut outs = evaluate(mesh, func, node, &coords, &values);
        for (o, &v) in node.outs.iter().enumerate() {
            let ty = func.ty(v);
            for (rank, t) in outs[o].iter_mut().enumerate() {
                let want = ty.lens(mesh, &coords[rank]);
                if t.shape != want {
                    return Err(wrong_shape(func, v, node, rank, &t.shape, &want));
                }
                round(t, ty.dtype, precision);
            }
        }
        for (&v, t) in node.outs.iter().zip(outs) {
            values[v.0 as usize] = Some(t);
        }
        for &v in node.ins.iter().chain(&node.outs) {
            if last[v.0 as usize] == n {
                values[v.0 as usize] = None;
            }
        }
    }
    let result = |v: Value| values[v.0 as usize].clone().expect("verified: results are defined");
    Ok(func.results.iter().map(|p| result(p.value)).collect())
}

/// Evaluates one node on all ranks: `[result][rank]`.
fn evaluate(
    mesh: &Mesh,
    func: &Func,
    node: &Node,
    coords: &[Vec<usize>],
    values: &[Option<Vec<Tensor>>],
) -> Vec<Vec<Tensor>> {
    let in_types: Vec<&Type> = node.ins.iter().map(|&v| func.ty(v)).collect();
    let out_types: Vec<&Type> = node.outs.iter().map(|&v| func.ty(v)).collect();
    let cx = |r: usize| EvalCx { mesh, coords: &coords[r], ins: &in_types, outs: &out_types };
    let operand = |v: Value, r: usize| {
        &values[v.0 as usize].as_ref().expect("verified: values are defined before use")[r]
    };
    let operands = |r: usize| -> Vec<&Tensor> { node.ins.iter().map(|&v| operand(v, r)).collect() };
    let ranks = coords.len();
    let mut outs: Vec<Vec<Tensor>> = node.outs.iter().map(|_| Vec::new()).collect();
    let Some(collective) = node.op.collective() else {
        for r in 0..ranks {
            let mut made = node.op.def().eval(&cx(r), &operands(r)).into_iter();
            outs.iter_mut().for_each(|o| o.extend(made.next()));
        }
        return outs;
    };
    let empty = Tensor::full(&[0], 0.0);
    outs.iter_mut().for_each(|o| o.resize(ranks, empty.clone()));
    let mut done = vec![false; ranks];
    for first in 0..ranks {
        if done[first] {
            continue;
        }
        let group = mesh.group(collective.atoms(), first);
        let cxs: Vec<EvalCx> = group.iter().map(|&r| cx(r)).collect();
        let ins: Vec<Vec<&Tensor>> = group.iter().map(|&r| operands(r)).collect();
        for (&r, made) in group.iter().zip(collective.eval_group(&cxs, &ins)) {
            done[r] = true;
            outs.iter_mut().zip(made).for_each(|(o, t)| o[r] = t);
        }
    }
    outs
}

/// For every value the node after which nobody reads it; `usize::MAX` for results.
fn last_uses(func: &Func) -> Vec<usize> {
    let mut last = vec![0; func.values.len()];
    for (n, node) in func.nodes.iter().enumerate() {
        node.ins.iter().chain(&node.outs).for_each(|v| last[v.0 as usize] = n);
    }
    func.results.iter().for_each(|p| last[p.value.0 as usize] = usize::MAX);
    last
}

fn check_args(mesh: &Mesh, func: &Func, args: &[Vec<Tensor>]) -> Result<()> {
    let (want, got) = (func.args.len(), args.len());
    if want != got {
        return Err(Diag::new(
            "arguments",
            format!("@{} has {want} arguments, not {got}", func.name),
        )
        .help(format!("give {want} lists of tensors")));
    }
    let ranks = mesh.ranks();
    for (port, arg) in func.args.iter().zip(args) {
        let name = func.name(port.value);
        if arg.len() != ranks {
            return Err(Diag::new("arguments", format!("{name} is given on {} ranks", arg.len()))
                .at(format!("@{}", func.name))
                .help(format!("give one tensor for each of the {ranks} ranks")));
        }
        for (r, t) in arg.iter().enumerate() {
            let want = func.ty(port.value).lens(mesh, &mesh.coords(r));
            if t.shape != want {
                let message = format!("{name} on rank {r} has shape {:?}", t.shape);
                return Err(Diag::new("arguments", message)
                    .at(format!("@{}", func.name))
                    .rule("a rank holds its true piece of the global tensor")
                    .help(format!("give a tensor of shape {want:?}")));
            }
        }
    }
    Ok(())
}

fn wrong_shape(
    f: &Func,
    v: Value,
    node: &Node,
    rank: usize,
    got: &[usize],
    want: &[usize],
) -> Diag {
    let op = node.op.mnemonic();
    let message = format!("`{op}` made shape {got:?} on rank {rank} where its type says {want:?}");
    Diag::new("evaluated-shape", message)
        .at(format!("@{}, {}", f.name, f.name(v)))
        .rule("the evaluated tensor has the shape of the type")
        .help(format!("correct the letter rule or the evaluation of `{op}` to make {want:?}"))
}

/// Rounds a float result as the precision says; integers are exact.
fn round(t: &mut Tensor, dtype: DType, precision: Precision) {
    let to: fn(f64) -> f64 = match (precision, dtype) {
        (Precision::F64, _) | (_, DType::I32) => return,
        (_, DType::F32) => |x| f64::from(x as f32),
        (_, DType::BF16) => |x| to_half(x, 7, -126, f64::from(f32::MAX)),
        (_, DType::F16) => |x| to_half(x, 10, -14, 65504.0),
    };
    t.data.iter_mut().for_each(|x| *x = to(*x));
}

/// Nearest number (ties to even) with `bits` stored mantissa bits and exponents from `min_exp`.
fn to_half(x: f64, bits: i32, min_exp: i32, max: f64) -> f64 {
    let x = f64::from(x as f32);
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let exp = ((x.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(min_exp);
    let quantum = 2f64.powi(exp - bits);
    let y = (x / quantum).round_ties_even() * quantum;
    if y.abs() > max { f64::INFINITY.copysign(y) } else { y }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_round_to_nearest_even() {
        let bf16 = |x| to_half(x, 7, -126, f64::from(f32::MAX));
        assert_eq!(bf16(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(bf16(1.0 + 3.0 / 256.0), 1.0 + 4.0 / 256.0);
        assert_eq!(bf16(-5.141), -5.15625);
        let f16 = |x| to_half(x, 10, -14, 65504.0);
        assert_eq!((f16(65519.0), f16(65520.0)), (65504.0, f64::INFINITY));
        assert_eq!(f16(2f64.powi(-25)), 0.0);
        assert_eq!(f16(2f64.powi(-24) * 1.5), 2f64.powi(-23));
    }
}
