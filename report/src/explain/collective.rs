//! `explain collective:N`: what it does, among which ranks, at which cost, why, and what would
//! remove it.

use super::trace::Why;
use super::value::users;
use super::{Answer, facts, some, words, zero};
use crate::inspect::{group_text, is_gradient, numbered};
use crate::report::Experts;
use serde_json::Value as Json;
use shardc_ir::boxes::Halo;
use shardc_ir::diag::{Diag, Result, bytes, count};
use shardc_ir::func::{Func, FuncKind, Node, Scope, Value};
use shardc_ir::group::begins_call;
use shardc_ir::mesh::AtomSet;
use shardc_ir::ops::{LayoutChange, Sends};
use shardc_ir::text::type_text;
use shardc_passes::options::{CpMode, TpMode};
use shardc_passes::shard::reshard::{self, must_receive, ring_bytes, simple};

/// Most items of a list in an answer.
const MAX_ITEMS: usize = 6;

/// One collective of the plan.
struct Call<'a> {
    fi: usize,
    f: &'a Func,
    n: &'a Node,
    kind: &'static str,
    atoms: AtomSet,
}

fn call<'a>(why: &Why<'a>, (fi, ni): (usize, usize)) -> Call<'a> {
    let f = why.func(fi);
    let n = &f.nodes[ni];
    let c = n.op.collective().expect("only collectives are numbered");
    Call { fi, f, n, kind: c.kind(), atoms: c.atoms() }
}

fn of<'a>(c: &Call<'a>) -> &'a dyn LayoutChange {
    c.n.op.collective().expect("only collectives are numbered")
}

/// Explains the `n`-th collective in program order, counted from 1.
pub fn explain(why: &Why, number: &str) -> Result<Answer> {
    let all = numbered(why.plan);
    let index = number.trim().parse::<usize>().ok().and_then(|n| n.checked_sub(1));
    let Some(&at) = index.and_then(|i| all.get(i)) else {
        let has = count(all.len(), "collective", "collectives");
        let what = match number.trim().parse::<usize>() {
            Ok(_) => format!("the plan has {has}"),
            Err(_) => format!("`{}` is not a number; the plan has {has}", number.trim()),
        };
        let d = Diag::new("unknown-collective", what).at(format!("collective:{number}"));
        return Err(match all.len() {
            0 => d.help("one rank exchanges nothing: compile with --mesh tp=2 to see some"),
            n => d.help(format!(
                "use collective:1 to collective:{n}; shardc inspect PLAN --summary lists them"
            )),
        });
    };
    let c = call(why, at);
    let mesh = why.mesh;
    let axes = Experts::of(why.plan).axis(mesh, c.f, c.n, c.atoms);
    let scope = &c.f.scope_info(c.n.scope).path;
    let mut a = Answer::new(format!(
        "collective:{} is {} over {axes} in @{}{}{scope}",
        number.trim(),
        c.kind,
        c.f.name,
        if scope.is_empty() { "" } else { ", " },
    ));
    a.facts = facts::of_collective(why, index.map_or(0, |i| i + 1), (c.fi, c.n), of(&c));
    a.part("line", vec![words::node(mesh, c.f, c.n)]);
    a.part("what", what(why, &c));
    a.part("ranks", ranks(why, c.atoms));
    a.part("bytes", cost(why, &c));
    a.part("search", searched(why, &c));
    a.part("why", reasons(why, &c));
    a.part(
        "used by",
        some(c.n.outs.iter().flat_map(|&o| users(why, c.fi, o)).collect(), MAX_ITEMS),
    );
    let of_zero = zero::of_collective(why, c.f, c.n);
    a.part("mirror", mirror(why, &c, &all));
    a.part("same as", same(why, &c, &all, at));
    if of_zero.is_empty() {
        a.part("remove", remove(why, &c));
    } else {
        a.part("zero", of_zero);
        a.part("stages", zero::stages(why));
    }
    Ok(a)
}

