//! What `--shard` asks for: a rule becomes annotations of the parameters, or of the scopes, that its
//! glob matches.
//!
//! Before:  `%w1: f32[32,10] param "net1.weight"`, used in scope `net1`; `--shard net1=colwise`
//! After:   the same with the annotation `32@tp,10`

use crate::globs;
use crate::options::{Options, ShardRule};
use shardc_ir::attr::{read_atoms, read_sub_axis};
use shardc_ir::axes::AxisRole;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{AnnotatedDim, Annotation, Func, Node, RoleKind, Scope, Value};
use shardc_ir::mesh::{AtomSet, Mesh, PIPELINE};
use shardc_ir::names::{self, glob};
use shardc_ir::ops::Kind;
use shardc_ir::text::annotation_text;
use shardc_ir::types::AtomList;
use shardc_ir::weights::Weight;
use std::collections::{BTreeMap, BTreeSet};

/// Words of torch's and Hugging Face's tensor-parallel plans: `colwise` splits over tp what a product
/// makes of a weight, `rowwise` what it sums over, `replicated` nothing. A bias is split with the
/// columns; of a table that is looked up, rows are entries.
const WORDS: [&str; 3] = ["colwise", "rowwise", "replicated"];

/// Most names that a message lists.
const LISTED: usize = 6;

/// Cuts the mesh wherever a `--shard` names part of an axis.
pub(super) fn cut_sub_axes(mesh: &mut Mesh, rules: &[ShardRule]) -> Result<()> {
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

/// A dim as written, with `dp` for the data-parallel axes and axes of one rank left out.
fn spelled(body: &str, mesh: &Mesh, o: &Options) -> String {
    let of_one = |name: &str| o.mesh.iter().any(|a| a.0 == name && a.1 == 1);
    let no_dp = mesh.axis("dp").is_none() && mesh.axes_that(AxisRole::of_rows).is_empty();
    let stays = |p: &&str| {
        let name = p.trim().split(':').next().unwrap_or(p);
        !(of_one(name) || name == "dp" && no_dp)
    };
    mesh.spelled(&body.split('*').filter(stays).collect::<Vec<_>>().join("*"))
}

/// Applies one `--shard`: dims to the parameters and inputs it matches, or else to the last values of
/// the scopes it matches; a word to parameters, or else to those that are used in the scopes.
///
/// # Errors
/// `unknown-tensor` if it matches nothing, `part-of-stack`, `shard` if what it asks for cannot be.
pub(super) fn apply(
    mesh: &Mesh,
    f: &mut Func,
    weights: &[Weight],
    rule: &ShardRule,
    o: &Options,
) -> Result<()> {
    for (v, written) in hits(f, weights, rule)? {
        let a = annotation(mesh, f, v, &written, rule, o)?;
        f.annotations.insert(v, a);
    }
    Ok(())
}

/// A warning for each `--shard` that a later one takes the place of, and for annotations of a text in whose place
/// one stands.
///
/// # Errors
/// Those of [`apply`].
pub(crate) fn overridden(
    mesh: &Mesh,
    f: &Func,
    weights: &[Weight],
    o: &Options,
) -> Result<Vec<Diag>> {
    // By value what was asked of it so far: the words, and the number of the rule, if it is none of the text.
    let mut asked: BTreeMap<Value, (String, Option<usize>)> = BTreeMap::new();
    for (v, a) in &f.annotations {
        asked.insert(*v, (annotation_text(mesh, a), None));
    }
    let mut found: BTreeMap<(Option<usize>, usize), (Value, String, usize)> = BTreeMap::new();
    for (i, rule) in o.shard.iter().enumerate() {
        for (v, dims) in hits(f, weights, rule)? {
            let own = format!("({})", dims.join(","));
            let before = asked.insert(v, (own.clone(), Some(i)));
            if let Some((text, from)) = before.filter(|b| b.0 != own) {
                found.entry((from, i)).or_insert((v, text, 0)).2 += 1;
            }
        }
    }
    let warn = |((from, by), (v, text, n)): ((Option<usize>, usize), (Value, String, usize))| {
        let was = from.map_or(format!("`@{text}` in the text"), |i| place(&o.shard[i]));
        let of = match n {
            1 => f.name(v).to_string(),
            n => format!("{} and {} more", f.name(v), n - 1),
        };
        let by = place(&o.shard[by]);
        Diag::new("no-effect", format!("{was} has no effect on {of}"))
            .rule("of all that is asked of a tensor the last holds: --shard before the text, a later one before an \
                   earlier one")
            .help(format!("leave it out, or {by}, which takes its place"))
    };
    Ok(found.into_iter().map(warn).collect())
}

/// The word that a rule is, if it is one.
pub(super) fn word(rule: &ShardRule) -> Option<&'static str> {
    let [word] = &rule.dims[..] else { return None };
    WORDS.iter().copied().find(|w| w == word)
}

