//! Lays mixtures of experts out for the mesh: tokens as one shard per rank that has its own, a buffer for each
//! group of experts that ranks share, as many rows as `--moe-bound` or `--moe-capacity` asks for.
//!
//! Before:  `%tokens = reshape[(ib)sh->i(bs)h; i=1] %normed : f32[1,64,32]`,
//!          `%slot, %counts = route[g=1,e=4; rows=128; capacity=none] %expert : i32[1,64,2], i32[1,4,1]`
//! After:   `%tokens = reshape[(ib)sh->i(bs)h; i=2] %normed : f32[2,32,32]`,
//!          `%slot, %counts = route[g=2,e=2; rows=64; capacity=none] %expert : i32[2,32,2], i32[2,2,2]`
//! Assumes: phase Source, without shardings where tokens go to experts.  Leaves: phase Source.
//!
//! Mixtures are found by ops and letters, whoever wrote them (`region.rs`); one that has a capacity, fewer
//! rows than copies may need, or shards of its own is left as it is: that is what was asked for. So is one of
//! whose tokens ranks cannot have equal parts. A warning names the options that it does not follow. Without a
//! capacity the program means the same as before.

mod region;
mod rows;

use crate::options::{Buffers, Options};
use crate::shard::experts::{AxisPiece, fold};
use region::{End, Kept, Mixture, different, mixtures};
pub(crate) use rows::check_rows;
use shardc_ir::attr::{RuleAttr, Sizes};
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::func::{Annotation, Func, Hint, Name, Node, Port, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Dispatch, Kind, Mixing, Op, Reshape, Route, Transpose};
use shardc_ir::rule::Letter;
use shardc_ir::source::Source;
use shardc_ir::text::{node_text, type_text};
use shardc_ir::types::{MAX_ELEMENTS, Type};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Lays out the experts of a model; `sequence` lists values of the function and follows it. Whether it may have
/// changed, and a warning of options that some mixture does not follow.
///
/// # Errors
/// `experts-mesh` if the mesh cannot be factorised as the options ask, `experts-not-divisible` if experts cannot
/// be cut so; `size`, and those of types, for values that would be too large.
pub fn lay_out(
    mesh: &Mesh,
    f: &mut Func,
    sequence: &mut [(Value, usize)],
    o: &Options,
) -> Result<(bool, Option<Diag>)> {
    if !f.nodes.iter().any(|n| n.op.facts().kind == Kind::Copies) {
        return Ok((false, None));
    }
    let shards = Shards::of(o)?;
    let (mut all, mut kept) = mixtures(f);
    all.retain(|m| match shards.uncut(f, m, o) {
        Some(end) => {
            kept.push(m.kept(f, end));
            false
        }
        None => true,
    });
    let warning = without_effect(mesh, f, &kept, o);
    if all.is_empty() {
        return Ok((false, warning));
    }
    shards.fit(f, &all)?;
    let (new, to) = rewritten(mesh, f, &all, &shards)?;
    sequence.iter_mut().for_each(|x| x.0 = to[&x.0]);
    *f = new;
    Ok((true, warning))
}

/// A warning of the options that ask for what mixtures do not become that stay as they are: the first of them,
/// and why it does.
fn without_effect(mesh: &Mesh, f: &Func, kept: &[Kept], o: &Options) -> Option<Diag> {
    let asks = |k: &Kept| -> Vec<String> {
        let Some(r) = f.nodes[k.route].op.as_route() else { return vec![] };
        let own = r.groups()[0] > 1 && r.groups()[0] == o.ep;
        let ep = (o.ep > 1 && !own).then(|| format!("ep={}", o.ep));
        let etp = o.etp.filter(|&n| n != o.axis("tp") && !own).map(|n| format!("etp={n}"));
        let rows = match o.moe {
            Buffers::Worst => None,
            Buffers::Bound(by) => Some(format!("--moe-bound {by}")),
            Buffers::Capacity(by) => Some(format!("--moe-capacity {by}")),
        };
        ep.into_iter().chain(etp).chain(rows).collect()
    };
    let mut all: Vec<&Kept> = kept.iter().filter(|k| !asks(k).is_empty()).collect();
    all.sort_by_key(|k| k.route);
    let first = *all.first()?;
    let (flags, n) = (asks(first), &f.nodes[first.by]);
    let has = if flags.len() == 1 { "has" } else { "have" };
    let of = count(all.len(), "mixture of experts", "mixtures of experts");
    let path = &f.scope_info(n.scope).path;
    let path = if path.is_empty() { String::new() } else { format!(", {path}") };
    let what = format!("{} {has} no effect on {of}", flags.join(", "));
    Some(
        Diag::new("no-effect", what)
            .at(format!("@{}{path}: {}", f.name, node_text(mesh, f, n).text))
            .rule("tokens are cut if ranks have equal parts of them, and each op takes every token or row of a buffer for itself, or sums over all tokens; a capacity, shards and groups of the text's own stay")
            .help("write this op so, or leave the options out: see docs/passes.md, experts"),
    )
}