/// What a page says of a collective: what it does, among whom, why, and what would remove it. None if there is
/// no such number.
pub fn brief(why: &Why, number: usize) -> Option<Json> {
    let all = numbered(why.plan);
    let c = call(why, *all.get(number.checked_sub(1)?)?);
    let parts = [
        ("line", vec![words::node(why.mesh, c.f, c.n)]),
        ("what", what(why, &c)),
        ("ranks", ranks(why, c.atoms)),
        ("bytes", cost(why, &c)),
        ("why", reasons(why, &c)),
        ("mirror", mirror(why, &c, &all)),
        (
            "remove",
            if zero::of_collective(why, c.f, c.n).is_empty() { remove(why, &c) } else { vec![] },
        ),
    ];
    let some = parts.into_iter().filter(|p| !p.1.is_empty());
    let parts: Vec<Json> = some.map(|(name, lines)| serde_json::json!([name, lines])).collect();
    Some(parts.into())
}

fn what(why: &Why, c: &Call) -> Vec<String> {
    let (ways, t) = (why.mesh.ways(c.atoms), c.f.ty(c.n.ins[0]));
    let sum = match () {
        () if c.atoms.meets(t.max) => "maximum",
        () if c.atoms.meets(t.min) => "minimum",
        () => "sum",
    };
    let out = c.f.ty(c.n.outs[0]);
    let after = match () {
        () if c.atoms.meets(out.replicated) => {
            "the same on all of them, and used differently from there (R)"
        }
        () if c.atoms.within(out.sharded()) => "split over them (S)",
        () => "the same on all of them (I)",
    };
    let first = of(c).says().replace("{sum}", sum).replace("{after}", after);
    let first = first.replace("{ways}", &ways.to_string());
    let types = format!("{} -> {}", type_text(why.mesh, t), type_text(why.mesh, out));
    let mut l = vec![first, types];
    if let Sends::Boxes { halo: Some(Halo { dim, start }) } = of(c).sends() {
        let (dim, sign) = (dim.of(t.rank()).unwrap_or(0), if start < 0 { '-' } else { '+' });
        let by = match start.unsigned_abs() {
            0 => String::new(),
            by => format!(" {sign} {by}"),
        };
        l.push(format!(
            "index i of dim {dim} is index i{by} of the operand, and 0 where that has none"
        ));
    }
    l.extend((c.n.outs.len() > 1).then(|| format!("{} tensors in one call", c.n.outs.len())));
    l
}

fn ranks(why: &Why, atoms: AtomSet) -> Vec<String> {
    let mesh = why.mesh;
    let groups = mesh.ranks() / mesh.ways(atoms);
    let mut firsts = vec![];
    let mut rank = 0;
    while firsts.len() < groups.min(4) {
        let g = mesh.group(atoms, rank);
        if g.iter().min() == Some(&rank) {
            firsts.push(group_text(g.into_iter()));
        }
        rank += 1;
    }
    let more = if groups > firsts.len() { " | …" } else { "" };
    let s = if groups == 1 { "" } else { "s" };
    vec![format!("{groups} group{s} of {}: {}{more}", mesh.ways(atoms), firsts.join(" | "))]
}

