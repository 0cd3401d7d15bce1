//! From nodes to the kernel of one rank: one arm per op that is neither over rows nor a view.

use crate::layout::Layout;
use crate::{collective, experts, fused, moves, product, rows};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Node, Value};
use shardc_ir::group::{self, IterationSpace, KERNEL_KINDS, KernelKind, Launch};
use shardc_ir::kernel::{HorizontalFusion, Kernel, Product, Program};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::Op;
use shardc_ir::plan::Plan;
use shardc_ir::types::Type;

/// The kernels of every launch of every function that one rank of a plan runs.
///
/// # Errors
/// `dtype` if no kernel has a value's elements: f32, bf16 and i32 have some. `plan` if nodes that
/// the plan joins are not a kernel.
pub fn program(plan: &Plan, rank: usize) -> Result<Program> {
    let mesh = &plan.module.mesh;
    let coords = mesh.coords(rank);
    let own = &plan.classes[plan.class_of(rank)].funcs;
    let one = |(i, f): (usize, &Func)| {
        let all = if own.contains(&i) { group::launches(f) } else { vec![] };
        let mut found = group::FusionBuilder::of(f);
        all.iter().map(|x| kernel(mesh, f, &mut found, x, &coords)).collect()
    };
    plan.module.funcs.iter().enumerate().map(one).collect()
}

/// What the rank with these coordinates does for a node.
///
/// # Errors
/// `dtype` if no kernel has the elements of an operand or a result.
pub fn lower(mesh: &Mesh, func: &Func, node: &Node, coords: &[usize]) -> Result<Kernel> {
    let values: Vec<Value> = node.ins.iter().chain(&node.outs).copied().collect();
    let l = layout(mesh, func, (&values, node.ins.len()), coords);
    Ok(match IterationSpace::of(func, std::iter::once(node)) {
        Some(space) if !node.op.def().is_view() => {
            rows::rows(&l, func, std::slice::from_ref(node), &values, &space)
        }
        _ => alone(&l, node),
    })
}

/// What the rank with these coordinates does for the nodes of a launch.
///
/// # Errors
/// As for [`program`].
pub fn launch(mesh: &Mesh, func: &Func, x: &Launch, coords: &[usize]) -> Result<Kernel> {
    kernel(mesh, func, &mut group::FusionBuilder::of(func), x, coords)
}

/// The kernel of a launch; what tells kernels of the function apart is made once for all of its launches.
fn kernel(
    mesh: &Mesh,
    func: &Func,
    found: &mut group::FusionBuilder,
    x: &Launch,
    coords: &[usize],
) -> Result<Kernel> {
    let nodes = &func.nodes[x.nodes.clone()];
    if let [one] = nodes {
        return lower(mesh, func, one, coords);
    }
    let values: Vec<Value> = x.ins.iter().chain(&x.outs).copied().collect();
    let l = layout(mesh, func, (&values, x.ins.len()), coords);
    match x.form(found) {
        Some(KernelKind::Rows(space)) => return Ok(rows::rows(&l, func, nodes, &values, &space)),
        Some(KernelKind::Sum) => return Ok(alone(&l, &nodes[0])),
        Some(KernelKind::Epilogue(space)) => {
            return Ok(product::then(&l, func, nodes, &values, &space));
        }
        Some(KernelKind::FusionBuilder(all)) => {
            let mut k = HorizontalFusion::default();
            for x in &all {
                let Kernel::Rows(one) = kernel(mesh, func, found, x, coords)? else {
                    panic!("kernels of one launch are over rows");
                };
                let place = |v| values.iter().position(|x| x == v).expect("one of the launch");
                k.kernels.push(one);
                k.operands.push(x.ins.iter().chain(&x.outs).map(place).collect());
            }
            return Ok(Kernel::HorizontalFusion(k));
        }
        Some(KernelKind::Exchanges(all)) => {
            let place = |v: Value| values.iter().position(|&x| x == v).expect("one of the launch");
            let one = |x: &Launch| {
                let op = func.nodes[x.nodes.start].op.collective().expect("it exchanges");
                (op, [place(x.ins[0]), place(x.outs[0])])
            };
            return Ok(collective::together(&l, &all.iter().map(one).collect::<Vec<_>>()));
        }
        None => {}
    }
    let names: Vec<String> = nodes.iter().map(|n| n.op.mnemonic().to_string()).collect();
    Err(Diag::new("plan", format!("no kernel does {} in one launch", names.join(", ")))
        .at(format!("@{}, {}", func.name, func.name(nodes[0].outs[0])))
        .rule(KERNEL_KINDS)
        .help("recompile the plan with this version of shardc"))
}