/// A source as its plan computes it.
///
/// # Errors
/// Those of [`lay_out`].
pub fn laid_out(mut source: Source, o: &Options) -> Result<Source> {
    let m = &mut source.module;
    if let Some(f) = m.funcs.first_mut() {
        lay_out(&m.mesh, f, &mut source.sequence, o)?;
        crate::states::cut(&m.mesh, f, o.axis("cp"))?;
    }
    Ok(source)
}

/// How the tokens of a microbatch become shards with buffers of their own for each group of experts: a shard is
/// what one rank has.
struct Shards {
    /// Factors that cut the rows of a microbatch, major to minor.
    rows: Vec<usize>,
    /// Factors that cut the tokens of a row.
    seq: Vec<usize>,
    /// The order of all factors, rows before tokens, in which they count the shards.
    order: Vec<usize>,
    /// Groups of experts that share a buffer.
    groups: usize,
    bound: Buffers,
}

/// Most dims of a value.
const MOST_DIMS: usize = 8;

impl Shards {
    fn of(o: &Options) -> Result<Shards> {
        let pieces = fold(o)?;
        let cutting: Vec<_> = pieces.iter().filter(|p| p.cuts_tokens()).collect();
        // Neighbours that stay neighbours are one factor: a tensor has few dims.
        let alike = |a: &&AxisPiece, b: &&AxisPiece| (a.of_rows(), a.part) == (b.of_rows(), b.part);
        let runs: Vec<&[&AxisPiece]> = cutting.chunk_by(alike).collect();
        let factors = |rows: bool| -> Vec<usize> {
            let own = runs.iter().filter(|r| r[0].of_rows() == rows);
            own.map(|r| r.iter().map(|p| p.size).product()).collect()
        };
        let mut order: Vec<usize> = (0..runs.len()).collect();
        order.sort_by_key(|&i| runs[i][0].part);
        let (rows, seq) = (factors(true), factors(false));
        Ok(Shards { rows, seq, order, groups: o.ep.max(1), bound: o.moe })
    }

    /// An end of a mixture that does not have the rows and tokens that the factors cut.
    fn uncut(&self, f: &Func, m: &Mixture, o: &Options) -> Option<usize> {
        let ways: usize = self.seq.iter().product();
        let fits = |&(i, end): &(&usize, &End)| {
            let n = &f.nodes[*i];
            let (rows, shards) = match end {
                End::Cut => (n.ins[0], n.outs[0]),
                End::Join => (n.outs[0], n.ins[0]),
            };
            let (rows, rank) = (f.ty(rows), f.ty(shards).rank());
            let by_token = rows.rank() == rank;
            let seq = match by_token {
                true => rows.dims[1].size == o.seq && o.seq % ways == 0,
                false => self.seq.is_empty(),
            };
            rows.dims[0].size == o.microbatch_rows() && seq
        };
        m.ends.iter().find(|x| !fits(x)).map(|x| *x.0)
    }

