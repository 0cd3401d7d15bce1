//! From a node to the kernel of one rank: one arm per op.

use crate::layout::Layout;
use crate::{collective, elementwise, experts, fused, moves, product};
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::func::{Func, Node};
use shardc_ir::kernel::{Binary, Elem, Kernel, Product, Program, Unary};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::Op;
use shardc_ir::plan::Plan;
use shardc_ir::types::{Reduction, Type};

/// The kernels of every node of every function that one rank of a plan runs.
///
/// # Errors
/// `dtype` if no kernel has a value's elements: f32, bf16 and i32 have some.
pub fn program(plan: &Plan, rank: usize) -> Result<Program> {
    let mesh = &plan.module.mesh;
    let coords = mesh.coords(rank);
    let own = &plan.classes[plan.class_of(rank)].funcs;
    let one = |(i, f): (usize, &Func)| {
        let nodes = f.nodes.iter().filter(|_| own.contains(&i));
        nodes.map(|n| lower(mesh, f, n, &coords)).collect()
    };
    plan.module.funcs.iter().enumerate().map(one).collect()
}

/// What the rank with these coordinates does for a node.
///
/// # Errors
/// `dtype` if no kernel has the elements of an operand or a result.
pub fn lower(mesh: &Mesh, func: &Func, node: &Node, coords: &[usize]) -> Result<Kernel> {
    let types: Vec<&Type> = node.ins.iter().chain(&node.outs).map(|&v| func.ty(v)).collect();
    if let Some(t) = types.iter().find(|t| Elem::of(t.dtype).is_none()) {
        let name = node.outs.first().map_or(String::new(), |&v| func.name(v).to_string());
        return Err(Diag::new("dtype", format!("no kernel computes {} yet", t.dtype.name()))
            .at(format!("@{}, {name} = {}", func.name, node.op.mnemonic()))
            .rule("kernels take f32 and i32 (4 bytes), and bf16 (2 bytes)")
            .help("write bf16 in its place (2 bytes per element too), or f32 (4)")
            .exit(Exit::Unsupported));
    }
    let ranks: Vec<usize> = node.ins.iter().map(|&v| func.ty(v).rank()).collect();
    let l = &Layout { mesh, coords, types, ins: node.ins.len() };
    let unary = |f: Unary| elementwise::unary(l, f);
    let chain = |f: Binary| elementwise::chain(l, &node.op.def().rule(&ranks), f);
    let reduce = |f: Reduction| elementwise::reduce(l, &node.op.def().rule(&ranks), f);
    Ok(match &node.op {
        Op::Add(_) => chain(Binary::Add),
        Op::Sub(_) => chain(Binary::Sub),
        Op::Mul(_) => chain(Binary::Mul),
        Op::Div(_) => chain(Binary::Div),
        Op::Scale(o) => elementwise::with_constant(l, Binary::Mul, o.by),
        Op::Shift(o) => elementwise::with_constant(l, Binary::Add, o.by),
        Op::AtLeast(o) => elementwise::with_constant(l, Binary::AtLeast, o.bound),
        Op::Exp(_) => unary(Unary::Exp),
        Op::Log(_) => unary(Unary::Log),
        Op::Sqrt(_) => unary(Unary::Sqrt),
        Op::Rsqrt(_) => unary(Unary::Rsqrt),
        Op::Tanh(_) => unary(Unary::Tanh),
        Op::Logistic(_) => unary(Unary::Logistic),
        Op::Silu(_) => unary(Unary::Silu),
        Op::Gelu(_) => unary(Unary::Gelu),
        Op::Sin(_) => unary(Unary::Sin),
        Op::Cos(_) => unary(Unary::Cos),
        Op::Clamp(o) => elementwise::clamp(l, o.lo, o.hi),
        Op::Cast(_) => elementwise::convert(l),
        Op::StopGradient(_)
        | Op::Reshape(_)
        | Op::FanOut(_)
        | Op::Term(_)
        | Op::Own(_)
        | Op::Join(_) => Kernel::View,
        Op::Literal(o) => Kernel::Literal { values: o.values.clone(), to: 0 },
        Op::Fill(o) => elementwise::fill(l, o.value),
        Op::Transpose(o) => moves::spread(l, &o.rule.0),
        Op::Expand(o) => moves::spread(l, &o.rule.0),
        Op::ReduceSum(_) => reduce(Reduction::Sum),
        Op::ReduceMax(_) => reduce(Reduction::Max),
        Op::Dot(o) => product::dot(l, &o.rule.0),
        Op::Take(o) => moves::take(l, &o.rule.0),
        Op::Put(o) => moves::put(l, &o.rule.0),
        Op::Concat(_) => moves::concat(l),
        Op::Narrow(o) => moves::narrow(l, o.start),
        Op::Widen(o) => moves::widen(l, o.start),
        Op::Rope(o) => fused::rope(l, o.pairs),
        Op::Attention(o) => fused::attention(l, o.scale, o.window),
        Op::AttentionGrad(o) => fused::attention_grad(l, o.scale, o.window),
        Op::TopK(o) => experts::top_k(l, o),
        Op::Route(o) => experts::route(l, o),
        Op::Dispatch(_) => Kernel::Dispatch(experts::copies(l, [3, 0, 2])),
        Op::Combine(_) => Kernel::Combine(experts::copies(l, [0, 3, 2])),
        Op::RowDots(_) => Kernel::RowDots(experts::copies(l, [0, 2, 3])),
        Op::GroupedDot(_) => experts::grouped(l, Product::Rows, [0, 3, 2]),
        Op::GroupedDotT(_) => experts::grouped(l, Product::RowsTransposed, [3, 0, 2]),
        Op::GroupedOuter(_) => experts::grouped(l, Product::Weights, [2, 0, 3]),
        Op::MergeAttention(_) => fused::merge_attention(l, &node.op.def().rule(&ranks)),
        Op::AdamW(o) => fused::adamw(l, o, &ranks),
        Op::Sgd(o) => fused::sgd(l, o, &ranks),
        Op::AllReduce(o) => collective::all_reduce(l, o.axes),
        Op::AllGather(o) => collective::all_gather(l, o.axes, o.dim),
        Op::ReduceScatter(o) => collective::reduce_scatter(l, o.axes, o.dim),
        Op::Broadcast(o) => collective::broadcast(l, o.axes, o.dim, o.from),
        Op::Reduce(o) => collective::reduce(l, o.axes, o.dim, o.to),
        Op::Slice(o) => moves::slice(l, o.dim),
        Op::Place(o) => moves::place(l, o.dim),
        Op::Piece(o) => moves::piece(l, o.dim, o.number(mesh, coords)),
        Op::AllToAll(o) => collective::all_to_all(l, o.axes, o.from, o.to),
        Op::AllToAllV(o) => collective::all_to_all_v(l, o),
        Op::Permute(o) => collective::permute(l, o.axes, o.shift),
    })
}
