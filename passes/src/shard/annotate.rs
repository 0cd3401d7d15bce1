//! Writes down who wants which sharding: the mesh, the family's recipe for tensor parallelism, the
//! batch over the data-parallel axes, the residual stream over tp (`--sp`), and `--shard`.
//!
//! Before:  `func @model(%q_proj: f32[64,64], %input_ids: i32[8,16])`, no mesh
//! After:   the same with annotations `64@tp`, `8@dp_replicate`, and a mesh cut where heads need it
//! Assumes: phase Source.  Leaves: phase Source with annotations.

use super::auto::MOST_EXACT;
use super::grid::{self, Grid, Side};
use super::{SEQUENCE, asked, experts};
use crate::autodiff::recompute::Recompute;
use crate::lora;
use crate::options::{CpMode, Options, ShardRule, TpMode};
use shardc_ir::attr::read_atoms;
use shardc_ir::axes::AxisRole;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{AnnotatedDim, Annotation, Fill, Func, Node, Port, RoleKind, Uses, Value};
use shardc_ir::mesh::{Atom, AtomSet, Mesh, PIPELINE};
use shardc_ir::ops::{Kind, Op};
use shardc_ir::plan::Mode;
use shardc_ir::rule::Letter;
use shardc_ir::types::AtomList;
use shardc_ir::weights::Weight;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Makes the mesh and annotates the function; `sequence` lists residual values and their seq dim.
/// What is annotated already, over the mesh `own`, stays as it is, but for what `--shard` names.
///
/// # Errors
/// `mesh`, `sub-axis`, `shard`, `unknown-tensor`, and `not-marked` if an option is about what no
/// value of the model is marked as.
pub fn annotate(
    own: &Mesh,
    f: &mut Func,
    weights: &[Weight],
    sequence: &[(Value, usize)],
    o: &Options,
) -> Result<Mesh> {
    let axes: Vec<(&str, usize)> = o.mesh.iter().map(|(n, s)| (n.as_str(), *s)).collect();
    let mut mesh = Mesh::new(&axes)?;
    cut_as(&mut mesh, own)?;
    asked::cut_sub_axes(&mut mesh, &o.shard)?;
    marked(f, weights, sequence, o)?;
    if o.auto {
        return left_to_price(mesh, own, f, o);
    }
    let has_experts = has(f, Kind::Copies);
    let folded = if has_experts { experts::fold(o)? } else { vec![] };
    experts::cut(&mut mesh, &folded)?;
    // Per parameter, the dim that tensor parallelism splits and how many ways it may.
    let by_name: BTreeMap<&str, &Weight> = weights.iter().map(|w| (&*w.param, w)).collect();
    let uses = f.uses();
    // On a grid words name the dim that is split, and the mode says how.
    let on_grid = |r: &&ShardRule| o.tp_mode != TpMode::OneD && asked::word(r).is_some();
    let words: Vec<ShardRule> = o.shard.iter().filter(on_grid).cloned().collect();
    let words = asked::recipes(f, weights, &words)?;
    let recipe = |a: &Port| {
        let role = a.role.as_ref().filter(|r| r.kind == RoleKind::Param)?;
        let own = by_name.get(&*role.name).filter(|w| w.experts.is_none())?.tp_dim;
        let dim = words.get(&a.value).copied().unwrap_or(own)?;
        Some((dim, split_limit(f, &uses, a.value, dim)))
    };
    let recipes: Vec<Option<(usize, Option<usize>)>> = f.args.iter().map(recipe).collect();
    grid::cut(&mut mesh, o.tp_mode, recipes.iter().flatten().filter_map(|r| r.1))?;
    if o.cp_mode == CpMode::Ulysses {
        cut_for_heads(&mut mesh, f, o)?;
    }
    let grid = Grid::of(&mesh, o.tp_mode)?;
    let batch = batch_axes(&mesh);
    // Tokens are cut along the sequence too; positions and segments stay whole, a rank slices what it needs.
    let cp = mesh.axis("cp").unwrap_or_default();
    let mut new: Vec<(Value, Annotation)> = Vec::new();
    // An activation [rows, tokens, …, last], or [rows, last], on a side of a block.
    let laid = |v: Value, rows: &[Atom], last: AtomList| {
        let rank = f.ty(v).rank();
        let dim = |d: usize| match d {
            0 => AtomList::collect(batch.iter().chain(rows.iter().copied())).unwrap_or_default(),
            d if d + 1 == rank => last,
            1 => AtomList::collect(cp.iter()).unwrap_or_default(),
            _ => AtomList::EMPTY,
        };
        let dims = (0..rank).map(|d| AnnotatedDim { atoms: dim(d), open: false }).collect();
        (v, Annotation { dims, priority: 0 })
    };
    for (a, recipe) in f.args.iter().zip(&recipes) {
        let rank = f.ty(a.value).rank();
        let (Some(role), true) = (&a.role, rank > 0) else { continue };
        // What has no recipe is cut as what it is used with, where the residual stream is cut.
        let open = role.kind == RoleKind::Param && recipe.is_none() && grid.cuts_stream();
        let mut dims = vec![AnnotatedDim { atoms: AtomList::EMPTY, open }; rank];
        match role.kind {
            RoleKind::Param => {
                if let &Some(recipe) = recipe {
                    let (cut, made) = weight(&mesh, f, &uses, a.value, recipe, &grid);
                    dims.iter_mut().zip(cut).for_each(|(d, atoms)| d.atoms = atoms);
                    if let (true, Some((v, side, last))) = (grid.cuts_stream(), made) {
                        new.push(laid(v, &side.rows, last));
                    }
                }
            }
            RoleKind::Input(own) if own.batch => {
                dims[0].atoms = AtomList::collect(batch.iter()).unwrap_or_default();
                if let Some(d) = own.tokens().filter(|_| own.fill != Fill::Segments) {
                    dims[d].atoms = AtomList::collect(cp.iter()).unwrap_or_default();
                }
            }
            _ => {}
        }
        new.push((a.value, Annotation { dims: dims.into(), priority: 0 }));
    }
    if grid.cuts_stream() {
        let columns = AtomList::collect(grid.stream.columns.iter()).unwrap_or_default();
        new.extend(sequence.iter().map(|x| laid(x.0, &grid.stream.rows, columns)));
    } else if o.sp || has_experts {
        new.extend(streams(&mesh, f, sequence, o.sp, has_experts));
    }
    if o.sp {
        let of = lora::tokens(f, &by_name, |v| behind(f, &uses, v));
        for (values, split) in [(of.all, false), (of.own, true)] {
            let marked: Vec<(Value, usize)> = values.into_iter().map(|v| (v, 1)).collect();
            new.extend(streams(&mesh, f, &marked, split, false));
        }
    }
    experts::annotate(&mesh, f, &by_name, &folded, &mut new);
    if !cp.is_empty() {
        keys_and_values(f, cp, &mut new);
        if o.cp_mode == CpMode::Ulysses {
            heads(f, grid.inner.columns, cp, &mut new);
        }
    }
    rename_atoms(f, own, &mesh)?;
    let new: BTreeMap<Value, Annotation> = new.into_iter().collect();
    for (v, a) in new {
        f.annotations.entry(v).or_insert(a);
    }
    let others = o.shard.iter().filter(|r| !on_grid(r));
    others.into_iter().try_for_each(|r| asked::apply(&mesh, f, weights, r, o))?;
    asked::check_inputs(&mesh, f, batch, o)?;
    Ok(mesh)
}

