//! The reference interpreter: runs all ranks of a mesh in lockstep, op by op.
//!
//! It is the meaning of a program: every pass and every kernel is compared with it. Nothing here is
//! fast. One device is the empty mesh with its one rank.

mod spread;
mod step;

pub use spread::{gather, scatter};
pub use step::{Shown, StepState, run_step};

use crate::diag::{Diag, Result};
use crate::func::{Func, Node, Value, ValueMap};
use crate::mesh::{AtomSet, Mesh};
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
    let mut run = Running::new(mesh, func, args, precision)?;
    run.go_on(AtomSet::EMPTY)?;
    Ok(run.results())
}

/// A call of a function, so far.
struct Running<'a> {
    mesh: &'a Mesh,
    func: &'a Func,
    precision: Precision,
    coords: Vec<Vec<usize>>,
    last: ValueMap<usize>,
    values: ValueMap<Option<Vec<Tensor>>>,
    /// The node that comes next.
    next: usize,
}

impl<'a> Running<'a> {
    fn new(
        mesh: &'a Mesh,
        func: &'a Func,
        args: &[Vec<Tensor>],
        precision: Precision,
    ) -> Result<Running<'a>> {
        check_args(mesh, func, args)?;
        let mut values: ValueMap<Option<Vec<Tensor>>> = func.per_value(None);
        for (port, arg) in func.args.iter().zip(args) {
            values[port.value] = Some(arg.clone());
        }
        let coords = (0..mesh.ranks()).map(|r| mesh.coords(r)).collect();
        let last = last_uses(func);
        Ok(Running { mesh, func, precision, coords, last, values, next: 0 })
    }

    /// Runs nodes up to the first collective over some of these atoms: then false.
    fn go_on(&mut self, outside: AtomSet) -> Result<bool> {
        while let Some(node) = self.func.nodes.get(self.next) {
            if node.op.collective().is_some_and(|c| c.atoms().meets(outside)) {
                return Ok(false);
            }
            let outs = self.evaluate(node);
            self.finish(outs)?;
        }
        Ok(true)
    }

    /// Sets what the next node makes.
    fn finish(&mut self, mut outs: Vec<Vec<Tensor>>) -> Result<()> {
        let node = &self.func.nodes[self.next];
        for (o, &v) in node.outs.iter().enumerate() {
            let ty = self.func.ty(v);
            for (rank, t) in outs[o].iter_mut().enumerate() {
                let want = ty.lens(self.mesh, &self.coords[rank]);
                if t.shape != want {
                    return Err(wrong_shape(self.func, v, node, rank, &t.shape, &want));
                }
                round(t, ty.dtype, self.precision);
            }
        }
        for (&v, t) in node.outs.iter().zip(outs) {
            self.values[v] = Some(t);
        }
        for &v in node.ins.iter().chain(&node.outs) {
            if self.last[v] == self.next {
                self.values[v] = None;
            }
        }
        self.next += 1;
        Ok(())
    }

    fn results(&self) -> Vec<Vec<Tensor>> {
        let result = |v: Value| self.values[v].clone().expect("verified: results are defined");
        self.func.results.iter().map(|p| result(p.value)).collect()
    }

    /// The operands of a node on one rank.
    fn operands(&self, node: &Node, rank: usize) -> Vec<&Tensor> {
        let one = |v: &Value| {
            &self.values[v].as_ref().expect("verified: values are defined before use")[rank]
        };
        node.ins.iter().map(one).collect()
    }

    /// Evaluates one node on all ranks: `[result][rank]`.
    fn evaluate(&self, node: &Node) -> Vec<Vec<Tensor>> {
        let in_types: Vec<&Type> = node.ins.iter().map(|&v| self.func.ty(v)).collect();
        let out_types: Vec<&Type> = node.outs.iter().map(|&v| self.func.ty(v)).collect();
        let (mesh, coords) = (self.mesh, &self.coords);
        let cx = |r: usize| EvalCx { mesh, coords: &coords[r], ins: &in_types, outs: &out_types };
        let ranks = coords.len();
        let mut outs: Vec<Vec<Tensor>> = node.outs.iter().map(|_| Vec::new()).collect();
        let Some(collective) = node.op.collective() else {
            for r in 0..ranks {
                let mut made = node.op.def().eval(&cx(r), &self.operands(node, r)).into_iter();
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
            let ins: Vec<Vec<&Tensor>> = group.iter().map(|&r| self.operands(node, r)).collect();
            for (&r, made) in group.iter().zip(collective.eval_group(&cxs, &ins)) {
                done[r] = true;
                outs.iter_mut().zip(made).for_each(|(o, t)| o[r] = t);
            }
        }
        outs
    }
}