/// The dim of each parameter that words split, if they split any: what a grid takes for the dim that a family
/// marks.
///
/// # Errors
/// Those of [`apply`].
pub(super) fn recipes(
    f: &Func,
    weights: &[Weight],
    rules: &[ShardRule],
) -> Result<BTreeMap<Value, Option<usize>>> {
    let mut out = BTreeMap::new();
    for rule in rules.iter().filter(|r| word(r).is_some()) {
        let split = |dims: Vec<String>| dims.iter().position(|d| d == "tp");
        out.extend(hits(f, weights, rule)?.into_iter().map(|(v, dims)| (v, split(dims))));
    }
    Ok(out)
}

/// The parameters and inputs, and the scopes, of which a name is a glob or else the end, as `mlp.gate_proj` is of
/// that module in each layer.
fn named(f: &Func, weights: &[Weight], rule: &ShardRule) -> Result<(Vec<Value>, BTreeSet<Scope>)> {
    for pattern in [rule.glob.clone(), format!("*.{}", rule.glob)] {
        let args = globs::arguments(f, weights, &pattern).map_err(|d| d.at(place(rule)))?;
        let own = |s: &Scope| glob(&pattern, &f.scopes[*s].path);
        let scopes: BTreeSet<Scope> = f.nodes.iter().map(|n| n.scope).filter(own).collect();
        if !args.is_empty() || !scopes.is_empty() {
            return Ok((args, scopes));
        }
    }
    Err(unknown(f, weights, rule))
}

/// What a rule matches, each with its dims.
fn hits(f: &Func, weights: &[Weight], rule: &ShardRule) -> Result<Vec<(Value, Vec<String>)>> {
    let word = word(rule);
    let (args, scopes) = named(f, weights, rule)?;
    Ok(match word {
        Some(word) if args.is_empty() => of_scopes(f, rule, word, &scopes)?,
        Some(word) => {
            args.iter().map(|&v| Ok((v, of_param(f, rule, word, v)?))).collect::<Result<_>>()?
        }
        None if args.is_empty() => {
            let of = f.nodes.iter().filter(|n| scopes.contains(&n.scope));
            let last: BTreeMap<u32, Value> = of.map(|n| (n.scope.0, n.outs[0])).collect();
            // A module with as many dims as its weight has, and its result has not, is its weight.
            let fits = |v: &Value| f.ty(*v).rank() == rule.dims.len();
            let inside = |n: &Node| scopes.contains(&n.scope);
            let own = params(f).filter(|v| fits(v) && is_weight(f, *v, &inside));
            let own: Vec<Value> = if last.values().any(fits) { vec![] } else { own.collect() };
            let all = if own.is_empty() { last.into_values().collect() } else { own };
            all.into_iter().map(|v| (v, rule.dims.clone())).collect()
        }
        None => args.into_iter().map(|v| (v, rule.dims.clone())).collect(),
    })
}

/// The rule as the user wrote it.
fn place(rule: &ShardRule) -> String {
    format!("--shard '{}={}'", rule.glob, rule.dims.join(","))
}

fn unknown(f: &Func, weights: &[Weight], rule: &ShardRule) -> Diag {
    let inputs = f.args.iter().filter_map(|a| a.role.as_ref());
    let inputs: Vec<&str> = inputs.filter(|r| r.kind.input().is_some()).map(|r| &*r.name).collect();
    let what = format!("`{}` matches no tensor, input or scope", rule.glob);
    Diag::new("unknown-tensor", what)
        .at(place(rule))
        .help(names::suggestion(weights, &rule.glob))
        .help(format!(
            "inputs are {}; shardc inspect --phase source lists all scopes",
            inputs.join(", ")
        ))
}