/// The axes whose ranks have rows of their own.
fn batch_axes(mesh: &Mesh) -> AtomSet {
    mesh.axes_that(AxisRole::of_rows)
}

/// Most axes, and parts of them, over which layouts are chosen by price.
pub const MOST_PRICED: usize = 6;

/// The axes, and parts of them, over which layouts are chosen by price.
fn priced(mesh: &Mesh) -> AtomSet {
    mesh.all().minus(mesh.axis(PIPELINE).unwrap_or_default())
}

/// Cuts axes where a part of one splits what all of it does not split evenly: `tp=4` in the middle for six heads.
/// Of parts that are no pieces of each other the largest is taken, and what is exact over the axes stays exact: one axis
/// is cut once, two are not. What counts are the factors of reshapes and the dims of parameters.
fn cut_for_factors(mesh: &mut Mesh, f: &Func) {
    let reshapes = f.nodes.iter().filter(|n| matches!(n.op, Op::Reshape(_)));
    let factors = reshapes.flat_map(|n| n.op.def().sizes()).map(|x| x.1);
    let of_param = |a: &&Port| a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param);
    let params = f.args.iter().filter(of_param);
    let sizes: BTreeSet<usize> =
        factors.chain(params.flat_map(|a| f.ty(a.value).sizes())).collect();
    let most = if priced(mesh).len() <= MOST_EXACT { MOST_EXACT } else { MOST_PRICED };
    let axes: Vec<usize> =
        (0..mesh.axes.len()).filter(|&i| mesh.axes[i].name != PIPELINE).collect();
    for i in axes {
        let ranks = mesh.axes[i].size;
        let parts = sizes.iter().map(|&n| largest_common(n, ranks));
        let parts: BTreeSet<usize> = parts.filter(|g| (2..ranks).contains(g)).collect();
        for &part in parts.iter().rev() {
            let mut cut = mesh.clone();
            if cut.cut(i, part).is_ok() && priced(&cut).len() <= most {
                *mesh = cut;
            }
        }
    }
}

