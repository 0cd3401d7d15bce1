//! Ops as kernels of one rank, in padded memory full of NaN, and what the op means.

use half::f16;
use shardc_codegen::lower;
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, Name, Node, Port, Scope};
use shardc_ir::interp::{self, Precision};
use shardc_ir::kernel::Kernel;
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::Cast;
use shardc_ir::rule::Letter;
use shardc_ir::samples::Sample;
use shardc_ir::tensor::{self, Tensor, each_index};
use shardc_ir::types::{AtomList, DType, Type};

/// One rank's kernel with its memory: operands, results, workspace.
pub struct Case {
    pub what: String,
    pub kernel: Kernel,
    pub memory: Vec<Vec<u8>>,
    /// Storage of each result, and what it must hold.
    results: Vec<Result>,
}

struct Result {
    operand: usize,
    dtype: DType,
    strides: Vec<usize>,
    want: Tensor,
}

/// The kernel of a sample, whole, of any size: nothing is drawn.
pub fn kernel(text: &str) -> Kernel {
    let s = Sample::parse(text.to_string().leak()).unwrap_or_else(|e| panic!("{text}: {e}"));
    let mesh = Mesh::default();
    let f = function(&s, &mesh, None).expect("types are as they are");
    lower(&mesh, &f, &f.nodes[0], &[]).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// The function of one node over a mesh, with the dims that begin with a letter split over its axis,
/// if types allow that.
fn function(s: &Sample, mesh: &Mesh, letter: Option<Letter>) -> Option<Func> {
    let ranks: Vec<usize> = s.ins.iter().map(Type::rank).collect();
    let rule = s.op.def().rule(&ranks);
    let split = |(t, dims): (&Type, &shardc_ir::rule::Dims)| {
        let mut t = t.clone();
        let Some(letter) = letter else { return t };
        match dims.iter().position(|g| g.letters()[0] == letter) {
            Some(d) => t.dims[d].atoms = AtomList::collect([Atom(0)]).unwrap(),
            None => t.replicated = AtomSet::one(Atom(0)),
        }
        t
    };
    let ins: Vec<Type> = s.ins.iter().zip(&rule.ins).map(split).collect();
    let declared: Vec<Type> = s.types().iter().zip(&rule.outs).map(split).collect();
    let types: Vec<&Type> = ins.iter().collect();
    let outs = s.op.check(mesh, &types, &declared.iter().map(Some).collect::<Vec<_>>()).ok()?;
    let mut f = Func::new("f");
    let args: Vec<_> = ins.iter().map(|t| f.arg(t.clone(), Name::parse("x"), None)).collect();
    let outs: Vec<_> = outs.into_iter().map(|t| f.value(t, Name::parse("y"))).collect();
    f.results = outs.iter().map(|&value| Port { value, role: None }).collect();
    let (op, scope) = (s.op.clone(), Scope(0));
    f.nodes.push(Node::new(op, &args, &outs, scope));
    Some(f)
}

/// The sample whole, and split three ways along every letter, on every rank.
pub fn cases(text: &str, change: impl Fn(&mut Vec<Tensor>)) -> Vec<Case> {
    let s = Sample::parse(text.to_string().leak()).unwrap_or_else(|e| panic!("{text}: {e}"));
    let mut global = s.draw(7);
    change(&mut global);
    global.iter_mut().zip(&s.ins).for_each(|(t, ty)| *t = rounded(t, ty));
    let ranks: Vec<usize> = s.ins.iter().map(Type::rank).collect();
    let letters = s.op.def().rule(&ranks).letters();
    let splits = letters.into_iter().map(|l| (3, Some(l)));
    let mut all = vec![];
    for (ways, letter) in [(1, None)].into_iter().chain(splits) {
        let mesh = Mesh::new(&[("tp", ways)]).unwrap();
        let Some(f) = function(&s, &mesh, letter) else { continue };
        let scatter = |(p, t): (&Port, &Tensor)| interp::scatter(&mesh, f.ty(p.value), t);
        let args: Vec<Vec<Tensor>> = f.args.iter().zip(&global).map(scatter).collect();
        let want = interp::call(&mesh, &f, &args, Precision::F64).unwrap();
        for rank in 0..ways {
            let what =
                format!("{text}, rank {rank} of {ways} along {:?}", letter.map(Letter::name));
            all.push(case(what, &mesh, &f, rank, &args, &want));
        }
    }
    all
}

fn case(
    what: String,
    mesh: &Mesh,
    f: &Func,
    rank: usize,
    args: &[Vec<Tensor>],
    want: &[Vec<Tensor>],
) -> Case {
    let (node, coords) = (&f.nodes[0], mesh.coords(rank));
    let types: Vec<&Type> = node.ins.iter().chain(&node.outs).map(|&v| f.ty(v)).collect();
    let (ins, outs) = types.split_at(node.ins.len());
    let mut memory: Vec<Vec<u8>> = types.iter().map(|t| nan(t.local_bytes(mesh))).collect();
    memory.push(nan(node.op.def().workspace(mesh, ins, outs)));
    let strides = |t: &Type| tensor::strides(&t.chunks(mesh)).to_vec();
    for ((t, bytes), a) in ins.iter().zip(&mut memory).zip(args) {
        let strides = strides(t);
        each_index(&a[rank].shape, |i| {
            let at: usize = i.iter().zip(&strides).map(|(i, s)| i * s).sum();
            set(bytes, t.dtype, at, a[rank].at(i));
        });
    }
    let result = |(o, t): (usize, &&Type)| Result {
        operand: ins.len() + o,
        dtype: t.dtype,
        strides: strides(t),
        want: want[o][rank].clone(),
    };
    let results = outs.iter().enumerate().map(result).collect();
    Case { what, kernel: lower(mesh, f, node, &coords).unwrap(), memory, results }
}

impl Case {
    /// Compares all results; differences may be so large, in parts of the largest element.
    pub fn check(&self, memory: &[Vec<u8>], tolerance: f64) {
        for r in &self.results {
            let finite = r.want.data.iter().filter(|x| x.is_finite());
            let largest = finite.fold(1e-3, |a: f64, b| a.max(b.abs()));
            each_index(&r.want.shape, |i| {
                let at: usize = i.iter().zip(&r.strides).map(|(i, s)| i * s).sum();
                let (got, want) = (get(&memory[r.operand], r.dtype, at), r.want.at(i));
                let near = got == want || (got - want).abs() <= tolerance * largest;
                assert!(near, "{}: operand {}{i:?} is {got}, not {want}", self.what, r.operand);
            });
        }
    }
}

/// The nearest numbers of a type.
fn rounded(t: &Tensor, ty: &Type) -> Tensor {
    let mut f = Func::new("f");
    let x = f.arg(Type::f32(&ty.sizes()), Name::parse("x"), None);
    let y = Builder::new(&Mesh::default(), &mut f).push("y", Cast { to: ty.dtype }, &[x]);
    f.results = vec![Port { value: y, role: None }];
    let args = [vec![t.clone()]];
    interp::call(&Mesh::default(), &f, &args, Precision::F32).unwrap().swap_remove(0).swap_remove(0)
}

/// So many bytes, NaN whatever floats they are.
fn nan(bytes: usize) -> Vec<u8> {
    vec![0xff; bytes]
}

fn set(bytes: &mut [u8], dtype: DType, i: usize, x: f64) {
    match dtype {
        DType::I32 => bytes[4 * i..][..4].copy_from_slice(&(x as i32).to_le_bytes()),
        DType::F32 => bytes[4 * i..][..4].copy_from_slice(&(x as f32).to_le_bytes()),
        DType::BF16 => bytes[2 * i..][..2].copy_from_slice(&(x as f32).to_le_bytes()[2..]),
        DType::F16 => bytes[2 * i..][..2].copy_from_slice(&f16::from_f64(x).to_le_bytes()),
    }
}

fn get(bytes: &[u8], dtype: DType, i: usize) -> f64 {
    let word = |at: usize| <[u8; 4]>::try_from(&bytes[at..at + 4]).unwrap();
    match dtype {
        DType::I32 => f64::from(i32::from_le_bytes(word(4 * i))),
        DType::F32 => f64::from(f32::from_le_bytes(word(4 * i))),
        DType::BF16 => f64::from(f32::from_le_bytes([0, 0, bytes[2 * i], bytes[2 * i + 1]])),
        DType::F16 => f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f64(),
    }
}