fn cost(why: &Why, c: &Call) -> Vec<String> {
    let (mesh, p) = (why.mesh, why.mesh.ways(c.atoms));
    let coll = of(c);
    let pairs = || c.n.ins.iter().zip(&c.n.outs);
    let ring: f64 = pairs().map(|(&x, &y)| coll.ring_bytes(mesh, c.f.ty(x), c.f.ty(y))).sum();
    let local = |v| c.f.ty(v).local_bytes(mesh);
    let (held, given): (usize, usize) =
        pairs().fold((0, 0), |(a, b), (&x, &y)| (a + local(x), b + local(y)));
    let how = match coll.sends() {
        Sends::SumToAll | Sends::Share | Sends::MeanShare | Sends::ShareOfResult => "ring",
        Sends::Rows { .. }
        | Sends::Nothing
        | Sends::Pieces
        | Sends::Whole
        | Sends::Boxes { .. } => "directly",
    };
    let formula = match coll.sends() {
        Sends::SumToAll => format!(" = 2*({p}-1)/{p} of its {held} B"),
        Sends::Share => format!(" = ({p}-1)/{p} of its {held} B"),
        Sends::MeanShare => {
            format!(" = ({p}-1)/{p} of its {held} B, the mean over the ranks of the ring")
        }
        Sends::ShareOfResult => format!(" = ({p}-1)/{p} of the gathered {given} B"),
        Sends::Rows { .. } => {
            let most = coll.max_bytes(mesh, c.f.ty(c.n.ins[0]), c.f.ty(c.n.outs[0]));
            format!(" if all experts are used alike, at most {most} B")
        }
        Sends::Nothing | Sends::Pieces | Sends::Whole | Sends::Boxes { .. } => {
            format!(", of its {held} B")
        }
    };
    let calls = why.plan.times(c.fi);
    let often = match why.plan.is_looped(c.fi) {
        true if c.f.kind != c.f.kind.plain() => "once per step, for the last microbatch".into(),
        true if calls == 1 => "once per step, which has one microbatch".into(),
        true => format!("once per microbatch: {} per step", count(calls, "call", "calls")),
        false => "once per step".into(),
    };
    let step = bytes((ring * calls as f64) as usize);
    let mut l = vec![
        format!("a rank sends {ring} B per call ({how}){formula}"),
        format!("{often}, {step} per rank and step"),
    ];
    l.extend(together(why, c));
    l
}

/// The other collectives that are sent in the same call, if there are such.
fn together(why: &Why, c: &Call) -> Option<String> {
    let (mesh, f) = (why.mesh, c.f);
    let at = f.nodes.iter().position(|n| std::ptr::eq(n, c.n))?;
    let begin = (0..=at).rev().find(|&i| begins_call(f, i))?;
    let end = (at + 1..f.nodes.len()).find(|&i| begins_call(f, i)).unwrap_or(f.nodes.len());
    let all = numbered(why.plan);
    let own = |i: &usize| all.iter().position(|&x| x == (c.fi, *i)).map(|n| n + 1);
    let numbers: Vec<usize> = (begin..end).filter_map(|i| own(&i)).collect();
    let (first, last) = (numbers.first()?, numbers.last()?);
    let sent = |n: &Node| -> f64 {
        let pairs = n.ins.iter().zip(&n.outs);
        let of = |c: &dyn LayoutChange| {
            pairs.map(|(&x, &y)| c.ring_bytes(mesh, f.ty(x), f.ty(y))).sum::<f64>()
        };
        n.op.collective().map_or(0.0, of)
    };
    let total: f64 = f.nodes[begin..end].iter().map(sent).sum();
    (first < last).then(|| {
        format!("sent in 1 call: collective:{first} to collective:{last}, {total} B together")
    })
}