/// Annotates what is not left to prices: which rows of the batch are whose.
fn left_to_price(mut mesh: Mesh, own: &Mesh, f: &mut Func, o: &Options) -> Result<Mesh> {
    let priced = priced(&mesh);
    if priced.len() > MOST_PRICED {
        return Err(Diag::new("mesh", format!("--shard auto over {}", mesh.names(priced, ", ")))
            .rule(format!("--shard auto chooses over at most {MOST_PRICED} axes beside pp"))
            .help("give fewer, larger axes: tp=4 in place of cp=2,tp=2"));
    }
    cut_for_factors(&mut mesh, f);
    let batch = batch_axes(&mesh);
    rename_atoms(f, own, &mesh)?;
    for a in &f.args {
        let rank = f.ty(a.value).rank();
        if a.input().is_some_and(|i| i.batch) {
            let mut dims = vec![AnnotatedDim { atoms: AtomList::EMPTY, open: false }; rank];
            dims[0].atoms = AtomList::collect(batch.iter()).unwrap_or_default();
            let new = Annotation { dims: dims.into(), priority: 0 };
            f.annotations.entry(a.value).or_insert(new);
        }
    }
    asked::check_inputs(&mesh, f, batch, o)?;
    Ok(mesh)
}

/// How the residual stream is cut along tokens: over cp, and with `sp` over tp. Experts may split it
/// further than that.
fn streams(
    mesh: &Mesh,
    f: &Func,
    sequence: &[(Value, usize)],
    sp: bool,
    has_experts: bool,
) -> Vec<(Value, Annotation)> {
    let [cp, tp] = ["cp", "tp"].map(|a| mesh.axis(a).unwrap_or_default());
    if tp.is_empty() && !has_experts {
        return vec![];
    }
    let over = if sp { tp } else { AtomSet::EMPTY };
    let tokens = AtomList::collect(cp.iter().chain(over.iter())).unwrap_or_default();
    let one = |&(v, dim): &(Value, usize)| {
        let of = |d| AnnotatedDim {
            atoms: if d == dim { tokens } else { AtomList::EMPTY },
            open: d < dim,
        };
        let dims = (0..f.ty(v).rank()).map(of).collect();
        (v, Annotation { dims, priority: SEQUENCE })
    };
    sequence.iter().map(one).collect()
}

