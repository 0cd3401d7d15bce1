//! What must hold of every op, tested on every op's samples: text, types, gradients, splits.

mod arms;
mod collectives;
mod errors;
mod gradients;
mod ragged;
mod rings;
mod splits;
mod text;

use shardc_ir::builder::Builder;
use shardc_ir::diag::Diag;
use shardc_ir::func::{Func, Name, Port, Value};
use shardc_ir::infer;
use shardc_ir::interp::{self, Precision};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::Op;
use shardc_ir::rule::{Dims, Letter, Rule};
use shardc_ir::samples::Sample;
use shardc_ir::tensor::Tensor;
use shardc_ir::types::{AtomList, Reduction, Type};

/// An op's operands spread over a mesh in some legal way.
pub struct Case {
    pub what: String,
    pub mesh: Mesh,
    pub ins: Vec<Type>,
    pub declared: Vec<Type>,
}

/// Says where two tensors differ by more than `tolerance` relative to 1 or their size.
pub fn close(got: &Tensor, want: &Tensor, tolerance: f64) -> Result<(), String> {
    if got.shape != want.shape {
        return Err(format!("shape {:?}, not {:?}", got.shape, want.shape));
    }
    for (i, (&a, &b)) in got.data.iter().zip(&want.data).enumerate() {
        let fine = a == b || (a - b).abs() <= tolerance * (1.0 + b.abs());
        if !fine {
            return Err(format!("element {i} is {a}, not {b}"));
        }
    }
    Ok(())
}

/// A function with one argument per type.
pub fn with_args(types: &[Type]) -> (Func, Vec<Value>) {
    let mut f = Func::new("f");
    let args = types.iter().map(|t| f.arg(t.clone(), Name::parse("a"), None)).collect();
    (f, args)
}

pub fn results(f: &mut Func, values: &[Value]) {
    f.results = values.iter().map(|&value| Port { value, role: None }).collect();
}

/// Scatters, runs, gathers.
pub fn run(mesh: &Mesh, f: &Func, globals: &[Tensor]) -> Result<Vec<Tensor>, Diag> {
    let scattered = f.args.iter().zip(globals);
    let args: Vec<_> = scattered.map(|(p, t)| interp::scatter(mesh, f.ty(p.value), t)).collect();
    let outs = interp::call(mesh, f, &args, Precision::F64)?;
    f.results.iter().zip(&outs).map(|(p, t)| interp::gather(mesh, f.ty(p.value), t)).collect()
}

/// A function that applies the op to its arguments; its results are the op's.
pub fn apply(mesh: &Mesh, op: &Op, ins: &[Type], declared: &[Type]) -> Result<Func, String> {
    let types: Vec<&Type> = ins.iter().collect();
    let declared: Vec<Option<&Type>> = declared.iter().map(Some).collect();
    op.check(mesh, &types, &declared).map_err(|e| format!("{}: {}", e.code, e.message))?;
    let (mut f, args) = with_args(ins);
    let outs = Builder::new(mesh, &mut f).try_push(op.clone(), &args, &declared, &[]);
    let outs = outs.map_err(|e| e.message)?;
    results(&mut f, &outs);
    Ok(f)
}

fn ranks(s: &Sample) -> Vec<usize> {
    s.ins.iter().map(Type::rank).collect()
}

pub fn rule(s: &Sample) -> Rule {
    s.op.def().rule(&ranks(s)).into_owned()
}

/// Letters that can be split at all, with their sizes.
pub fn letters(s: &Sample) -> Vec<(Letter, usize)> {
    let rule = rule(s);
    let ins: Vec<&Type> = s.ins.iter().collect();
    let sizes = infer::sizes(&rule, &ins, s.op.def().sizes()).expect("a sample");
    let sizes = sizes.0.iter().map(|x| (x.letter, x.size));
    sizes.filter(|&(l, n)| n > 1 && !rule.is_whole(l)).collect()
}

/// Ways to split a letter: the axes of a mesh, and their order in the dim, major to minor.
const WAYS: &[(&[usize], &[u8])] =
    &[(&[2], &[0]), (&[3], &[0]), (&[2, 2], &[0, 1]), (&[2, 2], &[1, 0]), (&[2, 3], &[0, 1])];