/// What else would lead from the layout that comes to the one that is wanted.
fn searched(why: &Why, c: &Call) -> Vec<String> {
    let (mesh, [from], [to]) = (why.mesh, &c.n.ins[..], &c.n.outs[..]) else { return vec![] };
    // The whole way: steps one after the other that nobody else uses.
    let step = |n: &&Node| n.ins.len() == 1 && n.op.layout().is_some_and(|l| l.reshards());
    let before = |v: Value| c.f.nodes.iter().filter(step).find(|n| n.outs.contains(&v));
    let alone = |v: Value| c.f.nodes.iter().filter(|n| n.ins.contains(&v)).count() == 1;
    let after = |v: Value| c.f.nodes.iter().filter(step).find(|n| n.ins.contains(&v));
    let (mut from, mut to) = (*from, *to);
    while let Some(n) = before(from).filter(|n| alone(n.outs[0])) {
        from = n.ins[0];
    }
    while let Some(n) = after(to).filter(|_| alone(to)) {
        to = n.outs[0];
    }
    let (from, to) = (c.f.ty(from), c.f.ty(to));
    let Some(found) = reshard::path(&why.s.options.hardware, mesh, from, to) else { return vec![] };
    let steps = found.steps;
    // Of equal layouts nothing was searched: it is not data of another layout that is sent, but another's.
    if steps.is_empty() {
        return vec![];
    }
    let names: Vec<&str> = steps.iter().map(|s| s.op.mnemonic()).collect();
    let sent = ring_bytes(mesh, from, &steps);
    let mut l = vec![format!(
        "{}: {sent} B, the cheapest of {}",
        names.join(", "),
        match found.ways {
            1 => "1 way".into(),
            n => format!("{n} ways"),
        }
    )];
    l.extend(simple(mesh, from, to).filter(|s| s.len() != steps.len()).map(|s| {
        let names: Vec<&str> = s.iter().map(|s| s.op.mnemonic()).collect();
        format!("the simple way, {}: {} B", names.join(", "), ring_bytes(mesh, from, &s))
    }));
    l.extend(
        must_receive(mesh, from, to).map(|b| format!("lower bound: some rank must receive {b} B")),
    );
    l
}

fn reasons(why: &Why, c: &Call) -> Vec<String> {
    let (f, x) = (c.f, c.n.ins[0]);
    let mut l = vec![];
    l.extend(c.n.note.as_ref().map(|n| format!("note: {n}")));
    l.extend(c.n.kept.then(|| "kept: its attributes end with `keep`, so passes leave it".into()));
    let gradients = (0..c.n.ins.len()).filter(|&i| is_gradient(f, c.n, i)).count();
    if gradients > 0 && matches!(c.kind, "all_reduce" | "reduce_scatter") {
        l.push(format!(
            "{}: each rank has its own part of the batch or sequence",
            count(gradients, "gradient", "gradients")
        ));
    }
    l.push(format!("{} comes as {}", f.name(x), type_text(why.mesh, f.ty(x))));
    if let Some(atom) = c.atoms.iter().next() {
        l.extend(why.chain(c.fi, x, atom).into_iter().map(|s| format!("  {s}")));
        let out = c.n.outs[0];
        let chain = why.chain(c.fi, out, atom);
        if c.f.ty(out).sharded().has(atom) && chain.len() > 1 {
            l.push(format!("{} is wanted as {}", f.name(out), type_text(why.mesh, f.ty(out))));
            l.extend(chain.into_iter().skip(1).map(|s| format!("  {s}")));
        }
    }
    l
}

