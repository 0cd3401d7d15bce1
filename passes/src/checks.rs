//! What the passes assume of a model, whoever wrote it.

use crate::autodiff::recompute::Recompute;
use crate::options::Options;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Port, Role, RoleKind, Value};
use shardc_ir::mesh::{Mesh, PIPELINE};
use shardc_ir::ops::Gradient;
use shardc_ir::plan::{Mode, TokenOrder};
use shardc_ir::types::{DType, Type};

/// Inputs that a step can fill.
const INPUTS: [&str; 5] = ["input_ids", "targets", "positions", "places", "run"];

/// What the passes assume of a model, whoever wrote it.
pub fn check_source(mesh: &Mesh, f: &Func, o: &Options) -> Result<()> {
    if o.microbatches() * o.microbatch_rows() != o.global_batch || o.global_batch == 0 {
        let (rows, global) = (o.microbatch_rows(), o.global_batch);
        return Err(Diag::new(
            "batch-not-divisible",
            format!("{global} sequences are no whole number of microbatches of {rows}"),
        )
        .rule("global_batch % (dp * microbatch) == 0")
        .help(format!(
            "use --global-batch {}",
            global.div_ceil(rows.max(1)).max(1) * rows.max(1)
        )));
    }
    if let TokenOrder::Zigzag { ranks } = o.tokens()
        && !o.tokens().fits(o.seq)
    {
        let what =
            format!("{} tokens are no 2 equal chunks for each of {ranks} ranks of cp", o.seq);
        let below = o.seq / (2 * ranks) * 2 * ranks;
        return Err(Diag::new("sequence-not-divisible", what)
            .rule("seq % (2 * cp) == 0 with --cp-split zigzag")
            .help(format!("use --seq {}, or --cp-split contiguous", below + 2 * ranks)));
    }
    let pipeline = mesh.axis(PIPELINE).unwrap_or_default();
    let asked =
        f.annotations.iter().flat_map(|(v, a)| a.dims.iter().map(move |d| (v, d.atoms.set())));
    let typed = (0..f.values.len()).map(|v| Value(v as u32));
    let typed = typed.map(|v| (v, f.ty(v).marked()));
    if let Some((v, _)) = asked.map(|(v, s)| (*v, s)).chain(typed).find(|x| x.1.meets(pipeline)) {
        return Err(Diag::new("pipeline-axis", format!("{} is split over {PIPELINE}", f.name(v)))
            .at(format!("@{}", f.name))
            .rule(format!("{PIPELINE} splits the model into stages, and no tensor"))
            .help(format!("take {PIPELINE} out of its type, or split it over 1 other axis")));
    }
    if o.recompute == Recompute::Fit {
        return Err(Diag::new("flag", "what `fit` stands for is not chosen yet")
            .at("--recompute fit")
            .help("use --recompute sqrt, or another that is said"));
    }
    check_arguments(f, o)?;
    check_results(f)?;
    if o.mode == Mode::Infer {
        return Ok(());
    }
    let sums: Vec<_> = f.results.iter().filter(|r| r.is(RoleKind::Sum, "loss")).collect();
    let scalar = sums.len() == 1 && *f.ty(sums[0].value) == Type::f32(&[]);
    // The loss is a mean over targets: those of an argument that nothing reads are not known.
    let read = |a: &Port| f.nodes.iter().any(|n| n.ins.contains(&a.value));
    let targets = |a: &Port| a.is(RoleKind::Input, "targets") && read(a);
    if scalar && f.args.iter().any(targets) {
        return Ok(());
    }
    Err(Diag::new("no-loss", format!("@{} has no loss to train", f.name))
        .rule("one result f32[] `sum \"loss\"` and one argument `input \"targets\"` that is used")
        .help("add them, or compile with --mode infer"))
}