    /// Checks that groups divide the experts, and that there are as many dims as factors need.
    fn fit(&self, f: &Func, all: &[Mixture]) -> Result<()> {
        for i in all.iter().flat_map(|m| &m.nodes) {
            let Some(op) = f.nodes[*i].op.as_route() else { continue };
            let experts: usize = op.groups().iter().product();
            if experts % self.groups != 0 {
                let what = format!("{experts} experts are not {} equal groups", self.groups);
                let less = (1..=self.groups.min(experts)).rev().find(|g| experts % g == 0);
                return Err(Diag::new("experts-not-divisible", what)
                    .rule("experts % ep == 0")
                    .help(format!("use ep={}", less.unwrap_or(1))));
            }
        }
        let cut = all.iter().flat_map(|m| &m.ends).map(|x| &f.nodes[*x.0]);
        let dims = cut.map(|n| f.ty(n.ins[0]).rank().max(f.ty(n.outs[0]).rank())).max();
        let factors = self.order.len();
        if factors + dims.unwrap_or(0) > MOST_DIMS {
            let what = format!("{factors} parts of axes would cut the tokens of experts");
            return Err(Diag::new("experts-mesh", what)
                .rule(format!("a tensor has at most {MOST_DIMS} dims"))
                .help("give fewer axes, or ep and etp that take whole axes"));
        }
        Ok(())
    }

    /// Rows of a buffer for the tokens of a shard, each with k experts, and the copies that an expert keeps. Only if
    /// the experts of a token are different, an expert has at most one copy of it.
    fn buffer(
        &self,
        [tokens, k]: [usize; 2],
        experts: usize,
        different: bool,
    ) -> (usize, Option<usize>) {
        let each = if different { 1 } else { k };
        let worst = tokens * k.min(each * (experts / self.groups));
        let share = |by: f64, among: usize| {
            let n = (by * (tokens * k) as f64 / among as f64).ceil();
            (n as usize).max(1)
        };
        match self.bound {
            Buffers::Worst => (worst, None),
            Buffers::Bound(by) => (share(by, self.groups).min(worst), None),
            Buffers::Capacity(by) => {
                let own = share(by, experts).min(tokens * each);
                ((own * (experts / self.groups)).min(worst), Some(own))
            }
        }
    }

    /// The reshapes, and a transpose if shards are counted in another order, that an end becomes.
    fn end(&self, f: &Func, n: &Node, end: End) -> Vec<Op> {
        let Op::Reshape(old) = &n.op else { return vec![n.op.clone()] };
        let (rows, shards) = match end {
            End::Cut => (&old.rule.0.ins[0], &old.rule.0.outs[0]),
            End::Join => (&old.rule.0.outs[0], &old.rule.0.ins[0]),
        };
        // Behind the letter that counts what was one shard.
        let own: Vec<Letter> = rows.iter().flat_map(|g| g.letters()).skip(1).copied().collect();
        let by_token = rows.len() == shards.len();
        let one = [1];
        let by_row = if self.order.is_empty() { &one[..] } else { &self.rows[..] };
        let factors = ('i'..='z').chain('a'..='h').map(|c| Letter(c as u8 - b'a'));
        let factors = factors.filter(|l| !own.contains(l));
        let counts = by_row.iter().chain(&self.seq).copied();
        let mut sizes: Vec<(Letter, usize)> = factors.zip(counts).collect();
        let names = |all: &[Letter]| all.iter().map(|l| l.name()).collect::<String>();
        let all: Vec<Letter> = sizes.iter().map(|x| x.0).collect();
        let (r, s) = all.split_at(by_row.len());
        let (inner, rest) = own.split_at(if by_token { 2 } else { 1 });
        let ordered = match self.order[..] {
            [] => names(&all),
            _ => self.order.iter().map(|&i| all[i].name()).collect(),
        };
        let (r, s, inner, rest) = (names(r), names(s), names(inner), names(rest));
        let (b, t) = inner.split_at(1);
        let apart = format!("{r}{b}{s}{t}{rest}");
        let moved = format!("{ordered}{inner}{rest}");
        let source = format!("{}{}{rest}", group(&format!("{r}{b}")), group(&format!("{s}{t}")));
        let cut = format!("{}{}{rest}", group(&ordered), group(&inner));
        if end == End::Join && by_token {
            let ways: usize = by_row.iter().product();
            sizes.push((own[0], f.ty(n.outs[0]).dims[0].size / ways));
        }
        let reshape = |from: &str, to: &str, sizes: &[(Letter, usize)]| {
            Op::from(Reshape { rule: between(from, to), sizes: Sizes(sizes.into()) })
        };
        let turn = |from: &str, to: &str| Op::from(Transpose { rule: between(from, to) });
        match end {
            End::Cut if apart == moved => vec![reshape(&source, &cut, &sizes)],
            End::Join if apart == moved => vec![reshape(&cut, &source, &sizes)],
            End::Cut => vec![
                reshape(&source, &apart, &sizes),
                turn(&apart, &moved),
                reshape(&moved, &cut, &[]),
            ],
            End::Join => vec![
                reshape(&cut, &moved, &sizes),
                turn(&moved, &apart),
                reshape(&apart, &source, &[]),
            ],
        }
    }
}

