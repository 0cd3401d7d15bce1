//! Writes down who wants which sharding: the mesh, the family's recipe for tensor parallelism, the
//! batch over the data-parallel axes, the residual stream over tp (`--sp`), and `--shard`.
//!
//! Before:  `func @model(%q_proj: f32[64,64], %input_ids: i32[8,16])`, no mesh
//! After:   the same with annotations `64@tp`, `8@dp_replicate`, and a mesh cut where heads need it
//! Assumes: phase Source.  Leaves: phase Source with annotations.

use super::experts;
use super::grid::{self, Grid, Side};
use crate::options::{CpMode, Options, ShardRule, glob};
use shardc_ir::attr::{read_atoms, read_sub_axis};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{AnnotatedDim, Annotation, Func, Node, Port, RoleKind, Value};
use shardc_ir::mesh::{Atom, AtomSet, Mesh, PIPELINE};
use shardc_ir::ops::Op;
use shardc_ir::plan::Mode;
use shardc_ir::rule::Letter;
use shardc_ir::types::AtomList;
use shardc_ir::weights::Weight;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Priority of the residual stream's split: after parameters and batch have spread.
const SEQUENCE: u8 = 1;

/// Makes the mesh and annotates the function; `sequence` lists residual values and their seq dim.
pub fn annotate(
    f: &mut Func,
    weights: &[Weight],
    sequence: &[(Value, usize)],
    o: &Options,
) -> Result<Mesh> {
    let axes: Vec<(&str, usize)> = o.mesh.iter().map(|(n, s)| (n.as_str(), *s)).collect();
    let mut mesh = Mesh::new(&axes)?;
    cut_sub_axes(&mut mesh, &o.shard)?;
    let has_experts = f.nodes.iter().any(|n| matches!(n.op, Op::Route(_)));
    let folded = if has_experts { experts::fold(o)? } else { vec![] };
    experts::cut(&mut mesh, &folded)?;
    // Per parameter, the dim that tensor parallelism splits and how many ways it may.
    let by_name: BTreeMap<&str, &Weight> = weights.iter().map(|w| (&*w.param, w)).collect();
    let users = users(f);
    let recipe = |a: &Port| {
        let role = a.role.as_ref().filter(|r| r.kind == RoleKind::Param)?;
        let dim = by_name.get(&*role.name).filter(|w| w.experts.is_none())?.tp_dim?;
        Some((dim, split_limit(f, &users, a.value, dim)))
    };
    let recipes: Vec<Option<(usize, Option<usize>)>> = f.args.iter().map(recipe).collect();
    grid::cut(&mut mesh, o.tp_mode, recipes.iter().flatten().filter_map(|r| r.1))?;
    let grid = Grid::of(&mesh, o.tp_mode)?;
    let batch: AtomSet = ["dp_replicate", "dp_shard"]
        .iter()
        .filter_map(|a| mesh.axis(a))
        .fold(AtomSet::EMPTY, AtomSet::union);
    // Tokens are cut along the sequence too; positions stay whole, a rank slices what it needs.
    let cp = mesh.axis("cp").unwrap_or_default();
    let mut new: Vec<(Value, Annotation)> = Vec::new();
    // An activation [rows, tokens, …, last] on a side of a block.
    let laid = |v: Value, rows: &[Atom], last: AtomList| {
        let rank = f.ty(v).rank();
        let dim = |d: usize| match d {
            0 => AtomList::collect(batch.iter().chain(rows.iter().copied())).unwrap_or_default(),
            1 => AtomList::collect(cp.iter()).unwrap_or_default(),
            d if d + 1 == rank => last,
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
                    let (cut, made) = weight(&mesh, f, &users, a.value, recipe, &grid);
                    dims.iter_mut().zip(cut).for_each(|(d, atoms)| d.atoms = atoms);
                    if let (true, Some((v, side, last))) = (grid.cuts_stream(), made) {
                        new.push(laid(v, &side.rows, last));
                    }
                }
            }
            RoleKind::Input if rank > 1 => {
                dims[0].atoms = AtomList::collect(batch.iter()).unwrap_or_default();
                dims[1].atoms = AtomList::collect(cp.iter()).unwrap_or_default();
            }
            _ => {}
        }
        new.push((a.value, Annotation { dims: dims.into(), priority: 0 }));
    }
    let tp = mesh.axis("tp").unwrap_or_default();
    if grid.cuts_stream() {
        let columns = AtomList::collect(grid.stream.columns.iter()).unwrap_or_default();
        new.extend(sequence.iter().map(|x| laid(x.0, &grid.stream.rows, columns)));
    } else if (o.sp && !tp.is_empty()) || has_experts {
        // Experts may split tokens further than the residual stream does.
        let over = if o.sp { tp } else { AtomSet::EMPTY };
        for &(v, dim) in sequence {
            let open = |d| AnnotatedDim {
                atoms: if d == dim {
                    AtomList::collect(cp.iter().chain(over.iter())).unwrap_or_default()
                } else {
                    AtomList::EMPTY
                },
                open: d < dim,
            };
            new.push((
                v,
                Annotation { dims: (0..f.ty(v).rank()).map(open).collect(), priority: SEQUENCE },
            ));
        }
    }
    experts::annotate(&mesh, f, &by_name, &folded, &mut new);
    if !cp.is_empty() {
        keys_and_values(f, cp, &mut new);
        if o.cp_mode == CpMode::Ulysses {
            heads(f, grid.inner.columns, cp, &mut new);
        }
    }
    f.annotations.extend(new);
    o.shard.iter().try_for_each(|r| apply(&mesh, f, r, o))?;
    check_inputs(&mesh, f, batch, o)?;
    check_frozen(f, o)?;
    Ok(mesh)
}