/// Cuts the axes of a mesh where those of another with the same axes are cut.
fn cut_as(mesh: &mut Mesh, own: &Mesh) -> Result<()> {
    for a in &own.atoms {
        let name = &own.axes[a.axis as usize].name;
        if let Some(axis) = mesh.axes.iter().position(|x| x.name == *name) {
            mesh.cut(axis, a.pre)?;
        }
    }
    Ok(())
}

/// Annotations over one mesh as such over another, whose axes are cut as far and perhaps further.
fn rename_atoms(f: &mut Func, own: &Mesh, mesh: &Mesh) -> Result<()> {
    let dims = f.annotations.values_mut().flat_map(|a| a.dims.iter_mut());
    for d in dims.filter(|d| !d.atoms.is_empty()) {
        let mut text = String::new();
        own.write_atoms(d.atoms.iter(), "*", &mut text);
        d.atoms = read_atoms(&text, mesh).map_err(|e| {
            Diag::new("mesh", e).help("give the mesh that the annotations of the text are over")
        })?;
    }
    Ok(())
}

/// Options that are about what a model marks are refused where it marks nothing so: they would
/// change nothing, and a text marks little.
fn marked(f: &Func, weights: &[Weight], sequence: &[(Value, usize)], o: &Options) -> Result<()> {
    let refuse = |flag: String, what: &str, help: &str| {
        Err(Diag::new("not-marked", format!("{flag}: the model marks no {what}"))
            .at(flag)
            .rule("an option that says how something is cut needs something to cut")
            .help(help))
    };
    if o.sp && sequence.is_empty() {
        let help = "leave it out, and split values of the residual stream with \
                    --shard 'SCOPE=?,tp,?'";
        return refuse("--sp".into(), "residual stream", help);
    }
    let words = o.shard.iter().any(|r| asked::word(r).is_some());
    if o.tp_mode != TpMode::OneD && !words && weights.iter().all(|w| w.tp_dim.is_none()) {
        let help = "say which: --shard 'SCOPE=colwise' for what a product makes, --shard 'SCOPE=rowwise' \
                    for what it sums over";
        return refuse(format!("--tp-mode {}", o.tp_mode), "dims that tp splits", help);
    }
    if (o.ep > 1 || o.etp.is_some_and(|n| n > 1)) && !has(f, Kind::Copies) {
        let (ep, etp) = (o.ep, o.etp());
        return Err(Diag::new(
            "no-experts",
            format!("the model has no experts for ep={ep}, etp={etp}"),
        )
        .at("--mesh")
        .rule("ep == 1 and no etp without experts")
        .help("use ep=1, with the ranks in dp"));
    }
    let layered = |n: &Node| f.scope_info(n.scope).layer.is_some();
    let of_all = matches!(o.recompute, Recompute::None | Recompute::Elementwise);
    let recomputes = !of_all && o.mode == Mode::Train;
    if recomputes && !f.nodes.iter().any(layered) {
        let help = "leave it out, or write a scope with a number before the lines of every layer: \
                    `layers.0:`, `layers.1:`";
        return refuse(format!("--recompute {}", o.recompute), "layers", help);
    }
    Ok(())
}

fn has(f: &Func, kind: Kind) -> bool {
    f.nodes.iter().any(|n| n.op.facts().kind == kind)
}

/// Keys and values are made of a rank's own tokens; attention, which needs them all, gathers them
/// (Llama 3: all-gather context parallelism).
fn keys_and_values(f: &Func, cp: AtomSet, new: &mut Vec<(Value, Annotation)>) {
    for n in &f.nodes {
        if n.op.facts().kind != Kind::Attention {
            continue;
        }
        for &v in &n.ins[1..3] {
            let atoms = |d| if d == 1 { cp } else { AtomSet::EMPTY };
            let dim = |d| AnnotatedDim {
                atoms: AtomList::collect(atoms(d).iter()).unwrap_or_default(),
                open: d != 1,
            };
            let dims = (0..f.ty(v).rank()).map(dim).collect();
            new.push((v, Annotation { dims, priority: 0 }));
        }
    }
}