/// What a model is given: parameters, and inputs of the sizes that options give.
fn check_arguments(f: &Func, o: &Options) -> Result<()> {
    let bad = |what: String, rule: &str, help: String| {
        Err(Diag::new("source", what).at(format!("@{}", f.name)).rule(rule).help(help))
    };
    let mut seen = std::collections::BTreeSet::new();
    for a in &f.args {
        let (name, ty) = (f.name(a.value), f.ty(a.value));
        let sizes = ty.sizes();
        let Some(role) = &a.role else {
            return bad(
                format!("{name} has no role"),
                "an argument is a parameter or an input",
                "write param \"NAME\" or input \"input_ids\" after its type".into(),
            );
        };
        if !seen.insert(role) {
            return bad(
                format!("two arguments are {role}"),
                "roles are unique",
                "give each its own name".into(),
            );
        }
        if role.kind == RoleKind::Input && !INPUTS.contains(&&*role.name) {
            return bad(
                format!("input \"{}\" is not known", role.name),
                "inputs are input_ids, targets, positions, places and run",
                format!("make {name} a param, or name it after one of them"),
            );
        }
        let batch = [o.microbatch_rows(), o.seq];
        let fits = match (role.kind, &*role.name) {
            (RoleKind::Param, _) => matches!(ty.dtype, DType::F32 | DType::BF16),
            (RoleKind::Input, "input_ids" | "targets" | "places") => {
                ty.dtype == DType::I32 && sizes[..] == batch
            }
            (RoleKind::Input, "run") => ty.dtype == DType::I32 && sizes[..] == [3],
            (RoleKind::Input, "positions") => ty.dtype == DType::I32 && sizes[..] == [o.seq],
            _ => false,
        };
        if !fits {
            let rule = "param: f32 or bf16; input_ids, targets, places: i32[microbatch * dp, seq]; \
                 positions: i32[seq]; run: i32[3]";
            let sizes = sizes.to_vec();
            return bad(
                format!("{role} is {} {sizes:?}", ty.dtype.name()),
                rule,
                format!(
                    "write i32[{},{}] in the text, or give --microbatch and --seq as there",
                    batch[0], batch[1]
                ),
            );
        }
    }
    Ok(())
}

/// Checks that every op on the way from what is trained (`on`, by value) to a loss has a gradient.
///
/// # Errors
/// `source` for an op that stands only in programs that are differentiated already.
pub fn differentiable(f: &Func, on: &[bool]) -> Result<()> {
    let mut reaches = vec![false; f.values.len()];
    for r in f.results.iter().filter(|r| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Sum)) {
        reaches[r.value.0 as usize] = true;
    }
    for n in f.nodes.iter().rev().filter(|n| n.op.facts().gradient != Gradient::Stops) {
        let float_there = |o: &Value| reaches[o.0 as usize] && f.ty(*o).dtype.is_float();
        if !n.outs.iter().any(float_there) {
            continue;
        }
        n.ins.iter().for_each(|v| reaches[v.0 as usize] = true);
        let float = |v: &&Value| on[v.0 as usize] && f.ty(**v).dtype.is_float();
        if let (Gradient::Unasked, Some(v)) = (n.op.facts().gradient, n.ins.iter().find(float)) {
            let (op, name) = (n.op.mnemonic(), f.name(*v));
            let scope = &f.scope_info(n.scope).path;
            let place = if scope.is_empty() { String::new() } else { format!(", {scope}") };
            return Err(Diag::new("source", format!("`{op}` of {name} has no gradient"))
                .at(format!("@{}{place}", f.name))
                .rule("what stands between a trained parameter and a loss has a gradient")
                .help("write it of other ops, or put a stop_gradient before it"));
        }
    }
    Ok(())
}

