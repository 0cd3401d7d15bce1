//! What a plan is warned of: axes, flags and pieces that do nothing for it.

use crate::autodiff::named::NamedNodes;
use crate::autodiff::recompute::Recompute;
use crate::options::{CpMode, Options, TpMode, TpSteps};
use crate::shard::grid::Grid;
use crate::zero::{Accumulate, zero_axes};
use shardc_ir::axes::ROLES;
use shardc_ir::diag::Diag;
use shardc_ir::func::{Func, FuncKind, Module, ParamLayout};
use shardc_ir::mesh::{AtomSet, Mesh, PIPELINE};
use shardc_ir::names::nearest;
use shardc_ir::types::Type;
use shardc_ir::weights::Weight;

/// All warnings of a plan: `sharded` is the model with its types after propagation.
pub fn warnings(
    m: &Module,
    sharded: &Func,
    params: &[ParamLayout],
    weights: &[Weight],
    o: &Options,
) -> Vec<Diag> {
    let mut all = padding(&m.mesh, sharded, weights);
    all.extend(match o.auto {
        false => idle_axes(&m.mesh, sharded.values.iter().map(|v| &v.ty), false),
        true => {
            let made = m.funcs.iter().flat_map(|f| f.nodes.iter().map(move |n| (f, n)));
            idle_axes(&m.mesh, made.flat_map(|(f, n)| n.outs.iter().map(|&o| f.ty(o))), true)
        }
    });
    all.extend(no_effect(&m.mesh, params, o));
    all.extend(named_ops(m, o));
    all
}

/// A warning for each axis that splits nothing: its ranks all do the same work.
fn idle_axes<'a>(mesh: &Mesh, types: impl Iterator<Item = &'a Type>, auto: bool) -> Vec<Diag> {
    let used = types.fold(AtomSet::EMPTY, |s, t| s.union(t.sharded()));
    let split = mesh.axes.iter().filter(|a| a.name != PIPELINE);
    let idle = split.filter(|a| mesh.axis(&a.name).is_none_or(|s| !s.meets(used)));
    let warn = |a: &shardc_ir::mesh::Axis| {
        Diag::new(
            "idle-axis",
            format!("axis {} splits nothing: {} ranks do the same work", a.name, a.size),
        )
        .help(match auto {
            true => "no split is cheaper than that: use fewer ranks, or other --hardware".into(),
            false => match meant(&a.name, a.size) {
                Some(own) => format!("did you mean --mesh {own}? An axis of another name splits what --shard 'GLOB={},…' says", a.name),
                None => format!("split something with --shard 'GLOB={},…', or use dp={}", a.name, a.size),
            },
        })
    };
    idle.map(warn).collect()
}

/// What is written as axes are, and what other programs call it.
const SHORT: [(&str, &[&str]); 3] = [("dp", &["ddp", "data"]), ("ep", &["expert"]), ("etp", &[])];

/// What somebody means by an axis that nothing here is called: one of another program, or one misspelt.
pub fn meant(axis: &str, size: usize) -> Option<String> {
    let all = || ROLES.iter().map(|r| (r.name, r.elsewhere)).chain(SHORT);
    let elsewhere = all().find(|(_, others)| others.contains(&axis)).map(|x| x.0);
    let lower = axis.to_lowercase();
    let same = all().map(|x| x.0).find(|k| *k == lower);
    // Of two letters, anything would be near.
    let near = || nearest(axis, all().map(|x| x.0), 1).first().copied().filter(|n| n.len() > 3);
    let own = elsewhere.or(same).or_else(near).filter(|own| *own != axis)?;
    let zero = if axis == "fsdp" { " --zero 3" } else { "" };
    Some(format!("{own}={size}{zero}"))
}