/// Cuts `cp` where the key-value heads of attention end: they are split over its major part, and the
/// query heads of each of them over the minor part, whose ranks need the same keys and values.
fn cut_for_heads(mesh: &mut Mesh, f: &Func, o: &Options) -> Result<()> {
    let Some(axis) = mesh.axes.iter().position(|a| a.name == "cp") else { return Ok(()) };
    let cp = mesh.axes[axis].size;
    let columns = mesh.ways(Grid::of(mesh, o.tp_mode)?.inner.columns);
    for n in f.nodes.iter().filter(|n| n.op.facts().kind == Kind::Attention) {
        let heads = f.ty(n.ins[1]).dims[2].size;
        // What tensor parallelism leaves of them.
        let left = heads / largest_common(heads, columns);
        mesh.cut(axis, largest_common(left, cp))?;
    }
    Ok(())
}

/// The greatest common divisor.
fn largest_common(a: usize, b: usize) -> usize {
    if b == 0 { a } else { largest_common(b, a % b) }
}

/// Attention runs with its heads split over `tp` and `cp` and sees all tokens; what follows has the
/// rank's own tokens again. The changes of layout are all_to_alls.
fn heads(f: &Func, tp: AtomSet, cp: AtomSet, new: &mut Vec<(Value, Annotation)>) {
    let list = |s: AtomSet| AtomList::collect(s.iter()).unwrap_or_default();
    let both = AtomList::collect(tp.iter().chain(cp.iter())).unwrap_or_default();
    let annotation = |v: Value, asked: &dyn Fn(usize) -> Option<AtomList>| {
        let dim =
            |d| AnnotatedDim { atoms: asked(d).unwrap_or_default(), open: asked(d).is_none() };
        (v, Annotation { dims: (0..f.ty(v).rank()).map(dim).collect(), priority: 0 })
    };
    for n in f.nodes.iter().filter(|n| n.op.facts().kind == Kind::Attention) {
        for &out in &n.outs {
            new.push(annotation(out, &|d| match d {
                1 => Some(AtomList::EMPTY),
                2 => Some(both),
                _ => None,
            }));
        }
        for user in f.nodes.iter().filter(|u| u.ins.contains(&n.outs[0])) {
            let tokens = |d| (d == 1).then(|| list(cp));
            new.extend(user.outs.iter().map(|&v| annotation(v, &tokens)));
        }
    }
}

/// What a product makes of a weight: the value, on which side of a block, and what cuts its last dim.
type MadeOfWeight<'a> = Option<(Value, &'a Side, AtomList)>;