/// What a model shows and sums up: of roles that one has, and scalars where they are losses.
fn check_results(f: &Func) -> Result<()> {
    let bad = |what: String, rule: &str, help: String| {
        Err(Diag::new("source", what).at(format!("@{}", f.name)).rule(rule).help(help))
    };
    for r in &f.results {
        let (name, ty) = (f.name(r.value), f.ty(r.value));
        let Some(role) = &r.role else { continue };
        match role.kind {
            RoleKind::Output => {}
            // What is missing of a loss is said below.
            RoleKind::Sum if *ty == Type::f32(&[]) || &*role.name == "loss" => {}
            RoleKind::Sum => {
                return bad(
                    format!("{role} is {} {:?}", ty.dtype.name(), ty.sizes().to_vec()),
                    "a sum is a loss: f32[]",
                    format!("reduce {name} to f32[] with reduce_sum, or make it an output"),
                );
            }
            RoleKind::Load => {
                let of = f.args.iter().find(|a| a.is(RoleKind::Param, &role.name));
                let like = |v: Value| f.ty(v).sizes() == ty.sizes() && ty.rank() == 1;
                if of.is_none_or(|a| !like(a.value)) || ty.dtype != DType::F32 {
                    return bad(
                        format!("{role} is {} {:?}", ty.dtype.name(), ty.sizes().to_vec()),
                        "a load is f32[experts], as the parameter that it is named after",
                        "name it after the bias by which the router chooses 1 of its experts"
                            .into(),
                    );
                }
            }
            _ours => {
                return bad(
                    format!("{name} is {role}"),
                    "a model's results are sum, load and output",
                    format!("make it output \"{name}\", for example"),
                );
            }
        }
    }
    for (i, r) in f.results.iter().enumerate() {
        let is_sum = |r: &Port| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Sum);
        let same = |p: &&Port| is_sum(r) && is_sum(p) && p.value == r.value;
        if let Some(first) = f.results[..i].iter().find(same) {
            let [a, b] = [first, r].map(|p| p.role.clone().expect("a sum"));
            return bad(
                format!("{} is {a} and {b}", f.name(r.value)),
                "a sum is a value of its own",
                "leave one out, or scale the loss by 2".into(),
            );
        }
    }
    Ok(())
}

/// Without training nothing is computed but what is shown; labels that only losses read are not read
/// either.
///
/// # Errors
/// `source` if nothing is shown.
pub fn only_outputs(f: &mut Func) -> Result<()> {
    f.results.retain(|r| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Output));
    if f.results.is_empty() {
        return Err(Diag::new("source", "the model has no output")
            .at(format!("@{}", f.name))
            .rule("--mode infer computes what the model outputs")
            .help("let it return a value as output \"logits\", for example"));
    }
    f.drop_dead();
    let read = |v: Value| {
        f.nodes.iter().any(|n| n.ins.contains(&v)) || f.results.iter().any(|r| r.value == v)
    };
    let stays: Vec<bool> =
        f.args.iter().map(|a| !a.is(RoleKind::Input, "targets") || read(a.value)).collect();
    let mut stays = stays.into_iter();
    f.args.retain(|_| stays.next().expect("one per argument"));
    Ok(())
}

/// Something must be trained: a parameter that has a part in the loss, and is not frozen.
pub fn trains(f: &Func, o: &Options) -> Result<()> {
    let roles = || f.results.iter().filter_map(|r| r.role.as_ref());
    if !roles().any(|r| r.kind == RoleKind::Grad) {
        let d = Diag::new("no-loss", "no parameter that is trained has a part in the loss")
            .rule("a step changes parameters by the gradient of the loss");
        return Err(match o.freeze.is_empty() {
            true => d.help("let the loss depend on a parameter, or compile with --mode infer"),
            false => d
                .at(format!("--freeze '{}'", o.freeze.join("' '")))
                .help("freeze fewer, or compile with --mode infer"),
        });
    }
    let is_load = |r: &&Role| r.kind == RoleKind::Load;
    match roles().filter(is_load).find(|l| roles().any(|g| g.is(RoleKind::Grad, &l.name))) {
        None => Ok(()),
        Some(l) => Err(Diag::new("source", format!("{l}: the parameter has a gradient too"))
            .rule("a parameter that a router's load corrects only chooses: no loss depends on it")
            .help(format!("make it a sum of its own, or freeze it with --freeze '{}'", l.name))),
    }
}
