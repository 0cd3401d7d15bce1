//! What ZeRO has to do with a weight or a collective: over which axes it is cut, what that saves, where
//! it is gathered, what mirrors that, and what other stages would cost. All numbers are those of plans.

use super::trace::Why;
use crate::inspect::{is_gradient, numbered};
use crate::report::collectives;
use shardc_ir::diag::{bytes, count};
use shardc_ir::func::{Func, FuncKind, Node, Role, RoleKind, Value};
use shardc_ir::mesh::AtomSet;
use shardc_ir::ops::{Kind, Op};
use shardc_ir::plan::Plan;
use shardc_passes::options::Options;
use shardc_plans::again::variant;

/// What the plan's stage cuts, in words.
fn what(stage: u8) -> &'static str {
    match stage {
        1 => "optimizer state, and the copy of the weight that the optimizer works on",
        2 => "optimizer state, that copy of the weight, and gradients",
        _ => "the weight itself, its gradient and optimizer state",
    }
}

/// The axes over which ZeRO cuts what is stored of a parameter: those that no sharding of the model
/// asks for, and no grid.
pub fn cut(why: &Why, param: &str) -> AtomSet {
    let Some((_, _, stored)) = why.stored(param).filter(|_| why.s.options.zero > 0) else {
        return AtomSet::EMPTY;
    };
    let asked = why.asked(param).map_or(AtomSet::EMPTY, |t| t.sharded());
    let tp = why.mesh.axis("tp").unwrap_or_default();
    stored.sharded().minus(asked).minus(tp)
}

/// The parameters that a collective gathers, or whose gradients it reduces.
pub fn params(f: &Func, n: &Node) -> Vec<String> {
    let makers = f.makers();
    let of_arg = |mut v: Value| -> Option<&Role> {
        loop {
            match makers[v] {
                Some(i) if carries(&f.nodes[i as usize]) => v = f.nodes[i as usize].ins[0],
                Some(_) => return None,
                None => return f.args.iter().find(|a| a.value == v)?.role.as_ref(),
            }
        }
    };
    let of_result = |mut v: Value| -> Option<&Role> {
        loop {
            if let Some(r) = f.results.iter().find(|r| r.value == v) {
                return r.role.as_ref();
            }
            let mut users = f.nodes.iter().filter(|n| n.ins.contains(&v));
            // A gradient may be added to what earlier microbatches left.
            v = users.next().filter(|n| carries(n) || n.op.is_sum())?.outs[0];
        }
    };
    let serves = |r: &&Role| {
        use RoleKind::{Grad, GradSum, Param, Unsharded};
        matches!(r.kind, Param | Unsharded | Grad | GradSum)
    };
    let one = |(&x, &y): (&Value, &Value)| {
        let role = of_arg(x).filter(serves).or_else(|| of_result(y).filter(serves))?;
        Some(role.name.to_string())
    };
    n.ins.iter().zip(&n.outs).filter_map(one).collect()
}

/// True if a node hands on what it is given, in another layout or element type.
fn carries(n: &Node) -> bool {
    let moves = matches!(n.op.facts().kind, Kind::Conversion | Kind::Layout);
    n.outs.len() == 1 && (moves || matches!(n.op, Op::Scale(_)))
}

/// A collective that ZeRO made for some parameters.
struct Made {
    number: usize,
    func: usize,
    kind: &'static str,
    atoms: AtomSet,
}

/// The gathers and reduce_scatters that ZeRO made for a parameter, in program order.
fn made(why: &Why, param: &str) -> Vec<Made> {
    let over = cut(why, param);
    let all = numbered(why.plan).into_iter().enumerate();
    let one = |(i, (fi, ni)): (usize, (usize, usize))| {
        let f = why.func(fi);
        let n = &f.nodes[ni];
        let c = n.op.collective()?;
        // What the last microbatch does as the others do is told of these.
        let of_step = (0..n.ins.len()).any(|i| is_gradient(f, n, i));
        if f.kind != f.kind.plain() && !of_step {
            return None;
        }
        let kind = c.kind();
        let is = matches!(kind, "all_gather" | "reduce_scatter") && c.atoms().meets(over);
        let serves = is && params(f, n).iter().any(|p| p == param);
        serves.then(|| Made { number: i + 1, func: fi, kind, atoms: c.atoms() })
    };
    all.filter_map(one).collect()
}

/// The numbers of the collectives that reduce a parameter's gradient as microbatches make it.
pub fn reduced(why: &Why, param: &str) -> Vec<usize> {
    let all = made(why, param).into_iter().filter(|m| m.kind == "reduce_scatter");
    all.map(|m| m.number).collect()
}

/// How often a function runs in a step.
fn often(plan: &Plan, fi: usize) -> String {
    let kind = plan.module.funcs[fi].kind;
    match plan.is_looped(fi) {
        true if kind != kind.plain() => "once per step, for the last microbatch".into(),
        true => format!("once per microbatch, {} per step", count(plan.times(fi), "time", "times")),
        false => "once per step".into(),
    }
}