/// A warning for each option that changes nothing here, and for what ZeRO leaves whole.
fn no_effect(mesh: &Mesh, params: &[ParamLayout], o: &Options) -> Vec<Diag> {
    let mut out = vec![];
    let mut warn = |what: String, help: String| {
        out.push(Diag::new("no-effect", what).help(help));
    };
    let shard = zero_axes(mesh);
    if o.zero > 0 && shard.is_empty() {
        let help = "name the axis: --mesh dp_shard=2, or dp=2 with --zero".into();
        warn(format!("--zero {} splits nothing: the mesh has no dp_shard or cp", o.zero), help);
    }
    if o.cp_mode != CpMode::AllGather && mesh.axis("cp").is_none() {
        warn("--cp-mode has no effect: the mesh has no cp".into(), "add cp=2 to --mesh".into());
    }
    if o.cp_split.is_some() && mesh.axis("cp").is_none() {
        warn("--cp-split has no effect: the mesh has no cp".into(), "add cp=2 to --mesh".into());
    }
    let grid = Grid::of(mesh, o.tp_mode).unwrap_or_default();
    if o.tp_mode != TpMode::OneD && !grid.cuts_stream() {
        let what = format!("--tp-mode {} has no effect: the mesh has no tp", o.tp_mode);
        warn(what, "add tp=4 to --mesh".into());
    }
    if o.tp_steps == TpSteps::Summa
        && !matches!(o.tp_mode, TpMode::TwoD | TpMode::TwoAndHalfD { .. })
    {
        let what = format!("--tp-steps summa changes nothing with --tp-mode {}", o.tp_mode);
        warn(what, "use --tp-mode 2d or 2.5d, or leave it out".into());
    }
    let whole: Vec<&ParamLayout> =
        params.iter().filter(|p| !grid.stored.within(p.stored.sharded())).collect();
    if let Some(p) = whole.first() {
        let bytes: usize = whole.iter().map(|p| p.stored.local_bytes(mesh)).sum();
        let what = format!(
            "{} parameters of {bytes} B on a rank are not split over all of {}, {} first",
            whole.len(),
            mesh.names(grid.stored, "*"),
            p.param.name
        );
        warn(what, "use a tp that divides one of their dims".into());
    }
    let kept = o.zero_accumulate;
    let none = Options { zero_accumulate: Accumulate::None, ..o.clone() };
    if kept != Accumulate::None && o.zero() == none.zero() {
        let (what, help) = match o.zero {
            0 | 1 => ("without --zero 2 or 3: each gathers and reduces once per step", "--zero 3"),
            _ if o.microbatches() == 1 && kept.gradients() => {
                ("with one microbatch", "a smaller --microbatch")
            }
            _ => ("with --zero 2, which gathers once per step", "--zero-accumulate gradients"),
        };
        let what = format!("--zero-accumulate {} changes nothing {what}", kept.name());
        warn(what, format!("use {help}, or leave it out"));
    }
    if !o.reshard_after_forward && (o.zero < 3 || kept.weights()) && !grid.cuts_stream() {
        let (what, help) = match o.zero {
            0..3 => ("without --zero 3", "use --zero 3, or leave it out"),
            _ => ("where --zero-accumulate keeps weights", "leave it out"),
        };
        warn(format!("--reshard-after-forward no changes nothing {what}"), help.into());
    }
    if o.zero > 0 && !shard.is_empty() {
        let whole: Vec<&ParamLayout> =
            params.iter().filter(|p| !shard.within(p.stored.sharded())).collect();
        let bytes: usize = whole.iter().map(|p| p.stored.local_bytes(mesh)).sum();
        if let Some(p) = whole.first() {
            let (axes, n) = (mesh.names(shard, "*"), mesh.ways(shard));
            let what = format!(
                "{} parameters of {bytes} B on a rank are not split over {axes}, {n} ways, {} first",
                whole.len(),
                p.param.name
            );
            // Of the piece of a dim that a rank has.
            let splits = |d: usize| {
                p.stored.dims[d].size.is_multiple_of(n * p.stored.pieces(mesh, d).max(1))
            };
            let divides = (0..p.stored.rank()).any(splits);
            warn(
                what,
                match divides {
                    true => "leave it: ranks of another axis use pieces of what each of them holds"
                        .into(),
                    false => format!("use a size of {axes} that divides one of their dims"),
                },
            );
        }
        for p in params {
            let cut = (0..p.stored.rank()).find(|&d| p.stored.dims[d].atoms.set().meets(shard));
            let Some(d) = cut else { continue };
            let (n, all) = (p.stored.dims[d].size, p.stored.pieces(mesh, d));
            let stored = n.div_ceil(all) * all;
            if (stored - n) * 8 > n {
                let what = format!(
                    "dim {d} of `{}` is {n}, in {all} pieces: {} of {stored} stored are padding",
                    p.param.name,
                    stored - n
                );
                warn(what, format!("use a size of {} that divides it", mesh.names(shard, "*")));
            }
        }
    }
    out
}

/// A warning for each op that `--recompute` names and no layer has.
fn named_ops(m: &Module, o: &Options) -> Vec<Diag> {
    let Recompute::Ops(names) = &o.recompute else { return vec![] };
    let all: Vec<NamedNodes> =
        m.of_kind(FuncKind::Forward).map(|f| NamedNodes::of(f, f.nodes.len())).collect();
    let cuts = |name: &str| ["selective", "elementwise"].contains(&name);
    let missing = names.iter().filter(|n| !cuts(n) && all.iter().all(|f| !f.any(n)));
    let warn = |name: &String| {
        let what = format!("--recompute ops:{name} has no effect: no layer has such an op");
        Diag::new("no-effect", what).help(format!("leave {name} out"))
    };
    missing.map(warn).collect()
}

/// A warning for each parameter of which more than 1/8 of the stored elements is padding.
fn padding(mesh: &Mesh, f: &Func, weights: &[Weight]) -> Vec<Diag> {
    let mut out = vec![];
    for (a, w) in f.args.iter().zip(weights) {
        let t = f.ty(a.value);
        for (d, dim) in t.dims.iter().enumerate() {
            let (n, k) = (dim.size, t.pieces(mesh, d));
            let waste = n.div_ceil(k) * k - n;
            if waste * 8 > n {
                let bytes = t.elements() / n * waste * t.dtype.bytes();
                out.push(Diag::new("padding", format!("dim {d} of `{}` is {n}, in {k} pieces: {waste} of {} stored are padding", w.param, n + waste))
                    .why(format!("{bytes} B over all ranks hold nothing"))
                    .help(format!("split it {} ways, or keep it whole with --shard '{}=-…'", (1..=k).rev().find(|x| n % x == 0).unwrap_or(1), w.param)));
            }
        }
    }
    out
}