/// Keys and values are made of a rank's own tokens; attention, which needs them all, gathers them
/// (Llama 3: all-gather context parallelism).
fn keys_and_values(f: &Func, cp: AtomSet, new: &mut Vec<(Value, Annotation)>) {
    for n in &f.nodes {
        if !matches!(n.op, Op::Attention(_)) {
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
    for n in f.nodes.iter().filter(|n| matches!(n.op, Op::Attention(_))) {
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

/// All inputs of a batch must be cut into rows alike, or ranks would pair tokens with the labels of
/// other rows; with several microbatches that is the split over the data-parallel axes.
fn check_inputs(mesh: &Mesh, f: &Func, batch: AtomSet, o: &Options) -> Result<()> {
    for a in &f.args {
        let Some(role) = a.role.as_ref().filter(|r| r.kind == RoleKind::Input) else { continue };
        let (ty, note) = (f.ty(a.value), f.annotations.get(&a.value));
        let Some(note) = note.filter(|_| ty.rank() > 1) else { continue };
        let rows = note.dims[0].atoms;
        let ways: usize = rows.iter().map(|x| mesh.size(x)).product();
        let moved = o.microbatches() > 1 && rows.set() != batch;
        if moved || ty.dims[0].size % ways != 0 {
            let what = format!("the rows of `{}` cannot be cut {ways} ways here", role.name);
            return Err(Diag::new("shard", what)
                .at(format!("--shard '{}=…'", role.name))
                .rule("rows are cut over dp; otherwise only evenly, and with 1 microbatch")
                .help(format!("leave dim 0 to dp, or use --microbatch {}", o.global_batch)));
        }
    }
    Ok(())
}

/// Every `--freeze` must match something, and something must be left to train.
fn check_frozen(f: &Func, o: &Options) -> Result<()> {
    let params =
        || f.args.iter().filter_map(|a| a.role.as_ref()).filter(|r| r.kind == RoleKind::Param);
    if let Some(g) = o.freeze.iter().find(|g| !params().any(|r| glob(g, &r.name))) {
        let names: Vec<&str> = params().map(|r| &*r.name).take(4).collect();
        return Err(Diag::new("unknown-tensor", format!("`{g}` matches no parameter"))
            .at(format!("--freeze '{g}'"))
            .help(format!("name some of {}, …", names.join(", "))));
    }
    let all = params().count() > 0 && params().all(|r| o.freeze.iter().any(|g| glob(g, &r.name)));
    if all && o.mode == Mode::Train {
        return Err(Diag::new("no-loss", "every parameter is frozen: there is nothing to train")
            .at("--freeze")
            .help("freeze fewer, or compile with --mode infer"));
    }
    Ok(())
}

/// A word of torch's and Hugging Face's tensor-parallel plans as dims over `tp`: `colwise` splits
/// what a product makes of a weight, `rowwise` what it sums over, `replicated` nothing. A bias is
/// split with the columns.
fn style_word(f: &Func, v: Value, word: &str) -> Option<Vec<String>> {
    let rank = f.ty(v).rank();
    let whole = vec!["-".to_string(); rank];
    let colwise = match word {
        "replicated" => return Some(whole),
        "colwise" => true,
        "rowwise" => false,
        _ => return None,
    };
    let (n, j) = f.nodes.iter().find_map(|n| Some((n, n.ins.iter().position(|&x| x == v)?)))?;
    let ranks: Vec<usize> = n.ins.iter().map(|&x| f.ty(x).rank()).collect();
    let rule = n.op.def().rule(&ranks);
    let made = |d: usize| rule.outs[0].contains(&rule.ins[j][d]);
    let split = (0..rank).find(|&d| made(d) == colwise);
    let one = |d: usize| if Some(d) == split { "tp".to_string() } else { "-".into() };
    Some((0..rank).map(one).collect())
}

/// A dim as written, with `dp` for the data-parallel axes and axes of one rank left out.
fn spelled(body: &str, mesh: &Mesh, o: &Options) -> String {
    let one = |p: &str| -> Vec<String> {
        let name = p.split(':').next().unwrap_or(p);
        match name {
            "dp" if mesh.axis("dp").is_none() => ["dp_replicate", "dp_shard"]
                .iter()
                .filter(|a| mesh.axis(a).is_some())
                .map(|a| p.replacen("dp", a, 1))
                .collect(),
            _ if o.mesh.iter().any(|a| a.0 == name && a.1 == 1) => vec![],
            _ => vec![p.to_string()],
        }
    };
    body.split('*').flat_map(|p| one(p.trim())).collect::<Vec<_>>().join("*")
}

/// What a product makes of a weight: the value, on which side of a block, and what cuts its last dim.
type Made<'a> = Option<(Value, &'a Side, AtomList)>;

/// How a weight with a recipe is cut where it is used, per dim, and what is made of it. The dim of the
/// recipe is split among columns in a first product and in its bias, among what is summed in a second.
fn weight<'a>(
    mesh: &Mesh,
    f: &Func,
    users: &Users,
    v: Value,
    (dim, limit): (usize, Option<usize>),
    grid: &'a Grid,
) -> (Vec<AtomList>, Made<'a>) {
    let list = |s: AtomSet| AtomList::collect(s.iter()).unwrap_or_default();
    let rank = f.ty(v).rank();
    let used = users[v.0 as usize].iter().map(|&(i, j)| (&f.nodes[i as usize], j as usize));
    let used: Vec<(&Node, usize)> = used.collect();
    if !used.is_empty() && used.iter().all(|u| matches!(u.0.op, Op::Take(_))) {
        let entries = AtomList::collect(grid.entries.iter().copied()).unwrap_or_default();
        let columns = list(grid.stream.columns);
        return ((0..rank).map(|d| if d == dim { entries } else { columns }).collect(), None);
    }
    let product = used.iter().find(|u| matches!(u.0.op, Op::Dot(_))).or(used.first());
    let Some(&(n, j)) = product else { return (vec![AtomList::EMPTY; rank], None) };
    let ranks: Vec<usize> = n.ins.iter().map(|&x| f.ty(x).rank()).collect();
    let rule = n.op.def().rule(&ranks);
    let kept = |d: usize| rule.outs[0].contains(&rule.ins[j][d]);
    let (from, to) =
        if kept(dim) { (&grid.stream, &grid.inner) } else { (&grid.inner, &grid.stream) };
    let cut = |d: usize| match kept(d) {
        true if d == dim => up_to(mesh, to.columns, limit),
        true => list(to.columns),
        false => list(from.columns.minus(to.columns)),
    };
    let last = (0..rank).find(|&d| kept(d)).map_or(AtomList::EMPTY, cut);
    ((0..rank).map(cut).collect(), Some((n.outs[0], to, last)))
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

/// Per value, the nodes that use it and as which operand.
type Users = Vec<SmallVec<[(u32, u32); 2]>>;

fn users(f: &Func) -> Users {
    let mut users: Users = vec![SmallVec::new(); f.values.len()];
    for (i, n) in f.nodes.iter().enumerate() {
        for (j, v) in n.ins.iter().enumerate() {
            users[v.0 as usize].push((i as u32, j as u32));
        }
    }
    users
}

/// How many ways the tensor-parallel dim of a weight can be split so that heads stay whole: the
/// number of heads if the product it feeds is cut into heads, no limit otherwise.
fn split_limit(f: &Func, users: &Users, arg: Value, dim: usize) -> Option<usize> {
    let (mut v, mut dim) = (arg, dim);
    loop {
        let &(i, j) = users[v.0 as usize].first()?;
        let n = &f.nodes[i as usize];
        // Only a product, and a bias, may stand between a weight and its heads.
        if !matches!(n.op, Op::Dot(_) | Op::Add(_)) {
            return None;
        }
        let ranks: SmallVec<[usize; 4]> = n.ins.iter().map(|&x| f.ty(x).rank()).collect();
        let rule = n.op.def().rule(&ranks);
        let letter: Letter = rule.ins[j as usize][dim].single()?;
        dim = rule.outs[0].iter().position(|g| g.single() == Some(letter))?;
        v = n.outs[0];
        let next = &users[v.0 as usize];
        let heads = next.iter().find_map(|&(k, _)| match &f.nodes[k as usize].op {
            Op::Reshape(r) => {
                let major =
                    r.rule.0.ins[0][dim].letters().split_first().filter(|l| !l.1.is_empty())?.0;
                let at = r.rule.0.outs[0].iter().position(|g| g.single() == Some(*major))?;
                Some(f.ty(f.nodes[k as usize].outs[0]).dims[at].size)
            }
            _ => None,
        });
        if heads.is_some() || next.len() != 1 {
            return heads;
        }
    }
}

/// Cuts the mesh wherever a `--shard` names part of an axis.
fn cut_sub_axes(mesh: &mut Mesh, rules: &[ShardRule]) -> Result<()> {
    for part in rules.iter().flat_map(|r| &r.dims).flat_map(|d| d.trim_end_matches('?').split('*'))
    {
        let Some((name, sub)) = part.split_once(':') else { continue };
        let (pre, size) = read_sub_axis(sub).map_err(|e| {
            Diag::new("shard", e).at(format!("--shard …{part}…")).help("write for example tp:(1)2")
        })?;
        if let Some(axis) = mesh.axes.iter().position(|a| a.name == name) {
            mesh.cut(axis, pre)?;
            mesh.cut(axis, pre.saturating_mul(size))?;
        }
    }
    Ok(())
}

/// Applies one `--shard` to the parameters it matches, or to the last values of the scopes it matches.
fn apply(mesh: &Mesh, f: &mut Func, rule: &ShardRule, o: &Options) -> Result<()> {
    let place = || format!("--shard '{}={}'", rule.glob, rule.dims.join(","));
    let mut hits: Vec<Value> = f
        .args
        .iter()
        .filter(|a| a.role.as_ref().is_some_and(|r| glob(&rule.glob, &r.name)))
        .map(|a| a.value)
        .collect();
    if hits.is_empty() {
        let mut last: BTreeMap<u32, Value> = BTreeMap::new();
        for n in f.nodes.iter().filter(|n| glob(&rule.glob, &f.scope_info(n.scope).path)) {
            last.insert(n.scope.0, n.outs[0]);
        }
        hits = last.into_values().collect();
    }
    if hits.is_empty() {
        let names: Vec<&str> =
            f.args.iter().filter_map(|a| Some(&*a.role.as_ref()?.name)).take(6).collect();
        return Err(Diag::new(
            "unknown-tensor",
            format!("`{}` matches no parameter, input or scope", rule.glob),
        )
        .at(place())
        .help(format!(
            "name one of {}, … (shardc inspect --phase source lists them all)",
            names.join(", ")
        )));
    }
    for v in hits {
        let rank = f.ty(v).rank();
        let words = match &rule.dims[..] {
            [word] => style_word(f, v, word),
            _ => None,
        };
        let written = words.as_ref().unwrap_or(&rule.dims);
        if written.len() != rank {
            return Err(Diag::new(
                "shard",
                format!("{} dims are given, the tensor has {rank}", rule.dims.len()),
            )
            .at(place())
            .help(format!("give {rank} entries, `-` for a dim that stays whole")));
        }
        let dim = |text: &String| -> std::result::Result<AnnotatedDim, String> {
            let (body, open) = match text.strip_suffix('?') {
                Some(b) => (b, true),
                None => (text.as_str(), false),
            };
            let body = spelled(body, mesh, o);
            let atoms = if body.is_empty() || body == "-" {
                AtomList::EMPTY
            } else {
                read_atoms(&body, mesh)?
            };
            if atoms.set().meets(mesh.axis(PIPELINE).unwrap_or_default()) {
                return Err(format!("{PIPELINE} splits the model into stages, and no tensor"));
            }
            Ok(AnnotatedDim { atoms, open })
        };
        let dims = written.iter().map(dim).collect::<std::result::Result<_, _>>();
        let dims = dims.map_err(|e| {
            Diag::new("shard", e).at(place()).help("a dim is `-`, `?`, an axis, `a*b` or `a:(k)n`")
        })?;
        let a = Annotation { dims, priority: rule.priority };
        let twice = a
            .dims
            .iter()
            .flat_map(|d: &AnnotatedDim| d.atoms.iter())
            .fold((AtomSet::EMPTY, false), |(s, t), x| (s.with(x), t || s.has(x)));
        if twice.1 {
            return Err(Diag::new("shard", "an axis splits two dims of one tensor")
                .at(place())
                .help("use each axis once"));
        }
        f.annotations.insert(v, a);
    }
    Ok(())
}