fn layout<'a>(
    mesh: &'a Mesh,
    func: &'a Func,
    (values, ins): (&[Value], usize),
    coords: &'a [usize],
) -> Layout<'a> {
    let types: Vec<&Type> = values.iter().map(|&v| func.ty(v)).collect();
    Layout { mesh, coords, types, ins }
}

/// What a node does that is not one over rows.
fn alone(l: &Layout, node: &Node) -> Kernel {
    match &node.op {
        Op::Literal(o) => Kernel::Literal { values: o.values.clone(), to: 0 },
        Op::Transpose(o) => moves::spread(l, &o.rule.0),
        Op::Expand(o) => moves::spread(l, &o.rule.0),
        Op::Dot(o) => Kernel::Gemm(product::dot(l, &o.rule.0)),
        Op::Take(o) => moves::take(l, &o.rule.0, o.padding),
        Op::IndexAdd(o) => moves::index_add(l, &o.rule.0, o.padding),
        Op::Concat(o) => moves::concat(l, o),
        Op::Narrow(o) => moves::narrow(l, o),
        Op::Pad(o) => moves::pad(l, o),
        Op::Draw(o) => moves::draw(l, o),
        Op::Cumsum(o) => moves::scan(l, o),
        Op::Rope(o) => fused::rope(l, o.pairs),
        Op::Attention(o) => fused::attention(l, o),
        Op::AttentionGrad(o) => fused::attention_grad(l, o),
        Op::Scan(o) => fused::scan(l, o),
        Op::ScanGrad(o) => fused::scan_grad(l, o),
        Op::TopK(o) => experts::top_k(l, o),
        Op::Route(o) => experts::route(l, o),
        Op::Dispatch(_) => Kernel::Dispatch(experts::copies(l, [3, 0, 2])),
        Op::Unpermute(_) => Kernel::Unpermute(experts::copies(l, [0, 3, 2])),
        Op::CombineGatesGrad(_) => Kernel::CombineGatesGrad(experts::copies(l, [0, 2, 3])),
        Op::GroupedDot(_) => experts::grouped(l, Product::Rows, [0, 3, 2]),
        Op::GroupedDotT(_) => experts::grouped(l, Product::RowsTransposed, [3, 0, 2]),
        Op::GroupedOuter(_) => experts::grouped(l, Product::Weights, [2, 0, 3]),
        Op::AllReduce(o) => collective::all_reduce(l, o.axes),
        Op::AllGather(o) => collective::all_gather(l, o.axes, o.dim),
        Op::ReduceScatter(o) => collective::reduce_scatter(l, o.axes, o.dim),
        Op::Broadcast(o) => collective::broadcast(l, o.axes, o.dim, o.from),
        Op::Reduce(o) => collective::reduce(l, o.axes, o.dim, o.to),
        Op::Slice(o) => moves::slice(l, o.dim),
        Op::PadToPartial(o) => moves::place(l, o.dim),
        Op::RingShard(o) => moves::piece(l, o.dim, o.number(l.mesh, l.coords)),
        Op::AllToAll(o) => collective::all_to_all(l, o.axes, o.from, o.to),
        Op::Exchange(o) => collective::exchange(l, o),
        Op::AllToAllV(o) => collective::all_to_all_v(l, o),
        Op::Permute(o) => collective::permute(l, o.axes, o.shift),
        op if op.def().is_view() => Kernel::View,
        op => panic!("{} is over rows, or needs an arm here", op.mnemonic()),
    }
}