/// What a word asks of the parameters that are used in some scopes, each as it is used there.
fn of_scopes(
    f: &Func,
    rule: &ShardRule,
    word: &str,
    scopes: &BTreeSet<Scope>,
) -> Result<Vec<(Value, Vec<String>)>> {
    let inside = |n: &Node| scopes.contains(&n.scope);
    let params: Vec<Value> = params(f).filter(|&v| user(f, v, &inside).is_some()).collect();
    // A word is for linears and embeddings, as in torch.
    if params.iter().any(|&v| is_weight(f, v, &inside)) {
        return Ok(params.into_iter().map(|v| (v, dims(f, v, word, &inside))).collect());
    }
    let path = scopes.first().map_or("", |&s| &f.scopes[s].path);
    let weighs = |n: &Node| self::params(f).any(|v| is_weight(f, v, &|m| std::ptr::eq(m, n)));
    let paths = f.nodes.iter().filter(|n| weighs(n)).map(|n| &*f.scope_info(n.scope).path);
    let below = paths.filter(|p| p.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')));
    let below: BTreeSet<&str> = below.collect();
    let below: Vec<&str> = below.into_iter().take(LISTED).collect();
    let what = format!("`{word}` of `{path}`: no weight is used in this scope itself");
    let d = Diag::new("shard", what)
        .at(place(rule))
        .rule("a word says how the weight of a product, or a table that is looked up, is split");
    Err(match below[..] {
        [] => d.help("give 1 entry per dim of the scope's last value, as in '?,-,tp'"),
        _ => d.help(format!("name the scopes in it that have one: {}", below.join(", "))),
    })
}

/// What a word asks of one parameter.
fn of_param(f: &Func, rule: &ShardRule, word: &str, v: Value) -> Result<Vec<String>> {
    if word == "replicated" || params(f).any(|p| p == v) && user(f, v, &|_| true).is_some() {
        return Ok(dims(f, v, word, &|_| true));
    }
    let what = format!("`{word}` says how a weight is split, and {} is none", f.name(v));
    Err(Diag::new("shard", what)
        .at(place(rule))
        .help(format!("give {} entries, `-` for a dim that stays whole", f.ty(v).rank())))
}

fn params(f: &Func) -> impl Iterator<Item = Value> + '_ {
    let is =
        |a: &&shardc_ir::func::Port| a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param);
    f.args.iter().filter(is).map(|a| a.value)
}

/// The first use of a parameter among some nodes, casts aside: the node, and which operand it is.
fn user<'a>(f: &'a Func, v: Value, of: &dyn Fn(&Node) -> bool) -> Option<(&'a Node, usize)> {
    let mut all = f.nodes.iter().filter(|n| of(n) || n.op.facts().kind == Kind::Conversion);
    let (n, j) = all.find_map(|n| Some((n, n.ins.iter().position(|&x| x == v)?)))?;
    match n.op.facts().kind == Kind::Conversion {
        true => user(f, n.outs[0], of),
        false => Some((n, j)),
    }
}

/// True if a parameter is the weight of a product, or a table that is looked up, in one of these.
fn is_weight(f: &Func, v: Value, of: &dyn Fn(&Node) -> bool) -> bool {
    let weighs = |n: &Node| n.op.facts().kind.takes_weights();
    f.ty(v).rank() > 1 && user(f, v, of).is_some_and(|(n, _)| weighs(n))
}

/// A word as dims over tp, for a parameter as some nodes use it.
fn dims(f: &Func, v: Value, word: &str, of: &dyn Fn(&Node) -> bool) -> Vec<String> {
    let rank = f.ty(v).rank();
    let split = user(f, v, of).filter(|_| word != "replicated").and_then(|(n, j)| {
        let ranks: Vec<usize> = n.ins.iter().map(|&x| f.ty(x).rank()).collect();
        let rule = n.op.def().rule(&ranks);
        (0..rank).find(|&d| rule.outs[0].contains(&rule.ins[j][d]) == (word == "colwise"))
    });
    let one = |d: usize| if Some(d) == split { "tp".to_string() } else { "-".into() };
    (0..rank).map(one).collect()
}