/// Letters major to `l` in a dim made of several.
fn majors(rule: &Rule, l: Letter) -> Vec<Letter> {
    let mut out = vec![];
    for g in rule.ins.iter().chain(&rule.outs).flatten() {
        if let Some(at) = g.letters().iter().position(|&x| x == l) {
            out.extend(
                g.letters()[..at].iter().copied().filter(|m| !out.contains(m)).collect::<Vec<_>>(),
            );
        }
    }
    out
}

pub fn is_joined(rule: &Rule, l: Letter) -> bool {
    let mut groups = rule.ins.iter().chain(&rule.outs).flatten();
    groups.any(|g| g.single().is_none() && g.letters().contains(&l))
}

/// Splits letter `l` of size `n` in all tensors that have it; the others are replicated. Letters
/// major to it in a dim are split fully, over axes of their own.
pub fn split(s: &Sample, l: Letter, (axes, order): (&[usize], &[u8])) -> Case {
    let rule = rule(s);
    let all = letters(s);
    let above = majors(&rule, l);
    let above = above.into_iter().filter_map(|m| all.iter().find(|x| x.0 == m));
    let above: Vec<(Letter, usize)> = above.copied().collect();
    let names = ["x", "y", "u", "v"];
    let sizes = axes.iter().copied().chain(above.iter().map(|a| a.1));
    let named: Vec<(&str, usize)> = names.into_iter().zip(sizes).collect();
    let mesh = Mesh::new(&named).expect("a mesh");
    let mut assigned: Vec<(Letter, Vec<Atom>)> =
        vec![(l, order.iter().map(|&a| Atom(a)).collect())];
    for (i, &(m, _)) in above.iter().enumerate() {
        assigned.push((m, vec![Atom((axes.len() + i) as u8)]));
    }
    let typed = |t: &Type, dims: &Dims| {
        let mut t = t.clone();
        for (d, g) in t.dims.iter_mut().zip(dims) {
            let lists = g.letters().iter().filter_map(|l| assigned.iter().find(|a| a.0 == *l));
            let atoms = lists.flat_map(|a| a.1.iter().copied());
            d.atoms = AtomList::collect(atoms).expect("few atoms");
        }
        t.replicated = mesh.all().minus(t.sharded());
        t
    };
    let ins = s.ins.iter().zip(&rule.ins).map(|(t, d)| typed(t, d)).collect();
    let outs = s.types();
    let declared = outs.iter().zip(&rule.outs).map(|(t, d)| typed(t, d)).collect();
    let what = format!("{}, `{}` over {named:?} in order {order:?}", s.text, l.name());
    Case { what, mesh, ins, declared }
}

/// Every split of every letter that the op allows.
pub fn splits(s: &Sample) -> Vec<Case> {
    let rule = rule(s);
    let mut out = vec![];
    for (l, n) in letters(s) {
        let before = out.len();
        for &way in WAYS {
            let pieces: usize = way.0.iter().product();
            let even = n % pieces == 0;
            if even || !is_joined(&rule, l) {
                out.push(split(s, l, way));
            }
        }
        assert!(out.len() > before, "{}: `{}` is never split", s.text, l.name());
    }
    out
}

/// Every way in which a sum (or max) still to be taken may pass through the op.
pub fn pending(s: &Sample) -> Vec<Case> {
    let n = s.ins.len() as u32;
    let masks: Vec<u32> = match s.op.def().linear() {
        infer::Linear::No => vec![],
        infer::Linear::Together(m) => vec![m & ((1 << n) - 1)],
        infer::Linear::Each(m) => (0..n).map(|i| 1 << i).filter(|b| b & m != 0).collect(),
    };
    let mesh = Mesh::new(&[("x", 3)]).expect("a mesh");
    let x = AtomSet::one(Atom(0));
    let one = |mask: u32| {
        let mut ins = s.ins.clone();
        for (i, t) in ins.iter_mut().enumerate() {
            match (mask >> i & 1, s.op.def().reduction()) {
                (0, _) => t.replicated = x,
                (_, Reduction::Sum) => t.sum = x,
                (_, Reduction::Max) => t.max = x,
                (_, Reduction::Min) => t.min = x,
            }
        }
        let what = format!("{}, operands {mask:#b} pending", s.text);
        Case { what, mesh: mesh.clone(), ins, declared: s.declared.clone() }
    };
    masks.into_iter().map(one).collect()
}