/// The op of forward whose gradient this one is, or the one of backward that is its gradient.
fn mirror(why: &Why, c: &Call, all: &[(usize, usize)]) -> Vec<String> {
    // The functions of the same stage, or of the same rank of the pipeline.
    let of_kinds = |kinds: &'static [FuncKind]| {
        let all = why.plan.module.funcs.iter().enumerate();
        all.filter(move |(_, f)| kinds.contains(&f.kind) && f.stage == c.f.stage)
    };
    const FORWARD: &[FuncKind] = &[FuncKind::Forward];
    const BACKWARD: &[FuncKind] = &[FuncKind::Backward, FuncKind::Weight];
    // What backward makes again has the name that it has in forward.
    let name = c.f.name(c.n.outs[0]);
    let again = of_kinds(FORWARD).any(|(_, f)| f.values.iter().any(|v| v.name == *name));
    let kind = c.f.kind.plain();
    let of_step = (0..c.n.ins.len()).any(|i| is_gradient(c.f, c.n, i));
    let [forward, backward] = [FORWARD, BACKWARD].map(|kinds| !of_step && kinds.contains(&kind));
    let gradient = if backward { !again } else { !forward && name.grad };
    let of = of(c).mirror();
    let other = match gradient {
        _ if forward => BACKWARD,
        true if backward => FORWARD,
        false if backward => return recomputed(why, c, all),
        true if c.n.outs.len() > 1 => {
            let of = if c.kind == "reduce_scatter" { "an all_gather" } else { "a fan_out" };
            return vec![format!(
                "each is the gradient of {of} of its parameter in @step_prologue"
            )];
        }
        true => &[FuncKind::StepPrologue],
        false => return vec![],
    };
    // The gradient of an op stands in the op's scope and is named after the op's operand.
    let named = |a: Value, g: &Func, b: Value| {
        let (a, b) = (c.f.name(a), g.name(b));
        a.hint == b.hint && a.layer == b.layer
    };
    let fits = |g: &Func, n: &Node| {
        let (Some(&x), Some(&y)) = (n.ins.first(), n.outs.first()) else { return false };
        let crossed = match gradient {
            true => named(c.n.outs[0], g, x),
            false => named(c.n.ins[0], g, y),
        };
        let over = n.op.layout().map_or(AtomSet::EMPTY, |l| l.atoms());
        let here = path(g, n.scope) == path(c.f, c.n.scope);
        of.contains(&n.op.mnemonic()) && here && crossed && over == c.atoms
    };
    let nodes = of_kinds(other).flat_map(|(fi, g)| (0..g.nodes.len()).map(move |n| (fi, g, n)));
    let found: Vec<(usize, &Func, usize)> = nodes.filter(|x| fits(x.1, &x.1.nodes[x.2])).collect();
    let [(fi, g, n)] = found[..] else { return vec![] };
    let number = all.iter().position(|&at| at == (fi, n));
    let number = number.map_or(String::new(), |i| format!("collective:{}, ", i + 1));
    let says = if gradient { "it is the gradient of" } else { "its gradient is" };
    vec![format!("{says} {number}`{}` of @{}", words::node(why.mesh, g, &g.nodes[n]), g.name)]
}

/// A collective of forward that backward runs again, because its result was not saved.
fn recomputed(why: &Why, c: &Call, all: &[(usize, usize)]) -> Vec<String> {
    let twin = all.iter().position(|&at| {
        let o = call(why, at);
        o.f.kind == FuncKind::Forward
            && o.n.op == c.n.op
            && path(o.f, o.n.scope) == path(c.f, c.n.scope)
            && o.f.name(o.n.outs[0]) == c.f.name(c.n.outs[0])
    });
    let of = twin.map_or("a collective of forward".into(), |i| format!("collective:{}", i + 1));
    let needs = match c.kind {
        "permute" => "forward saves a rank's own block, backward needs all of them",
        _gathered => "forward saves the pieces, backward needs the whole",
    };
    vec![format!("it is {of} again: {needs}")]
}

fn path(f: &Func, s: Scope) -> &str {
    &f.scope_info(s).path
}

/// The same call in other layers.
fn same(why: &Why, c: &Call, all: &[(usize, usize)], me: (usize, usize)) -> Vec<String> {
    let key = |x: &Call| {
        let info = x.f.scope_info(x.n.scope);
        let layer = info.layer.map(|l| l.to_string()).unwrap_or_default();
        let parts = info.path.split('.').map(|p| if p == layer { "N" } else { p });
        let name = x.f.name(x.n.outs[0]);
        (
            x.fi,
            x.kind,
            x.atoms,
            parts.collect::<Vec<_>>().join("."),
            name.grad,
            name.hint.to_string(),
            name.dup,
        )
    };
    if c.f.scope_info(c.n.scope).layer.is_none() {
        return vec![];
    }
    let mine = key(c);
    let layer = |x: &Call| x.f.scope_info(x.n.scope).layer;
    let others = all.iter().enumerate().filter(|x| *x.1 != me);
    let twins: Vec<String> = others
        .filter_map(|(i, &at)| {
            let o = call(why, at);
            let same = layer(&o) != layer(c) && key(&o) == mine;
            same.then(|| layer(&o).map(|l| format!("collective:{} of layer {l}", i + 1)))?
        })
        .collect();
    if twins.is_empty() { vec![] } else { vec![some(twins, MAX_ITEMS).join(", ")] }
}