/// What ZeRO does to a parameter; nothing if it does not cut it.
pub fn lines(why: &Why, param: &str) -> Vec<String> {
    let (o, mesh) = (&why.s.options, why.mesh);
    let over = cut(why, param);
    let Some((_, _, t)) = why.stored(param).filter(|_| !over.is_empty()) else {
        return whole(why, param);
    };
    let ways = mesh.ways(over);
    let axes = mesh.names(over, "*");
    let mut out = vec![format!(
        "cut over {axes} ({ways} ranks) because of --zero {}: {}",
        o.zero,
        what(o.zero)
    )];
    // What `finish` is given of it, if that is cut too.
    let held = |is: fn(RoleKind) -> bool| -> usize {
        let all = why.plan.module.of_kind(FuncKind::OptimizerStep);
        let args = all.flat_map(|f| f.args.iter().map(move |a| (f, a)));
        let own = args.filter(|(f, a)| {
            let cut = f.ty(a.value).sharded().meets(over);
            cut && a.role.as_ref().is_some_and(|r| is(r.kind) && *r.name == *param)
        });
        own.map(|(f, a)| f.ty(a.value).local_bytes(mesh)).sum()
    };
    let saved = |n: usize| bytes(n * (ways - 1));
    let stored = t.local_bytes(mesh);
    let others = format!(
        "{} of its gradient and {} of optimizer state on a rank",
        saved(held(|k| k == RoleKind::Grad)),
        saved(held(|k| matches!(k, RoleKind::State(_))))
    );
    // What is gathered once per step is whole at all times: of the same type, it is what there would be without ZeRO.
    let mut args = why.plan.module.funcs.iter().flat_map(|f| f.args.iter().map(move |a| (f, a)));
    let ready = |r: &Role| r.kind == RoleKind::Unsharded && *r.name == *param;
    let copy = args.find(|(_, a)| a.role.as_ref().is_some_and(ready)).map(|(f, a)| f.ty(a.value));
    out.push(match copy.filter(|c| c.dtype == t.dtype && !c.sharded().meets(over)) {
        Some(_) => format!(
            "saves {others}; the shard of the weight that the optimizer updates takes {} beside the whole weight",
            bytes(stored)
        ),
        None => format!("saves {} of the stored weight, {others}", saved(stored)),
    });
    let all = made(why, param);
    for m in &all {
        let f = &why.func(m.func).name;
        let (says, axes) = (often(why.plan, m.func), mesh.names(m.atoms, "*"));
        out.push(match m.kind {
            "all_gather" => {
                format!("gathered over {axes} by collective:{} in @{f}, {says}", m.number)
            }
            _ => format!(
                "mirrored by collective:{}, a {} over {axes} in @{f}, {says}: of the gradient",
                m.number, m.kind
            ),
        });
    }
    if all.is_empty() {
        out.push("no rank needs more of it than its piece".into());
    }
    out
}

/// Why ZeRO leaves a parameter whole.
fn whole(why: &Why, param: &str) -> Vec<String> {
    let o = &why.s.options;
    if o.zero == 0 || why.stored(param).is_none() {
        return vec![];
    }
    vec![format!("--zero {} leaves it whole: none of its dims can be cut further", o.zero)]
}

/// What a collective is for ZeRO; nothing if ZeRO did not make it.
pub fn of_collective(why: &Why, f: &Func, n: &Node) -> Vec<String> {
    let Some(c) = n.op.collective() else { return vec![] };
    if !matches!(c.kind(), "all_gather" | "reduce_scatter") {
        return vec![];
    }
    let all = params(f, n);
    let own: Vec<&String> = all.iter().filter(|p| c.atoms().meets(cut(why, p))).collect();
    let Some(first) = own.first() else { return vec![] };
    let mut out = vec![match own.len() {
        1 => format!("ZeRO of {first}:"),
        k => format!("ZeRO of {k} parameters; of {first}:"),
    }];
    out.extend(lines(why, first).into_iter().map(|l| format!("  {l}")));
    out
}

/// What a rank sends and needs with this stage and with the others: each compiled.
pub fn stages(why: &Why) -> Vec<String> {
    let s = why.s;
    let one = |stage: u8| {
        let now = stage == s.options.zero;
        let other = Options { zero: stage, memory: None, ..s.options.clone() };
        let plan = match now {
            true => s.plan.clone(),
            false => variant(s, &other).ok()?,
        };
        let sent = |c| collectives(&plan, c).iter().map(|c| c.bytes).sum::<f64>();
        let most = plan.classes.iter().map(sent).fold(0.0, f64::max);
        let here = if now { "this plan, " } else { "" };
        Some(format!(
            "{here}--zero {stage}: a rank sends {} per step and needs {}",
            bytes(most as usize),
            bytes(plan.peak_bytes())
        ))
    };
    (0..=3).filter_map(one).collect()
}