/// One dim of these letters, if there are any.
fn group(letters: &str) -> String {
    if letters.len() < 2 { letters.into() } else { format!("({letters})") }
}

/// The letter rule between these dims.
fn between(from: &str, to: &str) -> RuleAttr {
    let parts = from.split('(').map(|p| p.split_once(')').map_or(p.len(), |(_, p)| 1 + p.len()));
    RuleAttr::new(&format!("{from}->{to}"), &[parts.sum()])
}

/// A function while it is written again, its values in the order of its text.
struct ExpertsWriter<'a> {
    mesh: &'a Mesh,
    old: &'a Func,
    new: Func,
    to: BTreeMap<Value, Value>,
    /// Names of which there are more than before: all of them are numbered again.
    more: BTreeSet<(Option<u32>, Hint)>,
}

/// The function with these mixtures laid out, and what became of its values.
///
/// # Errors
/// `size`, and those of types, for a value that would be too large.
fn rewritten(
    mesh: &Mesh,
    f: &Func,
    all: &[Mixture],
    shards: &Shards,
) -> Result<(Func, BTreeMap<Value, Value>)> {
    let ends: BTreeMap<usize, Vec<Op>> = all
        .iter()
        .flat_map(|m| &m.ends)
        .map(|(&i, end)| (i, shards.end(f, &f.nodes[i], *end)))
        .collect();
    let inside: BTreeSet<usize> = all.iter().flat_map(|m| m.nodes.iter().copied()).collect();
    let more = ends.iter().filter(|(_, ops)| ops.len() > 1).map(|(&i, _)| {
        let name = f.name(f.nodes[i].outs[0]);
        (name.layer, name.hint)
    });
    let mut new = f.like(f.kind, f.stage, 1);
    new.name.clone_from(&f.name);
    let mut w = ExpertsWriter { mesh, old: f, new, to: BTreeMap::new(), more: more.collect() };
    for a in &f.args {
        w.copied(a.value);
    }
    for (i, n) in f.nodes.iter().enumerate() {
        match ends.get(&i) {
            Some(ops) => w.chain(n, ops)?,
            None if inside.contains(&i) => {
                let op = w.with(n, shards);
                w.node(n, op)?;
            }
            None => {
                n.outs.iter().for_each(|&v| w.copied(v));
                w.append(n, n.op.clone());
            }
        }
    }
    // What was dropped already may still be named.
    for v in (0..f.values.len()).map(|v| Value(v as u32)) {
        if !w.to.contains_key(&v) {
            w.copied(v);
        }
    }
    let ExpertsWriter { mut new, to, .. } = w;
    let port = |p: &Port| Port { value: to[&p.value], role: p.role.clone() };
    new.args = f.args.iter().map(port).collect();
    new.results = f.results.iter().map(port).collect();
    let note = |(v, a): (&Value, &Annotation)| (to[v], a.clone());
    new.annotations = f.annotations.iter().map(note).collect();
    Ok((new, to))
}