/// Dims as written, as an annotation of a value.
fn annotation(
    mesh: &Mesh,
    f: &Func,
    v: Value,
    written: &[String],
    rule: &ShardRule,
    o: &Options,
) -> Result<Annotation> {
    let rank = f.ty(v).rank();
    if written.len() != rank {
        let given = match written.len() {
            1 => "1 dim is".to_string(),
            n => format!("{n} dims are"),
        };
        let what = format!("{given} given, {} has {rank}", f.name(v));
        return Err(Diag::new("shard", what)
            .at(place(rule))
            .help(format!("give {rank} entries, `-` for a dim that stays whole")));
    }
    let dim = |text: &String| -> std::result::Result<AnnotatedDim, String> {
        let (body, open) = match text.strip_suffix('?') {
            Some(b) => (b, true),
            None => (text.as_str(), false),
        };
        let body = spelled(body, mesh, o);
        let atoms =
            if body.is_empty() || body == "-" { AtomList::EMPTY } else { read_atoms(&body, mesh)? };
        if atoms.set().meets(mesh.axis(PIPELINE).unwrap_or_default()) {
            return Err(format!("{PIPELINE} splits the model into stages, and no tensor"));
        }
        Ok(AnnotatedDim { atoms, open })
    };
    let dims = written.iter().map(dim).collect::<std::result::Result<_, _>>();
    let dims = dims.map_err(|e| {
        let help = "a dim is `-`, `?`, an axis, `a*b` or `a:(k)n`";
        Diag::new("shard", e).at(place(rule)).help(help)
    })?;
    let a = Annotation { dims, priority: rule.priority };
    let twice = a
        .dims
        .iter()
        .flat_map(|d: &AnnotatedDim| d.atoms.iter())
        .fold((AtomSet::EMPTY, false), |(s, t), x| (s.with(x), t || s.has(x)));
    if twice.1 {
        return Err(Diag::new("shard", "an axis splits two dims of one tensor")
            .at(place(rule))
            .help("use each axis once"));
    }
    Ok(a)
}

/// All inputs of a batch must be cut into rows alike, or ranks would pair tokens with the labels of
/// other rows; with several microbatches that is the split over the data-parallel axes, which those have then that
/// are left open.
pub fn check_inputs(mesh: &Mesh, f: &mut Func, batch: AtomSet, o: &Options) -> Result<()> {
    for a in &f.args {
        let Some(role) = a.role.as_ref().filter(|_| a.input().is_some_and(|i| i.batch)) else {
            continue;
        };
        let Some(note) = f.annotations.get_mut(&a.value) else { continue };
        let taken = note.dims[1..].iter().any(|d| d.atoms.set().meets(batch));
        let first = &mut note.dims[0];
        if o.microbatches() > 1 && first.open && first.atoms.set().within(batch) && !taken {
            first.atoms = AtomList::collect(batch.iter()).unwrap_or_default();
        }
        let (rows, ty) = (first.atoms, &f.values[a.value].ty);
        let ways: usize = rows.iter().map(|x| mesh.size(x)).product();
        let moved = o.microbatches() > 1 && rows.set() != batch;
        if moved || ty.dims[0].size % ways != 0 {
            let name = &role.name;
            let what = match moved {
                true => format!("the rows of `{name}` are cut over other axes than dp"),
                false => format!("the rows of `{name}` cannot be cut {ways} ways here"),
            };
            let d = Diag::new("shard", what)
                .at(format!("--shard '{name}=…'"))
                .rule("rows are cut over dp; otherwise only evenly, and with 1 microbatch");
            let dp = if batch.is_empty() { "-".into() } else { mesh.names(batch, "*") };
            let rows = o.global_batch / o.data_parallel().max(1);
            let alone = moved.then(|| format!(", or use --microbatch {rows}"));
            let alone = alone.unwrap_or_default();
            return Err(d.help(format!("name dp for dim 0: --shard '{name}={dp},…'{alone}")));
        }
    }
    Ok(())
}