/// Evaluates the collective over `axes` at which every rank of the pipeline now waits, each in its
/// own function.
fn meet(mesh: &Mesh, axes: AtomSet, all: &mut [Running]) -> Result<()> {
    let nodes: Vec<&Node> = all.iter().map(|r| &r.func.nodes[r.next]).collect();
    let same = |n: &&Node| n.op == nodes[0].op && n.ins.len() == nodes[0].ins.len();
    let Some(c) = nodes[0].op.collective().filter(|c| c.atoms() == axes) else {
        return Err(stuck("a collective over some of the pipeline's axes and others"));
    };
    if !nodes.iter().all(same) {
        return Err(stuck("the ranks of the pipeline come to different collectives"));
    }
    let types = |of: fn(&Node) -> &[Value]| -> Vec<Vec<&Type>> {
        all.iter().zip(&nodes).map(|(r, n)| of(n).iter().map(|&v| r.func.ty(v)).collect()).collect()
    };
    let (ins, outs) = (types(|n| &n.ins), types(|n| &n.outs));
    let ranks = all[0].coords.len();
    let mut made: Vec<Vec<Vec<Tensor>>> =
        nodes.iter().map(|n| n.outs.iter().map(|_| vec![]).collect()).collect();
    for rank in 0..ranks {
        let at: Vec<Vec<usize>> = (0..all.len())
            .map(|stage| {
                let mut c = all[stage].coords[rank].clone();
                axes.iter().for_each(|a| c[a.0 as usize] = stage);
                c
            })
            .collect();
        let cx = |i: usize| EvalCx { mesh, coords: &at[i], ins: &ins[i], outs: &outs[i] };
        let cxs: Vec<EvalCx> = (0..all.len()).map(cx).collect();
        let operands: Vec<Vec<&Tensor>> =
            all.iter().zip(&nodes).map(|(r, n)| r.operands(n, rank)).collect();
        for (to, tensors) in made.iter_mut().zip(c.eval_group(&cxs, &operands)) {
            to.iter_mut().zip(tensors).for_each(|(o, t)| o.push(t));
        }
    }
    all.iter_mut().zip(made).try_for_each(|(r, outs)| r.finish(outs))
}

fn stuck(what: &str) -> Diag {
    Diag::new("deadlock", what)
        .rule("all ranks of the pipeline run the same collectives over it, in the same order")
        .help("compile again: 1 schedule gives the lists of all ranks")
}

/// For every value the node after which nobody reads it; `usize::MAX` for results.
fn last_uses(func: &Func) -> ValueMap<usize> {
    let mut last = func.per_value(0);
    for (n, node) in func.nodes.iter().enumerate() {
        node.ins.iter().chain(&node.outs).for_each(|v| last[v] = n);
    }
    func.results.iter().for_each(|p| last[p.value] = usize::MAX);
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
    let Some((bits, least)) = dtype.facts().float else { return };
    let all = t.data.iter_mut();
    match (precision, dtype.is_half()) {
        (Precision::F64, _) => {}
        (_, false) => all.for_each(|x| *x = f64::from(*x as f32)),
        (_, true) => all.for_each(|x| *x = to_half(*x, bits, least, dtype.largest())),
    }
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