impl ExpertsWriter<'_> {
    /// The name that a value has, or one for which its number is still to be found.
    fn named(&self, v: Value) -> Name {
        let name = self.old.name(v).clone();
        let again = self.more.contains(&(name.layer, name.hint));
        if again { Name { dup: 0, ..name } } else { name }
    }

    fn copied(&mut self, v: Value) {
        let (ty, name) = (self.old.ty(v).clone(), self.named(v));
        let new = self.new.value(ty, name);
        self.to.insert(v, new);
    }

    /// A node whose results are there.
    fn append(&mut self, n: &Node, op: Op) {
        let ins = n.ins.iter().map(|v| self.to[v]).collect();
        let outs = n.outs.iter().map(|v| self.to[v]).collect();
        self.new.nodes.push(Node { op, ins, outs, ..n.clone() });
    }

    /// Types of the results of an op that takes the place of this node, or is a part of it.
    ///
    /// # Errors
    /// `size` if one has more elements than a value may have, and those of the op.
    fn typed(&self, n: &Node, op: &Op, ins: &[&Type]) -> Result<SmallVec<[Type; 2]>> {
        let refused = |code, what: String| {
            let name = self.old.name(n.outs[0]);
            Diag::new(code, format!("`{name}`, with its experts laid out for the mesh, {what}"))
                .at(format!("@{}: {}", self.old.name, node_text(self.mesh, self.old, n).text))
        };
        let types = op
            .check(self.mesh, ins, &[])
            .map_err(|e| refused(e.code, format!("is refused: {}", e.message)).help(e.help))?;
        let elements =
            |t: &Type| t.dims.iter().fold(1usize, |n, d| n.saturating_mul(d.size.max(1)));
        match types.iter().find(|t| elements(t) > MAX_ELEMENTS) {
            None => Ok(types),
            Some(t) => {
                let what = format!("is too large: {}", type_text(self.mesh, t));
                Err(refused("size", what)
                    .rule(format!("elements <= {MAX_ELEMENTS}"))
                    .help("use a smaller ep, or --moe-bound 1: buffers have rows for every shard of tokens"))
            }
        }
    }

    /// A node of a mixture, whose results have other sizes.
    fn node(&mut self, n: &Node, op: Op) -> Result<()> {
        let ins: Vec<_> = n.ins.iter().map(|v| self.new.ty(self.to[v])).collect();
        let types = self.typed(n, &op, &ins)?;
        for (&v, ty) in n.outs.iter().zip(types) {
            let new = self.new.value(ty, self.named(v));
            self.to.insert(v, new);
        }
        self.append(n, op);
        Ok(())
    }

    /// Nodes in place of one, each of what the one before it made.
    fn chain(&mut self, n: &Node, ops: &[Op]) -> Result<()> {
        let out = n.outs[0];
        let mut x = self.to[&n.ins[0]];
        for op in ops {
            let ty = self.typed(n, op, &[self.new.ty(x)])?.swap_remove(0);
            let (from, name) = (x, self.named(out));
            x = self.new.value(ty, name);
            let (ins, outs) = ([from].into_iter().collect(), [x].into_iter().collect());
            self.new.nodes.push(Node { op: op.clone(), ins, outs, ..n.clone() });
        }
        self.to.insert(out, x);
        Ok(())
    }

    /// The op of a node, with the groups and rows that its shards need.
    fn with(&self, n: &Node, shards: &Shards) -> Op {
        match n.op.mixing() {
            Some(Mixing::Route(op)) => {
                let index = self.new.ty(self.to[&n.ins[0]]);
                let experts: usize = op.groups().iter().product();
                let sizes = [1, 2].map(|d| index.dims[d].size);
                let maker = |v: Value| self.old.nodes.iter().find(|m| m.outs.contains(&v));
                let different = different(n.ins[0], &maker);
                let (rows, capacity) = shards.buffer(sizes, experts, different);
                Route::new(shards.groups, experts / shards.groups, rows, capacity).into()
            }
            Some(Mixing::Dispatch) => {
                let route = self.new.nodes.iter().rev().find(|m| m.outs[0] == self.to[&n.ins[1]]);
                let rows = route.and_then(|m| m.op.as_route()).map_or(1, |r| r.rows);
                Dispatch::new(shards.groups, rows).into()
            }
            Some(Mixing::Product | Mixing::Unpermute) | None => n.op.clone(),
        }
    }
}