/// How a weight with a recipe is cut where it is used, per dim, and what is made of it. The dim of the
/// recipe is split among columns in a first product and in its bias, among what is summed in a second.
fn weight<'a>(
    mesh: &Mesh,
    f: &Func,
    uses: &Uses,
    v: Value,
    (dim, limit): (usize, Option<usize>),
    grid: &'a Grid,
) -> (Vec<AtomList>, MadeOfWeight<'a>) {
    let list = |s: AtomSet| AtomList::collect(s.iter()).unwrap_or_default();
    let rank = f.ty(v).rank();
    let v = behind(f, uses, v);
    let used = uses.of(v).iter().map(|u| (&f.nodes[u.at()], u.operand as usize));
    let used: Vec<(&Node, usize)> = used.collect();
    if !used.is_empty() && used.iter().all(|u| u.0.op.facts().kind == Kind::Lookup) {
        let entries = AtomList::collect(grid.entries.iter().copied()).unwrap_or_default();
        let columns = list(grid.stream.columns);
        return ((0..rank).map(|d| if d == dim { entries } else { columns }).collect(), None);
    }
    let product = used.iter().find(|u| u.0.op.facts().kind == Kind::Product).or(used.first());
    let Some(&(n, j)) = product else { return (vec![AtomList::EMPTY; rank], None) };
    let ranks: Vec<usize> = n.ins.iter().map(|&x| f.ty(x).rank()).collect();
    let rule = n.op.def().rule(&ranks);
    let kept = |d: usize| rule.outs[0].contains(&rule.ins[j][d]);
    let (from, to) =
        if kept(dim) { (&grid.stream, &grid.inner) } else { (&grid.inner, &grid.stream) };
    // Of the dims that the product keeps, and of those that it sums over, one each is cut.
    let of = |keeps: bool| match kept(dim) == keeps {
        true => Some(dim),
        false => (0..rank).find(|&d| kept(d) == keeps),
    };
    let cut = |d: usize| match kept(d) {
        true if d == dim => up_to(mesh, to.columns, limit),
        true if of(true) == Some(d) => list(to.columns),
        false if of(false) == Some(d) => list(from.columns.minus(to.columns)),
        _ => AtomList::EMPTY,
    };
    let last = of(true).map_or(AtomList::EMPTY, cut);
    ((0..rank).map(cut).collect(), Some((n.outs[0], to, last)))
}

/// What products take for a value: behind all that is done to each of its elements alone, as a
/// factor that was moved from an activation to its smaller weight.
fn behind(f: &Func, uses: &Uses, mut v: Value) -> Value {
    loop {
        let mut users = uses.users(v).map(|i| &f.nodes[i]);
        let Some(first) = users.clone().next() else { return v };
        let taken = users.any(|n| n.op.facts().kind.takes_weights());
        let &[only] = &first.ins[..] else { return v };
        if taken {
            return v;
        }
        let rule = first.op.def().rule(&[f.ty(only).rank()]);
        if rule.outs.len() != 1 || rule.outs[0] != rule.ins[0] {
            return v;
        }
        v = first.outs[0];
    }
}

/// The leading atoms of `set` whose product divides the limit.
fn up_to(mesh: &Mesh, set: AtomSet, limit: Option<usize>) -> AtomList {
    let mut ways = 1;
    let fits = set.iter().take_while(|&a| {
        ways *= mesh.size(a);
        limit.is_none_or(|l| l % ways == 0)
    });
    AtomList::collect(fits).unwrap_or_default()
}

/// How many ways the tensor-parallel dim of a weight can be split so that heads stay whole: the
/// number of heads if the product it feeds is cut into heads, no limit otherwise.
fn split_limit(f: &Func, uses: &Uses, arg: Value, dim: usize) -> Option<usize> {
    let (mut v, mut dim) = (arg, dim);
    loop {
        v = behind(f, uses, v);
        let first = uses.of(v).first()?;
        let n = &f.nodes[first.at()];
        // Only a product, and a bias, may stand between a weight and its heads.
        if !(matches!(n.op, Op::Dot(_)) || n.op.is_sum()) {
            return None;
        }
        let ranks: SmallVec<[usize; 4]> = n.ins.iter().map(|&x| f.ty(x).rank()).collect();
        let rule = n.op.def().rule(&ranks);
        let letter: Letter = rule.ins[first.operand as usize][dim].single()?;
        dim = rule.outs[0].iter().position(|g| g.single() == Some(letter))?;
        v = behind(f, uses, n.outs[0]);
        let mut next = uses.users(v).map(|k| &f.nodes[k]);
        let count = next.len();
        let heads = next.find_map(|n| {
            let Op::Reshape(r) = &n.op else { return None };
            let major = r.rule.0.ins[0][dim].letters().split_first().filter(|l| !l.1.is_empty())?.0;
            let at = r.rule.0.outs[0].iter().position(|g| g.single() == Some(*major))?;
            Some(f.ty(n.outs[0]).dims[at].size)
        });
        if heads.is_some() || count != 1 {
            return heads;
        }
    }
}