/// What would make this collective unnecessary, and at which price.
fn remove(why: &Why, c: &Call) -> Vec<String> {
    let (mesh, o) = (why.mesh, &why.s.options);
    let axis = Experts::of(why.plan).axis(mesh, c.f, c.n, c.atoms);
    // Gathers of a router's weight stand there, too.
    if axis == "ep" && matches!(c.kind, "all_to_all" | "all_to_all_v" | "exchange") {
        let ways = mesh.ways(c.atoms);
        return vec![format!(
            "a smaller ep: with ep=1 each rank holds all experts, {ways} times the weights of experts"
        )];
    }
    let tp = mesh.axis("tp").unwrap_or_default();
    let held: usize = c.n.outs.iter().map(|&v| c.f.ty(v).local_bytes(mesh)).sum();
    let gradient = (0..c.n.ins.len()).any(|i| is_gradient(c.f, c.n, i));
    let mut l = vec![];
    if !why.plan.is_looped(c.fi) && !gradient {
        return vec![format!("a mesh without {axis}: it is a number about all ranks, {held} B")];
    }
    let cp = mesh.axis("cp").unwrap_or_default();
    let shifts = matches!(of(c).sends(), Sends::Boxes { halo: Some(_) });
    if !gradient && !shifts && c.atoms.meets(cp) {
        let others: Vec<&str> = [CpMode::AllGather, CpMode::Ring, CpMode::Ulysses]
            .into_iter()
            .filter(|m| *m != o.cp_mode)
            .map(CpMode::name)
            .collect();
        l.push(format!("--cp-mode {} sends something else", others.join(" or ")));
    }
    let data = c.atoms.minus(tp);
    if !data.is_empty() {
        let (axis, ways) = (mesh.names(data, "+"), mesh.ways(data));
        l.push(format!(
            "a mesh without {axis}: {ways} times the work of a rank for the same batch"
        ));
    }
    let on_grid = o.tp_mode != TpMode::OneD;
    if gradient && c.atoms.meets(tp) && !on_grid {
        let shared = why.s.facts.filter(|f| f.kv_heads < o.axis("tp"));
        l.extend(
            shared.map(|f| format!("tp={} or less: then no two ranks share a KV head", f.kv_heads)),
        );
        l.extend(
            o.sp.then(|| "no --sp: then every rank of tp sees whole sequences at the norms".into()),
        );
    } else if c.atoms.within(tp) {
        l.extend(sequence(why, c, held));
        l.push(format!(
            "a smaller tp: with tp=1 each rank holds {} times the weights",
            o.axis("tp")
        ));
    }
    l
}

/// What sequence parallelism has to do with a collective over tp.
fn sequence(why: &Why, c: &Call, held: usize) -> Option<String> {
    if why.s.options.tp_mode != TpMode::OneD {
        return None; // the sequence is not what a grid splits
    }
    let ways = why.mesh.ways(c.atoms);
    let dim = of(c).dim();
    let ty = c.f.ty(c.n.outs[0]);
    let of_sequence = dim.is_some_and(|d| ty.dims[d].size == why.plan.settings.seq);
    // What flows between layers, and not a number of each token.
    let stream = ty.rank() == 3;
    let gradient = c.f.name(c.n.outs[0]).grad;
    match (why.s.options.sp, c.kind) {
        (true, "all_gather")
            if of_sequence && c.f.kind.plain() == FuncKind::Backward && !gradient =>
        {
            Some(format!(
                "saving the whole in forward: {held} B more per rank, layer and microbatch"
            ))
        }
        (true, _) if of_sequence => Some(format!(
            "no --sp: it and its counterpart become one all_reduce of the bytes of both, and backward gathers nothing \
             again; what is saved between them is {ways} times as large"
        )),
        (false, "all_reduce") if stream => Some(format!(
            "--sp makes it a reduce_scatter and an all_gather of half the bytes each, and backward gathers once more; \
             what is saved between them is 1/{ways} as large"
        )),
        _ => None,
    }
}
